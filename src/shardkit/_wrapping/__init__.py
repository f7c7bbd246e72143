"""Which modules become groups: policies, the plan of them, strategies by name."""
