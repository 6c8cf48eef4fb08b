import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from simrl.profile.drafted import Drafted
from simrl.profile.interpolation import interpolate4
from simrl.profile.metadata import setting_differences
from simrl.profile.profile import (
    ProfileMetadata,
    TableProfile,
    Tables,
    equivalent_chunk,
    read_profile,
    write_profile,
)
from simrl.profile.profilers.smoothing import settled
from simrl.profile.rollout_times import RolloutTimes
from tests.helpers import examples

METADATA = ProfileMetadata(model="toy", gpu="h100", tp=1, kind="assumed", source="a test")


def toy_tables(**changes: object) -> Tables:
    """dense 2 ms + 0.1 ms a token, sampled 1 ms + 0.05 ms a sequence, attention linear in the KV tokens read."""
    tokens, sequences = np.array([1.0, 64, 4096]), np.array([1.0, 256])
    chunk, cached = np.array([0.0, 1, 1024, 4096]), np.array([0.0, 1024, 8192])
    decodes, kv = np.array([0.0, 256]), np.array([0.0, 8192])
    prefill = 1e-8 * chunk[:, None] * (cached + chunk[:, None] / 2)
    decode = 1e-8 * np.multiply.outer(decodes, kv)
    tables = Tables(
        dense_tokens=tokens,
        dense_s=2e-3 + 1e-4 * tokens,
        sampled_sequences=sequences,
        sampled_s=1e-3 + 5e-5 * sequences,
        prefill_tokens=chunk,
        prefill_kv_tokens=cached,
        decode_sequences=decodes,
        decode_kv_tokens=kv,
        attention_s=prefill[:, :, None, None] + decode,
        between_passes_s=5e-4,
    )
    return tables._replace(**changes)


def toy_profile() -> TableProfile:
    return TableProfile(toy_tables(), METADATA, "toy")


