"""Z16, Z17, Z19: parameters that come back in the next forward have their new values whoever reads them."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from lightning_dp.engine.bucket import Slicing
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.errors import RankFailedError
from lightning_dp.optim import guard
from lightning_dp.optim.exchange import Exchange
from lightning_dp.optim.forward import ForwardGather
from lightning_dp.optim.gather import BucketGather
from lightning_dp.optim.kinds import Sharding
from lightning_dp.optim.sharded import ShardedOptimizer
from lightning_dp.optim.shares import Shares
from tests.multi_process.optim import test_zero_trainer as by_trainer
from tests.multi_process.optim.test_step_bits import assert_same_bytes
from tests.multi_process.optim.test_zero_failures import SOON_S, Boom, _kill, _raise
from tests.support.logs import log_lines
from tests.support.parity import Harness, assert_equal_on_all_ranks, make_group, seeded
from tests.support.ranks import both_worlds, run_ranks
from tests.support.trainers import Rows, fit, lean, ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the same logic on every device")]

X = torch.linspace(-1, 1, 24).view(3, 8)
PARTS = (
    *("lin", "mha", "encoder", "lstm", "conv", "norm", "table", "bag"),
    *("weight_norm", "spectral_norm", "tied"),
)


class Net(nn.Module):
    """Layers that read their parameters in all ways of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mha = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.lstm, self.conv, self.norm = nn.LSTM(8, 8), nn.Conv1d(3, 3, 3), nn.LayerNorm(8)
        self.table, self.bag = nn.Embedding(8, 8, max_norm=1.0), nn.EmbeddingBag(8, 8)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral_norm = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.lin.weight
        self.gain = nn.Parameter(torch.ones(()))

    def part(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        if name == "mha":
            return layer(x, x, x)[0]
        if name == "lstm":
            return layer(x)[0]
        if name == "encoder":
            return layer(x[None])
        if name in ("table", "bag"):
            return layer(torch.tensor([[1, 2, 5]]))
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.part(name, x).square().sum() for name in PARTS) * self.gain  # type: ignore[return-value]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class ByNumpy(Doubled):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return torch.from_numpy(w.detach().numpy() * 2)


@torch.jit.script
def scripted(w: Tensor) -> Tensor:
    return w * 2


def _no_grad(m: Net) -> Any:
    m.eval()
    with torch.no_grad():
        return m.part("encoder", X)


def _autocast(m: Net) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.lin(X)


def _raw(m: Net) -> Any:
    address = m.lin.weight.data_ptr()
    return list((ctypes.c_float * 64).from_address(address))


def _saved(m: Net) -> Any:
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _averaged(m: Net) -> Any:
    mean = AveragedModel(m)
    mean.update_parameters(m)
    return mean.state_dict()


