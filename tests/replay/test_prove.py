"""A proof: what it predicts before it measures, what it writes when steps fail, and the page."""

import hashlib
import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from simrl.errors import StoppedError
from simrl.profile.shipped import ROOT
from simrl_replay import prove
from simrl_replay.prove import Proof, Step
from simrl_replay.prove_page import bars, page, passes
from simrl_replay.prove_plan import cases, engines, settings, sizes
from simrl_replay.rank import Recorded, as_recorded
from tests.command_line import CommandLine
from tests.engine_double import EngineDouble


@pytest.fixture
def proof(tmp_path, monkeypatch) -> Proof:
    """On engines that are doubles, each pass of half a millisecond."""
    monkeypatch.setattr(prove, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "0.32.0")
    return Proof(
        "cpu", "cpu", 5.0, tmp_path, lambda _: None, start=partial(EngineDouble, step_s=5e-4)
    )


def test_a_proof_measures_after_the_blind_predictions_are_written(proof, monkeypatch):
    written = []
    replay = prove.replay
    monkeypatch.setattr(
        proof, "_predicted_whole", lambda: SimpleNamespace(phases={})
    )  # needs torch

    def watched(*arguments, **named):
        written.append((proof.folder / "blind.json").exists())
        return replay(*arguments, **named)

    monkeypatch.setattr(prove, "replay", watched)
    names = ["areal", "verl_colocated", "short of KV"]
    steps = [
        Step("blind", 0.0, partial(proof._blind, ["a", "b", "short of KV"])),
        Step("engines", 0.0, partial(proof._wait, ["a", "b", "short of KV"])),
        *(Step(name, 0.0, partial(proof._replay, proof.cases[name])) for name in names),
        Step("trials", 0.0, partial(proof._trials, "a")),
    ]
    monkeypatch.setattr(proof, "steps", lambda: steps)
    record = json.loads(json.dumps(proof.run(), default=float))
    assert [(each["step"], each["state"]) for each in record["steps"]] == [
        (step.name, "done") for step in steps
    ], record
    assert written == [True] * 4  # one of the replays is made twice
    blind = (proof.folder / "blind.json").read_bytes()
    assert record["steps"][0]["sha256"] == hashlib.sha256(blind).hexdigest()
    assert {*json.loads(blind)["replays"]} == {*proof.cases}
    for each in record["steps"][2:5]:
        blind_run = each["predicted"]["blind"]
        assert blind_run["rollout_s"] == json.loads(blind)["replays"][each["case"]]["rollout_s"]
        assert each["measured"]["rollout_s"] > 0 and each["responses"] >= 256
    short = record["steps"][4]
    # The reference engine of a double is the simulated one: every pass and preemption is predicted.
    assert short["measured"]["counts"] == short["predicted"]["blind"]["counts"]
    assert short["measured"]["counts"]["preemptions"] > 0
    assert [figure["what"] for figure in record["steps"][5]["figures"]] == ["sampler"] * 4
    assert json.loads((proof.folder / "prove.json").read_text()) == record
    text = page(record)
    assert "| short of KV | preemptions |" in text and record["steps"][0]["sha256"][:16] in text


def test_a_step_that_fails_is_recorded_with_its_reason_and_the_others_go_on(proof, monkeypatch):
    def fails():
        proof.partial |= {"title": "A step", "phases": {}, "unlike": ["another one"]}
        raise StoppedError("engine a: killed by signal 9")

    steps = [
        Step("first", 0.0, fails),
        Step("late", 1e9, fails),
        Step("last", 0.0, lambda: {"value": 1}),
    ]
    monkeypatch.setattr(proof, "steps", lambda: steps)
    first, late, last = proof.run()["steps"]
    assert (first["state"], first["why"], first["phases"]) == (
        "failed",
        "engine a: killed by signal 9",
        {},
    )
    assert late["state"] == "skipped" and late["why"].endswith("s were left")
    assert (last["state"], last["value"]) == ("done", 1)
    assert "StoppedError" in (proof.folder / "logs" / "steps.log").read_text()
    assert "killed by signal 9" in page(json.loads((proof.folder / "prove.json").read_text()))


