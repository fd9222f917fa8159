"""Real vLLM releases on this machine: which there are, how one is installed into the cache, and a tiny model to serve with it."""
