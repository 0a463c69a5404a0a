"""Whatever JAX puts into a trace's key splits a body, and leaving the context finds it again."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import assert_trees_close

import hcompile


def arithmetic(x):
    return jnp.sin(x) * 1.5 + np.arange(3)


def matmul(x):
    return x @ jnp.ones((3, 3))


def random(x):
    return x + jax.random.normal(jax.random.key(1), (3,))


def raw_key(x):
    return x.sum() + jax.random.key_data(jax.random.key(1)).astype(jnp.float32)


def integers(x):
    return jnp.arange(3) + x.astype(int)


def constrained(x):
    mesh = jax.sharding.get_abstract_mesh()
    return 2 * x if mesh.empty else jax.lax.with_sharding_constraint(3 * x, P(None))


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


CONTEXTS = {
    "x64": (arithmetic, lambda: jax.enable_x64(True)),
    "x64 integers": (integers, lambda: jax.enable_x64(True)),
    "matmul precision": (matmul, lambda: jax.default_matmul_precision("highest")),
    "dtype promotion": (arithmetic, lambda: jax.numpy_dtype_promotion("strict")),
    "mesh": (constrained, lambda: jax.set_mesh(mesh())),
    "default device": (arithmetic, lambda: jax.default_device(jax.devices()[1])),
    "PRNG": (raw_key, lambda: jax.default_prng_impl("rbg")),
    "threefry": (random, lambda: jax.threefry_partitionable(False)),
    "debug nans": (lambda x: jnp.log(x - 1) * 0, lambda: jax.debug_nans(True)),
}


def outcome(step):
    """The result of a step, or the class of its error."""
    try:
        return jax.block_until_ready(step(jnp.ones(3)))
    except (ValueError, FloatingPointError) as error:
        return type(error)


def assert_same(got, want):
    if isinstance(want, type):
        assert got is want
    else:
        assert_trees_close(got, want)


@pytest.mark.parametrize("jit", [jax.jit, hcompile.jit], ids=["jit", "hcompile.jit"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_in_and_out_of_a_context(name, jit):
    f, enter = CONTEXTS[name]
    marked = hcompile.region(f)
    for context in (contextlib.nullcontext, enter, contextlib.nullcontext, enter):
        with context():
            assert_same(
                outcome(jit(lambda x: (marked(x), marked(x)))), outcome(lambda x: (f(x), f(x)))
            )
    info = hcompile.cache_info()[f.__name__]
    assert info["traces"] <= 2
    assert info["calls"] == info["traces"] + info["hits"] + info["inlined"]


@pytest.mark.parametrize("name", CONTEXTS)
def test_one_step_called_in_and_out_of_a_context(name):
    f, enter = CONTEXTS[name]
    marked = hcompile.region(f)
    step = hcompile.jit(lambda x: (marked(x), marked(x)))
    plain = jax.jit(lambda x: (f(x), f(x)))
    for context in (contextlib.nullcontext, enter, contextlib.nullcontext):
        with context():
            assert_same(outcome(step), outcome(plain))


def test_axis_environments():
    f = hcompile.region(lambda x: x / jax.lax.psum(x, "i"))

    def mapped(x):
        return jax.vmap(lambda x: f(f(x)), axis_name="i")(x)

    for n in (2, 3, 2):
        np.testing.assert_allclose(jax.jit(mapped)(jnp.ones(n)), np.full(n, 1 / n), rtol=1e-6)
    with pytest.raises(NameError, match="unbound axis name: i"):
        jax.jit(f)(jnp.ones(2))


def test_shardings_and_key_types_of_arguments():
    f = hcompile.region(lambda k: jax.random.key_impl(k) if False else jax.random.key_data(k))
    step = jax.jit(lambda a, b: (f(a), f(b), f(a)))
    a, b = jax.random.key(0, impl="threefry2x32"), jax.random.key(0, impl="rbg")
    assert [x.shape for x in step(a, b)] == [(2,), (4,), (2,)]
    assert hcompile.cache_info()["<lambda>"]["traces"] == 2


def test_weak_types():
    f = hcompile.region(lambda x: x * jnp.ones((), jnp.bfloat16))
    strong, weak = jax.jit(lambda x: (f(x), f(2.0 * 1)))(jnp.float32(2))
    assert (strong.dtype, weak.dtype) == (jnp.float32, jnp.bfloat16)
