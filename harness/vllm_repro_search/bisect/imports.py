"""Names that commits import and that their own tree does not define, found in the syntax trees alone.

Only imports that run whenever their module is loaded count: at the top of a module or a class, not in a function, an `if` or a `try`.
A module defines every name that it binds anywhere, also in a function.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_repro.releases.sources import Source, git

__all__ = ["missing_names"]

Tree = Mapping[str, str]
"""Files of a commit, and the hash that git gives to each."""


@dataclass(frozen=True, kw_only=True)
class _Module:
    """The imports and definitions of a module.

    imports: pairs of a module and a name in it, empty for the module itself. names: None if it may define any name.
    """

    imports: frozenset[tuple[str, str]] = frozenset()
    names: frozenset[str] | None = None


def missing_names(sources: Sequence[Source], files: Collection[str]) -> dict[Source, frozenset[str]]:
    """Return the names, as in `vllm.utils.has_x`, that modules among `files` of a commit import and its tree lacks.

    sources: commits of one checkout; those that lack no name are left out. Names that the first or the last of them lacks count nowhere:
    both run, so such an import is not reached, or is of a compiled part.
    """
    checkout = sources[0].path
    trees = {source: _tree(checkout, source.commit) for source in sources}
    modules = _Modules(_contents(checkout, {digest for tree in trees.values() for digest in tree.values()}))
    lacking = {source: frozenset(_lacking(tree, modules, files)) for source, tree in trees.items()}
    everywhere = lacking[sources[0]] | lacking[sources[-1]]
    return {source: names - everywhere for source, names in lacking.items() if names - everywhere}


class _Modules(dict[tuple[str, str], _Module]):
    """Modules by a file's name, which tells what a relative import refers to, and its hash. Each is parsed at most once."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def __missing__(self, key: tuple[str, str]) -> _Module:
        file, digest = key
        self[key] = found = _module(file, self._contents[digest])
        return found


def _lacking(tree: Tree, modules: _Modules, files: Collection[str]) -> Iterator[str]:
    folders = {name.rpartition("/")[0] for name in tree}
    packages = {
        "/".join(parts[:depth]) for parts in (one.split("/") for one in folders) for depth in range(1, len(parts) + 1)
    }
    for file in files:
        if file not in tree:
            continue
        for module, name in modules[file, tree[file]].imports:
            path = module.replace(".", "/")
            found = next((one for one in (f"{path}/__init__.py", f"{path}.py") if one in tree), None)
            if found is None and path not in packages:
                yield module
            elif name and f"{path}/{name}.py" not in tree and f"{path}/{name}" not in packages:
                names = modules[found, tree[found]].names if found else frozenset()
                if names is not None and name not in names:
                    yield f"{module}.{name}"


def _tree(checkout: Path, commit: str) -> Tree:
    rows = git(checkout, "ls-tree", "-r", "-z", commit, "--", "vllm").decode().split("\0")
    return {name: head.split()[2] for head, _, name in (row.partition("\t") for row in rows) if name.endswith(".py")}


def _contents(checkout: Path, digests: Collection[str]) -> dict[str, bytes]:
    """Return the content of files by the hash that git gives to them."""
    printed = git(checkout, "cat-file", "--batch", given="".join(f"{digest}\n" for digest in digests).encode())
    contents, at = {}, 0
    for digest in digests:
        end = printed.index(b"\n", at)
        size = int(printed[at:end].split()[2])
        contents[digest] = printed[end + 1 : end + 1 + size]
        at = end + size + 2  # a newline follows the content
    return contents


def _module(file: str, content: bytes) -> _Module:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # the boot will say so
        return _Module()
    package = file.removesuffix(".py").split("/")[:-1]
    return _Module(imports=frozenset(_imports(tree.body, package)), names=_names(tree))


def _imports(body: Sequence[ast.stmt], package: Sequence[str]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _imports(node.body, package)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "vllm":
                yield from ((module, "" if alias.name == "*" else alias.name) for alias in node.names)


def _names(tree: ast.Module) -> frozenset[str] | None:
    names = {"__doc__", "__file__", "__name__", "__path__"}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="__getattr__") if node in tree.body:
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id="globals"):
                return None
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                if any(alias.name == "*" for alias in node.names):
                    return None
                names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
            case _:
                pass
    return frozenset(names)
