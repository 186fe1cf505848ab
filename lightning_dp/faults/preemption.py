"""A run is asked to stop: all ranks stop at the same step, wherever the signal arrived.

[Note: nothing in the handler] A signal arrives at any moment of any rank, so its handler may only set
a flag; a collective in it would meet whatever collective the other ranks are in. The flag travels with
the next step's gradients (``Control.STOP`` of the control block), after which all ranks know at the same
step. Where no gradients travel, they agree on a point ahead of all of them ([Note: a point ahead]).

[Note: a point ahead] Ranks pass numbered points (batches). A rank that knows of the request tells, at
each point, where it is. Rank 0, once all have told, names the largest point plus two. Ranks that
communicate in every batch are never more than one apart, so nobody has passed it; ranks that do not may
have, and wait where they learn of it. They stop if all can: one that has come to the last point of its
sequence votes against it, because it will wait for the others in whatever follows the sequence.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

from lightning_dp.engine.waiting import poll_until
from lightning_dp.errors import ConfigError
from lightning_dp.faults.channel import FailureChannel

_REQUEST = "stop/request"
_AHEAD = 2


class StopRequest:
    """The request to stop, on one rank.

    Attributes:
        local_stop: This rank was asked. Set by a signal handler, read once per step.
        requested: Some rank was asked, as far as this one has heard.
        agreed: All ranks know, at this very step.
        received: Numbers of the signals that this rank received.
        previous: Handlers that were there before, by number of the signal.
    """

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.reset()

    def reset(self) -> None:
        """A call of the trainer begins: nobody has asked."""
        self.local_stop = self.requested = self.agreed = False
        self.received: list[int] = []

    # Signals

    def install(self, signals: tuple[int, ...]) -> None:
        """Handle ``signals``; only the main thread of a process can. Undone by :meth:`remove`."""
        for number in signals:
            self.previous[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.previous.clear()

    def note(self, signum: int) -> None:
        """This rank was asked to stop ([Note: nothing in the handler])."""
        self.received.append(signum)
        self.local_stop = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.note(signum)
        previous = self.previous.get(signum)
        if callable(previous):
            previous(signum, frame)

    # Agreement

    def agree(self) -> None:
        """All ranks know. Called on every rank at the same step. Collective: none."""
        self.agreed = True

    def share(self, channel: FailureChannel) -> None:
        """Tell the others, or hear of it; called now and then by the watching thread. Collective: none."""
        if self.requested:
            return
        if self.local_stop:
            channel.write(_REQUEST, "1")
            self.requested = True
        else:
            self.requested = channel.read(_REQUEST) is not None


class StopLine:
    """Agrees on a point at which to stop, without a collective ([Note: a point ahead]).

    Args:
        channel: None in a world of one.
        name: Names the sequence of points; the same on all ranks, and new for each sequence.
    """

    def __init__(self, channel: FailureChannel | None, name: str) -> None:
        self._channel = channel
        self._name = name
        self._at: int | None = None
        self._over = False

    def is_due(self, point: int, *, is_last: bool = False) -> bool:
        """Whether to stop at ``point``; to be called at each point once a request is known.

        Args:
            point: Where this rank is.
            is_last: No point follows in this sequence; this rank cannot stop inside of it any more.

        Collective: none needed to call it. True is returned on every rank or on none; the rank waits
        for the others' votes, which none of them can withhold.
        """
        channel = self._channel
        if channel is None:
            return True
        if self._over:
            return False
        if is_last:
            self._over = True
            channel.write(f"{self._name}/vote/{channel.rank}", "0")
            return False
        if self._at is None:
            channel.write(f"{self._name}/at/{channel.rank}", str(point))
            self._lead(channel)
            text = channel.read(f"{self._name}/stop")
            self._at = int(text) if text is not None else None
        if self._at is None or point < self._at:
            return False
        self._over = True
        return self._vote(channel)

    def _lead(self, channel: FailureChannel) -> None:
        """On rank 0: name the point as soon as all ranks have told where they are."""
        if channel.rank == 0:
            places = channel.read_ranks(f"{self._name}/at")
            if len(places) == channel.world_size:
                channel.write_once(f"{self._name}/stop", str(max(places.values()) + _AHEAD))

    def _vote(self, channel: FailureChannel) -> bool:
        """Whether every rank can still stop. Each of them has told where it is, so each will vote."""
        channel.write(f"{self._name}/vote/{channel.rank}", "1")

        def all_voted() -> Collection[int]:
            votes = channel.read_ranks(f"{self._name}/vote").values()
            return votes if 0 in votes or len(votes) == channel.world_size else ()

        return 0 not in poll_until(all_voted, math.inf)


def signal_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of signals by name.

    Raises:
        ConfigError: There is no such signal here, or it cannot be handled.
    """
    numbers = []
    for name in names:
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(
                f"preempt_signals: {name!r} is not a signal that can be handled here. Use names such "
                "as SIGTERM or SIGUSR2."
            )
        numbers.append(int(number))
    return tuple(numbers)