def _in_child(m: Net) -> Any:
    """A process that is forked now."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, pickle.dumps(m.lin.weight.detach().numpy()))
        os._exit(0)
    os.waitpid(pid, 0)
    return torch.from_numpy(pickle.loads(os.read(read, 4096)))


def _swapped(m: Net) -> Any:
    other = nn.Parameter(torch.zeros(8, 8))
    torch.utils.swap_tensors(m.conv.weight, other)
    found = other.detach().clone()
    torch.utils.swap_tensors(m.conv.weight, other)
    return found


def _copied_in(m: Net) -> Any:
    target = torch.zeros(8, 8)
    with torch.no_grad():
        target[:] = m.lin.weight
        return target, torch.add(target, 0, out=torch.empty(8, 8)).copy_(m.lin.weight)


def _to_all(m: Net) -> Any:
    """A user's own collective of the parameter itself."""
    parts = [torch.empty(8, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, m.lin.weight.requires_grad_(False))
    m.lin.weight.requires_grad_(True)
    return parts


def _assigned(m: Net) -> Any:
    """Half of it is the user's value from now on, half the step's."""
    with torch.no_grad():
        m.lin.weight[:4] = 7.0
    return m.lin.weight.detach().clone()


# How a parameter can be read, each in a function of its own; what it returns must be what it is elsewhere.
READINGS: dict[str, Callable[[Net], Any]] = {
    **{name: lambda m, name=name: m.part(name, X) for name in PARTS},
    "attention without autograd": _no_grad,
    "another module's weight": lambda m: F.linear(X, m.lin.weight),
    "autocast": _autocast,
    "functional_call": lambda m: torch.func.functional_call(
        m.lin, dict(m.lin.named_parameters()), X
    ),
    "func.grad": lambda m: torch.func.grad(lambda w: (X @ w).square().sum())(m.lin.weight),
    "func.jacrev": lambda m: torch.func.jacrev(lambda w: w.square().sum())(m.lin.weight),
    "func.jvp": lambda m: torch.func.jvp(lambda w: w * 2, (m.lin.weight,), (torch.ones(8, 8),)),
    "vmap": lambda m: torch.vmap(lambda w: w * 2)(m.lin.weight),
    "functionalize": lambda m: torch.func.functionalize(lambda w: w * 2)(m.lin.weight),
    "autograd.Function": lambda m: Doubled.apply(m.lin.weight),
    "autograd.Function through numpy": lambda m: ByNumpy.apply(m.lin.weight),
    "torch.ops": lambda m: torch.ops.aten.mul(m.lin.weight, 2),
    "torch.ops, overload": lambda m: torch.ops.aten.mul.Tensor(m.lin.weight, 2),
    "scripted function": lambda m: scripted(m.lin.weight),
    "recomputed": lambda m: checkpoint(m.lin, X, use_reentrant=False),
    "another thread": lambda m: ThreadPoolExecutor(1).submit(lambda: m.lin.weight * 2).result(),
    "deepcopy": lambda m: dict(copy.deepcopy(m).state_dict()),
    "copy of one": lambda m: copy.copy(m.lin.weight),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.lin)).state_dict(),
    "torch.save": _saved,
    "state_dict": lambda m: {k: v.clone() for k, v in m.state_dict().items()},
    "averaged model": _averaged,
    "data": lambda m: m.lin.weight.data.clone(),
    "detach, numpy": lambda m: m.lin.weight.detach().numpy().copy().tolist(),
    "data_ptr": _raw,
    "tolist": lambda m: m.lin.weight.tolist(),
    "item": lambda m: float(m.lin.bias[3]),
    "repr": lambda m: repr(m.lin.weight),
    "iteration": lambda m: [row.clone() for row in m.lin.weight],
    "list of parameters": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "DLPack": lambda m: torch.utils.dlpack.from_dlpack(
        torch.utils.dlpack.to_dlpack(m.lin.weight)
    ).clone(),
    "torch.tensor": lambda m: torch.tensor(m.lin.bias),
    "torch.as_tensor": lambda m: torch.as_tensor(m.lin.weight).clone(),
    "nested tensor": lambda m: torch.nested.nested_tensor([m.lin.bias, m.lin.bias]).unbind()[0],
    "nn.Parameter": lambda m: nn.Parameter(m.lin.weight).detach().clone(),
    "as_subclass": lambda m: m.lin.weight.as_subclass(Tensor).clone(),
    "make_subclass": lambda m: Tensor._make_subclass(Tensor, m.lin.weight).clone(),
    "new_tensor": lambda m: X.new_tensor(m.lin.bias),
    "sparse values": lambda m: torch.sparse_coo_tensor([list(range(8))], m.lin.bias).to_dense(),
    "swap_tensors": _swapped,
    "copied into a tensor": _copied_in,
    "compared": lambda m: torch.equal(m.lin.weight, m.tied.weight) and m.lin.weight.sum().item(),
    "a forked process": _in_child,
    "a collective": _to_all,
    "assigned in part": _assigned,
}
# What somebody made before the step; read after it.
EARLIER: dict[str, Callable[[Net], Callable[[], Any]]] = {
    "alias": lambda m: (lambda alias: alias.clone)(m.lin.weight.detach()),
    "transposed view": lambda m: (lambda alias: lambda: alias * 2)(m.lin.weight.detach().t()),
    "numpy array": lambda m: (lambda array: array.tolist)(m.lin.weight.detach().numpy()),
    "scripted module": lambda m: (lambda s: lambda: s(X))(torch.jit.script(m.lin)),
    "traced module": lambda m: (lambda s: lambda: s(X))(torch.jit.trace(m.lin, X)),
    "scripted method": lambda m: (lambda s: lambda: s.forward(X))(torch.jit.script(m.lin)),
}


