"""The board of real runs: what is read of them, that no prediction sees an outcome, and what counts."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.reproduce import predict, real_agent_opd, real_measured
from experiments.reproduce.ledger import read_ledger
from experiments.reproduce.real_board import all_rows
from experiments.reproduce.real_lengths import (
    INPUT_COLUMNS,
    logged_lengths,
    tool_s,
    trace_of,
    whole_lengths,
    with_turns,
)
from simrl.errors import InputError
from tests.command_line import CommandLine

PACKAGE = Path(predict.__file__).parent
QUICK = ("nemo-8b-sync", "opd-f6sves9c", "verl-qwen2-7b-short")
PHASES = ("gen", "old_log_prob", "ref", "update_actor", "step")
KEYS = {
    "id",
    "quantity",
    "measured",
    "predicted",
    "low",
    "high",
    "error",
    "open_inputs",
    "driver",
    "scored",
    "why_not",
    "left_out",
    "left_out_error",
    "setup",
}


def log_line(step: int, mean: float, samples: int, factor: float, longest: int = 900) -> str:
    """A line of verl's console, as long as those of real logs are in their essentials."""
    tokens = {"mean": mean, "max": longest, "min": 1 if longest == 1 else 4, "clip_ratio": 0.0}
    values = {
        "perf/total_num_tokens": samples * (mean + 100),
        **{f"response_length/{key}": value for key, value in tokens.items()},
        **{
            f"prompt_length/{key}": value
            for key, value in {"mean": 100, "max": 120, "min": 80}.items()
        },
        "num_turns/mean": 5.0,
        "timing_s/agent_loop/tool_calls/mean": 0.5,
        "timing_s/agent_loop/tool_calls/max": 9.0,
        **{f"timing_s/{name}": factor * (10.0 + i) for i, name in enumerate(PHASES)},
    }
    return f"step:{step} - " + " - ".join(f"{key}:{value}" for key, value in values.items())


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_data(folder: Path, factor: float = 1.0) -> Path:
    """A folder like that of the real measurements, all seconds times `factor`."""
    runs, s = folder / "real_runs", 10.0 * factor
    nemo = [
        {"model": model, "policy": policy, "step_s": s}
        for model, policy in real_measured.NEMO.values()
    ]
    write_csv(runs / "nemo_rl" / "runs.csv", nemo)
    names = ("generation_s", "logprobs_s", "train_s", "step_s")
    measured = ("published", "user rerun")
    phases = [
        {"model": model, "backend": "megatron", "source": source, **dict.fromkeys(names, s)}
        for model in real_measured.NEMO_PHASES.values()
        for source in measured
    ]
    write_csv(runs / "nemo_rl" / "phases.csv", phases)
    times = dict.fromkeys(("generation_s", "log_prob_s", "train_s", "step_s"), s)
    write_csv(
        runs / "rlinf_verl.csv",
        [{"system": system, **times} for system in ("verl v0.5.0", "rlinf (Aug 2025)")],
    )
    lora = [
        {"run": run, "step_s_p50": s, "rollout_wait_s": 0.1} for run in real_measured.LORA.values()
    ]
    write_csv(runs / "hf_async_lora.csv", lora)
    write_csv(
        runs / "verl_v1.csv",
        [{"mode": mode, "hours": s} for mode in real_measured.VERL_V1.values()],
    )
    marin = [{"run": run, "core_s": s} for run in real_measured.MARIN.values()]
    write_csv(runs / "marin_async.csv", marin)
    for run, log in real_agent_opd.LOGS.items():
        lines = [log_line(step, 300.0, 32, factor) for step in (1, 20, 21, 22)]
        if run == real_agent_opd.ONE_TOKEN:
            lines.append(log_line(23, 1.0, 32, factor, longest=1))
        write_text(folder / log, [*lines, log_line(24, 300.0, 32, factor)[:350]])
    lines = [log_line(1, 200.0, 40, factor), log_line(2, 600.0, 40, factor)]
    write_text(runs / "verl_logs" / "qwen2-7b_fsdp" / "output.log", lines)
    for device in ("NVIDIA RTX A6000", "NVIDIA H100 80GB HBM3"):
        config = {
            "success": True,
            "model_name": "Qwen/Qwen3-0.6B",
            "device_name": device,
            "num_gpus": 1,
            "type": "sft",
        }
        config |= {
            "lora_rank": None,
            "seq_len": 8192,
            "micro_batches": 2,
            "ac": "Recompute",
            "attention": "flash_attention_2",
        }
        step = {"config": config, "metrics": {"step_time": {"mean": factor}}}
        write_text(folder / "train_step_benchmarks" / f"{device}.json", [json.dumps(step)])
    return folder


