"""Decoupled drafting (SpecActor, arXiv 2511.16193, §4.1) as two loops, written slowly: one worker, a batch of requests, an
event at a time. What each loop may do when is below; nothing here knows how it is planned.

The drafter works in passes. A pass drafts one token for every request that may draft when it starts, and takes
`draft_s(requests)`. A request's unverified tokens are those in verification and those drafted ahead of it.

- A pass in which the first token of a window is drafted for some request takes `round_s(requests)` more.
- The first pass for a request prefills all its tokens but the last, which the pass itself computes: `prefill_s` for each, on
  one of `draft_gpus` GPUs, which share the requests that a pass is the first for.
- A decoupled request may draft while fewer than 2 windows of its tokens are unverified. A coupled one drafts one window, and
  only while nothing of it is in verification.
- A request whose tokens ahead fill a window is ready. The verifier, when free, takes every request that is ready in one pass
  of `verify_s(requests, query tokens, context tokens)`. The first `window` tokens ahead go in. The query tokens of a
  decoupled request are its window (the last token known and all drafted ones but the last: no prediction after the last is
  asked for, since what follows is drafted already); of a coupled one window + 1, which buys the bonus token. What a coupled
  request has ahead beyond its window (it was decoupled a moment ago) is thrown away, because the bonus may contradict it.
  Context tokens are those known (prompt and generated) of all requests in the pass.
- When a verification ends, `accepted_tokens` says for each request, at the tokens it has generated, how many are right. All:
  the request gains the window, coupled also the bonus; what is drafted ahead stays. Else it gains the right ones and the
  correction, and everything drafted ahead is thrown away, the token in the drafter's pass included.
- The drafter goes on with its pass even if some of its tokens are for nobody any more. If all of them are, the pass is
  abandoned on the spot. So what was corrected is drafted for from the next boundary of the drafter on, which is at once
  if it is idle or has nothing else to do.
- A response ends when it has its tokens. Neither loop knows this before: windows are whole to the end, and what reaches
  beyond is wasted.
- With `reconfigure`, a request asks for its (window, coupled) again at the end of the verification in which its generated
  tokens pass a multiple of `reconfigure_every`; the answer holds from there on. Tokens ahead stay.

Of what falls on one instant, this is the order: (1) a verification ends, its requests in the order they were given; then an
empty drafter pass is abandoned; (2) a drafter pass ends; (3) a verification starts; then an empty drafter pass is abandoned;
(4) a drafter pass starts. A pass that takes no time ends in the next round of these four, at the same instant.

Counts: every drafted token is accepted, wrong (the correction took its place: one a miss) or wasted; those of passes that were
abandoned are, too. Every generated token is an accepted one, a correction or a bonus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simrl.speculation.acceptance import accepted_tokens


@dataclass(eq=False)
class Request:
    key: int
    response: int  # tokens when it is over
    window: int
    coupled: bool = False
    hardness: float = 1.0
    prompt: int = 0
    generated: int = 0
    in_verification: int = 0
    ahead: int = 0
    attempt: int = 0  # rises when what is drafted for it is thrown away
    ended_s: float = math.nan
    prefilled: bool = False  # by the drafter
    # Counts of this request.
    verifications: int = 0
    verified: int = 0  # tokens of the windows, whatever came of them
    misses: int = 0
    bonuses: int = 0
    accepted: int = 0
    wasted: int = 0
    most_wasted: int = 0  # by one miss

    @property
    def over(self) -> bool:
        return self.generated == self.response

    @property
    def ready(self) -> bool:
        return not self.over and self.in_verification == 0 and self.ahead >= self.window

    @property
    def may_draft(self) -> bool:
        if self.over:
            return False
        if self.coupled:
            return self.in_verification == 0 and self.ahead < self.window
        return self.in_verification + self.ahead < 2 * self.window

    @property
    def query_tokens(self) -> int:
        return self.in_verification + 1 if self.coupled else self.in_verification


@dataclass
class DecoupledWorker:
    requests: Sequence[Request]
    log_acceptances: NDArray[np.float64]
    draft_s: Callable[[int], float]
    verify_s: Callable[[int, int, int], float]
    reconfigure: Callable[[Request], tuple[int, bool]] | None = None
    reconfigure_every: int = 1000
    round_s: Callable[[int], float] = lambda requests: 0.0
    prefill_s: float = 0.0
    draft_gpus: int = 1
    now_s: float = 0.0
    draft_passes: int = 0
    abandoned_passes: int = 0
    verify_passes: int = 0
    drafted: int = 0
    draft_busy_s: float = 0.0  # abandoned passes included, up to where they were
    verify_busy_s: float = 0.0

    def __post_init__(self) -> None:
        self._verification_ends_s = math.inf
        self._verifying: list[Request] = []
        self._draft_started_s = self._draft_ends_s = math.inf
        self._drafting: list[tuple[Request, int]] = []  # whom the pass drafts for, at which attempt

    def run(self, until_s: float = math.inf) -> DecoupledWorker:
        """To the end of the last response, or through all that happens up to `until_s`, from where it can go on."""
        while self.now_s <= until_s:
            if self._verification_ends_s == self.now_s:
                self._end_verification()
                self._abandon_if_for_nobody()
            if self._draft_ends_s == self.now_s:
                self._end_draft()
            if not self._verifying:
                self._start_verification()
                self._abandon_if_for_nobody()
            if not self._drafting:
                self._start_draft()
            if all(request.over for request in self.requests):
                return self
            self.now_s = min(self._verification_ends_s, self._draft_ends_s)
            assert self.now_s < math.inf, "neither loop has anything to do"
        return self

    def _start_verification(self) -> None:
        self._verifying = [request for request in self.requests if request.ready]
        if not self._verifying:
            return
        for request in self._verifying:
            request.in_verification = request.window
            request.ahead -= request.window
            if request.coupled:
                request.wasted += request.ahead
                request.ahead = 0
                request.attempt += 1
        seconds = self.verify_s(
            len(self._verifying),
            sum(request.query_tokens for request in self._verifying),
            sum(request.prompt + request.generated for request in self._verifying),
        )
        self._verification_ends_s = self.now_s + seconds
        self.verify_passes += 1
        self.verify_busy_s += seconds

    def _end_verification(self) -> None:
        for request in self._verifying:
            self._verified(request)
        self._verifying = []
        self._verification_ends_s = math.inf

    def _verified(self, request: Request) -> None:
        window, before = request.in_verification, request.generated
        left = request.response - before
        right = accepted_tokens(request.key, before, request.hardness, self.log_acceptances, window)
        accepted = min(right, left)
        missed = right < min(window, left)
        bonus = request.coupled and right == window and left > window
        request.generated += accepted + missed + bonus
        request.verifications += 1
        request.verified += window
        request.accepted += accepted
        request.misses += missed
        request.bonuses += bonus
        request.in_verification = 0
        if missed or request.over:
            wasted = window + request.ahead - accepted - missed
            request.wasted += wasted
            request.most_wasted = max(request.most_wasted, wasted)
            request.ahead = 0
            request.attempt += 1
        if request.over:
            request.ended_s = self.now_s
        elif (
            self.reconfigure
            and before // self.reconfigure_every < request.generated // self.reconfigure_every
        ):
            request.window, request.coupled = self.reconfigure(request)

    def _start_draft(self) -> None:
        self._drafting = [
            (request, request.attempt) for request in self.requests if request.may_draft
        ]
        if self._drafting:
            self._draft_started_s = self.now_s
            begins = any((r.in_verification + r.ahead) % r.window == 0 for r, _ in self._drafting)
            seconds = self.draft_s(len(self._drafting)) + (
                self.round_s(len(self._drafting)) if begins else 0.0
            )
            new = [request for request, _ in self._drafting if not request.prefilled]
            if new:
                tokens = sum(request.prompt + request.generated - 1 for request in new)
                seconds += self.prefill_s * tokens / min(len(new), self.draft_gpus)
            for request in new:
                request.prefilled = True
            self._draft_ends_s = self.now_s + seconds

    def _end_draft(self) -> None:
        for request, attempt in self._drafting:
            if request.attempt == attempt:
                request.ahead += 1
            else:
                request.wasted += 1
        self.draft_passes += 1
        self._stop_drafting()

    def _abandon_if_for_nobody(self) -> None:
        if self._drafting and all(
            request.attempt != attempt for request, attempt in self._drafting
        ):
            self.abandoned_passes += 1
            for request, _ in self._drafting:
                request.wasted += 1
            self._stop_drafting()

    def _stop_drafting(self) -> None:
        self.drafted += len(self._drafting)
        self.draft_busy_s += self.now_s - self._draft_started_s
        self._drafting = []
        self._draft_ends_s = math.inf
