"""Glue that repeats inside one level: an optimizer's updates, one call for each layer's worth.

The equations of a level are cut into components. Two equations belong together when they share an
array; a scalar does not join them, since a learning rate or a gradient norm is read everywhere.
What is computed from a scalar of the same level comes at a later *time* than that scalar, so
components never wait for each other in a circle. Components with equal canonical forms are dealt
out to equal bundles; what is left over stays together.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence

from .. import _jax_compat
from .ops import Op, Program, Slot

# What one more call per step is worth, in equations that need not be compiled.
_CALL_COST = 8

Piece = list[int]  # positions of equations in the program, ascending


def pieces(
    program: Program,
    indices: Sequence[int],
    producer: Callable[[Slot], int | None],
    form: Callable[[Piece], Hashable],
) -> list[Piece]:
    """``indices`` cut into pieces, in an order of execution.

    Args:
      program: the flat program.
      indices: the equations of one level.
      producer: the position of the equation that makes a slot; None if it is not in the level.
      form: the canonical form of a piece.
    """
    times = _earliest_times(program, indices, producer)
    _delay(program, times, producer)
    found: list[Piece] = []
    rest: Piece = []
    for time in sorted(set(times.values())):
        here = [i for i in indices if times[i] == time]
        # Scalar work is one piece: cut up, it would be all calls and no work.
        is_array_work = time % 2 == 0
        bundles, single = (
            _bundles(_components(program, here), form) if is_array_work else ([], here)
        )
        rest += single
        if bundles:  # they read what the rest computed before, and the rest after reads them
            found += [sorted(rest)] if rest else []
            found += bundles
            rest = []
    return found + ([sorted(rest)] if rest else [])


def _is_scalar(program: Program, slot: Slot) -> bool:
    return _jax_compat.is_scalar(program.avals[slot])


def _earliest_times(
    program: Program, indices: Sequence[int], producer: Callable[[Slot], int | None]
) -> dict[int, int]:
    """When each equation can run. Array work has even times, pure scalar work odd ones."""
    times: dict[int, int] = {}
    for index in indices:
        op = program.ops[index]
        is_pure = all(_is_scalar(program, slot) for slot in (*op.reads(), *op.outs))
        time = -1 if is_pure else 0
        for slot in op.reads():
            source = producer(slot)
            if source in times:
                through_scalar = _is_scalar(program, slot)
                time = max(time, _next_time(times[source], is_pure, through_scalar))
        times[index] = time
    return times


def _delay(program: Program, times: dict[int, int], producer: Callable[[Slot], int | None]) -> None:
    """Moves array work to where it is read first, so that it joins the component that reads it."""
    latest: dict[int, int] = {}
    for index in sorted(times, reverse=True):
        if times[index] % 2 == 0 and index in latest:
            times[index] = max(times[index], latest[index])
        for slot in program.ops[index].reads():
            source = producer(slot)
            if source in times:
                limit = times[index] - _next_time(
                    0, times[index] % 2 == 1, _is_scalar(program, slot)
                )
                latest[source] = min(latest.get(source, limit), limit)


def _next_time(before: int, is_pure: bool, through_scalar: bool) -> int:
    """The earliest time of an equation that reads a value made at ``before``."""
    was_pure = before % 2 == 1
    if was_pure == is_pure:
        return before if is_pure or not through_scalar else before + 2
    return before + 1


def _components(program: Program, indices: Sequence[int]) -> list[Piece]:
    """Equations joined by the arrays that they make or read."""
    leader: dict[Hashable, Hashable] = {}

    def find(key: Hashable) -> Hashable:
        root = key
        while leader.setdefault(root, root) != root:
            root = leader[root]
        while leader[key] != root:
            leader[key], key = root, leader[key]
        return root

    for index in indices:
        for slot in _joining(program, program.ops[index]):
            leader[find(("slot", slot))] = find(("op", index))
    components: dict[Hashable, Piece] = collections.defaultdict(list)
    for index in indices:
        components[find(("op", index))].append(index)
    return list(components.values())


def _joining(program: Program, op: Op) -> Iterable[Slot]:
    return (slot for slot in (*op.reads(), *op.outs) if not _is_scalar(program, slot))


def _bundles(
    components: list[Piece], form: Callable[[Piece], Hashable]
) -> tuple[list[Piece], Piece]:
    """Equal bundles of components that repeat, and everything else as one piece."""
    kinds: dict[Hashable, list[Piece]] = collections.defaultdict(list)
    if len(components) > 1:
        for component in components:
            kinds[form(component)].append(component)
    count = _best_count([(len(kind), len(kind[0])) for kind in kinds.values()])
    if count == 1:
        return [], [i for component in components for i in component]
    bundles: list[Piece] = [[] for _ in range(count)]
    rest: Piece = []
    for kind in kinds.values():
        share = len(kind) // count
        for n, bundle in enumerate(bundles):
            bundle += [i for component in kind[n * share : (n + 1) * share] for i in component]
        rest += [i for component in kind[share * count :] for i in component]
    return [sorted(bundle) for bundle in bundles], rest


def _best_count(kinds: list[tuple[int, int]]) -> int:
    """How many bundles compile the fewest equations; ``kinds`` are (occurrences, size)."""

    def cost(count: int) -> int:
        compiled = sum((times // count + times % count) * size for times, size in kinds)
        return compiled + count * _CALL_COST

    candidates = {1, *(times for times, _ in kinds)}
    return min(sorted(candidates), key=cost)
