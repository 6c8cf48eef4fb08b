"""Measuring: known engines come back, a killed measurement goes on, refinement looks where lines are wrong, a real engine."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.metadata import DraftRounds
from simrl.profile.model_config import CONFIG_KEYS
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables, read_profile, write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.scenario.model import Scenario
from simrl.scenario.presets import read_presets
from simrl.simulate.prepare import prepare
from simrl.speculation.deployment import Deployment, typical_context_tokens
from simrl.speculation.draft_times import text_drafts
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import draft_model
from simrl.speculation.plan import DraftPlan, plan_drafting
from simrl_replay.bench import Facts, Loads, Prompts, Scene, Seen, Shape, Stairs, Timed
from simrl_replay.cli_measure import _print
from simrl_replay.measure import (
    Journal,
    MeasuredEngine,
    MeasurePlan,
    base_scenes,
    check,
    expected_error,
    measure,
)
from simrl_replay.measured_profile import Wanted, measure_with
from simrl_replay.profile_fit import Reach, predicted_s
from simrl_replay.sized import with_measured_loads
from tests.command_line import CommandLine
from tests.token_traces import random_groups

REACH = Reach(max_num_seqs=64, max_num_batched_tokens=256, max_model_len=1024)
PLAN = MeasurePlan(REACH, kv_cache_tokens=65536, weights="folder", repeats=3, budget_s=1e9)
REQUEST_S, BEGIN_S, END_S, LOAD_S = 40e-6, 200e-6, 20e-6, 0.015
DRAFT_ROUND_S, DRAFT_STEP_S = 30e-6, 4e-6  # of each sequence


def known_tables(kink: float = 40.0, mode_s: float = 3e-4) -> Tables:
    """Dense is flat up to a batch and rises beyond; attention rises with sequences and lengths."""
    tokens = np.unique([1.0, kink, 256.0])
    prefill, contexts = np.array([0.0, 1.0, 256.0]), np.array([0.0, 1024.0])
    decodes, lengths = np.array([0.0, 64.0]), np.array([0.0, 1024.0])
    own = np.outer([0.0, 0.0, 256.0], contexts) * 1e-8 + np.array([0.0, mode_s, mode_s])[:, None]
    return Tables(
        dense_tokens=tokens,
        dense_s=2e-3 + 15e-6 * np.maximum(tokens - kink, 0.0),
        sampled_sequences=np.array([0.0, 256.0]),
        sampled_s=np.array([0.0, 256.0]) * 25e-6,
        prefill_tokens=prefill,
        prefill_kv_tokens=contexts,
        decode_sequences=decodes,
        decode_kv_tokens=lengths,
        attention_s=own[:, :, None, None] + (np.outer(decodes, lengths) * 5e-8)[None, None],
        between_passes_s=20e-6,
    )


class KnownEngine:
    """An engine whose passes take what tables say, and `request_s` for each new prompt. `disturb` multiplies the passes of the
    i-th scene."""

    def __init__(
        self,
        tables: Tables,
        disturb: Callable[[int], float] = lambda i: 1.0,
        request_s: float = REQUEST_S,
    ) -> None:
        self.request_s = request_s
        self.tables = tables
        self.scenes: list[Scene] = []
        self.disturb = disturb

    def __call__(self, scene: Scene) -> Seen:
        self.scenes.append(scene)
        match scene:
            case Facts():
                return Seen(
                    facts=(
                        ("vllm", "0.32.0"),
                        ("torch", "2.13"),
                        ("device", "a core"),
                        ("kv_cache_tokens", "65536"),
                    )
                )
            case Loads(_, times):
                return Seen(load_s=(LOAD_S,) * times)
            case Stairs(sequences, tokens, drafts, turns):
                shapes = [
                    Shape(n, drafts, tokens + turns * (0.5 + i)) for i, n in enumerate(sequences)
                ]
                between = (self.tables.between_passes_s,) if sequences == (1,) else ()
                return Seen(
                    tuple(self._timed(s) for s in shapes), end_s=(END_S,), between_s=between
                )
            case Prompts(prompts, tokens, sequences, kv_tokens, _):
                left, passes, context, room = (
                    prompts * tokens,
                    [],
                    0,
                    REACH.max_num_batched_tokens - sequences,
                )
                while left:
                    chunk = min(left, room)
                    passes.append(
                        self._timed(Shape(sequences, 0, float(kv_tokens), prompts, chunk, context))
                    )
                    left, context = left - chunk, context + chunk
                return Seen(tuple(passes), begin_s=(BEGIN_S,))

    def _timed(self, shape: Shape) -> Timed:
        seconds = predicted_s(self.tables, shape)
        seconds += self.request_s * shape.prompts * (shape.context_tokens == 0)
        if shape.draft_tokens:
            seconds += shape.sequences * (DRAFT_ROUND_S + shape.draft_tokens * DRAFT_STEP_S)
        return Timed(shape, seconds * self.disturb(len(self.scenes)))


def measured(
    engine: Callable[[Scene], Seen], folder: Path, plan: MeasurePlan = PLAN
) -> MeasuredEngine:
    return measure(Journal(folder / "points.jsonl", {"model": "a"}, engine), plan)


def passes() -> list[Shape]:
    decodes = [Shape(n, 0, kv) for n in (1, 5, 23, 40, 64) for kv in (30, 400, 900)]
    mixes = [
        Shape(n, 0, 200.0, 1, c, x) for n in (0, 10, 50) for c in (20, 150) for x in (0, 256, 700)
    ]
    return decodes + mixes + [Shape(10, 0, 200.0, 4, 120, 0)]


@pytest.mark.parametrize(
    "tables", [known_tables(), known_tables(kink=1.0), known_tables(mode_s=0.0)]
)
def test_the_passes_of_a_known_engine_come_back(tmp_path: Path, tables: Tables) -> None:
    found = measured(KnownEngine(tables), tmp_path)
    for shape in passes():
        assert predicted_s(found.tables, shape) == pytest.approx(
            predicted_s(tables, shape), rel=0.03
        ), shape
    assert found.request_s == pytest.approx(REQUEST_S + BEGIN_S + END_S, rel=0.05)
    assert found.load_s == LOAD_S
    assert found.held_out_error < 0.03 and found.spread == pytest.approx(0.0, abs=1e-9)


def test_passes_that_check_the_tables_have_the_work_of_new_prompts_too(tmp_path: Path) -> None:
    found = measured(KnownEngine(known_tables(), request_s=2e-3), tmp_path)  # as long as a pass
    mixes = [held for held in found.held_out if held.shape.prompts > 1]
    assert mixes and max(abs(held.error) for held in mixes) < 0.05


def test_no_line_is_drawn_across_the_limit_of_cuda_graphs(tmp_path: Path) -> None:
    graphs = 128

    class WithGraphs(KnownEngine):
        """Launches take 12 ms where a pass has no graph, whatever is in it."""

        def _timed(self, shape: Shape) -> Timed:
            timed = super()._timed(shape)
            no_graph = shape.sequences * (shape.draft_tokens + 1) + shape.chunk_tokens > graphs
            return timed._replace(seconds=timed.seconds + 12e-3 * no_graph)

    plan, tables = PLAN._replace(graph_tokens=graphs, budget_s=0.0), known_tables()
    fitted = measured(WithGraphs(tables), tmp_path, plan).tables
    for tokens, launches_s in ((100, 0.0), (128, 0.0), (129, 12e-3), (200, 12e-3)):
        shape = Shape(prompts=1, chunk_tokens=tokens)
        assert predicted_s(fitted, shape) == pytest.approx(
            predicted_s(tables, shape) + launches_s, rel=0.1
        ), tokens
    # What launches take is not taken for sampling: a batch that verifies drafts samples many tokens.
    sampled_s = np.interp([16, 64], fitted.sampled_sequences, fitted.sampled_s)
    assert sampled_s == pytest.approx(np.array([16, 64]) * 25e-6, rel=0.2)


def test_every_batch_size_is_measured_near_its_longest_context() -> None:
    plan = MeasurePlan(Reach(128, 2048, 4096), kv_cache_tokens=53248)
    longest = {
        batch: max(
            scene.kv_tokens
            for scene in base_scenes(plan)
            if isinstance(scene, Stairs) and batch in scene.sequences
        )
        for batch in (1, 4, 16, 64, 128)
    }
    assert all(tokens > 0.7 * min(4096, 53248 // batch) for batch, tokens in longest.items()), (
        longest
    )


def test_one_slow_repeat_of_everything_changes_nothing(tmp_path: Path) -> None:
    quiet = KnownEngine(known_tables())
    coarse = replace_plan(budget_s=0.0)
    expected = measured(quiet, tmp_path / "quiet", coarse)
    scenes = len(base_scenes(coarse))
    busy = KnownEngine(known_tables(), lambda i: 3.0 if i <= scenes else 1.0)
    found = measured(busy, tmp_path / "busy", coarse)
    for shape in passes():
        assert predicted_s(found.tables, shape) == pytest.approx(
            predicted_s(expected.tables, shape), rel=1e-6
        )
    assert found.spread > 0.5  # and it is told


def test_repeats_that_are_far_apart_are_told_as_the_limit_of_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(disturb: Callable[[int], float], name: str) -> str:
        (tmp_path / name).mkdir()
        engine = KnownEngine(known_tables(), disturb)
        found = measured(
            engine, tmp_path / name, PLAN._replace(budget_s=1e-9)
        )  # the coarse grid alone
        _print(found, tmp_path / "p.parquet")
        assert found.largest_spread >= found.spread
        return " ".join(capsys.readouterr().out.split())

    quiet, noisy = (
        told(lambda i: 1 + i % 2 * 0.02, "quiet"),
        told(lambda i: 1 + i * 7919 % 13 / 13, "noisy"),
    )
    assert "Repeats of a point differ by" in quiet and "not quiet" not in quiet
    assert (
        "the machine was not quiet. No prediction of a single pass can be expected to be closer"
        in noisy
    )
    assert "ms" in noisy.partition("Passes that")[2].partition("Median error")[0]


def test_what_drafts_take_beyond_plain_positions_comes_back(tmp_path: Path) -> None:
    drafts = measured(
        KnownEngine(known_tables(kink=1.0)), tmp_path, replace_plan(draft_tokens=6)
    ).drafts
    assert drafts is not None and drafts.sequences == (0.0, 1.0, 4.0, 16.0, 64.0)
    for n, round_s, step_s in list(
        zip(drafts.sequences, drafts.round_s, drafts.step_s, strict=True)
    )[2:]:
        assert round_s + 4 * step_s == pytest.approx(
            n * (DRAFT_ROUND_S + 4 * DRAFT_STEP_S), rel=0.15
        )


def test_an_engines_work_for_a_sequence_is_not_taken_for_that_of_a_verified_position(
    tmp_path: Path,
) -> None:
    class WithHost(KnownEngine):
        def _timed(self, shape: Shape) -> Timed:
            timed = super()._timed(shape)
            return timed._replace(seconds=timed.seconds + 60e-6 * (shape.sequences + shape.prompts))

    engine = WithHost(known_tables())
    profile = measured(engine, tmp_path, replace_plan(draft_tokens=6))
    assert profile.drafts is not None
    for shape in (*passes(), *(Shape(n, k, 18.5) for n in (4, 16) for k in (1, 3, 6))):
        drafts_s = [
            np.interp(shape.sequences, profile.drafts.sequences, each)
            for each in (profile.drafts.round_s, profile.drafts.step_s)
        ]
        seconds = predicted_s(profile.tables, shape, profile.request_s - BEGIN_S - END_S)
        if shape.draft_tokens:
            seconds += drafts_s[0] + shape.draft_tokens * drafts_s[1]
        assert seconds == pytest.approx(engine._timed(shape).seconds, rel=0.05), shape


def test_a_drafter_of_text_takes_its_look_ups_besides_what_was_measured() -> None:
    rounds = DraftRounds(
        sequences=(0.0, 8.0), round_s=(0.0, 2e-3), step_s=(0.0, 1e-4), source="an engine"
    )
    metadata = ProfileMetadata(model="m", gpu="cpu", tp=1, kind="measured", source="here")
    plain = text_drafts(TableProfile(known_tables(), metadata))
    found = text_drafts(
        TableProfile(known_tables(), metadata.model_copy(update={"drafts": rounds}))
    )
    assert found.draft_s(4, 3) == pytest.approx(1e-3 + 3 * 5e-5 + plain.draft_s(4, 3))
    assert "an engine" in found.source and plain.source in found.source


def test_tables_reach_the_limits_they_were_measured_for_and_survive_a_file(tmp_path: Path) -> None:
    found = measured(KnownEngine(known_tables()), tmp_path)
    metadata = ProfileMetadata(
        model="m",
        gpu="cpu",
        tp=1,
        kind="measured",
        source="here",
        request_s=found.request_s,
        load_weights_s=found.load_s,
    )
    profile = TableProfile(found.tables, metadata)
    profile.require_covers(256, 64, 1024, 256)
    write_profile(profile, tmp_path / "p.parquet")
    assert read_profile(tmp_path / "p.parquet").metadata == metadata


class KilledError(Exception):
    pass


def killed_after(engine: KnownEngine, scenes: int) -> Callable[[Scene], Seen]:
    def carry_out(scene: Scene) -> Seen:
        if len(engine.scenes) == scenes:
            raise KilledError
        return engine(scene)

    return carry_out


@pytest.mark.parametrize("scenes", [1, 20, 55])
def test_a_killed_measurement_goes_on_where_it_was(tmp_path: Path, scenes: int) -> None:
    whole = KnownEngine(known_tables())
    expected = measured(whole, tmp_path / "whole")
    first, second = KnownEngine(known_tables()), KnownEngine(known_tables())
    with pytest.raises(KilledError):
        measured(killed_after(first, scenes), tmp_path)
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"scene": "Stairs [[1], 4')  # it was killed in the middle of a line
    found = measured(second, tmp_path)
    assert first.scenes + second.scenes == whole.scenes
    np.testing.assert_equal(found.tables, expected.tables)


def test_points_of_other_settings_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.points.jsonl"
    Journal(path, {"model": "a", "tp": 1}, KnownEngine(known_tables()))(Facts())
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"tp 1, this one has 2.*delete the file"):
        Journal(path, {"model": "a", "tp": 2}, KnownEngine(known_tables()))
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "p.points.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(InputError, match="not the points of a measurement"):
        Journal(path, {}, KnownEngine(known_tables()))
    assert path.read_text() == "my notes\n"


def test_a_whole_measurement_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    path, engine = tmp_path / "p.points.jsonl", KnownEngine(known_tables())
    journal = Journal(path, {"model": "a"}, engine)
    journal(Facts())
    journal.finish()
    Journal(path, {"model": "b"}, engine)(Facts())
    assert len(engine.scenes) == 2


def on_a_gpu(folder: Path) -> Wanted:
    return Wanted(
        model=small_model(folder), max_model_len=1024, repeats=2, budget_s=1.0, block_size=16
    )


def test_limits_are_checked_before_an_engine_starts(tmp_path: Path) -> None:
    engine, files = (
        KnownEngine(known_tables()),
        (tmp_path / "p.parquet", tmp_path / "p.points.jsonl"),
    )
    with pytest.raises(InputError, match="the KV cache holds 0 tokens"):
        measure_with(engine, "0.32.0", replace(on_a_gpu(tmp_path), kv_cache_tokens=8), *files)
    assert not engine.scenes and not files[1].exists()


def test_a_gpu_of_an_unknown_name_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    engine, wanted = KnownEngine(known_tables()), on_a_gpu(tmp_path)
    files = (tmp_path / "p.parquet", tmp_path / "p.points.jsonl")
    with pytest.raises(InputError, match="a core is unknown to simrl; name the most similar"):
        measure_with(engine, "0.32.0", wanted, *files)
    assert engine.scenes == [Facts()]
    measure_with(engine, "0.32.0", replace(wanted, gpu="h200"), *files)  # and with --gpu it goes on
    assert engine.scenes.count(Facts()) == 1
    metadata = read_profile(files[0]).metadata
    assert metadata.gpu == "h200" and metadata.settings["block_size"] == 16
    assert metadata.settings["kv_cache_tokens"] == 65536


PAUSE_S, SEQUENCE_S = 2e-3, 3e-5


class EngineOfKernels(KnownEngine):
    """An engine of these kernels, whose host takes `PAUSE_S` a pass and `SEQUENCE_S` for each decoding sequence."""

    def __init__(self, kernels: Tables) -> None:
        super().__init__(kernels._replace(between_passes_s=20e-6))  # the loop around its step

    def _timed(self, shape: Shape) -> Timed:
        timed = super()._timed(shape)
        return timed._replace(
            seconds=timed.seconds - 20e-6 + PAUSE_S + SEQUENCE_S * shape.sequences
        )


def an_8b(folder: Path) -> Wanted:
    """A measurement of an engine of a shipped profile's model."""
    shape = MODELS["qwen3-8b"]
    config = {theirs: getattr(shape, ours) for ours, theirs in CONFIG_KEYS.items()}
    (folder / "qwen3-8b").mkdir()
    (folder / "qwen3-8b" / "config.json").write_text(json.dumps(config))
    return replace(on_a_gpu(folder), model=folder / "qwen3-8b", gpu="h100", dummy=True)


