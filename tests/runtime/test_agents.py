"""Trajectories of agents between turns: KV cache while a tool runs, slots, caps, deadlines. A pass takes a second."""

import math
from dataclasses import replace

import pytest
import simpy
from rich.console import Console

from simrl.analysis.explanation import explain_result
from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.placement import least_requests
from simrl.dispatch.rules import Dispatch
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.runtime.agents import AgentRules, Agents, agent_rules
from simrl.runtime.events import on_fire
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_trainer import SimulatedRewarder
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.agents import AgentsConfig
from simrl.scenario.load import load_scenarios
from simrl.show.tables.explain import print_explanation
from simrl.simulate.prepare import prepare
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import Turn
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    RESPONSES,
    ROOMY,
    a_worker,
    one_second_a_pass,
    prepared,
    recorder,
    rows,
    sample,
    scenario,
    watch,
)

FINE = ROOMY._replace(block_size=1)
NARROW = FINE._replace(max_num_batched_tokens=4)
PAUSED = (Turn(3, 10.0, 0),)  # after three tokens, ten seconds: from 3 to 13
LONG = (Turn(3, 20.0, 0),)  # from 3 to 23
OFFLOAD = AgentRules("offload", host_blocks=100, block_bytes=1.0, block_s=1.0)


def workers_with(rules, env, limits=FINE, n=1):
    agents, record = Agents(env, rules), recorder(*(f"rollout-{i:03d}" for i in range(n)))
    costs, limits = WorkerCosts(10.0), rules.limits(limits)
    return simulated_workers(
        env, n, one_second_a_pass(), limits, costs, RESPONSES, record, agents=agents
    ), agents


def worker_with(rules, env, limits=FINE):
    (worker,), agents = workers_with(rules, env, limits)
    return worker, agents


def at(env, time_s, call):
    on_fire(env.timeout(time_s), lambda _: call())


def ended(rollout):
    return [(s.tokens, s.started_s, s.ended_s) for s in rollout.segments]


def free_blocks_at(env, worker, *times_s):
    found = []
    for time_s in times_s:
        at(env, time_s, lambda: found.append(worker.engine.free_blocks))
    return found


# The KV cache while a tool runs.


def test_a_dropped_cache_is_free_at_once_and_computed_again():
    env = simpy.Environment()
    worker, _ = worker_with(AgentRules("drop"), env, NARROW)
    turn = worker.submit(sample(0, 4, 8, PAUSED))
    free = free_blocks_at(env, worker, 3.5)
    # Its 4 + 3 tokens take two passes, of which the second gives a token.
    assert ended(env.run(turn)) == [(3, 0.0, 3.0), (5, 13.0, 19.0)]
    assert free == [1000]
    assert worker.engine.totals["prefill_tokens"] == 4 + 7


def test_the_places_of_a_dropped_cache_are_free_a_pass_later_under_async_scheduling():
    env = simpy.Environment()
    worker, _ = worker_with(AgentRules("drop"), env, FINE._replace(async_scheduling=True))
    worker.submit(sample(0, 4, 8, PAUSED))
    other = sample(1, 4, 8)
    worker.submit(other)
    for asks_s in (
        2.2,
        3.2,
    ):  # where a worker is asked something, its engine has ended the pass under way
        at(env, asks_s, lambda: worker.progress([other]))
    free = free_blocks_at(env, worker, 2.9, 3.9)
    env.run(until=5.0)
    assert free == [
        1000 - (4 + 2) - (4 + 2),
        1000 - (4 + 3),
    ]  # after the third pass, and after the fourth


def test_an_offloaded_cache_is_free_when_its_copy_is_over_and_back_before_the_turn_goes_on():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD, env)
    turn = worker.submit(sample(0, 4, 8, PAUSED))
    free = free_blocks_at(env, worker, 3.5, 8.5, 9.5)
    # 4 + 2 tokens go out from 3 to 9, and come back from 13 to 19.
    assert ended(env.run(turn)) == [(3, 0.0, 3.0), (5, 19.0, 24.0)]
    assert free == [994, 994, 1000]
    assert worker.engine.totals["prefill_tokens"] == 4
    assert (
        agents.figures.offloaded_bytes,
        agents.figures.waiting_for_kv_s,
        agents.figures.in_tools_s,
    ) == (6, 6, 10)


