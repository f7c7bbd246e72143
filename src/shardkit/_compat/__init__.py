"""Every private name of torch that shardkit uses: its purpose, and how long a branch is needed.

Nothing else in shardkit imports a private name of torch. Tested on torch 2.9.0, 2.13.0, 2.14.1 and
2.15.0 (CPU).
Each module begins with a table of its branches on torch's version.
"""
