"""The page what_to_run.md: by regime, the system that trains fastest within a bound on staleness, the
figures at which the answer changes, and the best combination that no system has.

Invariant: the page's tables are a pure function of what_to_run.json, which has a row for every
simulated point; the points are kept in a folder, so that a stopped command goes on.

    python -m experiments.what_to_run              # simulate, then write JSON, page and picture
    python -m experiments.what_to_run --page-only  # write the tables of the page from the JSON
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

import simrl
from experiments.shared import errors_in_a_line, markdown, scenario_from, write_parts
from simrl.analysis.gpu_hours import PARTS, waterfall
from simrl.result.metrics import window
from simrl.result.off_policyness import largest_off_policyness
from simrl.scenario.model import Scenario
from simrl.show.style import INK, PAPER, SAND, SERIES
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.executors import inputs_of_this_process
from simrl.study.model_error import RATIO_ERROR
from simrl.study.point import Point
from simrl.study.progress import compile_kernels
from simrl.study.robustness import WORDS, perturbed
from simrl.study.store import Outcomes, simulating
from simrl.systems.recipes import RECIPES, make_system, parameters_of
from simrl.systems.system import System

HERE = Path(__file__).resolve().parent
SCENARIO = HERE / "what_to_run.yaml"
BASE = "verl_colocated"
BOUNDS: Mapping[str, int | None] = {
    "0": 0,
    "1": 1,
    "4": 4,
    "any": None,
}  # updates, of the oldest token
SHARES = (0.5, 0.625, 0.75)
ALIKE = {"minibatches": 1, "log_probs": 1}  # the algorithm is everybody's, the schedule is compared
HALVINGS = 1
FACTORS = (0.5, 2.0)
ORDINARY = ("least_requests", "even_split", "round_robin", "round_robin_groups")
SHORTER = 0.95  # of the data's mean response; what trains shorter ones has dropped long ones
DRAFTERS = ("none", "histospec", "draft_model", "tlt")
COMBINED = ("0", "4")  # the bounds of the search of combinations, for its time
Row = Mapping[str, Any]
Settings = Mapping[str, Any]

ON_POLICY = (BASE, "rollpacker", "seer")
COLOCATED: tuple[Mapping[str, Any], ...] = (
    {"name": "sortedrl"},
    {"name": "partial_rollout"},
    {"name": "april"},
    *({"name": "verl_v1_colocate_async", "max_span": n} for n in (5, 8)),
)
SPLIT: tuple[Mapping[str, Any], ...] = (
    {"name": "one_step_off"},
    {"name": "rhymerl"},
    {"name": "laminar"},
    *({"name": "nemo_rl_async", "max_age": n} for n in (1, 4)),
    *({"name": "areal", "eta": n} for n in (1, 4)),
    *({"name": "skyrl_async", "max_staleness_steps": n} for n in (2, 4)),
    *({"name": "prime_rl", "max_off_policy_steps": n} for n in (1, 4, 8)),
)


def candidates() -> list[dict[str, Any]]:
    """Return the systems, each with the bounds and the splits that a user would try."""
    split = [{**entry, "rollout_share": share} for entry in SPLIT for share in SHARES]
    entries = [*({"name": name} for name in ON_POLICY), *COLOCATED, *split]
    return [{**entry, **ALIKE} for entry in entries]


@dataclass(frozen=True)
class Axis:
    """A quantity that is varied alone: its words, its values (the base's among them; words for what
    has no order), and the settings of a value."""

    words: str
    values: tuple[Any, ...]
    base: Any
    settings: Callable[[Any], Settings]
    whole: bool = True

    @property
    def ordered(self) -> bool:
        return not isinstance(self.base, str)


S = "workload.synthetic."
GROUP, GPUS, MEAN = 16, 64, 4000
TOOLS = {
    "run": {
        "share": 1.0,
        "median_s": 5,
        "sigma": 0.8,
        "least_s": 1,
        "most_s": 120,
        "observation_tokens": 300,
        "observation_sigma": 0.8,
        "observation_cap_tokens": 2000,
    }
}


def _prompts(number: int) -> Settings:
    return {f"{S}prompts_per_step": number, f"{S}prompts": 5 * number}


def _turns(number: int) -> Settings:
    if number == 1:
        return {}
    return {
        f"{S}mean_tokens": None,
        f"{S}turns": number,
        f"{S}cap_turns": 4 * number,
        f"{S}turn_tokens": MEAN // number,
        f"{S}turn_sigma": 0.8,
        f"{S}context_cap_tokens": 24576,
        f"{S}tools": TOOLS,
    }


MODELS: Mapping[str, Settings] = {
    "qwen3-8b": {},
    "qwen3-30b-a3b": {
        "model": "qwen3-30b-a3b",
        "cluster.tp": 2,
        "cluster.ep": 2,
        "training.sequence_parallel": 2,
    },
}
AXES: Mapping[str, Axis] = {
    "tail": Axis(
        "spread of lengths (σ of their logarithm)",
        (0.3, 0.8, 1.3),
        0.8,
        lambda x: {f"{S}sigma": x},
        False,
    ),
    "length": Axis(
        "mean response tokens (cap 4 ×)",
        (1000, 4000, 10000),
        MEAN,
        lambda x: {f"{S}mean_tokens": x, f"{S}cap_tokens": 4 * x + 384},
    ),
    "batch": Axis(
        "responses a GPU and update", (4, 16, 64), 16, lambda x: _prompts(max(x * GPUS // GROUP, 1))
    ),
    "gpus": Axis(
        "GPUs, 16 responses each", (16, 64, 128), GPUS, lambda x: {"cluster.gpus": x, **_prompts(x)}
    ),
    "turns": Axis("turns, 4,000 tokens in all, a tool of 5 s between them", (1, 4), 1, _turns),
    "model": Axis("model", tuple(MODELS), "qwen3-8b", lambda x: MODELS[x]),
}


def scenario(settings: Settings, system: Mapping[str, Any]) -> Scenario:
    """Return the page's scenario with these settings. Raise `InputError`."""
    return scenario_from(SCENARIO, settings, system)


