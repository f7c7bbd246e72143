"""The choice of modules that become groups: policies, plans, strategies by name."""
