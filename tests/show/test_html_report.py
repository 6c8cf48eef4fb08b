"""The report's text: it says what the commands print, what comes from data stays text, the same results give the same bytes."""

import base64
import gzip
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simpy

import simrl.show.report.page as html_report
from simrl.analysis.gpu_hours import waterfall
from simrl.errors import InputError
from simrl.result.metrics import summary, window
from simrl.result.off_policyness import ages
from simrl.result.result import read_result
from simrl.result.timeline import spans
from simrl.show.comparison import compare_scenarios
from simrl.show.figures.compare import gpu_seconds_figure, worker_idle_shares
from simrl.show.inputs import inputs
from simrl.show.report.answer import of_sweep
from simrl.show.report.lanes import TICKS, join, timeline
from simrl.show.report.page import find, report_html, write_report
from simrl.show.report.sources import Runs, SweepRows, runs_of
from simrl.show.tables.compare import columns_of, marked
from simrl.simulate.prepare import prepare
from simrl.simulate.run import Schedule, simulate, simulated_workers
from simrl.study.compare import FACTORS
from tests.helpers import scenario
from tests.sweep_double import EVIL, a_sweep, sweep_rows

SYSTEMS = ("verl_colocated", "one_step_off", "areal")


class Texts(HTMLParser):
    """Texts of a page outside of scripts and styles, the cells of its tables, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._in = tag
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag in ("script", "style", "td") else self._in

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)
        elif self._in != "style":
            self.text += data
            if self._in == "td" and self.cells:
                self.cells[-1] += data


def packed(page: str) -> dict:
    """The data of a page."""
    text = re.search(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder of `simrl compare`."""
    folder = tmp_path_factory.mktemp("report") / "compared"
    scenarios = [scenario({"name": name}, name="race", warmup_steps=1) for name in SYSTEMS]
    compare_scenarios(scenarios, folder, jobs=1)
    return folder


def test_the_table_has_every_cell_of_the_comparison_in_its_order(compared):
    found = find(compared)
    rows = marked(json.loads((compared / "comparison.json").read_text()))
    cells = [" ".join(column.cell(row).split()) for row in rows for column in columns_of(rows)]
    page = Texts(report_html(found))
    assert page.cells[: len(cells)] == cells
    for column in columns_of(rows):
        assert column.name in page.text or column.heading in page.text


