"""Seeded search of vLLM's EngineCore: random cases, played by a release and then shrunk."""

VERBS = {
    "explore": (
        "vllm_repro_explore.explore",
        "search vLLM's EngineCore for the smallest workload that kills, corrupts or stalls it",
    ),
    "gate": (
        "vllm_repro_explore.gate.verb",
        "say whether a change of vLLM fixes a known failure, breaks a workload, or neither",
    ),
    "causes": (
        "vllm_repro_explore.causes",
        "make named changes in a release one at a time, and see which die and which live",
    ),
}
"""Module and help line of each verb."""
