"""prepare(scenario) -> Prepared: reads the inputs that a scenario names and checks that it is
possible.

Invariant: every mistake in a scenario is an `InputError` of `prepare`, before anything runs. Sizes
of memory are per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import simrl
from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.profile.extension import covering
from simrl.profile.hardware import GIB, Gpu
from simrl.profile.model_shape import ModelShape, model_shape, require_kv_heads, understood
from simrl.profile.precision import KV_SHARE, weight_bytes_per_gpu
from simrl.runtime.agents import PLAIN, AgentRules, agent_rules, check_concurrency
from simrl.runtime.faults import check_faults
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.model import ClusterConfig, Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.memory import engine_limits, require_drafter_fits
from simrl.simulate.modelled import not_modelled
from simrl.simulate.rollpacker import other_layouts
from simrl.simulate.specactor import fetched_share, with_best_verifier
from simrl.simulate.training_checks import (
    TrainingNeed,
    require_divisor,
    require_parallelism,
    require_training_fits,
    require_training_precision,
)
from simrl.speculation.deployment import Deployment
from simrl.speculation.draft_times import mtp_shape
from simrl.speculation.methods import MTP
from simrl.speculation.plan import DraftPlan, plan_drafting
from simrl.speculation.tail_plan import TailPlan, plan_tail
from simrl.systems.recipes import make_system
from simrl.systems.system import System
from simrl.trace.synthesis import MOST_SAMPLES
from simrl.trace.trace import Trace
from simrl.training.costs import TrainingCosts
from simrl.training.weight_sync import PINNED_SHARE, extrapolated, loading_s, synced_by


@dataclass(frozen=True)
class Prepared(Deployment):
    """A scenario with the inputs that it names, read and checked against each other."""

    scenario: Scenario
    system: System
    limits: Limits
    workers: int
    train_gpu: Gpu
    train_gpus: int
    costs: WorkerCosts
    drafts: DraftPlan | None = None
    tail: TailPlan | None = None
    agents: AgentRules = PLAIN
    layouts: tuple[Prepared, ...] = ()  # at the other tensor-parallel sizes of `System.tp_sizes`

    @property
    def deployment(self) -> Deployment:
        """The part that drafters know."""
        return Deployment(self.model, self.gpu, self.tp, self.profile, self.trace)

    @property
    def has_turns(self) -> bool:
        """True if responses may have turns with an environment."""
        return bool({"turn_tokens", "environment_s"} & set(self.trace.table.column_names))

    @property
    def only_ends_count(self) -> bool:
        """True if of a group only the end is an event: no draft, turn of an environment, fault,
        rank in lock step or rule of dispatch follows single responses."""
        agents, system = self.scenario.agents, self.system
        capped = agents.max_concurrent or agents.deadline_s or self.has_turns
        followed = self.drafts or self.tail or capped or self.scenario.faults or self.is_elastic
        return not followed and self.limits.dp == 1 and system.dispatch.takes_groups

    @property
    def is_elastic(self) -> bool:
        """True if GPUs change sides (`simrl.dispatch.elastic`)."""
        return self.system.adapt_split_every > 0 or self.system.elastic is not None

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of a rollout worker: its tensor-parallel groups, and a decoupled drafter's."""
        return self.scenario.cluster.worker_gpus + (self.drafts.draft_gpus if self.drafts else 0)

    @property
    def colocated(self) -> bool:
        return self.system.rollout_share is None

    @property
    def rollout_gpus(self) -> int:
        return self.workers * self.gpus_per_worker

    @property
    def gpus(self) -> int:
        """All GPUs that the system occupies."""
        if self.scenario.cluster.train is not None:
            return self.scenario.cluster.all_gpus
        return (
            max(self.rollout_gpus, self.train_gpus)
            if self.colocated
            else self.rollout_gpus + self.train_gpus
        )

    def training_costs(self, gpus: int) -> TrainingCosts:
        """Return what an update costs on `gpus` train GPUs."""
        training = self.scenario.training
        return TrainingCosts(
            model=self.model,
            gpu=self.train_gpu,
            gpus=gpus,
            config=training,
            minibatches=self.system.minibatches,
            log_probs=self.system.log_probs + training.reference_passes,
            switch=self.colocated,
            controller=self.system.controller,
            padded_tokens=int(self.trace.column("prompt_tokens").max())
            + self.trace.metadata.cap_tokens,
            pauses=self.system.pauses,
            reference=model_shape(training.reference_model) if training.reference_model else None,
            precision=self.scenario.precision.training,
            critic=self.system.critic,
            lends="updates" in (self.system.elastic or ""),
            head=mtp_shape(self.model)
            if self.drafts
            and self.drafts.speculation.model == MTP
            and self.drafts.speculation.follows
            else None,
        )

    def may_train(self, gpus: int) -> bool:
        """Return whether `gpus` GPUs can train: whole sequences, enough memory."""
        return (
            gpus > 0
            and gpus % self.scenario.training.gpus_per_rank == 0
            and self.training_need(gpus).fits
        )

    def training_need(self, gpus: int) -> TrainingNeed:
        """Return the memory that an update needs on `gpus` train GPUs."""
        largest_batch = max(end - first for _, first, end in self.trace.step_slices)
        return TrainingNeed(self.training_costs(gpus), longest_allowed(self.trace), largest_batch)

    @property
    def weight_sync(self) -> str | None:
        """Method of the weight syncs and the source of its constants; None where assumed seconds
        stand for it."""
        training = self.scenario.training
        synced = training.weight_sync and not self.colocated
        return synced_by(training, self.model, self.train_gpu) if synced else None

    @property
    def extrapolated(self) -> dict[str, float]:
        """Constants of the weight sync that were measured on other models or nodes, by the field
        that replaces each."""
        return extrapolated(self.scenario.training, self.model, self.train_gpu, self.colocated)

    @property
    def offload(self) -> str | None:
        """The copies of an update of a colocated trainer to and from the host, in words; None where
        a switch was measured."""
        costs, training = self.training_costs(self.train_gpus), self.scenario.training
        if not self.colocated or training.switch_transfer_s is not None:
            return None
        rate, copied = costs.copied_bytes_per_s, costs.offloaded_bytes
        sleep_s = _sleep_s(self.scenario, self.model, self.tp)
        at_rate = f"{training.offload_memory} at {rate / 1e9:.3g} GB/s: {copied / rate:.2f} s"
        states = (
            f"{copied / 1e9:.3g} GB of states a GPU, {at_rate}"
            if copied
            else "states stay on the GPUs"
        )
        return f"{states}; the engine's weights: {sleep_s:.2f} s" if sleep_s else states

    @property
    def links(self) -> str:
        """Nodes and links of the GPUs, and between pools, in words."""
        pools = [self.gpu] if self.train_gpu == self.gpu else [self.gpu, self.train_gpu]
        nodes = [
            f"{kind.name} in nodes of {kind.gpus_per_node}, {kind.link_bytes_per_s / 1e9:g} GB/s among {kind.nvlink_domain}, "
            f"{kind.network_bytes_per_s / 1e9:g} GB/s a GPU between{kind.notes}"
            for kind in pools
        ]
        between = f"; {min(kind.network_bytes_per_s for kind in pools) / 1e9:g} GB/s a GPU from pool to pool"
        return "; ".join(nodes) + (between if len(pools) > 1 else "")

    @property
    def layout(self) -> dict[str, Any]:
        """The workers, in the metadata of a result that has several layouts."""
        return {
            "tp": self.tp,
            "rollout_workers": self.workers,
            "kv_cache_tokens_per_worker": self.limits.dp * self.limits.kv_tokens,
            "load_weights_s": self.costs.load_s + self.costs.pause_s,
            "profile": self.profile.metadata.source,
        }

    def inputs(self) -> dict[str, Any]:
        """Return the metadata of a result: the inputs and the source of each."""
        s = self.scenario
        return {
            "system": self.system.name,
            "label": self.system.label,
            "paper": self.system.paper,
            "variant": s.variant,
            "gpus": self.gpus,
            "rollout_workers": self.workers,
            "train_gpus": self.train_gpus,
            "links": self.links,
            **({"model_config": read} if (read := understood(s.model)) else {}),
            "prefix_caching": self.limits.prefix_caching,
            "kv_cache_tokens_per_worker": self.limits.dp * self.limits.kv_tokens,
            "load_weights_s": self.costs.load_s + self.costs.pause_s,
            "load_weights_kind": "given"
            if s.training.load_s is not None
            else ("derived" if self.weight_sync else "assumed"),
            **({"weight_sync": self.weight_sync} if self.weight_sync else {}),
            **({"offload": self.offload} if self.offload else {}),
            **({"extrapolated": self.extrapolated} if self.extrapolated else {}),
            "trace": self.trace.metadata.model_dump(),
            "trace_steps": len(self.trace.step_slices),
            "profile": {
                **self.profile.metadata.model_dump(),
                "corrections": list(self.profile.corrections),
            },
            **(
                {"layouts": [size.layout for size in (self, *self.layouts)]} if self.layouts else {}
            ),
            "speculation": self.drafts.facts if self.drafts else None,
            "best_of_n": self.tail.facts if self.tail else None,
            "not_modelled": not_modelled(self),
            "scenario": s.model_dump(),
            "simrl_version": simrl.__version__,
        }


