"""Every system on one workload, from 64 to 4,096 GPUs and from 1 to 50 epochs; the best combination; the recorded runs.

    python experiments/published/landscape.py --data ../shared/data

Writes what stands between `<!-- NAME -->` and `<!-- /NAME -->` of landscape.md, the pictures and landscape.csv beside it; the
page's other words are its own. Without --data (the folder with verl_run/) that run is left out. Invariant: a figure of the page
is a row of the table or of an answer of `simrl.optimize`; what was simulated is kept in a folder, so that the same command goes
on where it was stopped, and simulates all anew once simrl's code or a scenario has changed.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

import simrl
from simrl.comparison import compile_kernels
from simrl.errors import InputError
from simrl.executors import Outcomes as Coming
from simrl.gpu_hours import PARTS, waterfall
from simrl.importers.verl import read_verl_metrics, trace_from_verl_metrics
from simrl.metrics import summary, window
from simrl.model_error import RATIO_ERROR, RATIOS
from simrl.outcomes import Outcomes
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SAND, SKY, VERMILLION, YELLOW
from simrl.points import Digests, Point, SharedInputs, make_point
from simrl.scenario import Scenario, ScenarioFile, Setting
from simrl.simulate import prepare, simulate_prepared
from simrl.systems import RECIPES, make_system, parameters_of
from simrl.trace import write_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCENARIO = HERE / "landscape.yaml"
COUNTDOWN = ROOT / "traces" / "countdown" / "sync"
VERL_RUN = ROOT / "experiments" / "verl_run.yaml"

BASE = "verl_colocated"
SLOW = "specactor"  # its drafters and verifiers wait for each other window by window, which takes long to simulate
FAMILIES = (
    BASE, "rollpacker", "partial_rollout", "april", "one_step_off", "rhymerl", "areal", "tlt",
)  # fmt: skip
STEPS_PER_EPOCH = 3
EPOCHS = 5  # where they are not what is varied: in two, pipelines that roll out ahead settle, the others are measured
MANY_GPUS, THEIR_EPOCHS = 1024, 3  # for the time: one is measured
MEASURED_EPOCHS = 3  # the last of many: what is put off or in flight makes single ones uneven
AHEAD_STEPS = 4  # of the trace, beyond the updates
PROMPTS_PER_GPU = 0.5  # in groups of 16: 8 responses a GPU and step
SHARES = (0.375, 0.5, 0.625, 0.75)
DRAFTERS = ("none", "histospec", "ngram", "draft_model", "tlt")
Row = Mapping[str, Any]
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """What is simulated: which systems at how many GPUs, and for how many epochs; `base_gpus` are those of all that is not
    about scale."""

    scales: Mapping[int, Sequence[str]]
    epochs: Mapping[int, Sequence[str]]
    shares: Sequence[float]
    families: Sequence[str]
    pipelines: Sequence[str]
    drafters: Sequence[str]
    recorded: Sequence[str]
    recorded_steps: int
    verl_steps: int
    combination_steps: int
    limits: Sequence[int] = (0, 1, 4)  # of off-policyness, and the η that are tried
    tokens: Path = COUNTDOWN / "trace.parquet"  # on which text drafts are counted
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_gpus(self) -> int:
        return min(self.scales)

    @property
    def systems(self) -> Sequence[str]:
        return self.scales[self.base_gpus]

    def scenario(self, gpus: int, epochs: int, system: str | Mapping[str, Any], **changes: Any) -> Scenario:
        """Of landscape.yaml: so many GPUs with their part of the prompts, so many epochs, of which the last is looked at; of
        many, the last three; of one, its second half. `changes` are fields by their dotted keys, with `__` for a dot."""
        prompts = changes.pop("prompts_per_step", self.prompts(gpus))
        steps = changes.pop("steps", STEPS_PER_EPOCH * max(epochs, 2))
        in_trace = steps + AHEAD_STEPS
        measured = STEPS_PER_EPOCH * (MEASURED_EPOCHS if epochs > MEASURED_EPOCHS else 1)
        given = {
            "cluster.gpus": gpus,
            **_updates(system, steps, changes.pop("warmup_steps", steps - measured)),
            "workload.synthetic.steps": in_trace,
            "workload.synthetic.prompts_per_step": prompts,
            "workload.synthetic.prompts": prompts * (in_trace if epochs == 1 else STEPS_PER_EPOCH),
            **self.changes,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return _scenario(SCENARIO, given, system)

    def prompts(self, gpus: int) -> int:
        """A step's; weak scaling."""
        return int(gpus * PROMPTS_PER_GPU)


