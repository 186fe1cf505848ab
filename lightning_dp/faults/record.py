"""What is known about the failure of a rank, in a form that fits into a store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import traceback

import torch.distributed as dist

from lightning_dp.errors import CollectiveError, RankFailedError

MAX_TRACEBACK_CHARS = 20_000
# What the ranks that did nothing wrong see when another one has gone.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|closed by peer|gloo|"
    r"application timeout|timed out waiting|operation timed out|socket timeout|"
    r"nccl|remote process exited|default process group has not been initialized",
    re.IGNORECASE,
)
_CONSEQUENCE_TYPES = (CollectiveError, RankFailedError, dist.DistError)
_OWN_PREFIX = re.compile(r"^\[lean_ddp rank \d+/\d+\] ")
_BRIEF = "lean_ddp_brief"


@dataclasses.dataclass(frozen=True)
class FailureRecord:
    """The failure of one rank.

    Attributes:
        rank: Who failed; -1 when the failure belongs to no single rank.
        error_type: The name of the exception's class, or what was seen ("exit code 3", "SIGKILL").
        message: The exception's text.
        traceback: The formatted traceback, its end kept when it is very long; may be empty.
        exit_code: The exit code that the failing process asks for.
        host: Name of the machine.
        pid: Its process.
        where: What the rank was doing ("fit, step 12"); may be empty.
    """

    rank: int
    error_type: str
    message: str
    traceback: str = ""
    exit_code: int = 1
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)
    where: str = ""

    @classmethod
    def from_exception(cls, rank: int, exc: BaseException, where: str = "") -> FailureRecord:
        """Describe ``exc``, raised on ``rank``."""
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        return cls(
            rank=rank,
            error_type=type(exc).__name__,
            message=str(exc),
            traceback=text[-MAX_TRACEBACK_CHARS:],
            exit_code=exit_code_of(exc),
            where=where,
        )

    @classmethod
    def interrupted(cls, rank: int, where: str = "") -> FailureRecord:
        """``rank`` was interrupted (Ctrl+C), but cannot say so itself."""
        return cls(rank, KeyboardInterrupt.__name__, "", where=where)

    @property
    def is_interrupt(self) -> bool:
        """Whether somebody ended the run on purpose (Ctrl+C); nothing has failed then."""
        return self.error_type == KeyboardInterrupt.__name__

    def is_of_this_machine(self) -> bool:
        """Whether the failing rank ran, or runs, beside this process."""
        return self.host in (socket.gethostname(), "this machine", "the ranks")

    def is_like(self, exc: BaseException) -> bool:
        """Whether ``exc``, of another rank, says the same."""
        mine, theirs = (_OWN_PREFIX.sub("", text) for text in (self.message, str(exc)))
        return self.error_type == type(exc).__name__ and mine == theirs

    def to_json(self) -> str:
        """Encode for a store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureRecord:
        """Decode what :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def headline(self) -> str:
        """One sentence: who, where, what."""
        who = f"rank {self.rank} ({self.host}, process {self.pid})" if self.rank >= 0 else self.host
        where = f" in {self.where}" if self.where else ""
        if self.is_interrupt:
            return f"{who} was interrupted (Ctrl+C){where}"
        what = f"{self.error_type}: {self.message}" if self.message else self.error_type
        return f"{who} failed first{where}: {what}"

    def to_error(self, rank: int | None, world_size: int) -> RankFailedError | KeyboardInterrupt:
        """The error to raise on ``rank``, which did nothing wrong; None for a process that is no rank."""
        who = f"[lean_ddp rank {rank}/{world_size}]" if rank is not None else "[lean_ddp]"
        message = f"{who} {self.headline()}"
        if self.is_interrupt:
            return KeyboardInterrupt(message)
        if self.traceback:
            message += f"\n--- traceback of rank {self.rank} ---\n{self.traceback.rstrip()}"
            message += f"\n--- this was rank {self.rank}; the error above ended the run"
        return RankFailedError(
            message, rank=self.rank, remote_traceback=self.traceback, exit_code=self.exit_code
        )


def exit_code_of(exc: BaseException) -> int:
    """The code with which a process ends when ``exc`` is not caught; 1 where Python would say 0."""
    if isinstance(exc, SystemExit) and isinstance(exc.code, int) and exc.code > 0:
        return exc.code
    return 1


def is_consequence(exc: BaseException) -> bool:
    """Whether ``exc`` is what a rank sees when another one has gone, rather than a cause.

    The chain of causes is searched too: what is raised while a lost connection is handled follows
    from it.
    """
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, _CONSEQUENCE_TYPES):
            return True
        if isinstance(current, RuntimeError) and _CONSEQUENCE.search(str(current)):
            return True
        current = current.__cause__ or current.__context__
    return False


def signal_name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_line(text: str) -> str:
    """The first line of ``text``, at most 200 characters of it."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 200 else f"{line[:197]}..."


def say_briefly(exc: BaseException, text: str) -> None:
    """Let one line stand for ``exc`` if it ends the program: another rank prints it in full."""
    with contextlib.suppress(AttributeError):
        setattr(exc, _BRIEF, text)


def brief_of(exc: BaseException | None) -> str:
    """The line that stands for ``exc``; empty if it is to be printed in full."""
    return str(getattr(exc, _BRIEF, ""))


def add_note(exc: BaseException, note: str) -> None:
    """Attach ``note`` to ``exc``; Python 3.11 prints notes below the traceback, 3.10 keeps them."""
    if hasattr(exc, "add_note"):
        exc.add_note(note)
    else:
        setattr(exc, "__notes__", [*getattr(exc, "__notes__", ()), note])  # noqa: B010
