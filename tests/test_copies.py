"""A body is traced on copies: they are as the originals, and a change happens once."""

import collections
import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hcompile

X = jnp.array([1.0, 2.0])
FIRST, TWICE = {}, {}


def case(table):
    return lambda make: table.setdefault(make.__name__, make)


# Each returns a function whose copy answers differently at once.


@case(FIRST)
def subclass_of_float():
    class Scale(float):
        pass

    scale = Scale(2.0)
    return lambda x: x * float(scale)


@case(FIRST)
def sentinel_that_a_method_reads():
    class Missing:
        pass

    class Layer:
        default = Missing()

        def __call__(self, x, scale):
            return x * 2 if scale is self.default else x * 3

    layer = Layer()
    sentinel = Layer.default
    return lambda x: layer(x, sentinel)


@case(FIRST)
def one_numpy_array_in_two_places():
    table = np.ones(2)
    pair = (table, table)
    return lambda x: x * 2 if pair[0] is pair[1] else x * 3


@case(FIRST)
def layout_of_a_numpy_array():
    table = np.arange(4, dtype=np.float32).reshape(2, 2).T
    return lambda x: x + table.ravel(order="K")[:2]


@pytest.mark.parametrize("name", FIRST)
def test_a_copy_is_the_original(name):
    fn = FIRST[name]()
    np.testing.assert_array_equal(jax.jit(hcompile.region(fn))(X), jax.jit(fn)(X))


# Each returns a function that counts its calls, in something that is not copied.


@case(TWICE)
def global_of_a_method():
    names = {"__name__": "user_module", "types": types}
    exec(
        "COUNTER = types.SimpleNamespace(n=0)\n"
        "class Layer:\n"
        "    def __call__(self, x):\n"
        "        COUNTER.n += 1\n"
        "        return x * COUNTER.n\n",
        names,
    )
    return names["Layer"]()


@case(TWICE)
def object_of_a_class():
    class Layer:
        counter = types.SimpleNamespace(n=0)

        def __call__(self, x):
            self.counter.n += 1
            return x * self.counter.n

    return Layer()


@case(TWICE)
def set_of_a_class():
    class Layer:
        seen = set()

        def __call__(self, x):
            self.seen.add(len(self.seen))
            return x * len(self.seen)

    return Layer()


@case(TWICE)
def numpy_array_of_a_module():
    module = types.ModuleType("user_config")
    module.table = np.zeros(2, np.float32)

    def fn(x):
        module.table[0] += 1
        return x * module.table[0]

    return fn


@case(TWICE)
def new_attribute_of_a_class():
    class Layer:
        def __call__(self, x):
            Layer.n = getattr(Layer, "n", 0) + 1
            return x * Layer.n

    return Layer()


@pytest.mark.parametrize("name", TWICE)
def test_a_side_effect_happens_once(name):
    fn = hcompile.region(TWICE[name]())
    np.testing.assert_array_equal(jax.jit(lambda x: fn(x))(X), X)


def test_setattr_is_not_lost():
    class Store:
        pass

    store = Store()
    jax.jit(hcompile.region(lambda x: setattr(store, f"cache_{x.ndim}", 3) or x))(X)
    assert vars(store) == {"cache_1": 3}


def test_the_order_of_a_dict_in_a_named_tuple():
    pair = collections.namedtuple("Pair", "d")
    seen = []
    fn = hcompile.region(lambda x: pair({"b": x, "a": x + 1}))
    jax.make_jaxpr(lambda x: seen.append(list(fn(x).d)) or x)(1.0)
    assert seen == [["b", "a"]]


def test_two_functions_of_one_name_are_both_counted():
    first, second = (lambda x: x * 2), (lambda x: x * 3)
    jax.make_jaxpr(lambda x: hcompile.region(second)(hcompile.region(first)(x)))(1.0)
    assert sum(info["calls"] for info in hcompile.cache_info().values()) == 2


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="flattening a pytree loses what it does not hold"
)
def test_an_attribute_outside_a_pytree():
    @functools.partial(
        jax.tree_util.register_dataclass,
        data_fields=["w"],
        meta_fields=[],
        drop_fields=["scale"],
    )
    @dataclasses.dataclass
    class Node:
        w: jax.Array
        scale: float = 1.0

    node = Node(X, 2.0)
    fn = lambda x: x * node.w * node.scale
    np.testing.assert_array_equal(jax.jit(hcompile.region(fn))(X), jax.jit(fn)(X))


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="what another thread wrote is taken for a change"
)
def test_what_another_thread_writes_stays():
    class Table:
        scales = {"a": 2.0}

    flattened = []

    @jax.tree_util.register_pytree_node_class
    class Node:
        """While the region is traced, another thread registers a scale."""

        def tree_flatten(self):
            flattened.append(self)
            if len(flattened) == 3:
                thread = threading.Thread(target=lambda: Table.scales.update(b=3.0))
                thread.start()
                thread.join()
            return (), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    node = Node()
    jax.jit(hcompile.region(lambda x: x * Table.scales["a"] if node else x))(X)
    assert Table.scales == {"a": 2.0, "b": 3.0}
