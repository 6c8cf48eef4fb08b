"""simrl's drafters, windows and gates beside a vLLM engine, whose scheduler gets their drafts.

Invariant: pass by pass it follows the simulated engine (`engine.step`): its drafter objects,
windows by `next_window`, gates by `gate_opens` with its fading gauges, depths by the bandit
(`choose` and `observe`). It counts the tokens that vLLM verified, read from the batch that ran, not
its proposals. A draft depends on the requests and this state; of the time only the rewards of the
bandit, which are measured.

It drafts in the process of the scheduler, for all ranks of the engine: they verify the drafts that
the scheduler sends. Drafts are made at the end of a pass (`propose`), when the batch of the next
one is not settled: a command before the next pass (an abort, a weight load) can change what should
be drafted. Nothing of the state has moved by then: if `stale`, call `redraft` and pass its result
to `put_drafts`.

The controller of the engine calls `configure` once; then, for each request, `begins` before it is
submitted and `ends` when it is over. A request without `begins` (a warm-up) gets no drafts.

A draft model or an EAGLE head of vLLM drafts between two passes, too, when it is called: for all
requests of the pass before as many tokens as the longest window has, of which each request takes
its own window. Its first pass also keeps its KV cache up to date, so it is called with no tokens
where a batch gate is shut. Behind an elastic gate that is shut it rests, and gets its cache when
the gate opens and the running requests compute theirs again.

vLLM is known here by `batch_of` and `put_drafts` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.bandit import bandit_rule, bandit_state, choose, observe
from simrl.speculation.choices import BegMab, Elastic, HistoryRule
from simrl.speculation.decoding import BATCH, ELASTIC, GAUGES, OPEN, Rule, gate_opens, remember
from simrl.speculation.drafter import Drafter, Tokens
from simrl.speculation.draws import mixed
from simrl.speculation.gates import ELASTIC_OFF, ELASTIC_ON, RATES, next_elastic
from simrl.speculation.history_index import build_index
from simrl.speculation.passes import next_window
from simrl.speculation.windows import Fixed, Window
from simrl_replay.ahead import Ahead, AheadSetup, DrafterProcess, Verified
from simrl_replay.history_drafter import HistoryDrafter
from simrl_replay.history_store import HistoryStore
from simrl_replay.ngram_drafter import NgramDrafter
from simrl_replay.sibling_drafter import SiblingDrafter

Kind = Literal["none", "history", "ngram", "siblings", "own", "oracle", "fixed", "engine", "ahead"]


@dataclass(frozen=True)
class DrafterSetup:
    """Configuration of the drafter in the engine's process: source, windows and gate, as plain
    data.

    "oracle" drafts the recorded continuation, made wrong where the draws of `acceptance` say:
    forced acceptance. These are the simulated engine's draws for a model drafter: with equal keys
    both accept equally, as long as the engine generates the recorded tokens (greedy decoding of
    recorded greedy tokens). "fixed" drafts as many tokens as the window allows, to time
    verification. "own" is a method's own drafter, made by `make`. "engine" is vLLM's own: a draft
    model or an EAGLE head. With a `bandit` it drafts chains as deep as the strategy that the bandit
    chooses, with the draws of `seed` and the worker; else the window. `model_free`: siblings may
    draft in its place. "ahead" is a draft model in a
    process of its own (`simrl_replay.ahead`). `own_text`: siblings also draft from their own text.

    A history takes `history_bytes` at most, indexes of the newest epoch end first.

    `gate` is None (always open), the largest batch that speculates at an acceptance of 0, 1, … 100
    % (`batch_gate`), or TLT's.
    """

    kind: Kind = "none"
    window: Window = field(default_factory=lambda: Fixed(tokens=1))
    gate: tuple[int, ...] | Elastic | None = None
    history: HistoryRule = field(default_factory=HistoryRule)
    epochs_back: int = 1
    history_bytes: int | None = None
    own_text: bool = False
    bandit: BegMab | None = None
    seed: int = 0
    model_free: bool = False
    acceptance: ModelAcceptance | None = None
    make: Callable[[], Drafter] | None = None
    ahead: AheadSetup | None = None

    @property
    def most_tokens(self) -> int:
        """The longest draft."""
        depths = [arm.draft_depth for arm in self.bandit.strategies] if self.bandit else []
        ahead = [self.ahead.longest] if self.ahead else []
        return max([self.window.rule.most_tokens, *depths, *ahead])

    @property
    def loads(self) -> bool:
        """True if a worker that gets this drafter loads a model."""
        return self.ahead is not None and self.ahead.loads


class Forced(NamedTuple):
    """An oracle's inputs for a response: its recorded tokens, the key of its draws, and its
    hardness."""

    recorded: tuple[int, ...]
    key: int
    hardness: float = 1.0


class DraftCounts(NamedTuple):
    """Counts of a request: tokens drafted, tokens accepted, passes that verified a draft, tokens
    that these passes yielded, tokens drafted ahead that no pass verified. As in `engine.Engine`, a
    draft counts as vLLM verified it, also beyond the response's end; tokens beyond the end are
    neither accepted nor yielded."""

    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    verified_tokens: int = 0
    unverified: int = 0


class Ran(NamedTuple):
    """A request in the pass that just ran: tokens known and computed before it, the verified draft,
    and the most tokens it may have."""

    request_id: str
    known_tokens: int
    computed_tokens: int
    draft_tokens: int
    most_tokens: int


def batch_of(scheduler: Any, scheduled: Any, output: Any) -> tuple[list[Ran], list[list[int]]]:
    """Return the batch that just ran and the tokens that each request sampled, before the scheduler
    takes note of them.

    By default vLLM appends a random ending to the request ids. A request admitted with one token to
    compute gets placeholders below 0 in place of a draft (0.32).
    """
    ran, sampled = [], []
    for request_id, place in output.req_id_to_index.items():
        request = scheduler.requests.get(request_id)
        if request is None or request_id not in scheduled.num_scheduled_tokens:
            continue
        verified = scheduled.scheduled_spec_decode_tokens.get(request_id)
        sampled.append(output.sampled_token_ids[place] if output.sampled_token_ids else [])
        ran.append(
            Ran(
                request_id,
                request.num_tokens,
                request.num_computed_tokens - scheduled.num_scheduled_tokens[request_id],
                len(verified) if verified and verified[0] >= 0 else 0,
                request.num_prompt_tokens + request.max_tokens,
            )
        )
    return ran, sampled


def put_drafts(scheduler: Any, drafts: dict[str, list[int]]) -> None:
    """Replace the drafts of running requests for the next pass, by vLLM's ids; call it between two
    steps."""
    for request in scheduler.running:
        if request.request_id in drafts:
            request.spec_token_ids = drafts[request.request_id]


class _Oracle:
    """A drafter of the recorded tokens, wrong from a drawn position on."""

    def __init__(self, acceptance: ModelAcceptance, most_tokens: int) -> None:
        self._logs = acceptance.log_acceptances(most_tokens)
        self._truth: dict[int, Forced] = {}
        self._has: dict[int, int] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._has[request] = 0

    def tell(self, request: int, truth: Forced) -> None:
        self._truth[request] = truth

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [
            self._draft(request, most) for request, most in zip(requests, most_tokens, strict=True)
        ]

    def observe(self, request: int, token_ids: Tokens) -> None:
        self._has[request] += len(token_ids)

    def stop_request(self, request: int) -> None:
        del self._has[request], self._truth[request]

    def _draft(self, request: int, most_tokens: int) -> Tokens:
        truth, has = self._truth[request], self._has[request]
        right = accepted_tokens(truth.key, has, truth.hardness, self._logs, most_tokens)
        draft = np.zeros(most_tokens, dtype=np.int32)  # zeros beyond the recorded end
        coming = truth.recorded[has : has + most_tokens]
        draft[: len(coming)] = coming
        draft[right:] = np.where(draft[right:] > 0, draft[right:] - 1, 1)
        return draft


class _Fixed:
    """A drafter of as many tokens as it may draft, whatever the text."""

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        """Take no note of a request."""

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [np.zeros(most, dtype=np.int32) for most in most_tokens]

    def observe(self, request: int, token_ids: Tokens) -> None:
        """Take no note of its tokens."""

    def stop_request(self, request: int) -> None:
        """Take no note of its end."""


@dataclass
class _DraftedRequest:
    number: int
    has_source: bool
    window: int
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 0])
    vllm_id: str = ""  # its id in the batch
    ran: bool = False
    decodes: bool = False
    drafts: bool = False  # it drafts for the next pass
    over: bool = False


def _compile(drafter: HistoryDrafter) -> None:
    """Compile the drafter now: the first drafting pass would take seconds."""
    build_index([np.array([1, 2, 3, 1, 2, 3], dtype=np.int32)])
    drafter.start_request(0, -1)
    drafter.observe(0, np.array([1, 2, 3], dtype=np.int32))
    drafter.propose([0], [1])
    drafter.stop_request(0)


def _compile_bandit(bandit: BegMab) -> None:
    """Compile the bandit now, as `_compile` does for a history."""
    rule = bandit_rule(bandit)
    state = bandit_state(rule, 1)
    observe(rule, state, 0, choose(rule, state, 0, 1), 1.0, 1, 1.0)


class Proposer:
    """The drafter of an engine that was started for drafts of `most_tokens` and sequences of
    `most_length`. `model` lets a draft model of vLLM's draft for the requests of the last pass, and
    returns its tokens by vLLM's ids; it is not called while another drafter is configured.
    `propose` is called at the end of a step, all other methods between two steps."""

    def __init__(
        self,
        most_tokens: int,
        most_length: int,
        model: Callable[[int], dict[str, list[int]]] | None = None,
    ) -> None:
        self._most_tokens = most_tokens
        self._most_length = most_length
        self._model = model
        self._lines: dict[str, Sequence[Any]] = {}  # to drafters that work ahead, by model
        self.configure(DrafterSetup())

    def configure(self, setup: DrafterSetup, worker: int = 0) -> None:
        """Reset all state and set the configuration, on this worker of the schedule. Raise
        `InputError` for a window longer than vLLM was started for."""
        longest = setup.most_tokens
        if setup.kind != "none" and longest > self._most_tokens:
            raise InputError(
                f"speculation drafts up to {longest} tokens, the engine was started with num_speculative_tokens "
                f"{self._most_tokens}; start it with {longest}"
            )
        # A draft model that rested lacks KV cache of the prefixes that are cached.
        restarts = self._model is not None and setup.kind == "engine"
        self._setup = setup
        self._window = setup.window.rule
        self._gate_batch = np.zeros(RATES, dtype=np.int64)
        if isinstance(setup.gate, Elastic):
            self._rule = Rule(ELASTIC, self._window, setup.gate.threshold, setup.gate.patience)
        elif setup.gate is not None:
            if len(setup.gate) != RATES:
                raise InputError(
                    f"a batch gate has {RATES} thresholds, for 0, 1, … 100 %; {len(setup.gate)} are given"
                )
            self._rule = Rule(BATCH, self._window)
            self._gate_batch = np.array(setup.gate, dtype=np.int64)
        else:
            self._rule = Rule(OPEN, self._window)
        self._drafter = self._make_drafter(setup)
        self._models = setup.kind == "engine"  # the model drafts
        self._ahead: Ahead | None = None
        if setup.ahead is not None:
            self.start_drafters([setup.ahead.process])
            lines = self._lines[setup.ahead.process.settings.model]
            self._ahead = Ahead(self._window, setup.ahead, lines)
        self._gauges = np.zeros(1, dtype=GAUGES)[0]
        self._requests: dict[str, _DraftedRequest] = {}
        self._numbers = 0
        self._levels = -1  # that the model has drafted since the last pass; -1: it did not run
        self._arm, self._key = 0, int(mixed(setup.seed, worker))  # of the bandit
        if setup.bandit is not None:
            self._arms = bandit_rule(setup.bandit)
            self._rewards = bandit_state(self._arms, setup.bandit.window)
            _compile_bandit(setup.bandit)
        self.stale = False  # the last drafts are outdated: call `redraft`
        # a drafter that is a model starts: let running requests recompute their caches
        self.restarts = restarts

    def start_drafters(self, processes: Sequence[DrafterProcess]) -> None:
        """Start drafters that work ahead, unless they are up, so that none starts when a worker
        gets it (SpecActor §4.3)."""
        from simrl_replay.drafting_ahead import start_drafters  # which imports this module

        new = {
            each.settings.model: each
            for each in processes
            if each.settings.model not in self._lines
        }
        self._lines.update(zip(new, start_drafters(list(new.values())), strict=True))

    def _make_drafter(self, setup: DrafterSetup) -> Drafter | None:
        self._store: HistoryStore | None = None
        self._oracle: _Oracle | None = None
        match setup.kind:
            case "history":
                back, most = setup.epochs_back, setup.history_bytes
                self._store = HistoryStore(epochs_kept=back, memory_bytes=most, evict="newest")
                drafter = HistoryDrafter(self._store, setup.history)
                _compile(drafter)
                return drafter
            case "ngram":
                return NgramDrafter()
            case "siblings":
                return SiblingDrafter(setup.own_text)
            case "own":
                assert setup.make is not None
                return setup.make()
            case "oracle":
                if setup.acceptance is None:
                    raise InputError("an oracle drafter needs an acceptance to follow")
                self._oracle = _Oracle(setup.acceptance, self._window.most_tokens)
                return self._oracle
            case "fixed":
                return _Fixed()
            case "engine" if setup.model_free:
                return SiblingDrafter()
            case "none" | "engine" | "ahead":
                return None

    # Calls of the controller.

    def learn(
        self,
        prompt_id: int,
        epoch: int,
        token_ids: Sequence[Sequence[int]],
        rewards: Sequence[float] | None = None,
    ) -> None:
        """Add the responses of a prompt in an epoch to the history; they are indexed in the
        background. Ignored unless the drafter has one."""
        if self._store is not None:
            tail = self._setup.history.prompt_tail
            self._store.learn(
                prompt_id,
                epoch,
                [np.r_[tail, np.array(ids, dtype=np.int32)] for ids in token_ids],
                rewards,
            )

    def wait_learnt(self) -> None:
        """Wait until all learnt responses are indexed."""
        if self._store is not None:
            self._store.wait()

    def new_rollout(self, siblings: bool = False) -> None:
        """Shut an elastic gate again, until the batch has been small for long enough. With
        `siblings` they draft from now on in place of the model, else the model does."""
        self._gauges["elastic_state"] = ELASTIC_OFF
        self._models = self._setup.kind == "engine" and not siblings
        self.stale = True

    def begins(
        self,
        request_id: str,
        prompt_id: int,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        forced: Forced | None = None,
        window: int | None = None,
    ) -> None:
        """Start a response, or continue one with `token_ids`; its window is `window`, or the
        initial one.

        An oracle drafts from `forced`, and nothing without it. Without `prompt_ids`, n-grams are
        looked up in the response alone. Raise `ValueError` for a request that is here already.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id} runs already")
        self._numbers += 1
        number, drafter = self._numbers, self._drafter
        has_source = drafter is not None or self._setup.kind == "engine"
        request = self._requests[request_id] = _DraftedRequest(
            number, has_source, window or self._window.start_tokens
        )
        if self._ahead is not None:
            self._ahead.begins(request_id, prompt_ids, token_ids)
        if drafter is None:
            return
        if self._store is not None:
            request.has_source = self._store.index(prompt_id) is not None or self._store.pending(
                prompt_id
            )
        drafter.start_request(number, prompt_id, np.array(prompt_ids, dtype=np.int32))
        if self._oracle is not None:
            request.has_source = forced is not None
            self._oracle.tell(number, forced or Forced((), 0))
        drafter.observe(number, np.array(token_ids, dtype=np.int32))

    def counts(self, request_id: str) -> DraftCounts:
        if self._ahead is not None:
            return DraftCounts(*self._ahead.counts(request_id))
        return DraftCounts(*self._requests[request_id].counts)

    def ends(self, request_id: str) -> DraftCounts:
        """Remove a request that is over or goes on elsewhere; return its draft counts."""
        counts, request = self.counts(request_id), self._requests.pop(request_id)
        if self._ahead is not None:
            self._ahead.ends(request_id)
        if self._drafter is not None:
            self._drafter.stop_request(request.number)
        self.stale |= (
            request.ran and not request.over
        )  # an abort: the next batch is smaller than the gate assumed
        return counts

    def redraft(self) -> dict[str, list[int]]:
        """Return new drafts for the next pass, by vLLM's ids, for `put_drafts`."""
        if self._ahead is not None:
            drafts = self._ahead.windows(self._most_tokens)
            return {self._requests[name].vllm_id: draft for name, draft in drafts.items()}
        self.stale = False
        running = [
            request for request in self._requests.values() if request.ran and not request.over
        ]
        if self._levels > 0 and self._opens(len(running)):
            return {}  # what the model has drafted stays
        return {
            request.vllm_id: draft
            for request, draft in zip(running, self._draft(running), strict=True)
        }

    # Calls of the engine.

    def propose(
        self, batch: list[Ran], sampled: list[list[int]], seconds: float = 0.0
    ) -> dict[str, list[int]]:
        """Return the drafts of the next pass, by vLLM's ids, after the pass that `batch_of` tells
        of; it and the drafting for it took `seconds`."""
        self._levels = -1
        if not self._requests:
            return self._warm_drafts(batch, sampled)
        requests = [self._request(ran.request_id) for ran in batch]
        self._learn_of(batch, requests, sampled, seconds)
        if self._ahead is not None:
            self._ahead.ran(self._verified(batch, sampled))
            self.stale = True  # windows are put in right before a pass
            return {}
        self.stale = False
        going_on = [request for request in requests if request is not None and not request.over]
        unknown = sum(request is None for request in requests)
        drafts = self._draft(going_on, unknown)
        return {request.vllm_id: draft for request, draft in zip(going_on, drafts, strict=True)}

    @property
    def held(self) -> set[str]:
        """Requests that take no part in the next pass: their drafts are still to come."""
        return self._ahead.held if self._ahead is not None else set()

    def wait(self) -> None:
        """Wait for drafts, for a moment."""
        if self._ahead is not None:
            self._ahead.wait()

    def _verified(self, batch: list[Ran], sampled: list[list[int]]) -> list[Verified]:
        """Return the requests of a pass, with what they sampled."""
        names = {request.vllm_id: name for name, request in self._requests.items()}
        return [
            Verified(
                names[ran.request_id],
                ran.known_tokens,
                ran.most_tokens,
                ran.computed_tokens > 0 and ran.computed_tokens == ran.known_tokens - 1,
                ran.draft_tokens,
                tokens,
            )
            for ran, tokens in zip(batch, sampled, strict=True)
            if ran.request_id in names
        ]

    def _request(self, vllm_id: str) -> _DraftedRequest | None:
        return self._requests.get(vllm_id) or self._requests.get(vllm_id.rpartition("-")[0])

    def _warm_drafts(self, batch: list[Ran], sampled: list[list[int]]) -> dict[str, list[int]]:
        """Return the longest drafts of a model that no drafter is configured of: of a warm-up."""
        if self._model is None or self._setup.kind != "none":
            return {}
        drafts = self._model(self._most_tokens)
        return {
            ran.request_id: drafts[ran.request_id]
            for ran, tokens in zip(batch, sampled, strict=True)
            if tokens
        }

    def _learn_of(
        self,
        batch: list[Ran],
        requests: list[_DraftedRequest | None],
        sampled: list[list[int]],
        seconds: float,
    ) -> None:
        """Update windows, counts, gauges, the gate and the bandit after a pass, as the engine does
        in `learn` and `run_speculative`."""
        began = sum(
            request is not None and request.ran and ran.computed_tokens > 0
            for ran, request in zip(batch, requests, strict=True)
        )
        speculated = gate_opens(self._rule, self._gate_batch, self._gauges, began)
        proposed, drafted_of_pass, accepted_of_pass, prefilled = 0, 0, 0, False
        accepted_levels = 0
        for ran, request, tokens in zip(batch, requests, sampled, strict=True):
            decoded = ran.computed_tokens > 0 and ran.computed_tokens == ran.known_tokens - 1
            prefilled |= not decoded
            if request is None:
                continue
            if not request.ran and ran.most_tokens + 2 * self._most_tokens > self._most_length:
                raise InputError(
                    f"a request of {ran.most_tokens} tokens and drafts of {self._most_tokens} in an engine for "
                    f"{self._most_length}; let max_model_len be at least {ran.most_tokens + 2 * self._most_tokens}"
                )
            left = ran.most_tokens - ran.known_tokens
            if decoded and request.drafts:
                drafted, accepted = (
                    ran.draft_tokens,
                    min(len(tokens) - 1, left) if ran.draft_tokens else 0,
                )
                request.window = next_window(self._window, request.window, drafted, accepted)
                if drafted:
                    for i, more in enumerate((drafted, accepted, 1, min(1 + accepted, left))):
                        request.counts[i] += more
                proposed += 1
                drafted_of_pass += drafted
                accepted_of_pass += accepted
                accepted_levels += len(tokens) - 1
            request.vllm_id, request.ran = ran.request_id, True
            request.over = len(tokens) >= left
            request.decodes = len(tokens) > 0
            if tokens and self._drafter is not None:
                self._drafter.observe(request.number, np.array(tokens[:left], dtype=np.int32))
        if proposed:
            remember(self._gauges, drafted_of_pass, accepted_of_pass)
        if proposed and self._models and self._setup.bandit is not None:
            length = 1.0 + accepted_levels / proposed
            observe(self._arms, self._rewards, self._key, self._arm, length, proposed, seconds)
        if self._rule.gate == BATCH and not speculated:
            remember(self._gauges, 0, 0)
        if (
            self._rule.gate == ELASTIC
            and self._gauges["elastic_state"] != ELASTIC_ON
            and not prefilled
        ):
            self._gauges["elastic_state"] = next_elastic(
                self._gauges["elastic_state"], len(batch), self._rule.threshold, self._rule.patience
            )
            starts = self._gauges["elastic_state"] == ELASTIC_ON
            self.restarts = starts and (self._models or self._setup.kind == "oracle")

    def _draft(self, requests: list[_DraftedRequest], others: int = 0) -> list[list[int]]:
        """Return the drafts of these requests for the next pass, with `others` in the batch; empty
        ones where the gate is shut."""
        models = self._models and bool(requests)
        speculates = (models or self._drafter is not None) and not self.restarts
        speculates = speculates and self._opens(len(requests) + others)
        for request in requests:
            request.drafts = speculates and request.has_source and request.decodes
        drafting = [request for request in requests if request.drafts]
        if models and (speculates or self._rule.gate != ELASTIC):
            return self._of_model(requests, drafting)
        if not drafting:
            return [[] for _ in requests]
        assert self._drafter is not None
        drafts = iter(
            self._drafter.propose(
                [request.number for request in drafting], [request.window for request in drafting]
            )
        )
        return [next(drafts).tolist() if request.drafts else [] for request in requests]

    def _of_model(
        self, requests: list[_DraftedRequest], drafting: list[_DraftedRequest]
    ) -> list[list[int]]:
        """Let the model draft, and return the drafts of these requests."""
        assert self._model is not None
        levels = max((request.window for request in drafting), default=0)
        if drafting and (bandit := self._setup.bandit) is not None:
            self._arm = choose(self._arms, self._rewards, self._key, len(drafting))
            levels = bandit.strategies[self._arm].draft_depth
        if levels <= self._levels:  # a gate that was shut, and is again
            return [[] for _ in requests]
        self._levels, drafts = levels, self._model(levels)
        most = levels if self._setup.bandit is not None else 0
        return [
            drafts[request.vllm_id][: most or request.window] if request.drafts else []
            for request in requests
        ]

    def _opens(self, batch: int) -> bool:
        return bool(gate_opens(self._rule, self._gate_batch, self._gauges, batch))
