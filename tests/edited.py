"""A small user program, and every place in it that ``test_edits`` edits between calls.

``Program()`` executes the source below twice, as two modules with equal code, so that edits of
classes and globals end with it.
"""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

SOURCE = '''
NONE = type(None)
SCALE = 2.0
SHIFT = jnp.float32(0.5)
MODE = "up"
TABLE = np.array([1.0, 2.0, 3.0], np.float32)
NUMBERS = [0.5, 2.0]
OPTIONS = {"a": 1.0, "b": 2.0}
CHOICES = {1, 2}
CONFIG = types.SimpleNamespace(level=2.0, inner=types.SimpleNamespace(items=[1.0, "up"]))


def combine(x, *values):
    """What it returns tells values, their types and their order apart."""
    for value in values:
        if isinstance(value, NONE):
            x = -x
        elif isinstance(value, str):
            x = x + len(value)
        elif isinstance(value, (list, tuple)):
            x = combine(x + 1, *value)
        elif isinstance(value, dict):
            for key, part in value.items():
                x = combine(x, key, part) * 2
        elif isinstance(value, (set, frozenset)):
            x = combine(x, *sorted(value))
        elif isinstance(value, Node):
            x = combine(x, value.w, value.kind)
        elif callable(value):
            x = value(x)
        else:
            x = x * value + 1
    return x


def helper(x):
    return x * SCALE + len(MODE)


def other_helper(x):
    return helper(x) - SHIFT


def plain(x):
    return x * 3


ACT = helper


def reads_globals(x, arg):
    return {"z": combine(x, SCALE, MODE, NUMBERS, CHOICES), "a": [ACT(x), MODE, arg]}


def reads_containers(x, arg):
    return combine(x, OPTIONS, SHIFT, CONFIG.level, CONFIG.inner.items, arg), OPTIONS


def reads_table(x, arg):
    return combine(x, float(TABLE[0]), TABLE.max(), arg), TABLE


def reads_attribute(x, arg):
    return combine(x, reads_attribute.gain, arg)


reads_attribute.gain = 2.0


def make_closure(scale, act, items):
    def closure(x, arg):
        return combine(act(x), scale, items), [inner(x), arg]

    def inner(x):
        return x * scale

    return closure


def has_defaults(x, arg, scale=2.0, items=(1.0, 2.0), *, shift=0.5, act=helper):
    return combine(act(x), scale, items, shift, arg)


def compares_identity(x, arg):
    if isinstance(arg, (list, tuple)) and len(arg) == 2 and arg[0] is arg[1]:
        return x * 2
    return x * 3 if arg is None else x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["kind"])
@dataclasses.dataclass
class Node:
    w: object
    kind: object


class Slotted:
    __slots__ = ("scale", "items")

    def __init__(self, scale, items):
        self.scale = scale
        self.items = items

    def __call__(self, x):
        return combine(x, self.scale, self.items)

    def __getitem__(self, key):
        return self.items[key]

    def __len__(self):
        return len(self.items)


@dataclasses.dataclass
class Config:
    scale: object
    mode: str
    nested: object = None


class Base:
    gain = 1.5

    def tweak(self, x):
        return x * self.gain * SCALE


class Layer(Base):
    factor = 3.0
    act = staticmethod(plain)

    def __init__(self, w):
        self.w = w
        self.name = "unread"
        self.stored = 2.0
        self.parts = [Slotted(1.5, [1.0, 2.0]), Config(2.0, "up", {"deep": [0.5]})]

    @property
    def level(self):
        return self.stored

    @classmethod
    def made(cls, x):
        return x * cls.factor

    def extra(self, x):
        return helper(x)

    def __call__(self, x, arg):
        slotted, config = self.parts
        x = self.made(self.act(self.extra(self.tweak(x))))
        x = combine(slotted(x), self.w, self.level, config.scale, config.nested)
        return x, (config.mode, arg)

    def apply(self, x, arg):
        slotted, config = self.parts
        return {"b": self.extra(x) * slotted[0], "a": len(slotted), config.mode: arg}

    def uses_getattr(self, x, arg):
        return combine(x, getattr(self, "stored"), getattr(self.parts[1], "scale"), arg)


def weighted(w, act, x, arg, *, scale=1.0):
    return combine(act(x), w, scale, arg)


LAYER = Layer(jnp.float32(0.25))
NODE = Node(jnp.float32(0.5), 2)


def reads_node(x, arg):
    return combine(x, NODE, arg), NODE


def calls_layer(x, arg):
    return LAYER(x, arg)
'''
CODE = compile(SOURCE, "edited_program.py", "exec")
MISSING = object()
Pair = collections.namedtuple("Pair", "first second")