def test_only_full_blocks_are_offloaded():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD, env, FINE._replace(block_size=4))
    rollout = env.run(worker.submit(sample(0, 4, 8, PAUSED)))
    assert ended(rollout) == [(3, 0.0, 3.0), (5, 14.0, 19.0)]
    assert worker.engine.totals["prefill_tokens"] == 4 + 3
    assert agents.figures.offloaded_bytes == 1


def test_copies_queue_for_the_link_in_each_direction():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD, env)
    turns = [worker.submit(sample(i, 4, 8, LONG)) for i in range(2)]
    free = free_blocks_at(env, worker, 8.5, 9.5, 14.5, 15.5)
    env.run()
    # Out from 3 to 9 and from 9 to 15; back from 23 to 29 and from 29 to 35.
    assert free == [988, 994, 994, 1000]
    assert [ended(turn.value)[1] for turn in turns] == [(5, 29.0, 34.0), (5, 35.0, 40.0)]
    assert agents.figures.waiting_for_kv_s == 6 + 12


def test_a_tool_that_is_faster_than_the_copy_out_goes_on_with_the_cache_where_it_is():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD._replace(block_s=3.0), env)
    turn = worker.submit(sample(0, 4, 8, [*PAUSED, Turn(5, 40.0, 0)]))
    # Out from 3 to 21, but the tool answers at 13; then only 2 more blocks go out, from 21 to 27, and 8 come back from 55 on.
    assert ended(env.run(turn)) == [(3, 0.0, 3.0), (2, 13.0, 15.0), (3, 79.0, 82.0)]
    assert agents.figures.offloaded_bytes == 8
    assert worker.engine.free_blocks == 1000


def test_a_host_without_room_evicts_the_end_of_what_was_used_least_recently():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD._replace(host_blocks=10, block_s=0.1), env)
    old = worker.submit(sample(0, 4, 8, LONG))
    new = worker.submit(sample(1, 4, 8, [Turn(5, 30.0, 0)]))
    env.run()
    # 6 blocks at 3, and 8 at 5: 2 of the first trajectory's stay, and its 4 others are computed again.
    assert worker.engine.totals["prefill_tokens"] == 4 + 4 + 5
    assert agents.figures.offloaded_bytes == 6 + 8
    assert (ended(old.value)[1][1], ended(new.value)[1][1]) == pytest.approx((23.2, 35.8))


def test_what_is_being_copied_is_not_evicted_so_that_a_newcomer_may_find_no_room():
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD._replace(host_blocks=10), env)
    turns = [worker.submit(sample(i, 4, 8, LONG)) for i in range(2)]
    env.run()
    assert agents.figures.not_offloaded == 1
    assert worker.engine.totals["prefill_tokens"] == 4 + 4 + 7
    assert [ended(turn.value)[1] for turn in turns] == [(5, 29.0, 34.0), (5, 23.0, 28.0)]


@pytest.mark.parametrize(("mode", "prefilled"), [("recompute", 4 + 7), ("keep", 4)])
def test_new_weights_make_what_is_in_host_memory_worthless_unless_caches_are_kept(mode, prefilled):
    env = simpy.Environment()
    worker, _ = worker_with(OFFLOAD._replace(block_s=0.1), env)
    turn = worker.submit(sample(0, 4, 8, PAUSED))
    at(env, 5.0, lambda: worker.load_weights(1, mode))
    env.run(turn)
    assert worker.engine.totals["prefill_tokens"] == prefilled
    assert worker.engine.free_blocks == 1000


def test_new_weights_while_a_cache_is_copied_out_free_its_blocks():
    env = simpy.Environment()
    worker, _ = worker_with(OFFLOAD, env)
    turn = worker.submit(sample(0, 4, 8, PAUSED))
    at(env, 5.0, lambda: worker.load_weights(1))
    free = free_blocks_at(env, worker, 5.5)
    assert ended(env.run(turn))[1] == (5, 15.0, 20.0)
    assert free == [1000]


