"""Planning with integers: every unit exactly once, equal steps, and where a pass goes on."""

from __future__ import annotations

import pytest

from lightning_dp.data.shard import EvalPlan, TrainPlan, even_tail

SIZES, WORLDS, BATCHES = range(60), range(1, 9), range(1, 9)
CASES = [(n, w, b) for n in SIZES for w in WORLDS for b in BATCHES]


def dealt(plan, rank):
    """The batches of a rank as lists of positions."""
    positions = list(plan.positions(rank))
    if isinstance(plan, EvalPlan):
        sizes = list(plan.sizes(rank))
    else:
        whole, rest = divmod(len(positions), plan.batch_size)
        sizes = [plan.batch_size] * whole + [rest] * (rest > 0)
    assert sum(sizes) == len(positions)
    batches, start = [], 0
    for size in sizes:
        batches.append(positions[start : start + size])
        start += size
    return batches


@pytest.mark.parametrize("idle_repeats", [False, True])
def test_evaluation_gives_each_unit_once_in_equal_steps(idle_repeats):
    for n, world, size in CASES:
        plan = EvalPlan(n, world, size, idle_repeats)
        ranks = [dealt(plan, rank) for rank in range(world)]
        seen = sorted(p for batches in ranks for batch in batches for p in batch)
        steps = [len(batches) for batches in ranks]
        case = (n, world, size)
        if n >= world or not idle_repeats or n == 0:
            assert seen == list(range(n)), case
            assert plan.is_exact, case
        else:
            assert sorted(set(seen)) == list(range(n)), case
            assert len(seen) == world, case
            assert not plan.is_exact, case
        assert all(0 < len(batch) <= size for batches in ranks for batch in batches), case
        assert steps == [plan.batches(rank) for rank in range(world)], case
        assert plan.is_even == (len(set(steps)) == 1), case
        assert max(steps) - min(steps) <= 1, case
        if n >= world and size >= 2:
            assert plan.is_even, case
        assert plan.is_ragged == (n % world != 0), case


@pytest.mark.parametrize("drop_last", [False, True])
def test_training_takes_equal_steps_and_repeats_less_than_a_round(drop_last):
    for n, world, size in CASES:
        plan = TrainPlan(n, world, size, drop_last)
        ranks = [dealt(plan, rank) for rank in range(world)]
        case = (n, world, size, drop_last)
        assert [[len(b) for b in batches] for batches in ranks] == [
            [len(b) for b in ranks[0]]
        ] * world, case
        assert all(len(batches) == plan.batches for batches in ranks), case
        seen = sorted(p for batches in ranks for batch in batches for p in batch)
        if drop_last:
            assert seen == list(range(n - n % (world * size))), case
        else:
            assert seen == list(range(-(-n // world) * world)), case  # from n on: the head again
            assert len(seen) - n < world, case


def test_a_control_that_pads_like_distributed_sampler_is_caught():
    """The exactly-once check must fail for torch's own way of splitting."""
    from torch.utils.data import DistributedSampler

    samplers = [
        DistributedSampler(range(7), 2, rank, shuffle=False)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert sorted(index for sampler in samplers for index in sampler) != list(range(7))


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_is_left_of_a_pass_is_given_once_for_any_other_world(drop_last):
    for n in (1, 2, 7, 12, 24, 31, 48):
        for old_world, old_size in ((1, 2), (2, 2), (3, 1), (2, 5)):
            old = TrainPlan(n, old_world, old_size, drop_last)
            for done in range(old.batches + 1):
                consumed = old.consumed_after(done)
                for world, size in ((1, 2), (2, 2), (3, 2), (4, 1), (1, 7)):
                    plan = TrainPlan(n, world, size, drop_last, consumed)
                    case = (n, old_world, old_size, done, world, size)
                    left = sorted(p for r in range(world) for p in plan.positions(r))
                    if drop_last:
                        rest = (n - consumed) % (world * size)
                        assert left == list(range(consumed, n - rest)), case
                    else:
                        assert left[: n - consumed] == list(range(consumed, n)), case
                        assert len(left) - (n - consumed) < world, case
                    assert plan.first_batch + plan.batches == plan.whole_batches, case
                    if (world, size) == (old_world, old_size):
                        assert plan.first_batch == done, case


def test_the_same_global_batch_on_another_world_is_the_same_set_of_units():
    """(ranks, batch, accumulation) with one product: the k-th optimizer step sees the same units."""
    n, consumed = 96, 24
    steps = {}
    for world, size, accumulate in ((1, 12, 1), (2, 3, 2), (3, 2, 2), (2, 6, 1), (4, 1, 3)):
        plan = TrainPlan(n, world, size, consumed=consumed)
        ranks = [dealt(plan, rank) for rank in range(world)]
        micro = [sorted(p for r in ranks for p in r[k]) for k in range(plan.batches)]
        steps[world, size, accumulate] = [
            sorted(p for part in micro[k : k + accumulate] for p in part)
            for k in range(0, len(micro), accumulate)
        ]
        assert plan.first_batch % accumulate == 0
    assert len({str(each) for each in steps.values()}) == 1


def test_uneven_user_batches_are_split_so_that_each_rank_has_one():
    for world in WORLDS:
        for tail_lengths in ([1], [3, 1], [2, 2, 2], [5], [1, 1, 1, 1, 1]):
            if len(tail_lengths) >= world:
                continue
            for length in (0, 1, 2, 4):
                previous = [[f"p{r}.{i}" for i in range(length)] for r in range(world)] * bool(
                    length
                )
                tail = [[f"t{b}.{i}" for i in range(k)] for b, k in enumerate(tail_lengths)]
                result = even_tail(previous, tail, world)
                spare = sum(max(0, len(batch) - 1) for batch in previous)
                if sum(tail_lengths) + spare < world:
                    assert result is None
                    continue
                assert result is not None
                first, second = result
                assert len(second) == world
                assert all(first) or not previous
                assert all(second)
                units = sorted(u for b in [*first, *second] for u in b)
                assert units == sorted(u for b in [*previous, *tail] for u in b)
                assert max(map(len, second)) <= max(*tail_lengths, 1)
