"""What the model generated is told from what tools and users wrote, by a mask, by tags, or by the roles of a template."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.tabular import import_jsonl
from simrl.trace.importers.tokens import token_counter
from simrl.trace.importers.turns import by_mask, text_parts
from simrl.trace.trace import UNSEPARATED, write_trace

import_verl = partial(import_dump, "verl")
BY_CHARACTER = token_counter(chars_per_token=1)
CALL = '<tool_call>{"a": 1}</tool_call>'
ANSWER = "<tool_response>\n42\n</tool_response>"


def context(text: str) -> list[str]:
    return [part for generated, part in text_parts(text) if not generated]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"think{CALL}user\n{ANSWER}\nassistant\ndone", [f"user\n{ANSWER}\nassistant\n"]),
        (f"a{ANSWER}b{ANSWER}c", [ANSWER, ANSWER]),
        (f"a{ANSWER}\n{ANSWER}\nb", [f"{ANSWER}\n", f"{ANSWER}\n"]),
        (
            f"a<|im_end|>\n<|im_start|>user\n{ANSWER}<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
            [f"\n<|im_start|>user\n{ANSWER}<|im_end|>\n<|im_start|>assistant\n"],
        ),
        (
            "a<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nb",
            [
                "<|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ],
        ),
        # gpt-oss: its own channels are generated
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            "<|message|>{}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b<|return|>",
            [
                "<|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
            ],
        ),
        (
            "analysisaassistantcommentary to=functions.f json{}functions.f to=assistantcommentary4assistantfinalb",
            ["functions.f to=assistantcommentary4assistant"],
        ),
        (
            "a<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>\nb<|user|>",
            [
                "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>\n",
                "<|user|>",
            ],
        ),
        (
            "a<\uff5ctool\u2581outputs\u2581begin\uff5c><\uff5ctool\u2581output\u2581begin\uff5c>4"
            "<\uff5ctool\u2581output\u2581end\uff5c><\uff5ctool\u2581outputs\u2581end\uff5c>b<\uff5cUser\uff5c>c<\uff5cAssistant\uff5c>d",
            [
                "<\uff5ctool\u2581outputs\u2581begin\uff5c><\uff5ctool\u2581output\u2581begin\uff5c>4"
                "<\uff5ctool\u2581output\u2581end\uff5c><\uff5ctool\u2581outputs\u2581end\uff5c>",
                "<\uff5cUser\uff5c>c<\uff5cAssistant\uff5c>",
            ],
        ),
        (
            "a<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.f:0\n4<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>b",
            [
                "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n4<|im_end|><|im_assistant|>assistant<|im_middle|>"
            ],
        ),
        (
            "atool## Return of functions.f:0\n4assistant\u25c1think\u25b7b",
            ["tool## Return of functions.f:0\n4assistant"],
        ),
        ('{"name": "f"}ipython\n\n4assistant\n\nb', ["ipython\n\n4assistant\n\n"]),
        ("a<search>q</search><information>4</information>b", ["<information>4</information>"]),
        ("the tool\n\nis to=assistant, and ## Return of functions.", []),
        ("done.\nuser\nAnd 43?\nassistant\n44", ["\nuser\nAnd 43?\nassistant\n"]),
        ("a<|im_end|>\n<|im_start|>user\n4", ["\n<|im_start|>user\n4"]),  # cut off
        ("a<tool_response>\n4", []),  # tags that do not end are the model's words
        ("the <information> tag, <interpreter>, <function_results> and [TOOL_RESULTS]", []),
        ("ends <|im_start|> and <|im_start|>assistant or <start_of_turn>, <|start|>, ]~b]", []),
        ("SELECT *\nFROM user\nWHERE 1;\nassistant\nx", []),
        ("SELECT *\nFROM\nuser\nWHERE 1;\nassistant\nx", []),
        ("f(\nuser\n)\nassistant\nx", []),
        ("ask the user\nand the tool\n", []),
        ("a user writes <tool_call>", []),
        ("", []),
    ],
)
def test_context_is_found_in_a_text(text, found):
    assert context(text) == found


@given(
    st.lists(
        st.sampled_from(
            [
                "x",
                CALL,
                "user\n",
                "tool\n",
                ANSWER,
                "<tool_response>",
                "\nassistant\n",
                "<|im_start|>",
                "<|start|>",
                "<|user|>",
                "ipython\n\n",
                "assistant\n\n",
                "python to=assistantcommentary",
                "## Return of functions.",
                "<information>",
            ]
        )
    )
)
def test_the_parts_of_a_text_are_the_text(pieces):
    text = "".join(pieces)
    assert "".join(part for _, part in text_parts(text)) == text


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_the_turns_of_a_mask_hold_its_ones(mask):
    turns, _ = by_mask(mask)
    hidden = mask.index(1) if 1 in mask else len(mask)
    assert sum(turns.tokens) == sum(mask) + hidden
    assert len(turns.observations) == max(len(turns.tokens) - 1, 0)
    assert turns.before == 0


def dump(folder: Path, *rows: dict) -> Path:
    base = {"input": "p", "gts": "42", "score": 1.0, "step": 1}
    (folder / "1.jsonl").write_text("".join(json.dumps({**base, **row}) + "\n" for row in rows))
    return folder


def test_a_dump_with_tags_has_turns_and_the_output_of_tools_is_not_generated(tmp_path):
    trace = import_verl(
        dump(tmp_path, {"output": f"ab{ANSWER}cde"}, {"output": "plain"}), BY_CHARACTER
    )
    assert trace.column("response_tokens").tolist() == [5, 5]
    first, second = trace.responses(0, 2)
    assert [tuple(turn) for turn in first.turns] == [(2, 0.0, len(ANSWER))] and second.turns == ()
    assert (
        "1 of 2 responses have several turns" in trace.metadata.notes
        and UNSEPARATED not in trace.metadata.notes
    )


@pytest.mark.parametrize("name", ["response_mask", "loss_mask"])
def test_a_dump_with_a_mask_has_turns_and_the_masks_lengths(tmp_path, name):
    rows = [
        {"output": "text", name: [1, 1, 1, 0, 0, 1, 0, 0]},
        {"output": "text", name: [1, 1]},
    ]  # padded at the end
    trace = import_verl(dump(tmp_path, *rows), BY_CHARACTER)
    assert trace.table.column("turn_tokens").to_pylist() == [[3, 1], None]
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[2], None]
    assert trace.column("response_tokens").tolist() == [4, 2]
    with pytest.raises(
        InputError, match=f"line 1: field '{name}' is .2.; it must be a list of 0 and 1"
    ):
        import_verl(dump(tmp_path, {"output": "text", name: [2]}), BY_CHARACTER)


def test_a_table_with_text_is_split_as_well_unless_its_columns_tell(tmp_path):
    file = tmp_path / "run.jsonl"
    row = {"step": 0, "prompt": "p", "response": f"ab{ANSWER}cde"}
    file.write_text(f"{json.dumps(row)}\n")
    trace = import_jsonl(file, counter=BY_CHARACTER)
    assert trace.table.column("turn_tokens").to_pylist() == [[2, 3]]
    assert trace.table.column("turn_observation_tokens").to_pylist() == [[len(ANSWER)]]
    assert "1 of 1 responses have several turns" in trace.metadata.notes
    file.write_text(f"{json.dumps({**row, 'turn_tokens': [1, 4 + len(ANSWER)]})}\n")
    assert import_jsonl(file, counter=BY_CHARACTER).column("response_tokens").tolist() == [
        5 + len(ANSWER)
    ]
    file.write_text(f"{json.dumps({**row, 'response': CALL})}\n")
    assert UNSEPARATED in import_jsonl(file, counter=BY_CHARACTER).metadata.notes


def test_what_an_answer_precedes_belongs_to_the_prompt(tmp_path):
    trace = import_verl(dump(tmp_path, {"output": f"{ANSWER}abc"}), BY_CHARACTER)
    assert trace.column("prompt_tokens").tolist() == [1 + len(ANSWER)]
    assert trace.column("response_tokens").tolist() == [3]


def test_a_dump_that_does_not_tell_says_so_and_a_comparison_repeats_it_for_agents(simrl, tmp_path):
    how = ["--model", "qwen3-0.6b", "--gpu", "h100", "--gpus", "4", "--system", "verl_colocated"]
    said = {}
    for name, output in (("agent", f"ab{CALL}cde"), ("plain", "abcde")):
        (tmp_path / name).mkdir()
        trace = import_verl(dump(tmp_path / name, *([{"output": output}] * 4)), BY_CHARACTER)
        write_trace(trace, tmp_path / f"{name}.parquet")
        said[name] = trace.metadata.notes
        folder = ["-o", str(tmp_path / f"{name}_out")]
        done = simrl("compare", str(tmp_path / f"{name}.parquet"), *how, "--inputs", *folder)
        assert done.code == 0, done.err
        assert " ".join(done.out.split()).count(f"; o{UNSEPARATED[1:]}") == (
            name == "agent"
        )  # not modelled
    assert (
        f"{UNSEPARATED}: 4 responses call tools, and no mask or tag tells their output"
        in said["agent"]
    )
    assert "it cannot be told whether tools wrote a part" in said["plain"]


def test_only_the_zeros_before_the_first_one_of_a_mask_are_the_models(tmp_path):
    turns, generated = by_mask([0, 1, 0, 0, 1, 0])
    assert turns == ([2, 1], [2], 0, 1)
    assert generated.tolist() == [True, True, False, False, True, False]


def test_context_that_no_turn_follows_is_left_out_and_counted(tmp_path):
    cut = "\n<|im_start|>user\n4"
    trace = import_verl(dump(tmp_path, {"output": f"abc{cut}"}), BY_CHARACTER)
    assert trace.column("response_tokens").tolist() == [3]
    words = "tokens of what tools or users wrote after the last turn of a response were left out"
    assert f"{len(cut)} {words}" in trace.metadata.notes


@pytest.mark.parametrize("name", ["completion_tokens", "output_tokens", "response_length"])
def test_a_list_of_what_may_be_token_ids_is_no_list_of_lengths(tmp_path, name):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "p", name: [50256, 11, 7]}) + "\n")
    with pytest.raises(InputError, match="no column for response_tokens"):
        import_jsonl(file, counter=BY_CHARACTER)
