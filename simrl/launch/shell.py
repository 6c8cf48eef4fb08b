"""The commands of a shell script, read as text.

Invariant: nothing of the script is run and no environment is read. shfmt parses it; variables,
arrays, `${X:-8}`, `$((A * B))`, functions, scripts beside it and tests of known texts are
followed; a variable that the script does not set is unset. Any other expansion, such as `$(date)`,
stays as it is written. A condition that only a run could decide is read as false, or, where no
launch is found so, as true; both are noted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.launch.expression import arithmetic

Node = Mapping[str, Any]  # of shfmt's syntax tree
MOST_BYTES = 60_000  # of a script; the longest public ones have 30,000
MOST_STATEMENTS = 20_000  # that are followed
MOST_EXPANDED = 2_000_000  # characters, over all expansions
MOST_CALLS = 20  # functions and scripts in one another
MOST_S = 2.0  # of shfmt
_SHFMT = Path(sysconfig.get_path("scripts")) / "shfmt"
_COMPARE = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


@dataclass
class Script:
    """A script while it is followed: its commands as lists of words, in the order in which they
    run."""

    path: Path
    source: bytes = b""
    unknown: bool = False  # how a condition is read that only a run could decide
    commands: list[list[str]] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, tuple[bytes, Node]] = field(default_factory=dict)
    followed: int = 0
    expanded: int = 0
    calls: int = 0

    def run(self, statements: Iterable[Node]) -> bool | None:
        """Follow statements. Return whether the last one succeeds; None if only a run could
        tell."""
        status: bool | None = True
        for statement in statements:
            self.followed += 1
            if self.followed > MOST_STATEMENTS:
                raise InputError(
                    f"{self.path}: more than {MOST_STATEMENTS:,} commands; name a launch script"
                )
            status = self._command(statement.get("Cmd") or {})
            status = not status if statement.get("Negated") and status is not None else status
        return status

    def _command(self, node: Node) -> bool | None:
        match node.get("Type"):
            case "CallExpr" | "DeclClause":
                assigned = [one for one in node.get("Args") or [] if "Parts" not in one]
                for assignment in [*(node.get("Assigns") or []), *assigned]:
                    self._assign(assignment)
                names = [one["Name"]["Value"] for one in node.get("Assigns") or []]
                environment = [text for name in names for text in self.variables.get(name, [])]
                return self._call(
                    [word for word in node.get("Args") or [] if "Parts" in word], environment
                )
            case "BinaryCmd" if node["Op"] in ("&&", "||"):
                status = self.run([node["X"]])
                if status is (node["Op"] == "||"):
                    return status
                if status is None and node["Op"] == "||":
                    return None
                return self.run([node["Y"]])
            case "BinaryCmd":  # a pipe
                return self.run([node["X"], node["Y"]])
            case "TestClause":
                return self._test(node["X"])
            case "IfClause":
                self._if(node)
            case "CaseClause":
                self._case(node)
            case "ForClause" if node["Loop"]["Type"] == "WordIter":
                values = [
                    text for word in node["Loop"].get("Items") or [] for text in self.words(word)
                ]
                self.variables[node["Loop"]["Name"]["Value"]] = values[:1]
                self._guess(
                    f"for {node['Loop']['Name']['Value']}",
                    values[1:],
                    "read once, with its first value",
                )
                self.run(node["Do"] if values else [])
            case "Block" | "Subshell":
                return self.run(node.get("Stmts") or [])
            case "FuncDecl":
                self.functions[node["Name"]["Value"]] = (self.source, node["Body"])
        return True

    def _guess(self, what: str, guesses: Any, how: str = "") -> None:
        if guesses:
            how = how or f"cannot be known, read as {str(self.unknown).lower()}"
            self.guessed.append(f"{' '.join(what.split())[:80]}: {how}")

    def _if(self, node: Node) -> None:
        if "Cond" in node and node["Cond"]:
            known = self.run(node["Cond"])
            self._guess(f"if {self._written(node['Cond'][0]).rstrip(' ;')}", known is None)
            if not (self.unknown if known is None else known):
                if node.get("Else"):
                    self._if(node["Else"])
                return
        self.run(node.get("Then") or [])

    def _case(self, node: Node) -> None:
        text = " ".join(self.words(node["Word"], unset=""))
        self._guess(
            f"case {self._written(node['Word'])}", "$" in text, "cannot be known, no branch is read"
        )
        for item in node.get("Items") or [] if "$" not in text else []:
            patterns = ["".join(self.words(word)) or "" for word in item["Patterns"]]
            if any(fnmatchcase(text, pattern) for pattern in patterns):
                self.run(item.get("Stmts") or [])
                return

    def _call(self, words: list[Node], environment: list[str]) -> bool | None:
        """Follow a command. `environment` are the texts that are assigned for it alone: a launch
        may be among them."""
        texts = [text for word in words for text in self.words(word)]
        if texts[:1] in (["["], ["test"]):
            return self._holds(
                [text for word in words[1:] for text in self.words(word, unset="") or [""]]
            )
        scripts = [i for i, text in enumerate(texts[:4]) if text.endswith((".sh", ".env"))]
        if texts and texts[0] in (".", "source", "bash", "sh", "exec", "env") and scripts:
            beside = self.path.parent / texts[scripts[0]]
            try:
                with self._called(
                    texts[scripts[0] + 1 :], parsed := tree_of(beside, text_of(beside))
                ):
                    return self.run(parsed[1])
            except InputError as error:
                self._guess(" ".join(texts[:2]), texts[0] in (".", "source"), f"left out ({error})")
        if texts and texts[0] in self.functions:
            with self._called(texts[1:], self.functions[texts[0]]):
                return self.run([self.functions[texts[0]][1]])
        self.commands += [[*texts, *environment]] if texts else []
        return None if texts else True

    @contextmanager
    def _called(self, arguments: list[str], called: tuple[bytes, Any]) -> Iterator[None]:
        """Hold the arguments and the source of a function or a script while it is followed."""
        names = [str(i) for i in range(1, 10)]
        before = {name: self.variables.pop(name, None) for name in ("@", *names)}, self.source
        self.variables |= {
            "@": arguments,
            **{n: [text] for n, text in zip(names, arguments, strict=False)},
        }
        self.source, self.calls = called[0], self.calls + 1
        if self.calls > MOST_CALLS:
            raise InputError(
                f"{self.path}: calls in one another {MOST_CALLS} deep; name a launch script"
            )
        yield
        self.calls, self.source = self.calls - 1, before[1]
        self.variables |= {name: values for name, values in before[0].items() if values is not None}

    def _assign(self, node: Node) -> None:
        name = (node.get("Name") or {}).get("Value")
        if name is None or node.get("Naked"):
            return
        before = self.variables.get(name, []) if node.get("Append") else []
        if "Array" in node:
            elements = [
                element["Value"]
                for element in node["Array"].get("Elems") or []
                if element.get("Value")
            ]
            self.variables[name] = [
                *before,
                *(text for word in elements for text in self.words(word)),
            ]
        else:
            text = " ".join(self.words(node["Value"], divides=False)) if node.get("Value") else ""
            self.variables[name] = ["".join(before) + text]

    # Tests.

    def _test(self, node: Node) -> bool | None:
        """Return whether a test in double brackets holds; None if that cannot be known."""
        if node["Type"] == "ParenTest":
            return self._test(node["X"])
        if node["Type"] == "UnaryTest" and node["Op"] == "!":
            known = self._test(node["X"])
            return None if known is None else not known
        if node["Type"] == "BinaryTest" and node["Op"] in ("&&", "||"):
            both, decides = [self._test(node["X"]), self._test(node["Y"])], node["Op"] == "||"
            return decides if decides in both else None if None in both else not decides
        sides = (
            [" ".join(self.words(node[side], unset="")) for side in "XY" if side in node]
            if "Op" in node
            else []
        )
        texts = [" ".join(self.words(node, unset=""))] if node["Type"] == "Word" else sides
        return self._holds([*texts[:-1], *([node["Op"]] if "Op" in node else []), *texts[-1:]])

    def _holds(self, texts: list[str]) -> bool | None:
        texts = texts[:-1] if texts[-1:] == ["]"] else texts
        if texts[:1] == ["!"]:
            known = self._holds(texts[1:])
            return None if known is None else not known
        if any("$" in text for text in texts):
            return None
        match texts:
            case ["-z" | "-n" as sign, text]:
                return (text == "") is (sign == "-z")
            case [one, "=" | "==" | "!=" as sign, other]:
                return fnmatchcase(one, other) is (sign != "!=")
            case [one, sign, other] if sign in _COMPARE:
                value = arithmetic(f"{one} {_COMPARE[sign]} {other}")
                return None if value is None else bool(value)
            case [text]:
                return bool(text)
        return None

    # Expansion.

    def words(self, node: Node, unset: str | None = None, divides: bool = True) -> list[str]:
        """Return the texts that a word stands for. A variable that is not set stays as it is
        written, or is the text `unset`."""
        texts, quoted = [""], False
        for part in node.get("Parts") or []:
            inner = part.get("Parts") or [] if part["Type"] == "DblQuoted" else [part]
            quoted = quoted or part["Type"] in ("DblQuoted", "SglQuoted")
            for one in inner:
                values = self._part(one, part is not one, unset)
                if (
                    part is one
                    and divides
                    and one["Type"] not in ("Lit", "SglQuoted")
                    and len(values) == 1
                ):
                    values = re.split(r"[ \t\n]+", values[0])
                self.expanded += sum(map(len, values))
                if self.expanded > MOST_EXPANDED:
                    raise InputError(
                        f"{self.path}: its variables grow without end; name a launch script"
                    )
                texts[-1] += values[0] if values else ""
                texts += values[1:]
        return [text for text in texts if text or quoted]

    def _part(self, node: Node, quoted: bool, unset: str | None) -> list[str]:
        match node["Type"]:
            case "Lit":
                return [
                    re.sub(r"\\([$`\"\\\n])" if quoted else r"(?s)\\(.)", _escaped, node["Value"])
                ]
            case "SglQuoted":
                return [node.get("Value", "")]
            case "ParamExp" if not node.keys() & {"Length", "Excl", "Slice", "Repl", "Names"}:
                return self._parameter(node, unset)
            case "ArithmExp":
                value = arithmetic(self._numbers(node))
                return [self._kept(node) if value is None else str(value)]
            case "CmdSubst":
                printed = self._printed(node)
                return [self._kept(node) if printed is None else printed]
        return [self._kept(node)]

    def _parameter(self, node: Node, unset: str | None) -> list[str]:
        name, index = (
            node["Param"]["Value"],
            self._written(node["Index"]) if "Index" in node else "",
        )
        expansion = node.get("Exp") or {}
        sign, word = expansion.get("Op", ""), expansion.get("Word") or {}
        values = self.variables.get("@" if name == "*" else name, [] if name in "@*" else None)
        if values is not None and name not in "@*" and index not in ("@", "*"):
            values = values[int(index) if index.isdigit() else 0 :][:1] or [""]
        elif index in ("@", "*"):
            values = values or []
        is_empty = not values or (":" in sign and not any(values))
        if sign in (":-", "-", ":=", "=") and is_empty:
            values = [" ".join(self.words(word, unset, divides=False))]
            if "=" in sign:
                self.variables[name] = values
        elif sign in (":+", "+"):
            values = [""] if is_empty else self.words(word, unset)
        elif sign not in ("", ":-", "-", ":=", "=", ":?", "?"):
            values = None
        return [self._kept(node) if unset is None else unset] if values is None else values

    def _numbers(self, node: Node) -> str:
        """Return arithmetic with the values of its variables."""
        begin, text = (
            node["Pos"]["Offset"],
            self.source[node["Pos"]["Offset"] : node["End"]["Offset"]],
        )
        for one in sorted(_of_type(node["X"], "ParamExp"), key=lambda one: -one["Pos"]["Offset"]):
            value = " ".join(self._part(one, True, None)).encode()
            text = (
                text[: one["Pos"]["Offset"] - begin] + value + text[one["End"]["Offset"] - begin :]
            )
        inner = text[3:-2].decode("utf-8", "replace")
        return re.sub(
            r"[A-Za-z_]\w*",
            lambda name: f"({' '.join(self.variables.get(name[0], [name[0]]))})",
            inner,
        )

    def _printed(self, node: Node) -> str | None:
        """Return what `echo`, `basename`, `dirname` and `cd … && pwd` print; None for any other
        command."""
        text, command = self._written(node), ((node.get("Stmts") or [{}])[-1].get("Cmd") or {})
        if "dirname" in text and ("BASH_SOURCE" in text or "$0" in text):
            return "." + "".join(re.findall(r"/\.\.(?=[/\"' ])", text))
        if command.get("Type") == "BinaryCmd" and command["Op"] == "||":
            self._guess(text, True)
            command = command["Y"].get("Cmd") or {}
        words = [one for word in command.get("Args") or [] for one in self.words(word)]
        match words if command.get("Type") == "CallExpr" else []:
            case ["echo", *texts]:
                return " ".join(texts)
            case ["basename", path, *suffix] if "$" not in path or path == "$0":
                name = self.path.name if path == "$0" else path.rpartition("/")[2]
                return name.removesuffix(suffix[0]) if suffix else name
        return None

    def _written(self, node: Node) -> str:
        """Return a node as it is written."""
        return self.source[node["Pos"]["Offset"] : node["End"]["Offset"]].decode("utf-8", "replace")

    def _kept(self, node: Node) -> str:
        """Return an expansion as it is written, without blanks at which it would be divided."""
        return re.sub(r"\s", "\u00a0", self._written(node))


def _escaped(match: re.Match[str]) -> str:
    return match[1].replace("\n", "")


def _of_type(node: Any, kind: str) -> Iterator[Node]:
    """Yield the outermost nodes of a type."""
    if isinstance(node, dict) and node.get("Type") == kind:
        yield node
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _of_type(inner, kind)


def script_of(path: Path, text: str, unknown: bool = False) -> Script:
    """Return a script with its commands. Raise `InputError` for a text that is no shell script."""
    source, statements = tree_of(path, text)
    script = Script(path, source, unknown)
    try:
        script.run(statements)
    except RecursionError as error:
        raise InputError(f"{path}: nested too deeply; name a launch script") from error
    return script


def tree_of(path: Path, text: str) -> tuple[bytes, list[Node]]:
    """Return a script's bytes and statements. Raise `InputError`."""
    source = re.sub(r"(?<==)<(\w+)>", r"$\1", text).encode()  # a place to fill in
    try:
        made = subprocess.run(
            [_SHFMT, "--to-json", "-ln", "bash"],
            input=source,
            capture_output=True,
            timeout=MOST_S,
            check=False,
        )
        if made.returncode:
            place = made.stderr.decode("utf-8", "replace").strip().splitlines()[:1]
            raise InputError(
                f"{path}: no shell script ({''.join(place)}); correct it, or name a launch script"
            )
        return source, json.loads(made.stdout).get("Stmts") or []
    except (subprocess.TimeoutExpired, RecursionError) as error:
        raise InputError(
            f"{path}: no script that can be read in {MOST_S:g} s; name a launch script"
        ) from error


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


def words_with(
    commands: Iterable[list[str]], path: Path, is_meant: Callable[[str], Any], depth: int = 0
) -> Iterator[list[str]]:
    """Yield the commands whose text is meant, also inside a word: `bash -c "python …"`."""
    for words in commands:
        inner = [word for word in words if " " in word and is_meant(word)][:1]
        if inner and depth < 3 and len(words) > 1:
            yield from words_with(script_of(path, inner[0]).commands, path, is_meant, depth + 1)
        elif is_meant(" ".join(words)):
            yield words
