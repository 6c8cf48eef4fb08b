"""The bound on decoupled over coupled drafting that SpecActor's two loops imply (arXiv 2511.16193, §4.1), and the host's time
that would lift it to the published 1.3 (§5.4).

    python experiments/decoupled_bound.py

Rates are of one request: decoupled the renewal rate of two loops, coupled the rate of drafting and verifying in turns,
each with its best window (`simrl.speculation.specactor`). Acceptance is equal for all tokens.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiments.specactor_tgs import Pair, make_pair  # noqa: E402
from simrl.profile.profile import read_profile  # noqa: E402
from simrl.speculation.specactor import MOST_WINDOW, coupled_tgs, renewal_rate  # noqa: E402

ACCEPTANCES = (0.67, 0.8, 0.9)  # of the ledger's middle, of its upper end, beyond
# A verification of q tokens a request over one of 1, less 1, by q - 1: 0, bound by memory; 1, by arithmetic.
GROWTHS = np.concatenate([np.linspace(0.0, 0.2, 21), np.linspace(0.25, 1.0, 16)]).tolist()
TARGET, DRAFTER, VERIFIER_GPUS, DRAFTER_GPUS = "qwen2.5-32b", "qwen2.5-0.5b", 4, 1
REQUESTS = (16, 128, 256)  # of a worker: in the tail, and at first in both traces (§5.1)
PUBLISHED = 1.3  # §5.4: decoupled over vanilla speculation, which is 1.03 times as fast as none
WINDOWS = range(1, MOST_WINDOW + 1)


def decoupled(p: float, draft_s: float, verify_s: Callable[[int], float]) -> float:
    """Return the best rate of two loops; `verify_s` takes the query tokens of a request."""
    return max(renewal_rate(p, w, draft_s, verify_s(w)) for w in WINDOWS)


def coupled(
    p: float, draft_s: float, verify_s: Callable[[int], float], host_s: float = 0.0
) -> float:
    """Return the best rate in turns, where each round also takes `host_s`."""
    return max(coupled_tgs(p, w, draft_s, verify_s(w + 1) + host_s) for w in WINDOWS)


def growing_s(growth: float, query_tokens: int) -> float:
    """Return the seconds of a verification in units of one of a single token."""
    return 1.0 + growth * (query_tokens - 1)


def bound(p: float, growth: float) -> float:
    """Return the largest ratio over all times of a drafted token, plain decoding counting as coupled where it is faster. The
    largest is where drafting a window takes as long as verifying it, or where drafting takes no time."""
    verify_s = partial(growing_s, growth)
    drafts = [0.0, *(verify_s(w) / w for w in WINDOWS), *np.geomspace(1e-3, 10.0, 60).tolist()]
    return max(decoupled(p, d, verify_s) / max(coupled(p, d, verify_s), 1.0) for d in drafts)


def host_row(pair: Pair, p: float, requests: int, charged: bool) -> str:
    """Return a line: the ratio without time of the host, the time of a round in turns that makes it 1.3, and what drafting in
    turns is then worth. Where the drafter's GPU is `charged`, a verifier has the requests of its GPU, too."""
    share = 1 + charged * DRAFTER_GPUS / VERIFIER_GPUS
    more = round(requests * share)

    def verify_s(b: int, query_tokens: int) -> float:
        return pair.verify_s(VERIFIER_GPUS, query_tokens, b)

    ahead = decoupled(p, pair.draft_s(DRAFTER_GPUS, more), partial(verify_s, more))
    in_turns = partial(coupled, p, pair.draft_s(1, requests), partial(verify_s, requests))
    host_s = brentq(lambda s: ahead / in_turns(s) - PUBLISHED, 0.0, 10.0)
    plain = in_turns(host_s) * verify_s(requests, 1)
    return (
        f"{p:<11g}{requests:>8}  {'yes' if charged else 'no':<16}{ahead / in_turns(0.0):>7.2f}"
        f"{1e3 * host_s:>14.1f}{plain:>14.2f}"
    )


def main() -> None:
    """Print both tables."""
    print("Decoupled over coupled, at most, without the drafters' GPUs:\n")
    print("acceptance   verification takes as long for any window   grows with it")
    for p in ACCEPTANCES:
        most = [bound(p, growth) for growth in GROWTHS]
        print(f"{p:<13g}{most[0]:<44.2f}{max(most):.2f}")
    profile = read_profile(HERE.parent / "profiles" / f"{TARGET}_h100_tp{VERIFIER_GPUS}.parquet")
    pair = make_pair(DRAFTER, {VERIFIER_GPUS: profile})
    print(
        f"\nHost's ms a round, in turns alone, for {PUBLISHED}; {TARGET} on {VERIFIER_GPUS} H100:\n"
    )
    print("acceptance requests  drafter's GPU  ratio at 0  ms a round   in turns over")
    print("                     counted                    for 1.3      no drafts then")
    for charged in (False, True):
        for requests in REQUESTS:
            for p in ACCEPTANCES:
                print(host_row(pair, p, requests, charged))


if __name__ == "__main__":
    main()