def prepare(scenario: Scenario, inputs: InputCache | None = None) -> Prepared:
    """Return the scenario with its inputs; traces and profiles come from `inputs`. Raise
    `InputError` for an impossible scenario: GPUs that do not divide, too little memory, a trace or
    profile of another setup."""
    inputs = inputs or InputCache()
    system = make_system(scenario.system.name, scenario.system.parameters)
    if system.speculation is not None and system.speculation.verifiers:
        gpus = _rollout_pool(scenario.cluster, system)
        scenario = with_best_verifier(
            scenario, system.speculation, gpus, partial(_deployment, system=system, inputs=inputs)
        )
    prepared = _prepared(scenario, system, inputs)
    if not system.tp_sizes:
        return prepared
    return replace(
        prepared, layouts=other_layouts(prepared, lambda formed: _prepared(formed, system, inputs))
    )


def _prepared(scenario: Scenario, system: System, inputs: InputCache) -> Prepared:
    """Return the scenario with its inputs, for one size of workers: checks that need no file, the
    inputs, the plans of drafts, the split of the GPUs, the memory of a worker, its costs, the
    memory of training."""
    cluster, engine, training, precision = (
        scenario.cluster,
        scenario.engine,
        scenario.training,
        scenario.precision,
    )
    model, pool = model_shape(scenario.model), _rollout_pool(cluster, system)
    _require_own_pools(cluster, system)
    require_divisor("cluster.tp", cluster.tp, cluster.gpus, "GPUs", model.heads)
    require_divisor(
        "cluster.tp", cluster.tp, model.heads, f"attention heads of {model.name}", cluster.gpus
    )
    require_kv_heads("cluster.tp", cluster.tp, model)
    _require_ranks(cluster, model, system)
    deployment = _deployment(scenario, system, inputs)
    _require_few_samples(scenario.steps, deployment.trace)
    method, rule, measured = system.speculation, system.best_of_n, scenario.speculation
    drafts = plan_drafting(method, measured, deployment, pool) if method else None
    tail = plan_tail(rule, drafts, measured, deployment, cluster.gpus) if rule else None
    workers, train_gpus = split_gpus(
        cluster, cluster.worker_gpus + (drafts.draft_gpus if drafts else 0), system
    )
    require_parallelism(training, model, train_gpus)
    require_training_precision(precision.training, cluster.train_kind, training)
    elastic = "adapt_split_every" if system.adapt_split_every else system.elastic and system.name
    check_faults(scenario.faults, workers, system.dispatch.on_loss == "wait", elastic)
    if system.needs_rewards:
        _require_unequal_rewards(deployment.trace, system.name)
    caching = system.prefix_caching if engine.prefix_caching is None else engine.prefix_caching
    plans = [plan for plan in (drafts, tail) if plan is not None]
    limits = engine_limits(cluster, engine, precision, deployment, plans, caching)
    check_concurrency(scenario.agents, workers, limits)
    agents = agent_rules(
        scenario.agents, limits, model, deployment.gpu, cluster.tp, KV_SHARE[precision.kv_cache]
    )
    limits = agents.limits(limits)
    if drafts is not None:
        require_drafter_fits(engine, precision, deployment, drafts, tail, limits)
    costs = _worker_costs(scenario, system, deployment, drafts, train_gpus, workers)
    if tail is not None:
        tail = tail.fetching(fetched_share(tail.rule.kv, costs, deployment.profile, limits))
    prepared = Prepared(
        **vars(deployment),
        scenario=scenario,
        system=system,
        limits=limits,
        workers=workers,
        train_gpu=cluster.train_kind,
        train_gpus=train_gpus,
        costs=costs,
        drafts=drafts,
        tail=tail,
        agents=agents,
    )
    apart = system.rollout_share is not None or system.off_policyness != 0
    refuse(
        (
            method is not None and method.verify == "trainer" and apart,
            f"system {system.name}: speculation spec_rl with verify=trainer needs the training GPUs between an update and the "
            "next rollout, and this system rolls out meanwhile; use verify=engine",
        )
    )
    need = prepared.training_need(train_gpus)
    pause_s = system.on_update.pause_s + (need.costs.publish_s if system.pauses else 0.0)
    prepared = replace(prepared, costs=costs._replace(pause_s=pause_s))
    require_training_fits(need)
    if system.elastic:
        _require_elastic(prepared)
    return prepared


