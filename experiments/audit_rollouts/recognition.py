"""Which column is what: by flag, by the format of verl or TRL, or by a usual name."""

from __future__ import annotations

import dataclasses
import difflib
import textwrap

from configs.audit_rollouts import Columns
from experiments.audit_rollouts.chunks import GROUP, Source
from experiments.audit_rollouts.faults import BadLog

# The first one that is there counts; of rewards there must be one only.
USUAL = {
  "group": ("group_id", "group", "uid", "prompt_id", "problem_id", "prompt", "input"),
  "reward": ("reward", "rewards", "score", "correct", "acc"),
  "length": (
    "length",
    "response_length",
    "completion_length",
    "num_tokens",
    "completion_tokens",
  ),
  "text": ("output", "completion", "response", "text"),
  "step": ("step", "global_step", "training_step", "iteration"),
  "truncated": ("truncated", "is_truncated", "finish_reason"),
  "response": ("response_id", "sample_id"),
  "trainer_logprobs": ("trainer_logprobs", "old_log_probs", "old_logprobs"),
  "sampler_logprobs": ("sampler_logprobs", "rollout_log_probs", "rollout_logprobs"),
  "mask": ("mask", "response_mask", "loss_mask"),
}
VERL = frozenset({"input", "output", "score", "step"})
TRL = frozenset({"step", "prompt", "completion", "advantage"})
_TRL_OTHERS = TRL | {"mode", "image", "images"}
SIDES = ("trainer_logprobs", "sampler_logprobs")


@dataclasses.dataclass(frozen=True)
class Mapping:
  """The columns of one file.

  Attributes:
    names: role -> column, without the rewards.
    rewards: columns that are added up; none if the log has only log-probs.
    unit: of the lengths: tokens or characters.
    axes: of the rows: 2 for [P, G] arrays.
    format: what the file was taken for.
  """

  names: dict[str, str]
  rewards: tuple[str, ...]
  unit: str
  axes: int
  format: str

  @property
  def wanted(self) -> list[str]:
    """All columns to read, each once."""
    return list(dict.fromkeys([*self.names.values(), *self.rewards]))

  def note(self) -> str:
    """One sentence: what was taken for what."""
    roles = {"reward": " + ".join(self.rewards), **self.names}
    pairs = ", ".join(f"{role} = {name}" for role, name in roles.items() if name)
    grouped = "; a group is one (step, group)" if {"step", "group"} <= self.names.keys() else ""
    unit = "; no token count, SO LENGTHS ARE IN CHARACTERS" if self.unit == "characters" else ""
    return f"{self.format}: {pairs}{grouped}{unit}"


def recognise(source: Source, flags: Columns) -> Mapping:
  """What the columns of a file are.

  Raises:
    BadLog: a column that a flag names, or that the audit needs, is not there.
  """
  columns = source.columns
  names = {}
  for role, usual in USUAL.items():
    flag = getattr(flags, role)
    if role == "reward":
      continue
    if flag is not None:
      names[role] = _known(source, flag, role)
    elif found := [name for name in usual if name in columns]:
      names[role] = found[0]
  rewards = tuple(_known(source, name, "reward") for name in flags.reward)
  rewards = rewards or _rewards(source)
  both = set(SIDES) <= names.keys()
  if not both:
    for role, other in (SIDES, SIDES[::-1]):
      if getattr(flags, role) is not None:
        raise _missing(source, other)
    names = {role: name for role, name in names.items() if role not in (*SIDES, "mask")}
  if rewards:
    axes = 1 + columns[rewards[0]]
  elif both:
    axes = columns[names["trainer_logprobs"]] or 1
  else:
    raise _missing(source, "reward")
  if rewards and "group" not in names:
    if axes < 2:
      raise _missing(source, "group")
    names["group"] = GROUP
  unit = "tokens"
  if "length" in names or both:
    names.pop("text", None)
  elif "text" in names:
    unit = "characters"
  else:
    raise _missing(source, "length")
  return Mapping(names, rewards, unit, axes, _format(source))


def _format(source: Source) -> str:
  if source.columns.keys() >= VERL:
    return "verl rollout dump"
  if source.columns.keys() >= TRL:
    return "TRL completions"
  return source.path.suffix.removeprefix(".").upper()


def _rewards(source: Source) -> tuple[str, ...]:
  if source.columns.keys() >= VERL:  # beside it stands whatever else the reward function returned
    return ("score",)
  if source.columns.keys() >= TRL:
    return _trl_rewards(source)
  found = [name for name in USUAL["reward"] if name in source.columns]
  if len(found) > 1:
    both = " and ".join(found)
    raise BadLog(f"{source.path}: {both} could be the reward: --columns.reward {found[0]}")
  return tuple(found)


def _trl_rewards(source: Source) -> tuple[str, ...]:
  """TRL names a column after each reward function, and puts a user's own columns beside them."""
  others = [name for name in source.columns if name not in _TRL_OTHERS]
  found = [name for name in others if "reward" in name.lower()] or others
  if len(found) != 1:
    raise BadLog(
      f"{source.path}: TRL adds up its reward functions, and which of "
      f"{', '.join(found) or 'the columns'} they are is not in the file: "
      f"--columns.reward {' '.join(found) or 'NAME'}"
    )
  return tuple(found)


def _known(source: Source, name: str, role: str) -> str:
  if name not in source.columns:
    near = difflib.get_close_matches(name, source.columns, 1)
    hint = f" Nearest: {near[0]}." if near else ""
    raise BadLog(
      f"{source.heading}: no column {name!r} (--columns.{role}).{hint}{_list(source.columns)}"
    )
  return name


def _missing(source: Source, role: str) -> BadLog:
  usual = ", ".join(USUAL[role])
  return BadLog(
    f"{source.heading}: no column for the {role}: name it with --columns.{role.replace('_', '-')} "
    f"(usual names: {usual}).{_list(source.columns)}"
  )


def _list(columns: dict[str, int]) -> str:
  return f" Columns: {textwrap.shorten(', '.join(columns), 1000, placeholder=' ...')}."
