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

from .. import _jax_compat
from .._bodies import normal_form
from .ops import Atom, Op, Program, Slot, region_key

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
    for model in models:
        if model.eqn.params["name"] != op.eqn.params["name"] or len(model.outs) <= len(op.outs):
            continue
        for used_outputs in _masks(program, model, op):
            live, used_inputs = _jax_compat.live_part(model.body, used_outputs)
            body = normal_form(program.canonicalizer, live)
            if region_key(body.form, model.options) == op.region:
                inputs = [i for i, is_used in enumerate(used_inputs) if is_used]
                given = dict(zip((inputs[i] for i in body.sources), op.ins, strict=True))
                return _as_call_of(program, model, given, op.outs, used_outputs)
    return op


def _masks(program: Program, model: Op, op: Op) -> Iterator[list[bool]]:
    """Choices of ``model``'s outputs, in order, with the types of ``op``'s."""
    have = [program.avals[slot] for slot in model.outs]
    want = [program.avals[slot] for slot in op.outs]
    choices = itertools.combinations(range(len(have)), len(want))
    for chosen in itertools.islice(choices, _MAX_TRIES):
        if [have[i] for i in chosen] == want:
            yield [i in chosen for i in range(len(have))]


def _as_call_of(
    program: Program,
    model: Op,
    given: dict[int, Atom],
    outs: Sequence[Slot],
    used_outputs: list[bool],
) -> Op:
    wanted = iter(outs)
    all_ins = [
        given[i] if i in given else _stand_in(program, atom) for i, atom in enumerate(model.ins)
    ]
    all_outs = [
        next(wanted) if used else program.new_slot(program.avals[slot])
        for slot, used in zip(model.outs, used_outputs, strict=True)
    ]
    return dataclasses.replace(model, ins=tuple(all_ins), outs=tuple(all_outs))


def _stand_in(program: Program, slot: Atom) -> Atom:
    """Something of the type of ``slot`` (or the same literal), which only the surplus reads.

    An argument of the step costs nothing; failing that, zeros are kept beside the executables.
    """
    if not isinstance(slot, int):
        return slot
    aval = program.avals[slot]
    for candidate in (*range(program.num_inputs), *program.constants):
        if program.avals[candidate] == aval:
            return candidate
    made = program.new_slot(aval)
    program.constants[made] = _jax_compat.zeros(aval)
    return made
