"""The pictures of the report, as plain data that plotly draws.

Invariant: a picture is a pure function of results and of their rows, and shows nothing that is not in them; what comes from
data is escaped, since plotly reads markup in every text. Runs stand in the same order, from above, in every picture of several.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from simrl.gpu_hours import PARTS, Waterfall
from simrl.metrics import window
from simrl.palette import BLACK, BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SAND, SKY, TEAL, VERMILLION, YELLOW
from simrl.plots import BAR_COLORS, KIND_COLORS
from simrl.result import Result
from simrl.timeline import rolls_out, spans

Figure = dict[str, Any]
Row = Mapping[str, Any]
Values = NDArray[Any]

LINE = 26  # characters of a name in a line of it
SMALL = 0.004  # share of the largest bar below which a part is summed up with others
OLDEST = 9  # updates; what is older is counted with it
LENGTH_BINS = 40
MOST_POINTS = 128  # workers of a run that are drawn one by one beside their box
AGE_COLORS = ("#DCEBF7", "#B5D6EE", "#86BDE3", SKY, "#2F8CC4", BLUE, "#005488", "#003B61", "#00263F", BLACK)

# Colour and hatch of every part of the GPU-seconds: those of the timeline where there is such a kind; hatched is waste.
PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "decode": (SKY, ""),
    "prefill": ("#A9D6F5", ""),
    "log_prob": (GREEN, ""),
    "train": (BLUE, ""),
    "small_batches": (SKY, "/"),
    "tail_idle": (VERMILLION, "/"),
    "trainer_wait": (ORANGE, "\\"),
    "other_wait": (FAINT, "\\"),
    "rest_idle": (SAND, "\\"),
    "train_idle": (BLUE, "/"),
    "recompute_reloaded": ("#8A6FB0", ""),
    "recompute_preempted": ("#B39BCB", ""),
    "recompute_moved": ("#6B4C96", ""),
    "recompute_redrafted": ("#D3C4E3", ""),
    "drafts_stood": (TEAL, ""),
    "drafts_wasted": (TEAL, "/"),
    "train_drafter": ("#5F9F9F", ""),
    "load_weights": (YELLOW, ""),
    "publish": (ORANGE, ""),
    "switch": (PURPLE, ""),
    "transfer": (FAINT, ""),
    "dropped": (INK, "x"),
    "duplicates": (BLACK, "/"),
    "ahead": ("#BBBBBB", "."),
    "evaluate": (SAND, ""),
    "checkpoint": (INK, ""),
    "lost": (BLACK, ""),
    "slowed": (BLACK, "."),
    "host": ("#D9D9D9", ""),
    "undivided": ("#CFE6F5", ""),
    "other": (FAINT, "."),
}


def escaped(text: object) -> str:
    """Text in which plotly finds no markup."""
    return html.escape(str(text), quote=False)


def rounded(values: ArrayLike, digits: int = 4) -> list[Any]:
    """To so many significant digits: a picture shows no more, and a file holds no more."""
    array = np.asarray(values, np.float64)
    return [None if not np.isfinite(v) else float(f"{v:.{digits}g}") for v in array.ravel()]


def wrapped(text: str) -> list[str]:
    """A name in lines, broken at its parameters."""
    lines = textwrap.wrap(text.replace("(", "( "), LINE) or [""]
    return [line.replace("( ", "(") for line in lines]


def _label(text: str) -> str:
    return "<br>".join(map(escaped, wrapped(text)))


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What all pictures share."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "hoverlabel": {"align": "left"},
        "legend": {
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        **more,
    }


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with a title and faint lines."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "#E6E6E6",
        "zerolinecolor": FAINT,
        "linecolor": FAINT,
        "automargin": True,
        **more,
    }


class Lines:
    """Where the runs stand from above, a line each, under the names of their variants."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.places: list[float] = []
        self._ticks: list[tuple[float, str]] = []
        line, before = 0.0, None
        several = len({row["variant"] for row in rows}) > 1
        for row in rows:
            if several and row["variant"] != before:
                self._ticks.append((line, f"<b>{_label(row['variant'])}</b>"))
                line += 0.9
            before = row["variant"]
            room = max(1.0, 0.15 + 0.48 * len(wrapped(str(row["system"]))))
            self.places.append(line + (room - 1) / 2)
            self._ticks.append((self.places[-1], _label(str(row["system"]))))
            line += room
        self.count = line

    def axis(self) -> dict[str, Any]:
        return axis(
            tickvals=[place for place, _ in self._ticks],
            ticktext=[text for _, text in self._ticks],
            range=[self.count - 0.4, -0.6],
            fixedrange=True,
            showgrid=False,
            zeroline=False,
        )

    def height(self, each: int = 34, more: int = 70) -> int:
        return int(each * self.count) + more


