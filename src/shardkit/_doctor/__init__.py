"""``python -m shardkit doctor``: what is wrong with a machine, or with a group of ranks.

`facts` is what the machine and torch say. `rules` turn facts into findings, purely. `command` has
the steps in which ranks do it together, asks the network between them, and prints.
"""
