"""The `engine` section of a scenario: settings of an inference engine, each with its meaning and
default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from simrl.validation import MOST_OF_A_PASS, Section


class EngineConfig(Section):
    """Settings of an inference engine, named as in vLLM, and as in SGLang what only that has. The
    defaults of both depend on the GPU and on how they are started; these are usual for rollout."""

    # settings of vLLM and SGLang that a scenario says otherwise
    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "it is cluster.tp",
        "max_running_requests": "it is engine.max_num_seqs: {}",
        "chunked_prefill_size": "it is engine.max_num_batched_tokens: {}",
        "page_size": "it is engine.block_size: {}",
        "mem_fraction_static": "it is engine.gpu_memory_utilization: {}, with engine.reserve_bytes: 0",
    }

    preset: str | dict[str, Any] | None = Field(
        default=None,
        description="preset of an engine, with the host's times and defaults: vllm-0.19, "
        "sglang-0.5 … (`simrl presets`), or your own file, my.toml",
    )
    max_num_seqs: int = Field(
        default=256,
        gt=0,
        le=MOST_OF_A_PASS,
        description="maximum number of sequences in a pass of one worker",
    )
    max_num_batched_tokens: int = Field(
        default=8192,
        gt=0,
        le=MOST_OF_A_PASS,
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
    prefill_schedule_interval: int = Field(
        default=1,
        gt=0,
        le=10**6,
        description="vLLM: while requests decode, passes that compute prompts are this many passes apart, until they leave "
        "requests waiting (1: every pass may)",
    )
    watermark: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="vLLM: share of the KV blocks that stay free when a request starts beside others; matters where KV cache "
        "is short: fewer requests run, and fewer are preempted",
    )
    scheduler: Literal["vllm", "sglang"] = Field(
        default="vllm",
        description="whose rules say which requests a pass computes: vllm mixes prompts with decoding; sglang computes "
        "prompts alone and first, reserves room for what is generated, and finds prompts by token (block_size is 1 unless set)",
    )
    schedule_policy: Literal["fcfs", "lpm"] = Field(
        default="fcfs",
        description="SGLang: requests start first come first served, or, of up to 128 waiting ones, "
        "the one that finds most of its context in the cache first",
    )
    schedule_conservativeness: float = Field(
        default=1.0,
        ge=0,
        description="SGLang: factor on the share, 0.7 at first, of the tokens to come for which admission keeps room",
    )
    clip_max_new_tokens: int = Field(
        default=4096,
        gt=0,
        description="SGLang: most tokens to come of a request that admission counts "
        "(SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)",
    )
    mamba_full_memory_ratio: float = Field(
        default=0.9,
        gt=0,
        description="SGLang: memory for the states of linear-attention layers, over the memory for KV",
    )
    max_mamba_cache_size: int | None = Field(
        default=None, gt=0, description="SGLang: states for which there is memory, if it is known"
    )

    @model_validator(mode="before")
    @classmethod
    def _find_by_token(cls, data: Any) -> Any:
        sglang = isinstance(data, Mapping) and data.get("scheduler") == "sglang"
        return {"block_size": 1, **data} if sglang else data
