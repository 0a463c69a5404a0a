"""Every message that hcompile raises, in one place.

Each says the object, the rule, what was got and expected, the likely cause, and a fix.
Names follow ``<Verb or Noun>Error``; each is also the built-in exception a caller would expect.
"""

from __future__ import annotations

import pathlib
import types
from typing import Any

import jax

_PACKAGE = str(pathlib.Path(__file__).parent) + "/"
_EXAMPLES = _PACKAGE + "examples/"


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
        if not name.startswith(_PACKAGE) or name.startswith(_EXAMPLES):
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
      >>> scale = hcompile.region(lambda x, n: x * n, max_reuse_entries=1)
      >>> try:
      ...     hcompile.jit(lambda x: scale(scale(x, 1), 2))(1.0)
      ... except hcompile.ReuseLimitError:
      ...     print("pass the number as an array")
      pass the number as an array
    """


class ReuseHashError(HCompileError, RuntimeError):
    """``reuse_hash_fn`` raised, or returned something that is no ``int``."""


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


def reuse_limit(region: str, limit: int, misses: list[str]) -> ReuseLimitError:
    seen = "\n".join(f"  - {miss}" for miss in misses[-2:]) or "  - argument shapes or dtypes"
    return ReuseLimitError(
        f"region '{region}' needs more than max_reuse_entries={limit} distinct bodies in one "
        f"program. A region is compiled once for each distinct body; that many usually mean that "
        f"something differs at every call. What differed last:\n{seen}\n"
        f"Pass what differs as an array argument, or raise the limit: "
        f"nested_compile_region(f, max_reuse_entries={2 * limit})."
    )


def reuse_hash(region: str, what: str) -> ReuseHashError:
    return ReuseHashError(
        f"reuse_hash_fn of region '{region}' must return an int for the arguments of the call; "
        f"{what}. It is called while tracing: arguments are abstract, so use shapes, dtypes and "
        f"Python values only, e.g. reuse_hash_fn=lambda *args, **kwargs: hash(kwargs['kind'])."
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
