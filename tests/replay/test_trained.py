"""Replays that train for real: the learner's phases, their prediction, and the weights that engines then have."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.result.result import read_result
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import Prepared, prepare
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import Trace, TraceMetadata, read_trace, write_trace
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from simrl_replay import replayed, trained  # noqa: E402
from simrl_replay.grpo.efficiency import Efficiency, measure_efficiency  # noqa: E402
from simrl_replay.grpo.learner import InTraining  # noqa: E402
from simrl_replay.grpo.phase_learner import LogProbs, PhaseLearner, Publish, Train, Trainee  # noqa: E402
from simrl_replay.grpo.policy import TokenIds, generate, load_policy, load_weights, log_probs  # noqa: E402
from simrl_replay.grpo.update import Trajectory, UpdateConfig, make_optimizer  # noqa: E402
from simrl_replay.link import engine_link  # noqa: E402
from simrl_replay.random_model import make_model  # noqa: E402
from simrl_replay.replayer import (  # noqa: E402
    Measured,
    ReplayConfig,
    ReplayEngines,
    check_replayable,
    engine_gpus,
    engine_settings,
    process_fleet,
    replay,
)
from tests.command_line import ROOT, CommandLine  # noqa: E402
from tests.engine_double import VOCABULARY, EngineDouble, continuation  # noqa: E402
from tests.helpers import lanes, rows  # noqa: E402

pytestmark = pytest.mark.vllm  # what it needs comes with it
COUNTDOWN = ROOT / "traces" / "countdown" / "sync" / "trace.parquet"
SYSTEMS = (
    "{name: areal, eta: 1}",
    *(
        pytest.param(system, marks=pytest.mark.slow)
        for system in (
            "verl_colocated",
            "one_step_off",
            "{name: rhymerl, speculation: none}",
            "{name: rhymerl, speculation: none, stream: true, minibatches: 2}",
        )
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "v0"
    make_model(folder, 1, 64, heads=2, kv_heads=1, vocab=VOCABULARY)
    return folder


def a_trace() -> Trace:
    """Three updates of three prompts with four responses each."""
    table = [
        (step, 0, 3 * step + prompt, i, 6 + prompt, 20 + 11 * i + prompt, float(i % 2))
        for step in range(3)
        for prompt in range(3)
        for i in range(4)
    ]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens", "reward")
    columns = dict(zip(names, map(list, zip(*table, strict=True)), strict=True))
    return Trace.from_columns(
        columns,
        TraceMetadata(name="t", kind="synthetic", source="a test", tokenizer="no", cap_tokens=64),
    )


def scenario_file(folder: Path, model: Path, system: str, more: str = "") -> Path:
    write_trace(a_trace(), folder / "trace.parquet")
    (folder / "scenario.yaml").write_text(f"""\
