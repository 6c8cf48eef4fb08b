"""Which drafter of a real engine a method of speculation is, which method none can be, and what a replay leaves out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.simulate.prepare import Prepared
from simrl.speculation.choices import BegMab, Elastic, Strategy
from simrl.speculation.gates import RATES
from simrl.speculation.windows import Aimd, Fixed, Mimd
from simrl.trace.trace import write_trace
from simrl_replay.proposer import DraftCounts, DrafterSetup, Proposer, Ran
from simrl_replay.replayer import (
    ReplayConfig,
    check_replayable,
    drafter_process,
    engine_settings,
)
from simrl_replay.speculative import (
    drafter_setup,
    forced_setup,
    own_config,
    replayed_form,
    speculative_config,
    synthetic_acceptance,
)
from tests.helpers import prepared, scenario
from tests.token_traces import random_groups

COUPLED = {"name": "specactor", "model": "qwen2.5-0.5b", "decoupled": False}

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


def test_history_is_drafted_by_simrl_with_the_window_the_gate_and_the_rule_of_the_method(
    of: Of,
) -> None:
    paper, code = of("histospec"), of("histospec_code")
    assert speculative_config(paper) == own_config(32)
    assert speculative_config(code) == own_config(16)
    setup, other = drafter_setup(paper), drafter_setup(code)
    assert setup is not None and other is not None
    assert (setup.kind, setup.window, setup.history.branch) == ("history", Aimd(), "reward")
    assert isinstance(setup.gate, tuple) and len(setup.gate) == RATES and max(setup.gate) > 0
    assert (other.kind, other.window, other.gate, other.history.least_probability) == (
        "history",
        Mimd(),
        None,
        0.1,
    )


def test_n_grams_are_vllms_own_unless_the_method_has_a_gate_or_a_window_that_moves(of: Of) -> None:
    plain, moving = of("ngram"), of({"name": "ngram", "window": {"kind": "aimd"}})
    assert speculative_config(plain)["method"] == "ngram"
    assert drafter_setup(plain) is None
    setup = drafter_setup(moving)
    assert setup is not None and setup.kind == "ngram"
    assert speculative_config(moving)["method"] == "custom_class"


def folder_of(architecture: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def test_a_draft_model_is_vllms_own_from_a_folder_and_simrl_tells_it_when_to_draft(
    of: Of, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"'qwen2.5-0.5b' is none; give model: FOLDER"):
        speculative_config(of("draft_model"))
    folder_of("Qwen3ForCausalLM", tmp_path)
    for method in ("draft_model", COUPLED):
        config = speculative_config(of(method), draft_folder=tmp_path)
        assert config == {
            "method": "draft_model",
            "model": str(tmp_path),
            "num_speculative_tokens": 4,
        }
        assert drafter_setup(of(method)) == DrafterSetup("engine", Fixed(tokens=4))
    with pytest.raises(InputError, match=r"'Qwen3ForCausalLM'.*name a folder with an EAGLE head"):
        speculative_config(replayed_form(of("tlt"))[0], draft_folder=tmp_path)


def test_tlt_is_replayed_with_chains_of_an_eagle_head_and_says_so(of: Of, tmp_path: Path) -> None:
    prepared, changes = replayed_form(of("tlt"))
    assert len(changes) == 1 and "no trees" in changes[0]
    assert replayed_form(prepared)[1] == []
    config = speculative_config(prepared, draft_folder=folder_of("EagleLlamaForCausalLM", tmp_path))
    assert config == {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 10}
    setup = drafter_setup(prepared)
    assert setup is not None and setup.gate == Elastic(threshold=32, patience=10)
    assert setup.bandit is not None and setup.most_tokens == 10
    assert setup.bandit.strategies[:2] == (
        (10, 1, 64),
        (6, 1, 64),
    )  # of one bucket: of trees as deep
    assert [arm.verified_tokens for arm in setup.bandit.strategies[:2]] == [11, 7]
    check_replayable(prepared, ReplayConfig(Path("model"), draft_model=tmp_path))
    with pytest.raises(InputError, match="heads of the form EagleLlamaForCausalLM, not none"):
        check_replayable(prepared, ReplayConfig(Path("model")))
    with pytest.raises(
        InputError, match="'eagle' is none; an EAGLE head; name its folder with --draft-model"
    ):
        speculative_config(prepared)


def test_a_head_of_another_form_or_of_random_states_is_not_trained(of: Of, tmp_path: Path) -> None:
    prepared, _ = replayed_form(of("tlt"))
    config = ReplayConfig(Path("model"), draft_model=tmp_path)
    folder_of("Eagle3LlamaForCausalLM", tmp_path)
    with pytest.raises(InputError, match=r"EagleLlamaForCausalLM, not Eagle3.*adaptive: false"):
        check_replayable(prepared, config)
    fixed, _ = replayed_form(of({"name": "tlt", "adaptive": False}))
    check_replayable(fixed, config)
    folder_of("EagleLlamaForCausalLM", tmp_path)
    with pytest.raises(InputError, match=r"--dummy has random ones; set adaptive: false"):
        check_replayable(prepared, replace(config, dummy_weights=True))


@pytest.mark.parametrize("config", ["{", "[1]", None])
def test_a_draft_folder_with_a_broken_config_is_named(
    of: Of, tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    prepared, _ = replayed_form(of("tlt"))
    with pytest.raises(InputError, match=f"{tmp_path}/config.json: not a model's config"):
        check_replayable(prepared, ReplayConfig(Path("model"), draft_model=tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": 1}')
    with pytest.raises(InputError, match="heads of the form EagleLlamaForCausalLM, not"):
        check_replayable(prepared, ReplayConfig(Path("model"), draft_model=tmp_path))


def test_das_is_drafted_by_simrl_with_a_window_for_each_response(of: Of) -> None:
    setup = drafter_setup(of("das"))
    assert setup is not None and (setup.kind, setup.window) == ("history", Fixed(tokens=16))
    proposer = Proposer(16, 512)
    proposer.configure(DrafterSetup("fixed", Fixed(tokens=16)))
    for name, window in {"a": 2, "b": None}.items():
        proposer.begins(name, 0, (1, 2), (), window=window)
    drafts = proposer.propose([Ran(name, 2, 0, 0, 100) for name in "ab"], [[7], [7]])
    assert {name: len(draft) for name, draft in drafts.items()} == {"a": 2, "b": 16}


def test_siblings_are_drafted_by_simrl_with_the_gate_of_tlt(of: Of) -> None:
    tlt_base = of({"name": "siblings", "gate": {"threshold": 5}})
    assert speculative_config(tlt_base) == own_config(8)
    assert drafter_setup(tlt_base) == DrafterSetup(
        "siblings", Fixed(tokens=8), Elastic(threshold=5)
    )
    setup = drafter_setup(of("srt"))
    assert setup is not None and setup.kind == "siblings" and setup.own_text


def test_seer_is_replayed_without_a_pool_of_caches_and_says_so() -> None:
    seer = prepared(scenario("seer", steps=2))
    with pytest.raises(InputError, match="kv_pool: false"):
        check_replayable(seer, ReplayConfig(Path("model")))
    changed, [change] = replayed_form(seer)
    assert "a chunk computes it again" in change and changed.system.dispatch.chunk_tokens == 8192
    check_replayable(changed, ReplayConfig(Path("model")))


def test_random_weights_accept_a_draft_models_tokens_as_the_scenario_says_and_draft_nothing_else(
    of: Of, tmp_path: Path
) -> None:
    folder_of("Qwen3ForCausalLM", tmp_path)
    plan = of("draft_model").drafts
    assert plan is not None and plan.acceptance is not None
    config = speculative_config(of("draft_model"), draft_folder=tmp_path, synthetic=True)
    rates = config["synthetic_acceptance_rates"]
    assert (
        config["rejection_sample_method"] == "synthetic"
        and len(rates) == config["num_speculative_tokens"]
    )
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(
        plan.acceptance.by_position[0]
    )
    with pytest.raises(InputError, match="choose draft_model"):
        speculative_config(of("histospec"), synthetic=True)


def test_forced_acceptance_is_that_of_the_scenario_position_by_position(of: Of) -> None:
    one = of("draft_model")
    setup = forced_setup(one)
    assert one.drafts is not None and setup.acceptance is not None
    assert setup.acceptance == one.drafts.acceptance
    rates = synthetic_acceptance(setup.acceptance, 4)["synthetic_acceptance_rates"]
    by_position = [
        setup.acceptance.by_position[min(i, len(setup.acceptance.by_position) - 1)]
        for i in range(4)
    ]
    assert rates == pytest.approx(np.cumprod(by_position))
    with pytest.raises(InputError, match="choose draft_model"):
        forced_setup(of("histospec"))


def test_a_drafter_asks_for_no_number_of_ranks(of: Of) -> None:
    one = of("histospec")
    cluster = one.scenario.cluster.model_copy(update={"tp": 2})
    two = replace(one, scenario=one.scenario.model_copy(update={"cluster": cluster}))
    assert speculative_config(two) == speculative_config(one) and drafter_setup(
        two
    ) == drafter_setup(one)
    assert engine_settings(two, ReplayConfig(Path("model"))).tp == 2


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("tlt", "not trees; give chains, strategies with a topk of 1"),
        ({**COUPLED, "disaggregated": True}, "leave out disaggregated"),
        ("spec_rl", "choose histospec"),
        (
            "efficient_rollout",
            "a toggle and its ladder of draft tokens are not replayed; choose draft_model",
        ),
        (
            {"name": "efficient_rollout", "gate": "open"},
            "not with the policy in fewer bits; choose draft_model",
        ),
    ],
)
def test_what_no_engine_does_is_refused_with_a_remedy(
    of: Of, method: str | dict[str, Any], remedy: str
) -> None:
    for call in (speculative_config, drafter_setup):
        with pytest.raises(InputError, match=remedy):
            call(of(method))


def test_a_policys_own_layers_are_no_draft_model(of: Of, tmp_path: Path) -> None:
    one = of("draft_model")
    assert one.drafts is not None
    mtp = replace(one.drafts, speculation=replace(one.drafts.speculation, model="mtp"))
    folder_of("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(InputError, match="not with layers of the policy; choose draft_model"):
        speculative_config(replace(one, drafts=mtp), draft_folder=tmp_path)


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
        InputError,
        match=rf"engine\.kv_cache_tokens: {least - 1} tokens do not hold the longest sample",
    ):
        engine_settings(replace(tight, limits=tight.limits._replace(kv_blocks=least - 1)), config)


def test_an_engine_caches_prefixes_if_the_simulated_one_does(of: Of) -> None:
    one, config = of("none"), ReplayConfig(Path("model"))
    for cached in (True, False):
        ready = replace(one, limits=one.limits._replace(prefix_caching=cached))
        assert engine_settings(ready, config).prefix_caching == cached


def test_engines_that_share_a_gpu_get_equal_parts_of_its_memory_and_the_graphs_of_the_replay(
    of: Of,
) -> None:
    one, config = of("none"), ReplayConfig(Path("model"))
    whole, half = (
        engine_settings(one, replace(config, engines_per_gpu=n, graphs="decode")) for n in (1, 2)
    )
    assert whole.gpu_memory_utilization == one.scenario.engine.gpu_memory_utilization
    assert half.gpu_memory_utilization == whole.gpu_memory_utilization / 2
    assert half.graphs == "decode" and engine_settings(one, config).graphs == "compiled"


def test_an_engine_launches_layer_by_layer_if_the_simulated_one_does(of: Of) -> None:
    one, config = of("none"), ReplayConfig(Path("model"), graphs="full")
    engine = one.scenario.engine.model_copy(update={"enforce_eager": True})
    eager = replace(one, scenario=one.scenario.model_copy(update={"engine": engine}))
    graphs = [engine_settings(each, config).graphs for each in (one, eager)]
    assert graphs == ["full", "none"]


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        ({"scheduler": "sglang", "schedule_policy": "lpm"}, "set engine.scheduler=vllm"),
        ({"preset": "sglang-0.5"}, "set engine.scheduler=vllm, with a preset of vLLM"),
        ({"watermark": 0.1}, r"engine\.watermark and .* of vLLM 0\.33.*leave them out"),
        ({"prefill_schedule_interval": 8}, "leave them out"),
        ({"preset": "vllm-0.26-replay", "log_probs": True}, r"set engine\.log_probs=false"),
    ],
)
def test_an_engine_that_vllm_is_not_is_refused_with_a_remedy(
    engine: dict[str, Any], remedy: str
) -> None:
    config = ReplayConfig(Path("model"))
    profile = {"roofline": {}}
    with pytest.raises(InputError, match=f"cannot be replayed: .*{remedy}") as error:
        check_replayable(prepared(scenario(engine=engine, profile=profile)), config)
    assert "\n" not in str(error.value)


def test_log_probs_without_a_time_of_their_own_are_nothing_to_replay() -> None:
    profile = {"roofline": {}, "least_sequence_s": 0.0}
    one = prepared(scenario(engine={"log_probs": True}, profile=profile))
    check_replayable(one, ReplayConfig(Path("model")))


def test_gpus_that_change_sides_are_refused_with_a_remedy() -> None:
    one = prepared(scenario({"name": "one_step_off", "adapt_split_every": 2}))
    with pytest.raises(InputError, match="engines here keep theirs; set adapt_split_every to 0"):
        check_replayable(one, ReplayConfig(Path("model")))


def test_drafters_of_several_models_share_the_memory_of_their_gpu(of: Of) -> None:
    config = ReplayConfig(Path("model"), step_deadline_s=7.0)
    settings = engine_settings(of("none"), config)
    one, two = (drafter_process(settings, config, models) for models in (1, 2))
    assert one.settings.gpu_memory_utilization == settings.gpu_memory_utilization
    assert two.settings.gpu_memory_utilization == settings.gpu_memory_utilization / 2
    assert one.step_deadline_s == 7.0


def history(**workers: Any) -> Prepared:
    inputs = {"history_workers": workers}
    system = {"name": "verl_colocated", "speculation": "histospec"}
    return prepared(scenario(system, speculation=inputs, steps=2))


def test_a_history_has_the_memory_of_the_scenario_and_keeps_nothing_beyond() -> None:
    setup = drafter_setup(replayed_form(history(memory_bytes=1000))[0])
    assert setup is not None and setup.history_bytes == 1000
    setup = replace(setup, gate=None, window=Fixed(tokens=4))
    for most, kept in ((1000, 0), (None, 1)):
        proposer = Proposer(4, 512)
        proposer.configure(replace(setup, history_bytes=most))
        proposer.learn(0, 0, [list(range(100))])
        assert proposer._store is not None
        proposer._store.wait()
        assert len(proposer._store) == kept


def test_what_a_history_has_in_a_prediction_alone_is_named() -> None:
    assert replayed_form(history(memory_bytes=1000))[1] == []
    _, [change] = replayed_form(history(workers=2, link_bytes_per_s=1e9))
    assert change.endswith("has workers, link_bytes_per_s for the prediction alone")
    moved = history(memory_bytes=1000, compressed_bytes_per_token=0.5, swap_bytes_per_s=1e9)
    changed, [change] = replayed_form(moved)
    assert "no index is compressed or swapped" in change and changed.drafts is not None
    workers = changed.drafts.inputs.history_workers
    assert workers.compressed_bytes_per_token is workers.swap_bytes_per_s is None
    assert workers.memory_bytes == 1000 and replayed_form(changed)[1] == []


def ahead(one: Prepared) -> Prepared:
    return replace(one, limits=one.limits._replace(async_scheduling=True))


def test_passes_are_scheduled_ahead_where_nothing_drafts_and_a_cpu_engine_has_one_rank(
    of: Of,
) -> None:
    one, config = of("none"), ReplayConfig(Path("model"))
    assert not engine_settings(one, config).async_scheduling
    check_replayable(ahead(one), config)
    assert engine_settings(ahead(one), config).async_scheduling
    with pytest.raises(
        InputError, match=r"next one is scheduled by then; set engine.async_scheduling=false"
    ):
        check_replayable(ahead(of("histospec")), config)
    cluster = one.scenario.cluster.model_copy(update={"tp": 2})
    ranks = replace(ahead(one), scenario=one.scenario.model_copy(update={"cluster": cluster}))
    with pytest.raises(InputError, match=r"several ranks schedule no pass ahead; set engine"):
        check_replayable(ranks, config)
    check_replayable(ranks, replace(config, device="cuda"))


@pytest.mark.parametrize(("kv", "is_replayed"), [(None, True), ("keep", False), ("offload", False)])
def test_tool_calls_are_replayed_unless_an_engine_is_to_keep_blocks_meanwhile(
    kv: str | None, is_replayed: bool
) -> None:
    agents = {"kv_while_tool_runs": kv, "deadline_s": 60.0}
    agents |= {"host_memory_bytes": 1e9} if kv == "offload" else {}
    lengths = {"steps": 1, "prompts_per_step": 4, "group": 2, "cap_tokens": 200}
    lengths |= {"mean_tokens": 60, "sigma": 0.8, "turns": 3.0, "observation_tokens": 100}
    workload = {"synthetic": {**lengths, "environment_s": 1.0}}
    several = prepared(scenario("verl_colocated", workload=workload, agents=agents))
    config = ReplayConfig(Path("model"))
    if not is_replayed:
        with pytest.raises(InputError, match=f"kv_while_tool_runs is {kv}.*use cache with"):
            check_replayable(several, config)
        return
    check_replayable(several, config)
    trace, most = several.trace, engine_settings(several, config).max_model_len
    contexts = trace.column("prompt_tokens") + trace.observation_tokens()
    assert most == contexts.max() + trace.metadata.cap_tokens


def test_evaluations_have_room_and_follow_no_tokens_of_another_trace(of: Of) -> None:
    lengths = {"synthetic": {"steps": 1, "prompts_per_step": 2, "group": 1, "cap_tokens": 3000}}
    lengths["synthetic"] |= {"mean_tokens": 2000.0, "sigma": 0.2, "prompt_tokens": 900.0}
    one = prepared(scenario("verl_colocated", evaluation={"every": 1, "lengths": lengths}, steps=2))
    config = ReplayConfig(Path("model"))
    check_replayable(one, config)
    assert one.evaluation_trace is not None
    assert engine_settings(one, config).max_model_len >= 3000 + 900
    with pytest.raises(InputError, match=r"evaluation\.lengths has others; leave it out"):
        check_replayable(one, replace(config, recorded_tokens=True))


class Model:
    """A draft model of vLLM's, whose calls are kept."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.names = ""

    def __call__(self, tokens: int) -> dict[str, list[int]]:
        self.calls.append(tokens)
        return {name: [7] * tokens for name in self.names}


