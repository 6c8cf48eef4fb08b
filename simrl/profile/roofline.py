"""Roofline: the seconds of the parts of a pass by a GPU's data sheet, for every model, split and precision.

    dense     = max(multiply-adds, reading the weights beside routed experts) + small kernels + all-reduces
    experts   = max(multiply-adds, reading the routed experts that are met) + all-gather and reduce-scatter of dp ranks
    attention = max(multiply-adds, reading the KV cache), prefill and decode apart
    sampled   = max(multiply-adds, reading the output head) + gathering the logits

A collective is a ring over one link: latency plus bytes over bandwidth, so its time rises with the bytes; one rank needs none.

Constants are set on measured kernels: what large products reach of a data sheet's rates, what small kernels take, and tiles,
attention and states, on six profiles (`SET_ON` of experiments/estimates.py). All others judge them. 4-bit weights are
multiplied in bfloat16, but nvfp4 ones at the GPU's rate of FP4, and mxfp4 ones with activations in 8 bits at the rate of fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt

import numpy as np

from simrl.errors import InputError, refuse
from simrl.profile.hardware import Gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import ModelShape, require_kv_heads
from simrl.profile.precision import EXPERTS_ALONE, KV_SHARE, WEIGHT_BYTES, require_precision
from simrl.profile.profilers.smoothing import Floats

MEMORY_EFFICIENCY = 0.8
# Of the rate that large products reach (`Gpu.matmul_share`): k / (k + 130) at k = 2,500, as in
# training.
PRODUCT_SHARE = 0.95
# A kernel's start and end, in which memory idles (aiconfigurator's latency of H100), paid by every
# kernel of a layer beside the bytes that it moves. Those of the dense part and of experts are
# counted in vLLM's layers, unfused.
LAUNCH_S = 3e-6
MIXER_KERNELS, MLP_KERNELS = 3, 4  # norm, projections; norm, two products, activation
EXPERT_KERNELS = 8  # routing, sorting rows by expert, two grouped products, activation, sum
# Rotary embedding, writing the cache, attention in two steps. With latents all of it, projections,
# casts and norms, by what DeepSeek-V3 takes for one token on 8 H200: 85 µs.
ATTENTION_KERNELS, LATENT_KERNELS = 4, 25
# Set on kernels of Qwen3-30B-A3B (experts, on one H100 and eight) and Qwen3-8B (attention, on one
# and four H100), in bfloat16 under vLLM; judged on all others (docs/profiles.md).
# Rows that an expert met computes for nobody (the end of its last tile, and the last wave): twice
# its rows, within vLLM's sizes of tiles.
TILE_ROWS = 16, 128
GROUPED_SHARE = 0.7  # of a plain product's rate that products grouped by expert reach
KV_SHARE_OF_RATE = 1.12  # the rate of reading a cache, over weights'
# Attention of a prefill reaches this share of the products' rate, times L / (L + half) over L
# tokens: 0.65 of the data sheet's on H100, as in training (simrl.training.operations).
PREFILL_SHARE, PREFILL_HALF = 0.85, 1000
# A layer with a fixed state: kernels of a decoding step, and what a token of a prefill takes in
# chunked products of few rows, as operations at the rate of large ones, a byte of state (set on
# Qwen3.5-35B-A3B on four H100).
STATE_KERNELS, STATE_FLOPS = 2, 70
# Bytes of a value that norm and residual, norms of queries and keys, and an activation with its
# gate move, and a cast to 8 or 4 bits; of a routed row, by the expert's width and the hidden size.
NORM_BYTES, HEAD_NORM_BYTES, GATE_BYTES, CAST_BYTES = 8, 4, 6, 3
ROW_INNER_BYTES, ROW_BYTES = 10, 4
POWER = 1.2  # load falls with an expert's rank to this power, as in aiconfigurator's kernels
# Precisions of weights whose products take activations in 8 or 4 bits.
CAST_PRECISIONS = ("fp8", "fp8-block", "w4a8_mxfp4_mxfp8", "nvfp4")
BYTES_PER_VALUE = 2  # activations and logits travel in bfloat16


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
    compute_efficiency: float = 0.0  # 0: what the data sheet's products reach
    memory_efficiency: float = MEMORY_EFFICIENCY
    link_efficiency: float = 0.7
    link_latency_s: float = 3e-6
    ep: int = 1

    def __post_init__(self) -> None:
        if not self.compute_efficiency:
            object.__setattr__(self, "compute_efficiency", PRODUCT_SHARE * self.gpu.matmul_share)
        efficiencies = ("compute_efficiency", "memory_efficiency", "link_efficiency")
        refuse(
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
            error=lambda words: InputError(f"roofline: {words}"),
        )
        require_kv_heads("roofline: tp", self.tp, self.shape)
        require_precision(self.precision, self.gpu, self.shape)

    @property
    def bytes_per_s(self) -> float:
        return self.memory_efficiency * self.gpu.memory_bytes_per_s

    def flops_per_s(self, precision: str = "bf16") -> float:
        """Return the rate of matrix products in a precision of weights."""
        gpu = self.gpu
        rates = {
            "fp8": (gpu.fp8_flops, gpu.fp8_share),
            "fp8-block": (gpu.fp8_flops, gpu.fp8_block_share or gpu.fp8_share),
            "w4a8_mxfp4_mxfp8": (gpu.fp8_flops, gpu.fp8_block_share or gpu.fp8_share),
            "nvfp4": (gpu.fp4_flops, gpu.fp4_share),
        }
        if precision not in rates:
            return self.compute_efficiency * gpu.bf16_flops
        peak, share = rates[precision]
        return self.compute_efficiency * peak * (share or gpu.matmul_share) / gpu.matmul_share

    def dense_s(self, tokens: Floats) -> Floats:
        """Return the seconds of what works token by token at the `tokens` of a rank, routed experts
        and the layers of latent attention excluded."""
        m = self.shape
        mlps = m.mlp_layers or m.layers
        plain, shared = mlps - m.expert_layers, m.expert_layers * (m.shared_intermediate > 0)
        weights = m.body_parameters - m.routed_parameters - self._latent_weights
        # Elements of a token that kernels beside products move, by the bytes of each.
        heads = (m.heads + m.kv_heads) * m.head_dim * m.qk_norm * m.attention_layers
        inner = plain * m.intermediate + shared * m.shared_intermediate
        moved: float = (
            NORM_BYTES * m.hidden * (m.layers + mlps)
            + (HEAD_NORM_BYTES * heads + GATE_BYTES * inner) / self.tp
        )
        kernels = MIXER_KERNELS * m.layers + MLP_KERNELS * (plain + shared) - shared
        kernels += 2 * m.expert_layers * (1 + (m.expert_hidden > 0)) + 2 * m.qk_norm * m.layers
        if self._dense_precision != "bf16":
            moved += CAST_BYTES * (2 * m.hidden * m.layers + inner / self.tp)
            kernels += 2 * (m.layers + plain + shared)
        products_s = self._product_s(
            weights / self.tp, weights / self.tp, tokens, self._dense_precision
        )
        products_s = products_s + kernels * LAUNCH_S + moved * tokens / self.bytes_per_s
        return products_s + pass_all_reduces_s(m, tokens, self.tp, self._link(self.tp, near=True))

    def experts_s(self, tokens: Floats) -> Floats:
        """Return the seconds of the routed experts at the `tokens` of all ranks; zero for a dense
        model. An expert is read if one of its tokens is in the pass. One rank's exchange is in the
        all-reduces of `dense_s`. The GPUs of `ep` wait for the busiest; all move the rows of all
        routed tokens, as vLLM's kernels do."""
        m, gpus = self.shape, self.tp * self.dp
        if not m.experts:
            return np.zeros_like(tokens)
        met, busiest = self._routed(tokens)
        hidden, parts = m.expert_hidden or m.hidden, gpus // self.ep
        rows = tokens * m.experts_per_token
        weights = m.expert_layers * m.expert_parameters / parts  # of one expert on a GPU
        tile = np.clip(2 * rows / met, *TILE_ROWS)
        computed = rows / self.ep * busiest + tile * met / self.ep
        products_s = self._product_s(
            weights, weights * met / self.ep, computed / GROUPED_SHARE, self.precision
        )
        moved = ROW_INNER_BYTES * m.moe_intermediate / parts + ROW_BYTES * hidden
        kernels = EXPERT_KERNELS + 2 * (self.precision in CAST_PRECISIONS)
        products_s = products_s + m.expert_layers * (
            moved * rows / self.bytes_per_s + kernels * LAUNCH_S
        )
        exchanges = 2 * m.expert_layers * (self.dp > 1)
        return products_s + exchanges * self._link(gpus).all_gather_s(
            tokens * m.hidden * BYTES_PER_VALUE, gpus
        )

    def _routed(self, tokens: Floats) -> tuple[Floats, Floats]:
        """Return the experts that `tokens` meet, and the load of the busiest GPU of `ep` over the
        mean.

        Loads are evenly spaced quantiles of the density x ** -POWER, from 1 to 0.8 tokens (0.01 to
        2 where fewer rows than experts are routed), as aiconfigurator draws them; the largest of n
        equal sums of loads lies 0.43 log2(n) standard deviations above the mean, for n of 2 to 16.
        """
        m, power = self.shape, 1 - POWER
        rows = (tokens * m.experts_per_token)[..., None]
        few, one = rows <= m.experts, tokens[..., None]
        least = np.where(few, 0.01, 1.0) ** power
        most = np.where(few, 2.0, np.maximum(0.8 * one, 1.0)) ** power
        loads = (least + (most - least) * (np.arange(m.experts) + 0.5) / m.experts) ** (1 / power)
        loads = np.minimum(loads / loads.sum(-1, keepdims=True) * rows, one)
        spread = loads.std(-1) / loads.mean(-1)
        busiest = 1 + 0.43 * log2(self.ep) * spread * sqrt(self.ep / m.experts)
        return (1 - np.exp(-loads)).sum(-1), np.minimum(busiest, self.ep)

    def sampled_s(self, positions: Floats) -> Floats:
        """Return the seconds of the output head, which keeps bfloat16, at `positions`."""
        weights = self.shape.vocab * self.shape.hidden / self.tp
        head_s = self._product_s(weights, weights, positions, "bf16")
        return head_s + logits_gather_s(self.shape, positions, self.tp, self._link(self.tp))

    def attention_s(
        self, chunks: Floats, cached: Floats, sequences: Floats, kv_tokens: Floats
    ) -> Floats:
        """Return the seconds of attention on a grid: a chunk after `cached` tokens, added to
        `sequences` that decode with `kv_tokens` each, and read and write their states. Latent
        attention has its projections here, as in profiles of measured kernels."""
        m, flops_per_s = self.shape, self.flops_per_s()
        values = m.v_head_dim or m.head_dim
        flops = 2.0 * m.heads * m.attention_layers / self.tp  # of one token, cached one and value
        kept = m.attention_layers * m.layer_kv_bytes * KV_SHARE[self.kv_precision]
        kv_bytes = kept / min(
            self.tp, m.kv_heads
        )  # if there are fewer KV heads than GPUs, they are copied
        c, k, n = chunks[:, None], cached[None, :], sequences[:, None]
        bytes_per_s = KV_SHARE_OF_RATE * self.bytes_per_s
        read_s = kv_bytes * self._attended(c + k) * (c > 0) / bytes_per_s
        # The share falls with the length attended, so time has a part that does not grow with it.
        attended = self._attended(k + c / 2) + PREFILL_HALF / 2
        pairs = flops * (m.head_dim + m.rope_head_dim + values) * c * attended
        prefill = np.maximum(pairs / (PREFILL_SHARE * flops_per_s), read_s)
        prefill = prefill + STATE_FLOPS * c * m.state_bytes / self.tp / flops_per_s
        latents = 2 * m.kv_lora_rank + m.rope_head_dim  # decoding multiplies the latents themselves
        widths = latents if m.kv_lora_rank else 2 * m.head_dim
        decode = (
            n
            * self._attended(kv_tokens)
            * max(flops * widths / flops_per_s, kv_bytes / bytes_per_s)
        )
        decode = decode + n * states_s(m, self.gpu, self.tp, self.memory_efficiency)
        attention: Floats = (prefill + self._beside_s(c))[:, :, None, None] + (
            decode + self._beside_s(n)
        )
        return attention

    def _beside_s(self, tokens: Floats) -> Floats:
        """Return the seconds of the kernels beside the reading of the cache, at `tokens`, and of
        latent attention's projections."""
        weights = self._latent_weights / self.tp
        kernels = LATENT_KERNELS if self.shape.kv_lora_rank else ATTENTION_KERNELS
        products_s = self._product_s(weights, weights, tokens, self._dense_precision)
        launched = self.shape.attention_layers * kernels + STATE_KERNELS * self.shape.linear_layers
        return (tokens > 0) * (products_s + launched * LAUNCH_S)

    @property
    def _latent_weights(self) -> int:
        latent = self.shape.attention_parameters * (self.shape.kv_lora_rank > 0)
        return self.shape.attention_layers * latent

    @property
    def _dense_precision(self) -> str:
        return "bf16" if self.precision in EXPERTS_ALONE else self.precision

    def _attended(self, tokens: Floats) -> Floats:
        """Return the tokens that a layer with a cache attends to, mean over full layers and
        windows."""
        return self.shape.read_tokens(tokens) / self.shape.attention_layers

    def _product_s(self, used: float, read: Floats | float, rows: Floats, precision: str) -> Floats:
        flops_s = 2.0 * used * rows / self.flops_per_s(precision)
        return np.maximum(flops_s, WEIGHT_BYTES[precision] * read / self.bytes_per_s)

    def _link(self, gpus: int, near: bool = False) -> Link:
        """Return the link of a ring, or (`near`) of GPUs of a domain that write to all others at
        once, two steps of which are an all-reduce."""
        near = near and gpus <= self.gpu.nvlink_domain
        rate = self.gpu.bytes_per_s_among(gpus, self.link_efficiency)
        return Link(rate, self.link_latency_s * (1 + near), not near)


def roofline_of(layout: ProfileMetadata, shape: ModelShape, gpu: Gpu) -> Roofline:
    """Return the roofline of a profile's layout, with the default efficiencies."""
    return Roofline(
        shape, gpu, layout.tp, layout.dp, layout.precision, layout.kv_precision, ep=layout.ep
    )
