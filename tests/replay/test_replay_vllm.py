"""Replays on real vLLM: what comes out of an engine, and what is left when one is killed, or the whole replay is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import simpy

from simrl.errors import InputError
from simrl.result.result import read_result
from simrl.runtime.events import gather
from simrl.runtime.rollout import Rollout
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import SystemConfig
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import Schedule, simulate_prepared, simulated_workers
from simrl.speculation.gates import RATES
from simrl.speculation.windows import Aimd, Fixed
from simrl.trace.trace import Sample, Trace, TraceMetadata, write_trace
from simrl_replay import replayer
from simrl_replay.clock import WallClock
from simrl_replay.host import Begin, DraftCall, Ended, Gained, Loaded, LoadWeights
from simrl_replay.link import engine_link, wait_until_ready
from simrl_replay.measured_passes import split_error
from simrl_replay.proposer import DrafterSetup
from simrl_replay.random_model import make_drafter
from simrl_replay.replayed import drafter_lines
from simrl_replay.replayer import (
    ReplayConfig,
    ReplayEngines,
    check_replayable,
    engine_settings,
    process_fleet,
    replay,
    reset,
)
from simrl_replay.speculative import forced, own_config, replayed_form
from simrl_replay.spot_head import accept_lengths
from simrl_replay.vllm_adapter import EngineSettings
from simrl_replay.vllm_worker import VllmWorker
from tests.command_line import environment
from tests.helpers import RESPONSES, recorder, rows, sample, trained, with_status
from tests.replay.test_replay_faults import eventually, is_there

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

LAYERS, HIDDEN = 2, 64


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three versions of a tiny model."""
    from simrl_replay.random_model import make_model

    folder = tmp_path_factory.mktemp("models")
    return [
        Path(
            make_model(folder / f"v{i}", LAYERS, HIDDEN, heads=2, kv_heads=1, vocab=300, seed=i)
            or folder / f"v{i}"
        )
        for i in range(3)
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, models) -> Prepared:
    """Two workers under one-step-off, one of them lost for a while."""
    folder = tmp_path_factory.mktemp("scenario")
    write_trace(a_trace(), folder / "trace.parquet")
    (folder / "scenario.yaml").write_text(scenario(models[0], folder))
    [chosen] = load_scenarios(folder / "scenario.yaml", [])
    return prepare(chosen)


def a_trace(
    steps: int = 3, group: int = 4, prompts: int = 3, tokens: int = 300, prompt_tokens: int = 10
) -> Trace:
    rows = [
        (step, 0, step * prompts + prompt, i, prompt_tokens + prompt, tokens + 37 * i)
        for step in range(steps)
        for prompt in range(prompts)
        for i in range(group)
    ]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return Trace.from_columns(
        columns,
        TraceMetadata(
            name="tiny", kind="synthetic", source="a test", tokenizer="none", cap_tokens=512
        ),
    )


def scenario(model: Path, folder: Path, steps: int = 3, cache: int = 4096) -> str:
    return f"""\
name: tiny
steps: {steps}
model: {model}/config.json
cluster: {{gpu: cpu, gpus: 3, tp: 1}}
workload: {{synthetic: null, trace: {folder}/trace.parquet}}
profile: {{path: null, roofline: {{}}}}
engine: {{max_num_seqs: 8, max_num_batched_tokens: 64, block_size: 32, kv_cache_tokens: {cache}}}
training: {{reward_s: 0.05, publish_s: 0.1, load_overhead_s: 0.03, switch_s: 0.1}}
systems: [one_step_off]
"""


@pytest.fixture(scope="module")
def config(models) -> ReplayConfig:
    return ReplayConfig(
        model=models[0],
        weights=tuple(models),
        device="cpu",
        dtype="float32",
        temperature=0.0,
        step_deadline_s=20.0,
    )


