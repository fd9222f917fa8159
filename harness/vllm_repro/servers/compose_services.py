"""`docker-compose.yml` with the reported arm of each scenario. `make compose` regenerates it."""

from __future__ import annotations

from vllm_repro.command.compose import compose_text, service
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.servers.launch import ServedModel, container_launch
from vllm_repro.servers.options import default_image
from vllm_repro_diagnosis.evidence import Evidence

_HEADING = (
    "Generated from the scenarios: make compose. One service a scenario, each with its reported\n"
    "flags, on loopback only:\n"
    "  docker compose --profile tq-chunked-prefill up"
)


def compose_file() -> str:
    """Return the text of `docker-compose.yml`, with one service for each scenario."""
    services: dict[str, dict[str, object]] = {}
    for scenario in all_scenarios():
        launch = container_launch(
            scenario,
            scenario.arms[0],
            image=default_image(scenario, scenario.try_with),
            weights=ServedModel(name=scenario.model.name),
            port=8000,
            evidence=Evidence.GPU if scenario.needs.gpus else Evidence.CPU,
        )
        assert launch.container is not None
        services[scenario.id] = service(launch.container, profile=scenario.id)
    return compose_text(services, heading=_HEADING)


if __name__ == "__main__":
    print(compose_file(), end="")
