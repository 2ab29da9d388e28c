"""Code that tests share: the database, guards around every test, fake services, a simulated host, reports."""
