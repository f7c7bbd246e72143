"""``python -m shardkit doctor``: what is wrong with a machine, or with a group of ranks.

`machine` asks the machine, `links` the network, `collectives` torch; `facts` is what they say.
`rules_*` turn facts into findings, purely. `session` is the order in which ranks do it.
"""
