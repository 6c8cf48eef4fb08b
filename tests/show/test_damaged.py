"""Results, and reports of results and sweeps, that are damaged or contradict themselves are refused in a line."""

import copy
import json
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
from simrl.result.check import check_metadata
from simrl.result.result import read_result
from simrl.show.inputs import inputs
from simrl.show.report.page import write_report
from simrl.simulate.run import simulate
from simrl.study.sweep import write_table
from tests.fuzzing import lay
from tests.helpers import scenario
from tests.readers import READERS


def refusal(read, *arguments) -> str:
    with pytest.raises(InputError) as refused:
        read(*arguments)
    assert str(refused.value).isprintable()
    return str(refused.value)


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
    """A run with drafters, other drafters for the tail, and faults."""
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