class Run:
    """``Net`` in shares, and its twin, which steps whole."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.module = seeded(Net)
        options = LayoutOptions(
            cap_bytes=1500, first_bytes=512, last_bytes=512, slicing=Slicing(group.world_size)
        )
        harness = self.harness = Harness(self.module, options=options, group=group)
        for slot in harness.reducer.registry.slots:
            slot.sliced = True
        harness.before_step()
        harness.backward(self.module(X))
        self.twin = copy.deepcopy(self.module)
        shares = Shares(
            harness.reducer.layout, group.rank, group.world_size, lambda _: Sharding.SLICES
        )
        self.gather = ForwardGather.connect(shares, group)
        self.optimizer, self.plain = (
            torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (self.module, self.twin)
        )
        self.sharded = ShardedOptimizer(self.optimizer, 0, shares, self.gather, group)

    def step(self) -> None:
        """The same step of both; the module's values are on their way then."""
        for module, optimizer in ((self.module, self.optimizer), (self.twin, self.plain)):
            for n, parameter in enumerate(module.parameters()):
                torch.manual_seed(n)
                parameter.grad = torch.randn(parameter.shape)
            module.train()
            optimizer.step()

    def close(self) -> None:
        self.sharded.close()
        self.gather.close()
        self.harness.reducer.close()


