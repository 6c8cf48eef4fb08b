"""Small schedules, each of which turns on one rule of vLLM's scheduler; `test_scheduler_vllm` holds them against vLLM."""

from collections.abc import Callable

import pytest

from simrl.engine.state import Limits
from tests.helpers import thorough
from tests.schedule_scenarios import (
    BLOCK,
    SMALL,
    EnginePlayer,
    ReferencePlayer,
    Sample,
    Scenario,
    Turn,
    different_passes,
    one_token_prompt_padded_with_drafts,
    play,
    spaced_scenario,
    two_aborted_at_once,
    updated_scenario,
    window_behind_rejected_drafts,
)


@pytest.mark.parametrize("scenario", SMALL)
def test_engine_and_reference_run_the_same_passes(scenario: Callable[[], Scenario]):
    passes, expected = (
        play(player(scenario()), scenario()) for player in (EnginePlayer, ReferencePlayer)
    )
    assert different_passes(passes, expected) == 0


def test_of_two_aborted_at_once_the_first_is_forgotten_first():
    hits = [
        done.hit_tokens for done in play(EnginePlayer(two_aborted_at_once()), two_aborted_at_once())
    ]
    assert hits == [0, 0, 0, 0, 4, 0]


def test_the_padding_of_a_one_token_prompt_has_blocks_until_it_is_known_to_be_rejected():
    scenario = one_token_prompt_padded_with_drafts()
    assert [done.preempted for done in play(EnginePlayer(scenario), scenario)] == [
        0,
        0,
        0,
        0,
        1,
        0,
        1,
        0,
        0,
    ]


def test_rejected_drafts_do_not_hold_what_left_a_window():
    scenario = window_behind_rejected_drafts()
    assert [
        pass_ for pass_, done in enumerate(play(EnginePlayer(scenario), scenario)) if done.preempted
    ] == [2, 4, 6]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_after_an_update_engine_and_reference_run_the_same_passes(async_scheduling: bool):
    """I24: prompts salted by a version; requests set aside at a reset, and queued again later, with their tokens or without."""
    for seed in range(400 if thorough() else 40):
        scenario = updated_scenario(seed, async_scheduling)
        passes, expected = (
            play(player(scenario), scenario) for player in (EnginePlayer, ReferencePlayer)
        )
        assert different_passes(passes, expected) == 0, f"scenario {seed}"


def test_groups_of_one_prompt_find_it_under_their_own_salt_alone():
    limits = Limits(8, 64, BLOCK, 60, prefix_caching=True)
    samples = [Sample(4 * i, 0, 33, (Turn(3),), salt=salt) for i, salt in enumerate([0, 1, 0, 1])]
    hits = [
        done.hit_tokens
        for done in play(
            EnginePlayer(Scenario(limits, tuple(samples))), Scenario(limits, tuple(samples))
        )
    ]
    assert hits == [0, 0, 0, 0, 0, 0, 32, 0, 0, 32, 0, 0]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_with_spaced_contexts_and_a_watermark_engine_and_reference_run_the_same_passes(
    async_scheduling: bool, drafts: int
):
    """I24: vLLM's `prefill_schedule_interval` and `watermark`."""
    for seed in range(400 if thorough() else 40):
        scenario = spaced_scenario(seed, async_scheduling, drafts)
        passes, expected = (
            play(player(scenario), scenario) for player in (EnginePlayer, ReferencePlayer)
        )
        assert different_passes(passes, expected) == 0, f"scenario {seed}"


def scheduled(limits: Limits, *samples: Sample) -> list[dict[int, int]]:
    """Return the tokens that the engine's reference computes of each sample, pass by pass."""
    scenario = Scenario(limits, samples)
    return [done.scheduled or {} for done in play(ReferencePlayer(scenario), scenario)]


def test_a_prompt_waits_until_the_interval_since_the_last_one_is_over_while_others_decode():
    limits = Limits(8, 64, BLOCK, 60, prefill_interval=4)
    passes = scheduled(limits, Sample(0, 0, 10, (Turn(8),)), Sample(1, 1, 10, (Turn(2),)))
    assert [len(computed) for computed in passes[:5]] == [1, 1, 1, 1, 2]
    plain = scheduled(
        limits._replace(prefill_interval=1),
        Sample(0, 0, 10, (Turn(8),)),
        Sample(1, 1, 10, (Turn(2),)),
    )
    assert len(plain[1]) == 2


def test_beside_others_a_request_starts_only_if_the_watermark_stays_free():
    limits = Limits(8, 64, BLOCK, 10, watermark_blocks=4)
    one, other = Sample(0, 0, 4 * BLOCK, (Turn(2),)), Sample(0, 1, 3 * BLOCK, (Turn(2),))
    assert [set(computed) for computed in scheduled(limits, one, other)[:3]] == [{0}, {0}, {1}]
    alone = scheduled(limits, Sample(0, 0, 9 * BLOCK, (Turn(2),)))
    assert alone[0] == {0: 64}
