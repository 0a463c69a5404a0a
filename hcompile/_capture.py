"""What a call can see, taken apart by path: arrays to lift, and facts that must stay equal.

A function sees its arguments, and what it captured: closure cells, defaults, a bound ``self``,
the globals that it and its helpers read. ``Captured`` walks all of them and has

- ``arrays``: every array found, in the order of the walk. They become inputs, so layer 7's weights
  take layer 0's place;
- ``facts``: everything else, as hashable values in the same order. Two calls with equal facts
  differ in their arrays only;
- ``rebuild(arrays)``: the call with other arrays (tracers) in those places. Whatever holds an array
  or can be written to is rebuilt as a copy, so tracing cannot touch the caller's objects; if the
  copies differ from the originals afterwards, the function had a side effect.

``_walk`` visits, ``_rebuild`` copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._paths import difference, render
from ._rebuild import Rebuilder, restore_contents
from ._walk import UnknownLeafError as UnknownLeafError
from ._walk import Walk


class Captured(Walk):
    """A call taken apart; see the module's docstring.

    Attributes:
      call: the function, arguments and keyword arguments.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.call = (fn, args, kwargs)
        self._parts = (
            self._visit(fn, ("", None), True),
            self._visit(args, ("arguments", None), True),
            self._visit(kwargs or (), ("arguments", None), True),  # a dict costs more
        )
        self.finish()
        self._alias: tuple[int, ...] | None = None
        if self._compares_identity:  # ``q is k`` would see which arrays are one
            first: dict[int, int] = {}
            self._check_copies()
            alias = tuple(first.setdefault(id(a), i) for i, a in enumerate(self.arrays))
            self._record(("the same arrays", alias), ("the arrays", None))
            self._alias = alias

    def path(self, index: int) -> str:
        """Where fact number ``index`` was found, e.g. ``self.norm.eps`` or ``arguments[1]``."""
        return render(self._paths[index]) if index < len(self._paths) else "the end"

    def difference(self, index: int, before: Any, fact: Any) -> tuple[str, Any, Any]:
        """Where fact number ``index`` differs from what it was: the path, and both values there."""
        path = self.path(index)
        return difference(path, before, fact)

    def rebuild(self, arrays: Sequence[Any]) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
        """``(fn, args, kwargs)`` with ``arrays`` in the places of ``self.arrays``."""
        rebuilder = Rebuilder(self.placed(arrays), self._nodes)
        pairs = zip(self.call, self._parts, strict=True)
        call: Any = tuple(old if part is None else rebuilder(part) for old, part in pairs)
        return call

    def placed(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """``arrays`` as the body sees them: one for each group that is one here, if it can tell."""
        return arrays if self._alias is None else [arrays[i] for i in self._alias]

    def restore_shared(self) -> None:
        """Puts back what a trace changed in classes, modules and what they hold: no copies."""
        for value, contents in self._contents:
            restore_contents(value, contents)
        for owner, name, value in self._shared:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for owner, name in self.new_names():
            delattr(owner, name)
