"""Random modules, windows, inner backwards and freezing: equal to the reference, or an error on all ranks.

More of them by hand: ``python -m tests.support.drawn_runs --draws 2000``.
"""

from __future__ import annotations

import pytest

from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.engine.wires.wire import Done
from tests.support.drawn_runs import run_seeds
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.multi_process
DRAWS = 100


@pytest.mark.parametrize(("world_size", "draws"), [(2, DRAWS), (3, DRAWS // 2)])
def test_random_modules_and_windows_equal_the_reference(world_size, draws):
    ended = run_ranks(run_seeds, world_size, range(draws), timeout_s=240)[0]
    assert ended["equal"] > draws // 2
    assert ended["error"] > 0, "no draw froze a layer on one rank only"


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_random_modules_on_a_rounded_wire_are_within_its_error(wire):
    ended = run_ranks(run_seeds, 2, range(DRAWS // 5), wire, timeout_s=240)[0]
    assert ended["equal"] > DRAWS // 10


def _without_average(rank, world_size, seeds):
    def nothing(self, bucket):
        bucket.allocate()
        return Done()

    AllReduceWire.launch = SharedMemoryWire.launch = nothing
    run_seeds(rank, world_size, seeds)


def test_control_a_missing_average_is_seen_and_its_seed_told():
    with pytest.raises(RankError, match=r"draw with seed 0 at world size 2"):
        run_ranks(_without_average, 2, range(1))
