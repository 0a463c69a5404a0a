"""What a call can see, taken apart by path: arrays to lift, and facts that must stay equal.

A function sees its arguments, and what it captured: closure cells, defaults, a bound ``self``,
the globals that it and its helpers read. ``capture`` walks all of them and returns

- ``arrays``: every array found, in the order of the walk. They become inputs, so layer 7's weights
  take layer 0's place;
- ``facts``: everything else, as hashable values in the same order. Two calls with equal facts
  differ in their arrays only;
- ``rebuild(arrays)``: the call with other arrays (tracers) in those places. Whatever holds an array
  or can be written to is rebuilt as a copy, so tracing cannot touch the caller's objects; if the
  copies differ from the originals afterwards, the function had a side effect.

The walk runs at every region call, so nothing is remembered that could have been rebound since.
Of a plain object, a class or a module only those attributes count that reachable code names: a
layer's ``name`` does not defeat reuse unless something reads it.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from . import _jax_compat
from ._code import (
    CALLED_BY_SYNTAX,
    CONSTRUCTORS,
    DYNAMIC_READS,
    PURE_BASES,
    CodeInfo,
    code_info,
    is_impure,
    is_library,
)
from ._fingerprint import Same, Tag, constant, is_array, is_traced
from ._rebuild import (
    Node,
    Rebuilder,
    blank_dict,
    blank_function,
    blank_object,
    fill_dict,
    fill_function,
    fill_object,
    instance_attributes,
)


class UnknownLeafError(Exception):
    """Something whose equality is unknown, or that cannot be rebuilt: no reuse for this call."""


_MAX_NODES = 100_000
_tree_flatten = jax.tree_util.tree_flatten


# --- The walk ---------------------------------------------------------------------------------


class _Namespace:
    """An object, class or module of which only the attributes that code names are walked.

    ``all_names``: an instance of a library's class, whose own code is not read, counts whole.
    """

    __slots__ = ("all_names", "node", "number", "path", "replaceable", "seen")

    def __init__(self, node: Node, number: int, path: Any, replaceable: bool, all_names: bool):
        self.node = node
        self.number = number
        self.path = path
        self.replaceable = replaceable
        self.all_names = all_names
        self.seen: set[str] = set()


class Captured:
    """A call taken apart; see the module's docstring.

    Attributes:
      arrays: what is lifted, in order.
      facts: hashable values, in order; equal facts mean interchangeable calls.
      compared: concrete arrays that no rebuilding reaches (read by a method from its module, say).
        They stay constants of the body, and facts pin their identity.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        self.arrays: list[Any] = []
        self.facts: list[Hashable] = []
        self.compared: list[Any] = []
        self._paths: list[Any] = []
        self._nodes: list[Node] = []
        self._known: dict[tuple[int, bool | str], tuple[Node, int]] = {}
        self._namespaces: list[_Namespace] = []
        self._shared: list[tuple[Any, str, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._compares_identity = False
        self._alias: tuple[int, ...] | None = None
        self._names: set[str] = set()
        self._fn = self._visit(fn, ("", None), True)
        self._arguments = self._visit((args, kwargs), ("arguments", None), True)
        self._visit_named_attributes()
        if self._compares_identity:  # ``q is k`` would see which arrays are one
            first: dict[int, int] = {}
            alias = tuple(first.setdefault(id(a), i) for i, a in enumerate(self.arrays))
            self._record(("the same arrays", alias), ("the arrays", None))
            self._alias = alias

    def reads(self, names: Iterable[str]) -> bool:
        """Whether reachable code names one of these; see ``_code`` for what has no name."""
        return not self._names.isdisjoint(names)

    def path(self, index: int) -> str:
        """Where fact number ``index`` was found, e.g. ``self.norm.eps`` or ``arguments[0][1]``."""
        return _render(self._paths[index]) if index < len(self._paths) else "the end"

    def rebuild(self, arrays: Sequence[Any]) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
        """``(fn, args, kwargs)`` with ``arrays`` in the places of ``self.arrays``."""
        rebuilder = Rebuilder(self.placed(arrays), self._nodes)
        fn = rebuilder(self._fn)
        args, kwargs = rebuilder(self._arguments)
        return fn, args, kwargs

    def placed(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """``arrays`` as the body sees them: one for each group that is one here, if it can tell."""
        return arrays if self._alias is None else [arrays[i] for i in self._alias]

    def restore_shared(self) -> None:
        """Puts back what a trace changed in classes and modules, which are not copied."""
        for value, contents in self._contents:
            if isinstance(value, list):
                value[:] = contents
            else:
                value.clear()
                value.update(contents)
        for owner, name, value in self._shared:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    # Each ``_visit_*`` records one fact for the value itself, then visits its parts.

    def _visit(self, value: Any, path: Any, replaceable: bool) -> Node:
        if is_array(value):
            return self._visit_array(value, path, replaceable)
        fact = constant(value)
        if fact is not None:
            self._record(fact, path)
            return self._constant_node(value)
        known = self._known.get((id(value), replaceable))
        if known is not None:
            self._record(("again", known[1]), path)
            return known[0]
        if len(self._nodes) > _MAX_NODES:
            raise UnknownLeafError(f"{_render(path)} leads to over {_MAX_NODES} objects")
        return self._visitor(value)(self, value, path, replaceable)

    @staticmethod
    def _visitor(value: Any) -> Callable[[Captured, Any, Any, bool], Node]:
        if isinstance(value, types.FunctionType):
            return Captured._visit_function
        if isinstance(value, types.MethodType):
            return Captured._visit_method
        if isinstance(value, functools.partial):
            return Captured._visit_partial
        if isinstance(value, (type, types.ModuleType)):
            return Captured._visit_class_or_module
        if isinstance(value, dict) and type(value) in _DICTS:
            return Captured._visit_dict
        if _is_container(value):
            return Captured._visit_container
        if isinstance(value, (set, types.CellType)):
            return Captured._visit_set_or_cell
        if callable(value) and is_library(type(value).__module__):
            return Captured._visit_library_callable
        return Captured._visit_object

    def _record(self, fact: Hashable, path: Any) -> None:
        self.facts.append(fact)
        self._paths.append(path)

    def _add(self, value: Any, replaceable: bool, mutable: bool = False) -> Node:
        node = Node(value, mutable=mutable)
        self._known[id(value), replaceable] = (node, len(self._nodes))
        self._nodes.append(node)
        return node

    def _constant_node(self, value: Any) -> Node:
        node = Node(value)
        if isinstance(value, np.ndarray):  # can be written to, so the body gets its own
            node.mutable = True
            node.fill = lambda _, old, new: old.copy()
            self._nodes.append(node)
        return node

    def _visit_array(self, value: Any, path: Any, replaceable: bool) -> Node:
        if replaceable:
            self._record(Tag.ARRAY, path)
            node = Node(value, index=len(self.arrays))
            self.arrays.append(value)
            self._nodes.append(node)  # not by identity: one array in two places is two inputs
            return node
        if is_traced(value):
            raise UnknownLeafError(
                f"{_render(path)} is a traced array that cannot be made an input"
            )
        self._record((Tag.ARRAY, Same(value)), path)
        self.compared.append(value)
        return Node(value)

    def _visit_function(self, fn: types.FunctionType, path: Any, replaceable: bool) -> Node:
        node = self._add(fn, replaceable)
        library = is_library(fn.__globals__.get("__name__"))
        if is_impure(fn.__globals__.get("__name__")):
            raise UnknownLeafError(f"{_render(path)} can answer differently each time")
        if library and not fn.__closure__:
            self._record(Same(fn), path)
            return node
        self._record(("function", Same(fn.__code__)), path)
        visible = {}
        if not library:
            info = self._note_code(fn.__code__, path)
            node.mutable = info.writes_cells
            visible = {n: fn.__globals__[n] for n in info.global_names if n in fn.__globals__}
            for name, attribute in info.module_attributes:
                module = visible.get(name)
                if isinstance(module, types.ModuleType) and is_impure(module.__name__, {attribute}):
                    raise UnknownLeafError(f"{name}.{attribute} can answer differently each time")
            self._record(tuple(visible), path)
        if fn.__dict__:
            node.mutable = True
            self._namespaces.append(_Namespace(node, len(self._nodes), path, replaceable, False))
        parts: dict[Hashable, tuple[Any, str]] = {}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if _jax_compat.is_empty(cell):
                self._record("an empty cell", path)
            else:
                parts["cell", name] = (cell.cell_contents, name)
        for i, default in enumerate(fn.__defaults__ or ()):
            parts["default", i] = (default, f"default {i} of {fn.__name__}")
        for name, default in (fn.__kwdefaults__ or {}).items():
            parts["kwdefault", name] = (default, f"default {name} of {fn.__name__}")
        for name, value in visible.items():
            parts["global", name] = (value, f"global {name}")
        node.blank, node.fill = blank_function, fill_function
        for key, (value, name) in parts.items():
            node.parts[key] = self._visit(value, (name, None), replaceable)
        return node

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
        self._record("method", path)
        node.parts["self"] = self._visit(method.__self__, ("self", None), replaceable)
        node.parts["func"] = self._visit(method.__func__, path, replaceable)
        node.fill = lambda _, old, new: types.MethodType(new["func"], new["self"])
        return node

    def _visit_partial(self, value: functools.partial, path: Any, replaceable: bool) -> Node:
        node = self._add(value, replaceable)
        self._record(("partial", type(value)), path)
        parts = (value.func, value.args, value.keywords)
        for i, part in enumerate(parts):
            node.parts[i] = self._visit(part, path, replaceable)
        node.fill = lambda _, old, new: type(old)(new[0], *new[1], **new[2])
        return node

    def _visit_container(self, value: Any, path: Any, replaceable: bool) -> Node:
        """One level of a pytree: its parts, and what its class keeps beside them."""
        node = self._add(value, replaceable, mutable=True)
        self._remember_contents(value, replaceable)
        children, treedef = _tree_flatten(value, is_leaf=lambda part: part is not value)
        try:
            hash(treedef)
        except TypeError as error:
            raise UnknownLeafError(f"{_render(path)} has unhashable structure: {error}") from None
        self._record(treedef, path)
        node.parts = {
            i: self._visit(child, (path, (value, i)), replaceable)
            for i, child in enumerate(children)
        }
        node.fill = lambda _, old, new: jax.tree_util.tree_unflatten(treedef, new.values())
        kind, beside = treedef.node_data()
        if kind not in (tuple, list):
            self._visit_beside(beside, path)
            self._note_class(kind, path)
        return node

    def _visit_beside(self, beside: Any, path: Any) -> None:
        """Static data of a pytree node: ``==`` holds for ``1`` and ``1.0``, and an object in it can
        change. What cannot be walked is left to the ``==`` of the treespec."""
        count = len(self.facts)
        try:
            self._visit(beside, path, False)
        except UnknownLeafError:
            del self.facts[count:], self._paths[count:]

    def _visit_dict(self, value: Any, path: Any, replaceable: bool) -> Node:
        """A dict in its own order of keys, which loops can see and ``jax.tree_util`` would sort."""
        node = self._add(value, replaceable, mutable=True)
        self._remember_contents(value, replaceable)
        keys = tuple(map(constant, value))
        for key, fact in zip(value, keys, strict=True):
            if fact is None and not isinstance(key, (type, types.FunctionType)):
                raise UnknownLeafError(f"{_render(path)} has a key {key!r} of unknown equality")
        facts = tuple(f or Same(k) for f, k in zip(keys, value, strict=True))
        self._record((type(value), facts), path)
        node.parts = {
            i: self._visit(part, (path, f"[{key!r}]"), replaceable)
            for i, (key, part) in enumerate(value.items())
        }
        factory = getattr(value, "default_factory", None)
        if factory is not None:
            self._visit(factory, path, False)
        node.blank, node.fill = blank_dict, fill_dict
        return node

    def _remember_contents(self, value: Any, replaceable: bool) -> None:
        """Of a list or dict that is reached through a class or module, and so is not copied."""
        if not replaceable and isinstance(value, (list, dict)):
            self._contents.append((value, value.copy()))

    def _visit_set_or_cell(self, value: Any, path: Any, replaceable: bool) -> Node:
        if isinstance(value, set):
            fact = constant(frozenset(value))
            if fact is not None:
                node = self._add(value, replaceable, mutable=True)
                self._record(("set", fact), path)
                node.fill = lambda _, old, new: set(old)
                return node
        raise UnknownLeafError(f"{_render(path)} is a {type(value).__name__}")

    def _visit_library_callable(self, value: Any, path: Any, replaceable: bool) -> Node:
        """A jitted function, a ufunc, a ``custom_vjp``: the very object, and what it wraps."""
        owner = getattr(value, "__self__", None)
        has_state = owner is not None and not isinstance(owner, (type, types.ModuleType))
        if has_state or isinstance(value, (weakref.ref, _LRU_CACHE)):
            raise UnknownLeafError(f"{_render(path)} is a {type(value).__name__} with state")
        if is_impure(getattr(value, "__module__", None)):
            raise UnknownLeafError(f"{_render(path)} can answer differently each time")
        node = self._add(value, replaceable)
        self._record(Same(value), path)
        inside = (getattr(value, "__wrapped__", None), *getattr(value, "__dict__", {}).values())
        for part in inside:  # the rules of a custom_vjp, the function of a jit
            if isinstance(part, types.FunctionType):
                self._visit(part, path, False)
        return node

    def _visit_class_or_module(self, value: Any, path: Any, replaceable: bool) -> Node:
        if isinstance(value, types.ModuleType) and is_impure(value.__name__):
            raise UnknownLeafError(f"{_render(path)} is the module {value.__name__}")
        node = self._add(value, replaceable)
        self._record(Same(value), path)
        if isinstance(value, type):
            self._names |= CONSTRUCTORS
            for base in value.__mro__:
                self._note_class(base, path)
        elif not is_library(value.__name__):
            self._namespaces.append(_Namespace(node, len(self._nodes), path, False, False))
        return node

    def _visit_object(self, value: Any, path: Any, replaceable: bool) -> Node:
        kind = type(value)
        if instance_attributes(value) is None:
            raise UnknownLeafError(f"{_render(path)} is a {kind.__qualname__}: unknown equality")
        node = self._add(value, replaceable, mutable=True)
        self._record((Tag.MODULE, Same(kind)), path)
        node.blank, node.fill = blank_object, fill_object
        library = any(
            is_library(base.__module__) for base in kind.__mro__ if base not in PURE_BASES
        )
        self._namespaces.append(_Namespace(node, len(self._nodes), path, replaceable, library))
        for base in kind.__mro__:
            self._note_class(base, path)
        return node

    def _note_class(self, kind: type, path: Any) -> None:
        """A class whose methods the body may run: what their code reads counts too."""
        if (id(kind), "class") not in self._known and not is_library(kind.__module__):
            node = Node(kind)
            self._known[id(kind), "class"] = (node, len(self._nodes))
            self._record(Same(kind), path)
            self._namespaces.append(_Namespace(node, len(self._nodes), path, False, False))

    # Plain objects come last, and again whenever code that was met since names more attributes.

    def _visit_named_attributes(self) -> None:
        progress = True
        while progress:
            progress = False
            for space in list(self._namespaces):
                for name in sorted(self._unseen(space)):
                    space.seen.add(name)
                    progress = True
                    self._visit_attribute(space, name)

    def _unseen(self, space: _Namespace) -> set[str]:
        owned = _own_names(space.node.value)
        if isinstance(space.node.value, type):
            return {n for n in owned if n in self._names or n in CALLED_BY_SYNTAX} - space.seen
        if space.all_names or self._names & DYNAMIC_READS:
            return owned - space.seen
        return (owned & self._names) - space.seen

    def _visit_attribute(self, space: _Namespace, name: str) -> None:
        value = space.node.value
        path = (space.path, name)
        self._record((space.number, name), path)
        if isinstance(value, (type, types.ModuleType)):
            self._shared.append((value, name, vars(value)[name]))
        if isinstance(value, type):
            for part in _class_attribute(value, name):
                self._visit(part, path, False)
        else:
            space.node.parts[name] = self._visit(_get(value, name), path, space.replaceable)


# --- Kinds of values --------------------------------------------------------------------------


def _is_container(value: Any) -> bool:
    """Whether ``jax.tree_util`` knows how to take ``value`` apart."""
    return not jax.tree_util.all_leaves((value,))


# Dicts whose copies and order Python code can see; others are left to their pytree registration.
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LRU_CACHE = type(functools.lru_cache(lambda: None))


def _own_names(value: Any) -> set[str]:
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return set(vars(value))
    return set(instance_attributes(value) or ())


def _get(value: Any, name: str) -> Any:
    if isinstance(value, (types.ModuleType, types.FunctionType)):
        return vars(value)[name]
    return (instance_attributes(value) or {})[name]


_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    type(vars(collections.namedtuple("_Pair", "x"))["x"]),
)


def _class_attribute(kind: type, name: str) -> Iterable[Any]:
    """What there is to compare behind ``kind.name``: functions inside descriptors, or the value."""
    value = vars(kind)[name]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if f is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, _DESCRIPTORS) or name in ("__dict__", "__weakref__", "__doc__"):
        return []
    return [value]


# --- Paths, for reports -----------------------------------------------------------------------


def _render(path: Any) -> str:
    head, step = path
    if step is None:
        return head or "the function"
    prefix = head if isinstance(head, str) else _render(head)
    if isinstance(step, str):
        return prefix + (step if step.startswith("[") else f".{step}")
    container, index = step
    paths, _ = jax.tree_util.tree_flatten_with_path(
        container, is_leaf=lambda part: part is not container
    )
    keypath = paths[index][0]
    return prefix + jax.tree_util.keystr(keypath)