def test_the_page_begins_with_the_fastest_system_and_how_much_faster_it_is(compared):
    rows = json.loads((compared / "comparison.json").read_text())
    best = max(rows, key=lambda row: row["samples_per_s"])
    begins = Texts(report_html(find(compared))).text[:600]
    assert (
        f"Fastest: {best['system']}," in begins
        and f"{best['speedup_in_variant']:.2f}× as fast" in begins
    )


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(compared, tmp_path):
    for name in ("one.html", "two.html"):
        write_report(compared, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_page_names_nothing_to_be_fetched_and_forbids_it(compared):
    page = report_html(find(compared))
    own = page.replace(
        (Path(html_report.__file__).parent / html_report.PLOTLY).read_text(encoding="utf-8"), ""
    )
    assert len(own) < len(page) / 2
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", own)
    assert "default-src 'none'" in own and "connect-src" not in own
    assert page.count("Copyright 2012-2026, Plotly") == 1


def test_plotly_is_the_file_that_its_makers_published():
    """The cartesian bundle of plotly.js 4.1.1, as npm has it."""
    text = (Path(html_report.__file__).parent / html_report.PLOTLY).read_bytes()
    assert (
        hashlib.sha256(text).hexdigest()
        == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    )


def test_markup_in_names_stays_text(compared, tmp_path):
    results = {
        path.parent.name: read_result(path.parent)
        for path in sorted(compared.glob("*/result.json"))
    }
    evil = {
        name: replace(
            result,
            metadata={**result.metadata, "label": EVIL + name, "variant": EVIL, "paper": EVIL},
        )
        for name, result in results.items()
    }
    page = report_html(runs_of(evil))
    texts = Texts(page)
    assert EVIL in texts.text and len(texts.scripts) == 3
    assert "<script>alert" not in page
    assert "<script" not in packed(page)["figures"]["speed"]


def test_markup_in_errors_of_a_sweep_stays_text(tmp_path):
    rows = sweep_rows(24)
    rows[5] |= {"error": EVIL, "samples_per_s": None}
    page = report_html(find(a_sweep(tmp_path / "sweep", rows)))
    assert "<script>alert" not in page and EVIL in Texts(page).text


def test_a_sweep_shows_every_point_that_was_simulated_and_every_error(tmp_path):
    rows = sweep_rows(24)
    for i in (5, 6):
        rows[i] |= {"error": "too little memory", "samples_per_s": None}
    page = report_html(find(a_sweep(tmp_path / "sweep", rows)))
    columns = packed(page)["columns"]
    assert columns["point"] == [row["point"] for row in rows if row["error"] is None]
    assert columns["samples_per_s"] == pytest.approx(
        [row["samples_per_s"] for row in rows if row["error"] is None], 1e-4
    )
    assert Texts(page).cells.count("too little memory") == 2


def test_settings_of_a_sweep_are_compared_by_their_mean_over_seeds(tmp_path):
    rows = sweep_rows(24)
    for row in rows:
        row["samples_per_s"] = 1.0
    rows[0]["samples_per_s"], rows[12]["samples_per_s"] = 9.0, 1.0  # areal on 16 GPUs: mean 5
    rows[1]["samples_per_s"], rows[13]["samples_per_s"] = 6.0, 6.0  # one_step_off on 16: mean 6
    text = Texts(report_html(find(a_sweep(tmp_path / "sweep", rows)))).text
    assert "The fastest of 12 settings is one_step_off (cluster.gpus=16):" in text
    assert (
        "6 samples/s (mean of 2 seeds, 6 to 6)" in text and "areal (cluster.gpus=16) 0.83×" in text
    )


def test_a_sweep_of_which_all_failed_has_a_page_too(tmp_path):
    rows = sweep_rows(3, error="no", samples_per_s=None, gpu_hours_per_1k_samples=None)
    assert (
        "None of the 3 points could be simulated"
        in Texts(report_html(find(a_sweep(tmp_path / "s", rows)))).text
    )


def test_one_run_a_comparison_and_a_replay_are_told_apart(compared, tmp_path):
    rows, runs = json.loads((compared / "comparison.json").read_text()), find(compared)
    assert isinstance(runs, Runs) and [run.name for run in runs.runs] == [
        row["folder"] for row in rows
    ]
    (only,) = find(compared / runs.runs[0].name).runs
    assert only.row["samples_per_s"] == runs.runs[0].row["samples_per_s"]
    for name in ("predicted", "measured"):
        folder = tmp_path / "replay" / name
        folder.mkdir(parents=True)
        runs.runs[0].result.write(folder)
    replay = find(tmp_path / "replay")
    assert replay.replayed and [run.name for run in replay.runs] == ["predicted", "measured"]
    assert "Predicted against measured" in Texts(report_html(replay)).text
    assert isinstance(find(a_sweep(tmp_path / "sweep", sweep_rows(3))), SweepRows)


def test_rows_of_the_report_are_those_of_the_comparison(compared):
    beside = (
        "samples_per_s_spread",
        "better_split",
        "update_share",
        "run_hours",
        "run_cost",
        "left_open",
        "ranges",
        "step_s_range",
    )  # of further simulations and plans
    for row, run in zip(
        json.loads((compared / "comparison.json").read_text()), find(compared).runs, strict=True
    ):
        of_the_comparison = ("folder", *beside, *FACTORS)
        assert {key: row[key] for key in row if key not in of_the_comparison} == json.loads(
            json.dumps(run.row)
        )


def test_a_folder_without_results_is_told_in_a_line(tmp_path, compared):
    with pytest.raises(InputError, match="does not exist"):
        find(tmp_path / "nowhere")
    (tmp_path / "file.yaml").write_text("a: 1")
    with pytest.raises(InputError, match="is a file"):
        find(tmp_path / "file.yaml")
    with pytest.raises(InputError, match=r"holds no result \(in it: file.yaml\)"):
        find(tmp_path)
    with pytest.raises(InputError, match=r"but folders that do .*compared"):
        find(compared.parent)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "advise.json").write_text("{}")
    with pytest.raises(InputError, match="but a search of `simrl advise`"):
        find(tmp_path / "search")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    with pytest.raises(InputError, match="run its command again"):
        find(tmp_path / "sweep")


def test_a_result_that_does_not_say_of_what_it_is_one_is_told_in_a_line(compared, tmp_path):
    shutil.copytree(compared, tmp_path / "race")
    (tmp_path / "race" / "areal" / "result.json").write_text("{}")
    with pytest.raises(InputError, match=r"areal/result\.json: key label is missing"):
        find(tmp_path / "race")


def test_a_recorded_run_that_was_killed_is_reported_as_far_as_it_was_written(tmp_path):
    """While it runs, a part is written without what is known at its end alone."""
    schedule = Schedule(
        prepare(scenario("areal", warmup_steps=1)), simpy.Environment(), simulated_workers
    )
    schedule.run()
    written = schedule.recorder.result(schedule.env.now, {})
    part = tmp_path / "run" / "parts" / "000"
    part.mkdir(parents=True)
    replace(written, metadata={**schedule.prepared.inputs(), **written.metadata}).write(part)
    assert "faults" not in read_result(part).metadata
    assert "AReaL" in Texts(report_html(find(tmp_path / "run"))).text


