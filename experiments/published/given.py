"""AReaL's rows with the response length that the paper's own figures imply: given.md.

    python experiments/published/given.py          (a minute of one core)

Table 1 gives the time of an update of 8,192 responses and Fig. 5c the trained tokens a second of one run: they imply its mean
length. With it, the other figures of these rows are predictions of schedules and step times alone. These predictions are
conditional and not on the board: an outcome is an input here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from drawing import share

from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import read_ledger
from experiments.reproduce.predict import PAPERS
from experiments.reproduce.score import published_rows
from experiments.shared import markdown
from simrl.files import write_whole_file

HERE = Path(__file__).resolve().parent
ETAS = ("0", "1", "2", "4", "8", "16", "∞")
AT_ETA_8 = 4  # of Fig. 5c: the bound of Table 1's run
ROWS = {
    "areal-eta": [f"η {eta}" for eta in ETAS],
    "areal-hours-1p5b": ["AReaL", "verl", "synchronous AReaL"],
}
LENGTH_IS_OF = (
    ("areal-eta", AT_ETA_8),
    ("areal-hours-1p5b", 0),
)  # their product is an input, so their errors are one
UPDATES, SECONDS_AN_HOUR, KILO = 250, 3600, 1000


class Line(NamedTuple):
    """An element of a row."""

    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def implied_tokens(responses: int) -> float:
    """Return the mean response length of the 1.5B run, implied by its published figures."""
    hours = published_rows()["areal-hours-1p5b"].elements[0].low
    tokens_per_s = KILO * published_rows()["areal-eta"].elements[AT_ETA_8].low
    return hours * SECONDS_AN_HOUR / UPDATES * tokens_per_s / responses


def lines() -> tuple[float, dict[str, list[Line]]]:
    """Return the implied length, and each row's elements at it; all other inputs are at the middle."""
    middle = read_ledger("areal").middle
    tokens = implied_tokens(middle["prompts"] * middle["group"])
    lab, inputs = Lab(), {**middle, "mean_tokens": tokens}
    found = {}
    for row, names in ROWS.items():
        predicted = PAPERS["areal"].ROWS[row](lab, inputs)
        published = [bound.low for bound in published_rows()[row].elements]
        found[row] = [Line(*each) for each in zip(names, published, predicted, strict=True)]
    return tokens, found


def page() -> Iterator[str]:
    tokens, found = lines()
    middle = read_ledger("areal").inputs["mean_tokens"]
    yield "# AReaL, given its own lengths\n"
    yield (
        "Made by `python experiments/published/given.py`. Table 1 and Fig. 5c are of one run, and together they imply "
        f"{tokens:,.0f} tokens a response (the ledger has {middle.value:,}, {middle.low:,.0f} to {middle.high:,.0f}). With "
        "that length, and all else at the middle of the ledger, the predictions are as below. An outcome is an input here, so "
        "they are not on [the board](scoreboard.md): they show the errors that remain when the length is known.\n"
    )
    for row, elements in found.items():
        cells = [
            (of.what, f"{of.published:.3g}", f"{of.predicted:.3g}", share(of.error, "{:+.0%}"))
            for of in elements
        ]
        yield from markdown((f"`{row}`", "published", "predicted", "error"), cells)
        errors = [
            abs(line.error) for i, line in enumerate(elements) if (row, i) not in LENGTH_IS_OF
        ]
        within = sum(error <= 0.1 for error in errors)
        yield f"\n{within} of {len(errors)} within 10 %, without the one that gives the length.\n"


def main() -> None:
    with write_whole_file(HERE / "given.md") as temporary:
        temporary.write_text("\n".join(page()), encoding="utf-8")
    sys.stdout.write((HERE / "given.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
