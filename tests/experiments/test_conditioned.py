"""Draws of a paper's inputs, of which those are kept whose baseline does what the paper says of it."""

import ast
import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.reproduce import condition, predict, score
from experiments.reproduce.condition import (
    Draws,
    describe,
    digests,
    extend,
    keep,
    read_draws,
    stale,
    write_draws,
)
from experiments.reproduce.ledger import Descriptor, Ledger, LedgerInput, PaperError, read_ledger
from experiments.reproduce.predict import Task
from simrl.errors import InputError

FOLDER = Path(__file__).parents[2] / "experiments" / "published"
PAPERS = ("rhymerl", "specactor", "areal", "tlt", "rollpacker")
QUICK = ("tlt", "rollpacker")  # whose baselines take a third of a second


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    yield
    score.published_rows.cache_clear()


@pytest.fixture
def conditioned(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in list(sys.modules):
        if name in ("conditioned", "scoreboard", "drawing") or name.startswith("figures_"):
            monkeypatch.delitem(sys.modules, name)
    import conditioned  # type: ignore[import-not-found]

    return conditioned


@pytest.fixture
def a_paper(monkeypatch: pytest.MonkeyPatch) -> str:
    """A paper that says of its baseline that rollout is 0.8 of a step and a pass takes 10 ms, and answers with its inputs."""
    ranges = {
        "share": LedgerInput(value=0.5, low=0.2, high=0.9, kind="assumed", source="why"),
        "pass_ms": LedgerInput(
            value=10.0, low=5.0, high=20.0, log=True, kind="assumed", source="why"
        ),
    }
    descriptors = {
        "share": Descriptor(value=0.8, tolerance=0.05, share=True, source="§1", rows=("spec-2x",)),
        "pass_ms": Descriptor(value=10.0, tolerance=0.1, source="§2"),
        "level": Descriptor(value=1.0, tolerance=0.1, source="§3", unused="§1 has another"),
    }
    ledger = Ledger(paper="mine", inputs=ranges, descriptors=descriptors)
    answers = {
        "share": lambda lab, inputs: [inputs["share"]],
        "pass_ms": lambda lab, inputs: [inputs["pass_ms"]],
        "level": lambda lab, inputs: [100.0],
    }
    rows = {
        "spec-2x": lambda lab, inputs: [1.5],
        "spec-rlhfuse": lambda lab, inputs: [inputs["share"] - 0.7],
    }
    monkeypatch.setattr(predict, "PAPERS", {"mine": SimpleNamespace(ROWS=rows, BASELINE=answers)})
    monkeypatch.setattr(condition, "PAPERS", predict.PAPERS)
    monkeypatch.setattr(condition, "read_ledger", lambda name: ledger)
    monkeypatch.setattr(condition, "digests", lambda: {"code": "1", "mine": "2"})
    return "mine"


def made(paper: str, count: int) -> Draws:
    sets = list(enumerate(condition.read_ledger(paper).sample(count)))[1:]
    *_, found = extend(
        Draws({}, {}, 0.0), [Task(paper, {}, i, inputs) for i, inputs in sets], describe, 1
    )
    return found


def kept(draws: Draws, paper: str) -> condition.Kept:
    return keep(paper, draws.values, draws.of(paper))


def test_descriptors_name_quantities_of_the_baseline_and_published_rows():
    assert tuple(condition.conditioned()) == PAPERS
    for paper in PAPERS:
        descriptors, rows = read_ledger(paper).descriptors, score.published_rows()
        assert set(descriptors) == set(predict.PAPERS[paper].BASELINE)
        for name, of in descriptors.items():
            assert not (of.unused and of.rows), name
            for row in of.rows:
                published, _, element = row.partition("/")
                assert int(element or 1) <= len(rows[published].elements), row


@pytest.mark.parametrize("paper", QUICK)
def test_a_baseline_answers_each_descriptor_with_a_number(paper: str):
    _, found = describe(Task(paper, {}, 0, read_ledger(paper).middle))
    assert set(found) == set(read_ledger(paper).descriptors)
    assert all(value > 0 for value in found.values())


def test_a_descriptor_that_no_run_answers_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(predict.PAPERS["tlt"].BASELINE, "capped")
    with pytest.raises(
        PaperError,
        match=r"^experiments/reproduce/tlt.py: capped is a descriptor in one of ledger and",
    ):
        condition.conditioned()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "give value, or low, high or both"),
        ({"value": 1.0, "low": 0.5}, "give value, or low, high or both"),
        ({"low": 2.0, "high": 1.0}, "low 2 is not below high 1"),
    ],
)
def test_a_descriptor_is_a_value_or_ends(fields: dict[str, float], said: str):
    with pytest.raises(ValidationError, match=said):
        Descriptor(tolerance=0.1, source="§1", **fields)


