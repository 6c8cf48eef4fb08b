"""An acceptance report on the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from simrl.analysis.acceptance import history_words, model_yaml
from simrl.show.text import folded, formatted, framed_table, say


def print_report(d: dict[str, Any], console: Console) -> None:
    """Print the data of `simrl.analysis.acceptance.report`."""
    values = ", ".join(f"{key} {value}" for key, value in d["window"].items() if key != "kind")
    drafter = f"{d['drafter']} from {history_words(d['history'])}, window {d['window']['kind']} ({values})"
    drafted = f"{d['responses_with_drafts']:,} of {d['responses']:,} responses have drafts"
    console.print(Text.assemble((d["trace"]["name"], "bold"), f": {drafter}; {drafted}"))
    say(console, f"Tokens by: {d['trace']['tokenizer']}")
    console.print(
        framed_table(
            ("", "responses", "acceptance rate", "speculation rate", "accept length"),
            [
                *(
                    (f"epoch {row['epoch']}", f"{row['responses_with_drafts']:,}", *_cells(row))
                    for row in d["by_epoch"]
                    if row["responses_with_drafts"]
                ),
                (Text("all", "bold"), f"{d['responses_with_drafts']:,}", *_cells(d)),
                ("longest tenth", "", *_cells(d["by_response"]["longest_tenth"])),
            ],
        )
    )
    spread, tail = (
        d["by_response"]["speculation_rate"],
        d["by_response"]["longest_tenth"]["accept_length"],
    )
    say(
        console,
        f"Of a response's tokens drafts give {spread['p50']:.0%} in the median, {spread['p10']:.0%} at the 10th and "
        f"{spread['p90']:.0%} at the 90th percentile of responses. The longest tenth, which ends a rollout, gets {tail:.2f} "
        f"tokens a pass, all together {d['accept_length']:.2f}.",
    )
    if d["hit_lengths"]:
        hits = [
            (token_range(h), f"{h['share_of_hits']:.1%}", f"{h['share_of_tokens']:.1%}")
            for h in d["hit_lengths"]
        ]
        headings = ("hit length [tokens]", "share of hits", "share of tokens")
        console.print(framed_table(headings, hits, "Hits, as RhymeRL Fig. 8"))
    _print_pays(d["pays"], console)
    say(
        console,
        f"Model of these runs, for traces without token ids; paste it into a scenario. Drawn from it, these responses get "
        f"{d['run_model_accept_length']:.2f} tokens a pass, counted were {d['accept_length']:.2f}.",
    )
    with folded(console, "The model"):
        say(console, model_yaml(d).rstrip("\n"), soft_wrap=True)


def _print_pays(pays: dict[str, Any] | None, console: Console) -> None:
    if pays is None:
        say(
            console, "Whether it pays depends on step times: give --profile, or --model with --gpu."
        )
        return
    headings = (
        "batch",
        "plain [ms/token]",
        "with drafts",
        "speed-up",
        "best fixed window",
        "its speed-up",
    )
    rows = [
        (
            row["batch"],
            f"{row['plain_s'] * 1e3:.2f}",
            formatted(row["speculative_s"] and row["speculative_s"] * 1e3, "{:.2f}"),
            formatted(row["speed_up"], "{:.2f}×"),
            row["best_fixed_window"],
            formatted(row["best_fixed_speed_up"], "{:.2f}×"),
        )
        for row in pays["by_batch"]
    ]
    say(
        console,
        f"{pays['profile']}, sequences of {pays['kv_tokens']:,.0f} tokens; drafts: {pays['draft_source']}",
    )
    console.print(framed_table(headings, rows, left=()))
    say(console, pays["words"], style="bold")


def _cells(rates: dict[str, Any]) -> tuple[str, str, str]:
    acceptance, speculation = (
        formatted(rates[f"{key}_rate"], "{:.1%}") for key in ("acceptance", "speculation")
    )
    return acceptance, speculation, formatted(rates["accept_length"], "{:.2f}")


def token_range(row: dict[str, Any]) -> str:
    """Return the range of a row's hit lengths, such as 5–8."""
    low, high = row["from_tokens"], row["to_tokens"]
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
