"""A profile composed of measured kernel times, as LLMServingSim's profiler writes them (casys-kaist/LLMServingSim).

    dense(tokens)        = embedding + layers × (2 layernorm + qkv_proj … down_proj) + final_layernorm + all-reduces
    attention(…)         = layers × the joint time of one prefill chunk beside decoding sequences
    straggler(…)         = layers × what sequences four times as long add to that, by their tokens (skew.csv, if it is there)
    sampled(sequences)   = lm_head + sampler; up to the largest batch that was measured, which for verifying drafts (a row a
                           verified position) may be too few: `require_covers` says so

Invariant: times are sums of the table's rows, times counts that the model's shape gives; nothing is fitted to a run. What one
folder holds is what one rank of a tensor-parallel group does, without communication: that comes from the `Link`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from simrl.errors import InputError, first_line
from simrl.profile.interpolation import interpolate4
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.smoothing import moved, settled
from simrl.profile.roofline import Link, pass_all_reduces_s

Floats = NDArray[np.float64]
ONCE_A_PASS = ("embedding", "final_layernorm")
# How often a decoder layer runs each kind. A `layernorm` row is one of the two norms of a layer (before attention and
# before the MLP: the profiler divides by the calls); `qk_norm` is one row for both, and models without it have none.
A_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
OPTIONAL = ("qk_norm",)
A_SEQUENCE = ("lm_head", "sampler")
SKEW_AXES = (
    "n",
    "nb",
    "pc",
    "kp",
    "kvs",
    "kv_big",
    "kv_mean",
)  # sequences, long ones; chunk, its context; KV tokens
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def compose_kernel_tables(
    folder: str | Path, shape: ModelShape, tp: int, link: Link | None, between_passes_s: float
) -> TableProfile:
    """Return the profile of `shape` from a folder `tp<N>` (dense.csv, per_sequence.csv, attention.csv; µs) and its meta.yaml.

    `link` joins the ranks and is needed where `tp` > 1: two all-reduces a layer and one for the embedding, as
    LLMServingSim counts them. The gathering of the vocabulary-parallel logits, which vLLM does and LLMServingSim leaves
    out, is not modelled. The pause `between_passes_s` is not in the tables: measure it.
    Attention is read on the grid that meta.yaml declares; rows beside it (a finer sweep that is no full grid) are left
    out. Raises `InputError` for missing rows, holes in that grid, and tables of another model or tensor-parallel size.
    """
    folder = Path(folder)
    meta = _read_meta(folder.parent / "meta.yaml")
    profiled_model = str(meta["model"])
    if profiled_model.split("/")[-1].lower() != shape.name:
        raise InputError(
            f"{folder}: profiled {profiled_model}, asked for {shape.name}; name that model's folder"
        )
    named = re.fullmatch(r"tp(\d+)", folder.name)
    if named and int(named[1]) != tp:
        raise InputError(
            f"{folder}: one rank of {named[1]}, asked for tp {tp}; name the folder tp{tp}"
        )
    if tp > 1 and link is None:
        raise InputError(
            f"{folder}: tp {tp} needs a link (bandwidth, latency): the tables hold no all-reduces"
        )

    tokens, kinds = _by_kind(folder / "dense.csv", "tokens", (*ONCE_A_PASS, *A_LAYER), OPTIONAL)
    calls = {kind: 1 if kind in ONCE_A_PASS else shape.layers * A_LAYER[kind] for kind in kinds}
    dense: Floats = 1e-6 * np.sum(
        [calls[kind] * microseconds for kind, microseconds in kinds.items()], axis=0
    )
    sequences, heads = _by_kind(folder / "per_sequence.csv", "sequences", A_SEQUENCE)
    sampled: Floats = 1e-6 * np.sum(list(heads.values()), axis=0)
    axes, attention = _attention_grid(folder / "attention.csv", meta)
    attention = 1e-6 * shape.layers * attention

    tables = Tables(
        dense_tokens=tokens,
        dense_s=settled(dense),
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
        f"falling noise evened out: dense {moved(dense, tables.dense_s)}; "
        f"sampled {moved(sampled, tables.sampled_s)}; attention {moved(attention, tables.attention_s)}",
        "chunks between 1 and 15 tokens are interpolated towards a pass without prefill, another kernel: too fast",
    ]
    if link is not None and tp > 1:
        tables = tables._replace(
            dense_s=tables.dense_s + pass_all_reduces_s(shape, tokens, tp, link)
        )
        notes.append(
            f"ring collectives over {link.bytes_per_s / 1e9:.2f} GB/s and {link.latency_s * 1e6:.1f} µs "
            f"{'a step' if link.latency_each_step else 'a collective'}"
        )
    steps, dense = _as_steps(tables.dense_tokens, tables.dense_s)
    tables = tables._replace(dense_tokens=steps, dense_s=dense)
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=str(meta["hardware"]).lower(),
        tp=tp,
        kind="derived",
        source=f"kernel times of LLMServingSim's profiler {meta.get('profiler_version', '')}, "
        f"vLLM {meta.get('vllm_version', '')} on {meta.get('gpu', meta['hardware'])}",
        created=str(meta.get("profiled_at", "")),
        licence="MIT",
        notes="; ".join(notes),
    )
    return TableProfile(tables, metadata, origin=str(folder))


def _as_steps(ticks: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Give every point between two ticks the time of the upper tick: matrix kernels compute whole tiles, and a batch is
    padded to the next size that has a CUDA graph. (Ticks are whole numbers of tokens.)"""
    after = ticks[:-1][np.diff(ticks) > 1] + 1
    steps = np.union1d(ticks, after)
    return steps, values[np.searchsorted(ticks, steps)]


