"""Synthesis: traces from a stated length model, for when there is no run yet.

Invariant: a draw depends on (seed, epoch, prompt, sample) alone. Each kind of draw has one random
stream for every (seed, epoch, sample), in which the prompt's id is the position; so more steps,
prompts or samples a group change no existing draw. The streams are raw PCG64 bits keyed by
SeedSequence, both of which numpy keeps stable from version to version.

The model: the log length of a response is

    location(step) + sigma * (√prompt_share * prompt effect(epoch) + √(1 - prompt_share) * response effect)

with standard normal effects; a prompt's effect follows an AR(1) process from epoch to epoch.
Lengths are then cut to [1, cap_tokens] and rounded, and each step's location is solved so that the
mean *after* the cut is `mean_tokens`.

Turns with an environment are optional. Their number is geometric (each turn is followed by another
with one fixed probability), or, with `turn_tokens`, in proportion to the response, so that prompts
with long responses have many turns. It is at most `cap_turns`, and one a token. The response is
divided among them equally, the first ones longer by a token, or by lognormal weights
(`turn_sigma`). Seconds and observations of the environment are one lognormal and one number, or
those of `tools`. A response ends where the context meets `context_cap_tokens`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, model_validator

from simrl.errors import refuse
from simrl.trace.draws import normals
from simrl.trace.lognormal import cut_tokens, location_of
from simrl.trace.tools import (
    Floats,
    Ints,
    Kind,
    Share,
    Sigma,
    Tools,
    call_columns,
    draw_calls,
    lists,
)
from simrl.trace.trace import Trace, TraceMetadata
from simrl.validation import Section

MeanTokens = Annotated[float, Field(gt=1, allow_inf_nan=False)]
LARGEST_INT32 = 2**31 - 1  # the limit of a trace's columns
MOST_SAMPLES = 100_000_000  # about 10 GB while they are drawn
CapTokens = Annotated[int, Field(gt=1, le=LARGEST_INT32)]


class LengthModel(Section):
    """The lengths of prompts and responses, and their correlation within a group and over epochs.

    Raises pydantic's `ValidationError` for a value outside its bounds; `synthesise` checks that the
    mean is possible under the cap.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(  # what verl, TRL and slime call it
        ("rollout_n", "n", "num_generations", "n_samples_per_prompt"), "it is group={}"
    )

    steps: int = Field(gt=0, description="training steps; the last epoch may be incomplete")
    prompts_per_step: int = Field(gt=0, description="prompts a step, each sampled `group` times")
    group: int = Field(gt=0, description="responses a prompt (GRPO's group size)")
    cap_tokens: CapTokens = Field(
        description="largest response; longer ones are cut to it (finish_reason 'length')"
    )
    prompts: int | None = Field(
        default=None,
        gt=0,
        description="prompts of the data set; an epoch has floor(prompts / prompts_per_step) steps, and the remaining "
        "prompts are left out, as data loaders do; empty: just enough for the whole run to be one epoch",
    )
    shuffle: bool = Field(
        default=True,
        description="a new order of the prompts in each epoch; else in order of their id",
    )
    mean_tokens: MeanTokens | tuple[MeanTokens, MeanTokens] | None = Field(
        default=None,
        description="mean length of a response after the cap, over all its turns; a pair gives the means of the first and the "
        "last step, linear between them (so lengths depend on `steps`); empty: turns × turn_tokens",
    )
    sigma: Sigma = Field(description="standard deviation of the log response length before the cap")
    prompt_share: Share = Field(
        default=0.5,
        description="share of the log variance that comes from the prompt: the correlation of two responses of a group",
    )
    epoch_correlation: Share = Field(
        default=0.95, description="correlation of a prompt's effect between adjacent epochs"
    )
    early_stop_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of responses, whatever the prompt, that give up early",
    )
    early_stop_factor: float = Field(
        default=0.1,
        ge=0.001,
        le=1,
        description="their length as a multiple of the length without an early stop",
    )
    prompt_tokens: MeanTokens = Field(
        default=256.0,
        description="mean prompt length, lognormal; a prompt keeps its length in all epochs",
    )
    prompt_sigma: Sigma = Field(
        default=0.0, description="standard deviation of the log prompt length"
    )
    prompt_cap_tokens: CapTokens = Field(
        default=2048, description="largest prompt; longer ones are cut to it"
    )
    system_prompt_tokens: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="tokens of the system prompt, one text that precedes every prompt",
    )
    reward_mean: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="share of responses with reward 1, the others have 0; empty: no rewards",
    )
    reward_prompt_share: Share = Field(
        default=0.5,
        description="correlation, within a group, of the normal variable that decides right or wrong: at 0 all prompts are "
        "equally hard, at 1 every group is all right or all wrong; independent of length",
    )

    turns: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="mean number of turns of a response before cap_turns; 1: no environment, unless turn_tokens is given",
    )
    cap_turns: int = Field(
        default=64, gt=0, le=1000, description="maximum number of turns of a response"
    )
    turn_tokens: float | None = Field(
        default=None,
        ge=1,
        le=1e6,
        description="mean tokens of a turn: a response of n × turn_tokens has n turns; empty: the number of turns is "
        "geometric and does not depend on the length",
    )
    turn_sigma: Sigma = Field(
        default=0.0,
        description="standard deviation of the log of a turn's share of its response; 0: equal turns",
    )
    context_cap_tokens: int | None = Field(
        default=None,
        gt=1,
        le=LARGEST_INT32,
        description="largest context: prompt, response and observations; a response that reaches it ends there "
        "(finish_reason 'length'), so that the mean is below mean_tokens",
    )
    tools: Tools = Field(
        default={},
        description="the environment's tools, by name, one call a turn; they replace environment_s, environment_sigma and "
        "observation_tokens",
    )
    environment_s: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="mean seconds that the environment takes after each turn but the last",
    )
    environment_sigma: Sigma = Field(
        default=0.0, description="standard deviation of the logarithm of environment_s"
    )
    observation_tokens: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="tokens that the environment adds to the context after each turn but the last",
    )

    @model_validator(mode="after")
    def _check(self) -> LengthModel:
        samples = self.steps * self.prompts_per_step * self.group
        has_turns = self.cap_turns > 1 and (self.turns > 1 or self.turn_tokens is not None)
        between = ("tools", "environment_s", "environment_sigma", "observation_tokens")
        first_between = next((key for key in between if getattr(self, key)), None)
        largest = self.prompt_cap_tokens if self.prompt_sigma else round(self.prompt_tokens)
        prompt = self.system_prompt_tokens + largest
        refuse(
            (
                self.prompts is not None and self.prompts < self.prompts_per_step,
                f"prompts {self.prompts} is less than one step's prompts_per_step {self.prompts_per_step}",
            ),
            (
                max(samples, self.dataset_prompts) > MOST_SAMPLES,
                f"steps × prompts_per_step × group is {samples:,} samples of {self.dataset_prompts:,} prompts; "
                f"stay under {MOST_SAMPLES:,} (a trace that is too short is repeated)",
            ),
            (
                self.turn_tokens is None and self.mean_tokens is None,
                "key mean_tokens is missing; or give turns and turn_tokens, whose product it is",
            ),
            (
                self.turn_tokens is not None and self.mean_tokens is not None and self.turns > 1,
                f"turns {self.turns:g} beside mean_tokens and turn_tokens, whose ratio it is; let turns be 1",
            ),
            (
                self.turn_tokens is not None and self.turns >= self.cap_turns > 1,
                f"turns {self.turns:g} cannot be reached under cap_turns {self.cap_turns}; raise cap_turns",
            ),
            (
                self.tools
                and (self.environment_s or self.environment_sigma or self.observation_tokens),
                "tools beside environment_s, environment_sigma or observation_tokens; leave these out",
            ),
            (
                first_between and not has_turns,
                f"{first_between}: comes between turns, and there is one turn; give turns or turn_tokens",
            ),
            (
                self.context_cap_tokens is not None and self.context_cap_tokens <= prompt,
                f"context_cap_tokens {self.context_cap_tokens} leaves no room behind the largest prompt of {prompt} tokens "
                "(system_prompt_tokens and prompt_cap_tokens); raise it",
            ),
            error=ValueError,
        )
        return self

    @property
    def means(self) -> tuple[float, float]:
        """Return the mean response of the first and of the last step."""
        if self.mean_tokens is None:
            return (self.turns * (self.turn_tokens or 1.0),) * 2
        return self.mean_tokens if isinstance(self.mean_tokens, tuple) else (self.mean_tokens,) * 2

    @property
    def longest_tokens(self) -> int:
        """Return the cap of a response, also by its number of turns."""
        by_turns = math.inf if self.turn_tokens is None else self.cap_turns * self.turn_tokens
        return max(round(min(self.cap_tokens, by_turns)), 1)

    @property
    def in_turns(self) -> bool:
        """Return whether responses have turns."""
        return self.turns > 1 or self.turn_tokens is not None or self.context_cap_tokens is not None

    @property
    def dataset_prompts(self) -> int:
        """Return the size of the data set, also if `prompts` is empty."""
        return self.prompts or self.steps * self.prompts_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole steps that the data set has prompts for."""
        return self.dataset_prompts // self.prompts_per_step


PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("length_models.toml").read_text(encoding="utf-8")
)


class _Stream(IntEnum):
    """The kinds of draws; a number keeps its meaning for ever, or old seeds would give other
    traces."""

    PROMPT_LENGTH = 0
    PROMPT_EFFECT = 1
    RESPONSE_EFFECT = 2
    ORDER = 3
    EARLY_STOP = 4
    DIFFICULTY = 5
    REWARD = 6
    TURNS = 7
    ENVIRONMENT = 8


def synthesise(model: LengthModel, seed: int, name: str = "synthetic") -> Trace:
    """Return a trace drawn from `model`; equal (model, seed) give equal traces, on any machine.

    Raises `InputError` for a negative seed and for a mean that the cap makes unreachable.
    """
    refuse((seed < 0, f"length model: seed {seed} is negative; give a whole number from 0"))
    location = _locations(model)
    prompt_location = location_of(
        model.prompt_tokens, model.prompt_sigma, model.prompt_cap_tokens, "prompt_tokens"
    )
    prompt_normal = _normals(seed, _Stream.PROMPT_LENGTH, model.dataset_prompts)
    prompt_tokens = cut_tokens(
        prompt_location + model.prompt_sigma * prompt_normal, model.prompt_cap_tokens
    )
    difficulty = _normals(seed, _Stream.DIFFICULTY, model.dataset_prompts)

    parts: list[dict[str, Any]] = []
    effect = _normals(seed, _Stream.PROMPT_EFFECT, model.dataset_prompts)
    for epoch in range(-(-model.steps // model.steps_per_epoch)):
        if epoch:
            news = _normals(seed, _Stream.PROMPT_EFFECT, model.dataset_prompts, epoch)
            effect = (
                model.epoch_correlation * effect + math.sqrt(1 - model.epoch_correlation**2) * news
            )
        parts.append(_epoch_columns(model, seed, epoch, location, effect, difficulty))
    columns: dict[str, Any] = {
        key: np.concatenate([part[key] for part in parts]) for key in parts[0]
    }
    columns["prompt_tokens"] = model.system_prompt_tokens + prompt_tokens[columns["prompt_id"]]
    if model.in_turns:
        columns.update(_turn_columns(model, seed, columns))
    columns["finish_reason"] = pa.DictionaryArray.from_arrays(
        pa.array(columns.pop("cut").astype(np.int8)), pa.array(["stop", "length"])
    )
    drawn_from = model.model_dump(mode="json")
    drawn_from["tools"] = {
        name: t.model_dump(mode="json", exclude_defaults=True) for name, t in model.tools.items()
    }
    metadata = TraceMetadata(
        name=name,
        kind="synthetic",
        source=json.dumps({"generator": "simrl.synthesis", "seed": seed, "model": drawn_from}),
        licence="Apache-2.0",
        tokenizer="none (lengths are drawn)",
        cap_tokens=model.cap_tokens,
        context_cap_tokens=model.context_cap_tokens,
        shared_prefix_tokens=model.system_prompt_tokens,
    )
    return Trace.from_columns(columns, metadata, origin=f"length model {name!r}")


def _epoch_columns(
    model: LengthModel, seed: int, epoch: int, location: Floats, effect: Floats, difficulty: Floats
) -> dict[str, NDArray[Any]]:
    """Return one epoch's rows in order of (step, prompt, sample); `cut` marks the responses that
    met the cap."""
    from scipy.special import ndtr, ndtri

    first_step = epoch * model.steps_per_epoch
    steps = min(model.steps_per_epoch, model.steps - first_step)
    order = np.arange(model.dataset_prompts)
    if model.shuffle:
        order = np.argsort(_bits(seed, _Stream.ORDER, model.dataset_prompts, epoch), kind="stable")
    used = np.sort(order[: steps * model.prompts_per_step].reshape(steps, -1), axis=1).ravel()

    def standard(stream: _Stream, *turn: int) -> Floats:
        """Return one standard normal for each used prompt and sample (at a turn), (len(used),
        group)."""
        out = np.empty((len(used), model.group))
        for sample in range(model.group):
            out[:, sample] = _normals(seed, stream, model.dataset_prompts, epoch, sample, *turn)[
                used
            ]
        return out

    step = np.repeat(np.arange(first_step, first_step + steps), model.prompts_per_step)
    prompt_part = location[step] + model.sigma * math.sqrt(model.prompt_share) * effect[used]
    response_part = (
        model.sigma * math.sqrt(1 - model.prompt_share) * standard(_Stream.RESPONSE_EFFECT)
    )
    log_tokens = prompt_part[:, None] + response_part
    if model.early_stop_share:
        early = standard(_Stream.EARLY_STOP) < ndtri(model.early_stop_share)
        log_tokens += math.log(model.early_stop_factor) * early
    columns: dict[str, NDArray[Any]] = {
        "step": np.repeat(step, model.group).astype(np.int32),
        "epoch": np.full(log_tokens.size, epoch, dtype=np.int32),
        "prompt_id": np.repeat(used, model.group).astype(np.int64),
        "sample": np.tile(np.arange(model.group, dtype=np.int32), len(used)),
        "response_tokens": cut_tokens(log_tokens.ravel(), model.longest_tokens),
        "cut": (log_tokens > math.log(model.longest_tokens)).ravel(),
    }
    if model.reward_mean is not None:
        prompt_part = math.sqrt(model.reward_prompt_share) * difficulty[used]
        latent = prompt_part[:, None] + math.sqrt(1 - model.reward_prompt_share) * standard(
            _Stream.REWARD
        )
        columns["reward"] = (latent < ndtri(model.reward_mean)).ravel().astype(np.float32)
    if model.in_turns:
        drawn = np.ones(log_tokens.size, dtype=np.int64)
        if model.turn_tokens is not None:
            drawn = np.rint(columns["response_tokens"] / model.turn_tokens).astype(np.int64)
        elif model.turns > 1:
            # Geometric, by inversion: the share of responses with more than k turns is (1 - 1 /
            # turns) ** k.
            log_more = np.log(ndtr(standard(_Stream.TURNS))) / math.log1p(-1 / model.turns)
            drawn = 1 + np.minimum(log_more, model.cap_turns - 1).astype(np.int64).ravel()
        columns["turns"] = np.minimum(
            np.clip(drawn, 1, model.cap_turns), columns["response_tokens"]
        )
        pauses = columns["turns"] - 1
        columns["pause_s"] = np.full(int(pauses.sum()), model.environment_s)
        if model.environment_sigma and (most := int(pauses.max())):
            deviations = model.environment_sigma * np.stack(
                [standard(_Stream.ENVIRONMENT, turn).ravel() for turn in range(most)], axis=1
            )
            seconds = model.environment_s * np.exp(deviations - model.environment_sigma**2 / 2)
            columns["pause_s"] = seconds[np.arange(most) < pauses[:, None]]
    return columns


def _turn_columns(model: LengthModel, seed: int, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the turns of all responses, and the columns that the context's cap changes; takes
    `turns` and `pause_s` away."""
    turns, pause_s = columns.pop("turns"), columns.pop("pause_s")
    row = np.repeat(np.arange(len(turns)), turns)
    place = np.arange(len(row)) - np.repeat(np.cumsum(turns) - turns, turns)
    last = place == turns[row] - 1
    keys = (*(columns[name][row] for name in ("epoch", "prompt_id", "sample")), place)
    tokens = _divided(model.turn_sigma, seed, columns["response_tokens"], turns, row, keys)
    observations = np.full(len(pause_s), model.observation_tokens, dtype=np.int64)
    calls = None
    if model.tools:
        calls = draw_calls(model.tools, seed, *(key[~last] for key in keys))
        pause_s, observations = calls.seconds, calls.observation_tokens
    changed: dict[str, Any] = {}
    if model.context_cap_tokens is not None:
        added = np.zeros(len(row), dtype=np.int64)
        added[~last] = observations
        ends = np.cumsum(tokens + added)
        before = (
            ends
            - tokens
            - added
            - np.r_[0, ends][np.cumsum(turns) - turns][row]
            + columns["prompt_tokens"][row]
        )
        room = model.context_cap_tokens - before
        changed["cut"] = columns["cut"].copy()
        changed["cut"][row[tokens > room]] = True
        tokens, kept = np.minimum(tokens, room), room > 0
        turns = np.bincount(row[kept], minlength=len(turns))
        kept_pauses = (kept & (place < turns[row] - 1))[~last]
        tokens, pause_s, observations = (
            tokens[kept],
            pause_s[kept_pauses],
            observations[kept_pauses],
        )
        calls = None if calls is None else calls.at(kept_pauses)
        changed["response_tokens"] = np.bincount(row[kept], weights=tokens).astype(np.int32)
    edges, inner = np.r_[0, np.cumsum(turns)], np.r_[0, np.cumsum(turns - 1)]
    if model.turns > 1 or model.turn_tokens is not None:
        changed |= {
            "turn_tokens": lists(edges, tokens.astype(np.int32)),
            "turn_environment_s": lists(inner, pause_s.astype(np.float32)),
            "turn_observation_tokens": lists(inner, observations.astype(np.int32)),
        }
    return changed if calls is None else {**changed, **call_columns(model.tools, calls, inner)}


