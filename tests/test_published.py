"""Published results: what is read of them, how predictions are scored, and that predictions never see an outcome."""

import ast
import csv
import importlib.resources
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from simrl.errors import InputError
from simrl.published import predict, score, tlt
from simrl.published.areal import one_forward_one_backward
from simrl.published.board import board, in_words, totals
from simrl.published.lab import GIVEN
from simrl.published.ledger import Asked, Input, Ledger, read_ledger
from simrl.published.predict import Prediction
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.bandit import Strategy
from simrl.speculation.trees import accept_length, tree_log_acceptances

PACKAGE = Path(score.__file__).parent


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
    (inside,) = score.score(row, [[2.2]])
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


def test_a_prediction_of_too_few_elements_is_refused():
    with pytest.raises(ValueError, match="has 3 elements"):
        score.score(score.published_rows()["tlt-graph-memory"], [[7.8, 30.0]])


def test_only_what_is_assumed_has_a_range():
    with pytest.raises(ValidationError, match="only what is assumed"):
        Input(value=1.0, low=0.5, high=2.0, kind="stated", source="§1")
    with pytest.raises(ValidationError, match="not between"):
        Input(value=3.0, low=0.5, high=2.0, kind="assumed", source="why")
    with pytest.raises(ValidationError, match="no prediction asks for"):
        Input(value=1.0, low=0.5, high=2.0, kind="assumed", source="why", used=False)


def test_more_sets_of_inputs_leave_the_first_as_they_were():
    entry = Input(value=2.0, low=1.0, high=4.0, log=True, kind="assumed", source="why")
    choice = Input(value=2, choices=(1, 2, 4), kind="assumed", source="why")
    ledger = Ledger(paper="a paper", inputs={"x": entry, "tp": choice, "n": Input(value=8, kind="stated", source="§1")})
    few, more = ledger.sample(3), ledger.sample(12)
    assert more[: len(few)] == few
    assert few[0] == {"x": 2.0, "tp": 2, "n": 8}
    assert all(1 <= inputs["x"] <= 4 and inputs["tp"] in (1, 2, 4) and inputs["n"] == 8 for inputs in more)
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
    source = "".join((PACKAGE / f"{module}.py").read_text(encoding="utf-8") for module in (name, "lab"))
    asked = [re.sub(r"\{[^}]*\}", ".+", text) for text in re.findall(r'inputs(?:\.get\(|\[)f?"([^"]+)"', source)]
    for key, entry in read_ledger(name).inputs.items():
        assert entry.used == any(re.fullmatch(pattern, key) for pattern in asked), key


def of_a_paper(monkeypatch: pytest.MonkeyPatch, row: str, rule) -> list[predict.Task]:
    """The tasks of a row that a function of the number of the set predicts."""
    paper = SimpleNamespace(ROWS={row: lambda lab, inputs: rule(inputs["number"])})
    monkeypatch.setattr(predict, "PAPERS", {"areal": paper})
    return [predict.Task("areal", (row,), number, {"number": number}) for number in range(4)]


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


def test_a_row_whose_middle_cannot_be_is_not_predicted_and_says_why(monkeypatch: pytest.MonkeyPatch):
    def rule(number: int) -> list[float]:
        if number == 0:
            raise InputError("7B does not fit")
        return [10.0 + number]

    predicted = predict.predict(of_a_paper(monkeypatch, "areal-dynbatch", rule), jobs=1)
    (entry,) = board(["areal-dynbatch"], predicted)
    assert (entry["predicted"], entry["covered"], entry["why_not"]) == (None, None, "7B does not fit")
    assert in_words([entry]) == "0 of 1 rows are predicted; 0% of 1 published figures lie in their intervals."


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_comes_to_no_number_is_neither_given_nor_a_prediction(monkeypatch: pytest.MonkeyPatch, value: float):
    rule = {0: [GIVEN, GIVEN, 10.6], 1: [GIVEN, GIVEN, float(str(value))]}
    todo = of_a_paper(monkeypatch, "tlt-graph-memory", lambda number: rule[number])[:2]
    (found,) = predict.predict(todo, jobs=1).values()
    assert [values[2] for values in found.elements] == [10.6]
    assert found.refused == [f"the simulation gives no number for it: nan, nan, {value}"]


def test_a_bug_in_a_prediction_is_not_taken_for_inputs_that_cannot_be(monkeypatch: pytest.MonkeyPatch):
    todo = of_a_paper(monkeypatch, "areal-dynbatch", lambda number: [1.0 / number])
    with pytest.raises(ZeroDivisionError):
        predict.predict(todo, jobs=1)


