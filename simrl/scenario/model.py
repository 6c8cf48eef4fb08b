"""Scenario: everything that a simulation depends on. Equal scenarios give equal bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from simrl.engine.config import EngineConfig
from simrl.errors import InputError
from simrl.profile.hardware import GPUS, Gpu, gpu as gpu_named, known_gpu, whole_sheet
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import model_shape
from simrl.profile.precision import KvCache, Weights, require_precision
from simrl.profile.shipped import PROFILES, SHIPPED, file_name
from simrl.scenario.agents import AgentsConfig
from simrl.scenario.calibration import CalibrationConfig
from simrl.scenario.faults import Fault
from simrl.scenario.presets import with_presets
from simrl.speculation.inputs import SpeculationInputs
from simrl.trace.synthesis import CapTokens, LengthModel
from simrl.training.config import Seconds, Share, TrainingConfig
from simrl.validation import MOST_SEED, Model, Section, bounded, switched

MOST_STEPS = 1_000_000  # an update a second for eleven days


GpuCount = Annotated[int, Field(gt=0, le=262_144)]  # 2^18: more than any cluster for one run has


def _no_number(kind: Any) -> Any:
    """Refuse a number of GPUs in place of their kind (but 4090 is one)."""
    if str(kind).isdecimal() and known_gpu(str(kind)) not in GPUS:
        raise ValueError(
            f"a kind of GPU is a name, such as h100; their number is gpus: cluster.gpus={kind}"
        )
    return str(kind) if isinstance(kind, int) else kind


def _with_sheet(data: Any) -> Any:
    """Return a pool's data in which a GPU that is a data sheet has its name, and the sheet is beside
    it; without the sheet of another GPU, which an override replaced."""
    if not isinstance(data, Mapping):
        return data
    written: Any = data.get("gpu")
    if isinstance(written, Mapping) or str(written).endswith(".toml"):
        sheet = whole_sheet(written) if isinstance(written, Mapping) else dict(gpu_named(written))
        return {**data, "gpu": sheet["name"], "sheet": sheet}
    beside = (
        dict(data["sheet"]) if isinstance(data.get("sheet"), Mapping | Gpu) else {"name": written}
    )
    replaced = beside.get("name") != written
    if replaced and "source" not in beside:  # simrl's own sheets have one
        raise ValueError(
            f"sheet is not of gpu {written}: give your data sheet as gpu, {{base: h100, memory_bytes: 4e10}}, and no sheet"
        )
    return {**data, "sheet": None} if replaced else data


GpuName = Annotated[str, BeforeValidator(_no_number), AfterValidator(known_gpu)]
BytesPerS = Annotated[float, Field(ge=1e6, le=1e15)]
HostSpeed = Annotated[float, Field(ge=0.05, le=20)]


class TrainPool(Section):
    """GPUs that only train; the GPUs of the cluster then only roll out, and weights reach the
    workers over the network. A key that is left out has the cluster's value, or for another kind of
    GPU the data sheet's."""

    _sheets = model_validator(mode="before")(_with_sheet)

    gpu: GpuName | None = None
    """kind of GPU, as cluster.gpu"""
    gpus: GpuCount
    """GPUs that train"""
    cost_per_gpu_hour: NonNegativeFloat | None = None
    """price of one GPU-hour of them"""
    gpus_per_node: PositiveInt | None = None
    """GPUs that share a host"""
    nvlink_domain: PositiveInt | None = None
    """GPUs that the scale-up link joins"""
    network_bytes_per_s: BytesPerS | None = None
    """share of a GPU in the scale-out network, one direction"""
    host_speed: HostSpeed | None = None
    """single-thread speed of the hosts"""
    sheet: Gpu | None = None
    """data sheet of the GPU, as cluster.sheet"""


class PrefillPool(Section):
    """Rollout GPUs that only prefill: the others decode, and KV caches go from pool to pool
    (docs/clusters.md)."""

    gpus: Annotated[int, Field(ge=0, le=262_144)] = 0
    """GPUs that prefill, of those that roll out; 0: no pools, every rollout worker does both"""
    tp: PositiveInt | None = None
    """tensor-parallel size of a prefill worker; `cluster.tp`, which then is of the decode workers,
    if not given"""
    dispatch: Literal["prefix", "least_requests"] = "prefix"
    """worker of a prefill. prefix: the one of its prompt's number modulo their number, so that all of
    a group go to one, whatever it holds; least_requests: the one with the fewest requests"""
    link_bytes_per_s: BytesPerS | None = None
    """rate at which a GPU sends or receives KV cache; its share in the scale-out network if not
    given"""