def _divided(
    sigma: float,
    seed: int,
    response: NDArray[Any],
    turns: Ints,
    row: Ints,
    keys: tuple[Any, ...],
) -> Ints:
    """Return the tokens of all turns, of which each has one or more: equal parts, the first ones
    longer by a token, or parts by lognormal weights of this sigma."""
    whole: Ints = response.astype(np.int64)
    if not sigma:
        return np.asarray((whole // turns)[row] + (keys[-1] < (whole % turns)[row]))
    # Whole weights have exact sums, so that the parts of a response depend on no other response.
    weights = (
        np.rint(2.0**20 * np.exp(sigma * normals(seed, Kind.TURN_LENGTH, *keys))).astype(np.int64)
        + 1
    )
    sums, ends = np.cumsum(weights), np.cumsum(turns)
    before = sums[ends - turns] - weights[ends - turns]
    share = (sums - before[row]) / (sums[ends - 1] - before)[row]
    done = np.rint(share * (whole - turns)[row]).astype(np.int64)
    return np.asarray(1 + done - np.where(keys[-1] == 0, 0, np.r_[0, done[:-1]]))


def _bits(
    seed: int, stream: _Stream, count: int, epoch: int = 0, sample: int = 0, *turn: int
) -> NDArray[np.uint64]:
    """Return the first `count` 64-bit words of the stream: word i belongs to prompt i."""
    key = np.random.SeedSequence([stream, epoch, sample, *turn, seed])
    return np.asarray(np.random.PCG64(key).random_raw(count))


def _normals(
    seed: int, stream: _Stream, count: int, epoch: int = 0, sample: int = 0, *turn: int
) -> Floats:
    """Return standard normals from `_bits`; the 53 high bits, moved by half a step, are never 0 or
    1."""
    from scipy.special import ndtri  # takes 0.2 s to import, which a recorded trace need not pay

    uniform = ((_bits(seed, stream, count, epoch, sample, *turn) >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.asarray(ndtri(uniform))


def _locations(model: LengthModel) -> Floats:
    """Return each step's location, (steps,)."""

    @cache
    def location(mean: float) -> float:
        stops = model.early_stop_share, model.early_stop_factor
        return location_of(mean, model.sigma, model.longest_tokens, "mean_tokens", *stops)

    return np.array([location(mean) for mean in np.linspace(*model.means, model.steps).tolist()])
