"""Decoupled drafting inside the engine against the same rule written slowly."""

import math
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.engine.engine import Engine, one_engine
from simrl.engine.state import END, PAUSE, WATCH, Limits
from simrl.pipelines.best_of_n import _acceptances
from simrl.profile.profile import Tables, pass_s
from simrl.runtime.rollout import Rollout
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import MODEL, Decoding, Rule
from simrl.speculation.specactor import reconfigured, renewal_rate, token_acceptance
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Sample
from tests.engine.test_engine import TABLES
from tests.helpers import examples
from tests.references.decoupled import DecoupledWorker, Request

ROOMY = Limits(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, kv_blocks=4000)
LOG_ACCEPTANCES = ModelAcceptance(by_position=(0.85, 0.7)).log_acceptances(16)


def decoupled(
    window: int, step_s: float, every: int = 0, round_s: float = 0.0, **tables: Any
) -> Decoding:
    return Decoding(
        rule=Rule(window=Fixed(tokens=window).rule, decoupled=True, reconfigure_every=every),
        log_acceptances=LOG_ACCEPTANCES[None, :],
        draft_sequences=np.array([0.0, 64.0]),
        step_s=np.array([[step_s, step_s * 3]]),
        round_s=np.array([[round_s, round_s]]),
        **tables,
    )


def draft_s(step_s: float):
    return lambda n: step_s + (3 * step_s - step_s) * (n - 0.0) / 64.0


def verify_s(n: int, query: int, context: int) -> float:
    return float(
        pass_s(TABLES, float(query), float(query), 0.0, 0.0, float(n), float(context - n + query))
    )


requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(2, 80), st.sampled_from([0.3, 1.0, 4.0])),
    min_size=1,
    max_size=8,
)


@examples(200)
@given(
    requests,
    st.integers(1, 6),
    st.sampled_from([5e-4, 2e-3, 8e-3]),
    st.sampled_from([0.0, 1e-3, 7e-3]),
    st.sampled_from([0.0, 1e-5, 3e-4]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 5),
    st.booleans(),
)
def test_every_end_agrees_with_the_reference(
    requests, window, step_s, round_s, prefill_s, draft_gpus, reconfigures, seed, ahead
):
    """I26: decoupled drafting does as its slow reference."""
    rng = np.random.default_rng(seed)
    table = {"best_window": rng.integers(1, 7, 101), "best_coupled": rng.integers(0, 2, 101)}
    every = 20 if reconfigures else 0
    limits = ROOMY._replace(async_scheduling=ahead)  # which a decoupled verifier cannot do
    table |= {"prefill_s": prefill_s, "draft_gpus": draft_gpus}
    engine = one_engine(TABLES, limits, decoupled(window, step_s, every, round_s, **table))
    slots = []
    for i, (prompt, response, hardness) in enumerate(requests):
        slots.append(
            engine.submit(prompt, response, 0, prompt - 1)
        )  # its first pass gives one token
        engine.draft_from(slots[-1], MODEL, i, hardness)
    stops = engine.settle(0.0)
    assert not stops
    theirs = [
        Request(i, response, window, hardness=hardness, prompt=prompt, generated=1)
        for i, (prompt, response, hardness) in enumerate(requests)
    ]

    def reconfigure(request):
        known = [token_acceptance(r.accepted, r.misses) for r in theirs if not over_before(r)]
        known = [p for p in known if not math.isnan(p)]
        mean = sum(known) / len(known) if known else 0.0
        own = token_acceptance(request.accepted, request.misses)
        w, c = reconfigured(own, mean, window, table["best_window"], table["best_coupled"])
        return w, bool(c)

    def over_before(
        request,
    ):  # at the end of an earlier verification: those that end now still count
        return request.over and request.ended_s < worker.now_s

    worker = DecoupledWorker(
        theirs,
        LOG_ACCEPTANCES,
        draft_s(step_s),
        verify_s,
        reconfigure if reconfigures else None,
        every or 1000,
    )
    worker.round_s = lambda n: round_s
    worker.prefill_s, worker.draft_gpus = prefill_s, draft_gpus
    start_s = engine.now_s
    worker.run()
    ended = {}
    while stopped := engine.next_stops():
        ended.update({slot: time_s for slot, time_s, _ in stopped})
    for slot, request in zip(slots, theirs, strict=True):
        assert ended[slot] - start_s == pytest.approx(request.ended_s, rel=1e-9, abs=1e-12)
        drafted = request.accepted + request.misses + request.wasted
        assert engine.drafted(slot)[:3] == [drafted, request.accepted, request.verifications]
        assert drafted - engine.drafted(slot)[4] == request.verified
        assert engine.drafted(slot)[3] == request.accepted + request.misses + request.bonuses
    assert engine.free_blocks == ROOMY.kv_blocks
    assert engine.fleet.t["draft_tokens"].item() == worker.drafted


