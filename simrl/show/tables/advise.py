"""The answer of `simrl advise` on the screen: what to run on each cluster, for how long, at what
cost, and how sure that is; and the details of a search: the best few, why, the front, what
staleness costs.

Invariant: fits into 80 columns, the details into 100; every figure is one of the `Advice`'s; what
holds on all clusters is said once.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.profile.metadata import split_words
from simrl.result.metrics import prices
from simrl.result.off_policyness import largest_off_policyness
from simrl.show.tables.compare import unequal_work
from simrl.show.tables.explain import KINDS
from simrl.show.text import Page, listed, number, plain_table, say
from simrl.study.advice import Advice, KvPool, Plan, WholeRun
from simrl.study.answer import Answer, Choice, Reasons, staleness_bound
from simrl.study.compare import SEEDS
from simrl.study.goal import Goal, duration
from simrl.study.model_error import RATIO_ERROR, STEP_ERROR, STEP_SOURCE, WHOLE_RUNS_TOO_FAST
from simrl.study.robustness import End
from simrl.study.search import Option, Searched
from simrl.study.staleness_quality import BENCHMARKS, SOURCE as QUALITY_SOURCE, Quality, near
from simrl.validation import in_words

WIDTH = 100
FEW = 3  # simulated points of a system: with fewer it was hardly searched
LEAST_LEAD = 0.0005  # of a merit: less is shown as 0.0%
LEAST_SPREAD = 0.005  # of the seeds' rates: less is not shown
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
Columns = Iterable[tuple[str, Callable[[Any], object], bool]]  # heading, cell, whether it is shown


def print_advice(advice: Advice, console: Console, details: bool = False) -> None:
    """Print the advice; with `details`, also each search."""
    first = advice.plans[0]
    goal = first.answer.goal
    heading = f"{advice.name}: what to run for {goal.updates:,} updates of {goal.batch_samples:,.0f} samples"
    say(console, heading, style="bold")
    console.print(_clusters(advice))
    _fill(console, *_under_clusters(advice))
    lines = [list(_of_plan(plan)) for plan in advice.plans]
    shared = [
        line for line in lines[0] if len(lines) > 1 and all(line in others for others in lines)
    ]
    for plan, lines_of_plan in zip(advice.plans, lines, strict=True):
        _head(
            console,
            f"On {plan.gpus:,} GPUs",
            *(line for line in lines_of_plan if line not in shared),
        )
    if shared:
        _head(console, "On each of them", *shared)
    for plan in advice.plans if details else ():
        _head(console, f"The search on {plan.gpus:,} GPUs")
        print_search(plan.answer, console)
    _head(console, f"To launch it on {first.gpus:,} GPUs")
    _print_launch(first.answer, console)
    if len(advice.plans) > 1:
        _fill(console, "For the settings of another cluster: --clusters with it alone, or --json.")
    _head(console, "What this rests on", *_rests_on(first.answer))


def print_search(answer: Answer, console: Console) -> None:
    """Print the details of a search."""
    _fill(console, *_choice(answer))
    _head(console, "The best few")
    console.print(_best(answer))
    _fill(console, *_under_best(answer))
    _head(console, "Why")
    for choice in answer.best:
        _why(choice, console)
    seeds = [choice.leads for choice in answer.best if len(choice.leads) > 1]
    if seeds and not any(map(_differ, seeds)):
        _fill(
            console,
            f"Seeds change nothing here: {max(map(len, seeds))} of them gave equal figures.",
        )
    _head(console, "Pareto front: throughput, staleness, cost")
    _print_front(answer.front, console)
    _head(console, "What staleness is known to cost in quality: a reference, not a prediction")
    console.print(_quality_table(answer.quality))
    _fill(
        console,
        f"{QUALITY_SOURCE}. Largest permitted staleness η; per cent, without / with the decoupled objective.",
    )
    _head(
        console,
        "What was searched",
        " ".join(answer.space.words),
        *(f"{note}." for note in answer.space.notes),
    )


def _head(console: Console, text: str, *paragraphs: str) -> None:
    """Print a heading, and the paragraphs below it."""
    console.print()
    say(console, text, style="bold")
    _fill(console, *paragraphs, hanging=2)


def _fill(console: Console, *paragraphs: str, indent: int = 0, hanging: int = 0) -> None:
    """Print paragraphs in lines of at most `WIDTH` that fit the screen; a browser breaks its own
    lines."""
    if isinstance(console, Page):
        say(console, *paragraphs)
        return
    first, others = " " * indent, " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(
        min(WIDTH, console.width), first, others, break_on_hyphens=False, break_long_words=False
    )
    for text in paragraphs:
        say(console, *wrapper.wrap(text), soft_wrap=True)


def _table(columns: Columns, rows: Iterable[Any], names: int = 0) -> Table:
    """Return a table of the columns that are shown; column `names` stands to the left."""
    shown = [(heading, cell) for heading, cell, is_shown in columns if is_shown]
    lines = ([cell(row) for _, cell in shown] for row in rows)
    table = plain_table(
        [heading for heading, _ in shown], lines, (names,), no_wrap=False, overflow="fold"
    )
    table.columns[names].max_width = 38
    return table


# Words for an option.


def _system(option: Option, drafter: str = "none") -> str:
    """Return the system with the parameters that no column has, and the drafter where none has
    that."""
    system = option.point.scenario.system
    shown = [
        f"{k}={in_words(v)}"
        for k, v in system.parameters.items()
        if k not in ("rollout_share", "speculation")
    ]
    shown += [drafter] * (drafter != "none")
    return f"{system.name}({', '.join(shown)})" if shown else system.name


def _with_split(option: Option) -> str:
    """Return a system with its parameters and its split."""
    share = option.point.scenario.system.parameters.get("rollout_share")
    return _system(option) + (f", {share:.0%} roll out" if share is not None else "")


def _layout(option: Option) -> str:
    """Return how a worker's GPUs share the model: tp 2 ep 2."""
    return split_words(option.point.scenario.cluster.model_dump(), between=" ")


