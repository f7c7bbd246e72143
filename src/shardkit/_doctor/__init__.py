"""``python -m shardkit doctor``: what is wrong with a machine, or with a group of ranks.

`machine` asks the machine and torch; `facts` is what they say. `rules` turn facts into findings,
purely. `session` is the order in which ranks do it, and asks the network between them.
"""
