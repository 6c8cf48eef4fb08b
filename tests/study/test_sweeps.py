"""Sweeps: each point once, whichever process it was in; a table that every tool opens."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simrl.errors import InputError
from simrl.result.metrics import summary
from simrl.scenario.load import load_scenarios
from simrl.simulate.cache import InputCache
from simrl.simulate.run import simulate
from simrl.study.executors import Here, LostTask, Processes
from simrl.study.grid import vary
from simrl.study.point import Point, simulate_point
from simrl.study.sweep import kept, plan, run
from simrl.trace.trace import Trace, TraceMetadata, write_trace
from tests.command_line import SCENARIO, contents

GRID = ("cluster.gpus=4,8", "seed=0..1", "-o", "out", "--jobs", "1", "--json")
PATIENCE_S = 120  # for what takes a moment, on a machine that is busy


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    return tmp_path / "scenario.yaml"


def planned(file, *texts, zips=(), sample=None, seed=0):
    return plan(vary(file, texts, zips), sample, seed)


def values(found, *keys):
    """What the points of a plan have at some keys, in order."""
    return [tuple(_at(point.scenario.model_dump(), key) for key in keys) for point in found.points]


def _at(data, key):
    for part in key.split("."):
        data = data.get(part)
    return data


def swept(found, folder, executor=None, before=None):
    return run(
        found, kept(found, folder) if before is None else before, folder, executor or Here(), {}
    )


def table(folder):
    """All rows, in the order of the points."""
    return pd.read_parquet(folder / "table").sort_values("point").reset_index(drop=True)


# What is varied.


def test_a_grid_crosses_the_files_variations_the_keys_and_the_systems_the_last_fastest(file):
    file.write_text(f"{SCENARIO}vary: [{{cluster.tp: 1}}, {{cluster.tp: 2}}]\n")
    found = values(planned(file, "cluster.gpus=4,8"), "cluster.tp", "cluster.gpus", "system.name")
    assert found == [
        (tp, gpus, name) for tp in (1, 2) for gpus in (4, 8) for name in ("verl_colocated", "areal")
    ]


def test_a_key_on_the_command_line_wins_over_the_files_variation(file):
    file.write_text(
        f"{SCENARIO}vary: [{{cluster.gpus: 2, seed: 1}}, {{cluster.gpus: 4, seed: 1}}]\n"
    )
    found = values(planned(file, "cluster.gpus=8,16", "systems=split"), "cluster.gpus", "seed")
    assert found == [(8, 1), (16, 1)]


@pytest.mark.parametrize(
    ("varied", "text", "what"),
    [
        (
            "cluster.gpus: 8",
            "cluster={gpus: 24},{gpus: 32}",
            "{gpus: 24}': vary sets cluster.gpus too, and only one",
        ),
        (
            "cluster.gpus: 8",
            "cluster={tp: 1},{gpus: 32}",
            "{gpus: 32}': vary sets cluster.gpus too, and only one",
        ),
        (
            "cluster: {gpus: 8}",
            "cluster.gpus=24,32",
            "cluster.gpus=24': vary sets cluster too, and only one",
        ),
        (
            "training: {mfu: 0.5}",
            "training.mfu=0.2..0.4",
            "'training.mfu=0.2..0.4': vary sets training too",
        ),
        (
            "cluster: {gpus: 8}",
            "cluster={gpus: 4},{tp: 2}",
            "{tp: 2}': vary has cluster.gpus, which this leaves out",
        ),
    ],
)
def test_values_and_a_variation_that_would_each_hold_in_part_are_refused(file, varied, text, what):
    file.write_text(f"{SCENARIO}vary: [{{{varied}}}]\n")
    with pytest.raises(InputError, match=re.escape(what)):
        vary(file, [text])
    assert vary(file, [text, "vary=null"]).dimensions


def test_one_value_is_set_everywhere_and_is_no_column(file):
    found = planned(file, "steps=3", "seed=1,2")
    assert {point.scenario.steps for point in found.points} == {3}
    assert list(found.keys) == ["system.name", "seed", "system.eta"]


def test_systems_are_a_dimension_and_may_be_written_as_compare_takes_them(file):
    for text in ("systems=split,{name: areal, eta: 2}", "systems=[split,{name: areal, eta: 2}]"):
        assert values(planned(file, text), "system.name", "system.eta") == [
            ("split", None),
            ("areal", 2),
        ]


def test_a_parameter_of_systems_goes_to_those_that_have_it_and_makes_no_points_of_the_others(file):
    found = planned(file, "systems=verl_colocated,areal", "system.eta=1,4")
    assert values(found, "system.name", "system.eta") == [
        ("verl_colocated", None),
        ("areal", 1),
        ("areal", 4),
    ]
    assert (len(found.points), found.combinations) == (3, 4)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("seed=0..3", [0, 1, 2, 3]),
        ("seed=0..2,7", [0, 1, 2, 7]),
        ("training.mfu=0.2, 0.3", [0.2, 0.3]),
        ("training={mfu: 0.2, reward_s: 1},{mfu: 0.3, reward_s: 1}", [0.2, 0.3]),
    ],
)
def test_values_are_ranges_and_yaml_between_commas(file, text, expected):
    key = "seed" if text.startswith("seed") else "training.mfu"
    assert [value for (value,) in values(planned(file, text, "systems=split"), key)] == expected


def test_a_comma_in_brackets_or_quotes_parts_nothing(file):
    faults = "faults=[{kind: slow, worker: 0, factor: 2}, {kind: slow, worker: 1, factor: 2}],[]"
    found = planned(file, faults, "systems=split")
    assert [len(point.scenario.faults) for point in found.points] == [2, 0]


def test_zipped_keys_go_together_and_are_crossed_with_the_rest(file):
    found = planned(
        file,
        "cluster.gpus=4,8",
        "seed=0,1",
        "cluster.tp=1,2",
        "systems=split",
        zips=["cluster.gpus,cluster.tp"],
    )
    assert values(found, "cluster.gpus", "cluster.tp", "seed") == [
        (4, 1, 0),
        (4, 1, 1),
        (8, 2, 0),
        (8, 2, 1),
    ]


def test_systems_can_be_zipped(file):
    found = planned(file, "cluster.gpus=4,8", zips=["systems,cluster.gpus"])
    assert values(found, "system.name", "cluster.gpus") == [("verl_colocated", 4), ("areal", 8)]


def test_samples_are_drawn_from_lists_and_from_all_numbers_in_between(file):
    found = planned(
        file,
        "systems=areal,split",
        "system.rollout_share=0.5..0.75",
        "cluster.gpus=8,16,32",
        sample=300,
    )
    shares = [share for (share,) in values(found, "system.rollout_share")]
    assert 0.5 <= min(shares) < 0.52 and 0.73 < max(shares) <= 0.75
    for key, choices in (("system.name", {"areal", "split"}), ("cluster.gpus", {8, 16, 32})):
        drawn = [value for (value,) in values(found, key)]
        assert set(drawn) == choices
        assert all(
            drawn.count(choice) == pytest.approx(300 / len(choices), rel=0.25) for choice in choices
        )


def test_more_samples_add_points_and_change_none_and_another_seed_changes_them(file):
    def hashes(sample, seed=0):
        found = planned(
            file,
            "seed=0..999",
            "system.rollout_share=0.5..0.9",
            "systems=areal",
            sample=sample,
            seed=seed,
        )
        return [point.hash for point in found.points]

    assert hashes(40)[:20] == hashes(20)
    assert not set(hashes(20, seed=1)) & set(hashes(20))


# What is hashed.


def test_a_points_hash_tells_what_it_depends_on_and_nothing_else(file):
    (one,) = planned(file, "systems=split").points
    (renamed,) = planned(file, "systems=split", "name=other").points
    (reseeded,) = planned(file, "systems=split", "seed=4").points
    assert one.hash == renamed.hash != reseeded.hash


def test_a_points_hash_follows_the_contents_of_a_trace_not_its_place(file):
    def write(path, tokens):
        columns = {name: [0, 0] for name in ("step", "epoch", "prompt_id")}
        columns |= {"sample": [0, 1], "prompt_tokens": [5, 5], "response_tokens": [tokens, 20]}
        metadata = TraceMetadata(
            name="run", kind="recorded", source="a test", tokenizer="none", cap_tokens=100
        )
        write_trace(Trace.from_columns(columns, metadata), path)

    def hash_of(path):
        (point,) = planned(
            file, f"workload={{trace: {path}, synthetic: null}}", "systems=split"
        ).points
        return point.hash

    write("a.parquet", 10)
    Path("other").mkdir()
    write("other/b.parquet", 10)
    first = hash_of("a.parquet")
    assert first == hash_of("other/b.parquet")
    write("a.parquet", 11)
    assert first != hash_of("a.parquet")


# What comes out.


def test_a_row_has_what_a_comparison_has_and_what_was_varied(simrl):
    code, out, err = simrl("sweep", "scenario.yaml", *GRID)
    assert (code, err) == (0, "")
    nothing_open = {"left_open": [], "ranges": {}, "step_s_range": None}
    assert json.loads(out) == {
        "table": "out/table",
        "points": 8,
        "simulated": 8,
        "failed": 0,
        "errors": {},
        "fastest": [{"point": 7, **nothing_open}],
    }
    rows = table(simrl.folder / "out")
    assert rows["point"].tolist() == list(range(8))
    assert list(zip(rows["cluster.gpus"], rows["seed"], rows["system.name"], strict=True)) == [
        (gpus, seed, name)
        for gpus in (4, 8)
        for seed in (0, 1)
        for name in ("verl_colocated", "areal")
    ]
    assert rows["system.eta"].isna().tolist() == [True, False] * 4
    found = [
        summary(simulate(scenario), scenario.warmup_steps)
        for gpus in (4, 8)
        for seed in (0, 1)
        for scenario in load_scenarios("scenario.yaml", [f"cluster.gpus={gpus}", f"seed={seed}"])
    ]
    empty = {
        name for name, value in found[0].items() if value in (None, "")
    }  # a table has NaN there
    for name in found[0].keys() - empty:
        assert rows[name].tolist() == [row[name] for row in found], name
    rate = np.array([row["samples_per_s"] for row in found])
    assert rows["speedup"].tolist() == (rate / rate[0]).tolist()
    assert rows["speedup_in_variant"].tolist() == (rate / np.repeat(rate[::2], 2)).tolist()


def test_at_80_columns_headings_are_whole_columns_are_left_out_by_name_and_switches_are_words(
    simrl, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = simrl(
        "sweep", "scenario.yaml", "engine.prefix_caching=true,false", "seed=0,1", "-o", "out"
    )
    assert (code, err) == (0, "")
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    assert all(
        word in out
        for word in ("system", "prefix_caching", "seed", "samples/s", "Left out for want of room")
    )
    assert {"on", "off"} <= set(out.split()) and not {"True", "False"} & set(out.split())


def test_pandas_polars_and_duckdb_open_the_table_as_it_is(file):
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    swept(planned(file, "seed=0..2"), Path("out"))
    expected = table(Path("out"))
    frame = polars.read_parquet("out/table").sort("point").to_pandas()
    query = "select * from read_parquet('out/table/**/*.parquet', hive_partitioning = true) order by point"
    for found in (frame, duckdb.sql(query).df()):
        assert set(found.columns) == set(expected.columns)
        for name in ("seed", "system.name", "samples_per_s", "hash"):
            assert found[name].tolist() == expected[name].tolist()
    best = duckdb.sql(
        "select \"system.name\" from 'out/table/**/*.parquet' order by samples_per_s desc limit 1"
    ).fetchall()
    assert best[0][0] == expected.loc[expected.samples_per_s.idxmax(), "system.name"]


def test_values_of_several_types_are_text_and_objects_json(file):
    found = planned(
        file, "systems=split", "training={mfu: 0.3},{mfu: 0.5}", "engine.kv_cache_tokens=null,4096"
    )
    swept(found, Path("out"))
    rows = table(Path("out"))
    assert [json.loads(text)["mfu"] for text in rows["training"]] == [0.3, 0.3, 0.5, 0.5]
    assert rows["engine.kv_cache_tokens"].isna().tolist() == [True, False, True, False]


def test_processes_write_the_same_bytes_as_this_one(file):
    """I21: the executor changes no byte."""
    found = planned(file, "cluster.gpus=4,8", "cluster.tp=1,3")
    one = swept(found, Path("one"))
    two = swept(found, Path("two"), Processes(2))
    assert one == two
    assert contents(Path("one")) == contents(Path("two"))


def test_what_points_share_is_read_once(file, monkeypatch):
    from simrl.simulate import cache as module

    made = []
    real = module.synthesise
    monkeypatch.setattr(
        module, "synthesise", lambda model, seed: made.append(seed) or real(model, seed)
    )
    swept(planned(file, "seed=0,1", "cluster.gpus=4,8"), Path("out"))
    assert made == [0, 1]


# Points that fail.


def test_a_point_that_cannot_be_is_a_row_with_its_error_and_the_others_are_simulated(simrl):
    code, out, err = simrl(
        "sweep",
        "scenario.yaml",
        "cluster.gpus=4,5",
        "cluster.tp=2",
        "-o",
        "out",
        "--jobs",
        "1",
        "--json",
    )
    assert (code, err) == (0, "")
    error = "cluster.tp is 2: it does not divide the 5 GPUs; choose a divisor, such as 1"
    assert json.loads(out)["errors"] == {"2": error, "3": error}
    rows = table(simrl.folder / "out")
    assert rows["samples_per_s"].isna().tolist() == [False, False, True, True]
    assert rows["error"].isna().tolist() == [True, True, False, False]
    _, out, _ = simrl(
        "sweep", "scenario.yaml", "cluster.gpus=4,5", "cluster.tp=2", "-o", "out", "--jobs", "1"
    )
    assert f"2 failed; point 2: {error}" in " ".join(out.split())


def test_a_bug_that_one_point_meets_is_told_in_a_line(file, monkeypatch):
    from simrl.study import point as module

    real = module.prepare

    def prepare(scenario, inputs):
        if scenario.seed == 1:
            raise ZeroDivisionError("division by zero")
        return real(scenario, inputs)

    monkeypatch.setattr(module, "prepare", prepare)
    rows = swept(planned(file, "seed=0..2", "systems=split"), Path("out")).rows
    assert [row["error"] for row in rows] == [
        None,
        "a bug: ZeroDivisionError: division by zero (test_sweeps.py, prepare)",
        None,
    ]


def test_where_all_points_fail_the_command_fails(simrl):
    code, _, err = simrl(
        "sweep", "scenario.yaml", "cluster.gpus=5,7", "cluster.tp=2", "-o", "out", "--jobs", "1"
    )
    assert code == 2
    assert (
        err.startswith("simrl: all 4 points failed; the first: cluster.tp is 2")
        and err.count("\n") == 1
    )


@pytest.mark.slow
def test_a_process_that_dies_costs_its_point_a_try_and_the_others_nothing(file):
    found = planned(file, "seed=0..3", "systems=split")
    points = list(found.points)
    points[1] = Deadly(points[1].scenario, points[1].hash, points[1].files, points[1].code)
    outcomes = dict(Processes(2).outcomes(points))
    assert set(outcomes) == {0, 1, 2, 3}
    lost = outcomes.pop(1)
    assert isinstance(lost, LostTask) and "ended 2 times (exit code 7)" in lost.message
    inputs = InputCache()
    assert outcomes == {i: simulate_point(found.points[i], inputs) for i in (0, 2, 3)}


class Deadly(Point):
    """A point that ends the process that it is given to."""

    def __reduce__(self):
        return os._exit, (7,)


def test_what_this_machine_lost_is_in_the_table_and_tried_again(file):
    class Losing(Here):
        def outcomes(self, points):
            for i, outcome in super().outcomes(points):
                yield i, LostTask("its node is gone") if i == 1 else outcome

    found = planned(file, "seed=0..2", "systems=split")
    first = swept(found, Path("out"), Losing())
    assert [row["error"] for row in first.rows] == [None, "its node is gone", None]
    second = swept(found, Path("out"))
    assert (second.simulated, [row["error"] for row in second.rows]) == (1, [None] * 3)


# Sweeps that were stopped.


def test_a_sweep_that_was_stopped_goes_on_and_simulates_nothing_twice(file):
    class Stopped(Here):
        def outcomes(self, points):
            yield from zip(
                range(3), (outcome for _, outcome in super().outcomes(points)), strict=False
            )
            raise KeyboardInterrupt

    found = planned(file, "seed=0..4", "systems=split")
    with pytest.raises(
        Exception, match=r"interrupted; 3 of 5 points are kept in out; the same command goes on"
    ):
        swept(found, Path("out"), Stopped())
    assert not Path("out/table").exists()
    before = {path: data for path, data in contents(Path("out")).items() if path.endswith(".json")}
    assert swept(found, Path("out")).simulated == 2
    after = contents(Path("out"))
    assert all(after[path] == data for path, data in before.items())
    swept(found, Path("whole"))
    assert contents(Path("whole")) == after


@pytest.mark.slow
def test_ctrl_c_ends_with_1_and_keeps_what_was_done(simrl):
    process = in_endless_points(simrl)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S) == (
        "",
        "simrl: interrupted; 2 of 4 points are kept in out; the same command goes on from there\n",
    )
    assert process.returncode == 1
    assert not [path for path in contents(simrl.folder / "out") if "table" in path]
    _, out, _ = simrl(
        "sweep", "scenario.yaml", "steps=300,301", "-o", "out", "--jobs", "1", "--json"
    )
    assert (json.loads(out)["points"], json.loads(out)["simulated"]) == (4, 2)


def in_endless_points(simrl):
    """A sweep whose two processes are busy: the points of 300 steps are done, the others never end."""
    process = simrl.start("sweep", "scenario.yaml", "steps=300,1000000", "-o", "out", "--jobs", "2")
    started = time.monotonic()
    while len(list(simrl.folder.glob("out/points/*/*.json"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < started + PATIENCE_S
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_processes_in_the_middle_of_a_point_end_when_their_parent_is_killed(simrl):
    process = in_endless_points(simrl)
    process.kill()
    process.communicate(timeout=PATIENCE_S)  # returns once no process holds its output


def test_an_outcome_that_is_cut_off_is_simulated_again(file):
    found = planned(file, "seed=0..1", "systems=split")
    swept(found, Path("out"))
    whole = contents(Path("out"))
    cut = next(Path("out/points").glob("*/*.json"))
    cut.write_text(cut.read_text()[:100])
    assert swept(found, Path("out")).simulated == 1
    assert contents(Path("out")) == whole


def test_a_kept_figure_that_somebody_edited_is_noticed_and_simulated_again(file, caplog):
    found = planned(file, "seed=0..1", "systems=split")
    swept(found, Path("out"))
    whole = contents(Path("out"))
    kept = next(Path("out/points").glob("*/*.json"))
    data = json.loads(kept.read_text())
    data["outcome"]["row"]["samples_per_s"] *= 2
    kept.write_text(json.dumps(data))
    assert swept(found, Path("out")).simulated == 1
    assert (
        f"{kept}: is damaged, or was changed after simrl wrote it; the point is simulated again"
        in caplog.text
    )
    assert contents(Path("out")) == whole


def test_a_device_in_place_of_a_kept_point_is_not_read(file):
    found = planned(file, "seed=0..1", "systems=split")
    swept(found, Path("out"))
    kept = next(Path("out/points").glob("*/*.json"))
    kept.unlink()
    kept.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is a device; name a file"):
        swept(found, Path("out"))


def test_a_device_in_place_of_a_part_of_the_table_is_not_read(file):
    """It has no end, and its seal would be looked for at the end."""
    part = Path("out/table/system.name=split/part-0.parquet")
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"part-0.parquet, which simrl did not write"):
        swept(planned(file, "seed=0", "systems=split"), Path("out"))


def test_an_outcome_that_became_another_kind_of_file_does_not_block_its_sweep(file):
    found = planned(file, "seed=0", "systems=split")
    swept(found, Path("out"))
    (kept,) = Path("out/points").glob("*/*.json")
    whole = kept.read_bytes()
    kept.write_bytes(bytes(len(whole)))  # as after a loss of power
    assert swept(found, Path("out")).simulated == 1
    assert kept.read_bytes() == whole


def test_a_table_of_somebody_else_at_the_place_of_a_table_is_not_deleted(file):
    own = Path("out/table/system.name=split/part-0.parquet")
    own.parent.mkdir(parents=True)
    pq.write_table(pa.table({"mine": [1]}), own)
    with pytest.raises(
        InputError, match=r"holds system.name=split/part-0.parquet, which simrl did not write"
    ):
        swept(planned(file, "seed=0", "systems=split"), Path("out"))
    assert pq.read_table(own, partitioning=None).to_pydict() == {"mine": [1]}


def test_points_that_the_machine_lost_end_the_command_with_1_and_a_line(simrl, monkeypatch):
    monkeypatch.setattr("simrl.study.executors.simulate_point", _out_of_memory)
    code, out, said = simrl("sweep", "scenario.yaml", "seed=0,1", "systems=split", "--jobs", "1")
    assert code == 1 and "out of memory" in out
    assert said.startswith(
        "simrl: points that this machine could not simulate: 2; their errors are in the table"
    )


def _out_of_memory(*_):
    raise MemoryError


def test_more_values_are_added_to_what_is_there(file):
    assert swept(planned(file, "seed=0..1", "systems=split"), Path("out")).simulated == 2
    assert swept(planned(file, "seed=0..3", "systems=split"), Path("out")).simulated == 2
    assert table(Path("out"))["seed"].tolist() == [0, 1, 2, 3]


# What is refused.


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["clutser.gpus=4,8"], "unknown key clutser"),
        (
            ["cluster.gpuss=4,8"],
            "unknown key cluster.gpuss (did you mean gpus?); cluster has gpu, gpus, tp",
        ),
        (["cluster.gpus=4,many"], "override 'cluster.gpus=many': cluster.gpus is 'many'"),
        (["cluster.gpus="], "'cluster.gpus=': no value; give one or several"),
        (["cluster.gpus=4,,8"], "'cluster.gpus=4,,8': value 2 of 3 is empty"),
        (["cluster.gpus=4,8,"], "value 3 of 3 is empty"),
        (["cluster.gpus"], "'cluster.gpus': write KEY=VALUE without spaces, such as cluster.gpus="),
        (["seed=1,2", "seed=3"], "seed is given twice"),
        (["seed=5..1"], "5..1 goes down"),
        (["seed=0..10000000"], "more than 1,000,000 values"),
        (
            ["seed=0..999999", "cluster.gpus=4,8"],
            "4,000,000 points are more than 1,000,000; draw some with --sample N",
        ),
        (
            ["training.mfu=0.2..0.4"],
            "there is no end of numbers in between; list them, or draw some with --sample N",
        ),
        (["training.mfu=0.2..0.4,0.5", "--sample", "3"], "let it stand alone"),
        (
            ["systems=areall,split"],
            "system 'areall' is unknown (did you mean areal?); simrl systems lists all",
        ),
        (["systems=[]"], "no systems"),
        (
            ["system.etaa=1,2"],
            "system.etaa: no parameter of these systems (did you mean eta?); verl_colocated has",
        ),
        (["system.eta=1,soon"], "system areal: eta is 'soon'"),
        (["cluster.gpu=h100,h1000"], "gpu 'h1000' is unknown"),
        (
            ["model=qwen3-0.6b,qwen4"],
            "model qwen4: no known name, nor a config.json (did you mean qwen3-4b?)",
        ),
        (["training={mfu: 0.3},{mfu"], "the value is not YAML"),
        (
            ["cluster.gpus=4,8", "--zip", "cluster.gpus"],
            "--zip cluster.gpus: give two keys or more",
        ),
        (
            ["cluster.gpus=4,8", "--zip", "cluster.gpus,seed"],
            "seed is no list to zip, or no longer; there are cluster.gpus",
        ),
        (
            ["cluster.gpus=4,8", "seed=1..3", "--zip", "cluster.gpus,seed"],
            "cluster.gpus has 2, seed has 3; give as many",
        ),
    ],
)
def test_what_no_scenario_can_have_is_refused_before_anything_runs(simrl, arguments, what):
    assert what in simrl.refuses("sweep", "scenario.yaml", *arguments)


def test_a_folder_of_somebody_else_is_not_written_over(simrl):
    (simrl.folder / "out" / "table").mkdir(parents=True)
    (simrl.folder / "out" / "table" / "mine.parquet").write_text("mine")
    code, _, err = simrl("sweep", "scenario.yaml", *GRID)
    assert code == 2 and "out/table: holds mine.parquet, which simrl did not write" in err
    assert (simrl.folder / "out" / "table" / "mine.parquet").read_text() == "mine"


def test_a_folder_that_is_a_device_is_refused_in_one_line(simrl):
    assert "null is no folder" in simrl.refuses(
        "sweep", "scenario.yaml", "seed=0,1", "--output", "/dev/null"
    )


def test_ray_that_is_not_there_is_told(simrl):
    err = simrl.refuses("sweep", "scenario.yaml", "seed=0,1", "--ray", "127.0.0.1:1")
    assert (
        "--ray: Ray is not installed here" in err
        or "--ray 127.0.0.1:1: no cluster answers there" in err
    )
