"""slime: the debug dumps of `--save-debug-rollout-data`, one `.pt` a rollout, the richest source
there is.

A `.pt` is a pickle, and unpickling may run any code. So it is never unpickled here: another process
reads it with `torch.load(weights_only=True)`, which builds plain data and tensors only and refuses
everything else, and prints the fields as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simrl.errors import InputError
from simrl.trace.importers import rows, turns

# Runs in a process of its own, with the files as arguments: prints {"file", "index", "rollout_id",
# "sample"} for each sample; or {"file", "refused"} for a file that torch does not load, {"file",
# "found"} for one that is no dump, and nothing more.
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
    for index, sample in enumerate(dump["samples"]):
        if not isinstance(sample, dict):
            say(file=file, found="among the samples " + what(sample))
            sys.exit()
        kept = {f: sample[f] for f in FIELDS if f in sample}
        say(file=file, index=index, rollout_id=dump["rollout_id"], sample=kept)
"""
VERSION = re.compile(r"[0-9]{1,9}")  # SGLang's default weight version is a word
UNANSWERED = "tokens after the last turn of a response, which loss_mask leaves out, are left out."
FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def read(files: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield the file, the place and the fields of each sample of each file, with its `rollout_id`.
    Raises `InputError` if torch is not installed, and for a dump that holds more than plain data
    (numpy arrays, objects, code)."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"{files[0]}: a .pt is read by torch, which is not installed; pip install torch (the CPU build will do)"
        )
    # -P keeps the working directory out of the import path: a file beside a dump must not pass for
    # torch.
    command = [sys.executable, "-P", "-c", READER, *map(str, files)]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8"
        ) as reader,
    ):
        assert reader.stdout is not None
        try:
            for line in map(json.loads, reader.stdout):
                if "refused" in line:
                    raise InputError(f"{line['file']}: {_refusal(line['refused'])}")
                if "found" in line:
                    raise InputError(
                        f"{line['file']}: holds {line['found']}; a slime dump has rollout_id and samples"
                    )
                sample = {**line["sample"], "rollout_id": line["rollout_id"]}
                yield Path(line["file"]), f"{line['file']}: sample {line['index']}", sample
            code = reader.wait()
        finally:
            reader.kill()  # after an error the rest is of no use; a reader that has ended is not touched
        if code != 0:
            complaints.seek(0)
            printed = complaints.read().decode(errors="replace").strip().splitlines()
            why = printed[-1] if printed else f"exit code {code}"
            raise InputError(f"{files[0]}: torch could not be run ({why}); repair its installation")


def _refusal(error: str) -> str:
    """Return the reason why torch did not load a file, with its remedy, in one line."""
    if wanted := re.search(r"GLOBAL (\S+)", error):
        return (
            f"holds {wanted[1]}, more than plain data, and loading that could run code: refused; "
            "save it again with lists and numbers alone"
        )
    reason = error.partition("WeightsUnpickler error:")[2] or error
    return f"torch cannot load it ({reason.strip().splitlines()[0][:160]}); is it whole, and written by torch.save?"


def row(
    sample: Mapping[str, Any], place: str, _: Path, reward_key: str | None, left_out: Counter[str]
) -> rows.Row:
    """Return a sample as a row. The step is the `rollout_id`; a prompt is its token ids, and
    response ids are kept.

    `reward_key` picks the number where rewards are dictionaries. `policy_version` is the first of
    `weight_versions` that is a number; `environment_s` is `non_generation_time`, a total: a
    simulation splits it among the pauses between turns, which `loss_mask` tells (0: a tool's
    output), or takes it for one pause halfway.
    """
    tokens = rows.token_ids(sample, "tokens", place)
    response_tokens = rows.integer(sample, "response_length", place)
    prompt_tokens = len(tokens) - response_tokens
    if prompt_tokens < 1:
        raise InputError(
            f"{place}: response_length is {response_tokens} of {len(tokens)} tokens; the rest must be a prompt"
        )
    reward, key = sample, "reward"
    if isinstance(rows.field(sample, key, place), dict):
        reward, key = sample[key], reward_key or ""
        if reward_key is None:
            raise InputError(
                f"{place}: field 'reward' has the keys {rows.listed(reward)}; choose one with reward_key"
            )
    versions = rows.items(sample, "weight_versions", place, lambda _: True, "a list")
    mask = rows.mask(sample, ("loss_mask",), place)
    if mask is not None and len(mask) != response_tokens:
        raise InputError(
            f"{place}: loss_mask has {len(mask)} values, response_length is {response_tokens}; they must agree"
        )
    parts = turns.mask_parts(mask or [1] * response_tokens)
    kept = np.repeat([generated for generated, _ in parts], [length for _, length in parts])
    split = turns.turns_of(parts)
    answered = sum(split.tokens) + sum(split.observations)
    left_out[UNANSWERED] += response_tokens - answered
    return rows.Row(
        place,
        rows.integer(sample, "rollout_id", place),
        tokens[:prompt_tokens].tobytes(),
        prompt_tokens,
        reward=rows.number(reward, key, place),
        finish_reason=FINISH_REASONS.get(rows.text(sample, "status", place)),
        policy_version=next(
            (int(version) for version in map(str, versions) if VERSION.fullmatch(version)), None
        ),
        environment_s=rows.number(
            {"non_generation_time": None, **sample}, "non_generation_time", place
        ),
        response_ids=tokens[prompt_tokens:][kept],
        **split.fields(),
    )
