"""The spot trainer in a simulation: the times at which workers train the drafter, and its staleness
while it drafts (TLT §4.2; the rules, without a clock, are in `simrl.speculation.drafter_training`).

Invariant: a worker trains only while it has nothing to serve and nothing else needs its GPUs, so
training delays no rollout. (The copy of hidden states to the host prolongs the inference phase of
the steps before one that trains.) Policy weights of version v always come with the drafter that was saved
when v was made, on every worker and at any time: a drafter never changes within a rollout, and the
training of one rollout is first used in the next (as in the public code, which pushes the drafter's
weights into the engines after the policy's).

A worker has nothing to serve when it has no sample at all, waiting for an environment or not: TLT's
workers train when their KV memory is released. Where rollout and training share GPUs, a session
ends when the last worker has nothing to serve; GPUs that the trainer takes are unavailable until
their worker has loaded weights. On separate GPUs, which TLT does not describe, idle workers train
while others serve or wait, and every policy update ends the session, saves, and begins another if
its step trains.

The samples of the buffer that iterations draw depend on policy version and iteration alone, not on
the scenario's seed: runs that differ in the seed draw equal places of the buffer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simrl.profile.hardware import Gpu
from simrl.runtime.recorder import Recorder
from simrl.speculation.deployment import Deployment
from simrl.speculation.draft_times import pace_of
from simrl.speculation.drafter_training import (
    Coordinator,
    DrafterStaleness,
    Pace,
    SpotTraining,
    WorkerState,
)
from simrl.speculation.plan import DraftPlan
from simrl.training.weight_sync import copied_bytes_per_s

KIND = "train_drafter"  # of its spans


def spot_trainer(
    plan: DraftPlan | None,
    deployment: Deployment,
    recorder: Recorder,
    workers: int,
    colocated: bool,
    infers: bool = True,
) -> SpotTrainer | None:
    """Return the trainer of a plan's drafter on idle workers; None if the method trains no
    drafter. Unless an update `infers` log-probs, nothing of the step before is in the buffer: its
    hidden states come from that phase alone (TLT §4.1, §4.2)."""
    training = plan.speculation.training if plan else None
    if plan is None or training is None or not training.adaptive:
        return None
    training = training.model_copy(update={"data_buffer": training.data_buffer and infers})
    pace = pace_of(deployment.model, deployment.gpu, deployment.tp, training.efficiency)
    return SpotTrainer(training, recorder, workers, colocated, plan.first_version, pace)


class SpotTrainer:
    """Follower of workers and the trainer, event by event in time, which knows the staleness of
    each drafter."""

    def __init__(
        self,
        parameters: SpotTraining,
        recorder: Recorder,
        workers: int,
        colocated: bool,
        first_version: int = 0,
        pace: Pace = Pace(),  # noqa: B008 (frozen)
    ) -> None:
        self._parameters = parameters
        self._pace = pace
        self._recorder = recorder
        self._colocated = colocated
        self._first_version = first_version  # of the policy that has a drafter
        self._coordinator = Coordinator(parameters, (WorkerState.IDLE,) * workers, train=False)
        self._serving: set[int] = set()
        self._rolling = False
        self._drafter = DrafterStaleness()
        self.behind = [0.0]  # by policy version: the updates by which its drafter is behind
        self.beyond = [
            (math.inf, 0.0)
        ]  # by policy version: tokens of a response, and the updates behind beyond them
        self.iterations = 0
        # What is called with each iteration: the tokens that it trains on of each response.
        self.on_iteration: Callable[[Sequence[int]], None] = lambda batch: None
        self.saving_s = 0.0  # during which training waited for checkpoints
        self._since_s: dict[int, float] = {}  # the start of each worker in the session
        self._counted_s = 0.0  # the time up to which the session's iterations are counted
        self._over_s = math.inf  # the time of the session's last permitted iteration
        self._stored: deque[tuple[float, float]] = (
            deque()
        )  # times at which checkpoints are stored, and their staleness
        self._stored_s = 0.0  # the last of these times
        self._finished: list[int] = []  # tokens of the responses of this step …
        self._before: list[int] = []  # … and of the step before
        self._pool: list[int] | None = None  # tokens of the buffered responses; None: to be made
        self._longest = 0  # tokens of a response that the session has trained on
        # Of all iterations: tokens of their responses, and with padding to the longest
        self._packed_tokens, self._padded_tokens = 0, 0
        self._collected_s = 0.0  # during which the trainer copied hidden states to its hosts
        self._buffered = 0  # most tokens in the buffer
        self._look(0.0)

    @property
    def window_tokens(self) -> int | None:
        """Last tokens of a response that an iteration trains on; None: all."""
        return self._parameters.window_tokens

    def serves(self, worker: int, now_s: float) -> None:
        """Record that a worker has something to serve."""
        self._serving.add(worker)
        self._take(worker, now_s)
        self._look(now_s)

    def idle(self, worker: int, now_s: float) -> None:
        """Record that a worker has nothing to serve, and its GPUs are free."""
        self._serving.discard(worker)
        self._look(now_s)
        if self._coordinator.states[worker] is WorkerState.BUSY:
            self._count(now_s)
            self._coordinator, started = self._coordinator.fell_idle(worker)
            self._start(started, now_s)

    def occupied(self, lanes: Sequence[int], now_s: float) -> None:
        """Record another use of GPUs: a weight load, the trainer, a fault. Lanes without a worker
        are ignored."""
        for worker in (lane for lane in lanes if lane < len(self._coordinator.states)):
            self._serving.discard(worker)
            self._take(worker, now_s)
        self._look(now_s)

    def policy_updated(self, now_s: float) -> None:
        """Record a policy update of the trainer."""
        self.stop(now_s)
        no_drafter_yet = len(self.behind) <= self._first_version
        self._drafter = DrafterStaleness() if no_drafter_yet else self._drafter.policy_updated()
        self.behind.append(self._drafter.staleness)
        self.beyond.append((self._drafter.covered_tokens, self._drafter.beyond))
        self._before, self._pool = self._finished * self._parameters.data_buffer, None
        self._finished = []
        self._look(now_s)

    def finished(self, tokens: int, now_s: float) -> None:
        """Record a finished response, whose hidden states go into the buffer."""
        self._count(now_s)
        self._finished.append(tokens)
        self._pool = None
        self._buffered = max(self._buffered, sum(self._finished) + sum(self._before))

    def collect_s(self, tokens: int, ranks: int, gpu: Gpu, gpus: int) -> float:
        """Return the seconds in which the trainer's `gpus` copy the hidden states of a batch to
        their hosts, after its log-probs and before its update: 0 unless the next rollout trains.
        Each GPU of a data-parallel rank copies all its rank's tokens, as the public code does."""
        step, p = len(self.behind), self._parameters
        if step < self._first_version or step % p.every_updates or not p.data_buffer:
            return 0.0
        copied_bytes = tokens * self._pace.buffered_bytes / ranks
        seconds = copied_bytes / copied_bytes_per_s(gpu, gpus, "pageable")
        self._collected_s += seconds
        return seconds

    def _look(self, now_s: float) -> None:
        """Begin the rollout if a worker has something to serve; end it if none has."""
        rolls = bool(self._serving) or not self._colocated
        if rolls and not self._rolling:
            self._rolling = True
            self._coordinator, started = self._coordinator.rollout_begins(len(self.behind) - 1)
            self._start(started, now_s)
        elif self._rolling and not rolls:
            self.stop(now_s)

    def stop(self, now_s: float) -> None:
        """End the rollout, or the simulation."""
        self._rolling = False
        self._count(now_s)
        self._coordinator, stopped = self._coordinator.rollout_over()
        self._leave(stopped, now_s)

    def facts(self, now_s: float) -> dict[str, Any]:
        """End the simulation. Return what the metadata of a result say of the training."""
        self.stop(now_s)
        figures = {
            "iterations": self.iterations,
            "saving_s": self.saving_s,
            "packed_tokens": self._packed_tokens,
            "padded_tokens": self._padded_tokens,
            "buffer_bytes": self._buffered * self._pace.buffered_bytes,
            "collecting_s": self._collected_s,
        }
        return {"drafter_updates_behind": self.behind, "drafter_training": figures}

    def _take(self, worker: int, now_s: float) -> None:
        state = self._coordinator.states[worker]
        if state is WorkerState.BUSY:
            return
        self._count(now_s)
        self._coordinator = self._coordinator.got_busy(worker)
        if state is WorkerState.TRAINING:
            self._leave((worker,), now_s)

    def _start(self, started: Sequence[int], now_s: float) -> None:
        if started and not self._since_s:
            self._drafter = self._drafter.session_started()
            self._counted_s = now_s + self._pace.activation_s(self._parameters)
            self._over_s = math.inf
            self._stored.clear()
            self._stored_s, self._longest = 0.0, 0
        self._since_s.update(dict.fromkeys(started, now_s))

    def _leave(self, stopped: Sequence[int], now_s: float) -> None:
        for worker in stopped:
            since_s, until_s = self._since_s.pop(worker), min(now_s, self._over_s)
            if until_s > since_s:
                self._recorder.span(worker, KIND, since_s, until_s, len(self.behind) - 1)
        if stopped and not self._since_s:
            self._drafter = self._drafter.session_over(self._parameters, self._longest)

    def _count(self, now_s: float) -> None:
        """Count the session's iterations that have ended, each with its workers at the end, and the
        stored checkpoints."""
        p, workers = self._parameters, len(self._since_s)
        while workers and self._drafter.iterations < p.most_iterations:
            batch = self._batch()
            if not batch and p.iteration_s is None:  # training waits for a finished response
                self._counted_s = max(self._counted_s, now_s)
                break
            ends_s = self._counted_s + self._pace.iteration_s(batch, workers, p)
            if ends_s > now_s + 1e-9:
                break
            self._drafter = self._drafter.iterated(workers, p)
            self._counted_s, self._longest = ends_s, max([self._longest, *batch])
            self._packed_tokens += sum(batch)
            self._padded_tokens += len(batch) * max(batch, default=0)
            self.iterations += 1
            self.on_iteration(batch)
            if self._drafter.iterations % p.save_every_iterations == 0:
                self._save()
            if self._drafter.iterations == p.most_iterations:
                self._over_s = self._counted_s
        while self._stored and self._stored[0][0] <= now_s + 1e-9:
            self._drafter = replace(self._drafter, saved=self._stored.popleft()[1])

    def _save(self) -> None:
        """Begin a checkpoint, once the last one is stored."""
        waits_s, stored_s = self._pace.save_s(self._parameters)
        starts_s = max(self._counted_s, self._stored_s)
        self._stored_s = starts_s + stored_s
        self._stored.append((self._stored_s, self._drafter.trained))
        self.saving_s += starts_s + waits_s - self._counted_s
        self._counted_s = starts_s + waits_s

    def _batch(self) -> list[int]:
        """Return the tokens of each response of the next iteration, within the window: a random
        sample of the buffer, as in the public code (eagle_background_trainer.py), or in turn, as in
        the paper."""
        if self._pool is None:
            longest, window = max(self._finished, default=0), self._parameters.window_tokens
            earlier = sorted((n for n in self._before if n > longest), reverse=True)
            self._pool = [min(n, window or n) for n in earlier + self._finished]
        pool, iteration = self._pool, self._drafter.iterations
        number = min(self._parameters.batch_sequences, len(pool))
        if self._parameters.sampling == "longest_first":
            return [pool[(iteration * number + i) % len(pool)] for i in range(number)]
        draws = np.random.default_rng([len(self.behind), iteration])
        return [pool[i] for i in draws.choice(len(pool), number, replace=False)] if pool else []
