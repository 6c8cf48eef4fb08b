"""KV-aware admission of programs: its decisions, who waits and who moves, and the laws of whole runs. A pass takes a second."""

import random

import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.programs import Programs
from simrl.dispatch.rules import DISPATCHES
from simrl.errors import InputError
from simrl.runtime.agents import PLAIN, Agents
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_worker import simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.simulate.prepare import prepare
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import Turn
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    RESPONSES,
    ROOMY,
    examples,
    on_gpus,
    one_second_a_pass,
    prepared,
    recorder,
    sample,
    scenario,
    watch,
)
from tests.references.programs import ListedPrograms
from tests.runtime.test_turns import agentic_traces

TAKES = [name for name in RECIPES if "dispatch" in RECIPES[name].__signature__.parameters]


def context(uid, tokens):
    """Return a rollout with a context of so many tokens."""
    return Rollout(sample(uid, tokens), (), False)


# The decisions.


def test_a_new_program_goes_where_the_fewest_tokens_are_and_waits_where_no_room_is():
    programs = Programs(2, 1000, 1.0)
    assert [programs.request(context(uid, 400), 0.0, [0, 1]) for uid in range(5)] == [
        0, 1, 0, 1, None,
    ]  # fmt: skip
    assert programs.request(context(5, 1), 0.0, [0, 1]) is None  # one waits before it


def test_what_acts_is_paused_first_and_the_smallest_of_it():
    programs = Programs(1, 1000, 1.0)
    for uid, tokens in enumerate([300, 200, 100]):
        programs.request(context(uid, tokens), 0.0, [0])
    for uid in (0, 1):
        programs.turn_ended(context(uid, 450 - 100 * uid))
    assert programs.check(5.0, [0]) == {}
    assert list(programs.paused) == [1]  # 450 + 100 and 3 * 100 remain
    assert not any(program.marked for program in programs.all.values())


def test_where_only_programs_reason_all_are_marked_and_paused_when_their_turns_end():
    programs = Programs(1, 1000, 1.0)
    for uid in range(2):
        programs.request(context(uid, 300), 0.0, [0])
        programs.turn_ended(context(uid, 300))
        programs.request(context(uid, 450), 1.0, [0])
    programs.check(5.0, [0])
    assert [program.marked for program in programs.all.values()] == [True, True]
    assert not programs.paused
    programs.turn_ended(context(0, 460))
    assert list(programs.paused) == [0]


def test_a_request_goes_on_before_new_programs_and_these_before_what_acts():
    programs = Programs(2, 1000, 1.0)
    programs.request(context(0, 800), 0.0, [0, 1])
    programs.request(context(1, 800), 0.0, [0, 1])
    for uid in (2, 3, 4):
        programs.request(context(uid, 300), 0.0, [0, 1])
        if uid < 4:  # each had a turn before
            programs.put(uid, 0, 1.0)
            programs.turn_ended(context(uid, 300))
    programs.check(5.0, [0, 1])
    assert set(programs.paused) == {2, 3, 4}
    programs.request(context(2, 300), 6.0, [0, 1])
    programs.release(0)
    assert programs.check(10.0, [0, 1]) == {2: 0, 4: 0}
    assert list(programs.paused) == [3]


def test_a_request_that_waits_for_half_an_hour_goes_on_where_its_program_was():
    programs = Programs(2, 1000, 1.0)
    programs.put(0, 1, 0.0)
    programs.turn_ended(context(0, 2000))
    programs.check(5.0, [0, 1])
    programs.request(context(0, 2000), 10.0, [0, 1])
    assert programs.check(1809.0, [0, 1]) == {}
    assert programs.check(1810.0, [0, 1]) == {0: 1}
    assert programs.figures == {"pauses": 1, "moves": 0, "waiting_for_room_s": 1800.0}


