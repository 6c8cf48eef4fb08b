"""Describes a trace as data. Every number is computed from the rows of the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.trace.trace import Trace
from simrl.trace.validate import is_present, list_sums

PERCENTILES = (5, 25, 50, 75, 95, 99)


def describe(trace: Trace) -> dict[str, Any]:
    """Return the trace in numbers, ready for JSON; None stands for numbers that it cannot give.

    `within_group_variance_share` is the share of the variance of log response lengths around the
    means of their steps that lies inside groups (a prompt's samples in one step); unbiased, so it
    may pass 1 a little. None without groups of two or where all lengths are equal. `share_at_cap`
    counts responses as long as the cap, with any finish_reason.
    """
    tokens, prompt_tokens = trace.column("response_tokens"), trace.column("prompt_tokens")
    sizes = np.diff(trace.group_starts, append=len(trace))
    return {
        "rows": len(trace),
        "steps": len(trace.step_slices),
        "epochs": len(np.unique(trace.column("epoch"))),
        "prompts": len(np.unique(trace.column("prompt_id"))),
        "group_min": int(sizes.min()),
        "group_max": int(sizes.max()),
        "group_mean": float(sizes.mean()),
        "prompt_tokens": _distribution(prompt_tokens),
        "response_tokens": _distribution(tokens),
        "prompt_tokens_total": int(prompt_tokens.sum(dtype=np.int64)),
        "response_tokens_total": int(tokens.sum(dtype=np.int64)),
        "cap_tokens": trace.metadata.cap_tokens,
        "share_at_cap": float(np.mean(tokens >= trace.metadata.cap_tokens)),
        "share_cut": _share_cut(trace),
        "within_group_variance_share": _within_group_variance_share(trace, sizes),
        "reward_mean": _reward_mean(trace),
        "has_token_ids": "response_ids" in trace.table.column_names,
        **_turns(trace),
        "context_tokens": _distribution(
            prompt_tokens.astype(np.int64) + tokens + trace.observation_tokens()
        ),
        "tools": _tools(trace),
        "metadata": trace.metadata.model_dump(),
    }


def _share_cut(trace: Trace) -> float | None:
    """Return the share of responses ended by a limit of length or context; None without recorded
    reasons."""
    if "finish_reason" not in trace.table.column_names:
        return None
    return float(np.mean(trace.column("finish_reason") == "length"))


def _turns(trace: Trace) -> dict[str, float]:
    """Return a response's mean number of pauses, their seconds, and the tokens of observations."""
    table, seconds = trace.table, np.zeros(len(trace))
    if "environment_s" in table.column_names:
        seconds = table.column("environment_s").fill_null(0).to_numpy().astype(np.float64)
    pauses = ((seconds > 0) & (trace.column("response_tokens") > 1)).astype(np.int64)
    if "turn_tokens" in table.column_names:
        turns = pc.list_value_length(table.column("turn_tokens"))
        pauses = np.where(turns.is_valid().to_numpy(), turns.fill_null(1).to_numpy() - 1, pauses)
    seconds = np.where(pauses > 0, seconds, 0)
    if "turn_environment_s" in table.column_names:
        lists = table.column("turn_environment_s").combine_chunks()
        seconds = np.where(is_present(lists), list_sums(lists), seconds)
    return {
        "pauses_mean": float(pauses.mean()),
        "environment_s_mean": float(seconds.mean()),
        "observation_tokens_mean": float(trace.observation_tokens().mean()),
    }


def _tools(trace: Trace) -> list[dict[str, Any]]:
    """Return the calls by tool, the most frequent first: their number, seconds and failed tries."""
    names = ("turn_tool", "turn_environment_s", "turn_failures", "turn_observation_tokens")
    if not set(names[:2]) <= set(trace.table.column_names):
        return []
    rows = trace.table.select([name for name in names if name in trace.table.column_names])
    rows = rows.filter(pc.and_(*(pc.is_valid(rows.column(name)) for name in names[:2])))
    calls = pd.DataFrame(
        {name: pc.list_flatten(rows.column(name)).to_numpy() for name in rows.column_names}
    )
    tools = []
    for tool, of_tool in calls.groupby("turn_tool"):
        seconds = of_tool["turn_environment_s"].to_numpy(np.float64)
        p50_s, p95_s = np.percentile(seconds, (50, 95)).tolist()
        tools.append(
            {
                "tool": tool,
                "calls": len(of_tool),
                "mean_s": float(seconds.mean()),
                "p50_s": p50_s,
                "p95_s": p95_s,
                "max_s": float(seconds.max()),
                "failed_tries": int(of_tool["turn_failures"].sum())
                if "turn_failures" in calls
                else None,
                "observation_tokens_mean": float(
                    of_tool["turn_observation_tokens"].mean()
                    if "turn_observation_tokens" in calls
                    else 0.0
                ),
            }
        )
    return sorted(tools, key=lambda facts: -facts["calls"])


def _distribution(tokens: NDArray[Any]) -> dict[str, float]:
    values = np.percentile(tokens, PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(tokens.mean()), **named, "max": float(tokens.max())}


def _within_group_variance_share(trace: Trace, sizes: NDArray[np.int64]) -> float | None:
    log_tokens = np.log(trace.column("response_tokens"))
    step_starts = np.array([first for _, first, _ in trace.step_slices])
    step_sizes = np.diff(step_starts, append=len(trace))

    def variance_around(first: NDArray[np.int64], size: NDArray[np.int64]) -> float:
        """Return the variance around the means of the parts; a mean takes one degree of freedom."""
        if len(trace) == len(first):
            return float("nan")
        rest = log_tokens - np.repeat(np.add.reduceat(log_tokens, first) / size, size)
        return float(rest @ rest) / (len(trace) - len(first))

    inside, total = (
        variance_around(trace.group_starts, sizes),
        variance_around(step_starts, step_sizes),
    )
    return inside / total if inside >= 0 and total > 0 else None


def _reward_mean(trace: Trace) -> float | None:
    reward = trace.column("reward") if "reward" in trace.table.column_names else np.empty(0)
    known = reward[~np.isnan(reward)]
    return float(known.mean(dtype=np.float64)) if known.size else None
