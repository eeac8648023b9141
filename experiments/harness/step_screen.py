"""What a training run shows: a line a step, tables of samples."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

LONGEST_SHOWN = 600  # characters of a response
LINES_BETWEEN_HEADERS = 24
_WIDTHS = {
  "step": 9,
  "reward": 7,
  "length": 7,
  "ended": 6,
  "KL": 8,
  "clip": 6,
  "|grad|": 8,
  "ESS": 5,
  "skip": 5,
  "tok/s": 6,
  "sample/score/update": 20,
}


class Screen:
  """Shows the steps of a run, names of columns now and then, and every kind of warning once."""

  def __init__(self, say: Callable[[Any], None], *, steps: int) -> None:
    self.say, self.steps = say, steps
    self._lines = 0
    self._warned: set[str] = set()

  def step(self, record: dict[str, Any], warnings: Iterable[str]) -> None:
    if self._lines % LINES_BETWEEN_HEADERS == 0:
      self.say(header(record))
    self._lines += 1
    self.say(step_line(record, self.steps))
    for warning in warnings:
      warning = warning.removeprefix(f"step {record['step']}: ")
      kind = "".join(x for x in warning if not x.isdigit())
      if kind not in self._warned:
        self.say(Text(f"  WARNING: {warning} (said once; steps.jsonl has all)", "yellow"))
      self._warned.add(kind)


def header(record: dict[str, Any]) -> Text:
  """Names of the columns."""
  cells = [f"{name:>{width}}" for name, width in _columns(record).items()]
  return Text("".join(cells), "bold")


def step_line(record: dict[str, Any], steps: int) -> Text:
  """One step. KL is to the reference, k3 in nats per token; ESS of the ratios, per token."""
  seconds = record["seconds"]
  whole = sum(seconds.values())
  shares = "/".join(f"{100 * x / whole:.0f}" for x in seconds.values()) + " %"
  cells = {
    "step": f"{record['step'] + 1}/{steps}",
    "reward": _mean(record["rewards"]["total"], "{:.3f}"),
    **{name: _mean(x, "{:.3f}") for name, x in _components(record).items()},
    "length": _mean(record["lengths"], "{:.1f}"),
    "ended": _mean(record["finished"], "{:.0%}"),
    "KL": _mean((record.get("ref_kl") or {}).get("k3"), "{:.4f}"),
    "clip": _mean((record.get("clipped") or {}).get("clipped"), "{:.1%}"),
    "|grad|": _mean(record.get("grad_norm"), "{:.3g}"),
    "ESS": "-" if "ratio_ess" not in record else f"{float(record['ratio_ess']['fraction']):.2f}",
    "skip": "-" if "skipped" not in record else f"{record['skipped']['total']:.0f}",
    "tok/s": f"{record['tokens'] / whole:.0f}",
    "sample/score/update": shares,
  }
  widths = _columns(record)
  line = Text("".join(f"{cells[name]:>{width}}" for name, width in widths.items()))
  begin = widths["step"]
  line.stylize("green", begin, begin + widths["reward"])
  return line


def evaluation_line(record: dict[str, Any], *, held_out: bool) -> Text:
  """Rewards with their standard errors."""
  which = "held out" if held_out else "training prompts (the task holds none out)"
  parts = [
    f"{name} {x['mean']:.3f} +- {x['standard_error']:.3f}" for name, x in record["rewards"].items()
  ]
  return Text(f"  after {record['step']} steps, {which}: " + ", ".join(parts), "cyan")


def sample_table(samples: Sequence[dict[str, Any]], title: str, width: int | None = None) -> Text:
  """Responses in full, as far as they are not very long, with their rewards."""
  table = Table(title=title, box=box.SIMPLE, title_justify="left", show_lines=True)
  table.add_column("reward", no_wrap=True)
  table.add_column("prompt and response", overflow="fold")
  for sample in samples:
    rewards = "\n".join(f"{name} {float(x):.2f}" for name, x in sample["rewards"].items())
    text = Text(sample["prompt"], "dim")
    left = len(sample["text"]) - LONGEST_SHOWN
    cut = "" if left <= 0 else f"... ({left} characters more)"
    text.append(sample["text"][:LONGEST_SHOWN] + cut, "not dim")
    text.append(f" [{'end' if sample['finished'] else 'cut off'}, {sample['length']}]", "yellow")
    table.add_row(rewards, text)
  stream = io.StringIO()
  width = Console().width if width is None else width
  Console(file=stream, width=width, force_terminal=True, color_system="standard").print(table)
  return Text.from_ansi(stream.getvalue().rstrip())


def _columns(record: dict[str, Any]) -> dict[str, int]:
  columns = dict(_WIDTHS)
  names = list(_components(record))
  components = {name: len(name) + 2 if len(name) > 4 else 7 for name in names}
  return {"step": columns.pop("step"), "reward": columns.pop("reward"), **components, **columns}


def _components(record: dict[str, Any]) -> dict[str, Any]:
  """All rewards but the total; one that is the total is not shown twice."""
  parts = {name: x for name, x in record["rewards"].items() if name != "total"}
  return parts if len(parts) > 1 else {}


def _mean(average: Any, form: str) -> str:
  return "-" if not average or not average["count"] else form.format(float(average["mean"]))
