"""Seconds of micro-batches of training on one GPU, operation by operation, from the shapes of the model and the data sheet.

    layers       matrix products + attention + element-wise kernels + experts + collectives
    output head  matrix product and log-probs

Invariant: every rate belongs to a single kernel; its source, or that it is assumed, stands beside it (here and in `gpus.toml`).
No rate is fitted to a training step. So a model FLOPs utilisation is a result. Arrays have an entry for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.scenario.training import TrainingConfig

Floats = NDArray[np.float64]

# A product over an inner dimension k takes `Gpu.matmul_share` of the data sheet's rate times k / (k + HALF_K), from 1,024 to
# 16,384: aiconfigurator's tables of torch.nn.functional.linear on A100, H100, H200, B200 and RTX PRO 6000, 4,096 rows or more.
HALF_K = 130
# Grouped products of experts with n rows each: their share of a plain product's rate (aiconfigurator's tables of mixtures of
# experts in bfloat16, 128 experts with 8 a token, vLLM and TensorRT-LLM on H100; the permutation is in them).
EXPERT_SHARE, HALF_ROWS = 0.62, 128
# Causal attention over L tokens: a share of the rate times L / (L + half). Forward: aiconfigurator's tables at head size 128,
# FlashAttention 3 on H100 and H200, 2 on A100. FlashAttention 2 knows Ampere's instructions alone: `Gpu.mma_flops`.
ATTENTION = {"fa3": (0.65, 1000), "fa2": (0.66, 500)}
# The backward pass has five products to the forward pass's two, at 0.85 of its rate: FlashAttention-2 (arXiv 2307.08691),
# Fig. 5 and 6 (63 % after 73 %), FlashAttention-3 (arXiv 2407.08608), Fig. 5 and 6.
BACKWARD_ATTENTION = 2.5 / 0.85
MEMORY_SHARE = 0.8  # of the data sheet's bandwidth: aiconfigurator's factor of H100, from its observations
COLLECTIVE_S = (
    3e-5  # a collective's start and end, beyond its bytes: aiconfigurator's NCCL tables, 2 to 8 GPUs of an H100 node
)
LAUNCH_S = 3e-6  # a kernel's start and end, in which memory idles: aiconfigurator's latency of H100
HOST_LAUNCH_S = 10e-6  # the host's time to launch a PyTorch operation that autograd records; assumed


class _Traffic(NamedTuple):
    """Bytes through memory in a forward pass beyond the operands of matrix products, and kernels.

    Counted from the operations of a layer. Eager: Hugging Face's Qwen and Llama layers in PyTorch, where RMSNorm makes six
    kernels in fp32. Fused: Transformer Engine's, as Megatron uses them.
    """

    norm: int  # of an element that is normalised
    rotary: int  # of an element of queries and keys
    gate: int  # of an intermediate element: SiLU and product
    residual: int  # of a hidden element, both additions
    logits: int  # of a logit
    kernels: int  # of a layer


TRAFFIC = {"eager": _Traffic(36, 22, 10, 12, 24, 56), "fused": _Traffic(4, 4, 6, 12, 14, 25)}
ADAPTER_BYTES, ADAPTER_KERNELS = (2, 12), 5  # LoRA beside one matrix: of an input and an output element; kernels
EXPERT_TRAFFIC = 32  # bytes of a hidden element of each routed token: gathered, padded, weighted in fp32, scattered
EXPERT_OPERATIONS, ADAPTED_EXPERT_OPERATIONS = (
    11,
    35,
)  # PyTorch operations, views included, of an expert that runs alone


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of a pass, shape (micro-batches,): of all layers, and of the output head with its log-probs."""

    layers_s: Floats
    head_s: Floats


