"""Checkpoints: the numbers of transformers and of llama2.c, and an error for what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file, save_file

import jaxrl_lm as rl
from experiments.harness.run import data_path
from jaxrl_lm import lm
from jaxrl_lm.lm import huggingface_config, llama2c
from tests.golden import checkpoints
from tests.golden.record_logits import LOGITS, SEED, transformers_logits


@functools.partial(
  jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def logits_of(model, params, tokens):
  return model.logits(params, model.apply(params, tokens).hidden)


@pytest.fixture(scope="module")
def golden():
  """Recorded logits [2, 24, V] by case."""
  with np.load(LOGITS) as recorded:
    return dict(recorded)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """A checkpoint of every case."""
  scratch = tmp_path_factory.mktemp("checkpoints")
  return {
    name: checkpoints.write_checkpoint(scratch / name, name, SEED) for name in checkpoints.CASES
  }


# llama2 is read as a checkpoint of llama2.c below.
FIRST = ("llama3", "qwen2_yarn", "qwen3_window", "mistral")


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=() if x in FIRST else pytest.mark.slow) for x in checkpoints.CASES],
)
def test_logits_are_those_that_transformers_gave(name, folders, golden):
  model, params, _ = lm.load(folders[name])
  logits = logits_of(model, params, checkpoints.tokens(SEED))
  np.testing.assert_allclose(logits, golden[name], rtol=0, atol=1e-4)  # measured: 1.5e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", checkpoints.CASES)
def test_logits_are_those_of_transformers_here_and_after_saving(name, tmp_path):
  for package in ("torch", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed: nothing to compare with")
  folder = checkpoints.write_checkpoint(tmp_path / "theirs", name, seed=5)
  tokens = checkpoints.tokens(5)
  expected = transformers_logits(folder, tokens)
  model, params, _ = lm.load(folder)
  np.testing.assert_allclose(logits_of(model, params, tokens), expected, rtol=0, atol=1e-4)
  lm.save(tmp_path / "ours", model, params)
  assert np.array_equal(transformers_logits(tmp_path / "ours", tokens), expected)


# What each case is about, taken away or changed.
WITHOUT = {
  "llama3": {"rope": lm.Rope(500_000.0)},
  "llama_biased": {"rope": lm.Rope(1000.0)},
  "qwen2": {"rope": lm.Rope()},
  "qwen2_yarn": {"rope": lm.Rope(1_000_000.0, lm.YarnScaling(4.0, 16))},  # no magnitude
  "qwen3_window": {"sliding_window": 6},
  "mistral": {"sliding_window": None},
  "llama2": {"norm_eps": 1e-2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT)
def test_the_golden_logits_see_every_setting(name, folders, golden):
  model, params, _ = lm.load(folders[name], **WITHOUT[name])
  logits = logits_of(model, params, checkpoints.tokens(SEED))
  assert np.abs(logits - golden[name]).max() > 1e-2


def assert_same(params, others):
  assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), params, others))
  assert jax.tree.leaves(params)[0].dtype == jax.tree.leaves(others)[0].dtype


@pytest.mark.parametrize("name", checkpoints.CASES)
def test_a_configuration_survives_being_written(name):
  config = huggingface_config.read_config(checkpoints.CASES[name])
  written = json.loads(json.dumps(huggingface_config.write_config(config)))
  assert huggingface_config.read_config(written) == config
  assert written["model_type"] == checkpoints.CASES[name]["model_type"]


@pytest.mark.parametrize(
  ("name", "scan", "max_shard_bytes"),
  [("qwen2", False, 1 << 30), ("llama_biased", True, 5000), ("qwen3", False, 5000)],
)
def test_what_is_saved_is_loaded_bit_by_bit(name, scan, max_shard_bytes, folders, tmp_path):
  first = lm.load(folders[name], scan_layers=scan)
  lm.save(tmp_path / "saved", first.model, first.params, max_shard_bytes=max_shard_bytes)
  files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
  assert (files == ["model.safetensors"]) == (max_shard_bytes > 5000)
  again = lm.load(tmp_path / "saved", scan_layers=scan)
  assert again.model == first.model
  assert_same(first.params, again.params)

  stored = {}
  for file in files:
    stored |= load_file(tmp_path / "saved" / file)
  original = load_file(folders[name] / "model.safetensors")
  assert stored.keys() == original.keys()
  assert all(np.array_equal(stored[key], original[key]) for key in original)


def test_bfloat16_is_read_and_saved(folders, tmp_path):
  model, params, _ = lm.load(folders["qwen2"], param_dtype=jnp.bfloat16)
  exact = lm.load(folders["qwen2"]).params
  assert_same(params, jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), exact))
  lm.save(tmp_path / "saved", model, params)
  assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert_same(lm.load(tmp_path / "saved", param_dtype=jnp.bfloat16).params, params)
  wide = lm.load(tmp_path / "saved").params
  assert_same(wide, jax.tree.map(lambda x: np.asarray(x).astype(np.float32), params))


def test_a_scalar_head_begins_at_zero_and_is_kept(folders, tmp_path):
  model, params, _ = lm.load(folders["qwen3"], scalar_head=True)
  assert np.all(params["value_head"] == 0)
  params = params | {"value_head": jnp.arange(16.0)}
  lm.save(tmp_path / "critic", model, params)
  assert_same(lm.load(tmp_path / "critic", scalar_head=True).params, params)
  with pytest.raises(ValueError, match=r"does not have: score\.weight"):
    lm.load(tmp_path / "critic")


def test_parameters_go_where_the_mesh_says(folders):
  mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  _, params, _ = lm.load(folders["llama2"], mesh=mesh)
  assert params["embedding"].sharding.spec == PartitionSpec("tensor", "fsdp")
  assert params["embedding"].addressable_shards[0].data.shape == (8, 8)
  assert_same(jax.device_get(params), lm.load(folders["llama2"]).params)


# Hugging Face: what is wrong with a folder, by the function that breaks a good one.


def change_config(folder, **settings):
  path = folder / "config.json"
  raw = json.loads(path.read_text()) | settings
  path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def change_tensors(folder, change):
  path = folder / "model.safetensors"
  tensors = {key: value.copy() for key, value in load_file(path).items()}
  change(tensors)
  save_file(tensors, path)


def shard(folder):
  """Two shards and an index; returns the index."""
  tensors = load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names = sorted(tensors)
  index = {}
  for file, part in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
    save_file({name: tensors[name] for name in part}, folder / file)
    index |= dict.fromkeys(part, file)
  path = folder / "model.safetensors.index.json"
  path.write_text(json.dumps({"weight_map": index}))
  return path, index


def lose_a_shard(folder):
  shard(folder)
  (folder / "b.safetensors").unlink()


def misplace_a_tensor(folder):
  path, index = shard(folder)
  index["model.norm.weight"] = "a.safetensors"
  path.write_text(json.dumps({"weight_map": index}))


def forget_a_tensor_in_the_index(folder):
  path, index = shard(folder)
  del index["model.norm.weight"]
  path.write_text(json.dumps({"weight_map": index}))


def truncate(folder, name="model.safetensors"):
  data = (folder / name).read_bytes()
  (folder / name).write_bytes(data[: len(data) // 2])


def only_pickled(folder):
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def wrong_shape(tensors):
  tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def head_beside_a_tied_embedding(folder):
  change_config(folder, tie_word_embeddings=True)


YARN = {"rope_type": "yarn", "factor": 2.0}
BROKEN = {
  "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
  "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
  "only pickled": (only_pickled, "pytorch_model.bin is not read: unpickling runs code"),
  "truncated": (truncate, r"model\.safetensors is damaged or truncated"),
  "config truncated": (lambda f: truncate(f, "config.json"), r"config\.json is not JSON"),
  "config a list": (lambda f: (f / "config.json").write_text("[]"), "must hold an object"),
  "lost shard": (lose_a_shard, r"shard b\.safetensors of .*index\.json is missing"),
  "misplaced": (misplace_a_tensor, r"a\.safetensors has no tensor model\.norm\.weight"),
  "not in the index": (forget_a_tensor_in_the_index, r"model\.norm\.weight is in a shard, but not"),
  "missing tensor": (
    lambda f: change_tensors(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
    r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight",
  ),
  "extra tensor": (
    lambda f: change_tensors(f, lambda t: t.update({"model.layers.0.extra": np.zeros(1)})),
    r"the configuration does not have: model\.layers\.0\.extra",
  ),
  "extra layers": (lambda f: change_config(f, num_hidden_layers=1), "has 1 layers .* have 2"),
  "wrong shape": (
    lambda f: change_tensors(f, wrong_shape),
    r"model\.norm\.weight has shape \(15,\), the configuration asks for \(16,\)",
  ),
  "vocabulary": (
    lambda f: change_config(f, vocab_size=33),
    r"embed_tokens\.weight has shape \(32, 16\), the configuration asks for \(33, 16\)",
  ),
  "tied with another head": (head_beside_a_tied_embedding, r"lm_head\.weight differs from"),
  "no head": (
    lambda f: change_tensors(f, lambda t: t.pop("lm_head.weight")),
    r"there is no lm_head\.weight, but the configuration does not tie",
  ),
  "architecture": (
    lambda f: change_config(f, model_type="gpt2"),
    "model_type 'gpt2' is not supported; it must be one of llama, mistral, qwen2, qwen3",
  ),
  "no architecture": (lambda f: change_config(f, model_type="absent"), "model_type None"),
  "experts": (lambda f: change_config(f, model_type="qwen3_moe"), "'qwen3_moe' is not supported"),
  "activation": (
    lambda f: change_config(f, hidden_act="gelu"),
    "hidden_act = 'gelu' is not supported, only 'silu'",
  ),
  "mlp bias": (lambda f: change_config(f, mlp_bias=True), "mlp_bias = True is not supported"),
  "partial rotary": (
    lambda f: change_config(f, partial_rotary_factor=0.5),
    "partial_rotary_factor = 0.5 is not supported",
  ),
  "partial rotary, new": (
    lambda f: change_config(f, rope_parameters={"partial_rotary_factor": 0.5}),
    "partial_rotary_factor = 0.5 is not supported",
  ),
  "softcap": (
    lambda f: change_config(f, final_logit_softcapping=30.0),
    "final_logit_softcapping = 30.0 is not supported",
  ),
  "quantised": (
    lambda f: change_config(f, quantization_config={"bits": 4}),
    "quantization_config = {'bits': 4} is not supported",
  ),
  "rope of layers": (
    lambda f: change_config(f, rope_parameters={"full_attention": {"rope_theta": 1.0}}),
    "one for each layer type",
  ),
  "dynamic rope": (
    lambda f: change_config(f, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "rope_type 'dynamic' is not supported; it must be default, linear, llama3 or yarn",
  ),
  "rope without factor": (
    lambda f: change_config(f, rope_scaling={"type": "linear"}),
    "rope_type 'linear' needs factor",
  ),
  "no size": (lambda f: change_config(f, vocab_size="absent"), "vocab_size is missing"),
  "no key heads": (
    lambda f: change_config(f, model_type="mistral", num_key_value_heads="absent"),
    "num_key_value_heads is missing",
  ),
  "mixed windows": (
    lambda f: change_config(f, model_type="qwen2", use_sliding_window=True, max_window_layers=1),
    "max_window_layers = 1 is not supported: layers with and without",
  ),
  "mixed windows, new": (
    lambda f: change_config(
      f,
      model_type="qwen3",
      use_sliding_window=True,
      layer_types=["full_attention", "sliding_attention"],
    ),
    "layer_types = .* is not supported: layers with and without",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_an_error_that_says_why(name, tmp_path):
  folder = checkpoints.write_checkpoint(tmp_path / "folder", "llama2", SEED)
  breaks, message = BROKEN[name]
  breaks(folder)
  with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
    lm.load(folder)
  assert str(folder) in str(caught.value)


def test_a_path_to_nothing_or_to_something_else(tmp_path):
  with pytest.raises(FileNotFoundError, match="no checkpoint at"):
    lm.load(tmp_path / "nothing")
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  with pytest.raises(ValueError, match="neither a folder nor a model file"):
    lm.load(tmp_path / "model.gguf")
  folder = checkpoints.write_checkpoint(tmp_path / "folder", "llama2", SEED)
  with pytest.raises(TypeError, match="scan_layer"):
    lm.load(folder, scan_layer=True)


def test_what_may_be_in_a_folder_without_being_read(tmp_path):
  """An equal head beside a tied embedding, and rotary tables of old checkpoints."""
  folder = checkpoints.write_checkpoint(tmp_path / "folder", "qwen2", SEED)

  def add(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2)

  expected = lm.load(folder).params
  change_tensors(folder, add)
  assert_same(lm.load(folder).params, expected)


def test_a_missing_package_says_how_to_get_it(monkeypatch, folders):
  monkeypatch.setitem(sys.modules, "safetensors", None)
  with pytest.raises(ImportError, match=r"pip install 'jaxrl_lm\[pretrained\]'"):
    lm.load(folders["llama2"])


def test_saving_over_something_or_what_nobody_else_has(folders, tmp_path):
  model, params, _ = lm.load(folders["llama2"])
  (tmp_path / "file").write_text("")
  with pytest.raises(FileExistsError, match="is not empty"):
    lm.save(tmp_path, model, params)
  with pytest.raises(ValueError, match="structure and shapes"):
    lm.save(tmp_path / "new", model, params | {"norm": {"scale": jnp.ones(3)}})
  odd = dataclasses.replace(model.config, output_bias=True)
  with pytest.raises(ValueError, match="no architecture .* qkv_bias = False, output_bias = True"):
    lm.save(tmp_path / "new", *lm.abstract_params(odd))


# The tokenizer of a folder.


def write_tokenizer(folder, words=("the", "cat")):
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

  vocabulary = {word: i for i, word in enumerate(("<s>", "</s>", "?", *words))}
  tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(["<s>", "</s>"])
  tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
  tokenizer.save(str(folder / "tokenizer.json"))


def test_a_folder_with_a_tokenizer(tmp_path):
  folder = checkpoints.write_checkpoint(tmp_path / "folder", "llama2", SEED)
  assert lm.load(folder).tokenizer is None
  write_tokenizer(folder)
  change_config(folder, bos_token_id=0, eos_token_id=7)
  model, params, tokenizer = lm.load(folder)
  assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (7,), 5)
  # What generation uses goes first.
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
  tokenizer = lm.load(folder).tokenizer
  assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1, 4))
  assert tokenizer.encode("the cat sat") == [0, 3, 4, 2]
  assert tokenizer.decode(np.array([0, 3, 4, 1])) == "thecat"

  lm.save(tmp_path / "saved", model, params, tokenizer=tokenizer)
  again = lm.load(tmp_path / "saved").tokenizer
  assert (again.bos_id, again.eos_ids) == (0, (1, 4))
  assert again.encode("cat the") == [0, 4, 3]


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path):
  folder = checkpoints.write_checkpoint(tmp_path / "folder", "llama2", SEED)
  write_tokenizer(folder, [f"word{i}" for i in range(30)])
  with pytest.raises(ValueError, match="has ids up to 32, the model's vocabulary has 32"):
    lm.load(folder)
  (folder / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
    lm.load(folder)


# llama2.c


def write_llama2c(path, name="llama2"):
  """A checkpoint of Hugging Face as llama2.c has it: rotary pairs adjacent, tables at the end."""
  case, tensors = checkpoints.CASES[name], checkpoints.tensors(checkpoints.CASES[name], SEED)
  heads, shared = case["num_attention_heads"], case["num_key_value_heads"]
  layers, hidden = case["num_hidden_layers"], case["hidden_size"]
  size = hidden // heads

  def pairs(weight):
    halves = weight.reshape(-1, 2, size // 2, hidden)
    return halves.swapaxes(1, 2).reshape(weight.shape)

  parts = [tensors["model.embed_tokens.weight"]]
  order = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
  order += "post_attention_layernorm mlp.gate_proj mlp.down_proj mlp.up_proj"
  for module in order.split():
    of_layers = [tensors[f"model.layers.{i}.{module}.weight"] for i in range(layers)]
    parts += map(pairs, of_layers) if module[-6:] in ("q_proj", "k_proj") else of_layers
  context = case["max_position_embeddings"]
  parts += [tensors["model.norm.weight"], np.zeros((2, context, size // 2))]
  parts += [tensors["lm_head.weight"]]
  width, vocabulary = case["intermediate_size"], case["vocab_size"]
  header = struct.pack("<7i", hidden, width, layers, heads, shared, -vocabulary, context)
  path.write_bytes(header + b"".join(x.astype("<f4").tobytes() for x in parts))


def test_llama2c_gives_the_same_logits_and_can_be_saved_for_others(golden, tmp_path):
  write_llama2c(tmp_path / "model.bin")
  model, params, tokenizer = lm.load(tmp_path / "model.bin")
  assert tokenizer is None
  tokens = checkpoints.tokens(SEED)
  np.testing.assert_allclose(logits_of(model, params, tokens), golden["llama2"], rtol=0, atol=1e-4)
  # Half-split pairs are the original tensors again.
  lm.save(tmp_path / "saved", model, params)
  stored = load_file(tmp_path / "saved" / "model.safetensors")
  original = checkpoints.tensors(checkpoints.CASES["llama2"], SEED)
  assert stored.keys() == original.keys()
  assert all(np.array_equal(stored[key], original[key]) for key in original)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda data: data[:20], "20 bytes are less than the header"),
    (lambda data: data[:-4], "truncated or of another format: .* bytes, its header says"),
    (lambda data: data + b"more", "truncated or of another format"),
    (lambda data: b"24ka" + data[4:], "only export version 0 is supported"),
    (lambda data: struct.pack("<i", 0) + data[4:], r"its header is \(0, 24, 2"),
  ],
)
def test_a_broken_llama2c_file_is_an_error(change, message, tmp_path):
  path = tmp_path / "model.bin"
  write_llama2c(path)
  path.write_bytes(change(path.read_bytes()))
  with pytest.raises(ValueError, match=message):
    lm.load(path)


PIECES = {"a": 0.0, "b": 0.0, "c": 0.0, " ": 0.0, "ab": -3.0, "bc": -1.0, "abc": -2.0, " a": -4.0}


def write_llama2c_tokenizer(path, pieces=PIECES):
  """<unk>, BOS, EOS and the 256 bytes come first, as in the tokenizers of Llama."""
  specials = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]
  data = struct.pack("<i", 7)
  for piece, score in (dict.fromkeys(specials, 0.0) | pieces).items():
    data += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
  path.write_bytes(data)
  return 259 + len(pieces)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.bin"
  return llama2c.Llama2cTokenizer(path, write_llama2c_tokenizer(path))


@pytest.mark.parametrize(
  ("text", "pieces"),
  [
    ("", []),
    ("abc", [" ", "abc"]),  # bc (-1) before ab (-3), then abc; " a" never
    ("ab", [" ", "ab"]),  # ab (-3) before " a" (-4)
    ("a", [" a"]),
    ("bcbc", [" ", "bc", "bc"]),
    ("cé", [" ", "c", "<0xC3>", "<0xA9>"]),
    ("a\nb", [" a", "<0x0A>", "b"]),
  ],
)
def test_llama2c_merges_by_score_and_falls_back_to_bytes(text, pieces, tokenizer):
  names = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
  ids = tokenizer.encode(text)
  assert [names[i] for i in ids] == ["\n<s>\n", *pieces]
  assert tokenizer.decode(ids) == text


def test_llama2c_says_its_pieces_and_their_scores(tokenizer):
  assert [piece.decode() for piece in tokenizer.pieces[259:]] == list(PIECES)
  assert tokenizer.scores[259:] == list(PIECES.values())
  assert len(tokenizer.pieces) == len(tokenizer.scores) == tokenizer.vocab_size


def test_llama2c_decodes_parts_of_a_text(tokenizer):
  a, space_a = 259, 266
  assert tokenizer.decode([space_a, space_a]) == "a a"
  assert tokenizer.decode([1, space_a, 1, space_a, 2]) == "aa"
  assert tokenizer.decode([a, 3 + 0xC3]) == "a\N{REPLACEMENT CHARACTER}"
  assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (1,))


def test_a_llama2c_tokenizer_of_another_vocabulary_or_truncated(tmp_path):
  path = tmp_path / "tokenizer.bin"
  count = write_llama2c_tokenizer(path)
  with pytest.raises(ValueError, match=f"has {count} pieces, the model a vocabulary of 512"):
    llama2c.Llama2cTokenizer(path, 512)
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match=f"truncated in piece {count - 1}"):
    llama2c.Llama2cTokenizer(path, count)


# A real model.


@pytest.fixture(scope="module")
def stories():
  path = data_path("stories260K")
  if path is None:
    pytest.skip("stories260K not found (set JAXRL_LM_DATA)")
  return lm.load(Path(path) / "stories260K.bin")


BEGINNING = (
  "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
)


def test_stories260k_scores_its_favourite_story(stories):
  model, params, tokenizer = stories
  assert sum(x.size for x in jax.tree.leaves(params)) == 260_032
  tokens = np.array([tokenizer.encode(BEGINNING)])
  assert tokens.shape == (1, 32)
  assert tokenizer.decode(tokens[0]) == BEGINNING
  mask = np.arange(32)[None] > 0
  logprobs = rl.next_token_logprobs(logits_of(model, params, tokens), tokens, mask=mask)
  np.testing.assert_allclose(rl.mean_logprob(logprobs, mask), -0.180, atol=5e-4)


@pytest.mark.slow
def test_stories260k_scores_sampled_stories_as_another_implementation_did(stories):
  """Real samples at temperature 1, with the log-probs of a float32 forward pass of their own."""
  recorded = np.load(data_path("stories260K_rollouts64.npz"))
  model, params, _ = stories
  tokens = recorded["tokens"][:16].astype(np.int32)
  mask = np.pad(recorded["mask"][:16], ((0, 0), (1, 0)))
  logprobs = rl.next_token_logprobs(logits_of(model, params, tokens), tokens, mask=mask)
  expected = np.where(mask[:, 1:], recorded["logp_f32"][:16], 0)
  np.testing.assert_allclose(logprobs[:, 1:], expected, rtol=0, atol=1e-4)  # measured: 2e-5
  np.testing.assert_allclose(rl.masked_mean(logprobs, mask), -1.28, atol=0.06)  # 4 standard errors


def test_stories260k_tells_its_favourite_story(stories):
  """Greedy decoding from BOS, one token at a time through the cache."""
  model, params, tokenizer = stories

  @jax.jit
  def greedy(params):
    def step(carry, _):
      token, cache = carry
      output = model.apply(params, token, cache=cache)
      token = jnp.argmax(model.logits(params, output.hidden), axis=-1)
      return (token, output.cache), token[0, 0]

    start = (jnp.array([[tokenizer.bos_id]]), model.init_cache(1, 64))
    return jax.lax.scan(step, start, length=46)[1]

  story = tokenizer.decode(greedy(params).tolist())
  assert story.startswith(BEGINNING + " One day, she saw a big, red ball.")
