"""Turns of an environment: what a trace says of them, and what a worker does while the environment takes its time."""

import math

import numpy as np
import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.placement import least_requests
from simrl.dispatch.rules import Dispatch
from simrl.errors import InputError
from simrl.runtime.events import on_fire
from simrl.runtime.rollout import Segment, WeightLoad
from simrl.runtime.simulated_trainer import _lengths
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.simulate.prepare import prepare
from simrl.systems.recipes import RECIPES
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import Trace, TraceMetadata, Turn, write_trace
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    RESPONSES,
    ROOMY,
    a_worker,
    examples,
    on_gpus,
    one_second_a_pass,
    prepared,
    recorder,
    sample,
    scenario,
    trace,
    watch,
)
from tests.pipelines.test_pipelines import tight

NARROW = ROOMY._replace(max_num_batched_tokens=4)
METADATA = TraceMetadata(
    name="t", kind="recorded", source="a test", tokenizer="none", cap_tokens=100
)
PAUSED = (Turn(3, 10.0, 0),)  # after three tokens, ten seconds: from 3 to 13


# What a trace says.


def rows(*responses, **columns):
    n = len(responses)
    return {
        "step": [0] * n,
        "epoch": [0] * n,
        "prompt_id": list(range(n)),
        "sample": [0] * n,
        "prompt_tokens": [5] * n,
        "response_tokens": list(responses),
        **columns,
    }


def turns_of(*responses, **columns):
    whole = Trace.from_columns(rows(*responses, **columns), METADATA)
    return [response.turns for response in whole.responses(0, len(responses))]


def test_turns_are_told_with_the_tokens_at_which_they_end():
    found = turns_of(
        10, 6, 4, turn_tokens=[[2, 3, 5], [6], None], turn_environment_s=[[1.5, 2.5], [], None],
        turn_observation_tokens=[[7, 0], [], None],
    )  # fmt: skip
    assert found == [(Turn(2, 1.5, 7), Turn(5, 2.5, 0)), (), ()]


def test_a_part_of_the_rows_has_its_own_turns():
    whole = Trace.from_columns(rows(10, 6, 4, turn_tokens=[[2, 8], [1, 2, 3], [3, 1]]), METADATA)
    assert [r.turns for r in whole.responses(1, 3)] == [
        (Turn(1, 0, 0), Turn(3, 0, 0)),
        (Turn(3, 0, 0),),
    ]


def test_a_total_alone_is_one_pause_after_half_of_the_response():
    assert turns_of(9, 1, 8, environment_s=[2.5, 2.5, None]) == [(Turn(4, 2.5, 0),), (), ()]


def test_a_total_is_split_equally_among_the_pauses_of_known_turns():
    found = turns_of(10, 6, 8, turn_tokens=[[2, 3, 5], [6], None], environment_s=[3.0, 3.0, 3.0])
    assert found == [(Turn(2, 1.5, 0), Turn(5, 1.5, 0)), (), (Turn(4, 3.0, 0),)]


