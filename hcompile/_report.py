"""What was compiled, reused and missed, and how long each took."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One executable of a program.

    Attributes:
      name: of the region, with its role, or ``glue``.
      kind: ``"region"`` or ``"glue"``.
      calls: how often one step calls it.
      equations: of its jaxpr, as a measure of size.
      compile_seconds: lowering included; 0 where another program had compiled it.
      shared: whether another program had compiled it.
    """

    name: str
    kind: str
    calls: int
    equations: int
    compile_seconds: float
    shared: bool


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """The calls of one marked function while a program was traced.

    Attributes:
      name: the function's qualified name.
      calls: calls under the trace.
      traces: times its body was traced.
      inlined: calls that ran in line, as if unmarked.
      misses: reasons, the latest last.
    """

    name: str
    calls: int
    traces: int
    inlined: int
    misses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One compiled program: a set of argument types of the jitted function.

    Attributes:
      trace_seconds, plan_seconds, lower_seconds, compile_seconds: wall-clock times. Parts compile
        in parallel, so the parts' own times can add up to more.
      parts: its executables; empty when plain ``jax.jit`` runs it.
      regions: what happened to the marked functions it calls.
      fallback: why plain ``jax.jit`` runs it, or None.
    """

    trace_seconds: float
    plan_seconds: float
    lower_seconds: float
    compile_seconds: float
    parts: tuple[PartReport, ...]
    regions: tuple[RegionReport, ...]
    fallback: str | None

    @property
    def executables(self) -> int:
        """Distinct executables that one step uses."""
        return len(self.parts) if self.fallback is None else 1

    @property
    def compiled(self) -> int:
        """Executables that were compiled for this program; the others were there."""
        return sum(not part.shared for part in self.parts) if self.fallback is None else 1

    @property
    def region_calls(self) -> int:
        """Region calls that one step serves with shared executables, forward and backward."""
        return sum(part.calls for part in self.parts if part.kind == "region")


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``hcompile.jit`` did for one function; ``print`` it, or read the numbers.

    Attributes:
      name: the function's name.
      programs: one report for each set of argument types, in order of compilation.

    Example:
      >>> import hcompile
      >>> print(hcompile.jit(abs).report())
      abs: not compiled yet
    """

    name: str
    programs: tuple[ProgramReport, ...]

    @property
    def executables(self) -> int:
        """Executables compiled for all programs."""
        return sum(program.compiled for program in self.programs)

    @property
    def region_calls(self) -> int:
        """Region calls served by the latest program in one step."""
        return self.programs[-1].region_calls if self.programs else 0

    @property
    def fallback(self) -> str | None:
        """Why plain ``jax.jit`` runs the latest program, or None."""
        return self.programs[-1].fallback if self.programs else None

    def __str__(self) -> str:
        if not self.programs:
            return f"{self.name}: not compiled yet"
        return "\n\n".join(
            "\n".join(_program_lines(self.name, i, len(self.programs), program))
            for i, program in enumerate(self.programs, 1)
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _program_lines(name: str, number: int, count: int, program: ProgramReport) -> Iterable[str]:
    which = "" if count == 1 else f" (program {number} of {count})"
    if program.fallback is not None:
        yield f"{name}{which}: runs as plain jax.jit, because {program.fallback}"
    else:
        yield (
            f"{name}{which}: {program.executables} executables, {program.compiled} compiled here, "
            f"for {program.region_calls} region calls and "
            f"{sum(p.calls for p in program.parts) - program.region_calls} glue calls"
        )
    yield (
        f"  trace {program.trace_seconds:.2f} s, plan {program.plan_seconds:.2f} s, "
        f"lower {program.lower_seconds:.2f} s, compile {program.compile_seconds:.2f} s"
    )
    if program.parts:
        header = ("executable", "calls", "equations", "compile s", "")
        yield from _table(header, [_part_row(part) for part in program.parts])
    for region in program.regions:
        reused = region.calls - region.traces - region.inlined
        yield (
            f"  region {region.name}: {region.calls} calls, {region.traces} traced, "
            f"{reused} reused, {region.inlined} in line"
        )
        yield from (f"    miss: {miss}" for miss in dict.fromkeys(region.misses))


def _part_row(part: PartReport) -> Sequence[str]:
    seconds = "-" if part.shared else f"{part.compile_seconds:.2f}"
    note = "shared with another program" if part.shared else ""
    return (part.name, str(part.calls), str(part.equations), seconds, note)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        yield ("    " + "  ".join(cells) + "  " + row[-1]).rstrip()