ALL_BUT_SLOW = tuple(name for name in RECIPES if name != SLOW)
FULL = Size(
    scales={
        64: tuple(RECIPES), 256: ALL_BUT_SLOW, 1024: ALL_BUT_SLOW, 4096: ALL_BUT_SLOW,
    },
    epochs={
        1: tuple(RECIPES), 2: tuple(RECIPES), 10: (*FAMILIES, "streamrl", "verl_fully_async"),
        50: (BASE, "partial_rollout", "one_step_off", "streamrl", "rhymerl", "tlt"),
    },
    shares=SHARES,
    families=FAMILIES,
    pipelines=(
        BASE, "rlhfuse", "seer", "rollpacker", "sortedrl", "partial_rollout", "april", "one_step_off", "asyncflow", "streamrl",
        "rhymerl", "areal", "laminar",
    ),
    drafters=DRAFTERS,
    recorded=ALL_BUT_SLOW,
    recorded_steps=20,
    verl_steps=24,
    combination_steps=15,
)  # fmt: skip
TINY = Size(
    scales={8: (BASE, "areal", "dapo", "rhymerl"), 16: (BASE, "areal")},
    epochs={1: (BASE,), 2: (BASE, "areal")},
    shares=(0.5,),
    families=(BASE, "areal"),
    pipelines=(BASE, "areal"),
    drafters=("none", "ngram"),
    recorded=("split", "areal"),
    recorded_steps=4,
    verl_steps=4,
    combination_steps=4,
    limits=(1,),
    tokens=ROOT / "traces" / "countdown-varied" / "dapo-1e-4" / "trace.parquet",
    changes={
        "model": "qwen3-8b", "cluster.tp": 1, "workload.synthetic.group": 4, "workload.synthetic.mean_tokens": 100,
        "workload.synthetic.cap_tokens": 400, "workload.synthetic.reward_mean": None,
    },
)  # fmt: skip


# Simulating.


def _updates(system: str | Mapping[str, Any], steps: int, warmup_steps: int) -> dict[str, int]:
    """As many updates as make so many batches: verl_fully_async makes several of one."""
    name = system if isinstance(system, str) else str(system["name"])
    of_a_batch = int(parameters_of(name).get("sync_step", 1))
    return {"steps": steps * of_a_batch, "warmup_steps": warmup_steps * of_a_batch}


def _scenario(path: Path, given: Mapping[str, Any], system: str | Mapping[str, Any]) -> Scenario:
    entry = {"name": system} if isinstance(system, str) else dict(system)
    settings = [Setting(key, value, "landscape.py") for key, value in given.items()]
    return ScenarioFile(path, settings).scenario([], entry)


def row_of(scenario: Scenario, inputs: SharedInputs) -> dict[str, Any]:
    """The row of a comparison, and what this page has besides: response tokens a second and GPU, the idle share of all GPUs,
    the cost of a million trained tokens, the oldest token trained, and each part of the GPU time as a share, `part.NAME`."""
    result = simulate_prepared(prepare(scenario, inputs))
    row = summary(result, scenario.warmup_steps, scenario.cluster.cost_per_gpu_hour)
    start_s, end_s = window(result, scenario.warmup_steps)
    trained = int(result.steps.slice(scenario.warmup_steps).column("response_tokens").to_numpy().sum())
    fall = waterfall(result, start_s, end_s)
    shares = {f"part.{name}": gpu_s / fall.total_gpu_s for name, gpu_s in fall.gpu_s.items() if gpu_s}
    idle = sum(shares.get(f"part.{name}", 0.0) for name in IDLE)
    hourly = scenario.cluster.cost_per_gpu_hour * row["gpus"]
    return {
        **row,
        "tokens_per_s_per_gpu": trained / (end_s - start_s) / row["gpus"],
        "idle_share": idle,
        "cost_per_1m_tokens": hourly / 3600 * 1e6 / row["tokens_per_s"] if hourly else None,
        "oldest": max(row["off_policyness_max"], row["carried_off_policyness_max"]),
        **shares,
    }


