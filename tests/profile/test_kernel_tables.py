"""Profiles composed of LLMServingSim's kernel tables, made up and measured (simrl/profile/profilers/kernel_tables.py)."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.interpolation import interpolate4
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.profile import (
    TableProfile,
    read_profile,
    straggler_beside_prefill_s,
    straggler_s,
    write_profile,
)
from simrl.profile.profilers.kernel_tables import A_LAYER, MLP, compose_kernel_tables
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.roofline import Link

TOY = ModelShape(
    name="toy-1b",
    layers=3,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    intermediate=4096,
    vocab=32000,
)
FAST_LINK = Link(bytes_per_s=100e9, latency_s=1e-6)


# ---------------------------------------------------------------- kernel tables, made up


def toy_attention_us(chunk: float, cached: float, decodes: float, kv: float) -> float:
    """More for a mixed batch than for its parts, as real kernels do."""
    both = 40.0 if chunk and decodes else 0.0
    return (
        (5 + 0.01 * chunk + 0.001 * cached if chunk else 0)
        + (2 + 1e-3 * decodes * kv if decodes else 0)
        + both
    )


def write_csv(path: Path, header: list[str], rows: list[tuple]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_kernel_tables(
    folder: Path, edit_attention=lambda rows: rows, edit_dense=lambda rows: rows
) -> Path:
    folder.mkdir(parents=True)
    (folder.parent / "meta.yaml").write_text(
        "model: acme/Toy-1B\nhardware: H100\ngpu: NVIDIA H100\nvllm_version: 0.19.0\nattention_grid:\n"
        "  chunks: 0, 16-64 x2\n  n_decode: 0, 1-8 x2\n  kv: 0, 16-256 x2\n"
    )

    kinds = (*A_LAYER, *MLP, "embedding", "final_layernorm")
    dense = [
        (kind, tokens, 1.0 + i + 0.1 * tokens) for i, kind in enumerate(kinds) for tokens in (1, 64)
    ]
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
    profile = compose_kernel_tables(
        write_kernel_tables(tmp_path / "tp1"), TOY, None, 1, None, between_passes_s=1e-3
    )
    kinds = {
        kind: 1.0 + i + 6.4
        for i, kind in enumerate((*A_LAYER, *MLP, "embedding", "final_layernorm"))
    }
    layer = (
        sum(microseconds for kind, microseconds in kinds.items() if kind in (*A_LAYER, *MLP))
        + kinds["layernorm"]
    )
    dense = TOY.layers * layer + kinds["embedding"] + kinds["final_layernorm"]
    attention = TOY.layers * toy_attention_us(32, 64, 4, 128)
    by_hand = 1e-6 * (dense + attention + 2 * 18.0) + 1e-3
    assert profile.pass_s(64, 8, 32, 64, 4, 4 * 128) == pytest.approx(by_hand)


def test_parts_that_are_absent_cost_nothing_whatever_their_length(tmp_path):
    profile = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, None, 1, None, 0.0)
    t = profile.tables
    assert t.attention_s[0, :, 0, :].max() == 0.0
    assert np.ptp(t.attention_s[1:, :, 0, :], axis=2).max() == 0.0
    assert np.ptp(t.attention_s[0, :, 1:, :], axis=0).max() == 0.0


def test_more_sequences_than_were_measured_beside_a_prefill_add_what_they_add_without_one(tmp_path):
    t = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, None, 1, None, 0.0).tables
    assert t.decode_sequences.tolist() == [0, 1, 2, 4, 8]  # 8 never beside a chunk
    chunk, cached = t.prefill_tokens[2], t.prefill_kv_tokens[3]
    us = [toy_attention_us(chunk, cached, 8, kv) for kv in t.decode_kv_tokens]
    assert t.attention_s[2, 3, 4] == pytest.approx(1e-6 * TOY.layers * np.array(us))


def test_a_rank_of_a_group_pays_for_its_collectives(tmp_path):
    alone = compose_kernel_tables(
        write_kernel_tables(tmp_path / "a" / "tp1"), TOY, None, 1, None, 0.0
    )
    folder = write_kernel_tables(tmp_path / "b" / "tp2")
    rank = compose_kernel_tables(folder, TOY, None, 2, FAST_LINK, 0.0)
    reduces = (2 * 3 + 1) * (2 * 1e-6 + 64 * 1024 * 2 / 100e9)
    assert rank.pass_s(64, 8) - alone.pass_s(64, 8) == pytest.approx(reduces)


def test_rows_beside_the_declared_grid_are_left_out(tmp_path):
    extra = (24, 0, 1, 16, 1e9)
    profile = compose_kernel_tables(
        write_kernel_tables(tmp_path / "tp1", edit_attention=lambda rows: [*rows, extra]),
        TOY,
        None,
        1,
        None,
        0.0,
    )
    assert profile.tables.attention_s.max() < 1.0


def test_a_missing_measurement_is_a_hole(tmp_path):
    folder = write_kernel_tables(
        tmp_path / "tp1", edit_attention=lambda rows: [r for r in rows if r[:4] != (32, 64, 2, 128)]
    )
    with pytest.raises(
        InputError,
        match="a hole at prefill_tokens 32, prefill_kv_tokens 64, decode_sequences 2, dec",
    ):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)


def test_tables_of_another_model_or_group_are_refused(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp2")
    with pytest.raises(InputError, match="profiled acme/Toy-1B, asked for qwen3-8b"):
        compose_kernel_tables(folder, model_shape("qwen3-8b"), None, 2, FAST_LINK, 0.0)
    with pytest.raises(InputError, match="one rank of 2, asked for tp 1"):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)
    with pytest.raises(InputError, match="tp 2 needs a link"):
        compose_kernel_tables(folder, TOY, None, 2, None, 0.0)


def test_tables_of_another_gpu_or_precision_are_refused(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    with pytest.raises(
        InputError, match=r"meta\.yaml: profiled on h100, asked for a100; give --gpu h100$"
    ):
        compose_kernel_tables(folder, TOY, gpu("a100"), 1, None, 0.0)
    meta = folder.parent / "meta.yaml"
    text = meta.read_text()
    meta.write_text(text.replace("NVIDIA H100", "Acme 9").replace("H100", "ACME9"))
    compose_kernel_tables(folder, TOY, gpu("a100"), 1, None, 0.0)  # of no known GPU
    meta.write_text(text + "variant: fp8\n")
    with pytest.raises(InputError, match=r"meta\.yaml: variant fp8: FP8 tables are not read"):
        compose_kernel_tables(folder, TOY, gpu("h100"), 1, None, 0.0)


def test_a_folder_without_tables_is_named(tmp_path):
    write_kernel_tables(tmp_path / "there" / "tp2")
    (tmp_path / "empty").mkdir()
    for name, tp, message in (
        ("nowhere", 1, "nowhere: no such folder"),
        ("empty", 1, r"empty: has no meta\.yaml and no tp1/"),
        ("there", 3, "^tp3 was not profiled; .*there has tp2: --tp 2$"),
    ):
        with pytest.raises(InputError, match=message):
            compose_kernel_tables(tmp_path / name, TOY, None, tp, FAST_LINK, 0.0)


def test_broken_tables_say_what_is_broken(tmp_path):
    cases = {
        "kind": (
            lambda rows: [r for r in rows if r[0] != "o_proj"],
            "no rows of the layer 'o_proj'",
        ),
        "tick": (
            lambda rows: [r for r in rows if r[:2] != ("o_proj", 64)],
            "'o_proj' has no row at tokens 64",
        ),
        "text": (lambda rows: [*rows, ("o_proj", 70, "fast")], r"row 22: time_us is 'fast'"),
        "alien": (
            lambda rows: [*rows, ("moe", 1, 3.0)],
            "layer 'moe' is not part of this transformer",
        ),
    }
    for name, (edit, message) in cases.items():
        folder = write_kernel_tables(tmp_path / name / "tp1", edit_dense=edit)
        with pytest.raises(InputError, match=message):
            compose_kernel_tables(folder, TOY, None, 1, None, 0.0)
    folder = write_kernel_tables(tmp_path / "meta" / "tp1")
    (folder.parent / "meta.yaml").write_text(
        "model: acme/Toy-1B\nhardware: H100\nattention_grid: {chunks: many}\n"
    )
    with pytest.raises(
        InputError, match=r"meta\.yaml: attention_grid chunks is 'many'; a sweep is written like"
    ):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)
    (folder.parent / "meta.yaml").unlink()
    with pytest.raises(InputError, match=r"meta\.yaml: cannot be read"):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)


def test_tokens_between_two_ticks_take_as_long_as_the_upper_one(tmp_path):
    profile = compose_kernel_tables(write_kernel_tables(tmp_path / "tp1"), TOY, None, 1, None, 0.0)
    assert (
        profile.pass_s(2, 1)
        == profile.pass_s(40, 1)
        == profile.pass_s(64, 1)
        > profile.pass_s(1, 1)
    )


SKEW_HEADER = ["n", "nb", "pc", "kp", "kvs", "kv_big", "kv_mean", "t_mean_us", "t_skew_us"]
SHORT, LONG = 64, 8256  # tokens
NS = {1: 3.0, 2: 2.0}  # what each token more adds where one or two of four are long


def skew_rows(scale: float) -> list[tuple]:
    """From four sequences on, long ones take longer than equal ones of as many tokens: `NS` a token, and beside a chunk of
    32 tokens 5 ns for each token by which one exceeds the mean. (As profilers do, on a scale of their own.)"""
    rows = []
    for n, nb, chunk in itertools.product((2, 4), (1, 2), (0, 32)):
        mean = SHORT + (LONG - SHORT) * nb / n
        more_us = 0.0
        if n == 4 and nb < n:
            more_us = 1e-3 * (5.0 * (LONG - mean) if chunk else NS[nb] * (LONG - SHORT))
        even_us = toy_attention_us(chunk, 0, n, min(mean, 256))  # the grid ends there
        if nb < n:
            rows.append(
                (n, nb, chunk, 0, SHORT, LONG, mean, scale * even_us, scale * (even_us + more_us))
            )
    return rows


def test_a_pass_waits_for_its_longest_sequences_as_long_as_was_measured(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    write_csv(folder / "skew.csv", SKEW_HEADER, skew_rows(scale=3.0))
    profile = compose_kernel_tables(folder, TOY, None, 1, None, 0.0)
    t, layer_s = profile.tables, 1e-9 * TOY.layers
    assert t.straggler_sequences.tolist() == [2, 4]
    assert t.straggler_shares.tolist() == [0, 0.25, 0.5, 1]
    np.testing.assert_allclose(
        t.straggler_s, layer_s * np.array([[0, 0, 0, 0], [3, 3, 2, 0]]), atol=1e-15
    )
    np.testing.assert_allclose(t.straggler_beside_prefill_s, layer_s * np.array([0, 5]), atol=1e-15)

    def waits_s(*lengths: float) -> float:
        return straggler_s(t, np.array(lengths))

    assert waits_s(900, 100, 100, 100) == pytest.approx(800 * 3 * layer_s)
    assert waits_s(100, 900, 100, 900) == pytest.approx(800 * 2 * layer_s)
    assert waits_s(400, 900, 100, 100) == pytest.approx((500 * 3 + 300 * 2) * layer_s)
    assert waits_s(900, 900, 900, 100) == pytest.approx(
        800 * 1 * layer_s
    )  # between two of four and all
    assert waits_s(900, 100, 100) == pytest.approx(
        800 * (3 - 1 / 3) * layer_s
    )  # one of three: a share between 1/4 and 1/2
    assert waits_s(900, 100) == waits_s(700, 700, 700, 700) == waits_s(900) == 0.0
    for n, tokens, ns in ((2, 1000.0, 0.0), (3, 1000.0, 5.0), (4, -1.0, 0.0)):
        assert straggler_beside_prefill_s(t, n, tokens) == pytest.approx(1000 * ns * layer_s)

    write_profile(profile, tmp_path / "profile.parquet")
    for ours, theirs in zip(t, read_profile(tmp_path / "profile.parquet").tables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_file_without_shares_counts_the_lead_of_the_longest_over_the_mean(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    write_csv(folder / "skew.csv", SKEW_HEADER, skew_rows(scale=1.0))
    path = tmp_path / "profile.parquet"
    write_profile(compose_kernel_tables(folder, TOY, None, 1, None, 0.0), path)
    table = pq.read_table(path)
    by_share = pc.and_(pc.equal(table["table"], "straggler"), pc.greater(table["share"], 0.0))
    pq.write_table(
        table.filter(pc.invert(pc.fill_null(by_share, False))).drop_columns("share"), path
    )
    old = read_profile(path).tables
    assert old.straggler_shares.tolist() == [0, 1]
    lengths = np.array([900.0, 300, 250, 150])
    assert straggler_s(old, lengths) == pytest.approx((900 - 400) * 3e-9 * TOY.layers)
    assert straggler_s(old, lengths[:3]) == pytest.approx(
        (300 - 700 / 3) * 3e-9 * TOY.layers
    )  # sorted: 150, 250, 300


def test_stragglers_that_are_no_grid_are_an_error(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    write_csv(folder / "skew.csv", SKEW_HEADER, skew_rows(scale=1.0))
    path = tmp_path / "profile.parquet"
    write_profile(compose_kernel_tables(folder, TOY, None, 1, None, 0.0), path)
    table = pq.read_table(path)
    first = pc.index(table["table"], "straggler").as_py()
    pq.write_table(pa.concat_tables([table[:first], table[first + 1 :]]), path)
    with pytest.raises(
        InputError, match="table 'straggler' has a hole at sequences 2, share 0; measure that point"
    ):
        read_profile(path)
    last = table.num_rows - 1
    pq.write_table(table[:last], path)
    with pytest.raises(
        InputError, match="straggler and straggler_beside_prefill have different sequences"
    ):
        read_profile(path)


def test_uneven_lengths_that_were_measured_nowhere_are_an_error(tmp_path):
    folder = write_kernel_tables(tmp_path / "tp1")
    write_csv(folder / "skew.csv", SKEW_HEADER, [row for row in skew_rows(1.0) if row[2] == 0])
    with pytest.raises(
        InputError,
        match=r"skew\.csv: at no n one long sequence \(nb 1\) without and beside prefill",
    ):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)
    write_csv(folder / "skew.csv", SKEW_HEADER[:-1], [row[:-1] for row in skew_rows(1.0)])
    with pytest.raises(InputError, match=r"skew\.csv: no column 't_skew_us'"):
        compose_kernel_tables(folder, TOY, None, 1, None, 0.0)


# ---------------------------------------------------------------- mixtures of experts

MIXTURE = TOY.model_copy(
    update={"name": "toy-moe", "experts": 16, "experts_per_token": 2, "moe_intermediate": 256}
)


def block_us(tokens: float, activated: float) -> float:
    return 4.0 + 3.0 * activated + 0.05 * tokens


def write_mixture_tables(folder: Path, edit_moe=lambda rows: rows) -> Path:
    """The tables of `MIXTURE` on one GPU: no MLP, but blocks of experts."""
    write_kernel_tables(folder, edit_dense=lambda rows: [r for r in rows if r[0] not in MLP])
    meta = folder.parent / "meta.yaml"
    meta.write_text(meta.read_text().replace("Toy-1B", "Toy-MoE"))
    blocks = [
        (tokens, activated, block_us(tokens, activated))
        for tokens in (1, 2, 4, 8, 16, 32, 64)
        for activated in (2, 4, 8, 16)
        if activated <= 2 * tokens
    ]
    header = ["tokens", "activated_experts", "time_us"]
    write_csv(folder / "moe.csv", header, edit_moe(blocks))
    return folder


def test_a_block_has_as_many_experts_as_its_tokens_meet(tmp_path):
    profile = compose_kernel_tables(
        write_mixture_tables(tmp_path / "tp1"), MIXTURE, None, 1, None, 0.0
    )
    assert (profile.metadata.dp, profile.metadata.routing) == (1, "balanced")
    met = 16 * (1 - (1 - 2 / 16) ** 64)
    kinds = {
        kind: 1.0 + i for i, kind in enumerate((*A_LAYER, *MLP, "embedding", "final_layernorm"))
    }
    layer = sum(us + 6.4 for kind, us in kinds.items() if kind in A_LAYER) + 7.4
    once = kinds["embedding"] + kinds["final_layernorm"] + 2 * 6.4
    by_hand = 1e-6 * (MIXTURE.layers * (layer + block_us(64, met)) + once + 2 * 11.0)
    assert profile.pass_s(64, 1) == pytest.approx(by_hand)


def test_a_gpu_of_two_computes_half_of_the_pairs_on_half_of_the_experts(tmp_path):
    """And passes over the pairs of the other; ranks gather their tokens before and scatter the sums after."""
    folder = write_mixture_tables(tmp_path / "tp1")
    h100 = gpu("h100")
    profile = compose_kernel_tables(
        folder, MIXTURE, h100, 1, None, 0.0, dp=2, ep=2, exchange=FAST_LINK
    )
    t = profile.tables
    assert (t.expert_tokens[0], t.expert_tokens[-1]) == (2, 128)
    for tokens in (64, 128):
        own_us = block_us(tokens / 2, 8 * (1 - (1 - 2 / 16) ** tokens))
        others_s = 2 * (5 * 256 + 2 * 1024) * tokens * 2 / 2 / (0.8 * h100.memory_bytes_per_s)
        moved_s = 2e-6 + (2 * 1024 + 16) * 2 * tokens / 2 / 100e9
        seconds = float(np.interp(tokens, t.expert_tokens, t.experts_s))
        assert seconds == pytest.approx(3 * (1e-6 * own_us + others_s + moved_s), rel=2e-3)
    assert "exchange of 2 attention ranks over 100.00 GB/s" in profile.metadata.notes


def test_experts_in_parts_are_an_estimate(tmp_path):
    folder = write_mixture_tables(tmp_path / "tp1")
    write_mixture_tables(tmp_path / "of_two" / "tp1").rename(tmp_path / "tp2")
    (tmp_path / "tp2" / "moe.csv").unlink()  # only one GPU's experts are profiled
    whole = compose_kernel_tables(folder, MIXTURE, None, 1, None, 0.0)
    parts = compose_kernel_tables(tmp_path, MIXTURE, gpu("h100"), 2, FAST_LINK, 0.0)
    reduces = 7 * (2e-6 + 64 * 1024 * 2 / 100e9)
    experts = 3e-6 * block_us(64, 16 * (1 - (1 - 2 / 16) ** 64))
    assert whole.pass_s(64, 1) - parts.pass_s(64, 1) == pytest.approx(experts / 2 - reduces)
    assert "estimated: experts divided over 2 GPUs" in parts.metadata.notes


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: [], "no rows after the header; profile it again"),
        (lambda rows: [*rows, rows[3]], r"row 24: tokens 4, activated_experts 2 is there twice"),
        (
            lambda rows: [*rows, (65, 2, -1.0)],
            r"row 24: time_us is -1.0; it must be zero or more",
        ),
        (lambda rows: [*rows, (65, "", 1.0)], "row 24: activated_experts is blank"),
    ],
)
def test_broken_tables_of_experts_name_the_row(tmp_path, edit, message: str):
    folder = write_mixture_tables(tmp_path / "tp1", edit_moe=edit)
    with pytest.raises(InputError, match=rf"moe\.csv: {message}"):
        compose_kernel_tables(folder, MIXTURE, None, 1, None, 0.0)


def test_a_split_that_the_tables_do_not_have_is_refused(tmp_path):
    folder = write_mixture_tables(tmp_path / "tp1")
    with pytest.raises(InputError, match="ep 3: all 2 GPUs of tp × dp share the experts, or none"):
        compose_kernel_tables(folder, MIXTURE, gpu("h100"), 1, FAST_LINK, 0.0, dp=2, ep=3)
    with pytest.raises(InputError, match="need a GPU and a link"):
        compose_kernel_tables(folder, MIXTURE, gpu("h100"), 1, None, 0.0, dp=2, ep=2)
    dense = write_kernel_tables(tmp_path / "dense" / "tp1")
    with pytest.raises(InputError, match="toy-1b has no experts to share"):
        compose_kernel_tables(dense, TOY, gpu("h100"), 1, FAST_LINK, 0.0, dp=2)


def test_rows_may_be_in_any_order(tmp_path):
    sorted_rows = write_mixture_tables(tmp_path / "a" / "tp1")
    shuffled = write_mixture_tables(tmp_path / "b" / "tp1", edit_moe=lambda rows: rows[::-1])
    for name in ("dense.csv", "attention.csv", "per_sequence.csv"):
        header, *rows = (shuffled / name).read_text().splitlines()
        (shuffled / name).write_text("\n".join([header, *reversed(rows)]))
    one, other = (
        compose_kernel_tables(f, MIXTURE, None, 1, None, 0.0) for f in (sorted_rows, shuffled)
    )
    for ours, theirs in zip(one.tables, other.tables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------- kernel tables, measured

MEASURED = [("qwen3-32b", "Qwen3-32B", 2), ("llama-3.1-8b", "Llama-3.1-8B", 1)]


def measured_profile(shared_data: Path, model: str, folder: str, tp: int) -> TableProfile:
    link = Link(bytes_per_s=16 * 2**30, latency_s=20e-6)
    tables = shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}"
    return compose_kernel_tables(tables, model_shape(model), None, tp, link, between_passes_s=0.0)


@pytest.mark.parametrize(("model", "folder", "tp"), MEASURED)
def test_measured_kernels_are_kept_but_for_noise(shared_data, model: str, folder: str, tp: int):
    profile = measured_profile(shared_data, model, folder, tp)
    rows = pd.read_csv(
        shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}" / "attention.csv"
    )
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
def test_measurements_between_the_grid_points_are_predicted(
    shared_data, model: str, folder: str, tp: int
):
    """Rows of a finer sweep that the grid leaves out: held-out measurements of the same kernel."""
    profile = measured_profile(shared_data, model, folder, tp)
    rows = pd.read_csv(
        shared_data / "kernel_profiles" / "RTXPRO6000" / folder / f"tp{tp}" / "attention.csv"
    )
    axes = profile.tables[4:8]
    beside = np.logical_or.reduce(
        [
            ~np.isin(rows[name], [0, *axis])
            for name, axis in zip(rows.columns[:4], axes, strict=True)
        ]
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
