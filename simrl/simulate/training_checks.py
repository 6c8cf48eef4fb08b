"""Checks that the train GPUs can train: their division, the precision, the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Any

from simrl.errors import InputError, refuse
from simrl.profile.hardware import GIB, Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts
from simrl.validation import in_words

SIZES = [2**power for power in range(8)]  # of groups of GPUs, tried as remedies
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is CUDA's, NCCL's and fragments: assumed, as vLLM's default leaves
MOST_CHANGES, MOST_COMBINATIONS = 3, 3


def require_divisor(key: str, value: int, number: int, things: str, also: int = 0) -> None:
    """Raise `InputError` for a value that does not divide a number, with values that divide it, and
    `also` another."""
    if number % value:
        some = ", ".join(str(n) for n in range(1, 17) if number % n == 0 and also % n == 0)
        raise InputError(
            f"{key} is {value}: it does not divide the {number} {things}; choose a divisor, such as {some}",
            cause=f"{key} does not divide the {things}",
        )


def require_parallelism(training: TrainingConfig, model: ModelShape, train_gpus: int) -> None:
    """Raise `InputError` if the train GPUs cannot be divided as the training section says."""
    parts = {
        key: getattr(training, key)
        for key in ("sequence_parallel", "tensor_parallel", "pipeline_parallel")
    }
    divided = {f"training.{key}": size for key, size in parts.items() if size > 1} or {
        "training.sequence_parallel": 1
    }
    require_divisor(" × ".join(divided), training.gpus_per_rank, train_gpus, "train GPUs")
    require_divisor(
        "training.tensor_parallel",
        training.tensor_parallel,
        model.heads,
        f"attention heads of {model.name}",
    )
    stages, experts, parallel = training.pipeline_parallel, model.experts, training.expert_parallel
    refuse(
        (
            stages > model.layers,
            f"training.pipeline_parallel is {stages}: {model.name} has {model.layers} layers; use no more stages",
        ),
        cause="more pipeline stages than layers",
    )
    refuse(
        (
            parallel > 1 and not experts,
            f"training.expert_parallel is {parallel}: {model.name} has no experts; use 1",
        ),
    )
    if parallel > 1:
        gpus = "GPUs of a stage" if stages > 1 else "GPUs that train"
        require_divisor("training.expert_parallel", parallel, train_gpus // stages, gpus, experts)
        require_divisor("training.expert_parallel", parallel, experts, f"experts of {model.name}")
    refuse(
        (
            training.expert_imbalance > parallel,
            f"training.expert_imbalance is {training.expert_imbalance:g}: of {parallel} GPUs that divide the experts "
            f"(training.expert_parallel), the busiest has {parallel} times the mean at most; use less",
        )
    )


def require_training_precision(precision: str, gpu: Gpu, training: TrainingConfig) -> None:
    """Raise `InputError` for a precision without measured matrix products on the GPU, and for what
    a measured mfu holds."""
    without = "has no effect beside training.mfu, which was measured with it; leave one of them out"
    refuse(
        (training.mfu is not None and precision != "bf16", f"precision.training {without}"),
        (
            training.mfu is not None and training.expert_imbalance > 1,
            f"training.expert_imbalance {without}",
        ),
        (
            precision not in gpu.precisions,
            f"precision.training is {precision}: no matrix products in {precision} were measured on {gpu.name}; "
            f"use {' or '.join(gpu.precisions)}",
        ),
    )


@dataclass(frozen=True)
class TrainingNeed:
    """The memory that an update needs: its costs, its longest sequence and the sequences of its
    batch."""

    costs: TrainingCosts
    longest_tokens: int
    batch: int

    @property
    def bytes_per_gpu(self) -> float:
        return self.costs.memory_bytes(self.longest_tokens, self.batch)

    @property
    def fits(self) -> bool:
        return self.bytes_per_gpu <= USABLE_SHARE * self.costs.gpu.memory_bytes

    def fits_with(self, changes: Mapping[str, Any], times: int = 1) -> bool:
        """Return whether it would fit with other settings of the training, on `times` as many
        GPUs."""
        config, gpus = self.costs.config.model_copy(update=dict(changes)), times * self.costs.gpus
        with suppress(InputError):
            require_parallelism(config, self.costs.model, gpus)
            return replace(self, costs=replace(self.costs, config=config, gpus=gpus)).fits
        return False


class TrainingMemoryError(InputError):
    """Training that does not fit its GPUs; the message has what would fit."""

    def __init__(self, need: TrainingNeed, all_needs: Sequence[TrainingNeed] = ()) -> None:
        self.need, self._all_needs = need, tuple(all_needs)
        costs, needs, usable = (
            need.costs,
            need.bytes_per_gpu / GIB,
            USABLE_SHARE * need.costs.gpu.memory_bytes / GIB,
        )
        digits = next(
            (d for d in range(3) if f"{needs:.{d}f}" != f"{usable:.{d}f}"), 3
        )  # that tell them apart
        microbatch = costs.most_tokens(need.longest_tokens, need.batch)
        super().__init__(
            f"training: {costs.model.name} on {costs.gpus} {costs.gpu.name} needs {needs:,.{digits}f} GiB a GPU "
            f"({costs.state_bytes / GIB:,.0f} of weights, gradients and optimizer states, the rest activations of "
            f"{microbatch:,} tokens); {costs.gpu.memory_words(USABLE_SHARE, digits)}; {_remedies(need, all_needs)}",
            cause="memory of training",
        )

    def __reduce__(self) -> tuple[Any, ...]:  # between processes, from its needs: not from its text
        return type(self), (self.need, self._all_needs)


def _remedies(need: TrainingNeed, all_needs: Sequence[TrainingNeed]) -> str:
    """Return the changes with which a training would fit: all trainings of a comparison and, where
    these need more GPUs, this one alone."""
    together, more = _fitting(all_needs) if len(all_needs) > 1 else ([], True)
    alone = _fitting([need])[0] if more else []
    remedies = (
        [f"all {len(all_needs)} runs fit with {' or with '.join(together)}"] if together else []
    )
    if alone:
        it = "this run alone fits" if len(all_needs) > 1 else "it fits"
        remedies.append(f"{it} with {' or with '.join(alone)}")
    return "; ".join(remedies) or "use a smaller model"


def _fitting(needs: Sequence[TrainingNeed]) -> tuple[list[str], bool]:
    """Return the remedies that change the fewest settings: for each choice of settings the first
    values with which all would fit (three choices of several settings), then the number of GPUs
    that suffices without a change. If no change fits these GPUs, return remedies with more GPUs,
    and True."""
    changes = _changes(next(need for need in needs if not need.fits))
    for times in SIZES:
        more = [] if times == 1 else [_gpus(needs, times)]
        if more and all(need.fits_with({}, times) for need in needs):
            return more, True
        for count in range(1, MOST_CHANGES + 1):
            remedies = list(
                islice(
                    _remedied(needs, changes, count, times, more),
                    None if count == 1 else MOST_COMBINATIONS,
                )
            )
            if remedies:
                alone = (
                    n
                    for n in SIZES[1:]
                    if times == 1 and all(need.fits_with({}, n) for need in needs)
                )
                return [*remedies, *(_gpus(needs, n) for n in islice(alone, 1))], times > 1
    return [], True


def _remedied(
    needs: Sequence[TrainingNeed],
    changes: Mapping[str, list[Any]],
    count: int,
    times: int,
    more: Sequence[str],
) -> Iterator[str]:
    """Yield, for each choice of `count` settings, the first values with which all would fit on
    `times` the GPUs, in words."""
    for keys in combinations(changes, count):
        settings = (
            dict(zip(keys, values, strict=True))
            for values in product(*(changes[key] for key in keys))
        )
        fitting = (
            chosen for chosen in settings if all(need.fits_with(chosen, times) for need in needs)
        )
        if chosen := next(fitting, None):
            yield " and ".join(
                [*(f"training.{key}={in_words(value)}" for key, value in chosen.items()), *more]
            )


def _gpus(needs: Sequence[TrainingNeed], times: int) -> str:
    return (
        f"{times * needs[0].costs.gpus:,} train GPUs"
        if len(needs) == 1
        else f"{times} times the GPUs"
    )


def _changes(need: TrainingNeed) -> dict[str, list[Any]]:
    """Return other values of each setting of the training that has a part in its memory, the least
    change first."""
    costs, config = need.costs, need.costs.config
    model, shards, larger = costs.model, config.sharding == "optimizer", SIZES[1:]
    changes: dict[str, list[Any]] = {
        "tokens_per_microbatch": [
            n
            for size in larger
            if (n := config.tokens_per_microbatch // size) >= need.longest_tokens
        ],
        "sequences_per_microbatch": [
            n for size in larger if (n := (config.sequences_per_microbatch or 0) // size)
        ],
        "microbatches": [size * config.microbatches for size in larger if config.microbatches],
        "recompute": [True] if config.recompute is False else [],
        "tensor_parallel": [n for n in SIZES if shards and n <= costs.gpu.nvlink_domain],
        "sequence_parallel": SIZES,
        "pipeline_parallel": [n for n in SIZES if shards],
        "expert_parallel": [n for n in SIZES if shards and model.experts],
        "sharding": ["fsdp"] if shards else [],
    }
    return {
        key: [n for n in values if n != getattr(config, key)]
        for key, values in changes.items()
        if values
    }


def require_training_fits(need: TrainingNeed) -> None:
    """Raise `TrainingMemoryError` if the training state and a micro-batch of the longest sequences
    do not fit a GPU."""
    if not need.fits:
        raise TrainingMemoryError(need)
