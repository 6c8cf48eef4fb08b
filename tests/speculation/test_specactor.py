"""SpecActor's formulas, planner, reconfiguration, ladder and assignment against its paper (arXiv 2511.16193, §4), and what it
plans against what two loops do (tests/references/decoupled.py)."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.decoupled_bound import bound, coupled, decoupled
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.result.metrics import summary
from simrl.simulate.prepare import Prepared, prepare
from simrl.speculation.best_of_n import BestOfN, assign
from simrl.speculation.deployment import typical_context_tokens
from simrl.speculation.draft_times import text_drafts, with_messages
from simrl.speculation.inputs import ASSUMED_RUNS
from simrl.speculation.passes import run_passes
from simrl.speculation.run_model import draw_runs
from simrl.speculation.specactor import (
    COUPLED,
    DECOUPLED,
    Affine,
    best_window,
    coupled_tgs,
    decoupled_tgs,
    draft_ladder,
    fit_affine,
    fit_draft,
    fit_verify,
    plan_decoupled,
    reconfiguration_table,
    reconfigured,
    renewal_rate,
    token_acceptance,
)
from simrl.speculation.windows import Fixed
from simrl.training.operations import COLLECTIVE_S
from tests.helpers import examples, one_second_a_pass, prepared, rows, scenario, watch
from tests.references.decoupled import DecoupledWorker, Request

METADATA = ProfileMetadata(model="m", gpu="g", tp=1, kind="assumed", source="by hand")
probabilities = st.floats(0, 1)
windows = st.integers(1, 16)
seconds = st.floats(1e-4, 1.0)


def geometric(p, most=64):
    """-ln P(the first j are accepted) where each is with probability p if those before it are."""
    return np.cumsum(np.full(most, -np.log(p)))


# --- Times.


def test_a_fit_of_affine_times_is_exact():
    fit = fit_draft(lambda b: 0.002 + 0.0001 * b, [1, 7, 64])
    assert fit == pytest.approx((0.0001, 0.002, 0.0))
    assert fit(10) == pytest.approx(0.003)


def test_a_fit_never_has_negative_parts():
    convex = fit_affine([1, 10, 100], [1.0, 1.0, 200.0])
    falling = fit_affine([1, 10, 100], [3.0, 2.0, 1.0])
    assert min(*convex, *falling) >= 0 and falling.slope_s == 0


def linear_profile(least_pass_s: float = 0.0) -> TableProfile:
    tables = Tables(
        dense_tokens=np.array([0.0, 100.0]),
        dense_s=np.array([0.0, 1.0]),
        sampled_sequences=np.array([0.0, 100.0]),
        sampled_s=np.array([0.0, 0.1]),
        prefill_tokens=np.array([0.0]),
        prefill_kv_tokens=np.array([0.0]),
        decode_sequences=np.array([0.0, 100.0]),
        decode_kv_tokens=np.array([0.0, 1000.0]),
        attention_s=np.array([[[[0.0, 0.0], [0.0, 10.0]]]]),
        between_passes_s=0.5,
        least_pass_s=least_pass_s,
    )
    return TableProfile(tables, METADATA)


def test_verification_is_dense_by_tokens_and_attention_by_sequences():
    profile = linear_profile()
    assert profile.verify_s(10, 3, 500) == pytest.approx(0.4 + 0.04 + 0.5 + 0.5)
    fits = fit_verify(profile, 4, [1, 5, 10, 25], 500)
    for tokens, fit in enumerate(fits, start=1):
        assert fit == pytest.approx((0.011 * tokens + 0.05, 0.5, 0.0))
    beyond = fit_verify(profile, 20, [1, 5, 10, 25], 500)
    assert beyond[19] == pytest.approx((0.011 * 20 + 0.05, 0.5, 0.0)), (
        "25 requests of 20 tokens are not in the profile"
    )


def test_a_verification_takes_what_the_host_needs_to_launch_it_and_no_line_leans_on_that():
    """Launching takes a second with the pause: as long as 4 requests of 7 tokens do; 3 and 5 are on either side."""
    profile = linear_profile(least_pass_s=0.5)
    fit = fit_verify(profile, 7, [1, 2, 3, 5, 10], 500)[6]
    found_s = [fit(requests) for requests in (1, 3, 5, 10)]
    assert found_s == pytest.approx([1.0, 1.0, 0.127 * 5 + 0.5, 0.127 * 10 + 0.5])
    assert found_s == pytest.approx([profile.verify_s(b, 6, 500) for b in (1, 3, 5, 10)])


def test_a_window_is_as_long_as_what_is_drafted_while_the_host_launches():
    """Two milliseconds a token, ten for a launch that has a millisecond of work."""
    plan = plan_decoupled(Affine(0.0, 0.002), {4: [Affine(0.0, 0.001, 0.010)] * 12}, 8, 10, 1.0)
    assert plan.window == 5 and plan.tgs == pytest.approx(500)


def test_fits_refuse_what_they_cannot_use():
    with pytest.raises(InputError, match=r"draft pass: 1 batch sizes"):
        fit_draft(lambda b: 1.0, [4, 4])
    with pytest.raises(InputError, match=r"pass: 0.0 s at batch 2"):
        fit_affine([1, 2], [1.0, 0.0])
    with pytest.raises(InputError, match="verification of 1 tokens a request: 1 batch sizes"):
        fit_verify(TableProfile(one_second_a_pass(), METADATA), 4, [1, 2048], 100)


# --- Rates.


def test_rates_by_hand():
    # w = 2, p = 1/2: a = 0 with 1/2, a = 1 with 1/4, both with 1/4. D = 1, V = 3: IL = 3, a miss takes 5.
    assert decoupled_tgs(0.5, 2, 1.0, 3.0) == pytest.approx((0.5 * 0.5 + 0.25 * 1.0 + 2 * 0.25) / 3)
    assert renewal_rate(0.5, 2, 1.0, 3.0) == pytest.approx(
        (0.5 * 1 + 0.25 * 2 + 2 * 0.25) / (0.25 * 3 + 0.75 * 5)
    )
    assert coupled_tgs(0.5, 2, 1.0, 3.0) == pytest.approx((0.5 * 1 + 0.25 * 2 + 3 * 0.25) / 5)


@given(windows, seconds, seconds)
def test_a_perfect_drafter_is_as_fast_as_the_slower_loop_and_a_hopeless_one_yields_a_token_a_round(
    w, draft_s, verify_s
):
    assert decoupled_tgs(1.0, w, draft_s, verify_s) == pytest.approx(w / max(w * draft_s, verify_s))
    assert renewal_rate(1.0, w, draft_s, verify_s) == pytest.approx(w / max(w * draft_s, verify_s))
    assert coupled_tgs(1.0, w, draft_s, verify_s) == pytest.approx(
        (w + 1) / (w * draft_s + verify_s)
    )
    assert renewal_rate(0.0, w, draft_s, verify_s) == pytest.approx(1 / (w * draft_s + verify_s))
    assert coupled_tgs(0.0, w, draft_s, verify_s) == pytest.approx(1 / (w * draft_s + verify_s))


@given(probabilities, probabilities, windows, seconds, seconds)
def test_what_is_executed_gains_from_acceptance_and_never_exceeds_the_slower_loop(
    p, q, w, draft_s, verify_s
):
    low, high = sorted((p, q))
    for rate in (renewal_rate, coupled_tgs):
        assert rate(low, w, draft_s, verify_s) <= rate(high, w, draft_s, verify_s) * (1 + 1e-9)
    assert renewal_rate(p, w, draft_s, verify_s) <= w / max(w * draft_s, verify_s) * (1 + 1e-9)


def test_tgs_exceeds_what_is_executed_by_1_to_26_percent_where_draft_and_verification_balance():
    excess = [
        decoupled_tgs(p, w, 1.0, w) / renewal_rate(p, w, 1.0, w) - 1
        for p, w in product(np.linspace(0.5, 0.95, 10), range(3, 9))
    ]
    assert min(excess) == pytest.approx(0.014, abs=0.002) and max(excess) == pytest.approx(
        0.26, abs=0.005
    )


@pytest.mark.parametrize(("p", "most"), [(0.67, 1.00), (0.8, 1.11), (0.9, 1.23)])
def test_drafting_ahead_gains_no_more_than_the_page_says_at_any_time_of_a_draft(p, most):
    """The first column of docs/speculation.md: a verification takes as long for any window; drafters' GPUs are not counted."""
    assert bound(p, 0.0) == pytest.approx(most, abs=0.005)
    for draft_s in np.random.default_rng(0).uniform(0.0, 2.0, 200):
        ratio = decoupled(p, draft_s, lambda q: 1.0) / coupled(p, draft_s, lambda q: 1.0)
        assert ratio <= bound(p, 0.0) * (1 + 1e-12)