def test_what_the_environment_adds_counts_in_a_rows_context_and_not_in_its_response():
    whole = Trace.from_columns(
        rows(
            10,
            6,
            4,
            turn_tokens=[[2, 3, 5], None, [1, 3]],
            turn_observation_tokens=[[7, 8], None, None],
        ),
        METADATA,
    )
    assert whole.observation_tokens().tolist() == [15, 0, 0]
    assert Trace.from_columns(rows(4), METADATA).observation_tokens().tolist() == [0]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"turn_environment_s": [[1], []]}, "column 'turn_environment_s' without 'turn_tokens'; give the tokens"),
        ({"turn_tokens": [[4, 6], [3, 4]]}, "row 1, column 'turn_tokens' is [3, 4]; it must sum to the row's response_tokens"),
        ({"turn_tokens": [[4, 6], []]}, "row 1, column 'turn_tokens' is []; it must sum to the row's response_tokens"),
        ({"turn_tokens": [[10, 0], [6]]}, "row 0, column 'turn_tokens' is [10, 0]; it must hold at least one token a turn"),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_environment_s": [[1.0, 2.0], []]},
            "row 0, column 'turn_environment_s' is [1.0, 2.0]; it must have one value less than turn_tokens has",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_environment_s": [[-1.0], []]},
            "row 0, column 'turn_environment_s' is [-1.0]; it must hold zero or more seconds for each turn but the last",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_environment_s": [[math.nan], []]},
            "row 0, column 'turn_environment_s' is [nan]; it must hold zero or more seconds",
        ),
        (
            {"turn_tokens": [[4, 6], None], "turn_observation_tokens": [[1], [2]]},
            "row 1, column 'turn_observation_tokens' is [2]; it must be empty where turn_tokens is",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_observation_tokens": [[-1], []]},
            "row 0, column 'turn_observation_tokens' is [-1]; it must hold zero or more tokens",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_tool": [[None], []]},
            "row 0, column 'turn_tool' is [None]; it must hold a name for each turn but the last",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_tool": [["a", "b"], []]},
            "row 0, column 'turn_tool' is ['a', 'b']; it must have one value less than turn_tokens has",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_failures": [[-1], []]},
            "row 0, column 'turn_failures' is [-1]; it must hold zero or more failed tries for each turn but the last",
        ),
        (
            {"turn_tokens": [[4, 6], [6]], "turn_environment_s": [[3.0], []], "environment_s": [4.0, None]},
            "row 0, column 'turn_environment_s' is [3.0]; it must sum to the row's environment_s",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_turns_that_contradict_the_response_are_refused_by_row_column_and_value(columns, line):
    with pytest.raises(InputError) as refused:
        Trace.from_columns(rows(10, 6, **columns), METADATA, "run.parquet")
    assert str(refused.value).startswith(f"run.parquet: {line}")
    assert "\n" not in str(refused.value)


AGENTIC = {"turns": 4, "environment_s": 3.0, "environment_sigma": 1.0, "observation_tokens": 50}
LENGTHS = {
    "steps": 4,
    "prompts_per_step": 64,
    "group": 8,
    "cap_tokens": 4000,
    "mean_tokens": 800.0,
    "sigma": 0.8,
}


def test_a_synthetic_trace_has_as_many_turns_and_seconds_as_asked_for_and_the_same_lengths():
    plain, agentic = (synthesise(LengthModel(**LENGTHS, **more), 3) for more in ({}, AGENTIC))
    assert agentic.table.select(plain.table.column_names) == plain.table
    turns = [response.turns for response in agentic.responses(0, len(agentic))]
    numbers = np.array([1 + len(t) for t in turns])
    assert numbers.mean() == pytest.approx(4, abs=4 * numbers.std() / math.sqrt(len(numbers)))
    seconds = np.log([turn.environment_s for t in turns for turn in t])
    assert seconds.std() == pytest.approx(1, rel=0.05)
    assert seconds.mean() == pytest.approx(math.log(3) - 0.5, abs=0.06)
    assert {turn.observation_tokens for t in turns for turn in t} == {50}
    assert agentic.observation_tokens().tolist() == (50 * (numbers - 1)).tolist()


def test_more_samples_leave_the_turns_that_were_there_as_they_were():
    small, large = (
        synthesise(LengthModel(**{**LENGTHS, "group": g}, **AGENTIC), 3) for g in (4, 6)
    )
    rows_of = [
        {
            (r["step"], r["prompt_id"], r["sample"]): (r["turn_tokens"], r["turn_environment_s"])
            for r in t.table.to_pylist()
        }
        for t in (small, large)
    ]
    assert {key: rows_of[1][key] for key in rows_of[0]} == rows_of[0]


def test_no_response_has_more_turns_than_tokens_or_than_the_most_allowed():
    short = synthesise(LengthModel(**{**LENGTHS, "mean_tokens": 2.0}, turns=50, cap_turns=6), 3)
    numbers = [1 + len(response.turns) for response in short.responses(0, len(short))]
    assert max(numbers) == 6
    assert all(
        n <= tokens
        for n, tokens in zip(numbers, short.column("response_tokens").tolist(), strict=True)
    )


# What a worker does: every pass takes a second, every load ten.


def at(env, time_s, call):
    on_fire(env.timeout(time_s), lambda _: call())


def ended(rollout):
    return [(s.policy_version, s.tokens, s.started_s, s.ended_s) for s in rollout.segments]


def test_a_response_stops_for_the_environment_and_goes_on_with_its_cache():
    env = simpy.Environment()
    worker = a_worker(env)
    rollout = env.run(worker.submit(sample(0, 4, 8, PAUSED)))
    assert rollout.segments == (Segment(0, 0, 3, 0.0, 3.0), Segment(0, 0, 5, 13.0, 18.0))
    assert (rollout.done, rollout.observation_tokens, rollout.first_token_s) == (True, 0, 1.0)
    assert worker.engine.totals["prefill_tokens"] == 4


def test_what_the_environment_says_is_prefilled():
    env = simpy.Environment()
    worker = a_worker(env, limits=NARROW)
    rollout = env.run(worker.submit(sample(0, 4, 8, [Turn(3, 10.0, 7)])))
    assert rollout.observation_tokens == 7
    # Its last token and 7 of the environment are computed in two passes, of which the second gives a token.
    assert ended(rollout) == [(0, 3, 0.0, 3.0), (0, 5, 13.0, 19.0)]
    assert worker.engine.totals["prefill_tokens"] == 4 + 8


def test_a_paused_request_leaves_its_slot_to_another_and_keeps_its_blocks():
    env = simpy.Environment()
    worker = a_worker(env, limits=ROOMY._replace(max_num_seqs=1, block_size=1))
    first, second = worker.submit(sample(0, 4, 8, PAUSED)), worker.submit(sample(1, 4, 5))
    free = []
    at(env, 11.0, lambda: free.append(worker.engine.free_blocks))
    env.run()
    assert ended(second.value) == [(0, 5, 0.0, 8.0)]  # it waited until 3
    assert ended(first.value) == [(0, 3, 0.0, 3.0), (0, 5, 13.0, 18.0)]
    assert free == [
        1000 - 6
    ]  # the cache of 4 + 2 tokens: that of the third would come with the next pass


def test_who_comes_back_from_the_environment_waits_for_a_slot_like_anyone():
    env = simpy.Environment()
    worker = a_worker(env, limits=ROOMY._replace(max_num_seqs=1))
    first = worker.submit(sample(0, 4, 8, PAUSED))
    worker.submit(sample(1, 4, 20))
    assert ended(env.run(first))[-1] == (0, 5, 14.0, 28.0)  # from 3 to 23 the other runs


def test_a_worker_whose_requests_all_wait_for_environments_is_idle():
    env, record = simpy.Environment(), recorder()
    worker = a_worker(env, record=record)
    worker.submit(sample(0, 4, 8, PAUSED))
    worker.submit(sample(1, 4, 7, [Turn(5, 2.0, 0)]))
    env.run()
    worker.stop(20.0)
    spans = [
        (s["kind"], s["started_s"], s["ended_s"]) for s in record.result(20.0, {}).spans.to_pylist()
    ]
    assert spans == [
        ("rollout", 0.0, 5.0), ("idle", 5.0, 7.0), ("rollout", 7.0, 9.0), ("idle", 9.0, 13.0), ("rollout", 13.0, 18.0),
        ("idle", 18.0, 20.0),
    ]  # fmt: skip
    assert [s.tokens for s in record.spans] == [3 + 5, 2, 5]


def test_several_turns_follow_each_other_and_one_that_takes_no_time_costs_nothing_but_its_words():
    env = simpy.Environment()
    worker = a_worker(env)
    turns = [Turn(2, 4.0, 3), Turn(3, 0.0, 5), Turn(7, 1.5, 0)]
    rollout = env.run(worker.submit(sample(0, 4, 9, turns)))
    assert ended(rollout) == [
        (0, 2, 0.0, 2.0),
        (0, 1, 6.0, 7.0),
        (0, 4, 7.0, 11.0),
        (0, 2, 12.5, 14.5),
    ]
    assert rollout.observation_tokens == 8
    assert worker.engine.totals["prefill_tokens"] == 4 + (1 + 3) + (1 + 5)


@pytest.mark.parametrize(
    ("asked_s", "begins_s"), [(5.0, 13.0), (12.0, 13.0), (13.0, 13.0), (20.0, 25.0)]
)
def test_a_response_that_moves_while_it_waits_keeps_its_tokens_and_waits_only_for_the_rest(
    asked_s, begins_s
):
    env = simpy.Environment()
    record = recorder("rollout-000", "rollout-001")
    old, new = (a_worker(env, i, record=record) for i in range(2))
    moving = sample(
        0, 4, 8, [Turn(3, 10.0, 7)] if asked_s != 20.0 else [Turn(3, 10.0, 7), Turn(5, 10.0, 2)]
    )

    def migrate():
        old.submit(moving)
        yield env.timeout(asked_s)
        partial = yield old.abort(moving)
        return (partial, (yield new.submit(moving, partial)))

    partial, rollout = env.run(env.process(migrate()))
    tokens = 5 if asked_s == 20.0 else 3  # then it waits for the second time, from 15 to 25
    assert (partial.tokens, partial.done) == (tokens, False)
    assert partial.observation_tokens == (9 if asked_s == 20.0 else 7)
    last = rollout.segments[-1]
    assert last == Segment(1, 0, 8 - tokens, begins_s, begins_s + 8 - tokens)
    assert new.engine.totals["prefill_tokens"] == 4 + partial.observation_tokens + tokens
    assert (old.engine.running, old.engine.waiting, old.engine.free_blocks) == (
        0,
        0,
        ROOMY.kv_blocks,
    )


@pytest.mark.parametrize(("mode", "end_s"), [("keep", 20.0), ("recompute", 21.0), ("drain", 21.0)])
def test_new_weights_in_a_pause_load_at_once_and_the_response_goes_on_under_them(mode, end_s):
    env = simpy.Environment()
    worker = a_worker(env, limits=NARROW)
    stay, loads = worker.submit(sample(0, 4, 8, PAUSED)), []
    at(env, 5.0, lambda: loads.append(worker.load_weights(1, mode)))
    rollout = env.run(stay)
    assert loads[0].value == WeightLoad(1, 5.0, 15.0)
    # The environment answers at 13, in the middle of the load. Without its cache 4 + 3 tokens take two passes.
    assert ended(rollout) == [(0, 3, 0.0, 3.0), (1, 5, 15.0, end_s)]


def test_a_drain_waits_for_what_runs_and_not_for_what_waits_for_its_environment():
    env = simpy.Environment()
    worker = a_worker(env)
    paused, running, loads = (
        worker.submit(sample(0, 4, 8, PAUSED)),
        worker.submit(sample(1, 4, 20)),
        [],
    )
    at(env, 5.5, lambda: loads.append(worker.load_weights(1, "drain")))
    env.run()
    assert loads[0].value == WeightLoad(1, 20.0, 30.0)
    assert ended(running.value) == [(0, 20, 0.0, 20.0)]
    assert ended(paused.value) == [
        (0, 3, 0.0, 3.0),
        (1, 5, 20.0, 35.0),
    ]  # back at 13, but nothing is admitted


def test_a_chunk_that_ends_with_a_turn_does_not_end_the_pause():
    env = simpy.Environment()
    worker = a_worker(env)
    whole = sample(0, 4, 8, [Turn(3, 10.0, 7)])
    cut = env.run(worker.submit(whole, max_tokens=3))
    assert (cut.tokens, cut.done, cut.observation_tokens, cut.environment_until_s) == (
        3,
        False,
        7,
        13.0,
    )
    assert env.now == 3.0
    rollout = env.run(worker.submit(whole, cut))
    assert ended(rollout) == [(0, 3, 0.0, 3.0), (0, 5, 13.0, 18.0)]
    assert rollout.observation_tokens == 7


def test_a_pool_keeps_the_cache_over_a_pause_but_not_what_was_said_in_it():
    env = simpy.Environment()
    record, costs = recorder("rollout-000", "rollout-001"), WorkerCosts(10.0, fetch_s_per_token=0.5)
    moving = sample(0, 4, 8, [Turn(3, 10.0, 7)])
    old, new = simulated_workers(env, 2, one_second_a_pass(), ROOMY, costs, RESPONSES, record)
    old.submit(moving)
    env.run(until=11.0)
    partial = env.run(old.abort(moving))
    rollout = env.run(new.submit(moving, partial, cached=True))
    # The pool has 4 + 2 tokens, at half a second each: from 11 to 14.
    assert ended(rollout) == [(0, 3, 0.0, 3.0), (0, 5, 14.0, 19.0)]
    assert new.engine.totals["prefill_tokens"] == 1 + 7


def test_who_is_watched_in_a_pause_is_told_when_it_has_the_tokens():
    env = simpy.Environment()
    worker = a_worker(env)
    what, told = sample(0, 4, 8, PAUSED), []
    worker.submit(what)
    for tokens in (3, 5):
        at(
            env,
            6.0,
            lambda tokens=tokens: on_fire(
                worker.when(what, tokens), lambda _: told.append(env.now)
            ),
        )
    env.run()
    assert told == [6.0, 15.0]


def test_a_worker_that_stops_in_a_pause_records_the_response_as_it_is():
    env, record = simpy.Environment(), recorder()
    worker = a_worker(env, record=record)
    worker.submit(sample(0, 4, 8, PAUSED))
    env.run(until=7.0)
    worker.stop(7.0)
    [row] = record.result(7.0, {}).samples.to_pylist()
    assert (row["generated_tokens"], row["status"]) == (3, "in_flight")


def test_a_dispatcher_moves_and_withdraws_what_waits_for_its_environment():
    env = simpy.Environment()
    record = recorder("rollout-000", "rollout-001")
    workers = [a_worker(env, i, record=record) for i in range(2)]
    dispatcher = Dispatcher(env, workers, Dispatch("test", least_requests), record)
    moved, withdrawn = sample(0, 4, 8, PAUSED), sample(1, 4, 8, PAUSED)
    ends = dispatcher.submit([moved, withdrawn], to=[0, 0])
    env.run(until=5.0)
    dispatcher.move(moved, 1)
    dispatcher.withdraw([withdrawn])
    env.run()
    assert ended(ends[0].value) == [(0, 3, 0.0, 3.0), (0, 5, 13.0, 18.0)]
    assert [s.worker for s in ends[0].value.segments] == [0, 1]
    assert (ends[1].value.tokens, ends[1].value.done) == (3, False)


# Memory and training.


def test_the_longest_sample_counts_what_the_environment_adds(tmp_path):
    columns = rows(60, turn_tokens=[[20, 40]], turn_observation_tokens=[[100]])
    write_trace(Trace.from_columns(columns, METADATA), tmp_path / "t.parquet")
    of = {"workload": {"trace": str(tmp_path / "t.parquet")}}
    assert prepare(scenario(**of, engine={"kv_cache_tokens": 176})).limits.kv_blocks == 11
    with pytest.raises(InputError, match="its longest sample has 165 tokens"):
        prepare(scenario(**of, engine={"kv_cache_tokens": 175}))


def test_training_computes_what_the_environment_said_too():
    env = simpy.Environment()
    rollout = env.run(a_worker(env).submit(sample(0, 4, 8, [Turn(3, 10.0, 7)])))
    assert _lengths([rollout]).tolist() == [4 + 7 + 8]


# Whole systems.

turn_lists = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0.0, 0.001, 0.05, 3.0]), st.integers(0, 12)),
    min_size=1,
    max_size=4,
)
groups = st.lists(turn_lists, min_size=1, max_size=3)
steps_of_groups = st.lists(st.lists(groups, min_size=1, max_size=3), min_size=1, max_size=2)


