"""Ray Train starts the ranks. Without Ray: test_environments.py."""

from __future__ import annotations

import json
import sys

import pytest

from tests.multi_process.app.commands import ROOT, succeed

pytestmark = [pytest.mark.multi_process, pytest.mark.library("ray.train")]


@pytest.fixture(scope="module")
def came(tmp_path_factory):
    """What came of each run."""
    folder = tmp_path_factory.mktemp("ray")
    lines = succeed(
        sys.executable, ROOT / "tests/programs/ray_runs.py", folder, cwd=folder, timeout_s=290.0
    )
    return dict(json.loads(line) for line in lines.splitlines() if line.startswith('["'))


def test_a_failure_reaches_the_controller_as_the_failing_ranks_own_error(came):
    told = came["failure"]
    assert "ValueError" in told["1"]
    assert "the third batch of rank 1" in told["1"]
    assert "0" not in told or "rank 1 (" in told["0"]  # it ends after rank 1


def test_rays_shards_are_left_alone(came):
    told = came["shards"]
    assert told["worlds"] == [2, 2]
    assert told["weights"][0] == told["weights"][1]
    assert (told["samples"], told["times"]) == (2 * 48, [1])


def test_trials_of_several_ranks_each(came):
    slow, fast = came["trials"]
    for told in (slow, fast):
        assert told["worlds"] == [2, 2]
        assert told["weights"][0] == told["weights"][1]
        assert (told["samples"], told["times"]) == (2 * 48, [1])
    assert abs(fast["weights"][0]) < abs(slow["weights"][0])


def test_a_killed_worker_and_another_number_of_workers(tmp_path):
    out = succeed(
        sys.executable,
        ROOT / "examples/ray_train.py",
        "--folder",
        tmp_path / "runs",
        cwd=tmp_path,
        timeout_s=290.0,
    )
    once = "432 samples 1 time(s) | 432 samples 1 time(s)"
    assert f"lean_ddp_fork, 2 ranks | {once}" in out
    assert f"Ray, 2 workers, one killed | {once}" in out
    assert "the same weights: True; started at steps [0, 36]" in out
    assert f"Ray, 3 workers from step 36 | {once}" in out
