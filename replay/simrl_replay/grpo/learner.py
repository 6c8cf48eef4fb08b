"""The learner: holds the policy and its optimizer in a process of its own, makes updates, and
writes policy versions.

Invariant: a version's folder is complete before its update is reported; its content (weights,
optimizer, number) is all that the next update depends on, with its batch and the versions that
generated it. Weights are loaded as safetensors, the optimizer with `weights_only`.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from simrl.errors import InputError, first_line
from simrl.files import write_whole_folder
from simrl_replay.grpo.config import RunConfig
from simrl_replay.grpo.policy import load_policy, save_policy
from simrl_replay.grpo.records import MANIFEST, RunFolder
from simrl_replay.grpo.update import Trajectory, make_optimizer, update
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


class Learner:
    """The policy, its optimizer and the version they are at, on one thread."""

    def __init__(self, config: RunConfig, folder: RunFolder, version: int) -> None:
        torch.set_num_threads(1)
        self._config, self._folder, self._version = config.update, folder, version
        self._model = load_policy(self._folder.model(self._version)).to(config.device)
        self._optimizer = make_optimizer(self._model, self._config)
        if self._version:  # the warmed-up policy has no optimizer
            self._optimizer.load_state_dict(
                _load(self._folder.version(self._version) / "optimizer.pt")
            )
        self._past: dict[int, dict[str, torch.Tensor]] = {}

    def update(self, command: Update) -> Updated:
        """Make an update and write its version."""
        if command.version != self._version:
            raise InputError(
                f"an update of version {command.version}; the learner is at {self._version}"
            )
        before = {
            name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()
        }
        started_s = time.monotonic()
        stats = update(
            self._model, self._optimizer, command.batch, self._version, self._past, self._config
        )
        trained_s = time.monotonic()
        self._past[self._version] = before
        self._past.pop(self._version - KEPT_WEIGHTS, None)
        self._version += 1
        with write_whole_folder(self._folder.version(self._version), MANIFEST) as temporary:
            save_policy(self._model, temporary / "model")
            torch.save(self._optimizer.state_dict(), temporary / "optimizer.pt")
        written_s = time.monotonic()
        known_s = min(started_s + stats.log_prob_s, trained_s)
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
