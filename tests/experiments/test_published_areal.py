"""The predictions of AReaL: what its baseline is given, and what is counted."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from experiments.reproduce import areal, lab
from experiments.reproduce.ledger import read_ledger
from simrl.engine.config import EngineConfig
from simrl.pipelines.areal import CONCURRENT_BATCHES

INPUTS = read_ledger("areal").middle


def engine_of(system: dict, model: str = areal.SMALL, gpus: int = 128) -> EngineConfig:
    return areal.scenario(INPUTS, model, gpus, system, INPUTS["cap_tokens"]).engine


def test_engines_have_the_share_of_memory_that_the_published_scripts_give_them():
    assert engine_of(areal.verl(INPUTS)).gpu_memory_utilization == 0.4
    for eta in (0, 8):
        assert engine_of(areal.areal(INPUTS, eta)).gpu_memory_utilization == 0.7


def test_the_baseline_runs_on_sglang_with_cuda_graphs_like_areal():
    for system in (areal.verl(INPUTS), areal.areal(INPUTS, eta=8)):
        engine = engine_of(system)
        assert engine.scheduler == "sglang" and not engine.enforce_eager
        assert engine.reserve_bytes == 0 and engine.log_probs


def test_the_baseline_falls_back_on_vllm_without_graphs_at_32b_and_on_64_nodes():
    for model, gpus in ((areal.LARGEST, 384), (areal.LARGE, 512)):
        engine = engine_of(areal.verl(INPUTS), model, gpus)
        assert engine.preset == "vllm-0.8" and engine.scheduler == "vllm" and engine.enforce_eager
        assert engine_of(areal.areal(INPUTS, eta=8), model, gpus).scheduler == "sglang"
    assert engine_of(areal.verl(INPUTS), areal.LARGE, 256).scheduler == "sglang"


def test_the_synchronous_areal_is_the_one_on_divided_gpus_without_staleness_and_log_probs():
    synchronous, asynchronous = areal.areal(INPUTS, 0), areal.areal(INPUTS, 8)
    assert synchronous["name"] == "areal" and synchronous["rollout_share"] == 0.75
    assert synchronous["log_probs"] == 0 and asynchronous["log_probs"] == 1


def test_training_runs_have_four_batches_at_once_and_the_benchmark_of_fig_4_has_one():
    batch = INPUTS["prompts"]
    assert areal.areal(INPUTS, 8)["max_concurrent"] == CONCURRENT_BATCHES * batch
    assert areal.fig4(INPUTS)["max_concurrent"] == batch


def test_concurrent_prompts_are_divided_like_gpus_and_prompts():
    run = areal.scenario(INPUTS, areal.LARGE, 192, areal.areal(INPUTS, 8), INPUTS["cap_tokens"])
    assert run.system.model_dump()["max_concurrent"] == 4 * run.workload.synthetic.prompts_per_step


@pytest.mark.parametrize(
    ("row", "updates", "gpus", "tp"),
    [("1p5b", 250, 16, 1), ("7b", 250, 48, 1), ("14b", 80, 32, 4), ("32b", 60, 96, 8)],
)
def test_hours_are_those_of_the_printed_updates_on_the_printed_nodes(
    row: str, updates: int, gpus: int, tp: int
):
    runs = []

    class Noting:
        def run(self, scenario):
            runs.append(scenario)
            return {"step_s": 36.0}

    assert areal.ROWS[f"areal-hours-{row}"](Noting(), INPUTS) == [updates / 100] * 3
    assert [run.system.name for run in runs] == ["areal", "verl_colocated", "areal"]
    for run in runs:
        assert (run.cluster.gpus, run.cluster.tp) == (gpus, tp)


def test_what_is_generated_before_the_warm_up_ends_or_after_the_last_update_does_not_count():
    result = SimpleNamespace(
        steps=pa.table({"finished_s": [10.0, 20.0]}),
        segments=pa.table(
            {
                "tokens": [100, 100, 100, 0],
                "started_s": [
                    0.0,
                    5.0,
                    15.0,
                    12.0,
                ],  # before; half of it; half of it; a stay that came to nothing
                "ended_s": [10.0, 15.0, 25.0, 12.0],
            }
        ),
    )
    assert lab.generated_tokens_per_s(result, warmup_steps=1) == pytest.approx((50 + 50) / 10)
    assert lab.generated_tokens_per_s(result, warmup_steps=0) == pytest.approx(
        (100 + 100 + 50) / 20
    )


@pytest.mark.parametrize("eta", [4, 8])
def test_a_run_under_a_bound_has_batches_of_its_own_for_each_that_it_may_submit(eta: int):
    inputs = read_ledger("areal").middle
    run = areal.scenario(inputs, areal.SMALL, 128, areal.areal(inputs, eta), inputs["cap_tokens"])
    assert run.workload.synthetic.steps >= run.steps + eta
    assert run.warmup_steps < run.steps
