"""Measures that several rooms share: frames, Fréchet distances, feature networks, flicker, bootstrap intervals."""
