"""Dumps of samples, as frameworks write them: the files of a source of `sources.toml`, and their
rows as a trace.

Invariant: a step is in one file, and a step in the name of a file is the step of its rows. A source
has lengths, or text that a `TokenCounter` counts. Rows with one prompt and step are a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack

from simrl.errors import InputError, choose, refuse
from simrl.files import read_parquet
from simrl.trace.importers import messages, rows, turns
from simrl.trace.importers.logs import recognised
from simrl.trace.importers.rollout_trace import read_events
from simrl.trace.importers.sources import Source, known_sources
from simrl.trace.importers.tabular import PlacedRow, step_of, table_rows
from simrl.trace.importers.tokens import DECODED, TokenCounter, token_counter
from simrl.trace.trace import Trace

Record = tuple[
    Path, str, Mapping[str, Any]
]  # the file of a row, its place in messages, and its fields
TABLE = ".table.json"  # of wandb: a row a step, its samples in columns input_k, output_k, score_k
MOST_ROWS = 200_000  # of a file that holds one step: a small one may claim far more
VALIDATION = (
    "Validation generations that verl logged as a table, a few a checkpoint, not training rollouts."
)


def import_dump(
    framework: str,
    path: str | Path,
    counter: TokenCounter | None = None,
    *,
    reward_column: Sequence[str] | None = None,
    reward_key: str | None = None,
    step: int | None = None,
    **labels: Unpack[rows.Labels],
) -> Trace:
    """Return the trace of what a framework wrote at `path`: a folder or one of its files.

    `counter` counts text; None estimates, which the notes say. `cap_tokens` is the run's own limit
    of a response. `reward_column` names the columns whose sum is the reward, `()` none;
    `reward_key` the number of rewards that are objects; `step` the step of conversations that name
    none. Raises `InputError` for anything else at `path`, and for fields that are missing,
    mistyped or contradictory.
    """
    source, path = _source_of(framework), rows.existing(path)
    form: Any = import_module(f"simrl.trace.importers.{source.form}") if source.form else None
    left_out: Counter[str] = Counter()
    files = form.files(path) if hasattr(form, "files") else _files(source, path, left_out)
    if source.form == "nemo" and files[0].name.startswith("rollout_trace"):
        return read_events(files[0], **labels).trace
    counter = counter or token_counter()
    is_table = files[0].name.endswith(TABLE)
    notes = [VALIDATION, *source.notes] if is_table else [*source.notes]
    records: Iterator[Record] = (
        messages.read(files, step, left_out)
        if form is messages
        else _by_step(
            source,
            form.read(files) if hasattr(form, "read") else _records(source, files, reward_column),
        )
    )
    if hasattr(form, "row"):
        samples = [form.row(row, place, file, reward_key, left_out) for file, place, row in records]
    else:
        if source.repeats:
            records = _without_repeats(source, records, left_out)
        placed = ((place, row) for _, place, row in records)
        samples = list(table_rows(placed, source.columns, counter, left_out))
    agents = left_out.pop(turns.AGENTS, 0)
    observed = [row.turn_observation_tokens for row in samples]
    if form is None and "response" in source.columns:
        notes += [DECODED, turns.note(observed, agents)]
    else:
        notes += turns.several(
            observed, source.turns_by, any(row.turn_environment_s for row in samples)
        )
    return rows.trace_from_rows(
        samples,
        source=f"{framework} wandb table {files[0].name}"
        if is_table
        else f"{source.title} {path.name}",
        tokenizer=source.tokenizer or counter.tokenizer,
        notes=[*notes, *(f"{number} {words}" for words, number in left_out.items() if number)],
        default_name=path.name.removesuffix(TABLE).removesuffix(
            path.suffix if path.is_file() else ""
        ),
        **labels,
    )


def _source_of(framework: str) -> Source:
    """Return the source of a framework. Raises `InputError` for one that has no dumps."""
    sources = known_sources()
    dumped = [name for name, source in sources.items() if source.title]
    choice = choose(framework, dumped, "simrl trace import --help")
    refuse(
        (
            framework in sources and framework not in dumped,
            f"import_dump: {framework} is a table whose columns you name; call tabular.import_{framework}, or choose one of "
            f"{', '.join(dumped)}",
        ),
        (framework not in dumped, f"import_dump: unknown framework {framework!r}{choice}"),
    )
    return sources[framework]


def _files(source: Source, path: Path, left_out: Counter[str]) -> list[Path]:
    """Return the files of a source in the order of their steps; of tables, which are cumulative,
    the largest."""
    if path.is_file():
        return [path]
    for pattern in source.files:
        files = [file for file in path.glob(pattern) if file.is_file()]
        kept = [file for file in files if not source.without or source.without not in file.name]
        left_out["dumps of evaluations were left out."] += len(files) - len(kept)
        if kept and kept[0].name.endswith(TABLE):
            return [max(kept, key=lambda file: (file.stat().st_size, file.name))]
        if kept:
            return sorted(
                kept, key=lambda file: (step_of({}, file) or 0, len(file.name), file.name)
            )
    raise InputError(f"{path}: {source.nothing}")


def _records(
    source: Source, files: Sequence[Path], reward_column: Sequence[str] | None
) -> Iterator[Record]:
    """Yield the rows of files, by the ends of their names; where a source has several rewards, with
    their sum as `reward`."""
    refuse(
        (
            source.rewards is None and reward_column is not None,
            f"--reward-column: {source.title}: the reward is one column; leave it out",
        )
    )
    prompt, response = str(source.columns.get("prompt")), str(source.columns.get("response"))
    for file in files:
        if file.suffix == ".parquet" and step_of({}, file) is not None:
            claimed = read_parquet(file, ("step",)).num_rows
            most = (
                f"{file}: {claimed:,} rows; a logged step has at most {MOST_ROWS:,}; keep its own"
            )
            refuse((claimed > MOST_ROWS, most))
        placed = _table_rows(file) if file.name.endswith(TABLE) else rows.read_jsonl(file)
        placed = _summed(source, file, placed, reward_column)
        for place, row in placed:
            match [row.get(prompt), row.get(response)]:
                case [[dict(), *_], str() | list()] | [str(), [dict(), *_]] as pair:
                    fields = zip(("prompt", "completion"), pair, strict=True)
                    columns = messages.conversation(dict(fields), Counter())
                    row = {**row, prompt: columns["prompt"], response: columns["response"]}
            yield file, place, row


def _summed(
    source: Source, file: Path, placed: Iterator[PlacedRow], wanted: Sequence[str] | None
) -> Iterator[PlacedRow]:
    """Yield rows, where a source has several rewards with their sum as `reward`: none where all of
    them are absent. The first row tells their names."""
    kinds = (int, float) if wanted is None else (int, float, type(None))
    rewards: list[str] | None = None
    for place, row in placed:
        if rewards is None and source.rewards is not None:
            rewards = _reward_columns(
                source, file, [name for name, value in row.items() if type(value) in kinds], wanted
            )
        # TRL writes NaN where a reward function returned None, which its own sum leaves out.
        values = [(name, rows.field(row, name, place)) for name in rewards or ()]
        present = [name for name, value in values if value is not None and value == value]
        total = sum(rows.number(row, name, place) or 0.0 for name in present)
        reward = {} if rewards is None else {"reward": total if present else None}
        yield place, {**row, **reward}


def _without_repeats(
    source: Source, records: Iterable[Record], left_out: Counter[str]
) -> Iterator[Record]:
    """Yield the rows of all files but repetitions: a batch that several steps train on is written
    once for each."""
    before: Counter[Any] = Counter()
    for _, of_file in groupby(records, key=lambda record: record[0]):
        records_of_file = list(of_file)
        prompt, response = str(source.columns["prompt"]), str(source.columns["response"])
        batch = Counter(
            (rows.text(row, prompt, place), str(rows.field(row, response, place)))
            for _, place, row in records_of_file
        )
        if batch == before:
            left_out["files repeat the generation batch of the one before and were left out."] += 1
        else:
            yield from records_of_file
        before = batch


def _by_step(source: Source, records: Iterable[Record]) -> Iterator[Record]:
    """Yield rows. Raises `InputError` for a step in two files, and for a step other than in the
    name of its file."""
    file_of: dict[int, Path] = {}
    for file, place, row in records:
        if "step" in source.columns:
            step, named = (
                rows.integer(row, str(source.columns["step"]), place),
                None if source.form else step_of({}, file),
            )
            refuse(
                (
                    named not in (None, step),
                    f"{place}: step is {step} in the {source.rows_of} of step {named}; was the file renamed?",
                ),
                (
                    file_of.setdefault(step, file) != file,
                    f"{place}: step {step} is also in {file_of[step].name}, and its groups would be twice as large; keep one",
                ),
            )
        yield file, place, row


def _reward_columns(
    source: Source, file: Path, numbers: Sequence[str], wanted: Sequence[str] | None
) -> list[str]:
    """Return the columns to add up: those that are wanted, or the only column of `numbers` that is
    no other column of the source."""
    others = {theirs for ours, theirs in source.columns.items() if ours != "reward"}
    numbers = [name for name in numbers if name not in others | {*(source.rewards or ())}]
    unknown = next((name for name in wanted or () if name not in numbers), None)
    refuse(
        (unknown, f"{file}: no column of numbers {unknown!r}; it has {rows.listed(numbers)}"),
        (
            wanted is None and len(numbers) > 1,
            f"{file}: columns {rows.listed(numbers)} may be rewards; name those to add up with --reward-column",
        ),
    )
    return list(dict.fromkeys(numbers if wanted is None else wanted))


def _table_rows(file: Path) -> Iterator[PlacedRow]:
    """Yield the samples of a wandb table of generations: a row is a step, with a sample in each
    slot."""
    table = rows.require_object(rows.read_json(file), str(file))
    held = (table.get(key) for key in ("columns", "data"))
    names, data = (value if isinstance(value, list) else [] for value in held)
    split = [str(name).partition("_") for name in names]
    slots = [slot for kind, _, slot in split if kind == "input"]
    refuse(
        (
            not names,
            f"{file}: keys {rows.listed(table)}; a wandb table has the lists 'columns' and 'data'",
        ),
        (
            not slots,
            f"{file}: no column 'input_1' in it; a table of generations has step, input_k, output_k, score_k",
        ),
    )
    steps: set[Any] = set()
    for index, values in enumerate(data):
        place = f"{file}: data row {index}"
        refuse(
            (
                not isinstance(values, list) or len(values) != len(names),
                f"{place}: {rows.shown(values)} is not a list of {len(names)} values, one a column",
            )
        )
        step = rows.integer(dict(zip(map(str, names), values, strict=True)), "step", place)
        refuse(
            (
                step in steps,
                f"{place}: step {step} occurs twice; remove the row of the run that was repeated",
            )
        )
        steps.add(step)
        for slot in slots:
            named = {
                kind: value
                for (kind, _, of), value in zip(split, values, strict=True)
                if of in ("", slot)
            }
            yield f"{place}, slot {slot}", named


def nearest(path: Path, name: str, refusal: InputError) -> str:
    """Return the message about a file that the reader `name` refused: with the source that knows
    the fields of its first record, or most of them, or that it is a metrics log."""
    endings = ("pt", "traj", "jsonl", "json", "parquet")
    below = (file for ending in endings for file in path.glob(f"**/*.{ending}"))
    file = path if path.is_file() else next(below, path)
    fields = {"rollout_id", "samples"} if file.suffix == ".pt" else {file.suffix[1:]}
    if not file.is_file():  # a device, or nothing at all
        return str(refusal)
    with suppress(InputError):
        match next(rows.read_records(file), None):
            case (_, dict() as record) | (_, [dict() as record, *_]):
                fields |= {*record}
    share, is_same, other, lacks = max(
        (len(fields & signs) / len(signs), source_name == name, source_name, signs - fields)
        for source_name, source in known_sources().items()
        for signs in ({*text.split()} for text in source.signs)
    )
    with suppress(InputError):
        if share < 1 and path.is_file() and (metrics := recognised(path)):
            return (
                f"{path}: a metrics log ({metrics}), not a dump of samples; add --metrics --group N (N responses a "
                "prompt, rollout.n), which draws lengths from it"
            )
    run = f"`simrl trace import {other} {path}`"
    partly = f"the nearest format is read by {run}, and has {rows.listed(sorted(lacks))}, too"
    looks = f"it looks like {known_sources()[other].title or other}: run {run}"
    return f"{refusal}" if is_same or share < 0.5 else f"{refusal}; {partly if lacks else looks}"
