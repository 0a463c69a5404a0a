"""A region's body in normal form: what two calls must share to share an executable.

Left out, besides what ``_canonical`` leaves out: inputs that nothing reads, the order of inputs,
outputs that are inputs or come twice, and the nesting of plain calls. Scalar literals become
inputs, so layers that differ in a number only have one form; whoever compiles a body may put back
those that agree in every call. Hence a layer number that picks its weights from a list, or a name
that only chooses among equal code, does not make another body either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from . import _jax_compat
from ._canonical import Canonical, Canonicalizer

# Calls inside a body are opened up to this size: regions that call each other twice, level upon
# level, would else grow without bound.
_MAX_EQUATIONS = 10_000


@dataclasses.dataclass(frozen=True)
class Closed:
    """An array that the body closes over, as one of its sources."""

    variable: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class Body:
    """A body in normal form.

    Attributes:
      jaxpr: closed, without constants and scalar literals.
      form: its canonical form.
      sources: what to pass for each input: the number of an input of the original, a literal, or
        ``Closed``.
      results: what each output of the original is: ``("output", i)`` of ``jaxpr``, ``("input", i)``
        of the original, or ``("value", literal or Closed)``.
    """

    jaxpr: Any
    form: Canonical
    sources: tuple[Any, ...]
    results: tuple[tuple[str, Any], ...]


def normal_form(
    canonicalizer: Canonicalizer,
    jaxpr: Any,
    literal_inputs: Sequence[bool] = (),
    opens_calls: bool = True,
) -> Body:
    """The body of a closed jaxpr without effects.

    Args:
      canonicalizer: where forms are kept.
      jaxpr: the body as it was traced, or as a transformation made it.
      literal_inputs: inputs that the caller passes literals for, treated as literals of the body.
      opens_calls: whether plain calls are opened. What is to be differentiated still needs them.
    """
    opened, consts = _jax_compat.split_jaxpr(jaxpr)
    inputs = [_Input(v.aval, i) for i, v in enumerate(opened.invars)]
    for number, is_literal in zip(inputs, literal_inputs, strict=False):
        number.is_literal = is_literal
    expanded = _Expansion(opens_calls)
    outputs = expanded.run(opened, consts, inputs, None)
    results: list[tuple[str, Any]] = []
    made: dict[Any, int] = {}
    for atom in outputs:
        if isinstance(atom, _Input):
            results.append(
                ("input", atom.source) if isinstance(atom.source, int) else ("value", atom.source)
            )
        elif isinstance(atom, _jax_compat.Literal):
            results.append(("value", atom))
        else:
            results.append(("output", made.setdefault(atom, len(made))))
    eqns = _needed(expanded.eqns, made)
    eqns, invars, sources = _lifted(eqns)
    closed = _jax_compat.close_jaxpr(invars, list(made), eqns)
    return Body(closed, canonicalizer.jaxpr(closed), tuple(sources), tuple(results))


def with_literals(jaxpr: Any, literals: dict[int, Any]) -> Any:
    """A body's ``jaxpr`` with literals in the places of some of its inputs."""
    opened, _ = _jax_compat.split_jaxpr(jaxpr)
    env = {opened.invars[i]: literal for i, literal in literals.items()}
    invars = [v for v in opened.invars if v not in env]
    eqns = [
        eqn.replace(
            invars=[v if isinstance(v, _jax_compat.Literal) else env.get(v, v) for v in eqn.invars]
        )
        for eqn in opened.eqns
    ]
    return _jax_compat.close_jaxpr(invars, opened.outvars, eqns)


class _Input:
    """An input of the body on its way through: its type, and where it comes from."""

    __slots__ = ("aval", "is_literal", "source")

    def __init__(self, aval: Any, source: Any):
        self.aval = aval
        self.source = source
        self.is_literal = False


class _Expansion:
    """The equations of a jaxpr with plain calls opened, over inputs, fresh variables, literals."""

    def __init__(self, opens_calls: bool) -> None:
        self._opens_calls = opens_calls
        self.eqns: list[tuple[Any, list[Any], list[Any]]] = []
        self._sizes: dict[int, int] = {}
        self._closed: dict[int, _Input] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], atoms: Sequence[Any], outer: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            source = _Input(variable.aval, Closed(variable, value))
            env[variable] = self._closed.setdefault(id(value), source)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, _jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            scoped = eqn if outer is None else _jax_compat.within_scope(eqn, outer)
            inner = _jax_compat.inlinable_jaxpr(eqn) if self._opens_calls else None
            if inner is not None and self._size(inner) <= _MAX_EQUATIONS:
                outs = self.run(*_jax_compat.split_jaxpr(inner), ins, scoped)
            else:
                outs = [_jax_compat.Var(v.aval) for v in eqn.outvars]
                self.eqns.append((scoped, ins, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _size(self, jaxpr: Any) -> int:
        if id(jaxpr) not in self._sizes:
            inner = map(_jax_compat.inlinable_jaxpr, _jax_compat.split_jaxpr(jaxpr)[0].eqns)
            self._sizes[id(jaxpr)] = sum(1 if j is None else self._size(j) for j in inner)
        return self._sizes[id(jaxpr)]


def _needed(eqns: list[Any], outputs: Any) -> list[Any]:
    """The equations that the outputs depend on."""
    needed = set(outputs)
    kept = []
    for eqn, ins, outs in reversed(eqns):
        if not needed.isdisjoint(outs):
            needed.update(a for a in ins if isinstance(a, _jax_compat.Var))
            kept.append((eqn, ins, outs))
    return kept[::-1]


def _lifted(eqns: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Equations over variables only, and the inputs in the order of their first use."""
    invars: list[Any] = []
    sources: list[Any] = []
    variables: dict[_Input, Any] = {}

    def new_input(aval: Any, source: Any) -> Any:
        invars.append(_jax_compat.Var(aval))
        sources.append(source)
        return invars[-1]

    def variable(atom: Any) -> Any:
        if isinstance(atom, _jax_compat.Literal):
            return new_input(atom.aval, atom) if _jax_compat.is_scalar(atom.aval) else atom
        if not isinstance(atom, _Input):
            return atom
        if atom.is_literal:  # one input for each use, as for a literal written in the body
            return new_input(atom.aval, atom.source)
        if atom not in variables:
            variables[atom] = new_input(atom.aval, atom.source)
        return variables[atom]

    lifted = [eqn.replace(invars=list(map(variable, ins)), outvars=outs) for eqn, ins, outs in eqns]
    return lifted, invars, sources
