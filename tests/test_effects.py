"""Callbacks in a body belong to the call that made them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import hcompile

SEEN = []


def debug(x, log):
    jax.debug.callback(lambda v: log.append(float(v)), x)
    return x * 2


def bound_method(x, log):
    jax.debug.callback(log.append, x)
    return x * 2


def ordered(x, log):
    io_callback(lambda v: log.append(float(v)), None, x, ordered=True)
    return x * 2


def pure(x, log):
    def double(v):
        log.append(float(v))
        return 2 * v

    return jax.pure_callback(double, jax.ShapeDtypeStruct((), jnp.float32), x)


def partial(x, log):
    jax.debug.callback(functools.partial(lambda log, v: log.append(float(v)), log), x)
    return x * 2


@pytest.mark.parametrize("jit", [jax.jit, hcompile.jit], ids=["jit", "hcompile.jit"])
@pytest.mark.parametrize(
    "layer", [debug, bound_method, ordered, pure, partial], ids=lambda f: f.__name__
)
def test_each_call_writes_to_its_own_list(layer, jit):
    logs = [[], []]
    marked = hcompile.region(layer)
    step = jit(lambda x: marked(marked(x, logs[0]), logs[1]))
    for x in (1.0, 3.0):
        assert step(jnp.float32(x)) == 4 * x
    jax.effects_barrier()
    assert logs == [[1.0, 3.0], [2.0, 6.0]]
    (info,) = hcompile.cache_info().values()
    assert info["inlined"] == 2
    assert "a callback in the body can read or write" in info["explanations"][0]


def test_lists_of_objects_closures_and_globals():
    class Model:
        def __init__(self):
            self.log = []

        @hcompile.region
        def __call__(self, x):
            jax.debug.callback(lambda v: self.log.append(float(v)), x)
            return x + 1

    def make_closure():
        log = []

        @hcompile.region
        def layer(x):
            jax.debug.callback(lambda v: log.append(float(v)), x)
            return x + 1

        return layer, log

    @hcompile.region
    def to_a_global(x):
        jax.debug.callback(lambda v: SEEN.append(float(v)), x)
        return x + 1

    models = [Model(), Model()]
    closures = [make_closure(), make_closure()]
    layers = [*models, *(layer for layer, _ in closures), to_a_global]
    SEEN.clear()
    jax.jit(lambda x: functools.reduce(lambda x, f: f(x), layers, x))(0.0)
    jax.effects_barrier()
    assert [*(m.log for m in models), *(log for _, log in closures), SEEN] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]


def test_a_callback_without_state_is_shared():
    def triple(v):
        return 3 * v

    @hcompile.region
    def layer(x):
        jax.debug.print("x {}", x)
        return jax.pure_callback(triple, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert jax.jit(lambda x: layer(layer(x)))(jnp.float32(1)) == 9
    (info,) = hcompile.cache_info().values()
    assert (info["traces"], info["inlined"]) == (1, 0)
