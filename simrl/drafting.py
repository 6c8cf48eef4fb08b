"""Drafting: from what each sample's drafts come, in one simulation of one method of speculation.

Invariant: who drafts from what is decided when a sample begins at a worker, from what was finished by then, and anew only where
other weights make the worker change its drafter; siblings lend what they have so far. An index of the history is there once
the prompt's epoch is complete and its builders were done; nobody drafts from a response that is yet to come, though the trace
knows it.

`plan_drafting` looks at a scenario before anything runs: what the drafter takes of each worker (memory, GPUs), and where its
numbers come from. `Drafting` is what workers ask while it runs.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.engine import Engine
from simrl.errors import InputError
from simrl.hardware import Gpu, ModelShape, model_shape
from simrl.history import LengthHistory
from simrl.profile import TableProfile, read_profile
from simrl.rollout import Rollout
from simrl.speculation.acceptance import ModelAcceptance, sample_key
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    MODEL,
    OPEN,
    RUNS,
    SIBLINGS,
    Decoding,
    chains,
    packed,
    read_only,
    rules,
    trees,
)
from simrl.speculation.draft_times import DraftTimes, eagle_drafts, model_drafts, profiled_drafts, text_drafts_of
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.draws import mixed
from simrl.speculation.gates import Elastic, batch_gate
from simrl.speculation.graph_memory import graph_bytes
from simrl.speculation.history import history_runs
from simrl.speculation.inputs import HistoryWorkers, SpeculationInputs
from simrl.speculation.methods import EAGLE, Speculation
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import run_passes
from simrl.speculation.refusals import accepted_prefixes, with_refusals
from simrl.speculation.run_model import draw_runs, draw_trace_runs
from simrl.speculation.siblings import SiblingIndex, WholeResponseRuns, sibling_index, whole_response_runs
from simrl.speculation.specactor import Plan, fit_draft, fit_verify, plan_decoupled, reconfiguration_table
from simrl.speculation.teacher_forced import drafter_runs
from simrl.speculation.trees import accept_length, tree_log_acceptances
from simrl.speculation.windows import Fixed
from simrl.spot_trainer import SpotTrainer
from simrl.trace import Response, Sample, Trace

Ints = NDArray[np.int64]
PREDICTED_RESPONSES = 64  # drawn from a run model, to say what siblings accept
MOST_LN_DRIFT = 10.0  # more than `ModelAcceptance` allows does not matter
MANY_UPDATES = 1e9  # after which a drafter that is not trained has drifted as far as it can
MOST_PLANNED_WINDOW = 16  # Algorithm 1 tries no larger one; verifications that long are dearer than what they bring


@dataclass(frozen=True)
class DraftPlan:
    """What a method of speculation means for a scenario. Bytes are those on each GPU of a worker; `draft_gpus` are a worker's
    beside its tp. `facts` go into the result: what was measured, what assumed."""

    speculation: Speculation
    inputs: SpeculationInputs
    times: DraftTimes
    acceptance: ModelAcceptance | None
    decoupled: Plan | None
    weight_bytes: float
    kv_bytes_per_token: float
    facts: dict[str, Any]
    tree_times: tuple[DraftTimes, ...] = ()  # of each strategy
    siblings_faster_beyond: float = np.inf  # so much drift

    @property
    def first_version(self) -> int:
        """The first policy version for which there is a learned drafter."""
        return self.speculation.model_free.before_version if self.speculation.model_free else 0

    @property
    def draft_gpus(self) -> int:
        return self.decoupled.draft_gpus if self.decoupled else 0


def plan_drafting(
    speculation: Speculation,
    inputs: SpeculationInputs,
    trace: Trace,
    profile: TableProfile,
    target: ModelShape,
    gpu: Gpu,
    tp: int,
    gpus: int,
) -> DraftPlan:
    """Raises `InputError` where the trace or the inputs lack what the method needs."""
    kv_tokens = typical_context(trace)
    facts: dict[str, Any] = {"method": speculation.label, "drafter": speculation.drafter}
    has_ids = "response_ids" in trace.table.column_names
    acceptance, plan, graphs, faster_beyond = None, None, 0.0, np.inf
    tree_times: tuple[DraftTimes, ...] = ()
    if speculation.drafter == "model":
        acceptance = inputs.acceptance_of(speculation)
        facts |= {"model": speculation.model, "acceptance": acceptance.model_dump()}
        times = _model_times(speculation, inputs, target, gpu, tp, kv_tokens)
        if speculation.strategies:
            facts["trees"] = len(speculation.strategies.strategies)
            tree_times = tuple(
                _model_times(speculation, inputs, target, gpu, tp, kv_tokens, strategy.topk)
                for strategy in speculation.strategies.strategies
            )
        if speculation.model_free is not None:
            faster_beyond = siblings_faster_beyond(speculation, inputs, acceptance, tree_times, profile, kv_tokens)
            facts["model_free"] = {
                "before_version": speculation.model_free.before_version,
                "beyond_drift": faster_beyond if faster_beyond < np.inf else None,
                "runs": inputs.runs_of("siblings").model_dump(),
            }
        if speculation.graphs and speculation.strategies:
            graphs = graph_bytes(speculation.graphs, target, speculation.strategies.strategies)
            facts["graph_bytes"] = graphs
        if speculation.decoupled:
            plan = _plan(speculation, acceptance, trace, profile, times, tp, gpus, kv_tokens)
            facts["plan"] = {
                "draft_gpus": plan.draft_gpus,
                "window": plan.window,
                "requests": plan.requests,
                "tgs": plan.tgs,
                "renewal_rate": plan.renewal,
            }
    else:
        times = text_drafts_of(profile)
        if speculation.drafter == "old_response" and not has_ids:
            raise InputError(
                f"{trace.metadata.name}: {speculation.name} compares whole responses, and the trace has no token ids; "
                "import it with its tokens, or use another method"
            )
        _require_factor(speculation, inputs.acceptance_factor, has_ids)
        if speculation.drafter == "own" and not has_ids:
            raise InputError(
                f"{trace.metadata.name}: {speculation.name} drafts from tokens, and the trace has no token ids; import it with "
                "its tokens, or use another method"
            )
        facts["acceptance"] = (
            "measured from the trace's tokens" if has_ids else inputs.runs_of(speculation.drafter).model_dump()  # type: ignore[arg-type]
        )
    if inputs.acceptance_factor != 1.0:
        facts["acceptance_factor"] = inputs.acceptance_factor
    facts["draft_times"] = {"kind": times.kind, "source": times.source}
    own = plan is None  # the drafter is on the worker's own GPUs
    return DraftPlan(
        speculation=speculation,
        inputs=inputs,
        times=times,
        acceptance=acceptance,
        decoupled=plan,
        weight_bytes=(times.weight_bytes_per_gpu if own else 0.0) + graphs,
        kv_bytes_per_token=times.kv_bytes_per_token_per_gpu if own else 0.0,
        facts=facts,
        tree_times=tree_times,
        siblings_faster_beyond=faster_beyond,
    )


def _require_factor(speculation: Speculation, factor: float, has_ids: bool) -> None:
    """Whether a text drafter can be executed with so much acceptance beside its own."""
    if factor > 1.0:
        raise InputError(
            f"speculation.acceptance_factor is {factor:g}: no token that {speculation.name} drafted wrong can be made right; "
            "give 1 or less"
        )
    if factor < 1.0 and has_ids and speculation.drafter == "siblings":
        raise InputError(
            f"speculation.acceptance_factor is {factor:g}: {speculation.name} looks its drafts up while siblings run; give 1"
        )


def typical_context(trace: Trace) -> int:
    """Tokens of a sequence that is half done: what a profiling run before the training would take."""
    return round(float(trace.column("prompt_tokens").mean()) + float(trace.column("response_tokens").mean()) / 2)


def _model_times(
    speculation: Speculation,
    inputs: SpeculationInputs,
    target: ModelShape,
    gpu: Gpu,
    tp: int,
    kv_tokens: int,
    branches: int = 1,
) -> DraftTimes:
    round_s = speculation.round_s if inputs.draft_round_s is None else inputs.draft_round_s
    if speculation.model == EAGLE:
        return eagle_drafts(target, gpu, tp, kv_tokens, branches, round_s, level_s=speculation.level_s)
    shape = model_shape(speculation.model)
    split = 1 if speculation.decoupled or shape.heads % tp else tp
    if inputs.draft_profile is not None:
        profile = read_profile(inputs.draft_profile)
        found = (profile.metadata.model, profile.metadata.gpu, profile.metadata.tp)
        if found != (shape.name, gpu.name, split):
            raise InputError(
                f"{inputs.draft_profile}: a profile of {found[0]} on {found[1]} tp{found[2]}, the drafter is {shape.name} on "
                f"{gpu.name} tp{split}; name the profile that belongs to it (speculation.draft_profile)"
            )
        # Levels follow each other without going back to the host's loop.
        alone = profile.with_corrections(between_passes_s=0.0)
        return profiled_drafts(alone, shape, kv_tokens, round_s)
    return model_drafts(shape, gpu, split, kv_tokens, branches, round_s)


def _plan(
    speculation: Speculation,
    acceptance: ModelAcceptance,
    trace: Trace,
    profile: TableProfile,
    times: DraftTimes,
    tp: int,
    gpus: int,
    kv_tokens: int,
) -> Plan:
    """Algorithm 1, before the run; what the method fixes, it does not choose."""
    asked = speculation.decoupled
    assert asked is not None
    _, first, end = trace.step_slices[0]
    requests = end - first
    most = max(min(requests, int(times.sequences[-1]), int(profile.tables.decode_sequences[-1])), 2)
    batches = sorted({1, 2, max(most // 4, 1), max(most // 2, 1), most})
    return plan_decoupled(
        # As it is executed: a decoupled drafter goes from pass to pass, without rounds.
        fit_draft(lambda b: float(np.interp(b, times.sequences, times.step_s)), batches),
        {tp: fit_verify(profile, max(MOST_PLANNED_WINDOW, asked.window or 0), batches, kv_tokens)},
        gpus,
        requests,
        acceptance.by_position[0],
        asked.objective,
        asked.draft_gpus,
        asked.window,
    )


class _IndexBuilders:
    """HistoSpec's history workers: a queue of indexes to build, served by so many builders, kept while there is memory.

    The index of a prompt's epoch is asked for once all of its responses are finished (of a group of which one was dropped
    there is none: what the trace says of its drafts holds for whole groups). Those of older epochs give way to newer ones;
    where there are none left, a further index is not kept: the next epoch meets its prompts in the same order, so evicting
    the oldest of an epoch would evict what is needed first.
    """

    def __init__(self, parameters: HistoryWorkers, trace: Trace) -> None:
        self._parameters = parameters
        self._epochs = 1 + int(trace.column("epoch").max())
        groups = zip(trace.column("prompt_id").tolist(), trace.column("epoch").tolist(), strict=True)
        self._group_size = Counter(groups)
        self._free_s = [0.0] * min(parameters.workers, 4096)
        self._finished: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # tokens by sample
        self._ready_s: dict[tuple[int, int], float] = {}
        self._kept: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # by epoch, oldest first
        self._bytes: dict[tuple[int, int], float] = {}
        self._epoch_bytes: dict[int, float] = defaultdict(float)

    def finished(self, sample: Sample, tokens: int, now_s: float) -> None:
        """A response is there."""
        place = (sample.prompt_id, sample.epoch)
        size = self._group_size[sample.prompt_id, sample.epoch % self._epochs]
        if sample.sample < size:  # not one beyond those of the trace
            self._finished[place][sample.sample] = tokens
            if len(self._finished[place]) == size and place not in self._ready_s:
                self._build(place, sum(self._finished[place].values()), now_s)

    def ready(self, prompt_id: int, epochs: range, now_s: float) -> bool:
        """Whether all indexes that a prompt has in these epochs can be asked now."""
        return all(
            self._ready_s.get((prompt_id, epoch), np.inf) <= now_s
            for epoch in epochs
            if (prompt_id, epoch % self._epochs) in self._group_size
        )

    def _build(self, place: tuple[int, int], tokens: int, now_s: float) -> None:
        p = self._parameters
        own = tokens * p.bytes_per_token
        staying = sum(kept for epoch, kept in self._epoch_bytes.items() if epoch >= place[1])
        if staying + own > p.memory_bytes:  # also without all older ones
            return
        while sum(self._epoch_bytes.values()) + own > p.memory_bytes:
            self._evict(min(self._epoch_bytes))
        self._kept[place[1]].append(place)
        self._bytes[place] = own
        self._epoch_bytes[place[1]] += own
        start_s = max(heapq.heappop(self._free_s), now_s)
        self._ready_s[place] = start_s + tokens / p.tokens_per_s
        heapq.heappush(self._free_s, self._ready_s[place])

    def _evict(self, epoch: int) -> None:
        """The oldest index of an epoch goes."""
        gone = self._kept[epoch].popleft()
        del self._ready_s[gone]
        self._epoch_bytes[epoch] -= self._bytes.pop(gone)
        if not self._kept[epoch]:
            del self._kept[epoch], self._epoch_bytes[epoch]


class Drafting:
    """What workers ask: how their engines decode, and from what a sample drafts. One for all workers of a simulation."""

    def __init__(
        self,
        plan: DraftPlan,
        trace: Trace,
        profile: TableProfile,
        max_num_seqs: int,
        seed: int,
        spot: SpotTrainer | None = None,
    ) -> None:
        self.spot = spot
        self._plan = plan
        self._speculation = plan.speculation
        self._acceptance = plan.acceptance
        self._seed = seed
        self._runs: AcceptRuns | None = None
        self._siblings: SiblingIndex | None = None
        self._old: WholeResponseRuns | None = None
        self._builders: _IndexBuilders | None = None
        self._lengths = LengthHistory() if plan.speculation.budget else None
        self._edges: dict[int, tuple[int, NDArray[np.float64]]] = {}  # by epoch: how many were finished, the edges
        self._finished: set[tuple[int, int, int]] = set()  # prompt, epoch, sample
        self._finished_in: Counter[int] = Counter()  # by epoch
        if plan.speculation.drafter == "history":
            self._builders = _IndexBuilders(plan.inputs.history_workers, trace)
        if plan.speculation.drafter == "old_response":
            old = whole_response_runs(trace)
            self._old = old._replace(
                accepted=accepted_prefixes(old.accepted, trace, seed, plan.inputs.acceptance_factor)
            )
        kv_tokens = typical_context(trace)
        worst = plan.acceptance.drift(MANY_UPDATES) if plan.acceptance else 1.0
        falls_back = plan.first_version > 0 or worst > plan.siblings_faster_beyond
        if plan.speculation.drafter == "siblings" or falls_back:
            if _has_ids(trace):
                self._siblings = read_only(sibling_index(trace))
            else:
                drawn = draw_trace_runs(plan.inputs.runs_of("siblings"), trace, seed)
                factor = plan.inputs.acceptance_factor
                self._runs = _with_siblings(with_refusals(drawn, trace, seed, factor), trace)
        elif plan.speculation.drafter in ("history", "ngram", "own"):
            self._runs = text_runs(plan.speculation, plan.inputs, trace, seed)
        self._own = _decoding(plan, self._runs, self._siblings, profile, kv_tokens, max_num_seqs)
        self._model_free = _with_times(self._own, text_drafts_of(profile)) if falls_back else None
        self.decoding = self._decoding_of(0)

    def key(self, worker: int) -> int:
        """That of the draws of a worker's bandit."""
        return int(mixed(self._seed, worker))

    def give(self, engine: Engine, slot: int, sample: Sample, response: Response, now_s: float) -> None:
        """A sample begins at an engine: from now on it drafts from what there is for it."""
        if self._old is not None:
            old, accepted, ago = (int(column[response.row]) for column in self._old)
            if (sample.prompt_id, sample.epoch - ago, sample.sample) not in self._finished:
                return
            if old and not engine.generated_tokens(slot):
                engine.verify_old(slot, old, accepted)
        elif self._acceptance is not None and engine.decoding is not self._model_free:
            key = sample_key(self._seed, sample.prompt_id, sample.epoch, sample.sample)
            engine.draft_from(slot, MODEL, key, self._acceptance.hardness(key, response.tokens))
        elif self._siblings is not None:
            engine.draft_from(slot, SIBLINGS, response.row)
        elif self._runs is not None:
            first = int(self._runs.first[response.row])
            earlier = range(max(sample.epoch - self._speculation.epochs_back, 0), sample.epoch)
            ready = self._builders is None or self._builders.ready(sample.prompt_id, earlier, now_s)
            if first >= 0 and ready:
                engine.draft_from(slot, RUNS, first, window=self._budget(sample))

    def begins(self, sample: Sample) -> None:
        """A sample begins, or goes on, at a worker."""
        if self._lengths is not None:
            self._lengths.expect(sample)

    def ends(self, rollout: Rollout, now_s: float) -> None:
        """It is finished there, or leaves."""
        sample = rollout.sample
        if rollout.done:
            self._finished.add((sample.prompt_id, sample.epoch, sample.sample))
            self._finished_in[sample.epoch] += 1
        if self._builders is not None and rollout.done:
            self._builders.finished(rollout.sample, rollout.tokens, now_s)
        if self._lengths is not None:
            if rollout.done:
                self._lengths.observe(rollout)
            else:
                self._lengths.withdrawn(rollout.sample)

    def weights_loaded(self, engine: Engine, policy_version: int) -> bool:
        """An engine has other weights: how far they are from the drafter's, and an elastic gate that is shut again. Siblings
        that are over are forgotten. Returns whether samples draft from something else now, and have to be given it.

        A drafter that is trained comes with the weights as it was saved when they were made; any other stays as it was at
        first."""
        engine.new_rollout()
        engine.forget_rows()
        if self._acceptance is not None:
            engine.drift = self._acceptance.drift(self._updates_behind(policy_version))
        decoding = self._decoding_of(policy_version)
        if decoding is engine.decoding:
            return False
        engine.decoding = decoding
        return True

    def _updates_behind(self, policy_version: int) -> float:
        if self.spot is not None:
            return self.spot.updates_behind(policy_version)
        return max(policy_version - self._plan.first_version, 0)

    def _decoding_of(self, policy_version: int) -> Decoding:
        """With the learned drafter, or with what takes its place as long as there is none, or it is slower."""
        if self._model_free is None or self._acceptance is None:
            return self._own
        missing = policy_version < self._plan.first_version
        drift = self._acceptance.drift(self._updates_behind(policy_version))
        return self._model_free if missing or drift > self._plan.siblings_faster_beyond else self._own

    def _budget(self, sample: Sample) -> int | None:
        """DAS: the window by what the prompt's responses were."""
        budget = self._speculation.budget
        if budget is None or self._lengths is None:
            return None
        median = self._lengths.median(sample.prompt_id, sample.epoch)
        if np.isnan(median):
            return budget.tokens[1]
        epoch = sample.epoch - 1
        finished = self._finished_in[epoch]
        if finished > 1.1 * self._edges.get(epoch, (0, None))[0]:  # else they are much the same
            medians = list(self._lengths.medians(epoch).values())
            edges = np.quantile(medians, budget.quantiles) if medians else np.array([0.0, np.inf])
            self._edges[epoch] = finished, edges
        return budget.tokens[int(np.searchsorted(self._edges[epoch][1], median))]


