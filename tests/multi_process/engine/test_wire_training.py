"""What rounding does to training, on text and on images: L8 and L9, by number.

Two ranks are simulated in this process, with the wire's own arithmetic, so that a run takes seconds.
"""

from __future__ import annotations

import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_dp.demos.bytes import BytesModule
from lightning_dp.engine.wires.codec import Codec, Half, Int8, add_others, encode_others
from tests.support.programs import ROOT

RANKS, BLOCK = 2, 256


class Int2(Int8):
    """Control: codes of -1, 0 and 1."""

    def encode(self, values, rows):
        super().encode(values, rows)
        codes, _ = self._parts(rows, values.shape[1])
        codes.copy_((codes.float() / 127).round() * 127)


CODECS: dict[str, Codec | None] = {
    "fp32": None,
    "bf16": Half(torch.bfloat16),
    "int8": Int8(BLOCK),
    "int2": Int2(BLOCK),
}


def mean(local: list[torch.Tensor], codec: Codec | None) -> torch.Tensor:
    """The mean of local gradients, shape ``(n,)``, as ranks find it on this wire."""
    if codec is None:
        return torch.stack(local).mean(0)
    n = -(-local[0].numel() // BLOCK) * BLOCK
    rows = torch.empty_like(codec.message(len(local), n), device="cpu")
    padded = torch.stack(
        [nn.functional.pad(grad / len(local), (0, n - grad.numel())) for grad in local]
    )
    total = padded[0].clone()  # rank 0 adds all of it, its own as it is
    encode_others(codec, padded, rows, 0)
    add_others(codec, rows, total, 0)
    codec.encode(total.unsqueeze(0), rows[:1])
    codec.decode(rows[:1], total.unsqueeze(0))
    return total[: local[0].numel()]


def train(module, optimizer, loss_of, steps, codec) -> None:
    """``loss_of(module, step, rank)`` of each rank; the mean of their gradients is applied."""
    parameters = list(module.parameters())
    for step in range(steps):
        local = []
        for rank in range(RANKS):
            optimizer.zero_grad()
            loss_of(module, step, rank).backward()
            local.append(torch.cat([p.grad.flatten() for p in parameters]))
        parts = mean(local, codec).split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()


def bits_per_byte(codec: Codec | None) -> float:
    """Of a small GPT on this project's own text, after AdamW's first steps."""
    text = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    module = BytesModule(width=32, depth=1, num_heads=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    def windows(seed: int, count: int) -> torch.Tensor:
        starts = torch.randint(
            len(text) - 33, (count,), generator=torch.Generator().manual_seed(seed)
        )
        return torch.stack([text[start : start + 33] for start in starts])

    def loss_of(model, step, rank):
        batch = windows(RANKS * step + rank, 8)
        return nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    train(module, optimizer, loss_of, 120, codec)
    with torch.no_grad():
        batch = windows(10**6, 256)
        loss = nn.functional.cross_entropy(module(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
    return float(loss) / 0.6931


def test_L8_bytes_learn_as_well_in_8_bits_and_not_in_2():
    bits = {name: bits_per_byte(codec) for name, codec in CODECS.items()}
    assert bits["bf16"] < bits["fp32"] * 1.003, bits
    assert bits["int8"] < bits["fp32"] * 1.005, bits
    assert bits["int2"] > bits["fp32"] * 1.02, "control"


def accuracy(codec: Codec | None, seed: int) -> float:
    """Of a small network on digits that it has not seen."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)

    def loss_of(model, step, rank):
        generator = torch.Generator().manual_seed(10_000 * seed + RANKS * step + rank)
        rows = torch.randint(1300, (32,), generator=generator)
        return nn.functional.cross_entropy(model(x[rows]), y[rows])

    train(module, optimizer, loss_of, 200, codec)
    with torch.no_grad():
        return float((module(x[1300:]).argmax(1) == y[1300:]).float().mean())


def test_L9_digits_are_as_accurate_within_the_spread_of_seeds():
    exact = [accuracy(None, seed) for seed in range(4)]
    spread = max(0.01, max(exact) - min(exact))
    assert min(exact) > 0.85
    for name in ("bf16", "int8"):
        found = [accuracy(CODECS[name], seed) for seed in range(3)]
        assert abs(statistics.mean(found) - statistics.mean(exact)) <= spread, (name, found, exact)
