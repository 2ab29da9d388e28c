"""What monitoring asks for: `page` answers `/metrics`, `snapshot` looks around, `served` and `calls` count."""
