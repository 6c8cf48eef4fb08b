"""Metrics: pure functions of a `Result`. Every average is over one window: from the end of the last
warm-up update to the end of the last update. The filling of the pipelines is before it; `settled`
tells if staleness settled in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simrl.result.result import PREFILL_LANE, Result, codes


def window(result: Result, warmup_steps: int) -> tuple[float, float]:
    """Return the seconds between the update `warmup_steps` (counted from 1; 0 is the start) and the
    last one."""
    finished_s = result.steps.column("finished_s").to_numpy()
    return (float(finished_s[warmup_steps - 1]) if warmup_steps else 0.0), float(finished_s[-1])


def gpu_seconds(
    result: Result, start_s: float, end_s: float, of_judge: bool = False
) -> dict[tuple[bool, str], float]:
    """Return the GPU-seconds within the window by pairs: is the lane for rollout then, and the kind
    of span. The lanes of a standalone judge count only if asked for, and no others do then."""
    spans = result.spans
    started_s, ended_s = (spans.column(name).to_numpy() for name in ("started_s", "ended_s"))
    overlap_s = np.clip(np.minimum(ended_s, end_s) - np.maximum(started_s, start_s), 0.0, None)
    gpu_s = overlap_s * spans.column("gpus").to_numpy()
    (role, roles), (kind, kinds) = codes(spans.column("role")), codes(spans.column("kind"))
    rolls, judges = (
        role == (roles.index(name) if name in roles else -1) for name in ("rollout", "judge")
    )
    return {
        (rollout, name): float(
            gpu_s[(rolls == rollout) & (judges == of_judge) & (kind == code)].sum()
        )
        for rollout in (True, False)
        for code, name in enumerate(kinds)
    }


def totals(table: pa.Table, *columns: str) -> Iterator[int]:
    """Yield the sums of these columns."""
    return (int(table.column(name).to_numpy().sum()) for name in columns)


def rollout_bubble(gpu_s: Mapping[tuple[bool, str], float]) -> float:
    """Return the share of idle GPU-seconds (of `gpu_seconds`) on GPUs that roll out, without their
    training and switching (colocated)."""
    kinds = ("rollout", "load_weights", "load_drafter", "train_drafter", "idle")
    total_gpu_s = sum(gpu_s.get((True, kind), 0.0) for kind in kinds)
    return gpu_s.get((True, "idle"), 0.0) / total_gpu_s if total_gpu_s else 0.0


def occupancy(result: Result, start_s: float, end_s: float) -> float | None:
    """Return the mean share of the slots of its batch that a rollout worker fills while it runs:
    requests in the batch over requests in a full one (`full_batch` of the metadata: max_num_seqs,
    or the capacity of the KV cache at the run's mean context). At most 1, also where contexts are
    shorter than the mean. None for an engine that does not record it."""
    full, spans = result.metadata.get("full_batch"), result.spans
    if not full or "slot_s" not in spans.column_names:
        return None
    spans = spans.filter(
        pc.and_(pc.equal(spans.column("kind"), "rollout"), pc.is_valid(spans.column("slot_s")))
    )
    started_s, ended_s, slot_s = (
        spans.column(name).to_numpy() for name in ("started_s", "ended_s", "slot_s")
    )
    inside_s = np.clip(np.minimum(ended_s, end_s) - np.maximum(started_s, start_s), 0.0, None)
    slots_s = float(inside_s.sum()) * full["sequences"]
    return (
        min(float((slot_s * inside_s / (ended_s - started_s)).sum()) / slots_s, 1.0)
        if slots_s
        else None
    )


def prices(cluster: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return the prices of a GPU-hour of the cluster's GPUs and of its training pool, None without
    such a pool."""
    price, pool = cluster.get("cost_per_gpu_hour") or 0.0, cluster.get("train")
    if pool is None:
        return price, None
    pool_price = pool.get("cost_per_gpu_hour")
    return price, price if pool_price is None else pool_price


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """Return the speed-ups of rows: samples/s over the first row's (`speedup`), and over the first
    row's of the same variant (`speedup_in_variant`). A row without samples/s has none and is no
    first row."""
    first: dict[str | None, float] = {}
    over_first = []
    for row in rows:
        rate, groups = (
            row.get("samples_per_s"),
            {"speedup": None, "speedup_in_variant": row["variant"]},
        )
        over_first.append(
            {
                name: None if rate is None else rate / first.setdefault(group, rate)
                for name, group in groups.items()
            }
        )
    return over_first


def summary(
    result: Result,
    warmup_steps: int,
    cost_per_gpu_hour: float = 0.0,
    train_cost_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """Return the row of a comparison.

    samples_per_s             trained samples a second
    tokens_per_s              trained tokens a second, prompt + response
    step_s                    seconds a policy update
    rollout_bubble            share of idle GPU-seconds on GPUs that roll out, their training and switching (colocated) not
                              counted; training the drafter meanwhile is no bubble
    occupancy                 share of the slots of its batch that a rollout worker fills while it runs (`occupancy`); None
                              for an engine that does not record it
    train_idle                share of idle GPU-seconds on GPUs that only train; 0 if colocated, where waiting counts above
    off_policyness_mean, _max update's version minus the version that generated a token; the mean is over tokens
    carried_share             share of the trained tokens that an earlier step generated and carried over; they are not in
                              off_policyness but in carried_off_policyness_max
    dropped_share             share of all generated tokens, from the start on, that a rule threw away
    stale_samples             samples, from the start on, that were finished and dropped because they were too stale
    duplicate_share           share of all tokens generated, from the start on, that were duplicates of best-of-N: another
                              drafter finished the response first. No other column counts them
    migrated_share            share of all samples, from the start on, that were at more than one worker;
                              0 with prefill workers
    prefill_idle, decode_idle rollout_bubble of the prefill workers alone, and of the others; only where there are
                              prefill workers
    settled                   true if off-policyness no longer grew: its mean in the second half of the window is within 10 %
                              (or 0.1) of the first half's, and the mean token is no older than the warm-up is long. Where
                              not, a buffer was still filling
    gpu_hours_per_1k_samples  all GPUs, whatever they do
    cost_per_1k_samples       the same times the price of a GPU-hour; None without a price
    speculation               the method, and its parameters; "none" for plain decoding
    acceptance_rate           accepted draft tokens / drafted ones, of all samples from the start on; None without drafts
    speculation_rate          share of all generated tokens that came from drafts
    first_epoch_speculation_rate, later_speculation_rate
                              speculation_rate of the run's first epoch alone, in which a history has no responses yet, and of
                              later epochs; None without drafts or such samples
    acceptance                its source: the kind of the drafter's model, such as assumed; counted, if tokens were
                              drafted; None without drafts
    prefix_caching            true if the engines cache prefixes; None for a result without this record
    judge_idle                share of idle GPU-seconds on a standalone judge's GPUs, None for a colocated one; no column
                              without a judge
    judge_tokens              tokens that the judge wrote, from the start on; no column without a judge
    accept_length             tokens that a pass with a draft yields a response, the bonus token or correction included; None
                              without drafts

    Shares of tokens do not count evaluations, which have rows of their own (`evaluations`).
    """
    start_s, end_s = window(result, warmup_steps)
    seconds = end_s - start_s
    steps = result.steps.slice(warmup_steps)
    samples, prompt, response, carried = totals(
        steps, "samples", "prompt_tokens", "response_tokens", "carried_tokens"
    )
    of_training = result.samples.filter(pc.not_equal(result.samples.column("status"), "evaluation"))
    generated, duplicates, drafted, accepted = totals(
        of_training, "generated_tokens", "duplicate_tokens", "drafted_tokens", "accepted_tokens"
    )
    verifications, verified = totals(of_training, "verifications", "verified_tokens")
    dropped = result.samples.filter(pc.equal(result.samples.column("status"), "dropped"))
    gpu_s = gpu_seconds(result, start_s, end_s)
    gpus = int(result.metadata["gpus"])
    train_s = sum(v for (rolls, _), v in gpu_s.items() if not rolls)
    ages, tokens = (
        steps.column(name).to_numpy() for name in ("off_policyness_mean", "response_tokens")
    )
    parts = zip(np.array_split(ages, 2), np.array_split(tokens, 2), strict=True)
    halves = [float(np.average(a, weights=n)) for a, n in parts if a.size]
    age = float(np.average(ages, weights=tokens))
    gpu_hours = gpus * seconds / 3600 / samples * 1000
    judge = (result.metadata.get("scenario") or {}).get("judge") or {}
    judge_s = gpu_seconds(result, start_s, end_s, of_judge=True)
    dearer = (  # the judge's own GPUs
        (judge["cost_per_gpu_hour"] - cost_per_gpu_hour) * judge["gpus"] / gpus
        if judge.get("cost_per_gpu_hour") is not None
        else 0.0
    )
    speculation = result.metadata.get("speculation")
    return {
        "system": result.metadata["label"],
        "variant": result.metadata.get("variant") or "",
        "gpus": gpus,
        "samples_per_s": samples / seconds,
        "tokens_per_s": (prompt + response) / seconds,
        "step_s": seconds / steps.num_rows,
        "rollout_bubble": rollout_bubble(gpu_s),
        "occupancy": occupancy(result, start_s, end_s),
        "train_idle": gpu_s.get((False, "idle"), 0.0) / train_s if train_s else 0.0,
        "off_policyness_mean": age,
        "off_policyness_max": int(steps.column("off_policyness_max").to_numpy().max()),
        "carried_share": carried / response,
        "carried_off_policyness_max": int(
            steps.column("carried_off_policyness_max").to_numpy().max()
        ),
        "dropped_share": sum(totals(dropped, "generated_tokens")) / max(generated, 1),
        "stale_samples": result.metadata.get("stale_samples", 0),
        "duplicate_share": duplicates / max(generated + duplicates, 1),
        "migrated_share": 0.0 if "prefill" in result.metadata else _migrated_share(result),
        "settled": abs(halves[-1] - halves[0]) <= max(0.1 * halves[0], 0.1)
        and age <= warmup_steps + 0.1,
        "gpu_hours_per_1k_samples": gpu_hours,
        "cost_per_1k_samples": gpu_hours * (cost_per_gpu_hour + dearer) or None,
        **_of_pools(
            gpu_hours,
            result.metadata,
            cost_per_gpu_hour,
            train_cost_per_gpu_hour,
            gpu_hours * dearer,
        ),
        "speculation": speculation["method"] if speculation else "none",
        "acceptance_rate": accepted / drafted if drafted else None,
        "speculation_rate": accepted / max(generated, 1),
        **_of_drafts(result),
        **(
            {
                "judge_idle": judge_s[False, "idle"] / sum(judge_s.values())
                if judge["gpus"]
                else None,
                "judge_tokens": result.metadata["judge"]["generated_tokens"],
            }
            if judge
            else {}
        ),
        **_idle_by_kind(result, start_s, end_s),
        "prefix_caching": result.metadata.get("prefix_caching"),
        "accept_length": verified / verifications if verifications else None,
        **evaluations(result),
    }


def evaluations(result: Result) -> dict[str, float]:
    """Return what evaluations took, from the start on; nothing without evaluations.

    evaluations               number of evaluations that began
    evaluations_cut           of them, those that the end of the run cut
    evaluation_tokens         tokens that they generated, which are neither trained nor dropped
    evaluation_share          share of all generated tokens
    evaluation_mixed_share    share of their tokens that another version generated than theirs
    evaluation_s              seconds of an evaluation, first request to last token, on average
    """
    samples, segments = result.samples, result.segments
    rows = samples.filter(pc.equal(samples.column("status"), "evaluation"))
    tokens = next(totals(rows, "generated_tokens"))
    if not tokens:
        return {}
    of_rows = segments.filter(pc.is_in(segments.column("uid"), rows.column("uid").combine_chunks()))
    names = ("uid", "policy_version", "tokens", "started_s", "ended_s")
    uid, version, made, started_s, ended_s = (of_rows.column(name).to_numpy() for name in names)
    of_row = np.searchsorted(rows.column("uid").to_numpy(), uid)
    evaluated = rows.column("trace_step").to_numpy()[of_row]
    each = [evaluated == number for number in np.unique(evaluated)]
    return {
        "evaluations": len(each),
        "evaluations_cut": len(
            pc.unique(rows.filter(pc.is_null(rows.column("finished_s"))).column("trace_step"))
        ),
        "evaluation_tokens": tokens,
        "evaluation_share": tokens / next(totals(samples, "generated_tokens")),
        "evaluation_mixed_share": float(made[version != evaluated].sum() / tokens),
        "evaluation_s": float(np.mean([ended_s[of].max() - started_s[of].min() for of in each])),
    }


def _idle_by_kind(result: Result, start_s: float, end_s: float) -> dict[str, float]:
    """Return the bubble of prefill and of decode workers; nothing where there are no such pools."""
    prefills = pc.starts_with(result.spans.column("lane").cast(pa.string()), PREFILL_LANE)
    return {
        name: rollout_bubble(
            gpu_seconds(replace(result, spans=result.spans.filter(those)), start_s, end_s)
        )
        for name, those in (("prefill_idle", prefills), ("decode_idle", pc.invert(prefills)))
        if "prefill" in result.metadata
    }


def _of_drafts(result: Result) -> dict[str, Any]:
    """Return the source of the acceptance of drafts, and the shares of tokens from drafts in the
    first epoch and later."""
    drafters = [
        result.metadata.get("speculation"),
        *((result.metadata.get("best_of_n") or {}).get("drafters") or {}).values(),
    ]
    kinds = [
        drafter["acceptance"].get("kind")
        if isinstance(drafter["acceptance"], Mapping)
        else "counted"
        for drafter in drafters
        if drafter
    ]
    epoch, generated, accepted = (
        result.samples.column(name).to_numpy()
        for name in ("epoch", "generated_tokens", "accepted_tokens")
    )
    first = epoch == epoch.min(initial=np.iinfo(epoch.dtype).max)
    return {"acceptance": "assumed" if "assumed" in kinds else next(iter(kinds), None)} | {
        f"{part}_speculation_rate": float(accepted[of].sum() / generated[of].sum())
        if kinds and generated[of].any()
        else None
        for part, of in {"first_epoch": first, "later": ~first}.items()
    }


def _of_pools(
    gpu_hours: float,
    metadata: Mapping[str, Any],
    price: float,
    train_price: float | None,
    more: float,
) -> dict[str, Any]:
    """Return the training pool's part of the GPU-hours of 1,000 samples and of their cost, and this
    cost, `more` for a judge included; nothing where training has no pool of its own."""
    if train_price is None:
        return {}
    train_hours = gpu_hours * metadata["train_gpus"] / metadata["gpus"]
    cost = (gpu_hours - train_hours) * price + train_hours * train_price + more
    return {
        "cost_per_1k_samples": cost or None,
        "train_gpu_hours_per_1k_samples": train_hours,
        "train_cost_per_1k_samples": train_hours * train_price if cost else None,
    }


def _migrated_share(result: Result) -> float:
    """Return the share of samples with several workers. Segments are in the order of samples, then
    of time."""
    uid, worker = (result.segments.column(name).to_numpy() for name in ("uid", "worker"))
    moved = (uid[1:] == uid[:-1]) & (worker[1:] != worker[:-1])
    return float(np.unique(uid[1:][moved]).size / max(result.samples.num_rows, 1))