def speed_figure(rows: Sequence[Row]) -> Figure:
    """Trained samples a second, a bar a run; in words beside it the speed-up over the first system of its variant."""
    lines = Lines(rows)
    systems = list(dict.fromkeys(row["system"] for row in rows))
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "y": lines.places,
                "x": rounded([row["samples_per_s"] for row in rows]),
                "marker": {"color": [BAR_COLORS[systems.index(row["system"]) % len(BAR_COLORS)] for row in rows]},
                "text": [f"{row['speedup_in_variant']:.2f}×" for row in rows],
                "textposition": "outside",
                "cliponaxis": False,
                "width": 0.78,
                "hovertext": [_row_in_words(row) for row in rows],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        ],
        "layout": layout(
            lines.height(),
            xaxis=axis(
                "trained samples a second", rangemode="tozero", range=[0, 1.2 * max(r["samples_per_s"] for r in rows)]
            ),
            yaxis=lines.axis(),
            showlegend=False,
        ),
    }


def _row_in_words(row: Row) -> str:
    name = ", ".join(escaped(part) for part in (row["system"], row["variant"]) if part)
    return (
        f"<b>{name}</b><br>{row['samples_per_s']:.3g} samples/s, {row['speedup_in_variant']:.2f}×"
        f"<br>{row['step_s']:,.1f} s a step"
        f"<br>rollout bubble {row['rollout_bubble']:.0%}, train idle {row['train_idle']:.0%}"
        f"<br>off-policyness {row['off_policyness_mean']:.2f}, at most {row['off_policyness_max']}"
    )


