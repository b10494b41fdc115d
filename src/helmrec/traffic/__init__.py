"""Traffic: workloads and what makes traces of them, traces in files and from published logs, and their requests."""
