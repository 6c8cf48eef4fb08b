"""Trace: what goes in comes out, and what is wrong is named by file, place and value in one line."""

import copy
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from simrl.trace.trace import (
    METADATA_KEY,
    MOST_MADE,
    OPTIONAL,
    REQUIRED,
    Trace,
    TraceMetadata,
    Turn,
    read_trace,
    write_trace,
)

METADATA = TraceMetadata(
    name="run", kind="recorded", source="a test", tokenizer="qwen3", cap_tokens=100
)


def columns(**changes):
    """Two steps of two prompts with one sample each; a column given as None is left out."""
    whole = {
        "step": [0, 0, 1, 1],
        "epoch": [0, 0, 0, 0],
        "prompt_id": [7, 9, 7, 9],
        "sample": [0, 0, 0, 0],
        "prompt_tokens": [5, 6, 5, 6],
        "response_tokens": [10, 20, 30, 40],
    }
    return {name: values for name, values in {**whole, **changes}.items() if values is not None}


def full_columns():
    return columns(
        reward=[1.0, 0.0, None, 0.5],
        finish_reason=["stop", "length", "abort", None],
        policy_version=[0, 0, 1, None],
        environment_s=[0.0, 1.5, None, 2.0],
        response_ids=[[1] * 10, [2] * 20, None, list(range(40))],
        turn_tokens=[[10], [5, 5, 10], None, [20, 20]],
        turn_environment_s=[[], [1.25, 0.25], None, None],
        turn_observation_tokens=[[], [7, 0], None, [3]],
        turn_tool=[[], ["run_tests", "read"], None, ["read"]],
        turn_failures=[[], [1, 0], None, [0]],
    )


def refusal(changes, origin="run.csv"):
    """The message with which `columns(**changes)` is refused."""
    with pytest.raises(InputError) as caught:
        Trace.from_columns(columns(**changes), METADATA, origin)
    return str(caught.value)


def test_a_trace_keeps_every_column_and_its_metadata_through_parquet(tmp_path):
    trace = Trace.from_columns(full_columns(), METADATA)
    write_trace(trace, tmp_path / "new" / "trace.parquet")
    loaded = read_trace(tmp_path / "new" / "trace.parquet")
    assert loaded.metadata == METADATA
    assert loaded.table.to_pydict() == trace.table.to_pydict()
    assert loaded.table.schema.remove_metadata() == trace.table.schema
    assert set(loaded.table.column_names) == set(REQUIRED) | set(OPTIONAL)


def test_writing_twice_gives_the_same_bytes_and_leaves_nothing_beside_them(tmp_path):
    trace = Trace.from_columns(full_columns(), METADATA)
    write_trace(trace, tmp_path / "a.parquet")
    write_trace(read_trace(tmp_path / "a.parquet"), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), min_size=1, unique=True
    )
)
def test_rows_come_sorted_whatever_order_they_were_given_in(keys):
    step, prompt, sample = map(list, zip(*keys, strict=True))
    response = [1 + 30 * s + 5 * p + i for s, p, i in keys]
    trace = Trace.from_columns(
        {
            "step": step,
            "epoch": [0] * len(keys),
            "prompt_id": prompt,
            "sample": sample,
            "prompt_tokens": [1] * len(keys),
            "response_tokens": np.minimum(response, 100),
        },
        METADATA.model_copy(update={"cap_tokens": 200}),
    )
    rows = list(
        zip(*(trace.column(c).tolist() for c in ("step", "prompt_id", "sample")), strict=True)
    )
    assert rows == sorted(keys)
    assert trace.column("response_tokens").tolist() == [
        min(1 + 30 * s + 5 * p + i, 100) for s, p, i in rows
    ]


def test_steps_are_slices_of_the_sorted_rows():
    trace = Trace.from_columns(columns(step=[5, 2, 5, 2], prompt_id=[1, 1, 0, 0]), METADATA)
    assert trace.step_slices == [(2, 0, 2), (5, 2, 4)]
    assert trace.column("response_tokens").tolist() == [40, 20, 30, 10]
    assert len(trace) == 4


def test_samples_are_numbered_from_the_uid_asked_for_and_their_epochs_count_on():
    trace = Trace.from_columns(full_columns(), METADATA)
    second, third = trace.samples(1, 3, first_uid=50, first_epoch=4)
    assert second == (50, 0, 4, 9, 0, 6)
    assert third == (51, 1, 4, 7, 0, 5)
    assert [s.uid for s in Trace.from_columns(columns(), METADATA).samples(0, 4)] == [0, 1, 2, 3]


