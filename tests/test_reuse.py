"""The reuse machinery: bodies for what differs in numbers and names, keys, counters, logs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_trees_close

import hcompile
from hcompile import _body, _reuse

N = 6
WS = [jnp.eye(4) * (1 + i / 10) for i in range(N)]
BS = [jnp.full((1, 4), float(i)) for i in range(N)]
PERMUTATION = [3, 0, 5, 1, 4, 2]
TREE = [{"w": w, "b": b} for w, b in zip(WS, BS, strict=True)]


def scale(x, i):
    return jnp.tanh(x @ WS[0]) * (1 - i / 40)


def drop_path(x, i):
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 1 - i / 50, x.shape)
    return jnp.where(keep, jax.nn.leaky_relu(x @ WS[0], i / 20), 0.0)


def pick(x, i):
    return jnp.tanh(x @ WS[i] + BS[i])


def pick_through_a_table(x, i):
    return jnp.tanh(x @ WS[PERMUTATION[i]] + BS[i])


def pick_inside(x, i):
    return jnp.tanh(x @ TREE[i]["w"] + TREE[PERMUTATION[i]]["b"])


def pick_by_name(x, i):
    layers = {f"layer_{k}": {"w": w} for k, w in enumerate(WS)}
    return jnp.tanh(x @ layers[f"layer_{i}"]["w"])


def named(x, i):
    with jax.named_scope(f"layer_{i}"):
        return jnp.tanh(x @ WS[0])


def asks_for_the_type(x, i):
    return x @ WS[0] * (2.0 if isinstance(i, int) else 3.0)


def branches(x, i):
    return x @ WS[0] * 2.0 if i % 2 else jnp.tanh(x @ WS[1])


def formats(x, i):
    return x @ WS[len(f"{i * 4}")]


def hashes(x, i):
    return x @ {0: WS[1], 1: WS[2]}.get(i, WS[0])


def stack(layer):
    def program(x):
        for i in range(N):
            x = layer(x, i)
        return (x**2).sum()

    return program


class TestLayerNumbers:
    @pytest.mark.parametrize(
        "layer",
        [scale, drop_path, pick, pick_through_a_table, pick_inside, pick_by_name, named],
        ids=lambda f: f.__name__,
    )
    @pytest.mark.parametrize(
        "transform", [lambda f: f, jax.value_and_grad], ids=["forward", "grad"]
    )
    def test_one_body_and_each_layer_its_own(self, layer, transform):
        x = jnp.linspace(-1, 1, 12).reshape(3, 4)
        step = hcompile.jit(transform(stack(hcompile.region(layer, max_reuse_entries=1))))
        assert_trees_close(step(x), jax.jit(transform(stack(layer)))(x))
        info = hcompile.cache_info()[layer.__name__]
        assert (info["calls"], info["inlined"], info["bodies"]) == (N, 0, 1)
        regions = [p for p in step.report().programs[-1].parts if p.kind == "region"]
        assert [p.calls for p in regions] == [N] * len(regions)
        assert len(regions) <= 2

    @pytest.mark.parametrize(
        "layer", [asks_for_the_type, branches, formats, hashes], ids=lambda f: f.__name__
    )
    def test_what_looks_at_the_number_is_right(self, layer):
        x = jnp.linspace(-1, 1, 12).reshape(3, 4)
        got = hcompile.jit(stack(hcompile.region(layer)))(x)
        assert_trees_close(got, jax.jit(stack(layer))(x))

    @pytest.mark.parametrize("layer", [scale, pick_inside, named], ids=lambda f: f.__name__)
    def test_traces_that_are_equal_become_one_jaxpr(self, layer):
        jaxpr = jax.make_jaxpr(stack(hcompile.region(layer)))(jnp.ones((3, 4)))
        calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
        assert len(calls) == N
        inner = [next(iter(eqn.params["jaxpr"].eqns)).params.get("jaxpr") for eqn in calls[1:]]
        assert len(set(map(id, inner))) == 1

    def test_rules_of_differentiation_keep_bodies_apart(self):
        def layer(x, factor):
            @jax.custom_jvp
            def f(x):
                return jnp.sin(x)

            f.defjvp(lambda p, t: (f(*p), factor * t[0]))
            return f(x)

        marked = hcompile.region(layer)
        for step in (jax.jit, hcompile.jit):
            got = step(jax.grad(lambda x: marked(marked(marked(x, 2.0), 3.0), 5.0)))(1.0)
            assert got == 30

    def test_a_second_program_traces_nothing(self):
        layer = hcompile.region(pick)
        x = jnp.ones((3, 4))
        hcompile.jit(stack(layer))(x)
        before = hcompile.cache_info()["pick"]["traces"]
        hcompile.jit(jax.grad(stack(layer)))(x)
        assert hcompile.cache_info()["pick"]["traces"] == before

    def test_numbers_that_agree_stay_constants(self):
        @hcompile.region
        def layer(x, i):
            return jnp.tanh(x * 2.0) * i

        step = hcompile.jit(lambda x: layer(layer(layer(x, 1.5), 2.5), 1.5))
        np.testing.assert_allclose(
            step(1.0),
            jax.jit(lambda x: jnp.tanh(2 * (jnp.tanh(2 * (jnp.tanh(2 * x) * 1.5)) * 2.5)) * 1.5)(
                1.0
            ),
            rtol=1e-6,
        )
        lowered = hcompile.jit(lambda x: layer(layer(x, 1.5), 2.5)).trace(1.0)
        body = next(iter(lowered.jaxpr.eqns))
        assert "2.0" in str(body)

    def test_attributes_of_modules(self):
        class Block:
            def __init__(self, w, index, name):
                self.w, self.index, self.name = w, index, name

            @hcompile.region
            def __call__(self, x):
                with jax.named_scope(self.name):
                    return jnp.tanh(x @ self.w) * self.index

        blocks = [Block(w, i + 1, f"block{i}") for i, w in enumerate(WS)]

        def program(x):
            for block in blocks:
                x = block(x)
            return x

        step = hcompile.jit(program)
        got = step(jnp.ones((2, 4)))
        with hcompile.disabled():
            assert_trees_close(got, jax.jit(lambda x: program(x))(jnp.ones((2, 4))))
        (info,) = hcompile.cache_info().values()
        assert (info["bodies"], info["traces"]) == (1, N)
        assert step.report().programs[0].parts[0].calls == N

    def test_two_functions_with_one_body_share_the_executable(self):
        f = hcompile.region(lambda x: jnp.tanh(x) * 2)
        g = hcompile.region(lambda y: 2 * jnp.tanh(y) if False else jnp.tanh(y) * 3)
        report = hcompile.jit(lambda x: g(f(g(f(x))))).lower(1.0).compile().report()
        (region,) = [p for p in report.programs[0].parts if p.kind == "region"]
        assert region.calls == 4


class TestNumbers:
    """Every number is traced, whatever Python does with it; bodies that differ in it are one."""

    def bodies(self, layer, calls):
        """How many bodies a step of these calls has, after comparing with the plain step."""

        def program(f):
            def step(x):
                for args, kwargs in calls:
                    x = f(x, *args, **kwargs)
                return x

            return step

        x = jnp.float32(1)
        got = hcompile.jit(program(hcompile.region(layer)))(x)
        assert_trees_close(got, jax.jit(program(layer))(x))
        info = hcompile.cache_info()[layer.__name__]
        assert info["inlined"] == 0, info
        return info["bodies"]

    @pytest.mark.parametrize(
        "expression",
        [
            "x * n",
            "n * x + n",
            "x * (1 - n / 40)",
            "x - 2 * n + 3",
            "x * 0.9**n",
            "x + n**2",
            "jnp.where(x > n, x, -n)",
            "jnp.clip(x, -n, n)",
            "x + jnp.full((), n)",
            "x + jax.random.normal(jax.random.fold_in(jax.random.key(0), n), ())",
            "x * jnp.sqrt(n + 1.0)",
            "jax.nn.leaky_relu(x, n)",
        ],
    )
    def test_arithmetic(self, expression):
        space = {"jnp": jnp, "jax": jax}
        exec(f"def layer(x, n): return {expression}", space)
        assert self.bodies(space["layer"], [((n,), {}) for n in range(1, 9)]) == 1

    @pytest.mark.parametrize(
        "expression",
        [
            "x * n if n > 3 else x - n",
            "x + (n if isinstance(n, int) else 0.5)",
            "x + n if type(n) is int else x",
            "x + len(str(n))",
            "x + len(f'{n * 3}')",
            "x + {4: 7}.get(n, 1)",
            "x + (n in (2, 3))",
            "x + bool(n % 2)",
            "x + jnp.arange(n).sum()",
            "x + math.sqrt(n)",
            "x + n // 2",
            "x + n.bit_length() if hasattr(n, 'bit_length') else x",
            "x + int(n)",
            "x + round(n / 3)",
            "x * 100 if n is LAST else x * n",
            "x * ((np.uint8(200) + n) * 0.5)",
            "x * (n / np.sqrt(3.0))",
            "x * 2 if np.array_equal(n, 5) else x * n",
            "x * jnp.float32(n) ** 2 + jnp.bfloat16(n)",
        ],
    )
    def test_what_looks_at_the_number(self, expression):
        space = {"jnp": jnp, "jax": jax, "math": math, "np": np, "LAST": 20}
        exec(f"def layer(x, n): return {expression}", space)
        self.bodies(space["layer"], [((n,), {}) for n in (1, 2, 3, 4, 5, 20)])

    def test_a_caught_error(self):
        def layer(x, n):
            try:
                return x * 2 if n > 3 else x
            except Exception:
                return x

        assert self.bodies(layer, [((n,), {}) for n in (1, 2, 5)]) == 2

    def test_keywords_and_several_numbers(self):
        def layer(x, *, index, rate, kind):
            return x * rate + index if kind == "a" else x - rate

        calls = [((), {"index": i, "rate": i / 10, "kind": "ab"[i % 2]}) for i in range(8)]
        assert self.bodies(layer, calls) == 2

    def test_captured_numbers(self):
        class Block:
            def __init__(self, index):
                self.index, self.inner = index, [index * 2, 3]

            @hcompile.region
            def __call__(self, x):
                return jnp.sin(x) * self.index + self.inner[0]

        blocks = [Block(i) for i in range(1, 9)]
        step = hcompile.jit(lambda x: functools.reduce(lambda x, b: b(x), blocks, x))
        got = step(1.0)
        want = functools.reduce(lambda x, i: jnp.sin(x) * i + 2 * i, range(1, 9), 1.0)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        (info,) = hcompile.cache_info().values()
        assert (info["traces"], info["bodies"], info["inlined"]) == (8, 1, 0)

    def test_a_number_too_large_for_the_literal(self):
        f = hcompile.region(lambda x, n: x + n * 100_000_000)
        jax.jit(lambda x: f(f(x, 1), 2))(1)
        for n in (21, 22, 400):
            plain = jax.jit(lambda x, n=n: x + n * 100_000_000)
            try:
                want = plain(1)
            except OverflowError:
                with pytest.raises(OverflowError, match=r"overflow|too large|out of bounds"):
                    jax.jit(lambda x, n=n: f(x, n))(1)
            else:
                assert jax.jit(lambda x, n=n: f(x, n))(1) == want

    def test_gradients(self):
        f = hcompile.region(lambda x, n: jnp.sin(x) * (1 - n / 20))
        g = lambda x, n: jnp.sin(x) * (1 - n / 20)

        def loss(f):
            return lambda x: functools.reduce(f, range(8), x)

        step = hcompile.jit(jax.value_and_grad(loss(f)))
        assert_trees_close(step(1.0), jax.jit(jax.value_and_grad(loss(g)))(1.0))
        regions = [p for p in step.report().programs[0].parts if p.kind == "region"]
        assert [p.calls for p in regions] == [8, 8]


class TestOutputs:
    def test_a_result_that_is_an_argument_is_not_computed(self):
        @hcompile.region
        def f(x, y):
            z = jnp.sin(x)
            return x, z, z, (y, 3, None)

        @hcompile.jit
        def step(x, y):
            a, b, c, (y, three, none) = f(x, y)
            assert (three, none) == (3, None)
            d, e, _, (y, _, _) = f(b, y)
            return a + c, d * e, y

        x, y = jnp.ones(3), jnp.arange(4.0)
        assert_trees_close(step(x, y), (1 + jnp.sin(x), jnp.sin(x) * jnp.sin(jnp.sin(x)), y))
        region = step.report().programs[0].parts[0]
        assert (region.kind, region.calls, region.equations) == ("region", 2, 1)

    def test_what_is_not_used_is_not_an_input(self):
        f = hcompile.region(lambda big, x: (big["a"] * 0, jnp.sin(x))[1])
        step = hcompile.jit(lambda big, x: f(big, f(big, x)))
        big = {"a": jnp.ones(3), "b": jnp.ones(5)}
        np.testing.assert_allclose(step(big, 1.0), jnp.sin(jnp.sin(1.0)), rtol=1e-6)
        region = step.report().programs[0].parts[0]
        assert (region.calls, region.equations) == (2, 1)


class TestReuseHash:
    def test_equal_numbers_reuse_and_lift_captures(self):
        tables = [{"w": jnp.full(2, float(i)), "name": f"t{i}"} for i in range(1, 4)]

        @hcompile.jit
        def program(x):
            for table in tables:
                x = hcompile.region(lambda x, t=table: x * t["w"], reuse_hash_fn=KEY)(x)
            return x

        np.testing.assert_array_equal(program(jnp.ones(2)), 6.0)
        (info,) = hcompile.cache_info().values()
        assert info["traces"] == 1

    @pytest.mark.parametrize(
        ("reuse_hash_fn", "message"),
        [
            (lambda x: 1.5, "returned 1.5"),
            (lambda x: True, "returned True"),
            (lambda x: 1 / 0, "raised ZeroDivisionError"),
            (lambda x: x.astype(int), "returned .*JitTracer"),
        ],
    )
    def test_a_bad_hash_raises(self, reuse_hash_fn, message):
        f = hcompile.region(lambda x: x, reuse_hash_fn=reuse_hash_fn)
        with pytest.raises(RuntimeError, match=message):
            jax.jit(f)(1.0)

    @pytest.mark.parametrize("layer", [pick, pick_through_a_table], ids=lambda f: f.__name__)
    def test_each_layer_gets_the_weights_that_its_number_picks(self, layer):
        x = jnp.ones((3, 4))
        f = hcompile.region(layer, reuse_hash_fn=lambda x, i: 0, max_reuse_entries=1)
        assert_trees_close(hcompile.jit(stack(f))(x), jax.jit(stack(layer))(x))
        assert hcompile.cache_info()[layer.__name__]["bodies"] == 1

    def test_another_shape_or_structure_is_another_body(self):
        f = hcompile.region(lambda x: jax.tree.map(lambda a: a * 2, x), reuse_hash_fn=KEY)
        out = jax.jit(lambda x, y: (f(x), f(y), f([x, y])))(jnp.ones(2), jnp.ones(3))
        assert_trees_close(
            out, (2 * jnp.ones(2), 2 * jnp.ones(3), [2 * jnp.ones(2), 2 * jnp.ones(3)])
        )

    @pytest.mark.parametrize("under", [jax.jit, hcompile.jit], ids=["jit", "hcompile.jit"])
    def test_a_region_that_cannot_be_reused(self, under):
        log = []

        def f(x):
            log.append(x)
            return x

        f = hcompile.region(f, reuse_hash_fn=KEY)
        with pytest.raises(RuntimeError, match=r"region '.*f' was given a reuse_hash_fn.*changed"):
            under(f)(1.0)

    def test_a_result_that_cannot_be_shared(self):
        f = hcompile.region(lambda x: (x, object()), reuse_hash_fn=KEY)
        with pytest.raises(RuntimeError, match="cannot: the body returns a object"):
            jax.jit(lambda x: f(x)[0])(1.0)

    def test_the_number_is_computed_at_each_call(self):
        class Model:
            kind = 1

            def __call__(self, x):
                return x * self.kind

        model = Model()
        f = hcompile.region(model, reuse_hash_fn=lambda x: model.kind)
        assert jax.jit(lambda x: f(x))(1.0) == 1
        model.kind = 2
        assert jax.jit(lambda x: f(x))(1.0) == 2
        (info,) = hcompile.cache_info().values()
        assert "the number of reuse_hash_fn was 1 and is now 2" in info["explanations"][0]


def KEY(x):
    return 0


class TestCheck:
    @pytest.fixture(autouse=True)
    def checks(self, monkeypatch):
        monkeypatch.setattr(_body, "CHECKS_HITS", True)

    def test_a_broken_promise_is_found(self):
        f = hcompile.region(
            lambda x, kind: x * 2 if kind == "a" else x + 2, reuse_hash_fn=lambda *_: 0
        )
        with pytest.raises(
            RuntimeError,
            match=r"region '<lambda>': the call at .*test_reuse.py:\d+ .* was served by the body "
            r"traced at .*test_reuse.py:\d+ .*equation 0 is mul against add",
        ):
            jax.jit(lambda x: f(f(x, "a"), "b"))(1.0)

    def test_good_hits_pass(self):
        f = hcompile.region(lambda w, x: jnp.tanh(w @ x))
        jax.jit(lambda ws, x: f(ws[0], f(ws[1], x)))([jnp.eye(2)] * 2, jnp.ones(2))
        assert hcompile.cache_info()["<lambda>"]["hits"] == 1


class TestNoNewRegions:
    def test_a_new_body(self):
        f = hcompile.region(lambda x: x * 2)
        jax.jit(lambda x: f(x))(jnp.ones(2))
        with hcompile.no_new_regions():
            jax.jit(lambda x: f(x) + 1)(jnp.ones(2))
            with pytest.raises(
                hcompile.NewRegionError, match="a body of region '<lambda>' would be new"
            ):
                jax.jit(lambda x: f(x))(jnp.ones(3))
        np.testing.assert_array_equal(jax.jit(lambda x: f(x))(jnp.ones(3)), 2.0)

    def test_a_call_in_line(self):
        f = hcompile.region(lambda x: (x, object()))
        with hcompile.no_new_regions(), pytest.raises(RuntimeError, match="would be new"):
            jax.jit(lambda x: f(x)[0])(1.0)

    def test_a_new_program(self):
        step = hcompile.jit(lambda x: x + 1)
        step(1.0)
        with hcompile.no_new_regions():
            step(2.0)
            with pytest.raises(RuntimeError, match=r"a program of <lambda> .*types"):
                step(jnp.ones(2))
        step(jnp.ones(2))


class TestCompilerOptions:
    def test_they_reach_their_own_executables(self):
        options = hcompile.RegionOptions(
            fwd_compiler_options={"xla_cpu_enable_fast_math": True},
            bwd_compiler_options={"xla_llvm_disable_expensive_passes": True},
        )
        f = hcompile.region(lambda x: jnp.sin(x) * x, options=options)
        g = hcompile.region(lambda x: jnp.sin(x) * x)
        step = hcompile.jit(jax.grad(lambda x: g(f(g(f(x)))).sum()))
        x = jnp.linspace(0, 1, 3)
        h = lambda x: jnp.sin(x) * x
        assert_trees_close(step(x), jax.grad(lambda x: h(h(h(h(x)))).sum())(x))
        regions = [p for p in step.report().programs[0].parts if p.kind == "region"]
        # The value of the last g is not needed, so g runs forward once, with its surroundings.
        assert sorted((p.name, p.calls) for p in regions) == [
            ("<lambda>.backward", 2),
            ("<lambda>.backward", 2),
            ("<lambda>.forward", 2),
        ]

    def test_a_region_called_once_keeps_its_own(self):
        options = hcompile.RegionOptions(fwd_compiler_options={"xla_cpu_enable_fast_math": True})
        f = hcompile.region(lambda x: jnp.sin(x), options=options)
        step = hcompile.jit(jax.vmap(lambda x: f(x) + 1))
        step(jnp.ones(3))
        assert [p.kind for p in step.report().programs[0].parts] == ["region", "glue"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"xla_no_such_option": 1}, r"xla_no_such_option.* of <lambda>.forward: No such"),
            ({"xla_cpu_enable_fast_math": "banana"}, "'banana' is not a valid bool"),
        ],
    )
    def test_an_unknown_option_or_value(self, options, message):
        options = hcompile.RegionOptions(fwd_compiler_options=options)
        f = hcompile.region(lambda x: jnp.sin(x), options=options)
        with pytest.raises(ValueError, match=message):
            hcompile.jit(lambda x: f(f(x)))(1.0)

    def test_under_plain_jit_one_warning(self):
        options = hcompile.RegionOptions(fwd_compiler_options={"xla_cpu_enable_fast_math": True})
        f = hcompile.region(lambda x: jnp.sin(x), options=options)
        with pytest.warns(UserWarning, match="only hcompile.jit can give") as seen:
            jax.jit(lambda x: f(f(x)))(1.0)
        assert len(seen) == 1


class TestCounters:
    def test_misses_by_reason(self):
        @hcompile.region
        def f(x, kind):
            return x * 2 if kind == "a" else -x

        jax.jit(lambda x, y: f(f(f(x, "a"), "b"), "a") + f(y, "a").sum())(1.0, jnp.ones(2))
        (info,) = hcompile.cache_info().values()
        assert info["misses"] == {"first call": 1, "constant": 1, "avals": 1}
        assert (info["calls"], info["hits"], info["traces"], info["entries"]) == (4, 1, 3, 2)
        assert "was 'a' and is now 'b' [" in info["explanations"][0]
        assert "test_reuse.py" in info["explanations"][0]
        assert set(info["seconds"]) == {"lookup", "hash", "trace", "stamp_out"}
        assert info["seconds"]["trace"] > 0

    def test_one_region_can_be_cleared(self):
        f, g = hcompile.region(lambda x: x + 1), hcompile.region(lambda x: x + 2)
        step = hcompile.jit(lambda x: f(f(x)) + g(g(x)))
        assert step(1.0) == 8
        f.clear_cache()
        (info,) = hcompile.cache_info().values()
        assert info["calls"] == 2
        assert step(1.0) == 8
        assert jax.jit(lambda x: f(x))(1.0) == 2

    def test_entries_are_bounded(self, monkeypatch):
        monkeypatch.setattr(_reuse, "MAX_ENTRIES", 8)
        for i in range(50):
            space = {"jnp": jnp}
            exec(f"def f(x): return jnp.sin(x) + {i}", space)
            jax.eval_shape(hcompile.region(space["f"]), 1.0)
        infos = hcompile.cache_info().values()
        assert (len(infos), sum(info["entries"] for info in infos)) == (8, 8)
