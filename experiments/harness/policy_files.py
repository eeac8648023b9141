"""A policy as a folder that `lm.load`, `experiments.generate` and Hugging Face read, tokenizer too.

Characters become byte-pair encoding without a merge. The tokenizer of llama2.c becomes one whose
merges are ranked by the scores of what they make; where two merges of one score compete it takes
the one of lower rank, and not the one further left, which no text that we tried has shown.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jaxrl_lm.lm import pretrained
from jaxrl_lm.lm.characters import Characters
from jaxrl_lm.lm.llama2c import Llama2cTokenizer
from jaxrl_lm.lm.pretrained import Pretrained
from jaxrl_lm.lm.text import TOKENIZER


def save(path: Path, policy: Pretrained) -> None:
  """Saves a policy as a folder of Hugging Face: whole, or not there. One that is there is replaced.

  Args:
    path: of the folder.
    policy: model, parameters, and a tokenizer of any kind, or None.
  """
  unfinished = path.with_name(f".{path.name}.tmp")
  shutil.rmtree(unfinished, ignore_errors=True)
  pretrained.save(unfinished, policy.model, policy.params, tokenizer=policy.tokenizer)
  if (content := tokenizer_file(policy.tokenizer)) is not None:
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (unfinished / TOKENIZER).write_text(text)
  shutil.rmtree(path, ignore_errors=True)
  unfinished.rename(path)


def tokenizer_file(tokenizer: Any) -> dict[str, Any] | None:
  """The content of tokenizer.json, for the tokenizers that come without one; else None."""
  if isinstance(tokenizer, Characters):
    return _characters(tokenizer)
  return _llama2c(tokenizer) if isinstance(tokenizer, Llama2cTokenizer) else None


def _file(model: dict[str, Any], specials: list[str], **parts: Any) -> dict[str, Any]:
  vocab = model["vocab"]
  added = [
    {"id": vocab[token], "content": token, "special": True}
    | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in specials
  ]
  names = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
  return {"version": "1.0", "added_tokens": added, **dict.fromkeys(names), "model": model} | parts


def _bpe(vocab: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
  return {"type": "BPE", "vocab": vocab, "merges": merges, **settings}


def _characters(tokenizer: Characters) -> dict[str, Any]:
  vocab = {"<end>": 0} | {x: i for i, x in enumerate(tokenizer.alphabet, 1)}
  return _file(_bpe(vocab, []), ["<end>"], decoder={"type": "Fuse"})


def _llama2c(tokenizer: Llama2cTokenizer) -> dict[str, Any]:
  pieces, scores = tokenizer.pieces, tokenizer.scores
  names = [piece.decode() for piece in pieces]
  names[1:3] = ["<s>", "</s>"]
  ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
  pairs = [
    (piece[:at], piece[at:])
    for piece in pieces
    for at in range(1, len(piece))
    if piece[:at] in ids and piece[at:] in ids
  ]
  pairs.sort(key=lambda pair: -scores[ids[pair[0] + pair[1]]])
  merges = [[left.decode(), right.decode()] for left, right in pairs]
  model = _bpe({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>")
  begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
  text = {"Sequence": {"id": "A", "type_id": 0}}
  return _file(
    model | {"fuse_unk": True, "byte_fallback": True},
    ["<unk>", "<s>", "</s>"],
    normalizer={"type": "Prepend", "prepend": " "},
    post_processor={
      "type": "TemplateProcessing",
      "single": [begin, text],
      "pair": [begin, text, begin, text],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    decoder={
      "type": "Sequence",
      "decoders": [
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
      ],
    },
  )
