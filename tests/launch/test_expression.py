"""Expressions of tables and of scripts: what they are worth, and that they do nothing else."""

import pytest

from simrl.launch.expression import arithmetic, evaluated, keys_of
from tests.launch.reading import within


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * 4", 8),
        ("17 / 2", 8),
        ("17 // 2", 8),
        ("17 % 9", 8),
        ("(1 + 3) * 2", 8),
        ("-8", -8),
        ("1 << 3", 8),
        ("2 > 1 && 3 > 4", 0),
        ("2 > 1 || 3 > 4", 1),
        ("2 == 2", 1),
    ],
)
def test_arithmetic_is_on_whole_numbers(text, value):
    assert arithmetic(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A * 2",
        "2 ** 3",
        "10**10**10",
        "1 / 0",
        "1 +",
        "'a' * 9",
        "1 << 100000000",
        "1 << 10000 << 10000",
        "(" * 200 + "1" + ")" * 200,
        "9" * 401,
        "[1]",
        "__import__('os')",
    ],
)
def test_any_other_text_is_no_arithmetic(text):
    with within():
        assert arithmetic(text) is None


KEYS = {"a.b": 8, "zero": 0, "word": "sglang:d4t2", "nothing": None, "list": [1, 2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b", 8),
        ("a.b * 2", 16),
        ("a.b / 4", 2),
        ("a.b / 16", 0.5),
        ("nothing * 2", None),
        ("missing + 1", None),
        ("missing or 4", 4),
        ("zero or 4", 4),
        ("a.b // zero", None),
        ("a.b if word == 'x' else 4", 4),
        ("missing == None", True),
        ("find('d([0-9]+)', word)", "4"),
        ("int(find('d([0-9]+)', word)) * 2", 8),
        ("find('z([0-9]+)', word)", None),
        ("find('(a)', missing)", None),
        ("len(list) + max(1, 2) + min(3, 4) + round(0.6) + ceil(0.1)", 9),
        ("'sglang' in str(word)", True),
        ("[1, 'a']", [1, "a"]),
        ("int('x')", None),
        ("list[9]", None),
    ],
)
def test_an_expression_has_a_value_or_none(text, value):
    assert evaluated(text, KEYS.get) == value


def test_only_the_keys_that_decide_are_needed():
    needed = []

    def value(key):
        needed.append(key)
        return KEYS.get(key)

    evaluated("a.b if zero == 0 else c.d", value)
    assert needed == ["zero", "a.b"]
    assert keys_of("a.b if zero == 0 else c.d") >= {"a.b", "zero", "c.d"}


@pytest.mark.parametrize(
    "value",
    [
        "__import__('os').system('true')",
        "().__class__.__bases__",
        "8 * 8",
        "find('(a+)+$', 'a')",
        "a.b",
    ],
)
def test_a_value_is_no_expression_whatever_it_reads_like(value):
    assert evaluated("x", {"x": value}.get) == value
    assert evaluated("str(x) + '!'", {"x": value}.get) == f"{value}!"


@pytest.mark.parametrize(
    ("text", "value"),
    [("x % 2", "%20d"), ("x * 8", "ab"), ("8 * x", "ab"), ("x * 2", [1])],
)
def test_arithmetic_on_a_text_or_a_list_is_missing(text, value):
    assert evaluated(text, {"x": value}.get) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("x * 8", "a" * 20_000), ("x + x", "a" * 60_000), ("x ** x", 9_999_999), ("-x", "a")],
)
def test_a_value_that_is_too_large_makes_the_result_missing(text, value):
    with within():
        assert evaluated(text, {"x": value}.get) is None
