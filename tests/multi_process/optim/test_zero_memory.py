"""Z8, Z20: memory of a step, of a save in parts and of a load, with ``zero=1``."""

from __future__ import annotations

import json
import sys

import pytest

from tests.programs.zero_memory import BUCKET, LAYERS, MIB, WIDTH
from tests.support.programs import run_program

pytestmark = [pytest.mark.multi_process, pytest.mark.cpu_only("the host's memory")]


def test_z8_z20_a_step_a_save_in_parts_and_a_load_stay_within_their_bounds(tmp_path):
    argv = [sys.executable, "-m", "tests.programs.zero_memory", str(tmp_path)]
    finished = run_program(argv, cwd=tmp_path, timeout_s=240)
    assert finished.code == 0, finished.out
    (line,) = [each for each in finished.out.splitlines() if each.startswith("MEMORY ")]
    found = json.loads(line.removeprefix("MEMORY "))
    parameters = 4 * (LAYERS * WIDTH * WIDTH + 7 * WIDTH)
    slack = 24 * MIB  # the Trainer, messages, what the allocator keeps
    # Parameters, this rank's half of two moments, gradients; four buckets received, two gathered, and the
    # one that is copied into a message.
    bound = 3 * parameters + 7 * BUCKET + slack
    for _, step, save in found["sharded"]:
        assert step <= bound, (step / MIB, bound / MIB)
        assert save <= bound, (save / MIB, bound / MIB)
    for name in ("sharded, loaded", "plain, loaded"):
        for everything, _, _ in found[name]:
            assert everything <= bound, (name, everything / MIB, bound / MIB)
    for _, step, _ in found["whole"]:
        assert step > bound, ("control: whole states", step / MIB, bound / MIB)
