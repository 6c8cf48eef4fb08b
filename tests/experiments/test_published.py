"""Published results: what is read of them, how predictions are scored, and that predictions never see an outcome."""

import ast
import csv
import importlib.resources
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.reproduce import (
    board as board_module,
    ledger as ledger_module,
    predict,
    score,
    tlt,
)
from experiments.reproduce.board import board, in_words, totals
from experiments.reproduce.lab import GIVEN, run_of
from experiments.reproduce.ledger import Asked, Ledger, LedgerInput, PaperError, read_ledger
from experiments.reproduce.predict import Prediction
from simrl.errors import InputError, brief
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Strategy
from simrl.speculation.trees import accept_length, tree_log_acceptances

PACKAGE = Path(score.__file__).parent


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    """What a test reads elsewhere is no other test's."""
    yield
    read_ledger.cache_clear()
    score.published_rows.cache_clear()


def test_ratios_ranges_sides_and_lists_are_read_as_written():
    assert score.elements_of("1.9") == [(1.9, 1.9)]
    assert score.elements_of("2.0-2.4") == [(2.0, 2.4)]
    assert score.elements_of("<13") == [(-math.inf, 13)]
    assert score.elements_of(">0.95") == [(0.95, math.inf)]
    assert score.elements_of("231 vs 207") == [(231, 231), (207, 207)]
    assert score.elements_of("7.81 / 30.39") == [(7.81, 7.81), (30.39, 30.39)]


def test_the_phases_of_a_published_step_are_no_longer_than_it():
    for row in ("verl-sync-32", "verl-sync-64", "verl-async-64"):
        step, *phases = (element.value for element in score.published_rows()[row].elements)
        assert 0.9 * step < sum(phases) < step, row


def test_a_gain_is_scored_as_a_ratio():
    row = score.published_rows()["spec-abl-vanilla"]
    (element,) = score.score(row, [[0.05], [0.0], [0.1]])
    assert element.published == (1.026, 1.026)
    assert (element.predicted, element.low, element.high) == (1.05, 1.0, 1.1)
    assert element.error == pytest.approx(1.05 / 1.026 - 1)
    assert element.covered
    assert element.half_width == pytest.approx(0.05 / 1.05)
    (entry,) = board(["spec-abl-vanilla"], {})
    assert (entry["published"], entry["unit"]) == ([1.026], "x")


def test_a_published_range_is_hit_where_it_overlaps_the_interval():
    row = score.published_rows()["spec-rollout-verl"]  # 2.0-2.4
    (inside,) = score.score(row, [[2.2], [2.2]])
    (touching,) = score.score(row, [[1.8], [2.05]])
    (outside,) = score.score(row, [[1.8], [1.9]])
    assert (inside.error, inside.covered) == (0, True)
    assert (touching.error, touching.covered) == (pytest.approx(-0.1), True)
    assert not outside.covered


def test_a_prediction_of_nothing_at_all_has_no_relative_width():
    row = score.published_rows()["rhyme-migr-code"]  # 0.016-0.046
    (element,) = score.score(row, [[0.0], [0.001]])
    assert (element.error, element.covered, element.half_width) == (-1, False, None)
    prediction = Prediction([[0.0], [0.001]], read_ledger("rhymerl").sample(1), [], frozenset())
    (entry,) = board(["rhyme-migr-code"], {"rhyme-migr-code": prediction})
    assert totals([entry])["median_half_width"] is None
    assert in_words([entry]).endswith("median error 100%.")


def test_the_middle_alone_has_no_interval_and_covers_nothing():
    prediction = Prediction([[2.2]], read_ledger("specactor").sample(0), [], frozenset())
    (entry,) = board(["spec-rollout-verl"], {"spec-rollout-verl": prediction})  # 2.0-2.4
    assert [entry[key] for key in ("low", "high", "covered", "half_width")] == [[None]] * 4
    assert totals([entry])["covered_share"] is None
    assert in_words([entry]).startswith(
        "1 of 1 rows are predicted, with every input at its middle alone, so that there is no"
    )


