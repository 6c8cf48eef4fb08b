"""The answer of `simrl optimize` on the screen: a sentence, the best few, why, the front, how robust, what to launch.

Invariant: fits into 100 columns; every figure is one of the `Optimization`'s.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simrl.goal import Goal, duration
from simrl.model_error import RATIO_ERROR, SOURCE, WHOLE_RUNS_TOO_FAST
from simrl.optimization import Choice, Optimization, Reasons
from simrl.page import Page
from simrl.robustness import End
from simrl.search import Option
from simrl.staleness_quality import BENCHMARKS
from simrl.staleness_quality import SOURCE as QUALITY_SOURCE
from simrl.table import unequal_work

WIDTH = 100
MOST_ON_FRONT = 8
MOST_REASONS = 3
RANK = "rank"
WAITS = {
    "generate": "responses",
    "environment": "environments",
    "reward": "rewards",
    "boundary": "the pass that a worker is in",
    "unknown": "causes unknown",
    "load_weights": "loading weights",
    "log_prob": "log-probs",
    "train": "training",
    "publish": "publishing weights",
    "switch": "switching phases",
    "transfer": "handing on the batch",
    "checkpoint": "checkpoints",
    "evaluate": "evaluation",
    "lost": "lost workers",
}
SOURCES = {"decode": "every forward pass", "train": "training", "acceptance": "acceptance of drafts"}


def print_optimization(found: Optimization, console: Console) -> None:
    """All of it."""
    _head(console, found.name, first=True)
    for line in _answer(found):
        _say(console, line)
    _head(console, "The best few")
    console.print(_best(found))
    for line in _under_best(found):
        _say(console, line)
    _head(console, "Why")
    for choice in found.best:
        _why(choice, console)
    again = [choice.leads for choice in found.best if len(choice.leads) > 1]
    if again and not any(map(_differ, again)):
        _say(console, f"Seeds change nothing here: {max(map(len, again))} of them gave the same figures.")
    _head(console, "Throughput against staleness and cost: those that none beats in all three")
    _print_front(found, console)
    if found.robustness:
        _head(console, "How robust the choice is")
        for line in _robust(found):
            _say(console, line, hanging=2)
    _head(console, "What staleness is known to cost in quality: a reference, not a prediction")
    console.print(_quality(found))
    _say(console, f"{QUALITY_SOURCE}. Largest permitted staleness η; per cent, without / with the decoupled objective.")
    _head(console, "To launch it")
    _print_launch(found, console)
    _head(console, "What this rests on")
    for line in _rests_on(found):
        _say(console, line, hanging=2)


def _head(console: Console, text: str, first: bool = False) -> None:
    if not first:
        console.print()
    console.print(Text(text, style="bold"))


def _say(console: Console, text: str, indent: int = 0, hanging: int = 0) -> None:
    """A paragraph in lines of at most `WIDTH`; a browser makes its own."""
    if isinstance(console, Page):
        console.print(Text(text))
        return
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
        break_long_words=False,
    )
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _answer(found: Optimization) -> Iterator[str]:
    choice, goal = found.choice, found.goal
    option, why = choice.option, choice.reasons
    yield f"Asked for: {goal.words}{_limits(goal)}.{_of_how_many(found)}"
    split = (
        f"all {why.train_gpus} GPUs for both"
        if why.colocated
        else f"{why.rollout_gpus} GPUs that roll out and {why.train_gpus} that train"
    )
    drafts = f", drafts of {why.drafter} ({why.drafts})" if why.drafts else ""
    yield (
        f"Run {option.row['system']}, {split}, tp {option.point.scenario.cluster.tp}{drafts}: {_figures(option, goal)}."
    )
    tied = [other.option.row["system"] for other in found.best if other.tied]
    if tied:
        yield (
            f"{_and(tied)} {'is' if len(tied) == 1 else 'are'} no worse as far as simrl can tell: closer than its own error of "
            f"{RATIO_ERROR:.0%}."
        )
    elif len(found.best) > 1:
        of, beyond = (
            ("", f": beyond simrl's own error of {RATIO_ERROR:.0%}")
            if found.searched.whole
            else (" of those tried", "")
        )
        yield (
            f"It is {1 + min(found.best[1].leads):.2f} times as {_good(goal)} as the next system{of}, "
            f"{found.best[1].option.row['system']}{beyond}."
        )
    if goal.deadline_s is not None and goal.seconds(option.row) > goal.deadline_s * (1 - WHOLE_RUNS_TOO_FAST[1]):
        low, high = WHOLE_RUNS_TOO_FAST
        yield (
            f"Mind: that is close to the deadline, and whole runs were predicted {low:.0%} to {high:.0%} too fast "
            "(experiments/recorded_run.md)."
        )
    gpus = {o.point.scenario.cluster.gpus for o in found.searched.allowed}
    if len(gpus) > 1 and goal.updates is None:
        yield (
            "The search compared several numbers of GPUs by speed alone; --updates with --deadline or --budget weighs cost, "
            "and the front below has it."
        )


def _of_how_many(found: Optimization) -> str:
    """Where the search was not of the whole space."""
    searched = found.searched
    if searched.whole:
        return ""
    size = f"{searched.combinations:,} combinations" if searched.combinations else "a space without end"
    return f" {searched.points:,} points of {size} were tried; more --trials may find better."


def _limits(goal: Goal) -> str:
    said = []
    if goal.max_off_policyness is not None:
        said.append(f"off-policyness at most {goal.max_off_policyness:g}")
    if goal.max_cost is not None:
        said.append(f"a cost of at most {goal.max_cost:g} for 1,000 samples")
    return f", {', '.join(said)}" if said else ""


def _figures(option: Option, goal: Goal) -> str:
    row = option.row
    said = [f"{row['samples_per_s']:.3g} samples/s", f"off-policyness {_staleness(option)}"]
    if row["cost_per_1k_samples"] is not None:
        price = option.point.scenario.cluster.cost_per_gpu_hour
        said.append(f"a cost of {row['cost_per_1k_samples']:.3g} for 1,000 samples at {price:g} a GPU-hour")
    else:
        said.append(f"{option.gpu_hours:.3g} GPU-hours for 1,000 samples")
    if goal.updates is not None:
        unit = "" if goal.price else " GPU-hours"
        said.append(f"{goal.updates:,} updates in {duration(goal.seconds(row))} for {goal.cost(row):,.4g}{unit}")
    return ", ".join(said)


def _staleness(option: Option) -> str:
    """Mean / largest; a sign where it had not settled."""
    row = option.row
    oldest = max(row["off_policyness_max"], row["carried_off_policyness_max"])
    return f"{row['off_policyness_mean']:.2f} / {oldest}{'' if row['settled'] else '↑'}"


def _table(*columns: str) -> Table:
    """The first column is to the left, the others to the right; after a rank, the second is."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", width=None)
    names = 1 if columns[0] == RANK else 0
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i == names else "right", overflow="fold", max_width=38 if i == names else None
        )
    return table


