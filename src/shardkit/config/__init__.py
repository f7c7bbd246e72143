"""Config files as Accelerate's, read and applied; `from_config` is shardkit's function.

`_source` keeps lines. `_schema` names all fields, what they mean, and which cannot be meant
together. `_config` applies them, and `_command` writes such files.
"""

from shardkit.config._config import CONFIG_VARIABLE, Config, from_config
from shardkit.config._schema import Parallelism, Settings

__all__ = ["CONFIG_VARIABLE", "Config", "Parallelism", "Settings", "from_config"]