def test_no_seed_is_named_as_what_moves_speed(tmp_path):
    rows = sweep_rows(4)
    for i, row in enumerate(rows):
        row |= {"samples_per_s": 1.0 + i, "seed": i}
    a_sweep(tmp_path / "sweep", rows)
    found = find(tmp_path / "sweep")
    assert isinstance(found, SweepRows) and "seed" in found.keys
    (said,) = [a.text for a in of_sweep(found, found.keys) if a.lead.startswith("What moves speed")]
    assert "seed" not in said


def test_a_sweep_that_was_tampered_with_is_told_in_a_line(tmp_path):
    a_sweep(tmp_path / "sweep", sweep_rows(4))
    (tmp_path / "sweep" / "sweep.json").write_text("[]")
    with pytest.raises(InputError, match=r"sweep\.json is no object; run its command again"):
        find(tmp_path / "sweep")
    shutil.rmtree(tmp_path / "sweep" / "table")
    (tmp_path / "sweep" / "table").mkdir()
    pq.write_table(pa.table({"point": [1]}), tmp_path / "sweep" / "table" / "part-0.parquet")
    with pytest.raises(InputError, match="its table has no column hash"):
        find(tmp_path / "sweep")


def test_a_sweep_whose_table_lacks_points_or_has_some_twice_is_refused(tmp_path):
    table = a_sweep(tmp_path / "sweep", sweep_rows(6)) / "table"
    shutil.copytree(next(table.iterdir()), table / "system.name=two")
    with pytest.raises(InputError, match="lacks points, or has some twice; run its command again"):
        find(tmp_path / "sweep")
    shutil.rmtree(table / "system.name=two")
    assert find(tmp_path / "sweep")
    shutil.rmtree(next(table.iterdir()))
    with pytest.raises(InputError, match="lacks points, or has some twice; run its command again"):
        find(tmp_path / "sweep")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("samples_per_s", None),
        ("samples_per_s", 0.0),
        ("off_policyness_mean", -1.0),
        ("occupancy", float("inf")),
    ],
)
def test_an_impossible_value_in_the_table_of_a_sweep_is_named_with_its_point(
    tmp_path, column, value
):
    rows = sweep_rows(4)
    rows[2][column] = value
    found = find(a_sweep(tmp_path / "sweep", rows))
    with pytest.raises(
        InputError,
        match=rf"the table's point 2 has {column}=.*, which cannot be; run the sweep's command",
    ):
        report_html(found)


@pytest.mark.slow
def test_a_report_is_written_beside_its_results_and_never_into_them_or_over_something_else(
    compared, tmp_path, simrl
):
    ended = simrl("report", str(compared), "-o", "page.html")
    assert (
        ended.code == 0
        and "page.html" in ended.out
        and (tmp_path / "page.html").stat().st_size < 6e6
    )
    before = sorted(compared.rglob("*"))
    ended = simrl("report", str(compared), "-o", str(compared / "report.html"))
    assert (
        ended.code == 2
        and "name a place outside it" in ended.err
        and sorted(compared.rglob("*")) == before
    )
    (tmp_path / "data.html").write_text("PAR1")
    ended = simrl("report", str(compared), "-o", "data.html")
    assert ended.code == 2 and (tmp_path / "data.html").read_text() == "PAR1"
    assert simrl("report", str(compared), "-o", "page.pdf").code == 2
    ended = simrl("report", str(compared))
    assert ended.code == 0 and compared.with_name("compared.html").is_file()
    ended = simrl("report", str(compared / "areal"))
    assert ended.code == 0 and compared.with_name("compared-areal.html").is_file()
    assert simrl("report", str(compared / "areal"), "-o", str(compared / "areal.html")).code == 2
    assert sorted(compared.rglob("*")) == before


def test_a_timeline_has_every_second_of_every_lane_also_where_spans_are_joined(small_run):
    result = small_run("areal", eta=2)
    found = spans(result)
    whole = {lane.name: {} for lane in found.lanes}
    for lane, kind, a, b in zip(
        found.lane, found.kind, found.started_s, found.ended_s, strict=True
    ):
        seconds = whole[found.lanes[lane].name]
        seconds[found.kinds[kind]] = seconds.get(found.kinds[kind], 0.0) + b - a
    for most in (10**6, 40):
        data = timeline(result, most)
        assert sum(len(lane["kinds"]) for lane in data["lanes"]) <= max(most, len(found.lanes))
        for lane in data["lanes"]:
            assert sum(lane["ends"]) == TICKS and min(lane["ends"]) >= 0
            assert (
                len(lane["ends"])
                == len(lane["kinds"])
                == len(lane["versions"])
                == len(lane["tokens"])
            )
        tokens = sum(sum(lane["tokens"]) for lane in data["lanes"])
        assert tokens == found.tokens.sum()
    fine = timeline(result, 10**6)
    assert fine["joined"] == 0
    for lane in fine["lanes"]:
        for kind, seconds in whole[lane["name"]].items():
            code = np.base_repr(fine["kinds"].index(kind), 36)
            mine = (
                sum(d for d, k in zip(lane["ends"], lane["kinds"], strict=True) if k == code)
                * fine["unit_s"]
            )
            assert mine == pytest.approx(seconds, abs=len(lane["ends"]) * fine["unit_s"])


