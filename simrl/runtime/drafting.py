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
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from operator import add

import numpy as np
import simpy
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
from simrl.speculation.trace_runs import (
    DrawnRuns,
    HistoryRuns,
    accepted_prefixes,
    drawn_sibling_runs,
    text_runs,
)
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Response, Sample, Trace

FIRST_COUNT = Rollout._fields.index("drafted_tokens")  # the fields behind it: `Engine.drafted`
MANY_UPDATES = 1e9  # after which a drafter that is not trained has drifted as far as it can
MOST_BUILDERS = 4096  # more are never busy at once
FACTS = ("made", "out", "brought_back", "lost", "waited", "waited_s", "waiters_s")


class IndexBuilders:
    """HistoSpec's history workers. Builders take indexes from a queue; indexes are kept while there
    is memory, and sent to the hosts of rollout workers, `workers_per_host` on each.

    The index of a prompt's epoch is built once all its responses are finished or dropped, of the
    finished ones: what was generated is indexed, trained or not (§5.3), and an aborted response was
    never sent to be scored, so its branch has no reward. Indexes of older epochs
    are evicted for newer ones. If none is left, a further index is not kept: the next epoch has its
    prompts in this order, so the oldest indexes of an epoch are needed first.

    With compression or swap ("HistoSpec also supports compression and swapping to SSD for memory
    saving": the paper has no rule), an index ends when its prompt has one that is `epochs_back`
    epochs newer, and those that are evicted before, the oldest first, are *out*; so is a new one
    for which that makes no room. With compression, the tokens of what is out are compressed, and
    with swap it is written to the SSDs. The index of a prompt that runs is brought back by the same
    way, indexed again if it was compressed, and held in addition to `memory_bytes`; with `prefetch`
    from the begin of the step before on, as the controller notifies history workers when it
    schedules prompts. Builders and SSDs serve in the order in which they are asked: a fetch ahead
    is booked backwards, when the first response asks for the index, so it comes after what was
    asked for since that step began.

    `facts`, if indexes may be out, or one is lost: prompts' epochs that were to be indexed; indexes
    that went out, and that were brought back; indexes that are lost, evicted or never kept for want
    of room, before the prompt's last epoch that needs them was finished; responses that ended at a
    worker and waited there for an index to be ready, the seconds that they waited, and the seconds
    from the begin of the wait to their end.
    """

    def __init__(
        self,
        parameters: HistoryWorkers,
        trace: Trace,
        workers_per_host: int = 1,
        epochs_back: int = 1,
    ) -> None:
        p = self._parameters = parameters
        self._epochs_back, self._ssd_free_s = epochs_back, [0.0]
        self.moves_out = (p.compressed_bytes_per_token or p.swap_bytes_per_s) is not None
        size = p.compressed_bytes_per_token or p.bytes_per_token
        # Of a token that is out: its bytes, and its bytes in memory.
        self._out_size, self._held_size = size, 0.0 if p.swap_bytes_per_s else size
        # Of indexes that are out, and of the waits for them.
        self.facts: dict[str, float] = dict.fromkeys(FACTS, 0.0) if self.moves_out else {}
        # By response at a worker: the begin and the end of its wait.
        self._waits: dict[Hashable, tuple[float, float]] = {}
        self._out: dict[tuple[int, int], tuple[int, float]] = {}  # tokens; when they were out
        self._step, self._began_s, self._before_s = (-1, -1), 0.0, 0.0
        self._workers_per_host = workers_per_host
        self._link_free_s: dict[int, float] = defaultdict(float)  # by host
        # Arrivals by prompt, then by host and epochs: a prompt that is generated again runs next to
        # its later epochs, and needs other indexes.
        self._sent: dict[int, dict[tuple[int, range], float]] = defaultdict(dict)
        self._epochs = 1 + int(trace.column("epoch").max())
        self._group_size = Counter(
            zip(trace.column("prompt_id").tolist(), trace.column("epoch").tolist(), strict=True)
        )
        self._free_s = [0.0] * min(parameters.workers, MOST_BUILDERS)
        self._finished: dict[tuple[int, int], dict[int, int | None]] = defaultdict(
            dict
        )  # tokens by sample, None for a dropped one
        self._indexed: dict[tuple[int, int], int] = {}  # responses in an index that was made
        self._ready_s: dict[tuple[int, int], float] = {}
        # By epoch, the oldest first: the tokens of those in memory.
        self._kept: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        self._bytes: dict[tuple[int, int], float] = {}
        self._epoch_bytes: dict[int, float] = defaultdict(float)

    def finished(self, sample: Sample, tokens: int | None, now_s: float) -> None:
        """Record a finished response, or an unfinished one that is dropped (None). The last one of
        its group has the index built; anew if a dropped one is generated after all."""
        place = (sample.prompt_id, sample.epoch)
        size = self._group_size[sample.prompt_id, sample.epoch % self._epochs]
        if sample.sample >= size:  # the trace does not have this sample
            return
        group = self._finished[place]
        group[sample.sample] = group.get(sample.sample) if tokens is None else tokens
        lengths = [each for each in group.values() if each is not None]
        built = place in self._ready_s or place in self._out
        if len(group) < size or not lengths or (built and self._indexed[place] == len(lengths)):
            return
        if built:
            self._drop(place)
        self._indexed[place] = len(lengths)
        self._build(place, sum(lengths), now_s)
        if self.facts:
            self.facts["made"] = len(self._indexed)

    def missing(self, prompt_id: int, epochs: range) -> frozenset[tuple[int, int]]:
        """Return the responses, by epoch of the trace and sample, that are in no index."""
        return frozenset(
            (epoch % self._epochs, sample)
            for epoch in epochs
            for sample, tokens in self._finished.get((prompt_id, epoch), {}).items()
            if tokens is None
        )

    def there_s(
        self,
        worker: int,
        prompt_id: int,
        epochs: range,
        now_s: float,
        step: tuple[int, int] = (0, 0),
        waiter: Hashable = None,
    ) -> float:
        """Send a worker that generates a response to the prompt all its indexes of these epochs, if
        they are not on their way. Return their arrival; if they are not built yet, the time at
        which to ask again; infinity if they never come. `step`: of the response, by epoch and
        number; `waiter`: the response at its worker, until `ended`."""
        if step > self._step:
            self._step, self._before_s, self._began_s = step, self._began_s, now_s
        places = [
            (prompt_id, epoch)
            for epoch in epochs
            if (prompt_id, epoch % self._epochs) in self._group_size
        ]
        sent, key = self._sent[prompt_id], (worker // self._workers_per_host, epochs)
        if key in sent and self.moves_out:
            self._waited(waiter, now_s)
            return sent[key]  # also if it is out again
        ready_s = max((self._ready(place, now_s) for place in places), default=now_s)
        if now_s < ready_s < np.inf and self.moves_out:
            self._waits.setdefault(waiter, (now_s, np.inf))
        else:
            self._waited(waiter, now_s)
        if ready_s > now_s:
            return ready_s
        if key not in sent:
            host, size = key[0], sum(self._bytes[place] for place in places)
            self._link_free_s[host] = sent[key] = (
                max(self._link_free_s[host], now_s) + size / self._parameters.link_bytes_per_s
            )
        return sent[key]

    def _waited(self, waiter: Hashable, now_s: float) -> None:
        """Record that a response waits no more, if it did."""
        if waiter in self._waits:
            self._waits[waiter] = self._waits[waiter][0], min(self._waits[waiter][1], now_s)

    def ended(self, waiter: Hashable, now_s: float) -> None:
        """Record that a response ends at its worker or leaves it, and count its wait, if any."""
        if waiter in self._waits:
            began_s, ended_s = self._waits.pop(waiter)
            for name, value in {
                "waited": 1,
                "waited_s": min(ended_s, now_s) - began_s,
                "waiters_s": now_s - began_s,
            }.items():
                self.facts[name] += value

    def _ready(self, place: tuple[int, int], now_s: float) -> float:
        """Return the time from which an index can be used; infinity if never. One that is out is
        brought back."""
        if place in self._out and place not in self._ready_s:
            (tokens, from_s), p = self._out[place], self._parameters
            from_s = max(from_s, self._before_s if p.prefetch else now_s)
            self._ready_s[place] = self._through(tokens, from_s, tokens / p.tokens_per_s)
            self._bytes[place] = tokens * p.bytes_per_token
            self.facts["brought_back"] += 1
        return self._ready_s.get(place, np.inf)

    def _build(self, place: tuple[int, int], tokens: int, now_s: float) -> None:
        p, (prompt_id, epoch) = self._parameters, place
        index_bytes = tokens * p.bytes_per_token
        not_older = sum(kept for other, kept in self._epoch_bytes.items() if other >= epoch)
        if self.moves_out:
            self._drop((prompt_id, epoch - self._epochs_back))
        elif not_older + index_bytes > p.memory_bytes:
            return self._lose(place)
        while (
            held := sum(self._epoch_bytes.values())
        ) + index_bytes > p.memory_bytes and self._kept:
            oldest, of_oldest = next(iter(self._kept[min(self._kept)].items()))
            self._drop(oldest, forget=not self.moves_out)
            if self.moves_out:
                self._put_out(oldest, of_oldest, now_s)
            else:
                self._lose(oldest)
        if held + index_bytes <= p.memory_bytes:
            self._kept[epoch][place], self._bytes[place] = tokens, index_bytes
            self._epoch_bytes[epoch] += index_bytes
            self._ready_s[place] = _served(self._free_s, now_s, tokens / p.tokens_per_s)
        elif held + tokens * self._held_size <= p.memory_bytes:
            self._put_out(place, tokens, now_s)
        else:
            self._lose(place)

    def _put_out(self, place: tuple[int, int], tokens: int, now_s: float) -> None:
        self._out[place] = tokens, self._through(tokens, now_s)
        self._epoch_bytes[place[1]] += tokens * self._held_size
        self.facts["out"] += 1

    def _lose(self, place: tuple[int, int]) -> None:
        """Count an index for which there is no room, if it is still of use."""
        if (place[0], place[1] + self._epochs_back) not in self._indexed:
            self.facts["lost"] = self.facts.get("lost", 0.0) + 1

    def _drop(self, place: tuple[int, int], forget: bool = True) -> None:
        """Drop an index, wherever it is; `forget`: at hosts, too."""
        if forget:
            for key in [key for key in self._sent[place[0]] if place[1] in key[1]]:
                del self._sent[place[0]][key]
        self._ready_s.pop(place, None)
        index_bytes, (tokens, _) = self._bytes.pop(place, 0.0), self._out.pop(place, (0, 0.0))
        is_whole = self._kept[place[1]].pop(place, None) is not None
        self._epoch_bytes[place[1]] -= index_bytes if is_whole else tokens * self._held_size
        if not self._kept[place[1]]:
            del self._kept[place[1]]

    def _through(self, tokens: int, from_s: float, build_s: float | None = None) -> float:
        """Return when an index is out or, with the seconds to build it, back."""
        p, work = self._parameters, []
        if p.compressed_bytes_per_token is not None:
            work.append((self._free_s, tokens / p.codec_tokens_per_s + (build_s or 0.0)))
        if p.swap_bytes_per_s is not None:
            work.append((self._ssd_free_s, tokens * self._out_size / p.swap_bytes_per_s))
        for free_s, seconds in work if build_s is None else reversed(work):
            from_s = _served(free_s, from_s, seconds)
        return from_s


def _served(free_s: list[float], from_s: float, seconds: float) -> float:
    """Return when work ends that the first of these to be free begins, at the earliest at a time."""
    ends_s = max(heapq.heappop(free_s), from_s) + seconds
    heapq.heappush(free_s, ends_s)
    return ends_s


class Drafting:
    """The decoding of engines, and the draft source of each sample; one object for all workers of a
    simulation. A worker that gets the drafter in the tail loads it in `load_s`, and has `kv_blocks`
    with it."""

    def __init__(
        self,
        plan: DraftPlan,
        deployment: Deployment,
        max_num_seqs: int,
        seed: int,
        spot: SpotTrainer | None = None,
    ) -> None:
        self.spot, self.load_s, self.kv_blocks = spot, plan.load_s, plan.kv_blocks
        self._plan = plan
        self._speculation = plan.speculation
        self._acceptance = plan.acceptance
        self._seed = seed
        self._runs: AcceptRuns | DrawnRuns | HistoryRuns | None = None
        self._siblings: SiblingIndex | None = None
        self._old: WholeResponseRuns | None = None
        self._builders: IndexBuilders | None = None
        self.facts: dict[str, dict[str, float]] = {}  # of the history, for the result
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
            back, workers = plan.speculation.epochs_back, plan.inputs.history_workers
            self._builders = IndexBuilders(workers, trace, per_host, back)
            self.facts = {"history": self._builders.facts}
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
        if self._builders is not None and isinstance(self._runs, AcceptRuns):
            self._runs = HistoryRuns(self._runs, plan.speculation, plan.inputs, trace, seed)
        runs = packed(self._runs) if isinstance(self._runs, AcceptRuns) else None
        if isinstance(self._runs, DrawnRuns | HistoryRuns):
            runs = self._runs.packed
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
            missing = frozenset[tuple[int, int]]()
            if self._builders is not None:
                missing = self._builders.missing(sample.prompt_id, earlier)
                step = sample.epoch, sample.step
                there_s = self._builders.there_s(
                    worker, sample.prompt_id, earlier, now_s, step, (id(engine), slot)
                )
                if there_s > now_s:
                    return there_s if there_s < np.inf else None
            if (first := self._first_run(engine, slot, response.row, missing)) >= 0:
                engine.draft_from(slot, RUNS, first, window=self.budget(sample))
        return None

    def _first_run(
        self, engine: Engine, slot: int, row: int, missing: frozenset[tuple[int, int]] = frozenset()
    ) -> int:
        """Return the place of a row's runs in the engine's array, -1 if there are none. The history
        lacks what is `missing` (`IndexBuilders.missing`)."""
        if self._runs is None or isinstance(self._runs, AcceptRuns):
            return int(self._runs.first[row]) if self._runs is not None else -1
        first, runs = self._runs.first((id(engine), slot), row, missing), self._runs.packed
        if runs is not self._own.runs:
            self._own = self._own._replace(runs=runs)
            self._model_free = self._model_free and self._model_free._replace(runs=runs)
        assert engine.decoding is not None
        if runs is not engine.decoding.runs:
            engine.decoding = engine.decoding._replace(runs=runs)
        return first

    def dropped(self, env: simpy.Environment, rollouts: Iterable[Rollout]) -> None:
        """Record responses that a rule drops: the history goes without the unfinished ones."""
        for rollout in rollouts:
            if self._builders is not None and not rollout.done:
                self._builders.finished(rollout.sample, None, env.now)

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
        if self._builders is not None:
            self._builders.ended((id(engine), slot), now_s)
        if rollout.done and self._builders is not None:
            self._builders.finished(sample, rollout.tokens, now_s)
        self.observe(rollout, now_s)

    def observe(self, rollout: Rollout, now_s: float) -> None:
        """Record how long a response is that ends at its worker or leaves it."""
        sample = rollout.sample
        if self._lengths is not None:
            self._lengths.observe([rollout])
        if rollout.done:
            self._finished.add((sample.prompt_id, sample.epoch, sample.sample))
            self._finished_in[sample.epoch] += 1
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
        """Return the learned drafter's decoding, or the siblings' where they draft."""
        if self._model_free is not None and self.drafts_from_siblings(policy_version):
            return self._model_free
        return self._own

    def drafts_from_siblings(self, policy_version: int) -> bool:
        """Return whether siblings draft under these weights: no learned drafter is there yet, or it
        is slower."""
        missing = policy_version < self._plan.first_version
        return missing or self._drift(policy_version) > self._plan.siblings_faster_beyond

    def budget(self, sample: Sample) -> int | None:
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
