"""The ends of a stack: a layer whose body is an inner layer's with some outputs left out.

The first layer's input is not differentiated, so its backward body lacks one cotangent; a last
layer may lack a result. Running the inner layers' executable and ignoring the surplus costs a
fraction of one layer a step; an executable of its own would cost a whole compile. Inputs that
only the surplus needs can hold anything.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _jax_compat
from .ops import Op, Program, Slot

_MAX_TRIES = 64


def share_ends(program: Program) -> Program:
    """Makes each region call that occurs once, and is part of another, a call of that other."""
    uses = collections.Counter(op.region for op in program.ops)
    models = {op.region: op for op in program.ops if op.region is not None}
    ops = [
        _adopted(program, op, list(models.values()))
        if op.region is not None and uses[op.region] == 1
        else op
        for op in program.ops
    ]
    return dataclasses.replace(program, ops=ops)


def _adopted(program: Program, op: Op, models: list[Op]) -> Op:
    """``op`` as a call of the first of ``models`` that computes all it computes, or as it is."""
    wanted = None
    for model in models:
        if model.eqn.params["name"] != op.eqn.params["name"] or len(model.outs) <= len(op.outs):
            continue
        wanted = wanted or _live(program, op, [True] * len(op.outs))
        for used_outputs in _masks(program, model, op):
            form, used_inputs = _live(program, model, used_outputs)
            if form == wanted[0]:
                ins = list(itertools.compress(op.ins, wanted[1]))
                return _as_call_of(program, model, ins, used_inputs, op.outs, used_outputs)
    return op


def _masks(program: Program, model: Op, op: Op) -> Iterator[list[bool]]:
    """Choices of ``model``'s outputs, in order, with the types of ``op``'s."""
    have = [program.avals[slot] for slot in model.outs]
    want = [program.avals[slot] for slot in op.outs]
    choices = itertools.combinations(range(len(have)), len(want))
    for chosen in itertools.islice(choices, _MAX_TRIES):
        if [have[i] for i in chosen] == want:
            yield [i in chosen for i in range(len(have))]


def _live(program: Program, op: Op, used_outputs: list[bool]) -> tuple[Any, list[bool]]:
    """The canonical form of what these outputs need of a region, and the inputs that is."""
    live, used_inputs = _jax_compat.live_part(op.eqn.params["jaxpr"], used_outputs)
    return program.canonicalizer.jaxpr(live), used_inputs


def _as_call_of(
    program: Program,
    model: Op,
    ins: list[Slot],
    used_inputs: list[bool],
    outs: Sequence[Slot],
    used_outputs: list[bool],
) -> Op:
    given, wanted = iter(ins), iter(outs)
    all_ins = [
        next(given) if used else _stand_in(program, slot)
        for slot, used in zip(model.ins, used_inputs, strict=True)
    ]
    all_outs = [
        next(wanted) if used else program.new_slot(program.avals[slot])
        for slot, used in zip(model.outs, used_outputs, strict=True)
    ]
    return Op(model.eqn, tuple(all_ins), tuple(all_outs), model.region)


def _stand_in(program: Program, slot: Slot) -> Slot:
    """Something of the type of ``slot`` for an input that only the surplus outputs read.

    An argument of the step costs nothing; failing that, zeros are kept beside the executables.
    """
    aval = program.avals[slot]
    for candidate in (*range(program.num_inputs), *program.constants):
        if program.avals[candidate] == aval:
            return candidate
    made = program.new_slot(aval)
    program.constants[made] = _jax_compat.zeros(aval)
    return made
