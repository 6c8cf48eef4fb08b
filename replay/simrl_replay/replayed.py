"""A replay from a scenario file to its folder of results: predicted, replayed, compared and shown.

Invariant: the folder is replaced as a whole, when all is written; a replay that is stopped leaves
its results up to then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simrl.analysis.agreement import Agreement, agree, method_without_drafts, repeat_spread
from simrl.errors import InputError, StoppedError
from simrl.files import write_whole_folder
from simrl.interrupts import ctrl_c_once
from simrl.profile.metadata import setting_differences
from simrl.result.result import Result
from simrl.scenario.load import Choices, load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.comparison import MANIFEST
from simrl.show.figures.agree import agreement_figure
from simrl.show.style import save
from simrl.show.tables.agree import print_agreement, repeats_line
from simrl.show.tables.compare import not_drafted
from simrl.show.text import Screen, say
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.compare import folder_name, run_names
from simrl.study.executors import connect
from simrl.study.progress import compile_kernels, progress_bar
from simrl.systems.recipes import parameters_of
from simrl.trace.trace import write_trace
from simrl_replay.measured_passes import Split, split_error
from simrl_replay.ray_link import places_line, ray_fleet
from simrl_replay.replayer import (
    Measured,
    ReplayConfig,
    ReplayEngines,
    check_engine,
    check_replayable,
    engine_settings,
    process_fleet,
    replay,
)
from simrl_replay.sized import gpus_for
from simrl_replay.speculative import draft_models
from simrl_replay.spot_head import accept_lengths
from simrl_replay.vllm_adapter import EngineSettings

if TYPE_CHECKING:  # needs torch
    from simrl_replay.trained import RealTraining


def measure_and_show(
    prepared: Prepared,
    config: ReplayConfig,
    folder: Path,
    ray: str | None,
    repeats: int,
    as_json: bool,
    trained_form: Callable[[Scenario], Prepared] | None = None,
) -> None:
    """Simulate, replay, write all results to `folder`, and print the agreement. With a
    `trained_form`, which prepares the scenario again, updates are real."""
    check_replayable(prepared, config)
    check_engine(config)
    spot = prepared.drafts.speculation.training if prepared.drafts else None
    if spot is not None and spot.adaptive and ray not in (None, "local"):
        raise InputError(
            f"--ray {ray}: the trained drafter is written to a folder of this machine, which other nodes do not see; set "
            "adaptive: false, or use --ray local"
        )
    settings = engine_settings(prepared, config)
    if ray is not None:
        connect(ray)
    steps = prepared.scenario.steps
    replaced = (folder / "agreement.json").exists()
    notes = Screen(stderr=True)
    trains = trained_form is not None
    for difference in setting_differences(
        prepared.profile.metadata,
        _timed_settings(settings, prepared.workers + (trains and not prepared.colocated)),
    ):
        notes.print(f"note: the {difference}")
    with (
        ctrl_c_once(),
        write_whole_folder(folder, MANIFEST) as temporary,
        ExitStack() as held,
    ):
        training: RealTraining | None = None
        compile_kernels(
            [prepared.limits.dp]
        )  # where Ctrl-C waits: within, it would end in a traceback of the compiler
        if trained_form is None:
            predicted = simulate_prepared(prepared)
        else:
            from simrl_replay import trained

            notes.print("the trainer starts, and its updates are measured …")
            (temporary / "logs").mkdir()
            training = held.enter_context(
                trained.real_training(prepared, config, temporary / "logs")
            )
            prepared = trained_form(trained.with_measured_training(prepared.scenario, training))
            predicted = trained.predict(prepared)
        if method := method_without_drafts(predicted):
            notes.print(f"note: as predicted, {not_drafted(method)}")
        notes.print(
            f"predicted: {predicted.metadata['end_s']:.1f} s for {steps} updates; starting engines …"
        )
        fleet = _start_engines(prepared, settings, config, ray, temporary / "logs", folder)
        where = "" if ray is None else f": {places_line([link.place for link in fleet.links])}"
        notes.print(f"engines are up{where}; replaying …")
        with fleet:
            measured, not_begun = _replays(prepared, fleet, config, repeats, training)
        # A real trainer's seconds are neither the engines' speed nor the schedule; passes beside a
        # drafter that works ahead, or of a worker that changes its drafter, are not predicted alone.
        plain = not (training or prepared.tail or (prepared.drafts and prepared.drafts.decoupled))
        passes = [] if not plain else [each for each in measured if each.passes]
        splits = [split_error(prepared, each.result, each.passes) for each in passes]
        agreements, text = _write(temporary, folder, predicted, measured, splits)
    if as_json:
        print(text)
    else:
        print_agreement(agreements[0], Screen(), repeat_spread(_complete(measured)))
        say(
            Screen(),
            repeats_line(agreements[: len(_complete(measured))], prepared.profile.metadata.spread),
            *(split.line for split in splits[:1]),
        )
        first = measured[0].result
        say(Screen(), *counts_beside(predicted, first), *drafter_lines(predicted, first))
        for number, each in enumerate(measured, 1):
            where = f", replay {number}" if len(measured) > 1 else ""
            for event in each.result.metadata["replay"]["happened"]:
                print(f"At {event['at_s']:.1f} s{where}: {event['message']}.")
        facts = measured[-1].result.metadata["replay"]
        if ray is not None:
            lost = "".join(f"; {node} was lost" for node in facts.get("lost_nodes", ()))
            print(f"{places_line(facts['engines'])} at the end of the replay{lost}.")
        print(balance_line(facts["tokens"]))
        if training is None:
            took = "Training and rewards took the predicted time"
        else:
            first, bound = measured[0].result, prepared.system.off_policyness
            Screen().print(trained.phases_table(trained.phases_of(predicted, first)))
            say(Screen(), trained.versions_line(predicted, first, bound))
            took = training.words
        say(Screen(), f"{took}. Written to {folder}.")
        if replaced:
            print(
                "The results of an earlier replay there were replaced; --output names another folder."
            )
    if (stopped := measured[-1].stopped or not_begun) is not None:
        why = str(stopped) or "interrupted"
        raise StoppedError(f"{why}; the results up to then are in {folder}")


def _start_engines(
    prepared: Prepared,
    settings: EngineSettings,
    config: ReplayConfig,
    ray: str | None,
    logs: Path,
    folder: Path,
) -> ReplayEngines:
    """Start the engines on this machine, or on the Ray cluster at the address `ray`; keep the logs
    of a failed start."""
    logs.mkdir(exist_ok=True)
    if ray is not None:
        return ray_fleet(prepared.workers, settings, config, ray)
    try:
        return process_fleet(prepared.workers, settings, config, logs)
    except (InputError, StoppedError) as error:
        if not any(log.stat().st_size for log in logs.iterdir()):
            raise
        kept = folder.with_name(f"{folder.name}-logs")
        shutil.copytree(logs, kept, dirs_exist_ok=True)
        raise type(error)(f"{error}; the engines' logs are in {kept}") from error


def _replays(
    prepared: Prepared,
    fleet: ReplayEngines,
    config: ReplayConfig,
    repeats: int,
    training: RealTraining | None,
) -> tuple[list[Measured], StoppedError | None]:
    """Replay on engines that stay up; what stops a replay ends the series. Return the replays, and
    why the next could not begin, if it could not."""
    measured: list[Measured] = []
    with progress_bar() as progress:
        task = progress.add_task("replaying: updates", total=repeats * prepared.scenario.steps)
        while len(measured) < repeats and not (measured and measured[-1].stopped):
            try:
                measured.append(
                    replay(prepared, fleet, config, lambda _: progress.advance(task), training)
                )
            except StoppedError as error:  # an engine is gone, and none can take its place
                if not measured:
                    raise
                return measured, StoppedError(f"replay {len(measured) + 1} did not begin: {error}")
    return measured, None


def drafts_of(result: Result) -> dict[str, int]:
    """Return a result's counts of drafts, and of the copies of best-of-N (`copied` samples). Tokens
    that were drafted ahead and never verified are among the drafted ones."""
    columns = {
        name: result.samples.column(name).to_numpy()
        for name in (
            "verifications",
            "verified_tokens",
            "drafted_tokens",
            "accepted_tokens",
            "duplicate_tokens",
        )
    }
    copied = int(np.count_nonzero(columns["duplicate_tokens"]))
    return {name: int(column.sum()) for name, column in columns.items()} | {"copied": copied}


def counts_beside(predicted: Result, measured: Result) -> list[str]:
    """Return lines that show the engines' prefix hits, their drafts and copies, and what
    trajectories did between their turns, beside the simulator's."""
    lines, cache = [], predicted.metadata.get("prefix_cache")
    engines = measured.metadata["replay"]["engines"]
    if cache and cache["lookup_tokens"] and engines:
        hit, queried = (
            sum(engine.get(f"prefix_{name}_tokens", 0) for engine in engines)
            for name in ("hit", "queried")
        )
        lines.append(
            f"Prefix cache: {hit:,} of {queried:,} tokens of admitted requests were found, by vLLM's own counts; predicted "
            f"{cache['hit_tokens']:,} of {cache['lookup_tokens']:,}"
        )
    drafts, real_drafts = drafts_of(predicted), drafts_of(measured)
    if drafts["verifications"] and real_drafts["verifications"]:
        lines.append(
            "Drafts: {verifications:,} verified, which yielded {verified_tokens:,} tokens, {accepted_tokens:,} of them "
            "drafted; {drafted_tokens:,} tokens drafted; ".format(**real_drafts)
            + "predicted {verifications:,}, {verified_tokens:,}, {accepted_tokens:,}; {drafted_tokens:,}".format(
                **drafts
            )
        )
    if drafts["copied"] or real_drafts["copied"]:
        lines.append(
            "Copies that did not end first: of {copied:,} samples, {duplicate_tokens:,} tokens; ".format(
                **real_drafts
            )
            + "predicted {copied:,}, {duplicate_tokens:,}".format(**drafts)
        )
    if (of := predicted.metadata.get("agents")) and (real := measured.metadata.get("agents")):
        lines.append(
            f"Between turns: {real['in_tools_s']:,.1f} s in tools (predicted {of['in_tools_s']:,.1f}), "
            f"{real['waiting_for_tool_slots_s']:,.1f} s of waiting for a tool slot ({of['waiting_for_tool_slots_s']:,.1f}), "
            f"ended by the deadline: {real['killed']:,} ({of['killed']:,})"
        )
    return lines