def test_a_preset_of_the_measured_engine_is_its_hosts_time_beyond_the_shipped_kernels(
    tmp_path: Path,
) -> None:
    kernels = read_profile("profiles/qwen3-8b_h100_tp1.parquet")
    files = (tmp_path / "p.parquet", tmp_path / "p.points.jsonl")
    measure_with(
        EngineOfKernels(kernels.tables),
        "0.32.0",
        an_8b(tmp_path),
        *files,
        preset=tmp_path / "mine.toml",
    )
    (made,) = read_presets(tmp_path / "mine.toml").values()
    assert made.is_engine and made.name == "vllm-0.32.0-measured"
    assert made.constants["between_passes_s"].value == pytest.approx(PAUSE_S, rel=0.02)
    assert made.constants["sequence_overhead_s"].value == pytest.approx(SEQUENCE_S, rel=0.05)
    assert made.constants["async_scheduling"].value is False
    assert "reserve_bytes" in made.constants
    source = made.constants["between_passes_s"].source
    assert "vLLM 0.32.0" in source and "a core" in source and "aiconfigurator" in source
    assert read_profile(files[0]).tables.between_passes_s == pytest.approx(
        20e-6
    )  # whose passes have the rest


def test_a_preset_needs_the_kernels_of_a_shipped_profile_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    engine, wanted = KnownEngine(known_tables()), replace(on_a_gpu(tmp_path), gpu="h100")
    files = (tmp_path / "p.parquet", tmp_path / "p.points.jsonl")
    with pytest.raises(InputError, match=r"--preset: no profile of .* on h100 tp1 is shipped"):
        measure_with(engine, "0.32.0", wanted, *files, preset=tmp_path / "mine.toml")
    assert engine.scenes == [Facts()]


