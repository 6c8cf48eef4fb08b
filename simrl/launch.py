"""A choice as the settings with which a framework that offers it is launched: verl, AReaL or slime.

Invariant: a key stands here only if the framework's own documentation has it; `documents` name the pages. Values are those of
the simulated scenario. Paths of models and data, the optimizer and the reward are the user's. A system or a drafter that no
framework is known to offer has no settings, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simrl.hardware import GPUS_PER_NODE
from simrl.simulate import Prepared
from simrl.systems import parameters_of
from simrl.training import TrainingConfig

VERL = "verl documentation, Config Explanation (docs/examples/config.rst)"
VERL_ONE_STEP_OFF = "verl documentation, One Step Off Policy Async Trainer (docs/advance/one_step_off.md)"
VERL_FULLY_ASYNC = "verl documentation, Fully Async Policy Trainer (docs/advance/fully_async.md)"
VERL_DAPO = "verl documentation, DAPO (docs/algo/dapo.md)"
VERL_HISTOSPEC = "verl-recipe, specRL/histoSpec/README.md"
VLLM_NGRAM = "vLLM documentation, N-Gram Speculation (features/speculative_decoding/n_gram)"
VLLM_DRAFT_MODEL = "vLLM documentation, Draft Model (features/speculative_decoding/draft_model)"
AREAL = "AReaL documentation, Asynchronous RL (algorithms/async), Configurations (cli_reference)"
AREAL_BACKENDS = "AReaL documentation, Allocation Mode (reference/alloc_mode)"
SLIME = "slime documentation, Quick Start and Usage Guide (docs/en/get_started)"
SPECULATIVE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"

LONGEST_PROMPT = "data.max_prompt_length"
ROLLOUT_GPUS_A_NODE = (  # the first that a framework's settings have
    "rollout.n_gpus_per_node",
    "trainer.n_gpus_per_node",
    "cluster.n_gpus_per_node",
    "--actor-num-gpus-per-node",
)


@dataclass(frozen=True)
class Launch:
    """The program of a framework, its settings in order, the pages that have them, and what to mind."""

    framework: str
    program: str
    settings: Mapping[str, str]
    documents: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """As lines of a shell, joined by backslashes."""
        flags = self.framework == "slime"
        return [
            self.program,
            *((f"{key} {value}".rstrip() if flags else f"{key}={value}") for key, value in self.settings.items()),
        ]


@dataclass(frozen=True)
class NotOffered:
    """Why a choice cannot be launched as it is."""

    reason: str


@dataclass(frozen=True)
class _Batch:
    """A step of the trace: prompts, responses of each, the longest that may be."""

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int


def launch(prepared: Prepared) -> Launch | NotOffered:
    """The settings of a prepared scenario."""
    system, speculation = prepared.system, prepared.system.speculation
    if system.name not in _OFFERED:
        nearest = "; its drafter HistoSpec alone is verl's recipe specRL/histoSpec" if system.name == "rhymerl" else ""
        return NotOffered(f"no documentation of verl, AReaL or slime has it ({system.paper}){nearest}")
    made = _OFFERED[system.name](prepared, _batch(prepared))
    made = replace(made, notes=(*made.notes, *_to_mind(made.settings, prepared.scenario.cluster.tp)))
    if speculation is None:
        return made
    return _with_drafts(made, prepared)


def _to_mind(settings: Mapping[str, str], tp: int) -> Iterator[str]:
    """What a setting of any framework may be wrong in."""
    if LONGEST_PROMPT in settings:
        yield f"{LONGEST_PROMPT}={settings[LONGEST_PROMPT]} is the longest of the trace; yours may be longer"
    key = next((key for key in ROLLOUT_GPUS_A_NODE if key in settings), None)
    if key is not None and int(settings[key]) % tp:
        yield (
            f"{key}={settings[key]} GPUs a node are no multiple of tp {tp}: a worker would be on two nodes or GPUs stay empty; "
            "simrl does not place workers on nodes"
        )


def _with_drafts(made: Launch, prepared: Prepared) -> Launch | NotOffered:
    speculation, system = prepared.system.speculation, prepared.system
    assert speculation is not None
    if made.framework != "verl":
        return NotOffered(
            f"{made.framework}'s documentation has drafts of EAGLE-type heads alone, not {speculation.name} under {system.name}"
        )
    settings, notes = dict(made.settings), list(made.notes)
    if speculation.name in ("ngram", "draft_model") and not speculation.decoupled:
        tokens = speculation.window.rule.most_tokens
        key, value = ("method", "ngram") if speculation.name == "ngram" else ("model", speculation.model)
        settings |= {f"{SPECULATIVE}.{key}": value, f"{SPECULATIVE}.num_speculative_tokens": str(tokens)}
        page = VLLM_NGRAM if speculation.name == "ngram" else VLLM_DRAFT_MODEL
        notes.append(
            "verl hands engine_kwargs.vllm on to vLLM; that yours hands on speculative_config, too, is to be checked "
            "(verl-project/verl issue 4526)"
        )
        return Launch(made.framework, made.program, settings, (*made.documents, page), tuple(notes))
    if speculation.name in ("histospec", "histospec_code") and system.name == "verl_colocated":
        program = made.program.replace("verl.trainer.main_ppo", "recipe.specRL.histoSpec.main_ppo")
        notes.append("the recipe's windows and matches are those of `speculation: histospec_code`, and it has no gate")
        return Launch(made.framework, program, settings, (*made.documents, VERL_HISTOSPEC), tuple(notes))
    return NotOffered(f"no documentation of verl has {speculation.name} under {system.name}")


def _batch(prepared: Prepared) -> _Batch:
    trace = prepared.trace
    _, first, end = trace.step_slices[0]
    prompts = np.unique(trace.column("prompt_id")[first:end]).size
    longest = int((trace.column("prompt_tokens") + trace.observation_tokens()).max())
    return _Batch(prompts, round((end - first) / prompts), longest, trace.metadata.cap_tokens)


def _nodes(gpus: int) -> tuple[int, int]:
    """Nodes and GPUs of each that make this many, the fullest nodes first."""
    each = max(size for size in range(1, GPUS_PER_NODE + 1) if gpus % size == 0)
    return gpus // each, each


def _parts(prepared: Prepared) -> tuple[tuple[int, int], tuple[int, int]]:
    """Nodes and GPUs of each that roll out, and that train: a part of every node where that is even, so that no node stays
    empty; else nodes of their own."""
    rollout, train = prepared.workers * prepared.gpus_per_worker, prepared.train_gpus
    nodes = max((rollout + train) // GPUS_PER_NODE, 1)
    if rollout % nodes == 0 and train % nodes == 0:
        return (nodes, rollout // nodes), (nodes, train // nodes)
    return _nodes(rollout), _nodes(train)


def _value(prepared: Prepared, parameter: str) -> Any:
    """Of the system, as given or by default."""
    return prepared.system.parameters.get(parameter, parameters_of(prepared.system.name)[parameter])


def _eager(prepared: Prepared) -> bool:
    """Whether the host launches the kernels of every pass: no CUDA graphs."""
    return prepared.scenario.profile.least_pass_s > 0


def _verl(prepared: Prepared, batch: _Batch) -> dict[str, str]:
    """What every trainer of verl takes."""
    scenario = prepared.scenario
    engine, training = scenario.engine, scenario.training
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    nodes, each = _nodes(prepared.train_gpus) if prepared.colocated else _parts(prepared)[1]
    settings = {
        "data.train_batch_size": batch.prompts,
        LONGEST_PROMPT: batch.prompt_tokens,
        "data.max_response_length": batch.response_tokens,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": batch.group,
        f"{rollout}.temperature": scenario.speculation.temperature,
        f"{rollout}.tensor_model_parallel_size": scenario.cluster.tp,
        f"{rollout}.gpu_memory_utilization": engine.gpu_memory_utilization,
        f"{rollout}.max_num_seqs": engine.max_num_seqs,
        f"{rollout}.max_num_batched_tokens": engine.max_num_batched_tokens,
        f"{actor}.ppo_mini_batch_size": max(batch.prompts // prepared.system.minibatches, 1),
        f"{actor}.ppo_epochs": training.ppo_epochs,
        f"{actor}.use_dynamic_bsz": training.microbatching == "dynamic",
        f"{actor}.ppo_max_token_len_per_gpu": _tokens_of_a_gpu(training, batch),
        f"{rollout}.enforce_eager": _eager(prepared),
        f"{actor}.ulysses_sequence_parallel_size": training.sequence_parallel,
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": each,
    }
    return {key: str(value) for key, value in settings.items()}


def _rollout_nodes(prepared: Prepared) -> dict[str, str]:
    """Of verl's trainers whose rollout has its own GPUs."""
    nodes, each = _parts(prepared)[0]
    own = {"actor_rollout_ref.hybrid_engine": "False"}
    return {**own, "rollout.nnodes": str(nodes), "rollout.n_gpus_per_node": str(each)}


