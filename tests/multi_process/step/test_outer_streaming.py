"""``outer`` in fragments (streaming DiLoCo): sent behind local steps, applied later, saved under way."""

from __future__ import annotations

import copy
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp.errors import RankFailedError
from tests.support.logs import log_lines
from tests.support.modules import Base
from tests.support.parity import as_bytes, assert_equal_on_all_ranks
from tests.support.rounds import Saves, again, held
from tests.support.spies import RecordingWire
from tests.support.trainers import Rows, fit, lean, ranks, trainer

pytestmark = pytest.mark.multi_process
STREAMING = {"every": 6, "fragments": 3, "delay": 2, "mix": 0.5}


class Net(Base):
    """AdamW, so that a rank's optimizer has a state of its own; shows what a validation sees."""

    def __init__(self, weigh=False):
        super().__init__()
        self.weigh, self.seen = weigh, {}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "loss_weight": 3.0 - self.global_rank} if self.weigh else loss

    def validation_step(self, batch, batch_idx):
        self.seen[self.trainer.global_step] = held(self)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def loss(self, x):
        return self(self.norm(x)).square().mean()


class Fragments(Callback):
    """Which fragment each parameter is in; and how many bytes were sent in each step."""

    def __init__(self):
        self.sent, self.fragments, self.anchors = [], {}, []

    def on_train_start(self, trainer, module):
        engine = trainer.strategy._engine
        self.fragments = engine.fragments.state()["of"]
        self.wire = RecordingWire(engine.reducer.wire)
        engine.reducer.wire = self.wire
        object.__setattr__(engine.reducer._parts, "wire", self.wire)

    def on_train_batch_end(self, trainer, module, *_):
        self.sent.append(sum(size for *_, size in self.wire.launches))
        self.wire.launches.clear()
        anchors = [
            a.value.clone() for a in trainer.strategy._engine.rounds._outer._anchors.values()
        ]
        assert_equal_on_all_ranks({str(i): each for i, each in enumerate(anchors)})
        self.anchors.append(anchors)


def simulate(fragments, world_size, outer, steps, accumulate=1, weights=None):
    """The same training in one process: one module a rank, one ``torch.optim.SGD`` a fragment outside."""
    every, delay, mix = outer["every"], outer.get("delay", 0), outer.get("mix", 0.0)
    count = outer.get("fragments", 1)
    weights = weights or [1.0] * world_size
    anchor = Net()
    workers = [copy.deepcopy(anchor) for _ in range(world_size)]
    inner = [worker.configure_optimizers() for worker in workers]
    settings = {"lr": 0.7, "momentum": 0.9, **outer.get("optimizer", {})}
    settings.setdefault("nesterov", settings["momentum"] > 0)
    named = dict(anchor.named_parameters())
    members = [[name for name in named if fragments[name] == i] for i in range(count)]
    outside = [torch.optim.SGD([named[name] for name in names], **settings) for names in members]
    local = [dict(worker.named_parameters()) for worker in workers]
    under_way, since, data = {}, [0] * count, Rows()

    def send(number):
        since[number] = 0
        return {
            name: sum(w * (named[name] - own[name]) for w, own in zip(weights, local, strict=True))
            .div(sum(weights)).detach()
            for name in members[number]
        }  # fmt: skip

    def apply(number, means, mix):
        for name, mean in means.items():
            named[name].grad = mean
        outside[number].step()
        with torch.no_grad():
            for own in local:
                for name in members[number]:
                    own[name].copy_(mix * own[name] + (1 - mix) * named[name])

    for step in range(steps):
        for rank, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            optimizer.zero_grad()
            for part in range(accumulate):
                rows = Rows.share((step * accumulate + part) % 4, rank, world_size)
                worker.loss(torch.stack([data[row] for row in rows])).div(accumulate).backward()
            optimizer.step()
        since = [each + 1 for each in since]
        for sends in (False, True):  # first what is due, then what leaves, which may be due at once
            for number in range(count):
                if sends and (step + 1) % every == number * every // count:
                    under_way[number] = step + 1 + delay, send(number)
                if under_way.get(number, (0,))[0] == step + 1:
                    apply(number, under_way.pop(number)[1], mix)
    for number, (_, means) in under_way.items():
        apply(number, means, mix)
    for number in range(count):
        means = send(number) if since[number] else None
        if means is not None:
            apply(number, means, 0.0)
    return [p.detach() for p in anchor.parameters()]


