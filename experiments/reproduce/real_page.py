"""The board of real runs as a page: experiments/real_runs.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reproduce.ledger import LedgerInput, read_ledger
from experiments.reproduce.predict import FAMILIES
from experiments.reproduce.real_board import HEADS, Entry, cells, notes
from experiments.reproduce.real_scores import (
    CLASS_HEADS,
    FAR,
    HEADS as TOTAL_HEADS,
    LEAVE_ONE_OUT,
    by_class,
    causes,
    remarks,
    signed,
    table,
)
from experiments.reproduce.real_setups import read_setups
from experiments.shared import markdown
from simrl.validation import in_words

HEAD = """# Real runs, predicted

Runs of RL post-training that others measured and published, beside what simrl predicts from their configurations and lengths.
No scored number is fitted to what it stands beside, but some constants of simrl come from unscored steps and phases of these
setups. A *setup* is a framework with an engine on one kind of GPU, as one page or log has it. It gave constants, or it is a
stranger. The headline is *leave one setup out*: each setup is predicted with the constants of the others. This page, and the
[history of its errors](accuracy.csv), are written by

```console
python -m experiments.reproduce --real --page experiments/real_runs.md --data ../shared/data
python -m experiments.reproduce --real --accuracy experiments/accuracy.csv --samples 0 --data ../shared/data
```

A run's inputs are *stated* (its configuration, its page, its log), *inferred* from what is stated, or *assumed* with a range;
the last two are listed below, the others in `experiments/reproduce/ledgers/real_*.yaml`. Predicted: with every input at its
value. Interval: the lowest and the highest over the values and {samples} drawn sets of inputs. Moved most by: the open input
whose rank correlates most with the prediction's over these sets (of few sets, by chance too). Constants left out: the error
with the constants of the other setups. Errors in brackets count nowhere."""

FAMILY_NOTES = {
    "real_agent_opd": "Means over the complete logged steps; of `opd-i80f2v90` those whose responses have one token each, so "
    "that nothing but fixed costs is left; of `opd-do7bl4gg` those after the first 20. In one-token steps "
    "generation is the prompts, which the prefix cache computes once for sixteen responses. What misses: about a second of "
    "each log-prob pass and two of each update, and of generation the wait for tools of a minute at the end of a step (their "
    "mean and maximum are simulated, not that they come last).",
    "real_verl_fsdp": "Medians over the steps whose mean response is below 300 tokens (short) or above 500 (long), without "
    "evaluations and checkpoints. What misses: log-probs take 0.38 s a micro-batch beyond what grows with tokens, updates four "
    "times that, as weights would that are gathered at 35 GB/s and not beside the arithmetic; which links the machine has, the "
    "log does not say.",
    "real_nemo_rl": "Beside `nemo-phases-…` stands a user's rerun of one configuration: their distance is noise. Constants of "
    "the framework but its switch come from none of these runs any more. Nothing was set on the mixtures of experts: rollout's "
    "routing is a power law of 1.2 (aiconfigurator's kernels), training's is balanced, and a tensor of an expert that is "
    "handed to the engine takes 0.29 ms, as one of Qwen3-4B in a reshard. What misses: the runs in turns; their phases would "
    "fit with more time a pass and less a sequence than vLLM 0.12 took as a server.",
    "real_rlinf_verl": "Both have SGLang; RLinf trains with Megatron and deals sequences in the order of the batch, verl with "
    "FSDP and balances the batch. What misses: a fifth of generation, whose tail hangs on the assumed spread of lengths and on "
    "SGLang's attention kernels, and a fifth of log-probs.",
    "real_verl_v1": "Hours of 150 and 100 steps, whose evaluations and checkpoints are not stated and not counted. What "
    "misses: a quarter to two fifths of the hours, most where all GPUs are shared.",
    "real_hf_async_lora": "A step is a median, and a weight sync follows every fourth: predicted is a step without one. The "
    "trainer binds where it waits for less than a tenth of its step.",
}


def page(entries: Sequence[Entry], samples: int) -> str:
    """Return the page, in Markdown."""
    parts = [
        HEAD.format(samples=samples),
        "",
        "## In short",
        "",
        *_markdown(TOTAL_HEADS, table(entries)),
        "",
        *(f"- {line}" for line in remarks(entries)),
        "",
        "## By class",
        "",
        "Of each group: the number of quantities, the median of |error|, the signed median, the worst.",
        "",
        *_markdown(CLASS_HEADS, by_class(entries)),
        "",
        "## Setups, and the constants that they gave",
        "",
        *_setups(entries),
        "",
        f"## More than {FAR:.0%} off, and why",
        "",
        *_causes(entries),
    ]
    for name in FAMILIES:
        own = [
            entry for entry in entries if entry["ledger"] == name and entry["predicted"] is not None
        ]
        if own:
            parts += [
                "",
                f"## {read_ledger(name).paper}",
                "",
                *_lines_of(FAMILY_NOTES.get(name)),
                *_table(own),
            ]
    steps = [entry for entry in entries if entry["kind"] == "training step"]
    if steps:
        parts += ["", "## Single training steps: prime-rl's benchmarks", ""]
        parts += [
            "As [validate_training.md](validate_training.md) scores them, with its constant.",
            "",
            *_table(steps),
        ]
    parts += [
        "",
        "## Not yet, and not scored",
        "",
        *(f"- {line}" for line in notes(entries)),
        "",
        "## Inferred and open inputs",
    ]
    for name in FAMILIES:
        if any(entry["ledger"] == name and entry["asked"] for entry in entries):
            parts += ["", f"### {read_ledger(name).paper}", "", *_inputs(name)]
    return "\n".join(parts) + "\n"


def _setups(entries: Sequence[Entry]) -> list[str]:
    """Return a table of the setups, with a line for each constant that one gave, then what else their figures decided."""
    rows: list[list[str]] = []
    read: list[str] = []
    for name, setup in read_setups().setups.items():
        own = {entry["id"]: None for entry in entries if entry["setup"] == name}
        if not own:
            continue
        head = [name, str(len(own)), setup.engine or "", setup.gpu]
        for gave in setup.gave:
            instead = ", ".join(f"{key} {in_words(value)}" for key, value in gave.left_out.items())
            rows.append([*head, f"`{gave.constant}`", gave.rows, instead, gave.source])
            head = ["", "", "", ""]
        if not setup.gave:
            rows.append([*head, "none: a stranger", "", "", ""])
        if setup.read:
            read.append(f"- Read off unscored figures of {name}: {setup.read}.")
        if setup.seen:
            read.append(f"- Chosen after rows of {name} were seen: {setup.seen}.")
    for constant, where in read_setups().elsewhere.items():
        read.append(f"- From none of these setups: `{constant}`, {where}.")
    heads = ("setup", "rows", "engine", "GPU", "gave", "from", "left out", "which is from")
    return [*_markdown(heads, rows), "", *read]


def _causes(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each cause, with the quantities that it is of."""
    lines = []
    for why, far in causes(entries).items():
        names = ", ".join(f"{e['id']} {e['quantity']} ({_errors(e)})" for e in far)
        lines.append(f"- {names}: {why or '**no cause is written down**'}.")
    return lines or ["None."]


