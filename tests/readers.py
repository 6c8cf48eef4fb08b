"""Readers: everything of simrl that reads what others wrote, with a few valid inputs each. `fuzzing.py` mutates these."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import tomllib
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from simrl.analysis.explanation import diff_results, explain_result
from simrl.errors import InputError
from simrl.files import SEAL
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, Tables, read_profile, write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.result.result import Result, read_result
from simrl.scenario.load import Choices, load_scenarios
from simrl.show.report.page import report_html
from simrl.show.report.sources import find
from simrl.show.tables.explain import print_difference, print_explanation
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.study.calibration import launched
from simrl.study.grid import resolved, vary
from simrl.study.logged_lengths import lengths_of, usable_steps
from simrl.study.point import Digests, Point
from simrl.study.sweep import kept, plan, table_rows
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.tabular import import_csv, import_jsonl
from simrl.trace.importers.tokens import token_counter
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import Trace, TraceMetadata, read_trace, write_trace
from tests.fuzzing import Reader
from tests.helpers import scenario as small_scenario
from tests.mutations import Files

COUNTER = token_counter(chars_per_token=2.0)


def _files(folder: Path) -> Files:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): _unsealed(path.read_bytes()) for path in files}


def _unsealed(content: bytes) -> bytes:
    """Return a file as somebody else would have written it: mutations are to reach the reader behind the seal."""
    if content.startswith(b"{") and b'"sha256"' in content:
        data = json.loads(content)
        return json.dumps(
            {key: value for key, value in data.items() if key != "sha256"}, indent=1
        ).encode()
    return content.replace(SEAL, b"somebody.own")


def _json_lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _written(write: Any, name: str) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return _unsealed((Path(folder) / name).read_bytes())


# Traces


def _a_trace(**columns: Sequence[Any]) -> bytes:
    samples = {
        "step": [0, 0, 0, 0, 1, 1, 1, 1],
        "epoch": [0] * 8,
        "prompt_id": [0, 0, 1, 1, 2, 2, 3, 3],
        "sample": [0, 1] * 4,
        "prompt_tokens": [5, 5, 6, 6, 7, 7, 8, 8],
        "response_tokens": [4, 9, 2, 30, 8, 8, 1, 12],
    }
    metadata = TraceMetadata(
        name="run", kind="recorded", source="a test", tokenizer="none", cap_tokens=40
    )
    return _written(
        lambda path: write_trace(Trace.from_columns({**samples, **columns}, metadata), path),
        "t.parquet",
    )


def _with_turns() -> bytes:
    return _a_trace(
        reward=[0.0, 1.0, None, 1.0, 0.0, 0.5, 1.0, 0.0],
        finish_reason=["stop", "stop", "stop", "length", None, "stop", "abort", "stop"],
        policy_version=[0, 0, 0, 1, 1, None, 2, 2],
        environment_s=[0.5, None, 1.5, 3.0, 0.0, 1.0, None, 0.0],
        turn_tokens=[[2, 2], None, [1, 1], [10, 10, 10], [8], None, None, [12]],
        turn_environment_s=[[0.5], None, [1.5], [1.0, 2.0], [], None, None, []],
        turn_observation_tokens=[[3], None, [0], [4, 4], [], None, None, []],
    )


def _with_tokens() -> bytes:
    lengths = [4, 9, 2, 30, 8, 8, 1, 12]
    ids = pa.array(
        [[(7 * i + j * j) % 50 for j in range(n)] for i, n in enumerate(lengths)],
        pa.list_(pa.int32()),
    )
    return _a_trace(reward=[0.0, 1.0] * 4, response_ids=ids)


def _use(trace: Trace) -> None:
    """A trace that was read can be used."""
    first, end = 0, min(len(trace), 100)
    assert len(trace.samples(first, end)) == len(trace.responses(first, end)) == end > 0
    assert trace.step_slices[-1][2] == len(trace)
    assert trace.observation_tokens().min() >= 0


def _read_trace(folder: Path) -> None:
    _use(read_trace(folder / "trace.parquet"))


# Profiles


def _a_profile(model: str = "qwen3-0.6b", points: int = 3) -> bytes:
    whole = roofline_profile(model_shape(model), gpu("h100"), 1)
    t = whole.tables
    chosen = [
        sorted({0, len(axis) // 2, len(axis) - 1})[:points]
        for axis in (t.prefill_tokens, t.prefill_kv_tokens)
    ]
    chosen += [
        sorted({0, len(axis) // 2, len(axis) - 1})
        for axis in (t.decode_sequences, t.decode_kv_tokens)
    ]
    a, b, c, d = chosen
    attention = t.attention_s[a][:, b][:, :, c][:, :, :, d]
    tables = Tables(
        *t[:4],
        t.prefill_tokens[a],
        t.prefill_kv_tokens[b],
        t.decode_sequences[c],
        t.decode_kv_tokens[d],
        attention,
        1e-3,
    )
    profile = TableProfile(tables, whole.metadata)
    return _written(lambda path: write_profile(profile, path), "p.parquet")


def _read_profile(folder: Path) -> None:
    profile = read_profile(folder / "profile.parquet")
    assert profile.decode_s(4, 100.0) >= 0 and profile.prefill_s(64) >= 0
    profile.with_corrections(2.0, 1e-3, 1e-5)


# Scenarios

SYNTHETIC = {
    "steps": 2,
    "prompts_per_step": 2,
    "group": 2,
    "cap_tokens": 60,
    "mean_tokens": 20,
    "sigma": 0.5,
}
CHEAP: dict[str, Any] = {
    "name": "cheap",
    "seed": 1,
    "steps": 2,
    "warmup_steps": 0,
    "model": "qwen3-0.6b",
    "cluster": {"gpu": "h100", "gpus": 4, "tp": 1, "cost_per_gpu_hour": 2.5},
    "workload": {"synthetic": SYNTHETIC},
    "profile": {"roofline": {}},
    "systems": ["verl_colocated", {"name": "areal", "eta": 1}],
}
RICH: dict[str, Any] = {
    **CHEAP,
    "workload": {
        "synthetic": {
            **SYNTHETIC,
            "mean_tokens": [10, 20],
            "prompts": 2,
            "turns": 2.0,
            "environment_s": 1.0,
            "reward_mean": 0.5,
        }
    },
    "profile": {
        "roofline": {"compute_efficiency": 0.5, "between_passes_s": 0.001},
        "forward_correction": 1.1,
    },
    "engine": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "kv_cache_tokens": 4096,
    },
    "training": {
        "mfu": 0.3,
        "sequence_parallel": 1,
        "tokens_per_microbatch": 4096,
        "reward_s": 0.1,
        "checkpoint_every": 2,
    },
    "speculation": {
        "verification": "rejection_sampling",
        "temperature": 1.0,
        "acceptance": {
            "qwen2.5-0.5b": {
                "by_position": [0.8, 0.7],
                "spread": 0.2,
                "verification": "rejection_sampling",
            }
        },
        "history_workers": {"workers": 2, "tokens_per_s": 1e6},
    },
    "faults": [
        {"kind": "slow", "worker": 1, "factor": 2.0, "at_s": 1, "until_s": 5},
        {"kind": "lost", "rate_per_hour": 1.0, "duration_s": 3},
    ],
    "systems": [
        {"name": "rhymerl", "rollout_share": 0.5},
        {"name": "verl_draft_model", "draft_tokens": 3},
        "tlt",
        "split",
    ],
    "vary": [{"cluster.gpus": 4}, {"cluster.gpus": 8, "seed": 3}],
}
DECOUPLED: dict[str, Any] = {
    **CHEAP,
    "cluster": {"gpu": "h100", "gpus": 8, "tp": 1},
    "systems": ["specactor", "dapo", "seer"],
}


def _yaml(data: object) -> bytes:
    return yaml.safe_dump(data, sort_keys=False).encode()


def _arguments(folder: Path) -> dict[str, list[str]]:
    """What would be typed after the file: lists of words by their kind."""
    try:
        written = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(written, dict):
        return {}
    words = {key: value if isinstance(value, list) else [value] for key, value in written.items()}
    return {key: [str(word) for word in value] for key, value in words.items()}


def _seeds_of_scenarios() -> list[Files]:
    arguments = {
        "overrides": [
            "cluster.gpus=8",
            "engine.max_num_seqs=8",
            "systems=[split,{name: areal, eta: 2}]",
            "seed=${steps}",
        ],
        "dispatch": [],
    }
    made = {
        "overrides": ["steps=3", "vary=[{seed: 1},{seed: 2}]", "workload.synthetic.group=3"],
        "dispatch": ["seer", "round_robin"],
        "pipeline": ["areal", "rhymerl"],
        "speculation": ["none", "{name: histospec, gate: open}"],
    }
    references = {**CHEAP, "steps": "${seed}", "seed": 2, "name": "${model}"}
    return [
        {"scenario.yaml": _yaml(CHEAP), "arguments.json": b"{}"},
        {"scenario.yaml": _yaml(RICH), "arguments.json": b"{}"},
        {"scenario.yaml": _yaml(DECOUPLED), "arguments.json": b"{}"},
        {"scenario.yaml": _yaml(references), "arguments.json": json.dumps(arguments).encode()},
        {"scenario.yaml": _yaml(CHEAP), "arguments.json": json.dumps(made).encode()},
        {
            "scenario.yaml": _yaml(RICH),
            "arguments.json": json.dumps({"system": ["areal"], "overrides": ["eta=2"]}).encode(),
        },
    ]


def _load(folder: Path) -> list[Any]:
    words = _arguments(folder)
    choices = Choices(*(words.get(key, []) for key in ("pipeline", "dispatch", "speculation")))
    return load_scenarios(
        folder / "scenario.yaml",
        words.get("overrides", []),
        next(iter(words.get("system", [])), None),
        choices,
    )


def _read_scenario(folder: Path) -> None:
    found = _load(folder)
    assert found
    for scenario in found[:3]:
        scenario.model_dump_json()


def _prepare(folder: Path) -> None:
    for scenario in _load(folder)[:3]:
        prepare(scenario).inputs()


def _seeds_of_files() -> list[Files]:
    """Scenarios that name files, which are mutated with them."""
    named = {
        **CHEAP,
        "model": "model",
        "workload": {"trace": "trace.parquet"},
        "profile": {"path": "profile.parquet"},
        "speculation": {"draft_profile": "draft.parquet"},
        "systems": [{"name": "verl_draft_model"}],
    }
    config = _config()
    shared = {
        "profile.parquet": _a_profile(),
        "draft.parquet": _a_profile("qwen2.5-0.5b"),
        "model/config.json": config,
    }
    first = {"scenario.yaml": _yaml(named), "trace.parquet": _with_turns(), **shared}
    history = {**named, "speculation": {}, "systems": [{"name": "rhymerl"}, {"name": "verl_ngram"}]}
    second = {"scenario.yaml": _yaml(history), "trace.parquet": _with_tokens(), **shared}
    return [first, second]


PRESETS = """
[mine]
about = "an engine"
between_passes_s = { value = 0.003, low = 0.002, high = 0.004, kind = "measured", source = "my machine" }
sequence_overhead_s = { value = 2e-5, kind = "open", source = "a guess" }
reserve_bytes = { value = 2e9, kind = "measured", source = "its log" }
async_scheduling = { value = true, kind = "stated", source = "its launch" }

