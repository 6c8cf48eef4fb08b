"""What drafting from texts would give on a recorded run: as data, in words and as a picture.

Invariant: every acceptance here was counted token by token on the trace; only seconds come from elsewhere, and they name their
profile. Rates are over the responses for which there are drafts: without a history there is nothing to speculate with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from simrl.engine import EngineConfig
from simrl.errors import InputError, meant
from simrl.files import write_whole_file
from simrl.hardware import GPUS, MODELS
from simrl.page import folded
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, SKY, VERMILLION
from simrl.picture import Picture
from simrl.profile import TableProfile
from simrl.speculation.draft_times import text_drafts_of
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.history import history_runs
from simrl.speculation.history_index import PAPER, PUBLIC_CODE
from simrl.speculation.matching import Ints
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import Passes, run_passes, stretches
from simrl.speculation.run_model import RunModel, draw_trace_runs, fit_run_model
from simrl.speculation.siblings import Known, sibling_runs
from simrl.speculation.similarity import similarity
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.trace import Trace, trace_metadata_json

Drafter = Literal["history-paper", "history-code", "ngram", "siblings"]
DRAFTERS: tuple[Drafter, ...] = ("history-paper", "history-code", "ngram", "siblings")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FIXED_WINDOWS = (1, 2, 4, 8, 16, 32)
CONTROL_SEED = 0
LONGEST_SHARE = 0.1  # of the responses, told apart: the tail decides when a rollout ends


class Measured(NamedTuple):
    """The runs of a drafter on a trace, and what a window makes of them."""

    trace: Trace
    drafter: Drafter
    history: dict[str, Any]
    window: Window
    runs: AcceptRuns
    passes: Passes

    @property
    def served(self) -> NDArray[np.bool_]:
        """The rows for which there are drafts; one token comes with the prompt and is not decoded."""
        served: NDArray[np.bool_] = (self.runs.first >= 0) & (self.passes.tokens > 0)
        return served


def measure(
    trace: Trace,
    drafter: Drafter = "history-paper",
    window: Window | None = None,
    epochs_back: int = 1,
    known: Known = "lockstep",
    threads: int = 1,
) -> Measured:
    """Runs a drafter teacher-forced over a trace with token ids.

    The window is the drafter's own if none is given: the paper's (AIMD), for "history-code" the public code's (MIMD). Raises
    `InputError` for a trace in which the drafter has nothing to draft from.
    """
    if drafter not in DRAFTERS:
        raise InputError(f"drafter {drafter!r}{meant(drafter, DRAFTERS)}: choose one of {', '.join(DRAFTERS)}")
    name = trace.metadata.name
    if drafter.startswith("history") and len(np.unique(trace.column("epoch"))) < 2:
        raise InputError(
            f"trace {name!r}: it has one epoch only, and history needs an earlier one; try --drafter siblings or ngram"
        )
    run: Mapping[Drafter, Callable[[], AcceptRuns]] = {
        "history-paper": lambda: history_runs(trace, PAPER, epochs_back, threads=threads),
        "history-code": lambda: history_runs(trace, PUBLIC_CODE, epochs_back, threads=threads),
        "ngram": lambda: ngram_runs(trace),
        "siblings": lambda: sibling_runs(trace, known),
    }
    runs = run[drafter]()
    tokens = trace.column("response_tokens").astype(np.int64)
    if not ((runs.first >= 0) & (tokens > 1)).any():
        why = {"siblings": "every group has one response", "ngram": "every response has one token"}
        raise InputError(
            f"trace {name!r}: nothing to draft from ({why.get(drafter, 'no prompt comes twice in epochs so near')}); "
            "try another drafter, or more --epochs-back"
        )
    history: dict[str, Any] = {"kind": "own text"}
    if drafter.startswith("history"):
        history = {"kind": "epochs", "epochs_back": epochs_back}
    elif drafter == "siblings":
        history = {"kind": "siblings", "known": known}
    rule = window or (Mimd() if drafter == "history-code" else Aimd())
    return Measured(trace, drafter, history, rule, runs, run_passes(runs, tokens, rule.rule))


def report(measured: Measured, profile: TableProfile | None = None) -> dict[str, Any]:
    """Everything that was found, ready for JSON; what cannot be computed is None.

    `acceptance_rate`, `speculation_rate` and `accept_length` are `passes.Passes`'; `by_epoch` has them for each epoch.
    `hit_lengths` has the stretches that the drafter knows by length (RhymeRL Fig. 8): share of their number, and of their
    tokens. `similarity` has the shares of RhymeRL's Fig. 6, of whatever drafter. `pays` needs a profile.
    """
    trace, served = measured.trace, measured.served
    epoch = trace.column("epoch")
    tokens = trace.column("response_tokens").astype(np.int64)
    epochs_back = measured.history.get("epochs_back", 1)
    model = fit_run_model(
        measured.runs,
        tokens,
        first_epoch=not measured.drafter.startswith("history"),
        source=f"{measured.drafter} on {trace.metadata.name}, {_history(measured.history)}",
    )
    drawn = run_passes(draw_trace_runs(model, trace, CONTROL_SEED, epochs_back), tokens, measured.window.rule)
    return {
        "drafter": measured.drafter,
        "history": measured.history,
        "window": measured.window.model_dump(),
        "responses": len(trace),
        "responses_with_drafts": int(served.sum()),
        "tokens_with_drafts": int(tokens[served].sum()),
        **_rates(measured.passes.of(served)),
        "by_epoch": [
            {
                "epoch": e,
                "responses": int((epoch == e).sum()),
                "responses_with_drafts": int((served & (epoch == e)).sum()),
                **_rates(measured.passes.of(served & (epoch == e))),
            }
            for e in np.unique(epoch).tolist()
        ],
        "by_response": _by_response(measured),
        "hit_lengths": _hit_lengths(stretches(measured.runs, tokens).hit),
        "similarity": _similarities(trace),
        "pays": None if profile is None else _pays(measured, profile),
        "run_model": model.model_dump(mode="json"),
        "run_model_accept_length": drawn.of(served).accept_length,
        "trace": trace_metadata_json(trace),
    }


def _rates(passes: Passes) -> dict[str, float | None]:
    return {name: _known(getattr(passes, name)) for name in ("acceptance_rate", "speculation_rate", "accept_length")}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _by_response(measured: Measured) -> dict[str, Any]:
    """How responses differ: percentiles over them, and the longest tenth of them on its own."""
    served = measured.served
    passes = measured.passes.of(served)
    of_response = passes.accepted / passes.tokens
    lengths = passes.tokens / passes.passes
    longest = served & (measured.passes.tokens >= np.quantile(passes.tokens, 1 - LONGEST_SHARE))
    counts, edges = np.histogram(of_response, np.linspace(0, 1, 21))
    return {
        "speculation_rate": {f"p{p}": float(np.percentile(of_response, p)) for p in (10, 50, 90)},
        "accept_length": {f"p{p}": float(np.percentile(lengths, p)) for p in (10, 50, 90)},
        "longest_tenth": _rates(measured.passes.of(longest)),
        "speculation_rate_histogram": [
            {"from": float(low), "to": float(high), "responses": int(n)}
            for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
    }


def _hit_lengths(hits: Ints) -> list[dict[str, Any]]:
    """Between powers of two: how many, their share of the number and of the tokens."""
    hits = hits[hits > 0]
    if not hits.size:
        return []
    bucket = np.ceil(np.log2(hits)).astype(np.int64)
    number = np.bincount(bucket)
    tokens = np.bincount(bucket, weights=hits)
    return [
        {
            "from_tokens": 2 ** (i - 1) + 1 if i else 1,
            "to_tokens": 2**i,
            "hits": int(number[i]),
            "share_of_hits": float(number[i] / number.sum()),
            "share_of_tokens": float(tokens[i] / tokens.sum()),
        }
        for i in range(len(number))
    ]


def _similarities(trace: Trace) -> list[dict[str, Any]]:
    """RhymeRL's Fig. 6 for each history that the trace has, both ways to follow a match, and a control."""
    tokens, epoch = trace.column("response_tokens").astype(np.int64), trace.column("epoch")
    several = len(np.unique(trace.column("prompt_id"))) > 1
    found = []
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("previous epoch", {}),
        ("all earlier epochs", {"epochs_back": None}),
        ("siblings", {"history": "siblings"}),
    )
    for name, options in kinds:
        latest = similarity(trace, **options)
        if not latest.has_history.any():
            continue
        best = similarity(trace, follow="best", **options)
        control = similarity(trace, control_seed=CONTROL_SEED, **options) if several else None
        share = np.bincount(epoch, weights=latest.accepted, minlength=epoch.max() + 1)
        whole = np.bincount(epoch, weights=tokens * latest.has_history, minlength=epoch.max() + 1)
        found.append(
            {
                "history": name,
                "responses": int(latest.has_history.sum()),
                "accepted_share": latest.accepted_share(tokens),
                "best_match": best.accepted_share(tokens),
                "another_prompt": None if control is None else _known(control.accepted_share(tokens)),
                "by_epoch": [
                    {"epoch": e, "accepted_share": float(share[e] / whole[e])} for e in np.flatnonzero(whole).tolist()
                ],
            }
        )
    return found