def test_a_row_with_the_middle_alone_counts_as_not_covered_beside_others():
    ledger = read_ledger("specactor")
    alone, drawn = (Prediction([[2.2]] * n, ledger.sample(n - 1), [], frozenset()) for n in (1, 2))
    rows = {"spec-rollout-verl": alone, "spec-2x": drawn}
    assert totals(board([*rows], rows))["covered_share"] == 0


def test_only_what_is_assumed_has_a_range():
    with pytest.raises(ValidationError, match="only what is assumed"):
        LedgerInput(value=1.0, low=0.5, high=2.0, kind="stated", source="§1")
    with pytest.raises(ValidationError, match="not between"):
        LedgerInput(value=3.0, low=0.5, high=2.0, kind="assumed", source="why")
    with pytest.raises(ValidationError, match="no prediction asks for"):
        LedgerInput(value=1.0, low=0.5, high=2.0, kind="assumed", source="why", used=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "{value: 1.0, kind: assumed, source: why}",
            "inputs.x: assumed, and no range; give low and high, or choices",
        ),
        (
            "{value: 1.0, kind: stated, held: true, source: why}",
            "inputs.x: held, which is for what is assumed",
        ),
        ("{value: 1.0, kind: known, source: why}", "inputs.x.kind is 'known': choose stated"),
        ("{value: 1.0, kind: stated}", "key inputs.x.source is missing"),
        (
            "{value: 1.0, kind: stated, source: ' '}",
            "inputs.x.source is ' ': 1 or more characters are needed",
        ),
        (
            "{value: 3, choices: [3], kind: assumed, source: why}",
            "inputs.x: 3 alone is no choice; give others",
        ),
        (
            "{value: [3, 4], kind: assumed, source: why}",
            "inputs.x: a list, which has neither a range nor choices",
        ),
        (
            "{value: [3, 4], low: 3, high: 4, kind: assumed, source: why}",
            "inputs.x: a list, which has neither a range nor choices; write held: true instead",
        ),
        (
            "{value: 1.0, kind: assumed, source: why, hihg: 2}",
            "unknown key inputs.x.hihg (did you mean high?)",
        ),
        (
            "{value: 1.0, low: 2, high: 0, kind: assumed, source: why}",
            "inputs.x: low 2 is not below high 0",
        ),
        (
            "{value: 1, low: 0.5, high: 2, kind: assumed, source: why}",
            "inputs.x: 1 is a whole number, and so is what is",
        ),
        (
            "{value: 1.0, low: 0, high: 2, log: true, kind: assumed, source: why}",
            "inputs.x: log draws by ratios, which low 0",
        ),
        (
            "{value: 1, kind: stated, source: why}\n  x: {value: 2, kind: stated, source: why}",
            "line 4, column 3: found duplicate key x",
        ),
        ("{value: 1, kind: stated, source: §1: why}", "line 3, column "),
        (f"{'[' * 60}{']' * 60}", "line 3, column 54: nested more than 50 levels deep"),
    ],
)
def test_a_mistake_in_a_ledger_is_told_with_its_place(
    line: str, said: str, monkeypatch, tmp_path: Path
):
    monkeypatch.setattr(ledger_module, "files", lambda package: tmp_path)
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "mine.yaml").write_text(
        f"paper: mine\ninputs:\n  x: {line}\n", encoding="utf-8"
    )
    read_ledger.cache_clear()
    with pytest.raises(
        PaperError, match=rf"^experiments/reproduce/ledgers/mine.yaml: {re.escape(said)}"
    ):
        read_ledger("mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'"3"', "no keys; a ledger has paper, inputs"),
        (b"3", "no keys; a ledger has paper, inputs"),
        (b"", "no keys; a ledger has paper, inputs"),
        (b"- paper", "no keys; a ledger has paper, inputs"),
        (b"paper: \xff", "byte 7 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_ledger_that_is_none_is_told(text: bytes, said: str, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(ledger_module, "files", lambda package: tmp_path)
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "mine.yaml").write_bytes(text)
    with pytest.raises(
        PaperError, match=rf"^experiments/reproduce/ledgers/mine.yaml: {re.escape(said)}"
    ):
        read_ledger("mine")


def test_a_paper_without_a_ledger_is_told():
    with pytest.raises(
        PaperError, match=r"ledgers/mine.yaml: is not there; every paper in PAPERS has a ledger"
    ):
        read_ledger("mine")


def test_what_is_assumed_without_a_range_says_so():
    assert not LedgerInput(value=1024, kind="assumed", held=True, source="it hardly matters").open


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x,a paper,verl,-,ratio,1.2x,x,8K", "value is '1.2x'; write a number above 0, a range"),
        ("x,a paper,verl,-,ratio,,x,8K", "value is ''"),
        *(
            (
                f"x,a paper,verl,-,ratio,{value},x,8K",
                f"value is '{value}'; write a number above 0, a range (2.0-2.4)",
            )
            for value in (
                "0",
                "<0",
                "0-2",
                "-1",
                "nan",
                "1e400",
                "9" * 400,
                "1_0",
                "2.4-2.0",
                "<2-3",
                "1.2/0",
            )
        ),
        ("first,a paper,verl,-,ratio,1.2,x,8K", "id first is there twice"),
    ],
)
def test_a_published_row_that_cannot_be_read_is_told_with_its_line(
    line: str, said: str, monkeypatch, tmp_path: Path
):
    monkeypatch.setattr(score, "files", lambda package: tmp_path)
    head = "id,source,system,baseline,quantity,value,unit,setting\nfirst,a paper,verl,-,ratio,1.5,x,8K\n"
    (tmp_path / "published.csv").write_text(f"{head}{line}\n", encoding="utf-8")
    score.published_rows.cache_clear()
    with pytest.raises(
        InputError, match=rf"^experiments/reproduce/published.csv: line 3: {re.escape(brief(said))}"
    ):
        score.published_rows()


