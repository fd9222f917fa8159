"""ServerOptions that choose a server, shared by the verbs that start or show one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.servers.kinds import kinds
from vllm_repro.servers.options import ServerOptions

__all__ = ["add_server_options", "number", "release", "seconds", "server_options", "span"]

_ALL = ("server", "url", "image", "vllm", "model", "weights", "port", "log", "patch", "guard", "record")


def add_server_options(parser: argparse.ArgumentParser, which: Sequence[str] = _ALL) -> None:
    """Adds those of the options that `which` names."""
    if "server" in which:
        parser.add_argument(
            "--server",
            choices=("auto", *kinds()),
            default="auto",
            help="where the vLLM comes from (default: auto, which picks one and prints why): "
            + "; ".join(f"{kind}: {kind.facts.summary}" for kind in kinds()),
        )
    if "url" in which:
        parser.add_argument("--url", metavar="U", help="attach to the server that runs at this URL")
    if "image" in which:
        parser.add_argument("--image", metavar="I", help="the image to run (default: the official one of the release)")
    if "vllm" in which:
        parser.add_argument(
            "--vllm",
            type=release,
            metavar="V",
            help="the release, such as 0.23.0; a process server or the lab installs it into a cache",
        )
    if "model" in which:
        parser.add_argument("--model", metavar="M", help="a model folder or name in place of the scenario's stand-in")
    if "weights" in which:
        parser.add_argument(
            "--weights",
            choices=("real", "dummy"),
            help="the model's own weights, or random ones of a small model with the same attention, made on the spot",
        )
    if "port" in which:
        parser.add_argument("--port", type=_port, metavar="P", help="the loopback port (default: a free one)")
    if "log" in which:
        parser.add_argument(
            "--log", type=Path, metavar="FILE", help="the log of an attached server, where it is not found by itself"
        )

    if "patch" in which:
        parser.add_argument(
            "--patch",
            type=Path,
            metavar="FILE",
            help="a unified diff of vLLM to lay over the image or release: what git diff prints in a checkout of vLLM",
        )
    if "guard" in which:
        parser.add_argument(
            "--guard",
            action="store_true",
            default=None,
            help="in the lab: while graphs are captured, refuse every copy and wait between host and device, as CUDA does",
        )
    if "record" in which:
        parser.add_argument(
            "--record",
            action="store_true",
            default=None,
            help="in the lab: under that guard, record what graphs capture and serve by replaying it, as a GPU does",
        )


def number(text: str, *, least: int, most: int, what: str) -> int:
    """A whole number of an option, or argparse's error in words of ours."""
    if not text.strip().lstrip("-").isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return int(text)


def _port(text: str) -> int:
    return number(text, least=1, most=65535, what="port")


def seconds(text: str) -> float:
    """More than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def span(text: str) -> float:
    """Seconds: `90`, `90s`, `30m`, `2h`."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:].lower())
    try:
        return seconds(text if unit is None else text[:-1]) * (unit or 1)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90s, 30m or 2h") from None


def release(text: str) -> str:
    """`0.23.0`, or `v0.23.0` as images are tagged."""
    try:
        return str(Version(text.removeprefix("v")))
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{text!r} is no release, such as 0.23.0") from None


def server_options(arguments: argparse.Namespace) -> ServerOptions:
    """The `ServerOptions` that a parsed command line holds."""
    given = {name: getattr(arguments, name) for name in _ALL if getattr(arguments, name, None) is not None}
    return ServerOptions(**given)
