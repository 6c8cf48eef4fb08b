"""Metrics logs of runs, of any framework, as one table in verl's names: a row a step, seconds and
lengths.

Invariant: a value that a log lacks is missing (NaN, or no column), never guessed, but for the
largest and smallest response beside a mean, which are estimated and noted. `attrs` of the table
have the file's name (`source`), the framework (`format`), `notes` on what was left out or
estimated, and `lacks`: the seconds that the log does not have, by our names, and where they are.
Where a log has neither the number of responses nor the length of prompts, one line asks for it. Of
a step logged twice, as after a resume, later values count.

A framework is a table of `metrics.toml`, which gives the names and the form of its console
(`console`). What W&B, TensorBoard, MLflow, SwanLab or the framework itself wrote is read by
`exports`. For other names the user maps ours to theirs.
"""

from __future__ import annotations

import math
import mmap
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import pandas as pd

from simrl.errors import InputError, meant, refuse
from simrl.trace.importers import rows
from simrl.trace.importers.console import records
from simrl.trace.importers.exports import (
    RUN_STEPS,
    STEP,
    STEPS,
    WANDB_STEPS,
    Logged,
    read_rows,
    step_of,
)
from simrl.validation import Model

Heads = dict[tuple[str, ...], tuple[pd.DataFrame, list[str]]]  # first steps of a log, by form
MOST = 1e15  # tokens or seconds of a step
MOST_TAGS = 10_000  # of a log: a column each
HEAD, SMALL = 200, 2**20  # rows by which a framework is recognised; bytes
OPERATOR = re.compile(r"\s+([-+*/])\s+")
OPERATIONS = {"+": "add", "-": "sub", "*": "mul", "/": "div"}  # of pandas
SIGMA, SAMPLES = 0.8, 512  # assumed of lengths whose largest is not logged: of the log, and a step


class Format(Model):
    """The metrics of a framework; `metrics.toml` explains the keys."""

    title: str
    signs: tuple[str, ...]
    also: tuple[str, ...] = ()
    names: Mapping[str, str | tuple[str, ...]] = {}
    prefix: str = ""
    summed: str = ""
    lacks: Mapping[str, str] = {}
    console: str = ""
    step: str = ""
    begins: str = ""
    counted: str = ""

    @property
    def by_ours(self) -> dict[str, tuple[str, ...]]:
        """Return their expressions by our names, the first that a step has first."""
        return {ours: (it,) if isinstance(it, str) else it for ours, it in self.names.items()}


