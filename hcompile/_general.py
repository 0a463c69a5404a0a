"""Numbers in a call that become inputs of its body: which, and whether the body allows it.

Two calls whose facts differ in Python numbers only: those places are *holes*. A walk that takes the
numbers for arrays (``_Opened``) gives a trace with abstract values in the holes; ``_numbers.lift``
compares it with the plain one, and the earlier call's body is compared with what the result says
it should be. From then on one entry serves every number, and no call with another is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax

from . import _jax_compat
from ._bodies import Body, normal_form
from ._body import OutSpec, split_result
from ._canonical import Canonicalizer
from ._capture import Captured, UnknownLeafError
from ._code import ASKS_ABOUT_VALUES
from ._fingerprint import Constant, Tag
from ._numbers import NoMatchError, Number, Slot, lift
from ._rebuild import blank_dict, fill_dict, fill_sequence

_MAX_HOLES = 16


@dataclasses.dataclass(frozen=True)
class Hole:
    """The place of a number among facts.

    Attributes:
      index: of the fact.
      element: position in it, if it is about several constants, else None.
      kind: int or float.
    """

    index: int
    element: int | None
    kind: type


Holes = tuple[Hole, ...]
Facts = tuple[Any, ...]


def holes_between(old: Facts, new: Facts) -> Holes:
    """The holes that make two calls' facts equal; none if they differ in anything else."""
    if len(old) != len(new):
        return ()
    found: list[Hole] = []
    for index, (before, fact) in enumerate(zip(old, new, strict=True)):
        if before == fact:
            continue
        kind = _number_kind(fact)
        if kind is not None and _number_kind(before) is kind:
            found.append(Hole(index, None, kind))
        elif _is_about_several(before, fact):
            pairs = zip(before[-1], fact[-1], strict=True)
            changed = [i for i, (a, b) in enumerate(pairs) if a != b]
            if any(fact[-2][i] is not int for i in changed):
                return ()
            found += [Hole(index, i, int) for i in changed]
        else:
            return ()
    return tuple(found) if len(found) <= _MAX_HOLES else ()


def _number_kind(fact: Any) -> type | None:
    if type(fact) is int:
        return int
    return float if isinstance(fact, Constant) and type(fact.shown) is float else None


def _is_about_several(before: Any, fact: Any) -> bool:
    """Whether both are ``(type, ..., kinds, values)`` of plain constants, of the same kinds."""
    if not (type(before) is tuple and type(fact) is tuple and len(before) > 2):
        return False
    return isinstance(before[0], type) and before[:-1] == fact[:-1]


def with_holes(facts: Facts, holes: Holes) -> tuple[Facts, tuple[Number, ...]] | None:
    """``facts`` with the holes in the places of numbers, and the numbers; None if these are not."""
    masked, numbers = list(facts), []
    for hole in holes:
        if hole.index >= len(masked):
            return None
        fact = masked[hole.index]
        if hole.element is None:
            if _number_kind(fact) is not hole.kind:
                return None
            numbers.append(fact if hole.kind is int else fact.shown)
            masked[hole.index] = hole
        else:
            if not (_is_about_several(fact, fact) and hole.element < len(fact[-1])):
                return None
            *head, kinds, values = fact
            if kinds[hole.element] is not hole.kind:
                return None
            numbers.append(values[hole.element])
            values = (*values[: hole.element], hole, *values[hole.element + 1 :])
            masked[hole.index] = (*head, kinds, values)
    return tuple(masked), tuple(numbers)


class Generals:
    """Which holes the bodies of one function allow."""

    def __init__(self) -> None:
        self._known: dict[Holes, None] = {}
        self._refused: set[Hashable] = set()

    def add(self, holes: Holes) -> None:
        if len(self._known) < _MAX_HOLES:
            self._known[holes] = None

    def candidates(self, facts: Facts) -> Iterator[tuple[Holes, Facts, tuple[Number, ...]]]:
        """Holes, masked facts and numbers under which an entry may serve a call."""
        for holes in list(self._known):
            found = with_holes(facts, holes)
            if found is not None:
                yield holes, *found

    def refuse(self, masked: Facts) -> None:
        """Remembers that calls with these facts but for numbers have bodies of their own."""
        if len(self._refused) < 4096:
            self._refused.add(masked)

    def is_refused(self, masked: Facts) -> bool:
        return masked in self._refused


def allows_holes(captured: Captured) -> bool:
    """Whether code may run alike on a number and on an abstract value.

    Not if it asks for types, formats, hashes or catches errors, where nothing would show that the
    two went different ways.
    """
    return not captured.reads(ASKS_ABOUT_VALUES)


