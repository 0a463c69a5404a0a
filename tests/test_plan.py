"""The plan: canonical forms, the pinned parts of a step, and what the schedule may free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import init_layers, inputs, layer, stack

import hcompile
from hcompile import _jit
from hcompile._canonical import Canonicalizer
from hcompile._plan.glue import _best_count

marked = hcompile.region(layer)


def form(fn, *args):
    return Canonicalizer().jaxpr(jax.make_jaxpr(fn)(*args))


def plan(fn, *args, **options):
    return hcompile.jit(fn, **options).lower(*args)._plan


class TestCanonical:
    def test_names_and_lines_do_not_count(self):
        def first(x):
            with jax.named_scope("one"):
                return jax.jit(lambda a: a * 2)(x) + 1

        def second(y):
            return jax.jit(lambda longer: longer * 2)(y) + 1

        assert form(first, 1.0) == form(second, 1.0)

    @pytest.mark.parametrize(
        "other",
        [
            lambda x: x * 3 + 1,
            lambda x: x * 2 - 1,
            lambda x: 1 + x * 2.0 + x,
            lambda x: (x * 2 + 1).astype(jnp.bfloat16),
            lambda x: (x * 2 + 1, x),
            lambda x: x * 2 + np.ones(2, np.float32),
        ],
    )
    def test_what_is_computed_counts(self, other):
        assert form(lambda x: x * 2 + 1, jnp.ones(2)) != form(other, jnp.ones(2))

    def test_argument_types_count(self):
        assert form(jnp.sin, jnp.ones(2)) != form(jnp.sin, jnp.ones(3))
        assert form(jnp.sin, 1.0) != form(jnp.sin, jnp.float32(1))

    def test_constants_count_by_content(self):
        def plus(array):
            return lambda x: x + array

        one, same, other = np.ones(3, np.float32), np.ones(3, np.float32), np.zeros(3, np.float32)
        assert form(plus(one), 1.0) == form(plus(same), 1.0)
        assert form(plus(one), 1.0) != form(plus(other), 1.0)

    def test_differentiation_rules_do_not_count(self):
        def ruled(rule):
            @jax.custom_jvp
            def f(x):
                return jnp.sin(x)

            f.defjvp(rule)
            return f

        first = ruled(lambda p, t: (p[0], t[0]))
        second = ruled(lambda p, t: (p[0] * 2, t[0]))
        assert form(first, 1.0) == form(second, 1.0)


class TestParts:
    def test_a_training_step_is_pinned(self):
        """SGD without clipping: each layer's update runs as soon as its gradient is there."""

        def step(ps, x):
            value, grads = jax.value_and_grad(stack(marked))(ps, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads), value

        parts = plan(step, init_layers(3), inputs(), donate_argnums=0).parts
        got = [(part.name, len(part.ops), len(part.ins), len(part.targets)) for part in parts]
        forward, update, backward = ("layer.forward", 1, 4), ("glue", 6, 6, 3), "layer.backward"
        assert [part[:3] for part in got[:3]] == [forward] * 3
        assert [name for name, *_ in got[3:]] == ["glue"] + [backward, "glue"] * 3
        assert [part for part in got[4:] if part[0] == "glue"] == [update] * 3
        assert len({part.form for part in parts}) == 4

    def test_a_cast_runs_right_before_its_layer(self):
        def forward(ps, x):
            half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), ps)
            return stack(marked)(half, x.astype(jnp.bfloat16))

        parts = plan(forward, init_layers(4), inputs()).parts
        names = [part.name for part in parts]
        assert names == ["glue", "layer.forward"] * 4 + ["glue"]
        assert len({part.form for part in parts[2:-1:2]}) == 1

    @pytest.mark.parametrize(
        ("kinds", "count"),
        [
            ([], 1),
            ([(1, 50)], 1),
            ([(2, 3)], 1),
            ([(24, 10), (24, 10), (49, 10), (1, 40)], 24),
            ([(100, 10)], 100),
        ],
    )
    def test_bundles_for_kinds_of_components(self, kinds, count):
        assert _best_count(kinds) == count


class TestSchedule:
    def walk(self, fn, *args, **options):
        """Checks that no slot is read after it was donated or freed; returns the plan."""
        made = plan(fn, *args, **options)
        donated = made.liveness.donations(made.parts)
        gone = set()
        for index, part in enumerate(made.parts):
            assert gone.isdisjoint(part.ins), (index, part.name)
            given = [part.ins[i] for i in donated[part.form]]
            assert len(set(given)) == len(given)
            assert all(part.ins.count(slot) == 1 for slot in given)
            dying = made.liveness.dying(index, part)
            assert set(given) <= set(dying)
            gone.update(dying)
        assert gone.isdisjoint(made.outputs)
        return made

    @pytest.mark.parametrize("donate", [(), (0,), (0, 1)])
    def test_nothing_is_read_after_its_end(self, donate):
        def step(ps, tied, x):
            ps = [*ps, ps[0]]
            value, grads = jax.value_and_grad(stack(marked))(ps, x)
            return jax.tree.map(lambda p, g: p - g, ps, grads), tied, value, x

        made = self.walk(step, init_layers(3), init_layers(1), inputs(), donate_argnums=donate)
        given = {
            part.ins[i]
            for part in made.parts
            for i in made.liveness.donations(made.parts)[part.form]
        }
        arguments = {slot for slot in given if slot < made.program.num_inputs}
        allowed = {(): 0, (0,): 9, (0, 1): 12}[donate]
        assert arguments <= set(range(allowed))

    def test_residuals_are_freed_as_the_backward_pass_goes(self):
        made = self.walk(jax.value_and_grad(stack(marked)), init_layers(6), inputs())
        live, peak = set(range(made.program.num_inputs)), 0
        own = set()
        for index, part in enumerate(made.parts):
            own |= set(part.targets)
            peak = max(peak, len(own))
            own -= set(made.liveness.dying(index, part))
        assert own <= set(made.outputs)
        assert live.isdisjoint(own)


class TestResiduals:
    def saved(self, options):
        """Bytes that the forward region hands to the backward region, beside its result."""
        block = hcompile.region(layer, options=options)
        made = plan(jax.value_and_grad(stack(block)), init_layers(4), inputs())
        forward = next(part for part in made.parts if part.name == "layer.forward")
        sizes = [made.program.avals[slot] for slot in forward.targets[1:]]
        return sum(aval.size * aval.dtype.itemsize for aval in sizes)

    def test_each_choice_saves_less_than_the_one_before(self):
        everything = self.saved(hcompile.RegionOptions(residuals="all"))
        dots = self.saved(None)
        policy = jax.checkpoint_policies.nothing_saveable
        nothing = self.saved(hcompile.RegionOptions(residuals="none"))
        assert everything > dots > nothing == self.saved(hcompile.RegionOptions(residuals=policy))
        assert dots == inputs().size * 2 * 4  # the one matmul whose result is not the output

    def test_a_checkpoint_inside_is_obeyed(self):
        block = hcompile.region(jax.checkpoint(layer))
        made = plan(jax.value_and_grad(stack(block)), init_layers(4), inputs())
        forward = next(part for part in made.parts if part.name == "layer.forward")
        assert len(forward.targets) == 1


def test_a_step_runs_its_parts_and_nothing_else(monkeypatch):
    """At steady state no jaxpr is read, nothing is traced, and arguments are flattened once."""
    f = hcompile.jit(jax.value_and_grad(stack(marked)))
    args = (init_layers(3), inputs())
    f(*args)
    monkeypatch.setattr(_jit, "flatten", None)
    with jax.no_tracing():
        f(*args)
    assert len(f.report().programs) == 1
