"""The page of claims: its list, its verdicts, and a claim that takes no time."""

import csv
import json
from pathlib import Path

import pytest

from experiments import seeds
from experiments.claims.claim import Claim, Figure
from experiments.seeds import CLAIMS, Row, Task, entry, run, sets, total_of, write_page
from simrl.errors import InputError

LIST = Path(__file__).parents[3] / "shared" / "reference" / "claims.csv"
HOLDS, FAILS = Figure({"ratio": 1.2}, True), Figure({"ratio": 0.9}, False)


def row(*figures: Figure | str) -> Row:
    return Row("rh-2", figures, {})


def test_every_claim_of_the_list_is_simulated():
    assert len(CLAIMS) == 48
    if not LIST.is_file():
        pytest.skip("the list of claims is not beside this checkout (../shared/reference)")
    with LIST.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["id"] for line in lines] == list(CLAIMS)
    determined = [line["id"] for line in lines if line["determined by the text"].startswith("yes")]
    assert determined == [name for name, claim in CLAIMS.items() if claim.undetermined is None]
    assert len(determined) == 33


def test_every_claim_is_shown_in_words():
    assert list(seeds.words()) == list(CLAIMS)
    assert seeds.words()["tl-3"].startswith("Table 2: the speed-up of tree drafting falls")
    assert seeds.words()["sp-2"] == "§2.2: twice the rollout GPUs gain little"


def test_an_undetermined_claim_is_in_no_total_and_shows_where_it_turns():
    walked = Row("rh-1", (HOLDS,), {"32": HOLDS, "256": FAILS, "512": "no memory"})
    assert walked.walk == "32 yes, 256 no, 512 none"
    assert list(walked.changes) == ["32", "64", "128", "256", "512"]
    assert total_of([walked, Row("rh-2", (HOLDS,), {})]) == (
        "1 of 1 claims that the texts determine agree, 0 disagree, 0 open; 1 are not determined."
    )


def test_a_page_keeps_the_lines_of_claims_that_are_not_simulated(tmp_path: Path):
    page = tmp_path / "page.md"
    parts = ("total", "claims", "apart", "causes", "settings")
    page.write_text("".join(f"<!-- {part} -->\n<!-- /{part} -->\n" for part in parts))
    walked = Row("rh-1", (HOLDS,), {"32": HOLDS})
    write_page(page, [Row("rh-2", (FAILS,), {}), Row("sp-2", (HOLDS,), {}), walked], 0)
    assert (
        "1 of 2 claims that the texts determine agree, 1 disagree, 0 open; 1 are"
        in page.read_text()
    )
    write_page(page, [Row("rh-2", (HOLDS,), {})], 0)
    text = page.read_text()
    assert "2 of 2 claims that the texts determine agree, 0 disagree, 0 open; 1 are" in text
    assert "| rh-2 | disagrees" not in text and "| 32 yes |" in text


def test_every_input_by_which_a_claim_may_turn_is_one_of_its_ledger():
    for name, claim in CLAIMS.items():
        if claim.undetermined is not None:
            assert claim.undetermined.input in sets(claim.ledger, 0)[0], name


@pytest.mark.parametrize(
    ("figures", "verdict", "share"),
    [
        ((HOLDS, FAILS, FAILS), "agrees", 1 / 3),
        ((FAILS, HOLDS, HOLDS), "open", 2 / 3),
        ((FAILS, FAILS, HOLDS), "disagrees", 1 / 3),
        (("no memory", HOLDS), "open", 1.0),
    ],
)
def test_the_middle_decides_and_the_range_only_opens(
    figures: tuple[Figure | str, ...], verdict: str, share: float
):
    assert row(*figures).verdict == verdict
    assert row(*figures).share == pytest.approx(share)


def test_a_claim_that_does_not_agree_says_why():
    assert entry(row(HOLDS))["cause"] == ""
    assert entry(row(FAILS))["cause"]


def test_a_claim_is_simulated_in_the_papers_setting():
    figure = run(Task(("tl-3",), 0, sets("tlt", 0)[0]))["tl-3"]
    assert isinstance(figure, Figure)
    assert list(figure.values) == ["1", "8", "16", "32"]
    assert figure.agrees


def test_an_impossible_set_of_inputs_costs_only_itself(monkeypatch: pytest.MonkeyPatch):
    def impossible(*_: object) -> Figure:
        raise InputError("it does not fit")

    monkeypatch.setitem(CLAIMS, "tl-3", Claim("tlt", impossible, "", ""))
    assert run(Task(("tl-3",), 0, {})) == {"tl-3": "it does not fit"}


def test_an_unknown_claim_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(seeds.typer.Exit):
        seeds.main(["rh-99"], 0, 1, None, False)
    assert "no claim" in capsys.readouterr().err


def test_rows_are_printed_as_json():
    assert set(json.loads(json.dumps(entry(row(HOLDS))))) == {
        "id",
        "determined",
        "simulated",
        "verdict",
        "share_of_range",
        "cause",
        "by_input",
    }
