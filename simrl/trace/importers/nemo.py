"""NeMo-RL: the metrics of a run, from its console or from what it sends to W&B and TensorBoard.

`timing/train/generation` is generation alone (`exposed_generation`, of asynchronous runs, is the trainer's wait and left out).
The console has the mean length of responses, and no longest or shortest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from simrl.trace.importers import rows
from simrl.trace.importers.exports import Logged

NAMES = {
    "timing/train/generation": "timing_s/gen",
    "timing/train/policy_and_reference_logprobs": "timing_s/old_log_prob",
    "timing/train/policy_training": "timing_s/update_actor",
    "timing/train/total_step_time": "timing_s/step",
    "train/mean_gen_tokens_per_sample": "response_length/mean",
    "train/gen_tokens_per_sample/min": "response_length/min",
    "train/gen_tokens_per_sample/max": "response_length/max",
    "train/max_gen_tokens_per_sample": "response_length/max",
    "train/mean_prompt_length": "prompt_length/mean",
}
TOTAL, ENVIRONMENT = "train/total_num_tokens", "train/mean_env_tokens_per_sample"
TAGS = (*NAMES, TOTAL, ENVIRONMENT)
HEADER = re.compile(r"={5} (Epoch|Step) ([0-9]{1,9})/[0-9]+ ={5}")
PRINTED = re.compile(r"• ([\w/]+|Total step time|Mean Generation Length): ([0-9.]{1,20})(s?)(?=\s|$)")
CONSOLE = ("• Total step time: ", "• Mean Generation Length: ")  # of its lines about a step
TITLES = {
    "Total step time": "timing/train/total_step_time",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
}


def console_rows(path: Path, **mode: str) -> Iterator[Logged]:
    """Yield a row a printed number. A step is counted on over epochs, each of which prints its own from 1."""
    step, before, epoch = None, 0, 0
    for place, line in rows.numbered_lines(path, **mode):
        if header := HEADER.search(line):
            number = int(header[2])
            if header[1] == "Step":
                step = before + number
            elif number > epoch:
                epoch, before = number, step or 0
        elif step is not None and (printed := PRINTED.search(line)) and printed[2].count(".") < 2 and printed[2] != ".":
            tag = TITLES.get(printed[1], f"timing/train/{printed[1]}" if printed[3] else "")
            if tag in NAMES:
                yield place, {"global_step": step, tag: float(printed[2])}


def entries(logged: Iterable[Logged]) -> Iterator[Logged]:
    """Yield the rows in verl's names. Sequences are prompt, response and what the environment wrote: their tokens give the
    number of samples."""
    for place, row in logged:
        yield place, {NAMES.get(tag, tag): value for tag, value in row.items()}


def with_samples(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics with the number of samples of each step, where tokens and mean lengths were logged."""
    if {TOTAL, "prompt_length/mean", "response_length/mean"} <= set(metrics):
        mean = metrics["prompt_length/mean"] + metrics["response_length/mean"]
        mean = mean + metrics.get(ENVIRONMENT, 0.0)
        metrics["samples"] = (metrics[TOTAL] / mean).round()
    return metrics
