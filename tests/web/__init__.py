"""Tests of the house: servers, commands, configuration."""
