"""RollPacker's tail batching (arXiv 2509.21009): prompts with long responses are put off, and
rolled out together.

Invariant: every token is generated and trained under one version. A short round begins more
prompts, and more responses of each, than a batch has, and trains the first prompts to have as many
finished responses as the trace has of them. Of the other prompts only the prompt is kept, in a
queue; when a batch waits there, a long round generates it anew, without surplus. With the stream
trainer, half of the workers hand their responses of a long round to the other half at some
progress, and their GPUs compute gradients of what is scored; the update comes when the round is
over. With the planner, the GPUs are workers of one tensor-parallel size in short rounds and of
another in long ones, formed where a step loads its weights anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import Layout, RunContext
from simrl.pipelines.rlhfuse import RolloutStep
from simrl.pipelines.rounds import GroupProgress, Round, times
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group

Ints = NDArray[np.int64]


def in_layouts(
    run: RunContext, *, stream_from: float | None, stream_samples: int, **rule: Any
) -> simpy.events.ProcessGenerator:
    """Train step after step, as `tail_batching` collects (`rule`), each round in the layout that
    the planner chooses; unless `stream_from` is None, long rounds with the stream trainer, when
    that share of their samples is finished, in rounds of at most `stream_samples` per freed
    worker."""
    if run.dynamic_sampling is not None:
        option = "planner" if stream_from is None else "stream_trainer"
        raise InputError(
            f"system: {option} and dynamic_sampling exclude each other; leave one of them out"
        )
    queue: deque[Group] = deque()
    planner = Planner(run, rule["eta_prompts"], rule["eta_responses"])
    collectors = {
        layout.tp: tail_batching(layout.run, queue=queue, observe=planner.observe, **rule)
        for layout in planner.layouts
    }
    for k in range(run.steps):
        is_long = len(queue) >= run.workload.batch_groups
        layout = planner.form(is_long)
        if k:
            yield layout.run.load_weights()
        if is_long and stream_from is not None:
            step = RolloutStep(layout.run, 1 - stream_from, _half, gradients=True)
            yield from step.roll_out(_again(run, queue, run.workload.batch_groups), stream_samples)
            planner.observe(is_long, step.batch.rollouts)
            yield run.trainer.train(step.batch.rollouts, prepared=step.inferred)
            step.give_back()
        else:
            batch = Batch(layout.run)
            yield from collectors[layout.tp](batch)
            batch.close()
            yield batch.complete
            yield run.trainer.train(batch.rollouts)


class Planner:
    """RollPacker's parallelism planner: it forms the GPUs into the layout in which a round is
    predicted to end first.

    The prediction (`_round_s`) is for responses as in the last round of its kind; before there is
    one, as `profiled` has them."""

    def __init__(self, run: RunContext, eta_prompts: float, eta_responses: float) -> None:
        self.layouts = run.layouts or (Layout(run, 0, 0.0, lambda version: None),)
        self._formed = self.layouts[0]
        self._rounds: list[dict[str, Any]] = []
        if run.layouts:
            self._last = profiled(run.workload.profiled_tokens(), eta_prompts, eta_responses)
            run.recorder.facts["planner"] = self._rounds

    def observe(self, is_long: bool, rollouts: Sequence[Rollout]) -> None:
        """Note what a round has generated."""
        if self._rounds and rollouts:
            self._last[is_long] = np.array([rollout.tokens for rollout in rollouts]), len(rollouts)

    def form(self, is_long: bool) -> Layout:
        """Form the layout of the next round: of layouts predicted to be equal, the cluster's.
        Return it."""
        if len(self.layouts) == 1:
            return self._formed
        predicted_s = {layout.tp: _round_s(layout, *self._last[is_long]) for layout in self.layouts}
        before, self._formed = (
            self._formed,
            min(self.layouts, key=lambda layout: predicted_s[layout.tp]),
        )
        if self._formed is not before:
            self._formed.form(before.run.workers[0].policy_version)
        about = {
            "step": len(self._rounds),
            "round": "long" if is_long else "short",
            "tp": self._formed.tp,
        }
        self._rounds.append(
            {**about, "predicted_s": {str(tp): seconds for tp, seconds in predicted_s.items()}}
        )
        return self._formed


def _round_s(layout: Layout, tokens: Ints, number: int) -> float:
    """Predict the seconds of a round in a layout: its load of weights, and the fullest worker's
    share of `number` responses of lengths like these, the longest among them. `RolloutTimes` knows
    passes, KV cache and pre-emptions; the order is drawn."""
    share = -(-number // len(layout.run.workers))
    return layout.load_s + layout.run.times.responses_s(
        np.random.default_rng(0).permutation(np.quantile(tokens, np.arange(1, share + 1) / share))
    )


def profiled(
    groups: Sequence[Ints], eta_prompts: float, eta_responses: float
) -> dict[bool, tuple[Ints, int]]:
    """Return, for a short round (False) and a long one (True), the tokens of responses and their
    number, if prompts are like these groups. A short round ends when the share 1 / `eta_prompts` of
    its prompts is complete, each with the share 1 / `eta_responses` of its responses; long rounds
    have the other prompts."""
    complete = np.array(
        [np.quantile(group, 1 / eta_responses, method="inverted_cdf") for group in groups]
    )
    end = np.quantile(complete, 1 / eta_prompts, method="inverted_cdf")
    short = np.concatenate(
        [np.minimum(group, min(at, end)) for group, at in zip(groups, complete, strict=True)]
    )
    put_off = [group for group, at in zip(groups, complete, strict=True) if at > end] or groups
    return {
        False: (short, times(eta_prompts, times(eta_responses, short.size))),
        True: (np.concatenate(put_off), short.size),
    }


def _half(unfinished: int, started: int, workers: int) -> int:
    return -(-workers // 2)


def _again(run: RunContext, queue: deque[Group], size: int) -> list[Group]:
    return [[run.workload.again(sample) for sample in queue.popleft()] for _ in range(size)]


def tail_batching(
    run: RunContext,
    *,
    eta_prompts: float,
    eta_responses: float,
    long_rounds: bool,
    async_rewards: bool = True,
    queue: deque[Group] | None = None,
    observe: Callable[[bool, Sequence[Rollout]], None] = lambda is_long, rollouts: None,
) -> Collector:
    """Collect short rounds of `eta_prompts` times the prompts and `eta_responses` times the
    responses, and long rounds. Without `long_rounds`, a prompt that does not finish in its short
    round is never trained; without `async_rewards`, rewards begin when the round is over. Prompts
    that are put off wait in `queue`. After each round, `observe` gets its kind and its rollouts."""
    queue = deque() if queue is None else queue

    def short_round(size: int) -> list[GroupProgress]:
        groups = run.workload.next_groups(times(eta_prompts, size))
        extra = [times(eta_responses, len(group)) - len(group) for group in groups]
        return [
            GroupProgress(group + run.workload.more_of(group, more), needed=len(group))
            for group, more in zip(groups, extra, strict=True)
        ]

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        is_long = len(queue) >= batch.size
        prompts = (
            [GroupProgress(group) for group in _again(run, queue, batch.size)]
            if is_long
            else short_round(batch.size)
        )
        a_round = Round(
            run,
            prompts,
            batch.size,
            on_complete=lambda group: batch.add(group.trainable) if async_rewards else None,
        )
        yield a_round.over
        observe(
            is_long,
            [rollout for prompt in prompts for rollout in prompt.finished + prompt.unfinished],
        )
        for prompt in () if async_rewards else a_round.first:
            batch.add(prompt.trainable)
        for prompt in a_round.first:
            run.recorder.dropped(prompt.finished[prompt.needed :] + prompt.unfinished)
        for prompt in a_round.rest:
            run.recorder.dropped(prompt.finished + prompt.unfinished)
            if long_rounds:
                queue.append(prompt.samples[: prompt.needed])

    return collect
