"""The commands of a shell script, read as text.

Invariant: nothing is run and no environment is read. Quotes, continuation lines, arrays, `${X:-8}`,
`$((A * B))`, functions, `source` of a file beside, and tests of known texts are followed; a
variable that the script does not set is unset. Any other expansion, such as `$(date)`, stays in the
word as it is written. The work is bounded by the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.launch.expression import arithmetic

MOST_BYTES = 1_000_000  # of a script
MOST_COMMANDS = 20_000  # that are followed
MOST_EXPANDED = 4_000_000  # characters, over all expansions
MOST_CALLS = 20  # functions and files in one another
_CLOSERS = {"(": ")", "{": "}"}
_SPECIAL = re.compile(r"""[\\'"`(){}#]|\$[({]""")
_BLANKS = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_OPERATOR = re.compile(r"\n|;;&?|;&|;|&&|\|\||\|&?|&(?!>)|[()]")
_OPERATORS = ("\n", ";", ";;", ";&", ";;&", "&&", "||", "|", "|&", "&", "(", ")")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|<>|>>|<&|>&|>\||<|>)(?:\d+-?|-)?")
_PLAIN = re.compile(r"""[^\s\\'"`$;&|()<>]+""")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"(\w+)(\[[@*\d]+\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_NAME = re.compile(r"\$(\w+|[@*#?!$-])")
_UNSET = re.compile(r"\$\{?\w+\}?")
_COMPARE = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
_PREFIXES = ("export", "local", "declare", "readonly", "typeset")
_OPENERS = ("if", "while", "until", "for", "select", "case", "{", "(")
_CLOSING = ("fi", "done", "esac", "}", ")")


@dataclass
class _Block:
    """An open `if`, loop, `case`, group or function. `runs` is whether its commands are followed
    here, `taken` whether a branch of it was, `word` what a `case` compares."""

    kind: str
    runs: bool
    taken: bool = False
    word: str = ""
    begin: int = 0


@dataclass
class Script:
    """A script: its commands as lists of words, in the order in which they run."""

    path: Path
    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)
    functions: dict[str, list[str]] = field(default_factory=dict)
    expanded: int = 0
    followed: int = 0

    # The walk over commands.

    def run(self, tokens: list[str], calls: int = 0) -> None:
        """Follow tokens: words as they are written, and operators."""
        if calls > MOST_CALLS:
            return
        blocks: list[_Block] = []
        at, status = 0, True  # status: of the command before, where it decides about the next
        while at < len(tokens):
            end = at
            ending = ("\n", ";") if tokens[at] in ("if", "elif") else _OPERATORS  # a whole condition
            while end < len(tokens) and tokens[end] not in ending:
                end += 1
            words, ends = tokens[at:end], tokens[end : end + 1]
            in_case = bool(blocks) and blocks[-1].kind == "case"
            if in_case and ends == [")"] or words[:1] == ["case"]:
                end = self._case(words, blocks) or end
            elif ends == ["("] and len(words) in (1, 2) and tokens[end + 1 : end + 2] == [")"]:
                name = words[-1]  # name () {
                end = self._function(name, tokens, end + 2)
            else:
                if words[:1] == ["function"]:
                    end = self._function(words[1] if words[1:] else "", tokens, at + 2)
                else:
                    known = self._command(words, blocks, status, calls)
                    if ends in (["&&"], ["||"]):
                        status = known if ends == ["&&"] else known is False
                    else:
                        status = True
                if ends == ["("] or ends == [")"]:
                    self._block(ends[0], [], blocks)
            if ends and ends[0] in (";;", ";&", ";;&") and in_case:
                blocks[-1].runs = False
            at = end + 1

    def _command(self, words: list[str], blocks: list[_Block], status: Any, calls: int) -> Any:
        """Follow one command. Return whether it succeeds: None if only a run could tell."""
        while words and words[0] in ("then", "do", "else", "elif", "!", *_OPENERS, *_CLOSING):
            if words[0] == "!":
                return None
            words = self._block(words[0], words[1:], blocks)
        if not words or not all(block.runs for block in blocks) or not status:
            return status
        self.followed += 1
        if self.followed > MOST_COMMANDS:
            raise InputError(
                f"{self.path}: more than {MOST_COMMANDS:,} commands; name a launch script"
            )
        while words and (words[0] in _PREFIXES or _ASSIGNMENT.fullmatch(words[0])):
            if match := _ASSIGNMENT.fullmatch(words[0]):
                self._assign(*match.groups())
            elif words[1:] and words[1].startswith("-"):
                words = words[1:]
            words = words[1:]
        if not words:
            return True
        if words[0] in ("[", "[[", "test"):
            return self._test(words[1:])
        texts = [text for word in words for text in self.expand(word)]
        if not texts or texts[0] == ":":
            return True  # `: "${X:=8}"` has set X
        if texts[0] in (".", "source") and len(texts) > 1:
            self._source(texts[1], calls)
        elif texts[0] in self.functions:
            before = {str(i): self.variables.get(str(i), []) for i in range(1, 10)}
            self.variables.update({str(i): [text] for i, text in enumerate(texts[1:10], 1)})
            self.variables["@"] = texts[1:]
            self.run(self.functions[texts[0]], calls + 1)
            self.variables.update(before)
        else:
            self.commands.append(texts)
        return True

    def _block(self, word: str, rest: list[str], blocks: list[_Block]) -> list[str]:
        """Follow the beginning, the middle or the end of a block. Return the words of a command
        that stands behind it."""
        runs = all(block.runs for block in blocks)
        top = blocks[-1] if blocks else _Block("", runs=True)
        if word == "elif" and top.kind == "if":
            blocks.pop()
            taken, runs = top.taken, all(block.runs for block in blocks)
        elif word == "if":
            taken = False
        if word in ("if", "elif"):
            holds = runs and not taken and self._condition(rest)
            blocks.append(_Block("if", bool(holds), taken or bool(holds)))
            return []
        if word == "else" and top.kind == "if":
            top.runs = not top.taken
        elif word in ("while", "until"):
            blocks.append(_Block("loop", runs=False))
            return []
        elif word in ("for", "select"):
            values = [text for item in rest[2:] for text in self.expand(item)] if runs else []
            if values:
                self.variables[rest[0]] = values[:1]
                self.guessed.append(f"for {rest[0]}: read once, with {values[0]}") if values[
                    1:
                ] else None
            blocks.append(_Block("loop", runs=bool(values)))
            return []
        elif word in ("{", "("):
            blocks.append(_Block("group", runs=True))
        elif word in _CLOSING and blocks:
            blocks.pop()
        return rest

    def _case(self, words: list[str], blocks: list[_Block]) -> None:
        """Follow `case WORD in`, or the pattern of a branch."""
        if words[:1] == ["case"]:
            value = " ".join(self.expand(words[1], unset="")) if words[1:] else ""
            unknown = "$" in value
            if unknown and all(block.runs for block in blocks):
                self.guessed.append(f"case {words[1]}: cannot be known, no branch is read")
            blocks.append(_Block("case", runs=False, taken=unknown, word=value))
            words = words[3:]
        block = blocks[-1]
        patterns = [text for word in words for text in self.expand(word) if text != "|"]
        if words and not block.taken:
            block.runs = any(fnmatchcase(block.word, text) for text in patterns[-1].split("|"))
            block.taken = block.runs

    def _function(self, name: str, tokens: list[str], at: int) -> int:
        """Keep a function's tokens. Return the place of its last one."""
        depth, begin = 0, at
        while at < len(tokens):
            depth += (tokens[at] in ("{", "(")) - (tokens[at] in ("}", ")"))
            if depth == 0 and tokens[at] in ("}", ")"):
                break
            at += 1
        self.functions[name] = tokens[begin + 1 : at]
        return at

    def _assign(self, name: str, adds: str, raw: str) -> None:
        if raw.startswith("(") and raw.endswith(")"):
            inner = [token for token in tokens_of(raw[1:-1], self.path) if token not in ("\n", ";")]
            texts = [text for word in inner for text in self.expand(word)]
            self.variables[name] = [*(self.variables.get(name, []) if adds else []), *texts]
        else:
            text = " ".join(self.expand(f'"{raw}"' if raw[:1] not in "\"'" else raw))
            before = " ".join(self.variables.get(name, [])) if adds else ""
            self.variables[name] = [before + text]

    def _source(self, name: str, calls: int) -> None:
        path = self.path.parent / name
        if not path.is_file():
            self.guessed.append(f"source {name}: not found beside the script")
            return
        self.run(tokens_of(text_of(path), path), calls + 1)

    # Conditions.

    def _condition(self, words: list[str]) -> bool:
        """Return whether a condition holds; one that cannot be known is read as false."""
        known = self._all(words, "||")
        if known is None:
            self.guessed.append(f"if {' '.join(words)[:60]}: cannot be known, read as false")
        return bool(known)

    def _all(self, words: list[str], sign: str) -> bool | None:
        """Return whether tests that `||` joins hold, or those that `&&` joins; None if that cannot
        be known."""
        if sign in words:
            at = words.index(sign)
            both = [self._all(words[:at], "&&"), self._all(words[at + 1 :], sign)]
            decides = sign == "||"
            return decides if decides in both else None if None in both else not decides
        if sign == "||":
            return self._all(words, "&&")
        if words[:1] == ["!"]:
            known = self._all(words[1:], sign)
            return None if known is None else not known
        return self._test(words[1:]) if words[:1] in (["["], ["[["], ["test"]) else None

    def _test(self, words: list[str]) -> bool | None:
        """Return whether a test holds; None if that cannot be known."""
        words = words[:-1] if words[-1:] in (["]"], ["]]"]) else words
        if words[:1] == ["!"]:
            known = self._test(words[1:])
            return None if known is None else not known
        texts = [" ".join(self.expand(word, unset="")) for word in words]
        if any("$" in text for text in texts):
            return None
        if len(texts) == 2 and texts[0] in ("-z", "-n"):
            return (texts[1] == "") is (texts[0] == "-z")
        if len(texts) == 3 and texts[1] in ("=", "==", "!="):
            return fnmatchcase(texts[0], texts[2]) is (texts[1] != "!=")
        if len(texts) == 3 and texts[1] in _COMPARE:
            value = arithmetic(f"{texts[0]} {_COMPARE[texts[1]]} {texts[2]}")
            return None if value is None else bool(value)
        return bool(texts[0]) if len(texts) == 1 else None

    # Expansion.

    def expand(self, word: str, unset: str | None = None, depth: int = 0) -> list[str]:
        """Return the texts that a word stands for. A variable that is not set stays as it is
        written, or is the text `unset`."""
        parts, any_quoted = [""], False
        at, quoted = 0, False
        while at < len(word):
            character = word[at]
            if character == "'" and not quoted:
                end = word.find("'", at + 1) % (len(word) + 1)
                parts[-1] += word[at + 1 : end]
                at, any_quoted = end + 1, True
            elif character == '"':
                quoted, any_quoted, at = not quoted, True, at + 1
            elif character == "\\" and at + 1 < len(word):
                keeps = quoted and word[at + 1] not in '$`"\\\n'
                parts[-1] += ("\\" if keeps else "") + word[at + 1].replace("\n", "")
                at += 2
            elif character in "$`":
                end, values = self._variable(word, at, unset, depth)
                self.expanded += sum(map(len, values))
                if self.expanded > MOST_EXPANDED:
                    raise InputError(
                        f"{self.path}: its variables grow without end; name a launch script"
                    )
                if not quoted and len(values) == 1:
                    values = re.split(r"[ \t\n]+", values[0])
                parts[-1] += values[0] if values else ""
                parts += values[1:]
                at = end
            else:
                plain = _PLAIN.match(word, at)
                end = plain.end() if plain else at + 1
                parts[-1] += word[at:end]
                at = end
        return [part for part in parts if part or any_quoted]

    def _variable(self, word: str, at: int, unset: str | None, depth: int) -> tuple[int, list[str]]:
        """Return the end of an expansion that begins here, and its values."""
        if name := _NAME.match(word, at):
            end, inner = name.end(), name[1]
        elif word[at : at + 2] in ("$(", "${"):
            end = end_of(word, at + 1)
            inner = word[at + 2 : end - 1]
        else:
            end = (word.find("`", at + 1) + 1 or len(word)) if word[at] == "`" else at + 1
            return end, [re.sub(r"\s", "\u00a0", word[at:end])]
        raw = re.sub(r"\s", "\u00a0", word[at:end])  # what stays as it is written is never divided
        if raw.startswith("$(("):
            value = arithmetic(self._numbers(inner[1:-1], depth)) if depth < MOST_CALLS else None
            return end, [raw if value is None else str(value)]
        if raw.startswith("$("):
            return end, [self._of_path(inner, depth) or raw]
        match = _EXPANSION.fullmatch(inner)
        values = self.variables.get(match[1] if match else inner)
        if inner[:1] in "@*" or (match and match[1] == "@"):
            return end, self.variables.get("@", [])
        if not match or depth >= MOST_CALLS:
            return end, [raw]
        index, sign, otherwise = match[2], match[3], match[4]
        if values is not None and index and index[1:-1].isdigit():
            values = values[int(index[1:-1]) :][:1]
        elif values is not None and not index:
            values = values[:1] or [""]
        empty = values is None or (":" in (sign or "") and not any(values))
        if sign and sign[-1] in "-=" and empty:
            values = [
                " ".join(
                    self.expand(
                        f'"{otherwise}"' if '"' not in otherwise else otherwise, unset, depth + 1
                    )
                )
            ]
            if sign[-1] == "=":
                self.variables[match[1]] = values
        elif sign and sign[-1] == "+":
            values = [""] if empty else self.expand(otherwise, unset, depth + 1)
        if values is None:
            values = [] if index else [raw if unset is None else unset]
        return end, values

    def _numbers(self, text: str, depth: int) -> str:
        """Return arithmetic with the values of its variables."""
        text = " ".join(self.expand(f'"{text}"', None, depth + 1))

        def number(name: re.Match[str]) -> str:
            value = self.variables.get(name[0], [name[0]])[:1]
            return f"({value[0]})" if value else name[0]

        return re.sub(r"[A-Za-z_]\w*", number, text)

    def _of_path(self, command: str, depth: int) -> str | None:
        """Return what `dirname`, `basename` and `cd … && pwd` of this script print; None for any
        other command."""
        if depth >= MOST_CALLS:
            return None
        if "dirname" in command and ("BASH_SOURCE" in command or "$0" in command):
            return "." + "".join(re.findall(r"/\.\.(?=[/\"' ])", command))
        words = [
            text
            for token in tokens_of(command, self.path)
            for text in self.expand(token, None, depth + 1)
        ]
        name = (
            (self.path.name if words[1] == "$0" else words[1].rpartition("/")[2])
            if words[1:]
            else ""
        )
        if words[:1] == ["basename"] and "$" not in name:
            return name.removesuffix(words[2]) if words[2:] else name
        return " ".join(words[1:]) if words[:1] == ["echo"] and "|" not in words else None


def script_of(path: Path, text: str) -> Script:
    """Return a script with its commands. Raise `InputError`."""
    script = Script(path)
    script.run(tokens_of(text, path))
    return script


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file. Raise `InputError` if it is too long, or no text."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); name a launch script"
        ) from error
    if len(data) > most_bytes or b"\0" in data:
        reason = "not a text" if b"\0" in data else f"more than {most_bytes:,} bytes"
        raise InputError(f"{path}: {reason}; name a launch script or a configuration file")
    return data.decode("utf-8", "replace")


