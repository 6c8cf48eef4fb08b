"""Whole runs with data-parallel ranks: what a scenario may ask for, what a run shows, and that nothing is lost."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simrl.analysis.gpu_hours import waterfall
from simrl.errors import InputError
from simrl.profile.profile import ProfileMetadata, TableProfile, write_profile
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.study.launch import launch
from simrl.systems.recipes import RECIPES, make_system
from tests.conservation import assert_nothing_is_lost
from tests.engine.test_engine import TABLES
from tests.helpers import ROOMY, prepared, scenario, watch

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
UNDRAFTED = [
    name
    for name in RECIPES
    if not (made := make_system(name, {})).speculation and not made.best_of_n
]


@pytest.fixture
def mixture(tmp_path):
    """Return a function that gives a scenario's changes for a small mixture of experts on `dp` ranks."""
    folder = tmp_path / "tiny-moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    wide = TABLES._replace(
        dense_tokens=np.array([1.0, 64, 8192]),
        dense_s=np.array([0.005, 0.006, 0.2]),
        sampled_sequences=np.array([1.0, 1024]),
        sampled_s=np.array([0.001, 0.002]),
        prefill_tokens=np.array([0.0, 8192]),
        prefill_kv_tokens=np.array([0.0, 8192]),
        decode_sequences=np.array([0.0, 1024]),
        decode_kv_tokens=np.array([0.0, 8192]),
        attention_s=np.broadcast_to(np.array([[0.0, 0.0], [0.0, 0.9]]), (2, 2, 2, 2)).copy(),
        expert_tokens=np.array([1.0, 64, 65536]),
        experts_s=np.array([0.002, 0.004, 0.5]),
    )

    def changes(dp=2, ep=None, tp=1, gpus=4, **more):
        ep = tp * dp if ep is None else ep
        metadata = ProfileMetadata(
            model="tiny-moe",
            gpu="h100",
            tp=tp,
            dp=dp,
            ep=ep,
            routing="balanced",
            kind="assumed",
            source="a test",
        )
        path = tmp_path / f"dp{dp}_ep{ep}.parquet"
        write_profile(TableProfile(wide, metadata), path)
        cluster = {"gpu": "h100", "gpus": gpus, "tp": tp, "dp": dp, "ep": ep}
        return {"model": str(folder), "cluster": cluster, "profile": {"path": str(path)}, **more}

    return changes


def test_a_worker_of_several_ranks_has_their_gpus_their_caches_and_their_batches(mixture):
    one, two = prepare(scenario(**mixture(dp=1, ep=1))), prepare(scenario(**mixture(dp=2)))
    assert (one.workers, two.workers) == (4, 2)
    assert two.gpus_per_worker == 2
    assert two.gpus == 4
    assert two.limits.dp == 2
    facts = two.inputs()
    assert facts["kv_cache_tokens_per_worker"] == 2 * two.limits.kv_blocks * two.limits.block_size
    assert two.limits.kv_blocks > one.limits.kv_blocks  # a GPU holds half of the experts
    assert any("ranks in lock step" in words for words in facts["not_modelled"])
    result = simulate(scenario(**mixture(dp=2)))
    assert result.metadata["full_batch"]["sequences"] == 2 * two.limits.max_num_seqs


def test_a_run_shows_what_ranks_wait_for_each_other_and_every_gpu_second_is_somewhere(mixture):
    result = simulate(scenario(**mixture(dp=4)))
    fall = waterfall(result)
    assert fall.gpu_s["lock_step"] > 0
    assert sum(fall.gpu_s.values()) == pytest.approx(fall.total_gpu_s)
    alone = waterfall(simulate(scenario(**mixture(dp=1, ep=1))))
    assert alone.gpu_s["lock_step"] == 0


def test_equal_scenarios_with_ranks_give_equal_tables(mixture):
    one, other = (simulate(scenario("areal", **mixture(dp=2))) for _ in range(2))
    assert one.spans.equals(other.spans)
    assert one.samples.equals(other.samples)


@pytest.mark.parametrize("name", UNDRAFTED)
def test_nothing_is_lost_with_ranks_in_any_system(name):
    limits = ROOMY._replace(
        dp=3, graph_tokens=16, max_num_seqs=4, kv_blocks=60, async_scheduling=name < "m"
    )
    watched = watch(prepared(scenario(name), limits=limits._replace(prefix_caching=True)))
    assert all(engine.limits.dp == 3 for worker in watched.workers for engine in worker.engines)
    assert_nothing_is_lost(watched)


