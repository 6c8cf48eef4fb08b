"""The comparison on the screen: as many columns as fit.

Invariant: a column is shown whole or left out, the least important first, and what is left out is said.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simrl.page import folded
from simrl.scenario import Scenario
from simrl.training import TrainingConfig, assumed_s

DEFAULT_MFU = TrainingConfig().mfu
UNEQUAL = 0.03  # tokens a sample, between rows that are compared
NOTHING_DRAFTED = (
    "from histories only prompts draft that come again within the run, whose responses were all finished: a trace of several "
    "epochs, or workload.synthetic.prompts, and more steps; from siblings, those at the same worker"
)
LONGEST_LINE = 36  # characters of a label; what is longer goes on in the next line
Row = Mapping[str, Any]


class Column(NamedTuple):
    """A heading (with line breaks), what stands under it, what it means, and its turn to be left out (0: never)."""

    heading: str
    cell: Callable[[Row], str]
    meaning: str = ""
    turn: int = 0

    @property
    def name(self) -> str:
        return self.heading.replace("\n", " ")


def print_comparison(rows: Sequence[Row], scenarios: Sequence[Scenario], folder: Path) -> None:
    """The table, what its columns mean, what the numbers rest on, and where the files are."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # a file or a pipe: nothing has to be left out or broken
    files = (folder / row["folder"] / "result.json" for row in rows)
    show_comparison(rows, scenarios, [json.loads(file.read_text(encoding="utf-8")) for file in files], console)
    console.print(f"Written to {folder}", soft_wrap=True)
    console.print(
        "with comparison.png and .json, and for each row a folder: timeline.png, perfetto.json (open it at "
        "https://ui.perfetto.dev), Parquet tables, result.json."
    )


