"""The board of real runs: every measured quantity beside its prediction, with the error and what moves the prediction most.

Invariant: measured values come in after all predictions are made. A quantity that is not predicted yet, or not scored, says why
and counts in no total. Setups that gave constants and strangers count apart (`real_scores`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from experiments.reproduce.board import (
    by_text,
    drivers_of,
    ledger_of,
    moved_by,
    number,
    print_ledger,
    print_table,
    span,
)
from experiments.reproduce.ledger import read_ledger
from experiments.reproduce.predict import FAMILIES, Prediction
from experiments.reproduce.real_measured import again, measured
from experiments.reproduce.real_scores import sentences
from experiments.reproduce.real_setups import setup_of
from experiments.validate_training import read_steps, scored
from simrl.errors import InputError, meant

Entry = dict[str, Any]
SIDE = "trainer waits"  # a share of its step
BINDS = 0.1  # of the step, from which the side that is waited for is the rollout
LEVEL = 1e-3  # of a prediction: an interval that is narrower is rounding
TRAINING_STEPS = "train_step_benchmarks"
CONSTANT = "the seconds of an RL step beyond its operations are set on the steps of the other GPUs"


class Quantities(NamedTuple):
    """The quantities of a row; `why_not` they are not predicted yet, `why_unscored` they are predicted and count nowhere, and
    `evidence`, by quantity, why a single one does not."""

    family: str | None
    names: tuple[str, ...]
    why_not: str | None = None
    why_unscored: str | None = None
    evidence: Mapping[str, str] = MappingProxyType({})


def all_rows() -> dict[str, Quantities]:
    """Return all rows but those of single training steps, family by family."""
    found: dict[str, Quantities] = {}
    for name, family in FAMILIES.items():
        unscored = getattr(family, "UNSCORED", {})
        for row, names in family.QUANTITIES.items():
            evidence = getattr(family, "EVIDENCE", {})
            found[row] = Quantities(
                name, names, why_unscored=unscored.get(row), evidence=evidence.get(row, {})
            )
        for row, (quantity, why) in getattr(family, "NOT_YET", {}).items():
            found[row] = Quantities(name, (quantity,), why_not=why)
    return found


def wanted_rows(ids: Sequence[str], training_steps: Iterable[str]) -> list[str]:
    """Return the rows that are asked for, each once; all without any. Raise `InputError` for one that is unknown."""
    known = [*all_rows(), *training_steps]
    for row in ids:
        if row not in known:
            raise InputError(
                f"{row}: no real run{meant(row, known)}; there are {', '.join(all_rows())}, and train-…"
            )
    return list(dict.fromkeys(ids or known))


def training_steps(data: Path) -> dict[str, Entry]:
    """Return an entry of each measured training step, as experiments/validate_training.py scores them."""
    steps, _ = read_steps(data)
    found = {}
    for step, row in zip(steps, scored(steps)[1], strict=True):
        words = f"train-{step.gpus}x{step.gpu}-{step.model}-{step.words}-{step.sequence_tokens}".replace(
            " ", "-"
        )
        found[words] = {
            **_entry(words, "step_s", "training step"),
            "measured": step.step_s,
            **dict.fromkeys(("predicted", "left_out"), row["predicted_s"]),
            **dict.fromkeys(("error", "left_out_error"), row["error"]),
            "note": CONSTANT if step.rl else None,
        }
    return found


def entries_of(rows: Sequence[str], predicted: Mapping[str, Prediction], data: Path) -> list[Entry]:
    """Return an entry of each quantity of the rows, for `json.dumps`: id, quantity, kind, measured, measured_again (by others),
    predicted, low, high, error (None without a prediction, or an interval), left_out, left_out_error (the constants that its
    setup gave left out; as predicted where it gave none), scored, open_inputs that were asked for, driver (of these, with the
    strongest rank correlation), why_not, note, setup and ledger (their names), asked."""
    outcomes, second, known = measured(data), again(data), all_rows()
    singles = training_steps(data)
    found: list[Entry] = []
    for row in rows:
        if row in singles:
            found.append(singles[row])
            continue
        for i, quantity in enumerate(known[row].names):
            entry = _predicted(row, known[row], i, predicted.get(row))
            _beside(entry, quantity, outcomes[row][i])
            if row in second:
                entry["measured_again"] = second[row][i]
            found.append(entry)
    return found


def _entry(row: str, quantity: str, kind: str) -> Entry:
    keys = (
        "measured",
        "measured_again",
        "predicted",
        "low",
        "high",
        "error",
        "left_out",
        "left_out_error",
        "driver",
        "why_not",
        "note",
        "ledger",
    )
    return {
        **{"id": row, "quantity": quantity, "kind": kind, **dict.fromkeys(keys)},
        "setup": setup_of(row),
        **{"scored": True, "open_inputs": [], "asked": []},
    }


def kind_of(quantity: str) -> str:
    """Return what a quantity is: a step, a phase, a ratio or a side."""
    if quantity == SIDE:
        return "side"
    return (
        "ratio"
        if quantity.endswith("ratio")
        else "step"
        if quantity in ("step_s", "hours")
        else "phase"
    )


def _predicted(row: str, of: Quantities, place: int, prediction: Prediction | None) -> Entry:
    entry = _entry(row, of.names[place], kind_of(of.names[place]))
    entry["ledger"], entry["note"] = of.family, of.why_unscored or of.evidence.get(of.names[place])
    entry["scored"] = of.why_not is None and entry["note"] is None
    if prediction is None or not prediction.elements or of.family is None:
        entry["why_not"] = of.why_not or (
            prediction.refused[0] if prediction and prediction.refused else "not predicted"
        )
        return {**entry, "scored": False}
    values = [elements[place] for elements in prediction.elements]
    entry["predicted"] = values[0]
    entry["left_out"] = values[0] if prediction.left_out is None else prediction.left_out[place]
    if len(values) > 1:
        entry["low"], entry["high"] = min(values), max(values)
    ledger = read_ledger(of.family)
    entry["asked"] = sorted(prediction.asked & set(ledger.inputs))
    entry["open_inputs"] = [name for name in ledger.open if name in prediction.asked]
    if max(values) - min(values) > LEVEL * abs(values[0]):
        entry["driver"] = next(iter(drivers_of(of.family, prediction, values)), None)
    return entry


def _beside(entry: Entry, quantity: str, value: float) -> None:
    """Set the measured value and the error. A share of waiting says only which side binds."""
    if quantity != SIDE:
        entry["measured"] = value
        if entry["predicted"] is not None:
            entry["error"] = entry["predicted"] / value - 1
            entry["left_out_error"] = entry["left_out"] / value - 1
        return
    entry["quantity"], entry["measured"] = "side that binds", _side(value)
    if entry["predicted"] is not None:
        predicted = [entry[key] for key in ("predicted", "low", "high") if entry[key] is not None]
        entry["predicted"], entry["low"], entry["high"] = _side(predicted[0]), None, None
        entry["left_out"] = _side(entry["left_out"])
        entry["note"] = (
            f"the trainer waits {' to '.join(f'{x:.0%}' for x in sorted(predicted)[:: max(len(predicted) - 1, 1)])}"
        )


def _side(share: float) -> str:
    return "rollout" if share > BINDS else "trainer"


def cells(entry: Entry) -> list[str]:
    """Return the cells of an entry, under HEADS; the error with the constants left out only where it differs."""
    interval = "" if entry["low"] is None else span(entry["low"], entry["high"])
    error = "" if entry["error"] is None else f"{entry['error']:+.0%}"
    left_out = "" if entry["left_out"] == entry["predicted"] else f"{entry['left_out_error']:+.0%}"
    if entry["predicted"] is not None and not entry["scored"]:
        error, left_out = f"({error})", left_out and f"({left_out})"
    predicted = "not yet" if entry["predicted"] is None else number(entry["predicted"])
    measured = number(entry["measured"])
    if entry["measured_again"] is not None:
        measured += f", again {number(entry['measured_again'])}"
    return [
        entry["id"],
        entry["quantity"],
        measured,
        predicted,
        interval,
        error,
        left_out,
        moved_by(entry["driver"]),
    ]


HEADS = (
    "run",
    "quantity",
    "measured",
    "predicted",
    "interval",
    "error",
    "constants left out",
    "moved most by",
)


def print_entries(entries: Sequence[Entry], console: Console) -> None:
    """Print a line for each quantity, the notes and the totals; for a single row, its ledger, too."""
    print_table(HEADS, map(cells, entries), console)
    for line in [*notes(entries), "", *sentences(entries)]:
        console.print(line)
    ledger = entries[0]["ledger"]
    if len({entry["id"] for entry in entries}) == 1 and ledger and entries[0]["asked"]:
        print_ledger(ledger_of(ledger), entries[0]["asked"], console)


def notes(entries: Sequence[Entry]) -> list[str]:
    """Return why rows are not predicted, and the notes of others, each once."""
    said = []
    for entry in entries:
        if entry["why_not"]:
            said.append((entry["id"], f"not yet: {entry['why_not']}"))
        elif entry["note"] and entry["kind"] != "training step":
            said.append((entry["id"], entry["note"]))
    return by_text(said)
