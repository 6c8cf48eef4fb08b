"""No reader answers malformed files with anything but a valid object or one line; and what fuzzing found, each by itself."""

import copy
import importlib.util
import json
import re
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simrl.analysis.explanation import explain_result
from simrl.errors import InputError
from simrl.files import sealed
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import read_profile
from simrl.result.check import check_metadata
from simrl.result.result import read_result
from simrl.scenario.load import load_scenarios
from simrl.show.inputs import inputs
from simrl.show.report.page import write_report
from simrl.simulate.run import simulate
from simrl.speculation.methods import make_speculation
from simrl.study.calibration import calibrated
from simrl.study.grid import resolved, vary
from simrl.study.sweep import kept, write_table
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.tokens import token_counter
from simrl.trace.trace import read_trace
from tests import readers
from tests.fuzzing import an_input, fuzz, lay
from tests.helpers import scenario
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


@pytest.fixture
def run(tmp_path):
    """The folder of a result."""
    lay(READERS["result"].seeds()[0], tmp_path)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("table", "column", "value", "said"),
    [
        ("spans", "ended_s", 0.0, "row 1, column 'ended_s'"),
        ("spans", "gpus", 0, "column 'gpus' is 0"),
        ("steps", "finished_s", -1.0, "column 'finished_s' is -1.0"),
        ("steps", "samples", 0, "column 'samples' is 0; it must be at least 1"),
        ("samples", "uid", 0, "row 1, column 'uid' is 0"),
        ("samples", "generated_tokens", -1, "column 'generated_tokens' is -1"),
        ("segments", "uid", 10**6, "column 'uid' is 1000000; it must be the uid of a sample"),
        ("segments", "worker", 3, "column 'worker' is 3; it must be one of the 3 rollout workers"),
    ],
)
def test_a_result_whose_rows_do_not_fit_each_other_is_refused_with_the_row(
    run, table, column, value, said
):
    file = run / f"{table}.parquet"
    found = pq.read_table(file)
    values = found.column(column).to_pylist()
    values[1] = value
    kind = found.schema.field(column).type
    pq.write_table(
        found.set_column(found.column_names.index(column), column, pa.array(values, kind)), file
    )
    message = refusal(read_result, run)
    assert f"{table}.parquet" in message
    assert said in message


def test_a_result_without_a_column_or_with_one_of_another_type_is_refused(run):
    file = run / "samples.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("prompt_id"), file)
    assert "samples.parquet: no column 'prompt_id'" in refusal(read_result, run)
    pq.write_table(
        table.set_column(0, "uid", pa.array([str(uid) for uid in table.column("uid").to_pylist()])),
        file,
    )
    assert "samples.parquet: column 'uid'" in refusal(read_result, run)


def test_a_result_whose_metadata_is_not_what_is_looked_up_is_refused_with_the_key(run):
    metadata = json.loads((run / "result.json").read_text())
    metadata["scenario"]["engine"]["max_num_seqs"] = "many"
    (run / "result.json").write_text(json.dumps(sealed(metadata)))
    assert "scenario.engine.max_num_seqs is 'many'" in refusal(read_result, run)
    (run / "result.json").write_text("[" * 100_000)
    assert "not a result folder" in refusal(read_result, run)


def without(run: Path, place: str) -> None:
    """Take a key out of the metadata of a result."""
    metadata = json.loads((run / "result.json").read_text())
    *outer, key = place.split(".")
    del reduce(dict.__getitem__, outer, metadata)[key]
    (run / "result.json").write_text(json.dumps(sealed(metadata)))


def test_a_result_that_does_not_say_its_workers_is_refused_and_without_its_variant_explained(run):
    without(run, "variant")
    assert explain_result(read_result(run)).variant == ""
    without(run, "rollout_workers")
    assert "metadata has no rollout_workers" in refusal(explain_result, read_result(run))
    end_s = json.loads((run / "result.json").read_text())["end_s"]
    (run / "result.json").write_text(json.dumps({"end_s": end_s}))
    assert "metadata has no label" in refusal(explain_result, read_result(run))


@pytest.mark.parametrize(
    "place", ["trace_steps", "end_s", "profile.kind", "trace.licence", "scenario.faults"]
)
def test_a_report_of_a_result_that_does_not_say_what_it_rests_on_is_refused_with_the_key(
    place, run
):
    without(run, place)
    message = refusal(write_report, run, run.parent / "report.html")
    assert f"result.json: key {place} is missing" in message


