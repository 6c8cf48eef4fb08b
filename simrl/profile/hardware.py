"""Data sheets of GPUs (`gpus.toml`)."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from simrl.errors import InputError, meant

MIB = 2**20
GPUS_PER_NODE = 8  # as the vendors' HGX and DGX systems have
# Of a link's data sheet, in large collectives: aiconfigurator's NCCL tables (all-gather, reduce-scatter and all-to-all of
# 512 MiB among 4 and 8 GPUs: 0.66 to 0.74 on A100, H100 and B200).
LINK_SHARE = 0.7


class Gpu(BaseModel):
    """The figures of a data sheet. `link_bytes_per_s` is one direction of the scale-up link, `network_bytes_per_s` the
    GPU's share of the scale-out network, one direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    bf16_flops: float = Field(gt=0, description="dense, without sparsity")
    matmul_share: float = Field(default=0.8, gt=0, le=1, description="of bf16_flops, reached by large matrix products")
    mma_flops: float = Field(default=0.0, ge=0, description="by Ampere's instructions, dense bfloat16; 0: bf16_flops")
    fp8_flops: float = Field(default=0.0, ge=0, description="dense, without sparsity; 0: none")
    fp8_shares: dict[str, float] = Field(default={}, description="as matmul_share, of fp8_flops, by precision")
    link_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(gt=0, description="to or from the host's memory, PCIe x16, one direction")
    source: str

    def matmul_flops(self, precision: str) -> float:
        """Return the rate of large matrix products: measured kernels in this precision. Raise `InputError` if there are none."""
        if precision == "bf16":
            return self.bf16_flops * self.matmul_share
        if precision not in self.fp8_shares:
            raise InputError(
                f"no matrix products in {precision} were measured on {self.name}; it has {', '.join(('bf16', *self.fp8_shares))}"
            )
        return self.fp8_flops * self.fp8_shares[precision]

    def all_to_all_s(self, sent_bytes: Numbers, gpus: int) -> Numbers:
        """Return the seconds in which each of `gpus` sends `sent_bytes` to them all in equal parts, its own included: over the
        link within a node, over the network to other nodes, both at once."""
        near = min(gpus, GPUS_PER_NODE)
        link_s = (near - 1) / gpus / (LINK_SHARE * self.link_bytes_per_s)
        return sent_bytes * max(link_s, (gpus - near) / gpus / self.network_bytes_per_s)

    def bytes_per_s_among(self, gpus: int) -> float:
        """Return the rate at which each of `gpus` receives a tensor in an all-gather (or sends one in a reduce-scatter): what
        collectives reach of the link within a node of 8. Beyond, each of a node's eight network shares brings another eighth,
        which the link hands on within the node, as NCCL's rings do."""
        link = LINK_SHARE * self.link_bytes_per_s
        return link if gpus <= GPUS_PER_NODE else min(link, GPUS_PER_NODE * self.network_bytes_per_s)


GPUS = {
    name: Gpu.model_validate({"name": name, "memory_bytes": fields.pop("memory_mib") * MIB, **fields})
    for name, fields in tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8")).items()
}


def gpu(name: str) -> Gpu:
    """Return a GPU by its name in `GPUS`."""
    if name.lower() not in GPUS:
        raise InputError(f"gpu {name!r} is unknown{meant(name, GPUS)}; choose one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
