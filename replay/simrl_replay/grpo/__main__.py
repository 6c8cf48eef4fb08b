"""`python -m simrl_replay.grpo CONFIG...`: recorded runs, one after another."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from simrl.errors import InputError, StoppedError
from simrl.interrupts import ctrl_c_once


def main(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG... [KEY=VALUE...]",
            help="files of runs (YAML), made in this order; what to change",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="a folder: each run gets one in it, with its name"),
    ] = Path("results/grpo"),
) -> None:
    """Train a small model with GRPO on tasks with a reward function, and record everything.

    Rollouts run on vLLM engines under simrl's own schedules. A stopped run continues from its last update when it is
    started again; a finished run is left unchanged.

    Example:  python -m simrl_replay.grpo experiments/grpo/sync.yaml

    Example:  python -m simrl_replay.grpo experiments/grpo/*.yaml seed=1 update.learning_rate=1e-4 -o results/grpo-seed-1
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        _make(configs, output)
    except InputError as error:
        raise _exit(str(error)) from None
    except StoppedError as error:
        raise _exit(f"{error}; the same command goes on from the last update", 1) from None
    except KeyboardInterrupt:
        raise _exit("stopped; the same command goes on from the last update", 1) from None


def _make(configs: list[str], output: Path) -> None:
    """Make the runs of these files."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed here; install vLLM (docs/replay.md, Install), which brings it"
        ) from None
    from simrl_replay.grpo.config import WARM_UPS, read_config
    from simrl_replay.grpo.records import RunFolder
    from simrl_replay.grpo.run import run

    def say(line: str) -> None:
        typer.echo(line, err=True)

    overrides = [word for word in configs if "=" in word and not Path(word).exists()]
    found = [read_config(Path(word), overrides) for word in configs if word not in overrides]
    if not found:
        raise InputError("no run is named; name a file, such as experiments/grpo/sync.yaml")
    names = [config.name for config in found]
    if len(set(names)) < len(names):
        raise InputError(
            f"two runs are called {max(names, key=names.count)}; give each another name"
        )
    for config in found:
        with ctrl_c_once():
            run(config, RunFolder(output / config.name), output / WARM_UPS, say)


def _exit(message: str, code: int = 2) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
