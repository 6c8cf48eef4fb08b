"""An elastic pool: who asks for GPUs, who gives them, and that nothing is lost on the way."""

from random import Random

import pytest

from simrl.dispatch.elastic import DynamicSchedule, StepSwitch, filled, grown, leaving
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
