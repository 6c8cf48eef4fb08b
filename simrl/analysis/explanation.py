"""An explanation of one result, and of the difference between two: data, for the screen and for
scripts.

Invariant: computed from the tables of results alone. Rates (GPU-seconds a trained sample, findings,
critical paths) are of the window of `simrl.result.metrics`, the updates after the warm-up, as a
comparison has them; GPU-hours are of the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from simrl.analysis.critical_path import CriticalPath, HeldUp, Paths, seconds_of
from simrl.analysis.diagnosis import Evidence, Finding, diagnose
from simrl.analysis.gpu_hours import PARTS, Waterfall, comparable, waterfall
from simrl.errors import InputError, refuse
from simrl.result.check import require
from simrl.result.metrics import evaluations, prices, summary, totals, window
from simrl.result.result import Result


@dataclass(frozen=True)
class PrefixCache:
    """The hits of the prefix caches in a whole run: tokens, their share of the tokens that engines
    looked up, and the saved GPU-seconds at the run's mean of a prefilled token
    (`gpu_s_per_token`)."""

    lookup_tokens: int
    hit_tokens: int
    hit_rate: float
    gpu_s_per_token: float
    saved_gpu_s: float


class PoolShare(NamedTuple):
    """A pool of GPUs, and its GPU-hours and cost over a whole run."""

    use: str
    gpus: int
    gpu: str
    gpu_hours: float
    cost: float


@dataclass(frozen=True)
class Explanation:
    """The reasons for the length of one run.

    `whole` is the waterfall of the run, `steady` the waterfall of the updates after the first
    `warmup_steps`; `path` is the critical path of one update, `paths_s` the seconds by kind on the
    paths of all updates after the warm-up; `held_up` are the samples that ended last in the update,
    and `held_up_s` the seconds from the batch without them to the whole batch.
    """

    label: str
    variant: str
    measured: bool
    warmup_steps: int
    updates: int
    full_batch: Mapping[str, Any] | None
    occupancy: float | None
    weight_sync: str | None
    prefix_cache: PrefixCache | None
    agents: Mapping[str, Any] | None
    admission: str | None
    planner: str | None
    drafting: str | None
    tau: str | None
    history: str | None
    whole: Waterfall
    steady: Waterfall
    path: CriticalPath
    paths_s: Mapping[str, float]
    held_up: tuple[HeldUp, ...]
    held_up_s: float
    findings: tuple[Finding, ...]
    not_modelled: tuple[str, ...]
    pools: tuple[PoolShare, ...] = ()
    judge: str | None = None
    evaluations: Mapping[str, float] | None = None
    without_effect: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the explanation for `json.dumps`, with the parts that the run has."""
        return {
            "label": self.label,
            "variant": self.variant,
            "measured": self.measured,
            "gpus": self.whole.gpus,
            "end_s": self.whole.end_s,
            "updates": self.updates,
            "warmup_steps": self.warmup_steps,
            "gpu_s": self.whole.total_gpu_s,
            "gpu_s_per_sample": self.steady.total_gpu_s / self.steady.samples,
            "full_batch": self.full_batch,
            "occupancy": self.occupancy,
            **({"weight_sync": self.weight_sync} if self.weight_sync else {}),
            **({"prefix_cache": asdict(self.prefix_cache)} if self.prefix_cache else {}),
            **({"agents": dict(self.agents)} if self.agents else {}),
            **({"admission": self.admission} if self.admission else {}),
            **({"planner": self.planner} if self.planner else {}),
            **({"drafting": self.drafting} if self.drafting else {}),
            **({"tau": self.tau} if self.tau else {}),
            **({"history": self.history} if self.history else {}),
            **({"judge": self.judge} if self.judge else {}),
            **(self.evaluations or {}),
            "parts": [
                {
                    "part": key,
                    "words": PARTS[key].words,
                    "ideal": PARTS[key].ideal,
                    "gpu_s": value,
                    "gpu_s_per_sample": self.steady.per_sample.get(key),
                }
                for key, value in self.whole.gpu_s.items()
                if value
            ],
            "critical_path": {
                "step": self.path.step,
                "started_s": self.path.started_s,
                "ended_s": self.path.ended_s,
                "seconds_by_kind": self.path.seconds(),
                "links": [link._asdict() for link in self.path.links],
            },
            "critical_paths_s": dict(self.paths_s),
            "held_up": [sample._asdict() for sample in self.held_up],
            "held_up_s": self.held_up_s,
            "findings": [finding._asdict() for finding in self.findings],
            "not_modelled": list(self.not_modelled),
            **({"without_effect": dict(self.without_effect)} if self.without_effect else {}),
            **({"pools": [pool._asdict() for pool in self.pools]} if self.pools else {}),
        }