@examples(100)
@given(
    requests,
    st.integers(1, 6),
    st.sampled_from([0.0, 5e-4, 8e-3]),
    st.sampled_from([0.0, 1e-3, 7e-3]),
    st.booleans(),
    st.floats(0.0, 0.3),
    st.booleans(),
)
def test_a_stretch_is_equal_to_single_passes(
    requests, window, step_s, round_s, reconfigures, seconds, uneven
):
    tables = TABLES._replace(
        straggler_sequences=np.array([2.0, 6.0]),
        straggler_s=np.full((2, 2), 1e-6),
        straggler_beside_prefill_s=np.full(2, 1e-6),
    )
    table = {"best_window": np.arange(101) % 6 + 1, "best_coupled": np.arange(101) // 6 % 2}
    decoding = decoupled(window, step_s, 7 if reconfigures else 0, round_s, **table)
    decoding = decoding._replace(
        log_acceptances=ModelAcceptance(by_position=(0.85, 0.7)).log_acceptances(64)[None, :]
    )
    seen = []
    for tokens in (
        8 * 65,
        64,
    ):  # what all might draft has room, or never: then there are no stretches
        engine = one_engine(
            tables if uneven else TABLES, ROOMY._replace(max_num_batched_tokens=tokens), decoding
        )
        engine.slowdown = 1.5
        slots = [engine.submit(prompt, response, 0, prompt - 1) for prompt, response, _ in requests]
        for slot, (prompt, response, hardness) in zip(slots, requests, strict=True):
            engine.draft_from(slot, MODEL, slot, hardness)
            if prompt % 2:
                engine.stop_at(slot, 1 + response // 2, PAUSE if prompt % 3 else WATCH)
        stops = engine.settle(seconds)
        while stopped := engine.next_stops():
            stops += stopped
        drafted = [engine.drafted(slot) for slot in slots]
        seen.append((stops, drafted, engine.totals, engine.spent.tolist(), engine.free_blocks))
    assert seen[0] == seen[1]


def alone(
    p: float, window: int, draft_s: float, verify_s: float, tokens: int
) -> tuple[Engine, int, float]:
    """A request that is alone at an engine, all passes of one length; and the seconds it took from its first token on."""
    any_tokens, wide, nothing = np.array([0.0, 1e6]), np.array([0.0, 1e6]), np.zeros(2)
    attention_s = np.zeros((2, 2, 2, 2))
    tables = Tables(
        any_tokens,
        nothing + verify_s,
        any_tokens,
        nothing,
        wide,
        wide,
        wide,
        wide,
        attention_s,
        0.0,
    )
    limits = Limits(
        max_num_seqs=1, max_num_batched_tokens=512, block_size=16, kv_blocks=(tokens + 64) // 16
    )
    decoding = decoupled(window, 0.0)._replace(
        log_acceptances=ModelAcceptance(by_position=(p,)).log_acceptances(window)[None, :],
        draft_sequences=np.array([1.0]),
        step_s=np.array([[draft_s]]),
        round_s=np.array([[0.0]]),
    )
    engine = one_engine(tables, limits, decoding)
    slot = engine.submit(8, tokens + 1, 0, 7)
    engine.draft_from(slot, MODEL, 7_000)
    engine.settle(0.0)
    started_s = engine.now_s
    engine.run_until_idle()
    return engine, slot, engine.now_s - started_s


@pytest.mark.parametrize("p", [0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("window", [3, 5, 8])
@pytest.mark.parametrize("balance", [0.4, 1.0, 2.3])
def test_alone_in_the_engine_a_request_has_the_renewal_rate(p, window, balance):
    tokens, verify_s = 15_000, balance * window
    _, _, seconds = alone(p, window, 1.0, verify_s, tokens)
    assert tokens / seconds == pytest.approx(renewal_rate(p, window, 1.0, verify_s), rel=0.02)


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_what_is_thrown_away_counts_as_drafted_and_says_nothing_of_the_acceptance(p):
    engine, slot, _ = alone(p, 5, 1.0, 5.0, 15_000)
    drafted, accepted, verifications, _, unverified = engine.drafted(slot)
    assert drafted == engine.fleet.t["draft_tokens"].item()
    assert drafted - unverified == 5 * verifications
    misses = 15_000 - accepted
    # By the time a window is verified, the next has been drafted (the drafter's pass may lag by one); a miss throws it away.
    assert 4 * misses <= unverified <= 6 * (misses + 1)
    rollout = Rollout(
        Sample(0, 0, 0, 0, 0, 8),
        (),
        True,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        verifications=verifications,
        unverified_tokens=unverified,
    )
    assert _acceptances([rollout]) == {0: pytest.approx(p, abs=0.02)}


def test_a_drafter_prefills_a_request_when_it_comes_and_then_what_its_environment_adds():
    """Alone, a request waits for its drafter's prefill: of prompt and response, later of 30 tokens of an observation. A
    verifier that loses its cache meanwhile (new weights) leaves the drafter's as it is."""

    def took_s(prefill_s: float) -> float:
        engine = one_engine(TABLES, ROOMY, decoupled(4, 2e-3, prefill_s=prefill_s))
        slot = engine.submit(50, 100, 20, 69)
        engine.draft_from(slot, MODEL, 7)
        engine.stop_at(slot, 60, PAUSE)
        (at,) = engine.next_stops()
        engine.resume(slot, 30)
        for _ in range(3):
            engine.settle(engine.now_s)
        engine.recompute_running()
        (end,) = engine.next_stops()
        assert (at[2], end[2]) == (PAUSE, END)
        return end[1]

    assert took_s(1e-3) - took_s(0.0) == pytest.approx(1e-3 * (50 + 20 + 30), rel=1e-6)


def test_a_request_that_leaves_has_what_was_drafted_ahead_of_it_counted():
    engine, counted = one_engine(TABLES, ROOMY, decoupled(4, 2e-3)), 0
    slots = [engine.submit(20, 400, 0, 19) for _ in range(6)]
    for key, slot in enumerate(slots):
        engine.draft_from(slot, MODEL, key)
    for i, slot in enumerate(slots):
        engine.settle(0.1 * (i + 1))
        engine.abort(slot)
        assert engine.drafted(slot)[4] > 0
        counted += engine.drafted(slot)[0]
    assert counted == engine.fleet.t["draft_tokens"].item()


def ends(ahead: bool, every_s: float) -> list[float]:
    """When nine requests end that come one after another, at an engine with places for three; the first finds it idle, the last
    ones too if they come seldom enough."""
    limits = Limits(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=16,
        kv_blocks=24,
        async_scheduling=ahead,
    )
    engine = one_engine(TABLES, limits, decoupled(4, 8e-3))
    ended: list[float] = []
    for key in range(9):
        ended += [time_s for _, time_s, _ in engine.settle(every_s * key)]
        engine.draft_from(engine.submit(20 + key, 30 + 5 * key), MODEL, key)
    while stopped := engine.next_stops():
        ended += [time_s for _, time_s, _ in stopped]
    assert not engine.busy and engine.free_blocks == limits.kv_blocks
    return ended


@pytest.mark.parametrize(
    "every_s", [0.0, 0.2, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.03, 5.0))]
)
def test_a_decoupled_verifier_is_never_scheduled_ahead_and_never_waits_for_nothing(every_s):
    # In a process of its own: a loop without an end would be in compiled code, which nothing else interrupts.
    with get_context("spawn").Pool(1) as pool:
        ahead = pool.apply_async(ends, (True, every_s)).get(timeout=120)
    assert len(ahead) == 9
    assert ahead == ends(False, every_s)
