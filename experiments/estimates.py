"""Errors of estimated step times, by leaving measured kernels out (docs/profiles.md, "Beyond a profile").

    python experiments/estimates.py            print the errors over the shipped profiles, and as recorded of databases
    python experiments/estimates.py --write    and write them to simrl/profile/estimates.toml, which answers name
    python experiments/estimates.py --database derive more profiles from the installed databases (aiconfigurator and
                                               aisimulate), compare them, and write experiments/estimates.csv

Each shipped layout is estimated from the nearest other one of each kind (another split, precision, GPU, model; the
roofline) and compared at four passes: decoding 1 × 1k, 64 × 1k and 256 × 4k, prefill of 2k. Left out are the profiles
that the roofline's constants were set on, as what is estimated, and GPUs whose kernels nobody measured.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile.derived_layouts import ROOFLINE, difference, in_layout, nearest
from simrl.profile.hardware import GPUS
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.shipped import PROFILES, file_name, layouts

SET_ON = (  # simrl.profile.roofline's constants
    "qwen3-30b-a3b_h100_tp1",
    "qwen3-30b-a3b_h100_tp1_dp8_ep8",
    "qwen3-8b_h100_tp1",
    "qwen3-8b_h100_tp4",
    "deepseek-v3_h200_tp8_ep8_fp8-block",
    "qwen3.5-35b-a3b_h100_tp4",
)
TRANSFORMED = ("h800", "h20")
KINDS = ("another split", "another precision", "another GPU", "another model")
BACKEND = "another back-end"
WORDS = "experts", "dense"
RECORD = Path(__file__).with_suffix(".csv")
SHIPPED = "_shipped"
HEADER = """# How far estimates of step times were off, in percent, by what differs from the nearest profile
# (`simrl.profile.derived_layouts`): over layouts of the databases (experiments/estimates.csv), and
# over the shipped profiles; positive: too slow. Made by `python experiments/estimates.py --write`.
"""
Errors = dict[tuple[str, str], list[NDArray[np.float64]]]


@cache
def shipped(name: str) -> TableProfile:
    """Return a shipped profile by the name of its file."""
    return read_profile(PROFILES / name)


def seconds(profile: TableProfile) -> NDArray[np.float64]:
    """Return the seconds of the four passes."""
    decoded = [profile.decode_s(n, kv) for n, kv in ((1, 1024), (64, 1024), (256, 4096))]
    return np.array([*decoded, profile.prefill_s(2048)])


def estimates(
    layout: ProfileMetadata, there: list[ProfileMetadata]
) -> Iterator[tuple[str, ProfileMetadata | None]]:
    """Yield each kind of estimate of a layout, with the nearest layout it is made from."""
    shape, gpu = MODELS[layout.model], GPUS[layout.gpu]
    for kind in KINDS:
        others = [
            each for each in there if each != layout and difference(each, layout, shape) == kind
        ]
        if kind == "another precision":  # and of no other GPU or model
            others = [each for each in others if each.gpu == layout.gpu]
        if (base := nearest(layout, shape, gpu, others)) is not None:
            yield kind, base
    yield ROOFLINE, None


def errors() -> Errors:
    """Return the errors of the shipped layouts, by kind of estimate and of model."""
    by_kind: Errors = defaultdict(list)
    there = [layout for layout in layouts() if layout.gpu not in TRANSFORMED]
    for layout in there:
        name = file_name(layout)
        if name.removesuffix(".parquet") in SET_ON:
            continue
        shape, gpu = MODELS[layout.model], GPUS[layout.gpu]
        for kind, base in estimates(layout, there):
            if base is None:
                split = {"dp": layout.dp, "ep": layout.ep, "precision": layout.precision}
                estimate = roofline_profile(shape, gpu, layout.tp, between_passes_s=0.0, **split)
            else:
                estimate = in_layout(shipped(file_name(base)), layout, shape, gpu)
            off = seconds(estimate) / seconds(shipped(name)) - 1
            by_kind[kind, WORDS[not shape.experts]].append(off)
    return by_kind


def summary(of: list[NDArray[np.float64]]) -> dict[str, int]:
    """Return the number of layouts, and errors in percent: median size, median, 90 % within, worst."""
    off = 100 * np.array(of).ravel()
    figures = {
        "median": np.median(abs(off)),
        "sign": np.median(off),
        "ninety": np.quantile(abs(off), 0.9),
        "worst": off[abs(off).argmax()],
    }
    return {"layouts": len(of)} | {key: round(float(value)) for key, value in figures.items()}


def counted() -> dict[str, dict[str, dict[str, int]]]:
    """Return what estimates.toml has: the recorded errors over the databases, and over the shipped
    profiles, none of which has another back-end."""
    figures = recorded()
    for (kind, word), off in errors().items():
        figures[kind][word + SHIPPED] = summary(off)
    return figures


def text() -> str:
    """Return the text of estimates.toml."""
    figures, lines = counted(), [HEADER]
    for kind in (*KINDS, ROOFLINE, BACKEND):
        lines.append(f'["{kind}"]')
        for word in sorted(figures[kind]):
            values = ", ".join(f"{key} = {value}" for key, value in figures[kind][word].items())
            lines.append(f"{word} = {{ {values} }}")
        lines.append("")
    return "\n".join(lines)


# What the databases are asked for.
BACKENDS = ("vllm", "sglang", "trtllm")
OF_GPUS = ("h100", "h200", "b200", "gb200", "a100", "rtxpro6000")
PRECISIONS = ("bf16", "fp8", "fp8-block", "nvfp4", "w4a16_mxfp4")
DENSE = ("qwen2.5-1.5b", "qwen3-8b", "qwen3-32b", "llama-3.3-70b")
MIXTURES = (
    *(
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "deepseek-v3",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "minimax-m2.5",
    ),
    *("qwen3.5-35b-a3b", "kimi-k2", "glm-4.5-air", "nemotron-3-nano-30b-a3b"),
)
SPLITS = {
    DENSE: ((1, 1, 1), (2, 1, 1), (4, 1, 1)),
    MIXTURES: ((1, 1, 1), (2, 1, 2), (4, 1, 4), (4, 1, 1), (8, 1, 8), (1, 8, 8)),
}


def database() -> Errors:
    """Return the errors of the layouts that the databases have, by kind of estimate and of
    model."""
    from simrl.profile.profilers import aiconfigurator
    from simrl.profile.profilers.setups import EngineSetup

    measured: dict[tuple[str, str], tuple[ProfileMetadata, TableProfile]] = {}
    for models, splits in SPLITS.items():
        for backend, gpu, model, precision, split in product(
            BACKENDS, OF_GPUS, models, PRECISIONS, splits
        ):
            if (precision == "w4a16_mxfp4") != model.startswith("gpt-oss"):
                continue
            package = "aisimulate" if precision == "fp8-block" else "aiconfigurator"
            setup = EngineSetup(*split, precision, backend=backend, package=package)
            try:
                profile = aiconfigurator.derive(MODELS[model], gpu, setup)
            except (InputError, ValueError, RuntimeError) as error:
                print(f"{backend} {model} {gpu} {split} {precision}: {str(error)[:90]}")
                continue
            layout = profile.metadata
            measured[backend, file_name(layout)] = layout, profile
    by_kind: Errors = defaultdict(list)
    for (backend, name), (layout, profile) in measured.items():
        if backend == "vllm" and name.removesuffix(".parquet") in SET_ON:
            continue
        shape, gpu = MODELS[layout.model], GPUS[layout.gpu]
        of_backend = [each for (one, _), (each, _) in measured.items() if one == backend]
        split = {"dp": layout.dp, "ep": layout.ep, "precision": layout.precision}
        estimated = [
            (kind, in_layout(measured[backend, file_name(base)][1], layout, shape, gpu))
            for kind, base in estimates(layout, of_backend)
            if base is not None
        ]
        estimated += [
            (BACKEND, measured[one, name][1])
            for one in BACKENDS
            if one != backend and (one, name) in measured
        ]
        estimated.append(
            (ROOFLINE, roofline_profile(shape, gpu, layout.tp, between_passes_s=0.0, **split))
        )
        for kind, estimate in estimated:
            off = seconds(estimate) / seconds(profile) - 1
            by_kind[kind, WORDS[not shape.experts]].append(off)
    return by_kind


def recorded() -> dict[str, dict[str, dict[str, int]]]:
    """Return the errors over the databases, by kind of estimate and of model, as recorded."""
    rows: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    with RECORD.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kind, word = row.pop("estimate"), row.pop("models")
            rows[kind][word] = {key: int(value) for key, value in row.items()}
    return rows


def main() -> None:
    """Print the errors; write what the options name."""
    if "--database" in sys.argv:
        rows = [
            {"estimate": kind, "models": word, **summary(off)}
            for (kind, word), off in sorted(database().items())
        ]
        with RECORD.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    written = text()
    print(written)
    if "--write" in sys.argv:
        path = Path(__file__).parents[1] / "simrl" / "profile" / "estimates.toml"
        path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
