"""Logs to one small record per response; texts and log-probs are let go chunk by chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.audit_rollouts import Config
from experiments.audit_rollouts import values
from experiments.audit_rollouts.chunks import GROUP, Chunk
from experiments.audit_rollouts.faults import BadLog, Faults
from experiments.audit_rollouts.ratios import Accumulator, TokenRatios
from experiments.audit_rollouts.readers import open_source
from experiments.audit_rollouts.recognition import Mapping, recognise


@dataclasses.dataclass(frozen=True)
class Responses:
  """What is kept of each response whose reward is a number.

  Attributes:
    group: [N] index of its group, in the order in which groups appear.
    length: [N] tokens, or characters.
    reward: [N].
    step: [N] or None.
    truncated: [N] bool or None.
  """

  group: np.ndarray
  length: np.ndarray
  reward: np.ndarray
  step: np.ndarray | None
  truncated: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Log:
  """All files together.

  Attributes:
    responses: None where there are only log-probs.
    tokens: sums over the log-ratios of each response; None where there are no log-probs.
    unit: of the lengths.
    counts: rows read, skipped, unscored.
    notes: what was taken for what, and what was left out.
  """

  responses: Responses | None
  tokens: TokenRatios | None
  unit: str
  counts: dict[str, int]
  notes: list[str]


def read(paths: Sequence[Path], config: Config) -> Log:
  """Reads logs, checking every row.

  Args:
    paths: the files. The same id in two of them is the same group (if the step is).
    config: columns, and whether bad rows are skipped.

  Raises:
    BadLog: something cannot be read; the message says where.
  """
  _check_paths(paths)
  faults = Faults(config.skip_bad_rows)
  accumulator = Accumulator(config.band)
  rows, mappings, places = _rows(paths, config, faults, accumulator)
  notes = list(dict.fromkeys(mapping.note() for mapping in mappings))
  counts = {"files": len(paths), "responses": len(rows["file"]), "skipped": faults.count}
  if faults.count:
    notes.append(f"{faults.count} rows were skipped; the first: {faults.first[0]}")

  def where(row: int) -> str:
    file = int(rows["file"][row])
    return f"{paths[file]}, {places[file](int(rows['row'][row]))}"

  responses = _responses(rows, where, counts, notes) if mappings[0].rewards else None
  correct = None if responses is None else responses.reward > config.correct_above
  if correct is not None and correct.min() == correct.max():
    side = "each" if correct[0] else "none"
    notes.append(f"a reward above {config.correct_above:g} is correct (--correct-above): {side} is")
  return Log(responses, accumulator.result(), mappings[0].unit, counts, notes)


def _rows(
  paths: Sequence[Path], config: Config, faults: Faults, accumulator: Accumulator
) -> tuple[dict[str, np.ndarray], list[Mapping], dict[int, Callable[[int], str]]]:
  """The good rows of all files by column, how each file was taken, and what names its places."""
  parts: list[dict[str, np.ndarray]] = []
  mappings: list[Mapping] = []
  places = {}
  kinds: dict[str, Path] = {}
  for number, path in enumerate(paths):
    source = open_source(path)
    mapping = recognise(source, config.columns)
    mappings.append(mapping)
    _check_same_roles(paths, mappings)
    reader = values.Reader()
    for chunk in source.chunks(mapping.wanted, mapping.axes, faults):
      places[number] = chunk.places.name
      parts.append(_arrays(path, number, chunk, mapping, reader, faults, accumulator))
    _check_same_kind(path, mapping, reader, kinds)
  rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else {}
  if not rows or not len(rows["file"]):
    raise BadLog(f"{paths[0]}: no row can be read." + "".join(f"\n{x}" for x in faults.first))
  return rows, mappings, places


def _check_paths(paths: Sequence[Path]) -> None:
  if not paths:
    raise BadLog("Name the logs to audit: python -m experiments.audit_rollouts FILES...")
  seen: dict[Path, Path] = {}
  for path in paths:
    if other := seen.get(path.resolve()):
      raise BadLog(f"{path} is named twice" + (f", also as {other}." if other != path else "."))
    seen[path.resolve()] = path


def _check_same_roles(paths: Sequence[Path], mappings: list[Mapping]) -> None:
  """Columns that only some files have would compare different responses."""

  def roles(mapping: Mapping) -> set[str]:
    return {*mapping.names, *(["reward"] if mapping.rewards else []), mapping.unit}

  first, last = roles(mappings[0]), roles(mappings[-1])
  if first != last:
    raise BadLog(
      f"{paths[len(mappings) - 1]} and {paths[0]} do not hold the same: only one of them has "
      f"{', '.join(sorted(first ^ last))}. Audit them one by one."
    )


def _check_same_kind(
  path: Path, mapping: Mapping, reader: values.Reader, kinds: dict[str, Path]
) -> None:
  """A group with the id 1 in one file and "1" in another, as every id of a CSV is, would be two."""
  group = mapping.names.get("group", GROUP)
  if group == GROUP or group not in reader.kinds:
    return
  kinds.setdefault(reader.kinds[group], path)
  if len(kinds) > 1:
    ids = ", ".join(f"{kind} in {file}" for kind, file in kinds.items())
    raise BadLog(
      f"{path}: {group} is {ids}; equal ids would not be one group. Audit them one by one."
    )


def _arrays(
  path: Path,
  number: int,
  chunk: Chunk,
  mapping: Mapping,
  reader: values.Reader,
  faults: Faults,
  accumulator: Accumulator,
) -> dict[str, np.ndarray]:
  """The arrays of a chunk, of its good rows."""
  good = np.ones(len(chunk.places), bool)

  def mark(row: int, what: str) -> None:
    if good[row]:
      faults.add(path, chunk.places[row], what)
      good[row] = False

  columns, names = chunk.columns, mapping.names
  rows = np.asarray(chunk.places.numbers, np.int32)
  arrays = {"file": np.full(len(good), number, np.int32), "row": rows}
  tokens = _tokens(columns, names, mark)
  if mapping.rewards:
    arrays["reward"] = _reward(columns, mapping.rewards, reader, mark)
    arrays["group"] = reader.ids(names["group"], columns[names["group"]], mark)
    if names["group"] == GROUP:  # rows of another file's array are other groups
      arrays["group"] += number << 32
    arrays["length"] = _length(columns, names, reader, mark, tokens)
  if "step" in names:
    arrays["step"] = reader.whole(names["step"], columns[names["step"]], mark, -(2**53))
  if "truncated" in names:
    arrays["truncated"] = reader.flags(names["truncated"], columns[names["truncated"]], mark)
  if "response" in names:
    arrays["response"] = reader.ids(names["response"], columns[names["response"]], mark)
  if tokens is not None:
    accumulator.add([(a, b) for keep, a, b in zip(good, *tokens, strict=True) if keep])
  return {key: array[good] for key, array in arrays.items()}


def _reward(
  columns: dict[str, Any], names: Sequence[str], reader: values.Reader, mark: values.Mark
) -> np.ndarray:
  """The sum of the rewards that are there; NaN where none is."""
  rewards = np.stack([reader.numbers(name, columns[name], mark) for name in names])
  return np.where(np.isnan(rewards).all(axis=0), np.nan, np.nansum(rewards, axis=0))


def _length(
  columns: dict[str, Any],
  names: dict[str, str],
  reader: values.Reader,
  mark: values.Mark,
  tokens: Any,
) -> np.ndarray:
  counted = None if tokens is None else np.array([len(row) for row in tokens[0]], np.int64)
  if "length" in names:
    length = reader.whole(names["length"], columns[names["length"]], mark, 0)
    for i in () if counted is None else np.flatnonzero(length != counted):
      mark(int(i), f"{names['length']} is {length[i]}, and there are {counted[i]} log-probs.")
    return length
  if counted is not None:
    return counted
  return reader.characters(names["text"], columns[names["text"]], mark)


def _tokens(
  columns: dict[str, Any], names: dict[str, str], mark: values.Mark
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
  """Log-probs of the counted tokens of each row, by trainer and sampler."""
  if "trainer_logprobs" not in names:
    return None
  sides = [names["trainer_logprobs"], names["sampler_logprobs"]]
  trainer, sampler = (values.logprobs(name, columns[name], mark) for name in sides)
  if "mask" in names:
    masks = values.masks(names["mask"], columns[names["mask"]], mark)
  else:
    masks = [np.ones(len(row), bool) for row in trainer]
  for i, (a, b, mask) in enumerate(zip(trainer, sampler, masks, strict=True)):
    if not len(a) == len(b) == len(mask):
      counts = f"{len(a)} {sides[0]}, {len(b)} {sides[1]}"
      counts += f", {len(mask)} {names['mask']}" if "mask" in names else ""
      mark(i, f"{counts}: one of each per token is needed.")
      trainer[i] = sampler[i] = np.zeros(0)
    else:
      trainer[i], sampler[i] = a[mask], b[mask]
  for name, rows in zip(sides, (trainer, sampler), strict=True):
    values.check_logprobs(name, rows, mark)
  return trainer, sampler


def _responses(
  rows: dict[str, np.ndarray],
  where: Callable[[int], str],
  counts: dict[str, int],
  notes: list[str],
) -> Responses:
  """Responses with a reward, in groups."""
  keys = [rows["group"]] + ([rows["step"]] if "step" in rows else [])
  group = _codes(*keys)
  if "response" in rows:
    _check_no_response_twice(rows, where, group)
  if len(group) == group.max() + 1:
    raise BadLog(
      f"{where(0)}: its group does not come back, and neither does any other: with one response "
      f"per group there is nothing to compare. Is the group right? {notes[0]}"
    )
  scored = np.isfinite(rows["reward"])
  counts["unscored"] = int(np.sum(~scored))
  if counts["unscored"]:
    notes.append(f"{counts['unscored']} responses without a finite reward were left out")
  if not scored.any():
    raise BadLog(
      f"{where(0)}: its reward is no finite number, and neither is any other. {notes[0]}"
    )
  step, truncated = (rows[key][scored] if key in rows else None for key in ("step", "truncated"))
  return Responses(
    _codes(group[scored]), rows["length"][scored], rows["reward"][scored], step, truncated
  )


def _check_no_response_twice(
  rows: dict[str, np.ndarray], where: Callable[[int], str], group: np.ndarray
) -> None:
  first = _codes(group, rows["response"])
  seen = np.unique(first, return_index=True)[1]
  if len(seen) == len(first):
    return
  again = int(np.setdiff1d(np.arange(len(first)), seen)[0])
  before = int(np.flatnonzero(first == first[again])[0])
  raise BadLog(f"{where(again)}: the same response of the same group as {where(before)}.")


def _codes(*keys: np.ndarray) -> np.ndarray:
  """[N] 0, 1, 2... for each different combination, in the order in which they appear."""
  code = np.zeros(len(keys[0]), np.int64)
  for key in keys:
    _, inverse = np.unique(key, return_inverse=True)
    code = code * (inverse.max(initial=0) + 1) + inverse
  _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
  rank = np.empty(len(first), np.int64)
  rank[np.argsort(first)] = np.arange(len(first))
  return rank[inverse]
