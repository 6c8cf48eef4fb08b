"""An explanation, and a difference, on the screen.

Invariant: fits into 80 columns; parts under a thousandth of the whole are one line together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.analysis.critical_path import PathLink
from simrl.analysis.explanation import Difference, Explanation, PoolShare, PrefixCache
from simrl.analysis.gpu_hours import PARTS
from simrl.profile.hardware import GIB
from simrl.show.text import Line, aligned, grouped, listed, number, plain_table, say, signed

SMALLEST = 0.001  # share of the whole that has its own line
SHORT_GPU_S = 360.0  # a shorter run is shown in seconds, not hours, as is one with parts of 0 hours
MOST_LINKS = 14
SHORTEST_S = 0.005  # of a reaction that has a line
KINDS = {  # of links of a critical path: words in its table, words in a sum over paths
    "generate": ("generates a response", "responses"),
    "environment": ("an environment answers", "environments"),
    "reward": ("the reward comes", "rewards"),
    "judge": ("the judge reads and answers", "the judge"),
    "boundary": ("until the worker reacts", "workers' reactions"),
    "unknown": ("a wait: nothing recorded ended at its end", "waits of unknown cause"),
    "load_weights": ("loads weights", "loading weights"),
    "load_drafter": ("loads a drafter", "loading drafters"),
    "log_prob": ("log-probs", "log-probs"),
    "train": ("trains", "training"),
    "publish": ("publishes weights", "publishing"),
    "switch": ("switches phases", "switching phases"),
    "transfer": ("takes over the batch", "handing on batches"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "evaluate": ("evaluates", "evaluate"),
    "lost": ("is lost", "lost"),
}


def print_explanation(e: Explanation, console: Console) -> None:
    """Print the parts of the GPU-hours, the critical path, the samples that delayed it, and known
    problems."""
    whole = e.whole
    variant = f" ({e.variant})" if e.variant else ""
    hours = f"{number(whole.total_gpu_s / 3600)} GPU-hours"
    head = f"{e.label}{variant}: {whole.gpus:,} GPUs for {whole.end_s:,.0f} s, {hours}, {e.updates} updates"
    say(console, head, style="bold")
    console.print(_waterfall(e))
    left_out = (
        f"the first {e.warmup_steps} updates left out, as in a comparison"
        if e.warmup_steps
        else "all updates"
    )
    say(console, f"The last column: GPU-seconds a trained sample, {left_out}.")
    filled = (
        ""
        if e.occupancy is None
        else f"a running worker fills {e.occupancy:.0%} of the slots of a full batch"
    )
    facts = {
        "A full batch is what a worker can hold": _full_batch(e.full_batch) if e.full_batch else "",
        "Occupancy": filled and f"{filled}, {left_out}",
        "Admission": e.admission,
        "Planner": e.planner,
        "SpecActor": e.drafting,
        "τ of ranking groups": e.tau,
        "Indexes of the history": e.history,
        "Evaluations": _evaluations(e.evaluations) if e.evaluations else "",
        "Pools": _pools(e.pools) if e.pools else "",
        "Weight sync": e.weight_sync,
        "Judge": e.judge,
        "Prefix cache": _prefix_cache(e.prefix_cache) if e.prefix_cache else "",
        "Not modelled": "; ".join(e.not_modelled),
        "Without effect": "; ".join(
            f"{', '.join(keys)} ({why})"
            for why, keys in grouped((why, key) for key, why in e.without_effect.items()).items()
        ),
    }
    say(console, *(f"{name}: {fact}." for name, fact in facts.items() if fact))
    if e.agents:
        say(console, _agents(e.agents))
    console.print()
    _print_path(e, console)
    console.print()
    _print_held_up(e, console)
    console.print()
    say(console, "What is known to go wrong", style="bold")
    if not e.findings:
        say(console, "None of the known signs shows.")
    for finding in e.findings:
        say(console, f"{finding.name}: {finding.says}.")
        say(console, f"  Beyond {finding.threshold:.0%}: {finding.source}.")
        say(console, f"  Try: {finding.remedy}", soft_wrap=True)


def print_difference(d: Difference, console: Console) -> None:
    """Print the changes that made B faster or slower, in words and as a table."""
    say(console, f"A: {d.a}, {d.a_gpus:,} GPUs", f"B: {d.b}, {d.b_gpus:,} GPUs", style="bold")
    a, b = number(d.a_gpu_s), number(d.b_gpu_s)
    if math.isclose(d.a_gpu_s, d.b_gpu_s, rel_tol=5e-4):
        say(console, f"Both take {a} GPU-seconds a trained sample.")
    else:
        ratio = max(d.a_gpu_s / d.b_gpu_s, d.b_gpu_s / d.a_gpu_s)
        times = f"{ratio:.2f} times {'less' if d.a_gpu_s > d.b_gpu_s else 'more'}"
        say(console, f"B takes {b} GPU-seconds a trained sample, A {a}: {times}.")
    if d.a_gpus != d.b_gpus:
        apart = f"every {number(d.b_s)} s, A every {number(d.a_s)} s: {d.a_s / d.b_s:.2f}×"
        say(console, f"In time, B trains a sample {apart}.")
    say(console, *sentences(d), *(f"Mind: {caution}." for caution in d.cautions))
    console.print()
    console.print(_changes(d))


def sentences(d: Difference, most: int = 3) -> list[str]:
    """Return the largest changes that made B better, and the largest that made it worse."""
    least = SMALLEST * 10 * max(d.a_gpu_s, d.b_gpu_s)
    lines = []
    for saves in (True, False):
        largest = [
            c for c in d.changes if (c.saved_gpu_s > 0) == saves and abs(c.saved_gpu_s) >= least
        ][:most]
        if largest:
            changes = [f"{c.words} ({number(c.a_gpu_s)} to {number(c.b_gpu_s)})" for c in largest]
            lines.append(f"B spends {'less' if saves else 'more'} on {listed(changes)}.")
    return lines


def _full_batch(full: Mapping[str, Any]) -> str:
    """Return the requests of a full batch, and the time of its pass."""
    batch = f"{full['sequences']} responses of {full['context_tokens']:,.0f} tokens on average"
    return f"{batch}, {1000 * full['pass_s']:.3g} ms a pass"


def _pools(pools: Sequence[PoolShare]) -> str:
    """Return the GPU-hours and the cost of each pool."""
    words = [
        f"{pool.use} on {pool.gpus:,} {pool.gpu}, {number(pool.gpu_hours)} GPU-hours"
        + (f" for {number(pool.cost)}" if pool.cost else "")
        for pool in pools
    ]
    return f"{'; '.join(words)}. The table adds GPU-hours of both"


def _evaluations(e: Mapping[str, float]) -> str:
    """Return the number of evaluations, their seconds and tokens."""
    return (
        f"{e['evaluations']:,}"
        + f", {e['evaluations_cut']:,} of them cut by the end of the run"
        * bool(e["evaluations_cut"])
        + f", {number(e['evaluation_s'])} s each on average; {e['evaluation_tokens']:,} tokens, "
        f"{e['evaluation_share']:.0%} of all generated, {e['evaluation_mixed_share']:.0%} of them by newer weights"
    )


def _prefix_cache(c: PrefixCache) -> str:
    """Return the hits of the prefix caches, and the prefill that they saved."""
    mean = f"at the run's mean of {1e6 * c.gpu_s_per_token:.3g} GPU-µs a prefilled token"
    saved = f"{number(c.saved_gpu_s)} GPU-seconds of prefill saved, {mean}"
    return f"{c.hit_rate:.0%} of {c.lookup_tokens:,} tokens of context found; {saved}"


def _agents(facts: Mapping[str, Any]) -> str:
    """Return the waits of trajectories of several turns, the offloaded bytes, and the killed
    ones."""
    spent_s = {
        "in tools": facts["in_tools_s"],
        "waiting for tool slots": facts["waiting_for_tool_slots_s"],
        "waiting for KV cache from the host": facts["waiting_for_kv_s"],
        "waiting for room in KV caches": facts.get("waiting_for_room_s", 0.0),
    }
    unit, unit_s = ("hours", 3600.0) if max(spent_s.values()) >= 3600 else ("s", 1.0)
    parts = [
        f"{number(seconds / unit_s)} {unit} {use}" for use, seconds in spent_s.items() if seconds
    ]
    if facts["offloaded_bytes"]:
        missed = (
            f", {facts['not_offloaded']:,} turns found no room" if facts["not_offloaded"] else ""
        )
        parts.append(f"{number(facts['offloaded_bytes'] / GIB)} GiB offloaded{missed}")
    if facts.get("pauses"):
        parts.append(f"{facts['pauses']:,} pauses, {facts['moves']:,} resumed at another worker")
    if facts["killed"]:
        parts.append(f"{facts['killed']:,} killed at their deadline")
    kept = (
        f" (KV cache while a tool runs: {facts['kv_while_tool_runs']})"
        if facts["in_tools_s"]
        else ""
    )
    return f"Trajectories{kept}: {'; '.join(parts) or 'none in a tool, none killed'}."


def _waterfall(e: Explanation) -> Table:
    """Return the parts of the GPU-hours: first the ideal run's, then the losses, largest first."""
    whole, total, per_sample = e.whole.gpu_s, e.whole.total_gpu_s, e.steady.per_sample
    all_of_sample = e.steady.total_gpu_s / e.steady.samples
    shown = [
        key
        for key, value in whole.items()
        if abs(value) >= SMALLEST * total or abs(per_sample[key]) >= SMALLEST * all_of_sample
    ]
    hours = all(number(whole[key] / 3600) != "0" for key in shown if whole[key])
    unit, unit_s = ("GPU-hours", 3600.0) if total >= SHORT_GPU_S and hours else ("GPU-s", 1.0)
    ideal = [key for key in shown if PARTS[key].ideal]
    losses = sorted((key for key in shown if not PARTS[key].ideal), key=lambda key: -whole[key])
    rest = [key for key in whole if key not in shown]

    def line(words: str, keys: Sequence[str], style: str = "", end: bool = False) -> Line:
        gpu_s, of_sample = sum(whole[key] for key in keys), sum(per_sample[key] for key in keys)
        return Line(
            (words, number(gpu_s / unit_s), f"{gpu_s / total:.1%}", number(of_sample)), style, end
        )

    lines = [line(PARTS[key].words, [key]) for key in ideal]
    lines.append(line("an ideal run", ideal, "bold", True))
    lines += [line(PARTS[key].words, [key]) for key in losses]
    if sum(whole[key] for key in rest) >= SMALLEST / 2 * total:
        lines.append(line("all that is smaller", rest))
    lines.append(
        Line(("this run", number(total / unit_s), f"{1:.1%}", number(all_of_sample)), "bold")
    )
    return plain_table(("where the GPU-hours went", unit, "share", "GPU-s a\nsample"), lines)


