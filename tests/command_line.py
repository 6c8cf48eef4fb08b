"""The command line as tests use it: in this process where that is enough, as a process of its own where it is not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from simrl.commands import cli

ROOT = Path(__file__).parents[1]
cli.make_app()  # here, before a test adds commands of packages

SCENARIO = """\
name: tiny
seed: 3
steps: 2
warmup_steps: 1
model: qwen3-0.6b
cluster: {gpu: h100, gpus: 4, tp: 1}
workload:
  synthetic: {steps: 2, prompts_per_step: 4, group: 2, cap_tokens: 200, mean_tokens: 60, sigma: 0.8, prompt_tokens: 20}
profile: {roofline: {}}
systems: [verl_colocated, {name: areal, eta: 2}]
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files too: bytes by path, None for folders."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


class CommandLine:
    """`simrl`, or the `app` of another module, in a folder of its own that holds a scenario, scenario.yaml."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        module: str = "simrl.commands.cli",
        app: typer.Typer | None = None,
    ) -> None:
        self.folder, self._module, self._app = folder, module, app
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._started: list[subprocess.Popen[str]] = []
        (folder / "scenario.yaml").write_text(SCENARIO)
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str) -> Ended:
        """Runs a command in this process."""
        self._monkeypatch.setattr(sys, "argv", ["simrl", *arguments])
        self._capsys.readouterr()
        code: Any = 0
        with _signals_kept():
            try:
                cli.main(self._app)
            except SystemExit as ending:
                code = ending.code
        return Ended(code, *self._capsys.readouterr())

    def refuses(self, *arguments: str) -> str:
        """The one line on stderr with which a command refuses bad input: exit code 2, no other output, no file touched."""
        before = contents(self.folder)
        code, out, err = self(*arguments)
        assert (code, out) == (2, ""), err
        assert err.startswith("simrl: ") and err.count("\n") == 1, err
        assert contents(self.folder) == before
        return err

    def start(self, *arguments: str | bytes, **popen: Any) -> "subprocess.Popen[str]":
        """Starts a command in a process (and group) of its own, which hears Ctrl-C."""
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, *arguments],
            cwd=self.folder,
            text=True,
            start_new_session=True,
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "env": environment(),
                "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                **popen,
            },
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kills what a failed test left running: nothing else would end it, since it is no member of this process's group."""
        for process in self._started:
            with suppress(ProcessLookupError):  # nothing of its group is left, as it should be
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """`main` is the last thing a process does, and leaves its signal handlers as they are."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(**more: str) -> dict[str, str]:
    """For a process that runs this checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'replay'}", **more}
