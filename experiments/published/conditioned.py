"""Gains of the papers, predicted from inputs under which the baseline does what its paper says: conditioned.md.

    python experiments/published/conditioned.py                                the page, from the draws that are there
    python experiments/published/conditioned.py --draws 300 --predicted 8      more draws, and gains of more that are kept

The draws are in conditioned.parquet; making them anew (`--anew`) takes the minutes that the page says. `--minutes` ends it
sooner, with what is there by then, and the command goes on from there. docs/reproduce.md says how draws are kept.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from scoreboard import Orders, is_ratio, orders, percent

from experiments.reproduce.board import bound_text, number, span
from experiments.reproduce.condition import (
    Draws,
    Kept,
    conditioned,
    describe,
    digests,
    elements,
    extend,
    keep,
    read_draws,
    stale,
    write_draws,
)
from experiments.reproduce.ledger import Descriptor, read_ledger
from experiments.reproduce.predict import PAPERS, Task
from experiments.reproduce.score import Bound, published_rows
from experiments.shared import errors_in_a_line, markdown
from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.validation import in_words

HERE = Path(__file__).resolve().parent
SETS = 4  # of the board, beside the middle
LOW, HIGH = 0.1, 0.9  # ends of an interval, as shares of the kept draws
SHOWN_INPUTS = 4
# Gains that are published as two figures: an element over another, or under it where the figures are times.
PAIRS = (
    *((f"areal-eta/{i}", "areal-eta/1") for i in range(2, 8)),
    *(
        (f"areal-fig4-{size}-16k-areal/{i}", f"areal-fig4-{size}-16k-verl/{i}")
        for size in ("1p5b", "7b")
        for i in range(1, 5)
    ),
    *(
        (f"areal-hours-{size}/{i}", f"areal-hours-{size}/1")
        for size in ("1p5b", "7b")
        for i in (2, 3)
    ),
    *((f"areal-interrupt-{size}/1", f"areal-interrupt-{size}/2") for size in ("1p5b", "7b")),
    *(("rollpacker-7b-8k/1", f"rollpacker-7b-8k/{i}") for i in (2, 3)),
)
# Rows that share runs are predicted together; all others of a paper are, too.
PARTS = {
    "rhymerl": (("rhyme-e2e", "rhyme-abl", "rhyme-pipe", "rhyme-2tier"),),
    "specactor": (("spec-e2e", "spec-rollout"), ("spec-abl",)),
    "areal": (
        ("areal-eta", "areal-hours-1p5b"),
        ("areal-fig4-1p5b",),
        ("areal-fig4-7b",),
        ("areal-interrupt",),
    ),
    "tlt": (("tlt-e2e", "tlt-rollout-case"),),
}
# Not predicted: no gain, and in no pair.
LEFT_OUT = ("rhyme-store", "rhyme-migr-math", "rhyme-migr-code", "tlt-graph-memory")


class Gain(NamedTuple):
    """A gain: as published, at the middle and the board's sets, and at the kept draws."""

    row: str
    name: str
    published: Bound
    prior: tuple[float, float] | None
    interval: tuple[float, float]
    middle: float  # the median of the kept draws
    draws: int

    @property
    def covered(self) -> bool:
        return _overlap(self.interval, self.published)

    @property
    def covered_before(self) -> bool:
        return self.prior is not None and _overlap(self.prior, self.published)

    @property
    def half_width(self) -> float:
        return (self.interval[1] - self.interval[0]) / 2 / abs(self.middle)


