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
from simrl.dispatch.placement import by_prompt, least_requests
from simrl.dispatch.rules import Dispatch
from simrl.engine.requests import blocks_to_start
from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.full_batch import full_batch
from simrl.profile.extension import covering
from simrl.profile.hardware import GIB, Gpu
from simrl.profile.model_shape import ModelShape, model_shape, require_kv_heads, understood
from simrl.profile.precision import KV_SHARE, weight_bytes_per_gpu
from simrl.profile.tau import MeasuredTau, read_tau
from simrl.runtime.agents import PLAIN, AgentRules, agent_rules, check_concurrency
from simrl.runtime.faults import check_faults
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.model import ClusterConfig, JudgeConfig, Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.memory import engine_limits, require_drafter_fits
from simrl.simulate.modelled import not_modelled
from simrl.simulate.rollpacker import at_size, other_layouts
from simrl.simulate.specactor import fetched_share, with_best_verifier, with_scale
from simrl.simulate.training_checks import (
    TrainingNeed,
    require_divisor,
    require_parallelism,
    require_training_fits,
    require_training_precision,
)
from simrl.simulate.without_effect import without_effect
from simrl.speculation.deployment import Deployment
from simrl.speculation.draft_times import mtp_shape
from simrl.speculation.methods import MTP
from simrl.speculation.plan import DraftPlan, plan_drafting, with_verification
from simrl.speculation.tail_plan import TailPlan, plan_tail
from simrl.systems.recipes import make_system
from simrl.systems.system import System
from simrl.trace.draws import normals
from simrl.trace.lognormal import cut_tokens, location_of
from simrl.trace.synthesis import MOST_SAMPLES
from simrl.trace.trace import Trace
from simrl.training.costs import TrainingCosts
from simrl.training.weight_sync import PINNED_SHARE, extrapolated, loading_s, synced_by

