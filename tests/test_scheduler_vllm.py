"""The engine's schedule against vLLM's own scheduler, driven without a model: same passes, token by token, same preemptions."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from helpers import one_second_a_pass

from simrl.engine.engine import Engine
from simrl.engine.requests import Limits

pytest.importorskip("vllm", reason="vLLM is not installed")

Requests = list[tuple[int, int, int]]  # pass in which it comes, prompt tokens, response tokens
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from replay.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, 2, 32, heads=2, kv_heads=1, vocab=300)
    return folder


def vllm_scheduler(model: Path, limits: Limits):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=min(limits.kv_blocks * BLOCK, 4096),
        block_size=BLOCK,
        enable_prefix_caching=False,
        async_scheduling=limits.async_scheduling,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(limits.kv_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one block is never given out
    config.cache_config.num_gpu_blocks = limits.kv_blocks + 1
    kind = AsyncScheduler if limits.async_scheduling else Scheduler
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def in_vllm(model: Path, limits: Limits, requests: Requests) -> tuple[list[tuple[int, int]], int]:
    """Of each request the passes in which its first and last tokens came, and all preemptions. As vLLM's engine does, a pass is
    scheduled before the one ahead of it is known to be over, if scheduling is asynchronous."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = vllm_scheduler(model, limits)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    passes, preemptions, coming = 0, 0, deque(enumerate(requests))
    in_flight: deque = deque()  # scheduled passes, and whether each of their requests gains a token
    while coming or scheduler.requests or in_flight:
        while coming and (coming[0][1][0] <= passes or not (scheduler.requests or in_flight)):
            i, (_, prompt, response) = coming.popleft()
            params = SamplingParams(max_tokens=response, min_tokens=response, ignore_eos=True)
            scheduler.add_request(Request(str(i), list(range(prompt)), params, None))
        while len(in_flight) < 1 + limits.async_scheduling:
            output = scheduler.schedule()
            preemptions += len(output.preempted_req_ids or ())
            if not output.num_scheduled_tokens:
                scheduler.update_from_output(output, ModelRunnerOutput([], {}, []))
                break
            gains = {r: not scheduler.requests[r].is_prefill_chunk for r in output.num_scheduled_tokens}
            in_flight.append((output, gains))
        if in_flight:
            passes += 1
            output, gains = in_flight.popleft()
            tokens = [[1] if gains[r] else [] for r in gains]
            scheduler.update_from_output(
                output, ModelRunnerOutput([*gains], {r: i for i, r in enumerate(gains)}, tokens)
            )
            for request_id in (r for r in gains if gains[r]):
                first.setdefault(request_id, passes)
                last[request_id] = passes
    return [(first[str(i)], last[str(i)]) for i in range(len(requests))], preemptions


def in_simrl(limits: Limits, requests: Requests) -> tuple[list[tuple[int, int]], int]:
    engine = Engine(one_second_a_pass(), limits)
    slots, ended = {}, {}
    for i, (come, prompt, response) in enumerate(requests):
        stops = engine.settle(come - 0.5) if engine.busy else []
        ended |= {slots[slot]: (engine.first_token_s(slot), s) for slot, s, _ in stops}
        slots[engine.submit(prompt, response)] = i
    while engine.busy:
        engine.next_stop_s()
        ended |= {slots[slot]: (engine.first_token_s(slot), s) for slot, s, _ in engine.take_next_stop()}
    return [(round(ended[i][0]), round(ended[i][1])) for i in range(len(requests))], engine.totals["preemptions"]


@pytest.mark.parametrize(
    ("kv_blocks", "async_scheduling"), [(14, False), (40, False), (400, False), (40, True), (400, True)]
)
@pytest.mark.parametrize("seed", range(3))
def test_every_pass_is_the_one_that_vllm_schedules(model, seed: int, kv_blocks: int, async_scheduling: bool):
    """With room for everything, for some, and for hardly one request; many come at a time, and late ones between passes."""
    rng = np.random.default_rng(seed)
    limits = Limits(int(rng.integers(2, 9)), int(rng.choice([32, 64, 200])), BLOCK, kv_blocks, async_scheduling)
    comes = np.sort(rng.choice([0, 0, 0, 3, 9, 40, 41, 60, 61], 24))
    requests = [(int(at), int(rng.integers(1, 130)), int(rng.integers(1, 90))) for at in comes]
    ours, theirs = in_simrl(limits, requests), in_vllm(model, limits, requests)
    assert ours == theirs
    assert theirs[1] > 0 or kv_blocks > 14  # it has to preempt where there is little room
