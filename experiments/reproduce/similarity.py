"""The share of a response that occurs in other responses: the routine behind RhymeRL's Fig. 6 (arXiv 2508.18588, §5.1).

The response is "generated" again from its beginning. Its last `PREFIX_TOKENS` (3) are looked up in the history. Where they
occur, the tokens after them are compared in both, and as many as are identical count as accepted; where they do not occur, or
not even the first is identical, one token is generated. So it goes on to the end of the response.

Invariant: the history of a response is the one that the caller named (earlier epochs, or the other responses of its group) and
never holds the response itself; each token of it is accepted or generated, exactly once.

The paper does not say which of several matches is followed: `follow="latest"` takes the latest place of the newest response, as
one scan from the end would; `follow="best"` the longest run there is, an upper bound that no drafter can know.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from simrl.profile.compiled import kernel
from simrl.speculation.matching import (
    Ints,
    Ints32,
    common_tokens,
    epoch_keys,
    joined,
    slot_of,
    table_size,
    token_ids,
)
from simrl.trace.trace import Trace

PREFIX_TOKENS = 3
CONTROL_SEED = 0


class Similarity(NamedTuple):
    """The rows with something to be compared with, the tokens that each took from its history, and the number of hits of n
    tokens at `hits[n]`; shapes (rows,), (rows,), (longest response + 1,)."""

    has_history: NDArray[np.bool_]
    accepted: Ints
    hits: Ints

    def accepted_share(self, response_tokens: Ints) -> float:
        """Return the accepted share of the tokens of rows with a history; NaN where none has one."""
        tokens = int(response_tokens[self.has_history].sum(dtype=np.int64))
        return int(self.accepted.sum()) / tokens if tokens else float("nan")


def similarity(
    trace: Trace,
    history: Literal["epochs", "siblings"] = "epochs",
    epochs_back: int | None = 1,
    follow: Literal["latest", "best"] = "latest",
    control_seed: int | None = None,
) -> Similarity:
    """Run the routine over a trace with token ids. Raise `InputError` for a trace without.

    With "epochs", a response is compared with all responses to its prompt in the latest `epochs_back` epochs before its own
    that have any (None: in all). With "siblings", with the other whole responses to its prompt in its own epoch. A
    `control_seed` compares with the responses to another, drawn prompt instead: what any two responses of this model have in
    common. That takes two prompts or more.
    """
    ids, first = token_ids(trace)
    keys, epochs = epoch_keys(trace)
    rows = np.lexsort((trace.column("sample"), trace.column("step"), keys))
    text, begin = joined([ids[first[row] : first[row + 1]] for row in rows])
    keys, starts = np.unique(keys[rows], return_index=True)
    prompt, now = np.divmod(keys, epochs)
    source = np.arange(prompt[-1] + 1)
    if control_seed is not None:
        order = np.random.default_rng(control_seed).permutation(len(source))
        source[order] = np.roll(order, 1)
    oldest = source[prompt] * epochs
    first, low, high, last = (
        np.searchsorted(keys, oldest + more) for more in (0, now, now + 1, epochs)
    )
    if history == "epochs":
        low, high = first if epochs_back is None else np.maximum(low - epochs_back, first), low
    edges = np.r_[starts, len(rows)]
    groups = _Groups(edges, edges[low], edges[high], edges[first], edges[last])
    has_history, accepted = np.empty(len(rows), dtype=np.bool_), np.empty(len(rows), dtype=np.int64)
    has_history[rows], accepted[rows], hits = _compare(text, begin, groups, follow == "best")
    return Similarity(has_history, accepted, hits)


def similarities(trace: Trace) -> list[dict[str, Any]]:
    """Return RhymeRL's Fig. 6 for each history that the trace has, both ways to follow a match, and a control."""
    epoch, tokens = trace.column("epoch"), trace.column("response_tokens").astype(np.int64)
    several = len(np.unique(trace.column("prompt_id"))) > 1
    found = []
    kinds: dict[str, dict[str, Any]] = {
        "previous epoch": {},
        "all earlier epochs": {"epochs_back": None},
        "siblings": {"history": "siblings"},
    }
    for name, options in kinds.items():
        latest = similarity(trace, **options)
        if not latest.has_history.any():
            continue
        best = similarity(trace, follow="best", **options)
        control = similarity(trace, control_seed=CONTROL_SEED, **options) if several else None
        share = np.bincount(epoch, weights=latest.accepted)
        whole = np.bincount(epoch, weights=tokens * latest.has_history)
        known = np.flatnonzero(whole)
        found.append(
            {
                "history": name,
                "responses": int(latest.has_history.sum()),
                "accepted_share": latest.accepted_share(tokens),
                "best_match": best.accepted_share(tokens),
                "another_prompt": None if control is None else control.accepted_share(tokens),
                "by_epoch": pd.DataFrame(
                    {"epoch": known, "accepted_share": share[known] / whole[known]}
                ).to_dict("records"),
            }
        )
    return found


class _Groups(NamedTuple):
    """The responses to a prompt in an epoch, and the history of each such group; rows of the text, arrays (groups,), `edges`
    one longer. The history is from `low` to `high`, in the responses to one prompt, from `first` to `last`."""

    edges: Ints
    low: Ints
    high: Ints
    first: Ints
    last: Ints


@kernel
def _compare(
    text: Ints32, begin: Ints, groups: _Groups, best: bool
) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """Run the routine group by group over the responses that begin at `begin` in `text`. A -1 follows each, so that no run
    goes beyond its end."""
    rows = begin.shape[0] - 1
    has_history = np.zeros(rows, dtype=np.bool_)
    accepted = np.zeros(rows, dtype=np.int64)
    hits = np.zeros(np.max(np.diff(begin)), dtype=np.int64)
    table = np.empty(
        table_size(np.max(begin[groups.last] - begin[groups.first])), dtype=np.int32
    )  # latest places
    before = np.empty(text.shape[0], dtype=np.int32)  # the place before this one
    elsewhere = np.empty(
        text.shape[0], dtype=np.int32
    )  # the latest place in a response before this one's
    size, looked_up, inserted = 0, -1, 0
    for group in range(groups.low.shape[0]):
        low, high = groups.low[group], groups.high[group]
        if groups.first[group] != looked_up:  # another prompt's history
            looked_up = inserted = groups.first[group]
            size = table_size(begin[groups.last[group]] - begin[looked_up])
            table[:size] = -1
        while inserted < high:
            for place in range(begin[inserted] + PREFIX_TOKENS, begin[inserted + 1] - 1):
                slot = slot_of(text, table, size, place, PREFIX_TOKENS)
                head = table[slot]
                before[place] = head
                elsewhere[place] = head if head < begin[inserted] else elsewhere[head]
                table[slot] = place
            inserted += 1
        for row in range(groups.edges[group], groups.edges[group + 1]):
            own, end = begin[row], begin[row + 1] - 1
            has_history[row] = high - low > (low <= row < high)
            g = own + PREFIX_TOKENS
            while has_history[row] and g < end:
                place = table[slot_of(text, table, size, g, PREFIX_TOKENS)]
                run = 0
                while place >= begin[low]:
                    if own <= place < end:
                        place = elsewhere[place]
                        continue
                    if g + run < end and text[place + run] == text[g + run]:  # it may be longer
                        run = max(run, common_tokens(text, place, g, end - g))
                    if not best:
                        break
                    place = before[place]
                if run:
                    hits[run] += 1
                    accepted[row] += run
                g += max(run, 1)
    return has_history, accepted, hits
