"""A call's arguments: which are static, and what they have in common with those compiled for."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _jax_compat


class Statics:
    """Which arguments of a function are static, by position and by name, as ``jax.jit`` infers."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]):
        nums, names = options.get("static_argnums"), options.get("static_argnames")
        self.nums = {nums} if isinstance(nums, int) else set(nums or ())
        self.names = {names} if isinstance(names, str) else set(names or ())
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            return
        positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.nums = {n + len(positional) if n < 0 else n for n in self.nums}
        if names is None:
            self.names = {positional[n] for n in self.nums if n < len(positional)}
        elif nums is None:
            self.nums = {positional.index(name) for name in self.names if name in positional}

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], tuple]:
        """Dynamic positional and keyword arguments, and the static values."""
        if not (self.nums or self.names):
            return args, kwargs, ()
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in self.nums)
        named = {name: value for name, value in kwargs.items() if name not in self.names}
        statics = (
            tuple((i, type(args[i]), args[i]) for i in sorted(self.nums) if i < len(args)),
            tuple((n, type(kwargs[n]), kwargs[n]) for n in sorted(self.names & kwargs.keys())),
        )
        return dynamic, named, statics


_array_facts = operator.attrgetter("aval", "sharding", "committed")


class Signature:
    """What a call's arguments must have in common with those a program was compiled for."""

    __slots__ = ("context", "facts", "has_host_values", "leaves", "statics", "treedef")

    def __init__(self, statics: Statics, args: tuple, kwargs: dict[str, Any]):
        dynamic, named, self.statics = statics.split(args, kwargs)
        self.leaves, self.treedef = jax.tree_util.tree_flatten((dynamic, named))
        try:
            self.facts = list(map(_array_facts, self.leaves))
            self.has_host_values = False
        except AttributeError:  # a NumPy array or a Python number among them
            self.facts = list(map(_leaf_facts, self.leaves))
            self.has_host_values = True
        self.context = _jax_compat.context_token() if _jax_compat.is_eager() else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Signature)
            and self.treedef == other.treedef
            and self.facts == other.facts
            and self.statics == other.statics
            and self.context == other.context
        )

    __hash__ = None  # type: ignore[assignment]

    def path(self, index: int) -> str:
        """Where leaf number ``index`` stands in the arguments."""
        tree = jax.tree_util.tree_unflatten(self.treedef, range(len(self.leaves)))
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        (side, *rest), _ = paths[index]
        head = "" if side.idx == 0 else "keyword "
        return head + jax.tree_util.keystr(tuple(rest))


def _leaf_facts(leaf: Any) -> tuple:
    if isinstance(leaf, jax.Array):
        return _array_facts(leaf)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return (type(leaf), shape, dtype, getattr(leaf, "sharding", None))


def placement(leaves: Sequence[Any]) -> tuple[Any, str | None]:
    """The one sharding that arguments are committed to (None if to none), or why there is not."""
    shardings = {
        leaf.sharding
        for leaf in leaves
        if getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)
    }
    for sharding in shardings:
        if len(sharding.device_set) > 1:
            return None, "an argument is spread over several devices"
        if sharding.memory_kind not in (None, _default_memory(sharding)):
            return None, f"an argument lives in the memory {sharding.memory_kind!r}"
    devices = {device for sharding in shardings for device in sharding.device_set}
    if len(devices) > 1:
        return None, "arguments live on different devices"
    return (jax.sharding.SingleDeviceSharding(devices.pop()) if devices else None), None


def _default_memory(sharding: Any) -> str:
    (device,) = sharding.device_set
    return device.default_memory().kind
