"""What is said of a trace is what its rows hold."""

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from simrl.analysis.trace_description import describe
from simrl.errors import InputError
from simrl.show.figures.trace import lengths_figure
from simrl.show.style import save
from simrl.show.tables.trace import print_description
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import Trace, TraceMetadata

MODEL = LengthModel(
    steps=6,
    prompts_per_step=50,
    group=8,
    cap_tokens=2048,
    prompts=100,
    mean_tokens=(300, 900),
    sigma=0.9,
)
KEYS = [
    "rows",
    "steps",
    "epochs",
    "prompts",
    "group_min",
    "group_max",
    "group_mean",
    "prompt_tokens",
    "response_tokens",
    "prompt_tokens_total",
    "response_tokens_total",
    "cap_tokens",
    "share_at_cap",
    "share_cut",
    "within_group_variance_share",
    "reward_mean",
    "has_token_ids",
    "pauses_mean",
    "environment_s_mean",
    "observation_tokens_mean",
    "context_tokens",
    "tools",
    "metadata",
]


def by_hand(**changes):
    """Three groups in two steps: lengths (10, 20), (30), (40, 50, 60); the cap is 60."""
    columns = {
        "step": [0, 0, 0, 1, 1, 1],
        "epoch": [0] * 6,
        "prompt_id": [1, 1, 2, 1, 1, 1],
        "sample": [0, 1, 0, 0, 1, 2],
        "prompt_tokens": [5, 5, 8, 5, 5, 5],
        "response_tokens": [10, 20, 30, 40, 50, 60],
        **changes,
    }
    metadata = TraceMetadata(
        name="by hand", kind="recorded", source="run 7 [x]", tokenizer="qwen3", cap_tokens=60
    )
    return Trace.from_columns(columns, metadata)


def printed(trace):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_description(describe(trace), console)
    return console.file.getvalue()


def test_a_description_counts_what_is_there():
    d = describe(
        by_hand(
            reward=[1.0, None, 0.0, 1.0, 1.0, None],
            response_ids=[[1] * n for n in range(10, 70, 10)],
        )
    )
    assert list(d) == KEYS
    assert (d["rows"], d["steps"], d["epochs"], d["prompts"]) == (6, 2, 1, 2)
    assert (d["group_min"], d["group_max"], d["group_mean"]) == (1, 3, 2)
    assert d["response_tokens"] == {
        "mean": 35, "p5": 12.5, "p25": 22.5, "p50": 35, "p75": 47.5, "p95": 57.5, "p99": 59.5, "max": 60
    }  # fmt: skip
    assert (d["prompt_tokens"]["p50"], d["prompt_tokens"]["max"], d["prompt_tokens_total"]) == (
        5,
        8,
        33,
    )
    assert (d["response_tokens_total"], d["cap_tokens"], d["share_at_cap"]) == (
        210,
        60,
        pytest.approx(1 / 6),
    )
    assert d["reward_mean"] == pytest.approx(3 / 4)
    assert d["has_token_ids"] is True
    assert d["metadata"]["source"] == "run 7 [x]"


def test_a_description_is_plain_json_and_the_same_twice():
    trace = synthesise(MODEL, 1)
    text = json.dumps(describe(trace), allow_nan=False)
    assert json.loads(text) == json.loads(json.dumps(describe(trace)))


def test_what_a_trace_cannot_tell_is_none():
    d = describe(by_hand())
    assert (d["reward_mean"], d["has_token_ids"]) == (None, False)
    one_a_group = by_hand(sample=[0] * 6, prompt_id=range(6), step=[0] * 6)
    assert describe(one_a_group)["within_group_variance_share"] is None
    all_alike = by_hand(response_tokens=[30] * 6)
    assert describe(all_alike)["within_group_variance_share"] is None
    assert describe(by_hand(reward=[None] * 6))["reward_mean"] is None


@pytest.mark.parametrize("prompt_share", [0.0, 0.4, 0.9])
def test_the_variance_within_groups_is_what_the_prompts_leave(prompt_share):
    """Growth from step to step is no difference between prompts, so it does not count."""
    wide = MODEL.model_copy(
        update={
            "prompts_per_step": 1000,
            "prompts": 6000,
            "cap_tokens": 10**6,
            "prompt_share": prompt_share,
        }
    )
    share = describe(synthesise(wide, 0))["within_group_variance_share"]
    assert share == pytest.approx(1 - prompt_share, abs=0.03)


def test_print_says_where_the_numbers_come_from():
    text = printed(synthesise(MODEL, 3, "drawn"))
    assert "drawn, synthetic: no model generated these responses" in text
    assert "seed 3" in text
    assert "sigma 0.9" in text
    assert "none (lengths are drawn)" in text
    text = printed(by_hand())
    assert "by hand, recorded" in text
    assert "Source: run 7 [x]" in text
    assert "counted by: qwen3" in text


def test_print_gives_the_numbers_of_the_description():
    trace = synthesise(MODEL, 3)
    d, text = describe(trace), printed(trace)
    assert f"{d['rows']:,}" in text
    assert f"{d['share_at_cap']:.1%} of responses, cap 2,048 tokens" in text
    assert f"{d['response_tokens']['p99']:,.0f}" in text
    assert f"mean {d['reward_mean']:.3f}" in text
    assert "not recorded; acceptance of drafts must be assumed" in text


@pytest.mark.parametrize(
    "trace",
    [
        synthesise(MODEL, 0),
        by_hand(),
        by_hand(response_tokens=[60] * 6),
        Trace.from_columns(
            {name: [0] for name in ("step", "epoch", "prompt_id", "sample")} | {"prompt_tokens": [1], "response_tokens": [1]},
            TraceMetadata(name="a $ sign", kind="imported", source="x", tokenizer="x", cap_tokens=1),
        ),
    ],
    ids=["synthetic", "few", "all at the cap", "one"],
)  # fmt: skip
def test_a_picture_is_drawn_of_any_trace(trace, tmp_path):
    save(lengths_figure(trace), tmp_path / "figures" / "lengths.png")
    pixels = imread(tmp_path / "figures" / "lengths.png")
    assert pixels.shape[0] > 400
    assert np.ptp(pixels[..., :3]) > 0.9
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["lengths.png"]


def test_a_picture_of_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"lengths\.docx: a picture cannot be written as '\.docx'; use \.png"
    ):
        save(lengths_figure(by_hand()), tmp_path / "lengths.docx")
    assert list(tmp_path.iterdir()) == []


def test_turns_of_an_environment_are_told_in_the_mean_over_all_responses():
    turns = {
        "turn_tokens": [[3, 4, 5], [6]],
        "turn_environment_s": [[1.5, 2.5], []],
        "turn_observation_tokens": [[10, 20], []],
    }
    columns = {
        "step": [0, 0],
        "epoch": [0, 0],
        "prompt_id": [0, 0],
        "sample": [0, 1],
        "prompt_tokens": [4, 4],
        "response_tokens": [12, 6],
    }
    metadata = TraceMetadata(
        name="t", kind="synthetic", source="a test", tokenizer="none", cap_tokens=20
    )
    d = describe(Trace.from_columns({**columns, **turns}, metadata))
    assert (d["pauses_mean"], d["environment_s_mean"], d["observation_tokens_mean"]) == (
        1.0,
        2.0,
        15.0,
    )
