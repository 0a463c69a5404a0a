"""Situations users reported, C19 to C34: captures, state and effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Affine,
    LinenBlock,
    NnxBlock,
    X,
    assert_bodies,
    calls,
    chain,
    check,
    check_marks,
    each,
    grads_of,
    only,
    square_loss,
    unmarked,
    weights,
)
from flax import linen, nnx
from models import assert_trees_close

import hcompile

# --- C. Captures ------------------------------------------------------------------------------

STEP_SCALE = None


def reads_the_global(w, x):
    return jnp.tanh(x @ w) * STEP_SCALE


@pytest.mark.parametrize("scale", [2.0, jnp.float32(2)], ids=["number", "array"])
def test_c19_a_global_assigned_at_the_start_of_the_step(scale, monkeypatch):
    """Regions only read it."""

    def program(body, ws, x, scale_of_step):
        monkeypatch.setitem(globals(), "STEP_SCALE", scale_of_step * scale)
        return square_loss(body, ws, x)

    check(program, reads_the_global, weights(3), X, jnp.float32(3))
    assert_bodies(1)


class TestC20FunctionalModules:
    """Parameters come from a closure, the module is rebuilt around them."""

    def check(self, make, params):
        """``make(params)`` is a body, made anew for every layer."""

        def program(mark, params, x):
            for p in params:
                x = mark(make(p))(x)
            return jnp.mean(x**2)

        f = check_marks(grads_of(program), params, X)
        assert_bodies(1)
        closed = hcompile.jit(lambda x: program(hcompile.region, params, x))
        np.testing.assert_allclose(closed(X), f(params, X)[0], rtol=1e-6)
        assert calls(closed) == [len(params)]

    def test_linen(self):
        block = LinenBlock()
        params = [block.init(jax.random.key(i), X) for i in range(3)]
        self.check(lambda p: lambda x: block.apply(p, x), params)

    def test_nnx(self):
        graph, _ = nnx.split(NnxBlock(nnx.Rngs(0)))
        states = [nnx.split(NnxBlock(nnx.Rngs(i)))[1] for i in range(3)]
        self.check(lambda state: lambda x: nnx.merge(graph, state)(x), states)

    def test_plain_attributes(self):
        def make(w):
            def body(x):
                module = Affine(None)
                module.w = w
                return module(x)

            return body

        self.check(make, weights(3))


@pytest.mark.xfail(
    strict=True,
    reason="a cell of a method is reached through its class: written twice, by the trace and again",
)
def test_c21_a_module_that_assigns_an_enclosing_variable():
    """Not shared, right, and the report names the variable."""
    count = 0

    class Counting(Affine):
        def __call__(self, x):
            nonlocal count
            count += 1
            return super().__call__(x) * count

    def program(mark, ws, x):
        nonlocal count
        count = 0
        for w in ws:
            x = mark(lambda x, w=w: Counting(w)(x))(x)
        return x

    check_marks(program, weights(3), X)
    assert count == 3
    assert only()["inlined"] == 3
    assert "count" in " ".join(only()["explanations"])


PICKS = {
    "two containers": lambda ws, i: (ws["a"][i], ws["b"][i]),
    "a container in a container": lambda ws, i: (ws["nested"][0][i], ws["nested"][1]["x"][i]),
    "a table of numbers": lambda ws, i: (ws["a"][ws["table"][i]], ws["b"][ws["table"][i]]),
    "a fixed element": lambda ws, i: (ws["a"][i], ws["a"][1]),
    "numbers that coincide once": lambda ws, i: (ws["a"][i], ws["a"][ws["table"][i]]),
    "another shape": lambda ws, i: (ws["a"][i], ws["shapes"][i]),
    "another dtype": lambda ws, i: (ws["a"][i], ws["dtypes"][i]),
    "a Python number": lambda ws, i: (ws["a"][i], ws["numbers"][i]),
    "attributes by number": lambda ws, i: (getattr(ws["object"], f"layer{i}"), ws["b"][i]),
}


def containers():
    a, b = weights(8)[:4], [w * 2 for w in weights(8)[4:]]
    return {
        "a": a,
        "b": b,
        "nested": (b, {"x": a}),
        "table": [2, 1, 3, 0],
        "shapes": [b[0], jnp.float32(2), b[2], jnp.ones((1, 4))],
        "dtypes": [b[0], b[1], b[2].astype(jnp.bfloat16), b[3]],
        "numbers": [b[0], 0.5, b[2], 0.25],
        "object": type("Layers", (), {f"layer{i}": w for i, w in enumerate(a)})(),
    }


class TestC22AndC23PickedByNumber:
    """A layer number picks captured weights."""

    @pytest.mark.parametrize("captured", [True, False], ids=["captured", "an argument"])
    @pytest.mark.parametrize("name", PICKS)
    def test_every_layer_gets_its_own(self, name, captured):
        ws, pick = containers(), PICKS[name]

        def body(i, x):
            a, b = pick(ws, i)
            return jnp.tanh(x @ a) + x * jnp.sum(b)

        def program(mark, x):
            for i in range(4):
                x = mark(lambda x, i=i: body(i, x))(x) if captured else mark(body)(i, x)
            return x

        check_marks(program, X)

    def test_an_element_that_was_read_outside(self):
        ws = weights(3)

        def program(body, x):
            total = x @ ws[1]
            for i in range(3):
                x = body(i, x)
            return x + total

        check(program, lambda i, x: jnp.tanh(x @ ws[i]), X)


def test_c24_changed_layer_numbers():
    """They are changed after a program was compiled, and another program is made."""

    class Layer:
        def __init__(self, index):
            self.index = index

        def __call__(self, x):
            return jnp.tanh(x @ ws[self.index])

    ws = weights(4)
    layers = [Layer(i) for i in range(4)]
    for numbers in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 2, 0)):
        for layer, number in zip(layers, numbers, strict=True):
            layer.index = number
        check_marks(each(layers), X)


class TestC26FunctionsInFields:
    """A field holds a function that is made anew when the model is rebuilt."""

    @staticmethod
    def activation(slope):
        return lambda x: jnp.where(x > 0, x, slope * x)

    def check(self, make):
        class Layer(Affine):
            def __call__(self, x):
                return self.act(x @ self.w)

        for _ in range(2):
            layers = [Layer(w) for w in weights(3)]
            for layer in layers:
                layer.act = make()
            check_marks(each(layers), X)
        assert_bodies(1)

    def test_a_closure(self):
        self.check(lambda: self.activation(0.1))

    def test_a_partial(self):
        self.check(lambda: functools.partial(jax.nn.leaky_relu, negative_slope=0.1))

    @pytest.mark.xfail(strict=True, reason="a jitted function is known by its identity")
    def test_a_jitted_function(self):
        self.check(lambda: jax.jit(self.activation(0.1)))


class TestC27NnxModules:
    """``region(self.block)`` on nnx modules, plainly and under nnx transforms."""

    class Model(nnx.Module):
        def __init__(self, mark):
            self.blocks = nnx.List([NnxBlock(nnx.Rngs(i)) for i in range(3)])
            self.mark = mark

        def __call__(self, x):
            for block in self.blocks:
                x = self.mark(block)(x)
            return jnp.mean(x**2)

    def both(self, transform):
        """Result and state afterwards, marked and not."""
        for mark in (hcompile.region, lambda block: block):
            model = self.Model(mark)
            yield transform(lambda model, x: model(x))(model, X), nnx.state(model)

    @pytest.mark.parametrize(
        "transform",
        [nnx.jit, nnx.grad, nnx.value_and_grad, lambda f: nnx.jit(nnx.grad(f)), nnx.remat],
        ids=["jit", "grad", "value_and_grad", "jit of grad", "remat"],
    )
    def test_the_module_is_taken_apart(self, transform):
        assert_trees_close(*self.both(transform))
        assert only()["inlined"] == 0
        assert only()["traces"] == 1

    def test_under_vmap(self):
        transform = lambda f: nnx.vmap(f, in_axes=(None, 0))
        assert_trees_close(*self.both(transform))
        assert only()["inlined"] == 0

    def test_state_of_hcompile_jit(self):
        def step(mark, state, x):
            model = nnx.merge(graph, state)
            model.mark = mark
            return nnx.value_and_grad(lambda model: model(x))(model)

        graph, state = nnx.split(self.Model(None))
        assert calls(check_marks(step, state, X)) == [3, 3]


# --- D. State and effects ---------------------------------------------------------------------


class DropoutBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, key):
        h = jnp.tanh(self.norm(self.linear(x)))
        return self.dropout(h, rngs=nnx.Rngs(key))


class TestC28FlaxGuides:
    """The layer stack of Flax's scan and vmap guides, as a loop of regions."""

    def test_nnx_with_a_split_key_for_each_layer(self):
        graph, state = nnx.split([DropoutBlock(nnx.Rngs(i)) for i in range(3)])

        def step(mark, state, x, key):
            blocks = nnx.merge(graph, state)

            def loss(blocks):
                h, masks = x, []
                for block, key_of_layer in zip(blocks, jax.random.split(key, 3), strict=True):
                    out = mark(type(block).__call__)(block, h, key_of_layer)
                    masks.append(out == 0)
                    h = h + out
                return jnp.mean(h**2), masks

            (value, masks), grads = nnx.value_and_grad(loss, has_aux=True)(blocks)
            return value, masks, grads, nnx.state(blocks)

        f = check_marks(step, state, X, jax.random.key(0))
        masks = np.asarray(f(state, X, jax.random.key(0))[1])
        assert not any((masks[i] == masks[j]).all() for i, j in ((0, 1), (0, 2), (1, 2)))

    def test_nnx_modules_that_hold_their_streams(self):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(4, 4, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

            def __call__(self, x):
                return self.dropout(jnp.tanh(self.linear(x)))

        results = []
        for mark in (hcompile.region, unmarked):
            blocks = nnx.List([Block(nnx.Rngs(7)) for _ in range(3)])
            step = nnx.jit(lambda blocks, x, mark=mark: each(blocks)(mark, x))
            results.append((step(blocks, X), step(blocks, X), nnx.state(blocks)))
        assert_trees_close(*results)
        assert not np.array_equal(results[0][0], results[0][1])

    def test_linen_with_a_split_key_for_each_layer(self):
        class Block(linen.Module):
            @linen.compact
            def __call__(self, x):
                return linen.Dropout(0.5, deterministic=False)(jnp.tanh(linen.Dense(4)(x)))

        block = Block()
        params = [block.init({"params": k, "dropout": k}, X) for k in split(3)]

        def loss(body, params, keys, x):
            for p, key in zip(params, keys, strict=True):
                x = body(p, key, x)
            return jnp.mean(x**2)

        body = lambda p, key, x: x + block.apply(p, x, rngs={"dropout": key})
        f = check(grads_of(loss), body, params, split(3), X)
        assert_bodies(1)
        assert calls(f) == [3, 3]


def split(n):
    return list(jax.random.split(jax.random.key(5), n))


class TestC29WrittenReferences:
    """A region writes to a mutable array reference that it was given."""

    def add(ref, x):
        ref[...] += x[0]
        return x * 2

    def add_to_slices(ref, x):
        ref[0:3] += x[0, 0:3]
        ref[1:4] *= x[1, 0:3]
        return x + ref[...]

    @pytest.mark.parametrize("times", [1, 17])
    @pytest.mark.parametrize("body", [add, add_to_slices])
    def test_final_contents(self, body, times):
        def program(body, x):
            ref = jax.new_ref(jnp.ones(4))
            for _ in range(times):
                x = jnp.tanh(body(ref, x))
            return jax.freeze(ref), x

        with jax.numpy_rank_promotion("allow"):
            check(program, body, X)

    def test_a_reference_from_outside(self):
        results = []
        for jit, body in (
            (hcompile.jit, hcompile.region(type(self).add)),
            (jax.jit, type(self).add),
        ):
            ref = jax.new_ref(jnp.ones(4))
            f = jit(lambda ref, x, body=body: chain(ref, ref, ref)(body, x))
            results.append((f(ref, X), f(ref, X), ref[...]))
        assert_trees_close(*results)


@pytest.mark.parametrize("picked", [True, False], ids=["picked by number", "passed in"])
def test_c30_each_layer_updates_its_slot(picked):
    """A cache of references, one for each layer."""

    def program(body, x):
        cache = [jax.new_ref(jnp.full((4, 4), float(i))) for i in range(4)]

        def by_number(i, x):
            return body(cache[i], x)

        slot = hcompile.region(by_number) if body is not write else by_number
        for i in (2, 0, 3):
            x = slot(i, x) if picked else body(cache[i], x)
        return x, [jax.freeze(ref) for ref in cache]

    def write(ref, x):
        before = ref[...]
        ref[...] = x + before
        return jnp.tanh(x @ before)

    f = check(program, write, X)
    _, cache = f(X)
    np.testing.assert_array_equal(cache[1], 1.0)


def test_c31_a_region_that_writes_to_a_reference_is_differentiated():
    """The gradient, as under jax.jit."""

    def body(ref, x):
        ref[...] = ref[...] * 2 + x
        return jnp.sin(ref[...]) * x

    def program(body, x):
        def loss(x):
            ref = jax.new_ref(jnp.zeros((4, 4)))
            for _ in range(3):
                x = body(ref, x)
            return jnp.sum(x * ref[...])

        return jax.value_and_grad(loss)(x)

    check(program, body, X)


class Counter(nnx.Variable):
    pass


class StatefulBlock(nnx.Module):
    def __init__(self, rngs, records=True):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.count = Counter(jnp.int32(0))
        self.records = records

    def __call__(self, x):
        self.count[...] += 1
        h = self.norm(self.linear(x))
        if self.records:
            self.sow(nnx.Intermediate, "hidden", h)
        return jnp.tanh(h)


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
class TestC32NnxState:
    """Counters, batch statistics, intermediates and decode caches are updated inside a region."""

    def both(self, make, step):
        """Marked and unmarked: results of two steps, and the state afterwards."""
        for mark in (hcompile.region, unmarked):
            model = make()
            yield [step(mark, model), step(mark, model)], nnx.state(model)

    def blocks(self):
        return nnx.List([StatefulBlock(nnx.Rngs(i)) for i in range(3)])

    @pytest.mark.parametrize(
        "transform",
        [nnx.jit, nnx.grad, lambda f: nnx.jit(nnx.grad(f)), nnx.remat],
        ids=["jit", "grad", "jit of grad", "remat"],
    )
    def test_under_transforms(self, transform):
        def step(mark, blocks):
            return transform(lambda blocks, x: jnp.mean(each(blocks)(mark, x) ** 2))(blocks, X)

        got, want = self.both(self.blocks, step)
        assert_trees_close(got, want)
        assert got[1][0]["count"][...] > 0

    def test_under_custom_vjp(self):
        def step(mark, block):
            @nnx.custom_vjp
            def f(block, x):
                return jnp.mean(mark(block)(x) ** 2)

            def forward(block, x):
                return f(block, x), x

            def backward(x, g):
                (block_g, _), out_g = g
                return block_g, out_g * x

            f.defvjp(forward, backward)
            return nnx.jit(nnx.grad(f, argnums=1))(block, X)

        got, want = self.both(lambda: StatefulBlock(nnx.Rngs(0), records=False), step)
        assert_trees_close(got, want)
        assert got[1]["count"][...] == 2

    def test_decode_caches(self):
        def make():
            layers = [nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(i)) for i in range(2)]
            for layer in layers:
                layer.init_cache((1, 3, 4))
            return nnx.List(layers)

        @nnx.jit(static_argnums=0)
        def step(mark, layers):
            return each(layers)(mark, X[:1, None])

        got, want = self.both(make, step)
        assert_trees_close(got, want)
        assert got[1][0]["cache_index"][...] == 2


