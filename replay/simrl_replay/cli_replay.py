"""`simrl replay`: a scenario on real vLLM engines, measured beside predicted."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError, StoppedError
from simrl_replay.cli_measure import Dummy, StartDeadline

EXAMPLE = (
    "Examples:  simrl replay experiments/replay_cpu.yaml --workers 1 --device cpu   |   "
    "simrl replay my_scenario.yaml --system areal --workers 32 --model path/to/Qwen3-8B --ray auto"
)

if TYPE_CHECKING:
    from simrl.analysis.agreement import Agreement
    from simrl.result.result import Result
    from simrl.scenario.model import Scenario
    from simrl.simulate.prepare import Prepared
    from simrl_replay.replayer import Measured, ReplayConfig, ReplayEngines
    from simrl_replay.vllm_adapter import EngineSettings


def replay(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="changes to the scenario, such as steps=2 seed=3"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="number of rollout workers (default: the scenario's)")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="the model's folder (default: the scenario's model)")] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="weight folder of policy version 0, 1, 2 … (repeat; later versions use the last one)"),
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="the folder of the draft model, for draft_model speculation")
    ] = None,
    system: Annotated[str | None, typer.Option(help="the system to run (default: the scenario's only one)")] = None,
    dispatch: Annotated[str | None, typer.Option(help="dispatch in place of the scenario's")] = None,
    speculation: Annotated[str | None, typer.Option(help="speculation in place of the scenario's")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    dtype: Annotated[
        str | None,
        typer.Option(help="data type of the weights, such as bfloat16 (default: float32 on a CPU, else the model's)"),
    ] = None,
    dummy: Dummy = False,
    threads: Annotated[int, typer.Option(min=1, help="threads of a CPU engine")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="sampling temperature (default: the scenario's)")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="a Ray cluster to place the engines on: 'auto' (the running one), HOST:PORT, or 'local' (starts one)"
        ),
    ] = None,
    step_deadline: Annotated[
        float, typer.Option(min=0.1, help="seconds without a step after which an engine counts as hung")
    ] = 60.0,
    start_deadline: StartDeadline = 600.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="replays in a row; two or more show how far this machine's own times are apart")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder of the results (default: results/NAME-SYSTEM-…-replay)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables")] = False,
) -> None:
    """Run a scenario's schedule on real vLLM engines and show measured beside predicted.

    The pipeline, dispatch and drafter objects of the simulation run here on the wall clock: lengths come from the trace,
    tokens are really generated, weights really loaded; training takes the predicted time.
    """
    from simrl.simulate.prepare import prepare, with_measured_loads
    from simrl_replay.replayer import ReplayConfig
    from simrl_replay.speculative import replayed_form

    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: choose cpu or cuda")
    chosen = _scenario(scenario, overrides or [], system, dispatch, speculation)
    if chosen.profile.path is not None:
        chosen = with_measured_loads(chosen, chosen.profile.path)
    prepared, changes = replayed_form(_with_workers(prepare(chosen), workers))
    for change in changes:
        print(f"note: {prepared.system.label} as it is replayed: {change}", file=sys.stderr)
    config = ReplayConfig(
        model=_folder(model or Path(chosen.model)),
        weights=tuple(weights or ()),
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "auto"),
        dummy_weights=dummy,
        draft_model=draft_model,
        temperature=chosen.speculation.temperature if temperature is None else temperature,
        threads=threads,
        step_deadline_s=step_deadline,
        start_deadline_s=start_deadline,
    )
    _measure_and_show(prepared, config, output or default_folder(chosen, prepared.workers), ray, repeats, as_json)


def _measure_and_show(
    prepared: Prepared, config: ReplayConfig, folder: Path, ray: str | None, repeats: int, as_json: bool
) -> None:
    """Simulate, replay, write all results to `folder`, and print the agreement."""
    from simrl.analysis.agreement import method_without_drafts, repeat_spread
    from simrl.files import write_whole_folder
    from simrl.interrupts import ctrl_c_once
    from simrl.profile.metadata import setting_differences
    from simrl.show.comparison import MANIFEST
    from simrl.show.tables.agree import print_agreement, repeats_line
    from simrl.show.tables.compare import not_drafted
    from simrl.show.text import Screen, say
    from simrl.simulate.run import simulate_prepared
    from simrl.study.executors import connect
    from simrl.study.progress import compile_kernels
    from simrl_replay.replayer import check_engine, check_replayable, engine_settings

    check_replayable(prepared, config)
    check_engine(config)
    settings = engine_settings(prepared, config)
    if ray is not None:
        connect(ray)
    steps = prepared.scenario.steps
    replaced = (folder / "agreement.json").exists()
    said = Screen(stderr=True)
    for difference in setting_differences(prepared.profile.metadata, _timed_settings(settings, prepared.workers)):
        said.print(f"note: the {difference}")
    with ctrl_c_once(), write_whole_folder(folder, MANIFEST) as temporary:
        compile_kernels([prepared.limits.dp])  # where Ctrl-C waits: within, it would end in a traceback of the compiler
        predicted = simulate_prepared(prepared)
        if method := method_without_drafts(predicted):
            said.print(f"note: as predicted, {not_drafted(method)}")
        said.print(f"predicted: {predicted.metadata['end_s']:.1f} s for {steps} updates; starting engines …")
        fleet = _start_engines(prepared, settings, config, ray, temporary / "logs", folder)
        said.print("engines are up; replaying …")
        with fleet:
            measured = _replays(prepared, fleet, config, repeats)
        agreements, text = _write(temporary, folder, predicted, measured)
    if as_json:
        print(text)
    else:
        print_agreement(agreements[0], Screen(), repeat_spread(_complete(measured)))
        say(Screen(), repeats_line(agreements[: len(_complete(measured))], prepared.profile.metadata.spread))
        for number, each in enumerate(measured, 1):
            where = f", replay {number}" if len(measured) > 1 else ""
            for event in each.result.metadata["replay"]["happened"]:
                print(f"At {event['at_s']:.1f} s{where}: {event['message']}.")
        print(f"Training and rewards took the predicted time. Written to {folder}.")
        if replaced:
            print("The results of an earlier replay there were replaced; --output names another folder.")
    if (stopped := measured[-1].stopped) is not None:
        why = str(stopped) or "interrupted"
        raise StoppedError(f"{why}; the results up to then are in {folder}")


def _start_engines(
    prepared: Prepared, settings: EngineSettings, config: ReplayConfig, ray: str | None, logs: Path, folder: Path
) -> ReplayEngines:
    """Start the engines on this machine, or on the Ray cluster at the address `ray`; keep the logs of a failed start."""
    logs.mkdir()
    if ray is not None:
        from simrl_replay.ray_link import ray_fleet

        return ray_fleet(prepared.workers, settings, config, ray)
    from simrl_replay.replayer import process_fleet

    with _kept_if_they_do_not_start(logs, folder.with_name(f"{folder.name}-logs")):
        return process_fleet(prepared.workers, settings, config, logs)


def _replays(prepared: Prepared, fleet: ReplayEngines, config: ReplayConfig, repeats: int) -> list[Measured]:
    """Replay on engines that stay up; what stops a replay ends the series."""
    from simrl.study.progress import progress_bar
    from simrl_replay.replayer import replay as run_replay

    measured: list[Measured] = []
    with progress_bar() as progress:
        task = progress.add_task("replaying: updates", total=repeats * prepared.scenario.steps)
        while len(measured) < repeats and not (measured and measured[-1].stopped):
            measured.append(run_replay(prepared, fleet, config, lambda _: progress.advance(task)))
    return measured


def _complete(measured: Sequence[Measured]) -> list[Result]:
    return [each.result for each in measured if each.stopped is None]


def _write(
    temporary: Path, folder: Path, predicted: Result, measured: Sequence[Measured]
) -> tuple[list[Agreement], str]:
    """Write all results, the trace and the agreements; return the agreements, and the JSON of the first, and of the
    repeats, with the final `folder`."""
    from simrl.analysis.agreement import agree, repeat_spread
    from simrl.show.figures.agree import agreement_figure
    from simrl.show.style import save
    from simrl.trace.trace import write_trace

    first = measured[0]
    later = {f"repeats/{number}": each.result for number, each in enumerate(measured[1:], 2)}
    for name, result in {"predicted": predicted, "measured": first.result, **later}.items():
        (temporary / name).mkdir(parents=True)
        result.write(temporary / name)
    if first.trace is not None:
        write_trace(first.trace, temporary / "trace.parquet")
    agreements = [agree(predicted, each.result) for each in measured]
    spread = repeat_spread(_complete(measured))
    repeats = {"errors": [asdict(each.errors) for each in agreements], "spread": spread and asdict(spread)}
    text = json.dumps({"folder": str(folder), **agreements[0].as_json(), "repeats": repeats}, indent=1)
    (temporary / "agreement.json").write_text(text + "\n", encoding="utf-8")
    save(agreement_figure(predicted, first.result, agreements[0]), temporary / "agreement.png")
    return agreements, text


def default_folder(scenario: Scenario, workers: int) -> Path:
    """Return the results folder: distinct for each system, parameters (with dispatch and speculation) and number of workers."""
    from simrl.study.compare import folder_name

    return Path("results") / f"{scenario.name}-{folder_name(scenario)}-workers-{workers}-replay"


def _timed_settings(settings: EngineSettings, workers: int) -> dict[str, Any]:
    """Return the settings that change a pass's time for equal work; on a CPU also the number of engines that share it."""
    named = {name: getattr(settings, name) for name in ("device", "dtype", "tp", "block_size", "temperature")}
    return named | ({"neighbours": workers - 1} if settings.device == "cpu" else {})


