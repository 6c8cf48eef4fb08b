"""How an engine decodes with drafts: what each request may draft from, and what becomes of it in a pass.

Invariant: what a pass drafts and accepts depends on the request, the tokens it has, and the state that is copied with the
engine's (windows, gauges); never on the time. So an engine can look ahead on a copy, and two systems meet the same luck.

A request has a *source*: nothing, recorded runs (`AcceptRuns`), a model's acceptance, or its siblings' responses as far as
this engine has generated them. The window, the gate and the strategy are the engine's. All of it is compiled.

Drafts are chains as long as the window, but for those of a model where the engine has *strategies*: then they are trees, of the
one strategy, or in each pass of the one that a bandit chooses. Of a tree, levels are drafted and accepted; nodes are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.bandit import BegMab, Strategy
from simrl.speculation.bandit_kernel import BanditRule, bandit_rule
from simrl.speculation.draft_times import DraftTimes
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
# ... and totals: tokens drafted, tokens accepted, passes that verified a draft, tokens that these passes
# yielded, drafts with a wrong token (decoupled only).
DRAFTED_TOTAL, ACCEPTED_TOTAL, VERIFICATIONS, VERIFIED_TOTAL, MISSES_TOTAL = range(8, 13)
# Where drafting is decoupled: whether a request is coupled all the same; tokens drafted ahead, and those in verification, of
# which the first are right; tokens that it may still gain; whether the drafter works for it now, and may; of the tokens drafted
# in all, those in no window that was verified.
COUPLED, AHEAD, IN_VERIFICATION, RIGHT, LEFT, DRAFTING, DECODES, UNVERIFIED_TOTAL = range(13, 21)
ROWS = 21

# Kinds of sources.
NONE, RUNS, MODEL, SIBLINGS = range(4)

# Kinds of gates.
OPEN, BATCH, ELASTIC = range(3)

# Entries of `gauges`: drafted and accepted tokens of late, the drift of the model's hardness; of a decoupled drafter, when its
# pass ends (infinity: it rests) and how many tokens it drafted.
LATE_DRAFTED, LATE_ACCEPTED, DRIFT, DRAFT_ENDS_S, DRAFT_TOKENS = range(5)
GAUGES = 5
# Entries of `flags`: the state of an elastic gate (`simrl.speculation.gates.next_elastic`); the key of the bandit's draws.
ELASTIC_STATE, BANDIT_KEY = range(2)
FLAGS = 2

# Of the tokens drafted of late a pass forgets one in so many.
MEMORY_PASSES = 64.0


class Decoding(NamedTuple):
    """What compiled code knows of a speculation. `plain()` is none; `chains` and `trees` are a drafter's; what else a scenario
    has (runs, siblings, a gate's table …) is put in by `_replace`.

    `rule` has the entries named below. `runs` holds accepted × 256 + drafted for every position of every response that has
    runs (`packed`).

    An arm is a strategy; chains are one arm. `log_acceptances` (arms, levels) is -ln P(the first j levels are accepted) at
    hardness 1 (`ModelAcceptance.log_acceptances`, `trees.tree_log_acceptances`), infinite where an arm has no such level. Of
    trees, `arm_levels` and `arm_nodes` (arms,) are drafted and verified besides the last token. A round of drafting for b
    sequences takes `round_s` + levels × `step_s`, both (arms, batches), given at the batches `draft_sequences`; a decoupled
    drafter's pass takes `step_s`. `bandit` chooses among the arms.

    `gate_batch` is the largest batch that speculates at an acceptance rate of 0, 1, … 100 %. `best_window` and `best_coupled`
    are `simrl.speculation.specactor.reconfiguration_table`. `siblings` is the index of the trace whose rows requests with the
    source SIBLINGS are (`read_only`).
    """

    rule: Ints
    runs: NDArray[np.uint16]
    log_acceptances: Floats
    arm_levels: Ints
    arm_nodes: Ints
    draft_sequences: Floats
    round_s: Floats
    step_s: Floats
    gate_batch: Ints
    best_window: Ints
    best_coupled: Ints
    siblings: SiblingIndex
    bandit: BanditRule


# Entries of `Decoding.rule`. `RECONFIGURE_EVERY` so many tokens (0: never) a decoupled request may change its window and mode.
# `OWN_TEXT`: 1 if a request with the source SIBLINGS drafts from its own text too. `TREES`: 1 if a model's drafts are those of
# the arms. `REWARDS`: so many of an arm's rewards count, the latest (`BegMab.window`).
GATE, THRESHOLD, PATIENCE, WINDOW_CODE, WINDOW_START, WINDOW_STEP, WINDOW_MOST = range(7)
DECOUPLED, RECONFIGURE_EVERY, OWN_TEXT, TREES, REWARDS = range(7, 12)
RULES = 12


def rules(gate: int = OPEN, window: WindowRule | None = None, **more: int) -> Ints:
    """The entries of `Decoding.rule`; `more` are threshold, patience, decoupled, reconfigure_every and own_text (`trees` sees
    to its own)."""
    window = window or Fixed(tokens=1).rule
    first = {"threshold": 0, "patience": 0}
    last = {"decoupled": 0, "reconfigure_every": 0, "own_text": 0, "trees": 0, "rewards": 0}
    unknown = more.keys() - first.keys() - last.keys()
    if unknown:
        raise TypeError(f"no entries of a rule: {sorted(unknown)}")
    entries = first | last | more
    return np.array(
        [gate, *(entries[name] for name in first), *window, *(entries[name] for name in last)], dtype=np.int64
    )


def plain() -> Decoding:
    """No drafts at all."""
    nothing, no_arm = np.zeros((1, 1)), np.zeros(1, dtype=np.int64)
    return Decoding(
        rule=rules(),
        runs=np.zeros(1, dtype=np.uint16),
        log_acceptances=nothing,
        arm_levels=no_arm,
        arm_nodes=no_arm,
        draft_sequences=np.zeros(1),
        round_s=nothing,
        step_s=nothing,
        gate_batch=np.zeros(101, dtype=np.int64),
        best_window=np.zeros(1, dtype=np.int64),
        best_coupled=np.zeros(1, dtype=np.int64),
        siblings=no_siblings(),
        bandit=bandit_rule(BegMab(strategies=(Strategy(1, 1, 2),), batch_thresholds=(1,))),
    )


def chains(
    rule: Ints, times: DraftTimes, acceptance: ModelAcceptance | None = None, longest_tokens: int = 0
) -> Decoding:
    """Drafts as long as the window, and how long drafting takes; `rule` by `rules`. With a model's acceptance, requests may
    have the source MODEL. `longest_tokens` is the longest window where decoupled requests may have longer ones than the
    rule's."""
    levels = max(int(rule[WINDOW_MOST]), longest_tokens)
    logs = acceptance.log_acceptances(levels) if acceptance else np.full(levels, np.inf)
    return plain()._replace(
        rule=rule,
        log_acceptances=logs[None, :],
        draft_sequences=times.sequences,
        round_s=times.round_s[None, :],
        step_s=times.step_s[None, :],
    )


def trees(rule: Ints, bandit: BegMab, times: Sequence[DraftTimes], log_acceptances: Sequence[Floats]) -> Decoding:
    """A model's drafts are trees, of the bandit's strategies; of its only one where there is one. Other sources have chains,
    with the windows of `rule`.

    `times` and `log_acceptances` have one entry a strategy: `model_drafts` or `eagle_drafts` with its topk, and
    `tree_log_acceptances` of it. Raises `InputError` for a strategy that verifies nothing besides the last token, and for
    draft times on different batches.
    """
    strategies = bandit.strategies
    if not len(times) == len(log_acceptances) == len(strategies):
        raise InputError(f"{len(strategies)} strategies, {len(times)} draft times, {len(log_acceptances)} acceptances")
    for strategy, logs in zip(strategies, log_acceptances, strict=True):
        if strategy.tokens_to_verify < 2 or logs.shape != (strategy.draft_depth,):
            raise InputError(
                f"draft tree {tuple(strategy)} with an acceptance of shape {logs.shape}; "
                "let tokens_to_verify be at least 2, and the acceptance have one entry a level"
            )
    sequences = times[0].sequences
    if any(not np.array_equal(each.sequences, sequences) for each in times):
        raise InputError("draft times of strategies are given for different batches; let them be the same")
    levels = np.array([strategy.draft_depth for strategy in strategies], dtype=np.int64)
    logs = np.full((len(strategies), levels.max()), np.inf)
    for arm, given in enumerate(log_acceptances):
        logs[arm, : given.size] = given
    rule = rule.copy()
    rule[TREES], rule[REWARDS] = 1, bandit.window
    return plain()._replace(
        rule=rule,
        log_acceptances=logs,
        arm_levels=levels,
        arm_nodes=np.array([strategy.tokens_to_verify - 1 for strategy in strategies], dtype=np.int64),
        draft_sequences=sequences,
        round_s=np.stack([each.round_s for each in times]),
        step_s=np.stack([each.step_s for each in times]),
        bandit=bandit_rule(bandit),
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
    """Tokens of the chain that a request drafts, and how many of them are accepted, when it has `generated` tokens.
    `log_acceptances` are an arm's."""
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
def passes_to_next_try(gauges: Floats, most: int) -> int:
    """Of passes without drafts, at most so many: those after which too little of the drafts of late is remembered."""
    late, passes = gauges[LATE_DRAFTED], 0
    while late >= 1.0 and passes < most:
        late *= 1.0 - 1.0 / MEMORY_PASSES
        passes += 1
    return max(passes, 1)


@njit(cache=True)
def gate_opens(rule: Ints, gate_batch: Ints, flags: Ints, gauges: Floats, batch: int) -> bool:
    """Whether a pass over `batch` running requests verifies drafts (`simrl.speculation.gates`)."""
    if rule[GATE] == BATCH:
        return gate_allows(gate_batch, gauges[LATE_DRAFTED], gauges[LATE_ACCEPTED], batch)
    if rule[GATE] == ELASTIC:
        return flags[ELASTIC_STATE] == ELASTIC_ON
    return True
