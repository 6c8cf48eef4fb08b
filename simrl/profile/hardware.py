"""Data sheets of GPUs (`gpus.toml`)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from pydantic import BaseModel, Field

from simrl.errors import InputError, choose
from simrl.profile.model_shape import Numbers

MIB, GIB = 2**20, 2**30
# Of a link's data sheet, in large collectives: aiconfigurator's NCCL tables (all-gather,
# reduce-scatter and all-to-all of 512 MiB among 4 and 8 GPUs: 0.66 to 0.74 on A100, H100 and B200).
LINK_SHARE = 0.7
MEMORY_APART = 0.04  # the gigabytes in a GPU's name are of either kind, and rounded


class Gpu(BaseModel, frozen=True, extra="forbid"):
    """The figures of a data sheet, and the topology around a GPU. `link_bytes_per_s` is one
    direction of the scale-up link, which joins `nvlink_domain` GPUs; `network_bytes_per_s` the
    GPU's share of the scale-out network, one direction; `gpus_per_node` share a host."""

    name: str
    compute_capability: float = Field(
        default=0.0, ge=0, description="NVIDIA's; some kernels exist for some alone; 0: not known"
    )
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    bf16_flops: float = Field(gt=0, description="dense, without sparsity")
    matmul_share: float = Field(
        default=0.8, gt=0, le=1, description="of bf16_flops, reached by large matrix products"
    )
    mma_flops: float = Field(
        default=0.0, ge=0, description="by Ampere's instructions, dense bfloat16; 0: bf16_flops"
    )
    fp8_flops: float = Field(default=0.0, ge=0, description="dense, without sparsity; 0: none")
    fp8_share: float = Field(
        default=0.0, ge=0, le=1, description="as matmul_share, of fp8_flops; 0: not measured"
    )
    fp8_block_share: float = Field(
        default=0.0, ge=0, le=1, description="likewise, with a scale a block"
    )
    link_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(
        gt=0, description="to or from the host's memory, PCIe x16, one direction"
    )
    gpus_per_node: int = Field(
        default=8, gt=0, description="as the vendors' HGX and DGX systems have"
    )
    nvlink_domain: int = Field(
        default=8,
        gt=0,
        description="GPUs that the scale-up link joins; PCIe joins the GPUs of a node",
    )
    source: str

    def memory_words(self, share: float, digits: int = 0) -> str:
        """Return a GPU's memory in words, and the share of it that a process may use."""
        article = "an" if self.name[0] in "ahr" else "a"
        memory, usable = self.memory_bytes / GIB, f"{share * self.memory_bytes / GIB:.{digits}f}"
        return f"{article} {self.name.upper()} has {memory:.0f} GiB ({usable} after a reserve for CUDA and NCCL)"

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions in which matrix products were measured."""
        measured = {
            "bf16": self.matmul_share,
            "fp8": self.fp8_share,
            "fp8-block": self.fp8_block_share,
        }
        return tuple(name for name, share in measured.items() if share)

    def matmul_flops(self, precision: str) -> float:
        """Return the rate of large matrix products in one of `precisions`."""
        if precision == "bf16":
            return self.bf16_flops * self.matmul_share
        return self.fp8_flops * (self.fp8_share if precision == "fp8" else self.fp8_block_share)

    def all_to_all_s(self, sent_bytes: Numbers, gpus: int) -> Numbers:
        """Return the seconds in which each of `gpus` sends `sent_bytes` to them all in equal parts,
        its own included: over the link within a domain, over the network to others, both at
        once."""
        near = min(gpus, self.nvlink_domain)
        link_s = (near - 1) / gpus / (LINK_SHARE * self.link_bytes_per_s)
        return sent_bytes * max(link_s, (gpus - near) / gpus / self.network_bytes_per_s)

    def bytes_per_s_among(self, gpus: int, link_share: float = LINK_SHARE) -> float:
        """Return the rate at which each of `gpus` receives a tensor in an all-gather (or sends one
        in a reduce-scatter): what collectives reach of the link within a domain. Beyond, the
        network share of each of a domain's GPUs brings another part, which the link hands on within
        the domain, as NCCL's rings do."""
        link = link_share * self.link_bytes_per_s
        return (
            link
            if gpus <= self.nvlink_domain
            else min(link, self.nvlink_domain * self.network_bytes_per_s)
        )


GPUS = {
    name: Gpu.model_validate(
        {"name": name, "memory_bytes": fields.pop("memory_mib") * MIB, **fields}
    )
    for name, fields in tomllib.loads(
        (Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8")
    ).items()
}


# Words of a GPU's name that say nothing of its data sheet: SXM is meant unless the name has PCIe.
_PLAIN_WORDS = re.compile(
    r"nvidia|tensor|core|gpu|hgx|dgx|sxm\d?|hbm\d?e?|nvl72|rtx|blackwell|server|edition|"
)


def known_gpu(name: str) -> str:
    """Return a GPU's name as in `GPUS`: `NVIDIA H100 80GB HBM3`, `H100-SXM5` and `H100` are `h100`.
    A name with another memory, or with a word that may stand for another data sheet (`H100 NVL`),
    stays."""
    text = re.sub(
        r"(\d) gb\b",
        r"\1gb",
        re.sub(r"(sxm\d?)", r" \1 ", name.lower().replace("rtx pro 6000", "rtxpro6000")),
    )
    words = [word for word in re.split(r"[^a-z0-9]+", text) if not _PLAIN_WORDS.fullmatch(word)]
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d{2,3}gb", word)]
    known = "-".join(word for word in words if not re.fullmatch(r"\d{2,3}gb", word))
    if known not in GPUS:
        return name
    fits = (
        min(abs(size * unit / GPUS[known].memory_bytes - 1) for unit in (1e9, 2**30)) < MEMORY_APART
        for size in sizes
    )
    return known if all(fits) else name


def gpu(name: str) -> Gpu:
    """Return a GPU by its name in `GPUS`, or one that `known_gpu` knows."""
    known = known_gpu(name)
    if known not in GPUS:
        counted = re.fullmatch(r"(\d+) *[x*] *(.+)|(.+?) *[x*:] *(\d+)", name.lower())
        kind, count = (counted[2] or counted[3], counted[1] or counted[4]) if counted else ("", "")
        if known_gpu(kind) in GPUS:
            raise InputError(
                f"gpu {name!r}: the kind and the number are two keys: cluster.gpu={known_gpu(kind)} cluster.gpus={count}"
            )
        raise InputError(f"gpu {name!r} is unknown{choose(name, GPUS, 'simrl profile names')}")
    return GPUS[known]
