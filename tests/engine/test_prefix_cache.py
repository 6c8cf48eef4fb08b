"""The prefix cache of an engine, whatever is asked of it: no block is lost, none is counted twice, nothing stale is found."""

import random

import numpy as np
import pytest

from simrl.engine.engine import one_engine
from simrl.engine.state import END, PAUSE, Limits
from tests.engine.test_engine import TABLES
from tests.schedule_scenarios import (
    EnginePlayer,
    ReferencePlayer,
    different_passes,
    full_cache_scenarios,
    play,
)

AMPLE = Limits(8, 512, 4, 100, prefix_caching=True)


def audit(engine):
    """Count the blocks of an engine by who has them."""
    r, t = engine.fleet.arrays.engines.requests[0], engine.fleet.arrays.engines.totals[0]
    having = [slot for slot in range(len(r)) if r["blocks"][slot] > 0]
    own = sum(int(r["blocks"][s] - r["shared"][s] - (r["last_node"][s] >= 0)) for s in having)
    nodes = np.flatnonzero(r["node_kind"])
    shared = int(r["node_blocks"][nodes][r["node_refs"][nodes] > 0].sum())
    assert t["free_blocks"] >= 0
    assert t["free_blocks"] + own + shared == engine.limits.kv_blocks
    assert nodes.size + t["n_spare"] == len(r)
    listed, total, node = set(), int(t["list_dead"]), int(t["list_first"])
    while node >= 0:
        assert node not in listed
        assert r["node_refs"][node] == 0
        listed.add(node)
        total += int(r["node_blocks"][node] + r["node_dead"][node])
        node = int(r["node_after"][node])
    assert total == t["listed_blocks"]
    assert all(r["node_refs"][n] > 0 or r["node_blocks"][n] == 0 or n in listed for n in nodes)
    held = r["holding"][: t["n_holding"]]
    alone = sum(int(r["blocks"][s] - r["shared"][s] - (r["last_node"][s] >= 0)) for s in held)
    alone += int(
        r["node_blocks"][nodes][
            (r["node_held"][nodes] == r["node_refs"][nodes]) & (r["node_refs"][nodes] > 0)
        ].sum()
    )
    assert t["held_blocks"] == alone