@st.composite
def agentic_traces(draw):
    """Traces of responses in turns; a sample has 4 + 4 · 12 + 3 · 12 tokens at most."""
    steps = draw(steps_of_groups)
    samples = [turns for groups in steps for group in groups for turns in group]
    lengths = [
        [[(4, sum(t for t, _, _ in turns)) for turns in group] for group in groups]
        for groups in steps
    ]
    plain = trace(lengths)
    columns = {name: plain.table.column(name) for name in plain.table.column_names}
    columns["turn_tokens"] = [[t for t, _, _ in turns] for turns in samples]
    columns["turn_environment_s"] = [[s for _, s, _ in turns[:-1]] for turns in samples]
    columns["turn_observation_tokens"] = [[o for _, _, o in turns[:-1]] for turns in samples]
    return Trace.from_columns(columns, plain.metadata)


@pytest.mark.parametrize("name", RECIPES)
@examples(15)
@given(agentic_traces(), st.integers(1, 3), st.one_of(st.just(ROOMY), tight))
def test_nothing_is_lost_in_responses_of_several_turns(name, agentic, workers, limits):
    watched = watch(prepared(on_gpus(name, {}, workers, steps=3), agentic, limits=limits))
    assert_nothing_is_lost(watched)
    allowed = watched.prepared.system.off_policyness
    assert (
        allowed is None
        or max(watched.result.steps.column("off_policyness_max").to_pylist()) <= allowed
    )
    for row in watched.result.samples.to_pylist():
        if row["finished_s"] is not None:
            waited_s = sum(turn.environment_s for turn in watched.responses[row["uid"]].turns)
            assert row["finished_s"] - row["started_s"] >= waited_s