def _best(found: Optimization) -> Table:
    goal = found.goal
    priced = found.choice.option.row["cost_per_1k_samples"] is not None
    extra = ["time", "cost" if goal.price else "GPU-h"] if goal.updates is not None else []
    drafts = ["drafter"] if any(choice.reasons.drafts for choice in found.best) else []
    table = _table(
        RANK, "system", "rollout\n: train", "tp", *drafts, "samples/s", "off-policy\nmean / max",
        "cost/1k" if priced else "GPU-h/1k", *extra, f"best as\n{_good(goal)}",
    )  # fmt: skip
    for choice in found.best:
        row, why = choice.option.row, choice.reasons
        split = f"{why.train_gpus} both" if why.colocated else f"{why.rollout_gpus} : {why.train_gpus}"
        cost = row["cost_per_1k_samples"] if priced else choice.option.gpu_hours
        more = [duration(goal.seconds(row)), f"{goal.cost(row):,.4g}"] if extra else []
        behind = "" if choice is found.choice else f"{1 + choice.leads[0]:.2f}×{' ≈' if choice.tied else '  '}"
        cells = [
            str(choice.rank),
            _system(choice.option),
            split,
            str(choice.option.point.scenario.cluster.tp),
            *([why.drafter] if drafts else []),
            f"{row['samples_per_s']:.3g}",
            _staleness(choice.option),
            f"{cost:.3g}",
            *more,
            behind,
        ]
        table.add_row(*map(Text, cells))
    return table


