"""Mutations: the files of one valid input in, the files of one that is hardly valid out. Same random
state, same bytes. Two thirds know the format and change one thing in it; the others change bytes.

What each part found:
- the folder: links to themselves (AReaL), a folder in place of a table, broken links.
- bytes: footers of Parquet that crash Arrow; text too deep for libyaml and for JSON's parser.
- values in trees: a file that is only a quoted number, names that are lists, numbers beyond any
  float or 32 bits, halves of characters, keys that are missing (scenarios, results, reports,
  tokenizers, calibration).
- YAML texts: brackets that crash libyaml; aliases and tags are covered by nothing else.
- tables: rewards and token ids beyond 32 bits, one row two million times, ticks of a huge grid,
  metadata that contradict the rows, columns of every type.
- lines: steps and numbers of thousands of digits, logs without a column, keys that occur twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

Files = dict[str, bytes | str | None]  # by path: the content, where a link leads, None for a folder
NUMBERS = (
    *(-1, 0, 1, 7, 0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**9, 10**12, 10**30, 10**400),
)
WORDS = (
    *("", " ", "nan", "-1", "1e999", "0x10", "1_000", "٣", "²", "\x00", "\ufeffx", "\u202eabc"),
    *("a\nb", "a\rb", "\u2028", "\x1b[2J", "\ud800", "é" * 300, "x" * 100_000, "9" * 5000),
    *("..", "/", "/dev/null", "~nobody/x", "a/b\x00c", "${oc.env:HOME}", "${nowhere}", "${.}"),
    *("${model", "${oc.create:[1]}", "name", "qwen3-0.6b", "none", "areal", "2001-01-01"),
)
TREES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], {"": {}}, [None], ["a"], [1, "a", None], {"name": {}}),
    *({"name": "areal"}, {"a": [1e308, {"b": None}]}, [0.5] * 300, {str(i): i for i in range(300)}),
)
VALUES: tuple[Any, ...] = (*NUMBERS, *WORDS, *TREES)
MOST_PLACES = 20_000  # of a tree, among which one is changed
TEXTS = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n\n",
        b"\t",
        b"\xed\xa0\x80",
        b'"',
        b"{",
        b"]",
    ),
    *(b",", b":", b"nan", b"1e999", b"-", b"9" * 5000, b"[" * 100_000, b"\x1b[31m", b"${a}", b"# "),
)
LAUGHS = "\n".join(
    f"- &l{i} [{', '.join([f'*l{i - 1}' if i else '1'] * 10)}]" for i in range(10)
)  # ten to the tenth, if anchors were copied
YAML_TEXTS = (
    *(f"vary:\n{LAUGHS}", f"systems:\n{LAUGHS}", "vary: &v [*v]", "vary: &v [{cluster.gpus: *v}]"),
    *("name: !!python/object/apply:os.mkdir [PWNED]", "name: !mine {}", "name: !!binary gIGC"),
    *(
        "name: !!set {a, b}",
        "? [a, b]\n: 1",
        "1: 2",
        "null: 2",
        "2001-01-01: 2",
        "<<: *a",
        "<<: [1]",
    ),
    *("steps: 2001-01-01 10:00:00", "steps: 1:30:30", "steps: 0o17", f"steps: {'9' * 5000}"),
    *("name: ${name}", "name: ${model}\nmodel: ${name}", "name: ${oc.env:HOME}", "name: ${" * 2000),
    *("---\nname: b", "%YAML 9.9", "steps: 3\nsteps: 4", "vary: " + "[" * 3000 + "]" * 3000),
    "vary: " + "{a: " * 300 + "1" + "}" * 300,
)
COLUMNS = (  # the type of a column, and a value of it where the column's own cannot be cast
    *(
        (pa.int8(), 1),
        (pa.uint64(), 2**64 - 1),
        (pa.float32(), math.nan),
        (pa.float16(), np.float16(1)),
    ),
    *((pa.string(), "x"), (pa.large_string(), ""), (pa.binary(), b"\xff\xfe"), (pa.bool_(), True)),
    *(
        (pa.decimal128(38, 3), Decimal(5)),
        (pa.timestamp("ns"), 0),
        (pa.date32(), 1),
        (pa.null(), None),
    ),
    *(
        (pa.time64("us"), 1),
        (pa.duration("s"), 1),
        (pa.list_(pa.int64()), [1]),
        (pa.float64(), 2.0**63),
    ),
    *((pa.list_(pa.list_(pa.int8())), [[1]]), (pa.list_(pa.string()), ["a"]), (pa.float64(), -1.0)),
    *((pa.struct([("a", pa.int32())]), {"a": 1}), (pa.map_(pa.string(), pa.int32()), [("a", 1)])),
    (pa.dictionary(pa.int32(), pa.string()), "a"),
)
CANNOT_BE = (
    *(ValueError, TypeError, LookupError, OverflowError, RecursionError),
    *(pa.ArrowException, yaml.YAMLError),
)


def mutated(files: Files, rng: Random) -> Files:
    """Make one to three changes, most often one."""
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
            with suppress(*CANNOT_BE):
                files[name] = structured(content, rng)
                continue
        broken.add(name)
        files[name] = _of_bytes(content, rng)
    return files


def _in_the_folder(files: Files, name: str, rng: Random) -> None:
    """Put something else in the place of a file."""
    content, path = files.pop(name), PurePosixPath(name)
    strange = rng.choice(("a\nb", "é\u202e", "x" * 200, " ", "-o", "7"))
    files |= rng.choice(
        (
            {},
            {name: None},
            {name: path.name},  # a link to itself
            {name: "nowhere/at all"},
            {str(path.with_name(strange + path.suffix)): content},
        )
    )


def _of_bytes(content: bytes, rng: Random) -> bytes:
    size = len(content)
    a = rng.randrange(size + 1)
    b = min(size, a + rng.choice((1, 2, 4, 16, 100)))
    match rng.randrange(10):
        case 0:
            return content[:a]
        case 1:
            return content[:a] + content[b:]
        case 2:
            return content[:b] + content[a:]
        case 3:
            return content[:a] + rng.choice(TEXTS) + content[a:]
        case 4:
            return rng.choice((content + rng.choice(TEXTS), rng.choice(TEXTS) + content))
        case 5:
            return rng.choice(_wholes(content))
        case _:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 8)) if size else 0):
                changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
            return bytes(changed)


def _wholes(content: bytes) -> tuple[bytes, ...]:
    """Return files that are something else altogether."""
    return (
        *(b"", b"\x00" * 1000, b"PAR1" + content + b"PAR1", b"[" * 50_000, b'{"a":' * 50_000),
        *(content.decode("latin-1").encode("utf-16"), b"\xef\xbb\xbf" + content, content * 20),
        *(content.replace(b"\n", b"\r\n"), content.replace(b"\n", b"")),
    )


# Trees of JSON and YAML


def nasty(rng: Random) -> Any:
    """Return a value that nobody expects."""
    return deepcopy(rng.choice(VALUES))


def mutated_tree(tree: Any, rng: Random) -> Any:
    """Return the tree with one place of it changed."""
    tree = deepcopy(tree)
    # aliases of aliases have more places than memory holds
    places = list(islice(_places(tree), MOST_PLACES))
    if not places or rng.random() < 0.02:
        return nasty(rng)
    holder, key = rng.choice(places)
    value = holder[key]
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            others = ("", "x", "a b", "a.b", "é", "name", "\u2028", str(key).upper(), f"{key} ")
            holder[rng.choice(others)] = value
        case 2:
            other, place = rng.choice(places)
            holder[key], other[place] = deepcopy(other[place]), deepcopy(value)
        case 3 if isinstance(value, int | float) and abs(value) < 1e300:
            holder[key] = rng.choice((-value, value + 1, value + 0.5, value * 10**12, value / 7))
        case 3 if isinstance(value, list):
            holder[key] = value * rng.choice((2, 50))
        case 3 if isinstance(value, str):
            cut = rng.randrange(len(value) + 1)
            holder[key] = value[:cut] + str(nasty(rng))[:1000] + value[cut:]
        case 4:
            holder[key] = rng.choice((str(value), [value], {"name": value}))
        case _:
            holder[key] = nasty(rng)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def _of_json(content: bytes, rng: Random) -> bytes:
    if rng.random() < 0.1:  # a key twice
        return content.replace(b"{", b'{"step": 1, "name": 2, ', 1)
    return _json(mutated_tree(json.loads(content), rng))


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _of_yaml(content: bytes, rng: Random) -> bytes:
    if rng.random() < 0.25:
        return content + f"\n{rng.choice(YAML_TEXTS)}\n".encode()
    tree = mutated_tree(yaml.safe_load(content), rng)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text.encode("utf-8", "surrogatepass")


# Tables


def _of_parquet(content: bytes, rng: Random) -> bytes:
    table = pq.read_table(pa.BufferReader(content))
    i = rng.randrange(table.num_columns)
    name, column, other = table.column_names[i], table.column(i), rng.choice(table.columns)
    match rng.randrange(14):
        case 0:
            table = table.remove_column(i)
        case 1:
            twin = rng.choice(("x", "", "a\nb", name.upper(), name, name))
            table = table.append_column(twin, other)
        case 2:
            table = table.set_column(i, name, other)
        case 3 | 4 | 5:
            table = table.set_column(i, name, _as_type(column, *rng.choice(COLUMNS)))
        case 6 | 7 | 8:
            values = column.to_pylist()
            values[rng.randrange(len(values))] = nasty(rng)
            table = table.set_column(i, name, _array(values, column.type))
        case 9:
            values = [None if rng.random() < 0.5 else value for value in column.to_pylist()]
            table = table.set_column(i, name, pa.array(values, column.type))
        case 10:
            table = table.slice(0, rng.choice((0, 1, 2)))
        case 11:
            order = [row for row in range(table.num_rows) for _ in range(rng.choice((1, 1, 2)))]
            rng.shuffle(order)
            table = table.take(pa.array(order, pa.int64()))
        case 12:
            table = table.replace_schema_metadata(_metadata(table.schema.metadata, rng))
        case 13:  # one row many times: a small file, a large table
            rows = min(rng.choice((1_000,) * 8 + (2_000_000,)), 10**8 // table.slice(0, 1).nbytes)
            table = table.slice(0, 1).take(pa.array(np.zeros(rows, np.int64)))
    options = ({}, {}, {"compression": "none"}, {"row_group_size": 2}, {"store_schema": False})
    sink = pa.BufferOutputStream()
    more = rng.choice(options) if table.num_rows < 2000 else {}
    pq.write_table(table, sink, **{"compression": "zstd", **more})
    return bytes(sink.getvalue())


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    for wanted in (kind, None):
        with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
            return pa.array(values, wanted)
    return pa.array(list(map(repr, values)))


def _as_type(column: pa.ChunkedArray, kind: pa.DataType, value: Any) -> pa.Array:
    with suppress(pa.ArrowException, ValueError):
        return column.cast(kind, safe=False)
    return pa.array([value] * len(column), kind)


def _metadata(metadata: dict[bytes, bytes], rng: Random) -> dict[bytes, bytes] | None:
    key = next((key for key in metadata or () if key.startswith(b"simrl")), None)
    if key is None or rng.random() < 0.1:
        return None
    value = metadata[key]
    broken = rng.random() < 0.25
    return {
        **metadata,
        key: _of_bytes(value, rng) if broken else _json(mutated_tree(json.loads(value), rng)),
    }


# Lines


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


def _of_text(content: bytes, rng: Random, between: str = " ") -> bytes:
    """Change a line or one of its words."""
    lines = content.decode().splitlines(keepends=True)
    i = rng.randrange(len(lines))
    words = lines[i].split(between)
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
            words.insert(j, rng.choice(words))
        case 5:
            others = [str(nasty(rng))[:40] if rng.random() < 0.3 else c for c in words[j]]
            digits = zip(words[j], others, strict=True)
            words[j] = "".join(other if c.isdecimal() else c for c, other in digits)
    if len(lines) > i:
        lines[i] = between.join(words)
    return "".join(lines).encode("utf-8", "surrogatepass")


FORMATS: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": _of_json,
    ".jsonl": _of_json_lines,
    ".yaml": _of_yaml,
    ".parquet": _of_parquet,
    ".csv": partial(_of_text, between=","),
    ".log": _of_text,
}
