"""A made-up recording of a mixture of experts on two ranks, in the files of LLMServingSim's bench and profiler.

Kernel times are rooflines of an RTX PRO 6000, each a launch, bytes and multiply-adds, added. Who waits for whom, and so the
times of the requests, come from the slow ranks of `tests.references`, which price a pass by the formulas below.
"""

import csv
import itertools
import json
from pathlib import Path

import numpy as np

from simrl.engine.state import END, Limits
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import Tables
from tests.references.lock_step import ReferenceLockStep

NAME = "Qwen3-30B-A3B-Instruct-2507"
SHAPE = MODELS["qwen3-30b-a3b"]
BYTES_PER_US, FLOPS_PER_US = 1.2e6, 300e6  # reached of the data sheet's 1.6 TB/s and 504 TFLOP/s
SEQUENCES, TOKENS, BLOCKS = 16, 512, 2000  # of a rank
TICKS = (*range(1, 16), *range(16, 64, 4), *range(64, TOKENS + 1, 16))  # as the profiler sweeps
CHUNKS, DECODES = (0, 16, 32, 64, 128, 256, 512), (0, 1, 2, 4, 8, 16, 32)
LENGTHS = (0, 16, 32, 64, 128, 256, 512, 1024)
WEIGHTS = {"qkv_proj": 2048 * (4096 + 2 * 512), "o_proj": 4096 * 2048}
A_LAYER = {"layernorm": 2, "qk_norm": 1, "rotary_emb": 1, "qkv_proj": 1, "o_proj": 1}
HEAD = {"lm_head": 2048 * 151936, "sampler": 0}


def product_us(weights: int, rows: float) -> float:
    return 2.0 + 2 * weights / BYTES_PER_US + 2 * weights * rows / FLOPS_PER_US


def attention_us(chunk: int, cached: int, decodes: int, length: int) -> float:
    """Launches, keys and values (4 heads of 128), and products of a chunk (32 heads)."""
    prefill = (
        4.0 + 2048 * cached / BYTES_PER_US + 1.6e4 * chunk * cached / FLOPS_PER_US + chunk / 50
    )
    decode = 3.0 + 2048 * decodes * length / BYTES_PER_US
    return prefill * (chunk > 0) + decode * (decodes > 0)


def block_us(tokens: float, activated: float) -> float:
    """The router, and three matrices of 2048 × 768 of each expert."""
    weights = 3 * 2048 * 768
    return 9.0 + 2 * weights * activated / BYTES_PER_US + 16 * weights * tokens / FLOPS_PER_US


def experts_s(tokens: float) -> float:
    """Two GPUs gather all tokens, compute half of the experts each, and scatter the sums."""
    activated = max(64 * (1 - (15 / 16) ** tokens), 8)
    others_bytes = tokens * 8 / 2 * 2 * (5 * 768 + 2 * 2048)
    exchange_bytes = tokens / 2 * 2 * (2048 + 128 + 2048)
    block_s = 1e-6 * block_us(tokens / 2, activated) + others_bytes / (0.8 * 1.597e12)
    return 48 * (block_s + 2 * 14e-6 + exchange_bytes / 32e9)


def pass_tables() -> Tables:
    """Return what a pass takes, at every number of tokens."""
    tokens = np.arange(1, TOKENS + 1)
    dense_us = []
    for n in tokens:
        rows = min(tick for tick in TICKS if tick >= n)
        layer = sum(product_us(WEIGHTS.get(kind, 0), rows) * n for kind, n in A_LAYER.items())
        dense_us.append(48 * layer + 2 * product_us(0, rows))
    sequences = np.arange(1, SEQUENCES + 1)
    axes = CHUNKS, LENGTHS, DECODES, LENGTHS[1:]
    attention = [attention_us(*point) for point in itertools.product(*axes)]
    of_all = np.arange(2, 2 * TOKENS + 1)
    return Tables(
        dense_tokens=tokens,
        dense_s=1e-6 * np.array(dense_us),
        sampled_sequences=sequences,
        sampled_s=1e-6
        * np.array([sum(product_us(w, n) for w in HEAD.values()) for n in sequences]),
        **dict(zip(Tables._fields[4:8], map(np.array, axes), strict=True)),
        attention_s=48e-6 * np.reshape(attention, [len(axis) for axis in axes]),
        between_passes_s=0.0,
        expert_tokens=of_all,
        experts_s=np.array([experts_s(n) for n in of_all]),
    )


