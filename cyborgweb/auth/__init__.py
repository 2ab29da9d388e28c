"""Authentication, the roles of the console, the policy of both APIs, and the read-only switch."""
