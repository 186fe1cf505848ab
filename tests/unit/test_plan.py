"""The planner: what it predicts from numbers, what it says, and what it refuses."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from lightning_dp.app import plan
from lightning_dp.engine.plan.cost import MIB, Fabric, Line
from lightning_dp.engine.wires.codec import Half, Int8
from lightning_dp.errors import ConfigError
from lightning_dp.measure.forecast import (
    SIZES_MIB,
    WIRES,
    Job,
    RunProfile,
    forecast,
    measures,
    memory_bytes,
    sent_bytes,
    stops_paying,
)

GBIT = 1e9 / 8
PARAMETERS = 10_000_000
PROFILE = RunProfile(
    name="Net", samples=16, forward_s=0.04, backward_s=0.08, optimizer_s=0.01,
    gradients=tuple((0.08 * (i + 1) / 400, 4 * PARAMETERS // 400) for i in range(400)),
    parameter_bytes=4 * PARAMETERS, optimizer_bytes=8 * PARAMETERS, activation_bytes=10**8, spread=0.01,
)  # fmt: skip
ETHERNET = Fabric(10 * GBIT, 30e-6)


def test_one_rank_is_what_was_measured():
    row = forecast(PROFILE, ETHERNET, Job(), 1)
    assert row.step_s == pytest.approx(0.13)
    assert (row.efficiency, row.exposed_s, row.sent_bytes) == (pytest.approx(1), 0, 0)


def test_a_link_that_keeps_up_exposes_little_and_a_slow_one_everything():
    fast, slow = (forecast(PROFILE, Fabric(g * GBIT, 3e-5), Job(), 4) for g in (100, 0.1))
    assert fast.hidden > 0.9
    wire_s = 1.5 * 4 * PARAMETERS / (0.1 * GBIT * 0.92)
    assert slow.step_s == pytest.approx(0.13 + wire_s, rel=0.05)
    assert slow.low_s < slow.step_s < slow.high_s


def test_a_ring_costs_what_its_formula_says():
    link = Fabric(1e9, 1e-5).link(8)
    assert link.latency_s == pytest.approx(2 * 7 * 1e-5)
    assert link.s_per_byte == pytest.approx(2 * 7 / 8 / 1e9)
    inside = Fabric(1e9, 1e-5, 8, 1e11, 1e-6).link(8)
    assert inside.latency_s == pytest.approx(2 * 7 * 1e-6)
    assert inside.s_per_byte == pytest.approx(2 * 7 / 8 / 1e11)
    both = Fabric(1e9, 1e-5, 8, 1e11, 1e-6).link(16)
    assert both.latency_s == pytest.approx(2 * 7 * 1e-6 + 2 * 1e-5)
    assert both.s_per_byte == pytest.approx(
        1e-9
    )  # the host's link carries every byte once each way
    assert Fabric(1e9, 1e-5).link(8, 0.5).s_per_byte == pytest.approx(7 / 8 / 1e9)
    assert Fabric(1e9, 0.0, cpu_s_per_byte=5e-10).link(2).busy == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("job", "ranks", "per_parameter"),
    [
        (Job(), 2, 4.0),
        (Job(), 3, 16 / 3),
        (Job(zero=1), 2, 4.0),
        (Job(zero=1), 3, 16 / 3),
        (Job(wire="bf16"), 2, 2.0),
        (Job(wire="int8"), 2, 1.015625),
        (Job(outer=50), 2, 4 / 50),
        (Job(accumulate=4), 2, 4.0),
    ],
)
def test_p4_bytes_follow_their_formulas(job, ranks, per_parameter):
    assert sent_bytes(PROFILE, job, ranks) / PARAMETERS == pytest.approx(per_parameter, rel=0.01)


def test_the_wires_are_those_of_the_engine():
    for codec in (Half(torch.bfloat16), Half(torch.float16), Int8()):
        assert WIRES[codec.name] == codec.ratio


def test_memory_follows_its_formula():
    whole = 16 * PARAMETERS + 10**8
    assert memory_bytes(PROFILE, Job(), 8) == whole
    assert memory_bytes(PROFILE, Job(zero=1), 8) == whole - 7 * PARAMETERS
    assert memory_bytes(PROFILE, Job(outer=20), 8) == whole + 8 * PARAMETERS


def test_zero_divides_the_optimizer_and_outer_the_traffic():
    plain, zero, outer = (
        forecast(PROFILE, ETHERNET, job, 8) for job in (Job(), Job(zero=1), Job(outer=50))
    )
    calm = Fabric(math.inf, 0.0)
    saved = (
        forecast(PROFILE, calm, Job(), 8).step_s - forecast(PROFILE, calm, Job(zero=1), 8).step_s
    )
    assert saved == pytest.approx(0.01 * 7 / 8, rel=0.01)
    slow = Fabric(0.5 * GBIT, 3e-5)
    assert (
        forecast(PROFILE, slow, Job(outer=50), 8).exposed_s
        < 0.05 * forecast(PROFILE, slow, Job(), 8).exposed_s
    )
    assert zero.exposed_s > plain.exposed_s  # parameters come back after the step
    back = forecast(PROFILE, ETHERNET, Job(zero=1, gather="forward"), 8)
    assert plain.exposed_s < zero.exposed_s - back.exposed_s <= PROFILE.forward_s + plain.exposed_s
    assert outer.sent_bytes == plain.sent_bytes / 50


def test_parts_that_travel_in_turns_hide_behind_steps():
    slow = Fabric(0.5 * GBIT, 3e-5)
    whole = forecast(PROFILE, slow, Job(outer=50), 8)
    parts = forecast(PROFILE, slow, Job(outer=50, fragments=5), 8)
    assert parts.exposed_s == pytest.approx(whole.exposed_s, rel=0.01)  # as many bytes
    assert parts.sent_bytes == whole.sent_bytes
    one = parts.exposed_s * 50 / 5
    computing = forecast(PROFILE, slow, Job(), 1).step_s
    late = forecast(PROFILE, slow, Job(outer=50, fragments=5, delay=1), 8)
    assert late.exposed_s == pytest.approx(max(0.0, one - computing) * 5 / 50, abs=1e-6)
    hidden = forecast(PROFILE, slow, Job(outer=50, fragments=5, delay=10), 8)
    assert hidden.exposed_s == 0
    assert hidden.hidden == 1
    assert hidden.step_s < late.step_s < parts.step_s


def test_what_outer_excludes_is_not_advised():
    assert {"zero=1", "zero={gather: forward}"} <= {
        n for n, _ in measures(PROFILE, ETHERNET, Job(), 8)
    }
    names = [name for name, _ in measures(PROFILE, ETHERNET, Job(outer=20), 8)]
    assert names
    assert not any(name.startswith("zero") for name in names)


def test_a_fixed_batch_is_divided_and_ends():
    job = Job(batch=64)
    for ranks in (4, 64):
        row = forecast(PROFILE, ETHERNET, job, ranks)
        assert row.samples_per_s * row.step_s == pytest.approx(64)
    assert forecast(PROFILE, ETHERNET, job, 65) is None
    # Half the samples, half the computing: a fixed batch scales worse than a growing one.
    assert (
        forecast(PROFILE, ETHERNET, job, 32).efficiency
        < forecast(PROFILE, ETHERNET, Job(), 32).efficiency
    )


def test_where_it_stops_paying():
    slow = Fabric(1 * GBIT, 30e-6)
    rows = [forecast(PROFILE, slow, Job(), n) for n in (1, 2, 4, 8)]
    assert stops_paying(rows) == 1
    rows = [forecast(PROFILE, Fabric(100 * GBIT, 1e-6), Job(), n) for n in (1, 2, 4, 8)]
    assert stops_paying(rows) is None


def test_p5_what_cannot_help_is_said():
    memory = Fabric(math.inf, 0.0, 2, 5e9, 1e-5, inner_busy=1.0)  # shared memory: all processor
    coded = RunProfile(
        **{**vars(PROFILE), "codec_s_per_byte": {"bf16": 4e-10, "int8": 1e-9}, "optimizer_bytes": 0}
    )
    gains = dict(measures(coded, memory, Job(), 2))
    assert gains["wire=bf16"] == gains["wire=int8"] == 1  # nothing is sent that could be rounded
    rounded = Job(wire="int8")
    assert forecast(coded, memory, rounded, 2) == forecast(coded, memory, Job(), 2)
    hosts = Fabric(GBIT, 3e-5, 2, 5e9, 1e-5, inner_busy=1.0)  # control: it is between machines
    assert (
        forecast(coded, hosts, rounded, 4).sent_bytes < forecast(coded, hosts, Job(), 4).sent_bytes
    )
    said = " ".join(
        plan.advice(coded, memory, Job(), [forecast(coded, memory, Job(), n) for n in (1, 2)])
    )
    assert "Cannot help there: " in said
    assert "bf16" in said.partition("Cannot help there: ")[2]
    assert "zero=1 cannot save memory" in said
    # On a slow link the same codec is the first thing to change.
    slow = Fabric(0.5 * GBIT, 3e-5)
    assert dict(measures(coded, slow, Job(), 4))["wire=int8"] > 2


def test_many_ranks_get_large_buckets_and_4096_take_less_than_a_second():
    begin = time.process_time()
    rows = [forecast(PROFILE, ETHERNET, Job(), n) for n in plan.ranks_of("1..4096")]
    assert time.process_time() - begin < 1
    assert len(rows) == 13
    assert rows[-1].bucket_mib > rows[2].bucket_mib
    steps = [row.step_s for row in rows]
    assert steps == sorted(steps)


def test_no_bucket_is_named_that_is_larger_than_it_need_be():
    gradients = sum(nbytes for _, nbytes in PROFILE.gradients) / MIB
    for n in plan.ranks_of("2..4096"):
        size = forecast(PROFILE, ETHERNET, Job(), n).bucket_mib
        assert size <= min(each for each in SIZES_MIB if each >= gradients), n


def test_an_interval_widens_beyond_what_was_measured():
    line = Line.through([(8, 1.0), (16, 1.05), (32, 1.16), (64, 1.37)])
    assert (line.start, line.slope) == (
        pytest.approx(0.94, abs=0.02),
        pytest.approx(0.0067, abs=5e-4),
    )
    widths = []
    for ranks in (32, 64, 128, 256):
        middle, low, high = line.at(ranks)
        assert low < middle < high
        widths.append((high - low) / middle)
    assert widths[0] == pytest.approx(widths[1])
    assert widths[1] < widths[2] < widths[3]


# Files and the command line


def test_a_profile_is_read_as_it_was_written(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    assert RunProfile.load(tmp_path / "profile.json") == PROFILE


def altered(**changes):
    def alter(values):
        return {**values, **changes}

    return alter


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (altered(version=0), "is of version 0, and this program reads version 1"),
        (altered(backward_s=-1.0), "backward_s=-1.0; it must be above 0"),
        (altered(optimizer_bytes=-1), "optimizer_bytes=-1; it must be 0 or more"),
        (altered(gradients=[]), "gradients must be pairs"),
        (altered(gradients=[[0.1, -4]]), "gradients must be pairs"),
        (altered(gradients=None), "gradients must be pairs"),
        (altered(gradients=[["a", 4]]), "gradients must be pairs"),
        (altered(gradients=[[0.1]]), "gradients must be pairs"),
        (altered(gradients=[[0.1, 1e400]]), "gradients must be pairs"),
        (altered(samples="8"), "samples='8'; it must be above 0"),
        (altered(activation_bytes=10**400), "it must be 0 or more"),
        (altered(spread=None), "spread=None; it must be 0 or more"),
        (altered(cpu_s_per_byte=-1), "cpu_s_per_byte=-1; it must be 0 or more"),
        (altered(codec_s_per_byte=5), "codec_s_per_byte must be seconds (0 or more) by wire"),
        (altered(codec_s_per_byte={"int8": "x"}), "codec_s_per_byte must be seconds"),
        (altered(shared=[0, 0]), "it must be bytes a second (above 0), seconds (0 or more)"),
        (altered(loopback=[1]), "it must be bytes a second (above 0), seconds (0 or more)"),
        (altered(colour="blue"), "'colour' is missing or not known"),
        (lambda values: [1], "is of version None"),
        (
            lambda values: {k: v for k, v in values.items() if k != "samples"},
            "'samples' is missing",
        ),
    ],
)
def test_a_file_that_nobody_measured_is_refused_in_one_paragraph(alter, told, tmp_path, capsys):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(json.dumps(alter(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match="profile"):
        RunProfile.load(path)
    with pytest.raises(SystemExit) as ended:
        plan.main([str(path), "--bandwidth", "1Gbit"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert told in lines[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--bandwidth", "0Gbit"],
            "--bandwidth: must be a rate as 25Gbit or 3GB, above 0, not '0Gbit'",
        ),
        (["--bandwidth=-1Gbit"], "above 0, not '-1Gbit'"),
        (["--bandwidth", "25"], "must be a rate"),
        (["--latency=-1us"], "0 or more, not '-1us'"),
        (["--ranks", "0..8"], "as 8 or 2,4,8 or 1..4096, not '0..8'"),
        (["--ranks", "8,4"], "in rising order"),
        (["--ranks", "1..99999999"], "1..4096"),
        (["--accumulate", "0"], "--accumulate: must be a whole number of 1 or more, not '0'"),
        (["--batch", "-4"], "--batch: must be a whole number"),
        (["--parameters", "0"], "above 0, not '0'"),
        ([], "type --parameters, --forward, --backward"),
        (["--parameters", "10M"], "type --forward, --backward"),
        (["--parameters", "1M", "--forward", "1ms", "--backward", "1ms"], "give --bandwidth"),
        (["none.json"], "none.json: there is no such file"),
        (["--measured", "8=120ms"], "needs step times at two numbers of ranks"),
        (["--measured", "8=0ms"], "above 0"),
        (["--bandwidth", "10Gb"], "must be a rate as 25Gbit or 3GB, above 0, not '10Gb'"),
        (["--bandwidth", "1e-300bit"], "nothing is '1e-300bit'"),
        (["--parameters", "1e308"], "nothing is '1e308'"),
        (["--bucket-mb", "1e308"], "nothing is '1e308'"),
        (["--samples", "9" * 400], "must be below 1e18"),
        (["file.json", "--samples", "4"], "says what a rank does; leave --samples out"),
        (["file.json", "--state", "4", "--forward", "1s"], "leave --forward, --state out"),
        (["--zero", "1", "--outer", "50"], "--zero 1 and --outer exclude each other"),
        (["--gather", "forward"], "--gather forward needs --zero 1"),
        (["--fragments", "3"], "need --outer of at least 3"),
        (["--outer", "12", "--fragments", "3", "--delay", "5"], "need --outer of at least 15"),
        (["--delay", "-1"], "must be a number of steps, 0 or more"),
        (["f.json", "--zero", "1", "--measured", "8=1s", "9=2s"], "leave FILE, --zero out"),
        (["--measured", "8=120ms", "64=100ms"], "steps get faster with more ranks"),
    ],
)
def test_bad_input_is_one_paragraph(arguments, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        plan.main(arguments)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert told in lines[1]


def test_ranks_and_quantities():
    assert plan.ranks_of("1..12") == [1, 2, 4, 8, 12]
    assert plan.ranks_of("2,3") == [2, 3]
    command = plan.parser()
    args = command.parse_args(
        ["--bandwidth", "25Gbit", "--latency", "30us", "--parameters", "1.5e8", "--forward", "40ms"]
    )
    assert args.bandwidth == pytest.approx(25 * GBIT)
    assert args.latency == pytest.approx(30e-6)
    assert (args.parameters, args.forward) == (1.5e8, pytest.approx(0.04))
    assert plan.ranks_of("1..1") == [1]
    for text, bytes_a_second in (("8gbit", 1e9), ("1GB/s", 1e9), ("1GiB", 2**30), ("1e+3MB", 1e9)):
        assert command.parse_args(["--bandwidth", text]).bandwidth == pytest.approx(bytes_a_second)
    assert command.parse_args(["--parameters", "7B"]).parameters == pytest.approx(7e9)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    picture = tmp_path / "out.png"
    arguments = [str(path), "--ranks", "1..8", "--bandwidth", "1Gbit", "--out", str(picture)]
    assert plan.main(arguments) == 0
    said = capsys.readouterr().out
    assert "efficiency" in said
    assert "change first" in said
    assert picture.stat().st_size > 10_000
    for out, told in ((tmp_path, "wrote {}/plan.png"), (tmp_path / "a", "wrote {}/a.png")):
        assert plan.main([*arguments[:-1], str(out)]) == 0
        assert told.format(tmp_path) in capsys.readouterr().out.replace("\n", "")
    for out in (tmp_path / "none" / "a.png", tmp_path / "a.txt"):
        assert plan.main([*arguments[:-1], str(out)]) == 2
        assert f"error: --out {out}: " in capsys.readouterr().err
    assert plan.main(["--measured", "8=1s", "64=0.99s", "--ranks", "4096"]) == 0
    assert "1000 ms" in capsys.readouterr().out  # within what points err: no slope
    assert plan.main(["--measured", "8=1s", "64=1.4s", "--ranks", "128"]) == 0
    assert "128 ranks" in capsys.readouterr().out
    assert plan.main([*arguments, "--batch", "4"]) == 0
    assert "less than a sample each" in capsys.readouterr().out
