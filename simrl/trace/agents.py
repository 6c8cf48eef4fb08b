"""Stated statistics of two agents, fields of a length model from which `simrl trace synth` draws their trajectories.

The shape of a trajectory is taken from published ones; tools, rewards and correlations are assumed.

- Turns: Codex on SWE-bench Pro, 610 trajectories: 33 model calls on average, at the median 30, at the 90th and 99th percentile
  57 and 90 (huggingface.co/datasets/Inferact/codex_swebenchpro_traces), as a lognormal of sigma 0.5 has. Their output
  tokens have this sigma, too (15,666, 29,968 and 40,542): turns are in proportion to the response.
- Tokens of a turn: 520 on average there, and in 357,161 steps of Claude Code and Codex (tracelab.cs.washington.edu). Contexts
  end at 84,000 tokens there; here turns are shorter, so that 30 of them fit into 32,768.
- Searching: up to 128 turns, and more than 40 calls in the longest trajectories (ASearcher, arXiv 2508.07976).
"""

from __future__ import annotations

from typing import Any

_BATCH: dict[str, Any] = {
    "steps": 12,
    "prompts_per_step": 32,
    "group": 8,
    "cap_tokens": 32768,
    "context_cap_tokens": 32768,
    "sigma": 0.5,
    "turn_sigma": 1.0,
}
CODING_AGENT: dict[str, Any] = {
    **_BATCH,
    "turns": 30,
    "cap_turns": 100,
    "turn_tokens": 250,
    "system_prompt_tokens": 1500,
    "prompt_tokens": 1000,
    "prompt_sigma": 0.5,
    "prompt_cap_tokens": 4096,
    "tools": {
        "read": {
            "share": 0.45,
            "median_s": 3,
            "sigma": 0.5,
            "least_s": 2,
            "most_s": 60,
            "observation_tokens": 500,
            "observation_sigma": 1.0,
            "observation_cap_tokens": 4000,
        },
        "edit": {
            "share": 0.25,
            "median_s": 3,
            "sigma": 0.5,
            "least_s": 2,
            "most_s": 60,
            "observation_tokens": 150,
            "observation_sigma": 0.5,
            "observation_cap_tokens": 1000,
        },
        "test": {
            "share": 0.3,
            "median_s": 15,
            "sigma": 0.9,
            "least_s": 2,
            "most_s": 60,
            "straggler_share": 0.02,
            "straggler_factor": 5,
            "failure_share": 0.02,
            "timeout_s": 120,
            "retries": 1,
            "observation_tokens": 450,
            "observation_sigma": 1.0,
            "observation_cap_tokens": 4000,
        },
    },
}
"""A coding agent: 30 turns on average, tools of 2 to 60 s, of which a few straggle, contexts of up to 32,768 tokens."""
SEARCH_AGENT: dict[str, Any] = {
    **_BATCH,
    "turns": 10,
    "cap_turns": 128,
    "sigma": 0.8,
    "turn_tokens": 400,
    "system_prompt_tokens": 600,
    "prompt_tokens": 100,
    "prompt_sigma": 0.5,
    "tools": {
        "search": {
            "share": 0.7,
            "median_s": 1.5,
            "sigma": 0.6,
            "failure_share": 0.01,
            "timeout_s": 30,
            "retries": 2,
            "observation_tokens": 700,
            "observation_sigma": 0.5,
            "observation_cap_tokens": 4000,
        },
        "browse": {
            "share": 0.3,
            "median_s": 4,
            "sigma": 0.9,
            "failure_share": 0.05,
            "timeout_s": 30,
            "retries": 2,
            "observation_tokens": 1500,
            "observation_sigma": 0.8,
            "observation_cap_tokens": 8000,
        },
    },
}
"""A search agent: 10 turns on average, searches of a second or two, pages of several seconds that sometimes fail."""
