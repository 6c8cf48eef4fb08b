"""slime's dumps are pickles: the tests of what is refused need torch, except where it is torch that is missing."""

import importlib.util
import os
import pickle
from functools import partial
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.trace.importers import slime
from simrl.trace.importers.dumps import import_dump

import_slime = partial(import_dump, "slime")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def sample(prompt: list[int], response: list[int], **changes: object) -> dict[str, object]:
    """A sample as slime's `Sample.to_dict` gives it."""
    return {
        "group_index": 0,
        "index": 0,
        "prompt": "text",
        "tokens": [*prompt, *response],
        "response": "text",
        "response_length": len(response),
        "reward": 1.0,
        "status": "completed",
        "loss_mask": [1] * len(response),
        "weight_versions": ["3"],
        "non_generation_time": 0.25,
        "metadata": {},
        **changes,
    }


def save(path: Path, rollout_id: object, *samples: object) -> Path:
    import torch

    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        import_slime(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Malicious:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_folder_without_dumps_is_refused(tmp_path):
    assert "no rollout dump (*.pt)" in refusal(tmp_path)
    (tmp_path / "eval_0.pt").touch()
    assert "no rollout dump (*.pt)" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "none")


@needs_torch
def test_a_slime_dump_gives_ids_rewards_versions_and_times(tmp_path):
    import torch

    save(
        tmp_path / "rollout_10.pt",
        10,
        sample([1, 2], [7], reward=0.0, weight_versions=["9", "10"], loss_mask=None),
        sample(
            [5],
            [6, 6],
            tokens=torch.tensor([5, 6, 6]),
            weight_versions=["default"],
            status="failed",
        ),
    )
    save(
        tmp_path / "rollout_9.pt",
        9,
        sample([1, 2], [8, 9, 9], status="truncated"),
        sample([1, 2], [4], status="aborted"),
    )
    save(tmp_path / "rollout_eval_9.pt", 9, sample([3], [3]))
    trace = import_slime(tmp_path)
    frame = trace.table.to_pandas()
    assert frame[
        ["step", "prompt_id", "sample", "epoch", "prompt_tokens", "response_tokens"]
    ].to_numpy().tolist() == [
        [9, 0, 0, 0, 2, 3],
        [9, 0, 1, 0, 2, 1],
        [10, 0, 0, 1, 2, 1],
        [10, 1, 0, 0, 1, 2],
    ]
    assert trace.table.column("response_ids").to_pylist() == [[8, 9, 9], [4], [7], [6, 6]]
    assert trace.table.column("finish_reason").to_pylist() == ["length", "abort", "stop", None]
    assert trace.table.column("policy_version").to_pylist() == [3, 3, 9, None]
    assert trace.column("environment_s").tolist() == [0.25] * 4
    assert "1 dumps of evaluations were left out" in trace.metadata.notes
    assert trace.metadata.source == f"slime debug rollouts {tmp_path.name}"


@needs_torch
def test_masked_and_empty_responses_are_in_the_notes(tmp_path):
    dump = save(
        tmp_path / "0.pt",
        0,
        sample([1], [2, 3, 4], loss_mask=[1, 0, 0]),
        sample([1], [], status="aborted"),
    )
    trace = import_slime(dump)
    assert len(trace) == 1
    assert trace.table.column("response_ids").to_pylist() == [[2]]
    assert (
        "2 tokens after the last turn of a response, which loss_mask leaves out, are left out"
        in trace.metadata.notes
    )
    assert "1 empty responses" in trace.metadata.notes