def _sequences_that_fit(profile: TableProfile, kv_tokens: float) -> float:
    """The sequences of such a length that fit the GPUs' memory beside the weights; no bound for an unknown model or GPU."""
    metadata = profile.metadata
    if metadata.model not in MODELS or metadata.gpu not in GPUS:
        return math.inf
    shape, memory_bytes = MODELS[metadata.model], GPUS[metadata.gpu].memory_bytes
    config = EngineConfig()
    free = memory_bytes * config.gpu_memory_utilization - config.reserve_bytes - shape.weight_bytes / metadata.tp
    return max(free, 0.0) / (shape.kv_bytes_per_token / min(metadata.tp, shape.kv_heads) * kv_tokens)


def _pays(measured: Measured, profile: TableProfile) -> dict[str, Any]:
    """Seconds a token with and without drafts by batch, all sequences of the trace's typical length and acceptance.

    The window asked for, and the best of the fixed ones. Batches go as far as the profile and the GPUs' memory do.
    """
    served, tokens = measured.served, measured.trace.column("response_tokens").astype(np.int64)
    prompts = measured.trace.column("prompt_tokens").astype(np.int64)
    # Of a decoding sequence, seen at any of its tokens.
    weight = tokens[served].astype(np.float64)
    kv_tokens = float(np.average(prompts[served] + tokens[served] / 2, weights=weight))
    t, times = profile.tables, text_drafts_of(profile)
    most_positions = min(t.dense_tokens[-1], t.sampled_sequences[-1])
    windows = {f"fixed {k}": run_passes(measured.runs, tokens, Fixed(tokens=k).rule).of(served) for k in FIXED_WINDOWS}
    asked = measured.passes.of(served)

    def token_s(passes: Passes, batch: int) -> float:
        drafted = int(passes.drafted.sum()) / int(passes.passes.sum())
        if batch * (1 + drafted) > most_positions:
            return math.inf
        drafting_s = times.draft_s(batch, drafted)
        return (profile.verify_s(batch, drafted, kv_tokens) + drafting_s) / passes.accept_length

    room = _sequences_that_fit(profile, kv_tokens)
    rows = []
    for batch in BATCHES:
        if batch > min(t.decode_sequences[-1], most_positions, room) or kv_tokens > t.decode_kv_tokens[-1]:
            break
        plain_s = profile.decode_s(batch, kv_tokens)
        best = min(windows, key=lambda name: token_s(windows[name], batch))
        rows.append(
            {
                "batch": batch,
                "plain_s": plain_s,
                "speculative_s": _finite(token_s(asked, batch)),
                "speed_up": _finite(plain_s / token_s(asked, batch)),
                "best_fixed_window": int(best.removeprefix("fixed ")),
                "best_fixed_speed_up": _finite(plain_s / token_s(windows[best], batch)),
            }
        )
    if not rows:
        raise InputError(
            f"{profile.origin}: profiled up to {t.decode_kv_tokens[-1]:.0f} tokens of a sequence, this trace has "
            f"{kv_tokens:.0f} on average; profile further"
        )
    m = profile.metadata
    return {
        "profile": f"{m.model} on {m.gpu}, tp {m.tp} ({m.kind})",
        "kv_tokens": kv_tokens,
        "draft_source": times.source,
        "by_batch": rows,
        "words": _words(measured, rows),
    }


