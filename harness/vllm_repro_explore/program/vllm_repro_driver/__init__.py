"""Plays workloads on vLLM's own scheduler and connector, with no model and no server: a program for a release's interpreter.

It is carried as data and started as `python -m vllm_repro_driver`, with itself, the lab's plugin and the release on PYTHONPATH. Nothing of
the harness is there. One line of JSON in is a case, one line out is what came of it.
"""
