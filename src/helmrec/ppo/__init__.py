"""A network trained by PPO as the base of the controller: what it sees, and how it chooses."""
