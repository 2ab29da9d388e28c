"""Console pages that combine several packages."""
