import numpy as np
import pytest
from pydantic import ValidationError

from simrl.simulate.run import simulate
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.choices import Strategy
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.trees import accept_length, probability, tree_log_acceptances, with_positions
from simrl.validation import explain
from tests.helpers import rows, scenario

LONG = {
    "synthetic": {
        "steps": 3,
        "prompts_per_step": 8,
        "group": 4,
        "cap_tokens": 900,
        "mean_tokens": 500,
        "sigma": 0.2,
    }
}


def totals(method, *keys, **changes):
    """Return the sums over the samples of a run with long responses."""
    result = simulate(
        scenario({"name": "verl_colocated", "speculation": method}, workload=LONG, **changes)
    )
    return [sum(r[key] for r in rows(result.samples)) for key in keys]


@pytest.mark.parametrize("tokens", [1.3, 2.5, 3.9])
def test_chains_of_a_probability_have_the_accept_length_that_it_is_from(tokens):
    p = probability(tokens, Strategy(3, 1, 4))
    assert 1 + p + p**2 + p**3 == pytest.approx(tokens)
    logs = ModelAcceptance(by_position=(p,)).log_acceptances(3)
    drawn = [accepted_tokens(7, i, 1.0, logs, 3) for i in range(20_000)]
    assert 1 + np.mean(drawn) == pytest.approx(tokens, rel=0.02)


def test_so_do_trees():
    shape = Strategy(7, 4, 8)
    p = probability(2.7, shape)
    logs = tree_log_acceptances(ModelAcceptance(by_position=(p,)), shape)
    assert accept_length(logs) == pytest.approx(2.7, rel=1e-3)
    assert p < probability(2.7, Strategy(7, 1, 8))  # branches help


def test_what_engines_count_by_position_becomes_rates_of_each():
    made = with_positions({"accepted_per_position": [0.8, 0.6, 0.3], "spread": 0.1})
    assert made == {"spread": 0.1, "by_position": [0.8, pytest.approx(0.75), 0.5]}
    whole = SpeculationInputs.model_validate({"acceptance": {"eagle": made}})
    again = SpeculationInputs.model_validate(whole.model_dump())
    assert again == whole


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        ({"accepted_per_position": [0, 0]}, "accepted_per_position is 0: give more than 0"),
        ({"accepted_per_position": ["a"]}, "accepted_per_position is 'a': a number is needed"),
        ({"accepted_per_position": 0.5}, "accepted_per_position is 0.5: a list is needed"),
        ({"accepted_per_position": [1.2]}, "accepted_per_position is 1.2: give 1 or less"),
        ({"accepted_per_position": [0.5, 0.9]}, "give shares that do not rise"),
        ({"accept_length": "x"}, "accept_length is 'x': a number is needed"),
        ({"accept_length": 2, "draft_shape": [3]}, "draft_shape is missing"),
        ({"accept_length": 2, "draft_shape": "abc"}, "draft_shape is 'abc': a list is needed"),
        (
            {"accept_length": 2, "draft_shape": [3, 100, 10**7]},
            "draft_shape is 100: give 16 or less",
        ),
        ({"accept_length": 2, "accepted_per_position": [0.5]}, "give one of them"),
        ({"accept_length": 2, "by_position": [0.5]}, "give one of them"),
    ],
)
def test_what_no_engine_logs_is_refused_in_a_line_with_its_key(logged, words):
    with pytest.raises(ValidationError) as refused:
        SpeculationInputs.model_validate({"acceptance": {"eagle": logged}})
    key, message = explain(refused.value, SpeculationInputs, "speculation")
    assert key == "acceptance.eagle" and words in message and "\n" not in message


@pytest.mark.parametrize("length", [0.5, 4.5])
def test_a_length_that_a_shape_cannot_have_is_refused(length):
    with pytest.raises(
        ValueError, match=r"drafts of draft_shape \[3, 1, 4\] have 1 to 3.99 tokens a pass"
    ):
        SpeculationInputs.model_validate({"acceptance": {"eagle": {"accept_length": length}}})


@pytest.mark.parametrize(
    "method", [{"name": "eagle3"}, {"name": "eagle3", "steps": 5, "topk": 4, "tokens": 8}]
)
def test_a_run_has_the_accept_length_that_it_was_given(method):
    shape = [method.get("steps", 3), method.get("topk", 1), method.get("tokens", 4)]
    inputs = {"acceptance": {"eagle": {"accept_length": 2.4, "draft_shape": shape}}}
    verified, passes = totals(method, "verified_tokens", "verifications", speculation=inputs)
    assert verified / passes == pytest.approx(2.4, rel=0.02)


def test_acceptance_by_depth_is_drawn_by_depth():
    inputs = {"acceptance": {"mtp": {"accepted_per_position": [0.9, 0.45], "kind": "measured"}}}
    drafted, accepted, passes = totals(
        {"name": "mtp", "draft_tokens": 2},
        *("drafted_tokens", "accepted_tokens", "verifications"),
        model="mimo-7b",
        speculation=inputs,
    )
    assert drafted == pytest.approx(2 * passes, rel=0.01)
    assert accepted / passes == pytest.approx(0.9 + 0.45, rel=0.02)
