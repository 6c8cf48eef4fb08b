"""`python -m experiments.reproduce`: what it prints and writes, what it refuses, and what is left of it when it is stopped."""

import json
import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from threading import Thread

import pytest

from experiments.reproduce import predict
from simrl import __version__
from tests.command_line import contents
from tests.study.test_comparison import PATIENCE_S, processes

QUICK = ("tlt-drafter-latency", "weight-sync-7b")
SLOW = ("areal-eta", "--samples", "3", "--jobs", "2", "-o", "board.json")


def test_rows_are_predicted_with_their_intervals_and_inputs(reproduce):
    code, out, _ = reproduce(*QUICK, "tlt-accept-r", "--samples", "4", "--jobs", "1", "--json")
    assert code == 0
    board = json.loads(out)
    assert [entry["id"] for entry in board["rows"]] == [*QUICK, "tlt-accept-r"]
    latency, sync, left_out = board["rows"]
    for entry in (latency, sync):
        ends = zip(entry["low"], entry["predicted"], entry["high"], strict=True)
        assert all(0 < low <= middle <= high for low, middle, high in ends)
    assert {driver["input"] for driver in latency["drivers"]} >= {"small_kernels_s", "latency_tp"}
    assert sync["ledger"]["link_bytes_per_s"]["kind"] == "stated"
    assert left_out["predicted"] is None
    assert board["totals"]["rows_predicted"] == 2


def test_the_number_of_processes_does_not_change_a_prediction(reproduce):
    one, two = (
        reproduce(*QUICK, "--samples", "2", "--jobs", jobs, "--json").out for jobs in ("1", "2")
    )
    assert one == two != ""


def test_the_screen_says_why_a_row_is_not_predicted(reproduce, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # as a pipe has it
    code, out, _ = reproduce(
        "tlt-graph-memory", "tlt-accept-r", "--samples", "0", "--jobs", "1", "-o", "new/b.json"
    )
    assert code == 0
    assert "given / given / 10.6" in out
    assert "tlt-accept-r: not predicted: acceptance is an input" in out
    assert "1 of 2 rows are predicted" in out
    assert len(json.loads((reproduce.folder / "new/b.json").read_text())["rows"]) == 2


def test_a_row_that_is_asked_for_twice_is_predicted_and_counted_once(reproduce):
    row = QUICK[1]
    once, twice = (
        reproduce(*rows, "--samples", "0", "--jobs", "1", "--json").out
        for rows in ([row], [row] * 2)
    )
    assert json.loads(once)["totals"]["rows"] == 1
    assert once == twice


def test_an_unknown_row_names_the_one_that_may_be_meant(reproduce):
    assert "areal-etta: no published row (did you mean areal-eta?)" in reproduce.refuses(
        "areal-etta"
    )


def test_a_mistake_of_who_adds_a_paper_is_one_line(reproduce, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        predict.PAPERS["verl"].ROWS, "weight-sync-7b", lambda lab, inputs: [inputs["tensors_s"]]
    )
    said = reproduce.refuses("weight-sync-7b", "--samples", "0", "--jobs", "1")
    assert (
        "asks for the input 'tensors_s', which experiments/reproduce/ledgers/verl.yaml does not have (did you mean tensor_s?)"
        in said
    )
    monkeypatch.setitem(predict.PAPERS["verl"].ROWS, "weight-sync-7b", lambda lab, inputs: [1.0])
    said = reproduce.refuses("weight-sync-7b", "--samples", "0", "--jobs", "1")
    assert (
        "verl.py: row weight-sync-7b: returns a list of 1, and 2 elements of it are published"
        in said
    )


def test_one_row_alone_lists_what_it_asks_for_first_and_marks_the_rest(
    reproduce, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    lines = reproduce("weight-sync-7b", "--samples", "2", "--jobs", "1").out.splitlines()
    named = [line.split()[0] for line in lines[3:] if line[:1].isalpha()]
    asked = [
        "sync_bytes_7b",
        "sync_tensors_7b",
        "link_bytes_per_s",
        "tensor_s",
        "bucket_bytes",
        "bucket_tensor_s",
    ]
    assert named[1:8] == [*asked[:6], "engine_bytes_per_s"]
    marked = {line.split()[0] for line in lines if "not asked for here" in line}
    assert {"sync_bytes_30b", "mfu", "gpus"} <= marked and not marked & {*asked}


def test_without_sets_of_inputs_there_are_no_intervals_and_nothing_is_covered(
    reproduce, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = (*QUICK, "--samples", "0", "--jobs", "1")
    out = reproduce(*arguments).out
    assert "interval" not in out.splitlines()[0] and "covered" not in out
    assert (
        "2 of 2 rows are predicted, with every input at its middle alone, so that there is no interval; median"
        in out
    )
    found = json.loads(reproduce(*arguments, "--json").out)
    assert found["totals"]["covered_share"] is None
    assert {
        value
        for entry in found["rows"]
        for key in ("low", "high", "covered")
        for value in entry[key]
    } == {None}


def test_a_board_says_where_it_is_and_what_it_is_of(reproduce):
    arguments = (QUICK[1], "--samples", "1", "--jobs", "1", "-o", "board.json")
    assert reproduce(*arguments).out.endswith("\nWritten to board.json\n")
    assert "Written" not in reproduce(*arguments, "--json").out
    found = json.loads((reproduce.folder / "board.json").read_text())
    assert (found["samples"], found["simrl_version"]) == (1, __version__)


def test_an_output_that_cannot_be_written_is_told_before_anything_runs(
    reproduce, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(predict, "run", lambda task: pytest.fail("it runs"))
    assert "scenario.yaml/board.json" in reproduce.refuses(
        *QUICK, "--jobs", "1", "-o", "scenario.yaml/board.json"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="the processes of a group are found in Linux's /proc",
)
def test_ctrl_c_leaves_neither_processes_nor_files(reproduce):
    before = contents(reproduce.folder)
    process = reproduce.start(*SLOW)
    while not (list(reproduce.folder.glob(".board.json.*")) and len(processes(process.pid)) >= 4):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (1, "", "simrl: interrupted; nothing was written\n")
    assert contents(reproduce.folder) == before
    deadline = time.monotonic() + PATIENCE_S
    while processes(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_process_is_told_in_one_line(reproduce):
    others = set(active_children())  # of tests before

    def kill_one():
        while (
            len(children := list(set(active_children()) - others)) < 2
        ):  # both: Python fails on one that dies while another starts
            time.sleep(0.05)
        children[0].kill()

    killer = Thread(target=kill_one)
    killer.start()
    code, out, err = reproduce(*SLOW)
    killer.join()
    assert (code, out) == (1, "")
    assert (
        err
        == "simrl: a process that simulates was killed, perhaps for lack of memory; nothing was written; try fewer --jobs\n"
    )
    assert set(active_children()) <= others
