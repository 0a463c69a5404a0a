"""What the tests of users' situations share: small models, and marked against unmarked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from models import assert_trees_close, executables, inputs

import hcompile

X = inputs(width=4)


def weights(n, width=4):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(width, width)) * 0.4, jnp.float32) for _ in range(n)]


def check(program, body, *args, rtol=1e-5):
    """``program`` of the marked ``body``, compiled, against that of the unmarked one."""
    jitted = hcompile.jit(functools.partial(program, hcompile.region(body)))
    want = jax.jit(functools.partial(program, body))(*args)
    for _ in range(2):
        assert_trees_close(jitted(*args), want, rtol=rtol)
    return jitted


def check_marks(program, *args, rtol=1e-5):
    """The same for a ``program`` whose first argument is what marks: a region, or nothing."""
    jitted = hcompile.jit(functools.partial(program, hcompile.region))
    want = jax.jit(functools.partial(program, unmarked))(*args)
    for _ in range(2):
        assert_trees_close(jitted(*args), want, rtol=rtol)
    return jitted


def unmarked(fn):
    return fn


def only():
    """The counts of the one region that was called."""
    (info,) = hcompile.cache_info().values()
    return info


def assert_bodies(count, inlined=0):
    info = only()
    assert (info["traces"], info["inlined"]) == (count, inlined), info["misses"]


def chain(*calls):
    """A program that calls ``body(call, x)`` for one ``call`` after another."""

    def program(body, x):
        for call in calls:
            x = body(call, x)
        return x

    return program


def each(layers):
    """A program that marks and calls one layer after another."""

    def program(mark, x):
        for layer in layers:
            x = mark(layer)(x)
        return x

    return program


def grads_of(loss):
    """``loss(body, *args)`` with its gradient in the first of ``args``."""
    return lambda body, *args: jax.value_and_grad(functools.partial(loss, body))(*args)


def calls(jitted):
    """How often each executable of a region, without the glue, is called."""
    return [n for name, counts in executables(jitted).items() if name != "glue" for n in counts]


def square_loss(body, ws, x):
    for w in ws:
        x = body(w, x)
    return jnp.mean(x**2)


class Affine:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(4)(x))


def tanh_layer(w, x):
    return jnp.tanh(x @ w)


def regions(jitted):
    """``{name: calls}`` of the latest program, without the glue."""
    return {name: counts for name, counts in executables(jitted).items() if name != "glue"}
