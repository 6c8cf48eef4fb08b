"""Best-of-N speculation: duplicates at the dispatcher, freed workers in a rollout, what it costs and what it may not change."""

import math
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.rules import DISPATCHES
from simrl.errors import InputError
from simrl.profile.model_shape import MODELS
from simrl.runtime.events import call_at
from simrl.simulate.prepare import prepare
from simrl.speculation.best_of_n import BestOfN, counted_acceptance
from simrl.trace.trace import Turn, write_trace
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    ROOMY,
    a_worker,
    counted,
    examples,
    lanes,
    on_gpus,
    prepared,
    recorder,
    rollout,
    rows,
    sample,
    scenario,
    trace,
    trained,
    watch,
)
from tests.pipelines.test_pipelines import tight, traces
from tests.runtime.test_turns import agentic_traces
from tests.token_traces import trace_of

# Duplicates, at the dispatcher.


class Two:
    """Workers of which the first takes two seconds a pass, the others one, and a dispatcher; commands at stated times."""

    def __init__(self, workers: int = 2, rule: str = "least_requests") -> None:
        self.env = simpy.Environment()
        self.record = recorder(*(f"rollout-{i:03d}" for i in range(workers)))
        self.workers = [a_worker(self.env, i, record=self.record) for i in range(workers)]
        self.workers[0].slow_down(2.0)
        self.dispatcher = Dispatcher(self.env, self.workers, DISPATCHES[rule], self.record)

    def begin(self, response_tokens: int = 20, turns=()):
        one = sample(0, 4, response_tokens, turns)
        self.ended = self.dispatcher.submit([one], to=[0])[0]
        return one

    def duplicate(self, one, at_s: float, worker: int = 1) -> None:
        """As it is at the next boundary of worker 0."""

        def ask() -> None:
            reported = self.workers[0].progress([one])
            reported.callbacks.append(
                lambda event: self.dispatcher.duplicate(one, worker, *event.value)
            )

        self.at(at_s, ask)

    def at(self, at_s: float, call) -> None:
        call_at(self.env, at_s, call)

    def result(self, until_s: float = 100.0):
        self.env.run(until=until_s)
        for worker in self.workers:
            worker.stop(self.env.now)
        for waiting in self.dispatcher.waiting():
            self.record.request_ended(waiting, 0)
        return self.record.result(self.env.now, {})

    def row(self, until_s: float = 100.0):
        """The sample's row, and its segments: (worker, tokens, started, ended)."""
        result = self.result(until_s)
        (row,) = rows(result.samples)
        generated = sum(worker.generated_total for worker in self.workers)
        assert generated == row["generated_tokens"] + row["duplicate_tokens"]
        parts = [
            (s["worker"], s["tokens"], s["started_s"], s["ended_s"]) for s in rows(result.segments)
        ]
        return row, parts


def test_the_first_stay_to_finish_counts_and_what_others_generated_besides_is_duplicate():
    two = Two()
    two.duplicate(two.begin(), 5.0)
    row, segments = two.row()
    # Told at 6, with 3 tokens; the other prefills 4 + 3 and has its 17th token 17 passes later. The first has 11 then, and one
    # more when it stops, at 24.
    assert segments == [(0, 3, 0.0, 6.0), (1, 17, 6.0, 23.0)]
    assert (row["finished_s"], row["generated_tokens"], row["duplicate_tokens"]) == (
        23.0,
        20,
        12 - 3,
    )
    assert two.ended.value.done


def test_a_duplicate_that_is_slower_leaves_the_sample_as_it_was():
    alone, two = Two(), Two()
    alone.begin(6)
    two.workers[1].slow_down(3.0)
    two.duplicate(two.begin(6), 5.0)
    plain, segments = alone.row()
    row, with_duplicate = two.row()
    assert with_duplicate == segments == [(0, 6, 0.0, 12.0)]
    # At 12 it has had two passes, of which the second ends as it is aborted ... at the boundary after 12: 6 + 3 · 3.
    assert row == {**plain, "duplicate_tokens": 3}


