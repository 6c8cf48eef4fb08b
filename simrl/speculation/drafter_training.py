"""TLT's spot training: which idle workers train the drafter, and how stale the drafter is (arXiv 2511.16665, §4.2; code
fastrl).

Invariant: training never keeps a worker from its rollout: it takes idle workers only, and all of it ends the moment the rollout
ends. A drafter decodes with the weights that were published last; training that was not saved is lost when it stops.

Two values, neither with a clock: `Coordinator` is the state of the workers, `DrafterStaleness` how far the policy has moved
since the drafter was trained, in policy updates: an update adds one, training reduces it, in the shape of the paper's Fig. 15
(a dip at each update, recovered within a few iterations). `ModelAcceptance.drift` turns it into hardness.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from pydantic import BaseModel, Field


class SpotTraining(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The training of the drafter. The most important number, `recovery_iterations`, is read off Fig. 15, which has no scale
    for it ("within a few iterations"): assumed, like the time of an iteration."""

    adaptive: bool = Field(
        default=True, description="false: the drafter stays as it was at first (TLT Table 4, Target-Base)"
    )
    idle_workers: int = Field(default=1, ge=1, description="idle workers that start a session (code)")
    join: bool = Field(
        default=True,
        description="workers that become idle later join the session (paper); false: only the first ones (code)",
    )
    every_updates: int = Field(
        default=10, ge=1, description="steps from one rollout with training to the next (paper §6.4 and code)"
    )
    activation_s: float = Field(
        default=0.0, ge=0, description="before the first iteration; the code allows 30 s, the paper states no time"
    )
    iteration_s: float = Field(
        default=1.0,
        gt=0,
        description="one iteration (assumed, well above the 20 to 50 ms of work and pause in the code's batches)",
    )
    most_iterations: int = Field(default=200, ge=1, description="of one session (code)")
    recovery_iterations: float = Field(
        default=3.0, gt=0, description="iterations of one worker after which 1/e of the staleness is left (assumed)"
    )
    scaling: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="w workers recover w ** scaling times as fast; 0: a larger batch does not help",
    )
    save_every_iterations: int = Field(default=100, ge=1, description="an asynchronous checkpoint (code)")
    save_at_end: bool = Field(
        default=True,
        description="a session that is stopped saves what it has (code); false: it falls back to the last checkpoint",
    )


class WorkerState(Enum):
    """A worker in TLT §4.2: serving the rollout; done, its memory released; training the drafter."""

    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"


@dataclass(frozen=True)
class Coordinator:
    """The state of each worker. `train`: this step's rollout trains at all. Each change returns the next coordinator and the
    workers whose training starts with it; `training` has all workers that train, `idle` the idle ones, in order."""

    parameters: SpotTraining
    states: tuple[WorkerState, ...]
    train: bool = True

    @property
    def training(self) -> tuple[int, ...]:
        return self._in(WorkerState.TRAINING)

    @property
    def idle(self) -> tuple[int, ...]:
        return self._in(WorkerState.IDLE)

    def fell_idle(self, worker: int) -> tuple[Coordinator, tuple[int, ...]]:
        """Make a busy worker idle. A session begins once enough workers are idle, with the number that it needs (the first by
        number, as in the code) or, where workers may join, with all of them; a worker that becomes idle later joins at once or
        not at all."""
        return self._with([worker], WorkerState.IDLE)._promoted()

    def got_busy(self, worker: int) -> Coordinator:
        """Make an idle or training worker serve again; a session with other workers goes on without it."""
        return self._with([worker], WorkerState.BUSY)

    def rollout_over(self) -> tuple[Coordinator, tuple[int, ...]]:
        """End the rollout: all training stops at once. Also return the workers that trained; they are idle then."""
        return replace(self._with(self.training, WorkerState.IDLE), train=False), self.training

    def rollout_begins(self, step: int) -> tuple[Coordinator, tuple[int, ...]]:
        """Begin the rollout of step 0, 1, … (the one before is over) with the workers as they are: if it trains, idle workers
        may start."""
        train = self.parameters.adaptive and step % self.parameters.every_updates == 0
        return replace(self, train=train)._promoted()

    def _in(self, state: WorkerState) -> tuple[int, ...]:
        return tuple(i for i, own in enumerate(self.states) if own is state)

    def _with(self, workers: Collection[int], state: WorkerState) -> Coordinator:
        return replace(self, states=tuple(state if i in workers else own for i, own in enumerate(self.states)))

    def _promoted(self) -> tuple[Coordinator, tuple[int, ...]]:
        started, p = self.idle, self.parameters
        if not p.join:
            started = () if self.training else started[: p.idle_workers]
        if not self.train or (not self.training and len(self.idle) < p.idle_workers):
            started = ()
        return self._with(started, WorkerState.TRAINING), started


@dataclass(frozen=True)
class DrafterStaleness:
    """Policy updates that each copy of the drafter is behind: `staleness` of the published one, which decodes, `trained` of the
    weights in training, `saved` of their last checkpoint."""

    staleness: float = 0.0
    trained: float = 0.0
    saved: float = 0.0
    iterations: int = 0

    def policy_updated(self) -> DrafterStaleness:
        """Count a policy update: every copy of the drafter is one further behind."""
        return replace(self, staleness=self.staleness + 1, trained=self.trained + 1, saved=self.saved + 1)

    def session_started(self) -> DrafterStaleness:
        """Start a session from the published weights, with no iteration done yet."""
        return replace(self, trained=self.staleness, saved=self.staleness, iterations=0)

    def trained_for(self, seconds: float, workers: int, parameters: SpotTraining) -> DrafterStaleness:
        """Train for `seconds` of a session (without its activation) with this number of workers: the whole iterations that fit
        and that the session may have."""
        done = min(int(seconds / parameters.iteration_s + 1e-9), parameters.most_iterations - self.iterations)
        if done <= 0 or workers < 1:
            return self
        pace = workers**parameters.scaling / parameters.recovery_iterations
        before, after = self.iterations, self.iterations + done
        last_save = after // parameters.save_every_iterations * parameters.save_every_iterations
        saved = self.saved if last_save <= before else self.trained * math.exp(-pace * (last_save - before))
        return replace(self, trained=self.trained * math.exp(-pace * done), saved=saved, iterations=after)

    def session_over(self, parameters: SpotTraining) -> DrafterStaleness:
        """End the session: the saved weights are published with the next policy weights, and decode from then on."""
        kept = self.trained if parameters.save_at_end else self.saved
        return replace(self, staleness=kept, trained=kept, saved=kept)
