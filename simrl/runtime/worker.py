"""RolloutWorker: the inference engine as schedules see it.

Invariant, on both clocks: commands take effect in the order in which they were given, at the first
boundary between two forward passes strictly after the instant of the command; at once if the worker
is idle. So a reaction to the end of a response reaches a busy worker one pass later. The commands
of one instant arrive together. `submit`'s event always fires, exactly once, also when the worker is
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import simpy

from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

LoadMode = Literal["recompute", "keep", "drain", "start_over"]


@dataclass(frozen=True)
class OnUpdate:
    """Treatment of the requests that workers run at an update.

    `running` is the mode of `RolloutWorker.load_weights`, and `retry_s` the wait of an interrupted
    request before its client sends it again (verl V1: 1 s). A load takes `pause_s` longer.
    `salted`: a group finds the prefixes of groups that began under equal weights, and no others
    (prime-rl; SkyRL: `use_cache_salt`; a request's `cache_salt` in vLLM)."""

    running: LoadMode = "recompute"
    retry_s: float = 0.0
    pause_s: float = 0.0
    salted: bool = False


RECOMPUTE = OnUpdate()


class EngineLoad(NamedTuple):
    """Report of an engine: the tokens that its KV cache holds, the share in use, the
    requests that run and wait, and the preemptions since the last report."""

    kv_tokens: int
    kv_usage: float
    running: int
    waiting: int
    preemptions: int


@dataclass(eq=False, slots=True)
class GroupRun:
    """A group that workers generate. `over` fires with all its rollouts when its last sample has
    left its worker.

    If `needed` is set, `complete` fires with the first `needed` finished responses, and both events
    list responses in the order of finishing; otherwise `over` lists them in the order of the
    samples. A withdrawn response is not done. `over` fails if a worker fails. `first` is the number
    of the group's first ticket, -1 where it has none.
    """

    samples: Sequence[Sample]
    partials: Sequence[Rollout | None]
    needed: int | None
    complete: simpy.Event
    over: simpy.Event
    first: int = -1


class WholeGroups(Protocol):
    """Workers that generate whole groups, without an event for each response."""

    def submit(
        self,
        groups: Sequence[GroupRun],
        workers: Sequence[int],
        cuts: Sequence[int | None],
        order: Sequence[int],
    ) -> None:
        """Submit groups. `workers` and `cuts` have the worker and the `max_tokens` of each sample;
        the samples begin in `order`."""

    def withdraw(self, groups: Sequence[GroupRun]) -> None:
        """Abort the unfinished responses of groups."""

    def stop(self) -> None:
        """Record what is unfinished when the workers have stopped."""


class RolloutWorker(Protocol):
    """An inference engine that generates samples; a `submit` begins a request."""

    @property
    def policy_version(self) -> int:
        """The version of its weights."""

    @property
    def groups(self) -> WholeGroups | None:
        """The generator of whole groups on this worker's fleet; None if each response has an
        event."""

    def submit(
        self,
        sample: Sample,
        partial: Rollout | None = None,
        max_tokens: int | None = None,
        cached: float = 0.0,
    ) -> simpy.Event:
        """Start a request, continuing `partial` if given. Fires with a `Rollout`: done, or not done
        if the response reached `max_tokens` or was aborted. `cached` is the share of the KV cache
        of `partial` that is fetched from a pool or another worker. If it is 1, decoding begins
        after the fetch; otherwise the rest is recomputed meanwhile."""

    def abort(self, sample: Sample) -> simpy.Event:
        """End a request. Fires with the `Rollout` so far after the request's own event did, or with
        None if it had ended."""

    def load_weights(
        self, version: int, running: LoadMode = "recompute", retry_s: float = 0.0
    ) -> simpy.Event:
        """Load weights; fires with a `WeightLoad`.

        Running requests are interrupted and recompute their KV cache under the new weights
        ("recompute"), lose their tokens and begin again ("start_over"), are interrupted and keep
        cache and tokens ("keep"), or end first while nothing new is admitted ("drain"). A request
        that waits for an environment does not run: it keeps its tokens, and recomputes its cache
        in all modes but "keep". What recomputes or starts over comes back to the worker's queue
        `retry_s` after the interruption, with what waited there.
        """

    def when(self, sample: Sample, tokens: int) -> simpy.Event:
        """Watch a request. Fires at the first boundary at which its response has `tokens`, those of
        other workers included; never if it ends before."""

    def progress(self, samples: Sequence[Sample]) -> simpy.Event:
        """Report requests. Fires with the unfinished `Rollout` of each at the boundary, drafts
        included; None for one that is not here. (A server that streams tokens and counts drafts by
        request can answer this.)"""

    def load(self) -> simpy.Event:
        """Report the engine's load. Fires with an `EngineLoad` at the boundary."""

    def draft_with(self, drafter: str | None) -> simpy.Event:
        """Let an idle worker draft with another of its drafters, which it loads; None: with its
        first one again, which it has kept. Fires when it is there."""


class Worker(RolloutWorker, Protocol):
    """A worker as a run needs it: it may also be slow, lost or late (`load_delay_s`), lend its
    GPUs, and stop."""

    load_delay_s: float

    def slow_down(self, factor: float) -> None:
        """Let every forward pass take `factor` times as long from now on."""

    def fail(self) -> None:
        """Lose the worker: its requests end as they are; its KV cache and weights are gone. Until
        `restore`, samples come back at once and weights count as loaded, so that no pipeline waits
        for it."""

    def lend(self) -> simpy.Event:
        """Hand the GPUs to the trainer: like `fail`, but without a `lost` span. Fires when they are
        free."""

    def restore(self) -> simpy.Event:
        """Bring the worker back with the weights requested last. Fires with a `WeightLoad`; None if
        it was not away."""

    def stop(self, time_s: float) -> None:
        """End the run now: close the worker's spans and record what is unfinished."""


class WorkerCosts(NamedTuple):
    """Time that a worker's commands take in addition to forward passes.

    A load takes `load_s`, and `pause_s` more where workers pause while weights are published.
    `fetch_s_per_token` is for KV cache from a pool. An evaluation of `evaluate_s` follows the load
    of every `evaluate_every`th version, or of the first later version that is loaded (0: none).
    `request_s` is the host's work for a request before the next pass."""

    load_s: float
    fetch_s_per_token: float = 0.0
    evaluate_every: int = 0
    evaluate_s: float = 0.0
    request_s: float = 0.0
    pause_s: float = 0.0