class LookedUp(dict[str, Any]):
    """A metadata that notes in `places` what is looked up in it."""

    def __init__(
        self, facts: dict[str, Any], places: set[tuple[str, ...]], outer: tuple[str, ...] = ()
    ) -> None:
        inner = {
            key: LookedUp(value, places, (*outer, key)) if isinstance(value, dict) else value
            for key, value in facts.items()
        }
        super().__init__(inner)
        self.places, self.outer = places, outer

    def __getitem__(self, key: str) -> Any:
        self.places.add((*self.outer, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self:
            self.places.add((*self.outer, key))
        return super().get(key, default)


def test_whatever_a_report_looks_up_is_there_and_of_its_type_or_the_result_is_refused(tmp_path):
    """A run that rests on all that a run can rest on: drafters of its own, those of the tail, faults."""
    config = scenario(
        "specactor", warmup_steps=1, faults=[{"kind": "slow", "worker": 0, "factor": 2.0}]
    )
    simulate(config).write(tmp_path)
    whole = json.loads((tmp_path / "result.json").read_text())
    places: set[tuple[str, ...]] = set()
    inputs(LookedUp(whole, places))
    missing = set()
    for *outer, key in sorted(places):
        for value in (None, 3, "3", [3], {"3": 3}, ...):
            metadata = copy.deepcopy(whole)
            facts = reduce(dict.__getitem__, outer, metadata)
            if value is ...:
                del facts[key]
            else:
                facts[key] = value
            try:
                check_metadata(json.loads(json.dumps(metadata)), "result.json", reported=True)
            except InputError as error:
                assert ".".join(outer) in str(error)
                missing |= {".".join([*outer, key])} if value is ... else set()
            else:
                inputs(metadata)
    assert {"paper", "trace.source", "speculation.draft_times.kind", "scenario.faults"} < missing
    assert any(place.startswith("best_of_n.drafters.ngram.") for place in missing)


@pytest.fixture
def swept(tmp_path):
    """The folder of a sweep."""
    lay(READERS["report"].seeds()[1], tmp_path)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("point", None, "its table has points without a number"),
        ("point", True, "its table has points without a number"),
        ("samples_per_s", "fast", "samples_per_s='fast', which cannot be"),
        ("samples_per_s", 0.0, "samples_per_s=0.0, which cannot be"),
        ("samples_per_s", None, "samples_per_s=None, which cannot be"),
        ("step_s", float("inf"), "step_s=inf, which cannot be"),
        ("off_policyness_mean", float("nan"), "off_policyness_mean=nan, which cannot be"),
        ("gpu_hours_per_1k_samples", -1.0, "gpu_hours_per_1k_samples=-1.0, which cannot be"),
        ("train_idle", True, "train_idle=True, which cannot be"),
        ("seed", float("nan"), "seed=nan, which cannot be"),
        ("variant", None, "variant=None, which cannot be"),
    ],
)
def test_a_report_of_a_sweep_whose_table_cannot_be_is_refused_with_the_column(
    swept, column, value, said
):
    for file in swept.glob("table/*/*.parquet"):
        table = pq.read_table(file, partitioning=None)
        place = table.column_names.index(column)
        pq.write_table(table.set_column(place, column, pa.array([value] * table.num_rows)), file)
    message = refusal(write_report, swept, swept.parent / "report.html")
    assert str(swept) in message and said in message


def test_a_report_of_a_sweep_notices_a_flipped_bit_of_its_table(swept, tmp_path):
    rows = [
        {"point": 0, "hash": "a", "seed": 1, "variant": "", "error": None, "system.name": "areal"}
    ]
    shutil.rmtree(swept / "table")
    (swept / "table").mkdir()
    write_table(rows, swept / "table")
    file = next(swept.glob("table/*/*.parquet"))
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    assert "is damaged, or was changed" in refusal(write_report, swept, tmp_path / "report.html")


@pytest.mark.parametrize("name", ["result.json", "comparison.json"])
def test_a_device_in_place_of_a_results_file_is_not_read(tmp_path, name):
    lay(READERS["report"].seeds()[0], tmp_path)
    for file in (
        [tmp_path / "run" / name] if name == "comparison.json" else tmp_path.glob(f"run/*/{name}")
    ):
        file.unlink()
        file.symlink_to("/dev/zero")
    assert refusal(write_report, tmp_path / "run", tmp_path / "report.html")


def test_a_report_of_a_sweep_reads_nothing_that_is_too_deep_and_names_no_half_characters(swept):
    for point in swept.glob("points/*/*.json"):
        point.write_text("[" * 100_000)
    (swept / "sweep.json").write_text('{"scenario": "a\\ud800.yaml"}')
    write_report(swept, swept.parent / "report.html")
    assert "a\\ud800" in (swept.parent / "report.html").read_text()
    (swept / "sweep.json").write_text("[" * 100_000)
    assert "a sweep without a table that can be read" in refusal(
        write_report, swept, swept.parent / "report.html"
    )


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
