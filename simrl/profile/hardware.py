"""Data sheets of GPUs: the named ones (`gpus.toml`), and those that users give."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from simrl.errors import InputError, first_line
from simrl.profile.model_shape import Numbers
from simrl.validation import Section, explain

MIB, GIB = 2**20, 2**30
# Of a link's data sheet, in large collectives: aiconfigurator's NCCL tables (all-gather,
# reduce-scatter and all-to-all of 512 MiB among 4 and 8 GPUs: 0.66 to 0.74 on A100, H100 and B200).
LINK_SHARE = 0.7
MEMORY_APART = 0.04  # the gigabytes in a GPU's name are of either kind, and rounded
# Less is a slip in the unit, such as gigabytes; `cpu`, one core, has more.
LEAST = {
    "memory_bytes": (1e8, "bytes"),
    "memory_bytes_per_s": (1e9, "bytes a second"),
    **dict.fromkeys(
        ("bf16_flops", "mma_flops", "fp8_flops", "fp4_flops"), (1e10, "operations a second")
    ),
    **dict.fromkeys(
        ("link_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s"), (1e6, "bytes a second")
    ),
}


class Gpu(Section):
    """The figures of a data sheet, and the topology around a GPU. `link_bytes_per_s` is one
    direction of the scale-up link, which joins `nvlink_domain` GPUs; `network_bytes_per_s` the
    GPU's share of the scale-out network, one direction; `gpus_per_node` share a host. The defaults
    describe a card of which nothing else is known."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="in lower case")
    base: str = Field(default="", description="a GPU whose measured kernels are carried over to it")
    compute_capability: float = Field(
        default=0.0, ge=0, description="NVIDIA's; some kernels exist for some alone; 0: not known"
    )
    memory_bytes: float = Field(gt=0, description="as the driver reports it")
    memory_bytes_per_s: float = Field(gt=0, description="bandwidth of the memory")
    bf16_flops: float = Field(gt=0, description="dense, without sparsity")
    matmul_share: float = Field(
        default=0.75, gt=0, le=1, description="of bf16_flops, reached by large matrix products"
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
    fp4_flops: float = Field(default=0.0, ge=0, description="of NVFP4, dense; 0: none")
    fp4_share: float = Field(
        default=0.0, ge=0, le=1, description="as matmul_share, of fp4_flops; 0: not measured"
    )
    link_bytes_per_s: float = Field(
        default=32e9, gt=0, description="of the scale-up link (NVLink, or PCIe), one direction"
    )
    network_bytes_per_s: float = Field(
        default=25e9, gt=0, description="the GPU's share of the scale-out network, one direction"
    )
    host_bytes_per_s: float = Field(
        default=32e9,
        gt=0,
        description="to or from the host's memory, by PCIe x16 or NVLink-C2C, one direction",
    )
    host_speed: float = Field(
        default=1.0,
        ge=0.05,
        le=20,
        description="of one thread of the host's processor; 1: the Xeon beside an H100",
    )
    host_source: str = Field(default="", description="source of host_speed, and its range")
    gpus_per_node: int = Field(
        default=8, gt=0, description="as the vendors' HGX and DGX systems have"
    )
    nvlink_domain: int = Field(
        default=8,
        gt=0,
        description="GPUs that the scale-up link joins; PCIe joins the GPUs of a node",
    )
    source: str = Field(description="source of the figures, and what is assumed")

    @model_validator(mode="after")
    def _is_dense(self) -> Gpu:
        if self.fp8_flops and not 1.01 < self.fp8_flops / self.bf16_flops < 3:
            raise ValueError(
                f"bf16_flops {self.bf16_flops:g} is no half of fp8_flops, {self.fp8_flops:g}: is it with sparsity? Give dense "
                "rates, and no fp8_flops where fp8 is no faster"
            )
        return self

    @property
    def notes(self) -> str:
        """The sources that no name stands for: of a user's sheet, and of a slower or faster host."""
        sheet = "" if self.name in GPUS else f"; {self.name}: {self.source}"
        source = f", {self.host_source}" if self.host_source else ""
        host = f"; hosts of {self.name} at a speed of {self.host_speed:g}{source}"
        return sheet + host * (self.host_speed != 1)

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
    r"nvidia|amd|huawei|instinct|geforce|tesla|tensor|core|gpu|npu|hgx|dgx|sxm\d?|oam|ac|hbm\d?e?|nvl72|rtx|"
    r"grace|hopper|blackwell|superchip|server|edition|mega"
)
_SPELLINGS = (
    (r"\brtx[ _-]*(pro)?[ _-]*(\d{4})", r"rtx\1\2"),
    (r"^(?:geforce )?(4090|5090)\b", r"rtx\1"),
    (r"\b(?:ascend[ _-]*)?(910b\d)", r"ascend\1"),
    (r"(sxm\d?|nvl|pcie)\b", r" \1 "),
    (r"(\d) gb\b", r"\1gb"),
    (r"\b(gh200.*?)\b(?:120|240|480)gb\b", r"\1"),  # the memory of the Grace beside it
)
_SIZE = re.compile(r"(\d{2,3})g(?:i?b)?")


