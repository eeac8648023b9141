"""One claim per file: `python -m experiments.<name>`."""
