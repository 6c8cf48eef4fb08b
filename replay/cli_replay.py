"""`simrl replay`: a scenario on real vLLM engines, and what the simulator had predicted beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError, StoppedError

EXAMPLE = (
    "Examples:  simrl replay experiments/replay_cpu.yaml --workers 1 --device cpu   |   "
    "simrl replay my_scenario.yaml --system areal --workers 32 --model path/to/Qwen3-8B --ray auto"
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from replay.vllm_adapter import EngineSettings
    from simrl.scenario import Scenario
    from simrl.simulate import Prepared


def replay(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="changes to the scenario, such as steps=2 seed=3"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="so many of the scenario's rollout workers; by default all")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="the model's folder (default: the scenario's model)")] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(help="a folder with the weights of policy version 0, 1, 2 … (repeat; the last one stays)"),
    ] = None,
    draft_model: Annotated[Path | None, typer.Option(help="the folder of a draft model, for that speculation")] = None,
    system: Annotated[str | None, typer.Option(help="the system to run; the scenario's only one if not given")] = None,
    dispatch: Annotated[str | None, typer.Option(help="with this dispatch in place of its own")] = None,
    speculation: Annotated[str | None, typer.Option(help="with this speculation in place of its own")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    dtype: Annotated[
        str | None,
        typer.Option(help="of the weights, such as bfloat16; by default float32 on a CPU, else the model's own"),
    ] = None,
    dummy: Annotated[bool, typer.Option("--dummy", help="random weights: the folder needs only a config.json")] = False,
    threads: Annotated[int, typer.Option(min=1, help="of a CPU engine")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="of the sampling; the scenario's if not given")
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
    start_deadline: Annotated[float, typer.Option(min=1.0, help="seconds that the engines have to start")] = 600.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where the results go (default: results/NAME-SYSTEM-…-replay)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables")] = False,
) -> None:
    """Run a scenario's schedule on real vLLM engines and show measured beside predicted.

    The same pipeline, dispatch and drafter objects that simulate the scenario run here on the clock of the wall: lengths are
    the trace's, tokens are really generated, weights really loaded; training holds for the predicted time.
    """
    from rich.console import Console

    from replay.replayer import ReplayConfig, check_engine, check_replayable, engine_settings, process_fleet
    from replay.replayer import replay as run_replay
    from simrl.agreement import agree, method_without_drafts
    from simrl.agreement_plot import plot_agreement
    from simrl.agreement_table import print_agreement
    from simrl.comparison import MANIFEST
    from simrl.files import write_whole_folder
    from simrl.interrupts import ctrl_c_once
    from simrl.profile import setting_differences
    from simrl.simulate import prepare, simulate_prepared, with_measured_loads
    from simrl.table import not_drafted
    from simrl.trace import write_trace

    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: choose cpu or cuda")
    chosen = _scenario(scenario, overrides or [], system, dispatch, speculation)
    if chosen.profile.path is not None:
        chosen = with_measured_loads(chosen, chosen.profile.path)
    prepared = _with_workers(prepare(chosen), workers)
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
    check_replayable(prepared, config)
    check_engine(config)
    settings = engine_settings(prepared, config)
    if ray is not None:
        from simrl.executors import connect

        connect(ray)
    folder = output or default_folder(chosen, prepared.workers)
    replaced = (folder / "agreement.json").exists()
    said = Console(stderr=True, highlight=False, markup=False)
    for difference in setting_differences(prepared.profile.metadata, _timed_settings(settings, prepared.workers)):
        said.print(f"note: the {difference}")
    with ctrl_c_once(), write_whole_folder(folder, MANIFEST) as temporary:
        predicted = simulate_prepared(prepared)
        if method := method_without_drafts(predicted):
            said.print(f"note: as predicted, {not_drafted(method)}")
        said.print(f"predicted: {predicted.metadata['end_s']:.1f} s for {chosen.steps} updates; starting engines …")
        logs = temporary / "logs"
        logs.mkdir()
        if ray is None:
            with _kept_if_they_do_not_start(logs, folder.with_name(f"{folder.name}-logs")):
                fleet = process_fleet(prepared.workers, settings, config, logs)
        else:
            from replay.ray_link import ray_fleet

            fleet = ray_fleet(prepared.workers, settings, config, ray)
        said.print("engines are up; replaying …")
        with fleet, _progress() as progress:
            task = progress.add_task("replaying: updates", total=chosen.steps)
            measured = run_replay(prepared, fleet, config, lambda step: progress.update(task, completed=step + 1))
        for name, result in (("predicted", predicted), ("measured", measured.result)):
            (temporary / name).mkdir()
            result.write(temporary / name)
        if measured.trace is not None:
            write_trace(measured.trace, temporary / "trace.parquet")
        agreement = agree(predicted, measured.result)
        text = json.dumps({"folder": str(folder), **agreement.as_json()}, indent=1)
        (temporary / "agreement.json").write_text(text + "\n", encoding="utf-8")
        plot_agreement(predicted, measured.result, agreement, temporary / "agreement.png")
    if as_json:
        print(text)
    else:
        print_agreement(agreement, Console(highlight=False, markup=False))
        for event in measured.result.metadata["replay"]["happened"]:
            print(f"At {event['at_s']:.1f} s: {event['message']}.")
        print(f"Training and rewards were held for the predicted time. Written to {folder}.")
        if replaced:
            print("It replaced the results of an earlier replay there; --output names another folder.")
    if measured.stopped is not None:
        why = str(measured.stopped) or "interrupted"
        raise StoppedError(f"{why}; what was measured by then is in {folder}")


def default_folder(scenario: Scenario, workers: int) -> Path:
    """Of the results: another for another system, parameter (dispatch and speculation are such) or number of workers."""
    from simrl.comparison import folder_name

    return Path("results") / f"{scenario.name}-{folder_name(scenario)}-workers-{workers}-replay"


def _timed_settings(settings: EngineSettings, workers: int) -> dict[str, Any]:
    """What a pass's time depends on besides its work: on a CPU, also on the engines that share it."""
    named = {name: getattr(settings, name) for name in ("device", "dtype", "tp", "block_size", "temperature")}
    return named | ({"neighbours": workers - 1} if settings.device == "cpu" else {})


