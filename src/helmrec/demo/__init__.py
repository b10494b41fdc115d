"""The demonstration: a small model on a real server, under the best constant split and under the policy."""
