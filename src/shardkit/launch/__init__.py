"""Starting the ranks of a script: on one host or several, by itself or under SLURM.

`arguments` puts together what torchrun is told, from the command line and a config file. `start`
runs torchrun's agent with it. In each rank `worker` runs the script. `output` is what a terminal
shows of the ranks, `failures` what it shows last where they fail. `slurm` reads what SLURM says of
its tasks, `network` by which address other hosts reach this one.
"""

from shardkit.launch.slurm import slurm_environment
from shardkit.launch.start import launch

__all__ = ["launch", "slurm_environment"]
