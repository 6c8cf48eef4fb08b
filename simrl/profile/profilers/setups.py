"""Limits of the databases of measured kernels: GPUs, precisions, models and splits, known without
their packages.

Invariant: `require_possible` refuses only what every version of the databases that was tried
refuses, too.
"""

from __future__ import annotations

from typing import NamedTuple

from simrl.errors import InputError, refuse
from simrl.extensions import install_command
from simrl.profile.model_shape import MODELS, ModelShape, require_kv_heads

SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "rtxpro6000": "rtx_pro_6000_server",
}
# Of weights, by the word in a scenario: aiconfigurator's of matrix products, and of experts.
PRECISIONS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("fp8", "fp8"),
    "fp8-block": ("fp8_block", "fp8_block"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "int4": ("int4_wo", "int4_wo"),
    "w4a16_mxfp4": ("bfloat16", "w4a16_mxfp4"),
}
# aiconfigurator's default: load falls with the expert's rank to this power
ROUTING = "power law 1.2"
ROUTINGS = {"balanced": "balanced", "power law 1.01": "power_law_1.01", ROUTING: "power_law_1.2"}
PACKAGES = {"aiconfigurator": "aiconfigurator_core", "aisimulate": "aisimulate_core"}
# Models whose parts are not all in a shape, by aiconfigurator's name of its own config.
BUNDLED = {
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "minimax-m2": "MiniMaxAI/MiniMax-M2.5",  # of one shape with its successor, as the 3.6 of Qwen
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5-122b-a10b": "Qwen/Qwen3.5-122B-A10B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "qwen3.6-27b": "Qwen/Qwen3.5-27B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
}
# Fields of a shape that a config made from it does not have.
NOT_WRITTEN = (
    *("shared_intermediate", "expert_hidden", "dense_layers", "mlp_layers"),
    *("kv_lora_rank", "linear_layers", "window_layers", "output_gate"),
)


class EngineSetup(NamedTuple):
    """The setup of a measured engine: its split over GPUs, its precisions, and how tokens are
    spread over experts (a name in `ROUTINGS`)."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    precision: str = "bf16"
    kv_precision: str = "bf16"
    routing: str = ROUTING
    backend: str = "vllm"
    package: str = "aiconfigurator"


ONE_GPU = EngineSetup()


def require_possible(shape: ModelShape, gpu: str, setup: EngineSetup) -> None:
    """Raise `InputError` for what no database has: a GPU, a split, a precision or a model."""
    gpus = setup.tp * setup.dp
    refuse(
        (
            gpu not in SYSTEMS,
            f"aiconfigurator: no kernels were measured on gpu {gpu!r}, but on {', '.join(SYSTEMS)}; take --source roofline",
        ),
        (
            not shape.experts and setup.precision == "w4a16_mxfp4",
            f"{shape.name} has no experts: w4a16_mxfp4 is a precision of experts alone",
        ),
        (
            not shape.experts and (setup.dp, setup.ep) != (1, 1),
            f"{shape.name} has no experts: --dp and --ep are for mixtures of experts; leave them out",
        ),
        (
            setup.ep not in (1, gpus),
            f"--ep {setup.ep}: experts are shared by all {gpus} GPUs of tp × dp or by none; give {gpus} or 1",
        ),
        (
            shape.experts % (setup.ep or 1),
            f"--ep {setup.ep} does not divide the {shape.experts} experts of {shape.name}",
        ),
        (
            shape.heads % setup.tp,
            f"--tp {setup.tp} does not divide the {shape.heads} attention heads of {shape.name}",
        ),
    )
    require_kv_heads("--tp", setup.tp, shape)
    # The host's launches take tens of µs each, several times the kernels.
    if (setup.package, setup.backend, setup.precision) == ("aiconfigurator", "vllm", "fp8-block"):
        raise InputError(
            "aiconfigurator: its fp8-block matrix products were timed without CUDA graphs, the host's launches included; "
            f"use --source aisimulate, which has them anew ({install_command('aisimulate')})"
        )
    has, unwritten = (
        _precisions(shape, gpu),
        [field for field in NOT_WRITTEN if getattr(shape, field)],
    )
    remedy = (
        "measure it with `simrl measure`"
        if is_measurable(setup)
        else "nor can `simrl measure` label it"
    )
    refuse(
        (
            setup.precision not in has,
            f"{setup.package}: no {shape.name} on {gpus} {gpu} under {setup.backend} in {setup.precision}; measured are at "
            f"most {', '.join(has) or 'none'}",
        ),
        (
            unwritten and not is_bundled(shape),
            f"{setup.package}: no kernels are found for {shape.name}, as its {', '.join(unwritten)} are not those of a model "
            f"that it knows ({', '.join(BUNDLED)}); {remedy}",
        ),
    )


def is_measurable(setup: EngineSetup) -> bool:
    """Return whether `simrl measure` makes a profile of this setup: its profiles have no other
    precision, no ranks, no ep."""
    return (setup.dp, setup.ep, setup.precision, setup.kv_precision) == (1, 1, "bf16", "bf16")


def _precisions(shape: ModelShape, gpu: str) -> list[str]:
    """Return the precisions of weights that were measured at all on a GPU; int4 was on none."""
    if shape.name.startswith("gpt-oss"):
        return [] if gpu == "a100" else ["w4a16_mxfp4"]
    has = ["bf16"] if gpu == "a100" else ["bf16", "fp8", "fp8-block"]
    return [*has, "nvfp4"] if gpu.startswith(("b", "gb", "rtx")) else has


def is_bundled(shape: ModelShape) -> bool:
    """Return whether the package has a config of exactly this model."""
    return shape.name in BUNDLED and shape == MODELS.get(shape.name)
