"""A Python number that becomes an input of a body: layer 7's index, a drop-path rate, a scale.

Two calls differ in a number. One trace has the number itself (*plain*), another an abstract array
in its place (*general*). If Python looks at an abstract array's value, tracing fails; so a general
trace that succeeds holds for every number. It must give the plain trace back: each of its equations
is one of the plain trace's, with a literal where the number stands, or is arithmetic that Python
did in the plain trace, before JAX saw the result. ``lift`` matches the two, and returns the plain
jaxpr with those literals as inputs and, for each, how Python computes it from the numbers. Nothing
is recomputed in another precision: a call passes the very values that its own trace would hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _jax_compat
from ._canonical import Canonicalizer

Number = int | float


class Formula:
    """A literal of a body as Python computes it from the call's numbers."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self.function = function
        self.args = args  # formulas and numbers

    def __call__(self, numbers: Sequence[Number]) -> Number:
        values = [arg(numbers) if isinstance(arg, Formula) else arg for arg in self.args]
        return self.function(*values)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Formula)
            and self.function is other.function
            and self.args == other.args
        )

    def __hash__(self) -> int:
        return hash((self.function, self.args))


class _Given(Formula):
    """The call's number at a position."""

    def __init__(self, index: int):
        super().__init__(_Given, (index,))

    def __call__(self, numbers: Sequence[Number]) -> Number:
        return numbers[self.args[0]]


class Slot:
    """One new input of a lifted jaxpr: its formula and its type."""

    __slots__ = ("aval", "formula")

    def __init__(self, formula: Formula, aval: Any):
        self.formula = formula
        self.aval = aval

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and (self.formula, self.aval) == (other.formula, other.aval)

    def __hash__(self) -> int:
        return hash((self.formula, self.aval))

    def value(self, numbers: Sequence[Number]) -> np.ndarray | Number:
        """What to pass for a call's numbers.

        Raises:
          OverflowError, ZeroDivisionError: where the plain call has no such literal either.
        """
        number = self.formula(numbers)
        with np.errstate(over="ignore"):
            array = np.asarray(number, self.aval.dtype)
        return number if self.aval.weak_type else array

    def gives(self, numbers: Sequence[Number], literal: Any) -> bool:
        """Whether the value for these numbers is a literal's, to the bit."""
        try:
            value = np.asarray(self.value(numbers), literal.aval.dtype)
        except ArithmeticError:
            return False
        own = np.asarray(literal.val, literal.aval.dtype)
        return self.aval == literal.aval and value.tobytes() == own.tobytes()


class NoMatchError(Exception):
    """The general trace does not give the plain one back."""


def lift(plain: Any, general: Any, numbers: Sequence[Number]) -> tuple[Any, tuple[Slot, ...]]:
    """``plain`` with the literals that come from ``numbers`` as further inputs.

    Args:
      plain: closed jaxpr of a call with these numbers.
      general: of the same call with an abstract scalar for each number, as its last inputs.
      numbers: of the call.

    Returns:
      The jaxpr, its new inputs last, and what they are.

    Raises:
      NoMatchError: when the two do not agree.
    """
    return _Match(plain, general, numbers).result()


