"""``lean-ddp plan``: measured on one rank, then predicted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_dp.demos.digits import DigitsModule
from lightning_dp.errors import ConfigError
from lightning_dp.measure.forecast import RunProfile
from lightning_dp.measure.profile import ProfileRecorder
from tests.multi_process.app.commands import succeed

pytestmark = pytest.mark.multi_process


def test_measure_writes_a_profile_that_plan_reads(tmp_path):
    measure = ["lean-ddp", "plan", "measure", "experiment=digits", "callbacks.profile.seconds=0.5"]
    said = succeed(*measure, cwd=tmp_path)
    (file,) = tmp_path.rglob("profile.json")
    assert f"lean-ddp plan {file}" in said
    profile = RunProfile.load(file)
    parameters = sum(p.numel() for p in DigitsModule().parameters())
    assert profile.gradient_bytes == 4 * parameters
    assert profile.optimizer_bytes == pytest.approx(8 * parameters, rel=0.01)
    assert profile.samples == 32
    assert profile.activation_bytes > 32 * 64 * 4
    arrived = [seconds for seconds, _ in profile.gradients]
    assert 0 < arrived[0] <= arrived[-1] <= 1.5 * profile.backward_s
    assert profile.loopback is not None
    assert profile.loopback[0] > 1e6
    assert profile.cpu_s_per_byte > 0
    told = succeed("lean-ddp", "plan", file, "--ranks", "2,3", "--bandwidth", "1Gbit", cwd=tmp_path)
    assert "predicted, with an interval" in told
    assert (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(("ranks", "window"), [(2, 1), (1, 2)])
def test_a_profile_of_two_ranks_or_of_micro_batches_is_refused(ranks, window):
    trainer = SimpleNamespace(world_size=ranks, accumulate_grad_batches=window)
    with pytest.raises(ConfigError, match="measured on one rank without accumulation"):
        ProfileRecorder().on_train_start(trainer, nn.Linear(1, 1))
