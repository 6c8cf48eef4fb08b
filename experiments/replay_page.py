"""The page of validated replays: which checks hold, and why the others do not.

Invariant: a function of the rows alone, each with its own date, so a page may have rows of several days. A check that fails has
its figure and its cause, by what is left of the error when the seconds of the measured passes are given.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any

from experiments.shared import markdown, markdown_of

BARS = {1: 0.05, 2: 0.10}  # of the makespan, by workers
SAMPLE_BAR, ACCEPTANCE_BAR = 0.08, 0.03
# Cases in which a decision depends on when a response or an update ends: their passes may differ.
TIMED = ("two workers, HistoPipe", "two workers, AReaL", "two workers, Seer")
DRAWN = "what each worker did in time, predicted above measured; below, when each sample finished, predicted over measured"

PAGE_TOP = """# Predicted against measured, on two CPU cores

`python experiments/validate_replay.py --page experiments/replay.md` wrote this page (its rows are in `replay.json`). Profiles
were measured on the machine (`simrl measure`), the schedules simulated with them, and then run by real vLLM engines with a
random model of 4 layers (float32, one thread an engine). Nothing was fitted to a replay. Training and rewards take the
predicted time; errors are scored on the rollout clock, which stops while no worker rolls out. An error is the mean absolute
error of the replays, *worst* the error of the worst one, *repeats* the largest difference between two replays of a schedule.
Other programs share these cores, and other machines share the host: its speed varies by half within seconds. A *near-tie* is
a decision that differs because two events, at most two engine passes apart, changed places; other differing decisions are
real, and listed.

