"""Under torchrun: its summary names the cause, and a restarted run goes on where it was."""

import re

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
    before = run.out[: run.out.index("Root Cause")]
    before = before[before.index("ChildFailedError") :]
    assert "Traceback" not in before  # rank 0's entry is a line, so that the cause stands out
    assert "rank 1 (" in before
    assert "Connection closed" not in run.out


def test_a_restarted_hydra_run_resumes_in_its_folder(tmp_path):
    """Hydra puts the time into the folder's name; a restart must find its checkpoints all the same."""
    options = [
        "experiment=digits",
        "ckpt_path=last",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=8",
        "+callbacks.model_checkpoint.every_n_train_steps=2",
        "callbacks.model_checkpoint.monitor=null",
        "+callbacks.fault={_target_: tests.programs.fault_callback.FailOnce, rank: 1, step: 5}",
        "trainer.enable_progress_bar=false",
        "test=false",
        f"paths.log_dir={tmp_path}/runs",
    ]
    app = ["-m", "lightning_dp.app.train", *options]
    run = run_program(torchrun("--max-restarts=1", *app), cwd=tmp_path, timeout_s=200)
    assert run.code == 0, run.out
    assert run.left == []
    begins = set(re.findall(r"BEGINS rank (\d) at (\d+)", run.out))
    assert begins == {("0", "0"), ("1", "0"), ("0", "4"), ("1", "4")}
    (folder,) = (tmp_path / "runs").glob("*/*")
    assert (folder / "checkpoints" / "last.ckpt").exists()
