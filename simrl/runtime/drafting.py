"""Drafting during a simulation: the draft source of every sample, for one method of speculation.

Invariant: the source of a sample's drafts is chosen when it begins at a worker, from responses that
are finished by then. It is chosen anew only if other weights make the worker change its drafter, or
an index arrives; siblings lend their tokens so far. An index of the history can be used once the
prompt's epoch is complete, a builder has made the index, and the worker's host has it. No sample
drafts from a future response, though the trace knows it.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import Counter, defaultdict, deque
from operator import add

import numpy as np
from numpy.typing import NDArray

from simrl.engine.engine import Engine
from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.speculation.acceptance import sample_key
from simrl.speculation.choices import Toggle
from simrl.speculation.decoding import MODEL, RUNS, SIBLINGS, Decoding, packed, read_only
from simrl.speculation.deployment import Deployment
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.draws import mixed
from simrl.speculation.inputs import HistoryWorkers
from simrl.speculation.matching import has_token_ids
from simrl.speculation.methods import OLD_RESPONSE
from simrl.speculation.plan import DraftPlan, decoding_of, with_text_times
from simrl.speculation.siblings import (
    SiblingIndex,
    WholeResponseRuns,
    drawn_sibling_index,
    sibling_index,
    whole_response_runs,
)
from simrl.speculation.tail_plan import TailPlan
from simrl.speculation.toggle import Ladder
from simrl.speculation.trace_runs import DrawnRuns, accepted_prefixes, drawn_sibling_runs, text_runs
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Response, Sample, Trace

FIRST_COUNT = Rollout._fields.index("drafted_tokens")  # the fields behind it: `Engine.drafted`
MANY_UPDATES = 1e9  # after which a drafter that is not trained has drifted as far as it can
MOST_BUILDERS = 4096  # more are never busy at once


class IndexBuilders:
    """HistoSpec's history workers. Builders take indexes from a queue; indexes are kept while there
    is memory, and sent to the hosts of rollout workers, `workers_per_host` on each.

    The index of a prompt's epoch is built once all its responses are finished. (A group with a
    dropped response has none: the trace's drafts hold for whole groups.) Indexes of older epochs
    are evicted for newer ones. If none is left, a further index is not kept: the next epoch has its
    prompts in this order, so the oldest indexes of an epoch are needed first.
    """

    def __init__(self, parameters: HistoryWorkers, trace: Trace, workers_per_host: int = 1) -> None:
        self._parameters = parameters
        self._workers_per_host = workers_per_host
        self._link_free_s: dict[int, float] = defaultdict(float)  # by host
        self._sent: dict[
            tuple[int, int], tuple[range, float]
        ] = {}  # by host and prompt: epochs, and their arrival
        self._epochs = 1 + int(trace.column("epoch").max())
        self._group_size = Counter(
            zip(trace.column("prompt_id").tolist(), trace.column("epoch").tolist(), strict=True)
        )
        self._free_s = [0.0] * min(parameters.workers, MOST_BUILDERS)
        self._finished: dict[tuple[int, int], dict[int, int]] = defaultdict(
            dict
        )  # tokens by sample
        self._ready_s: dict[tuple[int, int], float] = {}
        self._kept: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # by epoch, oldest first
        self._bytes: dict[tuple[int, int], float] = {}
        self._epoch_bytes: dict[int, float] = defaultdict(float)

    def finished(self, sample: Sample, tokens: int, now_s: float) -> None:
        """Record a finished response; the last one of its group has the index built."""
        place = (sample.prompt_id, sample.epoch)
        size = self._group_size[sample.prompt_id, sample.epoch % self._epochs]
        if sample.sample < size:  # the trace has this sample
            self._finished[place][sample.sample] = tokens
            if len(self._finished[place]) == size and place not in self._ready_s:
                self._build(place, sum(self._finished[place].values()), now_s)

    def there_s(self, worker: int, prompt_id: int, epochs: range, now_s: float) -> float:
        """Send a worker that generates a response to the prompt all its indexes of these epochs, if
        they are not on their way. Return their arrival; if they are not built yet, the time at
        which to ask again; infinity if they never come."""
        places = [
            (prompt_id, epoch)
            for epoch in epochs
            if (prompt_id, epoch % self._epochs) in self._group_size
        ]
        ready_s = max((self._ready_s.get(place, np.inf) for place in places), default=now_s)
        if ready_s > now_s:
            return ready_s
        host = worker // self._workers_per_host
        sent, arrival_s = self._sent.get((host, prompt_id), (None, 0.0))
        if sent != epochs:
            size = sum(self._bytes[place] for place in places)
            arrival_s = (
                max(self._link_free_s[host], now_s) + size / self._parameters.link_bytes_per_s
            )
            self._link_free_s[host], self._sent[host, prompt_id] = arrival_s, (epochs, arrival_s)
        return arrival_s

    def _build(self, place: tuple[int, int], tokens: int, now_s: float) -> None:
        p = self._parameters
        index_bytes = tokens * p.bytes_per_token
        not_older = sum(kept for epoch, kept in self._epoch_bytes.items() if epoch >= place[1])
        if not_older + index_bytes > p.memory_bytes:
            return
        while sum(self._epoch_bytes.values()) + index_bytes > p.memory_bytes:
            self._evict(min(self._epoch_bytes))
        self._kept[place[1]].append(place)
        self._bytes[place] = index_bytes
        self._epoch_bytes[place[1]] += index_bytes
        start_s = max(heapq.heappop(self._free_s), now_s)
        self._ready_s[place] = start_s + tokens / p.tokens_per_s
        heapq.heappush(self._free_s, self._ready_s[place])

    def _evict(self, epoch: int) -> None:
        """Evict the oldest index of an epoch."""
        oldest = self._kept[epoch].popleft()
        del self._ready_s[oldest]
        self._epoch_bytes[epoch] -= self._bytes.pop(oldest)
        if not self._kept[epoch]:
            del self._kept[epoch], self._epoch_bytes[epoch]


class Drafting:
    """The decoding of engines, and the draft source of each sample; one object for all workers of a
    simulation."""

    def __init__(
        self,
        plan: DraftPlan,
        deployment: Deployment,
        max_num_seqs: int,
        seed: int,
        spot: SpotTrainer | None = None,
    ) -> None:
        self.spot = spot
        self._plan = plan
        self._speculation = plan.speculation
        self._acceptance = plan.acceptance
        self._seed = seed
        self._runs: AcceptRuns | DrawnRuns | None = None
        self._siblings: SiblingIndex | None = None
        self._old: WholeResponseRuns | None = None
        self._builders: IndexBuilders | None = None
        self._lengths = LengthHistory() if plan.speculation.budget else None
        # By epoch: the edges of DAS's windows, and the number of finished responses that they are
        # from.
        self._edges: dict[int, tuple[int, NDArray[np.float64]]] = {}
        self._finished: set[tuple[int, int, int]] = set()  # prompt, epoch, sample
        self._finished_in: Counter[int] = Counter()  # by epoch
        # By engine: the most tokens that its drafter was trained on, and how much harder longer
        # responses are.
        self._uncovered: dict[int, tuple[float, float]] = {}
        trace, drafter = deployment.trace, plan.speculation.drafter
        if drafter == "history":
            per_host = max(deployment.gpu.gpus_per_node // deployment.tp, 1)
            self._builders = IndexBuilders(plan.inputs.history_workers, trace, per_host)
        if drafter == "old_response":
            kept, factor = plan.inputs.acceptance.get(OLD_RESPONSE), plan.inputs.acceptance_factor
            old = whole_response_runs(trace, kept and kept.times(factor), seed)
            keeps = accepted_prefixes(old.accepted, trace, seed, 1.0 if kept else factor)
            # Where the trainer has verified, the engine prefills what is kept.
            verified = keeps if plan.speculation.verify == "trainer" else old.old_tokens
            self._old = old._replace(old_tokens=verified, accepted=keeps)
        worst = plan.acceptance.drift(MANY_UPDATES) if plan.acceptance else 1.0
        falls_back = plan.first_version > 0 or worst > plan.siblings_faster_beyond
        if drafter == "siblings" or falls_back:
            if has_token_ids(trace):
                self._siblings = trace.once("siblings", lambda: read_only(sibling_index(trace)))
            else:
                self._siblings = read_only(drawn_sibling_index(trace, seed))
                self._runs = drawn_sibling_runs(plan.inputs, trace, seed)
        elif drafter in ("history", "ngram", "own"):
            self._runs = text_runs(plan.speculation, plan.inputs, trace, seed)
        runs = (
            self._runs.packed
            if isinstance(self._runs, DrawnRuns)
            else packed(self._runs)
            if self._runs
            else None
        )
        self._version = 0  # that the ladder of a toggle has seen
        self._own = decoding_of(plan, runs, self._siblings, deployment, max_num_seqs)
        self._ladder = Ladder(self._own.rule.window.start_tokens)
        self._model_free = with_text_times(self._own, deployment.profile) if falls_back else None
        self.decoding = self._decoding_of(0)

    def key(self, worker: int) -> int:
        """Return the random key of a worker's bandit."""
        return int(mixed(self._seed, worker))

    def give(
        self,
        engine: Engine,
        slot: int,
        sample: Sample,
        response: Response,
        now_s: float,
        worker: int = 0,
    ) -> float | None:
        """Give a sample at an engine its present drafts. Return the time at which to do so again;
        None if never."""
        if self._old is not None:
            old, accepted, ago = (int(column[response.row]) for column in self._old)
            if (sample.prompt_id, sample.epoch - ago, sample.sample) not in self._finished:
                return None
            if old and not engine.generated_tokens(slot):
                engine.verify_old(slot, old, accepted)
        elif self._acceptance is not None and not _like(engine.decoding, self._model_free):
            key = sample_key(self._seed, sample.prompt_id, sample.epoch, sample.sample)
            covered_tokens, harder = self._uncovered.get(id(engine), (math.inf, 1.0))
            hardness = self._acceptance.hardness(key, response.tokens)
            engine.draft_from(
                slot, MODEL, key, hardness * (harder if response.tokens > covered_tokens else 1.0)
            )
        elif self._siblings is not None:
            first = self._first_run(engine, slot, response.row)
            if first >= 0 or self._runs is None:
                engine.draft_from(slot, SIBLINGS, response.row, runs_at=first)
        elif self._runs is not None:
            earlier = range(max(sample.epoch - self._speculation.epochs_back, 0), sample.epoch)
            if self._builders is not None:
                there_s = self._builders.there_s(worker, sample.prompt_id, earlier, now_s)
                if there_s > now_s:
                    return there_s if there_s < np.inf else None
            if (first := self._first_run(engine, slot, response.row)) >= 0:
                engine.draft_from(slot, RUNS, first, window=self._budget(sample))
        return None

    def _first_run(self, engine: Engine, slot: int, row: int) -> int:
        """Return the place of a row's runs in the engine's array, -1 if there are none."""
        if not isinstance(self._runs, DrawnRuns):
            return int(self._runs.first[row]) if self._runs is not None else -1
        first, runs = self._runs.first((id(engine), slot), row), self._runs.packed
        if runs is not self._own.runs:
            self._own = self._own._replace(runs=runs)
            self._model_free = self._model_free and self._model_free._replace(runs=runs)
        assert engine.decoding is not None
        if runs is not engine.decoding.runs:
            engine.decoding = engine.decoding._replace(runs=runs)
        return first

    def begins(self, sample: Sample) -> None:
        """Record that a sample begins, or continues, at a worker."""
        if self._lengths is not None:
            self._lengths.expect([sample])

    def ends(self, engine: Engine, slot: int | None, rollout: Rollout, now_s: float) -> None:
        """Record that a sample ends at its worker or leaves it; `slot` is its place in the engine,
        if it had one."""
        sample = rollout.sample
        if isinstance(self._runs, DrawnRuns):
            self._runs.free((id(engine), slot))
        if self._lengths is not None:
            self._lengths.observe([rollout])
        if rollout.done:
            self._finished.add((sample.prompt_id, sample.epoch, sample.sample))
            self._finished_in[sample.epoch] += 1
            if self._builders is not None:
                self._builders.finished(sample, rollout.tokens, now_s)
            if self.spot is not None:
                self.spot.finished(rollout.tokens, now_s)

    def counted(self, engine: Engine, slot: int | None, rollout: Rollout) -> Rollout:
        """Return the rollout with the counts of drafts that the engine has for it, too."""
        if slot is None:
            return rollout
        counts = map(add, rollout[FIRST_COUNT:], engine.drafted(slot))
        return Rollout._make((*rollout[:FIRST_COUNT], *counts, rollout.token_ids))

    def weights_loaded(self, engine: Engine, policy_version: int) -> bool:
        """Set an engine to new weights: their drift from the drafter, a shut elastic gate, and no
        finished siblings. Return whether samples draft from another source now, which they have to
        be given.

        With weights comes the trained drafter that was saved when they were made; a drafter without
        training never changes."""
        self._begin_rollout(engine, policy_version)
        engine.new_rollout()
        engine.forget_rows()
        engine.drift = self._drift(policy_version)
        if self.spot is not None and self._acceptance is not None:
            covered_tokens, behind = self.spot.beyond[policy_version]
            self._uncovered[id(engine)] = (
                covered_tokens,
                self._acceptance.drift(behind) / engine.drift,
            )
        before, engine.decoding = engine.decoding, self._decoding_of(policy_version)
        return not _like(engine.decoding, before)

    def _begin_rollout(self, engine: Engine, policy_version: int) -> None:
        """End the rollout of a toggle: at the first load of a version, the ladder of all engines
        sees the acceptance rate of their drafts; at its own load, each engine its accept length."""
        rule, t, rows = self._speculation.gate, engine.fleet.t, engine.rows
        if not isinstance(rule, Toggle):
            return
        drafts, accepted, tokens = t["rollout_drafts"], t["rollout_accepted"], self._ladder[0]
        if policy_version != self._version and drafts.any():
            rate = float(accepted.sum() / (tokens * drafts.sum()))
            self._ladder = self._ladder.after(rate, rule)
            if self._ladder.draft_tokens != tokens:
                # Engines that drafted replace it by what they had, each at its own load.
                t["accept_length"][:] = tokens = self._ladder.draft_tokens
                windowed = self._own.rule._replace(window=Fixed(tokens=tokens).rule)
                self._own = self._own._replace(rule=windowed)
        self._version = policy_version
        if drafts[rows].any():
            t["accept_length"][rows] = 1.0 + accepted[rows].sum() / drafts[rows].sum()
        drafts[rows] = accepted[rows] = 0

    def _drift(self, policy_version: int) -> float:
        """Return the drift of these weights from their drafter."""
        if self._acceptance is None:
            return 1.0
        untrained = max(policy_version - self._plan.first_version, 0)
        return self._acceptance.drift(
            self.spot.behind[policy_version] if self.spot is not None else untrained
        )

    def _decoding_of(self, policy_version: int) -> Decoding:
        """Return the learned drafter's decoding, or the siblings' while there is no drafter or it
        is slower."""
        missing = policy_version < self._plan.first_version
        slower = missing or self._drift(policy_version) > self._plan.siblings_faster_beyond
        return self._model_free if self._model_free is not None and slower else self._own

    def _budget(self, sample: Sample) -> int | None:
        """Return DAS's window, which depends on the median of the prompt's earlier responses."""
        budget = self._speculation.budget
        if budget is None or self._lengths is None:
            return None
        median = self._lengths.median(sample.prompt_id, sample.epoch)
        if np.isnan(median):
            return budget.tokens[1]
        epoch = sample.epoch - 1
        finished = self._finished_in[epoch]
        if (
            finished > 1.1 * self._edges.get(epoch, (0, None))[0]
        ):  # with fewer, the edges hardly move
            medians = list(self._lengths.medians(epoch).values())
            edges = np.quantile(medians, budget.quantiles) if medians else np.array([0.0, np.inf])
            self._edges[epoch] = finished, edges
        return budget.tokens[int(np.searchsorted(self._edges[epoch][1], median))]


def _like(one: Decoding | None, other: Decoding | None) -> bool:
    """Return whether two decodings are equal except for the array of their runs."""
    return one is other or (one is not None and other is not None and one.round_s is other.round_s)


def tail_drafting(
    tail: TailPlan, deployment: Deployment, max_num_seqs: int, seed: int
) -> dict[str, Drafting]:
    """Return the drafters that freed workers may get, by name. The draws of a request with
    different drafters are independent; with the drafter that all began with, they do not depend on
    the worker."""
    keys = {name: int(mixed(seed, zlib.crc32(name.encode()))) for name in tail.plans} | {
        tail.rule.own: seed
    }
    return {
        name: Drafting(plan, deployment, max_num_seqs, keys[name])
        for name, plan in tail.plans.items()
    }
