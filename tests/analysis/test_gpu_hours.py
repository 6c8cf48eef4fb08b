"""Where GPU-seconds went: they add up, over any window of any system, and go where a hand count puts them."""

import math
from functools import cache

import pyarrow.compute as pc
import pytest
from hypothesis import given, strategies as st

from simrl.analysis.gpu_hours import PARTS, waterfall
from simrl.result.result import Lane, Result, Step, Work
from simrl.runtime.recorder import Recorder
from simrl.simulate.run import simulate
from tests.helpers import ROOMY, counted, examples, recorder, rollout, rows, scenario, trace

EPOCHS = {
    "steps": 3,
    "prompts_per_step": 4,
    "group": 2,
    "cap_tokens": 200,
    "mean_tokens": 60,
    "sigma": 0.8,
}
EPOCHS |= {"prompt_tokens": 20, "prompts": 4}
SYSTEMS = (
    "verl_colocated",
    "split",
    "one_step_off",
    "streamrl",
    "rhymerl",
    "areal",
    "verl_fully_async",
    "laminar",
)
SYSTEMS += ("april", "rlhfuse", "seer", "tlt", "specactor", "verl_ngram")


@cache
def run(name: str) -> Result:
    return simulate(scenario(name, workload={"synthetic": EPOCHS}))


def total(result: Result) -> float:
    lanes = {row["lane"]: row["gpus"] for row in rows(result.spans)}
    return sum(lanes.values()) * result.metadata["end_s"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_parts_of_a_run_are_all_its_gpu_seconds(name):
    parts = waterfall(run(name)).gpu_s
    assert math.isclose(math.fsum(parts.values()), total(run(name)), rel_tol=1e-12)
    assert all(value >= -1e-9 for value in parts.values()), parts
    assert parts["train"] > 0
    assert parts["decode"] > 0
    assert parts["other"] == parts["undivided"] == 0


@examples(60)
@given(
    name=st.sampled_from(SYSTEMS),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1))
    .map(sorted)
    .filter(lambda x: x[1] - x[0] > 1e-3),
)
def test_the_parts_of_any_window_are_all_its_gpu_seconds(name, ends):
    """I16: the parts of a window are the window."""
    result = run(name)
    a_s, b_s = (share * result.metadata["end_s"] for share in ends)
    fall = waterfall(result, a_s, b_s)
    assert math.isclose(math.fsum(fall.gpu_s.values()), fall.total_gpu_s, rel_tol=1e-11)
    assert all(value >= -1e-9 for value in fall.gpu_s.values())


@examples(15)
@given(
    name=st.sampled_from(("verl_colocated", "areal", "rhymerl", "seer", "tlt", "verl_ngram")),
    seed=st.integers(0, 1000),
    gpus=st.sampled_from((4, 8)),
    kv_cache_tokens=st.sampled_from((None, 400, 700)),
    factor=st.sampled_from((None, 1.5)),
)
def test_no_cluster_no_cache_and_no_fault_makes_a_gpu_second_vanish(
    name, seed, gpus, kv_cache_tokens, factor
):
    """I16: faults and short caches make no GPU-second vanish."""
    faults = [{"kind": "slow", "worker": 0, "factor": factor, "at_s": 0.5}] if factor else []
    faults += [{"kind": "lost", "worker": 1, "at_s": 0.4, "back_s": 0.9}] if factor else []
    result = simulate(
        scenario(
            name,
            seed=seed,
            cluster={"gpu": "h100", "gpus": gpus, "tp": 1},
            workload={"synthetic": EPOCHS},
            engine={"kv_cache_tokens": kv_cache_tokens},
            faults=faults,
        )
    )
    fall = waterfall(result)
    assert math.isclose(math.fsum(fall.gpu_s.values()), total(result), rel_tol=1e-12)
    assert abs(fall.gpu_s["host"]) < 1e-9, "the engine says what every pass went to"
    assert (fall.gpu_s["slowed"] > 0) == (factor is not None)


def test_what_passes_went_to_is_as_long_as_the_rollout():
    """I15: the work of a rollout span is as long as the span."""
    for name in SYSTEMS:
        for span in rows(run(name).spans):
            work = [span[field] for field in Work._fields[:9]]
            if span["kind"] == "rollout":
                assert sum(work) == pytest.approx(span["ended_s"] - span["started_s"], rel=1e-9)
            else:
                assert work == [None] * 9


def test_the_samples_are_those_that_the_updates_of_the_window_trained():
    result = run("areal")
    finished_s = result.steps.column("finished_s").to_pylist()
    trained = result.steps.column("samples").to_pylist()
    assert waterfall(result).samples == sum(trained)
    assert waterfall(result, finished_s[0], finished_s[-1]).samples == sum(trained[1:])
    assert waterfall(result, 0.0, finished_s[0] / 2).samples == 0
    assert waterfall(result, 0.0, finished_s[0] / 2).per_sample == {}


def by_hand() -> Recorder:
    """Two workers of two GPUs and a trainer of four, for 10 s: a full batch is 4 sequences, which take 2 s a pass."""
    return Recorder([Lane("rollout-000", 2), Lane("rollout-001", 2), Lane("train", 4)])


FULL = {"full_batch": {"sequences": 4, "context_tokens": 10.0, "pass_s": 2.0}}


