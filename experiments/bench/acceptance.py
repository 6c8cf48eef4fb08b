"""Speed of drafters and of the similarity routine over recorded tokens, each figure beside its bar, the least. One
core; medians of repeats after a warm-up. The responses are synthetic: phrases of a prompt, changed here and there.

python experiments/bench/acceptance.py [--tokens 2000000] [--json]
"""

from typing import Annotated

import numpy as np
import typer

from experiments.reproduce.similarity import similarity
from experiments.shared import AsJson, bench_row, median_s, print_bench
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import run_passes
from simrl.speculation.run_model import draw_runs, fit_run_model
from simrl.speculation.siblings import sibling_index, sibling_runs
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd
from simrl.trace.trace import Trace, TraceMetadata

GROUP, EPOCHS, RESPONSE_TOKENS, VOCABULARY = 16, 2, 4000, 150_000


def synthetic(tokens: int) -> Trace:
    """Return responses of about 4,000 tokens, 16 a prompt, in two epochs; three quarters are phrases of the prompt."""
    rng = np.random.default_rng(0)
    prompts = max(tokens // (GROUP * EPOCHS * RESPONSE_TOKENS), 1)
    rows, ids = [], []
    for prompt in range(prompts):
        phrases = rng.zipf(1.3, (200, 60)) % VOCABULARY
        for epoch in range(EPOCHS):
            for sample in range(GROUP):
                parts = []
                for _ in range(RESPONSE_TOKENS // 40):
                    phrase = phrases[rng.integers(200)]
                    parts += [
                        phrase[: rng.integers(1, 60)],
                        rng.zipf(1.3, rng.integers(1, 20)) % VOCABULARY,
                    ]
                ids.append(np.concatenate(parts).astype(np.int32))
                rows.append((epoch, epoch, prompt, sample, 100, len(ids[-1])))
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    metadata = TraceMetadata(
        name="bench", kind="synthetic", source=__doc__ or "", tokenizer="none", cap_tokens=20_000
    )
    return Trace.from_columns(
        {**dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), "response_ids": ids},
        metadata,
    )


def main(
    tokens: Annotated[int, typer.Option(min=100_000, help="of all responses, about")] = 2_000_000,
    as_json: AsJson = False,
) -> None:
    trace = synthetic(tokens)
    lengths = trace.column("response_tokens").astype(np.int64)
    total = int(lengths.sum())
    runs = sibling_runs(trace)
    model, keys = fit_run_model(runs, lengths), np.arange(len(trace)) * 7919
    benched = (
        ("similarity, previous epoch", lambda: similarity(trace), 2.0),
        ("similarity, previous epoch, best match", lambda: similarity(trace, follow="best"), None),
        ("similarity, all earlier epochs", lambda: similarity(trace, epochs_back=None), 2.0),
        ("similarity, siblings", lambda: similarity(trace, "siblings"), 2.0),
        ("history drafts, index included", lambda: history_runs(trace), None),
        ("n-gram drafts", lambda: ngram_runs(trace), None),
        ("sibling index", lambda: sibling_index(trace), None),
        (
            "sibling drafts at every position, 15 running siblings",
            lambda: sibling_runs(trace),
            None,
        ),
        ("passes by AIMD windows", lambda: run_passes(runs, lengths, Aimd().rule), None),
        ("runs drawn from a model", lambda: draw_runs(model, lengths, keys), None),
    )
    rows = [
        bench_row(what, total / median_s(run) / 1e6, bar, "M tokens/s")
        for what, run, bar in benched
    ]
    print_bench(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
