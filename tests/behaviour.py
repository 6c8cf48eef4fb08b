"""Records what simrl does (tables, output, help, errors) and says later what moved, for changes that are to move nothing.

    python tests/behaviour.py record            writes results/behaviour.json
    python tests/behaviour.py check             prints each key that moved with a short diff; exit code 1 if any did
        --only tables|json|screen|help|errors   one part
        --match TEXT                            only keys that contain TEXT
        --texts FOLDER                          also writes every text in full, to compare two folders with diff -r
        --jobs 2                                processes for the tables

Invariant: nothing here says in which module anything is. Used are `import simrl`, the entry points that pyproject.toml
names, and files of the repository. The bytes of floats depend on the machine's libraries: record and check on one machine.
"""

import argparse
import difflib
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.update(TERM="dumb", NO_COLOR="1", MPLBACKEND="Agg", COLUMNS="120")
sys.path[:] = [
    path
    for path in sys.path
    if path == str(ROOT) or not (Path(path) / "simrl").is_dir() or "site-packages" in path
]

import yaml  # noqa: E402

import simrl  # noqa: E402 — of this checkout, wherever another is installed

RECORD = ROOT / "results" / "behaviour.json"
PARTS = ("tables", "json", "screen", "help", "errors")
MOST_LINES, HEAD_LINES, DIFF_LINES = 60, 24, 6

# ---------------------------------------------------------------------------------------------------------------- tables

BASE: dict[str, Any] = yaml.safe_load("""
name: behaviour
seed: 3
steps: 4
warmup_steps: 1
model: qwen3-8b
cluster: {gpu: h100, gpus: 16, tp: 1, cost_per_gpu_hour: 2.5}
workload: {synthetic: {steps: 4, prompts_per_step: 8, group: 4,
  cap_tokens: 2000, mean_tokens: 400, sigma: 1.0, prompt_tokens: 100}}
profile: {path: "profiles/${model}_${cluster.gpu}_tp${cluster.tp}.parquet", between_passes_s: 0.001}
""")
RECORDED = "traces/countdown-1/sync/trace.parquet"
# name: what is changed in BASE (or in a file), by dotted key; "system" has parameters for the systems that take them
SCENARIOS: dict[str, dict[str, Any]] = yaml.safe_load(
    """
long_tail: {}
roofline_tp2: {model: qwen3-14b, cluster.tp: 2, cluster.gpus: 32, profile: {roofline: {}}, seed: 5}
tp4_async_scheduling: {cluster.tp: 4, engine: {async_scheduling: true}, system: {minibatches: 2}}
epochs: {<<: &epochs {workload.synthetic.prompts: 8, workload.synthetic.steps: 5, steps: 5,
  workload.synthetic.early_stop_share: 0.1}, system: {adapt_split_every: 2}}
recorded: {<<: &recorded {workload: {trace: RECORDED}, steps: 5}, system: {rollout_share: 0.5}}
recorded_histospec: {<<: *recorded, system: {speculation: histospec}}
recorded_histospec_code: {<<: *recorded, system: {speculation: {name: histospec_code, epochs_back: 2}}}
recorded_siblings: {<<: *recorded, system: {speculation: siblings}}
recorded_das: {<<: *recorded, system: {speculation: das}}
recorded_spec_rl: {<<: *recorded, system: {speculation: spec_rl}}
recorded_srt: {workload: {trace: traces/countdown-1/areal/trace.parquet}, system: {speculation: srt}}
runs_ngram: {<<: *epochs, system: {speculation: ngram}, speculation: {acceptance_factor: 0.9, runs: {ngram: {classes: [
  {share: 1, share_of_long: 1, wrong_drafts: 0.5, gaps: [{up_to_tokens: 8, share: 1, mean_tokens: 3}],
  hits: [{up_to_tokens: 8, share: 0.6, mean_tokens: 3}, {up_to_tokens: 64, share: 0.4, mean_tokens: 20}]}]}}}}
draft_model: {speculation: {verification: exact_match}, system: {speculation: draft_model}}
specactor: {engine: {max_num_seqs: 16}, system: {speculation: specactor}}
tlt: {model: qwen2.5-7b, system: {speculation: tlt}}
faults: {faults: [{kind: slow, worker: 0, at_s: 2, factor: 3, until_s: 12}, {kind: lost, worker: 1, at_s: 3, back_s: 15},
  {kind: weight_sync_delayed, worker: 2, delay_s: 4}]}
faults_drawn: {faults: [{kind: lost, rate_per_hour: 60, duration_s: 8}], steps: 6, system: {on_loss: wait}}
phases: {training: {checkpoint_every: 2, checkpoint_s: 3, evaluate_every: 2, evaluate_s: 4, extra_log_probs: 1, ppo_epochs: 2,
  microbatching: fixed, sequence_parallel: 2, recompute: true}, system: {minibatches: 4, log_probs: 2}}
filtered: {workload.synthetic.reward_prompt_share: 0.9, system: {filter_groups: true}}
dynamic_sampling: {workload.synthetic.reward_prompt_share: 0.9, system: {dynamic_sampling: 2}}
turns: {workload.synthetic.turns: 3, workload.synthetic.environment_s: 2, workload.synthetic.environment_sigma: 1,
  workload.synthetic.observation_tokens: 50}
little_cache: {engine: {max_num_seqs: 8, max_num_batched_tokens: 512, kv_cache_tokens: 6000, block_size: 32},
  workload.synthetic.prompt_tokens: 800, workload.synthetic.prompt_sigma: 0.5}
dispatch_seer: {<<: *recorded, system: {dispatch: seer}}
dispatch_streamrl: {<<: *epochs, system: {dispatch: streamrl}}
dispatch_even_split: {seed: 8, system: {dispatch: even_split}}
other_parameters: {<<: *epochs, system: {eta: 1, interruptible: false, max_concurrent: 8, stream: false, migration: false,
  partial_rollout: false, repack: false, context_aware: false, two_tier: false, round_samples: 8, over_sampling: 1.5,
  decoupled: false, adaptive: false, draft_tokens: 2}}
lora_corrected: {cluster.gpu: b200, training: {lora: true, kernels: fused, load_s: 0.5},
  profile: {roofline: {memory_efficiency: 0.6}, forward_correction: 1.2, sequence_overhead_s: 1.0e-5}}
recorded_run: {file: traces/countdown-1/areal/scenario.yaml, steps: 6}
math_14b: {file: experiments/math_14b.yaml, steps: 3, warmup_steps: 1, vary: null, cluster.gpus: 32,
  workload.synthetic.prompts_per_step: 6}
""".replace("RECORDED", RECORDED)
)


