"""Calls of compiled operators in a Python tree, compared with the schemas in the compiled parts.

Pure, apart from reading files.

Only calls by name (`torch.ops._C.NAME(…)`) with a fixed number of arguments are compared, in the
modules that vLLM's CPU platform uses.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_MODULES = (
    "_custom_ops.py",
    "v1/worker/cpu*.py",
    "v1/attention/backends/cpu*.py",
    "platforms/cpu.py",
    "models/deepseek_v4/cpu/*.py",
    "model_executor/layers/utils.py",
)
PATHS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile("cpu_attn_.*|cpu_attention_.*|get_scheduler_metadata"),
    "experts": re.compile(".*(experts|moe).*"),
    "linear": re.compile("(convert_)?weight_packed(_linear)?"),
}
"""Parts of a model, and the operators that a server calls for them.

"linear" calls them for bfloat16 on a processor with AMX.
"""

_SCHEMA = re.compile(rb"\0([A-Za-z_][A-Za-z_0-9]*)\(([^\0]*)\) ?-> ?[^\0]+\0")
_CALLED = re.compile(r"torch\.ops\._C(?:_cache_ops|_cpu|_utils)?\.([A-Za-z_0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Parameters of a compiled operator."""

    # In order.
    names: tuple[str, ...]
    # Number of parameters without a default.
    required: int

    def takes(self, positional: int, keywords: Sequence[str]) -> bool:
        """Return True if the operator accepts a call with `positional` arguments and `keywords`."""
        passed = positional + len(keywords)
        return self.required <= passed <= len(self.names) and set(keywords) <= set(self.names)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A call in vLLM's Python that the compiled operator does not accept."""

    operator: str
    # `file:line` of the call.
    where: str
    # Number of arguments in the call. Releases in the cache keep it under this name.
    given: int
    # Number of parameters of the operator.
    takes: int

    def __str__(self) -> str:
        return f"{self.operator} ({self.where}: {self.given} arguments, compiled for {self.takes})"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Comparison of vLLM's Python calls with the compiled operators that they call."""

    # Number of calls that fit.
    fits: int
    misfits: tuple[Misfit, ...] = ()

    def __str__(self) -> str:
        misfits = f"; not {', '.join(map(str, self.misfits))}" if self.misfits else ""
        return (
            f"{self.fits} of {self.fits + len(self.misfits)} calls of compiled operators"
            f" fit{misfits}"
        )

    def missing(self, paths: Collection[str]) -> list[Misfit]:
        """Return the misfits that break these parts of a model. paths: keys of `PATHS`."""
        return [
            misfit
            for misfit in self.misfits
            if any(PATHS[path].fullmatch(misfit.operator) for path in paths)
        ]


def schemas_of(package: Path, cached: Path) -> dict[str, list[Schema]]:
    """Return the parameters of the compiled operators in `package`, by the operator's name.

    cached: a JSON file that keeps the result, since reading the libraries takes seconds.
    """
    if cached.is_file():
        texts: dict[str, list[str]] = json.loads(cached.read_text(encoding="utf-8"))
    else:
        texts = {}
        for library in sorted(package.glob("_C*.so")):
            for name, parameters in _SCHEMA.findall(library.read_bytes()):
                if parameters:  # "() -> ()" registers a name without an operator
                    texts.setdefault(name.decode(), []).append(parameters.decode(errors="replace"))
        cached.write_text(json.dumps(texts), encoding="utf-8")
    return {name: [_schema(text) for text in several] for name, several in texts.items()}


def compare(package: Path, schemas: Mapping[str, Sequence[Schema]]) -> Fit:
    """Return which operator calls in the Python tree `package` fit the compiled `schemas`.

    Operators without a schema are left out.
    """
    fits, misfits = 0, []
    for operator, positional, keywords, where in _calls(package):
        known = schemas.get(operator)
        if not known:
            continue
        if any(schema.takes(positional, keywords) for schema in known):
            fits += 1
        else:
            passed, takes = positional + len(keywords), len(known[0].names)
            misfits.append(Misfit(operator=operator, where=where, given=passed, takes=takes))
    return Fit(fits=fits, misfits=tuple(misfits))


def _schema(parameters: str) -> Schema:
    """Parse the parameters of a compiled operator, such as `Tensor input, int size=1`."""
    # Commas inside brackets belong to a type or a default, as in `int[] sizes=[1, 2]`.
    parts = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", parameters)]
    parts = [part for part in parts if part and part != "*"]
    names = tuple(part.partition("=")[0].split()[-1] for part in parts)
    return Schema(names=names, required=sum("=" not in part for part in parts))


def _calls(package: Path) -> Iterator[tuple[str, int, list[str], str]]:
    """Yield (operator, positional arguments, keywords, file:line) of each call in CPU code.

    Calls with a variable number of arguments are left out.
    """
    for path in sorted({path for pattern in _CPU_MODULES for path in package.glob(pattern)}):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:  # the boot will report it
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or any(
                isinstance(each, ast.Starred) for each in node.args
            ):
                continue
            keywords = [each.arg for each in node.keywords if each.arg]
            called = (
                _CALLED.fullmatch(ast.unparse(node.func))
                if len(keywords) == len(node.keywords)
                else None
            )
            if called:
                yield (
                    called[1],
                    len(node.args),
                    keywords,
                    f"{path.relative_to(package)}:{node.lineno}",
                )
