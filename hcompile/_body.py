"""Tracing a region's body: on copies, and only if what is traced holds for other calls too."""

from __future__ import annotations

import functools
import itertools
import os
import re
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from . import _jax_compat, _logs
from ._bodies import Body, Closed, normal_form, with_literals
from ._canonical import Canonicalizer
from ._capture import Captured
from ._code import code_info, is_library, line_that_changes
from ._fingerprint import constant, is_symbolic_dim, is_traced
from ._options import RegionOptions, jit_name
from ._reuse import NotReusableError, python_function

# Whether each hit is traced again, and compared with the body that serves it.
CHECKS_HITS = os.environ.get("HCOMPILE_CHECK") == "1"


def trace(
    name: str, captured: Captured, options: RegionOptions, arrays: Sequence[Any], twins: Twins
) -> Outcome:
    """Traces a call of region ``name``, with ``arrays`` in place of its own.

    Raises:
      NotReusableError: if what was traced holds for this call only.
    """
    jaxpr, spec = trace_to_jaxpr(captured, arrays)
    spec.form = normal_form(Canonicalizer(), jaxpr).form
    spec.exact = Canonicalizer().jaxpr(jaxpr) if CHECKS_HITS else None
    spec.where = _logs.user_frame()
    return Outcome(twins.run(name, jaxpr, options, arrays), spec)


def trace_to_jaxpr(captured: Captured, arrays: Sequence[Any]) -> tuple[Any, OutSpec]:
    """The closed jaxpr of the call over flat arrays, and the shape of its result.

    Raises:
      NotReusableError: if what was traced holds for this call only.
    """
    specs: list[OutSpec] = []

    def flat(*arrays: Any) -> list[Any]:
        fn, args, kwargs = captured.rebuild(arrays)
        result = fn(*args, **kwargs)
        _check_unchanged(fn, captured, Captured(fn, args, kwargs), captured.placed(arrays))
        leaves, spec = _split_result(result)
        specs.append(spec)
        return leaves

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    _check_constants(captured, jaxpr)
    return jaxpr, specs[-1]


def _check_unchanged(fn: Any, before: Captured, after: Captured, arrays: Sequence[Any]) -> None:
    same = len(after.arrays) == len(arrays) and all(map(_is, after.arrays, arrays))
    if same and after.facts == before.facts:
        return
    for index, (old, fact) in enumerate(itertools.zip_longest(before.facts, after.facts)):
        if old != fact:
            path, *_ = after.difference(index, old, fact)
            raise NotReusableError(f"the body changed {path}{_line_of_change(fn, path)}")
    raise NotReusableError("the body changed an array, or a container, that it captured")


def _line_of_change(fn: Any, path: str) -> str:
    function = python_function(fn)
    if function is None:
        return ""
    names = re.findall(r"[^\W\d]\w*", path)  # the last is what was written
    code = function.__code__
    line = line_that_changes(code, names[-1] if names else "")
    return f", at line {line} of {code.co_filename}"


def _is(a: Any, b: Any) -> bool:
    return a is b


_CONSTANTS = (bool, int, float, complex, str, bytes, np.generic, np.ndarray)


