"""`simrl acceptance`: what drafting from texts would give on a recorded run, and whether it pays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from simrl.profile import TableProfile
    from simrl.speculation.windows import Window


def acceptance(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="a trace with token ids (Parquet)")],
    drafter: Annotated[
        str,
        typer.Option(
            help="history-paper, history-code (HistoSpec's two variants), siblings (of the same group) or ngram (own text)"
        ),
    ] = "history-paper",
    window: Annotated[
        str | None,
        typer.Option(help="aimd, mimd or a number of tokens (default: aimd, the paper's; for history-code mimd)"),
    ] = None,
    epochs_back: Annotated[
        int | None, typer.Option(min=1, help="history: epochs that are drafted from (default: 1)")
    ] = None,
    siblings_known: Annotated[
        str | None,
        typer.Option(help="siblings: lockstep (all run side by side, the default) or finished (all others are over)"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="step times (Parquet), to tell at which batch sizes it pays")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="or a model that simrl knows, or a config.json: step times by the roofline")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="with --model: a100, h100, h200 or rtxpro6000")] = None,
    tp: Annotated[int, typer.Option(min=1, help="with --model: GPUs of a tensor-parallel group")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to draw it (default: NAME-acceptance.png, here)")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print JSON on stdout instead of tables; its keys are stable: drafter, history, acceptance_rate, "
            "speculation_rate, accept_length, by_epoch, hit_lengths, by_response, similarity, pays, run_model, "
            "run_model_accept_length, window, "
            "responses, responses_with_drafts, tokens_with_drafts, trace, picture",
        ),
    ] = False,
) -> None:
    """What drafts from history, siblings or a response's own text would give on a recorded run, and whether they pay.

    A drafted token is accepted if it is the recorded one. Printed too: hit lengths, RhymeRL's Fig. 6, a fitted model.
    """
    from rich.console import Console

    from simrl.acceptance_report import DRAFTERS, measure, plot_report, print_report, report
    from simrl.trace import read_trace

    chosen = next((name for name in DRAFTERS if name == drafter), None)
    if chosen is None:
        raise InputError(f"--drafter {drafter}{meant(drafter, DRAFTERS)}: choose one of {', '.join(DRAFTERS)}")
    if epochs_back is not None and not chosen.startswith("history"):
        raise InputError(f"--epochs-back {epochs_back}: only history drafts from epochs; {drafter} does not")
    if siblings_known is not None and chosen != "siblings":
        raise InputError(f"--siblings-known {siblings_known}: only the drafter siblings asks for it")
    if siblings_known not in (None, "lockstep", "finished"):
        raise InputError(f"--siblings-known {siblings_known}: choose lockstep or finished")
    rule, times = _window(window), _profile(profile, model, gpu, tp)
    measured = measure(
        read_trace(trace),
        chosen,
        rule,
        epochs_back or 1,
        "finished" if siblings_known == "finished" else "lockstep",
        threads=os.cpu_count() or 1,
    )
    description = report(measured, times)
    picture = output or Path(f"{trace.stem}-acceptance.png")
    plot_report(description, picture)
    if as_json:
        print(json.dumps({**description, "picture": str(picture)}, indent=1))
    else:
        print_report(description, Console())
        Console().print(f"Drawn in {picture}")


def _window(text: str | None) -> Window | None:
    from simrl.speculation.drafter import MOST_DRAFT_TOKENS
    from simrl.speculation.windows import Aimd, Fixed, Mimd

    if text is None:
        return None
    if text in ("aimd", "mimd"):
        return Aimd() if text == "aimd" else Mimd()
    if not text.isdecimal() or not 1 <= int(text) <= MOST_DRAFT_TOKENS:
        raise InputError(f"--window {text}: choose aimd, mimd or a number of tokens from 1 to {MOST_DRAFT_TOKENS}")
    return Fixed(tokens=int(text))


def _profile(file: Path | None, model: str | None, gpu: str | None, tp: int) -> TableProfile | None:
    from simrl.hardware import gpu as gpu_named
    from simrl.hardware import model_shape
    from simrl.profile import read_profile
    from simrl.profilers.roofline import roofline_profile

    if file is not None:
        if model or gpu:
            raise InputError("--profile and --model or --gpu: a profile has its own; give one of them")
        return read_profile(file)
    if model is None and gpu is None:
        return None
    if model is None or gpu is None:
        raise InputError(
            f"--{'gpu' if model is None else 'model'} alone: step times need --model and --gpu, or --profile"
        )
    return roofline_profile(model_shape(model), gpu_named(gpu), tp)
