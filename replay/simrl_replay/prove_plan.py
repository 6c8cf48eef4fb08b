"""Plan of a proof: its models, engines and schedules, for a GPU or, to rehearse it, for a CPU.

Invariant: plain data, a function of the device alone. Nothing here measures or starts anything.

Responses are recorded ones (traces/countdown), token by token, or for long contexts drawn from a
stated length model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.shipped import ROOT
from simrl_replay.speculative import own_config
from simrl_replay.vllm_adapter import EngineSettings

RECORDED = "traces/countdown/sync/trace.parquet"
BLOCK_TOKENS = {"cuda": 16, "cpu": 32}
DRAFT_TOKENS = 8
TINY = {
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "intermediate": 192,
    "vocab": 512,
    "qk_norm": True,
}
# The engine whose host's seconds the blind prediction has; they were measured in an earlier proof,
# on an H100.
ENGINE = {"cuda": "vllm-0.26-replay"}


class Sizes(NamedTuple):
    """Sizes of a proof. `small` and `large` are models; `cap_tokens` and `mean_tokens` are of the
    drawn responses."""

    small: ModelShape
    large: ModelShape
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int  # of an engine with everything in its cache
    short_kv_tokens: int  # of one that preempts
    large_kv_tokens: int
    mean_tokens: int
    cap_tokens: int
    updates: int  # of 128 recorded responses
    prompts: int  # of the drawn responses, in groups of 8
    repeats: int  # of a measured pass
    budget_s: float  # of the refinement of a profile


def sizes(device: str) -> Sizes:
    """Return the sizes for a GPU, or for one core of a CPU."""
    if device == "cuda":
        models = (model_shape("qwen3-0.6b"), model_shape("qwen3-8b"))
        return Sizes(*models, 128, 2048, 4096, 53248, 8192, 81920, 250, 2048, 2, 32, 3, 10.0)
    tiny, wide = (
        ModelShape.model_validate({**TINY, "name": f"tiny-{hidden}", "hidden": hidden})
        for hidden in (64, 128)
    )
    return Sizes(tiny, wide, 128, 512, 1024, 53248, 8192, 53248, 60, 240, 2, 32, 2, 1.0)


class Engine(NamedTuple):
    """An engine of a proof. Its KV cache has `kv_tokens`; simrl drafts up to `draft_tokens`, or
    vLLM drafts for a case."""

    name: str
    model: str
    kv_tokens: int
    draft_tokens: int = 0
    recorded: bool = True
    prefix_caching: bool = False
    graphs: str | None = None  # if others than the rest has
    drafting: str | None = None
    tp: int = 1


def workers(gpus: int) -> tuple[str, ...]:
    """Return the engines of the largest replay: one on each of half the GPUs, the others being the
    trainer's; at most 4."""
    return ("a", "b", "c", "d")[: max(2, gpus // 2)]


def engines(of: Sizes, graphs: str, gpus: int = 1) -> dict[str, Engine]:
    """Return the engines, by name, in the order in which they are needed; with these CUDA graphs,
    but for one without."""
    small, large = of.small.name, of.large.name
    each = (
        *(Engine(name, small, of.kv_tokens) for name in workers(gpus)),
        Engine("drafting a", small, of.kv_tokens // 2, DRAFT_TOKENS),
        Engine("drafting b", small, of.kv_tokens // 2, DRAFT_TOKENS),
        Engine("short of KV", small, of.short_kv_tokens),
        Engine("with prefixes", small, of.kv_tokens, recorded=False, prefix_caching=True),
        Engine("with n-grams", small, of.kv_tokens, drafting="n-grams"),
        Engine("no graphs", small, of.kv_tokens, recorded=False, graphs="none"),
        Engine("large", large, of.large_kv_tokens, recorded=False),
        *([Engine("tp 2", large, of.large_kv_tokens, recorded=False, tp=2)] * (gpus > 1)),
        # vLLM captures no graph of a draft model's passes without the compiler.
        Engine(
            "with a draft model",
            large,
            of.large_kv_tokens,
            0,
            False,
            False,
            "compiled",
            "draft model",
        ),
    )
    return {engine.name: engine._replace(graphs=engine.graphs or graphs) for engine in each}


def own_gpus(each: Iterable[Engine], visible: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return for each engine, by name, the variable that gives it its own of the visible GPUs. They
    go round: engines that follow each other share none, and a replay has such."""
    turns = cycle(visible)
    return {
        engine.name: {"CUDA_VISIBLE_DEVICES": ",".join(islice(turns, engine.tp))} for engine in each
    }


def settings(
    engine: Engine,
    of: Sizes,
    models: Path,
    device: str,
    memory_bytes: float,
    drafting: dict[str, Any] | None = None,
) -> EngineSettings:
    """Return the settings of an engine; of a GPU's memory it takes what its weights, KV cache and
    passes need. `drafting` is vLLM's configuration of its own drafter."""
    shape, block = of.large if engine.model == of.large.name else of.small, BLOCK_TOKENS[device]
    kv_bytes = int(
        (engine.kv_tokens + block) * shape.kv_bytes_per_token / min(engine.tp, shape.kv_heads)
    )  # of a GPU
    return EngineSettings(
        model=str(models / engine.model),
        max_num_seqs=of.max_num_seqs,
        max_num_batched_tokens=of.max_num_batched_tokens,
        block_size=block,
        max_model_len=of.max_model_len
        + 2 * (DRAFT_TOKENS if engine.draft_tokens or drafting else 0),
        kv_blocks=engine.kv_tokens // block,
        tp=engine.tp,
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if device == "cuda" else "float32",
        dummy_weights=True,
        speculative=own_config(engine.draft_tokens) if engine.draft_tokens else drafting,
        gpu_memory_utilization=round(
            (shape.weight_bytes / engine.tp + kv_bytes + 3e9) / memory_bytes, 3
        ),
        prefix_caching=engine.prefix_caching,
        recorded=engine.recorded,
        sleep=device == "cuda" and engine.name in ("a", "large"),
        kv_cache_bytes=kv_bytes if device == "cuda" else None,
        graphs=engine.graphs,  # type: ignore[arg-type]
    )


class Case(NamedTuple):
    """A replay: a system on engines, which share a single GPU, over `updates` policy updates;
    replayed `times` times. `profile` names the measured profile that predicts it a second time, if
    there is one."""

    name: str
    system: dict[str, Any]
    engines: tuple[str, ...]
    profile: str | None
    updates: int
    drawn: bool = False  # responses drawn from a length model, not recorded ones
    times: int = 1
    about: str = ""


NGRAMS = {"name": "ngram", "gate": "open", "window": {"kind": "fixed", "tokens": 4}}
DRAFT_MODEL = {"name": "draft_model", "window": {"kind": "fixed", "tokens": 4}}
COLOCATED = ("verl_colocated", "april")
HISTORY = {"name": "histospec", "window": {"kind": "aimd", "most_tokens": DRAFT_TOKENS}}


def cases(of: Sizes, models: Path, gpus: int = 1) -> list[Case]:
    """Return the replays in their order: the first ones are worth most."""
    pair, drafting, n = ("a", "b"), ("drafting a", "drafting b"), of.updates
    return [
        Case(
            "rhymerl",
            {"name": "rhymerl", "speculation": HISTORY},
            drafting,
            "drafting",
            3 * n,
            about="HistoSpec, HistoPipe",
        ),
        Case("areal", {"name": "areal", "eta": 2}, pair, "pair", 2 * n, about="interruptions"),
        Case("verl_colocated", {"name": "verl_colocated"}, ("a",), "alone", n, times=2),
        Case("one_step_off", {"name": "one_step_off"}, pair, "pair", 2 * n),
        Case(
            "april", {"name": "april"}, pair, "pair", n, about="over-provisioned, partial rollouts"
        ),
        Case(
            "short of KV",
            {"name": "verl_colocated"},
            ("short of KV",),
            "alone",
            n,
            about="it preempts",
        ),
        Case(
            "prefixes",
            {"name": "verl_colocated"},
            ("with prefixes",),
            "alone",
            1,
            True,
            about="a group shares its prompt",
        ),
        Case(
            "n-grams",
            {"name": "split", "speculation": NGRAMS},
            ("with n-grams",),
            None,
            n,
            about="vLLM's own",
        ),
        Case("large", {"name": "split"}, ("large",), "large", 1, True, about="long-tailed"),
        Case(
            "draft model",
            {
                "name": "split",
                "speculation": {
                    **DRAFT_MODEL,
                    "model": str(models / of.small.name / "config.json"),
                },
            },
            ("with a draft model",),
            None,
            1,
            True,
            about="accepted at the stated rates",
        ),
        *(
            [
                Case(
                    "tp 2",
                    {"name": "split"},
                    ("tp 2",),
                    "tp 2",
                    1,
                    True,
                    about="one engine, two GPUs",
                )
            ]
            * (gpus > 1)
        ),
        *(
            [
                Case(
                    "more engines",
                    {"name": "areal", "eta": 2},
                    workers(gpus),
                    "pair",
                    2 * n,
                    about="areal",
                )
            ]
            * (gpus > 5)
        ),
    ]


def scenario(
    case: Case, of: Sizes, device: str, gpu: str, models: Path, profile: Path | None = None
) -> dict[str, Any]:
    """Return the scenario of a replay, to be written as YAML: with a measured profile, else with
    the shipped one."""
    first = engines(of, "none", 8)[case.engines[0]]
    shape = of.large if first.model == of.large.name else of.small
    shipped = device == "cuda"
    train = {} if case.system["name"] in COLOCATED else {"train": {"gpu": gpu, "gpus": 4}}
    engine: dict[str, Any] = {
        "max_num_seqs": of.max_num_seqs,
        "max_num_batched_tokens": of.max_num_batched_tokens,
        "block_size": BLOCK_TOKENS[device],
        "kv_cache_tokens": first.kv_tokens,
        "prefix_caching": first.prefix_caching,
        "async_scheduling": False,
    }
    if profile is not None:
        steps: dict[str, Any] = {"path": str(profile)}
    elif shipped:
        steps, engine = {"path": "shipped"}, engine | {"preset": ENGINE[device]}
    else:
        steps = {"path": None, "roofline": {}}
    drawn = {
        "steps": case.updates,
        "prompts_per_step": of.prompts,
        "group": 8,
        "mean_tokens": of.mean_tokens,
        "cap_tokens": of.cap_tokens,
        "sigma": 1.0,
        "prompt_share": 0.5,
        "prompt_tokens": of.max_model_len // 8,
    }
    # A CPU trains no faster than it generates: a stated time stands for a trainer there. A GPU's
    # predicted training stands, but for what loads and switches take beyond their bytes: minutes
    # are short.
    training = {"reward_s": 0.05, "load_overhead_s": 0.1, "switch_s": 0.1} | (
        {} if shipped else {"publish_s": 0.05, "mfu": 1.0}
    )
    return {
        "name": f"prove-{case.name}".replace(" ", "-"),
        "seed": 0,
        "steps": case.updates,
        "model": str(models / shape.name / "config.json"),
        "cluster": {"gpu": gpu, "gpus": len(case.engines) * first.tp, "tp": first.tp, **train},
        "workload": {"synthetic": drawn} if case.drawn else {"trace": str(ROOT / RECORDED)},
        "profile": steps,
        "engine": engine,
        "training": training,
        "systems": [case.system],
    }


def write_config(shape: ModelShape, folder: Path, dtype: str) -> None:
    """Write the config.json of a dense Qwen3 or Qwen2.5, from which an engine makes random
    weights."""
    family = "Qwen3" if shape.qk_norm else "Qwen2"
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": dtype,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
