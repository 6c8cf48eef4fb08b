"""Metrics logs are read in every form that people have them: consoles, JSON Lines, and exports of W&B and TensorBoard."""

import csv
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.tokens import token_counter
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import UNSEPARATED

VERL = {
    "response_length/mean": 300.0,
    "response_length/max": 900.0,
    "response_length/min": 20.0,
    "response_length/clip_ratio": 0.0,
    "prompt_length/mean": 80.0,
    "prompt_length/max": 90.0,
    "prompt_length/min": 70.0,
    "perf/total_num_tokens": 6080.0,
    "timing_s/gen": 12.5,
    "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 4.0,
    "timing_s/step": 20.0,
}
TIMED = "profiling/Time taken: GRPOTrainer."
TRL = {
    "train/completions/mean_length": 300.0,
    "train/completions/min_length": 20.0,
    "train/completions/max_length": 900.0,
    "train/completions/clipped_ratio": 0.0,
    "train/step_time": 20.0,
}
SLIME = {
    "perf/rollout_time": 12.5,
    "rollout/response_len/mean": 300.0,
    "rollout/response_len/max": 900,
    "rollout/response_len/min": 20,
    "perf/actor_train_time": 4.0,
    "perf/log_probs_time": 1.0,
}
NEMO = {
    "timing/train/generation": 12.5,
    "timing/train/policy_and_reference_logprobs": 1.0,
    "timing/train/policy_training": 4.0,
    "timing/train/total_step_time": 20.0,
    "timing/train/prepare_for_generation/total": 2.0,
    "train/mean_gen_tokens_per_sample": 300.0,
    "train/gen_tokens_per_sample/min": 20.0,
    "train/gen_tokens_per_sample/max": 900.0,
    "train/mean_prompt_length": 80.0,
    "train/total_num_tokens": 6080.0,
}
LENGTHS = {
    f"response_length/{key}": VERL[f"response_length/{key}"]
    for key in ("mean", "max", "min", "clip_ratio")
}
PHASES = {
    f"timing_s/{key}": VERL[f"timing_s/{key}"]
    for key in ("gen", "old_log_prob", "update_actor", "step")
}


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, header: Sequence[str], *rows: Sequence[object]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])
    return path


