"""Find accelerators, notice changes, report them, and sample their load."""