def known_gpu(name: str) -> str:
    """Return a GPU's name as in `GPUS`, however tools and clouds print it: `NVIDIA H100 80GB HBM3`,
    `H100-SXM5` and `H100` are `h100`. A name with another memory, or with a word that may stand for
    another data sheet (`H200 NVL`), stays."""
    text = name.lower()
    for written, plain in _SPELLINGS:
        text = re.sub(written, plain, text)
    words = [word for word in re.findall(r"[a-z0-9]+", text) if not _PLAIN_WORDS.fullmatch(word)]
    sizes = [int(size[1]) for word in words if (size := _SIZE.fullmatch(word))]
    plain = "-".join(word for word in words if not _SIZE.fullmatch(word))
    for known, kind in GPUS.items():
        fits = (
            min(abs(size * unit / kind.memory_bytes - 1) for unit in (1e9, GIB)) < MEMORY_APART
            for size in sizes
        )
        if re.fullmatch(re.escape(plain) + r"(-\d+g)?", known) and all(fits):
            return known
    return name


def gpu(written: str | Mapping[str, Any]) -> Gpu:
    """Return a GPU by its name in `GPUS`, or one that `known_gpu` knows; by a data sheet, as data or
    as a TOML file of its keys. Raise `InputError`."""
    if not isinstance(written, str) or written.endswith(".toml"):
        fields, place = (written, "gpu") if not isinstance(written, str) else ({}, written)
        try:
            if isinstance(written, str):
                text = Path(written).read_text(encoding="utf-8")
                name = re.sub(r"[^a-z0-9.-]+", "-", Path(written).stem.lower())
                fields = {"name": name, **tomllib.loads(text)}
            return Gpu.model_validate(whole_sheet(fields))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            if isinstance(error, ValidationError):
                reason = explain(error, Gpu, "a data sheet")[1]
            raise InputError(
                f"{place}: {reason}; docs/clusters.md has an example of a data sheet"
            ) from error
    known = known_gpu(written)
    if known not in GPUS:
        counted = re.fullmatch(r"(\d+) *[x*] *(.+)|(.+?) *[x*:] *(\d+)", written.lower())
        kind, count = (counted[2] or counted[3], counted[1] or counted[4]) if counted else ("", "")
        if known_gpu(kind) in GPUS:
            raise InputError(
                f"gpu {written!r}: the kind and the number are two keys: cluster.gpu={known_gpu(kind)} cluster.gpus={count}"
            )
        # Letters and digits as in a name: H-100, h10O. Any other slip may be a device: B100, V100, A10.
        letters = re.sub(r"(?<=\d)o", "0", re.sub(r"[^a-z0-9]", "", written.lower()))
        near = [
            name
            for name in GPUS
            if sorted(name.replace("-", "")) == sorted(letters)
            or (len(letters) > 3 and name[:-1].endswith(letters))  # Ascend 910B's variants
        ]
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise InputError(
            f"gpu {written!r} is unknown{meant}: simrl has no data sheet of it (simrl profile names lists its {len(GPUS)}); "
            f"give one, cluster.gpu={{name: {letters or 'mine'}, memory_bytes: …, memory_bytes_per_s: …, "
            "bf16_flops: …}, or a TOML file with these keys"
        )
    return GPUS[known]


def whole_sheet(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a user's sheet with what it leaves out, the base's or assumed, and says so as
    its source. A known name stands for a base, so that no kernels count as measured on it. Raise
    `InputError` for an unknown base, figures in another unit, and rates that are twice the base's."""
    for key, (least, unit) in LEAST.items():
        if isinstance(figure := fields.get(key), int | float) and 0 < figure < least:
            raise InputError(
                f"{key} is {figure:g}, in another unit? Give {unit}, {least:g} or more"
            )
    named, base = (str(fields.get(key) or "") for key in ("name", "base"))
    is_known = known_gpu(named) in GPUS
    kind = gpu((base or named).removesuffix(".toml")) if base or is_known else None
    rest = kind.model_dump(exclude={"name", "base", "source"}) if kind else {}
    written = [key for key in fields if key not in ("name", "base", "source")]
    twice = [
        key
        for key in ("bf16_flops", "fp8_flops", "fp4_flops")
        if isinstance(rate := fields.get(key), int | float)
        and 0 < 1.95 * rest.get(key, 0.0) <= rate <= 2.05 * rest[key]
    ]
    if twice and kind:
        raise InputError(
            f"{twice[0]} {fields[twice[0]]:g} is twice {rest[twice[0]]:g}, the dense rate of {kind.name}: is it with "
            "sparsity? Give dense rates, or no base"
        )
    assumed = ", ".join(
        f"{key} {field.default:g}"
        for key, field in Gpu.model_fields.items()
        if key not in {*fields, *rest} and isinstance(field.default, int | float) and field.default
    )
    parts = (
        fields.get("source")
        or f"the user's data sheet: {', '.join(map(str, written)) or 'nothing'}",
        f"the rest as {kind.name} ({kind.source})" if kind and {*rest} - {*written} else "",
        f"assumed: {assumed}" if assumed else "",
    )
    whole = {
        "name": f"{kind.name}-own" if kind and (is_known or not named) else named.lower() or "own",
        "base": kind.name if kind else "",
        "source": "; ".join(filter(None, parts)),
    }
    return {**rest, **fields, **whole}