def _errors(entry: Mapping[str, Any]) -> str:
    error, left_out = signed(entry["error"]), signed(entry["left_out_error"])
    return error if error == left_out else f"{error}, left out {left_out}"


def _lines_of(note: str | None) -> list[str]:
    return [note, ""] if note else []


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return markdown(heads, [[text.replace("|", "/") for text in row] for row in rows])


def _table(entries: Sequence[Entry]) -> list[str]:
    shown = [cells(entry) for entry in entries]
    columns = [i for i, _ in enumerate(HEADS) if any(row[i] for row in shown)]
    return _markdown([HEADS[i] for i in columns], [[row[i] for i in columns] for row in shown])


def _inputs(name: str) -> list[str]:
    """Return the inferred and assumed inputs of a family, as a table."""
    entries = read_ledger(name).inputs.items()
    rows = [
        [key, _value(entry), entry.kind, entry.source]
        for key, entry in entries
        if entry.kind != "stated"
    ]
    return _markdown(["input", "value", "kind", "why"], rows)


def _value(entry: LedgerInput) -> str:
    said = f"{in_words(entry.value)} {entry.unit}".strip()
    if entry.low is not None:
        return f"{said} ({entry.low:g} to {entry.high:g})"
    return f"{said} (of {', '.join(map(str, entry.choices))})" if entry.choices else said


def short(page: str) -> list[list[str]]:
    """Return the cells of the table of totals of a page, line by line."""
    part = page.partition("\n## In short\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def typeset(text: str) -> str:
    """Return a text with its errors as the pages of docs write them: 5%, -5% as 5 %, −5 %."""
    return re.sub(r"-?\d+%", lambda match: match[0].replace("-", "−").replace("%", " %"), text)


def trusted(text: str, page: str) -> str:
    """Return docs/trust.md with the totals of this page between its comments."""
    before, begin, rest = text.partition("<!-- real runs -->\n")
    _, end, after = rest.partition("  <!-- /real runs -->")
    assert begin and end, "docs/trust.md has a place for the totals of real runs"
    lines = [f"  {typeset(line)}" for line in _markdown(TOTAL_HEADS, short(page))]
    return "\n".join([before + begin, *lines, "", end + after])


README_ROW = "| steps of real RL runs"


def introduced(text: str, page: str) -> str:
    """Return README.md with the totals of this page in its row."""
    totals = {name: rest for name, *rest in short(page)}
    count, size, sign, _ = totals[f"{LEAVE_ONE_OUT}: steps"]
    strangers = totals["strangers: steps"]
    own = totals["gave constants: steps"]
    row = (
        f"{README_ROW}, each setup without the constants it gave | {count} | median {size}, "
        f"signed {sign}; setups that gave constants {own[1]}, strangers {strangers[1]} |"
    )
    lines = [typeset(row) if line.startswith(README_ROW) else line for line in text.split("\n")]
    return "\n".join(lines)


COPIES = {"docs/trust.md": trusted, "README.md": introduced}

if (
    __name__ == "__main__"
):  # docs/trust.md and README.md get the figures of experiments/real_runs.md
    root = Path(__file__).parents[2]
    made = (root / "experiments" / "real_runs.md").read_text(encoding="utf-8")
    for name, copied in COPIES.items():
        path = root / name
        path.write_text(copied(path.read_text(encoding="utf-8"), made), encoding="utf-8")
