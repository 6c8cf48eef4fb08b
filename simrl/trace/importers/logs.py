"""Metrics logs of runs, of any framework, as one table in verl's names: a row a step, seconds and lengths.

Invariant: a value that a log lacks is missing (NaN, or no column), never guessed, but for the largest and smallest response
beside a mean, which are estimated and noted. `attrs` of the table have the name of the file (`source`), the framework (`format`),
`notes` on what was left out or assumed, and `lacks`: what the log does not have, by our names. Where a log has neither the number
of responses nor the length of prompts, one line asks for it. Of a step logged twice, as after a resume, later values count.

A framework is a table of `metrics.toml`, which gives the names and the form of its console (`console`). What W&B, TensorBoard,
MLflow, SwanLab or the framework itself wrote is read by `exports`. For other names the user maps ours to theirs.
"""

from __future__ import annotations

import math
import mmap
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType

import pandas as pd
from pydantic import BaseModel

from simrl.errors import InputError, meant
from simrl.trace.importers import rows
from simrl.trace.importers.console import records
from simrl.trace.importers.exports import (
    STEPS,
    WANDB_STEPS,
    Logged,
    read_rows,
    step_of,
)

MOST_TAGS = 10_000  # of a log: a column each
HEAD = 200  # rows by which a framework is recognised
OPERATOR = re.compile(r"\s+([-+*/])\s+")
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
SIGMA, SAMPLES = 0.8, 512  # assumed of lengths whose largest is not logged: of the log, and a step


class Format(BaseModel, frozen=True, extra="forbid"):
    """The metrics of a framework; `metrics.toml` explains the keys."""

    title: str
    signs: tuple[str, ...]
    also: tuple[str, ...] = ()
    names: Mapping[str, str | tuple[str, ...]] = {}
    tags: tuple[str, ...] = ()
    prefix: str = ""
    summed: str = ""
    lacks: Mapping[str, str] = {}
    console: str = ""
    step: str = ""
    begins: str = ""

    @property
    def by_ours(self) -> dict[str, tuple[str, ...]]:
        """Return their expressions by our names, the first that a step has first."""
        named = {ours: (it,) if isinstance(it, str) else it for ours, it in self.names.items()}
        return {tag: (tag,) for tag in self.tags} | named


FORMATS = {
    name: Format.model_validate(table)
    for name, table in tomllib.loads(
        Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    ).items()
}
ALIASES = {alias: name for name, kind in FORMATS.items() for alias in (name, *kind.also)}
TERMS = {  # their tags, which the names of an exported table may end with
    tag
    for kind in FORMATS.values()
    for expressions in kind.by_ours.values()
    for expression in expressions
    for term in OPERATOR.split(expression)[::2]
    for tag in (term, kind.prefix + term)
}
OURS = {ours for kind in FORMATS.values() for ours in kind.by_ours}
SUMMED = tuple(kind.summed for kind in FORMATS.values() if kind.summed)
EXPORTS = ("wandb", "tensorboard", "mlflow", "swanlab")  # names of tables, of any framework
TOTAL, PER_RANK = "perf/total_num_tokens", "global_seqlen/mean"
MEAN, CLIPPED, PROMPT = "response_length/mean", "response_length/clip_ratio", "prompt_length/mean"
SEQUENCE = "sequence_length/mean"
PHASES = ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/step")
NUMBERED = r"(?i)\b(?:step|iter(?:ation)?|rollout|update)\b[ :=#/]{0,3}([0-9]{1,9})"
OTHERS = [  # forms that a console of any names may have: the form, the text that names the step, a part of it
    ("entries", rf"{NUMBERED}(?: - |\s*$)", " - "),
    ("named", rf"{NUMBERED} \| ", " | "),
    ("dictionary", rf"{NUMBERED}[^{{]{{0,80}}(?=\{{)", "{"),
    ("bullets", NUMBERED, "tep"),
    ("table", NUMBERED, "tep"),
    ("lines", NUMBERED, "tep"),
    ("lines", r"Run summary:()", "Run summary:"),  # of W&B, at the end of a console
]


