"""Tables and samples of `experiments.stories`, for the terminal and the results folder."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def results(rows: dict[str, dict[str, Any]], kl: float) -> Any:
  """A column for each algorithm."""
  title = f"means over seeds, 95 % t intervals; matched at {kl:.1f} nats per response"
  table = Table("", *rows, title=title)
  for key in next(iter(rows.values())):
    table.add_row(key, *(str(row[key]) for row in rows.values()))
  return table


def differences(pairs: dict[str, dict[str, Any]]) -> Any:
  """A row for each pair, what is resolved with a star."""
  keys = ("reward at matched KL", "reward at end", "KL at end")
  table = Table("", *keys, title="differences of runs of one seed; * = the interval leaves out 0")
  for name, row in pairs.items():
    table.add_row(name, *(f"{row[key]}{' *' if row[key].resolved else ''}" for key in keys))
  return table


def samples(paths: dict[str, dict[str, Any]]) -> str:
  """The first response to each held-out prompt, before and after, in Markdown.

  Args:
    paths: of each algorithm, a run of one seed.
  """
  lines = ["# Samples on held-out prompts, before and after"]
  first = next(iter(paths.values()))
  for number, before in enumerate(first["samples"]["before"]):
    lines += ["", f"## {before['prompt']}", "", _sample("start", before)]
    lines += [_sample(name, path["samples"]["after"][number]) for name, path in paths.items()]
  return "\n".join(lines) + "\n"


def _sample(name: str, sample: dict[str, Any]) -> str:
  text = " ".join(sample["text"].split())
  reward = float(sample["rewards"]["total"])
  end = "ended" if sample["finished"] else "cut off"
  return f"- **{name}** (reward {reward:g}, {sample['length']} tokens, {end}): {text}"
