"""Compare weight syncs by method with measured ones: verl's broadcast and delta, NeMo-RL's reshard.

    python experiments/weight_sync.py ../shared/data [--json]

`real_runs/weight_sync.csv` in the data folder has the seconds of a sync by model, placement and method. Each constant of
`simrl.training.weight_sync` is set by one row; the others test them. What a row does not state makes its prediction an
interval.
"""

import csv
import json
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.shared import AsJson, errors_in_a_line, markdown_of, write_parts
from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.training.config import TrainingConfig
from simrl.training.weight_sync import loading_s, publication_s

METHODS = {"nccl broadcast": "broadcast", "sparse delta": "delta", "sharded reshard": "reshard"}
PAGE = Path(__file__).parent / "weight_sync.md"
WITHIN = 1.5
TEN_GBIT = 1.25e9  # bytes a second of a node: a cluster without RDMA


@dataclass(frozen=True)
class Case:
    """A possible placement: `gpus` train, `workers` of `tp` GPUs roll out; further settings of `training`."""

    gpus: int
    workers: int
    tp: int
    training: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One measured weight sync, and the placements it may have had."""

    model: str
    gpu: str
    placement: str
    method: str
    offload: str
    low_s: float
    high_s: float
    cases: tuple[Case, ...]
    sets: str = ""  # the constant that this row sets
    unknown: str = ""  # what is not stated, and makes the prediction an interval

    @property
    def measured_s(self) -> float:
        return sqrt(self.low_s * self.high_s)

    @property
    def predicted_s(self) -> tuple[float, float]:
        """Return the least and the greatest seconds of the possible placements."""
        seconds = [self.seconds(case) for case in self.cases]
        return min(seconds), max(seconds)

    def seconds(self, case: Case) -> float:
        training = {
            "weight_sync": METHODS[self.method],
            "weight_sync_offload": self.offload == "on",
            **case.training,
        }
        config, model, gpu = TrainingConfig(**training), MODELS[self.model], GPUS[self.gpu]
        load_s = loading_s(config, model, gpu, case.gpus, case.workers, case.tp)
        return publication_s(config, model, gpu, case.gpus) + load_s

    @property
    def ratio(self) -> float | None:
        """Return predicted over measured, if one placement is possible."""
        return None if self.unknown else self.predicted_s[1] / self.measured_s


# Of rows by model, placement, method and offload: the constant that the row sets.
SETS = {
    ("qwen2.5-32b", "2+2 nodes", "nccl broadcast", "off"): "HOST_BYTES_PER_S of broadcast",
    ("qwen3-0.6b", "1 node", "nccl broadcast", "off"): "PAUSE_S",
    ("qwen2.5-32b", "2+2 nodes", "nccl broadcast", "on"): "PAGEABLE_NODE_BYTES_PER_S",
    ("qwen2.5-32b", "2+2 nodes", "sparse delta", "off"): "HOST_BYTES_PER_S of delta",
    ("qwen3-4b", "", "sharded reshard", ""): "TENSOR_S",
}


def read_rows(data: Path) -> list[Row]:
    """Return the measured weight syncs."""
    path = data / "real_runs" / "weight_sync.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_row(record) for record in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: not measured weight syncs ({error!r}); name the folder with real_runs/"
        ) from error


def _row(record: dict[str, str]) -> Row:
    model, placement, method = record["model"], record["placement"], record["method"]
    cases, unknown = _cases(model, placement, record["gpu"])
    return Row(
        model=model,
        gpu=record["gpu"].partition("/")[0],
        placement=placement,
        method=method,
        offload=record["offload"],
        low_s=float(record["low_s"]),
        high_s=float(record["high_s"]),
        cases=tuple(cases),
        sets=SETS.get((model, placement, method, record["offload"]), ""),
        unknown=unknown,
    )


def _cases(model: str, placement: str, gpu: str) -> tuple[list[Case], str]:
    """Return the placements that a row may have had, and what is not stated. The tensor parallelism of rollout is stated
    nowhere; only reshard depends on it."""
    if not placement:
        experts = {"expert_parallel": 8} if MODELS[model].experts else {}
        gpus = 16 if experts else 8
        stages = ({**experts, "pipeline_parallel": stages} for stages in (1, 2))
        shapes = [(tp, training) for training in stages for tp in (1, 2, 4, 8)]
        cases = [
            Case(gpus, gpus // tp, tp, {**training, "sharding": "optimizer"})
            for tp, training in shapes
        ]
        return cases, f"placement: {gpus} + {gpus} GPUs, tp 1 to 8, 1 or 2 stages"
    if placement == "1 node":
        return [Case(4, 4, 1)], ""
    nodes = int(placement[0])
    # VeOmni trains these experts. It sends its master weights (verl@ce195c95, workers/engine/veomni: float32, no cast).
    case = Case(
        8 * nodes, 8 * nodes, 1, {"weight_sync_precision": "fp32"} if "ep" in placement else {}
    )
    if nodes > 1 and gpu.startswith("a100"):
        slow = Case(case.gpus, case.workers, 1, {"weight_sync_node_bytes_per_s": TEN_GBIT})
        return [case, slow], "network: from 200 Gb/s a GPU to 10 Gb/s a node"
    return [case], ""


def table_of(rows: list[Row]) -> list[dict[str, str]]:
    """Return the rows in words."""
    table = []
    for row in rows:
        low_s, high_s = row.predicted_s
        same = row.low_s == row.high_s
        within = row.ratio is not None and 1 / WITHIN <= row.ratio <= WITHIN
        use = "; ".join(filter(None, (f"sets {row.sets}" if row.sets else "", row.unknown)))
        table.append(
            {
                "model": row.model,
                "placement": f"{row.placement or 'not stated'}, {row.gpu}",
                "method": row.method,
                "offload": row.offload or "?",
                "measured [s]": f"{row.low_s:.3g}" if same else f"{row.low_s:.3g}–{row.high_s:.3g}",
                "predicted [s]": f"{low_s:.3g}–{high_s:.3g}" if row.unknown else f"{high_s:.3g}",
                "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
                "use": use or ("test" if within else "test, missed"),
            }
        )
    return table


def unused(data: Path) -> list[dict[str, str]]:
    """Return the rows of hf_async_lora.csv in words: the model is not stated, so nothing is predicted."""
    path = data / "real_runs" / "hf_async_lora.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        records = [record for record in csv.DictReader(file) if record["weight_sync_s_p50"]]
    empty = dict.fromkeys(("predicted [s]", "ratio"), "")
    return [
        {
            "model": "not stated",
            "placement": f"{record['trainer_gpus']} to {record['replicas']}",
            "method": "LoRA",
            "offload": "?",
            "measured [s]": record["weight_sync_s_p50"],
            **empty,
            "use": "model and method not stated",
        }
        for record in records
    ]


def main(
    data: Annotated[Path, typer.Argument(help="the folder with real_runs/weight_sync.csv")],
    as_json: AsJson = False,
    write: Annotated[bool, typer.Option(help="write the table into weight_sync.md")] = False,
) -> None:
    with errors_in_a_line("weight_sync"):
        cells = [*table_of(read_rows(data)), *unused(data)]
    if write:
        write_parts(PAGE, {"rows": markdown_of(cells)})
    if as_json:
        print(json.dumps(cells, indent=1))
        return
    table = Table(*cells[0])
    for each in cells:
        table.add_row(*each.values())
    Console(width=170).print(table)


if __name__ == "__main__":
    typer.run(main)
