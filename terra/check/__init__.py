"""The command `terra check`: whether a tokenizer and a world model are intact, match the published ones, and fit."""
