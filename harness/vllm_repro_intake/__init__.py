"""An upstream issue's text as a draft scenario, and a run as a draft issue comment.

Nothing of the text is run.
"""

VERBS = {
    "intake": (
        "vllm_repro_intake.intake_verb",
        "draft a scenario file from an issue, a pasted command or a log; nothing of it is run",
    ),
    "draft": (
        "vllm_repro_intake.run_draft",
        "write a draft issue comment from a run, and print the gh command that sends it",
    ),
}
"""Module and help line of each verb."""
