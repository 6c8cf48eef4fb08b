"""Shared by the tests of launches: a folder with files, read as a launch, within a time."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from simrl.launch.settings import Launch, read_launch
from simrl.launch.translate import Translation, translate
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import prepare
from simrl.study import launch as written

VERL = "python3 -m verl.trainer.main_ppo"
COMPLETE = (
    f"{VERL} actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.train_batch_size=64"
    " actor_rollout_ref.rollout.n=4 data.max_response_length=1024 data.max_prompt_length=512"
    " trainer.nnodes=1 trainer.n_gpus_per_node=8"
)
LONGEST_S = 10.0  # what is read or refused in two seconds, on a machine that does more


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def read(folder: Path, text: str, name: str = "run.sh", **beside: str) -> Launch:
    """Return the launch of a text, with files beside it."""
    write(folder, {name: text, **beside})
    return read_launch(folder / name)


def settings(folder: Path, text: str, name: str = "run.sh", **beside: str) -> dict[str, Any]:
    return read(folder, text, name, **beside).settings


def translation(folder: Path, text: str, name: str = "run.sh", **given: Any) -> Translation:
    return translate(read(folder, text, name), given)


def launched(folder: Path, scenario: dict[str, Any]) -> written.Launch | str:
    """Return the settings with which advise would launch a scenario."""
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario))
    (loaded,) = load_scenarios(file)
    return written.launch(prepare(loaded))


@contextmanager
def within(most_s: float = LONGEST_S, wall_s: int = 20) -> Iterator[None]:
    """Fail after seconds of the processor, of this process and of those it starts; and end what
    waits for ever after `wall_s`."""

    def end(*_: Any) -> None:
        pytest.fail(f"no end within {wall_s} s")  # which no code under test takes for its own

    before, handler = os.times(), signal.signal(signal.SIGALRM, end)
    signal.alarm(wall_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    used = sum(os.times()[:4]) - sum(before[:4])
    assert used < most_s, f"{used:.1f} s of the processor"