def test_a_worker_with_a_duplicate_is_not_empty_until_it_has_gone_and_is_freed_then():
    two = Two()
    heard = []
    two.duplicate(two.begin(6), 5.0)
    two.workers[1].slow_down(3.0)
    two.at(
        7.0,
        lambda: two.dispatcher.empty(1).callbacks.append(
            lambda _: heard.append(("empty", two.env.now))
        ),
    )
    two.at(
        7.0,
        lambda: two.dispatcher.freed().callbacks.append(
            lambda e: heard.append((e.value, two.env.now))
        ),
    )
    two.at(
        13.0,
        lambda: two.dispatcher.freed().callbacks.append(
            lambda e: heard.append((e.value, two.env.now))
        ),
    )
    two.at(
        7.0,
        lambda: heard.append(
            (two.dispatcher.unfinished.tolist(), len(two.dispatcher.duplicated()[1]))
        ),
    )
    two.row()
    assert heard == [([1, 0], 1), (0, 12.0), (1, 15.0), ("empty", 15.0)]


def test_a_sample_has_one_stay_at_a_worker_and_none_more_once_it_has_ended():
    two, said = Two(), []
    one = two.begin()
    nothing = rollout(0, {}, done=False)._replace(sample=one)
    for at_s, worker in ((1.0, 0), (1.0, 1), (2.0, 1), (99.0, 1)):
        two.at(
            at_s, lambda worker=worker: said.append(two.dispatcher.duplicate(one, worker, nothing))
        )
    two.row()
    assert said == [False, True, False, False]


def test_where_the_worker_of_a_duplicate_is_lost_the_sample_goes_on_without_it():
    two = Two()
    two.duplicate(two.begin(), 5.0)
    two.at(10.0, lambda: two.dispatcher.retire(1, lost=True))
    two.at(10.0, two.workers[1].fail)
    row, segments = two.row()
    assert segments == [(0, 20, 0.0, 40.0)]
    assert row["duplicate_tokens"] == 5  # from 6 to the boundary after 10


def test_where_the_own_worker_is_lost_the_sample_goes_on_elsewhere_and_its_duplicate_races_on():
    three = Two(workers=3)
    three.workers[1].slow_down(4.0)
    three.duplicate(three.begin(), 5.0)  # at worker 1
    three.at(9.0, lambda: three.dispatcher.retire(0, lost=True))
    three.at(9.0, three.workers[0].fail)
    row, segments = three.row()
    # At 10 it has 5 tokens, and goes to the worker that has least: 2, for 1 has the duplicate. That one had passes to 10 and
    # 14, and so on, of which the fifth ends at 26, after the sample.
    assert segments == [(0, 5, 0.0, 10.0), (2, 15, 10.0, 25.0)]
    assert row["duplicate_tokens"] == 5


def test_a_duplicate_gives_way_to_the_sample_itself():
    two = Two()
    two.workers[1].slow_down(4.0)
    two.duplicate(two.begin(), 5.0)
    two.at(9.0, lambda: two.dispatcher.retire(0, lost=True))
    two.at(9.0, two.workers[0].fail)
    row, segments = two.row()
    # At 10 there is no other worker. The duplicate, with passes to 10 and 14, stops at 14, and the sample begins with the 5
    # tokens that it has.
    assert segments == [(0, 5, 0.0, 10.0), (1, 15, 14.0, 74.0)]
    assert row["duplicate_tokens"] == 2


def test_a_withdrawn_sample_comes_back_with_what_its_own_stay_had():
    two, back = Two(), []
    one = two.begin()
    two.duplicate(one, 5.0)
    two.at(
        9.0,
        lambda: two.dispatcher.withdraw([one]).callbacks.append(
            lambda event: back.extend(event.value)
        ),
    )
    row, _ = two.row()
    assert [(r.tokens, r.done) for r in back] == [(5, False)]
    assert two.dispatcher.duplicated() == [[], []]
    assert (
        row["duplicate_tokens"] + row["generated_tokens"] == 5 + 5
    )  # at 1 from 6 to the boundary after 10


