"""``hcompile.jit``: trace, cut into parts, compile each distinct part once, run the schedule.

A call flows ``Jitted.__call__`` -> ``trace`` -> ``Traced.lower`` (plan and lower) ->
``Lowered.compile`` -> ``Compiled.run``. What cannot be split runs as plain ``jax.jit``, and the
report says why.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from . import _errors, _executables, _jax_compat, _logs, _region, _report
from ._options import is_region_name, split_jit_name
from ._plan.ops import Program
from ._plan.partition import Part, partition
from ._plan.program import flatten
from ._plan.schedule import Liveness, Schedule
from ._reuse import Recording, check_new_is_allowed, recording
from ._signature import Signature, Statics, placement

_MAX_PROGRAMS = 4096


def jit(fun: Any = None, /, **options: Any) -> Any:
    """``jax.jit`` that compiles each distinct marked region once.

    The function is traced as ``jax.jit`` traces it. Calls of regions (``nested_compile_region``),
    forward and backward, become calls of shared XLA executables, and what lies between them becomes
    executables too. Results, tree structures, dtypes and weak types are those of ``jax.jit``.

    Under an outer trace, under ``jax.disable_jit``, without a region that occurs twice, and for
    what a split program cannot carry yet (effects, references, several devices, shardings and
    layouts in ``options``), the call is ``jax.jit``'s, and ``report()`` says why.

    Args:
      fun: the function; without it, the result is a decorator.
      **options: the keyword arguments of ``jax.jit``. Donated buffers are reused in place.

    Returns:
      A callable with ``trace``, ``lower``, ``eval_shape``, ``clear_cache`` as ``jax.jit``'s
      result has, and ``report()``.

    Raises:
      RegionArgumentError: if ``fun`` is not callable.
      DeletedArgumentError: at a call, for an argument that an earlier call was given for good.
      DonatedTwiceError: at a call, for a donated argument that is also another argument.
      TypeError: at a call, as ``jax.jit``, for arguments and outputs that are no JAX types.

    Example:
      >>> import hcompile, jax, jax.numpy as jnp
      >>> @hcompile.region
      ... def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> def loss(ws, x):
      ...     for w in ws:
      ...         x = layer(w, x)
      ...     return (x**2).mean()
      >>> step = hcompile.jit(jax.value_and_grad(loss))
      >>> value, grads = step([jnp.eye(2)] * 6, jnp.ones((3, 2)))
      >>> step.report().region_calls
      12
    """
    if fun is None:
        return lambda fun: jit(fun, **options)
    if not callable(fun):
        raise _errors.not_callable("hcompile.jit", fun)
    return Jitted(fun, options)


class Jitted:
    """What ``hcompile.jit`` returns. Not made directly."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]):
        self._jitted: Any = jax.jit(fun, **options)
        self._options = options
        self._statics = Statics(fun, options)
        self._programs: collections.deque[Compiled] = collections.deque(maxlen=_MAX_PROGRAMS)
        self._reports: list[_report.ProgramReport] = []
        self._lock = threading.RLock()
        # Not its ``__dict__``: ``jax.grad(f)`` carries that of ``f``, which can be one of these.
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<hcompile.jit of {_name(self._jitted)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _errors.own_frames_hidden:
            if _region.is_disabled():
                return self._unmarked(*args, **kwargs)
            if not _jax_compat.is_eager() or jax.config.jax_disable_jit:
                return self._jitted(*args, **kwargs)
            if self._programs and _jax_compat.looks_for_nans():
                return self._jitted(*args, **kwargs)
            signature = Signature(self._statics, args, kwargs)
            compiled = self._find(signature)
            if compiled is None:
                with self._lock:
                    compiled = self._find(signature) or self._build(signature, args, kwargs)
            if compiled.schedule is None:
                return self._jitted(*args, **kwargs)
            return compiled.run(signature)

    @functools.cached_property
    def _unmarked(self) -> Any:
        """Plain ``jax.jit`` for when regions are disabled: JAX must not mix up the two traces."""

        @functools.wraps(self.__wrapped__)
        def unmarked(*args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **kwargs)

        return jax.jit(unmarked, **self._options)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for these arguments, which may be ``jax.ShapeDtypeStruct``; see ``jax.jit``."""
        with _errors.own_frames_hidden:
            return self._trace(Signature(self._statics, args, kwargs), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces, plans and lowers for these arguments."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Types of the outputs, as ``jax.ShapeDtypeStruct``."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets every compiled program of this function."""
        with self._lock:
            self._programs.clear()
            self._reports.clear()
            self._jitted.clear_cache()

    def report(self) -> _report.Report:
        """What was compiled, reused and missed so far, and how long each took."""
        return _report.Report(_name(self._jitted), tuple(self._reports))

    def _find(self, signature: Signature) -> Compiled | None:
        for compiled in list(self._programs):
            if compiled.signature == signature:
                return compiled
        return None

    def _build(self, signature: Signature, args: tuple, kwargs: dict[str, Any]) -> Compiled:
        compiled = self._trace(signature, args, kwargs)._lower(eager=True).compile()
        self._programs.appendleft(compiled)
        self._reports.append(compiled.program_report)
        return compiled

    def _trace(self, signature: Signature, args: tuple, kwargs: dict[str, Any]) -> Traced:
        why = "it has not been called yet"
        if self._programs:
            why = "its arguments' types, or JAX's context, differ from those it was compiled for"
        check_new_is_allowed(f"a program of {_name(self._jitted)}", why)
        start = time.perf_counter()
        with recording(Recording()) as regions:
            traced = self._jitted.trace(*args, **kwargs)
        seconds = time.perf_counter() - start
        return Traced(traced, regions, signature, self._options, seconds)


def _name(fun: Any) -> str:
    return getattr(fun, "__name__", None) or type(fun).__name__


# --- Stages -----------------------------------------------------------------------------------


class Traced:
    """A traced step. Has the attributes of ``jax.stages.Traced``, and lowers part by part."""

    def __init__(
        self,
        traced: Any,
        regions: Recording,
        signature: Signature,
        options: dict[str, Any],
        seconds: float,
    ):
        self._traced = traced
        self._regions = regions
        self._signature = signature
        self._options = options
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)

    def lower(self, **options: Any) -> Any:
        """Cuts the step into parts and lowers each distinct one.

        With the options of ``jax.stages.Traced.lower`` (``jax.export`` gives some) the step is
        lowered as one program by JAX, with one function for each region's body.
        """
        return self._traced.lower(**options) if options else self._lower(eager=False)

    def _lower(self, eager: bool) -> Lowered:
        return Lowered(self, eager)


