"""Run as `python -m experiments.length_bias_trained`."""

from configs.length_bias_trained import CONFIGS
from experiments.harness import compilation_cache, run
from experiments.length_bias_trained import main

compilation_cache.switch_on()
run.cli(main, CONFIGS)
