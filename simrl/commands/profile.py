"""`simrl profile …`: list the shipped step times, look at some, derive them, import them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.view import DataView
from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from rich.console import Console

    from simrl.profile.hardware import Gpu
    from simrl.profile.model_shape import ModelShape
    from simrl.profile.profile import TableProfile


def listed() -> DataView:
    """List the shipped profiles in a table of models by GPUs, with their layouts and precisions.

    Other layouts and precisions of these models are extrapolated from the nearest one, and marked.
    """
    from simrl.profile.shipped import layouts

    return DataView(
        [layout.model_dump(exclude={"kind", "source"}) for layout in layouts()],
        _print_list,
        width=100,
    )


def _print_list(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    from simrl.profile.metadata import split_words

    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        of_precision = cells.setdefault((row["model"], row["gpu"]), {})
        of_precision.setdefault(row.get("precision", ""), []).append(split_words(row))
    gpus = sorted({gpu for _, gpu in cells})
    table = Table("", *gpus, box=None, pad_edge=False)
    for model in dict.fromkeys(model for model, _ in cells):
        table.add_row(model, *(_layouts(cells.get((model, gpu), {})) for gpu in gpus))
    console.print(table)


def _layouts(of_precision: dict[str, list[str]]) -> str:
    """Return layouts by precision in a few words, `tp 1 2 4, fp8 tp 1`; bfloat16 has no word."""
    lines = []
    for precision, layouts in sorted(of_precision.items()):
        alone = [words.removeprefix("tp ") for words in layouts if "," not in words]
        words = [
            *[f"tp {' '.join(alone)}"] * bool(alone),
            *(layout.replace(" ", "").replace(",", " ") for layout in layouts if "," in layout),
        ]
        lines += [f"{precision}:"] * bool(precision) + words
    return "\n".join(lines)


def show(file: Annotated[Path, typer.Argument(help="a profile (Parquet)")]) -> DataView:
    """Describe a profile: where it comes from, its range, and the seconds of some passes."""
    from simrl.profile.profile import read_profile

    return _view(_description(read_profile(file)))


def names() -> DataView:
    """List the models and the GPUs that simrl knows by name."""
    from simrl.profile.hardware import GPUS
    from simrl.profile.model_shape import MODELS

    known = {"models": list(MODELS), "gpus": list(GPUS)}
    lines = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in known.items())
    return DataView(known, lambda _, console: console.print(lines, highlight=False), width=100)


def derive(
    model: Annotated[
        str, typer.Argument(help="a model that simrl knows, or a Hugging Face config.json")
    ],
    gpu: Annotated[
        str,
        typer.Option(
            help="a name (simrl profile names), or by roofline also a data sheet or its TOML file; measured are a100, h100, "
            "h200, b200, gb200 and rtxpro6000, and others are estimated from them"
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="parameters of the source, such as memory_efficiency=0.7 of roofline",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="the profile to write (Parquet); the default name has all of the options below",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a tensor-parallel group")] = 1,
    dp: Annotated[
        int, typer.Option(min=1, help="attention ranks of a mixture of experts, each of tp GPUs")
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            help="GPUs that divide the experts: tp × dp, or 1 (each GPU has a part of every expert)",
        ),
    ] = 1,
    precision: Annotated[
        str,
        typer.Option(
            help="precision of the weights: bf16, fp8, fp8-block, nvfp4, int4, or (gpt-oss) w4a16_mxfp4 and w4a8_mxfp4_mxfp8"
        ),
    ] = "bf16",
    kv_precision: Annotated[
        str, typer.Option(help="precision of the KV cache: bf16 or fp8")
    ] = "bf16",
    routing: Annotated[
        str | None,
        typer.Option(
            help="how tokens spread over experts: balanced, power law 1.01 or power law 1.2 (default)"
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            help="aiconfigurator (measured kernels; pip install aiconfigurator), aisimulate (newer ones, for "
            "fp8-block; pip install aisimulate), roofline (data sheet), or the profiler of an installed package"
        ),
    ] = "aiconfigurator",
) -> DataView:
    """Derive a profile from measured kernels, or from a data sheet alone.

    Kernels that were not measured (on h800, say) are estimated from the nearest ones by the data
    sheets, and the source says so.
    """
    from simrl.extensions import checked
    from simrl.profile.hardware import gpu as gpu_named
    from simrl.profile.model_shape import model_shape, understood
    from simrl.profile.profile import TableProfile
    from simrl.profile.profilers.sources import PROFILERS, require_weights_fit
    from simrl.scenario.yaml_text import parse_override

    if source not in PROFILERS:
        raise InputError(
            f"--source {source}{meant(source, PROFILERS)}: choose {' or '.join(PROFILERS)}"
        )
    device = gpu_named(parse_override(f"gpu={gpu}")[1] if gpu.startswith("{") else gpu)
    setup = {
        "dp": dp,
        "ep": ep,
        "precision": precision,
        "kv_precision": kv_precision,
        "routing": routing,
    }
    parameters = dict(parse_override(text) for text in settings or []) | {
        key: value for key, value in setup.items() if value not in (1, "bf16", None)
    }
    shape = model_shape(model)
    require_weights_fit(shape, device, tp, dp, ep, precision)
    profile = checked(f"--source {source}", PROFILERS[source], shape, device, tp, **parameters)
    if not isinstance(profile, TableProfile):
        raise InputError(
            f"profiler {source}: its function gives {type(profile).__name__}; let it give a TableProfile"
        )
    return _written(profile, shape, device, output, understood(model))


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            help="the profiler's folder of a GPU and model: meta.yaml and tp1/ … with dense.csv, attention.csv, "
            "per_sequence.csv, and where they are, moe.csv and skew.csv"
        ),
    ],
    gpu: Annotated[
        str, typer.Option(help="the GPU that was profiled, a name of `simrl profile names`")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="a config.json, if simrl does not know the model by the name in meta.yaml"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="the profile to write (Parquet); default: a name with all of the split",
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="GPUs of a tensor-parallel group: the folder tp1, tp2 …")
    ] = 1,
    dp: Annotated[
        int, typer.Option(min=1, help="attention ranks of a mixture of experts, each of tp GPUs")
    ] = 1,
    ep: Annotated[
        int, typer.Option(min=1, help="GPUs that divide the experts: tp × dp, or 1 (estimated)")
    ] = 1,
    link_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            min=1, help="bandwidth of collectives; default: 70 % of the data sheet's link"
        ),
    ] = None,
    link_latency_s: Annotated[
        float, typer.Option(min=0, help="latency of each step of a ring (nccl-tests measure both)")
    ] = 3e-6,
    between_passes_s: Annotated[
        float,
        typer.Option(min=0, help="the host's pause between passes, which kernels do not show"),
    ] = 0.0,
) -> DataView:
    """Import kernel times that LLMServingSim's profiler measured on your GPU (`python -m profiler`, for vLLM).

    A mixture of experts on several attention ranks has its experts and their exchange apart. The
    tables hold no communication: it is added by the link.
    """
    from simrl.profile.hardware import gpu as gpu_named
    from simrl.profile.model_shape import model_shape
    from simrl.profile.profilers.kernel_tables import compose_kernel_tables, read_meta
    from simrl.profile.roofline import Link

    device, shape = gpu_named(gpu), model_shape(model or str(read_meta(folder, tp)[1]["model"]))
    link = Link(link_bytes_per_s or device.bytes_per_s_among(tp * dp), link_latency_s)
    profile = compose_kernel_tables(folder, shape, device, tp, link, between_passes_s, dp, ep)
    return _written(profile, shape, device, output)


def _written(
    profile: TableProfile, shape: ModelShape, gpu: Gpu, output: Path | None, config: str = ""
) -> DataView:
    """Write a profile, impossible times lifted, and return its description with its doubts."""
    from simrl.profile.doubt import doubted
    from simrl.profile.profile import write_profile
    from simrl.profile.shipped import file_name

    doubts: list[str] = []
    if profile.metadata.kind != "measured":  # passes of an engine are what they are
        profile, doubts = doubted(profile, shape, gpu)
    output = output or Path(file_name(profile.metadata))
    write_profile(profile, output)
    return _view(
        _description(profile) | ({"model_config": config} if config else {}),
        more={"file": str(output), "doubts": doubts},
        notes=[*(f"In doubt: {line}" for line in doubts), f"Written to {output}"],
    )


def _view(description: dict[str, Any], **also: Any) -> DataView:
    return DataView(description, _print, width=80, **also)


def _print(d: dict[str, Any], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from simrl.profile.metadata import split_words

    words = [f"{d['precision']} weights"] if "precision" in d else []
    words += [f"{d['kv_precision']} KV cache"] if "kv_precision" in d else []
    words += [f"routing {d['routing']}"] if "routing" in d else []
    of = f" ({', '.join(words)})" if words else ""
    console.print(
        Text.assemble(
            (f"{d['model']} on {d['gpu']}, {split_words(d)}", "bold"), f"{of}: {d['kind']}"
        )
    )
    console.print(f"Source: {d['source']}. Licence: {d['licence']}", markup=False)
    if "model_config" in d:
        console.print(f"Model's config: {d['model_config']}", markup=False)
    if d["notes"]:
        console.print(f"Notes: {d['notes']}", markup=False)
    console.print(
        f"Reaches {d['largest_pass_tokens']:,} tokens a pass, {d['most_sequences']:,} sequences, sequences of "
        f"{d['longest_sequence_tokens']:,} tokens. Between passes: {d['between_passes_s'] * 1e3:.3g} ms."
    )
    if "layer_s" in d:
        console.print(
            f"One token takes {d['token_s'] * 1e3:.3g} ms, {d['layer_s'] * 1e6:.3g} µs a layer, of which reading its weights "
            f"takes {d['weights_s'] / d['token_s']:.0%}: the rest is a floor of launches and latencies."
        )
    seconds = {(row["sequences"], row["kv_tokens"]): row["seconds"] for row in d["decode"]}
    sequences, contexts = (sorted(set(axis)) for axis in zip(*seconds, strict=True))
    table = Table(
        "sequences",
        *(f"{kv:,} tokens" for kv in contexts),
        title="Decode step [ms]",
        title_justify="left",
    )
    for n in sequences:
        table.add_row(str(n), *(f"{seconds[n, kv] * 1e3:.2f}" for kv in contexts))
    console.print(table)
    prefill = ", ".join(
        f"{row['tokens']:,} tokens {row['seconds'] * 1e3:.1f} ms" for row in d["prefill"]
    )
    console.print(f"Prefill of one prompt: {prefill}")


def _description(profile: TableProfile) -> dict[str, Any]:
    t = profile.even
    sequences, contexts, chunks = (
        [n for n in shown if n <= axis[-1]] or [int(axis[-1])]
        for shown, axis in (
            ((1, 8, 32, 64, 128, 256), t.decode_sequences),
            ((1024, 4096, 16384), t.decode_kv_tokens),
            ((512, 2048, 8192), t.prefill_tokens),
        )
    )
    return {
        **profile.metadata.model_dump(),
        **_floor(profile),
        "largest_pass_tokens": int(t.dense_tokens[-1]),
        "most_sequences": int(t.decode_sequences[-1]),
        "longest_sequence_tokens": int(t.decode_kv_tokens[-1]),
        "between_passes_s": t.between_passes_s,
        "decode": [
            {"sequences": n, "kv_tokens": kv, "seconds": profile.decode_s(n, kv)}
            for n in sequences
            for kv in contexts
        ],
        "prefill": [{"tokens": n, "seconds": profile.prefill_s(n)} for n in chunks],
    }


def _floor(profile: TableProfile) -> dict[str, float]:
    """Return the seconds of one token, in all and a layer, and what reading its weights takes at
    the memory's full bandwidth; nothing for unknown models and GPUs, and for several attention
    ranks."""
    from simrl.profile.hardware import GPUS
    from simrl.profile.model_shape import MODELS
    from simrl.profile.precision import EXPERTS_ALONE, WEIGHT_BYTES

    m = profile.metadata
    if m.model not in MODELS or m.gpu not in GPUS or m.dp > 1:
        return {}
    shape, token_s = MODELS[m.model], profile.decode_s(1, 1)
    routed = shape.expert_layers * shape.experts_per_token * shape.expert_parameters
    converted = routed if m.precision in EXPERTS_ALONE else shape.active_body_parameters
    weights = WEIGHT_BYTES[m.precision] * converted + 2 * (shape.active_parameters - converted)
    weights_s = weights / m.tp / GPUS[m.gpu].memory_bytes_per_s
    return {"token_s": token_s, "layer_s": token_s / shape.layers, "weights_s": weights_s}
