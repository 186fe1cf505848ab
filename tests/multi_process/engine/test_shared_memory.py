"""Sums through shared memory: equal to the byte on all ranks, and nobody waits for a rank that is gone."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires import shared_memory
from lightning_dp.engine.wires import shm_peers as same_machine
from lightning_dp.engine.wires.shared_memory import (
    SLICE_BYTES,
    SLOTS,
    SharedMemory,
    SharedMemoryWire,
)
from tests.support.ranks import run_ranks
from tests.support.trainers import Rows, lean, ranks, trainer

pytestmark = pytest.mark.multi_process
CPU = torch.device("cpu")
FLOATS = SLICE_BYTES // 4
RING = SLOTS * FLOATS


def meet(timeout_s: float = 60) -> SharedMemory:
    group = ReplicaGroup.create(CPU)
    memory = SharedMemory.connect(group.rank, group.all_gather_object, timedelta(seconds=timeout_s))
    assert memory is not None
    return memory


def in_rank_order(mine: torch.Tensor, world_size: int) -> torch.Tensor:
    """The sum that every rank must find, by plain collectives; half types are added in fp32."""
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    total = everyone[0].clone() if mine.dtype == torch.float64 else everyone[0].float()
    for other in everyone[1:]:
        total += other
    return total.to(mine.dtype)


def _sums(rank, world_size, dtype):
    memory = meet()
    torch.manual_seed(rank)
    for n in (1, 5, FLOATS - 1, FLOATS, FLOATS + 1, 2 * RING + 77):
        mine = torch.randn(n).to(dtype)
        expected = in_rank_order(mine, world_size)
        memory.start(mine).wait()
        assert torch.equal(mine, expected), n
    several = [torch.randn(n).to(dtype) for n in (3, FLOATS * 5, 1, RING, 17, FLOATS)]
    expected = [in_rank_order(mine, world_size) for mine in several]
    sums = [memory.start(mine) for mine in several]  # more than the ring holds
    for one in reversed(sums):
        one.wait()
    assert all(torch.equal(a, b) for a, b in zip(several, expected, strict=True))
    assert all(one.done and one.ended > 0 for one in sums)


SIZES = (3, FLOATS + 5, 0, 1, 2 * RING // 3, 17)  # elements of rank 0's tensors; others' are fewer
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.float32, torch.bool)


def _rows(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    """For each rank its tensors, where they are this rank's own; zeros elsewhere."""
    rows = []
    for other in range(world_size):
        sizes = [n // (other + 1) for n in SIZES[: len(SIZES) - other]]
        torch.manual_seed(other)
        full = [(100 * torch.randn(n)).to(t) for n, t in zip(sizes, DTYPES, strict=False)]
        rows.append(full if other == rank or rank < 0 else [torch.zeros_like(t) for t in full])
    return rows


def _gathers(rank: int, world_size: int) -> None:
    """Parts of any type and size, between sums and more than the ring holds, come as they were."""
    memory = meet()
    expected = _rows(-1, world_size)
    expected[0][0][0] = float("nan")
    for _ in range(2):
        rows = _rows(rank, world_size)
        if rank == 0:
            rows[0][0][0] = float("nan")
            rows[0][0][1] = -0.0
        expected[0][0][1] = -0.0
        mine = torch.full((FLOATS + 1,), float(rank))
        total = memory.start(mine)
        memory.gather(rows).wait()
        total.wait()
        assert torch.equal(mine, torch.full_like(mine, sum(range(world_size))))
        for got, want in zip(rows, expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    memory.gather([[] for _ in range(world_size)]).wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_ranks_parts_come_to_all_byte_by_byte(world_size):
    run_ranks(_gathers, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_sum_is_that_in_the_order_of_ranks(world_size, dtype):
    run_ranks(_sums, world_size, dtype)


@pytest.fixture
def shares(monkeypatch):
    """Three ranks share the work of adding, as more of them do."""
    monkeypatch.setattr(shared_memory, "SHARED_FROM", 3)


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_each_rank_adds_a_share_the_sum_has_the_same_bits(dtype):
    run_ranks(_sums, 3, dtype)


def _numbers_added(rank, world_size):
    added = []
    original = SharedMemory._add
    SharedMemory._add = lambda *args: (added.append(args[1].numel()), original(*args))
    mine = torch.full((4 * FLOATS + 5,), float(rank))
    meet().start(mine).wait()
    assert bool((mine == sum(range(world_size))).all())
    return sum(added)


def test_from_five_ranks_on_each_adds_its_share_only():
    assert run_ranks(_numbers_added, 2) == [4 * FLOATS + 5] * 2
    added = run_ranks(_numbers_added, 5)
    assert sum(added) == 4 * FLOATS + 5 * 5, "the last slice is small: each adds it"


def _control(rank, world_size):
    mine = torch.full((9,), float(rank + 1))
    expected = in_rank_order(mine, world_size)
    assert not torch.equal(mine, expected)
    SharedMemory._add = lambda self, part, slots: None
    meet().start(mine).wait()
    assert not torch.equal(mine, expected)


def test_control_without_the_addition_it_is_seen():
    run_ranks(_control, 2)


def _not_finite(rank, world_size):
    # Two NaNs of different bits: which one the sum has depends on the order of operands.
    bits = 0x7FC00001 + rank
    mine = torch.tensor([bits], dtype=torch.int32).view(torch.float32).repeat(4)
    mine[1], mine[2] = float("inf"), -float("inf") if rank else float("inf")
    meet().start(mine).wait()
    return mine.view(torch.int32).tolist()


def test_what_is_not_finite_has_the_same_bits_on_all_ranks():
    results = run_ranks(_not_finite, 3)
    assert results[0] == results[1] == results[2]


def _uneven(rank, world_size):
    memory = meet()
    kept = []
    for step in range(12):
        if (step + rank) % 3 == 0:
            time.sleep(0.02)  # somebody is late, each time somebody else
        mine = [torch.full((n,), float(rank + step)) for n in (FLOATS * 7, 3, FLOATS * 4 + 1)]
        sums = [memory.start(one) for one in mine]
        dist.all_reduce(
            torch.ones(1)
        )  # a collective between start and wait, as in a user's backward
        for one in sums:
            one.wait()
        kept.append(mine)
    for step, mine in enumerate(kept):
        total = float(sum(range(world_size)) + world_size * step)
        assert all(bool((one == total).all()) for one in mine), step


def test_ranks_of_uneven_speed_overwrite_nothing_and_do_not_wait_in_start():
    run_ranks(_uneven, 3)


@pytest.mark.usefixtures("shares")
def test_nor_where_they_share_the_work():
    run_ranks(_uneven, 3)
    run_ranks(_leaves, 3)


def _read_late(rank, world_size):
    """One rank leaves its sum at once; the other has not read yet."""
    memory = meet()
    if rank == 1:
        time.sleep(0.5)
    mine = torch.full((RING,), float(rank + 1))
    began = time.monotonic()
    memory.start(mine)
    started_in = time.monotonic() - began
    one = memory.start(torch.full((RING,), 1.0))
    one.wait()
    assert bool((mine == 3).all())
    memory.close()
    return started_in


def test_starting_does_not_block_when_the_ring_is_full():
    assert run_ranks(_read_late, 2)[0] < 0.25


def _killed(rank, world_size):
    memory = meet()
    memory.start(torch.ones(5)).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    one = memory.start(torch.ones(5))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        one.wait()
    assert time.monotonic() - began < 5
    (Path(os.environ["SEEN"]) / str(rank)).touch()
    raise AssertionError("as expected")


def test_a_killed_rank_is_seen_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", str(tmp_path))
    run_ranks(_killed, 3, expect_failure=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


def _leaves(rank, world_size):
    memory = meet()
    mine = torch.full((FLOATS * 3,), float(rank))
    one = memory.start(mine)
    if rank == 0:
        time.sleep(0.2)
    one.wait()
    memory.close()  # the others may still have to add what was told before
    assert bool((mine == sum(range(world_size))).all())


def test_a_rank_that_is_done_may_leave_before_the_others_have_read():
    run_ranks(_leaves, 3)


def _late(rank, world_size):
    memory = meet(timeout_s=1)
    if rank == 1:
        dist.barrier()  # stays until the other has seen it
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"operation timed out: .* gradients of rank 1"):
        memory.start(torch.ones(5)).wait()
    assert time.monotonic() - began > 0.9
    dist.barrier()


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    run_ranks(_late, 2)


class Stop(Exception):
    """Raised by a signal handler."""


def _interrupted(rank, world_size):
    memory = meet()
    if rank == 1:
        dist.barrier()  # until then it does not come
        return

    def stop(*_):
        raise Stop

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Stop):
        memory.start(torch.ones(5)).wait()
    dist.barrier()


def test_a_signal_handler_ends_the_wait():
    run_ranks(_interrupted, 2)


def _in_the_midst(rank, world_size):
    memory = meet()
    mine = torch.ones(FLOATS * 3)
    if rank == 1:
        original = SharedMemory._add

        def add(*args):
            original(*args)
            raise Stop  # the worst moment: added, and not yet counted

        SharedMemory._add = add
        with pytest.raises(Stop):
            memory.start(mine).wait()
        with pytest.raises(RuntimeError, match="interrupted in the midst of a sum"):
            memory.start(mine)
        dist.barrier()  # what the others see is not its end
        return
    memory.start(mine).wait()  # rank 1 had written its part
    assert bool((mine == 3).all())
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        memory.start(mine).wait()
    dist.barrier()


def test_a_rank_interrupted_in_the_midst_of_a_sum_leaves_and_sends_nothing_wrong():
    run_ranks(_in_the_midst, 3)


def _before_its_share(rank, world_size):
    """What a rank has written does not help the others, if it leaves before it added its share."""
    memory = meet()
    mine = torch.ones(FLOATS * 3)
    if rank == 1:

        def stop(*_):
            raise Stop

        memory._add_next = stop
        with pytest.raises(Stop):
            memory.start(mine).wait()
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        memory.start(mine).wait()
    assert time.monotonic() - began < 2


@pytest.mark.usefixtures("shares")
def test_a_rank_that_leaves_before_its_share_is_seen_at_once():
    run_ranks(_before_its_share, 3)


def _forked(rank, world_size):
    memory = meet()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # lives on after its parent, as a data loading worker does for a while
        os._exit(0)
    one = memory.start(torch.ones(3))
    one.wait()
    if rank == 1:
        (Path(os.environ["SEEN"]) / str(child)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        memory.start(torch.ones(3)).wait()
    assert time.monotonic() - began < 5
    os.close(writing)
    os.waitpid(child, 0)


def test_a_forked_worker_does_not_keep_a_dead_rank_alive(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", str(tmp_path))
    tracebacks = run_ranks(_forked, 2, expect_failure=True)
    assert tracebacks[0] is None


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _again(rank, world_size):
    ReplicaGroup.create(CPU).close()
    before, maps = _descriptors(), Path("/proc/self/maps").read_text().count("memfd:lightning_dp")
    for _ in range(5):
        group = ReplicaGroup.create(CPU)
        wire = SharedMemoryWire.connect(group)
        assert wire is not None
        wire.memory.start(torch.ones(4)).wait()
        wire.close()
        group.close()
        del group, wire
    after = Path("/proc/self/maps").read_text().count("memfd:lightning_dp")
    assert after == maps == 0
    assert _descriptors() == before


def test_nothing_is_left_after_closing():
    run_ranks(_again, 2)


def _elsewhere(rank, world_size, what):
    if what == "machine" and rank == 1:
        same_machine._machine = lambda: ("another boot", 1)
    if what == "system" and rank == 1:
        same_machine.sys = type("other", (), {"platform": "darwin"})

    def refuse(*_):
        raise OSError("refused")

    if what == "memory" and rank == 1:
        os.memfd_create = refuse
    if what == "mapping" and rank == 1:
        same_machine._map = refuse
    if what == "calling" and rank == 1:
        same_machine._call = refuse
    if what == "answering" and rank == 0:
        same_machine._is_of_this_user = refuse
    if what == "mapping the other" and rank == 0:
        same_machine._receive = refuse
    before = _descriptors()
    if what == "many":
        shared_memory.MOST_RANKS = 1
    group = ReplicaGroup.create(CPU)
    wire = SharedMemoryWire.connect(group)
    mine = torch.ones(2)
    dist.all_reduce(mine, group=group.process_group)
    assert wire is None
    assert mine.tolist() == [world_size, world_size]
    group.close()
    del group
    return _descriptors() - before


@pytest.mark.parametrize(
    "what",
    ["machine", "system", "memory", "mapping", "calling", "answering", "mapping the other", "many"],
)
def test_where_one_rank_cannot_all_use_the_process_group_at_once(what):
    began = time.monotonic()
    assert max(run_ranks(_elsewhere, 3, what)) <= 0, "nothing is left open"
    assert time.monotonic() - began < same_machine.MEET_S / 2


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        # one gradient of several slices, and many small ones
        self.net = nn.Sequential(
            nn.Linear(64, 5000), nn.Tanh(), nn.Linear(5000, 8), nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        return self.net(batch.float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank, world_size, port, options):
    module = Net()
    t = trainer(world_size, port, lean(**options), accumulate_grad_batches=2)
    used = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, _):
            used.append(isinstance(trainer.strategy._engine.reducer.wire, SharedMemoryWire))

    t.callbacks.append(Look())
    t.fit(module, DataLoader(Rows(48, 64), batch_size=4))
    return used, [p.detach().numpy().tobytes() for p in module.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_uses_it_unasked_and_ends_with_the_weights_of_the_process_group(world_size):
    memory = ranks(_fit, world_size, {})
    group = ranks(_fit, world_size, {"shared_memory": False})
    assert [used for used, _ in memory] == [[True]] * world_size
    assert [used for used, _ in group] == [[False]] * world_size
    assert all(weights == memory[0][1] for _, weights in memory), "replicas are identical"
    for mine, theirs in zip(memory[0][1], group[0][1], strict=True):
        a, b = (torch.frombuffer(bytearray(w), dtype=torch.float32) for w in (mine, theirs))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _sizes(rank, world_size, port, cap):
    module = Net()
    trainer(world_size, port, lean(bucket_cap_mb=cap)).fit(
        module, DataLoader(Rows(48, 64), batch_size=4)
    )
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_on_three_ranks_other_bucket_sizes_give_the_same_bits():
    assert ranks(_sizes, 3, 0.1)[0] == ranks(_sizes, 3, 25)[0]


class Peer:
    """A connection whose other end is a process of ``user``."""

    def __init__(self, user: int) -> None:
        self.user = user

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("=iII", 4711, self.user, 7)[:size]


@pytest.mark.parametrize("user", [0, 1000, 2**31, 2**32 - 2])
def test_every_number_that_a_user_can_have_is_told_from_others(user, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert same_machine._is_of_this_user(Peer(user))
    assert not same_machine._is_of_this_user(Peer(user + 1))
