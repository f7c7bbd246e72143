"""Config files as Accelerate's, read and applied; `from_config` is shardkit's function.

`_source` keeps lines, `_fields` names all fields, `_schema` says what they mean and
`_contradictions` which cannot be meant together: no more than reading. `_config` applies them.
"""

from shardkit.config._config import CONFIG_VARIABLE, Config, from_config
from shardkit.config._schema import Parallelism, Settings

__all__ = ["CONFIG_VARIABLE", "Config", "Parallelism", "Settings", "from_config"]