def _system(option: Option) -> str:
    """The name with the parameters that no other column has."""
    system = option.point.scenario.system
    shown = {k: v for k, v in system.parameters.items() if k not in ("rollout_share", "speculation")}
    given = ", ".join(f"{key}={value}" for key, value in shown.items())
    return f"{system.name}({given})" if given else system.name


def _under_best(found: Optimization) -> Iterator[str]:
    searched = found.searched
    whole = "the whole space" if searched.whole else "of a larger space"
    lines = [
        f"{searched.points} points were tried ({whole}), {len(searched.allowed)} of them possible and within the limits"
    ]
    others = found.within_error
    if others:
        lines.append(f"{others} more {'is' if others == 1 else 'are'} within {RATIO_ERROR:.0%} of the best")
    yield f"The best of each system, with its rank among all. {'; '.join(lines)}."
    if any(choice.tied for choice in found.best):
        yield f"≈ closer than simrl's own error of {RATIO_ERROR:.0%}, at one seed at least: a tie."
    if any(not choice.option.row["settled"] for choice in found.best):
        yield "↑ off-policyness was still growing when the simulation ended: simulate more steps."
    rows = [{**choice.option.row, "variant": ""} for choice in found.best]
    tokens = ", ".join(f"{row['tokens_per_s']:,.0f}" for row in rows)
    yield from (f"{note}. Tokens/s in the order of the table: {tokens}." for note in unequal_work(rows))
    for reason, count in searched.reasons()[:MOST_REASONS]:
        yield f"Left out {count}: {reason}."


def _why(choice: Choice, console: Console) -> None:
    why = choice.reasons
    _say(console, f"{choice.rank}. {choice.option.row['system']}. {_sentence(why)}", hanging=3)
    for name, says in why.findings:
        _say(console, f"{name}: {says}.", indent=3, hanging=2)
    if _differ(choice.leads):
        shares = ", ".join(f"{lead:+.1%}" for lead in choice.leads)
        _say(console, f"The best is ahead of it by {shares} with {len(choice.leads)} seeds.", indent=3, hanging=2)
    if choice.variant is not None:
        cluster, own = choice.variant.point.scenario.cluster, choice.option.point.scenario.cluster
        other = (cluster.gpu, cluster.gpus) != (own.gpu, own.gpus)
        tp = f", tp {cluster.tp}" + (f", {cluster.gpus} {cluster.gpu}" if other else "")
        _say(
            console,
            f"It is {choice.variant_loss:.1%} ahead of its next variant, {choice.variant.row['system']}{tp}.",
            indent=3,
            hanging=2,
        )


def _differ(leads: Sequence[float]) -> bool:
    return max(leads) - min(leads) > 1e-12


def _sentence(why: Reasons) -> str:
    parts = _and([f"{clause} ({share:.0%})" for _, clause, share in why.parts])
    waits = _and([f"{WAITS.get(kind, kind)} {share:.0%}" for kind, share in why.waits if share > 0.01])
    said = f"{why.ideal_share:.0%} of its GPU time is what an ideal run takes, too"
    said += f"; most of the rest goes to {parts}." if parts else "."
    return f"{said} What an update waits for: {waits}." if waits else said


def _print_front(found: Optimization, console: Console) -> None:
    options = list(found.front)
    step = max(math.ceil(len(options) / MOST_ON_FRONT), 1)
    shown = [option for i, option in enumerate(reversed(options)) if i % step == 0][::-1]  # the fastest always
    table = _table("system", "GPUs", "tp", "drafter", "off-policy\nmean / max", "samples/s", "GPU-h/1k", "cost/1k")
    for option in shown:
        row, scenario = option.row, option.point.scenario
        share = scenario.system.parameters.get("rollout_share")
        name = _system(option) + (f", {share:.0%} roll out" if share is not None else "")
        cost = row["cost_per_1k_samples"]
        cells = [
            name, str(row["gpus"]), str(scenario.cluster.tp), row["speculation"].partition("(")[0], _staleness(option),
            f"{row['samples_per_s']:.3g}", f"{option.gpu_hours:.3g}", "–" if cost is None else f"{cost:.3g}",
        ]  # fmt: skip
        table.add_row(*map(Text, cells))
    console.print(table)
    if len(shown) < len(options):
        _say(console, f"{len(shown)} of {len(options)}; all are in --json.")


