"""The demo: one training step, compiled by `jax.jit` and by `hcompile.jit`, side by side.

Each variant runs in a process of its own, so that neither profits from what the other has
traced, compiled or allocated. The parent only starts the workers and prints what they found;
it needs neither JAX nor a device.

    hcompile demo --layers 24
    python -m hcompile._bench.demo --layers 24
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HEADS = 4
SEED = 0
TITLES = {"jit": "jax.jit", "hcompile": "hcompile.jit"}
SIZES = ("layers", "width", "steps", "batch", "seq")

# label, key in the worker's result, format, whether jax.jit / hcompile.jit says something
ROWS = (
    ("trace, s", "trace_s", "{:.2f}", True),
    ("lower, s", "lower_s", "{:.2f}", True),
    ("compile, s", "compile_s", "{:.2f}", True),
    ("first step, s", "first_step_s", "{:.2f}", True),
    ("total until the first result, s", "total_s", "{:.2f}", True),
    ("steady step, ms", "steady_step_ms", "{:.1f}", True),
    ("peak memory, MB", "peak_memory_mb", "{:.0f}", True),
    ("executables compiled", "executables", "{:d}", False),
    ("region calls served per step", "region_calls", "{:d}", False),
    ("loss at the first step", "first_loss", "{:.5f}", False),
    ("loss at the last step", "last_loss", "{:.5f}", False),
)

Result = dict[str, Any]


def _positive(text: str) -> int:
    """Parses a positive integer, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a positive integer: got {text!r}, expected 1 or more"
        )
    return int(text)


def _width(text: str) -> int:
    """Parses a width, as an argparse type."""
    value = _positive(text)
    if value % HEADS:
        rule = f"must be divisible by the {HEADS} attention heads"
        near = value - value % HEADS + HEADS
        raise argparse.ArgumentTypeError(f"{rule}: got {value}, expected, for example, {near}")
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to `parser`."""
    parser.description = (
        "Train a character-level transformer for a few steps with jax.jit and with "
        "hcompile.jit, each in a process of its own, and compare them. A deep model under "
        "jax.jit can need more memory than the machine has; `ulimit -v` keeps it in bounds."
    )
    sizes = (
        ("--layers", _positive, 24, "blocks of the transformer"),
        ("--width", _width, 128, f"features per position, a multiple of {HEADS}"),
        ("--steps", _positive, 30, "training steps"),
        ("--batch", _positive, 8, "sequences per step"),
        ("--seq", _positive, 64, "characters per sequence"),
    )
    for flag, kind, default, text in sizes:
        parser.add_argument(
            flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument("--only", choices=TITLES, help="run one variant alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--worker", choices=TITLES, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the demo with parsed options; returns the exit status."""
    if args.worker:
        # The parent reads the last line, whatever a library may have printed before it.
        print(json.dumps(_work(args.worker, args)), flush=True)
        return 0
    results = {name: _measure(name, args) for name in TITLES if args.only in (None, name)}
    if args.json:
        print(json.dumps(_document(args, results), indent=2))
    else:
        _print_table(args, results)
    return int(any("error" in result for result in results.values()))


def _size_options(args: argparse.Namespace) -> list[str]:
    return [word for name in SIZES for word in (f"--{name}", str(getattr(args, name)))]


def _worker_command(variant: str, args: argparse.Namespace) -> list[str]:
    module = "hcompile._bench.demo"
    return [sys.executable, "-m", module, "--worker", variant, *_size_options(args)]


def _measure(variant: str, args: argparse.Namespace) -> Result:
    """Runs one variant in a fresh process; returns its result, or what became of it."""
    how = "as one program" if variant == "jit" else "part by part"
    # Plain lines, no spinner: the worker draws its own progress on the same terminal.
    _say(f"{TITLES[variant]}: tracing, compiling {args.layers} layers {how} ...")
    # Only stdout is piped: the worker's warnings and progress reach the user as they come.
    command = _worker_command(variant, args)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": _exit_text(done.returncode), "exit_status": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def _exit_text(status: int) -> str:
    """Says how a worker ended; a negative status is a signal, as in subprocess."""
    if status >= 0:
        return f"died with exit status {status}"
    hint = ", perhaps out of memory" if -status in (signal.SIGKILL, signal.SIGABRT) else ""
    return f"died with exit status {status} ({signal.strsignal(-status)}{hint})"


def _versions() -> dict[str, Any]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return packages | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def _document(args: argparse.Namespace, results: dict[str, Result]) -> dict[str, Any]:
    config = {name: getattr(args, name) for name in SIZES}
    return {
        "command": " ".join(["hcompile", "demo", *_size_options(args)]),
        "config": {**config, "heads": HEADS, "seed": SEED},
        "versions": _versions(),
        "variants": results,
        "loss_difference": _loss_difference(results),
    }


