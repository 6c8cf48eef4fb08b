"""The learner: holds the policy and its optimizer in a process of its own, makes updates, and
writes policy versions.

Invariant: a version's folder is complete before its update is reported; its content (weights,
optimizer, number) is all that the next update depends on, with its batch and the versions that
generated it. Weights are loaded as safetensors, the optimizer with `weights_only`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from simrl.errors import InputError, first_line
from simrl.files import write_whole_folder
from simrl_replay.grpo.config import RunConfig
from simrl_replay.grpo.policy import load_policy, save_policy
from simrl_replay.grpo.records import MANIFEST, RunFolder
from simrl_replay.grpo.update import (
    Trajectory,
    UpdateConfig,
    UpdateStats,
    WithLogProbs,
    make_optimizer,
    score,
    train,
)
from simrl_replay.host import Channel, Ready, answer_each, errors_sent

# past versions that may have generated tokens of a batch: AReaL has no bound on stragglers
KEPT_WEIGHTS = 16


class Update(NamedTuple):
    """Command to make the version after `version`."""

    version: int
    batch: tuple[Trajectory, ...]


class Updated(NamedTuple):
    """Report that the version after `version` is in its folder. Phases are (kind, start, end), by
    `time.monotonic()`; `stats` are the fields of `UpdateStats`."""

    version: int
    phases: tuple[tuple[str, float, float], ...]
    stats: dict[str, float]


class InTraining:
    """A policy in training: model, optimizer, the version they are at, and the weights of versions
    before it."""

    def __init__(self, model: Any, config: UpdateConfig, version: int = 0) -> None:
        self.model, self.version = model, version
        self.optimizer = make_optimizer(model, config)
        self._config = config
        self._past: dict[int, dict[str, torch.Tensor]] = {}
        self._scored: WithLogProbs | None = None
        self._stepped = False  # since `version`: the model is at none

    def score(self, version: int, batch: Sequence[Trajectory]) -> None:
        """Compute log-probs of a batch, or of a further part of it, for the update of `version`.
        Raise `InputError` unless the version is the present one, or the next after a step."""
        if version != self.version or not self._past:
            if version != self.version + self._stepped:
                raise InputError(
                    f"an update of version {version}; the learner is at {self.version}"
                )
            self.version, self._stepped = version, False
            state = self.model.state_dict()
            self._past[version] = {name: each.detach().clone() for name, each in state.items()}
            self._past.pop(version - KEPT_WEIGHTS, None)
        at = None if self._stepped else version
        self._scored = score(self.model, batch, at, self._past, self._config)

    def train(self, minibatches: int | None = None) -> UpdateStats:
        """Make the optimizer's steps on the batch scored last, in this number of mini-batches (None: the
        configuration's)."""
        assert self._scored is not None
        config, scored = self._config, self._scored
        if minibatches is not None:
            config = config.model_copy(update={"minibatches": minibatches})
        self._scored, self._stepped = None, True
        return train(self.model, self.optimizer, scored, self.version, config)


class Learner:
    """The policy in training of a recorded run, on one thread, and its folders."""

    def __init__(self, config: RunConfig, folder: RunFolder, version: int) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        model = load_policy(folder.model(version)).to(config.device)
        self._policy = InTraining(model, config.update, version)
        if version:  # the warmed-up policy has no optimizer
            self._policy.optimizer.load_state_dict(_load(folder.version(version) / "optimizer.pt"))

    def update(self, command: Update) -> Updated:
        """Make an update and write its version."""
        started_s = time.monotonic()
        self._policy.score(command.version, command.batch)
        known_s = time.monotonic()
        stats = replace(self._policy.train(), log_prob_s=known_s - started_s)
        trained_s = time.monotonic()
        with write_whole_folder(self._folder.version(command.version + 1), MANIFEST) as temporary:
            save_policy(self._policy.model, temporary / "model")
            torch.save(self._policy.optimizer.state_dict(), temporary / "optimizer.pt")
        written_s = time.monotonic()
        phases = (
            ("log_prob", started_s, known_s), ("train", known_s, trained_s), ("publish", trained_s, written_s)
        )  # fmt: skip
        return Updated(command.version, phases, asdict(stats))


def serve_learner(channel: Channel, config: RunConfig, folder: RunFolder, version: int) -> None:
    """Run the learner's process from a version on. An error is sent before the process ends."""
    with errors_sent(channel, first_line):
        learner = Learner(config, folder, version)
        channel.send([Ready(os.getpid(), torch.__version__, 0, 0, time.monotonic())])
        answer_each(channel, learner.update)


def _load(file: Any) -> dict[str, Any]:
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a broken file
        raise InputError(
            f"{file}: no state of an optimizer ({first_line(error)}); begin anew in another --output"
        ) from error
