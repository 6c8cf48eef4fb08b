"""The control rules of speculation against their publications: sequences and decisions worked out by hand from RhymeRL
(arXiv 2508.18588, §5.4), HistoSpec's public code (verl recipe specRL) and TLT (§5.2, and its code fastrl)."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter, ValidationError

from simrl.speculation.choices import BegMab, Strategy
from simrl.speculation.passes import next_window
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from tests.references.bandit import BegMabSelector

# --- Windows. An event is (drafted, accepted); None: a pass without a draft; "all": the whole window, all accepted.


def windows_after(parameters, events):
    """The window after each event of one response, from its start on."""
    window, seen = parameters.rule.start_tokens, []
    for event in events:
        drafted, accepted = (window, window) if event == "all" else event or (0, 0)
        window = next_window(parameters.rule, window, drafted, accepted)
        seen.append(window)
    return seen


AIMD_BY_HAND = {
    "by 2 while all is accepted": (["all"] * 4, [4, 6, 8, 10]),
    "at most 32, reached after 15 whole drafts": (["all"] * 17, [*range(4, 34, 2), 32, 32]),
    "back to 2 when the last of 8 is rejected": (["all", "all", "all", (8, 7)], [4, 6, 8, 2]),
    "back to 2 when the first is rejected": (["all", "all", (6, 0), "all"], [4, 6, 2, 4]),
    "a rejection at 2 stays at 2": ([(2, 1), (2, 0), (2, 2)], [2, 2, 4]),
    "from 32 straight to 2": (["all"] * 15 + [(32, 31), "all"], [*range(4, 34, 2), 2, 4]),
    "a short draft that was accepted whole is a success": (
        ["all", "all", (1, 1), (3, 3), (3, 2)],
        [4, 6, 8, 10, 2],
    ),
    "no draft, no news": (["all", "all", None, None, "all"], [4, 6, 6, 6, 8]),
}

MIMD_BY_HAND = {
    "doubles while a whole window is accepted, to 16": (["all"] * 5, [4, 8, 16, 16, 16]),
    "halves on a rejection, not below 2": (
        ["all"] * 3 + [(16, 15), (8, 0), (4, 3), (2, 1)],
        [4, 8, 16, 8, 4, 2, 2],
    ),
    "halves without a draft": (["all", "all", None, None, None], [4, 8, 4, 2, 2]),
    "halves if the draft was shorter than the window": (
        ["all", "all", (7, 7), (4, 4)],
        [4, 8, 4, 8],
    ),
    "recovers in as many steps as it lost": (
        ["all", "all", "all", (16, 3), "all"],
        [4, 8, 16, 8, 16],
    ),
}


@pytest.mark.parametrize("case", AIMD_BY_HAND)
def test_the_window_of_the_paper_as_worked_out_by_hand(case):
    events, windows = AIMD_BY_HAND[case]
    assert windows_after(Aimd(), events) == windows


@pytest.mark.parametrize("case", MIMD_BY_HAND)
def test_the_window_of_the_public_code_as_worked_out_by_hand(case):
    events, windows = MIMD_BY_HAND[case]
    assert windows_after(Mimd(), events) == windows


def test_a_maximum_that_no_step_hits_is_met_all_the_same():
    assert windows_after(Aimd(most_tokens=7), ["all"] * 4) == [4, 6, 7, 7]
    assert windows_after(
        Mimd(start_tokens=3, most_tokens=13), ["all", "all", "all", None, None, None]
    ) == [
        *(6, 12, 13),
        *(6, 3, 3),
    ]


def test_a_fixed_window_does_not_move():
    assert windows_after(Fixed(tokens=5), ["all", (5, 0), None, (2, 2)]) == [5, 5, 5, 5]


PASSES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60)
RULES = st.one_of(
    st.builds(Aimd, most_tokens=st.integers(2, 64), increase_tokens=st.integers(1, 40)),
    st.builds(Mimd, most_tokens=st.integers(2, 64), factor=st.integers(2, 5)),
)


@given(RULES, PASSES)
def test_a_window_is_never_below_its_start_nor_above_its_maximum(parameters, passes):
    window = parameters.rule.start_tokens
    for drafted_share, accepted_share in passes:
        drafted = round(drafted_share * window)
        accepted = round(accepted_share * drafted)
        before, window = window, next_window(parameters.rule, window, drafted, accepted)
        assert 2 <= window <= parameters.most_tokens
        assert window <= before or accepted == drafted > 0, "only success makes a window grow"


def test_windows_are_written_by_kind_and_checked():
    window = TypeAdapter(Window)
    assert window.validate_python({"kind": "aimd", "most_tokens": 16}) == Aimd(most_tokens=16)
    assert window.validate_python({"kind": "mimd"}) == Mimd()
    wrong = [
        {"kind": "aimd", "start_tokens": 8, "most_tokens": 4},
        {"kind": "mimd", "factor": 1},
        {"kind": "mimd", "start_tokens": 32},
        {"kind": "fixed"},
        {"kind": "fixed", "tokens": 0},
        {"kind": "aimd", "factor": 2},
        {"kind": "cubic"},
    ]
    for each in wrong:
        with pytest.raises(ValidationError):
            window.validate_python(each)


# --- BEG-MAB


class Draws:
    """A generator that gives what a test says, and fails if asked for anything else."""

    def __init__(self, *draws):
        self.left = list(draws)

    def random(self):
        draw = self.left.pop(0)
        assert isinstance(draw, float)
        return draw

    def integers(self, high):
        draw = self.left.pop(0)
        assert isinstance(draw, int) and 0 <= draw < high
        return draw


# Two or three arms in each bucket but the last; given in no particular order of tokens_to_verify.
WIDE, DEEP, FLAT = Strategy(6, 8, 48), Strategy(10, 8, 48), Strategy(4, 8, 48)
PAIR, PAIR_DEEP = Strategy(6, 8, 32), Strategy(8, 8, 32)
ALONE = Strategy(3, 4, 8)
MANY, MANY_DEEP = Strategy(4, 8, 16), Strategy(6, 8, 16)
ARMS = (PAIR, ALONE, WIDE, MANY, DEEP, FLAT, MANY_DEEP, PAIR_DEEP)

EXPLOIT, EXPLORE = 0.1, 0.0999  # the draw is below epsilon with probability epsilon


def selector(*draws, **parameters):
    return BegMabSelector(BegMab(strategies=ARMS, **{"rule": "paper", **parameters}), Draws(*draws))


@pytest.mark.parametrize(
    ("batch", "group"),
    [
        (1, {WIDE, DEEP, FLAT}),
        (2, {PAIR, PAIR_DEEP}),
        (4, {PAIR, PAIR_DEEP}),
        (5, {MANY, MANY_DEEP}),
        (20, {MANY, MANY_DEEP}),
        (21, {ALONE}),
        (32, {ALONE}),
        (4096, {ALONE}),
    ],
)
def test_the_larger_the_batch_the_fewer_tokens_are_verified(batch, group):
    assert set(selector().candidates(batch)) == group


def test_a_bucket_with_one_strategy_draws_nothing():
    assert selector().choose(21) == ALONE


def test_arms_that_were_never_seen_go_first_in_the_order_given():
    bandit = selector(EXPLOIT, EXPLOIT, EXPLOIT, EXPLOIT)
    for arm in (WIDE, DEEP, FLAT):
        assert bandit.choose(1) == arm
        bandit.observe(arm, 3.0, 1, {WIDE: 0.02, DEEP: 0.01, FLAT: 0.03}[arm])
    assert bandit.choose(1) == DEEP  # 300 tokens/s against 150 and 100


def test_a_choice_alone_makes_no_arm_seen():
    bandit = selector(EXPLOIT, EXPLOIT)
    assert [bandit.choose(1), bandit.choose(1)] == [WIDE, WIDE]


def test_an_arm_is_worth_the_median_of_its_rewards_not_their_mean():
    bandit = selector(EXPLOIT)
    for accept_length in (2.0, 2.0, 100.0):  # median 20 tokens/s, mean 347
        bandit.observe(PAIR, accept_length, 1, 0.1)
    for accept_length in (3.0, 3.0, 1.0):  # median 30, mean 23
        bandit.observe(PAIR_DEEP, accept_length, 1, 0.1)
    assert bandit.value(PAIR, 2) == pytest.approx(20)
    assert bandit.value(PAIR_DEEP, 2) == pytest.approx(30)
    assert bandit.choose(2) == PAIR_DEEP


def test_the_median_of_an_even_number_of_rewards_is_the_mean_of_the_two_in_the_middle():
    bandit = selector()
    for accept_length in (8.0, 1.0, 2.0, 4.0):
        bandit.observe(PAIR, accept_length, 2, 0.5)
    assert bandit.value(PAIR, 2) == 4 * (2 + 4) / 2


def test_a_reward_is_accepted_tokens_of_the_whole_batch_over_the_time():
    bandit = selector(EXPLOIT)
    bandit.observe(MANY, 3.0, 10, 0.05)  # 600 tokens/s
    bandit.observe(MANY_DEEP, 4.0, 10, 0.08)  # accepts more, yet 500
    assert bandit.value(MANY, 10) == pytest.approx(600)
    assert bandit.value(MANY_DEEP, 10) == pytest.approx(500)
    assert bandit.choose(10) == MANY


def test_equal_arms_go_in_the_order_given():
    bandit = selector(EXPLOIT)
    for arm in (PAIR_DEEP, PAIR):
        bandit.observe(arm, 3.0, 2, 0.01)
    assert bandit.choose(2) == PAIR


def test_what_has_left_the_window_is_forgotten():
    bandit = selector(EXPLOIT, EXPLOIT, window=3)
    for accept_length in (9.0, 9.0, 9.0):
        bandit.observe(PAIR, accept_length, 1, 1.0)
    bandit.observe(PAIR_DEEP, 5.0, 1, 1.0)
    bandit.observe(PAIR, 2.0, 1, 1.0)  # 9 9 2
    assert bandit.choose(2) == PAIR
    bandit.observe(PAIR, 2.0, 1, 1.0)  # 9 2 2: with all five rewards the median would still be 9
    assert bandit.value(PAIR, 2) == 2
    assert bandit.choose(2) == PAIR_DEEP


def test_the_window_holds_300_rewards():
    bandit = selector()
    for accept_length in [9.0] * 150 + [1.0] * 150:
        bandit.observe(PAIR, accept_length, 1, 1.0)
    assert bandit.value(PAIR, 2) == 5
    bandit.observe(PAIR, 1.0, 1, 1.0)  # 149 against 151
    assert bandit.value(PAIR, 2) == 1


def test_with_probability_epsilon_any_arm_of_the_bucket_is_drawn():
    bandit = selector(EXPLORE, 2, EXPLORE, 0, EXPLOIT, 0.05, 1)
    for arm, step_s in ((WIDE, 0.3), (DEEP, 0.1), (FLAT, 0.2)):
        bandit.observe(arm, 3.0, 1, step_s)
    assert [bandit.choose(1) for _ in range(4)] == [FLAT, WIDE, DEEP, DEEP]


def test_the_draw_comes_before_unseen_arms_do():
    bandit = selector(EXPLORE, 0)
    bandit.observe(PAIR, 3.0, 2, 0.1)
    assert bandit.choose(2) == PAIR


@pytest.mark.parametrize(
    ("epsilon", "draw", "best"), [(0.0, 0.0, True), (1.0, 0.999, False), (0.3, 0.29, False)]
)
def test_epsilon_is_a_parameter(epsilon, draw, best):
    bandit = selector(draw, *([] if best else [1]), epsilon=epsilon)
    bandit.observe(PAIR, 3.0, 2, 0.1)
    bandit.observe(PAIR_DEEP, 2.0, 2, 0.1)
    assert bandit.choose(2) == (PAIR if best else PAIR_DEEP)


def test_a_bucket_pools_its_batch_sizes():
    """A reward grows with the batch: an arm that was seen at 20 beats one that is faster at 5."""
    bandit = selector(EXPLOIT, EXPLOIT, EXPLOIT)
    bandit.observe(MANY, 2.0, 20, 0.01)  # 4000 tokens/s
    bandit.observe(MANY, 2.0, 5, 0.01)  # 1000; pooled: 2500
    bandit.observe(MANY_DEEP, 4.0, 5, 0.01)  # 2000
    bandit.observe(MANY_DEEP, 1.0, 20, 0.01)  # 2000
    assert [bandit.choose(batch) for batch in (5, 20, 6)] == [MANY, MANY, MANY]


@given(
    st.lists(st.tuples(st.sampled_from([PAIR, PAIR_DEEP]), st.floats(1, 17), st.floats(1e-3, 1))),
    st.integers(1, 9),
)
def test_the_running_median_is_numpys_over_the_last_window(passes, window):
    bandit = selector(window=window)
    rewards = {PAIR: [], PAIR_DEEP: []}
    for arm, accept_length, step_s in passes:
        bandit.observe(arm, accept_length, 3, step_s)
        rewards[arm].append(accept_length * 3 / step_s)
    for arm, all_of_them in rewards.items():
        expected = np.median(all_of_them[-window:]) if all_of_them else np.inf
        assert bandit.value(arm, 3) == pytest.approx(expected, rel=1e-12)


def test_one_seed_one_sequence_and_numpys_global_state_is_left_alone():
    def sequence(seed):
        bandit = BegMabSelector(
            BegMab(strategies=ARMS, rule="paper"), np.random.default_rng([seed, 7])
        )
        chosen = []
        for batch in [1, 2, 3, 4, 5, 20, 30] * 60:
            chosen.append(bandit.choose(batch))
            bandit.observe(chosen[-1], 1 + chosen[-1].draft_depth / 4, batch, 0.01)
        return chosen

    before = np.random.get_state()[1].copy()
    first = sequence(1)
    assert first == sequence(1) != sequence(2)
    assert (np.random.get_state()[1] == before).all()


def test_in_the_long_run_the_best_arm_is_drawn_as_often_as_epsilon_leaves():
    bandit = BegMabSelector(BegMab(strategies=ARMS, rule="paper"), np.random.default_rng(3))
    chosen = []
    for _ in range(4000):
        chosen.append(bandit.choose(1))
        bandit.observe(chosen[-1], 3.0, 1, {WIDE: 0.03, DEEP: 0.02, FLAT: 0.04}[chosen[-1]])
    share = chosen.count(DEEP) / len(chosen)
    assert share == pytest.approx(0.9 + 0.1 / 3, abs=4 * (0.067 * 0.933 / 4000) ** 0.5 + 2 / 4000)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"strategies": []}, "at least 1"),
        ({"strategies": [(6, 8, 0)], "batch_thresholds": [1]}, "greater than or equal to 1"),
        ({"strategies": [(6, 8, 8), (6, 8, 8)], "batch_thresholds": [1]}, "there twice"),
        (
            {"strategies": [(6, 8, 8)]},
            "1 different numbers of tokens, and batch_thresholds makes 4 buckets",
        ),
        ({"strategies": [(6, 8, 8)], "batch_thresholds": [2]}, "begin with 1"),
        ({"strategies": [(6, 8, 8)], "batch_thresholds": []}, "begin with 1"),
        ({"strategies": [(6, 8, 8), (6, 8, 4)], "batch_thresholds": [1, 1]}, "rise"),
        (
            {"strategies": [(6, 8, 8)], "batch_thresholds": [1], "epsilon": 1.5},
            "less than or equal to 1",
        ),
        ({"strategies": [(6, 8, 8)], "batch_thresholds": [1], "epsilon": float("nan")}, "finite"),
        (
            {"strategies": [(6, 8, 8)], "batch_thresholds": [1], "window": 0},
            "greater than or equal to 1",
        ),
    ],
)
def test_parameters_that_make_no_bandit_are_refused(parameters, told):
    with pytest.raises(ValidationError, match=told):
        BegMab.model_validate(parameters)


@pytest.mark.parametrize(
    "observed",
    [
        (Strategy(1, 1, 1), 2.0, 1, 0.1),
        (PAIR, 0.5, 1, 0.1),
        (PAIR, float("nan"), 1, 0.1),
        (PAIR, 2.0, 0, 0.1),
        (PAIR, 2.0, 1, 0.0),
        (PAIR, 2.0, 1, float("inf")),
    ],
)
def test_a_pass_that_cannot_have_been_is_refused(observed):
    with pytest.raises(ValueError, match=r"none of the strategies|no pass accepts"):
        selector().observe(*observed)


def test_an_empty_batch_has_no_strategy():
    with pytest.raises(ValueError, match="a batch of 0"):
        selector().choose(0)
