"""Metrics logs are read in every form that people have them: consoles, JSON Lines, and exports of W&B and TensorBoard."""

import csv
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.trace.importers.logs import read_metrics
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
    assert "without the mean length of responses (log response_length/mean" in refusal(
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
        (["Step", "timing_s/gen"], [1, 3, 4], "row 2: 3 cells, the header has 2 (left out)"),
        (["a", "b"], [1, 3], "no column for the step"),
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
    lacks = read_metrics(lines, lengths=False).attrs["lacks"]
    assert "W&B" in lacks["timing_s/gen"] and "--column timing_s/old_log_prob=TAG" in str(lacks)
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
        ("step:1 - a:" + "9" * 200_000 + "x - b:1\n", "no metrics"),
        (
            "step:1 - timing_s/" + " - timing_s/".join(f"{i}:1" for i in range(10_002)) + "\n",
            "more than 10,000 metrics",
        ),
        ("perf 1: {" * 40_000 + "\n", "no metrics"),
        ("perf 1: {'perf/rollout_time': " + "'a':1," * 400_000 + "}\n", "no metrics"),
        ("step:1 - timing_s/gen:" + " " * 4_000_000 + "x\n", "no metrics"),
        ('{"log": "' + "\\" * 1_000_000 + " timing_s/gen step:1 - ", "no metrics"),
        ("Train step 1/3 timeperf/rollout\n│" + " " * 4_000_000 + "\n", "no metrics"),
    ],
    ids=["digits", "tags", "beginnings", "size", "blanks", "escapes", "table"],
)
def test_a_hostile_line_of_a_console_is_refused_at_once(tmp_path, line, said):
    began_s = time.process_time()
    (tmp_path / "run.log").write_text(line)
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
    filled = read_metrics(log, samples=16, prompt_tokens=80)
    assert "Not logged, and estimated" in filled.attrs["notes"][0]
    assert filled["response_length/max"].min() > 300 > filled["response_length/min"].max() >= 1


def test_a_format_may_be_asked_for_by_name_and_must_fit(tmp_path):
    file = jsonl(tmp_path / "w.jsonl", {"_step": 1, **VERL})
    check(read_metrics(file, "wandb"), steps=[1])
    assert "no metrics of TRL in it, but of verl" in refusal(read_metrics, file, "trl")
    assert "choose one of verl, trl, slime, nemo_rl" in refusal(read_metrics, file, "megatron")
    nemo = jsonl(tmp_path / "n.jsonl", {"_step": 1, **NEMO})
    assert read_metrics(nemo, "nemo").attrs["format"] == "nemo_rl"


# Console text as people have it

UNWRAPPED = "".join(
    "(TaskRunner pid=7) " + console(timing_s__gen=12.5 + step / 8).format(step=step)
    for step in (1, 2, 3)
)
DICTIONARIES = "".join(
    f"(RolloutManager pid=71) rollout.py:700 - perf {n}: {SLIME} [repeated 7x across cluster]\n"
    for n in (1, 2)
)


def wrapped(text: str, width: int, prefix: str = "") -> str:
    pieces = (
        [line[i : i + width] for i in range(0, len(line), width)] for line in text.splitlines()
    )
    return "".join(f"\n{prefix}".join(each) + "\n" for each in pieces)


@pytest.mark.parametrize("width", [40, 61, 80, 97, 120, 200, 240])
@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=7) "])
def test_a_line_that_is_wrapped_at_any_width_is_read_as_the_whole_one(tmp_path, width, prefix):
    """I41: a number is read whole, however its line is wrapped."""
    log = tmp_path / "run.log"
    log.write_text(wrapped(UNWRAPPED, width, prefix))
    metrics = read_metrics(log)
    check(metrics, steps=(1, 2, 3), phases=["timing_s/old_log_prob", "timing_s/step"])
    assert metrics["timing_s/gen"].tolist() == [12.625, 12.75, 12.875]
    log.write_text(wrapped(DICTIONARIES, width))
    check(
        read_metrics(log, samples=16, prompt_tokens=80),
        phases=["timing_s/gen", "timing_s/update_actor"],
    )


