"""The simulated worker: when what a schedule asks takes effect, and what becomes of the responses meanwhile."""

import heapq
import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.engine.state import PAUSE, Limits
from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout, Segment, WeightLoad
from simrl.runtime.simulated_worker import SimulatedWorker, simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.trace.trace import Sample, Turn
from tests.engine.test_engine import TABLES, limits as any_limits
from tests.helpers import RESPONSES, ROOMY, examples, one_second_a_pass, recorder, sample
from tests.references.engine import ReferenceEngine, Request

TICKS = one_second_a_pass()


def a_worker(
    limits: Limits = ROOMY, load_s: float = 10.0
) -> tuple[simpy.Environment, SimulatedWorker]:
    env = simpy.Environment()
    return env, simulated_workers(
        env, 1, TICKS, limits, WorkerCosts(load_s), RESPONSES, recorder()
    )[0]


def at(env: simpy.Environment, time_s: float, call) -> None:
    on_fire(env.timeout(time_s), lambda _: call())


def fired(env: simpy.Environment, event: simpy.Event) -> list:
    """Grows by (when, with what) as the event fires."""
    log: list = []
    on_fire(event, lambda event: log.append((env.now, event.value)))
    return log


# The rule, written slowly: one loop over passes, one queue of commands.


@dataclass(eq=False)
class ReferenceStay:
    uid: int
    request: Request
    closed: int
    started_s: float
    segments: list[Segment]
    first_token_s: float = math.nan
    until_s: float = 0.0  # when the environment has answered ...
    said: int = 0  # ... with so many tokens
    absent: bool = False  # not in the engine: its environment takes its time