@dataclass(frozen=True)
class Change:
    """A part of the waterfall in GPU-seconds a trained sample of both runs, and the saving of B."""

    part: str
    words: str
    a_gpu_s: float
    b_gpu_s: float
    saved_gpu_s: float


@dataclass(frozen=True)
class Difference:
    """Run B against run A: GPU-seconds and seconds a trained sample, and the parts of the
    GPU-seconds, the largest change first. `cautions` are reasons against comparing the two."""

    a: str
    b: str
    a_gpus: int
    b_gpus: int
    a_gpu_s: float
    b_gpu_s: float
    a_s: float
    b_s: float
    changes: tuple[Change, ...]
    cautions: tuple[str, ...]


def explain_result(result: Result, step: int | None = None) -> Explanation:
    """Explain a result. Raise `InputError` if it has no updates after its warm-up, or not the
    step."""
    _require_facts(result)
    warmup_steps, updates = counted_warmup(result), result.steps.num_rows
    if step is not None and not 0 <= step < updates:
        raise InputError(
            f"--step {step}: the run has updates 0 to {updates - 1}; choose one of them"
        )
    paths = Paths(result)
    chosen = paths.typical_step(warmup_steps) if step is None else step
    steady = waterfall(result, *window(result, warmup_steps))
    of_updates = [paths.of(k) for k in range(warmup_steps, updates)]
    held_up, held_up_s = paths.held_up(chosen)
    row, whole = summary(result, warmup_steps), waterfall(result)
    return Explanation(
        label=_name(result),
        variant=str(result.metadata.get("variant") or ""),
        measured="replay" in result.metadata,
        warmup_steps=warmup_steps,
        updates=updates,
        full_batch=result.metadata.get("full_batch"),
        occupancy=row["occupancy"],
        weight_sync=result.metadata.get("weight_sync"),
        prefix_cache=_prefix_cache(result, whole),
        agents=result.metadata.get("agents"),
        admission=_admission(result.metadata, row["occupancy"]),
        planner=_planner(result.metadata),
        drafting=planned_drafting(result.metadata),
        tau="{kind}, {source}".format(**tau) if (tau := result.metadata.get("tau")) else None,
        history=_history(result.metadata.get("history") or {}),
        whole=whole,
        steady=steady,
        path=paths.of(chosen),
        paths_s=seconds_of(of_updates),
        held_up=tuple(held_up),
        held_up_s=held_up_s,
        findings=tuple(diagnose(Evidence(result, row, steady, of_updates))),
        pools=tuple(_pools(result.metadata)),
        judge=_judge(result.metadata, row.get("judge_idle"))
        if "judge" in result.metadata
        else None,
        evaluations=evaluations(result),
        not_modelled=()
        if "replay" in result.metadata
        else tuple(result.metadata.get("not_modelled") or ()),
        without_effect={}
        if "replay" in result.metadata
        else result.metadata.get("without_effect") or {},
    )


def _pools(metadata: Mapping[str, Any]) -> Iterator[PoolShare]:
    """Yield the pools for rollout, for training and for a standalone judge where training has a
    pool of its own."""
    cluster = metadata["scenario"]["cluster"]
    if (pool := cluster.get("train")) is None:
        return
    judge = metadata["scenario"].get("judge") or {}
    hours, train, judges = metadata["end_s"] / 3600, metadata["train_gpus"], judge.get("gpus") or 0
    of_uses = (
        ("rollout", metadata["gpus"] - train - judges, cluster["gpu"]),
        ("training", train, pool.get("gpu") or cluster["gpu"]),
        *([("judge", judges, judge.get("gpu") or cluster["gpu"])] if judges else []),
    )
    for (use, gpus, kind), price in zip(
        of_uses, (*prices(cluster), prices({**cluster, "train": judge})[1]), strict=False
    ):
        yield PoolShare(use, gpus, kind, gpus * hours, gpus * hours * (price or 0.0))


