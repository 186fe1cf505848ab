"""Help and wrong arguments answer at once; every option says what it does and what it is without."""

import argparse
import subprocess
import sys

import pytest

from lightning_dp.app import conf_tools, data_picture, doctor, plan, smoke
from tests.multi_process.app.commands import succeed

# Runs the command, then says what it has loaded. Neither library is needed to print a text.
LOADED = """
import sys
from lightning_dp.app.cli import main
sys.argv = sys.orig_argv = ["lean-ddp", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print("loaded:", *sorted({"torch", "lightning", "matplotlib"} & set(sys.modules)))
"""


def loaded(*argv, cwd):
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *argv], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("loaded:").split()


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["trian"],
        ["train", "--help"],
        ["train", "trainer.max_epoch=1"],
        ["train", "experiment=digit"],
        ["evaluate", "--help"],
        ["doctor", "--help"],
        ["smoke", "-n", "0"],
        ["conf", "list"],
        ["conf", "show", "strategy/lean_dpp"],
        ["data", "--help"],
        ["data", "--ranks", "0"],
        ["plan", "--help"],
        ["plan", "--bandwidth", "0Gbit"],
    ],
    ids=" ".join,
)
def test_a_text_needs_no_library(argv, tmp_path):
    assert loaded(*argv, cwd=tmp_path) == []


def test_control_a_command_that_works_loads_them(tmp_path):
    assert loaded("data", "--samples", "4", "--stop-after", "1", cwd=tmp_path) == [
        "matplotlib",
        "torch",
    ]


def options(parser, path):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{path} {name}")
        elif not isinstance(action, argparse._HelpAction):
            yield f"{path} {'/'.join(action.option_strings) or action.dest}", action


def poor(parser, path):
    """Options without a help text, or without their default in it."""
    return [
        name
        for name, action in options(parser, path)
        if not action.help or (action.option_strings and "default" not in action.help)
    ]


@pytest.mark.parametrize("module", [conf_tools, data_picture, doctor, plan, smoke])
def test_every_option_has_a_help_text_and_its_default(module):
    assert poor(module.parser(), module.__name__) == []


def test_control_a_poor_option_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument("--good", help="a number (default: 3)")
    parser.add_argument("--bare")
    parser.add_subparsers().add_parser("deep").add_argument("--vague", help="a number")
    assert poor(parser, "x") == ["x --bare", "x deep --vague"]


def test_the_names_are_registered_where_an_inner_module_is_imported_first(tmp_path):
    """Other orders: ``launch/test_namespaces.py``."""
    check = "; ".join(
        [
            "import lightning_dp.internals.trainer, lightning",
            "import lightning_dp, lightning.pytorch.strategies as s",
            "assert 'lean_ddp_fork' in s.StrategyRegistry",
            "assert isinstance(s.StrategyRegistry.get('lean_ddp'), lightning_dp.LeanDDPStrategy)",
            "assert s.StrategyRegistry['lean_ddp']['strategy'] is lightning_dp.LeanDDPStrategy",
        ]
    )
    succeed(sys.executable, "-c", check, cwd=tmp_path)
