"""A `VllmWorker`, its line and the loop at the other end: what a schedule may rely on, with a double of the engine.

On simulated time, with the reference engine's passes, it is held against the written rule of workers; in processes of their
own, against what real processes do: die, hang, start for long, speak at any time.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import simpy
from hypothesis import example, given, strategies as st

from simrl.engine.state import Limits
from simrl.runtime.agents import PLAIN, AgentRules, Agents
from simrl.runtime.events import on_fire
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.speculation.windows import Fixed
from simrl.trace.sample import EVALUATION
from simrl.trace.trace import Sample, Turn
from simrl_replay.ahead import AheadSetup, DrafterProcess
from simrl_replay.host import Ready
from simrl_replay.proposer import DrafterSetup
from simrl_replay.vllm_worker import VllmWorker
from tests.engine.test_engine import TABLES, limits as any_limits
from tests.engine_double import (
    EngineDouble,
    LogicalClock,
    LogicalLink,
    continuation,
    double_settings,
)
from tests.helpers import RESPONSES, ROOMY, examples, one_second_a_pass, recorder, sample
from tests.references.engine import ReferenceEngine
from tests.runtime.test_worker import (
    MODES,
    RETRIES,
    Observed,
    ReferenceWorker,
    lengths,
    number_requests,
    roomier,
    turns_of,
)

TICKS = one_second_a_pass()
SETTINGS = double_settings(ROOMY)


def prompt_ids(sample: Sample) -> tuple[int, ...]:
    return tuple((sample.uid * 31 + i * 7) % 1000 for i in range(sample.prompt_tokens))


@dataclass
class Rig:
    """A worker on simulated time."""

    env: LogicalClock
    link: LogicalLink
    worker: VllmWorker
    engine: EngineDouble
    record: object
    agents: Agents
    log: list = field(default_factory=list)

    def note(self, name, event) -> None:
        on_fire(event, lambda event: self.log.append((name, self.env.now, event.value)))

    def at(self, time_s, call) -> None:
        on_fire(self.env.timeout(time_s), lambda _: call())

    def run(self) -> None:
        with patch("simrl_replay.host.time", self.link):
            self.link.run(self.engine)


def rig(limits=ROOMY, tables=TICKS, load_s=10.0, rules: AgentRules = PLAIN, **more) -> Rig:
    env, record = LogicalClock(), recorder()
    agents = Agents(env, rules)
    link = LogicalLink(env)
    engine_settings = replace(double_settings(limits), stop_token=more.get("stop_token"))
    engine = EngineDouble(engine_settings, tables, load_s=load_s, wait=link.sleep)
    worker = VllmWorker(
        env,
        0,
        link,
        lambda: link,
        RESPONSES,
        prompt_ids,
        lambda version: f"v{version}",
        record,
        60.0,
        60.0,
        print,
        agents=agents,
        **more,
    )
    return Rig(env, link, worker, engine, record, agents)


# Against the written rule. Where commands and boundaries coincide, no request is sent again later: the loop at the engine does
# not know whether a command that it takes at a boundary was given before or after a request's time to come back.


def timelines(waits, modes=MODES):
    command = st.one_of(
        lengths.map(lambda r: ("submit", r)),
        st.integers(0, 12).map(lambda uid: ("abort", uid)),
        st.integers(0, 12).map(lambda uid: ("bounce", uid)),
        st.sampled_from(modes).map(lambda mode: ("load", mode)),
    )
    planned = st.lists(st.tuples(waits, command), min_size=1, max_size=10)
    reactions = st.lists(st.tuples(st.integers(0, 12), command), max_size=4)
    return st.tuples(planned, reactions)


def compare_with_the_rule(tables, limits, load_s, timeline, turns=lambda uid, response: ()):
    commands, after_end, samples = number_requests(*timeline, turns)
    reference = ReferenceWorker(ReferenceEngine(tables, limits), load_s, after_end)
    reference.run(commands)
    real = rig(limits, tables, load_s)
    seen = Observed(real.env, real.worker, after_end, samples)
    for (
        time_s,
        what,
        argument,
    ) in commands:  # all planned before anything reacts: first in their instants
        real.at(time_s, lambda what=what, argument=argument: getattr(seen, what)(argument))
    real.run()

    close = {"rel": 1e-9, "abs": 1e-9}
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
            for got, expected in zip(rollout.segments, segments, strict=True):
                assert got.started_s == pytest.approx(expected.started_s, **close)
                # One that waits when its segment is closed gained its last token before that.
                assert got.started_s < got.ended_s <= expected.ended_s + 1e-9
            assert not done or rollout.finished_s == pytest.approx(ended_s, **close)
            assert len(rollout.token_ids) == rollout.tokens
    # That there is nothing to abort is known at once here, at the boundary there.
    assert sorted(u for u, _, value in seen.aborts if value is None) == sorted(
        u for u, _, w in reference.aborts if not w
    )
    aborts = [(uid, at_s) for uid, at_s, value in seen.aborts if value is not None]
    expected = [(uid, at_s) for uid, at_s, was_there in reference.aborts if was_there]
    assert [uid for uid, _ in aborts] == [uid for uid, _ in expected]
    assert [at_s for _, at_s in aborts] == pytest.approx([at_s for _, at_s in expected], **close)
    for number, expected in reference.loads.items():
        assert seen.loads[number].value == pytest.approx(expected, **close)
        assert seen.load_fired_s[number] == pytest.approx(expected.finished_s, **close)
    assert len(seen.loads) == len(reference.loads)
    assert real.engine.passes == reference.engine.passes
    generated = sum(rollout.tokens for stays in seen.ended.values() for _, rollout in stays[-1:])
    spans = real.record.spans
    assert (
        real.worker.generated_total
        == generated + reference.lost_tokens
        == sum(s.tokens for s in spans if s.kind == "rollout")
    )
    twice = real.record.result(real.env.now, {}).samples["duplicate_tokens"].to_pylist()
    assert sum(twice) == reference.lost_tokens
    busy = sorted((s.started_s, s.ended_s) for s in spans if s.ended_s > s.started_s)
    assert all(first[1] <= second[0] for first, second in pairwise(busy))
    return real, seen


# Two responses fill the cache to its last block: the second is preempted, or sent again, and finds all its tokens but the last.
A_FULL_CACHE = Limits(
    max_num_seqs=2, max_num_batched_tokens=3, block_size=1, kv_blocks=210, prefix_caching=True
)
TWO_RESPONSES = [(0.0, ("submit", [(1, 105), (2, 105)]))]


@examples(50)
@example(limits=A_FULL_CACHE, timeline=(TWO_RESPONSES, []), load_s=0.02)
@example(limits=A_FULL_CACHE, timeline=(TWO_RESPONSES, [(0, ("bounce", 1))]), load_s=0.02)
@example(limits=A_FULL_CACHE, timeline=(TWO_RESPONSES, [(0, ("abort", 1))]), load_s=0.02)
@given(
    any_limits,
    timelines(st.one_of(st.just(0.0), st.floats(0, 0.6)), MODES + RETRIES),
    st.sampled_from([0.02, 0.3]),
)
def test_whatever_is_asked_and_whenever_a_real_loop_does_it_by_the_written_rule(
    limits, timeline, load_s
):
    """I4: the loop around a real engine follows the rule of a simulated worker."""
    compare_with_the_rule(TABLES, limits, load_s, timeline)


def caching(limits: Limits) -> Limits:
    """With room for what environments say. As vLLM holds no blocks of a request that has ended, a turn finds its context in the
    prefix cache, or not at all."""
    return roomier(limits)._replace(prefix_caching=True)


@examples(50)
@given(
    any_limits,
    timelines(st.one_of(st.just(0.0), st.floats(0, 0.6)), MODES + RETRIES),
    st.sampled_from([0.02, 0.3]),
)
def test_what_waits_for_environments_follows_the_written_rule_in_a_real_loop_too(
    limits, timeline, load_s
):
    """I4: each turn is a request of the engine, and the worker does as a simulated one."""
    compare_with_the_rule(TABLES, caching(limits), load_s, timeline, turns_of)


def begun_at_once():
    """Timelines whose samples all come to an idle worker, where a deadline begins at once."""
    later = timelines(st.floats(0, 9.0), MODES).map(
        lambda timeline: [c for c in timeline[0] if c[1][0] != "submit"]
    )
    return st.tuples(lengths, later).map(lambda t: ([(0.0, ("submit", t[0])), *t[1]], []))


@examples(60)
@given(
    any_limits,
    begun_at_once(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([math.inf, 0.37, 6.37, 21.37]),
)
def test_deadlines_and_tool_slots_are_those_of_a_simulated_worker(
    limits, timeline, slots, deadline_s
):
    """I4: the very rules of the simulated worker end trajectories and make tool calls wait."""
    limits, rules = caching(limits), AgentRules("cache", tool_slots=slots, deadline_s=deadline_s)
    commands, after_end, samples = number_requests(*timeline, turns_of)
    env, record = simpy.Environment(), recorder()
    agents = Agents(env, rules)
    (simulated,) = simulated_workers(
        env, 1, TICKS, rules.limits(limits), WorkerCosts(1.0), RESPONSES, record, agents=agents
    )
    expected = Observed(env, simulated, after_end, samples)
    expected.run(commands)
    real = rig(limits, TICKS, 1.0, rules)
    seen = Observed(real.env, real.worker, after_end, samples)
    for time_s, what, argument in commands:
        real.at(time_s, lambda what=what, argument=argument: getattr(seen, what)(argument))
    real.run()
    ends = [
        {
            uid: [
                (pytest.approx(at_s, abs=1e-6), r.done, r.tokens, r.observation_tokens)
                for at_s, r in stays
            ]
            for uid, stays in each.ended.items()
        }
        for each in (expected, seen)
    ]
    assert ends[0] == ends[1]
    assert vars(real.agents.figures) == pytest.approx(vars(agents.figures))


def test_a_poll_returns_what_a_simulated_engine_would_report():
    """In a cache that is too small: requests wait, and some are preempted between two polls."""
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=8, block_size=4, kv_blocks=9)
    env, real = simpy.Environment(), rig(limits)
    (simulated,) = simulated_workers(
        env, 1, TICKS, limits, WorkerCosts(10.0), RESPONSES, recorder()
    )
    samples = [sample(uid, 5, 14 + uid) for uid in range(5)]
    loads: list[list] = []
    for clock, worker in ((env, simulated), (real.env, real.worker)):
        loads.append([])
        for each in samples:
            worker.submit(each)

        def poll(_, worker=worker, into=loads[-1]) -> None:
            on_fire(worker.load(), lambda event: into.append(event.value))

        for at_s in (3.5, 12.5, 20.5, 33.5, 200.5, 210.5):
            on_fire(clock.timeout(at_s), poll)
    env.run()
    real.run()
    assert loads[0] == [pytest.approx(load) for load in loads[1]] and len(loads[0]) == 6
    assert max(load.waiting for load in loads[1]) >= 2 and loads[1][-1] == (36, 0.0, 0, 0, 0)
    assert sum(load.preemptions for load in loads[1]) == real.engine.counters().preemptions > 0


def test_a_poll_of_an_engine_that_is_lost_meanwhile_reports_nothing():
    real, loads = rig(), []
    real.worker._start = lambda: real.link
    real.at(1.0, lambda: on_fire(real.worker.load(), lambda event: loads.append(event.value)))
    real.at(1.0, real.worker.fail)
    real.at(2.0, lambda: on_fire(real.worker.load(), lambda event: loads.append(event.value)))
    real.link.kill = lambda: None
    real.run()
    assert loads == [(0, 0.0, 0, 0, 0)] * 2


def test_a_worker_that_comes_back_starts_all_drafters_that_it_may_get(monkeypatch):
    """SpecActor §4.3: none starts when a freed worker gets it."""
    ahead = [
        DrafterSetup("ahead", Fixed(tokens=3), ahead=AheadSetup(DrafterProcess(SETTINGS, i)))
        for i in (1, 2)
    ]
    real, sent = rig(setup=ahead[0], tail={"other": ahead[1], "ngram": DrafterSetup("ngram")}), []
    monkeypatch.setattr(real.link, "send", sent.extend)
    real.worker._state = "starting"
    real.worker._hear([Ready(1, "double", 100, 100, 0.0)])
    real.env.run()
    assert [call[0] for call in sent[:2]] == ["start_drafters", "configure"]
    assert sent[0].arguments == ([each.ahead.process for each in ahead if each.ahead],)


def test_a_turn_is_a_request_for_the_context_so_far():
    real, texts = rig(answer_ids=lambda sample, turn: (7,) * turn.observation_tokens), []
    add = real.engine.add
    a = sample(0, 4, 9, (Turn(3, 5.5, 2), Turn(5, 0.25, 0)))

    def noted(request_id, prompt_ids, tokens, *more) -> None:
        texts.append((prompt_ids, tokens))
        add(request_id, prompt_ids, tokens, *more)

    real.engine.add = noted
    real.note("end", real.worker.submit(a))
    real.run()
    [(_, at_s, rollout)] = real.log
    first, (one, two, three) = prompt_ids(a), zip(*[iter(rollout.token_ids)] * 3, strict=True)
    assert texts == [
        (first, 3),
        ((*first, *one, 7, 7), 2),
        ((*first, *one, 7, 7, *two[:2]), 4),
    ]
    assert (rollout.done, rollout.observation_tokens, len(three)) == (True, 2, 3)
    assert [s[2:] for s in rollout.segments] == [
        (3, 0.0, 3.0),
        (2, 8.5, 10.5),
        (4, 10.75, at_s),
    ]
    assert [(s.started_s, s.ended_s) for s in real.record.spans] == [
        (0.0, 3.0),
        (8.5, 10.5),
        (10.75, at_s),
    ]


def test_a_tool_call_goes_on_while_its_response_moves_and_is_awaited_where_it_goes_on():
    real = rig()
    a = sample(0, 4, 9, (Turn(3, 20.25, 2),))
    stay = real.worker.submit(a)
    on_fire(stay, lambda event: real.note("moved", real.worker.submit(a, event.value)))
    real.at(10.0, lambda: real.worker.abort(a))
    real.run()
    [(_, at_s, rollout)] = real.log
    assert (at_s, rollout.done) == (3.0 + 20.25 + 6, True)
    assert rollout.observation_tokens == 2  # once, and computed where it goes on


def test_an_engine_whose_requests_all_wait_for_tools_does_not_count_as_hung():
    real = rig()
    real.note("end", real.worker.submit(sample(0, 4, 9, (Turn(3, 500.0, 2),))))
    real.at(400.0, real.worker._look)
    real.run()
    assert real.log[0][1] == 3 + 500 + 6


def test_an_evaluation_has_spans_of_its_own_until_a_request_of_training_enters():
    real = rig(load_s=2.0, evaluates=(2, 3.0))
    real.worker.submit(sample(EVALUATION, 4, 4))
    real.at(2.5, lambda: real.worker.submit(sample(1, 4, 2)))
    for at_s, version in ((10.0, 1), (20.0, 3)):
        real.at(at_s, lambda version=version: real.note(version, real.worker.load_weights(version)))
    real.run()
    assert [(s.kind, s.started_s, s.ended_s) for s in real.record.spans] == [
        ("evaluate", 0.0, 3.0),
        ("rollout", 3.0, 5.0),
        ("load_weights", 10.0, 12.0),
        ("load_weights", 20.0, 22.0),
        ("evaluate", 22.0, 25.0),
    ]
    assert real.log == [(1, 12.0, (1, 10.0, 12.0)), (3, 25.0, (3, 20.0, 22.0))]


AN_ENGINE_OF_ONE = Limits(
    max_num_seqs=1, max_num_batched_tokens=3, block_size=1, kv_blocks=210, async_scheduling=False
)
ASKED_AS_A_LOAD_DRAINS = (
    [(0.0, ("submit", [(1, 2)])), (0.5, ("load", "drain")), (0.5, ("submit", [(1, 1)]))],
    [],
)


@examples(50)
@example(limits=AN_ENGINE_OF_ONE, timeline=ASKED_AS_A_LOAD_DRAINS, load_s=1.0)
@given(
    any_limits,
    timelines(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, 60.0])),
    st.sampled_from([1.0, 2.5]),
)
def test_what_is_asked_exactly_at_a_boundary_waits_for_the_next_one_in_a_real_loop_too(
    limits, timeline, load_s
):
    """I4: the loop around a real engine follows the rule where commands and boundaries coincide."""
    compare_with_the_rule(TICKS, limits, load_s, timeline)


# What the rule leaves open, or says in words.


def test_samples_of_one_instant_are_in_the_first_pass_together():
    real = rig()
    samples = [sample(uid, 4, 3) for uid in range(40)]
    for each in samples:
        real.note(each.uid, real.worker.submit(each))
    real.run()
    assert [(at_s, rollout.first_token_s) for _, at_s, rollout in real.log] == [(3.0, 1.0)] * 40
    assert real.engine.passes == 3


def test_an_abort_fires_after_the_stays_own_event_with_its_tokens_and_a_second_one_with_nothing():
    real = rig()
    a, b = sample(0, 4, 50), sample(1, 4, 50)
    real.note("stay", real.worker.submit(a))
    real.worker.submit(b)
    real.at(5.5, lambda: real.note("abort", real.worker.abort(a)))
    real.at(5.7, lambda: real.note("again", real.worker.abort(a)))
    real.at(9.0, lambda: real.note("too late", real.worker.abort(a)))
    real.run()
    names = [(name, at_s) for name, at_s, _ in real.log]
    assert names == [("stay", 6.0), ("abort", 6.0), ("again", 6.0), ("too late", 9.0)]
    stay, abort, again, late = (value for _, _, value in real.log)
    assert stay == abort and again is late is None
    assert (stay.done, stay.tokens, stay.token_ids) == (
        False,
        6,
        tuple(continuation(prompt_ids(a), 6, "v0")),
    )


def test_an_abort_that_comes_when_the_response_ends_leaves_it_whole():
    real = rig()
    a = sample(0, 4, 5)
    real.note("stay", real.worker.submit(a))
    real.at(4.5, lambda: real.note("abort", real.worker.abort(a)))
    real.run()
    [(_, _, stay), (name, at_s, abort)] = real.log
    assert stay.done and (name, at_s, abort) == ("abort", 5.0, None)


def test_a_stay_that_reaches_its_limit_is_not_done_and_goes_on_from_there():
    real = rig()
    a = sample(0, 4, 9)

    def go_on(event) -> None:
        assert (event.value.done, event.value.tokens) == (False, 4)
        real.note("rest", real.worker.submit(a, event.value))

    on_fire(real.worker.submit(a, max_tokens=4), go_on)
    real.run()
    [(_, at_s, rollout)] = real.log
    assert (at_s, rollout.done) == (9.0, True)
    assert [s.tokens for s in rollout.segments] == [4, 5] and rollout.first_token_s == 1.0
    assert rollout.token_ids == tuple(continuation(prompt_ids(a), 9, "v0"))


def test_a_response_is_done_with_its_stop_token_wherever_that_is_and_at_its_cap_without_one():
    first = sample(1, 5, 40)
    tokens = continuation(prompt_ids(first), 40, "v0")
    stop_at = next(i for i in range(9, 40) if tokens[i] not in tokens[:i])
    real = rig(stop_token=tokens[stop_at])
    uncut = next(
        uid
        for uid in range(2, 99)
        if tokens[stop_at] not in continuation(prompt_ids(sample(uid, 5, 40)), 40, "v0")
    )
    real.note("stopped", real.worker.submit(first))
    real.note("capped", real.worker.submit(sample(uncut, 5, 40)))
    real.at(stop_at + 20.5, lambda: real.note("late abort", real.worker.abort(first)))
    real.run()
    ends = {name: value for name, _, value in real.log}
    assert ends["stopped"].done and list(ends["stopped"].token_ids) == tokens[: stop_at + 1]
    assert ends["capped"].done and ends["capped"].tokens == 40
    assert ends["late abort"] is None


def test_a_budget_that_ends_at_the_stop_token_leaves_a_response_that_is_done():
    first = sample(1, 5, 40)
    tokens = continuation(prompt_ids(first), 40, "v0")
    stop_at = next(i for i in range(9, 40) if tokens[i] not in tokens[:i])
    real = rig(stop_token=tokens[stop_at])
    real.note("at it", real.worker.submit(first, max_tokens=stop_at + 1))
    real.run()
    assert real.log[0][2].done
    real = rig(stop_token=tokens[stop_at])
    real.note("before it", real.worker.submit(first, max_tokens=stop_at))
    real.run()
    assert not real.log[0][2].done


def test_what_is_watched_is_told_at_the_boundary_at_which_it_is_so():
    real = rig()
    a = sample(0, 4, 9)
    real.worker.submit(a)
    for tokens in (3, 9, 10):
        real.note(tokens, real.worker.when(a, tokens))
    real.at(5.5, lambda: real.note("late", real.worker.when(a, 2)))
    real.at(20.0, lambda: real.note("gone", real.worker.when(a, 2)))
    real.run()
    assert [(name, at_s) for name, at_s, _ in real.log] == [(3, 3.0), ("late", 6.0), (9, 9.0)]


def test_progress_is_told_as_it_is_at_the_boundary_and_cuts_no_segment():
    real = rig()
    a = sample(0, 4, 9)
    real.note("stay", real.worker.submit(a))
    real.at(3.5, lambda: real.note("progress", real.worker.progress([a])))
    real.at(8.5, lambda: real.note("ended", real.worker.progress([a])))
    real.at(20.0, lambda: real.note("gone", real.worker.progress([a])))
    real.run()
    by_name = {name: (at_s, value) for name, at_s, value in real.log}
    at_s, [rollout] = by_name["progress"]
    assert (at_s, rollout.tokens, rollout.done) == (4.0, 4, False)
    assert [(s.tokens, s.started_s, s.ended_s) for s in rollout.segments] == [(4, 0.0, 4.0)]
    assert by_name["ended"] == (9.0, [None]) and by_name["gone"] == (20.0, [None])
    assert [s.tokens for s in by_name["stay"][1].segments] == [9]


def test_each_version_of_the_weights_has_a_segment_and_makes_its_tokens():
    real = rig()
    a = sample(0, 4, 9)
    real.note("stay", real.worker.submit(a))
    real.at(2.5, lambda: real.note("load", real.worker.load_weights(1)))
    real.run()
    (_, at_s, load), (_, _, rollout) = real.log
    assert (at_s, load) == (13.0, (1, 3.0, 13.0))
    assert [s[1:] for s in rollout.segments] == [(0, 3, 0.0, 3.0), (1, 6, 3.0, 19.0)]
    first = continuation(prompt_ids(a), 3, "v0")
    assert rollout.token_ids == (*first, *continuation([*prompt_ids(a), *first], 6, "v1"))
    assert [(s.kind, s.started_s, s.ended_s, s.tokens) for s in real.record.spans] == [
        ("rollout", 0.0, 3.0, 3),
        ("load_weights", 3.0, 13.0, 0),
        ("rollout", 13.0, 19.0, 6),
    ]


def test_an_interrupted_response_goes_on_as_one_that_was_aborted_and_submitted_again():
    """Token for token, also where the cache is kept it does not."""

    def tokens(how: str) -> tuple[int, ...]:
        real = rig(load_s=1.0)
        a = sample(0, 4, 12)

        def again(event) -> None:
            real.note("end", real.worker.submit(a, event.value))

        def change() -> None:
            if how == "again":
                on_fire(real.worker.abort(a), again)
                real.worker.load_weights(1)
            else:
                real.worker.load_weights(1, running=how)

        stay = real.worker.submit(a)
        if how != "again":
            real.note("end", stay)
        real.at(4.5, change)
        real.run()
        [(_, _, rollout)] = real.log
        assert rollout.done
        return rollout.token_ids

    assert tokens("recompute") == tokens("again") != tokens("keep")


def test_a_draining_load_lets_the_running_end_and_nothing_new_begin():
    real = rig(ROOMY._replace(max_num_seqs=2))
    for uid, response_tokens in enumerate([5, 7, 4]):
        real.note(uid, real.worker.submit(sample(uid, 4, response_tokens)))
    real.at(1.5, lambda: real.note("load", real.worker.load_weights(1, running="drain")))
    real.at(2.5, lambda: real.note(3, real.worker.submit(sample(3, 4, 2))))
    real.run()
    assert [(name, at_s) for name, at_s, _ in real.log] == [
        (0, 5.0),
        (1, 7.0),
        ("load", 17.0),
        (3, 19.0),
        (2, 21.0),
    ]
    versions = {
        name: [s.policy_version for s in value.segments]
        for name, _, value in real.log
        if name != "load"
    }
    assert versions == {0: [0], 1: [0], 2: [1], 3: [1]}


def test_a_slow_worker_takes_so_many_times_as_long():
    real = rig()
    real.note("stay", real.worker.submit(sample(0, 4, 6)))
    real.at(1.5, lambda: real.worker.slow_down(3.0))
    real.at(7.5, lambda: real.worker.slow_down(1.0))
    real.run()
    assert [at_s for _, at_s, _ in real.log] == [2 + 3 + 3 + 2]


def test_loads_of_dummy_weights_are_held():
    real = rig(load_s=0.0, held_load_s=5.0)
    real.at(2.5, lambda: real.note("load", real.worker.load_weights(1)))
    real.worker.submit(sample(0, 4, 9))
    real.run()
    assert real.log == [("load", 8.0, (1, 3.0, 8.0))]


class RecordingDrafter:
    """What the host tells a drafter."""

    def __init__(self) -> None:
        self.told: list = []

    def begins(self, request_id, prompt_id, prompt_ids, token_ids, forced=None) -> None:
        self.told.append(("begins", request_id))

    def ends(self, request_id) -> None:
        self.told.append(("ends", request_id))

    def counts(self, request_id) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def learn(self, *group) -> None:
        self.told.append(("learn", *group))


def drafting_rig() -> tuple[Rig, list]:
    real, drafter = rig(setup=DrafterSetup("history", Fixed(tokens=4))), RecordingDrafter()
    real.engine.settings = replace(real.engine.settings, speculative={"method": "custom_class"})
    real.engine.drafter = drafter
    return real, drafter.told


def test_a_lost_engine_learns_nothing_before_it_is_back():
    real, told = drafting_rig()
    real.worker.draft("learn", 1, 0, [(1, 2)])
    real.at(1.0, lambda: setattr(real.worker, "_state", "loading"))
    real.at(2.0, lambda: real.worker.draft("learn", 2, 0, [(3, 4)]))
    real.run()
    assert told == [("learn", 1, 0, [(1, 2)])]


def test_a_run_that_is_stopped_records_what_is_unfinished():
    real = rig()
    real.worker.submit(sample(0, 4, 50))
    real.at(7.5, lambda: real.worker.stop(7.5))
    real.run()
    [rollout] = real.record.rollouts()
    assert (rollout.done, rollout.tokens) == (False, 7)
    assert [(s.kind, s.started_s, s.ended_s, s.tokens) for s in real.record.spans] == [
        ("rollout", 0.0, 7.5, 7)
    ]
