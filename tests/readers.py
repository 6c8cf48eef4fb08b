"""Readers: everything of simrl that reads what others wrote, with a few valid inputs each, which
`fuzzing.py` mutates. Where tests of an importer build its files, the inputs are built by them.

What each found, and what it alone reads:
- trace: token ids beyond 32 bits; crashes of Arrow on damaged footers, tables that inflate.
- profile: ticks that make a huge grid, a table that says it is a billion rows.
- scenario: half a character in a key, a file that is a quoted number, a speculation whose name is
  a list, deep brackets that crash libyaml.
- files: damaged traces and profiles behind a scenario. Presets found nothing; nothing else damages
  their TOML.
- config: a model larger than any float.
- sweep: a quoted number, and half a character in a key that is drawn from.
- result: a segment at no worker, a result without its varied keys, or taken at its word.
- report: missing keys, points without a number, deep JSON, outcomes taken at their word.
- dump: links to themselves and rewards beyond 32 bits (AReaL), a field whose name is half a
  character (verl). TRL, slime, NeMo-RL and conversations found nothing; each has a parser.
- table: nothing but slow lines; CSV and JSON Lines are what people write themselves.
- metrics: a log without response lengths (slime), numbers of hundreds of digits (TRL), steps beyond
  any number. Consoles, exports and MLflow found nothing; each has a parser.
- tokenizer: panics, counts that fail, ids beyond 32 bits.
- calibration: messages that named no file, a quoted number.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from simrl.analysis.agreement import agree
from simrl.analysis.explanation import diff_results, explain_result
from simrl.errors import InputError
from simrl.files import SEAL
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, read_profile, write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.result.result import Result, read_result
from simrl.scenario.load import Choices, load_scenarios
from simrl.show.comparison import compare_scenarios
from simrl.show.report.page import report_html
from simrl.show.report.sources import find
from simrl.show.tables.agree import print_agreement
from simrl.show.tables.explain import print_difference, print_explanation
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.study.calibration import launched
from simrl.study.executors import Here
from simrl.study.grid import resolved, vary
from simrl.study.logged_lengths import lengths_of, usable_steps
from simrl.study.point import Digests, Point
from simrl.study.sweep import kept, plan, run, table_rows
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.tabular import import_csv, import_jsonl
from simrl.trace.importers.tokens import token_counter
from simrl.trace.importers.verl import trace_from_verl_metrics
from simrl.trace.trace import Trace, TraceMetadata, read_trace, write_trace
from tests.fuzzing import Reader
from tests.helpers import one_second_a_pass, scenario as small_scenario
from tests.mutations import Files
from tests.soaking import a_scenario
from tests.trace import (
    test_importers as importers,
    test_importers_messages as messages,
    test_importers_slime as slime,
    test_importers_turns as turns,
    test_logs as logs,
    test_logs_frameworks as frameworks,
    test_rollout_trace as events,
)

COUNTER = token_counter(chars_per_token=2.0)
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
STEPS = range(1, 7)


def _written(*writes: Callable[[Path], object], under: str = "") -> Files:
    """Return the files that functions lay into a folder, as somebody else would have written them:
    mutations are to reach the reader behind the seal."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for write in writes:
            write(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {
            f"{under}{path.relative_to(folder)}": _unsealed(path.read_bytes()) for path in files
        }


def _unsealed(content: bytes) -> bytes:
    if content.startswith(b"{") and b'"sha256"' in content:
        data = json.loads(content)
        data.pop("sha256", None)
        return json.dumps(data, indent=1).encode()
    return content.replace(SEAL, b"somebody.own")


@contextmanager
def _named(place: Path) -> Iterator[None]:
    """Name the place in a message, as commands do."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def json_lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _csv(header: Sequence[str], *rows: Sequence[object]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue().encode()


# Traces and profiles


def _a_trace(**columns: Sequence[Any]) -> bytes:
    samples = {
        "step": [0, 0, 0, 0, 1, 1, 1, 1],
        "epoch": [0] * 8,
        "prompt_id": [0, 0, 1, 1, 2, 2, 3, 3],
        "sample": [0, 1] * 4,
        "prompt_tokens": [5, 5, 6, 6, 7, 7, 8, 8],
        "response_tokens": [4, 9, 2, 30, 8, 8, 1, 12],
    }
    facts = {"name": "run", "kind": "recorded", "source": "a test", "tokenizer": "none"}
    metadata = TraceMetadata.model_validate({**facts, "cap_tokens": 40})
    trace = Trace.from_columns({**samples, **columns}, metadata)
    return _content(lambda folder: write_trace(trace, folder / "t.parquet"))


def _content(write: Callable[[Path], object]) -> bytes:
    (content,) = _written(write).values()
    assert isinstance(content, bytes)
    return content


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
    ids = [[(7 * i + j * j) % 50 for j in range(n)] for i, n in enumerate(lengths)]
    return _a_trace(reward=[0.0, 1.0] * 4, response_ids=ids)


def _use(trace: Trace) -> None:
    """A trace that was read can be used."""
    end = min(len(trace), 100)
    assert len(trace.samples(0, end)) == len(trace.responses(0, end)) == end > 0
    assert trace.step_slices[-1][2] == len(trace)
    assert trace.observation_tokens().min() >= 0


def a_profile(model: str = "qwen3-0.6b") -> bytes:
    metadata = roofline_profile(model_shape(model), gpu("h100"), 1).metadata
    profile = TableProfile(one_second_a_pass(), metadata)
    return _content(lambda folder: write_profile(profile, folder / "p.parquet"))


def _read_profile(folder: Path) -> None:
    profile = read_profile(folder / "profile.parquet")
    assert profile.decode_s(4, 100.0) >= 0 and profile.prefill_s(64) >= 0
    profile.with_corrections(2.0, 1e-3, 1e-5)


# Scenarios

SIZES = {"steps": 2, "prompts_per_step": 2, "group": 2, "cap_tokens": 60, "mean_tokens": 20}
SYNTHETIC: dict[str, Any] = {**SIZES, "sigma": 0.5}
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


def _soaked(number: int) -> dict[str, Any]:
    """Return a scenario of the soak, which has its engine, judge, drafts, faults or pools."""
    scenario = a_scenario(1, number)
    system = scenario.pop("system")
    return {**scenario, "systems": [system, "split"]}


def as_yaml(data: object) -> bytes:
    return yaml.safe_dump(data, sort_keys=False).encode()


SOAKED = (0, 4, 10, 15, 24, 35, 37)


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


def _with_arguments(scenario: dict[str, Any], **words: Sequence[str]) -> Files:
    return {"scenario.yaml": as_yaml(scenario), "arguments.json": json.dumps(words).encode()}


def _scenarios() -> list[Files]:
    """Scenarios alone, and with words after them."""
    several = ["cluster.gpus=8", "systems=[split,{name: areal, eta: 2}]", "seed=${steps}"]
    choices = {
        "overrides": ["steps=3", "vary=[{seed: 1},{seed: 2}]"],
        "dispatch": ["seer", "round_robin"],
        "pipeline": ["areal", "rhymerl"],
        "speculation": ["none", "{name: histospec, gate: open}"],
    }
    return [
        *(_with_arguments(_soaked(number)) for number in SOAKED),
        _with_arguments({**CHEAP, "name": "${model}"}, overrides=several),
        _with_arguments(CHEAP, **choices),
        _with_arguments(CHEAP, system=["areal"], overrides=["eta=2"]),
    ]


def _files() -> list[Files]:
    """Scenarios that name files, which are mutated with them."""
    files: dict[str, bytes] = {
        "profile.parquet": a_profile(),
        "draft.parquet": a_profile("qwen2.5-0.5b"),
        "model/config.json": config(),
    }
    named = {"model": "model", "workload": {"trace": "trace.parquet"}}
    named |= {"profile": {"path": "profile.parquet"}}
    drafts = {"speculation": {"draft_profile": "draft.parquet"}, "systems": ["verl_draft_model"]}
    history = {"systems": ["rhymerl", "verl_ngram"]}
    presets = (EXAMPLES / "my_presets.toml").read_bytes()
    engine = {"preset": "my.toml#my-engine", "enforce_eager": True}
    return [
        {
            "scenario.yaml": as_yaml({**CHEAP, **named, **drafts}),
            "trace.parquet": _with_turns(),
            **files,
        },
        {
            "scenario.yaml": as_yaml({**CHEAP, **named, **history}),
            "trace.parquet": _with_tokens(),
            **files,
        },
        {"my.toml": presets, "scenario.yaml": as_yaml({**CHEAP, "framework": "my.toml"})},
        {"my.toml": presets, "scenario.yaml": as_yaml({**CHEAP, "engine": engine})},
    ]


def _read_scenario(folder: Path) -> None:
    words = _arguments(folder)
    choices = Choices(*(words.get(key, []) for key in ("pipeline", "dispatch", "speculation")))
    system = next(iter(words.get("system", [])), None)
    scenarios = load_scenarios(
        folder / "scenario.yaml", words.get("overrides", []), system, choices
    )
    assert scenarios
    for scenario in scenarios[:3]:
        scenario.model_dump_json()
        with _named(folder):
            prepare(scenario).inputs()


def config() -> bytes:
    """A config of Qwen3-0.6B."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}
    words = {"vocab_size": 151936, "tie_word_embeddings": True}
    return json.dumps({**sizes, **heads, **words, "_name_or_path": "Qwen/Qwen3-0.6B"}).encode()


# Sweeps and results


def _sweeps() -> list[Files]:
    zipped = ["training.mfu=0.2..0.5", "cluster.gpus=4,8", "cluster.tp=1,2"]
    return [
        _with_arguments(CHEAP, texts=["cluster.gpus=4,8", "seed=1..3"]),
        _with_arguments(CHEAP, texts=["engine.max_num_seqs=8,16", "system.eta=0,1"]),
        _with_arguments(CHEAP, texts=zipped, zips=["cluster.gpus,cluster.tp"]),
    ]


def _read_sweep(folder: Path) -> None:
    words = _arguments(folder)
    with _named(folder):
        varied = vary(folder / "scenario.yaml", words.get("texts", []), words.get("zips", []))
        digests = Digests()
        for settings in islice(varied.combinations(3, 0), 3):
            Point(resolved(varied.file, settings), digests)
        for settings in islice(varied.combinations(None, 0), 5):
            resolved(varied.file, settings)


@cache
def a_plan() -> Any:
    """A sweep of two systems at two seeds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_bytes(as_yaml({**CHEAP, "systems": ["verl_colocated", "split"]}))
        return plan(vary(file, ["seed=1,2"]), None, 0)


@cache
def _a_result(system: str, **parameters: Any) -> Result:
    workload = {"synthetic": {**SIZES, "steps": 3, "cap_tokens": 200, "sigma": 0.8, "prompts": 2}}
    chosen = {"name": system, **parameters}
    return simulate(small_scenario(chosen, workload=workload, warmup_steps=1))


def _results() -> list[Files]:
    results = _a_result("areal", eta=1), _a_result("tlt"), _a_result("seer", chunk_tokens=20)
    return [_written(result.write, under="run/") for result in results]


def _read_result(folder: Path) -> None:
    """Read it as `explain`, `diff` and `compare --measured` do."""
    result, other = read_result(folder / "run"), _a_result("areal", eta=1)
    console = Console(file=io.StringIO(), width=200)
    with _named(folder):
        explanation = explain_result(result)
    json.dumps(explanation.as_json())
    print_explanation(explanation, console)
    print_difference(diff_results(other, result), console)
    for predicted in (result, other):
        with _named(folder):
            agreement = agree(predicted, result)
        json.dumps(agreement.as_json())
        print_agreement(agreement, console)


def _reports() -> list[Files]:
    """A comparison, a sweep, a single run."""

    def compared(folder: Path) -> None:
        (folder / "scenario.yaml").write_bytes(as_yaml(CHEAP))
        compare_scenarios(load_scenarios(folder / "scenario.yaml"), folder / "run", jobs=1)

    def swept(folder: Path) -> None:
        (folder / "run").mkdir()
        named = {"scenario": "scenario.yaml", "values": ["seed=1,2"]}
        run(a_plan(), {}, folder / "run", Here(), named)

    return [_written(compared), _written(swept), _results()[1]]


def _read_report(folder: Path) -> None:
    swept = a_plan()
    missing = {point.hash: {"error": "not simulated"} for point in swept.points}
    table_rows(swept, {**missing, **kept(swept, folder / "run")})
    report_html(find(folder / "run"))


# Dumps: a folder is named like its framework

TAGS = "a<tool_call>user\n<tool_response>\n4\n</tool_response>\nassistant\nb"
ROLES = (
    "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nc\nuser\nd\nassistant\ne"
)
FORMS = (
    "a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    "<|channel|>final<|message|>b",
    "afunctions.f to=assistantcommentary4assistantfinalb",
    "a<|observation|>\n4<|assistant|>\nb<|user|>",
    "a<\uff5ctool\u2581outputs\u2581begin\uff5c>4<\uff5ctool\u2581outputs\u2581end\uff5c>b",
    "a<|im_system|>tool<|im_middle|>## Return of functions.f:0\n4<|im_end|><|im_assistant|>b<|im_middle|>c",
    "a.ipython\n\n4assistant\n\nb<information>c</information>d",
)


def _of_verl() -> list[Files]:
    of = importers.rollout
    plain = json_lines(of(1, "p", "a longer text"), of(1, "p", "é", None), of(1, "q", "x"))
    later = json_lines(of(2, "p", "x" * 50, 1), of(2, "r", "", 0))
    masks = ({"response_mask": [1, 1, 0, 0, 1, 0]}, {"loss_mask": [1, 0, 1]}, {"loss_mask": None})
    masked = json_lines(*(of(3, "p", TAGS, **mask) for mask in masks))
    conversations = json_lines(*(of(4, "p", text) for text in (ROLES, turns.ANSWER, *FORMS)))
    rows = ([0, "p", "abc", 1.0, "q", "defg", 0], [5, "p", "abcd", None, "q", "d", 0.5])
    table = json.dumps(importers.table(*rows, slots=2)).encode()
    return [
        {"verl/1.jsonl": plain, "verl/2.jsonl": later},
        {"verl/3.jsonl": masked},
        {"verl/4.jsonl": conversations},
        {"verl/media/generations_5_aa.table.json": table},
    ]


def _of_conversations() -> list[Files]:
    talk = messages.TALK
    shared = {
        "id": "x",
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    verifiers = {"example_id": 1, "prompt": talk[:2], "completion": talk[2:], "reward": 1.0}
    call = {"message": talk[2]}
    made_of = {"tool_call_id": "c", "model_response": {"choices": [call]}}
    of = [
        messages.event(1, source="user", action="message", args={"content": "de"}),
        messages.event(2, action="run", args={"command": "ls"}, tool_call_metadata=made_of),
        messages.event(3, observation="run", content="one"),
        messages.event(4, kind="ActionEvent", thought=[{"text": "hm"}], tool_call=messages.CALL),
        messages.event(5, kind="MessageEvent", llm_message=talk[4]),
    ]
    whole = {"messages": talk, "step": 1, "tools": [messages.CALL]}
    return [
        {"messages/a.jsonl": json_lines(whole, verifiers)},
        {"messages/a.json": json.dumps([shared, {"history": [of[:2], of[2:]]}], indent=1).encode()},
        {"messages/r/a.traj": json.dumps(messages.swe_agent(0.5)).encode()},
        {f"messages/events/{n}.json": json.dumps(event).encode() for n, event in enumerate(of)},
        {"messages/a.jsonl": json_lines(*of, talk)},
    ]


def _dumps() -> list[Files]:
    answers = {
        "prompt": ["p", "p", "q"],
        "completion": ["a", "b" * 40, ""],
        "reward": [0.0, 1, 0.5],
    }
    parts = [("prompt", 10), ("assistant", 20), ("context", 5), ("assistant", 15)]
    segments = [{"role": role, "len": tokens} for role, tokens in parts]
    of, a_sample = importers.trajectory, slime.sample([1, 2, 3], [4, 5, 6, 7])
    keyed = {**a_sample, "reward": {"a": 1.0}, "metadata": OrderedDict(x=(1, None, True))}
    protocol_4 = pickle.dumps({"rollout_id": 0, "samples": [keyed]}, 4)

    def completed(step: int) -> Callable[[Path], object]:
        return lambda to: importers.completions(to, step, **answers)

    trained = importers.trained([1, 2, 3], [1, 1, 0, 0, 1])
    return [
        *_of_verl(),
        *_of_conversations(),
        _written(*map(completed, (1, 2)), under="trl/"),
        _written(
            lambda to: slime.save(to / "0.pt", 0, a_sample, {**a_sample, "reward": None}),
            lambda to: slime.zipped(to / "1.pt", protocol_4),
            under="slime/",
        ),
        {"nemo_rl/train_data_step3.jsonl": json_lines(trained, {**trained, "rewards": [1]})},
        {"nemo_rl/rollout_trace.jsonl": json_lines(*events.two_groups())},
        {
            "areal/3/7.jsonl": json_lines(of("p", 15), of("p", 20, 2, 3)),
            "areal/10/8.jsonl": json_lines(of("q", 50, segments=segments), of("q", 30, -1, -1)),
        },
    ]


def _read_dump(folder: Path) -> None:
    for framework in ("verl", "trl", "messages", "nemo_rl", "areal"):
        if (folder / framework).exists():
            counter = COUNTER if framework in ("verl", "trl", "messages") else None
            _use(import_dump(framework, folder / framework, counter))
    if (folder / "slime").exists():
        _use(import_dump("slime", folder / "slime", reward_key="a"))


def _tables() -> list[Files]:
    header = (
        "step,prompt_id,sample,epoch,prompt_tokens,response_tokens,reward,environment_s,turn_tokens"
    )
    rows = '0,a,0,0,5,10,0.5,1.5,"[4, 6]"\n0,a,1,0,5,12,,,\n1,7,0,0,6,1,1,0,[1]\n'
    texts = 'step,prompt,response\n0,"what, now?","line\nbreak"\n0,p,\n1,é,xyz\n'
    row = {"step": 0, "prompt_id": 3, "prompt_tokens": 5, "response_tokens": 3, "reward": 0.5}
    several = {"turn_tokens": [1, 2], "turn_environment_s": [0.5], "turn_observation_tokens": [7]}
    text = {"step": 1, "prompt": "p", "response": "some text"}
    lens = {"group_id": 1, "prompt_len": 5, "output_lens": [2, 3], "obs_lens": [4, 1]}
    return [
        {"run.csv": f"{header}\n{rows}".encode()},
        {"run.csv": texts.encode()},
        {"run.jsonl": json_lines({**row, "response_ids": [1, 2, 3]}, {**row, **several})},
        {"run.jsonl": json_lines(text, {**text, "response": "\u2028é"}, {**text, "step": 0})},
        {"run.jsonl": json.dumps([{**lens, "tool_times": [0.5]}] * 2, indent=1).encode()},
    ]


def _read_table(folder: Path) -> None:
    if (folder / "run.csv").exists():
        _use(import_csv(folder / "run.csv", counter=COUNTER))
    else:
        _use(import_jsonl(folder / "run.jsonl", counter=COUNTER))


# Metrics


def verl_log() -> bytes:
    line = logs.console(perf__total_num_tokens="np.float64(6080.0)")
    return "".join(f"(TaskRunner pid=1) {line.format(step=n)}" for n in STEPS).encode()


def trl_lines() -> bytes:
    """Lines of TRL, with times apart from the rest of a step."""
    timed = {logs.TIMED + "vLLM.generate": 10.0}
    rows = ((timed, {"train/global_step": n, **logs.TRL}) for n in STEPS)
    return json_lines(*(row for pair in rows for row in pair))


def _consoles() -> Iterator[str]:
    """Consoles of each form, as people have them: wrapped, with prefixes, in records of Docker."""
    whole = verl_log().decode()
    yield from (whole, logs.wrapped(whole, 80))
    yield whole.replace("perf/total_num_tokens:np.float64(6080.0)", "global_seqlen/mean:760.0")
    yield "".join(json.dumps({"log": line + "\n"}) + "\n" for line in whole.splitlines())
    cells = "│".join(f" {key} │ {value:.4e} " for key, value in frameworks.AREAL.items())
    forms = (
        f"(RolloutManager pid=1) perf {{n}}: {{{logs.SLIME}}}\nrollout {{n}}: {{{{'x': nan}}}}\n",
        f"INFO trainer.py:1 - Global step {{n}}: {{{logs.OPENRLHF}}}\n",
        "Step {n}: \n{{'generate/avg_num_tokens': '300.0',\n 'timing/generate': '12.5'}}\n",
        "02:33 SUCCESS Step {n} | Time: 1m 3s | Seq. Length: 380.0 tokens/sample | Max. Off-Policy Level: 1\n",
        f"Train step {{n}}/9 done.\n│{cells}│\n",
        "Step: 2%|█ | {n}/40 [01:12<1:40, 257.36s/it, step_time=257, response_length=300, rollout_time=12.5]\r",
        "╭── Metrics ──╮\n│ other training_step: {n} | episode: 512 │\n│ time total: 20.0 | training: 4.0 │\n"
        "│ val sequence_lengths: 300.0 │\n",
        logs.NEMO_CONSOLE,
    )
    yield from ("".join(form.format(n=n) for n in STEPS) for form in forms)


def _metrics() -> list[Files]:
    """Consoles, and exports of W&B, TensorBoard and MLflow."""
    steps = {tag: "".join(f"170 {value} {n}\n" for n in STEPS) for tag, value in logs.VERL.items()}
    scalars: Files = {}
    charts: Files = {}
    for i, (tag, value) in enumerate(logs.VERL.items()):
        name = f"grpo - {tag}"
        charts[f"{i}.csv"] = _csv(["Step", name, f"{name}__MIN"], *([n, value, 0] for n in STEPS))
        rows = ([1.7e9, n, value] for n in STEPS)
        place = f"run-.-tag-{tag.replace('/', '_')}.csv"
        scalars[place] = _csv(["Wall time", "Step", "Value"], *rows)
    history = [
        {"step": n, **{k.removeprefix("train/"): v for k, v in logs.TRL.items()}} for n in STEPS
    ]
    dumped = {tag: {str(n): value for n in STEPS} for tag, value in logs.NEMO.items()}
    return [
        *({"run.log": text.encode()} for text in _consoles()),
        {"run.jsonl": json_lines(*({"step": n, "data": logs.VERL} for n in STEPS))},
        {"run.jsonl": json_lines(*({"_step": n, **logs.NEMO, "note": "NaN"} for n in STEPS))},
        {"run.jsonl": trl_lines()},
        {"run.csv": _csv(["_step", *logs.TRL], *([n, *logs.TRL.values()] for n in STEPS))},
        {"run.csv": _csv(["", "_step", *logs.VERL], *([n, n, *logs.VERL.values()] for n in STEPS))},
        {"trainer_state.json": json.dumps({"log_history": history}).encode()},
        {"metrics.json": json.dumps(dumped).encode()},
        charts,
        scalars,
        {f"mlruns/0/abc/metrics/{tag}": text.encode() for tag, text in steps.items()},
    ]


def _log(folder: Path) -> Path:
    """The log among the files, whatever became of its name."""
    names = ("run.log", "run.jsonl", "trainer_state.json", "run.csv", "metrics.json")
    return next((folder / name for name in names if (folder / name).exists()), folder)


def _read_metrics(folder: Path) -> None:
    metrics = read_metrics(_log(folder), samples=16, prompt_tokens=80.0)
    assert len(metrics) and "step" in metrics
    _use(trace_from_verl_metrics(metrics, 4, 0, cap_tokens=900))


def calibrations() -> list[Files]:
    """A log with a launch scenario, and one with settings."""
    launch = {
        **CHEAP,
        "cluster": {"gpu": "a100", "gpus": 4, "tp": 2},
        "workload": {"trace": "none"},
        "systems": [{"name": "verl_colocated", "minibatches": 2}],
    }
    settings = ["model=qwen3-0.6b", "cluster.gpu=a100", "cluster.gpus=4", "cluster.tp=1"]
    arguments = json.dumps({"settings": settings}).encode()
    return [
        {"run.log": verl_log(), "launch.yaml": as_yaml(launch), "arguments.json": b"{}"},
        {"run.log": verl_log(), "arguments.json": arguments},
    ]


def _read_calibration(folder: Path) -> None:
    """Read what calibrate and whatif read before they fit."""
    usable = usable_steps(_metrics_of(folder), None, True, 4)
    lengths = folder.parent / "lengths.parquet"
    write_trace(lengths_of(usable, 4, 900, None), lengths)
    launch = folder / "launch.yaml"
    settings = _arguments(folder).get("settings", [])
    log, given = _log(folder), launch if launch.exists() else None
    scenario = launched(log, given, settings, lengths, len(usable))
    with _named(Path(str(scenario.file))):
        prepare(scenario)


def _metrics_of(folder: Path) -> Any:
    return read_metrics(_log(folder), samples=16, prompt_tokens=80.0)


# Tokenizers


def tokenizers() -> list[Files]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 7, "b": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    return [{"tokenizer.json": made.to_str().encode()} for made in (words, bpe)]


def _read_tokenizer(folder: Path) -> None:
    assert len(token_counter(folder).count(["a b", "", "é" * 10])) == 3


def _fails(folder: Path) -> None:
    """Fail in every way that the fuzzing has to see, for a test of it."""
    match int((folder / "file").read_bytes()):
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
        lambda: [{"trace.parquet": of()} for of in (_a_trace, _with_turns, _with_tokens)],
        lambda folder: _use(read_trace(folder / "trace.parquet")),
    ),
    "profile": Reader(lambda: [{"profile.parquet": a_profile()}], _read_profile),
    "scenario": Reader(_scenarios, _read_scenario),
    "files": Reader(_files, _read_scenario),
    "config": Reader(
        lambda: [{"model/config.json": config()}], lambda folder: model_shape(folder / "model")
    ),
    "sweep": Reader(_sweeps, _read_sweep),
    "result": Reader(_results, _read_result),
    "report": Reader(_reports, _read_report),
    "dump": Reader(_dumps, _read_dump),
    "table": Reader(_tables, _read_table),
    "metrics": Reader(_metrics, _read_metrics),
    "calibration": Reader(calibrations, _read_calibration),
    "tokenizer": Reader(tokenizers, _read_tokenizer, needs="tokenizers", may_print=True),
}
# With what is no reader, for a test of the fuzzing itself.
EVERY = {**READERS, "self_test": Reader(lambda: [{"file": b"%d" % i} for i in range(9)], _fails)}
