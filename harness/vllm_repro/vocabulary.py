"""Vocabulary of scenario files: `from vllm_repro.vocabulary import Scenario, arm, chat, ...`."""

from vllm_repro.scenario.vocabulary import *  # noqa: F403  # a fixed path for scenario files
from vllm_repro.scenario.vocabulary import __all__ as __all__
