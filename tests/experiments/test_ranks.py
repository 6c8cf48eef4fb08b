"""How well a prompt's last epoch tells the rank of its responses."""

import numpy as np
import pytest

from experiments.reproduce.ranks import rank_history, rank_stability
from simrl.errors import InputError
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import Trace, TraceMetadata

MODEL = LengthModel(
    steps=12, prompts_per_step=16, group=8, cap_tokens=4000, prompts=64, mean_tokens=800, sigma=0.8
)


def history(before, now):
    """A trace of two epochs, a step each, from (prompts, samples) arrays of lengths."""
    n, g = np.shape(before)
    return Trace.from_columns(
        {
            "step": np.repeat([0, 1], n * g),
            "epoch": np.repeat([0, 1], n * g),
            "prompt_id": np.tile(np.repeat(np.arange(n), g), 2),
            "sample": np.tile(np.arange(g), 2 * n),
            "prompt_tokens": np.full(2 * n * g, 5),
            "response_tokens": np.ravel([before, now]),
        },
        TraceMetadata(
            name="h", kind="recorded", source="a test", tokenizer="none", cap_tokens=10_000
        ),
    )


def test_ranks_that_do_not_change_are_all_accurate_also_where_lengths_are_equal():
    lengths = np.arange(16).repeat(4).reshape(16, 4) + 1
    stability = rank_stability(history(lengths, lengths * 7), groups=8)
    assert (stability.same_or_lower, stability.higher, stability.epoch_pairs) == (1, 0, 1)
    at_cap = rank_stability(history(lengths, np.full_like(lengths, 9)), groups=8)
    assert at_cap.same_or_lower == 1


def test_moves_up_are_told_apart_as_in_figure_9():
    """Four prompts of two samples, two groups of four responses. The median, not the mean, predicts."""
    before = [[1, 1, 90], [2, 2, 2], [30, 30, 30], [40, 40, 1]]
    # Sorted: 1 2 3 4 5 6 | 7 8 9 10 11 12. Of the prompts predicted short, 7 is in the longer group's shorter half and 12
    # in its longer half.
    now = [[1, 2, 7], [3, 4, 12], [5, 8, 9], [6, 10, 11]]
    stability = rank_stability(history(before, now), groups=2)
    assert stability.higher == pytest.approx(2 / 12)
    assert stability.near_boundary == pytest.approx(1 / 12)
    assert stability.strong == pytest.approx(1 / 12)
    assert stability.same_or_lower == pytest.approx(10 / 12)


def test_reversed_ranks_move_strongly():
    lengths = np.arange(1, 9)[:, None]
    stability = rank_stability(history(lengths, lengths[::-1]), groups=8)
    # Predicted 0..7 became 7..0: four responses rose, by 7, 5, 3 and 1 groups; a group of one lies in its shorter half.
    assert (stability.higher, stability.near_boundary) == (4 / 8, 1 / 8)


def test_rank_stability_needs_two_epochs_with_prompts_in_common():
    with pytest.raises(InputError, match="no two successive epochs share 8 prompts"):
        rank_stability(synthesise(MODEL.model_copy(update={"prompts": None}), 0))


def test_a_history_by_group_and_by_epoch_has_the_same_responses():
    found = rank_history(synthesise(MODEL, 0), groups=8)
    assert found.epoch_pairs == len(found.by_epoch) == 2 and [
        e["epoch"] for e in found.by_epoch
    ] == [1, 2]
    assert len(found.by_group) == 8
    for kind, share in found.overall.items():
        for parts in (found.by_group, found.by_epoch):  # equally many responses in each
            assert np.mean([part[kind] for part in parts]) == pytest.approx(share)


def test_what_moves_higher_is_not_last_within_the_bound_or_migrated():
    found = rank_history(synthesise(MODEL, 0), groups=8)
    for shares in (found.overall, *found.by_group, *found.by_epoch):
        assert sum(
            shares[kind] for kind in ("accurate", "near_boundary", "strong")
        ) == pytest.approx(1)
        assert sum(
            shares[kind] for kind in ("accurate", "not_last", "within", "migrated")
        ) == pytest.approx(1)
    assert found.by_group[-1]["accurate"] == 1, "nothing is higher than the highest group"


def test_an_outlier_is_migrated_and_one_within_the_bound_is_not():
    """Two groups of ten responses; the last 10 % of a group is its longest one. 109 is within 1.1 × 100, 111 is not."""
    before = np.array([[100] * 10, [200] * 10])
    for outlier, kind in ((109, "within"), (111, "migrated")):
        now = np.array([[90] * 9 + [outlier], [105] * 10])
        found = rank_history(history(before, now), groups=2)
        assert found.by_group[0][kind] == 0.1 and found.overall["accurate"] == 1 - 1 / 20


def test_the_bound_follows_the_growth_of_the_epoch_before():
    lengths = np.arange(10, 90).reshape(8, 10)
    trace = history(lengths, 2 * lengths)
    assert [e["growth"] for e in rank_history(trace, 8).by_epoch] == [1.1], (
        "of the first epoch no growth is known"
    )
    columns = {name: trace.table.column(name).to_numpy() for name in trace.table.column_names}
    third = {
        name: np.concatenate([values, values[80:] + (name in ("step", "epoch"))])
        for name, values in columns.items()
    }
    found = rank_history(Trace.from_columns(third, trace.metadata), 8)
    assert [e["growth"] for e in found.by_epoch] == [1.1, 2.0]
