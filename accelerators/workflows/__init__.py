"""Operations of several steps, stored step by step, so that another process can continue them after a crash."""