def _with_stragglers(tables: Tables, path: Path) -> Tables:
    """Add the straggler tables: without prefill, the seconds that `nb` long sequences among n add, for each token by which they
    exceed the others; beside prefill, that one long sequence adds, for each token by which it exceeds the mean, or the
    prefill. Each is the median of the rows where they exceed the mean, or the prefill, by 1024 tokens or more.

    Rows have equal lengths (`t_mean_us`) and uneven ones of equal mean (`t_skew_us`): sums of three runs, where attention.csv
    has means; hence relative. Beside prefill, what several long ones add falls linearly to 0 where all are long, up to 32
    sequences. With more, it rises: equal lengths share reads in the cache there, as no real batch does; not used.
    """
    rows = _read_csv(path, (*SKEW_AXES, "t_mean_us", "t_skew_us"))
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


def _read_meta(path: Path) -> dict[str, object]:
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"{path}: cannot be read ({first_line(error)}); it stands above the tp folders"
        ) from error
    found = {str(key): value for key, value in meta.items()} if isinstance(meta, dict) else {}
    for key in ("model", "hardware", "attention_grid"):
        if key not in found:
            raise InputError(
                f"{path}: no {key!r}; name a folder that LLMServingSim's profiler wrote"
            )
    return found


def _read_csv(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """Read a table; raise `InputError` for missing columns and values that are not numbers of zero or more."""
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as CSV ({first_line(error)})") from error
    for column in columns:
        if column not in table:
            raise InputError(
                f"{path}: no column {column!r}; found {', '.join(map(str, table.columns))}"
            )
        if column == "layer":
            continue
        numbers = pd.to_numeric(table[column], errors="coerce")
        bad = ~(numbers >= 0)
        if bad.any():
            row = int(bad.to_numpy().argmax())
            raise InputError(
                f"{path}: row {row + 2}: {column} is {table[column][row]!r}; it must be zero or more"
            )
        table[column] = numbers.astype(float)
    return table


def _by_kind(
    path: Path, axis: str, kinds: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[Floats, dict[str, Floats]]:
    """Return the ticks of `axis`, and for each layer kind the µs of one call at every tick."""
    rows = _read_csv(path, ("layer", axis, "time_us"))
    unknown = sorted(set(rows["layer"]) - set(kinds))
    if unknown:
        raise InputError(
            f"{path}: layer {unknown[0]!r} is not part of a dense transformer; known: {', '.join(kinds)}"
        )
    grid = rows.pivot_table(index=axis, columns="layer", values="time_us", aggfunc="mean")
    for kind in kinds:
        if kind not in grid and kind not in optional:
            raise InputError(f"{path}: no rows of the layer {kind!r}; profile it, too")
        if kind in grid and grid[kind].isna().any():
            tick = grid.index[grid[kind].isna()][0]
            raise InputError(
                f"{path}: layer {kind!r} has no row at {axis} {tick:.0f}; profile every kind at every tick"
            )
    return grid.index.to_numpy(float), {str(kind): grid[kind].to_numpy(float) for kind in grid}


def _attention_grid(path: Path, meta: dict[str, object]) -> tuple[list[Floats], Floats]:
    """Return the four axes and the µs of one layer. An absent part takes no time, whatever length stands beside it.

    More sequences than were measured beside a prefill chunk add to the most that were what they add without prefill.
    """
    rows = _read_csv(path, (*ATTENTION_AXES, "time_us"))
    chunks, kv, decodes = (_declared_ticks(meta, key, path) for key in ("chunks", "kv", "n_decode"))
    axes = [chunks, kv, decodes, kv[1:]]

    on_grid = np.logical_and.reduce(
        [np.isin(rows[name], [0.0, *axis]) for axis, name in zip(axes, ATTENTION_AXES, strict=True)]
    )
    rows = rows[on_grid & ((rows["n_decode"] == 0) | (rows["kv_decode"] > 0))]
    c, k, n, d = (
        np.searchsorted(axis, rows[name]) for axis, name in zip(axes, ATTENTION_AXES, strict=True)
    )
    microseconds = rows["time_us"].to_numpy()
    prefill, decode = (rows["prefill_chunk"] > 0).to_numpy(), (rows["n_decode"] > 0).to_numpy()
    both, prefill_alone, decode_alone = prefill & decode, prefill & ~decode, ~prefill & decode

    values = np.full([axis.size for axis in axes], np.nan)
    values[0, :, 0, :] = 0.0
    values[c[both], k[both], n[both], d[both]] = microseconds[both]
    values[c[prefill_alone], k[prefill_alone], 0, :] = microseconds[prefill_alone, None]
    values[0, :, n[decode_alone], d[decode_alone]] = microseconds[decode_alone, None]

    largest = int(np.flatnonzero(np.isin(decodes, rows["n_decode"][both]))[-1])
    more = values[:1, :, largest + 1 :] - values[:1, :, largest : largest + 1]
    values[1:, :, largest + 1 :] = values[1:, :, largest : largest + 1] + more
    return axes, values


def _declared_ticks(meta: dict[str, object], key: str, path: Path) -> Floats:
    """Return the ticks of a sweep that meta.yaml writes like "0, 16-2048 x2": zero, then 16 doubled up to 2048."""
    spec = meta["attention_grid"]
    text = str(spec.get(key, "")) if isinstance(spec, dict) else ""
    match = re.fullmatch(r"0,\s*(\d+)-(\d+)\s*x([\d.]+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) or float(match[3]) <= 1:
        meta_path = path.parents[1] / "meta.yaml"
        raise InputError(
            f"{meta_path}: attention_grid {key} is {text!r}; a sweep is written like '0, 16-2048 x2'"
        )
    first, last, factor = float(match[1]), float(match[2]), float(match[3])
    steps = int(np.log(last / first) / np.log(factor) + 1e-9)
    return np.array([0.0, *np.round(first * factor ** np.arange(steps + 1))])


def read_link(serving_config: str | Path) -> Link:
    """Return the link of an LLMServingSim cluster config: `link_bw` [GiB/s] and `link_latency` [ns].

    Its network backend (ASTRA-Sim, analytical) counts a bandwidth in 2^30 bytes and pays the latency at every step of
    the ring. Raises `InputError` for a file without those numbers.
    """
    path = Path(serving_config)
    try:
        config = json.loads(path.read_text())
        return Link(
            bytes_per_s=float(config["link_bw"]) * 2**30,
            latency_s=float(config["link_latency"]) * 1e-9,
        )
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); name an LLMServingSim cluster config"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: no numbers 'link_bw' [GiB/s] and 'link_latency' [ns] ({first_line(error)}); "
            "name an LLMServingSim cluster config"
        ) from error
