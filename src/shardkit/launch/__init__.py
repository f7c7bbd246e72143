"""Starting the ranks of a script: on one host or several, by itself or under SLURM.

`start` puts together what torchrun is told, from the command line and a config file, and runs
torchrun's agent with it. It shows what ranks write, and last how they failed, and finds the
address by which other hosts reach this one. In each rank `worker` runs the script. `slurm` reads
what SLURM says of its tasks.
"""

from shardkit.launch.slurm import slurm_environment
from shardkit.launch.start import launch

__all__ = ["launch", "slurm_environment"]
