"""Speed of indexing a prompt's history and of drafting from it, and its memory, each figure beside its bar. One core.

    python experiments/bench/history_index.py [--small] [--data ../shared/data] [--json]

Beside them arctic-inference's SuffixDecodingCache on these tokens, where it is installed (`pip install arctic-inference`),
with the accept lengths of both: teacher-forced, at most 32 tokens a draft, matches of 7 to 3 tokens, bonus token included. (It
follows the best score of all matches, not the longest match.)

Responses are copies: a prompt has some texts (Zipf's tokens), a response goes along one, errs now and then by a token and
sometimes jumps to another place. `--data` adds real text: validation answers of a verl run, checkpoint by checkpoint, cut into
words and signs (no tokenizer is at hand). `--small` is for a quick look: 4 M tokens instead of 80 M.
"""

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer
from numba import njit

from experiments.shared import AsJson, bench_row, median_s, print_bench
from simrl.speculation.choices import HistoryRule
from simrl.speculation.history_index import PAPER, PUBLIC_CODE, build_index
from simrl.speculation.trace_runs import history_runs
from simrl.trace.trace import Trace, TraceMetadata
from simrl_replay.history_drafter import HistoryDrafter
from simrl_replay.history_store import HistoryStore

GROUP = 16
VOCABULARY = 151_936
TEXTS = 4  # that a prompt's responses copy


