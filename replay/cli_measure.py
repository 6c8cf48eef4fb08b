"""`simrl measure`: a profile of a real engine, where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simrl.errors import StoppedError

if TYPE_CHECKING:
    from replay.measure import Measured

NOISY = 0.1  # spread from which it is most of a prediction's error

EXAMPLE = (
    "Examples:  simrl measure --model path/to/model --device cuda --gpu h200 -o mine.parquet   |   "
    "simrl measure --model path/to/config_folder --dummy --device cuda --gpu h200 --tp 2 -o shape.parquet"
)


def measure(
    model: Annotated[
        Path, typer.Option(help="a folder with a config.json and safetensors; with --dummy the config is enough")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write (Parquet)")],
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="what the engine runs on")] = "cuda",
    gpu: Annotated[str | None, typer.Option(help="a100, h100, h200 …; by default what the device is called")] = None,
    dummy: Annotated[bool, typer.Option("--dummy", help="random weights: no files but the config are needed")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="of the weights: by default float32 on a CPU, else the model's own")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=2, help="as in vLLM: sequences of a pass at most")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=8, help="as in vLLM: tokens of a pass at most")] = 256,
    max_model_len: Annotated[int, typer.Option(min=128, help="as in vLLM: tokens of a sequence at most")] = 1024,
    block_size: Annotated[int, typer.Option(min=1, help="as in vLLM: tokens of a KV cache block")] = 32,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="size of the KV cache; by default what a whole batch needs (cpu), or fits (cuda)"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="of the sampling; greedy sampling (0) is faster")] = 1.0,
    draft_tokens: Annotated[
        int, typer.Option(min=0, help="profile the verification of drafts of so many tokens, too")
    ] = 0,
    neighbours: Annotated[
        int, typer.Option(min=0, help="engines that generate beside it, as they will where several share a host")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=2, help="how often each point is measured")] = 5,
    tolerance: Annotated[
        float, typer.Option(min=1e-3, help="expected error of interpolation at which refinement ends")
    ] = 0.02,
    budget: Annotated[float, typer.Option(min=1.0, help="seconds of measuring after which refinement ends")] = 60.0,
    start_deadline: Annotated[float, typer.Option(min=1.0, help="seconds that the engines have to start")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)")
    ] = False,
) -> None:
    """Measure the passes of a vLLM engine on this machine and write its profile.

    Whole turns of the loop that a replay runs are timed: decode steps, prompts, chunks of them, verifications, weight loads.
    What was measured is kept beside the output (.points.jsonl): a measurement that is stopped goes on when it is started again.
    """
    from replay.measured_profile import Wanted, measure_profile

    wanted = Wanted(
        model=model,
        device=device,
        gpu=gpu,
        dummy=dummy,
        dtype=dtype or ("float32" if device == "cpu" else "auto"),
        tp=tp,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_tokens=kv_cache_tokens,
        temperature=temperature,
        draft_tokens=draft_tokens,
        neighbours=neighbours,
        repeats=repeats,
        tolerance=tolerance,
        budget_s=budget,
        start_deadline_s=start_deadline,
    )
    journal = output.with_name(f"{output.name.removesuffix('.parquet')}.points.jsonl")
    try:
        measured = _with_progress(lambda tell: measure_profile(wanted, output, journal, tell))
    except KeyboardInterrupt:
        kept = f"what was measured is in {journal}; the same command goes on from there"
        raise StoppedError(f"interrupted; {kept if journal.exists() else 'nothing was measured yet'}") from None
    description = _describe(measured, output)
    if as_json:
        print(json.dumps(description, indent=1))
    else:
        _print(measured, output)


def _with_progress(work: Any) -> Any:
    """Shows what is measured, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("engine starts", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total or None)

        return work(tell)


def _describe(measured: Measured, output: Path) -> dict[str, Any]:
    t = measured.tables
    return {
        "file": str(output),
        "points": len(measured.points),
        "spread": measured.spread,
        "largest_spread": measured.largest_spread,
        "held_out_error": measured.held_out_error,
        "held_out": [
            {
                **held.shape._asdict(),
                "measured_s": held.measured_s,
                "predicted_s": held.predicted_s,
                "error": held.error,
            }
            for held in measured.held_out
        ],
        "between_passes_s": t.between_passes_s,
        "request_s": measured.request_s,
        "load_weights_s": measured.load_s,
        "drafts": measured.drafts.model_dump() if measured.drafts else None,
        "measuring_s": measured.measuring_s,
    }


def _print(measured: Measured, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    t = measured.tables
    console.print(
        f"{len(measured.points)} points in {measured.measuring_s:.0f} s. Between passes {t.between_passes_s * 1e3:.2f} ms, of "
        f"each request {measured.request_s * 1e3:.2f} ms."
    )
    console.print(noise(measured))
    loads = (
        "not measured: dummy weights have no files" if measured.load_s is None else f"{measured.load_s * 1e3:.1f} ms"
    )
    console.print(f"A load of weights: {loads}.")
    table = Table(
        "sequences", "tokens each", "prompts", "prompt tokens", "measured ms", "predicted ms", "error",
        title="Passes that the profile is not made from", title_justify="left",
    )  # fmt: skip
    for held in measured.held_out:
        s = held.shape
        table.add_row(
            str(s.sequences),
            f"{s.kv_tokens:.0f}",
            str(s.prompts),
            str(s.chunk_tokens),
            f"{held.measured_s * 1e3:.2f}",
            f"{held.predicted_s * 1e3:.2f}",
            f"{held.error:+.1%}",
        )
    console.print(table)
    console.print(f"Median error {measured.held_out_error:.1%}. Profile: {output}")


def noise(measured: Measured) -> str:
    """How far repeats of one point are from each other, and what that means where it is much."""
    said = f"Repeats of a point differ by {measured.spread:.1%} (the median of the points; IQR / median), at most by "
    said += f"{measured.largest_spread:.1%}"
    if measured.spread <= NOISY:
        return f"{said}."
    return (
        f"{said}: the machine was not quiet. No prediction of a single pass can be expected to be closer than that; sums of "
        "many come closer, the more so the longer was measured (--repeats, --budget)."
    )
