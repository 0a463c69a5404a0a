"""A jaxpr without its accidents: what its compiled program depends on, as one hashable value.

Left out: variable names and numbering, names of jitted functions, source lines and name stacks,
differentiation rules, and which Python object the jaxpr is. Two programs with equal canonical
forms, input types, devices and options compile to the same executable.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from . import _jax_compat
from ._fingerprint import Same, constant

# Larger constants inside a jaxpr are compared by identity: reading them costs more than it saves.
_MAX_CONTENT_ELEMENTS = 1 << 16


class Canonical:
    """A canonical form: a nested tuple whose hash is computed once."""

    __slots__ = ("_hash", "form")

    def __init__(self, form: Hashable):
        self.form = form
        self._hash = hash(form)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Canonical) and self._hash == other._hash and self.form == other.form
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Canonical({self._hash & 0xFFFFFFFF:08x})"


class Canonicalizer:
    """Canonical forms for the jaxprs of one program; a shared jaxpr object is read once.

    With ``keep_rules`` the differentiation rules and policies in it are part of the form, by
    identity: equal forms then also differentiate alike.
    """

    def __init__(self, keep_rules: bool = False) -> None:
        self._keep_rules = keep_rules
        # By identity; the object is kept, so that its id stays taken.
        self._known: dict[int, tuple[Any, Canonical]] = {}
        self._operations: dict[int, tuple[Any, Canonical]] = {}

    def jaxpr(self, jaxpr: Any) -> Canonical:
        """The form of a jaxpr, open or closed."""
        known = self._known.get(id(jaxpr))
        if known is None:
            opened, consts = _jax_compat.split_jaxpr(jaxpr)
            body = self.equations(
                ((eqn, eqn.invars, eqn.outvars) for eqn in opened.eqns),
                [(v, v.aval) for v in (*opened.constvars, *opened.invars)],
                opened.outvars,
            )
            form = Canonical((body, tuple(map(self._value, consts))))
            known = self._known[id(jaxpr)] = (jaxpr, form)
        return known[1]

    def equations(
        self,
        equations: Iterable[tuple[Any, Sequence[Any], Sequence[Hashable]]],
        inputs: Sequence[tuple[Hashable, Any]],
        outputs: Sequence[Any],
    ) -> Canonical:
        """The form of ``(equation, its inputs, its outputs)`` triples over any hashable variables.

        Args:
          equations: in an order of execution. An input is a variable or a ``Literal``.
          inputs: ``(variable, aval)`` for what comes from outside.
          outputs: variables or literals.
        """
        numbers: dict[Hashable, int] = {}
        for variable, _ in inputs:
            numbers[variable] = len(numbers)

        def name(atom: Any) -> Hashable:
            if isinstance(atom, _jax_compat.Literal):
                return self.literal(atom)
            return numbers[atom]

        lines = []
        for eqn, ins, outs in equations:
            lines.append((self._operation(eqn), tuple(map(name, ins)), len(outs)))
            for variable in outs:
                numbers[variable] = len(numbers)
        avals = tuple(aval for _, aval in inputs)
        return Canonical((avals, tuple(lines), tuple(map(name, outputs))))

    def operation(self, eqn: Any, ins: Sequence[Any]) -> Hashable:
        """What an equation computes from variables that keep their own names."""
        is_literal = (isinstance(atom, _jax_compat.Literal) for atom in ins)
        pairs = zip(ins, is_literal, strict=True)
        return (self._operation(eqn), *(self.literal(a) if lit else a for a, lit in pairs))

    def literal(self, atom: Any) -> Hashable:
        """A literal by type and value."""
        return ("literal", atom.aval, self._value(atom.val))

    def _operation(self, eqn: Any) -> Canonical:
        """What an equation does, whatever it reads and writes."""
        known = self._operations.get(id(eqn))
        if known is None:
            params = eqn.params if self._keep_rules else _jax_compat.lowered_params(eqn)
            values = tuple((key, self._value(params[key])) for key in sorted(params))
            form = Canonical((eqn.primitive, values, _jax_compat.equation_context(eqn)))
            known = self._operations[id(eqn)] = (eqn, form)
        return known[1]

    def _value(self, value: Any) -> Hashable:
        if _jax_compat.is_jaxpr(value):
            return self.jaxpr(value)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self._value, value))
        if isinstance(value, dict):
            return (dict, *((k, self._value(value[k])) for k in sorted(value, key=repr)))
        fact = constant(value)
        if fact is not None:
            return fact.key
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return _array_content(value)
        try:
            hash(value)
        except TypeError:
            return Same(value)
        return (type(value), value)


def difference(first: Canonical, second: Canonical) -> str:
    """Where two canonical forms of closed jaxprs part, in words."""
    (body, _), (other_body, _) = first.form, second.form  # type: ignore[misc]
    avals, lines, outputs = body.form
    others, other_lines, other_outputs = other_body.form
    if avals != others:
        return f"inputs {_listed(avals)} against {_listed(others)}"
    for i, (line, other) in enumerate(zip(lines, other_lines, strict=False)):
        if line != other:
            names = [entry[0].form[0].name for entry in (line, other)]
            if names[0] == names[1]:
                return f"equation {i}, {names[0]}, has other parameters or operands"
            return f"equation {i} is {names[0]} against {names[1]}"
    if len(lines) != len(other_lines):
        return f"{len(lines)} equations against {len(other_lines)}"
    return "other outputs" if outputs != other_outputs else "other constants"


def _listed(avals: Sequence[Any]) -> str:
    return ", ".join(map(str, avals)) or "none"


def _array_content(value: Any) -> Hashable:
    if value.size > _MAX_CONTENT_ELEMENTS or not isinstance(value.dtype, np.dtype):
        return Same(value)
    return (value.dtype, tuple(value.shape), np.asarray(value).tobytes())
