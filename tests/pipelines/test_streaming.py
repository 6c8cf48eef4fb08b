"""Streaming pipelines: what a rule of admission must count, and how one is told that it counts wrongly."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import simpy

from simrl.errors import InputError
from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import GroupStream
from simrl.result.metrics import summary
from simrl.simulate.run import simulate_prepared
from tests.helpers import prepared, scenario

AHEAD = 4  # batches
Rule = Callable[[RunContext, GroupStream], int]


def may_be_submitted(run: RunContext) -> int:
    """AReaL's bound on groups that were submitted and not dropped."""
    return (run.trainer.version + 1 + AHEAD) * run.workload.batch_groups


def simulated(rule: Rule, max_age: int = 1, admits: bool = True, filter_groups: bool = False):
    """The result of a pipeline that trains finished groups, drops old ones, and has this rule; `admits`: it submits groups
    after it began, too."""

    def pipeline(run: RunContext) -> simpy.events.ProcessGenerator:
        stream = GroupStream(run, lambda: rule(run, stream))
        stream.admit()
        for _ in range(run.steps):
            while len(stream.buffer) < run.workload.batch_groups:
                yield stream.news()
                stream.drop(
                    [g for g in stream.buffer if g.oldest_version < run.trainer.version - max_age]
                )
            yield run.trainer.train(stream.take(stream.buffer[: run.workload.batch_groups]))
            loaded = run.load_weights()
            if admits:
                stream.admit()
            yield loaded

    ready = prepared(scenario("one_step_off", steps=8))
    system = replace(ready.system, pipeline=pipeline, filter_groups=filter_groups)
    return simulate_prepared(replace(ready, system=system))


def drops_counted(run: RunContext, stream: GroupStream) -> int:
    """The room of a rule that counts dropped groups as if they ran."""
    return may_be_submitted(run) - stream.submitted


@pytest.mark.parametrize(
    "rule",
    [
        drops_counted,
        lambda run, stream: max(0, drops_counted(run, stream)),
        lambda run, stream: min(1, drops_counted(run, stream)),
        lambda run, stream: drops_counted(run, stream) > 0,
        lambda run, stream: max(0, min(12 - len(stream.running), drops_counted(run, stream))),
    ],
    ids=["a difference", "clamped at 0", "at most 1", "true or false", "also on concurrency"],
)
def test_a_rule_that_counts_dropped_groups_ends_the_run_in_a_line_that_names_it_and_its_counts(
    rule: Rule,
):
    with pytest.raises(InputError) as refused:
        simulated(rule, max_age=0)
    line = str(refused.value)
    assert line.startswith("pipeline tests.pipelines.test_streaming: its room for groups is ")
    assert (
        " submitted, " in line
        and " dropped groups as if they ran" in line
        and "count GroupStream.kept" in line
    )
    assert "\n" not in line


def test_it_also_ends_where_groups_with_equal_rewards_are_dropped():
    with pytest.raises(InputError, match="counts 1 dropped groups as if they ran"):
        simulated(
            lambda run, stream: may_be_submitted(run) - stream.submitted, 100, filter_groups=True
        )


@pytest.mark.parametrize(
    "rule",
    [
        lambda run, stream: may_be_submitted(run) - stream.kept,
        lambda run, stream: 12 - len(stream.running),
        lambda run, stream: min(12 - len(stream.running), may_be_submitted(run) - stream.kept),
        lambda run, stream: 12 - len(stream.running) - len(stream.buffer),
        lambda run, stream: max(0, may_be_submitted(run) - stream.kept),
        lambda run, stream: stream.kept < may_be_submitted(run),
    ],
    ids=[
        "bound on staleness",
        "bound on concurrency",
        "both",
        "bound on all that is here",
        "clamped at 0",
        "true or false",
    ],
)
def test_a_rule_that_counts_what_is_kept_or_runs_may_drop_groups(rule: Rule):
    result = simulated(rule, max_age=0)
    row = summary(result, 2)
    assert row["stale_samples"] == result.samples["status"].to_pylist().count("dropped") > 0
    assert row["off_policyness_max"] == 0