VERDICT = 0x7EED  # the purpose of the draws of a judge's lengths: no trace draws for it


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
    # the engines of a judge; its trace has the requests to it, its load the swap of a turn
    judge: Prepared | None = None
    evaluation_trace: Trace | None = None  # what evaluations generate
    layouts: tuple[Prepared, ...] = ()  # at the other tensor-parallel sizes of `System.tp_sizes`
    tau: MeasuredTau | None = None  # where plans read a measured one
    prefill: Prepared | None = None  # of the prefill workers, where the workers decode alone

    @property
    def deployment(self) -> Deployment:
        """The part that drafters know."""
        most_tokens = self.max_num_batched_tokens
        return Deployment(self.model, self.gpu, self.tp, self.profile, self.trace, most_tokens)

    @property
    def has_turns(self) -> bool:
        """True if responses may have turns with an environment."""
        return _with_turns(self.trace)

    @property
    def only_ends_count(self) -> bool:
        """True if of a group only the end is an event: no draft, turn of an environment, fault,
        evaluation, rank in lock step or rule of dispatch follows single responses."""
        agents, system = self.scenario.agents, self.system
        special = agents.max_concurrent or agents.deadline_s or self.scenario.judge
        capped = special or self.has_turns or self.prefill
        followed = self.drafts or self.tail or capped or self.scenario.faults or self.is_elastic
        alone = not followed and self.evaluation_trace is None
        return alone and self.limits.dp == 1 and system.dispatch.takes_groups

    @property
    def evaluates_beside(self) -> bool:
        """True if training goes on while an evaluation runs."""
        config = self.scenario.evaluation
        return ((config and config.when) or self.system.evaluates) == "beside_training"

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
        return self.workers * self.gpus_per_worker + self.scenario.cluster.prefill.gpus

    @property
    def gpus(self) -> int:
        """All GPUs that the system occupies, without those of a standalone judge."""
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
            "gpus": self.gpus + ((s.judge and s.judge.gpus) or 0),
            "rollout_workers": self.workers,
            "train_gpus": self.train_gpus,
            "links": self.links,
            **({"model_config": read} if (read := understood(s.model)) else {}),
            "prefix_caching": (self.prefill or self).limits.prefix_caching,
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
            **({"prefill": self.prefill.layout} if self.prefill else {}),
            **(
                {"layouts": [size.layout for size in (self, *self.layouts)]} if self.layouts else {}
            ),
            "speculation": self.drafts.facts if self.drafts else None,
            "best_of_n": self.tail.facts if self.tail else None,
            **(
                {"judge": {**self.judge.layout, "model": self.judge.model.name}}
                if self.judge
                else {}
            ),
            "not_modelled": not_modelled(self),
            **({"without_effect": unused} if (unused := without_effect(self)) else {}),
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
    if scenario.cluster.prefill.gpus:
        return _with_prefill(prepared, inputs)
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
    of_step = len(deployment.trace) / len(deployment.trace.step_slices)
    _require_few_samples(
        f"steps {scenario.steps:,} of {of_step:,.6g} samples", scenario.steps * of_step
    )
    method, rule, measured = system.speculation, system.best_of_n, scenario.speculation
    drafts = plan_drafting(method, measured, deployment, pool) if method else None
    if drafts is not None:
        most = engine.max_num_seqs, engine.max_num_batched_tokens
        at_start = _all_at_start(scenario, system, deployment.trace)
        drafts = with_verification(drafts, deployment, *most, at_start)
    tail = plan_tail(rule, drafts, measured, deployment, cluster.gpus) if rule else None
    workers, train_gpus = split_gpus(
        cluster, cluster.worker_gpus + (drafts.draft_gpus if drafts else 0), system
    )
    require_parallelism(training, model, train_gpus)
    require_training_precision(precision.training, cluster.train_kind, training)
    elastic = "adapt_split_every" if system.adapt_split_every else system.elastic and system.name
    prefill = cluster.prefill.gpus // ((cluster.prefill.tp or cluster.tp) * cluster.dp)
    check_faults(scenario.faults, workers, system.dispatch.on_loss == "wait", elastic, prefill)
    if system.needs_rewards:
        _require_unequal_rewards(deployment.trace, system.name)
    caching = system.prefix_caching if engine.prefix_caching is None else engine.prefix_caching
    limits_with = partial(
        engine_limits, cluster, engine, precision, deployment, prefix_caching=caching
    )
    limits = limits_with([drafts] if drafts else [])
    check_concurrency(scenario.agents, workers, limits, system.dispatch.programs)
    agents = agent_rules(
        scenario.agents, limits, model, deployment.gpu, cluster.tp, KV_SHARE[precision.kv_cache]
    )
    limits = agents.limits(limits)
    if drafts is not None:
        require_drafter_fits(engine, precision, deployment, drafts, tail, limits)
    costs = _worker_costs(scenario, system, deployment, drafts, train_gpus, workers + prefill)
    if tail is not None:
        fetched = fetched_share(tail.rule.kv, costs, deployment.profile, limits)
        tail = with_scale(tail, drafts, limits_with, deployment.gpu.host_bytes_per_s, fetched)
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
        evaluation_trace=_evaluation_trace(scenario, inputs),
        tau=read_tau(scenario.profile.tau, model=model.name, gpu=cluster.gpu, tp=cluster.tp)
        if scenario.profile.tau and system.reads_tau
        else None,
    )
    _require_evaluable(prepared)
    apart = system.rollout_share is not None or system.off_policyness != 0
    refuse(
        (
            method is not None and method.verify == "trainer" and apart,
            f"system {system.name}: speculation spec_rl with verify=trainer needs the training GPUs between an update and the "
            "next rollout, and this system rolls out meanwhile; use verify=engine",
        ),
        (
            method is not None and method.verify == "trainer" and not _fixed_batches(system),
            f"system {system.name}: speculation spec_rl with verify=trainer verifies the next step's prompts, and this system "
            "draws others to fill its batches; use verify=engine",
        ),
    )
    need = prepared.training_need(train_gpus)
    pause_s = system.on_update.pause_s + (need.costs.publish_s if system.pauses else 0.0)
    prepared = replace(prepared, costs=costs._replace(pause_s=pause_s))
    require_training_fits(need)
    if system.elastic:
        _require_elastic(prepared)
    return replace(prepared, judge=_judge(prepared, inputs))


def _with_turns(trace: Trace) -> bool:
    return bool({"turn_tokens", "environment_s"} & set(trace.table.column_names))