def test_one_metric_a_line_is_read_as_one_line(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(UNWRAPPED.replace(" - ", "\n"))
    check(read_metrics(log), steps=(1, 2, 3), phases=["timing_s/step"])
    log.write_text(
        "wandb: Run summary:\n"
        + "".join(f"wandb: {key:>30} {value}\n" for key, value in VERL.items())
        + "wandb:      training/global_step 7\n"
    )
    check(read_metrics(log), steps=[7])


def test_a_number_that_another_process_wrote_into_is_left_out_and_noted(tmp_path):
    """I41: a number with other text in it is no number."""
    log = tmp_path / "run.log"
    mixed = UNWRAPPED.replace("old_log_prob:1.0", "old_log_prob:1.0(WorkerDict pid=9) 5 hits", 1)
    log.write_text(mixed)
    metrics = read_metrics(log)
    assert metrics["timing_s/old_log_prob"].isna().tolist() == [True, False, False]
    assert metrics["timing_s/step"].tolist() == [20.0] * 3
    assert "Step 1: no timing_s/old_log_prob" in metrics.attrs["notes"][0]
    notes = trace_from_verl_metrics(metrics, 4, 0, cap_tokens=900).metadata.notes
    assert "Step 1: no timing_s/old_log_prob" in notes


def test_a_number_alone_below_a_record_is_never_read_into_its_last_number(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("step:1 - timing_s/gen:12.5 - timing_s/step:20\n31\nstep:2 - timing_s/gen:3\n")
    metrics = read_metrics(log, lengths=False)
    assert metrics["timing_s/gen"].tolist() == [12.5, 3.0] and "timing_s/step" not in metrics


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-03-01T10:00:00.123456789Z stdout F ",
        "trainer-1  | ",
        "[rank0]: ",
        "12: ",
        "Mar 01 10:00:00 node7 train[4411]: ",
        "\x1b[36m(TaskRunner pid=7, ip=10.0.0.1)\x1b[0m ",
    ],
)
def test_what_stands_before_each_line_is_no_part_of_it(tmp_path, prefix):
    log = tmp_path / "run.log"
    bare = [line.partition(") ")[2] for line in UNWRAPPED.splitlines()]
    log.write_text("".join(f"{prefix}{line}\n" for line in bare))
    check(read_metrics(log), steps=(1, 2, 3), phases=["timing_s/step"])
    lines = [
        json.dumps({"log": line + "\n", "stream": "stdout"}) for line in UNWRAPPED.splitlines()
    ]
    log.write_text("\n".join(lines) + "\n")
    check(read_metrics(log), steps=(1, 2, 3), phases=["timing_s/step"])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("'1,234.5'", 1234.5), ("1,234.5", 1234.5), ("'1", None), ("np.float64(3.5)", 3.5)],
)
def test_a_number_with_separators_of_thousands_is_read_whole_or_not_at_all(
    tmp_path, value, seconds
):
    log = tmp_path / "run.log"
    log.write_text(f"perf 1: {{'perf/rollout_time': {value}, 'perf/actor_train_time': 4.0}}\n")
    metrics = read_metrics(log, lengths=False)
    assert metrics["timing_s/update_actor"].tolist() == [4.0]
    assert metrics.get("timing_s/gen", [None])[0] == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("12.5s (62%)", 12.5), ("500ms", 0.5), ("500 ms", 0.5), ("50%", None), ("1.2k", None)],
)
def test_a_unit_behind_a_number_is_converted_or_the_number_is_left_out(tmp_path, value, seconds):
    log = tmp_path / "run.log"
    log.write_text(NEMO_CONSOLE.format(n=1).replace("12.50s (62.5%)", value))
    assert read_metrics(log, lengths=False).get("timing_s/gen", [None])[0] == seconds
    plain = value.partition(" (")[0]
    log.write_text(f"SUCCESS Step 1 | Time: {plain} | Seq. Length: 345.6 tokens/sample\n")
    assert read_metrics(log, lengths=False).get("timing_s/step", [None])[0] == seconds


