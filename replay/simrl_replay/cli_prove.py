"""`simrl prove`: everything predicted, then measured, on one machine in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from simrl.errors import InputError, StoppedError

EXAMPLE = (
    "Examples:  simrl prove   |   simrl prove --gpu h200 --minutes 20 -o results/h200   |   simrl prove --device cpu   |   "
    "simrl prove --gpus 8 --ray local"
)


def prove(
    minutes: Annotated[
        float,
        typer.Option(min=1.0, help="minutes for everything; steps that do not fit are left out"),
    ] = 9.0,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option(help="cuda, or cpu to rehearse it with models of two layers"),
    ] = "cuda",
    gpu: Annotated[
        str | None, typer.Option(help="a100, h100, h200 …; default: the name of the device")
    ] = None,
    graphs: Annotated[
        Literal["full", "decode", "compiled", "none"],
        typer.Option(
            help="CUDA graphs: full (FlashAttention 3), decode, compiled (vLLM's own; starts are slow), none"
        ),
    ] = "full",
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            help="GPUs of this node, one for each engine; above 1 adds tp 2, more engines, a weight sync",
        ),
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            help="run the engines of one replay on this Ray cluster: auto, HOST:PORT, or local"
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder of the page and of all results")
    ] = Path("results/prove"),
) -> None:
    """Predict passes, replays and a whole step blind, measure them on this machine, and write a
    page.

    Needs vLLM and a GPU, and no network, weights or data: models are random, of the shape of
    Qwen3-0.6B and 8B. Each step's result is written before the next begins, so the page exists even
    after a short time or Ctrl-C.
    """
    from simrl.profile.hardware import GPUS
    from simrl_replay.prove import Proof, gpu_here
    from simrl_replay.vllm_adapter import vllm_version

    if ray is not None and gpus == 1 and device == "cuda":
        raise InputError(
            f"--ray {ray}: one GPU needs no cluster; add --gpus, or rehearse with --device cpu"
        )
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(
            f"--output {output}: is there already, perhaps an earlier proof; name a new folder"
        )
    vllm_version()
    name = gpu or gpu_here(device)
    if name not in GPUS:
        raise InputError(f"--gpu {name}: unknown; choose the most similar of {', '.join(GPUS)}")
    if ray is not None:
        from simrl.study.executors import connect

        connect(ray)
    proof = Proof(
        device,
        name,
        minutes,
        output,
        lambda line: print(line, flush=True),
        graphs,
        gpus=gpus,
        ray=ray,
    )
    try:
        proof.run()
    finally:
        print(f"The page: {output / 'prove.md'}")
    if not any("measured" in step or "passes" in step for step in proof.record["steps"]):
        raise StoppedError(
            f"nothing was measured in {minutes:g} minutes ({output / 'prove.md'}); give more --minutes"
        )


if __name__ == "__main__":  # where simrl is not installed, but on the path
    from simrl.commands.cli import main

    alone = typer.Typer()
    alone.command()(prove)
    main(alone)