def tokens_of(text: str, path: Path) -> list[str]:
    """Return the words of a script as they are written, and the operators between them; comments,
    redirections and here-documents are left out."""
    tokens: list[str] = []
    heredocs: list[tuple[str, bool]] = []
    at, drops = 0, False
    while at < len(text):
        if blanks := _BLANKS.match(text, at):
            at = blanks.end()
        elif text[at] == "#":
            at = _end_of_line(text, at)
        elif redirection := _REDIRECTION.match(text, at):
            at, sign = redirection.end(), redirection[0]
            if sign.lstrip("0123456789") in ("<<", "<<-"):
                end = _end_of_word(
                    text, _BLANKS.match(text, at).end() if _BLANKS.match(text, at) else at
                )
                heredocs.append((text[at:end].strip().strip("'\"\\"), sign.endswith("-")))
                at = end
            else:
                drops = not sign[-1:].isdigit() and not sign.endswith("-")
        elif operator := _OPERATOR.match(text, at):
            at, drops = operator.end(), False
            tokens.append(operator[0])
            if operator[0] == "\n" and heredocs:
                at, heredocs = _after_heredocs(text, at, heredocs), []
        else:
            end = max(_end_of_word(text, at), at + 1)
            if not drops:
                tokens.append(text[at:end])
            at, drops = end, False
    return tokens


