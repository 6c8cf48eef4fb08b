import numpy as np
import pytest

from simrl.simulate.run import simulate
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.choices import Strategy
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.trees import accept_length, probability, tree_log_acceptances, with_positions
from tests.helpers import rows, scenario


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
    long = {
        "synthetic": {
            "steps": 3,
            "prompts_per_step": 8,
            "group": 4,
            "cap_tokens": 900,
            "mean_tokens": 500,
            "sigma": 0.2,
        }
    }
    result = simulate(
        scenario(
            {"name": "verl_colocated", "speculation": method}, speculation=inputs, workload=long
        )
    )
    verified, passes = (
        sum(r[k] for r in rows(result.samples)) for k in ("verified_tokens", "verifications")
    )
    assert verified / passes == pytest.approx(2.4, rel=0.02)
