"""Carries out what the schedules decide: gathers, reductions and the hooks of autograd."""