class Live:
    """A proposer with a draft model, whose drafts are accepted as far as a test says."""

    def __init__(self, names: str, setup: DrafterSetup) -> None:
        self.model = Model()
        self.proposer = Proposer(32, 512, self.model)
        self.proposer.configure(setup)
        self.proposer.restarts = False
        for name in names:
            self.proposer.begins(name, 0, (1, 2), ())
        self.known = dict.fromkeys(names, 2)
        self.drafts: dict[str, list[int]] = {}

    def step(
        self, names: str, accepted: int = 0, prefill: bool = False, seconds: float = 1.0
    ) -> dict[str, int]:
        """Run a pass; return the length of each draft for the next one."""
        self.model.names = names
        has = {name: len(self.drafts.get(name, ())) for name in names}
        batch = [
            Ran(name, known, 0 if prefill else known - 1, has[name], 200)
            for name in names
            for known in [self.known[name]]
        ]
        sampled = [[7] * (min(accepted, has[name]) + 1) for name in names]
        self.drafts = self.proposer.propose(batch, sampled, seconds)
        for name, tokens in zip(names, sampled, strict=True):
            self.known[name] += len(tokens)
        return {name: len(draft) for name, draft in self.drafts.items()}


def test_a_draft_model_drafts_the_longest_window_and_each_request_takes_its_own() -> None:
    live = Live("ab", DrafterSetup("engine", Aimd(most_tokens=8)))
    assert live.step("ab", prefill=True) == {"a": 2, "b": 2}
    assert live.step("ab", accepted=2) == {"a": 4, "b": 4}
    live.drafts["b"] = [7, 7, 7, 8]
    assert live.step("a", accepted=4) == {"a": 6}
    assert live.step("ab", accepted=4) == {"a": 2, "b": 4}  # two of six tokens were wrong
    assert live.model.calls == [2, 4, 6, 4]


