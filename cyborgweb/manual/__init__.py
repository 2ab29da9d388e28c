"""The manual: the pages in `docs/`, served below `/help/` and written as files that need no server (`make manual`)."""
