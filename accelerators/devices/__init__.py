"""What operators decide about devices: their life cycle, partitioning and admission rules."""
