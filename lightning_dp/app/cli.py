"""The command ``lean-ddp``: a table of names, each loaded when it is called.

``lean-ddp train ...`` does what ``python -m lightning_dp.app.train ...`` does, for the ranks that a
launcher starts too: see [Note: one path for all launches].
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence

from lightning_dp import __version__
from lightning_dp.app.parsing import advice, nearest

USAGE_ERROR = 2


# For each name a module to run as ``python -m`` would, or ``module:function``, which takes the
# remaining arguments and returns an exit code; and one line of help.
COMMANDS = {
    "train": ("lightning_dp.app.train", "train from the config tree: experiment=digits"),
    "evaluate": ("lightning_dp.app.evaluate", "score a checkpoint: ckpt_path=FILE"),
    "doctor": ("lightning_dp.app.doctor:main", "check this machine and this shell"),
    "smoke": ("lightning_dp.app.smoke:main", "start ranks and see that all of it works: -n 2"),
    "conf": ("lightning_dp.app.conf_tools:main", "list, show, copy or check config files"),
    "data": (
        "lightning_dp.app.data_picture:main",
        "draw which rank gets which sample: --out data.png",
    ),
    "plan": (
        "lightning_dp.app.plan:main",
        "predict more ranks: measure experiment=bytes, then FILE --ranks 1..64 --bandwidth 10Gbit",
    ),
}


def usage() -> str:
    """Return the text of ``lean-ddp --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items())
    return (
        f"lean-ddp {__version__}: data-parallel training for PyTorch Lightning\n\n"
        f"usage: lean-ddp COMMAND [ARGUMENTS]\n\n{rows}\n\n"
        "lean-ddp COMMAND --help says more. train and evaluate take Hydra's overrides and options,\n"
        "for example: lean-ddp train experiment=bytes trainer.devices=2"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; those of this process by default.

    Returns:
        An exit code. A command that is a module may also end the process by itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = advice(nearest(name, COMMANDS))
        print(f"lean-ddp: there is no command {name!r}.{near}\n\n{usage()}", file=sys.stderr)
        return USAGE_ERROR
    module, _, function = COMMANDS[name][0].partition(":")
    if not function:
        run_as_module(module, rest)
        return 0
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    try:
        return command(rest)
    except BrokenPipeError:  # the reader of a pipe has seen enough: lean-ddp conf list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_as_module(module: str, arguments: Sequence[str]) -> None:
    """Do what ``python -m module arguments`` does, in this process.

    [Note: one path for all launches] A launcher starts the other ranks by repeating the command line.
    It reads it from ``__main__``'s spec and ``sys.argv``, or from ``sys.orig_argv`` where it wants the
    interpreter's options too. Both are made to say ``-m module``, so that a rank is started alike
    whether the user typed ``lean-ddp``, ``python -m`` or torchrun. A new process in place of this one
    would do as well, but would import torch and Lightning a second time.
    """
    program = len(sys.orig_argv) - len(sys.argv)
    options = [option for option in sys.orig_argv[1:program] if option != "-m"]
    sys.orig_argv[:] = [sys.executable, *options, "-m", module, *arguments]
    sys.argv[1:] = arguments
    sys.path[0] = os.getcwd()  # as -m does: modules of the current folder can be named in a config
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.exit(main())
