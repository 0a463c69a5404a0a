"""What Python code reads and writes, from its bytecode, and whose code is taken on trust."""

from __future__ import annotations

import abc
import collections
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, Protocol

from ._fingerprint import Same

# Functions of these packages are taken as they are: their globals are not user state.
_LIBRARIES = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {
    *("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "flax", "optax", "orbax", "chex"),
    *("equinox", "haiku", "jaxtyping", "einops", "hcompile"),
}
# Reads of attributes by other means than their names in the bytecode: all attributes count then.
DYNAMIC_READS = frozenset(
    """getattr hasattr vars __dict__ dir fields asdict astuple attrgetter methodcaller
    getattr_static getmembers __getattribute__ setattr delattr __setattr__ __delattr__ copy deepcopy
    replace dumps format""".split()
)
_OPAQUE_CALLS = frozenset({"exec", "eval", "globals"})
# Methods that run without their name being read. Comparison and formatting are added where code
# compares or formats: a dataclass's own would otherwise make every field count.
CALLED_BY_SYNTAX = frozenset(
    f"__{name}__"
    for name in """call getitem setitem delitem len iter next contains bool int index float enter
    exit getattr getattribute setattr missing reversed complex bytes trunc floor ceil round hash
    array array_ufunc array_function divmod rdivmod imod ipow iand ior ixor ilshift irshift rand
    ror rxor rlshift rrshift get set add sub mul matmul truediv floordiv mod pow neg pos
    abs invert and or xor lshift rshift radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow iadd
    isub imul imatmul itruediv jax_array copy deepcopy replace reduce reduce_ex getstate
    setstate""".split()
) | frozenset({"tree_flatten", "tree_flatten_with_keys", "tree_unflatten"})
CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__"})
_COMPARISONS = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"})
# Functions that compare what they are given.
_COMPARERS = frozenset(
    """min max sorted sort index count remove bisect bisect_left bisect_right insort heappush
    heappop nlargest nsmallest Counter unique lt le gt ge eq ne contains indexOf countOf
    argmin argmax merge groupby""".split()
)
_FORMATTERS = frozenset({"__str__", "__repr__", "__format__"})
# What a function tells of itself beside what it does.
FUNCTION_FIELDS = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
_BY_OPCODE = {
    "COMPARE_OP": _COMPARISONS,
    "CONTAINS_OP": _COMPARISONS,
    "FORMAT_VALUE": _FORMATTERS,
    "FORMAT_SIMPLE": _FORMATTERS,
    "FORMAT_WITH_SPEC": _FORMATTERS,
    "CONVERT_VALUE": _FORMATTERS,
}
# What code does without naming it.
SUBSCRIPT = "<subscript>"
_PSEUDO_NAMES = {
    # Since 3.14 a subscript is one of the binary operations: all are taken for it there.
    "BINARY_OP" if sys.version_info >= (3, 14) else "BINARY_SUBSCR": SUBSCRIPT,
}
# Classes without state or methods of their own, which do not make an instance a library's.
PURE_BASES = (object, abc.ABC, Generic, Protocol)


# Packages whose callable objects are code: jitted functions, ufuncs. Those of others are data with
# a ``__call__``: a module of Flax or Equinox, a polynomial.
_CODE = frozenset({"jax", "jaxlib", "functools", "builtins", "types", "typing"})


def is_library_callable(value: Any) -> bool:
    """Whether a callable object is a library's code, whose identity says all."""
    module = type(value).__module__
    is_code = module.partition(".")[0] in _CODE or not hasattr(value, "__dict__")
    return is_code and is_library(module)


@functools.lru_cache(maxsize=4096)
def overridable(kind: type) -> frozenset[str]:
    """Methods that the code of a library's base class may call on this class: linen's ``setup``."""
    bases = [b for b in kind.__mro__ if b not in PURE_BASES and is_library(b.__module__)]
    members = [item for base in bases for item in vars(base).items()]
    return frozenset(
        name for name, value in members if isinstance(value, _METHODS) and not name.startswith("__")
    )


# Objects that stand for the identity of what holds them, and for nothing that code computes with.
_IDENTITIES = frozenset({("flax.ids", "FlaxId")})


def is_identity(kind: type) -> bool:
    """Whether instances only tell their owners apart: each linen module has a number of its own."""
    return (kind.__module__, kind.__qualname__) in _IDENTITIES


# Modules whose functions answer differently each time, and attributes of others that lead there.
_IMPURE_MODULES = frozenset({"random", "time", "secrets", "uuid", "numpy.random"})
_IMPURE_ATTRIBUTES = {"numpy": {"random"}, "os": {"environ", "getenv", "urandom"}}
_IMPURE_NAMES = frozenset().union(*_IMPURE_ATTRIBUTES.values())


def is_impure(module: str | None, attributes: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether what a module answers, or one of these attributes of it, is state of the process."""
    return module in _IMPURE_MODULES or bool(
        _IMPURE_ATTRIBUTES.get(module or "", set()) & attributes
    )


@functools.lru_cache(maxsize=4096)
def is_library(module: str | None) -> bool:
    root, _, rest = (module or "").partition(".")
    return root in _LIBRARIES and not rest.startswith("examples")


_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    type(vars(collections.namedtuple("_Pair", "x"))["x"]),
)


_METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


def class_parts(value: Any, name: str) -> list[Any]:
    """What there is to compare in a class's attribute: functions in descriptors, or the value."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if type(value) is property:
        return [f for f in (value.fget, value.fset) if f is not None]
    if type(value) is functools.cached_property:
        return [value.func]
    if isinstance(value, _DESCRIPTORS) or name in ("__dict__", "__weakref__", "__doc__"):
        return []
    return [value]


class CodeInfo:
    """What a code object and those nested in it read and write, from its bytecode."""

    __slots__ = (
        "compares_identity",
        "global_names",
        "imports",
        "impure_attributes",
        "names",
        "opaque",
        "writes_cells",
        "written_global",
    )

    def __init__(self, code: types.CodeType):
        names = set().union(*(c.co_names for c in _nested(code)))
        for c in _nested(code):  # a match statement, or methodcaller, names attributes in constants
            for const in c.co_consts:
                strings = const if isinstance(const, tuple) else (const,)
                names.update(s for s in strings if isinstance(s, str) and s.isidentifier())
        reads: dict[str, None] = {}
        self.written_global: tuple[str, int | None] | None = None
        self.writes_cells = False  # of an enclosing function
        self.compares_identity = False
        self.impure_attributes: set[tuple[str, str]] = set()  # of a global, if it is that module
        self.imports: list[str] = []  # by statements in the body
        before = None
        for instruction in (i for c in _nested(code) for i in dis.get_instructions(c)):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                reads[instruction.argval] = None
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                line = instruction.positions.lineno if instruction.positions else None
                self.written_global = (instruction.argval, line)
            elif instruction.opname in ("STORE_DEREF", "DELETE_DEREF"):
                self.writes_cells |= instruction.argval in code.co_freevars
            elif instruction.opname == "IMPORT_NAME":
                self.imports.append(instruction.argval)
            elif instruction.opname == "BINARY_OP" and instruction.argrepr in ("%", "%="):
                names |= _FORMATTERS
            elif instruction.opname == "IS_OP":
                self.compares_identity = True
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
                if instruction.argval in _IMPURE_NAMES:
                    self.impure_attributes.add((before, instruction.argval))
            before = instruction.argval if instruction.opname == "LOAD_GLOBAL" else None
            names |= _BY_OPCODE.get(instruction.opname, frozenset())
            if instruction.opname in _PSEUDO_NAMES:
                names.add(_PSEUDO_NAMES[instruction.opname])
        if names & {"str", "repr", "format", "print"}:
            names |= _FORMATTERS
        if names & _COMPARERS:
            names |= _COMPARISONS
        if names & {"type", "__class__", "replace", "copy"}:
            names |= CONSTRUCTORS
        self.names = frozenset(names)
        self.global_names = tuple(reads)
        self.opaque = next((n for n in reads if n in _OPAQUE_CALLS), None)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def code_info(code: types.CodeType) -> CodeInfo:
    return _code_info(Same(code))  # by identity: a code object's own hash reads all of it


@functools.lru_cache(maxsize=4096)
def _code_info(fact: Same) -> CodeInfo:
    return CodeInfo(fact.value)


def line_that_changes(code: types.CodeType, name: str) -> int:
    """The line of ``code`` that writes the variable or attribute ``name``, as far as it shows.

    Failing that, a line that reads it (and may call a method that writes), or the first line.
    """
    lines = {"STORE": 0, "LOAD": 0}
    for instruction in (i for c in _nested(code) for i in dis.get_instructions(c)):
        kind = instruction.opname.partition("_")[0]
        line = instruction.positions.lineno if instruction.positions else None
        if instruction.argval == name and kind in lines and line:
            lines[kind] = lines[kind] or line
    return lines["STORE"] or lines["LOAD"] or code.co_firstlineno
