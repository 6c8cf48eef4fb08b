"""slime: the debug dumps of `--save-debug-rollout-data`, one `.pt` a rollout, the richest source there is.

A `.pt` is a pickle, and unpickling may run any code. So it is never unpickled here: another process reads it with
`torch.load(weights_only=True)`, which builds plain data and tensors only and refuses everything else, and prints the
fields as JSON.
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
from typing import Any, Unpack

import numpy as np

from simrl.errors import InputError
from simrl.trace.importers import rows, turns
from simrl.trace.trace import Trace

# Runs in a process of its own, with the files as arguments: prints {"file", "index", "rollout_id", "sample"} for each sample;
# or {"file", "refused"} for a file that torch does not load, {"file", "found"} for one that is no dump, and nothing more.
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
FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def import_slime(path: str | Path, *, reward_key: str | None = None, **labels: Unpack[rows.Labels]) -> Trace:
    """Return the trace of one `.pt` debug dump or a folder of them (dumps of evaluations, `…eval_…`, are skipped).

    The step is the `rollout_id`; a prompt is its token ids, and response ids are kept. `reward_key` picks the number
    where rewards are dictionaries. `policy_version` is the first of `weight_versions` that is a number;
    `environment_s` is `non_generation_time`, a total: a simulation splits it among the pauses between turns, which `loss_mask`
    tells (0: a tool's output), or takes it for one pause halfway. `cap_tokens` is the run's
    `--rollout-max-response-len`.

    Raises `InputError` if torch is not installed, for a dump that holds more than plain data (numpy arrays, objects,
    code), and for fields that are missing, mistyped or contradictory.
    """
    path = rows.existing(path)
    files, evaluations = _files(path)
    samples: list[rows.Row] = []
    response_tokens = 0
    file_of_step: dict[int, str] = {}
    for file, index, line in _read(files):
        place, sample = f"{file}: sample {index}", line["sample"]
        step = rows.integer(line, "rollout_id", place)
        if file_of_step.setdefault(step, file) != file:
            raise InputError(f"{place}: rollout_id {step} is also in {file_of_step[step]}; keep one dump a rollout")
        samples.append(_row(sample, step, reward_key, place))
        response_tokens += int(sample["response_length"])
    observed = sum(sum(row.turn_observation_tokens or ()) for row in samples)
    left_out = response_tokens - observed - sum(row.response_tokens for row in samples)
    counts = {
        f"{left_out} tokens after the last turn of a response, which loss_mask leaves out, are left out.": left_out,
        f"{observed} of {response_tokens} response tokens are observations between turns, by loss_mask.": observed,
        f"{evaluations} dumps of evaluations were left out.": evaluations,
    }
    return rows.trace_from_rows(
        samples,
        source=f"slime debug rollouts {path.name}",
        tokenizer="the run's own (slime recorded the token ids)",
        notes=[note for note, count in counts.items() if count],
        default_name=path.name.removesuffix(".pt"),
        **labels,
    )


def _files(path: Path) -> tuple[list[Path], int]:
    """Return the dumps to read, and the number of dumps of evaluations beside them."""
    if path.is_file():
        return [path], 0
    found = sorted(path.glob("*.pt"), key=lambda file: (len(file.name), file.name))
    files = [file for file in found if "eval_" not in file.name]
    if not files:
        raise InputError(f"{path}: no rollout dump (*.pt) in it; name the folder of --save-debug-rollout-data")
    return files, len(found) - len(files)


def _read(files: Sequence[Path]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (file, index of the sample in it, line of the reader) for each sample of each file."""
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
        try:
            for line in map(json.loads, reader.stdout):
                if "refused" in line:
                    raise InputError(f"{line['file']}: {_refusal(line['refused'])}")
                if "found" in line:
                    raise InputError(f"{line['file']}: holds {line['found']}; a slime dump has rollout_id and samples")
                yield line["file"], line["index"], line
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


def _row(sample: Mapping[str, Any], step: int, reward_key: str | None, place: str) -> rows.Row:
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
            raise InputError(f"{place}: field 'reward' has the keys {rows.listed(reward)}; choose one with reward_key")
    versions = rows.items(sample, "weight_versions", place, lambda _: True, "a list")
    ids = tokens[prompt_tokens:]
    mask = rows.mask(sample, ("loss_mask",), place)
    if mask is not None and len(mask) != response_tokens:
        raise InputError(
            f"{place}: loss_mask has {len(mask)} values, response_length is {response_tokens}; they must agree"
        )
    parts = turns.mask_parts(mask or [1] * response_tokens)
    kept = np.repeat([generated for generated, _ in parts], [tokens for _, tokens in parts])
    return rows.Row(
        place,
        step,
        tokens[:prompt_tokens].tobytes(),
        prompt_tokens,
        reward=rows.number(reward, key, place),
        finish_reason=FINISH_REASONS.get(rows.text(sample, "status", place)),
        policy_version=next((int(version) for version in map(str, versions) if VERSION.fullmatch(version)), None),
        environment_s=rows.number({"non_generation_time": None, **sample}, "non_generation_time", place),
        response_ids=ids[kept],
        **turns.turns_of(parts).fields(),
    )
