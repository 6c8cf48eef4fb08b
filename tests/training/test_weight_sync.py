"""Weight sync by method: its mechanisms by hand, the measured rows, and what a result says of it."""

import runpy
from pathlib import Path

import pytest
from rich.console import Console

from simrl.analysis.explanation import explain_result
from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.scenario.load import load_scenarios
from simrl.show.inputs import inputs, provenance
from simrl.show.tables.explain import print_explanation
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.training.config import TrainingConfig, assumed_s
from simrl.training.weight_sync import (
    HOST_BYTES_PER_S,
    PAUSE_S,
    SOURCES,
    TENSOR_S,
    copied_bytes_per_s,
    extrapolated,
    loading_s,
    moved_bytes,
    publication_s,
    tensors_held,
)
from tests.helpers import rows, scenario

ROOT = Path(__file__).parents[2]
H100 = GPUS["h100"]
SMALL, LARGE, EXPERTS = MODELS["qwen3-8b"], MODELS["qwen3-32b"], MODELS["qwen3-30b-a3b"]
METHODS = list(SOURCES)


def with_host(speed):
    return H100.model_copy(update={"host_speed": speed})


def seconds(method, model=SMALL, gpus=16, workers=4, tp=4, host_speed=1.0, **training):
    config = TrainingConfig(
        weight_sync=method, **{f"weight_sync_{key}": value for key, value in training.items()}
    )
    kind = with_host(host_speed)
    return (
        publication_s(config, model, kind, gpus),
        loading_s(config, model, kind, gpus, workers, tp),
    )


# Mechanisms.


@pytest.mark.parametrize("method", METHODS)
def test_more_bytes_take_longer(method):
    assert sum(seconds(method, LARGE)) > 1.5 * sum(seconds(method, SMALL))


@pytest.mark.parametrize("method", METHODS)
def test_offloaded_weights_come_from_the_host_first_a_shard_a_gpu(method):
    on, off = seconds(method, offload=True), seconds(method)
    assert on[0] - off[0] == pytest.approx(4 * SMALL.parameters / 16 / 2.2e9) and on[1] == off[1]


def test_tensors_are_counted_as_in_a_checkpoint():
    assert MODELS["qwen3-0.6b"].tensors == 28 * 11 + 2  # its embeddings are the output head
    assert SMALL.tensors == 399
    assert EXPERTS.tensors == 48 * (4 + 2 + 2 + 1 + 3 * 128) + 3


def test_a_broadcast_takes_the_slowest_of_its_ends_and_one_bucket_of_the_others():
    filled, sent, loaded = (
        LARGE.weight_bytes / HOST_BYTES_PER_S["broadcast"],
        LARGE.weight_bytes / 50e9,
        TENSOR_S * LARGE.tensors,
    )
    buckets = 31  # of 2 GiB
    publication, load = seconds("broadcast", LARGE)
    assert load == pytest.approx(PAUSE_S + (sent + loaded) / buckets)
    assert publication - seconds("gather_broadcast", LARGE)[0] == pytest.approx(filled)
    slow = seconds("broadcast", LARGE, tensor_s=0.1)
    assert slow[0] == publication, "the trainer does not wait for tensors that engines load"
    assert slow[1] == pytest.approx(
        PAUSE_S + 0.1 * LARGE.tensors - filled + (sent + filled) / buckets
    )


def test_without_overlap_the_ends_of_a_broadcast_add_up():
    serial = sum(seconds("broadcast", LARGE, overlap=False))
    assert serial == pytest.approx(
        sum(seconds("gather_broadcast", LARGE))
        + PAUSE_S
        + LARGE.weight_bytes / HOST_BYTES_PER_S["broadcast"]
        + TENSOR_S * LARGE.tensors
    )


def test_engines_wait_for_experts_tensors_not_bytes_where_the_trainer_is_fast():
    few = EXPERTS.model_copy(
        update={"experts": 1, "experts_per_token": 1, "moe_intermediate": 768 * 128}
    )
    assert few.weight_bytes == pytest.approx(EXPERTS.weight_bytes, rel=0.01)
    many, one = (
        sum(seconds("broadcast", model, host_bytes_per_s=50e9)) for model in (EXPERTS, few)
    )
    assert many > 2 * one


