"""Tools of agents: how long their calls take, how often they fail, and what they add to the
context.

Invariant: a draw depends on the seed, its kind, and the call alone: (epoch, prompt, sample, turn),
and the number of the try. So more samples or turns change no existing call, and a tool added behind
the others changes only the calls that it takes over.

A call tries its tool up to 1 + `retries` times. A try fails by chance (`failure_share`), or because
it lasts longer than `timeout_s`, where it is ended. The seconds of a call are the sum over its
tries. The agent reads its observation, also after a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from simrl.errors import InputError, refuse
from simrl.trace.draws import normals, uniforms
from simrl.trace.lognormal import cut_tokens, location_of
from simrl.trace.trace import Trace
from simrl.validation import Model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Share = Annotated[float, Field(ge=0, le=1)]
Sigma = Annotated[float, Field(ge=0, le=3)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class Tool(Model):
    """A tool of an agent: the seconds of its calls, a lognormal or quantiles, and the tokens that
    they add to the context."""

    share: float = Field(
        gt=0, le=1, description="share of all calls; the shares of the tools sum to 1"
    )
    median_s: Seconds | None = Field(default=None, description="median seconds of a try, lognormal")
    sigma: Sigma = Field(
        default=0.0, description="standard deviation of the logarithm of these seconds"
    )
    quantiles_s: dict[Share, Seconds] | None = Field(
        default=None,
        min_length=2,
        description="in place of median_s: quantiles of the seconds of a try, such as {0: 2, 0.5: 8, 0.95: 40, 1: 60}; "
        "linear between them, and no try is shorter or longer",
    )
    least_s: Seconds = Field(
        default=0.0, description="minimum seconds of a try; shorter tries are lengthened to it"
    )
    most_s: Seconds | None = Field(
        default=None, description="maximum seconds of a try, stragglers excluded"
    )
    straggler_share: Share = Field(default=0.0, description="share of tries that straggle")
    straggler_factor: float = Field(
        default=1.0, ge=1, le=1e6, description="how many times as long a straggler takes"
    )
    failure_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of tries that fail, after the seconds of any other try",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="seconds after which a try is ended and has failed; empty: never",
    )
    retries: int = Field(
        default=0, ge=0, le=100, description="maximum number of further tries after a failed one"
    )
    observation_tokens: float = Field(
        default=0.0, ge=0, le=1e6, description="mean tokens of an observation"
    )
    observation_sigma: Sigma = Field(
        default=0.0, description="standard deviation of the logarithm of these tokens"
    )
    observation_cap_tokens: int = Field(
        default=1_000_000,
        gt=1,
        le=1_000_000,
        description="maximum tokens of an observation; longer ones are cut",
    )

    @model_validator(mode="after")
    def _check_seconds(self) -> Tool:
        most_s, quantiles_s = (
            math.inf if self.most_s is None else self.most_s,
            self.quantiles_s or {},
        )
        seconds = [quantiles_s[share] for share in sorted(quantiles_s)]
        refuse(
            (
                (self.median_s is None) == (self.quantiles_s is None),
                "give either median_s (with sigma) or quantiles_s",
            ),
            (most_s < self.least_s, f"most_s {most_s:g} is below least_s {self.least_s:g}"),
            (
                seconds != sorted(seconds),
                f"quantiles_s fall from {max(seconds, default=0):g}; give more seconds for a greater share",
            ),
            (
                self.observation_tokens >= self.observation_cap_tokens,
                f"observation_tokens {self.observation_tokens:g} is not below observation_cap_tokens "
                f"{self.observation_cap_tokens}; ask for less",
            ),
            error=ValueError,
        )
        return self

    def try_s(self, normals: Floats) -> Floats:
        """Return the seconds of tries with these standard normals, stragglers and timeouts left
        out."""
        if self.quantiles_s is not None:
            from scipy.special import ndtr

            shares = sorted(self.quantiles_s)
            seconds = np.interp(
                ndtr(normals), shares, [self.quantiles_s[share] for share in shares]
            )
        else:
            assert self.median_s is not None
            seconds = self.median_s * np.exp(self.sigma * normals)
        return np.asarray(np.clip(seconds, self.least_s, self.most_s))

    def tokens(self, normals: Floats) -> Ints:
        """Return the tokens of observations with these standard normals."""
        mean, cap = self.observation_tokens, self.observation_cap_tokens
        if mean <= 1 or not self.observation_sigma:
            return np.full(len(normals), round(mean))
        location = location_of(mean, self.observation_sigma, cap, "observation_tokens")
        return cut_tokens(location + self.observation_sigma * normals, cap).astype(np.int64)


def _check_shares(tools: dict[str, Tool]) -> dict[str, Tool]:
    total = sum(tool.share for tool in tools.values())
    if tools and not math.isclose(total, 1, abs_tol=1e-6):
        raise ValueError(f"the shares of {', '.join(tools)} sum to {total:.6g}; they must sum to 1")
    return tools


Tools = Annotated[dict[str, Tool], AfterValidator(_check_shares)]


class ToolFile(Model):
    """The tools of an agent, by name."""

    tools: Tools = Field(min_length=1)


class Calls(NamedTuple):
    """Calls of tools; arrays of one length. `failures` are failed tries."""

    tool: Ints
    seconds: Floats
    failures: Ints
    observation_tokens: Ints

    def at(self, kept: NDArray[np.bool_]) -> Calls:
        """Return some of the calls."""
        return Calls(
            self.tool[kept], self.seconds[kept], self.failures[kept], self.observation_tokens[kept]
        )


class Kind(IntEnum):
    """The kinds of draws; a number keeps its meaning for ever, or old seeds would give other
    calls."""

    TOOL = 0
    SECONDS = 1
    STRAGGLER = 2
    FAILURE = 3
    OBSERVATION = 4
    TURN_LENGTH = 5


def draw_calls(tools: Mapping[str, Tool], seed: int, *keys: NDArray[Any]) -> Calls:
    """Return the calls at these keys: arrays (epoch, prompt, sample, turn) of one length."""
    edges = np.cumsum([tool.share for tool in tools.values()])[:-1]
    chosen = np.searchsorted(edges, uniforms(seed, Kind.TOOL, *keys), side="right")
    count = len(chosen)
    calls = Calls(chosen, np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64))
    for number, tool in enumerate(tools.values()):
        rows = np.flatnonzero(chosen == number)
        calls.observation_tokens[rows] = tool.tokens(
            normals(seed, Kind.OBSERVATION, *(key[rows] for key in keys))
        )
        for attempt in range(1 + tool.retries):
            at: tuple[NDArray[Any] | int, ...] = (*(key[rows] for key in keys), attempt)
            seconds = tool.try_s(normals(seed, Kind.SECONDS, *at))
            straggles = uniforms(seed, Kind.STRAGGLER, *at) < tool.straggler_share
            seconds = np.where(straggles, seconds * tool.straggler_factor, seconds)
            failed = uniforms(seed, Kind.FAILURE, *at) < tool.failure_share
            if tool.timeout_s is not None:
                failed |= seconds > tool.timeout_s
                seconds = np.minimum(seconds, tool.timeout_s)
            calls.seconds[rows] += seconds
            calls.failures[rows] += failed
            rows = rows[failed]
    return calls


def lists(
    edges: NDArray[Any], values: Any, absent: NDArray[np.bool_] | None = None
) -> pa.ListArray:
    """Return rows of lists: `values` from an edge to the next; `absent` rows have none."""
    mask = None if absent is None else pa.array(absent)
    return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), pa.array(values), mask=mask)


def call_columns(
    tools: Mapping[str, Tool],
    calls: Calls,
    edges: NDArray[Any],
    absent: NDArray[np.bool_] | None = None,
) -> dict[str, pa.ListArray]:
    """Return the columns of a trace with the tool and the failed tries of each turn but the last,
    as lists."""
    names = pa.array(list(tools), pa.string()).take(pa.array(calls.tool))
    return {
        "turn_tool": lists(edges, names, absent),
        "turn_failures": lists(edges, calls.failures.astype(np.int32), absent),
    }


def with_tools(trace: Trace, tools: Mapping[str, Tool], seed: int, source: str) -> Trace:
    """Return the trace with drawn calls where the turns of a response have no recorded times;
    `source` names the tools.

    Recorded seconds and observations stay. The notes count the responses with drawn times. Raises
    `InputError` for a trace without turns, and where all their times are recorded.
    """
    columns = {name: trace.table.column(name).combine_chunks() for name in trace.table.column_names}
    if "turn_tokens" not in columns:
        raise InputError(
            f"trace {trace.metadata.name!r}: no column 'turn_tokens'; tools need a trace of responses in turns"
        )
    turns = columns["turn_tokens"]
    missing = turns.is_valid().to_numpy(zero_copy_only=False).copy()
    pauses = np.maximum(turns.value_lengths().fill_null(0).to_numpy().astype(np.int64) - 1, 0)
    for name in ("environment_s", "turn_environment_s"):
        if name in columns:
            missing &= columns[name].is_null().to_numpy(zero_copy_only=False)
    missing &= pauses > 0
    if not missing.any():
        raise InputError(
            f"trace {trace.metadata.name!r}: no turn lacks its time; its times are recorded, and stay"
        )
    row = np.repeat(np.flatnonzero(missing), pauses[missing])
    edges = np.r_[0, np.cumsum(np.where(missing, pauses, 0))]
    turn = np.arange(edges[-1]) - edges[:-1][row]
    calls = draw_calls(
        tools, seed, *(trace.column(name)[row] for name in ("step", "prompt_id", "sample")), turn
    )
    for name, values in {
        "turn_environment_s": lists(edges, calls.seconds.astype(np.float32), ~missing),
        "turn_observation_tokens": lists(
            edges, calls.observation_tokens.astype(np.int32), ~missing
        ),
        **call_columns(tools, calls, edges, ~missing),
    }.items():
        recorded = columns.get(name)
        first = (values, recorded) if name in ("turn_tool", "turn_failures") else (recorded, values)
        columns[name] = values if recorded is None else pc.coalesce(*first)
    share = f"{int(missing.sum()):,} of {len(trace):,} responses"
    note = f"The times of tools in {share} are drawn from {source} (seed {seed}), not recorded."
    metadata = trace.metadata.model_copy(update={"notes": f"{trace.metadata.notes} {note}".strip()})
    return Trace.from_columns(columns, metadata, origin=f"trace {trace.metadata.name!r} with tools")