def microbatches_s(
    model: ModelShape, gpu: Gpu, config: TrainingConfig, tokens: Floats, attended: Floats, backward: bool
) -> MicroBatch:
    """Return the seconds of micro-batches of `tokens`, which attend to `attended` tokens in sum (causal: half the square of
    each sequence's length), forward or forward and backward, where all GPUs of a sequence and of a layer share the work."""
    tp, shared = config.tensor_parallel, config.tensor_parallel * config.sequence_parallel
    mine = tokens / config.sequence_parallel
    traffic = TRAFFIC[config.kernels]
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden = model.hidden

    def product_s(inner: int, outer: int, cut: int = 1) -> Floats:
        """Return the seconds of a product, of which each GPU of a layer has a part; `cut`: of its inner dimension."""
        rate = gpu.bf16_flops * gpu.matmul_share * inner / (inner + HALF_K * cut)
        return 2.0 * mine * inner * outer / tp / rate

    again = 1 if backward and config.recompute is not False else 0
    sweeps = (3 if backward else 1) + again  # of what a backward pass does twice as much of
    products = sweeps - (1 if backward and config.lora else 0)  # weights that are not trained have no gradients

    matrices = [(hidden, queries, 1), (hidden, keys, 1), (hidden, keys, 1), (queries, hidden, tp)]
    intermediate = model.intermediate
    if not model.experts:
        matrices += [(hidden, intermediate, 1), (hidden, intermediate, 1), (intermediate, hidden, tp)]
    layer_s = products * sum(product_s(*matrix) for matrix in matrices)

    share, half = ATTENTION[config.attention]
    length = 2.0 * attended / tokens  # mean, by tokens
    peak = gpu.bf16_flops if config.attention == "fa3" else gpu.mma_flops or gpu.bf16_flops
    attention_s = 4.0 * queries * attended / shared / (peak * share * length / (length + half))
    layer_s = layer_s + attention_s * (1 + again + (BACKWARD_ATTENTION if backward else 0))

    moved = traffic.norm * (2 * hidden + (queries + keys if model.qk_norm else 0))
    moved += traffic.rotary * (queries + keys) + traffic.residual * hidden
    kernels = traffic.kernels
    if model.experts:
        expert_s, expert_bytes, expert_kernels = _experts(model, gpu, config, mine, products, sweeps, backward)
        layer_s, moved, kernels = layer_s + expert_s, moved + expert_bytes, kernels + expert_kernels
    else:
        moved += traffic.gate * intermediate
    if config.lora:
        moved += sum(ADAPTER_BYTES[0] * inner + ADAPTER_BYTES[1] * outer for inner, outer, _ in matrices)
        kernels += ADAPTER_KERNELS * len(matrices)
    bandwidth = gpu.memory_bytes_per_s * MEMORY_SHARE
    layer_s = layer_s + sweeps * (moved * mine / tp / bandwidth + kernels * LAUNCH_S)
    layer_s = layer_s + _collectives_s(model, gpu, config, mine, sweeps)

    head_s = (3 - config.lora if backward else 1) * product_s(hidden, model.vocab)
    head_s = head_s + (3 if backward else 1) * traffic.logits * model.vocab * mine / tp / bandwidth
    return MicroBatch(model.layers * layer_s, head_s)


def _experts(
    model: ModelShape, gpu: Gpu, config: TrainingConfig, mine: Floats, products: int, sweeps: int, backward: bool
) -> tuple[Floats, int, int]:
    """Return the seconds of a layer's experts, their bytes of a token through memory, and kernels. Tokens are spread evenly.

    Experts that run one by one (`grouped_experts` off) take the host's launches if these are longer.
    """
    chosen, inner = model.experts_per_token, model.moe_intermediate
    routed = mine * chosen  # as many leave for the other GPUs of expert parallelism as come from there
    here = model.experts / config.expert_parallel
    rows = routed * config.expert_parallel / model.experts
    share = EXPERT_SHARE * rows / (rows + HALF_ROWS)
    work_s = products * 2.0 * routed * 3 * model.hidden * inner / (gpu.bf16_flops * gpu.matmul_share * share)
    router_s = sweeps * 2.0 * mine * model.hidden * model.experts / (gpu.bf16_flops * gpu.matmul_share)
    if not config.grouped_experts:
        operations = ADAPTED_EXPERT_OPERATIONS if config.lora else EXPERT_OPERATIONS
        work_s = np.maximum(work_s, sweeps * here * operations * HOST_LAUNCH_S)
    traffic = TRAFFIC[config.kernels]
    moved = chosen * (EXPERT_TRAFFIC * model.hidden + traffic.gate * inner)
    if config.lora:
        moved += chosen * (
            ADAPTER_BYTES[0] * (2 * model.hidden + inner) + ADAPTER_BYTES[1] * (2 * inner + model.hidden)
        )
    if config.expert_parallel > 1:  # there and back, forward and backward alike
        away = 1.0 - 1.0 / config.expert_parallel
        router_s = router_s + sweeps * 2 * 2.0 * routed * model.hidden * away / gpu.bytes_per_s_among(
            config.expert_parallel
        )
    return work_s + router_s, moved, 12


def _collectives_s(model: ModelShape, gpu: Gpu, config: TrainingConfig, mine: Floats, sweeps: int) -> Floats:
    """Return the seconds of a layer's collectives: with tensor parallelism two all-reduces a pass (or their halves, with the
    tokens shared between them), with sequence parallelism (Ulysses) all heads of some tokens for all tokens of some heads,
    and back."""
    tp, sp = config.tensor_parallel, config.sequence_parallel
    total = np.zeros_like(mine)
    passes = sweeps - (1 if sweeps > 1 else 0)  # forward, backward, and again
    if tp > 1:
        moved = 2 * 2 * 2.0 * mine * model.hidden * (1 - 1 / tp)
        total = total + passes * (moved / gpu.bytes_per_s_among(tp) + 4 * COLLECTIVE_S)
    if sp > 1:
        heads = 2 * (model.heads + model.kv_heads) * model.head_dim
        moved = 2.0 * mine * heads * (1 - 1 / sp)
        total = total + passes * (moved / gpu.bytes_per_s_among(sp) + 4 * COLLECTIVE_S)
    return total
