"""A car's kinematics: a bicycle model that turns steering and speed into trajectories."""