def _changes(d: Difference) -> Table:
    least = SMALLEST * max(d.a_gpu_s, d.b_gpu_s)
    shown = [c for c in d.changes if abs(c.saved_gpu_s) >= least]
    rest = [c for c in d.changes if c not in shown]
    rows = [(PARTS[c.part].words, c.a_gpu_s, c.b_gpu_s) for c in shown]
    if rest:
        rows.append(
            ("all that is alike", sum(c.a_gpu_s for c in rest), sum(c.b_gpu_s for c in rest))
        )
    rows.append(("all", d.a_gpu_s, d.b_gpu_s))
    lines = [
        Line((words, number(a), number(b), signed(a - b)), "bold" * (words == "all"))
        for words, a, b in rows
    ]
    return plain_table(("GPU-s a trained sample", "A", "B", "B saves"), lines)


def _print_path(e: Explanation, console: Console) -> None:
    path = e.path
    took = (
        f"{path.ended_s - path.started_s:,.1f} s, walked back from its end (--step shows another)"
    )
    say(console, f"Critical path of update {path.step}: {took}", style="bold")
    rows = _joined(
        [k for k in path.links if k.kind != "boundary" or k.ended_s - k.started_s >= SHORTEST_S]
    )
    if len(rows) > MOST_LINKS:
        half = MOST_LINKS // 2
        left_out = rows[half:-half]
        middle = (
            left_out[0][0],
            sum(row[1] for row in left_out),
            f"… {len(left_out)} more, in --json",
        )
        rows = [*rows[:half], middle, *rows[-half:]]
    console.print(
        aligned(
            ((f"at {at_s:,.1f} s", f"{seconds:,.2f} s", words) for at_s, seconds, words in rows),
            "rrl",
        )
    )
    shares, updates = ", ".join(path_shares(e)), e.updates - e.warmup_steps
    say(console, f"Of the critical paths of all {updates} updates after the warm-up: {shares}.")


