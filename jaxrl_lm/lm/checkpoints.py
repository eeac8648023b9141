"""Checkpoints of a run: whole or not there, checked before use, the latest and the best kept.

Orbax writes and reads; around it stands what it leaves to its callers. A restored state has the
containers, dtypes and shapes of the target or is refused, a flipped bit is an error, and so are a
step saved twice, another configuration and a full disk.

A folder belongs to one run at a time: the first save locks it until `close`, or until the process
is gone, where the file system knows locks. Others may restore from it meanwhile. It is on a file
system of its machines (a disk, NFS), not in an object store. In several processes each calls every
method, at the same place of its program. Tested: 1 process, 1 and 8 devices of a CPU; 2 processes
of a CPU on one machine (gloo). Not tested: a write that fails in one of several processes, for
which Orbax lets the others wait 20 minutes.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jaxrl_lm.lm import checkpoint_digests, checkpoint_layout, processes
from jaxrl_lm.lm.folder_lock import FolderLock
from jaxrl_lm.lm.settings import differences, settings

_UNFINISHED = ".orbax-checkpoint-tmp"
_SHOWN = 20  # differences in a message; those of another architecture are all alike
_STATE, _RECORD, _METRIC = "state", "record", "metric"
# In the folder of a step; a deletion that was killed leaves some of them, or none.
_OWN = {_STATE, _RECORD, "metrics", checkpoint_digests.FILE, *checkpoint_digests.UNCOVERED}


class CheckpointError(RuntimeError):
  """A checkpoint is damaged or could not be written; the message says which step is intact."""


class Restored(NamedTuple):
  """What `Checkpoints.restore` returns.

  Attributes:
    step: the step.
    state: like the target.
    record: as saved; tuples are lists.
  """

  step: int
  state: Any
  record: dict[str, Any]


class Checkpoints:
  """The checkpoints in a folder.

      with Checkpoints(folder, config=config) as checkpoints:
        if checkpoints.steps:
          step, state, record = checkpoints.restore(state)
        ...
        checkpoints.save(step, state, {"rewards": rewards}, metric=held_out_reward)

  Opening removes what a killed save has left. Closing waits for the save that is under way, which
  is lost if the interpreter ends before.
  """

  def __init__(
    self, folder: str | Path, *, config: Any = None, keep_latest: int = 2, keep_best: int = 1
  ):
    """Opens the folder, and makes it if it is not there.

    Args:
      folder: of this run alone.
      config: whatever must be the same when the run goes on, see `settings`. None compares nothing.
      keep_latest: how many of the newest are kept, 1 at least.
      keep_best: how many of the highest metric are kept beside them.

    Raises:
      ValueError: nothing would be kept; the folder is an address, or holds one that is named like
        a step and is no checkpoint.
      FileExistsError: the folder is a file.
    """
    if keep_latest < 1 or keep_best < 0:
      raise ValueError(f"cannot keep {keep_latest} latest and {keep_best} best checkpoints")
    if "://" in str(folder):
      raise ValueError(f"checkpoints need a file system, got {folder}")
    self.folder = Path(folder).absolute()
    self._settings = settings(config)
    self._saving: int | None = None
    self._closed = False
    self.folder.mkdir(parents=True, exist_ok=True)
    _check_own(self.folder)
    self._lock = FolderLock(self.folder)
    if (
      jax.process_index() == 0 and self._lock.acquire()
    ):  # else the unfinished ones are of a run that is saving
      self._remove_unfinished()
      self._lock.release()
    # Orbax logs, with tracebacks, what it raises as well; and that a metric is missing.
    self._quiet = partial(_not_of_orbax)  # an object of its own, that `close` can take away
    logging.getLogger("absl").addFilter(self._quiet)
    options = self._options(keep_latest, keep_best)
    self._manager = ocp.CheckpointManager(self.folder, options=options)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  @property
  def steps(self) -> list[int]:
    """Steps that can be restored, oldest first; one that is being saved counts."""
    return sorted(self._manager.all_steps())

  def save(
    self, step: int, state: Any, record: dict[str, Any] | None = None, metric: float | None = None
  ) -> None:
    """Saves a state; returns as soon as its arrays may be changed or donated.

    The digests of the leaves are taken before it returns. Writing goes on behind it, and becomes
    visible in one step. What fails there is raised by the next call of `save`, `wait` or `close`.

    Args:
      step: later than every step in the folder.
      state: tree of JAX and NumPy arrays, typed keys and None.
      record: what JSON holds, such as metrics and positions in the data.
      metric: the higher the better. None and NaN are never among the best.

    Returns:
      None.

    Raises:
      ValueError: the step is there or is not the latest, or the record is not JSON.
      TypeError: a leaf of the state is not an array.
      CheckpointError: this save, or the one before, has failed, this is closed, or another run
        saves in the folder. Older steps are as they were.
    """
    if self._closed:
      raise CheckpointError(f"{self.folder} is closed: step {step} was not saved")
    self.wait()
    self._take_folder()
    self._check_new(step)
    layout = checkpoint_layout.layout(state)
    arrays = checkpoint_layout.stored_arrays(state)
    if not arrays:
      raise ValueError("the state has no array to save")
    content = {
      "record": _checked_record({} if record is None else record),
      "settings": self._settings,
      "layout": layout,
      "digests": checkpoint_digests.leaf_digests(arrays),
    }
    items = ocp.args.Composite(
      **{_STATE: ocp.args.StandardSave(arrays), _RECORD: ocp.args.JsonSave(content)}
    )
    metrics = None if metric is None or math.isnan(metric) else {_METRIC: float(metric)}
    self._saving = step
    with self._failure_named():
      self._manager.save(step, args=items, metrics=metrics, force=True)

  def wait(self) -> None:
    """Waits until the last save is on disk.

    Raises:
      CheckpointError: it has failed. Older steps are as they were.
    """
    with self._failure_named():
      self._manager.wait_until_finished()
    self._saving = None

  def close(self) -> None:
    """Waits for the last save, then closes the folder.

    Raises:
      CheckpointError: that save has failed.
    """
    if self._closed:
      return
    self._closed = True
    try:
      self.wait()
    finally:
      self._manager.close()
      self._lock.release()
      logging.getLogger("absl").removeFilter(self._quiet)

  def delete(self, step: int) -> None:
    """Deletes a step, such as a damaged one that the run is to write again.

    Args:
      step: one of `steps`.

    Returns:
      None.

    Raises:
      ValueError: it is not there.
    """
    self.wait()
    self._existing(step)
    self._manager.delete(step)

  def restore(self, target: Any, step: int | None = None, *, cast: bool = False) -> Restored:
    """The state of a step, on the devices of the target.

    Files, configuration, containers, shapes and dtypes are compared before a leaf is read, and the
    content of every leaf before one is returned.

    Args:
      target: a tree like the state, of arrays or jax.ShapeDtypeStruct. A leaf goes where the
        target's sharding says; without one (jax.eval_shape), or of an array that is not committed
        to its device, to wherever JAX puts new arrays; to NumPy if the target's is NumPy's.
      step: default the latest.
      cast: convert a floating-point leaf to the target's dtype, if they differ.

    Returns:
      Step, state and record.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the step is not there; or the configuration, a container, a shape or a dtype
        differs: the message shows each difference.
      CheckpointError: the checkpoint is damaged. The message names the file or the leaf, and the
        newest older step that is not.
    """
    self.wait()
    step = self._existing(step)
    self._raise_damage(step, lambda: self._damaged_file(step))
    record_only = ocp.args.Composite(**{_RECORD: ocp.args.JsonRestore()})
    content = self._manager.restore(step, args=record_only)[_RECORD]
    self._check_same(step, content, target, cast)
    holders = checkpoint_layout.placeholders(target, content["layout"])
    state_only = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(holders)})
    arrays = self._manager.restore(step, args=state_only)[_STATE]
    self._raise_damage(step, lambda: _damaged_leaf(self._path(step), arrays, content["digests"]))
    return Restored(step, checkpoint_layout.rebuilt(target, arrays), content["record"])

  def _options(self, keep_latest: int, keep_best: int) -> ocp.CheckpointManagerOptions:
    policy = ocp.checkpoint_managers
    kept = [policy.LatestN(keep_latest)]
    if keep_best:
      best = policy.BestN(
        get_metric_fn=_metric, n=keep_best, keep_checkpoints_without_metrics=False
      )
      kept.append(best)
    return ocp.CheckpointManagerOptions(
      best_fn=_metric,  # without it the metric is not written, and not known after a restart
      preservation_policy=policy.AnyPreservationPolicy(kept),
      # Called when all files are written and the folder still has its temporary name.
      async_options=ocp.AsyncOptions(
        post_finalization_callback=self._seal,
        # In the background, one that fails lets the interpreter wait for minutes at its exit.
        create_directories_asynchronously=False,
      ),
    )

  def _path(self, step: int) -> Path:
    return self.folder / str(step)

  def _take_folder(self) -> None:
    free = jax.process_index() != 0 or self._lock.acquire(attempts=5)
    if any(processes.every_process("" if free else "taken")):
      raise CheckpointError(f"another run saves in {self.folder}: close it, or take another folder")
    self._manager.reload()  # what was saved or deleted since it was opened

  def _seal(self) -> None:
    (unfinished,) = self.folder.glob(f"{self._saving}{_UNFINISHED}*")
    checkpoint_digests.write_file_digests(unfinished)

  def _remove_unfinished(self) -> None:
    if jax.process_index() == 0:
      for path in self.folder.glob(f"*{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)

  @contextmanager
  def _failure_named(self) -> Iterator[None]:
    """An error of Orbax as one that says what was lost and what is there."""
    try:
      yield
    except Exception as error:
      self._remove_unfinished()
      self._manager.reload()
      intact = f"steps {self.steps} are as they were" if self.steps else "there is no older one"
      raise CheckpointError(
        f"step {self._saving} was not saved in {self.folder}; {intact}: {error}"
      ) from error

  def _existing(self, step: int | None) -> int:
    if not self.steps:
      raise FileNotFoundError(f"{self.folder} holds no checkpoint")
    if step is None:
      return self.steps[-1]
    if step not in self.steps:
      raise ValueError(f"{self.folder} has no step {step}, but {self.steps}")
    return step

  def _check_new(self, step: int) -> None:
    if step < 0:
      raise ValueError(f"a step cannot be negative, got {step}")
    if step in self.steps:
      raise ValueError(f"{self.folder} has a step {step} already: `delete` it to save it again")
    if self.steps and step < self.steps[-1]:
      raise ValueError(
        f"step {step} is before {self.steps[-1]}, the latest in {self.folder}: a run that goes on "
        "from an older step must `delete` the later ones"
      )

  def _check_same(self, step: int, content: dict[str, Any], target: Any, cast: bool) -> None:
    if self._settings is not None and (lines := differences(content["settings"], self._settings)):
      raise ValueError(f"{self._path(step)} is of another configuration:{_listed(lines)}")
    wanted = checkpoint_layout.layout(target)
    if lines := checkpoint_layout.layout_differences(content["layout"], wanted, cast=cast):
      raise ValueError(f"{self._path(step)} holds another state:{_listed(lines)}")

  def _damaged_file(self, step: int) -> str | None:
    """Found by one process: the file system is that of all."""
    if jax.process_index():
      return None
    return checkpoint_digests.damaged_file(self._path(step))

  def _raise_damage(self, step: int, find: Callable[[], str | None]) -> None:
    """Raises in every process what one of them finds."""
    found = [text for text in processes.every_process(find() or "") if text]
    if not found:
      return
    older = [x for x in reversed(self.steps) if x < step]
    intact = next((x for x in older if not checkpoint_digests.damaged_file(self._path(x))), None)
    advice = (
      "no older step is intact"
      if intact is None
      else f"step {intact} is intact: restore it with step={intact}, and `delete` the later ones"
    )
    raise CheckpointError(f"{found[0]}; {advice}")


def _check_own(folder: Path) -> None:
  """No foreign folder is named like a step: Orbax would count it, and delete it one day."""
  for path in folder.iterdir():
    if path.name.isdecimal() and path.is_dir():
      names = {content.name for content in path.glob("*")}
      if names and not names & _OWN:
        raise ValueError(
          f"{path} is named like a step and is no checkpoint ({', '.join(sorted(names)[:3])} is in "
          "it): move it, or take another folder"
        )


def _metric(metrics: dict[str, float]) -> float:
  return metrics[_METRIC]


def _listed(lines: list[str]) -> str:
  more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
  return "".join(f"\n  {line}" for line in lines[:_SHOWN] + more)


def _not_of_orbax(record: logging.LogRecord) -> bool:
  return "orbax" not in Path(record.pathname).parts


def _checked_record(record: dict[str, Any]) -> dict[str, Any]:
  try:
    text = json.dumps(record, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f"the record is not JSON: {error}{_culprit(record)}") from error
  if not isinstance(record, dict) or not _text_keys(record):
    raise ValueError("the record and every mapping in it must have text as keys")
  loaded: dict[str, Any] = json.loads(text)
  return loaded


def _culprit(record: Any) -> str:
  """The first entry that cannot be written, where the record is a mapping."""
  for key, value in record.items() if isinstance(record, dict) else ():
    try:
      json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
      return f", in {key!r}"
  return ""


def _text_keys(value: Any) -> bool:
  if isinstance(value, dict):
    return all(isinstance(key, str) and _text_keys(item) for key, item in value.items())
  return all(map(_text_keys, value)) if isinstance(value, list | tuple) else True


def _damaged_leaf(path: Path, arrays: dict[str, Any], digests: Any) -> str | None:
  name = checkpoint_digests.damaged_leaf(arrays, digests)
  return None if name is None else f"{path}: leaf {name} is not what was saved"
