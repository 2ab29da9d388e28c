"""Operations of several steps that survive the end of the process that runs them."""
