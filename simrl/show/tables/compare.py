"""A comparison on the screen: as many columns as fit, and the names of those left out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.profile.metadata import split_words
from simrl.scenario.model import Scenario
from simrl.show.inputs import not_modelled_lines, provenance
from simrl.show.tables.ranking import ranking_lines, row_name
from simrl.show.text import Column, Line, fitting, folded, plain_table, say
from simrl.study.model_error import RATIO_ERROR

UNEQUAL = 0.03  # tokens a sample, between rows that are compared
GROWING = "off-policyness had not settled, so samples/s may be another (a buffer fills, or lengths change): raise steps"
NOTHING_DRAFTED = (
    "a history drafter needs prompts that repeat in the run and whose earlier responses all finished (use a multi-epoch trace, "
    "or set workload.synthetic.prompts and more steps); a sibling drafter needs two responses of a group on one worker"
)
OCCUPANCY = (
    "share of the slots of its batch that a rollout worker fills while it runs (slots: max_num_seqs, or what its KV cache "
    "holds at the mean context)"
)
LONGEST_LINE = 36  # characters of a label; the rest goes on in the next line
Row = Mapping[str, Any]


def show_comparison(
    rows: Sequence[Row], scenarios: Sequence[Scenario], metadata: Sequence[Row], console: Console, unranked: str = ""
) -> None:
    """Print the table, the meaning of its columns and, from the results' metadata, the inputs behind the numbers."""
    table, columns, left_out = fitting(console, columns_of(rows), partial(_table, rows))
    say(console, title(scenarios), style="bold")
    console.print(table)
    with folded(console, "What the columns mean"):
        say(console, *(f"{column.name}: {column.meaning}" for column in columns if column.meaning))
    if left_out:
        say(console, f"Left out for want of room, but in comparison.json: {', '.join(left_out)}")
    say(console, *notes(rows), *(ranking_lines(rows) or [unranked] * bool(unranked)), *not_modelled_lines(metadata))
    console.print()
    with folded(console, "What the numbers rest on"):
        say(console, *provenance(metadata))


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the table does not show: runs that had not settled, dropped or carried tokens, unequal work."""
    unsettled = [row_name(row) for row in rows if not row["settled"]]
    growing = [f"↑ {GROWING}: {', '.join(unsettled)}"] if unsettled else []
    apart = [f"{row_name(row)}: {', '.join(facts)}" for row in rows if (facts := _tokens_apart(row))]
    return [*growing, *_better_splits(rows), *_level(rows), *apart, *unequal_work(rows)]


def _better_splits(rows: Sequence[Row]) -> list[str]:
    """Return a line on the runs that another split of their GPUs makes faster."""
    found = [
        f"{row_name(row)} {better['gain']:.2f}× at {better['rollout_gpus']}:{better['train_gpus']} "
        f"(rollout_share={better['rollout_share']:g})"
        for row in rows
        if (better := row.get("better_split"))
    ]
    return (
        [f"Faster with another split of the GPUs; --best-split searches the best: {', '.join(found)}"] if found else []
    )


def _level(rows: Sequence[Row]) -> list[str]:
    """Return a line on the runs that simrl cannot tell from the best of their variant, where seeds were simulated."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        best, *others = sorted((r for r in rows if r["variant"] == variant), key=lambda row: -row["samples_per_s"])
        level = [row_name(row) for row in others if row.get("samples_per_s_spread") is not None and is_level(best, row)]
        if level:
            lines.append(f"Level with {row_name(best)} (within {RATIO_ERROR:.0%} and the seeds' ±): {', '.join(level)}")
    return lines


def is_level(best: Row, other: Row) -> bool:
    """Return whether a lead is within simrl's own error of a ratio and the spread of the seeds of both."""
    apart = sum(row["samples_per_s_spread"] / row["samples_per_s"] for row in (best, other))
    return bool(best["samples_per_s"] / other["samples_per_s"] - 1 < RATIO_ERROR + apart)


def _tokens_apart(row: Row) -> list[str]:
    """Return which tokens a system dropped, carried over or duplicated, samples that it moved, and that it drafted nothing."""
    age = row["carried_off_policyness_max"]
    facts = {
        "dropped_share": "of the generated tokens were dropped",
        "carried_share": f"of the trained tokens came from a step before, up to {age} updates old",
        "duplicate_share": "of all that was generated were duplicates (best-of-N)",
        "migrated_share": "of the samples moved between workers",
    }
    said = [f"{row[key]:.1%} {words}" for key, words in facts.items() if row[key] > 0]
    drafted = row["speculation"] == "none" or row["accept_length"] is not None
    return said if drafted else [*said, not_drafted(row["speculation"])]


def not_drafted(method: str) -> str:
    """Return that a method drafted nothing, and why."""
    return f"{method} drafted nothing: {NOTHING_DRAFTED}"


