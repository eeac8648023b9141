"""GRPO on GSM8K with a model of half a billion parameters: settings, memory, the run."""
