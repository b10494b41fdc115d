"""Train the network of the controller: many simple nodes at once, and PPO."""
