"""Fields of a model's shape from its config.json, and which parts of the config were understood.

Invariant: a key that sounds of memory or time is looked up, or changes neither (`_HARMLESS`), or is
a part that every answer leaves out and names (`_LEFT_OUT`); any other is refused, never ignored.
"""

from __future__ import annotations

import math
import re
from collections import UserDict
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
MOST_LAYERS = 10_000
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED = ("n_shared_experts", "num_shared_experts")
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
    "full_attn_mod": 1,
}
# Models whose every layer has the window, if their config names one and no layers.
_ALL_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
# Words of keys that may say something of memory or time; keys that say it of parts that are left
# out; keys that change neither.
_TELLING = re.compile(
    r"layer|attn|attention|window|mtp|nextn|expert|moe|linear|mamba|ssm|conv|lora|sparse|share|latent|vision|audio"
    r"|block|head|kv|ffn|mlp|intermediate|recurrent|lru|index|zero_"
)
_LEFT_OUT = re.compile(r"(vision|audio)_config|.*(mtp|nextn).*")
_HARMLESS = re.compile(
    r".*(bias|drop(out)?|_eps|_epsilon|token_(id|index)|hidden_act|dtype|softcapping|multiplier|_coef|_coeff)"
    r"|.*(layer_?norm|router|initializer|_loss_|implementation).*"
    r"|(vision|image)_.*|no_rope_layer.*|pretraining_.*|.*_parallel|use_mamba_kernels|moe_(renormalize|shared_expert_overlap)"
    r"|latent_moe_use_norm|num_expert_group|qk_head_dim|num_reward_heads|query_pre_attn_scalar|use_flash_attn"
)


class _Keys(UserDict[str, Any]):
    """A config.json, and which of its keys were looked up."""

    def __init__(self, config: Config) -> None:
        self.looked_up: set[str] = set()
        super().__init__(config)

    def __getitem__(self, key: str) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)


def fields_of_config(raw: Config, path: Path) -> Config:
    """Return the fields of the shape that a config.json describes. Raise `InputError` for what is
    missing or not modelled."""
    name = Path(str(raw.get("_name_or_path") or path.resolve().parent.name)).name.lower()
    config = _Keys(_of_text(raw))
    layers = config.get("num_hidden_layers")
    for key, plain in {**_NOT_MODELLED, "num_layers": layers}.items():
        if config.get(key) not in (plain, None):
            raise _not_modelled(path, key, config[key])
    if len(set(config.get("attn_type_list") or [])) > 1:
        raise InputError(
            f"{path}: attn_type_list has several kinds, which are not modelled; name a model without it"
        )
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(f"{path}: num_hidden_layers is {layers}; it must be at most {MOST_LAYERS}")
    fields = _fields(config, name, path)
    for key, value in config.data.items():
        matters = value not in _NOTHING and _TELLING.search(key) and not _LEFT_OUT.fullmatch(key)
        if matters and key not in config.looked_up and not _HARMLESS.fullmatch(key):
            raise _not_modelled(
                path, key, value, ", or delete the key if it changes neither memory nor time"
            )
    return fields


_NOTHING: tuple[object, ...] = (None, 0, False, [], "", {})


def _not_modelled(path: Path, key: str, value: object, remedy: str = "") -> InputError:
    return InputError(
        f"{path}: {key} is {shortened(value)}, which is not modelled; name a model without it{remedy}"
    )


def _of_text(config: Config) -> Config:
    """Return the keys of a model's text part: nested ones of a model that also sees."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    return {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | nested


def left_out(config: Config) -> list[str]:
    """Return the keys of parts of a model that its shape leaves out: layers that draft, and
    encoders of other inputs."""
    keys = {**config, **_of_text(config)}
    return sorted(
        key for key, value in keys.items() if value not in _NOTHING and _LEFT_OUT.fullmatch(key)
    )


def _fields(config: _Keys, name: str, path: Path) -> Config:
    """Return the fields of the shape, with all keys looked up that are read."""
    experts = first_of(config, _EXPERTS)
    if experts and "intermediate_size" not in config:
        config["intermediate_size"] = config.get("moe_intermediate_size")
    missing = [key for key in CONFIG_KEYS.values() if key not in config]
    if missing:
        raise InputError(
            f"{path}: no key {missing[0]!r}; a dense transformer's config has {', '.join(CONFIG_KEYS.values())}"
        )
    shape = {field: config[key] for field, key in CONFIG_KEYS.items()}
    heads, hidden = shape["heads"], shape["hidden"]
    shape["name"] = name
    shape["kv_heads"] = config.get("num_key_value_heads") or heads
    shape["head_dim"] = first_of(config, ("head_dim", "attention_head_dim"))
    if not shape["head_dim"] and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        shape["head_dim"] = hidden // heads
    shape["tied_embeddings"] = config.get("tie_word_embeddings", False)
    shape["qk_norm"] = str(config.get("model_type")).startswith("qwen3") or bool(
        config.get("use_qk_norm")
    )
    # Qwen3-Next has the gate without a key for it.
    shape["output_gate"] = bool(
        config.get("attn_output_gate", config.get("model_type") == "qwen3_next")
    )
    if config.get("kv_lora_rank"):
        shape |= {
            "kv_heads": 1,
            "head_dim": config.get("qk_nope_head_dim"),
            "rope_head_dim": config.get("qk_rope_head_dim"),
        }
        shape |= {
            key: config.get(key) or 0 for key in ("kv_lora_rank", "q_lora_rank", "v_head_dim")
        }
    if experts:
        shape |= _experts(config, experts, path)
    return shape | _mixers(config, path)


def first_of(config: _Keys, keys: tuple[str, ...]) -> Any:
    """Return the value of the first of the keys that a config has, 0 if it has none."""
    return next((value for value in [config.get(key) for key in keys] if value), 0)


def _experts(config: _Keys, experts: Any, path: Path) -> Config:
    """Return the fields of a mixture of experts."""
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = first_of(
        config,
        (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "share_expert_dim",
        ),
    )
    shared_experts = first_of(config, _SHARED)
    dense = config.get("first_k_dense_replace") or 0
    for key in ("mlp_only_layers", "moe_layer_freq"):
        plain = config.get(key) or []
        if key == "moe_layer_freq":
            plain = (
                []
                if plain == 1
                else [i for i, has_experts in enumerate(plain) if not has_experts]
                if isinstance(plain, list)
                else plain
            )
        if plain and plain != list(range(len(plain))):
            raise InputError(
                f"{path}: {key} is {config[key]}; only first layers without experts are modelled"
            )
        dense = max(dense, len(plain))
    return {
        "experts": experts,
        "experts_per_token": first_of(config, _PER_TOKEN),
        "moe_intermediate": inner,
        "shared_intermediate": shared or shared_experts * inner,
        "dense_layers": dense,
        "expert_hidden": config.get("moe_latent_size") or 0,
    }


def _mixers(config: _Keys, path: Path) -> Config:
    """Return the fields of the layers that do not attend to every token."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if pattern := config.get("hybrid_override_pattern"):
        return _nemotron(config, str(pattern), path)
    if kinds or config.get("linear_num_value_heads"):
        every = config.get("full_attention_interval") or 4
        kinds = kinds or [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
        ]
    kinds = kinds or []
    if kinds and len(kinds) != layers:
        raise InputError(
            f"{path}: layer_types has {len(kinds)} entries for {layers} layers; complete the config"
        )
    if unknown := set(kinds) - {"full_attention", "sliding_attention", "linear_attention"}:
        raise InputError(
            f"{path}: layer_types has {min(map(str, unknown))!r}; modelled are full_attention, sliding_attention and "
            "linear_attention"
        )
    fields: Config = {}
    if linear := kinds.count("linear_attention"):
        fields |= {"linear_layers": linear, **_delta_net(config, linear, path)}
    if windows := _windows(config, layers, kinds, path):
        fields |= {"window_layers": windows, "window_tokens": config["sliding_window"]}
    return fields


