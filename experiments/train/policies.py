"""The task of a run, and the policy it starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from configs.train import Config
from experiments.harness import names, run, small_models
from experiments.harness.small_models import Recipe
from experiments.train import building
from jaxrl_lm.lm import number_tasks, pretrained, problem_tasks, story_tasks, token_tasks
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.tasks import Task

STORIES = "stories260K/stories260K.bin"
PROBLEMS = "gsm8k/test.jsonl"
WORD = "dog"
TASKS: tuple[ModuleType, ...] = (story_tasks, number_tasks, problem_tasks, token_tasks)
# What a task can be given here, beside constants.
BEGINNINGS = (["tokenizer"], ["path"], ["vocabulary"])
RECIPES = {
  "addition": Recipe(
    "addition", number_tasks.ADDITION_CHARACTERS, small_models.answer, length=10, steps=1000
  ),
  "digits": Recipe(
    "digits", number_tasks.DIGITS_CHARACTERS, small_models.answer, length=26, steps=500
  ),
  "countdown": Recipe(
    "countdown", number_tasks.COUNTDOWN_CHARACTERS, small_models.expression, length=32, steps=500
  ),
}
VOCABULARY, END = 6, 5  # of tasks on tokens
ABSENT = (
  f"{STORIES} was not found: set JAXRL_LM_DATA to the folder that holds it, or name a model of "
  "your own: --model PATH (a folder of Hugging Face, or a .bin of llama2.c)"
)


class Start(NamedTuple):
  """Where a run starts.

  Attributes:
    policy: model, parameters, tokenizer.
    task: prompts and rewards.
    stop_tokens: None = the tokenizer's.
    max_new_tokens: as in the settings, or what suits the policy.
  """

  policy: Pretrained
  task: Task
  stop_tokens: tuple[int, ...] | None
  max_new_tokens: int


def start(config: Config, mesh: Any, say: Callable[[Any], None]) -> Start:
  """Task and policy of the settings; a policy that must be made is made.

  Raises:
    ValueError: a name or an argument is wrong.
    FileNotFoundError: the model, or the data of the task, is not there.
  """
  written = config.task or _default_task(config, say)
  name = names.function_name(written, TASKS, kind="task", accepts=_is_task)
  on_digits = config.model is None and name in RECIPES
  on_tokens = config.model is None and hasattr(token_tasks, name)
  if on_digits:
    policy, task = _pretrained_here(written, RECIPES[name], config, mesh, say)
  else:
    policy = _random(config, say) if on_tokens else _loaded(config, mesh)
    task = _task(written, policy.tokenizer, policy.model.config.vocab_size)
  stop_tokens = (END,) if config.stop_tokens is None and on_tokens else config.stop_tokens
  longest = config.max_new_tokens or (24 if on_digits or on_tokens else 96)
  return Start(policy, task.weighted(config.reward_weights), stop_tokens, longest)


def _default_task(config: Config, say: Callable[[Any], None]) -> str:
  if config.model is not None or run.data_path(STORIES) is not None:
    return "stories"
  say(
    f"{STORIES} was not found (set JAXRL_LM_DATA): instead of stories the task is addition, on a "
    "small transformer that is pretrained here"
  )
  return "addition"


def _pretrained_here(
  written: str, recipe: Recipe, config: Config, mesh: Any, say: Callable[[Any], None]
) -> tuple[Pretrained, Task]:
  tokenizer = Characters(recipe.alphabet)
  task = _task(written, tokenizer, tokenizer.vocab_size)
  folder, overrides = run.RESULTS / "small_models", building.overrides(config)
  policy = small_models.pretrained_on(recipe, task, folder, say=say, mesh=mesh, **overrides)
  return policy, task


def _random(config: Config, say: Callable[[Any], None]) -> Pretrained:
  say("a task on tokens starts from a random policy")
  return small_models.random_policy(VOCABULARY, **building.overrides(config))


def _loaded(config: Config, mesh: Any) -> Pretrained:
  path: Path | None = config.model or run.data_path(STORIES)
  if path is None:
    raise FileNotFoundError(ABSENT)
  return pretrained.load(path, mesh=mesh, **building.overrides(config))


def _is_task(value: Any) -> bool:
  return names.returns(value, "Task") and names.parameters(value)[:1] in BEGINNINGS


def _task(written: str, tokenizer: Any, vocabulary: int) -> Task:
  given: dict[str, Any] = {"tokenizer": tokenizer, "word": WORD}
  given |= {"vocabulary": vocabulary, "targets": (1, 2, 3), "end_token": END}
  if (problems := run.data_path(PROBLEMS)) is not None:
    given["path"] = problems
  task = names.find(
    written,
    TASKS,
    kind="task",
    accepts=_is_task,
    given=given,
    complete=True,
  )
  if not isinstance(task, Task):
    raise ValueError(f"task {written!r} is a {type(task).__name__}, not a Task")
  return task
