"""A model drafter's acceptance from recorded passes."""

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens, sample_key
from simrl.speculation.acceptance_fit import fit_acceptance

LENGTHS = np.random.default_rng(0).lognormal(6.5, 0.7, 300).astype(np.int64) + 2


def passes(model: ModelAcceptance, drafted: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What recording a drafter of this acceptance would give: (row, drafted, accepted)."""
    found = []
    log_acceptances = model.log_acceptances(drafted)
    for row, tokens in enumerate(LENGTHS.tolist()):
        key, p = sample_key(1, row, 0, 0), 1
        hardness = model.hardness(key, tokens)
        while p < tokens:
            accepted = accepted_tokens(key, p, hardness, log_acceptances, drafted)
            found.append((row, drafted, accepted))
            p += accepted + 1
    row, draft, accepted = np.array(found).T
    return row, draft, accepted


def test_equal_responses_give_the_probabilities_and_no_spread():
    fitted = fit_acceptance(*passes(ModelAcceptance(by_position=(0.8, 0.7, 0.6, 0.6, 0.5))), LENGTHS)
    assert fitted.by_position == pytest.approx((0.8, 0.7, 0.6, 0.6, 0.5), abs=0.02)
    assert fitted.spread < 0.1 and abs(fitted.length_exponent) < 0.05


def test_spread_and_length_are_told_apart():
    model = ModelAcceptance(by_position=(0.8, 0.75, 0.7), spread=0.6, length_exponent=0.4, typical_tokens=700)
    fitted = fit_acceptance(*passes(model), LENGTHS)
    assert fitted.spread == pytest.approx(0.6, abs=0.1)
    assert fitted.length_exponent == pytest.approx(0.4, abs=0.15)
    shift = (fitted.typical_tokens / 700) ** 0.4  # hardness at the length that the fit calls typical
    assert fitted.by_position[:3] == pytest.approx([p**shift for p in (0.8, 0.75, 0.7)], abs=0.03)


def test_a_rejection_says_nothing_of_what_follows_it():
    row, drafted, accepted = np.zeros(200, int), np.full(200, 3), np.repeat([0, 3], 100)
    fitted = fit_acceptance(row, drafted, accepted, np.array([600]))
    assert fitted.by_position == pytest.approx((0.5, 0.9999, 0.9999), abs=0.01)


def test_too_little_and_impossible_records_are_refused():
    with pytest.raises(InputError, match="pass 1: 4 of 3 drafted"):
        fit_acceptance(np.zeros(2, int), np.array([3, 3]), np.array([1, 4]), np.array([10]))
    with pytest.raises(InputError, match="1 passes have a draft; a fit needs 50"):
        fit_acceptance(np.zeros(2, int), np.array([0, 3]), np.array([0, 1]), np.array([10]))