def test_a_measurement_whose_profile_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    engine, wanted, output = (
        KnownEngine(known_tables()),
        replace(on_a_gpu(tmp_path), gpu="h100"),
        tmp_path / "p.parquet",
    )
    output.mkdir()  # in the way
    with pytest.raises(InputError, match=r"p\.parquet: is no file"):
        measure_with(engine, "0.32.0", wanted, output, tmp_path / "p.points.jsonl")
    output.rmdir()
    scenes = len(engine.scenes)
    measure_with(engine, "0.32.0", wanted, output, tmp_path / "p.points.jsonl")
    assert len(engine.scenes) == scenes and read_profile(output).metadata.kind == "measured"
    measure_with(engine, "0.32.0", wanted, output, tmp_path / "p.points.jsonl")
    assert len(engine.scenes) > scenes  # that one was whole: this is the next one


def test_refinement_looks_where_the_curve_bends(tmp_path: Path) -> None:
    engine = KnownEngine(known_tables(kink=40.0))
    found = measured(engine, tmp_path)
    coarse = base_scenes(PLAN)
    added = {
        s.sequences[0]
        for s in engine.scenes
        if isinstance(s, Stairs) and s.turns == 24 and s not in coarse
    }
    assert added and all(16 < n < 64 for n in added)
    assert any(abs(n - 40) <= 4 for n in added)
    flat = measured(KnownEngine(known_tables(kink=1.0)), tmp_path / "flat")
    assert len(flat.points) < len(found.points)