class _Plan:
    """The parts of a step and their executables, not yet compiled."""

    def __init__(self, traced: Traced, jaxpr: Any, consts: Sequence[Any], donated: list[bool]):
        start = time.perf_counter()
        signature = traced._signature
        self.sharding, reason = placement([*signature.leaves, *_arrays(consts)])
        if reason is not None:
            raise _CannotSplit(reason)
        self.program: Program = flatten(jaxpr, consts, _region_options)
        self.parts, self.outputs = partition(self.program, _region_name)
        if not any(part.kind == "region" for part in self.parts):
            raise _CannotSplit("no marked region occurs twice in it")
        self.liveness = Liveness(self.program, self.parts, self.outputs, donated)
        donations = self.liveness.donations(self.parts)
        self.seconds = time.perf_counter() - start

        start = time.perf_counter()
        common = traced._options.get("compiler_options") or {}
        self.executables = {}
        for part in self.parts:
            if part.form not in self.executables:
                options = {**common, **dict(part.options)}  # type: ignore[call-overload]
                spec = _executables.PartSpec(
                    name=part.name,
                    key=(
                        part.form,
                        donations[part.form],
                        self.sharding,
                        tuple(sorted(options.items())),
                        signature.context,
                    ),
                    jaxpr=part.jaxpr(self.program),
                    donated=donations[part.form],
                    sharding=self.sharding,
                    compiler_options=options or None,
                )
                self.executables[part.form] = _executables.lower(spec)
        self.lower_seconds = time.perf_counter() - start
        _logs.plan.info(
            "%s: %d equations, %d calls of %d executables; planned in %.3f s",
            traced._traced.fun_name,
            len(self.program.ops),
            len(self.parts),
            len(self.executables),
            self.seconds,
        )

    def schedule(self) -> Schedule:
        constants = [_on_device(c, self.sharding) for c in self.program.constants.values()]
        calls = [self.executables[part.form][0].call for part in self.parts]
        return Schedule(self.program, self.parts, calls, self.outputs, self.liveness, constants)

    def part_reports(self) -> tuple[_report.PartReport, ...]:
        counts = collections.Counter(part.form for part in self.parts)
        first: dict[Any, Part] = {part.form: part for part in reversed(self.parts)}
        return tuple(
            _report.PartReport(
                name=first[form].name,
                kind=first[form].kind,
                calls=counts[form],
                equations=_size(first[form]),
                compile_seconds=executable.lower_seconds + executable.compile_seconds,
                shared=shared,
            )
            for form, (executable, shared) in self.executables.items()
        )


