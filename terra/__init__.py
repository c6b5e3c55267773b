"""Terra: autoregressive world-model video generation."""
