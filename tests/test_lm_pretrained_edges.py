"""Checkpoints that are wrong and would load: refused, with the file and the setting named."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_lm import lm
from jaxrl_lm.lm import huggingface_config, llama2c, pretrained
from tests.golden import checkpoints
from tests.golden.record_logits import SEED
from tests.test_lm_pretrained import (
  PIECES,
  assert_same,
  change_config,
  change_tensors,
  shard,
  write_llama2c,
  write_llama2c_tokenizer,
  write_tokenizer,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
  return checkpoints.write_checkpoint(tmp_path_factory.mktemp("good") / "folder", "llama2", SEED)


@pytest.fixture
def folder(good, tmp_path):
  return shutil.copytree(good, tmp_path / "folder")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"rms_norm_eps": -1}, r"rms_norm_eps must lie in \(0.0, inf\), got -1"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must lie in"),
    ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
    ({"rope_theta": -1}, "rope_theta must lie in"),
    ({"rope_theta": 0}, "rope_theta must lie in"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must lie in"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must lie in"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor must lie in"),
    ({"rope_scaling": LLAMA3}, "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    (
      {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e4}},
      "rope_parameters and rope_scaling contradict each other",
    ),
    ({"hidden_size": 16.7}, "hidden_size must be an integer, got 16.7"),
    ({"hidden_size": [16]}, r"hidden_size must be one number, got shape \(1,\)"),
    ({"num_attention_heads": 0}, "num_attention_heads must lie in"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must lie in"),
    ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ({"head_dim": 0}, "head_dim must lie in"),
    ({"head_dim": "4"}, "head_dim must be an integer, got '4'"),
    ({"model_type": "mistral", "sliding_window": 2.5}, "sliding_window must be an integer"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    ({"vocab_size": 10**12}, "vocab_size must lie in"),
  ],
)
def test_a_setting_that_is_none_names_file_and_setting(settings, message, folder):
  change_config(folder, **settings)
  with pytest.raises(ValueError, match=rf"config\.json: .*{message}") as caught:
    lm.load(folder)
  assert str(caught.value).startswith(str(folder))


def test_both_spellings_of_the_rotation_may_say_the_same():
  raw = checkpoints.CASES["llama2"] | {"rope_theta": 5e4}
  both = {"rope_scaling": {"type": "linear", "factor": 2}}
  both |= {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}
  assert huggingface_config.read_config(raw | both).rope == lm.Rope(5e4, lm.LinearScaling(2.0))


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"num_hidden_layers": 10**7}, r"has 10000000 layers \(num_hidden_layers\), the .* have 2"),
    ({"num_hidden_layers": 1}, "has 1 layers .* have 2"),
    ({"vocab_size": 2**31 - 1}, r"shape \(32, 16\), the configuration asks for \(2147483647, 16\)"),
    (
      {"intermediate_size": 2**30},
      r"shape \(16, 24\), the configuration asks for \(16, 1073741824",
    ),
  ],
)
@pytest.mark.parametrize("scan", [False, True])
def test_sizes_are_compared_before_memory_is_taken(settings, message, scan, folder):
  change_config(folder, **settings)
  with pytest.raises(ValueError, match=message):
    lm.load(folder, scan_layers=scan)


def test_json_that_is_too_deep(folder):
  (folder / "config.json").write_text("[" * 200_000)
  with pytest.raises(ValueError, match=r"config\.json is not JSON"):
    lm.load(folder)


# Tensors and shards.


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_, np.uint8])
def test_weights_that_are_not_floats_are_refused(dtype, folder):
  name = "model.layers.1.mlp.up_proj.weight"
  change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
  with pytest.raises(ValueError, match=rf"{name} is {np.dtype(dtype)}: weights must be floats"):
    lm.load(folder)


def test_a_tensor_of_no_axes(folder):
  name = "model.norm.weight"
  change_tensors(folder, lambda tensors: tensors.update({name: np.zeros(())}))
  with pytest.raises(
    ValueError, match=rf"{name} has shape \(\), the configuration asks for \(16,\)"
  ):
    lm.load(folder)


def test_a_scalar_head_says_how_to_load_it(folder):
  change_tensors(folder, lambda tensors: tensors.update({"score.weight": np.ones((1, 16))}))
  with pytest.raises(ValueError, match=r"score\.weight \(load with scalar_head=True\)"):
    lm.load(folder)


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(good, folder):
  _, index = shard(folder)
  name = min(index)
  assert index[name] == "a.safetensors"
  other = load_file(folder / "b.safetensors")
  save_file(
    other | {name: np.full_like(load_file(folder / "a.safetensors")[name], 5)},
    folder / "b.safetensors",
  )
  assert_same(lm.load(folder).params, lm.load(good).params)


@pytest.mark.parametrize(
  "place", ["../outside.safetensors", "/outside.safetensors", "..", ".", "", "a\0b", 5, None, ["a"]]
)
def test_an_index_leads_nowhere_else(place, folder):
  path, index = shard(folder)
  shutil.copy(folder / "a.safetensors", folder.parent / "outside.safetensors")
  index = {name: place if file == "a.safetensors" else file for name, file in index.items()}
  path.write_text(json.dumps({"weight_map": index}))
  with pytest.raises(ValueError, match=r"index\.json: \S+ must be in a file of the folder, not"):
    lm.load(folder)


def test_a_failed_save_leaves_no_folder(good, tmp_path):
  model, params, _ = lm.load(good)
  with pytest.raises(ValueError, match="structure and shapes"):
    lm.save(tmp_path / "new", model, params | {"norm": {"scale": np.ones(3)}})
  assert not (tmp_path / "new").exists()


# Tokenizers.


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("2", "must be an integer, got '2'"),
    ([2, None], "must be an integer, got None"),
    ({"a": 1}, "must be an integer, got {'a': 1}"),
    (2.0, "must be an integer, got 2.0"),
    (True, "must be an integer, got True"),
    (99, r"must lie in \[0, 31\], got 99"),
    (-1, r"must lie in \[0, 31\], got -1"),
  ],
)
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("file", ["config.json", pretrained.GENERATION])
def test_special_ids_are_ids(key, value, message, file, folder):
  write_tokenizer(folder)
  raw = json.loads((folder / "config.json").read_text()) if file == "config.json" else {}
  (folder / file).write_text(json.dumps(raw | {key: value}))
  with pytest.raises(ValueError, match=rf"{file}: {key} {message}"):
    lm.load(folder)


def test_what_a_file_cuts_and_pads_to_is_not_obeyed(folder):
  from tokenizers import Tokenizer

  write_tokenizer(folder)
  stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
  stored.enable_truncation(2)
  stored.enable_padding(length=9, pad_id=1, pad_token="</s>")
  stored.save(str(folder / "tokenizer.json"))
  assert lm.load(folder).tokenizer.encode("the cat the") == [0, 3, 4, 3]


def test_an_empty_vocabulary(folder):
  from tokenizers import Tokenizer, models

  Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
  with pytest.raises(ValueError, match=r"tokenizer\.json has no tokens"):
    lm.load(folder)


@pytest.fixture(scope="module", params=["huggingface", "llama2c"])
def tokenizer(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer")
  if request.param == "huggingface":
    write_tokenizer(folder)
    return pretrained.HuggingFaceTokenizer(folder / "tokenizer.json", 0, (1,))
  count = write_llama2c_tokenizer(folder / "tokenizer.bin")
  return llama2c.Llama2cTokenizer(folder / "tokenizer.bin", count)


def test_ids_that_a_tokenizer_lacks_are_no_text(tokenizer):
  for unknown in (-1, tokenizer.vocab_size):
    with pytest.raises(ValueError, match=rf"ids must lie in .*got \[{unknown}\]"):
      tokenizer.decode([0, unknown])
  with pytest.raises(TypeError):
    tokenizer.decode([0.5])


# llama2.c


@pytest.mark.parametrize(("heads", "shared"), [(4, 3), (16, 16)])
def test_head_counts_of_llama2c_name_the_file(heads, shared, tmp_path):
  path = tmp_path / "model.bin"
  write_llama2c(path)
  data = path.read_bytes()
  path.write_bytes(data[:12] + struct.pack("<2i", heads, shared) + data[20:])
  with pytest.raises(ValueError, match=r"model\.bin: its header is .*(multiple of|must be even)"):
    lm.load(path)


@pytest.mark.parametrize("missing", [" ", "<0x41>"])
def test_a_llama2c_tokenizer_without_its_pieces(missing, tmp_path):
  path = tmp_path / "tokenizer.bin"
  count = write_llama2c_tokenizer(path)
  data = path.read_bytes()
  before = struct.pack("<i", len(missing)) + missing.encode()
  path.write_bytes(data.replace(before, before[:4] + b"?" * len(missing)))
  with pytest.raises(ValueError, match=r"tokenizer\.bin is no tokenizer of llama2\.c"):
    llama2c.Llama2cTokenizer(path, count)


def test_llama2c_merges_as_its_definition_says(tmp_path):
  """Against a search of the whole list for every merge, on random texts with many ties."""
  path = tmp_path / "tokenizer.bin"
  pieces = PIECES | {"aa": -1.0, "ca": -1.0, "abca": -0.5, "bca": -0.5, "aaa": -2.0}
  tokenizer = llama2c.Llama2cTokenizer(path, write_llama2c_tokenizer(path, pieces))
  names = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), *pieces]

  def merged(parts):
    while True:
      pairs = [(pieces.get(a + b, -np.inf), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
      score, i = max(pairs, key=lambda pair: (pair[0], -pair[1]), default=(-np.inf, 0))
      if score == -np.inf:
        return parts
      parts[i : i + 2] = [parts[i] + parts[i + 1]]

  rng = np.random.default_rng(0)
  for length in (1, 2, 5, 40, 40, 40):
    text = "".join(rng.choice(list("abc "), length))
    assert [names[i] for i in tokenizer.encode(text)[1:]] == merged([" ", *text])
