"""Clusters that are not of one kind: a pool of training GPUs of its own, nodes and links, and GPUs by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simrl.analysis.explanation import explain_result
from simrl.errors import InputError
from simrl.profile.advice import advice
from simrl.profile.hardware import GPUS, known_gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import MODELS
from simrl.profile.profilers.roofline import roofline_profile
from simrl.result.metrics import prices, summary
from simrl.scenario.load import ScenarioFile
from simrl.show.inputs import inputs, provenance
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.study.compare import without_colocated
from simrl.study.goal import Goal
from simrl.study.search_space import make_space
from simrl.systems.recipes import RECIPES, make_system
from simrl.training.config import TrainingConfig
from simrl.training.weight_sync import loading_s
from tests.helpers import scenario, update_phases

H20 = {"gpu": "h20", "gpus": 4, "tp": 1, "cost_per_gpu_hour": 1.0}
LENGTHS = np.array([4000, 3000, 2000, 1000])
POOLS = {**H20, "train": {"gpu": "h800", "gpus": 2, "cost_per_gpu_hour": 3.0}}


def on_pools(system: Any = "one_step_off", cluster: dict[str, Any] = POOLS, **changes: Any):
    return scenario(
        cluster=cluster, system={"name": system} if isinstance(system, str) else system, **changes
    )


def refusal(asked: Any) -> str:
    with pytest.raises(InputError) as refused:
        prepare(asked)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_rollout_has_the_clusters_gpus_and_training_those_of_its_pool():
    prepared = prepare(on_pools())
    assert (prepared.workers, prepared.train_gpus, prepared.gpus) == (4, 2, 6)
    assert (prepared.gpu.name, prepared.train_gpu.name, prepared.profile.metadata.gpu) == (
        "h20",
        "h800",
        "h20",
    )


def test_training_takes_the_time_and_the_memory_of_its_own_gpus():
    costs, slow = (
        prepare(on_pools(cluster=each)).training_costs(2)
        for each in (POOLS, {**POOLS, "train": {"gpus": 2}})
    )
    assert costs.gpu.name == "h800" and slow.gpu.name == "h20"
    assert sum(s for _, s in update_phases(costs, LENGTHS)) < sum(
        s for _, s in update_phases(slow, LENGTHS)
    )
    small = {**POOLS, "train": {"gpu": "a40", "gpus": 1, "cost_per_gpu_hour": 1.0}}
    assert "on 1 a40 needs" in refusal(on_pools(cluster=small, model="qwen3-4b"))


def test_weights_go_from_pool_to_pool_at_the_rate_of_the_slower_network():
    def load_s(**train: Any) -> float:
        training = {"load_overhead_s": 0.0}
        return prepare(
            on_pools(
                cluster={**POOLS, "train": {"gpus": 2, "cost_per_gpu_hour": 3.0, **train}},
                training=training,
            )
        ).costs.load_s

    weight_bytes = MODELS["qwen3-0.6b"].weight_bytes
    assert load_s(gpu="h800") == pytest.approx(weight_bytes / 50e9)
    assert load_s(gpu="a100") == pytest.approx(weight_bytes / 25e9)
    assert load_s(gpu="h800", network_bytes_per_s=10e9) == pytest.approx(weight_bytes / 10e9)


def test_weights_that_are_broadcast_take_the_link_within_a_domain_and_the_network_between_pools():
    model, config = MODELS["qwen3-8b"], TrainingConfig(weight_sync="gather_broadcast")
    b200, gb200, h800 = (GPUS[name] for name in ("b200", "gb200", "h800"))
    assert loading_s(config, model, gb200, 8, 8, 1) == pytest.approx(
        model.weight_bytes / 900e9
    )  # 16 of a rack's 72
    assert loading_s(config, model, b200, 8, 8, 1) == pytest.approx(
        model.weight_bytes / 50e9
    )  # a second node
    assert loading_s(config, model, b200, 2, 2, 1) == pytest.approx(model.weight_bytes / 900e9)
    assert loading_s(config, model, b200, 2, 2, 1, trainer=h800) == pytest.approx(
        model.weight_bytes / 50e9
    )


def test_a_load_takes_the_link_where_rollout_and_training_are_in_one_domain():
    def load_s(cluster: dict[str, Any], **training: Any) -> float:
        return prepare(
            on_pools("one_step_off", {"tp": 1, **cluster}, training=training)
        ).costs.load_s

    weight_bytes = MODELS["qwen3-0.6b"].weight_bytes
    for each in ({"load_overhead_s": 0.0}, {"weight_sync": "gather_broadcast"}):
        assert load_s({"gpu": "h800", "gpus": 8}, **each) == pytest.approx(weight_bytes / 200e9)
        assert load_s({"gpu": "h800", "gpus": 16}, **each) == pytest.approx(weight_bytes / 50e9)
        pools = {"gpu": "h800", "gpus": 4, "train": {"gpus": 4}}
        assert load_s(pools, **each) == pytest.approx(
            weight_bytes / 50e9
        )  # which may stand anywhere


def test_gpus_of_another_kind_have_a_price_of_their_own():
    with pytest.raises(
        ValueError, match=r"train.cost_per_gpu_hour is missing: a h800 has another price than a h20"
    ):
        on_pools(cluster={**H20, "train": {"gpu": "h800", "gpus": 2}})
    assert on_pools(cluster={**H20, "train": {"gpu": "h800", "gpus": 2, "cost_per_gpu_hour": 0}})


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"gpu": "h100", "nvlink_domain": 12}, "nvlink_domain is 12: not whole nodes of 8 GPUs"),
        ({"gpu": "h100", "nvlink_domain": 3}, "nvlink_domain is 3: not whole nodes of 8 GPUs"),
        ({"gpu": "gb200", "gpus_per_node": 16}, "nvlink_domain is 72: not whole nodes of 16 GPUs"),
        (
            {"train": {"gpus": 2, "nvlink_domain": 12}},
            "train.nvlink_domain is 12: not whole nodes of 8 GPUs",
        ),
    ],
)
def test_nodes_and_domains_that_cannot_be_are_refused_also_where_one_is_the_data_sheets(
    cluster: dict[str, Any], line: str
):
    with pytest.raises(ValueError, match=line):
        on_pools(cluster={**H20, **cluster})


def test_the_cost_is_that_of_both_pools():
    asked = on_pools()
    result = simulate(asked)
    row = summary(result, 0, *prices(asked.cluster.model_dump()))
    hours, trained = row["gpu_hours_per_1k_samples"], row["train_gpu_hours_per_1k_samples"]
    assert trained == pytest.approx(hours * 2 / 6)
    assert row["train_cost_per_1k_samples"] == pytest.approx(3.0 * trained)
    assert row["cost_per_1k_samples"] == pytest.approx((hours - trained) + 3.0 * trained)
    rollout, training = explain_result(result).pools
    assert (rollout.gpus, rollout.gpu, training.gpus, training.gpu) == (4, "h20", 2, "h800")
    assert training.cost == pytest.approx(3.0 * training.gpu_hours)
    goal = Goal(batch_samples=100.0, price=3.0, updates=10, budget=1e9)
    assert goal.cost(row) == pytest.approx(row["cost_per_1k_samples"])


def test_a_pool_of_the_clusters_kind_and_price_needs_only_its_gpus():
    small = {**H20, "gpus_per_node": 2}  # so that one pool's weights take the network, too
    asked = on_pools(cluster={**small, "train": {"gpus": 2}})
    assert asked.cluster.words() == "4 h20 + 2 h20"
    assert prices(asked.cluster.model_dump()) == (1.0, 1.0)
    one = on_pools({"name": "one_step_off", "rollout_share": 4 / 6}, {**small, "gpus": 6})
    pooled, shared = (summary(simulate(each), 0, 1.0) for each in (asked, one))
    assert pooled["samples_per_s"] == shared["samples_per_s"]


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ({"name": "verl_colocated"}, "it trains on the GPUs that roll out"),
        ({"name": "verl_2x"}, "it trains on the GPUs that roll out"),
        (
            {"name": "areal", "adapt_split_every": 2},
            "adapt_split_every lends GPUs from one pool to the other",
        ),
        ({"name": "areal", "rollout_share": 0.5}, "leave out its rollout_share"),
    ],
)
def test_systems_that_cannot_take_the_pools_as_they_are_are_refused(
    system: dict[str, Any], words: str
):
    line = refusal(on_pools(system))
    assert line.startswith(f"system {system['name']}: cluster.train gives training GPUs of its own")
    assert words in line


def test_every_system_runs_on_two_pools_or_is_refused_in_a_line():
    for name in RECIPES:
        if make_system(name, {}).rollout_share is None:
            assert "cluster.train" in refusal(on_pools(name))


def test_a_comparison_leaves_out_systems_that_train_where_they_roll_out():
    several = [on_pools(name) for name in ("verl_colocated", "one_step_off", "areal")]
    kept, lines = without_colocated(several)
    assert [each.system.name for each in kept] == ["one_step_off", "areal"]
    assert lines == [
        "Left out, as cluster.train gives training GPUs of its own and they train where they roll out: verl_colocated"
    ]
    assert without_colocated(several[:1]) == (several[:1], [])  # which its check then refuses


def test_nodes_and_links_are_those_of_the_data_sheet_or_of_the_scenario():
    def kind(**cluster: Any):
        return on_pools(cluster={**H20, **cluster}).cluster.rollout_kind

    assert kind().bytes_per_s_among(8) == pytest.approx(0.7 * 450e9)
    assert kind().bytes_per_s_among(16) == pytest.approx(
        0.7 * 450e9
    )  # eight ports of 50 GB/s are faster than that
    assert kind(network_bytes_per_s=10e9).bytes_per_s_among(16) == pytest.approx(80e9)
    assert kind(gpus_per_node=4).nvlink_domain == 4
    assert kind(gpus_per_node=4, nvlink_domain=8).nvlink_domain == 8
    rack = kind(gpu="GB200")
    assert (rack.gpus_per_node, rack.nvlink_domain) == (4, 72)
    assert kind(gpu="GB200", network_bytes_per_s=1e9).bytes_per_s_among(72) == pytest.approx(
        0.7 * 900e9
    )


def test_a_worker_across_nodes_pays_the_network_in_its_step_times():
    model, h100 = MODELS["qwen3-32b"], GPUS["h100"]
    slow = h100.model_copy(update={"nvlink_domain": 4, "network_bytes_per_s": 10e9})
    assert roofline_profile(model, slow, 4).prefill_s(4096) == roofline_profile(
        model, h100, 4
    ).prefill_s(4096)
    assert roofline_profile(model, slow, 8).prefill_s(4096) > 2 * roofline_profile(
        model, h100, 8
    ).prefill_s(4096)


def test_a_derived_profile_of_one_node_pays_the_network_where_its_worker_spans_several():
    cluster = {"gpu": "h100", "gpus": 8, "tp": 4, "nvlink_domain": 2}
    profile = {"path": "profiles/qwen3-8b_h100_tp4.parquet", "roofline": None}
    across, within = (
        prepare(scenario(model="qwen3-8b", cluster=cluster | domain, profile=profile)).profile
        for domain in ({}, {"nvlink_domain": 8})
    )
    assert (across.metadata.kind, within.metadata.kind) == ("extrapolated", "derived")
    assert across.prefill_s(4096) > 1.2 * within.prefill_s(4096)
    assert (
        across.tables.attention_s.tolist() == within.tables.attention_s.tolist()
    )  # has no collectives


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100"),
        ("H100-SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("H200 SXM 141 GB", "h200"),
        ("NVIDIA B200", "b200"),
        ("GB200 NVL72", "gb200"),
        ("nvidia h800", "h800"),
        ("H20", "h20"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),  # another memory
        ("H20-3e", "H20-3e"),  # another data sheet
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),  # the memory of its processor
        ("NVIDIA GH200 144G HBM3e", "gh200-144g"),
        ("GH200 96GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("geforce rtx 4090 24gb", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 5090", "rtx5090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI325X 256GB", "mi325x"),
        ("Ascend910B3", "ascend910b3"),
        ("910B3", "ascend910b3"),
    ],
)
def test_a_gpu_is_known_by_its_common_spellings_and_another_data_sheet_is_not(
    written: str, name: str
):
    assert known_gpu(written) == name


def test_every_data_sheet_has_its_source_and_whole_nodes_in_a_domain():
    for kind in GPUS.values():
        assert kind.source
        assert kind.nvlink_domain % kind.gpus_per_node == 0 or kind.name == "h100-nvl"  # pairs


def test_a_missing_profile_is_answered_with_the_ones_there_are_and_the_commands_that_work():
    def line(model: str, gpu: str, tp: int) -> str:
        cluster, path = (
            {"gpu": gpu, "gpus": 8, "tp": tp},
            f"profiles/{model}_{gpu}_tp{tp}_mine.parquet",
        )
        return refusal(
            scenario(model=model, cluster=cluster, profile={"path": path, "roofline": None})
        )

    assert "simrl has it: profile.path=" in line("qwen3-8b", "h100", 1)
    of_h800 = line("qwen3-8b", "h800", 1)
    assert "there are profiles of qwen3-8b on h800 for tp2" in of_h800
    assert (
        "`simrl profile derive qwen3-8b --gpu h800 --tp 1 -o profiles/qwen3-8b_h800_tp1_mine.parquet`"
        in of_h800
    )
    assert "take profile.path=shipped" in of_h800
    of_a40 = line("qwen3-8b", "a40", 1)
    assert "there are profiles of qwen3-8b on a100" in of_a40
    assert (
        "profile derive qwen3-8b --gpu a40" in of_a40
    )  # estimated, as nobody measured its kernels


@pytest.mark.parametrize(
    ("model", "gpu", "split", "weights", "measure"),
    [
        ("qwen3-8b", "a100", {"tp": 1}, "fp8", False),
        ("qwen3-8b", "h100", {"tp": 1}, "w4a16_mxfp4", False),
        ("qwen3-8b", "h100", {"tp": 3}, "bf16", True),
    ],
)
def test_nothing_is_advised_for_an_impossible_profile(
    model, gpu, split, weights, measure, monkeypatch
):
    monkeypatch.setattr(
        "simrl.profile.advice.find_spec", lambda _: None
    )  # no database is installed
    wanted = ProfileMetadata(model=model, gpu=gpu, precision=weights, kind="", source="", **split)
    line = advice(wanted, MODELS[model], "p.parquet")
    assert "profile derive" not in line
    assert ("simrl measure" in line) == measure
    assert line


def test_a_tp_that_neither_divides_the_kv_heads_nor_is_a_multiple_is_refused():
    words = "tp is 20: it neither divides the 8 KV heads of qwen3-14b nor is a multiple of them"
    with pytest.raises(InputError, match=f"roofline: {words}"):
        roofline_profile(MODELS["qwen3-14b"], GPUS["h100"], 20)
    cluster = {"gpu": "h100", "gpus": 40, "tp": 20}
    assert f"cluster.{words}" in refusal(scenario(model="qwen3-14b", cluster=cluster))


def test_a_tp_beyond_the_heads_is_not_advised(monkeypatch):
    monkeypatch.setattr("simrl.profile.advice.find_spec", lambda _: None)
    wanted = ProfileMetadata(model="qwen3-8b", gpu="h100", tp=64, kind="", source="")
    assert "profile derive" not in advice(wanted, MODELS["qwen3-8b"], "p.parquet")


def test_experts_on_a_gpu_without_measured_kernels_have_a_roofline():
    cluster = {"gpu": "a40", "gpus": 64, "tp": 2, "dp": 2, "ep": 4}
    profile = prepare(scenario(model="qwen3-30b-a3b", cluster=cluster)).profile
    assert profile.metadata.kind == "assumed"
    assert profile.tables.expert_tokens.size  # apart, as attention has two ranks


def of_experts(**changes: Any) -> str:
    cluster = {"gpu": "h200", "gpus": 8, "tp": 2, "ep": 2}
    return refusal(scenario(**{"model": "qwen3-235b-a22b", "cluster": cluster, **changes}))


def test_for_experts_in_fp8_the_fast_precision_is_advised_first_and_a_file_is_named_with_its_precision(
    tmp_path,
):
    profile = {"path": str(tmp_path / "qwen3-235b-a22b_h200_tp2_ep2.parquet"), "roofline": None}
    line = of_experts(precision={"weights": "fp8"}, profile=profile)
    assert (
        "no such profile; experts in fp8 with one scale a tensor were measured slower than in bf16"
        in line
    )
    assert "precision.weights=fp8-block; " in line
    assert f"and set profile.path={tmp_path}/qwen3-235b-a22b_h200_tp2_ep2_fp8.parquet" in line
    plain = of_experts(profile=profile)
    assert "fp8 with" not in plain and "set profile.path" not in plain


def test_a_model_of_its_own_config_is_answered_with_what_is_left_to_do(tmp_path, monkeypatch):
    config = {
        "architectures": ["FooMoeForCausalLM"],
        "model_type": "foo_moe",
        "hidden_size": 2048,
        "vocab_size": 151936,
    }
    config |= {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    config |= {
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = {"path": "none.parquet", "roofline": None}
    monkeypatch.setattr("simrl.profile.advice.find_spec", lambda _: None)
    line = of_experts(model=str(tmp_path), profile=profile)
    assert (
        f"derive one with `simrl profile derive {tmp_path} --gpu h200 --tp 2 --ep 2 -o none.parquet`"
        in line
    )
    assert (
        "take profile.path=shipped, carried over from the nearest profile or the data sheet" in line
    )
    alone = of_experts(
        model=str(tmp_path), profile=profile, cluster={"gpu": "h200", "gpus": 8, "tp": 2}
    )
    assert alone.endswith("; or measure your own engine with `simrl measure`")


def test_a_tp_that_does_not_divide_is_answered_with_some_that_divide_gpus_and_heads():
    line = refusal(scenario(model="qwen2.5-7b", cluster={"gpu": "h100", "gpus": 24, "tp": 3}))
    assert (
        line
        == "cluster.tp is 3: it does not divide the 28 attention heads of qwen2.5-7b; choose a divisor, such as 1, 2, 4"
    )


def test_the_page_on_clusters_has_the_data_sheets():
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    for kind in GPUS.values():
        memory = f"{kind.memory_bytes / 1e9:.1f} | {kind.memory_bytes_per_s / 1e12:.3g} | {kind.bf16_flops / 1e12:.4g}"
        lower = " | ".join(
            f"{rate / 1e12:g}" if rate else "–" for rate in (kind.fp8_flops, kind.fp4_flops)
        )
        host = f"{kind.host_bytes_per_s / 1e9:g} | {kind.host_speed:g}"
        links = f"{kind.link_bytes_per_s / 1e9:g} | {kind.nvlink_domain} | {kind.network_bytes_per_s / 1e9:g}"
        assert (
            f"| {kind.name} | {memory} | {lower} | {links} | {kind.gpus_per_node} | {host} |"
            in page
            or f"`{kind.name}` is one core" in page
        )


def test_a_search_varies_the_gpus_of_both_pools_and_no_share():
    data = on_pools().model_dump(exclude={"system", "variant", "framework"}) | {
        "systems": ["areal"]
    }
    space = make_space(lambda settings: ScenarioFile("test", settings, data), {})
    assert {"cluster.gpus=1,2,4", "cluster.train.gpus=1,2"} <= {*space.words}
    assert not any("rollout_share" in words or "colocated" in words for words in space.words)


def test_a_report_names_both_pools_and_their_links():
    found = {entry.name: entry.value for entry in inputs(simulate(on_pools()).metadata)}
    assert found["cluster"].startswith("4 h20 + 2 h800, tp 1: 4 rollout workers, 2 GPUs that train")
    assert found["links"].endswith("50 GB/s a GPU from pool to pool")


def test_a_table_names_the_links_of_each_kind_once_whichever_runs_have_it():
    """The file compares two pools with one of them alone."""
    runs = (on_pools(), on_pools(cluster={**H20, "gpu": "h800"}))
    (links,) = [
        line
        for line in provenance(prepare(run).inputs() for run in runs)
        if line.startswith("Links:")
    ]
    assert links.count("h800 in nodes of 8") == links.count("h20 in nodes of 8") == 1
