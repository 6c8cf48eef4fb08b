"""Compare computed training steps with measured ones: Qwen3 from 0.6B to 235B-A22B, RL and SFT, full and LoRA, on three GPUs.

    python experiments/validate_training.py ../shared/data [--json] [--write]

`train_step_benchmarks/` in the data folder has prime-rl's own benchmarks: each step has two micro-batches a GPU, each one
sequence. A step is computed from its operations (`simrl.training.operations`), with rates of single kernels. One constant
is the framework's: the seconds that an RL step takes beyond them, wherever it runs. The steps of each GPU are judged with the
constant that the dense steps of the other GPUs give.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from experiments.shared import AsJson, errors_in_a_line, markdown_of, write_parts
from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS, known_name
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts

PAGE = Path(__file__).parent / "validate_training.md"
GPU_NAMES = {"NVIDIA RTX A6000": "a6000", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200"}
ATTENTION: dict[str, Literal["fa2", "fa3"]] = {
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
}
# prime-rl asked for the GPU's compute capability up to this day (multi_moe.py and moe.py at c330a6d4e; pull requests 1536 and
# 1692); since then PyTorch decides.
GROUPED_SINCE = "2026-01-30"


@dataclass(frozen=True)
class Step:
    """One measured training step."""

    name: str
    gpu: str
    gpus: int
    model: str
    rl: bool
    lora: bool
    sequence_tokens: int
    sequences: int  # of all GPUs
    kept: str  # how activations are: Recompute or Offload (to the host, instead of computing them again)
    attention: Literal["fa2", "fa3"]
    date: str
    step_s: float

    @property
    def grouped(self) -> bool:
        """Return whether prime-rl of this date ran the experts in one grouped product (PyTorch 2.9): with adapters on compute
        capability 9 alone, without them from 9 on."""
        capability = GPUS[self.gpu].compute_capability
        if self.date >= GROUPED_SINCE:
            raise InputError(f"{self.name}: run on {self.date}; state its rule for experts here")
        return int(capability) == 9 if self.lora else capability >= 9

    @property
    def dense(self) -> bool:
        return not MODELS[self.model].experts

    @property
    def words(self) -> str:
        return f"{'rl' if self.rl else 'sft'} {'lora' if self.lora else 'full'} {self.kept.lower()}"


def read_steps(data: Path) -> tuple[list[Step], dict[str, int]]:
    """Return the measured steps, and the number of others by the reason they are left out."""
    files = sorted((data / "train_step_benchmarks").glob("*.json"))
    if not files:
        raise InputError(
            f"{data}: no train_step_benchmarks/*.json; name the folder that holds them"
        )
    steps: list[Step] = []
    left_out: dict[str, int] = {}
    for path in files:
        try:
            content = json.loads(path.read_text())
            config, measured = content["config"], float(content["metrics"]["step_time"]["mean"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: not a benchmark of a training step ({error!r}); take it out"
            ) from error
        model = known_name(config["model_name"])
        why = (
            "failed" if not config["success"] else f"{config['model_name']} has layers that differ"
        )
        if not config["success"] or model not in MODELS:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        steps.append(
            Step(
                name=path.stem,
                gpu=GPU_NAMES[config["device_name"]],
                gpus=config["num_gpus"],
                model=model,
                rl=config["type"] == "rl",
                lora=config["lora_rank"] is not None,
                sequence_tokens=config["seq_len"],
                sequences=config["micro_batches"] * config["num_gpus"],
                kept=config["ac"],
                attention=ATTENTION[config["attention"]],
                date=config.get("timestamp", "")[:10],
                step_s=measured,
            )
        )
    return steps, left_out


def computed_s(step: Step) -> float:
    """Return the seconds of a step from its operations. Offloaded activations count as recomputed."""
    config = TrainingConfig(
        attention=step.attention,
        recompute=True,
        lora=step.lora,
        grouped_experts=step.dense or step.grouped,
        tokens_per_microbatch=step.sequence_tokens,
    )
    costs = TrainingCosts(MODELS[step.model], GPUS[step.gpu], step.gpus, config, 1, 0, switch=False)
    lengths = np.full(step.sequences, step.sequence_tokens, dtype=np.int64)
    return sum(seconds for _, seconds in costs.update(lengths, 1))


def rl_overhead_s(steps: list[Step]) -> float:
    """Return the seconds of an RL step beyond its operations: those with the least relative errors of these steps (robust to
    outliers)."""

    def relative(values: NDArray[np.float64]) -> list[float]:
        return [(computed_s(step) + float(values[0]) * step.rl) / step.step_s - 1 for step in steps]

    return float(least_squares(relative, [1.0], bounds=(0, 100), loss="soft_l1", f_scale=0.05).x[0])


def scored(steps: list[Step]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the overhead with which each GPU is judged, and a row of each step: its facts, its prediction and its error."""
    dense = [step for step in steps if step.dense]
    overheads_s = {
        gpu: rl_overhead_s([s for s in dense if s.gpu != gpu]) for gpu in GPU_NAMES.values()
    }
    rows: list[dict[str, Any]] = []
    for step in steps:
        computed = computed_s(step)
        seconds = computed + overheads_s[step.gpu] * step.rl
        rows.append(
            {
                **step.__dict__,
                "computed_s": computed,
                "predicted_s": seconds,
                "error": seconds / step.step_s - 1,
                "error_without_overhead": computed / step.step_s - 1,
            }
        )
    return overheads_s, rows


