"""Users' events, kept by the node so that clients send only what is new."""
