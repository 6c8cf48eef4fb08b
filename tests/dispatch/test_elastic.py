"""An elastic pool: who asks for GPUs, who gives them, and that nothing is lost on the way."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, strategies as st

from simrl.dispatch.elastic import DynamicSchedule, StepSwitch, filled, grown, leaving
from simrl.errors import InputError
from simrl.pipelines.buffered import buffered
from simrl.pipelines.words import lends_each_update
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from tests.conservation import assert_nothing_is_lost
from tests.helpers import Watched, counted, examples, lanes, prepared, rows, scenario, trace, watch
from tests.references.elastic import DynamicSchedules, StepSwitches, released, scattered

# verl V1's switch


def switch(**keys) -> StepSwitch:
    return StepSwitch(batch=8, minibatches=4, standalone=0.5, **keys)


def test_the_first_steps_lend_while_no_switch_has_been_measured():
    rule = switch()
    assert rule.threshold == 3  # 0.4 of 8 groups
    assert rule.lends(ready=2)
    assert not rule.lends(ready=3)
    assert not rule.lends(ready=0, last=True)


def test_a_step_lends_if_the_groups_that_are_missing_cost_more_than_the_last_switches():
    rule = switch(step_up=0, step_down=0)
    rule.waited(12.0, missing=4)  # 3 s a group
    rule.switched("rollout", 1.0)
    assert rule.lends(ready=2)  # no switch back has been measured
    rule.switched("trainer", 0.4)
    assert rule.lends(ready=2)  # one group, half of whose 3 s the trainer's GPUs spare, for 1.4 s
    for _ in range(3):
        rule.switched("rollout", 1.2)
    assert not rule.lends(ready=2)  # 1.6 s: the mean of the last three each way
    assert rule.lends(ready=1)  # two groups


def test_seconds_a_group_are_those_of_all_steps():
    rule = switch(step_up=0, step_down=0)
    rule.switched("rollout", 0.6)
    rule.switched("trainer", 0.6)
    rule.waited(4.0, missing=1)
    assert rule.lends(ready=2)  # 2 s for 1.2
    rule.waited(1.0, missing=4)
    assert not rule.lends(ready=2)  # 5 s for 5 groups, half of it


def test_the_threshold_rises_from_the_second_idle_step_on_and_falls_from_the_second_calm_one():
    rule, ratios = switch(), []
    for waited_s in (2.1, 2.1, 2.1, 2.0, 0.0, 0.0):  # 2 s is one look at the buffer
        rule.waited(waited_s, missing=1)
        rule.lends(ready=8)
        ratios.append(round(rule.ratio, 2))
    assert ratios == [0.4, 0.45, 0.5, 0.5, 0.47, 0.44]
    for _ in range(20):
        rule.lends(ready=8)
    assert rule.ratio == 0.25
    assert rule.threshold == 2  # one mini-batch


@pytest.mark.parametrize("seed", range(4))
def test_the_switch_decides_as_its_rule_does_from_the_history_of_a_run(seed):
    rng = Random(seed)
    for _ in range(250):
        minibatches = rng.choice([1, 2, 4])
        batch = minibatches * rng.randint(1, 8)
        ratio, adaptive = rng.choice([0.25, 0.4, 1.0]), rng.random() < 0.7
        steps = {"release": rng.randint(1, 3), "window": rng.randint(1, 3)}
        standalone = rng.choice([0.25, 0.5, 0.75])
        rule = StepSwitch(
            batch,
            minibatches,
            standalone,
            ratio,
            step_up=0.05 * adaptive,
            step_down=0.03 * adaptive,
            release_steps=steps["release"],
            cost_window=steps["window"],
        )
        reference = StepSwitches(
            batch, minibatches, standalone, 2.0, ratio=ratio, adaptive=adaptive, **steps
        )
        for _ in range(30):
            for _ in range(minibatches):
                wait = rng.choice([0.0, rng.uniform(0, 4)]), rng.randint(0, 3)
                rule.waited(*wait)
                reference.wait(*wait)
            ready, last = rng.randint(0, batch), rng.random() < 0.1
            assert rule.lends(ready, last) == reference.end_step(ready, last)
            assert rule.threshold == reference.threshold()
            for to in ("rollout", "trainer"):
                if rng.random() < 0.5:
                    seconds = rng.uniform(0, 6)
                    rule.switched(to, seconds)
                    reference.switch(to, seconds)


# verl's dynamic schedule


def test_a_schedule_lends_while_nothing_is_known_and_groups_are_missing():
    rule = DynamicSchedule(cycle=10)
    assert rule.threshold == 3
    assert rule.lends(surplus=2)  # 1,000 s for a group, 10 for a switch
    assert not rule.lends(surplus=3)


def test_a_schedule_weighs_the_missing_groups_against_the_switches_of_the_last_cycles():
    rule = DynamicSchedule(cycle=10)
    rule.waited(20.0, missing=5)  # 4 s a group
    assert rule.lends(surplus=0)  # 12 s against 10
    rule.switched("rollout", 8.0)
    rule.switched("trainer", 6.0)
    rule.over()
    assert rule.ratio == 0.4  # five of ten groups were missing: the most that it rises by
    assert rule.lends(surplus=0)  # 16 s against 14
    assert not rule.lends(surplus=1)
    rule.over()
    assert rule.ratio == pytest.approx(0.38)


def test_a_fixed_ratio_lends_whenever_groups_are_missing():
    rule = DynamicSchedule(cycle=10, adaptive=False)
    rule.waited(9.0, missing=9)
    rule.switched("rollout", 1000.0)
    rule.over()
    assert (rule.threshold, rule.lends(2), rule.lends(3)) == (3, True, False)


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_decides_as_its_rule_does_cycle_after_cycle(seed):
    rng = Random(seed)
    for _ in range(250):
        cycle, ratio = rng.randint(1, 40), rng.choice([0.1, 0.3, 0.9])
        policy = rng.choice(["default", "default", "fixed_ratio"])
        rule, reference = (
            DynamicSchedule(cycle, ratio, policy == "default"),
            DynamicSchedules(cycle, ratio, policy),
        )
        for _ in range(30):
            assert rule.threshold == reference.threshold()
            for _ in range(rng.randint(1, 4)):
                wait = rng.choice([0.0, rng.uniform(0, 9)]), rng.choice([0, rng.randint(0, cycle)])
                rule.waited(*wait)
                reference.waits.append(wait)
            surplus = rng.randint(-2, cycle)
            assert rule.lends(surplus) == reference.lends(surplus)
            for _ in range(rng.randint(0, 2)):
                seconds = rng.uniform(0, 20)
                rule.switched("rollout", seconds)
                reference.switches.append(seconds)
            rule.over()
            reference.end_cycle()


# RLinf's dynamic scheduling


@pytest.mark.parametrize(
    ("workers", "running", "train", "number"),
    [
        (6, 0, 2, 6),  # nothing runs
        (6, 384, 2, 0),  # all six are needed
        (6, 300, 2, 0),  # one is not, but the trainer has no use for three units
        (6, 256, 2, 2),  # four are needed, and four units divide the batch
        (
            6,
            64,
            2,
            2,
        ),  # five are not needed: the trainer takes two, the next size would be six more
        (1, 1, 4, 0),  # somebody has to finish
    ],
)
def test_as_many_workers_leave_as_lift_the_trainer_to_its_next_size(
    workers, running, train, number
):
    assert leaving(workers, running, 64, train, [1, 2, 4, 8]) == number


def test_a_trainer_grows_to_the_largest_size_for_which_units_are_free():
    assert [grown(2, free, [1, 2, 4, 8]) for free in range(8)] == [2, 2, 4, 4, 4, 4, 8, 8]


def test_workers_that_stay_are_filled_one_after_the_other_and_the_last_takes_the_rest():
    assert filled([4, 4, 4, 4], running=[3, 8, 2], expected=8) == [0, 0, 2, 2]
    assert filled([4, 4, 4], running=[9, 9, 9], expected=8) == [2, 2, 2]


@pytest.mark.parametrize("seed", range(4))
def test_workers_leave_and_are_filled_as_the_rule_says(seed):
    rng = Random(seed)
    for _ in range(1_000):
        units, groups = rng.randint(2, 16), rng.choice([8, 12, 16, 24, 64])
        sizes = [n for n in range(1, units) if groups % n == 0]
        train = rng.choice(sizes)
        workers = units - train
        running, most = rng.choice([0, rng.randint(0, 64 * workers)]), rng.randint(1, 64)
        assert leaving(workers, running, most, train, sizes) == released(
            workers, running, most, train, sizes
        )
        moving = [rng.randint(1, 16) for _ in range(rng.randint(0, 8))]
        loads = [rng.randint(0, 30) for _ in range(rng.randint(1, 5))]
        expected = (sum(moving) + sum(loads)) // len(loads)
        assert filled(moving, loads, expected) == scattered(moving, loads, expected)


# The rules, executed


def spans_of(watched: Watched, lane: str, *kinds: str) -> list[tuple[str, float, float]]:
    return [
        (span["kind"], round(span["started_s"]), round(span["ended_s"]))
        for span in lanes(watched.result)[lane]
        if span["kind"] in kinds
    ]


FOUR = trace([[[(4, 2)], [(4, 20)], [(4, 3)], [(4, 40)]]])  # groups of one response
PLAIN = {"minibatches": 2, "max_running_requests": 2, "log_probs": 0}


def test_a_worker_moves_to_the_trainer_within_a_step_and_comes_back_with_new_weights():
    """After 3 s, two groups are trained on one GPU; two responses run, for which one of three workers is enough. The last
    one leaves at its next boundary, and the trainer takes it, as two GPUs divide the two groups of a mini-batch."""
    watched = counted("rlinf_dynamic", PLAIN, FOUR, steps=2, workers=3)
    moved = [s for s in rows(watched.result.segments) if s["uid"] == 3]
    assert [(s["worker"], s["tokens"], s["started_s"], s["ended_s"]) for s in moved] == [
        (2, 4, 0.0, 4.0),
        (1, 36, 4.0, 40.0),
    ]
    trained = {
        lane: spans_of(watched, lane, "train")[: 2 if lane == "rollout-003" else 1]
        for lane in lanes(watched.result)
    }
    assert trained == {
        "rollout-000": [],
        "rollout-001": [],
        "rollout-002": [("train", 40, 40)],
        "rollout-003": [("train", 3, 3), ("train", 40, 40)],
    }
    assert spans_of(watched, "rollout-002", "load_weights") == [("load_weights", 40, 50)]
    assert len(spans_of(watched, "rollout-003", "switch")) == 4  # two and back, in two steps
    assert {s["policy_version"] for s in rows(watched.result.segments) if s["uid"] > 3} == {1}
    assert_nothing_is_lost(watched)


def test_the_trainers_gpus_roll_out_until_no_more_than_half_of_the_responses_run():
    """Two of four run at the look at 4 s; the last worker, the trainer's, leaves at its next boundary and switches."""
    watched = counted("rlinf_dynamic", {**PLAIN, "pre_process": True}, FOUR, steps=2, workers=3)
    assert spans_of(watched, "rollout-003", "rollout", "load_weights")[:3] == [
        ("rollout", 0, 5),
        ("load_weights", 41, 51),
        ("rollout", 51, 56),
    ]
    assert_nothing_is_lost(watched)


