"""Acceptance of drafts from texts on a recorded run.

Invariant: every acceptance is counted token by token on the trace; only seconds come from
elsewhere, and they name their profile. Rates are over the responses that have drafts: without a
history there are none.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from simrl.engine.config import EngineConfig
from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.profile.precision import KV_SHARE, weight_bytes_per_gpu
from simrl.profile.profile import TableProfile
from simrl.simulate.memory import cache_capacity_tokens, layer_groups, limits_in
from simrl.speculation.draft_times import text_drafts
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.history_index import PAPER, PUBLIC_CODE
from simrl.speculation.matching import Ints
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import Passes, run_passes, stretches
from simrl.speculation.run_model import RunModel, draw_trace_runs, fit_run_model
from simrl.speculation.siblings import Known, sibling_runs
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.trace.trace import Trace

Drafter = Literal["history-paper", "history-code", "ngram", "siblings"]
DRAFTERS: tuple[Drafter, ...] = ("history-paper", "history-code", "ngram", "siblings")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FIXED_WINDOWS = (1, 2, 4, 8, 16, 32)
MODEL_SEED = 0
# of the responses, with rates of their own: the tail decides when a rollout ends
LONGEST_SHARE = 0.1


class MeasuredDrafts(NamedTuple):
    """The runs of a drafter on a trace, and the passes that a window makes of them."""

    trace: Trace
    drafter: Drafter
    history: dict[str, Any]
    window: Window
    runs: AcceptRuns
    passes: Passes
    tokens: Ints  # by response

    @property
    def served(self) -> NDArray[np.bool_]:
        """Return which rows have drafts; the first token comes with the prompt and is not
        decoded."""
        return np.logical_and(self.runs.first >= 0, self.passes.tokens > 0)


def measure(
    trace: Trace,
    drafter: Drafter = "history-paper",
    window: Window | None = None,
    epochs_back: int = 1,
    known: Known = "lockstep",
    threads: int = 1,
) -> MeasuredDrafts:
    """Run a drafter teacher-forced over a trace with token ids.

    Without a window the drafter's own is taken: the paper's (AIMD), for "history-code" the public
    code's (MIMD). Raise `InputError` for a trace in which the drafter has nothing to draft from.
    """
    name = trace.metadata.name
    if drafter.startswith("history") and len(np.unique(trace.column("epoch"))) < 2:
        raise InputError(
            f"trace {name!r}: it has one epoch only, and history needs an earlier one; try --drafter siblings or ngram"
        )
    history: dict[str, Any]
    if drafter == "ngram":
        runs, history, reason = (
            ngram_runs(trace),
            {"kind": "own text"},
            "every response has one token",
        )
    elif drafter == "siblings":
        runs, history = sibling_runs(trace, known), {"kind": "siblings", "known": known}
        reason = "every group has one response"
    else:
        rule = PAPER if drafter == "history-paper" else PUBLIC_CODE
        runs = history_runs(trace, rule, epochs_back, threads=threads)
        history, reason = (
            {"kind": "epochs", "epochs_back": epochs_back},
            "no prompt comes twice in epochs so near",
        )
    tokens = trace.column("response_tokens").astype(np.int64)
    if not ((runs.first >= 0) & (tokens > 1)).any():
        raise InputError(
            f"trace {name!r}: nothing to draft from ({reason}); try another drafter, or more --epochs-back"
        )
    chosen = window or (Mimd() if drafter == "history-code" else Aimd())
    return MeasuredDrafts(
        trace, drafter, history, chosen, runs, run_passes(runs, tokens, chosen.rule), tokens
    )


def report(measured: MeasuredDrafts, profile: TableProfile | None = None) -> dict[str, Any]:
    """Return all measurements, ready for JSON; None stands for values that cannot be computed.

    `acceptance_rate`, `speculation_rate` and `accept_length` are defined by `passes.Passes`;
    `by_epoch` has them by epoch. `hit_lengths` has the stretches that the drafter knows, by length
    (RhymeRL Fig. 8), with shares of their number and of their tokens. `pays` needs a profile.
    """
    trace, served, tokens = measured.trace, measured.served, measured.tokens
    epoch = trace.column("epoch")
    model = fit_run_model(
        measured.runs,
        tokens,
        first_epoch=not measured.drafter.startswith("history"),
        source=f"{measured.drafter} on {trace.metadata.name}, {history_words(measured.history)}",
    )
    drawn = draw_trace_runs(model, trace, MODEL_SEED, measured.history.get("epochs_back", 1))
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
        "pays": None if profile is None else _pays(measured, profile),
        "run_model": model.model_dump(mode="json"),
        "run_model_accept_length": run_passes(drawn, tokens, measured.window.rule)
        .of(served)
        .accept_length,
        "trace": trace.metadata.model_dump(),
    }


def _rates(passes: Passes) -> dict[str, float | None]:
    rates = {
        name: getattr(passes, name)
        for name in ("acceptance_rate", "speculation_rate", "accept_length")
    }
    return {name: None if math.isnan(rate) else rate for name, rate in rates.items()}


def _by_response(measured: MeasuredDrafts) -> dict[str, Any]:
    """Return percentiles over responses, and the rates of the longest tenth of them."""
    served = measured.served
    passes = measured.passes.of(served)
    rates, lengths = passes.accepted / passes.tokens, passes.tokens / passes.passes
    longest = served & (measured.passes.tokens >= np.quantile(passes.tokens, 1 - LONGEST_SHARE))
    counts, edges = np.histogram(rates, np.linspace(0, 1, 21))
    return {
        "speculation_rate": {f"p{p}": float(np.percentile(rates, p)) for p in (10, 50, 90)},
        "accept_length": {f"p{p}": float(np.percentile(lengths, p)) for p in (10, 50, 90)},
        "longest_tenth": _rates(measured.passes.of(longest)),
        "speculation_rate_histogram": pd.DataFrame(
            {"from": edges[:-1], "to": edges[1:], "responses": counts}
        ).to_dict("records"),
    }


def _hit_lengths(hits: Ints) -> list[Any]:
    """Return the hits between powers of two: their number, and their share of the hits and of the
    tokens."""
    hits = hits[hits > 0]
    bucket = np.ceil(np.log2(hits)).astype(np.int64)
    number, tokens = np.bincount(bucket), np.bincount(bucket, weights=hits)
    to_tokens = 2 ** np.arange(len(number))
    columns = pd.DataFrame(
        {
            "from_tokens": to_tokens // 2 + 1,
            "to_tokens": to_tokens,
            "hits": number,
            "share_of_hits": number / number.sum(),
            "share_of_tokens": tokens / tokens.sum(),
        }
    )
    return columns.to_dict("records")


def _sequences_that_fit(profile: TableProfile, kv_tokens: float) -> float:
    """Return the number of sequences of this length that fit in GPU memory beside the weights;
    infinite for an unknown model or GPU."""
    metadata = profile.metadata
    if metadata.model not in MODELS or metadata.gpu not in GPUS:
        return math.inf
    shape, memory_bytes = MODELS[metadata.model], GPUS[metadata.gpu].memory_bytes
    config, tp = EngineConfig(), metadata.tp
    weight_bytes = weight_bytes_per_gpu(shape, tp, metadata.dp, metadata.ep, metadata.precision)
    free = max(
        memory_bytes * config.gpu_memory_utilization - config.reserve_bytes - weight_bytes, 0.0
    )
    groups = layer_groups(shape, tp, config.block_size, KV_SHARE[metadata.kv_precision])
    limits = limits_in(groups, int(free // groups.block_bytes), shape, config)
    return metadata.dp * cache_capacity_tokens(limits, kv_tokens) / kv_tokens


def _pays(measured: MeasuredDrafts, profile: TableProfile) -> dict[str, Any]:
    """Return seconds a token with and without drafts by batch, all sequences with the trace's
    typical length and acceptance.

    Drafts are of the window of `measured`, and of the best fixed window. The largest batch is one
    that the profile covers and the GPUs' memory holds.
    """
    served, tokens = measured.served, measured.tokens
    prompts = measured.trace.column("prompt_tokens").astype(np.int64)
    # The mean context of a decoding sequence over its tokens.
    weight = tokens[served].astype(np.float64)
    kv_tokens = float(np.average(prompts[served] + tokens[served] / 2, weights=weight))
    t, times = profile.even, text_drafts(profile)
    most_positions = min(t.dense_tokens[-1], t.sampled_sequences[-1])
    windows = {
        k: run_passes(measured.runs, tokens, Fixed(tokens=k).rule).of(served) for k in FIXED_WINDOWS
    }
    of_window = measured.passes.of(served)

    def token_s(passes: Passes, batch: int) -> float:
        drafted = int(passes.drafted.sum()) / int(passes.passes.sum())
        if batch * (1 + drafted) > most_positions:
            return math.inf
        drafting_s = times.draft_s(batch, drafted)
        return (profile.verify_s(batch, drafted, kv_tokens) + drafting_s) / passes.accept_length

    most = (
        min(t.decode_sequences[-1], most_positions, _sequences_that_fit(profile, kv_tokens))
        if kv_tokens <= t.decode_kv_tokens[-1]
        else 0
    )
    rows = []
    for batch in (batch for batch in BATCHES if batch <= most):
        plain_s, speculative_s = profile.decode_s(batch, kv_tokens), token_s(of_window, batch)
        best_s, best = min((token_s(passes, batch), window) for window, passes in windows.items())
        rows.append(
            {
                "batch": batch,
                "plain_s": plain_s,
                "speculative_s": _finite(speculative_s),
                "speed_up": _finite(plain_s / speculative_s),
                "best_fixed_window": best,
                "best_fixed_speed_up": _finite(plain_s / best_s),
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


def _words(measured: MeasuredDrafts, rows: list[dict[str, Any]]) -> str:
    """Return a sentence that says if drafting pays, and up to which batch."""
    drafting = {"ngram": "N-gram drafting", "siblings": "Drafting from siblings"}.get(
        measured.drafter, "History drafting"
    )
    gains = [(row["batch"], row["speed_up"] or 0.0) for row in rows]
    paying = [batch for batch, gain in gains if gain > 1.0]
    best_batch, best = max(gains, key=lambda pair: pair[1])
    last_batch, last = gains[-1]
    if not paying:
        return (
            f"{drafting} does not pay on this workload at any batch: {best:.2f}× at best, at a batch of {best_batch}. "
            "Leave it off, or try another drafter or window."
        )
    text = f"{drafting} pays on this workload: {best:.2f}× at a batch of {best_batch}"
    if paying[-1] == last_batch:
        return f"{text}, and still {last:.2f}× at {last_batch}, the largest batch looked at."
    after = next(pair for pair in gains if pair[0] > paying[-1])
    lost = f"{after[1]:.2f}×" if after[1] else "more than a pass can hold"
    return f"{text}, up to a batch of {paying[-1]}. Beyond it costs time ({lost} at {after[0]}): a gate should turn it off."


def model_yaml(description: dict[str, Any]) -> str:
    """Return the fitted model as a section of a scenario."""
    model = RunModel.model_validate(description["run_model"]).model_dump(mode="json")
    drafter = description["drafter"].partition("-")[
        0
    ]  # history-paper and history-code are both history
    section = {"speculation": {"runs": {drafter: model}}}
    return yaml.safe_dump(
        section, default_flow_style=None, sort_keys=False, width=120, allow_unicode=True
    )


def history_words(history: dict[str, Any]) -> str:
    """Return words for the texts that the drafter of a report drafts from."""
    if history["kind"] == "epochs":
        return (
            "the epoch before"
            if history["epochs_back"] == 1
            else f"the {history['epochs_back']} epochs before"
        )
    if history["kind"] == "siblings":
        return (
            "siblings in lockstep" if history["known"] == "lockstep" else "siblings that are over"
        )
    return "the response's own text"
