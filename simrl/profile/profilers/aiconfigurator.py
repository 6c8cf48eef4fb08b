"""A profile derived from aiconfigurator's database of measured kernels (NVIDIA, Apache-2.0, PyPI `aiconfigurator`), or from
the database of its successor `aisimulate`, which has the same interface and newer kernels.

    dense(T)            every operation of a step that is neither attention, experts nor the output head, at T tokens
    attention(…)        its context attention of one chunk + its generation attention of the decoding sequences
    sampled(S)          its output head at S positions: one a sequence, or every verified position of a draft
    experts(N)          its routed experts and the exchange before and after them, at N tokens of all attention ranks

Invariant: on its grid points the profile gives aiconfigurator's own answer for a pure prefill or a pure decode step,
except for norms of queries and keys (`_norms_apart`), for KV caches that it timed in the GPU's level 2 (`_from_memory`), and
for falling times, which are evened out. aiconfigurator has no
measured mixed batches: it adds the two attentions, and so does this.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from importlib import import_module
from itertools import product
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simrl.errors import InputError, first_line
from simrl.extensions import install_command
from simrl.files import temporary_folder
from simrl.profile.hardware import GPUS
from simrl.profile.model_config import CONFIG_KEYS
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import FP8_EXPERTS, KV_SHARE
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.products import even_products
from simrl.profile.profilers.setups import (
    BUNDLED,
    ONE_GPU,
    PACKAGES,
    PRECISIONS,
    ROUTINGS,
    SYSTEMS,
    EngineSetup,
    MissingKernelsError,
    is_bundled,
    require_possible,
)
from simrl.profile.profilers.smoothing import Floats, moved, settled
from simrl.profile.roofline import MEMORY_EFFICIENCY, states_s

KV_PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8"}
SDK = ("config_builders", "models", "perf_database", "engine")
# Kinds of operations that depend on sequences, not on tokens alone: attention (of MLA with its
# projections, which were measured together), and layers with a fixed state.
STATE_KERNELS = ("mamba_conv1d", "mamba_ssm")
SEQUENCE_KERNELS = ("GenerationAttention", "ContextAttention", "Fallback", "Gdn", "Mamba2", "Kda")
NODE_GPUS = 8  # of the systems on which its exchanges were measured
# Megabytes of level 2, by NVIDIA's architecture papers; of B200 by its tuning guide. A kernel that is timed over and over finds
# there what a pass of many layers has to read from memory.
CACHE_MB = {"a100": 40, "h100": 50, "h200": 50, "b200": 126, "gb200": 126, "rtxpro6000": 128}
RESOLUTION_S = 2.0**-22  # 0.24 µs: far below the error of any kernel time, and the files stay small

# Held against serving_measurements of vLLM 0.12 by tests/profile/test_profilers.py; nothing here is
# fitted to them.
ACCURACY = (
    "against 56 measured vLLM 0.12 runs of Qwen3-32B on H100 (tp 2 and 4, 8 to 128 concurrent), such profiles give a "
    "time per output token 12 % too low at the median, 1.5 ms a pass at 8 concurrent: most likely the host time left out"
)

# Dense and sampled times are cheap to store: eight points an octave. The attention grid is a
# product of four axes: doubling, closer where the times bend (decode: from latency to bandwidth;
# prefill: quadratic in long chunks).
MOST_TOKENS = 16384  # of a pass, and of its sampled positions: with drafts, all may be verified
PREFILL_TOKENS = (0, 1, 256, 512, 1024, 2048, 2896, 4096, 5792, 8192, 11585, 16384)
PREFILL_KV_TOKENS = (0, 512, 2048, 8192, 16384, 40960)
DECODE_SEQUENCES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
DECODE_KV_TOKENS = (16, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 40960)


class Compiled(NamedTuple):
    """aiconfigurator's compiled model, an `EngineHandle`, and its operations in a step of decoding
    and of prefill: their kinds and names."""

    handle: Any
    decoding: list[tuple[str, str]]
    prefill: list[tuple[str, str]]


class KernelTimes(NamedTuple):
    """Milliseconds of the operations of a pass, all layers in sum, on the ticks of this module.

    `dense_ms` has a row for each operation beside attention, experts and the output head, by its
    name, at `tokens` of a pass of one attention rank, `experts_ms` those of the routed experts and
    their exchange, all ranks having as many tokens; `sampled_ms` is the head at as many positions;
    `prefill_ms` has the shape (PREFILL_TOKENS, PREFILL_KV_TOKENS), `decode_ms` (DECODE_SEQUENCES,
    DECODE_KV_TOKENS).
    """

    tokens: Floats
    dense_ms: dict[str, Floats]
    experts_ms: dict[str, Floats]
    sampled_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    # Operations at the source's speed of light ("sol"): bytes or products over peak rates.
    unmeasured: tuple[str, ...] = ()


def derive(
    shape: ModelShape, gpu: str, setup: EngineSetup = ONE_GPU, between_passes_s: float = 0.0
) -> TableProfile:
    """Return the profile of `shape` on GPUs of the kind `gpu` (one of `SYSTEMS`).

    aiconfigurator counts GPU kernels alone: `between_passes_s` is the host time that they do not
    hide, to be measured; its default 0 adds nothing unmeasured. The model goes in as a config.json
    made from `shape`, so that nothing is fetched. Raises `InputError` if the package is missing or
    has no data for the combination.
    """
    try:
        times = times_of(shape, gpu, setup)
    except InputError:
        raise
    except (
        Exception
    ) as error:  # a row that its tables lack shows when it is looked up, as in `engine_of`
        raise _missing(shape, gpu, setup, error) from error
    dense = not shape.experts and setup.precision == setup.kv_precision == "bf16"
    notes = (*expert_notes(shape, setup), *((ACCURACY,) if dense else ()))
    return profile_of(times, shape.name, gpu, setup, source_of(gpu, setup), between_passes_s, notes)


def expert_notes(shape: ModelShape, setup: EngineSetup) -> tuple[str, ...]:
    """Return what a profile of a mixture of experts says about them."""
    if not shape.experts:
        return ()
    exchange = (
        "all-gather and reduce-scatter over the attention ranks" if setup.dp > 1 else "all-reduces"
    )
    if setup.tp * setup.dp > NODE_GPUS:
        exchange += ", from link rates: nobody measured it beyond a node (latency of a step as among 8 GPUs)"
    routed = f"experts with routing {setup.routing}, on tokens of {setup.dp} attention ranks; exchange by {exchange}"
    return (routed, FP8_EXPERTS) if setup.precision == "fp8" else (routed,)


def times_of(shape: ModelShape, gpu: str, setup: EngineSetup) -> KernelTimes:
    """Return the kernel times of `shape` on GPUs of a kind; collectives of a mixture of experts
    beyond a node from link rates.

    An all-reduce is a reduce-scatter and an all-gather, each a ring whose steps have the latency of
    the measured one of 8 GPUs.
    """
    gpus = setup.tp * setup.dp
    beyond = bool(shape.experts) and gpus > NODE_GPUS
    timed = kernel_times(engine_of(shape, gpu, setup, apart=beyond), shape.name)
    times = _from_memory(_with_states(timed, shape, gpu, setup), shape, gpu, setup)
    if not beyond:
        return times
    node = setup._replace(tp=1, dp=NODE_GPUS, ep=NODE_GPUS)
    rows = engine_of(shape, gpu, node, apart=True).handle.decode_step_per_op(1, 2, 2)
    gathered_ms = sum(ms for name, ms, *_ in rows if name.endswith("moe_pre_dispatch"))
    step_ms = gathered_ms / (NODE_GPUS - 1)  # of the rings of all layers

    def ring_ms(tokens: Floats, ranks: int) -> Floats:
        received = (
            2.0 * shape.layers * shape.hidden * tokens * (ranks - 1) / ranks
        )  # bytes in bfloat16
        return step_ms * (ranks - 1) + 1e3 * received / GPUS[gpu].bytes_per_s_among(gpus)

    reduced = np.zeros_like(times.tokens)
    if setup.tp > NODE_GPUS:
        reduced = 2 * ring_ms(times.tokens, setup.tp)
    elif setup.tp > 1:
        alone = kernel_times(
            engine_of(shape, gpu, setup._replace(dp=1, ep=setup.tp), apart=True), shape.name
        )
        reduced = (
            sum(ms for name, ms in alone.experts_ms.items() if name.endswith("moe_pre_dispatch"))
            + reduced
        )
    exchange = (
        ring_ms(times.tokens * setup.dp, setup.dp) if setup.dp > 1 else np.zeros_like(reduced)
    )
    experts = {name: ms for name, ms in times.experts_ms.items() if not name.endswith("_dispatch")}
    experts |= {
        "moe_pre_dispatch": reduced + exchange,
        "moe_post_dispatch": exchange if setup.dp > 1 else reduced,
    }
    embedding = {"embedding_ar": reduced / shape.layers} if setup.tp > NODE_GPUS else {}
    return times._replace(experts_ms=experts, dense_ms=times.dense_ms | embedding)


def _with_states(
    times: KernelTimes, shape: ModelShape, gpu: str, setup: EngineSetup
) -> KernelTimes:
    """Return the times with the states of linear layers read and written by each sequence of a
    pass, at the roofline's rate, where their kernels were not measured: the source's speed of light
    moves activations alone."""
    if not set(STATE_KERNELS) & set(times.unmeasured):
        return times
    each_ms = 1e3 * states_s(shape, GPUS[gpu], setup.tp)
    return times._replace(
        decode_ms=times.decode_ms + each_ms * np.array(DECODE_SEQUENCES)[:, None],
        prefill_ms=times.prefill_ms + each_ms * (np.array(PREFILL_TOKENS) > 0)[:, None],
    )


def _from_memory(
    times: KernelTimes, shape: ModelShape, gpu: str, setup: EngineSetup
) -> KernelTimes:
    """Return the times with the KV cache that decoding reads at the rate of the largest one, after what as many sequences of
    `DECODE_KV_TOKENS[0]` take: a layer's that is up to twice as large as the GPU's level 2 was timed from there, in part.

    Without it, decode attention of two models on RTX PRO 6000 is up to 47 % too fast: `experiments/derive_rtx.md`.
    """
    if shape.kv_lora_rank or shape.linear_layers:  # timed with projections, or few of the layers
        return times
    sequences, length = np.ix_(np.array(DECODE_SEQUENCES, float), np.array(DECODE_KV_TOKENS, float))
    kept = shape.layer_kv_bytes * KV_SHARE[setup.kv_precision] / min(setup.tp, shape.kv_heads)
    fits = sequences * length * kept <= 2e6 * CACHE_MB.get(gpu, 0)
    read = sequences * shape.read_tokens(length)
    short, largest = times.decode_ms[:, :1], times.decode_ms[-1]
    token_ms = (largest[-1] - largest[0]) / (read[-1, -1] - read[-1, 0])
    streamed = np.where(fits, short + token_ms * (read - read[:, :1]), 0.0)
    return times._replace(decode_ms=np.maximum(times.decode_ms, streamed))


def kernel_times(engine: Compiled, model: str) -> KernelTimes:
    """Return the kernel times of a compiled model."""
    names = [name for _, name in engine.decoding]
    attention = _places(engine.decoding, SEQUENCE_KERNELS)
    context = _places(engine.prefill, SEQUENCE_KERNELS)
    head = [i for i, name in enumerate(names) if "logits" in name]
    experts = [i for i, name in enumerate(names) if "moe" in name]
    if not attention or not context or len(head) != 1:
        raise InputError(
            f"aiconfigurator: {model} has the operations {', '.join(names)}: no attention, or not one head"
        )
    others = [i for i in range(len(names)) if i not in (*attention, *head, *experts)]

    unmeasured: dict[str, None] = {}

    def milliseconds(rows: list[tuple[str, float, float, str]]) -> list[float]:
        unmeasured.update(dict.fromkeys(_plain(name) for name, _, _, tag in rows if tag == "sol"))
        return [float(ms) for _, ms, _, _ in rows]

    def decode_ms(operations: list[int], sequences: float, kv_tokens: float) -> list[float]:
        return milliseconds(
            engine.handle.evaluate_generation_ops(
                operations, batch_size=int(sequences), s=int(kv_tokens)
            )
        )

    def prefill_ms(chunk: float, kv_tokens: float) -> float:
        return sum(
            milliseconds(
                engine.handle.evaluate_context_ops(
                    context, batch_size=1, s=int(chunk), prefix=int(kv_tokens)
                )
            )
        )

    tokens = np.unique(
        np.round(2 ** np.arange(0, np.log2(MOST_TOKENS) + 1 / 16, 1 / 8))
    )  # eight an octave

    def by_operation(operations: list[int]) -> dict[str, Floats]:
        # Operations outside attention cost equal times in a context step and in a generation step
        # of equally many tokens.
        rows = np.array([decode_ms(operations, t, 1) for t in tokens])
        return {_plain(names[i]): rows[:, row] for row, i in enumerate(operations)}

    times = KernelTimes(
        tokens=tokens,
        dense_ms=by_operation(others),
        experts_ms=by_operation(experts) if experts else {},
        sampled_ms=np.array([decode_ms(head, s, 1)[0] for s in tokens]),
        prefill_ms=np.array(
            [[prefill_ms(c, k) if c else 0.0 for k in PREFILL_KV_TOKENS] for c in PREFILL_TOKENS]
        ),
        decode_ms=np.array(
            [
                [sum(decode_ms(attention, n, k)) if n else 0.0 for k in DECODE_KV_TOKENS]
                for n in DECODE_SEQUENCES
            ]
        ),
    )
    of_sequences = {_plain(engine.decoding[i][1]) for i in attention} | {
        _plain(engine.prefill[i][1]) for i in context
    }
    if unpriced := of_sequences & unmeasured.keys() - set(STATE_KERNELS):
        raise MissingKernelsError(
            f"aiconfigurator: the kernel {min(unpriced)} of {model} was not measured, nor is its work known"
        )
    return times._replace(unmeasured=tuple(unmeasured))


def _plain(name: str) -> str:
    """Return an operation's name without its phase."""
    return name.removeprefix("generation_").removeprefix("context_")


