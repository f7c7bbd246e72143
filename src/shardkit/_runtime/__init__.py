"""Execution of the schedules' decisions: gathers, reductions and the hooks of autograd."""
