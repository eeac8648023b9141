"""The folder of a run: it belongs to one config, and nothing else is overwritten."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from experiments.harness import storage

_CONFIG = "config.json"


class OccupiedFolder(Exception):  # noqa: N818
  """The folder holds something that this run may not overwrite."""


def claim(folder: Path, name: str, config: Any) -> None:
  """Marks the folder as this config's.

  Raises:
    OccupiedFolder: it holds results of another config, or of another version of its class.
  """
  now = {"(experiment)": name, **_settings(config)}
  if not _holds_a_run(folder):
    storage.write(folder / _CONFIG, json.dumps(now, indent=2) + "\n")
    return
  then = json.loads((folder / _CONFIG).read_text())
  pairs = {key: (then.get(key, "absent"), now.get(key, "absent")) for key in {**then, **now}}
  if differing := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
    raise OccupiedFolder(
      f"{folder} holds results of another configuration:\n"
      + "".join(f"  {key}: {old} there, {new} now\n" for key, (old, new) in differing.items())
      + "Name another folder with --out, or delete these results with --fresh."
    )


def empty(folder: Path) -> None:
  """Deletes the results; the config goes last, so that after a kill the folder is still known.

  Raises:
    OccupiedFolder: it holds something else.
  """
  if _holds_a_run(folder):
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _CONFIG):
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
      else:
        path.unlink()


def _holds_a_run(folder: Path) -> bool:
  """False if the folder is free; what a killed write leaves begins with a dot."""
  if (folder / _CONFIG).is_file():
    return True
  if folder.is_file() or (folder.is_dir() and any(p.name[0] != "." for p in folder.iterdir())):
    raise OccupiedFolder(f"{folder} holds no results: name another folder with --out.")
  return False


def _settings(config: Any, name: str = "") -> dict[str, Any]:
  """{setting: value}; nested ones as policy.width, classes too, whose fields may be the same."""
  if not dataclasses.is_dataclass(config):
    return {name: storage.readable(config)}
  rows: dict[str, Any] = {name or "(class)": type(config).__qualname__}
  for field in dataclasses.fields(config):
    rows |= _settings(getattr(config, field.name), f"{name}.{field.name}".lstrip("."))
  return rows