def write_text(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def board(reproduce: CommandLine, data: Path, *arguments: str) -> dict:
    code, out, err = reproduce("--real", "--data", str(data), "--jobs", "1", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)


def test_other_outcomes_move_no_prediction(
    reproduce: CommandLine, tmp_path_factory: pytest.TempPathFactory
):
    one, other = (
        board(
            reproduce, write_data(tmp_path_factory.mktemp("data"), factor), *QUICK, "--samples", "1"
        )
        for factor in (1, 3)
    )
    assert [e["measured"] * 3 for e in one["rows"]] == pytest.approx(
        [e["measured"] for e in other["rows"]]
    )
    for key in ("id", "quantity", "predicted", "low", "high", "open_inputs"):
        assert [e[key] for e in one["rows"]] == [e[key] for e in other["rows"]], key


def test_seconds_of_phases_are_not_read_with_the_lengths():
    assert not set(INPUT_COLUMNS) & {f"timing_s/{name}" for name in PHASES}


def test_each_quantity_has_its_prediction_error_and_open_inputs(
    reproduce: CommandLine, tmp_path: Path
):
    found = board(reproduce, write_data(tmp_path / "data"), "verl-qwen2-7b-short", "--samples", "2")
    assert [e["quantity"] for e in found["rows"]] == [
        "gen_s",
        "old_log_prob_s",
        "update_actor_s",
        "step_s",
    ]
    for entry in found["rows"]:
        assert set(entry) >= KEYS
        assert entry["low"] <= entry["predicted"] <= entry["high"]
        assert entry["error"] == pytest.approx(entry["predicted"] / entry["measured"] - 1)
        assert "host_speed" in entry["open_inputs"]
    ledger = found["ledgers"]["real_verl_fsdp"]
    assert ledger["gpu"]["kind"] == "assumed" and ledger["tp"]["kind"] == "stated"
    strangers = found["totals"]["strangers"]
    assert (strangers["steps"]["count"], strangers["phases"]["count"]) == (
        1,
        2,
    )  # log-probs are evidence


def test_what_is_not_yet_predicted_or_not_comparable_counts_nowhere(
    reproduce: CommandLine, tmp_path: Path
):
    rows = ("nemo-deepseek-v3-sync", "nemo-phases-8b")
    found = board(reproduce, write_data(tmp_path / "data"), *rows, "--samples", "0")
    assert not any(entry["scored"] for entry in found["rows"])
    assert [bool(entry["why_not"]) for entry in found["rows"]] == [True, False, False, False, False]
    assert found["rows"][1]["measured_again"] == 10
    assert found["totals"]["not_scored"] == 5
    for group in ("leave_one_setup_out", "gave_constants", "strangers"):
        sums = found["totals"][group]
        assert {sums[kind]["count"] for kind in ("steps", "phases", "ratios")} == {0}


def test_a_training_step_is_scored_as_its_own_page_does(reproduce: CommandLine, tmp_path: Path):
    found = board(
        reproduce, write_data(tmp_path / "data"), "train-1xh100-qwen3-0.6b-sft-full-recompute-8192"
    )
    assert found["totals"]["gave_constants"]["training_steps"]["count"] == 1
    assert found["rows"][0]["error"] == pytest.approx(found["rows"][0]["predicted"] - 1)


def test_one_run_alone_prints_its_ledger(
    reproduce: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    data = str(write_data(tmp_path / "data"))
    out = reproduce("--real", "nemo-8b-sync", "--data", data, "--samples", "0", "--jobs", "1").out
    assert "Leave one setup out: steps: 1, median error" in out
    assert re.search(r"mean_sequence_tokens_8b_sync +1019 tokens +stated", out)


def test_the_page_has_the_table_and_the_reasons_of_inputs(reproduce: CommandLine, tmp_path: Path):
    data = write_data(tmp_path / "data")
    board(
        reproduce,
        data,
        "nemo-8b-sync",
        "nemo-deepseek-v3-sync",
        "--samples",
        "1",
        "--page",
        "real_runs.md",
    )
    text = (reproduce.folder / "real_runs.md").read_text(encoding="utf-8")
    assert "| nemo-8b-sync | step_s | 10 |" in text
    assert "- nemo-deepseek-v3-sync: not yet: its kernels in bfloat16" in text
    assert (
        "| sigma_8b | 1.0 (0.7 to 1.4) | assumed |" in text
        and "| max_num_seqs | 1024 | inferred |" in text
    )


def damaged(path: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        text = (data / path).read_text(encoding="utf-8")
        assert old in text
        (data / path).write_text(text.replace(old, new), encoding="utf-8")

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            damaged("real_runs/nemo_rl/runs.csv", "10.0", "ten"),
            "runs.csv: line 2: step_s is 'ten'; a number above 0",
        ),
        (
            damaged("real_runs/rlinf_verl.csv", "rlinf", "other"),
            "rlinf_verl.csv: no line with system 'rlinf'",
        ),
        (damaged("real_runs/verl_v1.csv", "hours", "days"), "verl_v1.csv: line 2: hours is None"),
        (
            damaged("verl_run/do7bl4gg/output.log", "timing_s/gen", "timing_s/gone"),
            "no step has timing_s/gen",
        ),
        (
            lambda data: (data / "real_runs" / "hf_async_lora.csv").unlink(),
            "hf_async_lora.csv: cannot be read",
        ),
    ],
)
def test_damaged_measurements_are_told_in_a_line(damage, said: str, tmp_path: Path):
    data = write_data(tmp_path / "data")
    damage(data)
    with pytest.raises(InputError, match=re.escape(said)):
        real_measured.measured(data)