class Table:
    """The rows of all points so far, by axis, value and system."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.rows: list[dict[str, Any]] = []
        self._outcomes = outcomes

    def of(
        self, axis: str, value: Any, systems: Sequence[Mapping[str, Any]], part: str = "regimes"
    ) -> list[dict[str, Any]]:
        """Return a row for each system at a value of an axis; `error` where it cannot run."""
        settings = AXES[axis].settings(value)
        scenarios = [scenario(settings, system) for system in systems]
        return self.add(scenarios, settings, part=part, axis=axis, value=value)

    def add(
        self,
        scenarios: Sequence[Scenario],
        settings: Settings | None = None,
        **labels: Any,
    ) -> list[dict[str, Any]]:
        """Return the rows of scenarios, whose workload the settings make; the table keeps them under
        the labels."""
        base = Point(scenario(settings or {}, {"name": BASE, **ALIKE}), self._outcomes.digests)
        points = [Point(each, self._outcomes.digests) for each in scenarios]
        whole, *outcomes = self._outcomes.of([base, *points])
        rows = []
        for point, outcome in zip(points, outcomes, strict=True):
            system = point.scenario.system
            kept = {"name": system.name, "parameters": system.parameters}
            rows.append({**labels, **kept, **_brief(outcome, trained_tokens(whole["row"]))})
        self.rows += rows
        return rows


def trained_tokens(row: Row) -> float:
    """Return the mean tokens of a trained response."""
    return float(row["tokens_per_s"] / row["samples_per_s"])


def _brief(outcome: Mapping[str, Any], data_tokens: float) -> dict[str, Any]:
    if "error" in outcome:
        return {"error": outcome["error"]}
    row = outcome["row"]
    return {
        "samples_per_s": float(f"{row['samples_per_s']:.5g}"),
        "oldest": largest_off_policyness(row),
        "mean": round(float(row["off_policyness_mean"]), 2),
        "settled": bool(row["settled"]),
        "length": round(trained_tokens(row) / data_tokens, 3),
    }


# The answers.


def rate(row: Row) -> float:
    return float(row.get("samples_per_s", 0.0))


def within(rows: Iterable[Row], bound: int | None) -> list[Row]:
    """Return the settled rows within a bound on the oldest trained token that train responses as long
    as the data's, the fastest first; a row that has not settled counts where the system's own rule
    keeps the bound."""
    kept = [
        row
        for row in rows
        if "error" not in row
        and row["length"] >= SHORTER
        and (bound is None or row["oldest"] <= bound)
        and (row["settled"] or _keeps(row, bound))
    ]
    return sorted(kept, key=lambda row: -rate(row))


def _keeps(row: Row, bound: int | None) -> bool:
    by_rule = make_system(row["name"], row["parameters"]).off_policyness
    return bound is not None and by_rule is not None and by_rule <= bound


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each system."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["name"], row)
    return list(first.values())


def words(row: Row) -> str:
    """Return a system with the parameters that were tried."""
    parameters = {k: v for k, v in row["parameters"].items() if k not in ALIKE and v != "none"}
    chosen = ", ".join(f"{key} {value}" for key, value in parameters.items())
    return f"{row['name']} ({chosen})" if chosen else str(row["name"])


def changes(table: Table, at: Mapping[tuple[str, Any], Sequence[Row]]) -> list[dict[str, Any]]:
    """Return where the answer changes along each ordered axis, bracketed by further simulations."""
    answer = []
    for name, axis in AXES.items():
        pairs = zip(axis.values, axis.values[1:], strict=False) if axis.ordered else ()
        for low, high in pairs:
            for bound, most in BOUNDS.items():
                first, last = (best_of_each(within(at[name, x], most)) for x in (low, high))
                if first and last and _flips(first, last):
                    answer.append(_bracket(table, name, low, high, bound, first[0], last[0]))
    return answer


def _flips(first: Sequence[Row], last: Sequence[Row]) -> bool:
    """Return whether neither end's best is within simrl's error of the best at the other end."""

    def lags(rows: Sequence[Row], name: str) -> bool:
        return all(
            rate(rows[0]) / rate(r) - 1 >= RATIO_ERROR
            for r in rows
            if r["name"] == name and rate(r)
        )

    return lags(first, last[0]["name"]) or lags(last, first[0]["name"])


def _bracket(
    table: Table, name: str, low: Any, high: Any, bound: str, first: Row, last: Row
) -> dict[str, Any]:
    """Halve the way (of its logarithm) between two values whose best systems differ."""
    axis, ends = AXES[name], [low, high]
    contenders = [c for c in candidates() if c["name"] in (first["name"], last["name"])]
    if first["name"] != last["name"]:
        for _ in range(HALVINGS):
            middle = math.sqrt(ends[0] * ends[1])
            middle = round(middle) if axis.whole else float(f"{middle:.3g}")
            if name == "gpus":
                middle -= middle % 8
            if middle in ends:
                break
            best = within(table.of(name, middle, contenders, "between"), BOUNDS[bound])
            ends[0 if best and best[0]["name"] == first["name"] else 1] = middle
    return {
        "axis": name,
        "bound": bound,
        "below": first["name"],
        "above": last["name"],
        "from": ends[0],
        "to": ends[1],
    }


# The best combination.


def combine(outcomes: Outcomes, table: Table, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Search drafters and dispatch for the best pipelines under each bound, and vary the inputs that
    the choice rests on."""
    answers = []
    for bound in COMBINED:
        most = BOUNDS[bound]
        pipelines = [row for row in best_of_each(within(rows, most))[:3]]
        entries = [{"name": r["name"], **r["parameters"]} for r in pipelines]
        drafted = [
            {**entry, **({} if drafter == "none" else {"speculation": drafter})}
            for entry in entries
            for drafter in DRAFTERS
        ]
        tried = table.add([scenario({}, each) for each in drafted], part="combined", bound=bound)
        best = within(tried, most)
        more = [
            {**system_of(row), "dispatch": rule}
            for row in best[:2]
            for rule in ("round_robin", "streamrl", "seer")
            if "dispatch" in parameters_of(row["name"])
        ]
        more += [
            {**system_of(row), "rollout_share": share}
            for row in best[:3]
            for share in SHARES
            if row["parameters"].get("rollout_share") not in (None, share)
        ]
        best = within(
            [
                *tried,
                *table.add([scenario({}, each) for each in more], part="combined", bound=bound),
            ],
            most,
        )
        rivals = [best[0], *(r for r in best_of_each(best) if r is not best[0])][:2]
        rivals += [r for r in best if drafter_of(r) == "none"][:1]
        answers.append(
            {
                "bound": bound,
                "best": best[:5],
                "plain": next((r for r in best if drafter_of(r) == "none"), None),
                "ends": _ends(table, bound, most, rivals),
                "why": _why(outcomes, best[0]),
                "tried": len(
                    {
                        json.dumps(system_of(r), sort_keys=True)
                        for r in table.rows
                        if r["part"] == "combined" and r["bound"] == bound
                    }
                ),
            }
        )
    return answers


