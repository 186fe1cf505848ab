"""A rank that fails under NCCL, whose collectives a host cannot interrupt: all ranks end within 15 s."""

from __future__ import annotations

import time

import pytest

from lightning_dp.errors import RankFailedError
from tests.multi_process.faults.test_trainer import _note, boom, die, fit, kill
from tests.support.grounds import RunIf
from tests.support.ranks import RankError
from tests.support.trainers import ranks

pytestmark = [RunIf(min_cuda_gpus=2), pytest.mark.usefixtures("on_ground")]
LIMIT_S = 15.0


@pytest.mark.parametrize("place", ["forward", "backward", "validation"])
def test_an_exception_of_one_rank_ends_all(place, tmp_path):
    begin = time.monotonic()
    results = ranks(fit, 2, tmp_path, 1, place, boom, grace_s=LIMIT_S)
    assert time.monotonic() - begin < 3 * LIMIT_S, "start-up included"
    assert isinstance(results[1]["error"], ValueError)
    assert isinstance(results[0]["error"], RankFailedError)
    assert "boom in user code" in results[0]["error"].remote_traceback
    assert all(told["seconds"] < LIMIT_S for told in results)


@pytest.mark.parametrize("place", ["forward", "backward", "validation"])
@pytest.mark.parametrize("act", [kill, die])
def test_a_rank_that_dies_ends_all(act, place, tmp_path):
    with pytest.raises(RankError) as caught:
        ranks(_note, 2, tmp_path, tmp_path / "run", 1, place, act, grace_s=LIMIT_S)
    assert "timed out" not in str(caught.value)
    assert (tmp_path / "rank0").read_text() == "RankFailedError 1"