[run]
about = "a framework"
engine = "mine"
switch_s = { value = 1, low = 0.5, high = 2, kind = "measured", source = "my log" }
kernels = { value = "fused", kind = "stated", source = "its code" }
"""


def _seeds_of_presets() -> list[Files]:
    named = [
        {"framework": "my.toml"},
        {"engine": {"preset": "my.toml#mine", "enforce_eager": True}},
    ]
    in_files: list[Files] = [
        {"my.toml": PRESETS.encode(), "scenario.yaml": _yaml({**CHEAP, **each})} for each in named
    ]
    engine, run = tomllib.loads(PRESETS).values()
    whole = {"name": "mine", "about": engine.pop("about"), "constants": engine}
    del run["engine"]
    framework = {"name": "run", "about": run.pop("about"), "engine": whole, "constants": run}
    return [*in_files, {"scenario.yaml": _yaml({**CHEAP, "framework": framework})}]


def _seeds_of_sweeps() -> list[Files]:
    def words(*texts: str, zips: Sequence[str] = ()) -> bytes:
        return json.dumps({"texts": texts, "zips": zips, "sample": ["3"]}).encode()

    return [
        {"scenario.yaml": _yaml(CHEAP), "arguments.json": words("cluster.gpus=4,8", "seed=1..3")},
        {
            "scenario.yaml": _yaml(RICH),
            "arguments.json": words("engine.max_num_seqs=8,16", "system.rollout_share=0.25,0.5"),
        },
        {
            "scenario.yaml": _yaml(CHEAP),
            "arguments.json": words(
                "training.mfu=0.2..0.5",
                "cluster.gpus=4,8",
                "cluster.tp=1,2",
                zips=["cluster.gpus,cluster.tp"],
            ),
        },
    ]


def _read_sweep(folder: Path) -> None:
    words = _arguments(folder)
    varied = vary(folder / "scenario.yaml", words.get("texts", []), words.get("zips", []))
    digests = Digests()
    for settings in islice(varied.combinations(3, 0), 3):
        Point(resolved(varied.file, settings), digests)
    with_all = varied.combinations(None, 0)
    for settings in islice(with_all, 5):
        resolved(varied.file, settings)


@cache
def _plan(folder: str) -> Any:
    file = Path(folder).parent / "fixed.yaml"
    file.write_bytes(_yaml({**CHEAP, "systems": ["verl_colocated", "split"]}))
    return plan(vary(file, ["seed=1,2"]), None, 0)


def _seeds_of_outcomes() -> list[Files]:
    import tempfile

    from simrl.study.executors import Here
    from simrl.study.sweep import run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep"
        path.mkdir()
        swept = _plan(str(path))
        run(swept, {}, path, Here(), {})
        return [
            {name: content for name, content in _files(path).items() if name.startswith("points")}
        ]


def _read_outcomes(folder: Path) -> None:
    swept = _plan(str(folder))
    found = kept(swept, folder)
    missing = {point.hash: {"error": "not simulated"} for point in swept.points}
    table_rows(swept, {**missing, **found})


# Results


@cache
def _a_result(system: str, **parameters: Any) -> Result:
    epochs = {
        "steps": 3,
        "prompts_per_step": 2,
        "group": 2,
        "cap_tokens": 200,
        "mean_tokens": 60,
        "sigma": 0.8,
        "prompts": 2,
    }
    return simulate(
        small_scenario(
            {"name": system, **parameters}, workload={"synthetic": epochs}, warmup_steps=1
        )
    )


def _seeds_of_results() -> list[Files]:
    import tempfile

    found = []
    for system, parameters in (("areal", {"eta": 1}), ("tlt", {}), ("seer", {"chunk_tokens": 20})):
        with tempfile.TemporaryDirectory() as folder:
            _a_result(system, **parameters).write(Path(folder))
            found.append({f"run/{name}": content for name, content in _files(Path(folder)).items()})
    return found


def _read_result(folder: Path) -> None:
    from rich.console import Console

    result = read_result(folder / "run")
    console = Console(file=io.StringIO(), width=200)
    try:
        explanation = explain_result(result)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error  # as `simrl explain` says it
    json.dumps(explanation.as_json())
    print_explanation(explanation, console)
    print_difference(diff_results(_a_result("areal", eta=1), result), console)


def _seeds_of_reports() -> list[Files]:
    """A comparison and a sweep, besides single runs."""
    import tempfile

    from simrl.show.comparison import compare_scenarios
    from simrl.study.executors import Here
    from simrl.study.sweep import run

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "scenario.yaml").write_bytes(_yaml(CHEAP))
        compare_scenarios(
            load_scenarios(folder / "scenario.yaml"), folder / "compared" / "run", jobs=1
        )
        (folder / "swept" / "run").mkdir(parents=True)
        planned = plan(vary(folder / "scenario.yaml", ["seed=1,2"]), None, 0)
        run(
            planned,
            {},
            folder / "swept" / "run",
            Here(),
            {"scenario": "scenario.yaml", "values": ["seed=1,2"]},
        )
        return [_files(folder / "compared"), _files(folder / "swept"), *_seeds_of_results()]


def _compare_measured(folder: Path) -> None:
    from rich.console import Console

    from simrl.analysis.agreement import agree
    from simrl.show.tables.agree import print_agreement

    result = read_result(folder / "run")
    for predicted in (result, _a_result("areal", eta=1)):
        try:
            agreement = agree(predicted, result)
        except InputError as error:
            raise InputError(
                f"{folder}: {error}"
            ) from error  # as `simrl compare --measured` says it
        json.dumps(agreement.as_json())
        print_agreement(agreement, Console(file=io.StringIO(), width=200))


# Importers


def _read_verl(folder: Path) -> None:
    _use(import_dump("verl", folder, COUNTER))


def _rollout(step: int, prompt: str, response: str, score: float | None = 0.5) -> dict[str, Any]:
    return {"input": prompt, "output": response, "gts": "42", "score": score, "step": step}


def _seeds_of_verl() -> list[Files]:
    one = _json_lines(
        _rollout(1, "p", "a longer text"),
        _rollout(1, "p", "é", None),
        _rollout(1, "q", "<tool_response>"),
    )
    two = _json_lines(_rollout(2, "p", "x" * 50, 1), _rollout(2, "r", "", 0))
    tags = "a<tool_call>user\n<tool_response>\n4\n</tool_response>\nassistant\nb"
    roles = "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nc\nuser\nd\nassistant\ne"
    masks = [{"response_mask": [1, 1, 0, 0, 1, 0]}, {"loss_mask": [1, 0, 1]}, {"loss_mask": None}]
    three = _json_lines(
        *(
            _rollout(3, "p", text) | mask
            for text, mask in zip((tags, roles, tags), masks, strict=True)
        )
    )
    harmony = "a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    others = [
        f"{harmony}<|channel|>final<|message|>b",
        "afunctions.f to=assistantcommentary4assistantfinalb",
        "a<|observation|>\n4<|assistant|>\nb<|user|>",
        "a<\uff5ctool\u2581outputs\u2581begin\uff5c>4<\uff5ctool\u2581outputs\u2581end\uff5c>b",
        "a<|im_system|>tool<|im_middle|>## Return of functions.f:0\n4<|im_end|><|im_assistant|>b<|im_middle|>c",
        "a.ipython\n\n4assistant\n\nb<information>c</information>d",
    ]
    return [
        {"1.jsonl": one, "2.jsonl": two},
        {"3.jsonl": three},
        {"4.jsonl": _json_lines(_rollout(4, "p", roles))},
        {"5.jsonl": _json_lines(*(_rollout(5, "p", text) for text in others))},
    ]


def _said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _seeds_of_messages() -> list[Files]:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"c": 1}'}}
    talk = [
        _said("system", "abc"),
        _said("user", [{"type": "text", "text": "d"}]),
        _said("assistant", "look", tool_calls=[call], timestamp=1.0),
        _said("tool", "files", tool_call_id="c", timestamp="2026-05-01T12:00:00", duration_ms=5),
        _said("assistant", "done", reasoning_content="why"),
    ]
    shared = {
        "id": "x",
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    verifiers = {"example_id": 1, "prompt": talk[:2], "completion": talk[2:], "reward": 1.0}
    steps = [{"action": "ls", "response": "I ls", "observation": "out", "execution_time": 0.5}] * 2
    swe = {"trajectory": steps, "history": talk[:2], "info": {}}
    made_of = {
        "tool_call_metadata": {
            "tool_call_id": "c",
            "model_response": {"choices": [{"message": talk[2]}]},
        }
    }
    stamp = {"timestamp": "2026-05-01T12:00:00", "source": "agent"}
    events = [
        {**stamp, "action": "message", "source": "user", "args": {"content": "de"}},
        {**stamp, "action": "run", "args": {"command": "ls", "thought": "go"}, **made_of},
        {**stamp, "observation": "run", "content": "one"},
        {**stamp, "action": "finish", "message": "done", "args": {}},
        {**stamp, "kind": "ActionEvent", "thought": [{"text": "hm"}], "tool_call": call},
        {**stamp, "kind": "MessageEvent", "llm_message": talk[4]},
    ]
    return [
        {"a.jsonl": _json_lines({"messages": talk, "step": 1, "tools": [call]}, shared, verifiers)},
        {"a.json": json.dumps([shared, {"history": [events[:2], events[2:]]}], indent=1).encode()},
        {
            "r/a.traj": json.dumps(swe).encode(),
            "r/b.traj": json.dumps({**swe, "history": None}).encode(),
        },
        {f"events/{n}.json": json.dumps(event).encode() for n, event in enumerate(events)},
        {"a.jsonl": _json_lines(*events, talk)},
    ]


def _seeds_of_nemo_data() -> list[Files]:
    line = {
        "token_ids": [[1, 2, 3, 4, 5, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 1, 0]],
        "input_lengths": [5],
        "rewards": [0.5],
        "content": [["q", "a"]],
    }
    return [{"train_data_step3.jsonl": _json_lines(line, {**line, "filtered_rewards": [1]})}]


def _seeds_of_tables() -> list[Files]:
    columns = ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    data = [[0, "p", "abc", 1.0, "q", "defg", 0], [5, "p", "abcd", None, "q", "d", 0.5]]
    table = json.dumps({"columns": columns, "data": data}).encode()
    return [{"media/generations_5_aa.table.json": table}]


CONSOLE = (
    "step:{step} - training/epoch:{epoch} - response_length/mean:300.0 - response_length/max:900.0 - "
    "response_length/min:20.0 - response_length/clip_ratio:0.0625 - prompt_length/mean:80.0 - prompt_length/max:80.0 - "
    "prompt_length/min:80.0 - perf/total_num_tokens:np.float64(6080.0) - timing_s/gen:12.5 - timing_s/update_actor:4.0 - "
    "timing_s/old_log_prob:1.0\n"
)


def _verl_log() -> bytes:
    lines = ["(TaskRunner pid=1) noise: 3\n"]
    lines += [
        "(TaskRunner pid=1) " + CONSOLE.format(step=step, epoch=step // 4) for step in range(1, 7)
    ]
    return "".join(lines).encode()


def _seeds_of_metrics() -> list[Files]:
    lines = _json_lines(*({"step": step, "data": _logged()} for step in range(1, 7)))
    ranks = _verl_log().replace(
        b"perf/total_num_tokens:np.float64(6080.0)", b"global_seqlen/mean:760.0"
    )
    return [{"run.log": _verl_log()}, {"run.jsonl": lines}, {"run.log": ranks}]


def _seeds_of_trl_metrics() -> list[Files]:
    timed = "profiling/Time taken: GRPOTrainer."
    rows: list[dict[str, Any]] = []
    for step in range(1, 7):
        completions = {
            "mean_length": 300.0,
            "min_length": 20.0,
            "max_length": 900.0,
            "clipped_ratio": 0.0625,
        }
        rows += [{timed + "vLLM.generate": 10.0}, {timed + "_get_per_token_logps": 1.0}]
        rows.append(
            {
                "train/global_step": step,
                "step_time": 16.0,
                **{f"completions/{k}": v for k, v in completions.items()},
            }
        )
    history = [{**rows[0], **rows[1], "step": step, **rows[2]} for step in range(1, 7)]
    tags = list(dict.fromkeys(tag for row in rows for tag in row))
    table = _csv(
        ["_step", *tags], *([i, *(row.get(tag, "") for tag in tags)] for i, row in enumerate(rows))
    )
    return [
        {"run.jsonl": _json_lines(*rows)},
        {"run.csv": table},
        {"trainer_state.json": json.dumps({"log_history": history}).encode()},
    ]


def _seeds_of_slime_metrics() -> list[Files]:
    line = (
        "(RolloutManager pid=1) perf {n}: {{'perf/rollout_time': 120.0, 'rollout/response_len/mean': 300.0, "
        "'rollout/response_len/max': 900, 'rollout/response_len/min': 20, 'rollout/truncated_ratio': 0.0625, "
        "'rollout/num_training_samples': 16}}\nnoise\n"
        "(MegatronTrainRayActor pid=2) rollout {n}: {{'rollout/total_lengths': 380.0, "
        "'rollout/response_lengths': 300.0, 'x': nan}}\n"
        "(MegatronTrainRayActor pid=2) perf {n}: {{'perf/actor_train_time': np.float64(4.0), 'perf/log_probs_time': 1.0}}\n"
    )
    return [{"run.log": "".join(line.format(n=n) for n in range(6)).encode()}]


def _logged() -> dict[str, float]:
    """The numbers of a step of `CONSOLE` by tag."""
    entries = (
        entry.rpartition(":") for entry in CONSOLE.format(step=1, epoch=0).strip().split(" - ")[1:]
    )
    return {key: 6080.0 if value.startswith("np") else float(value) for key, _, value in entries}


def _csv(*rows: Sequence[Any]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


def _seeds_of_exports() -> list[Files]:
    """Histories and charts of W&B, scalars of TensorBoard."""
    values, steps = _logged(), range(1, 7)
    history = _csv(
        ["", "_step", *values, "note"], *([i, i, *values.values(), "a, b"] for i in steps)
    )
    lines = _json_lines(
        *({"_step": step, "_runtime": 5.5, **values, "note": "NaN"} for step in steps)
    )
    charts: Files = {}
    scalars: Files = {}
    for i, (tag, value) in enumerate(values.items()):
        name = f"grpo - {tag}"
        charts[f"{i}.csv"] = _csv(
            ["Step", name, f"{name}__MIN"], *([step, value, value] for step in steps)
        )
        file = f"run-.-tag-{tag.replace('/', '_')}.csv"
        scalars[file] = _csv(
            ["Wall time", "Step", "Value"], *([1.7e9, step, value] for step in steps)
        )
    return [{"run.csv": history}, {"run.jsonl": lines}, charts, scalars]


def _seeds_of_nemo() -> list[Files]:
    values = {
        "timing/train/generation": 12.5,
        "timing/train/policy_training": 4.0,
        "timing/train/policy_and_reference_logprobs": 1.0,
        "timing/train/total_step_time": 20.0,
        "train/mean_gen_tokens_per_sample": 300.0,
        "train/gen_tokens_per_sample/min": 20.0,
        "train/gen_tokens_per_sample/max": 900.0,
        "train/mean_prompt_length": 80.0,
        "train/total_num_tokens": 6080.0,
    }
    bar = "=" * 25
    step = f"{bar} Step {{n}}/6 {bar}\n  • Mean Generation Length: 300.0\n  • Total step time: 20.00s\n"
    step += "  • generation: 12.50s (62%)\n"
    console = f"{bar} Epoch 1/2 {bar}\n" + "".join(step.format(n=n) for n in range(1, 7))
    dumped = {tag: {str(step): value for step in range(1, 7)} for tag, value in values.items()}
    return [
        {"run.jsonl": _json_lines(*({"_step": n, **values} for n in range(1, 7)))},
        {"metrics.json": json.dumps(dumped).encode()},
        {"run.log": console.encode()},
    ]


def _seeds_of_consoles() -> list[Files]:
    """A console of each form, as people have it: wrapped, with prefixes, with other processes' text."""
    steps = range(1, 7)
    openrlhf = (
        "INFO trainer.py:1 - Global step {n}: {{'timing/generation': 12.5, 'timing/ppo_train': 4.0, "
        "'response_length': 300.0, 'total_length': 380.0, 'response_clip_ratio': 0.0625}}\n"
    )
    skyrl = (
        "2026-01-01 | INFO - Step {n}: \n{{'generate/avg_num_tokens': '300.0',\n 'generate/max_num_tokens': 900,\n"
        " 'generate/min_num_tokens': 20,\n 'timing/generate': '12.5'}}\n"
    )
    prime = "02:33 SUCCESS Step {n} | Time: 1m 3s | Seq. Length: 380.0 tokens/sample | Max. Off-Policy Level: 1\n"
    areal = (
        "Train step {n}/9 done.\n│ ppo_actor/seq_len/avg │ 3.8e+02 │ ppo_actor/prompt_len/avg │ 8.0e+01 │\n"
        "│ timeperf/rollout │ 1.25e+01 │ timeperf/train_step │ 4.0 │\n"
    )
    bar = "Step: 2%|█ | {n}/40 [01:12<1:40, 257.36s/it, step_time=257, response_length=300, rollout_time=12.5]\r"
    box = (
        "╭── Metrics ──╮\n│ other training_step: {n} | episode: 512 │\n"
        "│ time total: 20.0 | training: 4.0 │\n│ val sequence_lengths: 300.0 │\n"
    )
    texts = [
        "".join(form.format(n=n) for n in steps)
        for form in (openrlhf, skyrl, prime, areal, bar, box)
    ]
    whole = _verl_log().decode()
    folded = "\n".join(whole[i : i + 80] for i in range(0, len(whole), 80)) + "\n"
    carried = "".join(json.dumps({"log": line + "\n"}) + "\n" for line in whole.splitlines())
    return [{"run.log": text.encode()} for text in (*texts, folded, carried)]


