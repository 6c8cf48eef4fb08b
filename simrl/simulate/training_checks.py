"""Checks that the train GPUs can train: their division, the precision, the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from simrl.errors import InputError
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.runtime.training_costs import TrainingCosts
from simrl.scenario.training import TrainingConfig


def require_divisor(key: str, value: int, number: int, of: str, also: int = 0) -> None:
    """Raise `InputError` for a value that does not divide a number, with values that divide it, and `also` another."""
    if number % value:
        some = ", ".join(str(n) for n in range(1, 17) if number % n == 0 and also % n == 0)
        raise InputError(f"{key} is {value}: it does not divide the {number} {of}; choose a divisor, such as {some}")


def require_parallelism(training: TrainingConfig, model: ModelShape, train_gpus: int) -> None:
    """Raise `InputError` if the train GPUs cannot be divided as the training section says."""
    parts = {key: getattr(training, key) for key in ("sequence_parallel", "tensor_parallel", "pipeline_parallel")}
    divided = {f"training.{key}": size for key, size in parts.items() if size > 1} or {"training.sequence_parallel": 1}
    require_divisor(" × ".join(divided), training.gpus_per_rank, train_gpus, "train GPUs")
    require_divisor(
        "training.tensor_parallel", training.tensor_parallel, model.heads, f"attention heads of {model.name}"
    )
    stages = training.pipeline_parallel
    if stages > model.layers:
        raise InputError(
            f"training.pipeline_parallel is {stages}: {model.name} has {model.layers} layers; use no more stages"
        )
    if training.expert_parallel > 1:
        if not model.experts:
            raise InputError(
                f"training.expert_parallel is {training.expert_parallel}: {model.name} has no experts; use 1"
            )
        require_divisor("training.expert_parallel", training.expert_parallel, train_gpus // stages, "GPUs of a stage")
        require_divisor("training.expert_parallel", training.expert_parallel, model.experts, f"experts of {model.name}")
    if training.expert_imbalance > training.expert_parallel:
        raise InputError(
            f"training.expert_imbalance is {training.expert_imbalance:g}: of {training.expert_parallel} GPUs that divide the "
            f"experts (training.expert_parallel), the busiest has {training.expert_parallel} times the mean at most; use less"
        )


def require_training_precision(precision: str, gpu: Gpu, training: TrainingConfig) -> None:
    """Raise `InputError` for a precision without measured matrix products on the GPU, and for what a measured mfu holds."""
    if training.mfu is not None and (precision != "bf16" or training.expert_imbalance > 1):
        key = "precision.training" if precision != "bf16" else "training.expert_imbalance"
        raise InputError(f"{key} has no effect beside training.mfu, which was measured with it; leave one of them out")
    if precision not in gpu.precisions:
        raise InputError(
            f"precision.training is {precision}: no matrix products in {precision} were measured on {gpu.name}; "
            f"use {' or '.join(gpu.precisions)}"
        )


def require_training_fits(costs: TrainingCosts, longest_tokens: int, batch: int) -> None:
    """Raise `InputError` if the training state and a micro-batch of the longest sequences of a batch do not fit a GPU."""
    gpu = costs.gpu
    needed, microbatch = costs.memory_bytes(longest_tokens, batch), costs.most_tokens(longest_tokens, batch)
    if needed <= gpu.memory_bytes:
        return
    fitting = list(_fitting(costs, longest_tokens, batch))
    remedies = f"it fits with {' or with '.join(fitting)}" if fitting else "use a GPU with more memory"
    raise InputError(
        f"training: {costs.model.name} on {costs.gpus} {gpu.name} needs {needed / 1e9:.0f} GB a GPU "
        f"({costs.state_bytes / 1e9:.0f} of weights, gradients and optimizer states, the rest activations of "
        f"{microbatch:,} tokens), it has {gpu.memory_bytes / 1e9:.0f}; {remedies}"
    )


def _fitting(costs: TrainingCosts, longest_tokens: int, batch: int) -> Iterator[str]:
    """Yield the least change of each setting of the training, and of the GPUs, with which it would fit."""
    config, sizes = costs.config, [2**power for power in range(1, 8)]
    shards = config.sharding == "optimizer"
    changes: dict[str, list[Any]] = {
        "tokens_per_microbatch": [n for size in sizes if (n := config.tokens_per_microbatch // size) >= longest_tokens],
        "sequences_per_microbatch": [n for size in sizes if (n := (config.sequences_per_microbatch or 0) // size)],
        "microbatches": [size * config.microbatches for size in sizes if config.microbatches],
        "recompute": [True] if config.recompute is False else [],
        "sequence_parallel": sizes,
        "tensor_parallel": [n for n in sizes if n <= costs.gpu.nvlink_domain and costs.model.heads % n == 0]
        if shards
        else [],
        "pipeline_parallel": [n for n in sizes if n <= costs.model.layers] if shards else [],
        "expert_parallel": [n for n in sizes if costs.model.experts and costs.model.experts % n == 0] if shards else [],
        "sharding": ["fsdp"] if shards else [],
    }
    for key, values in changes.items():
        for value in values:
            changed = replace(costs, config=config.model_copy(update={key: value}))
            whole = value != getattr(config, key) and costs.gpus % changed.config.gpus_per_rank == 0
            whole &= costs.gpus // changed.config.pipeline_parallel % changed.config.expert_parallel == 0
            if whole and changed.memory_bytes(longest_tokens, batch) <= costs.gpu.memory_bytes:
                yield f"training.{key}={value}"
                break
    for gpus in (costs.gpus * size for size in sizes):
        if replace(costs, gpus=gpus).memory_bytes(longest_tokens, batch) <= costs.gpu.memory_bytes:
            yield f"{gpus:,} train GPUs"
            break
