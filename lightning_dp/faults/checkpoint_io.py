"""Checkpoints that are there or not: a process killed at any moment leaves the old file or the new one.

[Note: rename] The new file is written beside the old one, brought to the disk, and renamed over it, which
the file system does as one step. Lightning's default writes to the system's temporary folder and moves:
across file systems, as between /tmp and most homes, a move is a copy, and a copy can be cut in half.

[Note: parts] What ranks write by themselves is in a folder of its own for each save, in one that is called
as the file and ``.parts``. The file names the folder. So the renaming of the file decides which one counts;
the others are removed after it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_dp.internals.lightning import TorchCheckpointIO

_MARK = ".lean_ddp-"  # in the names of files that are being written
PARTS = "parts"  # where a checkpoint's entry "lean_ddp" says what ranks wrote by themselves


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints atomically; remote ones as Lightning does.

    Removing keeps a file for as long as a symbolic link beside it (``last.ckpt`` of
    ``ModelCheckpoint(save_last="link")``) leads to it: a process killed between a removal and the new
    link would leave a link to nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[Path] = set()
        self.maps = False  # a loaded file's tensors stay on disk until they are used

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path`` ([Note: rename]).

        Raises:
            TypeError: ``storage_options`` were given, as from Lightning.
            OSError: The disk is full or not writable; a file that was there before still is.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._sweep(target)
        partial = target.with_name(f".{target.name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(target.parent)
        _remove_parts(target, but=checkpoint.get("lean_ddp", {}).get(PARTS, {}).get("folder"))
        self._remove_kept()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load ``path``; local files perhaps as a map (``maps``)."""
        if not self.maps or not zipfile.is_zipfile(
            path
        ):  # remote, missing, or of old versions of torch
            return super().load_checkpoint(path, *args, **kwargs)
        weights_only = kwargs.get("weights_only")
        return torch.load(path, "cpu", mmap=True, weights_only=weights_only)  # type: ignore[no-any-return]

    def remove_checkpoint(self, path: Any) -> None:
        """Remove ``path``, unless a link beside it still leads to it; then at the next chance."""
        target = Path(path)
        if "://" not in str(path) and _is_linked(target):
            self._kept.add(target)
            return
        super().remove_checkpoint(path)
        if "://" not in str(path):
            _remove_parts(target)
            self._remove_kept()

    def teardown(self) -> None:
        """Remove what can be removed now."""
        self._remove_kept()
        super().teardown()

    def _remove_kept(self) -> None:
        for path in [path for path in self._kept if not _is_linked(path)]:
            self._kept.discard(path)
            path.unlink(missing_ok=True)
            _remove_parts(path)

    @staticmethod
    def _sweep(target: Path) -> None:
        """Remove what killed processes left of earlier attempts to write this file."""
        for left in target.parent.glob(f".{target.name}{_MARK}*"):
            with contextlib.suppress(OSError):
                left.unlink()


def parts_folder(path: Any) -> Path:
    """Where what ranks write for the checkpoint ``path`` is ([Note: parts])."""
    return Path(path).with_name(f"{Path(path).name}.parts")


def _remove_parts(target: Path, but: str | None = None) -> None:
    """Remove what earlier saves, also broken ones, left beside ``target``; ``but`` is in use."""
    folder = parts_folder(target)
    if not folder.is_dir():
        return
    for each in folder.iterdir():
        if f"{folder.name}/{each.name}" != but:
            shutil.rmtree(each, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # if it is empty


def _is_linked(target: Path) -> bool:
    """Whether a symbolic link in the same folder leads to ``target``."""
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        links = [Path(each) for each in entries if each.is_symlink() and each.name != target.name]
        return any(link.resolve() == target.resolve() for link in links)
    return False


def sync_folder(folder: Path) -> None:
    """Bring a rename to the disk. Not every system lets a folder be opened."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