def _layout_column(options: Iterable[Option]) -> tuple[str, Callable[[Option], str]]:
    """Return the heading and the cells of the layouts: tp alone where they have nothing else."""
    return (
        ("tp", lambda option: _layout(option).removeprefix("tp "))
        if all(_layout(option).count(" ") == 1 for option in options)
        else ("GPUs of a\nworker", _layout)
    )


def _split(why: Reasons) -> str:
    """Return the GPUs that roll out and that train."""
    return f"{why.train_gpus} both" if why.colocated else f"{why.rollout_gpus} : {why.train_gpus}"


def _rate(option: Option) -> str:
    return f"{option.row['samples_per_s']:.3g}"


def _staleness(option: Option) -> str:
    """Return mean / largest off-policyness, and a sign if it had not settled."""
    row = option.row
    return f"{row['off_policyness_mean']:.2f} / {largest_off_policyness(row)}{'' if row['settled'] else '↑'}"


def _cost(option: Option) -> str:
    cost = option.row["cost_per_1k_samples"]
    return "–" if cost is None else f"{cost:.3g}"


def _gpu_hours(option: Option) -> str:
    return f"{option.gpu_hours:.3g}"


def _good(goal: Goal) -> str:
    return "cheap" if goal.deadline_s is not None else "fast"


def _time_and_waits(why: Reasons) -> str:
    """Return where the GPU time goes, and what updates wait for."""
    parts = listed([f"{clause} ({share:.0%})" for _, clause, share in why.parts])
    waits = listed(
        [f"{WAITS.get(kind, kind)} {share:.0%}" for kind, share in why.waits if share > 0.01]
    )
    rest = f"; most of the rest goes to {parts}." if parts else "."
    waits = f" What an update waits for: {waits}." if waits else ""
    return f"{why.ideal_share:.0%} of its GPU time is work that even an ideal run has{rest}{waits}"


# Lines on a search.


def _asked_for(goal: Goal) -> str:
    """Return the goal and its limits as a sentence."""
    staleness = (goal.max_off_policyness, "off-policyness at most {:g}")
    limits = (staleness, (goal.max_cost, "a cost of at most {:g} for 1,000 samples"))
    with_limits = [
        goal.words,
        *(words.format(limit) for limit, words in limits if limit is not None),
    ]
    return f"Asked for: {', '.join(with_limits)}."


