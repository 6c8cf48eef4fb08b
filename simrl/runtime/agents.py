"""Trajectories between their turns: their KV cache while a tool runs, and the tool slots, deadlines
and figures of all workers.

Invariant: a tool call belongs to its trajectory, not to the worker: it continues if the trajectory
moves, and ends early only with the trajectory. Copies of a trajectory make calls of their own; a
copy made during a call waits for that call, too.

Offloading follows vLLM's `OffloadingConnector`. Full blocks are copied: out, if the host lacks
them; back, if the engine does not find them itself. They stay in host memory. Room is made by
evicting the least recently used trajectories, the end of each first, but none with a copy under
way. If the room does not suffice, nothing is stored.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import simpy

from simrl.engine.requests import is_plain
from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.runtime.events import call_at
from simrl.scenario.agents import AgentsConfig, Kv


class AgentRules(NamedTuple):
    """The section `agents` for one model on one GPU. A worker's host memory holds `host_blocks`
    blocks of its KV cache, of `block_bytes` over all its GPUs, whose shards are copied in parallel
    in `block_s`."""

    kv: Kv = "keep"
    host_blocks: int = 0
    block_bytes: float = 0.0
    block_s: float = 0.0
    tool_slots: int | None = None
    deadline_s: float = math.inf

    def limits(self, limits: Limits) -> Limits:
        """Return the limits of an engine under these rules for paused requests."""
        return limits._replace(hold_paused=self.kv in ("keep", "offload"))


PLAIN = AgentRules()


def agent_rules(
    config: AgentsConfig,
    limits: Limits,
    model: ModelShape,
    gpu: Gpu,
    tp: int,
    kv_share: float = 1.0,
) -> AgentRules:
    """Return the rules of a worker of `tp` GPUs, whose KV cache takes `kv_share` of its bytes in
    bfloat16. Raise `InputError` for a KV cache that the engine cannot treat so."""
    caching = limits.prefix_caching
    kv = config.kv_while_tool_runs or ("cache" if caching else "drop")
    refuse(
        (
            kv == "cache" and not caching,
            "agents.kv_while_tool_runs is cache, and an engine without prefix caching finds nothing again; use keep, drop or "
            "offload, or engine.prefix_caching=true",
        ),
        (
            kv == "drop" and caching,
            "agents.kv_while_tool_runs is drop, and an engine with prefix caching finds again what it freed; use cache, or "
            "engine.prefix_caching=false",
        ),
        (
            kv == "offload" and not is_plain(limits),
            f"agents.kv_while_tool_runs is offload: {model.name} has layers with windows or states, which are not offloaded "
            "here; use keep or drop",
        ),
    )
    shard_bytes = limits.block_size * model.kv_bytes_per_token * kv_share / min(tp, model.kv_heads)
    block_bytes = shard_bytes * tp
    host_blocks = int((config.host_memory_bytes or 0.0) // block_bytes) if kv == "offload" else 0
    if kv == "offload" and host_blocks == 0:
        raise InputError(
            f"agents.host_memory_bytes is {config.host_memory_bytes:g}: a block of {limits.block_size} tokens of {model.name} "
            f"takes {block_bytes:g}; use more, or kv_while_tool_runs=drop"
        )
    return AgentRules(
        kv=kv,
        host_blocks=host_blocks,
        block_bytes=block_bytes,
        block_s=shard_bytes / (config.host_link_bytes_per_s or gpu.host_bytes_per_s),
        tool_slots=config.tool_slots,
        deadline_s=math.inf if config.deadline_s is None else config.deadline_s,
    )


def check_concurrency(
    config: AgentsConfig, workers: int, limits: Limits, by_room: bool = False
) -> None:
    """Raise `InputError` if more trajectories may be in flight than the engines hold, or for a
    weight of the admission by room where there is none (`by_room`)."""
    most, ranks = (
        workers * limits.dp * limits.max_num_seqs,
        f" × dp {limits.dp}" if limits.dp > 1 else "",
    )
    refuse(
        (
            config.max_concurrent is not None and config.max_concurrent > most,
            f"agents.max_concurrent is {config.max_concurrent}: {workers} workers run at most {most} sequences at a time "
            f"(engine.max_num_seqs {limits.max_num_seqs}{ranks}); use at most {most}, more max_num_seqs, or more GPUs",
        ),
        (
            config.acting_token_weight is not None and not by_room,
            f"agents.acting_token_weight is {config.acting_token_weight}: this system's dispatch does not admit by the "
            "room of KV caches; use system.dispatch=programs, or leave it out",
        ),
    )


@dataclass
class AgentFigures:
    """Sums over all trajectories of a run."""

    in_tools_s: float = 0.0
    waiting_for_tool_slots_s: float = 0.0
    waiting_for_kv_s: float = 0.0
    offloaded_bytes: float = 0.0
    not_offloaded: int = 0  # turns for which the host had no room
    killed: int = 0


class Agents:
    """The rules, figures, tool slots and deadlines that the trajectories of all workers share.

    `on_turn` is called when a turn of a trajectory ends, with its rollout and True, and when its
    tool has answered, with the answer and False, also if it has left its worker meanwhile. (A
    client of engines sees every response, and calls the tools.)

    `pool`: the dispatcher of prefill workers, where workers decode what others prefill. `links` has
    for each lane the time at which its link has sent all KV cache; a token's takes
    `kv_s_per_token`."""

    def __init__(self, env: simpy.Environment, rules: AgentRules) -> None:
        self.rules = rules
        self.pool: Any = None
        self.links, self.kv_s_per_token = dict[int, float](), 0.0
        self.figures = AgentFigures()
        self.on_turn: Callable[..., None] = lambda rollout, ended: None
        self.tools = ToolSlots(env, rules.tool_slots, self.figures) if rules.tool_slots else None
        self._due_s: dict[int, float] = {}

    def due_s(self, uid: int, now_s: float) -> float:
        """Return the deadline of a trajectory that begins, or continues, at a worker now."""
        return self._due_s.setdefault(uid, now_s + self.rules.deadline_s)

    def stop(self) -> None:
        """End the simulation now."""
        if self.tools is not None:
            self.tools.stop()

    def facts(self) -> dict[str, Any]:
        """Return the figures for the metadata of a result."""
        return {"kv_while_tool_runs": self.rules.kv, **asdict(self.figures)}


@dataclass(eq=False, slots=True)
class ToolCall:
    """A tool call that waits for a slot, or has one until `until_s`; all of `over` are called at
    its end."""

    uid: int
    answer_s: float
    seconds: float
    called_s: float
    over: list[Callable[[], None]]
    until_s: float = math.inf


class ToolSlots:
    """Tool calls of all workers, of which `slots` run at a time: first come, first served. Calls of
    one trajectory's copies differ in `answer_s`, the time at which a call would be over without a
    wait."""

    def __init__(self, env: simpy.Environment, slots: int, figures: AgentFigures) -> None:
        self._env = env
        self._free = slots
        self._figures = figures
        self._calls: dict[int, list[ToolCall]] = {}
        self._waiting: deque[ToolCall] = deque()

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return len(self._waiting)

    def begin(self, uid: int, answer_s: float, seconds: float, over: Callable[[], None]) -> None:
        """Begin a call of a trajectory, now or when a slot is free."""
        call = ToolCall(uid, answer_s, seconds, self._env.now, [over])
        self._calls.setdefault(uid, []).append(call)
        self._waiting.append(call)
        self._start()

    def follow(self, uid: int, answer_s: float, over: Callable[[], None]) -> bool:
        """Call `over`, too, at the end of a trajectory's call. Return whether there is such a
        call."""
        for call in self._calls.get(uid, ()):
            if call.answer_s == answer_s:
                call.over.append(over)
                return True
        return False

    def kill(self, uid: int) -> None:
        """End the calls of a trajectory that has ended."""
        for call in self._calls.pop(uid, ()):
            self._cut(call)
            if call.until_s < math.inf:
                self._free += 1
            else:
                self._waiting.remove(call)
        self._start()

    def stop(self) -> None:
        """End the simulation now."""
        for calls in self._calls.values():
            for call in calls:
                self._cut(call)

    def _cut(self, call: ToolCall) -> None:
        """Count a call up to now only."""
        if call.until_s < math.inf:
            self._figures.in_tools_s -= call.until_s - self._env.now
        else:
            self._figures.waiting_for_tool_slots_s += self._env.now - call.called_s

    def _start(self) -> None:
        while self._waiting and self._free > 0:
            self._free -= 1
            call, now_s = self._waiting.popleft(), self._env.now
            call.until_s = now_s + call.seconds
            self._figures.in_tools_s += call.seconds
            self._figures.waiting_for_tool_slots_s += now_s - call.called_s
            call_at(self._env, call.until_s, lambda call=call: self._end(call))  # type: ignore[misc]

    def _end(self, call: ToolCall) -> None:
        calls = self._calls.get(call.uid, [])
        if call in calls:
            calls.remove(call)
            self._free += 1
            self._start()
            for over in call.over:
                over()


@dataclass(eq=False, slots=True)
class HostCopy:
    """The first `blocks` of a trajectory's KV cache in host memory. A copy under way, in or out,
    ends at `until_s`."""

    blocks: int = 0
    until_s: float = -math.inf


class HostMemory:
    """KV cache of one worker's trajectories in host memory, least recently used first, and the link
    to it, with a queue for each direction."""

    def __init__(self, rules: AgentRules, figures: AgentFigures) -> None:
        self._rules = rules
        self._figures = figures
        self._copies: OrderedDict[int, HostCopy] = OrderedDict()
        self._free = rules.host_blocks
        self._out_free_s = self._in_free_s = 0.0

    def store(self, uid: int, blocks: int, now_s: float) -> float:
        """Copy out those of a trajectory's first `blocks` that the host lacks. Return the time at
        which that is over; now if there is no room, or nothing to copy."""
        copy = self._copies.get(uid) or HostCopy()
        new = blocks - copy.blocks
        if new <= 0 or not self._make_room(new, copy, now_s):
            self._figures.not_offloaded += new > 0
            return now_s
        self._free -= new
        self._copies[uid], copy.blocks = copy, blocks
        self._copies.move_to_end(uid)
        self._figures.offloaded_bytes += new * self._rules.block_bytes
        copy.until_s = self._out_free_s = max(now_s, self._out_free_s) + new * self._rules.block_s
        return copy.until_s

    def load(self, uid: int, on_gpu: int, now_s: float) -> tuple[HostCopy | None, int, float]:
        """Copy back a trajectory's blocks behind the first `on_gpu`. Return the host's copy, its
        blocks, and the time at which that is over; no copy and no blocks if the host has none, or a
        copy is under way."""
        copy = self._copies.get(uid)
        if copy is None or copy.until_s > now_s:
            return None, 0, now_s
        self._copies.move_to_end(uid)
        if copy.blocks <= on_gpu:
            return copy, copy.blocks, now_s
        missing_s = (copy.blocks - on_gpu) * self._rules.block_s
        copy.until_s = self._in_free_s = max(now_s, self._in_free_s) + missing_s
        self._figures.waiting_for_kv_s += copy.until_s - now_s
        return copy, copy.blocks, copy.until_s

    def has(self, uid: int, copy: HostCopy) -> bool:
        """Return whether a copy was computed with the present weights."""
        return self._copies.get(uid) is copy

    def clear(self) -> None:
        """Forget all copies, which other weights computed. Copies under way occupy the link to
        their end."""
        self._copies.clear()
        self._free = self._rules.host_blocks

    def _make_room(self, blocks: int, kept: HostCopy, now_s: float) -> bool:
        """Evict other copies than `kept` until `blocks` are free. Return False, and evict none, if
        they do not suffice."""
        missing, idle = blocks - self._free, []
        evictable = 0
        for uid, copy in self._copies.items():
            if evictable >= missing:
                break
            if copy is not kept and copy.until_s <= now_s:
                idle.append((uid, copy))
                evictable += copy.blocks
        if evictable < missing:
            return False
        for uid, copy in idle:
            evicted = min(missing, copy.blocks)
            missing, copy.blocks = missing - evicted, copy.blocks - evicted
            self._free += evicted
            if copy.blocks == 0:
                del self._copies[uid]
        return True