# --- Two loops.


def run(requests, p, draft_s, verify_s, **kwargs):
    return DecoupledWorker(requests, geometric(p), draft_s, verify_s, **kwargs).run()


def constant(seconds):
    return lambda *_: seconds


def test_a_perfect_drafter_by_hand():
    # w = 2, D = 1, V = 3: windows are full at 2, verified 2-5, 5-8, 8-11; the next is always there; 6 tokens at 11.
    worker = run([Request(key=1, response=6, window=2)], 1 - 1e-12, constant(1.0), constant(3.0))
    assert worker.requests[0].ended_s == worker.now_s == 11.0
    assert (worker.verify_passes, worker.requests[0].accepted, worker.requests[0].misses) == (
        3,
        6,
        0,
    )
    # Drafted: 0-2, 2-4, 5-7, 8-10; what was drafted beyond the end is wasted.
    assert (worker.draft_passes, worker.drafted, worker.requests[0].wasted) == (8, 8, 2)


def test_a_hopeless_drafter_by_hand():
    # w = 2, D = 1, V = 3: 0-2 draft, 2-5 verify (2-4 drafted ahead), one token at 5, again: 5, 10, 15.
    worker = run([Request(key=1, response=3, window=2)], 1e-12, constant(1.0), constant(3.0))
    assert worker.now_s == 15.0
    assert (worker.verify_passes, worker.drafted, worker.requests[0].accepted) == (3, 12, 0)
    assert (
        worker.requests[0].misses == 3
        and worker.requests[0].wasted == 9
        and worker.requests[0].most_wasted == 3
    )


def test_a_pass_that_drafts_for_nobody_any_more_is_abandoned():
    # w = 2, D = 2, V = 3: verified 4-7; at 7 the pass 6-8 is in the air, for nobody: drafts 7-9, 9-11, verified 11-14.
    worker = run([Request(key=1, response=2, window=2)], 1e-12, constant(2.0), constant(3.0))
    assert worker.now_s == 14.0
    assert (worker.abandoned_passes, worker.draft_passes, worker.drafted) == (2, 6, 8)


def test_a_pass_that_still_drafts_for_somebody_goes_on():
    # The second needs a window of 9, so the pass 6-8 goes on; the first drafts again from 8 on.
    requests = [Request(key=1, response=2, window=2), Request(key=2, response=2, window=9)]
    worker = run(requests, 1e-12, constant(2.0), constant(3.0))
    assert requests[0].ended_s == 15.0  # drafts 8-10, 10-12, verified 12-15
    assert worker.drafted == sum(r.accepted + r.wasted + r.misses for r in requests)


