"""A comparison on the screen: all columns that fit, the names of the others, and lines on what the
table does not show."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from simrl.profile.metadata import split_words
from simrl.scenario.model import Scenario
from simrl.show.inputs import left_out_lines, provenance, rests_on
from simrl.show.tables.ranking import (
    Row,
    best_and_other,
    most_of_variants,
    of_variants,
    ranking_lines,
    row_name,
    several,
)
from simrl.show.text import (
    Column,
    Line,
    Page,
    fitting,
    folded,
    formatted,
    listed,
    number,
    plain_table,
    say,
)
from simrl.study.model_error import RATIO_ERROR
from simrl.systems.recipes import RECIPES, parameters_of
from simrl.systems.system import Shared
from simrl.validation import in_words

UNEQUAL = 0.03  # tokens a sample, between rows that are compared
GROWING = "off-policyness still grew, so samples/s may be another; raise steps"
NOTHING_DRAFTED = (
    "a history needs prompts that repeat (workload.synthetic.prompts, or a trace of several epochs) and finished, and room "
    "for their indexes (speculation.history_workers.memory_bytes); siblings need two of a group on one worker; a toggle needs "
    "more running requests than its ramp, and drafts that pay"
)
OCCUPANCY = (
    "share of the slots of its batch that a rollout worker fills while it runs (slots: max_num_seqs, or what its KV cache "
    "holds at the mean context)"
)
UNLEARNED = "What stale tokens do to learning is not modelled"
WITHOUT_CACHE = "without prefix caching, which others here have"
LEAST_RANGE = 0.01  # of a value: narrower ones are not shown
RANGES = {
    "step_s": " s a step",
    "fits": "× over fits that do as well",
    "likeness": "× over responses of a prompt unlike or alike",
}
LEAST_SHARE = 0.005  # of tokens or samples that a line mentions
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")  # digits of a mark
EPOCHS = ("the first epoch", "later ones")
SPLIT = re.compile(r", rollout_share=[\d.]+|rollout_share=[\d.]+(, )?")
# of a key, without pools whose keys a cluster has, too
SECTION = re.compile(r"\b(?!(?:prefill|judge|train)\.)\w+\.(?=[\w.]*=)")
LONGEST_LINE = 30  # characters of a label before it is wrapped


class Shown(NamedTuple):
    """The parts of a comparison to print: the first `lines` below the table (None: all, and the
    sources of the numbers), the meaning of the `columns`, all `inputs`."""

    lines: int | None = None
    columns: bool = False
    inputs: bool = False


SHORT = Shown()


def show_comparison(
    rows: Sequence[Row],
    scenarios: Sequence[Scenario],
    metadata: Sequence[Row],
    console: Console,
    unranked: str = "",
    shown: Shown = SHORT,
) -> None:
    """Print the table, the lines below it, and the parts that `shown` names; a page folds these
    parts."""
    page = isinstance(console, Page)
    rows = rows if page else _shortened(rows)
    rows = rows if shown.lines else marked(rows)  # the one line of --brief explains no marks
    table, left_out = fitting(console, columns_of(rows), partial(_table, rows))
    say(console, title(scenarios), style="bold")
    console.print(table)
    say(
        console,
        *[*headline(rows), *notes(rows), *(ranking_lines(rows) or [unranked] * bool(unranked))][
            : shown.lines
        ],
        *left_open(rows),
    )
    if page or shown.columns:
        with folded(console, "What the columns mean"):
            say(
                console,
                *(
                    f"{column.name}: {column.meaning}"
                    for column in columns_of(rows)
                    if column.meaning
                ),
            )
            say(
                console,
                *[f"Left out for want of room, but in comparison.json: {', '.join(left_out)}"]
                * bool(left_out),
            )
    if page or shown.inputs:
        with folded(console, "What the numbers rest on"):
            say(console, *left_out_lines(metadata), "", *provenance(metadata))
    elif shown.lines is None:
        say(console, *rests_on(metadata))


def left_open(rows: Sequence[Row]) -> list[str]:
    """Return what the calibration of rows leaves open, and a line for each row with a wide range
    over that."""
    lines = list(dict.fromkeys(line for row in rows for line in row.get("left_open") or ()))
    for row in rows:
        ends = {"step_s": row.get("step_s_range") or (0.0, 0.0), **(row.get("ranges") or {})}
        wide = [
            f"{_number(low)} to {_number(high)}{RANGES[key]}"
            for key, (low, high) in ends.items()
            if high > (1 + LEAST_RANGE) * low
        ]
        lines += [f"Range of {row_name(row)}: {', '.join(wide)}"] * bool(wide)
    return lines


def headline(rows: Sequence[Row]) -> list[str]:
    """Return the line with the answer: the fastest run (of each variant, up to two), its lead, and
    unsettled runs."""
    groups = several(rows) or [list(rows)] * (len(rows) > 1)  # of variants with one run each, all
    leads, pairs = [], [(*best_and_other(group), group) for group in groups]
    for best, other, group in (
        pairs if len(pairs) <= 2 else [max(pairs, key=lambda pair: pair[0]["samples_per_s"])]
    ):
        name = other["system"] if other["variant"] == best["variant"] else row_name(other)
        lead = f"{row_name(best)}, {best['samples_per_s'] / other['samples_per_s']:.2f}× {name}"
        if best.get("run_hours") is not None:
            cost = "" if best["run_cost"] is None else f", cost {_number(best['run_cost'])}"
            lead += f" ({_number(best['run_hours'])} h{cost})"
        level = [
            row["system"] if row["variant"] == best["variant"] else row_name(row)
            for row in group
            if row is not best and is_level(best, row)
        ]
        leads.append(
            lead
            + f", level with {listed(level)} (simrl's error is {RATIO_ERROR:.0%})" * bool(level)
        )
    unsettled = [row_name(row) for row in rows if not row["settled"]]
    parts = [f"Fastest: {'; '.join(leads)}"] * bool(leads)
    parts += [f"Not settled (↑): {', '.join(unsettled)}: {GROWING}"] * bool(unsettled)
    parts += [UNLEARNED] * any(
        best["off_policyness_mean"] > other["off_policyness_mean"] for best, other, _ in pairs
    )
    return [". ".join(parts)] * bool(parts)


def is_level(best: Row, other: Row) -> bool:
    """Return whether a lead is within simrl's own error of a ratio plus, if simulated, the seeds'
    spread of both runs."""
    apart = sum(
        (row.get("samples_per_s_spread") or 0) / row["samples_per_s"] for row in (best, other)
    )
    return bool(best["samples_per_s"] / other["samples_per_s"] - 1 < RATIO_ERROR + apart)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return lines on the facts that rows are marked with, on better splits, and on unequal
    work."""
    facts = {fact: mark for row in rows for fact, mark in row.get("facts", {}).items()}
    return [
        *(f"{mark} {fact}" for fact, mark in facts.items()),
        *(
            f"Evaluations of {row_name(row)}: {row['evaluations']:,}, {_number(row['evaluation_s'])} s each, "
            f"{row['evaluation_share']:.0%} of its tokens"
            for row in rows
            if row.get("evaluations")
        ),
        *_better_splits(rows),
        *unequal_work(rows),
    ]


