"""Claims of AReaL (arXiv 2505.24298), in the settings of `experiments.reproduce.areal`: H800, GPUs and prompts divided by
eight (1.5B) and four (7B)."""

from __future__ import annotations

from statistics import mean

from experiments.claims.claim import Claim, Figure, all_above, within
from experiments.reproduce import areal as paper
from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import Inputs

LEDGER = "areal"
CLUSTERS = {"1.5B": (paper.SMALL, (32, 64, 128, 256)), "7B": (paper.LARGE, (64, 128, 256, 512))}
IN_DRAWS = ("1.5B",)
CAPS = {"16K": 15360, "32K": 31744}  # contexts, of which 1K is the prompt's


def clusters(whole: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the models with their clusters: all at the middle, the smaller one in draws."""
    return {name: of for name, of in CLUSTERS.items() if whole or name in IN_DRAWS}


def throughput(
    lab: Lab, inputs: Inputs, model: str, gpus: int, asynchronous: bool, cap: int = CAPS["16K"]
) -> float:
    """Return thousand trained response tokens a second."""
    system = paper.fig4(inputs) if asynchronous else paper.verl(inputs)
    return paper.rate(lab, inputs, model, gpus, system, cap)


def scaling(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-1."""
    found, agrees = dict[str, float](), True
    for name, (model, gpus) in clusters(whole).items():
        times = gpus[-1] / gpus[0]
        shares = [
            throughput(lab, inputs, model, gpus[-1], own)
            / throughput(lab, inputs, model, gpus[0], own)
            / times
            for own in (True, False)
        ]
        found |= {f"{name} AReaL": shares[0], f"{name} verl": shares[1]}
        agrees &= shares[0] >= 0.6 and shares[0] >= 1.4 * shares[1]
    return Figure(found, agrees)


def lead(lab: Lab, inputs: Inputs, model: str, gpus: int, cap: int = CAPS["16K"]) -> float:
    """Return AReaL's throughput over verl's."""
    own, theirs = (
        throughput(lab, inputs, model, gpus, asynchronous, cap) for asynchronous in (True, False)
    )
    return own / theirs


def level_then_ahead(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-2."""
    least = {
        f"{name} least": lead(lab, inputs, model, gpus[0])
        for name, (model, gpus) in clusters(whole).items()
    }
    most = {
        f"{name} most": lead(lab, inputs, model, gpus[-1])
        for name, (model, gpus) in clusters(whole).items()
    }
    return Figure(
        {**least, **most}, within(least, 0.8, 1.25).agrees and all_above(most, 1.4).agrees
    )


def by_eta(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-3."""
    etas, cap = (0, 1, 4, 16), inputs["cap_tokens"]
    found = {
        f"eta {eta}": paper.rate(lab, inputs, paper.SMALL, 128, paper.areal(inputs, eta), cap)
        for eta in etas
    }
    rises = found["eta 1"] > 1.5 * found["eta 0"]
    return Figure(found, rises and found["eta 4"] <= found["eta 16"] <= 1.15 * found["eta 4"])


def interrupts(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-4."""
    found = {}
    for name in clusters(whole):
        row = f"areal-interrupt-{name.replace('.', 'p').lower()}"
        own, without = paper.ROWS[row](lab, inputs)
        found[name] = own / without
    return within(found, 1.05, 1.4)


def dynamic(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-5."""
    return within({"mean of 1.5B and 7B": 1 + paper.dynamic_batches(lab, inputs)[0]}, 1.1, 1.6)


def order(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-6."""
    found, agrees = dict[str, float](), True
    for name in clusters(whole):
        row = f"areal-hours-{name.replace('.', 'p').lower()}"
        own, verl, synchronous = paper.ROWS[row](lab, inputs)
        found |= {f"{name} AReaL": own, f"{name} verl": verl, f"{name} synchronous": synchronous}
        agrees &= own < verl < synchronous
    return Figure(found, agrees)


def longer_contexts(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate ar-7."""
    found = {
        name: mean(
            lead(lab, inputs, model, gpus[2], cap) for model, gpus in clusters(whole).values()
        )
        for name, cap in CAPS.items()
    }
    return Figure(found, found["32K"] > found["16K"])


_EIGHTH = "an eighth of the GPUs, prompts and concurrent prompts (7B: a quarter); 1.5B in draws"

CLAIMS = {
    "ar-1": Claim(
        LEDGER,
        scaling,
        "at 8x the GPUs AReaL keeps >= 0.6 of linear and >= 1.4 times verl's share",
        _EIGHTH,
    ),
    "ar-2": Claim(
        LEDGER,
        level_then_ahead,
        "ratio 0.8-1.25 at the least and > 1.4 at the most",
        _EIGHTH,
        "at 64 GPUs AReaL's 16 trainer GPUs pace it, which also compute the proximal log-probs, at an assumed MFU of 0.3, and "
        "verl's workers have CUDA graphs",
        {
            "an MFU of 0.4 in AReaL": {"mfu": 0.4},
            "an MFU of 0.2 in verl": {"verl_mfu": 0.2},
            "no CUDA graphs in verl": {"enforce_eager": True},
        },
    ),
    "ar-3": Claim(
        LEDGER,
        by_eta,
        "eta 1 > 1.5x eta 0, eta 16 within 15 % of eta 4 but not below it",
        _EIGHTH,
        "the trainer paces both, and they differ by how micro-batches of their batches fill",
        {
            "an MFU of 0.4": {"mfu": 0.4},
            "one batch at once": {"max_concurrent": 512},
        },
    ),
    "ar-4": Claim(
        LEDGER,
        interrupts,
        "1.05 to 1.4",
        f"{_EIGHTH}; 7B a half",
    ),
    "ar-5": Claim(
        LEDGER,
        dynamic,
        "1.1 to 1.6 in training throughput",
        "one batch on the trainers of 16 and 24 nodes",
    ),
    "ar-6": Claim(
        LEDGER,
        order,
        "order",
        _EIGHTH,
        ablations={
            "no CUDA graphs in verl": {"enforce_eager": True},
            "0.7 of the memory in verl": {"verl_gpu_memory_utilization": 0.7},
            "log-probs in the synchronous AReaL": {"sync_log_probs": 1},
            "one batch at once in AReaL": {"max_concurrent": 512},
        },
    ),
    "ar-7": Claim(
        LEDGER, longer_contexts, "ratio rises", f"{_EIGHTH}; 1.5B on 128, 7B on 256 GPUs"
    ),
}
