"""The answer of `simrl advise` on the screen: what to run on each cluster, for how long, at what cost, and how sure that is.

Invariant: fits into 80 columns; every figure is one of the `Advice`'s; what holds on all clusters is said once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from simrl.show.tables.optimize import (
    deadline_lines,
    fill,
    goal_line,
    heading,
    left_out_lines,
    print_answer,
    print_launch,
    robust_lines,
    sentence,
    split_of,
    staleness_of,
    table_of,
    unsettled_lines,
)
from simrl.show.text import listed, number, say
from simrl.study.advice import Advice, Plan, WholeRun
from simrl.study.answer import staleness_bound
from simrl.study.compare import SEEDS
from simrl.study.goal import duration
from simrl.study.model_error import RATIO_ERROR, STEP_ERROR, STEP_SOURCE
from simrl.study.staleness_quality import BENCHMARKS, near
from simrl.study.staleness_quality import SOURCE as QUALITY_SOURCE
from simrl.validation import in_words

FEW = 3  # simulated points of a system: with fewer it was hardly searched
LEAST_SPREAD = 0.005  # of the seeds' rates: less is not shown


def print_advice(found: Advice, console: Console, details: bool = False) -> None:
    """Print the advice; with `details`, also each search."""
    batch = f"{found.batch_samples:,.0f}"
    say(console, f"{found.name}: what to run for {found.updates:,} updates of {batch} samples", style="bold")
    console.print(_table(found))
    fill(console, *_under(found))
    lines = [list(_of_plan(plan)) for plan in found.plans]
    shared = [line for line in lines[0] if len(lines) > 1 and all(line in others for others in lines)]
    for plan, own in zip(found.plans, lines, strict=True):
        heading(console, f"On {plan.gpus:,} GPUs")
        fill(console, *(line for line in own if line not in shared), hanging=2)
    if shared:
        heading(console, "On each of them")
        fill(console, *shared, hanging=2)
    for plan in found.plans if details else ():
        heading(console, f"The search on {plan.gpus:,} GPUs")
        print_answer(plan.answer, console)
    first = found.plans[0]
    heading(console, f"To launch it on {first.gpus:,} GPUs")
    print_launch(first.answer, console)
    if len(found.plans) > 1:
        fill(console, "For the settings of another cluster: --clusters with it alone, or --json.")
    heading(console, "What this rests on")
    fill(console, *_rests_on(first), hanging=2)


def _table(found: Advice) -> Any:
    priced = any(plan.cost is not None for plan in found.plans)
    named = {id(plan.offered): plan.answer.launching.settings for plan in found.plans if plan.offered}
    offered = {run: settings.framework for run, settings in named.items() if settings}
    runs = [run for plan in found.plans for run in (plan, plan.offered) if run is not None]
    columns: dict[str, Any] = {
        "GPUs": lambda run: "" if id(run) in offered else f"{run.gpus:,}",
        "system": lambda run: f"in {offered[id(run)]}: {_system(run)}" if id(run) in offered else _system(run),
        "rollout\n: train": lambda plan: split_of(plan.reasons),
        "tp": lambda plan: plan.option.point.scenario.cluster.tp,
        "samples/s": _rate,
        "off-policy\nmean / max": lambda plan: staleness_of(plan.option),
        "time": lambda plan: duration(plan.hours * 3600),
    }
    if priced:
        columns["cost"] = lambda plan: "–" if plan.cost is None else number(plan.cost)
    else:
        columns["GPU-h"] = lambda plan: number(plan.gpu_hours)
    return table_of(columns.items(), runs, names=1)


def _rate(run: WholeRun) -> str:
    spread = f" ± {run.spread:.0%}" if run.spread >= LEAST_SPREAD else ""
    return f"{run.option.row['samples_per_s']:.3g}{spread}"


def _system(run: WholeRun) -> str:
    """Return the system with its parameters, but not the split."""
    system = run.option.point.scenario.system
    drafter = run.reasons.drafter
    shown = {k: v for k, v in system.parameters.items() if k not in ("rollout_share", "speculation")}
    given = [f"{key}={in_words(value)}" for key, value in shown.items()] + ([drafter] if drafter != "none" else [])
    return f"{system.name}({', '.join(given)})" if given else system.name


def _under(found: Advice) -> Iterator[str]:
    goal = found.plans[0].answer.goal
    if (goal.deadline_s, goal.budget, goal.max_cost) != (None, None, None):
        yield goal_line(goal)
    for plan in found.plans:
        yield from deadline_lines(plan.answer)
    low, high = found.plans[0].interval_hours
    recorded = found.plans[0].option.point.scenario.workload.synthetic is None
    drawn = "; lengths are recorded, and seeds move only what is drawn" if recorded else ""
    yield from unsettled_lines([plan.answer.searched for plan in found.plans])
    yield f"± of samples/s: the farthest of {SEEDS} seeds, from {LEAST_SPREAD:.1%} on{drawn}."
    yield (
        f"Half of the predicted times of real steps were within {STEP_ERROR:.0%}. In that half, with the seeds, the first "
        f"takes {duration(low * 3600)} to {duration(high * 3600)}; this is no bound."
    )
    if any(plan.offered for plan in found.plans):
        yield "Rows without a number of GPUs: the best that the framework offers there."
    left_out = {line for plan in found.plans for line in plan.left_out}
    if left_out:
        yield f"Not in the times, as the scenario does not say: {'; '.join(sorted(left_out))}."


def _of_plan(plan: Plan) -> Iterator[str]:
    found = plan.answer
    yield f"{found.choice.option.row['system']}: {sentence(found.choice.reasons)}"
    others = [choice for choice in found.best if choice is not found.choice]
    level = [choice.option.row["system"] for choice in others if choice.tied]
    if level:
        yield f"Level, closer than simrl's error of {RATIO_ERROR:.0%} at one of the seeds at least: {listed(level)}."
    slower = [f"{1 + c.leads[0]:.2f}× as fast as {c.option.row['system']}" for c in others if not c.tied]
    if slower:
        yield f"It is {listed(slower)}: the best of each of these systems."
    if plan.offered is not None:
        behind = plan.option.merit / plan.offered.option.merit
        framework = found.launching.settings.framework if found.launching.settings else ""
        name = plan.offered.option.row["system"]
        yield f"The best in {framework}, {name}, takes {behind:.2f} times as long: {sentence(plan.offered.reasons)}"
    yield from _searched(plan)
    if len(plan.stages) > 1:
        first, middle, last = (duration(s) for s in plan.stages)
        yield f"Responses grow: an update takes {first} at the beginning, {middle} in the middle and {last} at the end."
    yield from _quality(plan)
    if plan.memory is not None:
        yield from _memory(plan)
    yield from robust_lines(found)


def _searched(plan: Plan) -> Iterator[str]:
    """Yield how much of the space was tried, and what of it counts."""
    found, searched = plan.answer, plan.answer.searched
    size = f"{searched.combinations:,} combinations" if searched.combinations else "a space without end"
    around = f", and {found.polished.points:,} around the best of each system" if found.polished else ""
    first = searched.points - (found.polished.points if found.polished else 0)
    end = "" if found.polished is None or found.polished.ended else "; more --polish may find better"
    yield (
        f"Tried: {first:,} points of {size}{around}; {len(searched.options):,} are possible, and {len(searched.allowed):,} "
        f"of these within the limits{end}."
    )
    yield from [*left_out_lines(searched)][:1]
    few = [f"{name} ({count})" for name, count in searched.simulated(found.space).items() if count < FEW]
    if few and not searched.whole:
        yield f"Simulated fewer than {FEW} times, so hardly searched: {listed(few)}; --trials gives them more."


def _quality(plan: Plan) -> Iterator[str]:
    """Yield what staleness like the choice's cost elsewhere."""
    bound = staleness_bound(plan.option)
    if bound <= 0:
        return
    fresh, *stale = near([bound])
    row = min(stale, key=lambda row: 0.0 if row.eta == bound else abs(row.eta - bound))
    eta = "without a bound" if math.isinf(row.eta) else f"with η = {row.eta:g}"
    scores = zip(BENCHMARKS, fresh.with_decoupled, row.without_decoupled, row.with_decoupled, strict=True)
    cells = ", ".join(f"{name} {none:.1f} → {plain:.1f} / {decoupled:.1f}" for name, none, plain, decoupled in scores)
    yield (
        f"Quality: {cells}: per cent without staleness → {eta}, without / with the decoupled objective "
        f"({QUALITY_SOURCE}). That is a reference, no prediction."
    )
    yield "Not modelled: what stale tokens do to learning; every system gets the given number of updates."


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    assert memory is not None
    text = (
        f"Memory of {plan.option.row['system']}: the KV cache of a "
        f"worker holds {memory.kv_tokens:,} tokens, {memory.used:.0%} of them in use on average; "
        f"at most {memory.peak_sequences:,} sequences ran at a time (max_num_seqs {memory.max_num_seqs:,})"
    )
    if memory.least_utilization < memory.utilization:
        text += f"; gpu_memory_utilization {memory.least_utilization:g} in place of {memory.utilization:g} is as fast"
        text += f" (to {max(memory.loss, 0):.1%})"
    yield f"{text}."


def _rests_on(plan: Plan) -> Iterator[str]:
    yield from (f"{line}." for line in plan.answer.rests_on)
    assumed = any(end.source == "assumed" for end in plan.answer.robustness)
    ranking = "" if assumed else "; the ranking rests on no assumed seconds"
    yield (
        f"simrl's own error: {RATIO_ERROR:.0%} between two options, {STEP_ERROR:.0%} of a time "
        f"({STEP_SOURCE.partition(':')[0]}){ranking}."
    )
    left_out = [
        what
        for what, is_left_out, _ in (note.partition(": left out") for note in plan.answer.space.notes)
        if is_left_out
    ]
    if left_out:
        yield f"Not searched: {', '.join(left_out)} (why: --json)."
