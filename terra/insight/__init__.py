"""Analysis of the models: the world model's predictions and attention, the bits of tokens, and figures of both."""
