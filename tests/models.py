"""Small models and helpers that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np


def layer(p, x):
    """A residual MLP layer on a dict of arrays."""
    h = jax.nn.gelu(x @ p["up"] + jnp.expand_dims(p["bias"], 0))
    return x + h @ p["down"]


def init_layers(depth, width=8, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3, dtype)

    return [
        {
            "up": normal(width, 2 * width),
            "bias": normal(2 * width),
            "down": normal(2 * width, width),
        }
        for _ in range(depth)
    ]


def inputs(width=8, batch=4, seed=1, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, width)), dtype)


def stack(block):
    """The loss of a stack of ``block``."""

    def loss(ps, x):
        for p in ps:
            x = block(p, x)
        return jnp.mean(jnp.square(x))

    return loss


def assert_trees_close(got, want, rtol=1e-5):
    """Equal structures, types and, within ``rtol`` of each array's largest entry, values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(b, jax.Array):
            assert type(a) is type(b)
            assert a == b
            continue
        assert jax.typeof(a) == jax.typeof(b)
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.max(np.abs(b), initial=1e-6)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=rtol)


def executables(jitted):
    """``{name: calls}`` of the latest program's executables."""
    report = jitted.report().programs[-1]
    assert report.fallback is None, report.fallback
    names = [part.name for part in report.parts]
    return {name: [part.calls for part in report.parts if part.name == name] for name in names}
