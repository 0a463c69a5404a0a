"""The step as one flat list of equations in which every region's call shows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .. import _jax_compat
from .._bodies import Body, Closed, normal_form, with_literals
from .._canonical import Canonical, Canonicalizer
from .ends import share_ends
from .ops import Atom, Op, Program, Slot, region_key

RegionOptions = Callable[[Any], "Hashable | None"]


def flatten(jaxpr: Any, consts: Sequence[Any], region_options: RegionOptions) -> Program:
    """Opens every plain call around a region, and every region that is called only once.

    A region's call that stays is a unit, whatever is inside. One that occurs once would only
    cost a dispatch, so it goes with its surroundings, unless it has XLA options of its own; regions
    inside it may then show.

    Args:
      jaxpr: the step's open jaxpr.
      consts: the values of its constant variables.
      region_options: of an equation, None if it is no region's call, else its XLA options.
    """
    canonicalizer = Canonicalizer()
    bodies: dict[Hashable, tuple[Any, Body]] = {}
    single: set[Canonical | None] = set()
    while True:
        flattener = _Flattener(canonicalizer, region_options, bodies, single)
        program = share_ends(_without_dead(flattener.program(jaxpr, consts)))
        calls = [op for op in program.ops if op.region is not None]
        uses = collections.Counter(op.region for op in calls)
        once = {op.region for op in calls if uses[op.region] == 1 and not op.options}
        if not once:
            return _without_dead(_without_repeated_scalars(_with_settled_literals(program)))
        single |= once


class _Flattener:
    """One pass over the step's jaxpr, and the calls inside it that are opened."""

    def __init__(
        self,
        canonicalizer: Canonicalizer,
        region_options: RegionOptions,
        bodies: dict[Hashable, tuple[Any, Body]],
        single: set[Canonical | None],
    ):
        self._canonicalizer = canonicalizer
        self._region_options = region_options
        self._bodies = bodies
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

    def _run(self, jaxpr: Any, env: dict[Any, Atom]) -> list[Atom]:
        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, _jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = tuple(map(read, eqn.invars))
            region = self._region(eqn, ins)
            if region is not None:
                outs = self._call(eqn, *region, ins)
            elif self._should_open(eqn):
                outs = self._open(_jax_compat.called_jaxpr(eqn), ins)
            else:
                outs = [self._new_slot(v.aval) for v in eqn.outvars]
                self._ops.append(Op(eqn, ins, tuple(outs)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _call(self, eqn: Any, body: Body, options: Hashable, ins: Sequence[Atom]) -> list[Atom]:
        """Adds the call of a region, if it computes anything; returns its outputs."""

        def atom(source: Any) -> Atom:
            if isinstance(source, int):
                return ins[source]
            if isinstance(source, Closed):
                return self._constant(source.variable, source.value)
            return source

        made = [self._new_slot(aval) for aval in _jax_compat.output_avals(body.jaxpr)]
        if made:
            given = tuple(map(atom, body.sources))
            key = region_key(body.form, options)
            self._ops.append(Op(eqn, given, tuple(made), key, body.jaxpr, options))
        return [made[which] if kind == "output" else atom(which) for kind, which in body.results]

    def _region(self, eqn: Any, ins: Sequence[Atom]) -> tuple[Body, Hashable] | None:
        """The body and XLA options of a region's call that stays, else None."""
        options = self._region_options(eqn)
        if options is None or not _jax_compat.is_plain_call(eqn):
            return None
        literal_inputs = tuple(not isinstance(atom, int) for atom in ins)
        jaxpr = eqn.params["jaxpr"]
        key = (id(jaxpr), literal_inputs)
        if key not in self._bodies:  # with the jaxpr, so that its id stays taken
            body = normal_form(self._canonicalizer, jaxpr, literal_inputs)
            self._bodies[key] = (jaxpr, body)
        body = self._bodies[key][1]
        return None if region_key(body.form, options) in self._single else (body, options)

    def _should_open(self, eqn: Any) -> bool:
        if not _jax_compat.is_plain_call(eqn):
            return False
        # A jitted function of a whole tree (optax's bias correction) would tie all layers together.
        is_of_many = _jax_compat.is_jit(eqn) and len(eqn.outvars) > 1
        is_region = self._region_options(eqn) is not None
        return (is_of_many and not is_region) or self._holds(_jax_compat.called_jaxpr(eqn))

    def _holds(self, jaxpr: Any) -> bool:
        """Whether a region's call shows once the plain calls in ``jaxpr`` are opened."""
        if id(jaxpr) not in self._holds_region:
            self._holds_region[id(jaxpr)] = any(
                self._region(eqn, eqn.invars) is not None or self._should_open(eqn)
                for eqn in _jax_compat.split_jaxpr(jaxpr)[0].eqns
            )
        return self._holds_region[id(jaxpr)]

    def _open(self, jaxpr: Any, ins: Sequence[Atom]) -> list[Atom]:
        opened, consts = _jax_compat.split_jaxpr(jaxpr)
        env = dict(zip(opened.invars, ins, strict=True))
        env.update(
            zip(opened.constvars, map(self._constant, opened.constvars, consts), strict=True)
        )
        return self._run(opened, env)


def _with_settled_literals(program: Program) -> Program:
    """Literals that agree in all calls of a body go back into it; the others become constants."""
    calls: dict[Any, list[Op]] = collections.defaultdict(list)
    for op in program.ops:
        if op.region is not None:
            calls[op.region].append(op)
    settled = {form: _settled(program, ops) for form, ops in calls.items()}
    slots: dict[Hashable, Slot] = {}

    def slot(atom: Atom) -> Slot:
        if isinstance(atom, int):
            return atom
        key = program.canonicalizer.literal(atom)
        if key not in slots:
            slots[key] = program.new_slot(atom.aval)
            program.constants[slots[key]] = atom.val
        return slots[key]

    def rewritten(op: Op) -> Op:
        if op.region is None:
            return op
        body, form, kept = settled[op.region]
        ins = tuple(slot(atom) for i, atom in enumerate(op.ins) if i not in kept)
        return dataclasses.replace(op, ins=ins, region=form, body=body)

    return dataclasses.replace(program, ops=list(map(rewritten, program.ops)))


def _settled(program: Program, ops: list[Op]) -> tuple[Any, Canonical, dict[int, Any]]:
    """The body of these calls, its form, and the literals that are part of it, by position."""
    first, kept = ops[0], {}
    for i, atom in enumerate(first.ins):
        if not isinstance(atom, int):
            value = program.canonicalizer.literal(atom)
            others = (op.ins[i] for op in ops)
            if all(
                not isinstance(a, int) and program.canonicalizer.literal(a) == value for a in others
            ):
                kept[i] = atom
    body = with_literals(first.body, kept)
    return body, region_key(program.canonicalizer.jaxpr(body), first.options), kept


def _without_repeated_scalars(program: Program) -> Program:
    """Computes each scalar once: optimizers cast the same learning rate for every leaf."""
    same: dict[Slot, Slot] = {}
    known: dict[Hashable, tuple[Slot, ...]] = {}
    kept: list[Op] = []
    for op in program.ops:
        ins = tuple(same.get(a, a) if isinstance(a, int) else a for a in op.ins)
        op = dataclasses.replace(op, ins=ins)
        if op.region is None and all(program.avals[slot].shape == () for slot in op.outs):
            first = known.setdefault(program.canonicalizer.operation(op.eqn, ins), op.outs)
            if first is not op.outs:
                same.update(zip(op.outs, first, strict=True))
                continue
        kept.append(op)
    outputs = [same.get(a, a) if isinstance(a, int) else a for a in program.outputs]
    return dataclasses.replace(program, ops=kept, outputs=outputs)


def _without_dead(program: Program) -> Program:
    """Drops what no output needs; the flat program has no effects."""
    live = {atom for atom in program.outputs if isinstance(atom, int)}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if live.intersection(op.outs):
            live.update(op.reads())
            kept.append(op)
    return dataclasses.replace(program, ops=kept[::-1])
