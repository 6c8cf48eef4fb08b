"""Published results of TLT: what its rows simulate, and what drafting costs the host."""

import pytest

from experiments.reproduce import tlt
from experiments.reproduce.ledger import read_ledger
from simrl.simulate.prepare import prepare
from simrl.speculation.choices import Strategy

LEDGER = read_ledger("tlt")
INPUTS = LEDGER.middle


@pytest.mark.parametrize("model", INPUTS["models"])
def test_three_steps_after_a_first_one_are_measured(model: str):
    scenario = tlt.scenario(INPUTS, model, tlt.tlt(INPUTS), INPUTS["prompts"])
    assert scenario.steps - scenario.warmup_steps == INPUTS["steps"] == 3


def test_a_group_that_shares_a_sequence_computes_the_tokens_of_all_its_gpus_at_once():
    training = tlt.scenario(INPUTS, tlt.TARGET, tlt.baseline(INPUTS), INPUTS["prompts"]).training
    assert training.tokens_per_microbatch == 8 * 34816


def test_the_baseline_prepares_passes_ahead_and_drafting_does_not():
    plain, drafting = (
        tlt.scenario(INPUTS, tlt.TARGET, system, INPUTS["prompts"]).profile.between_passes_s
        for system in (tlt.baseline(INPUTS), tlt.tlt(INPUTS))
    )
    assert plain is None  # the preset's
    assert drafting == INPUTS["between_passes_s"]
    ahead = tlt.speedup(INPUTS, 1, Strategy(8, 8, 48), 6.0)
    hidden = tlt.speedup({**INPUTS, "between_passes_s": 0.0}, 1, Strategy(8, 8, 48), 6.0)
    assert ahead < hidden


def test_a_round_takes_the_host_as_many_levels_as_its_own_tree_has():
    """And what it takes whatever its depth. A quarter of a millisecond a level, a millisecond a round."""
    trees = {**INPUTS, "strategies": ["12_4_48", "8_4_32", "4_4_16", "2_4_8"]}

    def round_s(host: dict[str, float]) -> list[float]:
        system = tlt.tlt({**trees, **host})
        drafts = prepare(tlt.scenario({**trees, **host}, tlt.TARGET, system, prompts=8)).drafts
        return [
            times.draft_s(1, depth)
            for times, depth in zip(drafts.tree_times, (12, 8, 4, 2), strict=True)
        ]

    free = round_s({"draft_round_s": 0.0, "draft_level_s": 0.0})
    slow = round_s({"draft_round_s": 0.001, "draft_level_s": 0.00025})
    assert [b - a for a, b in zip(free, slow, strict=True)] == pytest.approx(
        [0.004, 0.003, 0.002, 0.0015]
    )


def test_a_slower_host_makes_deep_trees_gain_less_than_shallow_ones():
    def gain(depth: int, level_s: float) -> float:
        return tlt.speedup({**INPUTS, "draft_level_s": level_s}, 1, Strategy(depth, 8, 48), 6.0)

    assert gain(16, 0.0006) / gain(16, 0.0) < gain(8, 0.0006) / gain(8, 0.0) < 1
