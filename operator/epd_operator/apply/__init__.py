"""Children as they are, children as they are wanted, and what to do about the difference."""
