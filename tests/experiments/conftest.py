"""Fixtures of the tests of experiments."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.reproduce.__main__ import app
from tests.command_line import CommandLine


@pytest.fixture
def reproduce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """`python -m experiments.reproduce` in an empty folder."""
    command_line = CommandLine(tmp_path, capsys, monkeypatch, "experiments.reproduce", app)
    yield command_line
    command_line.end()
