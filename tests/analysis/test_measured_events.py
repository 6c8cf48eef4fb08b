"""A measured run known from its events, against the simulation of its schedule on its own trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from simrl.analysis.agreement import Agreement, agree
from simrl.analysis.measured_events import measured_result
from simrl.result.result import Result
from simrl.simulate.run import simulate_prepared
from simrl.trace.importers.rollout_trace import read_events
from simrl.trace.trace import Trace
from tests.helpers import LINEAR, on_gpus, prepared

Line = dict[str, Any]
ORIGIN_S = 1024.0  # wall clock of the first dispatch, exact in floats


def simulated(steps: int, trace: Trace | None = None, in_flight: bool = True) -> Result:
    scenario = on_gpus("nemo_rl_async", {"max_age": 2, "in_flight": in_flight}, 2, steps=steps)
    return simulate_prepared(prepared(scenario.with_fields("training", **LINEAR), trace))


def events_of(result: Result) -> list[Line]:
    """The run as NeMo-RL would log it: a line for each dispatch, seal, update and weight sync."""
    samples = result.samples.to_pandas()
    segments = result.segments.to_pandas().groupby("uid")
    group = {
        uid: f"{epoch}-{prompt}"
        for uid, epoch, prompt in samples[["uid", "epoch", "prompt_id"]].itertuples(index=False)
    }
    lines: list[Line] = []

    def add(event: str, at_s: float, **fields: Any) -> None:
        lines.append({"t": ORIGIN_S + at_s, "run": "a1", "event": event, **fields})

    for row in samples[samples["finished_s"].notna()].to_dict("records"):
        parts = segments.get_group(row["uid"])
        ids = {
            "group_id": group[row["uid"]],
            "prompt_id": row["prompt_id"],
            "generation_index": row["sample"],
        }
        add(
            "rollout_dispatched",
            row["started_s"],
            **ids,
            weight_version=int(parts["policy_version"].iloc[0]),
        )
        counts = parts.groupby("policy_version")["tokens"].sum().items()
        add(
            "rollout_sealed",
            row["finished_s"],
            **ids,
            prompt_tokens=row["prompt_tokens"],
            response_tokens=row["generated_tokens"],
            tokens_by_version={str(version): int(tokens) for version, tokens in counts if tokens},
        )
    for step in result.steps.to_pylist():
        trained = samples["uid"][samples["trained_step"] == step["step"]]
        groups = sorted({group[uid] for uid in trained})
        lasted_s = step["finished_s"] - step["started_s"]
        add(
            "train_step",
            step["finished_s"],
            step=step["step"] + 1,
            group_ids=groups,
            duration_s=lasted_s,
        )
    spans = result.spans.to_pandas()
    loads = spans[(spans["kind"] == "load_weights") & (spans["policy_version"] > 0)]
    for version, load in loads.groupby("policy_version"):
        ended_s = load["ended_s"].max()
        add(
            "weight_sync",
            ended_s,
            weight_version=version,
            duration_s=ended_s - load["started_s"].min(),
        )
    return lines


def measured(folder: Path, lines: list[Line]) -> Path:
    path = folder / "rollout_trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def compared(folder: Path, lines: list[Line], in_flight: bool = True) -> Agreement:
    """The first updates of a logged run against their simulation on the run's own lengths."""
    run = read_events(measured(folder, lines))
    predicted = simulated(3, run.trace, in_flight)
    return agree(predicted, measured_result(run, predicted))


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_simulated_run_that_is_logged_agrees_with_its_simulation(tmp_path: Path, in_flight: bool):
    agreement = compared(tmp_path, events_of(simulated(6, None, in_flight)), in_flight)
    assert not agreement.differences
    for instants in agreement.instants:
        assert len(instants.events) > 1 and instants.largest == pytest.approx(0, abs=1e-9), instants
