"""The page of a proof: predicted blind, predicted with the measured profile, measured.

Invariant: a function of the record alone (`prove.json`), whatever steps it has. A bar is shown with
its figure, met or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

MAKESPAN_BLIND, MAKESPAN_PROFILE, SAMPLES = 0.12, 0.03, 0.05  # bars
COUNTS = {
    "passes": "passes",
    "preemptions": "preemptions",
    "lookup_tokens": "tokens looked up",
    "hit_tokens": "tokens found cached",
}
CACHED = ("lookup_tokens", "hit_tokens")  # which an engine counts with a prefix cache alone

Rows = Sequence[Sequence[str]]


def page(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown; `passes` is on another."""
    steps = {each["step"]: each for each in record["steps"]}
    done = record["steps"]
    replays = [each for each in done if "predicted" in each]
    parts = [_top(record, steps), _bars(replays)]
    parts += [_replays(replays), _counts(replays)] if replays else []
    parts += [_whole(each) for each in done if "phases" in each]
    parts += [_errors_of_passes([each for each in done if "held_out" in each])]
    parts += [_figures(each) for each in done if "figures" in each]
    return "\n\n".join([part for part in (*parts, _steps(record)) if part]) + "\n"


def passes(record: Mapping[str, Any]) -> str:
    """Return the page of every measured pass, as Markdown."""
    return (
        "\n\n".join(
            ["# Passes", *(_passes(each) for each in record["steps"] if "held_out" in each)]
        )
        + "\n"
    )


def bars(replays: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float, float, list[float]]]:
    """Return the bars: what is predicted, the prediction, the bar, the worst error, and all errors
    of engines that have the GPU to themselves, and of engines that share it."""
    several = (
        "engines on GPUs of their own"
        if any(each.get("gpus", 1) > 1 for each in replays)
        else "two engines share the GPU"
    )
    rows = []
    for prediction, bar in (("blind", MAKESPAN_BLIND), ("profile", MAKESPAN_PROFILE)):
        for alone in (True, False):
            chosen = [
                each["predicted"][prediction]["errors"]
                for each in replays
                if (each["engines"] == 1) == alone and prediction in each["predicted"]
            ]
            for key, limit in (("makespan_err", bar), ("sample_mape", SAMPLES)):
                errors = [errors[key] for errors in chosen if errors[key] is not None]
                if errors and (key == "makespan_err" or prediction == "profile"):
                    where = "one engine on the GPU" if alone else several
                    rows.append(
                        (f"{TITLES[key]}, {where}", prediction, limit, max(errors, key=abs), errors)
                    )
    return rows


TITLES = {"makespan_err": "makespan", "sample_mape": "samples' ends (MAPE)"}
NAMES = {"blind": "blind", "profile": "measured profile"}


def _top(record: Mapping[str, Any], steps: Mapping[str, Any]) -> str:
    facts = steps.get("here", {}).get("facts", {})
    blind = steps.get("blind", {})
    lines = [
        f"# Predicted, then measured: {facts.get('GPU, memory, driver', record['device'])}",
        "",
    ]
    lines += [f"{', '.join(f'{name} {value}' for name, value in facts.items())}.", ""]
    if "sha256" in blind:
        lines += [
            f"Blind predictions were written at {blind['written']}, before anything was measured (`blind.json`, sha256 "
            f"`{blind['sha256'][:16]}…`). {_sources(blind)} The second prediction has a profile that was measured here, on the "
            "same engines. Nothing is fitted to a replay.",
            "",
        ]
    replays = [each for each in record["steps"] if "predicted" in each]
    unmet = [each for each in record["steps"] if each["state"] != "done"]
    lines += [
        f"Measured: {len(replays)} replays; {len(unmet)} of {len(record['steps'])} steps failed or found no time.",
        "",
        "Models are random, of the shape of the named ones. Recorded responses are followed token by token, so drafts are "
        "accepted as in the recorded run. Training and rewards are held for their predicted time, loads and switches of "
        "weights are set to 0.1 s; errors are on the rollout clock, which stops while no engine generates. An error is "
        "(predicted − measured) / measured; of samples' ends, the mean of its size.",
    ]
    return "\n".join(lines)