def summary(errors: list[float]) -> dict[str, float]:
    sizes = np.abs(errors)
    return {
        "median": float(np.median(errors)),
        "median_size": float(np.median(sizes)),
        "p90_size": float(np.quantile(sizes, 0.9)),
        "worst": float(max(errors, key=abs)),
    }


def main(
    data: Annotated[Path, typer.Argument(help="the folder with train_step_benchmarks/")],
    as_json: AsJson = False,
    write: Annotated[bool, typer.Option(help="write the errors into validate_training.md")] = False,
) -> None:
    with errors_in_a_line("validate_training"):
        steps, left_out = read_steps(data)
    overheads_s, rows = scored(steps)
    apart = {"dense": True, "mixtures of experts": False}
    groups = {
        name: [r for s, r in zip(steps, rows, strict=True) if s.dense == kind]
        for name, kind in apart.items()
    }
    groups |= {
        f"{kind}, {gpu}": [row for row in groups[kind] if row["gpu"] == gpu]
        for kind in apart
        for gpu in GPU_NAMES.values()
    }
    groups = {name: some for name, some in groups.items() if some}
    errors = {
        name: {"steps": len(some), **summary([row["error"] for row in some])}
        for name, some in groups.items()
    }
    sft = [row for row in groups["dense"] if not row["rl"]]
    errors["dense SFT, nothing set on any step"] = {
        "steps": len(sft),
        **summary([row["error"] for row in sft]),
    }
    if write:
        cells = [
            {
                "steps": name,
                "n": str(each["steps"]),
                "median error": f"{each['median']:+.1%}",
                "median size": f"{each['median_size']:.1%}",
                "90 % within": f"{each['p90_size']:.1%}",
                "worst": f"{each['worst']:+.1%}",
            }
            for name, each in errors.items()
        ]
        write_parts(PAGE, {"errors": markdown_of(cells)})
    if as_json:
        print(
            json.dumps(
                {
                    "errors": errors,
                    "rl_overhead_s": overheads_s,
                    "steps": rows,
                    "left_out": left_out,
                },
                indent=1,
            )
        )
        return
    console = Console()
    table = Table("GPUs", "model", "step", "tokens", "measured [s]", "predicted [s]", "error")
    for step, row in zip(steps, rows, strict=True):
        columns = (
            f"{step.gpus} {step.gpu}",
            step.model,
            step.words,
            f"{step.sequence_tokens:,}",
            f"{step.step_s:.2f}",
        )
        table.add_row(*columns, f"{row['predicted_s']:.2f}", f"{row['error']:+.1%}")
    console.print(table)
    for gpu, seconds in overheads_s.items():
        console.print(
            f"{gpu} is judged with {seconds:.2f} s a step of RL beyond its operations, set on the other GPUs"
        )
    for name, each in errors.items():
        console.print(
            f"{name}: {each['steps']} steps, error {each['median']:+.1%} at the median, {each['median_size']:.1%} its median "
            f"size, {each['p90_size']:.1%} for nine of ten, {each['worst']:+.1%} at worst"
        )
    for why, count in left_out.items():
        console.print(f"Left out: {count}, {why}.")


if __name__ == "__main__":
    typer.run(main)