IDLE = ("tail_idle", "trainer_wait", "other_wait", "rest_idle", "train_idle")
_inputs = SharedInputs()  # of this process


def _outcome(scenario: Scenario) -> dict[str, Any]:
    try:
        return {"row": row_of(scenario, _inputs)}
    except InputError as error:
        return {"error": str(error)}


class Simulations:
    """An executor (`simrl.executors`) of rows as `row_of` makes them, in so many processes; `on_row` hears of each."""

    def __init__(self, jobs: int, on_row: Callable[[], None] = lambda: None) -> None:
        self._jobs, self._on_row = jobs, on_row

    def outcomes(self, points: Sequence[Point]) -> Coming:
        if self._jobs == 1:
            for i, point in enumerate(points):
                yield i, _outcome(point.scenario)
                self._on_row()
            return
        with ProcessPoolExecutor(self._jobs, get_context("spawn")) as pool:
            asked = {pool.submit(_outcome, point.scenario): i for i, point in enumerate(points)}
            for done in as_completed(asked):
                yield asked[done], done.result()
                self._on_row()


@dataclass
class Table:
    """All rows so far. What is asked for is simulated unless the folder has it."""

    outcomes: Outcomes
    rows: list[dict[str, Any]]

    def of(self, part: str, asked: Mapping[tuple[Any, str], Scenario]) -> dict[tuple[Any, str], dict[str, Any]]:
        """The rows of a part of the page, by what is varied and system; `error` has why there is none."""
        digests = Digests()
        points = [make_point(scenario, digests) for scenario in asked.values()]
        found: dict[tuple[Any, str], dict[str, Any]] = {}
        for (key, point), outcome in zip(zip(asked, points, strict=True), self.outcomes.of(points), strict=True):
            row = dict(outcome.get("row", {"error": outcome.get("error", "")}))
            parameters = point.scenario.system.parameters
            self.rows.append({
                "part": part, "varied": key[0], "name": key[1], "parameters": parameters or None,
                "cluster_gpus": point.scenario.cluster.gpus, **row,
            })  # fmt: skip
            found[key] = row
        return found


# Parts of the page.


def tuned(size: Size, table: Table) -> dict[str, dict[str, Any]]:
    """Each system with the rollout share, of those that are tried, with which it trains most, where it has one."""
    split = [name for name in size.systems if "rollout_share" in parameters_of(name)]
    asked = {
        (share, name): size.scenario(size.base_gpus, EPOCHS, {"name": name, "rollout_share": share})
        for name in split
        for share in size.shares
    }
    rows = table.of("share", asked)
    found: dict[str, dict[str, Any]] = {name: {"name": name} for name in size.systems}
    for name in split:
        rates = {share: rate(rows[share, name]) for share in size.shares}
        found[name]["rollout_share"] = max(rates, key=lambda share: (rates[share], share))
    return found


