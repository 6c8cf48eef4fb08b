"""Claims of the papers that simrl stands on, simulated in each paper's own setting: agrees, disagrees, or open.

Claims that a paper's text determines are scored. The others are shown apart, with the verdict by the input that the text leaves
open, and are in no total.

    python experiments/seeds.py [ID ...] [--samples 4] [--json] [--page experiments/seeds.md]

A claim's figure is simulated at the middle of the inputs that its paper leaves open (`experiments/reproduce/ledgers`), and
at `--samples` points of their ranges. It agrees if the middle does; it is open if the middle does not and at least half of the
points do, or if the middle cannot be simulated; else it disagrees. Where it does not agree, the changes of inputs that the
claim names are simulated, each alone. Nothing is fitted.
"""

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from experiments.claims import areal, others, rhymerl, specactor, tlt
from experiments.claims.claim import Claim, Figure, measured
from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import Inputs, read_ledger
from experiments.shared import AsJson, errors_in_a_line, markdown, write_parts
from simrl.errors import InputError, meant
from simrl.study.executors import Processes, each
from simrl.study.progress import compile_kernels, progress_bar

CLAIMS: dict[str, Claim] = {
    **rhymerl.CLAIMS,
    **specactor.CLAIMS,
    **tlt.CLAIMS,
    **areal.CLAIMS,
    **others.CLAIMS,
}
WORDS = Path(__file__).parent / "claims" / "words.csv"
OPEN_FROM = 0.5  # share of the points from which a claim that the middle does not show is open


class Task(NamedTuple):
    """Claims of one ledger under one set of its inputs; 0 is the middle. `changed` names what is changed: an ablation, or a
    value of an undetermined claim's input."""

    ids: tuple[str, ...]
    number: int
    inputs: Inputs
    changed: str = ""


class Row(NamedTuple):
    """A claim's outcome. `figures` has the figure under each set of inputs, the middle first, or why there is none; `changed`
    the figure under each of `changes`."""

    id: str
    figures: Sequence[Figure | str]
    changed: Mapping[str, Figure | str]

    @property
    def determined(self) -> bool:
        """True if the paper's text determines the claim."""
        return CLAIMS[self.id].undetermined is None

    @property
    def share(self) -> float:
        """The share of the sets of inputs that can be simulated under which the claim holds."""
        able = [figure for figure in self.figures if isinstance(figure, Figure)]
        return sum(figure.agrees for figure in able) / len(able) if able else 0.0

    @property
    def verdict(self) -> str:
        middle = self.figures[0]
        if isinstance(middle, Figure) and middle.agrees:
            return "agrees"
        return "open" if isinstance(middle, str) or self.share >= OPEN_FROM else "disagrees"

    @property
    def cause(self) -> str:
        """Why it does not agree: the ablations, and what they showed."""
        if self.verdict == "agrees":
            return ""
        parts = [CLAIMS[self.id].cause or "not found"]
        if self.determined:
            parts += [f"{name}: {shown(figure)}" for name, figure in self.changed.items()]
        return "; ".join(parts)

    @property
    def changes(self) -> Mapping[str, Mapping[str, Any]]:
        """The changes of the middle to simulate, by name: of a determined claim that does not agree its ablations, of an
        undetermined one the values of its input."""
        claim = CLAIMS[self.id]
        if claim.undetermined is None:
            return {} if self.verdict == "agrees" else claim.ablations
        name = claim.undetermined.input
        return {str(value): {name: value} for value in claim.undetermined.values}

    @property
    def walk(self) -> str:
        """The verdict at each value of an undetermined claim's input, in words."""
        verdicts = {
            value: "none" if isinstance(figure, str) else "yes" if figure.agrees else "no"
            for value, figure in self.changed.items()
        }
        return ", ".join(f"{value} {verdict}" for value, verdict in verdicts.items())


def shown(figure: Figure | str) -> str:
    """Return a figure in words."""
    if isinstance(figure, str):
        return figure
    return ", ".join(f"{name} {value:.3g}" for name, value in figure.values.items())