@pytest.fixture(scope="module")
def fleet(prepared, config, tmp_path_factory) -> Iterator[ReplayEngines]:
    logs = tmp_path_factory.mktemp("logs")
    settings: EngineSettings = engine_settings(prepared, config)
    start = [partial(engine_link, f"worker {i}", settings, logs / f"{i}.log") for i in range(2)]
    with ReplayEngines(start) as fleet:
        yield fleet


def pid(fleet: ReplayEngines, worker: int) -> int:
    return fleet.links[worker].process.pid  # type: ignore[attr-defined]


def prompt_ids(sample: Sample) -> tuple[int, ...]:
    return tuple((sample.uid * 31 + i * 7) % 300 for i in range(sample.prompt_tokens))


def workers(fleet: ReplayEngines, config: ReplayConfig) -> tuple[WallClock, list[VllmWorker]]:
    reset(fleet, config, None)
    env = WallClock()
    return env, [
        VllmWorker(
            env,
            i,
            fleet.links[i],
            partial(fleet.restart, i),
            RESPONSES,
            prompt_ids,
            config.folder,
            recorder("rollout-000", "rollout-001"),
            60.0,
            600.0,
            print,
        )
        for i in range(2)
    ]


def generate(
    fleet: ReplayEngines, config: ReplayConfig, samples: Sequence[Sample]
) -> dict[int, Rollout]:
    """What the first engine makes of them if nothing happens."""
    env, [worker, _] = workers(fleet, config)
    rollouts = env.run(until=gather(env, [worker.submit(each) for each in samples]))
    return {rollout.sample.uid: rollout for rollout in rollouts}


def test_responses_have_the_length_they_should_to_the_token(fleet, config):
    samples = [
        sample(uid, 1 + 13 * uid, tokens) for uid, tokens in enumerate([1, 2, 3, 17, 64, 150])
    ]
    rollouts = generate(fleet, config, samples)
    for each in samples:
        rollout, length = rollouts[each.uid], RESPONSES[each.uid].tokens
        assert rollout.done and rollout.tokens == len(rollout.token_ids) == length
        assert all(0 <= token < 300 for token in rollout.token_ids)


def test_a_response_that_moves_twice_is_token_for_token_what_it_would_have_been(fleet, config):
    a = sample(0, 20, 200)
    alone = generate(fleet, config, [a])[0]
    env, engines = workers(fleet, config)

    def moves():
        rollout = None
        for worker, tokens in ((0, 40), (1, 90), (0, 200)):
            stay = engines[worker].submit(a, rollout)
            if tokens < 200:
                yield engines[worker].when(a, tokens)
                engines[worker].abort(a)
            rollout = yield stay
        return rollout

    rollout = env.run(until=env.process(moves()))
    assert rollout.done and [s.worker for s in rollout.segments] == [0, 1, 0]
    assert rollout.token_ids == alone.token_ids


def test_an_interrupted_response_goes_on_as_one_aborted_and_submitted_again_under_the_new_weights(
    fleet, config
):
    a, others = sample(0, 20, 160), [sample(uid, 12, 400) for uid in range(1, 4)]

    def interrupted(how: str, at: int) -> tuple[Rollout, int]:
        env, [worker, _] = workers(fleet, config)

        def process():
            stay = worker.submit(a)
            for other in others:
                worker.submit(other)
            yield worker.when(a, at)
            if how == "again":
                partial_rollout = yield worker.abort(a)
                yield worker.load_weights(1)
                rollout = yield worker.submit(
                    a, partial_rollout._replace(token_ids=partial_rollout.token_ids)
                )
            else:
                yield worker.load_weights(1, running=how)
                rollout = yield stay
            return rollout

        rollout = env.run(until=env.process(process()))
        return rollout, rollout.segments[0].tokens

    def afresh(rollout: Rollout, tokens: int) -> tuple[int, ...]:
        """The rest, from the new weights alone, after the tokens that the old ones made."""
        env, [worker, _] = workers(fleet, config)
        first = rollout.segments[0]._replace(tokens=tokens)
        had = Rollout(
            a, (first,), False, rollout.first_token_s, token_ids=rollout.token_ids[:tokens]
        )

        def process():
            yield worker.load_weights(1)
            return (yield worker.submit(a, had))

        whole = env.run(until=env.process(process()))
        return whole.token_ids

    for how in ("recompute", "again"):
        rollout, tokens = interrupted(how, 50)
        assert [s.policy_version for s in rollout.segments] == [0, 1] and 50 <= tokens < 160
        assert rollout.done and rollout.token_ids == afresh(rollout, tokens)
    kept, tokens = interrupted("keep", 50)
    assert kept.token_ids != afresh(kept, tokens)  # its cache is the old weights'