def test_a_misfit_is_the_distance_from_the_nearest_end_in_tolerances():
    assert Descriptor(value=0.9, tolerance=0.05, share=True, source="§1").misfit(
        0.8
    ) == pytest.approx(2)
    assert Descriptor(value=100.0, tolerance=0.1, source="§1").misfit(121.0) == pytest.approx(2)
    band = Descriptor(low=0.7, high=0.8, tolerance=0.05, share=True, source="§1")
    assert [band.misfit(x) for x in (0.65, 0.7, 0.75, 0.9)] == pytest.approx([1, 0, 0, 2])
    side = Descriptor(high=13.0, tolerance=0.1, source="§1")
    assert (side.misfit(1.0), side.misfit(14.3)) == pytest.approx((0, 1))
    assert side.misfit(0.0) == math.inf


def test_a_draw_whose_baseline_disagrees_is_dropped(a_paper: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(condition, "LEAST_KEPT", 3)
    monkeypatch.setattr(condition, "LEAST_SHARE_ALONE", 0.0)
    found = kept(made(a_paper, 256), a_paper)
    sets = condition.read_ledger(a_paper).sample(256)
    agrees = [
        abs(x["share"] - 0.8) <= 0.05 and abs(math.log(x["pass_ms"] / 10)) <= math.log(1.1)
        for x in sets
    ]
    assert found.factors == {"share": 1.0, "pass_ms": 1.0}
    assert found.draws == [draw for draw in range(1, 257) if agrees[draw]]
    assert 3 <= len(found.draws) < 256


def test_tolerances_are_widened_until_enough_draws_are_kept_and_no_further(
    a_paper: str, monkeypatch
):
    draws = made(a_paper, 64)
    for least in (10, 24):
        monkeypatch.setattr(condition, "LEAST_KEPT", least)
        found = kept(draws, a_paper)
        assert len(found.draws) >= least
        assert all(factor > 1 for factor in found.factors.values())
        narrower = [
            draw
            for draw in range(1, 65)
            if all(
                condition.read_ledger(a_paper)
                .descriptors[name]
                .misfit(draws.values[a_paper, draw, name])
                <= factor / condition.WIDER
                for name, factor in found.factors.items()
            )
        ]
        assert len(narrower) < least


def test_what_cannot_be_simulated_is_not_kept(a_paper: str, monkeypatch: pytest.MonkeyPatch):
    def refuses(lab, inputs):
        if inputs["share"] > 0.5:
            raise InputError("7B does not fit")
        return [0.8]

    monkeypatch.setitem(predict.PAPERS[a_paper].BASELINE, "share", refuses)
    draws = made(a_paper, 64)
    sets = condition.read_ledger(a_paper).sample(64)
    assert any(math.isnan(value) for value in draws.values.values())
    assert all(sets[draw]["share"] <= 0.5 for draw in kept(draws, a_paper).draws)


def test_conditioning_reads_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = ast.parse(Path(condition.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not names & {"score", "published_rows", "board"}

    def all_of_it() -> tuple[dict, condition.Kept]:
        draws = made("tlt", 2)
        return draws.values, kept(draws, "tlt")

    before = all_of_it()
    rows = list(
        csv.DictReader((Path(score.__file__).parent / "published.csv").open(encoding="utf-8"))
    )
    with (tmp_path / "published.csv").open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "value": "77.7"} for row in rows)
    monkeypatch.setattr(score, "files", lambda package: tmp_path)
    score.published_rows.cache_clear()
    assert score.published_rows()["tlt-e2e"].elements == ((77.7, 77.7),)
    assert all_of_it() == before


def test_draws_are_the_same_every_time_and_more_keep_the_first(a_paper: str):
    few, more = made(a_paper, 8), made(a_paper, 20)
    assert few.values == made(a_paper, 8).values
    assert few.values.items() <= more.values.items()


def test_a_table_comes_back_as_it_was_written(a_paper: str, tmp_path: Path):
    draws = Draws(made(a_paper, 5).values, condition.digests(), 61.0)
    write_draws(draws, tmp_path / "draws.parquet")
    write_draws(draws, tmp_path / "again.parquet")
    found = read_draws(tmp_path / "draws.parquet")
    assert found.values == pytest.approx(draws.values, rel=1e-5)
    assert (found.made_by, found.seconds) == (draws.made_by, 61.0)
    assert (tmp_path / "draws.parquet").read_bytes() == (tmp_path / "again.parquet").read_bytes()


def test_a_stale_table_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    assert stale(Draws({}, digests(), 0.0)) is None
    told = stale(Draws({}, {**digests(), "tlt": "older", "code": "older"}, 0.0))
    assert (
        told
        == "code, ledgers/tlt.yaml changed since the draws were made; make them anew with --anew"
    )


def test_the_draws_that_are_there_fit_their_size_and_name_known_quantities():
    path = FOLDER / "conditioned.parquet"
    if not path.exists():
        pytest.skip("no draws are there yet")
    assert path.stat().st_size < 300_000
    draws = read_draws(path)
    for paper in PAPERS:
        assert len(draws.of(paper)) >= 300 or not draws.of(paper), paper
        known = {*read_ledger(paper).descriptors}
        known |= {f"{row}/{i + 1}" for row in predict.PAPERS[paper].ROWS for i in range(9)}
        assert {name for of, _, name in draws.values if of == paper} <= known


def test_gains_are_of_kept_draws_and_no_descriptor_is_scored(
    conditioned: ModuleType, a_paper: str, monkeypatch
):
    monkeypatch.setattr(condition, "LEAST_KEPT", 6)
    for name, value in (("PAPERS", predict.PAPERS), ("read_ledger", condition.read_ledger)):
        monkeypatch.setattr(conditioned, name, value)
    draws = made(a_paper, 64)
    found = kept(draws, a_paper)
    todo = conditioned.gains_to_do(draws, 4)
    assert [task.number for task in todo[:3]] == [
        *found.draws[:2],
        0,
    ]  # in turns with the board's sets
    assert {task.number for task in todo} == {*found.draws[:4], *range(5)}
    assert all(
        set(task.rows) == {"spec-rlhfuse"} for task in todo
    )  # a descriptor uses up the other
    *_, draws = extend(draws, todo, condition.elements, 1)
    (gain,) = conditioned.gains(draws)
    sets = condition.read_ledger(a_paper).sample(64)
    values = [1 + sets[draw]["share"] - 0.7 for draw in found.draws[:4]]
    assert gain.draws == len([d for d in found.draws if d in {*found.draws[:4], 1, 2, 3, 4}])
    if gain.draws == 4:
        assert gain.interval == pytest.approx(
            (np.quantile(values, 0.1), np.quantile(values, 0.9)), rel=1e-4
        )
    assert conditioned.gains_to_do(draws, 4) == []
    fewer = {
        key: value
        for key, value in draws.values.items()
        if key != (a_paper, found.draws[1], "spec-rlhfuse/1")
    }
    (again,) = conditioned.gains_to_do(Draws(fewer, {}, 0.0), 4)  # what was interrupted goes on
    assert again.number == found.draws[1]


def test_the_page_says_what_was_used_and_what_is_contradicted(
    conditioned: ModuleType, a_paper: str, monkeypatch
):
    for name, value in (("PAPERS", predict.PAPERS), ("read_ledger", condition.read_ledger)):
        monkeypatch.setattr(conditioned, name, value)
    draws = made(a_paper, 32)
    *_, draws = extend(draws, conditioned.gains_to_do(draws, 3), condition.elements, 1)
    page = conditioned.page(draws)
    assert "`share`: §1" in page and "not used" in page
    assert "`level` (1; §3): §1 has another." in page
    assert "`spec-rlhfuse`" in page and "`spec-2x`" not in page


def test_a_gain_of_two_figures_is_compared_as_their_ratio(conditioned: ModuleType):
    published = {name: bound for name, bound, *_ in conditioned.gains_of("areal")}
    assert published["areal-interrupt-1p5b/1 : 2"].value == pytest.approx(231 / 207)
    assert published["areal-hours-1p5b/2 : 1"].value == pytest.approx(33.6 / 14.8)
    assert "areal-fig4-1p5b-16k-areal/4 : areal-fig4-1p5b-16k-verl/4" in published
    at = {"areal-interrupt-1p5b/1": {3: 2.0, 4: 6.0}, "areal-interrupt-1p5b/2": {3: 1.0}}
    assert conditioned.gain_at(at, "areal-interrupt-1p5b/1", "areal-interrupt-1p5b/2") == [2.0]


def test_without_draws_the_command_says_how_to_make_some(
    conditioned: ModuleType, tmp_path: Path, capsys
):
    import typer

    with pytest.raises(typer.Exit):
        conditioned.main(0, 0, 1, math.inf, False, tmp_path)
    assert "has no draws; make some with --draws 300 --predicted 8" in capsys.readouterr().err
