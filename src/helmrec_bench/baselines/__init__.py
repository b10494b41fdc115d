"""What the controller and the router are compared with, and the one way all of it is tuned."""
