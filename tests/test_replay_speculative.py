"""Which drafter of a real engine a method of speculation is, and which method none can be."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import prepared, scenario
from token_traces import random_groups

from replay.replayer import ReplayConfig, check_replayable, engine_settings
from replay.speculative import drafter_setup, forced_setup, own_config, speculative_config, synthetic_acceptance
from simrl.errors import InputError
from simrl.simulate.prepare import Prepared
from simrl.speculation.gates import RATES
from simrl.speculation.windows import Aimd, Mimd
from simrl.trace.trace import write_trace

Of = Callable[[str | dict[str, Any]], Prepared]


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Of:
    """A scenario with a method, on a trace with token ids."""
    file = tmp_path_factory.mktemp("trace") / "trace.parquet"
    write_trace(random_groups(0, epochs=2), file)
    workload = {"trace": str(file)}
    return lambda method: prepared(
        scenario({"name": "verl_colocated", "speculation": method}, workload=workload, steps=2)
    )


def test_history_is_drafted_by_simrl_with_the_window_the_gate_and_the_rule_of_the_method(of: Of) -> None:
    paper, code = of("histospec"), of("histospec_code")
    assert speculative_config(paper) == own_config(32)
    assert speculative_config(code) == own_config(16)
    setup, other = drafter_setup(paper), drafter_setup(code)
    assert setup is not None and other is not None
    assert (setup.kind, setup.window, setup.history.branch) == ("history", Aimd(), "reward")
    assert isinstance(setup.gate, tuple) and len(setup.gate) == RATES and max(setup.gate) > 0
    assert (other.kind, other.window, other.gate, other.history.least_probability) == ("history", Mimd(), None, 0.1)


def test_n_grams_are_vllms_own_unless_the_method_has_a_gate_or_a_window_that_moves(of: Of) -> None:
    plain, moving = of("ngram"), of({"name": "ngram", "window": {"kind": "aimd"}})
    assert speculative_config(plain)["method"] == "ngram"
    assert drafter_setup(plain) is None
    setup = drafter_setup(moving)
    assert setup is not None and setup.kind == "ngram"
    assert speculative_config(moving)["method"] == "custom_class"


def test_a_draft_model_is_vllms_own_from_a_folder(of: Of, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'qwen2.5-0.5b' is none; give model: FOLDER"):
        speculative_config(of("draft_model"))
    (tmp_path / "config.json").write_text(json.dumps({}))
    config = speculative_config(of("draft_model"), draft_folder=tmp_path)
    assert config == {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert drafter_setup(of("draft_model")) is None


@pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="arctic-inference is installed")
def test_random_weights_accept_a_draft_models_tokens_as_the_scenario_says_and_draft_nothing_else(
    of: Of, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    plan = of("draft_model").drafts
    assert plan is not None and plan.acceptance is not None
    config = speculative_config(of("draft_model"), draft_folder=tmp_path, synthetic=True)
    rates = config["synthetic_acceptance_rates"]
    assert config["rejection_sample_method"] == "synthetic" and len(rates) == config["num_speculative_tokens"]
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(plan.acceptance.by_position[0])
    with pytest.raises(InputError, match="choose draft_model"):
        speculative_config(of("histospec"), synthetic=True)


def test_suffix_decoding_says_what_to_install(of: Of) -> None:
    with pytest.raises(InputError, match="pip install arctic-inference"):
        speculative_config(of("srt"))


def test_forced_acceptance_is_that_of_the_scenario_position_by_position(of: Of) -> None:
    one = of("draft_model")
    setup = forced_setup(one)
    assert one.drafts is not None and setup.acceptance is not None
    assert setup.acceptance == one.drafts.acceptance
    rates = synthetic_acceptance(setup.acceptance, 4)["synthetic_acceptance_rates"]
    by_position = [setup.acceptance.by_position[min(i, len(setup.acceptance.by_position) - 1)] for i in range(4)]
    assert rates == pytest.approx(np.cumprod(by_position))
    with pytest.raises(InputError, match="choose draft_model"):
        forced_setup(of("histospec"))


def test_simrls_drafter_is_refused_with_tensor_parallelism_and_vllms_own_are_not(of: Of, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))

    def with_tp(method: str | dict[str, Any]) -> Prepared:
        one = of(method)
        cluster = one.scenario.cluster.model_copy(update={"tp": 2})
        return replace(one, scenario=one.scenario.model_copy(update={"cluster": cluster}))

    for method in ("histospec", {"name": "ngram", "window": {"kind": "aimd"}}):
        for told in (speculative_config, drafter_setup):
            with pytest.raises(InputError, match=r"cluster\.tp is 2; set cluster.tp to 1, or choose vLLM's own"):
                told(with_tp(method))
    with pytest.raises(InputError, match=r"cluster\.tp is 2"):
        forced_setup(with_tp("draft_model"))
    assert speculative_config(with_tp("ngram"))["method"] == "ngram" and drafter_setup(with_tp("ngram")) is None
    assert speculative_config(with_tp("draft_model"), draft_folder=tmp_path)["method"] == "draft_model"


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("tlt", "not trees that a bandit chooses; choose draft_model"),
        ("specactor", "decoupled: false"),
        ("spec_rl", "choose histospec"),
        ("das", "choose histospec"),
        ("siblings", "choose srt"),
        ({"name": "srt", "gate": "batch"}, "leave out gate and window"),
        ({"name": "draft_model", "window": {"kind": "aimd"}}, "leave out gate and window"),
    ],
)
def test_what_no_engine_does_is_refused_with_a_remedy(of: Of, method: str | dict[str, Any], remedy: str) -> None:
    for told in (speculative_config, drafter_setup):
        with pytest.raises(InputError, match=remedy):
            told(of(method))


def test_an_engine_holds_the_longest_sample_and_its_drafts_and_no_token_more(of: Of) -> None:
    one = of({"name": "ngram", "window": {"kind": "aimd"}})
    config = ReplayConfig(Path("model"))
    prompts, responses = (one.trace.column(name) for name in ("prompt_tokens", "response_tokens"))
    drafted = int(speculative_config(one)["num_speculative_tokens"])
    wanted = int(prompts.max()) + one.trace.metadata.cap_tokens + 2 * drafted
    assert engine_settings(one, config).max_model_len == wanted
    least = int((prompts + responses).max()) + 2 * drafted
    tight = replace(one, limits=one.limits._replace(block_size=1, kv_blocks=least))
    assert engine_settings(tight, config).max_model_len == least
    with pytest.raises(
        InputError, match=rf"engine\.kv_cache_tokens: {least - 1} tokens do not hold the longest sample"
    ):
        engine_settings(replace(tight, limits=tight.limits._replace(kv_blocks=least - 1)), config)


def test_an_engine_caches_prefixes_if_the_simulated_one_does(of: Of) -> None:
    one, config = of("none"), ReplayConfig(Path("model"))
    for cached in (True, False):
        ready = replace(one, limits=one.limits._replace(prefix_caching=cached))
        assert engine_settings(ready, config).prefix_caching == cached


def test_passes_that_are_scheduled_ahead_are_not_replayed(of: Of) -> None:
    one = of("none")
    check_replayable(one, ReplayConfig(Path("model")))
    ahead = replace(one, limits=one.limits._replace(async_scheduling=True))
    with pytest.raises(InputError, match=r"schedule no pass ahead \(engine\.async_scheduling\); set it to false"):
        check_replayable(ahead, ReplayConfig(Path("model")))
