"""``outer``: local steps and meetings, against simulations in plain torch."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.support.modules import Base
from tests.support.parity import as_bytes, assert_equal_on_all_ranks
from tests.support.spies import RecordingWire
from tests.support.trainers import Rows, fit, lean, ranks

pytestmark = pytest.mark.multi_process
AVERAGING = {"lr": 1.0, "momentum": 0}


class Net(Base):
    """SGD, or what ``make`` makes; the first rank's batches may weigh more."""

    def __init__(self, make=None, weigh=None):
        super().__init__()
        self.make, self.weigh = make, weigh

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if not self.weigh:
            return loss
        return {"loss": loss, "loss_weight": self.weigh(3.0 - self.global_rank)}

    def configure_optimizers(self):
        return self.make(self.parameters()) if self.make else super().configure_optimizers()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=6, line_search_fn="strong_wolfe")


def simulate(make, world_size, outer, steps, accumulate=1):
    """The same training in one process: one module a rank, ``torch.optim.SGD`` outside."""
    anchor = Net()
    workers = [copy.deepcopy(anchor) for _ in range(world_size)]
    inner = [make(worker.parameters()) for worker in workers]
    settings = {"lr": 0.7, "momentum": 0.9, **outer.get("optimizer", {})}
    settings.setdefault("nesterov", settings["momentum"] > 0)
    outside = torch.optim.SGD(anchor.parameters(), **settings)
    data, position = Rows(), 0
    for step in range(steps):
        for rank, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            optimizer.zero_grad()
            for part in range(accumulate):
                batch = (step * accumulate + part) % 4
                rows = Rows.share(batch, rank, world_size)
                worker.loss(torch.stack([data[row] for row in rows])).div(accumulate).backward()
        if step < outer.get("start_after", 0):
            for group in zip(*(worker.parameters() for worker in workers), strict=True):
                mean = torch.stack([parameter.grad for parameter in group]).mean(0)
                for parameter in group:
                    parameter.grad = mean.clone()
        for optimizer in inner:
            optimizer.step()
        if step < outer.get("start_after", 0):
            anchor.load_state_dict(workers[0].state_dict())
            continue
        position += 1
        if position == outer["every"] or step == steps - 1:
            position = 0
            for parameter, *local in zip(
                anchor.parameters(), *(worker.parameters() for worker in workers), strict=True
            ):
                parameter.grad = parameter.detach() - torch.stack(list(local)).mean(0)
            outside.step()
            for worker in workers:
                worker.load_state_dict(anchor.state_dict())
    return [p.detach() for p in anchor.parameters()]


def run(module, rank, world_size, port, outer, environment, **options):
    """One of several fits in one rank; returns the weights."""
    os.environ.update(environment)  # Lightning's environment forgets its variables after a fit
    strategy = lean(outer=outer, check_replicas_every_n_steps=1, **options.pop("strategy", {}))
    if options.pop("late", False):  # as on an accelerator
        strategy._engine.host_reads_are_free = False
    fit(module, rank, world_size, port, strategy, **options)
    assert_equal_on_all_ranks(dict(module.named_parameters()))
    return [p.detach().clone() for p in module.parameters()]


def _like_synchronous(rank, world_size, port):
    environment = dict(os.environ)
    outer = {"every": 1, "optimizer": AVERAGING}
    for weigh in (None, float, torch.tensor):  # a tensor is not read where that would wait
        for options in ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 1e3}):
            found = [
                run(
                    Net(weigh=weigh),
                    rank,
                    world_size,
                    port,
                    each,
                    environment,
                    late=weigh is torch.tensor,
                    max_epochs=2,
                    **options,
                )
                for each in (outer, None)
            ]
            for ours, synchronous in zip(*found, strict=True):
                torch.testing.assert_close(ours, synchronous, rtol=1e-12, atol=1e-12)
    control = run(Net(), rank, world_size, port, {"every": 2}, environment, max_epochs=2)
    assert any(not torch.allclose(a, b, rtol=1e-6) for a, b in zip(control, found[1], strict=True))


def test_D1_a_meeting_after_each_step_is_synchronous_training():
    ranks(_like_synchronous, 2)


