"""Prediction: each sample once, the right indices, idle ranks, and everything together again."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tests.support.sampling import Learner, Numbers, loader
from tests.support.trainers import lean, ranks, trainer

pytestmark = pytest.mark.multi_process


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, idx, loader_idx):
        self.batches.append((indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epochs.append((indices, [p.tolist() for p in predictions]))


class Mine(BatchSampler):
    """Without a ``sampler`` argument: Lightning by itself refuses it."""

    def __init__(self, n, size):
        super().__init__(range(n), size, False)
        self.n, self.size = n, size

    def __iter__(self):
        order = list(reversed(range(self.n)))
        return iter([order[at : at + self.size] for at in range(0, self.n, self.size)])


class Strict(DataLoader):
    def __init__(self, how_many, *, secret):
        super().__init__(Numbers(how_many), batch_size=2)


def loaders():
    return {
        "in order": loader(7, 2),
        "shuffled": loader(8, 2, shuffle=True),
        "drop_last": loader(7, 2, drop_last=True),
        "own batch sampler": DataLoader(Numbers(9), batch_sampler=Mine(9, 2)),
        "own loader": Strict(5, secret=1),
        "fewer than ranks": loader(2, 2),
    }


def _predict(rank, world_size, port, workers):
    torch.manual_seed(rank)
    out = {}
    for name, data in loaders().items():
        writer = Writer()
        t = trainer(world_size, port, lean(), callbacks=[writer])
        predicted = t.predict(Learner(), data)
        out[name] = [p.tolist() for p in predicted], writer.batches, writer.epochs
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sample_once_and_true_indices(world_size):
    results = ranks(_predict, world_size, 0)
    for name, data in loaders().items():
        n = len(data.dataset)
        seen = [i for each in results for batch in each[name][0] for i in batch]
        assert sorted(seen) == list(range(n)), name
        for predicted, batches, epochs in (each[name] for each in results):
            assert batches == [(batch, batch) for batch in predicted], name
            assert epochs == [([predicted], predicted)] if predicted else epochs == [([[]], [])]


class Shapes(Learner):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        i = batch["i"]
        return {
            "tensor": i * 10,
            "dict": {"i": i, "names": [f"n{int(k)}" for k in i]},
            "tuple": (i, i.double().unsqueeze(1).repeat(1, 2)),
            "scalar": i.sum(),
            "none": None,
        }[self.how]


def _gathered(rank, world_size, port, n, size, shuffle):
    out = {}
    for how in ("tensor", "dict", "tuple", "scalar", "none"):
        t = trainer(world_size, port, lean(gather_predictions=True))
        out[how] = t.predict(Shapes(how), loader(n, size, shuffle=shuffle))
    t = trainer(world_size, port, lean(gather_predictions=True))
    out["two"] = t.predict(Shapes("tensor"), [loader(n, size), loader(3, 1)])
    t = trainer(world_size, port, lean(gather_predictions=True), limit_predict_batches=1)
    out["limited"] = t.predict(Shapes("tensor"), loader(n, size))
    t = trainer(world_size, port, lean(gather_predictions=True))
    out["not returned"] = t.predict(Shapes("tensor"), loader(n, size), return_predictions=False)
    return out


@pytest.mark.parametrize(("n", "world_size"), [(7, 2), (8, 3), (2, 3), (5, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_gathered_predictions_are_in_the_order_of_the_dataset_on_every_rank(n, world_size, shuffle):
    for out in ranks(_gathered, world_size, n, 2, shuffle):
        flat = torch.cat(out["tensor"]).tolist()
        assert flat == [10 * i for i in range(n)]
        assert torch.cat([b["i"] for b in out["dict"]]).tolist() == list(range(n))
        assert [name for b in out["dict"] for name in b["names"]] == [f"n{i}" for i in range(n)]
        assert torch.cat([b[0] for b in out["tuple"]]).tolist() == list(range(n))
        assert torch.cat([b[1] for b in out["tuple"]]).tolist() == [
            [float(i)] * 2 for i in range(n)
        ]
        assert sum(int(s) for s in out["scalar"]) == sum(range(n))
        assert torch.cat(out["two"][0]).tolist() == [10 * i for i in range(n)]
        assert torch.cat(out["two"][1]).tolist() == [0, 10, 20]
        limited = torch.cat(out["limited"]).tolist()
        assert limited == sorted(limited)
        assert (
            len(limited) >= min(n, 2 * world_size) - 1
        )  # a tail may be shared out in smaller batches
        assert out["not returned"] is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers(4)[i] for i in range(4))


def _stream(rank, world_size, port, options):
    t = trainer(world_size, port, lean(gather_predictions=True, **options))
    return torch.cat(t.predict(Shapes("tensor"), DataLoader(Stream(), batch_size=2))).tolist()


def test_iterables_are_predicted_as_they_come():
    assert ranks(_stream, 2, {}) == [[0, 10, 20, 30, 0, 10, 20, 30]] * 2
    assert ranks(_stream, 2, {"iterable": "shard"}) == [[0, 20, 10, 30]] * 2