def _seeds_of_mlflow() -> list[Files]:
    return [
        {
            f"mlruns/0/abc/metrics/{tag}": "".join(
                f"1700000000000 {value} {step}\n" for step in range(1, 7)
            ).encode()
            for tag, value in _logged().items()
        }
    ]


def _log(folder: Path) -> Path:
    """The log among the files, whatever became of its name."""
    names = ("run.log", "run.jsonl", "trainer_state.json", "run.csv", "metrics.json")
    return next((folder / name for name in names if (folder / name).exists()), folder)


def _read_metrics(folder: Path) -> None:
    metrics = read_metrics(_log(folder), samples=16, prompt_tokens=80.0)
    assert len(metrics) and "step" in metrics
    _use(trace_from_verl_metrics(metrics, 4, 0, cap_tokens=900))


def _seeds_of_calibration() -> list[Files]:
    launch = {
        **CHEAP,
        "cluster": {"gpu": "a100", "gpus": 4, "tp": 2},
        "workload": {"trace": "none"},
        "training": {"sequence_parallel": 2},
        "systems": [{"name": "verl_colocated", "minibatches": 2}],
    }
    settings = {
        "settings": ["model=qwen3-0.6b", "cluster.gpu=a100", "cluster.gpus=4", "cluster.tp=1"]
    }
    return [
        {"run.log": _verl_log(), "launch.yaml": _yaml(launch), "arguments.json": b"{}"},
        {"run.log": _verl_log(), "arguments.json": json.dumps(settings).encode()},
    ]