def test_a_lost_worker_comes_back_with_all_its_ranks(mixture):
    lost = {"kind": "lost", "worker": 0, "at_s": 0.2, "back_s": 0.6}
    slow = {"kind": "slow", "worker": 1, "factor": 3.0, "at_s": 0.1}
    assert_nothing_is_lost(
        watch(prepare(scenario("areal", **mixture(dp=2, gpus=8, faults=[lost, slow]))))
    )


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (
            {"dp": 3},
            "cluster.tp × cluster.dp is 3: it does not divide the 4 GPUs; choose a divisor",
        ),
        (
            {"dp": 2, "ep": 4},
            "cluster.ep is 4: all 2 GPUs of a worker (tp 1 × dp 2) share the experts",
        ),
        (
            {"gpus": 12, "dp": 12, "ep": 12},
            "cluster.ep is 12: it does not divide the 16 experts of tiny-moe",
        ),
        (
            {"gpus": 12, "dp": 12, "ep": 1},
            "cluster.tp × cluster.dp is 12: it does not divide the 128 intermediate size",
        ),
        (
            {"dp": 2, "ep": 1},
            "tiny-moe on h100 tp1 dp4 ep4, the scenario has tiny-moe on h100 tp1 dp2; name the profile",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_a_line(mixture, cluster, line):
    changes = mixture(dp=4)
    changes["cluster"] = {"gpu": "h100", "gpus": 4, "tp": 1, "ep": 1, **cluster}
    with pytest.raises(InputError) as refused:
        prepare(scenario(**changes))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_dense_models_and_some_drafters_have_no_ranks_in_lock_step(mixture):
    for cluster, line in (
        (
            {"dp": 2},
            "cluster.dp is 2: qwen3-0.6b has no experts, and its ranks are workers of their own; use 1",
        ),
        ({"ep": 1, "tp": 2}, ""),
        ({"ep": 2, "tp": 2}, "cluster.ep is 2: qwen3-0.6b has no experts; use 1"),
    ):
        asked = scenario(cluster={"gpu": "h100", "gpus": 4, "tp": 1, **cluster})
        if line:
            with pytest.raises(InputError, match=line.replace(".", r"\.")):
                prepare(asked)
        else:
            prepare(asked)
    for name in ("tlt", "specactor"):
        with pytest.raises(InputError, match="not modelled of ranks in lock step; use another"):
            prepare(scenario(name, **mixture(dp=2, gpus=8)))


@pytest.mark.parametrize(
    "speculation",
    ["ngram", "histospec", "siblings", "srt", {"name": "draft_model", "model": "qwen3-0.6b"}],
)
def test_drafts_of_ranks_lose_nothing_and_every_gpu_second_is_somewhere(mixture, speculation):
    system = {"name": "verl_colocated", "speculation": speculation}
    watched = watch(prepare(scenario(system, **mixture(dp=2))))
    assert_nothing_is_lost(watched)
    result = simulate(scenario(system, **mixture(dp=2)))
    fall = waterfall(result)
    assert fall.gpu_s["lock_step"] > 0
    assert sum(fall.gpu_s.values()) == pytest.approx(fall.total_gpu_s)
    assert result.spans.equals(simulate(scenario(system, **mixture(dp=2))).spans)


def test_cuda_graphs_reach_as_far_as_the_drafted_tokens_of_all_sequences(mixture):
    def graph_tokens(speculation):
        system = {"name": "verl_colocated", "speculation": speculation}
        engine = {"max_num_seqs": 20}
        return prepare(scenario(system, **mixture(dp=2, engine=engine))).limits.graph_tokens

    assert graph_tokens("none") == 40
    assert graph_tokens({"name": "ngram", "window": {"kind": "fixed", "tokens": 3}}) == 4 * 40


def test_verl_and_slime_are_launched_with_the_ranks(mixture):
    made = launch(prepare(scenario(**mixture(dp=2))))
    rollout = "actor_rollout_ref.rollout"
    assert (
        made.settings[f"{rollout}.data_parallel_size"]
        == made.settings[f"{rollout}.expert_parallel_size"]
        == "2"
    )
    assert made.settings[f"{rollout}.tensor_model_parallel_size"] == "1"
    plain = launch(prepare(scenario(**mixture(dp=1, ep=1))))
    assert f"{rollout}.tensor_model_parallel_size" in plain.settings
    assert not {f"{rollout}.data_parallel_size", f"{rollout}.expert_parallel_size"} & {
        *plain.settings
    }
    other = launch(prepare(scenario("split", **mixture(dp=2, gpus=8))))
    assert (
        other.settings["--rollout-num-gpus-per-engine"] == other.settings["--sglang-dp-size"] == "2"
    )
