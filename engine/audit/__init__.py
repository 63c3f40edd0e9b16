"""The audit of a run's memory: weights against their host bytes, everything else against a resident, eager shadow."""
