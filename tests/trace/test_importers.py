"""Importers of text, tables and dumps; slime's pickles have a file of their own."""

import json
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from scipy.integrate import trapezoid

from simrl.commands.trace import importers
from simrl.errors import InputError
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.lengths import FAR, SIGMAS, lengths_with, means_to_mu
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.sources import COLUMNS, OPTIONS, Source, known_sources, read_sources
from simrl.trace.importers.tabular import NAMES, import_csv, import_jsonl
from simrl.trace.importers.tokens import TokenCounter, token_counter
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import read_trace, write_trace

import_verl, import_trl, import_areal = (
    partial(import_dump, name) for name in ("verl", "trl", "areal")
)
BY_CHARACTER = token_counter(chars_per_token=1)


def write_jsonl(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def refused(call, *parts: str) -> str:
    """The one-line message of the InputError that `call` must raise, checked to hold every part."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


# Counting tokens


def test_text_without_a_stated_way_is_counted_by_an_assumed_ratio_that_says_so(tmp_path):
    assert token_counter().tokenizer == "estimated: 4 characters a token, assumed"
    dump = write_jsonl(tmp_path / "1.jsonl", rollout(1, "q" * 40, "x" * 100))
    trace = import_verl(dump)
    assert trace.metadata.tokenizer == "estimated: 4 characters a token, assumed"
    assert "--tokenizer FILE counts with the model's tokenizer.json" in trace.metadata.notes
    assert (trace.column("prompt_tokens")[0], trace.column("response_tokens")[0]) == (10, 25)
    assert "assumed" not in import_verl(dump, BY_CHARACTER).metadata.notes


def test_ways_to_count_that_make_no_sense_are_refused():
    refused(lambda: token_counter("tokenizer.json", 4.0), "both")
    refused(lambda: token_counter(chars_per_token=0), "0")
    refused(
        lambda: token_counter(chars_per_token=1e-9),
        "chars_per_token is 1e-09",
        "a number from 0.1 to 1000",
    )
    refused(lambda: token_counter(chars_per_token=float("nan")), "nan")


def test_an_estimate_says_so_and_gives_text_at_least_one_token():
    counter = token_counter(chars_per_token=3.2)
    assert counter.tokenizer == "estimated: 3.2 characters a token"
    assert [c.tokens for c in counter.count(["", "a", "a" * 32])] == [0, 1, 10]
    assert counter.count(["a"])[0].ids is None


def test_a_missing_tokenizer_file_is_named(tmp_path):
    refused(lambda: token_counter(tmp_path), str(tmp_path / "tokenizer.json"))


def test_a_missing_tokenizers_package_names_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    refused(lambda: token_counter(tmp_path), "pip install tokenizers")


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 7, "b": 9}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=5)
    folder = tmp_path / "model"
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_counts_whole_texts_and_its_ids_are_kept(tmp_path, tokenizer_folder):
    counter = token_counter(tokenizer_folder)
    assert counter.tokenizer.startswith("model/tokenizer.json, sha256 ")
    dump = write_jsonl(
        tmp_path / "1.jsonl",
        {"step": 1, "input": "a b", "output": "b a b a", "gts": "", "score": 1},
    )
    trace = import_verl(dump, counter)
    assert trace.column("prompt_tokens").tolist() == [2]
    assert trace.table.column("response_ids").to_pylist() == [[9, 7, 9, 7]]
    write_trace(trace, tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").table.equals(trace.table)


def test_a_file_that_is_no_tokenizer_is_refused(tokenizer_folder):
    (tokenizer_folder / "tokenizer.json").write_text('{"version": "1.0"')
    refused(lambda: token_counter(tokenizer_folder), "not a tokenizer.json")


# verl: samples


def rollout(
    step: int, prompt: str, response: str, score: float | None = 0.0, **extra: object
) -> dict[str, object]:
    return {"input": prompt, "output": response, "gts": "42", "score": score, "step": step, **extra}


def test_verl_rows_with_one_input_are_a_group_and_epochs_count_earlier_steps(tmp_path):
    write_jsonl(
        tmp_path / "10.jsonl", rollout(10, "p", "xxxx"), rollout(10, "q", "x", request_id="r")
    )
    write_jsonl(
        tmp_path / "2.jsonl",
        rollout(2, "p", "xx", 1.0),
        rollout(2, "q", "xxx", -1),
        rollout(2, "p", "x", None),
    )
    trace = import_verl(tmp_path, BY_CHARACTER)
    frame = trace.table.to_pandas()
    assert frame["step"].tolist() == [2, 2, 2, 10, 10]
    assert frame["prompt_id"].tolist() == [
        0,
        0,
        1,
        0,
        1,
    ]  # in order of first appearance, steps as numbers
    assert frame["sample"].tolist() == [0, 1, 0, 0, 0]
    assert frame["epoch"].tolist() == [0, 0, 0, 1, 1]
    assert frame["response_tokens"].tolist() == [2, 1, 3, 4, 1]
    assert trace.table.column("reward").to_pylist() == [1.0, None, -1.0, 0.0, 0.0]


def test_metadata_tells_source_tokenizer_cap_and_no_machine_path(tmp_path):
    write_jsonl(tmp_path / "run7" / "1.jsonl", rollout(1, "p", "xx"))
    metadata = import_verl(tmp_path / "run7", BY_CHARACTER).metadata
    assert metadata.kind == "imported"
    assert metadata.source == "verl rollout dump run7"
    assert metadata.licence == "unknown"
    assert metadata.tokenizer == "estimated: 1 characters a token"
    assert metadata.cap_tokens == 2
    assert "largest response, 2 tokens, stands for it" in metadata.notes
    assert str(tmp_path) not in metadata.model_dump_json()
    told = import_verl(
        tmp_path / "run7", BY_CHARACTER, cap_tokens=9, licence="MIT", name="mine"
    ).metadata
    assert (told.cap_tokens, told.licence, told.name) == (9, "MIT", "mine")
    assert "stands for it" not in told.notes


def test_empty_responses_are_left_out_and_counted_in_the_notes(tmp_path):
    dump = write_jsonl(
        tmp_path / "1.jsonl", rollout(1, "p", ""), rollout(1, "p", "xx"), rollout(1, "p", "")
    )
    trace = import_verl(dump, BY_CHARACTER)
    assert len(trace) == 1
    assert "2 empty responses were left out (the first: 1.jsonl: line 1)" in trace.metadata.notes
    write_jsonl(dump, rollout(1, "p", ""))
    refused(lambda: import_verl(dump, BY_CHARACTER), "all 1 responses are empty")


def test_a_response_over_the_cap_is_refused_by_its_line(tmp_path):
    dump = write_jsonl(tmp_path / "1.jsonl", rollout(1, "p", "x"), rollout(1, "p", "xxxx"))
    refused(
        lambda: import_verl(dump, BY_CHARACTER, cap_tokens=3),
        "1.jsonl: line 2",
        "4 tokens",
        "cap of 3",
    )
    refused(lambda: import_verl(dump, BY_CHARACTER, cap_tokens=0), "cap_tokens is 0")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"input": "p", "step": 1, "score": 0}, ["no field 'output'", "input, step, score"]),
        (rollout(1, "p", "x") | {"output": ["x"]}, ["field 'output' is ['x']", "text"]),
        (rollout(1, "p", "x") | {"step": "one"}, ["field 'step' is 'one'", "whole number"]),
        (rollout(1, "p", "x") | {"step": 1.5}, ["field 'step' is 1.5"]),
        (rollout(1, "p", "x") | {"step": True}, ["field 'step' is True"]),
        (rollout(1, "p", "x") | {"step": -1}, ["field 'step' is -1"]),
        (rollout(1, "p", "x") | {"score": "good"}, ["field 'score' is 'good'", "finite number"]),
        (rollout(1, "p", "x") | {"score": float("nan")}, ["field 'score' is nan"]),
        (rollout(1, "p", "x") | {"score": 10**400}, ["field 'score' is 1000"]),
        (rollout(1, "", "x"), ["prompt has 0 tokens"]),
        ([1, 2], ["[1, 2] is not a JSON object"]),
    ],
)
def test_verl_rows_of_the_wrong_form_are_refused_by_line_and_field(tmp_path, row, parts):
    dump = write_jsonl(tmp_path / "1.jsonl", rollout(1, "q", "x"), row)
    refused(lambda: import_verl(dump, BY_CHARACTER), f"{dump}: line 2", *parts)


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"", ["1.jsonl", "empty"]),
        (b"\n\n", ["1.jsonl", "empty"]),
        (b'{"step": 1, "input": "p", "out', ["line 1", "broken JSON", "cut off"]),
        (b'{"step": 1, "input": "\xff"}\n', ["line 1", "0xff is not UTF-8"]),
        (b"[" * 100_000, ["1.jsonl", "broken JSON"]),
        (b'{"step": ' + b"9" * 5000 + b"}", ["line 1", "broken JSON"]),
    ],
    ids=["empty", "blank", "cut", "latin-1", "deep", "huge"],
)
def test_files_that_are_not_whole_json_lines_are_refused(tmp_path, raw, parts):
    dump = tmp_path / "1.jsonl"
    dump.write_bytes(raw)
    refused(lambda: import_verl(dump, BY_CHARACTER), *parts)


def test_a_folder_without_samples_and_a_path_without_anything_are_refused(tmp_path):
    refused(
        lambda: import_verl(tmp_path, BY_CHARACTER),
        str(tmp_path),
        "rollout_data_dir",
        "generations",
    )
    refused(lambda: import_verl(tmp_path / "none", BY_CHARACTER), "no such file or folder")


def table(*rows: list[object], slots: int = 1) -> dict[str, object]:
    names = [f"{kind}_{k}" for k in range(1, slots + 1) for kind in ("input", "output", "score")]
    return {"columns": ["step", *names], "data": list(rows)}


def test_the_largest_wandb_table_of_a_run_is_read_and_equal_prompts_of_a_step_are_a_group(tmp_path):
    folder = tmp_path / "run" / "media" / "table" / "val"
    first = [0, "p", "xx", 0.5, "q", "x", 0, "p", "xxx", 1]
    write_jsonl(folder / "generations_0_aa.table.json", table(first, slots=3))
    write_jsonl(folder / "generations_5_bb.table.json", table(first, [5, *first[1:]], slots=3))
    write_jsonl(folder / "other_9_cc.table.json", {"columns": [], "data": []})
    trace = import_verl(tmp_path / "run", BY_CHARACTER)
    frame = trace.table.to_pandas()
    assert frame[
        ["step", "prompt_id", "sample", "epoch", "response_tokens"]
    ].to_numpy().tolist() == [
        [0, 0, 0, 0, 2],
        [0, 0, 1, 0, 3],
        [0, 1, 0, 0, 1],
        [5, 0, 0, 1, 2],
        [5, 0, 1, 1, 3],
        [5, 1, 0, 1, 1],
    ]
    assert trace.metadata.source == "verl wandb table generations_5_bb.table.json"
    assert "Validation generations" in trace.metadata.notes
    assert "it cannot be told whether tools wrote a part" in trace.metadata.notes


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (table([0, "p", None, 0]), ["data row 0", "slot 1: field 'output' is empty"]),
        (table([0, "p", "x"]), ["data row 0", "4 values"]),
        (table([0, "p", "x", 0], [0, "p", "x", 0]), ["data row 1", "step 0 occurs twice"]),
        (table([0], slots=0), ["no column 'input_1'"]),
        (
            {"columns": ["step", "input_1"], "data": [[0, "p"]]},
            ["data row 0", "slot 1: no field 'output'"],
        ),
        ({"rows": []}, ["keys rows", "'columns' and 'data'"]),
        (table(), ["no rows"]),
    ],
)
def test_wandb_tables_of_the_wrong_form_are_refused(tmp_path, content, parts):
    file = write_jsonl(tmp_path / "generations.table.json", content)
    refused(lambda: import_verl(file, BY_CHARACTER), *parts)


def test_a_truncated_wandb_table_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "generations.table.json", table([0, "p", "x", 0]))
    file.write_text(file.read_text()[:-20])
    refused(lambda: import_verl(file, BY_CHARACTER), "generations.table.json: broken JSON")


def test_a_line_of_millions_of_values_is_refused_before_it_fills_the_memory(tmp_path):
    (tmp_path / "1.jsonl").write_bytes(b'{"step": 1, "input": [' + b"[]," * 10_000_000 + b"[]]}")
    refused(
        lambda: import_verl(tmp_path, BY_CHARACTER),
        "1.jsonl: line 1",
        "values or more in one object",
    )


def test_two_verl_dumps_of_one_step_are_refused(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollout(1, "p", "xx"))
    write_jsonl(tmp_path / "01.jsonl", rollout(1, "p", "xx"))
    refused(
        lambda: import_verl(tmp_path, BY_CHARACTER),
        "01.jsonl: line 1: step 1 is also in 1.jsonl",
        "keep one",
    )


def test_a_verl_dump_of_another_step_than_its_name_says_is_refused(tmp_path):
    write_jsonl(tmp_path / "7.jsonl", rollout(1, "p", "xx"))
    refused(
        lambda: import_verl(tmp_path, BY_CHARACTER),
        "7.jsonl: line 1: step is 1 in the dump of step 7",
    )


def test_the_real_verl_run_has_sixteen_checkpoints_of_twenty_slots_and_seventeen_prompts(
    shared_data,
):
    run = shared_data / "verl_run" / "do7bl4gg"
    trace = import_verl(run, token_counter(chars_per_token=3.2), licence="Apache-2.0")
    raw = json.loads((run / "val_generations.table.json").read_text())
    frame = trace.table.to_pandas()
    assert frame.groupby("step").size().tolist() == [20] * 16
    assert sorted(frame["step"].unique()) == list(range(0, 151, 10))
    assert frame["prompt_id"].nunique() == 17
    assert (frame["epoch"] == frame["step"] // 10).all()
    assert frame.groupby(["step", "prompt_id"]).size().value_counts().to_dict() == {
        1: 14 * 16,
        2: 3 * 16,
    }
    texts = [row[i] for row in raw["data"] for i in range(2, 61, 3)]
    whole = frame["response_tokens"] + trace.observation_tokens()
    rounding = frame["turn_tokens"].map(lambda turns: 1 if turns is None else 2 * len(turns))
    assert abs(whole.sum() - sum(len(text) / 3.2 for text in texts)) < rounding.sum()
    scores = [row[i] for row in raw["data"] for i in range(3, 61, 3)]
    assert frame["reward"].sum() == pytest.approx(sum(scores), rel=1e-5)
    assert "277 of 320 responses have several turns" in trace.metadata.notes
    assert frame["turn_observation_tokens"].dropna().map(len).sum() == sum(
        t.count("<tool_response>") for t in texts
    )


# verl: step metrics


def verl_metrics(path):
    return read_metrics(path, "verl", lengths=False)


def test_console_metrics_are_read_out_of_other_output(tmp_path):
    log = tmp_path / "output.log"
    log.write_text(
        "Training Progress:   0%|          | 0/9 [00:00<?]\r(TaskRunner pid=7) step:1 - timing_s/gen:np.float64(2.5)"
        " - num_turns/min:np.int32(2) - lr:1e-06 - a/b@2:-3\n"
        "timestep:9 - not a metric\nvalidation done\n"
        "step:2 - timing_s/gen:4 - kl:nan\nstep:1 - timing_s/gen:3.5\n"
    )
    metrics = verl_metrics(log)
    assert metrics["step"].tolist() == [1, 2]
    assert metrics["timing_s/gen"].tolist() == [3.5, 4.0]  # the resumed run's step 1
    assert metrics.loc[0, ["num_turns/min", "lr", "a/b@2"]].tolist() == [2.0, 1e-6, -3.0]
    assert np.isnan(metrics["kl"]).all()


def test_a_console_line_that_was_cut_off_loses_only_its_last_entry(tmp_path):
    log = tmp_path / "output.log"
    cut = "step:1 - timing_s/gen:1 - b:" + "2" * 5000
    rest = "step:2 - timing_s/gen:1 - b:np.float64(0.0\nstep:3 - timing_s/gen:1 - b:77"
    log.write_text(f"{cut[:4096]}\n{rest}")
    metrics = verl_metrics(log)
    assert metrics["timing_s/gen"].tolist() == [1.0, 1.0, 1.0]
    assert "b" not in metrics.columns


def test_the_file_loggers_metrics_are_read(tmp_path):
    log = write_jsonl(
        tmp_path / "m.jsonl",
        {"step": 3, "data": {"timing_s/gen": 1, "note": "text"}, "elapsed_seconds": 5.5},
        {"step": 1, "data": {"timing_s/gen": 2.5}},
    )
    metrics = verl_metrics(log)
    assert metrics.columns.tolist() == ["step", "timing_s/gen"]
    assert metrics.to_numpy().tolist() == [[1, 2.5], [3, 1]]


def test_metrics_that_are_none_are_refused(tmp_path):
    log = tmp_path / "output.log"
    log.write_text("nothing here\n")
    refused(lambda: verl_metrics(log), "output.log", "no metrics of verl")
    log.write_text("step:1 - timing_s/gen:1 - timing_s/ref:(x) - timing_s/step:2\n")
    assert verl_metrics(log).columns.tolist() == ["step", "timing_s/gen", "timing_s/step"]
    refused(
        lambda: verl_metrics(write_jsonl(tmp_path / "m.jsonl", {"step": 1, "data": 3})),
        "line 1",
        "'data' is 3",
    )
    refused(lambda: verl_metrics(tmp_path), "is a folder")


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.booleans())
def test_lengths_have_the_statistics_they_are_asked_for(lengths, clipped):
    at_high = lengths.count(max(lengths)) if clipped else None
    made = lengths_with(sum(lengths), len(lengths), min(lengths), max(lengths), at_high)
    assert len(made) == len(lengths)
    assert (made.sum(), made.min(), made.max()) == (sum(lengths), min(lengths), max(lengths))
    assert at_high is None or (made == max(lengths)).sum() == at_high


@given(st.integers(1, 10_000), st.floats(0.01, 10.0), st.floats(0.001, 0.999))
def test_the_lognormals_among_which_lengths_choose_have_the_wanted_mean(low, log_range, share):
    log_x = np.linspace(np.log(low), np.log(low) + log_range, 257)
    x = np.exp(log_x)
    mean = x[0] + share * (x[-1] - x[0])

    def mean_of(mu: float, sigma: float) -> float:
        exponent = -0.5 * ((log_x - mu) / sigma) ** 2
        weight = np.exp(exponent - exponent.max())
        return trapezoid(weight * x) / trapezoid(weight)

    for sigma, mu in zip(SIGMAS, means_to_mu(log_x, mean, SIGMAS), strict=True):
        below, above = log_x[0] - FAR, log_x[-1] + FAR
        for _ in range(60):
            middle = (below + above) / 2
            below, above = (middle, above) if mean_of(middle, sigma) < mean else (below, middle)
        reachable = below > log_x[0] - FAR and above < log_x[-1] + FAR
        assert not reachable or mean_of(mu, sigma) == pytest.approx(mean, rel=1e-9)
        assert reachable or abs(mu - middle) < 1e-6


def test_lengths_that_cannot_be_are_refused():
    for total, count, low, high, at_high in [
        (5, 2, 1, 3, None),
        (10, 2, 1, 3, None),
        (6, 2, 1, 5, 2),
        (3, 3, 0, 2, None),
    ]:
        with pytest.raises(ValueError):
            lengths_with(total, count, low, high, at_high)


def step_metrics(**changes: float) -> pd.DataFrame:
    """Two steps of two prompts with three samples each; the second has one response at the cap of 100."""
    frame = pd.DataFrame(
        {
            "step": [4, 5],
            "training/epoch": [0, 1],
            "response_length/mean": [30.0, 50.0],
            "response_length/max": [60.0, 100.0],
            "response_length/min": [10.0, 20.0],
            "response_length/clip_ratio": [0.0, 1 / 6],
            "prompt_length/mean": [7.0, 8.0],
            "prompt_length/max": [8.0, 8.0],
            "prompt_length/min": [6.0, 8.0],
            "perf/total_num_tokens": [6 * 37.0, 6 * 58.0],
        }
    )
    for key, value in changes.items():
        frame.loc[1, key.replace("__", "/")] = value
    return frame


def test_a_trace_from_metrics_has_groups_and_epochs_and_says_what_is_synthetic():
    trace = trace_from_verl_metrics(step_metrics(), group=3, seed=1)
    frame = trace.table.to_pandas()
    assert frame.groupby("step")["response_tokens"].agg(
        ["sum", "min", "max", "size"]
    ).to_numpy().tolist() == [
        [180, 10, 60, 6],
        [300, 20, 100, 6],
    ]
    assert frame.groupby(["step", "prompt_id"])["prompt_tokens"].agg(
        ["min", "max"]
    ).to_numpy().tolist() in (
        [[6, 6], [8, 8], [8, 8], [8, 8]],
        [[8, 8], [6, 6], [8, 8], [8, 8]],
    )
    assert frame["sample"].tolist() == [0, 1, 2] * 4
    assert frame["epoch"].tolist() == [0] * 6 + [1] * 6
    assert (
        frame["prompt_id"].tolist() == [0, 0, 0, 1, 1, 1] * 2
    )  # the next epoch's first step: the same prompts
    assert (frame["finish_reason"] == "length").sum() == 1
    assert trace.metadata.kind == "synthetic"
    assert trace.metadata.cap_tokens == 100
    assert "From the run" in trace.metadata.notes
    assert "Assumed: the shape between" in trace.metadata.notes


def test_a_trace_from_metrics_depends_on_the_seed_alone():
    one, again, other = (
        trace_from_verl_metrics(step_metrics(), group=3, seed=seed).table for seed in (1, 1, 2)
    )
    assert one.equals(again)
    assert not one.equals(other)


def test_a_step_whose_metrics_contradict_themselves_is_left_out_with_the_reason():
    def of(metrics: pd.DataFrame, group: int = 3, cap: int | None = None):
        return lambda: trace_from_verl_metrics(metrics, group, 0, cap_tokens=cap)

    refused(of(step_metrics(), group=4), "step 4", "6 samples", "groups of 4")
    refused(of(step_metrics(), group=0), "group is 0")
    for changed, said in (
        ({"response_length__min": 90.0}, "contradict"),
        ({"response_length__min": 0.0}, "aborted or empty"),
        ({"perf__total_num_tokens": 300.0}, "no whole number of samples"),
        ({"response_length__max": float("inf")}, "response_length/max is inf"),
        ({"response_length__clip_ratio": 1.5}, "clip_ratio is 1.5"),
    ):  # such a step is left out, and the others are drawn
        trace = of(step_metrics(**changed))()
        assert set(trace.column("step")) == {4} and said in trace.metadata.notes
    refused(of(step_metrics().drop(columns="prompt_length/min")), "no column 'prompt_length/min'")
    refused(of(step_metrics().assign(**{"prompt_length/min": np.nan})), "none of the 2 steps")
    assert len(of(step_metrics(response_length__clip_ratio=0.0), cap=200)()) == 12


def test_the_metrics_of_the_real_run_come_back_from_its_synthetic_trace(shared_data):
    metrics = verl_metrics(shared_data / "verl_run" / "do7bl4gg" / "output.log").set_index(
        "step", drop=False
    )
    assert metrics["step"].tolist() == [step for step in range(160) if step % 10]
    assert metrics.loc[1, "response_length/mean"] == 1032.611328125
    assert metrics.loc[1, "num_turns/max"] == 16
    assert metrics.loc[1, "timing_s/agent_loop/tool_calls/mean"] == 0.48963867582824605

    trace = trace_from_verl_metrics(metrics[metrics["step"] < 40], group=16, seed=0)
    frame = trace.table.to_pandas()
    assert sorted(frame["step"].unique()) == [
        s for s in range(1, 40) if s % 10
    ]  # wandb cut the lines with validation
    assert "Steps 0, 10, 20, 30" in trace.metadata.notes
    assert trace.metadata.cap_tokens == 8096
    assert (frame.groupby(["step", "prompt_id"]).size() == 16).all()
    for step, rows in frame.groupby("step"):
        logged = metrics.loc[step]
        assert len(rows) == 512
        assert rows["response_tokens"].mean() == pytest.approx(
            logged["response_length/mean"], abs=1e-3
        )
        assert rows["response_tokens"].max() == logged["response_length/max"]
        assert rows["response_tokens"].min() == logged["response_length/min"]
        assert (rows["response_tokens"] == 8096).mean() == logged["response_length/clip_ratio"]
        assert rows["prompt_tokens"].mean() == pytest.approx(logged["prompt_length/mean"], abs=1e-3)
        total = rows["response_tokens"].sum() + rows["prompt_tokens"].sum()
        assert total == logged["perf/total_num_tokens"]


# CSV and JSON Lines

SERVING = {"prompt_tokens": "in", "response_tokens": "out"}


def test_a_serving_trace_is_imported_when_told_and_says_its_lengths_are_short(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text("arrival,in,out\n0.5,374,44\n0.7,396,109\n0.9,12,0\n")
    trace = import_csv(file, SERVING, step=0, ungrouped=True)
    assert trace.column("prompt_id").tolist() == [0, 1]
    assert trace.column("response_tokens").tolist() == [44, 109]
    assert "far shorter than those of reasoning rollouts" in trace.metadata.notes
    assert "1 empty responses were left out" in trace.metadata.notes
    assert trace.metadata.tokenizer == "the source's own (lengths are from column 'out')"
    without_a_step = import_csv(file, SERVING, ungrouped=True)
    assert without_a_step.column("step").tolist() == [0, 0]
    assert "No field names the step: all are taken for one step" in without_a_step.metadata.notes
    file.write_text(
        "in,out\n374,44\n396,109\n"
    )  # a step of rollouts: nothing says that these are requests
    assert (
        "reasoning rollouts" not in import_csv(file, SERVING, step=0, ungrouped=True).metadata.notes
    )
    refused(lambda: import_csv(file, SERVING, step=0), "no column for prompt_id", "ungrouped")


def test_csv_columns_of_our_names_need_no_mapping_and_samples_are_numbered(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(
        "step,prompt_id,prompt_tokens,n,score\n0,x,5,3,1\n0,y,6,4,\n0,x,5,2,0.5\n3,y,6,9,0\n"
    )
    trace = import_csv(
        file, {"response_tokens": "n", "reward": "score"}, cap_tokens=10, tokenizer="Qwen2.5"
    )
    frame = trace.table.to_pandas()
    assert frame[
        ["step", "prompt_id", "sample", "epoch", "response_tokens"]
    ].to_numpy().tolist() == [
        [0, 0, 0, 0, 3],
        [0, 0, 1, 0, 2],
        [0, 1, 0, 0, 4],
        [3, 1, 0, 1, 9],
    ]
    assert trace.table.column("reward").to_pylist() == [1.0, 0.5, None, 0.0]
    assert trace.metadata.tokenizer == "Qwen2.5"
    assert trace.metadata.notes == ""
    assert import_csv(file, {"response_tokens": "n"}, epoch=7).column("epoch").tolist() == [7] * 4


def test_a_prompt_id_of_thousands_of_digits_is_a_name(tmp_path):
    file = tmp_path / "t.csv"
    header = "step,prompt_id,prompt_tokens,response_tokens\n"
    long = "7" * 5000
    file.write_text(header + f"0,{long},5,7\n0,{long},5,8\n0,{'7' * 19},5,9\n")
    assert import_csv(file).column("prompt_id").tolist() == [0, 0, 1]
    file.write_text(header + f"0,{'7' * 18},5,7\n")
    assert import_csv(file).column("prompt_id").tolist() == [int("7" * 18)]


def test_a_table_that_excel_exports_has_semicolons_and_decimal_commas(tmp_path):
    file = tmp_path / "t.csv"
    header = "step;prompt_id;prompt_tokens;response_tokens;reward\n"
    file.write_text(f"{header}0;x;5;7;0,5\n", encoding="utf-16")
    trace = import_csv(file)
    assert trace.column("response_tokens").tolist() == [7]
    assert trace.table.column("reward").to_pylist() == [0.5]


def test_csv_text_with_line_breaks_is_counted(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(
        '\ufeffstep,prompt,response\n0,"Why, then?","be\ncause"\n0,"Why, then?",so\n',
        encoding="utf-8",
    )
    trace = import_csv(file, counter=BY_CHARACTER)
    assert trace.column("prompt_tokens").tolist() == [10, 10]
    assert trace.column("response_tokens").tolist() == [8, 2]
    assert trace.metadata.tokenizer == "estimated: 1 characters a token"
    assert import_csv(file).metadata.tokenizer == "estimated: 4 characters a token, assumed"


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (b"", ["empty"]),
        (b"arrival,in,out\n", ["no rows"]),
        (b"arrival,in,in\n1,2,3\n", ["column 'in' occurs twice"]),
        (b"arrival,in,out\n1,2,3\n4,5\n", ["row 3", "2 cells, the header has 3"]),
        (b"arrival,in,out\n1,2,3\n4,5,six\n", ["row 3", "field 'out' is 'six'"]),
        (b"arrival,in,out\n1,2,\n", ["row 2", "field 'out' is empty"]),
        (b"arrival,in,out\n1,2,1.5\n", ["row 2", "field 'out' is 1.5"]),
        (b"arrival,in,out\n1,0,3\n", ["row 2", "field 'in' is 0"]),
        (b"arrival,in,out\n1,2,-3\n", ["row 2", "field 'out' is -3"]),
        (b"arrival,in,out\n1,2,99999999999\n", ["row 2", "field 'out' is 99999999999"]),
        (b"arrival,in,out\n1,\xff,3\n", ["UTF-8"]),
        (b"arriv\xe9e,in,out\n1,2,3\n", ["UTF-8"]),
        (b"arrival,in\n1,2\n", ["no column 'out' for response_tokens"]),
    ],
)
def test_csv_of_the_wrong_form_is_refused_by_row_and_column(tmp_path, raw, parts):
    file = tmp_path / "t.csv"
    file.write_bytes(raw)
    message = refused(lambda: import_csv(file, SERVING, step=0, ungrouped=True))
    for part in parts:
        assert part.lower() in message.lower()


def test_a_field_that_occurs_twice_in_an_object_is_refused(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(
        '{"step": 0, "prompt_id": 1, "prompt_tokens": 5, "response_tokens": 3, "response_tokens": 30}\n'
    )
    refused(
        lambda: import_jsonl(file),
        "line 1: field 'response_tokens' occurs twice in one object; keep one",
    )


def test_a_header_of_many_columns_is_judged_at_once(tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(b"in," * 100_000 + b"out\n1\n")
    began = time.process_time()
    refused(lambda: import_csv(file, SERVING), "column 'in' occurs twice")
    assert time.process_time() - began < 5


def test_mappings_that_make_no_sense_are_refused(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("s,p,in,out,answer\n0,1,2,3,text\n")
    full = {**SERVING, "step": "s", "prompt_id": "p"}
    refused(
        lambda: import_csv(file, {"length": "out"}),
        "'length' is not a column of a trace",
        "response_tokens",
    )
    refused(
        lambda: import_csv(file, full, step=0),
        "has the column 's', and step 0 is given for all rows",
    )
    refused(lambda: import_csv(file, full, ungrouped=True), "ungrouped")
    refused(lambda: import_csv(file, {**full, "response": "answer"}, BY_CHARACTER), "both mapped")
    refused(
        lambda: import_csv(file, {**full, "prompt_tokens": "none"}),
        "no column 'none' for prompt_tokens",
    )
    refused(
        lambda: import_csv(file, {"step": "s", "prompt_id": "p", "response_tokens": "out"}),
        "no column for prompt_tokens",
    )
    refused(
        lambda: import_csv(file, {"step": "s", "prompt_id": "p", "prompt_tokens": "in"}),
        "no column for response_tokens",
    )
    assert len(import_csv(file, full)) == 1


def test_jsonl_columns_are_mapped_and_ids_give_the_length(tmp_path):
    file = write_jsonl(
        tmp_path / "t.jsonl",
        {
            "it": 1,
            "q": "why",
            "ids": [4, 5, 6],
            "ok": True,
            "end": "stop",
            "wait": 0.5,
            "version": 2,
        },
        {"it": 1, "q": "why", "ids": [7], "ok": None, "end": None, "wait": 0, "version": 3},
    )
    names = {"step": "it", "prompt": "q", "response_ids": "ids", "reward": "ok"}
    names |= {"finish_reason": "end", "environment_s": "wait", "policy_version": "version"}
    trace = import_jsonl(file, names, BY_CHARACTER)
    assert trace.column("response_tokens").tolist() == [3, 1]
    assert trace.table.column("response_ids").to_pylist() == [[4, 5, 6], [7]]
    assert trace.table.column("reward").to_pylist() == [1.0, None]
    assert trace.table.column("finish_reason").to_pylist() == ["stop", None]
    assert trace.column("policy_version").tolist() == [2, 3]
    assert trace.metadata.tokenizer == "the source's own (lengths are from column 'ids')"
    assert "Prompt lengths were counted: estimated: 1 characters a token." in trace.metadata.notes


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"response_ids": [1, "2"]}, "field 'response_ids' is [1, '2']"),
        ({"response_ids": [1, 2, 3]}, "3 response_ids for 2 response_tokens"),
        (
            {"finish_reason": "eos"},
            "field 'finish_reason' is 'eos'; it must be one of stop, length, abort",
        ),
        ({"environment_s": -1}, "field 'environment_s' is -1"),
        ({"prompt_id": 1.5}, "field 'prompt_id' is 1.5"),
        ({"prompt_tokens": None}, "field 'prompt_tokens' is empty"),
    ],
)
def test_jsonl_values_of_the_wrong_type_are_refused_by_line_and_field(tmp_path, change, part):
    row = {
        "step": 0,
        "prompt_id": "p",
        "prompt_tokens": 1,
        "response_tokens": 2,
        "response_ids": [1, 2],
    }
    row |= {"finish_reason": "stop", "environment_s": 0}
    file = write_jsonl(tmp_path / "t.jsonl", row, row | change)
    refused(lambda: import_jsonl(file), f"{file}: line 2", part)


def test_turns_come_as_lists_in_jsonl_and_as_lists_in_the_cells_of_a_csv(tmp_path):
    turns = {"turn_tokens": [3, 2], "turn_environment_s": [1.5], "turn_observation_tokens": [9]}
    turns |= {"turn_tool": ["run_tests"], "turn_failures": [1]}
    rows = [{"step": 0, "prompt_id": 1, "prompt_tokens": 1, "response_tokens": 5, **turns}]
    rows += [{**rows[0], **dict.fromkeys(turns)}]
    table = pd.DataFrame(
        [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    for trace in (
        import_jsonl(write_jsonl(tmp_path / "t.jsonl", *rows)),
        import_csv(tmp_path / "t.csv"),
    ):
        assert {name: trace.table.column(name).to_pylist() for name in turns} == {
            name: [values, None] for name, values in turns.items()
        }
    for wrong in ("[3, 2", 5, [3, "2"], [3, -2]):
        file = write_jsonl(tmp_path / "w.jsonl", {**rows[0], "turn_tokens": wrong})
        refused(
            lambda file=file: import_jsonl(file),
            "line 1",
            "field 'turn_tokens' is",
            "a list of numbers, one a turn",
        )
    file = write_jsonl(tmp_path / "w.jsonl", {**rows[0], "turn_tool": [3]})
    refused(
        lambda: import_jsonl(file),
        "line 1",
        "field 'turn_tool' is [3]",
        "a list of names, one a turn",
    )


def test_a_jsonl_field_that_a_later_line_lacks_is_named(tmp_path):
    file = write_jsonl(
        tmp_path / "t.jsonl",
        {"step": 0, "prompt_id": 1, "prompt_tokens": 1, "response_tokens": 2},
        {"step": 0},
    )
    refused(lambda: import_jsonl(file), "line 2", "no field 'response_tokens' (it has step)")


def test_real_samples_of_a_trained_model_are_groups_of_three(shared_data, tmp_path):
    raw = json.loads(
        (shared_data / "rl_samples" / "algorithmic_qwen_3b_500_to_algebra.json").read_text()
    )
    problems = [
        p
        for category in raw["categories"]
        for data in category["datasets"]
        for p in data["results"]
    ]
    rows = [{"q": p["question"], **c} for p in problems for c in p["completions"]]
    file = write_jsonl(tmp_path / "samples.jsonl", *rows)
    names = {"prompt": "q", "response": "full_model_response", "reward": "score"}
    frame = import_jsonl(file, names, token_counter(chars_per_token=3), step=0).table.to_pandas()
    questions = pd.Series([p["question"] for p in problems]).value_counts()
    assert len(frame) == 1800
    assert frame["prompt_id"].nunique() == len(questions)
    assert sorted(frame.groupby("prompt_id").size()) == sorted(3 * questions)
    assert frame["reward"].sum() == pytest.approx(sum(row["score"] for row in rows), rel=1e-5)


# Sources


def test_a_source_with_a_column_a_fact_is_one_table_of_names(tmp_path, monkeypatch):
    names = {
        "step": "update",
        "prompt_id": "task",
        "prompt_tokens": "in_len",
        "response_tokens": "out_len",
        "reward": "score",
    }
    mine = Source(
        about="",
        example="",
        title="my log",
        files=["part-*.jsonl"],
        nothing="no part-*.jsonl in it",
        columns=names,
        tokenizer="the run's own",
        options=[],
    )
    monkeypatch.setitem(known_sources(), "mine", mine)
    row = {"update": 3, "task": "why", "in_len": 5, "out_len": 7, "score": 1}
    write_jsonl(tmp_path / "part-0.jsonl", row, {**row, "out_len": 9})
    trace = import_dump("mine", tmp_path)
    assert trace.table.select(
        ["step", "prompt_id", "sample", "prompt_tokens", "response_tokens"]
    ).to_pylist() == [
        {"step": 3, "prompt_id": 0, "sample": sample, "prompt_tokens": 5, "response_tokens": tokens}
        for sample, tokens in enumerate((7, 9))
    ]
    assert (trace.metadata.source, trace.metadata.tokenizer) == (
        f"my log {tmp_path.name}",
        "the run's own",
    )
    assert "decoded text" not in trace.metadata.notes
    write_jsonl(tmp_path / "part-0.jsonl", {**row, "out_len": "nine"})
    refused(
        lambda: import_dump("mine", tmp_path), "part-0.jsonl: line 1: field 'out_len' is 'nine'"
    )


def test_a_source_in_parquet_has_its_reward_and_the_mask_of_its_tokens(tmp_path, monkeypatch):
    names = {
        "step": "step",
        "prompt": "q",
        "response": "a",
        "reward": "score",
        "mask": ["loss_mask"],
    }
    mine = Source(
        about="",
        example="",
        title="my log",
        files=["*.parquet"],
        nothing="no *.parquet in it",
        columns=names,
    )
    monkeypatch.setitem(known_sources(), "mine", mine)
    frame = pd.DataFrame(
        {
            "step": [1],
            "q": ["p"],
            "a": ["text"],
            "score": [0.5],
            "loss_mask": [[1, 1, 0, 1]],
            "x": [{"y": 1}],
        }
    )
    frame.to_parquet(tmp_path / "1.parquet")
    trace = import_dump("mine", tmp_path, BY_CHARACTER)
    assert trace.column("reward").tolist() == [0.5]
    assert trace.table.column("turn_tokens").to_pylist() == [[2, 1]]


def test_the_source_of_the_page_on_extending_is_read_as_it_says(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    table = tomllib.loads("[my_trainer]" + page.partition("[my_trainer]")[2].partition("```")[0])[
        "my_trainer"
    ]
    monkeypatch.setitem(known_sources(), "mine", Source.model_validate(table))
    row = {"update": 2, "question": "p", "answer": "text", "score": 1, "loss_mask": [1, 1, 0, 1]}
    write_jsonl(tmp_path / "samples_0.jsonl", row)
    trace = import_dump("mine", tmp_path, BY_CHARACTER)
    assert (trace.column("step").tolist(), trace.column("reward").tolist()) == ([2], [1.0])
    assert trace.column("response_tokens").tolist() == [3]


def test_a_dump_of_a_framework_that_has_none_is_refused_in_a_line(tmp_path):
    refused(lambda: import_dump("nope", tmp_path), "unknown framework 'nope'", "verl, trl, areal")
    refused(lambda: import_dump("csv", tmp_path), "a table whose columns you name", "import_csv")


def test_a_source_may_name_every_column_that_a_reader_knows_and_every_option_of_the_command():
    assert {*COLUMNS} == {*NAMES, "mask"}
    command: Any = importers().own["csv"]
    assert {*OPTIONS} <= {*command.__code__.co_varnames[: command.__code__.co_argcount]}


TEXT = """
about = "a"
example = "e"
title = "mine"
files = ["*.jsonl"]
nothing = "no *.jsonl in it"
columns = { step = "s", prompt = "q", response = "a", reward = "r", mask = ["m"] }
"""
LENGTHS = """
about = "a"
example = "e"
title = "mine"
files = ["*.jsonl"]
nothing = "no *.jsonl in it"
columns = { step = "s", prompt_id = "q", prompt_tokens = "p", response_tokens = "n" }
tokenizer = "the run's own"
options = []
"""


@pytest.mark.parametrize(
    ("table", "change", "told"),
    [
        (TEXT, ('["m"]', '"m"'), "columns.mask is 'm'; give a list, such as [\"m\"]"),
        (TEXT, ('"r"', '["r"]'), "columns.reward is ('r',); give one name"),
        (
            TEXT,
            ("reward =", "rewrad ="),
            "columns.rewrad: no column of a trace (did you mean reward?)",
        ),
        (TEXT, ('title = "mine"', ""), "title is missing"),
        (TEXT, ('files = ["*.jsonl"]', ""), "files is missing"),
        (TEXT, ('"*.jsonl"', '"/tmp/*"'), "files: ['/tmp/*'] are no patterns below a folder"),
        (TEXT, ('["*.jsonl"]', '"*.jsonl"'), "files is '*.jsonl': a list is needed"),
        (TEXT, ("nothing =", "notes = []\n#"), "nothing is missing"),
        (TEXT, ('step = "s", ', ""), "columns.step is missing"),
        (TEXT, ('prompt = "q", ', ""), "columns.prompt is missing"),
        (TEXT, ('response = "a", ', ""), "columns.response is missing"),
        (
            TEXT,
            ("columns =", 'options = ["tokens"]\ncolumns ='),
            "options: unknown option 'tokens'",
        ),
        (TEXT, ("columns =", "options = []\ncolumns ="), "options: text is counted"),
        (TEXT, ("columns =", 'tokenizer = "t"\ncolumns ='), "tokenizer: text is counted"),
        (TEXT, ("columns =", "rewards = []\ncolumns ="), "rewards: their sum is the field reward"),
        (TEXT, ("columns =", 'form = "none"\ncolumns ='), "form is 'none'; name a module"),
        (
            TEXT,
            ("columns =", "colums = {}\ncolumns ="),
            "unknown key colums (did you mean columns?)",
        ),
        (TEXT, ('about = "a"', ""), "key about is missing"),
        (LENGTHS, ('tokenizer = "the run\'s own"', ""), "tokenizer is missing"),
        (LENGTHS, ("options = []", ""), "options: lengths are not counted again"),
        (LENGTHS, ('prompt_tokens = "p", ', ""), "columns.prompt_tokens is missing"),
        (
            LENGTHS,
            ("options = []", 'options = ["step"]'),
            "options: column, step, epoch, ungrouped need",
        ),
        (LENGTHS, ("options = []", 'options = ["column"]'), "the user names the columns"),
    ],
)
def test_a_source_that_could_not_be_imported_is_refused_by_table_and_key(
    tmp_path, table, change, told
):
    file = tmp_path / "sources.toml"
    file.write_text(f"[mine]{table}")
    assert list(read_sources(file)) == ["mine"]
    assert change[0] in table
    file.write_text(f"[mine]{table.replace(*change)}")
    refused(lambda: read_sources(file), f"{file}: [mine]: ", told)


def test_a_file_of_sources_that_is_no_toml_or_has_no_tables_is_refused(tmp_path):
    file = tmp_path / "sources.toml"
    file.write_text("[mine\n")
    refused(lambda: read_sources(file), f"{file}: broken TOML", "line 1")
    file.write_text("mine = 3\n")
    refused(lambda: read_sources(file), f"{file}: [mine]: a source is 3; it has the keys about")


def test_a_command_ends_in_a_line_if_the_file_of_sources_is_broken(tmp_path):
    file = tmp_path / "sources.toml"
    file.write_text("[verl]\nabout = 3\n")
    code = (
        "import pathlib, sys; from simrl.trace.importers import sources; "
        f"sources.FILE = pathlib.Path({str(file)!r}); sys.argv = ['simrl', 'trace', 'import', 'csv', '--help']; "
        "from simrl.commands.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"simrl: {file}: [verl]: about is 3: a text is needed\n"


# TRL


def completions(folder: Path, step: int, **columns: list[object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(columns["prompt"])
    file = folder / f"completions_{step:05d}.parquet"
    pd.DataFrame({"step": [step] * rows, **columns, "advantage": [0.5] * rows}).to_parquet(file)
    return file


def test_trl_completions_are_grouped_by_prompt_and_step(tmp_path):
    folder = tmp_path / "out" / "completions"
    completions(
        folder,
        5,
        prompt=["p", "p", "q"],
        completion=["x", "xx", "xxx"],
        accuracy=[1.0, float("nan"), 0.0],
    )
    completions(folder, 10, prompt=["q", "q"], completion=["x", ""], accuracy=[1.0, 1.0])
    trace = import_trl(tmp_path / "out", BY_CHARACTER)
    frame = trace.table.to_pandas()
    assert frame[
        ["step", "prompt_id", "sample", "epoch", "response_tokens"]
    ].to_numpy().tolist() == [
        [5, 0, 0, 0, 1],
        [5, 0, 1, 0, 2],
        [5, 1, 0, 0, 3],
        [10, 1, 0, 1, 1],
    ]
    assert trace.table.column("reward").to_pylist() == [1.0, None, 0.0, 1.0]
    assert "1 empty responses" in trace.metadata.notes
    assert len(import_trl(folder / "completions_00010.parquet", BY_CHARACTER)) == 1


def test_a_generation_batch_that_trl_logs_again_counts_once(tmp_path):
    for step, answer in enumerate(["x", "x", "xx", "x"], start=1):
        completions(tmp_path, step, prompt=["p", "p"], completion=[answer, "y"], r=[1, 0])
    trace = import_trl(tmp_path, BY_CHARACTER)
    assert trace.column("step").tolist() == [1, 1, 3, 3, 4, 4]
    assert "1 files repeat the generation batch" in trace.metadata.notes


def test_two_trl_files_of_one_step_are_refused(tmp_path):
    file = completions(tmp_path, 1, prompt=["p", "p"], completion=["x", "y"])
    completions(tmp_path, 2, prompt=["p", "p"], completion=["xx", "yy"])
    (tmp_path / "completions_1.parquet").write_bytes(file.read_bytes())
    refused(
        lambda: import_trl(tmp_path, BY_CHARACTER),
        "completions_00001.parquet: row 0: step 1 is also in completions_1.parquet",
        "keep one",
    )


def test_a_trl_file_of_another_step_than_its_name_says_is_refused(tmp_path):
    completions(tmp_path, 1, prompt=["p"], completion=["x"]).rename(
        tmp_path / "completions_00007.parquet"
    )
    refused(
        lambda: import_trl(tmp_path, BY_CHARACTER), "row 0: step is 1 in the completions of step 7"
    )


def test_several_trl_reward_columns_must_be_named(tmp_path):
    completions(
        tmp_path,
        1,
        prompt=["p", "p"],
        completion=["x", "y"],
        right=[1.0, 1.0],
        form=[0.5, float("nan")],
    )
    refused(lambda: import_trl(tmp_path, BY_CHARACTER), "right, form", "--reward-column")
    refused(
        lambda: import_trl(tmp_path, BY_CHARACTER, reward_column=["r"]), "no column of numbers 'r'"
    )
    both = import_trl(tmp_path, BY_CHARACTER, reward_column=["right", "form"])
    assert both.column("reward").tolist() == [1.5, 1.0]
    assert "reward" not in import_trl(tmp_path, BY_CHARACTER, reward_column=()).table.column_names


def test_a_reward_column_that_is_named_twice_counts_once(tmp_path):
    completions(tmp_path, 1, prompt=["p"], completion=["x"], right=[1.0], form=[0.5])
    trace = import_trl(tmp_path, BY_CHARACTER, reward_column=["right", "right"])
    assert trace.column("reward").tolist() == [1.0]


def test_reward_columns_of_json_lines_are_added_up_too(tmp_path):
    row = {"step": 1, "prompt": "p", "completion": "x", "advantage": 0.5}
    file = write_jsonl(
        tmp_path / "c.jsonl",
        {**row, "right": None, "form": 0.5},
        {**row, "right": 1, "form": 0.25, "completion": "xx"},
    )
    named = import_trl(file, BY_CHARACTER, reward_column=["right", "form", "form"])
    assert named.column("reward").tolist() == [0.5, 1.25]
    only = write_jsonl(tmp_path / "d.jsonl", {**row, "form": 0.5})
    assert import_trl(only, BY_CHARACTER).column("reward").tolist() == [0.5]
    refused(
        lambda: import_trl(file, BY_CHARACTER, reward_column=["wrong"]),
        "c.jsonl: no column of numbers 'wrong'; it has right, form",
    )
    write_jsonl(file, {**row, "right": 1, "form": 0.5}, {**row, "form": 1})
    refused(lambda: import_trl(file, BY_CHARACTER), "right, form may be rewards", "--reward-column")
    refused(
        lambda: import_trl(file, BY_CHARACTER, reward_column=["right"]),
        "c.jsonl: line 2: no field 'right'",
    )


def test_reward_columns_of_a_source_with_one_reward_are_refused(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollout(1, "p", "x"))
    refused(
        lambda: import_verl(tmp_path, BY_CHARACTER, reward_column=["score"]),
        "--reward-column: verl rollout dump: the reward is one column; leave it out",
    )


def test_a_small_trl_file_that_claims_a_million_rows_is_refused_soon(tmp_path):
    many = 1_000_000
    columns = {"step": [1] * many, "prompt": ["p"] * many, "completion": ["x"] * many}
    pq.write_table(pa.table(columns), tmp_path / "completions_00001.parquet")
    begin = time.monotonic()
    refused(
        lambda: import_trl(tmp_path, BY_CHARACTER),
        "completions_00001.parquet: 1,000,000 rows; a logged step has at most 200,000; keep its own",
    )
    assert time.monotonic() - begin < 5


def test_trl_files_of_the_wrong_form_are_refused(tmp_path):
    refused(lambda: import_trl(tmp_path, BY_CHARACTER), str(tmp_path), "log_completions")
    file = completions(tmp_path, 1, prompt=["p"], completion=[None], r=[1])
    refused(lambda: import_trl(file, BY_CHARACTER), "row 0", "field 'completion' is empty")
    pq.write_table(pa.table({"step": [1], "prompt": ["p"], "text": ["x"]}), file)
    refused(
        lambda: import_trl(file, BY_CHARACTER), "no field 'completion' (it has step, prompt, text"
    )
    file.write_bytes(file.read_bytes()[:-30])
    refused(lambda: import_trl(file, BY_CHARACTER), "cannot be read as Parquet", "is it whole?")


def test_messages_in_trl_files_are_texts_and_the_answers_of_tools_are_not_generated(tmp_path):
    prompt = [{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]
    answer = [
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "found it"},
        {"role": "assistant", "content": "done"},
    ]
    columns = {"step": [1] * 2, "prompt": [prompt] * 2, "completion": [answer, answer[:1]]}
    pq.write_table(pa.table({**columns, "r": [0.0, 1.0]}), tmp_path / "completions_00001.parquet")
    trace = import_trl(tmp_path, BY_CHARACTER)
    assert trace.column("prompt_tokens").tolist() == [7, 7]
    assert trace.table.column("turn_tokens").to_pylist() == [[4, 4], None]
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[8], None]
    assert trace.column("prompt_id").tolist() == [0, 0]


# NeMo-RL


def trained(prompt: list[int], mask: list[int], padded: int = 20, **more: object) -> dict:
    """A line of train_data_step*.jsonl: every field is a batch of one, padded."""
    length = len(prompt) + len(mask)
    ids = [*prompt, *range(100, 100 + len(mask))]
    ids, whole = (
        [*values, *[0] * (padded - length)] for values in (ids, [*[0] * len(prompt), *mask])
    )
    lists = {"token_ids": [ids], "token_loss_mask": [whole], "content": [["q", "a"]]}
    return {**lists, "input_lengths": [length], "rewards": [0.5], "idx": 0, **more}


def test_nemos_training_data_have_turns_by_their_mask_and_the_step_of_the_file(tmp_path):
    folder = tmp_path / "logs" / "exp_001"
    folder.mkdir(parents=True)
    for step in (9, 10):
        write_jsonl(
            folder / f"train_data_step{step}.jsonl",
            trained([1, 2, 3], [1, 1, 0, 0, 0, 1]),
            trained([1, 2, 3], [1.0], filtered_rewards=[0.25]),
            trained([4, 5], [1, 0]),
        )
    trace = import_dump("nemo_rl", tmp_path / "logs")
    assert trace.column("step").tolist() == [9] * 3 + [10] * 3
    assert trace.column("prompt_id").tolist() == [0, 0, 1] * 2
    assert trace.column("prompt_tokens").tolist() == [3, 3, 2] * 2
    assert trace.table.column("turn_tokens").to_pylist()[:3] == [[2, 1], None, None]
    assert trace.table.column("turn_observation_tokens").to_pylist()[:3] == [[3], None, None]
    assert trace.table.column("response_ids").to_pylist()[:3] == [[100, 101, 105], [100], [100]]
    assert trace.column("reward").tolist()[:3] == [0.5, 0.25, 0.5]
    file = write_jsonl(
        tmp_path / "train_data_step1.jsonl", {"content": [["a"]], "input_lengths": [2]}
    )
    refused(lambda: import_dump("nemo_rl", file), "line 1: no field 'token_loss_mask'")


# Tables as people have them


def test_lists_of_lengths_under_usual_names_are_turns_and_their_sum_the_response(tmp_path):
    row = {"group_id": 0, "prompt_len": 7, "output_lens": [2, 3, 4], "obs_lens": [5, 6]}
    file = write_jsonl(
        tmp_path / "t.jsonl", {**row, "tool_times": [0.5, 1.5]}, {**row, "tool_times": None}
    )
    trace = import_jsonl(file)
    assert trace.column("response_tokens").tolist() == [9, 9]
    assert trace.table.column("turn_tokens").to_pylist() == [[2, 3, 4]] * 2
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[5, 6]] * 2
    assert trace.table.column("turn_environment_s").to_pylist() == [[0.5, 1.5], None]
    assert trace.column("step").tolist() == [0, 0]
    assert "Read with prompt_id=group_id, prompt_tokens=prompt_len, turn_tokens=output_lens" in (
        trace.metadata.notes
    )
    assert trace.metadata.tokenizer == "the source's own (lengths are from column 'output_lens')"
    # a value after the last turn is left out, as what follows it is
    file = write_jsonl(tmp_path / "t.jsonl", {**row, "obs_lens": [5, 6, 7]})
    assert import_jsonl(file).table.column("turn_observation_tokens").to_pylist() == [[5, 6]]
    file = write_jsonl(tmp_path / "t.jsonl", {**row, "obs_lens": [5, 6, 7, 8]})
    refused(lambda: import_jsonl(file), "one value less than turn_tokens")


def test_what_the_user_states_goes_before_a_usual_name(tmp_path):
    row = {"question": "a", "rollout_id": 4, "prompt_len": 5, "out_len": 6, "length": 7}
    file = write_jsonl(tmp_path / "t.jsonl", row, row)
    trace = import_jsonl(file)
    assert trace.column("step").tolist() == [4, 4] and trace.column("prompt_id").tolist() == [0, 0]
    trace = import_jsonl(file, {"response_tokens": "length"}, step=0, ungrouped=True)
    assert trace.column("step").tolist() == [0, 0] and trace.column("prompt_id").tolist() == [0, 1]
    assert trace.column("response_tokens").tolist() == [7, 7]


def test_a_field_inside_others_is_named_by_its_way(tmp_path):
    row = {"messages": [{"content": "abcd"}, {"content": "ef"}], "usage": {"out": 3}, "a.b": 1.0}
    columns = {"prompt": "messages.0.content", "response_tokens": "usage.out", "reward": "a.b"}
    file = write_jsonl(tmp_path / "t.jsonl", row, row)
    trace = import_jsonl(file, columns, BY_CHARACTER)
    assert trace.column("prompt_tokens").tolist() == [4, 4]
    assert trace.column("response_tokens").tolist() == [3, 3]
    assert trace.column("reward").tolist() == [1.0, 1.0]
    last = {**columns, "response_tokens": "messages.-1.content"}
    refused(lambda: import_jsonl(file, last), "field 'messages.-1.content' is 'ef'")
    missing = {**columns, "response_tokens": "usage.in"}
    refused(lambda: import_jsonl(file, missing), "no column 'usage.in' for response_tokens")
    write_jsonl(file, row, {**row, "usage": None})
    refused(lambda: import_jsonl(file, columns), "line 2: no field 'usage.out'")


def test_a_json_array_a_parquet_file_and_a_folder_with_a_file_a_step_are_tables_too(tmp_path):
    rows = [{"prompt_id": n, "prompt_tokens": 5, "response_tokens": 6 + n} for n in range(2)]
    array = tmp_path / "t.json"
    array.write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    for file in (array, tmp_path / "t.parquet"):
        trace = import_jsonl(file)
        assert trace.column("response_tokens").tolist() == [6, 7]
        assert trace.column("step").tolist() == [0, 0]
    folder = tmp_path / "steps"
    folder.mkdir()
    write_jsonl(folder / "9.jsonl", *rows)
    (folder / "step_10.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollout-11.parquet")
    trace = import_jsonl(folder)
    assert trace.column("step").tolist() == [9, 9, 10, 10, 11, 11]
    assert trace.column("epoch").tolist() == [0, 0, 1, 1, 2, 2]
    assert import_jsonl(folder, step=3).column("step").tolist() == [3] * 6
    array.write_text("[1, 2]")
    refused(lambda: import_jsonl(array), "t.json: item 0: 1 is not a JSON object")
    (tmp_path / "none").mkdir()
    refused(lambda: import_jsonl(tmp_path / "none"), "no .jsonl, .json or .parquet in it")


def test_the_practice_lengths_are_read_without_a_word(shared_data):
    file = shared_data / "practice" / "20-formats" / "agentic_lens.jsonl"
    if not file.is_file():
        pytest.skip("the practice files are not there")
    trace = import_jsonl(file)
    assert trace.column("response_tokens").tolist() == [780] * 16
    assert trace.column("prompt_id").tolist() == [n // 4 for n in range(16)]
    assert trace.table.column("turn_environment_s").to_pylist()[0] == pytest.approx([1.2, 8.8, 0.4])


# AReaL


def trajectory(
    prompt: str, seqlen: int, head: int = 3, tail: int = 3, **extra: object
) -> dict[str, object]:
    record = {
        "task_id": 7,
        "sample_idx": 0,
        "seqlen": seqlen,
        "prompt_len": 10,
        "head_version": head,
        "tail_version": tail,
    }
    return {
        **record,
        "version_rle": [[head, 1]],
        "reward": 1.0,
        "prompt": prompt,
        "completion": "text",
        **extra,
    }


def test_areal_lengths_and_versions_are_its_own(tmp_path):
    rollouts = tmp_path / "trial" / "rollout"
    write_jsonl(
        rollouts / "10" / "12.jsonl", trajectory("p", 40, 9, 10), trajectory("p", 30, 10, 10)
    )
    write_jsonl(
        rollouts / "3" / "7.jsonl", trajectory("p", 15), trajectory("p", 20, 2, 3, reward=-0.5)
    )
    write_jsonl(rollouts / "3" / "8.jsonl", trajectory("q", 12, -1, -1), trajectory("q", 10))
    trace = import_areal(rollouts, cap_tokens=100)
    frame = trace.table.to_pandas()
    assert frame[
        ["step", "prompt_id", "sample", "epoch", "prompt_tokens", "response_tokens"]
    ].to_numpy().tolist() == [
        [3, 0, 0, 0, 10, 5],
        [3, 0, 1, 0, 10, 10],
        [3, 1, 0, 0, 10, 2],
        [10, 0, 0, 1, 10, 30],
        [10, 0, 1, 1, 10, 20],
    ]
    assert trace.table.column("policy_version").to_pylist() == [3, 2, None, 9, 10]
    assert frame["reward"].tolist() == [1.0, -0.5, 1.0, 1.0, 1.0]
    assert "1 empty responses were left out (the first: 8.jsonl: line 2)" in trace.metadata.notes
    assert len(import_areal(rollouts / "3")) == 3
    assert len(import_areal(rollouts / "10" / "12.jsonl")) == 2


def test_areal_segments_are_turns_and_context_is_what_the_environment_said(tmp_path):
    parts = [
        ("prompt", 10),
        ("context", 2),
        ("gen", 5),
        ("context", 4),
        ("context", 3),
        ("gen", 6),
        ("gen", 8),
    ]
    segments = [{"role": role, "len": tokens, "text": ""} for role, tokens in parts]
    file = write_jsonl(
        tmp_path / "3" / "7.jsonl",
        trajectory("p", 38, segments=segments),
        trajectory("p", 40, segments=[*segments, {"role": "context", "len": 2}]),
        trajectory("p", 30, segments=[{"role": "prompt", "len": 10}, {"role": "gen", "len": 20}]),
    )
    trace = import_areal(file)
    assert trace.column("prompt_tokens").tolist() == [12, 12, 10]
    assert trace.column("response_tokens").tolist() == [19, 19, 20]
    assert trace.table.column("turn_tokens").to_pylist() == [[5, 14], [5, 14], None]
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[7], [7], None]
    assert (
        "2 of 3 responses have several turns, with 14 tokens of observations"
        in trace.metadata.notes
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"seqlen": 9}, "seqlen is 9, below prompt_len 10"),
        ({"seqlen": "9"}, "field 'seqlen' is '9'"),
        ({"prompt_len": 0}, "field 'prompt_len' is 0"),
        ({"head_version": 4}, "head_version 4, tail_version 3 in folder 3"),
        ({"tail_version": 5}, "tail_version 5 in folder 3"),
        ({"reward": "high"}, "field 'reward' is 'high'"),
        ({"reward": 1e300}, "field 'reward' is 1e+300; it must be a finite number (of 32 bits)"),
        ({"segments": [3]}, "field 'segments' is [3]"),
        (
            {"segments": [{"role": "gen", "len": 19}]},
            "have 19 tokens after the prompt, seqlen and prompt_len say 20",
        ),
    ],
)
def test_areal_records_that_contradict_themselves_are_refused(tmp_path, change, part):
    file = write_jsonl(
        tmp_path / "3" / "7.jsonl", trajectory("p", 30), trajectory("p", 30) | change
    )
    refused(lambda: import_areal(file), "7.jsonl: line 2", part)


def test_areal_files_outside_a_version_folder_are_refused(tmp_path):
    refused(lambda: import_areal(tmp_path), "no .jsonl in place of {version}/{task_id}.jsonl")
    file = write_jsonl(tmp_path / "rollout" / "7.jsonl", trajectory("p", 30))
    refused(lambda: import_areal(file), "rollout/7.jsonl in place of {version}/{task_id}.jsonl")
    refused(lambda: import_areal(tmp_path), "rollout/7.jsonl")


def test_a_number_of_hundreds_of_digits_in_a_trl_log_is_too_large_and_no_crash(tmp_path):
    row = '{"step": 1, "completions/mean_length": %s, "profiling/Time taken: GRPOTrainer.vLLM.generate": 1}'
    (tmp_path / "run.jsonl").write_text(row % ("9" * 400) + "\n")
    metrics = read_metrics(tmp_path / "run.jsonl", lengths=False)
    assert np.isnan(metrics["response_length/mean"]).all()
    assert any("response_length/mean" in note for note in metrics.attrs["notes"])


def test_an_areal_task_with_a_link_to_it_counts_once(tmp_path):
    write_jsonl(tmp_path / "3" / "7.jsonl", trajectory("p", 20))
    (tmp_path / "3" / "8.jsonl").symlink_to("7.jsonl")
    (tmp_path / "4").symlink_to("3")
    assert len(import_areal(tmp_path)) == 1


def test_a_link_to_itself_among_areal_files_is_refused(tmp_path):
    link = tmp_path / "3" / "7.jsonl"
    link.parent.mkdir()
    link.symlink_to(link)
    refused(lambda: import_areal(tmp_path), "7.jsonl: cannot be read", "name a readable file")


def test_a_counter_is_plain_data():
    assert TokenCounter("estimated: 4 characters a token", 4.0) == token_counter(
        chars_per_token=4.0
    )
