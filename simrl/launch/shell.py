"""The commands of a shell script, read as text.

Invariant: nothing of the script is run and no environment is read. shfmt parses it; variables,
arrays, `${X:-8}`, `$((A * B))`, functions, scripts beside it and tests of known texts are
followed; a variable that the script does not set is unset. Any other expansion, such as `$(date)`,
stays as it is written. A condition that only a run could decide is read as false, or, where no
launch is found so, as true; both are noted. The work is bounded, whatever the text.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from simrl.errors import InputError, first_line
from simrl.launch.expression import arithmetic

Node = Mapping[str, Any]  # of shfmt's syntax tree
MOST_BYTES = 60_000  # of a script; the longest public ones have 30,000
MOST_WORK = 2_000_000  # characters of expansions, and 100 for each command
MOST_CALLS = 20  # functions and scripts in one another
MOST_S = 2.0  # of shfmt, over all scripts
_FOLDERS = [sysconfig.get_path("scripts", scheme) for scheme in sysconfig.get_scheme_names()]
_SHFMT = shutil.which("shfmt", path=os.pathsep.join([*_FOLDERS, os.environ.get("PATH", "")]))
_COMPARE = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
_ENDLESS = "does not end in reasonable time; name a launch script"


@dataclass
class Script:
    """A script while it is followed: its commands as lists of words, in the order in which they
    run, and what had to be guessed. `unknown` is how a condition is read that only a run could
    decide."""

    path: Path
    source: bytes
    unknown: bool
    commands: list[list[str]] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, tuple[bytes, list[Node]]] = field(default_factory=dict)
    work: int = 0
    calls: int = 0
    until_s: float = field(default_factory=lambda: time.monotonic() + MOST_S)

    def run(self, statements: Iterable[Node]) -> bool | None:
        """Follow statements. Return whether the last one succeeds; None if only a run could
        tell."""
        status: bool | None = True
        for statement in statements:
            self._work(100)
            status = self._command(statement.get("Cmd") or {})
            status = not status if statement.get("Negated") and status is not None else status
        return status

    def _work(self, amount: int) -> None:
        self.work += amount
        if self.work > MOST_WORK or self.calls > MOST_CALLS:
            raise InputError(f"{self.path}: {_ENDLESS}")

    def _guess(self, what: str, how: str = "") -> None:
        how = how or f"cannot be known, read as {str(self.unknown).lower()}"
        self.guessed.append(f"{' '.join(what.split())[:80]}: {how}")

    def _command(self, node: Node) -> bool | None:
        match node.get("Type"):
            case "CallExpr" | "DeclClause":
                arguments, assigned = node.get("Args") or [], node.get("Assigns") or []
                for one in [*assigned, *arguments]:
                    self._assign(one)
                alone = [
                    text
                    for one in assigned
                    for text in self.variables.get(one["Name"]["Value"], [])
                ]
                return self._call([word for word in arguments if "Parts" in word], alone)
            case "BinaryCmd" if node["Op"] in ("&&", "||"):
                status = self.run([node["X"]])
                decided = status is not False if node["Op"] == "||" else status is False
                return status if decided else self.run([node["Y"]])
            case "BinaryCmd":  # a pipe
                return self.run([node["X"], node["Y"]])
            case "TestClause":
                return self._decided(self._test(node["X"]), [node])
            case "ArithmCmd":
                value = arithmetic(self._numbers(node))
                return self._decided(None if value is None else bool(value), [node])
            case "IfClause":
                self._if(node)
            case "CaseClause":
                self._case(node)
            case "ForClause" if node["Loop"]["Type"] == "WordIter":
                name = node["Loop"]["Name"]["Value"]
                values = self._texts(node["Loop"].get("Items"))
                self.variables[name] = values[:1]
                if values[1:]:
                    self._guess(f"for {name}", f"read once, with {values[0]}")
                self.run(node["Do"] if values else [])
            case "ForClause":
                self.run(node["Do"])
            case "WhileClause":
                self.run(node["Do"] if self.run(node["Cond"]) is not False else [])
            case "Block" | "Subshell" | "TimeClause":
                return self.run(node.get("Stmts") or [node.get("Stmt") or {}])
            case "FuncDecl":
                self.functions[node["Name"]["Value"]] = (self.source, [node["Body"]])
        return True

    def _decided(self, known: bool | None, words: list[Node]) -> bool:
        """Return whether a test holds, as it is read where only a run could tell."""
        if known is None:
            self._guess(" ".join(map(self._written, words)))
        return self.unknown if known is None else known

    def _if(self, node: Node) -> None:
        holds: bool | None = True
        if node.get("Cond"):  # else has none
            holds = self.run(node["Cond"])
            if holds is None:
                self._guess(f"if {self._written(node['Cond'][0]).rstrip(' ;')}")
        if self.unknown if holds is None else holds:
            self.run(node.get("Then") or [])
        elif node.get("Else"):
            self._if(node["Else"])

    def _case(self, node: Node) -> None:
        text = " ".join(self.words(node["Word"], unset=""))
        if "$" in text:
            self._guess(f"case {self._written(node['Word'])}", "cannot be known, no branch is read")
            return
        for item in node.get("Items") or []:
            if any(fnmatchcase(text, "".join(self.words(word))) for word in item["Patterns"]):
                self.run(item.get("Stmts") or [])
                return

    def _call(self, words: list[Node], alone: list[str]) -> bool | None:
        """Follow a command; `alone` are the texts that are assigned for it alone, in which a launch
        may be."""
        texts = self._texts(words)
        first = texts[0] if texts else ""
        scripts = [i for i, text in enumerate(texts[:4]) if text.endswith((".sh", ".env"))]
        called: tuple[bytes, list[Node]] | None = self.functions.get(first)
        if first in ("[", "test"):
            unset = [" ".join(self.words(word, unset="")) for word in words[1:]]
            return self._decided(self._holds([text for text in unset if text != "]"]), words)
        if first in (".", "source", "bash", "sh", "exec", "env") and scripts:
            path = self.path.parent / texts[scripts[0]]
            self._work(MOST_WORK // 40)
            try:
                called, texts = tree_of(path, text_of(path), self.until_s), texts[scripts[0] :]
            except InputError as error:
                self._guess(" ".join(texts[:2]), f"left out ({error})")
        if called is None:
            self.commands += [[*texts, *alone]] if texts else []
            return None if texts else True
        before = self.source, self.variables.get("@", [])
        self.source, self.variables["@"], self.calls = called[0], texts[1:], self.calls + 1
        try:
            return self.run(called[1])
        finally:
            (self.source, self.variables["@"]), self.calls = before, self.calls - 1

    def _assign(self, node: Node) -> None:
        if "Name" not in node or node.get("Naked"):
            return
        name = node["Name"]["Value"]
        before = self.variables.get(name, []) if node.get("Append") else []
        if "Index" in node:  # A[1]=3
            self._guess(self._written(node), "an element by itself is left out")
        elif "Array" in node:
            self.variables[name] = before + self._texts(
                [one["Value"] for one in node["Array"].get("Elems") or [] if one.get("Value")]
            )
        else:
            text = " ".join(self.words(node["Value"], divides=False)) if node.get("Value") else ""
            self.variables[name] = ["".join(before) + text]

    # Tests.

    def _test(self, node: Node) -> bool | None:
        """Return whether a test in double brackets holds; None if that cannot be known."""
        if node["Type"] == "BinaryTest" and node["Op"] in ("&&", "||"):
            both, decides = [self._test(node["X"]), self._test(node["Y"])], node["Op"] == "||"
            return decides if decides in both else None if None in both else not decides
        if node["Type"] == "UnaryTest" and node["Op"] == "!":
            known = self._test(node["X"])
            return None if known is None else not known
        if node["Type"] == "ParenTest":
            return self._test(node["X"])
        words = [node] if node["Type"] == "Word" else [node[side] for side in "XY" if side in node]
        texts = [" ".join(self.words(word, unset="")) for word in words]
        return self._holds([*texts[:-1], *([node["Op"]] if "Op" in node else []), texts[-1]])

    def _holds(self, texts: list[str]) -> bool | None:
        match texts:
            case ["!", *rest]:
                known = self._holds(rest)
                return None if known is None else not known
            case _ if any("$" in text for text in texts):
                return None
            case ["-z" | "-n" as sign, text]:
                return (text == "") is (sign == "-z")
            case [one, "=" | "==" | "!=" as sign, other]:
                return fnmatchcase(one, other) is (sign != "!=")
            case [one, sign, other] if sign in _COMPARE:
                value = arithmetic(f"{one} {_COMPARE[sign]} {other}")
                return None if value is None else bool(value)
        return bool(texts[0]) if len(texts) == 1 else None

    # Expansion.

    def _texts(self, words: Iterable[Node] | None) -> list[str]:
        return [text for word in words or [] for text in self.words(word)]

    def words(self, node: Node, unset: str | None = None, divides: bool = True) -> list[str]:
        """Return the texts that a word stands for. A variable that is not set stays as it is
        written, or is the text `unset`."""
        texts, quoted = [""], False
        for part in node.get("Parts") or []:
            in_quotes = part["Type"] == "DblQuoted"
            quoted = quoted or in_quotes or part["Type"] == "SglQuoted"
            for one in part.get("Parts") or [] if in_quotes else [part]:
                values = self._part(one, in_quotes, unset)
                if divides and not quoted and one["Type"] != "Lit" and len(values) == 1:
                    values = re.split(r"[ \t\n]+", values[0])
                self._work(sum(map(len, values)))
                texts[-1] += values[0] if values else ""
                texts += values[1:]
        return [text for text in texts if text or quoted]

    def _part(self, node: Node, in_quotes: bool, unset: str | None) -> list[str]:
        value: str | int | None = None
        match node["Type"]:
            case "Lit":
                escape = r"\\([$`\"\\\n])" if in_quotes else r"(?s)\\(.)"
                value = re.sub(escape, lambda match: match[1].replace("\n", ""), node["Value"])
            case "SglQuoted":
                value = node.get("Value", "")
            case "ParamExp" if not node.keys() & {"Length", "Excl", "Slice", "Repl", "Names"}:
                return self._parameter(node, unset)
            case "ArithmExp":
                value = arithmetic(self._numbers(node))
            case "CmdSubst":
                value = self._printed(node)
        return [self._kept(node) if value is None else str(value)]

    def _parameter(self, node: Node, unset: str | None) -> list[str]:
        name, index = (
            node["Param"]["Value"],
            self._written(node["Index"]) if "Index" in node else "",
        )
        expansion = node.get("Exp") or {}
        sign, word = expansion.get("Op", ""), expansion.get("Word") or {}
        is_list = name in ("@", "*") or index in ("@", "*")
        values = self.variables.get(
            "@" if name == "*" or name.isdigit() else name, [] if is_list else None
        )
        if values is not None and not is_list:
            at = (
                int(name) - 1
                if name.isdigit()
                else int(index[:9] or 0)
                if index.isdecimal() or not index
                else -1
            )
            values = values[at : at + 1] if at >= 0 else []
            values = values or (
                [""] if index.isdecimal() or not (index or name.isdigit()) else None
            )
        is_empty = not values or (":" in sign and not any(values))
        if sign in (":-", "-", ":=", "=") and is_empty:
            values = [" ".join(self.words(word, unset, divides=False))]
            self.variables |= {name: values} if "=" in sign else {}
        elif sign in (":+", "+"):
            values = [""] if is_empty else self.words(word, unset)
        elif sign not in ("", ":-", "-", ":=", "=", ":?", "?"):
            values = None
        return [self._kept(node) if unset is None else unset] if values is None else values

    def _numbers(self, node: Node) -> str:
        """Return arithmetic with the values of its variables."""
        begin, text = node["Pos"]["Offset"], self._written(node)
        for one in reversed(list(_parameters(node["X"]))):
            first, end = one["Pos"]["Offset"] - begin, one["End"]["Offset"] - begin
            text = text[:first] + " ".join(self._part(one, True, None)) + text[end:]
        values = self.variables
        return re.sub(
            r"[A-Za-z_]\w*",
            lambda name: f"({' '.join(values.get(name[0], [name[0]]))})",
            text.lstrip("$")[2:-2],
        )

    def _printed(self, node: Node) -> str | None:
        """Return what `echo`, `basename`, `dirname`, `cd … && pwd` and `echo … | sed s/a/b/` print;
        None for any other command."""
        text, command = self._written(node), ((node.get("Stmts") or [{}])[-1].get("Cmd") or {})
        if "dirname" in text and ("BASH_SOURCE" in text or "$0" in text):
            return str(self.path.parent.resolve()) + "".join(re.findall(r"/\.\.(?=[/\"' ])", text))
        if command.get("Type") == "BinaryCmd" and command["Op"] == "||":
            self._guess(text)
            command = command["Y"].get("Cmd") or {}
        replaces = None
        if command.get("Type") == "BinaryCmd" and command["Op"] == "|":
            sed = self._texts(command["Y"].get("Cmd", {}).get("Args"))
            replaces = (
                re.fullmatch(r"s(.)([^\\]+?)\1(.*?)\1g?", sed[-1]) if sed[:1] == ["sed"] else None
            )
            command = command["X"].get("Cmd") or {} if replaces else {}
        match self._texts(command.get("Args")) if command.get("Type") == "CallExpr" else []:
            case ["echo", *texts]:
                printed = " ".join(texts)
                return printed.replace(replaces[2], replaces[3], 1) if replaces else printed
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


def _parameters(node: Any) -> Iterator[Node]:
    """Yield the outermost expansions of parameters, in order."""
    if isinstance(node, dict) and node.get("Type") == "ParamExp":
        yield node
    elif isinstance(node, dict | list):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _parameters(inner)


def commands_of(
    path: Path, text: str, is_meant: Callable[[str], Any], unknown: bool = False, depth: int = 0
) -> tuple[list[list[str]], Script]:
    """Return the commands of a script whose text is meant, also inside a word (`bash -c "python
    …"`), and the script. Raise `InputError` for a text that is no shell script."""
    source, statements = tree_of(path, text, time.monotonic() + MOST_S)
    script, meant = Script(path, source, unknown), list[list[str]]()
    if nodes := re.search(r"(?m)^#SBATCH\s+(?:--nodes|-N)[= ](\d+)", text):
        script.variables |= {name: [nodes[1]] for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")}
    script.run(statements)
    for words in script.commands:
        inner = [word for word in words if " " in word and is_meant(word)]
        if inner and depth < 3 and len(words) > 1 and len(meant) < MOST_CALLS:
            meant += commands_of(path, inner[0], is_meant, unknown, depth + 1)[0]
        elif is_meant(" ".join(words)):
            meant.append(words)
    return meant, script


def tree_of(path: Path, text: str, until_s: float) -> tuple[bytes, list[Node]]:
    """Return a script's bytes and statements. Raise `InputError`, also if it is not parsed by
    `until_s` of the monotonic clock."""
    source = re.sub(r"(?<==)<(\w+)>", r"$\1", text).encode()  # <NAME>: a place to fill in
    if _SHFMT is None:
        raise InputError("shfmt, which parses scripts, is not there; pip install shfmt-py")
    order = [_SHFMT, "--to-json", "-ln", "bash"]
    try:
        made = subprocess.run(
            order,
            input=source,
            capture_output=True,
            timeout=max(until_s - time.monotonic(), 0.01),
            check=True,
        )
        return source, json.loads(made.stdout).get("Stmts") or []
    except subprocess.CalledProcessError as error:
        place = error.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise InputError(
            f"{path}: no shell script ({place}); correct it, or name a launch script"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{path}: {_ENDLESS}") from error


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file. Raise `InputError` if it is too long, or no text."""
    try:
        is_text = path.is_file() or not path.exists()  # no device, pipe or folder
        with path.open("rb") if is_text else io.BytesIO(b"\0") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{path}: cannot be read ({reason}); name a launch script") from error
    if len(data) > most_bytes or b"\0" in data:
        reason = "no text file" if b"\0" in data else f"more than {most_bytes:,} bytes"
        raise InputError(f"{path}: {reason}; name a launch script or a configuration file")
    return data.decode("utf-8", "replace")
