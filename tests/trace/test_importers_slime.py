"""slime's dumps are pickles in a zip: their plain data are read, and everything else is refused. The tests that write with
torch itself are skipped where it is not installed."""

import importlib.util
import os
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.trace.importers import slime
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.torch_file import Unread, read_torch

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
    """Lays down what torch.save does: a zip, not compressed, with a pickle of protocol 2."""
    return zipped(path, pickle.dumps({"rollout_id": rollout_id, "samples": list(samples)}, 2))


def zipped(path: Path, raw: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", raw)
        for key, values in storages.items():
            archive.writestr(f"{path.stem}/data/{key}", values)
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


def test_a_slime_dump_gives_ids_rewards_versions_and_times(tmp_path):
    save(
        tmp_path / "rollout_10.pt",
        10,
        sample([1, 2], [7], reward=0.0, weight_versions=["9", "10"], loss_mask=None),
        sample(
            [5],
            [6, 6],
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


def test_rewards_that_are_dictionaries_need_a_key(tmp_path):
    dump = save(tmp_path / "0.pt", 0, sample([1], [2], reward={"right": 0.5, "form": 1}))
    assert "has the keys right, form; choose one with reward_key" in refusal(dump)
    assert "no field 'style'" in refusal(dump, reward_key="style")
    assert import_slime(dump, reward_key="right").column("reward").tolist() == [0.5]


def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path):
    made = tmp_path / "made"
    dump = save(tmp_path / "0.pt", 0, sample([1], [2]), sample([1], [2], metadata=Malicious(made)))
    assert (
        "holds posix.mkdir, more than plain data, and loading that could run code: refused"
        in refusal(dump)
    )
    raw = pickle.dumps({"rollout_id": 0, "samples": [Malicious(made)]}, 4)
    assert "holds posix.mkdir" in refusal(zipped(dump, raw))
    dump.write_bytes(raw)
    assert "no whole file of torch.save" in refusal(dump)
    assert not made.exists()
    pickle.loads(raw)  # the same bytes do run their code where they are unpickled
    assert made.is_dir()


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "holds os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "holds builtins.eval"),
        (b"\x80\x02cnumpyx\nsystem\n.", "holds numpyx.system"),
        (b"(S'ls'\nios\nsystem\n.", "its pickle has STRING"),
        (b"\x80\x02\x82\x01.", "its pickle has EXT1"),
        (b"\x80\x02h\x00.", "no whole file"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "no whole file"),
        (b"\x80\x02]q\x00h\x00a.", "holds [[[["),
        (b"", "no whole file"),
    ],
)
def test_operations_that_plain_data_do_not_need_are_refused(tmp_path, raw, part):
    assert part in refusal(zipped(tmp_path / "0.pt", raw))


def test_a_value_that_repeats_itself_without_end_does_not_fill_the_memory(tmp_path):
    laughs: list[object] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    assert "field 'reward' is [[[[" in refusal(
        save(tmp_path / "0.pt", 0, sample([1], [2], reward=laughs))
    )


class Tensor:
    """A tensor, as torch's pickles write one: a call with a storage that is in the zip."""

    def __init__(self, kind: str, key: str, offset: int, size: tuple, stride: tuple) -> None:
        self.storage, self.rest = ("storage", kind, key, "cpu", 9), (offset, size, stride)


def with_tensors(value: object) -> bytes:
    """The pickle of a value, in which texts of a form stand for the names and storages of torch's tensors."""
    import io
    import sys
    import types

    kinds = ("LongStorage", "ByteStorage", "HalfStorage", "BFloat16Storage")
    names = {"torch": kinds, "torch._utils": ("_rebuild_tensor_v2",)}
    fakes = {name: types.ModuleType(name) for name in names}
    for module, held in names.items():
        for name in held:
            made = type(name, (), {"__module__": module, "__qualname__": name})
            setattr(fakes[module], name, made)

    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            if not isinstance(item, tuple) or item[:1] != ("storage",):
                return None
            return (item[0], getattr(fakes["torch"], item[1]), *item[2:])

        def reducer_override(self, item):
            if not isinstance(item, Tensor):
                return NotImplemented
            call = fakes["torch._utils"]._rebuild_tensor_v2
            return call, (item.storage, *item.rest, False, {})

    real = {name: sys.modules.get(name) for name in names}
    out = io.BytesIO()
    try:
        sys.modules.update(fakes)
        Pickler(out, 2).dump(value)
    finally:
        for name, module in real.items():
            sys.modules.pop(name)
            sys.modules.update({name: module} if module else {})
    return out.getvalue()


