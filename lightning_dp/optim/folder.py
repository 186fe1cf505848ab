"""Optimizers' states on disk, in the parts that ranks hold: a folder of ``torch.distributed.checkpoint``.

A tensor with an element for each of its parameter's is one flat tensor there, in the order of the
parameter's memory, of which each rank writes its range. What else is kept for a parameter (counters) is one
object. So a rank of any number of ranks reads the ranges that it needs and nothing else, and torch's own
tools read the folder as well.

[Note: who writes an object] The rank with the longest range of the parameter, the lower one of two. Of one
element it cannot be told whether it is a range or a counter; that rank's word counts for the others.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.errors import CheckpointError
from lightning_dp.optim.stored import Entry, Stored

METADATA = ".metadata"
_BLOCK = 2**20


# Writing


class _Source:
    """What a storage writer asks its planner for."""

    def __init__(self) -> None:
        self.data: dict[MetadataIndex, Any] = {}

    def resolve_data(self, item: WriteItem) -> Any:
        data = self.data[item.index]
        if isinstance(data, Tensor):
            return data.detach()
        file = io.BytesIO()
        torch.save(data, file)
        return file


def write(folder: Path, entries: Iterable[Entry], group: ReplicaGroup) -> dict[str, int]:
    """Write every rank's entries to ``folder``, which is new; return each file's checksum, by name.

    One tensor at a time is in memory besides. Everything is on the disk when it returns.

    Raises:
        CheckpointError: Ranks write to folders of their own.
        OSError: The disk is full or not writable.

    Collective: every rank. Blocks.
    """
    source, writer = _Source(), FileSystemWriter(folder)
    mine = [pair for entry in entries for pair in _items(entry, source)]
    writer.set_up_storage_writer(group.rank == 0)
    writer.prepare_local_plan(SavePlan([]))  # makes the folder
    what = "the optimizer's state, for a checkpoint"
    plans = _agree(group.all_gather_object(mine, what))
    plans, metadata = create_default_global_save_plan(plans)
    plan = writer.prepare_global_plan(plans)[group.rank]
    results = writer.write_data(plan, source).wait()  # type: ignore[arg-type]  # asks for no more
    checksums = {name: checksum(folder / name) for name in _files(results)}
    everyone = group.all_gather_object((results, checksums), what)
    if group.rank == 0:
        known = {name: value for _, each in everyone for name, value in each.items()}
        _check_shared(folder, known)
        writer.finish(metadata, [each for each, _ in everyone])
        return {**known, METADATA: checksum(folder / METADATA)}
    return {}


def _items(entry: Entry, source: _Source) -> Iterable[tuple[str, WriteItem]]:
    """The entry's parts with its label."""
    if entry.described is not None:
        index = MetadataIndex(entry.label)
        source.data[index] = dict(entry.described)
        yield entry.label, WriteItem(index, WriteItemType.BYTE_IO, BytesIOWriteData(0))
    for key, values in entry.ranges.items():
        begin = torch.Size([entry.begin])
        index = MetadataIndex(f"{entry.label}.{key}", begin)
        source.data[index] = values
        chunk = ChunkStorageMetadata(begin, values.shape)
        properties = TensorProperties.create_from_tensor(values)
        data = TensorWriteData(chunk, properties, torch.Size([entry.numel]))
        yield entry.label, WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _agree(by_rank: Sequence[list[tuple[str, WriteItem]]]) -> list[SavePlan]:
    """Drop ranges that are none ([Note: who writes an object])."""
    known: set[str] = set()
    for mine in by_rank:
        described = {label for label, item in mine if item.type is WriteItemType.BYTE_IO}
        known |= {item.index.fqn for label, item in mine if label in described}
    return [SavePlan([i for _, i in mine if i.index.fqn in known]) for mine in by_rank]


def _files(results: Sequence[Any]) -> list[str]:
    return sorted({result.storage_data.relative_path for result in results})


def _check_shared(folder: Path, names: Iterable[str]) -> None:
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {missing[0]}, which another rank has just written there: hosts do not share"
            " this folder. Save to one that they share, or use zero={'format': 'plain'}."
        )


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


# Reading


def verify(folder: Path, checksums: Mapping[str, int], rank: int, world_size: int) -> None:
    """Check this rank's share of the files, and the one that all ranks need.

    Raises:
        CheckpointError: Names the file that is missing or damaged.

    Local; every rank calls it.
    """
    others = sorted(name for name in checksums if name != METADATA)
    for name in (METADATA, *others[rank::world_size]):
        path = folder / name
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing. A checkpoint of zero={{'format': 'sharded'}} is a file and the folder"
                f" {folder.parent.name} beside it: move both together."
            )
        if checksum(path) != checksums[name]:
            raise CheckpointError(
                f"{path} is damaged: its checksum is not that of the save. Resume from another checkpoint."
            )


class _Target:
    """What a storage reader asks its planner for."""

    def __init__(self, weights_only: bool | None) -> None:
        self.objects: dict[str, Any] = {}
        self.flat: Tensor | None = None
        self._weights_only = weights_only

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.objects[item.dest_index.fqn] = found

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        assert self.flat is not None
        return self.flat.narrow(0, item.dest_offsets[0], item.lengths[0])

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass


class Folder:
    """What was written to a folder, by label.

    Args:
        path: The folder.
        weights_only: As of ``torch.load``.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        self.path = path
        self._weights_only = weights_only
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def objects(self) -> dict[str, Any]:
        """Read all objects, by label. Local."""
        described = self._metadata.state_dict_metadata.items()
        indices = [MetadataIndex(k) for k, v in described if isinstance(v, BytesStorageMetadata)]
        nothing = torch.Size([0])
        return self._read(
            [
                ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
                for index in indices
            ]
        ).objects

    def values(self, label: str, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        """Read elements ``begin`` to ``end`` of a flat tensor. Local."""
        metadata = self._metadata.state_dict_metadata[label]
        assert isinstance(metadata, TensorStorageMetadata)
        wanted = ChunkStorageMetadata(torch.Size([begin]), torch.Size([end - begin]))
        items = create_read_items_for_chunk_list(label, metadata, [wanted])
        flat = torch.empty(end - begin, dtype=dtype, device="cpu")
        self._read(items, flat)
        return flat

    def _read(self, items: list[ReadItem], flat: Tensor | None = None) -> _Target:
        target = _Target(self._weights_only)
        target.flat = flat
        try:
            self._reader.read_data(LoadPlan(items), target).wait()  # type: ignore[arg-type]  # as above
        except Exception as error:  # whatever reading nonsense raises
            raise CheckpointError(
                f"{self.path} is damaged, or lacks a file: {error}. Resume from another checkpoint."
            ) from error
        return target


def read(folder: Folder) -> dict[str, dict[str, Any]]:
    """The states that were written, by label; their large tensors stay on disk. Local."""
    return {
        label: {
            key: Stored(folder, f"{label}.{key}", value, whole["shape"], whole["strides"])
            if isinstance(value, torch.dtype)
            else value
            for key, value in whole["keys"].items()
        }
        for label, whole in folder.objects().items()
    }
