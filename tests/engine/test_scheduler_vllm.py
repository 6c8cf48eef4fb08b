"""Schedules against vLLM's own scheduler, driven without a model: equal passes, token by token, equal hits and preemptions."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.helpers import thorough
from tests.schedule_scenarios import (
    SMALL,
    EnginePlayer,
    ReferencePlayer,
    Scenario,
    different_passes,
    full_cache_scenarios,
    hybrid_scenario,
    play,
    random_scenario,
    spaced_scenario,
    updated_scenario,
)
from tests.vllm_schedule import VllmPlayer, vllm_scheduler

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

SCENARIOS = 1000 if thorough() else 100  # of each mode
PLAYERS = {"reference": ReferencePlayer, "engine": EnginePlayer}
MODES = [  # async scheduling, most draft tokens
    pytest.param(False, 0, id="sync"),
    pytest.param(False, 3, id="sync, drafts"),
    pytest.param(True, 0, id="async"),
    pytest.param(True, 3, id="async, drafts"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from simrl_replay.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, 2, 32, heads=2, kv_heads=1, vocab=300)
    return folder


def compare(model: Path, scenarios: Iterable[Scenario]) -> Counter[str]:
    """Demand that reference and engine run the passes of vLLM; return what vLLM preempted, and found of the known tokens."""
    totals: Counter[str] = Counter()
    differing = []
    for number, scenario in enumerate(scenarios):
        theirs = play(VllmPlayer(scenario, vllm_scheduler(model, scenario)), scenario)
        for name, player in PLAYERS.items():
            if differ := different_passes(play(player(scenario), scenario), theirs):
                differing.append(f"{name}: {differ} of {len(theirs)} passes of scenario {number}")
        for done in theirs:
            totals.update(
                preempted=done.preempted, found=done.hit_tokens or 0, known=done.known_tokens or 0
            )
    assert not differing, "\n".join(differing[:10])
    return totals


@pytest.mark.parametrize(("async_scheduling", "drafts"), MODES)
def test_with_prefix_caching_passes_are_those_that_vllm_schedules(
    model, async_scheduling: bool, drafts: int
):
    """I24: groups, turns, shortage, aborts and resets, with room for everything, for some, and for hardly one request."""
    totals = compare(
        model, (random_scenario(seed, True, async_scheduling, drafts) for seed in range(SCENARIOS))
    )
    assert totals["preempted"] > SCENARIOS, "the scenarios are scarce in blocks"
    assert 0.4 < totals["found"] / totals["known"] < 0.8, "much is found and much is not"


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_what_leaves_a_full_cache_finds_as_much_again_as_in_vllm(model, async_scheduling: bool):
    compare(model, full_cache_scenarios(async_scheduling))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_after_an_update_passes_are_those_of_requests_that_vllm_aborts_or_salts(
    model, async_scheduling: bool
):
    """I24: prompts salted by a version; requests aborted at a reset, and added again later, with their tokens or without."""
    totals = compare(model, (updated_scenario(seed, async_scheduling) for seed in range(SCENARIOS)))
    assert totals["found"] > 0


@pytest.mark.parametrize(("async_scheduling", "drafts"), MODES)
def test_without_prefix_caching_passes_are_those_that_vllm_schedules(
    model, async_scheduling: bool, drafts: int
):
    """I24: passes without a prefix cache are vLLM's."""
    compare(
        model, (random_scenario(seed, False, async_scheduling, drafts) for seed in range(SCENARIOS))
    )


# Not with drafts of synchronous scheduling: a request then keeps blocks behind rejected drafts, the engine gives them back.
@pytest.mark.parametrize(("async_scheduling", "drafts"), [MODES[0], *MODES[2:]])
def test_windows_and_states_share_the_blocks_as_in_vllm(model, async_scheduling: bool, drafts: int):
    """I24: groups of layers that keep every token, a window or a state, with room for all sequences or hardly one."""
    totals = compare(
        model, (hybrid_scenario(seed, async_scheduling, drafts) for seed in range(SCENARIOS))
    )
    assert totals["preempted"] > SCENARIOS // 2, "the scenarios are scarce in blocks"


@pytest.mark.parametrize("scenario", SMALL)
def test_what_once_differed_is_as_in_vllm(model, scenario: Callable[[], Scenario]):
    compare(model, [scenario()])


@pytest.mark.parametrize(("async_scheduling", "drafts"), MODES)
def test_spaced_contexts_and_a_watermark_are_as_in_vllm(model, async_scheduling: bool, drafts: int):
    """I24: contexts some passes apart (0.32 is told when, 0.33 counts them), and blocks that stay free at admission."""
    totals = compare(
        model, (spaced_scenario(seed, async_scheduling, drafts) for seed in range(SCENARIOS))
    )
    assert totals["preempted"] > SCENARIOS // 2, "the scenarios are scarce in blocks"