def _fixed_batches(system: System) -> bool:
    """Return whether a rollout generates the next batch of the trace and nothing else."""
    collector = getattr(system.pipeline, "keywords", {}).get("collector", full_batch)
    return system.dynamic_sampling is None and collector is full_batch


def _all_at_start(scenario: Scenario, system: System, trace: Trace) -> bool:
    """Return whether all requests of a rollout come to their workers at its start: none after a
    turn, for another batch or an evaluation, from a queue, a prefill worker or a lost worker."""
    whole = system.off_policyness == 0 and _fixed_batches(system) and not _with_turns(trace)
    in_one_go = system.dispatch.takes_groups and not scenario.agents.max_concurrent
    alone = getattr(system.pipeline, "func", None) is batchwise and scenario.evaluation is None
    stays = not scenario.faults and not scenario.cluster.prefill.gpus
    return whole and in_one_go and alone and stays


def _judge(prepared: Prepared, inputs: InputCache) -> Prepared | None:
    """Return the engines of the scenario's judge; None without one. Raise `InputError` if it does
    not fit its GPUs, or cannot take turns with the rollout engines."""
    scenario, cluster, judge = (
        prepared.scenario,
        prepared.scenario.cluster,
        prepared.scenario.judge,
    )
    if judge is None:
        return None
    try:
        model = model_shape(judge.model)
    except InputError as error:
        raise InputError(f"judge.{error}", error.cause) from error
    tp, gpus = judge.tp, judge.gpus or prepared.rollout_gpus
    kind = cluster.model_copy(update={"train": judge}).train_kind
    batches: Any = getattr(prepared.system.pipeline, "keywords", {})
    turns, alone = (
        "judge: without gpus it takes turns with the rollout engines",
        "give it judge.gpus",
    )
    refuse(
        (
            judge.profile.tau,
            "judge.profile.tau: a judge has no ranking groups; leave it out, profile.tau is of the rollout workers",
        ),
        (gpus % tp, f"judge.tp is {tp}: it does not divide its {gpus} GPUs; use a divisor"),
        (
            model.heads % tp,
            f"judge.tp is {tp}: it does not divide the {model.heads} attention heads of {model.name}; use a divisor",
        ),
        (
            judge.gpu not in (None, cluster.gpu)
            and cluster.cost_per_gpu_hour
            and judge.cost_per_gpu_hour is None,
            f"judge.cost_per_gpu_hour is missing: a {judge.gpu} has another price than a {cluster.gpu}; give it, 0 for none",
        ),
        (
            judge.gpus and judge.cost_per_gpu_hour and not cluster.cost_per_gpu_hour,
            "judge.cost_per_gpu_hour is given, and cluster.cost_per_gpu_hour is not: the cost would be the judge's "
            "alone; give both",
        ),
        (
            not judge.gpus and (judge.gpu or judge.cost_per_gpu_hour) is not None,
            f"{turns}, and judge.gpu and cost_per_gpu_hour are of GPUs of its own; leave them out, or {alone}",
        ),
        (
            not judge.gpus
            and (
                batches.get("collector") is not full_batch or batches["eta"] or "parts" in batches
            ),
            f"{turns}, and responses of {prepared.system.name} run while others are judged; {alone}",
        ),
        (
            not judge.gpus and tp % prepared.gpus_per_worker,
            f"{turns}, and an engine of judge.tp {tp} does not take whole rollout workers, of {prepared.gpus_per_worker} GPUs; "
            f"use a multiple, or {alone}",
        ),
        (
            not judge.gpus
            and (
                scenario.faults
                or (prepared.drafts is not None and prepared.drafts.speculation.training)
            ),
            f"{turns}, beside which faults, and drafters that train on idle GPUs, are not modelled; {alone}",
        ),
    )
    require_kv_heads("judge.tp", tp, model)
    pool = {
        "gpu": kind.name,
        "sheet": kind,
        "gpus": gpus,
        "tp": tp,
        "dp": 1,
        "ep": 1,
        "train": None,
    }
    of_judge = scenario.model_copy(
        update={
            "cluster": cluster.model_copy(update=pool),
            **{key: getattr(judge, key) for key in ("model", "precision", "profile", "engine")},
        }
    ).with_profile()
    deployment = _deployment(
        of_judge,
        replace(prepared.system, speculation=None, best_of_n=None),
        inputs,
        _requests(prepared.trace, judge, scenario.seed),
    )
    limits = engine_limits(
        of_judge.cluster,
        judge.engine,
        judge.precision,
        replace(deployment, model=model.model_copy(update={"name": f"judge {model.name}"})),
        [],
        judge.engine.prefix_caching is not False,
    )
    # In a swap, one side's weights go to pinned host memory and the other's come. The sleep of a
    # colocated trainer's rollout engines is part of their load.
    copied = weight_bytes_per_gpu(model, tp, precision=judge.precision.weights) + (
        0.0
        if prepared.colocated and scenario.training.rollout_offload
        else weight_bytes_per_gpu(
            prepared.model, prepared.tp, cluster.dp, cluster.ep, scenario.precision.weights
        )
    )
    return replace(
        prepared,
        **vars(deployment),
        scenario=of_judge,
        limits=limits,
        workers=gpus // tp,
        costs=WorkerCosts(
            load_s=copied / (PINNED_SHARE * kind.host_bytes_per_s),
            request_s=deployment.profile.metadata.request_s or 0.0,
        ),
    )


