"""RolloutWorker: the inference engine as schedules see it.

Invariant, on both clocks: commands take effect in the order in which they were given, at the first boundary between two
forward passes strictly after the instant of the command; at once if the worker is idle. So a reaction to the end of a response
reaches a busy worker one pass later. The commands of one instant arrive together. `submit`'s event always fires, exactly once,
also when the worker is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import simpy

from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

LoadMode = Literal["recompute", "keep", "drain"]


class TokensReached(NamedTuple):
    """A condition to watch: the sample's response has `tokens`, generated here or at workers before."""

    sample: Sample
    tokens: int


@dataclass(eq=False, slots=True)
class GroupRun:
    """A group that is generated. `over` fires with all its rollouts when none of its samples is at a worker any more.

    If `needed` is set, `complete` fires with the first `needed` finished responses, and both events list responses in the
    order of finishing; otherwise `over` lists them in the order of the samples. A response that was withdrawn is not done. A
    failure of a worker is a failure of `over`. `first` is the first of its tickets, where it has some.
    """

    samples: Sequence[Sample]
    partials: Sequence[Rollout | None]
    needed: int | None
    complete: simpy.Event
    over: simpy.Event
    first: int | None = None


class WholeGroups(Protocol):
    """Workers that generate whole groups while nobody follows their single responses."""

    def submit(
        self, groups: Sequence[GroupRun], workers: Sequence[int], cuts: Sequence[int | None], order: Sequence[int]
    ) -> None:
        """Submit groups; `workers` and `cuts` have the worker and the `max_tokens` of each sample, which begin in `order`."""

    def withdraw(self, groups: Sequence[GroupRun]) -> None:
        """Take the unfinished responses of groups back."""

    def stop(self) -> None:
        """Record what is unfinished when the workers have stopped."""


class RolloutWorker(Protocol):
    """An inference engine that generates samples; a `submit` begins a request."""

    @property
    def policy_version(self) -> int: ...

    @property
    def groups(self) -> WholeGroups | None:
        """The generator of whole groups of this worker and the workers beside it; None if it follows each response."""

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: float = 0.0
    ) -> simpy.Event:
        """Start a request, going on from `partial` if given. Fires with `Rollout`: done, or not done if the response has
        reached `max_tokens` or was aborted. `cached` is the share of the KV cache of `partial` that is fetched, from a pool or
        another worker: all of it first, or a part while the rest is recomputed."""

    def abort(self, sample: Sample) -> simpy.Event:
        """End a request. Fires with the `Rollout` so far after the request's own event did, or with None if it had ended."""

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        """Load weights; fires with a `WeightLoad`.

        Running requests are interrupted and recompute their KV cache under the new weights ("recompute"), are interrupted
        and keep it ("keep"), or end first while nothing new is admitted ("drain"; a request that waits for an
        environment does not run, and recomputes its cache).
        """

    def when(self, condition: TokensReached) -> simpy.Event:
        """Watch a request. Fires once, at the first boundary at which the condition holds; never if it ends before."""

    def progress(self, sample: Sample) -> simpy.Event:
        """Report a request. Fires with its `Rollout` at the boundary, not done, its drafts counted; with None if it is not
        here. (A server that streams its tokens, and counts drafts by request, has it at hand.)"""

    def draft_with(self, drafter: str | None) -> None:
        """Let an idle worker draft with another of the drafters that it holds; None: with its own again."""


class Worker(RolloutWorker, Protocol):
    """A worker as a run needs it: one that may also be slow, lost or late (`load_delay_s`), lend its GPUs, and stop."""

    load_delay_s: float

    def slow_down(self, factor: float) -> None: ...

    def fail(self) -> None: ...

    def lend(self) -> simpy.Event: ...

    def restore(self) -> simpy.Event: ...

    def stop(self, time_s: float) -> None:
        """End the run now: close the worker's spans and record what is unfinished."""


class WorkerCosts(NamedTuple):
    """Time that a worker's commands take in addition to forward passes. `pause_s` is what a load takes longer where workers are
    paused for the publication of the weights. `fetch_s_per_token` is for KV cache from a pool; an
    evaluation of `evaluate_s` follows the load of every `evaluate_every`th version, or of the first after it that is loaded
    (0: none). `request_s` is the host's work for each request, before the next pass."""

    load_s: float
    fetch_s_per_token: float = 0.0
    evaluate_every: int = 0
    evaluate_s: float = 0.0
    request_s: float = 0.0
    pause_s: float = 0.0
