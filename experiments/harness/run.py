"""The run of an experiment: parts that are computed once, a summary, a command line.

    def main(config: Config = Config(), *, out: Path | None = None) -> dict[str, Any]:
      with run.open("length_bias", config, out) as experiment:
        exact = experiment.part("exact", lambda: decomposition(config))
        experiment.golden("cosine", exact["cosine"], "0.9731")
        experiment.figure("cosine", draw(exact))
      return experiment.summary

    if __name__ == "__main__":
      run.cli(main, CONFIGS)

What a part returns is stored, and every run, the first one too, goes on with what the store gives
back. After a kill the same command continues with the first part that is not stored.
"""

import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from experiments.harness import figures, folder, provenance, storage
from experiments.harness.expectations import Expectations

RESULTS = provenance.ROOT / "results"
SECONDS_BETWEEN_LINES = 10.0  # of progress, where there is no terminal to redraw

T = TypeVar("T")


def data_path(name: str) -> Path | None:
  """Path of a file of real data, or None when it is absent.

  Args:
    name: path below the folder that JAXRL_LM_DATA names, or ../shared/data beside the checkout.
  """
  default = provenance.ROOT.parent / "shared" / "data"
  path = Path(os.environ.get("JAXRL_LM_DATA") or default) / name
  return path if path.exists() else None


class Experiment:
  """One run, made by `open`; `golden` and `hypothesis` are those of `Expectations`."""

  def __init__(self, name: str, config: Any, out: Path, bar: Progress) -> None:
    self.out = out
    self.expectations = Expectations()
    self.golden = self.expectations.golden
    self.hypothesis = self.expectations.hypothesis
    self.summary: dict[str, Any] = {
      "experiment": name,
      "config": storage.readable(config),
      "started": _now(),
      "environment": provenance.environment(),
      "git": provenance.git(),
      "skipped": {},
      "figures": [],
    }
    self._bar = bar
    self._part = ""
    self._records: dict[str, dict[str, Any]] = {}

  def part(self, name: str, function: Callable[..., Any], *, needs: Sequence[str] = ()) -> Any:
    """What the function returns, computed unless an earlier run has stored it.

    Args:
      name: of the part; it names a file.
      function: of the config and of earlier parts; takes the paths of `needs`, and returns dicts,
        lists, text, numbers and arrays.
      needs: files of real data.

    Returns:
      What it returned, as stored: arrays are NumPy's, tuples lists, dataclasses dicts. None when a
      file of `needs` is absent and the part is skipped.
    """
    if name in self._records or not re.fullmatch(r"\w[\w.-]*", name):
      raise ValueError(f"part {name!r} needs a name of its own, of letters, digits, _ . and -")
    self._part = name
    path = self.out / "parts" / f"{name}.npz"
    record = self._stored(path)
    if record is None:
      inputs = {need: data_path(need) for need in needs}
      if absent := [need for need, found in inputs.items() if found is None]:
        self.summary["skipped"][name] = absent
        self.say(f"{name}: SKIPPED, {', '.join(absent)} not found (set JAXRL_LM_DATA)")
        return None
      if self._bar.disable:
        self.say(f"{name} ...")
      start = time.perf_counter()
      with self._task(name, total=None):
        value = jax.block_until_ready(function(*inputs.values()))
      seconds = round(time.perf_counter() - start, 3)
      made_by = self.summary["environment"]
      record = {"seconds": seconds, "finished": _now(), "made_by": made_by, "value": value}
      storage.save(path, record)
      record = storage.load(path)
      self.say(f"{name}: {seconds:.1f} s")
    self._records[name] = record
    rows = [{"part": part, **row} for part, row in self._records.items()]
    lines = [json.dumps(storage.readable(row), allow_nan=False) + "\n" for row in rows]
    storage.write(self.out / "metrics.jsonl", "".join(lines))
    return record["value"]

  def track(self, items: Iterable[T]) -> Iterator[T]:
    """The items, under a progress bar; a line now and then where there is no terminal."""
    total = len(items) if isinstance(items, Sized) else None
    said = time.monotonic()
    with self._task(f"  {self._part}", total) as task:
      for done, item in enumerate(items, 1):
        yield item
        self._bar.update(task, completed=done)
        if self._bar.disable and time.monotonic() - said > SECONDS_BETWEEN_LINES:
          said = time.monotonic()
          self.say(f"  {self._part}: {done} of {total or '?'}")

  def figure(self, name: str, figure: Figure) -> None:
    """Saves a figure as <name>.png in the run's folder."""
    figures.save(figure, self.out / f"{name}.png")
    self.summary["figures"].append(f"{name}.png")

  def say(self, line: str) -> None:
    """Prints a line above the progress bars."""
    self._bar.console.print(line, soft_wrap=True)

  def finish(self) -> None:
    """Writes summary.json; prints expected against measured and where the files are."""
    rows = self.expectations.rows
    parts = self._records.items()
    self.summary |= {
      "finished": _now(),
      # Of all parts, whichever run computed them.
      "wall_seconds": round(sum(record["seconds"] for _, record in parts), 3),
      "missed": [row.name for row in rows if row.status == "missed"],
      "expectations": storage.readable(rows),
      "results": {part: storage.readable(record["value"]) for part, record in parts},
      "parts": {
        part: {k: record[k] for k in ("seconds", "finished", "made_by")} for part, record in parts
      },
    }
    path = self.out / "summary.json"
    storage.write(path, json.dumps(self.summary, indent=2, allow_nan=False) + "\n")
    self._bar.console.print(self.expectations.table(self.summary["experiment"]))
    for row in rows:
      if row.status in ("contradicted", "undecided"):
        reason = row.explanation or "not explained"
        self.say(f"{row.status}: {row.name} ({row.source}): {reason}")
    if self.summary["missed"]:
      self.say(f"MISSED: {', '.join(self.summary['missed'])}")
    for file in [*self.summary["figures"], path.name]:
      self.say(str(self.out / file))

  def _stored(self, path: Path) -> dict[str, Any] | None:
    """The record of an earlier run, if there is one that can be read."""
    if not path.exists():
      return None
    try:
      record: dict[str, Any] = storage.load(path)
    except Exception as error:  # a damaged file fails in many ways, which all mean the same
      self.say(f"{path.stem}: the stored result is damaged ({error}) and is computed again")
      return None
    self.say(f"{path.stem}: stored on {record['finished']}, after {record['seconds']:.1f} s")
    now, then = self.summary["environment"], record["made_by"]
    if other := [
      f"{key} {then.get(key)}, now {now[key]}" for key in now if now[key] != then.get(key)
    ]:
      self.say(f"  WARNING: computed by {'; '.join(other)} (--fresh computes it again)")
    return record

  @contextmanager
  def _task(self, label: str, total: int | None) -> Iterator[Any]:
    task = self._bar.add_task(label, total=total)
    try:
      yield task
    finally:
      self._bar.remove_task(task)


