"""The command line of another rank: this program once more, for exactly the job that runs here.

[Note: overrides, not a config file] The other rank composes its config from this job's overrides. A
dumped config would lose what the config files say about types and groups, and not every program has one.

[Note: orig_argv] ``sys.argv`` is what a program made of its arguments; a new interpreter starts from what
the interpreter was given. ``sys.orig_argv`` holds that, with -O, -X, -W, -m and -c.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dp.errors import LaunchError
from lightning_dp.internals.hydra import HydraJob

# Options of the interpreter that take the next argument.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Hydra settings that say how jobs are run, not what a job is.
_NOT_OF_A_JOB = re.compile(
    r"^[~+]*hydra([./])(mode|run|sweep|sweeper|launcher|output_subdir|job\.(num|id|name)"
    r"|job_logging\.handlers\.file\.filename)([.@=/]|$)"
)


@dataclasses.dataclass(frozen=True)
class Program:
    """How this program was started.

    Attributes:
        orig_argv: The interpreter's arguments.
        argv: The program's arguments, its name first.
        main_module: The name of ``__main__``'s module, if it was run with -m.
        interactive: Whether there is a prompt.
        cwd: The working directory at the start.
    """

    orig_argv: tuple[str, ...]
    argv: tuple[str, ...]
    main_module: str | None
    interactive: bool
    cwd: str

    @classmethod
    def of_this_process(cls) -> Program:
        """The running program."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        return cls(
            tuple(sys.orig_argv),
            tuple(sys.argv),
            spec.name if spec is not None else None,
            hasattr(sys, "ps1") or bool(sys.flags.interactive),
            _START_CWD,
        )


def child_command(
    program: Program,
    job: HydraJob | None,
    local_rank: int,
    executable: str = sys.executable,
    pinned: Mapping[str, Any] | None = None,
) -> list[str]:
    """The command that starts local rank ``local_rank``.

    Args:
        program: How this program was started.
        job: The Hydra job that runs here, if any.
        local_rank: Its number on this machine.
        executable: The interpreter.
        pinned: Values of the job's config that the rank must not draw itself, by key.

    Raises:
        LaunchError: The program cannot be started again.
    """
    check_repeatable(program, job)
    if job is None:
        return [executable, *_absolute(program, program.orig_argv[1:])]
    size = len(program.argv) - 1
    given = program.orig_argv
    if size and given[-size:] == program.argv[1:]:
        given = given[:-size]
    elif size:  # the program changed its arguments before Hydra read them
        given = given[: 2 + _named(given[1:])[0]]
    own = ["hydra.mode=RUN", "hydra.output_subdir=null", f"hydra.run.dir={quote(job.output_dir)}"]
    own += [f"{key}={quote(value)}" for key, value in job.settings]
    if job.log_file is not None:
        stem, extension = os.path.splitext(job.log_file)
        name = quote(f"{stem}.rank{local_rank}{extension}")
        own.append(f"hydra.job_logging.handlers.file.filename={name}")
    kept = [text for text in job.hydra_overrides if not _NOT_OF_A_JOB.match(text)]
    return [
        executable,
        *_absolute(program, given[1:]),
        *job.config_flags,
        *job.task_overrides,
        *kept,
        *own,
        *(f"{key}={_value(value)}" for key, value in (pinned or {}).items()),
    ]


def check_repeatable(program: Program, job: HydraJob | None) -> None:
    """Refuse a program that cannot be started again, and say what to do.

    Raises:
        LaunchError: It is a prompt, read from stdin, a test run, or a worker of another launcher.
    """
    module = program.main_module or ""
    root = module.split(".")[0]
    name = os.path.basename(program.argv[0]) if program.argv else ""
    # A worker of pytest-xdist is python -c with a line that reads the worker's program from stdin.
    is_worker = any("eval(sys.stdin" in argument for argument in program.orig_argv)
    if root in ("pytest", "_pytest") or name in ("pytest", "py.test") or is_worker:
        raise LaunchError(
            "[lean_ddp] ranks are started by running the program again, and the program is pytest. "
            "Fix: strategy='lean_ddp_fork' or 'lean_ddp_spawn' in tests, or devices=1."
        )
    if root in ("submitit", "joblib", "loky", "ray") or (
        job is not None and job.launcher and not job.launcher.endswith("BasicLauncher")
    ):
        what = job.launcher if job is not None and job.launcher else module
        raise LaunchError(
            f"[lean_ddp] this job runs in a worker of {what}, whose command line is not the program's. "
            "Fix: let that launcher start the ranks (submitit: hydra.launcher.tasks_per_node equal to "
            "devices), or use hydra/launcher=basic, or strategy=lean_ddp_spawn."
        )
    if program.interactive or not _named(program.orig_argv[1:])[1]:
        raise LaunchError(
            "[lean_ddp] ranks are started by running the program again, and this one has no file: it "
            "is a prompt, a notebook or was read from stdin. Fix: save it as a script, or use "
            "strategy='lean_ddp_notebook' (which forks)."
        )


def quote(text: str) -> str:
    """``text`` as one value in Hydra's grammar, whatever it holds.

    A backslash counts only before a quote, and there it is doubled; ``${`` would be an interpolation.
    """
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)$", r"\1\1", text)
    text = text.replace("${", r"\${")
    return f"'{text}'"


def _value(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{quote(str(k))}:{_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, int | float) else quote(str(value))


def _named(arguments: Sequence[str]) -> tuple[int, str]:
    """Where, in an interpreter's arguments, the program is named, and how.

    Returns:
        The index and "file", "-m" or "-c"; (-1, "") for a prompt or stdin. With -m and -c it is the
        index of the argument that ends in the name or the code.
    """
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "-":
            return -1, ""
        if not argument.startswith("-"):
            return index, "file"
        if argument in _WITH_VALUE:
            index += 2
            continue
        for position, letter in enumerate(argument[1:] if argument[1] != "-" else "", start=1):
            ends = position == len(argument) - 1
            if letter in "mc":  # the rest of the argument, or the next one, names the program
                return index + ends, f"-{letter}"
            if letter in "WX":  # the same for a value that names no program
                index += ends
                break
        index += 1
    return -1, ""


def _absolute(program: Program, arguments: Sequence[str]) -> list[str]:
    """The arguments with the script's path made absolute: the working directory may have changed."""
    result = list(arguments)
    index, how = _named(result)
    if how == "file":
        result[index] = os.path.normpath(os.path.join(program.cwd, result[index]))
    return result


def _start_cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.path.expanduser("~")


_START_CWD = _start_cwd()
