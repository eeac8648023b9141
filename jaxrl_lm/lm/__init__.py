"""The systems side: a policy to load, to score with and to sample from."""

from jaxrl_lm.lm.decoding import Samples
from jaxrl_lm.lm.partition import param_specs
from jaxrl_lm.lm.policy import Cache, Model, Output, PolicyConfig, abstract_params, init
from jaxrl_lm.lm.pretrained import Pretrained, load, save
from jaxrl_lm.lm.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from jaxrl_lm.lm.sampling import pad_prompts, sample, stream
from jaxrl_lm.lm.scoring import response_logprobs
from jaxrl_lm.lm.text import Tokenizer

__all__ = [
  "Cache",
  "LinearScaling",
  "Llama3Scaling",
  "Model",
  "Output",
  "PolicyConfig",
  "Pretrained",
  "Rope",
  "Samples",
  "Tokenizer",
  "YarnScaling",
  "abstract_params",
  "init",
  "load",
  "pad_prompts",
  "param_specs",
  "response_logprobs",
  "sample",
  "save",
  "stream",
]