def test_a_bend_within_the_noise_is_none() -> None:
    bent = [(1.0, 1.0, 0.0), (16.0, 1.2, 0.0), (64.0, 1.2, 0.0)]
    assert expected_error(bent)[0] > 0.05 and expected_error(bent)[1] in (28, 40)
    assert expected_error([(tick, seconds, 0.5) for tick, seconds, _ in bent])[0] == 0.0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PLAN._replace(kv_cache_tokens=1000), "the KV cache holds 1000 tokens"),
        (PLAN._replace(reach=REACH._replace(max_model_len=64)), "max_model_len 64"),
        (PLAN._replace(reach=REACH._replace(max_num_batched_tokens=100)), "twice max_num_seqs"),
    ],
)
def test_limits_within_which_nothing_can_be_measured_are_refused(
    plan: MeasurePlan, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check(plan)


def test_loads_from_a_folder_are_those_of_a_replay_and_of_no_other_scenario(tmp_path: Path) -> None:
    scenario = Scenario.model_validate({
        "name": "s", "steps": 2, "model": str(small_model(tmp_path)), "cluster": {"gpu": "cpu", "gpus": 2, "tp": 1},
        "workload": {"synthetic": {"steps": 2, "prompts_per_step": 2, "group": 2, "cap_tokens": 100, "mean_tokens": 20,
                                   "sigma": 0.5, "prompt_tokens": 10}},
        "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_cache_tokens": 4096},
        "training": {"tokens_per_microbatch": 256, "load_overhead_s": 3.0}, "profile": {"path": str(tmp_path / "p.parquet")},
        "system": {"name": "one_step_off"},
    })  # fmt: skip
    metadata = ProfileMetadata(
        model="small", gpu="cpu", tp=1, kind="measured", source="here", request_s=3e-4
    )
    write_profile(TableProfile(known_tables(), metadata), tmp_path / "p.parquet")
    assert (
        with_measured_loads(scenario, tmp_path / "p.parquet") == scenario
    )  # dummy weights: nothing was measured
    measured = metadata.model_copy(update={"load_weights_s": 0.5})
    write_profile(TableProfile(known_tables(), measured), tmp_path / "p.parquet")
    modelled = prepare(scenario)
    assert modelled.costs.load_s > 3.0 and modelled.inputs()["load_weights_kind"] == "assumed"
    assert modelled.costs.request_s == 3e-4
    replayed = with_measured_loads(scenario, tmp_path / "p.parquet")
    assert (
        prepare(replayed).costs.load_s == 0.5
        and prepare(replayed).inputs()["load_weights_kind"] == "given"
    )
    assert replayed == with_measured_loads(scenario, measured)
    own = Scenario.model_validate(
        {**scenario.model_dump(), "training": {**scenario.training.model_dump(), "load_s": 2.0}}
    )
    assert (
        prepare(with_measured_loads(own, measured)).costs.load_s == 2.0
    )  # what the user says stands