@contextmanager
def _kept_if_they_do_not_start(logs: Path, kept: Path) -> Iterator[None]:
    """Keep the logs of engines that fail to start; nothing else is written then."""
    try:
        yield
    except (InputError, StoppedError) as error:
        if not any(log.stat().st_size for log in logs.iterdir()):
            raise
        shutil.copytree(logs, kept, dirs_exist_ok=True)
        raise type(error)(f"{error}; the engines' logs are in {kept}") from error


def _scenario(
    file: Path, overrides: list[str], system: str | None, dispatch: str | None, speculation: str | None
) -> Scenario:
    from simrl.scenario.load import Choices, load_scenarios
    from simrl.study.compare import run_names
    from simrl.systems.recipes import parameters_of

    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    scenarios = load_scenarios(file, overrides, system, choices, parameters_of)
    if len(scenarios) > 1:
        raise InputError(
            f"{file}: {len(scenarios)} runs ({run_names(scenarios)}); a replay is of one: choose it with --system NAME, "
            "its parameters (such as eta=8) and cluster.gpus=…"
        )
    return scenarios[0]


def _with_workers(prepared: Prepared, workers: int | None) -> Prepared:
    """Reduce the number of rollout workers: a trainer with its own GPUs keeps them, one that shares the workers' GPUs has
    fewer."""
    from simrl.simulate.prepare import gpus_for, prepare

    if workers is None or workers == prepared.workers:
        return prepared
    if workers > prepared.workers:
        raise InputError(
            f"--workers {workers}: the scenario's {prepared.scenario.cluster.gpus} GPUs give {prepared.system.label} "
            f"{prepared.workers} rollout workers; ask for fewer, or set cluster.gpus"
        )
    if prepared.colocated:
        scenario = prepared.scenario
        cluster = scenario.cluster.model_copy(update={"gpus": gpus_for(scenario, workers)})
        return prepare(scenario.model_copy(update={"cluster": cluster}))
    return replace(prepared, workers=workers)


def _folder(model: Path) -> Path:
    folder = model.parent if model.name == "config.json" else model
    if not (folder / "config.json").is_file():
        raise InputError(f"model {model}: no folder with a config.json; name one with --model (a real engine needs it)")
    return folder
