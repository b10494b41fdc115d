"""The demonstration: one small model, a real server, traffic that changes, the best constant split and then ours."""
