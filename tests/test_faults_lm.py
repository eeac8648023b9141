"""Faults that users of other libraries have reported of models and samplers.

As `test_faults.py`: every test is named after a kind of fault and cites a public report of it; its
docstring is the arithmetic of the right value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrl_lm as rl
from jaxrl_lm.lm import policy, sampling, scoring
from jaxrl_lm.lm.huggingface_config import read_config
from tests.bigram import Bigram

SIZES = {
  "vocab_size": 16,
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_layers": 1,
  "num_heads": 2,
  "num_kv_heads": 1,
  "head_dim": 8,
  "max_length": 16,
}


@pytest.fixture(scope="module")
def network() -> tuple[Any, Any]:
  config = policy.PolicyConfig(**SIZES)
  model, _ = policy.abstract_params(config)
  params = jax.jit(lambda key: policy.init(config, key)[1])(jax.random.key(0))
  return model, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


@jax.jit
def _uniform(row_ids: jax.Array, prompts: jax.Array) -> jax.Array:
  model, params = Bigram(50), jnp.zeros((50, 50))
  samples = sampling.sample(
    model, params, prompts, prompts == 0, seed=0, row_ids=row_ids, max_new_tokens=5
  )
  return samples.tokens


def test_dp_same_seed() -> None:
  """Four devices, one row each, uniform over 50: a replicated key gives one completion four times.

  Rows differ, each by its own number, and are those of one device. NVIDIA/Megatron-LM#5983.
  """
  prompts, ids = jnp.zeros((4, 1), jnp.int32), jnp.arange(4)
  alone = np.asarray(_uniform(ids, prompts))
  assert len({tuple(row) for row in alone.tolist()}) == 4
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  spread = jax.device_put((ids, prompts), NamedSharding(mesh, PartitionSpec("data")))
  np.testing.assert_array_equal(_uniform(*spread), alone)


def test_key_reuse() -> None:
  """Five steps that reuse one key draw the same token five times, and a second call all again.

  Every token of a row has its own noise; the same call is the same, another step or seed is not.
  blackjax-devs/blackjax#53.
  """
  model, params, prompts = Bigram(50), jnp.zeros((50, 50)), jnp.zeros((4, 1), jnp.int32)

  def call(**which: Any) -> np.ndarray:
    samples = sampling.sample(model, params, prompts, prompts == 0, max_new_tokens=5, **which)
    return np.asarray(samples.tokens)

  first = call(seed=0, step=0)
  assert all(len(set(row)) > 1 for row in first.tolist())
  np.testing.assert_array_equal(call(seed=0, step=0), first)
  for other in (call(seed=0, step=1), call(seed=1, step=0)):
    assert (other != first).any(axis=-1).all()


def test_categorical_bf16() -> None:
  """Uniform logits in bfloat16 over 20000 tokens, 2000 draws: mean id 9999.5 +- 129, 1903 distinct.

  20000 (1 - exp(-.1)) = 1903. Noise in bfloat16 has few values, and ties go to the smaller ids:
  mean 129, 424 distinct. jax-ml/jax#30879.
  """
  size, draws = 20_000, 2_000

  class Flat(Bigram):
    def apply(self, params: Any, tokens: Any, *, segment_ids: Any, cache: Any = None) -> Any:
      return super().apply(params, jnp.zeros_like(tokens), segment_ids=segment_ids, cache=cache)

  params = jnp.zeros((1, size), jnp.bfloat16)
  prompts = jnp.zeros((draws // 10, 1), jnp.int32)
  ids = sampling.sample(Flat(size), params, prompts, prompts == 0, seed=0, max_new_tokens=10).tokens
  assert abs(float(ids.mean()) - 9999.5) < 4 * size / np.sqrt(12 * draws)
  assert abs(np.unique(ids).size - 1903) < 4 * np.sqrt(
    20_000 * np.exp(-0.1) * (1 - 1.1 * np.exp(-0.1))
  )


@pytest.fixture(scope="module")
def decoded(network: Any) -> Any:
  """A prompt, then six tokens one at a time: hidden states, and the offsets of the cache."""
  model, params = network
  step = jax.jit(model.apply)

  def run(tokens: jax.Array, segments: jax.Array, prompt: int) -> tuple[jax.Array, list[int]]:
    cache = model.init_cache(1, tokens.shape[1])
    parts, offsets = [], []
    for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, tokens.shape[1]))]:
      part = slice(start, end)
      output = step(params, tokens[:, part], segment_ids=segments[:, part], cache=cache)
      cache = output.cache
      parts.append(output.hidden)
      offsets.append(int(cache.length))
    return jnp.concatenate(parts, axis=1), offsets

  return run


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "padding"), [(3, 0), (3, 1), (1, 0)])
def test_kv_cache(network: Any, decoded: Any, prompt: int, padding: int) -> None:
  """A prompt of 3 (or 1, or 2 with one padding before it), then six steps: offsets 3, 4, .. 9.

  Every step is the full forward to 1e-5. The last slot of the cache is written, one past it is an
  error. google/flax#5592, google/flax#1317 (offsets 3, 6, 7 ...).
  """
  model, params = network
  tokens = jnp.array([[5, 1, 9, 3, 14, 2, 7, 7, 11]])[:, : prompt + 6]
  segments = (jnp.arange(prompt + 6) >= padding)[None].astype(jnp.int32)
  hidden, offsets = decoded(tokens, segments, prompt)
  full = jax.jit(model.apply)(params, tokens, segment_ids=segments).hidden
  np.testing.assert_allclose(hidden, full, atol=1e-5)
  assert offsets == list(range(prompt, prompt + 7))
  full_cache = model.init_cache(1, 2)._replace(length=jnp.int32(2))
  with pytest.raises(ValueError, match="do not fit the cache: 1 of them after 2 written slots"):
    model.apply(params, tokens[:, :1], cache=full_cache)


def test_left_pad_pos(network: Any) -> None:
  """Mask [0, 0, 1, 1, 1] scores like its three tokens alone: positions 0, 1, 2, not 2, 3, 4.

  Left or right, whatever stands at the padding. OpenRLHF/OpenRLHF#217, huggingface/trl#6800.
  """
  model, params = network
  rows = jnp.array([[-1, 99, 4, 8, 15], [4, 8, 15, 99, -1], [1, 2, 3, 4, 5]])
  segments = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

  @jax.jit
  def scored(tokens: jax.Array, segments: jax.Array) -> jax.Array:
    logits = model.logits(params, model.apply(params, tokens, segment_ids=segments).hidden)
    return rl.next_token_logprobs(logits, tokens, mask=segments > 0, segment_ids=segments)

  batch = scored(rows, segments)
  alone = scored(jnp.array([[4, 8, 15]]), jnp.ones((1, 3), jnp.int32))[0]
  np.testing.assert_allclose(batch[0, 2:], alone, atol=1e-5)
  np.testing.assert_allclose(batch[1, :3], alone, atol=1e-5)
  assert alone[1:].max() < -0.1


def test_softcap() -> None:
  """Logits [90, 60] and a cap of 30 are -.332344 and -1.263159; without the cap 0 and -30.

  No supported architecture caps its logits; a checkpoint that asks for it is refused, not scored
  without. unslothai/unsloth-zoo#593, verl-project/verl#7991.
  """
  capped = 30 * jnp.tanh(jnp.array([90.0, 60.0]) / 30)
  np.testing.assert_allclose(jax.nn.log_softmax(capped), [-0.332344, -1.263159], atol=1e-5)
  raw = {"model_type": "llama", "final_logit_softcapping": 30.0}
  with pytest.raises(ValueError, match=r"final_logit_softcapping = 30\.0 is not supported"):
    read_config(raw)


def test_padded_vocab() -> None:
  """Logits [2, 1, 0, (pad) 0] of which three ids exist: token 0 is -.407606, with the pad -.493812.

  Nor is the pad drawn: the third column of 1000 uniform draws would come 250 times.
  InternLM/lmdeploy#3661.
  """
  prompts, on = jnp.zeros((250, 1), jnp.int32), jnp.ones((250, 1), bool)
  logits = jnp.array([[2.0, 1.0, 0.0, 0.0]] * 4)
  score = jax.jit(scoring.response_logprobs, static_argnums=0)
  for count, right in ((3, -0.407606), (4, -0.493812)):
    scored = score(Bigram(4), logits, prompts, on, prompts, on, valid_vocab=count)
    np.testing.assert_allclose(scored, right, atol=1e-6)
  uniform = jnp.zeros((4, 4))
  options: dict[str, Any] = {"seed": 0, "max_new_tokens": 4, "valid_vocab": 3}
  samples = sampling.sample(Bigram(4), uniform, prompts, on, **options)
  assert np.unique(samples.tokens).tolist() == [0, 1, 2]
  np.testing.assert_allclose(samples.logprobs, -np.log(3), rtol=1e-6)


@pytest.mark.slow
def test_tied() -> None:
  """One leaf: d/dE of E (E x) at E = 2, x = 1 is 2 + 2, where two copies would get 2 each.

  paiml/entrenar#314, NVIDIA/Megatron-LM#844. In the model: the gradient of the logits reaches the
  embedding through both, and there is no second array that an optimiser could move apart.
  """
  assert jax.grad(lambda e: e * (e * 1.0))(2.0) == 4.0
  grads = {}
  for tied in (True, False):
    model, shapes = policy.abstract_params(policy.PolicyConfig(**SIZES, tied=tied))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.1), shapes)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    params |= {"embedding": table} if tied else {"embedding": table, "unembedding": table}

    @jax.jit
    @jax.grad
    def gradient(params: Any, model: Any = model) -> jax.Array:
      hidden = model.apply(params, jnp.array([[3, 5]])).hidden
      return model.logits(params, hidden)[0, :, 3].sum()

    grads[tied] = gradient(params)
    assert ("unembedding" in shapes) != tied
  both = grads[False]["embedding"] + grads[False]["unembedding"]
  np.testing.assert_allclose(grads[True]["embedding"], both, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_retokenize() -> None:
  """Ids [1, 2] and [3] are the same text: what was sampled is [1, 2], whatever encodes to [3].

  The scorer takes the sampled ids and their log-probs are those of [1, 2]; text is an error.
  NovaSky-AI/SkyRL#123.
  """
  text = {1: "a", 2: "b", 3: "ab"}
  decode = lambda ids: "".join(text[i] for i in ids)
  assert decode([1, 2]) == decode([3])
  logits = jnp.array([[0, 9, 0, 9], [0, 0, 9, 0], [9, 0, 0, 0], [9, 0, 0, 0]], jnp.float32)
  prompts = jnp.zeros((8, 1), jnp.int32)
  samples = sampling.sample(Bigram(4), logits, prompts, prompts == 0, seed=0, max_new_tokens=2)
  assert {(1, 2), (3, 0)} <= {tuple(row) for row in samples.tokens.tolist()}
  scored = scoring.response_logprobs(
    Bigram(4), logits, prompts, prompts == 0, samples.tokens, samples.mask
  )
  np.testing.assert_allclose(scored, samples.logprobs, atol=1e-6)
  with pytest.raises(TypeError, match="encode it first"):
    sampling.pad_prompts(["ab"])
