"""Two-tier allocation: Fig. 12 of RhymeRL worked by hand, exact optima by enumeration, and the command."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from scipy.optimize import linear_sum_assignment

from simrl.dispatch.allocation import (
    best_max_workers,
    best_pairing,
    equal_workers,
    exact,
    fill,
    growth_factor,
    median_tokens,
    predicted_s,
    ranking_groups,
    shortest_two_steps,
    step_s,
    two_step_sums,
    two_tier,
    with_leftover,
)
from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.profile.drafted import Drafted
from simrl.profile.profile import read_profile
from simrl.profile.rollout_times import DraftCosts, RolloutTimes
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import Trace, TraceMetadata, write_trace
from tests.helpers import examples

PROFILE = Path(__file__).parents[2] / "profiles" / "qwen3-14b_h100_tp2.parquet"

# τ of three groups on 1, 2 and 3 workers. With train_s = 6, t0 is 6 (the shortest group is done by then on one worker) and
# d_max (30 − 6) / 2 = 12. Group 1 does with 1 worker from d = 6 on, with 2 from 1, with 3 always; group 2 with 1 worker
# from d = 12 on, with 2 from 5, with 3 from 2.5.
TAU = [[6.0, 4.0, 3.0], [12.0, 7.0, 5.0], [30.0, 16.0, 11.0]]


# Tier 1


def test_prompts_are_ranked_by_the_median_of_their_group_and_represented_by_the_mean():
    prompts = [7, 7, 7, 3, 3, 3, 5, 5, 5, 1, 1, 1]
    tokens = [1, 10, 90, 20, 20, 20, 2, 5, 6, 40, 30, 50]  # medians 10, 20, 5, 40
    groups = ranking_groups(prompts, tokens, 2)
    assert [group.prompts for group in groups] == [(5, 7), (3, 1)]
    assert [group.representative_tokens for group in groups] == [
        (2 + 5 + 6 + 1 + 10 + 90) / 6,
        30.0,
    ]


def test_the_mean_that_represents_a_group_is_of_its_responses_or_of_its_prompts_medians():
    prompts, tokens = [7, 7, 7, 5, 5, 5], [1, 10, 91, 2, 5, 5]
    (group,) = ranking_groups(prompts, tokens, 1)
    assert group.representative_tokens == 19.0 and sorted(group.lengths_tokens) == sorted(tokens)
    (group,) = ranking_groups(prompts, tokens, 1, "medians")
    assert group.representative_tokens == 7.5
    assert sorted(group.lengths_tokens) == pytest.approx([t * 7.5 / 19 for t in sorted(tokens)])


def test_prompts_of_equal_length_stand_in_order_of_their_id_and_the_shortest_groups_get_one_more():
    groups = ranking_groups([9, 4, 6, 2, 8], [5, 5, 5, 5, 5], 3)
    assert [group.prompts for group in groups] == [(2, 4), (6, 8), (9,)]


def test_the_median_of_an_even_group_lies_between_its_middle_two():
    assert median_tokens([2, 2, 1, 2, 2], [9, 1, 4, 2, 5]) == {1: 4.0, 2: 3.5}


def test_more_groups_than_prompts_are_refused():
    with pytest.raises(InputError, match="groups 3: 2 prompts have a history"):
        ranking_groups([1, 2], [5, 6], 3)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 100)), min_size=1), st.data())
def test_ranking_groups_part_the_prompts_and_their_medians_never_fall(rows, data):
    prompts, tokens = zip(*rows, strict=True)
    count = data.draw(st.integers(1, len(set(prompts))))
    groups = ranking_groups(prompts, tokens, count)
    ranked = [prompt for group in groups for prompt in group.prompts]
    assert sorted(ranked) == sorted(set(prompts))
    sizes = [len(group.prompts) for group in groups]
    assert (
        len(sizes) == count
        and max(sizes) - min(sizes) <= 1
        and sizes == sorted(sizes, reverse=True)
    )
    medians = [float(np.median([t for p, t in rows if p == prompt])) for prompt in ranked]
    assert medians == sorted(medians)


# τ


def tau(profile, length_tokens, dp, accept_length=1.0, samples=1, prompt_tokens=0):
    """Seconds in which `dp` workers generate `samples` responses of `length_tokens`, pass by pass."""
    positions = np.arange(0.0, length_tokens, accept_length)
    each = -(-samples // dp)
    prefilled = each * max(
        profile.prefill_s(prompt_tokens) - profile.decode_s(1, prompt_tokens), 0.0
    )
    return prefilled + sum(
        profile.decode_s(each, prompt_tokens + position + 1) for position in positions
    )


def test_the_table_of_times_is_tau_with_the_group_split_over_its_workers():
    profile = read_profile(PROFILE)
    times = RolloutTimes(profile, 900, prompt_tokens=50)
    table = times.table([[100.4], [900.0] * 7], [10, 7], 3, [Drafted(2.0)] * 2)
    for i, (tokens, samples) in enumerate([(100, 10), (900, 7)]):
        for k in (1, 2, 3):
            assert table[i, k - 1] == pytest.approx(
                tau(profile, tokens, k, 2.0, samples, 50), rel=2e-3
            )


def test_more_responses_than_a_worker_decodes_at_a_time_run_in_turn():
    profile = read_profile(PROFILE)
    ((seconds, half),) = RolloutTimes(profile, 300, max_num_seqs=4).table([[300.0]], [10], 2)
    assert seconds == pytest.approx(
        2 * tau(profile, 300, 1, samples=4) + tau(profile, 300, 1, samples=2), rel=2e-3
    )
    assert half == pytest.approx(
        tau(profile, 300, 1, samples=4) + tau(profile, 300, 1, samples=1), rel=2e-3
    )


def test_a_batch_ends_with_its_longest_response_and_passes_shorten_as_others_end():
    times = RolloutTimes(read_profile(PROFILE), 4000)
    uneven, longest, mean = (
        times.responses_s([100] * 63 + [4000]),
        times.batch_s(4000, 64),
        times.batch_s(161, 64),
    )
    alone = times.batch_s(4000, 1)
    assert mean < alone < uneven < longest


def test_drafts_cost_their_round_and_their_verification_up_to_the_batch_that_drafts():
    costs = DraftCosts(np.array([0.0, 64.0]), np.array([0.001, 0.001]), np.zeros(2), np.array([4]))
    profile, drafted = read_profile(PROFILE), Drafted(2.0, 3.0)
    times = RolloutTimes(profile, 400, costs=costs)
    by_hand = sum(profile.verify_s(4, 3.0, 2 * i + 1) + 0.001 for i in range(200))
    assert times.responses_s([400] * 4, drafted) == pytest.approx(by_hand, rel=2e-3)
    assert times.responses_s([400] * 5, drafted) == times.batch_s(400, 5)


@pytest.mark.parametrize("kv_tokens", [100_000, 9_000])
def test_tau_of_a_batch_is_what_the_engine_takes_also_where_the_cache_is_too_small(kv_tokens):
    profile = read_profile(PROFILE)
    lengths = np.random.default_rng(3).integers(50, 1000, 40)
    limits = Limits(
        max_num_seqs=32, max_num_batched_tokens=8192, block_size=16, kv_blocks=kv_tokens // 16
    )
    engine = one_engine(profile.tables, limits)
    for tokens in lengths:
        engine.submit(60, int(tokens))
    engine.settle(0.0)
    engine.run_until_idle()
    predicted = RolloutTimes(profile, 1000, 32, 60, kv_tokens).responses_s(lengths)
    assert predicted == pytest.approx(engine.now_s, rel=0.1)


# Tier 2, worked by hand from Fig. 12


@pytest.mark.parametrize(
    ("workers", "train_s", "plan", "gradient", "smallest", "leftover"),
    [
        # d 6: 1 + 1 + 2 do. 3: 1 + 2 + 3 do not. 4.5: the same. 5.25: 1 + 2 + 2 do not; 0.75 s are left of the interval.
        (4, 6.0, (1, 1, 2), 6.0, 6.0, 0),
        # d 6 does; 3 and 4.5 need 6; 5.25 needs 1 + 2 + 2 = 5.
        (5, 6.0, (1, 2, 2), 5.25, 5.0, 0),
        # d 6 and 3 do; at 1.5 and at 2.25 group 2 is late with 3 workers.
        (6, 6.0, (1, 2, 3), 3.0, 2.5, 0),
        # One worker more than needed: group 2 (11 s) may have no more, group 1 (7 s) may.
        (7, 6.0, (1, 3, 3), 3.0, 2.5, 1),
        # All that there may be: the shortest group comes last.
        (9, 6.0, (3, 3, 3), 3.0, 2.5, 3),
        # No training: t0 is 3, with MAX_WKS on group 0; d_max 13.5. 6.75: 3 + 2 + 2 do. 3.375: late. 5.0625 and 5.90625: 8.
        (7, 0.0, (3, 2, 2), 6.75, 6.5, 0),
        # No fewer than one each: d_max, which the search never looks at; at 6 the plan needs 4.
        (3, 6.0, (1, 1, 1), 12.0, 12.0, 0),
        # d_max is 0: all end by t0 on one worker. The other three go to group 2 (30, then 16 s) and to group 1 (12 s).
        (6, 30.0, (1, 2, 3), 0.0, 0.0, 3),
        # d_max below 0 is no other case.
        (4, 60.0, (1, 1, 2), 0.0, 0.0, 1),
    ],
)
def test_fig_12_worked_by_hand(workers, train_s, plan, gradient, smallest, leftover):
    found = two_tier(TAU, workers, train_s)
    assert (found.gradient_s, exact(TAU, workers, train_s).gradient_s) == (gradient, smallest)
    assert (found.workers, found.leftover_workers) == (plan, leftover)
    assert found.t0_s == (train_s or 3.0)
    assert found.predicted_s == tuple(row[k - 1] for row, k in zip(TAU, plan, strict=True))
    assert found.target_s == tuple(found.t0_s + i * found.gradient_s for i in range(3))


def test_a_finer_precision_finds_the_smallest_gradient():
    assert two_tier(TAU, 5, 6.0, precision_s=1e-9).gradient_s == pytest.approx(5.0, abs=1e-9)
    assert two_tier(TAU, 5, 6.0, precision_s=0.0).gradient_s == 5.0


def test_every_group_keeps_its_fewest_workers():
    found = two_tier(TAU, 7, 6.0, min_workers=2)  # t0 6; d_max 5; 2 + 2 + 3 from d = 2.5 on
    assert (found.workers, exact(TAU, 7, 6.0, min_workers=2).gradient_s) == ((2, 2, 3), 2.5)


def test_one_group_takes_all_workers_and_has_no_gradient():
    found = two_tier(TAU[2:], 2)
    assert (found.workers, found.gradient_s, found.target_s) == ((2,), 0.0, (16.0,))
    assert exact(TAU[2:], 2) == found


def test_leftover_workers_pass_over_a_number_that_gains_nothing():
    # The second group gains by two workers more, not by one; the third is the slowest and gains nothing.
    table = [[5.0, 4.0, 3.0, 2.0], [8.0, 8.0, 6.0, 6.0], [9.0, 9.0, 9.0, 9.0]]
    assert with_leftover(table, (1, 1, 1), 5) == (1, 3, 1)
    assert with_leftover(table, (1, 1, 1), 4) == (2, 1, 1)
    assert with_leftover(table, (4, 3, 1), 9) == (4, 3, 2)  # nobody gains: to the slowest


def test_equal_allocation_gives_the_longest_groups_one_more():
    assert equal_workers(4, 10) == (2, 2, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((TAU, 2), "2 workers are fewer than 3 groups × 1 (min_workers) = 3"),
        ((TAU, 5, 0.0, 2), "5 workers are fewer than 3 groups × 2 (min_workers) = 6"),
        ((TAU, 10), "10 workers are more than 3 groups × 3 (max_workers) = 9"),
        ((TAU, 9, 0.0, 4), "fewer than 3 groups × 4"),
        ((TAU, 12, 0.0, 4), "min_workers 4, max_workers 3"),
        # Above the line: d_max is 13.5, group 1's target 16.5; t0 takes three workers. From d = 22 on one would do.
        (
            ([[6.0, 4.0, 3.0], [25.0, 20.0, 14.0], [30.0, 16.0, 11.0]], 5),
            "the groups need 3 + 3 + 1 = 7 workers, there are 5",
        ),
        (
            ([[6.0, 4.0, 3.0], [25.0, 20.0, 14.0], [30.0, 16.0, 11.0]], 5),
            "the exact allocation does with 22 s",
        ),
        # Group 1 is longer than group 2, which sets d_max = 24: late on 2 workers, but d = 58 would do.
        (([[2.0, 2.0], [100.0, 60.0], [50.0, 40.0]], 4), "some group misses its target"),
    ],
)
def test_what_cannot_be_allocated_says_why_in_one_line(arguments, said):
    with pytest.raises(InputError) as refused:
        two_tier(*arguments)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_where_the_longest_group_does_not_end_last_only_the_exact_search_has_no_bound():
    table = [[2.0, 2.0], [100.0, 60.0], [50.0, 40.0]]
    assert exact(table, 4).gradient_s == 58.0
    assert exact(table, 4).workers == (1, 2, 1)


@st.composite
def problems(draw, most_groups=4, most_workers=5):
    groups, most = draw(st.integers(1, most_groups)), draw(st.integers(1, most_workers))
    times = st.integers(1, 60) | st.floats(0.5, 60.0)
    table = [
        sorted(draw(st.lists(times, min_size=most, max_size=most)), reverse=True)
        for _ in range(groups)
    ]
    if draw(st.booleans()):
        table.sort()
    fewest = draw(st.integers(1, most))
    workers = draw(st.integers(groups * fewest, groups * most))
    return np.array(table, dtype=float), workers, fewest


def plans(table, workers, fewest):
    """Every plan with at most so many workers."""
    groups, most = table.shape
    every = itertools.product(range(fewest, min(most, workers) + 1), repeat=groups)
    return [plan for plan in every if sum(plan) <= workers]


@given(problems(), st.floats(0.0, 70.0), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_search_keeps_its_bounds_and_comes_within_its_precision_of_the_exact_gradient(
    problem, train_s, precision
):
    table, workers, fewest = problem
    smallest = exact(table, workers, train_s, fewest)
    try:
        found = two_tier(table, workers, train_s, fewest, precision)
    except InputError as refused:  # d_max is in the way
        assert smallest.gradient_s > max(
            (table[-1, fewest - 1] - smallest.t0_s) / (len(table) - 1), 0.0
        )
        assert f"the exact allocation does with {smallest.gradient_s:g} s" in str(refused)
        return
    assert smallest.gradient_s <= found.gradient_s <= smallest.gradient_s + precision + 1e-9
    for plan in (found, smallest):
        assert sum(plan.workers) == workers
        assert all(fewest <= k <= table.shape[1] for k in plan.workers)
        assert all(
            more >= needed for more, needed in zip(plan.workers, plan.needed_workers, strict=True)
        )
        assert plan.leftover_workers == workers - sum(plan.needed_workers)
        assert (np.array(plan.predicted_s) <= np.array(plan.target_s) + 1e-9).all()


@given(problems(), st.floats(0.0, 70.0))
def test_the_exact_gradient_is_the_smallest_of_all_plans(problem, train_s):
    table, workers, fewest = problem
    bound = workers - (len(table) - 1) * fewest
    t0 = max(table[0, min(table.shape[1], bound) - 1], train_s)
    gradients = [
        max([(table[i, k - 1] - t0) / i for i, k in enumerate(plan) if i] + [0.0])
        for plan in plans(table, workers, fewest)
        if table[0, plan[0] - 1] <= t0
    ]
    assert exact(table, workers, train_s, fewest).gradient_s == min(gradients)


# Two steps


def test_reversing_a_contiguous_fill_loses_part_of_the_complement():
    counts = [1, 1, 2, 4]
    assert fill(0, counts).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert fill(1, counts).tolist() == [3, 3, 3, 3, 2, 2, 1, 0]
    # Linear times, a step of 1 from 0: with as many workers a group every sum would be 3.
    assert two_step_sums((0, 1, 2, 3), counts).tolist() == [3, 4, 5, 5, 5, 5, 4, 3]
    assert two_step_sums((0, 1, 2, 3), [2, 2, 2, 2]).tolist() == [3] * 8
    assert two_step_sums((0, 1, 2, 3), [2, 2, 2, 2], "none").tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    # No assignment of the second step can do better: the reverse of a rising order is the best.
    assert sorted(two_step_sums((0, 1, 2, 3), counts, alternation="pairing")) == [
        3,
        3,
        4,
        4,
        5,
        5,
        5,
        5,
    ]


def test_the_best_pairing_mends_what_the_reversed_fill_spoils_where_times_do_not_rise():
    times, counts = (1.0, 9.0, 2.0, 8.0), (1, 1, 1, 1)
    assert two_step_sums(times, counts).max() == 11.0
    assert two_step_sums(times, counts, alternation="pairing").max() == 10.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.data())
def test_no_assignment_has_a_shorter_longest_sum_or_less_squares_than_the_best_pairing(busy, data):
    groups = data.draw(st.integers(1, len(busy)))
    cuts = sorted(data.draw(st.permutations(range(1, len(busy))))[: groups - 1])
    counts = np.diff([0, *cuts, len(busy)]).tolist()
    times = data.draw(st.lists(st.integers(0, 50), min_size=groups, max_size=groups))
    paired = best_pairing(busy, times, counts)
    assert np.bincount(paired, minlength=groups).tolist() == counts
    sums = np.array(busy) + np.array(times)[paired]
    slots = np.repeat(times, counts)
    every = np.array(busy) + np.array(list(itertools.permutations(slots)))
    assert sums.max() == every.max(axis=1).min()
    squares = np.square(np.add.outer(np.array(busy), slots))
    row, column = linear_sum_assignment(squares)
    assert np.square(sums).sum() == squares[row, column].sum()


def test_in_the_long_run_a_step_takes_half_of_two_complementary_ones():
    assert step_s((1.0, 3.0), (1, 1)) == pytest.approx(2.0)
    assert step_s((10.0,), (1,), train_s=4.0) == pytest.approx(10.0)  # training overlaps


def test_in_the_long_run_a_step_takes_no_less_than_its_training_nor_than_half_of_its_longest_and_training():
    assert step_s((1.0, 3.0), (1, 1), train_s=5.0) >= 5.0
    # The longest of step n begins after step n − 2 is trained, and step n is trained after it.
    assert step_s((1.0, 9.0), (1, 1), train_s=3.0, pairing=True) >= (9.0 + 3.0) / 2


@examples(30)
@given(problems(most_groups=3, most_workers=4))
def test_the_shortest_two_steps_are_the_shortest_of_all_plans(problem):
    table, workers, fewest = problem
    found = shortest_two_steps(table, workers, fewest)
    assert sum(found) == workers and all(fewest <= k <= table.shape[1] for k in found)

    def longest(plan):
        return two_step_sums(predicted_s(table, plan), plan, alternation="pairing").max()

    every = [plan for plan in plans(table, workers, fewest) if sum(plan) == workers]
    assert longest(found) == min(map(longest, every))


@examples(30)
@given(problems(), st.floats(0.0, 70.0))
def test_the_bound_that_is_chosen_is_as_good_as_any(problem, train_s):
    table, workers, fewest = problem

    def seconds(most):
        plan = two_tier(table[:, :most], workers, train_s, fewest)
        return step_s(plan.predicted_s, plan.workers, train_s)

    found = {}
    for most in range(max(fewest, -(-workers // len(table))), table.shape[1] + 1):
        try:
            found[most] = seconds(most)
        except InputError:
            continue
    assume(found)
    chosen = best_max_workers(table, workers, train_s, fewest)
    assert seconds(chosen) == min(found.values())


# β


def test_growth_is_the_third_quartile_over_the_prompts_of_both_epochs_and_at_least_a_tenth():
    before = {1: 100.0, 2: 100.0, 3: 100.0, 4: 100.0, 5: 100.0, 9: 1.0}
    now = {1: 100.0, 2: 120.0, 3: 130.0, 4: 150.0, 5: 300.0, 8: 1e6}
    assert growth_factor(before, now) == 1.5
    assert growth_factor(now, before) == 1.1


# The command


MODEL = {
    "steps": 6,
    "prompts_per_step": 12,
    "group": 4,
    "prompts": 24,
    "cap_tokens": 4000,
    "mean_tokens": 900,
    "sigma": 0.9,
    "prompt_share": 0.9,
    "prompt_tokens": 100,
}


@pytest.fixture
def allocate(simrl):
    """`simrl allocate` on a trace of three epochs of two steps each, trace.parquet."""
    write_trace(synthesise(LengthModel.model_validate(MODEL), 1), "trace.parquet")

    def run(*arguments, trace="trace.parquet"):
        return ("allocate", "--trace", trace, "--profile", str(PROFILE), *arguments)

    return run


def test_the_command_allocates_the_first_step_after_the_last_but_one_epoch(simrl, allocate):
    arguments = ("--workers", "12", "--groups", "4", "--optimum", "--json")
    code, out, err = simrl(*allocate(*arguments, "--sub-batches", "responses"))
    assert (code, err) == (0, "")
    d = json.loads(out)
    assert (d["history_epoch"], d["step"], d["history_is_own"], d["samples"]) == (1, 4, False, 48)
    assert sum(g["workers"] for g in d["groups"]) == 12
    assert [g["prompts"] for g in d["groups"]] == [3, 3, 3, 3]
    assert [g["equal_workers"] for g in d["groups"]] == [3, 3, 3, 3]
    assert all(g["predicted_s"] <= g["target_s"] + 1e-9 for g in d["groups"])
    assert d["exact_gradient_s"] <= d["gradient_s"] <= d["exact_gradient_s"] + 1.0
    assert len(d["two_step_sums"]) == 12
    by_plan = {p["plan"]: p for p in d["plans"]}
    assert set(by_plan) == {"equal", "two_tier", "exact", "optimum"}
    assert (
        by_plan["optimum"]["longest_two_steps_s"]
        <= by_plan["two_tier"]["longest_two_steps_s"] + 1e-9
    )
    assert by_plan["two_tier"]["step_s"]["reversed"] < by_plan["equal"]["step_s"]["reversed"]
    assert d["growth_factor"] >= 1.1
    assert Path(d["picture"]).read_bytes().startswith(b"\x89PNG")
    assert d["picture"] == "trace-allocation.png"


@pytest.mark.parametrize(
    "dealt, together",
    [((), 4), (("--sub-batches", "prompts"), 4), (("--sub-batches", "responses"), 1)],
)
def test_the_predicted_times_are_tau_of_the_history_s_lengths_in_what_is_dealt(
    simrl, allocate, dealt, together
):
    arguments = (
        *dealt,
        "--workers",
        "8",
        "--groups",
        "2",
        "--epoch",
        "0",
        "--step",
        "3",
        "--accept-length",
        "1.5",
        "--json",
    )
    d = json.loads(simrl(*allocate(*arguments)).out)
    trace = synthesise(LengthModel.model_validate(MODEL), 1)
    epoch, step, prompt, tokens = (
        trace.column(c) for c in ("epoch", "step", "prompt_id", "response_tokens")
    )
    of_step = np.unique(prompt[step == 3])
    past = (epoch == 0) & np.isin(prompt, of_step)
    groups = ranking_groups(prompt[past], tokens[past], 2)
    prompt_tokens = round(float(trace.column("prompt_tokens")[step == 3].mean()))
    times = RolloutTimes(read_profile(PROFILE), int(tokens[past].max()), 256, prompt_tokens)
    for shown, group in zip(d["groups"], groups, strict=True):
        assert shown["representative_tokens"] == group.representative_tokens
        (seconds,) = times.table([group.lengths_tokens], [24], 8, [Drafted(1.5)], together)
        assert shown["predicted_s"] == pytest.approx(seconds[shown["workers"] - 1])


def test_where_the_search_finds_no_plan_the_exact_one_stands_and_a_note_says_so(simrl):
    folder = Path(__file__).parents[2]
    trace, profile = (
        str(folder / name)
        for name in ("traces/countdown/sync/trace.parquet", "profiles/qwen3-8b_h100_tp1.parquet")
    )
    d = json.loads(
        simrl("allocate", "--trace", trace, "--profile", profile, "--workers", "16", "--json").out
    )
    by_plan = {plan["plan"]: plan["workers"] for plan in d["plans"]}
    assert not d["search_found_plan"] and by_plan["two_tier"] == by_plan["exact"]
    assert any("finds no plan" in note for note in d["notes"])
    assert not any("the bound with which a step is shortest" in note for note in d["notes"])


def test_the_table_on_the_screen_says_what_the_paper_leaves_open(simrl, allocate):
    code, out, err = simrl(*allocate("--workers", "12", "--groups", "4", "-o", "picture.svg"))
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "Step 4, history epoch 1: 48 samples in 4 groups on 12 workers" in text
    assert "the smallest possible is" in text and "the paper leaves it to its user" in text
    assert "Drawn in picture.svg" in text and Path("picture.svg").read_text().startswith("<?xml")


def test_the_notes_name_the_option_and_count_one_worker_as_one(simrl, allocate):
    text = " ".join(
        simrl(*allocate("--workers", "1", "--groups", "1", "-o", "one.svg")).out.split()
    )
    assert "48 samples in 1 group on 1 worker;" in text and "1 workers" not in text
    text = " ".join(
        simrl(*allocate("--workers", "12", "--groups", "4", "-o", "two.svg")).out.split()
    )
    assert "Training (--train-seconds 0) is shorter than" in text
    assert "2 groups on 1 worker; each" in simrl.refuses(
        *allocate("--workers", "1", "--groups", "2")
    )


def test_pairing_is_never_worse_than_reversing(simrl, allocate):
    arguments = (
        "--workers",
        "12",
        "--groups",
        "5",
        "--train-seconds",
        "5",
        "--json",
        "--alternation",
    )
    sums = [
        json.loads(simrl(*allocate(*arguments, name)).out)["two_step_sums"]
        for name in ("reversed", "pairing")
    ]
    assert max(sums[1]) <= max(sums[0]) and sum(sums[1]) == pytest.approx(sum(sums[0]))


def test_a_command_that_does_not_alternate_or_takes_medians_says_so_in_its_plan(simrl, allocate):
    asked = ("--workers", "12", "--groups", "4", "--json")
    plain, still, medians = (
        json.loads(simrl(*allocate(*asked, *more)).out)
        for more in ((), ("--alternation", "none"), ("--representative", "medians"))
    )
    assert max(still["two_step_sums"]) == pytest.approx(
        2 * max(group["predicted_s"] for group in still["groups"])
    )
    assert [group["representative_tokens"] for group in plain["groups"]] != [
        group["representative_tokens"] for group in medians["groups"]
    ]


def test_a_trace_of_one_epoch_is_its_own_history_and_it_is_said(simrl, allocate):
    write_trace(synthesise(LengthModel.model_validate({**MODEL, "steps": 2}), 1), "one.parquet")
    d = json.loads(
        simrl(*allocate("--workers", "6", "--groups", "3", "--json", trace="one.parquet")).out
    )
    assert (d["history_epoch"], d["step"], d["history_is_own"], d["growth_factor"]) == (
        0,
        1,
        True,
        None,
    )
    assert "a forecast that is never wrong" in d["notes"][0]


def test_prompts_without_history_are_left_out_and_it_is_said(simrl, allocate):
    columns = {
        "step": [0, 0, 1, 1, 1],
        "epoch": [0, 0, 1, 1, 1],
        "prompt_id": [1, 2, 1, 2, 3],
        "sample": [0] * 5,
        "prompt_tokens": [5] * 5,
        "response_tokens": [10, 200, 12, 190, 50],
    }
    metadata = TraceMetadata(
        name="run", kind="recorded", source="a test", tokenizer="none", cap_tokens=200
    )
    write_trace(Trace.from_columns(columns, metadata), "new.parquet")
    d = json.loads(
        simrl(*allocate("--workers", "2", "--groups", "2", "--json", trace="new.parquet")).out
    )
    assert (d["samples"], d["prompts_without_history"]) == (2, 1)
    assert "Left out for want of a history: 1 of the step's prompts." in d["notes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "4", "--groups", "8"), "8 groups on 4 workers"),
        (
            ("--workers", "20", "--groups", "13"),
            "12 prompts have a history; ask for 1 to 12 groups",
        ),
        (
            ("--workers", "12", "--groups", "4", "--min-workers", "4"),
            "12 workers are fewer than 4 groups × 4",
        ),
        (
            ("--workers", "12", "--groups", "4", "--max-workers", "2"),
            "12 workers are more than 4 groups × 2",
        ),
        (
            ("--workers", "12", "--groups", "4", "--epoch", "9"),
            "--epoch 9: the trace has the epochs 0 to 2",
        ),
        (
            ("--workers", "12", "--groups", "4", "--step", "9"),
            "--step 9: the trace has the steps 0 to 5",
        ),
        (
            ("--workers", "12", "--groups", "4", "--step", "0", "--epoch", "1"),
            "step 0 is of epoch 0, before it",
        ),
        (
            ("--workers", "12", "--groups", "4", "--alternation", "zigzag"),
            "choose reversed or pairing or none",
        ),
        (
            ("--workers", "12", "--groups", "4", "--representative", "mean"),
            "choose responses or medians",
        ),
        (
            ("--workers", "12", "--groups", "4", "--sub-batches", "tokens"),
            "--sub-batches tokens: choose prompts or responses",
        ),
        (("--workers", "12", "--groups", "4", "-o", "picture.doc"), "use .png, .pdf or .svg"),
        (
            ("--workers", "12", "--groups", "4", "--train-seconds", "inf"),
            "--train-seconds=inf: give 1e+18 or less, a finite number",
        ),
        (("--workers", "12", "--groups", "4", "--max-num-seqs", "4096"), None),
    ],
)
def test_the_command_refuses_in_one_line_what_cannot_be(simrl, allocate, arguments, said):
    if said is None:  # a limit that is never reached asks nothing of the profile
        assert simrl(*allocate(*arguments)).code == 0
    else:
        assert said in simrl.refuses(*allocate(*arguments))