def _windows(config: _Keys, layers: int, kinds: list[str], path: Path) -> int:
    """Return how many layers attend to a window alone."""
    window, used = config.get("sliding_window"), config.get("use_sliding_window")
    first, model, pattern = (
        config.get(key) for key in ("max_window_layers", "model_type", "sliding_window_pattern")
    )
    if used is None:
        used = not str(model).startswith("qwen")  # off where a config of Qwen does not say
    longest = config.get("max_position_embeddings") or math.inf
    if not window or not used or window >= longest:
        return 0
    if kinds:
        return kinds.count("sliding_attention")
    if config.get("use_sliding_window"):  # Qwen2 and Qwen3 say from which layer on
        return max(layers - (first or 0), 0)
    if pattern or model not in _ALL_WINDOWS:
        raise InputError(f"{path}: some layers have windows, and no layer_types says which; add it")
    return layers


def _delta_net(config: _Keys, layers: int, path: Path) -> Config:
    """Return the weights of a gated delta net and the bytes of its states, in bfloat16 or
    `mamba_ssm_dtype`, as vLLM keeps them."""
    keys = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads", "conv_kernel_dim")
    sizes: list[int] = []
    for key in (f"linear_{key}" for key in keys):
        if not isinstance(size := config.get(key), int):
            raise InputError(
                f"{path}: no key {key!r}, which layers of linear_attention need; complete the config"
            )
        if size < 1:
            raise InputError(
                f"{path}: {key} is {size}; it must be above 0 for layers of linear_attention"
            )
        sizes.append(size)
    key_dim, key_heads, value_dim, value_heads, kernel = sizes
    keys_wide, values_wide, hidden = (
        key_dim * key_heads,
        value_dim * value_heads,
        config["hidden_size"],
    )
    convolved = 2 * keys_wide + values_wide
    element = 4 if config.get("mamba_ssm_dtype") == "float32" else 2
    state = 2 * convolved * (kernel - 1) + element * value_heads * value_dim * key_dim
    weights = hidden * (2 * keys_wide + 3 * values_wide + 2 * value_heads) + convolved * kernel
    return {"linear_parameters": weights, "state_bytes": layers * state}


def _nemotron(config: _Keys, pattern: str, path: Path) -> Config:
    """Return the fields of a Nemotron-H: one block a character, Mamba2 (M), attention (*), experts
    (E) or MLP (-)."""
    if unknown := set(pattern) - set("M*E-"):
        raise InputError(
            f"{path}: hybrid_override_pattern has {min(unknown)!r}; modelled are M, *, E and -"
        )
    count = {kind: pattern.count(kind) for kind in "M*E-"}
    heads, dim, groups = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"]
    inner, states, kernel, hidden = (
        heads * dim,
        config["ssm_state_size"],
        config["conv_kernel"],
        config["hidden_size"],
    )
    convolved = inner + 2 * groups * states
    element = 2 if config.get("mamba_ssm_cache_dtype") == "bfloat16" else 4
    state = 2 * convolved * (kernel - 1) + element * inner * states
    return {
        "layers": count["M"] + count["*"],
        "mlp_layers": count["E"] + count["-"],
        "dense_layers": count["-"] if count["E"] else 0,
        "mlp_matrices": 2,
        "linear_layers": count["M"],
        "linear_parameters": hidden * (inner + convolved + heads)
        + convolved * kernel
        + inner * hidden,
        "state_bytes": count["M"] * state,
    }
