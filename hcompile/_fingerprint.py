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
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.core
import numpy as np
from jax import export

_Tracer = jax.core.Tracer


class Tag(enum.Enum):
    """What a leaf of a call's arguments or captures is."""

    ARRAY = "array"  # an input of the body
    CONSTANT = "constant"  # part of the body, equal in value and type
    SYMBOLIC_DIM = "symbolic dimension"  # of jax.export; part of the body, equal as an expression
    MODULE = "module"  # an object with a structure of its own, which is compared; arrays lifted
    UNKNOWN = "unknown"  # the call is not eligible for reuse

    __hash__ = object.__hash__  # in C, unlike that of Enum


class Same:
    """A fact that holds for one object only, by identity. Does not keep the object alive.

    A live object has one ``Same``, so that facts are hashed and compared by identity, in C.
    """

    __slots__ = ("_ref",)
    _ref: Callable[[], Any]

    def __new__(cls, value: Any) -> Same:
        known = _sames.get(id(value))
        if known is not None and known._ref() is value:
            return known
        key = id(value)
        try:
            ref = weakref.ref(value, lambda ref: _forget(key, ref))
        except TypeError:
            return _Held(value)
        self = object.__new__(cls)
        self._ref = ref
        _sames[key] = self
        return self

    @property
    def value(self) -> Any:
        """The object; None if it is gone."""
        return self._ref()

    def __repr__(self) -> str:
        value = self._ref()
        if value is None:
            return "<an object that is gone>"
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        return f"{name or type(value).__name__} at {id(value):#x}"


class _Held(Same):
    """Of an object without weak references: keeping it alive keeps its id from being reused."""

    __slots__ = ()

    def __new__(cls, value: Any) -> Same:
        self = object.__new__(cls)
        self._ref = lambda: value
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self._ref() is other._ref()

    def __hash__(self) -> int:
        return id(self._ref())


# By id, which may be another object's by now: whoever reads an entry compares the object too.
_sames: dict[int, Same] = {}


def _forget(key: int, ref: Any) -> None:
    known = _sames.get(key)
    if known is not None and known._ref is ref:
        del _sames[key]


class Constant(tuple):
    """A fact about a value and its type; ``nan`` equals itself, ``0.0`` does not equal ``-0.0``.

    A tuple, whose hash and equality are C's, of the type and what tells values of it apart.
    """

    shown: Any

    @property
    def key(self) -> Hashable:
        return self

    def __repr__(self) -> str:
        text = repr(self.shown)
        return text if len(text) <= 60 else text[:57] + "..."


# Constants that are their own facts: none of them equals one of another type, or another fact.
RAW = frozenset({int, str, bytes, types.NoneType, types.EllipsisType})


def is_constant(fact: Any) -> bool:
    """Whether ``fact`` is about one constant."""
    return type(fact) in RAW or isinstance(fact, Constant)


def integers(fact: Any) -> Iterator[int]:
    """Every Python int in a fact, which may be about several constants."""
    if type(fact) is int:
        yield fact
    elif isinstance(fact, tuple):
        for part in fact:
            yield from integers(part)


# What JAX's own check, which is slow, says of JAX's types, and of tracers with such an aval.
_array_types: dict[Any, bool] = {}


def is_array(value: Any) -> bool:
    """Whether ``value`` is lifted to an input: a ``jax.Array``, which a tracer is too.

    Not a NumPy array: Python code can branch on it, write to it, and compute with it in NumPy's
    own dtypes. It is a constant.
    """
    kind = type(value)
    known = _array_types.get(kind)
    if known is None and issubclass(kind, _Tracer):
        kind = (kind, type(value.aval))
        known = _array_types.get(kind)
    if known is None:
        known = isinstance(value, jax.Array)
        if known and (isinstance(kind, tuple) or kind.__module__.startswith("jaxlib.")):
            _array_types[kind] = known
    return known


def is_symbolic_dim(value: Any) -> bool:
    """Whether ``value`` is a dimension, or an expression of such, of ``jax.export``'s shapes."""
    return export.is_symbolic_dim(value)


def is_traced(value: Any) -> bool:
    return isinstance(value, _Tracer)


# Immutable, and equal only when interchangeable. A subclass can hold attributes: no constant.
PLAIN = frozenset({bool, int, str, bytes, types.NoneType, types.EllipsisType, range})
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
    if key is None:
        return None
    fact = Constant(key)
    fact.shown = value
    return fact


def _constant_key(value: Any) -> tuple | None:
    kind = type(value)
    if kind in PLAIN:
        return (kind, value)
    if kind is float and value and value == value:
        return (kind, value)
    if kind in (float, complex):
        return (kind, repr(value))  # repr tells nan and -0.0 apart
    if isinstance(value, _BY_VALUE):
        return (kind, value)
    if isinstance(value, np.generic) and _is_plain_scalar(value):
        return (kind, value.dtype, value.tobytes())
    if kind is np.ndarray and not value.dtype.hasobject:
        content = hashlib.blake2b(np.ascontiguousarray(value)).digest()
        return (kind, value.dtype, value.shape, value.strides, content)
    if isinstance(value, slice):
        return _sequence_key(kind, (value.start, value.stop, value.step))
    if is_symbolic_dim(value):
        return (Tag.SYMBOLIC_DIM, value)
    if isinstance(value, frozenset) and kind is frozenset:  # in its own order, which loops can see
        return _sequence_key(kind, tuple(value))
    return None


def _is_plain_scalar(value: np.generic) -> bool:
    """Of a library's own type: a subclass can hold attributes."""
    return type(value).__module__ in ("numpy", "ml_dtypes") and not value.dtype.hasobject


def _sequence_key(kind: type, values: tuple) -> tuple | None:
    keys = tuple(map(_constant_key, values))
    return None if None in keys else (kind, *keys)


def exact_key(value: Any) -> Hashable | None:
    """What tells plain constants apart, down to their types; in a tuple, or a tuple of tuples."""
    if type(value) is not tuple:
        return (value, type(value)) if type(value) in PLAIN else None
    flat: list[Any] = []
    for part in value:
        if type(part) is tuple:
            flat += part
        else:
            flat.append(part)
    kinds = tuple(map(type, flat))
    return (value, kinds) if PLAIN.issuperset(kinds) else None


class Beside:
    """What a pytree node keeps beside its children, compared as treespecs compare it."""

    __slots__ = ("data",)

    def __init__(self, data: Any):
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Beside) and bool(self.data == other.data)

    def __hash__(self) -> int:  # as treespecs, which allow it to be unhashable
        return hash(Beside)

    def __repr__(self) -> str:
        return repr(self.data)
