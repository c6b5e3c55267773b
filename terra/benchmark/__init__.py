"""Measures the speed of the engines side by side in one run, for `terra benchmark`."""