def system_of(row: Row) -> dict[str, Any]:
    return {"name": row["name"], **row["parameters"]}


def drafter_of(row: Row) -> str:
    return str(row["parameters"].get("speculation") or "none")


def shipped(row: Row) -> bool:
    """Return whether a recipe has this schedule with this way to draft, by an ordinary dispatch rule or
    by this one."""
    kind = _kind(make_system(row["name"], row["parameters"]))
    return any(_kind(make_system(name, {})) == kind for name in RECIPES)


def _kind(system: System) -> tuple[str, str, str]:
    """Return the schedule of a system, the method that it drafts with, and its dispatch rule."""
    rule = "ordinary" if system.dispatch.name in ORDINARY else system.dispatch.name
    return system.schedule, "none" if system.speculation is None else system.speculation.name, rule


def _ends(
    table: Table, bound: str, most: int | None, rivals: Sequence[Row]
) -> list[dict[str, Any]]:
    """Return who wins with forward passes, training, draft acceptance and assumed seconds × 0.5 and
    × 2."""
    inputs, ends = InputCache(), []
    for source in WORDS:
        for factor in FACTORS:
            scenarios, untried = [], []
            for rival in rivals:
                there = perturbed(scenario({}, system_of(rival)), source, factor, inputs)
                (untried if isinstance(there, str) else scenarios).append(there)
            rows = table.add(scenarios, part="robust", bound=bound, value=f"{source} × {factor:g}")  # type: ignore[arg-type]
            best = within(rows, most)
            if best:
                ends.append(
                    {
                        "source": source,
                        "factor": factor,
                        "best": best[0],
                        "untried": len(untried),
                        "choice": next(
                            (r for r in best if system_of(r) == system_of(rivals[0])), None
                        ),
                    }
                )
    return ends


