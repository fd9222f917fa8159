"""The nightly job, and what changed over many nights."""

# Module and help line of each verb.
VERBS = {
    "nightly": (
        "vllm_repro_nights.nightly_verb",
        "run every scenario that this machine can, at one release: green, red or amber",
    ),
    "history": (
        "vllm_repro_nights.history_verb",
        "show what changed since the last nights: fixes, regressions, and throughput",
    ),
}
