"""Every private name of torch that shardkit uses: why, and until which torch a branch is needed.

Nothing else in shardkit imports a private name of torch. Tried on torch 2.9.0 and 2.13.0 (CPU).
Each module begins with a table of its branches on torch's version.
"""