def _places(operations: list[tuple[str, str]], kinds: tuple[str, ...]) -> list[int]:
    return [i for i, (kind, _) in enumerate(operations) if kind.startswith(kinds)]


def profile_of(
    times: KernelTimes,
    model: str,
    gpu: str,
    setup: EngineSetup,
    source: str,
    between_passes_s: float = 0.0,
    more_notes: tuple[str, ...] = (),
) -> TableProfile:
    """Return the profile with these times, evened out where they fall."""
    dense = 1e-3 * np.sum(list(times.dense_ms.values()), axis=0)
    sampled, decode, prefill = (
        1e-3 * ms for ms in (times.sampled_ms, times.decode_ms, times.prefill_ms)
    )
    # The formula that scales the measured, context-free prefill makes short chunks faster after
    # some context: those times are lifted to the measured one.
    lifted = np.maximum.accumulate(prefill, axis=1)
    experts = (
        1e-3 * np.sum(list(times.experts_ms.values()), axis=0) if times.experts_ms else np.zeros(0)
    )
    even_dense, even_sampled, even_decode, even_prefill, even_experts = (
        np.round(settled(seconds) / RESOLUTION_S) * RESOLUTION_S
        for seconds in (dense, sampled, decode, lifted, experts)
    )
    tables = Tables(
        dense_tokens=times.tokens,
        dense_s=even_dense,
        sampled_sequences=times.tokens,
        sampled_s=even_sampled,
        prefill_tokens=np.array(PREFILL_TOKENS, float),
        prefill_kv_tokens=np.array(PREFILL_KV_TOKENS, float),
        decode_sequences=np.array(DECODE_SEQUENCES, float),
        decode_kv_tokens=np.array(DECODE_KV_TOKENS, float),
        attention_s=even_prefill[:, :, None, None] + even_decode[None, None, :, :],
        between_passes_s=between_passes_s,
        expert_tokens=times.tokens * setup.dp if times.experts_ms else np.zeros(0),
        experts_s=even_experts,
    )
    notes = [
        "GPU kernels only: no host time, no sampler beyond the output head's matrix product",
        "mixed passes: context and generation attention added, no measured mixed batches",
        f"falling times evened out: dense {moved(dense, even_dense)}; sampled {moved(sampled, even_sampled)}; "
        f"decode attention {moved(decode, even_decode)}; prefill attention {moved(prefill, even_prefill)}"
        + (f"; experts {moved(experts, even_experts)}" if times.experts_ms else ""),
        *(
            [f"not measured, but at the source's speed of light: {', '.join(times.unmeasured)}"]
            if times.unmeasured
            else []
        ),
        *(
            ["norms of queries and keys by a rule, not measured"]
            if "attention_q_norm" in times.dense_ms
            else []
        ),
        *more_notes,
    ]
    if set(STATE_KERNELS) & set(times.unmeasured):
        source += f"; states of linear layers not measured: read and written at {MEMORY_EFFICIENCY:.0%} of the memory bandwidth"
    metadata = ProfileMetadata(
        model=model,
        gpu=gpu,
        tp=setup.tp,
        dp=setup.dp,
        ep=setup.ep,
        precision=setup.precision,
        kv_precision=setup.kv_precision,
        routing=setup.routing if times.experts_ms else "",
        kind="derived",
        source=source,
        notes="; ".join(notes),
        own_times=("between_passes_s",) if between_passes_s else (),
    )
    return TableProfile(tables, metadata, origin=f"{setup.package} {model} {gpu} tp {setup.tp}")


