"""The details of a search on the screen: a sentence, the best few, why, the front, what staleness costs; and the parts that
the advice prints of it, too.

Invariant: fits into 100 columns; every figure is one of the `Answer`'s.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from simrl.profile.metadata import split_words
from simrl.result.metrics import prices
from simrl.result.off_policyness import largest_off_policyness
from simrl.show.tables.compare import unequal_work
from simrl.show.tables.explain import KINDS
from simrl.show.text import Page, filled, listed, say
from simrl.study.answer import Answer, Choice, Reasons
from simrl.study.goal import Goal, duration
from simrl.study.model_error import RATIO_ERROR, WHOLE_RUNS_TOO_FAST
from simrl.study.robustness import End
from simrl.study.search import Option, Searched
from simrl.study.staleness_quality import BENCHMARKS, Quality
from simrl.study.staleness_quality import SOURCE as QUALITY_SOURCE
from simrl.validation import with_parameters

WIDTH = 100
MOST_ON_FRONT = 8
MOST_REASONS = MOST_TIES = 3
WAITS = {
    **{kind: words for kind, (_, words) in KINDS.items()},
    "boundary": "the pass that a worker is in",
    "unknown": "causes unknown",
    "publish": "publishing weights",
    "transfer": "handing on the batch",
    "checkpoint": "checkpoints",
    "evaluate": "evaluation",
    "lost": "lost workers",
}
SOURCES = {
    "decode": "every forward pass",
    "train": "training",
    "acceptance": "acceptance of drafts",
    "assumed": "assumed seconds × 0.5 and × 2",
}


def print_answer(found: Answer, console: Console) -> None:
    """Print the details of a search."""
    fill(console, *_answer(found))
    heading(console, "The best few")
    console.print(_best(found))
    fill(console, *_under_best(found))
    heading(console, "Why")
    for choice in found.best:
        _why(choice, console)
    again = [choice.leads for choice in found.best if len(choice.leads) > 1]
    if again and not any(map(_differ, again)):
        fill(console, f"Seeds change nothing here: {max(map(len, again))} of them gave equal figures.")
    heading(console, "Pareto front: throughput, staleness, cost")
    _print_front(found, console)
    heading(console, "What staleness is known to cost in quality: a reference, not a prediction")
    console.print(_quality(found))
    fill(console, f"{QUALITY_SOURCE}. Largest permitted staleness η; per cent, without / with the decoupled objective.")
    heading(console, "What was searched")
    fill(console, " ".join(found.space.words), *(f"{note}." for note in found.space.notes), hanging=2)


def heading(console: Console, text: str) -> None:
    """Print a heading."""
    console.print()
    say(console, text, style="bold")


def fill(console: Console, *paragraphs: str, indent: int = 0, hanging: int = 0) -> None:
    """Print paragraphs in lines of at most `WIDTH` that fit the screen; a browser breaks its own lines."""
    if isinstance(console, Page):
        say(console, *paragraphs)
        return
    first, others = " " * indent, " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(
        min(WIDTH, console.width), first, others, break_on_hyphens=False, break_long_words=False
    )
    for text in paragraphs:
        say(console, *wrapper.wrap(text), soft_wrap=True)


def _answer(found: Answer) -> Iterator[str]:
    choice, goal, best = found.choice, found.goal, found.best
    option, why = choice.option, choice.reasons
    yield f"{goal_line(goal)}{_of_how_many(found)}"
    yield from unsettled_lines([found.searched])
    split = f"{why.rollout_gpus} GPUs that roll out and {why.train_gpus} that train"
    split = f"all {why.train_gpus} GPUs for both" if why.colocated else split
    drafts = f", drafts of {why.drafter} ({why.drafts})" if why.drafts else ""
    yield f"Run {option.row['system']}, {split}, {_layout(option)}{drafts}: {_figures(option, goal)}."
    tied = [other.option.row["system"] for other in best if other.tied]
    if tied:
        yield (
            f"{listed(tied)} {'is' if len(tied) == 1 else 'are'} as good as far as simrl can tell: closer than its error of "
            f"{RATIO_ERROR:.0%}."
        )
    elif len(best) > 1:
        times, second = f"{1 + min(best[1].leads):.2f} times as {_good(goal)}", best[1].option.row["system"]
        if found.searched.whole:
            yield f"It is {times} as the next system, {second}: beyond simrl's own error of {RATIO_ERROR:.0%}."
        else:
            yield f"It is {times} as the next system of those tried, {second}."
    clusters = {o.point.scenario.cluster.all_gpus for o in found.searched.allowed}
    if goal.deadline_s is goal.budget is None and len(clusters) > 1:
        yield (
            "The search compared several numbers of GPUs by speed alone; --deadline or --budget weighs cost, and the front "
            "below has it."
        )


def goal_line(goal: Goal) -> str:
    """Return the goal and its limits as a sentence."""
    return f"Asked for: {goal.words}{_limits(goal)}."


def deadline_lines(found: Answer) -> Iterator[str]:
    """Yield a warning where the choice hardly meets the deadline."""
    goal, (low, high) = found.goal, WHOLE_RUNS_TOO_FAST
    if goal.deadline_s is not None and goal.seconds(found.choice.option.row) > goal.deadline_s * (1 - high):
        yield (
            f"Mind: that is close to the deadline, and whole runs were predicted {low:.0%} to {high:.0%} too fast "
            "(experiments/recorded_run.md)."
        )


def _of_how_many(found: Answer) -> str:
    """Return how much of the space was searched, if not all of it."""
    searched = found.searched
    if searched.whole:
        return ""
    size = f"{searched.combinations:,} combinations" if searched.combinations else "a space without end"
    return f" {searched.points:,} points of {size} were tried; more --trials may find better."


def _limits(goal: Goal) -> str:
    staleness = (goal.max_off_policyness, "off-policyness at most {:g}")
    limits = (staleness, (goal.max_cost, "a cost of at most {:g} for 1,000 samples"))
    return "".join(f", {words.format(limit)}" for limit, words in limits if limit is not None)


def _figures(option: Option, goal: Goal) -> str:
    row = option.row
    figures = [f"{row['samples_per_s']:.3g} samples/s", f"off-policyness {staleness_of(option)}"]
    if row["cost_per_1k_samples"] is not None:
        price, of_train = prices(option.point.scenario.cluster.model_dump())
        at = f"{price:g}" if of_train is None else f"{price:g} (rollout) and {of_train:g} (training)"
        figures.append(f"a cost of {row['cost_per_1k_samples']:.3g} for 1,000 samples at {at} a GPU-hour")
    else:
        figures.append(f"{option.gpu_hours:.3g} GPU-hours for 1,000 samples")
    if goal.updates:
        unit = "" if goal.price else " GPU-hours"
        figures.append(f"{goal.updates:,} updates in {duration(goal.seconds(row))} for {goal.cost(row):,.4g}{unit}")
    return ", ".join(figures)


def staleness_of(option: Option) -> str:
    """Return mean / largest, and a sign if it had not settled."""
    row = option.row
    return f"{row['off_policyness_mean']:.2f} / {largest_off_policyness(row)}{'' if row['settled'] else '↑'}"


def _layout(option: Option) -> str:
    """Return how a worker's GPUs share the model: tp 2 ep 2."""
    return split_words(option.point.scenario.cluster.model_dump(), between=" ")