def _requests(trace: Trace, judge: JudgeConfig, seed: int) -> Trace:
    """Return the requests to a judge about a trace, a row for each response or group, and its
    responses, drawn by the seed and the sample. A classifier's score is the one token of a pass."""
    starts = trace.group_starts if judge.per == "group" else np.arange(len(trace))
    keys = {name: trace.column(name)[starts] for name in ("step", "epoch", "prompt_id", "sample")}
    location = location_of(
        max(judge.response_tokens, 1.0),
        judge.response_sigma,
        judge.response_cap_tokens,
        "judge.response_tokens",
    )
    tokens = cut_tokens(
        location + judge.response_sigma * normals(seed, VERDICT, *keys.values()),
        judge.response_cap_tokens,
    )
    return Trace.from_columns(
        {
            **keys,
            "prompt_tokens": judge.prompt_tokens
            + trace.column("prompt_tokens")[starts]
            + np.add.reduceat(trace.observation_tokens() + trace.column("response_tokens"), starts),
            "response_tokens": tokens,
        },
        trace.metadata.model_copy(
            update={
                "name": "requests to the judge",
                "cap_tokens": int(tokens.max()),
                "context_cap_tokens": None,
            }
        ),
    )


def _with_prefill(prepared: Prepared, inputs: InputCache) -> Prepared:
    """Return a run whose workers decode, with its prefill workers. Decode workers have no prefix
    cache, as SGLang's. Raise `InputError` for what pools do not have."""
    system, cluster = prepared.system, prepared.scenario.cluster
    tp, gpus = cluster.prefill.tp or cluster.tp, cluster.prefill.gpus
    judge_gpus = getattr(prepared.scenario.judge, "gpus", None)
    pools, leave = f"cluster.prefill, system {system.name}", "leave prefill out"
    refuse(
        (
            gpus % (tp * cluster.dp),
            f"cluster.prefill.gpus is {gpus}: a prefill worker has {tp * cluster.dp} GPUs; use a multiple",
        ),
        (
            system.evaluates is None,
            f"{pools}: its workers load weights one by one, and prefill workers serve all of them; {leave}",
        ),
        (
            prepared.is_elastic or system.tp_sizes or system.extra_rollout_gpus,
            f"{pools}: its GPUs change sides or sizes, or are extra, and pools keep theirs; {leave}",
        ),
        (
            prepared.drafts or prepared.tail,
            f"{pools}: drafts of decode workers are not modelled; use system.speculation=none, or {leave}",
        ),
        (
            system.dispatch.programs,
            f"{pools}: programs are not modelled beside them; use another system.dispatch, or {leave}",
        ),
        (
            prepared.judge and not judge_gpus,
            f"{pools}: a judge that takes turns with rollout is not modelled beside them; give it judge.gpus, or {leave}",
        ),
        (
            system.on_update.running == "start_over",
            f"{pools}: updates let requests start over, which pools do not model; {leave}",
        ),
        (
            prepared.agents.kv in ("keep", "offload"),
            f"agents.kv_while_tool_runs is {prepared.agents.kv}: the next turn is prefilled elsewhere; leave it out, or "
            "cluster.prefill",
        ),
    )
    place = by_prompt if cluster.prefill.dispatch == "prefix" else least_requests
    pool = replace(prepared, system=replace(system, dispatch=Dispatch("prefill", place)))
    size = at_size(
        pool, tp, lambda formed: _prefill_workers(pool, formed, inputs), "cluster.prefill"
    )
    return replace(
        prepared,
        limits=prepared.limits._replace(prefix_caching=False, longest_prefix_first=False),
        costs=prepared.costs._replace(
            fetch_s_per_token=max(run.costs.fetch_s_per_token for run in (prepared, size))
        ),
        prefill=size,
    )


