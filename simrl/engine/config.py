"""The `engine` section of a scenario: settings of an inference engine, each with its meaning and
default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from simrl.validation import numbers_are_no_truth


class EngineConfig(BaseModel):
    """Settings of an inference engine, named as in vLLM. vLLM's own defaults depend on the GPU and
    on how it is started; these are usual for rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    _numbers = numbers_are_no_truth
    # vLLM's settings that a scenario says in another section
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "it is cluster.tp",
    }

    preset: str | dict[str, Any] | None = Field(
        default=None,
        description="preset of an engine, with the host's times and defaults: vllm-0.19, "
        "sglang-0.5 … (`simrl presets`), or your own file, my.toml",
    )
    max_num_seqs: int = Field(
        default=256, gt=0, description="maximum number of sequences in a pass of one worker"
    )
    max_num_batched_tokens: int = Field(
        default=8192,
        gt=0,
        description="maximum number of tokens in a pass; longer prompts go in chunks",
    )
    block_size: int = Field(
        default=16, gt=0, le=10**6, description="tokens of a block of the KV cache"
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory for weights, KV cache and the reserve",
    )
    reserve_bytes: float = Field(
        default=4e9,
        ge=0,
        description="memory of a GPU for activations, CUDA graphs and communication buffers, "
        "not available to the KV cache",
    )
    kv_cache_tokens: int | None = Field(
        default=None, gt=0, le=10**12, description="size of the KV cache, if it is known"
    )
    enforce_eager: bool = Field(
        default=False,
        description="no CUDA graphs: the host launches each layer; the preset has its time "
        "(verl's default until August 2025)",
    )
    log_probs: bool = Field(
        default=False,
        description="the engine returns the log-prob of each token, which costs its host time by "
        "the preset (verl and NeMo-RL ask for it)",
    )
    async_scheduling: bool = Field(
        default=False,
        description="a pass is scheduled when the one before starts (vLLM's default where it can; "
        "not with decoupled drafts)",
    )
    prefix_caching: bool | None = Field(
        default=None,
        description="reuse of KV cache blocks whose tokens are equal: shared prompts, turns, "
        "preempted requests (null: the system's setting, which is on except for areal)",
    )
