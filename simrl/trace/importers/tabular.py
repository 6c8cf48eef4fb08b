"""CSV, JSON Lines and pandas tables with columns of any name: lengths, or text to count, for each
response.

The user maps our names to theirs; a column with our name, or a usual one, needs no mapping, and the
notes say which were read. A field inside an object or a list is named by its way: usage.output or
messages.0.content. Without a step, all rows are one step's, which the notes say.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from simrl.errors import InputError, meant, refuse
from simrl.trace.importers import rows, turns
from simrl.trace.importers.tokens import TokenCounter, token_counter
from simrl.trace.trace import OPTIONAL, REQUIRED, Trace
from simrl.trace.validate import FINISH_REASONS

TEXTS = ("prompt", "response")
NAMES = (*REQUIRED, *OPTIONAL, *TEXTS)
SERVING = (
    "The table has arrival times, as serving traces have (Azure, Mooncake, BurstGPT): "
    "the lengths of such requests are far shorter than those of reasoning rollouts."
)
LOG = logging.getLogger("simrl")
A_LENGTH = "is this column a reward? --column response_tokens=THEIRS names the lengths of responses"
REMEDIES = {  # of a table without any column of these names
    (
        "prompt_id",
        "prompt",
    ): "map one with --column prompt_id=THEIRS, or give --ungrouped to simrl trace import if each row is its own",
    ("prompt_tokens", "prompt"): "map the prompts' lengths with --column prompt_tokens=THEIRS",
    (
        "response_tokens",
        "response",
        "response_ids",
        "turn_tokens",
    ): "map the responses' lengths with --column response_tokens=THEIRS (lists, one length a turn: turn_tokens)",
}

# Columns of a table that are taken for ours where it has none of our names; a message says which
# were.
ALIASES = {
    "step": ("iteration", "global_step", "training_step", "train_step", "rollout_id", "update"),
    "prompt_id": ("question", "question_id", "prompt", "group_id", "uid", "problem_id"),
    "prompt_tokens": ("in_len", "prompt_length", "prompt_len", "input_tokens", "num_prompt_tokens"),
    "response_tokens": (
        "out_len",
        "response_length",
        "response_len",
        "output_tokens",
        "completion_tokens",
        "length",
    ),
    "reward": ("score",),
    # lists, a value a turn
    "turn_tokens": (
        *("output_lens", "response_lens", "turn_lens", "gen_lens", "completion_lens"),
        *("output_lengths", "response_lengths", "turn_lengths", "assistant_lens", "output_len"),
        *("out_lens", "generated_lens"),
    ),
    "turn_observation_tokens": (
        *("obs_lens", "observation_lens", "tool_lens", "env_lens", "obs_lengths", "obs_tokens"),
        *("observation_lengths", "tool_response_lens", "tool_output_lens", "observation_tokens"),
    ),
    "turn_environment_s": (
        *("tool_times", "tool_time", "tool_times_s", "env_times", "tool_latencies", "tool_seconds"),
        *("environment_times", "environment_s", "tool_durations", "env_latencies", "obs_times"),
    ),
    "turn_tool": ("tool_names", "tools", "tool_name"),
}
NO_STEP = "No field names the step: all are taken for one step; --step N gives its number."
STEP_NAME = re.compile(
    r"(?:.*(?:step|iter|iteration|rollout|completions)[_-]?)?([0-9]{1,9})", re.IGNORECASE
)

PlacedRow = tuple[str, Mapping[str, Any]]
Columns = Mapping[
    str, str | tuple[str, ...]
]  # theirs by our names; of `mask`, the first that a row has


class Options(rows.Labels, total=False):
    """The mapping of a table to a trace.

    `step` and `epoch` hold for all rows of a table without such a column, `ungrouped` makes each
    row a prompt of its own. `tokenizer` says what counted the lengths that the table holds.
    """

    step: int | None
    epoch: int | None
    ungrouped: bool
    tokenizer: str | None


def import_csv(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Return the trace of a CSV file with a header. `columns` maps our names to the file's:
    {"response_tokens": "out_len"}.

    Our names are a trace's columns, and `prompt` and `response` for text, which `counter` counts
    where no column has the lengths. Needed are the step (or the option `step`), the prompt
    (`prompt_id`, which may be text, or `prompt`; or the option `ungrouped`), and both lengths or
    texts. Without a column `sample`, the samples of a prompt and step are numbered in order;
    without `epoch` (column or option) it is the number of earlier steps with the prompt. The turns'
    columns hold lists as JSON writes them: [120, 40].

    Raises `InputError` for columns that are missing and values that are mistyped, by column and row
    (the header is row 1).
    """
    path = rows.existing(path)
    header = _csv_header(path)
    return _trace(
        path,
        dict.fromkeys(header),
        lambda mapped: _csv_rows(path, header, mapped),
        columns or {},
        counter,
        options,
    )