def marked(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their `facts`, which limit the comparison, and a mark for each; equal facts
    have one mark."""
    groups = {group[0]["variant"]: group for group in of_variants(rows)}
    marks: dict[str, str] = {}
    facts = [
        {
            fact: marks.setdefault(fact, str(len(marks) + 1).translate(RAISED))
            for fact in _facts(row, groups[row["variant"]])
        }
        for row in rows
    ]
    return [
        {**row, "facts": {fact: mark for fact, mark in marks.items() if fact in of_row}}
        for row, of_row in zip(rows, facts, strict=True)
    ]


def _facts(row: Row, group: Sequence[Row]) -> list[str]:
    """Return facts on updates of a part of a batch, another use of the prefix cache, the source of
    acceptance, tokens that were dropped, carried over or duplicated, and the defaults of a system
    that is slower than the first one of its variant."""
    parts = [round(1 / (other.get("update_share") or 1)) for other in (row, *group)]
    part = f"an update of this row trains 1/{parts[0]} of a batch: its steps and ages count such updates"
    updates = [part] * (parts[0] > 1 and len(set(parts)) > 1)
    cached = [other["prefix_caching"] for other in group]
    few = 2 * cached.count(row["prefix_caching"]) - len(group)
    unlike = few < 0 or (few == 0 and row["prefix_caching"] != cached[0])
    caching = (
        "with prefix caching, which others here lack" if row["prefix_caching"] else WITHOUT_CACHE
    )
    caches = [caching] * (unlike and None not in cached)
    defaults = "" if is_level(group[0], row) else _defaults(row["system"], group[0]["system"])
    slower = f"slower than {group[0]['system']} with its defaults {defaults}; simrl diff says why"
    return [*updates, *caches, *_acceptance(row), *_tokens_apart(row), *[slower] * bool(defaults)]


def _shortened(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows with shorter names, if these stay distinct: systems without their split, which
    has a column; variants without the sections of their keys."""
    splits = all("colocated" in row for row in rows)
    short = [
        {
            **row,
            "system": SPLIT.sub("", row["system"]).replace("()", "") if splits else row["system"],
            "variant": SECTION.sub("", row["variant"]),
        }
        for row in rows
    ]
    return short if len({row_name(row) for row in short}) == len(rows) else rows


def _acceptance(row: Row) -> list[str]:
    """Return the source of the acceptance of a row's drafts, with the shares of the first epoch and
    of later ones."""
    if not row.get("acceptance"):
        return []
    if row["accept_length"] is None and row["speculation"] != "none":
        return [not_drafted(row["speculation"])]
    rates = [row["first_epoch_speculation_rate"], row["later_speculation_rate"]]
    parts = [
        f"{rate:.0%} from drafts in {words}"
        for rate, words in zip(rates, EPOCHS, strict=True)
        if rate is not None
    ]
    return [f"acceptance {row['acceptance']}{f': {listed(parts)}' if len(parts) > 1 else ''}"]


def _defaults(label: str, first: str) -> str:
    """Return the parameters of a system alone that its label omits, with their defaults; of the
    first one's system, only those that its label gives."""
    name, _, parameters = label.partition("(")
    if name not in RECIPES:
        return ""
    in_label = {part.partition("=")[0] for part in parameters.strip(")").split(", ")}
    omitted = {
        key: value
        for key, value in parameters_of(name).items()
        if key not in Shared.model_fields
        and key not in in_label
        and value is not None
        and (name != first.partition("(")[0] or f"{key}=" in first)
    }
    return ", ".join(f"{key}={in_words(value)}" for key, value in omitted.items())


def _better_splits(rows: Sequence[Row]) -> list[str]:
    """Return a line on the runs that another split of their GPUs makes faster."""
    faster = [
        f"{row_name(row)} {better['gain']:.2f}× at {better['rollout_gpus']}:{better['train_gpus']} "
        f"(rollout_share={better['rollout_share']:g})"
        for row in rows
        if (better := row.get("better_split"))
    ]
    line = f"Faster with another split of the GPUs; --best-split searches the best: {', '.join(faster)}"
    return [line] * bool(faster)


def _tokens_apart(row: Row) -> list[str]:
    """Return which tokens a system dropped, carried over or duplicated, and samples that were too
    stale or that it moved."""
    age = row["carried_off_policyness_max"]
    facts = {
        "dropped_share": "of the generated tokens were dropped",
        "carried_share": f"of the trained tokens came from a step before, up to {age} updates old",
        "duplicate_share": "of all generated tokens were duplicates (best-of-N)",
        "migrated_share": "of the samples moved between workers",
    }
    stale = row.get("stale_samples", 0)
    shares = [
        f"{f'{row[key]:.1%}' if row[key] >= 0.0005 else 'less than 0.1%'} {words}"
        for key, words in facts.items()
        # The column of off-policyness leaves carried tokens out, however few.
        if row[key] >= LEAST_SHARE or (key == "carried_share" and row[key] > 0)
    ]
    return [
        *[f"{stale:,} samples were too stale and dropped"] * bool(stale),
        *shares,
        *(
            [
                f"prefill workers idle {row['prefill_idle']:.0%} of the time, decode workers "
                f"{row['decode_idle']:.0%}"
            ]
            if "prefill_idle" in row
            else []
        ),
    ]


def not_drafted(method: str) -> str:
    """Return a line on a method that drafted nothing, with the reason."""
    return f"{method} drafted nothing: {NOTHING_DRAFTED}"


def unequal_work(rows: Sequence[Row]) -> list[str]:
    """Return a line if one system's window has longer samples than others', with all of these, for
    the variant with the largest ratio. Stragglers that one has trained on are in flight in the other; in a short run
    this is a large part of the difference."""
    lines: dict[float, str] = {}
    for group in of_variants(rows):
        per_sample = {
            row_name(r): r["tokens_per_s"] / max(r["samples_per_s"], 1e-300) for r in group
        }
        most = max(per_sample, key=per_sample.__getitem__)
        least = per_sample[most] / min(per_sample.values())
        shorter = [
            f"{name} on {tokens:,.0f}"
            for name, tokens in sorted(per_sample.items(), key=lambda pair: pair[1])
            if per_sample[most] / tokens > 1 + UNEQUAL or per_sample[most] / tokens == least
        ]
        lines[least] = (
            f"In these updates {most} trained on {per_sample[most]:,.0f} tokens a sample, {listed(shorter)}: compare "
            "tokens/s, or simulate more steps"
        )
    return [lines[apart] for apart in lines if apart == max(lines) > 1 + UNEQUAL]


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that these rows need: the variant if several, GPUs if systems differ in
    them, drafts if there are any, cost if priced."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    varied, several = _varied(variants), len(variants) > 1
    among = f" with the same {varied}" if several else ""
    # a system may need more GPUs than the cluster has
    more_gpus = len({(row["variant"], row["gpus"]) for row in rows}) > len(variants) or (
        len({row["gpus"] for row in rows}) > 1 and any("judge." in variant for variant in variants)
    )
    drafts, filled = (
        any(row[key] is not None for row in rows) for key in ("accept_length", "occupancy")
    )
    priced, planned = (
        any(row.get(key) is not None for row in rows)
        for key in ("cost_per_1k_samples", "run_hours")
    )

    def variant(row: Row) -> str:
        return str(
            row["variant"].partition("=")[2] if varied != "variant" else row["variant"] or "-"
        )

    def shown(key: str, form: str = "{:.0%}") -> Callable[[Row], str]:
        return lambda row: formatted(row.get(key), form, "-")

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
        return _number(row["samples_per_s"]) + (
            f" ± {apart / row['samples_per_s']:.0%}" if apart is not None else ""
        )

    def ages(row: Row) -> str:
        return f"{row['off_policyness_mean']:.2f} / {row['off_policyness_max']}{'' if row['settled'] else ' ↑'}"

    def split(row: Row) -> str:
        return "shared" if row["colocated"] else f"{row['rollout_gpus']}:{row['train_gpus']}"

    seeds = any(row.get("samples_per_s_spread") is not None for row in rows)
    rates = (
        f"trained samples a second; bold: the most{among}"
        + "; ± the farthest of three seeds" * seeds
    )
    growing = "; ↑ not settled, still growing" * any(not row["settled"] for row in rows)
    off_policy = (
        f"policy updates between writing a token and training on it{growing}"
        + "; without tokens that came from a step before, which have a mark"
        * any(row["carried_share"] > 0 for row in rows)
    )
    divided = any(not row.get("colocated", True) for row in rows)
    yielded = "tokens of a response that a pass with a draft yields, including the bonus token"
    from_drafts = "share of the generated tokens that came from accepted drafts"
    parts = "rollout + training, of GPUs with pools of their own" * any(
        "train_cost_per_1k_samples" in row for row in rows
    )
    train_idle = "share of time that GPUs which only train idle (0% if all GPUs do both)"
    columns = [
        (several, Column(varied, variant)),
        (
            True,
            Column("system", lambda row: row["system"] + ",".join(row.get("facts", {}).values())),
        ),
        (
            more_gpus,
            Column(
                "GPUs",
                shown("gpus", "{:,}"),
                "all that the system takes; speed-ups do not divide by them",
            ),
        ),
        (
            divided,
            Column(
                "split",
                split,
                "GPUs that roll out : GPUs that train; shared: all do both, by turns",
                10,
            ),
        ),
        (True, Column("samples/s", rate, rates)),
        (
            True,
            Column(
                "speed-up",
                shown("speedup_in_variant", "{:.2f}×"),
                f"samples/s over the first system's{among}",
            ),
        ),
        (
            several,
            Column(
                "overall\nspeed-up",
                shown("speedup", "{:.2f}×"),
                "samples/s over the first row's",
                1,
            ),
        ),
        (
            True,
            Column(
                "rollout\nbubble",
                shown("rollout_bubble"),
                "share of time that rollout GPUs idle",
                8,
            ),
        ),
        (filled, Column("occupancy", shown("occupancy"), OCCUPANCY, 5)),
        (True, Column("train\nidle", shown("train_idle"), train_idle, 6)),
        (
            any(row.get("judge_idle") is not None for row in rows),
            Column(
                "judge\nidle",
                shown("judge_idle"),
                "share of time that the judge's own GPUs idle",
                6,
            ),
        ),
        (True, Column("off-policy\nmean / max", ages, off_policy, 9)),
        (
            planned,
            Column(
                "run\nhours",
                digits("run_hours"),
                "hours of the --updates, of a whole batch each, at this rate",
                11,
            ),
        ),
        (
            planned and priced,
            Column("run\ncost", digits("run_cost"), "what they cost at the price of a GPU-hour", 7),
        ),
        (drafts, Column("tokens a\ndraft", shown("accept_length", "{:.2f}"), yielded, 5)),
        (drafts, Column("from\ndrafts", shown("speculation_rate"), from_drafts, 6)),
        (True, Column("step s", digits("step_s"), "seconds a policy update", 4)),
        (True, Column("tokens/s", digits("tokens_per_s"), "trained, prompts and responses", 2)),
        (True, Column("GPU-h/1k\nsamples", of_pools("gpu_hours_per_1k_samples"), parts, 3)),
        (priced, Column("cost/1k\nsamples", of_pools("cost_per_1k_samples"), parts, 5)),
    ]
    return [column for needed, column in columns if needed]


def _varied(variants: Sequence[str]) -> str:
    """Return the short name of the only varied key, such as gpus; "variant" if several vary."""
    keys = {variant.partition("=")[0] for variant in variants}
    if len(keys) > 1 or any(", " in variant for variant in variants):
        return "variant"
    return SECTION.sub("", f"{keys.pop()}=")[:-1]


def _wrapped(text: str) -> str:
    """Return a cell in lines; a long label may also break after a bracket."""
    if len(text) <= LONGEST_LINE:
        return text
    return textwrap.fill(text.replace("(", "( "), LONGEST_LINE, subsequent_indent="  ").replace(
        "( ", "("
    )


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    labels = [i for i, column in enumerate(columns) if column.name in ("system", "variant")]
    most, lines = most_of_variants(rows), []
    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        best = "bold" if row["samples_per_s"] == most[row["variant"]] else ""
        cells = [_wrapped(column.cell(row)) for column in columns]
        lines.append(Line(cells, best, after["variant"] != row["variant"]))
    return plain_table([column.heading for column in columns], lines, labels)


def _number(value: float) -> str:
    """Return three significant digits, however small the value is."""
    return number(value, 300)


def title(scenarios: Sequence[Scenario]) -> str:
    """Return a title of the facts that all runs share."""
    first = scenarios[0]
    gpus = first.cluster.words(len({s.cluster.words() for s in scenarios}) == 1)
    splits = [split_words(s.cluster.model_dump()) for s in scenarios]
    parts: list[tuple[str, set[object]]] = [
        (first.model, {s.model for s in scenarios}),
        (gpus, {s.cluster.words(False) for s in scenarios}),
        (splits[0], set(splits)),
        (
            f"updates {first.warmup_steps + 1} to {first.steps}",
            {(s.warmup_steps, s.steps) for s in scenarios},
        ),
    ]
    return f"{first.name}: {', '.join(text for text, distinct in parts if len(distinct) == 1)}"
