"""Training loaders: who makes their batches, where they are, and where a resumed run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_dp.data.align import is_stateful
from lightning_dp.data.loader import LoaderParts, give_batches
from lightning_dp.data.share import Cursor
from lightning_dp.data.stream import StreamBatches
from lightning_dp.data.train_batches import TrainBatches
from lightning_dp.data_plane.common import Ranks, as_resumable
from lightning_dp.data_plane.progress import Progress
from lightning_dp.data_plane.resume import Resume, unit_of
from lightning_dp.data_plane.streams import prepare_stream
from lightning_dp.internals import loaders as loader_seams

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class Entry:
    """One training loader: what Lightning iterates over, and what makes its batches if that is ours."""

    loader: Any
    stateful: bool
    batches: TrainBatches | StreamBatches | None = None
    keeps_place: bool = False  # the user's loader got its own state back


class TrainingData:
    """The training loaders of one fit.

    Args:
        ranks: Who shares the data, and how.
        trainer: Whose loops count.
        resume: Where a loaded checkpoint says training is.

    Attributes:
        entries: One for each loader, in order.
        progress: How far training is.
        restarts: Whether the epoch of the checkpoint cannot go on where it was.
        final_states: What stateful loaders said on all ranks when training ended.
    """

    def __init__(self, ranks: Ranks, trainer: pl.Trainer, resume: Resume | None) -> None:
        self.ranks = ranks
        self.trainer = trainer
        self._loaded = resume
        self.progress = Progress(trainer)
        self.entries: list[Entry] = []
        self.restarts = False
        self.final_states: tuple[dict[int, Any], ...] | None = None

    @property
    def resume(self) -> Resume | None:
        """What was loaded, as long as nothing was trained since."""
        return self._loaded if self.progress.begun == 0 else None

    # Loaders

    def begin_set(self) -> None:
        """Forget the loaders so far: new ones are about to come."""
        self.entries = []
        self.progress.epoch = None

    def process(self, loader: Any) -> Any:
        """Return what Lightning should iterate over in the place of ``loader``.

        Collective: every rank, for each loader in turn. Blocks.
        """
        if self.progress.epoch is not None:
            self.begin_set()  # nobody announced it, but training has gone on since the last loader
        resume = self.resume
        position = loader_seams.position(self.trainer)
        epoch = resume.epoch if resume is not None else position.epoch
        if isinstance(loader, DataLoader):
            for target in LoaderParts.of(loader).epoch_targets:
                target.set_epoch(epoch)  # before workers start and take a copy of the dataset
        if self.ranks.shards(loader):
            entry = self._own(loader, epoch)
        else:
            keep = self.trainer.accumulate_grad_batches
            ready = prepare_stream(loader, self.ranks, self.progress.trained, keep, training=True)
            entry = Entry(ready, is_stateful(loader))
            if entry.stateful and resume is not None:
                self._give_state_back(entry, resume, type(loader).__name__)
        self.entries.append(entry)
        return entry.loader

    def _own(self, loader: DataLoader[Any], epoch: int) -> Entry:
        ranks, number = self.ranks, len(self.entries)
        parts = ranks.parts(loader, training=True)
        start = Cursor(epoch)
        entry = Entry(None, is_stateful(parts.loader))
        if self.resume is not None:
            start = self._start(self.resume, parts)
            if entry.stateful and self._restore_map_style(self.resume, parts):
                start, entry.keeps_place = Cursor(epoch, start.pass_index), True
        if parts.source.length is None:
            entry.batches = StreamBatches(parts, ranks.shard, start, self.progress.started)
        else:
            entry.batches = TrainBatches(
                parts, ranks.shard, start, self.progress.started, ranks.agree
            )
            self._say_small(entry.batches)
            self._check_order(entry.batches, number)
        entry.loader = give_batches(entry.batches)
        if not entry.stateful:
            as_resumable(entry.loader)
        return entry

    def _start(self, resume: Resume, parts: LoaderParts) -> Cursor:
        start, changed = resume.start(len(self.entries), parts, self.ranks.shard)
        if changed is not None:
            self.restarts = True
            self.ranks.warn_or_raise(
                f"cannot go on in the middle of epoch {resume.epoch}: {changed}. The epoch begins anew,"
                " so samples of its first part are trained again.",
                strict=self.ranks.options.resume == "strict",
            )
        return start

    def _check_order(self, batches: TrainBatches, number: int) -> None:
        state = self.resume.state if self.resume is not None else None
        if state is None or number >= len(state.loaders) or not state.loaders[number].order_hash:
            return
        if batches.start.consumed and state.loaders[number].order_hash != batches.order_hash:
            self.ranks.warn_or_raise(
                f"{batches.parts.source.name} does not give the order of epoch {state.epoch} again. The"
                " rest of the epoch is taken from the new order: some samples come twice, some never."
                " Seed the sampler, or give it a set_epoch(epoch).",
                strict=self.ranks.options.resume == "strict",
            )

    def _say_small(self, batches: TrainBatches) -> None:
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

    def _nth_stateful(self) -> int:
        return sum(entry.stateful for entry in self.entries)

    def _restore_map_style(self, resume: Resume, parts: LoaderParts) -> bool:
        """Give a map-style loader this rank's state, if ranks and batches are as they were."""
        number = len(self.entries)
        saved = resume.state.loaders[number : number + 1] if resume.state is not None else ()
        if self.restarts or (saved and saved[0].batch_size != parts.batch_size):
            return False
        state = resume.own_state(number, self._nth_stateful(), self.ranks.shard)
        if state is None:
            return False
        parts.loader.load_state_dict(state)  # type: ignore[attr-defined]
        return True

    def _give_state_back(self, entry: Entry, resume: Resume, name: str) -> None:
        number, shard = len(self.entries), self.ranks.shard
        if resume.is_epoch_start or not resume.has_states:
            return
        state = resume.own_state(number, self._nth_stateful(), shard)
        merge = getattr(entry.loader, "merge_state_dicts", None)
        if state is None and callable(merge):
            state = merge(resume.states(number), shard.rank, shard.world_size)
        if state is not None:
            entry.loader.load_state_dict(state)
            return
        self.restarts = True
        assert resume.state is not None
        self.ranks.warn_or_raise(
            f"{name} keeps a position for each rank, and the checkpoint has those"
            f" of {resume.state.world_size} rank(s), not {shard.world_size}: epoch {resume.epoch} begins"
            " anew. A method merge_state_dicts(states, rank, world_size) of the loader would let it go"
            " on.",
            strict=self.ranks.options.resume == "strict",
        )

    # Where training is

    def batch_begins(self) -> None:
        """Count a batch that is about to be trained."""
        self.progress.batch_begins(self.current_epoch())

    def current_epoch(self) -> int:
        """The epoch that the loaders are in."""
        for entry in self.entries:
            if entry.batches is not None:
                return entry.batches.sampler.epoch
        return loader_seams.position(self.trainer).epoch

    @property
    def effective_batch(self) -> int:
        """Units of the first loader in one optimizer step of all ranks; 0 if its batches are not ours."""
        batches = self.entries[0].batches if self.entries else None
        if batches is None:
            return 0
        return batches.batch_size * self.ranks.world_size * self.trainer.accumulate_grad_batches
