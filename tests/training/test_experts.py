"""The training step of mixtures of experts, of products in 8 bits, and of layers without plain attention."""

from dataclasses import replace

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS, LINK_SHARE
from simrl.profile.model_shape import MODELS, ModelShape
from simrl.scenario.model import Scenario
from simrl.simulate.modelled import not_modelled
from simrl.simulate.prepare import prepare
from simrl.simulate.training_checks import require_parallelism
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts
from simrl.training.weight_sync import TENSOR_S

MODEL, H100 = MODELS["qwen3-30b-a3b"], GPUS["h100"]
SILENT = {"link_bytes_per_s": 1e30, "network_bytes_per_s": 1e30}
QUIET = H100.model_copy(update=SILENT)
LENGTHS = np.full(64, 4096)
ROUTED = 48 * 128 * 3 * 2048 * 768  # weights of the routed experts
DENSE = {
    "name": "d",
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 128,
    "intermediate": 6144,
    "vocab": 32768,
}


def costs(gpus=8, model=MODEL, gpu=H100, switch=False, precision="bf16", **config) -> TrainingCosts:
    config = {
        "sharding": "optimizer",
        "kernels": "fused",
        "attention": "fa3",
        "tokens_per_microbatch": 4096,
        **config,
    }
    return TrainingCosts(
        model, gpu, gpus, TrainingConfig(**config), 1, 1, switch, precision=precision
    )


def update_s(*args, lengths=LENGTHS, **config) -> float:
    return costs(*args, **config).sweep_s(lengths, 3)


def test_tokens_go_to_their_experts_and_back_over_the_link_in_a_node_and_over_the_network_beyond():
    for experts, away, rate in ((8, 7 / 8, LINK_SHARE * 450e9), (16, 8 / 16, 50e9)):
        talking, quiet = (update_s(16, expert_parallel=experts, gpu=gpu) for gpu in (H100, QUIET))
        sent = 2 * 4096 * 8 * 2048 * away  # bytes of a micro-batch: 8 experts a token
        trips = 48 * 2 * 3  # layers, there and back, forward, backward and again
        assert talking - quiet == pytest.approx(
            4 * trips * sent / rate, rel=1e-6
        )  # 4 micro-batches a rank


@pytest.mark.parametrize(
    ("gpu", "sharding", "grouped"),
    [
        ("h100", "fsdp", True),
        ("b200", "fsdp", True),
        ("a100", "fsdp", False),
        ("a100", "optimizer", True),
    ],
)
def test_experts_are_one_product_where_the_trainer_or_pytorch_has_a_kernel_for_the_gpu(
    gpu, sharding, grouped
):
    few = np.full(8, 512)
    usual, one, loop = (
        update_s(
            gpu=GPUS[gpu].model_copy(update=SILENT),
            sharding=sharding,
            lengths=few,
            grouped_experts=choice,
        )
        for choice in (None, True, False)
    )
    assert usual == one if grouped else one < usual
    assert usual < loop, "PyTorch's own fallback has fewer operations than a loop of Python"


def test_experts_that_run_one_by_one_add_their_launches_to_those_of_the_layers():
    few = np.full(8, 64)
    alone, grouped = (
        update_s(gpu=QUIET, lengths=few, sharding="fsdp", grouped_experts=choice)
        for choice in (False, True)
    )
    one_by_one_s = 48 * 128 * (2 * 8 * 24e-6 + 16 * 17e-6)
    assert alone - grouped == pytest.approx(one_by_one_s, rel=0.02)


def test_the_busiest_gpu_of_those_that_divide_the_experts_makes_all_wait():
    balanced, uneven = (update_s(expert_parallel=8, expert_imbalance=n) for n in (1.0, 1.5))
    assert 1.15 * balanced < uneven < 1.5 * balanced
    assert update_s(expert_imbalance=1.5) == update_s()  # every GPU has all experts


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"expert_imbalance": 1.5}, "of 1 GPUs that divide the experts"),
        (
            {"expert_imbalance": 16, "expert_parallel": 8},
            "the busiest has 8 times the mean at most",
        ),
    ],
)
def test_experts_of_more_unequal_load_than_can_be_are_refused(given, line):
    with pytest.raises(InputError, match=line):
        require_parallelism(TrainingConfig(sharding="optimizer", **given), MODEL, 16)


