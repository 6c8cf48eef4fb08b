"""The spot trainer in a simulation: which workers train the drafter when, and how far the decoding drafter is behind (TLT §4.2;
the rules, without a clock, are `simrl.speculation.drafter_training`).

Invariant: a worker trains only from the moment that it has nothing to serve to the moment that something else needs its GPUs,
so training delays nothing. Policy weights of version v always come with the drafter as it was saved when v was made, on every
worker and at any time: nothing changes inside a rollout, and training in one rollout is first used in the next (as in the
public code, which pushes the drafter's weights into the engines after the policy's).

Nothing to serve means no sample at all, also none that waits for its environment: TLT's workers train when their KV memory is
released. Where rollout and training share GPUs, a session ends when the last worker has nothing to serve; GPUs that the trainer
takes are unavailable until their worker has loaded weights. On separate GPUs, which TLT does not describe, idle workers train
while others serve or wait, and every policy update ends the session, saves, and begins another if its step trains.
"""

from __future__ import annotations

from collections.abc import Sequence

from simrl.runtime.recorder import Recorder
from simrl.speculation.drafter_training import Coordinator, DrafterStaleness, SpotTraining, WorkerState

KIND = "train_drafter"  # of its spans


class SpotTrainer:
    """Follows workers and the trainer, event by event in order of time, and knows how stale each drafter is."""

    def __init__(
        self, parameters: SpotTraining, recorder: Recorder, workers: int, colocated: bool, first_version: int = 0
    ) -> None:
        self._parameters = parameters
        self._recorder = recorder
        self._colocated = colocated
        self._first_version = first_version  # with it comes the first drafter
        self._coordinator = Coordinator(parameters, (WorkerState.IDLE,) * workers, train=False)
        self._serving: set[int] = set()
        self._rolling = False
        self._drafter = DrafterStaleness()
        self.behind = [0.0]  # by policy version: the updates that the drafter saved with its weights is behind them
        self._since_s: dict[int, float] = {}  # workers in the session
        self._counted_s = 0.0  # to here its iterations are counted
        self._over_s = 0.0  # then it has had all it may have
        self._look(0.0)

    def serves(self, worker: int, now_s: float) -> None:
        """Record that a worker has something to serve."""
        self._serving.add(worker)
        self._take(worker, now_s)
        self._look(now_s)

    def idle(self, worker: int, now_s: float) -> None:
        """Record that a worker has nothing to serve, and nothing else uses its GPUs."""
        self._serving.discard(worker)
        self._look(now_s)
        if self._coordinator.states[worker] is WorkerState.BUSY:
            self._count(now_s)
            self._coordinator, started = self._coordinator.fell_idle(worker)
            self._start(started, now_s)

    def occupied(self, lanes: Sequence[int], now_s: float) -> None:
        """Record that GPUs are used for something else: a weight load, the trainer, a fault. Lanes without a worker are
        ignored."""
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
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Begin or end the rollout if workers have, or no longer have, something to serve."""
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
            p = self._parameters
            self._drafter = self._drafter.session_started()
            self._counted_s = now_s + p.activation_s
            self._over_s = self._counted_s + p.most_iterations * p.iteration_s
        self._since_s.update(dict.fromkeys(started, now_s))

    def _leave(self, stopped: Sequence[int], now_s: float) -> None:
        for worker in stopped:
            since_s, until_s = self._since_s.pop(worker), min(now_s, self._over_s)
            if until_s > since_s:
                self._recorder.span(worker, KIND, since_s, until_s, len(self.behind) - 1)
        if stopped and not self._since_s:
            self._drafter = self._drafter.session_over(self._parameters)

    def _count(self, now_s: float) -> None:
        """Count the session's iterations that have ended, each with the workers at its end."""
        iteration_s = self._parameters.iteration_s
        done = int((now_s - self._counted_s) / iteration_s + 1e-9)
        if self._since_s and done > 0:
            self._drafter = self._drafter.trained_for(done * iteration_s, len(self._since_s), self._parameters)
            self._counted_s += done * iteration_s
