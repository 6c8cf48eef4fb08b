"""slime: the debug dumps of `--save-debug-rollout-data`, one `.pt` a rollout, the richest source
there is.

A `.pt` is a pickle, and unpickling may run any code: `torch_file` reads its plain data alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simrl.errors import refuse
from simrl.trace.importers import rows, turns
from simrl.trace.importers.torch_file import read_torch

UNANSWERED = "tokens after the last turn of a response, which loss_mask leaves out, are left out."
FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def read(files: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield the file, the place and the fields of each sample of each file, with its `rollout_id`.
    Raises `InputError` for a dump that holds more than plain data."""
    for file in files:
        dump = read_torch(file)
        fields = dump if isinstance(dump, dict) else {}
        held = f"the keys {rows.listed(map(str, fields))}" if fields else rows.shown(dump)
        refuse(
            (
                "rollout_id" not in fields or not isinstance(fields.get("samples"), list),
                f"{file}: holds {held}; a slime dump has rollout_id and samples",
            )
        )
        for index, sample in enumerate(fields["samples"]):
            place = f"{file}: sample {index}"
            sample = rows.require_object(sample, place)
            yield file, place, {**sample, "rollout_id": fields["rollout_id"]}


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
    versions = rows.items(sample, "weight_versions", place, lambda _: True, "a list")
    mask = rows.mask(sample, ("loss_mask",), place)
    keyed = isinstance(rows.field(sample, "reward", place), dict)
    reward, key = (sample["reward"], reward_key or "") if keyed else (sample, "reward")
    refuse(
        (
            prompt_tokens < 1,
            f"{place}: response_length is {response_tokens} of {len(tokens)} tokens; the rest must be a prompt",
        ),
        (
            keyed and reward_key is None,
            f"{place}: field 'reward' has the keys {rows.listed(map(str, reward))}; choose one with reward_key",
        ),
        (
            mask is not None and len(mask) != response_tokens,
            f"{place}: loss_mask has {len(mask or ())} values, response_length is {response_tokens}; they must agree",
        ),
    )
    split, generated = turns.by_mask(mask or [1] * response_tokens)
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
            (int(version) for version in map(str, versions) if rows.VERSION.fullmatch(version)),
            None,
        ),
        environment_s=rows.number(
            {"non_generation_time": None, **sample}, "non_generation_time", place
        ),
        response_ids=tokens[prompt_tokens:][generated],
        **split.fields(),
    )
