"""vLLM releases on this machine: discovery, installation into the cache, and tiny models."""
