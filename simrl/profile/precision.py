"""Precisions of weights and of the KV cache, and the bytes that they take on a GPU.

Invariant: embeddings, output head, routers, norms and states of linear layers keep 16 bits or more
in every precision, as in the released checkpoints (`modules_to_not_convert` of Qwen3-30B-A3B-FP8,
GLM-5-FP8, MiniMax-M2.5; `exclude_modules` of NVIDIA's NVFP4 ones). Some of the latter leave
attention in bfloat16, too; here all matrices of layers have the precision, as
nvidia/Qwen3-235B-A22B-NVFP4 and the kernels that a profile is derived from.
"""

from __future__ import annotations

from typing import Literal

from simrl.errors import InputError
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape

Weights = Literal["bf16", "fp8", "fp8-block", "nvfp4", "int4", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"]
KvCache = Literal["bf16", "fp8"]
# Bytes of a weight with its scales: fp8-block one of 4 bytes a block of 128 × 128 (DeepSeek-V3),
# nvfp4 one byte for 16, int4 two bytes for 128 (AWQ, GPTQ), mxfp4 one byte for 32 (gpt-oss, in its
# experts alone).
WEIGHT_BYTES: dict[str, float] = {
    "bf16": 2,
    "fp8": 1,
    "fp8-block": 1 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
    "int4": 0.5 + 2 / 128,
    "w4a16_mxfp4": 0.5 + 1 / 32,
    "w4a8_mxfp4_mxfp8": 0.5 + 1 / 32,  # activations with scales, too: Blackwell's products
}
EXPERTS_ALONE = ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")
FP8_EXPERTS = "experts in fp8 with one scale a tensor were measured slower than in bf16; fp8-block has the fast kernels"
KV_SHARE = {"bf16": 1.0, "fp8": 0.5}  # of the bytes in bfloat16


def precisions_of(gpu: Gpu, shape: ModelShape) -> list[str]:
    """Return the precisions of a model's weights that a GPU multiplies in, or (4 bits) unpacks to
    bfloat16."""
    has = {
        "fp8": gpu.fp8_flops,
        "fp8-block": gpu.fp8_flops,
        "nvfp4": gpu.fp4_flops,
        "w4a16_mxfp4": shape.experts,
        "w4a8_mxfp4_mxfp8": shape.experts and gpu.fp4_flops,
    }
    return [name for name in WEIGHT_BYTES if has.get(name, True)]


def require_precision(precision: str, gpu: Gpu, shape: ModelShape) -> None:
    """Raise `InputError` for weights in a precision that a GPU does not multiply in, or a model
    does not have."""
    if precision not in (has := precisions_of(gpu, shape)):
        usual = ", ".join(
            name for name in has if name != "int4"
        )  # of which nobody measured a kernel
        raise InputError(
            f"precision.weights is {precision}: {shape.name} on {gpu.name} has {usual}; use one of these"
        )


def weight_bytes_per_gpu(
    model: ModelShape, tp: int, dp: int = 1, ep: int = 1, precision: str = "bf16"
) -> float:
    """Return the bytes of weights on a GPU of a worker: its shard of a rank of `tp` GPUs, and its
    share of the routed experts among all `tp` × `dp`, whole ones or (`ep` 1) a part of each.
    Projections to MLA's latents are on every GPU."""
    weight_bytes, routed = WEIGHT_BYTES[precision], model.routed_parameters
    routers = model.expert_layers * model.hidden * model.experts
    converted = 0 if precision in EXPERTS_ALONE else model.body_parameters - routed - routers
    kept = model.parameters - routed - converted
    copied = (
        model.attention_layers
        * model.hidden
        * (model.q_lora_rank + model.kv_lora_rank + model.rope_head_dim)
    )
    held = (2 * kept + weight_bytes * converted + weight_bytes * routed / dp) / tp
    return held + (weight_bytes if converted else 2) * copied * (1 - 1 / tp)