**There are no GPU figures here**: everything on this page is from a CPU. Replays on one H100 (vLLM 0.26) have
[a page of their own](gpu/README.md). Draft models, asynchronous scheduling and real training have not been replayed on a GPU.
"""


@dataclass(frozen=True)
class Check:
    """A bar of a case: the figure as predicted, the largest of two repeats, and predicted again."""

    name: str
    figure: float
    bar: float
    repeats: float
    given: float

    def holds(self, widened: bool = False) -> bool:
        return self.figure <= max(self.bar, self.repeats if widened else 0.0)

    @property
    def holds_given(self) -> bool:
        return self.given <= self.bar

    @property
    def text(self) -> list[str]:
        number = "{:.0f}" if self.name == "decisions" else "{:.1%}"
        if self.name == "acceptance":
            number = "{:.3f}"
        return [number.format(each) for each in (self.figure, self.bar, self.repeats, self.given)]


@dataclass(frozen=True)
class Row:
    """A case with a seed: its replays beside what was predicted, as the page and its JSON have it.

    `replays` have the errors as predicted, the decisions that differ, and the parts of the error
    (`Split.as_json`); `repeats` the largest errors of two replays. `load` is the machine's load, as a
    mean of the minute before and after.
    """

    case: str
    seed: int
    workers: int
    date: str
    load: float
    replays: list[dict[str, Any]]
    repeats: dict[str, float | None]
    others_of_repeats: int  # decisions, of two repeats, beside near-ties
    migrations: int
    acceptance: list[float] | None  # predicted, live
    profile_s: float  # seconds in which its profile was measured, before

    def errors(self, name: str, given: bool = False) -> list[float]:
        every = [(each["given"] if given else each)["errors"][name] for each in self.replays]
        return [error for error in every if error is not None]

    def mean(self, name: str, given: bool = False) -> float | None:
        """Return the mean absolute error; of acceptance, whose replays are draws, the absolute mean."""
        if not (errors := self.errors(name, given)):
            return None
        return abs(mean(errors)) if name == "acceptance_err" else mean(map(abs, errors))

    def real(self, given: bool = False) -> list[int]:
        return [(each["given"] if given else each)["real_differences"] for each in self.replays]

    def of_host(self, name: str) -> list[float]:
        return [each["given"][name] for each in self.replays]

    @property
    def checks(self) -> list[Check]:
        checks = []
        for name, (error, bar) in {
            "makespan": ("makespan_err", BARS[self.workers]),
            "samples": ("sample_mape", SAMPLE_BAR),
            "acceptance": ("acceptance_err", ACCEPTANCE_BAR),
        }.items():
            figure, again = self.mean(error), self.mean(error, given=True)
            if figure is not None and again is not None:
                checks.append(Check(name, figure, bar, self.repeats.get(error) or 0.0, again))
        most, most_given = max(self.real()), max(self.real(given=True))
        return [*checks, Check("decisions", most, 0, self.others_of_repeats, most_given)]

    @property
    def passes(self) -> tuple[int, int]:
        """Passes up to the end of the last trained sample, of all replays: predicted, measured."""
        engines = [engine for each in self.replays for engine in each["given"]["engines"]]
        predicted, measured = (
            sum(e[of]["passes"] for e in engines) for of in ("predicted", "measured")
        )
        return predicted, measured

    def equal_passes(self, parted: str = "parted") -> list[bool]:
        """Return for each replay whether its passes have the predicted work, one by one."""
        return [all(e[parted] is None for e in each["given"]["engines"]) for each in self.replays]

    def cause(self, check: Check) -> str:
        """Return why a check fails, by what is left of it given the seconds of the passes."""
        parted = [each["given"] for each in self.replays if each["given"]["real_differences"]]
        if check.name == "decisions" and parted and all(g.get("parts_at_near_tie") for g in parted):
            return "times: given the speed, decisions part at a near-tie, and the others follow it"
        if not check.holds_given:
            return "open: it is left when the speed is given"
        if check.name == "acceptance":
            return "sampling: on the responses that the replay generated, it is as counted"
        if check.name == "decisions":
            return (
                "times: with the measured seconds of each pass, no decision differs but near-ties"
            )
        slower = [1 / (1 + error) - 1 for error in self.of_host("passes_err")]
        shares = self.of_host("core_share")
        return (
            f"speed: the passes' seconds are {min(slower):+.0%} to {max(slower):+.0%} off the profile, with a core for "
            f"{min(shares):.0%} to {max(shares):.0%} of the time"
        )


TIMES = (
    "case", "seed", "rollout, s", "makespan error", "worst", "repeats", "given the speed", "samples' ends", "worst", "repeats",
    "given the speed", "latency", "measured", "load", "had a core",
)  # fmt: skip
COUNTED = (
    "case", "seed", "passes, predicted / measured", "near-ties", "real differences", "of repeats", "near-ties, given the speed",
    "real ones", "migrations predicted", "acceptance, predicted / live",
)  # fmt: skip


def times(row: Row) -> list[str]:
    """Return a row of the table of times, in the order of `TIMES`; "repeats" is the largest difference of two replays."""
    makespan, samples = row.repeats.get("makespan_err"), row.repeats.get("sample_mape")
    return [
        row.case,
        str(row.seed),
        f"{mean(each['rollout_s'] for each in row.replays):.1f}",
        _percent(row.mean("makespan_err")),
        _percent(max(row.errors("makespan_err"), key=abs), "+"),
        _percent(makespan),
        _percent(row.mean("makespan_err", given=True)),
        _percent(row.mean("sample_mape")),
        _percent(max(row.errors("sample_mape"))),
        _percent(samples),
        _percent(row.mean("sample_mape", given=True)),
        _percent(row.mean("latency_mape")),
        row.date,
        f"{row.load:.1f}",
        f"{mean(row.of_host('core_share')):.0%}",
    ]


def counted(row: Row) -> list[str]:
    """Return a row of the table of passes and decisions, in the order of `COUNTED`."""
    equal, (predicted, measured) = row.equal_passes(), row.passes
    return [
        row.case,
        str(row.seed),
        f"{measured:,}, equal one by one" if all(equal) else f"{predicted:,} / {measured:,}",
        ", ".join(str(each["near_ties"]) for each in row.replays),
        ", ".join(map(str, row.real())),
        str(row.others_of_repeats),
        ", ".join(str(each["given"]["near_ties"]) for each in row.replays),
        ", ".join(map(str, row.real(given=True))),
        str(row.migrations),
        "" if row.acceptance is None else "{:.3f} / {:.3f}".format(*row.acceptance),
    ]


def page_of(rows: Sequence[Row], noise: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: how many checks hold, and why the others fail; the tables; the pictures of the first seed. `noise` has
    the rows of replays with an engine on one core, and without."""
    failing = [(row, check) for row in rows for check in row.checks if not check.holds()]
    lines = [
        PAGE_TOP,
        f"Host: {platform.machine()}, {os.cpu_count()} cores. {_dates(rows)}",
        "",
        *_in_short(rows),
        "",
        "## Errors and their parts",
        "",
        *markdown(
            (
                "error, predicted / measured - 1",
                "n",
                "median",
                "worst",
                "given the speed: median",
                "worst",
            ),
            [
                _parts_of(rows, *each)
                for each in product((1, 2), ("makespan_err", "sample_mape"))
                if any(row.workers == each[0] for row in rows)
            ],
        ),
        "",
        "## Checks that fail as they are, and why",
        "",
        *markdown(
            (
                "case",
                "seed",
                "check",
                "figure",
                "bar",
                "of two replays",
                "given the speed",
                "cause",
            ),
            [
                [row.case, row.seed, check.name, *check.text, row.cause(check)]
                for row, check in failing
            ],
        ),
        "",
        "## Times",
        "",
        *markdown(TIMES, list(map(times, rows))),
        "",
        "## Passes and decisions",
        "",
        *markdown(COUNTED, list(map(counted, rows))),
        "",
    ]
    if noise:
        lines += ["## An engine on one core, and free to move", "", *markdown_of(noise), ""]
    lines += ["## Decisions that were taken otherwise", ""]
    # A difference has others in its wake, so the first ones of each replay say most.
    for row in rows:
        texts = [text for each in row.replays for text in each["decisions"][:2]]
        lines += [f"- {row.case}, seed {row.seed}: {text}" for text in dict.fromkeys(texts)]
    lines += ["", "## Decisions that differ given the speed, too", ""]
    for row in rows:
        texts = [text for each in row.replays for text in each["given"]["decisions"][:2]]
        lines += [f"- {row.case}, seed {row.seed}: {text}" for text in dict.fromkeys(texts)]
    lines += ["", "## Pictures, predicted above measured", ""]
    shown = dict.fromkeys(row.case for row in rows)
    return (
        "\n".join([*lines, *(f"![{case}: {DRAWN}]({picture_name(case)})\n" for case in shown)])
        + "\n"
    )


