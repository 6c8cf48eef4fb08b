import csv
import itertools
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from simrl.errors import InputError
from simrl.hardware import GPUS, ModelShape, gpu, model_shape
from simrl.interpolation import interpolate4
from simrl.profile import TableProfile, pass_s, read_profile, write_profile
from simrl.profilers import aiconfigurator, transformed
from simrl.profilers.collectives import Link, logits_gather_s, pass_all_reduces_s, read_link
from simrl.profilers.kernel_tables import A_LAYER, MLP, compose_kernel_tables
from simrl.profilers.roofline import roofline_profile
from simrl.profilers.smoothing import settled

SHIPPED = sorted((Path(__file__).parents[1] / "profiles").glob("*.parquet"))
TOY = ModelShape(
    name="toy-1b", layers=3, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=4096, vocab=32000
)
FAST_LINK = Link(bytes_per_s=100e9, latency_s=1e-6)

# ---------------------------------------------------------------- collectives


def test_a_ring_all_reduce_sends_twice_the_bytes_but_one_share():
    link = Link(bytes_per_s=10e9, latency_s=5e-6)
    seconds = link.all_reduce_s(np.array([4e9]), ranks=4)
    assert seconds == pytest.approx(2 * 3 / 4 * 4e9 / 10e9 + 6 * 5e-6)
    assert link.all_gather_s(np.array([4e9]), ranks=4) == pytest.approx(3 / 4 * 4e9 / 10e9 + 3 * 5e-6)


def test_latency_is_paid_a_step_or_a_collective():
    once = Link(bytes_per_s=10e9, latency_s=5e-6, latency_each_step=False)
    assert once.all_reduce_s(np.array([0.0]), ranks=8) == pytest.approx(5e-6)
    assert Link(10e9, 5e-6).all_reduce_s(np.array([0.0]), ranks=8) == pytest.approx(14 * 5e-6)


def test_one_rank_needs_no_communication():
    assert pass_all_reduces_s(TOY, np.array([1.0, 4096.0]), 1, FAST_LINK).tolist() == [0.0, 0.0]
    assert logits_gather_s(TOY, np.array([64.0]), 1, FAST_LINK).tolist() == [0.0]


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1e-6), (float("nan"), 0.0)])
def test_a_link_without_bandwidth_is_refused(bandwidth: float, latency: float):
    with pytest.raises(InputError, match="it needs a bandwidth above zero"):
        Link(bandwidth, latency)


def test_a_link_is_read_from_a_cluster_config(tmp_path):
    path = tmp_path / "serving_config.json"
    path.write_text('{"link_bw": 16, "link_latency": 20000}')
    link = read_link(path)
    assert (link.bytes_per_s, link.latency_s) == (16 * 2**30, pytest.approx(20e-6))
    path.write_text('{"link_bw": 16}')
    with pytest.raises(InputError, match=r"serving_config\.json: no numbers 'link_bw'"):
        read_link(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_link(tmp_path / "none.json")


# ---------------------------------------------------------------- smoothing

GRIDS = arrays(np.float64, st.tuples(*(st.integers(1, 4),) * 3), elements=st.floats(0, 100))


@given(GRIDS)
@settings(max_examples=100, deadline=None)
def test_what_is_settled_falls_nowhere_and_stays_settled(values: np.ndarray):
    even = settled(values)
    for axis in range(values.ndim):
        assert (np.diff(even, axis=axis) >= 0).all()
    assert np.array_equal(settled(even), even)
    assert values.min() <= even.min() and even.max() <= values.max()


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 100)))
@settings(max_examples=100, deadline=None)
def test_settling_a_line_moves_no_point_by_more_than_half_the_largest_fall(line: np.ndarray):
    largest_fall = (np.maximum.accumulate(line) - line).max()
    assert np.abs(settled(line) - line).max() <= largest_fall / 2 + 1e-9


# ---------------------------------------------------------------- kernel tables, made up


