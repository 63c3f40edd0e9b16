"""Weights under a budget: policies decide, the pager acts, the ledger audits."""
