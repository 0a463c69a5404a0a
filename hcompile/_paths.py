"""Where the walk found something, and where two facts differ: text for reports."""

from __future__ import annotations

import collections
import types
from typing import Any

import jax

# Dicts whose own order of keys Python code can see; others are left to their registration.
DICTS = (dict, collections.OrderedDict, collections.defaultdict)

# A path is ``(text, None)``, or where something was found and its key there: an attribute's name,
# a number in ``(path, container)``, or a kind and name in a function.


def render(path: Any) -> str:
    """A path as a user would write it, e.g. ``self.norm.eps`` or ``arguments[1]``."""
    where, key = path
    if key is None:
        return where or "the function"
    if isinstance(where, types.FunctionType):
        kind, name = key
        if kind == "default":
            return f"default {name} of {where.__name__}"
        return name if kind == "cell" else f"{kind} {name}"
    if isinstance(key, str):
        return f"{render(where)}.{key}"
    prefix, container = where
    if type(container) in DICTS:
        return f"{render(prefix)}[{list(container)[key]!r}]"
    paths, _ = jax.tree_util.tree_flatten_with_path(
        container, is_leaf=lambda part: part is not container
    )
    return render(prefix) + jax.tree_util.keystr(paths[key][0])


def difference(path: str, before: Any, fact: Any) -> tuple[str, Any, Any]:
    """Where a fact about ``path`` differs from what it was, and both values there."""
    if before is None and type(fact) is tuple and type(fact[0]) is int:
        before = fact[:1]
    if not (type(before) is tuple and type(fact) is tuple and before and fact):
        return path, before, fact
    if type(before[0]) is int and type(fact[0]) is int:  # named attributes
        changed = sorted(set(before[1:]) ^ set(fact[1:]))
        if changed:
            there, gone = "an attribute", "not there"
            was, now = (there, gone) if changed[0] in before else (gone, there)
            return f"{path}.{changed[0]}", was, now
    elif len(before) > 2 and isinstance(before[0], type) and before[:-2] == fact[:-2]:
        return _first_difference(path, before, fact)  # plain constants, in one fact
    return path, before, fact


def _first_difference(path: str, before: tuple, fact: tuple) -> tuple[str, Any, Any]:
    *head, kinds, values = fact
    *_, old_kinds, old_values = before
    for i, (old_kind, kind) in enumerate(zip(old_kinds, kinds, strict=False)):
        if (old_kind, old_values[i]) != (kind, values[i]):
            key = i if len(head) == 1 else head[1][i]
            return f"{path}[{key!r}]", old_values[i], values[i]
    return path, before, fact
