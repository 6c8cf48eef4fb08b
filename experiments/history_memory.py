"""HistoSpec under a memory budget for its history; results in history_memory.md.

    python experiments/history_memory.py [--data ../shared/data] [--picture experiments/history_memory.png]

A run over prompts in a new order each epoch, 2 prompts × 16 responses a step. The real store and drafter (windows by AIMD)
draft for the recorded tokens of one step after another; while one runs, the prompts of the next are prefetched, and a step's
responses are learnt when it ends. The first epoch fills the store, the last of three is measured. A pass takes the
roofline's time for Qwen3-14B on two H100 (verification included) plus the measured time of drafting on this machine.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.bench.history_index import (
    GROUP,
    TEXTS,
    copied_responses,
    verl_responses,
    zipf_tokens,
)
from experiments.shared import Small, shrink
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profilers.roofline import roofline_profile
from simrl.show.style import BLACK, INDIGO, MINT, ROSE
from simrl.speculation.history_index import build_index
from simrl.speculation.passes import next_window
from simrl.speculation.windows import Aimd
from simrl_replay.history_drafter import HistoryDrafter
from simrl_replay.history_store import HistoryStore

PROMPTS, PROMPTS_A_STEP, TOKENS, EPOCHS = 48, 2, 1500, 3
SHARES = (0.75, 0.5, 0.25, 0.15, 0.05)
PROFILE = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2)
RULE = Aimd().rule
PICTURE = Path(__file__).with_suffix(".png")


class Outcome(NamedTuple):
    """Measurements of one epoch with a store."""

    name: str
    memory_share: float  # of the memory of all indexes
    found: float  # share of responses that had an index
    accept_length: float  # tokens a pass, over all responses
    tokens_per_s: float
    drafting_share: float  # share of the time spent drafting


def recorded(seed: int = 0) -> list[list[list[np.ndarray]]]:
    rng = np.random.default_rng(seed)
    texts = [zipf_tokens(rng, (TEXTS, TOKENS)) for _ in range(PROMPTS)]
    return [[copied_responses(rng, t, GROUP, TOKENS) for t in texts] for _ in range(EPOCHS)]


def steps(epoch: int) -> np.ndarray:
    """Return the prompts of each step of an epoch, shape (steps, PROMPTS_A_STEP)."""
    return np.random.default_rng(100 + epoch).permutation(PROMPTS).reshape(-1, PROMPTS_A_STEP)


def run_step(
    drafter: HistoryDrafter, responses: list[np.ndarray], prompts: list[int]
) -> tuple[int, float, float]:
    """Run a step; return (passes of a response, summed over responses; simulated seconds with drafting; seconds of
    drafting)."""
    started = time.perf_counter()
    for request, prompt in enumerate(prompts):
        drafter.start_request(request, prompt)
    drafting_s = time.perf_counter() - started
    done = [0] * len(responses)
    window = [RULE.start_tokens] * len(responses)
    running, passes, gpu_s = list(range(len(responses))), 0, 0.0
    while running:
        started = time.perf_counter()
        drafts = drafter.propose(running, [window[r] for r in running])
        drafting_s += time.perf_counter() - started
        yielded, kv_tokens, drafted_tokens = [], 0, 0
        for r, path in zip(running, drafts, strict=True):
            ids = responses[r]
            path = path[: len(ids) - done[r]]
            same = path == ids[done[r] : done[r] + len(path)]
            accepted = len(path) if same.all() else int(same.argmin())
            window[r] = next_window(RULE, window[r], len(path), accepted)
            kv_tokens += 100 + done[r]
            drafted_tokens += len(path)
            yielded.append(ids[done[r] : done[r] + accepted + 1])
            done[r] += len(yielded[-1])
        started = time.perf_counter()
        for r, new in zip(running, yielded, strict=True):
            drafter.observe(r, new)
        drafting_s += time.perf_counter() - started
        n = len(running)
        gpu_s += PROFILE.verify_s(n, drafted_tokens / n, kv_tokens / n)
        passes += n
        running = [r for r in running if done[r] < len(responses[r])]
    for request in range(len(responses)):
        drafter.stop_request(request)
    return passes, gpu_s + drafting_s, drafting_s


def run_epoch(
    store: HistoryStore, epochs: list[Any], epoch: int, learns: bool = True
) -> tuple[float, float, float, float]:
    """Run an epoch; return (share found, tokens a pass, tokens a second, share of drafting)."""
    drafter = HistoryDrafter(store)
    order = steps(epoch)
    store.prefetch(order[0].tolist())
    tokens, passes, seconds, drafting_s, found = 0, 0, 0.0, 0.0, 0
    for number, prompts in enumerate(order.tolist()):
        store.wait()  # a step takes much longer than builders do
        found += sum(store.ready(prompt, 0) for prompt in prompts)
        responses = [ids for prompt in prompts for ids in epochs[epoch][prompt]]
        step = run_step(drafter, responses, [prompt for prompt in prompts for _ in range(GROUP)])
        passes, seconds, drafting_s = passes + step[0], seconds + step[1], drafting_s + step[2]
        tokens += sum(map(len, responses))
        if learns:
            for prompt in prompts:
                store.learn(prompt, epoch, epochs[epoch][prompt])
            store.wait()
        if number + 1 < len(order):
            store.prefetch(order[number + 1].tolist())
    return found / PROMPTS, tokens / passes, tokens / seconds, drafting_s / seconds


def outcome(
    name: str, share: float, full_bytes: int, epochs: list[Any], **parameters: Any
) -> Outcome:
    """Run all epochs with a store of this share of the memory; measure the last."""
    with HistoryStore(memory_bytes=int(share * full_bytes), **parameters) as store:
        for prompt in steps(0).ravel().tolist():
            store.learn(prompt, 0, epochs[0][prompt])
            store.wait()
        for epoch in range(1, EPOCHS):
            measured = run_epoch(store, epochs, epoch)
    return Outcome(name, min(share, 1.0), *measured)


def mapped_outcome(epochs: list[Any]) -> Outcome:
    """Measure a store on disk, with an empty page cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        with HistoryStore() as store:
            for prompt in range(PROMPTS):
                store.learn(prompt, EPOCHS - 2, epochs[-2][prompt])
            store.save(path)
        with (path / "indexes.int32").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with HistoryStore.open(path) as store:
            return Outcome(
                "mapped from disk, cold", 0.0, *run_epoch(store, epochs, EPOCHS - 1, learns=False)
            )


