"""The mark: ``nested_compile_region``, and what a marked function does when it is called.

Eager, a region is the function itself. Under a trace it is a nested ``jax.jit`` whose name says
that it is a region, so every transformation rule is JAX's own; ``_reuse`` opens with the flow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np

from . import _errors, _jax_compat
from ._capture import Captured, UnknownLeafError
from ._fingerprint import is_traced
from ._reuse import (
    NotReusableError,
    Recording,
    RegionStats,
    ReuseCache,
    ReuseEntry,
    current_program,
    explain_miss,
    function_key,
)

F = TypeVar("F", bound=Callable[..., Any])

# How the jaxpr equation of a region's call is recognised. No identifier holds a colon.
REGION_PREFIX = "region:"

_RESIDUALS = ("auto", "all", "none")


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """How one region is compiled.

    Args:
      residuals: what the forward pass keeps for the backward pass. ``"auto"`` (default) keeps
        matmul- and convolution-like results, opaque calls and the region's inputs, and computes
        elementwise work again; ``"all"`` keeps what ``jax.grad`` would; ``"none"`` keeps the
        inputs only; or a policy of ``jax.checkpoint_policies``. A region that already holds a
        ``jax.checkpoint`` is left as it is.

    Raises:
      RegionOptionError: for a string that is none of these.
      RegionArgumentError: for anything else that is no policy.

    Example:
      >>> import hcompile
      >>> hcompile.RegionOptions(residuals="none")
      RegionOptions(residuals='none')
    """

    residuals: str | Callable[..., Any] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.residuals, str):
            if self.residuals not in _RESIDUALS:
                raise _errors.bad_value(
                    "RegionOptions",
                    "residuals",
                    "'auto', 'all', 'none' or a policy of jax.checkpoint_policies",
                    self.residuals,
                    "Write RegionOptions(residuals='auto').",
                )
        elif not callable(self.residuals):
            raise _errors.bad_argument(
                "RegionOptions",
                "residuals",
                "'auto', 'all', 'none' or a policy of jax.checkpoint_policies",
                self.residuals,
                "Write RegionOptions(residuals=jax.checkpoint_policies.dots_saveable).",
            )


@dataclasses.dataclass(frozen=True)
class Mark:
    """What ``nested_compile_region`` was given, besides the function."""

    options: RegionOptions
    max_reuse_entries: int
    reuse_hash_fn: Callable[..., Any] | None


@overload
def nested_compile_region(
    fn: F,
    *,
    options: RegionOptions | None = None,
    max_reuse_entries: int = 8,
    reuse_hash_fn: Callable[..., int] | None = None,
) -> F: ...


@overload
def nested_compile_region(
    fn: None = None,
    *,
    options: RegionOptions | None = None,
    max_reuse_entries: int = 8,
    reuse_hash_fn: Callable[..., int] | None = None,
) -> Callable[[F], F]: ...


def nested_compile_region(
    fn: Any = None,
    *,
    options: RegionOptions | None = None,
    max_reuse_entries: int = 8,
    reuse_hash_fn: Callable[..., int] | None = None,
) -> Any:
    """Marks a function whose calls should be compiled once and reused.

    Called eagerly the result is ``fn``. Under ``jax.jit``, ``hcompile.jit`` and inside any JAX
    transformation it is a nested jit, traced once for each distinct condition: the function's code
    and globals, the structure of its arguments, their shapes and dtypes, Python constants among
    them, and what the function captured. Captured arrays are inputs, whatever their values. Under
    ``hcompile.jit`` each distinct body becomes one XLA executable.

    When equality is unknown, when the body changes something it captured, or when it returns what
    is no array and no constant, the call runs in line, as if unmarked, and the report says why.

    Args:
      fn: a function, bound method or callable object of any pytrees of arrays and any other Python
        values, returning any pytree. Without it, the result is a decorator.
      options: how the region is compiled, see ``RegionOptions``.
      max_reuse_entries: how many distinct bodies ``fn`` may need within one program that
        ``hcompile.jit`` traces.
      reuse_hash_fn: ``(*args, **kwargs) -> int``, called with the call's (abstract) arguments.
        Equal numbers declare the constants and captures of two calls equal; the structure and
        the shapes of arguments are compared all the same.

    Returns:
      A function with the signature of ``fn``.

    Raises:
      RegionArgumentError: when an argument has the wrong type.
      RegionOptionError: when ``max_reuse_entries`` is below 1.
      ReuseLimitError: at a call, when a program needs more than ``max_reuse_entries`` bodies.
      ReuseHashError: at a call, when ``reuse_hash_fn`` raises or returns no ``int``.

    Example:
      >>> import hcompile, jax, jax.numpy as jnp
      >>> traces = []
      >>> @hcompile.nested_compile_region
      ... def layer(w, x):
      ...     traces.append(x.shape)
      ...     return jnp.tanh(x @ w)
      >>> @hcompile.jit
      ... def model(ws, x):
      ...     for w in ws:
      ...         x = layer(w, x)
      ...     return x
      >>> model([jnp.eye(2)] * 5, jnp.ones(2)).shape
      (2,)

    The idea is PyTorch's ``torch.compiler.nested_compile_region``.
    """
    mark = _checked_mark(options, max_reuse_entries, reuse_hash_fn)
    if fn is None:
        return lambda fn: _marked(fn, mark)
    return _marked(fn, mark)


def _checked_mark(options: Any, max_reuse_entries: Any, reuse_hash_fn: Any) -> Mark:
    where = "nested_compile_region"
    if options is not None and not isinstance(options, RegionOptions):
        fix = "Write options=hcompile.RegionOptions(...)."
        raise _errors.bad_argument(where, "options", "a RegionOptions or None", options, fix)
    if isinstance(max_reuse_entries, bool) or not isinstance(max_reuse_entries, int):
        fix = "Write max_reuse_entries=8."
        raise _errors.bad_argument(where, "max_reuse_entries", "an int", max_reuse_entries, fix)
    if max_reuse_entries < 1:
        fix = "To switch a region off, do not mark it, or use hcompile.disabled()."
        raise _errors.bad_value(where, "max_reuse_entries", "at least 1", max_reuse_entries, fix)
    if reuse_hash_fn is not None and not callable(reuse_hash_fn):
        fix = "Write reuse_hash_fn=lambda *args, **kwargs: 0."
        raise _errors.bad_argument(where, "reuse_hash_fn", "callable", reuse_hash_fn, fix)
    return Mark(options or RegionOptions(), max_reuse_entries, reuse_hash_fn)


def _marked(fn: Any, mark: Mark) -> Callable[..., Any]:
    if not callable(fn):
        raise _errors.not_callable("nested_compile_region", fn)

    @functools.wraps(fn, updated=())
    def region(*args: Any, **kwargs: Any) -> Any:
        if is_off() or _jax_compat.is_eager():
            return fn(*args, **kwargs)
        with _errors.own_frames_hidden:
            return _Call(fn, mark, args, kwargs).run()

    return region


# --- Switching regions off --------------------------------------------------------------------


_OFF_FOR_ALL = os.environ.get("HCOMPILE") == "0"


class _Switch(threading.local):
    off = False


_switch = _Switch()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within this context regions are plain functions and ``hcompile.jit`` is ``jax.jit``.

    Programs that were compiled before are not used, and come back after. Setting the environment
    variable ``HCOMPILE=0`` does the same for the whole process.

    Example:
      >>> import hcompile
      >>> with hcompile.disabled():
      ...     pass
    """
    before, _switch.off = _switch.off, True
    try:
        yield
    finally:
        _switch.off = before