def test_coupled_takes_turns_and_gains_a_bonus():
    worker = run(
        [Request(key=1, response=6, window=2, coupled=True)],
        1 - 1e-12,
        constant(1.0),
        constant(3.0),
    )
    assert worker.now_s == 10.0  # 2 + 3 twice, 3 tokens each
    assert (worker.requests[0].bonuses, worker.requests[0].accepted, worker.drafted) == (2, 4, 4)


def test_the_last_verification_of_a_coupled_request_has_a_bonus_only_where_a_token_is_left():
    request = Request(key=1, response=5, window=2, coupled=True)
    worker = run([request], 1 - 1e-12, constant(1.0), constant(3.0))
    assert (worker.now_s, request.generated, request.accepted, request.bonuses) == (10.0, 5, 4, 1)


def test_a_verification_has_a_window_of_query_tokens_and_one_more_if_coupled():
    seen = []

    def verify_s(requests, query_tokens, context_tokens):
        seen.append((requests, query_tokens, context_tokens))
        return 1.0

    requests = [
        Request(key=1, response=3, window=3, prompt=10),
        Request(key=2, response=4, window=3, coupled=True, prompt=20),
    ]
    run(requests, 1 - 1e-12, constant(1.0), verify_s)
    assert seen == [(2, 7, 30)]


def test_a_switch_to_coupled_throws_away_what_is_beyond_the_window():
    asked = []

    def to_coupled(request):
        asked.append(request.generated)
        return 2, True

    request = Request(key=1, response=11, window=4)
    worker = run(
        [request],
        1 - 1e-12,
        constant(1.0),
        constant(4.0),
        reconfigure=to_coupled,
        reconfigure_every=4,
    )
    # 4 tokens at 8, when 4 are ahead: 2 of them verified 8-12 (7 tokens), then 2 + 4 s for 3 tokens, and 1 more.
    assert asked == [4, 10] and worker.now_s == 24.0 and request.wasted == 3
    assert worker.drafted == request.accepted + request.misses + request.wasted


@st.composite
def batches(draw):
    count = draw(st.integers(1, 6))
    return [
        Request(
            key=draw(st.integers(0, 10**9)),
            response=draw(st.integers(1, 80)),
            window=draw(st.integers(1, 8)),
            coupled=draw(st.booleans()),
            hardness=draw(st.floats(0.2, 5)),
        )
        for _ in range(count)
    ]


@examples(150)
@given(
    batches(),
    st.floats(0.05, 0.99),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0.3, 1.0, 4.0]),
)
def test_every_token_is_counted_once_and_a_miss_wastes_less_than_two_windows(
    requests, p, draft_s, verify_s
):
    def other(request):
        return 1 + request.generated % 7, request.generated % 2 == 0

    worker = run(
        requests,
        p,
        lambda n: draft_s * (1 + n / 4),
        lambda n, tokens, _: verify_s + n / 10 + tokens / 100,
        reconfigure=other,
        reconfigure_every=20,
    )
    for r in requests:
        assert r.generated == r.response == r.accepted + r.misses + r.bonuses
    assert worker.drafted == sum(r.accepted + r.misses + r.wasted for r in requests)
    assert worker.now_s == max(r.ended_s for r in requests)
    assert max(worker.draft_busy_s, worker.verify_busy_s) <= worker.now_s * (1 + 1e-9)


@examples(100)
@given(
    st.integers(0, 10**9),
    st.integers(1, 8),
    st.floats(0.05, 0.99),
    st.sampled_from([0.3, 1.0, 1.7, 8.0]),
)
def test_a_miss_wastes_at_most_2w_minus_1(key, window, p, verify_s):
    request = Request(key=key, response=60, window=window)
    run(
        [request, Request(key=key + 1, response=60, window=window)],
        p,
        constant(1.0),
        constant(verify_s),
    )
    assert request.most_wasted <= 2 * window - 1


def test_a_run_in_stages_is_the_run_at_once():
    def worker():
        return DecoupledWorker(
            [Request(key=k, response=200, window=3) for k in range(5)],
            geometric(0.7),
            lambda n: 1 + n / 8,
            constant(4.0),
        )

    whole, staged = worker().run(), worker()
    for stage in range(100):
        staged.run(stage * 11.0)
        assert all(not r.over or r.ended_s <= stage * 11.0 for r in staged.requests)
    staged.run()
    assert [r.ended_s for r in staged.requests] == [r.ended_s for r in whole.requests]
    assert (staged.drafted, staged.verify_passes, staged.now_s) == (
        whole.drafted,
        whole.verify_passes,
        whole.now_s,
    )


def executed_rate(requests, p, w, draft_s, verify_s, tokens):
    batch = [Request(key=7_000 + i, response=tokens, window=w) for i in range(requests)]
    worker = run(batch, p, constant(draft_s), constant(verify_s))
    return tokens / np.mean([r.ended_s for r in batch]), worker