def _finite(value: float) -> float | None:
    return value if 0 < value < math.inf else None


def _words(measured: Measured, rows: list[dict[str, Any]]) -> str:
    """Whether it pays, and where it stops to."""
    what = {"ngram": "N-gram drafting", "siblings": "Drafting from siblings"}.get(measured.drafter, "History drafting")
    gains = [(row["batch"], row["speed_up"] or 0.0) for row in rows]
    paying = [batch for batch, gain in gains if gain > 1.0]
    best_batch, best = max(gains, key=lambda pair: pair[1])
    last_batch, last = gains[-1]
    if not paying:
        return (
            f"{what} does not pay on this workload at any batch: {best:.2f}× at best, at a batch of {best_batch}. "
            "Leave it off, or try another drafter or window."
        )
    text = f"{what} pays on this workload: {best:.2f}× at a batch of {best_batch}"
    if paying[-1] == last_batch:
        return f"{text}, and still {last:.2f}× at {last_batch}, the largest batch looked at."
    after = next(pair for pair in gains if pair[0] > paying[-1])
    lost = f"{after[1]:.2f}×" if after[1] else "more than a pass can hold"
    return f"{text}, up to a batch of {paying[-1]}. Beyond it costs time ({lost} at {after[0]}): a gate should turn it off."