def _judge(metadata: Mapping[str, Any], idle: float | None) -> str:
    """Say where a judge runs, and what it has read and written, apart from the policy's tokens."""
    judge, gpus = metadata["judge"], metadata["scenario"]["judge"]["gpus"]
    return (
        f"{judge['model']}, {judge['rollout_workers']} engines "
        + (f"on {gpus:,} GPUs of its own; " if gpus else "in turns with the rollout engines; ")
        + f"{judge['finished']:,} of {judge['requests']:,} requests answered; {judge['lookup_tokens']:,} tokens read, "
        f"{judge['hit_tokens']:,} of them from its prefix cache, and {judge['generated_tokens']:,} written"
        + "; it is saturated: more judge.gpus may make the run faster"
        * (idle is not None and idle < 0.02)
    )


def _admission(metadata: Mapping[str, Any], occupancy: float | None) -> str | None:
    """Say which bounds held groups back: max_concurrent, η, or the capacity of an engine."""
    seconds, full = metadata.get("admission") or {}, metadata.get("full_batch")
    if not (total_s := sum(seconds.values())):
        return None
    shares = {"max_concurrent": seconds["concurrency"] / total_s, "η": seconds["eta"] / total_s}
    words = " and ".join(f"by {bound} {share:.0%} of the time" for bound, share in shares.items())
    if full is None or occupancy is None:
        return f"groups were held back {words}"
    seats = full["sequences"]
    limit = (
        "max_num_seqs" if seats == metadata["scenario"]["engine"]["max_num_seqs"] else "KV memory"
    )
    return f"groups were held back {words}; of the {seats:,} responses that {limit} allows a worker, {occupancy:.0%} ran"


def _planner(metadata: Mapping[str, Any]) -> str | None:
    """Say which tensor-parallel sizes the rounds of each kind had (RollPacker)."""
    rounds = Counter((plan["round"], plan["tp"]) for plan in metadata.get("planner") or ())
    return (
        ", ".join(
            f"{kind} rounds at tp {tp} ({number})" for (kind, tp), number in sorted(rounds.items())
        )
        or None
    )


def planned_drafting(metadata: Mapping[str, Any]) -> str | None:
    """Say what SpecActor's plan has chosen before the run: the first drafter, where it drafts, for
    which verifier, and how far ahead. None for another method."""
    facts, tp = metadata.get("speculation") or {}, metadata["scenario"]["cluster"]["tp"]
    if not facts.get("method", "").startswith("specactor"):
        return None
    of = f" (of {', '.join(facts['candidates'])})" if "candidates" in facts else ""
    words = f"first drafter {facts.get('first_drafter') or facts['model']}{of}, "
    verifier = f"verifier of {tp} GPU{'s' * (tp > 1)}"
    if (plan := facts.get("plan")) is None:
        return f"{words}in turns with each {verifier}, on its GPUs"
    gpus, window = plan["draft_gpus"], plan["window"]
    return (
        f"{words}{gpus} drafter GPU{'s' * (gpus > 1)} beside each {verifier}, windows of {window}"
    )


def _history(facts: Mapping[str, float]) -> str | None:
    """Say how many indexes found no room in the history workers' memory, and what became of
    them."""
    f = Counter(facts)
    parts = (
        f"{f['lost']:,.0f} of {f['made']:,.0f} were evicted or not kept, as speculation.history_workers.memory_bytes is too "
        "small: their prompts decode without drafts"
        if f["lost"]
        else "",
        f"{f['out']:,.0f} were put out of the history workers' memory, {f['brought_back']:,.0f} were brought back; "
        f"{f['waited']:,.0f} responses waited for theirs, {f['waited_s']:,.1f} s together, "
        f"{f['waited_s'] / (f['waiters_s'] or 1.0):.1%} of their time, and decoded without drafts meanwhile"
        if "out" in facts
        else "",
    )
    return "; ".join(filter(None, parts)) or None


