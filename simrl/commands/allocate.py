"""`simrl allocate`: how many rollout workers each ranking group of a step gets, by RhymeRL's
two-tier scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from simrl.commands.options import Picture
from simrl.commands.view import DataView, View, drawn
from simrl.errors import refuse


def allocate(
    trace: Annotated[Path, typer.Option(help="a trace (Parquet)")],
    profile: Annotated[Path, typer.Option(help="a profile of a worker (Parquet)")],
    workers: Annotated[int, typer.Option(min=1, help="rollout workers to allocate")],
    tau: Annotated[
        Path | None,
        typer.Option(
            help="a measured table of τ (CSV, as simrl measure --tau writes it), in place of τ computed from the profile"
        ),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="ranking groups (the paper: 8 or 16)")] = 8,
    epoch: Annotated[
        int | None,
        typer.Option(
            min=0, help="the epoch whose lengths are the history (default: the last but one)"
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="the step to allocate (default: the first after the history)"),
    ] = None,
    train_seconds: Annotated[float, typer.Option(min=0, help="training time of a step")] = 0.0,
    min_workers: Annotated[int, typer.Option(min=1, help="minimum workers of a group")] = 1,
    max_workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="maximum workers of a group (default: the number with the shortest step)"
        ),
    ] = None,
    accept_length: Annotated[
        float, typer.Option(min=1, help="tokens per forward pass, with speculation")
    ] = 1.0,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="responses that a worker decodes at a time")
    ] = 256,
    precision_seconds: Annotated[
        float, typer.Option(min=0, help="precision of the search for the gradient")
    ] = 1.0,
    alternation: Annotated[
        str,
        typer.Option(
            help="the second step: reversed (the paper), pairing (the best) or none (as the first)"
        ),
    ] = "reversed",
    representative: Annotated[
        str,
        typer.Option(help="a group's length: the mean of its responses or of its prompts' medians"),
    ] = "responses",
    sub_batches: Annotated[
        str,
        typer.Option(
            help="what the workers of a group are dealt: whole prompts (as rhymerl) or single responses"
        ),
    ] = "prompts",
    optimum: Annotated[
        bool,
        typer.Option(
            "--optimum",
            help="also compare with the exact optimum (takes minutes for over 200 workers)",
        ),
    ] = False,
    picture: Picture = None,
) -> View:
    """Allocate the workers of a step by RhymeRL's two tiers: prompts ranked by history, more
    workers for groups with long responses."""
    from simrl.analysis.allocation import allocate_step
    from simrl.dispatch.allocation import Alternation, Representative
    from simrl.dispatch.histopipe import SubBatches
    from simrl.profile.profile import read_profile
    from simrl.profile.tau import read_tau
    from simrl.show.figures.allocation import allocation_figure
    from simrl.show.tables.allocation import print_allocation
    from simrl.trace.trace import read_trace

    refuse(
        (
            alternation not in get_args(Alternation),
            f"--alternation {alternation}: choose {' or '.join(get_args(Alternation))}",
        ),
        (
            representative not in get_args(Representative),
            f"--representative {representative}: choose {' or '.join(get_args(Representative))}",
        ),
        (
            sub_batches not in get_args(SubBatches),
            f"--sub-batches {sub_batches}: choose {' or '.join(get_args(SubBatches))}",
        ),
    )
    of_worker = read_profile(profile)
    allocation = allocate_step(
        read_trace(trace),
        of_worker,
        workers,
        groups,
        epoch=epoch,
        step=step,
        train_s=train_seconds,
        min_workers=min_workers,
        max_workers=max_workers,
        accept_length=accept_length,
        max_num_seqs=max_num_seqs,
        alternation=cast(Alternation, alternation),
        representative=cast(Representative, representative),
        sub_batches=cast(SubBatches, sub_batches),
        precision_s=precision_seconds,
        optimum=optimum,
        tau=read_tau(tau, **of_worker.metadata.model_dump(include={"model", "gpu", "tp"}))
        if tau
        else None,
    )
    view = DataView(allocation, print_allocation, width=80)
    return drawn(
        view, picture, f"{trace.stem}-allocation.png", lambda: allocation_figure(allocation)
    )
