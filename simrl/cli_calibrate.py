"""`simrl calibrate` and `simrl whatif`: a real run's log in, the few numbers that make the simulator that run out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

NEEDS = "model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1"

RunLog = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_LOG", help="a metrics log: verl's console log or file logger, TRL's history, slime's console log"
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help=f"how the run was started, as in a scenario: {NEEDS} …"),
]
Launch = Annotated[
    Path | None, typer.Option(help="the same as a file: a scenario; its name, steps and workload are the log's instead")
]
Window = Annotated[str, typer.Option(help="the steps to fit, FIRST-LAST; all others are held out")]
Group = Annotated[int, typer.Option(min=1, help="responses a prompt, of which no log tells")]
Samples = Annotated[int | None, typer.Option(min=1, help="responses a step, where the log does not say")]
PromptTokens = Annotated[float | None, typer.Option(min=1, help="mean length of a prompt, where the log does not say")]
Cap = Annotated[
    int | None, typer.Option("--cap-tokens", min=1, help="largest response of the run; else the longest logged")
]
Format = Annotated[str | None, typer.Option("--format", help="verl, trl or slime; else the file tells")]
Recorded = Annotated[
    Path | None, typer.Option("--trace", help="the run's own lengths (simrl trace import …), in place of made ones")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="where the files go")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)")]


def calibrate(
    run_log: RunLog,
    settings: Settings = None,
    launch: Launch = None,
    window: Window = "1-20",
    group: Group = 1,
    samples: Samples = None,
    prompt_tokens: PromptTokens = None,
    cap_tokens: Cap = None,
    log_format: Format = None,
    trace: Recorded = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Fit a few named corrections to some steps of a real run's log, and report the error on the others."""
    from simrl.calibration_table import print_calibration
    from simrl.run_log import calibrated, run_name

    folder = output or Path("results") / f"{run_name(run_log)}-calibrated"
    steps = _window(window)
    found = calibrated(
        run_log, settings or [], launch, steps, group, samples, prompt_tokens, cap_tokens, log_format, trace, folder
    )
    if as_json:
        print(json.dumps({**found.as_json(), "scenario": str(folder / "calibrated.yaml")}, indent=1))
        return
    print_calibration(found, _console())
    print(
        f"\nWritten to {folder}: calibrated.yaml, the run as a scenario (simrl compare {folder / 'calibrated.yaml'}), "
        "its lengths, calibration.json"
    )


def whatif(
    run_log: RunLog,
    settings: Settings = None,
    system: Annotated[
        list[str] | None, typer.Option(help="a system to try, rhymerl or {name: areal, eta: 4}; may be repeated")
    ] = None,
    launch: Launch = None,
    window: Window = "1-20",
    group: Group = 1,
    samples: Samples = None,
    prompt_tokens: PromptTokens = None,
    cap_tokens: Cap = None,
    log_format: Format = None,
    trace: Recorded = None,
    output: Output = None,
    jobs: Annotated[int, typer.Option(min=1, help="simulations at the same time")] = os.cpu_count() or 1,
    as_json: AsJson = False,
) -> None:
    """What a real run would have taken under another system: calibrates on its log, simulates its own steps under both."""
    from simrl.calibration_table import print_calibration
    from simrl.comparison import compare_scenarios
    from simrl.run_log import CALIBRATED, alternatives, calibrated, check_system, run_name
    from simrl.table import print_comparison

    if not system:
        raise InputError("whatif: no --system; name one to try, such as --system rhymerl (simrl systems lists them)")
    systems = [_system(text) for text in system]
    for each in systems:  # before minutes go into a calibration
        check_system(each)
    folder = output or Path("results") / f"{run_name(run_log)}-whatif"
    own = folder.with_name(f"{folder.name}-run")
    steps = _window(window)
    found = calibrated(
        run_log, settings or [], launch, steps, group, samples, prompt_tokens, cap_tokens, log_format, trace, own
    )
    scenarios, said = alternatives(own / CALIBRATED, systems)
    rows = compare_scenarios(scenarios, folder, jobs)
    if as_json:
        print(json.dumps({"systems": rows, **found.as_json(), "said": said}, indent=1))
        return
    print_calibration(found, _console())
    print()
    print_comparison(rows, scenarios, folder)
    for line in said:
        print(line)


def _system(text: str) -> Any:
    """`{name: areal, eta: 4}` as an object, a name as it is."""
    from simrl.overrides import parse_override

    return parse_override(f"system={text}")[1] if text.startswith("{") else text


def _window(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not dash or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise InputError(f"--window {text}: write FIRST-LAST, steps of the log, such as 1-20")
    return int(first), int(last)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    return console
