"""No reader answers malformed files with anything but a valid object or one line; and what fuzzing found, each by itself."""

import importlib.util
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simrl.errors import InputError
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import read_profile
from simrl.scenario.load import load_scenarios
from simrl.speculation.methods import make_speculation
from simrl.study.calibration import calibrated
from simrl.study.grid import resolved, vary
from simrl.study.sweep import kept
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.tokens import token_counter
from simrl.trace.trace import read_trace
from tests import readers
from tests.fuzzing import an_input, fuzz
from tests.readers import READERS
from tests.trace import test_logs as logs

QUICK = ("dump", "scenario", "trace")
READ = [
    reader if reader in QUICK else pytest.param(reader, marks=pytest.mark.slow)
    for reader in READERS
]


@pytest.mark.parametrize("reader", READ)
def test_a_reader_gives_a_valid_object_or_one_line(reader, tmp_path):
    if READERS[reader].needs:
        pytest.importorskip(READERS[reader].needs)
    report = fuzz(reader, 80, 0, tmp_path)  # tests/nightly/fuzz.py reads thousands
    assert report.failures == []
    assert report.inputs == 80
    assert report.accepted > 0
    assert report.refused > 0


def test_the_same_seed_gives_the_same_inputs():
    seeds = READERS["trace"].seeds()
    assert [an_input(seeds, "trace", 3, n) for n in range(20)] == [
        an_input(seeds, "trace", 3, n) for n in range(20)
    ]
    assert an_input(seeds, "trace", 3, 9) != an_input(seeds, "trace", 4, 9)


@pytest.mark.slow
def test_a_reader_that_fails_hangs_prints_or_dies_is_seen_and_the_rest_is_still_read(tmp_path):
    report = fuzz("self_test", 9, 0, tmp_path, limit_s=3.0)
    said = {number: words.splitlines() for number, words in report.failures}
    assert sorted(said) == [1, 2, 3, 4, 5, 6]
    assert said[1][-1] == "ZeroDivisionError: division by zero"
    assert said[2][0] == "more than 3.0 s"
    assert said[3][0].startswith("printed")
    assert said[4][0] == "the process died with code -6"
    assert said[5][0].startswith("the message names no file")
    assert said[6][0].endswith("MB")
    assert (report.inputs, report.refused, report.accepted) == (9, 1, 2)
    assert (tmp_path / "self_test-0-4" / "file").read_bytes() == b"4"


def refusal(read, *arguments) -> str:
    with pytest.raises(InputError) as refused:
        read(*arguments)
    assert str(refused.value).isprintable()
    return str(refused.value)


def test_a_message_does_not_steer_the_terminal(tmp_path):
    path = tmp_path / "a\x1b[2J\nb.yaml"
    assert "a\\x1b[2J b.yaml" in refusal(load_scenarios, path)


TOO_DEEP = re.compile("levels deep|nesting depth")  # some builds of libyaml refuse it first


def test_brackets_that_would_crash_libyaml_are_refused_with_their_place(tmp_path):
    file = tmp_path / "deep.yaml"
    for text in ("[" * 50_000, "- " * 50_000 + "1", "{a: " * 50_000):
        file.write_text(text)
        assert TOO_DEEP.search(refusal(load_scenarios, file))