def with_value(values: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    changed = values.copy()
    changed[index] = value
    return changed


def test_a_pass_is_the_sum_of_dense_attention_head_and_pause():
    seconds = toy_profile().decode_s(sequences=64, kv_tokens=1000)
    assert seconds == pytest.approx((2e-3 + 64e-4) + 1e-8 * 64 * 1000 + (1e-3 + 64 * 5e-5) + 5e-4)


def test_verifying_drafts_reads_the_kv_cache_once_a_sequence():
    profile = toy_profile()
    plain = profile.pass_s(32, 32, decode_sequences=32, decode_kv_tokens=32 * 500)
    drafted = profile.pass_s(32 * 4, 32, decode_sequences=32, decode_kv_tokens=32 * 500)
    assert drafted - plain == pytest.approx(32 * 3 * 1e-4)


def test_a_mixed_pass_pays_for_prefill_and_decode():
    profile = toy_profile()
    mixed = profile.pass_s(1024 + 8, 9, 1024, 0, 8, 8 * 1000)
    assert mixed == pytest.approx(
        2e-3 + 1032e-4 + 1e-3 + 9 * 5e-5 + 5e-4 + 1e-8 * (1024**2 / 2 + 8 * 1000)
    )


def test_a_hole_is_refused_with_its_place():
    tables = toy_tables()
    holed = tables._replace(attention_s=with_value(tables.attention_s, (2, 1, 1, 0), np.nan))
    with pytest.raises(
        InputError,
        match="toy: table 'attention' has a hole at prefill_tokens 1024, prefill_kv_tokens 1024, "
        "decode_sequences 256, decode_kv_tokens 0; measure that point or drop its tick",
    ):
        TableProfile(holed, METADATA, "toy")


@pytest.mark.parametrize("bad", [np.inf, -1e-3])
def test_times_that_are_no_times_are_refused(bad: float):
    with pytest.raises(InputError, match=r"table 'dense' has (inf|-0.001) s at query_tokens 64"):
        TableProfile(toy_tables(dense_s=np.array([1e-3, bad, 2e-3])), METADATA)


def test_a_time_that_falls_is_refused_with_its_place():
    with pytest.raises(
        InputError, match="toy: table 'dense' falls along query_tokens at query_tokens 4096"
    ):
        TableProfile(toy_tables(dense_s=np.array([1e-3, 3e-3, 2e-3])), METADATA, "toy")
    tables = toy_tables()
    fallen = tables._replace(attention_s=with_value(tables.attention_s, (1, 0, 1, 1), 0.0))
    with pytest.raises(
        InputError,
        match="falls along prefill_tokens at prefill_tokens 1, prefill_kv_tokens 0, decode_seq",
    ):
        TableProfile(fallen, METADATA, "toy")


@pytest.mark.parametrize(
    "ticks", [[1.0, 1.0, 2.0], [3.0, 2.0, 1.0], [-1.0, 1.0, 2.0], [1.0, np.nan, 2.0]]
)
def test_ticks_must_rise(ticks: list[float]):
    with pytest.raises(
        InputError, match="the ticks of query_tokens must be finite, rising and not negative"
    ):
        TableProfile(toy_tables(dense_tokens=np.array(ticks)), METADATA)


@pytest.mark.parametrize("pause", [-1e-3, np.nan, np.inf])
def test_a_pause_that_is_no_time_is_refused(pause: float):
    with pytest.raises(InputError, match="between_passes"):
        TableProfile(toy_tables(between_passes_s=pause), METADATA)


def test_a_profile_comes_back_from_parquet_byte_for_byte(tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    profile = toy_profile()
    write_profile(profile, first)
    again = read_profile(first)
    for before, after in zip(profile.tables, again.tables, strict=True):
        assert np.array_equal(before, after)
    assert again.metadata == profile.metadata
    write_profile(again, second)
    assert first.read_bytes() == second.read_bytes()


def test_a_missing_profile_says_how_to_get_one(tmp_path):
    with pytest.raises(
        InputError, match=r"no such profile; .*derive one with `simrl profile derive`"
    ):
        read_profile(tmp_path / "none.parquet")


def test_files_that_are_no_profile_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"x\.parquet: cannot be read as Parquet"):
        read_profile(path)
    pq.write_table(pq.read_table(_written(tmp_path)).replace_schema_metadata({}), path)
    with pytest.raises(InputError, match=r"x\.parquet: no profile metadata"):
        read_profile(path)
    pq.write_table(pq.read_table(_written(tmp_path)).drop_columns("seconds"), path)
    with pytest.raises(InputError, match=r"x\.parquet: no column 'seconds'"):
        read_profile(path)


@pytest.mark.parametrize(
    ("ticks", "message"),
    [
        (8.0, "table 'straggler' has inf s at sequences 8, share 0; measure that point"),
        (
            float("inf"),
            "table 'straggler': the ticks of sequences must be finite, rising and not negative",
        ),
    ],
)
def test_straggler_seconds_that_are_no_times_are_refused(ticks: float, message: str):
    tables = toy_tables()._replace(
        straggler_sequences=np.array([ticks]),
        straggler_s=np.array([[float("inf") if ticks == 8 else 1e-6, 0.0]]),
        straggler_beside_prefill_s=np.zeros(1),
    )
    with pytest.raises(InputError, match=message):
        TableProfile(tables, METADATA, origin="toy")


def test_a_device_that_never_ends_is_refused():
    with pytest.raises(InputError, match="/dev/zero: is a device; name a file"):
        read_profile("/dev/zero")


def test_rows_of_a_table_that_nobody_reads_are_refused(tmp_path):
    table = pq.read_table(_written(tmp_path))
    names = [
        "stragler" if name == "sampled" else name for name in table.column("table").to_pylist()
    ]
    path = tmp_path / "x.parquet"
    pq.write_table(table.set_column(0, "table", pa.array([*names[:-1], "betwen_passes"])), path)
    with pytest.raises(
        InputError, match=r"unknown table 'stragler' \(did you mean straggler\?\); correct its name"
    ):
        read_profile(path)


def test_a_grid_point_that_is_not_in_the_file_is_a_hole(tmp_path):
    table = pq.read_table(_written(tmp_path))
    path = tmp_path / "cut.parquet"
    row = table.column("table").to_pylist().index("attention") + 3
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), path)
    with pytest.raises(
        InputError, match=r"cut\.parquet: table 'attention' has a hole at prefill_tokens 0"
    ):
        read_profile(path)


def _written(folder):
    path = folder / "whole.parquet"
    write_profile(toy_profile(), path)
    return path


def test_verifying_costs_tokens_and_logits_at_every_position_and_reads_the_cache_once():
    profile = toy_profile()
    assert profile.verify_s(16, 0, 1000) == profile.decode_s(16, 1000)
    by_hand = (2e-3 + 16 * 5 * 1e-4) + (1e-3 + 16 * 5 * 5e-5) + 1e-8 * 16 * 1000 + 5e-4
    assert profile.verify_s(16, 4, 1000) == pytest.approx(by_hand)
    extra_tokens = profile.verify_s(16, 4, 1000) - profile.decode_s(16, 1000)
    assert extra_tokens == pytest.approx(profile.verify_s(16, 4, 8000) - profile.decode_s(16, 8000))


def test_drafts_of_different_lengths_cost_what_their_mean_does():
    profile = toy_profile()
    assert profile.verify_s(16, 2.5, 1000) == pytest.approx(
        profile.pass_s(56, 56, 0, 0, 16, 16 * 1000)
    )


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ((4097, 1, 1), "tokens in a pass"),
        ((1, 257, 1), "sampled sequences"),
        ((4096, 32, 1, 257), "sampled positions"),
        ((1, 1, 8193), "tokens of a decoding sequence"),
    ],
)
def test_limits_beyond_a_grid_are_refused(limits: tuple[int, ...], what: str):
    toy_profile().require_covers(4096, 256, 8192, 256)
    with pytest.raises(InputError, match=f"toy: profiled up to .* {what}"):
        toy_profile().require_covers(*limits)