def _why(outcomes: Outcomes, choice: Row) -> dict[str, dict[str, float]]:
    """Return the GPU-seconds of a trained sample by part: of the base, of the choice's pipeline without
    drafts, of the base with its drafts, and of the choice."""
    drafter = drafter_of(choice)
    plain = {k: v for k, v in system_of(choice).items() if k != "speculation"}
    columns = {BASE: {"name": BASE, **ALIKE}}
    if drafter != "none":
        columns[f"{BASE}, {drafter}"] = {"name": BASE, **ALIKE, "speculation": drafter}
        columns[f"{choice['name']}, no drafts"] = plain
    columns["the choice"] = system_of(choice)
    distinct = {json.dumps(v, sort_keys=True): k for k, v in columns.items()}
    tasks = [scenario({}, columns[name]) for name in distinct.values()]
    return dict(zip(distinct.values(), outcomes.each(spent, tasks), strict=True))


def spent(scenario: Scenario) -> dict[str, float]:
    """Return the GPU-seconds of a trained sample of the scenario by part."""
    result = simulate_prepared(prepare(scenario, inputs_of_this_process()))
    fall = waterfall(result, *window(result, scenario.warmup_steps))
    samples = sum(result.steps.slice(scenario.warmup_steps).column("samples").to_pylist())
    return {name: round(s / samples, 3) for name, s in fall.gpu_s.items() if s / samples >= 5e-4}


# The page.


