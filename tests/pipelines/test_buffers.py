"""Groups that stream through a buffer: the words of each trainer beside a small reference of its own books, on random sequences
of events; and what eviction, polls, batches ahead and limits of responses do in whole runs."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pyarrow.compute as pc
import pytest

from simrl.dispatch.concurrency import AdaptiveConcurrency, Bursts
from simrl.pipelines import prime_rl, words
from simrl.pipelines.buffered import Rules, buffered
from simrl.pipelines.streaming import GroupStream
from simrl.result.metrics import summary
from simrl.runtime.worker import EngineLoad
from simrl.simulate.run import simulate_prepared
from simrl.systems.recipes import make_system
from tests.conservation import assert_nothing_is_lost
from tests.helpers import on_gpus, prepared, rows, scenario, watch
from tests.references import buffers

SEQUENCES = 1000


@dataclass
class Group:
    """A finished group, as words see it."""

    number: int
    version: int
    size: int = 1

    @property
    def rollouts(self):
        return [None] * self.size


@dataclass
class Books:
    """A stream of groups, as words see it; its counts follow the events of a test."""

    batch: int
    group_size: int = 1
    version: int = 0
    noted_version: int = 0
    updates: int = 0
    syncs: int = 0
    kept: int = 0
    running: dict = field(default_factory=dict)
    buffer: list = field(default_factory=list)
    free: int = 1 << 30

    @property
    def run(self):
        return SimpleNamespace(dispatcher=SimpleNamespace(free=self.free), steps=10**9)

    def start(self, number, stamp=0):
        self.kept += 1
        self.running[number] = stamp

    def finish(self, number):
        self.buffer.append(Group(number, self.running.pop(number), self.group_size))

    def take(self, number):
        self.buffer, taken = self.buffer[number:], self.buffer[:number]
        self.updates += 1
        return [group.number for group in taken]

    def drop(self, stale):
        left = [group for group in self.buffer if not stale(self, group)]
        self.kept -= len(self.buffer) - len(left)
        self.buffer = left


def sequences():
    return map(random.Random, range(SEQUENCES))


def test_skyrl_starts_a_group_exactly_if_its_staleness_manager_would():
    for rng in sequences():
        batch, ahead = rng.randint(1, 6), rng.randint(0, 4)
        workers = rng.choice([None, rng.randint(batch, batch * (ahead + 1))])
        at_once = workers or min(max(768, batch), batch * (ahead + 1))
        real, stream = buffers.SkyRL(batch, ahead, at_once), Books(batch)
        system = make_system(
            "skyrl_async",
            {"max_staleness_steps": ahead, "num_parallel_generation_workers": workers},
        )
        room = system.pipeline.keywords["rules"].budget
        for number in range(rng.randint(30, 80)):
            event = rng.choice(["start", "start", "finish", "filter", "update"])
            if event == "start":
                assert (room(stream) > 0) == real.may_start()
                if real.may_start():
                    real.start()
                    stream.start(number)
            elif event == "finish" and stream.running:
                real.finish()
                stream.finish(rng.choice(list(stream.running)))
            elif event == "filter" and stream.buffer:
                real.filter()
                first = stream.buffer[0].number
                stream.drop(lambda _, group, first=first: group.number == first)
            elif event == "update" and words.finished_first(stream):
                stream.take(batch)
                stream.version += 1
                stream.noted_version = stream.version
                real.step += 1


def test_prime_rl_starts_ships_drops_and_cancels_as_its_orchestrator():
    for rng in sequences():
        real = buffers.PrimeRL(rng.randint(1, 4), rng.choice([0, 1, 2, 8]))
        stream, loading = Books(real.batch), False
        old = {"than": real.max_off_policy_steps, "now": words.batches_taken}
        stale = partial(words.stamp_older, **old)
        for number in range(rng.randint(40, 120)):
            event = rng.choice(["start", "start", "finish", "finish", "ship", "publish", "loaded"])
            if event == "start":
                assert (prime_rl.budget(stream) > 0) == real.open
                if real.open:
                    real.start(number)
                    stream.start(number, stream.version)
            elif event == "finish" and stream.running:
                number = rng.choice(list(stream.running))
                real.finish(number)
                stream.finish(number)
                stream.drop(stale)
            elif event == "ship":
                real.sweep()
                stream.drop(stale)
                may_ship = words.finished_first(stream) and stream.updates - stream.version <= 1
                assert bool(may_ship) == real.may_ship()
                if may_ship:
                    assert stream.take(real.batch) == real.ship()
                    stream.noted_version = stream.version
            elif event == "publish" and stream.version < stream.updates and not loading:
                stream.version, loading = stream.version + 1, True
                cancelled = [
                    n for n, stamp in stream.running.items() if words.older(stream, stamp, **old)
                ]
                assert cancelled == real.publish()
                for number in cancelled:
                    del stream.running[number]
            elif event == "loaded" and loading:
                loading, stream.noted_version = False, stream.version
                real.loaded()
            assert {group.number: group.version for group in stream.buffer} == real.pending


def test_prime_rl_lets_the_responses_in_flight_grow_in_bursts():
    for rng in sequences():
        real = buffers.PrimePermits(rng.choice([1, 8, 16]), rng.choice([8, 64, 1000]))
        rule, in_flight = Bursts(real.group), 0
        for _ in range(rng.randint(50, 300)):
            event = rng.choice(["start"] * 6 + ["end"] * 4 + ["cancel", "window", "limit"])
            if event == "start":
                assert (in_flight < rule.most(real.limit)) == real.may_start()
                if real.may_start():
                    real.start()
                    in_flight += 1
            elif event in ("end", "cancel") and in_flight:
                in_flight -= 1
                rule.response_ended(in_flight, aborted=event == "cancel")
                real.end() if event == "end" else real.cancel()
            elif event == "window":
                rule.begin(in_flight)
                real.window()
            elif event == "limit":
                real.limit = rng.choice([8, 64, 1000])


def test_prime_rl_s_limit_follows_the_engines_as_its_controller():
    for rng in sequences():
        least, most = rng.choice([1, 8]), rng.choice([64, 1024])
        arguments = (least, most, rng.choice([None, 8, 64]), rng.choice([2048, 16384]))
        real, rule = buffers.PrimeConcurrency(*arguments), AdaptiveConcurrency(*arguments)
        kv_tokens, mood, now_s = rng.choice([20_000, 1_000_000]), rng.choice([0, 0.3, 1]), 0.0
        for _ in range(rng.randint(30, 120)):
            in_flight = int(rule.limit * rng.choice([1, 1, 0.9, 0.7, 0.2, 1.3]))
            if rng.random() < 0.5:
                now_s += rng.choice([0.1, 2.0, 8.0])
                real.end(in_flight, now_s)
                rule.response_ended(in_flight, now_s)
            else:
                now_s += 5.0
                loads = [_load(rng, kv_tokens, rng.random() < mood) for _ in range(3)]
                assert rule.observe(loads, in_flight, now_s) == real.poll(loads, in_flight, now_s)
            assert rule.limit == real.limit


def _load(rng, kv_tokens, hot):
    if not hot:
        return EngineLoad(kv_tokens, rng.uniform(0, 0.65), rng.randint(0, 64), 0, 0)
    waiting, preemptions = rng.choice([0, rng.randint(0, 90)]), rng.choice([0, 0, 0, 3])
    return EngineLoad(kv_tokens, rng.uniform(0.5, 1), rng.randint(0, 64), waiting, preemptions)


def test_trl_starts_and_drops_as_its_slots_and_its_queue():
    for rng in sequences():
        batch, size = rng.randint(1, 4), rng.randint(1, 4)
        real = buffers.TRL(rng.randint(1, 9) * size, size, rng.choice([8, 1024]), rng.randint(0, 4))
        stream = Books(batch, size)
        stale = partial(words.stamp_older, than=real.max_staleness)
        for number in range(rng.randint(40, 120)):
            event = rng.choice(["start", "start", "finish", "pull", "sync"])
            if event == "start":
                stream.free = real.slots - real.busy
                room = words.responses_in_flight(stream, waiting=real.queue_most)
                assert (room > 0) == real.may_start()
                if real.may_start():
                    real.busy += size
                    stream.start(number, words.synced(stream))
            elif event == "finish" and stream.running:
                number = rng.choice(list(stream.running))
                real.busy -= size
                real.queue.append((number, stream.running[number]))
                stream.finish(number)
            elif event == "pull":
                stream.drop(stale)
                groups, taken = words.finished_first(stream), real.pull(batch)
                assert (groups and [group.number for group in groups]) == taken
                if groups:
                    stream.take(batch)
            elif event == "sync":
                stream.syncs += 1
                real.version += 1


def test_open_instruct_starts_a_prompt_for_each_result_that_it_takes():
    for rng in sequences():
        batch, steps = rng.randint(1, 4), rng.randint(1, 4)
        real, stream = buffers.OpenInstruct(batch, steps), Books(batch)
        stale = partial(words.stamp_older, than=steps, now=words.batches_taken)
        for number in range(rng.randint(60, 150)):
            event = rng.choice(["start", "start", "start", "finish", "finish", "train", "loaded"])
            if event == "start":
                room = words.pool_of_prompts(stream, batches=steps)
                assert (room > 0) == real.may_start()
                if room > 0:
                    real.started += 1
                    stream.start(number, stream.syncs)
            elif event == "finish" and stream.running:
                number = rng.choice(list(stream.running))
                real.results.append(stream.running[number])
                stream.finish(number)
            elif event == "train" and stream.version < stream.updates:
                real.trained = stream.version = stream.version + 1
            elif event == "loaded":
                stream.syncs = stream.version
            _collect(stream, real, stale)
            assert stream.updates == real.step


def _collect(stream, real, stale):
    """Take what the pipeline takes: batches, while the trainer is not too far behind."""
    real.pop()
    while stream.updates - stream.version <= real.async_steps:
        stream.drop(stale)
        if words.finished_first(stream) is None:
            return
        stream.take(stream.batch)


def test_pipeline_rl_starts_the_groups_of_the_lag_and_of_each_version():
    for rng in sequences():
        batch, size, lag = rng.randint(1, 6), rng.randint(1, 8), rng.randint(0, 40)
        real, stream = buffers.PipelineRL(size, batch, lag), Books(batch, size)
        for number in range(rng.randint(30, 80)):
            if rng.random() < 0.7:
                assert (words.within_lag(stream, lag=lag) > 0) == real.may_start()
                if real.may_start():
                    real.submitted += 1
                    stream.start(number)
            else:
                stream.noted_version += 1
                real.propagated()


# In whole runs.

RECIPES = (
    ("prime_rl", {}),
    ("prime_rl", {"max_off_policy_steps": 1, "initial_inflight": 4, "max_inflight": 8}),
    ("prime_rl", {"max_off_policy_steps": 0}),
    ("skyrl_async", {"num_parallel_generation_workers": 5}),
    ("trl_async", {"max_staleness": 1, "weight_sync_steps": 2}),
    ("open_instruct", {"async_steps": 2}),
    ("pipeline_rl", {"llm_max_rollouts": 3, "ring_buffer_size": 4}),
    ("pipeline_rl", {"max_lag": 6}),
)


@pytest.mark.parametrize(("name", "parameters"), RECIPES)
def test_nothing_is_lost_and_no_token_is_older_than_the_system_says(name, parameters):
    watched = watch(prepared(scenario({"name": name, **parameters}, steps=10)))
    assert_nothing_is_lost(watched)
    most = watched.prepared.system.off_policyness
    oldest = summary(watched.result, 0)["off_policyness_max"]
    assert most is None or oldest <= most


def by_rules(rules, the_trace, steps, **changes):
    ready = prepared(scenario("skyrl_async", steps=steps, **changes), the_trace)
    system = replace(ready.system, pipeline=partial(buffered, rules=rules), pauses=False)
    return watch(replace(ready, system=system))


EVERY = Rules(
    budget=lambda stream: 12 - len(stream.running) - len(stream.buffer),
    ready=words.finished_first,
)


def test_evicted_groups_are_aborted_and_dropped_and_others_start_in_their_place():
    rules = replace(EVERY, evict=lambda stream, stamp: stream.version - stamp > 0)
    watched = by_rules(rules, None, 6)
    assert_nothing_is_lost(watched)
    samples = rows(watched.result.samples)
    dropped = [row for row in samples if row["status"] == "dropped"]
    assert dropped and any(row["finished_s"] is None for row in dropped)
    assert watched.result.metadata["stale_samples"] == len(dropped)


def test_a_polled_buffer_is_looked_at_every_so_many_seconds_from_the_first_look_on():
    at_once, polled = by_rules(EVERY, None, 4), by_rules(replace(EVERY, poll_s=5.0), None, 4)
    first = rows(polled.result.steps)[0]["started_s"]
    assert first >= rows(at_once.result.steps)[0]["started_s"]
    assert first % 5.0 == pytest.approx(0.0, abs=1e-9)


def test_with_batches_ahead_the_next_one_is_taken_while_the_trainer_is_busy():
    ready_s = {}

    def ready(stream):
        groups = words.finished_first(stream)
        if groups:
            ready_s[stream.updates] = stream.now_s
        return groups

    rules = replace(EVERY, ready=ready, ahead=1, overlaps=True)
    watched = by_rules(rules, None, 4, training={"publish_s": 5.0})
    assert_nothing_is_lost(watched)
    updates = rows(watched.result.steps)
    assert ready_s[1] < updates[0]["finished_s"]
    assert all(ready_s[k] >= updates[k - 2]["finished_s"] - 1e-9 for k in (2, 3))


def test_a_limit_on_responses_in_flight_holds_the_others_of_a_group_back():
    parameters = {"max_inflight_tasks": 3}
    watched = watch(prepared(scenario({"name": "trl_async", **parameters}, steps=4)))
    events = []
    for segment in rows(watched.result.segments):
        events += [(segment["started_s"], 1), (segment["ended_s"], -1)]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    assert most <= 3


def test_areal_s_slow_start_supplies_a_batch_a_second_while_an_update_waits():
    def batches(slow_start):
        parameters = {"eta": 3, "slow_start": slow_start, "max_concurrent": 99}
        watched = watch(prepared(scenario({"name": "areal", **parameters}, steps=3)))
        first = rows(watched.result.steps)[0]["started_s"]
        times = [s.time_s for s in watched.submissions if s.time_s < first]
        return [times.count(float(second)) for second in range(int(first) + 1)]

    assert batches(False)[0] == 16
    slow = batches(True)
    assert set(slow) == {4} and len(slow) <= 4


@pytest.mark.parametrize("parameters", [{}, {"aborted": "start_over"}])
def test_a_pool_s_groups_that_are_drawn_late_run_as_if_all_had_been_drawn_at_once(
    parameters, monkeypatch
):
    """Sixteen responses run of a pool of sixteen groups of eight: most of them wait."""
    several = {"sglang_server_concurrency": 8, **parameters}
    slow = {"roofline": {"between_passes_s": 0.1}}
    lengths = scenario().workload.synthetic.model_copy(update={"group": 8}).model_dump()
    changes = {"profile": slow, "workload": {"synthetic": lengths}}
    run = prepared(on_gpus("slime_fully_async", several, 2, steps=2, **changes))
    late = simulate_prepared(run)
    at_once_too = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(GroupStream, "begins_late", at_once_too, raising=False)
    at_once = simulate_prepared(run)
    for name in ("spans", "steps", "segments"):
        assert getattr(late, name).equals(getattr(at_once, name))
    began = [r.samples.filter(pc.is_valid(r.samples["worker"])) for r in (late, at_once)]
    assert began[0].equals(began[1])
    assert late.samples.num_rows < at_once.samples.num_rows
