"""The pytest plugin: scenarios as tests, and the fixture `vllm_server`."""
