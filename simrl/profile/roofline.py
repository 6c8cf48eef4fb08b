"""Roofline: the seconds of the parts of a pass by a GPU's data sheet, for every model, split and precision.

    dense     = max(multiply-adds, reading the weights beside routed experts) + small kernels + all-reduces
    experts   = max(multiply-adds, reading the routed experts that are met) + all-gather and reduce-scatter of dp ranks
    attention = max(multiply-adds, reading the KV cache), prefill and decode apart
    sampled   = max(multiply-adds, reading the output head) + gathering the logits

A collective is a ring over one link: latency plus bytes over bandwidth, so its time rises with the bytes; one rank needs none.

Invariant: no number here is measured, but for the shares of the bfloat16 and fp8 rates that large products reach, and
what small kernels take. Tokens meet experts evenly. 4-bit weights are multiplied in bfloat16, but nvfp4 ones at twice the
rate of fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simrl.errors import InputError, broken
from simrl.profile.hardware import Gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import ModelShape, require_kv_heads
from simrl.profile.precision import EXPERTS_ALONE, KV_SHARE, WEIGHT_BYTES, require_precision
from simrl.profile.profilers.smoothing import Floats

MEMORY_EFFICIENCY = 0.8
# Norms, rotary embeddings, the cache's writing, the gate, residuals: 10 kernels a layer of 3 µs, in
# which memory idles. Profiles of measured kernels of 0.6B to 8B models on H100 take 10 to 40 µs a
# layer more than products, attention and all-reduces at the data sheet's rates, 30 as a rule.
LAYER_S = 3e-5
BYTES_PER_VALUE = 2  # activations and logits travel in bfloat16
FP8_RATES = {
    "fp8": 1,
    "fp8-block": 1,
    "nvfp4": 2,
}  # of the weights' precision, over the rate of fp8


@dataclass(frozen=True)
class Link:
    """The connection between the GPUs of a tensor-parallel group: one direction, as one GPU sees
    it.

    `latency_s` is paid by every step of a ring (2 (tp - 1) of an all-reduce, tp - 1 of an
    all-gather), or once a collective where `latency_each_step` is false.
    """

    bytes_per_s: float
    latency_s: float
    latency_each_step: bool = True

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise InputError(
                f"link: {self.bytes_per_s} bytes/s and {self.latency_s} s latency; it needs a bandwidth above zero "
                "and a latency of zero or more"
            )

    @property
    def words(self) -> str:
        """Return the figures in words, for a profile's notes."""
        each = "a step" if self.latency_each_step else "a collective"
        return f"{self.bytes_per_s / 1e9:.2f} GB/s and {self.latency_s * 1e6:.1f} µs {each}"

    def all_reduce_s(self, size_bytes: Floats, ranks: int) -> Floats:
        """Return the seconds in which `ranks` GPUs sum a tensor of `size_bytes` that each of them
        holds."""
        return self._ring_s(size_bytes, ranks, steps=2 * (ranks - 1))

    def all_gather_s(self, size_bytes: Floats, ranks: int) -> Floats:
        """Return the seconds in which `ranks` GPUs collect a tensor of `size_bytes`, of which each
        holds an equal part."""
        return self._ring_s(size_bytes, ranks, steps=ranks - 1)

    def _ring_s(self, size_bytes: Floats, ranks: int, steps: int) -> Floats:
        latencies = steps if self.latency_each_step else min(steps, 1)
        return latencies * self.latency_s + steps * size_bytes / ranks / self.bytes_per_s


def pass_all_reduces_s(shape: ModelShape, tokens: Floats, tp: int, link: Link) -> Floats:
    """Return the seconds of the all-reduces of one pass over `tokens`: after the attention output
    and the down projection of every layer, and one for the embedding, whose vocabulary is split
    over the ranks."""
    return (2 * shape.layers + 1) * link.all_reduce_s(tokens * shape.hidden * BYTES_PER_VALUE, tp)


def logits_gather_s(shape: ModelShape, sequences: Floats, tp: int, link: Link) -> Floats:
    """Return the seconds in which the logits of `sequences` are collected from the ranks of a split
    vocabulary."""
    return link.all_gather_s(sequences * shape.vocab * BYTES_PER_VALUE, tp)


def states_s(
    shape: ModelShape, gpu: Gpu, tp: int, memory_efficiency: float = MEMORY_EFFICIENCY
) -> float:
    """Return the seconds in which the GPUs of a group read and write the fixed states of a
    sequence."""
    return 2.0 * shape.state_bytes / tp / (memory_efficiency * gpu.memory_bytes_per_s)


