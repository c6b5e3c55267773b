"""Training: recordings become tokenizer weights, then token files, then world-model weights.

This package imports nothing; import the trainers by module (`terra.training.tokenizer`, `terra.training.world_model`),
so that the processes that decode video load neither model.
"""
