"""Random programs: with regions they give what they give without, plain, under grad and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import assert_trees_close

import hcompile

WIDTH = 3

UNARY = {
    "tanh": jnp.tanh,
    "neg": jnp.negative,
    "softplus": jax.nn.softplus,
    "transpose": lambda a: a.T,
    "sum": lambda a: jnp.broadcast_to(a.sum(0, keepdims=True), a.shape),
    "cumsum": lambda a: jnp.cumsum(a, axis=0) * 0.3,
    "sort": lambda a: jnp.sort(a, axis=1),
    "stop": jax.lax.stop_gradient,
    "scan": lambda a: jax.lax.scan(lambda c, row: (c * 0.5 + row, c), a[0], a)[1],
    "cond": lambda a: jax.lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a),
}
BINARY = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "matmul": lambda a, b: a @ b * 0.3,
    "where": lambda a, b: jnp.where(a > b, a, b * 0.5),
    "first": lambda a, b: a,
}

# One region's body: instructions over a growing list of values, and which of them it returns.
instruction = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7), st.integers(0, 7))
body = st.tuples(st.lists(instruction, min_size=1, max_size=5), st.integers(1, 2))
# The program: which body each layer runs, and glue between the layers.
program = st.tuples(
    st.lists(body, min_size=1, max_size=2),
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["", "residual", "scale"])),
        min_size=2,
        max_size=5,
    ),
)


def make_block(description):
    instructions, results = description

    def block(w, x):
        values = [w, x]
        for name, i, j in instructions:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
        return values[-1] if results == 1 else (values[-1], values[-2].sum())

    return block


def make_program(description, mark):
    bodies, layers = description
    blocks = [mark(make_block(b)) for b in bodies]

    def forward(ws, x):
        aux = jnp.float32(0)
        for n, (which, glue) in enumerate(layers):
            out = blocks[which % len(blocks)](ws[n], x)
            y, extra = out if isinstance(out, tuple) else (out, 0.0)
            aux += extra
            x = {"": y, "residual": x + y, "scale": y * (n + 1)}[glue]
        return x, aux

    return forward


def as_loss(forward):
    def loss(ws, x):
        y, aux = forward(ws, x)
        return jnp.tanh(y).sum() + 0.1 * jnp.tanh(aux)

    return loss


TRANSFORMS = {
    "none": lambda forward: forward,
    "grad": lambda forward: jax.value_and_grad(as_loss(forward), argnums=(0, 1)),
    "vmap": lambda forward: jax.vmap(forward, in_axes=(None, 0)),
    "vmap of grad": lambda forward: jax.vmap(jax.grad(as_loss(forward)), in_axes=(0, None)),
}


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(program, st.sampled_from(list(TRANSFORMS)), st.integers(0, 2**16))
def test_with_regions_is_without(description, name, seed):
    rng = np.random.default_rng(seed)
    ws = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in description[1]]
    x = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
    if name == "vmap":
        x = jnp.stack([x, -x])
    if name == "vmap of grad":
        ws = [jnp.stack([w, -w]) for w in ws]
    want = jax.jit(TRANSFORMS[name](make_program(description, lambda f: f)))(ws, x)
    marked = TRANSFORMS[name](make_program(description, hcompile.region))
    assert_trees_close(jax.jit(marked)(ws, x), want, rtol=1e-4)
    assert_trees_close(hcompile.jit(marked)(ws, x), want, rtol=1e-4)
    (info, *others) = hcompile.cache_info().values()
    assert sum(i["inlined"] for i in (info, *others)) == 0
    hcompile.clear_caches()
