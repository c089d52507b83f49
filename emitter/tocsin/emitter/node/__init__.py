"""The machine: CPU, memory, disks, network, GPUs, sampled once for all jobs."""
