"""slime: the debug dumps of `--save-debug-rollout-data`, one `.pt` a rollout, the richest source there is.

A `.pt` is a pickle, and unpickling runs whatever is in it. So it is never unpickled here: another process reads it with
`torch.load(weights_only=True)`, which builds plain data and tensors only and refuses everything else, and hands the
fields over as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simrl.errors import InputError
from simrl.importers.rows import INT32_MAX, Row, existing, field, integer, listed, number, shown, text, trace_from_rows
from simrl.trace import Trace

# Runs in a process of its own, with the files as arguments: a line {"file", "rollout_id", "sample"} for each sample; or
# {"file", "refused"} for what torch does not load, {"file", "found"} for what is no dump, and nothing more.
READER = """
import json, sys
import torch

FIELDS = ("tokens", "response_length", "reward", "status", "weight_versions", "non_generation_time", "loss_mask")

def say(**line):
    print(json.dumps(line, default=lambda v: v.tolist() if isinstance(v, torch.Tensor) else str(v)))

def what(value):
    return "the keys " + ", ".join(map(str, value)) if isinstance(value, dict) else "a value of type " + type(value).__name__

for file in sys.argv[1:]:
    try:
        dump = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        say(file=file, refused=f"{type(error).__name__}: {error}")
        break
    if not isinstance(dump, dict) or "rollout_id" not in dump or not isinstance(dump.get("samples"), list):
        say(file=file, found=what(dump))
        break
    for sample in dump["samples"]:
        if not isinstance(sample, dict):
            say(file=file, found="among the samples " + what(sample))
            sys.exit()
        say(file=file, rollout_id=dump["rollout_id"], sample={f: sample[f] for f in FIELDS if f in sample})
"""
VERSION = re.compile(r"[0-9]{1,9}")  # SGLang's default weight version is a word
FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def import_slime(
    path: str | Path,
    *,
    reward_key: str | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from one `.pt` debug dump or a folder of them (dumps of evaluations, `…eval_…`, are passed over).

    The step is the `rollout_id`; a prompt is its token ids, and response ids are kept. `reward_key` picks the number
    where rewards are dictionaries. `policy_version` is the first of `weight_versions` that is a number;
    `environment_s` is `non_generation_time`, a total: a simulation takes it for one pause halfway. `cap_tokens` is the run's
    `--rollout-max-response-len`; None takes the largest response for it.

    Raises `InputError` if torch is not installed, for a dump that holds more than plain data (numpy arrays, objects,
    code), and for fields that are missing, mistyped or contradictory.
    """
    path = existing(path)
    files, evaluations = _files(path)
    masked_tokens = 0
    rows: list[Row] = []
    file_of_step: dict[int, str] = {}
    for file, index, line in _read(files):
        place = f"{file}: sample {index}"
        step = integer(line, "rollout_id", place)
        if file_of_step.setdefault(step, file) != file:
            raise InputError(f"{place}: rollout_id {step} is also in {file_of_step[step]}; keep one dump a rollout")
        sample = line["sample"]
        rows.append(_row(sample, step, reward_key, place))
        masked_tokens += _masked_tokens(sample, place)
    notes = []
    if masked_tokens:
        total = sum(row.response_tokens for row in rows)
        notes.append(
            f"{masked_tokens} of {total} response tokens are masked out of the loss (tools, later turns), but counted."
        )
    if evaluations:
        notes.append(f"{evaluations} dumps of evaluations were left out.")
    return trace_from_rows(
        rows,
        name=name or path.name.removesuffix(".pt"),
        source=f"slime debug rollouts {path.name}",
        licence=licence,
        tokenizer="the run's own (slime recorded the token ids)",
        cap_tokens=cap_tokens,
        notes=notes,
    )


def _files(path: Path) -> tuple[list[Path], int]:
    """The dumps to read, and how many dumps of evaluations are beside them."""
    if path.is_file():
        return [path], 0
    found = sorted(path.glob("*.pt"), key=lambda file: (len(file.name), file.name))
    files = [file for file in found if "eval_" not in file.name]
    if not files:
        raise InputError(f"{path}: no rollout dump (*.pt) in it; name the folder of --save-debug-rollout-data")
    return files, len(found) - len(files)


