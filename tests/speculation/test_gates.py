from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import read_profile
from simrl.speculation.choices import Elastic
from simrl.speculation.draft_times import DraftTimes, eagle_drafts, text_drafts
from simrl.speculation.gates import (
    ELASTIC_OFF,
    ELASTIC_ON,
    batch_gate,
    gate_allows,
    next_elastic,
    typical_drafts,
)
from simrl.speculation.passes import next_window
from simrl.speculation.windows import Aimd, Fixed, Mimd
from tests.profile.test_profile import toy_profile

PROFILES = Path(__file__).parents[2] / "profiles"
FREE = DraftTimes(
    np.array([1.0, 256.0]),
    np.zeros(2),
    np.zeros(2),
    0.0,
    0.0,
    "assumed",
    "drafts that cost nothing",
)


def simulated_window(rule, p, passes=60_000):
    """Mean tokens drafted, and the share accepted, of a window that lives through so many passes."""
    rng = np.random.default_rng(5)
    window, drafted, accepted = rule.start_tokens, 0, 0
    for misses in rng.geometric(1.0 - p, size=passes) if p < 1 else np.full(passes, 10**6):
        right = min(int(misses) - 1, window)
        drafted, accepted = drafted + window, accepted + right
        window = next_window(rule, window, window, right)
    return drafted / passes, accepted / drafted


@pytest.mark.parametrize("window", [Aimd(), Mimd(), Fixed(tokens=5)], ids=lambda w: w.kind)
@pytest.mark.parametrize("p", [0.3, 0.8, 0.95])
def test_a_typical_draft_is_what_a_window_settles_at(window: Aimd | Mimd | Fixed, p: float):
    drafted, rate = simulated_window(window.rule, p)
    expected = np.interp(rate, np.arange(101) / 100, typical_drafts(window.rule))
    assert expected == pytest.approx(drafted, rel=0.03)


def test_windows_settle_at_their_bounds_where_all_or_nothing_is_accepted():
    for window, least, most in ((Aimd(), 2, 32), (Mimd(), 2, 16), (Fixed(tokens=5), 5, 5)):
        drafts = typical_drafts(window.rule)
        assert drafts.shape == (101,)
        assert (drafts[0], drafts[100]) == (pytest.approx(least), pytest.approx(most))
        assert (np.diff(drafts) >= -1e-9).all()


ROOM = 256  # tokens of a pass


def pays(profile, times, batch, drafted, rate, kv_tokens):
    """The definition, by the profile's own functions."""
    plain = batch / profile.decode_s(batch, kv_tokens)
    verified = min(batch, ROOM // (drafted + 1))
    seconds = profile.verify_s(verified, drafted, kv_tokens) + times.draft_s(batch, drafted)
    return verified * (1 + rate * drafted) / seconds > plain


@pytest.mark.parametrize(
    "times",
    [FREE, text_drafts(), replace(text_drafts(), round_s=2e-3 + text_drafts().round_s)],
    ids=["free", "text", "slow"],
)
def test_thresholds_are_the_largest_batches_at_which_speculating_yields_more(times: DraftTimes):
    profile, window = toy_profile(), Fixed(tokens=4)
    thresholds = batch_gate(profile, times, window.rule, 2000, most_sequences=120, most_tokens=ROOM)
    for percent in (0, 20, 40, 60, 80, 100):
        paying = [b for b in range(1, 121) if pays(profile, times, b, 4, percent / 100, 2000)]
        assert thresholds[percent] == max(paying, default=0)
    assert thresholds[0] == 0  # what accepts nothing never pays
    assert (np.diff(thresholds) >= 0).all()


def test_a_dearer_drafter_shuts_the_gate_earlier():
    rule = Fixed(tokens=4).rule
    free = batch_gate(toy_profile(), FREE, rule, 2000, 51, ROOM)
    dear = batch_gate(
        toy_profile(),
        replace(text_drafts(), round_s=1e-4 * text_drafts().sequences),
        rule,
        2000,
        51,
        ROOM,
    )
    assert (dear <= free).all() and dear.sum() < free.sum()


def test_drafts_that_do_not_fit_a_pass_wait_and_may_still_pay():
    rule, profile = Fixed(tokens=4).rule, toy_profile()  # the toy samples up to 256 positions
    open_to = batch_gate(profile, FREE, rule, 2000, 256, ROOM)[100]
    assert open_to > ROOM // 5
    assert pays(profile, FREE, int(open_to), 4, 1.0, 2000)
    assert batch_gate(profile, FREE, rule, 2000, 256, ROOM // 4)[100] < open_to


def test_a_gate_refuses_what_nobody_profiled():
    with pytest.raises(InputError, match="profiled up to 256 sampled sequences"):
        batch_gate(toy_profile(), FREE, Aimd().rule, 2000, 300, ROOM)
    short = DraftTimes(
        np.array([1.0, 8.0]), np.zeros(2), np.zeros(2), 0.0, 0.0, "assumed", "a test"
    )
    with pytest.raises(InputError, match="up to 9 sequences, draft times are given for 1 to 8"):
        batch_gate(toy_profile(), short, Aimd().rule, 2000, 9, ROOM)


def test_on_a_shipped_profile_good_history_pays_at_large_batches_and_bad_only_at_small_ones():
    profile = read_profile(PROFILES / "qwen3-14b_h100_tp2.parquet")
    thresholds = batch_gate(
        profile, text_drafts(), Aimd().rule, 4096, most_sequences=256, most_tokens=8192
    )
    assert thresholds[0] == 0 and 0 < thresholds[10] < thresholds[75] <= 256
    heavy = batch_gate(
        profile,
        eagle_drafts(MODELS["qwen3-14b"], GPUS["h100"], 2, 4096),
        Aimd().rule,
        4096,
        256,
        8192,
    )
    free = batch_gate(profile, FREE, Aimd().rule, 4096, 256, 8192)
    assert (heavy <= free).all() and (thresholds <= free).all()


def test_the_gate_opens_by_what_became_of_drafts_of_late():
    thresholds = np.arange(101, dtype=np.int64)
    assert gate_allows(thresholds, 0.0, 0.0, 100)  # nothing known: a try
    assert gate_allows(thresholds, 200.0, 100.0, 50) and not gate_allows(
        thresholds, 200.0, 100.0, 51
    )
    assert gate_allows(thresholds, 1000.0, 496.0, 50)  # 49.6 % counts as 50
    assert not gate_allows(thresholds, 5.0, 0.0, 1)
    assert gate_allows(thresholds, 1e-300, 1e-300, 100)


def states_after(batches, threshold=32, patience=10, state=ELASTIC_OFF):
    states = []
    for running in batches:
        state = next_elastic(state, running, threshold, patience)
        states.append(state)
    return states


def test_the_elastic_gate_opens_after_ten_small_batches_in_a_row():
    assert states_after([40, 32] + [31] * 9) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ELASTIC_ON]
    assert states_after([32] * 9 + [33] + [32] * 9) == [*range(1, 10), 0, *range(1, 10)]


def test_the_elastic_gate_stays_open_until_it_is_reset():
    assert states_after([32] * 10 + [500, 1])[-3:] == [ELASTIC_ON] * 3
    assert states_after([1, 1], patience=1) == [ELASTIC_ON] * 2
    assert (Elastic().threshold, Elastic().patience) == (32, 10)
