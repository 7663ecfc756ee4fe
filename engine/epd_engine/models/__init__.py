"""Model families: what differs between them, and nothing else."""
