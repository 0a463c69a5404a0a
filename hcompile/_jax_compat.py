"""The only file that knows JAX versions and JAX's extension interfaces.

Everything here comes from ``jax.*``, ``jax.extend.*`` or ``jax.interpreters.*``. The floor is
0.10.2; what differs between releases is said at the branch that handles it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import partial_eval as pe

# --- Where we are: eager or under a trace, and in which of JAX's contexts ---------------------


def evaluating() -> AbstractContextManager[None]:
    """A context in which nothing is traced, whatever is traced outside it."""
    return jax.core.eval_context()


with evaluating():
    _EAGER = jex.get_opaque_trace_state()


def is_eager() -> bool:
    """Whether no trace and no transformation is active in this thread."""
    return jex.get_opaque_trace_state() == _EAGER


@jax.tree_util.register_static
class ContextToken:
    """One set of JAX's context settings (x64, matmul precision, mesh, default device, ...).

    Equal tokens mean that JAX itself would reuse a trace.
    """

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContextToken) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


_numbers = itertools.count()


# JAX traces a function again exactly when something it puts into a trace's key has changed, so a
# function that takes a new number each time it is traced names the context. The number travels
# in the output's tree: nothing is read back from a device.
@jax.jit
def _hcompile_context():
    return ContextToken(next(_numbers))


def context_token() -> ContextToken:
    """The token of the current context; about the cost of one empty jitted call. Eager only."""
    return _hcompile_context()


_SETTINGS = (
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
)
_read_settings = operator.attrgetter(*(name for name in _SETTINGS if hasattr(jax.config, name)))


def settings() -> tuple[Any, ...]:
    """What a trace can depend on and JAX leaves out of its own keys."""
    return _read_settings(jax.config)


def looks_for_nans() -> bool:
    """Whether JAX checks every result, and runs a failing program again operation by operation."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


# --- Jaxprs -----------------------------------------------------------------------------------


def is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def split_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """``(jaxpr, consts)`` of a jaxpr of either kind.

    Up to 0.11 a ``ClosedJaxpr`` pairs an open ``Jaxpr`` with its constants; from 0.12 on there
    is one class, which carries them.
    """
    consts = tuple(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def close_jaxpr(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]) -> Any:
    """A closed jaxpr without constants from its parts."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    ins, outs = ("",) * len(invars), ("",) * len(outvars)
    info = jex.DebugInfo("hcompile", "a part of the program", ins, outs)
    return ClosedJaxpr(Jaxpr((), tuple(invars), tuple(outvars), tuple(eqns), effects, info), ())


def input_avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in split_jaxpr(jaxpr)[0].invars]


def output_avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in split_jaxpr(jaxpr)[0].outvars]


def is_scalar(aval: Any) -> bool:
    return getattr(aval, "shape", None) == ()


def literal_value(literal: Any) -> Any:
    """What to pass for a literal: a Python number if it is weakly typed."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if getattr(literal.aval, "weak_type", False) else value


def abstract_argument(aval: Any) -> jax.ShapeDtypeStruct:
    """What stands for an array of type ``aval`` when a function is lowered."""
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def live_part(jaxpr: Any, used_outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The closed jaxpr with only ``used_outputs`` and what these need, and which inputs that is."""
    opened, consts = split_jaxpr(jaxpr)
    live, used_inputs = pe.dce_jaxpr(opened, list(used_outputs))
    return ClosedJaxpr(live, consts), used_inputs


def zeros(aval: Any) -> Any:
    """An array of type ``aval``; a key made of zeros for a key type."""
    return jax.jit(lambda: jax.lax.full(aval.shape, 0, aval.dtype))()


def equation_context(eqn: JaxprEqn) -> tuple[Any, ...]:
    """What an equation takes from its surroundings and its lowering looks at."""
    ctx = eqn.ctx
    return (ctx.compute_type, ctx.threefry_partitionable, ctx.cur_abstract_mesh, ctx.xla_metadata)


def within_scope(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """``eqn`` of a called jaxpr, put in the place of the call ``outer``: named as within it."""
    stack = outer.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def scope(eqn: JaxprEqn) -> str:
    """The name stack of an equation, as ``transpose(jvp(layer))``."""
    return str(eqn.source_info.name_stack)


# Primitives that only call a jaxpr: the parameter that holds it. ``jit`` was ``pjit`` before 0.10;
# ``checkpoint`` is ``remat2`` since.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

# What a rule needs to differentiate a call, and its lowering never sees.
_CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def is_jit(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit"


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether the called jaxpr, put in the equation's place, computes the same.

    Not so for a nested jit with shardings, a mesh or compiler options of its own.
    """
    if called_jaxpr(eqn) is None:
        return False
    if not is_jit(eqn):
        return True
    params = eqn.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
        and all(layout is None for layout in layouts)
        and params["ctx_mesh"].empty
        and not params["compiler_options_kvs"]
    )


