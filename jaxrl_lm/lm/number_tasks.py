"""Tasks on digits that make their own prompts: addition, going on with a sequence, countdown.

They fit policies of a few thousand parameters with a tokenizer of characters. All prompts differ,
and those to evaluate on are drawn like those to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_lm.lm import arithmetic
from jaxrl_lm.lm.tasks import Component, Prompt, Task, if_finished, per_text
from jaxrl_lm.lm.text import Tokenizer

ADDITION_CHARACTERS = "0123456789+="
DIGITS_CHARACTERS = "0123456789,:"
COUNTDOWN_CHARACTERS = "0123456789+-*/()=,:"
ATTEMPTS_PER_PROMPT = 100


def matching_characters(text: str, answer: str) -> float:
  """Share of places at which a text has the character of the answer; 1 only if they are equal.

  places = max(|text|, |answer|)

  Args:
    text: a response.
    answer: the right one.

  Returns:
    In [0, 1].

  Example:
    >>> matching_characters("129", "128"), matching_characters("1288", "128")
    (0.6666666666666666, 0.75)
  """
  places = max(len(text), len(answer))
  right = sum(a == b for a, b in zip(text, answer, strict=False))
  return right / places if places else 1.0


def _completion_rewards() -> tuple[Component, ...]:
  right = if_finished(per_text(lambda text, answer: text.strip() == answer))
  matching = per_text(lambda text, answer: matching_characters(text.strip(), answer))
  return Component("right", right, 0.5), Component("characters", matching, 0.5)


def addition(
  tokenizer: Tokenizer, *, digits: int = 2, prompts: int = 512, held_out: int = 64, seed: int = 0
) -> Task:
  """Add two numbers: "12+7=" is to be followed by "19" and the end.

  Rewards: `right`, 1 for the sum and a stop token after it; `characters`, the share of characters
  at their place, which a policy that knows nothing gets some of. Weights 0.5 each.

  Args:
    tokenizer: that knows ADDITION_CHARACTERS; `Characters(ADDITION_CHARACTERS)`, for example.
    digits: most digits of each number.
    prompts, held_out: how many, of the 10^(2 digits) there are.
    seed: of the draw.

  Returns:
    The task; references are the sums as text.

  Raises:
    ValueError: there are fewer prompts than are asked for.
  """

  def draw(rng: np.random.Generator) -> tuple[str, Any]:
    a, b = map(int, rng.integers(10**digits, size=2))
    return f"{a}+{b}=", str(a + b)

  return _drawn(draw, tokenizer, prompts, held_out, seed, _completion_rewards())


def digits(
  tokenizer: Tokenizer,
  *,
  modulus: int = 9,
  most: int = 9,
  prompts: int = 256,
  held_out: int = 32,
  seed: int = 0,
) -> Task:
  """Go on with an arithmetic sequence: "1,3:9,4" is to be followed by "5,7,0,2" and the end.

  The prompt a,b:m,n asks for the n numbers after b, each b - a more than the one before, modulo m.
  It is the format of verl's digit completion, of which prompts with n = 0 are left out. Rewards
  as of `addition`.

  Args:
    tokenizer: that knows DIGITS_CHARACTERS.
    modulus: m, >= 1.
    most: largest n.
    prompts, held_out: how many, of the m^2 most there are.
    seed: of the draw.

  Returns:
    The task; references are the continuations as text.

  Raises:
    ValueError: there are fewer prompts than are asked for.
  """

  def draw(rng: np.random.Generator) -> tuple[str, Any]:
    a, b = map(int, rng.integers(modulus, size=2))
    text = f"{a},{b}:{modulus},{int(rng.integers(most)) + 1}"
    return text, continued(text)

  return _drawn(draw, tokenizer, prompts, held_out, seed, _completion_rewards())


def continued(prompt: str) -> str:
  """The right response to a prompt of `digits`.

  Args:
    prompt: "a,b:m,n".

  Returns:
    n numbers, parted by commas.

  Raises:
    ValueError: it is no such prompt.

  Example:
    >>> continued("1,3:9,4")
    '5,7,0,2'
  """
  try:
    first, second, modulus, count = (int(x) for x in prompt.replace(":", ",").split(","))
    return ",".join(str((second + (second - first) * i) % modulus) for i in range(1, count + 1))
  except (ValueError, ZeroDivisionError) as error:
    raise ValueError(f"a prompt must be a,b:m,n with m not 0, got {prompt!r}") from error


def ask_for_expression(numbers: Sequence[int], target: int) -> str:
  """The prompt of `countdown` in few characters: "2,3,25:44=".

  Args:
    numbers: that may be used.
    target: to reach.

  Returns:
    The prompt.
  """
  return f"{','.join(map(str, numbers))}:{target}="


def countdown(
  tokenizer: Tokenizer,
  *,
  numbers: int = 3,
  largest: int = 25,
  prompts: int = 512,
  held_out: int = 64,
  seed: int = 0,
  ask: Callable[[Sequence[int], int], str] = ask_for_expression,
) -> Task:
  """Reach a target from given numbers, each used at most once, with + - * / and parentheses.

  Every prompt has a solution that uses all of its numbers: "2,3,25:44=" may be followed by
  "(25-3)*2" and the end. Rewards: `right`, 1 for a finished expression of that value; `legal`,
  1 for any expression that has a value and uses only the numbers (see `arithmetic.value_of`;
  powers, division by zero and other numbers get 0). Weights 1 and 0.1.

  Args:
    tokenizer: that knows COUNTDOWN_CHARACTERS, or what `ask` writes and the policy is to answer.
    numbers: how many in a prompt, >= 2.
    largest: number; they begin at 1. Targets are whole numbers in [1, largest * numbers].
    prompts, held_out: how many; none is a permutation of another.
    seed: of the draw.
    ask: (numbers, target) -> prompt.

  Returns:
    The task; references are (numbers, target).

  Raises:
    ValueError: as many different prompts were not found, or fewer than two numbers are asked for.
  """
  if numbers < 2 or largest < 1:
    raise ValueError(f"numbers must be at least 2 and largest 1, got {numbers} and {largest}")

  def draw(rng: np.random.Generator) -> tuple[str, Any]:
    chosen, target = _solvable(rng, numbers, largest)
    while target in chosen and largest > 1:  # a number alone would be right
      chosen, target = _solvable(rng, numbers, largest)
    return ask(chosen, target), (chosen, target)

  def right(text: str, reference: Any) -> bool:
    return arithmetic.value_of(text, reference[0]) == reference[1]

  def legal(text: str, reference: Any) -> bool:
    return arithmetic.value_of(text, reference[0]) is not None

  rewards = (
    Component("right", if_finished(per_text(right)), 1.0),
    Component("legal", per_text(legal), 0.1),
  )
  return _drawn(draw, tokenizer, prompts, held_out, seed, rewards)


def _solvable(rng: np.random.Generator, count: int, largest: int) -> tuple[tuple[int, ...], int]:
  """Ascending numbers, and what they give when they are joined in some order."""
  chosen = [int(x) for x in rng.integers(1, largest, size=count, endpoint=True)]
  value = chosen[0]
  for x in chosen[1:]:
    results = [value + x, value - x, x - value, value * x]
    results += [value // x] if value % x == 0 else []
    results = [result for result in results if 1 <= result <= largest * count]
    # Never empty: of two different numbers one difference is in range, of equal ones the quotient.
    value = results[int(rng.integers(len(results)))]
  return tuple(sorted(chosen)), value


def _drawn(
  draw: Callable[[np.random.Generator], tuple[str, Any]],
  tokenizer: Tokenizer,
  prompts: int,
  held_out: int,
  seed: int,
  rewards: tuple[Component, ...],
) -> Task:
  """A task of different prompts, the first of them to train on."""
  rng, wanted = np.random.default_rng(seed), prompts + held_out
  found: dict[str, Any] = {}
  for _ in range(ATTEMPTS_PER_PROMPT * wanted):
    if len(found) == wanted:
      break
    text, reference = draw(rng)
    found.setdefault(text, reference)
  if len(found) < wanted:
    raise ValueError(f"found {len(found)} different prompts where {wanted} were asked for")
  made = tuple(Prompt(text, tuple(tokenizer.encode(text)), x) for text, x in found.items())
  return Task(made[:prompts], made[prompts:], rewards)
