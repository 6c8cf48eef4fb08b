"""Seconds of micro-batches of training on one GPU, operation by operation, from the shapes of the model and the data sheet.

    layers       matrix products + attention + element-wise kernels + experts + collectives
    output head  matrix product and log-probs

Invariant: every rate belongs to a single kernel; its source, or that it is assumed, stands beside it (here and in `gpus.toml`).
No rate is fitted to a training step. So a model FLOPs utilisation is a result. Arrays have an entry for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig

Floats = NDArray[np.float64]

# A product over an inner dimension k takes `Gpu.matmul_share` of the data sheet's rate times k / (k
# + HALF_K), from 1,024 to 16,384: aiconfigurator's tables of torch.nn.functional.linear on A100,
# H100, H200, B200 and RTX PRO 6000, 4,096 rows or more.
HALF_K = 130
# Grouped products of experts with n rows each: their share of a plain product's rate, times n / (n
# + half) (aiconfigurator's tables of mixtures of experts with 128 experts, 8 a token, balanced,
# vLLM, SGLang and TensorRT-LLM on H100; the permutation is in them). The tables spread; both
# figures are rounded by eye.
EXPERTS = {"bf16": (0.62, 128), "fp8": (0.52, 120), "fp8-block": (0.52, 75)}
# Of an input of a product in 8 bits, and of its gradient: read in 16 bits, written as it is and
# transposed.
CAST_BYTES = 4
# Causal attention over L tokens: a share of the rate times L / (L + half). Forward:
# aiconfigurator's tables at head size 128, FlashAttention 3 on H100 and H200, 2 on A100.
# FlashAttention 2 knows Ampere's instructions alone: `Gpu.mma_flops`.
ATTENTION = {"fa3": (0.65, 1000), "fa2": (0.66, 500)}
# The backward pass has five products to the forward pass's two, at 0.85 of its rate:
# FlashAttention-2 (arXiv 2307.08691), Fig. 5 and 6 (63 % after 73 %), FlashAttention-3 (arXiv
# 2407.08608), Fig. 5 and 6.
BACKWARD_ATTENTION = 2.5 / 0.85
# of the data sheet's bandwidth: aiconfigurator's factor of H100, from its observations
MEMORY_SHARE = 0.8
# A collective's start and end, beyond its bytes: aiconfigurator's NCCL tables, 2 to 8 GPUs of an
# H100 node.
COLLECTIVE_S = 3e-5
LAUNCH_S = 3e-6  # a kernel's start and end, in which memory idles: aiconfigurator's latency of H100
# The host's time of a PyTorch operation, of one that autograd records, and of one of its backward
# pass: timed alone on the host of one H100 (experiments/gpu: 7 to 14 µs, 24 µs, and 43 to 57 µs for
# three).
PLAIN_S, RECORDED_S, BACKWARD_S = 10e-6, 24e-6, 17e-6


class _Launches(NamedTuple):
    """Operations that PyTorch launches, views left out, and the host's seconds of one."""

    of_layer: int
    fixed: int
    operation_s: float
    of_query_norms: int = 0  # more of a layer that normalises queries and keys
    of_adapter: int = 0  # more of a matrix with LoRA


# By the passes of a micro-batch. Eager: counted in Hugging Face's Qwen2 and Qwen3, of 24 and 28
# layers, and timed at 64 to 4,096 tokens on the host of one H100, whose speed changed by a factor
# of 2.5 within minutes: 17 to 39, 23 to 40 and 35 to 55 µs (experiments/gpu/h100_second). Fused:
# the kernels of Transformer Engine's layers, at seconds that are assumed. Adapters, counted by
# hand: two products, a cast, a scale and a sum, and their gradients, less those of frozen weights.
# Not counted: the routing of experts.
LAUNCHES = {
    "eager": {
        "forward": _Launches(42, 30, 24e-6, 19, 5),
        "backward": _Launches(118, 56, 32e-6, 48, 12),
        "recomputed": _Launches(159, 56, 45e-6, 67, 17),
    },
    "fused": {
        "forward": _Launches(25, 30, 40e-6, 2, 5),
        "backward": _Launches(75, 56, 40e-6, 6, 12),
        "recomputed": _Launches(100, 56, 40e-6, 8, 17),
    },
}
# The host's time of a layer that FSDP wraps, forward and with the backward pass: 0.19 ms, and 0.54
# (FSDP 1) or 0.70 (FSDP 2), in one process without a GPU (experiments/host), at the H100's host.
WRAPPED_S = (2.5e-4, 7.5e-4)


