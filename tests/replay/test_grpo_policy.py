"""A policy's log-probs do not depend on how they were batched, its folders keep it, and vLLM reads it as transformers does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from tests.command_line import environment

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import Qwen3ForCausalLM  # noqa: E402

from simrl_replay.grpo import policy as module  # noqa: E402
from simrl_replay.grpo.policy import (  # noqa: E402
    PolicyConfig,
    TokenIds,
    generate,
    load_policy,
    load_weights,
    log_probs,
    make_policy,
    micro_batches,
    qwen3,
    save_policy,
    token_values,
)

pytestmark = pytest.mark.vllm  # what it needs comes with it

SHAPE = PolicyConfig(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=96)
VOCABULARY, EOS = 32, 1
torch.set_num_threads(1)


def policy(seed=0):
    """A model with opinions: the random weights of a new one make all tokens alike."""
    model = make_policy(SHAPE, VOCABULARY, 128, seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def sequences():
    draws = np.random.default_rng(0)
    return [
        TokenIds(draws.integers(0, 32, 3 + i % 4).tolist(), draws.integers(0, 32, n).tolist())
        for i, n in enumerate([5, 40, 1, 17, 0, 23, 9])
    ]


def one_by_one(model, sequences):
    """The slow way: each response token from a pass over what is before it."""
    out = []
    with torch.no_grad():
        for prompt, response in sequences:
            for i, token in enumerate(response):
                logits = model(input_ids=torch.tensor([[*prompt, *response[:i]]])).logits[0, -1]
                out.append(float(logits.log_softmax(-1)[token]))
    return out


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_micro_batches_hold_every_sequence_once_within_their_tokens(lengths, most_tokens):
    batches = list(micro_batches(lengths, most_tokens))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= most_tokens for b in batches)


@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 10_000])
def test_log_probs_are_those_of_each_token_given_what_is_before_it(sequences, micro_batch_tokens):
    model = policy()
    assert log_probs(model, sequences, micro_batch_tokens).numpy() == pytest.approx(
        one_by_one(model, sequences), abs=1e-4
    )


def test_log_probs_under_other_weights_leave_the_model_its_own(sequences):
    model, other = policy(0), policy(1)
    own = log_probs(model, sequences, 100)
    assert torch.equal(
        log_probs(model, sequences, 100, other.state_dict()), log_probs(other, sequences, 100)
    )
    assert torch.equal(log_probs(model, sequences, 100), own)
    assert not torch.allclose(own, log_probs(other, sequences, 100))


def test_the_output_head_in_parts_changes_neither_values_nor_gradients(sequences, monkeypatch):
    models, values = [policy(), policy()], []
    for model, positions in zip(models, (10_000, 7), strict=True):
        monkeypatch.setattr(module, "HEAD_POSITIONS", positions)
        values.append(token_values(model, sequences))
        values[-1].log_probs.sum().backward()
    whole, parts = values
    assert (
        torch.allclose(whole.log_probs, parts.log_probs, atol=1e-5) and len(parts.log_probs) == 95
    )
    assert torch.allclose(whole.entropies, parts.entropies, atol=1e-5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-3, rtol=1e-3)


def test_entropies_are_those_of_the_distribution_and_gradients_reach_all_weights(sequences):
    model = policy()
    values = token_values(model, [sequences[0]])
    prompt, response = sequences[0]
    likely = (
        model(input_ids=torch.tensor([[*prompt, *response]]))
        .logits[0, len(prompt) - 1 : -1]
        .softmax(-1)
    )
    assert torch.allclose(
        values.entropies, torch.distributions.Categorical(likely).entropy(), atol=1e-5
    )
    values.log_probs.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_seed_makes_the_same_policy_and_leaves_the_draws_of_others_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    same, again, other = (
        make_policy(SHAPE, VOCABULARY, 128, seed).state_dict() for seed in (0, 0, 1)
    )
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not all(torch.equal(same[name], other[name]) for name in same)


def test_a_folder_keeps_a_policy_to_the_bit(tmp_path, sequences):
    model = policy()
    folder = save_policy(model, tmp_path / "policy")
    again = load_policy(folder)
    assert torch.equal(log_probs(model, sequences, 100), log_probs(again, sequences, 100))
    assert all(
        torch.equal(model.state_dict()[name], weights)
        for name, weights in load_weights(folder).items()
    )
    save_policy(policy(1), folder)  # the next version takes its place


def test_a_folder_keeps_tied_embeddings_once(tmp_path, sequences):
    model = Qwen3ForCausalLM(
        qwen3(1, 64, 2, 1, 64, VOCABULARY, 128, head_dim=64, tie_word_embeddings=True)
    )
    folder = save_policy(model, tmp_path / "policy")
    again = load_policy(folder)
    assert (
        "lm_head.weight" not in load_weights(folder)
        and again.lm_head.weight is again.model.embed_tokens.weight
    )
    assert torch.equal(log_probs(model, sequences, 100), log_probs(again, sequences, 100))


def test_what_holds_no_policy_is_told_in_a_line(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    for read in (load_weights, load_policy):
        with pytest.raises(InputError, match=r"holds no weights .*; name a folder of a policy"):
            read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(InputError, match="holds no weights"):
        load_policy(tmp_path)
    folder = save_policy(policy(), tmp_path / "policy")
    make = make_policy(
        PolicyConfig(layers=1, hidden=32, heads=1, kv_heads=1, intermediate=32), VOCABULARY, 128, 0
    )
    make.config.save_pretrained(folder)
    with pytest.raises(InputError, match="holds no policy"):
        load_policy(folder)


def test_shapes_that_vllm_has_no_attention_for_are_refused():
    with pytest.raises(ValueError, match="hidden is a multiple of 32 × heads"):
        PolicyConfig(hidden=100)


def test_greedy_responses_are_what_the_model_finds_most_likely_up_to_their_end(sequences):
    model = policy()
    prompts = [each.prompt for each in sequences]
    responses = generate(model, prompts, 30, EOS, temperature=0, at_once=2)
    for prompt, response in zip(prompts, responses, strict=True):
        for i, token in enumerate(response):
            assert token == int(
                model(input_ids=torch.tensor([[*prompt, *response[:i]]])).logits[0, -1].argmax()
            )
        assert EOS not in response[:-1]
        assert len(response) == 30 or response[-1] == EOS


def test_sampled_responses_belong_to_the_seed_and_follow_the_probabilities():
    model = policy()
    prompts = [[5, 6]] * 2000
    first = [response[0] for response in generate(model, prompts, 1, EOS, seed=1)]
    assert first == [response[0] for response in generate(model, prompts, 1, EOS, seed=1)]
    likely = model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).detach().numpy()
    assert np.bincount(first, minlength=32) / 2000 == pytest.approx(likely, abs=0.05)


def test_some_responses_end_before_others_and_none_is_mixed_up():
    model = policy()
    prompts = [[i, 7] for i in range(2, 30)]
    together = generate(model, prompts, 60, EOS, temperature=0)
    assert together == [generate(model, [prompt], 60, EOS, temperature=0)[0] for prompt in prompts]


GREEDY = """
import json
import sys
from simrl_replay.vllm_adapter import EngineSettings, VllmEngine

engine = VllmEngine(EngineSettings(sys.argv[1], 8, 256, 32, 100, kv_blocks=50, dtype="float32", temperature=0.0))
for i, prompt in enumerate(json.loads(sys.argv[2])):
    engine.add(str(i), prompt, 40)
responses = {}
while engine.unfinished:
    for progress in engine.step():
        responses.setdefault(progress.request_id, []).extend(progress.token_ids)
print(); print([responses[str(i)] for i in range(len(responses))])
"""


@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
def test_vllm_loads_a_policy_and_its_greedy_tokens_are_those_of_transformers(tmp_path: Path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    model, prompts = policy(), [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15]]
    folder = save_policy(model, tmp_path / "policy")
    ran = subprocess.run(
        [sys.executable, "-c", GREEDY, str(folder), str(prompts)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == generate(
        model, prompts, 40, eos=-1, temperature=0
    )
