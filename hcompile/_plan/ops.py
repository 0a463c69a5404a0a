"""The flat program: equations over numbered slots instead of jaxpr variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from .._canonical import Canonical, Canonicalizer

Slot = int
Atom = Any  # a Slot or a jaxpr Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """An equation whose variables are slots of the whole program.

    Attributes:
      region: of a region's call, what its executable depends on (the canonical form of the body,
        and XLA options if it has any), else None.
      body: of a region's call, the closed jaxpr from ``ins`` to ``outs``, in normal form.
      options: of a region's call, its XLA options as a tuple.
    """

    eqn: Any
    ins: tuple[Atom, ...]
    outs: tuple[Slot, ...]
    region: Canonical | None = None
    body: Any = None
    options: Hashable = ()

    def reads(self) -> list[Slot]:
        return [atom for atom in self.ins if isinstance(atom, int)]


def region_key(form: Canonical, options: Hashable) -> Canonical:
    """``Op.region`` for a body of this form."""
    return Canonical((form, options)) if options else form


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

    def new_slot(self, aval: Any) -> Slot:
        """A slot for a value of type ``aval``."""
        self.avals.append(aval)
        return len(self.avals) - 1
