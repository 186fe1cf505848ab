"""curves.png and what it is drawn from."""

import pytest
from matplotlib import image

from lightning_dp.app.report import draw_curves, keep_earlier_metrics, print_table, read_metrics

FIRST = "step,train/loss,val/loss\n0,2.0,\n1,1.5,\n1,,1.6\n"
SECOND = "step,train/loss,test/acc\n1,1.4,\n2,1.0,\n2,,0.9\n"


def test_metrics_of_one_attempt(tmp_path):
    (tmp_path / "metrics.csv").write_text(FIRST)
    assert read_metrics(tmp_path) == {
        "train/loss": [(0.0, 2.0), (1.0, 1.5)],
        "val/loss": [(1.0, 1.6)],
    }


def test_a_restart_keeps_the_metrics_of_the_attempt_before(tmp_path):
    (tmp_path / "metrics.csv").write_text(FIRST)
    keep_earlier_metrics(tmp_path, resumes=True)
    assert not (tmp_path / "metrics.csv").exists()
    (tmp_path / "metrics.csv").write_text(SECOND)
    metrics = read_metrics(tmp_path)
    assert metrics["train/loss"] == [(0.0, 2.0), (1.0, 1.4), (2.0, 1.0)]
    assert set(metrics) == {"train/loss", "val/loss", "test/acc"}
    keep_earlier_metrics(tmp_path, resumes=True)
    assert len(list(tmp_path.glob("metrics.before_*.csv"))) == 2


def test_of_many_attempts_the_last_one_counts(tmp_path):
    for attempt in range(12):
        (tmp_path / "metrics.csv").write_text(f"step,train/loss\n0,{attempt}\n")
        keep_earlier_metrics(tmp_path, resumes=True)
    assert read_metrics(tmp_path) == {"train/loss": [(0.0, 11.0)]}


def test_a_new_run_in_an_old_folder_forgets_what_was_there(tmp_path):
    (tmp_path / "metrics.before_1.csv").write_text(FIRST)
    keep_earlier_metrics(tmp_path, resumes=False)
    (tmp_path / "metrics.csv").write_text(SECOND)
    assert set(read_metrics(tmp_path)) == {"train/loss", "test/acc"}


@pytest.mark.parametrize("resumes", [True, False])
def test_a_first_attempt_has_nothing_to_keep(resumes, tmp_path):
    keep_earlier_metrics(tmp_path, resumes=resumes)
    assert list(tmp_path.iterdir()) == []


def test_curves_have_a_panel_for_each_quantity(tmp_path):
    (tmp_path / "metrics.csv").write_text(FIRST)
    one = image.imread(draw_curves(tmp_path)).shape
    (tmp_path / "metrics.csv").write_text(SECOND)  # a second quantity
    two = image.imread(draw_curves(tmp_path)).shape
    assert two[0] == one[0]
    assert two[1] == 2 * one[1]


def test_nothing_logged_is_nothing_drawn(tmp_path):
    assert draw_curves(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_table_cuts_nothing(terminal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    path = "/a/" + "very/long/" * 12 + "path[0].ckpt"
    print_table("t", {"checkpoint": path})
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert "".join(line.split("│")[2].strip() for line in lines) == path
    assert (len(lines) > 1) == terminal


def test_table_shows_numbers_short(capsys):
    print_table("run", {"test/acc": 0.98765432, "steps": 12})
    shown = capsys.readouterr().out
    assert "0.9877" in shown
    assert "12" in shown


def test_table_shows_paths_as_seen_from_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_table("t", {"folder": tmp_path / "outputs" / "1", "elsewhere": tmp_path.parent / "x"})
    printed = capsys.readouterr().out
    assert "│ outputs/1 " in printed
    assert f"│ {tmp_path.parent / 'x'} " in printed
