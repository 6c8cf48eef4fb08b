"""simrl's drafters, windows and gates inside vLLM, as its drafter of one's own (`method: custom_class`).

Invariant: pass by pass it does what the simulated engine does (`simrl.engine.passes`): the same drafter objects, windows by
`next_window`, gates by `gate_opens` with the same fading gauges. What it counts is what vLLM verified, read from the batch that
ran, not what it proposed. A draft depends on the requests and this state, never on the time.

vLLM asks for drafts at the end of a pass (`propose`), when the batch of the next one is not settled: a command before the next
pass (an abort, a window, speculation switched off) can change what should be drafted. Nothing of the state has moved by then:
where `stale` says so, `redraft` drafts anew, and `put_drafts` hands it to the scheduler.

Who drives the engine calls `attach` and `configure` once; then, for each stay of a response, `begins` before it is submitted
and `ends` when it is over. A request it was not told of (a warm-up) gets no drafts.

vLLM is known here by `batch_of` and `put_drafts` alone, which touch what 0.26 and 0.32 have alike. vLLM calls `propose` only
while the longest sequence and a whole draft fit `max_model_len`, and else has zeros verified: leave that room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance, accepted_tokens
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    ELASTIC_STATE,
    FLAGS,
    GATE,
    GAUGES,
    OPEN,
    PATIENCE,
    THRESHOLD,
    gate_opens,
    remember,
    rules,
)
from simrl.speculation.drafter import Drafter, Tokens
from simrl.speculation.gates import ELASTIC_OFF, ELASTIC_ON, RATES, Elastic, next_elastic
from simrl.speculation.history import HistoryDrafter
from simrl.speculation.history_index import HistoryRule, build_index
from simrl.speculation.history_store import HistoryStore
from simrl.speculation.ngram import NgramDrafter, NgramRule
from simrl.speculation.windows import Fixed, Window, next_window

Kind = Literal["none", "history", "ngram", "own", "oracle", "fixed"]


@dataclass(frozen=True)
class DrafterSetup:
    """What drafts, how long, and when: plain data, to be sent to where the engine is.

    "oracle" drafts the continuation that it is told, wrong from where the draws of `acceptance` say: forced acceptance. These
    are the simulated engine's draws for a model drafter: with the same key both accept the same, as long as what is generated
    is what was told (greedy decoding of recorded greedy tokens). "fixed" drafts as many tokens as the window says, whatever
    they are: to time verification. "own" is a method's own drafter, which `make` makes.

    `gate` is None (always open), the largest batch that speculates at an acceptance of 0, 1, … 100 % (`batch_gate`), or TLT's.
    """

    kind: Kind = "none"
    window: Window = field(default_factory=lambda: Fixed(tokens=1))
    gate: tuple[int, ...] | Elastic | None = None
    history: HistoryRule = field(default_factory=HistoryRule)
    epochs_back: int = 1
    ngram: NgramRule = field(default_factory=NgramRule)
    acceptance: ModelAcceptance | None = None
    make: Callable[[], Drafter] | None = None


class Forced(NamedTuple):
    """What an oracle is told of a response: its recorded tokens, the key of its draws, and its hardness."""

    recorded: tuple[int, ...]
    key: int
    hardness: float = 1.0


class DraftCounts(NamedTuple):
    """Of a stay: tokens drafted, tokens accepted, passes that verified a draft, tokens that these passes yielded. As
    `simrl.engine.Engine` counts: a draft counts as vLLM verified it, also where it reaches beyond the response's end; what
    lies beyond the end is not accepted, nor yielded."""

    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    verified_tokens: int = 0


class Ran(NamedTuple):
    """What a request had in the pass that just ran: tokens known and computed before it, the draft that was verified, and how
    many tokens the request may have in all."""

    request_id: str
    known_tokens: int
    computed_tokens: int
    draft_tokens: int
    most_tokens: int


def batch_of(runner: Any, sampled: Sequence[Sequence[int]]) -> list[Ran]:
    """The batch that just ran, in the order in which drafts are asked for.

    vLLM's ids are those it was given with a random ending, unless told otherwise. A request that is admitted with one token to
    compute is given placeholders below 0 in place of a draft (0.32).
    """
    batch = runner.input_batch
    known, computed = batch.num_tokens_no_spec, batch.num_computed_tokens_cpu
    ran = []
    for i, request_id in enumerate(batch.req_ids):
        verified = batch.spec_token_ids[i]
        request = runner.requests[request_id]
        ran.append(
            Ran(
                request_id,
                int(known[i]) - len(sampled[i]),
                int(computed[i]),
                len(verified) if verified and verified[0] >= 0 else 0,
                request.num_prompt_tokens + request.sampling_params.max_tokens,
            )
        )
    return ran


def put_drafts(scheduler: Any, drafts: dict[str, list[int]]) -> None:
    """Gives running requests other drafts for the next pass, by vLLM's own ids; between two steps."""
    for request in scheduler.running:
        if request.request_id in drafts:
            request.spec_token_ids = drafts[request.request_id]


