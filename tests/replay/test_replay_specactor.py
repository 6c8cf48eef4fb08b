"""SpecActor on real vLLM engines: drafters in processes of their own that work ahead, and copies of a tail's requests with
other drafters on freed workers."""

from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.trace.trace import Trace, TraceMetadata, write_trace
from simrl_replay.random_model import make_drafter, make_model, nudge
from simrl_replay.replayer import (
    Measured,
    ReplayConfig,
    check_replayable,
    engine_settings,
    process_fleet,
    replay,
)
from simrl_replay.speculative import models_ahead, replayed_form
from tests.helpers import rows

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

LENGTHS = (260, 30, 20, 30)  # two requests a worker; the second worker is freed early


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a drafter that knows it well, one that hardly does, and a rollout with a straggler."""
    folder = tmp_path_factory.mktemp("specactor")
    make_model(folder / "model", 2, 64, heads=2, kv_heads=1, vocab=300)
    nudge(folder / "model", folder / "near", scale=0.03)
    make_drafter(folder / "model", folder / "far")
    rows = [(0, 0, i // 2, i % 2, 12, tokens) for i, tokens in enumerate(LENGTHS)]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    metadata = TraceMetadata(
        name="tail", kind="synthetic", source="a test", tokenizer="none", cap_tokens=512
    )
    write_trace(Trace.from_columns(columns, metadata), folder / "trace.parquet")
    return folder


def prepared(folder: Path, system: str, gpus: int) -> tuple[Prepared, list[str]]:
    (folder / "scenario.yaml").write_text(f"""\
name: tail
steps: 1
model: {folder}/model/config.json
cluster: {{gpu: cpu, gpus: {gpus}, tp: 1}}
workload: {{synthetic: null, trace: {folder}/trace.parquet}}
profile: {{path: null, roofline: {{}}}}
engine: {{max_num_seqs: 8, max_num_batched_tokens: 64, block_size: 32, kv_cache_tokens: 4096}}
training: {{reward_s: 0.05, publish_s: 0.1, load_overhead_s: 0.03, switch_s: 0.1}}
systems: [{system}]
""")
    [chosen] = load_scenarios(folder / "scenario.yaml", [])
    return replayed_form(prepare(chosen))


def config(folder: Path) -> ReplayConfig:
    return ReplayConfig(folder / "model", dtype="float32", temperature=0.0, start_deadline_s=200.0)


def tokens_of(measured: Measured) -> dict[tuple[int, int], list[int]]:
    assert measured.stopped is None and measured.trace is not None
    names = ("prompt_id", "sample", "response_ids")
    columns = (measured.trace.table.column(name).to_pylist() for name in names)
    return {(prompt, sample): ids for prompt, sample, ids in zip(*columns, strict=True)}


def kinds(result: Result, kind: str) -> list[dict]:
    return [span for span in rows(result.spans) if span["kind"] == kind]


@pytest.mark.parametrize("other", ["ngram", pytest.param("near", marks=pytest.mark.slow)])
def test_copies_with_other_drafters_end_a_straggler_and_its_tokens_stay_the_same(
    folder: Path, other: str
) -> None:
    """Drafters that work ahead; the freed worker gets n-grams, or another model, and the copy that ends first counts."""
    far = folder / "far/config.json"
    another = other if other == "ngram" else folder / other / "config.json"
    system = (
        f"{{name: specactor, draft_gpus: 1, window: 3, model: {far}, drafters: [{far}, {another}]}}"
    )
    chosen, changes = prepared(folder, system, gpus=4)
    plain, _ = prepared(folder, "{name: verl_colocated, dispatch: even_split}", gpus=2)
    assert ["KV cache" in change for change in changes] == [True] and chosen.workers == 2
    with process_fleet(2, engine_settings(chosen, config(folder)), config(folder), folder) as fleet:
        measured = replay(chosen, fleet, config(folder))
        without = replay(plain, fleet, config(folder))
    assert tokens_of(measured) == tokens_of(without)
    predicted, result = simulate_prepared(chosen), measured.result
    for each in (predicted, result):
        samples = rows(each.samples)
        assert [row["generated_tokens"] for row in samples] == list(LENGTHS)
        assert samples[0]["duplicate_tokens"] > 0  # the straggler's copies
        assert len(kinds(each, "load_drafter")) == (other != "ngram")  # of the freed worker
    straggler = rows(result.samples)[0]
    assert straggler["drafted_tokens"] > straggler["accepted_tokens"] > 0
    assert straggler["verifications"] < straggler["verified_tokens"] < LENGTHS[0]
    generated = sum(
        row["generated_tokens"] + row["duplicate_tokens"] for row in rows(result.samples)
    )
    assert generated == sum(span["tokens"] or 0 for span in kinds(result, "rollout"))


def test_a_freed_worker_changes_from_vllms_draft_model_to_n_grams_and_back(folder: Path) -> None:
    far = folder / "far/config.json"
    system = f"{{name: specactor, decoupled: false, window: 3, model: {far}, drafters: [{far}, ngram], b_max: 2}}"
    chosen, _ = prepared(folder, system, gpus=2)
    plain, _ = prepared(folder, "{name: verl_colocated, dispatch: even_split}", gpus=2)
    with process_fleet(2, engine_settings(chosen, config(folder)), config(folder), folder) as fleet:
        measured = replay(chosen, fleet, config(folder))
        again = replay(chosen, fleet, config(folder))
        without = replay(plain, fleet, config(folder))
    assert tokens_of(measured) == tokens_of(again) == tokens_of(without)
    for each in (simulate_prepared(chosen), measured.result, again.result):
        assert rows(each.samples)[0]["duplicate_tokens"] > 0
        assert kinds(each, "load_drafter") == []


def test_what_engines_cannot_hold_is_refused_with_a_remedy(folder: Path) -> None:
    near, far = folder / "near/config.json", folder / "far/config.json"
    named = f"name: specactor, model: {far}, drafters: [{far}, {near}]"
    for system, gpus, remedy in (
        (f"{{{named}, decoupled: false}}", 2, "holds one draft model: name one of them"),
        (f"{{{named}, draft_gpus: 1, copies: coupled}}", 4, "or let copies be decoupled"),
        (
            f"{{{named}, draft_gpus: 1, decoupled: false, disaggregated: true}}",
            4,
            "leave out disaggregated",
        ),
    ):
        with pytest.raises(InputError, match=remedy):
            engine_settings(prepared(folder, system, gpus)[0], config(folder))
    chosen, _ = prepared(folder, f"{{{named}, draft_gpus: 1}}", 4)
    assert models_ahead(chosen) == {
        str(near),
        str(far),
    }  # they share the memory of the drafter's GPU
    shared = ReplayConfig(folder / "model", engines_per_gpu=2)
    with pytest.raises(InputError, match="let each engine have its own"):
        check_replayable(chosen, shared)
