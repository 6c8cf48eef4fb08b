"""Comparison: written whole or not at all, and the same from any number of processes."""

import errno
import io
import json
import os
import re
import resource
import signal
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from threading import Thread

import pyarrow.parquet as pq
import pytest

from simrl.errors import InputError
from simrl.scenario.load import load_scenarios
from simrl.show.comparison import compare_scenarios
from simrl.simulate.run import compile_engine, compile_training
from simrl.study import progress
from simrl.study.compare import folder_name
from tests.command_line import SCENARIO, contents

DOCUMENTED = {
    "system",
    "variant",
    "gpus",
    "samples_per_s",
    "tokens_per_s",
    "step_s",
    "rollout_bubble",
    "occupancy",
    "train_idle",
    "off_policyness_mean",
    "off_policyness_max",
    "gpu_hours_per_1k_samples",
    "cost_per_1k_samples",
    "speedup",
    "speedup_in_variant",
    "folder",
    "samples_per_s_assumed_half",
    "samples_per_s_assumed_double",
}
VARY = "vary=[{cluster.gpus: 4}, {cluster.gpus: 8}]"
OLD_RESULTS = {"files.txt": "files.txt\ncomparison.json\n", "comparison.json": "[]\n"}
PATIENCE_S = 60  # for what takes a moment, on a machine that is busy
SLOW = ("steps=1000000", VARY, "-o", "out")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two systems on 4 and on 8 GPUs: scenarios, rows and folder."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "scenario.yaml").write_text(SCENARIO)
    scenarios = load_scenarios(folder / "scenario.yaml", [VARY, "cluster.cost_per_gpu_hour=2.5"])
    return scenarios, compare_scenarios(scenarios, folder / "out", 1).rows, folder / "out"


def old_results(folder):
    """What an earlier comparison left."""
    folder.mkdir(parents=True)
    for name, text in OLD_RESULTS.items():
        (folder / name).write_text(text)