@dataclass
class ReferenceWorker:
    """Commands (time, what, argument) take effect at the first boundary strictly after their time, at once if idle.

    ("submit", requests), ("abort", uid), ("bounce", uid): abort and, when that has fired, submit what there is again;
    ("load", mode), where the mode may have the seconds after which what was aborted is back; ("fail", None),
    ("restore", None). `after_end` maps a uid to the commands that are asked the moment its
    response has ended.
    """

    engine: ReferenceEngine
    load_s: float
    after_end: dict[int, list[tuple]]
    version: int = 0
    stays: list[ReferenceStay] = field(default_factory=list)
    drains: list[tuple[str, int]] = field(
        default_factory=list
    )  # loads that wait for one: mode, number
    ended: dict[int, list[tuple]] = field(default_factory=dict)
    aborts: list[tuple] = field(default_factory=list)
    loads: dict[int, WeightLoad] = field(default_factory=dict)
    asked_loads: int = 0
    prompts: dict[int, int] = field(
        default_factory=dict
    )  # tokens of each, without what environments said
    lost_tokens: int = 0  # of those that started over
    lost: bool = False
    asked_version: int = 0

    def run(self, commands: list[tuple]) -> None:
        self.queue = [
            (time_s, i, what, argument) for i, (time_s, what, argument) in enumerate(commands)
        ]
        heapq.heapify(self.queue)
        engine = self.engine
        while self.queue or engine.busy:
            instant_s = self.queue[0][0] if self.queue else math.inf
            if engine.busy and engine.now_s <= instant_s:
                engine.iterate()
                self.take_pauses()
                self.take_ends()
                self.load_if_drained()
            else:
                engine.now_s = max(engine.now_s, instant_s)
                now = []
                while self.queue and self.queue[0][0] == instant_s:
                    now.append(heapq.heappop(self.queue))
                for _, _, what, argument in now:
                    getattr(self, what)(argument)

    def ask(self, what: str, argument) -> None:
        """A reaction to what happens at this boundary, asked at its time, after what was planned for that time."""
        heapq.heappush(
            self.queue, (self.engine.now_s, 10**6 + next(self.reactions), what, argument)
        )

    def __post_init__(self) -> None:
        self.reactions = iter(range(10**6))

    def submit(self, requests) -> None:
        for uid, prompt, response in requests:
            self.prompts[uid] = prompt
            stay = ReferenceStay(
                uid, Request(prompt, response, sample_key=uid), 0, self.engine.now_s, []
            )
            self.begin(stay)

    def resubmit(self, old: ReferenceStay) -> None:
        request = Request(
            old.request.prompt, old.request.response, old.request.generated, sample_key=old.uid
        )
        stay = ReferenceStay(
            old.uid,
            request,
            request.generated,
            self.engine.now_s,
            list(old.segments),
            old.first_token_s,
        )
        stay.until_s = old.until_s
        self.begin(stay)

    def begin(self, stay: ReferenceStay) -> None:
        self.stays.append(stay)
        if self.lost:
            self.leave(stay, done=False)
        elif stay.until_s > self.engine.now_s:
            stay.absent = True
            self.later(stay.until_s, "enter", stay)
        else:
            self.enter(stay)

    def enter(self, stay: ReferenceStay) -> None:
        if stay in self.stays:
            stay.absent = False
            stay.started_s = self.engine.now_s
            self.engine.queue.append(stay.request)
            self.set_stop(stay)

    def set_stop(self, stay: ReferenceStay) -> None:
        ends = [
            turn.end_tokens
            for turn in RESPONSES[stay.uid].turns
            if turn.end_tokens > stay.request.generated
        ]
        if ends:
            self.engine.stop_at(stay.request, ends[0], PAUSE)

    def later(self, time_s: float, what: str, argument) -> None:
        heapq.heappush(self.queue, (time_s, 10**6 + next(self.reactions), what, argument))

    def take_pauses(self) -> None:
        """Requests that paused in this pass: their caches stay, what the environment said comes with the resumption."""
        for request, _, kind in self.engine.stops:
            stay = next((s for s in self.stays if s.request is request), None)
            if kind == PAUSE and stay is not None:
                self.close_segment(stay)
                turn = next(
                    t for t in RESPONSES[stay.uid].turns if t.end_tokens == request.generated
                )
                stay.until_s = self.engine.now_s + turn.environment_s
                stay.said = turn.observation_tokens
                self.later(stay.until_s, "resume", stay)
        self.engine.stops.clear()

    def resume(self, stay: ReferenceStay) -> None:
        if stay in self.stays:
            self.engine.resume(stay.request, stay.said)
            stay.said = 0
            stay.started_s = self.engine.now_s
            self.set_stop(stay)

    def fail(self, _) -> None:
        if not self.lost:
            self.lost = True
            for stay in list(self.stays):
                self.leave(stay, done=False)
                self.engine.abort(stay.request)
            self.load_if_drained()

    def restore(self, _) -> None:
        if self.lost:
            self.lost = False
            self.engine.now_s += self.load_s
            self.version = self.asked_version

    def abort(self, uid: int) -> ReferenceStay | None:
        stay = next((s for s in self.stays if s.uid == uid), None)
        self.aborts.append((uid, self.engine.now_s, stay is not None))
        if stay is not None:
            self.leave(stay, done=False)
            self.engine.abort(stay.request)
            self.load_if_drained()
        return stay

    def bounce(self, uid: int) -> None:
        fired_s = (
            self.engine.now_s
        )  # a drained load, of which the abort is the cause, comes after the abort has fired
        stay = self.abort(uid)
        if stay is not None:
            heapq.heappush(self.queue, (fired_s, 10**6 + next(self.reactions), "resubmit", stay))

    def load(self, mode: str) -> None:
        number = self.asked_loads
        self.asked_loads += 1
        self.asked_version = self.asked_loads
        if mode == "drain" or self.drains:
            self.drains.append((mode, number))
            self.engine.admitting = False
            self.load_if_drained()
        else:
            self.change_weights(mode, number)

    def load_if_drained(self) -> None:
        while self.drains and (self.drains[0][0] != "drain" or not self.engine.running):
            mode, number = self.drains.pop(0)
            self.change_weights(mode, number)
        self.engine.admitting = not self.drains

    def change_weights(self, mode: str, number: int) -> None:
        if self.lost:
            self.loads[number] = WeightLoad(number + 1, self.engine.now_s, self.engine.now_s)
            return
        for stay in self.stays:
            self.close_segment(stay)
        if mode != "keep":
            self.engine.recompute_running()
        started_s = self.engine.now_s
        self.engine.now_s += self.load_s
        for stay in self.stays:
            stay.started_s = started_s
        self.version = number + 1
        self.loads[number] = WeightLoad(number + 1, started_s, self.engine.now_s)
        how, _, retry_s = mode.partition(" ")
        if how == "start_over" or (how == "recompute" and retry_s):
            self.abort_and_send_again(how == "start_over", started_s, float(retry_s or 0))

    def abort_and_send_again(self, from_the_start: bool, started_s: float, retry_s: float) -> None:
        """What runs or waits in the engine, in this order, is another request when it comes back."""
        for request in list(self.engine.queue):
            stay = next(s for s in self.stays if s.request is request)
            self.engine.abort(request)
            prompt, had = request.prompt, request.generated
            if from_the_start:
                self.lost_tokens += had
                prompt, had = self.prompts[stay.uid], 0
                stay.segments, stay.closed, stay.first_token_s = [], 0, math.nan
            elif math.isnan(stay.first_token_s):
                stay.first_token_s = request.first_token_s
            stay.request = Request(prompt, request.response, had, sample_key=stay.uid)
            if retry_s > 0:
                stay.absent = True
                self.later(started_s + retry_s, "enter", stay)
            else:
                self.enter(stay)

    def take_ends(self) -> None:
        for stay in [s for s in self.stays if s.request.generated == s.request.response]:
            self.leave(stay, done=True)
            for what, argument in self.after_end.get(stay.uid, []):
                self.ask(what, argument)

    def leave(self, stay: ReferenceStay, done: bool) -> None:
        self.stays.remove(stay)
        self.close_segment(stay)
        stay.request.prompt += stay.said
        stay.said = 0
        if math.isnan(stay.first_token_s):
            stay.first_token_s = stay.request.first_token_s
        leaving = (
            done,
            self.engine.now_s,
            stay.request.generated,
            tuple(stay.segments),
            stay.first_token_s,
        )
        self.ended.setdefault(stay.uid, []).append(leaving)

    def close_segment(self, stay: ReferenceStay) -> None:
        new = stay.request.generated - stay.closed
        if new:
            stay.segments.append(Segment(0, self.version, new, stay.started_s, self.engine.now_s))
            stay.closed = stay.request.generated
        stay.started_s = self.engine.now_s