def test_the_time_ends_also_where_an_engine_is_waited_for(proof, monkeypatch):
    waited = []

    def waits(links, deadline_s):
        waited.append(links)
        prove.time.sleep(30.0)

    monkeypatch.setattr(prove, "wait_until_ready", waits)
    monkeypatch.setattr(
        proof.up,
        "_links",
        {"a": SimpleNamespace(kill=lambda: None), "b": SimpleNamespace(kill=lambda: None)},
    )
    proof.until_s = prove.time.monotonic() + 0.3
    monkeypatch.setattr(
        proof, "steps", lambda: [Step("engines", 0.0, partial(proof._wait, ["a", "b"]))]
    )
    (entry,) = proof.run()["steps"]
    assert (entry["state"], entry["why"], len(waited)) == (
        "failed",
        "the time was up",
        1,
    ) and entry["took_s"] < 5


def test_an_engine_that_dies_in_a_replay_serves_the_next_one_and_ends_with_the_proof(
    proof, monkeypatch
):
    monkeypatch.setattr(
        proof, "_predicted_whole", lambda: SimpleNamespace(phases={})
    )  # needs torch
    processes = []

    def dies():
        proof.up._links["a"].process.kill()
        entry = proof._replay(proof.cases["verl_colocated"])
        processes.append(proof.up._links["a"].process)
        return entry

    steps = [
        Step("blind", 0.0, partial(proof._blind, ["a"])),
        Step("engines", 0.0, partial(proof._wait, ["a"])),
        Step("dies", 0.0, dies),
        Step("next", 0.0, partial(proof._replay, proof.cases["verl_colocated"])),
    ]
    monkeypatch.setattr(proof, "steps", lambda: steps)
    *_, died, after = proof.run()["steps"]
    assert died["state"] == after["state"] == "done", (died, after)
    assert after["measured"]["counts"] == after["predicted"]["blind"]["counts"]
    assert not processes[0].is_alive()


def test_nothing_is_measured_that_was_not_predicted(proof, monkeypatch):
    def fails():
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(proof, "_blind", lambda starting: fails())
    record = proof.run()
    assert [(each["step"], each["state"]) for each in record["steps"]] == [
        ("here", "done"),
        ("blind", "failed"),
    ]


def test_what_a_gpu_is_too_small_for_is_left_out_with_its_reason(tmp_path, monkeypatch):
    proof = Proof("cuda", "a6000", 9.0, tmp_path, lambda _: None)
    begun = []
    monkeypatch.setattr(proof.up, "begin", lambda name, *_: begun.append(name))
    monkeypatch.setattr(
        proof, "_predicted_whole", lambda: SimpleNamespace(phases={})
    )  # needs torch
    small = [name for name, engine in proof.engines.items() if engine.model == "qwen3-0.6b"]
    blind = proof._blind(small)
    assert {*begun} | {*proof.up.failed} == {*small} and begun[:4] == [
        "a",
        "b",
        "drafting a",
        "drafting b",
    ]
    assert all("of the GPU's memory is not left" in why for why in proof.up.failed.values())
    assert "needs" in blind["not_predicted"]["large"] and "large" not in proof.predictions
    assert "rhymerl" in proof.predictions
    step = Step("large", 0.0, partial(proof._replay, proof.cases["large"]))
    monkeypatch.setattr(proof, "steps", lambda: [step])
    (entry,) = proof.run()["steps"]
    assert entry["state"] == "failed" and "qwen3-8b" in entry["why"]


def test_a_step_ends_when_the_time_is_up(proof, monkeypatch):
    def waits():
        while True:
            pass

    proof.until_s = prove.time.monotonic() + 0.3
    monkeypatch.setattr(
        proof, "steps", lambda: [Step("waits", 0.0, waits), Step("after", 1.0, dict)]
    )
    waited, after = proof.run()["steps"]
    assert (waited["state"], waited["why"]) == ("failed", "the time was up") and waited[
        "took_s"
    ] < 5
    assert after["state"] == "skipped"


