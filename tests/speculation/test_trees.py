"""Draft trees against a slow one written from EAGLE-2's description, and against what TLT publishes of them (Tables 1 and
2)."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import read_profile
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.choices import Strategy
from simrl.speculation.draft_times import Overheads, eagle_drafts
from simrl.speculation.inputs import assumed_acceptance
from simrl.speculation.methods import TLT_STRATEGIES
from simrl.speculation.trees import accept_length, tree_log_acceptances

PROFILE = Path(__file__).parents[2] / "profiles" / "qwen3-32b_h100_tp4.parquet"
ALIKE = 1e6  # the drafter is equally sure everywhere


def reached(by_position, strategy, **shape):
    acceptance = ModelAcceptance(by_position=by_position)
    return np.exp(-tree_log_acceptances(acceptance, Strategy(*strategy), **shape))


def reached_slowly(by_position, strategy, next_choice):
    """Paths and their probabilities in lists: grow, keep the best, sum what is kept of each level."""
    depth, topk, tokens_to_verify = strategy
    beam, grown = [((), 1.0)], []
    for level in range(depth):
        first = by_position[min(level, len(by_position) - 1)]
        chance = min(next_choice, first / (1 - first))
        shares = [first, *((1 - first) * chance * (1 - chance) ** i for i in range(topk - 1))]
        children = [
            ((*path, rank), q * share) for path, q in beam for rank, share in enumerate(shares)
        ]
        grown += children
        beam = sorted(children, key=lambda node: -node[1])[:topk]
    kept = sorted(grown, key=lambda node: -node[1])[: tokens_to_verify - 1]
    assert all(
        path[:-1] == () or path[:-1] in dict(kept) for path, _ in kept
    )  # what is kept is a tree
    return [sum(q for path, q in kept if len(path) == level) for level in range(1, depth + 1)]


def test_a_tree_worked_out_by_hand():
    """First choice 0.6, second 0.2: of .6 .2 | .36 .12 .12 .04 the best three are verified."""
    assert reached((0.6,), (2, 2, 4), next_choice=0.5, concentration=ALIKE) == pytest.approx(
        [0.8, 0.36], rel=1e-3
    )
    assert reached((0.6,), (2, 2, 7), next_choice=0.5, concentration=ALIKE) == pytest.approx(
        [0.8, 0.64], rel=1e-3
    )


@pytest.mark.parametrize("strategy", [(3, 2, 6), (8, 4, 16), (8, 4, 48), (6, 8, 64), (1, 5, 3)])
@pytest.mark.parametrize("by_position", [(0.58,), (0.83, 0.74, 0.7, 0.62)])
def test_trees_are_those_of_the_slow_description(
    strategy: tuple[int, int, int], by_position: tuple[float, ...]
):
    fast = reached(by_position, strategy, next_choice=0.37, concentration=ALIKE)
    assert fast == pytest.approx(reached_slowly(by_position, strategy, 0.37), rel=3e-3, abs=1e-12)


@pytest.mark.parametrize("concentration", [1.0, 2.0, 20.0])
def test_a_tree_of_one_branch_accepts_what_a_chain_of_tokens_does(concentration: float):
    acceptance = ModelAcceptance(by_position=(0.9, 0.8, 0.7))
    chain = tree_log_acceptances(acceptance, Strategy(5, 1, 6), concentration=concentration)
    assert np.exp(-chain) == pytest.approx(np.exp(-acceptance.log_acceptances(5)), rel=0.05)


def test_deeper_levels_are_reached_less_and_more_verified_tokens_never_harm():
    lengths = []
    for tokens_to_verify in (2, 4, 8, 16, 32, 64, 128):
        levels = reached((0.8,), (8, 4, tokens_to_verify))
        assert (np.diff(levels) <= 0).all() and (levels >= 0).all() and levels[0] <= 1
        lengths.append(1 + levels.sum())
    assert lengths == sorted(lengths)
    assert lengths[0] == pytest.approx(1 + 0.8, rel=0.02)


def test_levels_that_no_tree_keeps_are_never_accepted():
    logs = tree_log_acceptances(
        ModelAcceptance(by_position=(0.6,)), Strategy(6, 2, 4), concentration=ALIKE
    )
    assert np.isinf(logs[3:]).all() and np.isfinite(logs[:2]).all()
    assert (
        max(accepted_tokens(3, generated, 1.0, logs, 6) for generated in range(5000))
        == np.isfinite(logs).sum()
    )


def test_drafters_that_know_where_they_are_sure_gain_from_it():
    alike, unlike = (
        accept_length(-np.log(reached((0.75,), (10, 8, 32), concentration=c))) for c in (ALIKE, 1.0)
    )
    assert unlike > alike


def test_draws_follow_the_levels_reached():
    logs = tree_log_acceptances(ModelAcceptance(by_position=(0.8,)), Strategy(8, 4, 32))
    drawn = np.array([accepted_tokens(11, generated, 1.0, logs, 8) for generated in range(40_000)])
    assert drawn.mean() + 1 == pytest.approx(accept_length(logs), rel=0.01)


# TLT Table 1 (batch 1, temperature 0): accept length by topk. Depth and tokens to verify are not stated: 12 and 64 are assumed.
ACCEPT_LENGTHS = {4: 8.29, 6: 8.66, 8: 8.67, 10: 8.67, 12: 8.60, 16: 8.42}


def fitted(tokens: float, strategy: Strategy) -> ModelAcceptance:
    """The acceptance, the same at each level, with which a strategy has this accept length."""

    def acceptance(p: float) -> ModelAcceptance:
        return ModelAcceptance(by_position=(p,))

    def excess(p: float) -> float:
        return accept_length(tree_log_acceptances(acceptance(p), strategy)) - tokens

    return acceptance(brentq(excess, 1e-3, 1 - 1e-4, xtol=1e-4))


def test_accept_lengths_by_topk_come_near_the_published_ones():
    acceptance = fitted(ACCEPT_LENGTHS[8], Strategy(12, 8, 64))
    off = {
        topk: accept_length(tree_log_acceptances(acceptance, Strategy(12, topk, 64))) / stated - 1
        for topk, stated in ACCEPT_LENGTHS.items()
    }
    assert max(abs(off[topk]) for topk in (4, 6, 8, 10)) < 0.01
    assert (
        0 < off[12] < 0.015 and 0.025 < off[16] < 0.04
    )  # a calibrated drafter does not lose by more branches


def test_larger_batches_want_fewer_tokens_verified_as_published():
    """TLT Table 2: best at 64 tokens for a batch of 1, at 48 for 2 and 4, at 16 from 8 on. Model and context of the table are
    not stated; Qwen3-32B on 4 H100 at 2k tokens stands in. Found: 64, 64, 32, 16, 16, 16; the speed-ups themselves come out
    1.4 times too high at small batches, as host time and the building of trees are left out (and 1.25 too low at the
    largest)."""
    profile, drafts = (
        read_profile(PROFILE),
        eagle_drafts(MODELS["qwen3-32b"], GPUS["h100"], 4, 2048, branches=8),
    )
    acceptance = fitted(8.67, Strategy(10, 8, 64))
    lengths = {
        v: accept_length(tree_log_acceptances(acceptance, Strategy(10, 8, v)))
        for v in (16, 32, 48, 64)
    }

    def speed_up(batch, v):
        return (
            lengths[v]
            * profile.decode_s(batch, 2048)
            / (profile.verify_s(batch, v - 1, 2048) + drafts.draft_s(batch, 10))
        )

    best = [max(lengths, key=lambda v: speed_up(batch, v)) for batch in (1, 2, 4, 8, 16, 32)]
    assert best == sorted(best, reverse=True)
    assert (best[0], best[3:]) == (64, [16, 16, 16])
    assert speed_up(1, 48) / 3.56 == pytest.approx(1.5, abs=0.1)
    assert speed_up(32, 64) / 1.70 == pytest.approx(0.8, abs=0.05)


def test_how_much_of_a_published_round_the_kernels_leave_open():
    """TLT Table 1: 8.67 tokens a pass at 3.64 times the speed, depth and model not stated."""
    profile, drafts = (
        read_profile(PROFILE),
        eagle_drafts(MODELS["qwen3-32b"], GPUS["h100"], 4, 2048, branches=8),
    )
    round_s = 8.67 / 3.64 * profile.decode_s(1, 2048)
    assert round_s - profile.verify_s(1, 63, 2048) - drafts.draft_s(1, 10) == pytest.approx(
        7.5e-3, abs=5e-4
    )


def test_trees_beyond_all_bounds_are_refused():
    with pytest.raises(InputError, match="more than 100000; draft less"):
        tree_log_acceptances(ModelAcceptance(by_position=(0.8,)), Strategy(8, 400, 64))


def test_trees_lose_in_large_batches_unless_reading_the_cache_takes_most_of_a_pass():
    """Every drafted token is a token of the pass: TLT §5 drafts in the tail only."""
    profile = read_profile(Path(__file__).parents[2] / "profiles" / "qwen2.5-32b_h100_tp4.parquet")
    acceptance = assumed_acceptance("eagle", "rejection_sampling")

    def speedup(strategy: Strategy, batch: int, context: int) -> float:
        times = eagle_drafts(
            MODELS["qwen2.5-32b"], GPUS["h100"], 4, context, strategy.topk, Overheads(2e-3)
        )
        draft_s = times.draft_s(batch, strategy.draft_depth)
        verify_s = profile.verify_s(batch, strategy.tokens_to_verify - 1, context)
        tokens = accept_length(tree_log_acceptances(acceptance, strategy))
        return tokens * profile.decode_s(batch, context) / (draft_s + verify_s)

    few = [strategy for strategy in TLT_STRATEGIES if strategy.tokens_to_verify == 16]
    most = [strategy for strategy in TLT_STRATEGIES if strategy.tokens_to_verify == 64]
    assert min(speedup(strategy, 32, 2000) for strategy in few) > 1.5
    assert max(speedup(strategy, 128, 2000) for strategy in few) < 1
    assert max(speedup(strategy, 128, 2000) for strategy in most) < 0.5
    # 128 caches of 10,000 tokens take longer to read than 16 tokens of each take to compute.
    assert profile.decode_s(128, 10_000) > 2 * profile.decode_s(128, 2000)
    assert max(speedup(strategy, 128, 10_000) for strategy in few) > 1
