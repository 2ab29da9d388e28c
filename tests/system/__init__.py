"""The whole product as its own processes: started, used, killed in parts. `make test-system`."""
