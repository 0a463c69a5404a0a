"""Which traced body serves a region's call.

Flow of a call (``_region`` drives it):

1. *Take apart*: ``Captured`` walks the function, its arguments and what it captured.
2. *Look up*: the key is the function's code object **and** its globals, by identity (two functions
   from different files can have equal code). Under it, ``facts`` (treespecs, constants, captured
   structure: the guards) name one ``ReuseEntry``. Facts were read a moment ago, from the live
   objects, so there is nothing stale to re-check.
3. *Stamp out*: the entry's jitted body is called with this call's arrays. JAX's own cache decides
   whether these shapes, dtypes, shardings and contexts were traced before; if not, it runs the
   entry's body, which traces *this* call. Hence an entry needs no function to trace later, and
   keeps none alive.
4. *Safety*: the body runs on copies of everything mutable (``Captured.rebuild``). If the copies
   changed, if a traced array slipped in by a path the walk does not know, or if an output is no
   array and no constant, ``NotReusableError`` leaves JAX's cache and ours without an entry, and the
   caller runs the function itself, in line, as if it had not been marked.

What is cached: one jitted function per set of facts, weak in what the facts name, bounded by
``MAX_ENTRIES`` with the least recently used dropped first.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ._fingerprint import Same

MAX_ENTRIES = 4096


class NotReusableError(Exception):
    """A body was traced that only holds for the call it was traced for."""


class ReuseEntry:
    """One set of facts, and the jitted body that serves every call with equal facts."""

    __slots__ = ("facts", "jitted")

    def __init__(self, facts: tuple[Hashable, ...], jitted: Any):
        self.facts = facts
        self.jitted = jitted


class RegionStats:
    """What happened to the calls of one marked function.

    Attributes:
      name: the function's qualified name.
      calls: calls under a trace.
      traces: times its Python body was traced for a new body.
      inlined: calls that ran in line, as unmarked code.
      misses: why bodies could not be reused: path, old and new value. The latest are kept.
      bodies: identities of the distinct bodies used.
    """

    def __init__(self, name: str):
        self.name = name
        self.calls = 0
        self.traces = 0
        self.inlined = 0
        self.misses: collections.deque[str] = collections.deque(maxlen=16)
        self.bodies: set[int] = set()

    @property
    def reused(self) -> int:
        """Calls served by a body that was there already."""
        return self.calls - self.traces - self.inlined


class Recording:
    """The region calls of one outer program, or of the process."""

    def __init__(self) -> None:
        self.regions: dict[Hashable, RegionStats] = {}

    def region(self, key: Hashable, name: str) -> RegionStats:
        return self.regions.setdefault(key, RegionStats(name))


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.programs: list[Recording] = []


_thread = _ThreadState()


@contextlib.contextmanager
def recording(program: Recording) -> Iterator[Recording]:
    """Region calls of this thread are told to ``program`` while the context is open."""
    _thread.programs.append(program)
    try:
        yield program
    finally:
        _thread.programs.pop()


def current_program() -> Recording | None:
    return _thread.programs[-1] if _thread.programs else None


class ReuseCache:
    """Entries by function and facts; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[tuple[Hashable, Hashable], ReuseEntry] = (
            collections.OrderedDict()
        )
        self._latest: dict[Hashable, ReuseEntry] = {}

    def find(self, key: Hashable, facts: tuple[Hashable, ...]) -> ReuseEntry | None:
        with self._lock:
            entry = self._entries.get((key, facts))
            if entry is not None:
                self._entries.move_to_end((key, facts))
            return entry

    def latest(self, key: Hashable) -> ReuseEntry | None:
        """The entry last added for a function: what a miss is explained against."""
        return self._latest.get(key)

    def add(self, key: Hashable, entry: ReuseEntry) -> None:
        with self._lock:
            self._entries[key, entry.facts] = entry
            self._latest[key] = entry
            while len(self._entries) > MAX_ENTRIES:
                (old, _), dropped = self._entries.popitem(last=False)
                if self._latest.get(old) is dropped:
                    del self._latest[old]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._latest.clear()

    def __len__(self) -> int:
        return len(self._entries)


def function_key(fn: Callable[..., Any]) -> Hashable | None:
    """Code and globals of what runs when ``fn`` is called; None if that is no Python function."""
    while not isinstance(fn, types.FunctionType):
        if isinstance(fn, types.MethodType):
            fn = fn.__func__
        elif hasattr(fn, "func") and hasattr(fn, "keywords"):  # functools.partial and its kin
            fn = fn.func
        else:
            call = inspect.getattr_static(type(fn), "__call__", None)
            if not isinstance(call, types.FunctionType):
                return None
            fn = call
    return (Same(fn.__code__), id(fn.__globals__))


def explain_miss(old: ReuseEntry | None, captured: Any) -> str:
    """The first fact in which a call differs from the latest cached one of its function."""
    if old is None:
        return "first call"
    for index, fact in enumerate(captured.facts):
        before = old.facts[index] if index < len(old.facts) else "nothing"
        if before != fact:
            return f"{captured.path(index)} was {before!r} and is now {fact!r}"
    return "the call has fewer captured values than the cached one"
