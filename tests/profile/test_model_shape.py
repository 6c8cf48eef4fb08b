"""Shapes of models against what their publishers state, and what is understood of a config.json."""

import json
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.profile.model_shape import MODELS, known_name, model_shape, understood
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
    assert shape.forward_flops(128.0, 128.0**2 / 2) == pytest.approx(
        whole.forward_flops(128.0, 128.0**2 / 2)
    )
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
    assert weight_bytes_per_gpu(v3, 1, precision="fp8-block") == pytest.approx(
        v3.parameters, rel=0.005
    )  # 671 GB


def test_a_gpu_holds_a_part_of_attention_and_its_share_of_the_experts_of_all_ranks() -> None:
    dense, experts = MODELS["qwen3-32b"], MODELS["qwen3-30b-a3b"]
    assert weight_bytes_per_gpu(dense, 4) == dense.weight_bytes / 4
    assert weight_bytes_per_gpu(experts, 2, 1, 2) == experts.weight_bytes / 2
    routed = 2 * experts.routed_parameters
    assert weight_bytes_per_gpu(experts, 1, 8, 8) == experts.weight_bytes - routed + routed / 8
    v3 = MODELS["deepseek-v3"]
    latent = 61 * 7168 * (1536 + 512 + 64)  # projections that every GPU of a rank has
    assert weight_bytes_per_gpu(v3, 8) == pytest.approx(v3.weight_bytes / 8 + 2 * latent * 7 / 8)


HYBRID = {
    "architectures": ["NewForConditionalGeneration"],
    "vision_config": {"depth": 27},
    "text_config": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "sliding_attention",
            "full_attention",
        ]
        * 2,
        "sliding_window": 512,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 32,
        "mtp_num_hidden_layers": 1,
    },
}


PLAIN: dict[str, object] = {"layer_types": None} | {
    key: None for key in HYBRID["text_config"] if "linear" in key
}


def write(folder: Path, **changes: object) -> Path:
    text = HYBRID["text_config"] | changes
    (folder / "config.json").write_text(json.dumps({**HYBRID, "text_config": text}))
    return folder


def test_of_an_unknown_architecture_it_is_said_what_was_understood(tmp_path: Path) -> None:
    shape = model_shape(write(tmp_path))
    assert (shape.full_layers, shape.window_layers, shape.linear_layers) == (2, 2, 4)
    assert shape.state_bytes == 4 * (2 * 3 * (2 * 128 + 256) + 2 * 8 * 32 * 32)
    assert understood(str(tmp_path)) == (
        "understood: 2 layers of full attention, 2 layers of attention to 512 tokens, 4 layers of a fixed state (0 MiB a "
        "sequence), 2 of 16 experts in 8 layers, shared ones beside; not read: mtp_num_hidden_layers, vision_config"
    )
    assert understood("qwen3-8b") == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": 2048}, "index_topk is 2048, which is not modelled"),
        (
            {"layer_types": ["chunked_attention"] * 8},
            "layer_types has 'chunked_attention'; modelled are full_attention",
        ),
        (
            {"linear_conv_kernel_dim": None},
            "no key 'linear_conv_kernel_dim', which layers of linear_attention need",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be above 0"),
        (
            {"num_hidden_layers": 10**9, "layer_types": None},
            "num_hidden_layers is 1000000000; it must be at most 10000",
        ),
        (
            PLAIN | {"model_type": "gemma3_text"},
            "some layers have windows, and no layer_types says which",
        ),
        (
            {"mlp_only_layers": [3]},
            "mlp_only_layers is [3]; only first layers without experts are modelled",
        ),
        ({"layer_types": ["full_attention"] * 6}, "layer_types has 6 entries for 8 layers"),
        ({"layer_types": 5}, "a key is missing or of another kind"),
        ({"layer_types": [["a"]] * 8}, "a key is missing or of another kind"),
        ({"mlp_only_layers": 5}, "a key is missing or of another kind"),
        (
            {"hybrid_override_pattern": "M*E-"},
            "a key is missing or of another kind ('mamba_num_heads')",
        ),
        (
            {"layer_types": None, "linear_num_value_heads": None, "sliding_window_pattern": 6},
            "some layers have windows, and no layer_types says which",
        ),
        (
            {"num_experts_per_tok": 99},
            "16 experts need a moe_intermediate above 0 and 1 to 16 experts_per_token",
        ),
    ],
)
def test_what_would_make_memory_or_time_wrong_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as error:
        model_shape(write(tmp_path, **changes))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("first", "windows"), [(8, 0), (6, 2), (0, 8)])
def test_windows_begin_at_the_layer_that_the_config_says(
    tmp_path: Path, first: int, windows: int
) -> None:
    shape = model_shape(write(tmp_path, use_sliding_window=True, max_window_layers=first, **PLAIN))
    assert (shape.window_layers, shape.full_layers) == (windows, 8 - windows)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {}, 8),
        ("mistral", {"max_position_embeddings": 512}, 0),  # no sequence is longer than the window
        ("qwen2", {}, 0),  # off by default
    ],
)
def test_without_a_list_of_layers_windows_are_those_of_the_family(
    tmp_path: Path, family: str, changes: dict[str, object], windows: int
) -> None:
    assert (
        model_shape(write(tmp_path, model_type=family, **PLAIN, **changes)).window_layers == windows
    )


def test_shared_experts_are_read_under_both_of_their_names(tmp_path: Path) -> None:
    without = {"shared_expert_intermediate_size": None}
    for key in ("n_shared_experts", "num_shared_experts"):
        assert model_shape(write(tmp_path, **without, **{key: 2})).shared_intermediate == 2 * 64


# Keys of models that would otherwise be read as plain attention, or as a dense MLP, in every layer.
UNREAD: dict[str, dict[str, object]] = {
    "falcon_h1": {"mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_heads": 24},
    "bamba": {"attn_layer_indices": [3, 7], "mamba_d_state": 128},
    "phi4flash": {"mb_per_layer": 2, "mamba_d_state": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 2560},
    "lfm2": {"full_attn_idxs": [2, 5], "conv_L_cache": 3},
    "jamba": {
        "attn_layer_period": 8,
        "expert_layer_period": 2,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
    "bailing_moe_linear": {"layer_group_size": 5, "num_experts": 256, "num_experts_per_tok": 8},
    "arctic": {"moe_layer_frequency": 2, "num_local_experts": 128, "num_experts_per_tok": 2},
    "hunyuan": {"use_cla": True, "cla_share_factor": 2},
    "llama4_text": {"moe_layers": [1, 3, 5, 7], "num_local_experts": 16, "num_experts_per_tok": 1},
    "longcat_flash": {"zero_expert_num": 256, "n_routed_experts": 512, "moe_topk": 12},
    "granitemoeshared": {
        "shared_intermediate_size": 1024,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
    },
}


@pytest.mark.parametrize("family", UNREAD)
def test_a_config_with_a_key_of_memory_or_time_that_nothing_is_read_from_is_refused(
    tmp_path: Path, family: str
) -> None:
    for key in (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ):
        UNREAD[family].setdefault(key, None)
    with pytest.raises(
        InputError, match=", which is not modelled; name a model without it, or delete the key"
    ):
        model_shape(
            write(
                tmp_path,
                model_type=family,
                intermediate_size=640,
                sliding_window=None,
                **PLAIN,
                **UNREAD[family],
            )
        )
