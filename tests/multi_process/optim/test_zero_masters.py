"""Z22: parameters of half precision with masters in fp32, of which each rank keeps its share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.engine.bucket import Slicing
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.optim.exchange import MASTER
from tests.multi_process.optim.test_step_bits import Matrices, assert_same_bytes, batches, shards
from tests.multi_process.optim.test_step_bits import Net as Odd
from tests.multi_process.optim.test_zero_parts import Records, run
from tests.multi_process.optim.test_zero_trainer import Net
from tests.support.logs import log_lines
from tests.support.parity import Harness, assert_equal_on_all_ranks, make_group, seeded
from tests.support.ranks import run_ranks
from tests.support.trainers import ddp, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

STEPS = 200


def _train(
    module: nn.Module,
    make: Callable[[list[Tensor]], Optimizer],
    group: ReplicaGroup,
    steps: int,
    *,
    masters: bool,
) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """Parameters, the whole state on rank 0, and masters by name; without shares, of copies in fp32."""
    options = LayoutOptions(
        cap_bytes=4096, first_bytes=1024, last_bytes=1024, slicing=Slicing(group.world_size)
    )
    named = dict(module.named_parameters())
    copies = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = make([*(named if masters else copies).values()])
    with Harness(module, options=options, group=group) as harness:
        (sharded,) = shards(harness, [optimizer], masters=masters)
        if not masters:
            sharded.close()
        for x, use in batches(module, group.rank, steps):
            optimizer.zero_grad()
            module.zero_grad()
            loss = module(x.bfloat16(), use).float().square().mean()
            harness.before_step()
            harness.backward(loss)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            if not masters:
                for name, wide in copies.items():
                    grad = named[name].grad
                    wide.grad = grad.float() if grad is not None else None
            optimizer.step()
            if not masters:
                with torch.no_grad():
                    for name, wide in copies.items():
                        named[name].copy_(wide)
        if not masters:
            return named, optimizer.state_dict(), dict(copies)
        held = {len(s) for p, s in optimizer.state.items() if MASTER in s}
        assert held, "no masters"
        whole = copy.deepcopy(sharded.state_dict(group))
        found = {n: s.pop(MASTER) for n, s in whole.get("state", {}).items() if MASTER in s}
        sharded.close()
        return named, whole, {name: found[n] for n, name in enumerate(named) if n in found}


MAKES: dict[str, tuple[type[nn.Module], Callable[[list[Tensor]], Optimizer], int]] = {
    "AdamW": (Odd, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1), STEPS),
    "fused": (Odd, lambda p: torch.optim.AdamW(p, 0.01, fused=True, amsgrad=True), 20),
    "loop": (Odd, lambda p: torch.optim.NAdam(p, 0.01, foreach=False), 20),
    "no state": (Odd, lambda p: torch.optim.SGD(p, 0.01), 20),
    "Muon": (Matrices, lambda p: torch.optim.Muon(p, 0.01), 20),
}


def _bits(rank: int, world_size: int) -> None:
    group = make_group()
    for name, (net, make, steps) in MAKES.items():
        steps = steps if world_size == 2 else min(steps, 20)  # one long run
        module = seeded(net).bfloat16()
        twin = copy.deepcopy(module)
        parameters, state, masters = _train(module, make, group, steps, masters=True)
        expected, plain, copies = _train(twin, make, group, steps, masters=False)
        assert_same_bytes(parameters, expected, name)
        assert_equal_on_all_ranks(parameters)
        if rank != 0:
            continue
        assert any((m != m.bfloat16()).any() for m in masters.values()), "control: nothing to keep"
        for key, master in masters.items():
            assert torch.equal(master, copies[key]), f"{name}: {key}"
        trained = {n: s for n, s in state["state"].items() if s}
        for number, values in trained.items():
            for key, value in values.items():
                torch.testing.assert_close(value, plain["state"][number][key], rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_z22_as_fp32_whose_forward_uses_rounded_weights(world_size):
    run_ranks(_bits, world_size, timeout_s=120)


class Half(Net):
    """In bfloat16, with a scale in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        self.scale = nn.Parameter(torch.ones(11))

    def loss(self, x: Tensor, use: bool = False) -> Tensor:
        x = self.body(x.bfloat16()).tanh() * self.scale.bfloat16()
        return (self.head(self.maybe(x) if use else x).float() - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.003)


