"""The manual: what `docs/` says, as pages under `/help/` and as files that need no server (`make manual`)."""
