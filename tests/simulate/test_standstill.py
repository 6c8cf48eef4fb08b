"""A run whose work stands still ends in a line that says who waits for what, whether or not faults keep the clock going."""

import multiprocessing
from dataclasses import replace
from functools import partial

import pytest
import simpy

from simrl.errors import StoppedError
from simrl.pipelines.context import RunContext
from simrl.runtime.events import Background, idle
from simrl.simulate.run import simulate_prepared
from simrl_replay import replayer
from simrl_replay.clock import LONGEST_WAIT_S, WallClock
from simrl_replay.link import engine_link
from simrl_replay.replayer import ReplayConfig, ReplayEngines, replay
from tests.command_line import CommandLine
from tests.engine_double import EngineDouble
from tests.helpers import prepared, scenario, watch
from tests.runtime.test_faults import LOSS, faulty, parts, sample

RARELY = {"kind": "lost", "rate_per_hour": 1.0, "duration_s": 5.0}
ALWAYS_SOMEBODY = {"kind": "lost", "rate_per_hour": 60.0, "duration_s": 3600.0}
LATE_AND_SLOW = (
    {"kind": "slow", "rate_per_hour": 30.0, "duration_s": 900.0, "factor": 2.0},
    {"kind": "weight_sync_delayed", "rate_per_hour": 30.0, "duration_s": 900.0, "delay_s": 1.0},
)


def update_then_wait_for_weights(run: RunContext) -> simpy.events.ProcessGenerator:
    """Train a batch; then send samples to workers that have newer weights, which nobody lets them load."""
    groups = run.workload.next_batch()
    done = [group.over for group in run.dispatcher.submit_groups(groups)]
    rollouts = []
    for group in done:
        rollouts += yield group
    yield run.trainer.train((yield run.rewarder.score(rollouts)))
    [end, *_] = run.dispatcher.submit(
        [s for group in run.workload.next_batch() for s in group], min_version=1
    )
    yield end


def stalling(**changes):
    ready = prepared(scenario("verl_colocated", **changes))
    return replace(ready, system=replace(ready.system, pipeline=update_then_wait_for_weights))


STANDS = "verl_colocated stands still after 1 of 3 updates: no forward pass, load, tool call, reward or training is under way"


@pytest.mark.parametrize(
    "which",
    [
        (),
        (RARELY,),
        (ALWAYS_SOMEBODY,),
        LATE_AND_SLOW,
        (ALWAYS_SOMEBODY, *LATE_AND_SLOW),
        ({"kind": "lost", "worker": 1},),
    ],
    ids=[
        "no faults",
        "rare losses",
        "somebody is always lost",
        "slow and late",
        "all",
        "one for good",
    ],
)
def test_a_run_that_stands_still_ends_in_a_line_that_says_what_waits(which):
    """I7: a run that stands still ends."""
    with pytest.raises(StoppedError) as stopped:
        simulate_prepared(stalling(faults=list(which)))
    line = str(stopped.value)
    assert line.startswith(STANDS) and "; 0 samples are at workers, 8 wait for one" in line
    assert "\n" not in line
    assert ("lost: worker 1" in line) == (which == ({"kind": "lost", "worker": 1},))


def test_calls_that_wait_for_a_tool_slot_are_counted():
    turns = {"turns": 3, "environment_s": 0.5, "environment_sigma": 0.5, "observation_tokens": 5}
    synthetic = {**scenario().model_dump()["workload"]["synthetic"], **turns}
    with pytest.raises(StoppedError, match="8 wait for one, 0 tool calls wait for a slot"):
        simulate_prepared(stalling(agents={"tool_slots": 1}, workload={"synthetic": synthetic}))


@pytest.mark.parametrize(
    "faults", ["[]", "[{kind: lost, rate_per_hour: 60, duration_s: 3600}]"], ids=["none", "drawn"]
)
@pytest.mark.parametrize(
    "command",
    [
        ("run", "scenario.yaml", "--system", "verl_colocated"),
        ("compare", "scenario.yaml", "--jobs", "1"),
    ],
)
def test_the_command_line_ends_with_exit_code_1_and_that_line(
    simrl: CommandLine, monkeypatch, command, faults: str
):
    monkeypatch.setattr(
        "simrl.systems.on_policy.batchwise", lambda run, **_: update_then_wait_for_weights(run)
    )
    code, out, err = simrl(*command, f"faults={faults}", "steps=3")
    assert (code, out) == (1, "")
    assert STANDS in err.splitlines()[-1]
    assert "Traceback" not in err


# What is no standstill.


def test_a_run_waits_for_lost_workers_that_come_back_however_late():
    all_lost = [{"kind": "lost", "worker": i, "at_s": 0.5, "back_s": 1e5 + i} for i in range(4)]
    watched = watch(prepared(scenario("verl_colocated", faults=[*all_lost, RARELY])))
    assert len(watched.result.steps) == 3 and watched.result.metadata["end_s"] > 1e5


def test_a_return_that_helps_nobody_does_not_end_the_faults_while_another_is_awaited():
    """The sample waits for worker 0; worker 1 comes and goes meanwhile. Slowness is drawn all the time."""
    away = ({**LOSS, "back_s": 5000.0}, {"kind": "lost", "worker": 1, "at_s": 3.0, "back_s": 100.0})
    env, _, dispatcher = faulty(*away, LATE_AND_SLOW[0], on_loss="wait")
    [end] = dispatcher.submit([sample(0, 4, 8)], to=[0])
    assert sum(tokens for _, tokens, _, _ in parts(env.run(end))) == 8
    assert env.now > 5000.0
    env.run()  # and now nothing is under way: the faults end
    assert idle(env)


def test_timers_in_the_background_are_not_due():
    env = simpy.Environment()
    Background(env, 5.0)
    assert idle(env, Background) and not idle(env)
    env.timeout(9.0)
    assert not idle(env, Background)


# On the wall clock.


def test_a_clock_on_the_wall_ends_where_no_message_is_awaited_though_faults_are_due():
    env, (here, _there) = WallClock(), multiprocessing.Pipe()
    awaited = [True]
    env.listen(here, lambda message: None, lambda: None, lambda: awaited[0])
    Background(env, 3600.0)
    waited = env.timeout(2.5 * LONGEST_WAIT_S)
    waited.callbacks.append(lambda _: awaited.clear() or awaited.append(False))
    env.run()
    assert 2.5 * LONGEST_WAIT_S <= env.wall_s() < 60.0


@pytest.mark.parametrize("which", [(), (RARELY,)], ids=["no faults", "rare losses"])
def test_a_replay_that_stands_still_ends_in_the_line_of_the_simulation(
    tmp_path, monkeypatch, which
):
    monkeypatch.setattr(replayer, "vllm_version", lambda: "double")
    quick = {"reward_s": 0.01, "publish_s": 0.01, "load_s": 0.01, "switch_s": 0.01}
    ready = stalling(
        faults=list(which), training=quick, cluster={"gpu": "h100", "gpus": 1, "tp": 1}
    )
    config = ReplayConfig(tmp_path, device="cpu")
    settings = replayer.engine_settings(ready, config)
    start = partial(EngineDouble, step_s=0.002)
    with ReplayEngines(
        [partial(engine_link, "worker 0", settings, tmp_path / "0.log", start=start)]
    ) as fleet:
        measured = replay(ready, fleet, config)
    assert str(measured.stopped).startswith(STANDS)
    assert measured.result.metadata["replay"]["complete"] is False
