"""Advantages and the objective against a slow reference in plain numpy, and what must hold whatever the numbers are."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from simrl_replay.grpo.loss import LossConfig, advantages, kl, token_losses  # noqa: E402

pytestmark = pytest.mark.vllm  # what it needs comes with it

LOG_PROBS = st.floats(-6, -0.01)
TOKENS = st.lists(
    st.tuples(LOG_PROBS, LOG_PROBS, LOG_PROBS, st.floats(-3, 3)), min_size=1, max_size=20
)
CONFIGS = st.builds(
    LossConfig,
    clip_low=st.none() | st.floats(0.05, 0.9),
    clip_high=st.none() | st.floats(0.05, 3),
    weight_cap=st.none() | st.floats(0.5, 10),
)
NO_CLIP = LossConfig(clip_low=None, clip_high=None, weight_cap=None)


def reference_loss(log_prob, proximal, behaviour, advantage, config):
    """One token, by the formula."""
    ratio = math.exp(log_prob - proximal)
    low = -math.inf if config.clip_low is None else 1 - config.clip_low
    high = math.inf if config.clip_high is None else 1 + config.clip_high
    weight = math.exp(proximal - behaviour)
    if config.weight_cap is not None:
        weight = min(weight, config.weight_cap)
    return -weight * min(ratio * advantage, min(max(ratio, low), high) * advantage)


def reference_advantages(rewards, groups, normalise_std):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        gain = reward - sum(own) / len(own)
        spread = math.sqrt(sum((r - sum(own) / len(own)) ** 2 for r in own) / len(own))
        out.append(0.0 if len(set(own)) == 1 else gain / (spread + 1e-6) if normalise_std else gain)
    return out


def losses_and_gradient(tokens, config):
    """The losses, their gradient by the log-probs, and the statistics."""
    log_probs, proximal, behaviour, gains = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    log_probs = log_probs.clone().requires_grad_()
    out = token_losses(log_probs, proximal, behaviour, gains, config)
    [gradient] = torch.autograd.grad(out.losses.sum(), log_probs)
    return out, gradient


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=24
    ),
    st.booleans(),
)
def test_advantages_are_the_reference_s(scored, normalise_std):
    rewards, groups = zip(*scored, strict=True)
    expected = reference_advantages(rewards, groups, normalise_std)
    assert advantages(rewards, groups, normalise_std).numpy() == pytest.approx(expected, abs=1e-5)


@given(st.floats(-10, 10), st.integers(1, 9), st.booleans())
def test_a_group_of_equal_rewards_has_no_advantage_at_all(reward, size, normalise_std):
    assert (
        advantages([reward] * size + [1, 2], [5] * size + [6, 6], normalise_std)[:size].tolist()
        == [0.0] * size
    )


def test_advantages_of_a_group_sum_to_zero_and_have_unit_deviation_if_asked():
    out = advantages([1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], True)
    assert float(out.sum()) == pytest.approx(0, abs=1e-6)
    assert float(out[:4].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert advantages([1, 0, 0, 0], [0] * 4, False).tolist() == [0.75, -0.25, -0.25, -0.25]


@given(TOKENS, CONFIGS)
def test_losses_are_the_reference_s(tokens, config):
    out, _ = losses_and_gradient(tokens, config)
    assert out.losses.detach().numpy() == pytest.approx(
        [reference_loss(*token, config) for token in tokens], rel=1e-9
    )


@given(TOKENS, CONFIGS)
def test_gradients_are_the_differences_of_the_reference(tokens, config):
    _, gradient = losses_and_gradient(tokens, config)
    for (log_prob, *rest), slope in zip(tokens, gradient.tolist(), strict=True):
        ratio = math.exp(log_prob - rest[0])
        near = [bound for bound in _bounds(config) if abs(ratio - bound) < 1e-3]
        if near:
            continue  # a kink has no slope
        step = 1e-6
        higher, lower = (reference_loss(log_prob + d, *rest, config) for d in (step, -step))
        assert slope == pytest.approx((higher - lower) / (2 * step), rel=1e-4, abs=1e-6)


@given(TOKENS, CONFIGS)
def test_clipping_stops_the_gradient_only_where_the_ratio_has_gone_the_way_that_its_advantage_wants(
    tokens, config
):
    out, gradient = losses_and_gradient(tokens, config)
    low, high = _bounds(config)
    for (log_prob, proximal, _, gain), slope, clipped in zip(
        tokens, gradient, out.clipped, strict=True
    ):
        ratio = math.exp(log_prob - proximal)
        if min(abs(ratio - low), abs(ratio - high)) < 1e-6 or abs(gain) < 1e-3:
            continue
        stopped = (gain > 0 and ratio > high) or (gain < 0 and ratio < low)
        assert bool(clipped) == stopped == (float(slope) == 0.0)


def _bounds(config):
    return (
        -math.inf if config.clip_low is None else 1 - config.clip_low,
        math.inf if config.clip_high is None else 1 + config.clip_high,
    )


@given(TOKENS)
def test_at_ratio_1_and_on_policy_the_gradient_is_the_policy_gradient(tokens):
    on_policy = [(a, a, a, gain) for a, _, _, gain in tokens]
    _, gradient = losses_and_gradient(on_policy, LossConfig())
    assert gradient.numpy() == pytest.approx([-gain for *_, gain in on_policy])


@given(TOKENS)
def test_without_clips_the_decoupled_weight_is_that_of_importance_sampling_from_behaviour(tokens):
    """π_proximal / π_behaviour · π / π_proximal = π / π_behaviour."""
    out, _ = losses_and_gradient(tokens, NO_CLIP)
    expected = [-math.exp(log_prob - behaviour) * gain for log_prob, _, behaviour, gain in tokens]
    assert out.losses.detach().numpy() == pytest.approx(expected, rel=1e-9)


def test_the_weight_is_capped_told_and_takes_no_gradient():
    tokens = [(-1.0, -1.0, -4.0, 1.0), (-1.0, -1.0, -1.5, 1.0)]
    out, gradient = losses_and_gradient(tokens, LossConfig(weight_cap=2.0))
    assert out.capped.tolist() == [True, False]
    assert gradient.tolist() == pytest.approx([-2.0, -math.exp(0.5)])
    proximal = torch.tensor([-1.0], requires_grad=True)
    behaviour = torch.tensor([-2.0], requires_grad=True)
    log_probs = torch.tensor([-1.0], requires_grad=True)
    token_losses(
        log_probs, proximal, behaviour, torch.ones(1), LossConfig()
    ).losses.sum().backward()
    assert proximal.grad is None and behaviour.grad is None and log_probs.grad is not None


@given(LOG_PROBS, LOG_PROBS)
def test_the_kl_estimate_is_never_negative_and_zero_between_equals(a, b):
    one, other = (
        torch.tensor([a, a], dtype=torch.float64),
        torch.tensor([b, a], dtype=torch.float64),
    )
    first, second = kl(one, other).tolist()
    assert first >= -1e-12 and second == 0.0


def test_the_kl_estimate_is_the_kl_divergence_in_the_mean():
    of, policy = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimates = kl(torch.tensor(np.log(policy)), torch.tensor(np.log(of))).numpy()
    assert (of * estimates).sum() == pytest.approx((of * np.log(of / policy)).sum())
