"""Leaves of a call: what kind each is, and what must be equal for a cached body to serve it.

The tags are those of ``torch.compiler.nested_compile_region``'s subgraph reuse. An array is known
by its place alone, since ``jax.jit`` keeps one trace for each set of shapes, dtypes, weak types
and shardings behind a cached body; a constant is known by type and value.
"""

from __future__ import annotations

import enum
import hashlib
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import numpy as np
from jax import export


class Tag(enum.Enum):
    """What a leaf of a call's arguments or captures is."""

    ARRAY = "array"  # an input of the body
    CONSTANT = "constant"  # part of the body, equal in value and type
    SYMBOLIC_DIM = "symbolic dimension"  # of jax.export; part of the body, equal as an expression
    MODULE = "module"  # an object with a structure of its own, which is compared; arrays lifted
    UNKNOWN = "unknown"  # the call is not eligible for reuse


class Same:
    """A fact that holds for one object only, by identity. Does not keep the object alive."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any):
        try:
            self._ref = weakref.ref(value)
        except TypeError:  # no weak references: keeping it alive keeps its id from being reused
            self._ref = lambda: value
        self._hash = id(value)

    def value(self) -> Any:
        """The object, or None if it is gone."""
        return self._ref()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self._ref()
        return mine is not None and mine is other._ref()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        value = self._ref()
        if value is None:
            return "<an object that is gone>"
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        return f"{name or type(value).__name__} at {id(value):#x}"


class Constant:
    """A fact about a value and its type; ``nan`` equals itself, ``0.0`` does not equal ``-0.0``."""

    __slots__ = ("key", "shown")

    def __init__(self, key: Hashable, shown: Any):
        self.key = key
        self.shown = shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        text = repr(self.shown)
        return text if len(text) <= 60 else text[:57] + "..."


def is_number(fact: Any, kind: type) -> bool:
    """Whether ``fact`` is about a Python number of exactly this type."""
    return isinstance(fact, Constant) and type(fact.shown) is kind


def is_array(value: Any) -> bool:
    """Whether ``value`` is lifted to an input: a ``jax.Array``, which a tracer is too.

    Not a NumPy array: Python code can branch on it, write to it, and compute with it in NumPy's
    own dtypes. It is a constant.
    """
    return isinstance(value, jax.Array)


def is_symbolic_dim(value: Any) -> bool:
    """Whether ``value`` is a dimension, or an expression of such, of ``jax.export``'s shapes."""
    return export.is_symbolic_dim(value)


def is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


# Immutable, and equal only when interchangeable. A subclass can hold attributes: no constant.
_PLAIN = frozenset({bool, int, str, bytes, types.NoneType, types.EllipsisType, range})
_BY_VALUE = (
    enum.Enum,
    np.dtype,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
)


def constant(value: Any) -> Constant | None:
    """The fact for ``value`` if it is a constant, else None."""
    key = _constant_key(value)
    return None if key is None else Constant(key, value)


def _constant_key(value: Any) -> Hashable | None:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _BY_VALUE):
        return (kind, value)
    if kind in (float, complex):
        return (kind, repr(value))  # repr tells nan, -0.0 and every digit apart
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return (kind, value.tobytes())
    if kind is np.ndarray and not value.dtype.hasobject:
        content = hashlib.blake2b(np.ascontiguousarray(value)).digest()
        return (kind, value.dtype, value.shape, content)
    if isinstance(value, slice):
        return _sequence_key(kind, (value.start, value.stop, value.step))
    if is_symbolic_dim(value):
        return (Tag.SYMBOLIC_DIM, value)
    if isinstance(value, frozenset) and kind is frozenset:
        key = _sequence_key(kind, tuple(value))
        return None if key is None else (kind, frozenset(key[1:]))
    return None


def _sequence_key(kind: type, values: tuple) -> tuple | None:
    keys = tuple(map(_constant_key, values))
    return None if None in keys else (kind, *keys)