def _size(searched: Searched) -> str:
    return (
        f"{searched.combinations:,} combinations"
        if searched.combinations
        else "a space without end"
    )


def unsettled_lines(searches: Sequence[Searched]) -> Iterator[str]:
    """Yield the systems that a search could not rank, as they had not settled when their
    simulations ended."""
    growing = {
        o.system
        for searched in searches
        for o in searched.options
        if any(b.unsettled for b in o.broken)
    }
    if names := sorted(growing - {o.system for searched in searches for o in searched.allowed}):
        yield f"Not settled, so not ranked: {listed(names)}; more steps may rank {'it' if len(names) == 1 else 'them'}."


def _left_out_lines(searched: Searched, most: int) -> Iterator[str]:
    """Yield why points were no choice, the most frequent reasons first."""
    for reason, count in searched.reasons()[:most]:
        yield f"Left out {count}: {reason}."


# The advice.


def _clusters(advice: Advice) -> Table:
    """Return the table of the clusters: the choice, and the best of the framework that lacks it."""
    offered = {
        id(plan.offered): plan.answer.launching.settings for plan in advice.plans if plan.offered
    }
    runs = [run for plan in advice.plans for run in (plan, plan.offered) if run is not None]
    priced = any(plan.cost is not None for plan in advice.plans)

    def system(run: WholeRun) -> str:
        settings, name = offered.get(id(run)), _system(run.option, run.reasons.drafter)
        return f"in {settings.framework}: {name}" if settings else name

    def rate(run: WholeRun) -> str:
        return _rate(run.option) + (f" ± {run.spread:.0%}" if run.spread >= LEAST_SPREAD else "")

    columns: Columns = (
        ("GPUs", lambda run: "" if offered.get(id(run)) else f"{run.gpus:,}", True),
        ("system", system, True),
        ("rollout\n: train", lambda run: _split(run.reasons), True),
        ("tp", lambda run: run.option.point.scenario.cluster.tp, True),
        ("samples/s", rate, True),
        ("off-policy\nmean / max", lambda run: _staleness(run.option), True),
        ("time", lambda run: duration(run.hours * 3600), True),
        ("cost", lambda run: "–" if run.cost is None else number(run.cost), priced),
        ("GPU-h", lambda run: number(run.gpu_hours), not priced),
    )
    return _table(columns, runs, names=1)


def _under_clusters(advice: Advice) -> Iterator[str]:
    first = advice.plans[0]
    goal, (low_h, high_h) = first.answer.goal, first.interval_hours
    low, high = WHOLE_RUNS_TOO_FAST
    if (goal.deadline_s, goal.budget, goal.max_cost) != (None, None, None):
        yield _asked_for(goal)
    for plan in advice.plans:
        goal = plan.answer.goal
        if goal.deadline_s is not None and goal.seconds(plan.option.row) > goal.deadline_s * (
            1 - high
        ):
            yield (
                f"Mind: that is close to the deadline, and whole runs were predicted {low:.0%} to {high:.0%} too fast "
                "(experiments/recorded_run.md)."
            )
    recorded = first.option.point.scenario.workload.synthetic is None
    drawn = "; lengths are recorded, and seeds move only what is drawn" if recorded else ""
    yield from unsettled_lines([plan.answer.searched for plan in advice.plans])
    yield f"± of samples/s: the farthest of {SEEDS} seeds, from {LEAST_SPREAD:.1%} on{drawn}."
    yield (
        f"Half of the predicted times of real steps were within {STEP_ERROR:.0%}. In that half, with the seeds, the first "
        f"takes {duration(low_h * 3600)} to {duration(high_h * 3600)}; this is no bound."
    )
    if any(plan.offered for plan in advice.plans):
        yield "Rows without a number of GPUs: the best that the framework offers there."
    left_out = {line for plan in advice.plans for line in plan.left_out}
    if left_out:
        yield f"Not in the times, as the scenario does not say: {'; '.join(sorted(left_out))}."