def test_a_loss_mask_tells_turns_from_the_output_of_tools(tmp_path, monkeypatch):
    tools = sample([1], [2, 3, 4, 5, 6, 7], loss_mask=[1, 1, 0, 0, 0, 1])
    hidden = sample(
        [1], [2, 3, 4], loss_mask=[0, 0, 1]
    )  # by the trainer, as of an older policy: no tool comes first
    unanswered = sample([1], [2, 3, 4], loss_mask=[1, 0, 0])
    dump = tmp_path / "0.pt"
    handed_over(monkeypatch, dump, tools, hidden, unanswered)
    trace = import_slime(dump)
    assert trace.column("response_tokens").tolist() == [3, 3, 1]
    assert trace.table.column("turn_tokens").to_pylist() == [[2, 1], None, None]
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[3], None, None]
    assert trace.table.column("response_ids").to_pylist() == [[2, 3, 7], [2, 3, 4], [2]]
    assert (
        "1 of 3 responses have several turns, with 3 tokens of observations" in trace.metadata.notes
    )
    assert "between them, by loss_mask" in trace.metadata.notes
    assert "2 tokens after the last turn of a response" in trace.metadata.notes
    (turn,) = trace.responses(0, 1)[0].turns
    assert (turn.end_tokens, turn.observation_tokens) == (2, 3)


def handed_over(monkeypatch, dump, *samples):
    """What a reader with torch would hand over."""
    dump.touch()
    read = [
        (dump, f"{dump}: sample {i}", {**fields, "rollout_id": 0})
        for i, fields in enumerate(samples)
    ]
    monkeypatch.setattr(slime, "read", lambda files: iter(read))


@needs_torch
def test_rewards_that_are_dictionaries_need_a_key(tmp_path):
    dump = save(tmp_path / "0.pt", 0, sample([1], [2], reward={"right": 0.5, "form": 1}))
    assert "has the keys right, form; choose one with reward_key" in refusal(dump)
    assert "no field 'style'" in refusal(dump, reward_key="style")
    assert import_slime(dump, reward_key="right").column("reward").tolist() == [0.5]


@needs_torch
@pytest.mark.parametrize("by_torch", [True, False])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, by_torch):
    made = tmp_path / "made"
    dump = tmp_path / "0.pt"
    if by_torch:
        save(dump, 0, sample([1], [2]), sample([1], [2], metadata=Malicious(made)))
        assert (
            "holds posix.mkdir, more than plain data, and loading that could run code: refused"
            in refusal(dump)
        )
    else:
        dump.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [Malicious(made)]}))
        assert "torch cannot load it" in refusal(dump)
    assert not made.exists()
    if by_torch:  # the same file does run its code where it is unpickled
        import torch

        torch.load(dump, weights_only=False)
        assert made.is_dir()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tokens": "abc"}, "field 'tokens' is 'abc'"),
        ({"tokens": [1, -2]}, "field 'tokens' is [1, -2]"),
        ({"response_length": 5}, "response_length is 5 of 2 tokens"),
        ({"response_length": "1"}, "field 'response_length' is '1'"),
        ({"reward": float("inf")}, "field 'reward' is inf"),
        ({"status": 3}, "field 'status' is 3"),
        ({"weight_versions": "3"}, "field 'weight_versions' is '3'"),
        ({"loss_mask": [2]}, "field 'loss_mask' is [2]"),
        ({"loss_mask": [1, 0]}, "loss_mask has 2 values, response_length is 1; they must agree"),
    ],
)
def test_samples_of_the_wrong_form_are_refused(tmp_path, monkeypatch, changes, part):
    dump = tmp_path / "0.pt"
    handed_over(monkeypatch, dump, sample([1], [2]), sample([1], [2], **changes))
    assert f"0.pt: sample 1: {part}" in refusal(dump)


@needs_torch
def test_what_is_no_slime_dump_is_refused(tmp_path):
    import numpy as np
    import torch

    dump = tmp_path / "0.pt"
    assert "holds among the samples a value of type int" in refusal(save(dump, 0, 5))
    assert "holds numpy" in refusal(save(dump, 0, sample([1], [2], reward=np.float64(1))))
    torch.save({"samples": []}, dump)
    assert "holds the keys samples; a slime dump has rollout_id and samples" in refusal(dump)
    save(dump, 0, sample([1], [2]))
    dump.write_bytes(dump.read_bytes()[:300])
    assert "torch cannot load it" in refusal(dump)


@needs_torch
def test_two_dumps_of_one_rollout_are_refused(tmp_path):
    save(tmp_path / "a.pt", 4, sample([1], [2]))
    save(tmp_path / "b.pt", 4, sample([1], [2]))
    assert "b.pt: sample 0: step 4 is also in a.pt" in refusal(tmp_path)
