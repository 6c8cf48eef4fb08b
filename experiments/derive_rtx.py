"""Derived profiles beside kernels that were measured on the same GPU, by part: aiconfigurator's and rooflines on RTX PRO 6000,
rooflines on RTX 4090.

    python experiments/derive_rtx.py ../shared/data

The data folder has `kernel_profiles/`, measured by LLMServingSim's profiler in a model of one layer: each kernel of a pass
reads its weights and its KV cache from memory, as in a model of many. Without aiconfigurator, rooflines alone are compared.
Errors are of one layer, derived over measured; collectives are left out. Nothing is fitted. `derive_rtx.md` reads the table.
"""

import importlib.util
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from experiments.shared import errors_in_a_line
from simrl.profile.hardware import GPUS
from simrl.profile.interpolation import Floats
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.profile import Tables, attention_alone_s
from simrl.profile.profilers import aiconfigurator
from simrl.profile.profilers.kernel_tables import compose_kernel_tables
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.setups import EngineSetup
from simrl.profile.roofline import Link, pass_all_reduces_s

PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FREE = Link(1e30, 0.0)
SETUPS = (
    ("RTXPRO6000", "Llama-3.1-8B", 1),
    ("RTXPRO6000", "Qwen3-32B", 2),
    ("RTX4090", "Llama-3.1-8B", 1),
)


def line(part: str, errors: Floats) -> str:
    """Return a row of the table: points, medians of the errors' sizes and of the errors, the worst."""
    worst = errors[np.abs(errors).argmax()]
    sizes = np.median(np.abs(errors))
    return f"| {part} | {errors.size} | {sizes:.1%} | {np.median(errors):+.1%} | {worst:+.0%} |"


def attention_lines(tables: Tables, folder: Path, layers: int) -> list[str]:
    rows = pd.read_csv(folder / "attention.csv")
    us = 1e6 / layers
    decode = rows[(rows["prefill_chunk"] == 0) & (rows["kv_decode"] >= 128)]
    errors = np.array(
        [
            us * attention_alone_s(tables, 0.0, 0.0, float(n), float(n * kv)) / time_us - 1
            for n, kv, time_us in decode[["n_decode", "kv_decode", "time_us"]].to_numpy()
        ]
    )
    parts = [line("decode attention", errors)]
    for n in (1, 8, 64, 256):
        parts.append(line(f"… of {n}", errors[(decode["n_decode"] == n).to_numpy()]))
    prefill = rows[(rows["n_decode"] == 0) & (rows["prefill_chunk"] >= 16)]
    columns = prefill[["prefill_chunk", "kv_prefill", "time_us"]].to_numpy(float)
    errors = np.array(
        [
            us * attention_alone_s(tables, c, c * (k + c / 2), 0.0, 0.0) / time_us - 1
            for c, k, time_us in columns
        ]
    )
    long = columns[:, 0] >= 512
    return [
        *parts,
        line("prefill attention, chunks from 512", errors[long]),
        line("prefill attention, shorter ones", errors[~long]),
    ]


def dense_lines(shape: ModelShape, tp: int, folder: Path) -> list[str]:
    """Return the rows of the products and of the small kernels of aiconfigurator."""
    times = aiconfigurator.times_of(shape, "rtxpro6000", EngineSetup(tp))
    rows = pd.read_csv(folder / "dense.csv")
    grid = rows.pivot(index="tokens", columns="layer", values="time_us")
    products = [name for name in times.dense_ms if name.endswith("_gemm")]
    small = [
        name for name in times.dense_ms if name not in products and "ar" not in name.split("_")
    ]
    lines = []
    for part, names, kinds in (
        ("matrix products", products, [k for k in grid if k in PRODUCTS]),
        ("small kernels", small, [k for k in grid if k not in PRODUCTS]),
    ):
        measured = sum(
            (
                2
                if k == "layernorm"
                else 1 / shape.layers
                if k in ("embedding", "final_layernorm")
                else 1
            )
            * grid[k]
            for k in kinds
        )
        ms = np.sum([times.dense_ms[name] for name in names if "ar_" not in name], axis=0)
        derived = 1e3 / shape.layers * np.interp(grid.index, times.tokens, ms)
        errors = derived / measured.to_numpy() - 1
        lines += [line(part, errors), line("… to 256 tokens", errors[grid.index <= 256])]
    return lines


def main(data: Annotated[Path, typer.Argument(help="the folder with kernel_profiles/")]) -> None:
    with errors_in_a_line("derive_rtx"):
        for name, model, tp in SETUPS:
            folder, shape = data / "kernel_profiles" / name / model / f"tp{tp}", model_shape(model)
            measured = compose_kernel_tables(folder, shape, None, tp, FREE, 0.0).tables
            if name == "RTXPRO6000" and importlib.util.find_spec("aiconfigurator_core"):
                derived = aiconfigurator.derive(shape, "rtxpro6000", EngineSetup(tp)).tables
                print(f"\n{model}, tp {tp}, {name}: aiconfigurator\n")
                print("| part | n | median | signed | worst |\n|---|---|---|---|---|")
                print("\n".join(dense_lines(shape, tp, folder)))
                print(
                    "\n".join(
                        [
                            head_line(derived, measured),
                            *attention_lines(derived, folder, shape.layers),
                        ]
                    )
                )
            if name.lower() in GPUS:
                roofline = roofline_profile(shape, GPUS[name.lower()], tp)
                t = roofline.tables
                link = Link(GPUS[name.lower()].bytes_per_s_among(tp), 3e-6)
                reduced = pass_all_reduces_s(shape, t.dense_tokens, tp, link) if tp > 1 else 0.0
                t = t._replace(dense_s=t.dense_s - reduced)
                print(f"\n{model}, tp {tp}, {name}: roofline\n")
                print("| part | n | median | signed | worst |\n|---|---|---|---|---|")
                ticks = measured.dense_tokens
                errors = np.interp(ticks, t.dense_tokens, t.dense_s) / measured.dense_s - 1
                print(line("dense layers", errors))
                print(line("… to 256 tokens", errors[ticks <= 256]))
                print(
                    "\n".join([head_line(t, measured), *attention_lines(t, folder, shape.layers)])
                )


def head_line(derived: Tables, measured: Tables) -> str:
    """Return the row of the output head, with its sampler where that was measured."""
    ticks = measured.sampled_sequences
    seconds = np.interp(ticks, derived.sampled_sequences, derived.sampled_s)
    return line("output head and sampler", seconds / measured.sampled_s - 1)


if __name__ == "__main__":
    typer.run(main)