def test_moved_to_another_worker_the_sample_keeps_its_duplicate():
    three = Two(workers=3)
    one = three.begin()
    three.duplicate(one, 5.0)
    three.at(9.0, lambda: three.dispatcher.move(one, 2))
    row, segments = three.row()
    # 5 tokens at 10, the other 15 by 25: later than the duplicate, which has its 20 at 23.
    assert segments == [(0, 3, 0.0, 6.0), (1, 17, 6.0, 23.0)]
    assert row["duplicate_tokens"] == (5 - 3) + 14  # worker 2 from 10 to the boundary after 23


def test_a_retired_worker_lets_its_duplicates_go():
    two = Two()
    two.duplicate(two.begin(), 5.0)
    two.at(10.0, lambda: two.dispatcher.retire(1))
    row, segments = two.row()
    assert (segments, row["duplicate_tokens"]) == ([(0, 20, 0.0, 40.0)], 5)


def test_at_the_end_of_a_simulation_the_furthest_stay_is_what_is_in_flight():
    two = Two()
    two.duplicate(two.begin(), 5.0)
    row, segments = two.row(until_s=20.5)
    assert segments == [(0, 3, 0.0, 6.0), (1, 15, 6.0, 21.0)]
    assert (row["status"], row["generated_tokens"], row["duplicate_tokens"]) == (
        "in_flight",
        18,
        11 - 3,
    )


def test_a_duplicate_made_while_the_environment_answers_waits_for_that_answer():
    two = Two()
    two.duplicate(two.begin(6, [Turn(3, 9.0, 5)]), 7.0)  # in its environment from 6 to 15
    row, segments = two.row()
    assert segments == [(0, 3, 0.0, 6.0), (1, 3, 15.0, 18.0)]
    assert (
        row["duplicate_tokens"] == 2
    )  # the first resumes at 15, and stops at the boundary after 18: 19


def test_chunks_of_a_sample_are_raced_one_by_one():
    two = Two(rule="seer")
    with patch.object(
        two.dispatcher,
        "_rule",
        DISPATCHES["seer"].__class__(**{**vars(DISPATCHES["seer"]), "chunk_tokens": 8}),
    ):
        two.duplicate(two.begin(), 3.0)  # told at 4, with two tokens
        row, segments = two.row()
    # The duplicate has the 8th token at 10; the sample queues up anew, and goes on at a worker that has none.
    assert segments[:2] == [(0, 2, 0.0, 4.0), (1, 6, 4.0, 10.0)]
    assert row["duplicate_tokens"] == 4  # of the own stay, which ends at 12 with 6
    assert row["generated_tokens"] == 20


# A rollout's tail.

REPEATS = (
    [
        1,
        2,
        3,
        4,
    ]
    * 12
)  # 48 tokens that an n-gram drafts right from the eighth on (prefixes of 3 or more, seen before)


def tail(drafters=("ngram",), workers=2, lengths=((48, 4),), **more):
    """Plain decoding first, one request a worker; the n-gram is what freed workers have. Drafts on the CPU take 5 µs."""
    groups = {
        (e, p): [REPEATS[:n] for n in group]
        for e in range(len(lengths))
        for p, group in enumerate([lengths[e]])
    }
    parameters = {"speculation": "none", "decoupled": False, "drafters": drafters, **more}
    return counted("specactor", parameters, trace_of(groups), steps=len(lengths), workers=workers)


def test_a_freed_worker_drafts_for_the_last_request_from_the_tokens_it_has():
    watched = tail()
    window = watched.prepared.tail.plans["ngram"].speculation.window.rule.start_tokens
    first, second = (s for s in rows(watched.result.samples))
    segments = [
        (s["worker"], s["tokens"], s["started_s"], s["ended_s"])
        for s in rows(watched.result.segments)
    ]
    # Worker 1 is free at 4; at 5, worker 0 tells that the other request has 5 tokens. The prefill brings the 6th, a plain pass
    # the 7th, with which [1, 2, 3] has been there before. What followed is drafted, as far as there is any: 4 tokens, then 4
    # again, as the match of 5 is later in the text, then 8, or the window if that is less; from then on a pass yields the
    # window and one more.
    assert segments[0] == (0, 5, 0.0, 5.0)
    assert segments[1][:3] == (1, 43, 5.0)
    assert window >= 4
    reached = 7 + 5 + 5 + min(8, window) + 1
    assert segments[1][3] == pytest.approx(
        5 + 2 + 3 + math.ceil((48 - reached) / (window + 1)), abs=0.01
    )
    stops_s = math.floor(segments[1][3]) + 1  # worker 0, at its next boundary
    assert (first["duplicate_tokens"], second["duplicate_tokens"]) == (stops_s - 5, 0)
    assert first["accepted_tokens"] > 0
    assert second["drafted_tokens"] == 0
    # The update begins when the duplicate has stopped: the GPUs are the trainer's from then on.
    assert [
        s["ended_s"] for s in lanes(watched.result)["rollout-000"] if s["kind"] == "rollout"
    ] == [stops_s]


