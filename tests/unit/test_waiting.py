"""Waiting in slices: a collective that ends between two looks is no failure."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_dp.engine.waiting import interruptible_wait


class Ending(dist.Work):
    """Ends just after the first slice; with ``error``, if there is one."""

    def __init__(self, error: str | None = None) -> None:
        super().__init__()
        self.error = error
        self.looks = 0

    def wait(self, timeout=None):
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self):
        return True


def test_work_that_ends_just_after_a_slice_is_done():
    work = Ending()
    interruptible_wait(work)
    assert work.looks == 2


@pytest.mark.parametrize("error", ["Operation timed out!", "Connection closed by peer"])
def test_work_that_failed_meanwhile_raises_its_own_error(error):
    with pytest.raises(RuntimeError, match=error):
        interruptible_wait(Ending(error))