def source_of(gpu: str, setup: EngineSetup) -> str:
    """Return the package and the part of its database, with their versions."""
    distribution = "aiconfigurator-core" if setup.package == "aiconfigurator" else setup.package
    perf_database = import_module(f"{PACKAGES[setup.package]}.sdk.perf_database")
    database = perf_database.resolve_query_version(SYSTEMS[gpu], setup.backend, "current")
    kv = f", KV cache in {setup.kv_precision}" if setup.kv_precision != "bf16" else ""
    return (
        f"{setup.package} {importlib.metadata.version(distribution)}, measured kernels of "
        f"{SYSTEMS[gpu]} under {setup.backend} {database}, {setup.precision.replace('bf16', 'bfloat16')}{kv}"
    )


def engine_of(
    shape: ModelShape, gpu: str, setup: EngineSetup = ONE_GPU, apart: bool = False
) -> Compiled:
    """Return aiconfigurator's compiled model; `apart`: shared experts not at the time of the routed
    ones, but before them. Raises `InputError` if it has no data for it."""
    package = PACKAGES[setup.package]
    require_possible(shape, gpu, setup)
    try:
        import_module(f"{package}.sdk.engine")
    except ImportError as error:
        raise InputError(
            f"{setup.package} is not installed; {install_command(setup.package)}"
        ) from error
    # It warns of rows of other engines for MLA whichever model is asked for.
    getLogger(f"{package}.sdk.perf_database").setLevel("NOTSET" if shape.kv_lora_rank else "ERROR")
    try:
        return _compiled(shape, gpu, setup, apart)
    except (
        Exception
    ) as error:  # its layers raise anything from AssertionError to a Rust panic's ValueError
        raise _missing(shape, gpu, setup, error) from error


