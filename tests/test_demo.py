"""The demo, the command line around it, and the example model that it trains."""

import itertools
import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hcompile import _cli
from hcompile._bench import demo
from hcompile.examples import char_transformer as ct

SMALL = ["--layers", "2", "--width", "32", "--steps", "3", "--batch", "2", "--seq", "16"]
TEXT = ct.load_text()
VOCAB = ct.vocabulary(TEXT)
IDS = ct.encode(TEXT, VOCAB)


def small_config(regions: bool = False) -> ct.Config:
    return ct.Config(vocab=len(VOCAB), layers=2, width=32, seq=16, regions=regions)


# --- the example ----------------------------------------------------------------------------


def test_loss_falls_without_warnings():
    graphdef, params = ct.init(small_config(), seed=0)
    optimizer = ct.make_optimizer(steps=20, peak=1e-2)
    step = jax.jit(ct.make_train_step(graphdef, optimizer), donate_argnums=(0, 1))
    opt_state = optimizer.init(params)
    losses = []
    # optax's AdamW itself relies on implicit promotion.
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("error")
        for batch in itertools.islice(ct.batches(IDS, batch=8, seq=16, seed=0), 20):
            params, opt_state, metrics = step(params, opt_state, batch)
            losses.append(float(metrics["loss"]))
            assert float(metrics["grad_norm"]) > 0
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5


def test_model_is_causal_and_needs_no_promotion():
    graphdef, params = ct.init(small_config(), seed=0)
    model = ct.nnx.merge(graphdef, params)
    batch = IDS[None, :16]
    changed = batch.copy()
    changed[0, -1] += 1
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        before, after = model(jnp.asarray(batch)), model(jnp.asarray(changed))
    assert before.shape == (1, 16, len(VOCAB))
    np.testing.assert_allclose(before[0, :-1], after[0, :-1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[0, -1], after[0, -1], atol=1e-3)


def test_regions_leave_parameters_and_logits_alone():
    plain_def, plain = ct.init(small_config(regions=False), seed=0)
    region_def, region = ct.init(small_config(regions=True), seed=0)
    assert jax.tree.structure(plain) == jax.tree.structure(region)
    jax.tree.map(np.testing.assert_array_equal, plain, region)
    logits = [
        jax.jit(lambda params, ids, d=d: ct.nnx.merge(d, params)(ids))(plain, IDS[None, :16])
        for d in (plain_def, region_def)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_batches_are_deterministic_and_shifted_by_one():
    one, two = (ct.batches(IDS, batch=3, seq=5, seed=7) for _ in range(2))
    for (inputs, targets), (again, _) in itertools.islice(zip(one, two, strict=False), 3):
        np.testing.assert_array_equal(inputs, again)
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.shape == targets.shape == (3, 5)
        assert inputs.dtype == targets.dtype == np.int32
    other, _ = next(ct.batches(IDS, batch=3, seq=5, seed=8))
    assert not np.array_equal(other, inputs)


def test_batches_reject_a_text_that_is_too_short():
    with pytest.raises(ValueError, match=r"seq \+ 1 characters: got a text of 5, expected 6"):
        next(ct.batches(IDS[:5], batch=1, seq=5, seed=0))


def test_encode_round_trips():
    assert "".join(VOCAB[index] for index in IDS[:1000]) == TEXT[:1000]


# --- the demo -------------------------------------------------------------------------------

MEASURED = {key for _, key, _, _ in demo.ROWS}


def test_both_variants_agree(capsys):
    assert _cli.main(["demo", *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"command", "config", "versions", "variants", "loss_difference"}
    assert document["config"]["layers"] == 2
    assert document["versions"].keys() == {
        "jax", "jaxlib", "flax", "python", "platform", "cores",
    }  # fmt: skip
    jit, regions = document["variants"]["jit"], document["variants"]["hcompile"]
    for result in (jit, regions):
        assert result.keys() >= MEASURED
        assert len(result["losses"]) == 3
    np.testing.assert_allclose(jit["losses"], regions["losses"], rtol=1e-4)
    assert document["loss_difference"] < 1e-4
    assert (jit["executables"], jit["region_calls"]) == (1, 0)
    assert regions["fallback"] is None
    # A region for every layer forward, at least.
    assert regions["region_calls"] >= 2


def test_table_shows_one_variant_and_that_the_other_died(monkeypatch, capsys):
    values = {key: 1 for key in MEASURED} | {"losses": [1.0], "fallback": None}
    programs = {
        "jit": "import os; os.kill(os.getpid(), 9)",
        "hcompile": f"import json; print(json.dumps({values!r}))",
    }
    monkeypatch.setattr(
        demo, "_worker_command", lambda variant, _: [sys.executable, "-c", programs[variant]]
    )
    assert demo.main(SMALL) == 1
    out = capsys.readouterr().out
    assert "jax.jit: died with exit status -9 (Killed, perhaps out of memory)" in out
    row = next(line for line in out.splitlines() if "steady step" in line)
    assert "died" in row
    assert "1.0" in row
    assert demo.main([*SMALL, "--only", "hcompile"]) == 0
    assert "died" not in capsys.readouterr().out
    assert demo.main([*SMALL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["variants"]["jit"]["exit_status"] == -9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0"], "--layers: must be a positive integer: got '0', expected 1 or more"),
        (["--steps", "-3"], "--steps: must be a positive integer: got '-3'"),
        (["--batch", "two"], "--batch: must be a positive integer: got 'two'"),
        (["--seq", "1.5"], "--seq: must be a positive integer: got '1.5'"),
        (
            ["--width", "30"],
            "--width: must be divisible by the 4 attention heads: got 30, "
            "expected, for example, 32",
        ),
        (["--only", "both"], "argument --only: invalid choice: 'both'"),
    ],
)
def test_bad_options_exit_with_two(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["demo", *options])
    assert message in capsys.readouterr().err


# --- the command line -----------------------------------------------------------------------


def test_a_missing_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main([])
    assert "a command is missing: got none, expected one of: demo" in capsys.readouterr().err


def test_version(capsys):
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hcompile ")


def test_the_command_line_loads_no_model_library():
    code = "import sys, hcompile._cli; print(*{'flax', 'optax', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