def _read_calibration(folder: Path) -> None:
    """What calibrate and whatif read before they fit."""
    metrics = read_metrics(_log(folder), samples=16, prompt_tokens=80.0)
    usable = usable_steps(metrics, None, True, 4)
    trace = lengths_of(usable, 4, 900, None)
    write_trace(trace, folder.parent / "lengths.parquet")
    launch = folder / "launch.yaml"
    settings = _arguments(folder).get("settings", [])
    scenario = launched(
        _log(folder),
        launch if launch.exists() else None,
        settings,
        folder.parent / "lengths.parquet",
        len(usable),
    )
    try:
        prepare(scenario)
    except InputError as error:
        raise InputError(f"{scenario.file}: {error}") from error  # as `simrl compare` says it


def _seeds_of_trl() -> list[Files]:
    import pyarrow.parquet as pq

    def completions(step: int, texts: list[str]) -> bytes:
        table = pa.table(
            {
                "step": [step] * len(texts),
                "prompt": ["p", "p", "q", "q"],
                "completion": texts,
                "reward": [0.0, 1.0, None, 0.5],
                "advantage": [0.0, 0.1, -0.1, 0.0],
            }
        )
        return _written(lambda path: pq.write_table(table, path), "c.parquet")

    files = {
        f"completions/completions_0000{i}.parquet": completions(i, ["a", "b" * 40, "", f"{i}"])
        for i in (1, 2)
    }
    return [files]


