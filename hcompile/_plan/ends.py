"""The ends of a stack: a layer whose body is an inner layer's with some outputs left out.

The first layer's input is not differentiated, so its backward body lacks one cotangent; a last
layer may lack a result. Running the inner layers' executable and ignoring the surplus costs a
fraction of one layer a step; an executable of its own would cost a whole compile.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from .. import _jax_compat
from .ops import Op, Program

_MAX_TRIES = 64


def share_ends(program: Program) -> Program:
    """``program`` with every region call that occurs once, and is part of another, made that one."""
    uses = collections.Counter(op.region for op in program.ops if op.region is not None)
    models = {op.region: op for op in program.ops if uses[op.region] > 1}
    ops = [
        _adopted(program, op, list(models.values())) if uses[op.region] == 1 else op
        for op in program.ops
    ]
    return dataclasses.replace(program, ops=ops)


def _adopted(program: Program, op: Op, models: list[Op]) -> Op:
    if op.region is None:
        return op
    wanted = None
    for model in models:
        if not _could_contain(program, model, op):
            continue
        wanted = wanted or _live_form(program, op, [True] * len(op.outs))
        for used in _masks(program, model, op):
            if _live_form(program, model, used) == wanted:
                return _as_call_of(program, model, op, used)
    return op


def _could_contain(program: Program, model: Op, op: Op) -> bool:
    return (
        model.eqn.params["name"] == op.eqn.params["name"]
        and len(model.outs) > len(op.outs)
        and [program.avals[s] for s in model.ins] == [program.avals[s] for s in op.ins]
    )


def _masks(program: Program, model: Op, op: Op) -> Iterator[list[bool]]:
    """Choices of ``model``'s outputs, in order, with the types of ``op``'s."""
    have = [program.avals[slot] for slot in model.outs]
    want = [program.avals[slot] for slot in op.outs]
    choices = itertools.combinations(range(len(have)), len(want))
    for chosen in itertools.islice(choices, _MAX_TRIES):
        if [have[i] for i in chosen] == want:
            yield [i in chosen for i in range(len(have))]


def _live_form(program: Program, op: Op, used: list[bool]) -> Any:
    live = _jax_compat.live_part(op.eqn.params["jaxpr"], used)
    return program.canonicalizer.jaxpr(live)


def _as_call_of(program: Program, model: Op, op: Op, used: list[bool]) -> Op:
    remaining = iter(op.outs)
    outs = []
    for slot, is_used in zip(model.outs, used, strict=True):
        if is_used:
            outs.append(next(remaining))
        else:
            program.avals.append(program.avals[slot])
            outs.append(len(program.avals) - 1)
    return Op(model.eqn, op.ins, tuple(outs), model.region)
