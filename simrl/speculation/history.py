"""Drafting from the responses that a prompt had in earlier epochs: over a recorded trace, all at once.

Invariant: a response of epoch e drafts from responses of earlier epochs to the same prompt, and from nothing else but its own
tokens so far (not its prompt's: the paper matches the last generated tokens).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Tokens
from simrl.speculation.history_index import PAPER, HistoryRule, accept_runs_of, build_index
from simrl.trace import Trace

Ints = NDArray[np.int64]


def history_runs(
    trace: Trace,
    rule: HistoryRule = PAPER,
    epochs_back: int = 1,
    most_tokens: int = MOST_DRAFT_TOKENS,
    threads: int = 1,
) -> AcceptRuns:
    """What HistoSpec would draft at every position of a trace's responses, and how much of it is right.

    A row of epoch e drafts from all responses to its prompt in the epochs e - epochs_back … e - 1. `first` is -1 where there
    are none (so in the first epoch), and for rows without token ids. Prompts are shared among `threads`, which change nothing.

    Raises `InputError` for a trace without token ids; `ValueError` for an epochs_back below 1 or a most_tokens that is not
    from 1 to 32.
    """
    if epochs_back < 1 or not 1 <= most_tokens <= MOST_DRAFT_TOKENS:
        raise ValueError(f"epochs_back {epochs_back} must be at least 1, most_tokens {most_tokens} from 1 to 32")
    tokens, ends, known = _response_ids(trace)
    begins = ends - np.diff(ends, prepend=0)
    rewards = _rewards(trace)
    work = [
        (rows, history)
        for prompt in _by_prompt_and_epoch(trace, known)
        for rows, history in _with_history(prompt, epochs_back)
    ]
    drafts = np.zeros(len(trace), dtype=bool)
    for rows, _ in work:
        drafts[rows] = True
    lengths = np.where(drafts, ends - begins, 0)
    first = np.where(drafts, np.cumsum(lengths) - lengths, -1)
    drafted = np.zeros(int(lengths.sum()), dtype=np.uint8)
    accepted = np.zeros_like(drafted)

    def run(rows: Ints, history: Ints) -> None:
        responses = [tokens[begins[row] : ends[row]] for row in history]
        index = build_index(responses, None if rewards is None else rewards[history])
        places = np.column_stack((begins[rows], ends[rows], first[rows]))
        accept_runs_of(index, tokens, places, most_tokens, rule.compiled, drafted, accepted)

    if threads == 1:
        for rows, history in work:
            run(rows, history)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(run, *zip(*work, strict=True)) if work else ():
                pass
    return AcceptRuns(first, drafted, accepted)


def _response_ids(trace: Trace) -> tuple[Tokens, Ints, NDArray[np.bool_]]:
    """All token ids, where each row's end among them, and which rows have some."""
    if "response_ids" not in trace.table.column_names:
        raise InputError(
            f"trace {trace.metadata.name}: has no column 'response_ids'; drafting needs the tokens, import them with the text"
        )
    ids = trace.table.column("response_ids").combine_chunks()
    known: NDArray[np.bool_] = ids.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.where(known, trace.column("response_tokens"), 0)
    return ids.flatten().to_numpy(), np.cumsum(lengths, dtype=np.int64), known


def _rewards(trace: Trace) -> NDArray[np.float64] | None:
    return trace.column("reward").astype(np.float64) if "reward" in trace.table.column_names else None


def _by_prompt_and_epoch(trace: Trace, known: NDArray[np.bool_]) -> list[dict[int, Ints]]:
    """For each prompt its rows by epoch, epochs rising; rows in the order of the trace."""
    prompt, epoch = trace.column("prompt_id"), trace.column("epoch")
    order = np.lexsort((epoch, prompt))
    order = order[known[order]]
    changes = (np.diff(prompt[order]) != 0) | (np.diff(epoch[order]) != 0)
    prompts: dict[int, dict[int, Ints]] = {}
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        if len(rows):
            prompts.setdefault(int(prompt[rows[0]]), {})[int(epoch[rows[0]])] = rows
    return list(prompts.values())


def _with_history(by_epoch: dict[int, Ints], epochs_back: int) -> list[tuple[Ints, Ints]]:
    """(rows, the rows they draft from) for each epoch that has such."""
    found = []
    for epoch, rows in by_epoch.items():
        earlier = [by_epoch[e] for e in range(epoch - epochs_back, epoch) if e in by_epoch]
        if earlier:
            found.append((rows, np.concatenate(earlier)))
    return found
