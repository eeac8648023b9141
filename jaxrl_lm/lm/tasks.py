"""Tasks: prompts, and rewards that are pure functions of the responses to them.

A task is data. Its rewards come back one by one and as a weighted sum; a response that a reward
cannot judge is NaN, not 0, and is to be excluded (`where=~np.isnan(total)`): 0 would say that
it is wrong, and would teach that. Responses carry the token ids that were sampled beside their
text, which is for rewards only and is never encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.text import Tokenizer


class Prompt(NamedTuple):
  """What the policy is given, and what only the reward knows.

  Attributes:
    text: for people and for rewards.
    tokens: ids that the policy sees; at least one.
    reference: what the reward needs (an answer, a target), or None.
  """

  text: str
  tokens: tuple[int, ...]
  reference: Any = None


class Responses(NamedTuple):
  """N responses, one a row; made by `decode_responses`.

  Attributes:
    prompts: N, the prompt of each row: G in a row for a group of G.
    tokens: [N, T] int32, as sampled.
    mask: [N, T] bool, True at every token that was drawn, the stop token included.
    finished: [N] bool, whether a stop token was drawn; a response without one is cut off.
    texts: N, what follows the prompt; without a tokenizer the ids: "1 2 3".
  """

  prompts: Sequence[Prompt]
  tokens: np.ndarray
  mask: np.ndarray
  finished: np.ndarray
  texts: list[str]


# [N] real numbers, each of its own row only, the same every time; NaN = cannot be judged.
Reward = Callable[[Responses], np.ndarray]


class Component(NamedTuple):
  """One reward of a task.

  Attributes:
    name: under which it is reported.
    function: the reward.
    weight: in the total, finite. With 0 it is reported only, and its NaN excludes nothing.
  """

  name: str
  function: Reward
  weight: float = 1.0


class Scores(NamedTuple):
  """Rewards of N responses.

  Attributes:
    components: name -> [N] float32, in the task's order, not weighted.
    total: [N] float32, weighted sum; NaN where a component of weight != 0 is.
  """

  components: dict[str, np.ndarray]
  total: np.ndarray


@dataclasses.dataclass(frozen=True)
class Task:
  """Prompts and what is rewarded. Checked when it is made.

  Attributes:
    prompts: to train on; at least one.
    held_out: to evaluate on; none of them is, to the policy, a prompt to train on.
    rewards: at least one of weight != 0; names differ.

  Raises:
    ValueError: one of these does not hold, a prompt has no tokens, or a weight is not finite.
    TypeError: the tokens of a prompt are not ints.
  """

  prompts: tuple[Prompt, ...]
  held_out: tuple[Prompt, ...]
  rewards: tuple[Component, ...]

  def __post_init__(self) -> None:
    _check_components(self.rewards)
    if not self.prompts:
      raise ValueError("prompts must hold at least one prompt, got none")
    for prompt in (*self.prompts, *self.held_out):
      _check_tokens(prompt)
    seen = {tuple(prompt.tokens) for prompt in self.prompts}
    for prompt in self.held_out:
      if tuple(prompt.tokens) in seen:
        raise ValueError(f"held_out must not share prompts with training: {prompt.text!r} is both")

  def weighted(self, weights: Mapping[str, float]) -> Task:
    """The same task with other weights.

    Args:
      weights: name of a component -> its weight; the others keep theirs.

    Returns:
      The task.

    Raises:
      ValueError: there is no component of that name, or as when a task is made.
    """
    names = [component.name for component in self.rewards]
    unknown = set(weights) - set(names)
    if unknown:
      raise ValueError(f"weights must be of {names}, got {sorted(unknown)}")
    rewards = [x._replace(weight=weights.get(x.name, x.weight)) for x in self.rewards]
    return dataclasses.replace(self, rewards=tuple(rewards))


def _check_components(components: Sequence[Component]) -> None:
  names = [component.name for component in components]
  repeated = sorted({name for name in names if names.count(name) > 1})
  if repeated:
    raise ValueError(f"rewards must have different names, got {repeated} more than once")
  for name, _, weight in components:
    if not np.isfinite(weight):
      raise ValueError(f"the weight of reward {name!r} must be finite, got {weight}")
  if not any(component.weight for component in components):
    raise ValueError(f"rewards must have one of weight != 0, got {names}")


def _check_tokens(prompt: Prompt) -> None:
  if not all(isinstance(token, int | np.integer) for token in prompt.tokens):
    raise TypeError(f"tokens of a prompt must be ints, got {prompt.tokens!r} of {prompt.text!r}")
  if not prompt.tokens:
    raise ValueError(f"the prompt {prompt.text!r} has no tokens: give it one, such as BOS")


def per_text(function: Callable[[str, Any], float]) -> Reward:
  """A reward from a function of one text and the reference of its prompt.

  Args:
    function: (text, reference) -> a number; NaN where it cannot judge. Pure.

  Returns:
    The reward. What `function` raises becomes a `RewardError` that shows the sample.

  Example:
    >>> shortness = per_text(lambda text, reference: -len(text))
  """

  def reward(responses: Responses) -> np.ndarray:
    values = np.empty(len(responses.texts))
    for i, (text, prompt) in enumerate(zip(responses.texts, responses.prompts, strict=True)):
      try:
        values[i] = float(function(text, prompt.reference))
      except Exception as error:
        raise RewardError(_reason(error), prompt=prompt, text=text) from error
    return values

  return reward


def if_finished(reward: Reward) -> Reward:
  """A reward that a response which is cut off does not get: 0 there, or NaN where it was NaN.

  Args:
    reward: any.

  Returns:
    The reward.
  """

  def finished_reward(responses: Responses) -> np.ndarray:
    values = np.asarray(reward(responses))
    return np.where(responses.finished | (values != values), values, 0)

  return finished_reward


def decode_responses(
  prompts: Sequence[Prompt], tokens: Any, mask: Any, finished: Any, tokenizer: Tokenizer | None
) -> Responses:
  """What was sampled, as rewards want it.

  A text is what follows the prompt in prompt + response decoded together, so that a response that
  goes on inside a word of its prompt is told from one that begins a word.

  Args:
    prompts: N, one for each row.
    tokens, mask, finished: of `Samples`, N rows.
    tokenizer: None = no text: the ids, parted by spaces.

  Returns:
    The responses; arrays are read-only copies, text is valid Unicode (U+FFFD where it was not).

  Raises:
    ValueError: shapes do not belong together.
    TypeError: tokens are not integers, or a mask is not boolean.
  """
  arrays = [np.array(x) for x in (tokens, mask, finished)]
  for array in arrays:
    array.setflags(write=False)
  _check_arrays(len(prompts), *arrays)
  ids = [row[counts].tolist() for row, counts in zip(arrays[0], arrays[1], strict=True)]
  if tokenizer is None:
    texts = [" ".join(map(str, row)) for row in ids]
  else:
    texts = [_text(p, row, tokenizer) for p, row in zip(prompts, ids, strict=True)]
  return Responses(prompts, arrays[0].astype(np.int32, copy=False), arrays[1], arrays[2], texts)


def _check_arrays(rows: int, tokens: Any, mask: Any, finished: Any) -> None:
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise TypeError(f"tokens must be [N, T] integers, got {tokens.dtype} of {tokens.shape}")
  for name, array, shape in (("mask", mask, tokens.shape), ("finished", finished, (rows,))):
    if array.dtype != np.bool_:
      raise TypeError(f"{name} must be boolean, got {array.dtype}")
    if array.shape != shape:
      raise ValueError(f"{name} must be of shape {shape}, got {array.shape}")
  if len(tokens) != rows:
    raise ValueError(f"prompts must be one per row: {rows} prompts, tokens are {tokens.shape}")


def _text(prompt: Prompt, ids: list[int], tokenizer: Tokenizer) -> str:
  before, whole = tokenizer.decode(prompt.tokens), tokenizer.decode([*prompt.tokens, *ids])
  # A character whose bytes lie on both sides changes what is before.
  text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def score(task: Task, responses: Responses) -> Scores:
  """All rewards of a task.

  total = sum over components of weight != 0 of weight * component

  Args:
    task: the task.
    responses: to any prompts that its rewards know, N >= 1.

  Returns:
    Scores. NaN is kept per component, and spreads to the total of its own row only.

  Raises:
    RewardError: a reward raised, or is not [N] real numbers, or is infinite; with the component
      and, where it is one sample's fault, the sample.
    ValueError: there is no response, or the fields of `responses` do not belong together.
  """
  _check_arrays(len(responses.prompts), responses.tokens, responses.mask, responses.finished)
  if not responses.texts or len(responses.texts) != len(responses.prompts):
    raise ValueError(f"{len(responses.texts)} texts for {len(responses.prompts)} prompts")
  components = {x.name: _component(x, responses) for x in task.rewards}
  total = np.zeros(len(responses.texts))
  for name, _, weight in task.rewards:
    if weight:
      total += weight * components[name].astype(np.float64)
  return Scores(components, _as_float32(total, "the total", responses))


def _component(component: Component, responses: Responses) -> np.ndarray:
  name, function, _ = component
  try:
    values = np.asarray(function(responses))
  except RewardError as error:
    raise error.of(name) from error.__cause__
  except Exception as error:
    prompt, text = _culprit(function, responses)
    raise RewardError(_reason(error), component=name, prompt=prompt, text=text) from error
  if values.shape != responses.finished.shape:
    reason = f"must return [N] values, {responses.finished.shape}, got shape {values.shape}"
    raise RewardError(reason, component=name)
  if values.dtype.kind not in "fiub":
    raise RewardError(f"must return real numbers, got {values.dtype}", component=name)
  return _as_float32(values, name, responses)


def _as_float32(values: np.ndarray, name: str, responses: Responses) -> np.ndarray:
  with np.errstate(over="ignore"):
    narrow = values.astype(np.float32)
  infinite = np.flatnonzero(np.isinf(narrow))
  if infinite.size:
    row = infinite[0]
    reason = f"must be finite in float32, or NaN where it cannot judge, got {values[row]}"
    prompt, text = responses.prompts[row], responses.texts[row]
    raise RewardError(reason, component=name, prompt=prompt, text=text)
  return narrow


def _culprit(function: Reward, responses: Responses) -> tuple[Prompt | None, str | None]:
  """The first sample on which a reward fails when it is alone, if there is one."""
  _, tokens, mask, finished, _ = responses
  for i, (prompt, text) in enumerate(zip(responses.prompts, responses.texts, strict=True)):
    row = slice(i, i + 1)
    try:
      function(Responses([prompt], tokens[row], mask[row], finished[row], [text]))
    except Exception:
      return prompt, text
  return None, None


def _reason(error: Exception) -> str:
  return f"{type(error).__name__}: {error}"
