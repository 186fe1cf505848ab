"""Environments that know how many ranks there are: they are believed, whatever the Trainer was told."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import KubeflowEnvironment, LSFEnvironment
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_dp import LeanDDPStrategy
from lightning_dp.errors import RankFailedError
from tests.support.modules import Base
from tests.support.trainers import fit, ranks

pytestmark = pytest.mark.multi_process

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Theirs(ClusterEnvironment):
    """A user's own: one rank a machine, told in variables of its own."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = property(lambda self: int(os.environ["THEIR_PORT"]))
    detect = staticmethod(lambda: False)

    def world_size(self):
        return int(os.environ["THEIR_SIZE"])

    def global_rank(self):
        return int(os.environ["THEIR_RANK"])

    def local_rank(self):
        return 0

    def node_rank(self):
        return self.global_rank()

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


def kubeflow(rank, world, port, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    return KubeflowEnvironment()


def lsf(rank, world, port, folder):
    """Each rank on a node of its own, as this process's name of the machine says."""
    hosts = ["launch", *(f"node{each}" for each in range(world))]
    (folder / f"hosts{rank}").write_text("\n".join(hosts))
    socket.gethostname = lambda: f"node{rank}"
    os.environ.update(
        LSB_DJOB_RANKFILE=str(folder / f"hosts{rank}"),
        JSM_NAMESPACE_SIZE=str(world),
        JSM_NAMESPACE_RANK=str(rank),
        JSM_NAMESPACE_LOCAL_RANK="0",
    )
    LSFEnvironment._get_main_address = lambda self: "127.0.0.1"  # the first node, by its name
    return LSFEnvironment()


def theirs(rank, world, port, folder):
    os.environ.update(THEIR_PORT=str(port), THEIR_SIZE=str(world), THEIR_RANK=str(rank))
    return Theirs()


def trained(rank, world, port, strategy, module=None, **kwargs):
    module = module or Base()
    fit(module, rank, world, port, strategy, devices=1, num_nodes=1, **kwargs)
    return module.state_dict()


def alone(rank, world, port):
    return trained(rank, world, port, "auto")


def believing(rank, world, port, make, folder):
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment = make(rank, world, port, folder)
    strategy = LeanDDPStrategy(cluster_environment=environment, check_replicas_every_n_steps=1)
    weights = trained(rank, world, port, strategy)
    assert (strategy.global_rank, strategy.world_size) == (rank, world)
    return weights


@pytest.fixture(scope="module")
def one_device():
    return ranks(alone, 1)[0]


def same(many, one):
    for each in many:
        torch.testing.assert_close(each, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [kubeflow, lsf, theirs])
def test_an_environment_that_knows_its_size_is_believed(make, one_device, tmp_path):
    same(ranks(believing, 2, make, tmp_path), one_device)


# As Ray Train's workers live: test_ray.py shows it where Ray is installed


class Elsewhere(LightningEnvironment):
    """Told by somebody else who this rank is, on one machine."""

    creates_processes_externally = True

    def world_size(self):
        return dist.get_world_size()

    def global_rank(self):
        return dist.get_rank()

    def local_rank(self):
        return dist.get_rank()

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


class OnItsDevice(LeanDDPStrategy):
    root_device = torch.device("cpu")
    num_processes = property(lambda self: dist.get_world_size())


def in_a_thread(act):
    """``act(strategy)`` in a thread that is not the main one, with a group that was made before."""
    result = []

    def run():
        strategy = OnItsDevice(cluster_environment=Elsewhere(), check_replicas_every_n_steps=1)
        try:
            result.append(act(strategy))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def living_elsewhere(rank, world, port):
    def act(strategy):
        weights = trained(rank, world, port, strategy)
        total = torch.ones(1)
        dist.all_reduce(total)  # the group is as it was
        return weights, float(total)

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    return in_a_thread(act)


def test_ranks_device_and_group_from_elsewhere(one_device):
    weights, totals = zip(*ranks(living_elsewhere, 3), strict=True)
    same(weights, one_device)
    assert totals == (3.0, 3.0, 3.0)


class Fails(Base):
    """Rank 1 raises while the others are ``where``."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("the third batch of rank 1")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank != 1 and batch_idx == 2 and self.where == "a barrier":
            self.trainer.strategy.barrier("meet")
        if self.global_rank != 1 and batch_idx == 2 and self.where == "python":
            for _ in range(3000):
                time.sleep(0.01)


def failing_elsewhere(rank, world, port, where):
    def act(strategy):
        trained(rank, world, port, strategy, Fails(where))

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    begun = time.monotonic()
    error = pickle.loads(pickle.dumps(in_a_thread(act)))  # as Ray sends it
    return type(error), str(error), time.monotonic() - begun


@pytest.mark.parametrize("where", ["the step", "a barrier", "python"])
def test_a_failure_in_a_thread_reaches_the_others_and_stays_the_failing_ranks_own(where):
    (kind, told, seconds), (own, text, _) = ranks(failing_elsewhere, 2, where)
    assert (own, text) == (ValueError, "the third batch of rank 1")
    assert kind is RankFailedError
    assert "rank 1 (" in told
    assert "ValueError: the third batch of rank 1" in told
    assert seconds < 20
