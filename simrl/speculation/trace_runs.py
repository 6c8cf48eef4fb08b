"""Drafts of a text drafter at every position of a trace's responses: counted from its tokens, or
drawn from a run model where it has none; fewer of them are accepted where
`speculation.acceptance_factor` is below 1.

Refusals: some tokens of a response are refused wherever they are drafted, each with a probability
of 1 - factor, drawn for its place; a draft is accepted up to the first of them. Invariant: a draw
belongs to (seed, prompt, epoch, sample, place), whatever drafts; and what is accepted at one factor
is accepted at every larger one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.extensions import raised_in
from simrl.profile.compiled import kernel, part
from simrl.speculation.choices import HistoryRule
from simrl.speculation.decoding import packed
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Drafter
from simrl.speculation.draws import mixed, uniform
from simrl.speculation.history_index import PAPER, accept_runs_of, build_index
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.matching import Ints, epoch_keys, has_token_ids, joined, token_ids
from simrl.speculation.methods import Speculation
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.run_model import (
    CompiledModel,
    RunModel,
    compiled_model,
    draw_response,
    rows_with_drafts,
    sample_keys,
)
from simrl.trace.trace import Trace

_REFUSED = -2  # the place, under a sample's key, of the key of these draws; -1 is a run model's


class DrawnRuns:
    """The runs of responses that are generated now, on a trace without token ids: each is drawn
    when its response begins somewhere, so memory follows the batch and not the trace.

    `packed` has them as engines read them (`decoding.packed`); it is another array where it had to
    grow. The numbers are those of `draw_trace_runs` and `with_refusals`. Without `served`, shape
    (rows,), a row has no drafts.
    """

    def __init__(
        self, model: RunModel, trace: Trace, seed: int, factor: float, served: NDArray[np.bool_]
    ) -> None:
        self._model, self._factor, self._served = compiled_model(model), factor, served
        self._tokens, self._keys = (
            trace.column("response_tokens").astype(np.int64),
            sample_keys(trace, seed),
        )
        self._long = self._tokens > model.typical_tokens
        _, begin, end = trace.step_slices[0]
        # Mostly enough for a run; the operating system gives memory only to the part that is used.
        self.packed = np.zeros(2 * int(self._tokens[begin:end].sum()), np.uint16)
        self._used = 0
        self._free: dict[int, list[int]] = {}  # by size
        self._held: dict[Hashable, tuple[int, int]] = {}  # first and size, by holder

    def first(
        self, holder: Hashable, row: int, missing: frozenset[tuple[int, int]] = frozenset()
    ) -> int:
        """Return where a holder's runs of a row begin, -1 if the row has no drafts. A holder has
        one row until `free`. They are drawn as of a whole history, whatever is `missing`."""
        if not self._served[row]:
            return -1
        if holder not in self._held:
            tokens = self._tokens.item(row)
            size = 1 << (tokens - 1).bit_length()
            same = self._free.setdefault(size, [])
            first = same.pop() if same else self._used
            self._used = max(self._used, first + size)
            if self._used > self.packed.size:
                self.packed = np.concatenate((self.packed, np.zeros(self._used, np.uint16)))
            self._held[holder] = first, size
            key, out = self._keys.item(row), self.packed[first : first + tokens]
            _draw_packed(out, key, self._long.item(row), self._model, self._factor)
        return self._held[holder][0]

    def free(self, holder: Hashable) -> None:
        """Let the place of a holder's runs be used again."""
        if holder in self._held:
            first, size = self._held.pop(holder)
            self._free[size].append(first)


@kernel
def _draw_packed(
    out: NDArray[np.uint16], key: int, long: bool, model: CompiledModel, factor: float
) -> None:
    """Draw the runs of a response, as `decoding.packed` has them."""
    drafted, accepted = np.zeros(out.size, np.uint8), np.zeros(out.size, np.uint8)
    draw_response(drafted, accepted, out.size, key, long, model)
    if factor < 1.0:
        _cut(accepted, key, factor)
    for p in range(out.size):
        out[p] = accepted[p] * 256 + drafted[p]


