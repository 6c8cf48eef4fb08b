"""Fields of a model's shape from its config.json, and which parts of the config were understood.

Invariant: a key that would change memory or time and is not modelled is refused, never ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.validation import shortened

# The fields of a shape, and their keys in a config.json.
CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
Config = dict[str, Any]
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")
# Keys that are not modelled, and their values where they change nothing.
_NOT_MODELLED: dict[str, object] = {
    "index_topk": 0,  # sparse attention
    "global_head_dim": 0,
    "swa_num_key_value_heads": 0,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "decoder_sparse_step": 1,
    "attention_chunk_size": 0,
    "sparse_attention_config": {},
    "linear_attn_config": {},
    "hybrid_layer_pattern": [],
    "layers_block_type": [],
    "block_configs": [],
    "interleave_moe_layer_step": 1,
    "attention_k_eq_v": False,
    "o_lora_rank": 0,
    "is_encoder_decoder": False,
}


def fields_of_config(config: Config, path: Path) -> Config:
    """Return the fields of the shape that a config.json describes. Raise `InputError` for what is missing or not modelled."""
    name = Path(str(config.get("_name_or_path") or path.resolve().parent.name)).name.lower()
    if isinstance(nested := config.get("text_config"), dict):  # a model that also sees
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | nested
    for key, plain in _NOT_MODELLED.items():
        if config.get(key) not in (plain, None):
            raise InputError(
                f"{path}: {key} is {shortened(config[key])}, which is not modelled; name a model without it"
            )
    if len(set(config.get("attn_type_list") or [])) > 1:
        raise InputError(f"{path}: attn_type_list has several kinds, which are not modelled; name a model without it")
    experts = first_of(config, _EXPERTS)
    if experts and "intermediate_size" not in config:
        config = config | {"intermediate_size": config.get("moe_intermediate_size")}
    missing = [key for key in CONFIG_KEYS.values() if key not in config]
    if missing:
        raise InputError(
            f"{path}: no key {missing[0]!r}; a dense transformer's config has {', '.join(CONFIG_KEYS.values())}"
        )
    shape = {field: config[key] for field, key in CONFIG_KEYS.items()}
    heads, hidden = shape["heads"], shape["hidden"]
    shape["name"] = name
    shape["kv_heads"] = config.get("num_key_value_heads") or heads
    shape["head_dim"] = config.get("head_dim") or config.get("attention_head_dim")
    if shape["head_dim"] is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        shape["head_dim"] = hidden // heads
    shape["tied_embeddings"] = config.get("tie_word_embeddings", False)
    shape["qk_norm"] = str(config.get("model_type")).startswith("qwen3") or bool(config.get("use_qk_norm"))
    # Qwen3-Next has the gate without a key for it.
    shape["output_gate"] = bool(config.get("attn_output_gate", config.get("model_type") == "qwen3_next"))
    if config.get("kv_lora_rank"):
        shape |= {
            "kv_heads": 1,
            "head_dim": config.get("qk_nope_head_dim"),
            "rope_head_dim": config.get("qk_rope_head_dim"),
        }
        shape |= {key: config.get(key) or 0 for key in ("kv_lora_rank", "q_lora_rank", "v_head_dim")}
    if experts:
        shape |= _experts(config, experts, path)
    return shape | _mixers(config, path)


def first_of(config: Config, keys: tuple[str, ...]) -> Any:
    """Return the value of the first of the keys that a config has, 0 if it has none."""
    return next((config[key] for key in keys if config.get(key)), 0)


def _experts(config: Config, experts: Any, path: Path) -> Config:
    """Return the fields of a mixture of experts."""
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = first_of(
        config, ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim")
    )
    dense = config.get("first_k_dense_replace") or 0
    for key in ("mlp_only_layers", "moe_layer_freq"):
        plain = config.get(key) or []
        if key == "moe_layer_freq":
            plain = (
                []
                if plain == 1
                else [i for i, each in enumerate(plain) if not each]
                if isinstance(plain, list)
                else plain
            )
        if plain and plain != list(range(len(plain))):
            raise InputError(f"{path}: {key} is {config[key]}; only first layers without experts are modelled")
        dense = max(dense, len(plain))
    return {
        "experts": experts,
        "experts_per_token": first_of(config, _PER_TOKEN),
        "moe_intermediate": inner,
        "shared_intermediate": shared or (config.get("n_shared_experts") or 0) * inner,
        "dense_layers": dense,
        "expert_hidden": config.get("moe_latent_size") or 0,
    }


def _mixers(config: Config, path: Path) -> Config:
    """Return the fields of the layers that do not attend to every token."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if pattern := config.get("hybrid_override_pattern"):
        return _nemotron(config, str(pattern), path)
    if kinds is None and config.get("linear_num_value_heads"):
        every = config.get("full_attention_interval") or 4
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    kinds = kinds or []
    if kinds and len(kinds) != layers:
        raise InputError(f"{path}: layer_types has {len(kinds)} entries for {layers} layers; complete the config")
    if unknown := set(kinds) - {"full_attention", "sliding_attention", "linear_attention"}:
        raise InputError(
            f"{path}: layer_types has {min(map(str, unknown))!r}; modelled are full_attention, sliding_attention and "
            "linear_attention"
        )
    fields: Config = {}
    if linear := kinds.count("linear_attention"):
        fields |= {"linear_layers": linear, **_delta_net(config, linear, path)}
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        if not kinds and (config.get("sliding_window_pattern") or config.get("model_type") == "gemma2"):
            raise InputError(f"{path}: some layers have windows, and no layer_types says which; add it")
        # Qwen2 and Qwen3 say from which layer on.
        first = config.get("max_window_layers") or 0 if "use_sliding_window" in config else 0
        if windows := kinds.count("sliding_attention") if kinds else max(layers - first, 0):
            fields |= {"window_layers": windows, "window_tokens": window}
    return fields


