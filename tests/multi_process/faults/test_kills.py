"""A short kill test; ``python -m benchmarks.kill_test`` is the long one, with whole programs in it."""

import random
from dataclasses import replace

import pytest

from benchmarks import kill_test
from benchmarks.kill_training import MOMENTS, Spec

pytestmark = pytest.mark.multi_process

# Moment, way, victim, ranks; and with ``outer``, local steps between two meetings (the fault is at step 5).
TRIALS = [
    ("start", "exit", 1, 2),
    ("forward", "SIGTERM", 1, 2),
    ("backward", "exception", 0, 2),
    ("collective", "SIGKILL", 2, 3),
    ("save", "exception", 1, 2),
    ("write", "SIGKILL", 0, 2),
    ("validation", "SIGTERM", 0, 3),
    ("forward", "SIGKILL", 1, 2, 4),
    ("collective", "SIGKILL", 0, 2, 4),
    ("collective", "exception", 1, 3, 4),
    ("validation", "SIGTERM", 1, 2, 4),
]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_killed_run_ends_is_explained_and_resumes(trial, tmp_path):
    moment, way, victim, world_size, *every = trial
    spec = Spec(str(tmp_path), world_size, 0, victim, moment, way, step=5, seed=3)
    spec = replace(spec, every=sum(every))
    outcome = kill_test.trial(spec, program=False)
    assert outcome.problems == []
    assert outcome.seconds < kill_test.LIMIT_S


@pytest.mark.parametrize(
    ("moment", "way", "wire"), [("collective", "SIGKILL", "int8"), ("backward", "SIGTERM", "bf16")]
)
def test_also_on_a_rounded_wire(moment, way, wire, tmp_path):
    spec = Spec(str(tmp_path), 3, 0, 1, moment, way, step=5, seed=3, wire=wire)
    outcome = kill_test.trial(spec, program=False)
    assert outcome.problems == []
    assert outcome.seconds < kill_test.LIMIT_S


def test_the_trials_meet_every_moment():
    assert {trial[0] for trial in TRIALS} == set(MOMENTS)
    rng = random.Random(0)
    drawn = [kill_test.draw(rng, "x", index) for index in range(200)]
    assert {spec.moment for spec in drawn} == set(MOMENTS)


def test_the_count_of_samples_sees_one_missing_and_one_twice(tmp_path):
    spec = Spec(str(tmp_path), 1, 1, -1, "", "", 0, 0)
    everything = [
        (epoch, 1, sample)
        for epoch in range(kill_test.kill_training.EPOCHS)
        for sample in range(kill_test.SAMPLES)
    ]
    assert kill_test._count(spec, everything) == []
    assert "never" in kill_test._count(spec, everything[1:])[0]
    assert "more than once" in kill_test._count(spec, [*everything, everything[0]])[0]