def _require_elastic(prepared: Prepared) -> None:
    """Raise `InputError` if the trainer of an elastic pool cannot take its first size, or if its
    states leave too little memory for an engine."""
    system, engine, need = prepared.system, prepared.scenario.engine, prepared.training_need
    trace, costs = prepared.trace, need(prepared.train_gpus).costs
    _, _, end = trace.step_slices[0]
    groups = -(-int((trace.group_starts < end).sum()) // system.minibatches)
    kept, utilization, moves = (
        costs.state_bytes,
        engine.gpu_memory_utilization,
        system.elastic or "",
    )
    left = prepared.train_gpu.memory_bytes * (1 - utilization)
    refuse(
        (
            system.adapt_split_every,
            f"system {system.name}: its rule moves GPUs, and adapt_split_every has another; leave one of them out",
        ),
        (
            "minibatches" in moves and groups % costs.ranks,
            f"system {system.name}: the {costs.ranks} data-parallel ranks of {prepared.train_gpus} train GPUs do not divide "
            f"the {groups} groups of a mini-batch; use another rollout_share or other minibatches",
        ),
        (
            "updates" in moves and costs.config.offload == "none" and kept > left,
            f"training.offload is none: {kept / GIB:.1f} GiB of states stay on a GPU that rolls out, and "
            f"engine.gpu_memory_utilization {utilization:g} leaves {left / GIB:.1f}; use offload=switch, or lower it",
        ),
    )


def _deployment(scenario: Scenario, system: System, inputs: InputCache) -> Deployment:
    """Return a worker's model, GPUs, step times up to the engine's limits and the longest sample,
    and what it generates."""
    model, gpu, engine = model_shape(scenario.model), scenario.cluster.rollout_kind, scenario.engine
    trace = inputs.trace(scenario)
    drafts = system.speculation is not None or system.best_of_n is not None
    tokens, limits = engine.max_num_batched_tokens, (engine.max_num_seqs, longest_allowed(trace))
    profile = covering(
        inputs.profile(scenario, model, gpu), tokens, *limits, tokens if drafts else 0, model, gpu
    )
    return Deployment(model, gpu, scenario.cluster.tp, profile, trace)


def _require_few_samples(steps: int, trace: Trace) -> None:
    """Raise `InputError` for more samples than a run can hold."""
    of_step = len(trace) / len(trace.step_slices)
    if (samples := round(steps * of_step)) > MOST_SAMPLES:
        raise InputError(
            f"steps {steps:,} of {of_step:,.6g} samples are {samples:,} samples; stay under {MOST_SAMPLES:,}",
            cause="samples of a run",
        )


def _rollout_pool(cluster: ClusterConfig, system: System) -> int:
    """Return the GPUs that roll out, before they are divided into workers."""
    return cluster.gpus if cluster.train else _share(cluster.gpus, system.rollout_share or 1.0)


def _require_ranks(cluster: ClusterConfig, model: ModelShape, system: System) -> None:
    """Raise `InputError` for data-parallel ranks or shared experts that vLLM does not have, or that
    are not modelled."""
    gpus, ranks = cluster.worker_gpus, f"cluster.dp is {cluster.dp}"
    refuse(
        (
            model.experts == 0 and cluster.dp > 1,
            f"{ranks}: {model.name} has no experts, and its ranks are workers of their own; use 1",
        ),
        (
            cluster.ep not in (1, gpus),
            f"cluster.ep is {cluster.ep}: all {gpus} GPUs of a worker (tp {cluster.tp} × dp {cluster.dp}) share the experts, "
            f"or each has a part of all; use {gpus} or 1",
        ),
        (
            model.experts == 0 and cluster.ep > 1,
            f"cluster.ep is {cluster.ep}: {model.name} has no experts; use 1",
        ),
    )
    require_divisor("cluster.tp × cluster.dp", gpus, cluster.gpus, "GPUs")
    if cluster.ep > 1:
        require_divisor("cluster.ep", cluster.ep, model.experts, f"experts of {model.name}")
    elif model.experts:
        size = f"intermediate size of an expert of {model.name}, as cluster.ep is 1"
        require_divisor("cluster.tp × cluster.dp", gpus, model.moe_intermediate, size)
    if cluster.dp > 1 and (system.speculation is not None or system.best_of_n is not None):
        raise InputError(
            f"{ranks}: drafts of ranks in lock step are not modelled; use system.speculation=none, or 1"
        )


def _worker_costs(
    scenario: Scenario,
    system: System,
    deployment: Deployment,
    drafts: DraftPlan | None,
    train_gpus: int,
    workers: int,
) -> WorkerCosts:
    model, kind, tp, training = deployment.model, deployment.gpu, deployment.tp, scenario.training
    cluster, trainer = scenario.cluster, scenario.cluster.train_kind
    held_bytes = weight_bytes_per_gpu(model, tp, cluster.dp, cluster.ep)
    one_domain = cluster.train is None and cluster.gpus <= kind.nvlink_domain
    # Each GPU fetches its own part.
    link = (
        kind.link_bytes_per_s
        if one_domain
        else min(kind.network_bytes_per_s, trainer.network_bytes_per_s)
    )
    if system.host_buffer:
        link = kind.host_bytes_per_s
    load_s = training.load_s
    synced = training.weight_sync is not None and system.rollout_share is not None
    if load_s is None and synced and not system.host_buffer:
        parts = model.weight_bytes / held_bytes if cluster.dp > 1 else tp
        load_s = loading_s(
            training,
            model,
            kind,
            train_gpus,
            workers,
            cluster.worker_gpus,
            parts,
            trainer if cluster.train else None,
        )
    elif load_s is None:
        own_bytes = weight_bytes_per_gpu(
            model, tp, cluster.dp, cluster.ep, scenario.precision.weights
        )
        load_s = training.load_overhead_s * (not synced) + own_bytes / link
        load_s += _sleep_s(scenario, model, tp) * (system.rollout_share is None)
    if drafts is not None:
        # What was trained of a drafter comes with the policy's weights.
        arrives = training.load_s is None and drafts.speculation.is_trained
        load_s += drafts.load_s + arrives * drafts.weight_bytes / link
    kv_bytes = model.kv_bytes_per_token * KV_SHARE[scenario.precision.kv_cache]
    return WorkerCosts(
        load_s=load_s,
        fetch_s_per_token=kv_bytes / min(tp, model.kv_heads) / kind.network_bytes_per_s,
        evaluate_every=training.evaluate_every,
        evaluate_s=training.evaluate_s,
        request_s=deployment.profile.metadata.request_s or 0.0,
    )


def _sleep_s(scenario: Scenario, model: ModelShape, tp: int) -> float:
    """Return the seconds in which an engine's weights go to pinned host memory and come back,
    unless a load was measured."""
    cluster, training = scenario.cluster, scenario.training
    held = weight_bytes_per_gpu(model, tp, cluster.dp, cluster.ep, scenario.precision.weights)
    copied = 2 * held * (training.rollout_offload and training.load_s is None)
    return copied / (PINNED_SHARE * cluster.rollout_kind.host_bytes_per_s)


def _share(gpus: int, factor: float) -> int:
    """Return floor(gpus × factor), safe against float error."""
    return int(gpus * factor + 1e-9)


def _require_own_pools(cluster: ClusterConfig, system: System) -> None:
    """Raise `InputError` where rollout and training have pools of their own and a system cannot
    take them as they are."""
    if cluster.train is None:
        return
    pools = f"system {system.name}: cluster.train gives training GPUs of its own"
    refuse(
        (
            system.rollout_share is None,
            f"{pools}, and it trains on the GPUs that roll out; leave one of them out",
        ),
        (
            system.adapt_split_every or system.elastic,
            f"{pools}, and {'adapt_split_every' if system.adapt_split_every else 'it'} lends GPUs from one pool to the other; "
            "leave one of them out",
        ),
        (
            "rollout_share" in system.parameters,
            f"{pools}, so cluster.gpus and cluster.train.gpus are the split; leave out its rollout_share",
        ),
    )


def split_gpus(cluster: ClusterConfig, unit: int, system: System) -> tuple[int, int]:
    """Return the number of rollout workers, of `unit` GPUs each, and of train GPUs; leftover GPUs
    go to training, or stay idle where that has a pool of its own."""
    gpus = cluster.gpus
    if cluster.train is not None or system.rollout_share is None:
        extra = _share(gpus, system.extra_rollout_gpus) // unit
        there = "there are" if cluster.train is None else "cluster.gpus is"
        refuse(
            (
                system.extra_rollout_gpus and not extra,
                f"system {system.name}: extra_rollout_gpus {system.extra_rollout_gpus} of {gpus} GPUs makes no worker of "
                f"{unit}; use more",
            ),
            (
                gpus < unit,
                f"system {system.name}: a rollout worker takes {unit} GPUs, those of its drafter included, and {there} "
                f"{gpus}; use more GPUs, or fewer draft_gpus",
            ),
            cause="GPUs of a worker",
        )
        return gpus // unit + extra, cluster.train.gpus if cluster.train else gpus
    workers = _share(gpus, system.rollout_share) // unit
    train_gpus = gpus - workers * unit
    refuse(
        (
            workers == 0 or train_gpus == 0,
            f"system {system.name}: rollout_share {system.rollout_share} of {gpus} GPUs, {unit} a worker, leaves "
            f"{workers * unit} rollout and {train_gpus} train GPUs; both need some: use more GPUs, or another share",
        ),
        cause="GPUs of a pool",
    )
    return workers, train_gpus


def longest_allowed(trace: Trace) -> int:
    """Return the upper bound on the tokens of a sequence: the longest given context, and a response
    of the cap; at most the context's cap, if the trace has one."""
    longest = (
        int((trace.column("prompt_tokens") + trace.observation_tokens()).max())
        + trace.metadata.cap_tokens
    )
    return min(longest, trace.metadata.context_cap_tokens or longest)


def _require_unequal_rewards(trace: Trace, system: str) -> None:
    """Raise `InputError` unless every sample has a reward and at least one group has unequal
    rewards."""
    rewards = (
        trace.column("reward")
        if "reward" in trace.table.column_names
        else np.full(len(trace), np.nan)
    )
    missing, first = int(np.isnan(rewards).sum()), trace.group_starts
    unequal = np.minimum.reduceat(rewards, first) < np.maximum.reduceat(rewards, first)
    single = np.diff(first, append=len(trace)) == 1
    refuse(
        (
            missing,
            f"{trace.metadata.name}: {missing} of {len(trace)} samples have no reward, and {system} drops groups by their "
            "rewards; give them in the column 'reward'",
        ),
        (
            not (unequal | single).any(),
            f"{trace.metadata.name}: all rewards of every group are equal, and {system} drops such groups; nothing is left",
        ),
    )
