"""How good a world model is on held-out driving: `terra-evaluate`, drawn in `terra.evaluation.evaluate`."""