def test_the_last_mini_batch_waits_for_the_end_of_rollout_and_then_for_all_gpus():
    eight = trace([[[(4, 2)], [(4, 20)], [(4, 3)], [(4, 40)]] * 2])
    parameters = {**PLAIN, "max_running_requests": 1, "wait_before_last": True}
    watched = counted("rlinf_dynamic", parameters, eight, steps=1, workers=3)
    for lane in lanes(watched.result):
        assert spans_of(watched, lane, "train")[-1:] == [("train", 40, 40)]
    assert_nothing_is_lost(watched)


LENDING = {
    "switch": ("verl_v1_separate_async", {"enable_switch": True}),
    "plain switch": (
        "verl_v1_separate_async",
        {
            "enable_switch": True,
            "adaptive_switch_threshold": False,
            "on_stale": "wait",
            "max_span": 2,
        },
    ),
    "schedule": ("verl_fully_async", {"dynamic_schedule": "default"}),
    "fixed schedule": ("verl_fully_async", {"dynamic_schedule": "fixed_ratio", "rebalance": False}),
    "drained schedule": (
        "verl_fully_async",
        {"dynamic_schedule": "fixed_ratio", "partial_rollout": False},
    ),
    "rlinf": ("rlinf_dynamic", {"max_running_requests": 8}),
    "rlinf, all": (
        "rlinf_dynamic",
        {"pre_process": True, "wait_before_last": True, "moves": "kv", "max_running_requests": 8},
    ),
}