def test_the_tensors_of_experts_are_handed_over_by_every_trainer():
    own, shared = costs().after(0), costs(switch=True).after(0)
    assert dict(own)["publish"] > TENSOR_S * 48 * 128 * 3 < dict(shared)["switch"]


def test_ranks_that_divide_experts_wait_for_each_other_in_every_micro_batch():
    """Two ranks have a long and a short micro-batch each, in opposite order, as their sequences are in a group's batches."""
    lengths = np.array([4096, 4000, 3000, 100])
    apart, together = costs(2, gpu=QUIET), costs(2, gpu=QUIET, expert_parallel=2)
    assert (apart._together, together._together) == (1, 2)
    assert (
        costs(16, expert_parallel=8, tensor_parallel=2)._together == 4
    )  # eight GPUs are four ranks
    each = [together.sweep_s(np.array([n, n]), 3) for n in lengths]
    assert together.sweep_s(lengths, 3) == pytest.approx(each[0] + each[2])


def test_a_gpu_holds_its_part_of_the_experts_and_all_else():
    states = costs(32, expert_parallel=8).state_bytes
    assert states == pytest.approx(
        6 * (MODEL.parameters - ROUTED + ROUTED / 8) + 12 * MODEL.parameters / 32
    )
    assert (
        costs(32, expert_parallel=8).memory_bytes(4096)
        < H100.memory_bytes
        < costs(32).memory_bytes(4096)
    )
    alone = costs(32, tensor_parallel=2, expert_parallel=8).state_bytes
    assert alone == pytest.approx(
        6 * ((MODEL.parameters - ROUTED) / 2 + ROUTED / 8) + 12 * MODEL.parameters / 32
    )


def test_experts_that_are_divided_are_not_gathered():
    slow = H100.model_copy(update={"link_bytes_per_s": 1e9})
    one = np.array([8])
    whole, part = (costs(gpu=slow, sharding="fsdp", expert_parallel=n) for n in (1, 8))
    gathered = 4 * 2 * ROUTED * (1 - 1 / 8) * 7 / 8 / (LINK_SHARE * 1e9)
    assert sum(whole._gather_s(3)) - sum(part._gather_s(3)) == pytest.approx(gathered)
    assert part.sweep_s(one, 3) < whole.sweep_s(one, 3)


def test_all_tokens_pass_shared_experts_and_the_first_layers_have_a_plain_mlp():
    shared = MODEL.model_copy(update={"shared_intermediate": 6144})
    plain, mixed = ModelShape(layers=1, **DENSE), ModelShape(layers=2, **DENSE)
    mlp_s = (update_s(model=mixed) - update_s(model=plain)) * 48
    assert 0.2 * mlp_s < update_s(model=shared) - update_s() < mlp_s
    first = MODEL.model_copy(update={"dense_layers": 47})
    assert update_s(model=plain) < update_s(model=first) < update_s()


def test_experts_tensors_are_handed_over_one_by_one_where_rollout_runs_on_the_same_gpus():
    after = dict(costs(switch=True).after(0))["switch"] - costs(switch=True).switch_s
    assert after == pytest.approx(TENSOR_S * 48 * 128 * 3)
    measured = costs(
        switch=True, switch_s=0.0, switch_transfer_s=0.0
    )  # the phases of a log have it
    assert dict(measured.after(0))["switch"] == 0.0


def test_the_longest_stage_sets_the_pace_of_stages_that_are_unequal():
    even, uneven = (MODELS["qwen3-235b-a22b"].model_copy(update={"layers": n}) for n in (96, 94))
    staged = {"gpus": 8, "pipeline_parallel": 8}
    assert update_s(model=even, **staged) == pytest.approx(update_s(model=uneven, **staged))


# Products in 8 bits.


def test_products_in_8_bits_are_faster_at_their_measured_rate_and_attention_is_not():
    dense = {"model": MODELS["qwen3-32b"], "gpus": 1}
    plain, blocks = (update_s(precision=each, **dense) for each in ("bf16", "fp8-block"))
    assert 0.6 * plain < blocks < 0.9 * plain
    assert H100.matmul_flops("fp8-block") == pytest.approx(0.52 * 1979e12)
    assert update_s(precision="fp8-block", expert_parallel=8) < update_s(expert_parallel=8)


