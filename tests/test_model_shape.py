"""Shapes of models against what their publishers state, and what is understood of a config.json."""

import pytest

from simrl.profile.model_shape import MODELS, known_name
from simrl.profile.precision import weight_bytes_per_gpu

# Billions of parameters, all and active ones, and which active ones the source counts: of the layers, of the output head too
# ("head"), of the embeddings too ("both").
PUBLISHED = {
    "gpt-oss-120b": (116.83, 5.13, "head"),  # arXiv 2508.10925, Table 1
    "gpt-oss-20b": (20.91, 3.61, "head"),
    "deepseek-v3": (671, 37, "both"),  # arXiv 2412.19437
    "kimi-k2": (1040, 32.6, "both"),  # arXiv 2507.20534
    "glm-4.5": (355, 32, "layers"),  # arXiv 2508.06471
    "glm-4.5-air": (106, 12, "layers"),
    "qwen3-30b-a3b": (30.5, 3.3, "both"),  # model card
    "qwen3-235b-a22b": (235, 22, "both"),
    "minimax-m2": (230, 10, "layers"),
    "nemotron-3-nano-30b-a3b": (31.6, 3.6, "both"),  # technical report
    "nemotron-3-super-120b-a12b": (120.6, 12.7, "both"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_mixture_of_experts_are_those_published(name: str) -> None:
    shape, (total, active, counted) = MODELS[name], PUBLISHED[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.015)
    embedding = shape.vocab * shape.hidden
    extra = {"layers": -embedding, "head": 0, "both": embedding}[counted]
    assert shape.active_parameters + extra == pytest.approx(active * 1e9, rel=0.021)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-next-80b-a3b", 79.67),  # 80 B; 79 B without embeddings (model card)
        ("qwen3.5-27b", 27),
        ("qwen3.5-35b-a3b", 35),
        ("qwen3.5-122b-a10b", 122),
        ("qwen3.5-397b-a17b", 397),
    ],
)
def test_the_parameters_of_hybrid_models_are_those_published(name: str, billions: float) -> None:
    assert MODELS[name].parameters == pytest.approx(billions * 1e9, rel=0.012)


def test_kv_bytes_per_token_are_those_published() -> None:
    # arXiv 2505.09343, Table 1: in bfloat16, in KB.
    published = {"deepseek-v3": 70.272, "llama-3.1-70b": 327.680}
    for name, kilobytes in published.items():
        assert MODELS[name].kv_bytes_per_token == 1000 * kilobytes
    # Layers with a window or a state do not grow.
    assert MODELS["gpt-oss-120b"].kv_bytes_per_token == 18 * 2 * 2 * 8 * 64
    assert MODELS["qwen3.5-27b"].kv_bytes_per_token == 16 * 2 * 2 * 4 * 256


def test_the_state_of_a_27b_hybrid_is_some_150_megabytes_a_sequence() -> None:
    shape = MODELS["qwen3.5-27b"]
    recurrent = 48 * 48 * 128 * 128 * 4
    convolved = 48 * 3 * (2 * 16 * 128 + 48 * 128) * 2
    assert shape.state_bytes == recurrent + convolved == pytest.approx(150e6, rel=0.03)


def test_flops_follow_the_weights_that_a_token_uses() -> None:
    for name in ("qwen3-32b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b"):
        shape = MODELS[name]
        assert shape.forward_flops(1.0, 0.0) == pytest.approx(2 * shape.active_parameters)


def test_the_flops_of_a_window_stop_growing() -> None:
    shape = MODELS["gpt-oss-20b"]
    whole = shape.model_copy(update={"window_layers": 0, "window_tokens": 0})
    pair = 4 * 64 * 64 * 12  # of one query on one key, of all windowed layers
    assert shape.forward_flops(128.0, 128.0**2 / 2) == pytest.approx(whole.forward_flops(128.0, 128.0**2 / 2))
    long = whole.forward_flops(8192.0, 8192.0**2 / 2) - shape.forward_flops(8192.0, 8192.0**2 / 2)
    seen = 8192 * 128 - 128**2 / 2  # causal: the first tokens see fewer
    assert long == pytest.approx(pair * (8192**2 / 2 - seen))


def test_names_on_hugging_face_are_known() -> None:
    for name, short in {
        "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
        "deepseek-ai/DeepSeek-R1-0528": "deepseek-r1",
        "moonshotai/Kimi-K2-Instruct": "kimi-k2",
        "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
        "zai-org/GLM-4.5-Air": "glm-4.5-air",
    }.items():
        assert known_name(name) == short and short in MODELS


def test_weights_in_a_precision_take_the_bytes_of_the_released_checkpoints() -> None:
    # gpt-oss: 60.8 and 12.8 GiB (arXiv 2508.10925, Table 1).
    for name, gib in {"gpt-oss-120b": 60.8, "gpt-oss-20b": 12.8}.items():
        released = weight_bytes_per_gpu(MODELS[name], 1, precision="w4a16_mxfp4")
        assert released == pytest.approx(gib * 2**30, rel=0.005)
    v3 = MODELS["deepseek-v3"]
    assert weight_bytes_per_gpu(v3, 1, precision="fp8-block") == pytest.approx(v3.parameters, rel=0.005)  # 671 GB


def test_a_gpu_holds_a_part_of_attention_and_its_share_of_the_experts_of_all_ranks() -> None:
    dense, experts = MODELS["qwen3-32b"], MODELS["qwen3-30b-a3b"]
    assert weight_bytes_per_gpu(dense, 4) == dense.weight_bytes / 4
    assert weight_bytes_per_gpu(experts, 2, 1, 2) == experts.weight_bytes / 2
    routed = 2 * experts.routed_parameters
    assert weight_bytes_per_gpu(experts, 1, 8, 8) == experts.weight_bytes - routed + routed / 8
    v3 = MODELS["deepseek-v3"]
    latent = 61 * 7168 * (1536 + 512 + 64)  # projections that every GPU of a rank has
    assert weight_bytes_per_gpu(v3, 8) == pytest.approx(v3.weight_bytes / 8 + 2 * latent * 7 / 8)
