"""Adaptive concurrency (prime-rl@559b447, `orchestrator/concurrency.py`): how many responses may be
in flight, from what the engines report.

Invariant: a pure state machine. It owns no clock, no worker and no request: times and counts are
arguments, the limit and the number to abort are results. The limit grows only between two polls
that found the engines clear, and falls only at a poll.
"""

from __future__ import annotations

from collections.abc import Sequence

from simrl.runtime.worker import EngineLoad

POLL_S = 5.0  # between two reports of the engines
TURNOVER_GROWTH = 1.25  # of the limit, while as many responses end as are in flight
BINDING = 0.9  # of the limit in flight: then the limit holds responses back
GROW_BELOW, TRIM_ABOVE, ABORT_ABOVE = 0.6, 0.8, 0.9  # share of KV cache in use
TRIM_TO = 0.7  # share of KV cache in use after a trim
TRIM_POLLS = 6  # between two trims: each has to take effect first
QUEUE_SHARE, QUEUE_POLLS = 0.5, 6  # an overload: waiting over running, in polls one after another
CUT_ON_QUEUE, CUT_ON_PREEMPTION, CUT_AGAIN = 0.9, 0.8, 0.5  # of the responses in flight
AGAIN_POLLS = 6  # after a cut has drained, in which another cuts to CUT_AGAIN
GROWTH_LASTS_S = 15.0  # after the poll that allowed it: without polls, nothing grows


class AdaptiveConcurrency:
    """The limit on responses in flight, between `least` and `most`. It starts at `initial`; None:
    at the responses of `context_tokens` tokens that the KV cache of all engines holds, once they
    report it."""

    def __init__(self, least: int, most: int, initial: int | None, context_tokens: int) -> None:
        self.limit = initial or least
        self._least, self._most, self._context_tokens = least, most, context_tokens
        self._cap = float(self.limit)
        self._knows_start = initial is not None
        self._grows_until_s = 0.0
        self._waited: set[int] = set()  # engines with a queue at the last poll
        self._overloads = self._trim_in = self._again_in = 0  # polls
        self._draining = self._cut_before = False

    def response_ended(self, in_flight: int, time_s: float) -> None:
        """Grow after a response that leaves `in_flight` others, if the limit held any back."""
        before = in_flight + 1
        if time_s < self._grows_until_s and before >= BINDING * self.limit:
            self._cap = self._bounded(self._cap * TURNOVER_GROWTH ** (1 / before))
            self.limit = int(self._cap)

    def observe(self, loads: Sequence[EngineLoad], in_flight: int, time_s: float) -> int:
        """Take a poll of all engines. Return how many responses to abort, the youngest first."""
        kv_tokens, usages, runs, waits, preemptions = zip(*loads, strict=True)
        usage, running, queued, preempted = max(usages), sum(runs), sum(waits), any(preemptions)
        waiting = {engine for engine, requests in enumerate(waits) if requests}
        waits_on, self._waited = bool(waiting & self._waited), waiting
        overloaded = running > 0 and queued > QUEUE_SHARE * running
        self._overloads = self._overloads + 1 if overloaded else 0
        overload = self._overloads >= QUEUE_POLLS
        self._settle(in_flight, preempted or overload)
        clear = not (preempted or queued or waits_on or usage > GROW_BELOW)
        grows = clear and not self._draining
        self._grows_until_s = time_s + GROWTH_LASTS_S if grows else 0.0
        if not self._knows_start:
            self._knows_start = True
            self._cap = self._bounded(sum(kv_tokens) / self._context_tokens)
            self.limit = int(self._cap)
        if self._draining:
            return 0
        if preempted or overload:
            return self._cut(in_flight, overload)
        if usage > TRIM_ABOVE and in_flight > 0 and not self._trim_in:
            self._trim_in = TRIM_POLLS
            excess = self._lower(in_flight * TRIM_TO / usage, in_flight)
            return excess if usage > ABORT_ABOVE else 0
        return 0

    def _settle(self, in_flight: int, pressed: bool) -> None:
        """End the drain after a cut once the engines have calmed, and later forget the cut."""
        if self._draining and in_flight <= self.limit and not pressed:
            self._draining, self._again_in = False, AGAIN_POLLS
        if not self._draining and self._cut_before:
            self._again_in -= 1
            self._cut_before = self._again_in > 0
        self._trim_in = max(self._trim_in - 1, 0)

    def _cut(self, in_flight: int, overload: bool) -> int:
        """Lower the limit after an overload or a preemption, and drain."""
        share = CUT_ON_QUEUE if overload else CUT_ON_PREEMPTION
        if overload:
            self._overloads = 0
        excess = self._lower(in_flight * (CUT_AGAIN if self._cut_before else share), in_flight)
        self._draining = self._cut_before = True
        return excess

    def _lower(self, to: float, in_flight: int) -> int:
        """Lower the limit, and never raise it. Return how many responses are in flight beyond."""
        self.limit = min(int(self._bounded(to)), self.limit)
        self._cap = float(self.limit)
        return max(in_flight - self.limit, 0)

    def _bounded(self, responses: float) -> float:
        return min(max(responses, self._least), self._most)


class Bursts:
    """Growth of the responses in flight that a window of `POLL_S` allows (`admission_budget`):
    by the responses of a group, or a tenth of the limit, rounded down, if that is more. A response
    in place of one that ended is no growth; one in place of an aborted one is."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._base = 0  # responses in flight from which growth counts

    def begin(self, in_flight: int) -> None:
        """Begin a window."""
        self._base = in_flight

    def response_ended(self, in_flight: int, aborted: bool) -> None:
        """Note the end of a response that leaves `in_flight` others."""
        self._base = self._base - 1 if aborted else min(self._base, in_flight)

    def most(self, limit: int) -> int:
        """Return how many responses may be in flight, of `limit`."""
        return min(limit, self._base + max(self._group, limit // 10))