def asked_at_random(seed, prefix_caching, hold_paused, sglang=False):
    """Ask an engine of few blocks for this and that, and audit it after each; at the end all blocks are free."""
    rng = random.Random(seed)
    size, blocks = rng.choice([1, 2, 4, 16]), rng.randint(8, 60)
    widths = rng.choice([1, 3, 8, 64]), rng.choice([4, 16, 64, 512])
    limits = Limits(*widths, size, blocks, rng.random() < 0.5, prefix_caching, hold_paused)
    if sglang:
        clip, ratio = rng.choice([2, 4096]), rng.choice([0.1, 0.7, 1.0])
        limits = limits._replace(
            sglang=True, max_new_tokens=20, clip_max_new_tokens=clip, start_ratio=ratio
        )
    engine = one_engine(TABLES, limits)
    room, live, paused, number = size * blocks, {}, set(), 0

    def note(stops):
        for slot, _, kind in stops:
            if kind == END:
                del live[slot]
            elif kind == PAUSE:
                paused.add(slot)

    for _ in range(rng.randint(20, 100)):
        what = rng.random()
        if what < 0.45:
            prompt = min(
                rng.choice([rng.randint(1, room // 2), size * rng.randint(1, 7)]), room // 2
            )
            response = rng.randint(1, min(20, room - prompt))
            had = rng.randint(1, response - 1) if rng.random() < 0.3 and response > 1 else 0
            cached = (
                rng.randint(1, prompt + had - 1) if rng.random() < 0.1 and prompt + had > 1 else 0
            )
            keys = rng.choice([-1, prompt]), rng.choice([-1, number, max(number - 3, 0)])
            slot = engine.submit(prompt, response, had, cached, *keys, continues=rng.random() < 0.4)
            live[slot] = prompt, response
            number += 1
            if response - had > 2 and rng.random() < 0.5:
                engine.stop_at(slot, rng.randint(had + 1, response - 1), PAUSE)
        elif what < 0.55 and live:
            slot = rng.choice(sorted(live))
            paused.discard(slot)
            del live[slot]
            engine.abort(slot)
        elif what < 0.7 and paused:
            slot = rng.choice(sorted(paused))
            paused.remove(slot)
            engine.resume(slot)
        elif what < 0.74:
            engine.recompute_running()
        elif what < 0.85:
            note(engine.next_stops())
        else:
            note(engine.settle(engine.now_s + rng.choice([0.001, 0.01, 0.1, 1.0])))
        audit(engine)
    while engine.busy or paused:
        for slot in sorted(paused):
            engine.resume(slot)
        paused.clear()
        note(engine.settle(engine.now_s + 1.0))
        audit(engine)
    engine.recompute_running()
    audit(engine)
    assert not live
    assert engine.free_blocks == blocks


@pytest.mark.parametrize("sglang", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("hold_paused", [False, True])
def test_no_block_is_lost_or_counted_twice_whatever_is_asked(hold_paused, prefix_caching, sglang):
    """I17: blocks are conserved, with a prefix cache and without."""
    for seed in range(60):
        asked_at_random(seed, prefix_caching, hold_paused, sglang)


def test_a_prompt_is_computed_once_for_its_group():
    engine = one_engine(TABLES, AMPLE)
    for _ in range(4):
        engine.submit(42, 3, prompt_key=7)
    engine.run_until_idle()
    assert engine.totals["hit_tokens"] == 3 * 40
    assert engine.totals["prefill_tokens"] == 42 + 3 * 2


def test_the_last_block_of_a_prompt_is_computed_for_each_request_if_it_is_full():
    engine = one_engine(TABLES, AMPLE)
    for _ in range(4):
        engine.submit(40, 3, prompt_key=7)
    engine.run_until_idle()
    assert engine.totals["hit_tokens"] == 3 * 36


def test_a_turn_finds_the_context_of_the_one_before():
    engine = one_engine(TABLES, AMPLE)
    slot = engine.submit(42, 20, prompt_key=7)
    engine.stop_at(slot, 10, PAUSE)
    engine.settle(1000.0)
    engine.resume(slot, 8)
    engine.run_until_idle()
    assert engine.totals["hit_tokens"] == 48  # of 51 tokens with KV


def test_new_weights_leave_nothing_to_be_found():
    engine = one_engine(TABLES, AMPLE)
    engine.submit(42, 3, prompt_key=7)
    engine.run_until_idle()
    engine.recompute_running()
    engine.submit(42, 3, prompt_key=7)
    engine.run_until_idle()
    assert engine.totals["hit_tokens"] == 0


def test_what_has_been_used_up_since_new_weights_is_not_found():
    """A prompt's node outlives a weight update with its waiting request, and the dead blocks behind it must not."""
    engine = one_engine(TABLES, AMPLE)
    slot = engine.submit(200, 20, prompt_key=1)
    engine.stop_at(slot, 2, PAUSE)
    engine.settle(1000.0)
    engine.submit(160, 3)
    engine.run_until_idle()
    engine.recompute_running()
    audit(engine)
    engine.resume(slot)
    engine.run_until_idle()
    audit(engine)
    for _ in range(2):
        engine.submit(390, 2)
        engine.run_until_idle()
        hits = engine.totals["hit_tokens"]
        engine.submit(200, 2, prompt_key=1)
        engine.run_until_idle()
        assert engine.totals["hit_tokens"] - hits <= 8
        audit(engine)


def test_many_prompts_that_nobody_asks_for_any_more_do_not_make_an_engine_large():
    engine = one_engine(TABLES, Limits(8, 512, 4, 50_000, prefix_caching=True))
    for key in range(4000):
        engine.submit(9, 2, prompt_key=key)
        engine.run_until_idle()
    assert engine.fleet.arrays.engines.requests.size <= 2048


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_who_is_preempted_when_the_cache_is_exactly_full_finds_all_but_its_last_token(
    async_scheduling,
):
    """vLLM's own scheduler does so, too (`test_scheduler_vllm`)."""
    for scenario in full_cache_scenarios(async_scheduling):
        theirs = play(ReferencePlayer(scenario), scenario)
        assert different_passes(play(EnginePlayer(scenario), scenario), theirs) == 0
        if not scenario.samples[1].aborts:
            assert sum(done.preempted for done in theirs) == 1
            known = (
                2 + 104 - async_scheduling
            )  # what is sampled in the pass in flight has no name yet
            assert sum(done.hit_tokens for done in theirs) == known - 1