def is_disabled() -> bool:
    return _switch.off or _OFF_FOR_ALL


def is_off() -> bool:
    return is_disabled() or jax.config.jax_disable_jit


# --- One call under a trace -------------------------------------------------------------------

_cache = ReuseCache()
_process = Recording()


class _Active(threading.local):
    """The calls whose bodies may be traced now, innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_active = _Active()


class _OutSpec:
    """The tree of a body's result and its leaves that are no arrays; one for each traced body."""

    __slots__ = ("constants", "treedef")

    def __init__(self, treedef: Any, constants: dict[int, Any]):
        self.treedef = treedef
        self.constants = constants

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
    return type(tree)(map(_without_dicts, tree)) if type(tree) in (list, tuple) else tree


def _with_dicts(tree: Any) -> Any:
    if type(tree) is _Items:
        return dict(zip(tree.keys, map(_with_dicts, tree.values), strict=True))
    return type(tree)(map(_with_dicts, tree)) if type(tree) in (list, tuple) else tree


def _own_copy(constant: Any) -> Any:
    return constant.copy() if isinstance(constant, np.ndarray) else constant


@jax.tree_util.register_pytree_node_class
class _Outcome:
    """A body's arrays and, in the tree that JAX keeps with its own trace, their ``_OutSpec``."""

    def __init__(self, arrays: Sequence[Any], spec: _OutSpec):
        self.arrays = arrays
        self.spec = spec

    def tree_flatten(self) -> tuple[Sequence[Any], _OutSpec]:
        return tuple(self.arrays), self.spec

    @classmethod
    def tree_unflatten(cls, spec: _OutSpec, arrays: Sequence[Any]) -> _Outcome:
        return cls(arrays, spec)


