"""Real programs: exit codes, nobody left behind, requests to stop, several trainers."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support.programs import ROOT, Program, python, run_program

pytestmark = pytest.mark.multi_process
TRAIN = str(ROOT / "tests" / "programs" / "train.py")


def test_the_program_ends_with_the_code_of_the_rank_that_died(tmp_path):
    run = run_program(python(TRAIN, str(tmp_path), "1:train:exit", "others=sleep"), cwd=tmp_path)
    assert run.code == 3
    assert run.left == []
    assert "FINALLY rank 0" in run.out  # rank 0 was interrupted in its sleep
    assert "rank 1 " in run.out
    assert "exit code 3" in run.out
    assert "Traceback" in run.out


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_nobody_is_left_when_the_launching_process_ends(how, tmp_path):
    fault = f"0:train:{how}"
    run = run_program(python(TRAIN, str(tmp_path), fault, "others=sleep"), cwd=tmp_path)
    assert run.left == []
    if how == "kill":
        assert run.code == -signal.SIGKILL
    else:
        assert run.code == 1
        assert run.out.count("boom in user code") >= 2  # also in rank 1's error
        assert "FINALLY rank 1" in run.out


def test_a_request_to_stop_the_launching_process_stops_all_ranks(tmp_path):
    program = Program(
        python(TRAIN, str(tmp_path), "-1::", "pause=0.05", "steps=2000"), cwd=tmp_path
    )
    program.wait_for("AT rank 1")
    os.kill(program.process.pid, signal.SIGTERM)
    run = program.finish()
    assert run.code == 143, run.out
    assert run.left == []
    steps = set(re.findall(r"FINALLY rank \d from -?\d+ at (\d+)", run.out))
    assert len(steps) == 1
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert {str(saved["global_step"])} == steps
    again = run_program(
        python(TRAIN, str(tmp_path), "1:train:none", f"steps={saved['global_step'] + 3}"),
        cwd=tmp_path,
    )
    assert again.code == 0, again.out
    assert f"FINALLY rank 1 from {saved['global_step']} at" in again.out


def test_a_program_from_stdin_is_refused_with_the_fix(tmp_path):
    text = f"import sys; sys.argv = ['-', {str(tmp_path)!r}]\n{Path(TRAIN).read_text()}"
    run = run_program(python("-"), cwd=tmp_path, stdin=text)
    assert run.code == 1
    assert "read from stdin" in run.out
    assert "lean_ddp_notebook" in run.out


@pytest.mark.parametrize("strategy", ["lean_ddp", "lean_ddp_fork"])
def test_ctrl_c_ends_all_ranks(strategy, tmp_path):
    """SIGINT to the launching process only, as from ``kill`` or a notebook."""
    program = Program(
        python(TRAIN, str(tmp_path), "-1:train:none", "others=sleep", f"strategy={strategy}"),
        cwd=tmp_path,
    )
    program.wait_for("AT rank 0")
    program.wait_for("AT rank 1")
    os.kill(program.process.pid, signal.SIGINT)
    begin = time.monotonic()
    run = program.finish()
    assert time.monotonic() - begin < 12
    assert run.code == 1
    assert run.left == []
    assert "FINALLY rank 0" in run.out
    assert "failed first" not in run.out  # nothing has failed
    assert "Traceback" not in run.out
    if strategy == "lean_ddp":
        assert "FINALLY rank 1" in run.out  # it was told, and left by itself
        assert "was interrupted (Ctrl+C) in fit, train, step 3" in run.out


def test_ctrl_c_that_wakes_nobody_ends_all_ranks_too(tmp_path):
    """Without the wake-up the main thread, and with it the program, sleeps its 60 s to the end."""
    run = run_program(
        python(TRAIN, str(tmp_path), "0:train:lost interrupt", "others=sleep"), cwd=tmp_path
    )
    assert run.seconds < 40, run.out
    assert run.code == 1
    assert run.left == []
    assert "FINALLY rank 1" in run.out


def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    run = run_program(python(TRAIN, str(tmp_path), "all:train:raise"), cwd=tmp_path)
    assert run.code == 1
    assert run.left == []
    assert run.out.count("Traceback (most recent call last)") == 1, run.out
    assert run.out.count("ValueError: boom in user code") == 2  # in full, and in one line
    assert len(re.findall(r"\(as on rank \d, which prints it in full\)", run.out)) == 1
    assert "failed first" not in run.out  # nobody is to blame more than the others


def test_the_cause_is_not_buried_under_its_consequences(tmp_path):
    run = run_program(python(TRAIN, str(tmp_path), "1:train:raise"), cwd=tmp_path)
    assert run.code == 1
    (told,) = [line for line in run.out.splitlines() if "[lean_ddp rank 0/2]" in line]
    assert "failed first in fit, train, step 3: ValueError: boom in user code" in told
    assert run.out.count("Traceback (most recent call last)") == 1, run.out  # of rank 1
    assert "Connection closed" not in run.out
    assert "another exception" not in run.out
    assert "direct cause" not in run.out
    assert "FINALLY rank 0" in run.out


def test_several_trainers_and_a_rank_that_fails_after_them(tmp_path):
    run = run_program(python(TRAIN, str(tmp_path), "1:after:", "again=1"), cwd=tmp_path)
    assert "SECOND rank 0 of 2 at 2" in run.out
    assert "SECOND rank 1 of 2 at 2" in run.out
    assert run.code == 4, run.out
    assert run.left == []
    assert "rank 1 failed after training" in run.out


@pytest.mark.parametrize("strategy", ["lean_ddp_fork", "lean_ddp_spawn"])
def test_forked_and_spawned_ranks_are_guarded(strategy, tmp_path):
    run = run_program(
        python(TRAIN, str(tmp_path), "1:train:exit", "others=sleep", f"strategy={strategy}"),
        cwd=tmp_path,
    )
    assert run.code == 3, run.out
    assert run.left == []
    assert "rank 1 " in run.out
