"""Training loaders: who makes their batches, where they are, what a checkpoint says about them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_dp.data.join import join_ends
from lightning_dp.data.loader import LoaderParts, give_batches, is_stateful
from lightning_dp.data.share import Cursor
from lightning_dp.data.state import DataState, LoaderState
from lightning_dp.data.stream import StreamBatches
from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane.common import Ranks, as_resumable
from lightning_dp.data_plane.resume import Resume, unit_of
from lightning_dp.data_plane.streams import prepare_stream
from lightning_dp.internals import loaders as loader_seams
from lightning_dp.internals import trainer as trainer_seams
from lightning_dp.internals.lightning import pl

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One training loader.

    Attributes:
        loader: What Lightning iterates over.
        stateful: Whether the user's loader keeps a state of its own.
        batches: What makes its batches, if that is ours.
        restored: Whether the user's loader skips what was trained by itself, while ``batches`` begin at
            the epoch's head.
    """

    loader: Any
    stateful: bool
    batches: TrainBatches | StreamBatches | None = None
    restored: bool = False


class TrainingData:
    """The training loaders of one fit.

    Args:
        ranks: Who shares the data, and how.
        trainer: Whose loops count.
        resume: Where a loaded checkpoint says training is.
    """

    def __init__(self, ranks: Ranks, trainer: pl.Trainer, resume: Resume | None) -> None:
        self.ranks = ranks
        self._trainer = trainer
        self._loaded = resume
        self._entries: list[Entry] = []
        self._restarts = False  # the checkpoint's epoch cannot go on where it was
        self._begun = 0  # batches, since this object exists, in any epoch
        self._epoch: int | None = None  # of the last batch begun on the current loaders
        self._first = (-1, 0)  # the epoch that was resumed, and its first batch
        self._final_states: tuple[dict[int, Any], ...] | None = None

    @property
    def _resume(self) -> Resume | None:
        """What was loaded, as long as nothing was trained since."""
        return self._loaded if self._begun == 0 else None

    # Loaders

    def begin_set(self) -> None:
        """Forget the loaders so far: new ones are about to come."""
        self._entries = []
        self._epoch = None

    def process(self, loader: Any) -> Any:
        """Return what Lightning should iterate over in the place of ``loader``.

        Collective: every rank, for each loader in turn. Blocks.
        """
        if self._epoch is not None:
            self.begin_set()  # nobody announced it, but training has gone on since the last loader
        resume = self._resume
        epoch = resume.epoch if resume is not None else self.current_epoch()
        if isinstance(loader, DataLoader):
            for target in LoaderParts.of(loader).epoch_targets:
                target.set_epoch(epoch)  # before workers start and take a copy of the dataset
        if self.ranks.shards(loader):
            entry = self._with_batches(loader, epoch)
        else:
            state = self._saved_state(loader) if is_stateful(loader) else None
            ready = prepare_stream(
                loader, self.ranks, self._trained, self._kept, training=True, state=state
            )
            entry = Entry(ready, is_stateful(loader))
        self._entries.append(entry)
        return entry.loader

    def _with_batches(self, loader: DataLoader[Any], epoch: int) -> Entry:
        """Give a loader batches of ours; and its own state where ranks and batches are as they were."""
        ranks, resume, number = self.ranks, self._resume, len(self._entries)
        parts = ranks.parts(loader, training=True)
        stateful = is_stateful(parts.loader)
        start, state = Cursor(epoch), None
        if resume is not None:
            start = self._start(resume, parts)
            same_size = resume.loader(number).batch_size in (0, parts.batch_size)  # 0: not known
            if stateful and same_size and not self._restarts:
                state = resume.own_state(number, self._nth_stateful, ranks.shard)
        if state is not None:
            start = Cursor(epoch, start.pass_index)
        begun = partial(self._begun_since_start, restored=state is not None)
        batches: TrainBatches | StreamBatches
        if parts.source.length is None:
            batches = StreamBatches(parts, ranks.shard, start, begun)
        else:
            batches = TrainBatches(parts, ranks.shard, start, begun, ranks.agree)
            self._warn_small(batches)
            if resume is not None:
                self._check_order(batches, resume, number)
        ready = give_batches(batches)
        if stateful:
            ready = join_ends(ready, self._trained, None, keep=self._kept, state=state)
        else:
            as_resumable(ready)
        return Entry(ready, stateful, batches, restored=state is not None)

    def _start(self, resume: Resume, parts: LoaderParts) -> Cursor:
        start, changed = resume.start(len(self._entries), parts, self.ranks.shard)
        if changed is not None:
            self._restarts = True
            self._warn_resume(
                f"cannot go on in the middle of epoch {resume.epoch}: {changed}. The epoch begins anew,"
                " so samples of its first part are trained again."
            )
        return start

    def _check_order(self, batches: TrainBatches, resume: Resume, number: int) -> None:
        saved = resume.loader(number).order_hash
        if saved and batches.start.consumed and saved != batches.order_hash:
            self._warn_resume(
                f"{batches.parts.source.name} does not give the order of epoch {resume.epoch} again. The"
                " rest of the epoch is taken from the new order: some samples come twice, some never."
                " Seed the sampler, or give it a set_epoch(epoch)."
            )

    def _warn_resume(self, message: str) -> None:
        self.ranks.warn_or_raise(message, strict=self.ranks.options.resume == "strict")

    def _warn_small(self, batches: TrainBatches) -> None:
        total, ranks = batches.total, self.ranks.world_size
        unit = unit_of(batches.parts)
        if 0 < total < ranks and not batches.drop_last:
            self.ranks.warn_or_raise(
                f"there are {total} {unit}(es) to train on for {ranks} ranks: some are trained on several"
                " ranks in the same step.".replace("sample(es)", "sample(s)")
            )
        elif total and not len(batches):
            self.ranks.warn_or_raise(
                f"drop_last leaves nothing to train on: {total} {unit}s do not fill one batch of"
                f" {batches.batch_size} on each of {ranks} ranks."
            )

    # Loaders that keep a state of their own

    @property
    def _nth_stateful(self) -> int:
        return sum(entry.stateful for entry in self._entries)

    @property
    def _kept(self) -> int:
        return self._trainer.accumulate_grad_batches

    def _saved_state(self, loader: Any) -> Any:
        """This rank's state for a loader whose batches are not ours; ``None`` at an epoch's head."""
        resume, number, shard = self._resume, len(self._entries), self.ranks.shard
        if resume is None:
            return None
        state = resume.own_state(number, self._nth_stateful, shard)
        states = resume.states(number)
        if state is not None or not states:
            return state
        merge = getattr(loader, "merge_state_dicts", None)
        state = merge(states, shard.rank, shard.world_size) if callable(merge) else None
        if state is None:
            self._restarts = True
            self._warn_resume(
                f"{type(loader).__name__} keeps a position for each rank, and the checkpoint has those"
                f" of {len(states)} rank(s), not {shard.world_size}: epoch {resume.epoch} begins"
                " anew. A method merge_state_dicts(states, rank, world_size) of the loader would let it go"
                " on."
            )
        return state

    # Where training is: Lightning's counters, read so that hooks at any moment see the same

    def batch_begins(self) -> None:
        """Count a batch that is about to be trained."""
        self._begun += 1
        self._epoch = self.current_epoch()

    def current_epoch(self) -> int:
        """The epoch that the loaders are in."""
        for entry in self._entries:
            if entry.batches is not None:
                return entry.batches.sampler.epoch
        return loader_seams.loop_progress(self._trainer).epoch

    def _trained(self) -> int:
        """Batches trained since this object exists."""
        if self._epoch is None:
            return self._begun
        now = loader_seams.loop_progress(self._trainer)
        return self._begun - (now.begun - now.done)

    def _begun_since_start(self, *, restored: bool) -> int:
        """Batches begun in the running epoch, since the loader's start; 0 before the first one."""
        if self._epoch is None:
            return 0
        begun = loader_seams.loop_progress(self._trainer).begun
        return begun - self._skipped(self.current_epoch(), restored=restored)

    def _skipped(self, epoch: int, *, restored: bool) -> int:
        """The number of ``epoch``'s first batch here."""
        return self._first[1] if epoch == self._first[0] and not restored else 0

    @property
    def _effective_batch(self) -> int:
        """Units of the first loader in one optimizer step of all ranks; 0 if its batches are not ours."""
        batches = self._entries[0].batches if self._entries else None
        if batches is None:
            return 0
        return batches.batch_size * self.ranks.world_size * self._trainer.accumulate_grad_batches

    # When training starts

    def restore_position(self) -> None:
        """Move the fit loop to where the data goes on, and say so. Local: every rank computes the same."""
        resume = self._resume
        if resume is None:
            return
        length = self._trainer.num_training_batches
        if resume.state is not None:
            loader_seams.set_reload_epoch(self._trainer, resume.state.reload_epoch)
        first = 0 if self._restarts else self._first_batch(resume)
        first = min(first, int(length)) if length != float("inf") else first
        if loader_seams.restore_fit_loop(self._trainer, resume.epoch, first, length):
            self._first = (resume.epoch, first)
        if self.ranks.shard.rank == 0:
            self._report_resume(resume, first)

    def _first_batch(self, resume: Resume) -> int:
        """The number of the epoch's next batch, from the loader that decides where the epoch ends."""
        batches = [entry.batches for entry in self._entries if entry.batches is not None]
        if not batches or any(entry.restored for entry in self._entries):
            return resume.batches
        sized = [
            (len(each), each.first_batch) for each in batches if isinstance(each, TrainBatches)
        ]
        if not sized:
            return batches[0].first_batch
        decides = min if loader_seams.combination_mode(self._trainer) == "min_size" else max
        return decides(sized)[1]

    def _report_resume(self, resume: Resume, first: int) -> None:
        ranks = self.ranks.world_size
        if resume.state is None:
            log.info(
                "lean_ddp: the checkpoint has no data state; its counters are taken for those of %d rank(s)"
                " with this batch size: epoch %d goes on at batch %d.",
                ranks,
                resume.epoch,
                first,
            )
            return
        before, now = resume.state.effective_batch, self._effective_batch
        if before and now and before != now:
            log.warning(
                "lean_ddp: an optimizer step had %d samples (%d rank(s)) and now has %d (%d rank(s)). Each"
                " remaining sample is still trained once, but epochs have %s batches a rank now, and a"
                " learning-rate schedule counted in steps covers another number of samples.",
                before,
                resume.state.world_size,
                now,
                ranks,
                self._trainer.num_training_batches,
            )

    def report_batch_size(self) -> None:
        """Say once what one optimizer step consists of."""
        ranks, trainer = self.ranks, self._trainer
        batches = self._entries[0].batches if self._entries else None
        if batches is None or ranks.shard.rank != 0:
            return
        log.info(
            "lean_ddp: %d x %d rank(s) x %d micro-batch(es) = %d %s per optimizer step.",
            batches.batch_size,
            ranks.world_size,
            trainer.accumulate_grad_batches,
            self._effective_batch,
            "batches of the batch sampler" if batches.parts.source.batches else "samples",
        )
        overfit = getattr(trainer, "overfit_batches", 0)
        if isinstance(overfit, int) and overfit > 0 and ranks.world_size > 1:
            log.info(
                "lean_ddp: overfit_batches=%d counts for each rank: %d batches in all.",
                overfit,
                overfit * ranks.world_size,
            )

    # Checkpoints, from wherever in the Trainer's life they are written

    def save(self, checkpoint: dict[str, Any], waiting: int) -> None:
        """Put the data state into ``checkpoint["lean_ddp"]["data"]``.

        If the checkpoint holds the partial gradients of an unfinished accumulation window (an entry
        ``checkpoint["lean_ddp"]["window"]``), the state is that of the last micro-batch. If it does not,
        the batches since the last optimizer step count as not trained: they come again on resume.

        Args:
            checkpoint: About to be written.
            waiting: Micro-batches that wait for their optimizer step, the running one included.

        Collective: every rank if a training loader is stateful, unless training is failing or over.
        """
        if not self._entries:
            return
        ours = checkpoint.setdefault("lean_ddp", {})
        epoch, batches = self._position()
        unfinished = 0 if ours.get("window") else self._unfinished(waiting)
        back = min(batches, unfinished)
        ours["data"] = DataState(
            epoch=epoch,
            seed=self.ranks.shard.seed,
            world_size=self.ranks.world_size,
            accumulate=self._trainer.accumulate_grad_batches,
            batches=batches - back,
            loaders=tuple(
                self._loader_state(each, epoch, batches - back) for each in self._entries
            ),
            loader_states=self._loader_states(checkpoint, back),
            reload_epoch=loader_seams.reload_epoch(self._trainer),
        ).to_checkpoint()
        if unfinished and self.ranks.shard.rank == 0:
            lost = unfinished - back
            log.info(
                "lean_ddp: the checkpoint lies inside an accumulation window whose gradients it does not"
                " hold; on resume, %d batch(es) of each rank are trained again%s.",
                back,
                f", and {lost} of the epoch before are not" if lost else "",
            )

    def _position(self) -> tuple[int, int]:
        """The epoch to go on with, and how many batches of it each rank has trained."""
        if self._epoch is None and (resume := self._resume) is not None:
            return resume.epoch, 0 if self._restarts else resume.batches
        if self._epoch is None or self.current_epoch() != self._epoch:
            return self.current_epoch(), 0  # nothing was trained on these loaders, or in this epoch
        at = loader_seams.loop_progress(self._trainer)
        if at.is_over(self._trainer.num_training_batches):
            return self._epoch + 1, 0
        return self._epoch, at.done

    def _unfinished(self, waiting: int) -> int:
        """Batches that were trained since the last optimizer step."""
        if self._epoch is None:
            return 0
        at = loader_seams.loop_progress(self._trainer)
        return max(0, waiting - (at.begun - at.done))

    def _loader_state(self, entry: Entry, epoch: int, batches: int) -> LoaderState:
        made = entry.batches
        if made is None:
            return LoaderState()
        if self._epoch is None and not entry.restored:
            at = made.start
        else:
            at = made.cursor_after(epoch, batches - self._skipped(epoch, restored=entry.restored))
        if at.epoch != epoch:
            at = Cursor(epoch)
        total, order_hash = made.parts.source.length or 0, 0
        if isinstance(made, TrainBatches):
            mode = loader_seams.combination_mode(self._trainer)
            first_pass = made.start.pass_index if epoch == made.start.epoch else 0
            if mode == "max_size" and at.pass_index > first_pass:  # exhausted, and not begun again
                at = Cursor(epoch, first_pass, made.total)
            order_hash = made.hash_of(at)
        return LoaderState(
            unit_of(made.parts), total, made.batch_size, at.pass_index, at.consumed, order_hash
        )

    def _loader_states(self, checkpoint: dict[str, Any], back: int) -> tuple[dict[int, Any], ...]:
        """Collect what stateful loaders say, from all ranks; Lightning would keep rank 0's only."""
        loader_seams.take_loader_states(checkpoint)
        if not any(entry.stateful for entry in self._entries):
            return ()
        states = {
            number: entry.loader.state_dict(back=back)
            for number, entry in enumerate(self._entries)
            if entry.stateful
        }
        known = {number: state for number, state in states.items() if state is not None}
        if len(known) == len(states):  # another strategy wants all of them, or none
            loader_seams.put_loader_states(checkpoint, known.values())
        if self._final_states is not None:
            return self._final_states
        group = self.ranks.group
        if group.world_size > 1 and trainer_seams.is_unwinding(self._trainer):
            return ()  # the others may not come
        return tuple(group.all_gather_object(known))

    def end(self) -> None:
        """Keep what stateful loaders say, for checkpoints after training: the ranks meet no more then.

        Collective: every rank if a training loader is stateful.
        """
        self._final_states = self._loader_states({}, 0)
