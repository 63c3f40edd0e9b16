"""Commands of the engine's command line, one file each: `add` registers one, and its function returns the exit code."""
