"""Player of vLLM's front end: parsers and output processor, without an engine or a model.

It runs on a release's interpreter and imports nothing of the harness.
"""