def lending(name: str, steps: int = 16, share: float | None = 0.5, **changes):
    system, parameters = LENDING.get(name, (name, {}))
    workload = {
        "steps": 3,
        "prompts_per_step": 48,
        "group": 2,
        "cap_tokens": 2000,
        "mean_tokens": 500,
        "sigma": 0.9,
        "prompt_tokens": 50,
    }
    training = {"reward_s": 0.01, "publish_s": 0.02, "load_overhead_s": 0.1, "switch_s": 0.2}
    return scenario(
        {"name": system, **({"rollout_share": share} if share else {}), **parameters},
        steps=steps,
        workload={"synthetic": workload},
        **{
            "cluster": {"gpu": "h100", "gpus": 8, "tp": 1},
            "training": training,
            "engine": {"max_num_seqs": 8},
            **changes,
        },
    )


@pytest.mark.parametrize("name", LENDING)
@examples(6)
@given(st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 99), st.sampled_from([None, 0.002]))
def test_nothing_is_lost_while_gpus_change_sides(name, share, seed, mfu):
    training = {"switch_s": 0.2, "mfu": mfu, "log_prob_mfu": mfu}
    watched = watch(prepared(lending(name, share=share, seed=seed, training=training)))
    assert_nothing_is_lost(watched)
    for spans in lanes(watched.result).values():
        for span in spans:
            assert (span["kind"] == "rollout") <= (span["role"] == "rollout")
            assert (span["kind"] in ("train", "log_prob", "publish", "switch")) <= (
                span["role"] == "train"
            )
    allowed = watched.prepared.system.off_policyness
    assert (
        allowed is None
        or max(u["off_policyness_max"] for u in rows(watched.result.steps)) <= allowed
    )