def test_numbers_that_no_step_has_are_left_out_with_a_note(tmp_path):
    rows = [{**VERL, "_step": n} for n in range(4)]
    rows[1] |= {"timing_s/gen": -3.0}
    rows[2] |= {"response_length/clip_ratio": 1.5}
    table(tmp_path / "h.csv", [*rows[0]], *([*row.values()] for row in rows))
    metrics = read_metrics(tmp_path / "h.csv")
    assert metrics["timing_s/gen"].isna().tolist() == [False, True, False, False]
    assert metrics["response_length/clip_ratio"].isna().tolist() == [False, False, True, False]
    assert "Step 1: timing_s/gen is no such number" in str(metrics.attrs["notes"])


def test_a_step_logged_twice_with_other_numbers_is_named_and_the_later_one_counts(tmp_path):
    log = tmp_path / "run.log"
    again = console(timing_s__gen=13.0).format(step=2)
    log.write_text("".join(console().format(step=n) for n in (1, 2)) + again)
    metrics = read_metrics(log)
    assert metrics["timing_s/gen"].tolist() == [12.5, 13.0]
    assert "Logged twice" in metrics.attrs["notes"][0] and "step 2;" in metrics.attrs["notes"][0]
    log.write_text("".join(console().format(step=n) for n in (1, 2, 2)))
    assert not metrics_notes(log)


def metrics_notes(log: Path) -> list[str]:
    return read_metrics(log).attrs["notes"]


def test_the_steps_own_tag_may_be_named(tmp_path):
    rows = [{"iter": n, **VERL} for n in (1, 2)]
    file = table(tmp_path / "h.csv", [*rows[0]], *([*row.values()] for row in rows))
    assert "--column step=TAG" in refusal(read_metrics, file)
    check(read_metrics(file, columns={"step": "iter"}))
    check(read_metrics(jsonl(tmp_path / "h.jsonl", *rows), columns={"step": "iter"}))
    (tmp_path / "one").mkdir()
    file.rename(tmp_path / "one" / "h.csv")
    check(read_metrics(tmp_path / "one", columns={"step": "iter"}))
    counted = jsonl(tmp_path / "w.jsonl", *({"_step": 9 + row["iter"], **row} for row in rows))
    check(read_metrics(counted, columns={"step": "iter"}))
    assert "no itr in it (did you mean iter?)" in refusal(
        read_metrics, counted, columns={"step": "itr"}
    )


def test_a_mapped_tag_of_two_files_is_of_two_runs(tmp_path):
    for run in "ab":
        table(tmp_path / "charts" / f"{run}.csv", ["Step", f"{run} - t/roll"], [1, 2.0])
    columns = {"timing_s/gen": "t/roll"}
    said = refusal(read_metrics, tmp_path / "charts", columns=columns, lengths=False)
    assert "t/roll is also in a.csv" in said


