"""How an engine decodes with drafts: what each request may draft from, and what becomes of it in a pass.

Invariant: what a pass drafts and accepts depends on the request, the tokens it has, and the state that is copied with the
engine's (windows, gauges); never on the time. So an engine can look ahead on a copy, and two systems meet the same luck.

A request has a *source*: nothing, recorded runs (`AcceptRuns`), a model's acceptance, or its siblings' responses as far as
this engine has generated them. The window, the gate and the strategy are the engine's. All of it is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.acceptance import accepted_tokens
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.gates import ELASTIC_ON, gate_allows
from simrl.speculation.siblings import SiblingIndex
from simrl.speculation.windows import Fixed, WindowRule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Rows of `drafts`, one column a request: where its drafts come from (with the offset of its runs, the key of its draws, or its
# row of the trace), its window; whether it drafts for the present pass, how many tokens, and how many of them are accepted; the
# old response that is verified as a whole and how much of it stands ...
SOURCE, AT, WINDOW, PROPOSED, DRAFTED, ACCEPTED, OLD_TOKENS, OLD_ACCEPTED = range(8)
# ... and totals: tokens drafted, tokens accepted, passes that verified a draft, drafts with a wrong token (decoupled only).
DRAFTED_TOTAL, ACCEPTED_TOTAL, VERIFICATIONS, MISSES_TOTAL = range(8, 12)
# Where drafting is decoupled: whether a request is coupled all the same; tokens drafted ahead, and those in verification, of
# which the first are right; tokens that it may still gain; whether the drafter works for it now, and may.
COUPLED, AHEAD, IN_VERIFICATION, RIGHT, LEFT, DRAFTING, DECODES = range(12, 19)
ROWS = 19

# Kinds of sources.
NONE, RUNS, MODEL, SIBLINGS = range(4)

# Kinds of gates.
OPEN, BATCH, ELASTIC = range(3)

# Entries of `gauges`: drafted and accepted tokens of late, the drift of the model's hardness; of a decoupled drafter, when its
# pass ends (infinity: it rests) and how many tokens it drafted.
LATE_DRAFTED, LATE_ACCEPTED, DRIFT, DRAFT_ENDS_S, DRAFT_TOKENS = range(5)
GAUGES = 5
# Entries of `flags`: the state of an elastic gate (`simrl.speculation.gates.next_elastic`).
ELASTIC_STATE = 0
FLAGS = 1

# Of the tokens drafted of late a pass forgets one in so many.
MEMORY_PASSES = 64.0


class Decoding(NamedTuple):
    """What compiled code knows of a speculation. `plain()` is none.

    `rule` has the entries named below. `runs` holds accepted × 256 + drafted for
    every position of every response that has runs. `log_acceptances` is `ModelAcceptance.log_acceptances`. A round of drafting
    for b sequences takes `round_s` + levels × `step_s`, both given at `draft_sequences`; a decoupled drafter's pass `step_s`.
    `gate_batch` is the largest batch that speculates at an acceptance rate of 0, 1, … 100 %. `best_window` and `best_coupled`
    are `simrl.speculation.specactor.reconfiguration_table`. `siblings` is the index of the trace whose rows requests with the
    source SIBLINGS are.
    """

    rule: Ints
    runs: NDArray[np.uint16]
    log_acceptances: Floats
    draft_sequences: Floats
    round_s: Floats
    step_s: Floats
    gate_batch: Ints
    best_window: Ints
    best_coupled: Ints
    siblings: SiblingIndex


# Entries of `Decoding.rule`. `RECONFIGURE_EVERY` so many tokens (0: never) a decoupled request may change its window and mode.
# `OWN_TEXT`: 1 if a request with the source SIBLINGS drafts from its own text too.
GATE, THRESHOLD, PATIENCE, WINDOW_CODE, WINDOW_START, WINDOW_STEP, WINDOW_MOST = range(7)
DECOUPLED, RECONFIGURE_EVERY, OWN_TEXT = range(7, 10)
RULES = 10


def rules(gate: int = OPEN, window: WindowRule | None = None, **more: int) -> Ints:
    """The entries of `Decoding.rule`; `more` are threshold, patience, decoupled, reconfigure_every and own_text."""
    window = window or Fixed(tokens=1).rule
    first = {"threshold": 0, "patience": 0}
    last = {"decoupled": 0, "reconfigure_every": 0, "own_text": 0}
    unknown = more.keys() - first.keys() - last.keys()
    if unknown:
        raise TypeError(f"no entries of a rule: {sorted(unknown)}")
    entries = first | last | more
    return np.array(
        [gate, *(entries[name] for name in first), *window, *(entries[name] for name in last)], dtype=np.int64
    )


def plain() -> Decoding:
    """No drafts at all."""
    nothing = np.zeros(1)
    return Decoding(
        rule=rules(),
        runs=np.zeros(1, dtype=np.uint16),
        log_acceptances=nothing,
        draft_sequences=nothing,
        round_s=nothing,
        step_s=nothing,
        gate_batch=np.zeros(101, dtype=np.int64),
        best_window=np.zeros(1, dtype=np.int64),
        best_coupled=np.zeros(1, dtype=np.int64),
        siblings=no_siblings(),
    )


def no_siblings() -> SiblingIndex:
    """The index of a trace without rows."""
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    none32, one32 = none.astype(np.int32), one.astype(np.int32)
    return read_only(SiblingIndex(none32, one, none, none, none32, one32, none32, 1, 1))


def read_only(index: SiblingIndex) -> SiblingIndex:
    """The same index as an engine takes it: its tokens, which may belong to a trace, cannot be written to. Compiled code tells
    arrays that can from those that cannot, and would be compiled once more for the other kind."""
    ids = index.ids.view()
    ids.flags.writeable = False
    return index._replace(ids=ids)


def packed(runs: AcceptRuns) -> NDArray[np.uint16]:
    """Runs as one array, so that a pass reads one place."""
    return (runs.accepted.astype(np.uint16) << 8 | runs.drafted).astype(np.uint16)


@njit(cache=True)
def window_rule(rule: Ints) -> WindowRule:
    """The rule of windows among the entries of `Decoding.rule`."""
    return WindowRule(rule[WINDOW_CODE], rule[WINDOW_START], rule[WINDOW_STEP], rule[WINDOW_MOST])


@njit(cache=True)
def draft(
    source: int,
    at: int,
    generated: int,
    window: int,
    hardness: float,
    runs: NDArray[np.uint16],
    log_acceptances: Floats,
) -> tuple[int, int]:
    """Tokens that a request drafts, and how many of them are accepted, when it has `generated` tokens."""
    if source == RUNS:
        run = int(runs[at + generated])
        drafted = min(run & 255, window)
        return drafted, min(run >> 8, drafted)
    if source == MODEL:
        return window, accepted_tokens(at, generated, hardness, log_acceptances, window)
    return 0, 0


@njit(cache=True)
def remember(gauges: Floats, drafted: int, accepted: int) -> None:
    """A pass is over: its drafts count among those of late, and what came before fades."""
    gauges[LATE_DRAFTED] = (gauges[LATE_DRAFTED] + drafted) * (1.0 - 1.0 / MEMORY_PASSES)
    gauges[LATE_ACCEPTED] = (gauges[LATE_ACCEPTED] + accepted) * (1.0 - 1.0 / MEMORY_PASSES)


@njit(cache=True)
def gate_opens(rule: Ints, gate_batch: Ints, flags: Ints, gauges: Floats, batch: int) -> bool:
    """Whether a pass over `batch` running requests verifies drafts (`simrl.speculation.gates`)."""
    if rule[GATE] == BATCH:
        return gate_allows(gate_batch, gauges[LATE_DRAFTED], gauges[LATE_ACCEPTED], batch)
    if rule[GATE] == ELASTIC:
        return flags[ELASTIC_STATE] == ELASTIC_ON
    return True
