"""The flat program cut into parts: each region's call is one, and what lies between is glue.

Every value gets a level: the number of region calls on the longest way to it. The glue of one level
runs together, after the regions of the level below and before those of its own, so nothing waits
for what it does not need to, and what follows each of N layers is N equal parts. Within a level,
glue that shares no array is cut apart where that yields equal pieces (an optimizer's update of each
layer), and pieces that always come together are one part again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from .. import _jax_compat
from .._canonical import Canonical
from .glue import pieces
from .ops import Atom, Op, Program, Slot


@dataclasses.dataclass(frozen=True)
class Part:
    """One call of one executable-to-be.

    Attributes:
      kind: ``"region"`` or ``"glue"``.
      name: for profiles and reports.
      ops: what it computes, in order.
      ins: slots it reads.
      outs: slots or literals it returns, each into the slot of ``targets`` at the same position.
      form: canonical form; equal forms can share an executable.
      options: XLA options of its own, as a tuple of pairs.
    """

    kind: str
    name: str
    ops: tuple[Op, ...]
    ins: tuple[Slot, ...]
    outs: tuple[Atom, ...]
    targets: tuple[Slot, ...]
    form: Canonical
    options: Hashable = ()

    def jaxpr(self, program: Program) -> Any:
        """The closed jaxpr of this part."""
        if self.kind == "region":
            return self.ops[0].body
        invars = [_jax_compat.Var(program.avals[slot]) for slot in self.ins]
        variables = dict(zip(self.ins, invars, strict=True))

        def variable_list(atoms: Iterable[Atom]) -> list[Any]:
            return [variables[atom] if isinstance(atom, int) else atom for atom in atoms]

        eqns = []
        for op in self.ops:
            ins = variable_list(op.ins)
            variables.update({slot: _jax_compat.Var(program.avals[slot]) for slot in op.outs})
            eqns.append(op.eqn.replace(invars=ins, outvars=variable_list(op.outs)))
        return _jax_compat.close_jaxpr(invars, variable_list(self.outs), eqns)


def partition(program: Program, region_name: Any) -> tuple[list[Part], list[Slot]]:
    """The parts of ``program`` in an order of execution, and the slots of its outputs.

    Args:
      program: flat, from ``flatten``.
      region_name: gives the name of a region's call from its equation.
    """
    return _Partitioner(program, region_name).parts()


class _Partitioner:
    def __init__(self, program: Program, region_name: Any):
        self._program = program
        self._region_name = region_name
        self._producer: dict[Slot, int] = {}
        self._free: set[int] = set()  # needs no input; made by each part that reads it
        self._readers: dict[Slot, list[int]] = {}
        self._returned = {atom for atom in program.outputs if isinstance(atom, int)}
        for index, op in enumerate(program.ops):
            self._producer.update(dict.fromkeys(op.outs, index))
            for slot in op.reads():
                self._readers.setdefault(slot, []).append(index)

    def parts(self) -> tuple[list[Part], list[Slot]]:
        glue, regions = self._by_level()
        parts: list[Part] = []
        for level in sorted(glue.keys() | regions.keys()):
            for piece in self._pieces(glue.get(level, [])):
                parts.append(self._glue_part(piece))
            parts += [self._region_part(self._program.ops[i]) for i in regions.get(level, [])]
        last, outputs = self._returned_copies()
        return parts + last, outputs

    def _by_level(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Glue and region calls of each level, by position in the program.

        What needs no input (a constant, an iota) is not placed: each part that reads it makes it.
        """
        levels = self._earliest_levels()
        self._sink_what_needs_arguments_only(levels)
        glue: dict[int, list[int]] = {}
        regions: dict[int, list[int]] = {}
        for index, op in enumerate(self._program.ops):
            if op.region is not None:
                regions.setdefault(levels[index], []).append(index)
            elif index not in self._free or self._is_read_by_region_or_returned(op):
                glue.setdefault(levels[index], []).append(index)
        return glue, regions

    def _earliest_levels(self) -> list[int]:
        """The level of each equation: that of its latest input, plus one for a region's output."""
        levels: list[int] = []
        for index, op in enumerate(self._program.ops):
            sources = [self._producer.get(slot) for slot in op.reads()]
            made = [i for i in sources if i is not None]
            levels.append(
                max(
                    (levels[i] + (self._program.ops[i].region is not None) for i in made), default=0
                )
            )
            if op.region is None and all(i in self._free for i in sources):
                self._free.add(index)
        return levels

    def _sink_what_needs_arguments_only(self, levels: list[int]) -> None:
        """Moves what could run first to where it is needed first.

        A decayed moment or a cast weight computed at the start would stay alive until its layer's
        turn; its argument is alive anyway.
        """
        needs_region = [False] * len(levels)
        for index, op in enumerate(self._program.ops):
            sources = [self._producer.get(slot) for slot in op.reads()]
            needs_region[index] = op.region is not None or any(
                needs_region[i] for i in sources if i is not None
            )
        last = max(levels, default=0)
        for index in reversed(range(len(levels))):
            op = self._program.ops[index]
            readers = [i for slot in op.outs for i in self._readers.get(slot, ())]
            if not needs_region[index]:
                # An output of arguments only comes last, when it can take their buffers over.
                levels[index] = min((levels[i] for i in readers), default=last + 1)

    def _is_read_by_region_or_returned(self, op: Op) -> bool:
        return any(
            slot in self._returned
            or any(self._program.ops[i].region is not None for i in self._readers.get(slot, ()))
            for slot in op.outs
        )

    def _pieces(self, indices: Sequence[int]) -> list[list[int]]:
        inside = set(indices)

        def producer(slot: Slot) -> int | None:
            index = self._producer.get(slot)
            return index if index in inside else None

        return pieces(self._program, indices, producer, lambda piece: self._glue_part(piece).form)

    def _glue_part(self, indices: Sequence[int]) -> Part:
        ops = [self._program.ops[i] for i in self._with_free(indices)]
        made = [slot for op in ops for slot in op.outs]
        own = set(made)
        inside = set(indices)
        ins = dict.fromkeys(slot for op in ops for slot in op.reads() if slot not in own)
        outs = [
            slot
            for i in indices
            for slot in self._program.ops[i].outs
            if slot in self._returned or not inside.issuperset(self._readers.get(slot, ()))
        ]
        return self._glue("glue", ops, tuple(ins), outs, outs)

    def _with_free(self, indices: Sequence[int]) -> list[int]:
        """``indices`` and the unplaced equations they need, in the program's order."""
        needed = set(indices)
        stack = list(indices)
        while stack:
            for slot in self._program.ops[stack.pop()].reads():
                producer = self._producer.get(slot)
                if producer in self._free and producer not in needed:
                    needed.add(producer)
                    stack.append(producer)
        return sorted(needed)

    def _region_part(self, op: Op) -> Part:
        name = self._region_name(op.eqn)
        avals = tuple(self._program.avals[slot] for slot in op.ins)
        form = Canonical(("region", op.region, avals))
        return Part("region", name, (op,), op.ins, op.outs, op.outs, form, op.options)

    def _returned_copies(self) -> tuple[list[Part], list[Slot]]:
        """A part that copies what is returned as it came in, and the slots of all outputs.

        An argument, a constant, a literal, and a value returned twice: as under ``jax.jit``, each
        output is an array of its own, so that donating one later leaves the others alone.
        """
        sources: list[Atom] = []
        targets: list[Slot] = []
        outputs: list[Slot] = []
        seen: set[Slot] = set()
        for atom in self._program.outputs:
            if isinstance(atom, int) and atom in self._producer and atom not in seen:
                seen.add(atom)
                outputs.append(atom)
                continue
            aval = self._program.avals[atom] if isinstance(atom, int) else atom.aval
            sources.append(atom)
            targets.append(self._program.new_slot(aval))
            outputs.append(targets[-1])
        if not sources:
            return [], outputs
        ins = tuple(dict.fromkeys(atom for atom in sources if isinstance(atom, int)))
        return [self._glue("outputs", [], ins, sources, targets)], outputs

    def _glue(
        self,
        name: str,
        ops: Sequence[Op],
        ins: tuple[Slot, ...],
        outs: Sequence[Atom],
        targets: Sequence[Slot],
    ) -> Part:
        form = self._program.canonicalizer.equations(
            ((op.eqn, op.ins, op.outs) for op in ops),
            [(slot, self._program.avals[slot]) for slot in ins],
            outs,
        )
        return Part("glue", name, tuple(ops), ins, tuple(outs), tuple(targets), form)
