"""Duration of an update on this machine, measured apart from any run, as efficiencies of simrl's training model.

Invariant: sequences are random tokens of random lengths, so the measurement depends on no run; the efficiency is the one at
which `simrl.training` predicts the measured seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

import numpy as np
import torch

from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl_replay.bench import Stairs, start_bench
from simrl_replay.grpo.config import RunConfig
from simrl_replay.grpo.efficiency import Efficiency, measure_efficiency
from simrl_replay.grpo.policy import TokenIds, make_policy, save_policy
from simrl_replay.grpo.run import engine_settings
from simrl_replay.grpo.update import Trajectory, make_optimizer


def measure_training(config: RunConfig, repeats: int = 8) -> Efficiency:
    """Measure updates on one thread, each with other response lengths; the efficiencies follow from their median seconds."""
    torch.set_num_threads(1)
    model = make_policy(config.policy, config.task.vocabulary, config.most_tokens, config.seed).to(
        config.device
    )
    optimizer, version = make_optimizer(model, config.update), count()
    with tempfile.TemporaryDirectory() as folder:
        save_policy(model, Path(folder) / "model")

        def publish() -> None:
            save_policy(model, Path(folder) / f"model-{next(version)}")
            torch.save(optimizer.state_dict(), Path(folder) / "optimizer.pt")

        return measure_efficiency(
            model,
            optimizer,
            config.update,
            model_shape(Path(folder) / "model" / "config.json"),
            gpu(config.gpu),
            [_batch(config, np.random.default_rng([config.seed, i])) for i in range(repeats + 1)],
            publish,
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
