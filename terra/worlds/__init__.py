"""Worlds in one file: a tokenizer, its world model, an estimator, contexts and a card as an archive, and back.

archive.py    what `terra pack` and `terra unpack` do
rounding.py   weights in 8 bits
"""