class _Opened(Captured):
    """The walk of a call in which the numbers in holes are arrays.

    Attributes:
      places: which of ``arrays`` are numbers, in the order of the holes.
    """

    def __init__(self, call: Captured, holes: Holes):
        self._holes = {(hole.index, hole.element) for hole in holes}
        self._extra = 0  # facts that the other walk does not have
        self.places: list[int] = []
        super().__init__(*call.call)
        if self._alias is not None:  # equal numbers are not one array
            places = set(self.places)
            self._alias = tuple(i if i in places else a for i, a in enumerate(self._alias))

    def _index(self) -> int:
        return len(self.facts) - self._extra

    def _visit(self, value: Any, path: Any, replaceable: bool) -> Any:
        if (self._index(), None) in self._holes:
            return self._open(value, path, replaceable)
        return super()._visit(value, path, replaceable)

    def _visit_parts(self, where: Any, parts: Any, replaceable: bool) -> dict[Hashable, Any]:
        visited = ((key, self._visit(value, (where, key), replaceable)) for key, value in parts)
        return {key: part for key, part in visited if part is not None}

    def _open(self, value: Any, path: Any, replaceable: bool) -> int:
        if not replaceable:
            raise UnknownLeafError("a number of a class or module cannot be made an input")
        self._record(Tag.ARRAY, path)
        self.arrays.append(value)
        self.places.append(len(self.arrays) - 1)
        return self.places[-1]

    def _visit_several(self, value: Any, path: Any, replaceable: bool) -> Any:
        index = self._index()
        elements = [i for i in range(len(value)) if (index, i) in self._holes]
        if not elements:
            return Captured.visitors[type(value)](self, value, path, replaceable)
        values = list(value.values()) if isinstance(value, dict) else value
        node = self._add(value, replaceable, mutable=True)
        if isinstance(value, dict):
            node.blank, node.fill = blank_dict, fill_dict
        else:
            node.fill = fill_sequence
        self._record(("opened",), path)
        for i in elements:
            node.parts[i] = self._open(values[i], path, replaceable)
            self._extra += 1
        return node


_several: Any = _Opened._visit_several
_Opened.visitors = {
    kind: _several if issubclass(kind, (tuple, list, dict)) else visitor
    for kind, visitor in Captured.visitors.items()
}


def generalised(
    captured: Captured,
    holes: Holes,
    numbers: Sequence[Number],
    arrays: Sequence[Any],
    plain: tuple[Any, OutSpec],
) -> tuple[Any, tuple[Slot, ...]]:
    """The body of a call with its numbers as further inputs, and what these are.

    Raises:
      NoMatchError: if the body looks at the numbers.
    """
    try:
        general, spec = _general_trace(captured, holes, numbers, arrays)
    except Exception as error:  # the user's code, and JAX's, refuse abstract values in many ways
        raise NoMatchError(str(error)) from None
    jaxpr, own_spec = plain
    if not own_spec.fits(spec):
        raise NoMatchError("the result holds the number")
    return lift(jaxpr, general, numbers)


def _general_trace(
    captured: Captured, holes: Holes, numbers: Sequence[Number], arrays: Sequence[Any]
) -> tuple[Any, OutSpec]:
    opened = _Opened(captured, holes)
    places = {place: i for i, place in enumerate(opened.places)}
    specs: list[OutSpec] = []

    def flat(*values: Any) -> list[Any]:
        given, abstract = iter(values[: len(arrays)]), values[len(arrays) :]
        mixed = [
            abstract[places[i]] if i in places else next(given) for i in range(len(opened.arrays))
        ]
        fn, args, kwargs = opened.rebuild(mixed)
        leaves, spec = split_result(fn(*args, **kwargs))
        specs.append(spec)
        return leaves

    return jax.make_jaxpr(flat)(*arrays, *numbers), specs[-1]


def agrees(
    lifted: Any,
    slots: Sequence[Slot],
    first: Body | None,
    numbers: Sequence[Number],
    keep_rules: bool = True,
) -> bool:
    """Whether a lifted body, given another call's numbers, is that call's body.

    ``first`` is that body in normal form, its calls not opened; ``keep_rules`` as it was made.
    """
    if first is None:
        return False
    opened, _ = _jax_compat.split_jaxpr(lifted)
    count = len(opened.invars) - len(slots)
    forms = Canonicalizer(keep_rules)
    is_slot = [i >= count for i in range(len(opened.invars))]
    body = normal_form(forms, lifted, is_slot, opens_calls=False)
    if body.form != first.form or body.results != first.results:
        return False
    return all(
        _is_source(source, other, slots, count, numbers, forms)
        for source, other in zip(body.sources, first.sources, strict=True)
    )


def _is_source(
    source: Any,
    other: Any,
    slots: Sequence[Slot],
    count: int,
    numbers: Sequence[Number],
    forms: Canonicalizer,
) -> bool:
    is_literal = isinstance(other, _jax_compat.Literal)
    if isinstance(source, int) and source >= count:
        return is_literal and slots[source - count].gives(numbers, other)
    if isinstance(source, _jax_compat.Literal):
        return is_literal and forms.literal(source) == forms.literal(other)
    return source == other
