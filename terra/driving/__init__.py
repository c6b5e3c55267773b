"""How a car moves: a bicycle model that turns steering and speed into trajectories."""