def test_nothing_at_all_is_below_a_published_limit():
    row = score.published_rows()["spec-decode-latency"]  # <13
    assert row.elements == ((-math.inf, 13),)
    (element,) = score.score(row, [[0.0], [0.0]])
    assert (element.error, element.covered) == (0, True)


def test_more_sets_of_inputs_leave_the_first_as_they_were():
    entry = LedgerInput(value=2.0, low=1.0, high=4.0, log=True, kind="assumed", source="why")
    choice = LedgerInput(value=2, choices=(1, 2, 4), kind="assumed", source="why")
    ledger = Ledger(
        paper="a paper",
        inputs={"x": entry, "tp": choice, "n": LedgerInput(value=8, kind="stated", source="§1")},
    )
    few, more = ledger.sample(3), ledger.sample(12)
    assert more[: len(few)] == few
    assert few[0] == {"x": 2.0, "tp": 2, "n": 8}
    assert all(
        1 <= inputs["x"] <= 4 and inputs["tp"] in (1, 2, 4) and inputs["n"] == 8 for inputs in more
    )
    assert len({inputs["tp"] for inputs in more}) == 3


@pytest.mark.parametrize("name", predict.PAPERS)
def test_four_sets_of_inputs_have_each_quarter_of_each_range_once(name: str):
    ledger = read_ledger(name)
    _, *drawn = ledger.sample(4)
    for key in ledger.open:
        entry = ledger.inputs[key]
        if entry.low is None or entry.high is None or isinstance(entry.value, int):
            continue
        ends = np.array([entry.low, *(inputs[key] for inputs in drawn), entry.high])
        shares = (np.log(ends) if entry.log else ends)[1:-1]
        low, high = (np.log([entry.low, entry.high]) if entry.log else ends[[0, -1]]).tolist()
        assert sorted(((shares - low) / (high - low) * 4).astype(int).tolist()) == [0, 1, 2, 3], key


@pytest.mark.parametrize("name", predict.PAPERS)
def test_every_ledger_says_where_each_input_is_from(name: str):
    ledger = read_ledger(name)
    assert all(entry.source for entry in ledger.inputs.values())
    assert set(predict.PAPERS[name].ROWS) <= set(score.published_rows())