def console(**changes: float) -> str:
    entries = {**VERL, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return (
        " - ".join(
            [
                "step:{step}",
                *(f"{key}:{value}" for key, value in entries.items() if value is not None),
            ]
        )
        + "\n"
    )


def refusal(read, *arguments, **named) -> str:
    with pytest.raises(InputError) as refused:
        read(*arguments, **named)
    assert str(refused.value).isprintable()
    return str(refused.value)


def check(metrics, steps: Sequence[int] = (1, 2), phases: Sequence[str] = tuple(PHASES)) -> None:
    """The metrics have the lengths and times of the constants above, and make a trace."""
    assert metrics["step"].tolist() == list(steps)
    for key, value in {**LENGTHS, **{phase: PHASES[phase] for phase in phases}}.items():
        assert metrics[key].tolist() == [value] * len(steps), key
    assert metrics["perf/total_num_tokens"].tolist() == [6080.0] * len(steps)
    trace = trace_from_verl_metrics(metrics, 4, 0, cap_tokens=900)
    assert len(trace) == 16 * len(steps)
    assert trace.column("response_tokens").max() == 900


# Exports of W&B and TensorBoard


def test_a_wandb_history_of_verl_is_read_as_json_lines_and_as_csv(tmp_path):
    extra = {"_runtime": 5.5, "_timestamp": 1.7e9, "note": "text", "ok": True, "nothing": None}
    rows = [{"_step": step, **VERL, **extra} for step in (1, 2)]
    check(read_metrics(jsonl(tmp_path / "history.jsonl", *rows)))
    check(read_metrics(jsonl(tmp_path / "history.txt", *rows)))
    header = ["", "_step", *VERL, "note"]
    values = [[i, i + 1, *VERL.values(), "text, quoted"] for i in range(2)]
    metrics = read_metrics(table(tmp_path / "history.csv", header, *values))
    check(metrics)
    assert metrics.attrs["format"] == "verl" and "note" not in metrics and "_runtime" not in metrics


def test_charts_that_wandb_exported_one_by_one_are_a_folder(tmp_path):
    for i, (tag, value) in enumerate(VERL.items()):
        name = f"grpo - 7b - {tag}"
        rows = [[step, value, value, value] for step in (1, 2)]
        table(
            tmp_path / "charts" / f"wandb_{i}.csv",
            ["Step", name, f"{name}__MIN", f"{name}__MAX"],
            *rows,
        )
    check(read_metrics(tmp_path / "charts"))
    two = table(
        tmp_path / "two.csv", ["Step", "a - timing_s/gen", "b - timing_s/gen"], [1, 2.0, 3.0]
    )
    assert "two columns are 'timing_s/gen'" in refusal(read_metrics, two)


def test_scalars_of_tensorboard_are_a_folder_of_one_file_a_tag_or_one_wide_table(tmp_path):
    for tag, value in {**VERL, "actor/lr": 1e-6}.items():
        name = f"run-.-tag-{tag.replace('/', '_')}.csv"
        table(
            tmp_path / "scalars" / name,
            ["Wall time", "Step", "Value"],
            [1.7e9, 1, value],
            [1.7e9, 2, value],
        )
    check(read_metrics(tmp_path / "scalars"))
    check(read_metrics(tmp_path / "scalars", "tensorboard"))
    other = table(
        tmp_path / "scalars" / "run-b-tag-timing_s_gen.csv",
        ["Wall time", "Step", "Value"],
        [1.7e9, 1, 3.0],
    )
    assert "timing_s/gen is also in run-.-tag-timing_s_gen.csv" in refusal(
        read_metrics, other.parent
    )
    wide = table(
        tmp_path / "wide.csv",
        ["Wall time", "Step", *VERL],
        *([1.7e9, i, *VERL.values()] for i in (1, 2)),
    )
    check(read_metrics(wide))


def test_of_one_tag_alone_the_missing_ones_are_named(tmp_path):
    file = table(tmp_path / "timing_s_gen.csv", ["Wall time", "Step", "Value"], [1.7e9, 1, 12.5])
    assert "without the mean length of responses (response_length/…)" in refusal(
        read_metrics, file, prompt_tokens=80, samples=16
    )


def test_cells_that_are_empty_belong_to_other_rows_and_a_step_logged_again_counts(tmp_path):
    header = ["_step", *VERL]
    first = [1, 999.0, *([""] * (len(VERL) - 1))]
    check(read_metrics(table(tmp_path / "h.csv", header, first, [1, *VERL.values()])), steps=[1])


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        (["timing_s/gen"], [3], "no column for the step"),
        (["Step", "timing_s/gen"], [1.5, 3], "step 1.5 is no whole number"),
        (["Step", "timing_s/gen"], [1, 3, 4], "row 2: 3 cells, and the header has 2"),
        (["a", "b"], [1, 3], "no metrics of verl"),
    ],
)
def test_tables_that_are_none_are_refused_by_place(tmp_path, header, row, said):
    assert said in refusal(read_metrics, table(tmp_path / "t.csv", header, row))


def test_a_folder_without_tables_is_refused(tmp_path):
    assert "is a folder without .csv" in refusal(read_metrics, tmp_path)


# verl's console


def test_tokens_that_a_line_lacks_come_from_the_ranks_means(tmp_path):
    file = tmp_path / "run.log"
    per_rank = {"global_seqlen__mean": 760.0}
    lacking = console(**per_rank, perf__total_num_tokens=None)
    file.write_text(console(**per_rank).format(step=1) + lacking.format(step=2))
    check(read_metrics(file))  # the first line tells the number of ranks
    file.write_text(lacking.format(step=1) + lacking.format(step=2))
    check(read_metrics(file, samples=16))
    assert "how many responses a step has; give them with --samples" in refusal(read_metrics, file)
    file.write_text(lacking.format(step=1) + lacking.replace("760.0", "1520.0").format(step=2))
    assert read_metrics(file, samples=16)["perf/total_num_tokens"].tolist() != [
        6080.0,
        6080.0,
    ]  # twice the responses