def path_shares(e: Explanation) -> list[str]:
    """Return the parts of the critical paths of all updates in words, without those under half a
    per cent."""
    length_s = sum(e.paths_s.values())
    return [
        f"{KINDS.get(kind, (kind,))[-1]} {seconds / length_s:.0%}"
        for kind, seconds in e.paths_s.items()
        if length_s and seconds >= 0.005 * length_s
    ]


def _joined(links: Sequence[PathLink]) -> list[tuple[float, float, str]]:
    """Return (start, seconds, words) of each link; a response that weight loads interrupted is one
    row."""
    rows: list[tuple[float, float, str]] = []
    i = 0
    while i < len(links):
        first, j, tokens = links[i], i + 1, links[i].tokens
        loads = 0
        if first.sample:
            while (
                j + 1 < len(links)
                and links[j].kind == "load_weights"
                and links[j + 1].sample == first.sample
            ):
                loads, tokens, j = loads + 1, tokens + links[j + 1].tokens, j + 2
        where = (
            f"{first.where} "
            if first.where and first.kind not in ("reward", "boundary", "unknown")
            else ""
        )
        words = f"{where}{KINDS.get(first.kind, (first.kind,))[0]}"
        if first.sample:
            words += f", {first.sample}: {tokens:,} tokens"
        if loads:
            words += f", {loads} weight load{'s' * (loads > 1)} in between"
        rows.append((first.started_s, links[j - 1].ended_s - first.started_s, words))
        i = j
    return rows


def _print_held_up(e: Explanation, console: Console) -> None:
    if not e.held_up_s:
        say(
            console,
            f"No sample held update {e.path.step} up: all were there before the trainer was free.",
        )
        return
    earlier = (
        f"without these {len(e.held_up)} its batch had been complete {e.held_up_s:,.1f} s earlier"
    )
    say(console, f"The samples that update {e.path.step} waited for last: {earlier}", style="bold")
    headings = (
        "sample",
        "worker",
        "prompt",
        "response\ntokens",
        "start s",
        "end s",
        "waited for\nit alone s",
    )
    rows = [
        (s.sample, s.worker, f"{s.prompt_tokens:,}", f"{s.response_tokens:,}", f"{s.started_s:,.1f}",
         f"{s.finished_s:,.1f}", f"{s.held_s:,.2f}")
        for s in e.held_up
    ]  # fmt: skip
    console.print(plain_table(headings, rows))
    say(
        console,
        "Samples are named prompt/sample/epoch; the wait is counted from when the update before had ended.",
    )