class _Oracle:
    """Drafts what it was told that comes, wrong from a drawn place on."""

    def __init__(self, acceptance: ModelAcceptance, most_tokens: int) -> None:
        self._logs = acceptance.log_acceptances(most_tokens)
        self._truth: dict[int, Forced] = {}
        self._has: dict[int, int] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._has[request] = 0

    def tell(self, request: int, truth: Forced) -> None:
        self._truth[request] = truth

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [self._draft(request, most) for request, most in zip(requests, most_tokens, strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        self._has[request] += len(token_ids)

    def stop_request(self, request: int) -> None:
        del self._has[request], self._truth[request]

    def _draft(self, request: int, most_tokens: int) -> Tokens:
        truth, has = self._truth[request], self._has[request]
        right = accepted_tokens(truth.key, has, truth.hardness, self._logs, most_tokens)
        draft = np.zeros(most_tokens, dtype=np.int32)  # beyond the end nothing is told
        coming = truth.recorded[has : has + most_tokens]
        draft[: len(coming)] = coming
        draft[right:] = np.where(draft[right:] > 0, draft[right:] - 1, 1)
        return draft


class _Fixed:
    """Drafts as many tokens as it may."""

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None: ...

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [np.zeros(most, dtype=np.int32) for most in most_tokens]

    def observe(self, request: int, token_ids: Tokens) -> None: ...

    def stop_request(self, request: int) -> None: ...


@dataclass
class _Stay:
    number: int
    has_source: bool
    window: int
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    vllm_id: str = ""  # as long as it is in the batch
    ran: bool = False
    decodes: bool = False
    drafts: bool = False  # in the next pass
    over: bool = False


def _compile(drafter: HistoryDrafter) -> None:
    """What is compiled is compiled now, not in the pass that drafts first, which it would hold up for seconds."""
    build_index([np.array([1, 2, 3, 1, 2, 3], dtype=np.int32)])
    drafter.start_request(0, -1)
    drafter.observe(0, np.array([1, 2, 3], dtype=np.int32))
    drafter.propose([0], [1])
    drafter.stop_request(0)


class Proposer:
    """vLLM's drafter. See the top of the module; methods are called between two steps, `propose` by vLLM at the end of one."""

    def __init__(self, vllm_config: Any) -> None:
        self._most_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._most_length: int = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self.configure(DrafterSetup())

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """vLLM asks every drafter to; there is none."""

    def attach(self, runner: Any) -> None:
        """The model runner that asks it."""
        self._runner = runner

    def configure(self, setup: DrafterSetup) -> None:
        """Begins anew: nothing learnt, nothing running. Raises `InputError` for a window that vLLM was not started for."""
        longest = setup.window.rule.most_tokens
        if setup.kind != "none" and longest > self._most_tokens:
            raise InputError(
                f"speculation drafts up to {longest} tokens, the engine was started with num_speculative_tokens "
                f"{self._most_tokens}; start it with {longest}"
            )
        self._setup = setup
        self._window = setup.window.rule
        self._gate_batch = np.zeros(RATES, dtype=np.int64)
        if isinstance(setup.gate, Elastic):
            self._rule = rules(ELASTIC, self._window, threshold=setup.gate.threshold, patience=setup.gate.patience)
        elif setup.gate is not None:
            if len(setup.gate) != RATES:
                raise InputError(f"a batch gate has {RATES} thresholds, for 0, 1, … 100 %; {len(setup.gate)} are given")
            self._rule = rules(BATCH, self._window)
            self._gate_batch = np.array(setup.gate, dtype=np.int64)
        else:
            self._rule = rules(OPEN, self._window)
        self._drafter = self._make_drafter(setup)
        self._gauges = np.zeros(GAUGES)
        self._flags = np.zeros(FLAGS, dtype=np.int64)
        self._stays: dict[str, _Stay] = {}
        self._numbers = 0
        self._enabled = True
        self.stale = False  # what was drafted last is not what should be drafted now: `redraft`

    def _make_drafter(self, setup: DrafterSetup) -> Drafter | None:
        self._store: HistoryStore | None = None
        self._oracle: _Oracle | None = None
        if setup.kind == "history":
            self._store = HistoryStore(epochs_kept=setup.epochs_back)
            drafter = HistoryDrafter(self._store, setup.history)
            _compile(drafter)
            return drafter
        if setup.kind == "ngram":
            return NgramDrafter(setup.ngram)
        if setup.kind == "own":
            assert setup.make is not None
            return setup.make()
        if setup.kind == "oracle":
            if setup.acceptance is None:
                raise InputError("an oracle drafter needs an acceptance to follow")
            self._oracle = _Oracle(setup.acceptance, self._window.most_tokens)
            return self._oracle
        return _Fixed() if setup.kind == "fixed" else None

    # What its owner tells.

    def learn(
        self, prompt_id: int, epoch: int, token_ids: Sequence[Sequence[int]], rewards: Sequence[float] | None = None
    ) -> None:
        """Responses to a prompt in an epoch, to be drafted from later; they are indexed in the background. Only a drafter from
        history learns."""
        if self._store is not None:
            self._store.learn(prompt_id, epoch, [np.array(ids) for ids in token_ids], rewards)

    def wait_learnt(self) -> None:
        """Until all that was learnt can be drafted from."""
        if self._store is not None:
            self._store.wait()

    def new_rollout(self) -> None:
        """An elastic gate is shut again, until the batch has been small for long enough."""
        self._flags[ELASTIC_STATE] = ELASTIC_OFF
        self.stale = True

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.stale |= value != self._enabled
        self._enabled = value

    def enable(self, value: bool) -> None:
        """The same as a call."""
        self.enabled = value

    def begins(
        self,
        request_id: str,
        prompt_id: int,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        forced: Forced | None = None,
    ) -> None:
        """A response begins, or goes on here with the tokens it has; its window is as at first.

        An oracle drafts what `forced` says, and nothing without it. Without `prompt_ids`, n-grams are looked up in the response
        alone. Raises ValueError for a request that is here already.
        """
        if request_id in self._stays:
            raise ValueError(f"request {request_id} runs already")
        self._numbers += 1
        number, drafter = self._numbers, self._drafter
        stay = self._stays[request_id] = _Stay(number, drafter is not None, self._window.start_tokens)
        if drafter is None:
            return
        if self._store is not None:
            stay.has_source = self._store.index(prompt_id) is not None or self._store.pending(prompt_id)
        drafter.start_request(number, prompt_id, np.array(prompt_ids, dtype=np.int32))
        if self._oracle is not None:
            stay.has_source = forced is not None
            self._oracle.tell(number, forced or Forced((), 0))
        drafter.observe(number, np.array(token_ids, dtype=np.int32))

    def window(self, request_id: str, tokens: int) -> None:
        """Sets a request's window from the next pass on; a rule that moves windows moves it from there."""
        if not 1 <= tokens <= self._most_tokens:
            raise InputError(f"a window of {tokens} tokens; the engine was started for 1 to {self._most_tokens}")
        self._stays[request_id].window = tokens
        self.stale = True

    def counts(self, request_id: str) -> DraftCounts:
        """What was drafted for a request so far."""
        return DraftCounts(*self._stays[request_id].counts)

    def ends(self, request_id: str) -> DraftCounts:
        """A request is over, or goes on elsewhere."""
        stay = self._stays.pop(request_id)
        if self._drafter is not None:
            self._drafter.stop_request(stay.number)
        self.stale |= stay.ran and not stay.over  # an abort: the next batch is smaller than the gate took it for
        return DraftCounts(*stay.counts)

    def redraft(self) -> dict[str, list[int]]:
        """The drafts of the next pass as they should be now, by vLLM's ids, for `put_drafts`."""
        self.stale = False
        running = [stay for stay in self._stays.values() if stay.ran and not stay.over]
        return {stay.vllm_id: draft for stay, draft in zip(running, self._draft(running), strict=True)}

    # What vLLM asks.

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """The drafts of the next pass, one list for each request of the batch that just ran."""
        if not self._stays:
            return [[] for _ in sampled_token_ids]
        if self._runner is None:
            raise RuntimeError("the drafter was not attached to its model runner")
        batch = batch_of(self._runner, sampled_token_ids)
        stays = [self._stay(ran.request_id) for ran in batch]
        self._learn_of(batch, stays, sampled_token_ids)
        self.stale = False
        going_on = [stay for stay in stays if stay is not None and not stay.over]
        unknown = sum(stay is None for stay in stays)
        drafts = iter(self._draft(going_on, unknown))
        return [[] if stay is None or stay.over else next(drafts) for stay in stays]

    def _stay(self, vllm_id: str) -> _Stay | None:
        return self._stays.get(vllm_id) or self._stays.get(vllm_id.rpartition("-")[0])

    def _learn_of(self, batch: list[Ran], stays: list[_Stay | None], sampled: list[list[int]]) -> None:
        """What the pass did to windows, counts, gauges and the gate: what the engine does in `_learn` and `run_speculative`."""
        began = sum(
            stay is not None and stay.ran and ran.computed_tokens > 0 for ran, stay in zip(batch, stays, strict=True)
        )
        speculated = gate_opens(self._rule, self._gate_batch, self._flags, self._gauges, began)
        proposed, drafted_of_pass, accepted_of_pass, prefilled = False, 0, 0, False
        for ran, stay, tokens in zip(batch, stays, sampled, strict=True):
            decoded = ran.computed_tokens > 0 and ran.computed_tokens == ran.known_tokens - 1
            prefilled |= not decoded
            if stay is None:
                continue
            if not stay.ran and ran.most_tokens + 2 * self._most_tokens > self._most_length:
                raise InputError(
                    f"a request of {ran.most_tokens} tokens and drafts of {self._most_tokens} in an engine for "
                    f"{self._most_length}; let max_model_len be at least {ran.most_tokens + 2 * self._most_tokens}"
                )
            left = ran.most_tokens - ran.known_tokens
            if decoded and stay.drafts:
                drafted, accepted = ran.draft_tokens, min(len(tokens) - 1, left) if ran.draft_tokens else 0
                stay.window = next_window(self._window, stay.window, drafted, accepted)
                if drafted:
                    for i, more in enumerate((drafted, accepted, 1, min(1 + accepted, left))):
                        stay.counts[i] += more
                proposed = True
                drafted_of_pass += drafted
                accepted_of_pass += accepted
            stay.vllm_id, stay.ran = ran.request_id, True
            stay.over = len(tokens) >= left
            stay.decodes = len(tokens) > 0
            if tokens and self._drafter is not None:
                self._drafter.observe(stay.number, np.array(tokens[:left], dtype=np.int32))
        if proposed:
            remember(self._gauges, drafted_of_pass, accepted_of_pass)
        if self._rule[GATE] == BATCH and not speculated:
            remember(self._gauges, 0, 0)
        if self._rule[GATE] == ELASTIC and self._flags[ELASTIC_STATE] != ELASTIC_ON and not prefilled:
            self._flags[ELASTIC_STATE] = next_elastic(
                self._flags[ELASTIC_STATE], len(batch), self._rule[THRESHOLD], self._rule[PATIENCE]
            )

    def _draft(self, stays: list[_Stay], others: int = 0) -> list[list[int]]:
        """What these requests, and some others, draft for their next pass: nothing where the gate is shut."""
        opens = gate_opens(self._rule, self._gate_batch, self._flags, self._gauges, len(stays) + others)
        speculates = self._enabled and self._drafter is not None and opens
        for stay in stays:
            stay.drafts = speculates and stay.has_source and stay.decodes
        drafting = [stay for stay in stays if stay.drafts]
        if not drafting:
            return [[] for _ in stays]
        assert self._drafter is not None
        drafts = iter(self._drafter.propose([stay.number for stay in drafting], [stay.window for stay in drafting]))
        return [next(drafts).tolist() if stay.drafts else [] for stay in stays]
