"""Server, console and command line: settings, URLs, supervisor, login, policy, pages, live updates, notifications."""
