"""Plain data to typed records, from any thread. All conversions go through this module.

msgspec 0.22 builds its description of a type when the type is first used. A second thread that uses
the type meanwhile reads an incomplete description and may crash with a segmentation fault.
"""

from __future__ import annotations

from threading import RLock
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_one_thread = RLock()
"""Hold it also after the first use: a type may contain one that is not known yet.

That takes 0.1 us.
"""


@overload
def convert(value: object, kind: type[T], *, from_attributes: bool = ...) -> T: ...
@overload
def convert(value: object, kind: Any, *, from_attributes: bool = ...) -> Any: ...


def convert(value: object, kind: Any, *, from_attributes: bool = False) -> Any:
    """Convert plain data to the type `kind`.

    from_attributes: also read objects by their attributes. Raises `msgspec.ValidationError` if the
    data do not fit.
    """
    with _one_thread:
        return msgspec.convert(value, kind, from_attributes=from_attributes)


def decode(text: bytes, kind: type[T]) -> T:
    """Decode a JSON text to the type `kind`.

    Raises `msgspec.MsgspecError` if it does not fit.
    """
    with _one_thread:
        return msgspec.json.decode(text, type=kind)
