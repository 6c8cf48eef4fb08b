"""An engine that schedules as SGLang: beside a slow reference, and in schedules that are counted by hand.

A pass takes one second.
"""

import numpy as np
import pytest

from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from tests.helpers import one_second_a_pass, thorough
from tests.references.sglang import SglangPlayer
from tests.schedule_scenarios import EnginePlayer, different_passes, play, sglang_scenario

AMPLE = Limits(8, 8, 1, 1000, prefix_caching=True, sglang=True, max_new_tokens=10)


def passes_of(limits, requests):
    """Run requests (prompt, response, prompt's key) to their end. Return of each pass the tokens of each response then, the
    tokens of contexts that it computed, and the blocks that are free then."""
    engine = one_engine(one_second_a_pass(), limits)
    slots = [engine.submit(prompt, response, prompt_key=key) for prompt, response, key in requests]
    passes, computed = [], 0
    while engine.busy:
        engine.settle(engine.now_s)
        generated = [engine.generated_tokens(slot) for slot in slots]
        passes.append((generated, engine.totals["prefill_tokens"] - computed, engine.free_blocks))
        computed = engine.totals["prefill_tokens"]
    return passes


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_engine_and_reference_run_the_same_passes(prefix_caching):
    retracted = 0
    for seed in range(400 if thorough() else 25):
        scenario = sglang_scenario(seed, prefix_caching)
        passes, expected = (
            play(player(scenario), scenario) for player in (EnginePlayer, SglangPlayer)
        )
        assert different_passes(passes, expected) == 0, seed
        retracted += sum(done.preempted for done in expected)
    assert retracted > 20


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_many_passes_at_once_are_as_many_single_passes(async_scheduling):
    rng = np.random.default_rng(0)
    limits = AMPLE._replace(
        kv_blocks=120, max_new_tokens=60, async_scheduling=async_scheduling, prefix_caching=False
    )
    requests = [(int(rng.integers(1, 20)), int(rng.integers(1, 60))) for _ in range(40)]
    at_once, one_by_one = (one_engine(one_second_a_pass(), limits) for _ in range(2))
    for engine in (at_once, one_by_one):
        for prompt, response in requests:
            engine.submit(prompt, response)
    at_once.run_until_idle()
    while one_by_one.busy:
        one_by_one.settle(one_by_one.now_s)
    assert at_once.totals == one_by_one.totals
    assert at_once.now_s == one_by_one.now_s
    assert at_once.totals["preemptions"] > 0
    assert at_once.totals["generated_tokens"] == sum(response for _, response in requests)


def test_prompts_are_computed_alone_and_before_anyone_decodes():
    passes = passes_of(AMPLE, [(6, 3, -1), (5, 3, -1)])
    assert [generated for generated, _, _ in passes] == [[1, 0], [1, 1], [2, 2], [3, 3]]
    assert [computed for _, computed, _ in passes] == [8, 3, 0, 0]


def test_a_prompt_is_computed_as_often_as_it_appears_in_a_pass_and_then_kept_once():
    passes = passes_of(AMPLE, [(4, 2, 7), (4, 2, 7), (4, 2, 7)])
    # Two prompts of four tokens fill the pass; the third finds all but the last token.
    assert [computed for _, computed, _ in passes][:2] == [8, 0]
    assert [generated for generated, _, _ in passes] == [[1, 1, 0], [1, 1, 1], [2, 2, 2]]
    assert passes[1][2] == 1000 - 4


def test_what_may_be_generated_has_to_fit_until_a_request_leaves():
    limits = AMPLE._replace(kv_blocks=31, prefix_caching=False, start_ratio=1.0)
    passes = passes_of(limits, [(4, 9, -1), (4, 3, -1), (4, 2, -1)])
    # 4 + 10 + 1 of each: the second one has 4 + 10 + 1 < 31 - 15, the third one has to wait until the second one has ended.
    assert [generated for generated, _, _ in passes][:5] == [
        [1, 1, 0],
        [2, 2, 0],
        [3, 3, 0],
        [3, 3, 1],
        [4, 3, 2],
    ]


def test_a_clip_lets_more_requests_start():
    limits = AMPLE._replace(kv_blocks=31, prefix_caching=False, clip_max_new_tokens=1)
    assert passes_of(limits, [(2, 9, -1)] * 3)[0][0] == [1, 1, 1]


def test_the_request_with_the_fewest_tokens_is_retracted_and_waits_last():
    limits = AMPLE._replace(
        max_num_batched_tokens=16, kv_blocks=17, prefix_caching=False, clip_max_new_tokens=1
    )
    passes = passes_of(limits, [(2, 9, -1), (5, 5, -1), (3, 5, -1)])
    # 17 tokens hold prompts of 10 and two passes in which three decode; then the longest prompt goes.
    assert [generated for generated, _, _ in passes][:6] == [
        [1, 1, 1],
        [2, 2, 2],
        [3, 3, 3],
        [4, 3, 4],
        [5, 3, 5],
        [5, 4, 5],
    ]


def test_with_lpm_the_request_that_finds_its_prompt_starts_first():
    for first, expected in ((False, [1, 1, 0]), (True, [1, 0, 1])):
        limits = AMPLE._replace(longest_prefix_first=first)
        passes = passes_of(limits, [(8, 9, 7), (8, 9, 8), (8, 9, 7)])
        assert passes[1][0] == expected
