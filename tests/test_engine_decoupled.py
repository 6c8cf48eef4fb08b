"""Decoupled drafting inside the engine against the same rule written slowly."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_decoupled import DecoupledWorker, Request
from test_engine import TABLES

from simrl.engine import Engine
from simrl.engine.state import Limits
from simrl.profile import pass_s
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import DRAFT_TOKENS, MODEL, Decoding, plain, rules
from simrl.speculation.specactor import reconfigured, token_acceptance
from simrl.speculation.windows import Fixed

ROOMY = Limits(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, kv_blocks=4000)
LOG_ACCEPTANCES = ModelAcceptance(by_position=(0.85, 0.7)).log_acceptances(16)


def decoupled(window: int, step_s: float, every: int = 0, **tables: Any) -> Decoding:
    return plain()._replace(
        rule=rules(window=Fixed(tokens=window).rule, decoupled=1, reconfigure_every=every),
        log_acceptances=LOG_ACCEPTANCES[None, :],
        draft_sequences=np.array([0.0, 64.0]),
        step_s=np.array([[step_s, step_s * 3]]),
        **tables,
    )


def draft_s(step_s: float):
    return lambda n: step_s + (3 * step_s - step_s) * (n - 0.0) / 64.0


def verify_s(n: int, query: int, context: int) -> float:
    return float(pass_s(TABLES, float(query), float(query), 0.0, 0.0, float(n), float(context - n + query)))


requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(2, 80), st.sampled_from([0.3, 1.0, 4.0])), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 6), st.sampled_from([5e-4, 2e-3, 8e-3]), st.booleans(), st.integers(0, 5))
def test_every_end_agrees_with_the_reference(requests, window, step_s, reconfigures, seed):
    rng = np.random.default_rng(seed)
    table = {"best_window": rng.integers(1, 7, 101), "best_coupled": rng.integers(0, 2, 101)}
    every = 20 if reconfigures else 0
    engine = Engine(TABLES, ROOMY, decoupled(window, step_s, every, **table))
    slots = []
    for i, (prompt, response, hardness) in enumerate(requests):
        slots.append(engine.submit(prompt, response, 0, prompt - 1))  # its first pass gives one token
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

    def over_before(request):  # at the end of an earlier verification: those that end now still count
        return request.over and request.ended_s < worker.now_s

    worker = DecoupledWorker(
        theirs, LOG_ACCEPTANCES, draft_s(step_s), verify_s, reconfigure if reconfigures else None, every or 1000
    )
    start_s = engine.now_s
    worker.run()
    ended = {}
    while engine.next_stop_s() < np.inf:
        ended.update({slot: time_s for slot, time_s, _ in engine.take_next_stop()})
    for slot, request in zip(slots, theirs, strict=True):
        assert ended[slot] - start_s == pytest.approx(request.ended_s, rel=1e-9, abs=1e-12)
        assert engine.drafted(slot)[1:] == (request.accepted, request.verifications)
        assert engine.verified_tokens(slot) == request.accepted + request.misses + request.bonuses
    assert engine.free_blocks == ROOMY.kv_blocks
    assert int(engine._gauges[DRAFT_TOKENS]) >= worker.drafted  # the engine counts abandoned passes too
