"""The Python API: what the commands do, as functions."""

import doctest
import inspect
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import typer
import yaml

import simrl
from simrl.commands import cli
from simrl.commands.cli import COMMANDS
from simrl.commands.command import options_of
from simrl.trace.importers.tabular import import_frame
from simrl.trace.trace import Trace, TraceMetadata
from tests.command_line import ROOT, SCENARIO, CommandLine, contents, environment
from tests.token_traces import random_groups

GIVEN = {"model": "qwen3-0.6b", "gpu": "h100", "gpus": 4, "steps": 2, "warmup_steps": 1, "jobs": 1}
ONE = {key: value for key, value in GIVEN.items() if key != "jobs"}
SYSTEMS = ["verl_colocated", {"name": "areal", "eta": 2}]


@pytest.fixture
def command_line(tmp_path, capsys, monkeypatch):
    """The command line, in a folder that is the current one, for a pipe: as wide as need be."""
    monkeypatch.delenv("COLUMNS", raising=False)  # processes of parallel tests have it
    return CommandLine(tmp_path, capsys, monkeypatch)


@pytest.fixture
def frame():
    """Two steps of four prompts in groups of two."""
    rows = [
        {
            "step": step,
            "prompt_id": prompt,
            "prompt_tokens": 20,
            "response_tokens": 30 + 17 * prompt + 5 * number + step,
        }
        for step in range(2)
        for prompt in range(4)
        for number in range(2)
    ]
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The scenario of the command line's tests, with its price and what it varies."""
    data = yaml.safe_load(SCENARIO)
    return simrl.compare({**data, "vary": [{"cluster.gpus": 4}, {"cluster.gpus": 8}]})


def lines_of(html):
    """What a reader sees of a page, and the tags in it."""
    texts, tags = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)

        def handle_data(self, data):
            texts.append(data)

    Reader().feed(html)
    return texts, set(tags)


def test_compare_gives_the_rows_of_json(command_line):
    code, out, _ = command_line("compare", "scenario.yaml", "cluster.gpus=8", "--json")
    compared = simrl.compare("scenario.yaml", gpus=8)
    assert code == 0
    assert list(compared.rows) == json.loads(out)
    assert list(compared.table.columns) == list(json.loads(out)[0])


@pytest.mark.slow
def test_a_saved_comparison_is_the_folder_that_the_command_writes(command_line):
    command_line("compare", "scenario.yaml", "seed=5", "-o", "theirs", "--jobs", "1")
    compared = simrl.compare("scenario.yaml", overrides=["seed=5"])
    assert compared.save("ours") == Path("ours")
    assert contents(Path("ours")) == contents(Path("theirs"))
    assert str(simrl.explain("ours/verl-colocated")) == str(compared.explain("verl_colocated"))


def test_run_gives_the_row_of_json(command_line):
    _, out, _ = command_line("run", "scenario.yaml", "--system", "areal", "eta=3", "--json")
    assert list(simrl.run("scenario.yaml", {"name": "areal", "eta": 3}).rows) == json.loads(out)


@pytest.mark.slow
def test_sweep_gives_the_table_of_the_command_and_keeps_the_points(command_line):
    command_line(
        "sweep", "scenario.yaml", "seed=1,2", "cluster.gpus=4,8", "-o", "theirs", "--jobs", "1"
    )
    swept = simrl.sweep("scenario.yaml", {"seed": [1, 2], "cluster.gpus": "4,8"})
    swept.save("ours")
    assert contents(Path("ours")) == contents(Path("theirs"))
    assert len(swept.rows) == len(swept.table) == 8
    again = simrl.sweep("scenario.yaml", {"seed": [1, 2, 3], "cluster.gpus": [4, 8]}, folder="ours")
    assert (again.swept.simulated, len(again.rows)) == (4, 12)


@pytest.mark.slow
def test_explain_and_diff_say_what_the_commands_print(command_line):
    command_line("compare", "scenario.yaml", "-o", "out")
    one, other = "out/verl-colocated", "out/areal-eta-2"
    assert str(simrl.explain(one)) == command_line("explain", one).out.rstrip()
    assert str(simrl.diff(one, other)) == command_line("diff", one, other).out.rstrip()