def gpu_seconds_figure(rows: Sequence[Row], falls: Sequence[Waterfall]) -> Figure:
    """GPU-seconds a trained sample by what they went to, a stacked bar a run."""
    lines = Lines(rows)
    totals = [fall.total_gpu_s / fall.samples for fall in falls]
    least = SMALL * max(totals)
    shown = [key for key in PARTS if key == "decode" or any(fall.per_sample[key] >= least for fall in falls)]
    traces = [_part_bar(lines, PARTS[k].words, [f.per_sample[k] for f in falls], totals, PART_LOOKS[k]) for k in shown]
    rest = [sum(fall.per_sample[key] for key in PARTS if key not in shown) for fall in falls]
    if any(value >= least / 2 for value in rest):
        traces.append(_part_bar(lines, "all that is smaller", rest, totals, ("#EEEEEE", "")))
    return {
        "data": traces,
        "layout": layout(
            lines.height(more=110 + 22 * -(-len(traces) // 3)),
            barmode="stack",
            xaxis=axis("GPU-s a trained sample", rangemode="tozero"),
            yaxis=lines.axis(),
        ),
    }


def _part_bar(lines: Lines, words: str, values: list[float], totals: list[float], look: tuple[str, str]) -> Figure:
    color, hatch = look
    filled: dict[str, Any] = {"color": color, "line": {"width": 0.5, "color": PAPER}}
    if hatch:
        filled["pattern"] = {"shape": hatch, "fgcolor": color, "bgcolor": PAPER, "size": 6, "solidity": 0.4}
    return {
        "type": "bar",
        "orientation": "h",
        "name": words,
        "y": lines.places,
        "x": rounded(values),
        "width": 0.78,
        "marker": filled,
        "customdata": [f"{value / total:.1%}" for value, total in zip(values, totals, strict=True)],
        "hovertemplate": f"{words}<br>%{{x:.3g}} GPU-s a sample, %{{customdata}} of the run's<extra></extra>",
    }


def bubble_figure(rows: Sequence[Row], results: Sequence[Result], warmups: Sequence[int]) -> Figure:
    """The idle share of each rollout worker after the warm-up: a box a run, a point a worker where they are not too many."""
    lines = Lines(rows)
    traces = []
    for row, result, warmup, place in zip(rows, results, warmups, lines.places, strict=True):
        names, shares = worker_idle_shares(result, warmup)
        traces.append(
            {
                "type": "box",
                "orientation": "h",
                "x": rounded(shares),
                "y": [place] * len(names),
                "text": names,
                "boxpoints": "all" if len(names) <= MOST_POINTS else "outliers",
                "jitter": 0.6,
                "pointpos": 0,
                "width": 0.7,
                "marker": {"color": VERMILLION, "size": 4, "opacity": 0.6},
                "line": {"color": INK, "width": 1},
                "fillcolor": "rgba(213,94,0,0.15)",
                "name": escaped(row["system"]),
                "hovertemplate": "%{text}: idle %{x:.1%}<extra></extra>",
                "hoverinfo": "x+text",
            }
        )
    return {
        "data": traces,
        "layout": layout(
            lines.height(),
            xaxis=axis("idle share", tickformat=".0%", range=[-0.01, 1.01], zeroline=False),
            yaxis=lines.axis(),
            showlegend=False,
        ),
    }


def worker_idle_shares(result: Result, warmup_steps: int) -> tuple[list[str], NDArray[np.float64]]:
    """Of each rollout worker after the warm-up, as `metrics.rollout_bubble` counts: training and switching (colocated) left
    out. Workers without a second of the rest are left out too."""
    found = spans(result).within(*window(result, warmup_steps))
    seconds = found.ended_s - found.started_s
    kinds = np.array(found.kinds)[found.kind]
    counts = np.isin(kinds, ("rollout", "load_weights", "train_drafter", "idle"))
    whole = np.bincount(found.lane, seconds * counts, len(found.lanes))
    idle = np.bincount(found.lane, seconds * (kinds == "idle"), len(found.lanes))
    chosen = [i for i, lane in enumerate(found.lanes) if rolls_out(lane) and whole[i] > 0]
    return [found.lanes[i].name for i in chosen], idle[chosen] / whole[chosen]


def ages(result: Result, warmup_steps: int) -> tuple[Values, Values, Values]:
    """Of what was trained after the warm-up: the age of each segment's tokens (updates between writing and training), how many
    they are, and which sample's. Tokens that were carried over from an earlier step count like the others."""
    samples, segments, steps = result.samples, result.segments, result.steps
    trained = pc.fill_null(samples.column("trained_step"), -1).to_numpy()
    row = np.searchsorted(samples.column("uid").to_numpy(), segments.column("uid").to_numpy())
    step = trained[row]
    version_of = dict(
        zip(
            steps.column("step").to_pylist()[warmup_steps:],
            steps.column("policy_version").to_pylist()[warmup_steps:],
            strict=True,
        )
    )
    tokens = segments.column("tokens").to_numpy()
    here = np.isin(step, list(version_of)) & (tokens > 0)
    versions = np.array([version_of[k] for k in step[here].tolist()], np.int64)
    return versions - segments.column("policy_version").to_numpy()[here], tokens[here], row[here]


def age_shares(age: Values, weight: Values) -> NDArray[np.float64]:
    """The share of each age, 0 to `OLDEST` and older."""
    counts = np.bincount(np.clip(age, 0, OLDEST), weight, OLDEST + 1)
    return np.asarray(counts / max(counts.sum(), 1), np.float64)


def staleness_figure(rows: Sequence[Row], results: Sequence[Result], warmups: Sequence[int]) -> Figure:
    """The trained tokens by their age in updates, a stacked bar a run."""
    lines = Lines(rows)
    shares = [age_shares(*ages(result, warmup)[:2]) for result, warmup in zip(results, warmups, strict=True)]
    oldest = max((int(np.flatnonzero(share)[-1]) for share in shares if share.any()), default=0)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _age(age),
            "y": lines.places,
            "x": rounded([share[age] for share in shares]),
            "width": 0.78,
            "marker": {"color": AGE_COLORS[age], "line": {"width": 0.5, "color": PAPER}},
            "hovertemplate": f"{_age(age)}: %{{x:.1%}} of the trained tokens<extra></extra>",
        }
        for age in range(oldest + 1)
    ]
    return {
        "data": traces,
        "layout": layout(
            lines.height(more=100),
            barmode="stack",
            xaxis=axis("share of the trained tokens", tickformat=".0%", range=[0, 1.005]),
            yaxis=lines.axis(),
            showlegend=True,
        ),
    }


def _age(age: int) -> str:
    if age == 0:
        return "on-policy"
    return f"{age} update{'s' * (age > 1)} old" + " or more" * (age == OLDEST)


def run_staleness_figure(result: Result, warmup_steps: int) -> Figure:
    """Ages of the tokens of one run, and of its samples by their oldest token."""
    age, tokens, row = ages(result, warmup_steps)
    oldest_of = np.full(result.samples.num_rows, -1, np.int64)
    np.maximum.at(oldest_of, row, age)
    of_samples = oldest_of[oldest_of >= 0]
    by_token, by_sample = age_shares(age, tokens), age_shares(of_samples, np.ones(len(of_samples)))
    last = max((int(np.flatnonzero(s)[-1]) for s in (by_token, by_sample) if s.any()), default=0)
    names = [str(i) + " or more" * (i == OLDEST) for i in range(last + 1)]
    bars = (("tokens", by_token, SKY), ("samples, by their oldest token", by_sample, BLUE))
    return {
        "data": [
            {
                "type": "bar",
                "name": what,
                "x": names,
                "y": rounded(share[: last + 1]),
                "marker": {"color": color},
                "hovertemplate": f"%{{x}} updates old: %{{y:.1%}} of the {what.partition(',')[0]}<extra></extra>",
            }
            for what, share, color in bars
        ],
        "layout": layout(
            320,
            barmode="group",
            xaxis=axis("updates between writing and training", type="category"),
            yaxis=axis("share", tickformat=".0%", rangemode="tozero"),
        ),
    }


