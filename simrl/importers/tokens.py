"""How text becomes lengths: a tokenizer that the user names, or a ratio that the user states. Never a silent guess."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError, first_line


class Counted(NamedTuple):
    """The length of a text, and its token ids where a tokenizer counted it."""

    tokens: int
    ids: NDArray[np.int32] | None


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of texts. Make one with `token_counter`.

    `tokenizer` is what a trace's metadata says of it; `encoder` is a `tokenizers.Tokenizer`, or None for an estimate.
    """

    tokenizer: str
    chars_per_token: float | None = None
    encoder: Any = None

    def count(self, texts: Sequence[str]) -> list[Counted]:
        """The tokens of each text, special tokens of a template neither added nor cut. An empty text has 0; an
        estimate rounds, and gives any other text at least 1."""
        if self.chars_per_token is not None:
            return [Counted(max(1, round(len(text) / self.chars_per_token)) if text else 0, None) for text in texts]
        try:
            encoded = self.encoder.encode_batch(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except (
            BaseException
        ) as error:  # tokenizers raises plain `Exception`, and a panic of its own that is not even one
            raise InputError(
                f"{self.tokenizer.partition(', ')[0]}: cannot count ({first_line(error)}); name the model's own"
            ) from error
        beyond = max((i for e in encoded for i in e.ids), default=0)
        if beyond > np.iinfo(np.int32).max:
            raise InputError(
                f"{self.tokenizer.partition(', ')[0]}: token id {beyond} is more than 32 bits hold; name the model's own"
            )
        return [Counted(len(e.ids), np.array(e.ids, dtype=np.int32)) for e in encoded]


def token_counter(tokenizer: str | Path | None = None, chars_per_token: float | None = None) -> TokenCounter:
    """A counter from a Hugging Face `tokenizer.json` (the file, or a folder that holds it) or from a ratio.

    Raises `InputError` if neither or both are given, the `tokenizers` package is missing or the file is not one of its.
    """
    if tokenizer is not None and chars_per_token is not None:
        raise InputError("a tokenizer and chars_per_token are both given; choose one way to count tokens")
    if tokenizer is not None:
        return _from_file(Path(tokenizer))
    if chars_per_token is None:
        raise InputError(
            "the text must be counted: name the model's tokenizer.json, or state chars_per_token (English: about 4)"
        )
    if not math.isfinite(chars_per_token) or chars_per_token <= 0:
        raise InputError(f"chars_per_token is {chars_per_token}; it must be a number above 0, such as 3.2")
    return TokenCounter(f"estimated: {chars_per_token:g} characters a token", chars_per_token)


def _from_file(path: Path) -> TokenCounter:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such file; name a tokenizer.json or a model's folder that holds one")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(f"{file}: reading it needs the tokenizers package; pip install tokenizers") from error
    try:
        raw = file.read_bytes()
        encoder = Tokenizer.from_buffer(raw)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # tokenizers raises plain `Exception`, and a panic of its own that is not even one
        raise InputError(f"{file}: not a tokenizer.json ({first_line(error)}); name the model's own") from error
    # A tokenizer.json may carry the truncation and padding of its training: either would falsify every long response.
    encoder.no_truncation()
    encoder.no_padding()
    digest = hashlib.sha256(raw).hexdigest()[:12]
    return TokenCounter(f"{file.resolve().parent.name}/{file.name}, sha256 {digest}", encoder=encoder)
