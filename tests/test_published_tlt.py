"""Published results of TLT: what its rows simulate, and what drafting costs the host."""

import pytest

from simrl.published import tlt
from simrl.published.ledger import read_ledger
from simrl.speculation.bandit import Strategy

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
    plain, own = (
        tlt.scenario(INPUTS, tlt.TARGET, system, INPUTS["prompts"]).profile.between_passes_s
        for system in (tlt.baseline(INPUTS), tlt.tlt(INPUTS))
    )
    assert plain == pytest.approx(INPUTS["not_overlapped_share"] * own)
    ahead = tlt.speedup(INPUTS, 1, Strategy(8, 8, 48), 6.0)
    alike = tlt.speedup({**INPUTS, "not_overlapped_share": 1.0}, 1, Strategy(8, 8, 48), 6.0)
    assert ahead < alike


def test_a_deeper_tree_takes_the_host_longer():
    assert tlt.host_s(INPUTS, 12) - tlt.host_s(INPUTS, 8) == pytest.approx(4 * INPUTS["draft_level_s"])