def _with_siblings(runs: AcceptRuns, trace: Trace) -> AcceptRuns:
    """A response that is alone in its group has none to draft from."""
    groups = list(zip(trace.column("step").tolist(), trace.column("prompt_id").tolist(), strict=True))
    size = Counter(groups)
    alone = np.array([size[group] == 1 for group in groups])
    return runs._replace(first=np.where(alone, -1, runs.first))


def text_runs(speculation: Speculation, inputs: SpeculationInputs, trace: Trace, seed: int) -> AcceptRuns:
    """What a text drafter does on a trace: run on its tokens where it has them, drawn from the run model where not."""
    if not _has_ids(trace):
        model = inputs.runs_of(speculation.drafter)  # type: ignore[arg-type]
        runs = draw_trace_runs(model, trace, seed, speculation.epochs_back)
    elif speculation.make_drafter is not None:
        runs = drafter_runs(trace, speculation.make_drafter)
    elif speculation.drafter == "ngram":
        runs = ngram_runs(trace)
    else:
        runs = history_runs(
            trace, speculation.history, speculation.epochs_back, MOST_DRAFT_TOKENS, threads=os.cpu_count() or 1
        )
    return with_refusals(runs, trace, seed, inputs.acceptance_factor)


def siblings_faster_beyond(
    speculation: Speculation,
    inputs: SpeculationInputs,
    acceptance: ModelAcceptance,
    tree_times: Sequence[DraftTimes],
    profile: TableProfile,
    kv_tokens: int,
) -> float:
    """The drift of a learned drafter's acceptance beyond which drafts from siblings are predicted to be faster; infinite where
    they never are, or the method does not ask.

    By the tokens a second of one response of typical length, drafted with the best of the trees for it. What siblings accept
    is what the scenario's run model says, also on a trace with token ids, which nobody has before the run."""
    if speculation.strategies is None or speculation.model_free is None or not speculation.model_free.if_slower:
        return np.inf
    most = max(strategy.tokens_to_verify for strategy in speculation.strategies.strategies)
    arms = [
        (
            tree_log_acceptances(acceptance, strategy),
            profile.verify_s(1, strategy.tokens_to_verify - 1, kv_tokens) + times.draft_s(1, strategy.draft_depth),
        )
        for strategy, times in zip(speculation.strategies.strategies, tree_times, strict=True)
        if strategy.tokens_to_verify == most
    ]
    model, window = inputs.runs_of("siblings"), speculation.window.rule
    lengths = np.full(PREDICTED_RESPONSES, max(round(model.typical_tokens), 2))
    passes = run_passes(draw_runs(model, lengths, np.arange(PREDICTED_RESPONSES)), lengths, window)
    drafted = float(passes.drafted.sum() / passes.passes.sum())
    pass_s = profile.verify_s(1, drafted, kv_tokens) + text_drafts_of(profile).draft_s(1, window.most_tokens)
    from_siblings = passes.accept_length / pass_s

    def gain(ln_drift: float) -> float:
        return max(accept_length(logs * np.exp(ln_drift)) / seconds for logs, seconds in arms) - from_siblings

    if gain(0.0) < 0:
        return 0.0
    from scipy.optimize import brentq  # takes 0.3 s to import

    return float(np.exp(brentq(gain, 0.0, MOST_LN_DRIFT))) if gain(MOST_LN_DRIFT) < 0 else np.inf