def test_who_needs_blocks_that_are_being_copied_out_waits_for_them():
    env = simpy.Environment()
    worker, _ = worker_with(OFFLOAD, env, FINE._replace(kv_blocks=12))
    first = worker.submit(sample(0, 4, 8, PAUSED))
    second = worker.submit(sample(1, 8, 3))
    # 8 blocks are free from 9 on; the first comes back at 19.
    assert env.run(second).segments[-1].started_s + 3 <= env.now
    assert env.now == pytest.approx(13.0, abs=1.0)
    assert ended(env.run(first))[1][2] == pytest.approx(24.0, abs=1.0)


def test_an_abort_while_a_cache_is_copied_out_loses_no_block():
    env = simpy.Environment()
    worker, _ = worker_with(OFFLOAD, env)
    what = sample(0, 4, 8, PAUSED)
    worker.submit(what)
    at(env, 5.0, lambda: worker.abort(what))
    env.run()
    assert worker.engine.free_blocks == 1000


def test_looking_on_changes_nothing():
    def run(asked_s):
        env = simpy.Environment()
        rules = OFFLOAD._replace(host_blocks=12, block_s=0.7, tool_slots=1, deadline_s=60.0)
        worker, agents = worker_with(rules, env, NARROW)
        samples = [sample(i, 4, 9, [Turn(2 + i, 4.0, 3), Turn(7, 3.0, 1)]) for i in range(4)]
        done = [worker.submit(each) for each in samples]
        for time_s in asked_s:
            at(env, time_s, lambda: worker.progress(samples[3:4]))
        env.run(until=200.0)
        return [event.value for event in done], agents.figures

    assert run([]) == run([0.3 * i for i in range(400)])


# Tool slots.


def test_tool_calls_wait_for_a_slot_first_come_first_served():
    env = simpy.Environment()
    worker, agents = worker_with(AgentRules(tool_slots=1), env)
    turns = [worker.submit(sample(i, 4, 8, PAUSED)) for i in range(3)]
    env.run()
    assert [ended(turn.value)[1] for turn in turns] == [
        (5, 13.0, 18.0),
        (5, 23.0, 28.0),
        (5, 33.0, 38.0),
    ]
    assert (agents.figures.in_tools_s, agents.figures.waiting_for_tool_slots_s) == (30, 30)


def test_slots_are_shared_by_all_workers():
    env = simpy.Environment()
    workers, _ = workers_with(AgentRules(tool_slots=1), env, n=2)
    turns = [worker.submit(sample(i, 4, 8, PAUSED)) for i, worker in enumerate(workers)]
    env.run()
    assert [ended(turn.value)[1] for turn in turns] == [(5, 13.0, 18.0), (5, 23.0, 28.0)]


def test_a_trajectory_that_moves_keeps_its_tool_call_and_its_place_in_the_queue():
    env = simpy.Environment()
    (old, new), _ = workers_with(AgentRules(tool_slots=1), env, n=2)
    first, second = sample(0, 4, 8, PAUSED), sample(1, 4, 8, PAUSED)

    def migrate(what):
        old.submit(what)
        yield env.timeout(5.0)
        partial = yield old.abort(what)
        return (yield new.submit(what, partial))

    moved = [env.process(migrate(what)) for what in (first, second)]
    env.run()
    assert [ended(process.value)[1] for process in moved] == [(5, 13.0, 18.0), (5, 23.0, 28.0)]


def test_copies_of_a_trajectory_call_for_themselves_and_all_go_on():
    env = simpy.Environment()
    workers, agents = workers_with(AgentRules(tool_slots=1), env, n=2)
    what = sample(0, 4, 8, PAUSED)
    first = workers[0].submit(what)
    second = env.event()
    at(env, 1.5, lambda: on_fire(workers[1].submit(what), second.trigger))
    env.run()
    # From 3 to 13, and from 4.5 on, with the slot from 13 to 23; but with the first one's end at 18 the call is over, too.
    assert ended(first.value)[1] == (5, 13.0, 18.0)
    assert agents.figures.in_tools_s == 10 + 5
    assert not second.triggered  # the dispatcher aborts the other copies