def is_checkpoint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("remat2", "checkpoint")


def called_jaxpr(eqn: JaxprEqn) -> Any | None:
    """The jaxpr that ``eqn`` calls and does nothing else with, or None."""
    param = _CALLS.get(eqn.primitive.name)
    return None if param is None else eqn.params[param]


def inlinable_jaxpr(eqn: JaxprEqn) -> Any | None:
    """The called jaxpr if XLA compiles the same for it in the place of the call."""
    if is_checkpoint(eqn) and eqn.params["prevent_cse"]:
        return None
    return called_jaxpr(eqn) if is_plain_call(eqn) else None


def lowered_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of ``eqn`` that its compiled program depends on."""
    params = dict(eqn.params)
    if is_jit(eqn):
        params.pop("name")
    elif is_checkpoint(eqn):
        params.pop("policy")
    elif eqn.primitive.name in _CUSTOM_RULES:
        params = {"call_jaxpr": params["call_jaxpr"]}
    return params


# What places values on a mesh; a part of a program compiled for one device cannot.
_PLACING = frozenset(
    "sharding_constraint shard_map mesh_cast reshard layout_constraint device_put".split()
)


def places_values(jaxpr: Any) -> str | None:
    """The primitive in a jaxpr that says where its values live, if there is one."""
    for eqn in split_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in _PLACING and _names_devices(eqn.params):
            return eqn.primitive.name
        found = next(filter(None, map(places_values, sub_jaxprs(eqn))), None)
        if found is not None:
            return found
    return None


def _names_devices(params: dict[str, Any]) -> bool:
    """Whether a mesh or a sharding among an equation's parameters has several devices."""
    values = [v for p in params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    for value in values:
        mesh = getattr(value, "mesh", value)
        if isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) and mesh.size > 1:
            return True
        if isinstance(value, jax.sharding.Sharding) and value.num_devices > 1:
            return True
    return False


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Every jaxpr among the parameters of ``eqn``."""
    return iter(jex.jaxprs_in_params(eqn.params))


# --- Residuals --------------------------------------------------------------------------------

# What a backward pass should not compute twice: contractions, everything whose cost XLA cannot
# see or shrink by fusing it, and random bits. Elementwise work, reductions and data movement
# are recomputed inside the backward executable, where they fuse.
_DEAR = frozenset(
    """
    dot_general ragged_dot ragged_dot_general conv_general_dilated scaled_dot scaled_matmul
    custom_vjp_call custom_jvp_call custom_lin pallas_call ffi_call tpu_custom_call
    triton_kernel_call pure_callback io_callback while scan cond sort top_k approx_top_k fft cumsum
    cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max
    reduce_window_min select_and_scatter_add select_and_gather_add random_bits random_seed
    random_wrap random_gamma threefry2x32 rng_bit_generator rng_uniform lu lu_pivots_to_permutation
    cholesky triangular_solve eigh eig svd qr geqrf householder_product schur hessenberg
    tridiagonal tridiagonal_solve linear_solve custom_linear_solve scatter scatter_add scatter-add
    all_gather all_to_all psum psum2 psum_invariant reduce_scatter ppermute shard_map name
    """.split()
)


def save_what_is_dear(prim: Primitive, *_: Any, **__: Any) -> bool:
    """A ``jax.checkpoint`` policy: keep matmul-like and opaque results, recompute the rest."""
    return prim.name in _DEAR


def has_checkpoint(jaxpr: Any) -> bool:
    """Whether the jaxpr, or one inside it, already says what to rematerialise."""
    return any(
        is_checkpoint(eqn) or any(has_checkpoint(sub) for sub in sub_jaxprs(eqn))
        for eqn in split_jaxpr(jaxpr)[0].eqns
    )


def rules_hold_tracers(jaxpr: Any) -> bool:
    """Whether a custom differentiation rule in ``jaxpr`` closes over a traced array.

    Such a rule fails once the trace it comes from has ended, as that of a nested jit has.
    """
    for eqn in split_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in _CUSTOM_RULES:
            rules = [v for v in eqn.params.values() if not is_jaxpr(v)]
            if _reaches_tracer(rules, set()):
                return True
        if any(rules_hold_tracers(sub) for sub in sub_jaxprs(eqn)):
            return True
    return False


def callbacks(jaxpr: Any) -> Iterator[Any]:
    """The users' Python functions that the program calls while it runs."""
    for eqn in split_jaxpr(jaxpr)[0].eqns:
        if "callback" in eqn.params:
            yield from _user_callables(eqn.params["callback"])
        for sub in sub_jaxprs(eqn):
            yield from callbacks(sub)