def changed(scenario: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a scenario with values set by dotted key."""
    scenario = json.loads(json.dumps(scenario))
    for key, value in changes.items():
        *sections, last = key.split(".")
        inside = scenario
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return scenario


def simulated(item: tuple[str, str, list[str]]) -> tuple[str, str]:
    """Simulates one system of one scenario: a line of hashes a table, or of what refused it."""
    name, system, takes = item
    changes = dict(SCENARIOS[name])
    file, parameters = changes.pop("file", None), changes.pop("system", {})
    chosen = {"name": system, **{key: value for key, value in parameters.items() if key in takes}}
    try:
        if file is None:
            result = simrl.run(changed(BASE, changes), chosen).result()
        else:
            result = simrl.run(file, chosen, overrides=changes).result()
    except simrl.InputError as error:
        return f"{name} / {system}", f"refused: {plain(str(error))}"
    tables = {key: getattr(result, key) for key in ("spans", "steps", "samples", "segments")}
    hashes = [
        f"{key} {table.num_rows} {digest(repr([table.schema.names, table.schema.types, table.to_pydict()]))}"
        for key, table in tables.items()
    ]
    said = {key: value for key, value in result.metadata.items() if key != "simrl_version"}
    hashes.append(f"metadata {digest(plain(json.dumps(said, sort_keys=True)))}")
    return f"{name} / {system}", ", ".join([f"end {result.metadata['end_s']!r}", *hashes])


def tables(match: str, jobs: int) -> dict[str, str]:
    """Simulates every system of every scenario."""
    os.chdir(ROOT)
    systems = json.loads(called(["systems", "--json"])[1])
    items = [
        (name, system["name"], list(system["parameters"]))
        for name in SCENARIOS
        for system in systems
    ]
    items = [item for item in items if match in f"{item[0]} / {item[1]}"]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return dict(pool.imap_unordered(simulated, items, chunksize=4))


# ---------------------------------------------------------------------------------------------------------- command line

TINY = """\
name: tiny
seed: 3
steps: 3
warmup_steps: 1
model: qwen3-0.6b
cluster: {gpu: h100, gpus: 4, tp: 1}
workload:
  synthetic: {steps: 3, prompts_per_step: 4, group: 2, cap_tokens: 200, mean_tokens: 60, sigma: 0.8, prompt_tokens: 20}
profile: {roofline: {}}
systems: [verl_colocated, {name: areal, eta: 2}]
"""
STARTED = "model=qwen3-0.6b cluster.gpu=h100 cluster.gpus=2 cluster.tp=1 'profile={roofline: {}}' --group 4 --cap-tokens 2000"
ALLOCATE = "allocate --trace math.parquet --profile profiles/qwen3-14b_h100_tp2.parquet"
PARTS_OF = "traces/countdown-1/sync/parts/000"

# Commands that leave what the others read, and are recorded themselves. {out} is a new path.
SETUP = [
    "compare tiny.yaml --jobs 1 -o runs --json",
    "sweep tiny.yaml cluster.gpus=4,6 seed=0..1 --jobs 1 -o points --json",
    "trace synth --preset rhymerl-math steps=4 prompts_per_step=8 prompts=16 group=4 -o math.parquet --json",
]
# With --json and without; `text` commands have no --json.
COMMANDS = [
    "compare experiments/quickstart.yaml steps=4 warmup_steps=1 cluster.gpus=16 --jobs 1 -o {out}",
    "compare tiny.yaml --pipeline areal --dispatch seer --speculation none --speculation siblings --jobs 1 -o {out}",
    f"compare traces/countdown-1/sync/scenario.yaml --measured {PARTS_OF} --jobs 1 -o {{out}}",
    "run experiments/quickstart.yaml --system areal eta=8 steps=4 warmup_steps=1 cluster.gpus=16 -o {out}",
    "run tiny.yaml --pipeline verl_colocated --dispatch even_split --speculation draft_model -o {out}",
    "sweep tiny.yaml systems=areal,split system.eta=0..1 cluster.gpus=4,6 --jobs 1 -o {out}",
    "sweep tiny.yaml cluster.gpus=4,6 cluster.tp=1,2 --zip cluster.gpus,cluster.tp --jobs 1 -o {out}",
    "sweep tiny.yaml training.mfu=0.2..0.5 seed=0..99 --sample 3 --jobs 1 -o {out}",
    "sweep tiny.yaml cluster.gpus=4,6 seed=0..1 --jobs 1 -o points",
    "optimize tiny.yaml systems=one_step_off,areal system.eta=1,2 --trials 6 --best 2 --no-robust --jobs 1 -o {out}",
    "optimize tiny.yaml systems=areal,split --trials 4 --best 1 --updates 50 --budget 5000 cluster.cost_per_gpu_hour=2"
    " --jobs 1 -o {out}",
    "explain runs/verl-colocated",
    "explain runs/areal-eta-2 --step 1",
    f"explain {PARTS_OF}",
    "diff runs/verl-colocated runs/areal-eta-2",
    f"diff {PARTS_OF} traces/countdown-1/areal/parts/000",
    f"calibrate run.log --window 1-6 {STARTED} -o {{out}}",
    f"whatif run.log --window 1-6 {STARTED} --system one_step_off --jobs 1 -o {{out}}",
    "acceptance traces/countdown-1/sync/trace.parquet -o {out}.png --profile profiles/qwen3-8b_h100_tp1.parquet",
    "acceptance traces/countdown-1/sync/trace.parquet -o {out}.png --drafter siblings --window 8 --model qwen3-8b --gpu h100",
    "acceptance traces/countdown-varied/dapo-1e-4/trace.parquet -o {out}.png --drafter ngram",
    f"{ALLOCATE} --workers 16 --groups 4 -o {{out}}.png",
    f"{ALLOCATE} --workers 8 --groups 2 --alternation pairing -o {{out}}.png",
    "trace import csv docs/examples/own_run.csv -o {out}.parquet --column step=iteration --column prompt_id=question"
    " --column prompt_tokens=in_len --column response_tokens=out_len",
    "trace import jsonl rows.jsonl -o {out}.parquet --name rows --licence MIT",
    "trace import verl verl -o {out}.parquet --chars-per-token 3.2",
    "trace import verl run.log --metrics --group 4 --cap-tokens 2000 -o {out}.parquet",
    "trace import areal rollout -o {out}.parquet",
    "trace import trl completions -o {out}.parquet --chars-per-token 4",
    "trace show math.parquet --plot {out}.png",
    "trace show traces/countdown-1/areal/trace.parquet --plot {out}.png",
    "trace synth steps=2 prompts_per_step=4 group=2 cap_tokens=500 mean_tokens=100 sigma=0.8 turns=2 -o {out}.parquet",
    "profile show profiles/qwen3-14b_h100_tp2.parquet",
    "profile show traces/countdown-costs/engine-06c37233-0-beside.parquet",
    "profile derive qwen3-14b --gpu a100 --tp 2 --source roofline memory_efficiency=0.7 -o {out}.parquet",
    "systems",
    "speculation",
]
TEXT = [
    "--version",
    "report runs -o {out}.html",
    "report points -o {out}.html",
    f"report {PARTS_OF} -o {{out}}.html",
]


def write_inputs() -> None:
    """Writes the small inputs of the commands into the current folder, beside links to the repository's."""
    for name in ("experiments", "traces", "profiles", "docs"):
        Path(name).symlink_to(ROOT / name)
    Path("tiny.yaml").write_text(TINY)
    lines = []
    for step in range(1, 11):
        mean, longest = 120 + 40 * (step * 5 % 7), 700 + 220 * (step * 3 % 5)
        logged = {
            "response_length/mean": mean,
            "response_length/max": longest,
            "response_length/min": 20,
        }
        logged |= {"response_length/clip_ratio": 0, "perf/total_num_tokens": 32 * (mean + 50)}
        logged |= {f"prompt_length/{key}": 50 for key in ("mean", "max", "min")}
        logged |= {"timing_s/gen": 1 + longest * 0.004, "timing_s/update_actor": 0.8 + mean * 0.001}
        logged |= {
            "timing_s/old_log_prob": 0.4 + mean * 0.0003,
            "timing_s/step": 4 + longest * 0.004 + mean * 0.0013,
        }
        lines.append(
            f"step:{step} - " + " - ".join(f"{key}:{float(value)}" for key, value in logged.items())
        )
    Path("run.log").write_text("\n".join(["a line of something else", *lines]) + "\n")
    row = {"step": 0, "prompt_id": 0, "prompt_tokens": 9, "response_tokens": 5}
    write_rows(
        "rows.jsonl", *({**row, "prompt_id": i % 2, "response_tokens": 5 + i} for i in range(4))
    )
    verl = {"step": 1, "input": "p", "gts": ""}
    write_rows(
        "verl/1.jsonl",
        *({**verl, "output": "x" * length, "score": length % 2} for length in (4, 9)),
    )
    areal = {
        "task_id": 0,
        "seqlen": 9,
        "prompt_len": 4,
        "head_version": 1,
        "tail_version": 1,
        "reward": 1.0,
        "prompt": "p",
    }
    write_rows(
        "rollout/1/0.jsonl", *({**areal, "sample_idx": i, "completion": "xy"[i]} for i in (0, 1))
    )
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path("completions").mkdir()
    columns = {
        "step": [1, 1],
        "prompt": ["p", "p"],
        "completion": ["xxxx", "yyyyyyyy"],
        "right": [0.0, 1.0],
    }
    pq.write_table(
        pa.table({**columns, "advantage": [-1.0, 1.0]}), "completions/completions_00001.parquet"
    )
    trace = pq.read_table(ROOT / RECORDED)
    pq.write_table(trace.drop_columns(["response_tokens"]), "no_column.parquet")
    pq.write_table(trace.replace_schema_metadata({}), "no_metadata.parquet")
    whole = (ROOT / RECORDED).read_bytes()
    Path("cut.parquet").write_bytes(whole[: len(whole) // 2])
    for folder in ("empty_folder", "config"):
        Path(folder).mkdir()
    texts = {
        "empty.parquet": "",
        "text.parquet": "no Parquet\n",
        "bad.yaml": "name: [tiny\nsteps: 3\n",
    }
    texts |= {"list.yaml": "- a\n- b\n", "empty.yaml": "", "twice.yaml": TINY + "seed: 4\n"}
    texts |= {
        "unknown_key.yaml": TINY + "stpes: 4\n",
        "no_model.yaml": TINY.replace("model: qwen3-0.6b\n", ""),
    }
    texts |= {
        "not.jsonl": "{no json\n",
        "config/config.json": '{"architectures": ["GPT2LMHeadModel"]}',
    }
    texts |= {"no_numbers.csv": "step,prompt_id,prompt_tokens,response_tokens\n0,0,9,many\n"}
    for name, text in texts.items():
        Path(name).write_text(text)
    write_rows("broken.jsonl", {"step": 0})


def write_rows(file: str, *rows: object) -> None:
    """Writes JSON Lines, and the folder that they are in."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def install(folder: Path) -> None:
    """Puts the entry points of this checkout before those of what is installed, which may be another checkout."""
    told = folder / "simrl-0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: simrl\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    lines = [
        [f"[{group}]", *(f"{name} = {place}" for name, place in names.items())]
        for group, names in groups.items()
    ]
    (told / "entry_points.txt").write_text(
        "\n".join(line for group in lines for line in group) + "\n"
    )
    sys.path.insert(0, str(folder))


def called(arguments: list[str], columns: int = 120) -> tuple[object, str, str]:
    """Runs the console script in this process: exit code, stdout, stderr."""
    (script,) = entry_points(group="console_scripts", name="simrl")
    os.environ["COLUMNS"] = str(columns)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    kept, shown = (sys.argv, sys.stdout, sys.stderr), warnings.showwarning
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    sys.argv, sys.stdout, sys.stderr = ["simrl", *arguments], out, err
    code: object = 0
    try:
        script.load()()
    except SystemExit as ending:
        code = ending.code
    except Exception as error:  # a traceback for the user, which is behaviour too
        code = f"{type(error).__name__}: {error}"
    finally:
        sys.argv, sys.stdout, sys.stderr = kept
        warnings.showwarning = shown
        for number, handler in before.items():
            signal.signal(number, handler)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return code, *texts


def plain(text: str) -> str:
    """Takes out of a text what differs from run to run and from machine to machine: folders, seconds, processors."""
    text = text.replace(str(ROOT), "ROOT").replace(str(Path.cwd()), "TMP")
    text = re.sub(r"\bsimrl-behaviour-\w+", "TMP", text)
    text = re.sub(r"\bout-\d+", "OUT", text)
    text = re.sub(
        r'("hash"|"winner"): "[0-9a-f]{64}"', r'\1: "HASH"', text
    )  # of a point: it covers the code
    text = re.sub(r"simulated now in \d+ s", "simulated now in N s", text)
    text = re.sub(r"(--jobs .*\[default: )\d+", r"\1N", text)
    return re.sub(r"─{5,}", "────", re.sub(r" +│$", " │", text, flags=re.M))


def command(line: str, columns: int = 120) -> str:
    """Runs a command line, in which {out} is a new path: its exit code if that is not 0, stdout and stderr."""
    command.runs += 1
    words = shlex.split(line.replace("{out}", f"out-{command.runs}"))
    code, out, err = called(words, columns)
    told = f"exit code {code}\n" if code != 0 else ""
    return plain(told + out + (f"stderr: {err}" if err else ""))


command.runs = 0


def json_texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields every command that has --json."""
    names = {
        kind: [each["name"] for each in json.loads(called([kind, "--json"])[1])]
        for kind in ("systems", "speculation")
    }
    shows = [f"{kind} show {name}" for kind, found in names.items() for name in found]
    for line in [*COMMANDS, *shows]:
        yield line, lambda line=line: command(f"{line} --json")


def screen_texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the same commands as people see them, and those without --json."""
    shows = [
        "systems show areal",
        "systems show rhymerl",
        "speculation show histospec",
        "speculation show tlt",
    ]
    for line in [*COMMANDS, *TEXT, *shows]:
        yield line, lambda line=line: command(line)


def help_texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields --help of every command, found in the help of the one above it."""
    waiting = [""]
    while waiting:
        line = waiting.pop(0)
        text = command(f"{line} --help", 100)
        _, _, below = text.partition("─ Commands ─")
        waiting += [
            f"{line} {name}".strip() for name in re.findall(r"^│ ([a-z]\w*) ", below, flags=re.M)
        ]
        yield line or "simrl", lambda text=text: text


# ---------------------------------------------------------------------------------------------------------------- errors

# A command, and ends of it, each a command line of its own.
ERRORS = """
simulate
compar tiny.yaml
compare | nothing.yaml | empty_folder | bad.yaml | list.yaml | empty.yaml | twice.yaml | unknown_key.yaml | no_model.yaml
compare | text.parquet
compare tiny.yaml | --jobs 0 | --jbos 1 | cluster.gpus | cluster.gpsu=4 | clutser.gpus=4 | =4 | seed=1 seed=2 | systems=[]
compare tiny.yaml | systems=[aerl] | systems=[areal,areal] | 'systems=[{name: areal, etta: 2}]'
compare tiny.yaml | 'systems=[{name: areal, eta: -1}]' | 'systems=[{name: areal, eta: two}]' | 'systems=[{eta: 2}]'
compare tiny.yaml | 'systems=[{name: split, rollout_share: 1.5}]' | 'systems=[{name: split, rollout_share: 0.01}]'
compare tiny.yaml | 'systems=[{name: areal, speculation: histspec}]'
compare tiny.yaml | 'systems=[{name: areal, speculation: {name: ngram, wndow: 2}}]'
compare tiny.yaml | 'systems=[{name: areal, dispatch: sear}]' | model=qwen3-9b | model=config | model=empty_folder
compare tiny.yaml | cluster.gpu=h101 | cluster.gpus=5 cluster.tp=2 | cluster.gpus=1 | cluster.tp=3 | cluster.tp=8
compare tiny.yaml | model=llama-3.3-70b | engine.kv_cache_tokens=100 | engine.gpu_memory_utilization=0.05 | warmup_steps=3
compare tiny.yaml | workload.trace=math.parquet | 'workload={trace: nothing.parquet, synthetic: null}'
compare tiny.yaml | 'workload={trace: cut.parquet, synthetic: null}' | 'workload={trace: empty.parquet, synthetic: null}'
compare tiny.yaml | 'workload={trace: text.parquet, synthetic: null}' | 'workload={trace: no_column.parquet, synthetic: null}'
compare tiny.yaml | 'workload={trace: no_metadata.parquet, synthetic: null}'
compare tiny.yaml | 'profile={path: nothing.parquet, roofline: null}' | 'profile={path: math.parquet, roofline: null}'
compare tiny.yaml | 'profile={path: profiles/qwen3-8b_h100_tp1.parquet, roofline: null}'
compare tiny.yaml | 'profile={path: "${modle}.parquet", roofline: null}'
compare tiny.yaml | 'profile={path: profiles/qwen3-8b_h100_tp1.parquet}' | 'faults=[{kind: lots}]'
compare tiny.yaml | 'faults=[{kind: lost, worker: 99}]' | 'faults=[{kind: slow, worker: 0}]' | 'vary=[{seed: 1}, 2]'
compare tiny.yaml | 'vary=[{sed: 1}]' | --pipeline nothing | --pipeline areal --dispatch nothing
compare tiny.yaml | --pipeline areal --speculation nothing | --dispatch seer --pipeline streamrl | --measured nothing
compare tiny.yaml | --measured empty_folder | --measured tiny.yaml | --measured runs | -o tiny.yaml | -o empty.parquet/results
run tiny.yaml | --system nothing | --system areal etta=2 | --system areal --pipeline areal | --system areal --dispatch nothing
sweep tiny.yaml | cluster.gpus=4.. | cluster.gpus=8..4 | cluster.gpus=4,,8 | training.mfu=0.1..0.5
sweep tiny.yaml | cluster.gpus=4,8 --zip cluster.gpus | cluster.gpus=4,8 seed=1,2,3 --zip cluster.gpus,seed
sweep tiny.yaml | system.nothing=1,2 | seed=0..9 --sample 0
optimize tiny.yaml | --trials 0 | --deadline soon --updates 10 | --deadline 3h | --budget 10 | --max-off-policyness -1
optimize tiny.yaml | systems=nothing
explain | nothing | empty_folder | runs | tiny.yaml | runs/verl-colocated --step 9 | runs/verl-colocated --step two
diff | runs/verl-colocated nothing | runs/verl-colocated
report | nothing | empty_folder
calibrate | nothing.log | run.log | tiny.yaml model=qwen3-0.6b
calibrate run.log | --window 20 | --window 1-2 model=qwen3-0.6b cluster.gpu=h100 cluster.gpus=2 cluster.tp=1 | --format nemo
whatif run.log | --system magic | --system '{eta: 4}'
acceptance | math.parquet | nothing.parquet
acceptance traces/countdown-1/sync/trace.parquet | --drafter none | --window wide | --model qwen3-8b
allocate --trace math.parquet | --profile math.parquet --workers 4 | --profile profiles/qwen3-14b_h100_tp2.parquet --workers 1
allocate --trace math.parquet | --profile profiles/qwen3-14b_h100_tp2.parquet --workers 4 --alternation none
trace show | cut.parquet | no_column.parquet | no_metadata.parquet | profiles/qwen3-14b_h100_tp2.parquet
trace synth | -o {out}.parquet | -o {out}.parquet --preset none | -o {out}.parquet --preset rhymerl-math sigma=9
trace synth | --preset rhymerl-math
trace import | nemo rows.jsonl | csv nothing.csv -o {out}.parquet | csv docs/examples/own_run.csv -o {out}.parquet
trace import | csv docs/examples/own_run.csv -o {out}.parquet --column step | csv no_numbers.csv -o {out}.parquet
trace import | jsonl broken.jsonl -o {out}.parquet | jsonl not.jsonl -o {out}.parquet | verl empty_folder -o {out}.parquet
trace import | verl verl -o {out}.parquet | verl rows.jsonl -o {out}.parquet --chars-per-token 3
trace import | verl tiny.yaml --metrics --group 4 -o {out}.parquet | areal empty_folder -o {out}.parquet
trace import | areal rows.jsonl -o {out}.parquet | trl empty_folder -o {out}.parquet
trace import | trl cut.parquet -o {out}.parquet --chars-per-token 3 | slime nothing -o {out}.parquet
profile show | math.parquet | nothing.parquet
profile derive | qwen3-14b --gpu h100 --source magic -o {out}.parquet
profile derive | qwen3-15b --gpu h100 --source roofline -o {out}.parquet
profile derive | qwen3-14b --gpu h101 --source roofline -o {out}.parquet
profile derive qwen3-14b --gpu h100 --source roofline | memory=2 -o {out}.parquet | memory_efficiency=2 -o {out}.parquet
systems show | nothing | aerl
speculation show | nothing
"""
API: dict[str, Callable[[], object]] = {
    "run(trace) without a model": lambda: simrl.run(RECORDED, "areal", gpu="h100", gpus=8),
    "run(trace) without gpus": lambda: simrl.run(RECORDED, "areal", model="qwen3-8b", gpu="h100"),
    "run(trace) without a system": lambda: simrl.run(
        RECORDED, model="qwen3-8b", gpu="h100", gpus=8
    ),
    "run(tiny) with two systems": lambda: simrl.run("tiny.yaml"),
    "run of a number": lambda: simrl.run(3, "areal"),
    "run of an empty scenario": lambda: simrl.run({}, "areal"),
    "run with gpus='many'": lambda: simrl.run("tiny.yaml", "areal", gpus="many"),
    "run with seed=-1": lambda: simrl.run("tiny.yaml", "areal", seed=-1),
    "run with a text as overrides": lambda: simrl.run("tiny.yaml", "areal", overrides="seed=3"),
    "run with an unknown override": lambda: simrl.run("tiny.yaml", "areal", overrides={"sed": 3}),
    "run with an unknown dispatch": lambda: simrl.run("tiny.yaml", "areal", dispatch="nothing"),
    "run with an unknown speculation": lambda: simrl.run(
        "tiny.yaml", "areal", speculation="nothing"
    ),
    "run with cap_tokens and a file": lambda: simrl.run(RECORDED, "areal", cap_tokens=9),
    "compare with systems='areal'": lambda: simrl.compare("tiny.yaml", "areal"),
    "compare with jobs=0": lambda: simrl.compare("tiny.yaml", jobs=0),
    "sweep without values": lambda: simrl.sweep("tiny.yaml", {}),
    "sweep with sample=0": lambda: simrl.sweep("tiny.yaml", {"seed": [1, 2]}, sample=0),
    "advise with trials=0": lambda: simrl.advise("tiny.yaml", trials=0),
    "explain of two runs": lambda: simrl.explain(simrl.compare("tiny.yaml")),
    "explain with step=9": lambda: simrl.explain("runs/verl-colocated", step=9),
    "result of an unknown label": lambda: simrl.compare("tiny.yaml").result("split"),
    "calibrate with window=(3, 1)": lambda: simrl.calibrate("run.log", window=(3, 1)),
    "acceptance with model alone": lambda: simrl.acceptance(RECORDED, model="qwen3-8b"),
    "acceptance with window=0": lambda: simrl.acceptance(RECORDED, window=0),
    "read_result of a file": lambda: simrl.read_result("tiny.yaml"),
    "read_trace of a scenario": lambda: simrl.read_trace("tiny.yaml"),
    "agree of runs with nothing in common": lambda: simrl.agree("runs/verl-colocated", PARTS_OF),
    "simrl.nothing": lambda: simrl.nothing,
}


def fields() -> list[str]:
    """Returns the dotted keys of a scenario, as docs/scenario.md has them; without those below lists and free names."""
    found = []
    for section in (ROOT / "docs" / "scenario.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.splitlines()[0]
        if not re.search("faults|acceptance|runs", title):
            start = "" if title == "the file" else f"{title}."
            found += [start + key for key in re.findall(r"^\| `(\w+)`", section, flags=re.M)]
    return [*found, "systems", "vary"]


def error_texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields bad input: command lines, two wrong values for each field of a scenario, and calls of functions."""
    bad = []
    for row in ERRORS.strip().splitlines():
        start, *ends = row.split(" | ")
        bad += [f"{start} {end}" for end in ends] or [start]
    bad += [
        f"run tiny.yaml --system areal {field}={value}"
        for field in fields()
        for value in ("[x]", "-1")
    ]
    for line in bad:
        refused = (
            line
            if " -o " in line or line.split()[0] not in ("compare", "run", "sweep")
            else f"{line} -o {{out}}"
        )
        yield line, lambda refused=refused: stopped(refused)
    for name, call in API.items():
        yield f"simrl: {name}", lambda call=call: raised(call)


def stopped(line: str) -> str:
    """Runs a command that is to fail: its exit code and stderr; of stdout only how many lines it has."""
    command.runs += 1
    code, out, err = called(shlex.split(line.replace("{out}", f"out-{command.runs}")))
    return plain(
        f"{code}: {err.strip()}" + (f" ({len(out.splitlines())} lines on stdout)" if out else "")
    )


def raised(call: Callable[[], object]) -> str:
    """Calls a function that is to raise an exception."""
    try:
        return f"no exception, {type(call()).__name__}"
    except Exception as error:
        return plain(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------------------- recording, checking


def digest(text: str) -> str:
    """Returns a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def stored(text: str) -> str | list[str]:
    """Returns a text as the file has it: one line as it is, more as a list, many as the first and a hash of all."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if len(lines) > MOST_LINES:
        return [*lines[:HEAD_LINES], f"… {len(lines)} lines, sha256 {digest(chr(10).join(lines))}"]
    return lines[0] if len(lines) == 1 else lines


def found(parts: list[str], match: str, jobs: int, texts: Path | None) -> dict[str, dict[str, Any]]:
    """Makes what is recorded, part by part."""
    makers = {"json": json_texts, "screen": screen_texts, "help": help_texts, "errors": error_texts}
    record: dict[str, dict[str, Any]] = {}
    folder = Path(tempfile.mkdtemp(prefix="simrl-behaviour-")).resolve()
    os.chdir(folder)
    write_inputs()
    install(folder / "installed")
    setup = (
        {line.removesuffix(" --json"): command(line) for line in SETUP}
        if set(parts) - {"tables", "help"}
        else {}
    )
    for part in parts:
        started = time.monotonic()
        if part == "tables":
            record[part] = tables(match, jobs)
            os.chdir(folder)
        else:
            made = {key: make() for key, make in makers[part]() if match in key}
            made |= {key: text for key, text in setup.items() if part == "json" and match in key}
            for key, text in made.items() if texts else ():
                file = (
                    texts
                    / part
                    / f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', key)[:180]}-{digest(key)[:4]}.txt"
                )
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            record[part] = {key: stored(text) for key, text in made.items()}
        print(
            f"{part}: {len(record[part])} items in {time.monotonic() - started:.0f} s",
            file=sys.stderr,
        )
    os.chdir(ROOT)
    shutil.rmtree(folder)
    return record


def moved(before: dict[str, Any], now: dict[str, Any], match: str) -> Iterator[str]:
    """Yields a message for each key whose value is not as it was."""
    for part in now:
        for key in sorted({**before.get(part, {}), **now[part]}):
            was, new = (values.get(part, {}).get(key, []) for values in (before, now))
            if match in key and was != new:
                lines = [[text] if isinstance(text, str) else text for text in (was, new)]
                diff = [
                    line for line in difflib.unified_diff(*lines, "before", "now", lineterm="", n=0)
                ][2:]
                yield "\n".join(
                    [
                        f"{part}: {key}",
                        *(f"    {line}" for line in diff[:DIFF_LINES] if line[:2] != "@@"),
                    ]
                )


def main() -> None:
    """Records or checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["record", "check"])
    parser.add_argument("--file", type=Path, default=RECORD)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--match", default="")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    file, texts = asked.file.resolve(), asked.texts and asked.texts.resolve()
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    now = found([asked.only] if asked.only else list(PARTS), asked.match, asked.jobs, texts)
    if asked.do == "record":
        for part, values in now.items():
            kept = {
                key: value
                for key, value in recorded.get(part, {}).items()
                if asked.match not in key
            }
            recorded[part] = {**kept, **values}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )
        return
    messages = list(moved(recorded, now, asked.match))
    print("\n".join([*messages, f"{len(messages)} of {sum(map(len, now.values()))} moved"]))
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
