"""Totals of the board of real runs: setups that gave constants and strangers apart, and each setup with the constants of the
others.

Invariant: a total counts scored quantities alone, each once. The three groups: the first two divide the board, and *leave one
setup out* is all of it, predicted without what a setup gave itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from experiments.reproduce.real_setups import cause_of, read_setups
from simrl.errors import InputError

Entry = Mapping[str, Any]
Sums = dict[str, Any]
KINDS = {"step": "steps", "phase": "phases", "ratio": "ratios", "training step": "training steps"}
LEAVE_ONE_OUT = "leave one setup out"
GROUPS = (LEAVE_ONE_OUT, "gave constants", "strangers")
SUMS = {group: group.replace(" ", "_") for group in (*GROUPS, *KINDS.values())}  # keys of totals
FAR = 0.3  # of |error|, from which a quantity has its cause on the page


def of_group(entries: Iterable[Entry], group: str) -> list[tuple[Entry, float]]:
    """Return the scored quantities of a group, but sides, with their errors in it."""
    setups = read_setups().setups
    return [
        (entry, entry["left_out_error"] if group == LEAVE_ONE_OUT else entry["error"])
        for entry in entries
        if entry["scored"]
        and entry["error"] is not None
        and (
            group == LEAVE_ONE_OUT
            or (group == "gave constants") == bool(setups[entry["setup"]].gave)
        )
    ]


def sums(errors: Sequence[tuple[Entry, float]]) -> Sums:
    """Return the number of quantities, the medians of |error| and of the error, and the worst."""
    if not errors:
        return {"count": 0, "median_error": None, "signed_median": None, "worst": None}
    worst, error = max(errors, key=lambda pair: abs(pair[1]))
    return {
        "count": len(errors),
        "median_error": median(abs(error) for _, error in errors),
        "signed_median": median(error for _, error in errors),
        "worst": {"id": worst["id"], "quantity": worst["quantity"], "error": error},
    }


def reversed_orders(errors: Iterable[tuple[Entry, float]]) -> list[str]:
    """Return the ratios that are predicted on the other side of 1."""
    return [
        entry["id"]
        for entry, error in errors
        if entry["kind"] == "ratio"
        and (entry["measured"] > 1) != (entry["measured"] * (1 + error) > 1)
    ]


def totals(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the sums of each group by kind, with the reversed orders; the sides that agree; and how many are not scored."""
    board: dict[str, Any] = {}
    for group in GROUPS:
        errors = of_group(entries, group)
        board[SUMS[group]] = {
            SUMS[name]: sums([pair for pair in errors if pair[0]["kind"] == kind])
            for kind, name in KINDS.items()
        }
        board[SUMS[group]]["reversed"] = reversed_orders(errors)
    sides = [entry for entry in entries if entry["scored"] and entry["kind"] == "side"]
    board["sides"] = {
        "count": len(sides),
        "agree": sum(entry["measured"] == entry["predicted"] for entry in sides),
    }
    board["not_scored"] = sum(not entry["scored"] for entry in entries)
    return board


HEADS = ("", "n", "median error", "signed median", "worst")


def table(entries: Sequence[Entry]) -> list[list[str]]:
    """Return the cells of the totals, under HEADS."""
    board = totals(entries)
    return [
        [f"{group}: {name}", *_cells(board[SUMS[group]][SUMS[name]])]
        for group in GROUPS
        for name in KINDS.values()
        if board[SUMS[group]][SUMS[name]]["count"]
    ]


def _cells(of: Sums) -> list[str]:
    worst = of["worst"]
    quantity = "" if "ratio" in worst["quantity"] else f" {worst['quantity']}"
    return [
        str(of["count"]),
        f"{of['median_error']:.0%}",
        signed(of["signed_median"]),
        f"{signed(worst['error'])} ({worst['id']}{quantity})",
    ]


def signed(error: float) -> str:
    """Return an error in percent with its sign; none for less than half a percent."""
    return f"{error:+.0%}" if round(100 * error) else "0%"


def sentences(entries: Sequence[Entry]) -> list[str]:
    """Return the totals in words."""
    lines = []
    for name, count, size, signed, worst in table(entries):
        head = f"{name[0].upper()}{name[1:]}: {count}"
        lines.append(f"{head}, median error {size}, signed median {signed}, worst {worst}.")
    return [*lines, *remarks(entries)]


def remarks(entries: Sequence[Entry]) -> list[str]:
    """Return what no table of totals says: reversed orders, sides, and what is not scored."""
    board, lines = totals(entries), []
    left_out = board[SUMS[LEAVE_ONE_OUT]]
    if left_out["ratios"]["count"]:
        orders = [
            f"{entry['id']} (measured {entry['measured']:.2f}, predicted {entry['left_out']:.2f})"
            for entry in entries
            if entry["id"] in left_out["reversed"]
        ]
        lines.append(f"Orders reversed: {', '.join(orders) or 'none'}.")
    if board["sides"]["count"]:
        lines.append(
            f"Side that binds: {board['sides']['agree']} of {board['sides']['count']} as measured."
        )
    if board["not_scored"]:
        lines.append(f"{board['not_scored']} quantities are not scored, or not predicted yet.")
    return lines


CLASS_HEADS = ("class", "of", *GROUPS)


def by_class(entries: Sequence[Entry]) -> list[list[str]]:
    """Return the cells of the totals by the kind of layers, the engine and the GPU, under CLASS_HEADS."""
    groups = {group: of_group(entries, group) for group in GROUPS}
    rows = []
    for name in dict.fromkeys(name for entry in entries for name in classes(entry)):
        for kind, kinds in KINDS.items():
            of_groups = [
                sums([(e, x) for e, x in errors if e["kind"] == kind and name in classes(e)])
                for errors in groups.values()
            ]
            if any(of["count"] for of in of_groups):
                rows.append([name, kinds, *map(_in_a_cell, of_groups)])
    order = ("dense", "experts", "hybrid", "vLLM", "SGLang", "TRT-LLM", "H100", "other GPUs")
    return sorted(rows, key=lambda row: order.index(row[0]))


def _in_a_cell(of: Sums) -> str:
    if not of["count"]:
        return ""
    worst = of["worst"]
    return (
        f"{of['count']}: {of['median_error']:.0%}, {signed(of['signed_median'])}, "
        f"worst {signed(worst['error'])}"
    )


def classes(entry: Entry) -> Iterator[str]:
    """Yield the classes of a quantity."""
    setup = read_setups().setups[entry["setup"]]
    yield setup.layers(entry["id"]) or ""
    if setup.engine:
        yield setup.engine
    yield "H100" if setup.gpu == "H100" else "other GPUs"


def far_off(entries: Iterable[Entry]) -> list[Entry]:
    """Return the quantities, scored or not, whose error is beyond FAR, also with the constants left out."""
    return [
        entry
        for entry in entries
        if max(abs(entry[key] or 0.0) for key in ("error", "left_out_error")) > FAR
    ]


def causes(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the quantities that are far off by their cause; without one under an empty text."""
    by_cause: dict[str, list[Entry]] = {}
    for entry in far_off(entries):
        by_cause.setdefault(cause_of(entry["id"], entry["quantity"]) or "", []).append(entry)
    return by_cause


def require_causes(entries: Iterable[Entry]) -> None:
    """Raise `InputError` for quantities that are far off without a cause."""
    if lacking := causes(entries).get(""):
        names = ", ".join(f"{e['id']} {e['quantity']} ({e['error']:+.0%})" for e in lacking)
        raise InputError(
            f"more than {FAR:.0%} off, and real_setups.yaml has no cause: {names}; add why to causes"
        )