@pytest.mark.parametrize("p", [0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("w", [3, 5, 8])
@pytest.mark.parametrize("balance", [0.4, 1.0, 2.3])
def test_a_batch_of_one_yields_the_renewal_rate(p, w, balance):
    draft_s, verify_s = 1.0, balance * w
    rate, worker = executed_rate(1, p, w, draft_s, verify_s, 15_000)
    assert rate == pytest.approx(renewal_rate(p, w, draft_s, verify_s), rel=0.02)
    # Beyond luck: each verification costs what the formula says, but for the first window drafted and the last not awaited.
    request = worker.requests[0]
    hits = request.verifications - request.misses
    formula_s = hits * max(w * draft_s, verify_s) + request.misses * (w * draft_s + verify_s)
    assert request.ended_s == pytest.approx(formula_s, abs=w * draft_s + verify_s)


def test_a_coupled_batch_of_one_yields_its_formula():
    request = Request(key=9, response=30_000, window=4, coupled=True)
    run([request], 0.8, constant(1.0), constant(3.0))
    assert request.response / request.ended_s == pytest.approx(
        coupled_tgs(0.8, 4, 1.0, 3.0), rel=0.02
    )


def test_in_a_batch_the_missed_wait_for_the_next_verification():
    rate = {
        n: executed_rate(n, 0.7, 4, 1.0, 8.0, 1500)[0] / renewal_rate(0.7, 4, 1.0, 8.0)
        for n in (1, 16)
    }
    assert rate[1] == pytest.approx(1.0, abs=0.05)
    assert rate[16] < 0.93


# --- Algorithm 1.

DRAFT = Affine(0.00002, 0.002)
VERIFIERS = {
    gpus: [Affine((0.00004 + 0.00006 * w) * 4 / gpus, 0.008 * 4 / gpus) for w in range(1, 17)]
    for gpus in (2, 4)
}


def brute_force(draft, verifiers, gpus, requests, acceptance, rate):
    """The largest rate of all plans, and every plan that reaches it."""
    values = {}
    for g_v, verify in verifiers.items():
        for g_d in range(1, min(g_v, gpus - g_v) + 1):
            b = math.ceil((g_d + g_v) * requests / gpus)
            for w, v in enumerate(verify, start=1):
                bound = max(
                    math.ceil(v.slope_s / (draft.slope_s / g_d)),
                    math.ceil(max(v.fixed_s, v.least_s) / draft.fixed_s),
                )
                if w <= bound:
                    draft_s = max(b / g_d, 1) * draft.slope_s + draft.fixed_s
                    values[g_d, g_v, w] = rate(
                        acceptance, w, draft_s, max(b * v.slope_s + v.fixed_s, v.least_s)
                    )
    best = max(values.values())
    return best, [plan for plan, value in values.items() if value == pytest.approx(best, rel=1e-12)]


lines = st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-4, 1e-2))
drafts = lines.map(lambda line: Affine(*line))
verifications = st.builds(
    lambda line, least_s: Affine(*line, least_s), lines, st.sampled_from([0.0, 2e-3, 2e-2])
)


@given(
    drafts,
    st.dictionaries(
        st.sampled_from([1, 2, 4, 8]), st.lists(verifications, min_size=1, max_size=10), min_size=1
    ),
    st.integers(9, 300),
    st.integers(1, 5000),
    probabilities,
    st.sampled_from(["tgs", "renewal"]),
)
def test_the_planner_finds_the_best_of_all(draft, verifiers, gpus, requests, acceptance, objective):
    plan = plan_decoupled(draft, verifiers, gpus, requests, acceptance, objective)
    rates = {"tgs": decoupled_tgs, "renewal": renewal_rate}
    value, choices = brute_force(draft, verifiers, gpus, requests, acceptance, rates[objective])
    assert (plan.tgs if objective == "tgs" else plan.renewal) == pytest.approx(value)
    assert (plan.draft_gpus, plan.verify_gpus, plan.window) in choices
    assert plan.requests == math.ceil((plan.draft_gpus + plan.verify_gpus) * requests / gpus)
    seconds = plan.draft_s(plan.requests), plan.verify[plan.window - 1](plan.requests)
    for name, rate in rates.items():
        assert getattr(plan, name) == pytest.approx(rate(acceptance, plan.window, *seconds))


def test_a_drafter_of_many_that_has_less_than_a_request_drafts_for_one():
    plan = plan_decoupled(Affine(0.001, 0.001), {4: [Affine(0.0, 0.01)] * 3}, 256, 1, 0.5)
    assert plan.requests == 1 and plan.draft_gpus == 1, "more drafters than requests are of no use"
    assert plan.draft_s(1) == pytest.approx(0.002)


@given(probabilities)
def test_each_objective_is_largest_in_its_own_plan(acceptance):
    by_tgs = plan_decoupled(DRAFT, VERIFIERS, 256, 8192, acceptance, "tgs")
    by_renewal = plan_decoupled(DRAFT, VERIFIERS, 256, 8192, acceptance, "renewal")
    assert by_tgs.tgs >= by_renewal.tgs and by_renewal.renewal >= by_tgs.renewal


def test_a_drafter_that_costs_nothing_gets_the_longest_window_there_is_for_a_perfect_acceptance():
    plan = plan_decoupled(Affine(0.0, 0.0), {4: [Affine(0.0, 0.01)] * 12}, 8, 10, 1.0)
    assert plan.window == 12 and plan.draft_gpus == 1


def test_windows_end_where_drafting_is_slower_than_verifying_at_any_batch():
    plan = plan_decoupled(Affine(0.001, 0.002), {1: [Affine(0.0029, 0.0061)] * 30}, 2, 10, 1.0)
    assert plan.window <= 4  # ceil(2.9) and ceil(3.05)


def test_the_planner_refuses_what_leaves_no_choice():
    with pytest.raises(InputError, match=r"no verifier of \[4\] GPUs leaves a drafter one of 4"):
        plan_decoupled(DRAFT, {4: VERIFIERS[4]}, 4, 10, 0.5)


# --- Algorithm 2.


@given(st.floats(0, 1), st.floats(1e-4, 1e-2), st.sampled_from(["tgs", "renewal"]))
def test_a_reconfigured_request_has_the_fastest_window_and_mode(p, draft_s, objective):
    verify_s = [0.008 + 0.0002 * q for q in range(1, 13)]
    window, mode = best_window(p, draft_s, verify_s, objective)
    rate = decoupled_tgs if objective == "tgs" else renewal_rate
    every = [rate(p, w, draft_s, verify_s[w - 1]) for w in range(1, 13)]
    every += [coupled_tgs(p, w, draft_s, verify_s[w]) for w in range(1, 12)]
    chosen = (
        coupled_tgs(p, window, draft_s, verify_s[window])
        if mode == COUPLED
        else rate(p, window, draft_s, verify_s[window - 1])
    )
    assert chosen == max(every)