@pytest.mark.parametrize("name", predict.PAPERS)
def test_inputs_that_no_prediction_asks_for_are_marked(name: str):
    source = "".join(
        (PACKAGE / f"{module}.py").read_text(encoding="utf-8") for module in (name, "lab")
    )
    texts = re.findall(r'inputs(?:\.get\(|\[)f?"([^"]+)"', source)
    texts += [
        text
        for names in re.findall(r"named\(([^)]+)\)", source)
        for text in re.findall(r'"([^"]+)"', names)
    ]
    asked = [re.sub(r"\{[^}]*\}", ".+", text) for text in texts]
    for key, entry in read_ledger(name).inputs.items():
        assert entry.used == any(re.fullmatch(pattern, key) for pattern in asked), key


def of_a_paper(monkeypatch: pytest.MonkeyPatch, row: str, rule) -> list[predict.Task]:
    """The tasks of a row that a function of the number of the set predicts."""
    paper = SimpleNamespace(ROWS={row: lambda lab, inputs: rule(inputs["number"])})
    monkeypatch.setattr(predict, "PAPERS", {"areal": paper})
    count = len(score.published_rows()[row].elements)
    return [predict.Task("areal", {row: count}, number, {"number": number}) for number in range(4)]


def test_a_set_of_inputs_that_cannot_be_costs_a_row_this_set_alone(monkeypatch: pytest.MonkeyPatch):
    def rule(number: int) -> list[float]:
        if number == 2:
            raise InputError("7B does not fit")
        return [10.0 + number]

    todo = of_a_paper(monkeypatch, "areal-dynbatch", rule)
    (found,) = predict.predict(todo, jobs=1).values()
    assert found.elements == [[10.0], [11.0], [13.0]]
    assert [inputs["number"] for inputs in found.inputs] == [0, 1, 3]
    assert found.refused == ["7B does not fit"]


def test_a_row_whose_middle_cannot_be_is_not_predicted_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
):
    def rule(number: int) -> list[float]:
        if number == 0:
            raise InputError("7B does not fit")
        return [10.0 + number]

    predicted = predict.predict(of_a_paper(monkeypatch, "areal-dynbatch", rule), jobs=1)
    (entry,) = board(["areal-dynbatch"], predicted)
    assert (entry["predicted"], entry["covered"], entry["why_not"]) == (
        None,
        None,
        "7B does not fit",
    )
    assert (
        in_words([entry])
        == "0 of 1 rows are predicted; 0% of 1 published figures lie in their intervals."
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_comes_to_no_number_is_neither_given_nor_a_prediction(
    monkeypatch: pytest.MonkeyPatch, value: float
):
    rule = {0: [GIVEN, GIVEN, 10.6], 1: [GIVEN, GIVEN, float(str(value))]}
    todo = of_a_paper(monkeypatch, "tlt-graph-memory", lambda number: rule[number])[:2]
    (found,) = predict.predict(todo, jobs=1).values()
    assert [values[2] for values in found.elements] == [10.6]
    assert found.refused == [f"the simulation gives no number for it: nan, nan, {value}"]


def no_scenario(lab, inputs):
    small_run({"mfuu": 0.3})


def small_run(training):
    names = ("group", "sigma", "prompt_share", "prompt_tokens")
    engine = {"engine_preset": "vllm-0.8", "host_speed": 1.0}
    lengths = {"prompts_per_step": 4, "cap_tokens": 60, "mean_tokens": 20}
    sizes = {"group": 2, "prompt_tokens": 20, "prompt_cap_tokens": 40, "max_num_seqs": 64}
    run_of(
        {**dict.fromkeys(names, 0.1), **sizes, **engine, "gpu": "h100"},
        {"name": "split"},
        **{"model": "qwen3-0.6b", "gpus": 4, "tp": 1, "steps": 2, "warmup_steps": 1},
        lengths=lengths,
        training=training,
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            lambda lab, inputs: [inputs["numbr"]],
            "row weight-sync-7b asks for the input 'numbr', which experiments/reproduce/ledgers/verl.yaml does not have "
            "(did you mean number?); add it there",
        ),
        (
            lambda lab, inputs: [1.0],
            "row weight-sync-7b: returns a list of 1, and 2 elements of it are published; return one for each, GIVEN for",
        ),
        (
            no_scenario,
            "row weight-sync-7b: its Scenario: unknown key training.mfuu (did you mean mfu?)",
        ),
    ],
)
def test_a_mistake_in_a_row_ends_all_with_its_place_and_costs_no_set_alone(
    row, said: str, monkeypatch
):
    monkeypatch.setitem(predict.PAPERS["verl"].ROWS, "weight-sync-7b", row)
    with pytest.raises(PaperError, match=rf"^experiments/reproduce/verl.py: {re.escape(said)}"):
        predict.predict([predict.Task("verl", {"weight-sync-7b": 2}, 0, {"number": 1})], jobs=1)


