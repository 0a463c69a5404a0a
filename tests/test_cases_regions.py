"""Situations users reported, C01 to C17: marks, results and arguments."""

import dataclasses
import functools
import traceback

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
    weights,
)
from flax import linen, nnx
from models import assert_trees_close, executables, inputs

import hcompile

# --- A. Marking and results -------------------------------------------------------------------


def test_c01_returned_lists_are_the_callers_own():
    """A list with tuples inside tuples, to which the caller appends; differentiated."""
    seen = []

    def body(w, x):
        h = jnp.tanh(x @ w)
        return [h, ((2 * h, {"x": (x,)}), 3)]

    def loss(body, ws, x):
        for w in ws:
            out = body(w, x)
            seen.append(jax.tree.structure(out))
            out.append(x)
            ((doubled, rest), three) = out[1]
            x = doubled + rest["x"][0] * three
        return jnp.mean(x**2)

    f = check(grads_of(loss), body, weights(4), X)
    assert len(set(seen)) == 1
    assert_bodies(1)
    assert executables(f)["body.forward"] == [4]
    assert executables(f)["body.backward"] == [4]


class TestC02MarkedObjects:
    """A whole model object is marked."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda i: Affine(weights(3)[i]),
            lambda i: NnxBlock(nnx.Rngs(i)),
            pytest.param(
                lambda i: LinenBlock().bind(LinenBlock().init(jax.random.key(i), X)),
                marks=pytest.mark.xfail(
                    strict=True, reason="a bound linen scope has dict keys that are no constants"
                ),
            ),
        ],
        ids=["callable", "nnx", "linen"],
    )
    def test_equal_structure_shares_one_body(self, make):
        f = check_marks(each([make(0), make(1), make(0)]), X)
        assert_bodies(1)
        assert calls(f) == [3]

    @pytest.mark.parametrize("name", ["equinox", "haiku"])
    def test_other_libraries(self, name):
        library = pytest.importorskip(name)
        if name == "equinox":
            keys = jax.random.split(jax.random.key(0), 3)
            models = [library.nn.Linear(4, 4, key=key) for key in keys]
            layers = [jax.vmap(model) for model in models]
        else:
            net = library.transform(lambda x: library.Linear(4)(x))
            params = [net.init(jax.random.key(i), X) for i in range(3)]
            layers = [functools.partial(net.apply, p, None) for p in params]
        check_marks(each(layers), X)

    @pytest.mark.xfail(strict=True, reason="the mark is a function without the object's attributes")
    def test_attributes_of_a_callable(self):
        model = Affine(weights(1)[0])
        assert hcompile.region(model).w is model.w

    @pytest.mark.xfail(strict=True, reason="the mark is a function, no module with state")
    def test_an_nnx_module_keeps_its_state(self):
        model = NnxBlock(nnx.Rngs(0))
        assert_trees_close(nnx.state(hcompile.region(model)), nnx.state(model))

    @pytest.mark.xfail(strict=True, reason="the mark is a function without init and apply")
    def test_a_linen_module_keeps_its_parameters(self):
        marked = hcompile.region(LinenBlock())
        key = jax.random.key(0)
        params = LinenBlock().init(key, X)
        assert_trees_close(marked.init(key, X), params)
        np.testing.assert_allclose(marked.apply(params, X), LinenBlock().apply(params, X))


class TestC03MarkedAfterwards:
    """The call method of a class, or of each instance, is replaced by a marked one."""

    def test_of_the_class(self, monkeypatch):
        models = [Affine(w) for w in weights(4)]
        run = lambda _, x: functools.reduce(lambda x, model: model(x), models, x)
        want = jax.jit(functools.partial(run, 0))(X)
        monkeypatch.setattr(Affine, "__call__", hcompile.region(Affine.__call__))
        f = hcompile.jit(functools.partial(run, 1))
        assert_trees_close(f(X), want)
        assert_bodies(1)
        assert executables(f)["Affine.__call__.forward"] == [4]

    def test_of_an_nnx_class(self, monkeypatch):
        models = nnx.List([NnxBlock(nnx.Rngs(i)) for i in range(4)])
        run = lambda _, x: functools.reduce(lambda x, model: model(x), models, x)
        want = jax.jit(functools.partial(run, 0))(X)
        state = nnx.state(models)
        monkeypatch.setattr(NnxBlock, "__call__", hcompile.region(NnxBlock.__call__))
        assert_trees_close(hcompile.jit(functools.partial(run, 1))(X), want)
        assert_trees_close(nnx.state(models), state)
        assert_bodies(1)

    def test_of_each_instance(self):
        class Layer:
            def __init__(self, w):
                self.w = w

            def forward(self, x):
                return jnp.tanh(x @ self.w)

        class Model:
            def __init__(self):
                self.blocks = [Layer(w) for w in weights(4)]

            def __call__(self, x):
                for block in self.blocks:
                    x = block.forward(x)
                return x

        model = Model()
        want = jax.jit(lambda x: model(x))(X)
        for block in model.blocks:
            block.forward = hcompile.region(block.forward)
        f = hcompile.jit(lambda x: model(x))
        assert_trees_close(f(X), want)
        assert_bodies(1)
        assert executables(f)["Layer.forward.forward"] == [4]

    def test_of_a_linen_class(self):
        class Block(linen.Module):
            @linen.compact
            def __call__(self, x):
                return jnp.tanh(linen.Dense(4)(x))

        class Model(linen.Module):
            @linen.compact
            def __call__(self, x):
                for _ in range(3):
                    x = Block()(x)
                return x

        model, key = Model(), jax.random.key(0)
        params = model.init(key, X)
        want = jax.jit(model.apply)(params, X)
        Block.__call__ = hcompile.region(Block.__call__)
        assert_trees_close(model.init(key, X), params)
        assert_trees_close(hcompile.jit(model.apply)(params, X), want)


def test_c04_a_flag_switches_dropout_off():
    """Two bodies, one for each value; the one without dropout draws nothing."""

    def body(w, key, x, train):
        h = jnp.tanh(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0) if train else h

    def loss(body, train, ws, x):
        for i, w in enumerate(ws):
            x = body(w, jax.random.fold_in(jax.random.key(0), i), x, train)
        return jnp.mean(x**2)

    marked = hcompile.region(body)
    for train in (True, False, True):
        f = hcompile.jit(jax.value_and_grad(functools.partial(loss, marked, train)))
        want = jax.jit(jax.value_and_grad(functools.partial(loss, body, train)))(weights(3), X)
        assert_trees_close(f(weights(3), X), want)
        assert executables(f)["body.forward"] == [3]
    assert_bodies(2)
    for train in (True, False):
        jaxpr = jax.make_jaxpr(lambda w, key, x, t=train: marked(w, key, x, t))
        assert ("random_bits" in str(jaxpr(weights(1)[0], jax.random.key(0), X))) == train


class TestC05Traceback:
    """Errors and compiled operations lead to the user's lines."""

    def test_the_traceback_ends_in_the_users_line(self):
        def body(w, x):
            raise KeyError("from the body")  # this line

        with pytest.raises(KeyError, match="from the body") as info:
            hcompile.jit(functools.partial(square_loss, hcompile.region(body)))(weights(2), X)
        frames = traceback.extract_tb(info.tb)
        assert frames[-1].filename == __file__
        assert frames[-1].line.endswith("# this line")
        assert not any("/hcompile/_" in frame.filename for frame in frames)

    def test_compiled_operations_carry_scopes_and_lines(self):
        def body(w, x):
            with jax.named_scope("my_scope"):
                return jnp.tanh(x @ w)

        f = functools.partial(square_loss, hcompile.region(body))
        compiled = hcompile.jit(f).lower(weights(2), X).compile()
        texts = [part.call.as_text() for part in compiled._executables if "body" in part.name]
        assert len(texts) == 1
        assert "my_scope/tanh" in texts[0]
        assert __file__ in texts[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["directly", "in a remat"])
