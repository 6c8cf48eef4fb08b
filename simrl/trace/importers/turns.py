"""Splits responses into what the model generated, in turns, and what its environment (tools, users)
wrote between them.

A mask of a response's tokens separates them (1: generated), or else the tags and roles of chat
templates in its text. Context after the last turn is left out, as the model never answered it;
context before the first belongs to the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.trace.trace import UNSEPARATED

CALLS = (
    *(
        "<tool_call>",
        "<search>",
        "<interpreter>",
        "<observation>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
    ),
    *("<\uff5ctool\u2581call", "<function_calls>", "to=functions.", "<function="),
)  # signs of an agent's text without turns
NO_SIGN = "Without a mask or tags of tools it cannot be told whether tools wrote a part: all counts as generated."
# What opens context, what ends it, and a text that every opening has: roles of chat templates, tags
# of tools; below them the roles where decoding left out the special tokens.
CONTEXT = {
    "chatml": (
        r"\n?<\|im_start\|>(?!assistant)[a-z_]{1,32}\n",
        r"<\|im_start\|>assistant\n?",
        "<|im_start|>",
    ),
    "llama": (
        r"<\|start_header_id\|>(?!assistant)[a-z_]{1,32}<\|end_header_id\|>",
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n{0,2}",
        "<|start_header_id|>",
    ),
    "kimi": (r"<\|im_(?:user|system)\|>", r"<\|im_assistant\|>\w{0,99}<\|im_middle\|>", "<|im_"),
    "glm": (r"<\|(?:user|observation|system)\|>", r"<\|assistant\|>\n?", "<|"),
    "harmony": (
        r"<\|start\|>(?!assistant)[a-z][\w.]{0,99}(?: to=|<\|)",
        r"<\|start\|>assistant",
        "<|start|>",
    ),
    "deepseek": (r"<\uff5cUser\uff5c>", r"<\uff5cAssistant\uff5c>", "<\uff5cUser"),
    "deepseek_tool": (
        r"<\uff5ctool\u2581outputs?\u2581begin\uff5c>",
        r"<\uff5ctool\u2581outputs?\u2581end\uff5c>(?!\s{0,4}<\uff5ctool\u2581output)\s{0,4}(?:<\uff5cAssistant\uff5c>)?",
        "<\uff5ctool",
    ),
    "gemma": (
        r"<start_of_turn>(?!model)[a-z_]{1,32}\n",
        r"<start_of_turn>model\n?",
        "<start_of_turn>",
    ),
    "minimax": (r"\]~b\](?!ai\n)[a-z_]{1,32}\n", r"\]~b\]ai\n", "]~b]"),
    "mistral": (r"\[TOOL_RESULTS\]", r"\[/TOOL_RESULTS\]\s?", "[TOOL_RESULTS]"),
    "mistral_user": (r"\[INST\]", r"\[/INST\]\s?", "[INST]"),
    "tags": (
        r"\n?(?:\b(?:user|tool)\n)?<tool_response>",
        r"</tool_response>(?:<\|im_end\|>)?\s{0,4}(?:(?:<\|im_start\|>)?assistant\n|<\|assistant\|>\n?)?",
        "<tool_response>",
    ),
    "search": (r"<information>", r"</information>", "<information>"),
    "code": (r"<interpreter>", r"</interpreter>", "<interpreter>"),
    "results": (r"<function_results>", r"</function_results>", "<function_results>"),
    "roles": (  # a line alone, which ends no list or clause of code or SQL
        r"\n?(?<![^\n])(?<![,(\[{=]\n)(?<!(?i:from|join|into|able|date)\n)(?:user|tool)\n",
        r"\nassistant\n",
        "\nassistant\n",
    ),
    "llama_roles": (
        r"(?:ipython|(?<=[^\w\s])(?:user|tool))\n\n",
        r"assistant\n\n",
        "assistant\n\n",
    ),
    "harmony_roles": (
        r"(?:functions\.\w{1,99}|python|browser\.\w{1,99}) ?to=assistant(?:commentary|analysis)",
        r"assistant(?=analysis|commentary|final| ?to=)",
        "to=assistant",
    ),
    "kimi_roles": (
        r"(?:tool)?## Return of functions\.",
        r"assistant(?=[^\sa-z.,:;)'])",
        "## Return of",
    ),
}
NEED_END = (
    *("deepseek_tool", "mistral", "mistral_user", "tags", "search", "code", "results"),
    "roles",
    "llama_roles",
    "harmony_roles",
    "kimi_roles",
)  # else they are the model's words
AGENTS = "responses look like an agent's."
UNENDED = "tokens of what tools or users wrote after the last turn of a response were left out."
ENDS = {kind: re.compile(ends) for kind, (_, ends, _) in CONTEXT.items()}


class Turns(NamedTuple):
    """The tokens of each turn, the observations after each but the last, and the context before the
    first and after the last."""

    tokens: list[int]
    observations: list[int]
    before: int
    after: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Row`; a response of one turn has no lists."""
        if len(self.tokens) < 2:
            return {"response_tokens": sum(self.tokens)}
        lists = {"turn_tokens": self.tokens, "turn_observation_tokens": self.observations}
        return {"response_tokens": sum(self.tokens), **lists}


