"""Logging: what is told, under which loggers, and what turns it on."""

import logging
import os
import subprocess
import sys

import jax
import pytest

import hcompile


class TestLogs:
    def test_hits_and_misses(self, caplog):
        caplog.set_level(logging.DEBUG, "hcompile.reuse")
        f = hcompile.region(lambda x, n: x**n)
        jax.jit(lambda x: f(f(f(x, 2), 2), 3))(1.0)
        text = caplog.text
        assert "<lambda>: hit [" in text
        assert "was 2 and is now 3 [" in text

    def test_a_mutation_names_the_variable_and_the_line(self, caplog):
        caplog.set_level(logging.INFO, "hcompile.reuse")

        class Model:
            count = 0

            @hcompile.region
            def __call__(self, x):
                y = x * 2
                self.count = self.count + 1
                return y

        jax.jit(Model())(1.0)
        line = Model.__call__.__wrapped__.__code__.co_firstlineno + 3
        assert "the body changed arguments[0].count, at line" in caplog.text
        assert f"line {line} of" in caplog.text

    @pytest.mark.parametrize("parts", ["reuse", "compile", "plan", "reuse,compile,plan"])
    def test_the_environment_turns_parts_on(self, parts):
        out = run_program(PROGRAM, HCOMPILE_LOGS=parts)
        seen = {line.split(":")[0] for line in out.splitlines() if line.startswith("hcompile.")}
        assert seen == {f"hcompile.{part}" for part in parts.split(",")}

    def test_an_unknown_part(self):
        assert "HCOMPILE_LOGS must be some of reuse, compile, plan" in run_program(
            PROGRAM, HCOMPILE_LOGS="everything"
        )

    def test_absl_verbosity(self):
        program = f"""
from absl import app
def main(_):
{chr(10).join("    " + line for line in PROGRAM.splitlines())}
app.run(main)
"""
        assert "compiled in" in run_program(program, "--verbosity=1")
        assert "compiled in" not in run_program(program, "--verbosity=-1")


PROGRAM = """
import hcompile, jax.numpy as jnp
f = hcompile.region(lambda x: jnp.sin(x))
hcompile.jit(lambda x: f(f(x)))(1.0)
"""


def run_program(program, *flags, **env):
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        env=os.environ | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout
