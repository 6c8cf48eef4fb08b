"""Shapes of models against what their publishers state, and what is understood of a config.json."""

import json
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS, known_name, model_shape, understood
from simrl.profile.precision import weight_bytes_per_gpu
from simrl.profile.profilers.roofline import roofline_profile

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
        "zai-org/GLM-4.5-Air-FP8": "glm-4.5-air",
        "google/gemma-3-4b-pt": "gemma-3-4b",
        "allenai/Olmo-3-1025-7B": "olmo-3-1025-7b",
        "Qwen/QwQ-32B": "qwq-32b",
        "microsoft/Phi-3-mini-128k-instruct": "phi-3-mini-128k",
        "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-instruct-v0.1",
        "mistralai/Mistral-7B-v0.3": "mistral-7b",
    }.items():
        assert known_name(name) == short and short in MODELS


def test_models_of_a_window_before_their_successors_dropped_it_keep_it() -> None:
    windows = {name: MODELS[name].window_tokens for name in MODELS if name.startswith("mistral-7b")}
    assert windows.pop("mistral-7b-v0.1") == windows.pop("mistral-7b-instruct-v0.1") == 4096
    assert set(windows.values()) == {0}


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
        ({"block_configs": [1]}, "block_configs is [1], which is not modelled"),
        (
            {"layer_types": ["lightning"] * 8},
            "layer_types has 'lightning'; modelled are full_attention",
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
        ({"layer_types": ["full_attention"] * 6}, "layer_types has 6 entries for 8 layers"),
        ({"layer_types": 5}, "a key is missing or of another kind"),
        ({"layer_types": [["a"]] * 8}, "a key is missing or of another kind"),
        ({"mlp_only_layers": 5}, "a key is missing or of another kind"),
        (
            {"hybrid_override_pattern": "M*E-"},
            "a key is missing or of another kind ('mamba_num_heads')",
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
    "bamba": {"attn_layer_indices": [3, 7], "mamba_d_state": 128},
    "phi4flash": {"mb_per_layer": 2, "mamba_d_state": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 2560},
    "jamba": {
        "attn_layer_period": 8,
        "expert_layer_period": 2,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
    "bailing_moe_linear": {"layer_group_size": 5, "num_experts": 256, "num_experts_per_tok": 8},
    "arctic": {"moe_layer_frequency": 2, "num_local_experts": 128, "num_experts_per_tok": 2},
    "hunyuan": {"use_cla": True, "cla_share_factor": 2},
    "longcat_flash": {"zero_expert_num": 256, "n_routed_experts": 512, "moe_topk": 12},
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


# Parameters of models, in billions, as their names or cards say.
BILLIONS = {
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "deepseek-r1-distill-llama-70b": 70.6, "qwen2.5-72b": 72.7,
    "qwen2.5-vl-7b": 7.62, "qwen3-vl-8b": 8.19, "qwen3-coder-480b-a35b": 480, "qwen3.5-9b": 9.0, "qwen3.5-4b": 4.2,
    "olmo-3-7b": 7.3, "olmo-3-32b": 32.2, "gemma-3-1b": 1.0, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0,
    "mistral-small-24b": 23.6, "phi-4": 14.7, "glm-4-9b-0414": 9.4, "glm-4.6": 355, "intellect-3": 106, "mimo-7b": 7.6,
    "moonlight-16b-a3b": 16, "deepseek-v2-lite": 15.7, "deepseek-v3.2": 671, "kimi-linear-48b-a3b": 48,
    "seed-oss-36b": 36.2, "nemotron-nano-9b-v2": 8.9, "smollm2-360m": 0.362, "smollm3-3b": 3.08,
    "llama-4-scout-17b-16e": 107.8, "llama-4-maverick-17b-128e": 400, "falcon-h1-7b": 7.6, "granite-4.0-h-small": 32.2,
    "granite-4.0-h-tiny": 6.9, "lfm2-1.2b": 1.17, "ernie-4.5-21b-a3b": 21.9, "qwen3-coder-next": 80, "minimax-m2.1": 230,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_a_named_model_has_the_parameters_of_its_name(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.035)


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_has_a_roofline(name: str) -> None:
    profile = roofline_profile(MODELS[name], GPUS["b200"])
    assert 0 < profile.decode_s(1, 1024) < profile.decode_s(256, 4096)


@pytest.mark.parametrize(
    "written",
    [
        "Qwen/Qwen3-VL-8B-Instruct",
        "google/gemma-3-4b-it",
        "allenai/Olmo-3-7B-Think",
        "moonshotai/Moonlight-16B-A3B-Instruct",
        "Qwen/Qwen3-1.7B-Base",
        "meta-llama/Llama-3.2-3B-Instruct",
        "zai-org/GLM-4.5-Air",
        "PrimeIntellect/INTELLECT-3",
        "XiaomiMiMo/MiMo-7B-RL",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "HuggingFaceTB/SmolLM3-3B",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ],
)
def test_models_have_their_names_on_hugging_face(written: str) -> None:
    assert known_name(written) in MODELS


TEXT = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
MAMBA = {
    "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
}  # fmt: skip
STATE = 2 * (16 * 64 + 2 * 128) * 3 + 4 * 16 * 64 * 128


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 512}, {"window_layers": 10, "window_tokens": 512}),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3}, {"window_layers": 8}),
        ({"model_type": "gemma2", "sliding_window": 512}, {"window_layers": 6, "tied_embeddings": True}),
        ({"model_type": "olmo3", "sliding_window": 4096}, {"window_layers": 9}),
        ({"model_type": "exaone4", "sliding_window": 512, "sliding_window_pattern": "LLLG"}, {"window_layers": 9}),
        ({"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 2048,
          "interleave_moe_layer_step": 2},
         {"window_layers": 9, "window_tokens": 8192, "expert_layers": 6, "intermediate": 2048, "shared_intermediate": 1024,
          "without": "attention in chunks: as a window of a chunk's tokens"}),
        ({"model_type": "falcon_h1", **MAMBA}, {"layers": 24, "linear_layers": 12, "state_bytes": 12 * STATE}),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "attention"] * 4, "num_local_experts": 0,
          "shared_intermediate_size": 2048, **MAMBA},
         {"linear_layers": 8, "state_bytes": 8 * STATE, "intermediate": 2048, "experts": 0}),
        ({"model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8]},
         {"linear_layers": 9, "intermediate": 768, "state_bytes": 9 * 2 * 512 * 3}),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1, 2, 3], "num_heads": 8, "head_dim": 64,
          "short_conv_kernel_size": 4}},
         {"linear_layers": 3, "state_bytes": 3 * (6 * 512 * 3 + 4 * 512 * 64)}),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [3, 7]},
         {"expert_layers": 10}),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2},
         {"expert_layers": 6}),
        ({"index_topk": 2048, "index_n_heads": 8},
         {"without": "sparse attention: every token is attended to, an upper bound, and its index is left out"}),
    ],
)  # fmt: skip
def test_families_are_read_by_their_own_keys(
    tmp_path: Path, config: dict[str, object], fields: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT | config))
    shape = model_shape(tmp_path)
    assert {key: getattr(shape, key) for key in fields} == fields


@pytest.mark.parametrize("nested", ["text_config", "llm_config", "thinker_config"])
def test_a_model_that_sees_is_its_text_part_and_names_what_is_left_out(
    tmp_path: Path, nested: str
) -> None:
    seeing = {"vision_config": {"depth": 8}}
    config = (
        {nested: TEXT, **seeing}
        if nested != "thinker_config"
        else {nested: {"text_config": TEXT, **seeing}}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(tmp_path)
    assert (
        shape.without
        == "the vision part: its weights and time are left out, and its tokens count only if prompt_tokens has them"
    )
    assert shape.hidden == 512
