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
    chance, rows = random.Random(seed), dict[str, tuple[str, str]]()
    files = sorted({path for part in PARTS for path in packages.glob(part)})
    while len(rows) < count:
        path, kind = chance.choice(files), chance.choice(KINDS)
        text, file = path.read_text(encoding="utf-8"), path.relative_to(packages).as_posix()
        new = _changed_text(text, kind, chance)
        if new and new not in rows:
            compile(new, file, "exec")
            sides = (side.splitlines(keepends=True) for side in (text, new))
            diff = "".join(difflib.unified_diff(*sides, f"a/{file}", f"b/{file}"))
            rows[new] = name, _ = f"{kind}-{len(rows) + 1:03}", kind
            (folder / f"{name}.diff").write_text(diff, encoding="utf-8")
    return list(rows.values())


def _changed_text(text: str, kind: str, chance: random.Random) -> str:
    """Return `text` with one change of this kind; empty if no place has one."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    heads = [ast.unparse(node).partition("\n")[0] for node in tree.body]
    known, before = set(re.findall(r"\w+", "\n".join(heads))), ast.dump(tree)
    unfit = (ast.Lambda, ast.IfExp, *((ast.ClassDef, ast.Module) if kind == "swap" else ()))
    parents = [node for node in ast.walk(tree) if not isinstance(node, unfit)]
    bodies = [getattr(node, part, []) for node in parents for part in ("body", "orelse")]
    places = [(body, at) for body in bodies for at in range(len(body))]
    for body, at in chance.sample(places, len(places)):
        old = body[at : at + (2 if kind == "swap" else 1)]
        first = min(node.lineno for node in (old[0], *getattr(old[0], "decorator_list", ())))
        new = _replacement(kind, old, known)
        if new and not lines[first - 1].lstrip().startswith("elif"):
            body[at : at + len(old)] = new
            expected = ast.dump(tree)
            body[at : at + len(new)] = old
            written = "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in new)
            indented = re.sub("(?m)^", " " * old[0].col_offset, written) + "\n"
            changed = "".join([*lines[: first - 1], indented, *lines[old[-1].end_lineno :]])
            if ast.dump(ast.parse(changed)) == expected != before:
                return changed
    return ""


def _replacement(kind: str, old: Sequence[ast.stmt], known: Collection[str]) -> list[ast.stmt]:
    """Return what may replace the statement, or the two of a swap; empty if nothing."""
    match kind, old:
        case "rename", [ast.FunctionDef() as function]:
            return _renamed(ast.unparse(function), known)
        case "swap", [ast.Assign() as one, ast.Assign() as other] if _independent(one, other):
            return [other, one]
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
    if not local or text.count("\n") > 30 or "nonlocal" in text:
        return []
    for node in nodes:
        node.id = f"{node.id}_value" if node.id == local[0] else node.id
    return tree.body


def _independent(one: ast.Assign, other: ast.Assign) -> bool:
    """Return True if two assignments of constants and names may change places."""
    first, second = ("".join(map(ast.unparse, each.targets)) for each in (one, other))
    plain = all(isinstance(node, _PLAIN) for a in (one, other) for node in ast.walk(a.value))
    apart = first not in ast.dump(other).split("'") and second not in ast.dump(one).split("'")
    return (
        plain
        and apart
        and first != second
        and all(re.fullmatch(r"(self\.)?\w+", each) for each in (first, second))
    )
