"""Data loading workers: forked beside process groups, and with random numbers of their own."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_dp.engine.group import ReplicaGroup
from tests.support.ranks import run_ranks
from tests.support.sampling import Learner, fit
from tests.support.trainers import ranks

pytestmark = pytest.mark.multi_process


def _fork_with_garbage(rank, world_size, close):
    group = ReplicaGroup.create(torch.device("cpu"))
    if close:
        group.close()
    else:
        dist.destroy_process_group(group.process_group)
    cycle = [group]
    cycle.append(cycle)
    gc.disable()
    del cycle, group  # garbage that only the collector finds
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def test_a_closed_group_is_no_trap_for_forked_workers():
    assert run_ranks(_fork_with_garbage, 2, True) == [True, True]


def test_the_control_a_group_left_to_the_collector_is_one():
    assert run_ranks(_fork_with_garbage, 2, False) == [False, False]


class Noisy(Dataset):
    """Each sample is its index and what the worker's random number generators say."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        import random

        import numpy as np

        x = torch.zeros(4, dtype=torch.float64)
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {"i": torch.tensor(index), "x": x, "y": x[:1], "draws": torch.tensor(draws)}


class Hears(Learner):
    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch["i"].tolist(), batch["draws"].tolist()))
        return self.loss(batch)


def _draws(rank, world_size, port, workers, options, own_generator, seed):
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    torch.manual_seed(seed)  # as seed_everything: the same on all ranks
    generator = torch.Generator().manual_seed(5) if own_generator else None
    module = Hears()
    data = DataLoader(Noisy(), batch_size=3, num_workers=workers, generator=generator)
    fit(rank, world_size, port, module, loader=data, options=options, max_epochs=2)
    return module.seen


def draws(workers, options=None, own_generator=False, seed=3):
    return ranks(_draws, 2, workers, options, own_generator, seed)


def numbers(seen, of=0):
    return {round(row[of], 9) for _, _, rows in seen for row in rows}


def test_workers_draw_other_numbers_on_each_rank_and_epoch_and_the_same_in_each_run():
    first, again, other = draws(1), draws(1), draws(1, seed=4)
    assert first == again
    assert first != other
    for generator in range(3):  # torch, random, numpy
        sets = [numbers(seen, generator) for seen in first]
        assert not sets[0] & sets[1], "two ranks drew the same"
    by_epoch = [numbers([s for s in first[0] if s[0] == epoch]) for epoch in (0, 1)]
    assert not by_epoch[0] & by_epoch[1]


def test_a_users_generator_is_left_alone():
    """Then it is as the user chose: this one is seeded alike on both ranks."""
    left, right = draws(1, own_generator=True)
    assert numbers(left) == numbers(right)


def test_the_main_process_draws_alike_unless_asked_not_to():
    left, right = draws(0)
    assert numbers(left) == numbers(right)
    left, right = draws(0, options={"rank_rng": "all"})
    for generator in range(3):
        assert not numbers(left, generator) & numbers(right, generator)


def _persistent(rank, world_size, port, persistent):
    module = Hears()
    data = DataLoader(
        Noisy(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    fit(rank, world_size, port, module, loader=data, max_epochs=3)
    return [(epoch, ids) for epoch, ids, _ in module.seen]


def test_workers_that_stay_get_each_epochs_order():
    stay, leave = (ranks(_persistent, 2, bool(p)) for p in (1, 0))
    assert stay == leave
    orders = [[ids for e, ids in stay[0] if e == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