def _of_plan(plan: Plan) -> Iterator[str]:
    answer = plan.answer
    yield f"{plan.option.row['system']}: {_time_and_waits(plan.reasons)}"
    level, others = answer.tied, [choice for choice in answer.best[1:] if not choice.tied]
    if level:
        yield f"Level, closer than simrl's error of {RATIO_ERROR:.0%} at one of the seeds at least: {listed(level)}."
    if others:
        slower = [
            f"{1 + choice.leads[0]:.2f}× as fast as {choice.option.row['system']}"
            for choice in others
        ]
        yield f"It is {listed(slower)}: the best of each of these systems."
    if plan.offered is not None:
        behind = plan.option.merit / plan.offered.option.merit
        framework = answer.launching.settings.framework if answer.launching.settings else ""
        name = plan.offered.option.row["system"]
        yield f"The best in {framework}, {name}, takes {behind:.2f} times as long: {_time_and_waits(plan.offered.reasons)}"
    yield from _tried(answer)
    if len(plan.stages) > 1:
        first, middle, last = (duration(s) for s in plan.stages)
        yield f"Responses grow: an update takes {first} at the beginning, {middle} in the middle and {last} at the end."
    yield from _quality(staleness_bound(plan.option))
    if plan.memory is not None:
        yield _memory(plan.option, plan.memory)
    yield from robust_lines(answer)


def _tried(answer: Answer) -> Iterator[str]:
    """Yield how much of the space was tried, and what of it counts."""
    searched, polished = answer.searched, answer.polished
    around = f", and {polished.points:,} around the best of each system" if polished else ""
    first = searched.points - (polished.points if polished else 0)
    end = "" if polished is None or polished.ended else "; more --polish may find better"
    yield (
        f"Tried: {first:,} points of {_size(searched)}{around}; {len(searched.options):,} are possible, and "
        f"{len(searched.allowed):,} of these within the limits{end}."
    )
    yield from _left_out_lines(searched, most=1)
    few = [
        f"{name} ({count})"
        for name, count in searched.simulated(answer.space).items()
        if count < FEW
    ]
    if few and not searched.whole:
        yield f"Simulated fewer than {FEW} times, so hardly searched: {listed(few)}; --trials gives them more."


def _quality(bound: float) -> Iterator[str]:
    """Yield what staleness up to the bound cost elsewhere."""
    if bound <= 0:
        return
    fresh, *stale = near([bound])
    row = min(stale, key=lambda row: 0.0 if row.eta == bound else abs(row.eta - bound))
    eta = "without a bound" if math.isinf(row.eta) else f"with η = {row.eta:g}"
    cells = ", ".join(
        f"{name} {none:.1f} → {plain:.1f} / {decoupled:.1f}"
        for name, none, plain, decoupled in zip(
            BENCHMARKS, fresh.with_decoupled, row.without_decoupled, row.with_decoupled, strict=True
        )
    )
    yield (
        f"Quality: {cells}: per cent without staleness → {eta}, without / with the decoupled objective "
        f"({QUALITY_SOURCE}). That is a reference, no prediction."
    )
    yield "Not modelled: what stale tokens do to learning; every system gets the given number of updates."


def _memory(option: Option, memory: KvPool) -> str:
    text = (
        f"Memory of {option.row['system']}: the KV cache of a "
        f"worker holds {memory.kv_tokens:,} tokens, {memory.used:.0%} of them in use on average; "
        f"at most {memory.peak_sequences:,} sequences ran at a time (max_num_seqs {memory.max_num_seqs:,})"
    )
    if memory.least_utilization < memory.utilization:
        text += f"; gpu_memory_utilization {memory.least_utilization:g} in place of {memory.utilization:g} is as fast"
        text += f" (to {max(memory.loss, 0):.1%})"
    return f"{text}."


def robust_lines(answer: Answer) -> Iterator[str]:
    """Yield what wins with other inputs."""
    sources = dict.fromkeys(end.source for end in answer.robustness)
    off = len(sources) - ("assumed" in sources)
    inputs_off = f", {off} inputs 20 % off in turn" if off else ""
    if sources:
        yield f"What can win was simulated again{inputs_off}; splits and η stay as they are."
    for source in sources:
        ends = [
            _of_end(end, answer.choice.option) for end in answer.robustness if end.source == source
        ]
        yield f"{SOURCES[source]}: {'; '.join(ends)}."