def _sources(blind: Mapping[str, Any]) -> str:
    return f"They rest on: {'; '.join(sorted(set(blind['profiles'].values())))}."


def _bars(replays: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for what, prediction, limit, worst, errors in bars(replays):
        within = sum(abs(error) <= limit for error in errors)
        of = f"{within} of {len(errors)}" + ("" if within == len(errors) else ": **not met**")
        sign = "" if what.startswith(TITLES["sample_mape"]) else "+"
        rows.append(
            [
                what,
                NAMES[prediction],
                f"{limit:.0%}",
                _percent(median(errors), sign),
                _percent(worst, sign),
                of,
            ]
        )
    return _table("## Bars", ["", "prediction", "bar", "median", "worst", "replays within"], rows)


def _replays(replays: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in replays:
        measured, noise = each["measured"], each["noise"]
        row = [
            f"{each['case']}" + (f" ({each['about']})" if each["about"] else ""),
            str(each["engines"]),
            str(each["responses"]),
            f"{measured['rollout_s']:.2f}",
        ]
        for prediction in NAMES:
            errors = each["predicted"].get(prediction, {}).get("errors", {})
            row += [
                _percent(errors.get("makespan_err")),
                _percent(errors.get("sample_mape"), sign=""),
            ]
        acceptance = measured["acceptance"]
        blind = each["predicted"]["blind"]["acceptance"]
        row += ["" if None in (acceptance, blind) else f"{blind:.3f} / {acceptance:.3f}"]
        rows.append([*row, "" if noise is None else _percent(noise["makespan_err"], sign="")])
    heads = [
        "replay",
        "engines",
        "responses",
        "measured rollout s",
        "blind: makespan",
        "samples' ends",
    ]
    heads += ["measured profile: makespan", "samples' ends"]
    return _table(
        "## Replays", [*heads, "acceptance, predicted / measured", "a second run differs by"], rows
    )


def _counts(replays: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in replays:
        measured = each["measured"]["counts"]
        if measured is None:
            continue
        for name, title in COUNTS.items():
            predicted = {key: of["counts"][name] for key, of in each["predicted"].items()}
            if measured[name] or (
                any(predicted.values()) and (name not in CACHED or measured["lookup_tokens"])
            ):
                both = [f"{predicted[key]:,}" if key in predicted else "" for key in NAMES]
                rows.append([each["case"], title, *both, f"{measured[name]:,}"])
    return _table(
        "## What the engines counted",
        ["replay", "", "blind", "measured profile", "engine's own"],
        rows,
    )


def _errors_of_passes(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return one table of the errors of passes; `passes` has the passes. `held out` are those that
    no profile was fitted to."""
    rows = []
    for step in steps:
        points = step["passes"] + step["held_out"]
        for kind in ("decode", "verify", "prefill", "prefill + decode"):
            blind = [p["blind_s"] / p["measured_s"] - 1 for p in points if _kind(p) == kind]
            held_out = [
                p["profile_s"] / p["measured_s"] - 1 for p in step["held_out"] if _kind(p) == kind
            ]
            errors = [
                [str(len(e)), _percent(median(e)), _percent(max(e, key=abs))] if e else [""] * 3
                for e in (blind, held_out)
            ]
            if blind:
                rows.append([_engine(step), kind, *errors[0], *errors[1]])
    heads = [
        "engine",
        "passes",
        "n",
        "blind: median",
        "worst",
        "n",
        "measured profile, held out: median",
        "worst",
    ]
    return _table("## Passes", heads, rows)


def _engine(step: Mapping[str, Any]) -> str:
    beside = f", beside engine {step['beside']}, which decodes" if step["beside"] else ""
    return f"{step['model']}, {step['profile']}{beside}"


def _passes(step: Mapping[str, Any]) -> str:
    """Return the passes of an engine, the held-out ones last."""
    work = ("sequences", "draft_tokens", "kv_tokens", "prompts", "chunk_tokens", "context_tokens")
    rows = [
        [
            *(f"{p[name]:.0f}" if p[name] else "" for name in work),
            f"{p['measured_s'] * 1e3:.2f}",
            f"{p['blind_s'] * 1e3:.2f}",
            _percent(p["blind_s"] / p["measured_s"] - 1),
            _percent(p["profile_s"] / p["measured_s"] - 1) if "profile_s" in p else "",
        ]
        for p in [
            *sorted(step["passes"], key=lambda p: [p[name] for name in ("prompts", *work)]),
            *step["held_out"],
        ]
    ]
    heads = [
        "sequences",
        "drafts each",
        "context tokens",
        "prompts",
        "prefill tokens",
        "after tokens",
    ]
    host = (
        f"Of a pass, {step['between_passes_s'] * 1e3:.2f} ms are outside the engine's step, at one sequence; a new request "
        f"takes {step['request_s'] * 1e3:.2f} ms more."
    )
    if step.get("host"):
        pass_s, sequence_s = (
            step["host"][key][0] for key in ("between_passes_s", "sequence_overhead_s")
        )
        host += (
            f" Beyond the shipped kernels, decode steps take {pass_s * 1e3:.2f} ms and {sequence_s * 1e6:.0f} µs a sequence (a "
            "line over them)."
        )
    table = _table(
        "", [*heads, "measured ms", "blind ms", "error", "measured profile (held out)"], rows
    )
    return f"## {_engine(step)}\n\n{host}\n\n{table}"


def _kind(shape: Mapping[str, Any]) -> str:
    if shape["prompts"]:
        return "prefill + decode" if shape["sequences"] else "prefill"
    return "verify" if shape["draft_tokens"] else "decode"


def _whole(step: Mapping[str, Any]) -> str:
    rows = []
    for name, phase in step["phases"].items():
        predicted_s, measured_s = phase["predicted_s"], phase.get("measured_s")
        measured = (
            ["", ""]
            if measured_s is None
            else [f"{measured_s:.3f}", _percent(predicted_s / measured_s - 1)]
        )
        mfu = phase.get("details", {}).get("mfu")
        rows.append(
            [
                name,
                f"{predicted_s:.3f}",
                *measured,
                "" if mfu is None else f"{mfu:.1%}",
                phase["rests_on"].replace("|", "/"),
            ]
        )
    heads = [
        "phase",
        "predicted s",
        "measured s",
        "error",
        "MFU measured",
        "the prediction rests on",
    ]
    return (
        _table(f"## {step['title']}", heads, rows)
        + f"\n\nUnlike a trainer of its own: {'; '.join(step['unlike'])}."
    )


def _figures(step: Mapping[str, Any]) -> str:
    """Return the table of sampling, by sequences, and of sleep and wake-up, by level, beside the
    predicted copy."""
    rows = []
    for each in step["figures"]:
        sized = (
            f"{each['size']} sequences" if each["what"] == "sampler" else f"level {each['size']}"
        )
        copied = each["what"] != "sampler" and each["size"] == 1
        predicted = f"{step['pinned_copy_s']:.3f}" if copied else ""
        rows.append([each["what"], sized, f"{each['seconds']:.4f}", predicted])
    return _table(
        f"## {step['title']}", ["", "", "measured s", "predicted s: the weights over PCIe"], rows
    )


def _steps(record: Mapping[str, Any]) -> str:
    rows = [
        [each["step"], each["state"], f"{each['took_s']:.1f}", _one_line(each)]
        for each in record["steps"]
    ]
    return _table(f"## Steps, of {record['minutes']:g} minutes", ["step", "", "s", ""], rows)


def _one_line(step: Mapping[str, Any]) -> str:
    why = [step["why"]] if "why" in step else []
    return "; ".join(
        [*why, *(f"{name}: {reason}" for name, reason in step.get("not_up", {}).items())]
    ).replace("|", "/")


def _percent(value: float | None, sign: str = "+") -> str:
    return "" if value is None else f"{value:{sign}.1%}"


def _table(title: str, heads: Sequence[str], rows: Rows) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(([title, ""] if title else []) + lines)