def _delta_net(config: Config, layers: int, path: Path) -> Config:
    """Return the weights of a gated delta net and the bytes of its states, in bfloat16 or `mamba_ssm_dtype`, as vLLM keeps
    them."""
    keys = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads", "conv_kernel_dim")
    sizes = [config.get(f"linear_{key}") for key in keys]
    if not all(isinstance(size, int) for size in sizes):
        missing = next(f"linear_{key}" for key in keys if not isinstance(config.get(f"linear_{key}"), int))
        raise InputError(f"{path}: no key {missing!r}, which layers of linear_attention need; complete the config")
    key_dim, key_heads, value_dim, value_heads, kernel = (int(size) for size in sizes if size)
    keys_wide, values_wide, hidden = key_dim * key_heads, value_dim * value_heads, config["hidden_size"]
    convolved = 2 * keys_wide + values_wide
    element = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    state = 2 * convolved * (kernel - 1) + element * value_heads * value_dim * key_dim
    weights = hidden * (2 * keys_wide + 3 * values_wide + 2 * value_heads) + convolved * kernel
    return {"linear_parameters": weights, "state_bytes": layers * state}


def _nemotron(config: Config, pattern: str, path: Path) -> Config:
    """Return the fields of a Nemotron-H: one block a character, Mamba2 (M), attention (*), experts (E) or MLP (-)."""
    if unknown := set(pattern) - set("M*E-"):
        raise InputError(f"{path}: hybrid_override_pattern has {min(unknown)!r}; modelled are M, *, E and -")
    count = {kind: pattern.count(kind) for kind in "M*E-"}
    heads, dim, groups = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"]
    inner, states, kernel, hidden = heads * dim, config["ssm_state_size"], config["conv_kernel"], config["hidden_size"]
    convolved = inner + 2 * groups * states
    element = 2 if config.get("mamba_ssm_cache_dtype") == "bfloat16" else 4
    state = 2 * convolved * (kernel - 1) + element * inner * states
    return {
        "layers": count["M"] + count["*"],
        "mlp_layers": count["E"] + count["-"],
        "dense_layers": count["-"] if count["E"] else 0,
        "mlp_matrices": 2,
        "linear_layers": count["M"],
        "linear_parameters": hidden * (inner + convolved + heads) + convolved * kernel + inner * hidden,
        "state_bytes": count["M"] * state,
    }


# Keys that may say something of memory or time, and those of them that are read or change neither.
_TELLING = re.compile(
    r"layer|attn|attention|window|mtp|nextn|expert|moe|linear|mamba|ssm|conv|lora|sparse|share|latent|vision"
)
_READ = re.compile(
    r"num_hidden_layers|layer_types|num_attention_heads|full_attention_interval|attn_output_gate|.*intermediate_size|share_expert_dim"
    r"|n(um)?(_local|_routed|_shared)?_experts(_per_tok)?|experts_per_token|top_k_experts|moe_(topk|layer_freq|latent_size)"
    r"|first_k_dense_replace|mlp_only_layers|decoder_sparse_step|linear_(num|key|value|conv).*|mamba_(num_heads|head_dim)"
    r"|ssm_state_size|conv_kernel|mamba_ssm_(cache_)?dtype|(kv|q)_lora_rank|sliding_window(_pattern)?|use_sliding_window|layer_norm.*"
    r"|attention_(bias|dropout)|.*(layernorm|dropout|router|bias|eps|token_id|hidden_act|tied?_.*|use_mamba_kernels)"
    r"|max_window_layers|num_(hidden_)?layers|pretraining_.*|.*_parallel|initializer.*"
)


def unread_keys(config: Config) -> list[str]:
    """Return the keys of a config.json, nested ones by their section, that may matter and that nothing is taken from."""
    nested = config.get("text_config")
    config = (
        nested | {key: config[key] for key in ("vision_config",) if key in config}
        if isinstance(nested, dict)
        else config
    )
    said = {key for key, value in config.items() if value not in (None, 0, False, [], "", {})}
    return sorted(key for key in said if _TELLING.search(key) and not _READ.fullmatch(key))