def _missing(
    shape: ModelShape, gpu: str, setup: EngineSetup, error: Exception
) -> MissingKernelsError:
    why = re.sub(r" at /\S+", "", first_line(error))
    return MissingKernelsError(
        f"{setup.package}: no {shape.name} on {setup.tp * setup.dp} {gpu} under {setup.backend} in {setup.precision}: {why}"
    )


def _config(shape: ModelShape, package: str) -> str:
    """Return the text of a config.json: the package's own of a model in `BUNDLED`, else one made
    from the shape."""
    if not is_bundled(shape):
        return json.dumps(_hugging_face_config(shape))
    folder = Path(str(import_module(package).__file__)).parent / "model_configs"
    return (folder / f"{BUNDLED[shape.name].replace('/', '--')}_config.json").read_text(
        encoding="utf-8"
    )


def _compiled(shape: ModelShape, gpu: str, setup: EngineSetup, apart: bool = False) -> Compiled:
    """Return the compiled model, all of whose operations were looked up, with even matrix products
    (`even_products`). Raises anything for data that is missing."""
    package, system, has_experts = PACKAGES[setup.package], SYSTEMS[gpu], bool(shape.experts)
    core = import_module(package)
    builders, models, perf_database, engine = (
        import_module(f"{package}.sdk.{name}") for name in SDK
    )
    gemm, moe = PRECISIONS[setup.precision]
    config = builders.build_model_config(
        tp_size=setup.tp,
        pp_size=1,
        attention_dp_size=setup.dp,
        moe_tp_size=setup.tp * setup.dp // setup.ep if has_experts else 1,
        moe_ep_size=setup.ep,
        gemm_quant_mode=gemm,
        moe_quant_mode=moe if has_experts else None,
        kvcache_quant_mode=KV_PRECISIONS[setup.kv_precision],
    )
    config.workload_distribution = ROUTINGS[setup.routing]
    version = perf_database.resolve_query_version(system, setup.backend, "current")
    with temporary_folder() as folder:
        (folder / "config.json").write_text(_config(shape, package))
        spec = engine.build_engine_spec_json(
            models.get_model(str(folder), config, setup.backend),
            model_path=str(folder),
            system=system,
            backend=setup.backend,
            backend_version=version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=perf_database.get_database(system, setup.backend, version),
        )
        operations = json.loads(spec)
        if apart:
            for phase in ("generation_ops", "context_ops"):
                operations[phase] = [
                    part for operation in operations[phase] for part in _parts(operation)
                ]
        _norms_apart(
            operations,
            counted=setup.backend != "trtllm",
            reduced_over=setup.tp if BUNDLED.get(shape.name) == "MiniMaxAI/MiniMax-M2.5" else 1,
        )
        handle = engine.EngineHandle(
            bytes(core.engine_spec_bincode_from_json(json.dumps(operations))),
            systems_path=str(even_products(core, system, setup.backend, folder)),
        )
        handle.decode_step_per_op(1, 2, 2)  # reads the tables
        handle.evaluate_context_ops(
            list(range(len(operations["context_ops"]))), batch_size=1, s=2, prefix=0
        )
    decoding, prefill = (
        [
            (kind, str(fields["name"]))
            for operation in operations[ops]
            for kind, fields in operation.items()
        ]
        for ops in ("generation_ops", "context_ops")
    )
    return Compiled(handle, decoding, prefill)


