"""torchrun over two hosts: training, a rank that dies on the other host, a request to stop one of them."""

import re

import pytest

from tests.support import hosts
from tests.support.programs import ROOT, Program, python

pytestmark = [pytest.mark.multi_process, pytest.mark.hosts]
TRAIN = str(ROOT / "tests" / "programs" / "train.py")
QUIET = {"GLOO_SOCKET_IFNAME": "eth0"}


def start(made, folder, *args, ranks_per_host=1):
    """torchrun on each host, with one script; returns the programs."""
    programs = []
    for index, host in enumerate(made):
        place = folder / f"host{index}"
        place.mkdir(exist_ok=True)
        torchrun = python(
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(made)}",
            f"--nproc-per-node={ranks_per_host}",
            f"--node-rank={index}",
            f"--master-addr={made[0].address}",
            "--master-port=29400",
        )
        argv = [
            *torchrun,
            TRAIN,
            str(place),
            *args,
            f"nodes={len(made)}",
            f"devices={ranks_per_host}",
        ]
        programs.append(Program(host.command(*argv), cwd=place, env=QUIET))
    return programs


def test_two_hosts_train_together(tmp_path):
    with hosts.make(2) as made:
        runs = [program.finish() for program in start(made, tmp_path, "-1::", ranks_per_host=2)]
    for index, run in enumerate(runs):
        assert run.code == 0, run.out
        for rank in (2 * index, 2 * index + 1):
            assert f"FINALLY rank {rank} from 0 at 12" in run.out
    weights = {found for run in runs for found in re.findall(r"WEIGHTS (\[[^\]]*\])", run.out)}
    assert len(weights) == 1


def test_a_rank_that_dies_on_one_host_is_named_on_the_other(tmp_path):
    with hosts.make(2) as made:
        runs = [program.finish() for program in start(made, tmp_path, "1:train:kill")]
    for run in runs:
        assert run.code == 1
        assert run.left == []
        assert run.seconds < 60
    assert "rank 1 " in runs[0].out
    assert "RankFailedError" in runs[0].out
    assert "FINALLY rank 0" in runs[0].out


def test_a_request_to_stop_one_host_stops_both(tmp_path):
    with hosts.make(2) as made:
        programs = start(made, tmp_path, "1:train:term", "pause=0.02", "steps=2000")
        runs = [program.finish() for program in programs]
    pattern = r"FINALLY rank \d from -?\d+ at (\d+)"
    steps = {found for run in runs for found in re.findall(pattern, run.out)}
    assert len(steps) == 1
    assert (tmp_path / "host0" / "last.ckpt").exists()