def _prefix_cache(result: Result, whole: Waterfall) -> PrefixCache | None:
    """Return the hits of the prefix caches; None without caches or prefill."""
    counts = result.metadata.get("prefix_cache")
    if not counts or not counts["prefill_tokens"]:
        return None
    prefill_gpu_s = sum(
        s for part, s in whole.gpu_s.items() if part == "prefill" or part.startswith("recompute_")
    )
    per_token_s, hits = prefill_gpu_s / counts["prefill_tokens"], counts["hit_tokens"]
    return PrefixCache(
        counts["lookup_tokens"],
        hits,
        hits / counts["lookup_tokens"],
        per_token_s,
        hits * per_token_s,
    )


def diff_results(a: Result, b: Result) -> Difference:
    """Compare two results. Raise `InputError` for one without updates after its warm-up."""
    for result in (a, b):
        _require_facts(result)
    falls = comparable(
        [waterfall(result, *window(result, counted_warmup(result))) for result in (a, b)]
    )
    of_a, of_b = falls[0].per_sample, falls[1].per_sample
    changes = [
        Change(key, part.clause, of_a[key], of_b[key], of_a[key] - of_b[key])
        for key, part in PARTS.items()
        if of_a[key] or of_b[key]
    ]
    a_gpu_s, b_gpu_s = (fall.total_gpu_s / fall.samples for fall in falls)
    return Difference(
        a=_name(a),
        b=_name(b),
        a_gpus=falls[0].gpus,
        b_gpus=falls[1].gpus,
        a_gpu_s=a_gpu_s,
        b_gpu_s=b_gpu_s,
        a_s=a_gpu_s / falls[0].gpus,
        b_s=b_gpu_s / falls[1].gpus,
        changes=tuple(sorted(changes, key=lambda change: -abs(change.saved_gpu_s))),
        cautions=tuple(_cautions(a, b, falls)),
    )


def _require_facts(result: Result) -> None:
    require(result.metadata, "label", "gpus", "train_gpus", "rollout_workers", "end_s", "scenario")


def counted_warmup(result: Result) -> int:
    """Return the warm-up steps; at most half of the updates, for a run that was stopped early."""
    updates: int = result.steps.num_rows
    refuse((not updates, "the run made no policy update; explain one that made some"))
    return min(int(result.metadata["scenario"]["warmup_steps"]), updates // 2)


def _name(result: Result) -> str:
    return f"{result.metadata['label']}{', measured' if 'replay' in result.metadata else ''}"


def pool_kinds(cluster: Mapping[str, Any]) -> str:
    """Return the kind of a cluster's GPUs, or of both pools."""
    pool = cluster.get("train")
    return (
        cluster["gpu"]
        if pool is None
        else f"{cluster['gpu']} + {pool.get('gpu') or cluster['gpu']}"
    )


def _cautions(a: Result, b: Result, falls: list[Waterfall]) -> list[str]:
    """Return the differences of two runs beyond their systems."""
    cautions = []
    facts = [
        {
            "model": result.metadata["scenario"]["model"],
            "GPU": pool_kinds(result.metadata["scenario"]["cluster"]),
            "workload": result.metadata["scenario"]["workload"],
            "seed": result.metadata["scenario"]["seed"],
            "warm-up": counted_warmup(result),
            "updates": result.steps.num_rows,
        }
        for result in (a, b)
    ]
    for name, value in facts[0].items():
        if value != facts[1][name]:
            shown = f": {value} and {facts[1][name]}" if isinstance(value, str | int) else ""
            cautions.append(f"the two differ in {name}{shown}")
    trained = [
        sum(totals(result.steps.slice(counted_warmup(result)), "response_tokens"))
        for result in (a, b)
    ]
    tokens = [n / fall.samples for n, fall in zip(trained, falls, strict=True)]
    if abs(tokens[0] / tokens[1] - 1) > 0.03:
        cautions.append(
            f"A trained on {tokens[0]:,.0f} response tokens a sample, B on {tokens[1]:,.0f}: part of the difference is other "
            "samples; simulate more steps"
        )
    return cautions