def test_under_new_weights_no_prefix_of_old_ones_is_found(fleet, config):
    env, [first, second] = workers(fleet, config)
    env.run(until=first.submit(sample(7, 100, 20)))
    env.run(until=gather(env, [worker.load_weights(1, "drain") for worker in (first, second)]))
    twin = sample(307, 100, 20)  # of one prompt with 7
    again, fresh = env.run(until=gather(env, [worker.submit(twin) for worker in (first, second)]))
    assert prompt_ids(twin) == prompt_ids(sample(7, 100, 20))
    assert again.token_ids == fresh.token_ids


def test_no_port_is_open_to_the_network(fleet, config):
    sockets = [address for i in range(2) for address in listening(pid(fleet, i))]
    assert all(address in LOOPBACK for address in sockets), sockets
    # Nor here, where other tests may have a Ray cluster of their own, on loopback.
    assert all(address in LOOPBACK for address in listening(os.getpid()))


LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens: Linux's tables of sockets, and which of them are among its files."""
    held = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                found.append(local.partition(":")[0])
    return found


@pytest.mark.slow
def test_killed_and_hung_engines_cost_no_token_and_are_named(fleet, config, prepared):
    """One is killed in its first update, the other hangs in the second."""
    steps: list[int] = []

    def disturb(step: int) -> None:
        steps.append(step)
        if step == 0:
            os.kill(pid(fleet, 1), signal.SIGSTOP)

    before = [pid(fleet, i) for i in range(2)]
    kill = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(1.0); os.kill({before[0]}, 9)"]
    )
    config = ReplayConfig(**{**vars(config), "step_deadline_s": 5.0})
    measured = replay(prepared, fleet, config, disturb)
    kill.wait()
    assert measured.stopped is None
    happened = measured.result.metadata["replay"]["happened"]
    assert sorted((event["kind"], event["worker"]) for event in happened) == [
        ("died", 0),
        ("hung", 1),
    ]
    assert all(f"worker {event['worker']}: " in event["message"] for event in happened)
    assert not any(is_there(each) for each in before)
    whole = a_trace()
    uids = sorted(uid for step in trained(measured.result) for uid in step)
    assert uids == sorted(set(uids)) and len(uids) == len(whole)
    samples = rows(measured.result.samples)
    assert sum(
        row["generated_tokens"] for row in samples if row["trained_step"] is not None
    ) == sum(whole.column("response_tokens").tolist())
    segments = rows(measured.result.segments)
    assert sum(s["tokens"] for s in segments) == sum(row["generated_tokens"] for row in samples)
    ids = measured.trace.table.column("response_ids").to_pylist()
    assert [len(each) for each in ids] == measured.trace.column("response_tokens").tolist()
    spans = rows(measured.result.spans)
    assert {s["lane"] for s in spans if s["kind"] == "lost"} == {"rollout-000", "rollout-001"}


# The command.


@pytest.fixture
def folder(tmp_path, models) -> Path:
    write_trace(a_trace(), tmp_path / "trace.parquet")
    (tmp_path / "scenario.yaml").write_text(scenario(models[0], tmp_path))
    return tmp_path


