"""Rules and data types without input or output: no database, no network, no clock."""
