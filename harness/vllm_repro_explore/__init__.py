"""A seeded search over vLLM's scheduler alone: cases are drawn, played by a driver on the release's interpreter, and shrunk."""
