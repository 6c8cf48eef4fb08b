"""The comparison with recorded vLLM runs (experiments/validate_engine.py): which runs it reads, refuses and covers."""

import importlib
import json
from pathlib import Path

import pytest

from simrl.errors import InputError

ROOT = Path(__file__).parents[2]
SETTINGS = {"tensor_parallel_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture
def validate_engine(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("experiments.validate_engine")


def recorded(folder: Path, **settings: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": SETTINGS | settings}))
    lines = [
        {
            "input_toks": 5,
            "output_toks": 3,
            "arrival_time": arrival,
            "queued_ts": queued,
            "first_token_ts": queued + 0.5,
            "last_token_ts": queued + 1,
        }
        for arrival, queued in ((10.0, 510.0), (10.5, 510.75))
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_times_of_both_clocks_count_from_the_first_arrival(tmp_path, validate_engine):
    run = validate_engine.read_run(recorded(tmp_path / "A100" / "toy", data_parallel_size=1))
    assert (run.gpu, run.name, run.tp) == ("A100", "toy", 1)
    assert run.arrival_s.tolist() == [0.0, 0.5]
    assert run.first_s.tolist() == [0.5, 1.25]
    assert run.last_s.tolist() == [1.0, 1.75]


@pytest.mark.parametrize("key", ["data_parallel_size", "pipeline_parallel_size"])
def test_a_run_of_several_engines_or_stages_is_refused(tmp_path, validate_engine, key: str):
    folder = recorded(tmp_path / "A100" / "toy", **{key: 2})
    with pytest.raises(
        InputError, match=rf"meta\.json: {key} is 2; one engine is compared: give a run of one"
    ):
        validate_engine.read_run(folder)


def test_all_three_recorded_runs_have_kernel_times_for_their_limits(shared_data, validate_engine):
    runs = [validate_engine.read_run(folder) for folder in validate_engine.run_folders(shared_data)]
    assert {(run.gpu, run.name) for run in runs} >= {
        ("RTX4090", "Llama-3.1-8B"),
        ("RTXPRO6000", "Llama-3.1-8B"),
        ("RTXPRO6000", "Qwen3-32B"),
    }
    for run in runs:
        profile = validate_engine.run_profile(shared_data, run)
        longest = int((run.prompt_tokens + run.response_tokens).max())
        profile.require_covers(run.max_num_batched_tokens, run.max_num_seqs, longest)
        assert profile.tables.straggler_sequences.size


def test_batch_sizes_measured_without_prefill_alone_are_composed(shared_data, validate_engine):
    """256 sequences were measured alone, 128 at most beside a chunk."""
    (run,) = [
        validate_engine.read_run(f)
        for f in validate_engine.run_folders(shared_data)
        if "RTX4090" in str(f)
    ]
    profile = validate_engine.run_profile(shared_data, run)
    assert profile.tables.decode_sequences[-1] == run.max_num_seqs == 256
    attention_s = profile.tables.attention_s
    kv = int((profile.tables.decode_kv_tokens == 1024).argmax())
    more_s = attention_s[0, 0, -1, kv] - attention_s[0, 0, -2, kv]
    assert attention_s[-1, 0, -1, kv] - attention_s[-1, 0, -2, kv] == pytest.approx(more_s)