def _trajectory(
    prompt: str, seqlen: int, head: int = 3, tail: int = 3, **more: Any
) -> dict[str, Any]:
    trajectory = {
        "task_id": 0,
        "sample_idx": 0,
        "seqlen": seqlen,
        "prompt_len": 10,
        "head_version": head,
    }
    return {
        **trajectory,
        "tail_version": tail,
        "reward": 1.0,
        "prompt": prompt,
        "completion": "text",
        **more,
    }


def _seeds_of_areal() -> list[Files]:
    parts = [("prompt", 10), ("assistant", 20), ("context", 5), ("assistant", 15)]
    segments = [{"role": role, "len": tokens} for role, tokens in parts]
    turns = _json_lines(_trajectory("q", 50, segments=segments), _trajectory("q", 30, -1, -1))
    return [
        {
            "rollout/3/7.jsonl": _json_lines(_trajectory("p", 15), _trajectory("p", 20, 2, 3)),
            "rollout/10/8.jsonl": turns,
        }
    ]


def _seeds_of_events() -> list[Files]:
    lines: list[dict[str, Any]] = []
    for i, group in enumerate(("a", "b")):
        for sample in (0, 1):
            ids = {"run": "r", "group_id": group, "prompt_id": group, "generation_index": sample}
            more = {"weight_version": i, "prompt_tokens": 9, "response_tokens": 40 + sample}
            lines.append({"t": 10.0 * i + sample, "event": "rollout_dispatched", **ids})
            lines.append({"t": 10.0 * i + 5, "event": "rollout_sealed", **ids, **more})
        counts = {"tokens_by_version": {str(i): 81}}
        lines.append(
            {"t": 10.0 * i + 6, "run": "r", "event": "group_sealed", "group_id": group, **counts}
        )
        step = {"step": i, "group_ids": [group], "duration_s": 1.5}
        lines.append({"t": 10.0 * i + 8, "run": "r", "event": "train_step", **step})
        lines.append({"t": 10.0 * i + 9, "run": "r", "event": "weight_sync"})
    return [{"rollout_trace.jsonl": _json_lines(*lines)}]


