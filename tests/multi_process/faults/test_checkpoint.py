"""A process killed at any moment of a save leaves the old checkpoint or the new one."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_dp.faults.checkpoint_io import AtomicCheckpointIO

pytestmark = pytest.mark.multi_process


class InPlace(TorchCheckpointIO):
    """The control: writes over the old file."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)


def save_until_killed(io, path: Path, after_s: float) -> None:
    """Save ever new checkpoints to ``path`` in a process that is killed after a while."""
    started = path.parent / "started"
    started.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            tensor = torch.zeros(2_000_000)
            for number in range(1, 1_000_000):
                tensor.fill_(number)
                io.save_checkpoint({"number": number, "tensor": tensor}, path)
                started.touch()
        finally:
            os._exit(1)
    while not started.exists():
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def torn(io, path: Path, kills: int) -> int:
    """How many of ``kills`` leave something that is no whole checkpoint."""
    draw = random.Random(0)
    bad = 0
    for _ in range(kills):
        save_until_killed(io, path, draw.random() * 0.05)
        try:
            loaded = torch.load(path)
            bad += not bool((loaded["tensor"] == loaded["number"]).all())
        except Exception:
            bad += 1
    return bad


def test_no_kill_tears_a_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    assert torn(AtomicCheckpointIO(), path, kills=40) == 0
    AtomicCheckpointIO().save_checkpoint({}, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "started"]  # swept


def test_the_control_is_torn(tmp_path):
    assert torn(InPlace(), tmp_path / "last.ckpt", kills=20) > 0


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    io, path = AtomicCheckpointIO(), tmp_path / "a" / "x.ckpt"
    io.save_checkpoint({"n": 1}, path)

    def full(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        io.save_checkpoint({"n": 2}, path)
    monkeypatch.undo()
    assert io.load_checkpoint(path) == {"n": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.ckpt"]


def test_a_file_is_kept_while_a_link_leads_to_it(tmp_path):
    io = AtomicCheckpointIO()
    old, new, link = tmp_path / "old.ckpt", tmp_path / "new.ckpt", tmp_path / "last.ckpt"
    io.save_checkpoint({"n": 1}, old)
    link.symlink_to("old.ckpt")
    io.remove_checkpoint(old)
    assert io.load_checkpoint(link) == {"n": 1}
    io.save_checkpoint({"n": 2}, new)
    link.unlink()
    link.symlink_to("new.ckpt")
    io.teardown()
    assert not old.exists()
    io.remove_checkpoint(new)
    assert link.exists()


def test_storage_options_are_refused_as_by_lightning(tmp_path):
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "x", storage_options={})