def test_agree_finds_no_error_between_a_scenario_and_its_own_run(command_line):
    simrl.run("scenario.yaml", "verl_colocated").save("run")
    agreement = simrl.agree("run", "run")
    assert agreement.data.samples == 16
    assert not agreement.data.differences
    assert set(agreement.table["error"].dropna()) == {0.0}


@pytest.mark.slow
def test_a_trace_and_keywords_make_the_scenario_that_a_file_would(command_line, frame):
    compared = simrl.compare(frame, SYSTEMS, **GIVEN)
    simrl.write_trace(import_frame(frame), "frame.parquet")
    file = {
        "name": "DataFrame",
        "steps": 2,
        "warmup_steps": 1,
        "model": "qwen3-0.6b",
        "cluster": {"gpu": "h100", "gpus": 4, "tp": 1},
        "workload": {"trace": "frame.parquet"},
        "profile": {"roofline": {}},
        "systems": SYSTEMS,
    }
    Path("file.yaml").write_text(yaml.safe_dump(file))
    _, out, _ = command_line("compare", "file.yaml", "--json")
    assert list(compared.rows) == json.loads(out)
    assert list(simrl.compare("frame.parquet", SYSTEMS, **GIVEN).rows) == json.loads(out)
    assert list(
        simrl.compare(simrl.read_trace("frame.parquet"), SYSTEMS, **GIVEN).rows
    ) == json.loads(out)


def test_a_trace_brings_its_own_number_of_steps_and_a_quarter_of_them_is_warm_up(frame):
    twice = pd.concat([frame, frame.assign(step=frame.step + 2)])
    (scenario,) = simrl.compare(
        twice, ["verl_colocated"], model="qwen3-0.6b", gpu="h100", gpus=4
    ).scenarios
    assert (scenario.steps, scenario.warmup_steps) == (4, 1)


def test_a_shipped_profile_is_taken_where_one_belongs_to_model_gpu_and_tp(frame):
    of = {"gpus": 16, "steps": 2, "warmup_steps": 1}
    shipped = simrl.compare(frame, ["verl_colocated"], model="qwen3-8b", gpu="h100", tp=2, **of)
    assert shipped.result().metadata["profile"]["kind"] == "derived"
    assert shipped.result().metadata["profile"]["tp"] == 2
    assert "step times derived" in str(shipped)
    other = simrl.compare(
        frame, ["verl_colocated"], model="qwen3-8b", gpu="h100", profile="roofline", **of
    )
    assert other.result().metadata["profile"]["kind"] == "assumed"


def test_a_sweep_takes_a_frame_and_varies_tp_with_its_profile(frame):
    swept = simrl.sweep(
        frame,
        {"cluster.tp": [1, 2]},
        ["verl_colocated"],
        **{**GIVEN, "model": "qwen3-8b", "gpus": 16},
    )
    assert swept.table["profile_kind"].tolist() == ["derived", "derived"]
    assert swept.table["samples_per_s"].nunique() == 2


def test_overrides_are_dotted_keys_or_texts():
    data = yaml.safe_load(SCENARIO)
    by_key = simrl.compare(data, ["verl_colocated"], overrides={"training.mfu": 0.2, "seed": 9})
    by_text = simrl.compare(data, ["verl_colocated"], overrides=["training.mfu=0.2", "seed=9"])
    assert by_key.rows == by_text.rows
    assert by_key.scenarios[0].training.mfu == 0.2


def test_the_three_choices_make_systems():
    found = simrl.compare(
        yaml.safe_load(SCENARIO),
        pipelines=["areal"],
        dispatches=["seer"],
        speculations=["none", {"name": "ngram"}],
    )
    assert [row["speculation"] for row in found.rows] == ["none", "ngram"]


