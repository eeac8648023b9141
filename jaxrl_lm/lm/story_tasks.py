"""Stories that contain a word and end properly: a reward that a small language model can learn."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_lm.lm import verifiers
from jaxrl_lm.lm.tasks import Component, Prompt, Task, if_finished, per_text
from jaxrl_lm.lm.text import Tokenizer

OPENINGS = (
  "Once upon a time",
  "Once upon a time, there was a little girl named Lily.",
  "Once upon a time, there was a boy named Tim.",
  "Once upon a time, in a big forest,",
  "One day, a boy named Tom",
  "One day, Mia and her mom",
  "One sunny day, Ben went to the park.",
  "There was a small house on a hill.",
  "Sara and Max were good friends.",
  "Anna was very happy.",
  "In a small town, there lived an old man.",
  "A bird sat in a tall tree.",
)
HELD_OUT_OPENINGS = (
  "Once upon a time, there was a girl named Sue.",
  "One day, Jack and his dad",
  "It was a cold morning.",
  "Lucy had a red box.",
)


def stories(
  tokenizer: Tokenizer,
  *,
  word: str,
  openings: Sequence[str] = OPENINGS,
  held_out: Sequence[str] = HELD_OUT_OPENINGS,
) -> Task:
  """Go on with a story so that a word occurs in it and it ends as a story does.

  Rewards: `word`, 1 if the continuation (not its opening) contains the word as a whole word;
  `ending`, 1 if it was finished by a stop token and its last sentence by punctuation. Weights 1
  and 0.5: see `Task.weighted`.

  Args:
    tokenizer: of the policy; its `eos_ids` are the sampler's stop tokens.
    word: to contain.
    openings: to train on.
    held_out: to evaluate on.

  Returns:
    The task.

  Raises:
    ValueError: `word` is no word, or as `Task`.
  """
  verifiers.contains_word("", word)  # refuses what is no word now, not in the first step

  def prompts(texts: Sequence[str]) -> tuple[Prompt, ...]:
    return tuple(Prompt(text, tuple(tokenizer.encode(text)), word) for text in texts)

  ending = if_finished(per_text(lambda text, _: verifiers.ends_sentence(text)))
  rewards = (
    Component("word", per_text(verifiers.contains_word), 1.0),
    Component("ending", ending, 0.5),
  )
  return Task(prompts(openings), prompts(held_out), rewards)
