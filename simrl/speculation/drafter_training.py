"""TLT's spot training: which idle workers train the drafter, and how stale the drafter is (arXiv 2511.16665, §4.2; code
fastrl).

Invariant: training never keeps a worker from its rollout: it takes workers that are idle, and all of it ends the moment the
rollout ends. A drafter decodes with the weights that were published last; what was trained since, and not saved, is lost when
it stops.

Two values, neither with a clock: `Coordinator` is what the workers do (BUSY, IDLE, TRAINING), `Drafter` is how far the policy
has moved since the drafter was trained, in policy updates: an update adds one, training takes away, in the shape of the
paper's Fig. 15 (a dip at each update, made good within a few iterations). `ModelAcceptance.drift` makes a hardness of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from simrl.hardware import Gpu, ModelShape


class SpotTraining(BaseModel):
    """How the drafter is trained. The figure that matters most, `recovery_iterations`, is read off Fig. 15, which has no scale
    of its own for it ("within a few iterations"): assumed, as is what an iteration takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    adaptive: bool = Field(
        default=True, description="false: the drafter stays as it was at first (TLT Table 4, Target-Base)"
    )
    idle_workers: int = Field(default=1, ge=1, description="so many idle workers start a session (code)")
    join: bool = Field(
        default=True,
        description="workers that fall idle later join the session (paper); false: the first ones only (code)",
    )
    every_updates: int = Field(
        default=10, ge=1, description="it trains in the rollout of every so-many-th step (paper §6.4 and code)"
    )
    activation_s: float = Field(
        default=0.0, ge=0, description="before the first iteration; the code allows 30 s, nobody states what it takes"
    )
    iteration_s: float = Field(
        default=1.0,
        gt=0,
        description="one iteration (assumed, well above what `training_iteration_s` derives for the code's batches)",
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
    """TLT §4.2: serving rollout; done, its memory released; training the drafter."""

    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"


@dataclass(frozen=True)
class Coordinator:
    """What each worker does. `train` says whether this step's rollout trains at all. Each change gives the next coordinator
    and the workers whose training starts with it; those that train are told by `training`."""

    parameters: SpotTraining
    states: tuple[WorkerState, ...]
    train: bool = True

    @property
    def training(self) -> tuple[int, ...]:
        """The workers in the session, in order."""
        return tuple(i for i, state in enumerate(self.states) if state is WorkerState.TRAINING)

    @property
    def idle(self) -> tuple[int, ...]:
        """The workers that wait, in order."""
        return tuple(i for i, state in enumerate(self.states) if state is WorkerState.IDLE)

    def fell_idle(self, worker: int) -> tuple[Coordinator, tuple[int, ...]]:
        """A busy worker has nothing left to serve. A session begins once enough are idle, with as many as it takes (the first
        by number, as in the code) or, where workers may join, with all of them; who falls idle later joins at once or not at
        all. Raises `ValueError` for a worker that is not busy."""
        return self._with(worker, WorkerState.BUSY, WorkerState.IDLE)._promoted()

    def got_busy(self, worker: int) -> Coordinator:
        """A worker that was idle or training serves again; what it trained with others goes on without it. Raises `ValueError`
        for one that is busy already."""
        if self.states[worker] is WorkerState.BUSY:
            raise ValueError(f"worker {worker} is busy already")
        return self._with(worker, self.states[worker], WorkerState.BUSY)

    def rollout_over(self) -> tuple[Coordinator, tuple[int, ...]]:
        """The rollout has ended: all training stops at once. Gives the workers that trained; they are idle then."""
        states = tuple(WorkerState.IDLE if state is WorkerState.TRAINING else state for state in self.states)
        return replace(self, states=states, train=False), self.training

    def rollout_begins(self, step: int) -> tuple[Coordinator, tuple[int, ...]]:
        """The rollout of step 0, 1, … begins (the one before is over) with the workers as they are: where it trains, those that
        wait may start."""
        train = self.parameters.adaptive and step % self.parameters.every_updates == 0
        return replace(self, train=train)._promoted()

    def _with(self, worker: int, before: WorkerState, after: WorkerState) -> Coordinator:
        if self.states[worker] is not before:
            raise ValueError(f"worker {worker} is {self.states[worker].value}, not {before.value}")
        return replace(self, states=(*self.states[:worker], after, *self.states[worker + 1 :]))

    def _promoted(self) -> tuple[Coordinator, tuple[int, ...]]:
        idle, needed = self.idle, self.parameters.idle_workers
        if not self.train:
            return self, ()
        if self.training:
            started = idle if self.parameters.join else ()
        elif len(idle) >= needed:
            started = idle if self.parameters.join else idle[:needed]
        else:
            started = ()
        states = tuple(WorkerState.TRAINING if i in started else state for i, state in enumerate(self.states))
        return replace(self, states=states), started


@dataclass(frozen=True)
class Drafter:
    """`staleness`: policy updates that the published drafter is behind; what decodes uses it until the next `published`.
    `trained` is the staleness of the weights in training, `saved` that of the last checkpoint of them."""

    staleness: float = 0.0
    trained: float = 0.0
    saved: float = 0.0
    iterations: int = 0

    def policy_updated(self) -> Drafter:
        """The policy has moved by one update; every copy of the drafter is one further behind."""
        return replace(self, staleness=self.staleness + 1, trained=self.trained + 1, saved=self.saved + 1)

    def session_started(self) -> Drafter:
        """Training goes on from the published weights; no iteration of the session is done yet."""
        return replace(self, trained=self.staleness, saved=self.staleness, iterations=0)

    def trained_for(self, seconds: float, workers: int, parameters: SpotTraining) -> Drafter:
        """After so many seconds of a session (its activation not counted) with so many workers: whole iterations, as many as
        fit and as the session may have. Call it for the whole time at once for which the number of workers is the same."""
        done = min(int(seconds / parameters.iteration_s + 1e-9), parameters.most_iterations - self.iterations)
        if done <= 0 or workers < 1:
            return self
        pace = workers**parameters.scaling / parameters.recovery_iterations
        before, after = self.iterations, self.iterations + done
        last_save = after // parameters.save_every_iterations * parameters.save_every_iterations
        saved = self.saved if last_save <= before else self.trained * math.exp(-pace * (last_save - before))
        return replace(self, trained=self.trained * math.exp(-pace * done), saved=saved, iterations=after)

    def session_over(self, parameters: SpotTraining) -> Drafter:
        """Training stopped: what was saved is published with the next weights, so it decodes from then on."""
        kept = self.trained if parameters.save_at_end else self.saved
        return replace(self, staleness=kept, trained=kept, saved=kept)


def training_iteration_s(
    drafter: ModelShape, gpu: Gpu, tokens_per_gpu: int = 1024, mfu: float = 0.3, pause_s: float = 0.02
) -> float:
    """Seconds of one training iteration, from its work: forward and backward of the drafter's layers and of the output head
    over `tokens_per_gpu`, at an assumed share of the data sheet's rate, and a pause (code). More GPUs work side by side.

    The code's iteration is 2 sequences of at most 512 tokens a GPU; hidden states of the target come from its inference phase.
    The head is frozen: its backward pass costs half, the gradient of its input only.
    """
    per_token = 6.0 * drafter.layers * drafter.layer_parameters + 4.0 * drafter.vocab * drafter.hidden
    return per_token * tokens_per_gpu / (mfu * gpu.bf16_flops) + pause_s