def test_a_batch_gate_lets_a_draft_model_only_keep_its_cache_and_opens_for_a_smaller_batch() -> (
    None
):
    live = Live("abc", DrafterSetup("engine", Fixed(tokens=4), (2,) * RATES))
    assert live.step("abc", prefill=True) == {"a": 0, "b": 0, "c": 0}
    assert live.model.calls == [0]
    live.proposer.ends("c")  # an abort: the gate opens for the very next pass
    assert live.proposer.stale
    assert {name: len(draft) for name, draft in live.proposer.redraft().items()} == {
        "a": 4,
        "b": 4,
    }
    assert live.proposer.redraft() == {}  # what it has drafted stays
    assert live.model.calls == [0, 4]


def test_a_bandit_chooses_the_depth_of_a_draft_models_chains_from_measured_rewards() -> None:
    """The one of two chains, each tried once, that gave more tokens a second drafts on."""
    arms = (Strategy(10, 1, 64), Strategy(4, 1, 64))
    bandit = BegMab(strategies=arms, batch_thresholds=(1,), epsilon=0.0, rule="paper")
    live = Live("a", DrafterSetup("engine", Fixed(tokens=8), bandit=bandit))
    first = live.step("a", prefill=True)["a"]
    second = live.step("a", accepted=4, seconds=1.0 if first == 4 else 4.0)["a"]
    assert {first, second} == {4, 10}
    chosen = [live.step("a", accepted=4, seconds=1.0 if second == 4 else 4.0)["a"]]
    chosen += [live.step("a", accepted=4)["a"] for _ in range(5)]
    assert chosen == [4] * 6 and live.model.calls == [first, second, *chosen]


