"""What a judge needs: its engines, its step times, what it reads and writes. It is checked as the
policy's engines are.

Invariant: what a judge writes about a sample depends on the seed and the sample alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.dispatch.judges import Requests
from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.pipelines.batchwise import pauses_for_rewards
from simrl.profile.extension import covering
from simrl.profile.model_shape import ModelShape, model_shape, require_kv_heads
from simrl.profile.precision import weight_bytes_per_gpu
from simrl.scenario.model import JudgeConfig, Scenario, VerdictLengths
from simrl.simulate.cache import InputCache
from simrl.simulate.memory import engine_limits
from simrl.simulate.training_checks import require_divisor
from simrl.speculation.deployment import Deployment
from simrl.speculation.plan import DraftPlan
from simrl.systems.system import System
from simrl.trace.draws import normals
from simrl.trace.lognormal import cut_tokens, location_of
from simrl.trace.trace import Trace, TraceMetadata
from simrl.training.weight_sync import PINNED_SHARE


class _Stream(IntEnum):
    """The purpose of draws: none that a trace has."""

    VERDICT = 0x4A554447


@dataclass(frozen=True)
class JudgeEngines(Deployment):
    """The engines of a judge: `workers` of them, each on `lanes` of the rollout's lanes if
    colocated. Its trace has a row for each request. `swap_s`: seconds in which the weights of one
    side leave the GPUs and the weights of the other come; None if it has GPUs of its own."""

    config: JudgeConfig
    limits: Limits
    workers: int
    lanes: int
    requests: Requests
    swap_s: float | None

    @property
    def gpus(self) -> int:
        """GPUs that the judge adds to the cluster's."""
        return self.config.gpus or 0

    @property
    def facts(self) -> dict[str, Any]:
        """The metadata of a result."""
        return {
            "model": self.model.name,
            "gpus": self.gpus,
            "gpu": self.gpu.name,
            "tp": self.tp,
            "engines": self.workers,
            "kv_cache_tokens_per_engine": self.limits.kv_tokens,
            "profile": self.profile.metadata.source,
            "profile_kind": self.profile.metadata.kind,
            **({} if self.swap_s is None else {"swap_s": self.swap_s}),
        }


def judge_engines(
    scenario: Scenario,
    system: System,
    policy: Deployment,
    drafts: DraftPlan | None,
    workers: int,
    worker_gpus: int,
    inputs: InputCache,
) -> JudgeEngines | None:
    """Return the engines of the scenario's judge, None without one, beside `workers` of the policy
    of `worker_gpus` each. Raise `InputError` for a judge that does not fit its GPUs, or a colocated
    one whose turns are not modelled."""
    if (judge := scenario.judge) is None:
        return None
    of_judge, model = scenario.of_judge(judge), model_shape(judge.model)
    cluster, kind = of_judge.cluster, of_judge.cluster.rollout_kind
    require_divisor("judge.tp", judge.tp, model.heads, f"attention heads of {model.name}")
    require_kv_heads("judge.tp", judge.tp, model)
    if judge.gpus is not None:
        require_divisor("judge.tp", judge.tp, judge.gpus, "GPUs of the judge")
    else:
        _require_turns(scenario, system, drafts, workers, worker_gpus)
    trace, lengths = _requests(policy.trace, judge, scenario.seed)
    engine, longest = judge.engine, int((trace.column("prompt_tokens").max())) + int(lengths.max())
    try:
        profile = covering(
            inputs.profile(of_judge, model, kind),
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            longest,
            0,
            model,
            kind,
        )
        deployment = Deployment(model, kind, judge.tp, profile, trace)
        caching = engine.prefix_caching is not False
        limits = engine_limits(cluster, engine, judge.precision, deployment, [], caching)
    except InputError as error:
        raise InputError(f"judge: {error}", error.cause) from error
    lanes = 1 if judge.gpus else judge.tp // worker_gpus
    return JudgeEngines(
        **vars(deployment),
        config=judge,
        limits=limits,
        workers=judge.gpus // judge.tp if judge.gpus else workers // lanes,
        lanes=lanes,
        requests=Requests(judge.prompt_tokens, lengths.tolist(), judge.per == "group"),
        swap_s=None if judge.gpus else _swap_s(scenario, system, model, judge),
    )


