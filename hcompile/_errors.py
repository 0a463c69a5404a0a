"""Every message that hcompile raises, in one place.

Each says the object, the rule, what was got and expected, the likely cause, and a fix.
Names follow ``<Verb or Noun>Error``; each is also the built-in exception a caller would expect.
"""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

PACKAGE = str(pathlib.Path(__file__).parent) + "/"
EXAMPLES = PACKAGE + "examples/"


class _OwnFramesHidden:
    """Errors leave this context without hcompile's frames, as they leave JAX without JAX's.

    ``jax_traceback_filtering="off"`` keeps them, as it keeps JAX's.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None and jax.config.jax_traceback_filtering != "off":
            error.__traceback__ = _without_own(error.__traceback__)


own_frames_hidden = _OwnFramesHidden()


def _without_own(traceback: types.TracebackType | None) -> types.TracebackType | None:
    foreign = []
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.startswith(EXAMPLES):
            foreign.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for entry in reversed(foreign):
        rest = types.TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


class HCompileError(Exception):
    """The base of the errors that are hcompile's own."""


class RegionArgumentError(HCompileError, TypeError):
    """``nested_compile_region`` or ``RegionOptions`` was given something it cannot take."""


class RegionOptionError(HCompileError, ValueError):
    """A region option has the right type and an impossible value."""


class ReuseLimitError(HCompileError, RuntimeError):
    """One function needed more distinct bodies in one program than ``max_reuse_entries``.

    Example:
      >>> import hcompile
      >>> power = hcompile.region(lambda x, n: x**n, max_reuse_entries=1)
      >>> try:
      ...     hcompile.jit(lambda x: power(power(x, 2), 3))(1.0)
      ... except hcompile.ReuseLimitError:
      ...     print("each power is another body")
      each power is another body
    """


class ReuseHashError(HCompileError, RuntimeError):
    """``reuse_hash_fn`` raised, returned no ``int``, or promised reuse that cannot be had.

    Example:
      >>> import hcompile
      >>> double = hcompile.region(lambda x: 2 * x, reuse_hash_fn=lambda x: "double")
      >>> try:
      ...     hcompile.jit(double)(1.0)
      ... except hcompile.ReuseHashError as error:
      ...     print("it returned 'double'" in str(error))
      True
    """


class ReuseCheckError(HCompileError, RuntimeError):
    """Under ``HCOMPILE_CHECK=1``, a call was served by a body that differs from its own.

    Example:
      >>> import hcompile
      >>> issubclass(hcompile.ReuseCheckError, RuntimeError)
      True
    """


class NewRegionError(HCompileError, RuntimeError):
    """Something was to be traced or compiled inside ``hcompile.no_new_regions()``.

    Example:
      >>> import hcompile
      >>> try:
      ...     with hcompile.no_new_regions():
      ...         hcompile.jit(abs)(1.0)
      ... except hcompile.NewRegionError:
      ...     print("new")
      new
    """


class DonatedTwiceError(HCompileError, ValueError):
    """A donated argument's buffer is also another argument."""


class DeletedArgumentError(HCompileError, RuntimeError):
    """An argument's buffer was donated to an earlier call."""


def not_callable(where: str, got: Any) -> RegionArgumentError:
    if isinstance(got, (classmethod, staticmethod)):
        kind = type(got).__name__
        return RegionArgumentError(
            f"{where} marks a function; got a {kind} object, which cannot be called by itself. "
            f"Write @{kind} above @{where}, not below it."
        )
    return RegionArgumentError(
        f"{where} marks a function, a bound method or a callable object; got {got!r} of type "
        f"{type(got).__name__}, which cannot be called. A likely cause is that the function was "
        f"called instead of passed: write {where}(f), not {where}(f(x))."
    )


def bad_argument(where: str, name: str, rule: str, got: Any, fix: str) -> RegionArgumentError:
    return RegionArgumentError(
        f"{where}: {name} must be {rule}; got {got!r} of type {type(got).__name__}. {fix}"
    )


