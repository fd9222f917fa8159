"""This machine: GPUs, memory, processes that the harness started, locks."""