def test_c06_what_is_not_returned_is_not_compiled(wrap):
    """The region computes a factorization and drops it."""

    @wrap
    def inner(w, x):
        dead = jnp.linalg.cholesky(w @ w.T)
        return jnp.tanh(x @ w), dead

    def body(w, x):
        return inner(w, x)[0]

    f = jax.value_and_grad(functools.partial(square_loss, hcompile.region(body)))
    compiled = hcompile.jit(f).lower(weights(3), X).compile()
    want = jax.jit(jax.value_and_grad(functools.partial(square_loss, body)))(weights(3), X)
    assert_trees_close(compiled(weights(3), X), want)
    for part in compiled._executables:
        assert "potrf" not in part.lowered.as_text() + part.call.as_text()
        assert "cholesky" not in part.call.as_text()


class TestC07Constants:
    """The body builds a constant array at each call, and sizes from shapes."""

    @staticmethod
    def body(table, x):
        rows = x.shape[0] // 2 * 2
        ramp = jnp.asarray(np.linspace(0, 1, 300).reshape(3, 100)[:, : x.shape[1]], x.dtype)
        return x.at[:rows].multiply(1 + ramp.sum()) + jnp.asarray(table, x.dtype)

    def test_one_body_for_each_shape(self):
        table = (1.0, 2.0, 3.0, 4.0)

        def program(body, x, y):
            for _ in range(3):
                x, y = (body(np.array([table]), v) for v in (x, y))
            return x, y

        f = check(program, self.body, X, inputs(width=4, batch=3))
        assert_bodies(2)
        assert executables(f)["TestC07Constants.body.forward"] == [3, 3]

    def test_the_constant_is_not_copied_for_every_call(self):
        marked = hcompile.region(self.body)
        f = jax.jit(lambda x: chain(*[np.ones((1, 4), np.float32)] * 5)(marked, x))
        assert f.lower(X).as_text().count("0.00334448") == 1

    def test_another_constant_is_another_body(self):
        tables = [np.full((1, 4), v, np.float32) for v in (1, 2, 1)]
        check(chain(*tables), self.body, X)
        assert_bodies(2)


