"""The answer of `simrl advise` on the screen: what to run on each cluster, for how long, at what cost, and how sure that is.

Invariant: fits into 100 columns; every figure is one of the `Advice`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from simrl.show.tables.optimize import (
    fill,
    heading,
    print_launch,
    robust_lines,
    sentence,
    split_of,
    staleness_of,
    table_of,
)
from simrl.show.text import listed, number, say
from simrl.study.advice import Advice, Plan
from simrl.study.goal import duration
from simrl.study.model_error import RATIO_ERROR, STEP_ERROR, STEP_SOURCE
from simrl.validation import in_words


def print_advice(found: Advice, console: Console) -> None:
    """Print the advice."""
    batch = f"{found.batch_samples:,.0f}"
    say(console, f"{found.name}: what to run for {found.updates:,} updates of {batch} samples", style="bold")
    console.print(_table(found))
    fill(console, *_under(found))
    for plan in found.plans:
        heading(console, f"On {plan.gpus:,} GPUs")
        fill(console, *_of_plan(plan), hanging=2)
    first = found.plans[0]
    heading(console, f"To launch it on {first.gpus:,} GPUs")
    print_launch(first.found, console)
    if len(found.plans) > 1:
        fill(console, "Those of the other clusters: --clusters with that one, or --json.")
    heading(console, "What this rests on")
    fill(console, *_rests_on(first), hanging=2)


def _table(found: Advice) -> Any:
    priced = any(plan.cost is not None for plan in found.plans)
    columns: dict[str, Any] = {
        "GPUs": lambda plan: f"{plan.gpus:,}",
        "system": lambda plan: _system(plan),
        "rollout\n: train": lambda plan: split_of(plan.choice.reasons),
        "tp": lambda plan: plan.choice.option.point.scenario.cluster.tp,
        "samples/s": lambda plan: f"{plan.choice.option.row['samples_per_s']:.3g} ± {plan.spread:.0%}",
        "off-policy\nmean / max": lambda plan: staleness_of(plan.choice.option),
        "time": lambda plan: duration(plan.hours * 3600),
        "GPU-h": lambda plan: number(plan.gpu_hours),
    }
    if priced:
        columns["cost"] = lambda plan: "–" if plan.cost is None else number(plan.cost)
    return table_of(columns.items(), found.plans, names=1)


def _system(plan: Plan) -> str:
    """Return the system with its parameters, but not the split."""
    system = plan.choice.option.point.scenario.system
    drafter = plan.choice.reasons.drafter
    shown = {k: v for k, v in system.parameters.items() if k not in ("rollout_share", "speculation")}
    given = [f"{key}={in_words(value)}" for key, value in shown.items()] + ([drafter] if drafter != "none" else [])
    return f"{system.name}({', '.join(given)})" if given else system.name


def _under(found: Advice) -> Iterator[str]:
    low, high = found.plans[0].interval_hours
    yield (
        f"± of samples/s: the farthest of three seeds. Times are {STEP_ERROR:.0%} off at the median of real steps, so with the "
        f"seeds the first is {duration(low * 3600)} to {duration(high * 3600)}."
    )
    left_out = {line for plan in found.plans for line in plan.left_out}
    if left_out:
        yield f"Not in the times, as the scenario does not say: {'; '.join(sorted(left_out))}."


def _of_plan(plan: Plan) -> Iterator[str]:
    found = plan.found
    yield f"{found.choice.option.row['system']}: {sentence(found.choice.reasons)}"
    others = [choice for choice in found.best if choice is not found.choice]
    level = [choice.option.row["system"] for choice in others if choice.tied]
    if level:
        yield f"Level, closer than simrl's error of {RATIO_ERROR:.0%} at one of the seeds at least: {listed(level)}."
    slower = [f"{c.option.row['system']} {1 + c.leads[0]:.2f}×" for c in others if not c.tied]
    if slower:
        yield f"It is so many times as fast as the best of the other systems: {', '.join(slower)}."
    polished = found.polished
    end = "" if polished is None or polished.ended else "; more --polish may find better"
    allowed = len(found.searched.allowed)
    yield f"{found.searched.points} points were tried, {allowed} of them possible and within the limits{end}."
    if len(plan.stages) > 1:
        first, middle, last = (duration(s) for s in plan.stages)
        yield f"Responses grow: an update takes {first} at the beginning, {middle} in the middle and {last} at the end."
    if plan.memory is not None:
        yield from _memory(plan)
    yield from robust_lines(found)


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    assert memory is not None
    text = (
        f"Memory: the KV cache of a worker holds {memory.kv_tokens:,} tokens, {memory.used:.0%} of them in use on average; "
        f"at most {memory.peak_sequences:,} sequences ran at a time (max_num_seqs {memory.max_num_seqs:,})"
    )
    if memory.least_utilization < memory.utilization:
        text += f"; gpu_memory_utilization {memory.least_utilization:g} in place of {memory.utilization:g} is as fast"
        text += f" (to {max(memory.loss, 0):.1%})"
    yield f"{text}."


def _rests_on(plan: Plan) -> Iterator[str]:
    yield from (f"{line}." for line in plan.found.rests_on)
    assumed = any(end.source == "assumed" for end in plan.found.robustness)
    if not assumed:
        yield "The ranking rests on no assumed seconds."
    yield f"simrl's own error: {RATIO_ERROR:.0%} between two options, {STEP_ERROR:.0%} of a time ({STEP_SOURCE})."
    yield f"Searched: {' '.join(plan.found.space.asked)}"
    yield from (f"{note}." for note in plan.found.space.notes)