def test_an_unknown_run_a_missing_folder_and_a_page_of_papers_are_told_in_a_line(
    reproduce: CommandLine, tmp_path_factory: pytest.TempPathFactory
):
    data = str(write_data(tmp_path_factory.mktemp("data")))
    said = reproduce.refuses("--real", "nemo-8b-synk", "--data", data)
    assert "nemo-8b-synk: no real run (did you mean nemo-8b-sync?)" in said
    assert "nowhere: has no folder real_runs; name the folder" in reproduce.refuses(
        "--real", "--data", "nowhere"
    )
    assert "--page: is of the board of real runs" in reproduce.refuses("--page", "x.md")


def test_the_steps_that_constants_come_from_are_neither_predicted_nor_scored(tmp_path: Path):
    data = write_data(tmp_path / "data")
    log = data / real_agent_opd.LOGS["do7bl4gg"]
    steps = logged_lengths(log)
    assert steps[real_agent_opd.window("do7bl4gg", steps)]["step"].tolist() == [21, 22]
    assert set(steps["step"]) == {1, 20, 21, 22}  # the last line was cut off


def test_turns_have_the_logged_tokens_and_tool_seconds(tmp_path: Path):
    log = write_data(tmp_path / "data") / real_agent_opd.LOGS["f6sves9c"]
    plain, steps = trace_of(log, "x", lambda steps: steps["step"] > 0, 2, 16, 8096)
    turned = with_turns(plain, steps, most_pauses=7, observation_tokens=20)
    for before, after in zip(whole_lengths(plain), whole_lengths(turned), strict=True):
        assert before.tolist() == after.tolist()  # the log counts answers as response tokens
    seconds = turned.column("environment_s")
    assert seconds.max() == pytest.approx(9.0) and seconds.mean() == pytest.approx(0.5, rel=0.02)
    pauses = np.array([len(turns) - 1 for turns in turned.table.column("turn_tokens").to_pylist()])
    assert 0.8 < pauses.mean() < 1.8  # (5 - 2) / 2, less of responses that have no room for it
    assert tool_s(1.0, 0.1, 4).tolist() == [0.25] * 4  # a mean above the maximum


@pytest.mark.parametrize("name", predict.FAMILIES)
def test_a_ledger_marks_what_only_informs_and_every_run_has_its_quantities(name: str):
    family = predict.FAMILIES[name]
    assert set(family.ROWS) == set(family.QUANTITIES)
    source = "".join(
        (PACKAGE / f"{module}.py").read_text(encoding="utf-8") for module in (name, "lab")
    )
    asked = set(re.findall(r'inputs\["([^"]+)"', source))
    asked |= set(re.findall(r'inputs\.get\("([^"]+)"', source))
    asked |= {
        text
        for names in re.findall(r"named\(([^)]+)\)", source)
        for text in re.findall(r'"([^"]+)"', names)
    }
    for key, entry in read_ledger(name).inputs.items():
        assert entry.used == any(key == text or key.startswith(f"{text}_") for text in asked), key


def test_ids_are_used_once():
    assert len(all_rows()) == sum(
        len(f.ROWS) + len(getattr(f, "NOT_YET", {})) for f in predict.FAMILIES.values()
    )