def show_comparison(
    rows: Sequence[Row], scenarios: Sequence[Scenario], metadata: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """The table, what its columns mean and, from the metadata of the results, what the numbers rest on."""
    columns, left_out = columns_of(rows), []
    unlimited = console.options.update(max_width=10_000)
    while console.measure(table := _table(rows, columns), options=unlimited).maximum > console.width:
        first = min((column for column in columns if column.turn), key=lambda column: column.turn, default=None)
        if first is None:
            break
        columns.remove(first)
        left_out.append(first.name)
    console.print(Text(title(scenarios), style="bold"))
    console.print(table)
    with folded(console, "What the columns mean"):
        for column in columns:
            if column.meaning:
                console.print(f"{column.name}: {column.meaning}")
    if left_out:
        console.print(f"Left out for want of room, but in comparison.json: {', '.join(left_out)}")
    for line in notes(rows):
        console.print(line)
    console.print()
    with folded(console, "What the numbers rest on"):
        for line in provenance(metadata):
            console.print(line)


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table has to know besides: runs that had not settled, tokens thrown away, unequal work."""
    unsettled = [
        f"{row_name(row)}: off-policyness had not settled (a buffer fills, or lengths change): raise steps"
        for row in rows
        if not row["settled"]
    ]
    return [*unsettled, *_tokens_apart(rows), *unequal_work(rows)]


def _tokens_apart(rows: Sequence[Row]) -> list[str]:
    """What the columns do not show of a system: tokens thrown away or carried over, samples that moved."""
    lines = []
    for row in rows:
        said = []
        if row["dropped_share"] > 0:
            said.append(f"{row['dropped_share']:.1%} of the generated tokens were dropped")
        if row["carried_share"] > 0:
            age = row["carried_off_policyness_max"]
            said.append(
                f"{row['carried_share']:.1%} of the trained tokens came from a step before, up to {age} updates old"
            )
        if row["duplicate_share"] > 0:
            said.append(f"{row['duplicate_share']:.1%} of all that was generated were duplicates (best-of-N)")
        if row["migrated_share"] > 0:
            said.append(f"{row['migrated_share']:.1%} of the samples moved between workers")
        if row["speculation"] != "none" and row["accept_length"] is None:
            said.append(not_drafted(row["speculation"]))
        if said:
            lines.append(f"{row_name(row)}: {', '.join(said)}")
    return lines


def not_drafted(method: str) -> str:
    """Why, and what to do."""
    return f"{method} drafted nothing ({NOTHING_DRAFTED})"


def unequal_work(rows: Sequence[Row]) -> list[str]:
    """Says where the window of one system holds longer samples than another's: stragglers of one are in flight in the other,
    and in a short run that is no small part of the difference."""
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


def row_name(row: Row) -> str:
    """A run as a line about it calls it: its system, and what was varied."""
    return f"{row['system']} ({row['variant']})" if row["variant"] else str(row["system"])


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Those that these rows need: what varies, GPUs where systems take more, drafts where there are any, cost where priced."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    varied, among = _varied(variants), ""
    leading, overall, cost = [], [], []
    if len(variants) > 1:
        single = varied != "variant"
        leading = [Column(varied, lambda row: row["variant"].partition("=")[2] if single else row["variant"] or "-")]
        overall = [
            Column("overall\nspeed-up", lambda row: f"{row['speedup']:.2f}×", "samples/s over the first row's", turn=1)
        ]
        among = f" with the same {varied}"
    if rows[0]["cost_per_1k_samples"] is not None:
        cost = [Column("cost/1k\nsamples", lambda row: _number(row["cost_per_1k_samples"]), turn=6)]
    gpus = []
    if len({(row["variant"], row["gpus"]) for row in rows}) > len(
        variants
    ):  # a system that takes more than the cluster's
        gpus = [
            Column("GPUs", lambda row: f"{row['gpus']:,}", "all that the system takes; speed-ups do not divide by them")
        ]
    drafts = []
    if any(row["accept_length"] is not None for row in rows):
        drafts = [
            Column(
                "tokens a\ndraft",
                lambda row: "-" if row["accept_length"] is None else f"{row['accept_length']:.2f}",
                "what a pass with a draft yields of a response, the bonus token included",
                turn=5,
            ),
            Column(
                "from\ndrafts",
                lambda row: f"{row['speculation_rate']:.0%}",
                "share of the generated tokens that drafts brought",
                turn=5,
            ),
        ]
    return [
        *leading,
        Column("system", lambda row: row["system"]),
        *gpus,
        Column(
            "samples/s", lambda row: _number(row["samples_per_s"]), f"trained samples a second; bold: the most{among}"
        ),
        Column(
            "speed-up", lambda row: f"{row['speedup_in_variant']:.2f}×", f"samples/s over the first system's{among}"
        ),
        *overall,
        Column(
            "rollout\nbubble",
            lambda row: f"{row['rollout_bubble']:.0%}",
            "share of time that rollout GPUs idle",
            turn=8,
        ),
        Column(
            "train\nidle",
            lambda row: f"{row['train_idle']:.0%}",
            "the same of GPUs that only train (0% where all GPUs do both)",
            turn=8,
        ),
        Column(
            "off-policy\nmean / max",
            lambda row: f"{row['off_policyness_mean']:.2f} / {row['off_policyness_max']}",
            "policy updates between writing a token and training on it",
            turn=7,
        ),
        *drafts,
        Column("step s", lambda row: _number(row["step_s"]), "seconds a policy update", turn=4),
        Column("tokens/s", lambda row: _number(row["tokens_per_s"]), "trained, prompts and responses", turn=2),
        Column("GPU-h/1k\nsamples", lambda row: _number(row["gpu_hours_per_1k_samples"]), turn=3),
        *cost,
    ]


def _varied(variants: Sequence[str]) -> str:
    """The last part of the only key that varies, such as gpus; else "variant"."""
    keys = {variant.partition("=")[0] for variant in variants}
    if len(keys) > 1 or any(", " in variant for variant in variants):
        return "variant"
    return keys.pop().rpartition(".")[2]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        label = column.name in ("system", "variant")
        table.add_column(column.heading, justify="left" if label else "right", no_wrap=True)
    for i, row in enumerate(rows):
        group = [other for other in rows if other["variant"] == row["variant"]]
        best = row["samples_per_s"] == max(other["samples_per_s"] for other in group)
        last = i + 1 < len(rows) and rows[i + 1]["variant"] != row["variant"]
        cells = [textwrap.fill(column.cell(row), LONGEST_LINE, subsequent_indent="  ") for column in columns]
        table.add_row(*map(Text, cells), style="bold" if best else "", end_section=last)
    return table


def _number(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def title(scenarios: Sequence[Scenario]) -> str:
    """What all runs have in common."""
    first, several = scenarios[0], len({s.cluster.gpus for s in scenarios}) > 1
    parts: list[tuple[str, set[object]]] = [
        (first.model, {s.model for s in scenarios}),
        (
            first.cluster.gpu if several else f"{first.cluster.gpus} {first.cluster.gpu}",
            {s.cluster.gpu for s in scenarios},
        ),
        (f"tp {first.cluster.tp}", {s.cluster.tp for s in scenarios}),
        (f"updates {first.warmup_steps + 1} to {first.steps}", {(s.warmup_steps, s.steps) for s in scenarios}),
    ]
    return f"{first.name}: {', '.join(text for text, distinct in parts if len(distinct) == 1)}"


def _rollouts(trace: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    what = trace["kind"] if trace["name"] == trace["kind"] else f"{trace['name']}, {trace['kind']}"
    steps, asked = metadata["trace_steps"], metadata["scenario"]["steps"]
    return what if steps >= asked else f"{what}; its {steps} steps are passed over again, the run has {asked}"


def _drafts(facts: Mapping[str, Any]) -> str:
    """Where a method's acceptance and its times come from."""
    acceptance, times = facts["acceptance"], facts["draft_times"]
    found = acceptance if isinstance(acceptance, str) else f"acceptance {_source(acceptance)}"
    plan = facts.get("plan")
    planned = f", {plan['draft_gpus']} draft GPUs a worker and windows of {plan['window']}" if plan else ""
    return f"{facts['method']}{planned}, {found}; drafting {_source(times)}"


def _source(facts: Mapping[str, Any]) -> str:
    """The kind of a number, and where it is from if that says more."""
    kind, source = facts["kind"], facts["source"]
    return kind if kind == source else f"{kind} ({source})"


def provenance(of_results: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the numbers rest on, each thing once."""
    lines: list[str] = []
    assumed: dict[str, None] = {}
    for metadata in of_results:
        profile, trace, training = metadata["profile"], metadata["trace"], metadata["scenario"]["training"]
        step_times = (
            f"{profile['model']} on {profile['gpu']} tp{profile['tp']}, {profile['kind']} ({profile['source']})"
        )
        efficiency = "the default, assumed" if training["mfu"] == DEFAULT_MFU else "from the scenario"
        lines += [
            f"Step times: {', '.join([step_times, *profile['corrections']])}",
            f"Rollouts: {_rollouts(trace, metadata)}",
            f"Training: mfu {training['mfu']}, {efficiency}",
        ]
        if metadata.get("speculation"):
            lines.append(f"Drafts: {_drafts(metadata['speculation'])}")
        if metadata.get("best_of_n"):
            lines += [f"Drafts of the tail: {_drafts(facts)}" for facts in metadata["best_of_n"]["drafters"].values()]
        for phase in ("evaluate", "checkpoint"):
            if training[f"{phase}_every"]:
                lines.append(f"Phases: {phase} {training[f'{phase}_s']:g} s every {training[f'{phase}_every']} updates")
        if metadata["scenario"]["faults"]:
            lines.append("Faults: as the scenario has them; result.json lists those that happened")
        rollout_gpus = metadata["rollout_workers"] * metadata["scenario"]["cluster"]["tp"]
        assumed |= dict.fromkeys(assumed_s(training, rollout_gpus + metadata["train_gpus"] > metadata["gpus"]))
    found = sorted(dict.fromkeys(lines), key=lambda line: line.partition(":")[0] != "Step times")
    return found + ([assumption(list(assumed))] if assumed else [])


def assumption(assumed: Sequence[str]) -> str:
    """The line about seconds that are defaults, as they would be set."""
    return f"Assumed seconds, to be set where you know better: {' '.join(assumed)}"
