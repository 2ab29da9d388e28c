"""Mutation testing of the core: `make mutants` plants random faults one at a time, and checks that tests fail."""
