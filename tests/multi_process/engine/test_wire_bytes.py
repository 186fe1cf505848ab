"""Bytes at the network interface of test hosts, by wire."""

from __future__ import annotations

import json
import re

import pytest

from tests.support import hosts
from tests.support.programs import ROOT, Program, python

pytestmark = [pytest.mark.multi_process, pytest.mark.hosts]
SCRIPT = str(ROOT / "tests" / "programs" / "wire_bytes.py")


def sent(made, folder):
    """What each host's rank sent, as a multiple of a bucket of fp32, by wire."""
    programs = []
    for rank, host in enumerate(made):
        place = {"RANK": rank, "WORLD_SIZE": len(made), "MASTER_PORT": 29400}
        env = {name: str(value) for name, value in place.items()}
        env |= {"MASTER_ADDR": made[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
        programs.append(Program(host.command(*python(SCRIPT)), cwd=folder, env=env))
    runs = [program.finish() for program in programs]
    assert all(run.code == 0 for run in runs), runs[0].out
    return [json.loads(re.search(r"SENT (.*)", run.out)[1]) for run in runs]


@pytest.mark.parametrize("count", [2, 3])
def test_L6_bytes_at_the_interface(count, tmp_path):
    with hosts.make(count) as made:
        by_rank = sent(made, tmp_path)
    for found in by_rank:
        whole = 2 * (count - 1) / count
        assert found["all_reduce"] == pytest.approx(whole, rel=0.02)
        assert found["shard"] == pytest.approx(whole, rel=0.02), "as many as an all-reduce"
        for name, low, high in (("bf16", 0.5, 0.51), ("fp16", 0.5, 0.51), ("int8", 0.25, 0.27)):
            assert low <= found[name] / whole <= high, (name, found)
