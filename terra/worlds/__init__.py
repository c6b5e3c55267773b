"""Worlds in one file: a tokenizer, its world model, an estimator, contexts and a card as an archive, and back.

archive.py    what `terra pack` and `terra unpack` do
places.py     where worlds and archives are
settings.py   the settings of both commands
rounding.py   weights in 8 bits
"""
