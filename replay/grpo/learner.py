"""The learner: holds the policy and its optimizer in a process of its own, makes updates, writes the versions that come of
them.

Invariant: a version's folder is there, whole, before its update is told; what it holds (weights, optimizer, its number) is all
that the next update depends on besides its batch and the versions that drew it. Weights are loaded as safetensors, the
optimizer with `weights_only`.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from replay.grpo.config import RunConfig
from replay.grpo.policy import TokenIds, load_policy, save_policy
from replay.grpo.records import MANIFEST, RunFolder
from replay.grpo.update import Trajectory, make_optimizer, update
from replay.host import Channel, Close, Failed, Ready
from simrl.errors import InputError, StoppedError, first_line
from simrl.files import write_whole_folder

KEPT_WEIGHTS = 16  # versions, beside the current one, that tokens of a batch may be of: AReaL waits for no straggler


class Answered(NamedTuple):
    """A response as it is handed to the learner: the segments are (policy version, tokens), in order."""

    group: tuple[int, int]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    reward: float
    segments: tuple[tuple[int, int], ...]


class Update(NamedTuple):
    """Makes the version after `version` of it."""

    version: int
    batch: tuple[Answered, ...]


class Updated(NamedTuple):
    """The version after `version` is in its folder. Phases are (kind, start, end), by `time.monotonic()`; `stats` are those of
    `UpdateStats`."""

    version: int
    phases: tuple[tuple[str, float, float], ...]
    stats: dict[str, float]


@dataclass(frozen=True)
class LearnerSettings:
    """What the process is started with: the run, its folder, and the version it goes on from."""

    config: RunConfig
    folder: RunFolder
    version: int
    threads: int = 1


class Learner:
    """See the top of the module."""

    def __init__(self, settings: LearnerSettings) -> None:
        torch.set_num_threads(settings.threads)
        self._config = settings.config.update
        self._folder = settings.folder
        self._version = settings.version
        self._model = load_policy(self._folder.model(self._version)).to(settings.config.device)
        self._optimizer = make_optimizer(self._model, self._config)
        if self._version:  # the warmed-up policy has none
            self._optimizer.load_state_dict(_load(self._folder.version(self._version) / "optimizer.pt"))
        self._past: dict[int, dict[str, torch.Tensor]] = {}

    def update(self, command: Update) -> Updated:
        """Makes an update, and writes the version that it gives."""
        if command.version != self._version:
            raise InputError(f"an update of version {command.version}; the learner is at {self._version}")
        groups = {group: i for i, group in enumerate(dict.fromkeys(answered.group for answered in command.batch))}
        batch = [
            Trajectory(TokenIds(a.prompt_ids, a.token_ids), a.reward, groups[a.group], a.segments)
            for a in command.batch
        ]
        before = {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}
        started_s = time.monotonic()
        stats = update(self._model, self._optimizer, batch, self._version, self._past, self._config)
        trained_s = time.monotonic()
        self._past[self._version] = before
        self._past.pop(self._version - KEPT_WEIGHTS, None)
        self._version += 1
        self._write()
        written_s = time.monotonic()
        known_s = min(started_s + stats.log_prob_s, trained_s)
        phases = (
            ("log_prob", started_s, known_s), ("train", known_s, trained_s), ("publish", trained_s, written_s)
        )  # fmt: skip
        return Updated(command.version, phases, asdict(stats))

    def _write(self) -> None:
        with write_whole_folder(self._folder.version(self._version), MANIFEST) as temporary:
            save_policy(self._model, temporary / "model")
            torch.save(self._optimizer.state_dict(), temporary / "optimizer.pt")


def serve_learner(channel: Channel, settings: LearnerSettings) -> None:
    """The life of the learner's process. What goes wrong is sent before it ends."""
    try:
        learner = Learner(settings)
        channel.send([Ready(os.getpid(), torch.__version__, 0, 0, time.monotonic())])
        while True:
            for command in channel.recv():
                if isinstance(command, Close):
                    return
                channel.send([learner.update(command)])  # type: ignore[arg-type, list-item]
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # whoever controlled it is gone
    except (InputError, StoppedError) as error:
        channel.send([Failed(str(error), "")])
    except BaseException as error:
        traceback.print_exc()  # to its log
        channel.send([Failed(first_line(error), traceback.format_exc())])
        raise SystemExit(1) from error


def _load(file: Any) -> dict[str, Any]:
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # what torch raises for a broken file is of many kinds
        raise InputError(
            f"{file}: no state of an optimizer ({first_line(error)}); begin anew in another --output"
        ) from error
