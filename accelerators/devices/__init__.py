"""Decisions of operators about devices: life cycle, partitioning and admission rules."""