def host_s(model: ModelShape, config: TrainingConfig, gpu: Gpu, backward: bool) -> float:
    """Return the seconds in which the host launches the layers' operations of a micro-batch, one by
    one, whatever its tokens; experts that run one by one among them."""
    passes = (
        "forward" if not backward else "backward" if config.recompute is False else "recomputed"
    )
    launches = LAUNCHES[config.kernels][passes]
    of_layer = launches.of_layer + launches.of_query_norms * model.qk_norm
    of_layer += launches.of_adapter * config.lora * (4 + model.mlp_matrices)
    wrapped_s = WRAPPED_S[backward] * (config.sharding == "fsdp")
    launched_s = (of_layer * model.layers + launches.fixed) * launches.operation_s
    experts_s = model.expert_layers * experts_host_s(model, config, gpu, backward)
    return launched_s + wrapped_s * model.layers + experts_s


def experts_host_s(model: ModelShape, config: TrainingConfig, gpu: Gpu, backward: bool) -> float:
    """Return the seconds in which the host launches a layer's experts of a GPU one by one; 0 for a
    grouped product: as the configuration says, else Megatron's, or PyTorch's where it has one (and
    on a GPU whose compute capability is not known)."""
    grouped = config.grouped_experts
    supported = config.sharding == "optimizer" or int(gpu.compute_capability) in (0, *GROUPED_ON)
    if grouped or (grouped is None and supported):
        return 0.0
    forward_s, backward_s = (FALLBACK_S if grouped is None else LOOP_S)[config.lora]
    forward_s *= 1 + (backward and config.recompute is not False)
    return model.experts / config.expert_parallel * (forward_s + backward_s * backward)


class _Traffic(NamedTuple):
    """Bytes through memory in a forward pass beyond the operands of matrix products, and kernels.

    Counted from the operations of a layer. Eager: Hugging Face's Qwen and Llama layers in PyTorch,
    where RMSNorm makes six kernels in fp32. Fused: Transformer Engine's, as Megatron uses them.
    """

    norm: int  # of an element that is normalised
    rotary: int  # of an element of queries and keys
    gate: int  # of an intermediate element: SiLU and product
    residual: int  # of a hidden element, both additions
    kernels: int  # of a layer


TRAFFIC = {"eager": _Traffic(36, 22, 10, 12, 56), "fused": _Traffic(4, 4, 6, 12, 25)}


class _Logits(NamedTuple):
    """Bytes of a logit between the 16 bits that the output head writes and the log-prob, forward and
    more of them backward; gradients whose products are in fp32, without tensor cores."""

    forward: int
    backward: int
    fp32_products: int = 0
    of_sequence: int = 0  # more of the gradient for each sequence of the micro-batch


