"""A profile composed of measured kernel times, as LLMServingSim's profiler writes them (casys-kaist/LLMServingSim@5daddb21,
`profiler/core`; its docs/docs/profiler/output-bundle.md has the columns).

    dense(tokens)        = embedding + layers × (2 layernorm + qkv_proj … down_proj) + final_layernorm + all-reduces
    attention(…)         = layers × the joint time of one prefill chunk beside decoding sequences
    straggler(…)         = layers × what sequences four times as long add to that, by their tokens (skew.csv, if it is there)
    sampled(sequences)   = lm_head + sampler; up to the largest batch that was measured, which for verifying drafts (a row a
                           verified position) may be too few: `require_covers` says so
    experts(tokens)      = layers × (the block of experts of one GPU + its exchange among the attention ranks)

Invariant: times are sums of the table's rows, times counts that the model's shape gives; nothing is fitted to a run. What one
folder holds is what one rank of a tensor-parallel group does, without communication: that comes from the links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from simrl.errors import InputError, first_line, meant, refuse
from simrl.profile.hardware import GPUS, Gpu, known_gpu
from simrl.profile.interpolation import Floats, interpolate4
from simrl.profile.model_shape import ModelShape, known_name
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.smoothing import moved, settled
from simrl.profile.roofline import BYTES_PER_VALUE, MEMORY_EFFICIENCY, Link, pass_all_reduces_s

ONCE_A_PASS = ("embedding", "final_layernorm")
# How often a decoder layer runs each kind. A `layernorm` row is one of the two norms of a layer (before attention and
# before the MLP: the profiler divides by the calls); `qk_norm` is one row for both, and models without it have none.
A_LAYER = {"layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1}
MLP = ("gate_up_proj", "act_fn", "down_proj")  # of a layer without experts
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def compose_kernel_tables(
    folder: str | Path,
    shape: ModelShape,
    gpu: Gpu | None,
    tp: int,
    link: Link | None,
    between_passes_s: float,
    dp: int = 1,
    ep: int = 1,
    exchange: Link | None = None,
) -> TableProfile:
    """Return the profile of `shape` from a folder `tp<N>` (dense.csv, per_sequence.csv, attention.csv; µs) and its meta.yaml,
    or from the folder that has both. A mixture of experts has moe.csv, in the folder tp1.

    `gpu` is needed for experts on several GPUs, else its name is taken from meta.yaml. `link` joins the ranks and is needed
    where `tp` > 1: two all-reduces a layer and one for the embedding, as LLMServingSim counts them. The gathering of the
    vocabulary-parallel logits, which vLLM does and LLMServingSim leaves out, is not modelled. `exchange` (else `link`)
    joins the `dp` attention ranks: an all-gather before the experts and a reduce-scatter after them. The pause
    `between_passes_s` is not in the tables: measure it. Attention is read on the grid that meta.yaml declares; rows
    beside it (a finer sweep that is no full grid) are left out. Raises `InputError` for missing rows, two rows of one
    point, holes in that grid, times that are no numbers, and tables of another model or tensor-parallel size.
    """
    folder, meta = read_meta(Path(folder), tp)
    profiled, named = str(meta["model"]), re.fullmatch(r"tp(\d+)", folder.name)
    gpus, ranks_link = tp * dp, exchange or link
    measured_on = sorted({known_gpu(str(meta.get(key))) for key in ("gpu", "hardware")} & {*GPUS})
    refuse(
        (
            gpu and measured_on and not {*measured_on} & {gpu.name, gpu.base},
            f"{folder.parent / 'meta.yaml'}: profiled on {' or '.join(measured_on)}, asked for {gpu and gpu.name}; "
            f"give --gpu {' '.join(measured_on[:1])}",
        ),
        (
            "fp8" in str(meta.get("variant")),
            f"{folder.parent / 'meta.yaml'}: variant {meta.get('variant')}: FP8 tables are not read; profile the model in "
            "bf16",
        ),
        (
            shape.name not in (known_name(profiled), profiled.split("/")[-1].lower()),
            f"{folder}: profiled {profiled}, asked for {shape.name}; name that model's folder",
        ),
        (
            named and int(named[1]) != tp,
            f"{folder}: one rank of {named and named[1]}, asked for tp {tp}; name the folder tp{tp}",
        ),
        (
            tp > 1 and link is None,
            f"{folder}: tp {tp} needs a link (bandwidth, latency): the tables hold no all-reduces",
        ),
        (
            not shape.experts and (dp, ep) != (1, 1),
            f"{folder}: dp {dp}, ep {ep}: {shape.name} has no experts to share; leave them out",
        ),
        (
            ep not in (1, gpus),
            f"{folder}: ep {ep}: all {gpus} GPUs of tp × dp share the experts, or none; give {gpus} or 1",
        ),
        (
            gpus > 1 and shape.experts and (gpu is None or (dp > 1 and ranks_link is None)),
            f"{folder}: experts on {gpus} GPUs need a GPU and a link: the tables hold no exchange",
        ),
        (
            shape.linear_layers or shape.window_layers or shape.kv_lora_rank,
            f"{folder}: {shape.name} has linear, windowed or latent attention, which these tables lack; use simrl measure",
        ),
    )

    calls = dict.fromkeys(ONCE_A_PASS, 1)
    calls |= {kind: shape.layers * each for kind, each in A_LAYER.items()}
    if plain_layers := shape.layers - shape.expert_layers:
        calls |= dict.fromkeys(MLP, plain_layers)
    tokens, dense = _summed(folder / "dense.csv", "tokens", calls)
    sequences, sampled = _summed(
        folder / "per_sequence.csv", "sequences", {"lm_head": 1, "sampler": 1}
    )
    axes, attention = _attention_grid(folder / "attention.csv", meta)
    attention = 1e-6 * shape.layers * attention
    dense_s, dense_note = settled(dense), f"dense {moved(dense, settled(dense))}"
    reduced_s = pass_all_reduces_s(shape, tokens, tp, link) if link and tp > 1 else 0.0
    # Every point between two ticks has the time of the upper tick: matrix kernels compute whole tiles, and a batch is padded
    # to the next size that has a CUDA graph. (Ticks are whole numbers of tokens.)
    steps = np.union1d(tokens, tokens[:-1][np.diff(tokens) > 1] + 1)
    tables = Tables(
        dense_tokens=steps,
        dense_s=(dense_s + reduced_s)[np.searchsorted(tokens, steps)],
        sampled_sequences=sequences,
        sampled_s=settled(sampled),
        prefill_tokens=axes[0],
        prefill_kv_tokens=axes[1],
        decode_sequences=axes[2],
        decode_kv_tokens=axes[3],
        attention_s=settled(attention),
        between_passes_s=between_passes_s,
    )
    if (folder / "skew.csv").exists():
        tables = _with_stragglers(tables, folder / "skew.csv")
    notes = [
        f"falling noise evened out: {dense_note}; sampled {moved(sampled, tables.sampled_s)}; "
        f"attention {moved(attention, tables.attention_s)}",
        "chunks between 1 and 15 tokens are interpolated towards a pass without prefill, another kernel: too fast",
    ]
    if link and tp > 1:
        notes.append(f"ring collectives over {link.words}")
    if shape.experts:
        path = folder.with_name("tp1") / "moe.csv"
        ticks, experts = _experts(path, shape, gpu, gpus, ep, dp * tokens)
        if ranks_link and dp > 1:
            values = shape.hidden + shape.experts, shape.hidden  # with the router's logits; back
            exchanged = (ranks_link.all_gather_s(BYTES_PER_VALUE * n * ticks, dp) for n in values)
            experts = experts + shape.expert_layers * sum(exchanged)
            notes.append(f"exchange of {dp} attention ranks over {ranks_link.words}")
        notes.append("every token meets experts evenly; the slower GPU of uneven ones is not in it")
        if ep < gpus:
            notes.append(f"estimated: experts divided over {gpus} GPUs, at their share of the time")
        tables = tables._replace(expert_tokens=ticks, experts_s=settled(experts))
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=gpu.name if gpu else str(meta["hardware"]).lower(),
        tp=tp,
        dp=dp,
        ep=ep,
        routing="balanced" if shape.experts else "",
        kind="derived",
        source=f"kernel times of LLMServingSim's profiler {meta.get('profiler_version', '')}, "
        f"vLLM {meta.get('vllm_version', '')} on {meta.get('gpu', meta['hardware'])}",
        created=str(meta.get("profiled_at", "")),
        licence="MIT",
        notes="; ".join(notes),
        own_times=("between_passes_s", "sequence_overhead_s"),  # the sampler, per_sequence.csv
    )
    return TableProfile(tables, metadata, origin=str(folder))


def _experts(
    path: Path, shape: ModelShape, gpu: Gpu | None, gpus: int, ep: int, tokens: Floats
) -> tuple[Floats, Floats]:
    """Return the ticks of `tokens` of all ranks that the table covers, and the seconds of a GPU's experts in all layers.

    A row is a block with all experts (`tokens`, each at `experts_per_token` of the `activated_experts`). A GPU that has a
    share of them computes that share of all pairs of token and expert: the row of as large a share of the tokens.
    Tokens meet experts independently. Its activation and its sum also pass over the pairs of other GPUs' experts, and
    both products write zeros there (vLLM 0.19, `TritonExperts`).
    """
    rows = read_csv(path, ("tokens", "activated_experts"))
    grid = rows.pivot(index="tokens", columns="activated_experts", values="time_us")
    share = gpus if ep > 1 else 1
    ticks = share * grid.index.to_numpy(float)
    both = np.union1d(tokens, ticks)
    tokens = both[(both >= tokens[0]) & (both <= min(tokens[-1], ticks[-1]))]
    met = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** tokens) / share
    # No row has more experts than its tokens can meet: fewer tokens read as many weights as the fewest that were measured.
    lines = [line.dropna() for _, line in grid.items()]
    by_number = np.array([np.interp(tokens, share * line.index, line) for line in lines])
    block_us = [np.interp(n, grid.columns, by_number[:, i]) for i, n in enumerate(met)]
    seconds = 1e-6 * np.array(block_us) * share / gpus
    if gpu and share > 1:
        pairs = shape.experts_per_token * tokens * (1 - 1 / share)
        moved_bytes = BYTES_PER_VALUE * (5 * shape.moe_intermediate + 2 * shape.hidden) * pairs
        seconds += moved_bytes / (MEMORY_EFFICIENCY * gpu.memory_bytes_per_s)
    return tokens, shape.expert_layers * seconds


def _with_stragglers(tables: Tables, path: Path) -> Tables:
    """Add the straggler tables: without prefill, the seconds that `nb` long sequences among n add, for each token by which they
    exceed the others; beside prefill, that one long sequence adds, for each token by which it exceeds the mean, or the
    prefill. Each is the median of the rows where they exceed the mean, or the prefill, by 1024 tokens or more.

    Rows have equal lengths (`t_mean_us`) and uneven ones of equal mean (`t_skew_us`): sums of three runs, where attention.csv
    has means; hence relative. Beside prefill, what several long ones add falls linearly to 0 where all are long, up to 32
    sequences. With more, it rises: equal lengths share reads in the cache there, as no real batch does; not used.
    """
    # sequences, long ones; chunk, its context; KV tokens
    axes = ("n", "nb", "pc", "kp", "kvs", "kv_big", "kv_mean")
    rows = read_csv(path, axes, ("t_mean_us", "t_skew_us"))
    beside = rows["pc"] > 0
    ahead = rows["kv_big"] - np.maximum(rows["kv_mean"], rows["pc"] + rows["kp"])
    rows = rows.assign(share=rows["nb"] / rows["n"], beside=beside, ahead=ahead)
    rows = rows[
        (ahead >= 1024) & (rows["n"] <= tables.decode_sequences[-1]) & (~beside | (rows["nb"] == 1))
    ]
    points = rows[["pc", "kp", "n", "kv_mean"]].to_numpy(float)
    even_s = np.array([interpolate4(*tables[4:9], tuple(point)) for point in points])
    more_s = even_s * (rows["t_skew_us"] / rows["t_mean_us"] - 1)
    alone_s = (more_s / (rows["kv_big"] - rows["kvs"]))[~rows["beside"]]
    shares = np.array([0.0, *sorted(rows["share"][~rows["beside"]].unique()), 1.0])
    by_share = alone_s.groupby([rows["n"], rows["share"]]).median().clip(lower=0.0).unstack()
    by_n = (more_s / rows["ahead"])[rows["beside"]].groupby(rows["n"]).median().clip(lower=0.0)
    both = by_n.index.intersection(by_share.index)
    if not both.size:
        raise InputError(
            f"{path}: at no n one long sequence (nb 1) without and beside prefill; profile it, or remove the file"
        )
    measured = [by_share.loc[n].dropna() for n in both]
    return tables._replace(
        straggler_sequences=both.to_numpy(float),
        straggler_shares=shares,
        straggler_s=np.array(
            [np.interp(shares, [*row.index, 1.0], [*row, 0.0]) for row in measured]
        ),
        straggler_beside_prefill_s=by_n[both].to_numpy(float),
    )


def read_meta(folder: Path, tp: int = 1) -> tuple[Path, dict[str, Any]]:
    """Return the folder of one rank and the content of meta.yaml, for a folder of the rank or of all ranks. Raises
    `InputError` for one that the profiler did not write."""
    rank = folder / f"tp{tp}" if (folder / "meta.yaml").exists() else folder
    path = rank.parent / "meta.yaml"
    profiled = sorted(one.name for one in path.parent.glob("tp*[0-9]"))
    refuse(
        (
            not folder.is_dir(),
            f"{folder}: no such folder; name the one that holds meta.yaml and tp1/ …",
        ),
        (
            not path.exists() and not re.fullmatch(r"tp\d+", folder.name),
            f"{folder}: has no meta.yaml and no tp1/ …; name the folder that holds them",
        ),
        (
            profiled and not rank.is_dir(),
            f"tp{tp} was not profiled; {folder} has {', '.join(profiled)}: --tp {' '.join(profiled[:1])[2:]}",
        ),
    )
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"{path}: cannot be read ({first_line(error)}); it stands above the tp folders"
        ) from error
    keys = ("model", "hardware", "attention_grid")
    lacking = [key for key in keys if not isinstance(meta, dict) or not meta.get(key)]
    if lacking:
        raise InputError(
            f"{path}: no {lacking[0]!r}; name a folder that LLMServingSim's profiler wrote"
        )
    return rank, dict(meta)


def read_csv(
    path: Path,
    axes: tuple[str, ...],
    times: tuple[str, ...] = ("time_us",),
    optional: tuple[str, ...] = (),
    remedy: str = "",
    also: tuple[str, ...] | None = None,
) -> pd.DataFrame:
    """Read a table, of which the `optional` axes may be missing; raise `InputError`, with the `remedy` (default: to profile),
    for missing columns, values that are not numbers of zero or more, rows longer than the header, and two times of one
    point. A table with a remedy of its own has values above 0, one with columns that it may `also` have no others."""
    too_long = f"{path}: row {{}} has {{}} fields, the header {{}}; put a field that contains commas in quotes"
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        if fields := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error)):
            raise InputError(too_long.format(fields[2], fields[3], fields[1])) from error
        raise InputError(
            f"{path}: cannot be read as CSV ({first_line(error)}); {remedy or 'profile it, too'}"
        ) from error
    if not isinstance(table.index, pd.RangeIndex):  # the first columns became it
        width = len(table.columns)
        raise InputError(too_long.format(2, width + table.index.nlevels, width))
    axes = (*axes, *(axis for axis in optional if axis in table))
    columns = [*axes, *times]
    if missing := [column for column in columns if column not in table]:
        raise InputError(
            f"{path}: no column {missing[0]!r}; found {', '.join(map(str, table.columns))} (commas divide columns); "
            f"{remedy or 'profile it again'}"
        )
    known = (*axes, *optional, *times, *(also or map(str, table)))
    unknown = [name for name in map(str, table) if name not in known]
    if unknown:
        raise InputError(
            f"{path}: column {unknown[0]!r} is not known{meant(unknown[0], known)}; known: {', '.join(dict.fromkeys(known))}"
        )
    numbers = table[[column for column in columns if column != "layer"]].apply(
        pd.to_numeric, errors="coerce"
    )
    bad = np.argwhere(~((numbers >= 0) & (numbers < np.inf)).to_numpy())
    if table.empty:
        raise InputError(f"{path}: no rows after the header; {remedy or 'profile it again'}")
    for row, i in bad[:1]:
        value = table[numbers.columns[i]].tolist()[row]
        words = "must be above 0: measure it" if remedy else "must be zero or more: profile it"
        raise InputError(
            f"{path}: row {row + 2}: {numbers.columns[i]} is {'blank' if pd.isna(value) else repr(value)}; it {words} again"
        )
    twice = np.flatnonzero(table.duplicated([*axes]) & (len(times) == 1))
    for row in twice[:1]:
        point = ", ".join(f"{axis} {table[axis][row]}" for axis in axes)
        raise InputError(f"{path}: row {row + 2}: {point} is there twice; keep one row")
    return table.assign(**numbers.astype(float))


def _summed(path: Path, axis: str, calls: dict[str, int]) -> tuple[Floats, Floats]:
    """Return the ticks of `axis`, and at each the seconds of all layer kinds, each times its calls in a pass."""
    rows = read_csv(path, ("layer", axis))
    grid = rows.pivot(index=axis, columns="layer", values="time_us")
    unknown = sorted({*map(str, grid)} - {*calls})
    absent = [kind for kind in calls if kind not in grid and kind != "qk_norm"]
    holes = [(kind, tick) for kind in grid for tick in grid.index[grid[kind].isna()]]
    refuse(
        (
            unknown,
            f"{path}: layer {' '.join(unknown[:1])!r} is not part of this transformer; known: {', '.join(calls)}",
        ),
        (absent, f"{path}: no rows of the layer {' '.join(absent[:1])!r}; profile it, too"),
        *(
            (
                True,
                f"{path}: layer {kind!r} has no row at {axis} {tick:.0f}; profile every kind at every tick",
            )
            for kind, tick in holes
        ),
    )
    seconds = 1e-6 * np.sum(
        [calls[str(kind)] * grid[kind].to_numpy(float) for kind in grid], axis=0
    )
    return grid.index.to_numpy(float), seconds


def _attention_grid(path: Path, meta: dict[str, Any]) -> tuple[list[Floats], Floats]:
    """Return the four axes and the µs of one layer. An absent part takes no time, whatever length stands beside it.

    More sequences than were measured beside a prefill chunk add to the most that were what they add without prefill.
    """
    measured = read_csv(path, ATTENTION_AXES).set_index([*ATTENTION_AXES])["time_us"]
    chunks, kv, decodes = (_declared_ticks(meta, key, path) for key in ("chunks", "kv", "n_decode"))
    axes = [chunks, kv, decodes, kv[1:]]
    c, k, n, d = (points.ravel() for points in np.meshgrid(*axes, indexing="ij"))
    rows = pd.MultiIndex.from_arrays([c, k * (c > 0), n, d * (n > 0)])
    values = np.reshape(measured.reindex(rows).to_list(), [axis.size for axis in axes])
    values[0, :, 0, :] = 0.0

    beside = ~np.isnan(values[1:]).all(axis=(0, 1, 3))
    largest = int(np.flatnonzero(beside)[-1]) if beside.any() else 0
    more = values[:1, :, largest + 1 :] - values[:1, :, largest : largest + 1]
    values[1:, :, largest + 1 :] = values[1:, :, largest : largest + 1] + more
    return axes, values


def _declared_ticks(meta: dict[str, Any], key: str, path: Path) -> Floats:
    """Return the ticks of a sweep that meta.yaml writes like "0, 16-2048 x2": zero, then 16 doubled up to 2048, which is a
    tick in any case; or as a list."""
    spec = meta["attention_grid"]
    text = str(spec.get(key, "")) if isinstance(spec, dict) else ""
    if re.fullmatch(r"\[0(, \d+)+\]", text):
        return np.unique(np.array(spec[key], float))
    match = re.fullmatch(r"0,\s*(\d+)-(\d+)\s*x(\d+(?:\.\d+)?)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) or float(match[3]) <= 1:
        raise InputError(
            f"{path.parents[1] / 'meta.yaml'}: attention_grid {key} is {text!r}; a sweep is written like '0, 16-2048 x2'"
        )
    first, last, factor = map(float, match.groups())
    steps = int(np.log(last / first) / np.log(factor) + 1e-9)
    return np.union1d(np.round(first * factor ** np.arange(steps + 1)), [0.0, last])
