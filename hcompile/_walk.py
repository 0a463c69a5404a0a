"""The walk over what a call can see: one fact for each value met, arrays apart.

It runs at every region call, so nothing is remembered that could have been rebound since, and what
only a miss needs (paths as text, copies) is left until then. Of a plain object, a class or a module
only those attributes count that reachable code names: a layer's ``name`` does not defeat reuse
unless something reads it.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ._code import (
    CALLED_BY_SYNTAX,
    CONSTRUCTORS,
    DYNAMIC_READS,
    FUNCTION_FIELDS,
    PURE_BASES,
    CodeInfo,
    class_parts,
    code_info,
    is_identity,
    is_impure,
    is_library,
    is_library_callable,
    overridable,
)
from ._fingerprint import (
    PLAIN,
    RAW,
    Beside,
    Same,
    Tag,
    constant,
    exact_key,
    is_array,
    is_traced,
)
from ._paths import DICTS, render
from ._rebuild import (
    Node,
    Part,
    blank_dict,
    blank_function,
    blank_object,
    contents,
    fill_copy,
    fill_dict,
    fill_function,
    fill_method,
    fill_object,
    fill_partial,
    fill_pytree,
    fill_sequence,
    instance_attributes,
)


class UnknownLeafError(Exception):
    """Something whose equality is unknown, or that cannot be rebuilt: no reuse for this call."""


_MAX_NODES = 100_000
_ARRAY, _MODULE = Tag.ARRAY, Tag.MODULE
_flatten_one_level: Any = jax.tree_util.default_registry.flatten_one_level


# --- The walk ---------------------------------------------------------------------------------


class _Namespace:
    """An object, class or module of which only the attributes that code names are walked."""

    __slots__ = ("checked", "node", "path", "replaceable", "seen")

    def __init__(self, node: Node, path: Any, replaceable: bool):
        self.node = node
        self.path = path
        self.replaceable = replaceable
        self.seen: set[str] = set()
        self.checked = -1  # how many names were known when it was last looked at


class Walk:
    """What was met so far, and a visit for each kind of value.

    Attributes:
      arrays: what is lifted, in order.
      facts: hashable values, in order; equal facts mean interchangeable calls.
      compared: concrete arrays that no rebuilding reaches (read by a method from its module, say).
        They stay constants of the body, and facts pin their identity.
    """

    visitors: ClassVar[dict[type, _Visitor]]  # by exact type; see below

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.facts: list[Hashable] = []
        self.compared: list[Any] = []
        self._paths: list[Any] = []
        self._nodes: list[Node] = []  # keeps alive what is known by its id
        self._known: tuple[dict[int, Node], dict[int, Node]] = ({}, {})  # [replaceable]
        self._visitors = self.visitors.copy()
        self._classes: dict[int, tuple[Same, bool]] = {}
        self._noted: set[int] = set()
        self._called_by_bases: dict[int, frozenset[str]] = {}
        self._namespaces: list[_Namespace] = []
        self._shared: list[tuple[Any, str, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._compares_identity = False
        self._names: set[str] = set()

    def finish(self) -> None:
        """After the last visit: named attributes, and what holds for the call as a whole."""
        self._visit_named_attributes()
        if not self._names.isdisjoint(FUNCTION_FIELDS):
            self._record_function_fields()

    def reads(self, names: Iterable[str]) -> bool:
        """Whether reachable code names one of these; see ``_code`` for what has no name."""
        return not self._names.isdisjoint(names)

    # Each ``_visit_*`` records one fact for the value itself, then visits its parts. It returns
    # what a copy may need anew: a node, or an array's number; None for a constant.

    def _visit(self, value: Any, path: Any, replaceable: bool) -> Part | None:
        kind = type(value)
        if kind in RAW:
            self.facts.append(value)
            self._paths.append(path)
            return None
        known = self._known[replaceable].get(id(value))
        if known is not None:
            self._record(("again", known.number), path)
            return known
        visitor = self._visitors.get(kind)
        if visitor is None:
            visitor = self._visitor(value)
            if value.__class__ is kind:  # a proxy can tell another class each time
                self._visitors[kind] = visitor
        return visitor(self, value, path, replaceable)

    def _visit_parts(
        self, where: Any, parts: Iterable[tuple[Hashable, Any]], replaceable: bool
    ) -> dict[Hashable, Part]:
        """Visits ``(key, value)`` pairs, found at ``(where, key)``."""
        found: dict[Hashable, Part] = {}
        for key, value in parts:
            if type(value) in RAW:  # as in ``_visit``; most are
                self.facts.append(value)
                self._paths.append((where, key))
                continue
            part = self._visit(value, (where, key), replaceable)
            if part is not None:
                found[key] = part
        return found

    @staticmethod
    def _visitor(value: Any) -> _Visitor:
        """For all values of its type, which this walk will not ask about again."""
        if is_traced(value) or is_array(value):
            return Walk._visit_array
        if isinstance(value, types.FunctionType):
            return Walk._visit_function
        if isinstance(value, types.MethodType):
            return Walk._visit_method
        if isinstance(value, functools.partial):
            return Walk._visit_partial
        if isinstance(value, types.ModuleType):
            return Walk._visit_module
        if isinstance(value, type):
            return Walk._visit_class
        if isinstance(value, _GETTERS):
            return Walk._visit_getter
        if isinstance(value, enum.Enum):
            return Walk._visit_enum
        if isinstance(value, _PERHAPS_CONSTANT):
            return Walk._visit_perhaps_constant
        if constant(value) is not None:
            return Walk._visit_constant
        if not jax.tree_util.all_leaves((value,)):
            return Walk._visit_pytree
        if callable(value) and is_library_callable(value):
            return Walk._visit_library_callable
        return Walk._visit_object

    def _visit_constant(self, value: Any, path: Any, replaceable: bool) -> None:
        self._record(constant(value), path)

    def _visit_perhaps_constant(self, value: Any, path: Any, replaceable: bool) -> Part | None:
        fact = constant(value)
        if fact is None:
            raise UnknownLeafError(f"{render(path)} is a {type(value).__name__} of objects")
        self._record(fact, path)
        return self._copied_array(value, replaceable) if isinstance(value, np.ndarray) else None

    def _record(self, fact: Hashable, path: Any) -> None:
        self.facts.append(fact)
        self._paths.append(path)

    def _add(self, value: Any, replaceable: bool, mutable: bool = False) -> Node:
        if len(self._nodes) > _MAX_NODES:
            raise UnknownLeafError(f"it leads to over {_MAX_NODES} objects")
        node = Node(value, len(self._nodes), mutable)
        self._known[replaceable][id(value)] = node
        self._nodes.append(node)
        return node

    def _copied_array(self, value: np.ndarray, replaceable: bool) -> Node:
        """A NumPy array can be written to, so the body gets its own."""
        node = self._add(value, replaceable, mutable=True)
        node.fill = fill_copy
        self._remember_contents(value, replaceable)
        return node

    def _visit_array(self, value: Any, path: Any, replaceable: bool) -> Part | None:
        if not is_array(value):
            raise UnknownLeafError(f"{render(path)} is a traced value that is no array")
        if replaceable:
            self.facts.append(_ARRAY)
            self._paths.append(path)
            self.arrays.append(value)  # not by identity: one array in two places is two inputs
            return len(self.arrays) - 1
        if is_traced(value):
            raise UnknownLeafError(f"{render(path)} is a traced array that cannot be made an input")
        self._record((_ARRAY, Same(value)), path)
        self.compared.append(value)
        return None

    def _visit_function(self, fn: types.FunctionType, path: Any, replaceable: bool) -> Part | None:
        namespace = fn.__globals__
        module = namespace.get("__name__")
        if is_impure(module):
            raise UnknownLeafError(f"{render(path)} can answer differently each time")
        library = is_library(module)
        if library and not fn.__closure__:
            self._record(Same(fn), path)
            return None
        node = self._add(fn, replaceable)
        node.blank, node.fill = blank_function, fill_function
        code = fn.__code__
        self._record((Same(code), len(fn.__defaults__ or ())), path)
        visible, imported = [], []
        if not library:
            info = self._note_code(code, path)
            node.mutable = info.writes_cells
            if info.writes_cells and not replaceable:
                raise UnknownLeafError(f"{render(path)} assigns a variable of an outer function")
            visible = [n for n in info.global_names if n in namespace]
            imported = [(("import", n), self._imported(n, path)) for n in info.imports]
            for name, attribute in info.impure_attributes:
                owner = namespace.get(name)
                if isinstance(owner, types.ModuleType) and is_impure(owner.__name__, {attribute}):
                    raise UnknownLeafError(f"{name}.{attribute} can answer differently each time")
            self._record(tuple(visible), path)
        if fn.__dict__:
            node.mutable = True
            self._namespaces.append(_Namespace(node, path, replaceable))
        parts: list[tuple[Hashable, Any]] = []
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                parts.append((("cell", name), cell.cell_contents))
            except ValueError:
                self._record(("an empty cell",), path)
        if fn.__defaults__:
            parts += [(("default", i), default) for i, default in enumerate(fn.__defaults__)]
        if fn.__kwdefaults__:
            self._record(("names", *fn.__kwdefaults__), path)
            parts += [(("default", n), default) for n, default in fn.__kwdefaults__.items()]
        parts += [(("global", n), namespace[n]) for n in visible]
        node.parts = self._visit_parts(fn, parts + imported, replaceable)
        return node

    @staticmethod
    def _imported(name: str, path: Any) -> types.ModuleType:
        if name not in sys.modules:
            raise UnknownLeafError(f"{render(path)} imports {name or 'its own package'}")
        return sys.modules[name]

    def _note_code(self, code: types.CodeType, path: Any) -> CodeInfo:
        info = code_info(code)
        if info.written_global:
            name, line = info.written_global
            raise UnknownLeafError(f"line {line} of {code.co_filename} assigns the global {name!r}")
        if info.opaque:
            raise UnknownLeafError(f"{code.co_qualname} calls {info.opaque}(), which can read all")
        self._names |= info.names
        self._compares_identity |= info.compares_identity
        return info

    def _visit_method(self, method: types.MethodType, path: Any, replaceable: bool) -> Node:
        node = self._add(method, replaceable)
        self._record(("method",), path)
        node.fill = fill_method
        for key, part, where in (
            ("self", method.__self__, ("self", None)),
            ("func", method.__func__, path),
        ):
            found = self._visit(part, where, replaceable)
            if found is not None:
                node.parts[key] = found
        return node

    def _visit_partial(self, value: functools.partial, path: Any, replaceable: bool) -> Node:
        node = self._add(value, replaceable)
        self._record(("partial", Same(type(value))), path)
        parts = [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
        node.parts = self._visit_parts(path, parts, replaceable)
        node.fill = fill_partial
        return node

    def _visit_sequence(self, value: tuple | list, path: Any, replaceable: bool) -> Part | None:
        kind, kinds = type(value), tuple(map(type, value))
        plain = PLAIN.issuperset(kinds)
        self._record((kind, kinds, tuple(value)) if plain else (kind, len(kinds)), path)
        if plain and kind is tuple:
            return None
        node = self._add(value, replaceable, mutable=kind is list)
        node.fill = fill_sequence
        self._remember_contents(value, replaceable)
        if not plain and replaceable and all(map(is_array, value)):
            node.parts = self._visit_arrays((path, value), value)
        elif not plain:
            node.parts = self._visit_parts((path, value), enumerate(value), replaceable)
        return node

    def _visit_arrays(self, where: Any, arrays: Sequence[Any]) -> dict[Hashable, Part]:
        """As ``_visit_parts``, but at once, since most arguments are these."""
        numbers, first = range(len(arrays)), len(self.arrays)
        self.facts += [_ARRAY] * len(arrays)
        self._paths += [(where, i) for i in numbers]
        self.arrays += arrays
        return {i: first + i for i in numbers}

    def _visit_dict(self, value: dict, path: Any, replaceable: bool) -> Node:
        """A dict in its own order of keys, which loops can see and ``jax.tree_util`` would sort."""
        node = self._add(value, replaceable, mutable=True)
        node.blank, node.fill = blank_dict, fill_dict
        self._remember_contents(value, replaceable)
        keys: tuple[Hashable, ...] = tuple(value)
        if not set(map(type, keys)) <= {str}:
            keys = tuple(self._key_fact(key, path) for key in keys)
        kinds = tuple(map(type, value.values()))
        if PLAIN.issuperset(kinds):
            self._record((type(value), keys, kinds, tuple(value.values())), path)
        else:
            self._record((type(value), keys), path)
            parts = enumerate(value.values())
            node.parts = self._visit_parts((path, value), parts, replaceable)
        factory = getattr(value, "default_factory", None)
        if factory is not None:
            self._visit(factory, path, False)
        return node

    def _key_fact(self, key: Any, path: Any) -> Hashable:
        fact = constant(key)
        if fact is not None:
            return fact
        if isinstance(key, (type, types.FunctionType)):
            return Same(key)
        raise UnknownLeafError(f"{render(path)} has a key {key!r} of unknown equality")

    def _remember_contents(self, value: Any, replaceable: bool) -> None:
        """Of what is reached through a class or module, and so is not copied."""
        if not replaceable:
            self._contents.append((value, contents(value)))

    def _visit_pytree(self, value: Any, path: Any, replaceable: bool) -> Node:
        """One level of a pytree: its parts, and what its class keeps beside them."""
        kind, (children, beside) = type(value), _flatten_one_level(value)
        node = self._add(value, replaceable, mutable=True)
        node.fill = fill_pytree
        self._remember_contents(value, replaceable)
        plain = beside is None or beside is kind  # a named tuple's is its class
        exact = None if plain else exact_key(beside)
        children = tuple(children)
        fact, _ = self._note_classes(kind, path)
        self._record((_MODULE, fact, len(children), exact), path)
        node.parts = self._visit_parts((path, value), enumerate(children), replaceable)
        if exact is None and not plain:
            self._visit_beside(beside, path)
        return node

    def _visit_beside(self, beside: Any, path: Any) -> None:
        """Static data of a pytree node. Treespecs use ``==``, which takes ``1`` for ``1.0``, and an
        object in it can change."""
        self._visit(beside, path, False)
        self._record(Beside(beside), path)

    def _visit_set(self, value: set, path: Any, replaceable: bool) -> Node:
        facts = tuple(map(constant, value))
        if None in facts:
            raise UnknownLeafError(f"{render(path)} is a set of unknown equality")
        node = self._add(value, replaceable, mutable=True)
        self._remember_contents(value, replaceable)
        self._record(("set", *facts), path)  # in its own order, which loops can see
        node.fill = fill_copy
        return node

    def _visit_library_callable(self, value: Any, path: Any, replaceable: bool) -> Node:
        """A jitted function, a ufunc, a ``custom_vjp``: the very object, and what it wraps."""
        owner = getattr(value, "__self__", None)
        has_state = owner is not None and not isinstance(owner, (type, types.ModuleType))
        if has_state or isinstance(value, (weakref.ref, _LRU_CACHE)):
            raise UnknownLeafError(f"{render(path)} is a {type(value).__name__} with state")
        if is_impure(getattr(value, "__module__", None)):
            raise UnknownLeafError(f"{render(path)} can answer differently each time")
        node = self._add(value, replaceable)
        self._record(Same(value), path)
        inside = (getattr(value, "__wrapped__", None), *getattr(value, "__dict__", {}).values())
        for part in inside:  # the rules of a custom_vjp, the function of a jit
            if isinstance(part, types.FunctionType):
                self._visit(part, path, False)
        return node

    def _visit_getter(self, value: Any, path: Any, replaceable: bool) -> None:
        """``operator.attrgetter`` and its kin read what they were made with."""
        _, arguments = value.__reduce__()[:2]
        self._record(Same(type(value)), path)
        strings = [a for a in arguments if isinstance(a, str)]
        self._names |= set(itertools.chain.from_iterable(s.split(".") for s in strings))
        if isinstance(value, operator.methodcaller):
            raise UnknownLeafError(f"{render(path)} calls a method by name")
        self._visit(arguments, path, False)

    def _visit_enum(self, value: enum.Enum, path: Any, replaceable: bool) -> None:
        """A member is one object; its class can have methods, and it attributes of its own."""
        self._record(Same(value), path)
        self._note_classes(type(value), path)
        if not is_library(type(value).__module__):
            self._namespaces.append(_Namespace(Node(value, -1), path, False))

    def _visit_module(self, value: types.ModuleType, path: Any, replaceable: bool) -> Part | None:
        if is_impure(value.__name__):
            raise UnknownLeafError(f"{render(path)} is the module {value.__name__}")
        self._record(Same(value), path)
        if is_library(value.__name__):
            return None
        node = self._add(value, replaceable)
        self._namespaces.append(_Namespace(node, path, False))
        return node

    def _visit_class(self, value: type, path: Any, replaceable: bool) -> None:
        self._record(Same(value), path)
        self._names |= CONSTRUCTORS
        self._note_classes(value, path)
        self._note_classes(type(value), path)

    def _visit_object(self, value: Any, path: Any, replaceable: bool) -> Node:
        kind = type(value)
        attributes = instance_attributes(value)
        if attributes is None:
            raise UnknownLeafError(f"{render(path)} is a {kind.__qualname__}: unknown equality")
        if is_identity(kind):
            self._record(Same(kind), path)
            return self._add(value, replaceable)
        node = self._add(value, replaceable, mutable=True)
        node.blank, node.fill = blank_object, fill_object
        self._remember_contents(value, replaceable)
        fact, has_library = self._note_classes(kind, path)
        if has_library:  # whose code is not read: the object counts whole
            names = sorted(attributes)
            self._record((_MODULE, fact, *names), path)
            parts = [(name, attributes[name]) for name in names]
            node.parts = self._visit_parts(path, parts, replaceable)
        else:
            self._record((_MODULE, fact), path)
            self._namespaces.append(_Namespace(node, path, replaceable))
        return node

    def _note_classes(self, kind: type, path: Any) -> tuple[Same, bool]:
        """Classes whose methods the body may run: what their code reads counts too.

        Returns a fact for ``kind``, and whether it has code of a library, which is not read.
        """
        noted = self._classes.get(id(kind))
        if noted is None:
            has_library = False
            for base in kind.__mro__:
                if is_library(base.__module__):
                    has_library |= base not in PURE_BASES
                elif id(base) not in self._noted:
                    self._noted.add(id(base))
                    self._record(Same(base), path)
                    self._namespaces.append(_Namespace(Node(base, -1), path, False))
                    self._called_by_bases[id(base)] = overridable(base)
            noted = self._classes[id(kind)] = (Same(kind), has_library)
        return noted

    # Plain objects come last, and again whenever code that was met since names more attributes.

    def _visit_named_attributes(self) -> None:
        progress = True
        while progress:
            progress = False
            for number, space in enumerate(self._namespaces):
                if space.checked == len(self._names):
                    continue
                space.checked = len(self._names)
                attributes = _attributes(space.node.value)
                names = sorted(self._named(space, attributes) - space.seen)
                if names:
                    progress = True
                    space.seen.update(names)
                    self._record((number, *names), space.path)
                    self._visit_attributes(space, [(n, attributes[n]) for n in names])

    def new_names(self) -> list[tuple[Any, str]]:
        """Attributes that classes and modules have got since, by owner and name."""
        shared = [s for s in self._namespaces if isinstance(s.node.value, _SHARED)]
        return [
            (space.node.value, name)
            for space in shared
            for name in self._named(space, _attributes(space.node.value)) - space.seen
        ]

    def _check_copies(self) -> None:
        """Where identity is compared, nothing may be seen both as a copy and as itself."""
        copied, kept = self._known[True], self._known[False]
        for key in copied.keys() & kept.keys():
            if copied[key].mutable:
                name = type(copied[key].value).__qualname__
                raise UnknownLeafError(f"a {name} is reached through a class or module as well")

    def _record_function_fields(self) -> None:
        functions = [n.value for n in self._nodes if isinstance(n.value, types.FunctionType)]
        fields = (getattr(fn, name) for fn in functions for name in FUNCTION_FIELDS)
        self._record(("of functions", *map(repr, fields)), ("the functions", None))

    def _named(self, space: _Namespace, attributes: Mapping[str, Any]) -> set[str]:
        names = attributes.keys()
        reads_all = not self._names.isdisjoint(DYNAMIC_READS)
        if isinstance(space.node.value, type):
            called = CALLED_BY_SYNTAX | self._called_by_bases[id(space.node.value)]
            plain = {n for n in names if not n.startswith("__")} if reads_all else set()
            return plain | (names & self._names) | (names & called)
        if reads_all:
            return set(names)
        if isinstance(space.node.value, types.ModuleType):
            return names & (self._names | {"__getattr__"})
        return names & self._names

    def _visit_attributes(self, space: _Namespace, attributes: list[tuple[str, Any]]) -> None:
        value = space.node.value
        if isinstance(value, _SHARED):
            self._shared += [(value, name, attribute) for name, attribute in attributes]
        if isinstance(value, type):
            for name, attribute in attributes:
                parts = [(name, part) for part in class_parts(attribute, name)]
                self._visit_parts(space.path, parts, False)
        else:
            parts = self._visit_parts(space.path, attributes, space.replaceable)
            space.node.parts.update(parts)


# --- Kinds of values --------------------------------------------------------------------------


_Visitor = Callable[[Walk, Any, Any, bool], Part | None]

Walk.visitors = {
    bool: Walk._visit_constant,
    float: Walk._visit_constant,
    complex: Walk._visit_constant,
    range: Walk._visit_constant,
    types.FunctionType: Walk._visit_function,
    types.MethodType: Walk._visit_method,
    types.ModuleType: Walk._visit_module,
    functools.partial: Walk._visit_partial,
    type: Walk._visit_class,
    tuple: Walk._visit_sequence,
    list: Walk._visit_sequence,
    set: Walk._visit_set,
    **dict.fromkeys(DICTS, Walk._visit_dict),
}
# Whether these are constants depends on what they hold.
_PERHAPS_CONSTANT = (np.ndarray, np.generic, slice, frozenset)
_SHARED = (type, types.ModuleType, enum.Enum)
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_LRU_CACHE = type(functools.lru_cache(lambda: None))


def _attributes(value: Any) -> Mapping[str, Any]:
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return vars(value)
    return instance_attributes(value) or {}
