"""Putting a call together again with other arrays, on copies of whatever can be written to."""

from __future__ import annotations

import collections
import struct
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Node:
    """One value that the walk met, its parts by key, and how to put new parts together.

    ``blank`` allocates the copy before its parts are known, so that cycles can be rebuilt; it and
    ``fill`` are None for a value that is only compared. A node without ``parts`` and with an
    ``index`` is an array.
    """

    __slots__ = ("blank", "fill", "index", "mutable", "parts", "value")

    def __init__(self, value: Any, *, mutable: bool = False, index: int | None = None):
        self.value = value
        self.index = index
        self.mutable = mutable
        self.parts: dict[Hashable, Node] = {}
        self.blank: Callable[[Any], Any] | None = None
        self.fill: Callable[[Any, Any, dict[Hashable, Any]], Any] | None = None


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [s for s in found if s not in ("__dict__", "__weakref__")]


_POINTER = struct.calcsize("P")


def instance_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes an instance holds; None if it holds state that Python cannot see.

    Such state makes an instance larger than its slots and the two pointers of ``__dict__`` and
    ``__weakref__``: a lock, a file, a NumPy generator.
    """
    kind = type(value)
    slots = _slots(kind)
    hidden = kind.__basicsize__ - object.__basicsize__ - _POINTER * len(slots)
    has_attributes = bool(slots) or hasattr(value, "__dict__")
    if not has_attributes or kind.__itemsize__ or not 0 <= hidden <= 2 * _POINTER:
        return None
    attributes = {s: getattr(value, s) for s in slots if hasattr(value, s)}
    return attributes | dict(getattr(value, "__dict__", {}))


class Rebuilder:
    """Copies of the nodes that hold arrays or can be written to; the other values as they are."""

    def __init__(self, arrays: Sequence[Any], nodes: list[Node]):
        self._arrays = arrays
        self._done: dict[int, Any] = {}
        self._needed = {id(n) for n in nodes if n.index is not None or n.mutable}
        grown = True
        while grown:  # to a fixed point, since nodes can form cycles
            fresh = {
                id(n)
                for n in nodes
                if id(n) not in self._needed
                and any(id(part) in self._needed for part in n.parts.values())
            }
            self._needed |= fresh
            grown = bool(fresh)

    def __call__(self, node: Node) -> Any:
        if node.index is not None:
            return self._arrays[node.index]
        if id(node) not in self._needed or node.fill is None:
            return node.value
        if id(node) not in self._done:
            blank = None
            if node.blank is not None:
                blank = self._done[id(node)] = node.blank(node.value)
            parts = {key: self(part) for key, part in node.parts.items()}
            self._done[id(node)] = node.fill(blank, node.value, parts)
        return self._done[id(node)]


def blank_function(fn: types.FunctionType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    copy = types.FunctionType(fn.__code__, dict(fn.__globals__), fn.__name__, None, cells)
    copy.__dict__.update(fn.__dict__)
    copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
    return copy


def fill_function(copy: Any, fn: Any, parts: dict[Any, Any]) -> types.FunctionType:
    for name, cell in zip(fn.__code__.co_freevars, copy.__closure__ or (), strict=True):
        if ("cell", name) in parts:
            cell.cell_contents = parts["cell", name]
    defaults = fn.__defaults__
    copy.__defaults__ = defaults and tuple(parts["default", i] for i in range(len(defaults)))
    kwdefaults = fn.__kwdefaults__
    copy.__kwdefaults__ = kwdefaults and {name: parts["kwdefault", name] for name in kwdefaults}
    for key, value in parts.items():
        if isinstance(key, str):
            copy.__dict__[key] = value
        elif key[0] == "global":
            copy.__globals__[key[1]] = value
    return copy


def blank_dict(value: Any) -> Any:
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory)
    return type(value)()


def fill_dict(copy: Any, value: Any, parts: dict[Any, Any]) -> Any:
    copy.update(zip(value, parts.values(), strict=True))
    return copy


def blank_object(value: Any) -> Any:
    kind: Any = type(value)
    if isinstance(kind.__new__, types.FunctionType):  # a class's own may want arguments
        return object.__new__(kind)
    return kind.__new__(kind)


def fill_object(copy: Any, value: Any, parts: dict[Any, Any]) -> Any:
    for name, attribute in ((instance_attributes(value) or {}) | parts).items():
        object.__setattr__(copy, name, attribute)
    return copy
