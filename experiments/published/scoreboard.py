"""The predictions of `experiments.reproduce` as a page: scoreboard.md, and pictures drawn like the papers' in figures/.

    python -m experiments.reproduce --samples 16 -o board.json                  (long)
    python experiments/published/scoreboard.py board.json --figures        the page, and every picture anew
    python experiments/published/scoreboard.py board.json                  the page, with the pictures that are there
    python experiments/published/scoreboard.py --figure areal-5c           one picture, without a page

Sentences are made from the figures beside them. Every picture takes less than a minute on one core.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import figures_areal
import figures_rhymerl
import figures_specactor
import figures_tlt
import typer
from drawing import Bench, Draw, save, share

from experiments.reproduce.board import (
    board,
    bound_text,
    covered_words,
    hits_of,
    number,
    span,
    totals,
)
from experiments.reproduce.score import published_rows
from experiments.shared import errors_in_a_line, markdown
from simrl.errors import InputError
from simrl.files import write_whole_file

HERE = Path(__file__).resolve().parent
CAPTIONS = "captions.json"
BEFORE = HERE / "before.csv"  # the predictions of the board before
# Constants and rules that were changed in between, by paper.
_HOST = "a pass of the host takes the preset's {pass_s} ms and {each_s} µs a sequence, for {old} ms and nothing"
_VLLM = _HOST.format(pass_s="1.3 (1.8 with tensor parallelism)", each_s="76", old="2 to 2.5")
SINCE = {
    "AReaL": _HOST.format(pass_s="0.66", each_s="40", old="2")
    + "; the baseline has CUDA graphs and SGLang's scheduler; four batches at once in training runs; Sync.AReaL is η 0",
    "SpecActor": f"{_VLLM}; the ladder rates all drafters in turns; drafters load, prefill and send messages",
    "RhymeRL": f"{_VLLM}, launches without CUDA graphs 0.55 ms a layer for 0.35; sub-batches of whole prompts",
    "TLT": "the baseline's pass takes the preset's 0.66 ms and 40 µs a sequence, for 0.6 ms and nothing; the drafter's "
    "training by its shapes",
    "verl's documentation": _VLLM,
    "RollPacker": _VLLM,
}
PARTS = (figures_areal, figures_specactor, figures_rhymerl, figures_tlt)
FIGURES: dict[str, Draw] = {name: draw for part in PARTS for name, draw in part.FIGURES.items()}

Entry = Mapping[str, Any]
PAPERS = {
    "AReaL": "areal",
    "SpecActor": "spec",
    "RhymeRL": "rhyme",
    "TLT": "tlt",
    "verl's documentation": ("verl", "weight"),
    "RollPacker": "rollpacker",
}
MOVES = 0.1  # a relative half-width up to which open inputs move an element little
TIE = 0.02  # published values so near to each other have no order
MOVED = 0.05  # a prediction that changed by more has moved
LEVEL = 0.01  # predicted ones so near are level
MOST_LEVELS = 6  # runs in a cell

# Rows whose inputs their source prints: phases of other runs, an accept length, a batch, a tree.
GIVEN_THEIR_PHASES = ("verl-", "tlt-sd-", "tlt-topk8")
# Rows whose elements are of several quantities and have no order.
SEVERAL_QUANTITIES = ("step/",)
# Rows that are to be compared with each other, element by element: one quantity of several systems or settings.
FAMILIES = (
    ("areal-fig4-1p5b-16k-areal", "areal-fig4-1p5b-16k-verl"),
    ("areal-fig4-7b-16k-areal", "areal-fig4-7b-16k-verl"),
    ("verl-sync-32", "verl-async-32"),
    ("verl-sync-64", "verl-async-64"),
    ("verl-sync-32", "verl-sync-64"),
    ("verl-async-32", "verl-async-64"),
    (
        "rhyme-e2e-8k-verl",
        "rhyme-e2e-16k-verl",
        "rhyme-e2e-8k-areal1",
        "rhyme-e2e-16k-areal1",
        "rhyme-e2e-8k-areal8",
        "rhyme-e2e-16k-areal8",
    ),
    ("rhyme-abl-pipe-math", "rhyme-abl-2tier-math", "rhyme-abl-spec-math"),
    ("rhyme-abl-pipe-code", "rhyme-abl-2tier-code", "rhyme-abl-spec-code"),
    ("rhyme-accept-low", "rhyme-accept-high"),
    ("rhyme-rollout-share-math", "rhyme-rollout-share-code"),
    ("spec-e2e-best", "spec-e2e-others"),
    ("tlt-sd-bs1-v48", "tlt-sd-bs8-v16", "tlt-sd-bs8-v64", "tlt-sd-bs32-v16"),
)
# Reading of a miss, by the prefix of the row's name and the side of the prediction. Not measured.
MEANINGS = {
    ("areal-fig4", "high"): (
        "The level of Fig. 4 is a quarter of the paper's own Fig. 5c and Table 1 at the same size, so its "
        "unit is in doubt; only its slopes and AReaL over verl can be compared."
    ),
    ("areal-eta", "high"): (
        "All bounds are predicted too fast, the synchronous one most: host time or MFU, since the length "
        "alone does not explain it ([predictions with the paper's length](given.md))."
    ),
    ("areal-hours", "low"): (
        "Their updates take longer than the sum of the stated phases, most of all in the synchronous systems,"
        " so time between phases is missing."
    ),
    ("areal-interrupt", "low"): (
        "The row is about the ratio of its two elements; the level depends on a roofline's decode times."
    ),
    ("areal-dynbatch", "low"): "The lower GPU efficiency of small micro-batches is not simulated.",
    ("spec-idle", "low"): (
        "With a few hundred responses nearly every worker has one near the cap, so all end together; an idle "
        "share of half needs systematic differences between workers."
    ),
    ("spec-rollout", "low"): (
        "Decoupled drafting gains less here than in the paper: drafters take GPUs, so each verifier has more "
        "requests, and at these batches the cost cancels the gain of drafts."
    ),
    ("spec-e2e", "low"): (
        "As the rollouts: a smaller gain of decoupled drafting lowers all that is built on it."
    ),
    ("spec-abl", "low"): (
        "See the paper's rollouts: the gain of decoupling is missing from the first step on."
    ),
    ("rhyme-rollout", "low"): (
        "Training takes more of the predicted step than of theirs: a higher MFU, or slower generation, than assumed."
    ),
    (
        "rhyme-idle",
        "low",
    ): "Their workers ended more unevenly than with lengths from one distribution.",
    ("rhyme-migr", "low"): (
        "Lengths as stable from epoch to epoch as Table 2's ranks require have few outliers."
    ),
    (
        "rhyme-spec-peak",
        "high",
    ): "Drafts are too good or too cheap: host time of drafting, or the length of hits.",
    (
        "rhyme-batch",
        "high",
    ): "Drafts are too good or too cheap: host time of drafting, or the length of hits.",
    ("tlt-sd", "high"): (
        "Trees are too cheap: a round's host time, or the verification of a tree against as many plain tokens."
    ),
    ("tlt-topk8", "high"): "The accept length is stated here, so the time of a round is too short.",
    ("verl-sync", "low"): (
        "All runs have the lengths of the asynchronous one on 32 GPUs, and the page says that lengths differ; generation is a "
        "roofline's, up to twice too fast for the page's runs that are not scored as well."
    ),
    (
        "verl-async",
        "low",
    ): "The trainer hardly waits for groups here; the causes of its wait are an open input.",
    ("rhyme-e2e", "low"): (
        "Training takes so much of a step here that a faster rollout soon waits for it; where it is a small "
        "part, and a worker has few responses at a time, such gains result ([map](rhymerl_map.md))."
    ),
    ("rhyme-abl-pipe", "low"): (
        "One worker's long responses fill its KV cache here, so that plain ranking groups lose; with few responses a "
        "worker they gain 1.3 to 1.4 times ([map](rhymerl_map.md))."
    ),
    ("rhyme-pipe-peak", "low"): "As the ablation.",
    ("rhyme-abl-2tier", "high"): (
        "Two tiers recover the loss of plain ranking groups here; the product of both is nearer to the published one."
    ),
    ("rhyme-2tier-peak", "high"): "As the ablation.",
    ("rhyme-abl-spec", "low"): "With faster rollouts a step waits for training.",
    (
        "tlt-e2e",
        "low",
    ): "Rollout is a smaller part of the step than theirs: longer responses, or faster training.",
    ("weight-sync-30b", "low"): (
        "Buckets avoid the broadcasts; the loading cost of each of 18,867 tensors is an open input."
    ),
    ("weight-sync-7b", "high"): (
        "15 GB in 0.02 s exceed a link's bandwidth: only a part of the transfer can have been timed."
    ),
}


class Board(NamedTuple):
    """The output of `experiments.reproduce -o`: its rows, the number of drawn sets of inputs, and the version of simrl (None in
    old boards)."""

    entries: Sequence[Entry]
    samples: int
    simrl_version: str | None = None


class Orders(NamedTuple):
    """Pairs of different published values, by the predicted order."""

    right: int
    level: int
    reversed: tuple[str, ...]


def main(
    results: Annotated[
        Path | None,
        typer.Argument(help="the board that `python -m experiments.reproduce -o` wrote"),
    ] = None,
    figure: Annotated[
        list[str] | None, typer.Option(help=f"draw this one; of {', '.join(FIGURES)}")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures", help="draw all of them")] = False,
    folder: Annotated[
        Path, typer.Option(help="where the page is, and its pictures in figures/")
    ] = HERE,
) -> None:
    with errors_in_a_line("scoreboard"):
        found = read_board(results) if results else None
        entries = found.entries if found else []
        wanted = list(FIGURES) if figures else figure or []
        draw(wanted, entries, folder / "figures")
        if found:
            page = scoreboard(found, read_captions(folder / "figures"))
            with write_whole_file(folder / "scoreboard.md") as temporary:
                temporary.write_text(page, encoding="utf-8")
        elif not wanted:
            raise InputError(
                "give a board (python -m experiments.reproduce -o board.json), or --figure NAME"
            )


def read_board(path: Path) -> Board:
    """Read a board; missing rows count as not predicted. Raise `InputError` for an invalid file, or one without intervals."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found, samples = {entry["id"]: entry for entry in data["rows"]}, int(data["samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: no board ({error}); write one with python -m experiments.reproduce -o {path}"
        ) from error
    if not samples:
        raise InputError(
            f"{path}: samples is 0, so no row has an interval; draw some with --samples 16"
        )
    missing = [row for row in published_rows() if row not in found]
    return Board([*found.values(), *board(missing, {})], samples, data.get("simrl_version"))


