"""A random model is the same every time, does not repeat itself, and can be drafted from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.passes import run_passes
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd
from simrl_replay.random_model import make_model, nudge
from tests.token_traces import trace_of

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPTS, GROUP, TOKENS = 4, 4, 120


def load(folder: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.Qwen3ForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def sampled(folder: Path, seed: int) -> tuple[NDArray[np.int64], float]:
    """Responses at temperature 1, shape (PROMPTS * GROUP, TOKENS), and the mean entropy of a next token."""
    model, draws, entropies = load(folder), torch.Generator().manual_seed(seed), []
    ids = torch.randint(
        0, 512, (PROMPTS, 8), generator=torch.Generator().manual_seed(0)
    ).repeat_interleave(GROUP, 0)
    cache, tokens = None, []
    with torch.no_grad():
        for _ in range(TOKENS):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, likely = out.past_key_values, out.logits[:, -1].softmax(-1)
            entropies.append(float(-(likely * likely.log()).nan_to_num().sum(-1).mean()))
            ids = torch.multinomial(likely, 1, generator=draws)
            tokens.append(ids)
    return torch.cat(tokens, 1).numpy(), float(np.mean(entropies))


def test_a_seed_makes_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    weights = [make_model(tmp_path / str(i), seed=i // 2) / "model.safetensors" for i in range(3)]
    assert weights[0].read_bytes() == weights[1].read_bytes() != weights[2].read_bytes()


def test_a_random_model_can_be_drafted_from_its_history_across_a_policy_update(
    tmp_path: Path,
) -> None:
    first, entropy = sampled(make_model(tmp_path / "0"), 0)
    second, _ = sampled(nudge(tmp_path / "0", tmp_path / "1"), 1)
    assert 0.3 < entropy < 1
    assert not (second[:, 1:] == second[:, :-1]).any()  # no token calls for itself
    assert np.mean([len(set(response)) for response in second.tolist()]) > 40
    trace = trace_of(
        {(0, p): first[p * GROUP : (p + 1) * GROUP].tolist() for p in range(PROMPTS)}
        | {(1, p): second[p * GROUP : (p + 1) * GROUP].tolist() for p in range(PROMPTS)}
    )
    passes = run_passes(history_runs(trace), trace.column("response_tokens"), Aimd().rule)
    assert 0.3 < passes.of(trace.column("epoch") == 1).acceptance_rate < 0.8


def test_a_nudge_is_small_and_moves_every_matrix(tmp_path: Path) -> None:
    before, after = (
        load(make_model(tmp_path / "0")),
        load(nudge(tmp_path / "0", tmp_path / "1", scale=0.02)),
    )
    for (name, old), new in zip(
        before.state_dict().items(), after.state_dict().values(), strict=True
    ):
        change = (
            float((new - old).std() / old.std())
            if old.dim() > 1
            else float((new - old).abs().max())
        )
        assert change == pytest.approx(0.02 if old.dim() > 1 else 0.0, rel=0.05), name


def test_a_shape_that_is_none_and_a_folder_without_a_model_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="let hidden be an even multiple of heads"):
        make_model(tmp_path / "0", hidden=100, heads=3)
    with pytest.raises(InputError, match="holds no weights"):
        nudge(tmp_path, tmp_path / "1")
    assert not list(tmp_path.iterdir())