def unequal_work(rows: Sequence[Row]) -> list[str]:
    """Return a line where one system's window holds longer samples than another's: stragglers of one are in flight in the
    other, and in a short run this is a large part of the difference."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        per_sample = {
            row_name(r): r["tokens_per_s"] / max(r["samples_per_s"], 1e-300) for r in rows if r["variant"] == variant
        }
        most, least = max(per_sample, key=per_sample.__getitem__), min(per_sample, key=per_sample.__getitem__)
        if per_sample[most] > (1 + UNEQUAL) * per_sample[least]:
            lines.append(
                f"In these updates {most} trained on {per_sample[most]:,.0f} tokens a sample, {least} on "
                f"{per_sample[least]:,.0f}: compare tokens/s, or simulate more steps"
            )
    return lines


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that these rows need: what varies, GPUs if systems differ in them, drafts if there are any, cost if
    priced."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    varied, several = _varied(variants), len(variants) > 1
    among = f" with the same {varied}" if several else ""
    # a system may take more GPUs than the cluster has
    more_gpus = len({(row["variant"], row["gpus"]) for row in rows}) > len(variants)
    drafts, filled = (any(row[key] is not None for row in rows) for key in ("accept_length", "occupancy"))
    priced = any(row["cost_per_1k_samples"] is not None for row in rows)

    def variant(row: Row) -> str:
        return str(row["variant"].partition("=")[2] if varied != "variant" else row["variant"] or "-")

    def shown(key: str, form: str = "{:.0%}") -> Callable[[Row], str]:
        return lambda row: "-" if row[key] is None else form.format(row[key])

    def digits(key: str) -> Callable[[Row], str]:
        return lambda row: _number(row[key])

    def of_pools(name: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            if row[name] is None or row.get(f"train_{name}") is None:
                return "-" if row[name] is None else _number(row[name])
            return f"{_number(row[name] - row[f'train_{name}'])} + {_number(row[f'train_{name}'])}"

        return cell

    def rate(row: Row) -> str:
        apart = row.get("samples_per_s_spread")
        return _number(row["samples_per_s"]) + (f" ± {apart / row['samples_per_s']:.0%}" if apart is not None else "")

    def ages(row: Row) -> str:
        return f"{row['off_policyness_mean']:.2f} / {row['off_policyness_max']}{'' if row['settled'] else ' ↑'}"

    def split(row: Row) -> str:
        return "shared" if row["colocated"] else f"{row['rollout_gpus']}:{row['train_gpus']}"

    seeds = any(row.get("samples_per_s_spread") is not None for row in rows)
    rates = f"trained samples a second; bold: the most{among}" + "; ± the farthest of three seeds" * seeds
    growing = "; ↑ not settled, still growing" * any(not row["settled"] for row in rows)
    off_policy = f"policy updates between writing a token and training on it{growing}"
    divided = any(not row.get("colocated", True) for row in rows)
    yielded = "tokens of a response that a pass with a draft yields, including the bonus token"
    from_drafts = "share of the generated tokens that came from accepted drafts"
    parts = "rollout + training, of GPUs with pools of their own" * any(
        "train_cost_per_1k_samples" in row for row in rows
    )
    train_idle = "share of time that GPUs which only train idle (0% if all GPUs do both)"
    columns = [
        (several, Column(varied, variant)),
        (True, Column("system", shown("system", "{}"))),
        (
            more_gpus,
            Column("GPUs", shown("gpus", "{:,}"), "all that the system takes; speed-ups do not divide by them"),
        ),
        (divided, Column("rollout:\ntrain", split, "GPUs; shared: all do both, by turns", 6)),
        (True, Column("samples/s", rate, rates)),
        (True, Column("speed-up", shown("speedup_in_variant", "{:.2f}×"), f"samples/s over the first system's{among}")),
        (several, Column("overall\nspeed-up", shown("speedup", "{:.2f}×"), "samples/s over the first row's", 1)),
        (True, Column("rollout\nbubble", shown("rollout_bubble"), "share of time that rollout GPUs idle", 8)),
        (filled, Column("occupancy", shown("occupancy"), OCCUPANCY, 6)),
        (True, Column("train\nidle", shown("train_idle"), train_idle, 8)),
        (True, Column("off-policy\nmean / max", ages, off_policy, 7)),
        (drafts, Column("tokens a\ndraft", shown("accept_length", "{:.2f}"), yielded, 5)),
        (drafts, Column("from\ndrafts", shown("speculation_rate"), from_drafts, 5)),
        (True, Column("step s", digits("step_s"), "seconds a policy update", 4)),
        (True, Column("tokens/s", digits("tokens_per_s"), "trained, prompts and responses", 2)),
        (True, Column("GPU-h/1k\nsamples", of_pools("gpu_hours_per_1k_samples"), parts, 3)),
        (priced, Column("cost/1k\nsamples", of_pools("cost_per_1k_samples"), parts, 5)),
    ]
    return [column for needed, column in columns if needed]


def _varied(variants: Sequence[str]) -> str:
    """Return the last part of the only key that varies, such as gpus; else "variant"."""
    keys = {variant.partition("=")[0] for variant in variants}
    if len(keys) > 1 or any(", " in variant for variant in variants):
        return "variant"
    return keys.pop().rpartition(".")[2]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    labels = [i for i, column in enumerate(columns) if column.name in ("system", "variant")]
    most: dict[str, float] = {}
    for row in rows:
        most[row["variant"]] = max(row["samples_per_s"], most.get(row["variant"], 0.0))
    lines = []
    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        best = "bold" if row["samples_per_s"] == most[row["variant"]] else ""
        cells = [textwrap.fill(column.cell(row), LONGEST_LINE, subsequent_indent="  ") for column in columns]
        lines.append(Line(cells, best, after["variant"] != row["variant"]))
    return plain_table([column.heading for column in columns], lines, labels)


def _number(value: float) -> str:
    """Return three significant digits, and every digit before the point."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def title(scenarios: Sequence[Scenario]) -> str:
    """Return what all runs have in common."""
    first = scenarios[0]
    gpus = first.cluster.words(len({s.cluster.words() for s in scenarios}) == 1)
    splits = [split_words(s.cluster.model_dump()) for s in scenarios]
    parts: list[tuple[str, set[object]]] = [
        (first.model, {s.model for s in scenarios}),
        (gpus, {s.cluster.words(False) for s in scenarios}),
        (splits[0], set(splits)),
        (f"updates {first.warmup_steps + 1} to {first.steps}", {(s.warmup_steps, s.steps) for s in scenarios}),
    ]
    return f"{first.name}: {', '.join(text for text, distinct in parts if len(distinct) == 1)}"