def _print_table(args: argparse.Namespace, results: dict[str, Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    size = f"{args.layers} layers, width {args.width}, batch {args.batch} x {args.seq}"
    caption = "jax {jax}, flax {flax}, {cores} cores".format_map(_versions())
    table = Table(title=f"{size}, {args.steps} steps of AdamW", caption=caption)
    table.add_column("")
    for title in [*(TITLES[name] for name in results), *(["ratio"] if len(results) > 1 else [])]:
        table.add_column(title, justify="right")
    for row in ROWS:
        table.add_row(*_cells(row, list(results.values())))
    Console().print(table)
    for name, result in results.items():
        if problem := result.get("error") or result.get("fallback"):
            print(f"{TITLES[name]}: {problem}")
    print(_conclusion(results))


def _cells(row: tuple[str, str, str, bool], results: list[Result]) -> list[str]:
    """Makes one line of the table: label, a value per variant, and the ratio of the two."""
    label, key, style, comparable = row
    values: list[Any] = [result.get(key) for result in results]
    missing = ["died" if "error" in result else "-" for result in results]
    cells = [style.format(v) if v is not None else m for v, m in zip(values, missing, strict=True)]
    if len(values) == 1:
        return [label, *cells]
    return [label, *cells, f"{values[0] / values[1]:.2f}x" if comparable and all(values) else ""]


def _loss_difference(results: dict[str, Result]) -> float | None:
    """Returns the largest relative difference of the losses over all steps, if both ran."""
    losses = [result["losses"] for result in results.values() if "losses" in result]
    if len(losses) < 2:
        return None
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(*losses, strict=True))


def _conclusion(results: dict[str, Result]) -> str:
    difference = _loss_difference(results)
    if difference is None:
        return "Nothing to compare: fewer than two variants finished."
    verdict = "the loss agrees within" if difference < 1e-3 else "THE LOSS DIFFERS by"
    return (
        f"First result after {results['hcompile']['total_s']:.1f} s instead of "
        f"{results['jit']['total_s']:.1f} s; {verdict} {difference:.1e} (relative)."
    )


def _work(variant: str, args: argparse.Namespace) -> Result:
    """Compiles and runs one variant in this process, the worker; returns what it measured."""
    import jax

    import hcompile

    # A cached executable would be measured as a fast compiler.
    jax.config.update("jax_enable_compilation_cache", False)
    train_step, params, opt_state, stream = _prepare(variant, args)
    jit = jax.jit if variant == "jit" else hcompile.jit
    step = jit(train_step, donate_argnums=(0, 1))
    traced, trace_s = _timed(lambda: step.trace(params, opt_state, stream[0]))
    lowered, lower_s = _timed(traced.lower)
    compiled, compile_s = _timed(lowered.compile)
    _say(f"{TITLES[variant]}: compiled in {compile_s:.1f} s, training {args.steps} steps ...")
    losses, seconds = _train(compiled, params, opt_state, stream)
    return {
        "trace_s": trace_s,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "first_step_s": seconds[0],
        "total_s": trace_s + lower_s + compile_s + seconds[0],
        "steady_step_ms": statistics.median(seconds[1:]) * 1e3 if seconds[1:] else None,
        "peak_memory_mb": _peak_memory_mb(),
        **_compiled_parts(variant, compiled),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
        "step_s": seconds,
        "device": jax.devices()[0].device_kind,
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _prepare(variant: str, args: argparse.Namespace) -> tuple[Any, Any, Any, list]:
    """Returns the step to compile, its parameters and optimizer state, and all batches."""
    from hcompile.examples import char_transformer as model

    text = model.load_text()
    vocab = model.vocabulary(text)
    sizes = {name: getattr(args, name) for name in ("layers", "width", "seq")}
    config = model.Config(len(vocab), heads=HEADS, regions=variant == "hcompile", **sizes)
    graphdef, params = model.init(config, SEED)
    optimizer = model.make_optimizer(steps=args.steps)
    ids = model.encode(text, vocab)
    stream = model.batches(ids, batch=args.batch, seq=args.seq, seed=SEED)
    batches = list(itertools.islice(stream, args.steps))
    return model.make_train_step(graphdef, optimizer), params, optimizer.init(params), batches


def _train(step: Any, params: Any, opt_state: Any, batches: list) -> tuple[list, list]:
    """Takes a step per batch, waiting for each; returns the losses and the seconds."""
    import jax

    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        params, opt_state, metrics = jax.block_until_ready(step(params, opt_state, batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]))
    return losses, seconds


def _compiled_parts(variant: str, compiled: Any) -> Result:
    if variant == "jit":
        return {"executables": 1, "region_calls": 0, "fallback": None, "report": None}
    report = compiled.report()
    names = ("executables", "region_calls", "fallback")
    return {name: getattr(report, name) for name in names} | {"report": str(report)}


def _peak_memory_mb() -> float:
    import resource  # absent on Windows, where the rest of the command works

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in kilobytes, macOS in bytes.
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main(argv: list[str] | None = None) -> int:
    """Parses `argv` (default: the command line) and runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hcompile._bench.demo")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
