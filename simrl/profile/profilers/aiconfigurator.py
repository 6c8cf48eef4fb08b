"""A profile derived from aiconfigurator's database of measured kernels (NVIDIA, Apache-2.0, PyPI `aiconfigurator`).

    dense(T)            every operation of a step that is neither attention nor the output head, at T tokens
    attention(…)        its context attention of one chunk + its generation attention of the decoding sequences
    sampled(S)          its output head at S positions: one a sequence, or every verified position of a draft

Invariant: on its grid points the profile gives aiconfigurator's own answer for a pure prefill or a pure decode step,
except for falling times, which are evened out. aiconfigurator has no measured mixed batches: it adds the two attentions,
and so does this.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, meant
from simrl.profile.model_config import CONFIG_KEYS
from simrl.profile.model_shape import ModelShape, require_dense
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.smoothing import moved, settled

Floats = NDArray[np.float64]
SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "rtxpro6000": "rtx_pro_6000_server"}
RESOLUTION_S = 2.0**-22  # 0.24 µs: far below the error of any kernel time, and the files stay small

# Held against serving_measurements of vLLM 0.12 by tests/test_profilers.py; nothing here is fitted to them.
ACCURACY = (
    "against 56 measured vLLM 0.12 runs of Qwen3-32B on H100 (tp 2 and 4, 8 to 128 concurrent), such profiles give a "
    "time per output token 10 % too low at the median, 1.5 ms a pass at 8 concurrent: most likely the host time left out"
)

# Dense and sampled times are cheap to store: eight points an octave. The attention grid is a product of four axes:
# doubling, closer where the times bend (decode: from latency to bandwidth; prefill: quadratic in long chunks).
MOST_TOKENS = 16384  # of a pass, and of its sampled positions: with drafts, all may be verified
PREFILL_TOKENS = (0, 1, 256, 512, 1024, 2048, 2896, 4096, 5792, 8192, 11585, 16384)
PREFILL_KV_TOKENS = (0, 512, 2048, 8192, 16384, 40960)
DECODE_SEQUENCES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
DECODE_KV_TOKENS = (16, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 40960)


class KernelTimes(NamedTuple):
    """Milliseconds of the operations of a pass, all layers in sum, on the ticks of this module.

    `dense_ms` has a row for each operation beside attention and the output head, by its name, at `tokens` of a pass;
    `sampled_ms` is the head at as many positions; `prefill_ms` has the shape (PREFILL_TOKENS, PREFILL_KV_TOKENS),
    `decode_ms` (DECODE_SEQUENCES, DECODE_KV_TOKENS).
    """

    tokens: Floats
    dense_ms: dict[str, Floats]
    sampled_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats


def derive(
    shape: ModelShape, gpu: str, tp: int = 1, between_passes_s: float = 0.0, backend: str = "vllm"
) -> TableProfile:
    """Return the profile of `shape` in bfloat16 on `tp` GPUs of the kind `gpu` (one of `SYSTEMS`) under `backend`.

    aiconfigurator counts GPU kernels alone: `between_passes_s` is the host time that they do not hide, to be measured;
    its default 0 adds nothing unmeasured. The model goes in as a config.json made from `shape`, so that nothing is fetched.
    Raises `InputError` if the package is missing or has no data for the combination.
    """
    require_dense(shape, "aiconfigurator")
    times = kernel_times(engine_of(shape, gpu, tp, backend), shape.name)
    return profile_of(times, shape.name, gpu, tp, source_of(gpu, backend), between_passes_s, (ACCURACY,))


def kernel_times(engine: Any, model: str) -> KernelTimes:
    """Return the kernel times of an `EngineHandle` of `model`."""
    names = [name for name, *_ in engine.decode_step_per_op(1, 2, 2)]
    attention = [i for i, name in enumerate(names) if name.endswith("_attention")]
    head = [i for i, name in enumerate(names) if "logits" in name]
    by_place = [name for name, *_ in engine.evaluate_generation_ops(range(len(names)), batch_size=1, s=2)]
    if len(attention) != 1 or len(head) != 1 or by_place != names:  # two of one name are summed in `names`
        raise InputError(
            f"aiconfigurator: {model} has the operations {', '.join(names)}, not one attention and one head"
        )
    others = [i for i in range(len(names)) if i not in (*attention, *head)]

    def decode_ms(operations: list[int], sequences: float, kv_tokens: float) -> list[float]:
        rows = engine.evaluate_generation_ops(operations, batch_size=int(sequences), s=int(kv_tokens))
        return [float(milliseconds) for _, milliseconds, *_ in rows]

    def prefill_ms(chunk: float, kv_tokens: float) -> float:
        rows = engine.evaluate_context_ops(attention, batch_size=1, s=int(chunk), prefix=int(kv_tokens))
        return float(sum(milliseconds for _, milliseconds, *_ in rows))

    tokens = _ticks(MOST_TOKENS)
    # Its operations outside attention cost equal times in a context step and in a generation step of equally many tokens.
    dense = np.array([decode_ms(others, t, 1) for t in tokens])
    return KernelTimes(
        tokens=tokens,
        dense_ms={names[i].removeprefix("generation_"): dense[:, row] for row, i in enumerate(others)},
        sampled_ms=np.array([decode_ms(head, s, 1)[0] for s in tokens]),
        prefill_ms=np.array([[prefill_ms(c, k) if c else 0.0 for k in PREFILL_KV_TOKENS] for c in PREFILL_TOKENS]),
        decode_ms=np.array(
            [[decode_ms(attention, n, k)[0] if n else 0.0 for k in DECODE_KV_TOKENS] for n in DECODE_SEQUENCES]
        ),
    )


def profile_of(
    times: KernelTimes,
    model: str,
    gpu: str,
    tp: int,
    source: str,
    between_passes_s: float = 0.0,
    more_notes: tuple[str, ...] = (),
) -> TableProfile:
    """Return the profile with these times, evened out where they fall."""
    chunks, cached = np.array(PREFILL_TOKENS, float), np.array(PREFILL_KV_TOKENS, float)
    decodes, kv = np.array(DECODE_SEQUENCES, float), np.array(DECODE_KV_TOKENS, float)
    dense = 1e-3 * np.sum(list(times.dense_ms.values()), axis=0)
    sampled, decode, prefill = (1e-3 * ms for ms in (times.sampled_ms, times.decode_ms, times.prefill_ms))
    # The formula that scales the measured, context-free prefill makes short chunks faster after some context: those
    # times are lifted to the measured one.
    lifted = np.maximum.accumulate(prefill, axis=1)

    even_dense, even_sampled, even_decode, even_prefill = (
        np.round(settled(seconds) / RESOLUTION_S) * RESOLUTION_S for seconds in (dense, sampled, decode, lifted)
    )
    tables = Tables(
        dense_tokens=times.tokens,
        dense_s=even_dense,
        sampled_sequences=times.tokens,
        sampled_s=even_sampled,
        prefill_tokens=chunks,
        prefill_kv_tokens=cached,
        decode_sequences=decodes,
        decode_kv_tokens=kv,
        attention_s=even_prefill[:, :, None, None] + even_decode[None, None, :, :],
        between_passes_s=between_passes_s,
    )
    notes = [
        "GPU kernels only: no host time, no sampler beyond the output head's matrix product",
        "mixed passes: context and generation attention added, no measured mixed batches",
        f"falling times evened out: dense {moved(dense, even_dense)}; sampled {moved(sampled, even_sampled)}; "
        f"decode attention {moved(decode, even_decode)}; prefill attention {moved(prefill, even_prefill)}",
        *more_notes,
    ]
    metadata = ProfileMetadata(model=model, gpu=gpu, tp=tp, kind="derived", source=source, notes="; ".join(notes))
    return TableProfile(tables, metadata, origin=f"aiconfigurator {model} {gpu} tp {tp}")


def source_of(gpu: str, backend: str) -> str:
    """Return the package and the part of its database, with their versions."""
    from aiconfigurator_core.sdk import perf_database

    database = perf_database.resolve_query_version(SYSTEMS[gpu], backend, "current")
    return (
        f"aiconfigurator {importlib.metadata.version('aiconfigurator-core')}, measured kernels of "
        f"{SYSTEMS[gpu]} under {backend} {database}, bfloat16"
    )


def _ticks(most: int) -> Floats:
    """Return whole numbers from 1 to `most`, eight an octave."""
    return np.unique(np.round(2 ** np.arange(0, np.log2(most) + 1 / 16, 1 / 8)))


def engine_of(shape: ModelShape, gpu: str, tp: int, backend: str) -> Any:
    """Return aiconfigurator's compiled model, an `EngineHandle`. Raises `InputError` if it has no data for it."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise InputError("aiconfigurator is not installed; pip install 'simrl[aiconfigurator]'") from error
    if gpu not in SYSTEMS:
        raise InputError(
            f"aiconfigurator: gpu {gpu!r} is unknown{meant(gpu, SYSTEMS)}; choose one of {', '.join(SYSTEMS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_hugging_face_config(shape)))
        try:
            return EngineHandle.compile(folder, SYSTEMS[gpu], backend, tp_size=tp, nextn=0)
        except Exception as error:  # its layers raise anything from AssertionError to a Rust panic's ValueError
            wanted = f"{shape.name} on {tp} {gpu} under {backend}"
            raise InputError(f"aiconfigurator: no {wanted}: {first_line(error)}") from error


def _hugging_face_config(shape: ModelShape) -> dict[str, object]:
    """Return the keys of a config.json that aiconfigurator reads.

    Qwen3 differs from Llama by norms of queries and keys only.
    """
    qwen3 = shape.name.startswith("qwen3")
    return {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen3 else "llama",
        **{key: getattr(shape, field) for field, key in CONFIG_KEYS.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": DECODE_KV_TOKENS[-1],
        "torch_dtype": "bfloat16",
    }
