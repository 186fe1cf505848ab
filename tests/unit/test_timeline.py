"""A step as spans, as a trace and as a picture."""

import json

from lightning_dp.engine.reduction.timing import BucketTimes, ReductionTimes
from lightning_dp.measure.timeline import chrome_trace, draw, spans_of


def times():
    t = ReductionTimes(begin=1.1, exact=True)
    t.buckets = [
        BucketTimes(0, 2**20, 1.2, 1.2, 1.4),
        BucketTimes(1, 2**21, 1.3, 1.3, 1.5),  # overlaps: a lane of its own
        BucketTimes(2, 2**20, 1.5, 1.6, 1.8),
    ]
    t.backward_end, t.end = 1.7, 1.8
    return t


MARKS = {"start": 1.0, "backward": 1.1, "end": 2.0}


def test_spans_tell_compute_wire_and_what_was_exposed():
    spans = spans_of(MARKS, times())
    by_name = {name: (lane, round(start, 6), round(stop, 6)) for lane, name, start, stop in spans}
    assert by_name["forward"] == ("compute", 0.0, 0.1)
    assert by_name["exposed"] == ("compute", 0.7, 0.8)
    assert by_name["bucket 0, 1.0 MiB"] == ("wire 0", 0.2, 0.4)
    assert by_name["bucket 1, 2.0 MiB"] == ("wire 1", 0.3, 0.5)
    assert by_name["bucket 2, 1.0 MiB"] == ("wire 0", 0.6, 0.8)


def test_the_trace_is_json_with_one_process_a_rank(tmp_path):
    spans = spans_of(MARKS, times())
    trace = json.loads(json.dumps(chrome_trace([spans, spans])))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert all(event["dur"] >= 0 for event in complete)
    draw([spans, spans], tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
