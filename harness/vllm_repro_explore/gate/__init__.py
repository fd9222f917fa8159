"""`vllm-repro gate`: whether a change of vLLM fixes a known failure or makes a new one."""