def test_of_equal_choices_the_one_that_wastes_least():
    assert best_window(0.0, 0.0, [0.01] * 4, "renewal") == (1, COUPLED)
    assert best_window(0.0, 0.0, [0.01], "renewal") == (1, DECOUPLED), (
        "a bonus needs a query token more"
    )


def test_requests_below_the_mean_are_planned_anew_and_the_others_keep_the_plan():
    plan = plan_decoupled(DRAFT, VERIFIERS, 256, 8192, 0.8)
    table = reconfiguration_table(plan)
    chosen = [reconfigured(p, 0.675, plan.window, *table) for p in (0.9, 0.1, 0.8, math.nan, 0.9)]
    assert [c for i, c in enumerate(chosen) if i != 1] == [(plan.window, DECOUPLED)] * 4
    verify_s = [v(1) for v in plan.verify]
    assert chosen[1] == best_window(0.1, plan.draft_s(1), verify_s)


def test_the_less_is_accepted_the_shorter_the_window():
    plan = plan_decoupled(DRAFT, VERIFIERS, 256, 8192, 0.8)
    table_windows, table_coupled = reconfiguration_table(plan, "renewal")
    coupled = table_windows[table_coupled == 1]
    assert (np.diff(coupled) >= 0).all() and table_windows[0] == 1
    assert table_windows.dtype == table_coupled.dtype == np.int64 and table_windows.shape == (101,)


def test_the_table_is_looked_up_at_the_nearest_step():
    table = np.arange(101), np.arange(101) % 2
    assert reconfigured(0.0, 0.5, 4, *table) == (0, 0)
    assert reconfigured(0.434, 0.5, 4, *table) == (43, 1)
    assert reconfigured(0.436, 0.5, 4, *table) == (44, 0)
    assert reconfigured(0.5, 0.5, 4, *table) == reconfigured(math.nan, 0.5, 4, *table) == (4, 0)
    assert reconfigured(0.999, 1.0, 4, *table) == (100, 0)


def test_the_acceptance_of_tokens_is_recovered_from_verifications():
    request = Request(key=3, response=20_000, window=6)
    run([request], 0.75, constant(1.0), constant(3.0))
    assert token_acceptance(request.accepted, request.misses) == pytest.approx(0.75, abs=0.01)
    assert math.isnan(token_acceptance(0, 0))


# --- Draft ladder.

VERIFY = [lambda b, q=q: 0.010 + 0.00004 * b * q for q in range(1, 9)]


def test_the_ladder_is_the_speedup_over_plain_decoding():
    ladder = draft_ladder(
        {"0.5b": lambda b, n: 0.002 * n, "1.5b": lambda b, n: 0.003 * n}, VERIFY, 16
    )
    assert ladder.speedups.shape == (2, 101) and (np.diff(ladder.speedups, axis=1) >= -1e-12).all()
    verify_s = [v(16) for v in VERIFY]
    by_hand = max(coupled_tgs(0.8, w, 0.003, verify_s[w]) for w in range(1, 8)) * verify_s[0]
    assert ladder.speedup("1.5b", 0.8) == pytest.approx(by_hand)
    window = ladder.windows[1, 80]
    assert coupled_tgs(0.8, window, 0.003, verify_s[window]) * verify_s[0] == pytest.approx(by_hand)
    assert (ladder.speedups[0] >= ladder.speedups[1]).all(), (
        "at one acceptance, the faster drafter is better"
    )


def test_the_first_of_the_ladder_weighs_acceptance_against_draft_time():
    seconds = {"ngram": 0.0001, "0.5b": 0.002, "1.5b": 0.003}
    ladder = draft_ladder(
        {name: lambda b, n, s=s: s * n for name, s in seconds.items()}, VERIFY, 16
    )

    def order(**rates: float) -> list[str]:
        return sorted(rates, key=lambda name: -ladder.speedup(name, rates[name]))

    assert order(**{"ngram": 0.2, "0.5b": 0.7, "1.5b": 0.75})[0] == "0.5b"
    assert order(**{"ngram": 0.2, "0.5b": 0.5, "1.5b": 0.8})[0] == "1.5b"
    assert order(**{"ngram": 0.9, "0.5b": 0.1, "1.5b": 0.5}) == ["ngram", "1.5b", "0.5b"]


def test_what_a_round_of_drafts_takes_besides_its_passes_is_paid_once_a_window():
    round_s, level_s = 0.005, 0.001
    ladder = draft_ladder({"0.5b": lambda b, n: round_s + level_s * n}, VERIFY, 16)
    verify_s = [v(16) for v in VERIFY]
    by_hand = (
        max(coupled_tgs(0.8, w, round_s / w + level_s, verify_s[w]) for w in range(1, 8))
        * verify_s[0]
    )
    assert ladder.speedup("0.5b", 0.8) == pytest.approx(by_hand)


# --- Algorithm 3.


def assign_by_drafter(acceptances, workers, freed, load, most_load, already=()):
    return assign(
        BestOfN((), most_load, "by_drafter", "recompute"),
        acceptances,
        workers,
        freed,
        load,
        already,
    )


def assign_by_request(acceptances, workers, freed, load, most_load, order, already=()):
    rule = BestOfN((), most_load, "by_request", "recompute", order=order)
    return assign(rule, acceptances, workers, freed, load, already)


