"""The picture of an epoch: it shows what the samplers do."""

from __future__ import annotations

import struct

import pytest

from lightning_dp.app import cli
from lightning_dp.app.data_picture import AGAIN, main, parser, plan, repeated


def size_of(png):
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "23 of 23 samples were trained; none was left out"),
        (["--samples", "22", "--stop-after", "3"], "2 more than once (to fill up the last step)"),
        (["--samples", "9", "--drop-last", "--stop-after", "1"], "left out by drop_last: ["),
        (["--in-order", "--ranks", "1", "--stop-after", "12"], "trained; none was left out"),
        (["--samples", "2", "--stop-after", "0", "--then-ranks", "4"], "2 of 2 samples"),
    ],
)
def test_it_is_drawn_and_said(arguments, told, tmp_path, capsys):
    out = tmp_path / "data.png"
    assert main([*arguments, "--out", str(out)]) == 0
    assert told in capsys.readouterr().out
    width, height = size_of(out)
    assert width > 500
    assert height > 300


@pytest.mark.parametrize(
    "arguments",
    [["--samples", "0"], ["--samples", "5000"], ["--stop-after", "99"], ["--rank", "x"]],
)
def test_what_cannot_be_drawn_is_an_error(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--out", str(tmp_path / "data.png")])
    assert caught.value.code == 2
    assert not (tmp_path / "data.png").exists()


@pytest.mark.parametrize(("samples", "again"), [(22, True), (24, False)])
def test_samples_that_fill_up_the_last_step_are_drawn_as_such(
    samples, again, tmp_path, monkeypatch
):
    """The legend names them, and as many squares are hatched as samples come again."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    main(["--samples", str(samples), "--stop-after", "3", "--out", str(tmp_path / "data.png")])
    (figure,) = drawn
    stages = plan(parser().parse_args(["--samples", str(samples), "--stop-after", "3"]))
    hatched = [patch for axis in figure.axes for patch in axis.patches if patch.get_hatch()]
    assert len(hatched) == sum(len(repeated(stage)) for stage in stages)
    assert bool(hatched) is again
    said = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert said == ([AGAIN] if again else [])


def test_it_is_a_command(tmp_path, capsys):
    out = tmp_path / "data.png"
    assert cli.main(["data", "--out", str(out)]) == 0
    assert out.exists()