def draw(names: Sequence[str], entries: Sequence[Entry], folder: Path) -> None:
    bench = Bench(entries)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in FIGURES:
            raise InputError(f"{name}: no such figure; there are {', '.join(FIGURES)}")
        drawn = FIGURES[name](bench)
        save(drawn.figure, folder / f"{name}.png")
        captions = read_captions(folder) | {name: {"title": drawn.title, "says": drawn.says}}
        (folder / CAPTIONS).write_text(
            json.dumps(captions, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(f"{name}: {drawn.says}")


def read_captions(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / CAPTIONS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def scoreboard(found: Board, captions: Mapping[str, Mapping[str, str]]) -> str:
    entries, version = (
        found.entries,
        f", by simrl {found.simrl_version}" if found.simrl_version else "",
    )
    return "\n".join(
        [
            "# Published results, predicted\n",
            "Made by `python experiments/published/scoreboard.py board.json --figures`, from the predictions of "
            "`python -m experiments.reproduce -o board.json`. [How to read it](../../docs/reproduce.md). A row is one "
            "published result, predicted from the inputs that its paper states and from ranges of the open ones; nothing is "
            "fitted to an "
            "outcome. *Predicted* is at the middle of the ranges, *interval* over it and "
            f"{found.samples} drawn sets of inputs{version}; a row is covered if all its elements lie in their intervals. "
            "*Levels*, beside a ratio: the seconds a step of the runs behind it (and of its rollout), at the middle.\n",
            *in_short(entries),
            *goals(entries),
            *moved(entries),
            *tables(entries),
            *not_predicted(entries),
            *misses(entries),
            *pictures(captions),
        ]
    )


def in_short(entries: Sequence[Entry]) -> Iterator[str]:
    found, sums = orders(entries), totals(entries)
    pairs = found.right + found.level + len(found.reversed)
    error = (
        "no figure is predicted"
        if sums["median_error"] is None
        else f"the median error is {sums['median_error']:.0%}"
    )
    yield "## In short\n"
    yield (
        f"**Orders and levels.** Of {pairs} pairs of systems or settings with different published values, "
        f"{found.right} are predicted in the published order, {found.level} level and {len(found.reversed)} reversed; but "
        f"{sums['covered_share'] or 0:.0%} of the figures lie in their intervals, and {error}.\n".replace(
            "%", " %"
        )
    )
    yield (
        "**A miss is as often due to inputs as to schedules.** Papers leave open their batch, their lengths and their "
        "engine settings; simulated maps show where the gains of RhymeRL ([map](rhymerl_map.md)) and SpecActor "
        "([map](specactor_map.md)) result and where they are lost.\n"
    )


def goals(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the table of the project's goals and the board's values."""
    predicted = [e for e in entries if e["predicted"] is not None]
    covered = [e for e in predicted if all(hits_of(e))]
    sums = totals(entries)
    stated = [e for e in predicted if max(scored(e, "half_width"), default=math.inf) <= MOVES]
    near = [e for e in stated if max(map(abs, scored(e, "error"))) <= 0.1]
    given = [e for e in predicted if e["id"].startswith(GIVEN_THEIR_PHASES)]
    errors = [abs(error) for e in given for error in scored(e, "error")]
    found = orders(entries)
    ratios = [e for e in predicted if is_ratio(e["id"])]
    sided = [
        e
        for e in ratios
        if all(same_side(e, i) for i, value in enumerate(e["predicted"]) if value is not None)
    ]
    width, error = sums["median_half_width"], sums["median_error"]
    reached = f"{'none' if width is None else share(width)}; the median error at the middle is "
    pairs = found.right + found.level + len(found.reversed)
    rows = [
        (
            "rows covered: 90 % or more",
            f"{percent(len(covered), len(entries))} of all ({len(covered)} of {len(entries)}), "
            f"{percent(len(covered), len(predicted))} of the {len(predicted)} that are predicted; "
            f"{share(sums['covered_share'] or 0)} of all {sums['elements']} elements",
        ),
        (
            "median half-width: 15 % or less",
            "nothing is predicted" if error is None else reached + share(error),
        ),
        (
            "rows given what their source prints of other phases (verl's page, TLT's Table 2): within 10 %",
            f"{sum(error <= 0.1 for error in errors)} of {len(errors)} elements{errors_of(given)}"
            "; AReaL's, given the length that its figures come to: [given.md](given.md)",
        ),
        (
            f"rows that open inputs move little (half-width up to {100 * MOVES:.0f} %): within 10 %",
            f"{len(near)} of {len(stated)}{errors_of(stated)}",
        ),
        (
            "orders of systems and settings: all right",
            f"{found.right} of {pairs} pairs right, {found.level} predicted level, {len(found.reversed)} reversed",
        ),
        (
            "ratios on the right side of 1",
            f"{len(sided)} of {len(ratios)}"
            + "".join(f"; not {name(e)}" for e in ratios if e not in sided),
        ),
    ]
    yield from ("## Goals\n", *markdown(("goal", "reached"), rows), "")
    if found.reversed:
        yield "Reversed: " + "; ".join(found.reversed) + ".\n"


def errors_of(entries: Sequence[Entry]) -> str:
    said = [
        f"{name(e)} " + "/".join(share(error, "{:+.0%}") for error in scored(e, "error"))
        for e in entries
    ]
    return f": {', '.join(said)}" if said else ""


def percent(part: float, whole: float) -> str:
    return share(part / whole) if whole else "none"


def name(entry: Entry) -> str:
    return f"`{entry['id']}`"


def scored(entry: Entry, key: str) -> list[Any]:
    """Return the values of the predicted elements, without given ones."""
    return [value for value in entry[key] if value is not None]


def is_ratio(row: str) -> bool:
    """Return whether the row compares one system with another."""
    known = published_rows()[row]
    return known.gain or (known.unit == "x" and known.baseline not in ("", "-"))


def same_side(entry: Entry, i: int) -> bool:
    """Return whether the middle prediction of an element is on the published side of 1."""
    bound = published_rows()[entry["id"]].elements[i]
    if bound.low <= 1 <= bound.high:
        return True
    return (entry["predicted"][i] > 1) == (bound.low > 1)


def orders(entries: Sequence[Entry]) -> Orders:
    """Compare all pairs of elements of one quantity under several systems or settings, in a row or in a family of rows."""
    predicted = {e["id"]: e["predicted"] for e in entries if e["predicted"] is not None}
    right, level, wrong = 0, 0, []
    for (row, i), (other, j) in comparable(predicted):
        if predicted[row][i] is None or predicted[other][j] is None:
            continue
        here, there = published_rows()[row].elements[i], published_rows()[other].elements[j]
        if (here.low <= there.high and there.low <= here.high) or abs(
            here.value / there.value - 1
        ) <= TIE:
            continue
        a, b = predicted[row][i], predicted[other][j]
        if abs(a / b - 1) <= LEVEL:
            level += 1
        elif (a > b) == (here.value > there.value):
            right += 1
        else:
            wrong.append(
                f"{element(row, i)} and {element(other, j)} (published {here.value:.3g} and {there.value:.3g}, "
                f"predicted {a:.3g} and {b:.3g})"
            )
    return Orders(right, level, tuple(wrong))


def element(row: str, i: int) -> str:
    several = len(published_rows()[row].elements) > 1
    return f"`{row}`" + (f" no. {i + 1}" if several else "")


def comparable(predicted: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    for row in predicted:
        if not published_rows()[row].quantity.startswith(SEVERAL_QUANTITIES):
            yield from (
                ((row, i), (row, j)) for i, j in combinations(range(len(predicted[row])), 2)
            )
    for family in FAMILIES:
        for row, other in combinations([row for row in family if row in predicted], 2):
            several = published_rows()[row].quantity.startswith(SEVERAL_QUANTITIES)
            count = 1 if several else min(len(predicted[row]), len(predicted[other]))
            yield from (((row, i), (other, i)) for i in range(count))


def moved(entries: Sequence[Entry]) -> Iterator[str]:
    """Compare the predictions with those of the board before (`BEFORE`), element by element."""
    with BEFORE.open(encoding="utf-8", newline="") as file:
        before = {
            (r["row"], int(r["element"])): float(r["predicted"]) for r in csv.DictReader(file)
        }
    lines = []
    for paper, mine in by_paper(entries).items():
        changes, nearer, farther = list[float](), 0, 0
        for entry in mine:
            bounds = published_rows()[entry["id"]].elements
            for i, value in enumerate(entry["predicted"] or ()):
                old = before.get((entry["id"], i))
                if value is None or old is None:
                    continue
                changes.append(value / old - 1)
                if abs(changes[-1]) > MOVED:
                    ends = [min(max(x, bounds[i].low), bounds[i].high) for x in (value, old)]
                    ways = [abs(x - end) for x, end in zip((value, old), ends, strict=True)]
                    nearer, farther = nearer + (ways[0] < ways[1]), farther + (ways[0] > ways[1])
        if changes:
            median = share(sorted(changes, key=abs)[len(changes) // 2], "{:+.0%}")
            figures = (len(changes), median, nearer, farther)
            lines.append([paper, *map(str, figures), SINCE.get(paper, "")])
    if lines:
        yield "## Since the board before\n"
        heads = (
            "paper",
            "figures on both",
            "median move",
            "nearer",
            "farther",
            "changed in between",
        )
        yield from (*markdown(heads, lines), "")
        yield f"*Nearer* and *farther*: from the published figure, of those that moved by more than {MOVED:.0%}.\n"


def tables(entries: Sequence[Entry]) -> Iterator[str]:
    yield "## The board\n"
    for paper, mine in by_paper(entries).items():
        predicted = [e for e in mine if e["predicted"] is not None]
        if not predicted:
            continue
        yield f"### {paper}\n"
        heads = (
            "row", "what, of which setting", "published", "predicted", "interval", "error", "covered", "moved most by", "levels"
        )  # fmt: skip
        yield from (*markdown(heads, list(map(cells, predicted))), "")


def cells(entry: Entry) -> tuple[str, ...]:
    ends = zip(entry["low"], entry["high"], strict=True)
    return (
        name(entry),
        what(entry),
        "<br>".join(map(bound_text, published_rows()[entry["id"]].elements)),
        "<br>".join("given" if value is None else number(value) for value in entry["predicted"]),
        "<br>".join("" if a is None else span(a, b) for a, b in ends),
        "<br>".join("" if error is None else share(error, "{:+.0%}") for error in entry["error"]),
        covered_words(entry),
        ", ".join(f"`{d['input']}` {d['rank_correlation']:+.1f}" for d in entry["drivers"][:2]),
        levels(entry) if is_ratio(entry["id"]) else "",
    )


def levels(entry: Entry) -> str:
    """Return the seconds a step (and of its rollout) of the runs behind a ratio, each named by what tells it apart."""
    runs = entry["levels"]
    alike = {
        key
        for key in {key for level in runs for key in level["run"]}
        if len({json.dumps(level["run"].get(key)) for level in runs}) == 1
    } - {"name"}
    texts = []
    for level in runs:
        kept = {key: value for key, value in level["run"].items() if key not in alike}
        system = kept.pop("name")
        kept = {key: value for key, value in kept.items() if value is not None}
        others = ", ".join(
            f"{key} {number(value) if isinstance(value, float) else value}"
            for key, value in kept.items()
            if not isinstance(value, dict | list)
        )
        of_rollout = f" ({number(level['rollout_s'])})" if level["rollout_s"] else ""
        texts.append(
            f"{system}{f' [{others}]' if others else ''} {number(level['step_s'])} s{of_rollout}"
        )
    return "<br>".join(texts[:MOST_LEVELS]) + ("<br>…" if len(texts) > MOST_LEVELS else "")


def what(entry: Entry) -> str:
    """Return the quantity of a row, its systems, and its source."""
    against = f" over {entry['baseline']}" if entry["baseline"] not in ("", "-") else ""
    system = f"{entry['system']}{against}: " if entry["system"] not in ("", "-") else ""
    setting = f"; {entry['setting']}" if entry["setting"] not in ("", "-", "same") else ""
    return f"{system}{entry['quantity']}{setting} ({entry['source']}; {entry['unit']})".replace(
        "|", "\\|"
    )


def by_paper(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    return {
        paper: mine
        for paper, start in PAPERS.items()
        if (mine := [e for e in entries if e["id"].startswith(start)])
    }


def not_predicted(entries: Sequence[Entry]) -> Iterator[str]:
    left = [e for e in entries if e["predicted"] is None]
    if not left:
        return
    yield "## Not predicted\n"
    for e in left:
        yield f"- {name(e)}, {what(e)}: {(e.get('why_not') or 'it was left out of this run').rstrip('.')}."
    yield ""


def misses(entries: Sequence[Entry]) -> Iterator[str]:
    yield "## What misses mean\n"
    for paper, mine in by_paper(entries).items():
        missed = [e for e in mine if False in (e["covered"] or ())]
        if not missed:
            continue
        yield f"### {paper}\n"
        before = ""
        for e in missed:
            outside = [i for i, hit in enumerate(e["covered"]) if hit is False]
            bounds = published_rows()[e["id"]].elements
            high = sum(e["low"][i] > bounds[i].high for i in outside)
            direction = "high" if high == len(outside) else "low" if high == 0 else "both"
            places = (
                ""
                if len(bounds) == 1
                else f" (of its elements no. {', '.join(str(i + 1) for i in outside)})"
            )
            said = "predicted too " + {"both": "high and too low"}.get(direction, direction)
            nearest = ", ".join(
                f"{number(e['low'][i] if e['low'][i] > bounds[i].high else e['high'][i])} against {bound_text(bounds[i])}"
                for i in outside
            )
            meaning = next(
                (
                    text
                    for (row, way), text in MEANINGS.items()
                    if e["id"].startswith(row) and way == direction
                ),
                "",
            )
            rest = "" if not meaning else " As above." if meaning == before else f" {meaning}"
            before = meaning
            yield f"- {name(e)}{places}: {said}; the nearest end of the interval is {nearest}.{rest}"
        yield ""


def pictures(captions: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    shown = [figure for figure in FIGURES if figure in captions]
    if not shown:
        return
    yield "## Pictures\n"
    yield (
        "Drawn like the papers' figures, from simulation at the middle of the inputs' ranges. Diamonds and dotted lines are "
        "published values, where `published.csv` has them; wide grey lines are the intervals of the board. Not drawn are "
        "figures of learning, of production data (SpecActor's Fig. 6a), of what is an input here (RhymeRL's Fig. 6, TLT's "
        "Fig. 15 and Table 4), and illustrations.\n"
    )
    for figure in shown:
        paper = next(title for title, start in PAPERS.items() if figure.startswith(start))
        yield f"### {paper}, {captions[figure]['title']}\n"
        yield f"![{captions[figure]['title']}, drawn from simulation beside what was published](figures/{figure}.png)\n"
        yield f"{captions[figure]['says']}\n"


if __name__ == "__main__":
    typer.run(main)
