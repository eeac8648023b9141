"""Checkpoints: a folder of Hugging Face, or a model file of llama2.c.

`load` gives a model, its parameters and its tokenizer; `save` writes a folder that `load`,
transformers and others read:

  model, params, tokenizer = load("SmolLM2-135M")
  output = model.apply(params, jnp.array([tokenizer.encode("Once upon a time")]))
  save("mine", model, params, tokenizer=tokenizer)
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_lm import checks
from jaxrl_lm.lm import checkpoint_files, llama2c
from jaxrl_lm.lm.config import PolicyConfig
from jaxrl_lm.lm.huggingface_config import read_config, write_config
from jaxrl_lm.lm.partition import param_specs
from jaxrl_lm.lm.policy import Model
from jaxrl_lm.lm.text import TOKENIZER, HuggingFaceTokenizer, Tokenizer
from jaxrl_lm.lm.weights import named_tensors, read_params

GENERATION = "generation_config.json"


class Pretrained(NamedTuple):
  """A policy from a checkpoint.

  Attributes:
    model: static.
    params: pytree of arrays.
    tokenizer: None where the checkpoint comes without one.
  """

  model: Model
  params: Any
  tokenizer: Tokenizer | None


def load(path: str | Path, *, mesh: Mesh | None = None, **overrides: Any) -> Pretrained:
  """Loads a checkpoint. Nothing is ever unpickled, and no code of the checkpoint is run.

  Files are mapped and read tensor by tensor: on the host there is one copy, plus one parameter.
  Everything is computed in float32 unless an override says otherwise, whatever the file holds.

  Args:
    path: a folder with config.json, safetensors (one, or shards with an index) and, where there
      is one, tokenizer.json; or a model file of llama2.c (.bin) with tokenizer.bin or
      tok<vocabulary>.bin beside it.
    mesh: with axes "fsdp" and "tensor": every parameter goes where `param_specs` says. None = the
      default device.
    **overrides: fields of `PolicyConfig`: param_dtype=jnp.bfloat16, scan_layers=True,
      scalar_head=True (0 where the checkpoint has none), ...

  Returns:
    Model, parameters and tokenizer.

  Raises:
    FileNotFoundError: there is no checkpoint, or a part is missing.
    ValueError: a file is damaged, the configuration is unsupported, tensors and configuration
      disagree, or the tokenizer has more ids than the model.
    TypeError: an override is no field of `PolicyConfig`.
    ImportError: the folder needs a package of the extra `pretrained`.
  """
  path = Path(path)
  if path.is_dir():
    return _load_huggingface(path, mesh, overrides)
  if path.is_file() and path.suffix == ".bin":
    config, tensors = llama2c.read_model(path)
    config = dataclasses.replace(config, **overrides)
    tokenizer = _llama2c_tokenizer(path, config)
    place = _placement(config, mesh)
    return Pretrained(*read_params(config, tensors, source=str(path), place=place), tokenizer)
  if path.is_file():
    raise ValueError(f"{path} is neither a folder nor a model file of llama2.c (.bin)")
  raise FileNotFoundError(f"no checkpoint at {path}")


def _load_huggingface(folder: Path, mesh: Mesh | None, overrides: dict[str, Any]) -> Pretrained:
  if not (folder / "config.json").is_file():
    raise FileNotFoundError(f"{folder} has no config.json: it is not a checkpoint of Hugging Face")
  raw = checkpoint_files.read_json(folder / "config.json")
  try:
    config = read_config(raw)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  config = dataclasses.replace(config, **overrides)
  tokenizer = _huggingface_tokenizer(folder, raw, config)
  with checkpoint_files.open_tensors(folder) as tensors:
    place = _placement(config, mesh)
    return Pretrained(*read_params(config, tensors, source=str(folder), place=place), tokenizer)


def _placement(config: PolicyConfig, mesh: Mesh | None) -> Any:
  if mesh is None:
    return None
  leaves, _ = jax.tree_util.tree_flatten_with_path(param_specs(config))
  specs = dict(leaves)

  def place(host: np.ndarray, path: tuple[Any, ...]) -> jax.Array:
    return jax.device_put(host, NamedSharding(mesh, specs[path]))

  return place


def _huggingface_tokenizer(
  folder: Path, raw: dict[str, Any], config: PolicyConfig
) -> HuggingFaceTokenizer | None:
  if not (folder / TOKENIZER).is_file():
    return None
  places = dict.fromkeys(raw, "config.json")
  if (folder / GENERATION).is_file():
    generation = checkpoint_files.read_json(folder / GENERATION)
    raw, places = raw | generation, places | dict.fromkeys(generation, GENERATION)

  def ids(key: str) -> tuple[int, ...]:
    value = raw.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    try:
      return tuple(checks.check_whole(key, x, low=0, high=config.vocab_size - 1) for x in values)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{folder / places[key]}: {error}") from error

  bos = ids("bos_token_id")
  if len(bos) > 1:
    raise ValueError(f"{folder / places['bos_token_id']}: bos_token_id must be one id, got {bos}")
  tokenizer = HuggingFaceTokenizer(folder / TOKENIZER, bos[0] if bos else None, ids("eos_token_id"))
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"{folder}: {TOKENIZER} has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary "
      f"has {config.vocab_size}"
    )
  return tokenizer


def _llama2c_tokenizer(path: Path, config: PolicyConfig) -> llama2c.Llama2cTokenizer | None:
  for name in (f"tok{config.vocab_size}.bin", "tokenizer.bin"):
    if (path.parent / name).is_file():
      return llama2c.Llama2cTokenizer(path.parent / name, config.vocab_size)
  return None


def save(
  path: str | Path,
  model: Model,
  params: Any,
  *,
  tokenizer: Tokenizer | None = None,
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Saves a policy as a folder of Hugging Face, in the parameters' dtype.

  `load` gives the same numbers, bit by bit. A model with interleaved rotary pairs is written with
  half-split ones, which Hugging Face has: the same function up to rounding. A scalar head is
  written as `score.weight`.

  Args:
    path: folder to make; it may exist if it is empty.
    model, params: what to save. Sharded parameters are gathered one by one.
    tokenizer: its bos and eos ids go into config.json, and itself into tokenizer.json if it came
      from one. None = neither.
    max_shard_bytes: a file ends before it would be larger.

  Returns:
    None.

  Raises:
    FileExistsError: the folder is not empty.
    ValueError: no architecture of Hugging Face is this policy, or the parameters are not the
      model's.
  """
  settings = write_config(model.config)
  if tokenizer is not None:
    settings |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
  tensors = named_tensors(model, params)
  checks.check_whole("max_shard_bytes", max_shard_bytes, low=1)
  path = Path(path)
  path.mkdir(parents=True, exist_ok=True)
  if any(path.iterdir()):
    raise FileExistsError(f"{path} is not empty")
  checkpoint_files.write_tensors(path, tensors, max_shard_bytes=max_shard_bytes)
  if isinstance(tokenizer, HuggingFaceTokenizer):
    tokenizer.save(path)
  (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