@dataclass(frozen=True)
class Roofline:
    """The parts of a pass of one layout, in seconds; rates are the data sheet's times the
    efficiencies. Raises `InputError` for efficiencies outside (0, 1], a `tp` the heads do not share
    and a precision in which the GPU does not multiply."""

    shape: ModelShape
    gpu: Gpu
    tp: int = 1
    dp: int = 1
    precision: str = "bf16"
    kv_precision: str = "bf16"
    compute_efficiency: float = 0.7
    memory_efficiency: float = MEMORY_EFFICIENCY
    link_efficiency: float = 0.7
    link_latency_s: float = 3e-6

    def __post_init__(self) -> None:
        efficiencies = ("compute_efficiency", "memory_efficiency", "link_efficiency")
        if wrong := broken(
            *(
                (
                    not 0 < getattr(self, name) <= 1,
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most 1",
                )
                for name in efficiencies
            ),
            (
                self.tp < 1 or self.shape.heads % self.tp,
                f"tp is {self.tp}; it must divide the {self.shape.heads} attention heads of {self.shape.name}",
            ),
        ):
            raise InputError(f"roofline: {wrong}")
        require_kv_heads("roofline: tp", self.tp, self.shape)
        require_precision(self.precision, self.gpu, self.shape)

    @property
    def bytes_per_s(self) -> float:
        return self.memory_efficiency * self.gpu.memory_bytes_per_s

    def flops_per_s(self, precision: str = "bf16") -> float:
        """Return the rate of matrix products in a precision of weights."""
        gpu = self.gpu
        if precision not in FP8_RATES:
            return self.compute_efficiency * gpu.bf16_flops
        share = (
            (gpu.fp8_share if precision == "fp8" else gpu.fp8_block_share)
            or gpu.fp8_share
            or gpu.matmul_share
        )
        return (
            self.compute_efficiency
            * FP8_RATES[precision]
            * gpu.fp8_flops
            * share
            / gpu.matmul_share
        )

    def dense_s(self, tokens: Floats) -> Floats:
        """Return the seconds of what works token by token at the `tokens` of a rank, routed experts
        excluded."""
        weights = (self.shape.body_parameters - self.shape.routed_parameters) / self.tp
        precision = "bf16" if self.precision in EXPERTS_ALONE else self.precision
        products_s = self._product_s(weights, weights, tokens, precision)
        products_s = products_s + self.shape.layers * LAYER_S
        return products_s + pass_all_reduces_s(self.shape, tokens, self.tp, self._link(self.tp))

    def experts_s(self, tokens: Floats) -> Floats:
        """Return the seconds of the routed experts at the `tokens` of all ranks; zero for a dense
        model. An expert is read if one of its tokens is in the pass. One rank's exchange is in the
        all-reduces of `dense_s`."""
        shape, gpus = self.shape, self.tp * self.dp
        weights = shape.expert_layers * shape.expert_parameters / gpus  # of one expert
        met = shape.experts * (1 - (1 - shape.experts_per_token / max(shape.experts, 1)) ** tokens)
        products_s = self._product_s(
            weights * shape.experts_per_token, weights * met, tokens, self.precision
        )
        exchanges = 2 * shape.expert_layers * (self.dp > 1)
        return products_s + exchanges * self._link(gpus).all_gather_s(
            tokens * shape.hidden * BYTES_PER_VALUE, gpus
        )

    def sampled_s(self, positions: Floats) -> Floats:
        """Return the seconds of the output head, which keeps bfloat16, at `positions`."""
        weights = self.shape.vocab * self.shape.hidden / self.tp
        head_s = self._product_s(weights, weights, positions, "bf16")
        return head_s + logits_gather_s(self.shape, positions, self.tp, self._link(self.tp))

    def attention_s(
        self, chunks: Floats, cached: Floats, sequences: Floats, kv_tokens: Floats
    ) -> Floats:
        """Return the seconds of attention on a grid: a chunk after `cached` tokens, added to
        `sequences` that decode with `kv_tokens` each, and read and write their states."""
        shape, flops_per_s = self.shape, self.flops_per_s()
        widths = shape.head_dim + shape.rope_head_dim + (shape.v_head_dim or shape.head_dim)
        flops = (
            2.0 * shape.heads * widths * shape.attention_layers / self.tp
        )  # of one query token on one cached token
        kept = shape.attention_layers * shape.layer_kv_bytes * KV_SHARE[self.kv_precision]
        kv_bytes = kept / min(
            self.tp, shape.kv_heads
        )  # if there are fewer KV heads than GPUs, they are copied
        c, k, n = chunks[:, None], cached[None, :], sequences[:, None]
        read_s = kv_bytes * self._attended(c + k) * (c > 0) / self.bytes_per_s
        prefill = np.maximum(flops * c * self._attended(k + c / 2) / flops_per_s, read_s)
        decode = (
            n * self._attended(kv_tokens) * max(flops / flops_per_s, kv_bytes / self.bytes_per_s)
        )
        states = n * states_s(shape, self.gpu, self.tp, self.memory_efficiency)
        attention: Floats = prefill[:, :, None, None] + (decode + states)
        return attention

    def _attended(self, tokens: Floats) -> Floats:
        """Return the tokens that a layer with a cache attends to, mean over full layers and
        windows."""
        full, windows = self.shape.full_layers, self.shape.window_layers
        attended: Floats = full * tokens + windows * np.minimum(tokens, self.shape.window_tokens)
        return attended / self.shape.attention_layers

    def _product_s(self, used: float, read: Floats | float, rows: Floats, precision: str) -> Floats:
        flops_s = 2.0 * used * rows / self.flops_per_s(precision)
        return np.maximum(flops_s, WEIGHT_BYTES[precision] * read / self.bytes_per_s)

    def _link(self, gpus: int) -> Link:
        return Link(self.gpu.bytes_per_s_among(gpus, self.link_efficiency), self.link_latency_s)


def roofline_of(layout: ProfileMetadata, shape: ModelShape, gpu: Gpu) -> Roofline:
    """Return the roofline of a profile's layout, with the default efficiencies. How experts are
    divided changes no part."""
    return Roofline(shape, gpu, layout.tp, layout.dp, layout.precision, layout.kv_precision)