class ClusterConfig(Section):
    """The GPUs. `tp` × `dp` of them make one rollout worker."""

    _sheets = model_validator(mode="before")(_with_sheet)

    gpu: GpuName
    """a name (`simrl profile names` lists them), also as `H100-SXM` or `NVIDIA H100 80GB HBM3`, or a
    data sheet, {base: h100, memory_bytes_per_s: 3.9e12}, or a TOML file of one (docs/clusters.md):
    gives memory, rates and links unless a profile does"""
    gpus: GpuCount
    """number of all GPUs, for rollout and for training; with `train`, number of rollout GPUs"""
    tp: PositiveInt
    """tensor-parallel size: GPUs of one rollout worker, or of each of its `dp` attention ranks"""
    dp: PositiveInt = 1
    """data-parallel attention ranks of a rollout worker, of `tp` GPUs each, which run in lock step
    (vLLM's data_parallel_size); for a mixture of experts"""
    ep: PositiveInt = 1
    """GPUs among which the experts of a worker are divided: `tp` × `dp`, so that each GPU holds
    whole experts (vLLM's enable_expert_parallel), or 1, so that each GPU holds a part of every
    expert"""
    cost_per_gpu_hour: NonNegativeFloat = 0.0
    """in any currency; 0 leaves cost out"""
    train: TrainPool | None = None
    """separate GPUs for training, also of another kind: {gpu: h800, gpus: 32, cost_per_gpu_hour:
    3}"""
    prefill: PrefillPool = PrefillPool()
    """a pool of rollout GPUs that only prefill, beside one that decodes: {gpus: 8, tp: 4}"""
    gpus_per_node: PositiveInt | None = None
    """GPUs that share a host; the data sheet's if not given: 8, or 4 of gb200, gb300 and gh200"""
    nvlink_domain: PositiveInt | None = None
    """GPUs that the scale-up link (NVLink, or PCIe) joins; the data sheet's if not given: a node, or
    72 of gb200 and gb300 (NVL72)"""
    host_speed: HostSpeed | None = None
    """single-thread speed of the hosts; 1: as fast as the host of simrl's H100 in its fast minutes;
    the data sheet's if not given: 1, less of Arm hosts; the times of the host in engines' presets,
    and the launches of a training micro-batch, are divided by it (docs/presets.md)"""
    network_bytes_per_s: BytesPerS | None = None
    """share of a GPU in the scale-out network, one direction; the data sheet's if not given: a 400
    Gb/s port is 50e9"""
    sheet: Gpu | None = None
    """data sheet of `gpu` where it is none of simrl's: written by simrl, from the sheet that `gpu`
    was"""

    @model_validator(mode="after")
    def _whole_nodes(self) -> ClusterConfig:
        try:
            kinds = {"": self.rollout_kind, "train.": self.train_kind}
        except InputError:  # an unknown GPU: the look-up names it, with the file
            return self
        for key, kind in kinds.items():
            node, domain = kind.gpus_per_node, kind.nvlink_domain
            if domain % node and node % domain:
                raise ValueError(
                    f"{key}nvlink_domain is {domain}: not whole nodes of {node} GPUs, nor equal parts of one; give a multiple, "
                    "or another gpus_per_node"
                )
        return self

    @model_validator(mode="after")
    def _each_kind_has_its_price(self) -> ClusterConfig:
        pool = self.train
        if (
            pool
            and self.cost_per_gpu_hour
            and pool.cost_per_gpu_hour is None
            and pool.gpu not in (None, self.gpu)
        ):
            raise ValueError(
                f"train.cost_per_gpu_hour is missing: a {pool.gpu} has another price than a {self.gpu}; give it, 0 for none"
            )
        return self

    @property
    def rollout_kind(self) -> Gpu:
        """Return the GPU of a rollout worker, in its topology. Raise `InputError` for an unknown
        name."""
        return _in_topology(self.sheet or gpu_named(self.gpu), self)

    @property
    def train_kind(self) -> Gpu:
        """Return the GPU that trains, in its topology. Raise `InputError` for an unknown name."""
        if self.train is None:
            return self.rollout_kind
        name, sheet = self.train.gpu or self.gpu, self.train.sheet
        kind = (
            self.rollout_kind
            if name == self.gpu and sheet in (None, self.sheet)
            else sheet or gpu_named(name)
        )
        return _in_topology(kind, self.train)

    def words(self, counted: bool = True) -> str:
        """Return the GPUs: `64 h20`, or `64 h20 + 32 h800` where training has its own; not
        `counted`, the kinds alone."""
        pools = [(self.gpus, self.gpu)]
        if self.train:
            pools.append((self.train.gpus, self.train.gpu or self.gpu))
        return " + ".join(f"{gpus} {kind}" if counted else kind for gpus, kind in pools)

    @property
    def worker_gpus(self) -> int:
        """Return the GPUs of a rollout worker, without the GPUs of a drafter."""
        return self.tp * self.dp

    @property
    def all_gpus(self) -> int:
        """Return the GPUs of both pools."""
        return self.gpus + (self.train.gpus if self.train else 0)