def sizes(responses: list[list[np.ndarray]]) -> tuple[float, float]:
    """Return the bytes a token of the indexes, and of the compressed tokens, of prompts with these responses."""
    tokens = sum(len(ids) for prompt in responses for ids in prompt)
    whole, small = 0, 0
    with HistoryStore(compress=True) as both:
        for prompt, group in enumerate(responses):
            both.learn(prompt, 0, group)
            whole += build_index(group, np.arange(len(group))).nbytes
        both.wait()
        small = both.memory_bytes - sum(
            both.index(prompt).nbytes for prompt in range(len(responses))
        )
    return whole / tokens, small / tokens


def codec_rates(responses: list[list[np.ndarray]]) -> tuple[float, float]:
    """Return the tokens a second that one core compresses, and decompresses, as the store does; the medians over prompts."""
    codec = pa.Codec("zstd", compression_level=1)
    rates = []
    for group in responses:
        text = np.concatenate(group).astype(np.int32)
        started = time.perf_counter()
        packed = codec.compress(text, asbytes=True)
        between = time.perf_counter()
        codec.decompress(packed, text.nbytes, asbytes=True)
        ended = time.perf_counter()
        rates.append((len(text) / (between - started), len(text) / (ended - between)))
    compressing, decompressing = np.median(rates, axis=0)
    return float(compressing), float(decompressing)


