"""Shapes of models (`models.toml`), from which memory and work follow."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from simrl.errors import InputError, choose, first_line, refuse
from simrl.profile.model_config import CONFIG_KEYS, fields_of_config, left_out
from simrl.validation import Model, explain

Numbers = TypeVar("Numbers", float, NDArray[np.float64])
# Ends of names that change no shape.
_TUNED = r"-(instruct|thinking|think|base|it|chat|hf|pt|bf16|fp8|rl|sft|dpo|zero|\d{4}|v\d(\.\d)?)$"
MOST = 10**9  # of a count in a model's config


class ModelShape(Model):
    """A decoder-only transformer, in the terms of a Hugging Face `config.json`. Weights and KV
    cache in bfloat16.

    A layer is a mixer of tokens and an MLP. `linear_layers` of the `layers` have a fixed state in
    place of KV (gated delta nets, Mamba2): `linear_parameters` weights each, and `state_bytes` of a
    sequence over all of them. `window_layers` attend to the last `window_tokens` only, the other
    layers to every token. With `kv_lora_rank` attention is MLA: the KV cache is a latent and one
    head of `rope_head_dim`, so `kv_heads` is 1, and `head_dim` is the part of a head without
    position.

    A mixture of experts has `experts` MLPs of `moe_intermediate` in a layer in place of one; a
    token uses `experts_per_token` of them, and all tokens one more of `shared_intermediate`. The
    first `dense_layers` have a plain MLP. `expert_hidden`: width in which routed experts work, if
    it is not `hidden` (Nemotron-3's latent experts). `mlp_layers`: layers with an MLP at all (0:
    every), of `mlp_matrices` matrices. `qk_norm`: queries and keys are normalised. `output_gate`:
    attention has a gate as wide as its queries. `mtp_layers`: heads that predict further tokens
    (`simrl.speculation.draft_times.mtp_shape`), in no other figure here. `without`: parts of the
    model that are left out or modelled roughly, in words.
    """

    name: str
    layers: int = Field(gt=0, le=MOST)
    hidden: int = Field(gt=0, le=MOST)
    heads: int = Field(gt=0, le=MOST)
    kv_heads: int = Field(gt=0, le=MOST)
    head_dim: int = Field(gt=0, le=MOST)
    intermediate: int = Field(gt=0, le=MOST)
    vocab: int = Field(gt=0, le=MOST)
    tied_embeddings: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    experts: int = Field(default=0, ge=0, le=MOST)
    experts_per_token: int = Field(default=0, ge=0, le=MOST)
    moe_intermediate: int = Field(default=0, ge=0, le=MOST)
    shared_intermediate: int = Field(default=0, ge=0, le=MOST)
    expert_hidden: int = Field(default=0, ge=0, le=MOST)
    dense_layers: int = Field(default=0, ge=0, le=MOST)
    mlp_layers: int = Field(default=0, ge=0, le=MOST)
    mlp_matrices: int = Field(default=3, ge=2, le=3)
    kv_lora_rank: int = Field(default=0, ge=0, le=MOST)
    q_lora_rank: int = Field(default=0, ge=0, le=MOST)
    rope_head_dim: int = Field(default=0, ge=0, le=MOST)
    v_head_dim: int = Field(default=0, ge=0, le=MOST)
    linear_layers: int = Field(default=0, ge=0, le=MOST)
    linear_parameters: int = Field(default=0, ge=0, le=10**12)
    state_bytes: int = Field(default=0, ge=0, le=10**12)
    window_layers: int = Field(default=0, ge=0, le=MOST)
    window_tokens: int = Field(default=0, ge=0, le=MOST)
    mtp_layers: int = Field(default=0, ge=0, le=MOST)
    without: str = ""

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        refuse(
            (
                self.experts
                and not (0 < self.experts_per_token <= self.experts and self.moe_intermediate > 0),
                f"{self.experts} experts need a moe_intermediate above 0 and 1 to {self.experts} experts_per_token",
            ),
            (
                self.heads % self.kv_heads,
                f"{self.kv_heads} KV heads do not divide {self.heads} attention heads",
            ),
            (
                self.kv_lora_rank
                and not (self.kv_heads == 1 and self.rope_head_dim and self.v_head_dim),
                "a kv_lora_rank needs kv_heads 1, a rope_head_dim and a v_head_dim",
            ),
            (
                bool(self.linear_layers) != bool(self.state_bytes and self.linear_parameters),
                "linear_layers, linear_parameters and state_bytes belong together",
            ),
            (self.linear_layers == self.layers, "no layer has attention, which is not modelled"),
            (
                bool(self.window_layers) != bool(self.window_tokens),
                "window_layers and window_tokens belong together",
            ),
            (
                self.linear_layers + self.window_layers > self.layers
                or max(self.mlp_layers, self.dense_layers) > self.layers,
                f"more layers of a kind than the {self.layers} layers",
            ),
            error=ValueError,
        )
        return self

    @property
    def attention_layers(self) -> int:
        """Return the number of layers that keep keys and values, of all tokens or of a window."""
        return self.layers - self.linear_layers

    @property
    def full_layers(self) -> int:
        """Return the number of layers that keep the keys and values of every token."""
        return self.attention_layers - self.window_layers

    @property
    def expert_layers(self) -> int:
        """Return the number of layers whose MLP is a mixture of experts."""
        return (self.mlp_layers or self.layers) - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Return the weights of an attention layer's matrices."""
        if not self.kv_lora_rank:
            return (
                self.hidden
                * self.head_dim
                * ((2 + self.output_gate) * self.heads + 2 * self.kv_heads)
            )
        queries = self.heads * (self.head_dim + self.rope_head_dim)
        query = (
            self.q_lora_rank * (self.hidden + queries)
            if self.q_lora_rank
            else self.hidden * queries
        )
        latent = self.kv_lora_rank * self.heads * (self.head_dim + self.v_head_dim)
        return (
            query
            + self.hidden * (self.kv_lora_rank + self.rope_head_dim + self.heads * self.v_head_dim)
            + latent
        )

    @property
    def expert_parameters(self) -> int:
        """Return the weights of a routed expert."""
        return self.mlp_matrices * (self.expert_hidden or self.hidden) * self.moe_intermediate

    @property
    def routed_parameters(self) -> int:
        """Return the weights of the routed experts of all layers."""
        return self.expert_layers * self.experts * self.expert_parameters

    @property
    def layer_parameters(self) -> int:
        """Return the weights of the largest layer that multiply activations: attention and MLP, or
        router and all experts."""
        experts = (
            self.experts * self.expert_parameters + self._beside_experts
            if self.expert_layers
            else 0
        )
        mlp = (
            self.mlp_matrices * self.hidden * self.intermediate
            if not self.expert_layers or self.dense_layers
            else 0
        )
        mixers = [self.attention_parameters] * (self.attention_layers > 0) + [
            self.linear_parameters
        ]
        return max(mixers) + max(experts, mlp)

    @property
    def body_parameters(self) -> int:
        """Return the weights of all layers that multiply activations."""
        return self._body(self.experts)

    @property
    def active_body_parameters(self) -> int:
        """Return the weights of all layers that a token uses (of routed experts: those it is routed
        to)."""
        return self._body(self.experts_per_token)

    @property
    def _beside_experts(self) -> int:
        """Return the weights beside the routed experts of a layer: router, shared experts, latent
        projections."""
        return self.hidden * (
            self.experts + self.mlp_matrices * self.shared_intermediate + 2 * self.expert_hidden
        )

    def _body(self, experts: int) -> int:
        mixers = (
            self.attention_layers * self.attention_parameters
            + self.linear_layers * self.linear_parameters
        )
        plain = (self.mlp_layers or self.layers) - self.expert_layers
        mlps = plain * self.mlp_matrices * self.hidden * self.intermediate
        return (
            mixers
            + mlps
            + self.expert_layers * (self._beside_experts + experts * self.expert_parameters)
        )

    @property
    def parameters(self) -> int:
        """Return the number of weights, embeddings and output head included."""
        return self.body_parameters + self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Return the number of weights that a token uses, output head included, embeddings not."""
        return self.active_body_parameters + self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights in bfloat16."""
        return 2 * self.parameters

    @property
    def tensors(self) -> int:
        """Return the number of weight tensors, as in a checkpoint: an expert has three. Biases are
        left out."""
        attention = (7 if self.q_lora_rank else 5) if self.kv_lora_rank else 4 + 2 * self.qk_norm
        mixers = self.attention_layers * attention + self.linear_layers * 7
        experts = (
            1
            + self.mlp_matrices * (self.experts + (self.shared_intermediate > 0))
            + 2 * (self.expert_hidden > 0)
        )
        mlps = self.mlp_layers or self.layers
        mlp = self.expert_layers * experts + (mlps - self.expert_layers) * self.mlp_matrices
        return mixers + mlp + self.layers + mlps + (2 if self.tied_embeddings else 3)

    @property
    def layer_kv_bytes(self) -> int:
        """Return the bytes that an attention layer keeps of one token, over all KV heads, in
        bfloat16."""
        return 2 * (self.kv_lora_rank + self.rope_head_dim or 2 * self.kv_heads * self.head_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV cache that a sequence grows by with a token, in bfloat16, over the
        layers that keep every token and all KV heads. Windows and states are bounded."""
        return self.full_layers * self.layer_kv_bytes

    def forward_flops(self, tokens: Numbers, attended_tokens: Numbers) -> Numbers:
        """Return the multiply-adds ×2 of a forward pass over `tokens`, which attend to
        `attended_tokens` in sum (causal: about half the square of each sequence's length). The
        output head is included, the embedding look-up is not, nor is the recurrence of linear
        layers (2 % of all products of Qwen3-Next)."""
        pair = (
            2.0
            * self.heads
            * (self.head_dim + self.rope_head_dim + (self.v_head_dim or self.head_dim))
        )
        dense = 2.0 * (self.active_body_parameters + self.vocab * self.hidden) * tokens
        flops = dense + pair * self.full_layers * attended_tokens
        if self.window_layers:
            flops = flops + pair * self.window_layers * self.windowed(tokens, attended_tokens)
        return flops

    def read_tokens(self, tokens: Numbers) -> Numbers:
        """Return the cached tokens that attention to `tokens` reads, summed over full layers and
        windows."""
        windowed = np.minimum(tokens, self.window_tokens)
        return self.full_layers * tokens + self.window_layers * windowed

    def windowed(self, tokens: Numbers, attended_tokens: Numbers) -> Numbers:
        """Return the tokens that `tokens` attend to through a window, if without it they attend to
        `attended_tokens` in sum."""
        beyond = np.maximum(
            2.0 * attended_tokens / tokens - self.window_tokens, 0.0
        )  # of the mean length
        return attended_tokens - tokens * beyond**2 / (2.0 * (beyond + self.window_tokens))


MODELS = {
    name: ModelShape.model_validate({"name": name, **fields})
    for name, fields in tomllib.loads(
        (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    ).items()
}


def require_kv_heads(what: str, tp: int, shape: ModelShape) -> None:
    """Raise `InputError` for KV heads that `tp` GPUs can neither divide among them nor have equally
    many copies of."""
    if max(tp, shape.kv_heads) % min(tp, shape.kv_heads):
        raise InputError(
            f"{what} is {tp}: it neither divides the {shape.kv_heads} KV heads of {shape.name} nor is a multiple of them; "
            f"choose a divisor or a multiple"
        )


def model_shape(model: str | Path) -> ModelShape:
    """Return the shape of a model by its name in `MODELS` or on Hugging Face, or from a
    `config.json` (the file or its folder).

    Raises `InputError` for an unknown name, an unreadable file, or parts whose memory or time would
    come out wrong.
    """
    if (name := known_name(str(model))) in MODELS:
        return MODELS[name]
    config, path = _config_of(model)
    try:
        fields = fields_of_config(config, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: a key is missing or of another kind ({first_line(error)}); correct the config"
        ) from error
    try:
        return ModelShape.model_validate(fields)
    except ValidationError as error:
        field, message = explain(error, ModelShape, "a model")
        written = f" ({CONFIG_KEYS[field]})" if field in CONFIG_KEYS else ""
        raise InputError(f"{path}: {message}{written}; correct the config") from error


def known_name(model: str) -> str:
    """Return a model's name as in `MODELS`: `Qwen/Qwen3-30B-A3B-Instruct-2507` is `qwen3-30b-a3b`,
    unless there is a folder of that name; a model's date and what it was tuned for change no
    shape."""
    name = model.lower()
    if name in MODELS or os.path.exists(model):  # noqa: PTH110 (pathlib's raises for a name that is too long)
        return name
    name = name.rpartition("/")[2].removeprefix("meta-").removeprefix("nvidia-")
    while name not in MODELS and (shorter := re.sub(_TUNED, "", name)) != name:
        name = shorter
    return name


def understood(model: str) -> str:
    """Return which parts of a model's config.json were understood and which not, in a line; "" for
    a model known by name."""
    if known_name(model) in MODELS:
        return ""
    s, (config, _) = model_shape(model), _config_of(model)
    kind = "latent" if s.kv_lora_rank else "full"
    parts = [
        f"{n} layers of {what}"
        for n, what in (
            (s.full_layers, f"{kind} attention"),
            (s.window_layers, f"attention to {s.window_tokens} tokens"),
            (s.linear_layers, f"a fixed state ({s.state_bytes / 2**20:.0f} MiB a sequence)"),
        )
        if n
    ]
    if s.experts:
        shared = ", shared ones beside" if s.shared_intermediate else ""
        parts.append(
            f"{s.experts_per_token} of {s.experts} experts in {s.expert_layers} layers{shared}"
        )
    unread = ", ".join(left_out(config)) or "nothing that may matter"
    return f"understood: {', '.join(parts)}; not read: {unread}"


def _config_of(model: str | Path) -> tuple[dict[str, Any], Path]:
    """Return a model's config.json, and where it is. Raise `InputError` for none that can be
    read."""
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(
                f"model {path}: no such file; name a model's config.json, or one of simrl profile names"
                if str(model).startswith((".", "/", "~")) or path.suffix == ".json"
                else f"model {model}: no known name, nor a config.json{choose(path.name, MODELS, 'simrl profile names')}"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not a JSON config ({first_line(error)}); name a model's config.json"
        ) from error
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: a model config is a JSON object, this is a {type(config).__name__}"
        )
    return config, path
