"""Published results of SpecActor: what its rows simulate."""

import numpy as np
import pytest

from experiments.reproduce import specactor
from experiments.reproduce.lab import Lab, Measures
from experiments.reproduce.ledger import read_ledger
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.speculation.passes import stretches
from simrl.speculation.run_model import RunModel, draw_runs

INPUTS = read_ledger("specactor").middle


class Recording(Lab):
    """Notes what it is asked to simulate, and makes up the rest."""

    def __init__(self) -> None:
        self.asked: list[Scenario] = []

    def run(self, scenario: Scenario) -> Measures:
        self.asked.append(scenario)
        return {"rollout_s": 2.0, "step_s": 3.0, "idle_share": 0.5}


def asked_of(row: str) -> list[Scenario]:
    lab = Recording()
    specactor.ROWS[row](lab, INPUTS)
    return lab.asked


@pytest.mark.parametrize("row", [row for row in specactor.ROWS if row.startswith("spec-abl-")])
def test_ablations_are_of_a_late_step_whose_responses_are_longer(row: str):
    longer = INPUTS["mean_tokens"] * INPUTS["late_over_mean"]
    assert {scenario.workload.synthetic.mean_tokens for scenario in asked_of(row)} == {longer}


@pytest.mark.parametrize("row", ["spec-idle", "spec-2x", "spec-rlhfuse", "spec-rollout-share"])
def test_what_waits_for_the_slowest_worker_is_simulated_with_all_workers(row: str):
    for scenario in asked_of(row):
        assert scenario.cluster.gpus == INPUTS["gpus"]
        assert scenario.workload.synthetic.mean_tokens == INPUTS["mean_tokens"]


@pytest.mark.parametrize("trace", specactor.TRACES)
def test_drafters_on_other_gpus_and_in_the_hosts_memory_take_no_cache_of_a_verifier(trace: str):
    plain, own, vanilla = (
        prepare(specactor.scenario(INPUTS, trace, system)).limits.kv_blocks
        for system in (specactor.VERL, specactor.specactor(INPUTS), specactor.vanilla(INPUTS))
    )
    assert vanilla < own == plain


def test_a_group_that_shares_a_sequence_computes_the_tokens_of_all_its_gpus_at_once():
    training = specactor.scenario(INPUTS, "grpo", specactor.VERL).training
    assert training.tokens_per_microbatch == 8 * 22528


def test_ngrams_draft_next_to_nothing_right_of_most_of_the_longest_responses():
    runs = specactor.scenario(INPUTS, "dapo", specactor.ngrams(INPUTS)).speculation.runs["ngram"]

    def served(tokens: int) -> float:
        lengths = np.full(500, tokens)
        parts = stretches(
            draw_runs(RunModel.model_validate(runs), lengths, np.arange(500)), lengths
        )
        return len(np.unique(parts.row[parts.hit > 0])) / 500

    assert served(4000) == 1
    assert served(15000) == pytest.approx(INPUTS["ngram_share_of_long"], abs=0.05)
