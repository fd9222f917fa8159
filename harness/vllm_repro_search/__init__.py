"""Searches that boot one scenario many times: over releases, commits, prompts and flags."""

VERBS = {
    "versions": (
        "vllm_repro_search.versions.verb",
        "map a scenario over releases: which die, which live, which are undecided",
    ),
    "bisect": (
        "vllm_repro_search.bisect.verb",
        "find the first vLLM that has a bug, or the first that is fixed",
    ),
    "threshold": ("vllm_repro_search.threshold.verb", "find the shortest prompt that crashes"),
    "minimize": (
        "vllm_repro_search.minimize.verb",
        "find the smallest part of the reported command that crashes",
    ),
}
"""Module and help line of each verb."""
