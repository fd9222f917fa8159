"""Program for a release's interpreter: play workloads on vLLM's EngineCore without a model.

Started as `python -m vllm_repro_driver`, with this program, the lab's plugin and the release on
PYTHONPATH and nothing of the harness. Each line of input is a case as JSON, each line of output its
result.
"""
