"""Every system on one workload, from 64 to 4,096 GPUs and from 1 to 50 epochs; the best combination; the recorded runs.

    python experiments/published/landscape.py --data ../shared/data

Writes the parts of landscape.md between `<!-- NAME -->` and `<!-- /NAME -->`, its pictures and landscape.csv. Without --data
(the folder with verl_run/) that run is left out. Invariant: a figure of the page is a row of the table or of an answer of
`simrl.advise`; simulated rows are kept in a folder, so a stopped command continues, and simulates all anew once simrl's code
or a scenario has changed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

import simrl
from experiments.published.landscape_runs import (
    BASE,
    COUNTDOWN,
    EPOCHS,
    FULL,
    HERE,
    IDLE,
    MANY_GPUS,
    ROOT,
    SCENARIO,
    THEIR_EPOCHS,
    TINY,
    VERL_RUN,
    Changes,
    Row,
    Simulations,
    Size,
    Table,
    scenario_from,
    updates,
)
from experiments.shared import errors_in_a_line, markdown, verl_trace, write_parts
from simrl.analysis.gpu_hours import PARTS
from simrl.scenario.model import Scenario
from simrl.show.style import INK, LOOKS, PAPER, SAND, SERIES
from simrl.study.answer import Answer
from simrl.study.model_error import RATIO_ERROR, RATIOS
from simrl.study.progress import compile_kernels
from simrl.study.store import Outcomes
from simrl.systems.recipes import make_system, parameters_of

# Parts of the page.


def tuned(size: Size, table: Table) -> dict[str, dict[str, Any]]:
    """Return each system with the best of the tried rollout shares, where it has one."""
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


def scales(
    size: Size, table: Table, entries: Mapping[str, Any], picture: Path
) -> dict[str, list[str]]:
    asked = {
        (gpus, name): size.scenario(
            gpus, THEIR_EPOCHS if gpus >= MANY_GPUS else EPOCHS, entries[name]
        )
        for gpus, names in size.scales.items()
        for name in names
    }
    rows = table.of("scale", asked)
    heads = ["system", "rollout share", *(f"{gpus:,} GPUs" for gpus in size.scales)]
    lines = []
    for name in size.systems:
        share = entries[name].get("rollout_share")
        lines.append(
            [name, "all" if share is None else f"{share:g}", *_speeds(rows, size.scales, name)]
        )
    gpus = sorted(size.scales)[min(1, len(size.scales) - 1)]
    here = {name: row for (g, name), row in rows.items() if g == gpus}
    details = ["system", "idle share of all GPUs", "rollout bubble", "trainer idle", "off-policyness mean / most",
               "tokens from drafts", "$ a million tokens with prompts", "s an update"]  # fmt: skip
    more = [
        [name, f"{row['idle_share']:.0%}", f"{row['rollout_bubble']:.0%}", f"{row['train_idle']:.0%}", ages(row),
         drafted(row), f"{row['cost_per_1m_tokens']:.2f}", f"{row['step_s']:,.0f}"]
        if "error" not in row else [name, *_no(len(details) - 1)]
        for name, row in here.items()
    ]  # fmt: skip
    draw_hours(
        {name: row for name, row in here.items() if "error" not in row}, f"{gpus:,} GPUs", picture
    )
    return {
        "scales": [*markdown(heads, lines), *_refused(rows)],
        "details": [f"At {gpus:,} GPUs:", "", *markdown(details, more)],
        "strong": strong(size, table, entries, rows),
    }


def strong(
    size: Size, table: Table, entries: Mapping[str, Any], weak: Mapping[Any, Row]
) -> list[str]:
    """Return the table of the smallest cluster's batch on four times the GPUs."""
    gpus = 4 * size.base_gpus
    prompts = size.prompts(size.base_gpus)
    names = size.families
    rows = table.of(
        "strong",
        {
            (gpus, n): size.scenario(gpus, EPOCHS, entries[n], prompts_per_step=prompts)
            for n in names
        },
    )
    heads = ["system", f"{size.base_gpus} GPUs: s an update", f"{gpus} GPUs, equal batch", "faster",
             f"× {BASE}"]  # fmt: skip
    lines = []
    for name in names:
        few, many = weak[size.base_gpus, name], rows[gpus, name]
        if "error" in few or "error" in many:
            lines.append([name, *("no" if "error" in row else "" for row in (few, many)), "", ""])
            continue
        faster = f"{rate(many) * many['gpus'] / (rate(few) * few['gpus']):.2f}×"
        seconds = (f"{row['step_s']:,.0f}" for row in (few, many))
        lines.append([name, *seconds, faster, times(many, rows[gpus, BASE])])
    return markdown(heads, lines)