@examples(200)
@given(st.integers(0, 10**6))
def test_decisions_are_those_of_the_rule_as_a_list(seed):
    rng = random.Random(seed)
    engines, kv_tokens = rng.randint(1, 4), rng.choice([1000, 5000])
    weight, step_s = rng.choice([1.0, 0.5, 0.3]), rng.choice([5.0, 300.0])
    programs, listed = (kind(engines, kv_tokens, weight) for kind in (Programs, ListedPrograms))
    able, tokens, acts, now_s = list(range(engines)), {}, {}, 0.0
    for _ in range(120):
        now_s += rng.random()
        idle = [uid for uid in acts if acts[uid]]
        busy = [uid for uid in acts if not acts[uid] and uid not in programs.paused]
        what = rng.choice(
            ["new", "ends", "ends", "answers", "answers", "releases", "check", "lost"]
        )
        if what == "new" or (what == "answers" and idle):
            uid = len(tokens) if what == "new" else rng.choice(idle)
            tokens[uid], acts[uid] = tokens.get(uid, 1) + rng.randint(0, kv_tokens // 6), False
            one = programs.request(context(uid, tokens[uid]), now_s, able)
            assert one == listed.request(uid, tokens[uid], now_s, able)
        elif what == "ends" and busy:
            uid = rng.choice(busy)
            tokens[uid], acts[uid] = tokens[uid] + rng.randint(1, kv_tokens // 6), True
            programs.turn_ended(context(uid, tokens[uid]))
            listed.turn_ended(uid, tokens[uid])
        elif what == "releases" and acts:
            uid = rng.choice(list(acts))
            del acts[uid]
            programs.release(uid)
            listed.release(uid)
        elif what == "lost" and rng.random() < 0.3:
            able = sorted(rng.sample(range(engines), rng.randint(1, engines)))
            for uid in [uid for uid in busy if programs.all[uid].engine not in able]:
                one = programs.request(context(uid, tokens[uid]), now_s, able)
                assert one == listed.request(uid, tokens[uid], now_s, able)
        elif what == "check":
            now_s += step_s
            assert programs.check(now_s, able) == listed.check(now_s, able)
        assert list(programs.paused) == [p.uid for p in listed.waiting()]
        assert {uid for uid, p in programs.all.items() if p.marked} == {
            p.uid for p in listed.programs if p.marked
        }


# Trajectories at workers.


def test_a_paused_trajectory_leaves_when_its_tool_answers_and_goes_on_where_room_is():
    env, record = simpy.Environment(), recorder("rollout-000", "rollout-001")
    agents = Agents(env, PLAIN)
    costs, limits = WorkerCosts(10.0), ROOMY._replace(hold_paused=False, prefix_caching=True)
    workers = simulated_workers(
        env, 2, one_second_a_pass(), limits, costs, RESPONSES, record, agents=agents
    )
    dispatcher = Dispatcher(env, workers, DISPATCHES["programs"], record, 600)
    agents.on_turn = dispatcher.turn
    grows = sample(0, 100, 50, [Turn(3, 1.0, 200), Turn(10, 1.0, 100)])
    small = sample(1, 100, 60, [Turn(3, 20.0, 10)])
    other = sample(2, 100, 3)
    ends = dispatcher.submit([grows, other, small])  # grows and small come to worker 0
    assert dispatcher.unfinished.tolist() == [2, 1]
    env.run(simpy.AllOf(env, ends))
    assert dispatcher.programs.figures["pauses"] > 0
    assert [segment.worker for segment in ends[2].value.segments] == [0, 1]
    assert all(end.value.done for end in ends)
    assert not dispatcher.programs.all and not dispatcher.programs.paused


# Whole runs.

TURNS = {"turns": 6, "environment_s": 4.0, "environment_sigma": 1.0, "observation_tokens": 60}
LENGTHS = {"steps": 3, "prompts_per_step": 6, "group": 4, "cap_tokens": 300, "mean_tokens": 120}
ON = {
    "cache": {},
    "keep": {"kv_while_tool_runs": "keep"},
    "offload": {"kv_while_tool_runs": "offload", "host_memory_bytes": 2e8},
    "slots": {"tool_slots": 3},
    "deadline": {"deadline_s": 3.0, "tool_slots": 6},
    "capped": {"max_concurrent": 20, "acting_token_weight": 0.9},
}
LOST = [
    {"kind": "lost", "worker": 0, "at_s": 20.0, "back_s": 60.0},
    {"kind": "lost", "worker": 1, "at_s": 90.0},
]


def agentic(name, agents, **changes):
    workload = {"synthetic": {**LENGTHS, **TURNS, "sigma": 0.8, "prompt_tokens": 20}}
    engine = {"kv_cache_tokens": 2400, "prefix_caching": True}
    system = {"name": name, "dispatch": "programs"}
    return scenario(system, workload=workload, agents=agents, engine=engine, **changes)


@pytest.mark.parametrize("faults", [[], LOST], ids=["", "lost"])
@pytest.mark.parametrize("agents", ON.values(), ids=ON)
@pytest.mark.parametrize("name", ["verl_colocated", "areal"])
def test_nothing_is_lost_and_runs_repeat_byte_for_byte(name, agents, faults):
    config = agentic(name, agents, faults=faults, cluster={"gpu": "h100", "gpus": 6, "tp": 1})
    one, two = (watch(prepared(config)) for _ in range(2))
    assert_nothing_is_lost(one)
    assert one.result.metadata["agents"] == two.result.metadata["agents"]
    assert one.result.metadata["agents"]["killed" if "deadline_s" in agents else "pauses"] > 0
    assert one.result.spans.equals(two.result.spans)
    assert one.result.segments.equals(two.result.segments)


@pytest.mark.parametrize("name", TAKES)
@examples(15)
@given(agentic_traces(), st.integers(1, 3), st.sampled_from([12, 20, 1000]))
def test_every_recipe_with_a_dispatch_takes_programs_and_loses_nothing(
    name, trace, workers, blocks
):
    limits = ROOMY._replace(kv_blocks=blocks)
    config = on_gpus(name, {"dispatch": "programs"}, workers, steps=3)
    assert_nothing_is_lost(watch(prepared(config, trace, limits=limits)))


def test_a_weight_of_acting_tokens_without_programs_is_refused():
    with pytest.raises(InputError, match="acting_token_weight is 0"):
        prepare(scenario("areal", agents={"acting_token_weight": 0.5}))
