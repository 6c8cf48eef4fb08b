"""The learner of a replay: trains a policy phase by phase, as a schedule commands it, in a process of
its own.

Invariant: phases are carried out in the order of their commands; a version's folder is complete or
absent. The seconds of a phase are reported when its device has finished.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from simrl.errors import first_line
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl_replay.grpo.efficiency import Efficiency, measure_efficiency
from simrl_replay.grpo.learner import InTraining
from simrl_replay.grpo.policy import load_policy, save_policy
from simrl_replay.grpo.records import KEPT_VERSIONS
from simrl_replay.grpo.update import Trajectory, UpdateConfig, make_optimizer
from simrl_replay.host import Channel, Ready, answer_each, errors_sent


@dataclass(frozen=True)
class Trainee:
    """The policy to train: the folder of version 0, the folder for the next versions, and how.
    `gpu` is simrl's name of what it trains on."""

    model: Path
    versions: Path
    update: UpdateConfig
    device: str
    dtype: str
    gpu: str
    threads: int = 1

    def version(self, number: int) -> Path:
        """Return the folder of a policy version."""
        return self.versions / f"{number:04d}" if number else self.model


class LogProbs(NamedTuple):
    """Command to compute the log-probs of a batch, or of a part of it, for the update of
    `version`."""

    version: int
    batch: tuple[Trajectory, ...]


class Train(NamedTuple):
    """Command to make the optimizer's steps on what was scored last."""

    minibatches: int


class Publish(NamedTuple):
    """Command to write the version after the one in training to its folder."""


class Measure(NamedTuple):
    """Command to measure updates of these batches, the first of which warms up. The policy is at
    version 0 afterwards."""

    batches: tuple[tuple[Trajectory, ...], ...]


class Restart(NamedTuple):
    """Command to go back to version 0, without a state of the optimizer; it is also the answer."""


class Done(NamedTuple):
    """Report that a phase has ended. Times are `time.monotonic()`; `figures` are the ages of the
    tokens after `LogProbs`, the fields of `UpdateStats` after `Train`."""

    started_s: float
    ended_s: float
    figures: dict[str, float]


class PhaseLearner:
    """A policy in training and its folders."""

    def __init__(self, trainee: Trainee) -> None:
        torch.set_num_threads(trainee.threads)
        self._trainee = trainee
        self._restart()

    def _restart(self) -> None:
        of = self._trainee
        # An engine's "auto" is the model's own type, which is bfloat16 on GPUs.
        dtype = torch.float32 if of.dtype == "float32" else torch.bfloat16
        model = load_policy(of.model, dtype).to(of.device)
        if of.device == "cuda":  # no layer draws random numbers
            model.gradient_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        self._policy = InTraining(model.train(), of.update)

    def carry_out(self, command: LogProbs | Train | Publish | Measure | Restart) -> Any:
        """Carry out a command, and return its report."""
        started_s, figures = time.monotonic(), {}
        match command:
            case LogProbs(version, batch):
                self._policy.score(version, batch)
                ages = [(version - v, n) for t in batch for v, n in t.segments if n]
                tokens = sum(n for _, n in ages)
                figures = {
                    "tokens": tokens,
                    "off_policyness_mean": sum(age * n for age, n in ages) / max(tokens, 1),
                    "off_policyness_max": max((age for age, _ in ages), default=0),
                }
            case Train(minibatches):
                figures = asdict(self._policy.train(minibatches))
            case Publish():
                version = self._policy.version + 1
                save_policy(self._policy.model, self._trainee.version(version))
                if version > KEPT_VERSIONS:
                    shutil.rmtree(
                        self._trainee.version(version - KEPT_VERSIONS), ignore_errors=True
                    )
            case Measure(batches):
                return self._measured(batches)
            case Restart():
                shutil.rmtree(self._trainee.versions, ignore_errors=True)
                self._restart()
                return command
        return Done(started_s, time.monotonic(), figures)

    def _measured(self, batches: tuple[tuple[Trajectory, ...], ...]) -> Efficiency:
        of, model = self._trainee, self._policy.model
        efficiency = measure_efficiency(
            model,
            make_optimizer(model, of.update),
            of.update,
            model_shape(of.model / "config.json"),
            gpu(of.gpu),
            batches,
            lambda: save_policy(model, of.versions / "measured"),
        )
        self._restart()
        return efficiency


def serve_phases(channel: Channel, trainee: Trainee) -> None:
    """Run the learner's process. An error is sent before the process ends."""
    with errors_sent(channel, first_line):
        learner = PhaseLearner(trainee)
        channel.send([Ready(os.getpid(), torch.__version__, 0, 0, time.monotonic())])
        answer_each(channel, learner.carry_out)
