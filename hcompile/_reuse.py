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
4. *Count*: the traced body has a normal form (``_bodies``). Two entries whose bodies have one form
   are one body, whatever their facts say: they share an executable, and count once towards
   ``max_reuse_entries``. A layer number that only scales, or picks weights from a list, and a
   name that never reaches the program thus cost a trace and no body.
5. *Safety*: the body runs on copies of everything mutable (``Captured.rebuild``). If the copies
   changed, if a traced array slipped in by a path the walk does not know, or if an output is no
   array and no constant, ``NotReusableError`` leaves JAX's cache and ours without an entry, and the
   caller runs the function itself, in line, as if it had not been marked. ``HCOMPILE_CHECK=1``
   traces every hit again, and compares.

With ``reuse_hash_fn`` the user's number takes the place of the facts in step 2; the structure of
the arguments stays, and JAX's cache keeps seeing shapes and dtypes.

What is cached: one jitted function per set of facts, weak in what the facts name and dropped with
the function's code, bounded by ``MAX_ENTRIES`` with the least recently used dropped first. (JAX
keeps the tracebacks of a trace, which hold the code: mostly the bound is what frees an entry.)
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from . import _errors
from ._capture import Captured
from ._fingerprint import Same, Tag, constant, is_constant

MAX_ENTRIES = 1024
_T = TypeVar("_T")


class NotReusableError(Exception):
    """A body was traced that only holds for the call it was traced for."""


class ReuseEntry:
    """One set of facts, and the jitted body that serves every call with equal facts."""

    __slots__ = ("facts", "jitted", "place")

    def __init__(self, facts: tuple[Hashable, ...], jitted: Any):
        self.facts = facts
        self.jitted = jitted
        self.place: Any = None  # its key in the cache


@dataclasses.dataclass(frozen=True)
class Miss:
    """Why a call could not use the body that its function was traced to last.

    Attributes:
      reason: ``"first call"``, ``"constant"``, ``"structure"``, ``"object"``, ``"avals"`` (shapes,
        dtypes, shardings or JAX's context), ``"hash"``, ``"limit"`` or ``"in line"``.
      text: the argument or capture by path, the old and the new value.
      where: the user's line.
    """

    reason: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.text} [{self.where}]" if self.where else self.text


PHASES: tuple[str, ...] = ("lookup", "hash", "trace", "stamp_out")


class RegionStats:
    """What happened to the calls of one marked function.

    Attributes:
      name: the function's qualified name.
      calls: calls under a trace.
      traces: calls whose Python body was traced for them.
      inlined: calls that ran in line, as unmarked code.
      reasons: how often each reason for a miss occurred.
      misses: the latest misses but first calls.
      bodies: for each distinct body, the miss that made it necessary.
      seconds: in each of ``PHASES``.
    """

    def __init__(self, name: str):
        self.name = name
        self.calls = 0
        self.traces = 0
        self.inlined = 0
        self.reasons: collections.Counter[str] = collections.Counter()
        self.misses: collections.deque[Miss] = collections.deque(maxlen=16)
        self.bodies: dict[Hashable, Miss | None] = {}
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @property
    def hits(self) -> int:
        """Calls served by a body that was there already."""
        return self.calls - self.traces - self.inlined

    def add_miss(self, miss: Miss) -> None:
        self.reasons[miss.reason] += 1
        if miss.reason != "first call":
            self.misses.append(miss)


class Recording:
    """The region calls of one outer program, or of the process."""

    def __init__(self) -> None:
        self.regions: collections.OrderedDict[Hashable, RegionStats] = collections.OrderedDict()

    def region(self, key: Hashable, name: str) -> RegionStats:
        stats = self.regions.get(key)
        if stats is None:
            stats = self.regions[key] = RegionStats(name)
            _bound(self.regions)
        return stats


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.programs: list[Recording] = []
        self.forbids_new = 0


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


@contextlib.contextmanager
def no_new_regions() -> Iterator[None]:
    """Within this context, and in this thread, every region and every step has to be there already.

    Raises:
      NewRegionError: in place of any trace of a region's body and any trace or compilation of a
        step by ``hcompile.jit``; it names the function and says why it would be new.

    Example:
      >>> import hcompile, jax.numpy as jnp
      >>> step = hcompile.jit(lambda x: x + 1)
      >>> _ = step(jnp.ones(2))
      >>> with hcompile.no_new_regions():
      ...     print(step(jnp.ones(2)))
      [2. 2.]
      >>> try:
      ...     with hcompile.no_new_regions():
      ...         step(jnp.ones(3))
      ... except hcompile.NewRegionError:
      ...     print("another shape is another program")
      another shape is another program

    ``jax.no_tracing`` is the same for JAX itself.
    """
    _thread.forbids_new += 1
    try:
        yield
    finally:
        _thread.forbids_new -= 1


def check_new_is_allowed(what: str, why: str) -> None:
    """Raises if ``no_new_regions`` is in force."""
    if _thread.forbids_new:
        raise _errors.new_region(what, why)