@pytest.mark.parametrize(
    "body",
    [
        lambda w, x: x if x.sum() > 0 else x @ w,
        lambda w, x: x * float(x.sum()),
        lambda w, x: x[jnp.nonzero(x[:, 0])],
        lambda w, x: jnp.zeros(x.sum().astype(int)),
    ],
    ids=["branch", "float", "nonzero", "size"],
)
def test_c08_a_needed_value_is_the_error_of_jit(body):
    """The body branches on an array, asks for its float, or for a size that depends on data."""
    with pytest.raises(Exception, match=r".") as want:
        jax.jit(functools.partial(square_loss, body))(weights(2), X)
    with pytest.raises(type(want.value), match=r".") as got:
        hcompile.jit(functools.partial(square_loss, hcompile.region(body)))(weights(2), X)
    first = lambda error: str(error.value).partition("\n")[0]
    assert first(got) == first(want)
    lines = lambda error: [
        frame.lineno
        for frame in traceback.extract_tb(error.tb)
        if frame.filename == __file__ and frame.name == "<lambda>"
    ]
    assert lines(got) == lines(want)


# --- B. Arguments -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    w: jax.Array
    b: jax.Array


class TestC09StructuredArguments:
    def test_a_registered_dataclass_by_keyword(self):
        body = lambda x, *, p: jnp.tanh(x @ p.w) + p.b
        params = [Params(w, jnp.full((1, 4), 0.5)) for w in weights(3)]

        def loss(body, params, x):
            for p in params:
                x = body(x, p=p)
            return jnp.mean(x**2)

        check(grads_of(loss), body, params, X)
        assert_bodies(1)

    def test_a_dataclass_beside_an_array_in_a_tuple_in_a_dict(self):
        body = lambda tree, x: x @ tree["pair"][0].w * tree["pair"][1] + tree["pair"][0].b
        trees = [
            {"pair": (Params(w, jnp.zeros((1, 4))), jnp.float32(i))}
            for i, w in enumerate(weights(3), 1)
        ]
        f = check(square_loss, body, trees, X)
        assert_bodies(1)
        assert executables(f)["<lambda>.forward"] == [3]


class TestC10Flatteners:
    def register(self, flatten):
        class Node:
            def __init__(self, w, scale):
                self.w, self.scale = w, scale

        def unflatten(scale, children):
            return Node(children[0], scale)

        jax.tree_util.register_pytree_node(Node, flatten, unflatten)
        return Node

    class Flattener:
        def __call__(self, node):
            return (node.w,), node.scale

    @pytest.mark.parametrize(
        "flatten",
        [functools.partial(lambda _, node: ((node.w,), node.scale), "bound"), Flattener()],
        ids=["partial", "callable object"],
    )
    def test_unusual_flatteners(self, flatten):
        Node = self.register(flatten)
        nodes = [Node(w, scale) for w, scale in zip(weights(4), (2, 2, 3, 2), strict=True)]
        check(square_loss, lambda node, x: jnp.tanh(x @ node.w) * node.scale, nodes, X)
        assert_bodies(2)

    def test_a_registration_that_changes_between_programs(self):
        swapped = False

        class Node:
            def __init__(self, a, b):
                self.a, self.b = a, b

        def flatten(node):
            return ((node.b, node.a) if swapped else (node.a, node.b)), swapped

        def unflatten(swapped, children):
            return Node(*(reversed(children) if swapped else children))

        jax.tree_util.register_pytree_node(Node, flatten, unflatten)
        body = lambda node, x: jnp.tanh(x @ node.a) - x @ node.b
        marked = hcompile.region(body)
        nodes = [Node(w, w + 1) for w in weights(3)]
        want = jax.jit(lambda x: square_loss(body, nodes, x))(X)
        for swapped in (False, True, False):  # noqa: B007
            f = hcompile.jit(lambda nodes, x: square_loss(marked, nodes, x))
            assert_trees_close(f(nodes, X), want)