def test_the_copy_of_a_trajectory_waits_for_the_call_during_which_it_was_made_as_the_trajectory_does():
    env = simpy.Environment()
    workers, _ = workers_with(AgentRules(tool_slots=1), env, n=2)
    what, fired = sample(0, 4, 8, PAUSED), {}

    def copy():
        first = workers[0].submit(what)
        first.callbacks.append(lambda event: fired.setdefault("first", ended(event.value)))
        yield env.timeout(5.0)
        [partial] = yield workers[0].progress([what])
        second = workers[1].submit(what, partial)
        second.callbacks.append(lambda event: fired.setdefault("second", ended(event.value)))

    env.process(copy())
    env.run()
    assert fired["first"][1] == (5, 13.0, 18.0)
    assert fired["second"][1][:2] == (5, 13.0)


# Deadlines.


def test_a_trajectory_is_killed_at_its_deadline_with_the_tokens_that_it_has():
    env = simpy.Environment()
    worker, agents = worker_with(AgentRules(deadline_s=5.5), env)
    rollout = env.run(worker.submit(sample(0, 4, 20)))
    assert (rollout.done, ended(rollout)) == (True, [(6, 0.0, 6.0)])
    assert (agents.figures.killed, worker.engine.free_blocks) == (1, 1000)


@pytest.mark.parametrize("slots", [None, 1])
def test_a_deadline_ends_a_tool_call_too(slots):
    env = simpy.Environment()
    worker, agents = worker_with(AgentRules(deadline_s=8.0, tool_slots=slots), env)
    rollout = env.run(worker.submit(sample(0, 4, 20, PAUSED)))
    env.run()
    assert (rollout.done, ended(rollout)) == (True, [(3, 0.0, 3.0)])
    assert (agents.figures.killed, agents.figures.in_tools_s) == (1, 5)


def test_the_slot_of_a_killed_trajectory_goes_to_the_next():
    env = simpy.Environment()
    worker, _ = worker_with(AgentRules(deadline_s=8.0, tool_slots=1), env)
    worker.submit(sample(0, 4, 20, [Turn(2, 30.0, 0)]))
    at(env, 5.0, lambda: worker.submit(sample(1, 4, 4, [Turn(1, 1.0, 0)])))
    env.run()
    assert env.now >= 9.0
    assert (
        worker.engine.generated_total == 2 + 4
    )  # the second waits from 6 to 8, has its tool to 9 and ends at 12


def test_a_trajectory_without_a_token_at_its_deadline_ends_after_its_first():
    env = simpy.Environment()
    worker, _ = worker_with(AgentRules(deadline_s=4.0), env, FINE._replace(max_num_seqs=1))
    requests = [worker.submit(sample(i, 4, tokens)) for i, tokens in enumerate((3, 20, 20))]
    env.run()
    # The second gets its first token at 4; the third, at 6. The end is a command: it comes a pass after.
    assert [ended(request.value) for request in requests] == [
        [(3, 0.0, 3.0)],
        [(2, 0.0, 5.0)],
        [(2, 0.0, 7.0)],
    ]


def test_a_deadline_counts_from_the_first_worker():
    env = simpy.Environment()
    (old, new), _ = workers_with(AgentRules(deadline_s=9.0), env, n=2)
    what = sample(0, 4, 20)

    def migrate():
        old.submit(what)
        yield env.timeout(5.5)
        partial = yield old.abort(what)
        return (yield new.submit(what, partial))

    rollout = env.run(env.process(migrate()))
    assert (rollout.done, rollout.finished_s) == (True, 10.0)


def test_what_was_killed_has_no_reward():
    env = simpy.Environment()
    whole, killed = sample(0, 4, 8), sample(1, 4, 8)
    rewarder = SimulatedRewarder(env, 0.1, RESPONSES, kills=True)
    worker, _ = worker_with(AgentRules(), env)
    rollout = env.run(worker.submit(whole))
    short = Rollout(killed, rollout.segments[:0], True)
    assert [each.reward for each in env.run(rewarder.score([rollout, short]))] == [1.0, 0.0]


# Caps.


def dispatcher_of(env, most, n=1):
    workers = [
        a_worker(env, i, FINE, record=recorder(*(f"rollout-{i:03d}" for i in range(n))))
        for i in range(n)
    ]
    return Dispatcher(
        env, workers, Dispatch("test", least_requests), recorder(), max_concurrent=most
    )


