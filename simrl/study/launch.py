"""The settings with which a framework (verl, AReaL or slime) is launched to run a chosen scenario.

Invariant: a key stands in `scenario/frameworks/*.toml` only if the framework's own documentation
has it; `documents` name the pages. Values come from the simulated scenario. Paths of models and
data, the optimizer and the reward are the user's. A system or a drafter that no framework is known
to offer has no settings; the answer is the reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from operator import attrgetter
from shlex import quote
from typing import Any

import numpy as np

from simrl.pipelines.areal import CONCURRENT_BATCHES
from simrl.profile.hardware import Gpu
from simrl.scenario.presets import FRAMEWORK_FILES
from simrl.simulate.prepare import Prepared
from simrl.systems.recipes import parameters_of
from simrl.training.config import TrainingConfig
from simrl.validation import Model

VERL_FP8 = "verl documentation, FP8 RL (docs/advance/fp8.md)"
VERL_HISTOSPEC = "verl-recipe, specRL/histoSpec/README.md"
VLLM_NGRAM = "vLLM documentation, N-Gram Speculation (features/speculative_decoding/n_gram)"
VLLM_DRAFT_MODEL = "vLLM documentation, Draft Model (features/speculative_decoding/draft_model)"
SPECULATIVE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
LONGEST_PROMPT = "data.max_prompt_length"
VERL_QUANTIZATION, FP8_TRAINING = (
    "actor_rollout_ref.rollout.quantization",
    "override_transformer_config.fp8_recipe",
)
UNSAID_PRECISIONS = {  # the names that engines and Megatron-Core have for them
    "weights": "the engine's quantization, or a checkpoint in it",
    "kv_cache": "the engine's kv_cache_dtype",
    "training": "Megatron-Core's fp8 and fp8_recipe (tensorwise for fp8, blockwise for fp8-block)",
}
ROLLOUT_GPUS_A_NODE = (  # the first that a framework's settings have
    "rollout.n_gpus_per_node",
    "trainer.n_gpus_per_node",
    "cluster.n_gpus_per_node",
    "--actor-num-gpus-per-node",
)


class Setting(Model):
    """A setting of a framework. `field` is the field of a scenario that it sets; `value` is written
    where it is not simply the field's value, with names of `_values` in braces, and `values` where
    the framework has other words. At the field's value `unless`, and at one that `values` lacks,
    the setting is left out. `default` is the framework's own, by its version."""

    field: str | None = None
    value: str | None = None
    values: dict[str, str] = {}
    unless: int | None = None
    unit: str = ""
    default: dict[str, float | bool | str] = {}
    note: str = ""

    def text(self, values: Mapping[str, Any]) -> str | None:
        """Return what stands behind the key; None where the setting is left out."""
        if self.value is not None:
            text = self.value.format_map(values)
            return None if text == "None" else text
        chosen = attrgetter(str(self.field))(values["scenario"])
        return (
            None
            if chosen is None or chosen == self.unless
            else self.values.get(chosen)
            if self.values
            else str(chosen)
        )


