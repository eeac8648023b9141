"""A training run in a folder: it shows what happens, keeps it, and goes on after a kill.

    history = training_run.run(policy, task, config, folder, say=experiment.say)

  steps.jsonl      a line for every step: sums and counts beside means
  held_out.jsonl   a line for every evaluation, after so many steps
  samples.jsonl    a few responses of every step
  tensorboard/     the same numbers as event files, if they are asked for
  checkpoints/     the latest two, and the best by held-out reward

Files are written before the checkpoint that says that their steps are done, and cut back to the
checkpoint that a run goes on from: a run that was killed at any moment leaves, in the end, the
parameters and lines of one that was not.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from experiments.harness import event_files, held_out, step_files, step_screen
from experiments.harness.held_out import Evaluation
from experiments.harness.step_screen import Screen
from jaxrl_lm.lm import data_order, train_state, training
from jaxrl_lm.lm.checkpoints import Checkpoints
from jaxrl_lm.lm.placement import Placement
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.processes import GracefulExit
from jaxrl_lm.lm.reports import Report
from jaxrl_lm.lm.reward_errors import RewardError
from jaxrl_lm.lm.tasks import Task
from jaxrl_lm.lm.train_config import TrainConfig
from jaxrl_lm.lm.train_state import TrainState


class Stopped(SystemExit):
  """A signal came, and the run is saved; as an exit status, 128 and the number of the signal."""

  def __init__(self, received: signal.Signals) -> None:
    super().__init__(128 + received)


@dataclasses.dataclass(frozen=True)
class Habits:
  """How often a run does what changes none of its numbers.

  Attributes:
    checkpoint_every: steps from one checkpoint to the next; there is one at each evaluation, too.
    show_every: steps from one table of samples to the next; 0 = none.
    tensorboard: write event files, too.
  """

  checkpoint_every: int = 10
  show_every: int = 0
  tensorboard: bool = False


class History(NamedTuple):
  """What a run left.

  Attributes:
    state: after the last step.
    steps, evaluations: the lines of its files.
    first_step_seconds: from the call to the end of the first step, compilation included; None if
      there was nothing to do.
  """

  state: TrainState
  steps: list[dict[str, Any]]
  evaluations: list[dict[str, Any]]
  first_step_seconds: float | None


def run(
  policy: Pretrained,
  task: Task,
  config: TrainConfig,
  folder: Path,
  *,
  say: Callable[[Any], None],
  evaluation: Evaluation | None = None,
  habits: Habits | None = None,
  critic_params: Any = None,
  mesh: Mesh | None = None,
) -> History:
  """Trains until `config.steps` steps are done, those of earlier calls counted.

  Args:
    policy: where the run starts, and the reference of KL terms.
    task: prompts and rewards.
    config: of the run; more `steps` than an earlier call had: the run goes on.
    folder: of this run alone.
    say: shows a line of text or rich text.
    evaluation: None = none; the latest checkpoint is then the best.
    habits: None = the defaults.
    critic_params: to start from, where there is a critic.
    mesh: as of `training.train`.

  Returns:
    What the run left.

  Raises:
    Stopped: a signal came; what was done is saved.
    ValueError: the folder holds checkpoints of another run (the message shows the difference), or
      as `training.train`.
    CheckpointError: a checkpoint is damaged or could not be written.
  """
  this = _Run(policy, task, config, folder, say, evaluation, habits or Habits(), mesh)
  with (
    Checkpoints(folder / "checkpoints", config=_identity(this)) as checkpoints,
    GracefulExit() as leave,
  ):
    start = _start(this, checkpoints, critic_params)
    files = _Files(folder, step=int(start.step), tensorboard=this.habits.tensorboard)
    try:
      state, seconds = _train(this, start, checkpoints, files, leave)
    finally:
      files.close()
  return History(
    state,
    step_files.read(folder / "steps.jsonl"),
    step_files.read(folder / "held_out.jsonl"),
    seconds,
  )


class _Run(NamedTuple):
  """The arguments of `run`."""

  policy: Pretrained
  task: Task
  config: TrainConfig
  folder: Path
  say: Callable[[Any], None]
  evaluation: Evaluation | None
  habits: Habits
  mesh: Mesh | None


class _Files:
  """The files, cut back to what `step` steps have written."""

  def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
    self._events = None
    if tensorboard:
      self._events = event_files.writer(folder / "tensorboard", before=step)
    self.steps = step_files.Lines(folder / "steps.jsonl", before=step)
    self.samples = step_files.Lines(folder / "samples.jsonl", before=step)
    # An evaluation after n steps is made before the checkpoint of n steps, which it judges.
    self.evaluations = step_files.Lines(folder / "held_out.jsonl", before=step + bool(step))

  def show(self, record: dict[str, Any], group: str) -> None:
    """In TensorBoard, if it is asked for."""
    if self._events is not None:
      for name, number in event_files.scalars(record):
        self._events.add_scalar(f"{group}/{name}", number, record["step"])

  def sync(self) -> None:
    for file in (self.steps, self.samples, self.evaluations):
      file.sync()

  def close(self) -> None:
    for file in (self.steps, self.samples, self.evaluations):
      file.close()
    if self._events is not None:
      self._events.close()


def _identity(this: _Run) -> dict[str, Any]:
  """What must be the same when a run goes on."""
  pairs = [(prompt.tokens, prompt.reference) for prompt in this.task.prompts]
  return {
    "config": dataclasses.replace(this.config, steps=0),
    "model": this.policy.model.config,
    "rewards": this.task.rewards,
    "prompts": data_order.fingerprint(pairs),
    "evaluation": this.evaluation,
  }


def _start(this: _Run, checkpoints: Checkpoints, critic_params: Any) -> TrainState:
  """The latest checkpoint, or the policy."""
  update = this.config.update
  state = train_state.init_state(update, this.policy.params, critic_params)
  state = Placement(this.mesh).state(state, this.policy.model, update)
  if not checkpoints.steps:
    return state
  restored = checkpoints.restore(state)
  more = f"going on to {this.config.steps}"
  done = restored.step >= this.config.steps
  this.say(f"{restored.step} steps are done: {'nothing is left to do' if done else more}")
  return restored.state


def _train(
  this: _Run, state: TrainState, checkpoints: Checkpoints, files: _Files, leave: GracefulExit
) -> tuple[TrainState, float | None]:
  """The loop, and the seconds to the end of its first step."""
  last, seconds = this.config.steps, None
  done = saved = int(state.step)
  if done >= last:
    return state, None
  # Before anything is evaluated: it checks that policy, task and configuration go together.
  steps = training.train(this.policy, this.task, this.config, state=state, mesh=this.mesh)
  if done == 0 and this.evaluation is not None:
    _evaluated(this, state, files)
  screen, began = Screen(this.say, steps=last), time.perf_counter()

  def save(metric: float | None = None) -> None:
    files.sync()
    checkpoints.save(done, state, {"step": done}, metric=metric)

  try:
    for state, report in steps:
      seconds = time.perf_counter() - began if seconds is None else seconds
      _keep(this, report, files, screen)
      due = this.evaluation is not None and this.evaluation.due(report.step + 1, last)
      score = _evaluated(this, state, files) if due else None
      done, stop = report.step + 1, leave.requested()
      if due or stop or done == last or done % this.habits.checkpoint_every == 0:
        save(score)
        saved = done
      if stop:
        _stop(this, checkpoints, leave, done)
  except RewardError:
    if done > saved and done == int(state.step):  # the steps before it are whole
      save()
    raise
  return state, seconds


def _stop(this: _Run, checkpoints: Checkpoints, leave: GracefulExit, done: int) -> None:
  checkpoints.wait()
  received = leave.received or signal.SIGTERM  # another process was told to stop
  this.say(
    f"{received.name}: {done} of {this.config.steps} steps are done and saved in "
    f"{checkpoints.folder}. The same command continues."
  )
  raise Stopped(received)


def _keep(this: _Run, report: Report, files: _Files, screen: Screen) -> None:
  """Writes the lines of a step, and shows them."""
  record, samples = step_files.step_record(report), step_files.sample_records(report)
  files.steps.append([record])
  files.show(record, "training")
  files.samples.append(samples)
  screen.step(record, report.warnings)
  every, number = this.habits.show_every, report.step + 1
  if every and samples and (number == 1 or number % every == 0):
    this.say(step_screen.sample_table(samples, f"samples of step {number}"))


def _evaluated(this: _Run, state: TrainState, files: _Files) -> float:
  """Evaluates, and returns the mean of the total."""
  assert this.evaluation is not None
  placement, start = Placement(this.mesh), None
  if this.evaluation.kl:
    start = state._replace(params=this.policy.params)
    start = placement.state(start, this.policy.model, this.config.update).params
  record = held_out.evaluate(
    this.policy._replace(params=state.params),
    this.task,
    this.config,
    this.evaluation,
    placement.rows,
    start=start,
  )
  record = {"step": int(state.step), **record}
  files.evaluations.append([record])
  files.show(record, "held out")
  this.say(step_screen.evaluation_line(record, held_out=bool(this.task.held_out)))
  score: float = record["rewards"]["total"]["mean"]
  return score
