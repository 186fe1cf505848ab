"""What a communication hook remembers is saved and restored."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    powerSGD_hook,
)

from lightning_dp.engine.plan.layout import LayoutOptions
from lightning_dp.engine.wires.comm_hook import CommHookWire
from lightning_dp.engine.wires.comm_hook_state import hook_state, load_hook_state
from tests.support.nets import Wide, power_sgd
from tests.support.parity import (
    Harness,
    as_bytes,
    assert_equal_on_all_ranks,
)
from tests.support.ranks import both_worlds, run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("ground")]
OPTIONS = LayoutOptions(cap_bytes=9000, first_bytes=5000, last_bytes=5000)


def _resume(rank, world_size, change):
    """Ten steps at once, or five, a checkpoint, and five more: the same bits."""

    def run(steps, saved=None, state=None, frozen=False):
        torch.manual_seed(0)
        module = Wide()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        state = power_sgd() if state is None else state
        with Harness(
            module,
            options=OPTIONS,
            wire=lambda g: CommHookWire(g, powerSGD_hook.powerSGD_hook, state),
        ) as harness:
            told = ""
            if saved is not None:
                module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                told = load_hook_state(state, saved["hook"], harness.group)
                harness.reducer.layout.remembered = list(saved["hook"]["layout"])
            for step in steps:
                module.maybe.requires_grad_(step > 2)  # a layout that grew once
                module.body[0].requires_grad_(not frozen)
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                harness.backward(module(torch.randn(4, 32)))
                optimizer.step()
                assert_equal_on_all_ranks(dict(module.named_parameters()))
            hook = hook_state(state, harness.reducer.layout, harness.group)
        kept = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "hook": hook}
        return {k: as_bytes(v) for k, v in module.state_dict().items()}, kept, told

    whole, _, _ = run(range(10))
    _, kept, _ = run(range(5))
    file = io.BytesIO()
    torch.save(kept, file)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, file.getvalue())  # only rank 0's was written
    saved = torch.load(io.BytesIO(everyone[0]), weights_only=True)
    assert saved["hook"]["world_size"] == world_size
    assert all(
        len(parts) == world_size for parts in saved["hook"]["per_rank"]["error_dict"].values()
    )
    if change == "none":
        resumed, _, told = run(range(5, 10), saved)
        assert not told
        assert resumed == whole
    elif change == "no hook state":  # control
        resumed, _, _ = run(
            range(5, 10), {**saved, "hook": {**saved["hook"], "common": {}, "per_rank": {}}}
        )
        assert resumed != whole
    elif change == "world size":
        saved["hook"]["world_size"] = 7
        resumed, _, told = run(range(5, 10), saved)
        assert "7 rank(s)" in told
    elif change == "settings":
        _, _, told = run(range(5, 10), saved, power_sgd(matrix_approximation_rank=3))
        assert "matrix_approximation_rank" in told
    elif change == "layout":
        run(range(5, 10), saved, frozen=True)  # other buckets: begins empty, says so, goes on


@both_worlds
def test_power_sgd_resumes_with_the_same_bits(world_size):
    run_ranks(_resume, world_size, "none")


@pytest.mark.parametrize("change", ["no hook state", "world size", "settings", "layout"])
def test_power_sgd_resumes_in_a_changed_run(change):
    run_ranks(_resume, 2, change)


class Own:
    """A user's state with state_dict, and one without."""

    def __init__(self):
        self.count, self.table, self.group = 0, {"a": torch.zeros(2)}, object()

    def state_dict(self):
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state):
        self.count, self.table = state["count"], state["table"]


class Bare:
    def __init__(self):
        self.count, self.names, self.lock = 0, ["x"], object()


def _own_state(rank, world_size):
    with Harness(nn.Linear(2, 2)) as harness:
        layout, group = harness.reducer.layout, harness.group
        for make in (Own, Bare):
            state = make()
            state.count = 5
            saved = hook_state(state, layout, group)
            assert "group" not in saved["common"]
            assert "lock" not in saved["common"]
            fresh = make()
            assert not load_hook_state(fresh, saved, group)
            assert fresh.count == 5
        assert hook_state(None, layout, group) is None
        assert hook_state(group.process_group, layout, group) is None


def test_a_users_own_state_is_kept_too():
    run_ranks(_own_state, 2)
