"""Ranks: how well the lengths of a prompt's last epoch tell how long its responses will be, among all, in this one.

RhymeRL (arXiv 2508.18588) ranks prompts by the median length of their last epoch and cuts the ranking into equal groups; its
Fig. 9 counts the responses that turn out to belong to a higher group, its Table 2 what becomes of them.

Invariant: a response has one predicted group (its prompt's) and one real one (its own length's), and every share is over the
responses of prompts that both of two successive epochs have; the mean over the pairs of epochs where one number stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.trace import Trace

LAST_SHARE = 0.1  # α of RhymeRL §6.3
LEAST_GROWTH = 1.1  # the least β
GROWTH_PERCENTILE = 75


@dataclass(frozen=True)
class RankStability:
    """How well a prompt's last epoch tells the rank of its responses in this one (RhymeRL Fig. 9 and Table 2).

    Shares of responses, the mean over the pairs of adjacent epochs. `same_or_lower` is Table 2's *Accurate*;
    `same_or_lower + higher = 1` and `near_boundary + strong = higher`.
    """

    groups: int
    epoch_pairs: int
    same_or_lower: float
    higher: float
    near_boundary: float
    strong: float


@dataclass(frozen=True)
class RankHistory:
    """RhymeRL's Table 2 and Fig. 9 for a number of groups, as shares: of all responses, by predicted group, and by epoch.

    Of a group's responses that move higher, those not among its longest 10 % are `not_last`; of the others, those no longer
    than β × its longest response of the epoch before are `within`, and HistoPipe migrates the rest. The sum of `accurate`,
    `not_last`, `within` and `migrated` is 1, as is that of `accurate`, `near_boundary` and `strong`.
    """

    groups: int
    epoch_pairs: int
    overall: dict[str, float]
    by_group: tuple[dict[str, float], ...]  # the shortest first
    by_epoch: tuple[dict[str, float], ...]  # with `epoch` and `growth` (β), of the pairs' later epochs


class _Pair(NamedTuple):
    """The responses of two successive epochs' common prompts, arrays (responses,)."""

    epoch: int
    predicted: NDArray[np.int64]
    real: NDArray[np.int64]
    shorter_half: NDArray[np.bool_]  # of the real group
    tokens: NDArray[Any]
    longest_before: NDArray[np.int64]  # (groups,), of each group's prompts in the epoch before
    growth: float


def rank_stability(trace: Trace, groups: int = 8) -> RankStability:
    """The measure of RhymeRL §6.1, Fig. 9, on the prompts that two successive epochs of the trace have in common.

    *Predicted group*: the prompts, ranked by the median length of their responses in the epoch before, are divided
    into `groups` equal parts. *Real group*: this epoch's responses, sorted by length, are divided likewise. A response
    moved *near the boundary* if its real group is the next one up and it is in that group's shorter half. The paper
    does not say how equal lengths (all those at the cap) are sorted; here they stand in the order predicted, since a
    response that is no longer than another has not overtaken it.

    Raises `InputError` where no two successive epochs share at least `groups` prompts.
    """
    history = rank_history(trace, groups)
    near, strong = history.overall["near_boundary"], history.overall["strong"]
    return RankStability(groups, history.epoch_pairs, 1 - (near + strong), near + strong, near, strong)


def rank_history(trace: Trace, groups: int = 8) -> RankHistory:
    """`rank_stability` taken apart: by group, by epoch, and with what HistoPipe does about it (RhymeRL §6.3, Table 2).

    β is the 75th percentile of the growth of the prompts' median lengths over the epoch before, at least 1.1. Raises
    `InputError` where no two successive epochs share at least `groups` prompts.
    """
    pairs = list(_pairs(trace, groups))
    if not pairs:
        raise InputError(
            f"trace {trace.metadata.name!r}: no two successive epochs share {groups} prompts; "
            "rank stability needs a run of two epochs or more"
        )
    moved = [_moves(pair) for pair in pairs]
    everywhere = [_shares(kinds, np.ones(len(pair.real), dtype=bool)) for pair, kinds in zip(pairs, moved, strict=True)]
    by_group = tuple(
        _mean([_shares(kinds, pair.predicted == g) for pair, kinds in zip(pairs, moved, strict=True)])
        for g in range(groups)
    )
    by_epoch = tuple(
        {"epoch": pair.epoch, "growth": pair.growth, **shares} for pair, shares in zip(pairs, everywhere, strict=True)
    )
    return RankHistory(groups, len(pairs), _mean(everywhere), by_group, by_epoch)


