import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.speculation.bandit import bandit_rule, bandit_state, choose, observe, value
from simrl.speculation.choices import BegMab, Strategy
from simrl.speculation.draws import uniform
from tests.helpers import examples
from tests.references.bandit import BegMabSelector

KEY = 20251116
# Of each number of tokens to verify one, two, three and two strategies, not in the order of their groups.
STRATEGIES = tuple(
    Strategy(*s)
    for s in (
        (8, 4, 16),
        (10, 8, 64),
        (8, 8, 48),
        (6, 8, 48),
        (4, 4, 8),
        (8, 4, 32),
        (6, 4, 32),
        (3, 4, 32),
        (3, 2, 8),
        (5, 8, 16),
    )
)


class SameDraws:
    """What a selector asks of numpy's generator, from the draws that the kernel makes."""

    def __init__(self) -> None:
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return uniform(KEY, self.drawn - 1)

    def integers(self, n: int) -> int:
        return int(self.random() * n)


def parameters(**changes: object) -> BegMab:
    return BegMab.model_validate(
        {
            "strategies": STRATEGIES,
            "batch_thresholds": (1, 2, 5, 21, 64),
            "epsilon": 0.1,
            "window": 300,
            "rule": "paper",
            **changes,
        }
    )


def kernel(settings: BegMab):
    rule = bandit_rule(settings)
    return rule, bandit_state(rule, settings.window)


def passes(number: int, seed: int = 7):
    """Batches from 1 to 300, accept lengths by arm, seconds: noisy, with ties."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        yield (
            int(300 ** rng.random()),
            1 + rng.integers(0, 40, size=len(STRATEGIES)) / 8,
            rng.choice([0.01, 0.0125, 0.02]),
        )


@pytest.mark.parametrize("rule", ["paper", "code"])
@pytest.mark.parametrize("window", [1, 2, 7, 300])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_the_compiled_bandit_chooses_as_the_readable_one_arm_for_arm(
    window: int, epsilon: float, rule: str
):
    settings = parameters(window=window, epsilon=epsilon, rule=rule)
    draws = SameDraws()
    readable = BegMabSelector(settings, draws)
    compiled, state = kernel(settings)
    chosen = np.zeros(len(STRATEGIES), dtype=int)
    for batch, accept_lengths, step_s in passes(4000):
        arm = choose(compiled, state, KEY, batch)
        strategy = readable.choose(batch)
        assert STRATEGIES[arm] == strategy
        observe(compiled, state, KEY, arm, accept_lengths[arm], batch, step_s)
        readable.observe(strategy, accept_lengths[arm], batch, step_s)
        chosen[arm] += 1
    assert state.counts[0, -1] == draws.drawn
    assert (chosen > 0).all()
    for arm, strategy in enumerate(STRATEGIES):
        if len(readable.candidates(10)) > 1 and strategy in readable.candidates(10):
            assert value(compiled, state, arm, 10) == readable.value(strategy, 10)


@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.25, 7.0]), max_size=40), st.integers(1, 12))
@examples(200)
def test_a_value_is_the_median_of_the_latest_rewards(accept_lengths: list[float], window: int):
    settings = parameters(window=window)
    rule, state = kernel(settings)
    for accept_length in accept_lengths:
        observe(rule, state, KEY, 2, accept_length, 2, 0.5)
    latest = [4 * a for a in accept_lengths[-window:]]
    assert value(rule, state, 2, 2) == (np.median(latest) if latest else math.inf)


def test_an_arm_that_is_alone_keeps_no_rewards():
    settings = BegMab(
        strategies=((8, 4, 48), (8, 4, 32), (8, 4, 16), (8, 4, 8))
    )  # the public code's
    rule, state = kernel(settings)
    assert state.arrived.size == 0
    observe(rule, state, KEY, 1, 3.0, 4, 0.01)
    assert [choose(rule, state, KEY, batch) for batch in (1, 2, 4, 5, 20, 21, 500)] == [
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert state.counts[0, -1] == 0  # and no draws


def test_equal_passes_of_one_key_choose_equally_and_those_of_another_do_not():
    def chosen(key):
        rule, state = kernel(parameters(epsilon=0.5))
        arms = []
        for batch, accept_lengths, step_s in passes(500):
            arms.append(choose(rule, state, key, batch))
            observe(rule, state, key, arms[-1], accept_lengths[arms[-1]], batch, step_s)
        return arms

    assert chosen(KEY) == chosen(KEY) != chosen(KEY + 1)


def of_code(**changes: object):
    return kernel(parameters(rule="code", epsilon=0.0, **changes))


def test_by_the_code_each_group_of_batch_sizes_learns_for_itself():
    """The last of three arms is fastest at a batch of 10, and slowest at 11."""
    rule, state = of_code()
    for batch, step_s in ((10, {5: 0.03, 6: 0.02, 7: 0.01}), (11, {5: 0.02, 6: 0.01, 7: 0.03})):
        for _ in range(7):
            arm = choose(rule, state, KEY, batch)
            observe(rule, state, KEY, arm, 3.0, batch, step_s[arm])
    assert [choose(rule, state, KEY, batch) for batch in (10, 11)] == [7, 6]
    assert value(rule, state, 6, 12) == math.inf


def test_by_the_code_batches_from_32_on_share_windows():
    rule, state = of_code()
    observe(rule, state, KEY, 0, 3.0, 39, 0.01)
    assert value(rule, state, 0, 32) == value(rule, state, 0, 35) == 0.0
    assert value(rule, state, 0, 40) == math.inf


def test_by_the_code_a_first_reward_is_0_and_the_next_has_the_median_accept_length():
    rule, state = of_code()
    observe(rule, state, KEY, 6, 3.0, 10, 0.01)
    assert value(rule, state, 6, 10) == 0.0
    observe(rule, state, KEY, 6, 9.0, 11, 0.01)  # of another batch size, which has no median yet
    assert value(rule, state, 6, 11) == pytest.approx(3.0 * 11 / 0.01)


def test_by_the_code_the_first_of_equals_is_the_first_by_name():
    names = ((8, 4, 32), (10, 4, 32), (6, 4, 32))
    for name, first in (("code", 1), ("paper", 0)):
        settings = BegMab(strategies=names, batch_thresholds=(1,), epsilon=0.0, rule=name)
        assert choose(*kernel(settings), KEY, 1) == first


def test_a_batch_that_has_shrunk_out_of_its_bucket_stays_in_the_windows_of_its_arm():
    rule, state = of_code()
    observe(rule, state, KEY, 6, 3.0, 1, 0.01)  # chosen for 5 to 20
    assert value(rule, state, 6, 5) == 0.0 and value(rule, state, 1, 1) == math.inf


@given(st.integers(1, 400), st.sets(st.integers(2, 200), min_size=4, max_size=4))
@examples(100)
def test_the_most_tokens_of_a_pass_are_those_of_its_largest_batch_in_some_bucket(most, more):
    settings = parameters(batch_thresholds=(1, *sorted(more)))
    rule, state = kernel(settings)
    verified = [
        batch * STRATEGIES[choose(rule, state, KEY, batch)].tokens_to_verify
        for batch in range(1, most + 1)
    ]
    assert settings.most_tokens(most) == max(verified)