def test_a_name_without_a_number_that_can_be_read_is_not_said_to_be_missing(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(console(timing_s__gen="1x2").format(step=1))
    lacks = read_metrics(log).attrs["lacks"]["timing_s/gen"]
    assert "no timing_s/gen that can be read" in lacks


# A trace from steps that are not all right


def test_a_step_that_contradicts_itself_is_left_out_and_named_and_only_none_left_is_refused(
    tmp_path,
):
    log = tmp_path / "run.log"
    bad = console(response_length__min=301.0).format(step=2)
    log.write_text(console().format(step=1) + bad)
    trace = trace_from_verl_metrics(read_metrics(log), 4, 0)
    assert [step for step, _, _ in trace.step_slices] == [1]
    assert "step 2: response_length: mean, min" in trace.metadata.notes
    assert "log of 1 steps" in trace.metadata.notes
    log.write_text(bad)
    assert "contradict" in refusal(trace_from_verl_metrics, read_metrics(log), 4, 0)


def test_without_clipped_responses_the_longest_is_the_cap_and_the_notes_say_so(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(console().format(step=1))
    trace = trace_from_verl_metrics(read_metrics(log), 4, 0)
    assert trace.metadata.cap_tokens == 900 and "--cap-tokens" in trace.metadata.notes
    assert set(trace.table["finish_reason"].to_pylist()) == {"stop"}
    small = refusal(trace_from_verl_metrics, read_metrics(log), 4, 0, cap_tokens=800)
    assert "over the cap of 800; give the run's cap (--cap-tokens)" in small


@pytest.mark.parametrize("samples", [4, 16, 512])
@pytest.mark.parametrize("mean", [1.5, 3.0, 300.25, 20_000.0])
@pytest.mark.parametrize("logged", ["", "clip_ratio", "max", "min"])
def test_estimated_lengths_give_way_to_logged_ones(tmp_path, samples, mean, logged):
    values = {"": 0.0, "clip_ratio": 0.25, "max": mean * 1.4 // 1 + 1, "min": mean * 0.9 // 1}
    row = {"response_length/mean": round(mean * samples) / samples, "timing_s/gen": 1.0}
    row |= {f"response_length/{logged or 'clip_ratio'}": values[logged]}
    file = jsonl(tmp_path / "w.jsonl", {"_step": 1, **row})
    metrics = read_metrics(file, "verl", samples=samples, prompt_tokens=80.3)
    trace = trace_from_verl_metrics(metrics, 1, 0)
    assert trace.column("response_tokens").sum() == round(row["response_length/mean"] * samples)


def test_one_response_has_the_length_that_is_the_mean(tmp_path):
    file = jsonl(tmp_path / "w.jsonl", {"_step": 1, "response_length/mean": 300.0})
    metrics = read_metrics(file, "verl", samples=1, prompt_tokens=80)
    assert trace_from_verl_metrics(metrics, 1, 0).column("response_tokens").tolist() == [300]


def test_the_notes_name_what_was_logged_and_what_was_not(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(f"Global step 1: {OPENRLHF}\n")
    notes = trace_from_verl_metrics(read_metrics(log, samples=16), 4, 0).metadata.notes
    logged, _, others = notes.partition("Not from the log: ")
    assert "response_length/mean" in logged and "prompt_length/mean" in logged
    assert "response_length/max" not in logged and "number of samples" not in logged
    assert "response_length/max (estimated)" in others
    assert "number of samples (of --samples)" in others
    log.write_text(console().format(step=1))
    notes = trace_from_verl_metrics(read_metrics(log), 4, 0).metadata.notes
    assert "Not from the log" not in notes and "number of samples" in notes


def test_only_estimated_responses_are_said_to_be_of_a_lognormal(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(f"perf 1: {SLIME}\n")
    notes = str(read_metrics(log, samples=16, prompt_tokens=80).attrs["notes"])
    assert "as long as their mean" in notes and "lognormal" not in notes


# Further frameworks, and names that the user maps

OPENRLHF = {
    "timing/generation": 12.5,
    "timing/make_experience": 1.0,
    "timing/ppo_train": 4.0,
    "timing/broadcast": 0.5,
    "timing/step_total": 20.0,
    "response_length": 300.0,
    "total_length": 380.0,
    "response_clip_ratio": 0.0,
}


def test_openrlhfs_console_says_prompt_and_response_and_no_longest_one(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("".join(f"INFO trainer.py:1 - Global step {n}: {OPENRLHF}\n" for n in (1, 2)))
    metrics = read_metrics(log, samples=16)
    assert metrics.attrs["format"] == "openrlhf"
    assert metrics["prompt_length/mean"].tolist() == [80.0, 80.0]
    assert metrics["timing_s/update_weights"].tolist() == [0.5, 0.5]
    for phase, value in PHASES.items():
        assert metrics[phase].tolist() == [value] * 2
    assert len(trace_from_verl_metrics(metrics, 4, 0, cap_tokens=4096)) == 32


def test_the_largest_response_is_the_cap_where_some_are_clipped(tmp_path):
    log = tmp_path / "run.log"
    clipped = {**OPENRLHF, "response_clip_ratio": 0.1}
    log.write_text(f"Global step 1: {OPENRLHF}\nGlobal step 2: {clipped}\n")
    metrics = read_metrics(log, samples=16, cap_tokens=1024)
    assert metrics["response_length/max"].tolist()[1] == 1024
    assert 300 < metrics["response_length/max"][0] <= 1024


def test_prime_rls_steps_have_the_length_of_prompt_and_response(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "02:33:26 SUCCESS Step 28 | Time: 73.77s | Seq. Length: 345.6 tokens/sample | Max. Off-Policy Level: 2\n"
        "02:33:26 SUCCESS Step 29 |  1m 13s | Reward 0.5\n02:33:26 SUCCESS Step 30 |   850ms | Reward 0.5\n"
    )
    metrics = read_metrics(log, lengths=False)
    assert metrics["timing_s/step"].tolist() == [73.77, 73.0, 0.85]
    assert metrics["off_policyness/max"][0] == 2
    whole = read_metrics(log, samples=16, prompt_tokens=45.6)
    assert whole["response_length/mean"][0] == 300.0
    assert "areal" in metrics.attrs["lacks"]["timing_s/gen"]


def test_skyrls_console_has_a_key_a_line_and_its_numbers_in_quotes(tmp_path):
    log = tmp_path / "run.log"
    keys = {"generate/avg_num_tokens": 300.0, "timing/generate": 12.5, "timing/step": 20.0}
    for_step = ",\n ".join(f"'{key}': '{value:.4f}'" for key, value in keys.items())
    log.write_text(
        "".join(f"2026-01-01 | INFO | log:175 - Step {n}: \n{{{for_step}}}\n" for n in (1, 2))
    )
    metrics = read_metrics(log, lengths=False)
    assert metrics.attrs["format"] == "skyrl" and metrics["step"].tolist() == [1, 2]
    assert metrics["timing_s/gen"].tolist() == [12.5, 12.5]


def test_trls_console_names_no_step_and_is_counted(tmp_path):
    log = tmp_path / "run.log"
    row = {key.removeprefix("train/"): value for key, value in TRL.items()}
    bar = "  0%|          | 1/15 [18:48<164:33:29, 379.99s/it]"
    log.write_text(f"{bar}\n{row}\n\n{bar}{row}\n{{'train_runtime': 3.0}}\n")
    check(read_metrics(log, samples=16, prompt_tokens=80), phases=["timing_s/step"])


def test_other_names_are_mapped_and_may_be_sums(tmp_path):
    mine = {"t/roll": 12.5, "t/fwd": 0.75, "t/ref": 0.25, "len/avg": 300.0, "t/all": 20.0}
    file = jsonl(tmp_path / "w.jsonl", *({"_step": n, **mine} for n in (1, 2)))
    said = refusal(read_metrics, file)
    assert "--column timing_s/gen=t/roll" in said and "the nearest is" in said
    columns = {"timing_s/gen": "t/roll", "timing_s/old_log_prob": "t/fwd+t/ref"}
    metrics = read_metrics(file, columns=columns, lengths=False)
    assert metrics["timing_s/old_log_prob"].tolist() == [1.0, 1.0]
    log = tmp_path / "run.log"
    log.write_text("".join(f"iteration {n} done {mine}\n" for n in (1, 2)))
    assert read_metrics(log, columns=columns, lengths=False)["timing_s/gen"].tolist() == [12.5] * 2
    assert "no t/rol in it (did you mean t/roll?)" in refusal(
        read_metrics, file, columns={"timing_s/gen": "t/rol"}
    )
    assert "no column that simrl reads (did you mean timing_s/gen?)" in refusal(
        read_metrics, file, columns={"timing_s/gem": "t/roll"}
    )


def test_a_folder_of_mlflow_and_a_chart_of_swanlab_are_tables(tmp_path):
    for tag, value in VERL.items():
        file = tmp_path / "mlruns" / "0" / "abc" / "metrics" / tag
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"1700000000000 {value} 1\n1700000000001 {value} 2\n")
    check(read_metrics(tmp_path / "mlruns"))
    check(read_metrics(tmp_path / "mlruns" / "0" / "abc"))
    header = ["step", *(name for tag in VERL for name in (f"run-{tag}", f"run-{tag}_timestamp"))]
    rows = [[n, *(cell for value in VERL.values() for cell in (value, 1.7e12))] for n in (1, 2)]
    check(read_metrics(table(tmp_path / "swan.csv", header, *rows)))


def test_a_row_that_is_broken_is_left_out_with_a_note(tmp_path):
    file = jsonl(tmp_path / "w.jsonl", *({"_step": n, **VERL} for n in (1, 2)))
    file.write_text(file.read_text() + '{"_step": 3, "timing_s/ge')
    metrics = read_metrics(file)
    check(metrics)
    assert "line 3: broken JSON" in metrics.attrs["notes"][0]


def test_the_practice_files_are_read_as_their_readme_says(shared_data):
    practice = shared_data / "practice"
    whole = read_metrics(practice / "01-wrapped-console" / "unwrapped.log")
    folded = read_metrics(practice / "01-wrapped-console" / "wrapped240.log")
    assert whole.equals(folded)
    mixed = read_metrics(practice / "14-console" / "c_interleaved.log")
    assert mixed["step"].tolist() == [1, 2, 3, 4, 5, 6, 7] and "Step 4" in mixed.attrs["notes"][0]
    slime = read_metrics(practice / "14-console" / "h_slime_repeated.log", None, 512, 100)
    assert slime["timing_s/update_actor"].tolist() == [280.0] * 7
    formats = {
        "openrlhf_console.log": ("openrlhf", 55.0, 102.3),
        "skyrl_wandb.csv": ("skyrl", 27.95, 287.05),
        "trl_console.log": ("trl", None, 38.9),
        "prime_rl_orchestrator.log": ("prime_rl", None, 73.77),
    }
    for file, (name, gen_s, step_s) in formats.items():
        metrics = read_metrics(practice / "20-formats" / file, None, 512, 100)
        assert metrics.attrs["format"] == name and metrics["timing_s/step"][0] == step_s
        assert metrics["timing_s/gen"][0] == gen_s if gen_s else "timing_s/gen" not in metrics


# The command


def test_a_metrics_log_in_place_of_a_dump_is_told_to_be_one(simrl, tmp_path):
    log = tmp_path / "run.log"
    log.write_text("noise\n" + console().format(step=1))
    history = jsonl(tmp_path / "w.jsonl", {"_step": 1, **VERL})
    for file in (log, history):
        done = simrl("trace", "import", "verl", str(file), "-o", str(tmp_path / "t.parquet"))
        assert done.code == 2 and "add --metrics" in done.err and done.err.count("\n") == 1


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
    assert done.code == 2 and "but of slime; read it as --format slime" in done.err


def test_a_framework_with_metrics_alone_needs_no_flag_and_takes_mapped_tags(simrl, tmp_path):
    log, out = tmp_path / "run.log", str(tmp_path / "t.parquet")
    log.write_text("".join(f"Global step {n}: {OPENRLHF}\n" for n in (1, 2)))
    how = [str(log), "-o", out, "--group", "4", "--samples", "16", "--cap-tokens", "900"]
    done = simrl("trace", "import", "openrlhf", *how)
    assert done.code == 0 and "32 samples, 2 steps" in done.out and "estimated" in done.out
    assert simrl("trace", "import", "openrlhf", *how, "--metrics").code == 0
    file = tmp_path / "names.yaml"
    file.write_text("response_length/max: total_length\n")
    done = simrl("trace", "import", "openrlhf", *how, "--column", str(file))
    assert done.code == 0, done.err
    done = simrl("trace", "import", "openrlhf", *how, "--column", "response_length/max")
    assert done.code == 2 and "write OURS=THEIRS" in done.err
