"""The command around a replay, as far as it goes without an engine."""

import json
import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.scenario.load import Choices, load_scenarios
from simrl.simulate.prepare import prepare
from simrl_replay import replayed
from simrl_replay.link import ProcessLink, engine_link
from simrl_replay.replayed import (
    balance_line,
    chosen_scenario,
    default_folder,
    draft_folders,
    measure_and_show,
    with_workers,
)
from simrl_replay.replayer import ReplayConfig, ReplayEngines
from simrl_replay.vllm_adapter import EngineSettings
from tests.command_line import CommandLine
from tests.engine_double import EngineDouble


def test_replays_of_other_systems_speculations_dispatches_or_workers_leave_each_others_results(
    simrl: CommandLine,
):
    folders = []
    for system, dispatch, speculation in product(
        ("verl_colocated", "areal"),
        ((), ("least_requests",)),
        ((), ("ngram",), ("{name: ngram, gate: open}",)),
    ):
        choices = Choices((), dispatch, speculation)
        (scenario,) = load_scenarios(Path("scenario.yaml"), [], system, choices)
        folders += [default_folder(scenario, workers) for workers in (1, 2)]
    assert len(set(folders)) == len(folders) == 24
    assert Path("results/tiny-verl-colocated-speculation-ngram-workers-2-replay") in folders
    assert all(
        set(folder.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for folder in folders
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], "2 runs (verl_colocated, areal)"),
        (["systems=[verl_colocated]", "vary=[{cluster.gpus: 4}, {cluster.gpus: 8}]"],
         "2 runs (verl_colocated with cluster.gpus=4; verl_colocated with cluster.gpus=8)"),
        (["systems=[{name: areal, eta: 1}, {name: areal, eta: 2}]"], "2 runs (areal with eta=1; areal with eta=2)"),
    ],
)  # fmt: skip
def test_where_a_scenario_has_several_runs_what_they_differ_in_is_named(
    simrl: CommandLine, overrides: list[str], named: str
):
    with pytest.raises(InputError) as refused:
        chosen_scenario(Path("scenario.yaml"), overrides, None, None, None)
    assert named in str(refused.value) and "choose it with --system NAME" in str(refused.value)
    if not overrides:
        return
    ended = simrl("run", "scenario.yaml", "--system", "verl_colocated", "-o", "one")
    assert ended.code == 0, ended.err
    assert named in simrl.refuses(
        "compare", "scenario.yaml", *overrides, "--measured", "one/verl-colocated"
    )


@pytest.mark.parametrize("system", ["verl_colocated", "areal"])
def test_more_workers_than_a_scenario_has_are_refused_before_anything_starts(
    simrl: CommandLine, system: str
):
    prepared = prepare(chosen_scenario(Path("scenario.yaml"), [], system, None, None))
    assert with_workers(prepared, 1).workers == 1
    with pytest.raises(
        InputError, match=f"--workers 99: .* give {system}.* ask for fewer, or set cluster.gpus"
    ):
        with_workers(prepared, 99)


@pytest.fixture
def doubles_replayed(simrl: CommandLine, monkeypatch) -> tuple[str, ...]:
    """The arguments of a short replay, whose engine is a double."""

    def doubles(
        prepared, settings: EngineSettings, config: ReplayConfig, ray, logs: Path, folder
    ) -> ReplayEngines:
        logs.mkdir()
        start = partial(EngineDouble, step_s=0.002)
        return ReplayEngines(
            [partial(engine_link, "worker 0", settings, logs / "0.log", start=start)]
        )

    monkeypatch.setattr(replayed, "_start_engines", doubles)
    monkeypatch.setattr(replayed, "check_engine", lambda config: None)
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    (simrl.folder / "v0").mkdir()
    (simrl.folder / "v0" / "config.json").write_text("{}")
    quick = (
        "engine.async_scheduling=false",
        "training.switch_s=0.05",
        "training.load_s=0.01",
        "training.publish_s=0.01",
    )
    options = (
        "--system",
        "verl_colocated",
        "--workers",
        "1",
        "--model",
        "v0",
        "--device",
        "cpu",
        "-o",
        "replayed",
    )
    return "replay", "scenario.yaml", *quick, *options


def test_errors_of_a_replay_stand_beside_how_far_its_repeats_are_apart(
    simrl: CommandLine, doubles_replayed: tuple[str, ...]
):
    ended = simrl(*doubles_replayed, "--repeats", "3")
    assert ended.code == 0, ended.err
    agreement = json.loads(Path("replayed/agreement.json").read_text())
    repeats, words = agreement["repeats"], " ".join(ended.out.split())
    assert repeats["errors"][0] == agreement["errors"]
    assert len(repeats["errors"]) == repeats["spread"]["repeats"] == 3
    assert "predicted measured error mean largest" in words
    assert (
        f"Two replays differ by up to {repeats['spread']['largest']['makespan_err']:.1%}" in words
    )
    parts = agreement["given_measured_passes"]
    assert len(parts) == 3 and "passes have the predicted work" in words
    for each, errors in zip(parts, repeats["errors"], strict=True):
        product = (1 + each["speed_err"]) * (1 + each["schedule_err"])
        assert product == pytest.approx(1 + errors["makespan_err"])
    assert {place.parent.name for place in Path("replayed/repeats").glob("*/result.json")} == {
        "2",
        "3",
    }
    assert simrl("explain", "replayed").code == 0  # of the first replay