def test_engines_that_share_a_gpu_fit_it_and_hold_a_whole_sequence(tmp_path):
    of = sizes("cuda")
    first = [engine for engine in engines(of, "full").values() if engine.model == of.small.name]
    made = [settings(engine, of, tmp_path, "cuda", 85e9) for engine in first]
    assert sum(each.gpu_memory_utilization for each in made) < 0.95
    for each, engine in zip(made, first, strict=True):
        assert (
            each.kv_cache_bytes
            == (engine.kv_tokens + each.block_size) * of.small.kv_bytes_per_token
        )
        assert engine.kv_tokens >= each.max_model_len


def test_each_replay_of_a_gpu_has_256_responses_and_its_engines(tmp_path):
    proof = Proof("cuda", "h100", 9.0, tmp_path, lambda _: None)
    for case in cases(proof.of, proof.models):
        prepared = proof._prepared(case, None)
        assert prepared.workers == len(case.engines)
        assert prepared.profile.metadata.kind == "derived" and not prepared.limits.async_scheduling
        assert (
            prepared.scenario.steps * len(prepared.trace) // len(prepared.trace.step_slices) >= 256
        )


def test_a_bar_is_shown_with_its_figure_whether_met_or_not():
    def replayed(engines: int, blind: float, profile: float, ends: float):
        errors = (
            {"makespan_err": blind, "sample_mape": ends},
            {"makespan_err": profile, "sample_mape": ends},
        )
        return {
            "engines": engines,
            "predicted": {
                name: {"errors": each}
                for name, each in zip(("blind", "profile"), errors, strict=True)
            },
        }

    rows = bars(
        [
            replayed(1, -0.05, 0.01, 0.02),
            replayed(1, 0.2, -0.04, 0.09),
            replayed(2, -0.1, 0.02, 0.03),
        ]
    )
    assert [(what, prediction, worst) for what, prediction, _, worst, _ in rows] == [
        ("makespan, one engine on the GPU", "blind", 0.2),
        ("makespan, two engines share the GPU", "blind", -0.1),
        ("makespan, one engine on the GPU", "profile", -0.04),
        ("samples' ends (MAPE), one engine on the GPU", "profile", 0.09),
        ("makespan, two engines share the GPU", "profile", 0.02),
        ("samples' ends (MAPE), two engines share the GPU", "profile", 0.03),
    ]


def test_a_page_of_no_steps_names_the_minutes_and_nothing_else():
    text = page({"minutes": 2.0, "gpu": "h100", "device": "cuda", "steps": []})
    assert text.startswith("# Predicted, then measured: cuda") and "## Replays" not in text


def test_the_page_of_passes_has_each_with_its_errors_and_the_hosts_line():
    shape = {
        "sequences": 4,
        "draft_tokens": 0,
        "kv_tokens": 31.6,
        "prompts": 0,
        "chunk_tokens": 0,
        "context_tokens": 0,
    }
    step = {
        "step": "passes alone",
        "profile": "alone",
        "model": "qwen3-0.6b",
        "beside": None,
        "passes": [{**shape, "measured_s": 0.002, "blind_s": 0.0021, "spread": 0.01}],
        "held_out": [{**shape, "measured_s": 0.002, "blind_s": 0.0018, "profile_s": 0.0019}],
        "between_passes_s": 1e-5,
        "request_s": 3e-4,
        "host": {
            "between_passes_s": [0.0011, 0.001, 0.0012],
            "sequence_overhead_s": [2.5e-5, 2.4e-5, 2.6e-5],
        },
    }
    text = passes({"steps": [step]})
    assert "| 4 |  | 32 |  |  |  | 2.00 | 2.10 | +5.0% |  |" in text
    assert "| 4 |  | 32 |  |  |  | 2.00 | 1.80 | -10.0% | -5.0% |" in text
    assert "decode steps take 1.10 ms and 25 µs a sequence" in text