def epochs(
    size: Size, table: Table, entries: Mapping[str, Any], picture: Path
) -> dict[str, list[str]]:
    asked = {
        (count, name): size.scenario(size.base_gpus, count, entries[name])
        for count, names in size.epochs.items()
        for name in names
    }
    rows = table.of("epochs", asked)
    heads = ["system", *(f"{count} epoch{'s' * (count > 1)}" for count in size.epochs), "off-policyness, last column",
             "tokens from drafts, by column"]  # fmt: skip
    lines = []
    for name in next(iter(size.epochs.values())):
        own = [rows.get((count, name)) for count in size.epochs]
        there = [row for row in own if row is not None and "error" not in row]
        drafts = ", ".join(filter(None, map(drafted, there)))
        lines.append(
            [name, *_speeds(rows, size.epochs, name), ages(there[-1]) if there else "", drafts]
        )
    draw_epochs(rows, size, picture)
    return {"epochs": [*markdown(heads, lines), *_refused(rows)]}


def varied(size: Size, table: Table, entries: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tables that vary one input at a time."""
    counted: dict[str, Any] = {"runs": {}}
    for drafter in ("history-paper", "siblings", "ngram"):
        counted["runs"] |= simrl.acceptance(size.tokens, drafter=drafter).speculation["runs"]
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
    lines = []
    for words in variants:
        here = [rows[words, name] for name in size.families]
        lines.append([words, *(_speed(row, here, here[0], short=True) for row in here)])
    return {"varied": [*markdown(["", *size.families], lines), *_refused(rows)]}


def combination(
    size: Size, table: Table, entries: Mapping[str, Any], folder: Path, jobs: int
) -> dict[str, list[str]]:
    """Search every pipeline with every drafter, then dispatch and split of the best (`simrl.advise`), for each limit of
    staleness."""
    steps = size.combination_steps
    changes = {"steps": steps, "warmup_steps": steps * 2 // EPOCHS}
    base = size.scenario(size.base_gpus, EPOCHS, BASE, **changes)
    data = base.model_dump(mode="json", exclude={"system", "variant", "faults"})
    pipelines = [entry for name in size.pipelines for entry in _bounded(entries[name], size.limits)]
    tables: list[str] = []
    why: list[str] = []
    for limit in size.limits:
        first = _advised(
            data, pipelines, {"system.speculation": list(size.drafters)}, limit, folder, jobs
        )
        few = [dict(choice.option.point.scenario.system) for choice in first.best[:2]]
        placed = [entry for entry in few if "dispatch" in parameters_of(entry["name"])]
        second = first
        if placed:
            placing = {"system.dispatch": ["least_requests", "round_robin", "streamrl", "seer"]}
            # What the first search found with each pipeline stands among the choices.
            second = _advised(data, placed, placing, limit, folder, jobs)
        best = max((first, second), key=lambda found: found.choice.option.merit)
        tables += _choices(limit, first, second)
        why += _why(limit, best, base, table)
    return {"combination": tables, "why": why}


def _bounded(entry: Mapping[str, Any], limits: Sequence[int]) -> list[dict[str, Any]]:
    if "eta" not in parameters_of(str(entry["name"])):
        return [dict(entry)]
    return [{**entry, "eta": eta} for eta in limits]


def _advised(
    data: Mapping[str, Any],
    systems: Sequence[Any],
    values: Mapping[str, Any],
    limit: int,
    folder: Path,
    jobs: int,
) -> Answer:
    found = simrl.advise(
        data, {**values, "cluster.tp": [data["cluster"]["tp"]]}, systems, max_off_policyness=limit, robust=False,
        trials=400, polish=100, best=3, jobs=jobs, folder=folder / "advise",
    )  # fmt: skip
    return found.data.plans[0].answer


def _choices(limit: int, *found: Answer) -> list[str]:
    heads = ["combination", "samples/s", "off-policyness mean / most", "the largest losses", ""]
    seen: dict[str, Any] = {}
    for each in found:
        for choice in each.best:
            seen.setdefault(choice.option.point.hash, choice)
    # A dispatch rule that changes nothing is no other choice.
    distinct = {
        (choice.option.system, choice.option.merit): choice
        for choice in reversed(list(seen.values()))
    }
    ranked = sorted(distinct.values(), key=lambda choice: -choice.option.merit)[:4]
    best = ranked[0].option.merit
    lines = []
    for choice in ranked:
        row = choice.option.row
        losses = ", ".join(f"{words} {share:.0%}" for _, words, share in choice.reasons.parts)
        near = (
            ""
            if choice is ranked[0] or best / choice.option.merit - 1 >= RATIO_ERROR
            else "≈ the first"
        )
        lines.append(
            [
                _combined(choice.option.point.scenario),
                f"{row['samples_per_s']:.3g}",
                ages(row),
                losses,
                near,
            ]
        )
    first = found[0].searched
    counts = f"{first.points} combinations of pipeline and drafter, {len(first.allowed)} of them within the limit."
    return ["", f"**At most {limit} updates old.**", "", *markdown(heads, lines), "", counts]


def _combined(scenario: Scenario) -> str:
    parameters = dict(scenario.system.parameters)
    drafts = parameters.pop("speculation", None)
    said = ", ".join(f"{key} {value}" for key, value in parameters.items())
    words = scenario.system.name + (f" ({said})" if said else "")
    return words if drafts is None else f"{words}, {'no drafts' if drafts == 'none' else drafts}"


def _why(limit: int, best: Answer, base: Scenario, table: Table) -> list[str]:
    """Compare the GPU time of a trained sample: verl_colocated, the choice without its drafts, the choice."""
    chosen = best.choice.option.point.scenario
    without = dict(chosen.system.parameters) | {"speculation": "none"}
    plain = _scenario_like(chosen, {"name": chosen.system.name, **without})
    drafts = chosen.system.parameters.get("speculation", "none")
    only = _scenario_like(chosen, {"name": BASE, "speculation": drafts})
    columns = {
        BASE: base,
        f"{BASE}, {drafts}": only,
        f"{chosen.system.name}, no drafts": plain,
        "the choice": chosen,
    }
    same = (
        [plain.system] if chosen.system.name == BASE and set(without) == {"speculation"} else []
    )  # that is the base
    asked = {
        (limit, words): each
        for words, each in columns.items()
        if words == "the choice"
        or (words != f"{BASE}, none" and each.system not in (chosen.system, *same))
    }
    rows = table.of("why", asked)
    heads = ["GPU-seconds a trained sample", *(words for _, words in rows)]
    lines = []
    whole = {words: row["gpus"] / row["samples_per_s"] for (_, words), row in rows.items()}
    for name, part in PARTS.items():
        values = [row.get(f"part.{name}", 0.0) * whole[words] for (_, words), row in rows.items()]
        if max(values) >= 0.02 * whole["the choice"]:
            lines.append([part.words, *(f"{value:.1f}" for value in values)])
    lines.append(["all", *(f"**{value:.1f}**" for value in whole.values())])
    return ["", f"**At most {limit}:** {_combined(chosen)}", "", *markdown(heads, lines)]


def _scenario_like(scenario: Scenario, system: Mapping[str, Any]) -> Scenario:
    return Scenario.model_validate({**scenario.model_dump(mode="json"), "system": dict(system)})


def recorded(size: Size, table: Table) -> dict[str, list[str]]:
    """Simulate the recorded run under every system, on its own machine with the costs measured there, and as Qwen3-8B on 16
    H100s."""
    steps, warmup = size.recorded_steps, size.recorded_steps // 2
    large: dict[str, Any] = {
        "model": "qwen3-8b", "cluster.gpus": 16, "cluster.tp": 1,
        "workload.trace": str(COUNTDOWN / "trace.parquet"), "workload.synthetic": None,
    }  # fmt: skip
    asked: dict[tuple[Any, str], Scenario] = {}
    for name in size.recorded:
        wanted = {"rollout_share": 0.5, "minibatches": 2}  # as it was run
        entry = {
            "name": name,
            **{key: value for key, value in wanted.items() if key in parameters_of(name)},
        }
        counts = updates(name, steps, warmup)
        if not _drafts_by_model(name):
            asked["own", name] = scenario_from(
                COUNTDOWN / "scenario.yaml", {**counts, "training.switch_s": 0.0}, entry
            )
        asked["large", name] = scenario_from(SCENARIO, {**counts, **large}, entry)
    rows = table.of("recorded", asked)
    heads = ["system", "on its two cores: s an update", "× split", "tokens from drafts", "as Qwen3-8B on 16 H100s: ×",
             "tokens from drafts", "off-policyness mean / most"]  # fmt: skip
    first, second = rows.get(("own", "split"), {}), rows.get(("large", "split"), {})
    lines = []
    for name in size.recorded:
        # Without a row, its drafter is a model, and larger than this policy.
        small, big = rows.get(("own", name), {"error": ""}), rows["large", name]
        own = (
            _no(3)
            if "error" in small
            else [f"{small['step_s']:.1f}", times(small, first), drafted(small)]
        )
        large_cells = _no(3) if "error" in big else [times(big, second), drafted(big), ages(big)]
        lines.append([name, *own, *large_cells])
    measured = "; ".join(f"{each.schedules} {each.measured:.2f}×" for each in RATIOS)
    said = f"Measured on the two cores, over the first 20 updates of three repeats: {measured}."
    return {"recorded": [*markdown(heads, lines), "", said]}


def _drafts_by_model(name: str) -> bool:
    method = make_system(name, {}).speculation
    return method is not None and method.drafter == "model"


def verl_run(size: Size, table: Table, data: Path, folder: Path) -> dict[str, list[str]]:
    trace = folder / "verl_run.parquet"
    verl_trace(data, trace)
    asked = {}
    for name in size.families:
        given = {
            "workload.trace": str(trace),
            **updates(name, size.verl_steps, size.verl_steps // 3),
        }
        if "rollout_share" in parameters_of(name):
            for share in (0.25, 0.5):
                asked[share, name] = scenario_from(
                    VERL_RUN, given, {"name": name, "rollout_share": share}
                )
        else:
            asked["all", name] = scenario_from(VERL_RUN, given, name)
    rows = table.of("verl_run", asked)
    best = {}
    for name in size.families:
        own = [row for (_, other), row in rows.items() if other == name]
        best[name] = max(own, key=lambda row: rate(row) if "error" not in row else 0.0)
    heads = ["system", "s an update", "×", "idle share of all GPUs", "off-policyness mean / most"]
    lines = []
    for name, row in best.items():
        cells = _no(4)
        if "error" not in row:
            cells = [
                f"{row['step_s']:,.0f}",
                times(row, best.get(BASE, row)),
                f"{row['idle_share']:.0%}",
                ages(row),
            ]
        lines.append([name, *cells])
    return {"verl_run": [*markdown(heads, lines), *_refused(rows)]}


# Sentences.


def rate(row: Row) -> float:
    """Return trained response tokens a second and GPU; 0 for a system that cannot run."""
    return float(row.get("tokens_per_s_per_gpu", 0.0))


def times(row: Row, first: Row) -> str:
    return f"{rate(row) / rate(first):.2f}×" if rate(first) and rate(row) else ""


def ages(row: Row) -> str:
    oldest = row.get("oldest", row["off_policyness_max"])
    return f"{row['off_policyness_mean']:.2f} / {oldest}" + ("" if row["settled"] else " †")


def drafted(row: Row) -> str:
    return f"{row['speculation_rate']:.0%}" if row["speculation"] != "none" else ""


def _refused(rows: Mapping[tuple[Any, str], Row]) -> list[str]:
    """Return the reasons why systems cannot run, each once, for below the table."""
    found: dict[str, list[str]] = {}
    for (key, name), row in rows.items():
        if "error" in row:
            found.setdefault(row["error"].removeprefix(f"system {name}: "), []).append(
                f"{name} ({key})"
            )
    return [
        line for error, names in found.items() for line in ("", f"No: {', '.join(names)}: {error}.")
    ]


def _speed(row: Row | None, others: Sequence[Row], first: Row | None, short: bool = False) -> str:
    """Format tokens a second and GPU, and the ratio to the first's; bold within simrl's error of the fastest, ≈ within it of
    the first."""
    if row is None:
        return "–"
    if "error" in row:
        return "no"
    fastest = max(map(rate, others))
    ratio = rate(row) / rate(first) if first else 1.0
    near = "≈" if row is not first and abs(ratio - 1) < RATIO_ERROR else ""
    words = f"{near}{ratio:.2f}×" if short else f"{rate(row):,.0f} ({near}{ratio:.2f}×)"
    return f"**{words}**" if fastest / rate(row) - 1 < RATIO_ERROR else words


def _speeds(rows: Mapping[tuple[Any, str], Row], values: Iterable[Any], name: str) -> list[str]:
    at = {
        value: {other: row for (each, other), row in rows.items() if each == value}
        for value in values
    }
    return [_speed(here.get(name), list(here.values()), here.get(BASE)) for here in at.values()]


def _no(cells: int) -> list[str]:
    return ["no", *[""] * (cells - 1)]


# Pictures.

AGAIN = ("recompute_reloaded", "recompute_preempted", "recompute_moved", "recompute_redrafted")
GROUPS = {
    "decoding, in full batches": (("decode", "prefill"), LOOKS["decode"]),
    "decoding in small batches, host": (("small_batches", "host"), LOOKS["small_batches"]),
    "drafts": (("drafts_stood", "drafts_wasted", "train_drafter"), LOOKS["train_drafter"]),
    "training, log-probs": (("train", "log_prob"), LOOKS["train"]),
    "prefill again, dropped, ahead": ((*AGAIN, "dropped", "duplicates", "ahead"), LOOKS["recompute_moved"]),
    "weights, switching": (("load_weights", "publish", "switch", "transfer"), LOOKS["load_weights"]),
    "idle": (IDLE, LOOKS["idle"]),
}  # fmt: skip


def draw_hours(rows: Mapping[str, Row], title: str, path: Path) -> None:
    """Draw a bar per system, the slowest above: GPU-seconds of a thousand trained response tokens, by activity."""
    ranked = sorted(rows, key=lambda name: rate(rows[name]))
    figure = Figure(
        figsize=(11, 0.3 * len(ranked) + 1.7), dpi=110, facecolor=PAPER, layout="constrained"
    )
    axes = figure.subplots()
    for place, name in enumerate(ranked):
        total, left = 1000 / rate(rows[name]), 0.0
        for words, (parts, look) in GROUPS.items():
            width = total * sum(rows[name].get(f"part.{part}") or 0.0 for part in parts)
            axes.barh(
                place,
                width,
                left=left,
                label=words if place == 0 else None,
                height=0.74,
                **look.patch,
            )
            left += width
        axes.barh(place, max(total - left, 0.0), left=left, color=SAND, height=0.74)
        axes.text(total, place, f" {rate(rows[name]) / rate(rows[BASE]):.2f}×" if BASE in rows else "", va="center", fontsize=8,
                  color=INK)  # fmt: skip
    axes.set_yticks(range(len(ranked)), ranked, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GPU-seconds of 1,000 trained response tokens", color=INK)
    axes.set_title(
        f"{title}: where GPU time goes (× {BASE}'s throughput at the end of a bar)",
        fontsize=10,
        color=INK,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Software": None})


def draw_epochs(rows: Mapping[tuple[Any, str], Row], size: Size, path: Path) -> None:
    """Draw throughput over verl_colocated's by epochs, a line per system."""
    figure = Figure(figsize=(8, 4.2), dpi=110, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    colours = [INK, *SERIES]
    for name, colour in zip(size.families, colours, strict=False):
        known = {
            place: rows[count, name]
            for place, count in enumerate(size.epochs)
            if (count, name) in rows
        }
        ratios = [
            rate(row) / rate(rows[list(size.epochs)[place], BASE]) for place, row in known.items()
        ]
        axes.plot(list(known), ratios, marker="o", color=colour, label=name)
    axes.axhspan(1 - RATIO_ERROR, 1 + RATIO_ERROR, color=SAND, alpha=0.35, linewidth=0)
    axes.set_xticks(range(len(size.epochs)), [f"{count}" for count in size.epochs])
    axes.set_xlabel("epochs over the data set, of which the last is measured", color=INK)
    axes.set_ylabel(f"throughput, × {BASE}", color=INK)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, metadata={"Software": None})


# The page.


def write_rows(rows: Sequence[Row], path: Path) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    name: f"{value:.5g}" if isinstance(value, float) else value
                    for name, value in row.items()
                }
            )


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
    page: Annotated[
        Path, typer.Option(help="the page to renew; pictures and table go beside it")
    ] = HERE / "landscape.md",
    folder: Annotated[Path, typer.Option(help="where what was simulated is kept")] = ROOT
    / "results"
    / "landscape",
    jobs: Annotated[int, typer.Option(min=1, help="simultaneous simulations")] = 2,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="a few systems on 16 GPUs, to see that it runs")
    ] = False,
) -> None:
    size = TINY if tiny else FULL
    compile_kernels()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulated", total=None)
        table = Table(Outcomes(folder, Simulations(jobs, lambda: progress.advance(bar))), [])
        with errors_in_a_line("landscape"):
            for parts in parts_of(size, table, page.parent, folder, jobs, data):
                write_parts(page, parts)
                write_rows(table.rows, page.with_suffix(".csv"))
    print(f"Written: {page}, pictures and {page.with_suffix('.csv').name} beside it")


if __name__ == "__main__":
    typer.run(main)