HEADER = (
    "step,prompt_id,sample,epoch,prompt_tokens,response_tokens,reward,finish_reason,policy_version,"
)
HEADER += "environment_s,turn_tokens"


def _seeds_of_csv() -> list[Files]:
    rows = [
        '0,a,0,0,5,10,0.5,stop,0,1.5,"[4, 6]"',
        "0,a,1,0,5,12,,length,1,,",
        "1,7,0,0,6,1,1,,,0,[1]",
    ]
    texts = 'step,prompt,response\n0,"what, now?","line\nbreak"\n0,p,\n1,é,xyz\n'
    return [{"run.csv": "\n".join([HEADER, *rows, ""]).encode()}, {"run.csv": texts.encode()}]


def _seeds_of_jsonl() -> list[Files]:
    row = {
        "step": 0,
        "prompt_id": 3,
        "prompt_tokens": 5,
        "response_tokens": 3,
        "reward": 0.5,
        "finish_reason": "stop",
    }
    with_ids = {**row, "response_ids": [1, 2, 3]}
    turns = {
        **row,
        "turn_tokens": [1, 2],
        "turn_environment_s": [0.5],
        "turn_observation_tokens": [7],
    }
    texts = {"step": 1, "prompt": "p", "response": "some text"}
    lens = {
        "group_id": 1,
        "prompt_len": 5,
        "output_lens": [2, 3],
        "obs_lens": [4, 1],
        "tool_times": [0.5],
    }
    return [
        {"run.jsonl": _json_lines(*([with_ids] * 3))},
        {"run.jsonl": _json_lines(turns, {**turns, "prompt_id": "b"}, turns)},
        {"run.jsonl": _json_lines(texts, {**texts, "response": "\u2028é"}, {**texts, "step": 0})},
        {"run.jsonl": json.dumps([lens, lens], indent=1).encode()},
    ]


