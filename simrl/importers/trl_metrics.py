"""TRL's metrics: `trainer_state.json`, or the run's history as JSON Lines (a row a call of `log`, as W&B exports it).

TRL times its methods under `profiling/Time taken: GRPOTrainer.…`, and sends that to W&B, MLflow or Trackio only, in rows of
their own before the row of the step: so `trainer_state.json` has no generation time, and cannot be calibrated on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from simrl.errors import InputError
from simrl.importers.rows import INT32_MAX, as_float, existing, json_object, read_jsonl, read_whole, shown

PROFILED = "profiling/Time taken: GRPOTrainer."
GENERATE = ("vLLM.generate", "transformers.generate", "transformers.generate_batch", "generate")  # older versions last
LOG_PROBS = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
NAMES = {
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "step_time": "timing_s/step",
}


def read_trl_metrics(path: str | Path) -> pd.DataFrame:
    """A row a logged step, in verl's names; `timing_s/update_actor` is what `step_time` leaves beside generation and log-probs.

    Raises `InputError` if no row has completions, or no generation was timed.
    """
    path = existing(path)
    rows: list[dict[str, float]] = []
    timed: dict[str, float] = {}
    for row in _logged(path):
        row = {key.removeprefix("train/"): value for key, value in row.items()}
        for key, value in row.items():
            if key.startswith(PROFILED) and _is_number(value):
                method = key.removeprefix(PROFILED)
                timed[method] = timed.get(method, 0.0) + as_float(value)
        step: Any = row.get("global_step", row.get("step"))
        if not _is_number(row.get("completions/mean_length")) or not _is_number(step):
            continue
        if not 0 <= step <= INT32_MAX or step != int(step):
            raise InputError(f"{path}: step {shown(step)} is no whole number from 0; repair or remove the row")
        found = {"step": float(step)}
        found |= {ours: as_float(row[name]) for name, ours in NAMES.items() if _is_number(row.get(name))}
        for methods, ours in ((GENERATE, "timing_s/gen"), (LOG_PROBS, "timing_s/old_log_prob")):
            seconds = next((timed[method] for method in methods if method in timed), None)
            if seconds is not None:
                found[ours] = seconds
        if "timing_s/gen" in found and "timing_s/step" in found:
            found["timing_s/update_actor"] = (
                found["timing_s/step"] - found["timing_s/gen"] - found.get("timing_s/old_log_prob", 0.0)
            )
        rows.append(found)
        timed = {}
    if not rows:
        raise InputError(f"{path}: no row has completions/mean_length; is it the log of TRL's GRPOTrainer?")
    metrics = pd.DataFrame(rows).groupby("step", as_index=False).last()
    metrics["step"] = metrics["step"].astype(int)
    if "timing_s/gen" not in metrics:
        raise InputError(
            f"{path}: no generation times ('{PROFILED}vLLM.generate'); TRL sends them to W&B, MLflow or Trackio only: "
            "export the run's history from there as JSON Lines"
        )
    metrics.attrs["source"] = path.name
    return metrics


def _logged(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".json":
        history = json_object(read_whole(path), str(path)).get("log_history")
        if not isinstance(history, list):
            raise InputError(f"{path}: no list 'log_history'; TRL writes it into trainer_state.json")
        yield from (row for row in history if isinstance(row, dict))
    else:
        for _, row in read_jsonl(path):
            yield row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
