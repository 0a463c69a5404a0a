"""XLA executables: compiled once for each distinct part, shared by every program that needs it.

Compiling runs on a thread pool; XLA leaves Python's lock while it works.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from . import _errors, _jax_compat, _logs, _progress


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """A part of a program that is compiled on its own.

    Attributes:
      name: shown in profiles and reports.
      key: what the executable depends on: canonical jaxpr, donation, device, options, context.
      jaxpr: closed, of flat arrays.
      donated: positions of the inputs whose buffers the outputs may take.
      sharding: where inputs and outputs live; None for JAX's default device, uncommitted.
      compiler_options: for XLA, as ``jax.jit`` takes them.
    """

    name: str
    key: Hashable
    jaxpr: Any
    donated: tuple[int, ...]
    sharding: Any
    compiler_options: dict[str, Any] | None


class Executable:
    """A compiled part: call it with flat arrays, get a list of arrays."""

    def __init__(self, spec: PartSpec, equations: int, lowered: Any, lower_seconds: float):
        self.name = spec.name
        self.compiler_options = spec.compiler_options
        self.equations = equations
        self.lowered = lowered
        self.lower_seconds = lower_seconds
        self.compile_seconds = 0.0
        self.call: Callable[..., Sequence[Any]] = _not_compiled
        self._lock = threading.Lock()

    def compile(self) -> None:
        """Compiles, unless that was done; a failure leaves the part as it was."""
        with self._lock:
            if self.call is _not_compiled:
                start = time.perf_counter()
                try:
                    self.call = self.lowered.compile()
                except jax.errors.JaxRuntimeError as error:
                    if self.compiler_options and "option" in str(error):
                        raise _errors.compiler_options(
                            self.name, self.compiler_options, error
                        ) from None
                    raise
                self.compile_seconds = time.perf_counter() - start
                _logs.compiling.info("%s: compiled in %.3f s", self.name, self.compile_seconds)

    @property
    def is_compiled(self) -> bool:
        return self.call is not _not_compiled


def _not_compiled(*_: Any) -> Sequence[Any]:
    raise RuntimeError("this part was lowered but not compiled")


_lock = threading.Lock()
_registry: weakref.WeakValueDictionary[Hashable, Executable] = weakref.WeakValueDictionary()


def lower(spec: PartSpec) -> tuple[Executable, bool]:
    """The executable for ``spec``, compiled or not yet, and whether another program had it."""
    with _lock:
        found = _registry.get(spec.key)
    if found is not None:
        return found, True
    start = time.perf_counter()
    lowered = _jitted(spec).lower(*_arguments(spec))
    seconds = time.perf_counter() - start
    equations = len(_jax_compat.split_jaxpr(spec.jaxpr)[0].eqns)
    made = Executable(spec, equations, lowered, seconds)
    _logs.compiling.debug("%s: lowered %d equations in %.3f s", spec.name, equations, seconds)
    with _lock:
        kept = _registry.setdefault(spec.key, made)
    return kept, kept is not made


def _jitted(spec: PartSpec) -> Any:
    run = _jax_compat.jaxpr_as_fun(spec.jaxpr)
    placed = {}
    if spec.sharding is not None:
        placed = {"in_shardings": spec.sharding, "out_shardings": spec.sharding}
    return _jax_compat.make_jitted(
        lambda *arrays: run(*arrays),
        spec.name,
        donate_argnums=spec.donated,
        compiler_options=spec.compiler_options,
        **placed,
    )


def _arguments(spec: PartSpec) -> list[jax.ShapeDtypeStruct]:
    return [_jax_compat.abstract_argument(aval) for aval in _jax_compat.input_avals(spec.jaxpr)]


def compile_all(executables: Sequence[Executable], title: str) -> None:
    """Compiles what is not compiled yet, in parallel, with a progress bar on a terminal."""
    waiting = [e for e in dict.fromkeys(executables) if not e.is_compiled]
    if not waiting:
        return
    threads = min(len(waiting), os.cpu_count() or 1)
    with (
        _progress.bar(title, len(waiting)) as advance,
        concurrent.futures.ThreadPoolExecutor(threads, "hcompile") as pool,
    ):
        futures = [pool.submit(e.compile) for e in waiting]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                advance()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def clear_registry() -> None:
    """Forgets executables; programs that hold them keep them."""
    with _lock:
        _registry.clear()
