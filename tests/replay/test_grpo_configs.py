"""The runs that are shipped."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from simrl_replay.grpo.config import read_config
from simrl_replay.grpo.policy import make_policy
from simrl_replay.link import spare_gpu

pytestmark = pytest.mark.vllm  # what it needs comes with it

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "grpo"


def test_the_shipped_runs_differ_in_their_schedule_alone_and_begin_with_one_policy() -> None:
    files = sorted(EXPERIMENTS.glob("*.yaml"))
    configs = [read_config(file) for file in files]
    assert [config.name for config in configs] == [file.stem for file in files]
    assert sorted(config.system.name for config in configs) == ["areal", "one_step_off", "split"]
    rest = [config.model_dump(exclude={"name", "system"}) for config in configs]
    assert rest[0] == rest[1] == rest[2]


def test_the_scaled_run_has_a_policy_of_20_to_100_million_parameters_and_responses_of_thousands_of_tokens() -> (
    None
):
    config = read_config(EXPERIMENTS / "gpu" / "scaled.yaml")
    policy = make_policy(config.policy, config.task.vocabulary, config.most_tokens, 0)
    assert 20e6 < sum(weights.numel() for weights in policy.parameters()) < 100e6
    assert config.device == "cuda" and 2000 < config.task.most_tokens < 4096


def test_a_learner_gets_the_gpu_after_those_of_the_engines_or_shares_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [spare_gpu(taken) for taken in (0, 1, 2)] == [
        {"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("4", "6", "6")
    ]
