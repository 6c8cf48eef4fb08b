"""Faults: workers that are slow, lost or late. Nothing is lost with them, and every system sees the same ones."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import simpy
import yaml
from hypothesis import given, strategies as st
from pydantic import TypeAdapter, ValidationError

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.placement import least_requests
from simrl.dispatch.rules import Dispatch
from simrl.errors import InputError
from simrl.profile.profile import ProfileMetadata, TableProfile
from simrl.runtime.events import gather, on_fire
from simrl.runtime.faults import _drawn, check_faults, inject
from simrl.runtime.rollout import Segment, WeightLoad
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.faults import Fault
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.systems.recipes import RECIPES, make_system
from simrl.trace.trace import Turn
from simrl.validation import explain
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    ROOMY,
    a_worker,
    examples,
    lanes,
    on_gpus,
    one_second_a_pass,
    prepared,
    recorder,
    rows,
    sample,
    scenario,
    trace,
    watch,
)
from tests.pipelines.test_pipelines import EQUAL, tight, traces

FAULTS = TypeAdapter(tuple[Fault, ...])
NARROW = ROOMY._replace(max_num_batched_tokens=4)


def faults(*which):
    return FAULTS.validate_python(which)


# What a scenario may ask for.


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            {"kind": "slow", "worker": 0, "factor": 0.5},
            "faults.0.factor is 0.5: give 1 or more",
        ),
        ({"kind": "slow", "worker": 0}, "key faults.0.factor is missing"),
        (
            {"kind": "slow", "factor": 2},
            "faults.0: give either a worker, or rate_per_hour and duration_s for all of them",
        ),
        (
            {"kind": "lost", "worker": 0, "rate_per_hour": 1, "duration_s": 1},
            "faults.0: give either a worker",
        ),
        (
            {"kind": "lost", "rate_per_hour": 1},
            "faults.0: rate_per_hour and duration_s come together",
        ),
        (
            {"kind": "lost", "worker": 0, "duration_s": 5},
            "faults.0: rate_per_hour and duration_s come together",
        ),
        (
            {"kind": "lost", "rate_per_hour": 1, "duration_s": 9, "at_s": 5},
            "faults.0: a fault with rate_per_hour begins at drawn",
        ),
        (
            {"kind": "lost", "rate_per_hour": 61, "duration_s": 9},
            "faults.0.rate_per_hour is 61: give 60 or less",
        ),
        (
            {"kind": "lost", "worker": 0, "at_s": 5, "back_s": 5},
            "faults.0: it ends at 5 s and begins at 5 s; let it end later",
        ),
        ({"kind": "lost", "worker": -1}, "faults.0.worker is -1"),
        ({"kind": "lost", "worker": True}, "faults.0.worker is True: this field is no switch"),
        (
            {"kind": "slow", "worker": 0, "factor": True},
            "faults.0.factor is True: this field is no switch",
        ),
        (
            {"kind": "lost", "worker": 0, "until_s": 9},
            "unknown key faults.0.until_s; faults.0 has worker",
        ),
        (
            {"kind": "dead", "worker": 0},
            "faults.0: choose ",
        ),
        ({"worker": 0}, "faults.0: give it a kind"),
    ],
    ids=str,
)
def test_a_fault_that_cannot_be_is_refused_with_its_place_in_the_list(fault, line):
    with pytest.raises(ValidationError) as refused:
        scenario(faults=[fault])
    _, message = explain(refused.value, Scenario, "scenario")
    assert message.startswith(line)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("which", "line"),
    [
        (
            [{"kind": "slow", "worker": 4, "factor": 2}],
            "faults.0.worker is 4: the system has 4 rollout workers, 0 to 3; name one",
        ),
        (
            [{"kind": "lost", "worker": i} for i in range(4)],
            "faults: all 4 rollout workers are lost for good; give one of them",
        ),
    ],
)
def test_workers_that_are_not_there_and_losses_of_all_are_refused(which, line):
    with pytest.raises(InputError) as refused:
        prepare(scenario(faults=which))
    assert str(refused.value).startswith(line)


def test_a_split_that_adapts_and_losses_do_not_go_together():
    with pytest.raises(
        InputError, match=r"faults.0 is lost: with adapt_split_every .* leave one of the two out"
    ):
        prepare(
            scenario(
                {"name": "areal", "adapt_split_every": 2},
                faults=[{"kind": "lost", "worker": 0, "back_s": 5}],
            )
        )
    slow = [{"kind": "slow", "worker": 0, "factor": 2.0}]
    assert simulate(scenario({"name": "areal", "adapt_split_every": 1}, faults=slow)).metadata[
        "faults"
    ]


def test_samples_that_wait_for_their_worker_need_one_that_comes_back():
    gone = faults({"kind": "slow", "worker": 0, "factor": 2.0}, {"kind": "lost", "worker": 1})
    check_faults(gone, 3, waits_for_lost=False, elastic=None)
    with pytest.raises(
        InputError, match=r"faults.1: worker 1 is lost for good, .* give it a back_s"
    ):
        check_faults(gone, 3, waits_for_lost=True, elastic=None)


def test_all_workers_may_be_lost_for_a_time():
    lost = [{"kind": "lost", "worker": i, "at_s": 0.5, "back_s": 2.0} for i in range(4)]
    assert simulate(scenario("split", faults=lost[:2])).metadata["end_s"] > 2.0
    assert prepare(scenario(faults=lost)).scenario.faults[3].back_s == 2.0


def test_a_scenario_file_may_have_faults_and_vary_them(tmp_path):
    file = tmp_path / "s.yaml"
    plain = scenario().model_dump(exclude={"system", "variant", "faults"})
    plain["faults"] = [
        {"kind": "slow", "worker": 1, "factor": 2.0},
        {"kind": "lost", "worker": 0, "at_s": 3, "back_s": None},
    ]
    plain["vary"] = [{"faults.0.factor": 1.5}, {"faults.0.factor": 3}]
    file.write_text(yaml.safe_dump({**plain, "systems": ["split"]}))
    found = load_scenarios(file)
    assert [s.faults[0].factor for s in found] == [1.5, 3.0]
    assert found[0].faults[1].back_s is None
    with pytest.raises(
        InputError, match=r"s.yaml, override 'faults.0.factor=0.1': faults.0.factor is 0.1"
    ):
        load_scenarios(file, ["faults.0.factor=0.1"])


# What is drawn.


def test_a_drawn_fault_belongs_to_the_seed_its_place_and_the_worker():
    [fault] = faults({"kind": "lost", "rate_per_hour": 30, "duration_s": 20})

    def times(seed, index, worker):
        drawn = _drawn(fault, seed, index, worker)
        return [next(drawn) for _ in range(5)]

    assert times(1, 0, 2) == times(1, 0, 2)
    assert (
        len({tuple(times(*key)) for key in [(1, 0, 2), (2, 0, 2), (1, 1, 2), (1, 0, 3), (1, 2, 0)]})
        == 5
    )


def test_drawn_faults_come_as_often_as_asked_for_and_last_as_long():
    [fault] = faults({"kind": "slow", "factor": 2, "rate_per_hour": 6, "duration_s": 100})
    drawn = _drawn(fault, 1, 0, 0)
    times = np.array([next(drawn) for _ in range(4000)])
    healthy_s = times[:, 0] - np.r_[0, times[:-1, 1]]
    assert np.all(healthy_s > 0)
    assert healthy_s.mean() == pytest.approx(600, rel=4 / np.sqrt(4000))
    assert np.allclose(times[:, 1] - times[:, 0], 100)


DRAWN = [
    {"kind": "lost", "rate_per_hour": 60, "duration_s": 0.5},
    {"kind": "slow", "factor": 2, "rate_per_hour": 60, "duration_s": 2},
]


def test_two_systems_see_the_same_faults():
    """I22: faults belong to their seed."""
    told = [
        simulate(scenario(name, faults=DRAWN, steps=6)).metadata
        for name in ("verl_colocated", "distflow")
    ]
    both_s = min(metadata["end_s"] for metadata in told)
    first, second = ([f for f in m["faults"] if f["at_s"] < both_s] for m in told)
    assert first == second
    assert {f["kind"] for f in first} == {"lost", "slow"}


def test_the_result_lists_the_faults_that_happened_and_no_others():
    stated = [
        {"kind": "slow", "worker": 1, "factor": 2.0, "at_s": 0.5},
        {"kind": "lost", "worker": 2, "at_s": 1e6},
    ]
    metadata = simulate(scenario(faults=stated)).metadata
    assert metadata["faults"] == [
        {"kind": "slow", "worker": 1, "at_s": 0.5, "until_s": None, "factor": 2.0, "fault": 0}
    ]
    assert len(metadata["scenario"]["faults"]) == 2
    assert simulate(scenario()).metadata["faults"] == []


# What a worker does: every pass takes a second, every load ten.


def at(env, time_s, call):
    on_fire(env.timeout(time_s), lambda _: call())


def test_a_lost_worker_ends_its_stays_with_their_tokens_after_the_pass_that_runs():
    env = simpy.Environment()
    worker = a_worker(env, limits=ROOMY._replace(max_num_seqs=2))
    stays = [worker.submit(sample(uid, response_tokens=20)) for uid in range(3)]
    at(env, 3.5, worker.fail)
    ends = env.run(gather(env, stays))
    assert env.now == 4.0
    assert [(rollout.tokens, rollout.done) for rollout in ends] == [
        (4, False),
        (4, False),
        (0, False),
    ]
    assert (worker.engine.running, worker.engine.waiting, worker.engine.free_blocks) == (
        0,
        0,
        ROOMY.kv_blocks,
    )


def test_a_lost_worker_holds_up_nobody_who_waits_for_all():
    """I14: the loads of a lost worker count as done."""
    env = simpy.Environment()
    worker = a_worker(env)
    worker.submit(sample(0, response_tokens=50))
    loads = []
    at(env, 1.5, lambda: loads.append(worker.load_weights(1, "drain")))
    at(env, 3.5, worker.fail)
    at(env, 7.0, lambda: loads.append(worker.load_weights(2)))
    env.run()
    assert [load.value for load in loads] == [WeightLoad(1, 4.0, 4.0), WeightLoad(2, 7.0, 7.0)]


def test_a_worker_that_is_back_loads_the_weights_it_was_last_asked_for_before_it_works():
    env, record = simpy.Environment(), recorder()
    worker = a_worker(env, record=record)
    back, stays = [], []
    at(env, 2.0, worker.fail)
    at(env, 5.0, lambda: worker.load_weights(3))
    at(env, 8.0, lambda: back.append(worker.restore()))
    at(env, 9.0, lambda: stays.append(worker.submit(sample(0, response_tokens=2))))
    env.run()
    assert back[0].value == WeightLoad(3, 8.0, 18.0)
    assert stays[0].value.segments == (Segment(0, 3, 2, 18.0, 20.0),)
    kinds = [(s.kind, s.started_s, s.ended_s) for s in record.spans]
    assert kinds == [("lost", 2.0, 18.0), ("rollout", 18.0, 20.0)]  # until it has its weights


def test_weights_are_gone_with_a_worker_also_if_nobody_asked_for_others():
    env = simpy.Environment()
    worker = a_worker(env)
    worker.fail()
    env.run(until=1.0)
    assert env.run(worker.restore()) == WeightLoad(0, 1.0, 11.0)


def test_what_is_asked_of_a_lost_worker_comes_back_at_once():
    env = simpy.Environment()
    worker = a_worker(env)
    worker.fail()
    worker.fail()  # no more lost than before
    env.run(until=3.0)
    assert env.run(worker.submit(sample(0))).tokens == 0
    assert env.run(worker.abort(sample(0))) is None
    assert env.now == 3.0
    assert env.run(worker.restore()).version == 0
    assert env.run(worker.restore()) is None  # it was not lost


def test_a_worker_that_is_lost_while_it_loads_is_so_when_the_load_is_over():
    env, record = simpy.Environment(), recorder()
    worker = a_worker(env, record=record)
    worker.load_weights(1)
    at(env, 4.0, worker.fail)
    at(env, 6.0, worker.restore)
    env.run()
    kinds = [(s.kind, s.started_s, s.ended_s) for s in record.spans if s.ended_s > s.started_s]
    assert kinds == [("load_weights", 0.0, 10.0), ("lost", 10.0, 20.0)]


def test_a_response_that_waits_for_its_environment_is_lost_with_its_worker_and_waits_on_elsewhere():
    env = simpy.Environment()
    record = recorder("rollout-000", "rollout-001")
    old, new = (a_worker(env, i, record=record) for i in range(2))
    moving = sample(0, 4, 8, [Turn(3, 10.0, 7)])
    stay = old.submit(moving)
    at(env, 5.0, old.fail)
    partial = env.run(stay)
    assert (env.now, partial.tokens) == (5.0, 3)
    assert env.run(new.submit(moving, partial)).segments[-1] == Segment(1, 0, 5, 13.0, 18.0)


# What becomes of the samples.


def faulty(*which, workers=2, on_loss="elsewhere", limits=ROOMY):
    env, record = simpy.Environment(), recorder(*(f"rollout-{i:03d}" for i in range(workers)))
    those = [a_worker(env, i, limits=limits, record=record) for i in range(workers)]
    dispatcher = Dispatcher(env, those, Dispatch("test", least_requests, on_loss=on_loss), record)
    inject(env, faults(*which), 0, [(those, dispatcher)])
    return env, those, dispatcher


def parts(rollout):
    return [(s.worker, s.tokens, s.started_s, s.ended_s) for s in rollout.segments]


LOSS = {"kind": "lost", "worker": 0, "at_s": 2.5, "back_s": 20.0}


def test_a_sample_of_a_lost_worker_goes_on_elsewhere_its_tokens_prefilled_anew():
    env, workers, dispatcher = faulty(LOSS, limits=NARROW)
    [end] = dispatcher.submit([sample(0, 4, 8)], to=[0])
    rollout = env.run(end)
    # 4 + 3 tokens take two passes, of which the second gives a token.
    assert parts(rollout) == [(0, 3, 0.0, 3.0), (1, 5, 3.0, 9.0)]
    assert workers[1].engine.totals["prefill_tokens"] == 7


def test_a_sample_that_waits_for_its_worker_goes_on_when_that_is_back_with_its_weights():
    env, _, dispatcher = faulty(LOSS, on_loss="wait")
    [end] = dispatcher.submit([sample(0, 4, 8)], to=[0])
    assert parts(env.run(end)) == [(0, 3, 0.0, 3.0), (0, 5, 30.0, 35.0)]


def test_nothing_is_given_to_a_worker_that_is_lost_or_has_no_weights_yet():
    env, _, dispatcher = faulty(LOSS)
    ends = []
    for time_s in (10.0, 25.0, 40.0):
        at(
            env,
            time_s,
            lambda: ends.append(
                dispatcher.submit([sample(len(ends), 4, 3), sample(9 + len(ends), 4, 3)])
            ),
        )
    env.run()
    assert [[end.value.segments[0].worker for end in pair] for pair in ends] == [
        [1, 1],
        [1, 1],
        [0, 1],
    ]


def test_when_all_are_lost_everything_waits_for_the_first_that_is_back():
    env, _, dispatcher = faulty(LOSS, {**LOSS, "worker": 1, "back_s": 50.0})
    ends = dispatcher.submit([sample(0, 4, 8), sample(1, 4, 6)])
    assert [parts(end)[-1] for end in env.run(gather(env, ends))] == [
        (0, 5, 30.0, 35.0),
        (0, 3, 30.0, 33.0),
    ]


def test_overlapping_losses_are_one_and_a_loss_during_the_return_keeps_the_worker_away():
    env, workers, dispatcher = faulty(
        LOSS, {**LOSS, "at_s": 10.0, "back_s": 40.0}, {**LOSS, "at_s": 45.0, "back_s": 60.0}
    )
    env.run(until=49.0)
    assert dispatcher.active == [1]
    env.run(until=51.0)  # its weights are there, and it is lost again
    assert dispatcher.active == [1]
    env.run()
    assert dispatcher.active == [0, 1]
    lost = [(s.started_s, s.ended_s) for s in workers[0]._recorder.spans if s.kind == "lost"]
    assert lost == [(2.5, 50.0), (50.0, 70.0)]


def test_factors_multiply_and_delays_add_up_while_they_last():
    slow = {"kind": "slow", "worker": 0, "factor": 2.0, "at_s": 4.0, "until_s": 20.0}
    late = {"kind": "weight_sync_delayed", "worker": 0, "delay_s": 5.0}
    env, workers, dispatcher = faulty(
        slow,
        {**slow, "factor": 3.0, "at_s": 8.0, "until_s": 14.0},
        late,
        {**late, "delay_s": 2.0, "until_s": 50.0},
        workers=1,
    )
    [end] = dispatcher.submit([sample(0, 4, 20)])
    # Passes end at 1 … 5 (the one that ran at 4), 7, 9, 15, then every 2 up to 21, then every second.
    assert env.run(end).finished_s == 21.0 + (20 - (5 + 2 + 1 + 3))
    env.run(until=40.0)
    assert env.run(workers[0].load_weights(1)) == WeightLoad(1, 40.0, 57.0)
    assert env.run(workers[0].load_weights(2)) == WeightLoad(2, 57.0, 72.0)


# Whole systems: a pass takes a second, a load ten, an update a hundred.

METADATA = ProfileMetadata(model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test")
ONE_SECOND = TableProfile(one_second_a_pass(), METADATA)


def with_faults(name, which, trace, workers=2, steps=3, limits=ROOMY, seed=0, **parameters):
    """A run to watch, with faults at times of the order of its own."""
    training = {"mfu": 1.0, "publish_s": 100.0, "reward_s": 5.0, "switch_s": 20.0}
    config = on_gpus(name, parameters, workers, steps=steps, training=training)
    ready = prepared(config, trace, limits=limits, costs=WorkerCosts(10.0), profile=ONE_SECOND)
    return replace(
        ready, scenario=ready.scenario.model_copy(update={"faults": which, "seed": seed})
    )


def test_a_synchronous_step_takes_as_long_as_the_worker_that_is_left_needs():
    lost = faults({"kind": "lost", "worker": 1, "at_s": 9.5})
    uneven = trace([[[(4, 30)], [(4, 30)]]])
    watched = watch(with_faults("split", lost, uneven, steps=2))
    # Asked at 10 to take the other sample, the worker does so at 11. No token is lost, and a pass gives one to each.
    assert [u["finished_s"] for u in rows(watched.result.steps)] == [
        pytest.approx(136, abs=0.1),
        pytest.approx(281, abs=0.1),
    ]
    spans = [(s["kind"], s["started_s"]) for s in lanes(watched.result)["rollout-001"]]
    assert spans == [("rollout", 0.0), ("lost", 10.0)]
    assert watched.result.metadata["faults"][0]["until_s"] is None


def test_a_slow_worker_holds_up_the_step():
    slow = faults({"kind": "slow", "worker": 0, "factor": 2.0})
    watched = watch(with_faults("split", slow, EQUAL, steps=1))
    assert rows(watched.result.steps)[0]["finished_s"] == pytest.approx(60 + 105, abs=0.1)


def test_a_late_worker_holds_up_the_next_step():
    late = faults({"kind": "weight_sync_delayed", "worker": 1, "delay_s": 30.0})
    watched = watch(with_faults("split", late, EQUAL, steps=2))
    assert rows(watched.result.steps)[1]["finished_s"] == pytest.approx(135 + 40 + 135, abs=0.1)


def test_a_colocated_worker_that_is_lost_takes_its_gpus_from_rollout_but_not_from_training():
    lost = faults({"kind": "lost", "worker": 1, "at_s": 9.5})
    watched = watch(with_faults("verl_colocated", lost, EQUAL, steps=2))
    kinds = [s["kind"] for s in lanes(watched.result)["rollout-001"]]
    assert kinds[:6] == ["rollout", "lost", "transfer", "switch", "log_prob", "train"]
    assert "lost" in kinds[6:]
    assert "rollout" not in kinds[1:]
    assert_nothing_is_lost(watched)


instants = st.integers(0, 500).map(lambda n: n / 2)  # boundaries of passes, and between them
lasting = st.sampled_from([0.5, 3.0, 12.0, 60.0, 300.0])


@st.composite
def any_faults(draw, workers):
    """Up to four faults, all kinds; worker 0 is never lost."""
    which = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slow", "lost", "lost", "weight_sync_delayed"]))
        worker = draw(st.integers(1 if kind == "lost" and workers > 1 else 0, workers - 1))
        at_s = draw(instants)
        until_s = draw(st.one_of(st.none(), lasting.map(lambda s, at_s=at_s: at_s + s)))
        if kind == "lost":
            if workers > 1:
                which.append({"kind": kind, "worker": worker, "at_s": at_s, "back_s": until_s})
            continue
        size = (
            {"factor": draw(st.sampled_from([1.5, 4.0]))}
            if kind == "slow"
            else {"delay_s": draw(lasting)}
        )
        which.append({"kind": kind, "worker": worker, "at_s": at_s, "until_s": until_s, **size})
    return faults(*which)


counted_faults = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), any_faults(n)))


LOSABLE = [name for name in RECIPES if make_system(name, {}).elastic is None]


@pytest.mark.parametrize("name", LOSABLE)
@examples(15)
@given(counted_faults, traces, st.one_of(st.just(ROOMY), tight))
def test_no_sample_is_lost_or_trained_twice_and_staleness_stays_in_its_bound(
    name, counted, trace, limits
):
    """I11: faults lose no sample and break no bound."""
    workers, which = counted
    watched = watch(with_faults(name, which, trace, workers, limits=limits))
    assert_nothing_is_lost(watched)
    allowed = watched.prepared.system.off_policyness
    assert (
        allowed is None
        or max(u["off_policyness_max"] for u in rows(watched.result.steps)) <= allowed
    )
    end_s = watched.result.metadata["end_s"]
    for fault in watched.result.metadata["faults"]:
        assert fault["at_s"] <= end_s
    lost = [
        (span["lane"], span["started_s"], span["ended_s"])
        for span in rows(watched.result.spans)
        if span["kind"] == "lost" and not watched.prepared.colocated
    ]
    for segment in rows(watched.result.segments):
        for lane, started_s, ended_s in lost:
            if lane == f"rollout-{segment['worker']:03d}":
                assert segment["ended_s"] <= started_s or ended_s <= segment["started_s"]


# A worker on whose tail everything depends, lost at some instant of every kind of phase.

TAIL = trace([[[(4, 5)]] * 9 + [[(4, 60)]]] * 2)


@pytest.mark.parametrize("name", LOSABLE)
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("at_s", [3.0, 40.0, 62.0])
def test_a_loss_for_good_leaves_the_rest_to_the_other_worker(name, worker, at_s):
    assert_nothing_is_lost(
        watch(
            with_faults(
                name, faults({"kind": "lost", "worker": worker, "at_s": at_s}), TAIL, steps=2
            )
        )
    )


@pytest.mark.parametrize("name", LOSABLE)
@examples(8)
@given(traces, st.integers(0, 5))
def test_drawn_faults_lose_no_sample_either_also_where_all_workers_are_lost_at_times(
    name, trace, seed
):
    """I11: drawn faults lose no sample, also where all workers are lost at times."""
    drawn = faults(
        {"kind": "lost", "rate_per_hour": 60, "duration_s": 40},
        {"kind": "slow", "factor": 3, "rate_per_hour": 30, "duration_s": 30},
        {"kind": "weight_sync_delayed", "delay_s": 7, "rate_per_hour": 60, "duration_s": 50},
    )
    assert_nothing_is_lost(watch(with_faults(name, drawn, trace, 2, seed=seed)))


def test_another_process_sees_the_same_faults_and_gives_the_same_bytes(tmp_path):
    chosen = scenario(
        {"name": "areal", "eta": 2},
        seed=3,
        faults=[*DRAWN, {"kind": "lost", "worker": 1, "at_s": 0.7, "back_s": 1.9}],
    )
    program = (
        "import sys, pathlib\n"
        "from simrl.scenario.model import Scenario\n"
        "from simrl.simulate.run import simulate\n"
        "simulate(Scenario.model_validate_json(sys.argv[1])).write(pathlib.Path(sys.argv[2]))\n"
    )
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    simulate(chosen).write(tmp_path / "here")
    subprocess.run(
        [sys.executable, "-c", program, chosen.model_dump_json(), str(tmp_path / "there")],
        check=True,
    )
    here, there = (
        {f.name: f.read_bytes() for f in (tmp_path / folder).iterdir()}
        for folder in ("here", "there")
    )
    assert here == there
