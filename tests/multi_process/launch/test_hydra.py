"""Hydra jobs under our launcher: the same config and folder for all ranks, fresh ranks for each job.

Lightning's ``ddp`` starts each rank with the sweep's own command line, so that every rank runs a sweep of
its own: with a sweeper that draws numbers the ranks train different things and average their gradients.
"""

import json
from pathlib import Path

import pytest

from tests.support.programs import ROOT, python, run_program

pytestmark = pytest.mark.multi_process
SWEEP = str(ROOT / "tests" / "programs" / "sweep.py")


def told(folder: Path):
    """What each rank of a job wrote, by rank."""
    return {int(f.stem[4:]): json.loads(f.read_text()) for f in sorted(folder.glob("rank*.json"))}


def test_a_sweep_with_a_failing_job(tmp_path):
    run = run_program(
        python(SWEEP, "-m", "devices=2", "job=0,1,2", "fail_on=1", "hydra.job.chdir=true"),
        cwd=tmp_path,
        timeout_s=200,
    )
    sweeps = list(tmp_path.glob("multirun/*/*"))
    assert len(sweeps) == 1, "every rank of every job belongs to one sweep"
    assert not list(tmp_path.glob("outputs"))
    assert run.code == 1
    assert run.left == []
    assert "job 1 cannot work" in run.out
    assert "rank 1 " in run.out
    assert "ENVIRONMENT []" in run.out
    pids = set()
    for job in range(3):
        folder = sweeps[0] / str(job)
        ranks = told(folder)
        if job == 1:
            assert ranks == {}
            continue
        assert set(ranks) == {0, 1}
        assert ranks[0]["config"] == ranks[1]["config"]
        assert ranks[0]["config"]["job"] == job
        assert ranks[0]["job"] == ranks[1]["job"] == ["sweep", job]
        for rank in ranks.values():
            assert rank["output_dir"] == rank["cwd"] == str(folder)
            assert rank["world_size"] == [2, 2]
        assert ranks[1]["mode"] == "RunMode.RUN"
        assert (folder / ".hydra" / "config.yaml").exists()
        assert (folder / "sweep.log").exists()
        assert (folder / "sweep.rank1.log").exists()
        pids.add(ranks[1]["pid"])
    assert len(pids) == 2, "fresh ranks for each job"


def test_a_single_job_ends_with_the_code_of_the_rank_that_died(tmp_path):
    run = run_program(python(SWEEP, "fail_on=0", "how=exit"), cwd=tmp_path)
    assert run.code == 5, run.out
    assert run.left == []
    assert "exit code 5" in run.out


def test_a_sweeper_that_draws_numbers_and_devices_that_change(tmp_path):
    run = run_program(
        python(SWEEP, "-m", "hydra/sweeper=drawn"),
        cwd=tmp_path,
        timeout_s=200,
        env={"PYTHONPATH": str(ROOT / "tests" / "programs" / "plugins")},
    )
    assert run.code == 0, run.out
    assert run.left == []
    (sweep,) = tmp_path.glob("multirun/*/*")
    drawn = []
    for job, devices in enumerate((2, 3, 1)):
        ranks = told(sweep / str(job))
        assert set(ranks) == set(range(devices))
        assert len({rank["config"]["foo"] for rank in ranks.values()}) == 1
        assert all(rank["world_size"] == [devices, devices] for rank in ranks.values())
        drawn.append(ranks[0]["config"]["foo"])
    assert len(set(drawn)) == 3
    assert f"OBJECTIVES {drawn}" in run.out
    assert "ENVIRONMENT []" in run.out


def test_interpreter_options_module_and_config_options_are_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.yaml").write_text(
        "defaults: [config, _self_]\nfoo: 7\nhydra:\n  run:\n    dir: here's ${now:%f}\n"
    )
    run = run_program(
        python(
            "-b",  # not -O: nothing is compiled for it yet, torch and Lightning would be, in each rank
            "-X",
            "mine=kept",
            "-W",
            "ignore",
            "-m",
            "tests.programs.sweep",
            "--config-dir=mine",
            "--config-name=other",
            "hydra.job.chdir=true",
            "+added=[a b,c]",
        ),
        cwd=tmp_path,
    )
    assert run.code == 0, run.out
    assert run.left == []
    (folder,) = tmp_path.glob("here's *")
    ranks = told(folder)
    assert set(ranks) == {0, 1}
    assert ranks[0]["config"] == ranks[1]["config"]
    assert ranks[0]["config"]["foo"] == 7
    assert ranks[0]["config"]["added"] == ["a b", "c"]
    for rank in ranks.values():
        assert rank["interpreter"] == [1, "kept", True]
        assert rank["cwd"] == rank["output_dir"] == str(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        ".hydra",
        "rank0.json",
        "rank1.json",
        "sweep.log",
        "sweep.rank1.log",
    ]
