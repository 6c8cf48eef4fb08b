"""Acceptance from the tokens of two real sets of responses, by tokenizer and drafter: the figures of acceptance.md.

python experiments/acceptance.py ../shared/data [--tiktoken qwen.tiktoken] [--json]

`--tiktoken` is Qwen's vocabulary as the dashscope package has it (dashscope/resources/qwen.tiktoken in its wheel, Apache-2.0).
Without it only tokenizers that need no file are run: a byte-level BPE trained on the texts themselves, and whitespace words.
"""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, models, normalizers, pre_tokenizers

from experiments.reproduce.similarity import similarity
from experiments.shared import AsJson
from simrl.analysis.acceptance import DRAFTERS, measure
from simrl.errors import InputError
from simrl.trace.trace import Trace, TraceMetadata

# Values in the README of the data, counted with Qwen's tokens.
STATED = {
    ("verl_run", "one epoch back"): "0.20–0.27",
    ("verl_run", "one epoch back, best match"): "0.22–0.30",
    ("verl_run", "all earlier epochs"): "0.37–0.47",
    ("verl_run", "siblings"): "0.23–0.31",
    ("verl_run", "control: another prompt"): "0.05–0.08",
    ("rl_samples", "siblings"): "0.57",
    ("rl_samples", "siblings, best match"): "0.62",
}
MEASURES: dict[str, dict[str, Any]] = {
    "one epoch back": {},
    "one epoch back, best match": {"follow": "best"},
    "all earlier epochs": {"epochs_back": None},
    "all earlier epochs, best match": {"epochs_back": None, "follow": "best"},
    "siblings": {"history": "siblings"},
    "siblings, best match": {"history": "siblings", "follow": "best"},
    "control: another prompt": {"control_seed": 0},
    "control: another prompt's siblings": {"control_seed": 0, "history": "siblings"},
}
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Row = tuple[int, int, str]  # epoch, prompt, text


def verl_run(data: Path) -> list[Row]:
    """Return the validation generations of a verl run: 16 checkpoints, 20 slots each."""
    table = json.loads((data / "verl_run" / "do7bl4gg" / "val_generations.table.json").read_text())
    column = {name: i for i, name in enumerate(table["columns"])}
    prompts: dict[str, int] = {}
    slots = range(1, 1 + sum(name.startswith("input_") for name in column))
    return [
        (
            epoch,
            prompts.setdefault(row[column[f"input_{k}"]], len(prompts)),
            row[column[f"output_{k}"]],
        )
        for epoch, row in enumerate(table["data"])
        for k in slots
    ]


def rl_samples(data: Path) -> list[Row]:
    """Return three samples a prompt of a model after 500 RL steps; six data sets of 100 prompts."""
    found = json.loads(
        (data / "rl_samples" / "algorithmic_qwen_3b_500_to_algebra.json").read_text()
    )
    results = [
        r
        for category in found["categories"]
        for dataset in category["datasets"]
        for r in dataset["results"]
    ]
    return [
        (0, p, c["full_model_response"]) for p, r in enumerate(results) for c in r["completions"]
    ]