def test_a_replay_says_what_became_of_its_tokens_and_on_a_cluster_where_its_engines_are(
    simrl: CommandLine, doubles_replayed: tuple[str, ...], monkeypatch
):
    monkeypatch.setattr(replayed, "connect", lambda address: None)
    monkeypatch.setattr(ProcessLink, "place", {"node_id": "a1"})
    facts = {"lost_nodes": ["node b (10.0.0.2, b2)"], "travels": []}
    monkeypatch.setattr(ReplayEngines, "facts", lambda engines: facts)
    ended = simrl(*doubles_replayed, "--ray", "local")
    assert ended.code == 0, ended.err
    assert (
        "1 engine on 1 node at the end of the replay; node b (10.0.0.2, b2) was lost." in ended.out
    )
    assert re.search(r"^Tokens: ([\d,]+) generated = \1 trained\.$", ended.out, re.MULTILINE)
    assert balance_line({"generated": 1200, "trained": 1000, "in_flight": 100}).startswith(
        "Tokens: 1,200 generated = 1,000 trained + 100 in flight, which are not equal"
    )
    assert "--copy-weights is for the nodes of a Ray cluster" in simrl.refuses(
        *doubles_replayed, "--copy-weights"
    )


DRAFTS = ("--speculation", "{name: draft_model, model: qwen2.5-0.5b}")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--drafter-lr", "1e-3"), "--drafter-lr 0.001: verl_colocated trains no drafter"),
        (("--draft-model", "v0"), "--draft-model v0: verl_colocated drafts with no model"),
        (
            ("--draft-model", "x=/nowhere"),
            "--draft-model x=/nowhere: verl_colocated does not draft with x, but with no model",
        ),
        (
            (*DRAFTS, "--draft-model", "x=v0"),
            "does not draft with x, but with qwen2.5-0.5b; leave it out, or correct the name",
        ),
        (
            (*DRAFTS, "--draft-model", "qwen2.5-0.5b=v0", "--draft-model", "qwen2.5-0.5b=v1"),
            "--draft-model qwen2.5-0.5b=v1: qwen2.5-0.5b has a folder already",
        ),
        (
            (*DRAFTS, "--draft-model", "qwen2.5-0.5b=v0", "--draft-model", "v0"),
            "drafts with no model but those named",
        ),
        (
            (*DRAFTS, "--draft-model", "nowhere/config.json"),
            "model nowhere/config.json: no folder with a config.json; name one with --draft-model",
        ),
    ],
)
def test_an_option_for_drafters_that_would_change_nothing_is_refused_with_its_place(
    simrl: CommandLine, doubles_replayed: tuple[str, ...], options: tuple[str, ...], line: str
):
    assert line in simrl.refuses(*doubles_replayed, *options)


def test_a_folder_of_drafters_is_that_of_its_config_and_may_have_a_name_with_a_sign(
    simrl: CommandLine,
):
    prepared = prepare(
        chosen_scenario(Path("scenario.yaml"), [], "verl_colocated", None, DRAFTS[1])
    )
    Path("run=3").mkdir()
    Path("run=3/config.json").write_text("{}")
    of_file, folder = ("run=3/config.json", "run=3")
    assert draft_folders(prepared, [of_file]) == (Path(folder), {})
    assert draft_folders(prepared, [folder]) == (Path(folder), {})
    assert draft_folders(prepared, [f"qwen2.5-0.5b={of_file}"]) == (
        None,
        {"qwen2.5-0.5b": Path(folder)},
    )


def test_one_folder_does_not_stand_for_several_models(simrl: CommandLine):
    overrides = ["system.draft_gpus=1", "system.drafters=[qwen2.5-0.5b,qwen2.5-1.5b]"]
    prepared = prepare(chosen_scenario(Path("scenario.yaml"), overrides, "specactor", None, None))
    Path("config.json").write_text("{}")
    with pytest.raises(InputError, match=r"with qwen2.5-0.5b, qwen2.5-1.5b; give NAME=FOLDER"):
        draft_folders(prepared, ["."])
    with pytest.raises(InputError, match="second folder without a name; give NAME=FOLDER"):
        draft_folders(prepared, [".", "."])
    assert draft_folders(prepared, [".", "qwen2.5-0.5b=."]) == (Path(), {"qwen2.5-0.5b": Path()})
    both = ["qwen2.5-0.5b=.", "qwen2.5-1.5b=."]
    assert draft_folders(prepared, both) == (None, {"qwen2.5-0.5b": Path(), "qwen2.5-1.5b": Path()})


def test_real_training_without_an_engine_or_torch_is_refused_in_a_line(
    simrl: CommandLine, doubles_replayed: tuple[str, ...], monkeypatch
):
    monkeypatch.setattr("simrl_replay.replayer.check_engine", lambda config: None)
    monkeypatch.setitem(sys.modules, "simrl_replay.trained", None)
    assert "is not installed here; install vLLM" in simrl.refuses(*doubles_replayed, "--train")


def test_kernels_are_compiled_before_a_replay_predicts_where_ctrl_c_waits(
    simrl: CommandLine, monkeypatch
):
    """A Ctrl-C within the compiler ends in its traceback."""

    def stop(ranks: object) -> None:
        raise KeyboardInterrupt

    for name in ("check_replayable", "check_engine", "engine_settings"):
        monkeypatch.setattr(f"simrl_replay.replayed.{name}", lambda *_: None)
    monkeypatch.setattr("simrl_replay.replayed._timed_settings", lambda *_: {})
    monkeypatch.setattr("simrl_replay.replayed.compile_kernels", stop)
    monkeypatch.setattr(
        "simrl_replay.replayed.simulate_prepared", lambda prepared: pytest.fail("it predicts")
    )
    prepared = prepare(chosen_scenario(Path("scenario.yaml"), [], "verl_colocated", None, None))
    with pytest.raises(KeyboardInterrupt):
        measure_and_show(prepared, ReplayConfig(Path("v0")), Path("out"), None, 1, False)
    assert [file.name for file in simrl.folder.iterdir()] == ["scenario.yaml"]
