from vllm_repro.api import RunResult as RunResult
from vllm_repro.api import load_scenario as load_scenario
from vllm_repro.api import run as run
from vllm_repro.errors import CommandError as CommandError
from vllm_repro.errors import InfraError as InfraError
from vllm_repro.errors import ReproError as ReproError
from vllm_repro.errors import ScenarioError as ScenarioError
from vllm_repro.errors import Unsupported as Unsupported
from vllm_repro.errors import UsageError as UsageError
from vllm_repro.running.live_server import EngineDied as EngineDied
from vllm_repro.running.live_server import VllmServer as VllmServer
from vllm_repro.running.live_server import VllmServerFactory as VllmServerFactory
from vllm_repro_diagnosis.diagnosis import diagnose as diagnose
from vllm_repro_nights import frames as frames

__version__: str
__all__ = ["EngineDied", "RunResult", "VllmServer", "diagnose", "load_scenario", "run"]
__all__ += ["CommandError", "InfraError", "ReproError", "ScenarioError", "Unsupported"]
__all__ += ["UsageError", "VllmServerFactory"]
__all__ += ["frames"]  # of vllm_repro_nights