def _has_ids(trace: Trace) -> bool:
    return "response_ids" in trace.table.column_names


def _with_times(decoding: Decoding, times: DraftTimes) -> Decoding:
    """The same with other times of drafting."""
    arms = len(decoding.round_s)
    return decoding._replace(
        draft_sequences=times.sequences,
        round_s=np.tile(times.round_s, (arms, 1)),
        step_s=np.tile(times.step_s, (arms, 1)),
    )


def _decoding(
    plan: DraftPlan,
    runs: AcceptRuns | None,
    siblings: SiblingIndex | None,
    profile: TableProfile,
    kv_tokens: int,
    max_num_seqs: int,
) -> Decoding:
    speculation, times = plan.speculation, plan.times
    window, gate, more = speculation.window.rule, OPEN, {"own_text": int(speculation.own_text)}
    parts: dict[str, Any] = {}
    if plan.decoupled is not None:
        assert speculation.decoupled is not None
        window = Fixed(tokens=plan.decoupled.window).rule
        more |= {"decoupled": 1, "reconfigure_every": speculation.decoupled.reconfigure_every}
        windows, coupled = reconfiguration_table(plan.decoupled, speculation.decoupled.objective)
        # The drafters of a worker share its requests.
        sequences = times.sequences * plan.decoupled.draft_gpus
        parts |= {"best_window": windows, "best_coupled": coupled, "draft_sequences": sequences}
    elif isinstance(speculation.gate, Elastic):
        gate = ELASTIC
        more |= {"threshold": speculation.gate.threshold, "patience": speculation.gate.patience}
    elif speculation.gate == "batch":
        gate = BATCH
        parts["gate_batch"] = batch_gate(profile, times, window, kv_tokens, max_num_seqs)
    rule = rules(gate, window, **more)
    if plan.tree_times:
        assert plan.acceptance is not None and speculation.strategies is not None
        logs = [tree_log_acceptances(plan.acceptance, strategy) for strategy in speculation.strategies.strategies]
        decoding = trees(rule, speculation.strategies, plan.tree_times, logs)
    else:
        decoding = chains(rule, times, plan.acceptance, MOST_PLANNED_WINDOW if plan.decoupled else 0)
    if runs is not None:
        parts["runs"] = packed(runs)
    if siblings is not None:
        parts["siblings"] = siblings
    return decoding._replace(**parts)
