"""A run is asked to stop: all ranks stop at the same step, wherever the signal arrived.

[Note: nothing in the handler] A signal arrives at any moment of any rank, so its handler may only set
a flag; a collective in it would meet whatever collective the other ranks are in. The flag travels with
the next step's gradients (``Control.STOP`` of the control tail), after which all ranks know at the same
step. Where no gradients travel, they agree on a point ahead of all of them ([Note: a point ahead]).

[Note: a point ahead] Ranks pass numbered points (batches). A rank that knows of the request tells, at each
point, where it is. Rank 0, once all have told, names the largest point plus two. Ranks that communicate in
every batch are never more than one apart, so that nobody has passed it; a rank that does not communicate
may have, and stops where it learns of it, which disturbs nobody.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from lightning_dp.errors import ConfigError
from lightning_dp.faults.channel import FailureChannel

_REQUEST = "stop/request"
_AHEAD = 2


class Preemption:
    """The request to stop, on one rank.

    Attributes:
        local_stop: This rank was asked. Set by a signal handler, read once per step.
        requested: Some rank was asked, as far as this one has heard.
        agreed: All ranks know, at this very step.
        received: Numbers of the signals that this rank received.
    """

    def __init__(self) -> None:
        self.local_stop = False
        self.requested = False
        self.agreed = False
        self.received: list[int] = []
        self.step = -1
        self._told = False
        self._previous: dict[int, Any] = {}

    # Signals

    def install(self, signals: tuple[int, ...]) -> None:
        """Handle ``signals``; only the main thread of a process can. Undone by :meth:`remove`."""
        self.local_stop = self.requested = self.agreed = self._told = False
        self.received = []
        for number in signals:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def note(self, signum: int) -> None:
        """This rank was asked to stop ([Note: nothing in the handler])."""
        self.received.append(signum)
        self.local_stop = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.note(signum)
        previous = self._previous.get(signum)
        if callable(previous):
            previous(signum, frame)

    # Agreement

    def agreed_stop(self, step: int) -> None:
        """All ranks know, at ``step``. Called on every rank at the same step.

        Args:
            step: The optimizer step whose gradients carried the request.

        Collective: none.
        """
        if not self.agreed:
            self.agreed = True
            self.step = step

    def share(self, channel: FailureChannel) -> None:
        """Tell the others, or hear of it; called now and then by the watching thread. Collective: none."""
        if self.local_stop and not self._told:
            channel.write(_REQUEST, "1")
            self._told = True
            self.requested = True
        elif not self.requested:
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

    def is_due(self, point: int) -> bool:
        """Whether to stop at ``point``; to be called at each point once a request is known.

        Collective: none.
        """
        channel = self._channel
        if channel is None:
            return True
        if self._at is None:
            channel.write(f"{self._name}/at/{channel.rank}", str(point))
            self.lead()
            text = channel.read(f"{self._name}/stop")
            self._at = int(text) if text is not None else None
        return self._at is not None and point >= self._at

    def finish(self) -> None:
        """This rank has passed its last point. Collective: none."""
        if self._channel is not None:
            self._channel.write(f"{self._name}/at/{self._channel.rank}", "-1")

    def lead(self) -> None:
        """On rank 0: name the point as soon as all ranks have told where they are. Collective: none."""
        channel = self._channel
        if channel is None or channel.rank != 0:
            return
        places = channel.read_ranks(f"{self._name}/at")
        if len(places) == channel.world_size:
            channel.write_once(f"{self._name}/stop", str(max(places.values()) + _AHEAD))


def signal_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
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


def name_of(signum: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