@contextmanager
def open(
  name: str, config: Any, out: Path | None = None, *, x64: bool = True
) -> Iterator[Experiment]:
  """Opens the folder of a run, and continues what it holds; leaving it writes the summary.

  Args:
    name: of the experiment.
    config: a dataclass of values.
    out: the folder; default results/<name>.
    x64: compute in 64 bits.

  Raises:
    OccupiedFolder: the folder holds the results of another config, or other files.
  """
  out = RESULTS / name if out is None else Path(out)
  folder.claim(out, name, config)
  console = Console(markup=False, highlight=False, emoji=False)
  bar = Progress(console=console, transient=True, disable=not console.is_terminal)
  with jax.enable_x64(x64), bar:
    experiment = Experiment(name, config, out, bar)
    yield experiment
  experiment.finish()


def cli(
  main: Callable[..., dict[str, Any]],
  configs: Mapping[str, tuple[Any, str]],
  arguments: Sequence[str] | None = None,
) -> None:
  """The command line `python -m experiments.<name> [config] [--overrides] [--out] [--fresh]`.

  Args:
    main: called as main(config, out=folder); returns the summary.
    configs: {name: (config, one line about it)}. The first is the default, in results/<name>;
      another one is in results/<name>-<config>.
    arguments: default sys.argv[1:].

  Raises:
    SystemExit: 1 when a golden is missed, 2 when the folder or an argument is wrong.
  """
  arguments = sys.argv[1:] if arguments is None else arguments
  # The module's own name, also where it runs as __main__; of a folder, the folder's.
  name = (inspect.getmodule(main).__spec__.name).removesuffix(".__main__").rpartition(".")[2]
  default = next(iter(configs))
  chosen = next((word for word in arguments if word in configs), default)
  folder_name = name if chosen == default else f"{name}-{chosen}"
  results = Path(os.path.relpath(RESULTS / folder_name))
  instances = {key: config for key, (config, _) in configs.items()}
  about = {key: line for key, (_, line) in configs.items()}
  named: Any = tyro.extras.subcommand_type_from_defaults(instances, about)

  def settings(
    config: Annotated[named, tyro.conf.arg(name="")] = instances[default],
    out: Path = results,
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
  ) -> tuple[Any, Path, bool]:
    """What the command line sets.

    Args:
      config: Named configurations.
      out: Folder of the results, continued if it holds some of the same configuration.
      fresh: Delete the results in the folder first.
    """
    return config, out, fresh

  config, out, fresh = tyro.cli(
    settings,
    args=arguments,
    prog=f"python -m experiments.{name}",
    description=re.sub(r"\n(?=\w+: )", "\n\n", inspect.getmodule(main).__doc__ or ""),
    config=(tyro.conf.CascadeSubcommandArgs,),
  )
  try:
    if fresh:
      folder.empty(out)
    summary = main(config, out=out)
  except folder.OccupiedFolder as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None
  except KeyboardInterrupt:
    print("Interrupted. The same command continues.", file=sys.stderr)
    raise SystemExit(130) from None
  if summary["missed"]:
    raise SystemExit(1)


def _now() -> str:
  return datetime.now(UTC).isoformat(timespec="seconds")