def _complete(measured: Sequence[Measured]) -> list[Result]:
    return [each.result for each in measured if each.stopped is None]


def _write(
    temporary: Path,
    folder: Path,
    predicted: Result,
    measured: Sequence[Measured],
    splits: Sequence[Split],
) -> tuple[list[Agreement], str]:
    """Write all results, the trace and the agreements; return the agreements, and the JSON of the
    first, and of the repeats, with the final `folder`."""
    first = measured[0]
    later = {f"repeats/{number}": each.result for number, each in enumerate(measured[1:], 2)}
    for name, result in {"predicted": predicted, "measured": first.result, **later}.items():
        (temporary / name).mkdir(parents=True)
        result.write(temporary / name)
    if first.trace is not None:
        write_trace(first.trace, temporary / "trace.parquet")
    agreements = [agree(predicted, each.result) for each in measured]
    spread = repeat_spread(_complete(measured))
    repeats = {
        "errors": [asdict(each.errors) for each in agreements],
        "spread": spread and asdict(spread),
    }
    facts = {
        "folder": str(folder),
        **agreements[0].as_json(),
        "repeats": repeats,
        "given_measured_passes": [split.as_json() for split in splits],
        "drafts": {"predicted": drafts_of(predicted), "measured": drafts_of(first.result)},
    }
    if "trained" in first.result.metadata["replay"]:
        from simrl_replay.trained import phases_json

        facts["phases"] = [phases_json(predicted, each.result) for each in measured]
    if "drafter_training" in first.result.metadata["replay"]:
        lengths = {"predicted": accept_lengths(predicted), "measured": accept_lengths(first.result)}
        trained_heads = first.result.metadata["replay"]["drafter_training"]
        facts["drafter"] = {"accept_lengths": lengths, "trained": trained_heads}
    text = json.dumps(facts, indent=1)
    (temporary / "agreement.json").write_text(text + "\n", encoding="utf-8")
    save(agreement_figure(predicted, first.result, agreements[0]), temporary / "agreement.png")
    return agreements, text