def _norms_apart(operations: dict[str, Any], counted: bool, reduced_over: int) -> None:
    """Take norms of queries and keys out of both attentions and add them, if `counted`, as
    operations of their own.

    A kernel for queries and one for keys, by the source's rule for elementwise kernels: 3 µs +
    bytes read and written / (0.8 × the memory bandwidth), for all tokens of a pass. aiconfigurator
    has them in attention of prefill, aisimulate in both, as eight transfers of 3 µs and the bytes
    of one token, whatever a pass has: 26.4 µs a layer. Another GPU was measured at 2 µs (1 token)
    to 43 µs (2,048): `experiments/beside_aisimulate.md`. Not counted: TensorRT-LLM's, in its kernel
    of rotations (`fuse_qk_norm_rope`). Norms over all heads (MiniMax-M2: vLLM's `forward_qk`) are
    divided by one all-reduce a layer, of two fp32 variances a token (priced as the smallest
    measured one, of 128 values), if they are `reduced_over` several GPUs: two kernels each, before
    and after it.
    """
    for operation in [*operations["context_ops"], *operations["generation_ops"]]:
        for kind, fields in operation.items():
            if not fields.get("use_qk_norm"):
                continue
            fields["use_qk_norm"] = False
            heads = (
                {"q_norm": "n", "k_norm": "n_kv"} if counted and kind == "ContextAttention" else {}
            )
            for (norm, key), phase in product(heads.items(), ("context", "generation")):
                normalised = {
                    "name": f"{phase}_{fields['name'].removeprefix('context_')}_{norm}",
                    "scale_factor": min(reduced_over, 2) * fields["scale_factor"],
                    "bytes_per_token": 2 * 2.0 * fields[key] * fields["head_size"],
                    "scale_num_tokens": 1,
                    "seq_split": 1,
                }
                operations[f"{phase}_ops"].append({"Elementwise": normalised})
            if heads and reduced_over > 1:
                for phase in ("context", "generation"):
                    operations[f"{phase}_ops"].append(
                        {
                            "CustomAllReduce": {
                                "name": f"{phase}_variance_ar",
                                "scale_factor": fields["scale_factor"],
                                "hidden_size": 128,
                                "tp_size": reduced_over,
                                "quant": "half",
                                "seq_split": 1,
                            }
                        }
                    )


def _parts(operation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an operation as a list, or the operations of the two groups that it overlaps."""
    groups = operation.get("Overlap")
    return [*groups["group_a"], *groups["group_b"]] if groups else [operation]


def _hugging_face_config(shape: ModelShape) -> dict[str, object]:
    """Return the keys of a config.json that aiconfigurator reads.

    Qwen3 differs from Llama by norms of queries and keys only, and its mixtures of experts from
    others by as much.
    """
    experts = {
        "num_experts": shape.experts,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.moe_intermediate,
    }
    of = (("Llama", "Qwen3"), ("Mixtral", "Qwen3Moe"))[bool(shape.experts)][shape.qk_norm]
    return {
        "architectures": [f"{of}ForCausalLM"],
        "model_type": {"Qwen3Moe": "qwen3_moe"}.get(of, of.lower()),
        **(experts if shape.experts else {}),
        **{key: getattr(shape, field) for field, key in CONFIG_KEYS.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": DECODE_KV_TOKENS[-1],
        "torch_dtype": "bfloat16",
    }