def toy_attention_us(chunk: float, cached: float, decodes: float, kv: float) -> float:
    """More for a mixed batch than for its parts, as real kernels do."""
    both = 40.0 if chunk and decodes else 0.0
    return (5 + 0.01 * chunk + 0.001 * cached if chunk else 0) + (2 + 1e-3 * decodes * kv if decodes else 0) + both


def write_csv(path: Path, header: list[str], rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_kernel_tables(folder: Path, edit_attention=lambda rows: rows, edit_dense=lambda rows: rows) -> Path:
    folder.mkdir(parents=True)
    (folder.parent / "meta.yaml").write_text(
        "model: acme/Toy-1B\nhardware: H100\ngpu: NVIDIA H100\nvllm_version: 0.19.0\nattention_grid:\n"
        "  chunks: 0, 16-64 x2\n  n_decode: 0, 1-8 x2\n  kv: 0, 16-256 x2\n"
    )

    kinds = (*A_LAYER, "embedding", "final_layernorm")
    dense = [(kind, tokens, 1.0 + i + 0.1 * tokens) for i, kind in enumerate(kinds) for tokens in (1, 64)]
    write_csv(folder / "dense.csv", ["layer", "tokens", "time_us"], edit_dense(dense))
    heads = [(kind, n, 10.0 + n) for kind in ("lm_head", "sampler") for n in (1, 8)]
    write_csv(folder / "per_sequence.csv", ["layer", "sequences", "time_us"], heads)
    kv = (16, 32, 64, 128, 256)
    attention = [
        (c, k, n, d, toy_attention_us(c, k, n, d))
        for c, n in itertools.product((0, 16, 32, 64), (0, 1, 2, 4, 8))
        for k, d in itertools.product((0, *kv) if c else (0,), kv if n else (0,))
        if (c or n) and not (c and n == 8)
    ]
    header = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write_csv(folder / "attention.csv", header, edit_attention(attention))
    return folder


def test_kernel_times_are_summed_over_layers_once(tmp_path):
    profile = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, 1, None, between_passes_s=1e-3)
    kinds = {kind: 1.0 + i + 6.4 for i, kind in enumerate((*A_LAYER, "embedding", "final_layernorm"))}
    layer = sum(microseconds for kind, microseconds in kinds.items() if kind in A_LAYER) + kinds["layernorm"]
    dense = TOY.layers * layer + kinds["embedding"] + kinds["final_layernorm"]
    attention = TOY.layers * toy_attention_us(32, 64, 4, 128)
    by_hand = 1e-6 * (dense + attention + 2 * 18.0) + 1e-3
    assert profile.pass_s(64, 8, 32, 64, 4, 4 * 128) == pytest.approx(by_hand)


def test_parts_that_are_absent_cost_nothing_whatever_their_length(tmp_path):
    profile = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, 1, None, 0.0)
    t = profile.tables
    assert t.attention_s[0, :, 0, :].max() == 0.0
    assert np.ptp(t.attention_s[1:, :, 0, :], axis=2).max() == 0.0
    assert np.ptp(t.attention_s[0, :, 1:, :], axis=0).max() == 0.0
    assert t.decode_sequences.tolist() == [0, 1, 2, 4]  # 8 was never measured beside a prefill chunk


def test_a_rank_of_a_group_pays_for_its_collectives(tmp_path):
    alone = compose_kernel_tables(write_kernel_tables(tmp_path / "a" / "tp1"), TOY, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "b" / "tp2")
    rank = compose_kernel_tables(folder, TOY, 2, FAST_LINK, 0.0)
    gathers = compose_kernel_tables(folder, TOY, 2, FAST_LINK, 0.0, gather_logits=True)
    reduces = (2 * 3 + 1) * (2 * 1e-6 + 64 * 1024 * 2 / 100e9)
    gather = 1e-6 + 0.5 * 8 * 32000 * 2 / 100e9
    assert rank.pass_s(64, 8) - alone.pass_s(64, 8) == pytest.approx(reduces)
    assert gathers.pass_s(64, 8) - rank.pass_s(64, 8) == pytest.approx(gather)