def test_all_limits_beyond_a_grid_are_named_at_once():
    told = (
        "toy: profiled up to 4096 tokens in a pass (max_num_batched_tokens), the scenario needs 5000; "
        "up to 256 sampled sequences (max_num_seqs), the scenario needs 300; lower those limits or profile further"
    )
    with pytest.raises(InputError, match=re.escape(told)):
        toy_profile().require_covers(5000, 300, 8192)


def test_corrections_scale_passes_and_leave_the_pause():
    profile = toy_profile()
    corrected = profile.with_corrections(forward=1.25)
    assert corrected.decode_s(64, 1000) - 5e-4 == pytest.approx(
        1.25 * (profile.decode_s(64, 1000) - 5e-4)
    )
    longer_pause = profile.with_corrections(between_passes_s=2e-3)
    assert longer_pause.decode_s(64, 1000) - profile.decode_s(64, 1000) == pytest.approx(1.5e-3)


def test_no_pass_is_shorter_than_its_launch_and_longer_ones_stay():
    profile = toy_profile()
    short_s, long_s = profile.decode_s(1, 10), profile.decode_s(64, 4000)
    launched = profile.with_corrections(least_pass_s=(short_s + long_s) / 2)
    assert launched.decode_s(1, 10) == pytest.approx((short_s + long_s) / 2 + 5e-4)  # and the pause
    assert launched.decode_s(64, 4000) == long_s
    assert any("least_pass_s" in said for said in launched.corrections)
    with pytest.raises(ValueError, match="least_pass_s"):
        write_profile(launched, "nowhere.parquet")


@pytest.mark.parametrize("least_pass_s", [0.0, 0.0012])
def test_tau_is_the_sum_of_the_passes(least_pass_s):
    profile = toy_profile().with_corrections(least_pass_s=least_pass_s)
    by_hand = sum(profile.decode_s(4, i + 1) for i in range(50))
    assert RolloutTimes(profile, 50).batch_s(50, 4) == pytest.approx(by_hand, rel=1e-3)
    assert RolloutTimes(profile, 50).table([[50.0]], [8], 2)[0, 1] == pytest.approx(
        by_hand, rel=1e-3
    )


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 16), st.integers(1, 64))
@examples(60)
def test_tau_grows_with_length_and_shrinks_with_workers(a: int, b: int, dp: int, samples: int):
    profile = toy_profile()
    short, long = sorted((a, b))
    seconds = RolloutTimes(profile, 4000).table([[short], [long]], [samples, samples], dp + 1)
    assert (np.diff(seconds, axis=0) >= 0).all() and (np.diff(seconds, axis=1) <= 0).all()
    drafted = RolloutTimes(profile, 4000).table(
        [[short], [long]], [samples] * 2, dp + 1, [Drafted(2.0)] * 2
    )
    assert (drafted <= seconds).all()


@given(st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 8192)), min_size=1, max_size=8))
@examples(200)
def test_the_equivalent_chunk_keeps_the_attention_work(chunks: list[tuple[int, int]]):
    tokens = float(sum(c for c, _ in chunks))
    work = sum(c * (k + c / 2) for c, k in chunks)
    chunk, context = equivalent_chunk(tokens, work)
    assert chunk * (context + chunk / 2) == pytest.approx(work, rel=1e-9)
    assert context >= 0.0 and chunk <= tokens * (1 + 1e-12)
    if context > 0.0:
        assert chunk == tokens


def test_one_chunk_is_its_own_equivalent():
    assert equivalent_chunk(512.0, 512.0 * (100.0 + 256.0)) == (512.0, pytest.approx(100.0))


def test_settings_that_differ_from_those_of_the_measurement_are_told():
    metadata = METADATA.model_copy(
        update={"settings": {"block_size": 32, "tp": 1, "temperature": 1.0, "repeats": 5}}
    )
    engine = {"block_size": 16, "tp": 1, "temperature": 1, "max_num_seqs": 8}
    assert setting_differences(metadata, engine) == [
        "profile was measured with block_size 32, the engine has 16; simrl measure --block-size 16 makes one for it"
    ]
    assert setting_differences(METADATA, engine) == []  # a derived profile says nothing of engines


GRID = (np.array([0.0, 1, 5]), np.array([0.0, 2, 3]), np.array([1.0, 4]), np.array([0.5, 7]))
POINT = st.tuples(*(st.floats(-1, 10, allow_nan=False) for _ in GRID))


@given(st.integers(0, 2**32 - 1), POINT, POINT)
@examples(200)
def test_interpolation_never_falls_where_the_grid_does_not(
    seed: int, x: tuple[float, ...], y: tuple[float, ...]
):
    values = settled(np.random.default_rng(seed).random([g.size for g in GRID]))
    low = tuple(map(min, x, y))
    high = tuple(map(max, x, y))
    assert interpolate4(*GRID, values, low) <= interpolate4(*GRID, values, high) + 1e-12
    corner = tuple(float(g[-1]) for g in GRID)
    assert interpolate4(*GRID, values, corner) == values[-1, -1, -1, -1]
