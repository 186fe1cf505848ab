"""``wire`` in a Trainer: what is chosen, what is refused and how, and what composes with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp import LeanDDPStrategy
from lightning_dp.engine.wires.shard import ShardWire
from lightning_dp.engine.wires.shared_memory import SharedMemoryWire
from lightning_dp.errors import ConfigError
from tests.support.logs import log_lines
from tests.support.modules import Base
from tests.support.parity import assert_equal_on_all_ranks
from tests.support.trainers import fit, lean, ranks

pytestmark = pytest.mark.multi_process
INT8 = {"dtype": "int8", "min_bytes": 0}


class Net(Base):
    """In fp32; an embedding may have sparse gradients; the first rank's batches weigh more."""

    def __init__(self, sparse=True):
        super().__init__()
        self.float()
        self.table = nn.Embedding(7, 6, sparse=sparse)
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        rows = self.table(torch.arange(len(batch)) % 7)
        return {"loss": self.loss(batch.float() + rows), "loss_weight": 5.0 - self.global_rank}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self):
        self.sent = self.trainer.strategy.step_stats().bytes


def _fit(rank, world_size, port, wire, shared, trainer_options, zero=0):
    lines = log_lines("lightning_dp.step.wire_choice")
    # torch cannot clip sparse gradients
    module, used = Net(sparse="gradient_clip_val" not in trainer_options), []

    def look():
        used.append(module.trainer.strategy._engine.reducer.wire)

    module.on_train_start = look
    fit(
        module,
        rank,
        world_size,
        port,
        lean(wire=wire, shared_memory=shared, check_replicas_every_n_steps=1, zero=zero),
        **trainer_options,
    )
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    assert module.unused.weight.grad is None
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return weights, type(used[0]), lines, module.sent


def test_rounded_training_composes_and_stays_near_exact_training():
    for options in ({"max_epochs": 2, "gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}):
        exact, _, _, whole = ranks(_fit, 2, "auto", False, options)[0]
        for wire, most in (({**INT8, "dtype": "bf16"}, 2e-3), (INT8, 1e-2)):
            found, kind, _, sent = ranks(_fit, 2, wire, False, options)[0]
            assert kind is ShardWire
            assert wire is INT8 or 0.4 < sent / whole < 0.6, "step_stats() tells what was sent"
            error = float((found - exact).norm() / exact.norm())
            assert 0 < error < most, (wire, options)


def test_L5_with_the_optimizer_in_shares_only_its_slices_are_summed_and_rounded_once():
    exact = ranks(_fit, 2, "auto", False, {"max_epochs": 2}, 1)[0][0]
    found, kind, _, _ = ranks(_fit, 2, INT8, False, {"max_epochs": 2}, 1)[0]
    assert kind is ShardWire
    assert 0 < float((found - exact).norm() / exact.norm()) < 1e-2


def test_through_shared_memory_nothing_is_rounded_and_that_is_said_once():
    exact = ranks(_fit, 2, "auto", True, {})
    found = ranks(_fit, 2, "int8", True, {})
    assert found[0][1] is SharedMemoryWire
    assert torch.equal(found[0][0], exact[0][0])
    said = [line for rank in found for line in rank[2] if "no effect" in line]
    assert len(said) == 1
    assert "wire=int8" in said[0]


def _differ(rank, world_size, port):
    with pytest.raises(
        ConfigError, match=r"ranks differ in wire.*rank 0: .*'bf16'.*rank 1: .*'int8'"
    ):
        fit(Net(), rank, world_size, port, lean(wire=["bf16", "int8"][rank], shared_memory=False))


def test_ranks_that_ask_for_different_wires_all_learn_it_at_the_start():
    ranks(_differ, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wire": {"block": 8}}, "wire needs 'dtype'"),
        ({"wire": {"dtype": "int8", "block": 100}}, "a power of two from 16"),
        ({"wire": {"dtype": "int8", "scale": 2}}, "wire has no 'scale'; it takes 'dtype'"),
        ({"wire": {"dtype": "int8", "min_bytes": -1}}, "a whole number above 0 or 0"),
        ({"wire": "int8", "ddp_comm_hook": print}, "both say what gradients travel as"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        LeanDDPStrategy(**options)


def test_L7_error_feedback_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="makes Adam-like optimizers worse"):
        LeanDDPStrategy(wire={"dtype": "int8", "error_feedback": True})
    LeanDDPStrategy(wire={"dtype": "int8", "error_feedback": False})


def test_the_old_name_says_the_new_one():
    with pytest.warns(FutureWarning, match="reduce_dtype is now wire: write wire='bf16'"):
        strategy = LeanDDPStrategy(reduce_dtype="bf16")
    assert strategy.options.wire == "bf16"
    assert strategy._engine.wire.codec.name == "bf16"