class Puts(Records):
    """Also takes a state back by hand, once, and changes a weight."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 1 and args[-1] == 2:
            (optimizer,) = trainer.optimizers
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                module.head.bias.fill_(0.25)


def _masters(form: str, gather: str = "step", **options: Any) -> Any:
    zero = {"masters": True, "format": form, "gather": gather}
    # A check would wait for parameters that are on their way.
    check = int(gather == "step")
    return lean(zero=zero, shared_memory=False, check_replicas_every_n_steps=check, **options)


FORMATS = ("plain", "sharded")


def _save(rank: int, world: int, port: int, folder: Path) -> Any:
    found = []
    for form in FORMATS:
        records = Puts(folder / f"{form}.ckpt", 6)
        lines = log_lines()
        found.append(run(rank, world, port, Half, _masters(form), records))
        assert not any("needs no masters" in line for line in lines)
    records = Puts(folder / "forward.ckpt", 6)
    found.append(run(rank, world, port, Half, _masters("sharded", "forward"), records))
    assert_same_bytes(found[0], found[1], "formats")
    assert_same_bytes(found[0], found[2], "gathered while the next forward runs")
    for form in (*FORMATS, "forward"):
        other = _masters(FORMATS[form == "plain"], "forward" if form == "forward" else "step")
        losses, weights = run(rank, world, port, Half, other, Records(), folder / f"{form}.ckpt")
        assert_same_bytes(weights, found[0][1], form)
        assert losses == found[0][0][6:]
    if rank == 0:
        file = torch.load(folder / "plain.ckpt")
        assert {key for s in file["optimizer_states"][0]["state"].values() for key in s} == {
            *("step", "exp_avg", "exp_avg_sq")
        }
        names = [name for name, _ in Half().named_parameters()]
        masters = {names[n]: m for n, m in file["lean_ddp"]["masters"][0].items()}
        assert "scale" not in masters
        for name, master in masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), file["state_dict"][name]), name
        assert any((m != m.bfloat16()).any() for m in masters.values())
    return found[0]


def _go_on(rank: int, world: int, port: int, folder: Path) -> Any:
    found = {}
    for form in FORMATS:
        path = folder / f"{form}.ckpt"
        again = folder / f"again-{world}-{form}.ckpt"
        found[form] = run(rank, world, port, Half, _masters(form), Records(again, 2), path)
        if rank == 0 and form == "plain":
            masters = torch.load(again)["lean_ddp"]["masters"][0]
            assert any((m != m.bfloat16()).any() for m in masters.values()), world
    lines = log_lines()
    run(rank, world, port, Half, lean(), Records(), folder / "sharded.ckpt")
    assert any("masters" in line for line in lines) == (rank == 0)
    if world == 2:
        path, hidden = folder / "forward.ckpt", _masters("plain", "forward")
        hides = run(rank, world, port, Half, hidden, Records(), path)
        assert_same_bytes(hides, found["sharded"], "saved and gone on while parameters come back")
        strategy = ddp(find_unused_parameters=True)
        run(rank, world, port, Half, strategy, Records(), folder / "plain.ckpt")
        wire = _masters("plain", wire="int8")
        # What the norm is summed from, and so its last digit, follows from the buckets.
        more = {"gradient_clip_val": 0.5}
        run(rank, world, port, Half, wire, Records(), folder / "plain.ckpt", **more)
    return found


def test_z22_in_windows_saved_by_three_ranks_goes_on_in_any_number(tmp_path):
    losses, weights = ranks(_save, 3, tmp_path, timeout_s=120)[0]
    for world in (1, 2, 4):
        for curve, final in ranks(_go_on, world, tmp_path, timeout_s=120)[0].values():
            # Gradients are rounded after sums in another order.
            torch.testing.assert_close(
                torch.tensor(curve), torch.tensor(losses[6:]), rtol=0.02, atol=0.01
            )
            torch.testing.assert_close(final, weights, rtol=0.05, atol=0.02)