def test_responses_are_told_apart_from_samples_and_carry_a_missing_reward_as_nan():
    second, third = Trace.from_columns(full_columns(), METADATA).responses(1, 3)
    assert second[:3] == (20, 0.0, (Turn(5, 1.25, 7), Turn(10, 0.25, 0)))
    assert third.tokens == 30
    assert np.isnan(third.reward)
    assert all(np.isnan(r.reward) for r in Trace.from_columns(columns(), METADATA).responses(0, 4))


def test_numpy_pandas_arrow_and_text_columns_give_the_same_trace():
    plain = Trace.from_columns(columns(), METADATA).table
    for convert in (
        np.array,
        lambda values: pd.Series(values, dtype=float),
        lambda values: pa.chunked_array([values[:1], values[1:]]),
        lambda values: [str(v) for v in values],
    ):
        converted = {name: convert(values) for name, values in columns().items()}
        assert Trace.from_columns(converted, METADATA).table == plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response_tokens": [10, 0, 0, 1]}, "row 1, column 'response_tokens' is 0 (and 1 more rows); .* at least 1"),
        ({"response_tokens": [10, 20, 101, 1]}, "row 2, column 'response_tokens' is 101; .* the cap of 100 tokens"),
        ({"prompt_tokens": [5, 6, 7, -1]}, "row 3, column 'prompt_tokens' is -1; .* at least 1"),
        ({"step": [0, -1, 1, 1]}, "row 1, column 'step' is -1; .* at least 0"),
        ({"epoch": [0, None, 0, 0]}, "row 1, column 'epoch' is empty; every sample needs one"),
        ({"step": [0, 0, float("nan"), 1]}, "row 2, column 'step' is nan; it must be a whole number"),
        ({"step": [0, 0, 1.5, 1]}, "row 2, column 'step' is 1.5; it must be a whole number"),
        ({"step": [0, 0, float("inf"), 1]}, "row 2, column 'step': inf is not int32 .*; convert it"),
        ({"step": [0, 0, 2**31, 1]}, "row 2, column 'step': 2147483648 is not int32 .*; convert it"),
        ({"step": ["0", "0", "one", "1"]}, "row 2, column 'step': 'one' is not int32 .*; convert it"),
        ({"step": [0, "one", 1, 1]}, "row 1, column 'step': 'one' is not int32 .*; convert it"),
        ({"reward": ["good"] * 4}, "row 0, column 'reward': 'good' is not float .*; convert it"),
        ({"reward": [0, 1, float("nan"), 1]}, "row 2, column 'reward' is nan; .* finite number, or empty"),
        ({"environment_s": [0, 1, 2, -0.5]}, "row 3, column 'environment_s' is -0.5; .* zero or more seconds"),
        ({"environment_s": [0, 1, float("inf"), 2]}, "row 2, column 'environment_s' is inf; .* zero or more seconds"),
        ({"policy_version": [0, -3, 0, 0]}, "row 1, column 'policy_version' is -3; .* at least 0, or empty"),
        ({"finish_reason": ["stop", "eos", None, "abort"]}, "row 1, column 'finish_reason' is eos; .* stop, length, abort"),
        ({"response_ids": [[1] * 10, [1] * 19, None, None]}, "row 1, .* is 20; it must be the number of its response_ids"),
        ({"response_ids": [[1] * 10, None, [1] * 29 + [-1], None]}, "row 2, column 'response_ids' .* negative token id"),
        ({"response_ids": [[1] * 9 + [None], None, None, None]}, "row 0, column 'response_ids' holds an empty"),
        ({"step": [0, 1, 1, 1], "prompt_id": [7, 7, 9, 7]}, "row 3 repeats (step, prompt_id, sample) = (1, 7, 0); number"),
        ({"response_tokens": None, "response_len": [1] * 4}, "unknown column 'response_len' (did you mean response_tokens?); "),
        ({"response_tokens": None}, "no column 'response_tokens' (it has step, .*); rename the one that holds it"),
        ({"sample": [0, 0, 0]}, "columns of different lengths .*'sample': 3.*; give one value a row"),
        ({"step": np.zeros((4, 2))}, "column 'step' is not int32 .*; convert it"),
        ({"step": pa.array([0, 0, 1, 1], pa.date32())}, "column 'step' is date32.*, not int32; convert it"),
        ({"step": pa.array([0, 0, 1, 1], pa.time32("s"))}, "column 'step' is time32.*, not int32; convert it"),
        ({"step": pa.array([b"0", b"0", b"1", b"1"])}, "column 'step' is binary, not int32; convert it"),
        ({"prompt_tokens": [True, True, False, True]}, "column 'prompt_tokens' is bool, not int32; convert it"),
        ({"step": 3}, "column 'step' is not int32 .*; convert it"),
        ({name: [] for name in REQUIRED}, "no rows; a trace needs at least one sample"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_in_one_line_that_names_file_place_and_value(changes, said):
    message = refusal(changes)
    pattern = re.escape(f"run.csv: {said}").replace(r"\.\*", ".*")
    assert re.match(pattern, message), message
    assert "\n" not in message


def test_a_long_value_is_shortened_in_the_message():
    assert len(refusal({"response_ids": [[1] * 10, ["x"] * 5000, None, None]})) < 300


def message_of_reading(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_missing_file_and_a_folder_are_no_traces(tmp_path):
    assert "no such file" in message_of_reading(tmp_path / "none.parquet")
    assert "no such file" in message_of_reading(tmp_path)


def test_a_trace_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "trace.parquet"
    write_trace(Trace.from_columns(full_columns(), METADATA), path)
    whole = path.read_bytes()
    for size in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = message_of_reading(path)
        assert "cannot be read as Parquet" in message or "no Parquet file" in message


def test_a_text_file_is_not_parquet(tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_text("step,epoch\n0,0\n" * 10)
    assert "no Parquet file; `simrl trace import` makes" in message_of_reading(path)


def write_table(path, table, metadata=None):
    raw = METADATA.model_dump_json() if metadata is None else metadata
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: raw.encode()}), path)


