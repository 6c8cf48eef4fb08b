"""One engine whose KV cache holds 68 requests, with 256 and with 1,024 requests at a time.

    python experiments/short_of_kv.py [--small] [--json] [--write]

Qwen3-8B on one H100, with the shipped profile and the host times of the preset `vllm-0.19`. The KV cache holds 68 requests of
5,000 tokens, which is what 90 % of the GPU leaves beside the weights and 4 GB. Equal work is done in every run:

- *agents*: 2,048 trajectories of 8 turns: a prompt of 1,000 tokens; 200 tokens a turn, then a tool adds 300 in 2 seconds. While
  it runs, the blocks are free and keep their tokens until others need them. *no prefix cache, freed* recomputes every turn;
- *responses*: 2,048 requests of one turn, 2,500 + 2,500 tokens;
- *long responses*: 100 + 4,900 tokens, added when the others had run: of 2,500-token prompts no more than 136 fit, so 256 and
  1,024 at a time are the same run.

`clients` trajectories are under way at a time, each client beginning the next when one ends; `max_num_seqs` is their number.
The tokens a second are counted over the whole run.
"""

import heapq
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from experiments.shared import AsJson, Small, errors_in_a_line, markdown_of, shrink, write_parts
from simrl.engine.engine import one_engine
from simrl.engine.state import END, PAUSE, Limits
from simrl.profile.profile import read_profile
from simrl.profile.shipped import shipped_profile
from simrl.scenario.presets import ENGINES

PAGE = Path(__file__).parent / "schedulers.md"
MODEL, GPU, PRESET = "qwen3-8b", "h100", "vllm-0.19"
FIT, CONTEXT_TOKENS, BLOCK, PASS_TOKENS = 68, 5000, 16, 8192
TRAJECTORIES = 2048
CLIENTS = (68, 256, 1024)


class Work(NamedTuple):
    """A request: prompt, turns, tokens of each, tokens and seconds of a tool between them."""

    prompt: int
    turns: int
    tokens: int
    observation: int = 0
    tool_s: float = 0.0


AGENTS, RESPONSES, LONG = Work(1000, 8, 200, 300, 2.0), Work(2500, 1, 2500), Work(100, 1, 4900)
CASES: dict[str, tuple[Work, dict[str, Any]]] = {
    "agents": (AGENTS, {"prefix_caching": True}),
    "agents, watermark 5 %": (
        AGENTS,
        {"prefix_caching": True, "watermark_blocks": FIT * CONTEXT_TOKENS // BLOCK // 20},
    ),
    "agents, no prefix cache, freed": (AGENTS, {"hold_paused": False}),
    "responses": (RESPONSES, {"prefix_caching": True}),
    "responses, watermark 5 %": (
        RESPONSES,
        {"prefix_caching": True, "watermark_blocks": FIT * CONTEXT_TOKENS // BLOCK // 20},
    ),
    "long responses": (LONG, {"prefix_caching": True}),
    "long responses, watermark 5 %": (
        LONG,
        {"prefix_caching": True, "watermark_blocks": FIT * CONTEXT_TOKENS // BLOCK // 20},
    ),
}


def run(work: Work, clients: int, **changes: Any) -> dict[str, float]:
    """Run all trajectories, `clients` at a time; return the tokens a second and what they cost."""
    path = shipped_profile(MODEL, GPU, 1)
    assert path is not None
    constants = ENGINES[PRESET].constants
    profile = read_profile(path).with_corrections(
        between_passes_s=constants["between_passes_s"].value,
        sequence_overhead_s=constants["sequence_overhead_s"].value,
        least_pass_s=constants["hidden_pass_s"].value,
    )
    limits = Limits(clients, PASS_TOKENS, BLOCK, FIT * CONTEXT_TOKENS // BLOCK, True)._replace(
        **changes
    )
    engine = one_engine(profile.even, limits)
    turn_of: dict[int, int] = {}
    tools: list[tuple[float, int]] = []  # when each tool returns, and for which slot
    begun, ended = 0, 0

    def begin() -> None:
        nonlocal begun
        slot = engine.submit(
            work.prompt,
            work.turns * work.tokens,
            sample_key=begun,
            prompt_key=begun,
            continues=True,
        )
        begun += 1
        turn_of[slot] = 1
        if work.turns > 1:
            engine.stop_at(slot, work.tokens, PAUSE)

    for _ in range(min(clients, TRAJECTORIES)):
        begin()
    while ended < TRAJECTORIES:
        until_s = tools[0][0] if tools else float("inf")
        stops = engine.next_stops(until_s)
        if not stops:
            stops = engine.settle(until_s)
            while tools and tools[0][0] <= engine.now_s:
                _, slot = heapq.heappop(tools)
                turn_of[slot] += 1
                engine.resume(slot, work.observation)
                if turn_of[slot] < work.turns:
                    engine.stop_at(slot, turn_of[slot] * work.tokens, PAUSE)
        for slot, now_s, kind in stops:
            if kind == PAUSE:
                heapq.heappush(tools, (now_s + work.tool_s, slot))
            elif kind == END:
                ended += 1
                if begun < TRAJECTORIES:
                    begin()
    totals = engine.totals
    known = TRAJECTORIES * (work.prompt + (work.turns - 1) * work.observation)
    return {
        "tokens_per_s": totals["generated_tokens"] / engine.now_s,
        "recomputed": totals["prefill_tokens"] / known - 1,
        "found": totals["hit_tokens"] / max(totals["lookup_tokens"], 1),
        "preemptions": totals["preemptions"],
    }


def main(
    small: Small = False,
    write: Annotated[
        bool, typer.Option("--write", help=f"write the table into {PAGE.name}, too")
    ] = False,
    as_json: AsJson = False,
) -> None:
    shrink(globals(), small, TRAJECTORIES=80, CLIENTS=(20, 40))
    with errors_in_a_line("short_of_kv"):
        rows = []
        for name, (work, changes) in CASES.items():
            first = 0.0
            for clients in CLIENTS:
                found = run(work, clients, **changes)
                first = first if clients != CLIENTS[-2] else found["tokens_per_s"]
                rows.append(
                    {
                        "case": name,
                        "at a time": clients,
                        "tokens/s": f"{found['tokens_per_s']:,.0f}",
                        f"of {CLIENTS[-2]}": f"{found['tokens_per_s'] / first:.2f}"
                        if first
                        else "",
                        "computed again": f"{found['recomputed']:.1%}",
                        "found": f"{found['found']:.1%}",
                        "preemptions": found["preemptions"],
                    }
                )
        table = markdown_of(rows)
        print(json.dumps(rows, indent=1) if as_json else "\n".join(table))
        if write:
            write_parts(PAGE, {"short_of_kv": table})


if __name__ == "__main__":
    typer.run(main)
