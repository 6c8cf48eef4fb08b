"""Compare the model of a training step with measured ones: Qwen3-0.6B and 4B, RL and SFT, full and LoRA, on three GPUs.

    python experiments/validate_training.py ../shared/data [--json]

`train_step_benchmarks/` in the data folder has prime-rl's own benchmarks: each step has two micro-batches a GPU, each one
sequence. The work follows from the model's shape (`simrl.training`): matrix products and attention, a second forward pass
where activations are recomputed, no gradients of the weights with LoRA, and the traffic through memory. How fast it
goes is six constants: attention's share of the data sheet on each GPU, and how often activations (full and LoRA) and the
logits of an RL step pass through memory. A hash of their names parts the measurements in two halves: each half is judged with
the constants that were set on the other. The share of matrix products is no constant: `MATRIX_MFU` is what measured kernels
reach.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from experiments.shared import AsJson, errors_in_a_line
from simrl.errors import InputError
from simrl.profile.hardware import GPUS, MODELS
from simrl.runtime.training_costs import TrainingCosts
from simrl.scenario.training import TrainingConfig

MATRIX_MFU = 0.8  # large matrix products of these shapes on Hopper reach 0.80 to 0.88 in aiconfigurator's database
GPU_NAMES = {"NVIDIA RTX A6000": "a6000", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200"}
MODEL_NAMES = {"Qwen/Qwen3-0.6B": "qwen3-0.6b", "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b"}
CONSTANTS = (
    "attention_mfu a6000",
    "attention_mfu h100",
    "attention_mfu b200",
    "activation_passes full",
    "activation_passes lora",
    "logit_passes rl",
)
LEAST, START, MOST = (0.01,) * 3 + (0.0,) * 3, (0.3,) * 3 + (5.0, 5.0, 30.0), (1.0,) * 3 + (100.0, 100.0, 100.0)


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
    step_s: float

    @property
    def half(self) -> int:
        return crc32(self.name.encode()) % 2

    @property
    def words(self) -> str:
        return f"{'rl' if self.rl else 'sft'} {'lora' if self.lora else 'full'} {self.kept.lower()}"


def read_steps(data: Path) -> tuple[list[Step], dict[str, int]]:
    """Return the measured steps of dense models, and the number of others by the reason they are left out."""
    files = sorted((data / "train_step_benchmarks").glob("*.json"))
    if not files:
        raise InputError(f"{data}: no train_step_benchmarks/*.json; name the folder that holds them")
    steps: list[Step] = []
    left_out: dict[str, int] = {}
    for path in files:
        try:
            content = json.loads(path.read_text())
            config, measured = content["config"], float(content["metrics"]["step_time"]["mean"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a benchmark of a training step ({error!r}); take it out") from error
        why = "failed" if not config["success"] else "a mixture of experts; simrl models dense transformers"
        if not config["success"] or config["model_name"] not in MODEL_NAMES:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        steps.append(
            Step(
                name=path.stem,
                gpu=GPU_NAMES[config["device_name"]],
                gpus=config["num_gpus"],
                model=MODEL_NAMES[config["model_name"]],
                rl=config["type"] == "rl",
                lora=config["lora_rank"] is not None,
                sequence_tokens=config["seq_len"],
                sequences=config["micro_batches"] * config["num_gpus"],
                kept=config["ac"],
                step_s=measured,
            )
        )
    return steps, left_out


def predicted_s(step: Step, config: TrainingConfig) -> float:
    costs = TrainingCosts(MODELS[step.model], GPUS[step.gpu], step.gpus, config, 1, 0, switch=False)
    lengths = np.full(step.sequences, step.sequence_tokens, dtype=np.int64)
    return sum(seconds for _, seconds in costs.update(lengths, 1))


def config_of(step: Step, constants: Mapping[str, float]) -> TrainingConfig:
    """Return the config of a step; offloaded activations count as recomputed, as offloading hides their way to the host."""
    return TrainingConfig(
        mfu=MATRIX_MFU,
        attention_mfu=constants[f"attention_mfu {step.gpu}"],
        recompute=True,
        lora=step.lora,
        activation_passes=constants[f"activation_passes {'lora' if step.lora else 'full'}"],
        logit_passes=constants["logit_passes rl"] if step.rl else 0.0,
        tokens_per_microbatch=step.sequence_tokens,
    )


def calibrate(steps: list[Step]) -> dict[str, float]:
    """Return the constants with the least relative errors of these steps (robust to outliers)."""

    def relative(values: NDArray[np.float64]) -> list[float]:
        constants = dict(zip(CONSTANTS, map(float, values), strict=True))
        return [predicted_s(step, config_of(step, constants)) / step.step_s - 1 for step in steps]

    found = least_squares(relative, START, bounds=(LEAST, MOST), x_scale=START, loss="soft_l1", f_scale=0.05)
    return dict(zip(CONSTANTS, map(float, found.x), strict=True))


def summary(errors: list[float]) -> dict[str, float]:
    sizes = np.abs(errors)
    return {
        "median": float(np.median(errors)),
        "median_size": float(np.median(sizes)),
        "p90_size": float(np.quantile(sizes, 0.9)),
    }


def main(
    data: Annotated[Path, typer.Argument(help="the folder with train_step_benchmarks/")], as_json: AsJson = False
) -> None:
    with errors_in_a_line("validate_training"):
        steps, left_out = read_steps(data)
    constants = [calibrate([step for step in steps if step.half != half]) for half in (0, 1)]  # to judge each half with
    rows: list[dict[str, Any]] = []
    for step in steps:
        seconds = predicted_s(step, config_of(step, constants[step.half]))
        unset = predicted_s(step, TrainingConfig(tokens_per_microbatch=step.sequence_tokens))
        rows.append(
            {
                **step.__dict__,
                "half": step.half,
                "predicted_s": seconds,
                "error": seconds / step.step_s - 1,
                "error_of_defaults": unset / step.step_s - 1,
            }
        )
    groups = {"all": rows}
    groups |= {f"half {half}": [row for row in rows if row["half"] == half] for half in (0, 1)}
    groups |= {name: [row for row in rows if row["gpu"] == name] for name in GPU_NAMES.values()}
    errors = {name: {"steps": len(some), **summary([row["error"] for row in some])} for name, some in groups.items()}
    errors["all, with simrl's defaults"] = {"steps": len(rows), **summary([row["error_of_defaults"] for row in rows])}
    if as_json:
        print(json.dumps({"errors": errors, "constants": constants, "steps": rows, "left_out": left_out}, indent=1))
        return
    console = Console()
    table = Table("GPUs", "model", "step", "tokens", "measured [s]", "predicted [s]", "error", "half")
    for step, row in zip(steps, rows, strict=True):
        cells = (f"{step.gpus} {step.gpu}", step.model, step.words, f"{step.sequence_tokens:,}", f"{step.step_s:.2f}")
        table.add_row(*cells, f"{row['predicted_s']:.2f}", f"{row['error']:+.1%}", str(step.half))
    console.print(table)
    for half, found in enumerate(constants):
        console.print(
            f"Half {half} is judged with: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}"
        )
    for name, each in errors.items():
        console.print(
            f"{name}: {each['steps']} steps, error {each['median']:+.1%} at the median, {each['median_size']:.1%} its median "
            f"size, {each['p90_size']:.1%} for nine of ten"
        )
    for why, count in left_out.items():
        console.print(f"Left out: {count}, {why}.")


if __name__ == "__main__":
    typer.run(main)