def test_a_pipeline_that_never_submits_again_is_told_that_there_is_room():
    with pytest.raises(InputError) as refused:
        simulated(
            lambda run, stream: (
                may_be_submitted(run) - AHEAD * run.workload.batch_groups - stream.kept
            ),
            admits=False,
        )
    line = str(refused.value)
    assert line.startswith(
        "system one_step_off stands still: pipeline tests.pipelines.test_streaming: its room for groups is "
    )
    assert " 0 run, " in line and line.endswith(
        "call GroupStream.admit whenever what it counts has changed"
    )


def test_a_rule_whose_room_never_grows_is_told_what_to_count():
    with pytest.raises(
        InputError, match="It waits for a group, and none is submitted; let it count"
    ) as refused:
        simulated(lambda run, stream: 8 - stream.kept)
    assert "8 submitted, 0 run, 0 are finished, 8 trained, 0 dropped" in str(refused.value)


@pytest.mark.parametrize(
    "rule",
    [
        lambda run, stream: run.workload.batch_groups,
        lambda run, stream: True,
        lambda run, stream: 10**9 - stream.kept,
    ],
    ids=["a constant", "true", "a bound far above the run"],
)
def test_a_rule_without_a_bound_is_refused_in_a_line_that_names_the_pipeline(rule: Rule):
    with pytest.raises(InputError) as refused:
        simulated(rule)
    line = str(refused.value)
    assert line.startswith("pipeline tests.pipelines.test_streaming: its room for groups is ")
    assert " groups at once, and 8 updates train " in line and "let the room fall" in line


def test_a_rule_may_say_one_more_until_its_bound_a_hundred_batches_ahead_is_reached():
    def room(run: RunContext, stream: GroupStream) -> int:
        return int(stream.kept < (run.trainer.version + 101) * run.workload.batch_groups)

    assert simulated(room, max_age=100).samples.num_rows > 0


def no_room(run: RunContext, stream: GroupStream) -> int:
    raise ZeroDivisionError("no batch")


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda run, stream: None, "returns None"),
        (lambda run, stream: "12", "returns '12'"),
        (lambda run, stream: float("nan"), "returns nan"),
        (no_room, "raises ZeroDivisionError (no batch)"),
    ],
    ids=["none", "a text", "no number", "an error"],
)
def test_a_rule_that_returns_no_number_is_told_in_a_line_what_a_room_is(rule: Rule, told: str):
    with pytest.raises(InputError) as refused:
        simulated(rule)
    assert str(refused.value) == (
        f"pipeline tests.pipelines.test_streaming: its rule of room {told}; it returns how many more groups may be "
        "submitted now, a whole number"
    )


@pytest.mark.parametrize("drops", ["shed", "evict"])
def test_a_running_group_that_waits_undrawn_can_be_dropped_and_leaves_its_room(drops: str):
    seen: list[int] = []

    def pipeline(run: RunContext) -> simpy.events.ProcessGenerator:
        stream = GroupStream(run, lambda: may_be_submitted(run) - stream.kept)
        stream.begins_late = stream.by_response = True
        run.dispatcher.limit(2)  # responses: those of one group
        stream.admit()
        before = len(stream.running)
        if drops == "shed":
            stream.shed(2)
        else:
            stream.evict(sorted(stream.running)[1:])
        seen.extend([before, len(stream.running)])
        stream.admit()
        for _ in range(run.steps):
            while len(stream.buffer) < run.workload.batch_groups:
                yield stream.news()
            yield run.trainer.train(stream.take(stream.buffer[: run.workload.batch_groups]))
            loaded = run.load_weights()
            stream.admit()
            yield loaded

    ready = prepared(scenario("one_step_off", steps=3))
    result = simulate_prepared(replace(ready, system=replace(ready.system, pipeline=pipeline)))
    assert seen[0] > 1 and seen[1] == (0 if drops == "shed" else 1)
    assert result.steps.num_rows == 3