def parts(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tables of the page."""
    regimes = [row for row in data["rows"] if row["part"] == "regimes"]
    lines, refused = [], dict[str, list[str]]()
    for name, axis in AXES.items():
        for value in axis.values:
            if name != "tail" and value == axis.base:
                continue
            here = [row for row in regimes if row["axis"] == name and row["value"] == value]
            base = next(row for row in here if row["name"] == BASE)
            label = (
                "as in what_to_run.yaml"
                if name == "tail" and value == axis.base
                else f"{axis.words}: {_number(value)}"
            )
            lines.append(
                [
                    label,
                    f"{rate(base):.3g}",
                    *(_answer(here, most, base) for most in BOUNDS.values()),
                ]
            )
            for row in here:
                if "error" in row:
                    refused.setdefault(row["error"], []).append(f"{row['name']} ({_number(value)})")
    heads = ["regime", f"{BASE}, samples/s", *(_within(bound) for bound in BOUNDS)]
    change = [
        [
            AXES[c["axis"]].words,
            c["bound"],
            f"{c['below']} up to {_number(c['from'])}",
            f"{c['above']} from {_number(c['to'])}",
        ]
        for c in data["changes"]
        if c["below"] != c["above"]
    ]
    errors = [
        line
        for error, names in refused.items()
        for line in ("", f"No: {', '.join(dict.fromkeys(names))}: {error}.")
    ]
    return {
        "regimes": [*markdown(heads, lines), *errors],
        "changes": markdown(["varied", "at most updates old", "the best", "then"], change),
        "combined": _combined(data),
        "why": _reasons(data),
        "robust": _robust(data),
    }


def _within(bound: str) -> str:
    return "any age" if BOUNDS[bound] is None else f"at most {bound} updates old"


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _answer(rows: Sequence[Row], most: int | None, base: Row) -> str:
    """Return the best system within a bound, its ratio to the base, and those within simrl's error."""
    first, *others = best_of_each(within(rows, most))
    near = [row["name"] for row in others if rate(first) / rate(row) - 1 < RATIO_ERROR]
    text = f"**{rate(first) / rate(base):.2f}×** {words(first)}"
    return text + (f" ≈ {', '.join(near)}" if near else "")


def _combined(data: Mapping[str, Any]) -> list[str]:
    lines = []
    base = next(
        r
        for r in data["rows"]
        if r["part"] == "regimes"
        and r["axis"] == "tail"
        and r["value"] == AXES["tail"].base
        and r["name"] == BASE
    )
    for answer in data["combined"]:
        for place, row in enumerate(answer["best"]):
            near = (
                ""
                if place == 0 or rate(answer["best"][0]) / rate(row) - 1 >= RATIO_ERROR
                else "≈ the first"
            )
            lines.append(
                [
                    answer["bound"] if place == 0 else "",
                    words(row),
                    f"{rate(row):.3g}",
                    f"{rate(row) / rate(base):.2f}×",
                    f"{row['mean']:.2f} / {row['oldest']}",
                    "a recipe" if shipped(row) else "no recipe",
                    near,
                ]
            )
        if (plain := answer["plain"]) is not None and plain not in answer["best"]:
            lines.append(
                [
                    "",
                    f"without drafts: {words(plain)}",
                    f"{rate(plain):.3g}",
                    f"{rate(plain) / rate(base):.2f}×",
                    f"{plain['mean']:.2f} / {plain['oldest']}",
                    "a recipe",
                    "",
                ]
            )
    heads = [
        "at most updates old",
        "combination",
        "samples/s",
        f"× {BASE}",
        "off-policyness mean / most",
        "who has it",
        "",
    ]
    counts = ", ".join(f"{f['tried']} at {f['bound']}" for f in data["combined"])
    return [*markdown(heads, lines), "", f"Combinations simulated: {counts}."]


def _reasons(data: Mapping[str, Any]) -> list[str]:
    text = []
    for answer in data["combined"]:
        why = answer["why"]
        total = {name: sum(parts.values()) for name, parts in why.items()}
        lines = [
            [part.words, *(f"{parts.get(name, 0):.1f}" for parts in why.values())]
            for name, part in PARTS.items()
            if max(parts.get(name, 0) for parts in why.values()) >= 0.02 * min(total.values())
        ]
        lines.append(["all", *(f"**{seconds:.1f}**" for seconds in total.values())])
        text += [
            "",
            f"**At most {answer['bound']}:** {words(answer['best'][0])}",
            "",
            *markdown(["GPU-seconds a trained sample", *why], lines),
        ]
    return text[1:]


def _robust(data: Mapping[str, Any]) -> list[str]:
    lines = []
    for answer in data["combined"]:
        cells = []
        for end in answer["ends"]:
            choice, best = end["choice"], end["best"]
            if choice is None:
                cells.append((end, f"{words(best)}; the choice cannot be varied so"))
            elif rate(best) / rate(choice) - 1 < RATIO_ERROR:
                cells.append((end, "holds" if best == choice else f"≈ {words(best)}"))
            else:
                cells.append((end, f"{words(best)}, {rate(best) / rate(choice) - 1:.0%} ahead"))
        for end, text in cells:
            lines.append([answer["bound"], f"{WORDS[end['source']]} × {end['factor']:g}", text])
    return markdown(["at most updates old", "input", "the choice"], lines)


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Draw, for each ordered axis, the best × within each bound over the base."""
    axes_of = [name for name, axis in AXES.items() if axis.ordered]
    figure = Figure(figsize=(13, 3.4), dpi=110, facecolor=PAPER, layout="constrained")
    for place, (name, axes) in enumerate(
        zip(axes_of, figure.subplots(1, len(axes_of), sharey=True), strict=True)
    ):
        axis = AXES[name]
        for (bound, most), colour in zip(BOUNDS.items(), [INK, *SERIES], strict=False):
            ratios = []
            for value in axis.values:
                here = [
                    r
                    for r in data["rows"]
                    if r["part"] == "regimes" and r["axis"] == name and r["value"] == value
                ]
                base = next(r for r in here if r["name"] == BASE)
                ratios.append(rate(within(here, most)[0]) / rate(base))
            axes.plot(
                range(len(axis.values)), ratios, marker="o", color=colour, label=_within(bound)
            )
        axes.axhspan(1 - RATIO_ERROR, 1 + RATIO_ERROR, color=SAND, alpha=0.35, linewidth=0)
        axes.set_xticks(range(len(axis.values)), [_number(v) for v in axis.values], fontsize=8)
        axes.set_xlabel(axis.words.partition(",")[0].partition(" (")[0], color=INK, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        if place == 0:
            axes.set_ylabel(f"the fastest, × {BASE}", color=INK, fontsize=9)
            axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.axes[0].set_ylim(
        0, max(line.get_ydata().max() for each in figure.axes for line in each.lines) * 1.05
    )
    figure.savefig(path, metadata={"Software": None})


def simulate(jobs: int, folder: Path, on_phase: Callable[[str], None]) -> dict[str, Any]:
    """Simulate everything on the page."""
    with simulating(jobs, folder) as outcomes:
        table, at = Table(outcomes), dict[tuple[str, Any], list[dict[str, Any]]]()
        for name, axis in AXES.items():
            for value in axis.values:
                on_phase(f"{axis.words}: {_number(value)}")
                at[name, value] = table.of(name, value, candidates())
        on_phase("where the answer changes")
        answer = changes(table, at)
        on_phase("combinations")
        combined = combine(outcomes, table, at["tail", AXES["tail"].base])
    return {
        "version": simrl.__version__,
        "rows": table.rows,
        "changes": answer,
        "combined": combined,
    }


def main(
    page: Annotated[Path, typer.Option(help="the page to renew; JSON and PNG go beside it")] = HERE
    / "what_to_run.md",
    folder: Annotated[Path, typer.Option(help="where simulated points are kept")] = Path(
        "results/what_to_run"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="simultaneous simulations")] = 2,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="write the page from its JSON")
    ] = False,
) -> None:
    """Answer what to run, by regime."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    kept = page.with_suffix(".json")
    with errors_in_a_line("what_to_run"):
        if not page_only:
            compile_kernels()
            data = simulate(jobs, folder, logging.getLogger("what_to_run").info)
            kept.write_text(
                json.dumps(data, indent=None, separators=(",", ":")) + "\n", encoding="utf-8"
            )
        data = json.loads(kept.read_text(encoding="utf-8"))
        write_parts(page, parts(data))
        draw(data, page.with_suffix(".png"))
    print(f"Written: {page}")


if __name__ == "__main__":
    typer.run(main)
