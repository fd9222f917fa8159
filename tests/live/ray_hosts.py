"""Ray cluster of three hosts: network namespaces of this machine with own addresses.

It needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
_PORT = 6399


class Hosts:
    """A head without room for a run, which is host 1, and nodes with room for one each."""

    def __init__(self, nodes: int = 2) -> None:
        self._all = range(1, nodes + 2)
        self._name = f"vr{os.getpid() % 100_000}"
        self.address = f"{self.ip(1)}:{_PORT}"
        try:
            _call("ip", "netns", "add", self._space("switch"))
            _call(*self.within("switch"), "ip", "link", "add", "bridge", "type", "bridge")
            _call(*self.within("switch"), "ip", "link", "set", "bridge", "up")
            for host in self._all:
                self._add(host)
            small = ["--num-cpus", "1", "--object-store-memory", "100000000"]
            self._ray(1, "--head", "--port", f"{_PORT}", "--include-dashboard", "false", *small)
            for host in self._all[1:]:
                self._ray(
                    host, "--address", self.address, "--resources", '{"vllm_repro": 1}', *small
                )
        except BaseException:
            self.end()
            raise

    @staticmethod
    def ip(host: int) -> str:
        return f"10.77.0.{host}"

    def _space(self, host: int | str) -> str:
        return f"{self._name}-{host}"

    def within(self, host: int | str) -> tuple[str, ...]:
        """Return the words that run a command on a host."""
        return ("ip", "netns", "exec", self._space(host))

    def environment(self) -> dict[str, str]:
        return {**os.environ, **_ENVIRONMENT}

    def cut(self, host: int, other: int) -> None:
        """Drop every packet from one host to the other."""
        _call(*self.within(other), "iptables", "-A", "INPUT", "-s", self.ip(host), "-j", "DROP")

    def lose(self, host: int) -> None:
        """Kill what Ray runs on a host, as if the machine were switched off."""
        for process in self._processes(host):
            process.kill()

    def end(self) -> None:
        for host in (*self._all, "switch"):
            for process in self._processes(host):
                process.kill()
            subprocess.run(
                ["ip", "netns", "delete", self._space(host)], check=False, capture_output=True
            )

    def _processes(self, host: int | str) -> list[psutil.Process]:
        done = subprocess.run(
            ["ip", "netns", "pids", self._space(host)], check=False, capture_output=True, text=True
        )
        return [
            psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))
        ]

    def _add(self, host: int) -> None:
        _call("ip", "netns", "add", self._space(host))
        ends = (
            f"card{host}",
            "netns",
            self._space(host),
            "type",
            "veth",
            "peer",
            "name",
            f"port{host}",
        )
        _call("ip", "link", "add", *ends, "netns", self._space("switch"))
        _call(*self.within("switch"), "ip", "link", "set", f"port{host}", "master", "bridge", "up")
        _call(
            *self.within(host), "ip", "address", "add", f"{self.ip(host)}/24", "dev", f"card{host}"
        )
        for card in ("lo", f"card{host}"):
            _call(*self.within(host), "ip", "link", "set", card, "up")

    def _ray(self, host: int, *words: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        _call(
            *self.within(host),
            ray,
            "start",
            "--node-ip-address",
            self.ip(host),
            *words,
            env=self.environment(),
        )


def _call(*words: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
