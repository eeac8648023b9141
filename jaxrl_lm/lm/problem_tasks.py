"""Word problems with a number for an answer, in the format of GSM8K."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_lm.lm import verifiers
from jaxrl_lm.lm.tasks import Component, Prompt, Task, per_text
from jaxrl_lm.lm.text import Tokenizer


class Problem(NamedTuple):
  """A question and its answer.

  Attributes:
    question: the text.
    answer: the number; None = not known, and no response to it can be judged.
  """

  question: str
  answer: verifiers.Number | None


def read_gsm8k(path: str | Path) -> tuple[Problem, ...]:
  """Problems of a file of JSON lines {"question": ..., "answer": "... #### 72"}.

  Args:
    path: of the file, in UTF-8; what is not becomes U+FFFD.

  Returns:
    The problems, in order.

  Raises:
    ValueError: a line is not such an object; the message names file and line.
    OSError: the file cannot be read.
  """
  problems = []
  lines = Path(path).read_bytes().decode(errors="replace").split("\n")
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      marked = verifiers.hash_answer(row["answer"])
      problem = Problem(row["question"], verifiers.read_number(marked or ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f"{path}:{number}: no question and answer: {error!r}") from error
    if problem.answer is None:
      raise ValueError(f"{path}:{number}: no number after #### in {row['answer'][-80:]!r}")
    problems.append(problem)
  return tuple(problems)


def ask_step_by_step(question: str) -> str:
  """The prompt of a question, for a model without a chat template.

  Args:
    question: the text.

  Returns:
    The prompt.
  """
  return f"Question: {question}\nThink step by step; the last line is #### and the number.\nAnswer:"


def is_marked(text: str) -> float:
  r"""Whether an answer is given as it should be: one number after "####" or in \boxed{}.

  Args:
    text: a response.

  Returns:
    1.0 or 0.0.
  """
  marked = verifiers.marked_answer(text)
  return float(marked is not None and verifiers.read_number(marked) is not None)


def is_right(text: str, answer: verifiers.Number | None) -> float:
  r"""Whether a response ends on the answer.

  The answer of a response is what is after its last "####", else in its last \boxed{}, else its
  last number. No number, several in the mark, or an ambiguous one is wrong: 0.

  Args:
    text: a response.
    answer: the right number, or None.

  Returns:
    1.0 or 0.0; NaN if the right answer is not known.

  Example:
    >>> is_right("so it is 72.", verifiers.read_number("72"))
    1.0
  """
  if answer is None:
    return math.nan
  return float(verifiers.same_number(verifiers.final_number(text), answer))


def word_problems(
  problems: Sequence[Problem],
  tokenizer: Tokenizer,
  *,
  held_out: Sequence[Problem] = (),
  ask: Callable[[str], str] = ask_step_by_step,
) -> Task:
  """Solve problems step by step.

  Rewards: `right` (weight 1), `marked` (weight 0.1). A response that is cut off is judged as it
  stands; `if_finished` is for those who want it to be wrong.

  Args:
    problems: to train on.
    tokenizer: of the policy.
    held_out: to evaluate on.
    ask: question -> prompt; a chat template, for example.

  Returns:
    The task; the reference of a prompt is its answer.

  Raises:
    ValueError: as `Task`.
  """

  def prompts(problems: Sequence[Problem]) -> tuple[Prompt, ...]:
    texts = [ask(problem.question) for problem in problems]
    rows = zip(texts, problems, strict=True)
    return tuple(Prompt(text, tuple(tokenizer.encode(text)), x.answer) for text, x in rows)

  rewards = (
    Component("right", per_text(is_right), 1.0),
    Component("marked", per_text(lambda text, _: is_marked(text)), 0.1),
  )
  return Task(prompts(problems), prompts(held_out), rewards)


def gsm8k(
  path: str | Path,
  tokenizer: Tokenizer,
  *,
  held_out_path: str | Path | None = None,
  ask: Callable[[str], str] = ask_step_by_step,
) -> Task:
  """Grade-school maths: `word_problems` of files.

  Args:
    path: of the problems to train on.
    tokenizer: of the policy.
    held_out_path: of those to evaluate on, or None.
    ask: question -> prompt.

  Returns:
    The task.

  Raises:
    ValueError: as `read_gsm8k` and `Task`.
    OSError: a file cannot be read.

  Reference: Cobbe et al. 2021, arXiv:2110.14168.
  """
  held_out = () if held_out_path is None else read_gsm8k(held_out_path)
  return word_problems(read_gsm8k(path), tokenizer, held_out=held_out, ask=ask)