def _prefill_workers(prepared: Prepared, formed: Scenario, inputs: InputCache) -> Prepared:
    """Return a run's prefill workers, of the size in the `formed` scenario: their profile, KV cache
    and costs. Raise `InputError` where their GPUs cannot be divided so."""
    cluster, model, gpus = formed.cluster, prepared.model, prepared.scenario.cluster.prefill.gpus
    require_divisor(
        "cluster.prefill.tp", cluster.tp, model.heads, f"attention heads of {model.name}", gpus
    )
    require_kv_heads("cluster.prefill.tp", cluster.tp, model)
    _require_ranks(cluster.model_copy(update={"gpus": gpus}), model, prepared.system)
    deployment, workers = _deployment(formed, prepared.system, inputs), gpus // cluster.worker_gpus
    limits = engine_limits(
        cluster,
        formed.engine,
        formed.precision,
        deployment,
        [],
        prepared.limits.prefix_caching,
    )
    costs = _worker_costs(
        formed,
        prepared.system,
        deployment,
        None,
        prepared.train_gpus,
        prepared.workers + workers,
    )
    return replace(
        prepared,
        **vars(deployment),
        scenario=formed,
        limits=limits,
        workers=workers,
        costs=costs._replace(pause_s=prepared.costs.pause_s),
    )


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


def _deployment(
    scenario: Scenario, system: System, inputs: InputCache, requests: Trace | None = None
) -> Deployment:
    """Return a worker's model, GPUs, step times up to the engine's limits and the longest sample,
    and what it generates: the scenario's trace, or `requests`."""
    model, gpu, engine = model_shape(scenario.model), scenario.cluster.rollout_kind, scenario.engine
    trace = requests or inputs.trace(scenario)
    drafts = system.speculation is not None or system.best_of_n is not None
    evaluated = _evaluation_trace(scenario, inputs) or trace
    longest = max(longest_allowed(trace), longest_allowed(evaluated))
    tokens, limits = engine.max_num_batched_tokens, (engine.max_num_seqs, longest)
    profile = covering(
        inputs.profile(scenario, model, gpu), tokens, *limits, tokens if drafts else 0, model, gpu
    )
    return Deployment(model, gpu, scenario.cluster.tp, profile, trace, tokens)


def _evaluation_trace(scenario: Scenario, inputs: InputCache) -> Trace | None:
    """Return what evaluations generate, None without evaluations."""
    if (config := scenario.evaluation) is None:
        return None
    return inputs.trace(
        scenario.model_copy(update={"workload": config.lengths or scenario.workload})
    )