@dataclass
class Observed:
    """The simulated worker given the same commands, and everything that fired."""

    env: simpy.Environment
    worker: SimulatedWorker
    after_end: dict[int, list[tuple]]
    samples: dict[int, Sample]
    stays: list[simpy.Event] = field(default_factory=list)
    ended: dict[int, list[tuple[float, Rollout]]] = field(default_factory=dict)
    aborts: list[tuple] = field(default_factory=list)
    loads: list[simpy.Event] = field(default_factory=list)
    load_fired_s: dict[int, float] = field(default_factory=dict)

    def run(self, commands: list[tuple]) -> None:
        for (
            time_s,
            what,
            argument,
        ) in commands:  # all planned before anything reacts: first in their instants
            timeout = self.env.timeout(time_s)
            on_fire(timeout, lambda _, what=what, argument=argument: getattr(self, what)(argument))
        self.env.run()

    def submit(self, requests) -> None:
        for uid, _, _ in requests:
            self.stay(uid)

    def stay(self, uid: int, partial: Rollout | None = None) -> None:
        event = self.worker.submit(self.samples[uid], partial)
        self.stays.append(event)

        def ended(event) -> None:
            self.ended.setdefault(uid, []).append((self.env.now, event.value))
            if event.value.done:
                for what, argument in self.after_end.get(uid, []):
                    getattr(self, what)(argument)

        on_fire(event, ended)

    def abort(self, uid: int):
        event = self.worker.abort(self.samples[uid])
        on_fire(event, lambda event: self.aborts.append((uid, self.env.now, event.value)))
        return event

    def bounce(self, uid: int) -> None:
        on_fire(self.abort(uid), lambda event: event.value and self.stay(uid, event.value))

    def fail(self, _) -> None:
        self.worker.fail()

    def restore(self, _) -> None:
        self.worker.restore()

    def load(self, mode: str) -> None:
        number = len(self.loads)
        how, _, retry_s = mode.partition(" ")
        event = self.worker.load_weights(number + 1, running=how, retry_s=float(retry_s or 0))
        self.loads.append(event)
        on_fire(event, lambda _: self.load_fired_s.setdefault(number, self.env.now))