def test_best_of_n_by_drafter_as_worked_out_by_hand():
    # Freed 7, 8, 9: b has none, so 7; then a, b have 1 each: 8 to a; 9 to b. Worker 1 has room for one more.
    assignment = assign_by_drafter(
        {10: 0.9, 11: 0.2, 12: 0.5}, {"a": [1], "b": []}, [7, 8, 9], {1: 3}, 4, already={(11, "a")}
    )
    assert assignment.workers == {"a": (1, 8), "b": (7, 9)}
    assert assignment.added == {
        (12, "a"): 1,
        (10, "a"): 8,
        (11, "b"): 7,
        (12, "b"): 7,
        (10, "b"): 7,
    }
    assert list(assignment.added)[:2] == [(12, "a"), (10, "a")]


def test_fastest_of_n_gives_the_slowest_request_all_drafters_first():
    # One place each: by drafter the slowest gets both, too; with the order of the ladder and the least loaded worker.
    assignment = assign_by_request(
        {10: 0.9, 11: 0.2},
        {"a": [1, 2], "b": [3], "c": []},
        [],
        {1: 1, 2: 0, 3: 0},
        1,
        ["c", "b", "a"],
    )
    assert assignment.added == {(11, "b"): 3, (11, "a"): 2}


def test_the_two_forms_differ_in_how_they_fill_workers():
    everyone = {
        "acceptances": {1: 0.1, 2: 0.2},
        "workers": {"a": [5, 6]},
        "freed": [],
        "load": {},
        "most_load": 2,
    }
    assert assign_by_drafter(**everyone).added == {(1, "a"): 5, (2, "a"): 5}
    assert assign_by_request(**everyone, order=["a"]).added == {(1, "a"): 5, (2, "a"): 6}


@given(
    st.dictionaries(st.integers(0, 20), probabilities, max_size=8),
    st.lists(st.integers(0, 2), max_size=5),
    st.integers(0, 4),
    st.dictionaries(st.integers(0, 8), st.integers(0, 5), max_size=5),
    st.integers(1, 5),
    st.sets(st.tuples(st.integers(0, 20), st.sampled_from("abc")), max_size=6),
    st.booleans(),
)
def test_no_worker_takes_more_than_it_may_and_no_pair_is_made_twice(
    acceptances, owners, freed, load, most, already, by_request
):
    workers = {d: [w for w, o in enumerate(owners) if "abc"[o] == d] for d in "abc"}
    new = list(range(len(owners), len(owners) + freed))
    order = {"order": ["b", "c", "a"]} if by_request else {}
    form = assign_by_request if by_request else assign_by_drafter
    assignment = form(acceptances, workers, new, load, most, already=already, **order)
    assert sorted(w for own in assignment.workers.values() for w in own) == list(
        range(len(owners) + freed)
    )
    sizes = {w: load.get(w, 0) for w in range(len(owners) + freed)}
    for (request, drafter), worker in assignment.added.items():
        assert (
            request in acceptances
            and worker in assignment.workers[drafter]
            and (request, drafter) not in already
        )
        sizes[worker] += 1
    assert all(size <= max(most, load.get(w, 0)) for w, size in sizes.items())
    for drafter, own in assignment.workers.items():  # nobody is left out while there is room
        left = [r for r in acceptances if (r, drafter) not in {*already, *assignment.added}]
        assert not left or all(sizes[w] >= most for w in own)


# --- In a scenario.


def test_every_token_that_a_drafter_drafts_is_some_samples():
    watched = watch(
        prepared(scenario({"name": "specactor", "model": "qwen2.5-0.5b", "best_of_n": False}))
    )
    drafted = sum(row["drafted_tokens"] for row in rows(watched.result.samples))
    assert drafted == watched.workers[0].engine.fleet.t["draft_tokens"].sum() > 0
    accepted = sum(row["accepted_tokens"] for row in rows(watched.result.samples))
    assert summary(watched.result, 0)["acceptance_rate"] == pytest.approx(accepted / drafted)


LONG = {"steps": 1, "cap_tokens": 4000, "mean_tokens": 3000, "sigma": 0.2, "prompt_tokens": 20}


def test_the_plan_that_is_told_is_the_one_that_runs():
    for asked in ({}, {"window": 3}, {"draft_gpus": 2}, {"window": 20, "draft_gpus": 3}):
        cluster = {"gpu": "h100", "gpus": 16, "tp": 4}
        system = {"name": "specactor", "model": "qwen2.5-0.5b", "best_of_n": False, **asked}
        ready = prepare(scenario(system, cluster=cluster, model="qwen3-8b"))
        plan, told = ready.drafts.decoupled, ready.drafts.facts["plan"]
        assert asked.items() <= told.items()
        group = 8  # responses of a step
        assert told["requests"] == plan.requests == math.ceil((4 + plan.draft_gpus) * group / 16)
        seconds = (
            plan.token_s(plan.requests, plan.window),
            plan.verify[plan.window - 1](plan.requests),
        )
        assert told["tgs"] == pytest.approx(decoupled_tgs(0.75, plan.window, *seconds))
        assert told["renewal_rate"] == pytest.approx(renewal_rate(0.75, plan.window, *seconds))


BIG: dict[str, Any] = {
    "model": "qwen2.5-32b",
    "cluster": {"gpu": "h100", "gpus": 32, "tp": 4},
    "workload": {"synthetic": {**LONG, "prompts_per_step": 64, "group": 8}},
    "profile": {"path": "profiles/qwen2.5-32b_h100_tp4.parquet"},
}


def big(speculation: dict[str, Any] | None = None, **parameters: Any) -> Prepared:
    return prepare(
        scenario({"name": "specactor", **parameters}, **BIG, speculation=speculation or {})
    )


def accepting(**rates: float) -> dict[str, Any]:
    """Inputs with these acceptances of the small models."""
    of = {"half": "qwen2.5-0.5b", "more": "qwen2.5-1.5b"}
    each = {"verification": "exact_match", "source": "a test"}
    return {
        "acceptance": {of[name]: {"by_position": [rate], **each} for name, rate in rates.items()}
    }