def _layout_column(options: Iterable[Option]) -> tuple[str, Callable[[Option], str]]:
    """Return the heading and the cells of the layouts: tp alone where they have nothing else."""
    alone = all(_layout(option).count(" ") == 1 for option in options)
    return ("tp", lambda option: _layout(option).removeprefix("tp ")) if alone else ("GPUs of a\nworker", _layout)


def _named(option: Option) -> str:
    """Return a system with its parameters and its split."""
    share = option.point.scenario.system.parameters.get("rollout_share")
    return _system(option) + (f", {share:.0%} roll out" if share is not None else "")


def table_of(columns: Iterable[tuple[str, Callable[[Any], object]]], rows: Iterable[Any], names: int = 0) -> Table:
    """Return a table of (heading, cell) pairs, in which column `names` stands to the left."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    headings, cells = zip(*columns, strict=True)
    filled(table, headings, ([cell(row) for cell in cells] for row in rows), (names,), overflow="fold")
    table.columns[names].max_width = 38
    return table


def _best(found: Answer) -> Table:
    goal = found.goal
    heading, layout = _layout_column(choice.option for choice in found.best)
    drafts = any(choice.reasons.drafts for choice in found.best)
    priced, planned = found.choice.option.row["cost_per_1k_samples"] is not None, goal.updates > 0
    columns: tuple[tuple[str, Callable[[Choice], object], bool], ...] = (  # heading, cell, whether it is shown
        ("rank", lambda choice: choice.rank, True),
        ("system", lambda choice: _system(choice.option), True),
        ("rollout\n: train", lambda choice: split_of(choice.reasons), True),
        (heading, lambda choice: layout(choice.option), True),
        ("drafter", lambda choice: choice.reasons.drafter, drafts),
        ("samples/s", lambda choice: f"{choice.option.row['samples_per_s']:.3g}", True),
        ("off-policy\nmean / max", lambda choice: staleness_of(choice.option), True),
        ("cost/1k", lambda choice: f"{choice.option.row['cost_per_1k_samples']:.3g}", priced),
        ("GPU-h/1k", lambda choice: f"{choice.option.gpu_hours:.3g}", not priced),
        ("time", lambda choice: duration(goal.seconds(choice.option.row)), planned),
        ("cost" if goal.price else "GPU-h", lambda choice: f"{goal.cost(choice.option.row):,.4g}", planned),
        (f"best as\n{_good(goal)}", lambda choice: "" if choice is found.choice else _behind(choice), True),
    )
    return table_of([(name, cell) for name, cell, shown in columns if shown], found.best, names=1)


def split_of(why: Reasons) -> str:
    """Return the GPUs that roll out and that train."""
    return f"{why.train_gpus} both" if why.colocated else f"{why.rollout_gpus} : {why.train_gpus}"


def _behind(choice: Choice) -> str:
    return f"{1 + choice.leads[0]:.2f}×{' ≈' if choice.tied else '  '}"


def _system(option: Option) -> str:
    """Return the name with the parameters that no other column has."""
    system = option.point.scenario.system
    shown = {k: v for k, v in system.parameters.items() if k not in ("rollout_share", "speculation")}
    return with_parameters(system.name, shown)


def _under_best(found: Answer) -> Iterator[str]:
    searched = found.searched
    whole = "the whole space" if searched.whole else "of a larger space"
    tried = f"{searched.points} points were tried ({whole})"
    if found.polished is not None:
        end = (
            "until no neighbour was better" if found.polished.ended else "not to the end: more --polish may find better"
        )
        tried = f"{tried}, {found.polished.points} of them around the best of each system, {end}"
    lines = [f"{tried}, {len(searched.allowed)} of them possible and within the limits"]
    others, shown = found.within_error, [choice.option for choice in found.best]
    if others:
        lines.append(f"{others} more {'is' if others == 1 else 'are'} within {RATIO_ERROR:.0%} of the best")
    yield f"The best of each system, with its rank among all. {'; '.join(lines)}."
    tied = [option for option in searched.allowed[: 1 + others] if all(option is not own for own in shown)]
    if tied:
        best = found.choice.option.merit
        names = [f"{_named(o)}, {_layout(o)} ({best / o.merit - 1:.1%} behind)" for o in tied[:MOST_TIES]]
        more = f", and {len(tied) - MOST_TIES} more" if len(tied) > MOST_TIES else ""
        yield f"Within this, and not in the table: {'; '.join(names)}{more}."
    if any(choice.tied for choice in found.best):
        yield f"≈ closer than simrl's own error of {RATIO_ERROR:.0%}, at one seed at least: a tie."
    if any(not choice.option.row["settled"] for choice in found.best):
        yield "↑ off-policyness was still growing when the simulation ended: simulate more steps."
    rows = [{**choice.option.row, "variant": ""} for choice in found.best]
    tokens = ", ".join(f"{row['tokens_per_s']:,.0f}" for row in rows)
    yield from (f"{note}. Tokens/s in the order of the table: {tokens}." for note in unequal_work(rows))
    yield from left_out_lines(searched)


def unsettled_lines(searched: Sequence[Searched]) -> Iterator[str]:
    """Yield the systems that a search could not rank, as they had not settled when their simulations ended."""
    growing = {
        o.point.scenario.system.name for of in searched for o in of.options if any(b.unsettled for b in o.broken)
    }
    if names := sorted(growing - {o.point.scenario.system.name for of in searched for o in of.allowed}):
        yield f"Not settled, so not ranked: {listed(names)}; more steps may rank {'it' if len(names) == 1 else 'them'}."


def left_out_lines(searched: Searched) -> Iterator[str]:
    """Yield why points were no choice, the most frequent reasons first."""
    for reason, count in searched.reasons()[:MOST_REASONS]:
        yield f"Left out {count}: {reason}."


def _why(choice: Choice, console: Console) -> None:
    why, variant = choice.reasons, choice.variant
    fill(console, f"{choice.rank}. {choice.option.row['system']}. {sentence(why)}", hanging=3)
    lines = [f"{name}: {says}." for name, says in why.findings]
    if _differ(choice.leads):
        shares = ", ".join(f"{lead:+.1%}" for lead in choice.leads)
        lines.append(f"The best is ahead of it by {shares} with {len(choice.leads)} seeds.")
    if variant is not None:
        cluster, own = variant.point.scenario.cluster, choice.option.point.scenario.cluster
        other = (cluster.gpu, cluster.gpus, cluster.train) != (own.gpu, own.gpus, own.train)
        name = f"{variant.row['system']}, {_layout(variant)}" + (f", {cluster.words()}" if other else "")
        loss = choice.variant_loss
        faster = f"Its next variant, {name}, is {-loss:.1%} better, and its rollout and training share a node."
        lines.append(faster if loss < 0 else f"It is {loss:.1%} ahead of its next variant, {name}.")
    fill(console, *lines, indent=3, hanging=2)


def _differ(leads: Sequence[float]) -> bool:
    return max(leads) - min(leads) > 1e-12


def sentence(why: Reasons) -> str:
    """Return where the GPU time goes, and what updates wait for."""
    parts = listed([f"{clause} ({share:.0%})" for _, clause, share in why.parts])
    waits = listed([f"{WAITS.get(kind, kind)} {share:.0%}" for kind, share in why.waits if share > 0.01])
    rest = f"; most of the rest goes to {parts}." if parts else "."
    waits = f" What an update waits for: {waits}." if waits else ""
    return f"{why.ideal_share:.0%} of its GPU time is work that even an ideal run has{rest}{waits}"


def _print_front(found: Answer, console: Console) -> None:
    step = max(math.ceil(len(found.front) / MOST_ON_FRONT), 1)
    shown = found.front[::-1][::step][::-1]  # the fastest always

    def gpus(option: Option) -> object:
        cluster = option.point.scenario.cluster
        return f"{cluster.gpus} + {cluster.train.gpus}" if cluster.train else option.row["gpus"]

    def cost(option: Option) -> str:
        found = option.row["cost_per_1k_samples"]
        return "–" if found is None else f"{found:.3g}"

    heading, layout = _layout_column(shown)
    columns: dict[str, Callable[[Option], object]] = {
        "system": _named,
        "GPUs": gpus,
        heading: layout,
        "drafter": lambda option: option.row["speculation"].partition("(")[0],
        "off-policy\nmean / max": staleness_of,
        "samples/s": lambda option: f"{option.row['samples_per_s']:.3g}",
        "GPU-h/1k": lambda option: f"{option.gpu_hours:.3g}",
        "cost/1k": cost,
    }
    console.print(table_of(columns.items(), shown))
    if len(shown) < len(found.front):
        fill(console, f"{len(shown)} of {len(found.front)}; all are in --json.")


def robust_lines(found: Answer) -> Iterator[str]:
    """Yield what wins with other inputs."""
    sources = dict.fromkeys(end.source for end in found.robustness)
    off = len(sources) - ("assumed" in sources)
    again = f", {off} inputs 20 % off in turn" if off else ""
    if sources:
        yield f"What can win was simulated again{again}; splits and η stay as they are."
    for source in sources:
        ends = [_of_end(end, found.choice.option) for end in found.robustness if end.source == source]
        yield f"{SOURCES[source]}: {'; '.join(ends)}."


def _of_end(end: End, choice: Option) -> str:
    unit = "time" if end.source != "acceptance" else "acceptance"
    at = f"at {_percent(end.factor)} {unit}"
    if end.winner is None:
        reason = end.untried.get(choice.point.hash)
        return f"{at} none of them keeps the limits" if reason is None else f"{at} nothing is known, as {reason}"
    left_out = f" ({len(end.untried)} of the others could not be tried)" if end.untried else ""
    if end.winner is choice:
        over = f" over {end.rival.row['system']} ({_layout(end.rival)})" if end.rival else ""
        return f"{at} the choice still wins, by {_lead(end.lead, over)}{left_out}"
    assert end.flip is not None
    flip = end.flip
    first, there = (f"{winner.row['system']} ({_layout(winner)})" for winner in (flip.winner, end.winner))
    there = "it" if end.winner is flip.winner else there
    breaks = "the choice breaks a limit" + ("" if there == "it" else f", and {there} wins")
    ahead = f"{there} is ahead by {_lead(end.lead)}" if end.kept else breaks
    holds = f"at {_percent(flip.holds)}" if flip.holds != 1 else "as it is"
    side = "below" if flip.flips < 1 else "above"
    return f"{first} wins {side} {_percent(flip.flips)} {unit} ({holds} the choice still does; {at} {ahead}){left_out}"


def _good(goal: Goal) -> str:
    return "cheap" if goal.deadline_s is not None else "fast"


def _lead(lead: float, over: str = "") -> str:
    if math.isinf(lead):
        return "any margin, as nothing else keeps the limits"
    return f"{lead:.1%}{over}" + (", less than simrl's own error" if lead < RATIO_ERROR else "")


def _percent(factor: float) -> str:
    """Return a factor as the percentage added."""
    return f"{100 * (factor - 1):+.3g} %".replace("-", "−")


def _quality(found: Answer) -> Table:
    def cell(row: Quality, i: int) -> str:
        plain = f"{row.without_decoupled[i]:.1f}"
        return plain if row.eta == 0 else f"{plain} / {row.with_decoupled[i]:.1f}"

    columns: dict[str, Callable[[Quality], object]] = {
        "η": lambda row: "none" if math.isinf(row.eta) else f"{row.eta:g}"
    }
    columns |= {benchmark: partial(cell, i=i) for i, benchmark in enumerate(BENCHMARKS)}
    return table_of(columns.items(), found.quality)


def print_launch(found: Answer, console: Console) -> None:
    """Print the settings of the choice, or of the best option that a framework has."""
    launching, settings = found.launching, found.launching.settings
    if launching.refused:
        fill(console, f"{found.choice.option.row['system']}: {launching.refused}.")
    if settings is None:
        fill(console, "Nothing that was tried is offered by a framework whose documentation simrl knows.")
        return
    if launching.refused:
        option = launching.option
        times = f"{found.choice.option.merit / option.merit:.2f} times as {_good(found.goal)}"
        name = f"{option.row['system']}, {_layout(option)}, number {launching.rank} of all that was tried"
        fill(console, f"The best that is offered is {name} (number 1 is {times}), in {settings.framework}:")
    else:
        fill(console, f"In {settings.framework}:")
    console.print()
    say(console, " \\\n  ".join(settings.command), soft_wrap=True)
    console.print()
    fill(console, f"Option names: {'; '.join(settings.documents)}. Model, data, reward and optimizer are yours to add.")
    fill(console, *(f"Mind: {note}." for note in settings.notes))