def sets(ledger: str, samples: int) -> list[Inputs]:
    """Return the middle and the points of a paper's ranges, with the inputs that only claims ask for."""
    own, others_ = (read_ledger(name).sample(samples) for name in (ledger, "claims"))
    return [{**more, **inputs} for inputs, more in zip(own, others_, strict=True)]


def run(task: Task) -> dict[str, Figure | str]:
    """Return the figures of a task's claims."""
    lab, figures = Lab(measured), dict[str, Figure | str]()
    for name in task.ids:
        try:
            figures[name] = CLAIMS[name].figure(lab, task.inputs, task.number == 0)
        except InputError as error:
            figures[name] = str(error)
    return figures


def simulate(
    ids: Sequence[str], samples: int, jobs: int, on_task: Callable[[], None] = lambda: None
) -> list[Row]:
    """Simulate claims, and the ablations of those that do not agree, in up to `jobs` processes."""
    todo = []
    for ledger in dict.fromkeys(CLAIMS[name].ledger for name in ids):
        own = tuple(name for name in ids if CLAIMS[name].ledger == ledger)
        todo += [Task(own, number, inputs) for number, inputs in enumerate(sets(ledger, samples))]
    todo.sort(key=lambda task: task.number)  # the middle takes longest, and goes first
    figures: dict[str, dict[int, Figure | str]] = {name: {} for name in ids}
    with Processes(jobs, stay=True) as pool:
        for i, by_claim in each(run, todo, pool if jobs > 1 else None):
            for name, figure in by_claim.items():
                figures[name][todo[i].number] = figure
            on_task()
        rows = [Row(name, [figures[name][k] for k in sorted(figures[name])], {}) for name in ids]
        # An ablation is of the whole setting, as the middle is; a walk is of the draws'.
        again = [
            Task(
                (row.id,),
                0 if row.determined else 1,
                {**sets(CLAIMS[row.id].ledger, 0)[0], **changed},
                name,
            )
            for row in rows
            for name, changed in row.changes.items()
        ]
        changed_figures: dict[str, dict[str, Figure | str]] = {name: {} for name in ids}
        for i, by_claim in each(run, again, pool if jobs > 1 else None):
            changed_figures[again[i].ids[0]][again[i].changed] = by_claim[again[i].ids[0]]
            on_task()
    return [
        row._replace(changed={name: changed_figures[row.id][name] for name in row.changes})
        for row in rows
    ]


def entry(row: Row) -> dict[str, Any]:
    """Return a row for `json.dumps`."""
    middle = row.figures[0]
    simulated = dict(middle.values) if isinstance(middle, Figure) else middle
    return {
        "id": row.id,
        "determined": row.determined,
        "simulated": simulated,
        "verdict": row.verdict,
        "share_of_range": row.share,
        "cause": row.cause,
        "by_input": row.walk,
    }


HEADS = ("", "claim", "agrees if", "simulated", "verdict", "share of range")
APART = ("", "claim", "not determined", "at the middle", "input", "agrees at")


@cache
def words() -> dict[str, str]:
    """Return each claim in words, behind its section, by id."""
    with WORDS.open(encoding="utf-8", newline="") as file:
        return {
            row["id"]: f"{place(row['section'])}: {row['claim']}" for row in csv.DictReader(file)
        }


def place(section: str) -> str:
    """Return a section as papers are cited: `§7.1`, `Table 2`, `abstract`."""
    return f"§{section}" if section[0].isdigit() else section


def cells(row: Row) -> list[str]:
    """Return the cells of a row."""
    share = f"{row.share:.0%}" if len(row.figures) > 1 else ""
    claim = CLAIMS[row.id]
    return [row.id, words()[row.id], claim.threshold, shown(row.figures[0]), row.verdict, share]


