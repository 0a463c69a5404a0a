"""Putting a call together again with other arrays, on copies of whatever can be written to."""

from __future__ import annotations

import collections
import operator
import struct
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np


class Node:
    """One value that the walk met, its parts by key, and how to put new parts together.

    ``parts`` holds what a copy may need anew: nodes, and arrays by their number. What is in neither
    is constant, and stays as it is. ``blank`` allocates the copy before its parts are known, so
    that cycles can be rebuilt; it and ``fill`` are None for a value that is only compared.
    """

    __slots__ = ("blank", "fill", "mutable", "number", "parts", "value")

    def __init__(self, value: Any, number: int, mutable: bool = False):
        self.value = value
        self.number = number
        self.mutable = mutable
        self.parts: dict[Hashable, Part] = {}
        self.blank: Callable[[Any], Any] | None = None
        self.fill: Callable[[Any, Any, dict[Hashable, Any]], Any] | None = None


Part = Node | int


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [s for s in found if s not in ("__dict__", "__weakref__")]


_IS_HEAP_TYPE = 1 << 9
_POINTER = struct.calcsize("P")
# What a class lays out when it is made: names of slots, or None if there is more than these.
_layouts: weakref.WeakKeyDictionary[type, list[str] | None] = weakref.WeakKeyDictionary()


def _layout(kind: type) -> list[str] | None:
    built_in = {base for base in kind.__mro__[:-1] if not base.__flags__ & _IS_HEAP_TYPE}
    if built_in - {types.SimpleNamespace}:
        return None  # a subclass of float holds a number besides
    slots = _slots(kind)
    hidden = kind.__basicsize__ - object.__basicsize__ - _POINTER * len(slots)
    return None if kind.__itemsize__ or not 0 <= hidden <= 2 * _POINTER else slots


def instance_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes an instance holds; None if it holds state that Python cannot see.

    Such state makes an instance larger than its slots and the two pointers of ``__dict__`` and
    ``__weakref__``: a lock, a file, a NumPy generator.
    """
    kind = type(value)
    try:
        slots = _layouts[kind]
    except KeyError:
        slots = _layouts[kind] = _layout(kind)
    if slots is None or not (slots or hasattr(value, "__dict__")):
        return None
    attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    return {s: getattr(value, s) for s in slots if hasattr(value, s)} | attributes


def contents(value: Any) -> Any:
    """What ``restore_contents`` needs to put a mutable value back; None if that cannot be."""
    if isinstance(value, (list, dict, set, np.ndarray)):
        return value.copy()
    return instance_attributes(value)


def _is_same(value: Any, contents: Any) -> bool:
    if list(value) != list(contents):
        return False
    if isinstance(value, set):
        return True
    return all(map(operator.is_, value.values(), contents.values()))


def restore_contents(value: Any, contents: Any) -> None:
    """Makes a mutable value what it was."""
    if contents is None:
        return
    if isinstance(value, list):
        if len(value) != len(contents) or not all(map(operator.is_, value, contents)):
            value[:] = contents
    elif isinstance(value, (dict, set)):
        if not _is_same(value, contents):  # never emptied for nothing: others may read it
            value.clear()
            value.update(contents)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = contents
    else:
        now = instance_attributes(value) or {}
        for name in now.keys() - contents.keys():
            object.__delattr__(value, name)
        for name, attribute in contents.items():
            if now.get(name) is not attribute:
                object.__setattr__(value, name, attribute)


class Rebuilder:
    """Copies of the nodes that hold arrays or can be written to; the other values as they are."""

    def __init__(self, arrays: Sequence[Any], nodes: list[Node]):
        self._arrays = arrays
        self._done: dict[int, Any] = {}
        self._needed = {id(n) for n in nodes if n.mutable}
        grown = True
        while grown:  # to a fixed point, since nodes can form cycles
            fresh = {
                id(n)
                for n in nodes
                if id(n) not in self._needed and any(map(self._is_needed, n.parts.values()))
            }
            self._needed |= fresh
            grown = bool(fresh)

    def _is_needed(self, part: Part) -> bool:
        return isinstance(part, int) or id(part) in self._needed

    def __call__(self, part: Part) -> Any:
        if isinstance(part, int):
            return self._arrays[part]
        if id(part) not in self._needed or part.fill is None:
            return part.value
        if id(part) not in self._done:
            blank = None
            if part.blank is not None:
                blank = self._done[id(part)] = part.blank(part.value)
            parts = {key: self(inner) for key, inner in part.parts.items()}
            self._done[id(part)] = part.fill(blank, part.value, parts)
        return self._done[id(part)]


# How copies are allocated and filled. ``parts`` are the new ones; the others are the old value's.


def blank_function(fn: types.FunctionType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    copy = types.FunctionType(fn.__code__, dict(fn.__globals__), fn.__name__, None, cells)
    copy.__dict__.update(fn.__dict__)
    copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
    return copy


def fill_function(copy: Any, fn: Any, parts: dict[Any, Any]) -> types.FunctionType:
    names = fn.__code__.co_freevars
    for name, old, new in zip(names, fn.__closure__ or (), copy.__closure__ or (), strict=True):
        try:
            new.cell_contents = parts.get(("cell", name), old.cell_contents)
        except ValueError:  # an empty cell
            pass
    defaults = enumerate(fn.__defaults__ or ())
    new_defaults = tuple(parts.get(("default", i), old) for i, old in defaults)
    copy.__defaults__ = fn.__defaults__ and new_defaults
    kwdefaults = (fn.__kwdefaults__ or {}).items()
    new_kwdefaults = {n: parts.get(("default", n), old) for n, old in kwdefaults}
    copy.__kwdefaults__ = fn.__kwdefaults__ and new_kwdefaults
    for key, value in parts.items():
        if isinstance(key, str):
            copy.__dict__[key] = value
        elif key[0] == "global":
            copy.__globals__[key[1]] = value
    return copy


def fill_method(_: None, old: types.MethodType, parts: dict[Any, Any]) -> types.MethodType:
    return types.MethodType(parts.get("func", old.__func__), parts.get("self", old.__self__))


def fill_partial(_: None, old: Any, parts: dict[Any, Any]) -> Any:
    args, keywords = parts.get("args", old.args), parts.get("keywords", old.keywords)
    return type(old)(parts.get("func", old.func), *args, **keywords)


def fill_sequence(_: None, old: Any, parts: dict[Any, Any]) -> Any:
    return type(old)(parts.get(i, part) for i, part in enumerate(old))


def fill_pytree(_: None, old: Any, parts: dict[Any, Any]) -> Any:
    children, treedef = jax.tree_util.tree_flatten(old, is_leaf=lambda part: part is not old)
    new = [parts.get(i, child) for i, child in enumerate(children)]
    return jax.tree_util.tree_unflatten(treedef, new)


def fill_copy(_: None, old: Any, parts: dict[Any, Any]) -> Any:
    return old.copy(order="K") if isinstance(old, np.ndarray) else old.copy()


def blank_dict(value: Any) -> Any:
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory)
    return type(value)()


def fill_dict(copy: Any, value: Any, parts: dict[Any, Any]) -> Any:
    for i, (key, old) in enumerate(value.items()):
        copy[key] = parts.get(i, old)
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
