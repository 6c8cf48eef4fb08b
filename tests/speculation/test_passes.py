"""The passes that runs and windows make."""

import numpy as np
import pytest

from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.passes import run_passes, stretches
from simrl.speculation.windows import Aimd, Fixed


def runs(drafted: list[int], accepted: list[int], first: list[int] | None = None) -> AcceptRuns:
    return AcceptRuns(
        np.array(first or [0], dtype=np.int64),
        np.array(drafted, dtype=np.uint8),
        np.array(accepted, dtype=np.uint8),
    )


def test_passes_are_counted_by_hand():
    # The first token comes with the prompt. At 1: 2 drafted and accepted, and one besides: 4. At 4: 4 drafted, 1 accepted: 6.
    # At 6: nothing drafted: 7. At 7: the window is 2 again, 1 of 2 accepted, and the response is over at 9.
    found = run_passes(
        runs([0, 5, 5, 5, 5, 5, 0, 5, 5], [0, 5, 4, 3, 1, 0, 0, 1, 0]), np.array([9]), Aimd().rule
    )
    assert [int(column[0]) for column in found] == [8, 4, 3, 8, 4, 0, 0]
    assert (found.acceptance_rate, found.speculation_rate, found.accept_length) == (0.5, 0.5, 2.0)


def test_a_response_without_drafts_takes_a_pass_a_token():
    found = run_passes(runs([9], [0], first=[-1]), np.array([5]), Fixed(tokens=3).rule)
    assert found.accept_length == 1.0 and np.isnan(found.acceptance_rate)


def test_a_draft_without_an_accepted_token_is_counted_with_its_tokens():
    passes = run_passes(
        runs([0, 2, 0, 3, 1], [0, 0, 0, 1, 0]), np.array([5]), Fixed(tokens=255).rule
    )
    assert (passes.passes[0], passes.verifications[0]) == (3, 2)
    assert (passes.wrong[0], passes.wrong_tokens[0]) == (1, 2)


def test_a_response_that_ends_with_a_draft_yields_no_token_besides():
    found = run_passes(runs([0, 2, 1], [0, 2, 1]), np.array([3]), Fixed(tokens=2).rule)
    assert (found.passes[0], found.accepted[0], found.tokens[0]) == (1, 2, 2)


def test_a_perfect_drafter_yields_a_window_and_one_a_pass():
    n = 1 + 50 * 9
    left = np.arange(n, 0, -1)
    found = run_passes(
        runs(np.full(n, 8).tolist(), np.minimum(left, 8).tolist()),
        np.array([n]),
        Fixed(tokens=8).rule,
    )
    assert found.accept_length == 9.0 and found.acceptance_rate == 1.0


def test_stretches_and_gaps_take_turns():
    #            gap 2 (at 1, 2), hit 3 (at 3-5), gap 1 (6), hit 2 (7, 8), gap 2 (9, 10)
    found = stretches(
        runs([0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 0], [0, 0, 0, 3, 2, 1, 0, 2, 1, 0, 0]), np.array([11])
    )
    assert list(zip(*(c.tolist() for c in found), strict=True)) == [(0, 2, 3), (0, 1, 2), (0, 2, 0)]


def test_a_stretch_is_longer_than_a_draft_where_whole_drafts_are_accepted():
    found = stretches(runs([0, 2, 2, 2, 2, 2], [0, 2, 2, 2, 1, 0]), np.array([6]))
    assert (found.gap.tolist(), found.hit.tolist()) == ([0, 1], [3 + 1, 0])


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_a_stretch_or_a_gap(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 20)
    first = np.where(rng.random(20) < 0.2, -1, np.cumsum(lengths) - lengths)
    left = np.concatenate([np.arange(n, 0, -1) for n in lengths])
    drafted = rng.integers(0, 9, lengths.sum())
    accepted = np.minimum(rng.integers(0, 9, lengths.sum()), np.minimum(drafted, left))
    found = stretches(
        AcceptRuns(first, drafted.astype(np.uint8), accepted.astype(np.uint8)), lengths
    )
    total = np.bincount(found.row, weights=found.gap + found.hit, minlength=20)
    assert total.tolist() == np.where(first >= 0, lengths - 1, 0).tolist()