A, B = jnp.float32(2), jnp.float32(0.5)
NUMBERS = (0.5, 2, 2.0, True, -1.5, None, np.float32(2), np.int8(2), A, B, jnp.int32(3))
NUMBERS = (*NUMBERS, jnp.asarray(2.0), jnp.bfloat16(2), np.float64(0.5))
STRINGS = ("up", "down", "x", "a")
ITEMS = (
    lambda: [1.0, 2],
    lambda: [2, 1.0],
    lambda: (1.0, 2),
    lambda: [1.0, 2.0],
    lambda: [[0.5], {"a": (1.0, "x")}],
    lambda: [A, 1.0],
    lambda: [B, 1.0],
    lambda: [1.0, A],
    lambda: {"a": 1.0, "b": 2.0},
    lambda: {"b": 2.0, "a": 1.0},
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    lambda: {"a": A, "b": {"c": None}},
    lambda: Pair(2.0, [1]),
    lambda: Pair(2, [1.0]),
)
# Arguments of a call, some made of the traced ``x``.
ARGUMENTS = (
    *(lambda x, value=value: value for value in (*NUMBERS, *STRINGS)),
    *(lambda x, make=make: make() for make in ITEMS),
    lambda x: x,
    lambda x: [x, x],
    lambda x: [x, x + 1],
    lambda x: [A, A],
    lambda x: [A, B],
    lambda x: {"k": x, "a": "up"},
    lambda x: (x.astype(jnp.int32), x.astype(jnp.bfloat16), None),
)


class Place:
    """Something to edit: how to read and write it, and what may stand there."""

    def __init__(self, get, put, pool, readers):
        self.get = get
        self.put = put
        self.pool = pool
        self.readers = readers

    def edit(self, choice):
        """Writes the chosen value; returns what undoes it."""
        new, old = self.pool[choice % len(self.pool)], self.get()
        self.put(new() if any(new is make for make in ITEMS) else new)
        return lambda: self.put(old)


def item(container, key, pool, readers):
    def put(value):
        if value is MISSING:
            container.pop(key, None)
        else:
            container[key] = value

    def get():
        return container.get(key, MISSING) if isinstance(container, dict) else container[key]

    return Place(get, put, pool, readers)


def attribute(owner, name, pool, readers):
    def get():
        if hasattr(owner, "__dict__"):
            return vars(owner).get(name, MISSING)
        return getattr(owner, name, MISSING)

    def put(value):
        if value is not MISSING:
            setattr(owner, name, value)
        elif get() is not MISSING:
            delattr(owner, name)

    return Place(get, put, pool, readers)


def cell(fn, name, pool, readers):
    found = fn.__closure__[fn.__code__.co_freevars.index(name)]
    return attribute(found, "cell_contents", pool, readers)


def default(fn, index, pool, readers):
    def put(value):
        values = list(fn.__defaults__)
        values[index] = value
        fn.__defaults__ = tuple(values)

    return Place(lambda: fn.__defaults__[index], put, pool, readers)


def contents(container, pool, readers):
    """Of a list, dict or set, edited in place."""

    def put(value):
        container.clear()
        container.extend(value) if isinstance(container, list) else container.update(value)

    return Place(container.copy, put, [type(container)(p) for p in pool], readers)