def test_the_runs_of_a_comparison_are_found_by_the_names_in_its_table(compared):
    assert list(compared.results) == [
        "verl_colocated (cluster.gpus=4)",
        "areal(eta=2) (cluster.gpus=4)",
        "verl_colocated (cluster.gpus=8)",
        "areal(eta=2) (cluster.gpus=8)",
    ]
    assert compared.result("areal(eta=2) (cluster.gpus=8)").metadata["gpus"] == 8
    with pytest.raises(
        simrl.InputError,
        match=r"'areal' \(did you mean areal.*\): name one of the runs, 'verl_colocated",
    ):
        compared.timeline("areal")
    with pytest.raises(simrl.InputError, match="no name: name one"):
        compared.explain()


@pytest.mark.slow
def test_every_view_is_a_page_a_text_and_a_picture(compared):
    name, other = list(compared.results)[:2]
    swept = simrl.sweep(
        yaml.safe_load(SCENARIO), {"seed": [1, 2], "cluster.gpus": [4, 8]}, ["verl_colocated"]
    )
    agreement = simrl.agree(compared.result(name), compared.result(name))
    for view in (compared, compared.explain(name), compared.diff(name, other), swept, agreement):
        _, tags = lines_of(view._repr_html_())
        assert "table" in tags and "script" not in tags
        assert str(view).count("\n") > 3
        assert repr(view).startswith("<") and len(repr(view)) < 200
        assert view.figure()._repr_png_().startswith(b"\x89PNG")
        assert len(view.table) > 1
    assert compared.timeline(name, steps=1)._repr_png_().startswith(b"\x89PNG")


def test_a_page_has_the_numbers_of_the_screen_and_its_names_escaped():
    data = yaml.safe_load(SCENARIO)
    trace = Trace.from_columns(
        {
            "step": [0, 1],
            "epoch": [0, 0],
            "prompt_id": [0, 1],
            "sample": [0, 0],
            "prompt_tokens": [9, 9],
        }
        | {"response_tokens": [50, 60]},
        TraceMetadata(name="<b>&", kind="<script>", source="", tokenizer="", cap_tokens=60),
    )
    found = simrl.compare(trace, ["verl_colocated"], **GIVEN)
    html = found._repr_html_()
    assert "<script>" not in html and "<b>&" not in html
    texts, _ = lines_of(html)
    assert any("<b>&, <script>" in text for text in texts)
    (row,) = [line for line in str(found).splitlines() if line.startswith("verl_colocated ")]
    assert len(row.split()) > 8 and set(row.split()) <= set(" ".join(texts).split())
    assert simrl.compare(data, ["verl_colocated"]).scenarios[0].name in str(
        simrl.compare(data, ["verl_colocated"])
    )


def test_pictures_are_the_same_twice(compared):
    assert compared.figure()._repr_png_() == compared.figure()._repr_png_()