def test_master_weights_stay_and_copies_in_8_bits_join_them():
    plain, eight = (
        costs(32, expert_parallel=8, precision=each).state_bytes for each in ("bf16", "fp8")
    )
    assert eight - plain == pytest.approx(2 * (MODEL.parameters - ROUTED + ROUTED / 8))


def test_a_precision_without_measured_products_on_the_gpu_is_refused(scenario):
    of = scenario.model_copy(update={"precision": type(scenario.precision)(training="fp8")})
    for gpu, known in (("a100", "bf16"), ("h20", "bf16")):
        cluster = of.cluster.model_copy(update={"gpu": gpu})
        with pytest.raises(InputError, match=f"precision.training is fp8.*{gpu}; use {known}"):
            prepare(of.model_copy(update={"cluster": cluster}))


@pytest.fixture
def scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "eight-bits",
            "steps": 1,
            "model": "qwen3-0.6b",
            "cluster": {"gpu": "h100", "gpus": 2, "tp": 1},
            "workload": {
                "synthetic": {
                    "steps": 1,
                    "prompts_per_step": 2,
                    "group": 1,
                    "mean_tokens": 50,
                    "cap_tokens": 100,
                    "sigma": 0.5,
                }
            },
            "profile": {"roofline": {}},
            "system": {"name": "verl_colocated"},
        }
    )


def test_the_precision_of_training_reaches_the_update(scenario):
    eight = scenario.model_copy(update={"precision": type(scenario.precision)(training="fp8")})
    assert prepare(eight).training_costs(2).precision == "fp8"
    assert prepare(scenario).training_costs(2).precision == "bf16"


# Other layers.


def test_windows_bound_what_a_token_attends_to():
    lengths = {"lengths": np.full(8, 16384), "tokens_per_microbatch": 16384}
    full = ModelShape(layers=8, **DENSE)
    wide, narrow = (
        full.model_copy(update={"window_layers": 8, "window_tokens": n}) for n in (16384, 128)
    )
    assert update_s(model=wide, **lengths) == pytest.approx(update_s(model=full, **lengths))
    assert update_s(model=narrow, **lengths) < 0.95 * update_s(model=full, **lengths)


def test_layers_with_a_fixed_state_do_not_slow_down_with_the_length():
    plain = ModelShape(layers=1, **DENSE)
    state = plain.model_copy(
        update={
            "layers": 9,
            "linear_layers": 8,
            "linear_parameters": 4 * 2048 * 2048,
            "state_bytes": 1,
        }
    )
    more_s = [
        update_s(1, model=state, **of) - update_s(1, model=plain, **of)
        for of in (
            {"lengths": np.full(65536 // n, n), "tokens_per_microbatch": 65536}
            for n in (1024, 65536)
        )
    ]
    assert more_s[0] == pytest.approx(more_s[1])


def test_latent_attention_multiplies_its_own_matrices():
    """DeepSeek-V3's MLA as grouped-query attention with as many heads of 128 has more weights and as much of the rest."""
    latent = MODELS["deepseek-v3"]
    fields = ("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim")
    plain = latent.model_copy(update={**dict.fromkeys(fields, 0), "kv_heads": latent.heads})
    of = {"gpus": 1, "lengths": np.full(4, 2048)}
    assert latent.attention_parameters < plain.attention_parameters
    assert update_s(model=latent, **of) < update_s(model=plain, **of)
    assert replace(costs(model=latent), gpus=64).state_bytes > 0


def test_training_of_layers_with_a_fixed_state_is_an_estimate_that_says_what_it_leaves_out(
    scenario,
):
    words = "the recurrence of layers with a fixed state in training, beside their projections"
    plain = prepare(scenario)
    hybrid = replace(plain, model=MODELS["qwen3.5-35b-a3b"])
    assert words not in not_modelled(plain) and words in not_modelled(hybrid)
    assert hybrid.training_costs(2).sweep_s(LENGTHS, 3) > 0
