"""The plan of drafting, made before a run: what the drafter takes of each worker (memory, GPUs),
how long its drafts take, and where these numbers come from.

Invariant: a plan knows the trace's lengths as a profiling run would (their means); it never looks
at what a sample will be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from simrl.errors import InputError, refuse
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.rollout_times import DraftCosts
from simrl.profile.shipped import shipped_profile
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Elastic, Toggle
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    TOGGLE,
    Decoding,
    Rule,
    Runs,
    chains,
    trees,
)
from simrl.speculation.deployment import Deployment, typical_context_tokens
from simrl.speculation.draft_times import (
    LAYER_S,
    DraftTimes,
    Overheads,
    eagle_drafts,
    graph_bytes,
    model_drafts,
    own_drafts,
    pass_bytes,
    profiled_drafts,
    quantising_s,
    text_drafts,
    with_messages,
)
from simrl.speculation.gates import batch_gate
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.matching import has_token_ids
from simrl.speculation.methods import EAGLE, MTP, NGRAM, QUANTISED, Decoupled, Speculation
from simrl.speculation.passes import run_passes
from simrl.speculation.run_model import draw_runs
from simrl.speculation.siblings import SiblingIndex
from simrl.speculation.specactor import (
    MOST_WINDOW,
    DecoupledPlan,
    draft_ladder,
    fit_draft,
    fit_verify,
    plan_decoupled,
    reconfiguration_table,
)
from simrl.speculation.toggle import first_accept_length
from simrl.speculation.trees import accept_length, tree_log_acceptances
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Trace

PREDICTED_RESPONSES = 64  # drawn from a run model, to predict what siblings accept
MOST_LN_DRIFT = 10.0  # more than `ModelAcceptance` allows does not matter
# Algorithm 1 tries no larger one; verifications that long cost more than they bring
MOST_PLANNED_WINDOW = 16
_READS_TOKENS = {
    "old_response": "compares whole responses",
    "own": "drafts from tokens",
}  # by drafter


@dataclass(frozen=True)
class DraftPlan:
    """A method of speculation on a deployment. Bytes are per GPU of a worker: the drafter's
    weights, its KV cache, the CUDA graphs of its strategies, and what the largest verification
    takes beyond a plain pass. `facts` go into the result: what was measured and what assumed."""

    speculation: Speculation
    inputs: SpeculationInputs
    times: DraftTimes
    weight_bytes: float
    kv_bytes_per_token: float
    facts: dict[str, Any]
    graph_bytes: float = 0.0
    verification_bytes: float = 0.0
    acceptance: ModelAcceptance | None = None  # of a model drafter
    decoupled: DecoupledPlan | None = None
    tree_times: tuple[DraftTimes, ...] = ()  # by strategy
    # Tokens/s of a request at a worker's share of a batch, where drafters or verifiers were
    # compared.
    rate: float = np.nan
    siblings_faster_beyond: float = np.inf  # drift from which on drafts of siblings are faster
    # what a load of weights takes longer, to make a drafter of them; in the tail, the load of its own
    load_s: float = 0.0
    kv_blocks: int = 0  # of a worker that gets it in the tail; 0: as with its first drafter

    @property
    def first_version(self) -> int:
        """The first policy version for which there is a learned drafter."""
        return self.speculation.model_free.before_version if self.speculation.model_free else 0

    @property
    def draft_gpus(self) -> int:
        """GPUs of a worker in addition to its tp."""
        return self.decoupled.draft_gpus if self.decoupled else 0


def plan_drafting(
    speculation: Speculation, inputs: SpeculationInputs, deployment: Deployment, gpus: int
) -> DraftPlan:
    """Plan a method of speculation on `gpus` rollout GPUs. Raise `InputError` where the trace or
    the inputs lack what the method needs."""
    if speculation.candidates:
        return _plan_first(speculation, inputs, deployment, gpus)
    if speculation.drafter == "model":
        plan = _plan_model(speculation, inputs, deployment, gpus)
    else:
        plan = _plan_text(speculation, inputs, deployment)
    facts: dict[str, Any] = {
        "method": speculation.label,
        "drafter": speculation.drafter,
        **plan.facts,
    }
    if inputs.acceptance_factor != 1.0:
        facts["acceptance_factor"] = inputs.acceptance_factor
    facts["draft_times"] = {"kind": plan.times.kind, "source": plan.times.source}
    plan = replace(plan, facts=facts)
    return _rated(plan, deployment, gpus) if speculation.verifiers else plan


def _plan_first(
    speculation: Speculation, inputs: SpeculationInputs, deployment: Deployment, gpus: int
) -> DraftPlan:
    """Plan the drafter that the draft ladder puts first for a worker's share of a batch (SpecActor
    §4.2, initial selection). The ladder rates all candidates alike, by drafting in turns with the
    target; Algorithm 1 then plans how the first one drafts."""
    plans = {}
    for name in speculation.candidates:
        if name == NGRAM:
            one = replace(speculation, candidates=(), drafter="ngram", model="", decoupled=None)
        else:
            one = replace(speculation, candidates=(), model=name)
        measured = (
            inputs.draft_profile is not None
            and read_profile(inputs.draft_profile).metadata.model == name
        )
        its_inputs = inputs if measured else inputs.model_copy(update={"draft_profile": None})
        plans[name] = plan_drafting(one, its_inputs, deployment, gpus)
    rungs = rungs_of(plans, deployment, _share(deployment, gpus), _ladder_windows(speculation))
    best = _rated(plans[next(iter(rungs))], deployment, gpus)
    rated = {
        name: {"acceptance": rung.acceptance, "speedup": rung.speedup}
        for name, rung in rungs.items()
    }
    first = {"first_drafter": next(iter(rungs)), "candidates": rated}
    return replace(best, facts=best.facts | first)


class Rung(NamedTuple):
    """A drafter on the draft ladder: its speed-up over plain decoding at its acceptance rate, with
    its best window, in turns with the target, and the tokens/s of a request."""

    acceptance: float
    window: int
    speedup: float
    tokens_per_s: float


def rungs_of(
    plans: Mapping[str, DraftPlan], deployment: Deployment, requests: int, windows: Sequence[int]
) -> dict[str, Rung]:
    """Return the rungs of planned drafters at a batch of `requests` (as far as their times reach),
    the fastest first; of equals, the first."""
    profile = deployment.profile
    reach = [_batches_up_to(requests, plan.times, profile) for plan in plans.values()]
    batches = min(reach, key=max)
    # As functions: to a type checker, a NamedTuple is a tuple.
    kv_tokens = typical_context_tokens(deployment.trace)
    verify = [v.__call__ for v in fit_verify(profile, windows[-1] + 1, batches, kv_tokens)]
    drafts = {name: plan.times.draft_s for name, plan in plans.items()}
    ladder, rungs = draft_ladder(drafts, verify, batches[-1], windows), dict[str, Rung]()
    for i, (name, plan) in enumerate(plans.items()):
        rate = token_rate(plan, deployment.trace)
        window = int(ladder.windows[i, round(rate * (len(ladder.acceptances) - 1))])
        speedup = ladder.speedup(name, rate)
        rungs[name] = Rung(rate, window, speedup, speedup / verify[0](batches[-1]))
    return dict(sorted(rungs.items(), key=lambda item: -item[1].speedup))


def _ladder_windows(speculation: Speculation) -> Sequence[int]:
    tokens = speculation.window.rule.start_tokens
    return range(1, MOST_WINDOW + 1) if speculation.ladder_window else (tokens,)


def _share(deployment: Deployment, gpus: int) -> int:
    """Return the requests of a worker's tp GPUs at the start of the first step."""
    _, first, end = deployment.trace.step_slices[0]
    return -(-deployment.tp * (end - first) // gpus)


def _rated(plan: DraftPlan, deployment: Deployment, gpus: int) -> DraftPlan:
    """Return a plan with its rate, and if drafting is coupled with the window of the ladder."""
    if plan.decoupled is not None:
        return replace(plan, rate=plan.decoupled.renewal)
    windows = _ladder_windows(plan.speculation)
    rung = rungs_of({"": plan}, deployment, _share(deployment, gpus), windows)[""]
    speculation = replace(plan.speculation, window=Fixed(tokens=rung.window))
    return replace(plan, speculation=speculation, rate=rung.tokens_per_s)


def _batches_up_to(requests: int, times: DraftTimes, profile: TableProfile) -> list[int]:
    """Return batch sizes for fits, two or more, up to `requests` or what the times cover."""
    most = max(min(requests, int(times.sequences[-1]), int(profile.tables.decode_sequences[-1])), 2)
    return sorted({1, 2, max(most // 4, 1), max(most // 2, 1), most})


def token_rate(plan: DraftPlan, trace: Trace) -> float:
    """Return the probability that a plan's drafter drafts the next token of a response of mean
    length right."""
    if plan.acceptance is not None:
        return plan.acceptance.by_position[0]
    lengths = np.full(
        PREDICTED_RESPONSES, max(round(float(trace.column("response_tokens").mean())), 2)
    )
    runs = draw_runs(plan.inputs.runs_of(NGRAM), lengths, np.arange(PREDICTED_RESPONSES))
    return float((runs.accepted > 0).mean())


def _plan_text(
    speculation: Speculation, inputs: SpeculationInputs, deployment: Deployment
) -> DraftPlan:
    trace, has_ids, factor = (
        deployment.trace,
        has_token_ids(deployment.trace),
        inputs.acceptance_factor,
    )
    reads = _READS_TOKENS.get(speculation.drafter)
    kept = inputs.acceptance.get(speculation.model)  # rates of tokens of old responses
    refuse(
        (
            speculation.bias and kept is None,
            f"speculation spec_rl: bias is {speculation.bias:g}, and a trace has no log-probs; give the rate at which tokens "
            "are kept under it (speculation.acceptance.old_response), or use bias 0",
        ),
        (
            reads and not has_ids and kept is None,
            f"{trace.metadata.name}: {speculation.name} {reads}, and the trace has no token ids; import it with its tokens, or "
            "use another method",
        ),
        (
            factor > 1.0,
            f"speculation.acceptance_factor is {factor:g}: a wrong draft of {speculation.name} cannot become right; give 1 "
            "or less",
        ),
        (
            factor < 1.0 and has_ids and speculation.drafter == "siblings",
            f"speculation.acceptance_factor is {factor:g}: {speculation.name} looks its drafts up while siblings run; give 1",
        ),
    )
    acceptance: Any = "measured from the trace's tokens"
    if kept is not None:
        acceptance = kept.model_dump()
    elif not has_ids:
        acceptance = inputs.runs_of(speculation.drafter).model_dump()  # type: ignore[arg-type]
    return DraftPlan(
        speculation, inputs, text_drafts(deployment.profile), 0.0, 0.0, {"acceptance": acceptance}
    )


def _plan_model(
    speculation: Speculation, inputs: SpeculationInputs, deployment: Deployment, gpus: int
) -> DraftPlan:
    acceptance, model = inputs.acceptance_of(speculation), speculation.model
    facts: dict[str, Any] = {"model": model, "acceptance": acceptance.model_dump()}
    times = _model_times(speculation, inputs, deployment)
    strategies = speculation.strategies.strategies if speculation.strategies else ()
    tree_times = tuple(
        _model_times(speculation, inputs, deployment, strategy.topk) for strategy in strategies
    )
    plan = DraftPlan(
        speculation,
        inputs,
        times,
        times.weight_bytes_per_gpu,
        times.kv_bytes_per_token_per_gpu,
        facts,
        acceptance=acceptance,
        tree_times=tree_times,
        load_s=quantising_s(times, model, deployment.gpu) if model in QUANTISED else 0.0,
    )
    if strategies:
        facts["trees"] = len(strategies)
    if speculation.model_free is not None:
        plan = replace(plan, siblings_faster_beyond=_siblings_faster_beyond(plan, deployment))
        facts["model_free"] = {
            "before_version": speculation.model_free.before_version,
            "beyond_drift": plan.siblings_faster_beyond
            if plan.siblings_faster_beyond < np.inf
            else None,
            "runs": inputs.runs_of("siblings").model_dump(),
        }
    if speculation.graphs and strategies:
        facts["graph_bytes"] = graph_bytes(speculation.graphs, deployment.model, strategies)
        plan = replace(plan, graph_bytes=facts["graph_bytes"])
    if speculation.decoupled:
        decoupled = _plan_decoupled(speculation.decoupled, acceptance, times, deployment, gpus)
        facts["plan"] = {
            name: getattr(decoupled, name) for name in ("draft_gpus", "window", "requests", "tgs")
        }
        facts["plan"]["renewal_rate"] = decoupled.renewal
        plan = replace(plan, decoupled=decoupled, weight_bytes=0.0, kv_bytes_per_token=0.0)
    return plan


def with_verification(
    plan: DraftPlan, deployment: Deployment, most_sequences: int, most_tokens: int, at_start: bool
) -> DraftPlan:
    """Return the plan with the memory of its largest verification, for an engine that runs up to
    `most_sequences` and computes up to `most_tokens` in a pass, whose reserve covers plain passes.
    `at_start`: all requests of a rollout come to their workers at its start.

    TLT §5.1: in large batches, static strategies run out of memory. An engine allocates its KV
    cache once, so the cache is smaller by the largest verification that the gate and the buckets
    allow. An elastic gate opens at few running requests and stays open: it bounds them only
    `at_start`. (Then, too, requests that wait for room in the KV cache while few run may make more;
    the memory that this takes is not planned.) Methods that capture no graphs of strategies verify
    within the reserve."""
    trees, gate = plan.speculation.strategies, plan.speculation.gate
    if plan.speculation.graphs is None or trees is None:
        return plan
    bound = gate.threshold if isinstance(gate, Elastic) and at_start else most_sequences
    verified, shape, tp = (
        trees.most_tokens(min(bound, most_sequences)),
        deployment.model,
        deployment.tp,
    )
    plain_bytes = pass_bytes(shape, tp, most_tokens, most_sequences)
    more_bytes = max(pass_bytes(shape, tp, verified, verified) - plain_bytes, 0.0)
    facts = plan.facts | {"most_verified_tokens": verified, "verification_bytes": more_bytes}
    return replace(plan, verification_bytes=more_bytes, facts=facts)


def _model_times(
    speculation: Speculation, inputs: SpeculationInputs, deployment: Deployment, branches: int = 1
) -> DraftTimes:
    """Return how long a model drafter takes, for trees of `branches` a level: as `draft_profile`
    measured it, else derived."""
    gpu, model = deployment.gpu, deployment.model
    kv_tokens = typical_context_tokens(deployment.trace)
    # After a verification the host starts a round as it starts a pass.
    host_s = max(deployment.profile.even.between_passes_s, LAYER_S)
    round_s = next(s for s in (inputs.draft_round_s, speculation.round_s, host_s) if s is not None)
    if speculation.model == EAGLE:
        overheads = Overheads(round_s, speculation.level_s)
        shape = model.model_copy(update={"vocab": speculation.draft_vocab or model.vocab})
        return eagle_drafts(shape, gpu, deployment.tp, kv_tokens, branches, overheads)
    if speculation.model in (MTP, *QUANTISED):
        precision = "" if speculation.model == MTP else speculation.model
        times = own_drafts(deployment.profile, model, gpu, precision, kv_tokens)
        return replace(times, round_s=times.round_s + round_s)
    shape = model_shape(speculation.model)
    tp = 1 if speculation.decoupled or shape.heads % deployment.tp else deployment.tp
    path = inputs.draft_profile or shipped_profile(shape.name, gpu.name, tp)
    if path is None:
        return model_drafts(shape, gpu, tp, kv_tokens, branches, Overheads(round_s))
    profile = read_profile(path)
    m = profile.metadata
    plain = (m.dp, m.ep, m.precision, m.kv_precision) == (1, 1, "bf16", "bf16")
    if (m.model, m.gpu, m.tp) != (shape.name, gpu.name, tp) or not plain:
        raise InputError(
            f"{inputs.draft_profile}: a profile of {m.model} on {m.gpu} tp{m.tp}, the drafter is {shape.name} on {gpu.name} "
            f"tp{tp} in bf16; name the profile that belongs to it (speculation.draft_profile)"
        )
    # Levels follow each other without going back to the host's loop.
    return profiled_drafts(
        profile.with_corrections(between_passes_s=0.0), shape, kv_tokens, round_s
    )


def _plan_decoupled(
    method: Decoupled,
    acceptance: ModelAcceptance,
    times: DraftTimes,
    deployment: Deployment,
    gpus: int,
) -> DecoupledPlan:
    """Run Algorithm 1 before the run; it does not choose what the method fixes."""
    profile, tp, times = deployment.profile, deployment.tp, with_messages(times, deployment.gpu)
    _, first, end = deployment.trace.step_slices[0]
    requests = end - first
    batches = _batches_up_to(method.requests or requests, times, profile)
    most_tokens, kv_tokens = (
        max(MOST_PLANNED_WINDOW, method.window or 0),
        typical_context_tokens(deployment.trace),
    )
    draft = fit_draft(lambda b: float(np.interp(b, times.sequences, times.step_s)), batches)
    verifiers = {tp: fit_verify(profile, most_tokens + method.in_turns, batches, kv_tokens)}
    if method.requests:  # for these alone
        gpus, requests = tp + (method.draft_gpus or 1), method.requests
    chosen = (
        method.objective,
        method.draft_gpus,
        method.window,
        method.in_turns,
        float(times.round_s[-1]),
    )
    return plan_decoupled(draft, verifiers, gpus, requests, acceptance.by_position[0], *chosen)


def _siblings_faster_beyond(plan: DraftPlan, deployment: Deployment) -> float:
    """Return the drift of a learned drafter's acceptance beyond which drafts from siblings are
    predicted to be faster; infinity where they never are, or the method does not ask. Compares
    tokens per second of one response of typical length, drafted with the best of the trees for it.
    The acceptance of siblings is the scenario's run model, also on a trace with token ids.
    """
    speculation, acceptance = plan.speculation, plan.acceptance
    assert speculation.model_free is not None and acceptance is not None
    if speculation.strategies is None or not speculation.model_free.if_slower:
        return np.inf
    profile, kv_tokens = deployment.profile, typical_context_tokens(deployment.trace)
    most = max(strategy.tokens_to_verify for strategy in speculation.strategies.strategies)
    arms = [
        (
            tree_log_acceptances(acceptance, strategy),
            profile.verify_s(1, strategy.verified_tokens - 1, kv_tokens)
            + times.draft_s(1, strategy.draft_depth),
        )
        for strategy, times in zip(speculation.strategies.strategies, plan.tree_times, strict=True)
        if strategy.tokens_to_verify == most
    ]
    model, window = plan.inputs.runs_of("siblings"), speculation.window.rule
    lengths = np.full(PREDICTED_RESPONSES, max(round(model.typical_tokens), 2))
    passes = run_passes(draw_runs(model, lengths, np.arange(PREDICTED_RESPONSES)), lengths, window)
    drafted = float(passes.drafted.sum() / passes.passes.sum())
    pass_s = profile.verify_s(1, drafted, kv_tokens) + text_drafts(profile).draft_s(
        1, window.most_tokens
    )
    from_siblings = passes.accept_length / pass_s

    def gain(ln_drift: float) -> float:
        return (
            max(accept_length(logs * np.exp(ln_drift)) / seconds for logs, seconds in arms)
            - from_siblings
        )

    if gain(0.0) < 0:
        return 0.0
    from scipy.optimize import brentq  # takes 0.3 s to import

    return float(np.exp(brentq(gain, 0.0, MOST_LN_DRIFT))) if gain(MOST_LN_DRIFT) < 0 else np.inf


def decoding_of(
    plan: DraftPlan,
    runs: Runs | None,
    siblings: SiblingIndex | None,
    deployment: Deployment,
    max_num_seqs: int,
) -> Decoding:
    """Return a plan as engines take it, with the drafts of this trace's responses."""
    speculation, times = plan.speculation, _executed(plan, deployment)
    rule = Rule(window=speculation.window.rule, own_text=speculation.own_text)
    parts: dict[str, Any] = {}
    if plan.decoupled is not None:
        assert speculation.decoupled is not None
        every, in_turns = speculation.decoupled.reconfigure_every, speculation.decoupled.in_turns
        rule = rule._replace(
            window=Fixed(tokens=plan.decoupled.window).rule, decoupled=not in_turns
        )
        rule = rule._replace(reconfigure_every=every)
        # The drafters of a worker share its requests.
        parts["draft_sequences"] = times.sequences * plan.decoupled.draft_gpus
        parts["draft_gpus"] = plan.decoupled.draft_gpus
        if not in_turns:
            windows, coupled = reconfiguration_table(
                plan.decoupled, speculation.decoupled.objective
            )
            parts |= {"best_window": windows, "best_coupled": coupled}
    elif isinstance(speculation.gate, Toggle):
        ramp, margin = speculation.gate.ramp or max_num_seqs // 2, speculation.gate.margin
        window = Fixed(tokens=speculation.gate.ladder[0]).rule
        rule = rule._replace(gate=TOGGLE, threshold=ramp, margin=margin, window=window)
        parts["accept_length"] = first_accept_length(speculation.gate)
    elif isinstance(speculation.gate, Elastic):
        threshold, patience = speculation.gate.threshold, speculation.gate.patience
        rule = rule._replace(gate=ELASTIC, threshold=threshold, patience=patience)
    elif speculation.gate == "batch":
        rule = rule._replace(gate=BATCH)
        parts["gate_batch"] = draft_costs(plan, deployment, max_num_seqs).largest_batch
    if plan.tree_times:
        assert plan.acceptance is not None and speculation.strategies is not None
        logs = [
            tree_log_acceptances(plan.acceptance, strategy)
            for strategy in speculation.strategies.strategies
        ]
        decoding = trees(rule, speculation.strategies, plan.tree_times, logs)
    else:
        longest = MOST_PLANNED_WINDOW if plan.decoupled else speculation.window.rule.most_tokens
        decoding = chains(rule, times, plan.acceptance, longest)
    if speculation.model in QUANTISED:
        parts["own_kv_tokens"] = float(typical_context_tokens(deployment.trace))
    if runs is not None:
        parts["runs"] = runs
    if siblings is not None:
        parts["siblings"] = siblings
    return decoding._replace(**parts)


def _executed(plan: DraftPlan, deployment: Deployment) -> DraftTimes:
    """Return the times of a plan's drafts, with its messages if the drafter has GPUs of its own."""
    return with_messages(plan.times, deployment.gpu) if plan.decoupled else plan.times


def draft_costs(plan: DraftPlan, deployment: Deployment, max_num_seqs: int) -> DraftCosts:
    """Return what drafts cost a worker, and up to which batch it drafts, for predictions
    (`RolloutTimes`)."""
    gate, times = plan.speculation.gate, _executed(plan, deployment)
    largest = np.full(1, gate.threshold if isinstance(gate, Elastic) else 1 << 40)
    if gate == "batch" or isinstance(gate, Toggle):
        kv_tokens = typical_context_tokens(deployment.trace)
        window = plan.speculation.window.rule
        largest = batch_gate(
            deployment.profile,
            times,
            window,
            kv_tokens,
            max_num_seqs,
            deployment.max_num_batched_tokens,
        )
    return DraftCosts(times.sequences, times.round_s, times.step_s, largest)


def with_text_times(decoding: Decoding, profile: TableProfile) -> Decoding:
    """Return the decoding with the drafting times of a text drafter."""
    times, arms = text_drafts(profile), len(decoding.round_s)
    return decoding._replace(
        draft_sequences=times.sequences,
        round_s=np.tile(times.round_s, (arms, 1)),
        step_s=np.tile(times.step_s, (arms, 1)),
        prefill_s=0.0,
    )