def model_yaml(description: dict[str, Any]) -> str:
    """The fitted model as a section of a scenario."""
    model = RunModel.model_validate(description["run_model"]).model_dump(mode="json")
    drafter = description["drafter"].partition("-")[0]  # history, be it the paper's or the code's
    return yaml.safe_dump(
        {"speculation": {"runs": {drafter: model}}},
        default_flow_style=None,
        sort_keys=False,
        width=120,
        allow_unicode=True,
    )


def _history(history: dict[str, Any]) -> str:
    if history["kind"] == "epochs":
        return "the epoch before" if history["epochs_back"] == 1 else f"the {history['epochs_back']} epochs before"
    if history["kind"] == "siblings":
        return "siblings in lockstep" if history["known"] == "lockstep" else "siblings that are over"
    return "the response's own text"


def print_report(description: dict[str, Any], console: Console) -> None:
    """Prints what `report` returned, for people."""
    d = description
    values = ", ".join(f"{key} {value}" for key, value in d["window"].items() if key != "kind")
    window = f"{d['window']['kind']} ({values})"
    console.print(
        f"[bold]{escape(d['trace']['name'])}[/bold]: {d['drafter']} from {_history(d['history'])}, window {window}; "
        f"{d['responses_with_drafts']:,} of {d['responses']:,} responses have drafts"
    )
    console.print(f"Tokens by: {escape(d['trace']['tokenizer'])}")
    rates = Table("", "responses", "acceptance rate", "speculation rate", "accept length")
    for column in rates.columns[1:]:
        column.justify = "right"
    for row in d["by_epoch"]:
        if row["responses_with_drafts"]:
            rates.add_row(f"epoch {row['epoch']}", f"{row['responses_with_drafts']:,}", *_cells(row))
    rates.add_row("[bold]all[/bold]", f"{d['responses_with_drafts']:,}", *_cells(d))
    rates.add_row("longest tenth", "", *_cells(d["by_response"]["longest_tenth"]))
    console.print(rates)
    spread, tail = d["by_response"]["speculation_rate"], d["by_response"]["longest_tenth"]["accept_length"]
    console.print(
        f"Of a response's tokens drafts give {spread['p50']:.0%} in the median, {spread['p10']:.0%} at the 10th and "
        f"{spread['p90']:.0%} at the 90th percentile of responses. The longest tenth, which ends a rollout, gets {tail:.2f} "
        f"tokens a pass, all together {d['accept_length']:.2f}."
    )
    if d["hit_lengths"]:
        hits = Table(
            "hit length [tokens]",
            "share of hits",
            "share of tokens",
            title="Hits, as RhymeRL Fig. 8",
            title_justify="left",
        )
        for column in hits.columns[1:]:
            column.justify = "right"
        for row in d["hit_lengths"]:
            hits.add_row(_range(row), f"{row['share_of_hits']:.1%}", f"{row['share_of_tokens']:.1%}")
        console.print(hits)
    if d["similarity"]:
        found = Table(
            "compared with",
            "accepted",
            "best match",
            "another prompt's",
            title="Tokens that stand there already, by RhymeRL's Fig. 6 (prefix 3)",
            title_justify="left",
        )
        for column in found.columns[1:]:
            column.justify = "right"
        for row in d["similarity"]:
            shares = (row["accepted_share"], row["best_match"], row["another_prompt"])
            found.add_row(row["history"], *(_percent(share) for share in shares))
        console.print(found)
    _print_pays(d["pays"], console)
    console.print(
        f"Model of these runs, for traces without token ids; paste it into a scenario. Drawn from it, these responses get "
        f"{d['run_model_accept_length']:.2f} tokens a pass, counted were {d['accept_length']:.2f}."
    )
    with folded(console, "The model"):
        console.print(Text(model_yaml(d).rstrip("\n")), soft_wrap=True)


