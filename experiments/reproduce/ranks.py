"""Ranks: how well the lengths of a prompt's last epoch predict the rank of its responses by length in this epoch.

RhymeRL (arXiv 2508.18588) ranks prompts by the median length of their last epoch and cuts the ranking into equal groups; its
Fig. 9 counts the responses that belong to a higher group in the end, its Table 2 HistoPipe's handling of them.

Invariant: a response has one predicted group (its prompt's) and one real one (its own length's), and every share is over the
responses of the prompts that two successive epochs have in common; one number for a run is the mean over its pairs of epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.trace.trace import Trace

Integers = NDArray[np.int64]
KINDS = ("accurate", "near_boundary", "strong", "not_last", "within", "migrated")
LAST_SHARE = 0.1  # α of RhymeRL §6.3
LEAST_GROWTH = 1.1  # the least β
GROWTH_PERCENTILE = 75


@dataclass(frozen=True)
class RankStability:
    """Prediction by a prompt's last epoch of the rank of its responses in this one (RhymeRL Fig. 9 and Table 2).

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
    than β × its longest prompt (by medians) of the epoch before are `within`, and HistoPipe migrates the rest. `accurate`,
    `not_last`, `within` and `migrated` sum to 1, and so do `accurate`, `near_boundary` and `strong`.
    """

    groups: int
    epoch_pairs: int
    overall: dict[str, float]
    by_group: tuple[dict[str, float], ...]  # the shortest first
    by_epoch: tuple[
        dict[str, float], ...
    ]  # with `epoch` and `growth` (β), for the later epoch of each pair


def rank_stability(trace: Trace, groups: int = 8) -> RankStability:
    """Return the measure of RhymeRL §6.1, Fig. 9, on the prompts that two successive epochs of the trace have in common.

    *Predicted group*: the prompts, ranked by the median length of their responses in the epoch before, are divided
    into `groups` equal parts. *Real group*: this epoch's responses, sorted by length, are divided likewise. A response
    moved *near the boundary* if its real group is the next one up and it is in that group's shorter half. The paper
    does not say how equal lengths (all at the cap) are sorted; here they stand in the predicted order, since a response
    that is no longer than another has not overtaken it.

    Raises `InputError` where no two successive epochs share at least `groups` prompts.
    """
    history = rank_history(trace, groups)
    near, strong = history.overall["near_boundary"], history.overall["strong"]
    return RankStability(
        groups, history.epoch_pairs, 1 - (near + strong), near + strong, near, strong
    )


def rank_history(trace: Trace, groups: int = 8) -> RankHistory:
    """Return `rank_stability` by group and by epoch, and with HistoPipe's handling of it (RhymeRL §6.3, Table 2).

    β is the 75th percentile of the growth of the prompts' median lengths over the epoch before, at least 1.1. Raises
    `InputError` where no two successive epochs share at least `groups` prompts.
    """
    pairs = list(_pairs(trace, groups))
    if not pairs:
        raise InputError(
            f"trace {trace.metadata.name!r}: no two successive epochs share {groups} prompts; "
            "rank stability needs a run of two epochs or more"
        )
    everywhere = [{kind: float(moved[kind].mean()) for kind in KINDS} for _, _, moved in pairs]
    in_groups = [
        moved.groupby("predicted")[list(KINDS)].mean().to_dict("records") for _, _, moved in pairs
    ]
    by_group = tuple(_mean(shares) for shares in zip(*in_groups, strict=True))
    by_epoch = tuple(
        {"epoch": epoch, "growth": growth, **shares}
        for (epoch, growth, _), shares in zip(pairs, everywhere, strict=True)
    )
    return RankHistory(groups, len(pairs), _mean(everywhere), by_group, by_epoch)


def _pairs(trace: Trace, groups: int) -> Iterator[tuple[int, float, pd.DataFrame]]:
    """Yield two successive epochs' later one, its β, and the responses of the prompts that both have: a row each, with its
    `predicted` group and a boolean for each of `KINDS`."""
    every = pd.DataFrame(
        {name: trace.column(name) for name in ("epoch", "prompt_id", "response_tokens")}
    )
    growth = LEAST_GROWTH
    for before, now in pairwise(np.unique(every["epoch"]).tolist()):
        old, new = (every[every["epoch"] == epoch] for epoch in (before, now))
        medians, next_medians = (
            rows.groupby("prompt_id")["response_tokens"].median() for rows in (old, new)
        )
        ranked = medians.sort_values(kind="stable").index
        ranked = ranked[ranked.isin(new["prompt_id"])]
        if len(ranked) >= groups:
            group_of = pd.Series(np.arange(len(ranked)) * groups // len(ranked), ranked)
            longest = medians[ranked].groupby(group_of).max().to_numpy()
            known = new[new["prompt_id"].isin(ranked)]
            predicted = group_of[known["prompt_id"]].to_numpy()
            yield (
                now,
                growth,
                _moves(known["response_tokens"].to_numpy(), predicted, groups, growth * longest),
            )
        grown = (next_medians / medians).dropna()
        growth = (
            max(float(np.percentile(grown, GROWTH_PERCENTILE)), LEAST_GROWTH)
            if len(grown)
            else LEAST_GROWTH
        )


def _moves(
    tokens: Integers, predicted: Integers, groups: int, limits: NDArray[np.float64]
) -> pd.DataFrame:
    """Return the kind of each response; `limits` are β × the longest prompt of each group, by medians of the epoch before."""
    rank = np.empty(len(tokens), dtype=np.int64)
    rank[np.lexsort((predicted, tokens))] = np.arange(len(tokens))
    real, in_shorter_half = rank * groups // len(rank), rank * 2 * groups // len(rank) % 2 == 0
    higher = real > predicted
    near = (real == predicted + 1) & in_shorter_half
    in_group = pd.Series(tokens).groupby(
        predicted
    )  # of equal lengths, the later rows are the longer ones
    last = (in_group.rank("first") - 1 >= in_group.transform("size") * (1 - LAST_SHARE)).to_numpy()
    within = tokens <= limits[predicted]
    kinds = (
        ~higher,
        near,
        higher & ~near,
        higher & ~last,
        higher & last & within,
        higher & last & ~within,
    )
    return pd.DataFrame({"predicted": predicted, **dict(zip(KINDS, kinds, strict=True))})


def _mean(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    return {kind: float(np.mean([each[kind] for each in shares])) for kind in KINDS}
