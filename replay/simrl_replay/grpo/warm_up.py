"""Supervised warm-up: a policy learns the form of solutions, from randomly searched ones.

Invariant: a warm-up is a function of its configuration and seed, on one machine with one number of
threads; batch i of a seed depends on nothing else. It teaches the form and the arithmetic of a
search, and no better order than a random one: better search orders are left for RL to learn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field

from simrl.validation import MOST_SEED
from simrl_replay.grpo.evaluate import evaluate
from simrl_replay.grpo.policy import TokenIds, clip_gradient, micro_batches, token_values
from simrl_replay.grpo.tasks import Countdown


class WarmUpConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """AdamW with a linear rise and a cosine decay to a tenth of the learning rate."""

    steps: int = Field(default=600, ge=1)
    batch: int = Field(
        default=16, ge=1, description="solutions of the task in a step, each of a prompt of its own"
    )
    easy_batch: int = Field(
        default=32,
        ge=0,
        description="solutions with two numbers beside them: what takes longest to learn is to see a hit, and there one comes "
        "every few tokens",
    )
    learning_rate: float = Field(default=2e-3, gt=0)
    rise_steps: int = Field(default=50, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=1024, ge=1)
    evaluate_every: int = Field(default=200, ge=1)
    evaluation_prompts: int = Field(default=256, ge=1)
    evaluation_seed: int = Field(
        default=1_000_003,
        ge=0,
        le=MOST_SEED,
        description="of the prompts it is evaluated on, and of the draws",
    )
    seed: int = Field(default=0, ge=0, le=MOST_SEED)


def learning_rate(step: int, config: WarmUpConfig) -> float:
    """Return the learning rate of a step, counted from 0."""
    rise = min(1.0, (step + 1) / (config.rise_steps + 1))
    return config.learning_rate * rise * (0.55 + 0.45 * math.cos(math.pi * step / config.steps))


def warm_up(
    model: Any, task: Countdown, config: WarmUpConfig, tell: Callable[[str], None] = print
) -> None:
    """Train `model` in place on the log-probs of the tokens of solutions; report progress to
    `tell`."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
    )
    tokens, loss_sum, token_sum, started = 0, 0.0, 0, time.perf_counter()
    for step in range(config.steps):
        solutions = _solutions(task, config, step)
        own = sum(len(each.response) for each in solutions)
        for batch in micro_batches(
            [len(s.prompt) + len(s.response) for s in solutions], config.micro_batch_tokens
        ):
            loss = -token_values(model, [solutions[i] for i in batch]).log_probs.sum()
            (loss / own).backward()
            loss_sum += float(loss.detach())
        token_sum, tokens = token_sum + own, tokens + own
        clip_gradient(model.parameters(), config.grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            spent_s = time.perf_counter() - started
            problems = task.make_prompts(config.evaluation_seed, config.evaluation_prompts)
            tell(
                f"step {step + 1}, {spent_s:.0f} s, {tokens} tokens: loss {loss_sum / token_sum:.4f} nat a token; "
                f"{evaluate(model, task, problems, config.evaluation_seed)}"
            )
            loss_sum, token_sum = 0.0, 0


def _solutions(task: Countdown, config: WarmUpConfig, step: int) -> list[TokenIds]:
    rng = np.random.default_rng([config.seed, step])
    problems = task.make_prompts(int(rng.integers(2**32)), config.batch)
    problems += task.model_copy(update={"counts": (2,)}).make_prompts(
        int(rng.integers(2**32)), config.easy_batch
    )
    return [TokenIds(problem.prompt_ids, task.write_solution(problem, rng)) for problem in problems]