def _pairs(trace: Trace, groups: int) -> Iterator[_Pair]:
    epoch, prompt, tokens = (trace.column(c) for c in ("epoch", "prompt_id", "response_tokens"))
    epochs = np.unique(epoch)
    growth = LEAST_GROWTH
    for before, now in pairwise(epochs.tolist()):
        old, new = epoch == before, epoch == now
        ids, medians = _medians(prompt[old], tokens[old])
        ranked = ids[np.argsort(medians, kind="stable")]
        ranked = ranked[np.isin(ranked, prompt[new])]
        if len(ranked) >= groups:
            known = np.isin(prompt[new], ranked)
            predicted = _position(ranked, prompt[new][known]) * groups // len(ranked)
            rank = np.empty(len(predicted), dtype=np.int64)
            rank[np.lexsort((predicted, tokens[new][known]))] = np.arange(len(predicted))
            longest = np.zeros(groups, dtype=np.int64)
            stayed = np.isin(prompt[old], ranked)
            group_before = _position(ranked, prompt[old][stayed]) * groups // len(ranked)
            np.maximum.at(longest, group_before, tokens[old][stayed])
            shorter_half = rank * 2 * groups // len(rank) % 2 == 0
            yield _Pair(now, predicted, rank * groups // len(rank), shorter_half, tokens[new][known], longest, growth)
        growth = _growth(ids, medians, *_medians(prompt[new], tokens[new]))


def _position(ranked: NDArray[Any], prompts: NDArray[Any]) -> NDArray[np.int64]:
    """Where each prompt stands in the ranking, which has it."""
    by_id = np.argsort(ranked, kind="stable")
    position: NDArray[np.int64] = by_id[np.searchsorted(ranked[by_id], prompts)]
    return position


def _medians(prompt: NDArray[Any], tokens: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The prompt ids, rising, and the median length of each."""
    order = np.lexsort((tokens, prompt))
    ids, first, count = np.unique(prompt[order], return_index=True, return_counts=True)
    tokens = tokens[order]
    twice = tokens[first + (count - 1) // 2].astype(np.int64) + tokens[first + count // 2]
    return ids, twice / 2


def _growth(
    ids: NDArray[Any], medians: NDArray[np.float64], next_ids: NDArray[Any], next_medians: NDArray[np.float64]
) -> float:
    """β for the epoch after: how much the prompts' medians grew, at the 75th percentile."""
    common, old, new = np.intersect1d(ids, next_ids, assume_unique=True, return_indices=True)
    if not common.size:
        return LEAST_GROWTH
    return max(float(np.percentile(next_medians[new] / medians[old], GROWTH_PERCENTILE)), LEAST_GROWTH)


def _moves(pair: _Pair) -> dict[str, NDArray[np.bool_]]:
    """Which responses are of which kind."""
    higher = pair.real > pair.predicted
    near = (pair.real == pair.predicted + 1) & pair.shorter_half
    # The longest of those with the same predicted group; of equal lengths the later rows.
    order = np.lexsort((pair.tokens, pair.predicted))
    size = np.bincount(pair.predicted, minlength=len(pair.longest_before))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
    last = place >= size[pair.predicted] * (1 - LAST_SHARE)
    within = pair.tokens <= pair.growth * pair.longest_before[pair.predicted]
    return {
        "accurate": ~higher,
        "near_boundary": near,
        "strong": higher & ~near,
        "not_last": higher & ~last,
        "within": higher & last & within,
        "migrated": higher & last & ~within,
    }


def _shares(kinds: dict[str, NDArray[np.bool_]], responses: NDArray[np.bool_]) -> dict[str, float]:
    return {kind: float(np.mean(where[responses])) for kind, where in kinds.items()}


def _mean(shares: list[dict[str, float]]) -> dict[str, float]:
    return {kind: float(np.mean([each[kind] for each in shares])) for kind in shares[0]}
