"""The passes of a replay: the second prediction takes their seconds, and what is left of an error is the schedule's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from simrl.analysis.agreement import agree
from simrl.result.result import Result
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl_replay.host import PASS
from simrl_replay.measured_passes import PASSES, Passes, _recorded, passes_of, split_error
from tests.helpers import LINEAR, on_gpus


def prepared_run(system: str, workers: int = 2, **parameters: object) -> Prepared:
    scenario = on_gpus(system, parameters, workers, profile={"roofline": {}}, steps=3)
    return prepare(scenario.with_fields("training", **LINEAR))


def on_a_noisy_host(prepared: Prepared, seed: int = 0) -> tuple[Result, list[Passes]]:
    """A run whose passes take other times than profiled, each its own, and its passes as engines report them."""
    none = np.zeros((prepared.workers, 20_000))
    _, plain = _recorded(prepared, none)
    profiled_s = np.median([b - a for a, b in pairwise(plain[0]["began_s"].tolist())])
    draws = np.random.default_rng(seed)
    seconds = profiled_s * draws.uniform(0.5, 3.0, none.shape)
    seconds[1:] *= 2.0  # others use the second core
    without_requests = replace(prepared, costs=prepared.costs._replace(request_s=0.0))
    load_s = prepared.costs.load_s + prepared.costs.pause_s
    loads = [(load_s * draws.uniform(0.5, 3.0, 10)).tolist() for _ in range(prepared.workers)]
    measured, made = _recorded(without_requests, seconds, loads)
    passes = []
    for took_s, each in zip(seconds, made, strict=True):
        reported = np.zeros(len(each), PASSES)
        reported["began_s"], reported["ended_s"] = each["began_s"], each["began_s"]
        reported["ended_s"] += took_s[: len(each)]
        reported["cpu_s"] = 0.5 * took_s[: len(each)]
        reported["decodes"], reported["prefill_tokens"] = each["decodes"], each["prefill"]
        reported["query_tokens"] = reported["positions"] = each["decodes"] + each["prefill"]
        passes.append(reported)
    return measured, passes


@pytest.mark.parametrize("system", ["areal", "one_step_off", "verl_colocated"])
def test_of_a_host_that_is_only_slower_nothing_is_left_given_its_speed(system):
    """Decisions that differ as predicted follow from times alone: with the measured seconds, none differs."""
    prepared = prepared_run(system)
    measured, passes = on_a_noisy_host(prepared)
    as_predicted = agree(simulate_prepared(prepared), measured)
    split = split_error(prepared, measured, passes)
    assert abs(as_predicted.errors.makespan_err) > 0.1
    assert split.schedule_err == pytest.approx(0.0, abs=1e-9)
    assert split.speed_err == pytest.approx(as_predicted.errors.makespan_err)
    assert split.given.errors.sample_mape == pytest.approx(0.0, abs=1e-9)
    assert split.given.differences == ()
    assert all(engine.parted_given is None for engine in split.engines)
    assert split.core_share == pytest.approx(0.5)
    if system == "areal":  # updates land elsewhere between its samples
        assert as_predicted.real_differences and not split.equal_passes
    else:
        assert split.equal_passes


def test_what_the_schedule_predicts_otherwise_stays_when_the_speed_is_given():
    """Rewards that take longer than predicted are no pass."""
    prepared = prepared_run("verl_colocated")
    measured, passes = on_a_noisy_host(prepared)
    training = prepared.scenario.training.model_copy(update={"reward_s": 40.0})
    slow = replace(prepared, scenario=prepared.scenario.model_copy(update={"training": training}))
    split = split_error(slow, measured, passes)
    assert split.given.errors.wall_err > 0.1
    assert split.given.errors.makespan_err == pytest.approx(0.0, abs=1e-9)  # no rollout, no clock


def test_a_pass_that_is_missing_is_named_by_its_number():
    prepared = prepared_run("one_step_off")
    measured, passes = on_a_noisy_host(prepared)
    split = split_error(prepared, measured, [passes[0], np.delete(passes[1], 7)])
    first, second = split.engines
    assert first.parted is None and second.parted is not None
    assert second.measured.passes == second.predicted.passes - 1
    assert not split.equal_passes and "predicted" in split.line


def test_passes_behind_the_record_take_their_profiled_time():
    prepared = prepared_run("verl_colocated", workers=1)
    seconds = np.zeros((1, 5000))
    plain, _ = _recorded(prepared, seconds)
    seconds[0, :10] = 100.0
    slow, [passes] = _recorded(prepared, seconds)
    assert passes["began_s"][10] == pytest.approx(1000.0)
    lost_s = slow.metadata["end_s"] - plain.metadata["end_s"]
    assert 990.0 < lost_s < 1000.0
    assert plain.metadata["end_s"] == pytest.approx(simulate_prepared(prepared).metadata["end_s"])


def test_what_an_engine_reports_is_in_seconds_of_the_run():
    rows = [*range(len(PASS)), *range(10, 10 + len(PASS))]
    passes = passes_of(list(map(float, rows)), 0.5)
    assert passes["began_s"].tolist() == [-0.5, 9.5] and passes["ended_s"].tolist() == [0.5, 10.5]
    assert passes["cpu_s"].tolist() == [2.0, 12.0]
