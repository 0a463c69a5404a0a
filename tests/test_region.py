"""The mark: what a region is eagerly, under every transformation, and under hcompile.jit."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_trees_close, init_layers, inputs, layer

import hcompile


@pytest.fixture
def traces():
    """How often the body of the marked ``layer`` was traced."""
    return lambda name="layer": hcompile.cache_info()[name]["traces"]


marked = hcompile.region(layer)


class TestMark:
    def test_region_is_the_short_name(self):
        assert hcompile.region is hcompile.nested_compile_region

    def test_decorator_without_arguments(self):
        @hcompile.region
        def f(x):
            """Doc."""
            return x + 1

        assert (f.__name__, f.__doc__) == ("f", "Doc.")
        assert f(1) == 2

    def test_decorator_with_arguments(self):
        @hcompile.region(max_reuse_entries=2, options=hcompile.RegionOptions(residuals="all"))
        def f(x):
            return x + 1

        assert jax.jit(f)(1) == 2

    def test_eager_is_the_function_itself(self):
        seen = []

        @hcompile.region
        def f(x):
            seen.append(x)
            return x

        token = object()
        assert f(token) is token
        assert seen == [token]
        assert hcompile.cache_info() == {}

    def test_method_decorator(self):
        class Model:
            def __init__(self, w):
                self.w = w

            @hcompile.region
            def __call__(self, x):
                return x * self.w

        models = [Model(jnp.full(3, float(i))) for i in range(1, 4)]
        out = jax.jit(lambda x: functools.reduce(lambda x, m: m(x), models, x))(jnp.ones(3))
        np.testing.assert_array_equal(out, 6.0)
        (info,) = hcompile.cache_info().values()
        assert (info["calls"], info["traces"], info["inlined"]) == (3, 1, 0)

    def test_marked_partial(self):
        f = hcompile.region(functools.partial(lambda w, x: w * x, jnp.float32(3)))
        assert jax.jit(lambda x: f(f(x)))(2.0) == 18


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda ps, x: f(ps, x).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda ps, x: f(ps, x).sum())),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda ps, x: f(ps, x).sum())),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda ps, x: f(ps, x).sum())),
    "jvp": lambda f: lambda ps, x: jax.jvp(lambda x: f(ps, x), (x,), (jnp.ones_like(x),)),
    "linearize": lambda f: lambda ps, x: jax.linearize(lambda x: f(ps, x), x)[1](x),
    "hessian": lambda f: jax.hessian(lambda ps, x: f(ps, x).sum(), argnums=1),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=1),
    "jacrev": lambda f: jax.jacrev(f, argnums=1),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda ps, x: f(ps, x).sum()), in_axes=(None, 0)),
    "scan body": lambda f: lambda ps, x: jax.lax.scan(lambda c, _: (f(ps, c), None), x, length=2),
    "cond branch": lambda f: lambda ps, x: jax.lax.cond(x.sum() > 0, f, lambda ps, x: x, ps, x),
    "while body": lambda f: lambda ps, x: jax.lax.fori_loop(0, 2, lambda _, c: f(ps, c), x),
}


def run_stack(block, ps, x):
    for p in ps:
        x = block(p, x)
    return x


class TestTransforms:
    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_equals_the_unmarked_function(self, name, traces):
        ps, x = init_layers(3, width=4), inputs(width=4, batch=2)
        if name.startswith("vmap"):
            x = jnp.stack([x, 2 * x])
        transform = TRANSFORMS[name]
        got = transform(lambda ps, x: run_stack(marked, ps, x))(ps, x)
        want = transform(lambda ps, x: run_stack(layer, ps, x))(ps, x)
        assert_trees_close(got, want)
        assert traces() == 1

    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_equals_jit_inside_hcompile_jit(self, name):
        ps, x = init_layers(3, width=4), inputs(width=4, batch=2)
        if name.startswith("vmap"):
            x = jnp.stack([x, 2 * x])
        transform = TRANSFORMS[name]
        got = hcompile.jit(transform(lambda ps, x: run_stack(marked, ps, x)))(ps, x)
        want = jax.jit(transform(lambda ps, x: run_stack(layer, ps, x)))(ps, x)
        assert_trees_close(got, want)

    def test_eval_shape_and_make_jaxpr_trace_once(self, traces):
        ps, x = init_layers(3), inputs()
        out = jax.eval_shape(lambda ps, x: run_stack(marked, ps, x), ps, x)
        assert out.shape == x.shape
        jaxpr = jax.make_jaxpr(lambda ps, x: run_stack(marked, ps, x))(ps, x)
        bodies = {id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns}
        assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["jit"] * 3
        assert len(bodies) == 1
        assert traces() == 1

    def test_one_trace_for_each_shape_and_dtype(self, traces):
        p = init_layers(1)[0]
        for batch in (2, 3, 2, 3):
            jax.jit(lambda p, x: marked(p, marked(p, x)))(p, inputs(batch=batch))
        assert traces() == 2


Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array
    kind: str = dataclasses.field(metadata={"static": True})


class TestPytrees:
    @pytest.mark.parametrize(
        "argument",
        [
            {"b": 1.5, "a": [None, (jnp.ones(2),)]},
            Pair(jnp.ones(2), {"x": jnp.zeros(3)}),
            Box(jnp.ones(2), "k"),
            [(), {}, jnp.ones(1)],
            {"flag": True, "name": "s", "x": jnp.ones(2)},
            (np.ones(3), np.float32(2), 1j),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_any_structure_comes_back(self, argument):
        f = hcompile.region(lambda tree: tree)

        def run(f):
            results = []

            def program(x):
                results.append(f(argument))
                results.append(f(argument))
                return x

            jax.make_jaxpr(program)(1.0)
            return results

        want = jax.tree.map(type, argument)
        for got in run(f):
            assert jax.tree.structure(got) == jax.tree.structure(argument)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(argument), strict=True):
                assert isinstance(b, jax.Array) or type(a) is type(b)
        assert jax.tree.map(type, argument) == want

    def test_python_constants_among_outputs_come_back(self):
        @hcompile.region
        def f(x):
            return {"x": x * 2, "name": "layer", "size": x.shape[0], "none": None, "eps": 1e-5}

        seen = []

        @hcompile.jit
        def program(x):
            for _ in range(3):
                out = f(x)
                seen.append(out)
                x = out["x"]
            return x

        np.testing.assert_array_equal(program(jnp.ones(4)), 8.0)
        for out in seen:
            assert (out["name"], out["size"], out["none"], out["eps"]) == ("layer", 4, None, 1e-5)

    def test_returned_containers_are_the_callers_own(self):
        f = hcompile.region(lambda x: [x, x + 1])
        lengths = []

        @jax.jit
        def program(x):
            for _ in range(3):
                out = f(x)
                lengths.append(len(out))
                out.append(x)
                x = out[1]
            return x

        assert program(0.0) == 3
        assert lengths == [2, 2, 2]

    def test_keyword_arguments_and_defaults(self):
        @hcompile.region
        def f(x, *, scale=2.0, shift):
            return x * scale + shift

        out = jax.jit(lambda x: f(f(x, shift=1.0), shift=1.0, scale=3.0))(1.0)
        assert out == 10

    def test_a_flag_makes_two_bodies(self, traces):
        @hcompile.region
        def f(x, train):
            return x * 2 if train else x

        out = jax.jit(lambda x: f(f(f(x, True), False), True))(1.0)
        assert out == 4
        (info,) = hcompile.cache_info().values()
        assert (info["calls"], info["traces"]) == (3, 2)
        assert "arguments" in info["explanations"][0]
        assert "True" in info["explanations"][0]

    @pytest.mark.parametrize(
        ("first", "second"), [(1, 1.0), (1, True), (0.0, -0.0), ("a", b"a")], ids=repr
    )
    def test_constants_are_equal_in_value_and_type(self, first, second):
        seen = []

        @jax.jit
        def program(x):
            f = hcompile.region(lambda c, x: (c, x))
            seen.append(f(first, x)[0])
            seen.append(f(second, x)[0])
            return x

        program(1.0)
        assert list(map(repr, seen)) == [repr(first), repr(second)]

    def test_nan_equals_itself(self):
        f = hcompile.region(lambda c, x: x + c)
        jax.make_jaxpr(lambda x: f(float("nan"), f(float("nan"), x)))(1.0)
        (info,) = hcompile.cache_info().values()
        assert info["traces"] == 1


class TestInLine:
    """What cannot be reused runs as if unmarked, and says so."""

    def reasons(self):
        (info,) = hcompile.cache_info().values()
        assert info["inlined"] > 0
        return " ".join(info["explanations"])

    def test_an_object_of_unknown_equality(self):
        class Opaque:
            __slots__ = ()

        f = hcompile.region(lambda o, x: x + 1)
        assert jax.jit(lambda x: f(Opaque(), f(Opaque(), x)))(1.0) == 3
        assert "unknown equality" in self.reasons()

    def test_an_unknown_output(self):
        class Thing:
            pass

        thing = Thing()
        f = hcompile.region(lambda x: (x, thing))
        seen = []
        jax.jit(lambda x: seen.append(f(x)[1]) or x)(1.0)
        assert seen == [thing]
        assert "returns a" in self.reasons()

    def test_a_mutated_capture(self):
        log = []

        @hcompile.region
        def f(x):
            log.append(x.shape)
            return x + 1

        assert jax.jit(lambda x: f(f(x)))(jnp.zeros(2)).tolist() == [2, 2]
        assert log == [(2,), (2,)]
        assert "changed" in self.reasons()

    def test_a_mutated_self(self):
        class Model:
            def __init__(self):
                self.calls = 0

            @hcompile.region
            def __call__(self, x):
                self.calls += 1
                return x * self.calls

        model = Model()
        assert jax.jit(lambda x: model(model(x)))(1.0) == 2
        assert model.calls == 2

    def test_an_assigned_global(self):
        out = jax.jit(lambda x: assigns_a_global(assigns_a_global(x)))(1.0)
        assert out == 4
        assert "assigns the global" in self.reasons()

    def test_an_assigned_nonlocal(self):
        total = 0

        @hcompile.region
        def f(x):
            nonlocal total
            total += 1
            return x + total

        assert jax.jit(lambda x: f(f(x)))(0.0) == 3
        assert total == 2

    def test_concrete_values_are_needed(self):
        scale = jnp.float32(2)

        @hcompile.region
        def f(x):
            return x * 3 if float(scale) == 2 else x

        assert jax.jit(f)(1.0) == 3
        assert "ConcretizationTypeError" in self.reasons()


GLOBAL = 0


@hcompile.region
def assigns_a_global(x):
    global GLOBAL
    GLOBAL = 2
    return x * GLOBAL


class TestSwitch:
    def test_disabled_is_the_plain_program(self):
        ps, x = init_layers(3), inputs()
        f = hcompile.jit(lambda ps, x: run_stack(marked, ps, x))
        with hcompile.disabled():
            off = f(ps, x)
            assert f.report().programs == ()
            assert hcompile.cache_info() == {}
        on = f(ps, x)
        assert f.report().region_calls == 3
        assert_trees_close(on, off)

    def test_disable_jit(self):
        with jax.disable_jit():
            assert hcompile.jit(hcompile.region(lambda x: x + 1))(1) == 2


class TestLimit:
    def test_too_many_bodies_raise_and_name_the_difference(self):
        @hcompile.region(max_reuse_entries=2)
        def f(x, n):
            return x**n

        with pytest.raises(
            hcompile.ReuseLimitError,
            match=r"region 'f' .*max_reuse_entries=2(.|\n)*1\. first call(.|\n)*2\. .*was 2 and is "
            r"now 3 .*test_region.py(.|\n)*3\. .*was 3 and is now 4(.|\n)*as an array",
        ):
            hcompile.jit(lambda x: f(f(f(x, 2), 3), 4))(1.0)
        assert hcompile.jit(lambda x: f(f(x, 2), 3))(2.0) == 64

    def test_warn(self):
        f = hcompile.region(
            lambda x, n: x**n,
            max_reuse_entries=1,
            options=hcompile.RegionOptions(on_reuse_limit="warn"),
        )
        with pytest.warns(UserWarning, match="max_reuse_entries=1") as seen:
            assert hcompile.jit(lambda x: f(f(f(x, 2), 3), 2))(2.0) == 2**12
        assert len(seen) == 1

    def test_inline(self):
        f = hcompile.region(
            lambda x, n: jnp.sin(x) ** n,
            max_reuse_entries=1,
            options=hcompile.RegionOptions(on_reuse_limit="inline"),
        )
        step = hcompile.jit(lambda x: f(f(f(x, 2), 3), 2))
        np.testing.assert_allclose(
            step(2.0), jnp.sin(jnp.sin(jnp.sin(2.0) ** 2) ** 3) ** 2, rtol=1e-6
        )
        (info,) = hcompile.cache_info().values()
        assert (info["calls"], info["inlined"], info["bodies"]) == (3, 1, 1)
        assert "body number 2, and the limit is 1" in info["explanations"][-1]

    def test_shapes_of_one_program_count(self):
        f = hcompile.region(jnp.tanh, max_reuse_entries=2)
        g = hcompile.region(lambda x: jnp.tanh(x), max_reuse_entries=2)
        with pytest.raises(hcompile.ReuseLimitError, match="Pad the arguments"):
            hcompile.jit(lambda xs: [g(x) for x in xs])([jnp.ones(n) for n in (1, 2, 3)])
        out = hcompile.jit(lambda xs: [f(x) for x in xs])([jnp.ones(n) for n in (1, 2, 3)])
        assert len(out) == 3

    def test_programs_count_apart(self):
        @hcompile.region(max_reuse_entries=1)
        def f(x):
            return jnp.tanh(x)

        program = hcompile.jit(lambda x: f(f(x)))
        for n in range(1, 6):
            program(jnp.ones(n))