class Batch(NamedTuple):
    req_ids: list[str]
    num_tokens_no_spec: np.ndarray
    spec_token_ids: list[list[int]]


def test_requests_sample_their_record_and_drafts_stand_as_far_as_it_has_them():
    torch = pytest.importorskip("torch")
    recorded = {
        "1.1": Recorded(4, np.array([10, 11, 12, 13], np.int32)),
        "2.1": Recorded(2, np.array([20, 21], np.int32)),
    }
    batch = Batch(["1.1-ab", "2.1-cd", "warm-0-ef"], np.array([5, 3, 9]), [[11, 12, 99], [20], [7]])
    sampled = torch.tensor([[1, -1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]], dtype=torch.int32)
    # The first goes on after its draft stood for two tokens; the second's draft is wrong; the third has no record.
    expected = [[11, 12, 13, -1], [21, -1, -1, -1], [4, 5, -1, -1]]
    assert as_recorded(sampled, batch, recorded).tolist() == expected
    one = Batch(["1.1-ab"], np.array([8]), [[]])
    assert as_recorded(sampled[:1, :1], one, recorded).tolist() == [[0]]  # beyond its end
    assert as_recorded(sampled, batch, {}) is sampled


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["--graphs", "some"], "'some' is not one of 'full', 'decode', 'compiled', 'none'"),
        (
            ["--ray", "local"],
            "--ray local: one GPU needs no cluster; add --gpus, or rehearse with --device cpu",
        ),
        (["--gpus", "0"], "--gpus"),
        (["-o", "scenario.yaml"], "--output scenario.yaml: is there already"),
    ],
)
def test_a_wrong_choice_is_one_line_and_leaves_nothing(simrl: CommandLine, options, named):
    assert named in simrl.refuses("prove", *options)


def test_each_engine_of_a_node_has_gpus_of_its_own_and_engines_of_a_replay_share_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8")
    for gpus in range(2, 9):
        proof = Proof("cuda", "h100", 9.0, tmp_path, lambda _: None, gpus=gpus)
        gpus_of = {
            name: each["CUDA_VISIBLE_DEVICES"].split(",") for name, each in proof.variables.items()
        }
        assert {*gpus_of} == {*proof.engines} and {
            gpu for each in gpus_of.values() for gpu in each
        } == {str(gpu) for gpu in range(gpus)}
        for case in proof.cases.values():
            taken = [gpu for name in case.engines for gpu in gpus_of[name]]
            assert (
                len({*taken}) == len(taken) == sum(proof.engines[name].tp for name in case.engines)
            )
        assert (
            len({*gpus_of["drafting a"], *gpus_of["drafting b"]}) == 2
            and len({*gpus_of["tp 2"]}) == 2
        )
    assert max(len(case.engines) for case in proof.cases.values()) == 4
    assert [gpus_of[name] for name in ("a", "b", "c", "d")] == [["0"], ["1"], ["2"], ["3"]]
    one = Proof("cuda", "h100", 9.0, tmp_path, lambda _: None)
    assert not one.variables and not {"tp 2", "c"} & {*one.engines}
    assert {step.name for step in proof.steps()} - {step.name for step in one.steps()} == {
        "weight sync",
        "engine of two GPUs",
        "passes of two GPUs",
        "tp 2",
        "more engines",
    }