def test_views_cannot_be_changed(compared):
    with pytest.raises(AttributeError):
        compared.rows = ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda trace: simrl.compare(trace, SYSTEMS, gpu="h100", gpus=4),
            "simrl.compare: no model; a trace needs one: add model='qwen3-8b', or",
        ),
        (
            lambda trace: simrl.run(trace, "areal", model="qwen3-8b", gpu="h100"),
            "simrl.run: no gpus; a trace needs one: add gpus=64, or",
        ),
        (
            lambda trace: simrl.compare(trace, **GIVEN),
            r"simrl.compare: no systems; a trace needs one: add systems=\['verl_colocated', 'areal'\], or",
        ),
        (
            lambda trace: simrl.compare(trace, "areal", **GIVEN),
            r"systems is 'areal'; give a list, such as \['areal'\]",
        ),
        (
            lambda trace: simrl.compare(trace, ["aral"], **GIVEN),
            "'aral' is unknown .did you mean areal",
        ),
        (
            lambda trace: simrl.compare(trace, ["areal(eta=4)"], **GIVEN),
            r"system 'areal\(eta=4\)': write parameters as \{'name': 'areal', 'eta': 4\}, or as system.eta=4",
        ),
        (
            lambda trace: simrl.advise(trace, **GIVEN, max_off_policyness=float("nan")),
            "max_off_policyness=nan: give a finite number",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **{**GIVEN, "gpus": -4}),
            "argument gpus=-4: cluster.gpus is -4: ",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **{**GIVEN, "gpu": "h1000"}),
            "gpu 'h1000' is unknown: simrl has no data sheet of it",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **GIVEN, overrides={"trainig.mfu": 1}),
            "unknown key trainig",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **GIVEN, overrides="seed=1"),
            r"give a list, such as \['seed=1'\]",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **{**GIVEN, "jobs": 0}),
            "jobs=0: give 1 or more",
        ),
        (
            lambda trace: simrl.compare(trace, SYSTEMS, **GIVEN, cap_tokens=5),
            "DataFrame, row 0: .* over the cap of 5",
        ),
        (
            lambda trace: simrl.compare(trace.drop(columns="response_tokens"), SYSTEMS, **GIVEN),
            "no column for response_tokens",
        ),
        (lambda trace: simrl.compare("nowhere.yaml"), "nowhere.yaml: no such file"),
        (lambda trace: simrl.compare("nowhere.parquet", SYSTEMS, **GIVEN), "nowhere.parquet: "),
        (
            lambda trace: simrl.compare({"name": "x", "stebs": 1}),
            "simrl.compare: unknown key stebs",
        ),
        (
            lambda trace: simrl.run(yaml.safe_load(SCENARIO)),
            "simrl.run: 2 runs .*; choose one with system=",
        ),
        (
            lambda trace: simrl.sweep(yaml.safe_load(SCENARIO), {"seed": []}),
            "seed: no value; give one or several",
        ),
        (
            lambda trace: simrl.sweep(trace, {"seed": [1]}, ["areal"], **{**GIVEN, "gpus": 1}),
            "all 1 points failed; the first: ",
        ),
        (
            lambda trace: simrl.advise(trace, gpu="h100", gpus=4),
            "simrl.advise: no model; a trace needs one",
        ),
        (
            lambda trace: simrl.advise(trace, **GIVEN, trials=2),
            "trials=2: fewer than the 5 systems to report",
        ),
        (
            lambda trace: simrl.advise(trace, **GIVEN, clusters=[8, 0]),
            r"^clusters=\[8, 0\]: give numbers of GPUs, such as clusters=\[32, 64, 128\]$",
        ),
        (
            lambda trace: simrl.advise(trace, **GIVEN, clusters="8,many"),
            r"^clusters='8,many': give numbers .*, such as clusters=\[32, 64, 128\]$",
        ),
        (lambda trace: simrl.advise(trace, **GIVEN, max_cost=-1), "max_cost=-1: give 0 or more"),
        (lambda trace: simrl.advise(trace, **{**GIVEN, "jobs": 0}), "jobs=0: give 1 or more"),
        (
            lambda trace: simrl.advise(trace, **GIVEN, updates=9, deadline="36"),
            "deadline=36: give a number and its unit",
        ),
        (
            lambda trace: simrl.advise(trace, **GIVEN, budget=9),
            "^budget: cluster.cost_per_gpu_hour is 0; give the price",
        ),
        (
            lambda trace: simrl.sweep(trace, {"training.mfu": "0.2..0.4"}, ["areal"], **GIVEN),
            "list them, or draw some with sample=N$",
        ),
        (
            lambda trace: simrl.advise(trace, {"system.etaa": [1, 2]}, **GIVEN),
            "system.etaa: no parameter of these systems",
        ),
        (
            lambda trace: simrl.advise(
                trace, {"system.rollout_share": 0.5}, ["areal"], **{**GIVEN, "gpus": 1}
            ),
            "none of the [0-9]+ points that were tried can be: ",
        ),
        (
            lambda trace: simrl.report("nowhere", "page.html"),
            "nowhere: does not exist; name a folder of results",
        ),
        (
            lambda trace: simrl.report(simrl.run(trace, "areal", **ONE), "page.txt"),
            "page.txt: .* name it .html",
        ),
        (
            lambda trace: simrl.report(trace, "page.html"),
            "simrl.report: .* has no page; give what compare",
        ),
        (lambda trace: simrl.explain("nowhere"), "nowhere: not a result folder"),
        (
            lambda trace: simrl.explain("no--where--output 5"),
            "^no--where--output 5: not a result folder",
        ),
        (
            lambda trace: simrl.acceptance(lengths_of(trace), drafter="eagle"),
            "drafter='eagle': choose one of history-paper",
        ),
        (lambda trace: simrl.acceptance(lengths_of(trace), window=0), "window=0: choose aimd"),
        (
            lambda trace: simrl.acceptance(lengths_of(trace), model="qwen3-8b"),
            "^model without gpu: step times need both",
        ),
        (lambda trace: simrl.acceptance(lengths_of(trace)), "token ids|response_ids"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(frame, call, message):
    with pytest.raises(simrl.InputError, match=message) as error:
        call(frame)
    assert "\n" not in str(error.value)


def test_no_folder_is_no_folder(frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simrl.run(frame, "areal", **ONE, folder=False).notes == ()
    assert not list(tmp_path.iterdir())


def test_a_parameter_among_the_overrides_goes_to_the_systems_that_have_it(frame):
    compared = simrl.compare(frame, SYSTEMS, **GIVEN, overrides={"system.eta": 3})
    assert list(compared.results) == ["verl_colocated", "areal(eta=3)"]
    swept = simrl.sweep(frame, {"seed": [1, 2]}, ["areal"], **GIVEN, overrides=["system.eta=3"])
    assert swept.table["off_policyness_max"].max() <= 3 and swept.plan.points[
        0
    ].scenario.system.parameters == {"eta": 3}


def test_a_notebook_shows_an_error_as_its_line():
    assert simrl.InputError("gpus=0: give some")._render_traceback_() == [
        "InputError: gpus=0: give some"
    ]


def lengths_of(frame):
    return import_frame(frame)


def test_acceptance_says_what_the_command_says(command_line):
    trace = random_groups(seed=0, epochs=2)
    simrl.write_trace(trace, "tokens.parquet")
    _, out, _ = command_line(
        "acceptance", "tokens.parquet", "--model", "qwen3-0.6b", "--gpu", "h100", "--json"
    )
    theirs = json.loads(out)
    theirs.pop("picture")
    found = simrl.acceptance("tokens.parquet", model="qwen3-0.6b", gpu="h100")
    assert json.loads(json.dumps(found.data)) == theirs
    assert found.table["epoch"].tolist() == [row["epoch"] for row in theirs["by_epoch"]]
    assert found.batches["batch"].tolist() == [row["batch"] for row in theirs["pays"]["by_batch"]]
    assert "runs" in found.speculation
    assert found.figure()._repr_png_().startswith(b"\x89PNG")
    assert "&lt;" not in found._repr_html_()
    with pytest.raises(simrl.InputError, match="no step times"):
        simrl.acceptance(trace).batches  # noqa: B018


SEARCHED = {"system.eta": [1, 2], "system.rollout_share": 0.5, "system.speculation": "none"}


@pytest.fixture(scope="module")
def advised():
    """The advice of a search of three points, one of them over the limit."""
    data = yaml.safe_load(SCENARIO)
    return simrl.advise(
        data,
        SEARCHED,
        ["verl_colocated", "areal"],
        gpus=4,
        tp=1,
        robust=False,
        best=2,
        details=True,
    )


@pytest.mark.slow
def test_advise_says_what_the_command_says_and_keeps_its_points(command_line):
    values = ("systems=verl_colocated,areal", "cluster.gpus=4", "cluster.tp=1", "system.eta=1,2")
    values += ("system.rollout_share=0.5", "system.speculation=none")
    out = command_line(
        "advise", "scenario.yaml", *values, "--trials", "9", "--jobs", "1", "-o", "theirs"
    ).out
    found = simrl.advise(
        "scenario.yaml",
        SEARCHED,
        ["verl_colocated", "areal"],
        gpus=4,
        tp=1,
        trials=9,
        folder="ours",
    )
    *said, last = out.splitlines()
    assert str(found).split() == " ".join(said).split() and last == "Written to theirs/advise.json"
    assert contents(Path("ours")) == contents(Path("theirs"))
    assert json.loads(Path("ours/advise.json").read_text()) == json.loads(
        json.dumps(found.data.as_json())
    )


def test_clusters_are_a_list_of_numbers_or_the_text_of_the_command():
    def planned(clusters):
        alone = {"system.speculation": "none", "system.dispatch": "seer"}
        return simrl.advise(
            yaml.safe_load(SCENARIO),
            alone,
            ["verl_colocated"],
            clusters=clusters,
            tp=1,
            polish=0,
            robust=False,
            jobs=1,
        ).table

    table = planned([4, 2])
    assert list(table["gpus"]) == [4, 2] and table.equals(planned("4,2"))


def test_advise_chooses_the_fastest_that_keeps_the_limits(advised):
    assert advised.best["samples_per_s"].is_monotonic_decreasing
    assert advised.best["rank"].iloc[0] == 1 and len(advised.best) == 2 and len(advised.table) == 1
    fresh = simrl.advise(
        yaml.safe_load(SCENARIO),
        SEARCHED,
        ["verl_colocated", "areal"],
        gpus=4,
        max_off_policyness=0,
        robust=False,
        best=1,
    )
    (plan,) = fresh.data.plans
    assert plan.option.system == "verl_colocated"
    assert fresh.best["off_policyness_max"].tolist() == [0]


def test_advise_shows_itself_and_draws_its_front(advised):
    texts, tags = lines_of(advised._repr_html_())
    assert "table" in tags and "script" not in tags
    assert any(text.startswith("Run ") for text in texts)
    assert "The best few" in str(advised)
    assert repr(advised).startswith("<Advice of tiny: ")
    (plan,) = advised.data.plans
    allowed = plan.answer.searched.allowed
    assert set(advised.front["hash"]) <= {option.point.hash for option in allowed}
    axes = advised.figure().axes[0]
    drawn = sorted(
        tuple(point) for dots in axes.collections for point in dots.get_offsets().tolist()
    )
    options = [
        (option.staleness, option.row["samples_per_s"]) for option in [*allowed, plan.option]
    ]
    assert drawn == sorted(options)
    assert advised.figure()._repr_png_() == advised.figure()._repr_png_()


def test_advise_takes_a_frame_and_searches_a_system_of_each_family(frame):
    found = simrl.advise(
        frame,
        {"system.rollout_share": 0.5},
        **GIVEN,
        tp=1,
        trials=8,
        best=3,
        robust=False,
        polish=0,
    )
    words = found.data.plans[0].answer.space.words
    searched = next(text for text in words if text.startswith("systems="))
    assert searched.startswith("systems=verl_colocated,april,one_step_off")
    assert "cluster.tp=1" in words and found.data.plans[0].answer.searched.points <= 8


@pytest.mark.slow
def test_a_report_is_the_page_that_the_command_writes(command_line):
    command_line("compare", "scenario.yaml", "-o", "runs", "--jobs", "1")
    command_line("report", "runs", "-o", "theirs.html")
    compared = simrl.compare("scenario.yaml")
    assert simrl.report(compared, "ours.html") == compared.report("again.html").with_name(
        "ours.html"
    )
    assert simrl.report("runs", "folder.html").read_bytes() == Path("theirs.html").read_bytes()
    assert (
        Path("ours.html").read_bytes()
        == Path("again.html").read_bytes()
        == Path("theirs.html").read_bytes()
    )


@pytest.mark.slow
def test_sweeps_single_runs_and_agreements_have_a_page_too(command_line):
    command_line("sweep", "scenario.yaml", "seed=1,2", "-o", "points", "--jobs", "1")
    command_line("report", "points", "-o", "theirs.html")
    swept = simrl.sweep("scenario.yaml", {"seed": [1, 2]})
    assert simrl.report(swept, "ours.html").read_bytes() == Path("theirs.html").read_bytes()
    result = simrl.run("scenario.yaml", "areal").result()
    assert "<strong>areal:</strong>" in simrl.report(result, "run.html").read_text()
    page = simrl.report(simrl.agree(result, result), "agreement.html").read_text()
    assert "areal, predicted" in page and "areal, measured" in page


def test_importing_simrl_loads_nothing_and_its_names_are_there():
    code = (
        "import sys, simrl\n"
        "assert not {'numba', 'pandas', 'numpy', 'pyarrow', 'pydantic', 'simrl.commands.compare'} & set(sys.modules)\n"
        "assert set(simrl.__all__) <= set(dir(simrl))\n"
        "try:\n    simrl.nothing\nexcept AttributeError as error:\n    print(error)\n"
        "from simrl import compare\n"
        "assert compare is simrl.compare and 'simrl.commands.compare' in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "module 'simrl' has no attribute 'nothing'\n"), (
        ended.stderr
    )


def test_every_name_of_the_api_is_there():
    assert all(getattr(simrl, name) is not None for name in simrl.__all__)


@pytest.mark.slow
def test_a_script_without_a_main_guard_simulates_in_several_processes(tmp_path):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "script.py").write_text(
        "import simrl\n"
        "print('once')\n"
        "found = simrl.compare('scenario.yaml', jobs=2)\n"
        "assert found.rows == simrl.compare('scenario.yaml').rows\n"
        "assert simrl.sweep('scenario.yaml', {'seed': [1, 2]}, jobs=2).table['error'].isna().all()\n"
    )
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "once\n", "")