def _in_topology(kind: Gpu, pool: ClusterConfig | TrainPool) -> Gpu:
    """Return a GPU with the nodes and links of a pool. Of a kind whose domain is one node, a node
    of another size is a domain, too."""
    changes = {key: value for key in TOPOLOGY if (value := getattr(pool, key)) is not None}
    if "gpus_per_node" in changes and kind.nvlink_domain == kind.gpus_per_node:
        changes.setdefault("nvlink_domain", changes["gpus_per_node"])
    return kind.model_copy(update=changes)


TOPOLOGY = ("gpus_per_node", "nvlink_domain", "network_bytes_per_s", "host_speed")


class PrecisionConfig(Section):
    """Precisions of the rollout's weights and KV cache, and of training's matrix products. If there
    are no measured kernels in a precision, step times are extrapolated by the roofline, and
    training in it is refused."""

    weights: Weights = "bf16"
    """precision of the layers' matrices in the rollout engines: bf16, fp8 (one scale for a tensor
    or channel), fp8-block (one scale for a block of 128 × 128), nvfp4, int4 (weights only),
    w4a16_mxfp4 (experts only, as gpt-oss is released),
    w4a8_mxfp4_mxfp8 (with activations in 8 bits, on Blackwell)"""
    kv_cache: KvCache = "bf16"
    """precision of keys and values: bf16 or fp8"""
    training: Literal["bf16", "fp8", "fp8-block"] = "bf16"
    """precision of the matrix products of training"""


class WorkloadConfig(Section):
    """The prompts and responses: a recorded trace, or a synthetic one. A trace with too few steps
    is repeated."""

    trace: str | None = None
    """a trace file (Parquet), as `simrl trace import` writes it"""
    synthetic: LengthModel | None = None
    """or a model of lengths, drawn with the seed"""

    @model_validator(mode="after")
    def _one_of_them(self) -> WorkloadConfig:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError(
                "give either a trace (path) or synthetic (a length model), the other as null"
            )
        return self


class EvaluationConfig(Section):
    """Evaluations of the policy as requests at the rollout workers. Their tokens are neither trained
    nor dropped."""

    every: PositiveInt
    """updates between evaluations: versions `every`, 2 × `every` … are evaluated; in place of a
    version that no worker loads, the next one that is loaded"""
    at_start: bool = False
    """an evaluation of the first weights, before the first rollout"""
    prompts: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """prompts of an evaluation, the first ones of `lengths`; all of its first step if not given"""
    samples: Annotated[int, Field(gt=0, le=1024)] | None = None
    """responses a prompt; as many as in `lengths` if not given"""
    lengths: WorkloadConfig | None = None
    """lengths of the evaluation set: {trace: file} or {synthetic: model}; the workload's if not
    given"""
    when: Literal["between_steps", "beside_training"] | None = None
    """between_steps: when all workers have loaded the version, nothing for training starts until the
    evaluation is over, and newer weights wait; beside_training: evaluation and training share the
    workers and the limit of responses in flight, and newer weights do not wait. If not given:
    beside_training for prime_rl, between_steps for all others"""
    prefer: Literal["eval", "train"] = "eval"
    """of the responses that wait for the limit of responses in flight, those that start first"""


