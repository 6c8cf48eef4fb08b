"""Times of a profile that its GPU does not allow, or that are far from the roofline."""

import numpy as np
import pytest

from simrl.profile.doubt import doubted
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, read_profile, write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.shipped import PROFILES

SHAPE, H100 = model_shape("qwen3-8b"), gpu("h100")


def changed(**fields):
    profile = roofline_profile(SHAPE, H100)
    return TableProfile(profile.tables._replace(**fields), profile.metadata)


def test_a_roofline_is_in_no_doubt():
    profile = roofline_profile(SHAPE, H100)
    assert doubted(profile, SHAPE, H100) == (profile, [])


def test_weights_that_are_read_faster_than_memory_are_lifted_and_named(tmp_path):
    t = roofline_profile(SHAPE, H100).tables
    fast = t.dense_s.copy()
    fast[0] = 1e-3
    lifted, words = doubted(changed(dense_s=fast), SHAPE, H100)
    read_s = 2 * SHAPE.body_parameters / 3.35e12
    assert lifted.tables.dense_s[0] == pytest.approx(read_s)
    np.testing.assert_array_equal(lifted.tables.dense_s[1:], t.dense_s[1:])
    assert words == [
        f"dense at query_tokens 1: {1 - 1e-3 / read_s:.0%} less than reading it once takes at 3.35 TB/s, "
        f"{1 / t.dense_s.size:.1%} of the points; lifted"
    ]
    write_profile(lifted, tmp_path / "p.parquet")
    assert f"in doubt: {words[0]}" in read_profile(tmp_path / "p.parquet").metadata.notes


def test_decoding_reads_its_cache_from_memory():
    t = roofline_profile(SHAPE, H100).tables
    lifted, (words,) = doubted(changed(attention_s=t.attention_s / 1.6), SHAPE, H100)
    full = t.decode_sequences[-1] * t.decode_kv_tokens[-1] * SHAPE.kv_bytes_per_token / 3.35e12
    assert lifted.tables.attention_s[0, 0, -1, -1] == pytest.approx(full)
    assert words.startswith("attention at prefill_tokens") and words.endswith("lifted")


def test_what_is_three_times_from_the_roofline_is_named_and_kept():
    t = roofline_profile(SHAPE, H100).tables
    slow, words = doubted(changed(sampled_s=4 * t.sampled_s), SHAPE, H100)
    np.testing.assert_array_equal(slow.tables.sampled_s, 4 * t.sampled_s)
    assert len(words) == 1 and "4 times the roofline" in words[0]


def test_no_shipped_profile_has_an_impossible_time():
    impossible = set()
    for path in sorted(PROFILES.glob("*.parquet")):
        profile = read_profile(path)
        of = profile.metadata
        _, words = doubted(profile, model_shape(of.model), gpu(of.gpu))
        impossible |= {line.split(":")[0] for line in words if line.endswith("lifted")}
    assert not impossible
