"""SGLang's scheduler beside vLLM's: one engine, equal step times, six situations. Writes schedulers.md.

python experiments/schedulers.py
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.shared import markdown, write_parts
from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profilers.roofline import roofline_profile

PAGE = Path(__file__).with_suffix(".md")
TABLES = roofline_profile(model_shape("qwen3-14b"), gpu("h100"), 2).tables
GROUP, SEEDS = 8, 3


class Situation(NamedTuple):
    """A batch of groups, all there at first, and the memory that it meets."""

    name: str
    kv_tokens: int
    prompt_tokens: int
    mean_tokens: int
    sigma: float
    cap_tokens: int
    responses: int


class Run(NamedTuple):
    """When the last response ends, and what was done for it."""

    ended_s: float
    preemptions: int
    computed_tokens: int  # of contexts


SITUATIONS = (
    Situation("room for all", 2_000_000, 512, 4000, 0.9, 16384, 256),
    Situation("KV for half", 400_000, 512, 4000, 0.9, 16384, 256),
    Situation("KV for a quarter", 200_000, 512, 4000, 0.9, 16384, 256),
    Situation("KV for a quarter, cap 4k", 110_000, 512, 2000, 0.6, 4096, 256),
    Situation("prompts of 2k, responses of 4k", 2_000_000, 2048, 4000, 0.9, 16384, 1024),
    Situation("prompts of 2k, responses of 1k", 2_000_000, 2048, 1000, 0.9, 4096, 1024),
    Situation("many short responses", 2_000_000, 512, 400, 0.6, 2048, 4096),
)


def run(case: Situation, seed: int, sglang: bool, async_scheduling: bool = False) -> Run:
    """Run a batch to its end."""
    location = np.log(case.mean_tokens) - case.sigma**2 / 2
    drawn = np.random.default_rng(seed).lognormal(location, case.sigma, case.responses)
    size = 1 if sglang else 16
    limits = Limits(
        256,
        8192,
        size,
        case.kv_tokens // size,
        async_scheduling,
        prefix_caching=True,
        sglang=sglang,
        max_new_tokens=case.cap_tokens,
    )
    engine = one_engine(TABLES, limits)
    for i, tokens in enumerate(np.clip(drawn, 1, case.cap_tokens).astype(int)):
        engine.submit(case.prompt_tokens, int(tokens), prompt_key=i // GROUP)
    ended_s = float(np.nanmax(engine.run_until_idle()))
    return Run(ended_s, engine.totals["preemptions"], engine.totals["prefill_tokens"])


def main() -> None:
    rows = []
    for case in SITUATIONS:
        vllm, sglang, ahead = (
            [run(case, seed, *rule) for seed in range(SEEDS)]
            for rule in ((False,), (True,), (True, True))
        )
        later = [f"{b.ended_s / a.ended_s - 1:+.1%}" for a, b in zip(vllm, sglang, strict=True)]
        ahead_later = f"{ahead[0].ended_s / vllm[0].ended_s - 1:+.1%}"
        preempted = f"{vllm[0].preemptions} / {sglang[0].preemptions}"
        computed = f"{vllm[0].computed_tokens:,} / {sglang[0].computed_tokens:,}"
        rows.append((case.name, *later, ahead_later, preempted, computed))
    seeds = [f"seed {seed}" for seed in range(SEEDS)]
    heads = ("situation", *seeds, "overlapped", "preempted", "tokens of contexts computed")
    write_parts(PAGE, {"makespans": markdown(heads, rows)})


if __name__ == "__main__":
    main()
