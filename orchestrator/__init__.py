"""Places runs on clear cards, watches them, and speaks to the person at the command line."""