class ReuseCache:
    """Entries by function and facts; safe to use from several threads.

    A key is ``(function_key, mark)``. Its entries go when the function's code does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[int] = set()
        # Of code objects that are gone. Only noted when that happens: the garbage collector can
        # run while the lock is held.
        self._gone: collections.deque[int] = collections.deque()
        self._entries: collections.OrderedDict[tuple[Any, Hashable], ReuseEntry] = (
            collections.OrderedDict()
        )
        self._latest: collections.OrderedDict[Any, ReuseEntry] = collections.OrderedDict()
        self._companions: collections.OrderedDict[Any, dict[Any, Any]] = collections.OrderedDict()

    def find(self, key: tuple[Any, Hashable], facts: tuple[Hashable, ...]) -> ReuseEntry | None:
        with self._lock:
            entry = self._entries.get((key, facts))
            if entry is not None:  # its own key is found by identity: no fact is compared again
                self._entries.move_to_end(entry.place)
            return entry

    def latest(self, key: tuple[Any, Hashable]) -> ReuseEntry | None:
        """The entry last added for a function: what a miss is explained against."""
        return self._latest.get(key)

    def companion(self, key: tuple[Any, Hashable], make: Callable[[], _T]) -> _T:
        """Something that is kept with a key's entries: made at the first call, one a function."""
        with self._lock:
            kept = self._companions.setdefault(key, {})
            _bound(self._companions)
            if make not in kept:
                kept[make] = make()
            return kept[make]

    def add(self, key: tuple[Any, Hashable], entry: ReuseEntry) -> None:
        (code, _), _ = key
        with self._lock:
            self._forget_gone()
            if hash(code) not in self._watched:
                self._watched.add(hash(code))
                weakref.finalize(code.value, self._gone.append, hash(code)).atexit = False
            entry.place = (key, entry.facts)
            self._entries.pop(entry.place, None)
            self._entries[entry.place] = entry
            self._latest[key] = entry
            _bound(self._entries)
            _bound(self._latest)

    def drop(self, wanted: Callable[[tuple[Any, Hashable]], bool]) -> None:
        """Forgets the entries of the keys that ``wanted`` holds for."""
        with self._lock:
            self._drop(wanted)

    def _drop(self, wanted: Callable[[tuple[Any, Hashable]], bool]) -> None:
        for entry in [e for e in self._entries if wanted(e[0])]:
            del self._entries[entry]
        for table in (self._latest, self._companions):
            for key in [k for k in table if wanted(k)]:
                del table[key]

    def _forget_gone(self) -> None:
        gone = set()
        while self._gone:
            gone.add(self._gone.popleft())
        if gone:
            self._watched -= gone
            self._drop(lambda key: hash(key[0][0]) in gone)

    def counts(self) -> collections.Counter[Any]:
        """How many entries each key has."""
        with self._lock:
            return collections.Counter(key for key, _ in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _bound(table: collections.OrderedDict[Any, Any]) -> None:
    """Drops the oldest of what is too many."""
    while len(table) > MAX_ENTRIES:
        table.popitem(last=False)


def python_function(fn: Callable[..., Any]) -> types.FunctionType | None:
    """What runs when ``fn`` is called; None if that is no Python function."""
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
    return fn


def function_key(fn: Callable[..., Any]) -> Hashable | None:
    """Code and globals of what runs when ``fn`` is called; None if that is no Python function."""
    function = python_function(fn)
    return None if function is None else (Same(function.__code__), id(function.__globals__))


def explain_miss(
    old: ReuseEntry | None, facts: tuple[Any, ...], captured: Captured, where: str
) -> Miss:
    """The first fact in which a call differs from the latest cached one of its function."""
    if old is None:
        return Miss("first call", "first call", where)
    *old_facts, old_settings = old.facts
    *new_facts, settings = facts
    for index, (before, fact) in enumerate(itertools.zip_longest(old_facts, new_facts)):
        if before != fact:
            path, old_value, value = captured.difference(index, before, fact)
            text = f"{path} was {old_value!r} and is now {value!r}"
            return Miss(_kind(old_value, value), text, where)
    return Miss("avals", f"JAX's settings were {old_settings} and are now {settings}", where)


def explain_hash_miss(old: ReuseEntry | None, facts: tuple[Any, ...], where: str) -> Miss:
    """The same for a region with a ``reuse_hash_fn``, whose facts are not those of a walk."""
    if old is None:
        return Miss("first call", "first call", where)
    names = (
        "",
        "the number of reuse_hash_fn",
        "the arguments' structure",
        "the number of arrays",
        "JAX's settings",
    )
    for name, before, now in zip(names, old.facts, facts, strict=False):
        if before != now:
            reason = "hash" if name == names[1] else "structure"
            return Miss(reason, f"{name} was {before} and is now {now}", where)
    return Miss("constant", "an integer that may pick from a container differs", where)


def _kind(before: Any, fact: Any) -> str:
    if all(is_constant(part) or constant(part) is not None for part in (before, fact)):
        return "constant"
    if Tag.ARRAY in (before, fact) or is_constant(before) or is_constant(fact):
        return "structure"
    is_object = isinstance(fact, Same) or (
        isinstance(fact, tuple) and any(isinstance(part, Same) for part in fact)
    )
    return "object" if is_object else "structure"
