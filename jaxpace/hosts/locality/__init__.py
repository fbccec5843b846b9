"""What a process runs on: devices, PCIe, NUMA, NICs, limits. Read once at start; context, never a
driver of decisions.

Read from sysfs and procfs under a root, so that a tree copied from another machine or made by a
test reads the same; from `nvidia-ml-py` where it is installed. Needs no JAX and no device.
"""