def test_rows_beside_the_declared_grid_are_left_out(tmp_path):
    extra = (24, 0, 1, 16, 1e9)
    profile = compose_kernel_tables(
        write_kernel_tables(tmp_path / "tp1", edit_attention=lambda rows: [*rows, extra]), TOY, 1, None, 0.0
    )
    assert profile.tables.attention_s.max() < 1.0


def test_a_missing_measurement_is_a_hole(tmp_path):
    folder = write_kernel_tables(
        tmp_path / "tp1", edit_attention=lambda rows: [r for r in rows if r[:4] != (32, 64, 2, 128)]
    )
    with pytest.raises(InputError, match="a hole at prefill_tokens 32, prefill_kv_tokens 64, decode_sequences 2, dec"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)


def test_tables_of_another_model_or_group_are_refused(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp2")
    with pytest.raises(InputError, match="profiled acme/Toy-1B, asked for qwen3-8b"):
        compose_kernel_tables(folder, model_shape("qwen3-8b"), 2, FAST_LINK, 0.0)
    with pytest.raises(InputError, match="one rank of 2, asked for tp 1"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)
    with pytest.raises(InputError, match="tp 2 needs a link"):
        compose_kernel_tables(folder, TOY, 2, None, 0.0)


def test_broken_tables_say_what_is_broken(tmp_path):
    cases = {
        "kind": (lambda rows: [r for r in rows if r[0] != "o_proj"], "no rows of the layer 'o_proj'"),
        "tick": (lambda rows: [r for r in rows if r[:2] != ("o_proj", 64)], "'o_proj' has no row at tokens 64"),
        "text": (lambda rows: [*rows, ("o_proj", 70, "fast")], r"row 22: time_us is 'fast'"),
        "alien": (lambda rows: [*rows, ("moe", 1, 3.0)], "layer 'moe' is not part of a dense transformer"),
    }
    for name, (edit, message) in cases.items():
        folder = write_kernel_tables(tmp_path / name / "tp1", edit_dense=edit)
        with pytest.raises(InputError, match=message):
            compose_kernel_tables(folder, TOY, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "meta" / "tp1")
    (folder.parent / "meta.yaml").write_text("model: acme/Toy-1B\nhardware: H100\nattention_grid: {chunks: many}\n")
    with pytest.raises(InputError, match=r"meta\.yaml: attention_grid chunks is 'many'; a sweep is written like"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)
    (folder.parent / "meta.yaml").unlink()
    with pytest.raises(InputError, match=r"meta\.yaml: cannot be read"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)


def test_tokens_between_two_ticks_take_as_long_as_the_upper_one(tmp_path):
    profile = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, 1, None, 0.0)
    assert profile.pass_s(2, 1) == profile.pass_s(40, 1) == profile.pass_s(64, 1) > profile.pass_s(1, 1)