class _Call:
    """A region's call under a trace: taken apart, looked up, stamped out or run in line."""

    def __init__(self, fn: Any, mark: Mark, args: tuple, kwargs: dict[str, Any]):
        self.fn = fn
        self.mark = mark
        self.args = args
        self.kwargs = kwargs
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        self.name = name.rpartition("<locals>.")[2]
        self.captured: Any = None
        self.traced = False

    def run(self) -> Any:
        key = function_key(self.fn)
        program = current_program()
        recordings = [_process] if program is None else [_process, program]
        self.stats = [r.region(key or id(self.fn), self.name) for r in recordings]
        for stats in self.stats:
            stats.calls += 1
        if key is None:
            return self._in_line(f"{type(self.fn).__qualname__} is not a Python function")
        try:
            outcome = self._stamp_out(key)
        except (UnknownLeafError, NotReusableError) as error:
            reason = str(error)
        except _errors.HCompileError:
            raise
        except Exception as error:
            # The user's own error shows again in line, with their frames only; a function that
            # works in line, but not on abstract copies, is served as if unmarked.
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            reason = None
        if reason is not None:  # outside the handler, so that errors in line are not chained
            return self._in_line(reason)
        self._count_body(program, key, outcome.spec)
        return outcome.spec.unflatten(outcome.arrays)

    def _stamp_out(self, key: Any) -> _Outcome:
        self.captured = Captured(self.fn, self.args, self.kwargs)
        key, facts = (key, self.mark), self._facts()
        entry = _cache.find(key, facts)
        is_new = entry is None
        if entry is None:
            self._note(explain_miss(_cache.latest(key), self.captured))
            entry = ReuseEntry(facts, _new_body(self.name))
        _active.calls.append(self)
        try:
            outcome = entry.jitted(*self.captured.arrays)
        finally:
            _active.calls.pop()
        if self.traced:
            for stats in self.stats:
                stats.traces += 1
            if not is_new:
                self._note("shapes, dtypes, shardings or JAX's context differ")
        if is_new:
            _cache.add(key, entry)
        return outcome

    def _facts(self) -> tuple:
        if self.mark.reuse_hash_fn is None:
            return tuple(self.captured.facts)
        try:
            number = self.mark.reuse_hash_fn(*self.args, **self.kwargs)
        except Exception as error:
            raise _errors.reuse_hash(self.name, f"it raised {error!r}") from error
        if isinstance(number, bool) or not isinstance(number, int):
            raise _errors.reuse_hash(self.name, f"it returned {number!r}")
        structure = jax.tree_util.tree_structure((self.args, self.kwargs))
        return ("reuse hash", number, structure, len(self.captured.arrays))

    def _note(self, miss: str) -> None:
        if miss != "first call":
            for stats in self.stats:
                stats.misses.append(miss)

    def _in_line(self, reason: str) -> Any:
        if self.captured is not None:
            self.captured.restore_shared()
        for stats in self.stats:
            stats.inlined += 1
            stats.misses.append(f"ran in line: {reason}")
        try:
            return self.fn(*self.args, **self.kwargs)
        except Exception as error:
            error.add_note(_errors.region_note(self.name, _describe((self.args, self.kwargs))))
            raise

    def _count_body(self, program: Recording | None, key: Any, spec: _OutSpec) -> None:
        for stats in self.stats:
            stats.bodies.add(id(spec))
        if program is not None:
            stats = self.stats[-1]
            if len(stats.bodies) > self.mark.max_reuse_entries:
                limit = self.mark.max_reuse_entries
                raise _errors.reuse_limit(self.name, limit, list(stats.misses))