def _require_evaluable(prepared: Prepared) -> None:
    """Raise `InputError` where the evaluations of a scenario are not modelled."""
    scenario, system, trace = prepared.scenario, prepared.system, prepared.evaluation_trace
    if trace is None:
        return
    has_own, longest = trace is not prepared.trace, longest_allowed(trace)
    place = f"evaluation: system {system.name}"
    counted = "leave the section out, and give training.evaluate_every and evaluate_s"
    config: Any = scenario.evaluation
    _require_few_samples(
        f"evaluation: every {config.every:,} of {scenario.steps:,} updates, its prompts × samples",
        (config.at_start + scenario.steps // config.every)
        * (config.prompts or len(trace.group_starts) / len(trace.step_slices))
        * (config.samples or len(trace) / len(trace.group_starts)),
    )
    refuse(
        (
            scenario.training.evaluate_every,
            "evaluation: training.evaluate_every is given, too, which counts seconds for evaluations; leave one of them out",
        ),
        (
            system.evaluates is None,
            f"{place} loads weights worker by worker, and evaluations meanwhile are not modelled; {counted}",
        ),
        (
            system.adapt_split_every,
            f"{place} moves GPUs by adapt_split_every {system.adapt_split_every}, and evaluations meanwhile are not modelled; "
            f"use system.adapt_split_every=0, or {counted}",
        ),
        (
            system.tp_sizes or prepared.is_elastic,
            f"{place} moves GPUs, or changes the sizes of its workers, by its own rule, and evaluations meanwhile are not "
            f"modelled; {counted}",
        ),
        (
            scenario.evaluation
            and scenario.evaluation.prefer == "train"
            and not prepared.evaluates_beside,
            "evaluation.prefer is train: between steps nothing for training starts beside an evaluation; leave it out, or use "
            "evaluation.when=beside_training",
        ),
        (
            prepared.evaluates_beside and prepared.colocated,
            f"{place} trains on the GPUs that roll out, so nothing runs beside training; use when: between_steps",
        ),
        (
            system.dispatch.programs and not prepared.evaluates_beside,
            f"{place} admits programs, and those of training that wait for room would start during an evaluation between "
            "steps; use when: beside_training, or another system.dispatch",
        ),
        (
            has_own and (prepared.drafts or prepared.tail),
            f"{place} drafts from the text of the workload; leave out evaluation.lengths, so that its prompts are taken",
        ),
        (
            has_own and blocks_to_start(longest, prepared.limits) > prepared.limits.kv_blocks,
            f"evaluation.lengths: {trace.metadata.name} allows sequences of {longest:,} tokens, and the KV cache of a worker "
            f"holds {prepared.limits.kv_tokens:,}; use a larger tp, or a lower cap",
        ),
    )


def _require_few_samples(words: str, samples: float) -> None:
    """Raise `InputError` for more samples than a run can hold; `words` are what they are of."""
    refuse(
        (
            samples > MOST_SAMPLES,
            f"{words} are {round(samples):,} samples; stay under {MOST_SAMPLES:,}",
        ),
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
            cluster.prefill.tp and not cluster.prefill.gpus,
            f"cluster.prefill.tp is {cluster.prefill.tp}, and there are no prefill workers; give cluster.prefill.gpus, or "
            "leave it out",
        ),
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
    drafts = system.speculation
    if cluster.dp > 1 and (system.best_of_n or (drafts and (drafts.decoupled or drafts.training))):
        raise InputError(
            f"{ranks}: a drafter of GPUs of its own, one that trains on idle workers and best of N are not modelled of ranks "
            "in lock step; use another system.speculation, or 1"
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
        fetch_s_per_token=kv_bytes
        / min(tp, model.kv_heads)
        / (cluster.prefill.link_bytes_per_s or kind.network_bytes_per_s),
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
    gpus, prefill = cluster.gpus, cluster.prefill.gpus
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
                gpus < unit + prefill,
                f"system {system.name}: a rollout worker takes {unit} GPU{'s' * (unit > 1)}, those of its drafter included, "
                f"and {there} {gpus}{f', less {prefill} for prefill' if prefill else ''}; use more GPUs, or fewer "
                f"{'cluster.prefill.gpus' if prefill else 'draft_gpus'}",
            ),
            cause="GPUs of a worker",
        )
        workers = (gpus - prefill) // unit + extra
        return workers, cluster.train.gpus if cluster.train else gpus
    workers = (_share(gpus, system.rollout_share) - prefill) // unit
    train_gpus = gpus - prefill - workers * unit
    refuse(
        (
            workers <= 0 or train_gpus == 0,
            f"system {system.name}: rollout_share {system.rollout_share} of {gpus} GPUs"
            f"{f', {prefill} of them for prefill' if prefill else ''}, {unit} a worker, leaves "
            f"{max(workers, 0) * unit} rollout and {train_gpus} train GPUs; both need some: use more GPUs, or another share",
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
