"""Tasks with exact rewards, whose responses are searches and so have long-tailed lengths.

Countdown: `3 5 2?24:` asks for an expression of these numbers, each used once, equal to the target.
A response tries, writes its steps, compares their value with the target, marks a miss with x,
continues, and after a hit writes the answer and the end-of-sequence token:

    5+3=8,8-2=6?24x 3*2=6,6+5=11?24x …  5+3=8,8*3=24?24>(5+3)*3        (without the spaces)

In random order the number of tries is geometric, with a success probability that depends on the
prompt: a long tail. A policy that searches better, or errs less in arithmetic, needs fewer tokens
and is right more often.

Invariant: prompt i of a seed does not depend on the number of prompts; a reward is exact, for any
token ids: an answer is parsed, never evaluated as code.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, model_validator

from simrl.errors import InputError

PAD, EOS = 0, 1
CHARACTERS = "0123456789+-*=,?:x>() "
VOCABULARY = 32  # ids of a model: PAD, EOS and the characters, up to the next multiple of 32

_ID = {character: i + 2 for i, character in enumerate(CHARACTERS)}
_CHARACTER = {i: character for character, i in _ID.items()}
_LONGEST_ANSWER = 64  # characters: an expression of six numbers with all its parentheses has fewer
_MOST_DRAWS = 10_000


def encode(text: str) -> list[int]:
    """Return the token ids of a text, one per character."""
    return [_ID[character] for character in text]


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids; pad, end and ids without a character are shown as `_`, which is
    not in the vocabulary."""
    return "".join(_CHARACTER.get(i, "_") for i in ids)


class Problem(NamedTuple):
    """Numbers, each to be used once, their target, and the prompt."""

    numbers: tuple[int, ...]
    target: int
    prompt_ids: tuple[int, ...]


class Try(NamedTuple):
    """The steps of one way to combine the numbers, their value, and the corresponding
    expression."""

    steps: str
    value: int
    expression: str


class Countdown(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The task and its parameters. A target is the value of a random try, so every problem has a
    solution."""

    kind: Literal["countdown"] = "countdown"
    counts: tuple[int, ...] = Field(
        default=(3,), min_length=1, description="how many numbers a prompt has, each as likely"
    )
    largest_number: int = Field(default=9, ge=2, le=99)
    largest_target: int = Field(default=99, ge=2, le=9999)
    most_tokens: int = Field(
        default=384, ge=16, description="the cap of a response, its end included"
    )

    vocabulary: ClassVar[int] = VOCABULARY
    eos: ClassVar[int] = EOS

    @model_validator(mode="after")
    def _few_numbers(self) -> Countdown:
        if not all(2 <= count <= 6 for count in self.counts):
            raise ValueError("counts are of 2 to 6 numbers")
        return self

    @property
    def most_prompt_tokens(self) -> int:
        """Upper bound on the tokens of a prompt."""
        return (
            max(self.counts) * (len(str(self.largest_number)) + 1)
            + len(str(self.largest_target))
            + 1
        )

    def make_prompts(self, seed: int, count: int) -> list[Problem]:
        """Return the first `count` problems of a seed."""
        return [self._problem(np.random.default_rng([seed, i])) for i in range(count)]

    def write_solution(self, problem: Problem, rng: np.random.Generator) -> list[int]:
        """Write a search in random order, without repeated tries, to its end or to the cap."""
        text, tried = "", set[str]()
        while len(text) < self.most_tokens:
            steps, value, expression = _random_try(problem.numbers, rng)
            if steps in tried:
                continue
            tried.add(steps)
            if value == problem.target:
                return [*encode(f"{text}{steps}?{value}>{expression}"), EOS][: self.most_tokens]
            text += f"{steps}?{problem.target}x"
        return encode(text)[: self.most_tokens]

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """Return 1.0 if the response ends and its answer (after the last >) is an expression that
        uses each number once and equals the target, else 0.0. The text before the answer is not
        judged."""
        if not len(response_ids) or response_ids[-1] != EOS:
            return 0.0
        _, marker, answer = decode(response_ids[:-1]).rpartition(">")
        return float(bool(marker) and _worth(answer, problem.numbers) == problem.target)

    def _problem(self, rng: np.random.Generator) -> Problem:
        for _ in range(_MOST_DRAWS):
            numbers = tuple(
                int(n) for n in rng.integers(1, self.largest_number + 1, rng.choice(self.counts))
            )
            target = _random_try(numbers, rng).value
            if 1 <= target <= self.largest_target:
                return Problem(
                    numbers, target, tuple(encode(f"{' '.join(map(str, numbers))}?{target}:"))
                )
        raise InputError(
            f"task: no problem found in {_MOST_DRAWS} draws; raise task.largest_target"
        )


def _random_try(numbers: Sequence[int], rng: np.random.Generator) -> Try:
    """Combine two numbers, the larger first, until one is left; every pair and operation is equally
    likely."""
    left = [(number, str(number)) for number in numbers]
    steps = []
    while len(left) > 1:
        pair = [left.pop(rng.integers(len(left))) for _ in range(2)]
        (b, of_b), (a, of_a) = sorted(pair, key=lambda item: item[0])
        operation = "+-*"[rng.integers(3)]
        value = {"+": a + b, "-": a - b, "*": a * b}[operation]
        steps.append(f"{a}{operation}{b}={value}")
        left.append((value, f"({of_a}{operation}{of_b})"))
    value, expression = left[0]
    return Try(",".join(steps), value, expression[1:-1])


def _worth(answer: str, numbers: Sequence[int]) -> int | None:
    """Return the value of an expression of +, -, * and parentheses; None if it is invalid, or does
    not use each number once."""
    if not re.fullmatch(f"[0-9+*()-]{{1,{_LONGEST_ANSWER}}}", answer):
        return None
    if Counter(re.findall("[0-9]+", answer)) != Counter(map(str, numbers)):
        return None
    try:
        return _value(ast.parse(answer, mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _value(expression: ast.expr) -> int:
    """Return the value of a parsed expression. Raise `ValueError` for anything but numbers and
    their sums and products."""
    match expression:
        case ast.Constant(int(number)):
            return number
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
    raise ValueError("neither a number nor a sum or product")
