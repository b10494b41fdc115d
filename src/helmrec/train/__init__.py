"""Training of the base policy on simulated nodes; needs the extra `train`. Serving never imports this."""