@pytest.mark.parametrize("name", LENDING)
def test_equal_scenarios_give_equal_tables_and_gpus_did_change_sides(name):
    first, second = simulate(lending(name)), simulate(lending(name))
    assert first.spans.equals(second.spans)
    assert first.samples.equals(second.samples)
    kinds = {(span["kind"], span["lane"]) for span in rows(first.spans)}
    assert any(("rollout", lane) in kinds and ("train", lane) in kinds for _, lane in kinds)


def test_gpus_that_are_lent_at_each_update_train_and_roll_out_in_turn():
    """ROLL's `partial_gpu_mode`, with AReaL's other words."""
    made = prepared(lending("areal", steps=6))
    rules = made.system.pipeline.keywords["rules"]
    pipeline = partial(buffered, rules=replace(rules, begin=lends_each_update))
    watched = watch(
        replace(made, system=replace(made.system, pipeline=pipeline, elastic="updates"))
    )
    assert_nothing_is_lost(watched)
    spans = lanes(watched.result)["rollout-007"]
    kinds = [span["kind"] for span in spans if span["kind"] != "idle"]
    turns = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    step = ["rollout", "switch", "log_prob", "train", "publish", "switch", "load_weights"]
    assert turns == (6 * step)[: len(turns)]
    assert turns[-1] == "train"  # the run ends with its last update
    assert len(turns) == 6 * len(step) - 3


@pytest.mark.parametrize("name", ["switch", "schedule"])
def test_a_rule_notes_the_seconds_that_the_switches_of_its_run_took(name, monkeypatch):
    noted = []
    rule = StepSwitch if name == "switch" else DynamicSchedule
    monkeypatch.setattr(rule, "switched", lambda self, to, seconds: noted.append((to, seconds)))
    result = simulate(lending(name))
    lent = [
        sum(span["ended_s"] - span["started_s"] for span in spans)
        for spans in changes(lanes(result)["rollout-007"])
    ]
    seconds = [seconds for to, seconds in noted if to == "rollout"]
    assert seconds == pytest.approx(lent[: len(seconds)])
    assert seconds


def changes(spans):
    """The switch to rollout and the load after it, each time."""
    return [
        (a, b) for a, b in pairwise(spans) if (a["kind"], b["kind"]) == ("switch", "load_weights")
    ]


@pytest.mark.parametrize("name", LENDING)
def test_a_lost_worker_is_refused_where_its_gpus_may_be_the_trainers(name):
    faults = [{"kind": "lost", "worker": 0, "at_s": 1.0, "back_s": 2.0}]
    with pytest.raises(InputError, match=r"faults.0 is lost: with (verl|rlinf)\w+ the GPUs"):
        prepare(lending(name, faults=faults))


def test_states_that_stay_on_gpus_that_roll_out_need_room_beside_the_engine():
    stays = {"training": {"offload": "none"}}
    with pytest.raises(InputError, match=r"GiB of states stay on a GPU that rolls out"):
        prepare(lending("switch", **stays, engine={"gpu_memory_utilization": 0.99}))
    prepare(lending("switch", **stays, engine={"gpu_memory_utilization": 0.5}))
    engine = {"gpu_memory_utilization": 0.99}  # the trainer's own GPUs do not roll out
    prepare(lending("rlinf", **stays, engine=engine))


def test_a_first_size_that_does_not_divide_a_mini_batch_is_refused():
    with pytest.raises(
        InputError, match="the 5 data-parallel ranks of 5 train GPUs do not divide the 12 groups"
    ):
        prepare(lending("rlinf", share=0.375))


def test_pools_of_their_own_lend_nothing():
    cluster = {"gpu": "h100", "gpus": 8, "tp": 1, "train": {"gpu": "h200", "gpus": 4}}
    with pytest.raises(InputError, match="it lends GPUs from one pool to the other"):
        prepare(lending("switch", share=None, cluster=cluster))