def qwen(tiktoken: Path) -> Tokenizer:
    """Build Qwen's tokenizer from its ranks: a token's merge is the last one that builds it from tokens of lower rank."""
    ranks: dict[bytes, int] = {}
    for line in tiktoken.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)

    def parts(token: bytes, rank: int) -> list[bytes]:
        found = [bytes([b]) for b in token]
        while len(found) > 2:
            pairs = [
                (ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(found))
            ]
            lowest, i = min(pairs)
            if lowest >= rank:
                break
            found[i : i + 2] = [found[i] + found[i + 1]]
        return found

    letters = dict(zip(*_byte_letters(), strict=True))
    spelt = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        pieces = parts(token, rank) if len(token) > 1 else []
        if len(pieces) == 2:
            merges.append((spelt[pieces[0]], spelt[pieces[1]]))
    tokenizer = Tokenizer(models.BPE(vocab={spelt[t]: r for t, r in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _byte_letters() -> tuple[list[int], list[str]]:
    """Return the letter by which byte-level BPE writes each byte (GPT-2's table)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printed]
    return printed + others, [chr(b) for b in printed] + [chr(256 + i) for i in range(len(others))]


def trained(texts: list[str]) -> ByteLevelBPETokenizer:
    """Train a byte-level BPE of 16,000 tokens on these texts."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=16_000, show_progress=False)
    return tokenizer


def trace_of(name: str, rows: list[Row], ids: list[list[int]], tokenizer: str) -> Trace:
    """Return a trace of the rows that have a token; samples are numbered in order."""
    counts: dict[tuple[int, int], int] = {}
    kept = []
    for (epoch, prompt, _), tokens in zip(rows, ids, strict=True):
        if tokens:
            sample = counts[epoch, prompt] = counts.get((epoch, prompt), -1) + 1
            kept.append((epoch, epoch, prompt, sample, 1, len(tokens), tokens))
    names = (
        "step",
        "epoch",
        "prompt_id",
        "sample",
        "prompt_tokens",
        "response_tokens",
        "response_ids",
    )
    columns = dict(zip(names, zip(*kept, strict=True), strict=True))
    cap = max(columns["response_tokens"])
    metadata = TraceMetadata(
        name=name, kind="imported", source="shared data", tokenizer=tokenizer, cap_tokens=cap
    )
    return Trace.from_columns({key: list(values) for key, values in columns.items()}, metadata)


def encodings(texts: list[str], tiktoken: Path | None) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the texts as tokens, by each tokenizer."""
    if tiktoken is not None:
        yield (
            "Qwen BPE",
            [e.ids for e in qwen(tiktoken).encode_batch(texts, add_special_tokens=False)],
        )
    yield "BPE trained on the texts", [e.ids for e in trained(texts).encode_batch(texts)]
    words: dict[str, int] = {}
    yield (
        "whitespace words",
        [[words.setdefault(w, len(words)) for w in text.split()] for text in texts],
    )


def main(
    data: Annotated[Path, typer.Argument(help="the folder with verl_run and rl_samples")],
    tiktoken: Annotated[Path | None, typer.Option(help="qwen.tiktoken")] = None,
    as_json: AsJson = False,
) -> None:
    accepted: list[dict[str, Any]] = []
    drafted: list[dict[str, Any]] = []
    for name, rows in (("verl_run", verl_run(data)), ("rl_samples", rl_samples(data))):
        for tokenizer, ids in encodings([text for _, _, text in rows], tiktoken):
            trace = trace_of(name, rows, ids, tokenizer)
            tokens = trace.column("response_tokens")
            for what, options in MEASURES.items():
                found = similarity(trace, **options)
                share = found.accepted_share(tokens)
                if not np.isnan(share):
                    of_response = (found.accepted / tokens)[found.has_history].mean()
                    accepted.append(
                        {
                            "data": name,
                            "tokenizer": tokenizer,
                            "compared with": what,
                            "share": share,
                        }
                        | {
                            "mean of responses": float(of_response),
                            "stated": STATED.get((name, what), ""),
                        }
                    )
            if name == "rl_samples":
                part = trace.column("prompt_id") // 100 == 3
                for follow in ("latest", "best"):
                    found = similarity(trace, "siblings", follow=follow)
                    accepted.append(
                        {"data": "its polynomial_multiplication", "tokenizer": tokenizer}
                        | {"compared with": "siblings" + ", best match" * (follow == "best")}
                        | {"share": float(found.accepted[part].sum() / tokens[part].sum())}
                        | {
                            "mean of responses": float((found.accepted / tokens)[part].mean()),
                            "stated": "",
                        }
                    )
            for drafter in DRAFTERS:
                for back in (1, 15) if drafter.startswith("history") else (1,):
                    try:
                        measured = measure(trace, drafter, epochs_back=back)
                    except InputError:
                        continue
                    passes = measured.passes.of(measured.served)
                    drafted.append(
                        {
                            "data": name,
                            "tokenizer": tokenizer,
                            "drafter": drafter,
                            "epochs back": back,
                        }
                        | {
                            "acceptance rate": passes.acceptance_rate,
                            "speculation rate": passes.speculation_rate,
                        }
                        | {"accept length": passes.accept_length}
                    )
    if as_json:
        print(json.dumps({"similarity": accepted, "drafters": drafted}, indent=1))
        return
    for rows in (accepted, drafted):
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
