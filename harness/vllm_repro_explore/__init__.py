"""Seeded search of vLLM's scheduler: random cases, played on a release's interpreter, then shrunk."""