CASES = (
    (STREAMING, 1, False),
    ({**STREAMING, "delay": 0}, 2, True),
    ({"every": 5, "fragments": 2, "delay": 2, "optimizer": {"lr": 1.0, "momentum": 0}}, 1, True),
    ({"every": 4, "delay": 4, "mix": 0.25}, 1, False),
    ({"every": 3, "fragments": 1, "delay": 0, "mix": 0.0}, 1, False),  # DiLoCo
)


def _like_simulated(rank, world_size, port):
    environment, weights = dict(os.environ), [3.0 - r for r in range(world_size)]
    for number, (outer, accumulate, weigh) in enumerate(CASES[:: world_size - 1]):
        again(environment)
        module, watch = Net(weigh), Fragments()
        strategy = lean(
            outer=outer, check_replicas_every_n_steps=1, shared_memory=(number + world_size) % 2 > 0
        )
        fit(
            module, rank, world_size, port, strategy, callbacks=lambda w=watch: [w],
            max_epochs=5, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        assert_equal_on_all_ranks(module.state_dict())
        expected, other = (
            simulate(
                watch.fragments, world_size, each, 20 // accumulate, accumulate,
                weights if weigh else None,
            )
            for each in (outer, {**outer, "delay": (outer.get("delay", 0) + 1) % 3})
        )  # fmt: skip
        found = list(module.parameters())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert not all(map(torch.allclose, found, other))  # control


@pytest.mark.parametrize("world_size", [2, 3])
def test_D7_weights_are_those_of_a_simulation(world_size):
    ranks(_like_simulated, world_size)


class Wide(Net):
    """Twelve layers of one size: fragments can be equal."""

    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(*(nn.Linear(12, 12) for _ in range(12))).double()

    def loss(self, x):
        return self(x).square().mean() + self.more(torch.cat([x, x], 1)).square().mean()


def _spreads(rank, world_size, port):
    environment, found = dict(os.environ), []
    for outer in ({"every": 4, "fragments": 4, "delay": 1}, {"every": 4}):
        again(environment)
        watch = Fragments()
        fit(
            Wide(), rank, world_size, port, lean(outer=outer, bucket_cap_mb=0.005),
            callbacks=lambda w=watch: [w], max_epochs=4,
        )  # fmt: skip
        found.append(watch.sent[8:12])  # the last step lets all meet
    streamed, together = found
    mean = sum(streamed) / len(streamed)
    assert max(streamed) <= 1.3 * mean
    assert sum(streamed) == pytest.approx(sum(together), rel=0.1)  # flags, control blocks, padding
    assert max(together) > 3 * mean  # control
    return streamed


def test_D7_no_step_sends_more_than_a_fragment():
    ranks(_spreads, 2)


class SlowLink(RecordingWire):
    """A link that takes ``steps_a_byte``, a bucket at a time; adds up how many steps were waited for.

    Its clock is the number of steps, so that nothing depends on how busy the machine is.
    """

    def __init__(self, inner, steps_a_byte, step):
        super().__init__(inner)
        self.steps_a_byte, self.step = steps_a_byte, step
        self.is_free_at, self.waited = 0.0, 0.0

    def launch(self, bucket):
        work, arrives = super().launch(bucket), max(self.is_free_at, self.step() + self.waited)
        self.is_free_at = arrives = arrives + bucket.nbytes * self.steps_a_byte

        def wait():
            self.waited += max(0.0, arrives - self.step() - self.waited)
            work.wait()

        return SimpleNamespace(wait=wait)


class Slow(Wide):
    """The whole model takes six steps on the link, as 48 MiB of an MLP on 1 Gbit/s."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step in (55, 105):  # a round, after buckets were planned
            self.marks.append(self.wire.waited)
        return super().training_step(batch, batch_idx)

    def on_train_start(self):
        reducer, self.marks = self.trainer.strategy._engine.reducer, []
        nbytes = sum(parameter.nbytes for parameter in self.parameters())
        trainer = self.trainer
        self.wire = reducer.wire = SlowLink(reducer.wire, 6 / nbytes, lambda: trainer.global_step)
        object.__setattr__(reducer._parts, "wire", self.wire)


def _hides(rank, world_size, port):
    environment, shares = dict(os.environ), []
    for outer in ({"every": 50, "fragments": 3, "delay": 5}, {"every": 50}):
        again(environment)
        module = Slow()
        fit(
            module, rank, world_size, port, lean(outer=outer, bucket_cap_mb=0.005),
            max_steps=110, max_epochs=-1,
        )  # fmt: skip
        before, after = module.marks
        shares.append((after - before) / 50)
    return shares


def test_D9_local_steps_hide_a_slow_link():
    for streamed, together in ranks(_hides, 2):
        assert streamed <= 0.03
        assert together > 0.1  # control


def _on_each_wire(rank, world_size, port):
    environment, found = dict(os.environ), []
    for strategy in (
        {},
        {"shared_memory": False, "wire": {"dtype": "bf16", "min_bytes": 0}},
        {"shared_memory": False, "wire": {"dtype": "int8", "min_bytes": 0}},
    ):
        again(environment)
        module, watch = Normed(), Fragments()
        module.float()
        late = lean(outer=STREAMING, check_replicas_every_n_steps=1, **strategy)
        late._engine.host_reads_are_free = bool(strategy)  # or as on an accelerator
        module.loss = lambda x, m=module: m(m.norm(x.float())).square().mean()
        fit(module, rank, world_size, port, late, callbacks=lambda w=watch: [w], max_epochs=5)
        assert_equal_on_all_ranks(module.state_dict())
        assert len(watch.anchors) == 20  # equal after each step
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    for rounded in found[1:]:
        torch.testing.assert_close(rounded, found[0], rtol=0.2, atol=0.02)
        assert not torch.equal(rounded, found[0])  # control


def test_replicas_are_equal_on_each_wire_and_where_reads_are_late():
    ranks(_on_each_wire, 2)


# Saved under way


STEPS = (3, 7, 11)  # fragments leave after steps 2, 4 and 6, and are applied two later


def _resumes(rank, world_size, port, folder):
    environment, outer = dict(os.environ), {**STREAMING, "optimizer": {"lr": 0.5}}
    whole = Normed()
    saves = {"callbacks": lambda: [Saves(folder, STEPS)]}
    fit(whole, rank, world_size, port, lean(outer=outer), max_epochs=4, **saves)
    plain = Normed()
    again(environment)
    fit(plain, rank, world_size, port, lean(outer=outer), max_epochs=4)
    assert held(plain) == held(whole)  # a save changes nothing
    for step in STEPS:
        again(environment)
        module, path = Normed(), f"{folder}/{step}.ckpt"
        fit(module, rank, world_size, port, lean(outer=outer), max_epochs=4, ckpt_path=path)
        assert held(module) == held(whole), step
    saved = torch.load(f"{folder}/3.ckpt", weights_only=True)
    del saved["lean_ddp"]["outer"]["meeting"]
    if rank == 0:  # control
        torch.save(saved, f"{folder}/less")
    dist.barrier()
    again(environment)
    module = Normed()
    fit(module, rank, world_size, port, lean(outer=outer), max_epochs=4, ckpt_path=f"{folder}/less")
    assert held(module) != held(whole)


def _resumes_elsewhere(rank, world_size, port, folder, outer):
    lines, module = log_lines("lightning_dp.step.outer"), Normed()
    path = f"{folder}/3.ckpt"
    t = fit(module, rank, world_size, port, lean(outer=outer), max_epochs=4, ckpt_path=path)
    assert_equal_on_all_ranks(module.state_dict())
    return t.global_step, lines


def test_D7_saved_with_a_fragment_under_way_the_same_bits_follow(tmp_path):
    ranks(_resumes, 2, str(tmp_path))
    for world_size, outer in ((3, STREAMING), (2, {"every": 4, "fragments": 2})):
        (steps, lines), *others = ranks(_resumes_elsewhere, world_size, str(tmp_path), outer)
        assert steps == 16
        assert "saved by 2 rank(s) with 3 fragment(s) in step 3" in lines[0]
        assert not any(said for _, said in others)


class Begins(Callback):
    def on_train_batch_start(self, trainer, module, *_):
        self.weights = getattr(self, "weights", [p.detach().clone() for p in module.parameters()])


def _ends(rank, world_size, port, folder):
    environment, module = dict(os.environ), Net()
    saves = {"callbacks": lambda: [Saves(folder, (3,))]}
    fit(Net(), rank, world_size, port, lean(outer=STREAMING), max_epochs=4, **saves)
    again(environment)
    fit(module, rank, world_size, port, lean(outer=STREAMING), max_steps=3, max_epochs=-1)
    return [p.detach() for p in module.parameters()]


def _begins(rank, world_size, port, folder):
    begins, path = Begins(), f"{folder}/3.ckpt"
    options = {"callbacks": lambda: [begins], "max_epochs": 4, "ckpt_path": path}
    fit(Net(), rank, world_size, port, lean(outer={"every": 6, "mix": 0.5}), **options)
    return begins.weights


def test_a_saved_round_is_finished_as_the_end_of_training_finishes_it(tmp_path):
    ended = ranks(_ends, 2, str(tmp_path))[0]
    begun = ranks(_begins, 3, str(tmp_path))[0]
    for ours, theirs in zip(begun, ended, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Stops(Normed):
    stop_at = -1

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def _stops(rank, world_size, port, folder):
    environment = dict(os.environ)
    whole = Stops()
    outer = {"every": 20, "fragments": 2, "delay": 9, "mix": 0.5}  # one is nearly always under way
    fit(whole, rank, world_size, port, lean(outer=outer), max_epochs=10)
    for path in (None, "last"):
        again(environment)
        stopped = Stops()
        stopped.stop_at = 13 if rank == 1 and path is None else -1
        t = trainer(
            world_size, port, lean(outer=outer), folder, enable_checkpointing=True, max_epochs=10,
            callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0)],
        )  # fmt: skip
        try:
            t.fit(stopped, DataLoader(Rows(), batch_size=6), ckpt_path=path)
        except SystemExit:
            assert path is None
            assert 13 <= t.global_step < 40
            dist.barrier()
    assert held(stopped) == held(whole)


def test_D10_asked_to_stop_with_a_fragment_under_way_nothing_is_lost(tmp_path):
    ranks(_stops, 2, str(tmp_path))


# Others look at it


class Swaps(Callback):
    """Validates with weights of its own, as callbacks for moving averages do."""

    def on_validation_start(self, trainer, module):
        self.kept = [p.detach().clone() for p in module.parameters()]
        self.put(module, [torch.full_like(each, 0.5) for each in self.kept])

    def on_validation_end(self, trainer, module):
        self.put(module, self.kept)

    @torch.no_grad()
    def put(self, module, weights):
        for parameter, value in zip(module.parameters(), weights, strict=True):
            parameter.copy_(value)


def _validates(rank, world_size, port):
    environment, watch, loader = dict(os.environ), Fragments(), DataLoader(Rows(), batch_size=6)
    ends = []
    for callback in (Swaps(), watch):
        again(environment)
        module = Normed()
        t = trainer(
            world_size, port, lean(outer=STREAMING), max_epochs=3, val_check_interval=1,
            limit_val_batches=1, num_sanity_val_steps=0, callbacks=[callback],
        )  # fmt: skip
        t.fit(module, loader, loader)
        ends.append(held(module))
        if callback is not watch:
            weights = [as_bytes(torch.full_like(p, 0.5)) for p in module.parameters()]
            assert all(seen[: len(weights)] == weights for seen in module.seen.values())
    assert ends[0] == ends[1]
    names = [name for name, _ in module.named_parameters()]
    for step, anchors in enumerate(watch.anchors[:-1], 1):
        shown = dict(zip(module.state_dict(), module.seen[step], strict=True))
        assert [shown[name] for name in names] == [as_bytes(each) for each in anchors], step
    return module.seen


def test_a_validation_sees_what_all_ranks_agreed_on_last():
    first, second = ranks(_validates, 2)
    assert first == second
    assert [*first] == [*range(1, 13)]
    assert len({tuple(each) for each in first.values()}) > 4


class Fails(Net):
    kills = False

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 7:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("under way")
        return super().training_step(batch, batch_idx)


def _fails(rank, world_size, port, kills, options):
    module = Fails()
    module.kills = kills
    says = None if kills else "under way"
    strategy = lean(outer={"every": 10, "fragments": 2, "delay": 5}, **options)
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match=says):
        fit(module, rank, world_size, port, strategy, max_epochs=10**6)


def test_D6_a_failure_with_a_fragment_under_way_ends_all_ranks():
    ranks(_fails, 2, False, {"shared_memory": False, "wire": "int8"})
    assert ranks(_fails, 2, True, {}, expect_failure=True) == [None, None]
