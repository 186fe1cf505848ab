"""Loaders of libraries that keep a state of their own: stopped in mid-epoch, each sample comes once."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.sampling import HookLearner, Numbers, SaveAt, fit
from tests.support.trainers import free_port

pytestmark = pytest.mark.multi_process

N, SIZE, RANKS, EPOCHS = 24, 2, 2, 2
STEPS = N // (SIZE * RANKS)


def _run(rank, world_size, port, make, paths, folder):
    """Train without a break and save after each step; or go on from each of ``paths``."""
    runs = []
    for path in paths:
        module = HookLearner({"train": make})
        callbacks = [SaveAt(folder, "on_train_batch_end")] if path is None else []
        fit(rank, world_size, port, module, path, callbacks=callbacks, max_epochs=EPOCHS)
        runs.append([(epoch, ids) for epoch, _, ids, _ in module.seen])
    return runs


def runs(make, paths, folder):
    """By run, by rank: the batches seen, each with its epoch."""
    ranks = run_ranks(
        _run, RANKS, free_port(), make, paths, folder, init_process_group=False, timeout_s=240
    )
    return list(zip(*ranks, strict=True))


def each_once(make, folder):
    """Each sample of each epoch once, straight: the library shares what there is, or leaves it to us."""
    (straight,) = runs(make, [None], folder)
    for epoch in range(EPOCHS):
        seen = Counter(i for rank in straight for e, ids in rank if e == epoch for i in ids)
        assert seen == dict.fromkeys(range(N), 1), f"epoch {epoch}"
    return straight


def check(make, folder):
    """Each sample of each epoch once, straight and after a stop at any step; the same batches."""
    straight = each_once(make, folder)
    # Once after each step of the first epoch, and within the second.
    stops = [*range(1, STEPS), STEPS, STEPS + 1]
    paths = [str(folder / f"{done - 1:03d}.ckpt") for done in stops]
    for done, resumed in zip(stops, runs(make, paths, folder), strict=True):
        for again, whole in zip(resumed, straight, strict=True):
            in_epoch = [ids for epoch, ids in again if epoch == done // STEPS]
            assert in_epoch == [ids for e, ids in whole[done:] if e == done // STEPS] or (
                done % STEPS == 0 and len(in_epoch) == STEPS
            ), f"after step {done}"
        for epoch in range(done // STEPS, EPOCHS):
            before = [ids for rank in straight for e, ids in rank[:done] if e == epoch]
            after = [ids for rank in resumed for e, ids in rank if e == epoch]
            seen = Counter(i for ids in before + after for i in ids)
            assert seen == dict.fromkeys(range(N), 1), f"after step {done}, epoch {epoch}"


def _sample(index):
    return {key: value for key, value in Numbers(N)[index].items() if key != "i"} | {"i": index}


def _optimize(rank, world_size, folder):  # in a process of its own: the library leaves threads
    import litdata

    litdata.optimize(
        fn=_sample, inputs=list(range(N)), output_dir=str(folder), num_workers=1, chunk_size=4
    )


@pytest.mark.library("litdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_litdata(workers, tmp_path):
    import litdata

    run_ranks(_optimize, 1, tmp_path / "data", init_process_group=False)

    def make():
        data = litdata.StreamingDataset(str(tmp_path / "data"), shuffle=True, drop_last=True)
        return litdata.StreamingDataLoader(data, batch_size=SIZE, num_workers=workers)

    check(make, tmp_path / "ckpt")


@pytest.mark.library("torchdata.stateful_dataloader")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata(workers, tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        return StatefulDataLoader(Numbers(N), batch_size=SIZE, shuffle=True, num_workers=workers)

    check(make, tmp_path)


class _Part(torch.utils.data.IterableDataset):
    """This rank's part, with a position: what torchdata asks a dataset for."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        rank = torch.distributed.get_rank()
        mine = range(rank, N, RANKS)
        while self.at < len(mine):
            self.at += 1
            yield Numbers(N)[mine[self.at - 1]]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.library("torchdata.stateful_dataloader")
def test_torchdata_with_data_that_only_yields(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    check(lambda: StatefulDataLoader(_Part(), batch_size=SIZE), tmp_path)


@pytest.mark.library("torchdata.nodes")
def test_torchdata_nodes(tmp_path):
    """A chain of nodes, which is no loader of torch's, over this rank's part."""
    from torch.utils.data import default_collate
    from torchdata import nodes

    def make():
        mine = nodes.IterableWrapper(range(torch.distributed.get_rank(), N, RANKS))
        rows = nodes.Mapper(mine, Numbers(N).__getitem__)
        batches = nodes.Mapper(nodes.Batcher(rows, SIZE), default_collate)
        return nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=2))

    check(make, tmp_path)


@pytest.mark.library("datasets")
def test_datasets(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"i": list(range(N))})

    def make():
        data = rows.with_transform(lambda batch: _columns(batch["i"]))
        return torch.utils.data.DataLoader(data, batch_size=SIZE, shuffle=True)

    check(make, tmp_path)


@pytest.mark.library("datasets")
@pytest.mark.library("torchdata.stateful_dataloader")
def test_datasets_that_only_yield(tmp_path):
    """With workers: without, the library itself begins all later epochs where it went on, too."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    def numbers(shards):
        for shard in shards:
            yield from ({"i": i} for i in range(shard, N, 4))

    # Not to_iterable_dataset(): with map() behind it, the library itself goes on at the next shard.
    rows = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})

    def make():
        mine = split_dataset_by_node(rows, torch.distributed.get_rank(), RANKS)
        data = mine.map(lambda row: Numbers(N)[row["i"]])
        return StatefulDataLoader(data.with_format("torch"), batch_size=SIZE, num_workers=2)

    check(make, tmp_path)


def _columns(indices):
    rows = [Numbers(N)[i] for i in indices]
    return {key: [row[key] for row in rows] for key in rows[0]}


@pytest.mark.library("webdataset")
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset(workers, tmp_path):
    import webdataset

    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for i in range(shard, N, 4):
                tar.write({"__key__": f"{i:03d}", "i.json": i})

    def make():
        shards = str(tmp_path / "{0..3}.tar")
        data = webdataset.WebDataset(
            shards, nodesplitter=webdataset.split_by_node, shardshuffle=False
        )
        data = data.decode().map(lambda sample: Numbers(N)[sample["i.json"]]).batched(SIZE)
        return webdataset.WebLoader(data, batch_size=None, num_workers=workers)

    each_once(make, tmp_path / "ckpt")  # it has no state: a resumed run begins its epoch anew


@pytest.mark.library("streaming")
@pytest.mark.parametrize("workers", [0, 2])
def test_mosaicml_streaming(workers, tmp_path):
    import streaming

    with streaming.MDSWriter(out=str(tmp_path / "data"), columns={"i": "int"}) as out:
        for i in range(N):
            out.write({"i": i})

    class Rows(streaming.StreamingDataset):
        def __getitem__(self, index):
            return Numbers(N)[int(super().__getitem__(index)["i"])]

    def make():  # the library asks torchrun's variables who it is, and nobody else
        rank = str(torch.distributed.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        data = Rows(local=str(tmp_path / "data"), shuffle=True, batch_size=SIZE)
        return streaming.StreamingDataLoader(data, batch_size=SIZE, num_workers=workers)

    check(make, tmp_path / "ckpt")
