"""Runs on a Ray cluster: `--on`."""