@pytest.mark.slow
def test_a_mistake_in_a_row_ends_all_processes_with_its_place():
    lacking = {
        name: value for name, value in read_ledger("verl").middle.items() if name != "tensor_s"
    }
    todo = [predict.Task("verl", {"weight-sync-7b": 2}, number, lacking) for number in range(2)]
    with pytest.raises(
        PaperError,
        match=r"^experiments/reproduce/verl.py: row weight-sync-7b asks for the input 'tensor_s'",
    ):
        predict.predict(todo, jobs=2)


def test_a_value_that_cannot_be_may_be_drawn_and_costs_this_set_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    def rule(number: int) -> list[float]:
        small_run({"mfu": 0.8 + 0.1 * number})
        return [10.0 + number]

    (found,) = predict.predict(of_a_paper(monkeypatch, "areal-dynbatch", rule), jobs=1).values()
    assert found.elements == [[10.0], [11.0], [12.0]]
    (refused,) = found.refused
    assert refused.startswith("its Scenario: training.mfu is 1.1")


def test_rows_that_nobody_published_are_told_whichever_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(predict.PAPERS["verl"].ROWS, "weight-sync-7", lambda lab, inputs: [1.0])
    with pytest.raises(
        InputError,
        match=r"verl.py: ROWS has 'weight-sync-7', which published.csv does not have .did you mean",
    ):
        board_module.require_published()


@pytest.mark.parametrize(
    ("paper", "said"),
    [
        (
            {"ROWS": {"spec-2x": print}},
            "ROWS has 'spec-2x', and so has ROWS of experiments/reproduce/specactor.py; leave it in",
        ),
        (
            {"ROWS": {"weight-sync-7b": print}, "LEFT_OUT": {"weight-sync-7b": "why"}},
            "LEFT_OUT has 'weight-sync-7b', and so has ROWS of experiments/reproduce/verl.py",
        ),
        (
            {"ROWS": {"weight-sync-7b": print}, "LEFT_OUT": {"weight-sync-30": "why"}},
            "LEFT_OUT has 'weight-sync-30', which published.csv does not have (did you mean weight-sync-30b?)",
        ),
    ],
)
def test_rows_that_stand_twice_are_told(paper, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(predict.PAPERS, "verl", SimpleNamespace(**paper))
    with pytest.raises(InputError, match=rf"^experiments/reproduce/verl.py: {re.escape(said)}"):
        board_module.require_published()


def test_the_rows_of_all_papers_are_published_once():
    board_module.require_published()


def test_a_row_that_no_paper_has_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(predict.PAPERS["verl"].ROWS, "weight-sync-7b")
    (entry,) = board(["weight-sync-7b"], {})
    assert (
        entry["why_not"]
        == "no paper in PAPERS (experiments/reproduce/predict.py) has it in its ROWS"
    )


def test_a_bug_in_a_prediction_is_not_taken_for_inputs_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
):
    todo = of_a_paper(monkeypatch, "areal-dynbatch", lambda number: [1.0 / number])
    with pytest.raises(ZeroDivisionError):
        predict.predict(todo, jobs=1)


def test_what_a_row_does_not_ask_for_moves_it_by_chance_alone_and_is_not_named():
    rows = ("weight-sync-7b", "weight-sync-30b")
    predicted = predict.predict(predict.tasks(dict.fromkeys(rows, 2), 4), jobs=1)
    small, large = board(rows, predicted)
    asked = {"tensor_s", "bucket_bytes", "bucket_tensor_s", "engine_bytes_per_s"}
    assert {driver["input"] for driver in small["drivers"]} == asked
    assert "network_bytes_per_s" in {
        driver["input"] for driver in large["drivers"]
    }  # its ranks are on several nodes


