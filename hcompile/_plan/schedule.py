"""The flat list of steps that a call runs: when buffers die, who takes them over, and the loop."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any

from .._canonical import Canonical
from .ops import Program, Slot
from .partition import Part


class Liveness:
    """When each slot is read for the last time, and which inputs of each part may be donated."""

    def __init__(
        self,
        program: Program,
        parts: Sequence[Part],
        outputs: Sequence[Slot],
        donated_inputs: Sequence[bool],
    ):
        self._program = program
        self._last_read = {slot: i for i, part in enumerate(parts) for slot in part.ins}
        self._last_read.update(dict.fromkeys(outputs, len(parts)))
        # What the schedule does not own: the caller's arguments and closed-over constants.
        self._lent = {slot for slot in range(program.num_inputs) if not donated_inputs[slot]}
        self._lent |= program.constants.keys()

    def dying(self, index: int, part: Part) -> list[Slot]:
        """Slots that nothing reads after part number ``index``."""
        mine = dict.fromkeys((*part.ins, *part.targets))
        return [slot for slot in mine if self._last_read.get(slot, -1) <= index]

    def donations(self, parts: Sequence[Part]) -> dict[Canonical, tuple[int, ...]]:
        """For each form, the positions of inputs that every one of its calls can give away.

        Equal parts share one executable, so one mask has to fit them all; and only what an output
        of the same type can take is donated.
        """
        common: dict[Canonical, set[int]] = {}
        for index, part in enumerate(parts):
            free = set(self.dying(index, part)) - self._lent
            mine = {i for i, s in enumerate(part.ins) if s in free and part.ins.count(s) == 1}
            common[part.form] = common.get(part.form, mine) & mine
        first = {part.form: part for part in reversed(parts)}
        return {form: self._usable(first[form], free) for form, free in common.items()}

    def _usable(self, part: Part, free: set[int]) -> tuple[int, ...]:
        wanted = collections.Counter(map(self._buffer_type, part.targets))
        chosen = []
        # What the caller donated comes first: parameters are to be updated in place.
        for i in sorted(free, key=lambda i: (part.ins[i] >= self._program.num_inputs, i)):
            kind = self._buffer_type(part.ins[i])
            if wanted[kind] > 0:
                wanted[kind] -= 1
                chosen.append(i)
        return tuple(sorted(chosen))

    def _buffer_type(self, slot: Slot) -> tuple[Any, ...]:
        aval = self._program.avals[slot]
        return (aval.shape, aval.dtype)


class Step:
    """One executable's call: how to pick its arguments, and what to forget after it."""

    __slots__ = ("call", "dead", "pick")

    def __init__(self, call: Callable[..., Sequence[Any]], ins: Sequence[int], dead: Sequence[int]):
        self.call = call
        self.pick = _picker(ins)
        self.dead = tuple(dead)


def _picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    if not indices:
        return lambda _: ()
    if len(indices) == 1:
        index = indices[0]
        return lambda values: (values[index],)
    return operator.itemgetter(*indices)  # in C, unlike a comprehension


class Schedule:
    """Runs the parts of a program on flat arrays.

    The values live in one list: arguments, constants, then the outputs of each step as it ends.
    """

    def __init__(
        self,
        program: Program,
        parts: Sequence[Part],
        calls: Sequence[Callable[..., Sequence[Any]]],
        outputs: Sequence[Slot],
        liveness: Liveness,
        constants: Sequence[Any],
    ):
        slots = [*range(program.num_inputs), *program.constants]
        slots += [slot for part in parts for slot in part.targets]
        place = {slot: i for i, slot in enumerate(slots)}
        self._constants = list(constants)
        self._steps = [
            Step(
                call,
                [place[slot] for slot in part.ins],
                [place[slot] for slot in liveness.dying(index, part)],
            )
            for index, (part, call) in enumerate(zip(parts, calls, strict=True))
        ]
        self._outputs = _picker([place[slot] for slot in outputs])

    def run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The program's flat outputs for its flat inputs."""
        values = [*arrays, *self._constants]
        for step in self._steps:
            values += step.call(*step.pick(values))
            for index in step.dead:
                values[index] = None
        return self._outputs(values)

    def __len__(self) -> int:
        return len(self._steps)
