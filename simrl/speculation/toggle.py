"""EfficientRollout's toggle and ladder (arXiv 2606.18967; furiosa-ai/EfficientRollout@0ff0bc5): when a
worker begins to draft in a rollout, and how many tokens.

Invariant: once on, it stays on to the end of the rollout. The number of draft tokens is one for all
workers and changes between rollouts only.

A worker looks before each pass: first it must have had more than `ramp` running requests (in
prefills, few run), then it begins as soon as

    accept length / (draft tokens × draft_s + verify_s) × decode_s >= 1 + margin

for the running requests at their mean length (`EngineCore._check_sd_toggle`). The pass after this
has no drafts yet. The accept length is what this worker had in its last rollout with drafts
(`wake_up`). Where the draft tokens have changed after a rollout in which it had none, it is the new
draft tokens (`force_set_gamma`, which comes first: a worker with drafts then takes what it had).
"""

from __future__ import annotations

from typing import NamedTuple

from simrl.profile.compiled import kernel
from simrl.speculation.choices import Toggle
from simrl.speculation.gates import ELASTIC_OFF, ELASTIC_ON

# States of an engine between `ELASTIC_OFF` and `ELASTIC_ON`.
ARMED, STARTS = 1, 2


class Ladder(NamedTuple):
    """The draft tokens of the next rollout, and the consecutive rollouts that asked for more
    (`step` 1) or for fewer (-1)."""

    draft_tokens: int
    step: int = 0
    rollouts: int = 0

    def after(self, rate: float, rule: Toggle) -> Ladder:
        """Return the ladder after a rollout with this acceptance rate of all workers' drafts
        (`AgentLoopManager._generate_sequences_impl`). A rollout without drafts changes nothing."""
        rung = rule.ladder.index(self.draft_tokens)
        step = int(rate >= rule.raise_at) - int(rate <= rule.lower_at)
        if not step or not 0 <= rung + step < len(rule.ladder):
            return Ladder(self.draft_tokens)
        rollouts = self.rollouts + 1 if step == self.step else 1
        if rollouts < rule.persistence:
            return Ladder(self.draft_tokens, step, rollouts)
        return Ladder(rule.ladder[rung + step])


def first_accept_length(rule: Toggle) -> float:
    """Return the accept length, in tokens a pass, that the first rollout is taken to have: with a
    ladder its first draft tokens, else `_cold_start_L`."""
    tokens, less = rule.ladder[0], [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    return float(tokens) - less[min(max(tokens - 2, 0) // 2, 6)] * (len(rule.ladder) == 1)


@kernel
def next_toggle(state: int, running: int, ramp: int, speedup: float, margin: float) -> int:
    """Return the state with which the next pass begins; `running` requests run then."""
    if state in (STARTS, ELASTIC_ON):
        return ELASTIC_ON
    if state == ELASTIC_OFF:
        return ARMED if running > ramp else ELASTIC_OFF
    return STARTS if running > 0 and speedup >= 1.0 + margin else ARMED
