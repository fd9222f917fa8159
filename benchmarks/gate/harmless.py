"""Harmless changes of a release, made from a seed: each replaces statements by equivalent ones."""

import ast
import difflib
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

PARTS = (
    "vllm/v1/core/**/*.py",
    "vllm/v1/structured_output/*.py",
    "vllm/v1/simple_kv_offload/manager.py",
    "vllm/v1/kv_offload/cpu/manager.py",
    "vllm/v1/request.py",
    "vllm/v1/engine/core.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading/*.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
)
KINDS = ("rename", "swap", "negate", "branches", "extract", "log")
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def write_changes(folder: Path, packages: Path, seed: int, count: int) -> list[tuple[str, str]]:
    """Write `count` diffs of the vLLM in `packages`; return the name and kind of each."""
    files = sorted({path for part in PARTS for path in packages.glob(part)})
    chance, rows = random.Random(seed), dict[str, tuple[str, str]]()
    while len(rows) < count:
        path, kind = chance.choice(files), chance.choice(KINDS)
        text, file = path.read_text(encoding="utf-8"), path.relative_to(packages).as_posix()
        new = _changed_text(text, kind, chance)
        if new and new not in rows:
            compile(new, file, "exec")
            rows[new] = f"{kind}-{len(rows) + 1:03}", kind
            before, after = text.splitlines(keepends=True), new.splitlines(keepends=True)
            diff = difflib.unified_diff(before, after, f"a/{file}", f"b/{file}")
            (folder / f"{rows[new][0]}.diff").write_text("".join(diff), encoding="utf-8")
    return list(rows.values())


def _changed_text(text: str, kind: str, chance: random.Random) -> str:
    """Return `text` with one change of this kind; empty if no place has one."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    known = {word for node in tree.body for word in re.findall(r"\w+", lines[node.lineno - 1])}
    places = [
        (body, at)
        for node in ast.walk(tree)
        for part in ("body", "orelse")
        if isinstance(body := getattr(node, part, None), list)
        for at in range(len(body))
    ]
    for body, at in chance.sample(places, len(places)):
        old = body[at : at + (2 if kind == "swap" else 1)]
        start, end = old[0].lineno - 1, old[-1].end_lineno
        if lines[start].split()[0] != "elif" and (new := _replacement(kind, old, known)):
            body[at : at + len(old)] = new
            expected, body[at : at + len(new)] = ast.dump(tree), old
            written = ast.unparse(ast.fix_missing_locations(ast.Module(new, [])))
            indented = re.sub("(?m)^(?=.)", " " * old[0].col_offset, written) + "\n"
            changed = "".join([*lines[:start], indented, *lines[end:]])
            if ast.dump(ast.parse(changed)) == expected != ast.dump(tree):
                return changed
    return ""


def _replacement(kind: str, old: Sequence[ast.stmt], known: Collection[str]) -> list[ast.stmt]:
    """Return what may replace the statement, or the two of a swap; empty if nothing."""
    match kind, old:
        case "rename", [ast.FunctionDef(decorator_list=[]) as function]:
            return _renamed(ast.unparse(function), known)
        case "swap", [ast.Assign(), ast.Assign()]:
            return [old[1], old[0]] if _independent(";".join(map(ast.unparse, old))) else []
        case "negate", [ast.If(ast.Compare(left, [op], right)) as one] if type(op) in _OPPOSITE:
            test = ast.Compare(left, [_OPPOSITE[type(op)]()], right)
            return [ast.If(ast.UnaryOp(ast.Not(), test), one.body, one.orelse)]
        case "branches", [ast.If(orelse=[first, *_]) as one] if not isinstance(first, ast.If):
            return [ast.If(ast.UnaryOp(ast.Not(), one.test), one.orelse, one.body)]
        case "extract", [ast.Return(value=ast.Call() | ast.BinOp() as value)]:
            return ast.parse(f"returned = {ast.unparse(value)}\nreturn returned").body
        case "log", [ast.Return() as one] if "logger" in known:
            return [*ast.parse(f'logger.debug("line {one.lineno}")').body, one]
    return []


def _renamed(text: str, known: Collection[str]) -> list[ast.stmt]:
    """Return a function with another name for a local; empty if it is long or has none."""
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    other = {*re.findall(r"(?:arg|name|rest|asname)='(\w+)'", ast.dump(tree)), *known}
    local = sorted({node.id for node in nodes if isinstance(node.ctx, ast.Store)} - other)
    for node in nodes:
        node.id += "_value" * ([node.id] == local[:1])
    return tree.body if local and text.count("\n") <= 30 and "nonlocal" not in text else []


def _independent(text: str) -> bool:
    """Return True if two assignments of a constant or a local, as text, may change places."""
    words = re.findall(r"(?!None|True|False)[A-Za-z_][\w.]*", text)
    return len(set(words)) == len(words) and bool(
        re.fullmatch(r"((^|;)(self\.)?\w+ = (-?\w+|\[\]|\{\})){2}", text)
    )
