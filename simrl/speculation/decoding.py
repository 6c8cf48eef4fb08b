"""Decoding with drafts: the sources from which a request may draft, and the accepted tokens of its
draft in a pass.

Invariant: what a pass drafts and accepts depends on the request, the tokens it has, and the
engine's state (windows, gauges); never on the time. So two systems have equal luck.

A request has a *source*: nothing, recorded runs (`AcceptRuns`), a model's acceptance, or its
siblings' responses as far as this engine has generated them. The window, the gate and the strategy
are the engine's. Drafts are chains as long as the window; where the engine has *strategies*, a
model's are trees, in each pass of the strategy that a bandit chooses. Of a tree, levels are drafted
and accepted; nodes are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile.compiled import kernel, lean
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.bandit import BanditRule, bandit_rule
from simrl.speculation.choices import BegMab, Strategy
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.gates import ELASTIC_ON, gate_allows
from simrl.speculation.matching import Floats as Floats, Ints as Ints
from simrl.speculation.siblings import SiblingIndex
from simrl.speculation.windows import Fixed, WindowRule

Runs = NDArray[np.uint16]
Records = Any  # a structured array; Python reads `array["field"]`, compiled code `array.field`

NONE, RUNS, MODEL, SIBLINGS = range(4)  # kinds of sources
OPEN, BATCH, ELASTIC, TOGGLE = range(4)  # kinds of gates
MEMORY_PASSES = 64.0  # a pass forgets 1 of this number of recently drafted tokens


class Draft:
    """The drafts of a request, one entry each; see `fields_of`."""

    source: int  # NONE, RUNS, MODEL or SIBLINGS
    at: int  # offset of its runs, key of its draws, or its row of the trace, by source
    runs_at: int  # the offset of what is drawn of a row's siblings; -1: their tokens are known
    hardness: float  # of its acceptance (`simrl.speculation.acceptance`)
    window: int

    drafted_total: int
    accepted_total: int
    verifications: int  # passes that verified a draft of it
    verified_total: int  # tokens that these passes yielded

    # Where drafting is decoupled:
    coupled: int  # whether the request is nevertheless coupled
    waits_for_drafts: int  # whether it has no window to verify, and is not in the pass
    ahead: int  # tokens drafted ahead
    in_verification: int  # tokens of the window in verification
    right: int  # how many of these are right
    drafting: int  # whether the drafter works for it now
    may: int  # tokens that the drafter may draft for it until the next verification ends
    # prompt tokens, an environment's among them, that the drafter has prefilled; 0: it has nothing
    drafter_prompt: int
    misses_total: int  # drafts with a wrong token
    unverified_total: int  # drafted tokens in no window that was verified

    # Read in every pass:
    proposed: int  # whether it drafts for the present pass
    drafted: int  # tokens of that draft
    accepted: int  # how many of these are accepted
    left: int  # tokens that it may still gain
    old_tokens: int  # tokens of an old response that is verified as a whole
    old_accepted: int  # how many of these are accepted


Drafts = Sequence[Draft]


class Gauges:
    """The memory of drafting for an engine, one number each; see `fields_of`."""

    recent_drafted: float  # drafted tokens, fading pass by pass
    recent_accepted: float  # accepted tokens, fading likewise
    drift: float  # multiplies the hardness of every response
    elastic_state: int  # of an elastic gate (`next_elastic`), or of a toggle (`next_toggle`)
    rollout_drafts: int  # drafts verified since the last load of weights …
    rollout_accepted: int  # … and the tokens accepted of them
    accept_length: float  # tokens a pass of the last rollout with drafts, for a toggle
    bandit_key: int  # of the draws of the bandit
    draft_ends_s: float  # when the pass of a decoupled drafter ends; infinity: it rests
    draft_tokens: int  # that a decoupled drafter has drafted


def fields_of(kind: type) -> np.dtype[np.void]:
    """Return the type of a structured array with the fields of a class, whose mutable records
    compiled code reads like objects of the class: `drafts[slot].window`, `gauges.drift`."""
    hints = get_type_hints(kind)
    return np.dtype([(name, np.float64 if of is float else np.int64) for name, of in hints.items()])


GAUGES = fields_of(Gauges)


class Rule(NamedTuple):
    """The rules of an engine; `threshold` and `patience` belong to an elastic gate, `threshold` and
    `margin` to a toggle."""

    gate: int = OPEN
    window: WindowRule = Fixed(tokens=1).rule
    threshold: int = 0
    patience: int = 0
    margin: float = 0.0
    decoupled: bool = False
    # tokens after which a decoupled request may change its window and mode; 0: never
    reconfigure_every: int = 0
    # whether a request with the source SIBLINGS drafts from its own text too
    own_text: bool = False
    trees: bool = False  # whether a model drafts trees; see `trees`
    rewards: int = 0  # latest rewards of an arm that count (`BegMab.window`)


def read_only(index: SiblingIndex) -> SiblingIndex:
    """Return an index as an engine takes it: its tokens, which may belong to a trace, cannot be
    written to. Compiled code tells arrays that can from those that cannot, and would be compiled
    once more for the other kind."""
    ids = index.ids.view()
    ids.flags.writeable = False
    return index._replace(ids=ids)


_NO_TIMES, _ONE = np.zeros((1, 1)), np.zeros(1, dtype=np.int64)
_NONE, _NONE_32 = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
_NO_SIBLINGS = SiblingIndex(
    _NONE_32, _ONE, _NONE, _NONE, _NONE_32, _ONE.astype(np.int32), _NONE_32, 1, 1, _NONE
)


class Decoding(NamedTuple):
    """A speculation as compiled code knows it; by default none. `chains` and `trees` are a
    drafter's; the other inputs of a scenario (runs, siblings, a gate's table …) are put in by
    `_replace`.

    `runs` holds accepted × 256 + drafted for every position of every response that has runs
    (`packed`).

    An arm is a strategy; chains are one arm. `log_acceptances` (arms, levels) is -ln P(the first j
    levels are accepted) at hardness 1 (`ModelAcceptance.log_acceptances`,
    `trees.tree_log_acceptances`), infinite where an arm has no such level. Of trees, `arm_levels`
    are drafted and `arm_nodes` verified with the last token, both (arms,). A round of drafting for
    b sequences takes `round_s` + levels × `step_s`, both (arms, batches), given at the batches
    `draft_sequences`; a decoupled drafter's pass takes `step_s`, and `round_s` more where a window
    begins in it. Where the drafter works, it takes `prefill_s` for each token that a pass prefills;
    a decoupled one, on each of its `draft_gpus`, for each token of a request that it has yet to
    prefill.
    `bandit` chooses among the arms.

    A drafter that attends to the target's cache has its times at `own_kv_tokens` a sequence, and
    takes as much longer as the target's attention does for the sequences of a pass. `accept_length`
    is what a toggle's first rollout is taken to have.

    `gate_batch` is the largest batch that speculates at an acceptance rate of 0, 1, … 100 %.
    `best_window` and `best_coupled` are `simrl.speculation.specactor.reconfiguration_table`.
    `siblings` is the index of the trace whose rows requests with the source SIBLINGS are
    (`read_only`).
    """

    rule: Rule = Rule()
    runs: Runs = np.zeros(1, dtype=np.uint16)
    log_acceptances: Floats = _NO_TIMES
    arm_levels: Ints = _ONE
    arm_nodes: Ints = _ONE
    draft_sequences: Floats = _NO_TIMES[0]
    round_s: Floats = _NO_TIMES
    step_s: Floats = _NO_TIMES
    prefill_s: float = 0.0
    draft_gpus: int = 1
    own_kv_tokens: float = 0.0
    accept_length: float = 0.0
    gate_batch: Ints = np.zeros(101, dtype=np.int64)
    best_window: Ints = _ONE
    best_coupled: Ints = _ONE
    siblings: SiblingIndex = read_only(_NO_SIBLINGS)
    bandit: BanditRule = bandit_rule(BegMab(strategies=(Strategy(1, 1, 2),), batch_thresholds=(1,)))


def chains(
    rule: Rule,
    times: DraftTimes,
    acceptance: ModelAcceptance | None = None,
    longest_tokens: int = 0,
) -> Decoding:
    """Return the decoding of a drafter of chains. With a model's acceptance, requests may have the
    source MODEL. `longest_tokens` is the longest window where decoupled requests may have longer
    ones than the rule's."""
    levels = max(rule.window.most_tokens, longest_tokens)
    logs = acceptance.log_acceptances(levels) if acceptance else np.full(levels, np.inf)
    return Decoding(
        rule=rule,
        log_acceptances=logs[None, :],
        draft_sequences=times.sequences,
        round_s=times.round_s[None, :],
        step_s=times.step_s[None, :],
        prefill_s=times.prefill_s,
    )