def test_no_more_trajectories_are_in_flight_than_allowed_those_in_tools_included():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, 2, n=2)
    done = dispatcher.submit(
        [sample(0, 4, 8, PAUSED), sample(1, 4, 5), sample(2, 4, 5), sample(3, 4, 5)]
    )
    env.run()
    assert [ended(event.value) for event in done] == [
        [(3, 0.0, 3.0), (5, 13.0, 18.0)], [(5, 0.0, 5.0)], [(5, 5.0, 10.0)], [(5, 10.0, 15.0)],
    ]  # fmt: skip


def test_a_trajectory_that_waits_for_its_turn_can_be_withdrawn_and_never_starts():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, 1)
    samples = [sample(i, 4, 5) for i in range(3)]
    done = dispatcher.submit(samples)
    at(env, 2.0, lambda: dispatcher.withdraw([samples[1]]))
    env.run()
    assert [event.value.done for event in done] == [True, False, True]
    assert ended(done[2].value) == [(5, 5.0, 10.0)]


def test_a_withdrawn_trajectory_leaves_its_place_to_the_next():
    env = simpy.Environment()
    dispatcher = dispatcher_of(env, 1)
    samples = [sample(i, 4, 5) for i in range(2)]
    done = dispatcher.submit(samples)
    at(env, 1.5, lambda: dispatcher.withdraw([samples[0]]))
    env.run()
    assert (done[0].value.tokens, ended(done[1].value)) == (2, [(5, 2.0, 7.0)])


# Whole simulations.

TURNS = {"turns": 4, "environment_s": 0.5, "environment_sigma": 1.0, "observation_tokens": 30}
SHORT = {
    "steps": 3,
    "prompts_per_step": 6,
    "group": 2,
    "cap_tokens": 200,
    "mean_tokens": 60,
    "sigma": 0.8,
}
MODES = {
    "keep": {"kv_while_tool_runs": "keep"},
    "drop": {},
    "offload": {"kv_while_tool_runs": "offload", "host_memory_bytes": 2e8, "host_link_bytes_per_s": 1e9},
    "all": {"kv_while_tool_runs": "offload", "host_memory_bytes": 2e8, "host_link_bytes_per_s": 1e9, "tool_slots": 3,
            "deadline_s": 2.0, "max_concurrent": 9},
}  # fmt: skip


def agentic(system, agents, **changes):
    workload = {"synthetic": {**SHORT, **TURNS, "prompt_tokens": 20}}
    return scenario(system, workload=workload, agents=agents, **changes)


@pytest.mark.parametrize("agents", MODES.values(), ids=MODES)
@pytest.mark.parametrize("system", ["verl_colocated", "one_step_off", "areal", "rollpacker"])
def test_nothing_is_lost_and_runs_repeat_byte_for_byte(system, agents):
    config = agentic(system, agents, engine={"max_num_seqs": 4, "kv_cache_tokens": 1600})
    runs = [watch(prepared(config)) for _ in range(2)]
    assert_nothing_is_lost(runs[0])
    assert runs[0].result.metadata["agents"] == runs[1].result.metadata["agents"]
    assert all(
        getattr(runs[0].result, name).equals(getattr(runs[1].result, name))
        for name in ("spans", "segments")
    )
    if "deadline_s" in agents:
        assert runs[0].result.metadata["agents"]["killed"] > 0
    if "kv_while_tool_runs" in agents and agents["kv_while_tool_runs"] == "offload":
        assert runs[0].result.metadata["agents"]["offloaded_bytes"] > 0


@pytest.mark.parametrize(
    "agents", [{"tool_slots": 1}, {"max_concurrent": 3}], ids=["tool slots", "max concurrent"]
)
@pytest.mark.parametrize("system", list(RECIPES))
def test_every_system_finishes_and_loses_nothing_where_trajectories_wait(system, agents):
    few = {**SHORT, "prompts_per_step": 4, "steps": 2}
    workload = {"synthetic": {**few, **TURNS, "prompt_tokens": 20}}
    config = scenario(system, steps=2, workload=workload, agents=agents, engine={"max_num_seqs": 4})
    assert_nothing_is_lost(watch(prepared(config)))


def test_a_deadline_holds_for_responses_of_one_turn_too():
    watched = watch(prepared(scenario("one_step_off", agents={"deadline_s": 0.5})))
    assert_nothing_is_lost(watched)
    lengths = [watched.responses[row["uid"]].tokens for row in rows(watched.result.samples)]
    assert any(
        row["generated_tokens"] < n
        for row, n in zip(rows(watched.result.samples), lengths, strict=True)
    )


