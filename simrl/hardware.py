"""Shapes of models and data sheets of GPUs, and of a CPU core for replays where there is none: plain numbers, each with its
source, from which memory and work follow."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simrl.errors import InputError, first_line, meant
from simrl.validation import explain

MIB = 2**20
MOST = 10**9  # of a count in a model's config
GPUS_PER_NODE = 8  # as the vendors' HGX and DGX systems have


class ModelShape(BaseModel):
    """A decoder-only transformer, in the terms of a Hugging Face `config.json`. Weights and KV cache in bfloat16.

    With `experts`, every layer has so many MLPs of `moe_intermediate` instead of one, a token uses `experts_per_token`.
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
    experts: int = Field(default=0, ge=0, le=MOST)
    experts_per_token: int = Field(default=0, ge=0, le=MOST)
    moe_intermediate: int = Field(default=0, ge=0, le=MOST)

    @model_validator(mode="after")
    def _experts_are_whole(self) -> ModelShape:
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.moe_intermediate > 0):
            raise ValueError(
                f"{self.experts} experts need a moe_intermediate above 0 and 1 to {self.experts} experts_per_token"
            )
        return self

    @model_validator(mode="after")
    def _heads_share_keys_evenly(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads do not divide {self.heads} attention heads")
        return self

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that multiply activations: attention projections and MLP, or all experts and a router."""
        return self._layer_parameters(self.experts)

    @property
    def active_layer_parameters(self) -> int:
        """Of these, what multiplies one token."""
        return self._layer_parameters(self.experts_per_token)

    def _layer_parameters(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.experts == 0:
            return attention + 3 * self.hidden * self.intermediate
        return attention + self.hidden * self.experts + 3 * self.hidden * self.moe_intermediate * experts

    def activated_experts(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens is expected to choose, if all are chosen alike."""
        missed = 1.0 - self.experts_per_token / self.experts
        return self.experts * (1.0 - float(missed**tokens))

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers and KV heads."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, tokens: float, attended_tokens: float) -> float:
        """Multiply-adds ×2 of a forward pass over `tokens`, which attend to `attended_tokens` in sum (causal: about
        half the square of each sequence's length). The output head is included, the embedding look-up is not."""
        dense = 2.0 * (self.layers * self.active_layer_parameters + self.vocab * self.hidden) * tokens
        return dense + 4.0 * self.layers * self.heads * self.head_dim * attended_tokens

    def activation_bytes(self, tokens: float) -> float:
        """What the matrix products of all layers read and write for `tokens`, besides weights, in bfloat16."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        intermediate = self.experts_per_token * self.moe_intermediate if self.experts else self.intermediate
        return 2.0 * self.layers * (4 * self.hidden + attention + 3 * intermediate) * tokens


class Gpu(BaseModel):
    """The figures of a data sheet. `link_bytes_per_s` is one direction of the scale-up link, `network_bytes_per_s` the
    GPU's share of the scale-out network, one direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    bf16_flops: float = Field(gt=0, description="dense, without sparsity")
    link_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(gt=0, description="to or from the host's memory, PCIe x16, one direction")
    source: str

    def bytes_per_s_among(self, gpus: int) -> float:
        """At which each GPU of a set receives what all of them hold in parts (all-gather, and reduce-scatter the other way):
        by the link in one node of 8. Beyond, each of a node's eight network shares brings another eighth, which the link
        hands on within the node, as NCCL's rings do (its tests are reported with 400 to 450 GB/s on H100)."""
        if gpus <= GPUS_PER_NODE:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, GPUS_PER_NODE * self.network_bytes_per_s)


def _qwen2(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool = False
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        tied_embeddings=tied,
    )


def _qwen3(name: str, layers: int, hidden: int, heads: int, intermediate: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=151936,
        tied_embeddings=tied,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=128256,
    )