def _after_heredocs(text: str, at: int, heredocs: Iterable[tuple[str, bool]]) -> int:
    for mark, tabs in heredocs:
        while at < len(text):
            end = _end_of_line(text, at)
            line, at = text[at:end], end + 1
            if (line.lstrip("\t") if tabs else line).rstrip("\r") == mark:
                break
    return at


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _end_of_word(text: str, at: int) -> int:
    """Return the end of the word that begins here: quotes, expansions and an array's brackets are
    parts of it."""
    begin = at
    while at < len(text):
        character = text[at]
        if plain := _PLAIN.match(text, at):
            at = plain.end()
        elif character == "\\":
            at += 2
        elif character in "\"'`" or text[at : at + 2] in ("$(", "${", "$'", '$"'):
            at = end_of(text, at + (character == "$"))
        elif character == "(" and text[begin:at].endswith("=") and at > begin + 1:
            at = end_of(text, at)
        elif character == "$":
            at += 1
        else:
            break
    return min(at, len(text))


def end_of(text: str, at: int) -> int:
    """Return the place behind the quote or bracket that opens here, whatever is nested in it."""
    closers: list[str] = []
    for special in _SPECIAL.finditer(text, at):
        if special.start() < at:
            continue
        sign, at = special[0], special.start()
        inside = closers[-1] if closers else ""
        if sign == "\\" and inside != "'":
            at += 2
            continue
        if inside == sign[-1] and len(sign) == 1:
            closers.pop()
        elif inside in ("'", "`"):
            continue
        elif (
            sign in "\"'`"
            and (inside != '"' or sign == "`")
            and not (sign == "'" and inside == "}" and '"' in closers)
        ):
            closers.append(sign)
        elif len(sign) == 2 or (
            sign in "({" and inside in ("", ")") and (sign == "(" or not inside)
        ):
            closers.append(_CLOSERS[sign[-1]])
        elif sign == "#" and inside == ")" and text[at - 1 : at].isspace():
            at = _end_of_line(text, at)
            continue
        at = special.end()
        if not closers:
            return at
    return len(text)


def words_with(
    commands: Iterable[list[str]], path: Path, mark: re.Pattern[str]
) -> Iterator[list[str]]:
    """Yield the commands that a program's name is in, also inside a word: `bash -c "python …"`."""
    for words in commands:
        inner = [word for word in words if any(c.isspace() for c in word) and mark.search(word)]
        for word in inner[:1]:
            yield from words_with(script_of(path, word).commands, path, mark)
        if not inner and mark.search(" ".join(words)):
            yield words
