"""The controller's end of the agents' connections."""
