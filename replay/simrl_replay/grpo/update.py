"""One update of the policy: log-probs, then a few steps of the optimizer.

Invariant: proximal is the policy before the update; behaviour, for each token, the version that
generated it. Both are fixed before the first step. Equal models, optimizers and trajectories give
equal weights: mini-batches are drawn by seed and version, and micro-batches change nothing but
rounding.

Weights of a past version are needed only for the tokens that it generated; its forward pass ends
with the last of them.

Weights in bfloat16 have masters in float32: these gather the gradients of all micro-batches and are
what the optimizer changes; the weights are copies of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field

from simrl.validation import MOST_SEED
from simrl_replay.grpo.loss import LossConfig, advantages, kl, token_losses
from simrl_replay.grpo.policy import (
    TokenIds,
    Weights,
    clip_gradient,
    log_probs,
    micro_batches,
    token_places,
    token_values,
)


class UpdateConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Parameters of an update."""

    objective: Literal["decoupled", "ppo"] = Field(
        default="decoupled",
        description="what an update stays near: the policy as it finds it (AReaL), or the one that drew the tokens (PPO, "
        "GRPO); the same where all tokens are of the current version",
    )
    loss: LossConfig = LossConfig()
    drop_equal_groups: bool = Field(
        default=False,
        description="groups of equal rewards are left out, tokens and all (DAPO); else they only count in the mean over tokens",
    )
    minibatches: int = Field(
        default=1, ge=1, description="optimizer steps an epoch; each sees another part of the batch"
    )
    ppo_epochs: int = Field(default=1, ge=1, description="passes over the batch")
    micro_batch_tokens: int = Field(
        default=1024, ge=1, description="in one forward or backward pass, padding included"
    )
    learning_rate: float = Field(
        default=5e-5,
        gt=0,
        description="of AdamW; with 128 responses an update, 3e-4 was seen to unlearn the arithmetic of a warm-up",
    )
    weight_decay: float = Field(default=0.0, ge=0)
    grad_norm: float = Field(
        default=1.0, gt=0, description="a longer gradient is cut to this length"
    )
    seed: int = Field(default=0, ge=0, le=MOST_SEED)


class Trajectory(NamedTuple):
    """A response for training: its reward, its group (the prompt's responses), and its segments
    (policy version, tokens), in order."""

    ids: TokenIds
    reward: float
    group: int
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of an update; means are over the tokens of all its steps, unless noted."""

    responses: int
    dropped_responses: int  # in groups of equal rewards
    tokens: int  # of the responses, each counted once
    loss: float
    clip_fraction: float
    kl: float  # of the proximal policy from the one in training
    entropy: float  # nat a token
    importance_weight: float  # proximal / behaviour, before the cap; 1 on policy
    capped_fraction: float
    grad_norm: float  # before clipping; mean over the steps
    log_prob_s: float
    train_s: float


def make_optimizer(model: Any, config: UpdateConfig) -> Any:
    """Return AdamW over all weights, or over their masters."""
    weights = list(model.parameters())
    masters = (
        weights
        if weights[0].dtype == torch.float32
        else [weight.detach().float() for weight in weights]
    )
    optimizer = torch.optim.AdamW(
        masters,
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        fused=weights[0].is_cuda or None,
    )
    if masters is not weights:
        for weight, master in zip(weights, masters, strict=True):
            weight.register_post_accumulate_grad_hook(partial(_gather, master))
        optimizer.register_step_post_hook(lambda *_: _copy(masters, weights))
    return optimizer


def _gather(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Add the gradient of a micro-batch to the master's."""
    assert weight.grad is not None
    master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
    weight.grad = None