def test_the_ladder_chooses_the_first_drafter_by_its_acceptance():
    for half, more, best in ((0.30, 0.85, "qwen2.5-1.5b"), (0.85, 0.30, "qwen2.5-0.5b")):
        ready = big(accepting(half=half, more=more))
        assert (
            ready.drafts.facts["first_drafter"]
            == ready.drafts.speculation.model
            == ready.tail.rule.own
            == best
        )
        assert ready.drafts.draft_gpus >= 1
        speedups = [each["speedup"] for each in ready.drafts.facts["candidates"].values()]
        assert speedups == sorted(speedups, reverse=True)
    assert (
        big(accepting(half=0.30, more=0.85), model="qwen2.5-0.5b").drafts.speculation.model
        == "qwen2.5-0.5b"
    )


def test_the_ladder_rates_every_candidate_in_turns_with_the_target_on_one_gpu_and_one_batch():
    """§4.2: one ladder. What drafting ahead would gain a model (and a text drafter, which needs no GPUs, would not) says
    nothing there; Algorithm 1 plans it for the drafter that is first."""
    ready = big(accepting(half=0.7, more=0.75))
    rated, profile = ready.drafts.facts["candidates"], ready.profile
    requests, context = 512 * 4 // 32, typical_context_tokens(ready.trace)
    verify = fit_verify(profile, 16, [1, 2, requests // 4, requests // 2, requests], context)
    plain_s = verify[0](requests)
    for name, rate in {"qwen2.5-0.5b": 0.7, "qwen2.5-1.5b": 0.75}.items():
        times = big(accepting(half=0.7, more=0.75), model=name).drafts.times
        by_hand = max(
            coupled_tgs(rate, w, times.draft_s(requests, w) / w, verify[w](requests))
            for w in range(1, 16)
        )
        assert rated[name]["speedup"] == pytest.approx(by_hand * plain_s)
    assert ready.drafts.decoupled is not None, "the first drafts ahead all the same"


def test_where_no_model_is_good_the_ladder_chooses_ngrams_which_need_no_gpus():
    ready = big(accepting(half=0.01, more=0.01))
    assert ready.drafts.facts["first_drafter"] == "ngram" and ready.drafts.draft_gpus == 0
    assert ready.workers == 8


def test_algorithm_1_goes_through_the_verifiers():
    small = {"model": "qwen2.5-7b", "profile": {"path": "profiles/qwen2.5-7b_h100_tp2.parquet"}}
    asked = {"name": "specactor", "model": "qwen2.5-0.5b", "best_of_n": False}
    cluster = {"gpu": "h100", "gpus": 32, "tp": 2}
    rated = {
        tp: prepare(scenario({**asked, "verifiers": tp}, **BIG | small | {"cluster": cluster}))
        for tp in ((1,), (2,), (1, 2))
    }
    best = max((1,), (2,), key=lambda tp: rated[tp].drafts.decoupled.tgs)
    assert rated[1, 2].scenario.cluster.tp == best[0]
    with pytest.raises(InputError, match="no verifier of \\(16,\\) GPUs holds"):
        big(verifiers=[16])


def test_drafters_apart_that_work_in_turns_are_slower_than_decoupled_ones():
    given = {"model": "qwen2.5-0.5b", "best_of_n": False, "draft_gpus": 1}
    apart, ahead = big(**given, decoupled=False, disaggregated=True), big(**given)
    plan = apart.drafts.decoupled
    assert apart.gpus_per_worker == ahead.gpus_per_worker == 5
    assert plan.tgs == coupled_tgs(
        0.75,
        plan.window,
        plan.token_s(plan.requests, plan.window),
        plan.verify[plan.window](plan.requests),
    )
    assert plan.renewal < ahead.drafts.decoupled.renewal
    assert big(model="qwen2.5-0.5b", decoupled=False).gpus_per_worker == 4


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"disaggregated": True}, "add decoupled: false"),
        ({"decoupled": False, "draft_gpus": 2}, "leave it out, or add disaggregated: true"),
    ],
)
def test_where_drafters_have_no_gpus_or_wait_for_nothing_what_says_otherwise_is_refused(
    asked, remedy
):
    with pytest.raises(InputError, match=remedy):
        big(**asked)


def test_copies_draft_ahead_on_the_freed_workers_drafter_gpus_or_in_turns():
    ahead, coupled = (
        big(model="qwen2.5-0.5b", copies=copies).tail for copies in ("decoupled", "coupled")
    )
    plans = ahead.plans["qwen2.5-1.5b"], coupled.plans["qwen2.5-1.5b"]
    assert [plan.draft_gpus for plan in plans] == [big(model="qwen2.5-0.5b").drafts.draft_gpus, 0]
    assert plans[0].decoupled.requests == 8 and plans[0].weight_bytes == 0 < plans[1].weight_bytes
    assert ahead.plans["ngram"].draft_gpus == 0


def test_a_copy_receives_as_long_as_it_recomputes():
    ready = big(model="qwen2.5-0.5b")
    share, tokens = ready.tail.rule.fetched_share, ready.limits.max_num_batched_tokens
    assert share * ready.costs.fetch_s_per_token * tokens == pytest.approx(
        (1 - share) * ready.profile.prefill_s(tokens)
    )
    assert [
        big(model="qwen2.5-0.5b", kv=kv).tail.rule.fetched_share for kv in ("recompute", "transfer")
    ] == [0, 1]


def test_a_round_of_drafts_takes_the_host_some_time_and_its_passes_are_profiled():
    times = big(model="qwen2.5-0.5b", decoupled=False).drafts.times
    assert times.round_s.min() > 0 and times.prefill_s > 0
    assert times.kind == "derived" and "aiconfigurator" in times.source