def steps_figure(result: Result) -> Figure:
    """Off-policyness of each update, mean over tokens and largest, and its seconds."""
    steps = {name: result.steps.column(name).to_numpy() for name in result.steps.column_names}
    finished_s = steps["finished_s"]
    names = steps["step"].tolist()
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "seconds an update",
                "x": names,
                "y": rounded(np.diff(finished_s, prepend=0.0)),
                "yaxis": "y2",
                "line": {"color": FAINT, "width": 2, "dash": "dot"},
                "hovertemplate": "update %{x}: %{y:,.1f} s<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "off-policyness, mean",
                "x": names,
                "y": rounded(steps["off_policyness_mean"]),
                "line": {"color": BLUE},
                "marker": {"size": 5},
                "hovertemplate": "update %{x}: %{y:.2f} updates old on average<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "largest",
                "x": names,
                "y": steps["off_policyness_max"].tolist(),
                "line": {"color": VERMILLION, "dash": "dash", "shape": "hvh"},
                "hovertemplate": "update %{x}: at most %{y} updates old<extra></extra>",
            },
        ],
        "layout": layout(
            320,
            xaxis=axis("policy update"),
            yaxis=axis("off-policyness", rangemode="tozero"),
            yaxis2=axis(
                "s an update", rangemode="tozero", overlaying="y", side="right", showgrid=False, tickmode="auto"
            ),
        ),
    }


def _finished(result: Result, *names: str) -> list[Values]:
    """Columns of the samples that were finished."""
    table = result.samples.filter(pc.is_valid(result.samples.column("finished_s")))
    return [pc.fill_null(table.column(name), -1).to_numpy() for name in names]


def lengths_figure(result: Result) -> Figure | None:
    """How long the finished responses are. None where none was finished."""
    (tokens,) = _finished(result, "generated_tokens")
    if not len(tokens):
        return None
    wide = -(-int(tokens.max() + 1) // LENGTH_BINS)
    edges = np.arange(0, tokens.max() + 1 + wide, wide, dtype=np.int64)
    counts, _ = np.histogram(tokens, edges)
    marks = [(f"p{p}", float(np.percentile(tokens, p)), "dot") for p in (50, 95, 99)]
    marks.append(("mean", float(tokens.mean()), "dash"))
    last = edges[1:] - 1
    return {
        "data": [
            {
                "type": "bar",
                "x": rounded((edges[:-1] + last) / 2, 6),
                "y": rounded(counts / len(tokens)),
                "width": 0.94 * wide,
                "marker": {"color": SKY},
                "customdata": [f"{a:,.0f} to {b:,.0f}" for a, b in zip(edges[:-1], last, strict=True)],
                "hovertemplate": "%{customdata} tokens: %{y:.1%} of the responses<extra></extra>",
                "showlegend": False,
            },
            *(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{name}: {value:,.0f}",
                    "x": [round(value, 1)] * 2,
                    "y": rounded([0, counts.max() / len(tokens)]),
                    "line": {"color": color, "dash": dash, "width": 2},
                    "hovertemplate": f"{name}: {value:,.0f} tokens<extra></extra>",
                }
                for (name, value, dash), color in zip(marks, (BLUE, ORANGE, VERMILLION, INK), strict=True)
            ),
        ],
        "layout": layout(
            320,
            bargap=0,
            xaxis=axis("tokens of a response", rangemode="tozero"),
            yaxis=axis("share of the responses", tickformat=".0%", rangemode="tozero"),
        ),
    }


def step_lengths_figure(result: Result) -> Figure | None:
    """Lengths of the responses of each update: median, 95th percentile and longest. None where nothing was trained."""
    tokens, step = _finished(result, "generated_tokens", "trained_step")
    steps = [k for k in result.steps.column("step").to_pylist() if (step == k).any()]
    if not steps:
        return None
    of_each = [tokens[step == k] for k in steps]
    curves = (("longest", [t.max() for t in of_each], VERMILLION), *_percentile_curves(of_each))
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": steps,
                "y": rounded(values),
                "line": {"color": color},
                "marker": {"size": 5},
                "hovertemplate": f"update %{{x}}, {name}: %{{y:,.0f}} tokens<extra></extra>",
            }
            for name, values, color in curves
        ],
        "layout": layout(
            320, xaxis=axis("policy update"), yaxis=axis("tokens of a response", rangemode="tozero", tickformat=",")
        ),
    }


