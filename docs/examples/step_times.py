"""A profiler: a profile from a CSV of step times that you measured yourself.

Columns phase, n, context_tokens, seconds. "decode": a pass in which n sequences of context_tokens each gain one token; a grid
of n by context. "prefill": a pass over one prompt of n tokens, context 0.

A pass of decoding at the shortest context is taken for what n tokens cost without attention, and what it takes longer at longer
contexts for attention. Prompts are taken at their measured time, which has their attention in it.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from simrl.errors import InputError
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.smoothing import settled


def step_times_profile(
    shape: ModelShape, gpu: Gpu, tp: int, table: Path | None = None
) -> TableProfile:
    """The profile of the times in `table`. Raises `InputError` for a file that has other columns, or holes in its grid."""
    if table is None:
        raise InputError(
            "step_times: no table; give table=FILE.csv with the columns phase, n, context_tokens, seconds"
        )
    try:
        rows = pd.read_csv(table)
        decode = rows[rows.phase == "decode"].pivot(
            index="n", columns="context_tokens", values="seconds"
        )
        prefill = rows[rows.phase == "prefill"].set_index("n")["seconds"].sort_index()
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(
            f"{table}: {error}; give a CSV with the columns phase, n, context_tokens, seconds"
        ) from error
    if decode.empty or prefill.empty or decode.isna().any(axis=None):
        raise InputError(
            f"{table}: the decode times are no full grid of n by context_tokens, or there are no prefill times"
        )
    without_attention = pd.concat([decode.iloc[:, 0], prefill[prefill.index > decode.index[-1]]])
    attention = settled((decode - decode.iloc[:, [0]].to_numpy()).clip(lower=0).to_numpy())
    sequences, contexts = decode.index.to_numpy(float), decode.columns.to_numpy(float)
    longest = contexts[-1]
    tables = Tables(
        dense_tokens=without_attention.index.to_numpy(float),
        dense_s=settled(without_attention.to_numpy(float)),
        sampled_sequences=np.array(
            [0.0, without_attention.index[-1]]
        ),  # the output head is in the passes measured
        sampled_s=np.zeros(2),
        prefill_tokens=np.array([0.0, prefill.index[-1]]),
        prefill_kv_tokens=np.array([0.0, longest]),
        decode_sequences=np.r_[0.0, sequences],
        decode_kv_tokens=np.r_[0.0, contexts[1:]],
        attention_s=np.zeros((2, 2, 1, 1)) + np.pad(np.delete(attention, 0, 1), ((1, 0), (1, 0))),
        between_passes_s=0.0,
    )
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=gpu.name,
        tp=tp,
        kind="measured",
        source=f"step times in {Path(table).name}",
        notes="whole passes; attention of prompts within their passes, without the attention of later chunks on earlier ones",
    )
    return TableProfile(tables, metadata, origin=str(table))
