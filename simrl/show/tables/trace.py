"""The description of a trace on the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from simrl.show.inputs import source_words
from simrl.show.text import aligned, framed_table, say


def _cut(description: dict[str, Any]) -> str:
    """Return the share of responses that ended by length, if limits other than their cap ended
    some."""
    cut = description["share_cut"]
    return (
        f"; {cut:.1%} ended by length"
        if cut and round(cut - description["share_at_cap"], 3) > 0
        else ""
    )


def _tool_row(facts: dict[str, Any]) -> list[str]:
    seconds = [f"{facts[key]:.1f}" for key in ("mean_s", "p50_s", "p95_s", "max_s")]
    return [
        facts["tool"],
        f"{facts['calls']:,}",
        *seconds,
        "not recorded" if facts["failed_tries"] is None else f"{facts['failed_tries']:,}",
        f"{facts['observation_tokens_mean']:,.0f}",
    ]


def print_description(description: dict[str, Any], console: Console) -> None:
    """Print the data of `describe`."""
    d, metadata = description, description["metadata"]
    drawn = metadata["kind"] == "synthetic"
    kind = "synthetic: no model generated these responses" if drawn else metadata["kind"]
    console.print(Text.assemble((metadata["name"], "bold"), f", {kind}"))
    say(console, f"Source: {source_words(metadata['source'])}")
    say(console, f"Lengths counted by: {metadata['tokenizer']}. Licence: {metadata['licence']}")
    if metadata["notes"]:
        say(console, f"Notes: {metadata['notes']}")

    smallest, largest = d["group_min"], d["group_max"]
    pauses = (
        f"{d['pauses_mean']:.1f} pauses a response, {d['environment_s_mean']:.1f} s and "
        f"{d['observation_tokens_mean']:,.0f} tokens of observations in all"
    )
    size = {
        "samples": f"{d['rows']:,}",
        "steps, epochs": f"{d['steps']:,}, {d['epochs']:,}",
        "prompts": f"{d['prompts']:,}",
        "samples a group": smallest
        if smallest == largest
        else f"{smallest} to {largest}, mean {d['group_mean']:.1f}",
        "tokens": f"{d['prompt_tokens_total']:,} of prompts, {d['response_tokens_total']:,} of responses",
        "at the cap": f"{d['share_at_cap']:.1%} of responses, cap {d['cap_tokens']:,} tokens{_cut(d)}",
        "reward": "not recorded" if d["reward_mean"] is None else f"mean {d['reward_mean']:.3f}",
        "environment": pauses if d["pauses_mean"] else "no turns",
        "token ids": "recorded"
        if d["has_token_ids"]
        else "not recorded; acceptance of drafts must be assumed",
    }
    console.print(aligned(((Text(label, "bold"), value) for label, value in size.items()), "ll"))
    in_turns = d["observation_tokens_mean"] > 0
    statistics = [
        key for key in d["response_tokens"] if key != "p5" or not in_turns
    ]  # to fit into 80 characters
    kinds = ("prompt", "response", "context") if in_turns else ("prompt", "response")
    lengths = [
        (kind, *(f"{d[f'{kind}_tokens'][key]:,.0f}" for key in statistics)) for kind in kinds
    ]
    console.print(framed_table(("tokens", *statistics), lengths))
    if d["tools"]:
        columns = ("tool", "calls", "mean s", "p50", "p95", "max", "failed tries", "tokens")
        console.print(framed_table(columns, [_tool_row(facts) for facts in d["tools"]]))

    share = d["within_group_variance_share"]
    if share is not None:
        say(
            console,
            f"Within groups lies {min(share, 1):.0%} of a step's variance of log lengths, the rest between prompts.",
        )
