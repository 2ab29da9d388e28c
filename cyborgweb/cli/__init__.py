"""The `cyborg` command line for operators. It works over `/api/` of a local or remote server and imports no Django."""
