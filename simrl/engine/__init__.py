"""One inference engine: continuous batching, exact to the iteration, over arrays.

Invariant: `Engine.now_s` is a boundary between two forward passes, and every pass in the past happened as vLLM V1 would
have scheduled it: running requests first, in order, then waiting ones first come first served, while `max_num_seqs`,
`max_num_batched_tokens` and the KV blocks (for all known tokens) allow; prompts in chunks. When blocks run out, the caches
of paused requests go, oldest first, then the youngest running request is preempted; what lost its cache computes it again.
Under asynchronous scheduling a pass is scheduled when the one before starts, so that it knows neither who comes nor who ends
during that one: requests join a pass later, and the places and blocks of those that end are free a pass later. (Decoupled
drafting cannot do so: which windows a pass verifies is known when it starts.)
What a caller asks takes effect at the boundary where the engine stands, so callers first `settle(t)`: the first boundary
strictly after t, or t itself if the engine is idle. A request ends after exactly `response_tokens` generated tokens, and
may have a pause, and a watched token, before.

With speculation, a pass verifies drafts: a request that decodes brings `drafted` tokens, of which the first `accepted` stand,
and gains one more besides (what a request has to gain is never exceeded). Which tokens it gains is never changed, only when.

Most passes decode the same batch as the pass before. Such a stretch, up to the next stop, changes only the length of the KV
cache, so it is run as a loop (`simrl.engine.passes`); everything else goes request by request. `tests/reference_engine.py` is
the same rule, written slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from simrl.engine.decoupled import run_decoupled
from simrl.engine.passes import run, run_speculative
from simrl.engine.state import (
    ADMITTING,
    COUNTERS,
    END,
    FIRST_TOKEN,
    FREE_BLOCKS,
    GENERATED,
    GENERATED_TOTAL,
    HARDNESS,
    LAST_TOKEN,
    N_RUNNING,
    N_STOPPED,
    N_WAITING,
    NEVER,
    PASSES,
    PAUSE,
    PREEMPTIONS,
    PROMPT,
    RELOADED_S,
    RESPONSE,
    SLOT_ROWS,
    SPENT,
    STOP_AT,
    STOP_KIND,
    STOPPED,
    STOPPED_KIND,
    TIME_ROWS,
    WAITING,
    WAITING_HEAD,
    WATCH,
    WATCH_AT,
    Floats,
    Limits,
    State,
    Stop,
    drop_caches,
    enqueue,
    queue_up,
    remove,
)
from simrl.errors import InputError
from simrl.profile import Tables
from simrl.speculation.bandit_kernel import copied, state_of
from simrl.speculation.decoding import (
    AT,
    BANDIT_KEY,
    DECOUPLED,
    DRAFT_ENDS_S,
    DRAFTED_TOTAL,
    DRIFT,
    ELASTIC_STATE,
    FLAGS,
    GAUGES,
    OLD_ACCEPTED,
    OLD_TOKENS,
    REWARDS,
    ROWS,
    SIBLINGS,
    SOURCE,
    TREES,
    UNVERIFIED_TOTAL,
    VERIFICATIONS,
    VERIFIED_TOTAL,
    WINDOW,
    WINDOW_START,
    Decoding,
    plain,
)
from simrl.speculation.gates import ELASTIC_OFF


class EngineConfig(BaseModel):
    """Settings of an inference engine, named as in vLLM. vLLM's own defaults depend on the GPU and on how it is started; these
    are usual for rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ELSEWHERE: ClassVar[Mapping[str, str]] = {  # vLLM's settings that a scenario says in another section
        "enforce_eager": "true is profile.least_pass_s, 0.2 to 0.6 ms a layer; false is what there is: leave it out",
        "tensor_parallel_size": "it is cluster.tp",
    }

    max_num_seqs: int = Field(default=256, gt=0, description="most sequences of a pass, at one worker")
    max_num_batched_tokens: int = Field(
        default=8192, gt=0, description="most tokens of a pass: prompts go in chunks of it"
    )
    block_size: int = Field(default=16, gt=0, le=10**6, description="tokens of a block of the KV cache")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of a GPU's memory for weights, KV cache and what is reserved"
    )
    reserve_bytes: float = Field(
        default=4e9,
        ge=0,
        description="activations, CUDA graphs and communication buffers of a GPU, not available to KV",
    )
    kv_cache_tokens: int | None = Field(
        default=None, gt=0, le=10**12, description="size of the KV cache where it is known"
    )
    async_scheduling: bool = Field(
        default=False,
        description="a pass is scheduled when the one before starts (vLLM's default where it can; not with decoupled drafts)",
    )


