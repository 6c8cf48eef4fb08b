"""Drafts accepted less often than they were counted: by tokens that are refused, wherever they are drafted."""

from itertools import pairwise

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.scenario.load import load_scenarios
from simrl.simulate.run import simulate
from simrl.speculation.acceptance import MOST_PROBABLE, ModelAcceptance
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.trace_runs import accepted_prefixes, with_refusals
from simrl.trace.trace import write_trace
from tests.token_traces import random_groups, trace_of


def test_a_draft_stands_up_to_the_first_token_that_is_refused():
    trace = trace_of({(0, 0): [[1, 2, 3] * 200]})
    counted = ngram_runs(trace)
    accepted = with_refusals(counted, trace, 0, 0.7).accepted.astype(int)
    refused = np.flatnonzero((accepted == 0) & (counted.accepted > 0))
    assert 0.2 < len(refused) / 600 < 0.4
    for p, tokens in enumerate(accepted):
        next_refused = refused[refused >= p]
        most = next_refused[0] - p if next_refused.size else 600 - p
        assert tokens == min(int(counted.accepted[p]), most)


def test_what_stands_at_one_factor_stands_at_every_larger_one_and_at_one_all_does():
    trace = random_groups(1, prompts=6)
    counted = ngram_runs(trace)
    rising = [
        with_refusals(counted, trace, 0, factor).accepted.astype(int)
        for factor in (0.2, 0.5, 0.8, 1.0)
    ]
    for less, more in pairwise(rising):
        assert (less <= more).all() and less.sum() < more.sum()
    assert (rising[-1] == counted.accepted).all()
    first = with_refusals(counted, trace, 0, 0.5)
    assert (first.drafted == counted.drafted).all() and (first.first == counted.first).all()


def test_other_seeds_refuse_other_tokens():
    trace = random_groups(1, prompts=6)
    counted = ngram_runs(trace)
    assert (
        with_refusals(counted, trace, 0, 0.5).accepted
        != with_refusals(counted, trace, 1, 0.5).accepted
    ).any()


def test_an_old_response_is_kept_up_to_the_first_token_that_is_refused():
    trace = random_groups(1, prompts=40)
    whole = np.full(len(trace), 10)
    kept = accepted_prefixes(whole, trace, 0, 0.8)
    assert kept.max() == 10 and kept.min() < 5
    assert kept.mean() == pytest.approx(sum(0.8**k for k in range(1, 11)), rel=0.15)


def test_a_models_probabilities_are_multiplied_as_far_as_they_can_be():
    acceptance = ModelAcceptance(by_position=(0.9, 0.6))
    assert acceptance.times(0.5).by_position == (0.45, 0.3)
    assert acceptance.times(1.2).by_position == (MOST_PROBABLE, pytest.approx(0.72))
    assert acceptance.times(1.0) is acceptance


def test_what_cannot_be_executed_is_refused_in_a_line(simrl):
    write_trace(random_groups(1, epochs=2), simrl.folder / "ids.parquet")
    recorded = "workload={trace: ids.parquet, synthetic: null}"
    for method, factor, why in (
        ("ngram", 1.2, "cannot become right"),
        ("siblings", 0.8, "while siblings run"),
    ):
        (scenario,) = load_scenarios(
            "scenario.yaml",
            [
                f"systems=[{{name: verl_colocated, speculation: {method}}}]",
                recorded,
                f"speculation.acceptance_factor={factor}",
            ],
        )
        with pytest.raises(InputError, match=f"speculation.acceptance_factor is {factor}: .*{why}"):
            simulate(scenario)