def main(
    draws: Annotated[
        int, typer.Option(min=0, help="draws of each paper's inputs whose baseline is run")
    ] = 0,
    predicted: Annotated[
        int, typer.Option(min=0, help="kept draws of each paper whose gains are predicted")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    minutes: Annotated[float, typer.Option(help="at most, for each of the two")] = math.inf,
    anew: Annotated[bool, typer.Option("--anew", help="forget the draws that are there")] = False,
    folder: Annotated[
        Path, typer.Option(help="where conditioned.parquet and conditioned.md are")
    ] = HERE,
) -> None:
    with errors_in_a_line("conditioned"):
        table = folder / "conditioned.parquet"
        found = Draws({}, digests(), 0.0) if anew else read_draws(table)
        old = stale(found)
        if old is not None and (draws or predicted):
            raise InputError(f"{table}: {old}")
        for todo_of, count, work in (
            (baselines, draws, describe),
            (gains_to_do, predicted, elements),
        ):
            if todo := todo_of(found, count):
                for more in extend(found, todo, work, jobs, time.monotonic() + 60 * minutes):
                    found = more
                    write_draws(found, table)
        if not found.values:
            raise InputError(f"{table}: has no draws; make some with --draws 300 --predicted 8")
        if old is not None:
            print(f"conditioned.parquet: {old}")
        with write_whole_file(folder / "conditioned.md") as temporary:
            temporary.write_text(page(found), encoding="utf-8")
        print(in_short(found))


def baselines(draws: Draws, count: int) -> list[Task]:
    """Return the draws of each paper whose baseline is still to be run."""
    return [
        Task(paper, {}, draw, inputs)
        for paper in conditioned()
        for draw, inputs in list(enumerate(read_ledger(paper).sample(count)))[1:]
        if any((paper, draw, name) not in draws.values for name in read_ledger(paper).descriptors)
    ]


def gains_to_do(draws: Draws, count: int) -> list[Task]:
    """Return the predictions that are still to be made: draw by draw of all papers, two that are kept to each of the board's
    sets, so that whenever they end all papers have about as many."""
    kept = {paper: of.draws[:count] for paper, of in kept_of(draws).items()}
    turns = []
    for i in range(max(math.ceil(count / 2), SETS + 1) if count else 0):
        both = {paper: [*numbers[2 * i : 2 * i + 2]] for paper, numbers in kept.items()}
        turns += [
            (paper, numbers[k])
            for k in (0, 1)
            for paper, numbers in both.items()
            if k < len(numbers)
        ]
        turns += [(paper, i) for paper in PAPERS if i == 0 or (paper in kept and i <= SETS)]
    todo = (task for paper, draw in dict.fromkeys(turns) for task in _tasks(paper, draw))
    left = (task._replace(rows=_left(draws, task)) for task in todo)
    return [task for task in left if task.rows]


def _left(draws: Draws, task: Task) -> dict[str, int]:
    """Return the rows of a task that are not in the table yet."""
    return {
        row: n
        for row, n in task.rows.items()
        if (task.paper, task.number, f"{row}/1") not in draws.values
    }


def _tasks(paper: str, draw: int) -> list[Task]:
    """Return tasks for all rows that are gains, or in an order, or no statement on the baseline."""
    inputs, parts = read_ledger(paper).sample(draw)[draw], [*PARTS.get(paper, ()), ("",)]
    found: dict[tuple[str, ...], dict[str, int]] = {part: {} for part in parts}
    for row in PAPERS[paper].ROWS:
        if row not in {*LEFT_OUT, *used(paper)}:
            part = next(part for part in parts if row.startswith(part))
            found[part][row] = len(published_rows()[row].elements)
    return [Task(paper, rows, draw, inputs) for rows in found.values() if rows]


def used(paper: str) -> dict[str, str]:
    """Return the rows, and elements (ROW/2), that descriptors of a paper use up, with the descriptors' names."""
    return {
        row: name
        for name, of in read_ledger(paper).descriptors.items()
        if not of.unused
        for row in of.rows
    }


def all_used() -> set[str]:
    return {row for paper in conditioned() for row in used(paper)}


def predictions(draws: Draws, paper: str, numbers: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return for each element the predictions at those of the draws that are there; of a row that a descriptor uses up, what
    the baseline's run has."""
    found: dict[str, dict[int, float]] = {}
    wanted, rows = (
        set(numbers),
        {name: f"{row}/1" for row, name in used(paper).items() if "/" not in row},
    )
    for (of, draw, name), value in draws.values.items():
        if of == paper and draw in wanted and not math.isnan(value):
            found.setdefault(rows.get(name, name), {})[draw] = value
    return found


def kept_of(draws: Draws) -> dict[str, Kept]:
    return {paper: keep(paper, draws.values, draws.of(paper)) for paper in conditioned()}


def gains(draws: Draws) -> list[Gain]:
    """Return all gains of papers that are conditioned, but those that a descriptor uses up."""
    found = []
    for paper, kept in kept_of(draws).items():
        given, before = (
            predictions(draws, paper, kept.draws),
            predictions(draws, paper, range(SETS + 1)),
        )
        for name, published, first, second in gains_of(paper):
            values, prior = gain_at(given, first, second), gain_at(before, first, second)
            if values:
                low, middle, high = map(float, np.quantile(values, (LOW, 0.5, HIGH)))
                row, ends = (
                    first.rpartition("/")[0],
                    (min(prior), max(prior)) if len(prior) > 1 else None,
                )
                found.append(Gain(row, name, published, ends, (low, high), middle, len(values)))
    return found


def gains_of(paper: str) -> Iterator[tuple[str, Bound, str, str | None]]:
    """Yield the name of each gain of a paper, its published value, its element, and the element it is over, if not a ratio by
    itself."""
    for row in PAPERS[paper].ROWS:
        if row in LEFT_OUT or row in used(paper):
            continue
        if is_ratio(row):
            yield row, published_rows()[row].elements[0], f"{row}/1", None
        for first, second in PAIRS:
            if first.rpartition("/")[0] == row:
                short = second.rpartition("/")[2] if second.startswith(f"{row}/") else second
                yield f"{first} : {short}", _ratio(first, second), first, second


def gain_at(
    predicted: Mapping[str, Mapping[int, float]], first: str, second: str | None
) -> list[float]:
    """Return the gain at each draw at which its elements are predicted."""
    values, over = predicted.get(first, {}), predicted.get(second or "", {})
    if second is None:
        row = published_rows()[first.rpartition("/")[0]]
        return [row.comparable(value) for value in values.values()]
    return [value / over[draw] for draw, value in values.items() if draw in over]


def _ratio(first: str, second: str) -> Bound:
    a, b = (
        published_rows()[row].elements[int(i) - 1]
        for row, _, i in (name.rpartition("/") for name in (first, second))
    )
    return Bound(a.low / b.high, a.high / b.low)


def _overlap(interval: tuple[float, float], published: Bound) -> bool:
    return interval[0] <= published.high and published.low <= interval[1]


def entries(draws: Draws, numbers: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return for `orders` an entry of each row: its elements at the median of these draws of its paper."""
    found = []
    for paper in PAPERS:
        values = predictions(draws, paper, numbers[paper])
        for row in PAPERS[paper].ROWS:
            names = [f"{row}/{i + 1}" for i in range(len(published_rows()[row].elements))]
            if any(name in values for name in names):
                middles = [
                    median(values[name].values()) if name in values else math.nan for name in names
                ]
                found.append(
                    {
                        "id": row,
                        "predicted": [None if math.isnan(value) else value for value in middles],
                    }
                )
    return found


def both_orders(draws: Draws) -> tuple[Orders, Orders, Orders]:
    """Return the orders at the middle of the ranges; at the median of the kept draws (the middle where a paper is not
    conditioned); and of the latter those between elements of which no descriptor uses up either."""
    middle = entries(draws, dict.fromkeys(PAPERS, (0,)))
    kept = {paper: of.draws for paper, of in kept_of(draws).items()}
    given = entries(draws, {paper: kept.get(paper, [0]) for paper in PAPERS})
    scored, taken = [], all_used()
    for entry in given:
        predicted = [
            None if {entry["id"], f"{entry['id']}/{i}"} & taken else value
            for i, value in enumerate(entry["predicted"], start=1)
        ]
        scored.append({**entry, "predicted": predicted})
    return orders(middle), orders(given), orders(scored)


def in_short(draws: Draws) -> str:
    found, (before, given, scored) = gains(draws), both_orders(draws)
    if not found:
        return "No gains are predicted yet; predict some with --predicted 8."
    rows = {gain.row for gain in found}
    missing = {
        first.rpartition("/")[0] for paper in conditioned() for _, _, first, _ in gains_of(paper)
    } - rows
    whole = [row for row in rows if all(gain.covered for gain in found if gain.row == row)]
    covered, counts = sum(gain.covered for gain in found), [gain.draws for gain in found]
    prior = [gain.prior for gain in found if gain.prior]

    def said(of: Orders) -> str:
        return f"{of.right} of {of.right + of.level + len(of.reversed)}"

    def before_that() -> str:
        if not prior:
            return ""
        widths = [(high - low) / (low + high) for low, high in prior]
        return (
            f"Before, the lowest to the highest of the middle and up to {SETS} sets cover "
            f"{percent(sum(gain.covered_before for gain in found), len(prior))} of the figures, with a median half-width of "
            f"{percent(median(widths), 1)}. "
        )

    return (
        f"Of {len(rows)} gain rows, {percent(len(whole), len(rows))} are covered, all their figures by the 10 to 90 % of the "
        f"kept draws; of {len(found)} figures {percent(covered, len(found))}, with a median half-width of "
        f"{percent(median(gain.half_width for gain in found), 1)}. {before_that()}"
        f"Orders: {said(given)} pairs are right, {said(before)} at the middle of the ranges, {said(scored)} where no "
        f"descriptor uses up either. Gains are of {min(counts)} to {max(counts)} kept draws."
        + (f" Not predicted yet: {', '.join(sorted(missing))}." if missing else "")
    )


def page(draws: Draws) -> str:
    minutes = draws.seconds / 60
    lines = [
        "# Published gains, conditioned on the papers' baselines\n",
        "Made by `python experiments/published/conditioned.py`. Of inputs drawn from the ledgers' ranges, those are kept under "
        "which a short run of the baseline does what the paper says of it, and gains are predicted from what is kept: "
        "[how](../../docs/reproduce.md#conditioned-on-the-baseline). No gain, order or hour was used, and what was used is "
        f"not scored. The table of draws took {minutes:.0f} minutes of one core.\n",
        "## In short\n",
        in_short(draws) + "\n",
        "## What the baselines do\n",
        "*Alone* is the share of the draws that meet a statement within its tolerance; *widened* is by how much its tolerance "
        "was multiplied until enough draws were kept. Ranges are the 10 to 90 % of all draws and of those that are kept.\n",
        *markdown(
            (
                "paper",
                "statement",
                "stated",
                "tolerance",
                "all draws",
                "alone",
                "widened",
                "kept draws",
            ),
            [
                cells
                for paper, kept in kept_of(draws).items()
                for cells in _descriptors(draws, paper, kept)
            ],
        ),
        "",
        *_contradictions(),
        *_inputs(draws),
        "## Gains\n",
        "*Before* is the lowest to the highest of the middle and the board's sets. Figures of a row are compared element by "
        "element: `areal-eta/2 : 1` is the second over the first.\n",
        *markdown(
            ("gain", "published", "before", "conditioned", "covered", "half-width", "draws"),
            list(map(_cells, gains(draws))),
        ),
        "",
        *_order_lines(draws),
    ]
    return "\n".join(lines)


def _descriptors(draws: Draws, paper: str, kept: Kept) -> Iterator[tuple[str, ...]]:
    every = draws.of(paper)
    for name, of in read_ledger(paper).descriptors.items():
        values = {draw: draws.values[paper, draw, name] for draw in every}
        able = [value for value in values.values() if not math.isnan(value)]
        alone = sum(of.misfit(value) <= 1 for value in able)
        widened = "not used" if of.unused else f"{kept.factors[name]:.2g} x"
        tolerance = f"{of.tolerance:g}" if of.share else f"{100 * of.tolerance:.0f} %"
        yield (
            f"{paper} ({len(kept.draws)} of {len(every)} draws kept)",
            f"`{name}`: {of.source}",
            _stated(of),
            tolerance,
            _middle_range(able),
            percent(alone, len(every)),
            widened,
            _middle_range([values[draw] for draw in kept.draws]),
        )


def _stated(of: Descriptor) -> str:
    if of.value is not None:
        return number(of.value)
    return bound_text(
        Bound(-math.inf if of.low is None else of.low, math.inf if of.high is None else of.high)
    )


def _middle_range(values: Sequence[float]) -> str:
    return span(*map(float, np.quantile(values, (LOW, HIGH)))) if values else "none"


def _contradictions() -> Iterator[str]:
    yield "Statements that their own paper contradicts condition nothing:\n"
    for paper in conditioned():
        for name, of in read_ledger(paper).descriptors.items():
            if of.unused:
                yield f"- {paper}, `{name}` ({_stated(of)}; {of.source}): {of.unused}."
    yield ""


def _inputs(draws: Draws) -> Iterator[str]:
    """Yield the inputs that the kept draws move most: a range by where their median lies among all draws, choices by the one
    whose share changes most."""
    yield "Inputs that conditioning moves most, each from all draws to those that are kept:\n"
    for paper, kept in kept_of(draws).items():
        if not kept.draws:
            continue
        ledger, sets = read_ledger(paper), read_ledger(paper).sample(max(draws.of(paper)))
        moved = []
        for name in ledger.open:
            every, own = ([sets[draw][name] for draw in of] for of in (draws.of(paper), kept.draws))
            if choices := ledger.inputs[name].choices:
                shares = {
                    choice: (every.count(choice) / len(every), own.count(choice) / len(own))
                    for choice in choices
                }
                choice = max(shares, key=lambda choice: abs(shares[choice][1] - shares[choice][0]))
                before, after = shares[choice]
                moved.append(
                    (
                        abs(after - before),
                        f"`{name}` {in_words(choice)} {percent(before, 1)} → {percent(after, 1)}",
                    )
                )
            else:
                before, after = median(every), median(own)
                place = sum(x < after for x in every) / len(every)
                moved.append((abs(place - 0.5), f"`{name}` {number(before)} → {number(after)}"))
        yield (
            f"- {paper}: "
            + ", ".join(text for _, text in sorted(moved, reverse=True)[:SHOWN_INPUTS])
            + "."
        )
    yield ""


def _cells(gain: Gain) -> tuple[str, ...]:
    return (
        f"`{gain.name}`",
        bound_text(gain.published),
        span(*gain.prior) if gain.prior else "",
        span(*gain.interval),
        "yes" if gain.covered else "no, before yes" if gain.covered_before else "no",
        f"{100 * gain.half_width:.0f} %",
        str(gain.draws),
    )


def _order_lines(draws: Draws) -> Iterator[str]:
    _, given, _ = both_orders(draws)
    yield "## Orders\n"
    yield (
        f"At the median of the kept draws {given.right} pairs are right, {given.level} level and {len(given.reversed)} reversed"
        + (": " + "; ".join(given.reversed) if given.reversed else "")
        + ". A paper without descriptors is at the middle of its ranges.\n"
    )


if __name__ == "__main__":
    typer.run(main)
