"""A reported command as YAML: a list of arguments, a compose service, or the container of a Kubernetes pod.

People paste `- --kv-transfer-config={"a": 1}` without quotes, which YAML reads as a mapping or refuses. In a
bare list such an item is taken as the text it was meant to be; in a whole service it is an error, since no
tool would have started it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import yaml

from vllm_repro.command.docker_run import Container, resolve_program
from vllm_repro.command.shell_words import Word, split_words
from vllm_repro.errors import CommandError

__all__ = ["looks_like_yaml", "read_yaml"]

_LIST_ITEM = re.compile(r"[ \t]*-[ \t]+(?P<text>\S.*?)[ \t]*")
_TRAILING_COMMENT = re.compile(r"[ \t]+#.*")
_MAPPING_START = re.compile(r"[ \t]*[\"']?[\w.-]+[\"']?[ \t]*:(?:[ \t].*)?")
_HINT = "compare the indentation with the report; quote values that hold `: `, `{` or `#`"


def looks_like_yaml(text: str) -> bool:
    """Whether the first line that says something is a list item or a mapping key."""
    for row in text.splitlines():
        line = row.strip()
        if line and line != "---" and not line.startswith(("#", "```", "~~~")):
            return _LIST_ITEM.fullmatch(row) is not None or _MAPPING_START.fullmatch(row) is not None
    return False


def read_yaml(text: str) -> tuple[Container | None, list[Word]]:
    """The container, where the text names an image, and the server's arguments. Raises `CommandError` with
    the line."""
    # A fence would be a syntax error; an empty line keeps the line numbers.
    text = re.sub(r"(?m)^[ \t]*(?:```|~~~).*$", "", text)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        if (words := _loose_list(text)) is not None:
            return _list_arguments(words)
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "it cannot be read"
        raise CommandError(f"this is not YAML: {problem}", line=mark.line + 1 if mark else 1, hint=_HINT) from None
    except yaml.YAMLError as error:
        raise CommandError(f"this is not YAML: {error}", hint=_HINT) from None
    if isinstance(root, yaml.SequenceNode):
        if len(root.value) == 1 and isinstance(root.value[0], yaml.MappingNode) and _get(root.value[0], "image"):
            return _service(root.value[0])
        return _list_arguments(_items(root, text))
    if isinstance(root, yaml.MappingNode):
        return _service(_find_service(root))
    raise CommandError("this YAML holds neither a list of arguments nor a service", hint=_HINT)


def _list_arguments(words: Sequence[Word]) -> tuple[None, list[Word]]:
    # The list may be the whole command (`- vllm`, `- serve`, …) or its arguments only.
    _, arguments = resolve_program(Container(image=""), words)
    return None, arguments


def _loose_list(text: str) -> list[Word] | None:
    """The items of a text in which every line is a list item or empty; None where it is something else."""
    words = []
    for number, row in enumerate(text.splitlines(), 1):
        if not row.strip() or row.lstrip().startswith("#"):
            continue
        item = _LIST_ITEM.fullmatch(row)
        if item is None:
            return None
        content = item["text"]
        if content[0] in "\"'":
            try:
                content = str(yaml.load(content, Loader=yaml.BaseLoader))
            except yaml.YAMLError:
                raise CommandError("a quote in this item is never closed", line=number, hint=_HINT) from None
        else:
            content = _TRAILING_COMMENT.sub("", content)
        words.append(Word(content, number))
    return words


def _items(node: yaml.SequenceNode, text: str) -> list[Word]:
    words = []
    for item in node.value:
        line = item.start_mark.line + 1
        if isinstance(item, yaml.ScalarNode):
            words.append(Word(item.value, line))
        else:
            words.append(Word(text[item.start_mark.index : item.end_mark.index].strip(), line))
    return words


def _get(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            return value if isinstance(value, yaml.Node) else None
    return None


def _find_service(root: yaml.MappingNode) -> yaml.MappingNode:
    """The mapping that describes the server: the root itself, or the one mapping with an image anywhere in
    a whole file.
    """
    if any(_get(root, key) for key in ("image", "command", "args")):
        return root
    candidates = [node for node in _mappings(root) if _get(node, "image")]
    serving = [node for node in candidates if "vllm" in _text_of(node)] or candidates
    if len(serving) == 1:
        return serving[0]
    if serving:
        raise CommandError(
            f"{len(serving)} services could be the server",
            line=serving[1].start_mark.line + 1,
            hint="paste the one that died",
        )
    raise CommandError(
        "no image and no command found in this YAML",
        line=root.start_mark.line + 1,
        hint="paste the service with its `image:` and `command:`",
    )


def _mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item)


def _text_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.MappingNode):
        return " ".join(_text_of(value) for _, value in node.value)
    return " ".join(_text_of(item) for item in node.value)


def _service(node: yaml.MappingNode) -> tuple[Container | None, list[Word]]:
    kubernetes = _get(node, "args") is not None
    entrypoint = _command(_get(node, "command" if kubernetes else "entrypoint"))
    words = _command(_get(node, "args" if kubernetes else "command"))
    image = _scalar(_get(node, "image"))
    container = Container(
        image=image or "",
        gpus=_gpus(node),
        ports=_strings(_get(node, "ports")),
        volumes=_strings(_get(node, "volumes")),
        env=_environment(_get(node, "environment") or _get(node, "env")),
        shm_size=_scalar(_get(node, "shm_size")),
        ipc=_scalar(_get(node, "ipc")),
        network=_scalar(_get(node, "network_mode")),
        name=_scalar(_get(node, "container_name")),
        entrypoint=tuple(word.text for word in entrypoint),
        ulimits=_ulimits(_get(node, "ulimits")),
        init=_scalar(_get(node, "init")) == "true",
        runtime=_scalar(_get(node, "runtime")),
    )
    container, arguments = resolve_program(container, words)
    return (container if image else None), arguments


def _command(node: yaml.Node | None) -> list[Word]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode):
                line = item.start_mark.line + 1
                raise CommandError("this item is not one string", line=line, hint=_HINT)
        return [Word(_unescape(item.value), item.start_mark.line + 1) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        # A folded or literal block starts on the line after its indicator.
        first = node.start_mark.line + (2 if node.style in {"|", ">"} else 1)
        return [Word(_unescape(word.text), word.line) for word in split_words(node.value, first)]
    if node is not None:
        line = node.start_mark.line + 1
        raise CommandError("a command is one string or a list of strings", line=line, hint=_HINT)
    return []


def _scalar(node: yaml.Node | None) -> str | None:
    return str(node.value) if isinstance(node, yaml.ScalarNode) and node.value else None


def _strings(node: yaml.Node | None) -> tuple[str, ...]:
    """Short forms only: a long form of a port or volume says nothing that a reproduction needs."""
    if not isinstance(node, yaml.SequenceNode):
        return ()
    return tuple(str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode))


def _environment(node: yaml.Node | None) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            passed_on = isinstance(value, yaml.ScalarNode) and value.style is None and value.value in {"", "null", "~"}
            found.append((key.value, f"${key.value}" if passed_on else _unescape(_scalar(value) or "")))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.MappingNode):  # a Kubernetes pod: name and value
                name, value = _scalar(_get(item, "name")), _scalar(_get(item, "value"))
                if name:
                    found.append((name, f"${name}" if value is None else value))
            else:
                key, equals, text = str(item.value).partition("=")
                found.append((key, _unescape(text) if equals else f"${key}"))
    return tuple(found)


def _ulimits(node: yaml.Node | None) -> tuple[str, ...]:
    if not isinstance(node, yaml.MappingNode):
        return ()
    limits = []
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            soft, hard = _scalar(_get(value, "soft")), _scalar(_get(value, "hard"))
            limits.append(f"{key.value}={soft}:{hard}")
        else:
            limits.append(f"{key.value}={value.value}")
    return tuple(limits)


def _gpus(node: yaml.MappingNode) -> str | None:
    """The GPUs of a service, from `gpus:` or the reserved devices, as `docker run --gpus` has them."""
    if short := _scalar(_get(node, "gpus")):
        return short
    here: yaml.Node | None = node
    for key in ("deploy", "resources", "reservations", "devices"):
        here = _get(here, key) if isinstance(here, yaml.MappingNode) else None
    if not isinstance(here, yaml.SequenceNode):
        return None
    for device in here.value:
        if isinstance(device, yaml.MappingNode) and "gpu" in _strings(_get(device, "capabilities")):
            if ids := _strings(_get(device, "device_ids")):
                return f"device={','.join(ids)}"
            return _scalar(_get(device, "count")) or "all"
    return None


def _unescape(text: str) -> str:
    return text.replace("$$", "$")
