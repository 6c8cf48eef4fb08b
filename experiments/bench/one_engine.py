"""One engine of vLLM and a batch that is there at t = 0: a whole program, as `peers.py` runs it.

Prompts of 512 tokens, responses lognormal(median 1,800, σ 0.9) up to 8,192, at most 256 running; qwen3-8b on an H100. It runs
the batch twice and prints JSON: the seconds of both loops, and when the last response ended.

python experiments/bench/one_engine.py [REQUESTS]
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.profile.profile import read_profile

PROFILE = Path(__file__).parents[2] / "profiles" / "qwen3-8b_h100_tp1.parquet"
PROMPT_TOKENS = 512
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, kv_blocks=50_000)


def responses(requests: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(1800), 0.9, requests)
    return [max(1, min(int(tokens), 8192)) for tokens in drawn]


def main(requests: int) -> None:
    profile = read_profile(PROFILE).with_corrections(1.0, 0.001, 0.0, 0.0)
    lengths, loops_s = responses(requests), []
    for _ in range(2):
        started = time.perf_counter()
        engine = one_engine(profile.tables, LIMITS)
        rows = np.zeros(
            (len(lengths), 8), np.int64
        )  # prompt, response, …; see `simrl.engine.fleet.submit`
        rows[:] = PROMPT_TOKENS, 0, 0, 0, -1, PROMPT_TOKENS, -1, 0
        rows[:, 1] = lengths
        engine.fleet.submit(engine.index, rows, np.full(len(lengths), -1))
        engine.run_until_idle()
        loops_s.append(time.perf_counter() - started)
    print(json.dumps({"first_s": loops_s[0], "loop_s": loops_s[1], "makespan_s": engine.now_s}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)
