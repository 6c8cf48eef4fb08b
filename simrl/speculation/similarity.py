"""How much of a response stands in other responses already: the routine behind RhymeRL's Fig. 6 (arXiv 2508.18588, §5.1).

The response is "generated" again from its beginning. Its last `prefix` tokens (3) are looked up in the history. Where they
stand there, the tokens that follow in both are compared, and as many as are identical count as accepted; where they do not, or
where not even one is identical, one token is generated. So it goes on to the end of the response.

Invariant: the history of a response is what the caller named (epochs before its own, or the other responses of its group) and
never holds the response itself; each token of it is accepted or generated, exactly once.

The paper does not say which match is followed where there are several: `follow="latest"` takes the latest place of the newest
response, as one scan from the end would; `follow="best"` the longest run there is, an upper bound that no drafter can know.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.matching import Ints, Ints32, hashed, token_ids
from simrl.trace import Trace

PREFIX_TOKENS = 3
Follow = Literal["latest", "best"]


class Similarity(NamedTuple):
    """What the routine found, row by row of the trace.

    `has_history` (rows,) tells the rows that have something to be compared with; only they count. `accepted` (rows,) are the
    tokens that the history gave. `hits[n]` is how many hits were n tokens long; shape (longest response + 1,), `hits[0]` is 0.
    """

    has_history: NDArray[np.bool_]
    accepted: Ints
    hits: Ints

    def accepted_share(self, response_tokens: Ints) -> float:
        """Of the tokens of the rows that have a history; NaN where none has one."""
        tokens = int(response_tokens[self.has_history].sum(dtype=np.int64))
        return int(self.accepted.sum()) / tokens if tokens else float("nan")


def similarity(
    trace: Trace,
    history: Literal["epochs", "siblings"] = "epochs",
    epochs_back: int | None = 1,
    follow: Follow = "latest",
    prefix: int = PREFIX_TOKENS,
    control_seed: int | None = None,
) -> Similarity:
    """Runs the routine over a trace with token ids.

    With "epochs", a response is compared with all responses to its prompt in the latest `epochs_back` epochs before its own in
    which there were any (None: in all). With "siblings", with the other responses to its prompt in the same epoch, all of them
    whole. A `control_seed` compares with the responses to another prompt instead, which one is drawn: what remains is what any
    two responses of this model have in common. Raises `InputError` for a trace without token ids and for numbers below 1.
    """
    if history not in ("epochs", "siblings") or follow not in ("latest", "best"):
        raise InputError(
            f"similarity: history {history!r}, follow {follow!r}; choose epochs or siblings, latest or best"
        )
    if prefix < 1 or (epochs_back is not None and epochs_back < 1):
        raise InputError(f"similarity: prefix {prefix}, epochs_back {epochs_back}; both count from 1")
    ids, first = token_ids(trace)
    prompt, epoch = trace.column("prompt_id"), trace.column("epoch").astype(np.int64)
    rows = np.lexsort((trace.column("sample"), trace.column("step"), epoch, prompt)).astype(np.int64)
    _, starts = np.unique(prompt[rows], return_index=True)
    edges = np.r_[starts, len(rows)].astype(np.int64)
    source = np.arange(len(starts))
    if control_seed is not None:
        if len(starts) < 2:
            raise InputError(f"trace {trace.metadata.name!r}: one prompt only; a control needs another one")
        order = np.random.default_rng(control_seed).permutation(len(starts))
        source[order] = np.roll(order, 1)
    back = np.iinfo(np.int64).max if epochs_back is None else epochs_back
    return Similarity(
        *_compare(ids, first, rows, edges, source, epoch, prefix, back, history == "siblings", follow == "best")
    )


@njit(cache=True)
def _slot(text: Ints32, table: Ints32, mask: int, ids: Ints32, end: int, prefix: int) -> int:
    """Where the table has, or would have, the `prefix` tokens before `end` of `ids`."""
    slot = hashed(ids, end, prefix) & mask
    while table[slot] >= 0:
        i = 1
        while i <= prefix and text[table[slot] - i] == ids[end - i]:
            i += 1
        if i > prefix:
            break
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def _compare(
    ids: Ints32,
    first: Ints,
    rows: Ints,
    edges: Ints,
    source: Ints,
    epoch: Ints,
    prefix: int,
    epochs_back: int,
    siblings: bool,
    best: bool,
) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """Prompt by prompt: `rows[edges[i]:edges[i + 1]]` are prompt i's by epoch, its history the rows of prompt `source[i]`.

    The history is copied into `text`, a -1 after each response, so that no run goes beyond its end.
    """
    has_history = np.zeros(rows.shape[0], dtype=np.bool_)
    accepted = np.zeros(rows.shape[0], dtype=np.int64)
    longest, most = 0, 0
    for i in range(edges.shape[0] - 1):
        total = 0
        for at in range(edges[i], edges[i + 1]):
            tokens = first[rows[at] + 1] - first[rows[at]]
            longest = max(longest, tokens)
            total += tokens + 1
        most = max(most, total)
    hits = np.zeros(longest + 1, dtype=np.int64)
    size = 16
    while size < 2 * most:
        size *= 2
    table = np.empty(size, dtype=np.int32)  # the latest place of some tokens
    text = np.empty(most, dtype=np.int32)
    before = np.empty(most, dtype=np.int32)  # the place before this one
    elsewhere = np.empty(most, dtype=np.int32)  # the latest place in a response before this one's
    response_at = np.empty(rows.shape[0] + 1, dtype=np.int64)  # where the history's responses begin in `text`
    for i in range(edges.shape[0] - 1):
        h, h_end = edges[source[i]], edges[source[i] + 1]
        total = 0
        for at in range(h, h_end):
            total += first[rows[at] + 1] - first[rows[at]] + 1
        size = 16
        while size < 2 * total:
            size *= 2
        mask = size - 1
        table[:size] = -1
        filled, epochs = 0, 0  # of `text`; epochs that it has
        low = 0  # the history begins here
        inserted = h
        at = edges[i]
        while at < edges[i + 1]:
            now = epoch[rows[at]]
            while inserted < h_end and (epoch[rows[inserted]] < now or (siblings and epoch[rows[inserted]] == now)):
                row = rows[inserted]
                begin = filled
                response_at[inserted - h] = begin
                for g in range(first[row], first[row + 1]):
                    text[filled] = ids[g]
                    filled += 1
                text[filled] = -1
                filled += 1
                for place in range(begin + prefix, filled - 1):
                    slot = _slot(text, table, mask, text, place, prefix)
                    head = table[slot]
                    before[place] = head
                    elsewhere[place] = head if head < begin else elsewhere[head]
                    table[slot] = place
                inserted += 1
            response_at[inserted - h] = filled
            # The first response of the history.
            oldest, epochs, last = inserted, 0, -1
            while oldest > h:
                number = epoch[rows[oldest - 1]]
                if number != last:
                    if epochs == epochs_back or (siblings and number != now):
                        break
                    epochs += 1
                    last = number
                oldest -= 1
            low = response_at[oldest - h]
            while at < edges[i + 1] and epoch[rows[at]] == now:
                row = rows[at]
                own, own_end = 0, 0  # the response's own place in the history
                if siblings and source[i] == i:
                    own, own_end = response_at[at - h], response_at[at - h + 1]
                begin, end = first[row], first[row + 1]
                has_history[row] = filled - low > own_end - own
                g = begin + prefix
                while has_history[row] and g < end:
                    place = table[_slot(text, table, mask, ids, g, prefix)]
                    run = 0
                    while place >= low:
                        if own <= place < own_end:
                            place = elsewhere[place]
                            continue
                        if g + run < end and text[place + run] == ids[g + run]:  # it may be longer
                            n = 0
                            while g + n < end and text[place + n] == ids[g + n]:
                                n += 1
                            run = max(run, n)
                        if not best:
                            break
                        place = before[place]
                    if run:
                        hits[run] += 1
                        accepted[row] += run
                    g += max(run, 1)
                at += 1
    return has_history, accepted, hits