MODES = ["recompute", "keep", "drain", "start_over"]
RETRIES = ["recompute 0.17", "start_over 0.17", "recompute 3.3", "start_over 17.7"]
lengths = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 120)), min_size=1, max_size=4)
asked = st.one_of(
    lengths.map(lambda r: ("submit", r)),
    st.integers(0, 12).map(lambda uid: ("abort", uid)),
    st.integers(0, 12).map(lambda uid: ("bounce", uid)),
    st.sampled_from(MODES + RETRIES).map(lambda mode: ("load", mode)),
    st.sampled_from([("fail", None), ("restore", None)]),
)


def timelines(waits):
    planned = st.lists(st.tuples(waits, asked), min_size=1, max_size=10)
    reactions = st.lists(st.tuples(st.integers(0, 12), asked), max_size=4)
    return st.tuples(planned, reactions)


def turns_of(uid, response):
    """Turns for every other request; the seconds are so odd that no answer falls on a boundary of whole seconds."""
    ends = [end for end in (response // 3, response // 2) if end] if uid % 2 else []
    return [Turn(end, (1 + uid + i) * 0.7071, 5 * i) for i, end in enumerate(sorted(set(ends)))]


def number_requests(planned, reactions, turns):
    """Gives every request a uid; returns the commands at their times, the reactions by uid, the samples by uid."""
    samples: dict[int, Sample] = {}

    def numbered(what, argument):
        if what != "submit":
            return what, argument
        requests = [(len(samples) + i, *r) for i, r in enumerate(argument)]
        samples.update(
            {
                uid: sample(uid, prompt, response, turns(uid, response))
                for uid, prompt, response in requests
            }
        )
        return what, requests

    commands, clock_s = [], 0.0
    for wait_s, (what, argument) in planned:
        clock_s += wait_s
        commands.append((clock_s, *numbered(what, argument)))
    after_end: dict[int, list[tuple]] = {}
    for uid, (what, argument) in reactions:
        after_end.setdefault(uid, []).append(numbered(what, argument))

    def possible(what, argument):
        return what not in ("abort", "bounce") or argument in samples

    commands = [c for c in commands if possible(*c[1:])]
    return (
        commands,
        {uid: [c for c in asked if possible(*c)] for uid, asked in after_end.items()},
        samples,
    )


def compare_with_reference(tables, limits, load_s, timeline, turns=lambda uid, response: ()):
    commands, after_end, samples = number_requests(*timeline, turns)
    reference = ReferenceWorker(ReferenceEngine(tables, limits), load_s, after_end)
    reference.run(commands)
    env = simpy.Environment()
    record = recorder()
    (worker,) = simulated_workers(env, 1, tables, limits, WorkerCosts(load_s), RESPONSES, record)
    seen = Observed(env, worker, after_end, samples)
    seen.run(commands)

    close = {"rel": 1e-9, "abs": 1e-12}
    assert all(
        event.processed for event in [*seen.stays, *seen.loads]
    )  # (SimPy refuses to fire an event twice)
    assert sorted(seen.ended) == sorted(reference.ended)
    for uid, stays in reference.ended.items():
        assert len(seen.ended[uid]) == len(stays)
        for (fired_s, rollout), (done, ended_s, tokens, segments, first_token_s) in zip(
            seen.ended[uid], stays, strict=True
        ):
            assert rollout.sample == samples[uid]
            assert (rollout.done, rollout.tokens) == (done, tokens)
            assert fired_s == pytest.approx(ended_s, **close)
            assert rollout.first_token_s == pytest.approx(first_token_s, nan_ok=True, **close)
            assert [s[:3] for s in rollout.segments] == [s[:3] for s in segments]
            assert [s[3:] for s in rollout.segments] == [
                pytest.approx(s[3:], **close) for s in segments
            ]
            assert rollout.tokens == RESPONSES[rollout.sample.uid].tokens or not done
    assert [(uid, value is not None) for uid, _, value in seen.aborts] == [
        (u, w) for u, _, w in reference.aborts
    ]
    assert [s for _, s, _ in seen.aborts] == pytest.approx(
        [s for _, s, _ in reference.aborts], **close
    )
    for number, expected in reference.loads.items():
        assert seen.loads[number].value.version == expected.version == number + 1
        assert seen.loads[number].value == pytest.approx(expected, **close)
        assert seen.load_fired_s[number] == pytest.approx(expected.finished_s, **close)
    assert len(seen.loads) == len(reference.loads)
    assert worker.engine.totals["passes"] == reference.engine.passes
    generated = sum(rollout.tokens for stays in seen.ended.values() for _, rollout in stays[-1:])
    assert (
        worker.engine.generated_total
        == generated + reference.lost_tokens
        == sum(s.tokens for s in record.spans if s.kind == "rollout")
    )
    twice = record.result(env.now, {}).samples["duplicate_tokens"].to_pylist()
    assert sum(twice) == reference.lost_tokens
    return record


@examples(100)
@given(
    any_limits, timelines(st.one_of(st.just(0.0), st.floats(0, 0.6))), st.sampled_from([0.02, 0.3])
)
def test_whatever_is_asked_and_whenever_a_worker_does_it_by_the_written_rule(
    limits, timeline, load_s
):
    """I3: a worker does as the slow reference."""
    compare_with_reference(TABLES, limits, load_s, timeline)


@examples(100)
@given(
    any_limits,
    timelines(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, 60.0])),
    st.sampled_from([1.0, 2.5]),
)
def test_what_is_asked_exactly_at_a_boundary_waits_for_the_next_one(limits, timeline, load_s):
    """I1: with passes of one second, commands and boundaries fall on the same instants."""
    record = compare_with_reference(TICKS, limits, load_s, timeline)
    busy = sorted((s.started_s, s.ended_s) for s in record.spans if s.ended_s > s.started_s)
    assert all(first[1] <= second[0] for first, second in pairwise(busy))