def _require_turns(
    scenario: Scenario, system: System, drafts: DraftPlan | None, workers: int, worker_gpus: int
) -> None:
    """Raise `InputError` where a judge cannot take turns with the rollout engines."""
    tp, own = scenario.judge.tp if scenario.judge else 1, "give it GPUs of its own, judge.gpus"
    trained = drafts is not None and drafts.speculation.training is not None
    refuse(
        (
            not pauses_for_rewards(system.pipeline),
            f"judge: without gpus it takes turns with the rollout engines, and the rollout of {system.name} goes on while "
            f"rewards are computed; {own}",
        ),
        (
            tp % worker_gpus or tp // worker_gpus > workers,
            f"judge.tp is {tp}: without gpus, an engine of the judge takes the GPUs of whole rollout workers, {workers} of "
            f"{worker_gpus}; use a multiple of {worker_gpus}, or {own}",
        ),
        (trained, f"judge: system {system.name} trains its drafter on idle rollout GPUs; {own}"),
        (
            scenario.faults,
            f"judge: turns with rollout engines that have faults are not modelled; {own}",
        ),
    )


def _swap_s(scenario: Scenario, system: System, model: ModelShape, judge: JudgeConfig) -> float:
    """Return the seconds in which the judge's weights come from pinned host memory, or go there,
    and the policy's the other way, unless its own sleep is part of the load (`_sleep_s`)."""
    training, cluster = scenario.training, scenario.cluster
    copied = weight_bytes_per_gpu(model, judge.tp, precision=judge.precision.weights)
    if not (training.rollout_offload and system.rollout_share is None):
        policy, weights = model_shape(scenario.model), scenario.precision.weights
        copied += weight_bytes_per_gpu(policy, cluster.tp, cluster.dp, cluster.ep, weights)
    return copied / (PINNED_SHARE * cluster.rollout_kind.host_bytes_per_s)


def _requests(trace: Trace, judge: JudgeConfig, seed: int) -> tuple[Trace, NDArray[np.int64]]:
    """Return the requests to the judge, one for each response or group of a trace, as a trace, and
    the tokens of its response to each row."""
    starts = trace.group_starts if judge.per == "group" else np.arange(len(trace))
    shown = trace.column("response_tokens").astype(np.int64) + trace.observation_tokens()
    read = trace.column("prompt_tokens")[starts] + np.add.reduceat(shown, starts)
    keys = {key: trace.column(key)[starts] for key in ("step", "epoch", "prompt_id", "sample")}
    written = judge.response_tokens
    if isinstance(written, VerdictLengths):
        draws = normals(seed, _Stream.VERDICT, *keys.values())
        mean, sigma, cap = written.mean_tokens, written.sigma, written.cap_tokens
        location = location_of(mean, sigma, cap, "judge.response_tokens.mean_tokens")
        tokens = cut_tokens(location + sigma * draws, cap)
    else:
        # A classifier's score is a pass that yields one token.
        tokens = np.full(len(starts), max(written, 1), np.int32)
    columns = {**keys, "prompt_tokens": read + judge.prompt_tokens, "response_tokens": tokens}
    metadata = TraceMetadata(
        name="requests to the judge",
        kind=trace.metadata.kind,
        source=trace.metadata.source,
        tokenizer=trace.metadata.tokenizer,
        cap_tokens=int(tokens.max()),
    )
    rows = np.diff(starts, append=len(trace))
    return Trace.from_columns(columns, metadata), np.repeat(tokens, rows).astype(np.int64)
