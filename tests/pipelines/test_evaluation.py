"""Evaluations as requests at the rollout workers: who waits for whom, what is counted, what is refused."""

from typing import Any

import pytest

from simrl.analysis.gpu_hours import waterfall
from simrl.errors import InputError
from simrl.result.metrics import summary
from simrl.result.result import TABLES
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from tests.conservation import assert_nothing_is_lost
from tests.helpers import lanes, prepared, rows, scenario, watch, with_status

EVERY_2 = {"every": 2, "prompts": 3, "samples": 2}


def watched(system: Any, evaluation: dict[str, Any], steps: int = 5, **changes: Any):
    return watch(prepared(scenario(system, steps=steps, evaluation=evaluation, **changes)))


def evaluations(result):
    """The rows of samples of evaluations by version, each with its segments."""
    segments: dict[int, list[dict[str, Any]]] = {}
    for segment in rows(result.segments):
        segments.setdefault(segment["uid"], []).append(segment)
    found: dict[int, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {}
    for row in rows(result.samples):
        if row["status"] == "evaluation":
            found.setdefault(row["trace_step"], []).append((row, segments.get(row["uid"], [])))
    return found


@pytest.mark.parametrize("system", ["verl_colocated", "split", "one_step_off", "areal", "prime_rl"])
def test_every_second_version_is_evaluated_and_nothing_of_it_is_trained_or_lost(system):
    run = watched(system, EVERY_2)
    assert_nothing_is_lost(run)
    assert {version: len(of) for version, of in evaluations(run.result).items()} == {2: 6, 4: 6}
    assert not {uid for uid in with_status(run.result, "trained") if uid >= 10**9}


@pytest.mark.parametrize("system", ["verl_colocated", "split", "one_step_off", "areal", "prime_rl"])
def test_between_steps_all_tokens_of_an_evaluation_are_of_its_version(system):
    result = watched(system, {**EVERY_2, "when": "between_steps", "at_start": True}).result
    for version, of in evaluations(result).items():
        assert {part["policy_version"] for _, parts in of for part in parts} == {version}
    assert summary(result, 1)["evaluation_mixed_share"] == 0.0


@pytest.mark.parametrize("system", ["verl_colocated", "one_step_off", "areal"])
def test_between_steps_no_response_of_training_starts_while_an_evaluation_runs(system):
    result = watched(system, {**EVERY_2, "when": "between_steps", "prompts": 20}).result
    starts = [row["started_s"] for row in rows(result.samples) if row["status"] == "trained"]
    for of in evaluations(result).values():
        parts = [part for _, parts in of for part in parts]
        begins, ends = (
            min(part["started_s"] for part in parts),
            max(part["ended_s"] for part in parts),
        )
        assert not [started for started in starts if begins < started < ends]


def test_an_evaluation_at_the_start_comes_before_the_first_rollout():
    result = watched("verl_colocated", {**EVERY_2, "at_start": True}).result
    first = {
        row["trace_step"]: row["finished_s"]
        for row in rows(result.samples)
        if row["status"] == "evaluation"
    }
    trained = [row["started_s"] for row in rows(result.samples) if row["status"] == "trained"]
    assert first[0] <= min(trained)


@pytest.mark.parametrize("system", ["pipeline_rl", "trl_async", "slime_fully_async"])
def test_groups_that_an_evaluation_at_the_start_holds_back_begin_after_it(system):
    few = {"sglang_server_concurrency": 2} if system == "slime_fully_async" else {}
    run = watched({"name": system, **few}, {"every": 1, "at_start": True}, steps=3)
    assert_nothing_is_lost(run)
    assert 0 in evaluations(run.result)


def test_beside_training_newer_weights_reach_a_running_evaluation_and_its_tokens_are_mixed():
    slow = {"publish_s": 0.0, "load_overhead_s": 0.0, "reward_s": 0.0}
    result = watched(
        "prime_rl", {"every": 1, "prompts": 40, "samples": 4}, steps=8, training=slow
    ).result
    assert 0 < summary(result, 1)["evaluation_mixed_share"] < 1


def test_of_what_waits_for_the_limit_the_preferred_kind_starts_first():
    def of_first_evaluation(prefer: str) -> tuple[list[float], list[float]]:
        """Starts of its responses, and of training's after its first one."""
        rule = {"every": 1, "prompts": 10, "samples": 2, "when": "beside_training"}
        more = {"agents": {"max_concurrent": 3}, "steps": 8}
        result = watched("areal", {**rule, "prefer": prefer}, **more).result
        evaluated = [parts[0]["started_s"] for _, parts in evaluations(result)[1] if parts]
        started = [row["started_s"] for row in rows(result.samples) if row["status"] == "trained"]
        return evaluated, [s for s in started if evaluated and min(evaluated) < s]

    evaluated, trained = of_first_evaluation("eval")
    assert len(evaluated) == 20 and max(evaluated) <= min(trained)
    evaluated, trained = of_first_evaluation("train")
    assert len(evaluated) < 20 or max(evaluated) > min(trained)


def test_the_gpu_time_of_evaluations_is_a_part_of_its_own_and_the_parts_still_sum_up():
    for system in ("verl_colocated", "prime_rl"):
        result = watched(system, EVERY_2).result
        fall = waterfall(result)
        assert fall.gpu_s["evaluate"] > 0
        assert sum(fall.gpu_s.values()) == pytest.approx(fall.total_gpu_s)
    spans = [span for lane in lanes(result).values() for span in lane]
    assert {"rollout", "train"} <= {span["kind"] for span in spans}


def test_an_evaluation_alone_on_a_worker_is_a_span_of_its_own_with_all_its_tokens():
    result = watched("verl_colocated", EVERY_2).result
    alone = sum(span["tokens"] for span in rows(result.spans) if span["kind"] == "evaluate")
    row = summary(result, 1)
    assert alone == row["evaluation_tokens"] and row["evaluations"] == 2 and row["evaluation_s"] > 0


def test_evaluations_take_time_and_change_nothing_else_of_an_on_policy_run():
    with_them, without = (
        simulate(scenario("verl_colocated", steps=5, **more))
        for more in ({"evaluation": EVERY_2}, {})
    )
    assert with_them.metadata["end_s"] > without.metadata["end_s"]
    trained = [
        [
            (row["uid"], row["generated_tokens"], row["trained_step"])
            for row in rows(result.samples)
            if row["status"] == "trained"
        ]
        for result in (with_them, without)
    ]
    assert trained[0] == trained[1]
    assert not any(key.startswith("evaluation") for key in summary(without, 1))


def test_equal_scenarios_with_evaluations_give_equal_tables():
    first, again = (watched("prime_rl", EVERY_2).result for _ in range(2))
    assert all(getattr(first, name).equals(getattr(again, name)) for name in TABLES)


def test_an_evaluation_set_has_its_own_lengths_and_repeats_its_prompts():
    lengths = {
        "synthetic": {
            "steps": 1,
            "prompts_per_step": 2,
            "group": 1,
            "cap_tokens": 150,
            "mean_tokens": 149,
            "sigma": 0.0,
        }
    }
    result = watched("split", {"every": 2, "samples": 3, "lengths": lengths}).result
    of = evaluations(result)
    for part in of.values():
        assert sorted(row["prompt_id"] - 10**9 for row, _ in part) == [0, 0, 0, 1, 1, 1]
    assert {row["generated_tokens"] for part in of.values() for row, _ in part} == {149}


@pytest.mark.parametrize(
    ("system", "changes", "words"),
    [
        ("verl_colocated", {"when": "beside_training"}, "use when: between_steps"),
        ("laminar", {}, "training.evaluate_every"),
        (
            "verl_colocated",
            {"prompts": 100_000, "samples": 1024},
            "samples; stay under 100,000,000",
        ),
        ({"name": "areal", "dispatch": "programs"}, {}, "between steps; use when: beside_training"),
        ({"name": "areal", "adapt_split_every": 2}, {}, "moves GPUs by adapt_split_every 2"),
        ("verl_colocated", {"prefer": "train"}, "evaluation.prefer is train"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(system, changes, words):
    with pytest.raises(InputError, match=words) as refused:
        prepare(scenario(system, evaluation={**EVERY_2, **changes}))
    assert "\n" not in str(refused.value)


def test_seconds_and_requests_for_evaluations_exclude_each_other():
    training = {"evaluate_every": 2, "evaluate_s": 1.0}
    with pytest.raises(InputError, match="leave one of them out"):
        prepare(scenario("split", evaluation=EVERY_2, training=training))
