"""The real runs in shapes: sizes of the models, memory per device, and the loop on a tiny model."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.real_runs import CONFIGS, QWEN2_5_05B, QWEN3_06B, Config, Machine
from experiments.harness import step_files, training_run
from experiments.real_run import __main__ as command
from experiments.real_run import loop, memory, setup
from jaxrl_lm.lm import policy, scoring
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.problem_tasks import ask_step_by_step

QUESTIONS = ("one and one?", "two and two?")
TOKENIZER = Characters("".join(sorted(set("".join(map(ask_step_by_step, QUESTIONS))) | {*"0123#"})))
TINY = Config(
  QWEN2_5_05B
  | {
    "vocab_size": TOKENIZER.vocab_size + 1,  # even, for two parts
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
  },
  Machine("CPU", 10**9, data=2, fsdp=2, tensor=2),
  prompt_length=100,
  max_new_tokens=6,
  num_prompts=4,
  group_size=4,
  micro_batches=2,
  warmup=1,
  steps=2,
)


@pytest.mark.parametrize(
  ("published", "millions", "besides_embedding"), [(QWEN2_5_05B, 490, 360), (QWEN3_06B, 600, 440)]
)
def test_the_models_have_the_sizes_of_their_cards(published, millions, besides_embedding):
  """0.49 and 0.36 billion are what the card of Qwen2.5-0.5B says; 0.6 and 0.44 of Qwen3-0.6B."""
  params = policy.abstract_params(setup.policy_config(Config(published, Machine("", 1))))[1]
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  embedding = math.prod(params["embedding"].shape)
  assert abs(count / 1e6 - millions) < 5
  assert abs((count - embedding) / 1e6 - besides_embedding) < 5


@pytest.fixture(scope="module")
def plans() -> dict[str, memory.Plan]:
  return {name: memory.plan(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_moments_and_cache_of_a_device(name, plans):
  config, made = CONFIGS[name], plans[name]
  held, machine = memory.held(made), config.machine
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(made.state.params))
  # In float32; norms and biases, less than a thousandth, are whole on every device.
  assert held["parameters"] == pytest.approx(4 * count / machine.fsdp, rel=1e-2)
  assert held["parameters"] >= 4 * count / machine.fsdp
  assert held["moments"] == pytest.approx(2 * held["parameters"], rel=1e-6)
  slots = config.prompt_length + config.max_new_tokens - 1
  rows = config.num_prompts * config.group_size
  cache = jax.eval_shape(lambda: made.model.init_cache(rows, slots))
  stored = sum(x.size * x.dtype.itemsize for x in (cache.keys, cache.values))
  assert memory.formulas(config, made)["cache of the sampler"] == stored // machine.count


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_is_float32_with_bfloat16_activations_and_equal_parts(name, plans):
  config, made = CONFIGS[name], plans[name]
  assert {x.dtype for x in jax.tree.leaves(made.state.params)} == {jnp.dtype("float32")}
  assert made.model.config.compute_dtype == jnp.bfloat16
  assert made.model.config.remat
  assert made.part.tokens.shape[0] % (config.micro_batches * config.machine.count) == 0


@pytest.fixture(scope="module")
def tiny() -> memory.Need:
  return memory.need(TINY)


def test_every_program_compiles_on_a_mesh_and_its_memory_is_counted(tiny):
  assert set(tiny.programs) == {"sampling", "scoring", "update"}
  cache = tiny.by_formula["cache of the sampler"]
  assert tiny.programs["sampling"] > cache
  # A new state comes out of an update, beside the old one.
  assert tiny.programs["update"] > tiny.held["parameters"] + tiny.held["moments"]
  assert tiny.peak == sum(tiny.held.values()) + max(tiny.programs.values())


def test_every_program_of_one_device_is_lowered():
  made = memory.plan(replace(TINY, machine=Machine("CPU", 10**9)))
  assert set(memory.lower(made)) == {"sampling", "scoring", "update"}


def test_the_verdict_depends_on_the_device(tiny):
  for size, word in ((tiny.peak * 2, "fits"), (tiny.peak, "DOES NOT FIT")):
    config = replace(TINY, machine=replace(TINY.machine, memory=size))
    assert memory.fits(config, tiny) == (word == "fits")
    assert word in [*memory.table("tiny", config, tiny).columns[1].cells]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits_its_machine(name):
  assert memory.fits(CONFIGS[name], memory.need(CONFIGS[name]))


@pytest.mark.parametrize("arguments", [["qwen"], [], ["qwen3-0.6b-h200"]])
def test_the_command_says_what_is_missing(arguments, capsys):
  with pytest.raises(SystemExit) as stopped:
    command.cli(arguments)
  assert stopped.value.code == 2
  assert (
    "no configuration qwen" if arguments == ["qwen"] else "--model"
  ) in capsys.readouterr().err


# ----------------------------------------------------------------------------- the run


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """Problems, and a checkpoint that needs no files."""

  def loaded(path: Any, *, mesh: Any, **overrides: Any) -> Pretrained:
    del path, mesh, overrides
    return Pretrained(*policy.init(setup.policy_config(TINY), jax.random.key(0)), TOKENIZER)

  monkeypatch.setattr(loop, "load", loaded)
  rows = [{"question": x, "answer": f"#### {i}"} for i, x in enumerate(QUESTIONS)]
  (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return tmp_path


def run(files: Path, config: Config = TINY, out: str = "out") -> Path:
  loop.main(config, files / "model", files / "train.jsonl", files / out)
  return files / out


class StoppedAtOnce:
  """What a signal in the first step does."""

  received = signal.SIGINT

  def __enter__(self) -> StoppedAtOnce:
    return self

  def __exit__(self, *error: object) -> None:
    pass

  def requested(self) -> bool:
    return True


def steps(out: Path) -> list[dict[str, Any]]:
  return [row | {"seconds": None} for row in step_files.read(out / "steps.jsonl")]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(files, monkeypatch):
  whole = run(files)
  with monkeypatch.context() as patch:
    patch.setattr(training_run, "GracefulExit", StoppedAtOnce)
    with pytest.raises(training_run.Stopped):
      run(files, out="halves")
  halves = files / "halves"
  assert [row["step"] for row in steps(halves)] == [0]
  assert not (halves / "model").exists()
  run(files, out="halves")
  assert len(steps(whole)) == TINY.steps
  assert steps(whole) == steps(halves)
  names = [path.name for path in (whole / "model").iterdir()]
  assert {"config.json", "tokenizer.json"} <= set(names)
  weights = [(out / "model" / "model.safetensors").read_bytes() for out in (whole, halves)]
  assert weights[0] == weights[1]


def test_another_model_is_refused_with_the_difference(files):
  with pytest.raises(ValueError, match=r"another model.*\n.*hidden_size"):
    run(files, replace(TINY, published=TINY.published | {"hidden_size": 32}))


def test_a_prompt_longer_than_was_checked_is_refused(files):
  with pytest.raises(ValueError, match="prompts of 50 tokens, and one has"):
    run(files, replace(TINY, prompt_length=50))


@pytest.mark.slow
def test_tiles_of_logits_on_the_mesh_score_as_logits_in_memory():
  """The scorer of the runs, rows over four devices and the vocabulary over two."""
  model, params = policy.init(
    replace(setup.policy_config(TINY), compute_dtype=jnp.float32), jax.random.key(1)
  )
  train = setup.train_config(TINY, setup.make_mesh(TINY.machine))
  random = np.random.default_rng(0)
  prompts, tokens = (jnp.asarray(random.integers(1, 20, (8, n))) for n in (5, 6))
  responses = prompts, jnp.ones(prompts.shape, bool), tokens, jnp.ones(tokens.shape, bool)
  got = jax.jit(train.update.score, static_argnums=0)(model, params, *responses)
  expected = scoring.response_scores(model, params, *responses)
  np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
