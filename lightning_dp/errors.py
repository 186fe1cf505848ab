"""Every error that lightning_dp raises on purpose.

``LeanDDPError`` (a RuntimeError)
├── ``ConfigError``            an argument or a combination of arguments cannot work (also a ValueError)
├── ``LaunchError``            the processes, ports or environment variables are not as promised
├── ``ParameterError``         names parameters and ranks; one of
│   ├── ``ReplicaMismatchError``   the ranks do not hold the same module or the same parameters
│   ├── ``LateGradientError``      a gradient arrived after its bucket had been sent
│   └── ``NonFiniteGradientError`` a rank produced inf or NaN before the all-reduce
├── ``UnevenShardError``       ranks ran out of data at different steps
├── ``RankFailedError``        another rank raised; carries that rank and its traceback
├── ``CheckpointError``        a checkpoint's files are missing or damaged
└── ``CollectiveError``        a collective timed out or lost a peer

Messages say what happened, where (parameter, rank, step) and what to change. The values are also
attributes, so that programs and tests need not read prose.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 5


def some_names(names: Sequence[str]) -> str:
    """Return at most five of ``names`` for a message, and how many were left out."""
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES])
    rest = len(names) - MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


class LeanDDPError(RuntimeError):
    """Base of all errors raised on purpose by lightning_dp."""


class ConfigError(LeanDDPError, ValueError):
    """An argument, or a combination of arguments, cannot work."""


class LaunchError(LeanDDPError):
    """The processes, ports or environment variables are not as promised."""


class CheckpointError(LeanDDPError):
    """A checkpoint's files are missing or damaged."""


class ParameterError(LeanDDPError):
    """Something about parameters on some ranks; the kinds are below.

    Attributes:
        names: Which parameters or buffers.
        ranks: On which ranks.
    """

    def __init__(self, message: str, names: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.ranks = tuple(ranks)


class ReplicaMismatchError(ParameterError):
    """The ranks do not hold the same module, or no longer hold the same parameters.

    Attributes:
        names: Parameters or buffers that differ, first difference first.
        ranks: Ranks that differ from rank 0.
    """


class LateGradientError(ParameterError):
    """A gradient arrived after its bucket had been sent.

    Attributes:
        names: The parameters whose gradient came late.
        ranks: The ranks on which it did.
    """


class NonFiniteGradientError(ParameterError):
    """A rank's gradient held inf or NaN before the all-reduce.

    Attributes:
        names: The parameters whose local gradient is not finite.
        ranks: The ranks on which it is not.
    """


class UnevenShardError(LeanDDPError):
    """The ranks ran out of data at different steps.

    Attributes:
        ranks: The ranks that ran out first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankFailedError(LeanDDPError):
    """Another rank raised first.

    Attributes:
        rank: The rank that failed first.
        remote_traceback: Its formatted traceback.
        exit_code: The code with which its process ended, or asks to end.
    """

    def __init__(
        self, message: str, rank: int = -1, remote_traceback: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.exit_code = exit_code


class CollectiveError(LeanDDPError):
    """A collective timed out or lost a peer."""