class _CannotSplit(Exception):
    """Why a step runs as plain ``jax.jit``."""


def _size(part: Part) -> int:
    if part.kind == "region":
        return len(_jax_compat.split_jaxpr(part.ops[0].body)[0].eqns)
    return len(part.ops)


def _arrays(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, jax.Array)]


def _on_device(value: Any, sharding: Any) -> Any:
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    return jax.device_put(value, sharding)


def _region_options(eqn: Any) -> Hashable | None:
    """The XLA options of a region's call, () if it has none; None if ``eqn`` is something else."""
    if not (_jax_compat.is_jit(eqn) and is_region_name(eqn.params["name"])):
        return None
    _, options = split_jit_name(eqn.params["name"])
    if options is None:
        return ()
    forward, backward = options.compiler_options_key
    return backward if _is_backward(eqn) else forward


def _region_name(eqn: Any) -> str:
    name, _ = split_jit_name(eqn.params["name"])
    return f"{name}.backward" if _is_backward(eqn) else f"{name}.forward"


def _is_backward(eqn: Any) -> bool:
    return "transpose" in _jax_compat.scope(eqn)


class Lowered:
    """A step cut into parts, each distinct one lowered."""

    def __init__(self, traced: Traced, eager: bool):
        self._traced = traced
        self._eager = eager
        self.fallback: str | None = None
        self._plan: _Plan | None = None
        try:
            self._plan = self._make_plan()
        except _CannotSplit as reason:
            self.fallback = str(reason)
        except Exception as error:
            if _RAISE_FAULTS:
                raise
            # A fault in the plan must not cost the user the step: plain jit runs it.
            _logs.plan.warning("hcompile could not split a step; jax.jit runs it", exc_info=True)
            self.fallback = f"planning failed: {type(error).__name__}: {error}"

    def _make_plan(self) -> _Plan:
        jaxpr, consts, _, donated = _jax_compat.traced_function(self._traced._traced)
        options = self._traced._options
        for name in ("in_shardings", "out_shardings", "device", "backend"):
            if options.get(name) is not None:
                raise _CannotSplit(f"jit was given {name}")
        if jaxpr.effects:
            effects = ", ".join(sorted(map(str, jaxpr.effects)))
            raise _CannotSplit(f"it has effects ({effects})")
        placing = _jax_compat.places_values(jaxpr)
        if placing is not None:
            raise _CannotSplit(f"it holds a {placing} over several devices")
        if _jax_compat.looks_for_nans():
            raise _CannotSplit("jax_debug_nans looks inside the whole program")
        if len(jaxpr.invars) != len(self._traced._signature.leaves):
            raise _CannotSplit("its inputs are not its array arguments one by one")
        return _Plan(self._traced, jaxpr, consts, donated)

    @functools.cached_property
    def _whole(self) -> Any:
        """The step lowered as one program, by ``jax.jit``."""
        return self._traced._traced.lower()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def compile(self) -> Compiled:
        """Compiles every distinct part that no live program has compiled."""
        return Compiled(self._traced, self, self._plan, self._eager)