class HistoryRuns:
    """The runs of a history, of which responses may be missing: a group with a dropped response.

    `packed` has the `whole` history's runs as engines read them (`decoding.packed`), then those that
    were made anew without what is missing; it is another array where it had to grow.
    """

    def __init__(
        self,
        whole: AcceptRuns,
        speculation: Speculation,
        inputs: SpeculationInputs,
        trace: Trace,
        seed: int,
    ) -> None:
        self.packed = packed(whole)
        self._whole, self._used = whole, self.packed.size
        self._rule, self._back = speculation.history, speculation.epochs_back
        self._factor, self._trace, self._seed = inputs.acceptance_factor, trace, seed
        self._first: dict[tuple[int, frozenset[tuple[int, int]]], int] = {}

    def first(self, holder: Hashable, row: int, missing: frozenset[tuple[int, int]]) -> int:
        """Return where a row's runs begin, -1 if it has no drafts, for a history without the
        `missing` (epoch, sample)."""
        if not missing or self._whole.first[row] < 0:
            return int(self._whole.first[row])
        if (row, missing) not in self._first:
            self._add(row, missing)
        return self._first[row, missing]

    def _add(self, row: int, missing: frozenset[tuple[int, int]]) -> None:
        """Add the runs of a row and of its siblings, the rows of its prompt and epoch."""
        trace = self._trace
        keys, epochs = trace.once("epoch_keys", lambda: epoch_keys(trace))
        oldest = keys[row] - min(keys[row] % epochs, self._back)
        rows = np.flatnonzero((keys >= oldest) & (keys <= keys[row]))
        places = zip(
            *(trace.column(name)[rows].tolist() for name in ("epoch", "sample")), strict=True
        )
        rows = rows[(keys[rows] == keys[row]) | [place not in missing for place in places]]
        part = Trace(trace.table.take(rows), trace.metadata)
        runs = with_refusals(
            history_runs(part, self._rule, self._back), part, self._seed, self._factor
        )
        end = self._used + runs.drafted.size
        if end > self.packed.size:
            self.packed = np.concatenate((self.packed, np.zeros(end, np.uint16)))
        self.packed[self._used : end] = packed(runs)
        self._first |= {
            (each, missing): self._used + first if first >= 0 else -1
            for each, first in zip(rows.tolist(), runs.first.tolist(), strict=True)
            if keys[each] == keys[row]  # the others' own history is not whole here
        }
        self._used = end


def text_runs(
    speculation: Speculation, inputs: SpeculationInputs, trace: Trace, seed: int
) -> AcceptRuns | DrawnRuns:
    """Return what a text drafter (history, ngram or a method's own) drafts on a trace."""
    factor = inputs.acceptance_factor
    if not has_token_ids(trace):
        model = inputs.runs_of(speculation.drafter)  # type: ignore[arg-type]
        return DrawnRuns(
            model, trace, seed, factor, rows_with_drafts(model, trace, speculation.epochs_back)
        )
    make, rule, back = speculation.make_drafter, speculation.history, speculation.epochs_back
    if make is not None:
        runs = trace.once(("drafter", make), lambda: drafter_runs(trace, make))
    elif speculation.drafter == "ngram":
        runs = trace.once("ngram", lambda: ngram_runs(trace))
    else:
        threads = os.cpu_count() or 1
        runs = trace.once(
            ("history", rule, back),
            lambda: history_runs(trace, rule, back, MOST_DRAFT_TOKENS, threads),
        )
    return with_refusals(runs, trace, seed, factor)


def history_runs(
    trace: Trace,
    rule: HistoryRule = PAPER,
    epochs_back: int = 1,
    most_tokens: int = MOST_DRAFT_TOKENS,
    threads: int = 1,
) -> AcceptRuns:
    """Return what HistoSpec would draft at every position of a trace's responses, and how much of
    it is right.

    A row of epoch e drafts from all responses to its prompt in the epochs e - epochs_back … e - 1,
    by its own tokens so far and, if the rule says so, the last ones of its prompt. `first` is -1
    where there are none (so in the first epoch), and for rows without token ids. Drafts have up to
    `most_tokens` (at most 32). Prompts are shared among `threads`, which change nothing. Raise
    `InputError` for a trace without token ids.
    """
    tokens, bounds = token_ids(trace, some=True)
    begins, ends = bounds[:-1], bounds[1:]
    rewards = (
        trace.column("reward").astype(np.float64) if "reward" in trace.table.column_names else None
    )
    keys, epochs = epoch_keys(trace)
    order = np.argsort(keys, kind="stable")
    order = order[(ends > begins)[order]]
    keys, starts = np.unique(keys[order], return_index=True)
    oldest = np.searchsorted(keys, keys - np.minimum(keys % epochs, epochs_back))
    edges = np.r_[starts, len(order)]
    work = [
        (order[edges[group] : edges[group + 1]], order[edges[old] : edges[group]])
        for group, old in enumerate(oldest)
        if old < group
    ]
    drafts = np.zeros(len(trace), dtype=bool)
    for rows, _ in work:
        drafts[rows] = True
    lengths = np.where(drafts, ends - begins, 0)
    first = np.where(drafts, np.cumsum(lengths) - lengths, -1)
    drafted = np.zeros(int(lengths.sum()), dtype=np.uint8)
    accepted, tail = np.zeros_like(drafted), rule.prompt_tail

    def run(rows: Ints, history: Ints) -> None:
        responses = [np.r_[tail, tokens[begins[row] : ends[row]]] for row in history]
        index = build_index(responses, None if rewards is None else rewards[history])
        text, at = joined([np.r_[tail, tokens[begins[row] : ends[row]]] for row in rows])
        places = np.column_stack((at[:-1] + tail.size, at[1:] - 1, first[rows]))
        accept_runs_of(
            index, text, places, most_tokens, rule.compiled, drafted, accepted, tail.size
        )

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda rows: run(*rows), work))
    return AcceptRuns(first, drafted, accepted)


