"""A progress bar on a terminal while parts compile; silent elsewhere, or by HCOMPILE_PROGRESS=0."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of ``total`` steps; yields the function that advances it by one."""
    if os.environ.get("HCOMPILE_PROGRESS") == "0" or not sys.stderr.isatty():
        yield lambda: None
        return
    # Only here: importing hcompile should not cost what a bar costs.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