def _dates(rows: Sequence[Row]) -> str:
    dates, loads = sorted(row.date for row in rows), [row.load for row in rows]
    shares = [share for row in rows for share in row.of_host("core_share")]
    return (
        f"Measured from {dates[0]} to {dates[-1]} (UTC), each row at its time below, with profiles that were measured "
        f"for {' or '.join(sorted({f'{row.profile_s:g}' for row in rows}))} s before. Other programs ran on these cores: the "
        f"machine's load was {min(loads):.1f} to {max(loads):.1f}, and an engine's thread had a core for {min(shares):.0%} to "
        f"{max(shares):.0%} of its passes."
    )


def _in_short(rows: Sequence[Row]) -> list[str]:
    checks = [check for row in rows for check in row.checks]
    steady = [row for row in rows if row.case not in TIMED]
    equal = [ok for row in steady for ok in row.equal_passes("parted_given")]
    passes = sum(row.passes[1] for row in steady)
    live = [row for row in rows if row.acceptance is not None and "forced" not in row.case]
    lines = [
        f"Of {len(checks)} checks (makespan within 5 % on one worker and 10 % on two, samples' ends within 8 %, acceptance "
        f"within 0.03, no decision otherwise but near-ties), **{sum(c.holds() for c in checks)} hold as they are**, "
        f"**{sum(c.holds(widened=True) for c in checks)}** where the largest difference of two replays of a schedule is the "
        f"bar if that is larger, and **{sum(c.holds_given for c in checks)} given the measured speed**.",
        "",
        "*Given the measured speed* means: predicted again with the seconds that the passes and loads of this replay took, but "
        "with no decision of it. The figure is conditional on the measured speed. It says what simrl's schedule and engine do, "
        "and nothing about the profile or the host. Where one engine makes exactly the predicted passes, it is 0 by "
        "construction, and the passes are the check: which requests decode in each, and how many tokens of contexts it "
        f"computes. Where no decision depends on time, all passes are as predicted in {sum(equal)} of {len(equal)} replays "
        f"({passes:,} passes); of live drafts, they are predicted on the responses that the replay generated.",
    ]
    if live:
        off, again = (
            max(row.mean("acceptance_err", given) or 0.0 for row in live) for given in (False, True)
        )
        lines += [
            "",
            f"Acceptance of live drafts: up to {off:.3f} off, and {again:.3f} on the responses that the replay generated; "
            "forced, it is what was simulated, draw by draw.",
        ]
    return lines


def _parts_of(rows: Sequence[Row], workers: int, error: str) -> list[str]:
    name = {"makespan_err": "makespan", "sample_mape": "samples' ends (mean size)"}[error]
    chosen = [row for row in rows if row.workers == workers]
    sides = [
        [each for row in chosen for each in row.errors(error, given)] for given in (False, True)
    ]
    sign = "+" if error == "makespan_err" else ""
    figures = [_percent(of(side), sign) for side in sides for of in (median, partial(max, key=abs))]
    return [f"{name}, {('one worker', 'two workers')[workers - 1]}", str(len(sides[0])), *figures]


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value * 100:{sign}.1f} %"


def file_name(case: str) -> str:
    """Return a case's name as a part of a file's name."""
    return case.replace(", ", "_").replace(" ", "_").replace("-", "_")


def picture_name(case: str) -> str:
    """Return the name of the file with a case's picture."""
    return f"replay_{file_name(case)}.png"
