"""Situations users reported, C35 to C51: autodiff, memory, counts and depth."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    LinenBlock,
    X,
    assert_bodies,
    calls,
    check,
    check_marks,
    grads_of,
    only,
    regions,
    square_loss,
    tanh_layer,
    unmarked,
    weights,
)
from jax.experimental import pallas as pl
from models import assert_trees_close, inputs, stack

import hcompile

# --- E. Autodiff, remat, memory ---------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, 8])
def test_c35_at_most_three_backward_bodies(depth):
    """The first input needs no gradient, the last cotangent comes from the loss."""
    f = check(grads_of(square_loss), tanh_layer, weights(depth), X)
    backward = regions(f)["tanh_layer.backward"]
    assert len(backward) <= 3
    assert sum(backward) == depth


def test_c36_a_value_feeds_two_parts_and_the_outside():
    """Two uses inside the region, one outside: one sum inside, one outside."""

    def body(w, x):
        h = jnp.tanh(x @ w)
        return jnp.sin(h) @ w + h * 2, h

    def loss(body, ws, x):
        total = 0.0
        for w in ws:
            x, h = body(w, x)
            total += jnp.mean(h**2)
        return total + jnp.mean(x**2)

    f = check(grads_of(loss), body, weights(5), X)
    backward = regions(f)["body.backward"]
    assert len(backward) <= 3
    # Only the gradients of w and x come back from a layer, already summed.
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(loss, hcompile.region(body))))(weights(5), X)
    assert "add_any" not in {eqn.primitive.name for eqn in jaxpr.eqns}
    backward = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"][5:]
    assert [len(eqn.outvars) for eqn in backward] == [2, 2, 2, 2, 1]


def residual_bytes(loss, *args):
    """What the forward pass keeps for the backward pass, without the arguments."""
    _, pull_back = jax.vjp(loss, *args)
    own = {id(a) for a in jax.tree.leaves(args)}
    return sum(a.nbytes for a in jax.tree.leaves(pull_back) if id(a) not in own)


class TestC37Residuals:
    def transformer_block(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        h = jax.nn.softmax(q @ k.T / 4) @ v
        x = x + h @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def params(self, depth):
        rng = np.random.default_rng(0)
        shapes = {name: (8, 8) for name in "qkvo"} | {"up": (8, 32), "down": (32, 8)}
        return [
            {n: jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32) for n, s in shapes.items()}
            for _ in range(depth)
        ]

    def test_matmul_like_outputs_the_same_for_each_layer(self):
        x = inputs(width=8, batch=16)
        block = type(self).transformer_block
        marked = stack(hcompile.region(block))
        kept = {depth: residual_bytes(marked, self.params(depth), x) for depth in (2, 3, 8)}
        per_layer = kept[3] - kept[2]
        assert kept[8] - kept[3] == 5 * per_layer
        # q, k, v, scores, h, h @ o, up, down and the layer's input, of float32.
        assert per_layer <= 4 * 16 * (3 * 8 + 16 + 3 * 8 + 32 + 8)
        assert per_layer < residual_bytes(stack(block), self.params(3), x) / 3

    def test_gradients(self):
        block = type(self).transformer_block
        grad = jax.value_and_grad
        f = hcompile.jit(grad(stack(hcompile.region(block))))
        want = jax.jit(grad(stack(block)))(self.params(3), inputs(batch=16))
        assert_trees_close(f(self.params(3), inputs(batch=16)), want)


class TestC38Remat:
    def test_two_functions_in_a_remat_each(self):
        first = jax.checkpoint(lambda w, x: jnp.sin(x @ w))
        second = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) * 2)

        def loss(mark, ws, x):
            one, two = mark(first), mark(second)
            return jnp.mean(two(ws[2], one(ws[1], one(ws[0], x))) ** 2)

        f = check_marks(grads_of(loss), weights(3), X)
        infos = hcompile.cache_info().values()
        assert sum(info["bodies"] for info in infos) == 2
        assert [n for name, n in regions(f).items() if "forward" in name] == [[2]]

    @pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
    def test_nested_groups_and_the_policy_are_obeyed(self, policy):
        def loss(body, ws, x):
            def group(ws, x):
                for w in ws:
                    x = body(w, x)
                return x

            for i in range(0, 4, 2):
                x = jax.checkpoint(group, policy=policy)(ws[i : i + 2], x)
            return jnp.mean(x**2)

        check(grads_of(loss), tanh_layer, weights(4), X)
        marked = functools.partial(loss, hcompile.region(tanh_layer))
        plain = functools.partial(loss, tanh_layer)
        assert residual_bytes(marked, weights(4), X) == residual_bytes(plain, weights(4), X)

    def test_a_policy_inside_the_region_is_obeyed(self):
        body = jax.checkpoint(tanh_layer, policy=jax.checkpoint_policies.nothing_saveable)
        marked = functools.partial(square_loss, hcompile.region(body))
        plain = functools.partial(square_loss, body)
        assert residual_bytes(marked, weights(4), X) == residual_bytes(plain, weights(4), X)


def test_c39_a_backward_rule_in_higher_precision():
    """The cotangent's dtype is a part of the backward key."""

    @jax.custom_vjp
    def matmul(w, x):
        return x @ w

    def backward(residuals, g):
        w, x = (a.astype(jnp.float32) for a in residuals)
        g = g.astype(jnp.float32)
        return (x.T @ g).astype(jnp.bfloat16), (g @ w.T).astype(jnp.bfloat16)

    matmul.defvjp(lambda w, x: (matmul(w, x), (w, x)), backward)
    body = lambda w, x: jnp.tanh(matmul(w, x))

    def loss(body, ws, x):
        for w in ws:
            x = body(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    ws = [w.astype(jnp.bfloat16) for w in weights(4)]
    f = check(grads_of(loss), body, ws, X.astype(jnp.bfloat16), rtol=2e-2)
    assert_bodies(1)
    assert calls(f)[0] == 4
    mixed = lambda body, ws, x: (body(ws[0], x), body(ws[1], x.astype(jnp.float32)))
    pull_back = lambda body, ws, x: jax.vjp(functools.partial(mixed, body), ws, x)[0]
    assert_trees_close(
        jax.jit(functools.partial(pull_back, hcompile.region(tanh_layer)))(ws, X),
        jax.jit(functools.partial(pull_back, tanh_layer))(ws, X),
        rtol=2e-2,
    )


@pytest.mark.parametrize("remat", [unmarked, jax.checkpoint], ids=["plain", "remat"])
def test_c41_the_gradient_is_taken_and_applied_inside_the_step(remat):
    """Backward regions are shared as if the gradient had been taken outside."""

    def step(body, ws, x):
        grads = jax.grad(lambda ws: square_loss(remat(body), ws, x))(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    def outside(body, ws, x):
        return jax.grad(functools.partial(square_loss, remat(body)))(ws, x)

    inside, alone = (check(program, tanh_layer, weights(4), X) for program in (step, outside))
    assert regions(inside) == regions(alone)
    parts = inside.report().programs[-1].parts + alone.report().programs[-1].parts
    assert sum(part.kind == "region" and not part.shared for part in parts) == len(calls(inside))


@pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    strict=True,
    reason="JAX 0.10 takes each key with a slice of its own, which the glue does not share yet",
)
def test_c42_dropout_costs_at_most_twice():
    """With and without dropout, beside a region that draws nothing."""

    def dropped(w, key, x):
        h = jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2, 0.0)

    def loss(body, plain, ws, x):
        keys = jax.random.split(jax.random.key(0), len(ws))
        for w, key in zip(ws, keys, strict=True):
            x = plain(w, body(w, key, x))
        return jnp.mean(x**2)

    def compiled(body, depth):
        f = functools.partial(loss, hcompile.region(body), hcompile.region(tanh_layer))
        plain = functools.partial(loss, body, tanh_layer)
        f, plain = jax.value_and_grad(f), jax.value_and_grad(plain)
        f = hcompile.jit(f)
        assert_trees_close(f(weights(depth), X), jax.jit(plain)(weights(depth), X))
        return f.report().programs[-1].executables, regions(f)

    without = lambda w, key, x: jnp.tanh(x @ w)
    counts = {}
    for depth in (3, 6):
        counts[depth], names = compiled(dropped, depth)
        assert counts[depth] <= 2 * compiled(without, depth)[0]
        assert names["tanh_layer.forward"] == [depth]
    assert counts[3] == counts[6]
    jaxpr = jax.make_jaxpr(hcompile.region(tanh_layer))(weights(1)[0], X)
    assert len(jaxpr.eqns[0].invars) == 2