def _robust(found: Optimization) -> Iterator[str]:
    choice = found.choice.option
    yield (
        f"The best few and the next best were simulated again, {len({e.source for e in found.robustness})} inputs 20 % off in "
        "turn; splits and η stay as they are."
    )
    for source in dict.fromkeys(end.source for end in found.robustness):
        ends = [end for end in found.robustness if end.source == source]
        yield f"{SOURCES[source]}: {'; '.join(_of_end(end, choice) for end in ends)}."


def _of_end(end: End, choice: Option) -> str:
    unit = "time" if end.source != "acceptance" else "acceptance"
    at = f"at {_percent(end.factor)} {unit}"
    if end.winner is None:
        if choice.point.hash not in end.untried:
            return f"{at} none of them keeps the limits"
        return f"{at} nothing is known, as {end.untried[choice.point.hash]}"
    left_out = f" ({len(end.untried)} of the others could not be tried)" if end.untried else ""
    if end.winner is choice:
        return f"{at} the choice still wins, by {_lead(end.lead)}{left_out}"
    assert end.flip is not None
    flip = end.flip
    holds = f"at {_percent(flip.holds)}" if flip.holds != 1 else "as it is"
    side = "below" if flip.flips < 1 else "above"
    same = end.winner is flip.winner
    there = "it" if same else f"{end.winner.row['system']} (tp {end.winner.point.scenario.cluster.tp})"
    breaks = "the choice breaks a limit" if same else f"the choice breaks a limit, and {there} wins"
    ahead = f"{there} is ahead by {_lead(end.lead)}" if end.kept else breaks
    return (
        f"{flip.winner.row['system']} (tp {flip.winner.point.scenario.cluster.tp}) wins {side} {_percent(flip.flips)} {unit} "
        f"({holds} the choice still does; {at} {ahead}){left_out}"
    )


def _good(goal: Goal) -> str:
    return "cheap" if goal.deadline_s is not None else "fast"


def _lead(lead: float) -> str:
    if math.isinf(lead):
        return "any margin, as nothing else keeps the limits"
    return f"{lead:.1%}" + (", less than simrl's own error" if lead < RATIO_ERROR else "")


def _percent(factor: float) -> str:
    """A factor as what comes on top."""
    return f"{100 * (factor - 1):+.3g} %".replace("-", "−")


def _quality(found: Optimization) -> Table:
    table = _table("η", *BENCHMARKS)
    for row in found.quality:
        eta = "none" if math.isinf(row.eta) else f"{row.eta:g}"
        pairs = zip(row.without_decoupled, row.with_decoupled, strict=True)
        cells = [f"{a:.1f}" if row.eta == 0 else f"{a:.1f} / {b:.1f}" for a, b in pairs]
        table.add_row(Text(eta), *map(Text, cells))
    return table


def _print_launch(found: Optimization, console: Console) -> None:
    launching = found.launching
    if launching.refused:
        _say(console, f"{found.choice.option.row['system']}: {launching.refused}.")
    if launching.settings is None:
        _say(console, "Nothing that was tried is offered by a framework whose documentation simrl knows.")
        return
    settings = launching.settings
    if launching.refused:
        option = launching.option
        behind = found.choice.option.merit / option.merit - 1
        _say(
            console,
            f"The best that is offered is number {launching.rank}, {option.row['system']}, tp "
            f"{option.point.scenario.cluster.tp} (the best is {1 + behind:.2f} times as {_good(found.goal)}), in "
            f"{settings.framework}:",
        )
    else:
        _say(console, f"In {settings.framework}:")
    console.print()
    console.print(Text(" \\\n  ".join(settings.command)), soft_wrap=True)
    console.print()
    _say(console, f"Option names: {'; '.join(settings.documents)}. Model, data, reward and optimizer are yours to add.")
    for note in settings.notes:
        _say(console, f"Mind: {note}.")


def _rests_on(found: Optimization) -> Iterator[str]:
    for line in found.rests_on:
        yield f"{line}."
    yield f"simrl's own error of {RATIO_ERROR:.0%} between two options: {SOURCE}."
    yield f"Searched: {' '.join(found.space.asked)}"
    for note in found.space.notes:
        yield f"{note}."


def _and(said: Sequence[Any]) -> str:
    if not said:
        return ""
    return str(said[0]) if len(said) == 1 else f"{', '.join(map(str, said[:-1]))} and {said[-1]}"