class Module:
    """One of the program's two modules: functions to call, and places to edit."""

    def __init__(self, name):
        self.names = names = vars(types.ModuleType(name))
        libraries = (jax, jnp, np, collections, dataclasses, functools, types)
        names |= {m.__name__: m for m in libraries} | {"jnp": jnp, "np": np}
        exec(CODE, names)
        layer = names["LAYER"]
        closure = names["make_closure"](2.0, names["helper"], [1.0, A])
        partial = functools.partial(names["weighted"], A, names["helper"], scale=2.0)
        holder = self.holder = types.SimpleNamespace(partial=partial)
        reads = "globals containers table attribute node".split()
        self.calls = {f"reads_{r}": names[f"reads_{r}"] for r in reads} | {
            n: names[n] for n in ("has_defaults", "compares_identity", "calls_layer")
        }
        self.calls |= {"closure": closure, "layer": layer, "apply": layer.apply}
        self.calls |= {"getattr": layer.uses_getattr, "partial": lambda x, a: holder.partial(x, a)}
        self.calls["a partial"] = partial

    def places(self, functions):
        """By name; ``functions`` may stand where a function stands."""
        n, layer = self.names, self.names["LAYER"]
        slotted, config = layer.parts
        closure, has_defaults = self.calls["closure"], n["has_defaults"]
        kind, base = type(layer), n["Base"]
        layers = ("layer", "calls_layer", "apply")
        methods = [lambda self, x: x * 5, lambda self, x: self.stored * x, MISSING]
        overrides = [lambda x: x * 7, n["other_helper"], MISSING]
        boxes, table = ("layer", "calls_layer"), ("reads_table",)
        found = {
            "SCALE": item(n, "SCALE", NUMBERS, ("reads_globals", "has_defaults", *layers)),
            "MODE": item(n, "MODE", STRINGS, ("reads_globals", "closure", *layers)),
            "SHIFT": item(n, "SHIFT", NUMBERS, ("reads_containers",)),
            "ACT": item(n, "ACT", functions, ("reads_globals",)),
            "helper": item(n, "helper", [*functions[1:3], *functions[4:]], ("closure", *layers)),
            "len": item(n, "len", [lambda v: 4, MISSING], ("reads_globals", "apply")),
            "NUMBERS": item(n, "NUMBERS", ITEMS, ("reads_globals",)),
            "NUMBERS[0]": contents(n["NUMBERS"], [(1, 2.0), (2.0, 1), (A, B)], ("reads_globals",)),
            "OPTIONS": item(n, "OPTIONS", ITEMS, ("reads_containers",)),
            "OPTIONS[a]": contents(n["OPTIONS"], [i() for i in ITEMS[8:10]], ("reads_containers",)),
            "CHOICES": contents(n["CHOICES"], [{1}, {1, 3}, {2.5}, {True, 5}], ("reads_globals",)),
            "TABLE[0]": item(n["TABLE"], 0, (1.0, 5.0, -2.0), table),
            "TABLE": item(n, "TABLE", [np.arange(k, dtype=d) for k in (2, 3) for d in "fi"], table),
            "CONFIG.level": attribute(n["CONFIG"], "level", NUMBERS, ("reads_containers",)),
            "CONFIG.inner": attribute(n["CONFIG"].inner, "items", ITEMS, ("reads_containers",)),
            "gain of f": attribute(n["reads_attribute"], "gain", NUMBERS, ("reads_attribute",)),
            "cell scale": cell(closure, "scale", NUMBERS, ("closure",)),
            "cell act": cell(closure, "act", functions, ("closure",)),
            "cell items": cell(closure, "items", ITEMS, ("closure",)),
            "default 0": default(has_defaults, 0, NUMBERS, ("has_defaults",)),
            "default 1": default(has_defaults, 1, [i() for i in ITEMS], ("has_defaults",)),
            "node.w": attribute(n["NODE"], "w", NUMBERS, ("reads_node",)),
            "node.kind": attribute(n["NODE"], "kind", (2, 2.0, True, "up", -0.0), ("reads_node",)),
            "NODE": item(n, "NODE", [n["Node"](A, 2), n["Node"](2.0, 2)], ("reads_node",)),
            "w": attribute(layer, "w", NUMBERS, boxes),
            "name": attribute(layer, "name", STRINGS, boxes),
            "stored": attribute(layer, "stored", NUMBERS, ("getattr", *boxes)),
            "gain": attribute(layer, "gain", (*NUMBERS[:5], A, MISSING), boxes),
            "Layer.gain": attribute(kind, "gain", (*NUMBERS[:5], A, MISSING), boxes),
            "Base.gain": attribute(base, "gain", (*NUMBERS[:5], A, B), boxes),
            "Layer.factor": attribute(kind, "factor", (*NUMBERS[:5], A), boxes),
            "Layer.act": attribute(kind, "act", [*map(staticmethod, functions)], boxes),
            "Layer.tweak": attribute(kind, "tweak", methods, boxes),
            "Layer.extra": attribute(kind, "extra", methods[:2], layers),
            "Layer.level": attribute(kind, "level", [property(lambda s: s.w), 2.0], boxes),
            "extra": attribute(layer, "extra", overrides, layers),
            "act": attribute(layer, "act", overrides, boxes),
            "slot scale": attribute(slotted, "scale", NUMBERS, boxes),
            "slot items": attribute(slotted, "items", ITEMS[:4], layers),
            "field scale": attribute(config, "scale", NUMBERS, ("getattr", *boxes)),
            "field mode": attribute(config, "mode", STRINGS, layers),
            "field nested": attribute(config, "nested", ITEMS, boxes),
            "deep": item(config.nested, "deep", ITEMS, boxes),
            "shared": item(layer.parts, 0, [slotted, n["Slotted"](2, [A, 1.0])], layers),
        }
        for name, pool in (("shift", NUMBERS), ("act", functions)):
            found[f"kwdefault {name}"] = item(
                has_defaults.__kwdefaults__, name, pool, ("has_defaults",)
            )
        partials = [
            functools.partial(n["weighted"], w, act, **named)
            for w in (A, B, 2.0)
            for act in functions[:2]
            for named in ({"scale": 2.0}, {"scale": 2}, {})
        ]
        found["partial"] = attribute(self.holder, "partial", partials, ("partial",))
        found["keywords"] = item(self.calls["a partial"].keywords, "scale", NUMBERS, ("a partial",))
        return found


class Program:
    """Both modules, and the functions that may stand in for one another in either."""

    def __init__(self):
        self.modules = [Module("edited_one"), Module("edited_two")]
        one, two = (m.names for m in self.modules)
        functions = [one["helper"], one["plain"], two["plain"], two["other_helper"], jnp.tanh]
        functions += [functools.partial(jnp.multiply, 3.0), one["Slotted"](2.0, [1.0]), abs]
        functions += [functools.partial(two["combine"], 1.0), lambda x: x - A, two["LAYER"].tweak]
        self.calls = [m.calls for m in self.modules]
        self.places = [m.places(functions) for m in self.modules]
