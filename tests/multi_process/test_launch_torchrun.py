"""Under torchrun: its summary names the cause, and a restarted run goes on where it was."""

import pytest

from tests.support.programs import ROOT, python, run_program

pytestmark = pytest.mark.multi_process
TRAIN = str(ROOT / "tests" / "programs" / "train.py")


def torchrun(*args):
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *args)


def test_the_summary_shows_the_real_traceback(tmp_path):
    run = run_program(torchrun(TRAIN, str(tmp_path), "1:train:raise"), cwd=tmp_path)
    assert run.code == 1
    assert run.left == []
    summary = run.out[run.out.index("Root Cause") :]
    assert "ValueError: boom in user code" in summary
    assert "train.py" in summary
    assert "rank      : 1" in summary
    assert "<N/A>" not in summary


def test_a_restarted_run_resumes_where_it_was(tmp_path):
    args = (TRAIN, str(tmp_path), "1:train:kill", "step=7", "steps=9")
    run = run_program(torchrun("--max-restarts=1", *args), cwd=tmp_path, timeout_s=200)
    assert run.code == 0, run.out
    assert run.left == []
    assert "FINALLY rank 0 from 6 at 9" in run.out
    assert "FINALLY rank 1 from 6 at 9" in run.out