def scales(size: Size, table: Table, entries: Mapping[str, Any], picture: Path) -> dict[str, list[str]]:
    asked = {
        (gpus, name): size.scenario(gpus, THEIR_EPOCHS if gpus >= MANY_GPUS else EPOCHS, entries[name])
        for gpus, names in size.scales.items()
        for name in names
    }
    rows = table.of("scale", asked)
    heads = ["system", "rollout share", *(f"{gpus:,} GPUs" for gpus in size.scales)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in size.systems:
        cells = [_speed(rows.get((gpus, name)), [r for (g, _), r in rows.items() if g == gpus], rows.get((gpus, BASE)))
                 for gpus in size.scales]  # fmt: skip
        share = entries[name].get("rollout_share")
        lines.append(_line([name, "all" if share is None else f"{share:g}", *cells]))
    gpus = sorted(size.scales)[min(1, len(size.scales) - 1)]
    here = {name: row for (g, name), row in rows.items() if g == gpus}
    details = ["system", "idle share of all GPUs", "rollout bubble", "trainer idle", "off-policyness mean / most",
               "tokens from drafts", "$ a million tokens with prompts", "s an update"]  # fmt: skip
    more = [f"At {gpus:,} GPUs:", "", _line(details), _line(["---"] * len(details))]
    for name, row in here.items():
        if "error" in row:
            more.append(_line([name, "no", *[""] * (len(details) - 2)]))
            continue
        more.append(_line([
            name, f"{row['idle_share']:.0%}", f"{row['rollout_bubble']:.0%}", f"{row['train_idle']:.0%}", ages(row),
            f"{row['speculation_rate']:.0%}" if row["speculation"] != "none" else "",
            f"{row['cost_per_1m_tokens']:.2f}", f"{row['step_s']:,.0f}",
        ]))  # fmt: skip
    draw_hours({name: row for name, row in here.items() if "error" not in row}, f"{gpus:,} GPUs", picture)
    return {"scales": [*lines, *_refused(rows)], "details": more, "strong": strong(size, table, entries, rows)}


def strong(size: Size, table: Table, entries: Mapping[str, Any], weak: Mapping[Any, Row]) -> list[str]:
    """The batch of the smallest cluster on four times the GPUs."""
    gpus = 4 * size.base_gpus
    prompts = size.prompts(size.base_gpus)
    names = size.families
    rows = table.of(
        "strong", {(gpus, n): size.scenario(gpus, EPOCHS, entries[n], prompts_per_step=prompts) for n in names}
    )
    heads = ["system", f"{size.base_gpus} GPUs: s an update", f"{gpus} GPUs, the same batch", "faster",
             f"× {BASE}"]  # fmt: skip
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in names:
        few, many = weak[size.base_gpus, name], rows[gpus, name]
        if "error" in few or "error" in many:
            lines.append(_line([name, *("no" if "error" in row else "" for row in (few, many)), "", ""]))
            continue
        faster = rate(many) * many["gpus"] / (rate(few) * few["gpus"])
        lines.append(_line([name, f"{few['step_s']:,.0f}", f"{many['step_s']:,.0f}", f"{faster:.2f}×",
                            times(many, rows[gpus, BASE])]))  # fmt: skip
    return lines


def epochs(size: Size, table: Table, entries: Mapping[str, Any], picture: Path) -> dict[str, list[str]]:
    asked = {
        (count, name): size.scenario(size.base_gpus, count, entries[name])
        for count, names in size.epochs.items()
        for name in names
    }
    rows = table.of("epochs", asked)
    heads = ["system", *(f"{count} epoch{'s' * (count > 1)}" for count in size.epochs), "off-policyness, last column",
             "tokens from drafts, by column"]  # fmt: skip
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in next(iter(size.epochs.values())):
        own = [rows.get((count, name)) for count in size.epochs]
        there = [row for row in own if row is not None and "error" not in row]
        cells = [_speed(row, [r for (c, _), r in rows.items() if c == count], rows.get((count, BASE)))
                 for count, row in zip(size.epochs, own, strict=True)]  # fmt: skip
        drafts = ", ".join(f"{row['speculation_rate']:.0%}" for row in there if row["speculation"] != "none")
        lines.append(_line([name, *cells, ages(there[-1]) if there else "", drafts]))
    draw_epochs(rows, size, picture)
    return {"epochs": [*lines, *_refused(rows)]}


def varied(size: Size, table: Table, entries: Mapping[str, Any]) -> dict[str, list[str]]:
    """What would change the order: one input at a time."""
    counted = {"runs": {}}
    for drafter in ("history-paper", "siblings", "ngram"):
        fitted = simrl.acceptance(size.tokens, drafter=drafter).speculation
        counted["runs"] |= fitted["runs"]
    variants: dict[str, Changes] = {
        "as above": {},
        "siblings differ (prompt_share 0.6)": {"workload__synthetic__prompt_share": 0.6},
        "training at 20 % of peak": {"training__mfu": 0.2, "training__log_prob_mfu": 0.2},
        "4 × the batch": {"prompts_per_step": 4 * size.prompts(size.base_gpus)},
        "text drafts as counted on the recorded run": {"speculation": counted},
        "half as many drafts accepted": {"speculation__acceptance_factor": 0.5},
    }
    asked = {
        (words, name): size.scenario(size.base_gpus, EPOCHS, entries[name], **changes)
        for words, changes in variants.items()
        for name in size.families
    }
    rows = table.of("varied", asked)
    heads = ["", *size.families]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for words in variants:
        here = [rows[words, name] for name in size.families]
        lines.append(_line([words, *(_speed(row, here, here[0], short=True) for row in here)]))
    return {"varied": [*lines, *_refused(rows)]}


def combination(size: Size, table: Table, entries: Mapping[str, Any], folder: Path, jobs: int) -> dict[str, list[str]]:
    """Every pipeline with every drafter, then dispatch and split of the best: `simrl.optimize`, for each limit of staleness."""
    steps = size.combination_steps
    changes = {"steps": steps, "warmup_steps": steps * 2 // EPOCHS}
    base = size.scenario(size.base_gpus, EPOCHS, BASE, **changes)
    data = base.model_dump(mode="json", exclude={"system", "variant", "faults"})
    pipelines = [entry for name in size.pipelines for entry in _bounded(entries[name], size.limits)]
    tables: list[str] = []
    why: list[str] = []
    for limit in size.limits:
        first = _optimized(data, pipelines, {"system.speculation": list(size.drafters)}, limit, folder, jobs)
        few = [dict(choice.option.point.scenario.system) for choice in first.data.best[:2]]
        placed = [entry for entry in few if "dispatch" in parameters_of(entry["name"])]
        second = first
        if placed:
            placing = {"system.dispatch": ["least_requests", "round_robin", "streamrl", "seer"]}
            # What the first search found with each pipeline stands among the choices.
            second = _optimized(data, placed, placing, limit, folder, jobs)
        best = max((first, second), key=lambda found: found.data.choice.option.merit)
        tables += _choices(limit, first, second)
        why += _why(limit, best, base, table)
    return {"combination": tables, "why": why}


def _bounded(entry: Mapping[str, Any], limits: Sequence[int]) -> list[dict[str, Any]]:
    """With every η of the limits, where a system has one."""
    if "eta" not in parameters_of(str(entry["name"])):
        return [dict(entry)]
    return [{**entry, "eta": eta} for eta in limits]


def _optimized(
    data: Mapping[str, Any], systems: Sequence[Any], values: Mapping[str, Any], limit: int, folder: Path, jobs: int
) -> simrl.views.OptimizationView:
    return simrl.optimize(
        data, {**values, "cluster.tp": [data["cluster"]["tp"]]}, systems, max_off_policyness=limit, robust=False,
        trials=400, best=3, jobs=jobs, folder=folder / "optimize",
    )  # fmt: skip


def _choices(limit: int, *found: simrl.views.OptimizationView) -> list[str]:
    heads = ["combination", "samples/s", "off-policyness mean / most", "the largest losses", ""]
    lines = ["", f"**At most {limit} updates old.**", "", _line(heads), _line(["---"] * len(heads))]
    seen: dict[str, Any] = {}
    for each in found:
        for choice in each.data.best:
            seen.setdefault(choice.option.point.hash, choice)
    # A dispatch rule that changes nothing is no other choice.
    distinct = {(choice.option.system, choice.option.merit): choice for choice in reversed(list(seen.values()))}
    ranked = sorted(distinct.values(), key=lambda choice: -choice.option.merit)[:4]
    best = ranked[0].option.merit
    for choice in ranked:
        row = choice.option.row
        losses = ", ".join(f"{words} {share:.0%}" for _, words, share in choice.reasons.parts)
        near = "" if choice is ranked[0] or best / choice.option.merit - 1 >= RATIO_ERROR else "≈ the first"
        lines.append(
            _line([_combined(choice.option.point.scenario), f"{row['samples_per_s']:.3g}", ages(row), losses, near])
        )
    first = found[0].data.searched
    lines += [
        "",
        f"{first.points} combinations of pipeline and drafter, {len(first.allowed)} of them within the limit.",
    ]
    return lines


def _combined(scenario: Scenario) -> str:
    """A system with the parameters that were chosen."""
    parameters = dict(scenario.system.parameters)
    drafts = parameters.pop("speculation", None)
    said = ", ".join(f"{key} {value}" for key, value in parameters.items())
    words = scenario.system.name + (f" ({said})" if said else "")
    return words if drafts is None else f"{words}, {'no drafts' if drafts == 'none' else drafts}"


def _why(limit: int, best: simrl.views.OptimizationView, base: Scenario, table: Table) -> list[str]:
    """Where the GPU time of a trained sample goes: verl_colocated, the choice without its drafts, the choice."""
    chosen = best.data.choice.option.point.scenario
    without = dict(chosen.system.parameters) | {"speculation": "none"}
    plain = _scenario_like(chosen, {"name": chosen.system.name, **without})
    drafts = chosen.system.parameters.get("speculation", "none")
    only = _scenario_like(chosen, {"name": BASE, "speculation": drafts})
    columns = {BASE: base, f"{BASE}, {drafts}": only, f"{chosen.system.name}, no drafts": plain, "the choice": chosen}
    same = [plain.system] if chosen.system.name == BASE and set(without) == {"speculation"} else []  # that is the base
    asked = {
        (limit, words): each
        for words, each in columns.items()
        if words == "the choice" or (words != f"{BASE}, none" and each.system not in (chosen.system, *same))
    }
    rows = table.of("why", asked)
    heads = ["GPU-seconds a trained sample", *(words for _, words in rows)]
    lines = ["", f"**At most {limit}:** {_combined(chosen)}", "", _line(heads), _line(["---"] * len(heads))]
    whole = {words: row["gpus"] / row["samples_per_s"] for (_, words), row in rows.items()}
    for name, part in PARTS.items():
        values = [row.get(f"part.{name}", 0.0) * whole[words] for (_, words), row in rows.items()]
        if max(values) >= 0.02 * whole["the choice"]:
            lines.append(_line([part.words, *(f"{value:.1f}" for value in values)]))
    lines.append(_line(["all", *(f"**{value:.1f}**" for value in whole.values())]))
    return lines


def _scenario_like(scenario: Scenario, system: Mapping[str, Any]) -> Scenario:
    return Scenario.model_validate({**scenario.model_dump(mode="json"), "system": dict(system)})


def recorded(size: Size, table: Table) -> dict[str, list[str]]:
    """The recorded run under every system, on its own machine with the costs measured there, and as Qwen3-8B on 16 H100s."""
    steps, warmup = size.recorded_steps, size.recorded_steps // 2
    large: dict[str, Any] = {
        "model": "qwen3-8b", "cluster.gpus": 16, "cluster.tp": 1,
        "workload.trace": str(COUNTDOWN / "trace.parquet"), "workload.synthetic": None,
    }  # fmt: skip
    asked: dict[tuple[Any, str], Scenario] = {}
    for name in size.recorded:
        wanted = {"rollout_share": 0.5, "minibatches": 2}  # as it was run
        entry = {"name": name, **{key: value for key, value in wanted.items() if key in parameters_of(name)}}
        updates = _updates(name, steps, warmup)
        if not _drafts_by_model(name):
            asked["own", name] = _scenario(COUNTDOWN / "scenario.yaml", {**updates, "training.switch_s": 0.0}, entry)
        asked["large", name] = _scenario(SCENARIO, {**updates, **large}, entry)
    rows = table.of("recorded", asked)
    heads = ["system", "on its two cores: s an update", "× split", "tokens from drafts", "as Qwen3-8B on 16 H100s: ×",
             "tokens from drafts", "off-policyness mean / most"]  # fmt: skip
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in size.recorded:
        small, big = (
            rows.get(("own", name), {"error": "its drafter is a model, and larger than this policy"}),
            rows["large", name],
        )
        first, second = rows.get(("own", "split"), {}), rows.get(("large", "split"), {})
        lines.append(_line([
            name, *([f"{small['step_s']:.1f}", times(small, first), drafted(small)] if "error" not in small
                    else ["no", "", ""]),
            *([times(big, second), drafted(big), ages(big)] if "error" not in big else ["no", "", ""]),
        ]))  # fmt: skip
    measured = "; ".join(f"{each.schedules} {each.measured:.2f}×" for each in RATIOS)
    return {
        "recorded": [*lines, "", f"Measured on the two cores, over the first 20 updates of three repeats: {measured}."]
    }


def _drafts_by_model(name: str) -> bool:
    method = make_system(name, {}).speculation
    return method is not None and method.drafter == "model"


def verl_run(size: Size, table: Table, data: Path, folder: Path) -> dict[str, list[str]]:
    log = data / "verl_run" / "do7bl4gg" / "output.log"
    trace = folder / "verl_run.parquet"
    trace.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace_from_verl_metrics(read_verl_metrics(log), 16, 0, name="verl_run", licence="Apache-2.0"), trace)
    asked = {}
    for name in size.families:
        given = {"workload.trace": str(trace), **_updates(name, size.verl_steps, size.verl_steps // 3)}
        if "rollout_share" in parameters_of(name):
            for share in (0.25, 0.5):
                asked[share, name] = _scenario(VERL_RUN, given, {"name": name, "rollout_share": share})
        else:
            asked["all", name] = _scenario(VERL_RUN, given, name)
    rows = table.of("verl_run", asked)
    best = {}
    for name in size.families:
        own = [row for (_, other), row in rows.items() if other == name]
        best[name] = max(own, key=lambda row: rate(row) if "error" not in row else 0.0)
    heads = ["system", "s an update", "×", "idle share of all GPUs", "off-policyness mean / most"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name, row in best.items():
        first = best.get(BASE, row)
        lines.append(_line([name, *([f"{row['step_s']:,.0f}", times(row, first), f"{row['idle_share']:.0%}", ages(row)]
                                    if "error" not in row else ["no", "", "", ""])]))  # fmt: skip
    return {"verl_run": [*lines, *_refused(rows)]}


# Words.


def rate(row: Row) -> float:
    """Trained response tokens a second and GPU; 0 where a system cannot be."""
    return float(row.get("tokens_per_s_per_gpu", 0.0))


def times(row: Row, first: Row) -> str:
    return f"{rate(row) / rate(first):.2f}×" if rate(first) and rate(row) else ""


def ages(row: Row) -> str:
    oldest = row.get("oldest", row["off_policyness_max"])
    return f"{row['off_policyness_mean']:.2f} / {oldest}" + ("" if row["settled"] else " †")


def drafted(row: Row) -> str:
    return f"{row['speculation_rate']:.0%}" if row["speculation"] != "none" else ""


def _refused(rows: Mapping[tuple[Any, str], Row]) -> list[str]:
    """Why systems cannot be, below their table; a reason once."""
    found: dict[str, list[str]] = {}
    for (key, name), row in rows.items():
        if "error" in row:
            found.setdefault(row["error"].removeprefix(f"system {name}: "), []).append(f"{name} ({key})")
    return [line for error, names in found.items() for line in ("", f"No: {', '.join(names)}: {error}.")]


def _speed(row: Row | None, others: Sequence[Row], first: Row | None, short: bool = False) -> str:
    """Tokens a second and GPU, and how many times the first's; bold what is within simrl's error of the fastest, ≈ what is so
    near to the first."""
    if row is None:
        return "–"
    if "error" in row:
        return "no"
    fastest = max(map(rate, others))
    ratio = rate(row) / rate(first) if first else 1.0
    near = "≈" if row is not first and abs(ratio - 1) < RATIO_ERROR else ""
    words = f"{near}{ratio:.2f}×" if short else f"{rate(row):,.0f} ({near}{ratio:.2f}×)"
    return f"**{words}**" if fastest / rate(row) - 1 < RATIO_ERROR else words


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


# Pictures.

AGAIN = ("recompute_reloaded", "recompute_preempted", "recompute_moved", "recompute_redrafted")
GROUPS = {
    "decoding, in full batches": (("decode", "prefill"), SKY),
    "decoding in small batches, host": (("small_batches", "host"), YELLOW),
    "drafts": (("drafts_stood", "drafts_wasted", "train_drafter"), GREEN),
    "training, log-probs": (("train", "log_prob"), BLUE),
    "prefill again, dropped, ahead": ((*AGAIN, "dropped", "duplicates", "ahead"), PURPLE),
    "weights, switching": (("load_weights", "publish", "switch", "transfer"), ORANGE),
    "idle": (IDLE, PAPER),
}  # fmt: skip


def draw_hours(rows: Mapping[str, Row], title: str, path: Path) -> None:
    """A bar a system, the slowest above: GPU-seconds of a thousand trained response tokens, by what they went to."""
    ranked = sorted(rows, key=lambda name: rate(rows[name]))
    figure = Figure(figsize=(11, 0.3 * len(ranked) + 1.7), dpi=110, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(ranked):
        total, left = 1000 / rate(rows[name]), 0.0
        for words, (parts, colour) in GROUPS.items():
            width = total * sum(rows[name].get(f"part.{part}") or 0.0 for part in parts)
            axes.barh(place, width, left=left, color=colour, label=words if place == 0 else None, height=0.74,
                      edgecolor=VERMILLION if words == "idle" else colour, linewidth=0.5,
                      hatch="//////" if words == "idle" else None)  # fmt: skip
            left += width
        axes.barh(place, max(total - left, 0.0), left=left, color=SAND, height=0.74)
        axes.text(total, place, f" {rate(rows[name]) / rate(rows[BASE]):.2f}×" if BASE in rows else "", va="center", fontsize=8,
                  color=INK)  # fmt: skip
    axes.set_yticks(range(len(ranked)), ranked, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GPU-seconds of 1,000 trained response tokens", color=INK)
    axes.set_title(f"{title}: where GPU time goes (× {BASE}'s throughput at the end of a bar)", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Software": None})


def draw_epochs(rows: Mapping[tuple[Any, str], Row], size: Size, path: Path) -> None:
    """Throughput over verl_colocated's, by epochs, a line a system of a family."""
    figure = Figure(figsize=(8, 4.2), dpi=110, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    colours = [INK, BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, YELLOW, FAINT]
    for name, colour in zip(size.families, colours, strict=False):
        known = {place: rows[count, name] for place, count in enumerate(size.epochs) if (count, name) in rows}
        ratios = [rate(row) / rate(rows[list(size.epochs)[place], BASE]) for place, row in known.items()]
        axes.plot(list(known), ratios, marker="o", color=colour, label=name)
    axes.axhspan(1 - RATIO_ERROR, 1 + RATIO_ERROR, color=SAND, alpha=0.35, linewidth=0)
    axes.set_xticks(range(len(size.epochs)), [f"{count}" for count in size.epochs])
    axes.set_xlabel("epochs over the data set, of which the last is measured", color=INK)
    axes.set_ylabel(f"× {BASE}", color=INK)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, metadata={"Software": None})


# The page.


def write_parts(page: Path, parts: Mapping[str, Sequence[str]]) -> None:
    """What is between `<!-- NAME -->` and `<!-- /NAME -->`. Raises `InputError` for a page that has no such place."""
    text = page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->\n")
        if not begin or not end:
            raise InputError(f"{page}: no place for {name}: write <!-- {name} --> and <!-- /{name} -->, a line each")
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    page.write_text(text, encoding="utf-8")


def write_rows(rows: Sequence[Row], path: Path) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow([_short(row.get(name)) for name in names])


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def parts_of(
    size: Size, table: Table, place: Path, folder: Path, jobs: int, data: Path | None
) -> Iterator[dict[str, list[str]]]:
    entries = tuned(size, table)
    yield epochs(size, table, entries, place / "landscape_epochs.png")
    yield varied(size, table, entries)
    yield recorded(size, table)
    if data is not None:
        yield verl_run(size, table, data, folder)
    yield combination(size, table, entries, folder, jobs)
    yield scales(size, table, entries, place / "landscape_hours.png")


def main(
    data: Annotated[Path | None, typer.Option(help="the folder with verl_run/")] = None,
    page: Annotated[Path, typer.Option(help="the page to renew; pictures and table go beside it")] = HERE
    / "landscape.md",
    folder: Annotated[Path, typer.Option(help="where what was simulated is kept")] = ROOT / "results" / "landscape",
    jobs: Annotated[int, typer.Option(min=1, help="simulations at the same time")] = 2,
    tiny: Annotated[bool, typer.Option("--tiny", help="a few systems on 16 GPUs, to see that it runs")] = False,
) -> None:
    size = TINY if tiny else FULL
    compile_kernels()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulated", total=None)
        table = Table(Outcomes(folder, Simulations(jobs, lambda: progress.advance(bar))), [])
        try:
            for parts in parts_of(size, table, page.parent, folder, jobs, data):
                write_parts(page, parts)
                write_rows(table.rows, page.with_suffix(".csv"))
        except InputError as error:
            print(f"landscape: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
    print(f"Written: {page}, pictures and {page.with_suffix('.csv').name} beside it")


if __name__ == "__main__":
    typer.run(main)
