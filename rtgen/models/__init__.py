"""Networks: the causal denoiser and its parts."""
