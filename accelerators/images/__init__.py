"""Images with firmware and bitstreams: stored copies and downloads."""
