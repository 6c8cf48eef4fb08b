"""The pool of processes: work that a process can load, wherever it is defined, and work that it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.study.executors import Processes, each

SCRIPT = """
from typing import NamedTuple
from simrl.study.executors import Processes, each

class Task(NamedTuple):
    number: int

def doubled(task):
    return Task(2 * task.number)

if __name__ == "__main__":
    with Processes(2) as pool:
        print(sorted(made.number for _, made in each(doubled, [Task(1), Task(2), Task(3)], pool)))
"""


def test_functions_and_tasks_of_a_script_work_in_a_pool(tmp_path: Path):
    (tmp_path / "package").mkdir()
    for file in ("script.py", "package/__main__.py"):
        (tmp_path / file).write_text(SCRIPT)
    for words in (["script.py"], ["-m", "script"], ["-m", "package"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4, 6]\n", "")


@pytest.mark.parametrize(
    ("old", "new", "file", "reason"),
    [
        (
            "\ndef doubled",
            "\nif __name__ == '__main__':\n  def doubled",
            "script.py",
            "attribute 'doubled' on",
        ),
        (
            "",
            "",
            "__main__.py",
            "attribute 'doubled' on",
        ),  # of a folder: multiprocessing imports no such file
        ("\nclass", "\nif __name__ != '__main__': raise SystemExit(0)\nclass", "script.py", "(0)"),
    ],
)
def test_work_that_cannot_be_loaded_is_named_as_that_and_not_as_lack_of_memory(
    tmp_path: Path, old: str, new: str, file: str, reason: str
):
    (tmp_path / file).write_text(SCRIPT.replace(old, new, 1))
    words = ["."] if file == "__main__.py" else [file]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    line, *_ = (
        line for line in done.stderr.splitlines() if line.startswith("simrl.errors.InputError")
    )
    assert (
        "__main__.doubled cannot be loaded in a process of its own" in line and "memory" not in line
    )
    assert reason in line and "define it at the top of a module" in line


def test_work_that_has_no_place_in_a_module_is_refused_before_it_is_sent():
    def inner(number: int) -> int:
        return number

    with (
        Processes(1) as pool,
        pytest.raises(InputError, match=r"inner cannot be loaded .* top of a module") as raised,
    ):
        list(each(inner, [1, 2], pool))
    assert "\n" not in str(raised.value)


class Adder:
    """Work that is a callable object."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, number: int) -> int:
        return number + self.more


def test_a_callable_object_works_in_a_pool():
    with Processes(1) as pool:
        assert list(each(Adder(3), [1, 2], pool)) == [(0, 4), (1, 5)]
