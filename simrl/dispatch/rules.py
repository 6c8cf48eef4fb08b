"""Dispatch: which worker gets which sample, in which order, and when one moves. The rules by name;
some have a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from simrl.dispatch.placement import (
    Placement,
    even_split,
    least_requests,
    round_robin,
    round_robin_groups,
)
from simrl.dispatch.seer import ContextAware
from simrl.dispatch.streamrl import LongestFirst, SkewnessAware
from simrl.dispatch.waiting import Fifo, Queue
from simrl.runtime.history import LengthHistory


@dataclass(frozen=True)
class Dispatch:
    """A rule of dispatch. Without `per_worker`, nothing waits in the queue while a worker takes
    samples.

    At most `per_worker` samples are at a worker at once, by whatever way they came. After
    `chunk_tokens` a sample leaves its worker and queues up anew; with `kv_pool` it finds its KV
    cache in a pool that all workers share, at the price of the transfer, unless its worker was lost
    or the weights have changed. With `kv_room`, a worker takes samples while its KV cache has room.
    A sample whose worker is lost goes on "elsewhere", its tokens prefilled anew, or has to "wait"
    for its worker. With `ranker_accuracy`, a length ranker takes the place of the history
    (`RankedLengths`). With `programs`, KV-aware admission (`simrl.dispatch.programs`) takes the
    place of `place`, and trajectories may change their worker between turns.
    """

    name: str
    place: Placement
    queue: Callable[[LengthHistory], Queue] = Fifo
    per_worker: int | None = None
    chunk_tokens: int | None = None
    kv_pool: bool = False
    kv_room: bool = False
    on_loss: Literal["elsewhere", "wait"] = "elsewhere"
    ranker_accuracy: float | None = None
    programs: bool = False

    @property
    def takes_groups(self) -> bool:
        """True if the rule follows no single response, so that only the end of a group need be an
        event."""
        limited = self.per_worker or self.chunk_tokens or self.kv_room or self.programs
        return not limited and self.queue in (Fifo, LongestFirst)


DISPATCHES: dict[str, Dispatch] = {
    rule.name: rule
    for rule in (
        Dispatch("even_split", even_split),
        Dispatch("least_requests", least_requests),
        Dispatch("round_robin", round_robin),
        Dispatch("round_robin_groups", round_robin_groups),
        Dispatch("programs", least_requests, programs=True),
        Dispatch("streamrl", SkewnessAware(), LongestFirst),
        Dispatch(
            "seer", least_requests, ContextAware, chunk_tokens=8192, kv_pool=True, kv_room=True
        ),
    )
}
