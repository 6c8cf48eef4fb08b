"""TLT Table 3: 7.81 GB of graphs for one strategy, 30.39 for four captured one by one, 10.69 bucketed."""

import pytest

from simrl.profile.model_shape import MODELS
from simrl.speculation.choices import Capture, Strategy
from simrl.speculation.draft_times import BYTES_PER_LAYER, FIXED_BYTES, graph_bytes

TARGET = MODELS["qwen2.5-32b"]
VANILLA: Capture = "vanilla"
BUCKETED: Capture = "bucketed"
# Four drafters of depth 8 that differ by their top-k; the public code's differ by the tokens to verify only.
UNLIKE = [Strategy(8, topk, tokens) for topk, tokens in ((8, 48), (6, 32), (4, 16), (2, 8))]
PUBLIC = [Strategy(8, 4, tokens) for tokens in (48, 32, 16, 8)]


def test_the_two_rows_that_were_solved_for_come_out():
    for capture in (VANILLA, BUCKETED):
        assert graph_bytes(capture, TARGET, UNLIKE[:1]) == pytest.approx(7.81e9)
    assert graph_bytes(VANILLA, TARGET, UNLIKE) == pytest.approx(30.39e9)


def test_the_third_row_follows_within_a_percent_for_drafters_that_differ():
    assert graph_bytes(BUCKETED, TARGET, UNLIKE) / 10.69e9 - 1 == pytest.approx(-0.009, abs=0.001)


def test_how_far_the_third_row_is_off_under_other_assumptions():
    assert graph_bytes(BUCKETED, TARGET, PUBLIC) / 10.69e9 - 1 == pytest.approx(-0.27, abs=0.005)
    for layers, off in ((28, 0.24), (80, -0.06)):
        per_layer = (30.39e9 - 7.81e9) / 3 / (layers + 9)
        shape = TARGET.model_copy(update={"layers": layers})
        assert graph_bytes(BUCKETED, shape, UNLIKE[:1], bytes_per_layer=per_layer) == pytest.approx(
            7.81e9
        )
        assert graph_bytes(
            BUCKETED, shape, UNLIKE, bytes_per_layer=per_layer
        ) / 10.69e9 - 1 == pytest.approx(off, abs=0.01)


def test_buckets_never_take_more_and_grow_by_new_drafters_only():
    for strategies in (UNLIKE, PUBLIC, [*UNLIKE, *PUBLIC], UNLIKE[:1]):
        assert graph_bytes(BUCKETED, TARGET, strategies) <= graph_bytes(VANILLA, TARGET, strategies)
    assert graph_bytes(BUCKETED, TARGET, PUBLIC) == graph_bytes(BUCKETED, TARGET, PUBLIC[:1])
    extra = graph_bytes(BUCKETED, TARGET, [*PUBLIC, Strategy(4, 4, 16)]) - graph_bytes(
        BUCKETED, TARGET, PUBLIC
    )
    assert extra == pytest.approx(5 * BYTES_PER_LAYER)


def test_smaller_models_have_smaller_graphs_and_none_without_strategies():
    small = graph_bytes(BUCKETED, MODELS["qwen2.5-7b"], PUBLIC)
    assert small < graph_bytes(BUCKETED, TARGET, PUBLIC)
    assert small == pytest.approx(FIXED_BYTES + (28 + 9) * BYTES_PER_LAYER)
    assert graph_bytes(BUCKETED, TARGET, []) == 0
    assert graph_bytes(BUCKETED, TARGET, PUBLIC, drafter_layers=24) > graph_bytes(
        BUCKETED, TARGET, PUBLIC
    )
