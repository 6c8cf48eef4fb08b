"""vLLM's own scheduler and KV cache manager, driven without a model through a scenario, as `EngineCore` drives them.

Synchronously: schedule, run, update. Asynchronously, with a queue of two (`step_with_batch_queue`): a pass is scheduled before
the outcome of the one that runs is known, and an empty one waits for it. Requests, aborts and resets come between an update and
the next schedule.
A reset comes as after `pause_generation(mode="keep")`: with no pass in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.schedule_scenarios import Pass, Progress, Scenario


@cache
def vllm_config(model: Path, async_scheduling: bool, draft_tokens: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    # Asynchronous scheduling takes no drafter that runs on the CPU; the scheduler does not look at which it is.
    method = "ngram_gpu" if async_scheduling else "ngram"
    drafter = {
        "method": method,
        "num_speculative_tokens": draft_tokens,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 2,
    }
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        async_scheduling=async_scheduling,
        speculative_config=drafter if draft_tokens else None,
    ).create_engine_config()


def vllm_scheduler(model: Path, scenario: Scenario) -> Any:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    limits, block = scenario.limits, scenario.limits.block_size
    config = vllm_config(model, limits.async_scheduling, scenario.draft_tokens)
    scheduling, caching = config.scheduler_config, config.cache_config
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = (
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )
    scheduling.max_num_scheduled_tokens = None
    scheduling.async_scheduling = limits.async_scheduling  # which a CPU turns off
    scheduling.prefill_schedule_interval = limits.prefill_interval
    scheduling.watermark = (limits.watermark_blocks and limits.watermark_blocks + 0.5) / (
        limits.kv_blocks + 1
    )
    caching.block_size, caching.enable_prefix_caching = block, limits.prefix_caching
    caching.num_gpu_blocks = limits.kv_blocks + 1  # one is never given out
    config.model_config.max_model_len = limits.kv_blocks * block
    heads = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    spec = FullAttentionSpec(block_size=block, **heads)
    specs: list[Any] = [spec] * limits.full_groups
    specs += [
        SlidingWindowSpec(block_size=block, sliding_window=limits.window_tokens, **heads)
    ] * limits.window_groups
    state = {
        "shapes": ((1, 1),),
        "dtypes": (torch.float32,),
        "page_size_padded": spec.page_size_bytes,
    }
    specs += [
        MambaSpec(block_size=config.model_config.max_model_len, **state)
    ] * limits.state_blocks
    groups = [KVCacheGroupSpec([f"layer {i}"], each) for i, each in enumerate(specs)]
    cache_config = KVCacheConfig(limits.kv_blocks + 1, [], groups)
    kind = AsyncScheduler if limits.async_scheduling else Scheduler
    size = (
        config.model_config.max_model_len if limits.state_blocks else block
    )  # a multiple of all groups' sizes
    return kind(
        config, cache_config, StructuredOutputManager(config), block_size=size, log_stats=True
    )


@cache
def block_hasher(block_size: int) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


@dataclass
class Scheduled:
    """A pass of which the outcome is not known yet."""

    output: Any
    samples: set[str]  # the requests that sample in it
    admitted: dict[str, tuple[int, int]]  # their tokens found and known


@dataclass
class Told:
    """What the scheduler was given for a sample."""

    request: Any
    before: int  # tokens generated before this request
    prompt: int  # with what tools added

    @property
    def generated(self) -> int:
        return self.before + self.request.num_output_tokens


@dataclass
class VllmPlayer:
    scenario: Scenario
    scheduler: Any
    in_flight: deque[Scheduled] = field(default_factory=deque)
    told: dict[str, Told] = field(default_factory=dict)  # by request, whose name is "sample/times"
    computed: dict[str, int] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    requests: int = 0
    executed: int = 0  # passes that were scheduled …
    last_prefill: int = -(10**9)  # … and the last of them with a context

    @property
    def busy(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_unfinished_requests()

    def idle_until(self, boundary: int) -> None:
        pass

    def submit(self, i: int, progress: Progress) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sample, known = progress.sample, progress.prompt + progress.generated
        text = [(sample.prompt_key + 1) * 10_000 + j for j in range(sample.prompt)]
        text += [(i + 1) * 10_000_000 + j for j in range(known - sample.prompt)]
        tokens = progress.turn_end - progress.generated
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        name = f"{i}/{self.requests}"
        self.requests += 1
        request = Request(
            name,
            text,
            params,
            None,
            cache_salt=None if sample.salt is None else str(sample.salt),
            block_hasher=block_hasher(self.scenario.limits.block_size),
        )
        self.told[name] = Told(request, progress.generated, progress.prompt)
        self.computed[name] = 0
        self.scheduler.add_request(request)

    def resume(self, i: int, progress: Progress, observation: int) -> None:
        self.submit(i, progress)

    def abort(self, i: int) -> None:
        from vllm.v1.request import RequestStatus

        (name,) = (name for name in self.told if name.startswith(f"{i}/"))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.told[name]

    def reset(self) -> None:
        assert not self.in_flight
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.computed = dict.fromkeys(self.computed, 0)
        self.scheduler.reset_preempted_req_ids = set()  # not those of a pass
        if self.scenario.back is not None:
            for name in list(self.told):
                self.abort(self._sample(name))

    def send_again(self, i: int, progress: Progress) -> None:
        self.submit(i, progress)

    def one_pass(self, reset_follows: bool) -> Pass:
        while not self.in_flight:
            self._schedule()
        if (
            self.scenario.limits.async_scheduling
            and not reset_follows
            and self.scheduler.has_unfinished_requests()
        ):
            ahead, self.preempted = self.preempted, set()
            self._schedule()
            ahead, self.preempted = self.preempted, ahead
        else:
            ahead = set()
        done = self._end(self.in_flight.popleft())
        self.preempted = ahead
        return done

    def _schedule(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        before, chunked = self._prefix_totals(), self._chunked()
        output = self.scheduler.schedule(self._throttles())
        self.preempted |= output.preempted_req_ids or set()
        if not output.num_scheduled_tokens:
            self.scheduler.update_from_output(output, ModelRunnerOutput([], {}, []))
            return
        requests = self.scheduler.requests
        samples = {
            name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk
        }
        names = [data.req_id for data in output.scheduled_new_reqs] + list(
            output.scheduled_cached_reqs.resumed_req_ids
        )
        admitted = {
            name: (
                requests[name].num_computed_tokens - output.num_scheduled_tokens[name],
                requests[name].num_tokens,
            )
            for name in names
        }
        self.executed += 1
        contexts = {name for name, (found, known) in admitted.items() if found < known - 1}
        if contexts | (chunked & set(output.num_scheduled_tokens)):
            self.last_prefill = self.executed
        assert self._hits_are_those_counted(before, admitted)
        self.in_flight.append(Scheduled(output, samples, admitted))

    def _chunked(self) -> set[str]:
        """The running requests whose contexts are not complete."""
        return {r.request_id for r in self.scheduler.running if r.is_prefill_chunk}

    def _throttles(self) -> bool:
        """Return whether the scheduler is to put contexts off: before 0.33 it counts no passes itself."""
        early = self.executed + 1 - self.last_prefill < self.scenario.limits.prefill_interval
        return early and not hasattr(self.scheduler, "local_prefill_interval")

    def _prefix_totals(self) -> tuple[int, int]:
        stats = self.scheduler.kv_cache_manager.prefix_cache_stats
        return stats.hits + stats.preempted_hits, stats.queries + stats.preempted_queries

    def _hits_are_those_counted(
        self, before: tuple[int, int], admitted: dict[str, tuple[int, int]]
    ) -> bool:
        if not self.scenario.limits.prefix_caching:
            return True
        sums = tuple(sum(column) for column in zip(*admitted.values(), strict=True)) or (0, 0)
        return sums == tuple(
            now - then for now, then in zip(self._prefix_totals(), before, strict=True)
        )

    def _end(self, scheduled: Scheduled) -> Pass:
        """End a pass: let its requests gain what they sample."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output, tokens = scheduled.output, scheduled.output.num_scheduled_tokens
        sampled: list[list[int]] = []
        for name in tokens:
            if name not in self.told or name not in scheduled.samples:
                sampled.append([])
                continue
            told = self.told[name]
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            accepted = 0
            if drafted and name not in scheduled.admitted:  # else they are padding
                accepted = min(self.scenario.drafts[self._sample(name)][told.generated][1], drafted)
            first = told.request.num_tokens - self.scenario.samples[self._sample(name)].prompt
            start = (self._sample(name) + 1) * 10_000_000 + first
            sampled.append(list(range(start, start + 1 + accepted)))
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput([*tokens], {name: i for i, name in enumerate(tokens)}, sampled),
        )
        for name in self.preempted:
            self.computed[name] = 0
        for name, new in tokens.items():
            if name in scheduled.admitted:
                self.computed[name] = scheduled.admitted[name][0]
            if name in self.told:
                known = self.told[name].request.num_tokens
                self.computed[name] = (
                    known - 1 if name in scheduled.samples else self.computed[name] + new
                )
        ended = [
            name for name in tokens if name in self.told and self.told[name].request.is_finished()
        ]
        state = {
            self._sample(name): (self.computed[name], told.generated)
            for name, told in self.told.items()
            if name not in ended
        }
        for name in ended:
            del self.told[name]
        if self.scenario.draft_tokens and not self.scenario.limits.async_scheduling:
            names = [name for name in tokens if name in self.told]
            drafts = [
                self.scenario.drafts[self._sample(name)][self.told[name].generated][0]
                for name in names
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[7] * n for n in drafts]))
        found = scheduled.admitted.values()
        return Pass(
            state,
            len(self.preempted),
            sum(hit for hit, _ in found),
            sum(known for _, known in found),
            {self._sample(name): new for name, new in tokens.items()},
            [self._sample(name) for name in ended],
        )

    @staticmethod
    def _sample(name: str) -> int:
        return int(name.split("/")[0])