def test_a_cap_that_is_never_reached_changes_nothing():
    free, capped = (
        watch(prepared(scenario("one_step_off", agents=a))).result
        for a in ({}, {"max_concurrent": 500})
    )
    assert free.steps.equals(capped.steps)


@pytest.mark.parametrize("system", ["verl_colocated", "specactor"])
def test_slots_that_are_never_short_change_nothing(system):
    free, ample = (
        watch(prepared(agentic(system, a, engine={"max_num_seqs": 4}))).result
        for a in ({}, {"tool_slots": 500})
    )
    assert all(
        getattr(free, name).equals(getattr(ample, name)) for name in ("spans", "segments", "steps")
    )


def test_the_explanation_says_what_trajectories_waited_for():
    result = watch(
        prepared(agentic("one_step_off", MODES["all"], engine={"max_num_seqs": 4}))
    ).result
    console = Console(record=True, width=200)
    print_explanation(explain_result(result), console)
    shown = " ".join(console.export_text().split())
    assert "Trajectories (KV cache while a tool runs: offload): " in shown
    for part in (
        " s in tools;",
        " s waiting for tool slots;",
        "GiB offloaded",
        "killed at their deadline.",
    ):
        assert part in shown
    one_turn = watch(prepared(scenario("one_step_off"))).result
    print_explanation(explain_result(one_turn), console)
    assert "Trajectories" not in console.export_text()


# What is refused.


REFUSED = {
    "deadline_s: 0": "agents.deadline_s is 0",
    "kv_while_tool_runs: offload": "kv_while_tool_runs is offload without host_memory_bytes; give",
    "kv_while_tool_runs: offload, host_memory_bytes: 0": "agents.host_memory_bytes is 0",
    "kv_while_tool_runs: offload, host_memory_bytes: 1e9, host_link_bytes_per_s: 0": "agents.host_link_bytes_per_s is 0",
    "kv_while_tool_runs: offload, host_memory_bytes: 1e3": "agents.host_memory_bytes is 1000: a block of 16 tokens",
    "kv_while_tool_runs: cache": "an engine without prefix caching finds nothing again; use keep, drop or offload",
    "max_concurrent: 1000000": "agents.max_concurrent is 1000000: 16 workers run at most 4096 sequences",
    "tool_slots: 0": "agents.tool_slots is 0",
}


@pytest.mark.parametrize(("agents", "line"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_a_line(agents, line):
    with pytest.raises(InputError) as refused:
        for each in load_scenarios("experiments/quickstart.yaml", [f"agents={{{agents}}}"]):
            prepare(each)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_link_is_the_gpus_own_unless_it_is_given():
    config = AgentsConfig(kv_while_tool_runs="offload", host_memory_bytes=1e12)
    model, h100 = model_shape("qwen3-14b"), gpu("h100")
    own, given = (agent_rules(c, ROOMY, model, h100, 2) for c in (
        config, config.model_copy(update={"host_link_bytes_per_s": h100.host_bytes_per_s / 2}),
    ))  # fmt: skip
    shard = 16 * model.kv_bytes_per_token / 2  # the two GPUs of a worker copy side by side
    assert (own.block_s, given.block_s) == pytest.approx((shard / 64e9, shard / 32e9))
    assert own.host_blocks == int(1e12 // (2 * shard))
    assert math.isinf(own.deadline_s)
    assert replace(prepared(scenario()), agents=own).agents is own


def test_with_a_prefix_cache_only_what_the_engine_does_not_find_is_copied_back():
    """The cache is ample, so that nothing was evicted while the tool ran."""
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD, env, FINE._replace(prefix_caching=True))
    env.run(worker.submit(sample(0, 4, 8, PAUSED)))
    assert agents.figures.offloaded_bytes > 0
    assert agents.figures.waiting_for_kv_s == 0.0
    env = simpy.Environment()
    worker, agents = worker_with(OFFLOAD, env)
    env.run(worker.submit(sample(0, 4, 8, PAUSED)))
    assert agents.figures.waiting_for_kv_s > 0.0