@pytest.mark.slow
def test_the_examples_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    functions = {name for name in simrl.__all__ if inspect.isfunction(getattr(simrl, name))}
    with_examples = {name for name in functions if ">>> " in (getattr(simrl, name).__doc__ or "")}
    assert functions - with_examples == {
        "calibrate",
        "init",
        "whatif",
        "read_result",
        "read_trace",
        "write_trace",
    }
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in with_examples:
        for test in finder.find(getattr(simrl, name), name):
            runner.run(test)
    assert runner.tries > 10 and not runner.failures
    assert os.getcwd() == str(ROOT)  # noqa: PTH109


def test_every_command_of_the_cli_has_the_parameters_and_defaults_of_its_function():
    walked = set()
    for path, (function, *_) in COMMANDS.items():
        click_command = typer.main.get_command(cli.make_app())
        for part in path.split():
            click_command = click_command.commands[part]
        parameters = inspect.signature(function).parameters
        options = {
            option.name: option
            for option in click_command.params
            if option.name not in ("help", "as_json")
        }
        assert set(options) == {option.name for option in options_of(function)} <= set(parameters)
        for name, option in options.items():
            default = parameters[name].default
            assert option.required == (default is inspect.Parameter.empty), (path, name)
            assert option.required or option.default == default, (path, name)
        if path in simrl.__all__:
            assert function is getattr(simrl, path)
            walked.add(path)
    assert walked == {
        name for name in simrl.__all__ if inspect.isfunction(getattr(simrl, name))
    } - {
        "agree",
        "read_result",
        "read_trace",
        "write_trace",
    }


def test_the_old_name_of_a_search_tells_the_new_one():
    with pytest.raises(AttributeError, match=r"no attribute 'optimize'; it is simrl\.advise now"):
        simrl.optimize  # noqa: B018
    assert not hasattr(simrl, "optimize")


def test_only_python_has_these_parameters():
    only = {
        (path, name)
        for path, (function, *_) in COMMANDS.items()
        for name in set(inspect.signature(function).parameters)
        - {option.name for option in options_of(function)}
    }
    given_by_values = {("sweep", "overrides"), ("advise", "overrides")}
    assert (
        only
        == {(path, "cap_tokens") for path in ("compare", "run", "sweep", "advise")}
        | given_by_values
    )


def test_updates_that_are_no_whole_number_are_refused_before_anything_runs():
    with pytest.raises(simrl.InputError, match="updates='many': a whole number"):
        simrl.compare("experiments/quickstart.yaml", updates="many")
