"""The mark: ``nested_compile_region``, and what a marked function does when it is called.

Eager, a region is the function itself. Under a trace it is a nested ``jax.jit`` whose name says
that it is a region, so every transformation rule is JAX's own; ``_reuse`` opens with the flow.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
import numpy as np

from . import _body, _errors, _jax_compat, _logs
from ._canonical import Canonicalizer, difference
from ._capture import Captured, UnknownLeafError
from ._code import SUBSCRIPT
from ._fingerprint import integers
from ._options import Mark, RegionOptions, checked_mark, jit_name
from ._reuse import (
    Miss,
    NotReusableError,
    Recording,
    ReuseCache,
    ReuseEntry,
    check_new_is_allowed,
    current_program,
    explain_hash_miss,
    explain_miss,
    function_key,
)

F = TypeVar("F", bound=Callable[..., Any])


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
    ``hcompile.jit`` each distinct body becomes one XLA executable; bodies that differ only in
    numbers, or in which of the captured arrays they read, are one.

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
        the shapes of arguments are compared all the same. ``HCOMPILE_CHECK=1`` in the environment
        checks such promises.

    Returns:
      A function with the signature of ``fn``, and ``clear_cache()``, which forgets its bodies.

    Raises:
      RegionArgumentError: when an argument has the wrong type.
      RegionOptionError: when ``max_reuse_entries`` is below 1.
      ReuseLimitError: at a call, when a program needs more than ``max_reuse_entries`` bodies.
      ReuseHashError: at a call, when ``reuse_hash_fn`` raises, returns no ``int``, or the call
        cannot be reused at all.

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
    mark = checked_mark(options, max_reuse_entries, reuse_hash_fn)
    if fn is None:
        return lambda fn: _marked(fn, mark)
    return _marked(fn, mark)


def _marked(fn: Any, mark: Mark) -> Callable[..., Any]:
    if not callable(fn):
        raise _errors.not_callable("nested_compile_region", fn)

    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    name = name.rpartition("<locals>.")[2]

    @functools.wraps(fn, updated=())
    def region(*args: Any, **kwargs: Any) -> Any:
        if is_off() or _jax_compat.is_eager():
            return fn(*args, **kwargs)
        with _errors.own_frames_hidden:
            return _Call(fn, name, mark, args, kwargs).run()

    def clear_cache() -> None:
        key = function_key(fn)
        _cache.drop(lambda known: known[0] == key)  # type: ignore[index]
        _process.regions.pop(key, None)

    region.clear_cache = clear_cache  # type: ignore[attr-defined]
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


def _new_body(name: str, mark: Mark) -> Any:
    """A jitted function that traces whichever call is active when JAX has no trace for it."""

    def body(*arrays: Any) -> _body.Outcome:
        return _active.calls[-1].trace(arrays)

    return _jax_compat.make_jitted(body, jit_name(name, mark.options))


class _Call:
    """A region's call under a trace: taken apart, looked up, stamped out or run in line."""

    def __init__(self, fn: Any, name: str, mark: Mark, args: tuple, kwargs: dict[str, Any]):
        self.fn = fn
        self.name = name
        self.mark = mark
        self.args = args
        self.kwargs = kwargs
        self.captured: Any = None
        self.miss: Miss | None = None
        self.traced = False

    def run(self) -> Any:
        key = function_key(self.fn)
        self.program = current_program()
        recordings = [_process] if self.program is None else [_process, self.program]
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
            return outcome.spec.unflatten(outcome.arrays)
        return self._in_line(reason)  # outside the handler, so that errors in line are not chained

    def _stamp_out(self, key: Any) -> _body.Outcome:
        start = time.perf_counter()
        self.captured = Captured(self.fn, self.args, self.kwargs)
        self._spend("lookup", start)
        self.key = (key, self.mark)
        facts = self._facts()
        start = time.perf_counter()
        entry = _cache.find(self.key, facts)
        is_new = entry is None
        if entry is None:
            self.miss = self._explain(_cache.latest(self.key), facts)
            entry = ReuseEntry(facts, _new_body(self.name, self.mark))
        start = self._spend("lookup", start)
        _active.calls.append(self)
        try:
            if self.mark.options.on_reuse_limit == "inline" and self.program is not None:
                self._check_room(entry.jitted.eval_shape(*self.captured.arrays).spec)
            outcome = entry.jitted(*self.captured.arrays)
        finally:
            _active.calls.pop()
            self._spend("stamp_out", start)
        if is_new:
            _cache.add(self.key, entry)
        self._record(outcome.spec)
        return outcome

    def _explain(self, latest: ReuseEntry | None, facts: tuple) -> Miss:
        if self.mark.reuse_hash_fn is not None:
            return explain_hash_miss(latest, facts, _logs.user_frame())
        return explain_miss(latest, facts, self.captured, _logs.user_frame())

    def _spend(self, phase: str, since: float) -> float:
        now = time.perf_counter()
        for stats in self.stats:
            stats.seconds[phase] += now - since
        return now

    def _facts(self) -> tuple:
        if self.mark.reuse_hash_fn is None:
            return (*self.captured.facts, _jax_compat.settings())
        start = time.perf_counter()
        try:
            number = self.mark.reuse_hash_fn(*self.args, **self.kwargs)
        except Exception as error:
            raise _errors.reuse_hash(self.name, f"it raised {error!r}") from error
        if isinstance(number, bool) or not isinstance(number, int):
            raise _errors.reuse_hash(self.name, f"it returned {number!r}")
        self._spend("hash", start)
        structure = jax.tree_util.tree_structure((self.args, self.kwargs))
        # A layer number can pick weights from a list, which the number of arrays does not tell.
        picks = self.captured.reads((SUBSCRIPT, "__getitem__", "itemgetter"))
        numbers = integers(tuple(self.captured.facts)) if picks else ()
        settings = _jax_compat.settings()
        return ("reuse hash", number, structure, len(self.captured.arrays), settings, *numbers)

    def trace(self, arrays: Any) -> _body.Outcome:
        """Runs inside the trace that JAX makes of this call's body."""
        if self.miss is None:
            text = "shapes, dtypes, shardings or JAX's context differ"
            self.miss = Miss("avals", text, _logs.user_frame())
        check_new_is_allowed(f"a body of region '{self.name}'", str(self.miss))
        self.traced = True
        if self.program is None and self.mark.options.has_compiler_options:
            _warn_once(self.name, self.mark.options)
        start = time.perf_counter()
        try:
            twins = _cache.companion(self.key, _body.Twins)
            return _body.trace(self.name, self.captured, self.mark.options, arrays, twins)
        finally:
            took = self._spend("trace", start) - start
            for stats in self.stats:
                stats.seconds["stamp_out"] -= took  # which is around it

    # What is told about a call.

    def _record(self, spec: _body.OutSpec) -> None:
        if self.traced and self.miss is not None:
            for stats in self.stats:
                stats.traces += 1
                stats.add_miss(self.miss)
            _logs.reuse.info("%s: traced: %s", self.name, self.miss)
        else:
            if _logs.reuse.isEnabledFor(logging.DEBUG):
                _logs.reuse.debug("%s: hit [%s]", self.name, _logs.user_frame())
            if spec.exact is not None:
                self._check_hit(spec)
        if spec.form not in self.stats[-1].bodies:
            self._count_body(spec)

    def _count_body(self, spec: _body.OutSpec) -> None:
        for stats in self.stats:
            stats.bodies.setdefault(spec.form, self.miss)
        _logs.reuse.info("%s: body number %d", self.name, len(self.stats[-1].bodies))
        limit = self.mark.max_reuse_entries
        if self.program is not None and len(self.stats[-1].bodies) > limit:
            if self.mark.options.on_reuse_limit == "raise":
                raise _errors.ReuseLimitError(self._limit_message())
            if len(self.stats[-1].bodies) == limit + 1:
                warnings.warn(self._limit_message(), stacklevel=2)

    def _check_room(self, spec: _body.OutSpec) -> None:
        bodies = self.stats[-1].bodies
        if spec.form not in bodies and len(bodies) >= self.mark.max_reuse_entries:
            limit = self.mark.max_reuse_entries
            raise NotReusableError(f"it would be body number {limit + 1}, and the limit is {limit}")

    def _limit_message(self) -> str:
        known = [
            m or Miss("", "traced for an earlier program") for m in self.stats[-1].bodies.values()
        ]
        limit = self.mark.max_reuse_entries
        _logs.reuse.warning("%s: more than %d bodies", self.name, limit)
        return _errors.reuse_limit(self.name, limit, [(m.reason, str(m)) for m in known])

    def _check_hit(self, served: _body.OutSpec) -> None:
        """``HCOMPILE_CHECK``: the body that served this call is the one it would have."""
        again = Captured(self.fn, self.args, self.kwargs)
        jaxpr, _ = _body.trace_to_jaxpr(again, again.arrays)
        own = Canonicalizer().jaxpr(jaxpr)
        if own != served.exact:
            where = difference(served.exact, own)
            raise _errors.reuse_check(self.name, served.where, _logs.user_frame(), where)

    def _in_line(self, reason: str) -> Any:
        if self.captured is not None:
            self.captured.restore_shared()
        miss = Miss("in line", f"ran in line: {reason}", _logs.user_frame())
        check_new_is_allowed(f"a call of region '{self.name}'", str(miss))
        for stats in self.stats:
            stats.inlined += 1
            stats.add_miss(miss)
        _logs.reuse.info("%s: %s", self.name, miss)
        try:
            result = self.fn(*self.args, **self.kwargs)
        except Exception as error:
            error.add_note(_errors.region_note(self.name, _describe((self.args, self.kwargs))))
            raise
        if self.mark.reuse_hash_fn is not None:
            raise _errors.hash_without_reuse(self.name, reason)
        return result