# From the models' config.json files (Qwen3 technical report, arXiv 2505.09388, Table 1; Qwen2.5, arXiv 2412.15115; Llama 3,
# arXiv 2407.21783, Table 3; DeepSeek-R1, arXiv 2501.12948, whose distilled models untie the embeddings of the 1.5B).
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288),
        _qwen3("qwen3-14b", 40, 5120, 40, 17408),
        _qwen3("qwen3-32b", 64, 5120, 64, 25600),
        _qwen2("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True),
        _qwen2("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _qwen2("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, tied=True),
        _qwen2("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064),
        _qwen2("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
        *(
            _qwen3(name, 48, 2048, 32, 6144).model_copy(
                update={"kv_heads": 4, "experts": 128, "experts_per_token": 8, "moe_intermediate": 768}
            )
            for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-instruct-2507")
        ),
        _qwen2("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064),
        _qwen2("qwen2.5-math-7b", 28, 3584, 28, 4, 18944, 152064),
        _qwen2("deepseek-r1-distill-qwen-1.5b", 28, 1536, 12, 2, 8960, 151936),
        _qwen2("deepseek-r1-distill-qwen-7b", 28, 3584, 28, 4, 18944, 152064),
        _llama("llama-3.1-8b", 32, 4096, 32, 14336),
        _llama("llama-3.1-70b", 80, 8192, 64, 28672),
        _llama("llama-3.3-70b", 80, 8192, 64, 28672),
    )
}

# NVIDIA data sheets; memory as the driver reports it (nvidia-smi), which is what can be allocated; the network figure is one
# 400 Gb/s port a GPU (200 Gb/s for A100 and the cards without NVLink), as in the vendors' reference clusters; the host's is
# PCIe 4 (Ampere) or 5, x16.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            memory_bytes=81920 * MIB,
            memory_bytes_per_s=2.039e12,
            bf16_flops=312e12,
            link_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
            host_bytes_per_s=32e9,
            source="NVIDIA A100 80GB SXM data sheet",
        ),
        Gpu(
            name="h100",
            memory_bytes=81559 * MIB,
            memory_bytes_per_s=3.35e12,
            bf16_flops=989e12,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            source="NVIDIA H100 SXM data sheet",
        ),
        Gpu(
            name="h200",
            memory_bytes=143771 * MIB,
            memory_bytes_per_s=4.8e12,
            bf16_flops=989e12,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            source="NVIDIA H200 SXM data sheet",
        ),
        Gpu(
            name="rtxpro6000",
            memory_bytes=97887 * MIB,
            memory_bytes_per_s=1.597e12,
            bf16_flops=503.8e12,
            link_bytes_per_s=32e9,
            network_bytes_per_s=25e9,
            host_bytes_per_s=64e9,
            source="NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; PCIe 5 x16 instead of NVLink",
        ),
        Gpu(
            name="h800",
            memory_bytes=81559 * MIB,
            memory_bytes_per_s=3.35e12,
            bf16_flops=989e12,
            link_bytes_per_s=200e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            source="NVIDIA H100 SXM data sheet, NVLink at 400 GB/s, both directions summed (arXiv 2505.09343, §4)",
        ),
        Gpu(
            name="h20",
            memory_bytes=97871 * MIB,
            memory_bytes_per_s=4.0e12,
            bf16_flops=148e12,
            link_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            source="NVIDIA H20 96GB SXM specifications: 4.0 TB/s HBM3, 148 TFLOP/s bf16, NVLink 900 GB/s",
        ),
        Gpu(
            name="b200",
            memory_bytes=183359 * MIB,
            memory_bytes_per_s=8e12,
            bf16_flops=2250e12,
            link_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            source="NVIDIA HGX B200 data sheet, one GPU of eight",
        ),
        Gpu(
            name="a40",
            memory_bytes=46068 * MIB,
            memory_bytes_per_s=696e9,
            bf16_flops=149.7e12,
            link_bytes_per_s=32e9,
            network_bytes_per_s=25e9,
            host_bytes_per_s=32e9,
            source="NVIDIA A40 data sheet; PCIe 4 x16, as NVLink joins no more than two of them",
        ),
        Gpu(
            name="a6000",
            memory_bytes=49140 * MIB,
            memory_bytes_per_s=768e9,
            bf16_flops=154.8e12,
            link_bytes_per_s=32e9,
            network_bytes_per_s=25e9,
            host_bytes_per_s=32e9,
            source="NVIDIA RTX A6000 data sheet; PCIe 4 x16, as NVLink joins no more than two of them",
        ),
        # For replays of small models where there is no GPU: so much that training one of them takes about a second.
        Gpu(
            name="cpu",
            memory_bytes=8192 * MIB,
            memory_bytes_per_s=10e9,
            bf16_flops=50e9,
            link_bytes_per_s=10e9,
            network_bytes_per_s=10e9,
            host_bytes_per_s=10e9,
            source="one core of a server CPU, for replays on a CPU; round figures that are assumed",
        ),
    )
}


# A shape's fields in the words of a config.json.
_CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys of a mixture of experts whose layers are not all alike, and what they say where they are.
_UNLIKE: dict[str, object] = {
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def require_dense(shape: ModelShape, what: str) -> None:
    """Refuses a mixture of experts where only dense models are modelled."""
    if shape.experts:
        raise InputError(
            f"{what}: {shape.name} is a mixture of experts, whose experts take a time that only a measurement knows; "
            "use measured kernel tables or `simrl measure`"
        )


def model_shape(model: str | Path) -> ModelShape:
    """A model by its name in `MODELS`, or from a Hugging Face `config.json` (the file or its folder).

    Raises `InputError` for an unknown name, an unreadable file, or layers that are not all alike (some with experts, some
    without; experts that all tokens share).
    """
    if str(model).lower() in MODELS:
        return MODELS[str(model).lower()]
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
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    unlike = next(
        (key for key, plain in _UNLIKE.items() if experts and config.get(key, plain) not in (plain, None)), None
    )
    if unlike is not None:
        raise InputError(
            f"{path}: {unlike} is {config[unlike]}; simrl models mixtures of experts whose layers are all alike"
        )
    missing = [key for key in _CONFIG_KEYS.values() if key not in config]
    if missing:
        raise InputError(
            f"{path}: no key {missing[0]!r}; a dense transformer's config has {', '.join(_CONFIG_KEYS.values())}"
        )
    shape = {field: config[key] for field, key in _CONFIG_KEYS.items()}
    heads, hidden = shape["heads"], shape["hidden"]
    shape["name"] = Path(str(config.get("_name_or_path") or path.resolve().parent.name)).name.lower()
    shape["kv_heads"] = config.get("num_key_value_heads") or heads
    shape["head_dim"] = config.get("head_dim")
    if shape["head_dim"] is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        shape["head_dim"] = hidden // heads
    shape["tied_embeddings"] = config.get("tie_word_embeddings", False)
    if experts:
        shape["experts"], shape["experts_per_token"] = experts, config.get("num_experts_per_tok", 0)
        shape["moe_intermediate"] = config.get("moe_intermediate_size") or shape["intermediate"]
    try:
        return ModelShape.model_validate(shape)
    except ValidationError as error:
        field, message = explain(error, ModelShape, "a model")
        written = f" ({_CONFIG_KEYS[field]})" if field in _CONFIG_KEYS else ""
        raise InputError(f"{path}: {message}{written}; correct the config") from error


def gpu(name: str) -> Gpu:
    """A GPU by its name in `GPUS`."""
    if name.lower() not in GPUS:
        raise InputError(f"gpu {name!r} is unknown{meant(name, GPUS)}; choose one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
