"""The runs that are shipped."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from replay.grpo.config import read_config

pytestmark = pytest.mark.vllm  # what it needs comes with it


def test_the_shipped_runs_differ_in_their_schedule_alone_and_begin_with_one_policy() -> None:
    files = sorted((Path(__file__).parents[1] / "experiments" / "grpo").glob("*.yaml"))
    configs = [read_config(file) for file in files]
    assert [config.name for config in configs] == [file.stem for file in files]
    assert sorted(config.system.name for config in configs) == ["areal", "one_step_off", "split"]
    rest = [config.model_dump(exclude={"name", "system"}) for config in configs]
    assert rest[0] == rest[1] == rest[2]
