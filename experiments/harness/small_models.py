"""Policies that need no file: a small transformer that pretrains itself, and a random one.

The first is pretrained on solved prompts of a task on digits, those to train on and those held out,
first on right solutions and then, for a while, on solutions of which half are wrong. It knows the
answers, as a language model may, and gives them now and then: enough that reinforcement learning
has something to improve, and something to improve on. It is made once, in one to two
minutes on two cores of a CPU, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxrl_lm as rl
from experiments.harness import policy_files
from jaxrl_lm.lm import arithmetic, data_order, policy, pretrained
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.tasks import Prompt, Task

SEED = 7
ROWS, LEARNING_RATE = 128, 2e-3
RIGHT, WRONG_STEPS = 0.5, 0.2  # share of right solutions in the last part of the steps, its share


class Recipe(NamedTuple):
  """How a small transformer is pretrained.

  Attributes:
    name: of its folder.
    alphabet: of its tokenizer.
    solution: (random numbers, prompt, whether it is to be right) -> what follows the prompt.
    length: of the longest solved prompt, with its end, tokens.
    steps: of Adam, on ROWS solved prompts each.
    width: of its two layers.
  """

  name: str
  alphabet: str
  solution: Callable[[np.random.Generator, Prompt, bool], str]
  length: int
  steps: int
  width: int = 64


def answer(rng: np.random.Generator, prompt: Prompt, right: bool) -> str:
  """The reference of `addition` and `digits`, or with one digit of it replaced by another."""
  text = str(prompt.reference)
  if right:
    return text
  at = int(rng.choice([i for i, x in enumerate(text) if x.isdigit()]))
  other = (int(text[at]) + int(rng.integers(1, 10))) % 10
  return f"{text[:at]}{other}{text[at + 1 :]}"


def expression(rng: np.random.Generator, prompt: Prompt, right: bool) -> str:
  """A legal expression for a prompt of `countdown`, and one that is right if it is to be.

  Few prompts have no solution without parentheses: it is then any legal one.
  """
  numbers, target = prompt.reference
  text = ""
  for _ in range(300):
    order = [int(x) for x in rng.permutation(numbers)]
    signs = rng.choice(["+", "-", "*", "/"], size=len(order) - 1, p=[0.4, 0.3, 0.2, 0.1])
    tried = str(order[0]) + "".join(f"{s}{x}" for s, x in zip(signs, order[1:], strict=True))
    value = arithmetic.value_of(tried, numbers)
    if value is not None:
      text = tried
      if not right or value == target:
        break
  return text


def pretrained_on(
  recipe: Recipe,
  task: Task,
  folder: Path,
  *,
  say: Callable[[Any], None],
  mesh: Mesh | None = None,
  **overrides: Any,
) -> Pretrained:
  """The transformer of a recipe and a task: read from the folder, or made and kept there.

  Args:
    recipe: what to make.
    task: whose prompts are solved, held-out ones too.
    folder: of all such models.
    say: shows a line.
    mesh, overrides: as of `pretrained.load`.

  Returns:
    Model, parameters and tokenizer; the same every time on one machine.
  """
  prompts = (*task.prompts, *task.held_out)
  corpus = data_order.fingerprint((prompt.tokens, prompt.reference) for prompt in prompts)
  path = folder / f"{recipe.name}-{corpus[:8]}"
  if not (path / "config.json").exists():
    say(f"pretraining a small transformer on solved prompts, once: {path}")
    policy_files.save(path, _pretrain(recipe, prompts, say))
  return pretrained.load(path, mesh=mesh, **overrides)


def random_policy(vocabulary: int, **overrides: Any) -> Pretrained:
  """A transformer of one layer whose tokens are all about as likely, for tasks on tokens."""
  config = PolicyConfig(vocabulary, 32, 64, 1, 2, 2, 16, max_length=64, **overrides)
  return Pretrained(*policy.init(config, jax.random.key(SEED)), None)


def _pretrain(
  recipe: Recipe, prompts: tuple[Prompt, ...], say: Callable[[Any], None]
) -> Pretrained:
  tokenizer, width = Characters(recipe.alphabet), recipe.width
  config = PolicyConfig(
    tokenizer.vocab_size, width, 2 * width, 2, 4, 4, width // 4, max_length=256, tied=True
  )
  model, params = policy.init(config, jax.random.key(SEED))
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, recipe.steps)
  optimizer = optax.adam(schedule)

  @jax.jit
  def step(params: Any, state: Any, tokens: Any, mask: Any) -> tuple[Any, Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
      real = jnp.cumsum(mask[:, ::-1], axis=-1)[:, ::-1] > 0  # up to the last token that counts
      output = model.apply(params, tokens, segment_ids=real.astype(jnp.int32))
      logits = model.logits(params, output.hidden)
      return -jnp.sum(rl.token_mean(mask) * rl.next_token_logprobs(logits, tokens, mask=mask))

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, updates), state, value

  state = optimizer.init(params)
  for number, batch in enumerate(_batches(recipe, prompts, tokenizer), 1):
    params, state, value = step(params, state, *batch)
    if number % 100 == 0:
      say(f"  pretraining, step {number} of {recipe.steps}: loss {float(value):.3f} nats per token")
  return Pretrained(model, params, tokenizer)


def _batches(
  recipe: Recipe, prompts: tuple[Prompt, ...], tokenizer: Characters
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Solved prompts, [ROWS, length] tokens, and which of them are of the solution or the end."""
  rng = np.random.default_rng(SEED)
  for number in range(recipe.steps):
    share = 1.0 if number < (1 - WRONG_STEPS) * recipe.steps else RIGHT
    tokens = np.zeros((ROWS, recipe.length), np.int32)
    mask = np.zeros((ROWS, recipe.length), np.bool_)
    for row, index in enumerate(rng.integers(len(prompts), size=ROWS)):
      solved = tokenizer.encode(recipe.solution(rng, prompts[index], bool(rng.random() < share)))
      ids = [*prompts[index].tokens, *solved, tokenizer.eos_ids[0]]
      tokens[row, : len(ids)] = ids
      mask[row, len(prompts[index].tokens) : len(ids)] = True
    yield tokens, mask