class RooflineConfig(Section):
    """Efficiencies of `simrl.profile.profilers.roofline.roofline_profile`; keys that are left out
    have its defaults."""

    compute_efficiency: Share | None = None
    """share of the data sheet's dense bfloat16 rate; 95 % of what the GPU's large products reach if not
    given"""
    memory_efficiency: Share | None = None
    """share of the data sheet's memory bandwidth; 0.8 if not given"""
    link_efficiency: Share | None = None
    """share of the data sheet's link bandwidth; 0.7 if not given"""
    between_passes_s: Seconds | None = None
    """host time between two forward passes; 0.001 if not given"""


class ProfileConfig(Section):
    """Step times: a profile file, or a roofline of the cluster's GPU; with corrections from a
    measurement. Without either: the shipped profile, or one extrapolated from the nearest layout;
    if there is none, a roofline."""

    path: str | None = None
    """a profile file (Parquet) that `simrl profile derive` or `simrl measure` wrote, or `shipped`: the one that comes with
    simrl for the model, GPU, tp, dp, ep and precision, or one extrapolated from the nearest layout"""
    roofline: RooflineConfig | None = None
    """or step times from the data sheet of the cluster's GPU; {} takes the defaults"""
    forward_correction: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """factor on every forward pass; 1 = as profiled"""
    between_passes_s: Seconds | None = None
    """replaces the pause between forward passes of the profile, or of the engine's preset"""
    sequence_overhead_s: Annotated[float, Field(ge=0, le=1)] | None = None
    """host time that every decoding sequence adds to a forward pass, which a profile of kernels
    leaves out; replaces the preset's"""
    least_pass_s: Annotated[float, Field(ge=0, le=1)] | None = None
    """lower bound on a forward pass, excluding the gap between passes: the host's work beside the
    kernels, which launches them one by one (vLLM's enforce_eager) or prepares the next pass
    (asynchronous scheduling); replaces the preset's"""
    least_sequence_s: Annotated[float, Field(ge=0, le=1)] | None = None
    """more of it for each sequence of the pass; replaces the preset's"""
    tau: str | None = None
    """a measured table of τ(length, workers), with which RhymeRL gives workers to ranking groups (CSV, as `simrl measure --tau`
    writes it); if not given, τ is computed from the step times"""

    @model_validator(mode="after")
    def _one_of_them(self) -> ProfileConfig:
        if self.path is not None and self.roofline is not None:
            raise ValueError(
                "give either path (a profile file) or roofline (its efficiencies, {} for the defaults), the other as null"
            )
        return self


class JudgeConfig(TrainPool):
    """A reward or judge model, on inference engines of its own. With `gpus` it is standalone: a
    response is judged as soon as it has ended (verl: enable_resource_pool). Without, it is
    colocated: when all responses of a batch have ended, the rollout engines sleep, and the judge's
    wake on their GPUs. A key of the GPUs that is left out has the cluster's value, or for another
    kind of GPU the data sheet's."""

    _presets = model_validator(mode="before")(with_presets)

    gpus: GpuCount | None = None  # type: ignore[assignment]
    """GPUs of its own, in addition to the cluster's; if not given, it takes turns on the rollout GPUs"""
    model: str
    """a model that simrl knows, such as qwen3-8b, or a folder with a Hugging Face config.json"""
    tp: PositiveInt = 1
    """tensor-parallel size: GPUs of one of its engines"""
    per: Literal["response", "group"] = "response"
    """what a request judges: a response, or all responses of a group (slime: group_rm)"""
    prompt_tokens: NonNegativeInt = 400
    """tokens of its instructions, in a request before the prompt and the response; assumed"""
    response_tokens: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """mean length of its response; 0: a reward model that only prefills (a classifier)"""
    response_sigma: Annotated[float, Field(ge=0, le=5)] = 0.0
    """standard deviation of the log length of its response before the cap"""
    response_cap_tokens: CapTokens = 4096
    """its largest response"""
    precision: PrecisionConfig = PrecisionConfig()
    """precisions of its weights and KV cache, as the section precision"""
    profile: ProfileConfig = ProfileConfig()
    """its step times, as the section profile"""
    engine: EngineConfig = EngineConfig()
    """settings of its engines, as the section engine"""


