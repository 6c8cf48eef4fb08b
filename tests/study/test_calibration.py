"""Calibration on the log of a run: what was put in comes out, what is held out is not looked at, what is missing is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import simrl
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profilers.roofline import roofline_profile
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.scenario.presets import read_presets, write_presets
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate
from simrl.study import calibration, corrections, progress
from simrl.study.calibration import (
    Calibration,
    calibrate,
    launched,
    phase_s,
    predicted,
    presets_of,
    scenario_yaml,
)
from simrl.study.compare import ALONE, simulate_compared, the_result
from simrl.study.corrections import Correction, rollout_s, updates_s, with_generation
from simrl.study.logged_lengths import lengths_of, usable_steps, write_alike
from simrl.study.whatif import alternatives
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import Trace, read_trace, write_trace

GROUP, PROMPTS, STEPS = 4, 24, 14
FORWARD, PASS_S, SEQUENCE_S, STEP_S = 2.2, 0.004, 0.0003, 3.0
MFU, UPDATE_S, LOG_PROB_MFU, LOG_PROB_S = 0.24, 0.8, 0.3, 0.4


def started(
    path: Path, steps: int, system: str = "verl_colocated", **parameters: object
) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "run",
            "steps": steps,
            "model": "qwen3-0.6b",
            "cluster": {"gpu": "h100", "gpus": 2, "tp": 1},
            "workload": {"trace": str(path)},
            "profile": {"roofline": {}},
            "system": {"name": system, **parameters},
        }
    )


def lengths_of_a_run(steps: int = STEPS) -> pd.DataFrame:
    """What verl logs of lengths: means and longest responses that differ from step to step."""
    samples = GROUP * PROMPTS
    rows = []
    for step in range(1, steps + 1):
        mean, longest = 120 + 40 * (step * 5 % 7), 700 + 220 * (step * 3 % 5)
        rows.append(
            {
                "step": step,
                "response_length/mean": float(mean),
                "response_length/max": float(longest),
                "response_length/min": 20.0,
                "response_length/clip_ratio": 0.0,
                "prompt_length/mean": 50.0,
                "prompt_length/max": 50.0,
                "prompt_length/min": 50.0,
                "perf/total_num_tokens": float(samples * (mean + 50)),
            }
        )
    return pd.DataFrame(rows)


def with_known_corrections(scenario: Scenario) -> Scenario:
    scenario = with_generation(scenario, FORWARD, PASS_S, SEQUENCE_S, STEP_S)
    known = {
        "mfu": MFU,
        "update_overhead_s": UPDATE_S,
        "log_prob_mfu": LOG_PROB_MFU,
        "log_prob_overhead_s": LOG_PROB_S,
        "switch_s": 0.0,  # a log's phases contain the changes between them
        "switch_transfer_s": 0.0,
    }
    return scenario.model_copy(update={"training": scenario.training.model_copy(update=known)})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console log of a run that was simulated with known corrections."""
    folder = tmp_path_factory.mktemp("run")
    metrics = lengths_of_a_run()
    write_trace(trace_from_verl_metrics(metrics, GROUP, 0, cap_tokens=2000), folder / "run.parquet")
    result = simulate(with_known_corrections(started(folder / "run.parquet", STEPS)))
    whole_s, response_s = rollout_s(result)
    metrics["timing_s/gen"] = whole_s + STEP_S
    metrics["timing_s/agent_loop/generate_sequences/mean"] = response_s
    metrics["timing_s/update_actor"] = phase_s(result, "train")
    metrics["timing_s/old_log_prob"] = phase_s(result, "log_prob")
    metrics["timing_s/step"] = np.diff(result.steps.column("finished_s").to_numpy(), prepend=0.0)
    return written(metrics, folder / "run.log")


def written(metrics: pd.DataFrame, path: Path) -> Path:
    lines = ["a line of something else"]
    for _, row in metrics.iterrows():
        values = " - ".join(
            f"{key}:{value}" for key, value in row.items() if key != "step" and not np.isnan(value)
        )
        lines.append(f"step:{int(row['step'])} - {values}")
    path.write_text("\n".join(lines) + "\n")
    return path


def values(found):
    return {c.name: c.value for c in found.corrections}


