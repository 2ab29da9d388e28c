"""The gateway: the controller's side of the WebSocket connections from agents."""
