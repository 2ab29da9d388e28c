"""Server, console and command line, with settings, URLs, supervisor, login, policy, pages, live updates, notifications."""
