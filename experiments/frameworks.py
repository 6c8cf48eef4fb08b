"""The table of open RL frameworks, executed: writes frameworks.md, its csv and its picture.

    python -m experiments.frameworks              about 20 minutes on two cores; continues where it was stopped
    python -m experiments.frameworks --redraw     the page from the csv
    python -m experiments.frameworks --check      simulates a part again, and compares it with the csv

Every figure of the page is made from the csv.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes

from experiments.framework_runs import (
    BOUND,
    FOLDER,
    FRAMEWORKS,
    HERE,
    WORKLOADS,
    Row,
    Task,
    Workload,
    digest,
    rows_of,
)
from experiments.shared import errors_in_a_line, markdown, write_parts, write_rows
from simrl.errors import InputError
from simrl.show.style import BLACK, FAINT, INK, SERIES, panels, quiet, save
from simrl.study.executors import Processes, each
from simrl.study.model_error import RATIO_ERROR
from simrl.study.progress import compile_kernels, progress_bar

PAGE, TABLE, PICTURE = HERE / "frameworks.md", FOLDER / "frameworks.csv", FOLDER / "frameworks.png"
REFERENCE = "colocated"
KINDS = ("default", "bounded", "best")
WAITING = ("one_step_off", "slime_train_async", "openrlhf")  # for a whole batch, one ahead
WASTED = 0.1  # of the tokens; more is worth a warning
DRIFT = 0.15  # between the samples a second of the window's halves; more is marked
SHORTER = 0.95  # of the data's mean length; less is marked
LABELLED = 0.45  # of the fastest; slower ones have no name in the picture
SLOWEST = ("slime_fully_async", "trl", "open_instruct")  # begin first
CHECKED = [("dense", "colocated"), ("dense", "prime_rl"), ("moe_agents", "one_step_off")]
TEXTS = ("workload", "framework", "kind", "settings", "system", "error")
Table = Mapping[tuple[str, str, str], Row]  # by workload, framework and kind


def main(
    jobs: Annotated[int, typer.Option(min=1, help="simultaneous simulations")] = 2,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="write the page from its csv, without simulating")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="simulate a part again and compare it with the csv")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="only the frameworks at their defaults")
    ] = False,
    page: Annotated[Path, typer.Option(help="the page to renew")] = PAGE,
    table: Annotated[Path, typer.Option(help="its csv; the picture goes beside it")] = TABLE,
    keep: Annotated[Path, typer.Option(help="where what was simulated is kept")] = HERE.parent
    / "results"
    / "frameworks",
) -> None:
    with errors_in_a_line("frameworks"):
        if check:
            require_equal(read_rows(table), simulated(CHECKED, jobs, False, None))
            print(
                f"Equal: the defaults of {len(CHECKED)} of the csv's {len(read_rows(table))} rows"
            )
            return
        if not redraw:
            tasks = list(product(WORKLOADS, FRAMEWORKS))
            write_rows(simulated(tasks, jobs, not defaults, keep / digest()), table)
        rows = read_rows(table)
        save(picture(rows), table.with_suffix(".png"))
        write_parts(page, parts_of(rows))
    print(f"Written: {page}, {table} and the picture beside it")


def simulated(
    wanted: Sequence[tuple[str, str]], jobs: int, search: bool, keep: Path | None
) -> list[Row]:
    """Return the rows of these frameworks on these workloads, in their order."""
    compile_kernels()
    order = sorted(
        range(len(wanted)),
        key=lambda i: (wanted[i][1] not in SLOWEST, not wanted[i][0].endswith("agents"), i),
    )
    tasks = [Task(Workload(wanted[i][0]), wanted[i][1], search, keep) for i in order]
    done: dict[int, list[Row]] = {}
    with progress_bar() as progress, Processes(jobs) as pool:
        bar = progress.add_task("frameworks simulated", total=len(tasks))
        for i, rows in each(rows_of, tasks, pool if jobs > 1 else None):
            done[order[i]] = rows
            progress.advance(bar)
    return [row for i in sorted(done) for row in done[i]]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the csv; a cell that is no text is a number, or None."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; run without --redraw and --check")
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {key: value if key in TEXTS else number(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def number(text: str) -> Any:
    return {"": None, "True": True, "False": False}.get(text) if text in ("", "True", "False") else float(text)  # fmt: skip


def require_equal(kept: Sequence[Row], rows: Sequence[Row]) -> None:
    """Raise `InputError` for the first figure that differs from the kept rows."""
    by_key = {place(row): row for row in kept}
    for row in rows:
        other = by_key[place(row)]
        for key, value in row.items():
            if key in TEXTS or not isinstance(value, float | int):
                continue
            if float(f"{float(value):.5g}") != other[key]:
                raise InputError(
                    f"{row['framework']} on {row['workload']} ({row['kind']}): {key} is {value:.5g}, the csv has {other[key]}"
                )


def place(row: Row) -> tuple[str, str, str]:
    return row["workload"], row["framework"], row["kind"]


def parts_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the parts of the page by name."""
    table = {place(row): row for row in rows}
    parts = {
        "frameworks": listed_frameworks(),
        "short": [f"- {point}" for point in in_short(table)],
        "summary": summary_table(table),
        "own": own_table(table),
        "tried": [tried(rows)],
    }
    for workload in WORKLOADS:
        parts[f"{workload}-default"] = workload_table(table, workload, "default")
        for kind in KINDS[1:]:
            parts[f"{workload}-{kind}"] = workload_table(table, workload, kind)
    return parts


