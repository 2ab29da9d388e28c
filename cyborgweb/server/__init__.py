"""The processes of the controller: start and supervise them, TLS, backup and restore."""
