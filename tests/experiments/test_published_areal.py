"""The predictions of AReaL: what its baseline is given, and what is counted."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from experiments.reproduce import areal, lab
from experiments.reproduce.ledger import read_ledger


def memory_share(system: dict) -> float:
    inputs = read_ledger("areal").middle
    run = areal.scenario(inputs, areal.LARGE, 192, system, inputs["cap_tokens"])
    return run.engine.gpu_memory_utilization


def test_engines_have_the_share_of_memory_that_the_published_scripts_give_them():
    inputs = read_ledger("areal").middle
    assert memory_share(areal.verl(inputs)) == inputs["verl_gpu_memory_utilization"] == 0.4
    assert memory_share(areal.areal(inputs, eta=8)) == inputs["gpu_memory_utilization"] == 0.7
    assert (
        memory_share({**areal.verl(inputs), "name": "distflow"}) == 0.7
    )  # AReaL itself, synchronously


def test_only_the_baseline_goes_without_cuda_graphs_and_only_where_it_is_assumed_to():
    inputs = read_ledger("areal").middle

    def launches_one_by_one(system: dict, enforce_eager: bool) -> bool:
        changed = {**inputs, "enforce_eager": enforce_eager}
        run = areal.scenario(changed, areal.SMALL, 128, system, inputs["cap_tokens"])
        return run.engine.enforce_eager

    assert launches_one_by_one(areal.verl(inputs), True)
    assert not launches_one_by_one(areal.verl(inputs), False)
    assert not launches_one_by_one(areal.areal(inputs, eta=8), True)


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