class Compiled:
    """A compiled step: call it with arguments of the types it was compiled for."""

    def __init__(self, traced: Traced, lowered: Lowered, plan: _Plan | None, eager: bool):
        self.signature = traced._signature
        self._out_tree = traced._traced.out_tree
        self._name = traced._traced.fun_name
        self._whole: Any = None
        self.schedule: Schedule | None = None
        start = time.perf_counter()
        if plan is not None:
            parts = [executable for executable, _ in plan.executables.values()]
            _executables.compile_all(parts, f"compiling {self._name}")
            self.schedule = plan.schedule()
            self._executables = parts  # alive, so that other programs can share them
            self._donated = [info.donated for info in jax.tree.leaves(traced._traced.args_info)]
            self._donates = any(self._donated)
            avals = [v.aval for v in traced._traced.jaxpr.jaxpr.invars]
            self._dtypes = [aval.dtype for aval in avals]
        elif not eager:  # a call of jax.jit's own compiles in its turn
            self._whole = lowered._whole.compile()
        self.program_report = _report.ProgramReport(
            trace_seconds=traced._seconds,
            plan_seconds=plan.seconds if plan else 0.0,
            lower_seconds=plan.lower_seconds if plan else 0.0,
            compile_seconds=time.perf_counter() - start,
            parts=plan.part_reports() if plan else (),
            regions=tuple(_region_report(stats) for stats in traced._regions.regions.values()),
            fallback=lowered.fallback,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _errors.own_frames_hidden:
            if self._whole is not None:
                return self._whole(*args, **kwargs)
            signature = Signature(_NO_STATICS, args, kwargs)
            self._check(signature)
            return self.run(signature)

    def report(self) -> _report.Report:
        """What was compiled, reused and missed, and how long each took."""
        return _report.Report(self._name, (self.program_report,))

    def run(self, signature: Signature) -> Any:
        """Runs the schedule on the arrays of ``signature``, which fits ``self.signature``."""
        assert self.schedule is not None
        arrays = signature.leaves
        if self._donates:
            self._check_donated(signature)
        if signature.has_host_values:
            arrays = list(map(_as_array, arrays, self._dtypes))
        outputs = self.schedule.run(arrays)
        return jax.tree_util.tree_unflatten(self._out_tree, outputs)

    def _check(self, signature: Signature) -> None:
        """As ``jax.stages.Compiled``: the types have to be those that were compiled for."""
        mine = self.signature
        if signature.treedef != mine.treedef:
            raise TypeError(
                f"{self._name} was compiled for arguments of the structure {mine.treedef}; "
                f"got {signature.treedef}. Lower and compile it for this structure."
            )
        for index, (was, now) in enumerate(zip(mine.leaves, signature.leaves, strict=True)):
            expected, got = _shaped(was), _shaped(now)
            if expected != got:
                raise TypeError(
                    f"{self._name} was compiled for {expected} at argument {mine.path(index)}; "
                    f"got {got}. Lower and compile it for these types."
                )

    def _check_donated(self, signature: Signature) -> None:
        """Before anything runs: a step that stops half-way would have lost what it had donated."""
        leaves = signature.leaves
        if len(set(map(id, leaves))) != len(leaves):
            self._check_twice(signature)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise _errors.deleted_argument(self._name, signature.path(index), leaf)

    def _check_twice(self, signature: Signature) -> None:
        seen: dict[int, int] = {}
        for index, leaf in enumerate(signature.leaves):
            first = seen.setdefault(id(leaf), index)
            if first != index and isinstance(leaf, jax.Array):
                pair = (first, index) if self._donated[first] else (index, first)
                if self._donated[pair[0]]:
                    raise _errors.donated_twice(self._name, *map(signature.path, pair))


_NO_STATICS = Statics(lambda: None, {})
# Set in the tests, where a fault in the plan should be seen.
_RAISE_FAULTS = os.environ.get("HCOMPILE_RAISE_FAULTS") == "1"


def _shaped(leaf: Any) -> str:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return f"{aval.dtype}{list(aval.shape)}"


def _as_array(leaf: Any, dtype: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jax.device_put(np.asarray(leaf, dtype))


def _region_report(stats: Any) -> _report.RegionReport:
    return _report.RegionReport(
        stats.name, stats.calls, stats.traces, stats.inlined, tuple(stats.misses)
    )


def clear_caches() -> None:
    """Forgets every traced body, every shared executable and all counts.

    Functions that were compiled keep what they hold and go on working.

    Example:
      >>> import hcompile
      >>> hcompile.clear_caches()
      >>> hcompile.cache_info()
      {}
    """
    _region.clear_region_cache()
    _executables.clear_registry()