def write_csv(path: Path, header: str, rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *rows])


def write_kernels(folder: Path) -> Path:
    """Write the profiler's folder of a GPU and model."""
    rank = folder / "tp1"
    rank.mkdir(parents=True)
    (folder / "meta.yaml").write_text(
        f"model: Qwen/{NAME}\nhardware: RTXPRO6000\nattention_grid:\n"
        "  {chunks: '0, 16-512 x2', n_decode: '0, 1-32 x2', kv: '0, 16-1024 x2'}\n"
    )
    kinds = (*A_LAYER, "embedding", "final_layernorm")
    dense = [(kind, n, product_us(WEIGHTS.get(kind, 0), n)) for kind in kinds for n in TICKS]
    write_csv(rank / "dense.csv", "layer tokens time_us", dense)
    heads = [(kind, n, product_us(w, n)) for kind, w in HEAD.items() for n in range(1, 17)]
    write_csv(rank / "per_sequence.csv", "layer sequences time_us", heads)
    attention = [
        (c, k, n, d, attention_us(c, k, n, d))
        for c, n in itertools.product(CHUNKS, DECODES)
        for k, d in itertools.product(LENGTHS if c else (0,), LENGTHS[1:] if n else (0,))
        if c or n
    ]
    write_csv(
        rank / "attention.csv", "prefill_chunk kv_prefill n_decode kv_decode time_us", attention
    )
    blocks = [
        (n, activated, block_us(n, activated))
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        for activated in (8, 16, 32, 64, 128)
        if activated <= 8 * n
    ]
    write_csv(rank / "moe.csv", "tokens activated_experts time_us", blocks)
    return folder


def write_recording(data: Path, requests: int) -> Path:
    """Write a run of two ranks and its kernel times under `data`, and return `data`."""
    rng = np.random.default_rng(7)
    arrival_s = np.cumsum(rng.exponential(0.05, requests))
    lengths = np.array([rng.integers(20, 600, requests), rng.integers(10, 150, requests)]).T
    limits = Limits(
        SEQUENCES,
        TOKENS,
        16,
        BLOCKS,
        async_scheduling=True,
        prefix_caching=True,
        dp=2,
        graph_tokens=2 * SEQUENCES,
    )
    ranks = ReferenceLockStep(pass_tables(), limits)
    sent = []
    for time_s, (prompt, response) in zip(arrival_s, lengths, strict=True):
        ranks.settle(time_s)
        sent.append(ranks.submit(int(prompt), int(response)))
    ranks.settle(1e6)
    ended_s = {id(request): time_s for request, time_s, kind in ranks.stops if kind == END}

    run = data / "vllm_runs" / "RTXPRO6000" / NAME
    run.mkdir(parents=True)
    settings = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": TOKENS,
    }
    meta = {"engine_kwargs": settings, "kv_cache": {"num_gpu_blocks": 2 * BLOCKS}}
    (run / "meta.json").write_text(json.dumps(meta))
    (run / "serving_config.json").write_text('{"link_bw": 16, "link_latency": 20000}')
    rows = [
        {
            "input_toks": request.prompt,
            "output_toks": request.response,
            "arrival_time": 1.7e9 + arrived_s,
            "queued_ts": 500.0 + arrived_s,
            "first_token_ts": 500.0 + request.first_token_s,
            "last_token_ts": 500.0 + ended_s[id(request)],
        }
        for request, arrived_s in zip(sent, arrival_s, strict=True)
    ]
    (run / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_kernels(data / "kernel_profiles" / "RTXPRO6000" / NAME)
    return data
