"""`simrl profile …`: look at step times, derive them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from simrl.profile import TableProfile

app = typer.Typer(no_args_is_help=True, help="Profiles of step times: look at one, derive one.")
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of a table (its keys are stable)")]

SHOWN_SEQUENCES = (1, 8, 32, 64, 128, 256)
SHOWN_KV_TOKENS = (1024, 4096, 16384)
SHOWN_PREFILL = (512, 2048, 8192)


@app.command(epilog="Example:  simrl profile show profiles/qwen3-14b_h100_tp2.parquet")
def show(file: Annotated[Path, typer.Argument(help="a profile (Parquet)")], as_json: AsJson = False) -> None:
    """What a profile says: where it comes from, how far it reaches, and the seconds of some passes."""
    from simrl.profile import read_profile

    description = _describe(read_profile(file))
    if as_json:
        print(json.dumps(description, indent=1))
    else:
        _print(description)


@app.command(
    epilog="Examples:  simrl profile derive qwen3-14b --gpu h100 --tp 2 -o profiles/qwen3-14b_h100_tp2.parquet   |   "
    "simrl profile derive path/to/config.json --gpu a100 --source roofline -o mine.parquet"
)
def derive(
    model: Annotated[str, typer.Argument(help="a model that simrl knows, or a Hugging Face config.json")],
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200, h800, h20 or rtxpro6000; by roofline also b200, a40, a6000")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write (Parquet)")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="parameters of the source, such as memory_efficiency=0.7 of roofline"
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group")] = 1,
    source: Annotated[
        str,
        typer.Option(
            help="aiconfigurator (measured kernels; pip install 'simrl\\[aiconfigurator]'), roofline (data sheet), or what an "
            "installed package adds"
        ),
    ] = "aiconfigurator",
    as_json: AsJson = False,
) -> None:
    """Derive a profile from measured kernels, or from a data sheet alone.

    Nobody has measured h800 and h20: their kernels are those of h100 and h200, carried over by the data sheets."""
    from simrl.extensions import checked
    from simrl.hardware import gpu as gpu_named
    from simrl.hardware import model_shape
    from simrl.overrides import parse_override
    from simrl.profile import TableProfile, write_profile
    from simrl.profilers import PROFILERS

    if source not in PROFILERS:
        raise InputError(f"--source {source}{meant(source, PROFILERS)}: choose {' or '.join(PROFILERS)}")
    given = dict(parse_override(text) for text in settings or [])
    profile = checked(f"--source {source}", PROFILERS[source], model_shape(model), gpu_named(gpu), tp, **given)
    if not isinstance(profile, TableProfile):
        raise InputError(f"profiler {source}: its function gives {type(profile).__name__}; let it give a TableProfile")
    write_profile(profile, output)
    description = _describe(profile)
    if as_json:
        print(json.dumps({**description, "file": str(output)}, indent=1))
    else:
        _print(description)
        print(f"Written to {output}")


def _describe(profile: TableProfile) -> dict[str, Any]:
    t = profile.tables
    sequences = [n for n in SHOWN_SEQUENCES if n <= t.decode_sequences[-1]]
    contexts = [n for n in SHOWN_KV_TOKENS if n <= t.decode_kv_tokens[-1]] or [int(t.decode_kv_tokens[-1])]
    chunks = [n for n in SHOWN_PREFILL if n <= t.prefill_tokens[-1]] or [int(t.prefill_tokens[-1])]
    return {
        **profile.metadata.model_dump(),
        "largest_pass_tokens": int(t.dense_tokens[-1]),
        "most_sequences": int(t.decode_sequences[-1]),
        "longest_sequence_tokens": int(t.decode_kv_tokens[-1]),
        "between_passes_s": t.between_passes_s,
        "decode": [
            {"sequences": n, "kv_tokens": kv, "seconds": profile.decode_s(n, kv)} for n in sequences for kv in contexts
        ],
        "prefill": [{"tokens": n, "seconds": profile.prefill_s(n)} for n in chunks],
    }


def _print(d: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{d['model']} on {d['gpu']}, tp {d['tp']}[/bold]: {d['kind']}")
    console.print(f"Source: {d['source']}. Licence: {d['licence']}", markup=False)
    if d["notes"]:
        console.print(f"Notes: {d['notes']}", markup=False)
    console.print(
        f"Reaches {d['largest_pass_tokens']:,} tokens a pass, {d['most_sequences']:,} sequences, sequences of "
        f"{d['longest_sequence_tokens']:,} tokens. Between passes: {d['between_passes_s'] * 1e3:.3g} ms."
    )
    contexts = sorted({row["kv_tokens"] for row in d["decode"]})
    table = Table("sequences", *(f"{kv:,} tokens" for kv in contexts), title="Decode step [ms]", title_justify="left")
    for n in sorted({row["sequences"] for row in d["decode"]}):
        table.add_row(str(n), *(f"{row['seconds'] * 1e3:.2f}" for row in d["decode"] if row["sequences"] == n))
    console.print(table)
    prefill = ", ".join(f"{row['tokens']:,} tokens {row['seconds'] * 1e3:.1f} ms" for row in d["prefill"])
    console.print(f"Prefill of one prompt: {prefill}")