def _user_callables(value: Any) -> Iterator[Any]:
    """The user's function in JAX's wrapper of a callback: in a cell, a slot or a field."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if module.partition(".")[0] not in ("jax", "jaxlib"):
        if callable(value):
            yield value
        return
    if isinstance(value, types.FunctionType):
        parts = [c.cell_contents for c in value.__closure__ or () if not is_empty(c)]
    else:
        parts = _fields(value)
    for part in parts:
        yield from _user_callables(part)


def _fields(value: Any) -> list[Any]:
    slots = getattr(type(value), "__slots__", ())
    found = [getattr(value, s, None) for s in slots if s != "__weakref__"]
    return [*found, *getattr(value, "__dict__", {}).values()]


_TRACES = (jax.core.Trace,)


def _reaches_tracer(value: Any, seen: set[int]) -> bool:
    """Looks through containers, closures, defaults and JAX's wrapped functions."""
    if isinstance(value, jax.core.Tracer):
        return True
    if id(value) in seen or isinstance(value, _TRACES):
        return False  # a trace leads to the whole program that is traced
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, (list, tuple)):
        parts += value
    elif isinstance(value, dict):
        parts += value.values()
    elif isinstance(value, types.FunctionType):
        parts += [c.cell_contents for c in value.__closure__ or () if not is_empty(c)]
        parts += value.__defaults__ or ()
    elif isinstance(value, types.MethodType):
        parts += [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif type(value).__module__.partition(".")[0] == "jax" and not is_jaxpr(value):
        # A wrapped function, a boxed nondifferentiable argument: JAX keeps them in slots.
        parts += _fields(value)
    return any(_reaches_tracer(part, seen) for part in parts)


def is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def traced_function(traced: Any) -> tuple[Any, Sequence[Any], Any, list[bool]]:
    """``(jaxpr, consts, out_tree, donated)`` of what ``jax.jit(f).trace(...)`` returned."""
    jaxpr, consts = split_jaxpr(traced.jaxpr)
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    return jaxpr, consts, traced.out_tree, donated


def make_jitted(fun: Callable[..., Any], name: str, **options: Any) -> Any:
    """``jax.jit(fun, **options)`` under ``name``, which profiles and jaxprs then show."""
    fun.__name__ = fun.__qualname__ = name
    return jax.jit(fun, **options)