@examples(50)
@given(
    any_limits, timelines(st.one_of(st.just(0.0), st.floats(0, 0.6))), st.sampled_from([0.02, 0.3])
)
def test_what_waits_for_environments_follows_the_written_rule_too(limits, timeline, load_s):
    """I3: a worker does as the slow reference also where requests have turns."""
    compare_with_reference(TABLES, roomier(limits), load_s, timeline, turns_of)


@examples(50)
@given(
    any_limits,
    timelines(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, 60.0])),
    st.sampled_from([1.0, 2.5]),
)
def test_what_waits_for_environments_between_passes_of_a_second_follows_it_too(
    limits, timeline, load_s
):
    compare_with_reference(TICKS, roomier(limits), load_s, timeline, turns_of)


def roomier(limits):
    """With space for what environments say to the longest request."""
    return limits._replace(kv_blocks=limits.kv_blocks + -(-5 // limits.block_size))


# The same rules one by one, counted by hand: every pass takes a second, every load ten.


def test_an_idle_worker_starts_at_once_and_gives_a_token_a_pass():
    env, worker = a_worker()
    log = []
    at(env, 2.5, lambda: log.append(fired(env, worker.submit(sample(0, response_tokens=8)))))
    env.run()
    [[(ended_s, rollout)]] = log
    assert ended_s == 10.5
    assert rollout.segments == (Segment(0, 0, 8, 2.5, 10.5),)
    assert rollout.first_token_s == 3.5
    assert rollout.done


def test_a_busy_worker_takes_a_new_sample_after_the_pass_that_runs():
    env, worker = a_worker()
    worker.submit(sample(0, response_tokens=20))
    second = worker.submit(sample(1, response_tokens=3))
    late = []
    on_fire(second, lambda _: late.append(fired(env, worker.submit(sample(2, response_tokens=3)))))
    env.run()
    assert (
        late[0][0][0] == 7.0
    )  # asked at 3 when the second ended, admitted at 4: not in the pass that begins at 3


def test_samples_submitted_in_one_instant_start_in_one_pass_whatever_chain_of_events_led_there():
    """I2: commands of one instant arrive together."""
    env, worker = a_worker(ROOMY._replace(max_num_batched_tokens=8))
    short, long = (
        sample(0, prompt_tokens=4, response_tokens=1),
        sample(1, prompt_tokens=4, response_tokens=1),
    )

    def submit_after(reactions, what):
        yield env.timeout(3.0)
        for _ in range(reactions):
            yield env.timeout(0)
        return (yield worker.submit(what))

    ends = gather(env, [env.process(submit_after(0, short)), env.process(submit_after(5, long))])
    assert [rollout.finished_s for rollout in env.run(ends)] == [4.0, 4.0]


def test_two_workers_whose_responses_end_at_one_instant_get_the_reaction_to_both_one_pass_later():
    env = simpy.Environment()
    record = recorder("rollout-000", "rollout-001")
    workers = simulated_workers(env, 2, TICKS, ROOMY, WorkerCosts(10.0), RESPONSES, record)
    uids = iter(range(100))
    for worker in workers:
        worker.submit(sample(next(uids), response_tokens=9))  # keeps it busy
    started = []

    def react(event):
        started.extend(worker.submit(sample(next(uids), response_tokens=1)) for worker in workers)

    for worker in workers:
        on_fire(worker.submit(sample(next(uids), response_tokens=3)), react)
    env.run()
    assert [event.value.segments[0].started_s for event in started] == [4.0] * 4
    assert [event.value.finished_s for event in started] == [5.0] * 4


def test_new_weights_cost_their_load_and_the_recomputation_of_every_running_cache():
    ends = {}
    for mode in ("keep", "recompute"):
        env, worker = a_worker(ROOMY._replace(max_num_batched_tokens=5))
        response = worker.submit(sample(0, prompt_tokens=4, response_tokens=20))
        loaded = []
        at(
            env,
            10.5,
            lambda worker=worker, mode=mode, loaded=loaded: loaded.append(
                worker.load_weights(1, mode)
            ),
        )
        rollout = env.run(response)
        ends[mode] = rollout.finished_s
        assert loaded[0].value == WeightLoad(1, 11.0, 21.0)
        assert rollout.segments == (
            Segment(0, 0, 11, 0.0, 11.0),
            Segment(0, 1, 9, 11.0, rollout.finished_s),
        )
    assert ends["keep"] == 20 + 10
    assert (
        ends["recompute"] == 20 + 10 + 2
    )  # 4 + 11 tokens again, 5 a pass, of which the last gives a token


def test_during_a_load_nothing_is_generated_and_what_is_asked_waits_for_its_end():
    env, worker = a_worker()
    worker.load_weights(1)
    log = []
    at(env, 4.0, lambda: log.append(worker.submit(sample(0, response_tokens=2))))
    env.run()
    assert log[0].value.segments == (Segment(0, 1, 2, 10.0, 12.0),)


def test_a_drain_ends_what_runs_under_the_old_weights_and_starts_what_waits_under_the_new():
    env, worker = a_worker(ROOMY._replace(max_num_seqs=2))
    stays = [worker.submit(sample(uid, response_tokens=n)) for uid, n in enumerate([5, 9, 3])]
    loads = []
    at(env, 2.5, lambda: loads.append(worker.load_weights(1, "drain")))
    at(env, 6.0, lambda: stays.append(worker.submit(sample(3, response_tokens=4))))
    env.run()
    assert loads[0].value == WeightLoad(1, 9.0, 19.0)
    assert [[s[1:3] + s[4:] for s in stay.value.segments] for stay in stays] == [
        [(0, 5, 5.0)],
        [(0, 9, 9.0)],
        [(1, 3, 22.0)],
        [(1, 4, 23.0)],
    ]


def test_weights_change_in_the_order_they_were_asked_also_behind_a_drain():
    env, worker = a_worker()
    response = worker.submit(sample(0, response_tokens=6))
    loads = []
    at(
        env,
        1.5,
        lambda: loads.extend(
            [worker.load_weights(1, "drain"), worker.load_weights(2, "recompute")]
        ),
    )
    env.run()
    assert [load.value for load in loads] == [WeightLoad(1, 6.0, 16.0), WeightLoad(2, 16.0, 26.0)]
    assert response.value.segments == (Segment(0, 0, 6, 0.0, 6.0),)
    assert worker.policy_version == 2


def test_an_abort_that_empties_a_draining_worker_lets_it_load():
    env, worker = a_worker()
    worker.submit(sample(0, response_tokens=50))
    loads = []
    at(env, 1.5, lambda: loads.append(worker.load_weights(1, "drain")))
    at(env, 3.5, lambda: worker.abort(sample(0, response_tokens=50)))
    env.run()
    assert loads[0].value == WeightLoad(1, 4.0, 14.0)


def test_a_request_that_was_preempted_during_a_drain_goes_on_under_the_new_weights():
    """As in vLLM, whose pause that admits nothing new (PAUSED_NEW) waits for the running requests alone."""
    env, worker = a_worker(ROOMY._replace(block_size=1, kv_blocks=30))
    stays = [worker.submit(sample(uid, prompt_tokens=5, response_tokens=20)) for uid in range(2)]
    at(env, 1.5, lambda: worker.load_weights(1, "drain"))
    env.run()
    assert worker.engine.totals["preemptions"] == 1
    assert [[s.policy_version for s in stay.value.segments] for stay in stays] == [[0], [0, 1]]


def test_an_abort_gives_the_tokens_so_far_to_the_stay_and_then_to_who_asked():
    env, worker = a_worker()
    order = []
    stay = worker.submit(sample(0, response_tokens=8))
    on_fire(stay, lambda _: order.append("stay"))
    log = []

    def abort():
        event = worker.abort(sample(0, response_tokens=8))
        on_fire(event, lambda _: order.append("abort"))
        log.append(fired(env, event))

    at(env, 3.0, abort)
    env.run()
    [[(fired_s, rollout)]] = log
    assert fired_s == 4.0
    assert (rollout.done, rollout.tokens) == (False, 4)
    assert stay.value is rollout
    assert order == ["stay", "abort"]
    assert not worker.engine.busy


def test_the_abort_of_a_response_that_has_ended_gives_none():
    env, worker = a_worker()
    stay = worker.submit(sample(0, response_tokens=8))
    aborts = []
    at(
        env, 7.5, lambda: aborts.append(worker.abort(sample(0, response_tokens=8)))
    )  # it ends in the pass that runs
    at(env, 20.0, lambda: aborts.append(worker.abort(sample(0, response_tokens=8))))
    env.run()
    assert [abort.value for abort in aborts] == [None, None]
    assert stay.value.done


def test_what_is_aborted_before_its_first_token_has_none_however_far_its_prefill_was():
    env, worker = a_worker(ROOMY._replace(max_num_seqs=2, max_num_batched_tokens=4))
    samples = [sample(uid, prompt_tokens=20, response_tokens=8) for uid in range(3)]
    prefilling, _, waiting = [worker.submit(s) for s in samples]
    at(env, 2.5, lambda: [worker.abort(s) for s in samples])
    for rollout in env.run(gather(env, [prefilling, waiting])):
        assert (rollout.tokens, rollout.segments) == (0, ())
        assert math.isnan(rollout.first_token_s)
    assert worker.engine.totals["prefill_tokens"] == 12


def test_a_migrated_response_keeps_its_tokens_its_versions_and_its_first_token():
    env = simpy.Environment()
    record = recorder("rollout-000", "rollout-001")
    limits = ROOMY._replace(max_num_batched_tokens=4)
    old, new = simulated_workers(env, 2, TICKS, limits, WorkerCosts(10.0), RESPONSES, record)
    new.load_weights(1)
    moving = sample(0, prompt_tokens=4, response_tokens=8)

    def migrate():
        old.submit(moving)
        yield env.timeout(2.5)
        partial = yield old.abort(moving)
        return (yield new.submit(moving, partial))

    rollout = env.run(env.process(migrate()))
    assert rollout.done
    assert rollout.first_token_s == 1.0
    # Asked at 3, begun when the load ends at 10; 4 + 3 tokens are prefilled in two passes, the second gives a token.
    assert rollout.segments == (Segment(0, 0, 3, 0.0, 3.0), Segment(1, 1, 5, 10.0, 16.0))
    assert record.result(20.0, {}).samples.to_pylist()[0]["generated_tokens"] == 8
    assert (old.engine.generated_total, new.engine.generated_total) == (3, 5)


def test_a_stopped_worker_records_what_is_unfinished_as_it_is():
    env, worker = a_worker()
    worker.submit(sample(0, response_tokens=3))
    worker.submit(sample(1, response_tokens=50))
    env.run(until=7.0)
    worker.submit(sample(2, response_tokens=50))  # asked at the last instant: no pass has seen it
    worker.stop(7.0)
    result = worker._recorder.result(7.0, {})
    rows = result.samples.to_pylist()
    assert [(r["uid"], r["generated_tokens"], r["status"]) for r in rows] == [
        (0, 3, "buffered"),
        (1, 8, "in_flight"),
        (2, 0, "in_flight"),
    ]
    [span] = result.spans.to_pylist()
    assert (span["kind"], span["started_s"], span["ended_s"]) == ("rollout", 0.0, 8.0)
    assert (
        result.metadata["end_s"]
        == max(row["ended_s"] for row in result.segments.to_pylist())
        == 8.0
    )
