"""A policy network trained by PPO as the base of the controller: its inputs and its decisions."""
