"""Vocabulary of scenario files: `from vllm_repro.vocabulary import Scenario, arm, chat, ...`."""

from vllm_repro.scenario.vocabulary import *  # noqa: F403  # scenario files import from here, whatever the package layout
from vllm_repro.scenario.vocabulary import __all__ as __all__
