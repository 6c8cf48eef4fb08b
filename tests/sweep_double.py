"""A folder of `simrl sweep`, made up: the rows of as many points as are asked for, at once."""

import json
from pathlib import Path

from simrl.study.sweep import write_table

EVIL = "<script>alert(1)</script>"  # in a name or an error


def sweep_rows(count: int, **changes: object) -> list[dict]:
    """Rows of a sweep's table, made up."""
    rows = []
    for i in range(count):
        rate = 1 + (i * 7919 % 1000) / 250
        rows.append(
            {
                "point": i,
                "hash": f"{i:064x}",
                "system.name": ("areal", "one_step_off", "rhymerl")[i % 3],
                "cluster.gpus": (16, 32, 64, 128)[i // 3 % 4],
                "seed": i // 12,
                "variant": f"cluster.gpus={(16, 32, 64, 128)[i // 3 % 4]}",
                "samples_per_s": rate,
                "tokens_per_s": 5000 * rate,
                "step_s": 100 / rate,
                "rollout_bubble": 0.1,
                "occupancy": 0.4,
                "train_idle": 0.2,
                "off_policyness_mean": float(i % 3),
                "off_policyness_max": i % 3,
                "settled": True,
                "gpu_hours_per_1k_samples": 10 / rate,
                "trace_kind": "synthetic",
                "profile_kind": "derived",
                "speedup": rate,
                "speedup_in_variant": rate,
                "error": None,
                **changes,
            }
        )
    return rows


def a_sweep(folder: Path, rows: list[dict]) -> Path:
    (folder / "table").mkdir(parents=True)
    write_table(rows, folder / "table")
    (folder / "sweep.json").write_text(
        json.dumps({"scenario": "made_up.yaml", "values": ["seed=0..9"]})
    )
    return folder