def _flat(value: Any) -> Any:
    """Tensors without autograd, in plain containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _flat(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_flat(each) for each in value]
    return value


def _differ(a: Any, b: Any) -> bool:
    try:
        assert_same_bytes(a, b, "")
    except AssertionError:
        return True
    return False


def _read_all(run: Run, *, mend: bool = False) -> Iterator[tuple[str, bool, Any, Any]]:
    """Yield each reading: its name, whether values were on their way before it, what both modules gave.

    ``mend``: afterwards what a stale value has led to is set right.
    """

    def end() -> None:
        run.gather.finish()
        if mend:
            run.module.load_state_dict(run.twin.state_dict())

    for name, read in READINGS.items():
        run.step()
        waits = bool(run.gather._under_way)
        yield name, waits, _flat(read(run.module)), _flat(read(run.twin))
        end()
    for name, make in EARLIER.items():
        later = make(run.module), make(run.twin)
        run.step()
        waits = bool(run.gather._under_way)
        yield name, waits, *(_flat(each()) for each in later)
        del later
        end()


@contextmanager
def _guard_off() -> Iterator[None]:
    before = guard.await_value, guard.seen_alone, guard.can_await
    guard.await_value = lambda *_: None
    guard.seen_alone = lambda *_: lambda *_: True
    guard.can_await = lambda *_: True
    try:
        yield
    finally:
        guard.await_value, guard.seen_alone, guard.can_await = before


def _z16(rank: int, world_size: int) -> tuple[int, set[str]]:
    run = Run(make_group())
    count = 0
    for name, waits, value, expected in _read_all(run):
        assert waits, name
        assert_same_bytes(value, expected, name)
        count += 1
    assert_same_bytes(run.module.state_dict(), run.twin.state_dict(), "at the end")
    assert {type(p) for p in run.module.parameters()} == {nn.Parameter}
    with _guard_off():
        read = _read_all(run, mend=True) if world_size == 2 else iter(())
        stale = {name for name, _, value, expected in read if _differ(value, expected)}
    run.step()
    run.close()
    assert {type(p) for p in run.module.parameters()} == {nn.Parameter}
    assert_same_bytes(run.module.state_dict(), run.twin.state_dict(), "closed")
    return count, stale


@both_worlds
def test_z16_every_reading_sees_the_new_value(world_size):
    """Control, on two: without the guard each is stale on some rank, but in a fork, which waits for all."""
    by_rank = run_ranks(_z16, world_size, timeout_s=120)
    everything = {*READINGS, *EARLIER}
    assert by_rank[0][0] == len(everything)
    if world_size == 2:
        stale = set().union(*(theirs for _, theirs in by_rank))
        assert everything - stale == {"a forked process"}


def _what_asks_no_value(rank: int, world_size: int) -> None:
    """Asking for a gradient or a shape ends no hiding; an older graph is refused as after a step."""
    run = Run(make_group())
    weight = run.module.lin.weight
    old = (weight * weight).sum()
    run.step()
    before = len(run.gather._under_way)
    assert before > 3
    for parameter in run.module.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        parameter.grad = None
        assert (parameter.shape, parameter.dtype, parameter.requires_grad) is not None
        hash(parameter)
    run.module.zero_grad()
    assert len(run.gather._under_way) == before
    next(p for p in run.module.parameters() if type(p) is guard.Awaited).sum()
    assert 0 < len(run.gather._under_way) < before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(old, [weight])
    values = [p.detach().clone() for p in run.twin.parameters()]
    for _ in range(3):  # steps without a forward between them
        run.step()
    assert any(_differ(a, b.detach()) for a, b in zip(values, run.twin.parameters(), strict=True))
    assert_same_bytes(run.module.state_dict(), run.twin.state_dict(), "three steps")
    run.step()  # what is compiled first of all while values are on their way has them
    assert run.gather._under_way
    both = [
        torch.compile(lambda x, m=m: F.linear(x, m.mha.out_proj.weight), backend="eager")(X)
        for m in (run.module, run.twin)
    ]
    assert_same_bytes(_flat(both[0]), _flat(both[1]), "compiled")
    lines = log_lines()
    run.step()
    assert not run.gather._under_way
    assert (rank == 0) == any("torch.compile is in use" in line for line in lines)
    assert_same_bytes(run.module.state_dict(), run.twin.state_dict(), "compiled")


def test_z17_what_needs_no_value_hides_on_and_an_older_graph_is_refused():
    run_ranks(_what_asks_no_value, 2)


# In a Trainer


class Odd(by_trainer.Net):
    """Used in another order than registered, twice, in a branch, and once more in the backward."""

    def loss(self, x: Tensor, use: bool = False) -> Tensor:
        with torch.no_grad():
            target = self.body(x).mean()
        x = checkpoint(self.body, x, use_reentrant=False).tanh()
        x = self.body(x[:, :6]) if use else F.linear(x, self.maybe.weight)
        return (self.head(x) - target).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(6), batch_size=3)


class Reads(Callback):
    """On one rank only: copies, histograms, a thread; on all a checkpoint right after a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, _: Any, __: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.folder / "now.ckpt")
            trainer.strategy.barrier()
            self.seen.append(torch.load(self.folder / "now.ckpt", weights_only=False)["state_dict"])
        elif batch_idx == 2 and module.global_rank == 0:
            self.seen.append(copy.deepcopy(module).state_dict())
            self.seen += [p.detach().clone() for p in module.parameters()]


RUNS = ("growing", "two optimizers", "by hand", "averaged")