def drafter_lines(predicted: Result, measured: Result) -> list[str]:
    """Return what a drafter that was trained accepts, by policy version, and how it was trained;
    nothing where none was."""
    trained = measured.metadata["replay"].get("drafter_training")
    if trained is None:
        return []
    lengths = [accept_lengths(result) for result in (predicted, measured)]
    versions = sorted({*lengths[0], *lengths[1]})
    both = "; ".join(
        f"version {version}: "
        + ", ".join("none" if version not in of else f"{of[version]:.2f}" for of in lengths)
        for version in versions
    )
    lines = [f"Accept length, predicted and measured, by policy version: {both}."]
    for each in trained:
        first, last = each["agreement"]
        lines.append(
            f"The drafter of version {each['version']} was trained for {each['iterations']} iterations on {each['tokens']:,} "
            f"tokens in {each['seconds']:.1f} s: it agreed with its target on {first:.0%} of the tokens of the first one, on "
            f"{last:.0%} of the last."
        )
    return lines


def balance_line(tokens: Mapping[str, int]) -> str:
    """Return a line on the tokens that the engines reported and what became of them."""
    generated, *kept = tokens.values()
    of = [
        f"{count:,} {name.replace('_', ' ')}"
        for name, count in list(tokens.items())[1:]
        if count or name == "trained"
    ]
    wrong = "" if generated == sum(kept) else ", which are not equal: report this with the scenario"
    return f"Tokens: {generated:,} generated = {' + '.join(of)}{wrong}."