def trees(
    rule: Rule, bandit: BegMab, times: Sequence[DraftTimes], log_acceptances: Sequence[Floats]
) -> Decoding:
    """Return the decoding of a model that drafts trees: of the strategies that the bandit chooses,
    or of its only one. Other sources draft chains, with the windows of `rule`.

    `times` and `log_acceptances` have one entry a strategy, on equal batches: `model_drafts` or
    `eagle_drafts` with its topk, and `tree_log_acceptances` of it. Raise `InputError` for a
    strategy that verifies nothing with the last token.
    """
    logs = np.full(
        (len(times), max(strategy.draft_depth for strategy in bandit.strategies)), np.inf
    )
    for arm, (strategy, levels) in enumerate(zip(bandit.strategies, log_acceptances, strict=True)):
        if strategy.tokens_to_verify < 2:
            raise InputError(
                f"draft tree {tuple(strategy)} with an acceptance of shape {levels.shape}; "
                "let tokens_to_verify be at least 2, and the acceptance have one entry a level"
            )
        logs[arm, : levels.size] = levels
    return Decoding(
        rule=rule._replace(trees=True, rewards=bandit.window),
        log_acceptances=logs,
        arm_levels=np.array(
            [strategy.draft_depth for strategy in bandit.strategies], dtype=np.int64
        ),
        arm_nodes=np.array(
            [strategy.verified_tokens - 1 for strategy in bandit.strategies], dtype=np.int64
        ),
        draft_sequences=times[0].sequences,
        round_s=np.stack([arm_times.round_s for arm_times in times]),
        step_s=np.stack([arm_times.step_s for arm_times in times]),
        prefill_s=times[0].prefill_s,
        bandit=bandit_rule(bandit),
    )


