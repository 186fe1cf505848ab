"""Environments that cannot work are refused with what was seen and the fix."""

import dataclasses

import pytest

from lightning_dp.errors import ConfigError, LaunchError
from lightning_dp.launch.environment import (
    PID_VARIABLE,
    Placement,
    check_group,
    check_placement,
    compare_members,
)
from lightning_dp.options import FaultOptions

LOCAL = Placement("lightning", True, 0, 2, 2, 1, pid=100)


def place(**changes):
    return dataclasses.replace(LOCAL, **changes)


@pytest.mark.parametrize(
    ("placement", "environment", "says"),
    [
        (place(kind="slurm", world_size=1), {}, "SLURM reports 1 task, .*ntasks-per-node=2"),
        (place(kind="slurm", world_size=8, devices=4), {}, "devices=8"),
        (place(kind="torchrun", world_size=4), {}, "torchrun --nnodes=1 --nproc-per-node=2"),
        (place(kind="LSFEnvironment", local_rank=2), {}, "local rank 2.*devices=3"),
        (place(local_rank=2), {"MASTER_PORT": "1"}, "local rank 2.*devices=3"),
        (place(), {"LOCAL_RANK": "0"}, r"local rank\(s\) 1 are missing.*unset LOCAL_RANK"),
        (place(), {"LOCAL_RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        (place(), {PID_VARIABLE: "99", "LOCAL_RANK": "1"}, "inherited.*env -u RANK"),
        (place(external=False), {PID_VARIABLE: "99"}, "inherited"),
        (place(devices=1, world_size=1, local_rank=1), {PID_VARIABLE: "99"}, "inherited"),
    ],
)
def test_refused(placement, environment, says):
    with pytest.raises(LaunchError, match=says):
        check_placement(placement, environment)


@pytest.mark.parametrize(
    ("placement", "environment"),
    [
        (place(external=False), {}),
        (place(), {PID_VARIABLE: "100", "LOCAL_RANK": "1", "MASTER_PORT": "1"}),
        (place(kind="slurm"), {}),
        (place(kind="LSFEnvironment", world_size=4), {}),
        (place(kind="TheirEnvironment", world_size=2, devices=1), {}),
        (place(kind="torchrun", num_nodes=2, world_size=4), {PID_VARIABLE: "99"}),
        (place(), {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}),
        (place(devices=1, world_size=1), {"LOCAL_RANK": "0"}),
        (place(devices=1, world_size=1), {"LOCAL_RANK": "0", PID_VARIABLE: "99"}),
    ],
)
def test_accepted_without_a_word(placement, environment):
    assert check_placement(placement, environment) == []


def test_local_rank_alone_is_warned_about():
    (warning,) = check_placement(place(), {"LOCAL_RANK": "0", "MASTER_PORT": "1"})
    assert "LOCAL_RANK=0" in warning


def test_a_group_of_another_size_is_refused():
    check_group(place(), 2)
    with pytest.raises(LaunchError, match=r"group of 4 ranks.*devices=2 x num_nodes=1.*devices=4"):
        check_group(place(), 4)
    believed = place(kind="TheirEnvironment", world_size=3)
    check_group(believed, 3)
    with pytest.raises(LaunchError, match=r"group of 2 ranks.*TheirEnvironment speaks of 3"):
        check_group(believed, 2)


def test_ranks_of_different_jobs_are_shown_side_by_side():
    compare_members(({"job": "a=1"}, {"job": "a=1"}), 0)
    with pytest.raises(LaunchError, match="rank 0: a=1\n  rank 2: a=7"):
        compare_members(({"job": "a=1"}, {"job": "a=1"}, {"job": "a=7"}), 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"rendezvous_timeout_s": 0},
        {"error_grace_s": -1.0},
        {"stall_report_s": -1},
        {"on_preempt": "save"},
        {"preempt_signals": "SIGTERM"},
    ],
)
def test_options_that_cannot_be_are_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FaultOptions(**bad)
