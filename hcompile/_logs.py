"""Logging: the standard library's, under ``hcompile``, as JAX logs under ``jax``.

``HCOMPILE_LOGS=reuse,compile,plan`` prints those parts to stderr. Otherwise the loggers are as any
library's: a program built on absl turns them on with ``--verbosity=1``.
"""

from __future__ import annotations

import logging
import os
import sys
import types

import jax

from . import _errors

reuse = logging.getLogger("hcompile.reuse")
compiling = logging.getLogger("hcompile.compile")
plan = logging.getLogger("hcompile.plan")

_PARTS = {"reuse": reuse, "compile": compiling, "plan": plan}


def turn_on(parts: str) -> None:
    """Prints the named parts (``"reuse,plan"``) to stderr, down to debug messages.

    Raises:
      RegionOptionError: for a name that is no part.
    """
    for name in filter(None, map(str.strip, parts.split(","))):
        if name not in _PARTS:
            rule = f"some of {', '.join(_PARTS)}, with commas between"
            raise _errors.bad_value(
                "the environment", "HCOMPILE_LOGS", rule, parts, "Write HCOMPILE_LOGS=reuse."
            )
        _PARTS[name].setLevel(logging.DEBUG)
        if not _PARTS[name].handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            _PARTS[name].addHandler(handler)


turn_on(os.environ.get("HCOMPILE_LOGS", ""))


_OWN = (str(_errors.PACKAGE), os.path.dirname(jax.__file__) + "/")


def user_frame() -> str:
    """Where the user's code is now, as ``file:line (function)``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_own = name.startswith(_OWN) and not name.startswith(_errors.EXAMPLES)
        if not is_own and not name.startswith("<frozen"):
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return "an unknown line"
