"""A character-level language model: a decoder-only transformer in Flax nnx.

Pre-norm blocks of causal attention and a GELU MLP, learned positions, trained with AdamW on
the help texts that ship with Python. The layers are a plain Python loop; the one line that
hcompile needs is the one that makes `run_block_as_region` from `run_block`.

Example:
    >>> import hcompile
    >>> from hcompile.examples import char_transformer as ct
    >>> text = ct.load_text()
    >>> vocab = ct.vocabulary(text)
    >>> config = ct.Config(vocab=len(vocab), layers=2, width=32, seq=16, regions=True)
    >>> graphdef, params = ct.init(config, seed=0)
    >>> optimizer = ct.make_optimizer(steps=10)
    >>> train_step = hcompile.jit(ct.make_train_step(graphdef, optimizer))
    >>> batch = next(ct.batches(ct.encode(text, vocab), batch=4, seq=16, seed=0))
    >>> params, opt_state, metrics = train_step(params, optimizer.init(params), batch)
    >>> sorted(metrics)
    ['grad_norm', 'loss']
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hcompile

Batch = tuple[np.ndarray, np.ndarray]
Metrics = dict[str, jax.Array]
# Parameters and optimizer state are pytrees of arrays; optax types them too loosely to say more.
TrainStep = Callable[[Any, Any, Batch], tuple[Any, Any, Metrics]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Attributes:
      vocab: number of distinct characters.
      layers: number of blocks.
      width: features per position; a multiple of `heads`.
      heads: attention heads per block.
      seq: longest sequence, in characters.
      regions: run each block as a `hcompile.nested_compile_region`.
    """

    vocab: int
    layers: int = 24
    width: int = 128
    heads: int = 4
    seq: int = 64
    regions: bool = False


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Draws the weights, float32."""
        width = config.width
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.mlp_down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32 (batch, seq, width) to the same shape."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_down(jax.nn.gelu(self.mlp_up(self.mlp_norm(x))))

    def attend(self, x: jax.Array) -> jax.Array:
        """Causal multi-head self-attention on float32 (batch, seq, width)."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).reshape(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // self.heads) ** -0.5
        causal = jnp.tri(seq, dtype=bool)[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.attention_out(mixed.reshape(batch, seq, width))


def run_block(block: Block, x: jax.Array) -> jax.Array:
    """Runs one layer on float32 (batch, seq, width); the same computation for every layer."""
    return block(x)


run_block_as_region = hcompile.nested_compile_region(run_block)


class CharTransformer(nnx.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Draws the weights, float32."""
        self.regions = config.regions
        self.embed = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.seq, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocab, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Maps int32 (batch, seq) to float32 logits (batch, seq, vocab)."""
        positions = jnp.arange(characters.shape[1], dtype=jnp.int32)
        x = self.embed(characters) + self.positions(positions)[None]
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))

    def run(self, block: Block, x: jax.Array) -> jax.Array:
        """Runs one layer, as a region or plainly; float32 (batch, seq, width) in and out."""
        return run_block_as_region(block, x) if self.regions else run_block(block, x)


def init(config: Config, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes a model, taken apart into its structure and its float32 parameters."""
    return nnx.split(CharTransformer(config, rngs=nnx.Rngs(seed)))


def load_text() -> str:
    """Returns Python's own help texts: about half a million characters of English."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def vocabulary(text: str) -> str:
    """Returns the distinct characters of `text`, sorted; a character's index is its number."""
    return "".join(sorted(set(text)))


def encode(text: str, vocab: str) -> np.ndarray:
    """Numbers the characters of `text`: int32 (len(text),)."""
    number = {character: index for index, character in enumerate(vocab)}
    return np.array([number[character] for character in text], dtype=np.int32)


def batches(ids: np.ndarray, *, batch: int, seq: int, seed: int) -> Iterator[Batch]:
    """Yields random windows of the text without end, the same ones for the same seed.

    Args:
      ids: int32 (length,), the encoded text.
      batch: windows in a batch.
      seq: characters in a window.
      seed: seed of the numpy generator that places the windows.

    Yields:
      Inputs and targets, int32 (batch, seq) each; targets are one character ahead.

    Raises:
      ValueError: the text is too short for one window.
    """
    if len(ids) <= seq:
        raise ValueError(
            f"batches: a window needs seq + 1 characters: got a text of {len(ids)}, "
            f"expected {seq + 1} or more; pass a longer text or a smaller seq"
        )
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(ids) - seq, size=(batch, 1))
        windows = ids[starts + np.arange(seq + 1)]
        yield windows[:, :-1], windows[:, 1:]


def make_optimizer(*, steps: int, peak: float = 1e-3) -> optax.GradientTransformation:
    """AdamW with global-norm clipping, linear warm-up and cosine decay.

    Args:
      steps: length of the training; a tenth of it is warm-up.
      peak: highest learning rate.
    """
    warmup = max(1, steps // 10)
    # Starting at zero would waste the first step.
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=peak / 10,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_train_step(graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation) -> TrainStep:
    """Makes the function to hand to `jax.jit` or `hcompile.jit`.

    Args:
      graphdef: structure of the model, from `init`.
      optimizer: from `make_optimizer`, or any other of optax.

    Returns:
      `train_step(params, opt_state, (inputs, targets)) -> (params, opt_state, metrics)`, with
      inputs and targets int32 (batch, seq), metrics `loss` (mean, in nats per character) and
      `grad_norm` (before clipping), float32 scalars. It has no side effects.
    """

    def loss_fn(params: nnx.State, batch: Batch) -> jax.Array:
        inputs, targets = batch
        logits = nnx.merge(graphdef, params)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return train_step