def _copy(masters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    for master, weight in zip(masters, weights, strict=True):
        weight.data.copy_(master)


class WithLogProbs(NamedTuple):
    """Trajectories to train, each with its advantage, and the log-probs of their tokens under the
    proximal and the behaviour policy, flat. `dropped` responses are in groups of equal rewards."""

    weighted: Sequence[tuple[Trajectory, float]]
    proximal: torch.Tensor
    behaviour: torch.Tensor
    dropped: int


def update(
    model: Any,
    optimizer: Any,
    batch: Sequence[Trajectory],
    version: int,
    past: Mapping[int, Weights],
    config: UpdateConfig,
    on_log_probs: Callable[[float], None] = lambda _: None,
) -> UpdateStats:
    """Update `model`, which is at `version`, in place. `on_log_probs` is called with the seconds of
    the log-probs, before the first step. Raise as `score` and `train` do."""
    started = time.perf_counter()
    scored = score(model, batch, version, past, config)
    log_prob_s = time.perf_counter() - started
    on_log_probs(log_prob_s)
    return replace(train(model, optimizer, scored, version, config), log_prob_s=log_prob_s)


def score(
    model: Any,
    batch: Sequence[Trajectory],
    version: int | None,
    past: Mapping[int, Weights],
    config: UpdateConfig,
) -> WithLogProbs:
    """Compute advantages and log-probs. `past` has the weights of the versions that generated
    tokens of the batch, but for `version`, which the model has (None: it is at none, but within an
    update). Raise `ValueError` for tokens of a version without weights, or segments that do not add
    up to the response."""
    weighted = _with_advantages(batch, config)
    trained = [trajectory for trajectory, _ in weighted]
    log_probs_of = _log_prob_phase(model, trained, version, past, config)
    return WithLogProbs(weighted, *log_probs_of, len(batch) - len(weighted))


def train(
    model: Any, optimizer: Any, scored: WithLogProbs, version: int, config: UpdateConfig
) -> UpdateStats:
    """Make the optimizer's steps on scored trajectories, in place; `version` draws the mini-batches.
    Raise `StoppedError` for a gradient that is not finite."""
    weighted, proximal, behaviour, dropped = scored
    started = time.perf_counter()
    sums, norms = _train_phase(model, optimizer, weighted, proximal, behaviour, version, config)
    ended = time.perf_counter()
    means = (sums / sums[-1] if sums[-1] else sums).tolist()
    return UpdateStats(
        responses=len(weighted),
        dropped_responses=dropped,
        tokens=len(proximal),
        loss=means[0],
        clip_fraction=means[1],
        kl=means[2],
        entropy=means[3],
        importance_weight=float((proximal - behaviour).exp().mean()) if len(proximal) else 1.0,
        capped_fraction=means[4],
        grad_norm=float(np.mean(norms)) if norms else 0.0,
        log_prob_s=0.0,
        train_s=ended - started,
    )


def _with_advantages(
    batch: Sequence[Trajectory], config: UpdateConfig
) -> list[tuple[Trajectory, float]]:
    own = advantages(
        [t.reward for t in batch], [t.group for t in batch], config.loss.normalise_std
    ).tolist()
    rewards: dict[int, set[float]] = {}
    for trajectory in batch:
        rewards.setdefault(trajectory.group, set()).add(trajectory.reward)
    return [
        (trajectory, advantage)
        for trajectory, advantage in zip(batch, own, strict=True)
        if not config.drop_equal_groups or len(rewards[trajectory.group]) > 1
    ]


def _log_prob_phase(
    model: Any,
    trained: Sequence[Trajectory],
    version: int | None,
    past: Mapping[int, Weights],
    config: UpdateConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of all tokens under the proximal and the behaviour policy, flat."""
    drew = _drew(trained)
    places = token_places([len(t.ids.response) for t in trained])
    behaviour = torch.empty(len(drew))
    current = None
    if config.objective == "decoupled":
        current = log_probs(model, [t.ids for t in trained], config.micro_batch_tokens)
    for each in np.unique(drew).tolist():
        if each == version and current is not None:
            behaviour[drew == each] = current[drew == each]
            continue
        if each != version and each not in past:
            raise ValueError(
                f"tokens of policy version {each}, whose weights are not there (at {version}; {sorted(past)} are)"
            )
        prefixes, where = [], []
        for trajectory, place in zip(trained, places, strict=True):
            its_own = np.flatnonzero(drew[place] == each)
            if len(its_own):
                end = int(its_own[-1]) + 1
                prefixes.append(TokenIds(trajectory.ids.prompt, trajectory.ids.response[:end]))
                where.append(place[:end])
        at = np.concatenate(where)
        values = log_probs(
            model, prefixes, config.micro_batch_tokens, None if each == version else past[each]
        )
        behaviour[at[drew[at] == each]] = values[drew[at] == each]
    return (behaviour if current is None else current), behaviour


def _drew(trained: Sequence[Trajectory]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the version that generated each token, flat."""
    for t in trained:
        if sum(tokens for _, tokens in t.segments) != len(t.ids.response):
            raise ValueError(
                f"a response of {len(t.ids.response)} tokens has the segments {t.segments}"
            )
    segments = np.array(
        [segment for t in trained for segment in t.segments], dtype=np.int64
    ).reshape(-1, 2)
    return np.repeat(segments[:, 0], segments[:, 1])


def _train_phase(
    model: Any,
    optimizer: Any,
    weighted: Sequence[tuple[Trajectory, float]],
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    version: int,
    config: UpdateConfig,
) -> tuple[torch.Tensor, list[float]]:
    """Run the optimizer's steps. Return sums over tokens (loss, clipped, KL, entropy, capped, 1)
    and each step's gradient norm."""
    device = next(model.parameters()).device
    sequences = [trajectory.ids for trajectory, _ in weighted]
    places = token_places([len(each.response) for each in sequences])
    sums, norms = torch.zeros(6, dtype=torch.float64, device=device), []
    for epoch in range(config.ppo_epochs):
        order = np.random.default_rng([config.seed, version, epoch]).permutation(len(sequences))
        for minibatch in np.array_split(order, config.minibatches):
            tokens = sum(len(sequences[i].response) for i in minibatch)
            if not tokens:
                continue
            lengths = [len(sequences[i].prompt) + len(sequences[i].response) for i in minibatch]
            for batch in micro_batches(lengths, config.micro_batch_tokens):
                indices = [int(minibatch[k]) for k in batch]
                at = np.concatenate([places[i] for i in indices])
                repeats = torch.tensor([len(sequences[i].response) for i in indices])
                gain = (
                    torch.tensor([weighted[i][1] for i in indices])
                    .repeat_interleave(repeats)
                    .to(device)
                )
                values = token_values(model, [sequences[i] for i in indices])
                near, drawn = proximal[at].to(device), behaviour[at].to(device)
                losses = token_losses(values.log_probs, near, drawn, gain, config.loss)
                (losses.losses.sum() / tokens).backward()
                seen = (
                    losses.losses,
                    losses.clipped,
                    kl(values.log_probs, near),
                    values.entropies,
                    losses.capped,
                )
                sums[:5] += torch.stack([each.detach().sum().double() for each in seen])
                sums[5] += len(at)
            norms.append(clip_gradient(optimizer.param_groups[0]["params"], config.grad_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return sums.cpu(), norms  # waits for the last step of a GPU