def default_folder(scenario: Scenario, workers: int) -> Path:
    """Return the results folder: distinct for each system, parameters (with dispatch and
    speculation) and number of workers."""
    return Path("results") / f"{scenario.name}-{folder_name(scenario)}-workers-{workers}-replay"


def _timed_settings(settings: EngineSettings, processes: int) -> dict[str, Any]:
    """Return the settings that change a pass's time for equal work; on a CPU also the number of
    processes that share it: engines, and a trainer beside them."""
    named = {
        name: getattr(settings, name)
        for name in ("device", "dtype", "tp", "block_size", "temperature")
    }
    return named | ({"neighbours": processes - 1} if settings.device == "cpu" else {})


def chosen_scenario(
    file: Path,
    overrides: list[str],
    system: str | None,
    dispatch: str | None,
    speculation: str | None,
) -> Scenario:
    """Return the one scenario of a file. Raise `InputError` if there are several."""
    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    scenarios = load_scenarios(file, overrides, system, choices, parameters_of)
    if len(scenarios) > 1:
        raise InputError(
            f"{file}: {len(scenarios)} runs ({run_names(scenarios)}); a replay is of one: choose it with --system NAME, "
            "its parameters (such as eta=8) and cluster.gpus=…"
        )
    return scenarios[0]


def with_workers(prepared: Prepared, workers: int | None) -> Prepared:
    """Reduce the number of rollout workers: a trainer with its own GPUs keeps them, one that shares
    the workers' GPUs has fewer."""
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


def draft_folders(
    prepared: Prepared, options: Sequence[str]
) -> tuple[Path | None, dict[str, Path]]:
    """Return the folder of --draft-model, if one is named alone, and folders by the names of their
    models. Raise `InputError` for one that no model of the scenario drafts from, and for several
    of one name."""
    models, alone, named = draft_models(prepared), list[Path](), dict[str, Path]()
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals or Path(option).exists():
            alone.append(model_folder(Path(option), "--draft-model"))
        elif name in named:
            raise InputError(f"--draft-model {option}: {name} has a folder already; give it once")
        elif name not in models:
            raise InputError(
                f"--draft-model {option}: {prepared.system.label} does not draft with {name}, but with "
                f"{', '.join(sorted(models)) or 'no model'}; leave it out, or correct the name"
            )
        else:
            named[name] = model_folder(Path(folder), "--draft-model")
    unnamed = sorted(models - named.keys())
    if len(alone) > 1:
        raise InputError(
            f"--draft-model {alone[1]}: the second folder without a name; give NAME=FOLDER, with the drafters' names"
        )
    if alone and not unnamed:
        raise InputError(
            f"--draft-model {alone[0]}: {prepared.system.label} drafts with no model"
            f"{' but those named' if named else ''}; leave it out"
        )
    if alone and len(unnamed) > 1:
        raise InputError(
            f"--draft-model {alone[0]}: {prepared.system.label} drafts with {', '.join(unnamed)}; give NAME=FOLDER for each"
        )
    return next(iter(alone), None), named


def model_folder(model: Path, option: str = "--model") -> Path:
    """Return the folder of a model that was named by it or by its config.json. Raise `InputError`
    if it has none."""
    folder = model.parent if model.name == "config.json" else model
    if not (folder / "config.json").is_file():
        raise InputError(
            f"model {model}: no folder with a config.json; name one with {option} (a real engine needs it)"
        )
    return folder