class TestC33AnIntermediateInAList:
    """The body stores an intermediate value; the outer function uses it after the call."""

    def test_a_list(self):
        def program(mark, ws, x):
            kept = []

            def body(w, x):
                h = x @ w
                kept.append(h)
                return jnp.tanh(h)

            body = mark(body)
            for w in ws:
                x = body(w, x)
            return x, kept, sum(h.sum() for h in kept)

        check_marks(program, weights(3), X)

    def test_an_attribute(self):
        class Recorder(Affine):
            def __call__(self, x):
                self.hidden = x @ self.w
                return jnp.tanh(self.hidden)

        def program(mark, ws, x):
            layers = [Recorder(w) for w in ws]
            x = each(layers)(mark, x)
            return x, [layer.hidden for layer in layers]

        check_marks(program, weights(3), X)


class TestC34Effects:
    """An FFI call with input-output aliases; ordered printing beside a written reference."""

    @pytest.mark.parametrize("used_after", [False, True])
    def test_an_ffi_call_with_aliases(self, used_after):
        factor = functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False)
        assert "output_operand_alias" in jax.jit(factor).lower(jnp.eye(4)).as_text()

        def body(w, x):
            a = w @ w.T + jnp.eye(4)
            low = factor(a)
            return jnp.tanh(x @ low) + (a.sum() if used_after else 0)

        f = check(square_loss, body, weights(3), X)
        assert_bodies(1)
        assert calls(f) == [3]

        def on_the_argument(a, x):
            return x @ factor(a) + a[:1]

        def program(body, ws, x):
            for w in ws:
                x = body(w @ w.T + jnp.eye(4), x)
                x = body(w * 0 + 2 * jnp.eye(4), x)
            return x

        check(program, on_the_argument, weights(2), X)

    def test_ordered_printing_and_a_written_reference(self, capfd):
        def body(ref, x):
            ref[...] += 1
            jax.debug.print("count {}", ref[...], ordered=True)
            return x * ref[...]

        def program(body, x):
            ref = jax.new_ref(jnp.float32(0))
            for _ in range(3):
                x = body(ref, x)
            return x, jax.freeze(ref)

        printed = []
        for f in (hcompile.jit(functools.partial(program, hcompile.region(body))),):
            got = f(X)
            jax.effects_barrier()
            printed.append(capfd.readouterr().out)
        want = jax.jit(functools.partial(program, body))(X)
        jax.effects_barrier()
        assert_trees_close(got, want)
        assert printed == [capfd.readouterr().out]
        assert printed[0].split("\n") == ["count 1.0", "count 2.0", "count 3.0", ""]
