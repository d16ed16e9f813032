"""Few-step flow-matching sampling and the per-session stream."""