def test_an_override_that_would_crash_libyaml_is_refused(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_bytes(readers.as_yaml(readers.CHEAP))
    assert TOO_DEEP.search(refusal(load_scenarios, file, ["seed=" + "[" * 50_000]))


def test_a_yaml_tag_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("name: !!python/object/apply:os.mkdir [PWNED]\n")
    refusal(load_scenarios, "s.yaml")
    assert not Path("PWNED").exists()


def test_a_small_file_that_says_it_is_a_billion_rows_is_refused_before_it_is_read(tmp_path):
    table = pa.table({"step": pa.array([0]).take(pa.array([0] * 1000))})
    bomb = pa.concat_tables([table] * 100_000)
    pq.write_table(bomb, tmp_path / "t.parquet", compression="zstd")
    assert "100,000,000 rows" in refusal(read_trace, tmp_path / "t.parquet")
    assert "100,000,000 rows" in refusal(read_profile, tmp_path / "t.parquet")


def test_a_profile_whose_ticks_make_a_huge_grid_is_refused(tmp_path):
    table = pq.read_table(pa.BufferReader(readers.a_profile()))
    for axis in ("prefill_tokens", "prefill_kv_tokens", "decode_sequences", "decode_kv_tokens"):
        ticks = [
            None if v is None else float(i) for i, v in enumerate(table.column(axis).to_pylist())
        ]
        table = table.set_column(
            table.column_names.index(axis), axis, pa.array(ticks, pa.float64())
        )
    pq.write_table(table, tmp_path / "p.parquet")
    assert "measure all of them, or fewer ticks" in refusal(read_profile, tmp_path / "p.parquet")


def test_an_outcome_that_is_none_is_simulated_again(tmp_path):
    swept = readers.a_plan()
    for outcome in (
        3,
        [],
        {"row": 3},
        {"row": {"samples_per_s": "fast"}},
        {"row": {}, "error": 3, "x": 1},
    ):
        for point in swept.points:
            file = tmp_path / "points" / point.hash[:2] / f"{point.hash}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"outcome": outcome}))
        assert kept(swept, tmp_path) == {}


def test_a_table_that_is_a_folder_or_a_broken_link_is_passed_over(tmp_path):
    (tmp_path / "a_generations.table.json").mkdir()
    (tmp_path / "b_generations.table.json").symlink_to("b_generations.table.json")
    assert "neither" in refusal(import_dump, "verl", tmp_path, token_counter(chars_per_token=1))


def test_a_step_that_no_run_can_have_is_left_out_by_its_line(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(logs.console().format(step="9" * 5000))
    assert "run.log: no metrics of verl" in refusal(read_metrics, log)
    rows = readers.trl_lines().decode().replace('"train/global_step": 1', '"train/global_step": -1')
    (tmp_path / "run.jsonl").write_text(rows)
    metrics = read_metrics(tmp_path / "run.jsonl", None, 16, 80.0)
    assert "step -1 is no whole number from 0" in metrics.attrs["notes"][0]
    assert metrics["step"].tolist() == [2, 3, 4, 5, 6]


def test_a_scenario_that_is_a_quoted_number_is_refused(tmp_path):
    (tmp_path / "scenario.yaml").write_text("'-1'\n")
    assert "no keys" in refusal(load_scenarios, tmp_path / "scenario.yaml")


@pytest.mark.parametrize("name", [["none"], {}, 3])
def test_a_speculation_whose_name_is_no_text_is_unknown(name):
    assert f"speculation is {name!r} (" in refusal(make_speculation, {"name": name})


def test_half_a_character_in_a_key_that_is_drawn_is_refused(tmp_path):
    (tmp_path / "scenario.yaml").write_bytes(readers.as_yaml(readers.CHEAP))
    varied = vary(tmp_path / "scenario.yaml", ["clus\ud800ter.gpus=4,8"])
    (drawn,) = varied.combinations(1, 0)
    assert "'clus\\ud800ter.gpus' is no key" in refusal(resolved, varied.file, drawn)


@pytest.mark.parametrize("setting", ["model=qwan3-0.6b", "cluster.gpu=a110", "cluster.tp=5"])
def test_a_log_is_named_where_what_is_said_of_its_run_cannot_be(setting, tmp_path):
    for name, content in readers.calibrations()[1].items():
        (tmp_path / name).write_bytes(content)
    how = [*json.loads((tmp_path / "arguments.json").read_text())["settings"], setting]
    message = refusal(
        calibrated,
        tmp_path / "run.log",
        how,
        None,
        (1, 6),
        4,
        16,
        80.0,
        900,
        None,
        None,
        tmp_path / "out",
    )
    assert message.startswith(f"{tmp_path / 'run.log'}: ")
    assert setting.partition("=")[2] in message


def test_a_vocabulary_beyond_all_floats_is_refused(tmp_path):
    config = json.loads(readers.config()) | {"vocab_size": 10**400}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "vocab" in refusal(model_shape, tmp_path)


def test_a_log_without_the_length_of_responses_is_refused(tmp_path):
    rollout = "perf 0: {'perf/rollout_time': 120.0, 'rollout/num_training_samples': 16}"
    (tmp_path / "run.log").write_text(f"{rollout}\nperf 0: {{'perf/actor_train_time': 9.0}}\n")
    assert "without the mean length of responses" in refusal(
        read_metrics, tmp_path / "run.log", None, 16, 80.0
    )


@pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="the tokenizers package is not installed"
)
def test_a_tokenizer_that_cannot_count_is_refused(tmp_path):
    made = json.loads(readers.tokenizers()[0]["tokenizer.json"])
    made["model"]["unk_token"] = "none"
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert "cannot count" in refusal(token_counter(tmp_path).count, ["what is this"])


@pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="the tokenizers package is not installed"
)
def test_a_tokenizer_whose_ids_do_not_fit_a_trace_is_refused(tmp_path):
    made = json.loads(readers.tokenizers()[0]["tokenizer.json"])
    made["model"]["vocab"] = {word: 2**31 + i for i, word in enumerate(made["model"]["vocab"])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert "token id 2147483650 is more than 32 bits hold" in refusal(
        token_counter(tmp_path).count, ["a b"]
    )
