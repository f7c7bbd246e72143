"""shardkit inside of packages that train models; each module imports one package.

They change what those packages do for FSDP2, so they depend on certain versions of them.
"""
