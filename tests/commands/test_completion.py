"""What a shell completes behind simrl: commands, options, files, and the names of systems, methods, models and GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simrl.commands.completion import BY_NAME
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES

MAIN = "from simrl.commands.cli import main; main()"


def completed(words: str, folder: Path) -> list[str]:
    """Return what bash is offered for the last word."""
    asked = {
        "_SIMRL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    command = [sys.executable, "-c", MAIN]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | asked, capture_output=True, text=True, check=True
    )
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("simrl comp", ["compare"]),
        ("simrl compare --spec", ["--speculation"]),
        ("simrl compare my", ["my.parquet", "my.yaml", "my_folder/"]),
        ("simrl compare my.yaml --system areal,spl", ["areal,split"]),
        ("simrl compare my.yaml --speculation histo", ["histospec", "histospec_code"]),
        ("simrl sweep my.yaml --model qwen3-8", ["qwen3-8b"]),
        ("simrl advise my.yaml --gpu h10", ["h100", "h100-nvl", "h100-pcie"]),
        ("simrl systems show rhy", ["rhymerl"]),
    ],
)
def test_a_shell_completes_commands_options_files_and_names(
    words: str, offered: list[str], tmp_path: Path
) -> None:
    for name in ("my.yaml", "my.parquet", "my.png"):
        (tmp_path / name).touch()
    (tmp_path / "my_folder").mkdir()
    assert completed(words, tmp_path) == offered


def test_the_names_that_are_completed_are_all_that_there_are() -> None:
    for parameter, known in {
        "systems": RECIPES,
        "speculations": METHODS,
        "model": MODELS,
        "gpu": GPUS,
    }.items():
        assert BY_NAME[parameter]("") == list(known)


def test_a_completion_imports_nothing_heavy() -> None:
    code = "import sys; import simrl.commands.cli; print({'numpy', 'pandas', 'numba', 'simpy'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
