"""What the experiments share: resumable runs, expectations, figures, a shared-parameter policy."""
