"""Mutations: the files of one valid input in, those of one that is hardly valid out. Same random state, same bytes.

Half of them know the format (a tree of JSON or YAML, a table of Parquet, a line of text) and change one thing in it to what
nobody expects there; the others do not, and change bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from decimal import Decimal
from itertools import islice
from pathlib import PurePosixPath
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

Files = dict[str, bytes | str | None]  # by path: the content, where a link leads, None for a folder

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        7,
        0.5,
        -0.0,
        1e308,
        -1e308,
        5e-324,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**9, 10**12, 10**30, 10**400),
    *(
        "",
        " ",
        "nan",
        "-1",
        "1e999",
        "0x10",
        "1_000",
        "٣",
        "²",
        "\x00",
        "\ufeffx",
        "\u202eabc",
        "a\nb",
        "a\rb",
        "\u2028",
    ),
    *(
        "\x1b[2J",
        "\ud800",
        "é" * 300,
        "x" * 100_000,
        "..",
        "/",
        "/dev/null",
        "~nobody/x",
        "a/b\x00c",
        "${oc.env:HOME}",
    ),
    *(
        "${nowhere}",
        "${.}",
        "${model",
        "${oc.create:[1]}",
        "name",
        "qwen3-0.6b",
        "none",
        "areal",
        "2001-01-01",
    ),
    *(
        [],
        {},
        [[]],
        {"": {}},
        [None],
        ["a"],
        [1, "a", None],
        {"name": {}},
        {"name": "areal"},
        {"a": [1e308, {"b": None}]},
    ),
    *([0.5] * 300, {str(i): i for i in range(300)}),
)
MOST_PLACES = 20_000  # of a tree, among which one is changed
TEXTS = (
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n\n",
    b"\t",
    b"\xed\xa0\x80",
    "\u2028".encode(),
    b'"',
    b"'",
    b"{",
    b"]",
)
TEXTS += (
    b",",
    b":",
    b"nan",
    b"1e999",
    b"-",
    b"9" * 5000,
    b"[" * 100_000,
    b"\x1b[31m",
    b"${a}",
    b"&a *a",
    b"# ",
    b"\\ud800",
)
LAUGHS = "\n".join(
    f"- &l{i} [{', '.join([f'*l{i - 1}' if i else '1'] * 10)}]" for i in range(10)
)  # ten to the tenth, if anchors were copied
YAML_TEXTS = (
    f"\nvary:\n{LAUGHS}\n",
    f"\nsystems:\n{LAUGHS}\n",
    "\nvary: &v [*v]\n",
    "\nvary: &v [{cluster.gpus: *v}]\n",
    "\nname: !!python/object/apply:os.mkdir [PWNED]\n",
    "\nname: !!python/name:os.system\n",
    "\nname: !mine {}\n",
    "\nname: !!binary gIGC\n",
    "\nname: !!set {a, b}\n",
    "\n? [a, b]\n: 1\n",
    "\n? {a: b}\n: 1\n",
    "\n1: 2\n",
    "\nnull: 2\n",
    "\n2001-01-01: 2\n",
    "\nsteps: 2001-01-01\n",
    "\nsteps: 2001-01-01 10:00:00\n",
    "\nsteps: 1:30:30\n",
    "\nsteps: 0o17\n",
    f"\nsteps: {'9' * 5000}\n",
    "\nsteps: ???\n",
    "\nname: ${name}\n",
    "\nname: ${model}\nmodel: ${name}\n",
    "\nname: ${oc.env:HOME}\n",
    "\nname: ${oc.decode:'[1'}\n",
    "\nname: ${" * 2000,
    "\n<<: *a\n",
    "\n<<: [1]\n",
    "\n---\nname: b\n",
    "\n%YAML 9.9\n",
    "\nsteps: 3\nsteps: 4\n",
    "\nvary: " + "[" * 3000 + "\n",
    "\nvary: " + "[" * 3000 + "]" * 3000 + "\n",
    "\nvary: " + "{a: " * 300 + "1" + "}" * 300 + "\n",
)
TYPES = (
    *(
        pa.int8(),
        pa.int16(),
        pa.uint64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.bool_(),
    ),
    *(
        pa.decimal128(38, 3),
        pa.timestamp("ns"),
        pa.date32(),
        pa.time64("us"),
        pa.duration("s"),
        pa.null(),
        pa.list_(pa.int64()),
    ),
    *(
        pa.struct([("a", pa.int32())]),
        pa.map_(pa.string(), pa.int32()),
        pa.list_(pa.list_(pa.int8())),
        pa.large_list(pa.int8()),
    ),
    *(
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.int64()),
        pa.list_(pa.string()),
        pa.float16(),
    ),
)


def mutated(files: Files, rng: Random) -> Files:
    """One to three changes, most often one."""
    files, broken = dict(files), set()
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        names = [name for name, content in files.items() if isinstance(content, bytes)]
        if not names:
            break
        name = rng.choice(names)
        if rng.random() < 0.03:
            _in_the_folder(files, name, rng)
            break
        content = files[name]
        assert isinstance(content, bytes)
        structured = FORMATS.get(PurePosixPath(name).suffix)
        if structured is not None and name not in broken and rng.random() < 0.65:
            with suppress(
                ValueError,
                TypeError,
                LookupError,
                OverflowError,
                RecursionError,
                pa.ArrowException,
                yaml.YAMLError,
                csv.Error,
            ):
                files[name] = structured(content, rng)
                continue  # else it cannot be so
        broken.add(name)
        files[name] = _of_bytes(content, rng)
    return files


def _in_the_folder(files: Files, name: str, rng: Random) -> None:
    """Something else in the place of a file."""
    content = files.pop(name)
    match rng.randrange(7):
        case 0:
            pass  # it is gone
        case 1:
            files[name] = None
        case 2:
            files[name] = PurePosixPath(name).name  # a link to itself
        case 3:
            files[name] = "nowhere/at all"
        case 4:
            files[name + ".real"] = content
            files[name] = PurePosixPath(name).name + ".real"
        case 5:
            path = PurePosixPath(name)
            files[
                str(
                    path.with_name(
                        rng.choice(("a\nb", "é\u202e", "x" * 200, " ", "-o", "7")) + path.suffix
                    )
                )
            ] = content
        case 6:
            files[name] = b""


# Bytes


def _of_bytes(content: bytes, rng: Random) -> bytes:
    size = len(content)
    a = rng.randrange(size + 1)
    b = min(size, a + rng.choice((1, 2, 4, 16, 100)))
    match rng.randrange(14):
        case 0:
            return content[:a]
        case 1:
            return content[:a] + content[b:]
        case 2:
            return content[:b] + content[a:]
        case 3:
            return content[:a] + rng.choice(TEXTS) + content[a:]
        case 4:
            return content[:a] + rng.randbytes(b - a) + content[b:]
        case 5:
            return rng.choice(TEXTS) + content
        case 6:
            return content + rng.choice(TEXTS)
        case 7:
            c = rng.randrange(size + 1)
            return content[:a] + content[c : c + b - a] + content[b:]
        case 8:
            return rng.choice(_wholes(content, rng))
        case _:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 8)) if size else 0):
                changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
            return bytes(changed)


def _wholes(content: bytes, rng: Random) -> tuple[bytes, ...]:
    """Files that are something else altogether."""
    return (
        b"",
        b"\n" * 10,
        b"\x00" * 1000,
        b"PAR1" * 3,
        b"PAR1" + content + b"PAR1",
        pickle.dumps({"a": 1}),
        gzip.compress(content, mtime=0),
        content.decode("latin-1").encode("utf-16"),
        content.decode("latin-1").encode("utf-8"),
        b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"),
        content.replace(b"\n", b"\r"),
        content.replace(b"\n", b""),
        b"[" * 50_000,
        b'{"a":' * 50_000,
        rng.randbytes(500),
        content * rng.choice((2, 20)),
    )


# Trees of JSON and YAML


def nasty(rng: Random) -> Any:
    return deepcopy(rng.choice(VALUES))


def mutated_tree(tree: Any, rng: Random) -> Any:
    """The tree with one place of it changed."""
    tree = deepcopy(tree)
    places = list(
        islice(_places(tree), MOST_PLACES)
    )  # aliases of aliases have more than memory holds
    if not places or rng.random() < 0.02:
        return nasty(rng)
    holder, key = rng.choice(places)
    value = holder[key]
    match rng.randrange(12):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[
                rng.choice(
                    ("", "x", "a b", "a.b", "é", "name", "\u2028", str(key).upper(), f"{key} ")
                )
            ] = value
        case 1 if isinstance(holder, list):
            holder.insert(key, nasty(rng))
        case 2:
            other, place = rng.choice(places)
            holder[key], other[place] = deepcopy(other[place]), deepcopy(value)
        case 3 | 4 if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = _perturbed(value, rng)
        case 3 if isinstance(value, list):
            holder[key] = value * rng.choice((2, 50))
        case 4:
            holder[key] = str(value)
        case 5:
            holder[key] = [value]
        case 6:
            holder[key] = {"name": value}
        case 7 if isinstance(value, str):
            cut = rng.randrange(len(value) + 1)
            holder[key] = value[:cut] + str(nasty(rng))[:1000] + value[cut:]
        case _:
            holder[key] = nasty(rng)
    return tree


def _perturbed(value: float, rng: Random) -> Any:
    try:
        return rng.choice(
            (
                -value,
                value + 1,
                value - 1,
                value + 0.5,
                value * 1000,
                value * 10**12,
                value / 7,
                str(value),
                [value],
                1 - value,
            )
        )
    except OverflowError:
        return value


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def _of_json(content: bytes, rng: Random) -> bytes:
    if rng.random() < 0.1:  # a key twice
        text = content.decode()
        return text.replace("{", '{"step": 1, "name": 2, ', 1).encode()
    return _json(mutated_tree(json.loads(content), rng))


def _of_json_lines(content: bytes, rng: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            lines[i] = b""
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[i])
        case 2:
            rng.shuffle(lines)
        case _:
            lines[i] = _of_json(lines[i], rng) + b"\n"
    return b"".join(lines)


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode(
        "utf-8", "surrogatepass" if _half(tree) else "strict"
    )


def _half(tree: Any) -> bool:
    return "\ud800" in json.dumps(tree, ensure_ascii=False)


def _of_yaml(content: bytes, rng: Random) -> bytes:
    if rng.random() < 0.25:
        return content + rng.choice(YAML_TEXTS).encode()
    tree = mutated_tree(yaml.safe_load(content), rng)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode(
        "utf-8", "surrogatepass"
    )


# Tables


def _of_parquet(content: bytes, rng: Random) -> bytes:
    table = pq.read_table(pa.BufferReader(content))
    names = table.column_names
    i = rng.randrange(len(names)) if names else 0
    column = table.column(i)
    match rng.randrange(16):
        case 0:
            table = table.remove_column(i)
        case 1:
            table = table.append_column(
                rng.choice(("x", "", "a\nb", "é", names[i].upper())), column
            )
        case 2:
            table = table.append_column(names[i], rng.choice(table.columns))
        case 3:
            table = table.set_column(i, names[i], rng.choice(table.columns))
        case 4 | 5:
            table = table.set_column(i, names[i], _as_type(column, rng.choice(TYPES)))
        case 6 | 7 | 8:
            values = column.to_pylist()
            values[rng.randrange(len(values))] = nasty(rng)
            table = table.set_column(i, names[i], _array(values, column.type))
        case 9:
            values = [None if rng.random() < 0.5 else value for value in column.to_pylist()]
            table = table.set_column(i, names[i], pa.array(values, column.type))
        case 10:
            table = table.slice(0, rng.choice((0, 1, 2)))
        case 11:
            table = pa.concat_tables([table] * rng.choice((2, 3)))
        case 12:
            order = list(range(table.num_rows))
            rng.shuffle(order)
            table = table.take(pa.array(order, pa.int64()))
        case 13:
            table = table.replace_schema_metadata(_metadata(table.schema.metadata, rng))
        case 14:
            table = _inflated(table, rng)
        case 15:
            table = table.set_column(i, names[i], _numbers(table, rng))
    return written(table, rng)


def written(table: pa.Table, rng: Random | None = None) -> bytes:
    """As Parquet, in one of the ways in which that may be written."""
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {}
    if rng is not None and rng.random() < 0.3 and table.num_rows < 2000:
        options = rng.choice(
            (
                {"compression": "none"},
                {"compression": "gzip"},
                {"row_group_size": 2},
                {"use_dictionary": False},
                {"version": "1.0"},
                {"data_page_version": "2.0"},
                {"store_schema": False},
                {"write_page_index": True},
            )
        )
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return bytes(sink.getvalue())


def _numbers(table: pa.Table, rng: Random) -> pa.Array:
    numbers = (0.0, -1.0, 1e308, math.nan, math.inf, -math.inf, 0.5, 2.0**31, 2.0**63)
    return pa.array([rng.choice(numbers) for _ in range(table.num_rows)], pa.float64())


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    for wanted in (kind, None, pa.string()):
        try:
            return pa.array(values if wanted != pa.string() else list(map(repr, values)), wanted)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue
    raise ValueError("no column of Arrow can hold these values")


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    values = column.to_pylist()
    wrapped: dict[str, Callable[[Any], Any]] = {
        "struct": lambda v: {"a": 1},
        "map": lambda v: [("a", 1)],
        "list": lambda v: [v] if isinstance(v, int) else [],
        "large_list": lambda v: [1],
        "decimal": lambda v: Decimal(v) if isinstance(v, int) else None,
        "bool": bool,
        "binary": lambda v: b"\xff\xfe",
        "string": str,
        "halffloat": lambda v: np.float16(0.5),
        "dictionary": lambda v: None,
    }
    try:
        return column.cast(kind, safe=False)
    except (pa.ArrowException, ValueError):
        change = next(
            (change for name, change in wrapped.items() if str(kind).startswith(name)),
            lambda v: None,
        )
        return pa.array([change(value) for value in values], kind)


def _metadata(metadata: dict[bytes, bytes] | None, rng: Random) -> dict[bytes, bytes] | None:
    metadata = dict(metadata or {})
    key = next((key for key in metadata if key.startswith(b"simrl")), None)
    if key is None or rng.random() < 0.1:
        return None
    match rng.randrange(4):
        case 0:
            metadata[key] = _of_bytes(metadata[key], rng)
        case _:
            metadata[key] = _json(mutated_tree(json.loads(metadata[key]), rng))
    return metadata


def _inflated(table: pa.Table, rng: Random) -> pa.Table:
    """One row many times: a small file, a large table."""
    rows = rng.choice((1_000,) * 8 + (100_000, 2_000_000))
    first = table.slice(0, 1)
    if not table.num_rows:
        raise ValueError("no row to repeat")
    indices = pa.array(np.zeros(min(rows, 10**8 // max(first.nbytes, 1)), np.int64))
    return first.take(indices)


# Lines


def _of_csv(content: bytes, rng: Random) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    i = rng.randrange(len(rows))
    match rng.randrange(8):
        case 0:
            rows.insert(i, rows[rng.randrange(len(rows))])
        case 1:
            for row in rows:
                row.append(row[i % len(row)])
        case 2:
            rows[i] = rows[i][:-1]
        case 3:
            rows[i].append("x")
        case 4:
            j = rng.randrange(len(rows[0]))
            rows = [[cell for k, cell in enumerate(row) if k != j] for row in rows]
        case _:
            rows[i][rng.randrange(len(rows[i]))] = str(nasty(rng))
    out = io.StringIO()
    csv.writer(out, lineterminator=rng.choice(("\n", "\n", "\r\n"))).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _of_log(content: bytes, rng: Random) -> bytes:
    lines = content.decode().splitlines(keepends=True)
    i = rng.randrange(len(lines))
    words = lines[i].split(" ")
    j = rng.randrange(len(words))
    match rng.randrange(6):
        case 0:
            lines.insert(i, rng.choice(lines))
        case 1:
            del lines[i]
        case 2:
            words[j] = f"{words[j].partition(':')[0]}:{nasty(rng)}"
        case 3:
            words[j] = str(nasty(rng))
        case 4:
            words.insert(j, str(nasty(rng)))
        case 5:
            words[j] = "".join(
                str(nasty(rng))[:40] if c.isdecimal() and rng.random() < 0.3 else c
                for c in words[j]
            )
    if len(lines) > i:
        lines[i] = " ".join(words)
    return "".join(lines).encode("utf-8", "surrogatepass")


FORMATS: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": _of_json,
    ".jsonl": _of_json_lines,
    ".yaml": _of_yaml,
    ".parquet": _of_parquet,
    ".csv": _of_csv,
    ".log": _of_log,
}
