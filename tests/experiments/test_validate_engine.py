"""The comparison with recorded vLLM runs (experiments/validate_engine.py): which runs it reads, refuses and covers."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.profile import read_profile
from tests.experiments.recorded_ranks import NAME, experts_s, write_kernels, write_recording

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


def test_a_run_of_several_engines_or_stages_is_refused(tmp_path, validate_engine):
    folder = recorded(tmp_path / "A100" / "qwen3-8b", pipeline_parallel_size=2)
    with pytest.raises(
        InputError, match=r"meta\.json: pipeline_parallel_size is 2; engines without"
    ):
        validate_engine.read_run(folder)
    folder = recorded(tmp_path / "H100" / "qwen3-8b", data_parallel_size=2)
    with pytest.raises(InputError, match="data_parallel_size is 2, and qwen3-8b has no experts"):
        validate_engine.read_run(folder)


def test_a_run_of_two_ranks_is_compared_from_the_files_of_bench_and_profiler(
    tmp_path, validate_engine, capsys
):
    """Import, engine and comparison, against slow ranks whose passes are priced by formulas."""
    validate_engine.main(write_recording(tmp_path, requests=60), as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["run"] == f"{NAME} TP1 DP2 EP2, RTXPRO6000"
    assert row["within_bars"] and row["preemptions"] == 0
    for quantity in ("tpot", "latency", "ttft"):
        assert abs(row[f"{quantity}_mean_err"]) < 1e-4


def test_without_the_other_rank_a_run_of_two_comes_out_wrong(tmp_path, validate_engine):
    """Return the comparison if each rank were an engine of its own."""
    data = write_recording(tmp_path, requests=60)
    (folder,) = validate_engine.run_folders(data)
    run = replace(validate_engine.read_run(folder), dp=1, ep=1)
    row = validate_engine.errors(run, *validate_engine.simulate_run(data, run)[:2])
    assert abs(row["tpot_mean_err"]) > 0.05


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


def test_a_link_is_read_from_a_cluster_config(tmp_path, validate_engine):
    path = tmp_path / "serving_config.json"
    path.write_text('{"link_bw": 16, "link_latency": 20000}')
    link = validate_engine.read_link(path)
    assert (link.bytes_per_s, link.latency_s) == (16 * 2**30, pytest.approx(20e-6))
    path.write_text('{"link_bw": 16}')
    with pytest.raises(InputError, match=r"serving_config\.json: no numbers 'link_bw'"):
        validate_engine.read_link(path)
    with pytest.raises(InputError, match="cannot be read"):
        validate_engine.read_link(tmp_path / "none.json")


def test_a_user_imports_the_tables_of_two_ranks(tmp_path, simrl):
    folder = write_kernels(tmp_path / "bf16")
    where = "--gpu rtxpro6000 --dp 2 --ep 2 --link-bytes-per-s 32e9 --link-latency-s 14e-6"
    code, shown, _ = simrl(*f"profile import {folder} {where} -o mine.parquet".split())
    assert code == 0
    assert "qwen3-30b-a3b on rtxpro6000, tp 1, dp 2, ep 2 (routing balanced): derived" in shown
    profile = read_profile(tmp_path / "mine.parquet")
    assert np.interp(64, profile.tables.expert_tokens, profile.tables.experts_s) == pytest.approx(
        experts_s(64), rel=1e-3
    )
    dense = folder / "tp1" / "dense.csv"
    header, *rows = dense.read_text().split()
    for factor in (1e-3, 1e3):  # milliseconds, nanoseconds
        cells = [row.split(",") for row in rows]
        scaled = [f"{kind},{n},{factor * float(us)}" for kind, n, us in cells]
        dense.write_text("\n".join([header, *scaled]))
        code, _, line = simrl(*f"profile import {folder} {where} -o mine.parquet".split())
        assert code == 2 and "most times of dense are not within 1/50 and 50" in line
    (folder / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_ms\n1,8,0.1\n")
    code, _, line = simrl(*f"profile import {folder} {where} -o mine.parquet".split())
    assert (code, line.count("\n")) == (2, 1)
    assert "moe.csv: no column 'time_us'; found tokens, activated_experts, time_ms" in line