def listed_frameworks() -> list[str]:
    heads = (
        *("framework", "trainer", "recipe", "whose rule", "default bound on staleness, its key"),
        "running responses at a sync",
    )
    return markdown(
        heads,
        [(f.name, f.mode, f"`{f.system}`", f.source, f.bound, f.sync) for f in FRAMEWORKS.values()],
    )


def figures(table: Table, workload: str, kind: str) -> dict[str, Row]:
    """Return the rows with figures of a workload, by framework."""
    rows = {name: table.get((workload, name, kind)) for name in FRAMEWORKS}
    return {name: row for name, row in rows.items() if row and not row.get("error")}


def fastest(rows: Mapping[str, Row]) -> tuple[str, Row]:
    name = max(rows, key=lambda name: float(rows[name]["samples_per_s"]))
    return name, rows[name]


def level_with_fastest(rows: Mapping[str, Row]) -> list[str]:
    """Return the frameworks within simrl's error of the fastest, the fastest first."""
    least = fastest(rows)[1]["samples_per_s"] / (1 + RATIO_ERROR)
    level = [name for name, row in rows.items() if row["samples_per_s"] > least]
    return sorted(level, key=lambda name: -rows[name]["samples_per_s"])


def over(row: Row, other: Row) -> float:
    """Return the ratio of the samples a second."""
    return float(row["samples_per_s"] / other["samples_per_s"])


def times(ratio: float) -> str:
    return f"{'≈' if abs(ratio - 1) < RATIO_ERROR else ''}{ratio:.2f}×"


def speed(row: Row, rows: Mapping[str, Row], first: Row) -> str:
    """Return samples a second and the ratio to the reference, bold if level with the fastest."""
    text = f"{row['samples_per_s']:.3g} ({times(over(row, first))})"
    return f"**{text}**" if any(row is rows[name] for name in level_with_fastest(rows)) else text


def marks(row: Row) -> str:
    """Return ↑ for staleness that had not settled, ~ for a rate that still moved, ‹ for responses
    shorter than the data's."""
    return (
        ("" if row["settled"] else "↑")
        + ("~" if abs(row["drift"] - 1) > DRIFT else "")
        + ("‹" if row["length_share"] < SHORTER else "")
    )


