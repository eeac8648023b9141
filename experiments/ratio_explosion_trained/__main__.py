"""Run as `python -m experiments.ratio_explosion_trained`."""

from configs.ratio_explosion_trained import CONFIGS
from experiments.harness import compilation_cache, run
from experiments.ratio_explosion_trained import main

compilation_cache.switch_on()
run.cli(main, CONFIGS)