def test_without_a_freed_worker_nothing_is_duplicated():
    watched = tail(lengths=((8, 8),))
    assert sum(row["duplicate_tokens"] for row in rows(watched.result.samples)) == 0
    assert tail(workers=1).result.samples.column("duplicate_tokens").to_pylist() == [0, 0]


def test_in_the_next_batch_every_worker_has_its_own_drafter_again():
    watched = tail(lengths=((48, 4), (10, 10)))
    for row in rows(watched.result.samples)[2:]:
        assert (row["drafted_tokens"], row["duplicate_tokens"]) == (0, 0)
    assert trained(watched.result) == [[0, 1], [2, 3]]
    assert all(worker.engine is worker.engines[0] for worker in watched.workers)


def test_requests_of_low_acceptance_go_first():
    # Each begins with a drafter that reads its own text: of uid 0 all drafts are right, of uid 1 none, uid 2 has none.
    wrong = [token for i in range(12) for token in (1, 2, 3, 10 + i)]
    texts = [REPEATS * 3, wrong, list(range(100, 120))]
    asked = []

    def duplicate(self, one, worker, partial, cached=False):
        asked.append((self._env.now, one.uid, worker, partial.tokens))
        return original(self, one, worker, partial, cached)

    original = Dispatcher.duplicate
    parameters = {
        "speculation": "ngram",
        "decoupled": False,
        "drafters": ("qwen2.5-0.5b",),
        "b_max": 1,
    }
    with patch.object(Dispatcher, "duplicate", duplicate):
        counted("specactor", parameters, trace_of({(0, 0): texts}), steps=1, workers=3)
    at_s, uid, worker, tokens = asked[0]
    assert (uid, worker) == (1, 2)
    assert at_s == pytest.approx(21, abs=0.01), (
        "worker 2 is free at 20, the others tell at their next boundary"
    )
    assert tokens in (20, 21)


def test_best_of_n_shortens_a_tail_whose_own_drafter_fails():
    steps = trace([[[(20, 40)]] * 14 + [[(20, 900)]]] * 2)
    bad = {"by_position": [0.05], "verification": "exact_match"}
    good = {"by_position": [0.9], "verification": "exact_match"}
    inputs = {"acceptance": {"qwen2.5-0.5b": bad, "qwen2.5-1.5b": good}}
    took = {}
    for best_of_n in (False, True):
        given_ = scenario(
            {**OWN, "best_of_n": best_of_n, "decoupled": False},
            steps=2,
            model="qwen2.5-7b",
            cluster={"gpu": "h100", "gpus": 4, "tp": 1},
            speculation=inputs,
        )
        watched = watch(prepared(given_, steps))
        assert_nothing_is_lost(watched)
        took[best_of_n] = watched.result.metadata["end_s"]
    assert took[True] < 0.75 * took[False]


# What it may not change, whatever happens.

rules = st.fixed_dictionaries(
    {
        "b_max": st.integers(1, 4),
        "assignment": st.sampled_from(["by_drafter", "by_request"]),
        "kv": st.sampled_from(["mixed", "recompute", "transfer"]),
        "copies": st.sampled_from(["decoupled", "coupled"]),
        "drafters": st.lists(
            st.sampled_from(["ngram", "qwen2.5-0.5b", "qwen2.5-1.5b"]),
            min_size=1,
            max_size=3,
            unique=True,
        ).map(tuple),
        "decoupled": st.booleans(),
        "dispatch": st.sampled_from(["least_requests", "even_split", "seer"]),
    }
)