def _print_pays(pays: dict[str, Any] | None, console: Console) -> None:
    if pays is None:
        console.print("Whether it pays depends on step times: give --profile, or --model with --gpu.")
        return
    table = Table("batch", "plain [ms/token]", "with drafts", "speed-up", "best fixed window", "its speed-up")
    for column in table.columns:
        column.justify = "right"
    for row in pays["by_batch"]:
        table.add_row(
            f"{row['batch']}",
            f"{row['plain_s'] * 1e3:.2f}",
            "–" if row["speculative_s"] is None else f"{row['speculative_s'] * 1e3:.2f}",
            _times(row["speed_up"]),
            f"{row['best_fixed_window']}",
            _times(row["best_fixed_speed_up"]),
        )
    console.print(
        f"{escape(pays['profile'])}, sequences of {pays['kv_tokens']:,.0f} tokens; drafts: {escape(pays['draft_source'])}"
    )
    console.print(table)
    console.print(f"[bold]{escape(pays['words'])}[/bold]")


def _cells(rates: dict[str, Any]) -> tuple[str, str, str]:
    length = rates["accept_length"]
    return (
        _percent(rates["acceptance_rate"]),
        _percent(rates["speculation_rate"]),
        "–" if length is None else f"{length:.2f}",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _range(row: dict[str, Any]) -> str:
    low, high = row["from_tokens"], row["to_tokens"]
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# The picture


def plot_report(description: dict[str, Any], path: str | Path) -> None:
    """Writes the picture of what `report` returned.

    The format follows the suffix (png, pdf, svg). Raises `InputError` for another one and where nothing can be written.
    """
    path, figure = Path(path), report_figure(description)
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise InputError(f"{path}: a picture cannot be written as {path.suffix!r}; use .png, .pdf or .svg")
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def report_figure(description: dict[str, Any]) -> Picture:
    """Hit lengths, epochs, responses, and (with a profile) the speed-up by batch."""
    figure = Picture(figsize=(11, 7.6), layout="constrained")
    (hits, epochs), (responses, last) = figure.subplots(2, 2)
    _plot_hits(description, hits)
    _plot_epochs(description, epochs)
    _plot_responses(description, responses)
    _plot_batches(description["pays"], last)
    name = description["trace"]["name"].replace("$", r"\$")  # else matplotlib would see a formula
    length = description["accept_length"]
    figure.suptitle(
        f"{name}: {description['drafter']} from {_history(description['history'])}, {length:.2f} tokens a pass",
        fontsize="large",
        color=INK,
    )
    return figure


def _plot_hits(d: dict[str, Any], axes: Axes) -> None:
    rows = d["hit_lengths"]
    x = np.arange(len(rows))
    axes.bar(x - 0.2, [row["share_of_hits"] for row in rows], 0.4, color=SKY, label="of the hits")
    axes.bar(x + 0.2, [row["share_of_tokens"] for row in rows], 0.4, color=BLUE, label="of their tokens")
    axes.set_xticks(x, [_range(row) for row in rows], rotation=45, ha="right")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="hit length [tokens]", ylabel="share")
    _finish(axes)


