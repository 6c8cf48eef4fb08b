"""Counts the tokens of text: by a tokenizer that the user names, a ratio that the user states, or
else an assumed ratio, which the trace says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, refuse

FEWEST_CHARS, MOST_CHARS = 0.1, 1000.0  # a token; a rare character takes several tokens of bytes
CHARS_PER_TOKEN = 4.0  # of English text and code, about; assumed where the user states nothing
ASSUMED = f"estimated: {CHARS_PER_TOKEN:g} characters a token, assumed"
HOW_TO_COUNT = (
    "Tokens were estimated from characters by an assumed ratio: --tokenizer FILE counts with the model's tokenizer.json, "
    "--chars-per-token states its ratio."
)
DECODED = "Lengths are of the decoded text, without special tokens: each misses its end token."


class Counted(NamedTuple):
    """The length of a text, and its token ids if a tokenizer counted it."""

    tokens: int
    ids: NDArray[np.int32] | None


@dataclass(frozen=True)
class TokenCounter:
    """A way to count the tokens of texts, made by `token_counter`.

    `tokenizer` is its name in a trace's metadata; `encoder` is a `tokenizers.Tokenizer`, or None
    for an estimate.
    """

    tokenizer: str
    chars_per_token: float | None = None
    encoder: Any = None

    def count(self, texts: Sequence[str]) -> list[Counted]:
        """Return the tokens of each text, special tokens of a template neither added nor cut. An
        empty text has 0; an estimate rounds, and gives any other text at least 1."""
        if self.chars_per_token is not None:
            return [
                Counted(max(1, round(len(text) / self.chars_per_token)) if text else 0, None)
                for text in texts
            ]
        file = self.tokenizer.partition(", ")[0]
        with _errors_of_tokenizers(f"{file}: cannot count"):
            encoded = self.encoder.encode_batch(list(texts), add_special_tokens=False)
        largest = max((i for e in encoded for i in e.ids), default=0)
        refuse(
            (
                largest > np.iinfo(np.int32).max,
                f"{file}: token id {largest} is more than 32 bits hold; name the model's own",
            )
        )
        return [Counted(len(e.ids), np.array(e.ids, dtype=np.int32)) for e in encoded]


def token_counter(
    tokenizer: str | Path | None = None, chars_per_token: float | None = None
) -> TokenCounter:
    """Return a counter from a Hugging Face `tokenizer.json` (the file, or a folder that holds it)
    or from a ratio; without either, of 4 characters a token, marked as assumed.

    Raises `InputError` if both are given, the `tokenizers` package is missing or the
    file is no tokenizer.
    """
    refuse(
        (
            tokenizer is not None and chars_per_token is not None,
            "a tokenizer and chars_per_token are both given; choose one way to count tokens",
        ),
        (  # NaN is refused, too
            chars_per_token is not None and not FEWEST_CHARS <= chars_per_token <= MOST_CHARS,
            f"chars_per_token is {chars_per_token}; it must be a number from {FEWEST_CHARS:g} to {MOST_CHARS:g}, such as 3.2",
        ),
    )
    if tokenizer is not None:
        return _from_file(Path(tokenizer))
    if chars_per_token is None:
        return TokenCounter(ASSUMED, CHARS_PER_TOKEN)
    return TokenCounter(f"estimated: {chars_per_token:g} characters a token", chars_per_token)


def _from_file(path: Path) -> TokenCounter:
    file = path / "tokenizer.json" if path.is_dir() else path
    refuse(
        (
            not file.is_file(),
            f"{file}: no such file; name a tokenizer.json or a model's folder that holds one",
        )
    )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(
            f"{file}: reading it needs the tokenizers package; pip install tokenizers"
        ) from error
    with _errors_of_tokenizers(f"{file}: not a tokenizer.json"):
        raw = file.read_bytes()
        encoder = Tokenizer.from_buffer(raw)
    # A tokenizer.json may keep the truncation and padding of its training: either would falsify
    # every long response.
    encoder.no_truncation()
    encoder.no_padding()
    digest = hashlib.sha256(raw).hexdigest()[:12]
    return TokenCounter(
        f"{file.resolve().parent.name}/{file.name}, sha256 {digest}", encoder=encoder
    )


@contextmanager
def _errors_of_tokenizers(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # its panics are no `Exception`
        raise InputError(f"{what} ({first_line(error)}); name the model's own") from error
