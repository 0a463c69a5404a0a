"""What a region's mark can say: ``RegionOptions`` and the limits on reuse, checked when given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from . import _errors

_RESIDUALS = ("auto", "all", "none")
_ON_LIMIT = ("raise", "warn", "inline")


@dataclasses.dataclass(frozen=True)
class RegionOptions:
    """How one region is compiled.

    Args:
      residuals: what the forward pass keeps for the backward pass. ``"auto"`` (default) keeps
        matmul- and convolution-like results, opaque calls and the region's inputs, and computes
        elementwise work again; ``"all"`` keeps what ``jax.grad`` would; ``"none"`` keeps the
        inputs only; or a policy of ``jax.checkpoint_policies``. A region that already holds a
        ``jax.checkpoint`` is left as it is.
      on_reuse_limit: what to do when one program needs more bodies than ``max_reuse_entries``:
        ``"raise"`` (default), ``"warn"`` once and go on, or run further bodies ``"inline"``.
      fwd_compiler_options: XLA options, by name, for the executables of the forward pass, as
        ``jax.jit`` takes them in ``compiler_options``. They win over those of ``hcompile.jit``.
      bwd_compiler_options: the same for the backward pass.

    Raises:
      RegionOptionError: for a value that is none of these; at compile time, for an XLA option that
        the compiler does not know or whose value it does not take.
      RegionArgumentError: for a value of another type.

    Example:
      >>> import hcompile
      >>> hcompile.RegionOptions(residuals="none", on_reuse_limit="warn").residuals
      'none'

    The XLA options are PyTorch's ``options`` of ``nested_compile_region``.
    """

    residuals: str | Callable[..., Any] = "auto"
    on_reuse_limit: str = "raise"
    fwd_compiler_options: Mapping[str, Any] | None = None
    bwd_compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_residuals()
        if not isinstance(self.on_reuse_limit, str) or self.on_reuse_limit not in _ON_LIMIT:
            rule = "'raise', 'warn' or 'inline'"
            fix = "Write RegionOptions(on_reuse_limit='raise')."
            raise _errors.bad_value(
                "RegionOptions", "on_reuse_limit", rule, self.on_reuse_limit, fix
            )
        for name in ("fwd_compiler_options", "bwd_compiler_options"):
            self._check_compiler_options(name, getattr(self, name))

    def _check_residuals(self) -> None:
        rule = "'auto', 'all', 'none' or a policy of jax.checkpoint_policies"
        if isinstance(self.residuals, str):
            if self.residuals not in _RESIDUALS:
                fix = "Write RegionOptions(residuals='auto')."
                raise _errors.bad_value("RegionOptions", "residuals", rule, self.residuals, fix)
        elif not callable(self.residuals):
            fix = "Write RegionOptions(residuals=jax.checkpoint_policies.dots_saveable)."
            raise _errors.bad_argument("RegionOptions", "residuals", rule, self.residuals, fix)

    def _check_compiler_options(self, name: str, given: Any) -> None:
        if given is None:
            return
        fix = f"Write RegionOptions({name}={{'xla_cpu_enable_fast_math': True}})."
        is_dict = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
        if not is_dict or not all(isinstance(v, (bool, int, float, str)) for v in given.values()):
            rule = "a dict from XLA option names to a bool, int, float or str"
            raise _errors.bad_argument("RegionOptions", name, rule, given, fix)
        object.__setattr__(self, name, dict(given))  # a later change of the dict changes nothing

    def __hash__(self) -> int:
        return hash((self.residuals, self.on_reuse_limit, self.compiler_options_key))

    @property
    def compiler_options_key(self) -> tuple:
        """Both sets of XLA options, hashable."""
        pair = (self.fwd_compiler_options, self.bwd_compiler_options)
        return tuple(tuple(sorted((given or {}).items())) for given in pair)

    @property
    def has_compiler_options(self) -> bool:
        return bool(self.fwd_compiler_options or self.bwd_compiler_options)


@dataclasses.dataclass(frozen=True)
class Mark:
    """What ``nested_compile_region`` was given, besides the function."""

    options: RegionOptions
    max_reuse_entries: int
    reuse_hash_fn: Callable[..., Any] | None


def checked_mark(options: Any, max_reuse_entries: Any, reuse_hash_fn: Any) -> Mark:
    """The mark, or an error that says what is wrong with it."""
    where = "nested_compile_region"
    if options is not None and not isinstance(options, RegionOptions):
        fix = "Write options=hcompile.RegionOptions(...)."
        raise _errors.bad_argument(where, "options", "a RegionOptions or None", options, fix)
    if isinstance(max_reuse_entries, bool) or not isinstance(max_reuse_entries, int):
        fix = "Write max_reuse_entries=8."
        raise _errors.bad_argument(where, "max_reuse_entries", "an int", max_reuse_entries, fix)
    if max_reuse_entries < 1:
        fix = "To switch a region off, do not mark it, or use hcompile.disabled()."
        raise _errors.bad_value(where, "max_reuse_entries", "at least 1", max_reuse_entries, fix)
    if reuse_hash_fn is not None and not callable(reuse_hash_fn):
        fix = "Write reuse_hash_fn=lambda *args, **kwargs: 0."
        raise _errors.bad_argument(where, "reuse_hash_fn", "callable", reuse_hash_fn, fix)
    return Mark(options or RegionOptions(), max_reuse_entries, reuse_hash_fn)


# --- Options of a region's executables, found again from its name ------------------------------

# How the jaxpr equation of a region's call is recognised, whatever a transformation made of it:
# ``region:layer``, or ``region:3:layer`` with the number of its XLA options. No identifier holds a
# colon.
_PREFIX = "region:"
_with_compiler_options: list[RegionOptions] = []
_numbers: dict[RegionOptions, int] = {}


def jit_name(region: str, options: RegionOptions) -> str:
    """The name of the jitted function that stands for ``region`` in a jaxpr."""
    if not options.has_compiler_options:
        return _PREFIX + region
    number = _numbers.setdefault(options, len(_numbers))
    if number == len(_with_compiler_options):
        _with_compiler_options.append(options)
    return f"{_PREFIX}{number}:{region}"


def is_region_name(name: str) -> bool:
    return name.startswith(_PREFIX)


def split_jit_name(name: str) -> tuple[str, RegionOptions | None]:
    """The region's name, and its options if it has any for XLA."""
    number, colon, rest = name.removeprefix(_PREFIX).partition(":")
    if colon and number.isdecimal():
        return rest, _with_compiler_options[int(number)]
    return name.removeprefix(_PREFIX), None