def import_jsonl(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Return the trace of JSON Lines, one object a sample, by the rules of `import_csv`; also of a
    JSON array, of Parquet, or of a folder of these, a file a step.

    The first row names the fields; all must have the fields that are used. A field inside others is
    named by its way: usage.output_tokens. `response_ids` may be a list of token ids, as long as the
    response. Errors count lines from 1.
    """
    path, columns = rows.existing(path), columns or {}
    files = (
        [path]
        if path.is_file()
        else sorted(
            (file for file in path.iterdir() if file.suffix in (".json", ".jsonl", ".parquet")),
            key=lambda file: (step_of({}, file) or 0, file.name),
        )
    )
    refuse(
        (
            not files,
            f"{path}: no .jsonl, .json or .parquet in it; name a table, or its folder",
        )
    )
    named = options.get("step") is None
    _, first = next(_with_paths(files, columns, named))
    return _trace(
        path, first, lambda mapped: _with_paths(files, mapped, named), columns, counter, options
    )


def step_of(row: Mapping[str, Any], file: Path) -> Any:
    """Return the step of a row: a field, or the number by which its file is named, as 3.jsonl,
    step_10.json and train_data_step2.jsonl are; None if there is neither."""
    named = STEP_NAME.fullmatch(file.name.partition(".")[0])
    fields = (row[name] for name in ("step", *ALIASES["step"]) if name in row)
    return next(fields, int(named[1]) if named else None)


def _with_paths(
    files: Sequence[Path], columns: Mapping[str, str], named: bool
) -> Iterator[PlacedRow]:
    """Yield the rows of files, with the fields of `columns` that are inside others; if `named`, also
    with the step in the name of a file where no field has it."""
    for place, row, of in ((*read, file) for file in files for read in rows.read_jsonl(file)):
        paths = (name for name in columns.values() if "." in name and name not in row)
        inner = {path: value for path in paths for value in _inside(row, path)}
        at = {"step": step_of({}, of)} if named and step_of(row, Path()) is None else {}
        yield place, {**{k: v for k, v in at.items() if v is not None}, **inner, **row}


def _inside(row: Any, path: str) -> list[Any]:
    """Return the value inside objects and lists, such as messages.0.content, in a list; an
    empty list if it is not there."""
    with suppress(KeyError, IndexError, ValueError, TypeError):
        for key in path.split("."):
            row = row[int(key)] if isinstance(row, list) else row[key]
        return [row]
    return []


def import_frame(
    frame: pd.DataFrame,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Return the trace of a pandas DataFrame, a row a sample, by the rules of `import_csv`. Errors
    count rows from 0."""
    header = list(map(str, frame.columns))
    plain: Any = frame.astype(object).where(frame.notna(), None).set_axis(header, axis=1)
    records = plain.to_dict("records")
    placed = ((f"DataFrame, row {i}", row) for i, row in enumerate(records))
    first = dict.fromkeys(header) | (records[0] if records else {})
    return _trace(Path("DataFrame"), first, lambda _: placed, columns or {}, counter, options)


def _trace(
    path: Path,
    first: Mapping[str, Any],
    read: Callable[[Mapping[str, str]], Iterator[PlacedRow]],
    columns: Mapping[str, str],
    counter: TokenCounter | None,
    options: Options,
) -> Trace:
    """Return the trace of a table with a row like `first`; `read` yields its rows, given the
    columns to read by our names. A counter that is None estimates, which the notes say."""
    header, counter = list(first), counter or token_counter()
    stated = {"prompt_id": options.get("ungrouped") or None, "step": options.get("step")}
    usual = _usual(
        first, {*columns, *(ours for ours, value in stated.items() if value is not None)}
    )
    columns = {**usual, **columns}
    given: dict[str, Iterator[int]] = {"prompt_id": count()} if options.get("ungrouped") else {}
    for ours, value in (("step", options.get("step")), ("epoch", options.get("epoch"))):
        refuse(
            (
                value is not None and ours in {*columns, *header},
                f"{path}: has the column {columns.get(ours, ours)!r}, and {ours} {value} is given for all rows; choose one",
            )
        )
        given |= {} if value is None else {ours: repeat(value)}
    without_step = "step" not in {*given, *columns, *header}
    given |= {"step": repeat(0)} if without_step else {}
    mapped = _mapped(path, header, columns, [*given])
    read_with = ", ".join(f"{ours}={theirs}" for ours, theirs in usual.items())
    of_requests = "step" in given and re.search("timestamp|arriv", " ".join(header).lower())
    counts_prompts = not {"response", "prompt_tokens"} & {*mapped}
    lengths = (mapped[n] for n in ("response_tokens", "response_ids", "turn_tokens") if n in mapped)
    of_source = f"the source's own (lengths are from column {next(iter(lengths), '')!r})"
    stated_tokenizer = options.get("tokenizer") or of_source
    conditional = (
        (usual, f"Read with {read_with}."),
        (without_step, NO_STEP),
        (of_requests, SERVING),
        ("prompt_id" in given, "Each row is taken for a prompt of its own, in a group of one."),
        (counts_prompts, f"Prompt lengths were counted: {counter.tokenizer}."),
    )
    notes = [note for holds, note in conditional if holds]
    noted: Counter[str] = Counter()
    samples = list(table_rows(read(mapped), mapped, counter, noted, given))
    rewards = "response_tokens" in mapped and all(row.response_tokens in (0, 1) for row in samples)
    if len(samples) > 1 and rewards:
        LOG.warning(f"{path}: all of {mapped['response_tokens']!r} are 0 or 1 tokens; {A_LENGTH}")
    if usual:
        LOG.info(f"{path}: read with {read_with}; --column OURS=THEIRS reads other columns")
    if _in_turns(mapped):
        notes.append(
            turns.note([row.turn_observation_tokens for row in samples], noted.pop(turns.AGENTS, 0))
        )
        notes += [f"{number} {words}" for words, number in noted.items() if number]
    return rows.trace_from_rows(
        samples,
        source=path.name,
        tokenizer=counter.tokenizer if "response" in mapped else stated_tokenizer,
        notes=notes,
        default_name=path.stem,
        name=options.get("name"),
        licence=options.get("licence", "unknown"),
        cap_tokens=options.get("cap_tokens"),
    )


def _usual(first: Mapping[str, Any], named: Set[str]) -> dict[str, str]:
    """Return the columns of usual names that stand for ours, where a table has none of our names
    and none is `named`. Lists are of turns, single values of a response."""
    has = {
        ours: [
            n for n in theirs if n in first and isinstance(first[n], list) == (ours in rows.TURNS)
        ]
        for ours, theirs in ALIASES.items()
        if ours not in {*first, *named}
    }
    return {ours: theirs[0] for ours, theirs in has.items() if theirs}


def _mapped(
    path: Path,
    header: Sequence[str],
    columns: Mapping[str, str],
    given: Sequence[str],
) -> dict[str, str]:
    """Return the columns to read, by our names: the mapped ones, and those with our names that are
    of use and not `given`."""
    has = f"it has {rows.listed(header)}"
    for ours, theirs in columns.items():
        refuse(
            (
                ours not in NAMES and theirs in NAMES,
                f"{path}: {ours}={theirs} is the wrong way round; write --column {theirs}={ours}",
            ),
            (
                ours not in NAMES,
                f"{path}: {ours!r} is not a column of a trace{meant(ours, NAMES)}; map one of {', '.join(NAMES)}",
            ),
            (
                theirs not in header,
                f"{path}: no column {theirs!r} for {ours}{meant(theirs, header)}: {has}; name one of these",
            ),
        )
    lengths = ("response_tokens", "response_ids")
    both = next((name for name in lengths if name in columns and "response" in columns), None)
    refuse(
        (both, f"{path}: response and {both} are both mapped; choose text to count or lengths"),
        (
            "prompt_id" in columns and "prompt_id" in given,
            f"{path}: prompt_id is mapped, yet ungrouped makes each row its own prompt; choose one",
        ),
    )
    mapped = dict(columns) | {
        name: name for name in NAMES if name in header and name not in {*columns, *given}
    }
    unused = (
        lengths
        if "response" in columns
        else ("response",)
        if {*lengths, "turn_tokens"} & set(mapped)
        else ()
    )
    if "prompt" not in columns and {"prompt_id", "prompt_tokens"} <= {*mapped, *given}:
        unused = (*unused, "prompt")
    mapped = {name: theirs for name, theirs in mapped.items() if name not in unused}
    for names, remedy in REMEDIES.items():
        if not set(names) & {*mapped, *given}:
            like = [
                theirs
                for theirs in header
                if theirs not in columns.values() and names[0].split("_")[0] in theirs
            ]
            remedy = remedy.replace("THEIRS", like[0]) if len(like) == 1 else remedy
            raise InputError(f"{path}: no column for {' or '.join(names[:2])} ({has}); {remedy}")
    return mapped


def _in_turns(columns: Columns) -> bool:
    """Return whether responses are text to split into turns, which no column has."""
    return (
        "response" in columns
        and "response_tokens" not in columns
        and not {"turn_tokens", "turn_observation_tokens"} & set(columns)
    )


def table_rows(
    placed: Iterable[PlacedRow],
    columns: Columns,
    counter: TokenCounter,
    noted: Counter[str],
    given: Mapping[str, Iterator[int]] | None = None,
) -> Iterator[rows.Row]:
    """Yield rows from records, with the columns by our names; `given` replaces columns that a table
    lacks.

    Text is counted where no column has lengths: a prompt once, a response in turns, by its mask or
    tags. `noted` counts the responses that look like an agent's, and the tokens after last turns.
    """
    prompt_tokens: dict[str, int] = {}
    rest = iter(placed)
    while batch := list(islice(rest, rows.BATCH)):
        every = [
            {
                ours: read(row, columns[ours], place)
                for ours, read in _READERS.items()
                if ours in columns
            }
            for place, row in batch
        ]
        if "prompt" in columns and "prompt_tokens" not in columns:
            texts = [
                text
                for text in dict.fromkeys(values["prompt"] for values in every)
                if text not in prompt_tokens
            ]
            prompt_tokens.update(zip(texts, (c.tokens for c in counter.count(texts)), strict=True))
            for values in every:
                values["prompt_tokens"] = prompt_tokens[values["prompt"]]
        if "response" in columns:
            _count_responses(every, _in_turns(columns), counter, noted)
        for (place, _), values in zip(batch, every, strict=True):
            values |= {ours: next(numbers) for ours, numbers in (given or {}).items()}
            values["prompt"] = values.pop("prompt_id", values.get("prompt"))
            ids: Any = values.get("response_ids")
            lengths: Any = values.get("turn_tokens")
            for name in rows.TURNS[1:] if lengths else ():  # what follows the last turn is left out
                if len(values.get(name) or ()) == len(lengths):
                    values[name] = values[name][:-1]
            counted = int(sum(lengths or ())) if ids is None else len(ids)
            stated = values.setdefault("response_tokens", counted)
            differ = (
                f"{place}: {counted} response_ids for {stated} response_tokens; they must agree"
            )
            refuse((ids is not None and counted != stated, differ))
            yield rows.Row(place, **values)


def _count_responses(
    every: Sequence[dict[str, Any]], in_turns: bool, counter: TokenCounter, noted: Counter[str]
) -> None:
    """Replace the text of responses, and the mask of its tokens, by their lengths and turns."""
    texts = [values.pop("response") for values in every]
    if not in_turns:
        for values, counted in zip(every, counter.count(texts), strict=True):
            values["response_tokens"], values["response_ids"] = counted
        return
    masks = [values.pop("mask", None) for values in every]
    noted[turns.AGENTS] += sum(any(call in text for call in turns.CALLS) for text in texts)
    unmasked = [text if mask is None else "" for text, mask in zip(texts, masks, strict=True)]
    counted_turns = _turns_of_texts(unmasked, counter)
    for values, mask, (of_response, ids) in zip(every, masks, counted_turns, strict=True):
        noted[turns.UNENDED] += of_response.after
        if mask is not None:
            of_response, ids = turns.by_mask(mask)[0], None
        values |= {**of_response.fields(), "response_ids": ids}
        values["prompt_tokens"] += of_response.before


def _turns_of_texts(
    texts: Sequence[str | tuple[tuple[bool, str], ...]], counter: TokenCounter
) -> Iterator[tuple[turns.Turns, NDArray[np.int32] | None]]:
    """Yield the turns of each response by the tags in its text and, from a tokenizer, the token ids
    that were generated."""
    parts = [[*turns.text_parts(text)] if isinstance(text, str) else text for text in texts]
    counted = iter(counter.count([text for of_text in parts for _, text in of_text]))
    for of_text in parts:
        lengths = [(generated, next(counted)) for generated, _ in of_text]
        ids = [c.ids for generated, c in lengths if generated and c.ids is not None]
        yield (
            turns.turns_of([(generated, c.tokens) for generated, c in lengths]),
            np.concatenate(ids) if ids else None,
        )


def _finish_reason(row: Mapping[str, Any], column: str, place: str) -> str | None:
    allowed = ("", None, *FINISH_REASONS)
    return (
        rows.checked(
            row, column, place, lambda v: v in allowed, f"one of {', '.join(FINISH_REASONS)}"
        )
        or None
    )


def _of_turns(row: Mapping[str, Any], column: str, place: str, **must_be: Any) -> list[Any] | None:
    if rows.field(row, column, place) is None:
        return None
    return rows.items(row, column, place, **must_be)


_READERS: dict[str, Callable[[Mapping[str, Any], Any, str], Any]] = {
    "prompt": rows.text,
    "response": lambda row, column, place: (  # parts that an importer told apart, or text
        row[column] if isinstance(row.get(column), tuple) else rows.text(row, column, place)
    ),
    "mask": rows.mask,
    "response_ids": rows.token_ids,
    "response_tokens": partial(rows.integer, hint=f"; {A_LENGTH}"),
    "step": rows.integer,
    "prompt_id": partial(
        rows.checked,
        fits=lambda value: type(value) in (int, str, bytes) and value != "",
        must_be="a whole number or text",
    ),
    "prompt_tokens": partial(rows.integer, low=1),
    "sample": rows.integer,
    "epoch": rows.integer,
    "reward": rows.number,
    "finish_reason": _finish_reason,
    "policy_version": rows.integer,
    "environment_s": partial(rows.number, low=0.0),
    **dict.fromkeys(
        rows.TURNS,
        partial(
            _of_turns,
            fits=lambda value: type(value) in (int, float) and 0 <= value <= rows.INT32_MAX,
            must_be="a list of numbers, one a turn",
        ),
    ),
    "turn_tool": partial(
        _of_turns, fits=lambda value: isinstance(value, str), must_be="a list of names, one a turn"
    ),
}


# CSV


def _csv_header(path: Path) -> list[str]:
    _, header = next(rows.read_csv(path), ("", []))
    twice = next((column for column, times in Counter(header).items() if times > 1), None)
    refuse(
        (not header, f"{path}: the file is empty; a header and rows are expected"),
        (twice, f"{path}: column {twice!r} occurs twice in the header; rename one of them"),
    )
    return header


def _csv_rows(path: Path, header: Sequence[str], columns: Mapping[str, str]) -> Iterator[PlacedRow]:
    """Yield (place, values by the file's column) for each row; an empty cell is None where a number
    is expected."""
    kinds = {theirs: ours for ours, theirs in columns.items()}
    for place, cells in islice(rows.read_csv(path), 1, None):
        refuse(
            (
                len(cells) != len(header),
                f"{place}: {len(cells)} cells, the header has {len(header)}; repair that row",
            )
        )
        named = zip(header, cells, strict=True)
        yield place, {theirs: _cell(kinds[theirs], raw) for theirs, raw in named if theirs in kinds}


def _cell(ours: str, raw: str) -> Any:
    """Return the value of a cell. Text in place of a number stays text, for the message about
    it."""
    if ours in (*TEXTS, "finish_reason"):
        return raw
    if ours == "prompt_id":
        # Longer ones need not fit 64 bits, and are names as texts are.
        is_number = raw.isdecimal() and len(raw) <= 18 and (raw == "0" or raw[0] != "0")
        return int(raw) if is_number else raw
    bare = raw.strip()
    if not bare:
        return None
    for kind in (json.loads,) if ours in rows.TURNS else (int, float):
        with suppress(ValueError, RecursionError):
            return kind(bare) if kind is json.loads or "_" not in bare else raw
    return raw
