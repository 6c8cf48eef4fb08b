"""Shapes of models (`models.toml`) and data sheets of GPUs (`gpus.toml`), from which memory and work follow."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simrl.errors import InputError, first_line, meant
from simrl.validation import explain

Numbers = TypeVar("Numbers", float, NDArray[np.float64])
MIB = 2**20
MOST = 10**9  # of a count in a model's config
# Of a link's data sheet, in large collectives: aiconfigurator's NCCL tables (all-gather, reduce-scatter and all-to-all of
# 512 MiB among 4 and 8 GPUs: 0.66 to 0.74 on A100, H100 and B200).
LINK_SHARE = 0.7
MEMORY_APART = 0.04  # the gigabytes in a GPU's name are of either kind, and rounded


class ModelShape(BaseModel):
    """A decoder-only transformer, in the terms of a Hugging Face `config.json`. Weights and KV cache in bfloat16.

    A mixture of experts has `experts` MLPs of `moe_intermediate` in every layer in place of one; a token uses
    `experts_per_token` of them. `qk_norm`: queries and keys are normalised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    experts: int = Field(default=0, ge=0, le=MOST)
    experts_per_token: int = Field(default=0, ge=0, le=MOST)
    moe_intermediate: int = Field(default=0, ge=0, le=MOST)

    @model_validator(mode="after")
    def _check_experts_and_heads(self) -> ModelShape:
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.moe_intermediate > 0):
            raise ValueError(
                f"{self.experts} experts need a moe_intermediate above 0 and 1 to {self.experts} experts_per_token"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads do not divide {self.heads} attention heads")
        return self

    @property
    def layer_parameters(self) -> int:
        """Return the weights of a layer that multiply activations: attention and MLP, or attention, router and all experts."""
        return self._layer_parameters(self.experts)

    @property
    def active_layer_parameters(self) -> int:
        """Return the weights of a layer used per token (of a mixture of experts: the routed experts only)."""
        return self._layer_parameters(self.experts_per_token)

    def _layer_parameters(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts == 0:
            return attention + 3 * self.hidden * self.intermediate
        return attention + self.hidden * self.experts + 3 * self.hidden * self.moe_intermediate * experts

    @property
    def parameters(self) -> int:
        """Return the number of weights, embeddings and output head included."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights in bfloat16."""
        return 2 * self.parameters

    @property
    def tensors(self) -> int:
        """Return the number of weight tensors, as in a checkpoint: an expert has three. Biases are left out."""
        mlp = 1 + 3 * self.experts if self.experts else 3
        return self.layers * (4 + 2 + 2 * self.qk_norm + mlp) + (2 if self.tied_embeddings else 3)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of the keys and values of one token over all layers and KV heads, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, tokens: Numbers, attended_tokens: Numbers) -> Numbers:
        """Return the multiply-adds ×2 of a forward pass over `tokens`, which attend to `attended_tokens` in sum (causal: about
        half the square of each sequence's length). The output head is included, the embedding look-up is not."""
        dense = 2.0 * (self.layers * self.active_layer_parameters + self.vocab * self.hidden) * tokens
        return dense + 4.0 * self.layers * self.heads * self.head_dim * attended_tokens

    def activation_bytes(self, tokens: Numbers) -> Numbers:
        """Return the bytes that the matrix products of all layers read and write for `tokens` in bfloat16, weights excluded."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        intermediate = self.experts_per_token * self.moe_intermediate if self.experts else self.intermediate
        return 2.0 * self.layers * (4 * self.hidden + attention + 3 * intermediate) * tokens


class Gpu(BaseModel):
    """The figures of a data sheet, and the topology around a GPU. `link_bytes_per_s` is one direction of the scale-up link,
    which joins `nvlink_domain` GPUs; `network_bytes_per_s` the GPU's share of the scale-out network, one direction;
    `gpus_per_node` share a host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    bf16_flops: float = Field(gt=0, description="dense, without sparsity")
    matmul_share: float = Field(default=0.8, gt=0, le=1, description="of bf16_flops, reached by large matrix products")
    mma_flops: float = Field(default=0.0, ge=0, description="by Ampere's instructions, dense bfloat16; 0: bf16_flops")
    link_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(gt=0, description="to or from the host's memory, PCIe x16, one direction")
    gpus_per_node: int = Field(default=8, gt=0, description="as the vendors' HGX and DGX systems have")
    nvlink_domain: int = Field(
        default=8, gt=0, description="GPUs that the scale-up link joins; PCIe joins those of a node"
    )
    source: str

    def bytes_per_s_among(self, gpus: int, link_share: float = LINK_SHARE) -> float:
        """Return the rate at which each of `gpus` receives a tensor in an all-gather (or sends one in a reduce-scatter): what
        collectives reach of the link within a domain. Beyond, the network share of each of a domain's GPUs brings another
        part, which the link hands on within the domain, as NCCL's rings do."""
        link = link_share * self.link_bytes_per_s
        return link if gpus <= self.nvlink_domain else min(link, self.nvlink_domain * self.network_bytes_per_s)


def _named(file: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a data file beside this module, each with its `name`."""
    tables = tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {name: {"name": name, **fields} for name, fields in tables.items()}


MODELS = {name: ModelShape.model_validate(fields) for name, fields in _named("models.toml").items()}
GPUS = {
    name: Gpu.model_validate({"memory_bytes": fields.pop("memory_mib") * MIB, **fields})
    for name, fields in _named("gpus.toml").items()
}

# The fields of a shape, and their keys in a config.json.
CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys of a mixture of experts, and their values where all layers are alike.
_UNLIKE: dict[str, object] = {
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def require_dense(shape: ModelShape, what: str) -> None:
    """Raise `InputError` for a mixture of experts where only dense models are modelled."""
    if shape.experts:
        raise InputError(
            f"{what}: {shape.name} is a mixture of experts, whose times must be measured; use `simrl measure`"
        )


def model_shape(model: str | Path) -> ModelShape:
    """Return the shape of a model by its name in `MODELS` or on Hugging Face, or from a `config.json` (the file or its folder).

    Raises `InputError` for an unknown name, an unreadable file, or layers that are not all alike (some with experts, some
    without; experts that all tokens share).
    """
    if (name := known_name(str(model))) in MODELS:
        return MODELS[name]
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(
                f"model {model}{meant(path.name, MODELS)}: neither a config.json nor one of {', '.join(MODELS)}"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON config ({first_line(error)}); name a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: a model config is a JSON object, this is a {type(config).__name__}")
    missing = [key for key in CONFIG_KEYS.values() if key not in config]
    if missing:
        raise InputError(
            f"{path}: no key {missing[0]!r}; a dense transformer's config has {', '.join(CONFIG_KEYS.values())}"
        )
    try:
        return ModelShape.model_validate(_fields(config, path))
    except ValidationError as error:
        field, message = explain(error, ModelShape, "a model")
        written = f" ({CONFIG_KEYS[field]})" if field in CONFIG_KEYS else ""
        raise InputError(f"{path}: {message}{written}; correct the config") from error


def known_name(model: str) -> str:
    """Return a model's name as in `MODELS`: `Qwen/Qwen3-30B-A3B-Instruct-2507` is `qwen3-30b-a3b`, unless there is a folder of
    that name; what a model was tuned for changes no shape."""
    name = model.lower()
    if name in MODELS or os.path.exists(model):  # noqa: PTH110 (pathlib's raises for a name that is too long)
        return name
    name = name.rpartition("/")[2].removeprefix("meta-")
    while name not in MODELS and (shorter := re.sub(r"-(instruct|thinking|base|it|chat|2507)$", "", name)) != name:
        name = shorter
    return name


def _fields(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of the shape that a config.json describes."""
    shape = {field: config[key] for field, key in CONFIG_KEYS.items()}
    heads, hidden = shape["heads"], shape["hidden"]
    shape["name"] = Path(str(config.get("_name_or_path") or path.resolve().parent.name)).name.lower()
    shape["kv_heads"] = config.get("num_key_value_heads") or heads
    shape["head_dim"] = config.get("head_dim")
    if shape["head_dim"] is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        shape["head_dim"] = hidden // heads
    shape["tied_embeddings"] = config.get("tie_word_embeddings", False)
    shape["qk_norm"] = str(config.get("model_type")).startswith("qwen3")
    if experts := next((config[key] for key in _EXPERTS if config.get(key)), 0):
        for key, alike in _UNLIKE.items():
            if config.get(key, alike) not in (alike, None):
                raise InputError(
                    f"{path}: {key} is {config[key]}; simrl models mixtures of experts whose layers are all alike"
                )
        shape["experts"], shape["experts_per_token"] = experts, config.get("num_experts_per_tok", 0)
        shape["moe_intermediate"] = config.get("moe_intermediate_size") or shape["intermediate"]
    return shape


# Words of a GPU's name that say nothing of its data sheet: SXM is meant unless PCIe is said.
_PLAIN_WORDS = re.compile(r"nvidia|tensor|core|gpu|hgx|dgx|sxm\d?|hbm\d?e?|nvl72|rtx|blackwell|server|edition|")


def known_gpu(name: str) -> str:
    """Return a GPU's name as in `GPUS`: `NVIDIA H100 80GB HBM3`, `H100-SXM5` and `H100` are `h100`. A name with another memory,
    or with a word that may stand for another data sheet (`H100 NVL`), stays."""
    text = re.sub(
        r"(\d) gb\b", r"\1gb", re.sub(r"(sxm\d?)", r" \1 ", name.lower().replace("rtx pro 6000", "rtxpro6000"))
    )
    words = [word for word in re.split(r"[^a-z0-9]+", text) if not _PLAIN_WORDS.fullmatch(word)]
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d{2,3}gb", word)]
    found = "-".join(word for word in words if not re.fullmatch(r"\d{2,3}gb", word))
    if found not in GPUS:
        return name
    fits = (
        min(abs(size * unit / GPUS[found].memory_bytes - 1) for unit in (1e9, 2**30)) < MEMORY_APART for size in sizes
    )
    return found if all(fits) else name


def gpu(name: str) -> Gpu:
    """Return a GPU by its name in `GPUS`, or one that `known_gpu` knows."""
    found = known_gpu(name)
    if found not in GPUS:
        raise InputError(f"gpu {name!r} is unknown{meant(name, GPUS)}; choose one of {', '.join(GPUS)}")
    return GPUS[found]
