"""This machine: GPUs, memory, processes that we started, locks."""
