"""The step as one flat list of equations in which every region's call shows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax_compat
from .._canonical import Canonical, Canonicalizer

Slot = int
Atom = Any  # a Slot or a jaxpr Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """An equation whose variables are slots of the whole program.

    Attributes:
      region: the canonical form of the body if this is a region's call, else None.
    """

    eqn: Any
    ins: tuple[Atom, ...]
    outs: tuple[Slot, ...]
    region: Canonical | None

    def reads(self) -> list[Slot]:
        return [atom for atom in self.ins if isinstance(atom, int)]


@dataclasses.dataclass
class Program:
    """A flat program.

    Attributes:
      num_inputs: slots ``0 .. num_inputs - 1`` are the step's array arguments.
      constants: values of the slots that hold closed-over arrays.
      ops: in an order of execution.
      outputs: slots or literals.
      avals: the type of each slot.
      canonicalizer: knows the forms of the jaxprs in it.
    """

    num_inputs: int
    constants: dict[Slot, Any]
    ops: list[Op]
    outputs: list[Atom]
    avals: list[Any]
    canonicalizer: Canonicalizer


def flatten(jaxpr: Any, consts: Sequence[Any], is_region: Callable[[Any], bool]) -> Program:
    """Opens every plain call around a region, and every region that is called only once.

    A region's call that stays is a unit, whatever is inside. One that occurs once would only
    cost a dispatch, so it goes with its surroundings; regions inside it may then show.

    Args:
      jaxpr: the step's open jaxpr.
      consts: the values of its constant variables.
      is_region: tells a region's call from another equation.
    """
    canonicalizer = Canonicalizer()
    single: set[Canonical] = set()
    while True:
        flattener = _Flattener(canonicalizer, is_region, single)
        program = flattener.program(jaxpr, consts)
        uses = collections.Counter(op.region for op in program.ops if op.region is not None)
        once = {form for form, count in uses.items() if count == 1}
        if not once:
            return _without_dead(program)
        single |= once


class _Flattener:
    """One pass over the step's jaxpr, and the calls inside it that are opened."""

    def __init__(
        self,
        canonicalizer: Canonicalizer,
        is_region: Callable[[Any], bool],
        single: set[Canonical],
    ):
        self._canonicalizer = canonicalizer
        self._is_region = is_region
        self._single = single
        self._holds_region: dict[int, bool] = {}
        self._ops: list[Op] = []
        self._avals: list[Any] = []
        self._constants: dict[int, tuple[Any, Slot]] = {}

    def program(self, jaxpr: Any, consts: Sequence[Any]) -> Program:
        inputs = [self._new_slot(v.aval) for v in jaxpr.invars]
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update(zip(jaxpr.constvars, map(self._constant, jaxpr.constvars, consts), strict=True))
        outputs = self._run(jaxpr, env)
        values = {slot: value for value, slot in self._constants.values()}
        return Program(len(inputs), values, self._ops, outputs, self._avals, self._canonicalizer)

    def _constant(self, variable: Any, value: Any) -> Slot:
        """The slot of a closed-over array: one, however often the jaxpr that holds it is opened."""
        if id(value) not in self._constants:
            self._constants[id(value)] = (value, self._new_slot(variable.aval))
        return self._constants[id(value)][1]

    def _new_slot(self, aval: Any) -> Slot:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _as_slot(self, atom: Atom) -> Slot:
        return atom if isinstance(atom, int) else self._constant(atom, atom.val)

    def _run(self, jaxpr: Any, env: dict[Any, Atom]) -> list[Atom]:
        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, _jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = tuple(map(read, eqn.invars))
            form = self._region_form(eqn)
            if form is None and self._should_open(eqn):
                outs = self._open(_jax_compat.called_jaxpr(eqn), ins)
            else:
                outs = [self._new_slot(v.aval) for v in eqn.outvars]
                if form is not None:  # a number among the arguments should not split the body
                    ins = tuple(map(self._as_slot, ins))
                self._ops.append(Op(eqn, ins, tuple(outs), form))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _region_form(self, eqn: Any) -> Canonical | None:
        if not (self._is_region(eqn) and _jax_compat.is_plain_call(eqn)):
            return None
        form = self._canonicalizer.jaxpr(eqn.params["jaxpr"])
        return None if form in self._single else form

    def _should_open(self, eqn: Any) -> bool:
        return _jax_compat.is_plain_call(eqn) and self._holds(_jax_compat.called_jaxpr(eqn))

    def _holds(self, jaxpr: Any) -> bool:
        """Whether a region's call shows once the plain calls in ``jaxpr`` are opened."""
        if id(jaxpr) not in self._holds_region:
            self._holds_region[id(jaxpr)] = any(
                self._region_form(eqn) is not None or self._should_open(eqn)
                for eqn in _jax_compat.split_jaxpr(jaxpr)[0].eqns
            )
        return self._holds_region[id(jaxpr)]

    def _open(self, jaxpr: Any, ins: Sequence[Atom]) -> list[Atom]:
        opened, consts = _jax_compat.split_jaxpr(jaxpr)
        env = dict(zip(opened.invars, ins, strict=True))
        env.update(zip(opened.constvars, map(self._constant, opened.constvars, consts), strict=True))
        return self._run(opened, env)


def _without_dead(program: Program) -> Program:
    """Drops what no output needs; the flat program has no effects."""
    live = {atom for atom in program.outputs if isinstance(atom, int)}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if live.intersection(op.outs):
            live.update(op.reads())
            kept.append(op)
    return dataclasses.replace(program, ops=kept[::-1])