def picture(outcomes: list[Outcome], plain_tokens_per_s: float, path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colours = {
        "tokens compressed, newest index first out": MINT,
        "capped, newest first out": INDIGO,
        "capped, oldest first out": ROSE,
        "mapped from disk, cold": BLACK,
    }
    for name, colour in colours.items():
        points = sorted(
            (o for o in outcomes if o.name in (name, "all in memory")), key=lambda o: o.memory_share
        )
        if name.startswith("mapped"):
            points = [o for o in points if o.name == name]
        share = [100 * o.memory_share for o in points]
        marker = {
            "marker": "D" if len(points) == 1 else "o",
            "color": colour,
            "label": name,
            "clip_on": False,
        }
        left.plot(share, [o.accept_length for o in points], **marker)
        right.plot(share, [o.tokens_per_s / plain_tokens_per_s for o in points], **marker)
    left.set_ylabel("tokens a pass")
    right.set_ylabel("throughput, 1 = no drafts")
    for axes in (left, right):
        axes.set_xlabel("memory, % of all indexes")
        axes.set_xlim(0, 100)
        axes.set_ylim(bottom=1)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def main(
    data: Annotated[
        Path | None, typer.Option(help="the folder of measurements: adds sizes of real text")
    ] = None,
    picture_path: Annotated[Path, typer.Option("--picture")] = PICTURE,
    small: Small = False,
) -> None:
    shrink(globals(), small, PROMPTS=2, TOKENS=200, SHARES=(0.5,))
    epochs = recorded()
    with HistoryStore() as store:
        for prompt in range(PROMPTS):
            store.learn(prompt, 0, epochs[0][prompt])
        store.wait()
        full_bytes = store.memory_bytes
    outcome("", 1.01, full_bytes, recorded(1))  # compiles
    plain = outcome("no drafts", 0.0, full_bytes, epochs)
    outcomes = [plain, outcome("all in memory", 1.01, full_bytes, epochs), mapped_outcome(epochs)]
    for share in SHARES:
        outcomes += [
            outcome(
                f"{kept}, {evict}{index} first out",
                share,
                full_bytes,
                epochs,
                compress=bool(index),
                evict=evict,
            )
            for kept, index, order in (
                ("capped", "", ("oldest", "newest")),
                ("tokens compressed", " index", ("newest", "oldest")),
            )
            for evict in order
        ]
    console = Console(width=130)
    table = Table("store", "memory", "found", "tokens a pass", "throughput", "drafting")
    for o in outcomes:
        speed = f"{o.tokens_per_s / plain.tokens_per_s:.2f}×"
        share = f"{o.memory_share:.0%}"
        table.add_row(
            o.name,
            share,
            f"{o.found:.0%}",
            f"{o.accept_length:.2f}",
            speed,
            f"{o.drafting_share:.1%}",
        )
    console.print(table)
    corpora = {"copies": epochs[0]}
    if data is not None:
        corpora["verl run, 16 checkpoints as one epoch"] = [
            [ids for epoch in prompt for ids in epoch] for prompt in verl_responses(data).values()
        ]
    for name, responses in corpora.items():
        whole, small = sizes(responses)
        console.print(f"{name}: {whole:.1f} bytes a token as an index, {small:.2f} compressed")
        rates = [f"{rate / 1e6:.0f}" for rate in codec_rates(responses)]
        console.print(f"  {rates[0]} M tokens/s compressed, {rates[1]} M tokens/s decompressed")
        for length in (5_000, 16_000):
            tokens = 230_000 * GROUP * length
            console.print(
                f"  230K prompts × {GROUP} × {length:,} tokens on 8 nodes: {tokens * whole / 8e9:.0f} GB a node as indexes, "
                f"{tokens * small / 8e9:.1f} compressed"
            )
    picture(outcomes, plain.tokens_per_s, picture_path)


if __name__ == "__main__":
    typer.run(main)
