"""One of two processes of a run: `python -m tests.two_processes folder port index`.

Decisions in front of a collective that both must take alike: to skip an update, to refuse a
checkpoint that one of them finds damaged, to stop on a signal that one of them gets.
"""

import os
import signal
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm.lm import checkpoint_digests
from jaxrl_lm.lm.checkpoints import CheckpointError, Checkpoints
from jaxrl_lm.lm.processes import GracefulExit, every_process


def spread(mesh, array, *spec):
  sharding = NamedSharding(mesh, P(*spec))
  return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@jax.jit
def update(w, losses):
  """The mean of all rows is one number in both processes, and so is the decision."""
  mean = losses.mean()
  good = jnp.isfinite(mean)
  return jnp.where(good, w - mean, w), good


def main(folder: Path, port: int, index: int) -> None:
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
  assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
  assert every_process("é" * index) == ["", "é"]
  mesh = jax.make_mesh((4,), ("data",))
  state = {
    "w": spread(mesh, np.arange(32, dtype=np.float32).reshape(8, 4), "data"),
    "all": spread(mesh, np.float32(5)),
  }

  # Process 1 alone meets a loss that is not finite: neither changes its weights.
  for bad in (False, True):
    losses = np.ones(8, np.float32)
    losses[7] = np.nan if bad else 1
    w, good = update(state["w"], spread(mesh, losses, "data"))
    moved = [shard.data[0, 0] - 4 * shard.index[0].start for shard in w.addressable_shards]
    print("updated" if good else "skipped", *(float(x) for x in moved))

  with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, state, {"who": "both"})
    checkpoints.save(2, state | {"w": state["w"] + 1})
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    step, got, record = checkpoints.restore(target, 1)
    for name, leaf in got.items():
      for a, b in zip(leaf.addressable_shards, state[name].addressable_shards, strict=True):
        np.testing.assert_array_equal(a.data, b.data)
    print("restored", step, record)

    # Process 1 alone reads a leaf wrongly: both refuse the checkpoint.
    honest = checkpoint_digests.damaged_leaf
    if index == 1:
      checkpoint_digests.damaged_leaf = lambda arrays, digests: "w"
    try:
      checkpoints.restore(target)
    except CheckpointError as error:
      print("refused", "step 1 is intact" in str(error))
    checkpoint_digests.damaged_leaf = honest

    # Process 1 alone is told to stop: both leave after the same step, and save.
    with GracefulExit() as leave:
      for step in range(3, 100):
        if index == 1 and step == 5:
          os.kill(os.getpid(), signal.SIGTERM)
        if leave.requested():
          break
      checkpoints.save(step, state)
  print("stopped", step, checkpoints.steps)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