def _of_end(end: End, choice: Option) -> str:
    unit = "time" if end.source != "acceptance" else "acceptance"
    at = f"at {_percent(end.factor)} {unit}"
    if end.winner is None:
        reason = end.untried.get(choice.point.hash)
        return (
            f"{at} none of them keeps the limits"
            if reason is None
            else f"{at} nothing is known, as {reason}"
        )
    left_out = f" ({len(end.untried)} of the others could not be tried)" if end.untried else ""
    if end.winner is choice:
        if end.rival is None:
            won = "still wins, as nothing else keeps the limits"
        elif end.lead < RATIO_ERROR:
            less = f" ({end.lead:.1%} ahead, less than simrl's own error)" * (
                end.lead >= LEAST_LEAD
            )
            won = f"is level with {_name(end.rival)}{less}"
        else:
            won = f"still wins, by {end.lead:.1%} over {_name(end.rival)}"
        return f"{at} the choice {won}{left_out}"
    assert end.flip is not None
    flip = end.flip
    there = "it" if end.winner is flip.winner else _name(end.winner)
    breaks = "the choice breaks a limit" + ("" if there == "it" else f", and {there} wins")
    ahead = f"{there} is {_ahead(end.lead)}" if end.kept else breaks
    holds = f"at {_percent(flip.holds)}" if flip.holds != 1 else "as it is"
    side = "below" if flip.flips < 1 else "above"
    return (
        f"{_name(flip.winner)} wins {side} {_percent(flip.flips)} {unit} ({holds} the choice still does; {at} {ahead})"
        f"{left_out}"
    )


def _name(option: Option) -> str:
    return f"{option.row['system']} ({_layout(option)})"


def _ahead(lead: float) -> str:
    """Return a lead over the choice in words."""
    small = ", less than simrl's own error" if lead < RATIO_ERROR else ""
    return f"ahead by {lead:.1%}{small}" if lead >= LEAST_LEAD else "level with the choice"


def _percent(factor: float) -> str:
    """Return a factor as the percentage added."""
    return f"{100 * (factor - 1):+.3g} %".replace("-", "−")


def _print_launch(answer: Answer, console: Console) -> None:
    """Print the settings of the choice, or of the best option that a framework has."""
    launching, settings = answer.launching, answer.launching.settings
    if launching.refused:
        _fill(console, f"{answer.choice.option.row['system']}: {launching.refused}.")
    if settings is None:
        _fill(
            console,
            "Nothing that was tried is offered by a framework whose documentation simrl knows.",
        )
        return
    best = ""
    if launching.refused:
        option = launching.option
        times = f"{answer.choice.option.merit / option.merit:.2f} times as {_good(answer.goal)}"
        name = f"{option.row['system']}, {_layout(option)}, number {launching.rank} of all that was tried"
        best = f"The best that is offered is {name} (number 1 is {times}), "
    _fill(console, f"{best}{'in' if best else 'In'} {settings.framework}:")
    console.print()
    say(console, " \\\n  ".join(settings.command), soft_wrap=True)
    console.print()
    _fill(
        console,
        f"Option names: {'; '.join(settings.documents)}. Model, data, reward and optimizer are yours to add.",
    )
    _fill(console, *(f"Mind: {note}." for note in settings.notes))


def _rests_on(answer: Answer) -> Iterator[str]:
    yield from (f"{line}." for line in answer.rests_on)
    assumed = any(end.source == "assumed" for end in answer.robustness)
    ranking = "" if assumed else "; the ranking rests on no assumed seconds"
    yield (
        f"simrl's own error: {RATIO_ERROR:.0%} between two options, {STEP_ERROR:.0%} of a time "
        f"({STEP_SOURCE.partition(':')[0]}){ranking}."
    )
    left_out = [
        note.partition(": left out")[0] for note in answer.space.notes if ": left out" in note
    ]
    if left_out:
        yield f"Not searched: {', '.join(left_out)} (why: --json)."


# The details of a search.