@contextmanager
def _kept_if_they_do_not_start(logs: Path, kept: Path) -> Iterator[None]:
    """What engines said that do not start: nothing else is written then."""
    try:
        yield
    except (InputError, StoppedError) as error:
        if not any(log.stat().st_size for log in logs.iterdir()):
            raise
        shutil.copytree(logs, kept, dirs_exist_ok=True)
        raise type(error)(f"{error}; the engines' logs are in {kept}") from error


def _scenario(
    file: Path,
    overrides: list[str],
    system: str | None,
    dispatch: str | None,
    speculation: str | None,
) -> Scenario:
    from simrl.comparison import run_names
    from simrl.scenario import Choices, load_scenarios
    from simrl.systems import parameters_of

    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    scenarios = load_scenarios(file, overrides, system, choices, parameters_of)
    if len(scenarios) > 1:
        raise InputError(
            f"{file}: {len(scenarios)} runs ({run_names(scenarios)}); a replay is of one: choose it with --system NAME, "
            "its parameters (such as eta=8) and cluster.gpus=…"
        )
    return scenarios[0]


def _with_workers(prepared: Prepared, workers: int | None) -> Prepared:
    """Fewer rollout workers: with GPUs of its own, the trainer keeps them; where it shares the workers', there are fewer."""
    from simrl.simulate import gpus_for, prepare

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
    """A model's folder, also where its config.json is named."""
    folder = model.parent if model.name == "config.json" else model
    if not (folder / "config.json").is_file():
        raise InputError(f"model {model}: no folder with a config.json; name one with --model (a real engine needs it)")
    return folder


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