def small_model(folder: Path) -> Path:
    """The config of a model that trains in a second on one core."""
    config = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 384, "vocab_size": 1024, "_name_or_path": "small"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def replace_plan(**changes: object) -> MeasurePlan:
    return PLAN._replace(**changes)  # type: ignore[arg-type]


def test_a_repeat_that_differs_is_measured_again_before_anything_finer(tmp_path: Path) -> None:
    scenes = len(base_scenes(PLAN))
    engine = KnownEngine(known_tables(kink=1.0), lambda i: 1.5 if i == 1 else 1.0)
    measured(engine, tmp_path)
    assert engine.scenes[3 * scenes] == engine.scenes[0]


def nobody_left(group: int) -> bool:
    """Whether a process group is empty, or soon is: multiprocessing's own helper ends when its owner has."""
    until_s = time.monotonic() + 10.0
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_engine_is_measured_and_a_measurement_that_is_interrupted_goes_on(
    simrl: CommandLine,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from simrl_replay.random_model import make_model

    make_model(simrl.folder / "model", vocab=256)
    command = ["measure", "--model", "model", "--device", "cpu", "-o", "p.parquet", "--json", "--max-num-seqs", "8",
               "--max-num-batched-tokens", "64", "--max-model-len", "256", "--repeats", "2", "--budget", "1",
               "--draft-tokens", "2"]  # fmt: skip
    journal = simrl.folder / "p.points.jsonl"
    process = simrl.start(*command)
    while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 6):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "the same command goes on from there" in err and "Traceback" not in err
    assert nobody_left(process.pid)
    assert not (simrl.folder / "p.parquet").exists()

    before = journal.read_text()
    code, out, err = simrl(*command)
    assert code == 0, err
    assert journal.read_text().startswith(before[: before.rindex("\n")])
    profile = read_profile(simrl.folder / "p.parquet")
    m = profile.metadata
    assert (m.model, m.gpu, m.kind, m.repeats) == ("model", "cpu", "measured", 2)
    assert m.versions["vllm"] and m.host and m.created and m.model_shape["layers"] == 2
    assert m.load_weights_s and m.request_s and m.drafts and m.spread is not None
    assert 1e-4 < profile.decode_s(1, 20) < profile.decode_s(8, 200) < 1.0
    profile.require_covers(64, 8, 256, 64)
    assert len(json.loads(out)["held_out"]) > 4