def _colocated(prepared: Prepared, batch: _Batch) -> Launch:
    return Launch("verl", "python3 -m verl.trainer.main_ppo", _verl(prepared, batch), (VERL,))


def _dapo(prepared: Prepared, batch: _Batch) -> Launch:
    most = _value(prepared, "max_rounds")
    filtered = {
        "data.gen_batch_size": str(round(batch.prompts * _value(prepared, "over_sampling"))),
        "algorithm.filter_groups.enable": str(bool(_value(prepared, "dynamic_sampling"))),
        "algorithm.filter_groups.max_num_gen_batches": str(most or 0),
    }
    program = "python3 -m recipe.dapo.main_dapo"
    return Launch("verl", program, {**_verl(prepared, batch), **filtered}, (VERL, VERL_DAPO))


def _one_step_off(prepared: Prepared, batch: _Batch) -> Launch:
    program = "python3 -m verl.experimental.one_step_off_policy.main_ppo"
    config = {"--config-path": "config", "--config-name": "one_step_off_ppo_trainer.yaml"}
    settings = {**config, **_verl(prepared, batch), **_rollout_nodes(prepared)}
    notes = (
        "the page calls the module async_main_ppo and the keys rollout.nnodes and rollout.n_gpus_per_node; verl's own scripts "
        "run main_ppo, and newer ones write actor_rollout_ref.rollout.nnodes: take those of your version",
    )
    return Launch("verl", program, settings, (VERL, VERL_ONE_STEP_OFF), notes)


