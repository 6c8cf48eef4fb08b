"""`simrl allocate`: which ranking group of a step gets how many rollout workers, by RhymeRL's two-tier scheduling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from simrl.errors import InputError


def allocate(
    trace: Annotated[Path, typer.Option(help="a trace (Parquet)")],
    profile: Annotated[Path, typer.Option(help="a profile of a worker (Parquet)")],
    workers: Annotated[int, typer.Option(min=1, help="rollout workers to hand out")],
    groups: Annotated[int, typer.Option(min=1, help="ranking groups (the paper: 8 or 16)")] = 8,
    epoch: Annotated[
        int | None, typer.Option(min=0, help="the epoch whose lengths are the history (default: the last but one)")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="the step to allocate (default: the first after the history)")
    ] = None,
    train_seconds: Annotated[float, typer.Option(min=0, help="training time of a step")] = 0.0,
    min_workers: Annotated[int, typer.Option(min=1, help="fewest workers of a group")] = 1,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="most workers of a group (default: what makes a step shortest)")
    ] = None,
    accept_length: Annotated[float, typer.Option(min=1, help="tokens a pass yields, with speculation")] = 1.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="responses that a worker decodes at a time")] = 256,
    precision_seconds: Annotated[float, typer.Option(min=0, help="where the search for the gradient ends")] = 1.0,
    alternation: Annotated[str, typer.Option(help="the second step: reversed (the paper) or pairing (the best)")] = (
        "reversed"
    ),
    optimum: Annotated[
        bool, typer.Option("--optimum", help="compare with the exact optimum too (minutes beyond 200 workers)")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to draw it (default: NAME-allocation.png, here)")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print JSON on stdout instead of tables; its keys are stable: groups (group, prompts, samples, "
            "representative_tokens, workers, equal_workers, predicted_s, equal_predicted_s, target_s), t0_s, gradient_s, "
            "exact_gradient_s, needed_workers, leftover_workers, two_step_sums, plans, growth_factor, notes and what was asked",
        ),
    ] = False,
) -> None:
    """RhymeRL's two-tier scheduling of a step: prompts ranked by history, more workers for groups with long responses."""
    from rich.console import Console

    from simrl.allocation_report import allocate_step, plot_allocation, print_allocation
    from simrl.profile import read_profile
    from simrl.trace import read_trace

    if alternation not in ("reversed", "pairing"):
        raise InputError(f"--alternation {alternation}: choose reversed or pairing")
    for option, value in (
        ("--train-seconds", train_seconds),
        ("--accept-length", accept_length),
        ("--precision-seconds", precision_seconds),
    ):
        if not math.isfinite(value):
            raise InputError(f"{option} {value}: give a finite number")
    allocation = allocate_step(
        read_trace(trace),
        read_profile(profile),
        workers,
        groups,
        epoch=epoch,
        step=step,
        train_s=train_seconds,
        min_workers=min_workers,
        max_workers=max_workers,
        accept_length=accept_length,
        max_num_seqs=max_num_seqs,
        pairing=alternation == "pairing",
        precision_s=precision_seconds,
        optimum=optimum,
    )
    picture = output or Path(f"{trace.stem}-allocation.png")
    plot_allocation(allocation, picture)
    if as_json:
        print(json.dumps({**allocation, "picture": str(picture)}, indent=1))
    else:
        print_allocation(allocation, Console())
        Console().print(f"Drawn in {picture}")
