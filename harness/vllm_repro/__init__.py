"""Reproduce an upstream vLLM engine death with one command, and prove it."""

__version__ = "0.1.0"