def test_siblings_draft_in_place_of_a_model_until_new_weights_bring_it_back() -> None:
    live = Live("ab", DrafterSetup("engine", Fixed(tokens=4), model_free=True))
    live.proposer.new_rollout(siblings=True)
    live.proposer.ends("b")
    live.proposer.begins("b", 0, (1, 2), (5, 6, 8, 9))
    live.known["a"] = 4
    live.proposer.ends("a")
    live.proposer.begins("a", 0, (1, 2), (5, 6))
    live.model.names = "ab"
    drafts = live.proposer.propose([Ran("a", 4, 0, 0, 200), Ran("b", 6, 0, 0, 200)], [[8], [4]])
    assert drafts == {"a": [9, 4], "b": []} and not live.model.calls
    live.proposer.new_rollout()
    assert live.proposer.stale and live.proposer.redraft() == {"a": [7] * 4, "b": [7] * 4}
    assert live.model.calls == [4]


def test_vllms_own_drafter_rests_until_few_requests_are_left() -> None:
    """A pass that prefills is not counted; when it starts, all running requests compute their caches again."""
    live = Live("abc", DrafterSetup("engine", Fixed(tokens=8), Elastic(threshold=2, patience=2)))
    proposer = live.proposer
    none = {"a": 0, "b": 0}
    assert live.step("abc", prefill=True) == live.step("abc") == {**none, "c": 0}
    assert live.step("ab") == none and not proposer.restarts
    assert live.step("ab") == none and proposer.restarts and not live.model.calls
    proposer.restarts = False
    assert live.step("ab", prefill=True) == {"a": 8, "b": 8}
    assert live.step("ab", accepted=3) == {"a": 8, "b": 8}
    assert live.step("a", accepted=2) == {"a": 8}
    assert proposer.counts("a") == DraftCounts(16, 5, 2, 7)
    assert proposer.counts("c") == DraftCounts()
    proposer.new_rollout()
    assert proposer.redraft() == {"a": [], "b": [], "c": []}
    assert live.step("a") == {"a": 0} and live.model.calls == [8] * 3
