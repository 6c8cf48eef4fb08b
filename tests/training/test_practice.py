"""Training as people run it: a small model on a host that is slow at launching, held against its log."""

import re

import numpy as np
import pytest

from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.scenario.presets import with_presets
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts


def test_half_a_billion_parameters_on_grace_hosts_train_at_the_speed_of_the_host(shared_data):
    log = (shared_data / "practice" / "05-half-billion-gh200" / "run.log").read_text()
    measured = {key: float(s) for key, s in re.findall(r"([\w/]+):([\d.]+)", log.splitlines()[0])}
    mean = {kind: measured[f"{kind}_length/mean"] for kind in ("prompt", "response")}
    count = round(4 * measured["global_seqlen/mean"] / sum(mean.values()))
    spread = np.exp(np.random.default_rng(0).normal(0, 0.55, count))
    responses = np.clip(spread / spread.mean() * mean["response"], 9, 1024)
    lengths = (responses + mean["prompt"]).astype(np.int64)
    script = {"microbatching": "fixed", "sequences_per_microbatch": 40, "remove_padding": True}
    filled = with_presets({"framework": "verl-fsdp-0.5-sglang", "training": script})
    gpu = GPUS["gh200"]
    costs = TrainingCosts(
        MODELS["qwen2.5-0.5b"],
        gpu,
        4,
        TrainingConfig(**filled["training"]),
        4,
        1,
        True,
        controller=True,
        padded_tokens=256 + 1024,
    )
    ((_, log_probs_s),), ((_, update_s),) = costs.inference(lengths), costs.update(lengths, 4)
    assert log_probs_s == pytest.approx(measured["timing_s/old_log_prob"], rel=0.2)
    assert update_s == pytest.approx(measured["timing_s/update_actor"], rel=0.2)