def test_given_costs_of_a_tensor_and_of_a_host_take_the_place_of_the_measured_ones():
    usual = seconds("broadcast", EXPERTS)
    fast = seconds("broadcast", EXPERTS, host_bytes_per_s=1e12)
    assert usual[0] - fast[0] == pytest.approx(EXPERTS.weight_bytes * (1 / 4.85e9 - 1e-12))
    assert seconds("broadcast", EXPERTS, tensor_s=0.0)[1] < usual[1]


def test_master_weights_are_twice_the_bytes():
    usual, whole = (seconds("broadcast", LARGE, precision=name)[0] for name in ("bf16", "fp32"))
    assert whole - usual == pytest.approx(
        (4 * LARGE.parameters - LARGE.weight_bytes) / HOST_BYTES_PER_S["broadcast"]
    )


def test_a_host_half_as_fast_takes_twice_as_long_for_a_tensor_and_a_pause():
    config = TrainingConfig(weight_sync="broadcast", weight_sync_host_bytes_per_s=1e15)
    slow, usual = (loading_s(config, EXPERTS, with_host(speed), 8, 1, 8) for speed in (0.5, 1.0))
    assert slow == pytest.approx(2 * usual, rel=0.05)


def test_pageable_memory_behind_a_coherent_link_is_copied_as_pinned_memory():
    near = H100.model_copy(update={"host_bytes_per_s": 450e9})
    assert copied_bytes_per_s(near, 8, "pageable") == copied_bytes_per_s(near, 8)
    assert copied_bytes_per_s(H100, 8, "pageable") < copied_bytes_per_s(H100, 8)


@pytest.mark.parametrize(
    ("method", "model", "gpu", "given", "outside"),
    [
        ("broadcast", SMALL, "h100", {}, {}),
        ("broadcast", EXPERTS, "h100", {}, {"tensor_s": 0.29e-3}),
        ("broadcast", EXPERTS, "h100", {"weight_sync_tensor_s": 1e-4}, {}),
        ("broadcast", SMALL, "a100", {}, {"host_bytes_per_s": 4.85e9}),
        ("delta", EXPERTS, "b200", {}, {"host_bytes_per_s": 0.7e9}),
        ("delta", EXPERTS, "b200", {"weight_sync_host_bytes_per_s": 1e9}, {}),
        ("reshard", SMALL, "h100", {}, {"tensor_s": 0.29e-3}),
        ("gather_broadcast", EXPERTS, "a100", {}, {}),
        (None, SMALL, "h100", {}, {}),
        (None, EXPERTS, "h100", {}, {"tensor_s": 0.29e-3}),
    ],
)
def test_a_constant_is_extrapolated_where_no_row_is_like_the_scenario(
    method, model, gpu, given, outside
):
    config = TrainingConfig(weight_sync=method, **given)
    expected = {f"training.weight_sync_{key}": value for key, value in outside.items()}
    assert extrapolated(config, model, GPUS[gpu], colocated=False) == expected


def test_a_colocated_trainer_hands_experts_over_at_an_extrapolated_cost_unless_its_switch_was_measured():
    for given, outside in (
        ({}, {"training.weight_sync_tensor_s": 0.29e-3}),
        ({"switch_transfer_s": 0.0}, {}),
    ):
        config = TrainingConfig(weight_sync="broadcast", **given)
        assert extrapolated(config, EXPERTS, H100, colocated=True) == outside


def test_a_broadcast_is_sent_at_one_ranks_rate_whatever_the_number_of_workers():
    assert seconds("broadcast", workers=2) == seconds("broadcast", workers=64)
    assert seconds("gather_broadcast")[1] == pytest.approx(SMALL.weight_bytes / 50e9)
    assert seconds("gather_broadcast", gpus=4, workers=1)[1] == pytest.approx(
        SMALL.weight_bytes / 450e9
    )  # within a node