def zipf_tokens(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return 4,000 of the vocabulary's tokens, frequent ones frequently."""
    ids = rng.permutation(VOCABULARY)[:4000].astype(np.int32)
    share = 1 / np.arange(2, 4002)
    return ids[np.searchsorted(np.cumsum(share / share.sum()), rng.random(shape)).clip(0, 3999)]


def copied_responses(
    rng: np.random.Generator, texts: np.ndarray, group: int, tokens: int
) -> list[np.ndarray]:
    """Return responses of `tokens` tokens each, which copy `texts` (m, n) as the module says."""
    return list(_copied(texts, zipf_tokens(rng, (group, tokens)), rng.random((group, tokens, 3))))


@njit
def _copied(texts, errors, draws):
    out = np.empty_like(errors)
    for r in range(errors.shape[0]):
        text = int(draws[r, 0, 0] * texts.shape[0])
        at = 0
        for i in range(errors.shape[1]):
            if draws[r, i, 0] < 0.03:
                out[r, i] = errors[r, i]
            else:
                out[r, i] = texts[text, at]
            at += 1
            if draws[r, i, 1] < 0.02 or at == texts.shape[1]:
                text = int(draws[r, i, 2] * texts.shape[0])
                at = int(draws[r, i, 1] * 50 * texts.shape[1]) % texts.shape[1]
    return out


def copies_trace(prompts: int, epochs: int, tokens: int) -> Trace:
    """Return a trace with every prompt once an epoch, 16 responses each."""
    rng = np.random.default_rng(0)
    texts = [zipf_tokens(rng, (TEXTS, tokens)) for _ in range(prompts)]
    flat = np.concatenate(
        [
            np.concatenate(copied_responses(rng, t, GROUP, tokens))
            for _ in range(epochs)
            for t in texts
        ]
    )
    rows = epochs * prompts * GROUP
    columns = {
        "step": np.repeat(np.arange(epochs), prompts * GROUP),
        "epoch": np.repeat(np.arange(epochs), prompts * GROUP),
        "prompt_id": np.tile(np.repeat(np.arange(prompts), GROUP), epochs),
        "sample": np.tile(np.arange(GROUP), epochs * prompts),
        "prompt_tokens": np.full(rows, 100),
        "response_tokens": np.full(rows, tokens),
        "reward": rng.integers(0, 2, rows).astype(np.float32),
        "response_ids": pa.ListArray.from_arrays(
            np.arange(0, rows * tokens + 1, tokens, dtype=np.int32), flat
        ),
    }
    metadata = TraceMetadata(
        name="copies", kind="synthetic", source=__file__, tokenizer="none", cap_tokens=tokens
    )
    return Trace.from_columns(columns, metadata)


def verl_responses(data: Path) -> dict[int, list[list[np.ndarray]]]:
    """Return prompt -> checkpoint -> responses of the real run, words and signs numbered."""
    table = json.loads(
        (data / "verl_run" / "do7bl4gg" / "val_generations.table.json").read_text(encoding="utf-8")
    )
    numbers: dict[str, int] = {}
    prompts: dict[str, int] = {}
    found: dict[int, list[list[np.ndarray]]] = {}
    for checkpoint, row in enumerate(table["data"]):
        for slot in range(1, len(row), 3):
            words = re.findall(r" ?\w+| ?[^\w\s]+|\s+", row[slot + 1])
            ids = np.array(
                [numbers.setdefault(word, len(numbers)) for word in words], dtype=np.int32
            )
            epochs = found.setdefault(
                prompts.setdefault(row[slot], len(prompts)), [[] for _ in table["data"]]
            )
            epochs[checkpoint].append(ids)
    return found


def building(tokens: int, repeats: int) -> tuple[float, float]:
    """Return (M tokens/s, bytes a token) of one index."""
    rng = np.random.default_rng(0)
    texts = zipf_tokens(rng, (TEXTS, tokens // GROUP))
    responses = copied_responses(rng, texts, GROUP, tokens // GROUP)
    rewards = rng.integers(0, 2, GROUP)
    seconds = median_s(lambda: build_index(responses, rewards), repeats)
    return tokens / seconds / 1e6, build_index(responses, rewards).nbytes / tokens


def proposing_us(prompts: int, passes: int) -> float:
    """Return the median microseconds a request of `propose`: a batch of 64, up to 32 tokens each, indexes of 100k tokens."""
    rng = np.random.default_rng(0)
    running = []
    with HistoryStore() as store:
        for prompt in range(prompts):
            texts = zipf_tokens(rng, (TEXTS, 100_000 // GROUP))
            store.learn(
                prompt,
                0,
                copied_responses(rng, texts, GROUP, 100_000 // GROUP),
                rng.integers(0, 2, GROUP).tolist(),
            )
            running += copied_responses(rng, texts, 64 // prompts, passes * 4)
        store.wait()
        drafter = HistoryDrafter(store)
        for request in range(64):
            drafter.start_request(request, request * prompts // 64)
        seconds = []
        for i in range(passes):
            for request in range(64):
                drafter.observe(request, running[request][4 * i : 4 * i + 4])
            started = time.perf_counter()
            drafter.propose(range(64), [32] * 64)
            seconds.append(time.perf_counter() - started)
    return median(seconds) / 64 * 1e6


def passes_of(
    response: np.ndarray,
    propose: Callable[[int], np.ndarray],
    observe: Callable[[np.ndarray], None],
) -> int:
    """Return the passes of a response if each verifies the draft of `propose` at its position."""
    done = passes = 0
    while done < len(response):
        path = propose(done)[: len(response) - done]
        same = path == response[done : done + len(path)]
        new = response[done : done + (len(path) if same.all() else int(same.argmin())) + 1]
        observe(new)
        done += len(new)
        passes += 1
    return passes


def our_passes(history: list[np.ndarray], responses: list[np.ndarray], rule: HistoryRule) -> int:
    with HistoryStore() as store:
        store.learn(0, 0, history)
        store.wait()
        drafter = HistoryDrafter(store, rule)
        passes = 0
        for response in responses:
            drafter.start_request(0, 0)
            passes += passes_of(
                response,
                lambda _: drafter.propose([0], [32])[0],
                lambda new: drafter.observe(0, new),
            )
            drafter.stop_request(0)
    return passes


class Arctic:
    """SuffixDecodingCache with a history; the text of the response itself is kept out of what it matches in."""

    def __init__(self, history: list[np.ndarray]) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=64)
        nothing = np.empty(0, dtype=np.int32)
        started = time.perf_counter()
        for request, ids in enumerate(history):
            self.cache.start_request(request, nothing)
            self.cache.add_active_response(request, ids)
            self.cache.stop_request(request)
        self.build_s = time.perf_counter() - started
        self.cache.start_request("live", nothing)
        self.seconds: list[float] = []

    def passes(self, responses: list[np.ndarray], rule: HistoryRule) -> int:
        return sum(
            passes_of(
                r, lambda done, r=r: self.propose(r[max(done - 7, 0) : done], rule), lambda _: None
            )
            for r in responses
        )

    def propose(self, tail: np.ndarray, rule: HistoryRule) -> np.ndarray:
        if len(tail) < rule.shortest_match_tokens:
            return np.empty(0, dtype=np.int32)
        started = time.perf_counter()
        drafted = self.cache.speculate(
            "live",
            tail,
            max_spec_tokens=32,
            max_spec_factor=1e6,
            min_token_prob=rule.least_probability,
        )
        self.seconds.append(time.perf_counter() - started)
        return np.array(
            drafted.token_ids if drafted.match_len >= rule.shortest_match_tokens else [],
            dtype=np.int32,
        )


def accept_lengths(
    corpus: list[tuple[list[np.ndarray], list[np.ndarray]]], what: str
) -> list[dict]:
    """Return tokens a pass on (history, responses) pairs; arctic's where it is installed."""
    tokens = sum(len(r) for _, responses in corpus for r in responses)
    found = []
    for name, rule in (("by reward, to the end", PAPER), ("by count, at least 0.1", PUBLIC_CODE)):
        ours = tokens / sum(our_passes(history, responses, rule) for history, responses in corpus)
        try:
            arctic = tokens / sum(
                Arctic(history).passes(responses, rule) for history, responses in corpus
            )
        except ImportError:
            arctic = None
        found.append(
            bench_row(f"accept length, {what}, {name}", ours, unit="tokens", arctic=arctic)
        )
    return found


def arctic_figures(tokens: int) -> tuple[float | None, float | None]:
    """Return (M tokens/s, median microseconds a proposal) of arctic-inference on the corpus of `building`."""
    rng = np.random.default_rng(0)
    texts = zipf_tokens(rng, (TEXTS, tokens // GROUP))
    try:
        arctic = Arctic(copied_responses(rng, texts, GROUP, tokens // GROUP))
    except ImportError:
        return None, None
    arctic.passes(copied_responses(rng, texts, 2, 6250), PAPER)
    return tokens / arctic.build_s / 1e6, median(arctic.seconds) * 1e6


def main(
    small: Annotated[
        bool, typer.Option(help="a trace of 4 M tokens instead of 80 M, indexes up to 100k tokens")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="the folder of measurements: adds real text")
    ] = None,
    as_json: AsJson = False,
) -> None:
    rows = []
    for tokens, bar in ((100_000, 4.0), (1_000_000, 2.0))[: 1 if small else 2]:
        rate, size = building(tokens, 9)
        arctic_rate, arctic_us = arctic_figures(tokens)
        name = f"an index of {tokens:,} tokens"
        rows.append(bench_row(f"build {name}", rate, bar, "M tokens/s", arctic=arctic_rate))
        rows.append(bench_row(f"memory of {name}", size, 16.0, "bytes/token"))
    for prompts in (1, 64):
        what = f"propose, a batch of 64 on {prompts} {'index' if prompts == 1 else 'indexes'} of 100,000 tokens"
        beside = arctic_us if prompts == 1 else None
        rows.append(bench_row(what, proposing_us(prompts, 300), 3.0, "µs/request", arctic=beside))
    prompts, tokens = (10, 5000) if small else (200, 5000)
    trace = copies_trace(prompts, 5, tokens)
    millions = trace.column("response_tokens").sum() / 1e6
    for name, rule in (("paper", PAPER), ("public code", PUBLIC_CODE)):
        history_runs(copies_trace(1, 2, 100), rule)  # compiles
        seconds = median_s(lambda rule=rule: history_runs(trace, rule), 1, warm_up=False)
        rows.append(
            bench_row(
                f"HistoSpec ({name}) over a trace of {millions:.0f} M tokens",
                seconds,
                180 * millions / 80,
            )
        )
    rng = np.random.default_rng(1)
    texts = zipf_tokens(rng, (TEXTS, 5000))
    copies = [(copied_responses(rng, texts, GROUP, 5000), copied_responses(rng, texts, 4, 5000))]
    rows += accept_lengths(copies, "copies")
    if data is not None:
        epochs = verl_responses(data).values()
        pairs = [(a, b) for prompt in epochs for a, b in pairwise(prompt)]
        rows += accept_lengths(pairs, "verl run, 10 steps earlier")
    print_bench(rows, as_json, ["arctic"])


if __name__ == "__main__":
    typer.run(main)