FORMATS = {
    name: Format.model_validate(table)
    for name, table in tomllib.loads(
        Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    ).items()
}
ALIASES = {alias: name for name, kind in FORMATS.items() for alias in (name, *kind.also)}
TERMS = {  # their tags, which the names of an exported table may end with
    tag: tag
    for kind in FORMATS.values()
    for expressions in kind.by_ours.values()
    for expression in expressions
    for term in OPERATOR.split(expression.removeprefix("next "))[::2]
    for tag in (term, kind.prefix + term)
}
OURS = {ours for kind in FORMATS.values() for ours in kind.by_ours}
SUMMED = tuple(kind.summed for kind in FORMATS.values() if kind.summed)
EXPORTS = ("wandb", "tensorboard", "mlflow", "swanlab")  # names of tables, of any framework
MEAN, CLIPPED, PROMPT = "response_length/mean", "response_length/clip_ratio", "prompt_length/mean"
TOTAL, PER_RANK, SEQUENCE = "perf/total_num_tokens", "global_seqlen/mean", "sequence_length/mean"
MEASURED = ("timing_s/", "response_length/", "sequence_length/")  # one is in each step
PHASES = ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/step")
NUMBERED = r"(?i)\b(?:step|iter(?:ation)?|rollout|update)\b[ :=#/]{0,3}([0-9]{1,9})"
OTHERS = [  # forms that a console of any names may have
    {"console": console, "step": step, "begins": begins, "counted": ""}
    for console, step, begins in (
        ("entries", rf"{NUMBERED}(?: - |\s*$)", " - "),
        ("named", rf"{NUMBERED} \| ", " | "),
        ("dictionary", rf"{NUMBERED}[^{{]{{0,80}}(?=\{{)", "{"),
        ("bullets", NUMBERED, "tep"),
        ("table", NUMBERED, "tep"),
        ("lines", NUMBERED, "tep"),
        ("lines", r"Run summary:()", "Run summary:"),  # of W&B, at the end of a console
    )
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
    wrong = next((ours for ours in columns or {} if ours not in (*OURS, "step")), "")
    refuse(
        (
            log_format not in (None, *ALIASES, *EXPORTS),
            f"--format {log_format}: unknown{meant(log_format, [*ALIASES, *EXPORTS])}; choose one of "
            f"{', '.join([*FORMATS, *EXPORTS])}",
        ),
        (
            wrong,
            f"--column {wrong}: no column that simrl reads{meant(wrong, OURS)}; name some of {', '.join(sorted(OURS))}",
        ),
    )
    mapped = {ours: (it, it.replace("+", " + ")) for ours, it in (columns or {}).items()}
    terms = {term: term for _, it in mapped.values() for term in OPERATOR.split(it)[::2]}
    terms = TERMS | terms | {it: STEP for it, _ in [mapped.pop("step", ("", ""))] if it}
    names = [ALIASES[log_format]] if log_format in ALIASES else [*FORMATS]
    heads: Heads = {}
    name, kind = _recognised(path, names, heads, terms) or (
        "",
        _unnamed(path, names, mapped, heads, terms),
    )
    tags = _by_step(_logged(path, kind, notes, terms), notes)
    metrics, step = _named(tags, kind, mapped), (columns or {}).get("step", "")
    refuse(
        (
            step and step not in tags,
            f"{path}: --column step={step}: no {step} in it{meant(step, map(str, tags))}; it has {rows.listed(map(str, tags))}",
        )
    )
    if absent := next((ours for ours in mapped if ours not in metrics), None):
        parts = OPERATOR.split(mapped[absent][1])[::2]
        missing = next(term for term in parts if _column(term, tags, kind, {}) is None)
        raise InputError(
            f"{path}: --column {absent}={mapped[absent][0]}: no {missing} in it{meant(missing, map(str, tags))}; "
            f"it has {rows.listed(get_close_matches(missing, tags.columns, 12, 0.0))}"
        )
    notes += _holes(metrics)
    for key in OURS & {*metrics}:
        is_wrong = ~metrics[key].between(0, 1 if key == CLIPPED else MOST) & metrics[key].notna()
        at = rows.listed(map(str, metrics.loc[is_wrong, "step"]))
        notes += [
            f"Step {at}: {key} is no such number, and left out: negative, or too large."
        ] * any(is_wrong)
        metrics[key] = metrics[key].mask(is_wrong)
    measured = [key for key in metrics if key in OURS and key.startswith(MEASURED)]
    is_step = metrics[measured].notna().any(axis=1)
    others = rows.listed(map(str, metrics.loc[~is_step, "step"]))
    notes += [f"Steps {others}: no time and no length in them."] * any(~is_step)
    metrics = metrics[is_step].reset_index(drop=True)
    if lengths:
        metrics = _with_lengths(metrics, path, kind, samples, prompt_tokens, cap_tokens, notes)
    lacks = {
        ours: _unreadable(path, ours, kind)
        or kind.lacks.get(ours, f"no {ours}: {_remedy(ours, kind)}")
        for ours in PHASES
        if ours not in metrics
    }
    metrics.attrs |= {"source": path.name, "format": name, "notes": notes, "lacks": lacks}
    return metrics


def recognised(path: Path) -> str | None:
    """Return the framework that wrote a log; None if none did."""
    return (_recognised(path, [*FORMATS], {}, TERMS) or (None,))[0]


def _recognised(
    path: Path, names: Sequence[str], heads: Heads, tags: Mapping[str, str]
) -> tuple[str, Format] | None:
    """Return the framework that most of the names in the first steps of a log are of, with the form
    of this console; None if none is of any."""
    size = path.stat().st_size if path.is_file() else 0
    signed = [name for name in names if size and _has(path, FORMATS[name].signs)]
    if size > SMALL and not signed:  # of a small one, wrapped, each sign may be on two lines
        return None
    usual = [(name, FORMATS[name]) for name in signed or names]
    others = [(n, FORMATS[n].model_copy(update=form)) for form in OTHERS for n in names]

    def columns(choice: tuple[str, Format]) -> int:
        return len(OURS & {*_named(_head(path, choice[1], heads, tags)[0], choice[1])})

    for choices in (usual, others):
        best = max(choices, key=columns)
        if columns(best):
            return best
    return None


def _head(
    path: Path, kind: Format, heads: Heads, tags: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the first steps of a log, in their names, and notes on them; each form is read once."""
    form = (kind.console, kind.step, kind.begins, kind.counted)
    if form not in heads:
        key = form if read_rows(path, tags, []) is None else ()
        if key not in heads:
            notes: list[str] = []
            heads[key] = _by_step(islice(_logged(path, kind, notes, tags), HEAD), notes), notes
        heads[form] = heads[key]
    return heads[form]


def _has(path: Path, signs: tuple[str, ...]) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return any(text.find(sign.encode()) >= 0 for sign in signs)


def _logged(
    path: Path, kind: Format, notes: list[str], tags: Mapping[str, str]
) -> Iterable[Logged]:
    """Return the rows of a log, in their names."""
    logged = read_rows(path, tags, notes)
    if logged is None and kind.console:
        logged = records(path, kind.console, kind.step, kind.begins, kind.counted)
    step = next((tag for tag, read_as in tags.items() if read_as == STEP), "")
    return (
        (place, {**row, STEP: row[step]} if step in row else row) for place, row in logged or ()
    )


def _by_step(logged: Iterable[Logged], notes: list[str]) -> pd.DataFrame:
    """Return a row a step, in their names. A row without the step of the run belongs to the next
    row that has one; if none has, the step is the one that W&B counted."""
    steps, counted = dict[int, dict[str, float]](), dict[int, dict[str, float]]()
    waiting, tags, again = dict[str, float](), set[str](), set[int]()
    logged = [*logged]
    first = next((name for name in RUN_STEPS if any(name in row for _, row in logged)), "")
    others = {  # they count something else, such as episodes
        name
        for _, row in logged
        for name in RUN_STEPS
        if abs(row.get(name, 0.0) - row.get(first, 0.0)) > 0 and {name, first} <= row.keys()
    }
    names = [name for name in RUN_STEPS if name not in others]
    for place, row in logged:
        values = {t: v for t, v in row.items() if t not in STEPS and not t.startswith("_")}
        tags |= values.keys()
        refuse(
            (
                len(tags) > MOST_TAGS,
                f"{place}: more than {MOST_TAGS:,} metrics; is it the log of one run?",
            )
        )
        try:
            step, count = step_of(row, place, names), step_of(row, place, WANDB_STEPS)
            refuse((step is None and others & row.keys(), f"{place}: no {first} in it"))
        except InputError as error:
            notes.append(f"{error} (left out)")
            continue
        if step is None and count is not None:
            counted.setdefault(count, {}).update(values)
        sums = {tag: waiting.get(tag, 0.0) for tag in values if tag.startswith(SUMMED)}
        waiting |= {tag: value + sums.get(tag, 0.0) for tag, value in values.items()}
        if step is not None:
            before = steps.setdefault(step, {})
            again |= (
                {step} if any(abs(before.get(t, v) - v) > 0 for t, v in waiting.items()) else set()
            )
            before.update(waiting)
            waiting = {}
    notes += [
        f"Logged twice, with other numbers, as after a restart or of two runs: step {rows.listed(map(str, sorted(again)))}; "
        "the later ones count."
    ] * bool(again)
    return pd.DataFrame([{"step": n, **row} for n, row in sorted((steps or counted).items())])


def _named(
    tags: pd.DataFrame, kind: Format, mapped: Mapping[str, tuple[str, ...]] | None = None
) -> pd.DataFrame:
    """Return the rows in our names, beside their own. Of several expressions the first counts whose
    tags are in the log, for all its steps."""
    metrics: dict[str, pd.Series] = {}
    for ours, expressions in (kind.by_ours | dict(mapped or {})).items():
        for expression in expressions:
            values = _value(expression, tags, kind, metrics) if ours not in metrics else None
            metrics |= {} if values is None else {ours: values}
    others = tags[[tag for tag in tags if tag not in OURS]]
    return pd.concat([others, pd.DataFrame(metrics, index=tags.index)], axis=1)


def _value(
    expression: str, tags: pd.DataFrame, kind: Format, metrics: Mapping[str, pd.Series]
) -> pd.Series | None:
    """Return the values of an expression of tags; None if a tag of it is not in the log."""
    whole = _column(expression, tags, kind, {})
    first, *rest = OPERATOR.split(expression)
    total = _column(first, tags, kind, metrics) if whole is None else whole
    for sign, term in zip(rest[::2], rest[1::2], strict=True) if whole is None else ():
        values = _column(term, tags, kind, metrics)
        total = (
            None if total is None or values is None else getattr(total, OPERATIONS[sign])(values)
        )
    return total


def _column(
    term: str, tags: pd.DataFrame, kind: Format, metrics: Mapping[str, pd.Series]
) -> pd.Series | None:
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", term):
        return pd.Series(float(term), tags.index)
    name = term.removeprefix("next ")
    column = tags.get(name, tags.get(kind.prefix + name, metrics.get(name)))
    if column is None or name == term:
        return column
    return column.shift(-1).where(tags["step"].shift(-1) == tags["step"] + 1)


def _unnamed(
    path: Path,
    names: Sequence[str],
    mapped: Mapping[str, tuple[str, ...]],
    heads: Heads,
    terms: Mapping[str, str],
) -> Format:
    """Return the form of a log whose names the user maps. Raises `InputError` where none is mapped:
    with the names that the log has, the nearest ones first."""
    other = (_recognised(path, [*FORMATS], heads, terms) or (None,))[0] if not mapped else None
    lacking = f"{path}: no metrics of {', '.join(FORMATS[name].title for name in names)} in it"
    kinds = [Format.model_validate({"title": "", "signs": (), **form}) for form in OTHERS]
    kind = max(kinds, key=lambda kind: len(_head(path, kind, heads, terms)[0].columns))
    tags, notes = _head(path, kind, heads, terms)
    has = [str(tag) for tag in tags if tag != "step"]
    if mapped:
        return kind
    refuse(
        (other, f"{lacking}, but of {FORMATS[other or 'verl'].title}; read it as --format {other}"),
        (
            not has,
            f"{lacking}; no step with names and numbers; name the run's metrics log: its console, or what W&B, TensorBoard, "
            f"MLflow or SwanLab exported{''.join(f'; {note}' for note in notes[:1])}",
        ),
    )
    near = {
        ours: max(
            (SequenceMatcher(None, tag, theirs).ratio(), tag, theirs, known.title)
            for known in FORMATS.values()
            for theirs in known.by_ours.get(ours, ())
            for tag in has[:HEAD]
        )
        for ours in (*PHASES, MEAN)
    }
    _, tag, theirs, title = max(near.values())
    raise InputError(
        f"{lacking}; the nearest is {title}, whose {theirs} is like {tag}; name the tags of this log, such as "
        f"{' '.join(f'--column {ours}={like[1]}' for ours, like in near.items())} (it has {rows.listed(has)})"
    )


def _holes(metrics: pd.DataFrame) -> list[str]:
    """Return notes on numbers that few of the steps lack, as if their text was cut or mixed."""
    ours = [key for key in metrics if key in OURS]
    whole = metrics[ours].notna().mean(axis=1) > 0.5
    holes = {key: metrics.loc[whole & metrics[key].isna(), "step"].tolist() for key in ours}
    return [
        f"Step {rows.listed(map(str, steps))}: no {key}, as where a line is cut or has the text of another process in it."
        for key, steps in holes.items()
        if 0 < len(steps) < whole.sum() / 2
    ]


def _unreadable(path: Path, ours: str, kind: Format) -> str:
    """Return a message on a metric whose name is in a log, without a number; empty if it is not."""
    signs = [sign for sign in kind.by_ours.get(ours, ()) if re.fullmatch(r"\w+[/_]\S+", sign)]
    for sign in signs if path.is_file() and kind.title and path.stat().st_size else ():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            times = len(re.findall(rf"(?<![\w/]){re.escape(sign)}(?![\w/])".encode(), text))
        if times:
            return (
                f"no {ours} that can be read: {sign} is {times} times in it, without a number or with one that is cut "
                "or has other text in it"
            )
    return ""


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
    origins = {CLIPPED: "taken as 0"} if CLIPPED not in metrics else {}
    if {MEAN, SEQUENCE} <= {*metrics} and PROMPT not in metrics:
        metrics[PROMPT] = metrics[SEQUENCE] - metrics[MEAN]
    origins |= {PROMPT: "of --prompt-tokens"} if PROMPT not in metrics else {}
    metrics[PROMPT] = metrics.get(PROMPT, math.nan if prompt_tokens is None else prompt_tokens)
    if MEAN not in metrics and SEQUENCE in metrics:
        metrics[MEAN] = metrics[SEQUENCE] - metrics[PROMPT]
    refuse(
        (
            MEAN not in metrics,
            f"{path}: a {kind.title} log without the mean length of responses ({_remedy(MEAN, kind)}), or its lines are "
            "wrapped or cut; name the log that has it, or give the run's own lengths, imported from a dump (simrl calibrate "
            "--trace)",
        ),
        (
            metrics[PROMPT].isna().all(),
            f"{path}: a {kind.title} log that does not say how long prompts are; give their mean with --prompt-tokens, "
            f"or name its tag with --column {PROMPT}=TAG",
        ),
    )
    metrics[CLIPPED] = metrics.get(CLIPPED, 0.0)
    ends = _ends(metrics, samples or SAMPLES, cap_tokens)
    missing = [key for key in ends if key not in metrics]
    metrics = metrics.assign(**{key: ends[key] for key in missing})
    notes += [
        f"{'Unreadable or not' if any(_unreadable(path, key, kind) for key in missing) else 'Not'} logged, and "
        f"estimated: {', '.join(missing)}." + " They are of a lognormal with sigma "
        f"{SIGMA:g} (assumed) that has the mean and share at the cap; --cap-tokens gives the cap."
        * any(key.startswith("response") for key in missing)
        + " All prompts are as long as their mean." * any("prompt" in key for key in missing)
    ] * bool(missing)
    is_told = {TOTAL, "samples"} & {*metrics}
    origins |= dict.fromkeys(missing, "estimated")
    origins |= {} if is_told or samples is None else {"number of samples": "of --samples"}
    metrics.attrs["origins"] = origins
    metrics[TOTAL] = _total_tokens(metrics, path, kind, samples)
    return metrics


def _ends(metrics: pd.DataFrame, samples: int, cap_tokens: int | None) -> dict[str, pd.Series]:
    """Return the largest and smallest response of each step, as of a lognormal with this mean, and
    the largest and smallest prompt, near their mean."""
    alone = 1.0 / (samples + 1)
    clipped, mean = metrics[CLIPPED].fillna(0.0), metrics[MEAN]

    def over_mean(tail: float) -> float:
        return math.exp(SIGMA * NormalDist().inv_cdf(1.0 - tail) - SIGMA**2 / 2)

    tails = clipped.where(clipped > 0, alone).clip(alone, 1.0 - alone)
    largest = (mean * tails.map(over_mean)).clip(mean * 1.05, mean / tails)
    cap = float(cap_tokens or largest[clipped > 0].max())
    largest = largest if math.isnan(cap) else largest.clip(upper=cap).where(clipped == 0, cap)
    apart = (metrics[PROMPT] % 1 > 0).astype(float)
    return {
        "prompt_length/min": ((metrics[PROMPT] - apart) // 1).clip(1.0),
        "prompt_length/max": -((-metrics[PROMPT] - apart) // 1),
        "response_length/max": largest.round(),
        "response_length/min": (mean * over_mean(1.0 - alone)).clip(1.0).round(),
    }


def _total_tokens(
    metrics: pd.DataFrame, path: Path, kind: Format, samples: int | None
) -> pd.Series:
    """Return the tokens of each step's prompts and responses."""
    nothing = pd.Series(math.nan, metrics.index)
    mean = metrics[MEAN] + metrics[PROMPT]
    count = metrics.get("samples", nothing).round().fillna(samples or math.nan)
    total, per_rank = metrics.get(TOTAL, nothing), metrics.get(PER_RANK, nothing)
    known = total.fillna(count * mean)
    refuse(
        (
            known.isna().all(),
            f"{path}: a {kind.title} log that does not say how many responses a step has; give them with --samples",
        )
    )
    ranks = (known / per_rank).median()
    if math.isfinite(ranks) and abs(ranks - round(ranks)) < 0.01:
        total = total.fillna(per_rank * round(ranks))
    return total.fillna(count * mean)