def test_parquet_of_another_program_is_told_to_be_imported(tmp_path):
    pq.write_table(pa.table(columns()), tmp_path / "other.parquet")
    assert "without simrl's trace metadata; import it" in message_of_reading(
        tmp_path / "other.parquet"
    )


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            METADATA.model_copy(update={"cap_tokens": 0}).model_dump_json(),
            "metadata field cap_tokens: ",
        ),
        (
            METADATA.model_copy(update={"cap_tokens": 2**80}).model_dump_json(),
            "metadata field cap_tokens: ",
        ),
        ('{"name": "run"}', "metadata field kind: it is missing"),
        ("{", "metadata field (all): valid JSON is needed"),
        (
            METADATA.model_copy(update={"schema_version": 99}).model_dump_json(),
            "trace schema 99, this simrl reads 1",
        ),
    ],
)
def test_bad_metadata_names_its_field(tmp_path, metadata, said):
    write_table(tmp_path / "trace.parquet", pa.table(columns()), metadata)
    assert said in message_of_reading(tmp_path / "trace.parquet")


def test_a_file_is_validated_like_columns_are(tmp_path):
    path = tmp_path / "trace.parquet"
    write_table(path, pa.table(columns(response_tokens=[10, 20, 30, 4000])))
    assert "row 3, column 'response_tokens' is 4000" in message_of_reading(path)
    write_table(path, pa.table(columns()).slice(0, 0))
    assert "no rows" in message_of_reading(path)
    table = pa.table(columns())
    write_table(path, table.append_column("step", table.column("step")))
    assert "two columns are called 'step'" in message_of_reading(path)


def test_an_optional_column_with_gaps_reads_as_nan_or_none():
    trace = Trace.from_columns(full_columns(), METADATA)
    assert trace.column("policy_version").tolist()[:3] == [0, 0, 1]
    assert np.isnan(trace.column("policy_version")[3])
    assert trace.column("finish_reason").tolist() == ["stop", "length", "abort", None]


def test_what_is_made_of_a_trace_is_made_once_and_only_the_latest_few_are_kept_here():
    trace, made = Trace.from_columns(columns(), METADATA), list[int]()

    def make(number):
        made.append(number)
        return -number

    for number in (0, 0, 1, 0, *range(2, MOST_MADE + 1), 0, 1):
        assert trace.once(number, partial(make, number)) == -number
    assert made == [0, 1, *range(2, MOST_MADE + 1), 1]
    assert (
        len(copy.copy(trace).__dict__) == 2
    )  # another process gets the table and what it is, no more
