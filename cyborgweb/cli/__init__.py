"""The `cyborg` command: what an operator does at a shell, over `/api/`. Free of Django; talks to a server anywhere."""
