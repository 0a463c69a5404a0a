"""Captures: lifted by path where they are arrays, compared at every call where they are not."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import hcompile

X = jnp.linspace(0.1, 1.0, 4)


def run(calls, x=X):
    """Chains ``calls`` under a fresh jit, and marked; returns the value and the counters."""
    got = jax.jit(lambda x: functools.reduce(lambda x, f: hcompile.region(f)(x), calls, x))(x)
    want = functools.reduce(lambda x, f: f(x), calls, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    (info,) = hcompile.cache_info().values()
    assert info["inlined"] == 0, info["explanations"]
    return info


def weights(n):
    return [jnp.full((4, 4), 0.1 * (i + 1)) for i in range(n)]


def make_closure(w):
    return lambda x: jnp.tanh(x @ w)


class Plain:
    def __init__(self, index, w):
        self.name = f"layer_{index}"
        self.index = index
        self.w = w

    def __call__(self, x):
        return jnp.tanh(x @ self.w)

    def apply(self, x):
        return self(x)


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: jax.Array
    scale: float = 1.0

    def __call__(self, x):
        return jnp.tanh(x @ self.w) * self.scale


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


class TestLifted:
    """Each of these is traced once for 12 layers with different weights."""

    CASES = {
        "closures": lambda: [make_closure(w) for w in weights(12)],
        "defaults": lambda: [lambda x, w=w: jnp.tanh(x @ w) for w in weights(12)],
        "keyword defaults": lambda: [lambda x, *, w=w: jnp.tanh(x @ w) for w in weights(12)],
        "partials": lambda: [
            functools.partial(lambda w, x: jnp.tanh(x @ w), w) for w in weights(12)
        ],
        "bound methods": lambda: [Plain(i, w).apply for i, w in enumerate(weights(12))],
        "callable objects": lambda: [Plain(i, w) for i, w in enumerate(weights(12))],
        "slotted objects": lambda: [Slotted(w) for w in weights(12)],
        "frozen dataclasses": lambda: [Frozen(w) for w in weights(12)],
        "closures over objects": lambda: [
            (lambda x, layer=Plain(i, w): layer(x)) for i, w in enumerate(weights(12))
        ],
        "nnx modules": lambda: [NnxBlock(nnx.Rngs(i)) for i in range(12)],
        "nnx methods": lambda: [NnxBlock(nnx.Rngs(i)).__call__ for i in range(12)],
        "containers": lambda: [
            (lambda x, tree={"a": [w, {"b": w + 1}]}: x @ tree["a"][0] + tree["a"][1]["b"][0])
            for w in weights(12)
        ],
    }

    @pytest.mark.parametrize("name", CASES)
    def test_traced_once(self, name):
        info = run(self.CASES[name]())
        assert (info["calls"], info["traces"]) == (12, 1), info["explanations"]

    @pytest.mark.parametrize("name", [None, "dense_{}"])
    def test_linen_modules(self, name):
        def layers():
            for i in range(12):
                module = linen.Dense(4, name=name and name.format(i))
                params = module.init(jax.random.key(i), X[None])
                yield lambda x, m=module, p=params: m.apply(p, x[None])[0]

        for _ in range(2):
            info = run(list(layers()))
        # A name could reach the program, so that each is traced once.
        traces = 1 if name is None else 12
        assert (info["traces"], info["bodies"]) == (traces, 1), info["explanations"]

    def test_equinox_modules(self):
        equinox = pytest.importorskip("equinox")

        def layers():
            return [equinox.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(12)]

        for _ in range(2):
            info = run(layers())
        assert (info["calls"], info["traces"]) == (24, 1), info["explanations"]

    def test_a_rebuilt_model_hits(self):
        for _ in range(3):
            info = run([Plain(i, w) for i, w in enumerate(weights(3))])
        assert (info["calls"], info["traces"]) == (9, 1)

    def test_one_array_in_two_places_is_two_inputs(self):
        def make(a, b):
            return lambda x: x @ a - x @ b

        w, v = weights(2)
        info = run([make(w, w), make(w, v), make(v, v)])
        assert info["traces"] == 1

    def test_traced_captures(self):
        def loss(ws, x):
            for w in ws:
                x = hcompile.region(make_closure(w))(x)
            return x.sum()

        def plain(ws, x):
            for w in ws:
                x = make_closure(w)(x)
            return x.sum()

        ws = weights(4)
        got = hcompile.jit(jax.value_and_grad(loss))(ws, X)
        want = jax.jit(jax.value_and_grad(plain))(ws, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
        (info,) = hcompile.cache_info().values()
        assert (info["traces"], info["inlined"]) == (1, 0)

    def test_caches_keep_neither_arrays_nor_functions_alive(self):
        import gc
        import weakref

        class Big(Plain):
            pass

        layers = [Big(i, w) for i, w in enumerate(weights(2))]
        run(layers)
        gone = [weakref.ref(layer) for layer in layers]
        layers.clear()
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


SCALE = 2.0
ARRAY = jnp.float32(2)


def helper(x):
    return x * SCALE


def uses_helper(x):
    return helper(x) + 1


def uses_array(x):
    return x * ARRAY


class TestGuards:
    """Whatever is rebound between two calls is seen by the second."""

    def trace_twice(self, fn, change):
        """Values of ``fn`` under fresh jits before and after ``change``, and unmarked ones."""
        marked = hcompile.region(fn)
        got, want = [], []
        for _ in range(2):
            got.append(jax.jit(lambda x: marked(marked(x)))(X))
            want.append(fn(fn(X)))
            change()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert not np.array_equal(got[0], got[1])
        (info,) = hcompile.cache_info().values()
        return info

    def test_a_rebound_global_of_a_helper(self, monkeypatch):
        info = self.trace_twice(uses_helper, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))
        assert info["traces"] == 2
        assert "global SCALE was 2.0 and is now 3.0" in info["explanations"][0]

    def test_a_swapped_helper(self, monkeypatch):
        change = lambda: monkeypatch.setitem(globals(), "helper", lambda x: x - 1)
        assert self.trace_twice(uses_helper, change)["traces"] == 2

    def test_a_rebound_global_array_is_an_input(self, monkeypatch):
        change = lambda: monkeypatch.setitem(globals(), "ARRAY", jnp.float32(5))
        assert self.trace_twice(uses_array, change)["traces"] == 1

    def test_a_changed_cell(self):
        scale = 2.0

        def f(x):
            return x * scale

        def change():
            nonlocal scale
            scale += 1

        assert self.trace_twice(f, change)["traces"] == 2

    def test_a_changed_default(self):
        def f(x, scale=2.0):
            return x * scale

        def change():
            f.__defaults__ = (3.0,)

        assert self.trace_twice(f, change)["traces"] == 2

    def test_a_changed_list_element(self):
        scales = [1.0, 2.0]
        change = lambda: scales.__setitem__(1, 5.0)
        assert self.trace_twice(lambda x: x * scales[1], change)["traces"] == 2

    def test_a_mutated_attribute(self):
        layer = Plain(0, 2.0)
        layer.config = types.SimpleNamespace(scale=2.0)
        change = lambda: setattr(layer.config, "scale", 4.0)
        assert self.trace_twice(lambda x: x * layer.config.scale, change)["traces"] == 2

    def test_a_class_attribute_read_by_a_method(self):
        class Layer:
            scale = 2.0

            def __call__(self, x):
                return self.inner(x)

            def inner(self, x):
                return x * self.scale

        change = lambda: setattr(Layer, "scale", 3.0)
        assert self.trace_twice(Layer(), change)["traces"] == 2

    def test_a_global_read_by_a_method(self, monkeypatch):
        class Layer:
            def __call__(self, x):
                return helper(x)

        change = lambda: monkeypatch.setitem(globals(), "SCALE", 3.0)
        assert self.trace_twice(Layer(), change)["traces"] == 2

    @pytest.mark.parametrize("base", [nnx.Module, Plain, object], ids=lambda b: b.__name__)
    def test_an_attribute_of_a_base_class(self, base):
        class Base(base):
            scale = 2.0

            def __init__(self):
                self.w = jnp.ones(4)

        class Block(Base):
            def __call__(self, x):
                return x * self.scale * self.w

        block = Block()
        assert self.trace_twice(block, lambda: setattr(Base, "scale", 3.0))["traces"] == 2

    def test_units_of_a_date(self):
        dates = [np.datetime64(1, "s"), np.datetime64(1, "ms")]
        f = hcompile.region(lambda x, d: x * (d - np.datetime64(0, "ms")).astype(int))
        assert jax.jit(lambda x: [f(x, d) for d in dates])(1) == [1000, 1]

    def test_a_replaced_method(self):
        class Layer:
            def __call__(self, x):
                return self.inner(x)

            def inner(self, x):
                return x * 2

        change = lambda: setattr(Layer, "inner", lambda self, x: x * 3)
        assert self.trace_twice(Layer(), change)["traces"] == 2

    def test_a_function_attribute(self):
        def f(x):
            return x * f.scale

        f.scale = 2.0
        assert self.trace_twice(f, lambda: setattr(f, "scale", 3.0))["traces"] == 2

    def test_a_namespace_class_and_a_module(self):
        module = types.ModuleType("user_config")
        module.scale = 2.0
        change = lambda: setattr(module, "scale", 3.0)
        assert self.trace_twice(lambda x: x * module.scale, change)["traces"] == 2

    def test_a_small_numpy_table(self):
        table = np.array([1, 2])
        change = lambda: table.__setitem__(1, 3)
        assert self.trace_twice(lambda x: x * int(table[1]), change)["traces"] == 2

    def test_a_library_object_is_compared_whole(self):
        from flax import linen

        def make(features):
            dense = linen.Dense(features, kernel_init=linen.initializers.ones)
            return lambda x: dense.apply({"params": dense.init(KEY, x)["params"]}, x).sum() + x

        got = jax.jit(lambda x: hcompile.region(make(5))(hcompile.region(make(2))(x)))(X)
        np.testing.assert_allclose(got, make(5)(make(2)(X)), rtol=1e-5)

    def test_equal_code_in_different_modules(self):
        """Two files can hold functions with equal code objects and different globals."""
        source = "def f(x):\n    return x * SCALE\n"
        functions = []
        for scale in (2.0, 3.0):
            module = {"SCALE": scale, "__name__": "user_module"}
            exec(compile(source, "same.py", "exec"), module)
            functions.append(module["f"])
        assert functions[0].__code__ == functions[1].__code__
        got = jax.jit(lambda x: hcompile.region(functions[1])(hcompile.region(functions[0])(x)))(X)
        np.testing.assert_allclose(got, X * 6, rtol=1e-6)

    def test_a_string_chooses_the_operation(self):
        class Layer:
            def __init__(self, kind):
                self.kind = kind

            def __call__(self, x):
                return x * 2 if self.kind == "double" else x * x

        info = run([Layer("double"), Layer("square"), Layer("double")])
        assert info["traces"] == 2
        assert "kind was 'double' and is now 'square'" in info["explanations"][0]

    def test_an_unread_name_does_not_count_and_a_read_one_does(self):
        class Named(Plain):
            def __call__(self, x):
                with jax.named_scope(self.name):
                    return super().__call__(x)

        assert run([Plain(i, w) for i, w in enumerate(weights(3))])["traces"] == 1
        hcompile.clear_caches()
        assert run([Named(i, w) for i, w in enumerate(weights(3))])["traces"] == 3


KEY = jax.random.key(0)


class TestWhatCodeCanSee:
    """Python code sees more of its arguments than arrays and shapes."""

    def check(self, fn, *calls, traces=None, inlined=0):
        """Chains marked calls of ``fn`` with these first arguments, against unmarked ones."""
        marked = hcompile.region(fn)

        def chain(f):
            def program(x):
                for call in calls:
                    x = f(call, x)
                return x

            return program

        got, want = jax.jit(chain(marked))(X), jax.jit(chain(fn))(X)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == want.dtype
        (info,) = hcompile.cache_info().values()
        assert info["inlined"] == inlined, info["explanations"]
        assert traces is None or info["traces"] == traces

    def test_the_order_of_a_dict(self):
        first = {"up": jnp.full((4, 4), 0.5), "down": jnp.full((4, 4), -0.1)}
        second = {"down": first["down"], "up": first["up"]}

        def f(tree, x):
            for w in tree.values():
                x = jnp.tanh(x @ w) + x[0]
            return x

        self.check(f, first, second, first, traces=2)

    def test_the_order_of_a_returned_dict(self):
        @hcompile.region
        def f(x):
            return {"b": x * 2, "a": [{"d": x, "c": 1}]}

        seen = []
        jax.make_jaxpr(lambda x: [seen.append(f(x)) for _ in range(2)] and x)(1.0)
        assert [(list(out), list(out["a"][0])) for out in seen] == [(["b", "a"], ["d", "c"])] * 2

    def test_keys_that_cannot_be_sorted(self):
        table = {"relu": 2.0, None: 3.0, 1: 4.0}
        self.check(lambda key, x: x * table[key], "relu", None, 1, "relu", traces=3)

    def test_which_arrays_are_one(self):
        a, b = jnp.ones(4), jnp.ones(4) * 2
        fn = lambda pair, x: x * pair[0] + 1 if pair[0] is pair[1] else x - pair[1]
        self.check(fn, (a, a), (a, b), (b, b), traces=2)

    def test_static_data_of_a_pytree(self):
        @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["c"])
        @dataclasses.dataclass
        class Node:
            w: jax.Array
            c: object

        nodes = [Node(X, c) for c in (2, 2.0, True, 0.0, -0.0)]
        self.check(lambda node, x: x + node.w / (1 + node.c), *nodes, traces=5)

    @pytest.mark.parametrize(
        "fn",
        [
            lambda o, x: x * dataclasses.asdict(o)["scale"],
            lambda o, x: x * getattr(o, "scale"),  # noqa: B009
            lambda o, x: x * o.__getattribute__("scale"),
            lambda o, x: x * dataclasses.replace(o).scale,
        ],
    )
    def test_attributes_read_without_their_name(self, fn):
        @dataclasses.dataclass
        class Config:
            scale: float

        self.check(fn, Config(2.0), Config(3.0), traces=2)

    def test_attributes_of_a_number(self):
        class Scaled(int):
            scale = 1.0

        one, two = Scaled(1), Scaled(1)
        two.scale = 5.0
        self.check(lambda o, x: x * o.scale, one, two, inlined=2)

    def test_random_numbers_are_drawn_at_each_call(self):
        import random

        values = []

        def f(_, x):
            values.append(random.random())
            return x

        marked = hcompile.region(f)
        jax.make_jaxpr(lambda x: marked(0, marked(0, x)))(1.0)
        assert len(set(values)) == 2

    def test_bound_builtins_have_state(self):
        table = {"a": 2.0}
        get = table.get
        self.check(lambda _, x: x * get("a"), 0, 0, inlined=2)

    def test_a_cache_on_the_class(self):
        class Rope:
            cache = {}

            def __call__(self, x):
                if x.shape not in Rope.cache:
                    Rope.cache[x.shape] = jnp.ones(x.shape) * 2
                return x * Rope.cache[x.shape]

        rope = Rope()
        got = jax.jit(lambda x: hcompile.region(rope)(hcompile.region(rope)(x)))(X)
        np.testing.assert_allclose(got, X * 4)

    def test_a_custom_rule_that_closes_over_an_array(self):
        def body(w, x):
            @jax.custom_vjp
            def scale(x):
                return x * w.sum()

            scale.defvjp(lambda x: (x * w.sum(), ()), lambda _, t: (t * w.sum() * 2,))
            return scale(x)

        f = hcompile.region(body)
        got = jax.jit(jax.grad(lambda x: f(X, f(X + 1, x)).sum()))(X)
        want = jax.jit(jax.grad(lambda x: body(X, body(X + 1, x)).sum()))(X)
        np.testing.assert_allclose(got, want, rtol=1e-6)


class TestNumpy:
    """A NumPy array is a constant with NumPy's semantics, however large."""

    @pytest.mark.parametrize(
        "fn",
        [
            lambda t, x: x + np.asarray((t * 2654435761 % 1000)[:4], np.float32),
            lambda t, x: x + t.sum() // 2**20,
            lambda t, x: x * 2 if isinstance(t, np.ndarray) else x * 3,
        ],
    )
    def test_values_are_numpys(self, fn):
        table = np.arange(2048) + 2**24
        marked = hcompile.region(fn)
        got = jax.jit(lambda x: marked(table, marked(table, x)))(X)
        np.testing.assert_allclose(got, fn(table, fn(table, X)), rtol=1e-6)
        (info,) = hcompile.cache_info().values()
        assert (info["traces"], info["inlined"]) == (1, 0)

    def test_a_written_array_runs_in_line(self):
        table = np.ones(2048, np.float32)

        def f(x):
            table.__imul__(2)
            return x + table[:4]

        want = jax.jit(lambda x: f(f(x)))(X)
        table[:] = 1
        got = jax.jit(lambda x: hcompile.region(f)(hcompile.region(f)(x)))(X)
        np.testing.assert_allclose(got, want)
        assert table[0] == 4


class TestContexts:
    """What JAX puts into a trace's key splits a body too, and comes back after."""

    def test_x64(self):
        f = hcompile.region(lambda x: x + jnp.arange(2).sum())

        def dtype():
            return jax.make_jaxpr(lambda x: f(f(x)))(np.float64(1)).out_avals[0].dtype

        assert dtype() == jnp.float32
        with jax.enable_x64(True):
            assert dtype() == jnp.float64
        assert dtype() == jnp.float32

    def test_matmul_precision(self):
        f = hcompile.region(lambda x: x @ x)
        w = jnp.ones((2, 2))

        def text():
            return str(jax.make_jaxpr(lambda x: f(f(x)))(w))

        plain = text()
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in text()
        assert text() == plain
