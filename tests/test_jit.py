"""hcompile.jit: what is compiled, how often, and that a call is jax.jit's."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import assert_trees_close, executables, init_layers, inputs, layer, stack

import hcompile

marked = hcompile.region(layer)
loss = stack(marked)
plain_loss = stack(layer)


def check(fn, plain, *args, rtol=1e-5, **options):
    """``hcompile.jit(fn)`` against ``jax.jit(plain)``; returns the former."""
    jitted = hcompile.jit(fn, **options)
    want = jax.jit(plain)(*args)
    for _ in range(2):
        assert_trees_close(jitted(*args), want, rtol=rtol)
    return jitted


class TestCompileCounts:
    @pytest.mark.parametrize("depth", [2, 6, 24])
    def test_forward_is_one_executable_and_its_surroundings(self, depth):
        f = check(loss, plain_loss, init_layers(depth), inputs())
        assert executables(f) == {"layer.forward": [depth], "glue": [1]}

    @pytest.mark.parametrize("depth", [2, 6, 24])
    def test_value_and_grad_is_one_forward_and_one_backward(self, depth):
        grad = jax.value_and_grad
        f = check(grad(loss), grad(plain_loss), init_layers(depth), inputs())
        assert executables(f) == {
            "layer.forward": [depth],
            "glue": [1],
            "layer.backward": [depth],
        }
        assert hcompile.cache_info()["layer"]["traces"] == 1

    def test_the_input_differentiated_too(self):
        grad = functools.partial(jax.grad, argnums=(0, 1))
        f = check(grad(loss), grad(plain_loss), init_layers(4), inputs())
        assert executables(f)["layer.backward"] == [4]

    def test_two_depths_share_their_executables(self):
        first = hcompile.jit(jax.value_and_grad(loss))
        second = hcompile.jit(jax.value_and_grad(stack(marked)))
        first(init_layers(3), inputs())
        second(init_layers(5), inputs())
        assert first.report().executables == 3
        report = second.report().programs[-1]
        assert [part.name for part in report.parts if not part.shared] == []

    def test_a_whole_adamw_step_is_flat_in_depth(self):
        def compiled(depth):
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
            ps, x = init_layers(depth), inputs()

            def step(loss, ps, state, x):
                value, grads = jax.value_and_grad(loss)(ps, x)
                updates, state = optimizer.update(grads, state, ps)
                return optax.apply_updates(ps, updates), state, value

            f = check(
                functools.partial(step, loss),
                functools.partial(step, plain_loss),
                *(ps, optimizer.init(ps), x),
                rtol=1e-4,
            )
            parts = f.report().programs[-1].parts
            # The sum of all gradients' norms is one part, and the only one that grows.
            sizes = sorted(part.equations * (part.calls > 1) for part in parts)
            return len(parts), sizes

        assert compiled(8) == compiled(16)

    def test_a_region_called_once_goes_with_its_surroundings(self):
        once = hcompile.region(lambda x: jnp.sin(x) * 2)

        def f(block, once, ps, x):
            return once(stack_forward(block, ps, x))

        f = check(
            functools.partial(f, marked, once),
            functools.partial(f, layer, lambda x: jnp.sin(x) * 2),
            init_layers(3),
            inputs(),
        )
        assert executables(f) == {"layer.forward": [3], "glue": [1]}

    def test_nested_regions(self):
        inner = hcompile.region(lambda x: jnp.tanh(x) + 1)

        @hcompile.region
        def outer(p, x):
            return inner(inner(layer(p, x)))

        plain = lambda p, x: jnp.tanh(jnp.tanh(layer(p, x)) + 1) + 1
        grad = jax.value_and_grad
        f = check(grad(stack(outer)), grad(stack(plain)), init_layers(4), inputs())
        assert executables(f)["outer.forward"] == [4]

    def test_regions_inside_nested_jit_checkpoint_and_custom_rules(self):
        @jax.custom_vjp
        def scaled(p, x):
            return marked(p, x) * 2

        scaled.defvjp(lambda p, x: (scaled(p, x), (p, x)), lambda r, g: (r[0], g))
        wrapped = jax.jit(marked)
        rematted = jax.checkpoint(marked)

        def f(block, a, b, c, ps, x):
            return c(ps[3], b(ps[2], a(ps[1], block(ps[0], x)))).sum()

        f = check(
            functools.partial(f, marked, wrapped, rematted, scaled),
            functools.partial(f, layer, layer, layer, lambda p, x: layer(p, x) * 2),
            init_layers(4),
            inputs(),
        )
        assert executables(f)["layer.forward"] == [4]

    def test_remat_of_regions_runs_the_forward_executable_again(self):
        rematted = jax.checkpoint(marked)
        grad = jax.value_and_grad
        f = check(grad(stack(rematted)), grad(plain_loss), init_layers(4), inputs())
        counts = executables(f)
        # The forward pass keeps nothing but its inputs; each backward step computes residuals anew.
        assert sum(map(sum, (n for name, n in counts.items() if "layer" in name))) >= 11

    def test_numbers_as_array_arguments_share_a_body(self):
        scale = hcompile.region(lambda s, x: x * s)

        def f(scale, x):
            for i in range(4):
                x = scale(jnp.float32(i + 1), x)
            return x

        f = check(functools.partial(f, scale), functools.partial(f, lambda s, x: x * s), inputs())
        assert f.report().region_calls == 4


def stack_forward(block, ps, x):
    for p in ps:
        x = block(p, x)
    return x


class TestCalls:
    def test_decorator_with_and_without_arguments(self):
        @hcompile.jit
        def f(x):
            """Doc."""
            return x + 1

        @hcompile.jit(static_argnames="n")
        def g(x, n):
            return x * n

        assert (f.__name__, f.__doc__) == ("f", "Doc.")
        assert f(1) == 2
        assert (g(2, n=3), g(2, n=4), g(2, 3)) == (6, 8, 6)

    def test_a_method(self):
        class Model:
            def __init__(self):
                self.ps = init_layers(3)

            @functools.partial(hcompile.jit, static_argnums=0)
            def __call__(self, x):
                return stack_forward(marked, self.ps, x)

        model = Model()
        np.testing.assert_allclose(
            model(inputs()), stack_forward(layer, model.ps, inputs()), rtol=1e-5
        )

    def test_static_arguments_by_number_and_name(self):
        def f(block, ps, x, n, *, flag=True):
            for _ in range(n):
                x = stack_forward(block, ps, x)
            return x if flag else -x

        jitted = hcompile.jit(
            functools.partial(f, marked), static_argnums=2, static_argnames="flag"
        )
        ps, x = init_layers(2), inputs()
        for n in (1, 2, 1):
            for flag in (True, False):
                got = jitted(ps, x, n, flag=flag)
                np.testing.assert_allclose(got, f(layer, ps, x, n, flag=flag), rtol=1e-5)
        assert len(jitted.report().programs) == 4

    def test_keyword_arguments(self):
        f = hcompile.jit(lambda ps, *, x: stack_forward(marked, ps, x))
        ps, x = init_layers(2), inputs()
        np.testing.assert_allclose(f(ps, x=x), stack_forward(layer, ps, x), rtol=1e-5)

    def test_python_and_numpy_arguments(self):
        def f(block, ps, x, scale):
            return stack_forward(block, ps, x) * scale

        ps = jax.tree.map(np.asarray, init_layers(2))
        args = (ps, np.asarray(inputs()), 2.0)
        check(functools.partial(f, marked), functools.partial(f, layer), *args)

    def test_typed_keys_integers_and_empty_arrays(self):
        drop = lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape)
        marked_drop = hcompile.region(drop)

        def f(drop, keys, x, n, empty):
            for i in range(3):
                x = drop(keys[i], x)
            return {"x": x, "n": n + 1, "keys": keys, "empty": empty, "flag": n > 2}

        args = (jax.random.split(jax.random.key(0), 3), inputs(), jnp.int32(3), jnp.zeros((0, 2)))
        check(functools.partial(f, marked_drop), functools.partial(f, drop), *args)

    def test_outputs_that_are_arguments_constants_or_twice_the_same(self):
        def f(block, ps, x):
            y = stack_forward(block, ps, x)
            return y, x, y, 3.0, jnp.arange(3), x, None

        f = functools.partial(f)
        jitted = check(
            functools.partial(f, marked), functools.partial(f, layer), init_layers(2), inputs()
        )
        x = inputs()
        out = jitted(init_layers(2), x)
        arrays = [out[0], out[1], out[2], out[5], x]
        assert len({a.unsafe_buffer_pointer() for a in arrays}) == 5

    def test_closed_over_arrays(self):
        ps = init_layers(3)
        f = lambda block: lambda x: stack_forward(block, ps, x)
        assert executables(check(f(marked), f(layer), inputs()))["layer.forward"] == [3]

    def test_weak_types(self):
        f = hcompile.region(lambda x: x * 2)
        check(lambda x: f(f(x)), lambda x: x * 4, 1.5)

    def test_bfloat16(self):
        grad = jax.value_and_grad
        ps, x = init_layers(6, dtype=jnp.bfloat16), inputs(dtype=jnp.bfloat16)
        check(grad(loss), grad(plain_loss), ps, x, rtol=2e-2)

    def test_a_committed_device(self):
        device = jax.devices()[1]
        ps, x = jax.device_put((init_layers(3), inputs()), device)
        f = check(loss, plain_loss, ps, x)
        assert f(ps, x).devices() == {device}
        assert f(ps, x).committed
        assert executables(f)["layer.forward"] == [3]

    def test_uncommitted_stays_uncommitted(self):
        assert not hcompile.jit(loss)(init_layers(2), inputs()).committed

    def test_a_default_device_makes_another_program(self):
        f = hcompile.jit(loss)
        args = (init_layers(2), inputs())
        f(*args)
        with jax.default_device(jax.devices()[1]):
            assert f(*jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), args)).devices() == {
                jax.devices()[1]
            }

    def test_under_an_outer_trace_it_is_jit(self):
        f = hcompile.jit(loss)
        jaxpr = jax.make_jaxpr(f)(init_layers(2), inputs())
        assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["jit"]
        got = jax.grad(f)(init_layers(2), inputs())
        assert_trees_close(got, jax.grad(plain_loss)(init_layers(2), inputs()))
        assert f.report().programs == ()

    def test_another_shape_is_another_program_of_shared_functions(self):
        f = hcompile.jit(loss)
        for batch in (2, 3, 2):
            f(init_layers(2), inputs(batch=batch))
        assert len(f.report().programs) == 2

    def test_clear_cache(self):
        f = hcompile.jit(loss)
        f(init_layers(2), inputs())
        f.clear_cache()
        assert f.report().programs == ()
        f(init_layers(2), inputs())
        assert len(f.report().programs) == 1


class TestWrapped:
    """``jax.grad`` and ``functools.wraps`` copy the ``__dict__`` of what they wrap."""

    def test_jit_of_a_transformed_jit(self):
        inner = hcompile.jit(loss)
        args = (init_layers(2), inputs())
        assert_trees_close(hcompile.jit(jax.grad(inner))(*args), jax.grad(plain_loss)(*args))

    def test_jit_of_a_wrapped_jit(self):
        inner = hcompile.jit(loss)

        @functools.wraps(inner)
        def more(*args):
            return inner(*args) + 1

        args = (init_layers(2), inputs())
        np.testing.assert_allclose(hcompile.jit(more)(*args), plain_loss(*args) + 1, rtol=1e-5)

    def test_attributes_of_the_function_do_not_matter(self):
        class Net:
            def __init__(self):
                self._lock = self._programs = self._options = self._jitted = None

            def __call__(self, x):
                return x + 1

        assert hcompile.jit(Net())(1) == 2


class TestDonation:
    def test_parameters_are_updated_in_place(self):
        def step(ps, x):
            grads = jax.grad(loss)(ps, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads)

        f = hcompile.jit(step, donate_argnums=0)
        ps, x = init_layers(4), inputs()
        pointers = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(ps)}
        new = f(ps, x)
        assert {a.unsafe_buffer_pointer() for a in jax.tree.leaves(new)} == pointers
        assert all(a.is_deleted() for a in jax.tree.leaves(ps))
        want = jax.jit(
            lambda ps, x: jax.tree.map(lambda p, g: p - 0.1 * g, ps, jax.grad(plain_loss)(ps, x))
        )(init_layers(4), x)
        assert_trees_close(new, want)

    def test_an_update_that_needs_no_gradient(self):
        f = hcompile.jit(
            lambda ps, x: (loss(ps, x), jax.tree.map(lambda p: p * 2, ps)), donate_argnums=0
        )
        ps, x = init_layers(3), inputs()
        value, doubled = f(ps, x)
        assert all(a.is_deleted() for a in jax.tree.leaves(ps))
        assert_trees_close(doubled, jax.tree.map(lambda p: p * 2, init_layers(3)))
        assert_trees_close(value, jax.jit(plain_loss)(init_layers(3), x))

    def test_what_is_not_donated_survives(self):
        f = hcompile.jit(jax.value_and_grad(loss))
        ps, x = init_layers(4), inputs()
        f(ps, x)
        assert not any(a.is_deleted() for a in jax.tree.leaves((ps, x)))

    def test_a_donated_argument_that_is_returned(self):
        f = hcompile.jit(lambda ps, x: (ps, loss(ps, x)), donate_argnums=0)
        ps, x = init_layers(2), inputs()
        new, value = f(ps, x)
        assert_trees_close((new, value), (init_layers(2), jax.jit(plain_loss)(init_layers(2), x)))

    def test_used_again(self):
        def step(ps, x):
            return jax.tree.map(lambda p, g: p - g, ps, jax.grad(loss)(ps, x))

        f = hcompile.jit(step, donate_argnames="ps")
        ps, x = init_layers(2), inputs()
        new = f(ps, x)
        with pytest.raises(RuntimeError, match=r"argument \[0\]\[0\]\['bias'\] .* deleted"):
            f(ps, x)
        f(new, x)

    def test_passed_twice(self):
        f = hcompile.jit(lambda a, b: (loss(a, inputs()), b), donate_argnums=0)
        ps = init_layers(2)
        f(ps, init_layers(2))
        ps = init_layers(2)
        with pytest.raises(ValueError, match=r"\[0\]\[0\]\['bias'\] is donated, and .* \[1\]\[0\]"):
            f(ps, ps)
        assert not any(a.is_deleted() for a in jax.tree.leaves(ps))


class TestFallback:
    """Where hcompile cannot help, the call is jax.jit's and the report says why."""

    def check(self, fn, reason, *args, **options):
        jitted = hcompile.jit(fn, **options)
        got, want = jitted(*args), jax.jit(fn, **options)(*args)
        assert_trees_close(got, want)
        assert reason in jitted.report().fallback
        assert reason in str(jitted.report())
        return jitted

    def test_no_region(self):
        self.check(lambda x: x + 1, "no marked region occurs twice", inputs())

    def test_regions_in_a_scan_are_compiled_once_by_the_scan(self):
        def f(ps, x):
            return jax.lax.scan(lambda c, _: (stack_forward(marked, ps, c), None), x, length=2)[0]

        self.check(f, "no marked region", init_layers(2), inputs())

    def test_effects(self, capfd):
        def f(ps, x):
            jax.debug.print("x0 {}", x[0, 0])
            return stack_forward(marked, ps, x)

        self.check(f, "effects", init_layers(2), inputs())

    def test_several_devices(self):
        mesh = jax.make_mesh((2,), ("d",))
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        x = jax.device_put(inputs(), spec)
        ps = jax.device_put(
            init_layers(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )
        self.check(loss, "several devices", ps, x)

    def test_shardings_given(self):
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.check(loss, "in_shardings", init_layers(2), inputs(), in_shardings=device)

    def test_debug_nans(self):
        with jax.debug_nans(True):
            self.check(loss, "debug_nans", init_layers(2), inputs())

    def test_a_fault_in_the_plan_costs_nothing(self, monkeypatch, caplog):
        from hcompile import _jit

        monkeypatch.setattr(_jit, "_RAISE_FAULTS", False)
        monkeypatch.setattr(_jit, "partition", None)
        self.check(loss, "planning failed", init_layers(2), inputs())
        assert "could not split" in caplog.text


class TestStages:
    def test_trace_lower_compile(self):
        f = hcompile.jit(jax.value_and_grad(loss))
        args = (init_layers(3), inputs())
        traced = f.trace(*args)
        assert jax.tree.structure(traced.out_info) == jax.tree.structure(f.eval_shape(*args))
        lowered = traced.lower()
        assert "func.func" in lowered.as_text()
        compiled = lowered.compile()
        assert_trees_close(compiled(*args), jax.jit(jax.value_and_grad(plain_loss))(*args))
        assert compiled.report().region_calls == 6

    def test_abstract_arguments(self):
        args = (init_layers(3), inputs())
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
        compiled = hcompile.jit(loss).lower(*shapes).compile()
        assert_trees_close(compiled(*args), jax.jit(plain_loss)(*args))

    def test_a_step_that_cannot_be_split(self):
        compiled = hcompile.jit(lambda x: x + 1).lower(1.0).compile()
        assert compiled(1.0) == 2
        assert compiled.report().executables == 1

    def test_static_arguments_are_left_out_of_the_call(self):
        f = hcompile.jit(lambda ps, x, n: loss(ps, x) * n, static_argnums=2)
        args = (init_layers(2), inputs())
        compiled = f.lower(*args, 3).compile()
        np.testing.assert_allclose(compiled(*args), 3 * plain_loss(*args), rtol=1e-5)

    def test_other_types_are_refused(self):
        compiled = hcompile.jit(loss).lower(init_layers(2), inputs()).compile()
        with pytest.raises(
            TypeError, match=r"float32\[4, 8\] at argument \[1\]; got float32\[3, 8\]"
        ):
            compiled(init_layers(2), inputs(batch=3))
        with pytest.raises(TypeError, match="compiled for arguments of the structure"):
            compiled(init_layers(3), inputs())


class TestReport:
    def test_text_and_html(self):
        f = hcompile.jit(jax.value_and_grad(loss))
        assert "not compiled yet" in str(f.report())
        f(init_layers(3), inputs())
        text = str(f.report())
        assert "3 executables, 3 compiled here, for 6 region calls and 1 glue calls" in text
        assert "region layer: 3 calls, 1 traced, 2 reused, 0 in line" in text
        assert "layer.backward" in f.report()._repr_html_()

    def test_misses_are_told(self):
        f = hcompile.region(lambda x, n: x * n)
        program = hcompile.jit(lambda x: f(f(f(x, 2), 2), 3))
        program(1.0)
        assert "was 2 and is now 3" in str(program.report())


class TestThreads:
    def test_many_threads_trace_and_call(self):
        f = hcompile.jit(jax.value_and_grad(loss))
        want = {
            n: jax.jit(jax.value_and_grad(plain_loss))(init_layers(n), inputs()) for n in (2, 3)
        }
        errors = []

        def work(n):
            try:
                for _ in range(5):
                    assert_trees_close(f(init_layers(n), inputs()), want[n])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(2 + i % 2,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(f.report().programs) == 2
