"""Requests to a vLLM server, prompts of exact length, and its metrics."""