def drafter_runs(
    trace: Trace, make_drafter: Callable[[], Drafter], most_tokens: int = MOST_DRAFT_TOKENS
) -> AcceptRuns:
    """Return the drafts of the drafters that `make_drafter` makes on a trace's responses, up to
    `most_tokens` each time.

    Each response has a drafter of its own, and a draft for position p is made from the p tokens
    before it. This is for drafters of other packages, with a call a token: a million tokens take
    some ten seconds. Raise `InputError` for a trace without token ids, and for a draft longer than
    `most_tokens`.
    """
    ids, first = token_ids(trace)
    drafted, accepted = np.zeros((2, len(ids)), dtype=np.uint8)
    with raised_in("speculation: a drafter of a package"):
        for row, prompt_id in enumerate(trace.column("prompt_id").tolist()):
            begin, end = int(first[row]), int(first[row + 1])
            drafter = make_drafter()
            drafter.start_request(row, prompt_id)
            for here in range(begin, end):
                (draft,) = drafter.propose([row], [most_tokens])
                if len(draft) > most_tokens:
                    raise InputError(
                        f"drafter {type(drafter).__name__}: drafted {len(draft)} tokens, at most {most_tokens} are "
                        "allowed; cut its drafts"
                    )
                drafted[here] = len(draft)
                wrong = np.flatnonzero(
                    draft[: end - here] != ids[here : here + len(draft)][: end - here]
                )
                accepted[here] = wrong[0] if len(wrong) else min(len(draft), end - here)
                drafter.observe(row, ids[here : here + 1])
            drafter.stop_request(row)
    return AcceptRuns(first[:-1].copy(), drafted, accepted)


def drawn_sibling_runs(inputs: SpeculationInputs, trace: Trace, seed: int) -> DrawnRuns:
    """Return what siblings draft on a trace without token ids; a response alone in its group has
    none to draft from."""
    model = inputs.runs_of("siblings")
    step, prompt = (trace.column(name).astype(np.int64) for name in ("step", "prompt_id"))
    _, group, sizes = np.unique(
        step * (prompt.max() + 1) + prompt, return_inverse=True, return_counts=True
    )
    served = rows_with_drafts(model, trace) & (sizes[group] > 1)
    return DrawnRuns(model, trace, seed, inputs.acceptance_factor, served)


def with_refusals(runs: AcceptRuns, trace: Trace, seed: int, factor: float) -> AcceptRuns:
    """Return the runs of a trace with each accepted token accepted with the probability
    `factor`."""
    if factor >= 1.0:
        return runs
    tokens = trace.column("response_tokens").astype(np.int64)
    return runs._replace(
        accepted=_cut_short(runs.first, runs.accepted, tokens, sample_keys(trace, seed), factor)
    )


def accepted_prefixes(accepted: Ints, trace: Trace, seed: int, factor: float) -> Ints:
    """Return the accepted tokens of whole-response drafts after refusals; shape (rows,)."""
    if factor >= 1.0:
        return accepted
    return _prefixes(accepted, sample_keys(trace, seed), factor)


@kernel
def _cut_short(
    first: Ints, accepted: NDArray[np.uint8], tokens: Ints, keys: Ints, factor: float
) -> NDArray[np.uint8]:
    out = accepted.copy()
    for row in range(first.shape[0]):
        if first[row] < 0:
            continue
        _cut(out[first[row] : first[row] + tokens[row]], keys[row], factor)
    return out


@part
def _cut(accepted: NDArray[np.uint8], key: int, factor: float) -> None:
    """Cut the accepted tokens of a response, at every position, at the first that is refused."""
    key, refused = mixed(key, _REFUSED), accepted.size
    for p in range(accepted.size - 1, -1, -1):
        if uniform(key, p) >= factor:
            refused = p
        accepted[p] = min(int(accepted[p]), refused - p)


@kernel
def _prefixes(accepted: Ints, keys: Ints, factor: float) -> Ints:
    out = accepted.copy()
    for row in range(accepted.shape[0]):
        key, p = mixed(keys[row], _REFUSED), 0
        while p < accepted[row] and uniform(key, p) < factor:
            p += 1
        out[row] = p
    return out
