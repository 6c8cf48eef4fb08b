"""`simrl calibrate` and `simrl whatif`: a real run's log in, the few numbers that make the simulator that run out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError

if TYPE_CHECKING:
    from simrl.calibration import Calibration
    from simrl.scenario import Scenario

MANIFEST = "files.txt"
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
    folder = output or Path("results") / f"{_name(run_log)}-calibrated"
    found = _calibrated(
        run_log, settings or [], launch, window, group, samples, prompt_tokens, cap_tokens, log_format, trace, folder
    )
    if as_json:
        print(json.dumps({**found.as_json(), "scenario": str(folder / "calibrated.yaml")}, indent=1))
        return
    print_calibration(found)
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
    from simrl.comparison import compare_scenarios
    from simrl.table import print_comparison

    if not system:
        raise InputError("whatif: no --system; name one to try, such as --system rhymerl (simrl systems lists them)")
    for text in system:  # before minutes go into a calibration
        _check_system(_system(text))
    folder = output or Path("results") / f"{_name(run_log)}-whatif"
    own = folder.with_name(f"{folder.name}-run")
    found = _calibrated(
        run_log, settings or [], launch, window, group, samples, prompt_tokens, cap_tokens, log_format, trace, own
    )
    scenarios, said = _alternatives(own / "calibrated.yaml", system)
    rows = compare_scenarios(scenarios, folder, jobs)
    if as_json:
        print(json.dumps({"systems": rows, **found.as_json(), "said": said}, indent=1))
        return
    print_calibration(found)
    print()
    print_comparison(rows, scenarios, folder)
    for line in said:
        print(line)


def _calibrated(
    run_log: Path,
    settings: list[str],
    launch: Path | None,
    window: str,
    group: int,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    log_format: str | None,
    trace: Path | None,
    folder: Path,
) -> Calibration:
    """The calibration of a log, with its files written to `folder`."""
    from simrl.calibration import calibrate as fit
    from simrl.calibration import scenario_yaml
    from simrl.files import write_whole_folder
    from simrl.importers.metrics import read_metrics
    from simrl.trace import read_trace

    steps = _window(window)
    recorded = read_trace(trace) if trace is not None else None
    metrics = read_metrics(run_log, log_format, samples, prompt_tokens, lengths=recorded is None)
    name = _name(run_log)

    def start(path: Path, count: int) -> Scenario:
        return _launched(run_log, launch, settings, name, path, count)

    with write_whole_folder(folder, MANIFEST) as temporary:
        found = fit(metrics, start, steps, group, temporary, cap_tokens, recorded)
        (temporary / "calibrated.yaml").write_text(scenario_yaml(found, run_log.name), encoding="utf-8")
        (temporary / "calibration.json").write_text(
            json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return found


def _launched(run_log: Path, launch: Path | None, settings: list[str], name: str, trace: Path, steps: int) -> Scenario:
    """The run as it was started, on a trace of its lengths."""
    from simrl.scenario import load_scenarios

    fixed = [f"name={name}", f"steps={steps}", "warmup_steps=0", f"workload.trace={json.dumps(str(trace.resolve()))}"]
    with tempfile.TemporaryDirectory(prefix="simrl-launch-") as temporary:
        file = launch
        if file is None:
            file = Path(temporary) / "launch.yaml"
            file.write_text("name: run\nprofile: {roofline: {}}\nsystems: [verl_colocated]\n", encoding="utf-8")
        try:
            found = load_scenarios(file, [*settings, *fixed, "workload.synthetic=null"])
        except InputError as error:
            if launch is not None:
                raise
            raise InputError(
                f"{str(error).replace(str(file), str(run_log))}; say how the run was started: {NEEDS}, or --launch FILE"
            ) from error
    if len(found) > 1:
        raise InputError(
            f"{launch or run_log}: {len(found)} systems; name the one that the run used, as systems=[verl_colocated]"
        )
    return found[0]


def _alternatives(file: Path, systems: list[str]) -> tuple[list[Scenario], list[str]]:
    """The run's own scenario and one a system. Where the GPUs cannot be shared as the run had them, in smaller parts, and then
    its own system in such parts, too: what the parts do and what the system does are told apart."""
    from simrl.scenario import load_scenarios
    from simrl.simulate import prepare

    own = load_scenarios(file)[0]
    found, said = [own], []
    for text in systems:
        other = load_scenarios(file, [f"systems={json.dumps([_system(text)])}"])[0]
        try:
            prepare(other)
        except InputError as error:
            other = _in_smaller_parts(other, error)
            same = other.model_copy(update={"system": own.system})
            found += [same] if same not in found else []
            said.append(
                f"{other.system.name} cannot share {own.cluster.gpus} GPUs as the run had them (tp {own.cluster.tp}, "
                f"{own.training.sequence_parallel} a sequence in training): simulated with {other.variant}, as is the "
                "run's own system beside it. The corrections are those of the run as it was: read it as an extrapolation."
            )
        found.append(other)
    return found, said


def _system(text: str) -> Any:
    """`{name: areal, eta: 4}` as an object, a name as it is."""
    from simrl.overrides import parse_override

    return parse_override(f"system={text}")[1] if text.startswith("{") else text


def _check_system(system: Any) -> None:
    from simrl.systems import make_system

    if isinstance(system, str):
        make_system(system, {})
    elif isinstance(system, dict) and isinstance(system.get("name"), str):
        make_system(system["name"], {str(key): value for key, value in system.items() if key != "name"})
    else:
        raise InputError(f"--system {system}: give a name, or {{name: areal, eta: 4}}")


def _in_smaller_parts(scenario: Scenario, error: InputError) -> Scenario:
    """The first that can be with tp, and if need be the GPUs that share a sequence in training, halved and halved again; a GPU
    trains as many tokens at a time as before."""
    from simrl.simulate import prepare

    tp, training = scenario.cluster.tp, scenario.training
    for halved in range(tp.bit_length()):
        for shared in range(training.sequence_parallel.bit_length()):
            if tp % 2**halved or training.sequence_parallel % 2**shared:
                continue
            parts = {
                "sequence_parallel": training.sequence_parallel // 2**shared,
                "tokens_per_microbatch": training.tokens_per_microbatch // 2**shared,
            }
            said = [f"cluster.tp={tp // 2**halved}"] if halved else []
            said += [f"training.sequence_parallel={parts['sequence_parallel']}"] if shared else []
            smaller = scenario.model_copy(
                update={
                    "cluster": scenario.cluster.model_copy(update={"tp": tp // 2**halved}),
                    "training": training.model_copy(update=parts),
                    "variant": ", ".join(said),
                }
            )
            try:
                prepare(smaller)
            except InputError:
                continue
            return smaller
    raise error


def _window(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not dash or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise InputError(f"--window {text}: write FIRST-LAST, steps of the log, such as 1-20")
    return int(first), int(last)


def _name(run_log: Path) -> str:
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_log.stem).strip("-._") or "run"


def print_calibration(found: Calibration) -> None:
    """The corrections, what they mean, the errors in and out of the window, and what is assumed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    table = Table(
        "correction", "value", "standard error", "range", "what it means", box=None, pad_edge=False, header_style="bold"
    )
    for c in found.corrections:
        error = "at the bound of its range" if c.error is None else f"± {_shown(c.error, c.unit)}"
        bounds = f"{_shown(c.low, c.unit)} to {_shown(c.high, c.unit)}"
        table.add_row(c.name, _shown(c.value, c.unit), error, bounds, c.meaning)
    console.print(table)
    first, last = found.window
    table = Table(
        "simulated against logged",
        f"in the window ({first}-{last})",
        "on the rest",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for e in found.errors:
        table.add_row(e.phase, _apart(e.steps_in, e.mape_in, e.bias_in), _apart(e.steps_out, e.mape_out, e.bias_out))
    console.print()
    console.print(table)
    console.print(
        "Mean absolute error of a step, and in brackets that of all seconds together. Nothing was fitted to the rest.\n"
    )
    for text in found.assumed:
        console.print(f"Assumed: {text}.")


def _shown(value: float, unit: str) -> str:
    if unit == "s" and 0 < abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g}{' ' + unit if unit else ''}"


def _apart(steps: int, mape: Any, bias: Any) -> str:
    return f"{mape:.1%} ({bias:+.1%}), {steps} steps" if steps else "no steps"