name: trained
steps: 3
model: {model}/config.json
cluster: {{gpu: cpu, gpus: 3, tp: 1}}
workload: {{synthetic: null, trace: {folder}/trace.parquet}}
profile: {{path: null, roofline: {{}}}}
engine: {{max_num_seqs: 8, max_num_batched_tokens: 64, block_size: 32, kv_cache_tokens: 4096}}
training: {{tokens_per_microbatch: 256, load_s: 0.01{more}}}
systems: [{system}]
""")
    return folder / "scenario.yaml"


def prepared_for(folder: Path, model: Path, system: str, more: str = "") -> Prepared:
    (chosen,) = load_scenarios(scenario_file(folder, model, system, more), [])
    return replayed.with_workers(prepare(chosen), 1)


def whole_responses(measured: Measured, vocabulary: int) -> list[tuple[int, list[int], list[int]]]:
    """Return the responses of the first epoch that one version made: it, the prompt, the tokens."""
    assert measured.trace is not None
    versions: dict[int, list[int]] = {}
    for segment in rows(measured.result.segments):
        versions.setdefault(segment["uid"], []).append(segment["policy_version"])
    uids = {
        (row["epoch"], row["prompt_id"], row["sample"]): row["uid"]
        for row in rows(measured.result.samples)
    }
    seed, made = measured.result.metadata["scenario"]["seed"], []
    for row in measured.trace.table.to_pylist():
        of = versions[uids[row["epoch"], row["prompt_id"], row["sample"]]]
        draws = np.random.default_rng([seed, row["prompt_id"], row["prompt_tokens"]])
        prompt = draws.integers(0, vocabulary, row["prompt_tokens"]).tolist()
        if len(of) == 1:
            made.append((of[0], prompt, row["response_ids"]))
    return made


@contextmanager
def doubles(prepared: Prepared, config: ReplayConfig, logs: Path):
    """One engine double in a process."""
    settings, start = engine_settings(prepared, config), partial(EngineDouble, step_s=0.002)
    with ReplayEngines(
        [partial(engine_link, "worker 0", settings, logs / "0.log", start=start)]
    ) as fleet:
        yield fleet


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_schedule_is_trained_with_its_own_tokens_and_its_engines_have_the_trained_weights(
    tmp_path: Path, model: Path, monkeypatch, system: str
):
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    prepared = prepared_for(tmp_path, model, system)
    config = ReplayConfig(model, device="cpu", dtype="float32", start_deadline_s=60.0)
    with trained.real_training(prepared, config, tmp_path) as training:
        prepared = prepare(trained.with_measured_training(prepared.scenario, training))
        prepared = replayed.with_workers(prepared, 1)
        predicted = trained.predict(prepared)
        with doubles(prepared, config, tmp_path) as fleet:
            measured = replay(prepared, fleet, config, None, training)
        versions = [load_weights(training.weights(version)) for version in range(3)]
    assert measured.stopped is None
    result, facts = measured.result, measured.result.metadata["replay"]["trained"]

    # Tokens are those of the version that their segment names, by the folder that the engine loaded.
    made = whole_responses(measured, VOCABULARY)
    assert len(made) > 12
    for version, prompt, response in made:
        folder = f"{version:04d}" if version else "v0"
        assert response == continuation(prompt, len(response), folder)

    # Weights move with every update, and each is written by the learner.
    for before, after in pairwise(versions):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(facts["updates"]) == (6 if "stream" in system else 3)

    # The learner's versions give the ages that the schedule counts.
    steps = rows(result.steps)
    tokens = sum(part["tokens"] for part in facts["log_probs"])
    assert tokens == sum(step["response_tokens"] for step in steps)
    learned = sum(part["off_policyness_mean"] * part["tokens"] for part in facts["log_probs"])
    counted = sum(step["off_policyness_mean"] * step["response_tokens"] for step in steps)
    assert learned == pytest.approx(counted)
    most = max(part["off_policyness_max"] for part in facts["log_probs"])
    assert most == max(step["off_policyness_max"] for step in steps)
    bound = prepared.system.off_policyness
    assert bound is None or most <= bound

    # Every second of every lane is in one span, and the trainer's phases are among them.
    for spans in lanes(result).values():
        assert (spans[0]["started_s"], spans[-1]["ended_s"]) == (0.0, result.metadata["end_s"])
    kinds = {span["kind"] for span in rows(result.spans)}
    assert {"log_prob", "train", "rollout"} <= kinds and "switch" not in kinds
    phases = trained.phases_of(predicted, result)
    assert list(phases) == list(trained.PHASES)
    assert all(
        each.measured_s and each.error is not None for each in phases.values() if each.predicted_s
    )


def test_a_command_prints_and_keeps_the_phases_and_goes_back_to_the_first_weights_for_a_repeat(
    simrl: CommandLine, model: Path, monkeypatch
):
    scenario_file(simrl.folder, model, "one_step_off")

    def engines(prepared, settings, config, ray, logs: Path, folder) -> ReplayEngines:
        start = partial(EngineDouble, step_s=0.002)
        return ReplayEngines(
            [partial(engine_link, "worker 0", settings, logs / "0.log", start=start)]
        )

    monkeypatch.setattr(replayed, "_start_engines", engines)
    monkeypatch.setattr(replayed, "check_engine", lambda config: None)
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    ended = simrl(
        "replay", "scenario.yaml", "--train", "--workers", "1", "--device", "cpu", "-o", "out", "--repeats", "2"
    )  # fmt: skip
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.split())
    assert "phase predicted measured error" in words and "log-probs, an update" in words
    assert "Training was real: rewards are labels; its prediction rests on 4 updates" in words
    assert (
        "Off-policyness: 0.67 on average, 1 at most predicted; 0.67 on average, 1 at most measured"
        in words
    )
    agreement = json.loads(Path("out/agreement.json").read_text())
    first, second = agreement["phases"]
    assert first["update"]["measured_s"] != second["update"]["measured_s"]
    assert first["update"]["predicted_s"] == second["update"]["predicted_s"]
    p, m = (first["update"][f"{each}_s"] for each in ("predicted", "measured"))
    assert first["update"]["error"] == pytest.approx(p / m - 1)
    measured = [read_result(Path(f"out/{name}")) for name in ("measured", "repeats/2")]
    losses = [
        [update["loss"] for update in each.metadata["replay"]["trained"]["updates"]]
        for each in measured
    ]
    # The double's tokens depend on the folder's name alone: equal updates of equal weights.
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 3
    predicted = read_result(Path("out/predicted")).metadata["scenario"]["training"]
    assert predicted["mfu"] is not None and predicted["switch_s"] == 0
    assert simrl("compare", "out", "--measured", "out").code == 0


@pytest.mark.slow
def test_every_system_is_trained_with_the_ages_of_its_schedule_or_refused_with_a_remedy(
    tmp_path: Path, model: Path, monkeypatch
):
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    config = ReplayConfig(model, device="cpu", dtype="float32", start_deadline_s=60.0)
    made, refused = set(), dict[str, str]()
    first = prepared_for(tmp_path, model, "one_step_off")
    with trained.real_training(first, config, tmp_path) as training:
        for name in sorted(RECIPES):
            file = scenario_file(tmp_path, model, f"{{name: {name}, speculation: none}}")
            try:
                (chosen,) = load_scenarios(file, [])
                prepared = replayed.with_workers(prepare(chosen), 1)
                check_replayable(prepared, config)
                trained.check_trainable(prepared, config)
            except InputError as error:
                refused[name] = str(error)
                continue
            with doubles(prepared, config, tmp_path) as fleet:
                measured = replay(prepared, fleet, config, None, training)
            assert measured.stopped is None and measured.result.steps.num_rows == 3
            parts = measured.result.metadata["replay"]["trained"]["log_probs"]
            ages = sum(part["off_policyness_mean"] * part["tokens"] for part in parts)
            tokens = sum(part["tokens"] for part in parts)
            counted = trained.off_policyness(measured.result)
            assert counted is not None and counted[0] == pytest.approx(ages / tokens)
            made.add(name)
    assert made >= {"verl_colocated", "one_step_off", "areal", "rhymerl", "streamrl", "april"}
    assert len(made) > 25 and all("\n" not in line for line in refused.values())


@pytest.mark.slow
def test_a_trainer_that_dies_ends_a_replay_that_keeps_what_was_measured(
    tmp_path: Path, model: Path, monkeypatch
):
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    prepared = prepared_for(tmp_path, model, "one_step_off")
    config = ReplayConfig(model, device="cpu", dtype="float32", start_deadline_s=60.0)
    with (
        trained.real_training(prepared, config, tmp_path) as training,
        doubles(prepared, config, tmp_path) as fleet,
    ):
        measured = replay(prepared, fleet, config, lambda _: training.link.process.kill(), training)
    assert "trainer: killed by signal 9" in str(measured.stopped)
    assert measured.result.steps.num_rows == 1
    assert measured.result.metadata["replay"]["trained"]["phases_s"]["update"] > 0


def test_a_learner_publishes_what_it_trained_and_further_parts_keep_the_versions_log_probs(
    tmp_path: Path, model: Path
):
    config = UpdateConfig(objective="ppo", learning_rate=1e-2)
    learner = PhaseLearner(Trainee(model, tmp_path / "versions", config, "cpu", "float32", "cpu"))
    old = {name: each.clone() for name, each in load_policy(model).state_dict().items()}
    ids = [TokenIds((1, 2, 3), tuple(range(4 + k, 14 + k))) for k in range(4)]
    first, second = (
        tuple(Trajectory(each, float(i % 2), part, ((0, 10),)) for i, each in enumerate(batch))
        for part, batch in enumerate((ids[:2], ids[2:]))
    )
    figures = learner.carry_out(LogProbs(0, first)).figures
    assert figures == {"tokens": 20, "off_policyness_mean": 0.0, "off_policyness_max": 0}
    learner.carry_out(Train(1))
    learner.carry_out(LogProbs(0, second))
    policy = learner._policy
    assert policy._scored is not None
    expected = log_probs(policy.model, ids[2:], 1024, old)
    assert torch.allclose(policy._scored.behaviour, expected, atol=1e-6)
    assert not torch.allclose(log_probs(policy.model, ids[2:], 1024), expected, atol=1e-3)
    learner.carry_out(Train(1))
    learner.carry_out(Publish())
    published = load_weights(tmp_path / "versions" / "0001")
    assert all(torch.equal(published[n], p) for n, p in policy.model.named_parameters())
    ages = learner.carry_out(LogProbs(1, first)).figures
    assert (ages["off_policyness_mean"], ages["off_policyness_max"]) == (1.0, 1)
    with pytest.raises(InputError, match="an update of version 3; the learner is at 1"):
        learner.carry_out(LogProbs(3, first))


def test_measured_efficiency_predicts_the_seconds_that_it_was_measured_from(
    tmp_path: Path, model: Path
):
    config = UpdateConfig(micro_batch_tokens=256)
    policy = InTraining(load_policy(model), config)
    batch = [
        Trajectory(TokenIds((1, 2), tuple(range(5, 5 + n))), float(n % 2), 0, ((0, n),))
        for n in range(20, 60)
    ]
    shape, card = model_shape(model / "config.json"), gpu("cpu")
    published: list[int] = []
    efficiency = measure_efficiency(
        policy.model, make_optimizer(policy.model, config), config, shape, card, [batch] * 3,
        lambda: published.append(1),
    )  # fmt: skip
    assert len(published) == 3 and efficiency.mfu > 0 and efficiency.publish_s >= 0
    lengths = np.array([2 + n for n in range(20, 60)])

    def seconds(efficiency: Efficiency) -> tuple[float, float]:
        fields = {"tokens_per_microbatch": 256, **efficiency.as_training()}
        of = TrainingConfig.model_validate(fields)
        costs = TrainingCosts(shape, card, 1, of, 1, 1, switch=False)
        return costs.update(lengths, 1)[0][1], costs.inference(lengths)[0][1]

    # Efficiencies above the round figures of a CPU stay what they are.
    slow, fast = seconds(Efficiency(0.5, 0.8, 0.1, 0.0)), seconds(Efficiency(2.0, 3.2, 0.1, 0.0))
    assert np.allclose(np.array(slow) / np.array(fast), 4.0)


def test_rewards_of_a_recorded_trace_are_those_of_its_task():
    trace = read_trace(COUNTDOWN)
    task = trained.task_of(trace)
    assert task is not None
    some = trace.table.slice(0, 256).to_pylist()
    assert [task.rule.reward(task.problems[r["prompt_id"]], r["response_ids"]) for r in some] == [
        r["reward"] for r in some
    ]
    assert {r["reward"] for r in some} == {0.0, 1.0}
    assert trained.task_of(a_trace()) is None


@pytest.mark.parametrize(
    ("system", "more", "message"),
    [
        ("rlhfuse", "", "it trains on some GPUs while others roll out"),
        ("{name: one_step_off, log_probs: 0}", "", "its log-probs come from the engines"),
        ("one_step_off", ", lora: true", "set training.lora to false"),
        ("one_step_off", ", extra_log_probs: 1", "has no reference and no critic"),
        ("one_step_off", ", checkpoint_every: 2", "set training.checkpoint_every to 0"),
    ],
)
def test_training_that_is_not_made_for_real_is_refused_with_a_remedy(
    tmp_path: Path, model: Path, system: str, more: str, message: str
):
    (chosen,) = load_scenarios(scenario_file(tmp_path, model, system, more), [])
    with pytest.raises(InputError, match=message) as error:
        trained.check_trainable(prepare(chosen), ReplayConfig(model))
    assert "cannot be trained for real" in str(error.value) and "\n" not in str(error.value)


def test_training_in_fp8_is_refused_with_a_remedy(tmp_path: Path, model: Path):
    file = scenario_file(tmp_path, model, "one_step_off")
    (chosen,) = load_scenarios(file, [])
    precision = chosen.precision.model_copy(update={"training": "fp8"})
    prepared = prepare(chosen)
    fp8 = replace(prepared, scenario=chosen.model_copy(update={"precision": precision}))
    with pytest.raises(InputError, match=r"precision\.training is fp8.*leave it out"):
        trained.check_trainable(fp8, ReplayConfig(model))


def test_a_trainer_gets_the_first_gpu_behind_engines_that_share_gpus_and_their_drafters(
    tmp_path: Path, model: Path
):
    alone = prepared_for(tmp_path, model, "{name: one_step_off, speculation: none}")
    drafts = f"{{name: specactor, model: {model}/config.json, draft_gpus: 1, window: 3}}"
    system = f"{{name: one_step_off, speculation: {drafts}}}"
    (chosen,) = load_scenarios(scenario_file(tmp_path, model, system), ["cluster.gpus=5"])
    drafted = replace(prepare(chosen), workers=2)
    assert drafted.drafts is not None and drafted.drafts.draft_gpus == 1
    config = ReplayConfig(model)
    assert engine_gpus(drafted, config) == 4
    assert engine_gpus(replace(alone, workers=3), replace(config, engines_per_gpu=2)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (Path("v1"),)}, "--train and --weights: the trainer makes them"),
        ({"dummy_weights": True}, "--train and --dummy: the trainer needs the model's weights"),
        ({"temperature": 0.6}, "--train and temperature 0.6: log-probs of the trainer are of"),
    ],
)
def test_settings_without_a_policy_to_train_are_refused(
    tmp_path: Path, model: Path, settings: dict, message: str
):
    prepared = prepared_for(tmp_path, model, "one_step_off")
    with pytest.raises(InputError, match=message):
        trained.check_trainable(prepared, ReplayConfig(model, **settings))


@pytest.mark.xdist_group("vllm")
def test_vllm_continues_with_the_weights_that_were_trained_meanwhile(tmp_path: Path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    model = tmp_path / "v0"
    make_model(model, 1, 64, heads=2, kv_heads=1, vocab=300)
    prepared = prepared_for(tmp_path, model, "verl_colocated")
    # Greedy, so that each response can be generated again from the folder of its version.
    config = ReplayConfig(model, device="cpu", dtype="float32", temperature=0.0)
    with trained.real_training(prepared, config, tmp_path) as training:
        settings = engine_settings(prepared, config)
        with process_fleet(1, settings, config, tmp_path) as fleet:
            measured = replay(prepared, fleet, config, None, training)
        policies = [load_policy(training.weights(version)) for version in range(3)]
    assert measured.stopped is None
    made = whole_responses(measured, 300)
    assert len(made) == 36 and {version for version, _, _ in made} == {0, 1, 2}
    for version, prompt, response in made[::5]:
        (again,) = generate(policies[version], [prompt], len(response), eos=-1, temperature=0)
        assert again == response
