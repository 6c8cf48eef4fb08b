"""Published results: what is read of them, how predictions are scored, and that predictions never see an outcome."""

import ast
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from simrl.published import predict, score
from simrl.published.ledger import Input, Ledger, read_ledger

PACKAGE = Path(score.__file__).parent


def test_ratios_ranges_sides_and_lists_are_read_as_written():
    assert score.elements_of("1.9") == [(1.9, 1.9)]
    assert score.elements_of("2.0-2.4") == [(2.0, 2.4)]
    assert score.elements_of("<13") == [(-math.inf, 13)]
    assert score.elements_of(">0.95") == [(0.95, math.inf)]
    assert score.elements_of("231 vs 207") == [(231, 231), (207, 207)]
    assert score.elements_of("7.81 / 30.39") == [(7.81, 7.81), (30.39, 30.39)]


def test_a_gain_is_scored_as_a_ratio():
    row = score.published_rows()["spec-abl-vanilla"]
    (element,) = score.score(row, [[0.05], [0.0], [0.1]])
    assert element.published == (1.026, 1.026)
    assert (element.predicted, element.low, element.high) == (1.05, 1.0, 1.1)
    assert element.error == pytest.approx(1.05 / 1.026 - 1)
    assert element.covered
    assert element.half_width == pytest.approx(0.05 / 1.05)


def test_a_published_range_is_hit_where_it_overlaps_the_interval():
    row = score.published_rows()["spec-rollout-verl"]  # 2.0-2.4
    (inside,) = score.score(row, [[2.2]])
    (touching,) = score.score(row, [[1.8], [2.05]])
    (outside,) = score.score(row, [[1.8], [1.9]])
    assert (inside.error, inside.covered) == (0, True)
    assert (touching.error, touching.covered) == (pytest.approx(-0.1), True)
    assert not outside.covered


def test_a_prediction_of_too_few_elements_is_refused():
    with pytest.raises(ValueError, match="has 3 elements"):
        score.score(score.published_rows()["tlt-graph-memory"], [[7.8, 30.0]])


def test_only_what_is_assumed_has_a_range():
    with pytest.raises(ValidationError, match="only what is assumed"):
        Input(value=1.0, low=0.5, high=2.0, kind="stated", source="§1")
    with pytest.raises(ValidationError, match="not between"):
        Input(value=3.0, low=0.5, high=2.0, kind="assumed", source="why")


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
def test_every_ledger_says_where_each_input_is_from(name: str):
    ledger = read_ledger(name)
    assert all(entry.source for entry in ledger.inputs.values())
    assert set(predict.PAPERS[name].ROWS) <= set(score.published_rows())


def test_a_row_is_predicted_by_one_paper():
    rows = [row for paper in predict.PAPERS.values() for row in paper.ROWS]
    assert len(rows) == len(set(rows))


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
        assert not {"simrl.published.score", "score"} & imported, path.name
        assert "published.csv" not in text or path.stem == "__init__", path.name