def _fully_async(prepared: Prepared, batch: _Batch) -> Launch:
    batches, sync = _value(prepared, "require_batches"), _value(prepared, "sync_step")
    mini = _value(prepared, "mini_batch") or max(batch.prompts // (batches * sync), 1)
    settings = _verl(prepared, batch) | _rollout_nodes(prepared)
    settings |= {
        "data.train_batch_size": "0",
        "data.gen_batch_size": "1",
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(mini),
        "async_training.staleness_threshold": str(_value(prepared, "staleness")),
        "async_training.trigger_parameter_sync_step": str(sync),
        "async_training.require_batches": str(batches),
        "async_training.partial_rollout": str(_value(prepared, "partial_rollout")),
        "algorithm.rollout_correction.bypass_mode": str(prepared.system.log_probs == 0),
    }
    program = "python -m verl.experimental.fully_async_policy.fully_async_main"
    notes = ("rollout.total_rollout_steps is yours: the prompts of the whole run",)
    return Launch("verl", program, settings, (VERL, VERL_FULLY_ASYNC), notes)


def _areal(prepared: Prepared, batch: _Batch) -> Launch:
    scenario, parallel = prepared.scenario, prepared.scenario.training.sequence_parallel
    nodes, each = _nodes(prepared.gpus)
    context = f"c{parallel}" if parallel > 1 else ""
    settings: dict[str, Any] = {
        "cluster.n_nodes": nodes,
        "cluster.n_gpus_per_node": each,
        "rollout.backend": f"vllm:d{prepared.workers}t{scenario.cluster.tp}",
        "vllm.enforce_eager": str(_eager(prepared)).lower(),  # AReaL's own default is true
        "actor.backend": f"fsdp:d{prepared.train_gpus // parallel}{context}",
        "rollout.max_head_offpolicyness": _value(prepared, "eta"),
        "train_dataset.batch_size": batch.prompts,
        "gconfig.n_samples": batch.group,
        "gconfig.max_new_tokens": batch.response_tokens,
        "gconfig.temperature": scenario.speculation.temperature,
        "actor.ppo_n_minibatches": prepared.system.minibatches,
        "actor.mb_spec.max_tokens_per_mb": scenario.training.tokens_per_microbatch,
        "actor.use_decoupled_loss": "true",
    }
    notes = []
    most = _value(prepared, "max_concurrent")
    if most is not None:
        settings["rollout.max_concurrent_rollouts"] = most
    else:
        notes.append(f"rollout.max_concurrent_rollouts was that of a batch, {batch.prompts} groups")
    if not _value(prepared, "interruptible"):
        notes.append("interruptible=false is an ablation of the paper; the documentation has no key for it")
    if _value(prepared, "on_stale") != "train":
        notes.append(f"on_stale={_value(prepared, 'on_stale')} is simrl's; AReaL trains what it has")
    program = "python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml scheduler.type=ray"
    return Launch(
        "AReaL",
        program,
        {key: str(value) for key, value in settings.items()},
        (AREAL, AREAL_BACKENDS),
        tuple(notes),
    )


def _slime(prepared: Prepared, batch: _Batch) -> dict[str, str]:
    nodes, each = _nodes(prepared.train_gpus) if prepared.colocated else _parts(prepared)[1]
    updates, training = prepared.system.minibatches, prepared.scenario.training
    return {
        "--actor-num-nodes": str(nodes),
        "--actor-num-gpus-per-node": str(each),
        "--rollout-num-gpus-per-engine": str(prepared.scenario.cluster.tp),
        "--rollout-batch-size": str(batch.prompts),
        "--n-samples-per-prompt": str(batch.group),
        "--num-steps-per-rollout": str(updates),
        "--rollout-max-response-len": str(batch.response_tokens),
        "--rollout-temperature": str(prepared.scenario.speculation.temperature),
        "--use-dynamic-batch-size": "",
        "--max-tokens-per-gpu": str(_tokens_of_a_gpu(training, batch)),
        **({"--context-parallel-size": str(shared)} if (shared := training.sequence_parallel) > 1 else {}),
        **({"--sglang-disable-cuda-graph": ""} if _eager(prepared) else {}),
    }


def _tokens_of_a_gpu(training: TrainingConfig, batch: _Batch) -> int:
    """verl's and slime's budget is a GPU's: those that share a sequence add theirs up, to no less than was asked for, and than
    the longest sequence, for which simrl widens a budget and they do not."""
    tokens = max(training.tokens_per_microbatch, batch.prompt_tokens + batch.response_tokens)
    return -(-tokens // training.sequence_parallel)


def _april(prepared: Prepared, batch: _Batch) -> Launch:
    more = {
        "--colocate": "",
        "--over-sampling-batch-size": str(round(batch.prompts * _value(prepared, "over_sampling"))),
        "--partial-rollout": "",
    }
    return Launch("slime", "python3 train.py", {**_slime(prepared, batch), **more}, (SLIME,))


def _split(prepared: Prepared, batch: _Batch) -> Launch:
    more = {"--rollout-num-gpus": str(prepared.workers * prepared.gpus_per_worker)}
    return Launch("slime", "python3 train.py", {**_slime(prepared, batch), **more}, (SLIME,))


_OFFERED: dict[str, Callable[[Prepared, _Batch], Launch]] = {
    "verl_colocated": _colocated,
    "verl_ngram": _colocated,
    "verl_draft_model": _colocated,
    "dapo": _dapo,
    "one_step_off": _one_step_off,
    "verl_fully_async": _fully_async,
    "areal": _areal,
    "april": _april,
    "split": _split,
}
