"""Evaluation of a tokenizer and a world model on held-out driving: the command `terra evaluate`."""