def _plot_epochs(d: dict[str, Any], axes: Axes) -> None:
    rows = [row for row in d["by_epoch"] if row["responses_with_drafts"]]
    epoch = [row["epoch"] for row in rows]
    for key, color, label in (
        ("acceptance_rate", ORANGE, "acceptance rate"),
        ("speculation_rate", BLUE, "speculation rate"),
    ):
        axes.plot(epoch, [_or_nan(row[key]) for row in rows], color=color, marker="o", markersize=4, label=label)
    looks = {"previous epoch": (GREEN, "-"), "all earlier epochs": (GREEN, "--"), "siblings": (SKY, "-")}
    for found in d["similarity"]:
        color, style = looks[found["history"]]
        points = found["by_epoch"]
        axes.plot(
            [p["epoch"] for p in points],
            [p["accepted_share"] for p in points],
            color=color,
            linestyle=style,
            marker="." if len(points) < 2 else None,
            label=f"in {found['history']}",
        )
    controls = [found["another_prompt"] for found in d["similarity"] if found["another_prompt"] is not None]
    if controls:
        axes.axhline(max(controls), color=VERMILLION, linestyle=":", label="in another prompt's")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="share of tokens", ylim=(0, 1))
    _finish(axes, legend_columns=3)


def _plot_responses(d: dict[str, Any], axes: Axes) -> None:
    rows = d["by_response"]["speculation_rate_histogram"]
    total = sum(row["responses"] for row in rows)
    axes.bar(
        [row["from"] for row in rows],
        [row["responses"] / total for row in rows],
        [row["to"] - row["from"] for row in rows],
        align="edge",
        color=SKY,
        edgecolor="white",
        linewidth=0.4,
    )
    for name, value in d["by_response"]["speculation_rate"].items():
        axes.axvline(value, color=BLUE, linestyle="-" if name == "p50" else ":", label=f"{name}: {value:.0%}")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set(xlabel="tokens of a response that drafts give", ylabel="share of responses", xlim=(0, 1))
    _finish(axes, legend_columns=3)


def _plot_batches(pays: dict[str, Any] | None, axes: Axes) -> None:
    if pays is None:
        axes.axis("off")
        axes.text(0.5, 0.5, "no step times: give --profile, or --model and --gpu", ha="center", color=INK)
        return
    rows = pays["by_batch"]
    for key, color, label in (
        ("speed_up", BLUE, "this window"),
        ("best_fixed_speed_up", SKY, "best fixed window"),
    ):
        axes.plot(
            [row["batch"] for row in rows], [_or_nan(row[key]) for row in rows], color=color, marker="o", label=label
        )
    axes.axhline(1.0, color=VERMILLION, linestyle="--", linewidth=1.2, label="plain decoding")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel=f"batch ({pays['profile']})", ylabel="speed-up of decoding")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    _finish(axes, legend_columns=3)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _finish(axes: Axes, legend_columns: int = 2) -> None:
    """The legend above the picture, where it hides nothing, and quiet axes."""
    axes.legend(
        ncols=legend_columns,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        fontsize="small",
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", labelsize="small")
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