class Engine:
    """The state of one engine in simulated time. A request is known by its slot, an integer that is reused after its end.

    `slowdown` multiplies the duration of every pass from the boundary on at which it is set. With a `decoding` (how it
    drafts), requests that were given a source (`draft_from`) decode with drafts; `key` is that of its bandit's draws.

    Raises `InputError` for a request that could never fit the KV cache.
    """

    def __init__(self, tables: Tables, limits: Limits, decoding: Decoding | None = None, key: int = 0) -> None:
        self._tables = tables
        self._decoding = decoding
        decoding = decoding or plain()
        if decoding.rule[DECOUPLED] and decoding.rule[TREES]:
            raise ValueError("a decoupled drafter drafts chains; leave its strategies out")
        if decoding.rule[DECOUPLED]:
            limits = limits._replace(async_scheduling=False)
        index = decoding.siblings
        self._places = np.zeros(index.group_first.size, dtype=np.int64)  # of rows of the trace; see `draft_from`
        self._known = np.zeros(np.max(index.group_end - index.group_first, initial=0), dtype=np.int64)
        self._left_rows: list[int] = []
        self._bounds = np.array(limits, dtype=np.int64)
        self.limits = limits
        self._capacity_tokens = limits.kv_blocks * limits.block_size
        self.now_s = 0.0
        self.slowdown = 1.0
        self._free_slots: list[int] = []
        self._paused: set[int] = set()
        self._slots = np.zeros((SLOT_ROWS, 0), dtype=np.int64)
        self._drafts = np.zeros((ROWS, 0), dtype=np.int64)
        self._times = np.zeros((TIME_ROWS, 0))
        self._gauges = np.zeros(GAUGES)
        self._gauges[DRIFT] = 1.0
        self._gauges[DRAFT_ENDS_S] = np.inf
        self._flags = np.zeros(FLAGS, dtype=np.int64)
        self._flags[BANDIT_KEY] = key
        self._bandit = state_of(decoding.bandit, decoding.rule.item(REWARDS))
        self._counters = np.zeros(COUNTERS, dtype=np.int64)
        self._spent = np.zeros(SPENT)
        self._counters[FREE_BLOCKS] = limits.kv_blocks
        self._counters[ADMITTING] = 1
        self._grow(16)

    @property
    def running(self) -> int:
        return self._counters.item(N_RUNNING)

    @property
    def waiting(self) -> int:
        return self._counters.item(N_WAITING)

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds."""
        return self._counters.item(FREE_BLOCKS)

    @property
    def busy(self) -> bool:
        """Whether a next pass would do something now."""
        return self.running > 0 or (self.waiting > 0 and self.admitting)

    @property
    def admitting(self) -> bool:
        return self._counters.item(ADMITTING) == 1

    @admitting.setter
    def admitting(self, value: bool) -> None:
        self._counters[ADMITTING] = int(value)

    @property
    def generated_total(self) -> int:
        return self._counters.item(GENERATED_TOTAL)

    @property
    def spent(self) -> Floats:
        """What the passes since the start went to, entries as in `simrl.engine.state`; after them the preemptions."""
        return np.append(self._spent, self._counters[PREEMPTIONS])

    @property
    def totals(self) -> dict[str, int]:
        """Passes, generated tokens, prefilled tokens (recomputed ones included) and preemptions since the start."""
        names = ("passes", "generated_tokens", "prefill_tokens", "preemptions")
        return dict(zip(names, self._counters[PASSES:COUNTERS].tolist(), strict=True))

    def submit(
        self, prompt_tokens: int, response_tokens: int, generated_tokens: int = 0, cached_tokens: int = 0
    ) -> int:
        """A request joins the queue at this boundary; `generated_tokens` of its response exist and are prefilled.

        The first `cached_tokens` of all these are not computed: their KV came from elsewhere. They take up blocks from the
        request's admission on. Raises ValueError if there is nothing left to generate or nothing to compute.
        """
        if not 0 <= generated_tokens < response_tokens or not 0 <= cached_tokens < prompt_tokens + generated_tokens:
            raise ValueError(
                f"a request of {prompt_tokens} + {response_tokens} tokens with {generated_tokens} generated, "
                f"{cached_tokens} cached"
            )
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise self._never_fits(prompt_tokens, response_tokens)
        if not self._free_slots:
            self._grow(2 * self._slots.shape[1])
        slot = self._free_slots.pop()
        enqueue(
            self._slots,
            self._times,
            self._counters,
            slot,
            prompt_tokens,
            response_tokens,
            generated_tokens,
            cached_tokens,
        )
        self._drafts[:, slot] = 0
        return slot

    def draft_from(self, slot: int, source: int, at: int, hardness: float = 1.0, window: int | None = None) -> None:
        """From the next pass on, a request drafts from a source (see `simrl.speculation.decoding`), its window as at first.

        With the source SIBLINGS, `at` is its row of the trace, and its tokens may be drafted from by the group's other rows, as
        long as it is here; what it had when it ended or was aborted stays known until `forget_rows`. Of requests for the same
        row, the latest counts. Raises ValueError for SIBLINGS where drafting is decoupled.
        """
        assert self._decoding is not None
        self._leave_row(slot)
        self._drafts[SOURCE, slot] = source
        if source == SIBLINGS:
            if self._decoding.rule[DECOUPLED]:
                raise ValueError("a decoupled drafter is a model; siblings are drafted from where the verifier is")
            self._places[at] = slot + 1  # -t: it left with t tokens; 0: it was never here
        self._drafts[AT, slot] = at
        self._drafts[WINDOW, slot] = self._decoding.rule[WINDOW_START] if window is None else window
        self._times[HARDNESS, slot] = hardness

    def forget_rows(self) -> None:
        """Responses that are over are drafted from no more."""
        for row in self._left_rows:
            if self._places[row] < 0:
                self._places[row] = 0
        self._left_rows = []

    def _leave_row(self, slot: int) -> None:
        """A request is over, or drafts from something else: what it has generated is all that its row will ever have."""
        row = self._drafts.item(AT, slot)
        if self._drafts.item(SOURCE, slot) == SIBLINGS and self._places.item(row) == slot + 1:
            self._places[row] = -self.generated_tokens(slot)
            self._left_rows.append(row)

    def verify_old(self, slot: int, old_tokens: int, accepted: int) -> None:
        """A request that has nothing yet verifies an old response with its prompt, of which the first tokens stand."""
        room = self._capacity_tokens - self._slots.item(PROMPT, slot) - 1
        self._drafts[OLD_TOKENS, slot] = min(old_tokens, room)
        self._drafts[OLD_ACCEPTED, slot] = min(accepted, room)

    def new_rollout(self) -> None:
        """An elastic gate is shut again, until the batch has been small for long enough."""
        self._flags[ELASTIC_STATE] = ELASTIC_OFF

    @property
    def decoding(self) -> Decoding | None:
        """How it drafts. It may be changed between passes, for one with the same siblings, bandit and loops."""
        return self._decoding

    @decoding.setter
    def decoding(self, value: Decoding) -> None:
        self._decoding = value

    @property
    def drift(self) -> float:
        """What multiplies the hardness of every response: how far the policy is from the drafter."""
        return self._gauges.item(DRIFT)

    @drift.setter
    def drift(self, value: float) -> None:
        self._gauges[DRIFT] = value

    def drafted(self, slot: int) -> tuple[int, int, int]:
        """Of a request, also an ended one until its slot is used again: tokens drafted (also ahead, whatever became of them),
        accepted, and passes that verified."""
        total: list[int] = self._drafts[DRAFTED_TOTAL : VERIFICATIONS + 1, slot].tolist()
        return total[0], total[1], total[2]

    def unverified_tokens(self, slot: int) -> int:
        """Of the tokens drafted, those in no window that was verified: thrown away, or ahead now. 0 unless decoupled."""
        return self._drafts.item(UNVERIFIED_TOTAL, slot)

    def verified_tokens(self, slot: int) -> int:
        """The tokens that those passes yielded it, bonus tokens and corrections included."""
        return self._drafts.item(VERIFIED_TOTAL, slot)

    def stop_at(self, slot: int, tokens: int, kind: int) -> None:
        """Sets the next stop of a request, in place of the one before: the boundary at which it has `tokens` of its response.

        `kind` is PAUSE or WATCH; a request may have one of each. A pause comes at these tokens exactly, a watched token may be
        passed by a draft; where both come at once, the pause is reported. The end comes first: a stop at `response_tokens` or
        later never is. A stop that was reported is over. Raises ValueError for tokens that the request has already.
        """
        generated, response = self._slots.item(GENERATED, slot), self._slots.item(RESPONSE, slot)
        if tokens <= generated:
            raise ValueError(f"a stop at {tokens} tokens of a request that has {generated}")
        if kind == WATCH:
            self._slots[WATCH_AT, slot] = tokens if tokens < response else NEVER
            return
        self._slots[STOP_AT, slot] = min(tokens, response)
        self._slots[STOP_KIND, slot] = kind if tokens < response else END

    def resume(self, slot: int, observation_tokens: int = 0) -> None:
        """A paused request joins the end of the queue, with what is left of its cache; what it was told meanwhile, so many
        tokens, is prefilled. Raises KeyError for a request that is not paused (here: whose pause was not reported)."""
        prompt_tokens = self._slots.item(PROMPT, slot) + observation_tokens
        response_tokens = self._slots.item(RESPONSE, slot)
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise self._never_fits(prompt_tokens, response_tokens)
        self._paused.remove(slot)
        self._slots[PROMPT, slot] = prompt_tokens
        queue_up(self._slots, self._counters, slot)

    def abort(self, slot: int) -> int:
        """Takes a request out at this boundary. Returns the response tokens it has."""
        remove(self._slots, self._counters, slot)
        self._leave_row(slot)
        self._paused.discard(slot)
        self._free_slots.append(slot)
        return self.generated_tokens(slot)

    def recompute_running(self) -> None:
        """Every request loses its KV cache, those that are paused or wait too. Running ones recompute it before anything that
        waits, in their order."""
        drop_caches(self._slots, self._counters, RELOADED_S)

    def generated_tokens(self, slot: int) -> int:
        return self._slots.item(GENERATED, slot)

    def first_token_s(self, slot: int) -> float:
        """When the first token of a request came; of an ended one until its slot is used again."""
        return self._times.item(FIRST_TOKEN, slot)

    def settle(self, time_s: float) -> list[Stop]:
        """Runs to the first boundary strictly after `time_s`; an idle engine is moved to `time_s`.

        Returns what stopped on the way, in order.
        """
        stops: list[Stop] = []
        while self.busy and self.now_s <= time_s:
            self.now_s = self._run(self._state(), time_s, True)
            stops += self._stops()
        if not self.busy:
            self.now_s = max(self.now_s, time_s)
        return stops

    def next_stop_s(self) -> float:
        """When the next request stops if nobody asks for anything before; infinity if none does.

        Changes nothing, but that times of tokens to come may stand in `_times` already; what comes overwrites them.
        """
        if not self.busy:
            return np.inf
        slots, drafts, counters, spent, gauges, flags, bandit = self._state()
        if self._decoding is not None:  # else they never change
            drafts, gauges, flags, bandit = drafts.copy(), gauges.copy(), flags.copy(), copied(bandit)
        self._ahead = slots.copy(), drafts, counters.copy(), spent.copy(), gauges, flags, bandit
        self._ahead_s = self._run(self._ahead, np.inf, True)
        return self._ahead_s if self._ahead[2].item(N_STOPPED) else np.inf

    def take_next_stop(self) -> list[Stop]:
        """Moves to the boundary that `next_stop_s` found, and returns what stopped there."""
        self._slots, self._drafts, self._counters, self._spent, self._gauges, self._flags, self._bandit = self._ahead
        self.now_s = self._ahead_s
        return self._stops()

    def run_until_idle(self) -> Floats:
        """Runs everything that was submitted. Returns when each slot ended, NaN for unused ones, shape (capacity,)."""
        self.now_s = self._run(self._state(), np.inf, False)
        return self._times[LAST_TOKEN].copy()

    def _never_fits(self, prompt_tokens: int, response_tokens: int) -> InputError:
        return InputError(
            f"a sample of {prompt_tokens} + {response_tokens} tokens never fits the KV cache of {self._capacity_tokens} "
            "tokens; use more memory for the cache, a larger tp or a lower cap"
        )

    def _state(self) -> State:
        return self._slots, self._drafts, self._counters, self._spent, self._gauges, self._flags, self._bandit

    def _run(self, state: State, until_s: float, to_first_stop: bool) -> float:
        slots, drafts, counters, spent, gauges, flags, bandit = state
        rest: tuple[Any, ...] = (*self._tables, self._bounds, float(self.slowdown), until_s, to_first_stop)
        now_s: float
        if self._decoding is None:
            now_s = run(slots, drafts, self._times, counters, spent, self.now_s, *rest)
        elif self._decoding.rule[DECOUPLED]:
            rest = (gauges, flags, self.now_s, *rest, self._decoding)
            now_s = run_decoupled(slots, drafts, self._times, counters, spent, *rest)
        else:
            rest = (gauges, flags, bandit, self.now_s, *rest, self._decoding, self._places, self._known)
            now_s = run_speculative(slots, drafts, self._times, counters, spent, *rest)
        return now_s

    def _stops(self) -> list[Stop]:
        """What stopped in the last pass, now. The slots of ended requests are free again."""
        stops: list[Stop] = []
        for i in range(self._counters.item(N_STOPPED)):  # most often one: plain Python is fastest
            slot, kind = self._slots.item(STOPPED, i), self._slots.item(STOPPED_KIND, i)
            stops.append((slot, self.now_s, kind))
            if kind == END:
                self._leave_row(slot)
                self._free_slots.append(slot)
            elif kind == PAUSE:
                self._paused.add(slot)
        return stops

    def _grow(self, capacity: int) -> None:
        """More slots; the ring of waiting requests is laid out anew from its head."""
        old = self._slots.shape[1]
        slots = np.zeros((SLOT_ROWS, capacity), dtype=np.int64)
        slots[:, :old] = self._slots
        if old:
            slots[WAITING, :old] = np.roll(self._slots[WAITING], -int(self._counters[WAITING_HEAD]))
        self._counters[WAITING_HEAD] = 0
        drafts = np.zeros((ROWS, capacity), dtype=np.int64)
        drafts[:, :old] = self._drafts
        times = np.full((TIME_ROWS, capacity), np.nan)
        times[:, :old] = self._times
        self._slots, self._drafts, self._times = slots, drafts, times
        self._free_slots.extend(range(capacity - 1, old - 1, -1))