def read_metrics(
    path: str | Path,
    log_format: str | None = None,
    samples: int | None = None,
    prompt_tokens: float | None = None,
    lengths: bool = True,
    columns: Mapping[str, str] | None = None,
    cap_tokens: int | None = None,
) -> pd.DataFrame:
    """Return a row a step: `step`, `timing_s/{gen, old_log_prob, ref, update_actor, step}`,
    `response_length/*` and so on.

    Without `log_format` the framework is recognised. `columns` are tags of the log, or expressions
    of tags, by our names; they go before those of the framework. `samples` a step and mean
    `prompt_tokens` are for logs that do not have them; a logged value stands. Without `lengths`,
    the log may lack them. `cap_tokens` is the largest response, if some are clipped and the log
    does not have it. Raises `InputError` for a log that cannot be read, and for a missing value
    that was not given.
    """
    path, notes = rows.existing(path), list[str]()
    if log_format not in (None, *ALIASES, *EXPORTS):
        raise InputError(
            f"--format {log_format}: unknown{meant(log_format, [*ALIASES, *EXPORTS])}; choose one of "
            f"{', '.join([*FORMATS, *EXPORTS])}"
        )
    mapped = {ours: (theirs,) for ours, theirs in (columns or {}).items()}
    if wrong := next((ours for ours in mapped if ours not in OURS), None):
        raise InputError(
            f"--column {wrong}: no column that simrl reads{meant(wrong, OURS)}; name some of {', '.join(sorted(OURS))}"
        )
    names = [ALIASES[log_format]] if log_format in ALIASES else [*FORMATS]
    name, kind = _recognised(path, names) or ("", _unnamed(path, names, mapped))
    tags = _by_step(_logged(path, kind, notes), notes)
    metrics = _named(tags, kind, mapped)
    if absent := next((ours for ours in mapped if ours not in metrics), None):
        missing = next(t for t in OPERATOR.split(mapped[absent][0])[::2] if _column(t, tags, kind) is None)
        raise InputError(
            f"{path}: --column {absent}={mapped[absent][0]}: no {missing} in it{meant(missing, tags)}; "
            f"it has {rows.listed(get_close_matches(missing, tags.columns, 12, 0.0))}"
        )
    notes += _holes(metrics)
    if lengths:
        metrics = _with_lengths(metrics, path, kind, samples, prompt_tokens, cap_tokens, notes)
    lacks = {
        ours: kind.lacks.get(ours, f"no {ours}: {_remedy(ours, kind)}")
        for ours in PHASES
        if ours not in metrics
    }
    metrics.attrs |= {"source": path.name, "format": name, "notes": notes, "lacks": lacks}
    return metrics


def recognised(path: Path) -> str | None:
    """Return the framework that wrote a log; None if none did."""
    recognised = _recognised(path, [*FORMATS])
    return recognised[0] if recognised else None


def _recognised(path: Path, names: Sequence[str]) -> tuple[str, Format] | None:
    """Return the framework that most of the names in the first steps of a log are of, with the form
    of this console; None if none is of any."""
    exported = read_rows(path, TERMS) is not None
    heads: dict[tuple[str, ...], pd.DataFrame] = {}

    def columns(choice: tuple[str, Format]) -> int:
        kind = choice[1]
        form = ("",) if exported else (kind.console, kind.step, *kind.signs[: not kind.step])
        if form not in heads:
            heads[form] = _by_step(islice(_logged(path, kind, []), HEAD), [])
        return len(OURS & {*_named(heads[form], kind)})

    signed = [name for name in names if path.is_file() and _has(path, FORMATS[name].signs)]
    own = [(name, FORMATS[name]) for name in signed or names]
    others = [(name, _in_form(FORMATS[name], *form)) for form in OTHERS for name in names]
    for choices in (own, [] if exported else others):  # a sign may be on two pieces of a wrapped line
        best = max(choices, key=columns, default=None)
        if best and columns(best):
            return best
    return None


def _in_form(kind: Format, console: str, step: str, begins: str) -> Format:
    return kind.model_copy(update={"console": console, "step": step, "begins": begins})


def _has(path: Path, signs: tuple[str, ...]) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return any(text.find(sign.encode()) >= 0 for sign in signs)


def _logged(path: Path, kind: Format, notes: list[str]) -> Iterable[Logged]:
    """Return the rows of a log, in their names."""
    if (exported := read_rows(path, TERMS, notes)) is not None or not kind.console:
        return exported or ()
    return records(path, kind.console, kind.step, kind.begins, kind.signs[0])


def _by_step(logged: Iterable[Logged], notes: list[str]) -> pd.DataFrame:
    """Return a row a step, in their names. A row without the step of the run belongs to the next
    row that has one; if none has, the step is the one that W&B counted."""
    steps: dict[int, dict[str, float]] = {}
    counted: dict[int, dict[str, float]] = {}
    waiting: dict[str, float] = {}
    tags: set[str] = set()
    for place, row in logged:
        values = {t: v for t, v in row.items() if t not in STEPS and not t.startswith("_")}
        if len(tags := tags | values.keys()) > MOST_TAGS:
            raise InputError(
                f"{place}: more than {MOST_TAGS:,} metrics; is it the log of one run?"
            )
        try:
            step, count = step_of(row, place), step_of(row, place, WANDB_STEPS)
        except InputError as error:
            notes.append(f"{error} (left out)")
            continue
        if step is None and count is not None:
            counted.setdefault(count, {}).update(values)
        added = {t: waiting.get(t, 0.0) + v for t, v in values.items() if t.startswith(SUMMED)}
        waiting |= values | added
        if step is not None:
            steps.setdefault(step, {}).update(waiting)
            waiting = {}
    return pd.DataFrame([{"step": n, **row} for n, row in sorted((steps or counted).items())])