def _like_simulated(rank, world_size, port):
    environment = dict(os.environ)
    for outer, accumulate in (
        ({"every": 3}, 1),
        ({"every": 3, "optimizer": AVERAGING}, 2),
        ({"every": 2, "optimizer": {"lr": 0.5, "momentum": 0.8, "nesterov": False}}, 1),
        ({"every": 3, "optimizer": AVERAGING, "start_after": 3}, 1),
        ({"every": 50}, 1),  # training ends in the first round
    ):
        options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
        found = run(Net(adam), rank, world_size, port, outer, environment, **options)
        expected = simulate(adam, world_size, outer, 12 // accumulate, accumulate)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_weights_are_those_of_a_simulation():
    ranks(_like_simulated, 2)
    ranks(_like_simulated, 3)


# Meetings


class Watch(Callback):
    """After each batch: whether all ranks hold the same weights and statistics; and the learning rate."""

    def __init__(self):
        self.equal, self.rates = [], []

    def on_train_batch_end(self, trainer, module, *_):
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        everyone = [None] * trainer.world_size
        dist.all_gather_object(everyone, {name: as_bytes(value) for name, value in held.items()})
        self.equal.append(all(each == everyone[0] for each in everyone))
        self.rates.append([o.param_groups[0]["lr"] for o in trainer.optimizers])


class Many(Base):
    """300 parameters, two optimizers, stepped by hand: one through Lightning, one behind its back."""

    def __init__(self, raw=False):
        super().__init__()
        self.raw = raw
        self.automatic_optimization = False
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(300)).double()

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers(use_pl_optimizer=not self.raw)):
            loss = self.loss(batch) + sum(self.more) * batch.mean() * (number + 1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        halves = [*self.backbone.parameters()], [*self.head.parameters(), *self.more]
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


def _meets_every(rank, world_size, port):
    environment = dict(os.environ)
    for module, outer, at in (
        (Many(), {"every": 5}, {4, 9, 11}),
        (Many(raw=True), {"every": 5}, {4, 9, 11}),
        (Net(), {"every": 5, "start_after": 2}, {0, 1, 6, 11}),
        (Net(), {"every": 1}, set(range(12))),
        (
            Net(lbfgs, float),
            {"every": 5},
            {4, 9, 11},
        ),  # closures run another time on each rank
    ):
        watch = Watch()
        callbacks = {"callbacks": lambda w=watch: [w]}
        run(module, rank, world_size, port, outer, environment, max_epochs=3, **callbacks)
        assert [i for i, equal in enumerate(watch.equal) if equal] == sorted(at)


def test_D3_ranks_meet_exactly_every_so_many_steps_of_however_many_optimizers():
    ranks(_meets_every, 2)


class Everything(Base):
    """In fp32: BatchNorm, a sparse embedding, a scalar in half precision, a large layer, a dead one."""

    def __init__(self):
        super().__init__()
        self.float()
        self.norm = nn.BatchNorm1d(6)
        self.table = nn.Embedding(7, 6, sparse=True)
        self.large = nn.Linear(6, 3000)
        self.small = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.dead = nn.Linear(3, 3)
        self.late = nn.Linear(6, 6).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.late.requires_grad_(batch_idx >= 2)  # frozen again at each epoch's start, in mid-round
        x = self.norm(batch.float() * (1 + self.global_rank)) + self.table(torch.arange(6) % 7)
        return self.loss(self.late(x)) + self.large(x).square().mean() + self.small.float()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _meets_with_everything(rank, world_size, port):
    environment = dict(os.environ)
    for strategy in (
        {"bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 0.01, "shared_memory": False},
        {"shared_memory": False, "wire": {"dtype": "bf16", "min_bytes": 0}},
        {"shared_memory": False, "wire": {"dtype": "int8", "min_bytes": 0}},
    ):
        for start_after in (0, 1):
            module, watch = Everything(), Watch()
            begin = {name: p.detach().clone() for name, p in module.named_parameters()}
            run(
                module, rank, world_size, port,
                {"every": 3, "optimizer": AVERAGING, "start_after": start_after}, environment,
                strategy=strategy, callbacks=lambda w=watch: [w], max_epochs=2,
            )  # fmt: skip
            local = [start_after - 1 + 3 * n for n in (1, 2)] + [7]
            assert [i for i, equal in enumerate(watch.equal) if equal and i >= start_after] == local
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, begin[name]) == name.startswith("dead"), name
            assert module.norm.num_batches_tracked == 8


def test_D4_any_parameter_on_any_wire_is_equal_after_each_meeting_and_batch_norm_too():
    ranks(_meets_with_everything, 2)


def _bytes_sent(rank, world_size, port, every):
    module, wires = Net(), []

    def look():
        reducer = module.trainer.strategy._engine.reducer
        wires.append(RecordingWire(reducer.wire))
        reducer.wire = wires[0]
        object.__setattr__(reducer._parts, "wire", wires[0])

    module.on_train_start = look
    outer = {"every": every} if every else None
    run(module, rank, world_size, port, outer, dict(os.environ), max_epochs=5)
    return sum(size for *_, size in wires[0].launches)


def test_D8_a_meeting_sends_what_a_synchronous_step_sends():
    synchronous, often, seldom = (ranks(_bytes_sent, 2, every)[0] for every in (0, 1, 10))
    assert often == synchronous
    assert seldom / synchronous == pytest.approx(1 / 10, rel=0.02)
