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
    (tmp_path / "script.py").write_text(SCRIPT)
    for words in (["script.py"], ["-m", "script"]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4, 6]\n", "")


def test_work_that_cannot_be_loaded_is_named_as_that_and_not_as_lack_of_memory(tmp_path: Path):
    hidden = SCRIPT.replace("\ndef doubled", "\nif __name__ == '__main__':\n  def doubled")
    (tmp_path / "script.py").write_text(hidden)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    line, *_ = (line for line in done.stderr.splitlines() if line.startswith("simrl.errors.InputError"))
    assert "__main__.doubled cannot be loaded in a process of its own" in line and "memory" not in line
    assert "define it at the top of a module" in line


def test_work_that_has_no_place_in_a_module_is_refused_before_it_is_sent():
    def inner(number: int) -> int:
        return number

    with Processes(1) as pool, pytest.raises(InputError, match=r"inner cannot be loaded .* top of a module") as raised:
        list(each(inner, [1, 2], pool))
    assert "\n" not in str(raised.value)
