"""Training: recorded driving to tokenizer weights, to token files, to world-model weights.

The trainers are imported by module (`terra.training.tokenizer`, `terra.training.world_model`), so that the processes
which decode video import neither model.
"""
