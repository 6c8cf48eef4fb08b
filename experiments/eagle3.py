"""EAGLE-3 on H200 under SGLang: the speed-up of each draft shape, predicted from its measured accept length.

    python experiments/eagle3.py ../shared/data [--json]

`real_runs/eagle3_h200.csv` in the data folder (SpecForge) has tokens a second with and without drafts by benchmark and draft
shape: steps, top-k and verified tokens of a tree. A round is predicted as the drafter's levels, the verification by the target,
and the host's pauses of the preset `sglang-0.5`; accept lengths are the file's. Two things are chosen on the file's own speeds,
so its errors are no test of them: the number of pauses (`HOST_PASSES`) and the GPUs of a target (`TARGETS`). Target profiles
are derived from SGLang's kernels, which needs aiconfigurator ('simrl[aiconfigurator]').
"""

import json
import logging
from pathlib import Path
from typing import Annotated, NamedTuple

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from experiments.shared import AsJson, errors_in_a_line
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import TableProfile
from simrl.profile.profilers import aiconfigurator
from simrl.scenario.presets import ENGINES
from simrl.speculation.draft_times import eagle_drafts

# EAGLE-3 drafts from a vocabulary of its own (draft_vocab_size of the checkpoints' config.json).
DRAFT_VOCAB = 32000
KV_TOKENS = 700  # of a sequence in the middle of its response; such benchmarks answer in some hundred tokens
# Times that SGLang's loop goes back to the host in a round: after the drafter's levels (one CUDA graph), the verification, and
# the drafter's pass over the accepted tokens, once more to make drafts into a tree; once without drafts. Chosen among 1 to 5 on
# the rows that it is held against.
HOST_PASSES = 4


class Target(NamedTuple):
    """A model of the file: its name in simrl, and GPUs. The file does not state them: of 1, 2 and 4 those whose plain decoding
    comes nearest to the file's (of Qwen3-30B-A3B, two come as near as four, with which the shapes agree)."""

    name: str
    tp: int


TARGETS = {
    "Llama-3.1-8B-Instruct": Target("llama-3.1-8b", 1),
    "Qwen3-30B-A3B-Instruct-2507": Target("qwen3-30b-a3b", 4),
}


def read_rows(data: Path) -> pd.DataFrame:
    path = data / "real_runs" / "eagle3_h200.csv"
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); name the folder that holds real_runs/"
        ) from error


def predicted(rows: pd.DataFrame, host_passes: int = HOST_PASSES) -> pd.DataFrame:
    """Return the rows with the measured and the predicted speed-up, and plain decoding, measured and predicted [ms a pass]."""
    profiles = {name: _profile(target) for name, target in TARGETS.items()}
    constants = ENGINES["sglang-0.5"].constants
    each_pass_s, each_sequence_s = (
        float(constants[key].value) for key in ("between_passes_s", "sequence_overhead_s")
    )
    found = []
    for row in rows.itertuples():
        target, profile = TARGETS[row.model], profiles[row.model]
        shape = MODELS[target.name].model_copy(update={"vocab": DRAFT_VOCAB})
        drafter = eagle_drafts(shape, gpu("h200"), target.tp, KV_TOKENS, row.topk)
        pause_s = each_pass_s + each_sequence_s * row.batch
        plain_s = profile.decode_s(row.batch, KV_TOKENS) + pause_s
        # Of `draft_tokens`, one is the token that the target had computed already.
        verify_s = profile.verify_s(row.batch, row.draft_tokens - 1, KV_TOKENS)
        round_s = drafter.draft_s(row.batch, row.steps) + verify_s + host_passes * pause_s
        found.append(
            {
                "model": target.name,
                "shape": f"{row.steps} steps, top {row.topk}, {row.draft_tokens} tokens",
                "measured": row.drafted_tokens_per_s / row.plain_tokens_per_s,
                "predicted": row.accept_length * plain_s / round_s,
                "plain_ms": 1e3 * row.batch / row.plain_tokens_per_s,
                "predicted_plain_ms": 1e3 * plain_s,
            }
        )
    return pd.DataFrame(found)


def _profile(target: Target) -> TableProfile:
    setup = aiconfigurator.EngineSetup(target.tp, backend="sglang")
    return aiconfigurator.derive(MODELS[target.name], "h200", setup)


def by_shape(found: pd.DataFrame) -> pd.DataFrame:
    """Return the medians over benchmarks and drafters of each draft shape."""
    with_error = found.assign(error=found.predicted / found.measured - 1)
    with_error["size"] = with_error.error.abs()
    return (
        with_error.groupby(["model", "shape"])[["measured", "predicted", "error", "size"]]
        .median()
        .reset_index()
    )


def main(
    data: Annotated[Path, typer.Argument(help="the folder with real_runs/")],
    host_passes: Annotated[int, typer.Option(help="pauses of the host in a round")] = HOST_PASSES,
    as_json: AsJson = False,
) -> None:
    logging.disable(
        logging.WARNING
    )  # aiconfigurator says what it takes from other versions of a backend
    with errors_in_a_line("eagle3"):
        found = predicted(read_rows(data), host_passes)
    shapes = by_shape(found)
    plain = found.groupby("model")[["plain_ms", "predicted_plain_ms"]].median()
    if as_json:
        print(
            json.dumps(
                {"shapes": shapes.to_dict("records"), "plain": plain.to_dict("index")}, indent=1
            )
        )
        return
    table = Table(
        "target",
        "draft shape",
        "measured",
        "predicted",
        "error",
        "median size",
        title="Speed-up by drafts",
    )
    for row in shapes.itertuples():
        cells = (
            f"{row.measured:.2f}",
            f"{row.predicted:.2f}",
            f"{row.error:+.1%}",
            f"{row.size:.1%}",
        )
        table.add_row(row.model, row.shape, *cells)
    console = Console()
    console.print(table)
    errors = found.predicted / found.measured - 1
    signed, worst = errors.median(), errors[errors.abs().idxmax()]
    console.print(
        f"{len(errors)} rows: median error {errors.abs().median():.1%} ({signed:+.1%} signed), worst {worst:+.1%}."
    )
    for model, row in plain.iterrows():
        console.print(
            f"{model} without drafts: {row.plain_ms:.2f} ms a pass, predicted {row.predicted_plain_ms:.2f}."
        )


if __name__ == "__main__":
    typer.run(main)