def test_flags_on_a_line_are_passed_over(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(
        console().format(step=1).replace(" - timing_s/gen", " - a/flag:True - timing_s/gen")
    )
    check(read_metrics(file), steps=[1])


def test_a_log_of_a_real_run_with_three_decimals_is_read(shared_data, tmp_path):
    log = shared_data / "real_runs" / "verl_logs" / "qwen2-7b_fsdp" / "output.log"
    metrics = read_metrics(log)
    trace = trace_from_verl_metrics(metrics, 5, 0)
    assert len(trace.step_slices) == 210 and len(trace) == 210 * 5120
    lacking = tmp_path / "output.log"
    lacking.write_text(re.sub(r" - perf/total_num_tokens:[0-9.]+", "", log.read_text()))
    found = read_metrics(lacking, samples=5120)
    trained = metrics["step"] > 0
    apart = found["perf/total_num_tokens"][trained] / metrics["perf/total_num_tokens"][trained] - 1
    assert (
        apart.abs().max() < 1e-9
    )  # from the mean over the ranks, not from lengths with three decimals


@pytest.mark.parametrize("run", ["f6sves9c", "i80f2v90", "yeu8r64c"])
def test_logs_of_real_agents_say_that_tools_are_counted(shared_data, run):
    log = shared_data / "real_runs" / "agent_opd" / run / "output.log"
    trace = trace_from_verl_metrics(read_metrics(log), 16, 0)
    assert UNSEPARATED in trace.metadata.notes


# TRL, slime, NeMo-RL


def test_trls_history_is_read_as_csv_and_its_trainer_state_without_times(tmp_path):
    header = [
        "_step",
        TIMED + "vLLM.generate",
        TIMED + "_get_per_token_logps",
        "train/global_step",
        *TRL,
    ]
    nothing = [""] * len(TRL)
    rows = [[0, 12.5, "", "", *nothing], [1, "", 1.0, "", *nothing], [2, "", "", 1, *TRL.values()]]
    rows += [[3, 12.5, 1.0, "", *nothing], [4, "", "", 2, *TRL.values()]]
    metrics = read_metrics(
        table(tmp_path / "history.csv", header, *rows), samples=16, prompt_tokens=80
    )
    check(metrics, phases=["timing_s/gen", "timing_s/old_log_prob", "timing_s/step"])
    history = [
        {"step": step, **{key.removeprefix("train/"): v for key, v in TRL.items()}}
        for step in (1, 2)
    ]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [*history, {"step": 2, "train_runtime": 3.0}]}))
    check(read_metrics(state, samples=16, prompt_tokens=80), phases=["timing_s/step"])
    lines = jsonl(tmp_path / "log.jsonl", *history)
    check(read_metrics(lines, samples=16, prompt_tokens=80), phases=["timing_s/step"])
    assert "no generation times" in refusal(read_metrics, lines, samples=16, prompt_tokens=80)
    assert "--prompt-tokens" in refusal(read_metrics, lines, samples=16)


def test_slime_is_read_from_its_console_and_from_a_wandb_history(tmp_path):
    phases = ["timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor"]
    log = tmp_path / "run.log"
    log.write_text(
        "".join(f"[2025-11-02 10:00:00] data.py:120 - perf {n}: {SLIME}\n" for n in (1, 2))
    )
    check(read_metrics(log, samples=16, prompt_tokens=80), phases=phases)
    half = len(SLIME) // 2 + 1
    parts = [dict([*SLIME.items()][:half]), dict([*SLIME.items()][half:])]
    rows = [
        {"_step": 2 * n + i, "rollout/step": n, **part}
        for n in (1, 2)
        for i, part in enumerate(parts)
    ]
    check(
        read_metrics(jsonl(tmp_path / "w.jsonl", *rows), samples=16, prompt_tokens=80),
        phases=phases,
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("step:1 - a:" + "9" * 200_000 + "x - b:1\n", "is not key:number"),
        (
            "step:1 - timing_s/" + " - timing_s/".join(f"{i}:1" for i in range(10_002)) + "\n",
            "more than 10,000 metrics",
        ),
        ("perf 1: {" * 40_000 + "\n", "no metrics"),
        ("perf 1: {" + "'a':1," * 400_000 + "}\n", "2,400,002 characters, 1,000,000 are the most"),
    ],
    ids=["digits", "tags", "beginnings", "size"],
)
def test_a_hostile_line_of_a_console_is_refused_at_once(tmp_path, line, said):
    began_s = time.process_time()
    (tmp_path / "run.log").write_text(line + console() if said.startswith("is not") else line)
    assert said in refusal(read_metrics, tmp_path / "run.log")
    assert time.process_time() - began_s < 2.0