def _choice(answer: Answer) -> Iterator[str]:
    """Yield the goal, the choice, and its lead."""
    option, why, goal, searched = (
        answer.choice.option,
        answer.choice.reasons,
        answer.goal,
        answer.searched,
    )
    part = f" {searched.points:,} points of {_size(searched)} were tried; more --trials may find better."
    yield _asked_for(goal) + part * (not searched.whole)
    yield from unsettled_lines([searched])
    split = f"{why.rollout_gpus} GPUs that roll out and {why.train_gpus} that train"
    split = f"all {why.train_gpus} GPUs for both" if why.colocated else split
    drafts = f", drafts of {why.drafter} ({why.drafts})" if why.drafts else ""
    yield f"Run {option.row['system']}, {split}, {_layout(option)}{drafts}: {_figures(option, goal)}."
    if answer.tied:
        are = "is" if len(answer.tied) == 1 else "are"
        yield (
            f"{listed(answer.tied)} {are} as good as far as simrl can tell: closer than its error of {RATIO_ERROR:.0%}."
        )
    elif len(answer.best) > 1:
        second = answer.best[1]
        of_those, sure = (
            ("", f": beyond simrl's own error of {RATIO_ERROR:.0%}")
            if searched.whole
            else (" of those tried", "")
        )
        yield (
            f"It is {1 + min(second.leads):.2f} times as {_good(goal)} as the next system{of_those}, "
            f"{second.option.row['system']}{sure}."
        )
    if (
        goal.deadline_s is goal.budget is None
        and len({o.point.scenario.cluster.all_gpus for o in searched.allowed}) > 1
    ):
        yield (
            "The search compared several numbers of GPUs by speed alone; --deadline or --budget weighs cost, and the front "
            "below has it."
        )


def _figures(option: Option, goal: Goal) -> str:
    row = option.row
    figures = [f"{_rate(option)} samples/s", f"off-policyness {_staleness(option)}"]
    if row["cost_per_1k_samples"] is not None:
        price, of_train = prices(option.point.scenario.cluster.model_dump())
        at = (
            f"{price:g}" if of_train is None else f"{price:g} (rollout) and {of_train:g} (training)"
        )
        figures.append(f"a cost of {_cost(option)} for 1,000 samples at {at} a GPU-hour")
    else:
        figures.append(f"{_gpu_hours(option)} GPU-hours for 1,000 samples")
    if goal.updates:
        unit = "" if goal.price else " GPU-hours"
        figures.append(
            f"{goal.updates:,} updates in {duration(goal.seconds(row))} for {goal.cost(row):,.4g}{unit}"
        )
    return ", ".join(figures)


def _best(answer: Answer) -> Table:
    goal = answer.goal
    heading, layout = _layout_column(choice.option for choice in answer.best)
    drafts = any(choice.reasons.drafts for choice in answer.best)
    priced, planned = answer.choice.option.row["cost_per_1k_samples"] is not None, goal.updates > 0

    def behind(choice: Choice) -> str:
        return (
            ""
            if choice is answer.choice
            else f"{1 + choice.leads[0]:.2f}×{' ≈' if choice.tied else '  '}"
        )

    columns: Columns = (
        ("rank", lambda choice: choice.rank, True),
        ("system", lambda choice: _system(choice.option), True),
        ("rollout\n: train", lambda choice: _split(choice.reasons), True),
        (heading, lambda choice: layout(choice.option), True),
        ("drafter", lambda choice: choice.reasons.drafter, drafts),
        ("samples/s", lambda choice: _rate(choice.option), True),
        ("off-policy\nmean / max", lambda choice: _staleness(choice.option), True),
        ("cost/1k", lambda choice: _cost(choice.option), priced),
        ("GPU-h/1k", lambda choice: _gpu_hours(choice.option), not priced),
        ("time", lambda choice: duration(goal.seconds(choice.option.row)), planned),
        (
            "cost" if goal.price else "GPU-h",
            lambda choice: f"{goal.cost(choice.option.row):,.4g}",
            planned,
        ),
        (f"best as\n{_good(goal)}", behind, True),
    )
    return _table(columns, answer.best, names=1)


