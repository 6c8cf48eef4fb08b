"""Allocation of one step of a trace to workers in RhymeRL's two tiers, as data.

Invariant: every time is τ of the history's lengths, of a measured table or else of `RolloutTimes` and
a profile; nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.dispatch.allocation import (
    PRECISION_S,
    Alternation,
    RankingGroup,
    Representative,
    best_max_workers,
    equal_workers,
    exact,
    growth_factor,
    median_tokens,
    predicted_s,
    ranking_groups,
    shortest_two_steps,
    step_s,
    two_step_sums,
    two_tier,
)
from simrl.dispatch.histopipe import SubBatches
from simrl.errors import InputError
from simrl.profile.drafted import Drafted
from simrl.profile.extension import covering
from simrl.profile.profile import TableProfile
from simrl.profile.rollout_times import RolloutTimes
from simrl.profile.tau import MeasuredTau
from simrl.trace.trace import Trace


def allocate_step(
    trace: Trace,
    profile: TableProfile,
    workers: int,
    groups: int,
    epoch: int | None = None,
    step: int | None = None,
    train_s: float = 0.0,
    min_workers: int = 1,
    max_workers: int | None = None,
    accept_length: float = 1.0,
    max_num_seqs: int = 256,
    alternation: Alternation = "reversed",
    representative: Representative = "responses",
    sub_batches: SubBatches = "prompts",
    precision_s: float = PRECISION_S,
    optimum: bool = False,
    tau: MeasuredTau | None = None,
) -> dict[str, Any]:
    """Return the allocation of one step's prompts to `workers`, ready for JSON.

    `epoch` is the history and `step` is allocated; by default, the last epoch but one and the first
    step after it. Where no epoch comes before the step, its own lengths stand for the history, and
    `notes` say so. Where the search of Fig. 12 finds no plan, the two-tier plan is `exact`'s. The
    plans are made with the measured `tau`, if there is one; `computed_s` are the seconds of the
    two-tier plan with τ computed from the profile. `sub_batches` are what the workers of a group
    are dealt, as in `simrl.dispatch.histopipe`. `max_workers` is by default `best_max_workers`.
    `optimum` adds `shortest_two_steps` to the compared plans. Raise `InputError` for an epoch or a
    step that the trace lacks and for an impossible allocation.
    """
    if not 1 <= groups <= workers:
        raise InputError(
            f"allocate: {groups} groups on {_workers(workers)}; each group needs a worker of its own"
        )
    epoch, step = _history_and_step(trace, epoch, step)
    ranked, samples, of_history = _ranked(trace, epoch, step, groups, representative)
    most = max(min(max_workers or workers, workers - (groups - 1) * min_workers), 1)
    prompt_tokens, together = of_history.pop("prompt_tokens"), of_history.pop("prompt_samples")
    together = together if sub_batches == "prompts" else 1
    batch, longest = (
        min(max(samples), max_num_seqs),
        round(max(float(group.lengths_tokens.max()) for group in ranked)),
    )
    of_groups = (
        [group.lengths_tokens for group in ranked],
        samples,
        most,
        [Drafted(accept_length)] * groups,
        together,
    )
    profile = covering(profile, batch, batch, prompt_tokens + longest)
    computed = RolloutTimes(profile, longest, max_num_seqs, prompt_tokens).table(*of_groups)
    seconds = tau.table(*of_groups) if tau else computed
    searched = True
    try:
        if max_workers is None:
            most = best_max_workers(seconds, workers, train_s, min_workers, precision_s)
        plan = two_tier(seconds[:, :most], workers, train_s, min_workers, precision_s)
    except InputError:
        plan, searched = exact(seconds[:, :most], workers, train_s, min_workers), False
    smallest = exact(seconds[:, :most], workers, train_s, min_workers)

    equal = equal_workers(groups, workers)
    plans = {"equal": equal, "two_tier": plan.workers, "exact": smallest.workers}
    if optimum:
        plans["optimum"] = shortest_two_steps(seconds, workers, min_workers)
    result: dict[str, Any] = {
        "history_epoch": epoch,
        "step": step,
        **of_history,
        "samples": sum(samples),
        "workers": workers,
        "min_workers": min_workers,
        "max_workers": most,
        "max_workers_chosen": max_workers is None and searched,
        "search_found_plan": searched,
        "train_s": train_s,
        "accept_length": accept_length,
        "max_num_seqs": max_num_seqs,
        "sub_batches": sub_batches,
        "precision_s": precision_s,
        "groups": _records(
            group=range(groups),
            prompts=[len(group.prompts) for group in ranked],
            samples=samples,
            representative_tokens=[group.representative_tokens for group in ranked],
            workers=plan.workers,
            equal_workers=equal,
            predicted_s=plan.predicted_s,
            equal_predicted_s=predicted_s(seconds, equal),
            target_s=plan.target_s,
            computed_s=predicted_s(computed, plan.workers),
        ),
        "t0_s": plan.t0_s,
        "gradient_s": plan.gradient_s,
        "exact_gradient_s": smallest.gradient_s,
        "needed_workers": list(plan.needed_workers),
        "leftover_workers": plan.leftover_workers,
        "alternation": alternation,
        "two_step_sums": two_step_sums(plan.predicted_s, plan.workers, alternation).tolist(),
        "plans": [_compared(name, seconds, counts, train_s) for name, counts in plans.items()],
        "growth_factor": _growth(trace, epoch),
        "profile": (
            of_profile
            := f"{profile.metadata.model} on {profile.metadata.gpu}, tp {profile.metadata.tp}"
        ),
        "tau": {
            "kind": "measured" if tau else "computed",
            "source": tau.source if tau else of_profile,
        },
    }
    return {**result, "notes": _notes(result) + (tau.warnings() if tau else [])}


def _ranked(
    trace: Trace, epoch: int, step: int, groups: int, representative: Representative
) -> tuple[Sequence[RankingGroup], list[int], dict[str, Any]]:
    """Return the ranking groups of the step's prompts, their samples, and the coverage of the step
    by the history."""
    epochs, steps, prompts, tokens = (
        trace.column(c) for c in ("epoch", "step", "prompt_id", "response_tokens")
    )
    in_step, in_history = steps == step, epochs == epoch
    known = in_step & np.isin(prompts, prompts[in_history])
    past = in_history & np.isin(prompts, prompts[in_step])
    if not known.any():
        raise InputError(
            f"allocate: no prompt of step {step} is in epoch {epoch}; choose another --epoch or --step"
        )
    ranked = ranking_groups(prompts[past], tokens[past], groups, representative)
    samples = [int(np.isin(prompts[known], group.prompts).sum()) for group in ranked]
    covered = {
        "history_is_own": bool((in_step & in_history).any()),
        "prompts_without_history": len(np.unique(prompts[in_step & ~known])),
        "prompt_tokens": round(float(trace.column("prompt_tokens")[known].mean())),
        "prompt_samples": int(np.unique(prompts[known], return_counts=True)[1].max()),
    }
    return ranked, samples, covered


def _records(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a dictionary for each row of the columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _history_and_step(trace: Trace, epoch: int | None, step: int | None) -> tuple[int, int]:
    """Return the epoch of the history and the step to allocate, of which both, one or none may be
    given."""
    epochs, steps = trace.column("epoch"), trace.column("step")
    every = np.unique(epochs).tolist()
    if epoch is not None and epoch not in every:
        raise InputError(
            f"--epoch {epoch}: the trace has the epochs {every[0]} to {every[-1]}; choose one of them"
        )
    if step is not None:
        if step not in steps:
            raise InputError(
                f"--step {step}: the trace has the steps {steps.min()} to {steps.max()}; choose one of them"
            )
        of_step = int(epochs[steps == step].max())
        if epoch is None:
            return max((e for e in every if e < of_step), default=of_step), step
        if epoch > of_step:
            raise InputError(
                f"--epoch {epoch}: step {step} is of epoch {of_step}, before it; choose an earlier history"
            )
        return epoch, step
    epoch = every[max(len(every) - 2, 0)] if epoch is None else epoch
    later = steps[epochs > epoch]
    return epoch, int(later.min() if later.size else steps[epochs == epoch].max())


def _compared(
    name: str, seconds: NDArray[np.float64], counts: Sequence[int], train_s: float
) -> dict[str, Any]:
    times = predicted_s(seconds, counts)
    return {
        "plan": name,
        "workers": list(counts),
        "longest_group_s": max(times),
        "longest_two_steps_s": float(two_step_sums(times, counts).max()),
        "step_s": {
            "reversed": step_s(times, counts, train_s),
            "pairing": step_s(times, counts, train_s, pairing=True),
        },
    }


def _growth(trace: Trace, epoch: int) -> float | None:
    """Return β from the epoch before the history to the history; None if they share no prompt."""
    epochs, prompts, tokens = (trace.column(c) for c in ("epoch", "prompt_id", "response_tokens"))
    before, now = epochs == max(epochs[epochs < epoch], default=epoch), epochs == epoch
    if epochs.min() == epoch or not np.isin(prompts[now], prompts[before]).any():
        return None
    return growth_factor(
        median_tokens(prompts[before], tokens[before]), median_tokens(prompts[now], tokens[now])
    )


def _workers(number: int) -> str:
    """Return a number with its word."""
    return f"{number} worker{'s' * (number != 1)}"


def _notes(d: dict[str, Any]) -> list[str]:
    """Return the decisions that the paper, or the trace, leaves open."""
    several = len(d["groups"]) > 1
    bounded = d["groups"][0]["workers"] == d["max_workers"] and d["t0_s"] > d["train_s"]
    notes = {
        f"No epoch before step {d['step']} is the history: its own lengths (epoch {d['history_epoch']}) stand for it, "
        "a forecast that is never wrong.": d["history_is_own"],
        f"Left out for want of a history: {d['prompts_without_history']} of the step's prompts.": d[
            "prompts_without_history"
        ],
        f"At most {_workers(d['max_workers'])} a group: the bound with which a step is shortest in the long run; "
        "the paper leaves it to its user.": d["max_workers_chosen"],
        f"Training (--train-seconds {d['train_s']:g}) is shorter than the shortest group on {_workers(d['max_workers'])} "
        f"({d['t0_s']:.1f} s), so t0 is that, and the group gets as many.": several and bounded,
        f"Not needed for the target: {_workers(d['leftover_workers'])}, given to the slowest groups that "
        "they make faster (the paper does not say where they go).": d["leftover_workers"],
        "The longest group ends by t0 with the fewest workers: no gradient is needed.": d[
            "gradient_s"
        ]
        == 0
        and several,
        "The search of Fig. 12 finds no plan, even at its largest gradient: the two-tier plan is the exact one, as in a "
        "run with max_workers; a run without it has equal numbers.": not d["search_found_plan"],
    }
    return [note for note, holds in notes.items() if holds]