def processes(group):
    """The processes of a group that run (a zombie does not), from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


# What is written.


def test_a_comparison_has_a_row_and_a_folder_for_each_scenario_in_order(compared):
    scenarios, rows, folder = compared
    assert [(row["variant"], row["system"]) for row in rows] == [
        (gpus, system)
        for gpus in ("cluster.gpus=4", "cluster.gpus=8")
        for system in ("verl_colocated", "areal(eta=2)")
    ]
    for scenario, row in zip(scenarios, rows, strict=True):
        assert row.keys() >= DOCUMENTED
        assert row["folder"] == folder_name(scenario)
        assert {p.name for p in (folder / row["folder"]).iterdir()} == {
            *(f"{table}.parquet" for table in ("spans", "steps", "samples", "segments")),
            "result.json",
            "timeline.png",
            "perfetto.json",
        }
    assert json.loads((folder / "comparison.json").read_text()) == rows
    assert json.loads((folder / "scenario.json").read_text()) == [
        s.model_dump(mode="json") for s in scenarios
    ]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_speed_ups_are_over_the_first_row_and_the_first_of_the_variant(compared):
    _, rows, _ = compared
    rate = [row["samples_per_s"] for row in rows]
    assert [row["speedup"] for row in rows] == [r / rate[0] for r in rate]
    assert [row["speedup_in_variant"] for row in rows] == [
        1,
        rate[1] / rate[0],
        1,
        rate[3] / rate[2],
    ]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(compared, tmp_path):
    scenarios, rows, folder = compared
    assert compare_scenarios(scenarios[:2], tmp_path / "out", 2).rows == rows[:2]
    for row in rows[:2]:
        assert contents(tmp_path / "out" / row["folder"]) == contents(folder / row["folder"])


def test_json_is_all_that_stdout_gets_and_a_progress_bar_needs_a_terminal(simrl):
    code, out, err = simrl("compare", "scenario.yaml", "-o", "out", "--json", "--jobs", "1")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["system"] for row in rows] == ["verl_colocated", "areal(eta=2)"]
    assert all(row.keys() >= DOCUMENTED for row in rows)
    assert rows == json.loads((simrl.folder / "out" / "comparison.json").read_text())


@pytest.mark.parametrize(
    ("jobs", "lines"), [("1", "updates: 1 of "), ("2", "runs simulated: 2 of 2\n")]
)
def test_without_a_terminal_progress_is_a_line_a_minute(simrl, monkeypatch, jobs, lines):
    assert progress.LINE_S == 60
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    code, _, err = simrl("compare", "scenario.yaml", "-o", "out", "--json", "--jobs", jobs)
    assert code == 0 and lines in err


AREAL = (
    "systems=areal",
    "system.rollout_share=0.25,0.5",
    "system.eta=2",
    "cluster.tp=1",
    "system.speculation=none",
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(("advise", *AREAL, "--polish", "0"), "points simulated: 1 of 40\n"),
     (("compare", "--best-split"), "updates: 1 of "),
     (("sweep", "seed=1,2"), "points simulated: 1 of ")],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)  # fmt: skip
def test_every_long_command_says_without_a_terminal_how_far_it_is(
    simrl, monkeypatch, arguments, line
):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    name, *words = arguments
    code, _, err = simrl(name, "scenario.yaml", *words, "-o", "out", "--json", "--jobs", "1")
    assert code == 0 and line in err, err


def test_a_terminal_sees_progress_on_stderr_and_nothing_of_it_is_left(simrl, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = simrl(
        "compare", "scenario.yaml", "steps=40", "-o", "out", "--jobs", "1", "--json"
    )
    assert (code, len(json.loads(out))) == (0, 2)
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[2K") > shown.rindex("updates")  # the line is erased
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"1/2 verl-colocated: updates .* 40/40", plain)
    assert re.search(r"2/2 areal-eta-2: updates .* 40/40", plain)


def test_every_run_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)

    def names(*overrides):
        return [folder_name(s) for s in load_scenarios(tmp_path / "scenario.yaml", overrides)]

    assert names(VARY) == [
        "cluster.gpus-4-verl-colocated",
        "cluster.gpus-4-areal-eta-2",
        "cluster.gpus-8-verl-colocated",
        "cluster.gpus-8-areal-eta-2",
    ]
    assert names("vary=[{model: ../a/config.json}]", "systems=[split]") == [
        "model-..-a-config.json-split"
    ]
    first, second = names(
        f"vary=[{{model: {'m' * 300}a}}, {{model: {'m' * 300}b}}]", "systems=[split]"
    )
    assert first != second
    assert max(len(first), len(second)) < 120


# What is refused.


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["systems=[nope]"], r"\(nope\): system 'nope' is unknown \(closest are "),
        (
            ["systems=[{name: areal, etta: 3}]"],
            r"\(areal\): system areal: unknown parameter 'etta'.*; it has eta",
        ),
        (
            ["systems=[{name: areal, eta: -1}]"],
            r"\(areal\): system areal: eta is -1: give 0 or more",
        ),
        (["systems=[{name: areal, eta: .nan}]"], "system: eta is nan: give a finite number"),
        (
            ["systems=[{name: areal, 3: 4}]"],
            r"\(areal\): system areal: unknown parameter '3'; it has eta",
        ),
        (
            ["systems=[{name: split, rollout_share: 1.5}]"],
            r"\(split\): system split: rollout_share is 1.5.*less than 1",
        ),
        (
            ["systems=[{name: split, rollout_share: 0.01}]"],
            "leaves 0 rollout and 4 train GPUs; both need some",
        ),
        (
            ["systems=[{name: split, rollout_share: 0.99}]", "cluster.tp=2", "cluster.gpus=2"],
            "both need some",
        ),
        (["cluster.tp=3"], "cluster.tp is 3: it does not divide the 4 GPUs; choose a divisor"),
        (
            ["cluster.tp=32", "cluster.gpus=32"],
            "cluster.tp is 32: it does not divide the 16 attention heads",
        ),
        (["cluster.gpu=b9"], "gpu 'b9' is unknown: simrl has no data sheet of it"),
        (["model=gpt-5"], "model gpt-5: no known name, nor a config.json"),
        (["model=qwen3-32b"], "weights 61.0 GiB.*use a larger tp|needs .* GiB a GPU"),
        (
            ["training.tokens_per_microbatch=10000000"],
            r"training: .*GiB a GPU .*activations of 10,000,000",
        ),
        (
            ["training.sequence_parallel=3"],
            "training.sequence_parallel is 3: it does not divide the 4 train GPUs",
        ),
        (
            ["engine.kv_cache_tokens=100"],
            "its longest sample has .* tokens, the KV cache of a worker .* holds 100",
        ),
        (["engine.reserve_bytes=1e12"], "nothing is left for the KV cache"),
        (["workload.synthetic=null", "workload.trace=none.parquet"], "none.parquet: no such file"),
        (["profile.roofline=null", "profile.path=none.parquet"], "none.parquet: no such profile"),
        (
            ["vary=[{cluster.gpus: 4}, {cluster.tp: 3}]"],
            r"\(verl_colocated, cluster.tp=3\): cluster.tp is 3",
        ),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_with_file_and_run_before_anything_runs(
    simrl, monkeypatch, overrides, what
):
    monkeypatch.setattr(
        "simrl.study.compare.simulate_prepared", lambda *_: pytest.fail("something ran")
    )
    for jobs in "12":
        assert re.search(
            rf"scenario.yaml.*{what}",
            simrl.refuses("compare", "scenario.yaml", *overrides, "-o", "new/out", "--jobs", jobs),
        )


@pytest.mark.parametrize(
    "output",
    ["own", "scenario.yaml", "scenario.yaml/out", os.devnull, f"{os.devnull}/out", ".", "/"],
)
def test_an_output_folder_that_is_somebody_elses_is_refused_before_anything_runs(
    simrl, monkeypatch, output
):
    monkeypatch.setattr(
        "simrl.study.compare.simulate_prepared", lambda *_: pytest.fail("something ran")
    )
    (simrl.folder / "own").mkdir()
    (simrl.folder / "own" / "thesis.tex").write_text("text")
    assert f"{output}: " in simrl.refuses("compare", "scenario.yaml", "-o", output)


@pytest.mark.parametrize("old", [True, False])
def test_a_disk_that_runs_full_leaves_the_old_results_and_nothing_else(simrl, monkeypatch, old):
    if old:
        old_results(simrl.folder / "new" / "out")

    def full(result, path):
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("simrl.show.comparison.write_perfetto", full)
    message = simrl.refuses("compare", "scenario.yaml", "-o", "new/out", "--jobs", "1")
    assert "new/out: cannot be written (No space left on device); name a place" in message


@pytest.mark.slow
def test_a_file_that_may_not_grow_in_another_process_is_told_too(simrl):
    compile_engine()  # which writes larger files
    compile_training()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # in bytes; the processes inherit it
    try:
        message = simrl.refuses("compare", "scenario.yaml", "-o", "new/out", "--jobs", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(r"new/out/\S+: cannot be written \(File too large\); name a place", message)


# What is stopped.


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="the processes of a group are found in Linux's /proc",
)
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_the_old_results_whole_and_nothing_else(simrl, jobs):
    old_results(simrl.folder / "out")
    before = contents(simrl.folder)
    process = simrl.start("compare", "scenario.yaml", *SLOW, "--jobs", str(jobs))
    while not (
        list(simrl.folder.glob(".out.*")) and len(processes(process.pid)) >= (4 if jobs == 2 else 1)
    ):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (1, "", "simrl: interrupted; nothing was written\n")
    assert contents(simrl.folder) == before
    deadline = time.monotonic() + PATIENCE_S
    while processes(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_process_is_told_in_one_line_and_ends_the_others(simrl):
    others = set(active_children())  # of tests before

    def kill_one():
        # both: Python itself fails on one that dies while another is being started
        while len(children := list(set(active_children()) - others)) < 2 or not list(
            simrl.folder.glob(".out.*")
        ):
            time.sleep(0.05)
        children[0].kill()

    old_results(simrl.folder / "out")
    before = contents(simrl.folder)
    killer = Thread(target=kill_one)
    killer.start()
    code, out, err = simrl("compare", "scenario.yaml", *SLOW, "--jobs", "2")
    killer.join()
    assert (code, out) == (1, "")
    assert re.fullmatch("simrl: a process that simulates was killed, .*; try fewer --jobs\n", err)
    assert contents(simrl.folder) == before
    assert set(active_children()) <= others


def test_results_can_be_read_where_they_are_written(compared):
    _, rows, folder = compared
    steps = pq.read_table(folder / rows[0]["folder"] / "steps.parquet")
    assert steps.num_rows == 2


def test_a_scenario_that_cannot_be_is_refused_in_python_too(compared, tmp_path):
    scenarios = [s.model_copy(update={"model": "gpt-5"}) for s in compared[0]]
    with pytest.raises(InputError, match="model gpt-5: no known name"):
        compare_scenarios(scenarios, tmp_path / "out", 1)
    assert contents(tmp_path) == {}