def apart(row: Row) -> list[str]:
    """Return the cells of a row whose claim the text does not determine."""
    undetermined = CLAIMS[row.id].undetermined
    assert undetermined is not None
    return [
        row.id,
        words()[row.id],
        undetermined.why,
        f"{row.verdict}: {shown(row.figures[0])}",
        undetermined.input,
        row.walk,
    ]


def total(verdicts: Sequence[str], undetermined: int) -> str:
    """Return the verdicts of determined claims in words, and the number of the others."""
    counts = {verdict: verdicts.count(verdict) for verdict in ("agrees", "disagrees", "open")}
    return (
        f"{counts['agrees']} of {len(verdicts)} claims that the texts determine agree, {counts['disagrees']} disagree, "
        f"{counts['open']} open; {undetermined} are not determined."
    )


def total_of(rows: Sequence[Row]) -> str:
    """Return the total of rows."""
    scored = [row.verdict for row in rows if row.determined]
    return total(scored, len(rows) - len(scored))


def write_page(page: Path, rows: Sequence[Row], samples: int) -> None:
    """Write the lines of these claims anew; the page keeps the lines of the others."""
    scored = [row for row in rows if row.determined]
    text = page.read_text(encoding="utf-8")
    claims = _lines(text, "claims", {row.id: cells(row) for row in scored})
    others = _lines(text, "apart", {row.id: apart(row) for row in rows if not row.determined})
    causes = {row.id: [row.id, row.verdict, row.cause] for row in scored}
    agree = {name for name, line in claims.items() if line[HEADS.index("verdict")] == "agrees"}
    missed = {k: line for k, line in _lines(text, "causes", causes).items() if k not in agree}
    verdicts = [line[HEADS.index("verdict")] for line in claims.values()]
    parts = {
        "total": [
            total(verdicts, len(others)),
            "",
            f"The middle of the ranges and {samples} points of them.",
        ],
        "claims": markdown(HEADS, list(claims.values())),
        "apart": markdown(APART, list(others.values())),
        "causes": markdown(
            ("claim", "verdict", "cause, and what changed inputs give"), list(missed.values())
        ),
        "settings": markdown(
            ("claim", "simulated setting"), [[k, claim.setting] for k, claim in CLAIMS.items()]
        ),
    }
    write_parts(page, parts)


def _lines(text: str, part: str, new: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the lines of a table of the page by claim, in the claims' order, new ones in place of old ones."""
    _, _, rest = text.partition(f"<!-- {part} -->\n")
    table, _, _ = rest.partition(f"<!-- /{part} -->")
    old = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    lines = {cells_[0]: cells_ for cells_ in old} | dict(new)
    return {name: lines[name] for name in CLAIMS if name in lines}


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="claims; all without any")] = None,
    samples: Annotated[
        int, typer.Option(min=0, max=1024, help="points of the ranges, beside the middle")
    ] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = os.cpu_count()
    or 1,
    page: Annotated[
        Path | None,
        typer.Option(help="a Markdown page whose lines of these claims are written anew"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    with errors_in_a_line("seeds"):
        for name in ids or ():
            if name not in CLAIMS:
                raise InputError(
                    f"{name}: no claim{meant(name, CLAIMS)}; there are {', '.join(CLAIMS)}"
                )
        compile_kernels()
        with progress_bar() as bar:
            task = bar.add_task("sets of inputs", total=None)
            rows = simulate(
                list(dict.fromkeys(ids or CLAIMS)), samples, jobs, lambda: bar.advance(task)
            )
        if page is not None:
            write_page(page, rows, samples)
    if as_json:
        print(json.dumps([entry(row) for row in rows], indent=1))
        return
    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 200)
    for heads, of, shows in ((HEADS, True, cells), (APART, False, apart)):
        some = [row for row in rows if row.determined == of]
        if some:
            table = Table(*heads, box=None)
            for row in some:
                table.add_row(*shows(row))
            console.print(table)
    for row in rows:
        if row.cause and row.determined:
            console.print(f"{row.id}: {row.cause}")
    console.print(total_of(rows))


if __name__ == "__main__":
    typer.run(main)