def _split_result(result: Any) -> tuple[list[Any], OutSpec]:
    leaves, treedef = jax.tree_util.tree_flatten(_without_dicts(result))
    arrays, constants = [], {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            arrays.append(leaf)
        elif isinstance(leaf, _CONSTANTS) or is_symbolic_dim(leaf):
            constants[i] = leaf
        else:
            raise NotReusableError(f"the body returns a {type(leaf).__qualname__}")
    return arrays, OutSpec(treedef, constants)


def _check_constants(captured: Captured, jaxpr: Any) -> None:
    """No array may have come in by a path that the walk does not know."""
    _, consts = _jax_compat.split_jaxpr(jaxpr)
    for const in consts:
        if is_traced(const):
            raise NotReusableError("the body reads a traced array that is no argument or capture")
        if isinstance(const, jax.Array) and not any(const is known for known in captured.compared):
            raise NotReusableError("the body reads an array from outside what can be compared")
    if _jax_compat.rules_hold_tracers(jaxpr):
        raise NotReusableError("a custom differentiation rule in the body closes over an array")
    for callback in _jax_compat.callbacks(jaxpr):
        if not _is_stateless(callback, set()):
            # It would write to the copies that the body was traced on, or to another call's list.
            raise NotReusableError("a callback in the body can read or write what it closes over")


def _is_stateless(value: Any, seen: set[int]) -> bool:
    """Whether a callback reaches only constants, classes, modules, and functions like itself."""
    if isinstance(value, (type, types.ModuleType)) or constant(value) is not None:
        return not isinstance(value, np.ndarray)
    if id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        if is_library(value.__globals__.get("__name__")) and not value.__closure__:
            return True
        info = code_info(value.__code__)
        if info.writes_cells or info.written_global or info.opaque:
            return False
        cells = [c.cell_contents for c in value.__closure__ or () if not _jax_compat.is_empty(c)]
        names = [n for n in info.global_names if n in value.__globals__]
        parts = [*cells, *(value.__globals__[n] for n in names), *(value.__defaults__ or ())]
        parts += (value.__kwdefaults__ or {}).values()
    else:
        owner = getattr(value, "__self__", None)
        return isinstance(value, types.BuiltinFunctionType) and (
            owner is None or isinstance(owner, types.ModuleType)
        )
    return all(_is_stateless(part, seen) for part in parts)


# --- Bodies that were traced apart and are one ---------------------------------------------


class Twins:
    """The bodies of one function, so that one equal to an earlier one becomes a call of that.

    Entries are apart where facts differ: a layer's number, its name, which weights it picks. Where
    the traces are equal but for literals and for the inputs they read, the later ones share one
    nested jit, with the literals that differ as inputs. JAX then differentiates and lowers it once.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Twin] = {}

    def run(
        self, name: str, jaxpr: Any, options: RegionOptions, arrays: Sequence[Any]
    ) -> Sequence[Any]:
        """The results of a traced body on these arrays."""
        if jaxpr.effects:
            return _with_residuals(jaxpr, options.residuals)(*arrays)
        body = normal_form(Canonicalizer(keep_rules=True), jaxpr, opens_calls=False)
        twin = self._known.get(body.form)
        if twin is None or any(kind == "value" for kind, _ in body.results):
            if len(self._known) < _MAX_TWINS:
                self._known[body.form] = _Twin(body.sources)
            return _with_residuals(jaxpr, options.residuals)(*arrays)
        outputs = twin.call(body, options, name, arrays)
        return [outputs[i] if kind == "output" else arrays[i] for kind, i in body.results]


_MAX_TWINS = 64


class _Twin:
    """A body that was traced more than once, in jitted versions by which literals are inputs.

    Of the first trace only the sources are kept: its jaxpr would keep the function alive.
    """

    def __init__(self, sources: tuple[Any, ...]):
        self._sources = sources
        self._varying: frozenset[int] = frozenset()
        self._jitted: dict[frozenset[int], Any] = {}

    def call(
        self, body: Body, options: RegionOptions, name: str, arrays: Sequence[Any]
    ) -> Sequence[Any]:
        pairs = enumerate(zip(self._sources, body.sources, strict=True))
        self._varying |= {i for i, (mine, other) in pairs if not _is_same_source(mine, other)}
        varying = self._varying
        fixed = {
            i: source
            for i, source in enumerate(self._sources)
            if isinstance(source, _jax_compat.Literal) and i not in varying
        }
        if varying not in self._jitted:
            run = _with_residuals(with_literals(body.jaxpr, fixed), options.residuals)
            self._jitted[varying] = _jax_compat.make_jitted(
                lambda *arrays: run(*arrays), jit_name(name, options)
            )
        operands = [_operand(s, arrays) for i, s in enumerate(body.sources) if i not in fixed]
        return self._jitted[varying](*operands)


def _is_same_source(mine: Any, other: Any) -> bool:
    """Whether two sources are no literals (an input either way), or equal ones."""
    if not isinstance(mine, _jax_compat.Literal):
        return True
    literal = Canonicalizer().literal
    return isinstance(other, _jax_compat.Literal) and literal(mine) == literal(other)


def _operand(source: Any, arrays: Sequence[Any]) -> Any:
    if isinstance(source, int):
        return arrays[source]
    return source.value if isinstance(source, Closed) else _jax_compat.literal_value(source)


def _with_residuals(jaxpr: Any, residuals: Any) -> Callable[..., Any]:
    run = _jax_compat.jaxpr_as_fun(jaxpr)
    if residuals == "all" or jaxpr.effects or _jax_compat.has_checkpoint(jaxpr):
        return run
    policies = {"auto": _jax_compat.save_what_is_dear, "none": None}
    policy = policies[residuals] if isinstance(residuals, str) else residuals
    # The backward pass runs in an executable of its own, where there is nothing to share with
    # the forward pass: no barrier against common subexpressions is needed.
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


# --- Results -----------------------------------------------------------------------------------


class OutSpec:
    """What belongs to a traced body besides its arrays; JAX keeps it in the trace's output tree.

    Attributes:
      treedef: of the result.
      constants: leaves of the result that are no arrays, by position.
      form: the body's normal form.
      exact: its canonical form, for ``HCOMPILE_CHECK`` only.
      where: the user's line that it was traced for.
    """

    __slots__ = ("constants", "exact", "form", "treedef", "where")

    def __init__(self, treedef: Any, constants: dict[int, Any]):
        self.treedef = treedef
        self.constants = constants
        self.form: Any = None
        self.exact: Any = None
        self.where = ""

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        remaining = iter(arrays)
        leaves = [
            _own_copy(self.constants[i]) if i in self.constants else next(remaining)
            for i in range(self.treedef.num_leaves)
        ]
        return _with_dicts(jax.tree_util.tree_unflatten(self.treedef, leaves))


@jax.tree_util.register_pytree_node_class
class _Items:
    """A dict on its way through ``jax.tree_util``, which would sort its keys."""

    def __init__(self, keys: tuple, values: Sequence[Any]):
        self.keys = keys
        self.values = values

    def tree_flatten(self) -> tuple[Sequence[Any], tuple]:
        return self.values, self.keys

    @classmethod
    def tree_unflatten(cls, keys: tuple, values: Sequence[Any]) -> _Items:
        return cls(keys, values)


def _without_dicts(tree: Any) -> Any:
    if type(tree) is dict:
        return _Items(tuple(tree), list(map(_without_dicts, tree.values())))
    return _mapped(_without_dicts, tree)


def _with_dicts(tree: Any) -> Any:
    if type(tree) is _Items:
        return dict(zip(tree.keys, map(_with_dicts, tree.values), strict=True))
    return _mapped(_with_dicts, tree)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(map(function, tree))
    is_named_tuple = isinstance(tree, tuple) and hasattr(tree, "_fields")
    return type(tree)(*map(function, tree)) if is_named_tuple else tree


def _own_copy(constant: Any) -> Any:
    return constant.copy() if isinstance(constant, np.ndarray) else constant


@jax.tree_util.register_pytree_node_class
class Outcome:
    """A body's arrays and their ``OutSpec``."""

    def __init__(self, arrays: Sequence[Any], spec: OutSpec):
        self.arrays = arrays
        self.spec = spec

    def tree_flatten(self) -> tuple[Sequence[Any], OutSpec]:
        return tuple(self.arrays), self.spec

    @classmethod
    def tree_unflatten(cls, spec: OutSpec, arrays: Sequence[Any]) -> Outcome:
        return cls(arrays, spec)
