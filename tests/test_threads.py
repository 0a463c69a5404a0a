"""Eight threads trace and call the same and different regions, for some seconds.

``HCOMPILE_THREAD_SECONDS`` says for how many; 5 by default.
"""

import faulthandler
import os
import random
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hcompile

SECONDS = float(os.environ.get("HCOMPILE_THREAD_SECONDS", "5"))
THREADS = 8
X = np.linspace(-1.0, 1.0, 4, dtype=np.float32)
SHARED = {"scale": 0.5, "w": jnp.full((4, 4), 0.25)}


def affine(x, scale):
    return jnp.tanh(x @ SHARED["w"]) * scale + SHARED["scale"]


class Layer:
    """Each thread edits layers of its own; the class is everyone's."""

    gain = 1.5
    table = {"up": 2.0, "down": 0.5}

    def __init__(self, w, scale):
        self.w = w
        self.scale = scale
        self.mode = "up"
        self.config = types.SimpleNamespace(shift=0.25, items=[1.0, 2.0])

    def inner(self, x):
        return jnp.tanh(x @ self.w) * self.gain

    def __call__(self, x, scale):
        y = self.inner(x) * self.scale * scale * self.table[self.mode]
        return {"y": y + self.config.shift, "x": [x * item for item in self.config.items]}


class Counting:
    """Changes itself, so that its calls run in line."""

    def __init__(self):
        self.count = 0

    def __call__(self, x, scale):
        self.count += 1
        return x * scale * self.count


def shared_region(x, scale):
    """A region that calls another."""
    return hcompile.region(affine)(x, scale) * 2


def make_own_region(seed):
    """The same code in every thread, with cells of its own."""
    w, shift = jnp.full((4, 4), 0.1 * seed), float(seed)
    return lambda x, scale: jnp.sin(x @ w) * scale + shift


class Worker:
    """What one thread does, at random, and compares with the same without regions."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.layer = Layer(jnp.full((4, 4), 0.1 + seed), 1.0 + seed % 2)
        self.counting = Counting()
        self.functions = [affine, shared_region, make_own_region(seed % 3), self.layer]
        self.functions.append(self.layer.__call__)
        self.steps = 0

    def edit(self):
        layer, number = self.layer, self.random.choice((0.5, 1, 1.0, 2.0))
        edits = (
            lambda: setattr(layer, "scale", number),
            lambda: setattr(layer, "mode", self.random.choice(("up", "down"))),
            lambda: setattr(layer, "w", jnp.full((4, 4), number)),
            lambda: setattr(layer, "gain", number),
            lambda: vars(layer).pop("gain", None),
            lambda: setattr(layer.config, "shift", number),
            lambda: layer.config.items.append(number) if len(layer.config.items) < 3 else None,
            lambda: layer.config.items.reverse(),
        )
        self.random.choice(edits)()

    def program(self, fn, scale, mark):
        def program(x):
            for _ in range(2):
                result = mark(fn)(x, scale)
                x = sum(jax.tree.leaves(result))
            return jnp.tanh(x).sum(), x

        return program

    def transformed(self, program, kind):
        if kind == "grad":
            return jax.jit(jax.value_and_grad(program, has_aux=True))(X)
        if kind == "vmap":
            return jax.jit(jax.vmap(program))(np.stack([X, 2 * X]))
        return {"hcompile": hcompile.jit, "jit": jax.jit}[kind](program)(X)

    def step(self):
        self.edit()
        if self.random.random() < 0.03:
            hcompile.clear_caches()
        kind = self.random.choice(("jit", "grad", "vmap", "hcompile"))
        fn, scale = self.random.choice(self.functions), self.random.choice((1, 2.0))
        want = self.transformed(self.program(fn, scale, lambda f: f), kind)
        got = self.transformed(self.program(fn, scale, hcompile.region), kind)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
        before = self.counting.count
        self.transformed(self.program(self.counting, scale, hcompile.region), "jit")
        assert self.counting.count == before + 2
        hcompile.cache_info()
        self.steps += 1


def run_threads(workers, seconds):
    """Each worker's steps in a thread of its own; raises what went wrong in any of them."""
    errors, stop = [], threading.Event()
    start = threading.Barrier(len(workers))

    def loop(worker):
        start.wait()
        while not stop.is_set():
            try:
                worker.step()
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=loop, args=(w,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    limit = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail("threads did not end")
    if errors:
        raise errors[0]


def test_eight_threads():
    workers = [Worker(seed) for seed in range(THREADS)]
    run_threads(workers, SECONDS)
    assert all(worker.steps for worker in workers)


class Barriered:
    """Calls the same new region at the same moment as the others."""

    def __init__(self, barrier, functions, jitted):
        self.barrier = barrier
        self.functions = iter(functions)
        self.jitted = jitted
        self.done = False

    def step(self):
        for scale, fn in enumerate(self.functions):
            self.barrier.wait(60)
            got = self.jitted(lambda x, fn=fn: hcompile.region(fn)(hcompile.region(fn)(x)))(X)
            want = X * (scale + 1) ** 2
            np.testing.assert_allclose(got, want, rtol=1e-5)
        self.done = True


@pytest.mark.parametrize("jitted", [jax.jit, hcompile.jit])
def test_first_calls_at_the_same_moment(jitted):
    def make(scale):
        return lambda x: x * scale

    functions = [make(jnp.float32(n + 1)) for n in range(5)]
    barrier = threading.Barrier(4)
    workers = [Barriered(barrier, functions, jitted) for _ in range(4)]
    run_threads(workers, seconds=0.1)
    assert all(worker.done for worker in workers)


def test_one_compiled_function_called_by_all():
    step = hcompile.jit(lambda x, n: affine_region(affine_region(x, n), n), static_argnums=1)
    affine_region = hcompile.region(affine)
    want = [affine(affine(X, n), n) for n in range(3)]

    class Caller:
        steps = 0

        def step(self):
            for n in range(3):
                np.testing.assert_allclose(step(X, n), want[n], rtol=1e-5)
            self.steps += 1

    callers = [Caller() for _ in range(THREADS)]
    run_threads(callers, seconds=0.5)
    assert all(caller.steps for caller in callers)
    assert len(step.report().programs) == 3