_warned: set[tuple[str, RegionOptions]] = set()


def _warn_once(region: str, options: RegionOptions) -> None:
    if (region, options) not in _warned:
        _warned.add((region, options))
        warnings.warn(_errors.options_without_effect(region), stacklevel=2)


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


# --- Counters ---------------------------------------------------------------------------------


def cache_info() -> dict[str, dict[str, Any]]:
    """Counts for every region called under a trace in this process, by function name.

    Returns:
      For each name, ints: ``calls``; ``hits`` among them, served by a body that was there;
      ``traces`` and ``inlined``, the others; ``bodies``, distinct in normal form; ``entries`` in
      the reuse cache. ``misses``: how often each reason occurred; ``explanations``: the latest in
      words. ``seconds``: host time by phase (``lookup``, ``hash``, ``trace``, ``stamp_out``). A
      name that two functions have is followed by their file and line.

    Example:
      >>> import hcompile, jax
      >>> double = hcompile.region(lambda x: 2 * x)
      >>> _ = jax.jit(lambda x: double(double(x)))(1.0)
      >>> info = hcompile.cache_info()["<lambda>"]
      >>> info["calls"], info["hits"], info["bodies"], info["misses"]
      (2, 1, 1, {'first call': 1})
    """
    entries = collections.Counter()
    for (function, _), count in _cache.counts().items():
        entries[function] += count
    known = list(_process.regions.items())
    names = collections.Counter(stats.name for _, stats in known)
    result: dict[str, dict[str, Any]] = {}
    for function, stats in known:
        name = stats.name + (_place(function) if names[stats.name] > 1 else "")
        count = sum(other.startswith(name) for other in result)
        result[f"{name} #{count + 1}" if name in result else name] = {
            "calls": stats.calls,
            "hits": stats.hits,
            "traces": stats.traces,
            "inlined": stats.inlined,
            "bodies": len(stats.bodies),
            "entries": entries[function],
            "misses": dict(stats.reasons),
            "explanations": list(map(str, stats.misses)),
            "seconds": dict(stats.seconds),
        }
    return result


def _place(function: Any) -> str:
    code = function[0].value if isinstance(function, tuple) else None
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else f" ({function})"


def clear_region_cache() -> None:
    """Forgets every traced body and the counts of ``cache_info``."""
    _cache.drop(lambda _: True)
    _process.regions.clear()
