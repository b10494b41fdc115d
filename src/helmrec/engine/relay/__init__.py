"""The relay: computes prefixes ahead of their requests on early signals, and holds them under leases."""
