"""`simrl measure`: the profile of a real engine on this machine."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from simrl.errors import StoppedError, refuse

if TYPE_CHECKING:
    from simrl_replay.measure import MeasuredEngine
    from simrl_replay.measured_tau import TauRow

OWN = ("output", "preset", "tau", "lengths", "workers", "responses", "acceptance", "as_json")
LENGTHS, WORKERS, RESPONSES = "128,256,512", "1,2", "16"  # of --tau
NOISY = 0.1  # from this spread on, it dominates a prediction's error

EXAMPLE = (
    "Examples:  simrl measure --model path/to/model --device cuda --gpu h200 -o mine.parquet   |   "
    "simrl measure --model path/to/config_folder --dummy --device cuda --gpu h200 --tp 2 -o shape.parquet   |   "
    "simrl measure --tau --model path/to/model --gpu h200 --lengths 1024,4096,8192 --workers 1,2,4 --responses 64 "
    "--max-model-len 8448 -o tau.csv"
)

Dummy = Annotated[
    bool, typer.Option("--dummy", help="random weights: the folder needs only a config.json")
]
StartDeadline = Annotated[
    float, typer.Option("--start-deadline", min=1.0, help="seconds for the engines to start")
]


@dataclass(frozen=True)
class Wanted:
    """The engine to measure, and how: the options of `simrl measure`. Names are vLLM's where it has
    one."""

    model: Annotated[
        Path,
        typer.Option(
            help="a folder with a config.json and safetensors; with --dummy the config is enough"
        ),
    ]
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="what the engine runs on")] = "cuda"
    gpu: Annotated[
        str | None, typer.Option(help="a100, h100, h200 …; default: the name of the device")
    ] = None
    dummy: Dummy = False
    dtype: Annotated[
        str | None,
        typer.Option(help="data type of the weights (default: float32 on a CPU, else the model's)"),
    ] = None
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group")] = 1
    max_num_seqs: Annotated[
        int, typer.Option(min=2, help="as in vLLM: maximum sequences in a pass")
    ] = 64
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=8, help="as in vLLM: maximum tokens in a pass")
    ] = 256
    max_model_len: Annotated[
        int, typer.Option(min=128, help="as in vLLM: maximum tokens of a sequence")
    ] = 1024
    block_size: Annotated[
        int, typer.Option(min=1, help="as in vLLM: tokens of a KV cache block")
    ] = 32
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="size of the KV cache (default: enough for a whole batch on cpu, all memory on cuda)",
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0.0, help="sampling temperature; greedy sampling (0) is faster")
    ] = 1.0
    draft_tokens: Annotated[
        int, typer.Option(min=0, help="also measure the verification of drafts of this length")
    ] = 0
    neighbours: Annotated[
        int,
        typer.Option(
            min=0, help="other engines that generate at the same time, as on a host with several"
        ),
    ] = 0
    repeats: Annotated[int, typer.Option(min=2, help="how often each point is measured")] = 5
    tolerance: Annotated[
        float,
        typer.Option(min=1e-3, help="expected error of interpolation at which refinement ends"),
    ] = 0.02
    budget_s: Annotated[
        float,
        typer.Option("--budget", min=1.0, help="seconds of measuring after which refinement ends"),
    ] = 60.0
    start_deadline_s: StartDeadline = 600.0


def measure(
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write (Parquet)")],
    preset: Annotated[
        Path | None,
        typer.Option(
            "--preset",
            help="also write the engine as a preset (TOML): the host's time beyond the kernels of this model's shipped profile",
        ),
    ] = None,
    tau: Annotated[
        bool,
        typer.Option(
            "--tau",
            help="measure RhymeRL's τ instead: seconds by length and workers, one engine a worker; the output is a table (CSV)",
        ),
    ] = False,
    lengths: Annotated[
        str, typer.Option("--lengths", help="with --tau: tokens of a response")
    ] = LENGTHS,
    workers: Annotated[
        str, typer.Option("--workers", help="with --tau: numbers of workers")
    ] = WORKERS,
    responses: Annotated[
        str,
        typer.Option("--responses", help="with --tau: responses of a group, on all its workers"),
    ] = RESPONSES,
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance",
            help="with --tau and --draft-tokens: probabilities at which a drafted token is accepted (0: no drafts)",
        ),
    ] = "",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)"),
    ] = False,
    **wanted: Any,
) -> None:
    """Measure the passes of a vLLM engine on this machine and write its profile; or with --tau, RhymeRL's τ.

    Times whole iterations of the loop that a replay runs: decode steps, prompts, chunked prompts,
    verifications, weight loads. Measured points are kept beside the output (.points.jsonl): an
    interrupted measurement continues when it is started again.
    """
    from simrl.study.progress import progress_bar
    from simrl_replay.measured_profile import measure_profile
    from simrl_replay.measured_tau import TauPlan, measure_tau, numbers_of

    journal = output.with_name(
        f"{output.name.removesuffix('.parquet').removesuffix('.csv')}.points.jsonl"
    )
    whole = {"--lengths": lengths, "--workers": workers, "--responses": responses}
    changed = [
        option
        for (option, text), usual in zip(whole.items(), (LENGTHS, WORKERS, RESPONSES), strict=True)
        if text != usual
    ] + ["--acceptance"] * bool(acceptance)
    refuse(
        (
            tau and preset,
            f"--preset {preset}: measure --tau writes a table alone; leave it out, or measure the preset without --tau",
        ),
        (
            changed and not tau,
            f"{' '.join(changed[:1])}: only measure --tau takes it; add --tau, or leave it out",
        ),
    )
    of_lengths, of_workers, of_responses = (
        [int(number) for number in numbers_of(option, text, int)] for option, text in whole.items()
    )
    accepted = numbers_of("--acceptance", acceptance, float)
    plan = TauPlan(of_lengths, of_workers, of_responses, accepted)
    try:
        with progress_bar() as bar:
            task = bar.add_task("engine starts", total=None)

            def tell(phase: str, done: int, total: int) -> None:
                bar.update(task, description=phase, completed=done, total=total or None)

            if tau:
                rows = measure_tau(Wanted(**wanted), plan, output, journal, tell)
            else:
                measured = measure_profile(Wanted(**wanted), output, journal, tell, preset)
    except KeyboardInterrupt:
        kept = f"measured points are in {journal}; the same command goes on from there"
        raise StoppedError(
            f"interrupted; {kept if journal.exists() else 'no point was measured yet'}"
        ) from None
    if tau:
        _print_tau(rows, output, as_json)
    elif as_json:
        print(json.dumps(_describe(measured, output), indent=1))
    else:
        _print(measured, output)


def _signature() -> inspect.Signature:
    """Return the signature of `measure` with the fields of `Wanted` as keywords, for typer."""
    hints, own = (
        get_type_hints(Wanted, include_extras=True),
        inspect.signature(measure, eval_str=True).parameters,
    )
    model, *others = (
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(Wanted)
    )
    output, *rest = (own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in OWN)
    return inspect.Signature([model, output, *others, *rest])


measure.__signature__ = _signature()  # type: ignore[attr-defined]
measure.__annotations__ = {name: each.annotation for name, each in _signature().parameters.items()}


def _describe(measured: MeasuredEngine, output: Path) -> dict[str, Any]:
    t = measured.tables
    return {
        "file": str(output),
        "points": len(measured.points),
        "spread": measured.spread,
        "largest_spread": measured.largest_spread,
        "held_out_error": measured.held_out_error,
        "held_out": [
            {
                **h.shape._asdict(),
                "measured_s": h.measured_s,
                "predicted_s": h.predicted_s,
                "error": h.error,
            }
            for h in measured.held_out
        ],
        "between_passes_s": t.between_passes_s,
        "request_s": measured.request_s,
        "load_weights_s": measured.load_s,
        "drafts": measured.drafts.model_dump() if measured.drafts else None,
        "measuring_s": measured.measuring_s,
    }


def _print_tau(rows: Sequence[TauRow], output: Path, as_json: bool) -> None:
    from simrl.show.text import Screen, framed_table

    if as_json:
        print(json.dumps({"file": str(output), "rows": [row._asdict() for row in rows]}, indent=1))
        return
    console = Screen()
    heads = ("tokens", "workers", "responses", "tokens a pass", "seconds", "range of the repeats")
    cells = [
        (
            f"{row.length_tokens:,}",
            row.workers,
            f"{row.responses:,}",
            f"{row.accept_length:.2f}",
            f"{row.seconds:.3f}",
            f"{row.spread:.0%}",
        )
        for row in rows
    ]
    console.print(framed_table(heads, cells, "τ"))
    console.print(
        f"Table: {output}. Read it with simrl allocate --tau {output}, or profile.tau={output}"
    )


def _print(measured: MeasuredEngine, output: Path) -> None:
    from simrl.show.text import Screen, framed_table

    console = Screen()
    t = measured.tables
    console.print(
        f"{len(measured.points)} points in {measured.measuring_s:.0f} s. Between passes {t.between_passes_s * 1e3:.2f} ms, of "
        f"each request {measured.request_s * 1e3:.2f} ms."
    )
    console.print(noise(measured))
    loads = (
        "not measured: dummy weights have no files"
        if measured.load_s is None
        else f"{measured.load_s * 1e3:.1f} ms"
    )
    console.print(f"A load of weights: {loads}.")
    heads = (
        "sequences",
        "tokens each",
        "prompts",
        "prompt tokens",
        "measured ms",
        "predicted ms",
        "error",
    )
    rows = [
        (
            held.shape.sequences,
            f"{held.shape.kv_tokens:.0f}",
            held.shape.prompts,
            held.shape.chunk_tokens,
            f"{held.measured_s * 1e3:.2f}",
            f"{held.predicted_s * 1e3:.2f}",
            f"{held.error:+.1%}",
        )
        for held in measured.held_out
    ]
    console.print(framed_table(heads, rows, "Passes that the profile is not made from"))
    console.print(f"Median error {measured.held_out_error:.1%}. Profile: {output}")


def noise(measured: MeasuredEngine) -> str:
    """Describe how far repeats of a point differ, and the effect on predictions if they differ
    much."""
    differ = (
        f"Repeats of a point differ by {measured.spread:.1%} (the median of the points; IQR / median), at most by "
        f"{measured.largest_spread:.1%}"
    )
    if measured.spread <= NOISY:
        return f"{differ}."
    return (
        f"{differ}: the machine was not quiet. No prediction of a single pass can be expected to be closer than that; sums of "
        "many come closer, the more so the longer was measured (--repeats, --budget)."
    )