def workload_table(table: Table, workload: str, kind: str) -> list[str]:
    if not any((workload, name, kind) in table for name in FRAMEWORKS):
        return ["Not searched: `python -m experiments.frameworks` without `--defaults` does."]
    rows = figures(table, workload, kind)
    first = table[workload, REFERENCE, "default"]
    heads = [
        *("framework", "split", "samples/s (× colocated)", "staleness: mean / p99 / worst"),
        *("GPUs idle", "thrown away", "GPU-h a 1,000", *(["set"] if kind != "default" else [])),
    ]
    lines = []
    for name, framework in FRAMEWORKS.items():
        row = rows.get(name)
        if row is None:
            reason = (table.get((workload, name, kind)) or {"error": "not simulated"})["error"]
            lines.append([framework.title, "", reason, *[""] * (len(heads) - 3)])
            continue
        split = f"{row['rollout_gpus']:.0f}:{row['train_gpus']:.0f}"
        ages = (row["stale_mean"], row["stale_p99"], row["off_policyness_max"])
        lines.append(
            [
                framework.title,
                "shared" if row["colocated"] else split,
                f"{speed(row, rows, first)} {marks(row)}".strip(),
                "{:.2f} / {:.0f} / {:.0f}".format(*ages),
                f"{row['idle']:.0%}",
                f"{row['dropped_share']:.0%}",
                f"{row['gpu_hours_per_1k_samples']:.2f}",
                *([settings_of(row)] if kind != "default" else []),
            ]
        )
    return markdown(heads, lines)


def settings_of(row: Row) -> str:
    """Return the keys that differ from the defaults; the split has a column of its own."""
    chosen = json.loads(row["settings"])
    words = [
        f"`{key}={json.dumps(value)}`" for key, value in chosen.items() if key != "rollout_share"
    ]
    return ", ".join(words) or "defaults"


def summary_table(table: Table) -> list[str]:
    """Return × over the colocated trainer: at defaults → within the bound → without."""
    lines = []
    for name, framework in FRAMEWORKS.items():
        line = [framework.title]
        for workload in WORKLOADS:
            first = table[workload, REFERENCE, "default"]
            rows = [figures(table, workload, kind).get(name) for kind in KINDS]
            line.append(
                " → ".join(f"{over(row, first):.2f}{marks(row)}" if row else "–" for row in rows)
            )
        lines.append(line)
    return markdown(("framework", *WORKLOADS.values()), lines)


def own_table(table: Table) -> list[str]:
    workloads = [w for w in WORKLOADS if any(key[0] == w and key[2] == "own" for key in table)]
    lines = []
    for name, framework in FRAMEWORKS.items():
        rows = [(table.get((w, name, "own")), table[w, name, "default"]) for w in workloads]
        if framework.preset:
            words = ", ".join(f"`{key}: {value}`" for key, value in framework.preset.items())
            figured = [
                f"{own['samples_per_s']:.3g} ({times(over(own, plain))})"
                if own and not own.get("error")
                else (own or {"error": "–"})["error"]
                for own, plain in rows
            ]
            lines.append([framework.title, words, *figured])
    return markdown(("framework", "its constants", *(WORKLOADS[w] for w in workloads)), lines)


def tried(rows: Sequence[Row]) -> str:
    counts = [row["tried"] for row in rows if row["kind"] == "best" and row["tried"]]
    if not counts:
        return "Only the defaults are simulated in this table so far."
    return (
        f"In all, {sum(counts):,.0f} runs were tried, {min(counts):.0f} to {max(counts):.0f} of a "
        "framework on a workload; one without such keys has one."
    )


