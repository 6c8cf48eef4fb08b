"""The `agents` section of a scenario: how trajectories of several turns with an environment run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from simrl.validation import Section

Kv = Literal["cache", "keep", "drop", "offload"]


class AgentsConfig(Section):
    """Trajectories of several turns with an environment: the KV cache while a tool runs, caps, a
    deadline. For responses of one turn, only `max_concurrent` and `deadline_s` count."""

    kv_while_tool_runs: Kv | None = None
    """fate of a trajectory's KV cache while a tool runs. cache: it is found again unless evicted
    (with engine.prefix_caching alone); keep: it stays until room is short, the longest pause goes
    first; drop: it is freed and computed again (without prefix caching); offload: it is copied to
    host memory, and back before the turn goes on. If not given: cache with prefix caching, else
    drop"""
    host_memory_bytes: Annotated[float, Field(gt=0, le=1e15)] | None = None
    """offload: host memory of a rollout worker for KV cache; the least recently used cache goes
    first, and one that still does not fit is dropped"""
    host_link_bytes_per_s: Annotated[float, Field(gt=0, le=1e13)] | None = None
    """offload: rate of each GPU to or from host memory, one direction; the PCIe rate of its data
    sheet if not given"""
    max_concurrent: PositiveInt | None = None
    """most trajectories in flight over all workers, tool calls included; others wait in the order
    of their submission"""
    tool_slots: PositiveInt | None = None
    """tool calls that run at a time over all workers (sandboxes); others wait, first come first
    served"""
    acting_token_weight: Annotated[float, Field(gt=0, le=1)] | None = None
    """system.dispatch=programs: what a token of a trajectory counts while its tool runs, when
    trajectories are admitted by the room of KV caches; 1 if not given"""
    deadline_s: Annotated[float, Field(gt=0, le=1e7)] | None = None
    """seconds from a trajectory's first arrival at a worker (waiting before does not count) until
    it is killed: it is then trained as it is, with reward 0"""

    @model_validator(mode="after")
    def _offloads_somewhere(self) -> AgentsConfig:
        if self.kv_while_tool_runs == "offload" and self.host_memory_bytes is None:
            raise ValueError(
                "kv_while_tool_runs is offload without host_memory_bytes; give the memory of a worker's host"
            )
        return self
