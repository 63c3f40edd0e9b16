"""What to measure, what was measured, and what it means."""