def test_a_joined_span_has_the_kind_that_took_most_of_it(small_run):
    found = spans(small_run("verl_colocated"))
    joined, of, _ = join(found, 60)
    assert len(of) <= 60 and of.sum() == len(found.lane) and of.max() > 1
    for i in np.flatnonzero(of > 1):
        inside = (found.lane == joined.lane[i]) & (found.started_s >= joined.started_s[i] - 1e-9)
        inside &= found.ended_s <= joined.ended_s[i] + 1e-9
        seconds = np.bincount(
            found.kind[inside], (found.ended_s - found.started_s)[inside], len(found.kinds)
        )
        assert inside.sum() == of[i] and seconds[joined.kind[i]] == seconds.max()


@pytest.mark.slow
def test_a_page_that_would_get_too_large_joins_more_spans(compared, monkeypatch):
    found = find(compared)
    whole = packed(report_html(found))
    monkeypatch.setattr(html_report, "MOST_SPANS", 80)
    monkeypatch.setattr(html_report, "MOST_BYTES", 0)
    coarse = packed(report_html(found))
    spans_of = [
        sum(len(lane["kinds"]) for run in page["runs"] for lane in run["timeline"]["lanes"])
        for page in (whole, coarse)
    ]
    assert spans_of[1] < spans_of[0] and any(run["timeline"]["joined"] for run in coarse["runs"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_ages_and_idle_shares_agree_with_the_comparison(small_run, system):
    result = small_run(system)
    row = summary(result, 2)
    age, tokens, _ = ages(result, 2)
    assert np.average(age, weights=tokens) == pytest.approx(row["off_policyness_mean"])
    assert age.max() == row["off_policyness_max"]
    shares = worker_idle_shares(result, 2)
    assert len(shares) == result.metadata["rollout_workers"]
    if system != "verl_colocated":  # where training is not counted, workers' times differ
        assert shares.mean() == pytest.approx(row["rollout_bubble"], abs=1e-6)


def test_the_bars_of_a_run_sum_to_its_gpu_seconds(compared):
    runs = find(compared).runs
    falls = [waterfall(run.result, *window(run.result, run.warmup_steps)) for run in runs]
    (axes,) = gpu_seconds_figure([run.row for run in runs], falls).axes
    for i, fall in enumerate(falls):
        bars = sum(stack[i].get_width() for stack in axes.containers)
        assert bars == pytest.approx(fall.total_gpu_s / fall.samples, rel=0.02)


def test_every_input_has_a_kind_and_a_source(compared):
    page = Texts(report_html(find(compared)))
    for said in (
        "rollouts (trace)",
        "step times (profile)",
        "training time",
        "seed",
        "simrl",
        "loading weights",
    ):
        assert said in page.text
    for kind in ("synthetic", "assumed", "default", "given"):
        assert kind in page.text
    assert "warmup_steps: 1" in page.text  # the scenario, in full


def test_switches_among_the_inputs_are_on_or_off(compared):
    (run, *_) = find(compared).runs
    shown = {each.name: each.value for each in inputs(run.result.metadata)}
    assert shown["training.gather_overlap"] == "on" and shown["training.lora"] == "off"
    assert {"True", "False"}.isdisjoint(shown.values())


def test_drafts_have_pictures_where_there_are_any():
    with_drafts = simulate(
        scenario(
            {"name": "verl_ngram"},
            workload={
                "synthetic": {
                    "steps": 3,
                    "prompts_per_step": 4,
                    "group": 2,
                    "cap_tokens": 200,
                    "mean_tokens": 60,
                    "sigma": 0.8,
                }
            },
            warmup_steps=1,
        )
    )
    assert summary(with_drafts, 1)["accept_length"] is not None
    page = report_html(runs_of({"ngram": with_drafts}))
    assert {"Acceptance by sample", "Acceptance by length"} <= packed(page)["runs"][0][
        "figures"
    ].keys()
    assert "acceptance of drafts" in Texts(page).text