def _named(
    tags: pd.DataFrame, kind: Format, mapped: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> pd.DataFrame:
    """Return the rows in our names, beside their own."""
    metrics: dict[str, pd.Series] = {}
    for ours, expressions in (kind.by_ours | dict(mapped)).items():
        for expression in expressions:
            values = _value(expression, tags, metrics, kind)
            if values is not None:
                metrics[ours] = metrics[ours].fillna(values) if ours in metrics else values
    if "samples" in metrics:
        metrics["samples"] = metrics["samples"].round()
    others = tags[[tag for tag in tags if tag not in OURS]]
    return pd.concat([others, pd.DataFrame(metrics, index=tags.index)], axis=1)


def _value(
    expression: str, tags: pd.DataFrame, metrics: Mapping[str, pd.Series], kind: Format
) -> pd.Series | None:
    """Return the values of an expression of tags; None if a tag of it is not in the log."""
    if (whole := _column(expression, tags, kind)) is not None:
        return whole
    first, *rest = OPERATOR.split(expression)
    total = _column(first, tags, kind, metrics)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        values = _column(term, tags, kind, metrics)
        total = None if total is None or values is None else OPERATIONS[sign](total, values)
    return total


def _column(
    term: str, tags: pd.DataFrame, kind: Format, metrics: Mapping[str, pd.Series] = MappingProxyType({})
) -> pd.Series | None:
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", term):
        return pd.Series(float(term), tags.index)
    named = (column for column in (tags.get(term), tags.get(kind.prefix + term)) if column is not None)
    return next(named, metrics.get(term))


def _unnamed(
    path: Path, names: Sequence[str], mapped: Mapping[str, tuple[str, ...]]
) -> Format:
    """Return the form of a log whose names the user maps. Raises `InputError` where none is mapped:
    with the names that the log has, the nearest ones first."""
    titles, notes = ", ".join(FORMATS[name].title for name in names), list[str]()
    if (other := recognised(path)) and not mapped:
        raise InputError(
            f"{path}: no metrics of {titles} in it, but of {FORMATS[other].title}; read it as --format {other}"
        )
    signs = (*(OPERATOR.split(it[0])[0] for it in mapped.values()), "step")
    kinds = [_in_form(Format(title="mapped", signs=signs), *form) for form in OTHERS]
    heads = [_by_step(islice(_logged(path, kind, notes), HEAD), notes) for kind in kinds]
    tags, kind = max(zip(heads, kinds, strict=True), key=lambda head: len(head[0].columns))
    if mapped:
        return kind
    has = [tag for tag in tags if tag != "step"]
    lacking = f"{path}: no metrics of {titles} in it"
    if not has:
        remedy = "name the run's metrics log: its console, or what W&B, TensorBoard, MLflow or SwanLab exported"
        raise InputError("; ".join([lacking, f"no step with names and numbers; {remedy}", *notes[:1]]))
    nearest = max((FORMATS[name] for name in names), key=lambda known: _likeness(known, has))
    near = {ours: _nearest(ours, has) for ours in (*PHASES, MEAN)}
    raise InputError(
        f"{lacking}; the nearest is {nearest.title}, which has {', '.join(nearest.signs[:2])}; name the tags of this log, such as "
        f"{' '.join(f'--column {ours}={tag}' for ours, tag in near.items())} (it has {rows.listed(has)})"
    )


def _likeness(kind: Format, names: Sequence[str]) -> float:
    parts = {part for name in names for part in re.findall("[a-z]{3,}", name.lower())}
    terms = {part for e in sum(kind.by_ours.values(), ()) for part in re.findall("[a-z]{3,}", e.lower())}
    return len(parts & terms) / max(len(terms), 1)


def _nearest(ours: str, names: Sequence[str]) -> str:
    """Return the name that is most like the names of all frameworks for ours."""
    known = {e for kind in FORMATS.values() for e in kind.by_ours.get(ours, ())}
    return max(names[:HEAD], key=lambda tag: max(SequenceMatcher(None, tag, e).ratio() for e in known))


def _holes(metrics: pd.DataFrame) -> list[str]:
    """Return notes on numbers that few of the steps lack, as if their text was cut or mixed."""
    ours = [key for key in metrics if key in OURS]
    whole = metrics[ours].notna().mean(axis=1) > 0.5
    notes = []
    for key in ours:
        steps = metrics.loc[whole & metrics[key].isna(), "step"].tolist()
        if 0 < len(steps) < whole.sum() / 2:
            notes.append(
                f"step {', '.join(map(str, steps[:5]))}{' …' if len(steps) > 5 else ''}: no {key}, as where a line is cut or has "
                "the text of another process in it: left out"
            )
    return notes


def _remedy(ours: str, kind: Format) -> str:
    theirs = kind.by_ours.get(ours, ())
    return f"{f'log {theirs[0]}, or ' if theirs else ''}name its tag with --column {ours}=TAG"


def _with_lengths(
    metrics: pd.DataFrame,
    path: Path,
    kind: Format,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    notes: list[str],
) -> pd.DataFrame:
    """Return the metrics with the lengths of responses and prompts and the number of tokens of each
    step, as far as they follow."""
    if {MEAN, SEQUENCE} <= {*metrics} and PROMPT not in metrics:
        metrics[PROMPT] = metrics[SEQUENCE] - metrics[MEAN]
    if PROMPT not in metrics and prompt_tokens is not None:
        metrics[PROMPT] = float(prompt_tokens)
    if {PROMPT, SEQUENCE} <= {*metrics} and MEAN not in metrics:
        metrics[MEAN] = metrics[SEQUENCE] - metrics[PROMPT]
    if MEAN not in metrics and SEQUENCE not in metrics:
        raise InputError(
            f"{path}: a {kind.title} log without the mean length of responses ({_remedy(MEAN, kind)}), or its lines are wrapped "
            "or cut; name the log that has it, or give the run's own lengths, imported from a dump (simrl calibrate --trace)"
        )
    if PROMPT not in metrics:
        raise InputError(
            f"{path}: a {kind.title} log that does not say how long prompts are; give their mean with --prompt-tokens, "
            f"or name its tag with --column {PROMPT}=TAG"
        )
    metrics[CLIPPED] = metrics.get(CLIPPED, 0.0)
    for key, values in _ends(metrics, samples or SAMPLES, cap_tokens).items():
        if key not in metrics:
            metrics[key] = values
            notes.append(
                f"{key} is not logged: estimated from the mean and the share at the cap, as of a lognormal with sigma {SIGMA:g} "
                f"(assumed); --cap-tokens gives the cap, --column {key}=TAG its tag"
            )
    apart = (metrics[PROMPT] % 1 > 0).astype(float)  # only the mean is known: all are near it
    for key, ends in (
        ("min", ((metrics[PROMPT] - apart) // 1).clip(1.0)),
        ("max", -((-metrics[PROMPT] - apart) // 1)),
    ):
        if f"prompt_length/{key}" not in metrics:
            metrics[f"prompt_length/{key}"] = ends
    metrics[TOTAL] = _total_tokens(metrics, path, kind, samples)
    return metrics


def _ends(metrics: pd.DataFrame, samples: int, cap_tokens: int | None) -> dict[str, pd.Series]:
    """Return the largest and smallest response of each step, as of a lognormal with this mean."""
    alone = 1.0 / (samples + 1)
    clipped, mean = metrics[CLIPPED].fillna(0.0), metrics[MEAN]

    def over_mean(tail: float) -> float:
        return math.exp(SIGMA * NormalDist().inv_cdf(1.0 - tail) - SIGMA**2 / 2)

    tails = clipped.where(clipped > 0, alone).clip(alone, 1.0 - alone)
    largest = (mean * tails.map(over_mean)).clip(mean * 1.05, mean / tails)
    cap = float(cap_tokens or largest[clipped > 0].max())
    if math.isfinite(cap):
        largest = largest.clip(upper=cap).where(clipped == 0, cap)
    return {
        "response_length/max": largest.round(),
        "response_length/min": (mean * over_mean(1.0 - alone)).clip(1.0).round(),
    }


def _total_tokens(
    metrics: pd.DataFrame, path: Path, kind: Format, samples: int | None
) -> pd.Series:
    """Return the tokens of each step's prompts and responses."""
    nothing = pd.Series(math.nan, metrics.index)
    mean = metrics[MEAN] + metrics[PROMPT]
    count = metrics.get("samples", nothing).fillna(math.nan if samples is None else samples)
    total, per_rank = metrics.get(TOTAL, nothing), metrics.get(PER_RANK, nothing)
    known = total.fillna(count * mean)
    if known.isna().all():
        raise InputError(
            f"{path}: a {kind.title} log that does not say how many responses a step has; give them with --samples"
        )
    ranks = (known / per_rank).median()
    if math.isfinite(ranks) and abs(ranks - round(ranks)) < 0.01:
        total = total.fillna(per_rank * round(ranks))
    return total.fillna(count * mean)
