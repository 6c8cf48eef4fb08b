"""EfficientRollout's toggle and ladder, written as its paper tells them: slow, over lists of what happened."""

from __future__ import annotations

from collections.abc import Sequence

from simrl.speculation.choices import Toggle


def drafts_begin(running: Sequence[int], gains: Sequence[float], ramp: int, margin: float) -> int:
    """The first pass that verifies drafts, given the running requests and the gain before each pass; len(running) for none."""
    full = next((i for i, n in enumerate(running) if n > ramp), len(running))
    for i in range(full + 1, len(running)):
        if running[i] > 0 and gains[i] >= 1 + margin:
            return i + 1  # the pass itself makes the first drafts
    return len(running)


def draft_tokens(rates: Sequence[float], rule: Toggle) -> list[int]:
    """The draft tokens of each rollout, from the acceptance rates of all."""
    rung, since, chosen = 0, 0, [rule.ladder[0]]
    for i in range(len(rates)):
        recent = rates[max(since, i + 1 - rule.persistence) : i + 1]
        if len(recent) == rule.persistence:
            more = rung + 1 < len(rule.ladder) and min(recent) >= rule.raise_at
            less = rung > 0 and max(recent) <= rule.lower_at
            if more or less:
                rung, since = rung + more - less, i + 1
        chosen.append(rule.ladder[rung])
    return chosen