def test_the_host_starts_a_window_of_a_decoupled_drafter_as_it_starts_a_round():
    """By hand, 3 tokens right of every window of 3: 1 s a pass and 2 s more for the first of a window, no time to verify."""
    request = Request(0, 6, 3)
    worker = DecoupledWorker(
        [request], np.zeros((3,)), lambda n: 1.0, lambda n, q, c: 0.0, round_s=lambda n: 2.0
    ).run()
    assert request.ended_s == worker.now_s == 2 * (3 + 2)
    plans = [big({"draft_round_s": s}, model="qwen2.5-0.5b", best_of_n=False) for s in (0.0, 0.004)]
    messages_s = 2 * (COLLECTIVE_S + 4 * 1024 / plans[0].gpu.network_bytes_per_s)
    assert [plan.drafts.decoupled.round_s for plan in plans] == pytest.approx(
        [messages_s, 0.004 + messages_s]
    )
    assert plans[1].drafts.decoupled.renewal < plans[0].drafts.decoupled.renewal


def test_two_messages_a_window_go_between_drafter_and_verifier():
    """A window's tokens one way; how many were right, and the correction, the other. By exact match, a token is a number."""
    sheet, plain = gpu("h100"), text_drafts()
    sent = with_messages(plain, sheet)
    for n, window in ((1, 4), (256, 7)):
        by_hand = 2 * COLLECTIVE_S + 4 * n * (window + 2) / sheet.network_bytes_per_s
        assert sent.draft_s(n, window) - plain.draft_s(n, window) == pytest.approx(by_hand)


def test_a_decoupled_drafter_prefills_what_it_is_given():
    """The figures are by hand: 9 tokens of context but the last, 0.5 s each, then 1 s a drafted token; 3 of 3 right."""
    requests = [Request(0, 7, 3, prompt=8, generated=1)]
    worker = DecoupledWorker(
        requests, np.zeros((3,)), lambda n: 1.0, lambda n, q, c: 0.0, prefill_s=0.5
    ).run()
    assert worker.now_s == 8 * 0.5 + 2 * 3
    shared = [Request(i, 7, 3, prompt=8, generated=1) for i in range(2)]
    worker = DecoupledWorker(
        shared, np.zeros((3,)), lambda n: 1.0, lambda n, q, c: 0.0, prefill_s=0.5, draft_gpus=2
    ).run()
    assert worker.now_s == 8 * 0.5 + 2 * 3, "two GPUs prefill one each"


def test_alike_drafters_accept_alike_under_both_rules_of_verification():
    vanilla = {"name": "verl_draft_model", "draft_tokens": 3}
    exact = {
        "name": "specactor",
        "model": "qwen2.5-0.5b",
        "decoupled": False,
        "window": 3,
        "best_of_n": False,
    }
    found = [
        {
            row["uid"]: row["accepted_tokens"]
            for row in rows(watch(prepared(scenario(system))).result.samples)
        }
        for system in (vanilla, exact)
    ]
    assert found[0] == found[1] and sum(found[0].values()) > 0


def test_ngrams_accept_almost_nothing_of_the_longest_responses():
    keys = np.arange(64)
    accepted = []
    for length in (2000, 6000, 20_000):
        lengths = np.full(64, length)
        accepted.append(
            run_passes(
                draw_runs(ASSUMED_RUNS["ngram"], lengths, keys), lengths, Fixed(tokens=4).rule
            )
        )
    rates = [passes.accepted.sum() / passes.drafted.sum() for passes in accepted]
    assert rates[0] > 2 * rates[1] > 4 * rates[2] and rates[2] < 0.05


@given(st.integers(1, 4), st.integers(1, 16), probabilities)
def test_what_is_fixed_is_not_chosen_and_the_rest_is_the_best_for_it(
    draft_gpus, window, acceptance
):
    fits = {4: VERIFIERS[4]}
    by_gpus = plan_decoupled(DRAFT, fits, 256, 8192, acceptance, draft_gpus=draft_gpus)
    by_window = plan_decoupled(DRAFT, fits, 256, 8192, acceptance, window=window)
    both = plan_decoupled(DRAFT, fits, 256, 8192, acceptance, draft_gpus=draft_gpus, window=window)
    assert (
        (both.draft_gpus, both.window)
        == (by_gpus.draft_gpus, by_window.window)
        == (draft_gpus, window)
    )
    assert both.tgs <= by_window.tgs
    assert plan_decoupled(DRAFT, fits, 256, 8192, acceptance).tgs >= by_gpus.tgs


@pytest.mark.parametrize(
    ("parameters", "changes", "line"),
    [
        (
            {"draft_gpus": 1024},
            {},
            "a rollout worker takes 1025 GPUs, those of its drafter included, and there are 4; use",
        ),
        (
            {"model": "qwen2.5-32b"},
            {"model": "qwen3-14b"},
            "a GPU of the drafter qwen2.5-32b needs 61.0 GiB for the weights of drafters, 27.5 for the weights of qwen3-14b, "
            "which it keeps, and 0.1 for the KV cache of 4 requests on 1; an H100 has 80 GiB",
        ),
        (
            {"model": "qwen2.5-7b"},
            {
                "engine": {"reserve_bytes": 55e9, "kv_cache_tokens": 400_000},
                "workload": {"synthetic": {**LONG, "prompts_per_step": 64, "group": 8}},
            },
            "for the KV cache of 256 requests on 1; .* a larger tp or more draft_gpus",
        ),
    ],
)
def test_a_drafter_that_has_no_room_is_refused_in_one_line(parameters, changes, line):
    with pytest.raises(InputError, match=line) as refused:
        prepare(scenario({"name": "specactor", "best_of_n": False, **parameters}, **changes))
    assert "\n" not in str(refused.value)
