"""What an instance runs on: its device, its memory, and how the C library deals with it."""