def test_a_reshard_scales_with_the_gpus_that_send_and_receive():
    four, eight = (seconds("reshard", gpus=gpus, workers=2, tp=gpus // 2)[1] for gpus in (16, 32))
    assert four == pytest.approx(2 * eight) and four == pytest.approx(SMALL.weight_bytes / 8 / 50e9)
    assert seconds("reshard", gpus=8, workers=16)[1] == pytest.approx(
        16 / 8 * SMALL.weight_bytes / 50e9
    )  # few senders


def test_a_gpu_reshards_the_tensors_of_its_stage_and_of_its_experts():
    assert tensors_held(TrainingConfig(pipeline_parallel=2), SMALL) == SMALL.tensors / 2
    held = tensors_held(TrainingConfig(expert_parallel=8), EXPERTS)
    assert held == 48 * (9 + 3 * 128 / 8) + 3


def test_a_delta_of_one_percent_moves_one_percent_of_the_parameters_each_with_its_position():
    config = TrainingConfig(weight_sync="delta", weight_sync_delta_share=0.01)
    assert moved_bytes(config, SMALL) == pytest.approx(0.01 * SMALL.parameters * (2 + 4))
    one, two = (seconds("delta", delta_share=share)[1] for share in (0.01, 0.02))
    assert two - one == pytest.approx(0.03 * SMALL.weight_bytes / 50e9)
    assert one == pytest.approx(PAUSE_S + 0.03 * SMALL.weight_bytes / 50e9)
    assert (
        seconds("delta", gpus=32)[0] < seconds("delta", gpus=16)[0]
    )  # each GPU compares its shard


def test_a_file_is_written_and_read_at_the_storages_rate():
    slow, fast = (seconds("file", storage_bytes_per_s=rate) for rate in (1e9, 2e9))
    each_s = SMALL.weight_bytes / 2e9
    assert slow[0] - fast[0] == pytest.approx(each_s) and slow[1] - fast[1] == pytest.approx(each_s)


@pytest.mark.parametrize("method", ["broadcast", "gather_broadcast", "reshard", "delta"])
def test_a_network_card_that_a_node_shares_slows_gathering_and_sending(method):
    slow = seconds(method, node_bytes_per_s=1.25e9)
    pause_s = PAUSE_S * (method in ("broadcast", "delta"))
    assert slow[0] >= seconds(method)[0]
    assert slow[1] - pause_s > 3 * (seconds(method)[1] - pause_s)
    within = {"gpus": 4, "workers": 1}
    assert seconds(method, node_bytes_per_s=1.25e9, **within) == seconds(method, **within)


# Measured rows.


@pytest.fixture(scope="module")
def measured(shared_data):
    return runpy.run_path(str(ROOT / "experiments" / "weight_sync.py"))["read_rows"](shared_data)


def test_the_rows_that_set_no_constant_are_predicted_within_a_factor_of_one_and_a_half(measured):
    ratios = [row.ratio for row in measured if row.ratio and not row.sets]
    assert len(ratios) == 3 and all(1 / 1.5 < ratio < 1.5 for ratio in ratios), ratios


def test_a_row_that_sets_a_constant_comes_out_as_it_was_measured(measured):
    set_by = [row for row in measured if row.sets]
    assert len({row.sets for row in set_by}) == len(set_by) == 5
    for row in set_by:
        reached = row.predicted_s[1] if row.unknown else row.seconds(row.cases[0])
        assert reached == pytest.approx((row.low_s + row.high_s) / 2, rel=0.02), row


def test_the_rows_that_do_not_state_their_placement_or_network_lie_in_their_intervals(measured):
    for row in measured:
        low_s, high_s = row.predicted_s
        assert low_s <= row.high_s and row.low_s <= high_s if row.unknown else low_s == high_s


# A scenario.

SPLIT = {"name": "split", "rollout_share": 0.5}
CLUSTER = {"gpu": "h100", "gpus": 4, "tp": 1}


def ready(system=SPLIT, **training):
    return prepare(scenario(system, training=training, cluster=CLUSTER))


def publishes_s(prepared):
    return dict(prepared.training_costs(prepared.train_gpus).after(0)).get("publish")


def test_publication_and_load_are_the_methods_in_place_of_the_assumed_seconds():
    prepared = ready(weight_sync="broadcast")
    expected = seconds("broadcast", prepared.model, 2, 2, 1, host_speed=20.0)
    assert (publishes_s(prepared), prepared.costs.load_s) == pytest.approx(expected)
    other = ready(weight_sync="broadcast", publish_s=9.0, load_overhead_s=9.0)
    assert (publishes_s(other), other.costs.load_s) == pytest.approx(expected)
    assert ready(weight_sync="broadcast", load_s=0.25).costs.load_s == 0.25


def test_systems_whose_gpus_switch_know_no_method():
    plain, synced = ready("verl_colocated"), ready("verl_colocated", weight_sync="broadcast")
    assert plain.costs == synced.costs and publishes_s(synced) is None
    assert synced.inputs()["load_weights_kind"] == "assumed"


def test_workers_with_weights_on_their_host_load_from_there():
    prepared = ready({"name": "laminar", "rollout_share": 0.5}, weight_sync="broadcast")
    assert prepared.costs.load_s == pytest.approx(prepared.model.weight_bytes / 64e9)
    assert publishes_s(prepared) == pytest.approx(seconds("broadcast", prepared.model, 2, 2, 1)[0])


def test_a_slower_method_makes_a_run_slower():
    ends = [
        rows(simulate(scenario(SPLIT, training={"weight_sync": method}, cluster=CLUSTER)).steps)[
            -1
        ]["finished_s"]
        for method in ("gather_broadcast", "broadcast")
    ]
    assert ends[0] < ends[1]


def test_a_result_names_the_method_and_whose_constants_it_has():
    result = simulate(
        scenario(
            SPLIT, training={"weight_sync": "delta", "weight_sync_offload": True}, cluster=CLUSTER
        )
    )
    words = "delta (comparison by verl's qwen2.5-32b on 2+2 H100 nodes, 2 % changed; offload by verl's qwen2.5-32b"
    assert any(line.startswith(f"Weight sync: {words}") for line in provenance([result.metadata]))
    (entry,) = [
        entry for entry in inputs(result.metadata) if entry.name == "loading weights at a worker"
    ]
    assert entry.kind == "derived" and entry.source.startswith(words)
    console = Console(width=300)
    with console.capture() as captured:
        print_explanation(explain_result(result), console)
    assert f"Weight sync: {words}" in captured.get()


def test_a_result_lists_what_is_extrapolated_with_the_assumed_seconds():
    result = simulate(scenario(SPLIT, training={"weight_sync": "reshard"}, cluster=CLUSTER))
    lines = provenance([result.metadata])
    assert any(
        line.endswith("whose placement is assumed; extrapolated: weight_sync_tensor_s)")
        for line in lines
    )
    assert lines[-1].startswith("Assumed seconds") and lines[-1].endswith(
        "training.weight_sync_tensor_s=0.00029"
    )
    other = {**result.metadata, "extrapolated": {"training.weight_sync_tensor_s": 0.00124}}
    assert provenance([result.metadata, other])[-1].endswith(
        "training.weight_sync_tensor_s=0.00029 or 0.00124"
    )


def test_a_load_is_one_figure_in_the_metadata_and_on_the_workers_with_the_publication_that_they_pause_for():
    for name, pauses in (("areal", True), ("one_step_off", False)):
        result = simulate(scenario(name, training={"weight_sync": "broadcast"}, cluster=CLUSTER))
        loads = [row for row in rows(result.spans) if row["kind"] == "load_weights"]
        assert loads and result.metadata["load_weights_s"] == pytest.approx(
            max(row["ended_s"] - row["started_s"] for row in loads)
        )
        prepared = ready({"name": name}, weight_sync="broadcast")
        assert (result.metadata["load_weights_s"] > prepared.costs.load_s) == pauses


def test_seconds_that_a_method_replaces_are_no_longer_assumed():
    training = TrainingConfig(weight_sync="reshard").model_dump()
    assert assumed_s(training, colocated=False) == {"training.reward_s": 0.2}
    assert assumed_s(training, colocated=True)["training.switch_s"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.weight_sync=rsync"], "training.weight_sync is 'rsync'"),
        (
            ["training.weight_sync_delta_share=1.5"],
            "training.weight_sync_delta_share is 1.5: give 1 or less",
        ),
        (
            ["training.weight_sync_delta_share=0"],
            "training.weight_sync_delta_share is 0: give 1e-06 or more",
        ),
        (
            ["training.weight_sync_node_bytes_per_s=10"],
            "training.weight_sync_node_bytes_per_s is 10: give 1e+06 or more",
        ),
        (
            ["training.weight_sync=delta", "training.lora=true"],
            "weight_sync is delta with lora: merging adapters changes all weights; use another method",
        ),
    ],
)
def test_a_sync_that_cannot_be_is_refused_in_a_line(overrides, message):
    with pytest.raises(InputError) as refused:
        load_scenarios(ROOT / "experiments" / "quickstart.yaml", overrides)
    assert message in str(refused.value) and "\n" not in str(refused.value)
