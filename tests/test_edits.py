"""Random edits between calls: a marked function always is the unmarked one of that moment.

What is edited, and by which functions it is read, is in ``edited``.
"""

import dataclasses
import re

import edited
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import hcompile
from hcompile import _jax_compat, _region

INPUTS = (
    jnp.array([0.5, -1.0], jnp.float32),
    jnp.array([2.0], jnp.float32),
    jnp.array([1, 2], jnp.int32),
    1.5,
    3,
)


def total(program):
    def loss(x):
        arrays = [a for a in program(x) if jnp.issubdtype(a.dtype, jnp.inexact)]
        return sum(jnp.tanh(a.astype(jnp.float32)).sum() for a in arrays) + 0.0 * x.sum()

    return loss


def evaluate(jaxpr, *arrays):
    """Runs a jaxpr operation by operation, which needs no compiling once each was seen."""
    jaxpr, consts = _jax_compat.split_jaxpr(jaxpr)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, _jax_compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inner, ins = _jax_compat.called_jaxpr(eqn), list(map(read, eqn.invars))
        outs = evaluate(inner, *ins) if inner else eqn.primitive.bind(*ins, **eqn.params)
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def traced(program):
    """As ``jax.jit``, for programs that run once only: what would be compiled is interpreted."""
    return lambda x: evaluate(jax.make_jaxpr(program)(x), jnp.asarray(x))


def batched(transform):
    return lambda program: lambda x: transform(jax.vmap(program))(jnp.stack([x, x + 1]))


TRANSFORMS = {
    "trace": traced,
    "trace grad": lambda program: traced(jax.grad(total(program))),
    "trace vmap": batched(traced),
    "trace vmap grad": lambda program: batched(traced)(jax.grad(total(program))),
    "jit": jax.jit,
    "plain grad": lambda program: jax.grad(total(program)),
    "plain vmap": batched(lambda program: program),
    "hcompile": lambda program: hcompile.jit(program),
    "hcompile grad": lambda program: hcompile.jit(jax.grad(total(program))),
}
# Compiling takes most of the time, so most calls are only traced.
SOME = sorted(TRANSFORMS) + [t for t in TRANSFORMS if "trace" in t] * 9


def outline(value):
    """Types, structure, order and everything of a result but the entries of arrays."""
    if isinstance(value, jax.Array):
        return str(jax.typeof(value)), value.weak_type
    if isinstance(value, dict):
        return type(value), [(k, outline(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [outline(v) for v in value]
    if dataclasses.is_dataclass(value):
        return type(value), [outline(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return type(value), repr(value)


def run(fn, x, make_argument, transform, between):
    """Outlines of calls of ``fn`` within one trace, edited after the first, and their arrays.

    The last call has nothing new to see, so it is neither traced nor in line.
    """
    outlines, undo = [], []

    def program(x):
        x = jnp.asarray(x)
        argument = make_argument(x)
        arrays = []
        for step in range(2 if between is None else 3):
            if step == 1 and between is not None:
                undo.append(between())
            before = counts()
            result = fn(x, argument)
            outlines.append(outline(result))
            arrays += [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]
        assert counts()[1:] == before[1:], "a call without an edit was traced, or ran in line"
        return arrays

    try:
        return outlines, TRANSFORMS[transform](program)(x)
    finally:
        for restore in undo:
            restore()


def assert_same(got, want):
    assert got[0] == want[0]
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        rtol = 5e-2 if b.dtype == jnp.bfloat16 else 1e-4
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b), initial=1e-3))


def counts():
    """Calls, traces and calls in line; ``cache_info`` would merge functions of one name."""
    regions = list(_region._process.regions.values())
    return [sum(getattr(r, key) for r in regions) for key in ("calls", "traces", "inlined")]


calls = st.tuples(
    st.integers(0, 7),
    st.sampled_from(INPUTS),
    st.sampled_from(edited.ARGUMENTS),
    st.sampled_from(SOME),
)
edits = st.tuples(st.integers(0, 1), st.integers(0, 99), st.integers(0, 13))


class Edits(RuleBasedStateMachine):
    """Edits stay until they are undone; each is followed by calls that read what it wrote."""

    def __init__(self):
        super().__init__()
        hcompile.clear_caches()
        self.program = edited.Program()
        self.undo = []

    def place(self, edit):
        module, index, choice = edit
        places = self.program.places[module]
        place = places[sorted(places)[index % len(places)]]
        return module, place, lambda: place.edit(choice)

    def check(self, module, place, call, between=None, again=False):
        which, x, make_argument, transform = call
        if "grad" in transform and jnp.issubdtype(jnp.result_type(x), jnp.integer):
            transform = "trace"
        fn = self.program.calls[module][place.readers[which % len(place.readers)]]
        arguments = x, make_argument, transform, between
        try:
            want = run(fn, *arguments)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            self.check_error(fn, arguments, error)
            return
        assert_same(run(hcompile.region(fn), *arguments), want)
        if again:
            before = counts()
            assert_same(run(hcompile.region(fn), *arguments), want)
            assert counts()[0] > before[0]
            assert counts()[1] == before[1], "a program without an edit was traced again"
        assert counts()[2] == 0, [list(r.misses) for r in _region._process.regions.values()]

    def check_error(self, fn, arguments, error):
        """Calls that are wrong without the mark fail in the same way with it."""
        with pytest.raises(type(error), match=re.escape(str(error))):
            run(hcompile.region(fn), *arguments)
        hcompile.clear_caches()

    @rule(edit=edits, call=calls, other=calls)
    def edit_and_call(self, edit, call, other):
        module, place, apply = self.place(edit)
        self.check(module, place, call)
        self.undo.append((module, place, call, apply()))
        self.check(module, place, call, again=True)
        self.check(1 - module, place, other)

    @rule(edit=edits, call=calls)
    def edit_between_calls_of_one_trace(self, edit, call):
        module, place, apply = self.place(edit)
        self.check(module, place, call, between=apply)
        self.check(module, place, call)

    @precondition(lambda self: self.undo)
    @rule()
    def undo_an_edit(self):
        module, place, call, restore = self.undo.pop()
        restore()
        self.check(module, place, call, again=True)

    @rule(edit=edits, other=edits, call=calls)
    def two_edits_at_once(self, edit, other, call):
        module, place, apply = self.place(edit)
        self.undo.append((module, place, call, apply()))
        self.undo.append((module, place, call, self.place(other)[2]()))
        self.check(module, place, call)

    @rule()
    def forget(self):
        hcompile.clear_caches()


Edits.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEdits = Edits.TestCase