@dataclass(frozen=True)
class Launch:
    """The program of a framework, its settings in order, the pages that have them, and what to
    check."""

    framework: str
    program: str
    settings: Mapping[str, str]
    documents: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The lines of a shell command, to be joined by backslashes; brackets are quoted."""
        between = " " if self.framework == "slime" else "="
        return [
            self.program,
            *(
                f"{key}{between}{value and quote(value)}".rstrip(" ")
                for key, value in self.settings.items()
            ),
        ]


def launch(prepared: Prepared) -> Launch | str:
    """Return the settings of a prepared scenario, or why it cannot be launched as it is."""
    system = prepared.system
    trains_with = "megatron" if prepared.scenario.training.sharding == "optimizer" else "fsdp"
    if (system.name, trains_with) not in _templates():
        nearest = (
            "; its drafter HistoSpec alone is verl's recipe specRL/histoSpec"
            if system.name == "rhymerl"
            else ""
        )
        return f"no documentation of verl, AReaL or slime has it ({system.paper}){nearest}"
    template, keys = _templates()[system.name, trains_with]
    values = _values(prepared)
    texts = {key: setting.text(values) for key, setting in keys.items()}
    settings = {key: text for key, text in texts.items() if text is not None}
    notes = (*template.notes, *_notes(template.framework, settings, values))
    documents = (*template.documents, *([VERL_FP8] if VERL_QUANTIZATION in settings else []))
    made = replace(template, settings=settings, documents=documents, notes=notes)
    return made if system.speculation is None else _with_drafts(made, prepared)


@cache
def _templates() -> dict[tuple[str, str], tuple[Launch, Mapping[str, Setting]]]:
    """Return the launch of each system that a framework offers, and the settings that it will have,
    for training with FSDP and with Megatron."""
    templates: dict[tuple[str, str], tuple[Launch, Mapping[str, Setting]]] = {}
    for file in FRAMEWORK_FILES:
        data = tomllib.loads(file.read_text(encoding="utf-8")).get("launch", {"systems": {}})
        for (name, system), sharding in product(data["systems"].items(), ("fsdp", "megatron")):
            parts = [
                part for table in system["settings"] for part in (table, f"{table}_{sharding}")
            ]
            tables = [data["settings"].get(part, {}) for part in parts]
            settings = {
                key: Setting.model_validate(one) for table in tables for key, one in table.items()
            }
            pages = [*system["documents"], *({sharding} & data["documents"].keys())]
            documents, notes = (
                tuple(data["documents"][page] for page in pages),
                tuple(system.get("notes", ())),
            )
            templates[name, sharding] = (
                Launch(data["framework"], system["program"], {}, documents, notes),
                settings,
            )
    return templates


def _values(prepared: Prepared) -> dict[str, Any]:
    """Return what the templates name: the parameters of the system, as given or by default, and
    what follows from the scenario. None leaves a setting out."""
    system, scenario, trace = prepared.system, prepared.scenario, prepared.trace
    training = scenario.training
    parameters = {**parameters_of(system.name), **system.parameters}
    _, first, end = trace.step_slices[0]
    prompts = np.unique(trace.column("prompt_id")[first:end]).size
    prompt_tokens = int((trace.column("prompt_tokens") + trace.observation_tokens()).max())
    rollout, train = _parts(prepared)
    engine = scenario.engine
    eager = engine.enforce_eager or (
        not engine.async_scheduling and bool(scenario.profile.least_pass_s)
    )
    # verl's and slime's budget is one GPU's: GPUs that share a sequence add theirs up, to no less
    # than the scenario's budget and the longest sequence, for which simrl widens a budget and they
    # do not.
    tokens = max(training.tokens_per_microbatch, prompt_tokens + trace.metadata.cap_tokens)
    updates = parameters.get("require_batches", 1) * parameters.get("sync_step", 1)
    shared = training.sequence_parallel if training.sequence_parallel > 1 else None
    return {
        **parameters,
        "prepared": prepared,
        "scenario": scenario,
        "prompts": prompts,
        "max_concurrent": parameters.get("max_concurrent") or CONCURRENT_BATCHES * prompts,
        "group": round((end - first) / prompts),
        "prompt_tokens": prompt_tokens,
        "minibatch_prompts": max(prompts // system.minibatches, 1),
        "fully_async_minibatch": parameters.get("mini_batch") or max(prompts // updates, 1),
        "over_sampled_prompts": round(prompts * parameters.get("over_sampling", 1)),
        "dynamic_sampling": bool(parameters.get("dynamic_sampling")),
        "most_rounds": parameters.get("max_rounds") or 0,
        "no_log_probs": system.log_probs == 0,
        "tokens_of_a_gpu": -(-tokens // training.sequence_parallel),
        "eager": eager,
        "eager_lower": str(eager).lower(),
        "eager_flag": "" if eager else None,
        "prefix_caching": prepared.limits.prefix_caching,
        "no_prefix_caching_lower": str(not prepared.limits.prefix_caching).lower(),
        "no_prefix_caching_flag": None if prepared.limits.prefix_caching else "",
        "context": f"c{shared}" if shared else "",
        "data_parallel": prepared.train_gpus // training.gpus_per_rank,
        "ranks_flag": "" if scenario.cluster.dp > 1 else None,
        **_of_training(prepared),
        "nodes": _nodes(prepared.gpus, prepared.train_gpu),
        "rollout": rollout,
        "train": train,
    }


def _of_training(prepared: Prepared) -> dict[str, Any]:
    """Return the values of Megatron's layout of training; None where there is none."""
    training, gpus = prepared.scenario.training, prepared.train_gpus
    tp, pp, cp, ep = (
        getattr(training, f"{key}_parallel") for key in ("tensor", "pipeline", "sequence", "expert")
    )
    attention = f"d{gpus // training.gpus_per_rank}p{pp}t{tp}c{cp}"
    full = training.recompute is not False
    return {
        "expert_tensor_parallel": 1 if ep > 1 else None,  # experts stay whole
        "megatron_layout": f"megatron:(attn:{attention}|ffn:d{gpus // (pp * ep)}p{pp}t1e{ep})"
        if ep > 1
        else f"megatron:{attention}",
        "gradient_checkpointing": str(full).lower(),
        "recompute_granularity": "full" if full else None,
        "recompute_method": "uniform" if full else None,
        "recompute_layers": 1 if full else None,
    }


