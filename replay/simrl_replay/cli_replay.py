"""`simrl replay`: a scenario on real vLLM engines, measured beside predicted."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simrl.errors import InputError
from simrl_replay.cli_measure import Dummy, StartDeadline

if TYPE_CHECKING:
    from simrl.scenario.model import Scenario
    from simrl.simulate.prepare import Prepared

EXAMPLE = (
    "Examples:  simrl replay experiments/replay_cpu.yaml --workers 1 --device cpu   |   "
    "simrl replay my_scenario.yaml --system areal --workers 32 --model path/to/Qwen3-8B --ray auto"
)


def replay(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="changes to the scenario, such as steps=2 seed=3"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="number of rollout workers (default: the scenario's)")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="the model's folder (default: the scenario's model)")
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="weight folder of policy version 0, 1, 2 … (repeat; later versions use the last one)"
        ),
    ] = None,
    draft_model: Annotated[
        list[str] | None,
        typer.Option(
            help="the folder of the model that drafts (draft_model, specactor) or of the EAGLE head (tlt, eagle3); of several, "
            "repeat NAME=FOLDER"
        ),
    ] = None,
    drafter_lr: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="AdamW's learning rate for a drafter that is trained (tlt; default: 3e-5)",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="the system to run (default: the only system of the scenario)"),
    ] = None,
    dispatch: Annotated[
        str | None, typer.Option(help="dispatch in place of the scenario's")
    ] = None,
    speculation: Annotated[
        str | None, typer.Option(help="speculation in place of the scenario's")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="data type of the weights, such as bfloat16 (default: float32 on a CPU, else the model's)"
        ),
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
    copy_weights: Annotated[
        bool,
        typer.Option(
            "--copy-weights",
            help="with --ray: give each node copies of the weights, also where it sees their path (a slow shared file system)",
        ),
    ] = False,
    step_deadline: Annotated[
        float,
        typer.Option(min=0.1, help="seconds without a step after which an engine counts as hung"),
    ] = 60.0,
    start_deadline: StartDeadline = 600.0,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="train for real, in a process of its own; without it, training takes the predicted time",
        ),
    ] = False,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="replays in a row; two or more show the spread of this machine's times"
        ),
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="folder of the results (default: results/NAME-SYSTEM-…-replay)"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON on stdout instead of tables")
    ] = False,
) -> None:
    """Run a scenario's schedule on real vLLM engines and show measured beside predicted.

    The pipeline, dispatch and drafter objects of the simulation run here on the wall clock: lengths
    come from the trace, tokens are really generated, weights really loaded; training takes the
    predicted time, or is real with --train.
    """
    from simrl.simulate.prepare import prepare
    from simrl_replay.replayed import (
        chosen_scenario,
        default_folder,
        draft_folders,
        measure_and_show,
        model_folder,
        with_workers,
    )
    from simrl_replay.replayer import ReplayConfig, check_engine
    from simrl_replay.sized import with_measured_loads
    from simrl_replay.speculative import replayed_form

    if copy_weights and ray is None:
        raise InputError(
            "--copy-weights is for the nodes of a Ray cluster; add --ray, or leave it out"
        )
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: choose cpu or cuda")
    chosen = chosen_scenario(scenario, overrides or [], system, dispatch, speculation)
    if chosen.profile.path is not None:
        chosen = with_measured_loads(chosen, chosen.profile.path)

    def form(each: Scenario) -> tuple[Prepared, list[str]]:
        return replayed_form(with_workers(prepare(each), workers))

    prepared, changes = form(chosen)
    for change in changes:
        print(f"note: {prepared.system.label} as it is replayed: {change}", file=sys.stderr)
    training = prepared.drafts and prepared.drafts.speculation.training
    if drafter_lr is not None and not (training and training.adaptive):
        raise InputError(
            f"--drafter-lr {drafter_lr:g}: {prepared.system.label} trains no drafter; leave it out, or choose tlt"
        )
    draft_folder, named = draft_folders(prepared, draft_model or ())
    config = ReplayConfig(
        model=model_folder(model or Path(chosen.model)),
        weights=tuple(weights or ()),
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "auto"),
        dummy_weights=dummy,
        draft_model=draft_folder,
        draft_models=named,
        drafter_learning_rate=ReplayConfig.drafter_learning_rate
        if drafter_lr is None
        else drafter_lr,
        temperature=chosen.speculation.temperature if temperature is None else temperature,
        threads=threads,
        step_deadline_s=step_deadline,
        start_deadline_s=start_deadline,
        copy_weights=copy_weights,
    )
    if train:
        check_engine(config)
        try:
            from simrl_replay.trained import check_trainable, follows
        except ImportError as error:
            raise InputError(
                f"--train: {error.name} is not installed here; install vLLM (docs/replay.md), which brings it"
            ) from None
        if ray is not None:
            raise InputError(
                f"--ray {ray} and --train: weights go through a folder of this machine; leave --ray out"
            )
        check_trainable(prepared, config)
        config = dataclasses.replace(config, recorded_tokens=follows(prepared, config))
    folder = output or default_folder(chosen, prepared.workers)
    trained_form = (lambda each: form(each)[0]) if train else None
    measure_and_show(prepared, config, folder, ray, repeats, as_json, trained_form)
