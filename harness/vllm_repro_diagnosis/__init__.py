"""Log parser: from a server log or a pasted traceback to a diagnosis.

It imports the standard library alone: `python -m vllm_repro_diagnosis FILE`.
"""