def turns_of(parts: Iterable[tuple[bool, int]]) -> Turns:
    """Return the turns of a response from its parts in order: whether the model generated it, and
    its tokens."""
    filled = [part for part in parts if part[1] or not part[0]]
    merged = [
        (key, sum(tokens for _, tokens in group))
        for key, group in groupby(filled, key=lambda part: part[0])
    ]
    before = merged.pop(0)[1] if merged and not merged[0][0] else 0
    after = merged.pop()[1] if merged and not merged[-1][0] else 0
    tokens = [tokens for _, tokens in merged[::2]]
    return Turns(tokens, [tokens for _, tokens in merged[1::2]], before, after)


def by_mask(mask: Sequence[int]) -> tuple[Turns, NDArray[np.bool_]]:
    """Return the turns of a response by its mask, and which of its tokens were generated. Zeros
    before the first 1, or all where there is none, are no environment's: a response begins with the
    model's own tokens, which a trainer may leave out of the loss."""
    generated = np.array(mask, dtype=bool)
    generated[: generated.argmax() if generated.any() else None] = True
    runs = groupby(generated.tolist())
    return turns_of((is_models, len([*run])) for is_models, run in runs), generated


def text_parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a response's text, by its tags and roles. Context that does not end runs
    to the end of the text; of tags, and of roles without special tokens, it must end."""
    place, kinds = 0, tuple(kind for kind, (*_, sign) in CONTEXT.items() if sign in text)
    while kinds and (opening := _opens(kinds).search(text, place)):
        kind = str(opening.lastgroup)
        end = ENDS[kind].search(text, opening.end())
        if end is None and kind in NEED_END:
            kinds = tuple(other for other in kinds if other != kind)  # none ends after here, either
            continue
        stop = end.end() if end else len(text)
        yield True, text[place : opening.start()]
        yield False, text[opening.start() : stop]
        place = stop
    yield True, text[place:]


@cache
def _opens(kinds: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of what opens context of these kinds."""
    return re.compile("|".join(f"(?P<{kind}>{CONTEXT[kind][0]})" for kind in kinds))


def several(
    observed: Sequence[Sequence[int] | None], told_by: str, timed: bool = False
) -> list[str]:
    """Return the notes on turns of a trace, given the observations of each response; none if no
    response has turns. `timed` says whether the environment's time was recorded."""
    with_turns = [tokens for tokens in observed if tokens]
    if not with_turns:
        return []
    return [
        f"{len(with_turns)} of {len(observed)} responses have several turns, with {sum(map(sum, with_turns))} tokens of "
        f"observations (tools, users) between them, {told_by}. What follows the last turn is left out"
        + ("." if timed else "; the environment's time is not recorded."),
    ]


def note(observed: Sequence[Sequence[int] | None], agents: int) -> str:
    """Return the note on turns of a trace of texts, given the observations of each response and the
    number of agents' ones."""
    untold = (
        f"{UNSEPARATED}: {agents} responses call tools, and no mask or tag tells their output."
        if agents
        else NO_SIGN
    )
    return next(iter(several(observed, "by mask or tags")), untold)