def test_what_a_row_does_not_ask_for_moves_it_by_chance_alone_and_is_not_named():
    rows = ("weight-sync-7b", "weight-sync-30b")
    predicted = predict.predict(predict.tasks(rows, 4), jobs=1)
    small, large = board(rows, predicted)
    asked = {"tensor_s", "bucket_bytes", "bucket_tensor_s", "engine_bytes_per_s"}
    assert {driver["input"] for driver in small["drivers"]} == asked
    assert "network_bytes_per_s" in {driver["input"] for driver in large["drivers"]}  # its ranks are on several nodes


def test_inputs_note_who_asks_for_them_also_where_some_are_replaced():
    inputs = Asked({"sigma": 1.0, "group": 8, "tp": 2}, set())
    other = inputs | {"sigma": 0.5}
    assert (other["sigma"], other.get("group"), other.get("cap", 3)) == (0.5, 8, 3)
    assert inputs.names == {"sigma", "group", "cap"}


def test_an_element_that_its_prediction_is_given_counts_as_nothing():
    prediction = Prediction([[GIVEN, GIVEN, 10.6], [GIVEN, GIVEN, 10.7]], read_ledger("tlt").sample(1), [], frozenset())
    (entry,) = board(["tlt-graph-memory"], {"tlt-graph-memory": prediction})
    assert (entry["predicted"], entry["covered"]) == ([None, None, 10.6], [None, None, True])
    assert totals([entry])["elements"] == 1
    assert totals([entry])["median_error"] == pytest.approx(1 - 10.6 / 10.69)
    assert json.loads(json.dumps(entry, allow_nan=False))["error"][:2] == [None, None]


def test_rows_that_are_left_out_say_why():
    (entry,) = board(["tlt-accept-base"], {})
    assert "acceptance is an input" in entry["why_not"]
    assert not set(predict.left_out()) & {row for paper in predict.PAPERS.values() for row in paper.ROWS}
    assert set(predict.left_out()) <= set(score.published_rows())


def test_the_tree_of_table_1_accepts_what_is_printed_of_it():
    strategy = Strategy(12, 8, 48)
    probability = tlt.first_choice(8.67, strategy)
    acceptance = ModelAcceptance(by_position=(probability,))
    assert accept_length(tree_log_acceptances(acceptance, strategy)) == pytest.approx(8.67, abs=1e-3)


def test_a_pipeline_of_equal_micro_batches_has_the_known_bubble():
    assert one_forward_one_backward([1.0] * 5, [2.0] * 5, 1) == 15
    # Each further stage adds a forward pass to fill it, and a backward one to drain it.
    assert one_forward_one_backward([1.0] * 5, [2.0] * 5, 4) == 15 + 3 * 3
    # The last stage: 1-2 forward, 2-4 backward, 4-7 forward, 7-13 backward; then the first one's last backward pass.
    assert one_forward_one_backward([1.0, 3.0], [2.0, 6.0], 2) == 13 + 6


def test_a_row_is_predicted_by_one_paper():
    rows = [row for paper in predict.PAPERS.values() for row in paper.ROWS]
    assert len(rows) == len(set(rows))


def test_other_outcomes_change_scores_and_no_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rows, copy = ("weight-sync-7b", "tlt-topk8", "spec-decode-latency"), tmp_path / "published"
    with (PACKAGE / "published.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    with (copy / "published.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(
            {**row, "value": re.sub(r"\d+", lambda digits: f"7{digits[0]}", row["value"])} for row in table
        )

    def predicted() -> tuple[dict[str, list[list[float]]], list[float]]:
        for cached in (score.published_rows, read_ledger, tlt.first_choice):
            cached.cache_clear()
        found = predict.predict(predict.tasks(rows, 1), jobs=1)
        errors = [error for entry in board(rows, found) for error in entry["error"]]
        return {row: one.elements for row, one in found.items()}, errors

    before, errors = predicted()
    with monkeypatch.context() as patched:  # whoever looks for a file of the package finds the copy
        patched.setattr(importlib.resources, "files", lambda package: copy)
        for module in [m for name, m in sys.modules.items() if name.startswith("simrl.published")]:
            if hasattr(module, "files"):
                patched.setattr(module, "files", lambda package: copy)
        after, other_errors = predicted()
    score.published_rows.cache_clear()
    read_ledger.cache_clear()
    assert after == before
    assert all(a != b for a, b in zip(errors, other_errors, strict=True) if a)


def test_no_module_that_predicts_reads_an_outcome():
    readers = {"score", "board"}
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
        assert not {"simrl.published.score", "score", "simrl.published.board", "board"} & imported, path.name
        assert "published.csv" not in text or path.stem == "__init__", path.name
