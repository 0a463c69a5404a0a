"""Edits that Python code sees by rare ways: each has to be seen by the next call."""

import copy
import enum
import functools
import operator
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import hcompile

X = jnp.array([1.0, 2.0])
K = 2.0
EDITS = {}


def case(make):
    return EDITS.setdefault(make.__name__, make)


def set_k():
    globals()["K"] = 3.0


# Each returns a function and an edit that a later call must see.


@case
def set_order():
    box = [{0, 8}]
    fn = lambda x: functools.reduce(lambda x, s: x * 2 + s, box[0], x)
    return fn, lambda: box.__setitem__(0, {8, 0})


@case
def getattr_of_a_method():
    class Layer:
        kind = "a"

        def act_a(self, x):
            return x * 2

        def __call__(self, x):
            return getattr(self, "act_" + self.kind)(x)

    return Layer(), lambda: setattr(Layer, "act_a", lambda self, x: x * 7)


@case
def getattr_of_a_class_attribute():
    class Config:
        scale_0 = 2.0

    return lambda x: x * getattr(Config, f"scale_{x.ndim - 1}"), lambda: setattr(
        Config, "scale_0", 3.0
    )


@case
def import_in_the_body():
    module = sys.modules["edited_by_test"] = types.ModuleType("edited_by_test")
    module.SCALE = 2.0

    def fn(x):
        from edited_by_test import SCALE

        return x * SCALE

    return fn, lambda: setattr(module, "SCALE", 3.0)


@case
def setup_of_a_flax_module():
    class Block(linen.Module):
        def setup(self):
            self.scale = K

        def __call__(self, x):
            return x * self.scale

    block = Block()
    return lambda x: block.apply({}, x), set_k


@case
def method_of_an_enum():
    class Act(enum.Enum):
        SCALED = 1

        def apply(self, x):
            return x * K

    act = Act.SCALED
    return lambda x: act.apply(x), set_k


@case
def attribute_of_an_enum_member():
    class Act(enum.Enum):
        SCALED = 1

    Act.SCALED.scale = 2.0
    act = Act.SCALED
    return lambda x: x * act.scale, lambda: setattr(act, "scale", 3.0)


@case
def attribute_of_a_numpy_scalar():
    class Scaled(np.float64):
        scale = 1.0

    value = Scaled(2.0)
    return lambda x: x * value.scale, lambda: setattr(value, "scale", 3.0)


@case
def unit_of_a_datetime():
    box = [np.datetime64(1, "D")]
    fn = lambda x: x * float(box[0].astype("datetime64[s]").astype(int))
    return fn, lambda: box.__setitem__(0, np.datetime64(1, "s"))


class Ranked:
    def __init__(self, rank, value):
        self.rank = rank
        self.value = value

    def __lt__(self, other):
        return self.rank < other.rank

    def __eq__(self, other):
        return self.rank == other.rank

    def __str__(self):
        return "r" * self.rank

    __hash__ = None


@case
def comparison_by_min():
    a, b = Ranked(1, 2.0), Ranked(2, 3.0)
    return lambda x: x * min(a, b).value, lambda: setattr(a, "rank", 5)


@case
def equality_by_index():
    items, wanted = [Ranked(1, 1.0), Ranked(2, 1.0)], Ranked(2, 1.0)
    return lambda x: x * items.index(wanted), lambda: setattr(wanted, "rank", 1)


@case
def formatting_by_percent():
    ranked = Ranked(1, 1.0)
    return lambda x: x * len("%s" % ranked), lambda: setattr(ranked, "rank", 4)  # noqa: UP031


@case
def attrgetter_made_elsewhere():
    get, ranked = operator.attrgetter("value"), Ranked(1, 2.0)
    return lambda x: x * get(ranked), lambda: setattr(ranked, "value", 3.0)


@case
def copy_by_the_class():
    class Copied:
        def __copy__(self):
            return K

    copied = Copied()
    return lambda x: x * copy.copy(copied), set_k


@case
def property_of_another_kind():
    class Lazy(property):
        def __get__(self, owner, kind=None):
            return K

    class Layer:
        scale = Lazy(lambda self: 1.0)

    layer = Layer()
    return lambda x: x * layer.scale, set_k


@case
def attribute_of_a_metaclass():
    class Meta(type):
        scale = 2.0

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.scale, lambda: setattr(Meta, "scale", 3.0)


@case
def getattr_of_a_module():
    module, state = types.ModuleType("user_config"), {"scale": 2.0}
    module.__getattr__ = lambda name: state["scale"]
    return lambda x: x * module.scale, lambda: state.update(scale=3.0)


@case
def name_of_a_function():
    def helper(x):
        return x

    fn = lambda x: x * (2 if helper.__name__ == "helper" else 3)
    return fn, lambda: setattr(helper, "__name__", "other")


@case
def callable_of_a_library_with_state():
    poly = np.poly1d([1.0, 2.0])
    return lambda x: x * float(poly(2.0)), lambda: poly.__setitem__(0, 7.0)


@case
def function_beside_what_cannot_be_walked():
    def helper(x):
        return x * K

    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, w, aux):
            self.w, self.aux = w, aux

        def tree_flatten(self):
            return (self.w,), self.aux

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children, aux)

    node = Node(X, (helper, threading.Lock()))
    return lambda x: node.aux[0](x) * node.w, set_k


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_seen(name, monkeypatch):
    monkeypatch.setitem(globals(), "K", 2.0)
    fn, change = EDITS[name]()
    for _ in range(2):
        got = jax.jit(lambda x: hcompile.region(fn)(x))(X)
        np.testing.assert_array_equal(got, jax.jit(lambda x: fn(x))(X))
        change()
