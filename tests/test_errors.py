"""Bad input: errors name the region or argument and the user's line, and nothing is lost."""

import traceback

import jax
import jax.numpy as jnp
import pytest
from models import init_layers, inputs, layer, stack

import hcompile


class TestMarking:
    @pytest.mark.parametrize("decorate", [hcompile.region, hcompile.jit])
    def test_not_callable(self, decorate):
        with pytest.raises(TypeError, match=r"got 3 of type int, which cannot be called"):
            decorate(3)

    def test_above_a_classmethod(self):
        with pytest.raises(TypeError, match=r"Write @classmethod above @nested_compile_region"):
            hcompile.region(classmethod(layer))

    def test_not_callable_as_decorator(self):
        with pytest.raises(TypeError, match=r"nested_compile_region marks a function"):
            hcompile.region(max_reuse_entries=2)([1])

    @pytest.mark.parametrize("value", [1.5, "8", True, None])
    def test_max_reuse_entries_is_no_int(self, value):
        with pytest.raises(TypeError, match=r"max_reuse_entries must be an int; got .* of type"):
            hcompile.region(layer, max_reuse_entries=value)

    def test_max_reuse_entries_too_small(self):
        with pytest.raises(ValueError, match=r"max_reuse_entries must be at least 1; got 0"):
            hcompile.region(layer, max_reuse_entries=0)

    @pytest.mark.parametrize("value", [{"residuals": "all"}, "auto", [1]])
    def test_options_of_the_wrong_type(self, value):
        with pytest.raises(TypeError, match=r"options must be a RegionOptions or None; got"):
            hcompile.region(layer, options=value)

    def test_an_unknown_residual_choice(self):
        with pytest.raises(ValueError, match=r"'auto', 'all', 'none' or a policy .*got 'some'"):
            hcompile.RegionOptions(residuals="some")
        with pytest.raises(TypeError, match=r"residuals must be 'auto'.* got 3 of type int"):
            hcompile.RegionOptions(residuals=3)

    def test_an_unknown_option(self):
        with pytest.raises(TypeError, match="unexpected keyword argument 'fuse'"):
            hcompile.RegionOptions(fuse=True)

    def test_reuse_hash_fn_is_not_callable(self):
        with pytest.raises(TypeError, match=r"reuse_hash_fn must be callable; got 7"):
            hcompile.region(layer, reuse_hash_fn=7)


def frames(info):
    return [frame.filename for frame in traceback.extract_tb(info.tb)]


def assert_ends_in_this_file(info):
    """The traceback shows the user's code, and neither hcompile's nor JAX's."""
    files = frames(info)
    assert not any("/hcompile/_" in name for name in files)
    assert files[-1] == __file__ or "site-packages" in files[-1]
    assert sum(name == __file__ for name in files) >= 2


class TestCalls:
    def test_a_shape_error_names_region_arguments_and_line(self):
        @hcompile.region
        def block(p, x):
            return x @ p["down"]  # the user's line

        f = hcompile.jit(stack(block))
        ps = init_layers(2)
        with pytest.raises(TypeError, match=r"dot_general requires contracting") as info:
            f(ps, inputs())
        assert any(
            "region 'TestCalls" not in note
            and "hcompile region 'block', called with argument [0]['bias']: float32[16]" in note
            for note in info.value.__notes__
        )
        lines = [frame.line for frame in traceback.extract_tb(info.tb)]
        assert 'return x @ p["down"]  # the user\'s line' in lines
        assert_ends_in_this_file(info)

    def test_a_failed_trace_leaves_nothing_behind(self):
        fail = True

        @hcompile.region
        def block(p, x):
            if fail:
                raise ValueError("not yet")
            return layer(p, x)

        f = hcompile.jit(stack(block))
        args = (init_layers(2), inputs())
        with pytest.raises(ValueError, match="not yet") as info:
            f(*args)
        assert_ends_in_this_file(info)
        assert f.report().programs == ()
        fail = False
        assert jnp.allclose(f(*args), jax.jit(stack(layer))(*args))
        assert f.report().region_calls == 2

    def test_a_failed_compile_leaves_nothing_behind(self, monkeypatch):
        from hcompile import _executables

        f = hcompile.jit(stack(hcompile.region(layer)))
        args = (init_layers(2), inputs())

        def interrupted(self):
            raise KeyboardInterrupt("while compiling")

        with monkeypatch.context() as patch:
            patch.setattr(_executables.Executable, "compile", interrupted)
            with pytest.raises(KeyboardInterrupt, match="while compiling"):
                f(*args)
        assert f.report().programs == ()
        assert jnp.allclose(f(*args), jax.jit(stack(layer))(*args))

    def test_arguments_that_are_no_jax_types(self):
        f = hcompile.jit(stack(hcompile.region(layer)))
        plain = jax.jit(stack(layer))
        args = (init_layers(2), "text")
        with pytest.raises(TypeError, match=r"x") as want:
            plain(*args)
        with pytest.raises(TypeError, match=r"argument x|path x") as got:
            f(*args)
        assert str(got.value).rpartition(">")[2] == str(want.value).rpartition(">")[2]

    def test_outputs_that_are_no_jax_types(self):
        f = hcompile.jit(lambda ps, x: (stack(hcompile.region(layer))(ps, x), "text"))
        with pytest.raises(TypeError, match=r"returned a value of type .*str"):
            f(init_layers(2), inputs())

    def test_a_value_is_needed(self):
        @hcompile.region
        def block(p, x):
            return layer(p, x) if x.sum() > 0 else x

        with pytest.raises(jax.errors.TracerBoolConversionError, match="boolean") as info:
            hcompile.jit(stack(block))(init_layers(2), inputs())
        assert_ends_in_this_file(info)
