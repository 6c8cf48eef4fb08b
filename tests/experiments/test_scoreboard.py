"""The page of published results: what it counts, and that it says what is missing."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from experiments.reproduce.score import published_rows, score

FOLDER = Path(__file__).parents[2] / "experiments" / "published"


@pytest.fixture
def scoreboard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in list(sys.modules):
        if name == "scoreboard" or name == "drawing" or name.startswith("figures_"):
            monkeypatch.delitem(sys.modules, name)
    import scoreboard  # type: ignore[import-not-found]

    return scoreboard


def entry(row: str, *predicted: list[float]) -> dict[str, Any]:
    """A row of a board, from predictions of it; of none, one that nothing predicts."""
    known = published_rows()[row]
    said = {
        key: getattr(known, key)
        for key in ("id", "source", "system", "baseline", "quantity", "setting", "unit")
    }
    said["published"] = [list(bound) for bound in known.elements]
    names = ("predicted", "low", "high", "error", "covered", "half_width")
    if not predicted:
        return {**said, **dict.fromkeys((*names, "ledger", "drivers")), "why_not": "nobody knows"}
    elements = score(known, predicted)
    found = {name: [None if e.given else getattr(e, name) for e in elements] for name in names}
    drivers = [{"input": "sigma", "rank_correlation": 0.5}]
    levels = [
        {
            "run": {"name": name, "gpus": 8},
            "step_s": s,
            "rollout_s": s / 2,
            "response_tokens_per_s": 1.0,
        }
        for name, s in (("verl_colocated", 20.0), ("verl_2x", 10.0))
    ]
    return {**said, **found, "drivers": drivers, "levels": levels}


def test_a_page_has_the_goals_the_rows_and_what_is_missing(scoreboard: ModuleType, tmp_path: Path):
    board = [
        entry("areal-hours-1p5b", [14.0, 30.0, 40.0], [10.0, 25.0, 30.0], [16.0, 35.0, 45.0]),
        entry("spec-2x", [1.05], [1.0], [1.1]),
        entry("spec-decode-latency", [12.5], [12.5]),
        entry("rhyme-store"),
    ]
    path = tmp_path / "board.json"
    path.write_text(
        json.dumps({"simrl_version": "1.2.3", "samples": 2, "totals": {}, "rows": board}),
        encoding="utf-8",
    )
    scoreboard.main(path, None, False, tmp_path)
    page = (tmp_path / "scoreboard.md").read_text(encoding="utf-8")
    assert "2 drawn sets of inputs, by simrl 1.2.3; a row is covered" in page
    assert "verl_colocated 20 s (10)<br>verl_2x 10 s (5)" in page
    since = page.partition("## Since the board before")[2].partition("## The board")[0]
    assert "| AReaL | 3 | " in since and "CUDA graphs" in since
    assert "(2 of 72), 67 % of the 3 that are predicted" in page
    assert "1 of 2: `spec-2x` -12 %, `spec-decode-latency` +0 %" in page
    assert "3 of 3 pairs right, 0 predicted level, 0 reversed" in page
    assert (
        "`spec-2x`: predicted too low; the nearest end of the interval is 1.1 against 1.2–1.3."
        in page
    )
    assert "- `rhyme-store`" in page and "nobody knows." in page
    assert (
        "- `tlt-accept-r`" in page and "nothing in simrl predicts it" in page
    )  # what the board lacks


def test_orders_are_right_level_or_reversed(scoreboard: ModuleType):
    found = scoreboard.orders(
        [entry("areal-eta", [130.0, 120.0, 357.0, 350.0, 370.0, 371.0, 400.0])]
    )
    published = published_rows()["areal-eta"].elements  # 128.7/269.3/356.6/356.6/371.7/382.4/396.8
    assert published[2] == published[3]  # no order
    assert found.level == 1  # η 8 and 16, which differ by 3 %
    assert len(found.reversed) == 1 and "no. 1 and `areal-eta` no. 2" in found.reversed[0]
    assert found.right == 21 - 1 - 2


def test_phases_of_one_step_have_no_order(scoreboard: ModuleType):
    sync, fully_async = (
        entry("verl-sync-32", [700.0, 300.0, 100.0, 400.0]),
        entry("verl-async-32", [900.0, 10.0]),
    )
    assert scoreboard.orders([sync]) == (0, 0, ())
    (wrong,) = scoreboard.orders([sync, fully_async]).reversed  # the steps
    assert "published 790 and 295, predicted 700 and 900" in wrong


def test_an_element_that_is_given_counts_as_nothing(scoreboard: ModuleType):
    graphs = entry("tlt-graph-memory", [math.nan, math.nan, 12.0], [math.nan, math.nan, 10.0])
    assert scoreboard.orders([graphs]) == (0, 0, ())
    page = scoreboard.scoreboard(scoreboard.Board([graphs], 1), {})
    assert "100 % of all 1 elements" in page and "given<br>given<br>12" in page


def test_a_ratio_is_on_the_side_of_1_that_was_published(scoreboard: ModuleType):
    assert scoreboard.same_side(entry("spec-2x", [1.05]), 0)
    assert not scoreboard.same_side(entry("spec-2x", [0.95]), 0)
    assert not scoreboard.same_side(entry("spec-rlhfuse", [-0.01]), 0)  # a gain


def test_a_row_without_an_interval_is_not_covered_and_no_miss(scoreboard: ModuleType):
    page = scoreboard.scoreboard(scoreboard.Board([entry("spec-2x", [1.25])], 4), {})
    assert "(0 of 1)" in page and "- `spec-2x`" not in page


def test_a_board_without_intervals_is_refused(scoreboard: ModuleType, tmp_path: Path):
    (tmp_path / "board.json").write_text(
        json.dumps({"samples": 0, "rows": [entry("spec-2x", [1.25])]})
    )
    with pytest.raises(
        scoreboard.InputError, match=r"board.json: samples is 0.*draw some with --samples 16"
    ):
        scoreboard.read_board(tmp_path / "board.json")


def test_what_is_no_board_is_refused(
    scoreboard: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "board.json").write_text("[]", encoding="utf-8")
    with pytest.raises(typer.Exit) as end:
        scoreboard.main(tmp_path / "board.json", None, False, tmp_path)
    assert end.value.exit_code == 2
    assert "board.json: no board" in capsys.readouterr().err


def test_an_unknown_figure_is_refused_with_those_there_are(scoreboard: ModuleType, tmp_path: Path):
    with pytest.raises(scoreboard.InputError, match="fig-1: no such figure; there are areal-1"):
        scoreboard.draw(["fig-1"], [], tmp_path)


def test_a_figure_is_drawn_alone_and_says_what_it_shows(scoreboard: ModuleType, tmp_path: Path):
    scoreboard.main(None, ["rhymerl-8"], False, tmp_path)
    assert (tmp_path / "figures" / "rhymerl-8.png").read_bytes().startswith(b"\x89PNG")
    (caption,) = scoreboard.read_captions(tmp_path / "figures").values()
    assert (
        caption["title"].startswith("Fig. 8")
        and "Published: short hits dominate" in caption["says"]
    )
    assert not (tmp_path / "scoreboard.md").exists()


def test_every_picture_of_the_page_is_there_and_small(scoreboard: ModuleType):
    captions = scoreboard.read_captions(FOLDER / "figures")
    assert captions
    sizes = {name: (FOLDER / "figures" / f"{name}.png").stat().st_size for name in captions}
    assert max(sizes.values()) < 60_000
    assert {path.stem for path in (FOLDER / "figures").glob("*.png")} == set(captions)