def _under_best(answer: Answer) -> Iterator[str]:
    searched, polished, others = answer.searched, answer.polished, answer.within_error
    lines = [
        f"{searched.points} points were tried ({'the whole space' if searched.whole else 'of a larger space'})"
    ]
    if polished is not None:
        end = (
            "until no neighbour was better"
            if polished.ended
            else "not to the end: more --polish may find better"
        )
        lines[0] += f", {polished.points} of them around the best of each system, {end}"
    lines[0] += f", {len(searched.allowed)} of them possible and within the limits"
    if others:
        lines.append(
            f"{others} more {'is' if others == 1 else 'are'} within {RATIO_ERROR:.0%} of the best"
        )
    yield f"The best of each system, with its rank among all. {'; '.join(lines)}."
    in_table = [choice.option for choice in answer.best]
    tied = [
        option
        for option in searched.allowed[: 1 + others]
        if all(option is not shown for shown in in_table)
    ]
    if tied:
        best = answer.choice.option.merit
        names = [
            f"{_with_split(o)}, {_layout(o)} ({best / o.merit - 1:.1%} behind)"
            for o in tied[:MOST_TIES]
        ]
        more = f", and {len(tied) - MOST_TIES} more" if len(tied) > MOST_TIES else ""
        yield f"Within this, and not in the table: {'; '.join(names)}{more}."
    if answer.tied:
        yield f"≈ closer than simrl's own error of {RATIO_ERROR:.0%}, at one seed at least: a tie."
    if any(not option.row["settled"] for option in in_table):
        yield "↑ off-policyness was still growing when the simulation ended: simulate more steps."
    rows = [{**option.row, "variant": ""} for option in in_table]
    tokens = ", ".join(f"{row['tokens_per_s']:,.0f}" for row in rows)
    yield from (
        f"{note}. Tokens/s in the order of the table: {tokens}." for note in unequal_work(rows)
    )
    yield from _left_out_lines(searched, MOST_REASONS)


def _why(choice: Choice, console: Console) -> None:
    why, variant, option = choice.reasons, choice.variant, choice.option
    _fill(console, f"{choice.rank}. {option.row['system']}. {_time_and_waits(why)}", hanging=3)
    lines = [f"{name}: {says}." for name, says in why.findings]
    if _differ(choice.leads):
        shares = ", ".join(f"{lead:+.1%}" for lead in choice.leads)
        lines.append(f"The best is ahead of it by {shares} with {len(choice.leads)} seeds.")
    if variant is not None:
        there, here = variant.point.scenario.cluster, option.point.scenario.cluster
        differ = (there.gpu, there.gpus, there.train) != (here.gpu, here.gpus, here.train)
        name = f"{variant.row['system']}, {_layout(variant)}" + (
            f", {there.words()}" if differ else ""
        )
        loss = choice.variant_loss
        faster = f"Its next variant, {name}, is {-loss:.1%} better, and its rollout and training share a node."
        slower = f"{loss:.1%} ahead of" if loss >= LEAST_LEAD else "level with"
        lines.append(faster if loss < 0 else f"It is {slower} its next variant, {name}.")
    _fill(console, *lines, indent=3, hanging=2)


def _differ(leads: Sequence[float]) -> bool:
    return max(leads) - min(leads) > 1e-12


def _print_front(front: Sequence[Option], console: Console) -> None:
    step = max(math.ceil(len(front) / MOST_ON_FRONT), 1)
    shown = front[::-1][::step][::-1]  # the fastest always
    heading, layout = _layout_column(shown)

    def gpus(option: Option) -> object:
        cluster = option.point.scenario.cluster
        return f"{cluster.gpus} + {cluster.train.gpus}" if cluster.train else option.row["gpus"]

    columns: Columns = (
        ("system", _with_split, True),
        ("GPUs", gpus, True),
        (heading, layout, True),
        ("drafter", lambda option: option.row["speculation"].partition("(")[0], True),
        ("off-policy\nmean / max", _staleness, True),
        ("samples/s", _rate, True),
        ("GPU-h/1k", _gpu_hours, True),
        ("cost/1k", _cost, True),
    )
    console.print(_table(columns, shown))
    if len(shown) < len(front):
        _fill(console, f"{len(shown)} of {len(front)}; all are in --json.")


def _quality_table(rows: Sequence[Quality]) -> Table:
    def cell(row: Quality, i: int) -> str:
        plain = f"{row.without_decoupled[i]:.1f}"
        return plain if row.eta == 0 else f"{plain} / {row.with_decoupled[i]:.1f}"

    benchmarks = [(name, partial(cell, i=i), True) for i, name in enumerate(BENCHMARKS)]
    return _table(
        [("η", lambda row: "none" if math.isinf(row.eta) else f"{row.eta:g}", True), *benchmarks],
        rows,
    )
