"""SGLang's scheduler, as of 0.5.23 (`schedule_policy.py`, `schedule_batch.py`): how much of the KV
cache admission holds back, and who is retracted.

Invariant: a pass computes contexts or decodes, and contexts go first. A request starts if its
context and the tokens that it and the running ones are taken to generate fit the cache: its own
count whole, those of running ones by a ratio that decays with the passes that decode. Once one does
not fit, nobody starts until a request leaves (`full_at`). Where the next tokens of all do not fit,
the requests with the fewest generated tokens are retracted, of equals those with the longest
prompts. They queue up behind all others; what they had when they started can be found again.
"""

from __future__ import annotations

from simrl.engine.leaving import preempt_last
from simrl.engine.requests import more_blocks
from simrl.engine.state import PREEMPTED, Limits, Requests, Totals
from simrl.profile.compiled import lean

TOKENS_AHEAD = 20  # SGLANG_RETRACT_DECODE_STEPS


@lean
def keep_room(r: Requests, t: Totals, limits: Limits, drafts: bool) -> None:
    """Retract requests until the others can decode, with drafts up to their windows."""
    t.decays += 1
    if _have_room(r, t, limits, drafts):
        return
    for i in range(1, t.n_running):  # the first to be retracted last
        slot, place = r[i].running, i
        while place > 0 and _is_kept_before(r, slot, r[place - 1].running):
            r[place].running = r[place - 1].running
            place -= 1
        r[place].running = slot
    while t.n_running > 1 and not _have_room(r, t, limits, drafts):
        t.preemptions += 1
        preempt_last(r, t, PREEMPTED)
    generated = TOKENS_AHEAD * t.n_running
    for i in range(t.n_running):
        generated += r[r[i].running].generated
    t.token_ratio = min(generated / (limits.max_new_tokens * t.n_running + 1), 1.0)
    t.decays = 0


@lean
def _have_room(r: Requests, t: Totals, limits: Limits, drafts: bool) -> bool:
    """Return whether there are blocks for the next tokens of all running requests."""
    blocks = t.free_blocks + t.held_blocks
    for i in range(t.n_running):
        q = r[r[i].running]
        tokens = 1 + q.window if drafts else 1
        blocks -= more_blocks(q, q.computed + q.rejected + tokens, limits)
    return bool(blocks >= 0)


@lean
def _is_kept_before(r: Requests, slot: int, other: int) -> bool:
    """Return whether one request is retracted after another."""
    more = r[slot].generated - r[other].generated
    return bool(more > 0 or (more == 0 and r[slot].prompt < r[other].prompt))
