"""Regions in exported and lowered programs: one function for each body; symbolic dimensions."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from models import assert_trees_close, init_layers, inputs, layer

import hcompile

marked = hcompile.region(layer)
DEPTH = 5


def run_stack(ps, x, block=marked):
    for p in ps:
        x = block(p, x)
    return x


def functions_and_calls(text):
    functions = re.findall(r'func.func private @("region:[^"]*"|[\w.]*layer[\w.]*)', text)
    return len(functions), len(re.findall(r'call @"region:', text))


class TestOneFunction:
    @pytest.mark.parametrize("jit", [jax.jit, hcompile.jit], ids=["jit", "hcompile.jit"])
    def test_lowered(self, jit):
        text = jit(run_stack).lower(init_layers(DEPTH), inputs()).as_text()
        assert functions_and_calls(text) == (1, DEPTH)

    @pytest.mark.parametrize("jit", [jax.jit, hcompile.jit], ids=["jit", "hcompile.jit"])
    def test_exported(self, jit):
        ps, x = init_layers(DEPTH), inputs()
        exported = export.export(jit(run_stack))(ps, x)
        assert functions_and_calls(str(exported.mlir_module())) == (1, DEPTH)
        assert_trees_close(exported.call(ps, x), run_stack(ps, x, layer))

    def test_the_gradient_of_an_exported_step(self):
        ps, x = init_layers(DEPTH), inputs()
        loss = hcompile.jit(lambda ps, x: run_stack(ps, x).sum())
        exported = export.export(loss)(ps, x)
        want = jax.grad(lambda ps, x: run_stack(ps, x, layer).sum())(ps, x)
        assert_trees_close(jax.grad(exported.call)(ps, x), want)


class TestSymbolicDimensions:
    def test_a_hit_only_where_expressions_are_equal(self):
        @hcompile.region
        def scaled(x, n):
            return (jnp.tanh(x).reshape(n, -1) * n, n)

        def program(x):
            b = x.shape[0]
            y, n = scaled(x, b)
            assert n == b
            y, _ = scaled(y, b + b - b)
            z, _ = scaled(jnp.concatenate([y, y]), 2 * b)
            return y, z

        sizes = export.symbolic_shape("b, 4")
        exported = export.export(jax.jit(program))(jax.ShapeDtypeStruct(sizes, jnp.float32))
        (info,) = hcompile.cache_info().values()
        assert (info["calls"], info["traces"], info["inlined"]) == (3, 2, 0)
        for b in (2, 3):
            x = jnp.linspace(-1, 1, 4 * b).reshape(b, 4)
            assert_trees_close(exported.call(x), program(x))

    def test_another_symbol_is_another_body(self):
        double = hcompile.region(lambda x: x * x.shape[0])

        def program(x, y):
            return double(double(x)), double(y)

        a, b = export.symbolic_shape("a, b")
        types = [jax.ShapeDtypeStruct((n, 2), jnp.float32) for n in (a, b)]
        exported = export.export(jax.jit(program))(*types)
        (info,) = hcompile.cache_info().values()
        assert (info["calls"], info["traces"]) == (3, 2)
        x, y = jnp.ones((2, 2)), jnp.ones((3, 2))
        assert_trees_close(exported.call(x, y), (4 * x, 3 * y))

    def test_gradients(self):
        block = hcompile.region(lambda w, x: jnp.tanh(x @ w) / x.shape[0])

        def loss(w, x):
            return block(w, block(w, x)).sum()

        w, x = jnp.eye(4) * 0.5, jnp.linspace(-1, 1, 12).reshape(3, 4)
        sizes = export.symbolic_shape("b, 4")
        types = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct(sizes, jnp.float32)
        exported = export.export(jax.jit(jax.grad(loss)))(*types)
        assert_trees_close(exported.call(w, x), jax.grad(loss)(w, x))