SKEW_HEADER = ["n", "nb", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_skew_us"]


def skew_rows(scale: float) -> list[tuple]:
    """One sequence of 4,160 tokens among n of 64: from four sequences on, each token that it has more takes 3 ns, beside a
    chunk of 32 tokens 5 ns. (As profilers do, on a scale of their own.)"""
    rows = []
    for n, (chunk, ns) in itertools.product((2, 4), ((0, 3.0), (32, 5.0))):
        even_us = toy_attention_us(chunk, 0, n, 64)
        more_us = 1e-3 * ns * (4160 - 64) if n == 4 else 0.0
        rows.append((n, 1, chunk, 0, 4160, 64, scale * even_us, scale * (even_us + more_us)))
        rows.append((n, 2, chunk, 0, 4160, 64, 1.0, 1e9))  # two long ones: another question
    return rows


def test_a_pass_waits_for_the_longest_sequence_as_long_as_was_measured(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    even = compose_kernel_tables(folder, TOY, 1, None, 0.0)
    write_csv(folder / "skew.csv", SKEW_HEADER, skew_rows(scale=3.0))
    profile = compose_kernel_tables(folder, TOY, 1, None, 0.0)
    assert profile.tables.straggler_sequences.tolist() == [2, 4]
    np.testing.assert_allclose(profile.tables.straggler_s, TOY.layers * np.array([[0, 3e-9], [0, 5e-9]]), atol=1e-15)
    for n, beside, longer_s in ((2, 0, 0.0), (3, 0, 3e-9), (4, 0, 3e-9), (4, 32, 5e-9)):
        arguments = [float(x) for x in (n + beside, n, beside, beside**2 / 2, n, 64 * n)]
        waits = pass_s(profile.tables, *arguments, 1000.0) - pass_s(even.tables, *arguments, 1000.0)
        assert waits == pytest.approx(1000 * TOY.layers * longer_s, abs=1e-12)
    write_profile(profile, tmp_path / "profile.parquet")
    for ours, theirs in zip(profile.tables, read_profile(tmp_path / "profile.parquet").tables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_uneven_lengths_that_were_measured_nowhere_are_an_error(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    write_csv(folder / "skew.csv", SKEW_HEADER, [row for row in skew_rows(1.0) if row[2] == 0])
    with pytest.raises(InputError, match=r"skew\.csv: at no n one long sequence \(nb 1\) without and beside prefill"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)
    write_csv(folder / "skew.csv", SKEW_HEADER[:-1], [row[:-1] for row in skew_rows(1.0)])
    with pytest.raises(InputError, match=r"skew\.csv: no column 't_skew_us'"):
        compose_kernel_tables(folder, TOY, 1, None, 0.0)


# ---------------------------------------------------------------- kernel tables of a mixture of experts, made up

OF_8 = TOY.model_copy(update={"experts": 8, "experts_per_token": 2, "moe_intermediate": 512})


def instead_of_the_mlp(*kinds: str):
    """The dense table with these kinds in place of the MLP's, each 100 µs + 1 µs a token."""
    return lambda rows: (
        [row for row in rows if row[0] not in MLP] + [(kind, n, 100.0 + n) for kind in kinds for n in (1, 64)]
    )


@pytest.mark.parametrize("kinds", [("moe",), ("router", "experts"), ("gate", "fused_moe", "shared_expert")])
def test_experts_are_summed_over_layers_by_whatever_kinds_the_table_has(tmp_path, kinds: tuple[str, ...]):
    dense = compose_kernel_tables(write_kernel_tables(tmp_path / "dense" / "tp1"), TOY, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "moe" / "tp1", edit_dense=instead_of_the_mlp(*kinds))
    profile = compose_kernel_tables(folder, OF_8, 1, None, 0.0)
    mlp_us = sum(1.0 + i + 6.4 for i, kind in enumerate(A_LAYER) if kind in MLP)
    more_s = 1e-6 * TOY.layers * (len(kinds) * 164.0 - mlp_us)
    assert profile.pass_s(64, 8, 32, 64, 4, 512) - dense.pass_s(64, 8, 32, 64, 4, 512) == pytest.approx(more_s)


def test_experts_in_a_table_of_their_own_take_the_time_of_as_many_as_are_expected_to_be_chosen(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1", edit_dense=instead_of_the_mlp())
    rows = [(tokens, active, 10.0 * active + tokens) for tokens in (1, 64) for active in (2, 4, 8)]
    write_csv(folder / "moe.csv", ["tokens", "activated_experts", "time_us"], rows)
    write_kernel_tables(tmp_path / "block" / "tp1", edit_dense=instead_of_the_mlp("moe"))
    ours = compose_kernel_tables(folder, OF_8, 1, None, 0.0)
    block = compose_kernel_tables(tmp_path / "block" / "tp1", OF_8, 1, None, 0.0)
    assert OF_8.activated_experts(1) == pytest.approx(2.0) and OF_8.activated_experts(64) == pytest.approx(8.0)
    for tokens, us in ((1, 10 * 2.0 + 1), (64, 10 * 8.0 + 64)):
        assert block.pass_s(tokens, 1) - ours.pass_s(tokens, 1) == pytest.approx(
            1e-6 * 3 * (100 + tokens - us), rel=1e-6
        )


def test_tables_without_experts_or_with_unknown_kinds_are_refused(tmp_path):
    folder = write_kernel_tables(tmp_path / "none" / "tp1")
    with pytest.raises(
        InputError, match=r"dense\.csv: toy-1b is a mixture of experts and there are no rows of its exp"
    ):
        compose_kernel_tables(folder, OF_8, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "alien" / "tp1", edit_dense=instead_of_the_mlp("moe", "mamba"))
    with pytest.raises(InputError, match="layer 'mamba' is not part of a mixture of experts; known: embedding"):
        compose_kernel_tables(folder, OF_8, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "short" / "tp1", edit_dense=instead_of_the_mlp())
    write_csv(folder / "moe.csv", ["tokens", "activated_experts", "time_us"], [(1, 2, 5.0), (32, 8, 9.0)])
    with pytest.raises(
        InputError, match=r"moe\.csv: tokens 1 to 32, dense\.csv has 1 to 64; profile the experts as far"
    ):
        compose_kernel_tables(folder, OF_8, 1, None, 0.0)


def test_a_mixture_of_experts_holds_all_experts_and_computes_with_a_few():
    shape = model_shape("qwen3-30b-a3b")
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    active = shape.layers * shape.active_layer_parameters + 2 * shape.vocab * shape.hidden
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert shape.forward_flops(1, 0) == pytest.approx(2 * (active - shape.vocab * shape.hidden))
    with pytest.raises(InputError, match="roofline: qwen3-30b-a3b is a mixture of experts"):
        roofline_profile(shape, gpu("h100"))


def test_a_mixture_of_experts_is_read_from_its_config(tmp_path):
    ours = model_shape("qwen3-30b-a3b")
    config = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(tmp_path).model_copy(update={"name": ours.name}) == ours
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_shared_experts": 1}))
    with pytest.raises(
        InputError, match="n_shared_experts is 1; simrl models mixtures of experts whose layers are all"
    ):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 200}))
    with pytest.raises(InputError, match="128 experts need a moe_intermediate above 0 and 1 to 128 experts_per_token"):
        model_shape(tmp_path)


# ---------------------------------------------------------------- kernel tables, measured

MEASURED = [("qwen3-32b", "Qwen3-32B", 2), ("llama-3.1-8b", "Llama-3.1-8B", 1)]


def measured_profile(shared_data: Path, model: str, folder: str, tp: int) -> TableProfile:
    link = read_link(shared_data / "vllm_runs" / "RTXPRO6000" / folder / "serving_config.json")
    tables = shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}"
    return compose_kernel_tables(tables, model_shape(model), tp, link, between_passes_s=0.0)


@pytest.mark.parametrize(("model", "folder", "tp"), MEASURED)
def test_measured_kernels_are_kept_but_for_noise(shared_data, model: str, folder: str, tp: int):
    profile = measured_profile(shared_data, model, folder, tp)
    rows = pd.read_csv(shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}" / "attention.csv")
    axes = profile.tables[4:8]
    on_grid = np.logical_and.reduce(
        [np.isin(rows[name], [0, *axis]) for name, axis in zip(rows.columns[:4], axes, strict=True)]
    )
    error = attention_error(profile, rows[on_grid], model)
    assert on_grid.sum() > 8000
    assert np.median(np.abs(error)) < 0.001
    assert np.quantile(np.abs(error), 0.95) < 0.03
    assert abs(error.mean()) < 0.01


@pytest.mark.parametrize(("model", "folder", "tp"), MEASURED)
def test_measurements_between_the_grid_points_are_predicted(shared_data, model: str, folder: str, tp: int):
    """Rows of a finer sweep that the grid leaves out: held-out measurements of the same kernel."""
    profile = measured_profile(shared_data, model, folder, tp)
    rows = pd.read_csv(shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}" / "attention.csv")
    axes = profile.tables[4:8]
    beside = np.logical_or.reduce(
        [~np.isin(rows[name], [0, *axis]) for name, axis in zip(rows.columns[:4], axes, strict=True)]
    )
    held_out = rows[beside & (rows["n_decode"] <= axes[2][-1])]
    error = attention_error(profile, held_out, model)
    assert len(held_out) > 10000
    assert np.median(np.abs(error)) < 0.04
    assert abs(np.median(error)) < 0.035


def attention_error(profile: TableProfile, rows: pd.DataFrame, model: str) -> np.ndarray:
    t = profile.tables
    points = rows.to_numpy(float)
    predicted = np.array([interpolate4(*t[4:9], tuple(point[:4])) for point in points])
    return predicted / (1e-6 * model_shape(model).layers * points[:, 4]) - 1


def test_two_sources_agree_on_llama_on_one_gpu(shared_data):
    """The kernel tables and the data sheet know nothing of each other."""
    kernels = measured_profile(shared_data, *MEASURED[1])
    sheet = roofline_profile(model_shape("llama-3.1-8b"), gpu("rtxpro6000"), between_passes_s=0.0)
    for batch, kv in itertools.product((1, 16, 128), (1024, 4096)):
        assert sheet.decode_s(batch, kv) == pytest.approx(kernels.decode_s(batch, kv), rel=0.15)
    assert sheet.prefill_s(2048) == pytest.approx(kernels.prefill_s(2048), rel=0.15)


# ---------------------------------------------------------------- roofline


def test_the_roofline_is_work_over_rate_everywhere():
    shape, h100 = model_shape("qwen3-8b"), GPUS["h100"]
    profile = roofline_profile(shape, h100, between_passes_s=0.0)
    flops, bandwidth = 0.7 * h100.bf16_flops, 0.8 * h100.memory_bytes_per_s
    for batch, kv in ((1, 100), (37, 5000), (300, 40000), (2000, 777)):
        weights = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
        dense = max(2 * weights * batch / flops, 2 * weights / bandwidth)
        assert profile.decode_s(batch, kv) == pytest.approx(dense + batch * kv * shape.kv_bytes_per_token / bandwidth)


def test_the_roofline_prefill_is_the_model_flops_over_the_rate():
    shape, h100 = model_shape("qwen3-32b"), GPUS["h100"]
    profile = roofline_profile(shape, h100, between_passes_s=0.0)
    for tokens in (1024, 3000, 16384, 50000):
        causal = shape.forward_flops(tokens, tokens**2 / 2) - 2 * shape.vocab * shape.hidden * tokens
        assert profile.prefill_s(tokens) == pytest.approx(causal / (0.7 * h100.bf16_flops), rel=0.02)


def test_more_gpus_are_faster_but_not_by_their_number():
    shape, h100 = model_shape("qwen3-32b"), GPUS["h100"]
    one, four = (roofline_profile(shape, h100, tp) for tp in (1, 4))
    for seconds in (lambda p: p.decode_s(64, 4096), lambda p: p.prefill_s(8192)):
        assert seconds(one) / 4 < seconds(four) < seconds(one)


def test_the_roofline_covers_long_contexts_and_says_what_it_assumes():
    profile = roofline_profile(model_shape("qwen3-8b"), GPUS["h200"], compute_efficiency=0.55)
    profile.require_covers(65536, 2048, 262144, verified_positions=65536)
    assert profile.metadata.kind == "assumed"
    assert "compute 0.55" in profile.metadata.notes and "H200" in profile.metadata.source


@pytest.mark.parametrize("efficiency", [0.0, 1.5, float("nan")])
def test_efficiencies_must_be_shares(efficiency: float):
    with pytest.raises(InputError, match=r"memory_efficiency is .*; it must be above 0 and at most 1"):
        roofline_profile(TOY, GPUS["h100"], memory_efficiency=efficiency)
    with pytest.raises(InputError, match="tp is 3; it must divide the 8 attention heads"):
        roofline_profile(TOY, GPUS["h100"], tp=3)


# ---------------------------------------------------------------- aiconfigurator and the shipped files


def test_the_shipped_profiles_are_all_there():
    names = {f"qwen3-{size}_{g}_tp{tp}" for size in ("8b", "14b", "32b") for g in ("h100", "h200") for tp in (1, 2, 4)}
    names |= {f"qwen3-{size}_a100_tp{tp}" for size in ("8b", "14b") for tp in (1, 2)}
    names |= {f"qwen3-{size}_h800_tp2" for size in ("8b", "14b")}
    names |= {f"qwen2.5-7b_{g}_tp{tp}" for g in ("h100", "h800", "h20") for tp in (1, 2)} | {"qwen2.5-7b_h20_tp4"}
    names |= {f"qwen2.5-{size}_{g}_tp1" for size in ("0.5b", "1.5b") for g in ("h100", "h800")}
    names |= {f"qwen2.5-32b_{g}_tp4" for g in ("h100", "h800")}
    names |= {f"deepseek-r1-distill-qwen-{size}_h800_tp{tp}" for size, tp in (("1.5b", 1), ("7b", 1), ("7b", 2))}
    names |= {f"llama-3.3-70b_h100_tp{tp}" for tp in (4, 8)}
    assert {path.stem for path in SHIPPED} == names


def test_a_shipped_profile_of_a_gpu_that_nobody_measured_says_so():
    transformed_gpus = {p.metadata.gpu for p in map(read_profile, SHIPPED) if "not measured" in p.metadata.source}
    assert transformed_gpus == set(transformed.BASES)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_profile_is_whole_and_small(path: Path):
    profile = read_profile(path)
    model, gpu_name, tp = re.fullmatch(r"(.*)_(.*)_tp(\d)", path.stem).groups()
    metadata = profile.metadata
    assert (metadata.model, metadata.gpu, metadata.tp) == (model, gpu_name, int(tp))
    assert metadata.kind == "derived" and "aiconfigurator 0.12" in metadata.source and metadata.created == ""
    profile.require_covers(query_tokens=16384, sequences=1024, kv_tokens=2048 + 32768, verified_positions=16384)
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_profile_stays_within_the_data_sheet(path: Path):
    """No kernel is faster than its bytes or its flops allow, nor absurdly slower."""
    profile = read_profile(path)
    shape, card, tp = model_shape(profile.metadata.model), GPUS[profile.metadata.gpu], profile.metadata.tp
    looked_up = 0 if shape.tied_embeddings else 2 * shape.vocab * shape.hidden  # read for the output head, if tied
    reading = (shape.weight_bytes - looked_up) / tp / card.memory_bytes_per_s
    assert reading < profile.decode_s(1, 512) < 3.5 * reading + 0.5e-3  # small models: starting kernels
    kv_reading = 256 * 16384 * shape.kv_bytes_per_token / tp / card.memory_bytes_per_s
    assert kv_reading < profile.decode_s(256, 16384) < 2 * (kv_reading + reading)
    computing = shape.forward_flops(8192, 8192**2 / 2) / tp / card.bf16_flops
    assert computing < profile.prefill_s(8192) < 3 * computing


def test_more_gpus_and_faster_memory_pay_in_the_shipped_profiles():
    by_name = {path.stem: read_profile(path) for path in SHIPPED}
    for size, g in itertools.product(("8b", "14b", "32b"), ("h100", "h200")):
        one, two, four = (by_name[f"qwen3-{size}_{g}_tp{tp}"] for tp in (1, 2, 4))
        assert one.decode_s(64, 4096) > two.decode_s(64, 4096) > four.decode_s(64, 4096)
    for size, tp in itertools.product(("8b", "14b", "32b"), (1, 2, 4)):
        h100, h200 = (by_name[f"qwen3-{size}_{g}_tp{tp}"] for g in ("h100", "h200"))
        assert h200.decode_s(128, 8192) < 0.85 * h100.decode_s(128, 8192)


def test_the_shipped_profiles_say_by_how_much_they_miss_measured_serving(shared_data):
    """Steady state at concurrency c: while one request makes its osl tokens, each of the c - 1 others is prefilled."""
    rows = pd.read_csv(shared_data / "serving_measurements" / "h100_sxm_agg.csv")
    rows = rows[(rows.backend == "vllm") & (rows.model_path == "Qwen/Qwen3-32B") & rows.precision.isna()]
    shape, errors, gaps_s = model_shape("qwen3-32b"), [], []
    for row in rows[rows.tp_size.isin([2, 4])].itertuples():
        free_bytes = 0.9 * row.tp_size * 80e9 - shape.weight_bytes  # less than the driver reports: for buffers
        if row.batch_size * (row.isl + row.osl) * shape.kv_bytes_per_token > free_bytes:
            continue  # the KV cache did not hold that concurrency
        profile = read_profile(SHIPPED[0].parent / f"qwen3-32b_h100_tp{row.tp_size}.parquet")
        kv, others = row.isl + row.osl / 2, row.batch_size - 1
        decode = profile.decode_s(row.batch_size, kv)
        mixed = profile.pass_s(others + row.isl, row.batch_size, row.isl, 0, others, others * kv)
        predicted = decode + others / (row.osl - 1) * (mixed - decode)
        errors.append(predicted / (1e-3 * row.silicon_tpot_ms) - 1)
        if row.batch_size == 8:
            gaps_s.append(1e-3 * row.silicon_tpot_ms - predicted)
    assert len(errors) == 56 and "56 measured" in aiconfigurator.ACCURACY
    assert statistics.median(errors) == pytest.approx(-0.10, abs=0.01)
    assert statistics.median(gaps_s) == pytest.approx(1.5e-3, abs=0.2e-3)


def test_without_aiconfigurator_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(InputError, match=r"pip install 'simrl\[aiconfigurator\]'"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "h100")


@pytest.fixture(scope="module")
def engine_handle():
    return pytest.importorskip("aiconfigurator_core.sdk.engine", reason="the extra is not installed").EngineHandle


@pytest.mark.parametrize("name", ["qwen3-8b_h200_tp2", "qwen3-14b_h100_tp4", "qwen2.5-7b_h20_tp2"])
def test_a_shipped_profile_is_remade_byte_for_byte(engine_handle, tmp_path, name: str):
    model, gpu_name, tp = name.split("_")
    derive = transformed.derive if gpu_name in transformed.BASES else aiconfigurator.derive
    write_profile(derive(model_shape(model), gpu_name, int(tp[2:])), tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (SHIPPED[0].parent / f"{name}.parquet").read_bytes()


@pytest.mark.parametrize(("model", "bundled"), [("qwen3-8b", "Qwen/Qwen3-8B"), ("qwen3-32b", "Qwen/Qwen3-32B")])
def test_a_config_from_the_shape_gives_what_the_bundled_model_gives(engine_handle, model: str, bundled: str):
    ours = aiconfigurator.engine_of(model_shape(model), "h200", 2, "vllm")
    theirs = engine_handle.compile(bundled, "h200_sxm", "vllm", tp_size=2, nextn=0)
    for batch, context in ((1, 1024), (64, 5000)):
        assert ours.predict_decode_latency(batch, context, 2) == theirs.predict_decode_latency(batch, context, 2)
    assert ours.predict_prefill_latency(1, 3000) == theirs.predict_prefill_latency(1, 3000)


@pytest.mark.parametrize(("model", "gpu_name", "tp"), [("qwen3-32b", "h200", 4), ("qwen3-14b", "h100", 2)])
def test_the_profile_agrees_with_aiconfigurator_on_and_between_its_points(engine_handle, model, gpu_name, tp):
    profile = aiconfigurator.derive(model_shape(model), gpu_name, tp)
    engine = aiconfigurator.engine_of(model_shape(model), gpu_name, tp, "vllm")
    for batch, context in itertools.product((1, 8, 16, 45, 64, 91, 128, 181, 256), (1024, 1448, 4096, 8192, 16384)):
        expected = 1e-3 * engine.predict_decode_latency(batch, context, 2)
        assert profile.decode_s(batch, context + 1) == pytest.approx(expected, rel=0.02)
    for tokens in (256, 362, 1024, 1448, 4096, 6900, 16384):
        assert profile.prefill_s(tokens) == pytest.approx(1e-3 * engine.predict_prefill_latency(1, tokens), rel=0.02)


def test_combinations_without_data_are_refused(engine_handle):
    with pytest.raises(InputError, match="gpu 'tpu' is unknown; choose one of a100, h100"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "tpu")
    with pytest.raises(InputError, match="no qwen3-8b on 3 h100 under vllm"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "h100", tp=3)