def test_c11_flatteners_run_a_bounded_number_of_times():
    """A large structured argument, many calls in a trace and many steps."""
    count = 0

    class Big:
        def __init__(self, leaves):
            self.leaves = leaves

    def flatten(big):
        nonlocal count
        count += 1
        return big.leaves, None

    jax.tree_util.register_pytree_node(Big, flatten, lambda _, leaves: Big(tuple(leaves)))
    body = lambda big, x: x + big.leaves[3]
    marked = hcompile.region(body)

    def flattened(jit, body, depth):
        nonlocal count
        step = jit(lambda big, x: chain(*[big] * depth)(body, x))
        big = Big(tuple(jnp.float32(i) for i in range(50)))
        counts = []
        for _ in range(4):
            count = 0
            step(big, X)
            counts.append(count)
        return counts[0], counts[-1]

    tracing = {}
    for depth in (2, 4, 8, 16):  # the first traces the body as well
        tracing[depth], steady = flattened(hcompile.jit, marked, depth)
        assert steady <= flattened(jax.jit, body, depth)[1]
    assert tracing[16] - tracing[8] == 2 * (tracing[8] - tracing[4])
    assert (tracing[16] - tracing[8]) / 8 <= 4


def test_c12_objects_with_array_attributes():
    """Two objects of equal shapes, then one with another shape."""

    class Holder:
        def __init__(self, w, b):
            self.w, self.b = w, b

    a, b = weights(2)
    holders = [Holder(a, jnp.ones((1, 4))), Holder(b, jnp.zeros((1, 4))), Holder(a, jnp.ones(()))]
    check(chain(*holders), lambda holder, x: jnp.tanh(x @ holder.w) + holder.b, X)
    assert_bodies(2)


class Incomparable:
    def __init__(self):
        self.iterator = iter([1, 2])

    def __eq__(self, other):
        raise TypeError("cannot be compared")

    __hash__ = None


def test_c13_an_object_that_cannot_be_compared():
    """It sits beside an array inside a tuple argument, and holds what nobody can read."""
    thing = Incomparable()
    body = lambda pair, x: x @ pair[1] + (pair[0].iterator is not None)
    check(chain(*[(thing, w) for w in weights(3)]), body, X)
    assert only()["inlined"] == 3
    assert "unknown equality" in " ".join(only()["explanations"])


@pytest.mark.xfail(
    strict=True, reason="a static argument is known by ==, here identity, as by jax.jit: stale"
)
def test_c14_arrays_in_a_static_argument_change():
    """A loud error or the new values; never the old ones."""

    @jax.tree_util.register_pytree_node_class
    class Config:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    marked = hcompile.region(lambda w, x: jnp.tanh(x @ w))

    @functools.partial(hcompile.jit, static_argnums=0)
    def f(config, x):
        return marked(config.w, marked(config.w, x))

    config = Config(weights(1)[0])
    for w in weights(3):
        config.w = w
        np.testing.assert_allclose(f(config, X), jnp.tanh(jnp.tanh(X @ w) @ w), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c15_a_python_scalar_first_then_arrays(dtype):
    """The carried value starts as a Python number."""
    types = []

    def program(body, x):
        carry = 0.0
        for _ in range(4):
            carry = body(carry, x)
            types.append(jax.typeof(carry))
        return carry

    check(program, lambda carry, x: carry + x.sum(), X.astype(dtype), rtol=1e-2)
    assert len(set(types)) == 1
    assert only()["traces"] <= 2


def test_c16_one_array_for_two_parameters():
    """Later two different arrays of the same shape."""

    def loss(body, a, b, x):
        return jnp.mean(body(a, a, body(a, b, body(b, b, x))) ** 2)

    def grads(body, a, b, x):
        return jax.value_and_grad(functools.partial(loss, body), argnums=(0, 1, 2))(a, b, x)

    f = check(grads, lambda a, b, x: jnp.tanh(x @ a) @ b + x * a[:1], *weights(2), X)
    assert_bodies(1)
    assert executables(f)["<lambda>.forward"] == [3]


def test_c17_transposed_weights_and_slices():
    """Layout and origin of an argument are no part of the key."""
    stacked = jnp.stack(weights(6))

    def program(body, stacked, w, x):
        for view in (w, w.T, stacked[0], stacked[3].T, stacked[:, 1, :4][:4], stacked[5]):
            x = body(view, x)
        return x

    f = check(program, lambda w, x: jnp.tanh(x @ w), stacked, weights(7)[6], X)
    assert_bodies(1)
    assert executables(f)["<lambda>.forward"] == [6]