class TestC43Attention:
    def test_bf16_causal_attention(self):
        def body(w, x):
            q, k, v = (x @ w[i] for i in range(3))
            heads = [a.reshape(1, 6, 2, 4) for a in (q, k, v)]
            return x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(6, 8)

        rng = np.random.default_rng(0)
        ws = [jnp.asarray(rng.normal(size=(3, 8, 8)) * 0.3, jnp.bfloat16) for _ in range(3)]
        x = inputs(batch=6, dtype=jnp.bfloat16)
        loss = lambda body, ws, x: square_loss(body, ws, x).astype(jnp.float32)
        f = check(grads_of(loss), body, ws, x, rtol=3e-2)
        assert_bodies(1)
        assert regions(f)["body.forward"] == [3]
        assert len(f.report().programs) == 1

    def pallas_body(self):
        def kernel(w_ref, x_ref, o_ref):
            o_ref[...] = jnp.tanh(x_ref[...] @ w_ref[...])

        @jax.custom_vjp
        def fused(w, x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(kernel, out_shape=shape, interpret=True)(w, x)

        def backward(residuals, g):
            return jax.vjp(tanh_layer, *residuals)[1](g)

        fused.defvjp(lambda w, x: (fused(w, x), (w, x)), backward)
        return lambda w, x: fused(w, x) * 2

    def test_a_pallas_kernel(self):
        f = check(grads_of(square_loss), self.pallas_body(), weights(4), X)
        assert_bodies(1)
        assert len(regions(f)["<lambda>.forward"]) == 1
        assert len(regions(f)["<lambda>.backward"]) <= 3

    @pytest.mark.xfail(strict=True, reason="a GridMapping compares its jaxprs by identity")
    def test_a_pallas_kernel_where_the_first_input_needs_no_gradient(self):
        f = check(grads_of(square_loss), self.pallas_body(), weights(4), X)
        assert regions(f)["<lambda>.forward"] == [4]


# --- F. Counting, depth and cost --------------------------------------------------------------


def test_c45_a_region_mapped_over_a_thousand_leaves():
    """Five distinct shapes, as an optimizer has them."""
    shapes = [(2,), (3,), (2, 2), (4,), (1, 3)]
    leaves = [jnp.full(shapes[i % 5], i / 1000) for i in range(1000)]

    def program(body, leaves):
        return [body(leaf, 2 * leaf) for leaf in leaves]

    f = hcompile.jit(
        functools.partial(program, hcompile.region(lambda p, g: p - 0.1 * jnp.sign(g) * g))
    )
    want = [leaf - 0.1 * np.sign(leaf) * 2 * leaf for leaf in leaves]
    for got, expected in zip(f(leaves), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert only()["traces"] == 5
    assert calls(f) == [200] * 5
    assert f.report().programs[-1].executables <= 7


def test_c46_regions_that_double_at_each_level():
    """Work grows with the number of distinct bodies, not of paths."""

    def tower(mark, depth):
        def leaf(x):
            return jnp.sin(x) + 0.5

        level = mark(leaf)
        for _ in range(depth):
            level = mark(lambda x, below=level: below(below(x)))
        return level

    def loss(mark, x):
        level = tower(mark, 6)
        return jnp.sum(level(level(x)))

    traces = []
    f = hcompile.jit(functools.partial(loss, hcompile.region))
    x = jnp.linspace(0, 1, 4)
    want = x
    for _ in range(2**7):
        want = jnp.sin(want) + 0.5
    np.testing.assert_allclose(f(x), want.sum(), rtol=1e-5)
    for info in hcompile.cache_info().values():
        traces.append(info["traces"])
    assert sum(traces) <= 7
    assert f.report().programs[-1].executables <= 8


def test_c47_a_region_called_once_goes_with_its_surroundings():
    """Beside another that is called ten times."""

    def program(mark, ws, x):
        once, often = mark(lambda x: jnp.sin(x) * 2), mark(tanh_layer)
        x = once(x)
        for w in ws:
            x = often(w, x)
        return x.sum()

    f = check_marks(program, weights(10), X)
    assert regions(f) == {"tanh_layer.forward": [10]}
    glue = [part.calls for part in f.report().programs[-1].parts if part.kind == "glue"]
    assert sum(glue) <= 2


@pytest.mark.parametrize("mark", [unmarked, hcompile.region], ids=["unmarked", "marked"])
def test_c48_switched_off_is_plain_jit(mark):
    """Same results, same parameter tree, no executables of hcompile's own."""

    class Block(LinenBlock):
        __call__ = mark(LinenBlock.__call__)

    with hcompile.disabled():
        params = Block().init(jax.random.key(0), X)
        f = hcompile.jit(Block().apply)
        got = f(params, X)
        jaxpr = jax.make_jaxpr(Block().apply)(params, X)
    want = LinenBlock().init(jax.random.key(0), X)
    assert_trees_close(params, want)
    assert_trees_close(got, jax.jit(LinenBlock().apply)(want, X))
    assert f.report().programs == ()
    assert hcompile.cache_info() == {}
    assert "region:" not in str(jaxpr)


class TestC49TwentyLengths:
    """A server warms up many sequence lengths."""

    def test_programs_of_their_own(self):
        f = hcompile.jit(functools.partial(square_loss, hcompile.region(tanh_layer)))
        for n in [*range(1, 21), *range(1, 21)]:
            f(weights(3), inputs(width=4, batch=n))
        assert len(f.report().programs) == 20
        assert_bodies(20)

    @pytest.mark.xfail(
        raises=hcompile.ReuseLimitError, strict=True, reason="shapes count as bodies for the limit"
    )
    def test_calls_of_one_program(self):
        xs = [inputs(width=4, batch=n) for n in range(1, 21)]
        prepare = lambda w: jnp.linalg.inv(w @ w.T + jnp.eye(4))

        def program(mark, ws, xs):
            prepared, body = mark(prepare), mark(tanh_layer)
            ws = [prepared(w) for w in ws]
            return [functools.reduce(lambda x, w: body(w, x), ws, x) for x in xs]

        f = hcompile.jit(functools.partial(program, hcompile.region))
        got = f(weights(2), xs)
        assert_trees_close(got[6], jax.jit(program, static_argnums=0)(unmarked, weights(2), xs)[6])
        assert sorted(len(counts) for counts in regions(f).values()) == [1, 20]


def test_c50_several_kinds_of_blocks():
    """Two resolutions, five local layers to one global, experts, a cache that neighbours share."""

    def local(w, x):
        return jnp.tanh(x @ w)

    def globally(w, x):
        return jax.nn.softmax(x @ w @ x.T) @ x

    def experts(ws, x):
        return sum(jnp.tanh(x @ w) for w in ws)

    def cached(w, cache, x):
        cache = cache if cache is not None else x @ w
        return jnp.tanh(x + cache), cache

    def program(mark, ws, x, y):
        marked = [mark(f) for f in (local, globally, experts, cached)]
        cache, results = None, []
        for h in (x, y):
            for i, w in enumerate(ws):
                h = marked[1](w, h) if i % 6 == 5 else marked[0](w, h)
                if i % 4 == 3:
                    h = marked[2](ws[:2], h)
                h, cache = marked[3](w, None if i % 2 == 0 else cache, h)
            results.append(h)
        return results

    f = check_marks(program, weights(12), X, inputs(width=4, batch=7))
    assert {name: len(counts) for name, counts in regions(f).items()} == {
        "local.forward": 2,
        "globally.forward": 2,
        "experts.forward": 2,
        "cached.forward": 4,
    }


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def square(x):
    return x**2


square.defvjp(lambda x: (square(x), x), lambda x, g: (2 * x * g,))


@pytest.mark.parametrize(
    "activation", [jax.nn.relu, cube, square], ids=["relu", "custom_jvp", "custom_vjp"]
)
def test_c50_a_block_with_a_custom_rule_after_other_work(activation):
    """An expert with such an activation is called after an equation of the program: one body."""

    def program(body, ws, x):
        return square_loss(body, ws, x * 2)

    f = check(grads_of(program), lambda w, x: activation(x @ w), weights(3), X)
    assert_bodies(1)
    assert calls(f) == [3, 3]


class TestC51Repeated:
    def test_gradients_of_a_checkpointed_region(self):
        def program(mark, n, ws, x):
            f = lambda w, x: jnp.sum(jax.checkpoint(mark(tanh_layer))(w, x))
            return [jax.grad(f)(ws[0], x * i) for i in range(n)]

        counts = []
        for n in (3, 9):
            hcompile.clear_caches()
            f = hcompile.jit(functools.partial(program, hcompile.region, n))
            got = f(weights(1), X)
            assert_trees_close(got, jax.jit(functools.partial(program, unmarked, n))(weights(1), X))
            counts.append((only()["traces"] + only()["inlined"], len(calls(f))))
        assert counts[0] == counts[1]

    def test_an_eager_loop(self):
        traced = []

        @hcompile.region
        def inner(x):
            return jnp.sin(x)

        @hcompile.region
        @jax.jit
        def body(x):
            traced.append(1)
            return inner(inner(x))

        x = X
        for _ in range(10):
            x = body(x)
        assert len(traced) == 1
        assert hcompile.cache_info()["inner"]["traces"] == 1
