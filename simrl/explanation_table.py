"""An explanation, and a difference, on the screen.

Invariant: fits into 80 columns; parts under a thousandth of the whole are summed up in one line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simrl.critical_path import Link
from simrl.explanation import Difference, Explanation
from simrl.gpu_hours import PARTS

SMALLEST = 0.001  # share of the whole that has a line of its own
SHORT_GPU_S = 360.0  # a run that takes less is not told in hours
MOST_LINKS = 14
SHORTEST_S = 0.005  # of a reaction that has a line
WORDS = {
    "generate": "generates a response",
    "environment": "an environment answers",
    "reward": "the reward comes",
    "boundary": "until the worker reacts",
    "unknown": "a wait: nothing recorded ended at its end",
    "load_weights": "loads weights",
    "log_prob": "log-probs",
    "train": "trains",
    "publish": "publishes weights",
    "switch": "switches phases",
    "transfer": "takes over the batch",
    "checkpoint": "checkpoint",
    "evaluate": "evaluates",
    "lost": "is lost",
}


def print_explanation(e: Explanation, console: Console) -> None:
    """Where the GPU-hours went, the critical path and who held it up, what is known to go wrong."""
    whole = e.whole
    variant = f" ({e.variant})" if e.variant else ""
    console.print(
        Text(
            f"{e.label}{variant}: {whole.gpus:,} GPUs for {whole.end_s:,.0f} s, {number(whole.total_gpu_s / 3600)} GPU-hours, "
            f"{e.updates} updates",
            style="bold",
        )
    )
    console.print(_waterfall(e))
    console.print(
        Text(
            f"The last column: GPU-seconds a trained sample, the first {e.warmup_steps} updates left out, as in a comparison."
        )
    )
    if e.full_batch:
        full = e.full_batch
        console.print(
            Text(
                f"A full batch is what a worker can hold: {full['sequences']} responses of {full['context_tokens']:,.0f} "
                f"tokens on average, {1000 * full['pass_s']:.3g} ms a pass."
            )
        )
    console.print()
    _print_path(e, console)
    console.print()
    _print_held_up(e, console)
    console.print()
    console.print(Text("What is known to go wrong", style="bold"))
    if not e.findings:
        console.print(Text("None of the known signs shows."))
    for finding in e.findings:
        console.print(Text(f"{finding.name}: {finding.says}."))
        console.print(Text(f"  Beyond {finding.threshold:.0%}: {finding.source}."))
        console.print(Text(f"  Try: {finding.remedy}"), soft_wrap=True)


def print_difference(d: Difference, console: Console) -> None:
    """What made B faster, or slower, in words and as a table."""
    console.print(Text(f"A: {d.a}, {d.a_gpus:,} GPUs", style="bold"))
    console.print(Text(f"B: {d.b}, {d.b_gpus:,} GPUs", style="bold"))
    saved = d.a_gpu_s - d.b_gpu_s
    ratio = max(d.a_gpu_s / d.b_gpu_s, d.b_gpu_s / d.a_gpu_s)
    if math.isclose(d.a_gpu_s, d.b_gpu_s, rel_tol=5e-4):
        console.print(Text(f"Both take {number(d.a_gpu_s)} GPU-seconds a trained sample."))
    else:
        console.print(
            Text(
                f"B takes {number(d.b_gpu_s)} GPU-seconds a trained sample, A {number(d.a_gpu_s)}: {ratio:.2f} times "
                f"{'less' if saved > 0 else 'more'}."
            )
        )
    if d.a_gpus != d.b_gpus:
        console.print(
            Text(
                f"In time, B trains a sample every {number(d.b_s)} s, A every {number(d.a_s)} s: {d.a_s / d.b_s:.2f}×."
            )
        )
    for line in sentences(d):
        console.print(Text(line))
    for caution in d.cautions:
        console.print(Text(f"Mind: {caution}."))
    console.print()
    console.print(_changes(d))


def sentences(d: Difference, most: int = 3) -> list[str]:
    """The largest changes that made B better, and the largest that made it worse."""
    least = SMALLEST * 10 * max(d.a_gpu_s, d.b_gpu_s)
    lines = []
    for saves in (True, False):
        found = [c for c in d.changes if (c.saved_gpu_s > 0) == saves and abs(c.saved_gpu_s) >= least][:most]
        said = [f"{c.words} ({number(c.a_gpu_s)} to {number(c.b_gpu_s)})" for c in found]
        if said:
            lines.append(f"B spends {'less' if saves else 'more'} on {_and(said)}.")
    return lines


def _and(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


def _waterfall(e: Explanation) -> Table:
    """From what an ideal run has too, to all."""
    unit, unit_s = ("GPU-hours", 3600.0) if e.whole.total_gpu_s >= SHORT_GPU_S else ("GPU-s", 1.0)
    table = _new_table("where the GPU-hours went", unit, "share", "GPU-s a\nsample")
    total, per_sample = e.whole.total_gpu_s, e.steady.per_sample
    all_of_sample = e.steady.total_gpu_s / e.steady.samples
    shown = [
        key
        for key, value in e.whole.gpu_s.items()
        if abs(value) >= SMALLEST * total or abs(per_sample[key]) >= SMALLEST * all_of_sample
    ]

    def add(words: str, gpu_s: float, of_sample: float, style: str = "", end: bool = False) -> None:
        cells = [words, number(gpu_s / unit_s), f"{gpu_s / total:.1%}", number(of_sample)]
        table.add_row(*(Text(cell) for cell in cells), style=style, end_section=end)

    ideal = [key for key in shown if PARTS[key].ideal]
    for key in ideal:
        add(PARTS[key].words, e.whole.gpu_s[key], per_sample[key])
    add("an ideal run", sum(e.whole.gpu_s[k] for k in ideal), sum(per_sample[k] for k in ideal), "bold", True)
    losses = sorted((key for key in shown if not PARTS[key].ideal), key=lambda key: -e.whole.gpu_s[key])
    for key in losses:
        add(PARTS[key].words, e.whole.gpu_s[key], per_sample[key])
    rest = [key for key in e.whole.gpu_s if key not in shown]
    rest_gpu_s, rest_of_sample = sum(e.whole.gpu_s[k] for k in rest), sum(per_sample[k] for k in rest)
    if rest_gpu_s >= SMALLEST / 2 * total:
        add("all that is smaller", rest_gpu_s, rest_of_sample)
    add("this run", total, all_of_sample, "bold")
    return table


def _changes(d: Difference) -> Table:
    table = _new_table("GPU-s a trained sample", "A", "B", "B saves")
    least = SMALLEST * max(d.a_gpu_s, d.b_gpu_s)
    shown = [c for c in d.changes if abs(c.saved_gpu_s) >= least]
    rest = [c for c in d.changes if c not in shown]

    def add(words: str, a: float, b: float, style: str = "", end: bool = False) -> None:
        table.add_row(*map(Text, (words, number(a), number(b), signed(a - b))), style=style, end_section=end)

    for change in shown:
        add(PARTS[change.part].words, change.a_gpu_s, change.b_gpu_s)
    if rest:
        add("all that is alike", sum(c.a_gpu_s for c in rest), sum(c.b_gpu_s for c in rest))
    add("all", d.a_gpu_s, d.b_gpu_s, "bold")
    return table


def _print_path(e: Explanation, console: Console) -> None:
    path = e.path
    console.print(
        Text(
            f"Critical path of update {path.step}: {path.ended_s - path.started_s:,.1f} s, walked back from its end "
            "(--step shows another)",
            style="bold",
        )
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    rows = _joined([k for k in path.links if k.kind != "boundary" or k.ended_s - k.started_s >= SHORTEST_S])
    hidden = len(rows) - MOST_LINKS
    if hidden > 0:
        half = MOST_LINKS // 2
        left_out = rows[half:-half]
        middle = (left_out[0][0], sum(row[1] for row in left_out), f"… {len(left_out)} more, in --json")
        rows = [*rows[:half], middle, *rows[-half:]]
    for at_s, seconds, words in rows:
        table.add_row(Text(f"at {at_s:,.1f} s"), Text(f"{seconds:,.2f} s"), Text(words))
    console.print(table)
    length_s = sum(e.paths_s.values())
    said = [
        f"{WORDS_OF_ALL.get(kind, kind)} {seconds / length_s:.0%}"
        for kind, seconds in e.paths_s.items()
        if seconds >= 0.005 * length_s
    ]
    console.print(
        Text(f"Of the critical paths of all {e.updates - e.warmup_steps} updates after the warm-up: {', '.join(said)}.")
    )


WORDS_OF_ALL = {
    "generate": "responses",
    "environment": "environments",
    "reward": "rewards",
    "boundary": "workers' reactions",
    "unknown": "waits of unknown cause",
    "load_weights": "loading weights",
    "log_prob": "log-probs",
    "train": "training",
    "publish": "publishing",
    "switch": "switching phases",
    "transfer": "handing on batches",
}


def _joined(links: Sequence[Link]) -> list[tuple[float, float, str]]:
    """(start, seconds, words) of each link; a response that weights interrupted is one row."""
    rows: list[tuple[float, float, str]] = []
    i = 0
    while i < len(links):
        first, j, tokens = links[i], i + 1, links[i].tokens
        loads = 0
        if first.sample:
            while j + 1 < len(links) and links[j].kind == "load_weights" and links[j + 1].sample == first.sample:
                loads, tokens, j = loads + 1, tokens + links[j + 1].tokens, j + 2
        where = f"{first.where} " if first.where and first.kind not in ("reward", "boundary", "unknown") else ""
        words = f"{where}{WORDS.get(first.kind, first.kind)}"
        if first.sample:
            words += f", {first.sample}: {tokens:,} tokens"
        if loads:
            words += f", {loads} weight load{'s' * (loads > 1)} in between"
        rows.append((first.started_s, links[j - 1].ended_s - first.started_s, words))
        i = j
    return rows


def _print_held_up(e: Explanation, console: Console) -> None:
    if not e.held_up_s:
        console.print(Text(f"No sample held update {e.path.step} up: all were there before the trainer was free."))
        return
    console.print(
        Text(
            f"The samples that update {e.path.step} waited for last: without these {len(e.held_up)} its batch had been "
            f"complete {e.held_up_s:,.1f} s earlier",
            style="bold",
        )
    )
    table = _new_table("sample", "worker", "prompt", "response\ntokens", "start s", "end s", "waited for\nit alone s")
    for sample in e.held_up:
        table.add_row(
            *map(
                Text,
                (
                    sample.sample,
                    str(sample.worker),
                    f"{sample.prompt_tokens:,}",
                    f"{sample.response_tokens:,}",
                    f"{sample.started_s:,.1f}",
                    f"{sample.finished_s:,.1f}",
                    f"{sample.held_s:,.2f}",
                ),
            )
        )
    console.print(table)
    console.print(
        Text("Samples are named prompt/sample/epoch; the wait is counted from when the update before had ended.")
    )


def _new_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def number(value: float) -> str:
    """Three significant digits, and every digit before the point; what is next to nothing as 0."""
    if abs(value) < 5e-4:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(0, digits), 4)}f}"


def signed(value: float) -> str:
    """The same with its sign."""
    text = number(value)
    return text if text.startswith("-") or text == "0" else f"+{text}"
