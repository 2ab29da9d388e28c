"""Who may do what: authentication, roles, policy and the read-only switch."""