def _read(files: Sequence[Path]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(file, index of the sample in it, line of the reader) for each sample of each file."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"{files[0]}: a .pt is read by torch, which is not installed; pip install torch (the CPU build will do)"
        )
    # -P keeps the working directory out of the import path: what lies beside a dump must not pass for torch.
    command = [sys.executable, "-P", "-c", READER, *map(str, files)]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8") as reader,
    ):
        assert reader.stdout is not None
        file, index = "", 0
        try:
            for raw in reader.stdout:
                line = json.loads(raw)
                if "refused" in line:
                    raise InputError(f"{line['file']}: {_refusal(line['refused'])}")
                if "found" in line:
                    raise InputError(f"{line['file']}: holds {line['found']}; a slime dump has rollout_id and samples")
                index = index + 1 if line["file"] == file else 0
                file = line["file"]
                yield file, index, line
            code = reader.wait()
        finally:
            reader.kill()  # after an error the rest is of no use; a reader that has ended is not touched
        if code != 0:
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {code}"
            raise InputError(f"{files[0]}: torch could not be run ({why}); repair its installation")


def _refusal(error: str) -> str:
    """Why torch did not load a file, in one line, with the remedy that fits."""
    wanted = re.search(r"GLOBAL (\S+)", error)
    if wanted:
        return (
            f"holds {wanted[1]}, more than plain data, and loading that could run code: refused; "
            "save it again with lists and numbers alone"
        )
    told = error.partition("WeightsUnpickler error:")[2] or error
    return f"torch cannot load it ({told.strip().splitlines()[0][:160]}); is it whole, and written by torch.save?"


def _row(sample: Mapping[str, Any], step: int, reward_key: str | None, place: str) -> Row:
    tokens = field(sample, "tokens", place)
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token <= INT32_MAX for token in tokens):
        raise InputError(f"{place}: field 'tokens' is {shown(tokens)}; it must be the token ids of prompt and response")
    response_tokens = integer(sample, "response_length", place)
    if response_tokens >= len(tokens):
        raise InputError(
            f"{place}: response_length is {response_tokens} of {len(tokens)} tokens; the rest must be a prompt"
        )
    prompt = np.array(tokens[: len(tokens) - response_tokens], dtype=np.int32)
    seconds = number(sample, "non_generation_time", place) if "non_generation_time" in sample else None
    return Row(
        place,
        step,
        prompt.tobytes(),
        len(prompt),
        response_tokens,
        reward=_reward(sample, reward_key, place),
        finish_reason=FINISH_REASONS.get(text(sample, "status", place)),
        policy_version=_policy_version(sample.get("weight_versions"), place),
        environment_s=seconds,
        response_ids=np.array(tokens[len(prompt) :], dtype=np.int32),
    )


def _reward(sample: Mapping[str, Any], key: str | None, place: str) -> float | None:
    reward = field(sample, "reward", place)
    if isinstance(reward, dict):
        if key is None:
            raise InputError(f"{place}: field 'reward' has the keys {listed(reward)}; choose one with reward_key")
        return number(reward, key, place)
    return number(sample, "reward", place)


def _policy_version(versions: Any, place: str) -> int | None:
    """The first weight version that is a number: the weights that the response was begun with."""
    if versions is not None and not isinstance(versions, list):
        raise InputError(f"{place}: field 'weight_versions' is {shown(versions)}; it must be a list")
    return next((int(version) for version in map(str, versions or ()) if VERSION.fullmatch(version)), None)


def _masked_tokens(sample: Mapping[str, Any], place: str) -> int:
    mask = sample.get("loss_mask")
    if mask is None:
        return 0
    if not isinstance(mask, list) or not all(kept in (0, 1) for kept in mask):
        raise InputError(f"{place}: field 'loss_mask' is {shown(mask)}; it must be a list of 0 and 1")
    return mask.count(0)