def test_inputs_note_who_asks_for_them_also_where_some_are_replaced():
    inputs = Asked({"sigma": 1.0, "group": 8, "tp": 2}, set())
    other = inputs | {"sigma": 0.5}
    assert (other["sigma"], other.get("group"), other.get("cap", 3)) == (0.5, 8, 3)
    assert inputs.names == {"sigma", "group", "cap"}


def test_an_element_that_its_prediction_is_given_counts_as_nothing():
    prediction = Prediction(
        [[GIVEN, GIVEN, 10.6], [GIVEN, GIVEN, 10.7]], read_ledger("tlt").sample(1), [], frozenset()
    )
    (entry,) = board(["tlt-graph-memory"], {"tlt-graph-memory": prediction})
    assert (entry["predicted"], entry["covered"]) == ([None, None, 10.6], [None, None, True])
    assert totals([entry])["elements"] == 1
    assert totals([entry])["median_error"] == pytest.approx(1 - 10.6 / 10.69)
    assert json.loads(json.dumps(entry, allow_nan=False))["error"][:2] == [None, None]


def test_rows_that_are_left_out_say_why():
    (entry,) = board(["tlt-accept-base"], {})
    assert "acceptance is an input" in entry["why_not"]
    assert not set(predict.left_out()) & {
        row for paper in predict.PAPERS.values() for row in paper.ROWS
    }
    assert set(predict.left_out()) <= set(score.published_rows())


def test_the_tree_of_table_1_accepts_what_is_printed_of_it():
    strategy = Strategy(12, 8, 48)
    probability = tlt.first_choice(8.67, strategy)
    acceptance = ModelAcceptance(by_position=(probability,))
    assert accept_length(tree_log_acceptances(acceptance, strategy)) == pytest.approx(
        8.67, abs=1e-3
    )


def test_other_outcomes_change_scores_and_no_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rows, copy = ("weight-sync-7b", "tlt-topk8", "spec-decode-latency"), tmp_path / "published"
    with (PACKAGE / "published.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    with (copy / "published.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(
            {**row, "value": re.sub(r"\d+", lambda digits: f"7{digits[0]}", row["value"])}
            for row in table
        )

    def predicted() -> tuple[dict[str, list[list[float]]], list[float]]:
        for cached in (score.published_rows, read_ledger, tlt.first_choice):
            cached.cache_clear()
        counts = {row: len(score.published_rows()[row].elements) for row in rows}
        found = predict.predict(predict.tasks(counts, 1), jobs=1)
        errors = [error for entry in board(rows, found) for error in entry["error"]]
        return {row: one.elements for row, one in found.items()}, errors

    before, errors = predicted()
    with monkeypatch.context() as patched:  # whoever looks for a file of the package finds the copy
        patched.setattr(importlib.resources, "files", lambda package: copy)
        for module in [
            m for name, m in sys.modules.items() if name.startswith("experiments.reproduce")
        ]:
            if hasattr(module, "files"):
                patched.setattr(module, "files", lambda package: copy)
        after, other_errors = predicted()
    score.published_rows.cache_clear()
    read_ledger.cache_clear()
    assert after == before
    assert all(a != b for a, b in zip(errors, other_errors, strict=True) if a)


def test_no_module_that_predicts_reads_an_outcome():
    readers = {"score", "board", "__main__", "real_measured", "real_board", "real_page"}
    of_outcomes = {
        "experiments.reproduce.score",
        "score",
        "experiments.reproduce.board",
        "board",
        "experiments.reproduce.real_measured",
        "experiments.reproduce.real_board",
    }
    for path in PACKAGE.glob("*.py"):
        if path.stem in readers:
            continue
        text = path.read_text(encoding="utf-8")
        imported = {
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom | ast.Import)
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        }
        assert not of_outcomes & imported, path.name
        assert "published.csv" not in text or path.stem == "__init__", path.name