def _seeds_of_slime() -> list[Files]:
    sample = {
        "tokens": list(range(9)),
        "response_length": 4,
        "reward": 1.0,
        "status": "completed",
        "loss_mask": [1, 1, 0, 1],
        "weight_versions": ["3", "default"],
        "non_generation_time": 0.25,
    }

    def dump(rollout: int, *samples: object, protocol: int = 2) -> bytes:
        """Return a file as torch.save writes it: a zip, not compressed, with a pickle."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            raw = pickle.dumps({"rollout_id": rollout, "samples": list(samples)}, protocol)
            archive.writestr("d/data.pkl", raw)
        return out.getvalue()

    keyed = {**sample, "reward": {"a": 1.0}, "metadata": OrderedDict(x=(1, 2, 3, None, True))}
    return [
        {"0.pt": dump(0, sample, {**sample, "reward": None}), "1.pt": dump(1, sample)},
        {"0.pt": dump(0, keyed)},
        {"0.pt": dump(0, keyed, protocol=4)},
    ]


def _read_slime(folder: Path) -> None:
    _use(import_dump("slime", folder, reward_key="a"))


# Models and tokenizers


def _config() -> bytes:
    config = {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "_name_or_path": "Qwen/Qwen3-0.6B",
    }
    return json.dumps(config).encode()


def _read_config(folder: Path) -> None:
    shape = model_shape(folder / "model")
    assert shape.parameters > 0 and shape.kv_bytes_per_token > 0


def _seeds_of_tokenizers() -> list[Files]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 7, "b": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    return [{"tokenizer.json": made.to_str().encode()} for made in (words, bpe)]


def _read_tokenizer(folder: Path) -> None:
    counter = token_counter(folder)
    assert len(counter.count(["a b", "", "é" * 10])) == 3


def _fails(folder: Path) -> None:
    """Everything that the fuzzing has to see, for a test of it."""
    content = (folder / "file").read_bytes()
    match int(content):
        case 1:
            1 / 0  # noqa: B018
        case 2:
            while True:
                pass
        case 3:
            print("something", flush=True)
        case 4:
            os.abort()
        case 5:
            raise InputError("something is wrong")
        case 6:
            bytearray(1_200_000_000)
        case 7:
            raise InputError(f"{folder}/file: is 7")


READERS: dict[str, Reader] = {
    "trace": Reader(
        lambda: [{"trace.parquet": _a_trace()}, {"trace.parquet": _with_turns()}], _read_trace
    ),
    "trace_tokens": Reader(lambda: [{"trace.parquet": _with_tokens()}], _read_trace),
    "profile": Reader(lambda: [{"profile.parquet": _a_profile()}], _read_profile),
    "scenario": Reader(_seeds_of_scenarios, _read_scenario),
    "prepare": Reader(_seeds_of_scenarios, _prepare, names_the_file=False),
    "prepare_files": Reader(_seeds_of_files, _prepare, names_the_file=False),
    "presets": Reader(_seeds_of_presets, _prepare, names_the_file=False),
    "sweep": Reader(_seeds_of_sweeps, _read_sweep, names_the_file=False),
    "sweep_outcomes": Reader(_seeds_of_outcomes, _read_outcomes),
    "result": Reader(_seeds_of_results, _read_result),
    "report": Reader(_seeds_of_reports, lambda folder: report_html(find(folder / "run"))),
    "measured": Reader(_seeds_of_results, _compare_measured),
    "verl": Reader(_seeds_of_verl, _read_verl),
    "verl_table": Reader(_seeds_of_tables, _read_verl),
    "verl_metrics": Reader(_seeds_of_metrics, _read_metrics),
    "trl": Reader(_seeds_of_trl, lambda folder: _use(import_dump("trl", folder, COUNTER))),
    "trl_metrics": Reader(_seeds_of_trl_metrics, _read_metrics),
    "slime": Reader(_seeds_of_slime, _read_slime),
    "messages": Reader(
        _seeds_of_messages, lambda folder: _use(import_dump("messages", folder, COUNTER))
    ),
    "nemo": Reader(_seeds_of_nemo_data, lambda folder: _use(import_dump("nemo_rl", folder))),
    "slime_metrics": Reader(_seeds_of_slime_metrics, _read_metrics),
    "nemo_metrics": Reader(_seeds_of_nemo, _read_metrics),
    "exported_metrics": Reader(_seeds_of_exports, _read_metrics),
    "console_metrics": Reader(_seeds_of_consoles, _read_metrics),
    "mlflow_metrics": Reader(_seeds_of_mlflow, _read_metrics),
    "areal": Reader(_seeds_of_areal, lambda folder: _use(import_dump("areal", folder / "rollout"))),
    "nemo_events": Reader(_seeds_of_events, lambda folder: _use(import_dump("nemo_rl", folder))),
    "csv": Reader(
        _seeds_of_csv, lambda folder: _use(import_csv(folder / "run.csv", counter=COUNTER))
    ),
    "jsonl": Reader(
        _seeds_of_jsonl, lambda folder: _use(import_jsonl(folder / "run.jsonl", counter=COUNTER))
    ),
    "config": Reader(lambda: [{"model/config.json": _config()}], _read_config),
    "tokenizer": Reader(_seeds_of_tokenizers, _read_tokenizer, needs="tokenizers", may_print=True),
    "calibration": Reader(_seeds_of_calibration, _read_calibration),
}
# With what is no reader, for a test of the fuzzing itself.
EVERY = {**READERS, "self_test": Reader(lambda: [{"file": b"%d" % i} for i in range(9)], _fails)}
