"""Config files of Accelerate's format, read and applied; `from_config` is the public function.

`_source` keeps line numbers. `_schema` lists all fields, their meaning, and which of them
contradict each other. `_config` applies them, and `_command` writes such files.
"""

from shardkit.config._config import CONFIG_VARIABLE, Config, from_config
from shardkit.config._schema import Parallelism, Settings

__all__ = ["CONFIG_VARIABLE", "Config", "Parallelism", "Settings", "from_config"]
