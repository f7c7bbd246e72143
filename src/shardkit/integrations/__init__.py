"""shardkit inside of packages that train models: one module for each, which imports the package.

They change what those packages do for FSDP2, and so know certain versions of them.
"""