def in_short(table: Table) -> Iterator[str]:
    """Yield what follows from the tables, in sentences with their figures."""
    at, bounded = (
        {w: figures(table, w, kind) for w in WORKLOADS} for kind in ("default", "bounded")
    )
    leads = []
    for w, rows in at.items():
        name, row = fastest(rows)
        leads.append(
            f"{FRAMEWORKS[name].title} ({WORKLOADS[w].lower()}, {over(row, rows[REFERENCE]):.1f}×, "
            f"worst staleness {row['off_policyness_max']:.0f}, {row['dropped_share']:.0%} thrown away)"
        )
    yield (
        f"**At their defaults** the fastest trainers are {'; '.join(leads)}. "
        "Defaults differ most in the staleness that they allow and in the responses under way: compare rows of equal staleness."
    )
    if all(bounded.values()):
        leads = [
            f"{', '.join(FRAMEWORKS[name].title for name in level_with_fastest(rows))} "
            f"({WORKLOADS[w].lower()}, {over(fastest(rows)[1], at[w][REFERENCE]):.1f}×)"
            for w, rows in bounded.items()
        ]
        yield (
            f"**With no token older than {BOUND} batches** and tuned, the fastest are {'; '.join(leads)}. "
            "Those named together are level."
        )
        gains = sorted(
            (over(row, at[w][name]), name, w)
            for w, rows in bounded.items()
            for name, row in rows.items()
            if name in at[w] and at[w][name]["off_policyness_max"] <= BOUND
        )
        most, name, w = gains[-1]
        yield (
            "**Set the keys before you change the framework.** Where the defaults keep that bound, a framework's own keys gain "
            f"{gains[len(gains) // 2][0]:.2f}× in the median and up to {most:.1f}× "
            f"({FRAMEWORKS[name].title}, {WORKLOADS[w].lower()})."
        )
    ahead = [
        f"{max(over(rows[name], rows[REFERENCE]) for name in WAITING):.2f}× ({WORKLOADS[w].lower()})"
        for w, rows in at.items()
    ]
    yield (
        "**One batch ahead is little where the tail decides**: trainers that wait for a whole batch "
        f"({', '.join(FRAMEWORKS[name].title for name in WAITING)}) have at most {', '.join(ahead)} at their defaults."
    )
    wasted = [
        (row["dropped_share"], name, w)
        for w, rows in at.items()
        for name, row in rows.items()
        if row["dropped_share"] > WASTED
    ]
    if wasted:
        share, name, w = max(wasted)
        names = ", ".join(dict.fromkeys(FRAMEWORKS[name].title for _, name, _ in wasted))
        yield (
            f"**Watch what is thrown away.** {names} throw away more than {WASTED:.0%} of their tokens at their "
            f"defaults, up to {share:.0%} ({FRAMEWORKS[name].title}, {WORKLOADS[w].lower()}); its trained responses have "
            f"{at[w][name]['length_share']:.0%} of the data's mean length. Long responses become too old first: "
            "that is a bias of the data, not only a cost. Put fewer under way, or give the trainer more GPUs."
        )


def picture(rows: Sequence[Row]) -> Any:
    """Return the picture: samples a second against the worst staleness, defaults hollow, the best settings filled."""
    table = {place(row): row for row in rows}
    figure, axes = panels(
        "Samples a second against the oldest token trained: defaults (hollow), within the bound and without one (filled)",
        rows=2, height_in=9.0,
    )  # fmt: skip
    names = dict.fromkeys(framework.name for framework in FRAMEWORKS.values())
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        for kind in KINDS:
            for name, row in figures(table, workload, kind).items():
                colour = colours[FRAMEWORKS[name].name]
                look = {"facecolors": "none" if kind == "default" else colour, "edgecolors": colour}
                ax.scatter(row["off_policyness_max"], row["samples_per_s"], s=34, alpha=0.9, **look)
        label(ax, figures(table, workload, "default"))
        ax.axvline(BOUND, color=FAINT, linewidth=0.8, linestyle=":")
        ax.set_xscale("symlog", linthresh=8, linscale=1.6)
        ax.set_xticks([0, 1, 2, 4, 8, 16], ["0", "1", "2", "4", "8", "16"])
        ax.set_xlim(-0.7, 60)
        ax.set_ylim(bottom=0)
        ax.set_title(WORKLOADS[workload], fontsize="medium", color=BLACK)
        ax.set_xlabel("worst staleness [batches]")
        ax.set_ylabel("trained samples/s")
        quiet(ax, "both", labelsize="small")
    return figure


def label(ax: Axes, rows: Mapping[str, Row]) -> None:
    """Name the faster points, each label above the one below it."""
    top = fastest(rows)[1]["samples_per_s"]
    free: dict[float, float] = {}  # the lowest place for a label, by the worst staleness
    for name in sorted(rows, key=lambda name: float(rows[name]["samples_per_s"])):
        age, rate = rows[name]["off_policyness_max"], rows[name]["samples_per_s"]
        if rate < LABELLED * top:
            continue
        at = max(rate, max((y for x, y in free.items() if abs(x - age) < 0.6 * age), default=0.0))
        free[age] = at + 0.035 * top
        ax.annotate(
            FRAMEWORKS[name].title.replace("`", ""), (age, rate), xytext=(age + (0.15 if age < 8 else 0.08 * age), at),
            fontsize=6.5, color=INK, va="center",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(typer.run(main))