def bad_value(where: str, name: str, rule: str, got: Any, fix: str) -> RegionOptionError:
    return RegionOptionError(f"{where}: {name} must be {rule}; got {got!r}. {fix}")


_LIMIT_FIXES = {
    "constant": "Pass what differs as an array argument",
    "structure": "Give the arguments one structure",
    "object": "Make the function or object once, outside of the loop",
    "avals": "Pad the arguments to fewer shapes",
}


def reuse_limit(region: str, limit: int, bodies: Sequence[tuple[str, str]]) -> str:
    """The message; ``bodies`` are ``(reason, text)`` of the misses that made them necessary."""
    shown = "\n".join(f"  {i}. {text}" for i, (_, text) in enumerate(bodies, 1))
    fixes = dict.fromkeys(_LIMIT_FIXES.get(reason, "") for reason, _ in bodies[-2:])
    fix = ", or ".join(filter(None, fixes)) or _LIMIT_FIXES["constant"]
    return (
        f"region '{region}' needs more than max_reuse_entries={limit} distinct bodies in one "
        f"program. A region is compiled once for each distinct body; that many usually mean that "
        f"something differs at every call. Its bodies, and what differed from the one before:\n"
        f"{shown}\n{fix}; or raise the limit: nested_compile_region(f, "
        f"max_reuse_entries={2 * limit}); or choose RegionOptions(on_reuse_limit='inline')."
    )


def reuse_hash(region: str, what: str) -> ReuseHashError:
    return ReuseHashError(
        f"reuse_hash_fn of region '{region}' must return an int for the arguments of the call; "
        f"{what}. It is called while tracing: arguments are abstract, so use shapes, dtypes and "
        f"Python values only, e.g. reuse_hash_fn=lambda *args, **kwargs: hash(kwargs['kind'])."
    )


def hash_without_reuse(region: str, reason: str) -> ReuseHashError:
    return ReuseHashError(
        f"region '{region}' was given a reuse_hash_fn, which promises that its calls can be "
        f"reused; this one cannot: {reason}. Take that out of the region (return what it writes, "
        f"pass what it reads), or leave reuse_hash_fn out to have such calls run in line."
    )


def reuse_check(region: str, first: str, second: str, difference: str) -> ReuseCheckError:
    return ReuseCheckError(
        f"region '{region}': the call at {second} was served by the body traced at {first}, and "
        f"its own body differs: {difference}. With a reuse_hash_fn, return different numbers for "
        f"these calls; without one, this is a bug in hcompile: please report it."
    )


def new_region(what: str, why: str) -> NewRegionError:
    return NewRegionError(
        f"{what} would be new inside hcompile.no_new_regions(): {why}. Make this call once before, "
        f"with arguments of the same types, or leave the context."
    )


def compiler_options(part: str, options: Mapping[str, Any], error: Exception) -> RegionOptionError:
    text = str(error).removeprefix("INVALID_ARGUMENT: ")
    return RegionOptionError(
        f"the XLA compiler refused the compiler options {dict(options)!r} of {part}: {text} "
        f"Correct the name or the value in RegionOptions or hcompile.jit(compiler_options=...)."
    )


def options_without_effect(region: str) -> str:
    return (
        f"region '{region}' has XLA compiler options, which only hcompile.jit can give to a part "
        f"of a program: under plain jax.jit they have no effect."
    )


def donated_twice(function: str, first: str, second: str) -> DonatedTwiceError:
    return DonatedTwiceError(
        f"{function}: argument {first} is donated, and argument {second} is the same array. A "
        f"donated buffer is reused while the step runs, so it can be passed once only. Pass a "
        f"copy (jnp.copy), or do not donate {first}."
    )


def deleted_argument(function: str, path: str, array: Any) -> DeletedArgumentError:
    return DeletedArgumentError(
        f"{function}: argument {path} ({array.dtype}{list(array.shape)}) has been deleted. "
        f"A likely cause is that it was donated to an earlier call, which reused its buffer. Use "
        f"that call's result in its place, or leave the argument out of donate_argnums."
    )


def region_note(region: str, arguments: str) -> str:
    return f"(in hcompile region '{region}', called with {arguments})"
