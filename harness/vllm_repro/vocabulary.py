"""Vocabulary of scenario files: `from vllm_repro.vocabulary import Scenario, arm, chat, ...`."""

# scenario files import from here, whatever the package layout
from vllm_repro.scenario.vocabulary import *  # noqa: F403
from vllm_repro.scenario.vocabulary import __all__ as __all__