def _describe(arguments: tuple[tuple, dict[str, Any]]) -> str:
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments)
    shown = [f"{_argument_path(path)}: {_describe_leaf(leaf)}" for path, leaf in paths[:8]]
    return ", ".join(shown) + (f", and {len(paths) - 8} more" if len(paths) > 8 else "")


def _argument_path(path: Any) -> str:
    return "argument " + jax.tree_util.keystr(path[1:])


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


# --- The body that JAX traces -----------------------------------------------------------------


def _new_body(name: str) -> Any:
    def body(*arrays: Any) -> _Outcome:
        return _trace(_active.calls[-1], arrays)

    return _jax_compat.make_jitted(body, REGION_PREFIX + name)


def _trace(call: _Call, arrays: Sequence[Any]) -> _Outcome:
    """Traces the function of ``call`` with ``arrays`` in place of its own."""
    call.traced = True
    specs: list[_OutSpec] = []

    def flat(*arrays: Any) -> list[Any]:
        fn, args, kwargs = call.captured.rebuild(arrays)
        result = fn(*args, **kwargs)
        seen = call.captured.placed(arrays)
        _check_unchanged(call.captured, Captured(fn, args, kwargs), seen)
        leaves, spec = _split_result(result)
        specs.append(spec)
        return leaves

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    _check_constants(call.captured, jaxpr)
    run = _with_residuals(jaxpr, call.mark.options.residuals)
    return _Outcome(run(*arrays), specs[-1])


def _check_unchanged(before: Captured, after: Captured, arrays: Sequence[Any]) -> None:
    same = len(after.arrays) == len(arrays) and all(map(_is, after.arrays, arrays))
    if same and after.facts == before.facts:
        return
    for index, fact in enumerate(after.facts):
        if index >= len(before.facts) or before.facts[index] != fact:
            raise NotReusableError(f"the body changed {after.path(index)}")
    raise NotReusableError("the body changed something that it captured")


def _is(a: Any, b: Any) -> bool:
    return a is b


def _split_result(result: Any) -> tuple[list[Any], _OutSpec]:
    leaves, treedef = jax.tree_util.tree_flatten(_without_dicts(result))
    arrays, constants = [], {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            arrays.append(leaf)
        elif isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic, np.ndarray)):
            constants[i] = leaf
        else:
            raise NotReusableError(f"the body returns a {type(leaf).__qualname__}")
    return arrays, _OutSpec(treedef, constants)


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


def _with_residuals(jaxpr: Any, residuals: Any) -> Callable[..., Any]:
    run = _jax_compat.jaxpr_as_fun(jaxpr)
    if residuals == "all" or jaxpr.effects or _jax_compat.has_checkpoint(jaxpr):
        return run
    policies = {"auto": _jax_compat.save_what_is_dear, "none": None}
    policy = policies[residuals] if isinstance(residuals, str) else residuals
    # The backward pass runs in an executable of its own, where there is nothing to share with
    # the forward pass: no barrier against common subexpressions is needed.
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


# --- Counters ---------------------------------------------------------------------------------


def cache_info() -> dict[str, dict[str, Any]]:
    """Counts for every region called under a trace in this process, by function name.

    Returns:
      For each name ``calls``, ``traces``, ``reused``, ``inlined``, ``bodies`` (ints) and ``misses``
      (the latest reasons, as strings).

    Example:
      >>> import hcompile
      >>> isinstance(hcompile.cache_info(), dict)
      True
    """
    return {stats.name: stats_as_dict(stats) for stats in list(_process.regions.values())}


def stats_as_dict(stats: RegionStats) -> dict[str, Any]:
    counts = {k: getattr(stats, k) for k in ("calls", "traces", "reused", "inlined")}
    return counts | {"bodies": len(stats.bodies), "misses": list(stats.misses)}


def clear_region_cache() -> None:
    """Forgets every traced body and the counts of ``cache_info``."""
    _cache.clear()
    _process.regions.clear()
