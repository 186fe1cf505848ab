"""The demos are honest: nothing is tested on what was trained on, and no byte is seen before its turn."""

import lightning as L
import pytest
import torch

from lightning_dp.demos.bytes import BytesDataModule, BytesModule, Windows, read_corpus, split_of
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule, ShiftedDigits


def trainer(tmp_path, **kwargs) -> L.Trainer:
    """One process, two batches of everything."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    limits = dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), 2)
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        **quiet,
        **limits,
        **kwargs,
    )


class TestDigits:
    def test_every_scan_is_in_exactly_one_part(self):
        data = DigitsDataModule()
        data.setup("fit")
        inner = data.train_set.images[:, :, 1:-1, 1:-1]
        scans = torch.cat([inner, data.val_set.tensors[0], data.test_set.tensors[0]])
        assert len(scans) == 1797
        assert len(torch.unique(scans.flatten(1), dim=0)) == 1797

    def test_all_classes_are_in_all_parts_alike(self):
        data = DigitsDataModule()
        data.setup("fit")
        for labels in (data.train_set.labels, data.val_set.tensors[1], data.test_set.tensors[1]):
            share = torch.bincount(labels, minlength=10) / len(labels)
            assert share.min() > 0.09
            assert share.max() < 0.11

    def test_a_training_scan_moves_by_at_most_one_pixel(self):
        image = torch.zeros(1, 1, 8, 8)
        image[0, 0, 4, 4] = 1.0
        moved = [ShiftedDigits(image, torch.tensor([0]))[0][0] for _ in range(50)]
        assert all(scan.shape == (1, 8, 8) and scan.sum() == 1 for scan in moved)
        places = {tuple(scan[0].nonzero()[0].tolist()) for scan in moved}
        assert places <= {(y, x) for y in (3, 4, 5) for x in (3, 4, 5)}
        assert len(places) > 1

    def test_runs_without_hydra_and_without_us(self, tmp_path):
        run, model, data = trainer(tmp_path), DigitsModule(width=4), DigitsDataModule()
        run.fit(model, data)
        (tested,) = run.test(model, data, verbose=False)
        assert set(tested) == {"test/loss", "test/acc"}
        assert list(tmp_path.rglob("*.png")) == []  # pictures are for runs with a logger


class TestBytes:
    def test_no_file_is_in_two_parts(self):
        names = [f"pkg/module_{n}.py" for n in range(2000)]
        parts = [split_of(name) for name in names]
        assert parts == [split_of(name) for name in names]
        assert 0.02 < parts.count("val") / 2000 < 0.08
        assert 0.02 < parts.count("test") / 2000 < 0.08

    def test_the_library_is_found_and_cut_into_windows(self):
        text = read_corpus("test")
        assert text.dtype == torch.uint8
        assert len(text) > 100_000
        windows = Windows(text, 64)
        assert torch.equal(windows[3][-1:], windows[4][:1])
        assert bytes(windows[0].tolist()[:64]) == bytes(text[:64].tolist())
        assert len(windows[len(windows) - 1]) == 65

    def test_evaluation_stops_where_it_is_told(self):
        data = BytesDataModule(length=64, max_eval_bytes=1024)
        data.setup("test")
        assert len(data.test_set) == len(data.val_set) == 16

    def test_an_untrained_model_needs_eight_bits(self):
        torch.manual_seed(0)
        model = BytesModule(width=32, depth=2, num_heads=2, length=64)
        windows = torch.randint(0, 256, (4, 65))
        assert model.bits_per_byte(windows).item() == pytest.approx(8.0, abs=0.1)

    def test_no_byte_is_seen_before_its_turn(self):
        torch.manual_seed(0)
        model = BytesModule(width=32, depth=2, num_heads=2, length=16).eval()
        text = torch.randint(0, 256, (1, 16))
        changed = text.clone()
        changed[0, 9] = (changed[0, 9] + 1) % 256
        before, after = model(text), model(changed)
        assert torch.equal(before[0, :9], after[0, :9])
        assert not torch.equal(before[0, 9:], after[0, 9:])

    def test_runs_without_hydra_and_without_us(self, tmp_path):
        model = BytesModule(width=16, depth=1, num_heads=2, length=32)
        data = BytesDataModule(batch_size=2, length=32, max_eval_bytes=256)
        run = trainer(tmp_path)
        run.fit(model, data)
        (tested,) = run.test(model, data, verbose=False)
        assert 0 < tested["test/bits_per_byte"] < 16
