"""A measured run known from its events, against the simulation of its schedule on its own trace."""

import json
from pathlib import Path
from typing import Any

import pytest

import simrl
from simrl.analysis.agreement import Agreement, agree
from simrl.analysis.instants import Instants
from simrl.analysis.measured_events import measured_result
from simrl.errors import InputError
from simrl.result.result import Result
from simrl.show.tables.agree import KINDS
from simrl.simulate.run import simulate_prepared
from simrl.trace.importers.rollout_trace import read_events
from simrl.trace.trace import Trace, write_trace
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


def instants_of(agreement: Agreement) -> dict[str, Instants]:
    return {instants.kind: instants for instants in agreement.instants}


def test_a_delay_is_seen_at_its_event_with_its_sign(tmp_path: Path):
    lines = events_of(simulated(6))
    sync, seal = (
        [line for line in lines if line["event"] == event][1]
        for event in ("weight_sync", "rollout_sealed")
    )
    sync["t"] += 0.01
    seal["t"] += 20.0
    kinds = instants_of(compared(tmp_path, lines))
    version = f"version {sync['weight_version']}"
    assert (kinds["sync"].at, kinds["sync"].median) == (version, pytest.approx(-0.005))
    assert kinds["sync"].largest == pytest.approx(-0.01)
    late = kinds["seal"]
    assert late.largest == pytest.approx(-20, abs=5) and late.median == pytest.approx(0, abs=1e-9)
    assert [name for name, predicted, measured in late.events if measured - predicted > 1] == [
        late.at
    ]
    assert kinds["dispatch"].largest == pytest.approx(0, abs=1e-9)


def test_ages_are_versions_between_generation_and_training(tmp_path: Path):
    lines = events_of(simulated(6))
    for line in lines:
        if line["event"] == "rollout_sealed":  # all tokens by the oldest weights
            line["tokens_by_version"] = {min(line["tokens_by_version"]): line["response_tokens"]}
    kinds = instants_of(compared(tmp_path, lines))
    predicted = simulated(6).samples.to_pandas()
    assert kinds["age_begun"].largest == 0 and len(kinds["age_begun"].events) <= len(predicted)
    assert all(p <= m for _, p, m in kinds["age_sealed"].events)
    assert {m for _, _, m in kinds["age_begun"].events} <= {0, 1, 2}  # max_age


def test_compare_reads_a_file_of_events_as_what_was_measured(tmp_path: Path):
    path = measured(tmp_path, events_of(simulated(6)))
    scenario = {
        "name": "events",
        "steps": 3,
        "model": "qwen3-0.6b",
        "cluster": {"gpu": "h100", "gpus": 3, "tp": 1},
        "workload": {"trace": str(tmp_path / "run.parquet")},
        "systems": [{"name": "nemo_rl_async", "max_age": 2, "rollout_share": 0.67}],
    }
    write_trace(read_events(path).trace, tmp_path / "run.parquet")
    view = simrl.compare(scenario, measured=path, folder=tmp_path / "out")
    assert {i.kind: len(i.events) > 0 for i in view.data.instants} == dict.fromkeys(KINDS, True)
    assert "Dispatch, s" in str(view) and "Age sealed, share of responses: " in str(view)
    assert view.report(tmp_path / "page.html").stat().st_size > 0
    assert view.data.figures.bubble.measured is None  # events tell no worker's idle time
    written = json.loads((tmp_path / "out" / "agreement.json").read_text())
    assert len(written["instants"][0]["events"]) == len(view.data.instants[0].events)


def test_events_of_another_trace_are_refused(tmp_path: Path):
    run = read_events(measured(tmp_path, events_of(simulated(6))))
    predicted = simulated(3)
    with pytest.raises(InputError, match="runs of different traces"):
        agree(predicted, measured_result(run, predicted))