# log_softmax: division by the temperature, cast to fp32, log-softmax: 3.7 and 22.8 bytes forward,
# 23 backward by the seconds of 8,192 tokens over 151,936 words on one H100
# (experiments/gpu/h100_second), at `MEMORY_SHARE`. The others are counted in their code.
# cross_entropy: one kernel that casts in registers (FlashAttention's, which verl takes), the
# temperature in place, and in a log-prob pass the entropy: 12 forward, 6 and 8 in an update.
# vocab_parallel: Megatron's in fp32, a kernel each for cast, maximum, difference, exponential, sum
# and quotient. by_sequence: as that, on a slice of the pack's logits for each sequence (NeMo-RL),
# whose gradients are added up over the whole pack: 16 bytes for each sequence in it. chunked: parts of
# the vocabulary, computed again backward, both gradients in fp32 (TRL's asynchronous GRPO).
LOGITS = {
    "log_softmax": _Logits(27, 23),
    "cross_entropy": _Logits(12, 2),
    "vocab_parallel": _Logits(42, 18),
    "by_sequence": _Logits(46, 22, of_sequence=16),
    "chunked": _Logits(70, 50, 2),
}
# of the bf16 rate: 67 of 989 TFLOP/s of an H100, 19.5 of 312 of an A100 (data sheets)
FP32_SHARE = 1 / 15
ADAPTER_BYTES, ADAPTER_KERNELS = (
    (2, 12),
    5,
)  # LoRA beside one matrix: of an input and an output element; kernels
EXPERT_TRAFFIC = 32  # bytes of a hidden element of each routed token: gathered, padded, weighted in fp32, scattered
SORTED_BYTES = 8  # more where experts are divided: sorted by expert where tokens arrive, and before they return
# Compute capabilities, by their first number, for which PyTorch has a grouped product of bfloat16: 9
# in 2.8, which refuses it elsewhere; 9 and 10 from 2.9 on, which elsewhere falls back to a product an
# expert (torch._grouped_mm; its pull requests 161407 and 194227).
GROUPED_ON = (9, 10)
# The host's time of an expert that runs alone, forward and backward, without adapters and with them.
# In that fallback its products alone.
FALLBACK_S = (3 * PLAIN_S, 6 * PLAIN_S), (9 * PLAIN_S, 15 * PLAIN_S)
# In a loop of Python all operations but views: Qwen3MoeSparseMoeBlock of Transformers 4, where tokens
# are gathered, weighted and added, too; with adapters prime-rl's multi_moe.py at c330a6d4e (January
# 2026): nine products, their scales and sums; the gradient of a slice is zeros, a copy, an addition.
LOOP_S = (8 * RECORDED_S, 16 * BACKWARD_S), (17 * RECORDED_S, 46 * BACKWARD_S)


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of a pass, shape (micro-batches,): of all layers, and of the output head with its
    log-probs."""

    layers_s: Floats
    head_s: Floats


class _Matrices(NamedTuple):
    """The matrices that multiply one input: its size, the size of each output, and the parts into
    which tensor parallelism cuts the inner dimension."""

    inner: int
    outers: tuple[int, ...]
    cut: int = 1


def microbatches_s(
    model: ModelShape,
    gpu: Gpu,
    config: TrainingConfig,
    tokens: Floats,
    attended: Floats,
    backward: bool,
    precision: str = "bf16",
    sequences: Floats | float = 1.0,
) -> MicroBatch:
    """Return the seconds of micro-batches of `tokens` in `sequences`, which attend to `attended` tokens in
    sum (causal: half the square of each sequence's length), forward or forward and backward, where all
    GPUs of a sequence and of a layer share the work. The layers' matrix products are in
    `precision`; attention, norms and the output head have 16 bits or more."""
    work = _TrainingPass(model, gpu, config, tokens / config.sequence_parallel, backward, precision)
    plain = (model.mlp_layers or model.layers) - model.expert_layers
    layers_s = model.full_layers * work.attention_s(attended, tokens)
    if model.window_layers:
        layers_s = layers_s + model.window_layers * work.attention_s(
            model.windowed(tokens, attended), tokens
        )
    if model.linear_layers:
        layers_s = layers_s + model.linear_layers * work.linear_s()
    if plain:
        layers_s = layers_s + plain * work.mlp_s(model.intermediate)
    if model.expert_layers:
        layers_s = layers_s + model.expert_layers * work.experts_s()
    layers_s = layers_s + model.layers * work.collectives_s()
    return MicroBatch(layers_s, work.head_s(sequences))


@dataclass(frozen=True)
class _TrainingPass:
    """One pass of a GPU over its `tokens` of each micro-batch: the seconds of a layer's parts, of
    which each GPU that shares the layer does its share."""

    model: ModelShape
    gpu: Gpu
    config: TrainingConfig
    tokens: Floats
    backward: bool
    precision: str

    @property
    def again(self) -> int:
        """The forward passes that are repeated."""
        return int(self.backward and self.config.recompute is not False)

    @property
    def sweeps(self) -> int:
        """Forward passes' worth of work, of what a backward pass does twice as much of."""
        return (3 if self.backward else 1) + self.again

    @property
    def products(self) -> int:
        """Forward passes' worth of matrix products: weights that are not trained have no
        gradients."""
        return self.sweeps - int(self.backward and self.config.lora)

    @property
    def passes(self) -> int:
        """The passes in which GPUs exchange what they computed: forward, backward, and again."""
        return self.sweeps - int(self.backward)

    @property
    def traffic(self) -> _Traffic:
        return TRAFFIC[self.config.kernels]

    def product_s(self, matrix: _Matrices, precision: str) -> Floats:
        rate = (
            self.gpu.matmul_flops(precision) * matrix.inner / (matrix.inner + HALF_K * matrix.cut)
        )
        return (
            2.0
            * self.tokens
            * matrix.inner
            * sum(matrix.outers)
            / self.config.tensor_parallel
            / rate
        )

    def moved_s(self, element_bytes: float, kernels: float, tokens: Floats | None = None) -> Floats:
        """Return the seconds of element-wise kernels that move `element_bytes` a token of a GPU's
        part of the layer."""
        tokens = self.tokens / self.config.tensor_parallel if tokens is None else tokens
        bandwidth = self.gpu.memory_bytes_per_s * MEMORY_SHARE
        return self.sweeps * (element_bytes * tokens / bandwidth + kernels * LAUNCH_S)

    def products_s(self, matrices: Sequence[_Matrices]) -> Floats:
        """Return the seconds of matrix products, with adapters and casts to 8 bits beside them."""
        seconds = self.products * sum(
            (self.product_s(matrix, self.precision) for matrix in matrices),
            np.zeros_like(self.tokens),
        )
        if self.config.lora:
            pairs = [(matrix.inner, outer) for matrix in matrices for outer in matrix.outers]
            moved = sum(
                ADAPTER_BYTES[0] * inner + ADAPTER_BYTES[1] * outer for inner, outer in pairs
            )
            seconds = seconds + self.moved_s(moved, ADAPTER_KERNELS * len(pairs))
        if self.precision != "bf16":
            cast = sum(
                matrix.inner * (1 + self.again) + sum(matrix.outers) * self.backward
                for matrix in matrices
            )
            seconds = seconds + self.moved_s(CAST_BYTES * cast / self.sweeps, 0)
        return seconds

    def attention_s(self, attended: Floats, tokens: Floats) -> Floats:
        """Return the seconds of an attention layer's mixer whose tokens attend to `attended` tokens
        in sum."""
        model, config, traffic = self.model, self.config, self.traffic
        queries, keys = (
            model.heads * (model.head_dim + model.rope_head_dim),
            model.kv_heads * model.head_dim,
        )
        values = model.heads * (model.v_head_dim or model.head_dim)
        rotated = model.rope_head_dim * (model.heads + 1) if model.kv_lora_rank else queries + keys
        if model.kv_lora_rank:
            rank = model.q_lora_rank
            down = (model.kv_lora_rank + model.rope_head_dim, rank or queries)
            matrices = [
                _Matrices(model.hidden, down),
                *([_Matrices(rank, (queries,))] if rank else []),
            ]
            matrices.append(_Matrices(model.kv_lora_rank, (model.heads * model.head_dim, values)))
        else:
            matrices = [
                _Matrices(
                    model.hidden, (queries, keys, keys, *([queries] if model.output_gate else []))
                )
            ]
        matrices.append(_Matrices(values, (model.hidden,), config.tensor_parallel))

        share, half = ATTENTION[config.attention]
        length = 2.0 * attended / tokens  # mean, by tokens
        peak = (
            self.gpu.bf16_flops
            if config.attention == "fa3"
            else self.gpu.mma_flops or self.gpu.bf16_flops
        )
        pairs = (
            2.0
            * (queries + values)
            * attended
            / (config.tensor_parallel * config.sequence_parallel)
        )
        kernel_s = pairs / (peak * share * length / (length + half))
        kernel_s = kernel_s * (1 + self.again + (BACKWARD_ATTENTION if self.backward else 0))

        moved: float = (
            traffic.norm * (model.hidden + (queries + keys if model.qk_norm else 0))
            + traffic.rotary * rotated
        )
        moved += traffic.residual / 2 * model.hidden + traffic.gate * values * model.output_gate
        return self.products_s(matrices) + kernel_s + self.moved_s(moved, traffic.kernels / 2)

    def linear_s(self) -> Floats:
        """Return the seconds of a layer with a fixed state: its projections, and what is done to
        each projected element as rotary embeddings do to queries. The recurrence is left out: 6
        operations for each element of the state, by its shapes 2 % of the products of
        Qwen3-Next."""
        model, traffic = self.model, self.traffic
        width = model.linear_parameters // model.hidden
        moved = (traffic.norm + traffic.residual / 2) * model.hidden + traffic.rotary * width
        return self.products_s([_Matrices(model.hidden, (width,))]) + self.moved_s(
            moved, traffic.kernels / 2
        )

    def mlp_s(self, intermediate: int) -> Floats:
        """Return the seconds of a plain MLP, its norm and its addition."""
        model, traffic = self.model, self.traffic
        moved = (traffic.norm + traffic.residual / 2) * model.hidden + traffic.gate * intermediate
        return self.products_s(self._mlp(intermediate)) + self.moved_s(moved, traffic.kernels / 2)

    def _mlp(self, intermediate: int) -> list[_Matrices]:
        outers = (intermediate,) * (self.model.mlp_matrices - 1)
        down = _Matrices(intermediate, (self.model.hidden,), self.config.tensor_parallel)
        return [_Matrices(self.model.hidden, outers), down]

    def experts_s(self) -> Floats:
        """Return the seconds of a mixture of experts: router, routed experts of the busiest GPU,
        exchange, shared experts.

        GPUs of a layer have whole experts with expert parallelism, where each brings its part of
        the tokens, and else a part of each expert. Experts that run one by one take the host's
        launches if these are longer: the host reads how many tokens each has, so that it starts
        when the GPU is done with what came before.
        """
        model, config, traffic = self.model, self.config, self.traffic
        parallel, chosen, inner = (
            config.expert_parallel,
            model.experts_per_token,
            model.moe_intermediate,
        )
        hidden = model.expert_hidden or model.hidden
        tokens = self.tokens / config.tensor_parallel
        imbalance = config.expert_imbalance if parallel > 1 else 1.0
        routed = (
            tokens * chosen * imbalance
        )  # of the busiest GPU, which as many tokens reach as work there
        share, half = EXPERTS[self.precision]
        rows = (
            (tokens if parallel > 1 else self.tokens)
            * chosen
            * imbalance
            * parallel
            / model.experts
        )
        rate = self.gpu.matmul_flops(self.precision) * share * rows / (rows + half)
        work_s = self.products * 2.0 * routed * model.expert_parameters / rate
        work_s = np.maximum(
            work_s, experts_host_s(model, config, self.gpu, self.backward) / self.gpu.host_speed
        )
        router_s = (
            self.sweeps
            * 2.0
            * tokens
            * model.hidden
            * model.experts
            / self.gpu.matmul_flops("bf16")
        )

        moved: float = (
            EXPERT_TRAFFIC + SORTED_BYTES * (parallel > 1)
        ) * hidden + traffic.gate * inner
        if config.lora:
            moved += ADAPTER_BYTES[0] * (2 * hidden + inner) + ADAPTER_BYTES[1] * (
                2 * inner + hidden
            )
        norm_s = self.moved_s(
            (traffic.norm + traffic.residual / 2) * model.hidden, traffic.kernels / 2 + 12
        )
        seconds = work_s + router_s + norm_s + self.moved_s(moved, 0, routed)
        if model.expert_hidden:
            seconds = seconds + self.products_s(
                [_Matrices(model.hidden, (hidden,)), _Matrices(hidden, (model.hidden,))]
            )
        if model.shared_intermediate:
            shared = model.shared_intermediate
            seconds = (
                seconds
                + self.products_s(self._mlp(shared))
                + self.moved_s(traffic.gate * shared, 0)
            )
        if parallel > 1:  # tokens leave for the experts and come back
            exchange_s = self.gpu.all_to_all_s(2.0 * routed * hidden, parallel) + COLLECTIVE_S
            seconds = seconds + self.passes * 2 * exchange_s
        return seconds

    def collectives_s(self) -> Floats:
        """Return the seconds of a layer's collectives: with tensor parallelism two all-reduces a
        pass (or their halves, with the tokens shared between them), with sequence parallelism
        (Ulysses) all heads of some tokens for all tokens of some heads, and back."""
        model, config, total = self.model, self.config, np.zeros_like(self.tokens)
        heads = 2 * (model.heads + model.kv_heads) * model.head_dim
        for gpus, values in (
            (config.tensor_parallel, 4 * model.hidden),
            (config.sequence_parallel, heads),
        ):
            if gpus > 1:
                moved = 2.0 * self.tokens * values * (1 - 1 / gpus)
                total = total + self.passes * (
                    moved / self.gpu.bytes_per_s_among(gpus) + 4 * COLLECTIVE_S
                )
        return total

    def head_s(self, sequences: Floats | float) -> Floats:
        """Return the seconds of the output head and of log-probs, which nothing repeats."""
        vocab, logits = self.model.vocab, LOGITS[self.config.logits_by]
        product_s = self.product_s(_Matrices(self.model.hidden, (vocab,)), "bf16")
        products: float = 3 - self.config.lora if self.backward else 1
        if self.backward and logits.fp32_products:  # the logits are computed again
            products = 2 + logits.fp32_products / FP32_SHARE
        of_gradient = logits.backward + logits.of_sequence * sequences
        moved = (logits.forward + of_gradient * self.backward) * vocab * self.tokens
        moved = moved / self.config.tensor_parallel
        return products * product_s + moved / (self.gpu.memory_bytes_per_s * MEMORY_SHARE)