class _Match:
    def __init__(self, plain: Any, general: Any, numbers: Sequence[Number]):
        self._plain, consts = _jax_compat.split_jaxpr(plain)
        self._consts = consts
        self._general, general_consts = _jax_compat.split_jaxpr(general)
        self._numbers = numbers
        self._forms = Canonicalizer()
        self._slots: list[Slot] = []
        self._lifted: dict[tuple[int, int], Any] = {}  # by equation and operand of ``plain``
        self._env: dict[Any, Any] = {}  # of ``general``: an atom of ``plain``, or a formula
        self._next = 0
        inputs = [*self._plain.invars, *map(_Given, range(len(numbers)))]
        if len(inputs) != len(self._general.invars) or len(consts) != len(general_consts):
            raise NoMatchError("other inputs")
        if any(a is not b for a, b in zip(consts, general_consts, strict=True)):
            raise NoMatchError("other constants")
        self._env.update(zip(self._general.constvars, self._plain.constvars, strict=True))
        self._env.update(zip(self._general.invars, inputs, strict=True))

    def result(self) -> tuple[Any, tuple[Slot, ...]]:
        for eqn in self._general.eqns:
            if not self._take(eqn) and not self._fold(eqn):
                raise NoMatchError(f"a {eqn.primitive.name} that is not in the plain trace")
        outs = [self._read(atom) for atom in self._general.outvars]
        pairs = zip(outs, self._plain.outvars, strict=True)
        if self._next != len(self._plain.eqns) or not all(self._same(a, b) for a, b in pairs):
            raise NoMatchError("other equations or outputs")
        eqns = [
            eqn.replace(
                invars=[self._lifted.get((i, k), atom) for k, atom in enumerate(eqn.invars)]
            )
            for i, eqn in enumerate(self._plain.eqns)
        ]
        invars = [*self._plain.invars, *self._lifted.values()]
        jaxpr = _jax_compat.close_jaxpr(invars, self._plain.outvars, eqns, self._constants())
        return jaxpr, tuple(self._slots)

    def _constants(self) -> dict[Any, Any]:
        return dict(zip(self._plain.constvars, self._consts, strict=True))

    def _read(self, atom: Any) -> Any:
        return atom if isinstance(atom, _jax_compat.Literal) else self._env[atom]

    def _take(self, eqn: Any) -> bool:
        """Whether ``eqn`` is the plain trace's next equation."""
        if self._next == len(self._plain.eqns):
            return False
        mine = self._plain.eqns[self._next]
        if mine.primitive is not eqn.primitive or len(mine.invars) != len(eqn.invars):
            return False
        if [v.aval for v in mine.outvars] != [v.aval for v in eqn.outvars]:
            return False
        if self._forms.operation(mine, ()) != self._forms.operation(eqn, ()):
            return False
        found: list[tuple[int, Slot]] = []
        for k, (atom, own) in enumerate(zip(eqn.invars, mine.invars, strict=True)):
            value = self._read(atom)
            if isinstance(value, Formula) and isinstance(own, _jax_compat.Literal):
                slot = Slot(value, own.aval)
                if not slot.gives(self._numbers, own):
                    return False
                found.append((k, slot))
            elif not self._same(value, own):
                return False
        for k, slot in found:
            self._slots.append(slot)
            self._lifted[self._next, k] = _jax_compat.Var(slot.aval)
        self._env.update(zip(eqn.outvars, mine.outvars, strict=True))
        self._next += 1
        return True

    def _same(self, value: Any, own: Any) -> bool:
        if isinstance(own, _jax_compat.Literal):
            return isinstance(value, _jax_compat.Literal) and self._forms.literal(
                value
            ) == self._forms.literal(own)
        return value is own

    def _fold(self, eqn: Any) -> bool:
        """Whether ``eqn`` is arithmetic on numbers alone, which Python did in the plain trace."""
        args = [_as_number(self._read(atom)) for atom in eqn.invars]
        if None in args or not any(isinstance(arg, Formula) for arg in args):
            return False
        if _jax_compat.is_jit(eqn):
            return self._fold_call(eqn, args)
        function = _python_function(eqn)
        if function is None:
            return False
        self._env[eqn.outvars[0]] = Formula(function, tuple(args))
        return True

    def _fold_call(self, eqn: Any, args: list[Any]) -> bool:
        """``jnp.power`` and its like are jitted."""
        inner, consts = _jax_compat.split_jaxpr(_jax_compat.called_jaxpr(eqn))
        if consts:
            return False
        self._env.update(zip(inner.invars, args, strict=True))
        if not all(map(self._fold, inner.eqns)):
            return False
        outs = [_as_number(self._read(atom)) for atom in inner.outvars]
        self._env.update(zip(eqn.outvars, outs, strict=True))
        return None not in outs


def _as_number(value: Any) -> Any:
    """A formula, the number of a scalar literal, or None."""
    if isinstance(value, (Formula, int, float)):
        return value
    is_scalar = isinstance(value, _jax_compat.Literal) and _jax_compat.is_scalar(value.aval)
    return np.asarray(value.val).item() if is_scalar else None


def _to_int(value: Number) -> int:
    if isinstance(value, float):
        raise ArithmeticError("Python does not make an int of a float by itself")
    return value


_FUNCTIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "pow": operator.pow,
}


def _power(exponent: int) -> Callable[[Number], Number]:
    return _POWERS.setdefault(exponent, lambda value: value**exponent)


_POWERS: dict[int, Callable[[Number], Number]] = {}


def _python_function(eqn: Any) -> Callable[..., Any] | None:
    """What Python does where JAX has ``eqn`` on scalars; None if Python's numbers cannot."""
    name = eqn.primitive.name
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    if name == "convert_element_type" and dtype is not None:
        if np.issubdtype(dtype, np.integer):
            return _to_int
        return float if _jax_compat.is_float(dtype) else None
    if name == "div" and not _jax_compat.is_float(dtype):
        return None  # of ints it truncates; Python's ``//`` does not
    if name == "integer_pow":
        return _power(eqn.params["y"])
    return _FUNCTIONS.get(name)