def command(folder: Path, model: Path, *more: str) -> subprocess.Popen:
    arguments = [
        "replay",
        "scenario.yaml",
        "--workers",
        "1",
        "--model",
        str(model),
        "--device",
        "cpu",
    ]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "simrl.commands.cli",
            *arguments,
            "--dtype",
            "float32",
            "-o",
            "out",
            *more,
        ],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes(session: int) -> list[int]:
    """Those of a session that run: a command, and its engines, which are process groups of their own."""
    return [pid for pid, fields in running() if int(fields[3]) == session]


def running() -> Iterator[tuple[int, list[str]]]:
    """Processes, with what Linux says of each: its state, parent, group, session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            yield int(stat.parent.name), fields


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_or_sigterm_in_mid_replay_leaves_what_was_measured_and_no_process(
    folder, models, number
):
    """To the whole group, as a terminal sends it, and twice."""
    run = command(folder, models[0], "steps=300")
    assert run.stderr is not None
    assert any("replaying" in line for line in iter(run.stderr.readline, ""))
    time.sleep(5.0)
    assert run.poll() is None
    os.killpg(run.pid, number)
    time.sleep(0.1)
    os.killpg(run.pid, number)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1, err
    assert err.strip().splitlines()[-1] == "simrl: interrupted; the results up to then are in out"
    assert "Traceback" not in out + err and eventually(lambda: not processes(run.pid), 5.0)
    measured = read_result(folder / "out" / "measured")
    assert measured.metadata["replay"]["complete"] is False
    assert measured.metadata["replay"]["happened"] == []
    assert with_status(measured, "trained") or with_status(measured, "in_flight")
    assert rows(measured.segments)


@pytest.mark.parametrize("after_s", [0.5, pytest.param(6.0, marks=pytest.mark.slow)])
def test_sigterm_while_engines_start_leaves_nothing(folder, models, after_s):
    run = command(folder, models[0])
    # The prediction comes first, and compiles where no run has.
    assert eventually(
        lambda: run.poll() is not None or list(folder.glob(".out.*/logs/*.log")), 240.0
    )
    time.sleep(after_s)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, ""), err
    assert err.strip().splitlines()[-1] == "simrl: interrupted; nothing was written"
    assert "Traceback" not in err and eventually(lambda: not processes(run.pid), 5.0)
    assert sorted(file.name for file in folder.iterdir()) == ["scenario.yaml", "trace.parquet"]


def test_a_kv_cache_for_which_there_is_no_memory_says_what_to_lower(folder, models):
    (folder / "scenario.yaml").write_text(scenario(models[0], folder, cache=10**12))
    out, err = (run := command(folder, models[0])).communicate(timeout=180)
    assert (run.returncode, out) == (2, ""), err
    # an interpreter that ends beside it may warn of leaked semaphores after the command's own line
    [last] = [line for line in err.splitlines() if line.startswith("simrl: ")]
    assert last.startswith("simrl: worker 0: ") and "can't allocate memory" in last
    assert "lower engine.kv_cache_tokens" in last and "Traceback" not in err
    assert last.endswith("the engines' logs are in out-logs")
    assert "can't allocate memory" in (folder / "out-logs" / "worker-000.log").read_text()
    assert sorted(file.name for file in folder.iterdir()) == [
        "out-logs",
        "scenario.yaml",
        "trace.parquet",
    ]
    assert eventually(lambda: not processes(run.pid), 5.0)


def test_random_weights_of_a_config_replay_with_loads_that_are_held(folder, models, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    _, err = (run := command(folder, bare, "steps=2", "--dummy")).communicate(timeout=180)
    assert run.returncode == 0, err
    measured = read_result(folder / "out" / "measured")
    assert measured.metadata["replay"]["weights"].startswith(
        "dummy; loads were held for the predicted time"
    )
    loads = [
        s["ended_s"] - s["started_s"] for s in rows(measured.spans) if s["kind"] == "load_weights"
    ]
    assert loads and min(loads) >= measured.metadata["load_weights_s"]


@pytest.mark.parametrize("caching", [False, True])
def test_an_engine_counts_the_passes_preemptions_and_hits_that_were_simulated(
    models, tmp_path, caching
):
    write_trace(a_trace(steps=2, tokens=150, prompt_tokens=100), tmp_path / "trace.parquet")
    text = scenario(models[0], tmp_path, steps=2, cache=1024).replace(
        "one_step_off", "verl_colocated"
    )
    text = text.replace("gpus: 3", "gpus: 1").replace(
        "block_size: 32", f"block_size: 32, prefix_caching: {caching}"
    )
    (tmp_path / "scenario.yaml").write_text(text)
    [chosen] = load_scenarios(tmp_path / "scenario.yaml", [])
    prepared, config = prepare(chosen), ReplayConfig(models[0], device="cpu", dtype="float32")
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers)
    schedule.run()
    with process_fleet(1, engine_settings(prepared, config), config, tmp_path) as fleet:
        twice = [replay(prepared, fleet, config) for _ in range(2)]
    simulated = schedule.workers[0].engines[0].totals  # type: ignore[attr-defined]
    named = {"passes": "passes", "preemptions": "preemptions"}
    if caching:
        named |= {"prefix_queried_tokens": "lookup_tokens", "prefix_hit_tokens": "hit_tokens"}
    for each in twice:
        [measured] = each.result.metadata["replay"]["engines"]
        assert {name: measured[name] for name in named} == {
            name: simulated[of] for name, of in named.items()
        }
        assert measured["preemptions"] > 0 and (measured["prefix_hit_tokens"] > 0) == caching
        split = split_error(prepared, each.result, each.passes)
        assert (
            split.equal_passes
        )  # the requests that decode and the tokens of contexts, pass by pass
        assert split.engines[0].measured.passes == measured["passes"] > 500
        assert split.given.differences == ()


def test_a_replay_with_forced_acceptance_accepts_sample_by_sample_what_was_simulated(
    models, tmp_path
):
    def case(trace: Trace, speculation: str) -> Prepared:
        write_trace(trace, tmp_path / "trace.parquet")
        text = scenario(models[0], tmp_path, steps=1).replace(
            "[one_step_off]", f"[{{name: split, rollout_share: 0.34, speculation: {speculation}}}]"
        )
        (tmp_path / "scenario.yaml").write_text(text)
        [chosen] = load_scenarios(tmp_path / "scenario.yaml", [])
        return prepare(chosen)

    greedy = ReplayConfig(models[0], device="cpu", dtype="float32", temperature=0.0)
    live = replace(greedy, forced_acceptance=True)
    oracle = forced(case(a_trace(steps=1), "draft_model"))
    with process_fleet(1, engine_settings(oracle, live), live, tmp_path) as fleet:
        recorded = replay(case(a_trace(steps=1), "none"), fleet, greedy).trace
        assert recorded is not None
        prepared = forced(case(recorded, "draft_model"))
        predicted, measured = simulate_prepared(prepared), replay(prepared, fleet, live)
    columns = [
        "prompt_id",
        "sample",
        "generated_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "verifications",
    ]
    told, found = (
        sorted(tuple(row[name] for name in columns) for row in rows(result.samples))
        for result in (predicted, measured.result)
    )
    assert found == told
    assert sum(row[4] for row in found) > 500
    [counts] = measured.result.metadata["replay"]["engines"]
    assert counts["drafted_tokens"] == sum(row[3] for row in found)
    assert measured.result.metadata["replay"]["forced_acceptance"]
    with pytest.raises(
        InputError, match="the trace has no token ids; replay it once without speculation"
    ):
        check_replayable(forced(case(a_trace(steps=1), "draft_model")), live)


def test_random_weights_follow_a_recorded_run_and_its_drafts_stand_as_simulated(models, tmp_path):
    draws, epochs = np.random.default_rng(0), 2
    texts = {prompt: draws.integers(0, 300, 120).tolist() for prompt in range(3)}
    ids = {}
    for epoch in range(epochs):  # the second epoch repeats parts of the first
        for prompt in texts:
            for i in range(4):
                start, own = 10 * i, draws.integers(0, 300, 15).tolist()
                ids[epoch, prompt, i] = (
                    texts[prompt][start : start + 40] + own + texts[prompt][start + 40 :]
                )
    keys = sorted(ids)
    columns = {
        "step": [epoch for epoch, _, _ in keys],
        "epoch": [epoch for epoch, _, _ in keys],
        "prompt_id": [prompt for _, prompt, _ in keys],
        "sample": [i for _, _, i in keys],
        "prompt_tokens": [9] * len(keys),
        "response_tokens": [len(ids[key]) for key in keys],
        "response_ids": [ids[key] for key in keys],
    }
    metadata = TraceMetadata(
        name="two epochs", kind="recorded", source="a test", tokenizer="none", cap_tokens=256
    )
    write_trace(Trace.from_columns(columns, metadata), tmp_path / "trace.parquet")
    drafting = "{name: histospec, gate: open, window: {kind: aimd, most_tokens: 8}}"
    text = scenario(models[0], tmp_path, steps=2)
    text = text.replace(
        "[one_step_off]", f"[{{name: split, rollout_share: 0.34, speculation: {drafting}}}]"
    )
    (tmp_path / "scenario.yaml").write_text(text)
    prepared, _ = replayed_form(prepare(load_scenarios(tmp_path / "scenario.yaml", [])[0]))
    config = ReplayConfig(
        models[0], device="cpu", dtype="float32", dummy_weights=True, recorded_tokens=True
    )
    with process_fleet(1, engine_settings(prepared, config), config, tmp_path) as fleet:
        measured = replay(prepared, fleet, config)
    assert measured.trace is not None
    generated = {
        (r["epoch"], r["prompt_id"], r["sample"]): r["response_ids"]
        for r in rows(measured.trace.table)
    }
    assert generated == {key: ids[key] for key in generated} and len(generated) == len(keys)
    split = split_error(prepared, measured.result, measured.passes)
    assert split.equal_passes and split.given.differences == ()
    counts = [
        "epoch",
        "prompt_id",
        "sample",
        "drafted_tokens",
        "accepted_tokens",
        "verifications",
        "verified_tokens",
    ]
    simulated, replayed = (
        sorted(
            tuple(row[name] for name in counts)
            for row in rows(result.samples)
            if row["status"] == "trained"
        )
        for result in (simulate_prepared(prepared), measured.result)
    )
    assert replayed == simulated and sum(row[4] for row in replayed) > 100


def test_an_engine_of_two_processes_generates_drafts_for_both_loads_and_ends_with_both(tmp_path):
    """A prompt's old response is what is generated again, so that its history drafts only what is right."""
    settings = EngineSettings(
        str(two_heads(tmp_path / "model")),
        4,
        64,
        32,
        64,
        16,
        tp=2,
        dtype="float32",
        temperature=0.0,
        speculative=own_config(4),
    )
    link = engine_link("worker 0", settings, tmp_path / "log")

    def generate(tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        link.send(
            [
                Begin(1, 0, tuple(range(10)), (), tokens),
                LoadWeights(2, 1, settings.model, "recompute", 0.0),
            ]
        )
        reports: list = []
        while not any(isinstance(report, Ended) for report in reports):
            reports += link.connection.recv()
        assert any(isinstance(report, Loaded) for report in reports)
        gained = [
            token for report in reports if isinstance(report, Gained) for token in report.token_ids
        ]
        return tuple(gained), next(report.drafts for report in reports if isinstance(report, Ended))

    try:
        wait_until_ready([link], 300.0)
        plain, nothing = generate(46)  # all that it may have, with room for drafts
        history = DrafterSetup("history", Fixed(tokens=4))
        link.send([DraftCall("configure", (history,)), DraftCall("learn", (0, 0, [plain]))])
        link.send([DraftCall("wait_learnt", ())])
        again, (drafted, accepted, verifications, verified, ahead) = generate(46)
    finally:
        link.kill()
    assert nothing == (0, 0, 0, 0, 0) and again == plain and len(plain) == 46 and ahead == 0
    assert (
        verifications > 5
        and drafted >= accepted > 20
        and accepted < verified <= accepted + verifications
    )
    assert eventually(lambda: not of_group(link.process.pid), 5.0)


def test_seer_is_replayed_in_chunks_that_any_worker_goes_on_with(fleet, config, prepared):
    """A chunk finds its KV cache only at the worker that ran the chunk before."""
    scenario = prepared.scenario
    system = SystemConfig(name="split", dispatch="seer", rollout_share=0.67)
    chosen, changes = replayed_form(
        prepare(scenario.model_copy(update={"system": system, "steps": 1}))
    )
    # Four of twelve samples wait: workers that keep step take the chunks of one another in turn.
    dispatch = replace(chosen.system.dispatch, chunk_tokens=64, per_worker=4)
    chosen = replace(chosen, system=replace(chosen.system, dispatch=dispatch))
    predicted, measured = simulate_prepared(chosen), replay(chosen, fleet, config)
    assert len(changes) == 1 and measured.stopped is None
    for result in (predicted, measured.result):
        chunks = rows(result.segments)
        assert max(chunk["tokens"] for chunk in chunks) <= 64 and len(chunks) > 5 * 12
        places = {(chunk["uid"], chunk["worker"]) for chunk in chunks}
        assert len(places) > len({uid for uid, _ in places})  # some have moved


def test_an_engine_reports_its_queue_and_its_cache_to_a_poll(fleet, config):
    env, [worker, _] = workers(fleet, config)
    samples = [sample(uid, 20, 60) for uid in range(10)]

    def polls():
        events = [worker.submit(each) for each in samples]
        yield worker.when(samples[0], 20)
        load = yield worker.load()
        yield gather(env, events)
        return load, (yield worker.load())

    load, after = env.run(until=env.process(polls()))
    assert (load.kv_tokens, load.running, load.waiting, load.preemptions) == (4096, 8, 2, 0)
    assert 16 / 128 <= load.kv_usage <= 24 / 128  # 8 requests with 2 or 3 of 128 blocks
    assert after == (4096, 0.0, 0, 0, 0)


def test_prime_rls_limit_begins_at_what_the_caches_of_real_engines_hold(fleet, config, prepared):
    """One response starts, and with the first poll a group, as simulated; with empty reports, one alone."""
    system = SystemConfig(name="prime_rl", rollout_share=0.67)
    chosen = prepare(prepared.scenario.model_copy(update={"system": system, "steps": 1}))
    measured = replay(chosen, fleet, config)
    assert measured.stopped is None
    for result in (simulate_prepared(chosen), measured.result):
        first_ended_s = min(segment["ended_s"] for segment in rows(result.segments))
        begun = [each for each in rows(result.segments) if each["started_s"] < first_ended_s]
        assert len({segment["uid"] for segment in begun}) == 1 + 4


MODELS = "name: verl_colocated, speculation: {name: draft_model, model: qwen2.5-0.5b, window: {kind: aimd}}"


@pytest.mark.parametrize(
    ("system", "eagle"), [("tlt", True), ("specactor", False), ("windows", False)]
)
def test_a_models_drafts_are_vllms_own_and_begin_when_the_schedule_says(
    models, tmp_path, monkeypatch, system, eagle
):
    """TLT's once three responses are left, SpecActor's from the start, another model's in windows that move, and behind
    a batch gate; greedy responses are what they are without drafts."""
    write_trace(a_trace(steps=1, prompts=2), tmp_path / "trace.parquet")
    drafter = make_drafter(models[0], tmp_path / "drafter", eagle)
    entry = {
        "tlt": "{name: tlt, speculation: {name: tlt, threshold: 3, adaptive: false, model_free_if_slower: false}}",
        "windows": f"{{{MODELS}}}",
        "specactor": "{name: specactor, model: qwen2.5-0.5b, decoupled: false, best_of_n: false}",
    }
    text = scenario(models[0], tmp_path, steps=1).replace("gpus: 3", "gpus: 1")
    text = text.replace("[one_step_off]", f"[{entry[system]}]")
    (tmp_path / "scenario.yaml").write_text(text)
    [chosen] = load_scenarios(tmp_path / "scenario.yaml", [])
    prepared, changes = replayed_form(prepare(chosen))
    config = ReplayConfig(models[0], dtype="float32", temperature=0.0, draft_model=drafter)
    with process_fleet(1, engine_settings(prepared, config), config, tmp_path) as fleet:
        measured = replay(prepared, fleet, config)
        plain = replay(replace(prepared, drafts=None), fleet, config)
        if system == "windows":
            gated = replace(DrafterSetup("engine", Aimd()), gate=(3,) * RATES)
            monkeypatch.setattr(replayer, "drafter_setup", lambda *_: gated)
            late = replay(prepared, fleet, config)
            of = {row["generated_tokens"]: row for row in rows(late.result.samples)}
            assert of[min(of)]["drafted_tokens"] == 0 < of[max(of)]["accepted_tokens"]
            assert late.trace is not None and late.trace.table == plain.trace.table
    assert measured.stopped is None and measured.trace is not None and plain.trace is not None
    assert bool(changes) == (system == "tlt")
    ids, expected = (
        each.trace.table.column("response_ids").to_pylist() for each in (measured, plain)
    )
    assert ids == expected
    drafted = {
        row["generated_tokens"]: row["drafted_tokens"] for row in rows(measured.result.samples)
    }
    shortest, longest = min(drafted), max(drafted)
    assert drafted[longest] > 100
    assert drafted[shortest] == 0 if system == "tlt" else drafted[shortest] > 100
    assert sum(row["accepted_tokens"] for row in rows(measured.result.samples)) > 0


def test_tlts_head_is_trained_between_rollouts_and_drafts_better_in_the_next(models, tmp_path):
    """The simulated spot trainer says when and on what; a load of weights brings the head to all engines."""
    write_trace(a_trace(steps=2, prompts=2, tokens=120), tmp_path / "trace.parquet")
    head = make_drafter(models[0], tmp_path / "head", eagle=True)
    training = "training: {every_updates: 1, iteration_s: 0.004, most_iterations: 30}"
    drafts = f"{{name: tlt, threshold: 8, patience: 2, model_free_if_slower: false, {training}}}"
    text = scenario(models[0], tmp_path, steps=2).replace("gpus: 3", "gpus: 2")
    text = text.replace("[one_step_off]", f"[{{name: tlt, speculation: {drafts}}}]")
    (tmp_path / "scenario.yaml").write_text(text)
    [chosen] = load_scenarios(tmp_path / "scenario.yaml", [])
    prepared, _ = replayed_form(prepare(chosen))
    config = ReplayConfig(
        models[0],
        dtype="float32",
        temperature=0.0,
        draft_model=head,
        drafter_learning_rate=1e-3,
    )
    with process_fleet(2, engine_settings(prepared, config), config, tmp_path) as fleet:
        measured = replay(prepared, fleet, config)
    assert measured.stopped is None
    first = measured.result.metadata["replay"]["drafter_training"][0]
    assert first["version"] == 1 and 2 <= first["iterations"] <= 30
    assert first["agreement"][1] > first["agreement"][0] and first["loss"][1] < first["loss"][0]
    lengths = accept_lengths(measured.result)
    assert lengths[1] > lengths[0] >= 1.0
    assert "train_drafter" in {row["kind"] for row in rows(measured.result.spans)}
    lines = drafter_lines(measured.result, measured.result)
    assert "version 1:" in lines[0] and "iterations" in lines[1]


def two_heads(folder: Path) -> Path:
    """A model that can be cut in two."""
    from simrl_replay.random_model import make_model

    return Path(make_model(folder, LAYERS, HIDDEN, heads=2, kv_heads=2, vocab=300))


def of_group(group: int | None) -> list[int]:
    return [pid for pid, fields in running() if int(fields[2]) == group]
