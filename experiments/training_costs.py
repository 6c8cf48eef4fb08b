"""Duration of an update on this machine, measured apart from any run, as efficiencies of simrl's training model.

Invariant: sequences are random tokens of random lengths, so the measurement depends on no run; the efficiency is the one at
which `simrl.training` predicts the measured seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import torch

from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts
from simrl_replay.bench import Stairs, start_bench
from simrl_replay.grpo.config import RunConfig
from simrl_replay.grpo.policy import TokenIds, make_policy, save_policy
from simrl_replay.grpo.run import engine_settings
from simrl_replay.grpo.update import Trajectory, make_optimizer, update


class Efficiency(NamedTuple):
    """Efficiencies of training and of log-probs, as in `TrainingConfig`, the seconds to write a version, and the spread of the
    training repeats (IQR / median)."""

    mfu: float
    log_prob_mfu: float
    publish_s: float
    spread: float


def measure_training(config: RunConfig, repeats: int = 8) -> Efficiency:
    """Measure updates on one thread, each with other response lengths; the efficiencies follow from their median seconds."""
    torch.set_num_threads(1)
    model = make_policy(config.policy, config.task.vocabulary, config.most_tokens, config.seed).to(
        config.device
    )
    optimizer = make_optimizer(model, config.update)
    train, log_prob, publish = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        save_policy(model, Path(folder) / "model")
        shape = model_shape(Path(folder) / "model" / "config.json")
        ideal = TrainingCosts(
            model=shape,
            gpu=gpu(config.gpu),
            gpus=1,
            config=TrainingConfig(
                mfu=1,
                log_prob_mfu=1,
                tokens_per_microbatch=config.update.micro_batch_tokens,
                ppo_epochs=config.update.ppo_epochs,
            ),
            minibatches=config.update.minibatches,
            log_probs=1,
            switch=False,
        )  # fmt: skip
        for repeat in range(repeats + 1):
            batch = _batch(config, np.random.default_rng([config.seed, repeat]))
            lengths = np.array([len(t.ids.prompt) + len(t.ids.response) for t in batch])
            stats = update(model, optimizer, batch, 0, {}, config.update)
            started_s = time.perf_counter()
            save_policy(model, Path(folder) / f"model-{repeat}")
            torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")
            if repeat == 0:  # a first pass takes longer
                continue
            publish.append(time.perf_counter() - started_s)
            train.append(
                stats.train_s / sum(s for _, s in ideal.update(lengths, config.update.minibatches))
            )
            log_prob.append(stats.log_prob_s / sum(s for _, s in ideal.inference(lengths)))
    low, high = np.quantile(train, (0.25, 0.75))
    return Efficiency(
        1 / float(np.median(train)),
        1 / float(np.median(log_prob)),
        float(np.median(publish)),
        float((high - low) / np.median(train)),
    )


@contextmanager
def generating(config: RunConfig, model: Path, logs: Path) -> Iterator[None]:
    """Run an engine with a whole batch on another core meanwhile, as beside the updates of an asynchronous schedule."""
    logs.mkdir(parents=True, exist_ok=True)
    settings = replace(engine_settings(config, model), stop_token=None)  # the batch stays whole
    ended, batch = (
        Event(),
        Stairs((config.engine.max_num_seqs,), 1, turns=config.task.most_tokens - 8),
    )
    with start_bench(settings, 0, 0, logs) as engine, ThreadPoolExecutor(1) as pool:

        def generate() -> None:
            while not ended.is_set():
                engine(batch)

        generated = pool.submit(generate)
        try:
            yield
        finally:
            ended.set()
        generated.result()  # raises if the measurement ran without its neighbour


def _batch(config: RunConfig, rng: np.random.Generator) -> list[Trajectory]:
    """Return the responses of a step; rewards differ within groups, so that all are trained on."""
    batch = []
    for group in range(config.prompts_per_step):
        prompt = rng.integers(2, config.task.vocabulary, config.task.most_prompt_tokens).tolist()
        for sample in range(config.group):
            tokens = int(rng.integers(8, config.task.most_tokens + 1))
            ids = TokenIds(prompt, rng.integers(2, config.task.vocabulary, tokens).tolist())
            batch.append(Trajectory(ids, float(sample % 2), group, ((0, tokens),)))
    return batch
