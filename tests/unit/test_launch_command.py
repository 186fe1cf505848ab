"""The command line of another rank."""

import json
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_dp.errors import LaunchError
from lightning_dp.internals.hydra import HydraJob
from lightning_dp.launch.command import Program, child_command, quote


def program(*orig, argv=None, module=None, interactive=False):
    rest = (
        orig[[i for i, a in enumerate(orig) if not a.startswith("-")][1] :]
        if argv is None
        else argv
    )
    return Program(("python", *orig[1:]), tuple(rest), module, interactive, "/start")


JOB = HydraJob(
    config_flags=("--config-name=train", "--config-dir=conf"),
    task_overrides=("model.lr=0.1", "+data=digits", "~callbacks.early"),
    hydra_overrides=(
        "hydra.mode=MULTIRUN",
        "hydra.sweep.dir=x",
        "hydra.run.dir=y",
        "hydra/launcher=basic",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.job.chdir=true",
        "hydra.job.name=n",
        "+hydra/callbacks=mine",
        "hydra.verbose=true",
    ),
    output_dir="/out/it's 1",
    cwd="/start",
    settings=(("hydra.job.num", "3"),),
    log_file="/out/job.log",
)


@pytest.mark.parametrize(
    ("orig", "argv", "module", "expected"),
    [
        (
            ["python", "train.py", "--x", "1"],
            ["train.py", "--x", "1"],
            None,
            ["/start/train.py", "--x", "1"],
        ),
        (
            ["python", "-O", "-X", "dev", "-W", "error", "sub/train.py", "a=1"],
            ["sub/train.py", "a=1"],
            None,
            ["-O", "-X", "dev", "-W", "error", "/start/sub/train.py", "a=1"],
        ),
        (
            ["python", "-m", "pkg.mod", "a=1"],
            ["/x/pkg/mod.py", "a=1"],
            "pkg.mod",
            ["-m", "pkg.mod", "a=1"],
        ),
        (
            ["python", "-OOm", "pkg", "-m"],
            ["/x/pkg/__main__.py", "-m"],
            "pkg.__main__",
            ["-OOm", "pkg", "-m"],
        ),
        (
            ["python", "-Xdev", "-c", "print()", "z"],
            ["-c", "z"],
            None,
            ["-Xdev", "-c", "print()", "z"],
        ),
        (
            ["python", "/venv/bin/tool", "fit"],
            ["/venv/bin/tool", "fit"],
            None,
            ["/venv/bin/tool", "fit"],
        ),
        # the program removed an argument of its own: the new interpreter needs it
        (["python", "t.py", "--mine", "b"], ["t.py", "b"], None, ["/start/t.py", "--mine", "b"]),
    ],
)
def test_a_program_without_hydra_is_repeated_as_it_was_given(orig, argv, module, expected):
    made = child_command(program(*orig, argv=argv, module=module), None, 1, "py")
    assert made == ["py", *expected]


def test_a_hydra_job_is_given_by_its_own_overrides():
    orig = ["python", "-O", "app.py", "-m", "model.lr=0.1,0.2", "--config-name=train"]
    made = child_command(program(*orig, argv=orig[2:]), JOB, 2, "py")
    assert made[:4] == ["py", "-O", "/start/app.py", "--config-name=train"]
    assert "-m" not in made
    assert "model.lr=0.1,0.2" not in made
    tail = made[5:]
    assert tail[:3] == list(JOB.task_overrides)
    assert tail[3:6] == ["hydra.job.chdir=true", "+hydra/callbacks=mine", "hydra.verbose=true"]
    assert tail[6:] == [
        "hydra.mode=RUN",
        "hydra.output_subdir=null",
        r"hydra.run.dir='/out/it\'s 1'",
        "hydra.job.num='3'",
        r"hydra.job_logging.handlers.file.filename='/out/job.rank2.log'",
    ]


def test_a_subcommand_before_hydras_arguments_is_kept():
    orig = ["python", "-m", "tool", "train", "-m", "a=1,2"]
    made = child_command(
        program(*orig, argv=["tool train", "-m", "a=1,2"], module="tool"), JOB, 1, "py"
    )
    assert made[:4] == ["py", "-m", "tool", "train"]
    assert made[4] == "--config-name=train"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (program("python", argv=[""], interactive=True), "lean_ddp_notebook"),
        (program("python", "-", argv=["-"]), "lean_ddp_notebook"),
        (program("python", "-i", "x.py", argv=["x.py"], interactive=True), "lean_ddp_notebook"),
        (
            program(
                "python", "-m", "pytest", argv=["/x/pytest/__main__.py"], module="pytest.__main__"
            ),
            "lean_ddp_fork",
        ),
        (program("python", "/venv/bin/pytest", argv=["/venv/bin/pytest"]), "lean_ddp_fork"),
        (
            program(
                "python", "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))", argv=["-c"]
            ),
            "the program is pytest",
        ),
        (
            program(
                "python", "-m", "submitit.core._submit", argv=["x"], module="submitit.core._submit"
            ),
            "tasks_per_node",
        ),
    ],
)
def test_a_program_that_cannot_be_repeated_is_refused_with_the_fix(bad, says):
    with pytest.raises(LaunchError, match=says):
        child_command(bad, None, 1)


def test_a_worker_of_another_hydra_launcher_is_refused():
    import dataclasses

    job = dataclasses.replace(JOB, launcher="hydra_plugins.x.SubmititLauncher")
    with pytest.raises(LaunchError, match="SubmititLauncher"):
        child_command(program("python", "a.py"), job, 1)


@settings(max_examples=60)
@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20))
def test_any_text_survives_hydras_grammar(text):
    parsed = OverridesParser.create().parse_override(f"key={quote(text)}").value()
    assert OmegaConf.create({"key": parsed}).key == text


def test_quoting_is_needed():
    with pytest.raises(Exception, match=r"mismatched|no viable|extraneous|token"):
        OverridesParser.create().parse_override("key=a'b \"c")


def test_the_interpreters_options_reach_a_real_new_interpreter(tmp_path):
    script = tmp_path / "print_flags.py"
    script.write_text(
        "import json, sys\n"
        "flags = [sys.flags.optimize, sys.flags.dev_mode, sys.argv[1:]]\n"
        "print(json.dumps({'flags': flags, 'orig': sys.orig_argv, 'argv': sys.argv}))\n"
    )
    command = [sys.executable, "-O", "-X", "dev", "-W", "ignore", "print_flags.py", "a b"]
    first = json.loads(
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    )
    started = Program(
        tuple(first["orig"]), tuple(first["argv"]), None, interactive=False, cwd=str(tmp_path)
    )
    child = child_command(started, None, 1)
    second = json.loads(subprocess.run(child, cwd="/", capture_output=True, check=True).stdout)
    assert second["flags"] == first["flags"] == [1, True, ["a b"]]
