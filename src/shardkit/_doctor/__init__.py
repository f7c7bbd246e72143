"""``python -m shardkit doctor`` finds problems of a machine, or of a group of ranks.

`facts` collects facts from the machine and torch. `rules` turns facts into findings, as pure
functions. `command` has the steps in which ranks act together, and prints the result.
"""
