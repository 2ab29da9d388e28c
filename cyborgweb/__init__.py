"""The house around the rooms: settings, URLs, servers, the one-command supervisor, local identity."""