def packed(runs: AcceptRuns) -> Runs:
    """Return runs as one array, so that a pass reads one place."""
    both = runs.accepted.astype(np.uint16)
    both <<= 8
    both |= runs.drafted
    return both


@lean
def draft(
    source: int,
    at: int,
    generated: int,
    window: int,
    hardness: float,
    runs: Runs,
    log_acceptances: Floats,
) -> tuple[int, int]:
    """Return the tokens that a request with `generated` tokens drafts as a chain, and how many of
    them are accepted. `log_acceptances` are an arm's."""
    if source == RUNS:
        run = int(runs[at + generated])
        drafted = min(run & 255, window)
        return drafted, min(run >> 8, drafted)
    if source == MODEL:
        return window, accepted_tokens(at, generated, hardness, log_acceptances, window)
    return 0, 0


@kernel
def remember(gauges: Gauges, drafted: int, accepted: int) -> None:
    """Count the drafts of a pass that is over among the recent ones; what came before fades."""
    gauges.recent_drafted = (gauges.recent_drafted + drafted) * (1.0 - 1.0 / MEMORY_PASSES)
    gauges.recent_accepted = (gauges.recent_accepted + accepted) * (1.0 - 1.0 / MEMORY_PASSES)


@lean
def passes_to_next_try(gauges: Gauges, most: int) -> int:
    """Return the passes without drafts, at most `most`, after which too little of the recent drafts
    is remembered."""
    recent, passes = gauges.recent_drafted, 0
    while recent >= 1.0 and passes < most:
        recent *= 1.0 - 1.0 / MEMORY_PASSES
        passes += 1
    return max(passes, 1)


@kernel
def gate_opens(rule: Rule, gate_batch: Ints, gauges: Gauges, batch: int) -> bool:
    """Return whether a pass over `batch` running requests verifies drafts
    (`simrl.speculation.gates`)."""
    if rule.gate == BATCH:
        return gate_allows(gate_batch, gauges.recent_drafted, gauges.recent_accepted, batch)
    if rule.gate == ELASTIC or rule.gate == TOGGLE:
        return gauges.elastic_state == ELASTIC_ON
    return True