def check(watched_prepared, most_load):
    """Runs, and looks at every duplicate and every submission."""
    loads = []

    def watched_duplicate(self, one, worker, partial, cached=False):
        done = original(self, one, worker, partial, cached)
        at = [len(a) + len(b) for a, b in zip(self.held(), self.duplicated(), strict=True)]
        loads.append((at[worker], done))
        uids = [s.uid for s in (*self.held()[worker], *self.duplicated()[worker])]
        assert len(set(uids)) == len(uids)
        return done

    original = Dispatcher.duplicate
    with patch.object(Dispatcher, "duplicate", watched_duplicate):
        watched = watch(watched_prepared)
    assert_nothing_is_lost(watched)
    assert all(load <= most_load for load, done in loads if done)
    assert [u["off_policyness_max"] for u in rows(watched.result.steps)] == [
        0
    ] * watched.result.steps.num_rows
    working = [
        s
        for s in rows(watched.result.spans)
        if s["kind"] in ("log_prob", "train", "publish", "switch")
    ]
    for span in (s for s in rows(watched.result.spans) if s["kind"] == "rollout"):
        assert all(
            span["ended_s"] <= w["started_s"] + 1e-9 or w["ended_s"] <= span["started_s"] + 1e-9
            for w in working
        )
    return watched


@examples(40)
@given(traces, st.integers(2, 6), st.integers(1, 3), st.one_of(st.just(ROOMY), tight), rules)
def test_nothing_is_lost_and_no_worker_has_more_than_b_max(steps, gpus, updates, limits, rule):
    system = on_gpus("specactor", rule, gpus, steps=updates)
    check(prepared(system, steps, limits=limits), rule["b_max"])


@examples(15)
@given(agentic_traces(), st.integers(2, 4), rules)
def test_neither_in_responses_of_several_turns(steps, gpus, rule):
    check(prepared(on_gpus("specactor", rule, gpus, steps=2), steps, limits=ROOMY), rule["b_max"])


@examples(15)
@given(traces, st.integers(2, 4), rules, st.integers(0, 5), st.sampled_from(["elsewhere", "wait"]))
def test_nor_where_workers_are_lost_and_slow(steps, gpus, rule, seed, on_loss):
    faults = [
        {"kind": "lost", "rate_per_hour": 60, "duration_s": 3},
        {"kind": "lost", "worker": 0, "at_s": 0.2, "back_s": 0.4},
        {"kind": "slow", "factor": 3, "rate_per_hour": 60, "duration_s": 30},
    ]
    system = on_gpus(
        "specactor", {**rule, "on_loss": on_loss}, gpus, steps=2, faults=faults, seed=seed
    )
    assert_nothing_is_lost(watch(prepared(system, steps, limits=ROOMY)))


@examples(10)
@given(traces, rules, st.sampled_from([None, "none", "ngram"]))
def test_what_is_trained_is_the_same_with_and_without_and_two_runs_are_equal(
    steps, rule, speculation
):
    more = {} if speculation is None else {"speculation": speculation}
    runs = [
        watch(
            prepared(
                on_gpus("specactor", {**rule, **more, "best_of_n": best}, 4, steps=2),
                steps,
                limits=ROOMY,
            )
        )
        for best in (True, True, False)
    ]
    first, again, without = (run.result for run in runs)
    assert first.samples == again.samples
    assert first.segments == again.segments
    assert first.spans == again.spans
    columns = ["uid", "prompt_id", "sample", "generated_tokens", "status", "trained_step"]
    assert first.samples.select(columns) == without.samples.select(columns)


def test_dynamic_sampling_refills_after_the_tail():
    config = on_gpus("specactor", {"decoupled": False, "dynamic_sampling": 1.5}, 4, steps=2)
    assert_nothing_is_lost(watch(prepared(config, limits=ROOMY)))


# What it takes, and what is refused.

OWN = {"name": "specactor", "model": "qwen2.5-0.5b"}


