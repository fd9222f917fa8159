from vllm_repro import frames as frames
from vllm_repro.api import RunResult as RunResult
from vllm_repro.api import load_scenario as load_scenario
from vllm_repro.api import run as run
from vllm_repro.diagnosis.diagnosis import diagnose as diagnose
from vllm_repro.running.live_server import EngineDied as EngineDied
from vllm_repro.running.live_server import VllmServer as VllmServer

__version__: str
__all__ = ["EngineDied", "RunResult", "VllmServer", "diagnose", "frames", "load_scenario", "run"]