def test_tensors_of_one_dimension_are_lists_and_others_stay_unread(tmp_path):
    ids = struct.pack("<9q", *range(9))
    value = {
        "strided": Tensor("LongStorage", "a", 1, (3,), (2,)),
        "bytes": Tensor("ByteStorage", "b", 0, (2,), (1,)),
        "square": Tensor("LongStorage", "a", 0, (3, 3), (3, 1)),
    }
    read = read_torch(zipped(tmp_path / "0.pt", with_tensors(value), a=ids, b=b"\x07\x09"))
    assert read["strided"] == [1, 3, 5] and read["bytes"] == [7, 9]
    assert read["square"] == Unread("torch._utils _rebuild_tensor_v2")
    tokens = sample([1], [2, 3], tokens=Tensor("LongStorage", "a", 4, (3,), (1,)))
    dump = zipped(tmp_path / "0.pt", with_tensors({"rollout_id": 5, "samples": [tokens]}), a=ids)
    assert import_slime(dump).table.column("response_ids").to_pylist() == [[5, 6]]
    dump = zipped(tmp_path / "0.pt", with_tensors({"rollout_id": 5, "samples": [tokens]}))
    assert "no whole file of torch.save" in refusal(dump)


@needs_torch
def test_what_torch_itself_writes_is_read(tmp_path):
    import numpy as np
    import torch

    routed = {"rollout_routed_experts": torch.zeros((3, 4, 2), dtype=torch.uint8)}
    samples = [
        sample(
            [1], [2, 3], tokens=torch.tensor([1, 2, 3]), loss_mask=torch.tensor([1, 1]), **routed
        ),
        sample([1], [5], reward=np.float64(0.5), routed=np.zeros((2, 3))),
    ]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    trace = import_slime(tmp_path / "3.pt")
    assert trace.table.column("response_ids").to_pylist() == [[2, 3], [5]]
    assert trace.column("reward").tolist() == [1.0, 0.5]


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


def test_what_is_no_slime_dump_is_refused(tmp_path):
    dump = tmp_path / "0.pt"
    assert "0.pt: sample 0: 5 is not a JSON object" in refusal(save(dump, 0, 5))
    zipped(dump, pickle.dumps({"samples": []}, 2))
    assert "holds the keys samples; a slime dump has rollout_id and samples" in refusal(dump)
    zipped(dump, pickle.dumps([1], 2))
    assert "holds [1]; a slime dump has rollout_id and samples" in refusal(dump)
    save(dump, 0, sample([1], [2]))
    dump.write_bytes(dump.read_bytes()[:300])
    assert "no whole file of torch.save" in refusal(dump)


def test_two_dumps_of_one_rollout_are_refused(tmp_path):
    save(tmp_path / "a.pt", 4, sample([1], [2]))
    save(tmp_path / "b.pt", 4, sample([1], [2]))
    assert "b.pt: sample 0: step 4 is also in a.pt" in refusal(tmp_path)


def test_compressed_and_repeating_dumps_do_not_fill_the_memory(tmp_path):
    dump = tmp_path / "0.pt"
    with zipfile.ZipFile(dump, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0/data.pkl", b"\x80\x02" + b"N" * 10_000_000 + b".")
    assert "its parts are compressed or overlap" in refusal(dump)
    views = [Tensor("ByteStorage", "a", 0, (100_000,), (1,)) for _ in range(200)]
    zipped(dump, with_tensors({"samples": views}), a=bytes(100_000))
    assert "its pickle makes far more values than such a file holds" in refusal(dump)
    raw = b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"Nu."  # a key whose hash overflows the stack
    assert "a key is no text or number" in refusal(zipped(dump, raw))


@pytest.mark.parametrize(
    ("start", "size", "stride"),
    [
        *[(0, (10,), (1,)), (1, (9,), (1,)), (0, (6,), (2,)), (0, (2,), (10**30,)), (9, (), ())],
        *[(-1, (1,), (1,)), (0, (-1,), (1,)), (0, (1,), (-1,))],
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(tmp_path, start, size, stride):
    raw = with_tensors({"samples": Tensor("LongStorage", "a", start, size, stride)})
    dump = zipped(tmp_path / "0.pt", raw, a=bytes(72))
    assert "no whole file of torch.save" in refusal(dump)


def test_halves_are_numbers_a_tensor_without_dimensions_is_one_and_other_types_stay_unread(
    tmp_path,
):
    value = {
        "half": Tensor("HalfStorage", "h", 0, (2,), (1,)),
        "reward": Tensor("LongStorage", "a", 2, (), ()),
        "empty": Tensor("LongStorage", "e", 0, (0,), (1,)),
        "brain": Tensor("BFloat16Storage", "h", 0, (2,), (1,)),
        "expanded": Tensor("LongStorage", "a", 0, (10**12,), (0,)),
    }
    storages = {"h": struct.pack("<2e", 0.5, 2), "a": struct.pack("<3q", 1, 2, 3), "e": b""}
    read = read_torch(zipped(tmp_path / "0.pt", with_tensors(value), **storages))
    assert (read["half"], read["reward"], read["empty"]) == ([0.5, 2.0], 3, [])
    assert isinstance(read["brain"], Unread) and isinstance(read["expanded"], Unread)