def _nodes(gpus: int, kind: Gpu) -> tuple[int, int]:
    """Return a number of nodes and of GPUs a node that make this many GPUs, the fullest nodes
    first."""
    gpus_per_node = max(size for size in range(1, kind.gpus_per_node + 1) if gpus % size == 0)
    return gpus // gpus_per_node, gpus_per_node


def _parts(prepared: Prepared) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return nodes and GPUs a node for rollout and for training: whole nodes where both fill them;
    else a part of every node where that is even, so that no node stays empty; else nodes of their
    own. On shared GPUs, both have the trainer's nodes."""
    rollout, train = prepared.rollout_gpus, prepared.train_gpus
    if prepared.colocated:
        return _nodes(train, prepared.gpu), _nodes(train, prepared.gpu)
    nodes = max((rollout + train) // prepared.gpu.gpus_per_node, 1)
    whole = rollout % prepared.gpu.gpus_per_node == 0 == train % prepared.train_gpu.gpus_per_node
    if (
        not whole
        and prepared.scenario.cluster.train is None
        and rollout % nodes == 0
        and train % nodes == 0
    ):
        return (nodes, rollout // nodes), (nodes, train // nodes)
    return _nodes(rollout, prepared.gpu), _nodes(train, prepared.train_gpu)


def _notes(framework: str, settings: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """Return what may be wrong in the settings."""
    prepared, scenario = values["prepared"], values["scenario"]
    gpu, train = prepared.gpu.name, prepared.train_gpu.name
    training, cluster, parameters = scenario.training, scenario.cluster, scenario.system.parameters
    quantized, in_fp8 = (
        VERL_QUANTIZATION in settings,
        any(key.endswith(FP8_TRAINING) for key in settings),
    )
    is_set = {"weights": quantized, "training": in_fp8}
    precisions = [
        (part, kind)
        for part, kind in scenario.precision.model_dump().items()
        if not is_set.get(part)
    ]
    sizes = {
        key: getattr(training, key)
        for key in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    }
    fsdp, areal = framework != "slime" and training.sharding == "fsdp", framework == "AReaL"
    key = next(key for key in ROLLOUT_GPUS_A_NODE if key in settings)
    unit = f"tp {cluster.tp}" if cluster.dp == 1 else f"tp {cluster.tp} × dp {cluster.dp}"
    notes = [  # whether a note holds, the note
        (
            gpu != train,
            f"rollout on {gpu}, training on {train}: no setting names a kind of GPU; see to it that each part gets its own",
        ),
        (
            quantized,
            f"{VERL_QUANTIZATION}=fp8 is verl's block recipe (scales of 128 x 128 weights), as simulated",
        ),
        (
            in_fp8,
            "blockwise fp8 training needs NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 in the environment, and CUDA 12.9",
        ),
        *(
            (
                kind != "bf16",
                f"precision.{part}={kind}: no setting here says so; set {UNSAID_PRECISIONS[part]}",
            )
            for part, kind in precisions
        ),
        *(
            (
                fsdp and size > 1,
                f"training.{name}={size}: no setting of FSDP says so; training.sharding=optimizer is Megatron's",
            )
            for name, size in sizes.items()
        ),
        *(
            (
                areal and not values.get(name),
                f"{name}=false is an ablation; the documentation has no key for it",
            )
            for name in ("interruptible", "recompute_kv", "pause")
        ),
        (
            areal and values.get("on_stale") != "train",
            f"on_stale={values.get('on_stale')} is simrl's; AReaL trains what it has",
        ),
        (
            areal and (cluster.dp > 1 or cluster.ep > 1),
            "cluster.dp and cluster.ep are vLLM's data_parallel_size and enable_expert_parallel; AReaL's page has no key",
        ),
        *(
            (
                value is not None,
                f"{name}={value}: no setting here says so; the framework's own may be slower",
            )
            for name, value in (
                (name, parameters.get(name)) for name in ("dispatch", "per_replica")
            )
        ),
        (
            values.get("version") == "0.4",
            'version "0.4": a release since 0.5 sends single responses to the least loaded server, as version "0.7" here',
        ),
        (
            LONGEST_PROMPT in settings,
            f"{LONGEST_PROMPT}={settings.get(LONGEST_PROMPT)} is the longest of the trace; yours may be longer",
        ),
        *((True, note) for note in _across_nodes(training, values)),
        (
            int(settings[key]) % cluster.worker_gpus,
            f"{key}={settings[key]} GPUs a node are no multiple of {unit}: a worker would be on two nodes or GPUs stay empty; "
            "simrl does not place workers on nodes",
        ),
    ]
    return [note for holds, note in notes if holds]


def _across_nodes(training: TrainingConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the groups of train GPUs that the nodes of the settings break up, though the scale-up
    link joined them in the simulation."""
    gpus_per_node, kind = values["train"][1], values["prepared"].train_gpu
    for key, size in {
        "training.tensor_parallel": training.tensor_parallel,
        "training.expert_parallel": training.expert_parallel,
    }.items():
        if gpus_per_node % size and size <= kind.nvlink_domain <= kind.gpus_per_node:
            yield (
                f"{key}={size} is more than the {gpus_per_node} train GPUs a node here hold whole: its groups cross nodes, "
                f"which was simulated within the {kind.nvlink_domain} GPUs of a node"
            )


def _with_drafts(made: Launch, prepared: Prepared) -> Launch | str:
    speculation, system = prepared.system.speculation, prepared.system
    assert speculation is not None
    if made.framework != "verl":
        alone = f"{made.framework}'s documentation has drafts of EAGLE-type heads alone"
        return f"{alone}, not {speculation.name} under {system.name}"
    if speculation.name in ("ngram", "draft_model") and not speculation.decoupled:
        tokens = speculation.window.rule.most_tokens
        key, value = (
            ("method", "ngram") if speculation.name == "ngram" else ("model", speculation.model)
        )
        settings = {
            f"{SPECULATIVE}.{key}": value,
            f"{SPECULATIVE}.num_speculative_tokens": str(tokens),
        }
        made = replace(made, settings={**made.settings, **settings})
        page = VLLM_NGRAM if speculation.name == "ngram" else VLLM_DRAFT_MODEL
        note = (
            "verl hands engine_kwargs.vllm on to vLLM; that yours hands on speculative_config, too, is to be checked "
            "(verl-project/verl issue 4526)"
        )
    elif speculation.name in ("histospec", "histospec_code") and system.name == "verl_colocated":
        program = made.program.replace("verl.trainer.main_ppo", "recipe.specRL.histoSpec.main_ppo")
        made, page = replace(made, program=program), VERL_HISTOSPEC
        note = (
            "the recipe has the windows and matches of `speculation: histospec_code`, and no gate"
        )
    else:
        return f"no documentation of verl has {speculation.name} under {system.name}"
    return replace(made, documents=(*made.documents, page), notes=(*made.notes, note))