def test_a_measured_draft_model_takes_the_place_of_a_derived_one(tmp_path: Path) -> None:
    path, shape = tmp_path / "drafter.parquet", MODELS["qwen2.5-0.5b"]
    target, trace = MODELS["qwen3-8b"], random_groups(2, epochs=1)

    def planned(gpu: str) -> DraftPlan:
        inputs = SpeculationInputs(draft_profile=str(path), draft_round_s=0)
        profile = roofline_profile(target, GPUS[gpu])
        return plan_drafting(
            draft_model(), inputs, Deployment(target, GPUS[gpu], 1, profile, trace, 8192), 8
        )

    drafter = TableProfile(
        known_tables(),
        ProfileMetadata(model=shape.name, gpu="h100", tp=1, kind="measured", source="here"),
    )
    write_profile(drafter, path)
    plan = planned("h100")
    assert plan.facts["draft_times"]["kind"] == "measured"
    without_pause = drafter.with_corrections(between_passes_s=0.0)
    level_s = without_pause.decode_s(4, typical_context_tokens(trace))
    assert plan.times.draft_s(4, 3) == pytest.approx(3 * level_s)
    with pytest.raises(
        InputError, match=r"qwen2.5-0.5b on h100 tp1, the drafter is qwen2.5-0.5b on h200"
    ):
        planned("h200")


def test_what_a_round_of_drafts_takes_besides_its_passes_is_an_input() -> None:
    target, trace = MODELS["qwen3-8b"], random_groups(2, epochs=1)
    deployment = Deployment(
        target, GPUS["h100"], 1, roofline_profile(target, GPUS["h100"]), trace, 8192
    )

    def draft_s(inputs: SpeculationInputs) -> float:
        return plan_drafting(draft_model(), inputs, deployment, 8).times.draft_s(4, 3)

    assert draft_s(SpeculationInputs(draft_round_s=5e-3)) == pytest.approx(
        draft_s(SpeculationInputs(draft_round_s=0)) + 5e-3
    )
