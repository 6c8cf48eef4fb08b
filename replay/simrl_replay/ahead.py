"""Drafting ahead, the verifier's side: windows of real tokens from a drafter in a process of its own
(decoupled drafting, SpecActor, arXiv 2511.16193, §4.1).

Invariant: what may be drafted, when a window is verified, what a miss throws away, and when a
request gets another window or mode are decided by the simulated engine's functions
(`simrl.engine.drafts`: `most_unverified`, `begin_verification`, `judge`, `is_due`, `reconfigure`), on
records of its own type. Here is only what a simulation has no need of: the tokens.

vLLM computes one token more than a draft has. So a decoupled window of w tokens goes in as a draft
of w - 1: the token that the pass samples behind it is the verdict on the last one. A coupled window
goes in whole, and the token behind it is the bonus. Tokens that a request gains without a window
(its first one, or one behind a cache that was computed again) are compared with what was drafted.

A request that decodes and has no window takes no part in the next pass (`held`). The drafter is told
of each verification once: it may go on, or goes on from a correction. What it drafted for an attempt
that is over is counted, and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from simrl.engine.drafts import begin_verification, is_due, judge, most_unverified, reconfigure
from simrl.engine.state import REQUESTS, TOTALS
from simrl.errors import StoppedError
from simrl.speculation.decoding import Decoding, Rule
from simrl.speculation.windows import WindowRule

WAIT_S = 0.005  # for a window, before the loop around the engine looks for commands again
SLOTS = 64


class Follow(NamedTuple):
    """Draft for text `number` until it has `until` tokens, and report in windows of `window`.

    With a new `attempt`, the text is the first `keep` tokens of what it was, then `token_ids`, and
    whatever was drafted beyond is wrong. With the attempt that it has, it just may go on."""

    number: int
    attempt: int
    keep: int
    token_ids: tuple[int, ...]
    until: int
    window: int


class Forget(NamedTuple):
    """Draft no more for a text."""

    number: int


class LoadModel(NamedTuple):
    """Forget all texts, and load the model's weights from a folder, if one is named. Answered by
    `ModelLoaded`."""

    folder: str | None


class ModelLoaded(NamedTuple):
    """The drafter has its weights, and no text."""


class Drafted(NamedTuple):
    """Tokens drafted for a text, in an attempt."""

    number: int
    attempt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DrafterProcess:
    """The drafters of a worker: `number` engines with `settings` (`EngineSettings`), each in a
    process of its own. The GPUs of a worker's drafters are behind its `first_gpu` own ones. A
    drafter is up, and has loaded weights, within `start_deadline_s`. It counts as hung if all
    requests wait for it, and it sends nothing for `step_deadline_s`."""

    settings: Any
    number: int = 1
    first_gpu: int = 1
    start_deadline_s: float = 600.0
    step_deadline_s: float = 60.0


class AheadSetup(NamedTuple):
    """Drafters that work ahead, and SpecActor's Algorithm 2 (`reconfiguration_table`): every
    `reconfigure_every` tokens (0: never), a request of low acceptance gets the window and the mode
    at its acceptance rate. With `loads`, the drafters load their weights from the model's folder
    when a worker gets them."""

    process: DrafterProcess
    reconfigure_every: int = 0
    best_window: tuple[int, ...] = (1,)
    best_coupled: tuple[int, ...] = (1,)
    loads: bool = False

    @property
    def longest(self) -> int:
        """The most tokens of a window after a reconfiguration; 0 if there is none."""
        return max(self.best_window) if self.reconfigure_every else 0


class DrafterGoneError(StoppedError):
    """A drafter that has ended or hangs: its worker ends, too, and both are started again."""


class Line(Protocol):
    """A line to a drafter, such as `simrl_replay.link.ProcessLink`."""

    connection: Any

    def send(self, commands: Sequence[Any]) -> None:
        """Send messages."""

    def death(self) -> str:
        """Describe how the drafter ended."""


class Verified(NamedTuple):
    """A request in the pass that just ran: the tokens that it has, and that it may have, before it;
    whether it decoded; its draft tokens in the pass; the tokens it sampled."""

    request_id: str
    known_tokens: int
    most_tokens: int
    decoded: bool
    draft_tokens: int
    sampled: Sequence[int]


@dataclass
class _Text:
    """A request with its tokens. Its numbers are in the record at `slot`."""

    number: int
    slot: int
    prompt_tokens: int
    token_ids: list[int]  # of prompt and response
    attempt: int = -1  # of its drafts; -1: the drafter does not know it yet
    window: list[int] = field(default_factory=list)  # in verification
    ahead: list[int] = field(default_factory=list)
    decodes: bool = False


class Ahead:
    """The windows of an engine's requests, which are dealt to the `lines`. `window` is the one that
    a request begins with."""

    def __init__(self, window: WindowRule, setup: AheadSetup, lines: Sequence[Line]) -> None:
        self._lines, self._process = lines, setup.process
        self._heard_s = time.monotonic()  # the last pass, or the last message of a drafter
        self._decoding = Decoding(
            Rule(window=window, decoupled=True, reconfigure_every=setup.reconfigure_every),
            best_window=np.array(setup.best_window, dtype=np.int64),
            best_coupled=np.array(setup.best_coupled, dtype=np.int64),
        )
        self._records: Any = np.zeros(SLOTS, dtype=REQUESTS).view(np.recarray)
        self._totals: Any = np.zeros(1, dtype=TOTALS).view(np.recarray)[0]
        self._texts: dict[str, _Text] = {}
        self._by_number: dict[int, _Text] = {}
        self._free: list[int] = list(range(SLOTS))
        self._numbers = 0
        self._messages: list[list[Any]] = [[] for _ in lines]
        self.held: set[str] = set()  # requests that take no part in the next pass
        self._load(setup.process.settings.model if setup.loads else None)

    def _load(self, folder: str | None) -> None:
        """Let the drafters forget all texts, and load weights from a folder, if one is named; wait
        until they have."""
        for line in self._lines:
            line.send([LoadModel(folder)])
        deadline_s = self._process.start_deadline_s
        for line in self._lines:
            loaded = False
            while not loaded:
                if not line.connection.poll(deadline_s):
                    raise _hangs("loaded no weights", deadline_s)
                loaded = any(isinstance(message, ModelLoaded) for message in _received(line))

    def begins(self, request_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Start a response, or continue one with `token_ids`."""
        if not self._free:
            before = len(self._records)
            self._records = np.resize(self._records, 2 * before).view(np.recarray)
            self._free = list(range(before, 2 * before))
        self._numbers += 1
        slot = self._free.pop()
        self._records[slot] = np.zeros((), dtype=REQUESTS)
        q = self._records[slot]
        q.prompt, q.generated = len(prompt_ids), len(token_ids)
        q.window = self._decoding.rule.window.start_tokens
        text = _Text(self._numbers, slot, len(prompt_ids), [*prompt_ids, *token_ids])
        self._texts[request_id] = self._by_number[text.number] = text

    def ends(self, request_id: str) -> None:
        """Remove a request."""
        text = self._texts.pop(request_id)
        del self._by_number[text.number]
        self._free.append(text.slot)
        self.held.discard(request_id)
        if text.attempt >= 0:
            self._tell(text, Forget(text.number))
        self._send()

    def counts(self, request_id: str) -> tuple[int, int, int, int, int]:
        """Return tokens drafted and accepted, verifications, the tokens that they yielded, and
        tokens that were never verified."""
        q = self._records[self._texts[request_id].slot]
        drafted, accepted = int(q.drafted_total), int(q.accepted_total)
        passes = int(q.verifications), int(q.verified_total)
        return drafted, accepted, *passes, int(q.unverified_total)

    def ran(self, batch: Sequence[Verified]) -> None:
        """Take note of a pass, and tell the drafters what stands."""
        self._heard_s = time.monotonic()
        self._receive()  # what came meanwhile was drafted before the verdict
        in_pass = set()
        for verified in batch:
            in_pass.add(verified.request_id)
            self._judge(self._texts[verified.request_id], verified)
        for request_id, text in self._texts.items():
            if text.window and request_id not in in_pass:  # the pass had no room for it
                self._put_back(text)
        self._send()

    def _judge(self, text: _Text, verified: Verified) -> None:
        q = self._records[text.slot]
        q.stop_at = verified.most_tokens - text.prompt_tokens
        q.left = verified.most_tokens - verified.known_tokens
        tokens = list(verified.sampled[: q.left])
        text.decodes = bool(tokens)
        if text.window and not verified.decoded:  # its cache is computed again
            self._put_back(text)
        if not tokens:
            return
        had = len(text.token_ids)
        text.token_ids += tokens
        q.generated += len(tokens)
        if text.window:
            self._judge_window(text, q, tokens, verified.draft_tokens)
        elif text.attempt >= 0 and text.ahead[: len(tokens)] == tokens:
            text.ahead = text.ahead[len(tokens) :]
            q.ahead = len(text.ahead)
            self._go_on(text, q)
        else:
            self._correct(text, q, had)

    def _judge_window(self, text: _Text, q: Any, tokens: list[int], computed: int) -> None:
        """End the verification of a window, of which the pass had `computed` tokens of its draft."""
        window, text.window = text.window, []
        right, misses = _agreement(window, tokens), int(q.misses_total)
        q.drafted = min(int(q.drafted), computed)
        q.right = right
        judge.py_func(q, self._totals)
        if q.ahead == 0:
            text.ahead = []
        coupled = q.coupled == 1
        if is_due.py_func(q, self._decoding.rule.reconfigure_every):
            self._reconfigure(q)
        if q.left == len(tokens):
            return  # it is over
        if coupled or q.misses_total > misses:
            self._correct(text, q, len(text.token_ids) - len(tokens) + right)
        else:
            self._go_on(text, q)

    def _reconfigure(self, q: Any) -> None:
        running = [text.slot for text in self._texts.values() if text.decodes]
        self._records.running[: len(running)] = running
        self._totals.n_running = len(running)
        reconfigure.py_func(self._records, self._totals, self._decoding, q)

    def _go_on(self, text: _Text, q: Any) -> None:
        until = len(text.token_ids) + int(most_unverified.py_func(q))
        self._tell(text, Follow(text.number, text.attempt, 0, (), until, int(q.window)))

    def _correct(self, text: _Text, q: Any, keep: int) -> None:
        """Let the drafter begin anew: behind the first `keep` tokens of its text, which may be more
        than it has, come those that the verifier has."""
        if text.attempt < 0:
            keep = 0
        text.attempt += 1
        text.ahead, q.ahead = [], 0
        until = len(text.token_ids) + int(most_unverified.py_func(q))
        behind = tuple(text.token_ids[keep:])
        self._tell(text, Follow(text.number, text.attempt, keep, behind, until, int(q.window)))

    def _put_back(self, text: _Text) -> None:
        text.ahead, text.window = text.window + text.ahead, []
        q = self._records[text.slot]
        q.ahead, q.in_verification = len(text.ahead), 0

    def windows(self, most: int) -> dict[str, list[int]]:
        """Take what the drafters have sent, and return the drafts of the next pass, by request;
        `most` tokens are computed of one at most. Requests without a window are `held`."""
        self._receive()
        drafts: dict[str, list[int]] = {}
        self.held = set()
        for request_id, text in self._texts.items():
            q = self._records[text.slot]
            if not text.decodes or text.window:
                continue
            if q.ahead < q.window:
                self.held.add(request_id)
                drafts[request_id] = []
                continue
            text.window, text.ahead = text.ahead[: q.window], text.ahead[q.window :]
            begin_verification.py_func(q, int(q.window), most)
            if q.coupled == 1:
                text.ahead = []
            drafts[request_id] = text.window[: q.drafted]
        return drafts

    def _receive(self) -> None:
        for line in self._lines:
            while line.connection.poll(0.0):
                self._take(_received(line))

    def wait(self) -> None:
        """Wait for a drafter to send something, for `WAIT_S` at most. Raise `DrafterGoneError` if
        none has for too long."""
        deadline_s = self._process.step_deadline_s
        if wait([line.connection for line in self._lines], WAIT_S):
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > deadline_s:
            raise _hangs("drafted nothing", deadline_s)

    def _take(self, messages: Sequence[Any]) -> None:
        for number, attempt, token_ids in messages:
            text = self._by_number.get(number)
            if text is None:
                continue
            q = self._records[text.slot]
            q.drafted_total += len(token_ids)
            q.unverified_total += len(token_ids)
            if attempt == text.attempt:
                text.ahead += token_ids
                q.ahead = len(text.ahead)

    def _tell(self, text: _Text, message: Any) -> None:
        self._messages[text.number % len(self._lines)].append(message)

    def _send(self) -> None:
        for line, messages in zip(self._lines, self._messages, strict=True):
            if messages:
                line.send(messages)
        self._messages = [[] for _ in self._lines]


def _hangs(what: str, deadline_s: float) -> DrafterGoneError:
    return DrafterGoneError(f"a drafter hangs: it {what} for {deadline_s:g} s")


def _agreement(window: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens of a window are right, the first wrong one and those behind it not
    counted."""
    pairs = zip(window, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(window), len(tokens)))


def _received(line: Line) -> Sequence[Any]:
    """Return the next messages of a drafter. Raise `DrafterGoneError` if it has ended, and
    `StoppedError` if it failed."""
    try:
        messages: Sequence[Any] = line.connection.recv()
    except (EOFError, OSError):
        raise DrafterGoneError(f"the drafter is gone: {line.death()}") from None
    for message in messages:
        if not isinstance(message, (Drafted, ModelLoaded)):
            raise StoppedError(f"the drafter failed: {getattr(message, 'message', message)}")
    return messages
