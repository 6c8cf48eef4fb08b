"""Decoding, drafting and verification passes of one sequence on an A100 against profiles.

    python experiments/validate_verification.py ../shared/data [--json] [--write]

`verification_passes/` in the data folder has the milliseconds of passes of Qwen2.5-7B under vLLM 0.11.2: decoding, decoding
with the speculative runner, a pass of a quantised self-drafter, and the verification of γ + 1 positions. Only rows of one
sequence of up to 512 tokens are used: in larger batches the sequences of the sweep share their KV blocks, and longer contexts
come from the L2 cache. Nothing is set on these rows. A profile has kernels; the host's time between passes is that of the
preset `vllm-0.12` (vLLM 0.11 to 0.13 without asynchronous scheduling).
"""

import json
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pandas as pd
import typer

from experiments.shared import AsJson, errors_in_a_line, markdown, write_parts
from simrl.profile.derived_layouts import derived_profile
from simrl.profile.hardware import gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.scenario.presets import ENGINES

PAGE = Path(__file__).with_suffix(".md")
DATA = Path("verification_passes") / "a100_qwen2.5-7b.csv"
MODEL, GPU, PRESET = "qwen2.5-7b", "a100", "vllm-0.12"
LONGEST_TOKENS = 512
DRAFTER_WEIGHTS = "int4"  # assumed: the data say that the drafter is the model itself, quantised


class Row(NamedTuple):
    """A measured pass of one sequence: its kind, the drafted tokens that it verifies or whose round it is in, and its
    context."""

    kind: str
    drafted: int
    context_tokens: int
    seconds: float


def read_rows(folder: Path) -> list[Row]:
    """Return the rows that may be used."""
    table = pd.read_csv(folder / DATA)
    table = table[(table.batch == 1) & (table.seq <= LONGEST_TOKENS)]
    columns = table[["mode", "gamma", "seq", "median_ms"]].itertuples(index=False)
    return [Row(mode, int(gamma), int(seq), ms / 1e3) for mode, gamma, seq, ms in columns]


def profiles_of(precision: str) -> dict[str, TableProfile]:
    """Return the profiles that simrl has for the model on this GPU without a file of it: kernels alone."""
    shape, kind = model_shape(MODEL), gpu(GPU)
    wanted = ProfileMetadata(
        model=MODEL, gpu=GPU, tp=1, precision=precision, kind="derived", source=""
    )
    return {
        "estimated": derived_profile(wanted, shape, kind),
        "roofline": roofline_profile(shape, kind, between_passes_s=0.0, precision=precision),
    }


def predicted_s(row: Row, target: TableProfile, drafter: TableProfile) -> tuple[float, float]:
    """Return the seconds of the kernels of a pass, and of the whole pass: levels of drafts follow each other without the
    host."""
    if row.kind == "drafter_decode":
        kernels_s = drafter.decode_s(1, row.context_tokens)
        return kernels_s, kernels_s
    drafted = row.drafted if row.kind == "target_verify" else 0
    constants = ENGINES[PRESET].constants
    host_s = constants["between_passes_s"].value + constants["sequence_overhead_s"].value
    kernels_s = target.verify_s(1, drafted, row.context_tokens)
    return kernels_s, kernels_s + host_s


KINDS = {
    "target_decode": "decoding",
    "target_decode_sd": "decoding, speculative runner",
    "target_verify": "verification",
    "drafter_decode": "a pass of the drafter",
}


def errors(rows: list[Row]) -> list[dict[str, object]]:
    """Return the relative errors of each kind of pass by each profile, with kernels alone and with the host."""
    found = []
    targets, drafters = profiles_of("bf16"), profiles_of(DRAFTER_WEIGHTS)
    for name, target in targets.items():
        for kind, words in KINDS.items():
            of_kind = [row for row in rows if row.kind == kind]
            pairs = [predicted_s(row, target, drafters[name]) for row in of_kind]
            measured = np.array([row.seconds for row in of_kind])
            for column, part in enumerate(("kernels", "with the host")):
                off = np.array([pair[column] for pair in pairs]) / measured - 1
                found.append(
                    {
                        "profile": name,
                        "pass": words,
                        "part": part,
                        "n": len(of_kind),
                        "measured_ms": float(np.median(measured) * 1e3),
                        "median": float(np.median(np.abs(off))),
                        "sign": float(np.median(off)),
                        "worst": float(off[np.abs(off).argmax()]),
                    }
                )
    return found


def table_of(found: list[dict[str, object]]) -> list[str]:
    heads = ["profile", "pass", "part", "n", "measured (median)", "median size", "sign", "worst"]
    return markdown(
        heads,
        [
            [
                *(e[name] for name in ("profile", "pass", "part", "n")),
                f"{e['measured_ms']:.2f} ms",
                f"{e['median']:.1%}",
                *(f"{e[name]:+.1%}" for name in ("sign", "worst")),
            ]
            for e in found
        ],
    )


def main(
    data: Annotated[Path, typer.Argument(help="the folder with verification_passes/")],
    write: Annotated[
        bool, typer.Option("--write", help=f"write the table into {PAGE.name}, too")
    ] = False,
    as_json: AsJson = False,
) -> None:
    if not (data / DATA).exists():
        print(f"validate_verification: skipped, {data / DATA} is not there")
        return
    with errors_in_a_line("validate_verification"):
        found = errors(read_rows(data))
        print(json.dumps(found, indent=1) if as_json else "\n".join(table_of(found)))
        if write:
            write_parts(PAGE, {"errors": table_of(found)})


if __name__ == "__main__":
    typer.run(main)