def test_nemo_rl_is_read_from_a_history_and_from_dumped_tensorboard(tmp_path):
    check(read_metrics(jsonl(tmp_path / "w.jsonl", *({"_step": step, **NEMO} for step in (1, 2)))))
    dumped = tmp_path / "metrics.json"
    dumped.write_text(json.dumps({tag: {"1": value, "2": value} for tag, value in NEMO.items()}))
    check(read_metrics(dumped))


NEMO_CONSOLE = """
========================= Step {n}/3 =========================
▶ Preparing batch...
📊 Training Results:
  • Loss: 0.0123
  • Mean Generation Length: 300.0000

⏱️  Timing:
  • Total step time: 20.00s
  • generation: 12.50s (62.5%)
  • policy_training: 4.00s (20.0%)
  • prepare_for_generation/total: 2.00s (10.0%)
  • policy_and_reference_logprobs: 1.00s (5.0%)
"""


def test_nemo_rls_console_has_times_and_mean_lengths_and_counts_steps_over_epochs(tmp_path):
    epoch = "========================= Epoch {n}/2 =========================\n"
    log = tmp_path / "run.log"
    log.write_text(
        epoch.format(n=1)
        + NEMO_CONSOLE.format(n=1)
        + NEMO_CONSOLE.format(n=2)
        + epoch.format(n=2)
        + NEMO_CONSOLE.format(n=1)
    )
    metrics = read_metrics(log, lengths=False)
    assert metrics["step"].tolist() == [1, 2, 3]
    for phase, value in PHASES.items():
        assert metrics[phase].tolist() == [value] * 3
    assert metrics["response_length/mean"].tolist() == [300.0] * 3
    assert "without the max length of responses" in refusal(
        read_metrics, log, samples=16, prompt_tokens=80
    )


def test_a_format_may_be_asked_for_by_name_and_must_fit(tmp_path):
    file = jsonl(tmp_path / "w.jsonl", {"_step": 1, **VERL})
    check(read_metrics(file, "wandb"), steps=[1])
    assert "is it the log of TRL's GRPOTrainer" in refusal(read_metrics, file, "trl")
    assert "choose one of verl, trl, slime, nemo" in refusal(read_metrics, file, "openrlhf")


# The command


def test_a_metrics_log_in_place_of_a_dump_is_told_to_be_one(simrl, tmp_path):
    log = tmp_path / "run.log"
    log.write_text("noise\n" + console().format(step=1))
    done = simrl(
        "trace",
        "import",
        "verl",
        str(log),
        "-o",
        str(tmp_path / "t.parquet"),
        "--chars-per-token",
        "3",
    )
    assert done.code == 2 and "add --metrics" in done.err and done.err.count("\n") == 1
    history = jsonl(tmp_path / "w.jsonl", {"_step": 1, **VERL})
    assert "add --metrics" in refusal(
        import_dump, "verl", history, token_counter(chars_per_token=3)
    )


def test_every_format_is_imported_by_the_command(simrl, tmp_path):
    out = str(tmp_path / "t.parquet")
    log = tmp_path / "run.log"
    log.write_text("".join(f"perf {n}: {SLIME}\n" for n in (1, 2)))
    how = ["--metrics", "--group", "4", "--cap-tokens", "900", "-o", out]
    done = simrl(
        "trace", "import", "verl", str(log), *how, "--samples", "16", "--prompt-tokens", "80"
    )
    assert done.code == 0 and "32 samples, 2 steps" in done.out
    done = simrl("trace", "import", "verl", str(log), *how, "--samples", "16")
    assert done.code == 2 and "--prompt-tokens" in done.err
    done = simrl("trace", "import", "verl", str(log), *how, "--format", "verl")
    assert done.code == 2 and "step:N" in done.err
