"""Fields of a model's shape from its config.json, and which parts of the config were understood.

Invariant: a key that sounds of memory or time is looked up, or changes neither (`_HARMLESS`), or is
a part that every answer leaves out and names (`_LEFT_OUT`); any other is refused, never ignored.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import UserDict
from pathlib import Path
from typing import Any

from simrl.errors import InputError, refuse
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
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)
_PER_TOKEN = (
    *("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
    *("top_k_experts", "moe_topk", "moe_k"),
)
# Heads that predict further tokens: DeepSeek-V3, GLM and MiMo, Qwen3.5.
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Keys that are not modelled, and their values where they change nothing.
_NOT_MODELLED: dict[str, object] = {
    "global_head_dim": 0,
    "sparse_attention_config": {},
    "block_configs": [],
    "attention_k_eq_v": False,
    "o_lora_rank": 0,
    "is_encoder_decoder": False,
    "full_attn_mod": 1,
}
# Keys whose parts are modelled roughly, within bounds, and how.
_ROUGHLY = {
    "index_topk": "sparse attention: every token is attended to, an upper bound, and its index is left out",
    "attention_chunk_size": "attention in chunks: as a window of a chunk's tokens",
    "swa_num_key_value_heads": "KV heads of windows: as many as of the other layers",
    "num_kv_shared_layers": "layers that share keys and values: each has its own, an upper bound",
    "hidden_size_per_layer_input": "embeddings of each layer",
}
# Kinds of layers by their names in a config: the keys and values of every token, of a window, or a
# fixed state.
_LAYER_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
}
# What a family's config leaves to its class: transformers 5.24, configuration_*.py.
FAMILIES = tomllib.loads(
    (Path(__file__).parent / "model_families.toml").read_text(encoding="utf-8")
)
# Models whose every layer has the window, if their config names one and no layers.
_ALL_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
# Words of keys that may say something of memory or time; keys that say it of parts that are left
# out; keys that change neither.
_TELLING = re.compile(
    r"layer|attn|attention|window|mtp|nextn|expert|moe|linear|mamba|ssm|conv|lora|sparse|share|latent|vision|audio"
    r"|block|head|kv|ffn|mlp|intermediate|recurrent|lru|index|zero_"
)
_LEFT_OUT = re.compile(r"(vision|audio|talker|code2wav|token2wav)_config|.*(mtp|nextn).*")
_HARMLESS = re.compile(
    r".*(bias|drop(out)?|_eps|_epsilon|token_(id|index)|hidden_act|dtype|softcapping|multiplier|_coef|_coeff)"
    r"|.*(layer_?norm|router|initializer|_loss_|implementation).*"
    r"|(vision|image)_.*|no_rope_layer.*|pretraining_.*|.*_parallel|use_mamba_kernels|moe_(renormalize|shared_expert_overlap)"
    r"|index.*|.*per_layer_input|mamba_(chunk_size|norm_before_gate|rms_norm|expand)|block_(multiple_of|ff_dim)|moe_(capacity|gate).*"
    r"|vision_.*|latent_moe_use_norm|num_expert_group|qk_head_dim|num_reward_heads|query_pre_attn_scalar|use_flash_attn"
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
    text = _of_text(raw)
    config = _Keys(FAMILIES.get(str(text.get("model_type")), {}) | text)
    layers = config.get("num_hidden_layers")
    for key, plain in {**_NOT_MODELLED, "num_layers": layers}.items():
        if config.get(key) not in (plain, None):
            raise _not_modelled(path, key, config[key])
    refuse(
        (
            len(set(config.get("attn_type_list") or [])) > 1,
            f"{path}: attn_type_list has several kinds, which are not modelled; name a model without it",
        ),
        (
            isinstance(layers, int) and layers > MOST_LAYERS,
            f"{path}: num_hidden_layers is {layers}; it must be at most {MOST_LAYERS}",
        ),
    )
    fields = _fields(config, name, path)
    words = [
        f"the {key.removesuffix('_config')} part: its weights and time are left out, "
        "and its tokens count only if prompt_tokens has them"
        for key in left_out(raw)
        if key.endswith("_config")
    ]
    words += [how for key, how in _ROUGHLY.items() if config.get(key) not in _NOTHING]
    fields["without"] = "; ".join(words)
    for key, value in text.items():
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
    of = config.get("thinker_config") or config
    nested = [of.get(key) for key in ("text_config", "llm_config", "language_config", "llm")]
    text = next((keys for keys in nested if isinstance(keys, dict)), of)
    tied = {key: value for key, value in config.items() if key == "tie_word_embeddings"}
    return tied | text


def left_out(config: Config) -> list[str]:
    """Return the keys of parts of a model that its shape leaves out: layers that draft, and
    encoders of other inputs."""
    keys = {**config, **config.get("thinker_config", {}), **_of_text(config)}
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
    shape |= {
        "name": name,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": first_of(config, ("head_dim", "attention_head_dim")),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "qk_norm": str(config.get("model_type")).startswith("qwen3")
        or bool(config.get("use_qk_norm")),
        "mtp_layers": first_of(config, _MTP),
        # Qwen3-Next has the gate without a key for it.
        "output_gate": bool(
            config.get("attn_output_gate", config.get("model_type") == "qwen3_next")
        ),
    }
    if not shape["head_dim"] and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        shape["head_dim"] = hidden // heads
    if config.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds, in blocks
        block = config.get("block_multiple_of") or 256
        shape["intermediate"] = -(-2 * shape["intermediate"] // (3 * block)) * block
    shape["intermediate"] = (
        config.get("intermediate_size_mlp")
        or (not experts and config.get("shared_intermediate_size"))
        or shape["intermediate"]
    )
    if config.get("kv_lora_rank"):
        shape |= {
            "kv_heads": 1,
            "head_dim": config.get("qk_nope_head_dim"),
            "rope_head_dim": config.get("qk_rope_head_dim"),
            **{key: config.get(key) or 0 for key in ("kv_lora_rank", "q_lora_rank", "v_head_dim")},
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
    shared, shared_experts = first_of(config, _SHARED_WIDTH), first_of(config, _SHARED)
    layers, first, frequency = (
        config["num_hidden_layers"],
        first_of(config, _FIRST_DENSE),
        config.get("moe_layer_freq") or 1,
    )
    step = config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1
    without, of_experts = config.get("mlp_only_layers") or [], config.get("moe_layers")
    if isinstance(frequency, list):
        without, frequency = [i for i, has in enumerate(frequency) if not has], 1
    if of_experts:
        without = [i for i in range(layers) if i not in of_experts]
    kinds = config.get("mlp_layer_types") or []
    mixed = [
        i
        for i in range(first, layers)
        if (i + 1) % (step * frequency) == 0
        and i not in without
        and "dense" not in kinds[i : i + 1]
    ]
    return {
        "experts": experts,
        "experts_per_token": first_of(config, _PER_TOKEN),
        "moe_intermediate": inner,
        "shared_intermediate": shared or shared_experts * inner,
        "dense_layers": layers - len(mixed),
        "expert_hidden": config.get("moe_latent_size") or 0,
    }


def _mixers(config: _Keys, path: Path) -> Config:
    """Return the fields of the layers that do not attend to every token."""
    layers = config["num_hidden_layers"]
    if pattern := config.get("hybrid_override_pattern"):
        return _nemotron(config, str(pattern), path)
    if config.get("model_type") == "falcon_h1":  # each layer has both mixers
        mixers = {"layers": 2 * layers, "mlp_layers": layers, "linear_layers": layers}
        return mixers | _mamba(config, layers)
    names = _names_of_layers(config, layers)
    if names and len(names) != layers:
        raise InputError(
            f"{path}: layer_types has {len(names)} entries for {layers} layers; complete the config"
        )
    if unknown := set(names) - set(_LAYER_KINDS):
        raise InputError(
            f"{path}: layer_types has {min(map(str, unknown))!r}; modelled are {', '.join(_LAYER_KINDS)}"
        )
    kinds = [_LAYER_KINDS[name] for name in names]
    fields: Config = {}
    if linear := kinds.count("state"):
        fields |= {"linear_layers": linear, **_states(config, linear, path)}
    if windows := _windows(config, layers, kinds, path):
        tokens = config.get("attention_chunk_size") or config["sliding_window"]
        fields |= {"window_layers": windows, "window_tokens": tokens}
    return fields


def _names_of_layers(config: _Keys, layers: int) -> list[str]:
    """Return the kind of each layer, by its name in `_LAYER_KINDS`; none where a config says
    nothing."""
    if names := config.get("layer_types") or config.get("layers_block_type"):
        return list(names)
    repeated = config.get("sliding_window_pattern")
    states = (config.get("linear_attn_config") or {}).get("kda_layers")
    if states:
        return [("full_attention", "linear_attention")[i + 1 in states] for i in range(layers)]
    if indices := config.get("full_attn_idxs"):
        return [("conv", "full_attention")[i in indices] for i in range(layers)]
    if windows := config.get("hybrid_layer_pattern"):
        return [("full_attention", "sliding_attention")[one] for one in windows]
    if config.get("linear_num_value_heads"):
        every, other = config.get("full_attention_interval") or 4, "linear_attention"
    elif isinstance(repeated, str):  # LLLG
        every, other = len(repeated), "sliding_attention"
    else:
        every, other = repeated or 0, "sliding_attention"
    return [("full_attention", other)[(i + 1) % every > 0] for i in range(layers * (every > 0))]


def _states(config: _Keys, layers: int, path: Path) -> Config:
    """Return the weights of a layer with a fixed state, and the bytes of all states of a
    sequence."""
    hidden, kda = config["hidden_size"], config.get("linear_attn_config")
    if kda:  # Kimi's delta attention: gates through a head's width, states in 32 bits
        dim, heads, kernel = (
            kda[key] for key in ("head_dim", "num_heads", "short_conv_kernel_size")
        )
        wide = dim * heads
        weights = hidden * (4 * wide + 2 * dim + heads) + 2 * dim * wide + 3 * wide * kernel
        state = 6 * wide * (kernel - 1) + 4 * wide * dim
        return {"linear_parameters": weights, "state_bytes": layers * state}
    if kernel := config.get("conv_L_cache"):  # three gates and an output, and the last inputs
        weights = hidden * (4 * hidden + kernel)
        return {"linear_parameters": weights, "state_bytes": layers * 2 * hidden * kernel}
    if first_of(config, ("mamba_n_heads", "mamba_num_heads")):
        return _mamba(config, layers)
    return _delta_net(config, layers, path)


def _windows(config: _Keys, layers: int, kinds: list[str], path: Path) -> int:
    """Return how many layers attend to a window alone."""
    used = config.get("use_sliding_window")
    window = config.get("attention_chunk_size") or config.get("sliding_window")
    first, model = config.get("max_window_layers"), config.get("model_type")
    if used is None:
        used = not str(model).startswith("qwen")  # off where a config of Qwen does not say
    longest = config.get("max_position_embeddings") or math.inf
    if not window or not used or window >= longest:
        return 0
    if kinds:
        return kinds.count("window")
    if config.get("use_sliding_window"):  # Qwen2 and Qwen3 say from which layer on
        return max(layers - (first or 0), 0)
    if model not in _ALL_WINDOWS:
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
    return {
        "layers": count["M"] + count["*"],
        "mlp_layers": count["E"] + count["-"],
        "dense_layers": count["-"] if count["E"] else 0,
        "mlp_matrices": 2,
        "linear_layers": count["M"],
        **_mamba(config, count["M"]),
    }


def _mamba(config: _Keys, layers: int) -> Config:
    """Return the weights of a Mamba2 layer, and the bytes of all states of a sequence: recurrent
    ones in `mamba_ssm_cache_dtype`, 32 bits if not given."""
    heads, dim, groups, states, kernel = (
        first_of(config, keys) or config[keys[0]]
        for keys in (
            ("mamba_num_heads", "mamba_n_heads"),
            ("mamba_head_dim", "mamba_d_head"),
            ("n_groups", "mamba_n_groups"),
            ("ssm_state_size", "mamba_d_state"),
            ("conv_kernel", "mamba_d_conv"),
        )
    )
    hidden = config["hidden_size"]
    inner = config.get("mamba_d_ssm") or (
        hidden * config["mamba_expand"] if dim == "auto" else heads * dim
    )
    convolved = inner + 2 * groups * states
    element = 2 if config.get("mamba_ssm_cache_dtype") == "bfloat16" else 4
    weights = hidden * (inner + convolved + heads) + convolved * kernel + inner * hidden
    state = 2 * convolved * (kernel - 1) + element * inner * states
    return {"linear_parameters": weights, "state_bytes": layers * state}
