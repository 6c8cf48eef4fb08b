"""Random scenarios for schedulers and what plays them: the engine, its slow reference, vLLM's own scheduler (`vllm_schedule`).

A pass takes one second; what a scenario asks comes at the boundaries between passes, which are whole seconds. An idle player is
moved to the next request. Two players agree if the `Pass` records of all their passes do.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from simrl.engine.engine import one_engine
from simrl.engine.state import END, PAUSE, Limits
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import RUNS, Decoding, Rule, chains, packed
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.windows import Fixed
from tests.helpers import one_second_a_pass
from tests.references.engine import Arm, ReferenceEngine, Request, Rules

BLOCK = 16
MOST_TOKENS = 512  # of a response


@dataclass(frozen=True)
class Turn:
    tokens: int  # that the model generates
    observation: int = 0  # tokens that the tool adds, before the next turn …
    passes: int = 0  # … which comes that many passes later


@dataclass(frozen=True)
class Sample:
    comes: int  # boundary
    prompt_key: int
    prompt: int
    turns: tuple[Turn, ...]
    aborts: tuple[
        tuple[int, int | None], ...
    ] = ()  # boundary, and how many passes later it is back with what it had
    salt: int | None = None  # prompts are found by requests of an equal one

    @property
    def key(self) -> tuple[int, int | None]:
        """What its prompt is found by."""
        return self.prompt_key, self.salt

    @property
    def response(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True)
class Scenario:
    limits: Limits
    samples: tuple[Sample, ...]
    resets: frozenset[int] = frozenset()  # boundaries at which all KV is dropped
    draft_tokens: int = 0  # the most a request drafts a pass
    drafts: tuple[
        tuple[tuple[int, int], ...], ...
    ] = ()  # of each sample: (drafted, accepted) by generated tokens
    # At resets all requests are aborted, and are back that many passes later, with their tokens or from the start.
    back: int | None = None
    starts_over: bool = False


@dataclass
class Pass:
    """What one pass did. A player leaves out what it does not know."""

    state: dict[
        int, tuple[int, int]
    ]  # of each running or waiting sample: tokens with KV, tokens generated
    preempted: int
    hit_tokens: int | None = None  # of the requests that it admitted …
    known_tokens: int | None = None  # … and all their tokens
    scheduled: dict[int, int] | None = None  # tokens, drafts included
    ended: list[int] = field(default_factory=list)  # samples whose turn ended

    def agrees(self, other: Pass) -> bool:
        fields = ("hit_tokens", "known_tokens", "scheduled")
        pairs = [(getattr(self, f), getattr(other, f)) for f in fields]
        same = all(a is None or b is None or a == b for a, b in pairs)
        return same and self.state == other.state and self.preempted == other.preempted


@dataclass
class Progress:
    """A sample's state, for the caller's side."""

    sample: Sample
    generated: int = 0
    observed: int = 0  # tokens that tools added
    turn: int = 0
    active: bool = False  # running or waiting
    at_tool: bool = False

    @property
    def prompt(self) -> int:
        return self.sample.prompt + self.observed

    @property
    def turn_end(self) -> int:
        """Generated tokens at which its turn ends."""
        return sum(turn.tokens for turn in self.sample.turns[: self.turn + 1])


class Player(Protocol):
    def idle_until(self, boundary: int) -> None: ...
    def submit(self, i: int, progress: Progress) -> None: ...
    def resume(self, i: int, progress: Progress, observation: int) -> None: ...
    def abort(self, i: int) -> None: ...
    def reset(self) -> None: ...
    def send_again(self, i: int, progress: Progress) -> None:
        """Let a request come back that a reset has aborted."""

    def one_pass(self, reset_follows: bool) -> Pass: ...
    @property
    def busy(self) -> bool: ...


def play(player: Player, scenario: Scenario) -> list[Pass]:
    """Play a scenario to its end."""
    all_progress = [Progress(sample) for sample in scenario.samples]
    events: list[tuple[int, int, str, int]] = []

    def at(boundary: int, what: str, i: int) -> None:
        heapq.heappush(events, (boundary, len(all_events), what, i))
        all_events.append(what)

    all_events: list[str] = []
    for boundary in sorted(scenario.resets):
        at(boundary, "reset", -1)
    for i, sample in enumerate(scenario.samples):
        at(sample.comes, "submit", i)
        for n, (boundary, _) in enumerate(sample.aborts):
            at(boundary, f"abort {n}", i)
    clock, passes = 0, []
    while events or player.busy:
        if not player.busy and events[0][0] > clock:
            clock = events[0][0]
            player.idle_until(clock)
        while events and events[0][0] <= clock:
            _, _, what, i = heapq.heappop(events)
            if what == "reset":
                player.reset()
                for j, progress in enumerate(all_progress):
                    if scenario.back is not None and progress.active:
                        progress.active = False
                        progress.generated *= not scenario.starts_over
                        at(clock + scenario.back, "again", j)
                continue
            progress = all_progress[i]
            if what == "submit":
                player.submit(i, progress)
                progress.active = True
            elif what == "resume":
                observation = progress.sample.turns[progress.turn - 1].observation
                progress.observed += observation
                progress.at_tool = False
                player.resume(i, progress, observation)
                progress.active = True
            elif what == "again":
                player.send_again(i, progress)
                progress.active = True
            elif progress.active:
                player.abort(i)
                progress.active = False
                back = progress.sample.aborts[int(what.split()[1])][1]
                if back is not None:
                    at(clock + back, "submit", i)
        if not player.busy:
            continue
        done = player.one_pass(clock + 1 in scenario.resets)
        clock += 1
        passes.append(done)
        for i, (_, generated) in done.state.items():
            all_progress[i].generated = generated
        for i in done.ended:
            progress = all_progress[i]
            progress.active = False
            progress.generated = progress.turn_end
            if progress.turn + 1 < len(progress.sample.turns):
                progress.at_tool = True
                at(clock + progress.sample.turns[progress.turn].passes, "resume", i)
            progress.turn += 1
    return passes


def different_passes(ours: Sequence[Pass], theirs: Sequence[Pass]) -> int:
    """Count the passes that differ, those that only one has included."""
    differ = sum(not a.agrees(b) for a, b in zip(ours, theirs, strict=False))
    return differ + abs(len(ours) - len(theirs))


def random_scenario(
    seed: int, prefix_caching: bool, async_scheduling: bool, draft_tokens: int = 0
) -> Scenario:
    """Draw a scenario: groups of one prompt, turns, scarce or ample KV, aborts, resets."""
    rng = np.random.default_rng(seed)
    kv_blocks = int(rng.choice([12, 16, 24, 40, 60, 400]))
    limits = Limits(
        int(rng.integers(2, 13)),
        int(rng.choice([24, 32, 64, 200])),
        BLOCK,
        kv_blocks,
        async_scheduling,
        prefix_caching,
    )
    room = kv_blocks * BLOCK - 2 * draft_tokens - 3
    turns_at_most = int(rng.choice([1, 2, 4])) if prefix_caching else 1
    aborting = rng.choice([0.0, 0.0, 0.3])
    samples: list[Sample] = []
    number = int(rng.integers(8, 25))
    while len(samples) < number:
        key, comes = len(samples), int(rng.choice([0, 0, 0, 3, 9, 40, 41, 60, 61]))
        prompt = int(
            rng.choice(
                [1, rng.integers(1, 131), 16 * rng.integers(1, 9), 16 * rng.integers(1, 9) + 1]
            )
        )
        for _ in range(int(rng.choice([1, 2, 4, 8]))):
            left, turns = room - prompt, []
            for _ in range(int(rng.integers(1, turns_at_most + 1))):
                tokens = int(min(rng.integers(1, 1 + 90 // turns_at_most), left))
                observation = int(rng.integers(0, 40)) if turns_at_most > 1 else 0
                if tokens + observation > left or tokens < 1:
                    break
                turns.append(Turn(tokens, observation, int(rng.choice([0, 1, 2, 10, 30]))))
                left -= tokens + observation
            aborts: list[tuple[int, int | None]] = []
            if rng.random() < aborting:
                back = None if rng.random() < 0.3 else int(rng.integers(0, 20))
                aborts.append((int(comes + rng.integers(0, 90)), back))
            late = comes + int(rng.choice([0, 0, 0, 1, 5]))
            samples.append(Sample(late, key, prompt, tuple(turns) or (Turn(1),), tuple(aborts)))
    resets = frozenset(int(b) for b in rng.integers(1, 150, rng.choice([0, 0, 1, 2])))
    drafts: tuple[tuple[tuple[int, int], ...], ...] = ()
    if draft_tokens:
        # An asynchronous scheduler schedules whole drafts, whatever the drafter finds.
        least = draft_tokens if async_scheduling else 0
        drafted = rng.integers(least, draft_tokens + 1, (len(samples), MOST_TOKENS))
        accepted = np.minimum(rng.integers(0, draft_tokens + 2, drafted.shape), drafted)
        drafts = tuple(
            tuple(zip(d, a, strict=True))
            for d, a in zip(drafted.tolist(), accepted.tolist(), strict=True)
        )
    return Scenario(limits, tuple(samples), resets, draft_tokens, drafts)


def updated_scenario(seed: int, async_scheduling: bool) -> Scenario:
    """Draw a scenario of an engine whose cache is salted, or whose requests are aborted at an update and sent again."""
    scenario, rng = random_scenario(seed, True, async_scheduling), np.random.default_rng(seed)
    prompts: dict[int, int] = {}
    samples = []
    for sample in scenario.samples:
        key = sample.prompt_key // 3  # groups of one prompt …
        prompt = prompts.setdefault(key, sample.prompt)
        fits = prompt + sample.response + sum(t.observation for t in sample.turns)
        if fits < scenario.limits.kv_blocks * BLOCK:
            salt = int(sample.prompt_key % 2) if seed % 2 else None  # … under two versions
            samples.append(replace(sample, prompt_key=key, prompt=prompt, salt=salt, aborts=()))
    resets = frozenset(int(b) for b in rng.integers(1, 90, 3))
    one_turn = all(len(sample.turns) == 1 for sample in samples)
    back = int(rng.choice([0, 1, 5, 30])) if one_turn else None
    starts_over = bool(rng.random() < 0.5)
    return replace(
        scenario, samples=tuple(samples), resets=resets, back=back, starts_over=starts_over
    )


def spaced_scenario(seed: int, async_scheduling: bool, draft_tokens: int = 0) -> Scenario:
    """Draw a scenario whose contexts are computed some passes apart, or that keeps blocks free at admission, or both."""
    rng = np.random.default_rng(2 * 10**6 + seed)
    scenario = random_scenario(seed, bool(rng.random() < 0.7), async_scheduling, draft_tokens)
    watermark = float(rng.choice([0.0, 0.02, 0.1, 0.3]))
    limits = scenario.limits._replace(
        prefill_interval=int(rng.choice([1, 2, 3, 5, 16])),
        watermark_blocks=int(watermark * (scenario.limits.kv_blocks + 1)),
    )
    return replace(scenario, limits=limits)


def sglang_scenario(seed: int, prefix_caching: bool) -> Scenario:
    """Draw a scenario of an engine that schedules as SGLang, with a cache of one token a block."""
    scenario = random_scenario(seed, prefix_caching, False)
    rng = np.random.default_rng(10**6 + seed)
    longest = max(
        sample.prompt + sample.response + sum(turn.observation for turn in sample.turns)
        for sample in scenario.samples
    )
    tokens = scenario.limits.kv_blocks * BLOCK // int(rng.choice([1, 1, 2]))
    cap = max(sample.response for sample in scenario.samples) + int(rng.choice([0, 0, 10, 200]))
    limits = scenario.limits._replace(
        block_size=1,
        kv_blocks=max(tokens, longest + 2),
        sglang=True,
        max_new_tokens=cap,
        clip_max_new_tokens=int(rng.choice([4096, 20, 5])),
        start_ratio=float(rng.choice([0.7, 0.7, 0.1, 1.0])),
    )
    return replace(scenario, limits=limits)


def full_cache_scenarios(async_scheduling: bool) -> list[Scenario]:
    """Two responses fill a prefix cache to its last block before their ends: the second is preempted, or aborted just then,
    and back at once or not at all."""
    limits = Limits(2, 3, 1, 210, async_scheduling, prefix_caching=True)
    aborts: list[tuple[tuple[int, int | None], ...]] = [
        (),
        *(((at, back),) for at in (104, 105) for back in (0, None)),
    ]
    pairs = [
        (Sample(0, 0, 1, (Turn(105),)), Sample(0, 1, 2, (Turn(105),), aborted))
        for aborted in aborts
    ]
    return [Scenario(limits, samples) for samples in pairs]


def two_aborted_at_once() -> Scenario:
    """Two prompts fill most of a cache; their requests are aborted at one boundary, the first one first. What comes next
    takes enough blocks for one of the prompts to be forgotten, before both come again."""
    limits = Limits(4, 16, 1, 12, async_scheduling=True, prefix_caching=True)
    aborted = [Sample(0, key, 3, (Turn(8),), ((2, None),)) for key in (0, 1)]
    again = [Sample(5, key, 3, (Turn(2),)) for key in (0, 1)]
    return Scenario(limits, (*aborted, Sample(3, 2, 6, (Turn(1),)), *again))


def one_token_prompt_padded_with_drafts() -> Scenario:
    """A prompt of one token starts beside a request that decodes, in a cache that is full when its padding counts."""
    limits = Limits(4, 16, 1, 16, async_scheduling=True)
    samples = (Sample(0, 0, 1, (Turn(8),)), Sample(2, 1, 1, (Turn(3),)))
    return Scenario(limits, samples, draft_tokens=3, drafts=(((3, 0),) * MOST_TOKENS,) * 2)


def window_behind_rejected_drafts() -> Scenario:
    """Two requests with a window, all of whose drafts are rejected, in a cache that is full when windows free too little."""
    limits = Limits(4, 32, 1, 52, async_scheduling=True, window_groups=1, window_tokens=4)
    samples = (Sample(0, 0, 8, (Turn(10),)), Sample(0, 1, 8, (Turn(10),)))
    return Scenario(limits, samples, draft_tokens=3, drafts=(((3, 0),) * MOST_TOKENS,) * 2)


SMALL = [two_aborted_at_once, one_token_prompt_padded_with_drafts, window_behind_rejected_drafts]


def hybrid_scenario(seed: int, async_scheduling: bool, draft_tokens: int = 0) -> Scenario:
    """Draw a scenario of a model whose layers keep every token, the last ones alone, or a state: some of each, in groups."""
    scenario = random_scenario(seed, False, async_scheduling, draft_tokens)
    rng = np.random.default_rng(seed)
    windows, states = (int(n) for n in rng.choice([(0, 3), (1, 0), (2, 2), (0, 1), (3, 0)]))
    groups = {
        "full_groups": int(rng.integers(1, 3)),
        "window_groups": windows,
        "state_blocks": states,
    }
    columns = scenario.limits.kv_blocks  # of one sequence
    blocks = (groups["full_groups"] + windows) * columns + states * int(rng.integers(1, 5))
    tokens = int(rng.choice([5, 16, 33, 64])) if windows else 0
    return replace(
        scenario, limits=scenario.limits._replace(**groups, window_tokens=tokens, kv_blocks=blocks)
    )


# --- The slow reference


class ReferencePlayer:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._engine = ReferenceEngine(one_second_a_pass(), scenario.limits)
        self._requests: dict[int, Request] = {}
        k = scenario.draft_tokens
        if k:
            self._engine.rules = Rules(start=k, window=lambda *_: k, arms=[Arm([])], padding=k)

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def idle_until(self, boundary: int) -> None:
        self._engine.now_s = float(boundary)

    def submit(self, i: int, progress: Progress) -> None:
        sample = progress.sample
        request = self._engine.submit(
            progress.prompt,
            sample.response,
            progress.generated,
            prompt_key=sample.prompt_key,
            sample_key=i,
            shared_tokens=sample.prompt,
            salt=sample.salt,
        )
        if self._scenario.drafts:
            request.runs, request.window = (
                list(self._scenario.drafts[i]),
                self._scenario.draft_tokens,
            )
        self._requests[i] = request
        self._stop(i, progress)

    def resume(self, i: int, progress: Progress, observation: int) -> None:
        self._engine.resume(self._requests[i], observation)
        self._stop(i, progress)

    def _stop(self, i: int, progress: Progress) -> None:
        if progress.turn_end < progress.sample.response:
            self._engine.stop_at(self._requests[i], progress.turn_end, PAUSE)

    def abort(self, i: int) -> None:
        self._engine.abort(self._requests.pop(i))

    def reset(self) -> None:
        self._engine.recompute_running()
        if self._scenario.back is not None:
            for i in list(self._requests):
                self.abort(i)

    def send_again(self, i: int, progress: Progress) -> None:
        self.submit(i, progress)

    def one_pass(self, reset_follows: bool) -> Pass:
        engine, of = self._engine, {id(request): i for i, request in self._requests.items()}
        before, hits, known = engine.preemptions, engine.hit_tokens, engine.lookup_tokens
        engine.stops.clear()
        engine.iterate()
        ended = [of[id(request)] for request, _, _ in engine.stops]
        for request, _, kind in engine.stops:
            if kind == END:
                del self._requests[of[id(request)]]
        return Pass(
            {of[id(r)]: (r.computed, r.generated) for r in (*engine.running, *engine.waiting)},
            engine.preemptions - before,
            engine.hit_tokens - hits,
            engine.lookup_tokens - known,
            {request.sample_key: new for request, new in engine.plan},
            ended,
        )


# --- The compiled engine


def decoding_of(scenario: Scenario) -> Decoding | None:
    """Make a drafter that takes no time and drafts as the scenario says."""
    if not scenario.draft_tokens:
        return None
    drafts = np.array(scenario.drafts, dtype=np.uint8)
    runs = AcceptRuns(
        np.arange(len(scenario.samples)) * MOST_TOKENS,
        drafts[..., 0].ravel().copy(),
        drafts[..., 1].ravel().copy(),
    )
    times = DraftTimes(np.array([1.0, 64.0]), np.zeros(2), np.zeros(2), 0, 0, "assumed", "a test")
    rule = Rule(window=Fixed(tokens=scenario.draft_tokens).rule)
    return chains(rule, times, ModelAcceptance(by_position=(0.5,)))._replace(runs=packed(runs))


class EnginePlayer:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._engine = one_engine(one_second_a_pass(), scenario.limits, decoding_of(scenario))
        self._slots: dict[int, int] = {}
        self._at_tool: set[int] = set()
        self._aside: set[int] = set()
        self._keys: dict[tuple[int, int | None], int] = {}

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def idle_until(self, boundary: int) -> None:
        self._engine.now_s = float(boundary)

    def submit(self, i: int, progress: Progress) -> None:
        sample, keys = progress.sample, {}
        if self._scenario.limits.prefix_caching:
            keys = {
                "prompt_key": self._keys.setdefault(sample.key, len(self._keys)),
                "sample_key": i,
                "shared_tokens": sample.prompt,
            }
        slot = self._engine.submit(progress.prompt, sample.response, progress.generated, **keys)
        self._slots[i] = slot
        if self._scenario.drafts:
            self._engine.draft_from(slot, RUNS, i * MOST_TOKENS)
        self._stop(i, progress)

    def resume(self, i: int, progress: Progress, observation: int) -> None:
        self._at_tool.discard(i)
        self._engine.resume(self._slots[i], observation)
        self._stop(i, progress)

    def _stop(self, i: int, progress: Progress) -> None:
        if progress.turn_end < progress.sample.response:
            self._engine.stop_at(self._slots[i], progress.turn_end, PAUSE)

    def abort(self, i: int) -> None:
        self._engine.abort(self._slots.pop(i))

    def reset(self) -> None:
        if self._scenario.back is None:
            self._engine.recompute_running()
        else:
            aside = self._engine.set_aside(self._scenario.starts_over)
            self._aside.update(i for i, slot in self._slots.items() if slot in aside)

    def send_again(self, i: int, progress: Progress) -> None:
        self._aside.discard(i)
        self._engine.queue_again([self._slots[i]])

    def one_pass(self, reset_follows: bool) -> Pass:
        engine, of = self._engine, {slot: i for i, slot in self._slots.items()}
        before: Mapping[str, int] = dict(engine.totals)
        stops = engine.settle(engine.now_s)
        after = engine.totals
        assert after["passes"] == before["passes"] + 1
        ended = [of[slot] for slot, _, _ in stops]
        for slot, _, kind in stops:
            if kind == END:
                del self._slots[of[slot]]
            else:
                self._at_tool.add(of[slot])
        r = engine.fleet.arrays.engines.requests[0]
        done = Pass(
            {
                i: (int(r["computed"][s]), int(r["generated"][s]))
                for i, s in self._slots.items()
                if i not in self._at_tool | self._aside
            },
            after["preemptions"] - before["preemptions"],
            ended=ended,
        )
        if "hit_tokens" in after:
            done.hit_tokens = after["hit_tokens"] - before["hit_tokens"]
            done.known_tokens = after["lookup_tokens"] - before["lookup_tokens"]
        return done
