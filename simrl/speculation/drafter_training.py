"""TLT's spot training: which idle workers train the drafter, and how stale the drafter is (arXiv
2511.16665, §4.2; code fastrl).

Invariant: training never keeps a worker from its rollout: it takes idle workers only, and all of it
ends the moment the rollout ends. A drafter decodes with the weights that were published last;
training that was not saved is lost when it stops.

Values without a clock: `Coordinator` is the state of the workers, `Pace` how long an iteration and
a checkpoint take, `DrafterStaleness` how far the policy has moved since the drafter was trained, in
policy updates: an update adds one, training reduces it, in the shape of the paper's Fig. 15 (a dip
at each update, recovered within a few iterations). `ModelAcceptance.drift` turns it into hardness.

An iteration takes a batch from the buffer: of the responses that have finished in this rollout,
and with `data_buffer`, of the longer ones of the rollout before (one-step offset sampling; the
public code takes all of both). It samples at random, as the public code does, or takes the longest
ones of the rollout before first, as the paper has it (`sampling`).
The workers of a session share it. Without the buffer, a drafter learns nothing of responses longer
than those finished by then.

The buffer has the hidden states of the target's last layer in host memory. Those of a step before
one that trains are copied there in the inference phase (§4.1), by each GPU that computes log-probs,
before the update; an iteration copies the states of its tokens back. The engine hands out the
states of the responses of a rollout that trains, as the public code has it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from pydantic import Field

from simrl.validation import Model


class SpotTraining(Model):
    """The training of the drafter. The most important number, `recovery_iterations`, is read off
    Fig. 15, which has no scale for it ("within a few iterations"): assumed, like the time of an
    iteration."""

    adaptive: bool = Field(
        default=True,
        description="false: the drafter stays as it was at first (TLT Table 4, Target-Base)",
    )
    idle_workers: int = Field(
        default=1, ge=1, description="idle workers that start a session (code)"
    )
    join: bool = Field(
        default=True,
        description="workers that become idle later join the session (paper); false: only the first ones (code)",
    )
    every_updates: int = Field(
        default=10,
        ge=1,
        description="steps from one rollout with training to the next (paper §6.4 and code)",
    )
    activation_s: float | None = Field(
        default=None,
        ge=0,
        description="before the first iteration; null: weights and Adam's moments come from host memory",
    )
    iteration_s: float | None = Field(
        default=None,
        gt=0,
        description="one iteration; null derives it from the batch, the drafter and the workers",
    )
    batch_sequences: int = Field(default=8, ge=1, description="responses of an iteration (assumed)")
    packing: bool = Field(
        default=True,
        description="concatenate the responses of a batch (§4.2); false: pad them to its longest",
    )
    window_tokens: int | None = Field(
        default=None,
        ge=1,
        description="last tokens of a response that an iteration trains on; null: all (paper); the code has 512",
    )
    efficiency: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="MFU: share of the GPUs' bf16 rate that training reaches (assumed)",
    )
    data_buffer: bool = Field(
        default=True,
        description="train on long responses of the rollout before, too (§4.2, DataBuffer); they need log-probs, whose phase "
        "collects their states",
    )
    sampling: Literal["random", "longest_first"] = Field(
        default="random",
        description="random: of the buffer at random, the default, as in the public code; longest_first: in turn, the longest "
        "of the rollout before first, as in §4.2",
    )
    most_iterations: int = Field(default=200, ge=1, description="of one session (code)")
    recovery_iterations: float = Field(
        default=3.0,
        gt=0,
        description="iterations after which 1/e of the staleness is left (assumed)",
    )
    scaling: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="where iteration_s is given, an iteration of w workers counts as w ** scaling; 0: more workers do not help",
    )
    save_every_iterations: int = Field(
        default=100, ge=1, description="iterations from checkpoint to checkpoint (code)"
    )
    asynchronous_saves: bool = Field(
        default=True,
        description="training waits for the copy to host memory only; false: until it is stored (§4.2)",
    )
    selective_saves: bool = Field(
        default=True, description="checkpoints without the frozen embedding and output head (§4.2)"
    )
    storage_bytes_per_s: float = Field(
        default=2e9, gt=0, description="rate at which a checkpoint is stored (assumed)"
    )
    save_at_end: bool = Field(
        default=True,
        description="a session that is stopped saves what it has (code); false: it falls back to the last checkpoint",
    )


class WorkerState(Enum):
    """A worker in TLT §4.2: serving the rollout; done, its memory released; training the
    drafter."""

    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"


@dataclass(frozen=True)
class Coordinator:
    """The state of each worker. `train`: this step's rollout trains at all. Each change returns the
    next coordinator and the workers whose training starts with it; `training` has all workers that
    train, `idle` the idle ones, in order."""

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
        """Make a busy worker idle. A session begins once enough workers are idle, with the number
        that it needs (the first by number, as in the code) or, where workers may join, with all of
        them; a worker that becomes idle later joins at once or not at all."""
        return self._with([worker], WorkerState.IDLE)._promoted()

    def got_busy(self, worker: int) -> Coordinator:
        """Make an idle or training worker serve again; a session with other workers goes on without
        it."""
        return self._with([worker], WorkerState.BUSY)

    def rollout_over(self) -> tuple[Coordinator, tuple[int, ...]]:
        """End the rollout: all training stops at once. Also return the workers that trained; they
        are idle then."""
        return replace(self._with(self.training, WorkerState.IDLE), train=False), self.training

    def rollout_begins(self, step: int) -> tuple[Coordinator, tuple[int, ...]]:
        """Begin the rollout of step 0, 1, … (the one before is over) with the workers as they are:
        if it trains, idle workers may start."""
        train = self.parameters.adaptive and step % self.parameters.every_updates == 0
        return replace(self, train=train)._promoted()

    def _in(self, state: WorkerState) -> tuple[int, ...]:
        return tuple(i for i, worker in enumerate(self.states) if worker is state)

    def _with(self, workers: Collection[int], state: WorkerState) -> Coordinator:
        return replace(
            self, states=tuple(state if i in workers else old for i, old in enumerate(self.states))
        )

    def _promoted(self) -> tuple[Coordinator, tuple[int, ...]]:
        started, p = self.idle, self.parameters
        if not p.join:
            started = () if self.training else started[: p.idle_workers]
        if not self.train or (not self.training and len(self.idle) < p.idle_workers):
            started = ()
        return self._with(started, WorkerState.TRAINING), started


@dataclass(frozen=True)
class DrafterStaleness:
    """Policy updates that each copy of the drafter is behind: `staleness` of the published one,
    which decodes, `trained` of the weights in training, `saved` of their last checkpoint. In
    responses longer than `covered_tokens`, the published one is `beyond` behind."""

    staleness: float = 0.0
    trained: float = 0.0
    saved: float = 0.0
    iterations: int = 0
    covered_tokens: float = math.inf
    beyond: float = 0.0

    def policy_updated(self) -> DrafterStaleness:
        """Count a policy update: every copy of the drafter is one further behind."""
        staleness, trained, saved, beyond = (
            n + 1 for n in (self.staleness, self.trained, self.saved, self.beyond)
        )
        return replace(self, staleness=staleness, trained=trained, saved=saved, beyond=beyond)

    def session_started(self) -> DrafterStaleness:
        """Start a session from the published weights, with no iteration done yet."""
        return replace(self, trained=self.staleness, saved=self.staleness, iterations=0)

    def iterated(self, workers: int, parameters: SpotTraining) -> DrafterStaleness:
        """Train for an iteration."""
        gain = workers**parameters.scaling if parameters.iteration_s else 1.0
        trained = self.trained * math.exp(-gain / parameters.recovery_iterations)
        return replace(self, trained=trained, iterations=self.iterations + 1)

    def session_over(self, parameters: SpotTraining, longest_tokens: int = 0) -> DrafterStaleness:
        """End the session: the saved weights are published with the next policy weights, and decode
        from then on. Without a data buffer, they know responses of up to `longest_tokens`."""
        kept = self.trained if parameters.save_at_end else self.saved
        over = replace(self, staleness=kept, trained=kept, saved=kept)
        if parameters.data_buffer:
            return replace(over, covered_tokens=math.inf, beyond=kept)
        return replace(over, covered_tokens=longest_tokens) if self.iterations else over


@dataclass(frozen=True)
class Pace:
    """The speed of training: seconds of one worker for a token, for each pair of a token and the
    length of its response (attention), and to copy the hidden states of a token back from the host;
    bytes of a token in the buffer, of a checkpoint's trained and frozen part, and the rate at which
    a node copies a checkpoint to host memory."""

    token_s: float = 0.0
    pair_s: float = 0.0
    states_s: float = 0.0
    buffered_bytes: float = 0.0
    trained_bytes: float = 0.0
    frozen_bytes: float = 0.0
    host_bytes_per_s: float = math.inf

    def iteration_s(self, tokens: Sequence[int], workers: int, parameters: SpotTraining) -> float:
        """Return the seconds of an iteration over responses of these lengths (what it trains on of
        each): packed, or padded to the longest, which computes padding like tokens."""
        p = parameters
        if p.iteration_s is not None:
            return p.iteration_s
        computed = tokens if p.packing else [max(tokens)] * len(tokens)
        seconds = sum(n * (self.token_s + n * self.pair_s) for n in computed)
        return (seconds + sum(tokens) * self.states_s) / workers

    def activation_s(self, parameters: SpotTraining) -> float:
        """Return the seconds before the first iteration of a session."""
        copied_s = (self.trained_bytes + self.frozen_bytes) / self.host_bytes_per_s
        return copied_s if parameters.activation_s is None else parameters.activation_s

    def save_s(self, parameters: SpotTraining) -> tuple[float, float]:
        """Return the seconds for which training waits for a checkpoint, and the seconds until it is
        stored."""
        saved_bytes = self.trained_bytes + (
            0.0 if parameters.selective_saves else self.frozen_bytes
        )
        stored_s, copied_s = (
            saved_bytes / parameters.storage_bytes_per_s,
            saved_bytes / self.host_bytes_per_s,
        )
        return (
            (copied_s, copied_s + stored_s)
            if parameters.asynchronous_saves
            else (stored_s, stored_s)
        )
