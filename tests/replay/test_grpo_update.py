"""An update is the gradient of its objective, whatever the micro-batches; stale tokens are judged by who drew them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from simrl.errors import StoppedError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from simrl_replay.grpo import update as module  # noqa: E402
from simrl_replay.grpo.loss import LossConfig  # noqa: E402
from simrl_replay.grpo.policy import PolicyConfig, TokenIds, log_probs, make_policy  # noqa: E402
from simrl_replay.grpo.update import Trajectory, UpdateConfig, make_optimizer, update  # noqa: E402

pytestmark = pytest.mark.vllm  # what it needs comes with it

SHAPE = PolicyConfig(layers=1, hidden=32, heads=1, kv_heads=1, intermediate=32)
FREE = UpdateConfig(grad_norm=1e9, micro_batch_tokens=50)  # the gradient as it is
torch.set_num_threads(1)


def policy(seed=0):
    model = make_policy(SHAPE, 32, 64, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def weights_of(model):
    return {name: weights.detach().clone() for name, weights in model.state_dict().items()}


def batch(rewards=((1, 0, 0), (0, 1, 1)), segments=((3, 1.0),)):
    """Groups of responses of 4, 8, 12 … tokens; `segments` are (version, share of the tokens)."""
    draws = np.random.default_rng(0)
    out = []
    for group, own in enumerate(rewards):
        for reward in own:
            tokens = 4 * (len(out) + 1)
            made = tuple((version, int(tokens * share)) for version, share in segments)
            ids = TokenIds(
                draws.integers(2, 32, 3).tolist(), draws.integers(2, 32, tokens).tolist()
            )
            out.append(Trajectory(ids, float(reward), group, made))
    return out


def change(model, trajectories, config=FREE, past=None, version=3):
    """What a step of plain gradient descent changes, and the statistics."""
    before = weights_of(model)
    stats = update(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        trajectories,
        version,
        past or {},
        config,
    )
    return {name: weights - before[name] for name, weights in model.state_dict().items()}, stats


def assert_close(one, other, tolerance=1e-5):
    for name in one:
        assert torch.allclose(one[name], other[name], atol=tolerance, rtol=1e-3), name


def test_an_update_on_policy_is_the_policy_gradient_over_all_tokens():
    model, trajectories = policy(), batch()
    gain = {(0, 1.0): 2**0.5, (0, 0.0): -(2**-0.5), (1, 1.0): 2**-0.5, (1, 0.0): -(2**0.5)}
    loss = 0.0
    for t in trajectories:
        ids = torch.tensor([[*t.ids.prompt, *t.ids.response]])
        likely = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        loss = loss - gain[t.group, t.reward] * likely.gather(-1, ids[0, 3:, None]).sum()
    (loss / sum(len(t.ids.response) for t in trajectories)).backward()
    expected = {name: -weights.grad for name, weights in model.named_parameters()}
    model.zero_grad()
    got, stats = change(model, trajectories)
    assert_close({name: got[name] for name in expected}, expected)
    assert (
        stats.kl == pytest.approx(0, abs=1e-9) and stats.clip_fraction == stats.capped_fraction == 0
    )
    assert stats.importance_weight == 1.0
    norm = sum(float((g**2).sum()) for g in expected.values()) ** 0.5
    assert stats.grad_norm == pytest.approx(norm, rel=1e-3)
    assert (stats.responses, stats.tokens) == (6, 84)


@pytest.mark.parametrize("objective", ["decoupled", "ppo"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_micro_batches_do_not_change_an_update(objective, micro_batch_tokens):
    past = {2: weights_of(policy(1))}
    trajectories = batch(segments=((2, 0.5), (3, 0.5)))
    config = FREE.model_copy(update={"objective": objective, "minibatches": 2, "ppo_epochs": 2})
    other = config.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    one, stats = change(policy(), trajectories, config, past)
    again, other_stats = change(policy(), trajectories, other, past)
    assert_close(one, again)
    assert (
        stats.kl == pytest.approx(other_stats.kl, rel=1e-3) and stats.kl > 0
    )  # later steps left the proximal policy


def test_groups_of_equal_rewards_change_nothing_and_may_be_dropped():
    equal = batch(rewards=((1, 1, 1), (0, 0, 0)))
    moved, stats = change(policy(), equal)
    assert not any(weights.any() for weights in moved.values())
    assert (stats.responses, stats.dropped_responses, stats.grad_norm) == (6, 0, 0.0)
    dropping = FREE.model_copy(update={"drop_equal_groups": True})
    moved, stats = change(policy(), equal, dropping)
    assert not any(weights.any() for weights in moved.values())
    assert (stats.responses, stats.dropped_responses, stats.tokens) == (0, 6, 0)
    mixed = batch(rewards=((1, 0), (1, 1), (0, 1)))
    without = [t for t in mixed if t.group != 1]
    assert_close(change(policy(), mixed, dropping)[0], change(policy(), without)[0], 0.0)
    kept, left = (sum(len(t.ids.response) for t in each) for each in (without, mixed))
    scaled = {name: weights * kept / left for name, weights in change(policy(), without)[0].items()}
    assert_close(change(policy(), mixed)[0], scaled)


@pytest.mark.parametrize("objective", ["decoupled", "ppo"])
def test_every_token_is_judged_by_the_weights_that_drew_it(objective):
    versions = {1: policy(1), 2: policy(2), 3: policy(3)}
    trajectories = [
        *batch(segments=((1, 0.25), (2, 0.5), (3, 0.25))),
        *batch(segments=((3, 1.0),)),
        *batch(segments=((1, 1.0),)),
    ]
    ids = [t.ids for t in trajectories]
    drew = module._drew(trajectories)
    expected = torch.empty(len(drew))
    for version, model in versions.items():
        expected[drew == version] = log_probs(model, ids, 1000)[drew == version]
    past = {version: weights_of(versions[version]) for version in (1, 2)}
    config = FREE.model_copy(update={"objective": objective})
    proximal, behaviour = module._log_prob_phase(versions[3], trajectories, 3, past, config)
    assert torch.allclose(behaviour, expected, atol=1e-5)
    near = behaviour if objective == "ppo" else log_probs(versions[3], ids, 1000)
    assert torch.allclose(proximal, near, atol=1e-5)


def test_a_past_version_computes_only_what_it_drew_and_what_came_before(monkeypatch):
    passes = []

    def counted(model, sequences, tokens, weights=None):
        passes.append((weights is not None, [len(each.response) for each in sequences]))
        return log_probs(model, sequences, tokens, weights)

    monkeypatch.setattr(module, "log_probs", counted)
    past = {2: weights_of(policy(2))}
    trajectories = [*batch(((1, 0),), segments=((2, 0.5), (3, 0.5))), *batch(((1, 0),))]
    change(policy(), trajectories, past=past)
    assert passes == [(False, [4, 8, 4, 8]), (True, [2, 4])]
    passes.clear()
    change(policy(), batch())
    assert len(passes) == 1  # on policy, proximal and behaviour are one pass


def test_without_clips_decoupling_changes_nothing_but_with_them_stale_tokens_still_teach():
    """Without clips and cap both objectives are importance sampling from behaviour; clipped around a far behaviour, a token's
    gradient stops before the first step is made."""
    past, trajectories = {2: weights_of(policy(1))}, batch(segments=((2, 1.0),))
    free = LossConfig(clip_low=None, clip_high=None, weight_cap=None)
    moved = [
        change(
            policy(),
            trajectories,
            FREE.model_copy(update={"objective": objective, "loss": free}),
            past,
        )[0]
        for objective in ("decoupled", "ppo")
    ]
    assert_close(*moved)
    fractions = {
        objective: change(
            policy(), trajectories, FREE.model_copy(update={"objective": objective}), past
        )[1].clip_fraction
        for objective in ("decoupled", "ppo")
    }
    assert fractions["decoupled"] == 0.0 < 0.1 < fractions["ppo"]


def test_an_update_is_the_same_every_time_and_its_minibatches_belong_to_seed_and_version():
    config = FREE.model_copy(update={"minibatches": 3, "ppo_epochs": 2})
    first, stats = change(policy(), batch(), config)
    again, stats_again = change(policy(), batch(), config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert replace(stats, log_prob_s=0, train_s=0) == replace(stats_again, log_prob_s=0, train_s=0)
    later = [t._replace(segments=((4, len(t.ids.response)),)) for t in batch()]
    assert not all(
        torch.equal(first[n], w) for n, w in change(policy(), later, config, version=4)[0].items()
    )


def test_gradients_are_cut_to_their_length():
    moved, stats = change(policy(), batch(), FREE.model_copy(update={"grad_norm": 0.01}))
    assert sum(float((weights**2).sum()) for weights in moved.values()) ** 0.5 == pytest.approx(
        0.01, rel=1e-2
    )
    assert stats.grad_norm > 0.01


def test_updates_make_what_was_rewarded_likelier():
    model, trajectories = policy(), batch()
    config = UpdateConfig(learning_rate=1e-3)
    optimizer = make_optimizer(model, config)

    def mean_of(reward):
        return float(
            log_probs(model, [t.ids for t in trajectories if t.reward == reward], 1000).mean()
        )

    before = mean_of(1), mean_of(0)
    for version in range(5):
        fresh = [t._replace(segments=((version, len(t.ids.response)),)) for t in trajectories]
        update(model, optimizer, fresh, version, {}, config)
    assert mean_of(1) > before[0] and mean_of(0) < before[1]


def test_tokens_of_a_version_without_weights_and_segments_that_are_not_the_response_are_refused():
    with pytest.raises(ValueError, match="tokens of policy version 2, whose weights are not there"):
        change(policy(), batch(segments=((2, 1.0),)))
    [first, *_] = batch()
    with pytest.raises(ValueError, match="a response of 4 tokens has the segments"):
        change(policy(), [first._replace(segments=((3, 2),))])


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stops_the_update_and_leaves_the_weights(broken):
    model = policy()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = broken
    before = weights_of(model)
    with pytest.raises(
        StoppedError, match=r"the gradient is not finite .*; a lower learning_rate may help"
    ):
        update(model, make_optimizer(model, FREE), batch(), 3, {}, FREE)
    assert all(
        torch.equal(before[n], w) or n == "lm_head.weight" for n, w in model.state_dict().items()
    )


def test_weights_in_bfloat16_follow_float32_masters_that_gather_all_micro_batches():
    exact, rounded = policy(), policy().bfloat16()
    for model in (exact, rounded):
        with torch.no_grad():
            for one, weights in zip(
                model.parameters(), policy().bfloat16().parameters(), strict=True
            ):
                one.copy_(weights)
    config = UpdateConfig(
        micro_batch_tokens=50, learning_rate=1e-6
    )  # a step that bfloat16 cannot express
    optimizers = [make_optimizer(model, config) for model in (exact, rounded)]
    for version in range(3):
        fresh = [t._replace(segments=((version, len(t.ids.response)),)) for t in batch()]
        for model, optimizer in zip((exact, rounded), optimizers, strict=True):
            update(model, optimizer, fresh, version, {}, config)
    masters = optimizers[1].param_groups[0]["params"]
    for start, weights, master, own in zip(
        policy().parameters(), exact.parameters(), masters, rounded.parameters(), strict=True
    ):
        assert own.dtype == torch.bfloat16 and torch.equal(own, master.bfloat16())
        moved, expected = master - start.bfloat16().float(), weights - start.bfloat16().float()
        assert (
            torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.8
        )


def test_log_probs_are_reported_before_the_first_step():
    model, seen = policy(), []
    before = weights_of(model)

    def known(seconds):
        seen.append(seconds)
        assert all(
            torch.equal(before[name], weights) for name, weights in model.state_dict().items()
        )

    stats = update(model, make_optimizer(model, FREE), batch(), 3, {}, FREE, known)
    assert seen == [stats.log_prob_s]