@pytest.mark.slow
def test_the_corrections_that_a_run_was_simulated_with_are_found_again(log, tmp_path):
    recorded = read_trace(log.parent / "run.parquet")
    found = calibrate(read_metrics(log), started, (1, 9), GROUP, tmp_path, None, recorded)
    value = values(found)
    assert value["decode_efficiency"] == pytest.approx(1 / FORWARD, rel=0.05)
    assert value["pass_overhead_s"] == pytest.approx(PASS_S, rel=0.05)
    assert value["interference_s"] == pytest.approx(SEQUENCE_S, rel=0.05)
    assert value["step_overhead_s"] == pytest.approx(STEP_S, rel=0.05)
    assert value["train_mfu"] == pytest.approx(MFU, rel=0.05)
    assert value["update_overhead_s"] == pytest.approx(UPDATE_S, rel=0.05)
    assert value["log_prob_mfu"] == pytest.approx(LOG_PROB_MFU, rel=0.05)
    assert value["log_prob_overhead_s"] == pytest.approx(LOG_PROB_S, rel=0.05)
    assert all(c.low <= c.value <= c.high and c.meaning and c.key for c in found.corrections)
    errors = {e.phase: e for e in found.errors}
    assert set(errors) == {"generation", "log_prob", "update", "step"}
    assert all(e.steps_in == 9 and e.steps_out == 5 and e.mape_out < 0.01 for e in errors.values())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The updates of each simulation of a calibration, as they come."""
    steps: list[int] = []
    simulate_one = calibration.simulate_prepared

    def counted(prepared: Prepared) -> Result:
        steps.append(prepared.scenario.steps)
        return simulate_one(prepared)

    monkeypatch.setattr(calibration, "simulate_prepared", counted)
    return steps


def test_a_run_in_turns_is_simulated_once_a_correction_of_a_pass_and_not_for_each_guess(
    log, tmp_path, simulated
):
    calibrate(read_metrics(log), started, (1, 9), GROUP, tmp_path, cap_tokens=2000)
    corners, checks, predictions = [9] * 4, [9] * 3, [STEPS] * 3  # the fit, and both ends
    assert simulated == [*corners, *checks, *predictions]


@pytest.mark.slow
def test_a_run_that_is_not_linear_in_its_corrections_is_simulated_for_each_guess(
    log, tmp_path, simulated, caplog
):
    def with_shortest_pass(path: Path, steps: int) -> Scenario:
        return started(path, steps).with_fields("profile", least_pass_s=0.004)

    found = calibrate(
        read_metrics(log), with_shortest_pass, (1, 9), GROUP, tmp_path, cap_tokens=2000
    )
    assert len(simulated) > 30
    (note,) = caplog.messages
    assert (
        "every guess of the corrections is simulated" in note and "generation is not linear" in note
    )
    assert found.errors[0].mape_in < 0.1


@pytest.mark.parametrize("end", [1, 2])
def test_every_fit_that_is_returned_is_checked_by_a_simulation(
    log, tmp_path, simulated, monkeypatch, end
):
    used = corrections.equally_good

    def wide(residuals, parameters, *solved, **noise):
        values, *others = used(residuals, parameters, *solved, **noise)
        if parameters[0].name == "decode_efficiency":
            values[end, 0] *= 1.5
        return values, *others

    monkeypatch.setattr(corrections, "equally_good", wide)
    calibrate(read_metrics(log), started, (1, 5), GROUP, tmp_path, cap_tokens=2000)
    assert simulated.count(5) == 4 + 3  # corners, checks


SYSTEMS = [
    ("verl_colocated", {}),
    ("one_step_off", {"rollout_share": 0.5}),
    ("areal", {"rollout_share": 0.5, "eta": 1}),
    (
        "verl_fully_async",
        {"rollout_share": 0.5, "mini_batch": PROMPTS, "staleness": 0.5, "sync_step": 2},
    ),
]


def logged(result: Result, noise: float) -> pd.DataFrame:
    """What verl logs of a run: the lengths that each update trained, and noisy times."""
    samples = result.samples.to_pandas().dropna(subset=["trained_step"])
    by_step = samples.groupby("trained_step")
    prompt, response = by_step["prompt_tokens"], by_step["generated_tokens"]
    metrics = pd.DataFrame({"step": range(1, result.steps.num_rows + 1)})
    for kind, tokens in (("prompt_length", prompt), ("response_length", response)):
        for name in ("mean", "max", "min"):
            metrics[f"{kind}/{name}"] = getattr(tokens, name)().to_numpy(dtype=float)
    metrics["response_length/clip_ratio"] = 0.0
    metrics["perf/total_num_tokens"] = (prompt.sum() + response.sum()).to_numpy(dtype=float)
    turns = result.metadata["system"] == "verl_colocated"
    step_s, response_s = updates_s(result)
    if turns:
        whole_s, response_s = rollout_s(result)
        metrics["timing_s/gen"] = whole_s + STEP_S
    metrics["timing_s/agent_loop/generate_sequences/mean"] = response_s
    metrics["timing_s/update_actor"] = phase_s(result, "train")
    metrics["timing_s/old_log_prob"] = phase_s(result, "log_prob")
    metrics["timing_s/step"] = step_s
    timed, rng = [key for key in metrics if key.startswith("timing_s/")], np.random.default_rng(5)
    metrics[timed] *= np.exp(noise * rng.standard_normal((len(metrics), len(timed))))
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(("system", "parameters"), SYSTEMS)
def test_later_steps_of_a_noisy_run_are_predicted_within_five_percent_under_any_system(
    system, parameters, tmp_path
):
    steps = 16
    write_trace(
        trace_from_verl_metrics(lengths_of_a_run(steps), GROUP, 0, cap_tokens=2000),
        tmp_path / "truth.parquet",
    )
    start = partial(started, system=system, **parameters)
    metrics = logged(
        simulate(with_known_corrections(start(tmp_path / "truth.parquet", steps))), noise=0.03
    )
    file = written(metrics, tmp_path / "run.log")
    found = calibrate(read_metrics(file), start, (1, steps // 2), GROUP, tmp_path, cap_tokens=2000)
    errors = {e.phase: e for e in found.errors}
    assert {"update", "step"} <= set(errors) and ("generation" in errors) == (
        system == "verl_colocated"
    )
    for error in errors.values():
        assert error.steps_out == steps // 2 and abs(error.bias_out) < 0.05, error
        assert error.low_s <= error.predicted_s <= error.high_s


@pytest.mark.slow
def test_a_nemo_rl_console_with_the_runs_own_lengths_is_calibrated_as_the_same_run_of_verl(
    log, tmp_path
):
    metrics = read_metrics(log)
    recorded = trace_from_verl_metrics(metrics, GROUP, 0, cap_tokens=2000)
    bar, names = (
        "=" * 25,
        {
            "gen": "generation",
            "old_log_prob": "policy_and_reference_logprobs",
            "update_actor": "policy_training",
        },
    )
    lines = []
    for row in metrics.to_dict("records"):
        lines += [
            f"{bar} Step {row['step']}/{STEPS} {bar}",
            f"  • Mean Generation Length: {row['response_length/mean']:.4f}",
        ]
        lines += [f"  • Total step time: {row['timing_s/step']:.8f}s"]
        lines += [
            f"  • {name}: {row[f'timing_s/{key}']:.8f}s (10.0%)" for key, name in names.items()
        ]
    (tmp_path / "nemo.log").write_text("\n".join(lines) + "\n")
    nemo = read_metrics(tmp_path / "nemo.log", lengths=False)
    for each in ("nemo", "verl"):
        (tmp_path / each).mkdir()
    del metrics["timing_s/agent_loop/generate_sequences/mean"]  # NeMo-RL prints nothing like it
    found = calibrate(nemo, started, (1, 6), GROUP, tmp_path / "nemo", recorded=recorded)
    same = calibrate(metrics, started, (1, 6), GROUP, tmp_path / "verl", recorded=recorded)
    assert values(found) == pytest.approx(values(same), rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_steps_outside_the_window_change_no_correction(log, tmp_path):
    metrics = read_metrics(log)
    first = calibrate(metrics, started, (1, 6), GROUP, tmp_path)
    outside = metrics["step"] > 6
    changed = metrics.copy()
    changed.loc[outside, [key for key in metrics if key.startswith("timing_s/")]] *= 3.7
    changed.loc[outside, "response_length/max"] += 900
    second = calibrate(changed, started, (1, 6), GROUP, tmp_path)
    assert first.corrections == second.corrections
    assert first.errors[0].mape_in == pytest.approx(second.errors[0].mape_in)
    assert second.errors[0].mape_out > first.errors[0].mape_out + 0.3


@pytest.mark.slow
def test_a_step_that_waited_for_something_else_does_not_pull_the_prediction_of_others(
    log, tmp_path
):
    metrics = read_metrics(log)
    metrics.loc[metrics["step"] == 3, "timing_s/gen"] *= 4
    found = calibrate(metrics, started, (1, 9), GROUP, tmp_path, cap_tokens=2000)
    assert found.errors[0].mape_out < 0.1
    clean = calibrate(read_metrics(log), started, (1, 9), GROUP, tmp_path, cap_tokens=2000)
    before, after = ({c.name: c for c in f.corrections}["step_overhead_s"] for f in (clean, found))
    assert abs(after.value - before.value) < 3 * after.error


@pytest.mark.slow
def test_the_calibrated_file_is_a_scenario_that_simulates_the_run(log, tmp_path):
    found = calibrate(read_metrics(log), started, (1, 6), GROUP, tmp_path)
    (tmp_path / "calibrated.yaml").write_text(scenario_yaml(found, "run.log"))
    (scenario,) = load_scenarios(tmp_path / "calibrated.yaml")
    assert (
        scenario.profile == found.scenario.profile and scenario.training == found.scenario.training
    )
    assert scenario.training.switch_s == scenario.training.switch_transfer_s == 0.0
    again = simulate(scenario)
    simulated_s = rollout_s(again)[0] + scenario.training.load_s
    assert simulated_s == pytest.approx(found.steps["generation_simulated_s"].to_numpy())
    assert "# Calibrated on steps 1-6 of run.log" in (tmp_path / "calibrated.yaml").read_text()


def test_a_trace_of_another_run_or_numbered_otherwise_is_refused(log, tmp_path):
    made = read_trace(log.parent / "run.parquet")
    metrics = read_metrics(log)
    early = Trace(
        made.table.set_column(0, "step", pc.subtract(made.table["step"], pa.scalar(1, pa.int32()))),
        made.metadata,
    )
    assert made.table.column_names[0] == "step"
    with pytest.raises(
        InputError, match=r"its step k is the log's step k\+1: number its steps as the log does"
    ):
        calibrate(metrics, started, (1, 6), GROUP, tmp_path, recorded=early)
    metrics["response_length/mean"] *= 1.2
    with pytest.raises(
        InputError, match=r"17% longer or shorter .*; give the trace of this run, or leave it out"
    ):
        calibrate(metrics, started, (1, 6), GROUP, tmp_path, recorded=made)


def test_a_run_starts_from_the_shipped_step_times_of_its_model_if_none_are_named(log):
    settings = ["model=Qwen/Qwen3-8B", "cluster.gpu=H100", "cluster.gpus=8", "cluster.tp=2"]
    path = log.parent / "run.parquet"
    assert launched(log, None, settings, path, 3).profile.path.endswith("qwen3-8b_h100_tp2.parquet")
    assert launched(log, None, [*settings, "cluster.tp=8"], path, 3).profile.path is None
    own = "profile.roofline={memory_efficiency: 0.7}"
    assert launched(log, None, [*settings, own], path, 3).profile.path is None


@pytest.mark.slow
def test_recorded_lengths_take_the_place_of_made_ones(log, tmp_path):
    made = read_trace(log.parent / "run.parquet")
    metrics = read_metrics(log)[["step", "timing_s/gen", "timing_s/update_actor"]]
    found = calibrate(metrics, started, (1, 6), GROUP, tmp_path, recorded=made)
    assert len(read_trace(tmp_path / "run.parquet")) == len(made)
    assert found.errors[0].mape_out < 0.05
    assert not any("made from" in text for text in found.assumed)
    assert "log_prob_mfu" not in values(found)  # not timed: it stays as it was stated


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (1.2, 0.1, None),
        (1.2, 0.9, "decode_efficiency is not known from this window (± 75%)"),
        (
            2.0,
            None,
            "decode_efficiency ended at its bound, 2: the log asks for more than it can give",
        ),
        (0.0, None, None),  # an overhead that is not there
        (
            0.3,
            0.05,
            "decode_efficiency is 0.3, outside 0.5 to 1.5: check model",
        ),
        (1.6, 0.05, "decode_efficiency is 1.6, outside 0.5 to 1.5"),
    ],
)
def test_a_correction_that_the_window_does_not_settle_or_that_is_far_from_its_input_is_a_warning(
    value, error, said
):
    warning = Correction(
        "decode_efficiency", value, error, 0.02, 2.0, "", "speed", "profile.forward_correction"
    ).warning
    assert warning is None if said is None else warning.startswith(said)


def test_every_decoding_sequence_takes_its_overhead_in_every_pass():
    plain = roofline_profile(model_shape("qwen3-0.6b"), gpu("h100"))
    slower = plain.with_corrections(sequence_overhead_s=0.001)
    assert slower.decode_s(7, 300) == pytest.approx(plain.decode_s(7, 300) + 0.007)
    assert slower.verify_s(7, 4, 300) == pytest.approx(plain.verify_s(7, 4, 300) + 0.007)
    assert slower.prefill_s(100) == pytest.approx(plain.prefill_s(100))
    assert "decoding sequence" in slower.corrections[0]


def test_a_pause_that_is_longer_than_the_kernels_of_passes_says_of_which():
    plain = roofline_profile(model_shape("qwen3-0.6b"), gpu("h100"))
    (said,) = plain.with_corrections(between_passes_s=0.005, giver="engine vllm-0.8").corrections
    most = int(said.removesuffix(" sequences").rpartition(" ")[2])
    assert said.startswith(
        "5 ms between passes (engine vllm-0.8), longer than the kernels of a pass of up to "
    )
    pause_s = plain.tables.between_passes_s
    assert plain.decode_s(most, 1024) - pause_s < 0.005 < plain.decode_s(2 * most, 1024) - pause_s
    (short,) = plain.with_corrections(between_passes_s=1e-6).corrections
    assert short == "0.001 ms between passes (set by the scenario)"


def refused(call, *words):
    with pytest.raises(InputError) as raised:
        call()
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_what_a_log_or_a_window_lacks_is_said_in_one_line(log, tmp_path):
    metrics = read_metrics(log)
    metrics.attrs["source"] = "run.log"

    def of(changed, window=(1, 6), launch=started):
        return lambda: calibrate(changed, launch, window, GROUP, tmp_path)

    nothing = [key for key in metrics if key.startswith("timing_s/")]
    refused(of(metrics.drop(columns=nothing)), "run.log", "no timing_s/gen")
    refused(of(metrics.drop(columns="response_length/mean")), "no response_length/mean")
    refused(of(metrics.assign(**dict.fromkeys(nothing, np.nan))), f"none of its {STEPS} steps")
    refused(of(metrics, (100, 120)), "no usable step in the window", "it logs 1-14", "--window")
    fully = "verl_fully_async"  # an update trains a quarter of a batch
    refused(
        of(metrics, launch=lambda path, steps: started(path, steps, fully)),
        fully,
        "trains 24 samples",
        "mini_batch",
    )


def test_the_seconds_that_were_fitted_are_a_preset_in_their_range_and_other_runs_may_have_them(
    tmp_path,
):
    launch = started(tmp_path / "run.parquet", STEPS)
    launch = Scenario.model_validate({**launch.model_dump(), "framework": "verl-fsdp-0.5"})
    slow, fast = (with_generation(launch, 2.2, pass_s, 0.0003, STEP_S) for pass_s in (0.005, 0.003))
    fitted = [
        Correction(
            "decode_efficiency",
            0.45,
            0.1,
            0.02,
            2.0,
            "",
            "",
            "profile.forward_correction (1 over it)",
        ),
        Correction("pass_overhead_s", 0.004, 0.0005, 0.0, 0.1, "s", "", "profile.between_passes_s"),
        Correction("step_overhead_s", 0.0, None, 0.0, 120.0, "s", "", "training.load_s"),
        Correction(
            "update_overhead_s", 0.8, 1.0, 0.0, 300.0, "s", "", "training.update_overhead_s"
        ),
    ]
    none = pd.DataFrame()
    found = Calibration(launch, (1, 9), tuple(fitted), (), none, (), (slow, fast))
    write_presets(tmp_path / "mine.toml", presets_of(found, "run.log"), "Written by a test")
    framework, engine = read_presets(tmp_path / "mine.toml").values()
    assert framework.engine == engine
    pause, update = engine.constants["between_passes_s"], framework.constants["update_overhead_s"]
    assert (pause.low, pause.value, pause.high, pause.kind) == (0.003, 0.004, 0.005, "measured")
    assert (update.low, update.value, update.high) == (0.0, 0.8, 1.8)
    assert "steps 1-9 of run.log" in update.source
    assert framework.constants["switch_s"].value == framework.constants["load_s"].value == 0.0
    assert framework.constants["offload"].value == "phases"  # as the launch had it
    assert not {"mfu", "log_prob_mfu"} & set(framework.constants)


def test_calibrate_prints_corrections_errors_and_assumptions_and_writes_a_scenario(
    simrl, log, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    how = ["model=qwen3-0.6b", "cluster.gpu=h100", "cluster.gpus=2", "cluster.tp=1"]
    done = simrl(
        "calibrate",
        str(log),
        *how,
        "--window",
        "1-6",
        "--group",
        "4",
        "-o",
        "out",
        "--preset",
        "mine.toml",
    )
    assert done.code == 0, done.err
    for word in (
        "decode_efficiency",
        "interference_s",
        "train_mfu",
        "generation",
        "8 steps",
        "Assumed",
        "tp 1",
    ):
        assert word in done.out
    done = simrl(
        "calibrate", str(log), *how, "--window", "1-6", "--group", "4", "-o", "out", "--json"
    )
    told = json.loads(done.out)
    assert set(told) == {
        "window",
        "corrections",
        "errors",
        "warnings",
        "lacks",
        "notes",
        "assumed",
        "steps",
        "scenario",
    }
    assert told == {
        **json.loads((simrl.folder / "out" / "calibration.json").read_text()),
        "scenario": told["scenario"],
    }
    assert load_scenarios(simrl.folder / "out" / "calibrated.yaml")[0].steps == STEPS
    (again,) = load_scenarios(
        simrl.folder / "scenario.yaml", ["framework=mine.toml", "vary=null", "systems=[split]"]
    )
    pause = next(c for c in told["corrections"] if c["name"] == "pass_overhead_s")
    assert again.training.switch_s == 0.0
    assert prepare(again).profile.tables.between_passes_s == pytest.approx(pause["value"])


@pytest.mark.slow
def test_whatif_compares_the_run_with_another_system_on_its_own_steps(simrl, log, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    how = [
        "model=qwen3-0.6b",
        "cluster.gpu=h100",
        "cluster.gpus=2",
        "cluster.tp=2",
        "--window",
        "1-6",
        "--group",
        "4",
    ]
    done = simrl(
        "whatif", str(log), *how, "--system", "one_step_off", "-o", "out", "--jobs", "1", "--json"
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    runs = [(row["system"], row["variant"]) for row in told["systems"]]
    assert [variant for _, variant in runs] == ["", "cluster.tp=1", "cluster.tp=1"]
    assert runs[0][0].startswith("verl_colocated") and runs[2][0].startswith("one_step_off")
    assert (
        "extrapolation" in told["said"][0] and "cluster.tp=1" in told["said"][0]
    )  # one engine cannot be split
    assert told["corrections"] and told["assumed"]
    assert "calibrating: simulations: 1\n" in done.err
    assert (
        told["said"][-1] == "one_step_off: 1 of 2 workers roll out, the best split that was found."
    )
    again = simrl("whatif", str(log), *how, "--system", "one_step_off", "-o", "out", "--jobs", "1")
    assert again.code == 0, again.err  # over what it wrote before


@pytest.mark.slow
def test_whatif_trains_as_many_samples_under_a_system_of_smaller_updates(log, tmp_path):
    """Responses grow: with equal numbers of updates, a system of small ones would train the first, short ones alone."""
    metrics = lengths_of_a_run()
    metrics["response_length/mean"] = metrics["response_length/mean"].sort_values().to_numpy()
    metrics["perf/total_num_tokens"] = GROUP * PROMPTS * (metrics["response_length/mean"] + 50)
    write_trace(
        trace_from_verl_metrics(metrics, GROUP, 0, cap_tokens=2000), tmp_path / "run.parquet"
    )
    own = with_known_corrections(started(tmp_path / "run.parquet", STEPS))
    text = own.model_dump(mode="json", exclude_defaults=True, exclude={"system", "variant", "file"})
    fits = [{"training.mfu": MFU}] * 2
    text |= {"calibration": {"log": "run.log", "steps": "1-6", "fits": fits}}
    (tmp_path / "run.yaml").write_text(json.dumps({**text, "systems": ["verl_colocated"]}))
    systems = ["verl_fully_async", "one_step_off"]
    scenarios, said = alternatives(tmp_path / "run.yaml", systems, 1)
    alike = replace(ALONE, alike=write_alike(tmp_path, tmp_path))
    compared = simulate_compared(scenarios, 1, InputCache(), the_result, alike)
    ranges = [row["ranges"] for row in compared.rows]
    assert [each.steps for each in scenarios] == [STEPS, 4 * STEPS, STEPS]
    first, *others = (simulate(each) for each in scenarios)
    trained = [int(result.steps.column("samples").to_numpy().sum()) for result in (first, *others)]
    assert trained == [
        trained[0]
    ] * 3 and "56 updates train the samples of the run's 14" in " ".join(said)
    for result, scenario, found in zip(others, scenarios[1:], ranges[1:], strict=True):
        speedup = first.steps["finished_s"][-1].as_py() / result.steps["finished_s"][-1].as_py()
        assert scenario.system.parameters["rollout_share"] == 0.5  # of two GPUs, one
        assert found["fits"] == pytest.approx((speedup, speedup), rel=0.02)
        assert found["likeness"][0] <= speedup * 1.02 and speedup <= found["likeness"][1] * 1.02


@pytest.mark.slow
def test_lengths_of_kept_groups_are_trained_and_the_whole_batch_is_generated(log, tmp_path):
    metrics = read_metrics(log)
    batch, kept = GROUP * PROMPTS, GROUP * (PROMPTS - 8 - metrics["step"] % 5)
    mean, log_prob_mfu = metrics["response_length/mean"] + metrics["prompt_length/mean"], []
    per_token_ms = 1000 * metrics["timing_s/gen"] / (kept * metrics["response_length/mean"])
    of_batch = metrics.assign(
        **{"timing_per_token_ms/gen": per_token_ms, "perf/total_num_tokens": batch * mean + 37}
    )
    of_kept = metrics.assign(**{"perf/total_num_tokens": kept * mean})
    for logged_as, samples, when in ((of_batch, None, "after_log_probs"), (of_kept, batch, True)):
        found = calibrate(
            logged_as, started, (1, 6), GROUP, tmp_path, cap_tokens=2000, samples=samples
        )
        assert found.scenario.system.parameters["filter_groups"] == when
        assert any("kept groups" in text for text in found.assumed)
        steps = simulate(found.scenario).steps.column("samples").to_numpy()
        assert len(read_trace(tmp_path / "run.parquet")) == STEPS * batch and (steps == kept).all()
        by_name = values(found)
        log_prob_mfu.append(by_name["log_prob_mfu"])
        assert found.errors[0].phase == "generation" and found.errors[0].mape_out < 0.1
    of_all, of_rest = log_prob_mfu  # in the same seconds
    assert of_all > 1.2 * of_rest


def test_bad_calls_are_told_in_one_line_with_the_remedy(simrl, log):
    for arguments, words in (
        (["calibrate", str(log)], ["model=", "--launch"]),
        (["calibrate", str(log), "--window", "20"], ["--window 20", "FIRST-LAST"]),
        (
            ["calibrate", str(log), "--format", "nemoo"],
            ["did you mean nemo", "verl, trl, slime, nemo_rl"],
        ),
        (["calibrate", "scenario.yaml"], ["scenario.yaml", "no metrics of verl"]),
        (["calibrate", "nothing.log"], ["nothing.log", "no such file"]),
        (["whatif", str(log)], ["--system"]),
        (["whatif", str(log), "--system", "magic"], ["magic", "simrl systems lists all"]),
        (["whatif", str(log), "--system", "{eta: 4}"], ["eta", "name: areal"]),
    ):
        done = simrl(*arguments)
        assert done.code == 2 and done.err.count("\n") == 1 and "Traceback" not in done.err, done
        assert all(word in done.err for word in words), done.err


# Other frameworks' logs


def test_slimes_two_loggers_make_one_row_a_rollout(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(
        "(RolloutManager pid=1) perf 0: {'perf/rollout_time': 120.0, 'rollout/response_len/mean': 300.0, "
        "'rollout/response_len/max': 900, 'rollout/response_len/min': 20, 'rollout/truncated_ratio': 0.0}\n"
        "noise\n"
        "(MegatronTrainRayActor pid=2) rollout 0: {'rollout/total_lengths': 380.0, 'rollout/response_lengths': 300.0, "
        "'rollout/x': nan}\n"
        "(MegatronTrainRayActor pid=2) perf 0: {'perf/actor_train_time': np.float64(4.0), 'perf/log_probs_time': 1.0, "
        "'perf/ref_log_probs_time': 1.5, 'perf/step_time': 125.0}\n"
    )
    (row,) = read_metrics(file, samples=64).to_dict("records")
    assert row["step"] == 0 and row["timing_s/gen"] == 120 and row["timing_s/update_actor"] == 4
    assert row["timing_s/old_log_prob"] == 1 and row["timing_s/ref"] == 1.5
    assert row["prompt_length/mean"] == 80 and row["perf/total_num_tokens"] == 64 * 380
    assert len(trace_from_verl_metrics(read_metrics(file, samples=64), 8, 0, cap_tokens=1000)) == 64
    refused(lambda: read_metrics(file), "--samples")
    file.write_text("perf 0: {'perf/rollout_time': __import__('os')}\n")
    refused(lambda: read_metrics(file), "run.log", "no metrics of verl")


def test_trls_timed_methods_belong_to_the_step_that_is_logged_after_them(tmp_path):
    file = tmp_path / "history.jsonl"
    timed = "profiling/Time taken: GRPOTrainer."
    rows = []
    for step in (1, 2):
        rows += [
            {timed + "vLLM.generate": 10.0 * step},
            {timed + "_get_per_token_logps_and_entropies": 1.0},
        ]
        rows.append(
            {
                "train/global_step": step,
                "train/completions/mean_length": 200.0,
                "train/completions/min_length": 10.0,
                "train/completions/max_length": 800.0,
                "train/completions/clipped_ratio": 0.0,
                "train/step_time": 10.0 * step + 6,
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_metrics(file, samples=32, prompt_tokens=70)
    assert metrics["timing_s/gen"].tolist() == [10, 20]
    assert metrics["timing_s/update_actor"].tolist() == [5, 5]
    assert len(trace_from_verl_metrics(metrics, 8, 0, cap_tokens=1000)) == 64
    refused(lambda: read_metrics(file, samples=32), "--prompt-tokens")
    state = tmp_path / "trainer_state.json"
    state.write_text(
        json.dumps({"log_history": [{"step": 1, "completions/mean_length": 5.0, "step_time": 3.0}]})
    )
    metrics = read_metrics(state, lengths=False)
    assert "no generation times" in metrics.attrs["lacks"]["timing_s/gen"]


# What a log does not tell


@pytest.fixture(scope="module")
def capped(log: Path) -> pd.DataFrame:
    """A run whose steps are all as long as one, with a noise of 1 %, and without overheads that
    cannot be computed."""
    metrics = pd.concat([read_metrics(log).iloc[[0]]] * STEPS, ignore_index=True)
    timed, rng = [key for key in metrics if key.startswith("timing_s/")], np.random.default_rng(3)
    metrics["step"] = range(1, STEPS + 1)
    metrics[timed] *= np.exp(0.01 * rng.standard_normal((STEPS, len(timed))))
    return metrics


def test_steps_of_like_lengths_leave_overheads_where_they_are_expected_and_say_so(capped, tmp_path):
    """I42: nothing is invented that the steps do not tell."""
    result = calibrate(capped, started, (1, STEPS), GROUP, tmp_path)
    by_name = {c.name: c for c in result.corrections}
    for name in ("update_overhead_s", "log_prob_overhead_s"):
        overhead = by_name[name]
        assert overhead.is_expected and overhead.value < overhead.expected + 2 * overhead.spread
        assert f"{name} " in result.unclear[0]
    assert by_name["train_mfu"].value <= gpu("h100").matmul_share
    low, high = sorted(f.training.update_overhead_s for f in result.fits)
    assert low <= by_name["update_overhead_s"].value <= high and low < high
    other = pytest.approx(capped["timing_s/update_actor"].mean(), rel=0.01)
    assert all(e.predicted_s == other for e in result.errors if e.phase == "update")


def test_a_log_that_lacks_a_phase_is_calibrated_for_the_others_and_says_which_it_lacks(
    log, tmp_path
):
    metrics = read_metrics(log)
    result = calibrate(
        metrics.drop(columns=["timing_s/update_actor", "timing_s/old_log_prob"]),
        *(started, (1, 9), GROUP, tmp_path),
    )
    assert [e.phase for e in result.errors] == ["generation", "step"]
    assert result.lacks == ("update (timing_s/update_actor)", "log-probs (timing_s/old_log_prob)")
    assert "lacks" in scenario_yaml(result, "run.log")
    assert result.scenario.training.mfu == started(tmp_path / "run.parquet", 1).training.mfu


def test_a_phase_that_is_timed_outside_the_window_alone_is_lacking(log, tmp_path):
    metrics = read_metrics(log)
    metrics.loc[metrics["step"] <= 9, "timing_s/update_actor"] = np.nan
    result = calibrate(metrics, started, (1, 9), GROUP, tmp_path, cap_tokens=2000)
    assert result.lacks == ("update (timing_s/update_actor)",)


@pytest.mark.parametrize("overhead_s", [1.0, 10.0, 100.0])
def test_overheads_that_the_window_tells_are_found_however_far_from_the_expected_ones(
    overhead_s, tmp_path
):
    """I42: what the steps tell is found."""
    truth = started(tmp_path / "truth.parquet", STEPS)
    metrics = lengths_of_a_run()
    write_trace(
        trace_from_verl_metrics(metrics, GROUP, 0, cap_tokens=2000), tmp_path / "truth.parquet"
    )
    slow = {"mfu": 0.001, "update_overhead_s": overhead_s}  # some 30 s of arithmetic
    result = simulate(with_known_corrections(truth).with_fields("training", **slow))
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(STEPS))
    metrics["timing_s/gen"] = rollout_s(result)[0] + STEP_S
    metrics["timing_s/update_actor"] = phase_s(result, "train") * noise
    calibrated = calibrate(metrics, started, (1, STEPS), GROUP, tmp_path, cap_tokens=2000)
    overhead = {c.name: c for c in calibrated.corrections}["update_overhead_s"]
    assert abs(overhead.value - overhead_s) < 3 * overhead.error and overhead.error < 3


def test_generation_that_is_not_timed_is_what_the_step_has_beside_the_other_phases(log, tmp_path):
    metrics = read_metrics(log)
    result = calibrate(
        metrics.drop(columns="timing_s/gen"), started, (1, 9), GROUP, tmp_path, cap_tokens=2000
    )
    assert any("the log does not time it" in text for text in result.notes)
    assert result.lacks == ("generation (timing_s/gen)",)
    assert {e.phase: e for e in result.errors}["generation"].mape_out < 0.02


@pytest.mark.slow
def test_a_log_of_whole_steps_alone_calibrates_them(log, tmp_path):
    metrics = read_metrics(log)
    phases = ["timing_s/gen", "timing_s/update_actor", "timing_s/old_log_prob"]
    result = calibrate(metrics.drop(columns=phases), started, (1, 9), GROUP, tmp_path)
    assert [e.phase for e in result.errors] == ["step"] and result.errors[0].mape_out < 0.2
    assert len(result.lacks) == 3


def test_a_window_of_fewer_steps_than_corrections_gives_averages_with_a_range(log, tmp_path):
    metrics = read_metrics(log)
    result = calibrate(metrics, started, (1, 2), GROUP, tmp_path, cap_tokens=2000)
    errors = {e.phase: e for e in result.errors}
    assert "2 steps in the window" in result.unclear[0]
    assert errors["update"].mape_in < 0.05 and errors["update"].mape_out < 0.15
    assert all(e.low_s < e.predicted_s < e.high_s for e in result.errors)


def test_evaluations_and_checkpoints_in_a_step_are_not_its_training(log, tmp_path):
    metrics = read_metrics(log)
    evaluated = metrics["step"] % 5 == 0
    tested = metrics.assign(**{"timing_s/testing": np.where(evaluated, 50.0, np.nan)})
    longer = tested.assign(**{"timing_s/step": metrics["timing_s/step"] + 50.0 * evaluated})
    for logged_as, contained in ((longer, True), (tested, False)):
        result = calibrate(logged_as, started, (1, 9), GROUP, tmp_path, cap_tokens=2000)
        assert {e.phase: e for e in result.errors}["step"].mape_out < 0.01
        assert contained == any("evaluations and checkpoints" in text for text in result.notes)


def test_without_a_window_the_first_twenty_steps_are_fitted(capped, tmp_path):
    more = pd.concat([capped, capped], ignore_index=True).assign(step=range(41, 41 + 2 * STEPS))
    assert calibrate(more, started, None, GROUP, tmp_path).window == (41, 60)


# A run that nobody in this project made


@pytest.mark.parametrize("run", ["tp2_n4_b256", "tp2_n4_b128"])
def test_a_run_at_its_cap_predicts_other_layouts_and_batches_within_twelve_percent(
    run, shared_data, tmp_path
):
    folder = shared_data / "practice" / "03-two-configurations"
    log, settings = folder / "base_20steps.log", ["model=qwen3-8b", "cluster.gpu=a100"]

    def start(tp: int) -> Callable[[Path, int], Scenario]:
        layout = [*settings, "cluster.gpus=8", f"cluster.tp={tp}", f"training.tensor_parallel={tp}"]
        return lambda path, steps: launched(log, None, layout, path, steps)

    result = calibrate(read_metrics(log), start(4), (1, 20), 5, tmp_path)
    assert {c.name: c for c in result.corrections}["update_overhead_s"].value < 10
    steps = usable_steps(read_metrics(folder / f"{run}.log"), None, True, 4)
    write_trace(lengths_of(steps, 4, None, None), tmp_path / "other.parquet")
    other = start(2)(tmp_path / "other.parquet", len(steps)).model_copy(update={"warmup_steps": 0})
    errors = {e.phase: e for e in predicted(steps, other, [result.scenario, *result.fits])}
    assert abs(errors["step"].bias_out) < 0.12 and errors["step"].low_s < errors["step"].high_s


@pytest.mark.slow
def test_the_real_runs_later_steps_are_predicted_within_ten_percent(shared_data, tmp_path):
    metrics = read_metrics(shared_data / "verl_run" / "do7bl4gg" / "output.log")
    metrics = metrics[
        (metrics["step"] <= 20) | (metrics["step"] % 6 == 1)
    ]  # a sixth of the rest, to be quick
    launch = Path(__file__).parents[2] / "experiments" / "verl_run_launch.yaml"

    def start(path: Path, steps: int) -> Scenario:
        return load_scenarios(launch, [f"steps={steps}", f"workload.trace={path}"])[0]

    found = calibrate(metrics, start, (1, 20), 16, tmp_path)
    errors = {e.phase: e for e in found.errors}
    assert errors["generation"].steps_in == 18 and errors["generation"].steps_out > 15
    assert errors["generation"].mape_out < 0.10
    assert errors["update"].mape_out < 0.10
    assert errors["step"].mape_out < 0.10


@pytest.mark.slow
def test_from_python_a_run_is_calibrated_and_compared_as_by_the_commands(log, tmp_path):
    how = {"model": "qwen3-0.6b", "cluster.gpu": "h100", "cluster.gpus": 2, "cluster.tp": 1}
    found = simrl.calibrate(log, window=(1, 6), group=4, overrides=how, folder=tmp_path / "kept")
    assert set(found.table.name) >= {"decode_efficiency", "train_mfu"} and len(found.steps) == STEPS
    assert "decode_efficiency" in str(found) and "generation" in str(found.errors.phase.tolist())
    told = json.loads((tmp_path / "kept" / "calibration.json").read_text())
    assert found.data.as_json()["corrections"] == told["corrections"]
    told = simrl.whatif(
        log,
        ["one_step_off"],
        window=(1, 6),
        group=4,
        overrides=[f"{k}={v}" for k, v in how.items()],
    )
    assert [name.partition("(")[0] for name in told.comparison.results] == [
        "verl_colocated",
        "one_step_off",
    ]
    assert "decode_efficiency" in str(told) and "speed-up" in str(told) and len(told.table) == 2
    for call, message in (
        (lambda: simrl.calibrate(log, overrides="model=x"), r"overrides is 'model=x'; give a list"),
        (lambda: simrl.calibrate(log), "say how the run was started: .*, or launch=FILE"),
        (lambda: simrl.calibrate(log, window=(3, 1)), r"window.*=3-1: write FIRST-LAST"),
        (
            lambda: simrl.whatif(log, ["one_step_of"]),
            r"'one_step_of' is unknown \(did you mean one_step_off\?\)",
        ),
        (lambda: simrl.whatif(log, "areal"), r"systems is 'areal'; give a list"),
    ):
        with pytest.raises(InputError, match=message):
            call()