def _same_as_in_the_step(rank: int, world: int, port: int, folder: Path, names: Any) -> None:
    for name in names:
        found = {}
        for gather in ("step", "forward"):
            options = {"shared_memory": False, "bucket_cap_mb": 0.001}
            options["check_replicas_every_n_steps"] = 0
            zero = {"gather": gather}
            weights, states, _ = by_trainer._run(rank, world, port, name, options, zero)
            found[gather] = weights, states
        assert_equal_on_all_ranks(found["forward"][0])
        assert_same_bytes(found["forward"], found["step"], name)
    seen = {}
    for gather in ("step", "forward"):
        reads, module = Reads(folder), Odd()
        strategy = lean(
            shared_memory=False, zero={"gather": gather, "gradients": "own"}, bucket_cap_mb=0.001
        )
        options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
        fit(module, rank, world, port, strategy, lambda r=reads: [r], **options)
        seen[gather] = module.state_dict(), reads.seen
        assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert_same_bytes(seen["forward"], seen["step"], "odd")


def test_z14_z17_a_trainer_ends_with_the_bits_of_a_gather_in_the_step(tmp_path):
    ranks(_same_as_in_the_step, 2, tmp_path, RUNS, timeout_s=120)


def test_z17_the_same_on_three_ranks(tmp_path):
    ranks(_same_as_in_the_step, 3, tmp_path, ("whole tensors",), timeout_s=120)


def _said(rank: int, world: int, port: int) -> None:
    lines = log_lines()
    fit(by_trainer.Net(), rank, world, port, lean(zero={"gather": "forward"}))
    assert (rank == 0) == any("hides nothing where ranks share memory" in line for line in lines)

    class Kept(by_trainer.Net):
        """A tensor on the memory of a parameter."""

        def on_train_start(self) -> None:
            self.kept = self.body[0].weight.detach()

        def on_train_batch_end(self, *_: Any) -> None:
            assert torch.equal(self.kept, self.body[0].weight)

    options = {"shared_memory": False, "zero": {"gather": "forward"}}
    fit(Kept(), rank, world, port, lean(**options))
    assert (rank == 0) == any("share memory with 'body.0.weight'" in line for line in lines)


def test_what_is_not_hidden_is_said_once():
    ranks(_said, 2, timeout_s=120)


# What goes wrong while values are on their way


class Pending(by_trainer.Net):
    """Acts on rank 1 in the fourth step, before it reads a parameter."""

    act: Callable[[], None]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 3:
            assert self.trainer.strategy._engine.zero._gather._under_way
            type(self).act()
        return super().training_step(batch, batch_idx)


def _at_call(owner: type, name: str, number: int, act: Callable[[], None]) -> None:
    original, calls = getattr(owner, name), []

    def call(self: Any, *args: Any) -> Any:
        calls.append(0)
        if len(calls) == number:
            act()
        return original(self, *args)

    setattr(owner, name, call)


def _fails(rank: int, world: int, port: int, place: str, act: Any, folder: Path) -> None:
    module = by_trainer.Net()
    if place == "forward":
        Pending.act = staticmethod(act)
        module = Pending()
    elif rank == 1:
        owner, name, number = {
            "step": (Exchange, "leave", 8),
            "send": (BucketGather, "_send_slices", 5),
            "wait": (BucketGather, "finish", 5),
        }[place]
        _at_call(owner, name, number, act)
    options = {"gather": "forward", "gradients": "own"}
    strategy = lean(zero=options, shared_memory=False, bucket_cap_mb=0.001)
    begin = time.monotonic()
    with pytest.raises(
        Boom if rank == 1 else RankFailedError, match="boom" if act is _raise else None
    ):
        fit(
            module,
            rank,
            world,
            port,
            strategy,
            lambda: [OnExceptionCheckpoint(folder)],
            max_epochs=3,
            enable_checkpointing=True,
        )
    assert time.monotonic() - begin < SOON_S
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("place", ["step", "send", "forward", "wait"])
@pytest.mark.parametrize("act", [_raise, _kill])
def test_z19_what_fails_while_values_are_on_their_way_ends_all_ranks(place, act, tmp_path):
    begin = time.monotonic()
    first, other = ranks(_fails, 2, place, act, tmp_path, expect_failure=True)
    assert first is None, first
    assert act is _kill or other is None, other
    assert time.monotonic() - begin < 2 * SOON_S