def test_an_engine_of_two_gpus_is_predicted_and_started_as_one(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    proof = Proof("cuda", "h100", 9.0, tmp_path, lambda _: None, gpus=8)
    for name, workers, tp in (("tp 2", 1, 2), ("more engines", 4, 1)):
        prepared = proof._prepared(proof.cases[name], None)
        assert (prepared.workers, prepared.scenario.cluster.tp) == (workers, tp)
        assert prepared.profile.metadata.kind == "derived" and prepared.profile.metadata.tp == tp
        assert (
            prepared.scenario.steps * len(prepared.trace) // len(prepared.trace.step_slices) >= 256
        )
    one, two = (proof._settings(proof.engines[name]) for name in ("large", "tp 2"))
    assert (two.tp, two.kv_blocks) == (2, one.kv_blocks)
    assert (
        one.kv_cache_bytes is not None and two.kv_cache_bytes == one.kv_cache_bytes // 2
    )  # on each GPU
    assert two.gpu_memory_utilization < 0.6 * one.gpu_memory_utilization


def test_the_blind_predictions_of_a_node_have_its_replays_passes_and_weight_sync(
    tmp_path, monkeypatch
):
    proof = Proof("cpu", "cpu", 5.0, tmp_path, lambda _: None, gpus=6)
    monkeypatch.setattr(
        proof, "_predicted_whole", lambda: SimpleNamespace(phases={})
    )  # needs torch
    monkeypatch.setattr(
        proof, "_predicted_sync", lambda: {"in buckets": {"predicted_s": 1.0}}
    )  # likewise
    proof._blind([])
    blind = json.loads((tmp_path / "blind.json").read_text())
    assert {"tp 2", "more engines"} <= {*blind["replays"]} and "tp 2" in blind["passes"]
    assert blind["passes"]["tp 2"] != blind["passes"]["large"]
    assert blind["weight sync"] == {"in buckets": {"predicted_s": 1.0}}


def test_one_replay_goes_through_ray_if_a_cluster_is_named(tmp_path, monkeypatch):
    proof = Proof("cpu", "cpu", 5.0, tmp_path, lambda _: None, gpus=2, ray="local")
    fleets = []
    monkeypatch.setattr(
        prove, "ray_fleet", lambda *arguments: fleets.append(arguments) or nullcontext(None)
    )
    monkeypatch.setattr(proof.up, "fleet", lambda names: names)
    for case in proof.cases.values():
        proof._fleet(case, proof._config(case))
    [(workers, of, _, address)] = fleets
    assert (workers, address) == (2, "local") and of == proof._settings(proof.engines["a"])


def test_the_page_of_a_node_has_its_weight_sync_and_names_engines_on_gpus_of_their_own():
    sync = {
        "step": "weight sync",
        "state": "done",
        "took_s": 9.0,
        "title": "Weight sync",
        "phases": {"in buckets": {"predicted_s": 0.6, "measured_s": 0.5, "rests_on": "broadcast"}},
        "unlike": ["nothing is gathered"],
    }
    text = page({"minutes": 9.0, "gpu": "h100", "gpus": 8, "device": "cuda", "steps": [sync]})
    assert "| in buckets | 0.600 | 0.500 | +20.0% |  | broadcast |" in text
    errors = {
        name: {"errors": {"makespan_err": 0.01, "sample_mape": 0.02}}
        for name in ("blind", "profile")
    }
    rows = bars([{"engines": 2, "gpus": 8, "predicted": errors}])
    assert {what.partition(", ")[2] for what, *_ in rows} == {"engines on GPUs of their own"}


def test_more_gpus_than_are_visible_are_refused_with_their_number(simrl: CommandLine, monkeypatch):
    monkeypatch.setattr("simrl_replay.vllm_adapter.vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    line = simrl.refuses("prove", "--gpu", "h100", "--gpus", "8", "-o", "results")
    assert (
        "--gpus 8: 2 visible here (CUDA_VISIBLE_DEVICES, or `nvidia-smi -L`); choose fewer" in line
    )
    assert not (simrl.folder / "results").exists()


def test_the_page_of_the_h100_is_made_from_its_record_and_its_predictions_are_the_blind_ones():
    folder = ROOT / "experiments" / "gpu" / "h100"
    record = json.loads((folder / "prove.json").read_text())
    assert (folder / "prove.md").read_text() == page(record)
    assert (folder / "passes.md").read_text() == passes(record)
    steps = {each["step"]: each for each in record["steps"]}
    blind = (folder / "blind.json").read_bytes()
    assert hashlib.sha256(blind).hexdigest() == steps["blind"]["sha256"]
    for name, predicted in json.loads(blind)["replays"].items():
        if "predicted" in steps[name]:
            assert steps[name]["predicted"]["blind"]["rollout_s"] == predicted["rollout_s"]