def test_idle_workers_wait_beside_busy_ones_or_for_the_trainer_or_for_something_else():
    record = by_hand()
    record.span(0, "rollout", 0.0, 6.0, 0, 10, Work(decode_s=6.0, decodes=12))
    record.span(1, "rollout", 0.0, 2.0, 0, 10, Work(decode_s=2.0, decodes=1))
    record.span(2, "train", 5.0, 9.0, 0)
    parts = waterfall(record.result(10.0, FULL)).gpu_s
    assert parts["tail_idle"] == pytest.approx(2 * 4)  # worker 1, while worker 0 rolls out
    assert parts["trainer_wait"] == pytest.approx(4 * 3)  # both, from 6 to 9
    assert parts["other_wait"] == pytest.approx(4 * 1)
    assert parts["train_idle"] == pytest.approx(4 * 6)
    assert parts["decode"] == pytest.approx(
        (12 + 1) * 2 * 2.0 / 4
    )  # 13 sequences, half a second each, on two GPUs
    assert parts["small_batches"] == pytest.approx(2 * (6 + 2) - 13)


def test_what_a_span_says_of_its_passes_is_cut_with_it():
    record = recorder()
    record.span(
        0,
        "rollout",
        0.0,
        4.0,
        0,
        8,
        Work(decode_s=1.0, prefill_s=1.0, drafts_wasted_s=2.0, decodes=4),
    )
    parts = waterfall(record.result(4.0, FULL), 0.0, 3.0).gpu_s
    assert (parts["prefill"], parts["drafts_wasted"]) == pytest.approx((0.75, 1.5))
    assert sum(parts.values()) == pytest.approx(3.0)
    assert sum(waterfall(record.result(8.0, FULL), 1.0, 3.0).gpu_s.values()) == pytest.approx(2.0)


def test_what_was_generated_and_dropped_takes_its_share_of_the_rollout():
    record = recorder()
    record.span(0, "rollout", 0.0, 8.0, 0, 8, Work(decode_s=8.0, decodes=8))
    kept, lost = rollout(0, {0: 6}), rollout(1, {0: 2})
    for each in (kept, lost):
        record.request_ended(each)
    record.trained(Step(0, 0, 8.0, 8.0, 1, 4, 6, 0.0, 0), [kept])
    record.dropped([lost])
    parts = waterfall(record.result(8.0, FULL)).gpu_s
    assert parts["dropped"] == pytest.approx(2.0)
    assert parts["ahead"] == 0
    assert parts["decode"] + parts["small_batches"] == pytest.approx(6.0)


def test_what_no_update_trained_by_the_end_is_for_after_it():
    record = recorder()
    record.span(0, "rollout", 0.0, 8.0, 0, 8, Work(decode_s=8.0, decodes=8))
    kept, more = rollout(0, {0: 6}), rollout(1, {0: 2}, done=False)
    for each in (kept, more):
        record.request_ended(each)
    record.trained(Step(0, 0, 8.0, 8.0, 1, 4, 6, 0.0, 0), [kept])
    assert waterfall(record.result(8.0, FULL)).gpu_s["ahead"] == pytest.approx(2.0)


def test_a_real_engine_tells_its_tokens_and_the_rest_of_its_time_is_not_divided():
    record = recorder()
    record.span(0, "rollout", 0.0, 8.0, 0, 10)
    record.request_ended(rollout(0, {0: 10}))
    record.trained(Step(0, 0, 8.0, 8.0, 1, 4, 10, 0.0, 0), [rollout(0, {0: 10})])
    parts = waterfall(record.result(8.0, FULL)).gpu_s
    assert parts["decode"] == pytest.approx(10 * 0.5)
    assert parts["undivided"] == pytest.approx(3.0)


def test_a_kind_of_span_that_is_new_is_not_lost():
    record = recorder()
    record.span(0, "meditate", 0.0, 8.0, 0)
    assert waterfall(record.result(8.0, {})).gpu_s["other"] == 8.0


def test_a_cache_that_does_not_suffice_costs_preemptions_and_nothing_else():
    narrow = ROOMY._replace(kv_blocks=5)
    result = counted(
        "verl_colocated", {}, trace([[[(4, 30)] * 4]] * 2), steps=2, limits=narrow
    ).result
    assert sum(pc.fill_null(result.spans.column("preemptions"), 0).to_pylist()) > 0
    parts = waterfall(result).gpu_s
    assert not any(
        parts[k] for k in ("recompute_moved", "recompute_reloaded", "recompute_redrafted")
    )
    assert set(parts) == set(PARTS)


def test_weights_that_arrive_in_mid_response_cost_prefill_and_preemptions_do_too():
    long = simulate(
        scenario(
            {"name": "areal", "eta": 2},
            workload={"synthetic": {**EPOCHS, "cap_tokens": 2000, "mean_tokens": 700}},
        )
    )
    parts = waterfall(long).gpu_s
    assert parts["recompute_reloaded"] > 0
    assert parts["recompute_preempted"] == parts["recompute_moved"] == 0
    tight = waterfall(
        simulate(
            scenario(
                "verl_colocated", workload={"synthetic": EPOCHS}, engine={"kv_cache_tokens": 240}
            )
        )
    ).gpu_s
    assert tight["recompute_preempted"] > 0
    assert tight["recompute_reloaded"] == 0


def test_drafts_are_paid_for_by_what_stood_and_by_what_was_thrown_away():
    parts = waterfall(run("tlt")).gpu_s
    assert parts["drafts_stood"] > 0
    assert parts["drafts_wasted"] > 0
    assert waterfall(run("verl_colocated")).gpu_s["drafts_wasted"] == 0