class SystemConfig(Model, extra="allow"):
    """A recipe's name and its parameters, flat: `{name: areal, eta: 8}`. The recipe checks the
    parameters. The words of a switch, on and off, are true and false."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _with_switches(cls, data: Any) -> Any:
        return bounded(switched(data))

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Scenario(Section):
    """One simulation."""

    name: str
    """name of the scenario and of the folder of its results"""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    """seed of all draws; systems with equal seeds see equal draws"""
    steps: Annotated[int, Field(gt=0, le=MOST_STEPS)]
    """policy updates to simulate"""
    warmup_steps: NonNegativeInt = 0
    """first updates left out of every average, while the pipelines fill"""
    framework: str | dict[str, Any] | None = None
    """preset of a framework, with constants of its training and its engine: verl-fsdp-0.5,
    nemo-rl-0.6 … (`simrl presets`), or your own file, my.toml; values that the scenario gives
    replace the preset's"""
    model: str
    """a model that simrl knows, such as qwen3-8b, or a folder with a Hugging Face config.json"""
    cluster: ClusterConfig
    workload: WorkloadConfig
    profile: ProfileConfig = ProfileConfig()
    precision: PrecisionConfig = PrecisionConfig()
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    agents: AgentsConfig = AgentsConfig()
    speculation: SpeculationInputs = SpeculationInputs()
    """acceptance of drafts where the trace has no token ids"""
    evaluation: EvaluationConfig | None = None
    faults: tuple[Fault, ...] = ()
    """workers that are slow, lost, or late with their weights"""
    judge: JudgeConfig | None = None
    """a reward or judge model on GPUs; training.reward_s comes after it"""
    calibration: CalibrationConfig | None = None
    system: SystemConfig
    variant: str = ""
    """the variation, as `key=value, …`"""
    file: str = Field(default="scenario", exclude=True)
    """the place that it was read from, for messages"""

    _presets = model_validator(mode="before")(with_presets)

    @field_validator("precision", mode="before")
    @classmethod
    def _is_multiplied_in(cls, precision: Any, info: ValidationInfo) -> Any:
        weights = precision.get("weights") if isinstance(precision, Mapping) else None
        try:
            if isinstance(weights, str) and {"model", "cluster"} <= info.data.keys():
                require_precision(
                    weights, info.data["cluster"].rollout_kind, model_shape(info.data["model"])
                )
        except InputError as error:
            raise ValueError(str(error).removeprefix("precision.")) from error
        return precision

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                "use the letters a-z, digits, '.', '_' and '-', a letter or digit first"
            )
        return name

    @model_validator(mode="after")
    def _steps_are_left(self) -> Scenario:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves none of the {self.steps} steps; lower it"
            )
        return self

    @property
    def wanted_profile(self) -> ProfileMetadata:
        """Return the model, GPU, split and precisions of the profile that the scenario needs; kind
        and source are open. Raise `InputError` for an unknown model."""
        return ProfileMetadata(
            model=model_shape(self.model).name,
            gpu=known_gpu(self.cluster.gpu),
            tp=self.cluster.tp,
            dp=self.cluster.dp,
            ep=self.cluster.ep,
            precision=self.precision.weights,
            kv_precision=self.precision.kv_cache,
            kind="",
            source="",
        )

    def with_profile(self) -> Scenario:
        """Return the scenario with the file of the shipped profile, also of one that is to be
        estimated, where the scenario names none of its own. Raise `InputError` for an unknown
        model."""
        path, roofline = self.profile.path, self.profile.roofline
        if path not in (None, SHIPPED) or roofline is not None:
            return self
        wanted = self.wanted_profile
        file = PROFILES / file_name(wanted)
        return self.with_fields(
            "profile", path=str(os.path.relpath(file) if file.is_relative_to(Path.cwd()) else file)
        )

    def with_fields(self, section: str, **values: Any) -> Scenario:
        """Return the scenario with other values in a section, such as `training`. Not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