def test_drafters_of_the_tail_take_nothing_of_a_workers_cache_until_it_is_freed():
    """§4.3: they are in the host's memory. The first drafter stays on the GPUs that it is on."""
    freed, tokens = {}, set()
    for drafters in ((), ("ngram",), ("qwen2.5-0.5b",), ("ngram", "qwen2.5-0.5b", "qwen2.5-1.5b")):
        ready = prepare(
            scenario({**OWN, "drafters": drafters, "decoupled": False}, model="qwen2.5-7b")
        )
        tokens.add(ready.inputs()["kv_cache_tokens_per_worker"])
        if drafters:
            freed = ready.inputs()["best_of_n"]["drafters"]
    assert len(tokens) == 1
    of = {name: facts["scale"]["kv_cache_tokens"] for name, facts in freed.items()}
    assert of["ngram"] == of["qwen2.5-0.5b"] == tokens.pop() > of["qwen2.5-1.5b"]
    larger, gpu, engine = ready.tail.plans["qwen2.5-1.5b"], ready.gpu, ready.scenario.engine
    free = (
        gpu.memory_bytes * engine.gpu_memory_utilization
        - engine.reserve_bytes
        - ready.model.weight_bytes
        - ready.drafts.weight_bytes
        - larger.weight_bytes
    )
    a_token = ready.model.kv_bytes_per_token + larger.kv_bytes_per_token
    assert of["qwen2.5-1.5b"] == int(free // a_token) // engine.block_size * engine.block_size
    assert larger.kv_blocks * engine.block_size == of["qwen2.5-1.5b"]


def test_a_drafter_comes_over_pcie_from_the_hosts_memory_unless_it_is_there():
    inputs = prepare(scenario({**OWN, "decoupled": False}, model="qwen2.5-7b"))
    of = {name: plan.load_s for name, plan in inputs.tail.plans.items()}
    bytes_per_s = 0.346 * inputs.gpu.host_bytes_per_s
    assert of["ngram"] == of["qwen2.5-0.5b"] == 0
    assert of["qwen2.5-1.5b"] == MODELS["qwen2.5-1.5b"].weight_bytes / bytes_per_s
    apart = prepare(scenario({**OWN, "copies": "coupled"}, model="qwen2.5-7b"))
    small_s = MODELS["qwen2.5-0.5b"].weight_bytes / bytes_per_s
    assert apart.tail.plans["qwen2.5-0.5b"].load_s == small_s, "it is on the drafter's GPU alone"
    beside = prepare(scenario(OWN, model="qwen2.5-7b"))
    assert beside.tail.plans["qwen2.5-0.5b"].load_s == 0
    assert beside.tail.plans["qwen2.5-1.5b"].load_s == of["qwen2.5-1.5b"]


def test_a_copy_begins_when_its_drafter_is_loaded_and_the_load_is_a_span_of_its_own():
    steps = trace([[[(20, 40)]] * 14 + [[(20, 900)]]] * 2)
    one = scenario(
        {**OWN, "decoupled": False, "drafters": ("qwen2.5-1.5b",)},
        steps=2,
        model="qwen2.5-7b",
        cluster={"gpu": "h100", "gpus": 4, "tp": 1},
    )
    watched = watch(prepared(one, steps))
    assert_nothing_is_lost(watched)
    load_s = watched.prepared.tail.plans["qwen2.5-1.5b"].load_s
    loads = [s for s in rows(watched.result.spans) if s["kind"] == "load_drafter"]
    assert len(loads) == 2 * 3, "three workers are freed in each of two steps"
    segments = rows(watched.result.segments)
    for load in loads:
        assert load["ended_s"] - load["started_s"] == pytest.approx(load_s)
        worker = int(load["lane"].removeprefix("rollout-"))
        assert not any(
            s["worker"] == worker
            and s["started_s"] < load["ended_s"]
            and s["ended_s"] > load["started_s"]
            for s in segments
        )


def test_windows_and_order_come_from_the_draft_ladder():
    ready = prepare(
        scenario({**OWN, "copies": "coupled", "assignment": "by_request"}, model="qwen2.5-7b")
    )
    ladder = ready.inputs()["best_of_n"]["ladder"]
    assert tuple(ladder) == ready.tail.rule.order
    speedups = [entry["speedup"] for entry in ladder.values()]
    assert all(a >= b for a, b in pairwise(speedups))
    for name, plan in ready.tail.plans.items():
        assert plan.speculation.window.rule.start_tokens == ladder[name]["window"]
        assert plan.decoupled is None
        assert ladder[name]["acceptance"] == (
            0.75 if name != "ngram" else pytest.approx(0.4, abs=0.1)
        )
        assert ladder[name]["source"] == "assumed"


def test_the_ladder_does_not_look_at_the_tokens_of_the_run(tmp_path):
    def ladder(text):
        path = tmp_path / f"{len(set(text))}.parquet"
        write_trace(trace_of({(0, 0): [text] * 4}), path)
        return prepare(scenario("specactor", workload={"trace": str(path)}, steps=1)).tail.facts[
            "ladder"
        ]

    assert ladder(REPEATS) == ladder(list(range(len(REPEATS)))), (
        "an n-gram drafts the first, and nothing of the second"
    )


def test_the_place_of_the_ngram_is_that_of_its_run_model():
    def place(wrong, right):
        buckets = {
            "gaps": [{"up_to_tokens": 64, "share": 1, "mean_tokens": wrong}],
            "hits": [{"up_to_tokens": 64, "share": 1, "mean_tokens": right}],
        }
        runs = {
            "ngram": {"classes": [{"share": 1, "share_of_long": 1, **buckets}], "first_epoch": True}
        }
        return prepare(scenario("specactor", speculation={"runs": runs})).tail.facts["ladder"][
            "ngram"
        ]

    seldom, often = place(30, 2), place(2, 30)
    assert seldom["acceptance"] == pytest.approx(2 / 32, abs=0.03)  # a response begins with a gap
    assert often["acceptance"] == pytest.approx(30 / 32, abs=0.06)
    assert often["window"] > seldom["window"] and often["speedup"] > seldom["speedup"]


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        (
            {"drafters": ("ngram", "ngram")},
            "best_of_n: drafter 'ngram' is named twice; name each once",
        ),
        ({"drafters": ("gpt-9",)}, "gpt-9"),
        ({"b_max": 0}, "b_max"),
        (
            {"speculation": "tlt"},
            "speculation tlt: with best_of_n, requests run with several drafters",
        ),
        ({"speculation": "draft_model"}, "speculation draft_model: with best_of_n"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(parameters, line):
    with pytest.raises(InputError, match=line) as refused:
        prepare(scenario({"name": "specactor", **parameters}))
    assert "\n" not in str(refused.value)


def test_without_drafters_it_is_specactor_without_best_of_n():
    none, without = (
        watch(prepared(scenario({"name": "specactor", **more})))
        for more in ({"drafters": ()}, {"best_of_n": False})
    )
    assert none.result.samples == without.result.samples
    assert without.prepared.tail is None


def test_a_rule_is_complete_once_it_is_prepared():
    ready = prepare(scenario({"name": "specactor", "speculation": "ngram", "drafters": ("ngram",)}))
    rule = BestOfN(("ngram",), 8, "by_drafter", "mixed", "decoupled")
    assert ready.system.best_of_n == rule
    share = ready.tail.rule.fetched_share
    assert ready.tail.rule == replace(rule, own="ngram", order=("ngram",), fetched_share=share)
    assert 0 < share < 1


# The acceptance that decides.


@given(st.floats(0.02, 0.98), st.integers(1, 16))
def test_acceptance_from_what_servers_count_is_the_p_behind_it(p, window):
    passes = 1_000_000
    accepted = round(passes * sum(p**j for j in range(1, window + 1)))
    assert counted_acceptance(window * passes, accepted, passes) == pytest.approx(p, abs=2e-3)


def test_acceptance_compares_requests_whose_windows_differ():
    rng = np.random.default_rng(0)

    def seen(p, window):
        misses = rng.random((4000, window)) >= p
        accepted = np.where(misses.any(axis=1), misses.argmax(axis=1), window)
        return counted_acceptance(4000 * window, int(accepted.sum()), 4000)

    assert seen(0.5, 1) < seen(0.6, 8)
    assert counted_acceptance(4, 0, 2) == 0.0
    assert counted_acceptance(4, 4, 2) == 1.0
    assert math.isnan(counted_acceptance(0, 0, 0))
