"""Mutation testing of the core: `make mutants`. Faults are planted at random, one at a time; the tests must notice."""
