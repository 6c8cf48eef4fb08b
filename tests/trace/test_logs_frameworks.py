"""Metrics of frameworks whose names are not verl's, each as its own trainer writes them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from simrl.trace.importers.logs import read_metrics


def _csv(path: Path, rows: list[dict[str, float]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


AREAL = {
    "ppo_actor/n_seqs": 64.0,
    "ppo_actor/seq_len/avg": 900.0,
    "ppo_actor/seq_len/max": 4000.0,
    "ppo_actor/prompt_len/avg": 100.0,
    "ppo_actor/correct_seq_len/avg": 700.0,
    "timeperf/rollout": 30.0,
    "timeperf/recompute_logp": 4.0,
    "timeperf/train_step": 20.0,
    "timeperf/update_weights": 1.5,
}


def test_areal_logs_prompt_and_response_together_so_the_response_is_their_difference(tmp_path):
    metrics = read_metrics(_csv(tmp_path / "w.csv", [{"_step": n, **AREAL} for n in (0, 1)]))
    assert metrics["response_length/mean"].tolist() == [800.0, 800.0]
    assert metrics["timing_s/update_actor"].tolist() == [20.0, 20.0]
    assert metrics["samples"].tolist() == [64.0, 64.0]


def test_the_longest_sequence_of_areal_is_not_its_longest_response(tmp_path):
    metrics = read_metrics(_csv(tmp_path / "w.csv", [{"_step": 0, **AREAL}]), lengths=False)
    assert "response_length/max" not in metrics


def test_areal_prints_its_metrics_as_a_table_four_pairs_wide(tmp_path):
    pairs = list(AREAL.items())
    lines = []
    for step in (1, 2):
        lines.append(
            f"(AReaL) 20260101-10:00:00.123 StatsLogger INFO: Epoch 1/2 Step {step}/9 Train step {step}/18 done."
        )
        lines.append("╒══╤══╕")
        for at in range(0, len(pairs), 4):
            cells = [f" {key} │ {value:.4e} " for key, value in pairs[at : at + 4]]
            lines.append("│" + "│".join(cells) + "│")
            lines.append("├──┼──┤")
    path = tmp_path / "areal.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [1, 2]
    assert metrics["timing_s/old_log_prob"].tolist() == [4.0, 4.0]
    assert metrics["response_length/mean"].tolist() == [800.0, 800.0]


@pytest.mark.parametrize("pipeline", ["rlvr", "agentic"])
def test_rolls_rlvr_logs_the_time_of_the_step_before_and_its_agentic_pipeline_its_own(
    tmp_path, pipeline
):
    gen = "time/step_generate" if pipeline == "rlvr" else "time/step_rollout"
    rows = [
        {"_step": n, gen: 10.0, "time/step_train": 7.0, "time/step_total": 20.0 + n}
        for n in range(3)
    ]
    metrics = read_metrics(_csv(tmp_path / "w.csv", rows), lengths=False)
    assert metrics["timing_s/gen"].tolist() == [10.0] * 3
    own = metrics["timing_s/step"].dropna().tolist()
    assert own == ([21.0, 22.0] if pipeline == "rlvr" else [20.0, 21.0, 22.0])


def test_rlinf_counts_a_step_a_mini_batch_and_only_rows_with_times_are_steps(tmp_path):
    named = {
        "time/rollout": 10.0,
        "time/actor/training": 7.0,
        "time/step": 20.0,
        "rollout/response_length": 300.0,
    }
    rows = [
        {"_step": n, **(named if n % 4 == 0 else dict.fromkeys(named, "")), "loss": 0.1}
        for n in range(8)
    ]
    metrics = read_metrics(_csv(tmp_path / "w.csv", rows), lengths=False)
    assert metrics["step"].tolist() == [0, 4]
    assert metrics["timing_s/step"].tolist() == [20.0, 20.0]


def test_open_instruct_has_lengths_under_val_and_training_time_with_the_log_probs(tmp_path):
    row = {
        "val/sequence_lengths": 812.0,
        "val/sequence_lengths_max": 4096,
        "val/sequence_lengths_min": 9,
    }
    row |= {"time/total": 71.0, "time/training": 38.0, "eval/sequence_lengths": 99.0}
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps({"_step": n, **row}) + "\n" for n in (1, 2)))
    metrics = read_metrics(path, lengths=False)
    assert metrics["response_length/mean"].tolist() == [812.0, 812.0]
    assert metrics["timing_s/update_actor"].tolist() == [38.0, 38.0]
    assert "timing_s/old_log_prob" not in metrics


def test_open_instruct_counts_episodes_as_global_step_and_its_steps_as_training_step(tmp_path):
    rows = [
        {"training_step": n, "global_step": 512 * n, "episode": 512 * n, "time/total": 71.0}
        for n in (1, 2)
    ]
    metrics = read_metrics(_csv(tmp_path / "w.csv", rows), lengths=False)
    assert metrics["step"].tolist() == [1, 2]


def test_a_row_of_open_instruct_without_its_training_step_is_of_no_other_step(tmp_path):
    rows = [{"training_step": n, "global_step": 512 * n, "time/total": 71.0 + n} for n in (1, 2, 3)]
    del rows[1]["training_step"]
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [1, 3]
    assert "line 2: no training_step in it (left out)" in metrics.attrs["notes"][0]


def test_prime_rls_evaluations_are_no_steps_and_its_trainers_times_not_those_of_its_steps(tmp_path):
    path = tmp_path / "run.log"
    step = "10:00:00 SUCCESS Step 1 | Time: 73.77s | Seq. Length: 345.6 tokens/sample\n"
    trainer = "10:00:01 SUCCESS Step 1 | Time: 3.00s | Loss: 0.1 | Peak Mem.: 70.1 GiB\n"
    path.write_text(f"{step}{trainer}10:00:02 SUCCESS Eval Step 2 | Time: 9.00s\n")
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [1] and metrics["timing_s/step"].tolist() == [73.77]
    path.write_text(trainer)
    assert read_metrics(path, lengths=False)["timing_s/step"].tolist() == [3.0]


def test_open_instruct_prints_a_box_folded_between_words(tmp_path):
    box = [
        "╭─────────── Metrics ───────────╮",
        "│ other  episode: 512 |         │",
        "│        training_step: 1       │",
        "│ time   total: 71.20 |         │",
        "│        training: 38.80 |      │",
        "│        weight_sync: 1.50      │",
        "│ val    sequence_lengths:      │",
        "│        812.30 | stop_rate: 1  │",
        "╰───────────────────────────────╯",
    ]
    path = tmp_path / "run.log"
    path.write_text("\n".join(box) + "\n", encoding="utf-8")
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [1]
    assert metrics["timing_s/step"].tolist() == [71.2]
    assert metrics["response_length/mean"].tolist() == [812.3]


def test_rlinf_prints_its_metrics_behind_a_progress_bar(tmp_path):
    bar = (
        "\rGlobal Step:   5%|▌         | 2/40 [10:12<1:40:12, 306.1s/it, sync_weights_time=2.3, "
        "step_time=306, actor/training_time=120, rollout_time=140, response_length=1.23e+3, "
        "max_of_response_length=tensor(8192.)]"
    )
    path = tmp_path / "run.log"
    path.write_text(f"{bar}\n", encoding="utf-8", newline="")
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [2]
    assert metrics["timing_s/update_actor"].tolist() == [120.0]
    assert metrics["response_length/max"].tolist() == [8192.0]


def test_roll_prints_its_metrics_as_json_which_has_the_step_in_it(tmp_path):
    head = "[2026-03-01 10:00:00] [rlvr_pipeline.py (838)] [INFO] [DRIVER 0 / 1][PID 123] "
    lines = [
        head
        + json.dumps(
            {
                "time/step_train": 30.0 + n,
                "system/global_step": n,
                "token/response_length/mean": 300.0,
            }
        )
        for n in range(3)
    ]
    lines.insert(1, head + json.dumps({"val_correct/all/mean": 0.4}))
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    metrics = read_metrics(path, lengths=False)
    assert metrics["step"].tolist() == [0, 1, 2]
    assert metrics["timing_s/update_actor"].tolist() == [30.0, 31.0, 32.0]


def test_miles_logs_as_slime_does_and_can_be_named(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(
        "[2026-03-01 10:00:00] metrics.py:89 - perf 3: {'rollout/response_len/mean': 300.0, 'perf/rollout_time': 40.0}\n"
        "[2026-03-01 10:01:00] train_metric_utils.py:56 - perf 3: {'perf/actor_train_time': 20.0}\n",
        encoding="utf-8",
    )
    metrics = read_metrics(path, "miles", lengths=False)
    assert metrics["timing_s/gen"].tolist() == [40.0]
    assert metrics["timing_s/update_actor"].tolist() == [20.0]