def _percentile_curves(of_each: Sequence[Values]) -> list[tuple[str, list[float], str]]:
    named = (("95th percentile", 95, ORANGE), ("median", 50, BLUE))
    return [(name, [float(np.percentile(t, p)) for t in of_each], color) for name, p, color in named]


def acceptance_figures(result: Result) -> list[tuple[str, Figure]]:
    """Where drafts were made: the acceptance of each sample, and what a pass with a draft yields by length and by epoch. A
    title with each."""
    tokens, drafted, accepted, passes, yielded, epoch = _finished(
        result,
        "generated_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "verifications",
        "verified_tokens",
        "epoch",
    )
    some = drafted > 0
    if not some.any():
        return []
    rate = accepted[some] / drafted[some]
    counts, edges = np.histogram(rate, np.linspace(0, 1, 21))
    found: list[tuple[str, Figure]] = [
        (
            "Acceptance by sample",
            {
                "data": [
                    {
                        "type": "bar",
                        "x": rounded((edges[:-1] + edges[1:]) / 2),
                        "y": rounded(counts / len(rate)),
                        "marker": {"color": TEAL},
                        "customdata": [f"{a:.0%} to {b:.0%}" for a, b in pairwise(edges)],
                        "hovertemplate": "%{customdata} of its drafts accepted: %{y:.1%} of the samples<extra></extra>",
                    }
                ],
                "layout": layout(
                    320,
                    bargap=0.05,
                    xaxis=axis("accepted share of a sample's drafted tokens", tickformat=".0%", range=[0, 1]),
                    yaxis=axis("share of the samples with drafts", tickformat=".0%", rangemode="tozero"),
                ),
            },
        )
    ]
    tokens, passes, yielded, drafted, accepted, epoch = (
        column[some] for column in (tokens, passes, yielded, drafted, accepted, epoch)
    )
    bounds = np.unique(np.percentile(tokens, np.linspace(0, 100, 9)).astype(np.int64))
    bins = np.clip(np.searchsorted(bounds, tokens, side="right") - 1, 0, max(len(bounds) - 2, 0))
    names = [f"{a:,} to {b:,}" for a, b in pairwise(bounds.tolist())] or [f"{bounds[0]:,}"]
    found.append(
        ("Acceptance by length", _by_group(bins, names, "tokens of the response", passes, yielded, drafted, accepted))
    )
    epochs = np.unique(epoch)
    if len(epochs) > 1:
        code = np.searchsorted(epochs, epoch)
        found.append(
            (
                "Acceptance by epoch",
                _by_group(code, [str(e) for e in epochs], "epoch", passes, yielded, drafted, accepted),
            )
        )
    return found


def _by_group(
    group: Values, names: list[str], title: str, passes: Values, yielded: Values, drafted: Values, accepted: Values
) -> Figure:
    """Tokens that a pass with a draft yields, and the accepted share, of groups of samples."""
    sums = [np.bincount(group, values, len(names)) for values in (passes, yielded, drafted, accepted)]
    with np.errstate(invalid="ignore", divide="ignore"):
        length, rate = sums[1] / sums[0], sums[3] / sums[2]
    return {
        "data": [
            {
                "type": "bar",
                "name": "tokens a draft",
                "x": names,
                "y": rounded(length),
                "marker": {"color": TEAL},
                "hovertemplate": "%{x}: %{y:.2f} tokens a pass with a draft<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "accepted share",
                "x": names,
                "y": rounded(rate),
                "yaxis": "y2",
                "line": {"color": ORANGE},
                "hovertemplate": "%{x}: %{y:.1%} accepted<extra></extra>",
            },
        ],
        "layout": layout(
            320,
            xaxis=axis(title, type="category"),
            yaxis=axis("tokens a draft", rangemode="tozero"),
            yaxis2=axis(
                "", overlaying="y", side="right", tickformat=".0%", range=[0, 1.02], showgrid=False, tickmode="auto"
            ),
        ),
    }


def kind_colors(kinds: Sequence[str]) -> list[str]:
    """Of the timeline: idle is tinted, as there is no hatch."""
    return ["#F9DCCB" if kind == "idle" else KIND_COLORS.get(kind, FAINT) for kind in kinds]
